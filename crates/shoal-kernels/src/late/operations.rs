//! [`Device`] for a processor that works behind the host's back: each operation notes what it works on and is put into
//! the line.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use super::{LateDevice, Lent, LentRows, PlayedSpace, lent_sum};
use crate::buffer::HostBuffer;
use crate::cpu::CpuDevice;
use crate::device::{
    AdamW, AttentionBackward, AttentionShape, ClassLoss, Device, DropoutSite, Gelu, Guard, Linear, LossMode,
    Mark, Mat, MatMut, NormKind, Pass, PatchShape, Result, SCALAR_ELEMENTS, Sgd, Sum, Updated,
};
use crate::memory::Arena;
use crate::tensor::{Element, Tensor};

/// Bytes of a piece that the host fills or empties at a time: few, so that most copies have several.
const PIECE_BYTES: usize = 4 << 10;

/// Where the bytes of a copy are cut.
fn pieces(bytes: usize) -> impl Iterator<Item = Range<usize>> {
    (0..bytes).step_by(PIECE_BYTES).map(move |start| start..(start + PIECE_BYTES).min(bytes))
}

fn copy_runs(runs: Vec<Range<usize>>, from: &[u8], to: &mut [u8]) {
    runs.into_iter().for_each(|run| to[run.clone()].copy_from_slice(&from[run]));
}

/// A weight matrix that work in the line reads.
struct LentWeight {
    weight: Lent,
    inputs: usize,
    outputs: usize,
    in_out: bool,
}

impl LentWeight {
    fn read(of: Linear) -> LentWeight {
        let Linear { weight, inputs, outputs, in_out } = of;
        LentWeight { weight: Lent::read(weight), inputs, outputs, in_out }
    }

    fn linear(&self) -> Linear<'_> {
        let LentWeight { ref weight, inputs, outputs, in_out } = *self;
        Linear { weight: &weight.0, inputs, outputs, in_out }
    }
}

struct LentSite {
    rate: f32,
    key: u64,
    step: Option<Lent>,
    first_sample: u64,
}

impl LentSite {
    fn read(site: DropoutSite) -> LentSite {
        let DropoutSite { rate, key, step, first_sample } = site;
        LentSite { rate, key, step: step.map(Lent::read), first_sample }
    }

    fn site(&self) -> DropoutSite<'_> {
        let LentSite { rate, key, ref step, first_sample } = *self;
        DropoutSite { rate, key, step: Lent::maybe(step), first_sample }
    }
}

struct LentUpdate {
    gradient: Lent,
    state: Vec<Lent>,
    parameter: Lent,
    copy: Option<Lent>,
    weight_decay: f32,
}

impl LateDevice {
    /// Puts an update of all these tensors into the line.
    fn update_later(
        &self,
        guard: Guard,
        tensors: &mut [Updated],
        update: impl Fn(&CpuDevice, Guard, &mut [Updated]) -> Result + Send + Sync + 'static,
    ) -> Result {
        let Guard { norm_squared, loss, scale, clip_norm } = guard;
        let (norm_squared, loss) = (Lent::read(norm_squared), Lent::read(loss));
        let lend = |updated: &mut Updated| LentUpdate {
            gradient: Lent::read(updated.gradient),
            state: updated.state.iter_mut().map(Lent::written).collect(),
            parameter: Lent::written(updated.parameter),
            copy: Lent::written_maybe(updated.copy.as_deref_mut()),
            weight_decay: updated.weight_decay,
        };
        let lent: Vec<LentUpdate> = tensors.iter_mut().map(lend).collect();
        self.later(move |device| {
            let guard = Guard { norm_squared: &norm_squared.0, loss: &loss.0, scale, clip_norm };
            let mut written: Vec<(Vec<Tensor>, Tensor, Option<Tensor>)> = lent
                .iter()
                .map(|lent| {
                    let state = lent.state.iter().map(Lent::mutable).collect();
                    (state, lent.parameter.mutable(), Lent::maybe_mutable(&lent.copy))
                })
                .collect();
            let mut updated: Vec<Updated> = lent
                .iter()
                .zip(&mut written)
                .map(|(lent, (state, parameter, copy))| Updated {
                    gradient: &lent.gradient.0,
                    state,
                    parameter,
                    copy: copy.as_mut(),
                    weight_decay: lent.weight_decay,
                })
                .collect();
            update(device, guard, &mut updated)
        })
    }
}

impl Drop for LateDevice {
    fn drop(&mut self) {
        self.queue.close();
    }
}

impl Device for LateDevice {
    fn name(&self) -> &str {
        self.arena.device()
    }

    fn begin_pass(&self, key: u64) -> Result<Pass> {
        Ok(self.passes.begin(&self.arena, key))
    }

    fn end_pass(&self) -> Result {
        self.passes.end(&self.queue)
    }

    fn abandon_pass(&self) {
        self.passes.abandon();
    }

    fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    fn run(&self, work: &mut (dyn FnMut() + Send)) {
        work();
    }

    fn wait(&self) -> Result {
        self.wait_for_all()
    }

    fn computes(&self, element: Element) -> bool {
        element == Element::F32
    }

    fn set_scalar(&self, scalar: &mut Tensor, value: f64) -> Result {
        let scalar = Lent::written(scalar);
        self.later(move |device| device.set_scalar(&mut scalar.mutable(), value))
    }

    fn scalars(&self, scalars: &[&Tensor]) -> Result<Vec<f64>> {
        self.wait_for_all()?;
        let value = |scalar: &&Tensor| {
            assert_eq!(scalar.len(), SCALAR_ELEMENTS);
            crate::cpu::read_scalar(&Lent::read(scalar).0)
        };
        Ok(scalars.iter().map(value).collect())
    }

    fn zero(&self, tensor: &mut Tensor) -> Result {
        let tensor = Lent::written(tensor);
        self.later(move |device| device.zero(&mut tensor.mutable()))
    }

    fn convert(&self, from: &Tensor, to: &mut Tensor) -> Result {
        let (from, to) = (Lent::read(from), Lent::written(to));
        self.later(move |device| device.convert(&from.0, &mut to.mutable()))
    }

    fn write_floats(&self, tensor: &mut Tensor, fill: &mut dyn FnMut(&mut [f32])) -> Result {
        let mut values = vec![0.0f32; tensor.len()];
        fill(&mut values);
        self.wait_for_all()?;
        Lent::written(tensor).mutable().floats_mut().copy_from_slice(&values);
        Ok(())
    }

    fn host_floats<'a>(&self, tensor: &'a Tensor) -> Result<Cow<'a, [f32]>> {
        self.wait_for_all()?;
        Ok(Cow::Owned(Lent::read(tensor).0.floats().to_vec()))
    }

    fn mark(&self) -> Result<Mark> {
        self.passes.assert_nothing_waits();
        Ok(self.queue.mark())
    }

    fn host_bytes<'a>(
        &self,
        after: &Mark,
        tensor: &'a Tensor,
        elements: Range<usize>,
    ) -> Result<Cow<'a, [u8]>> {
        let mut bytes = Vec::with_capacity(elements.len() * tensor.element().bytes());
        self.read_bytes(after, tensor, elements, &mut |_, piece| bytes.extend_from_slice(piece))?;
        Ok(Cow::Owned(bytes))
    }

    fn read_bytes(
        &self,
        after: &Mark,
        tensor: &Tensor,
        elements: Range<usize>,
        take: &mut dyn FnMut(usize, &[u8]),
    ) -> Result {
        self.copy(after, tensor, elements, |bytes| {
            pieces(bytes.len()).for_each(|piece| take(piece.start, &bytes[piece]));
        })
    }

    fn write_bytes(
        &self,
        after: &Mark,
        tensor: &mut Tensor,
        elements: Range<usize>,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result {
        tensor.assert_alone();
        self.copy(after, tensor, elements, |bytes| {
            for piece in pieces(bytes.len()) {
                // What is filled is not the device's memory: it must all be written, whatever was there.
                let mut filled = vec![0xff; piece.len()];
                fill(piece.start, &mut filled);
                bytes[piece].copy_from_slice(&filled);
            }
        })
    }

    fn host_arena(&self, name: &str, budget: u64) -> Result<Arc<Arena>> {
        Ok(PlayedSpace::arena(name, budget, false)?)
    }

    fn copy_in(
        &self,
        after: &Mark,
        from: &Tensor,
        elements: Range<usize>,
        to: &mut Tensor,
        first: usize,
    ) -> Result<bool> {
        assert_eq!(from.element(), to.element());
        let Some(runs) = from.locked_runs(elements.clone()) else { return Ok(false) };
        let there = first..first + elements.len();
        let from = from.bytes_of(elements);
        to.assert_alone();
        self.copy(after, to, there, |to| copy_runs(runs, from, to))?;
        Ok(true)
    }

    fn copy_out(
        &self,
        after: &Mark,
        from: &Tensor,
        elements: Range<usize>,
        to: &mut Tensor,
        first: usize,
    ) -> Result<bool> {
        assert_eq!(from.element(), to.element());
        let there = first..first + elements.len();
        let Some(runs) = to.locked_runs(there.clone()) else { return Ok(false) };
        let to = to.bytes_of_mut(there);
        self.copy(after, from, elements, |from| copy_runs(runs, from, to))?;
        Ok(true)
    }

    fn copy_to_buffer(
        &self,
        after: &Mark,
        from: &Tensor,
        elements: Range<usize>,
        to: &mut HostBuffer,
        first: usize,
    ) -> Result<bool> {
        let there = first..first + elements.len() * from.element().bytes();
        let Some(runs) = to.locked_runs(there.clone()) else { return Ok(false) };
        let to = &mut to[there];
        self.copy(after, from, elements, |from| copy_runs(runs, from, to))?;
        Ok(true)
    }

    fn copy_from_buffer(
        &self,
        after: &Mark,
        from: &HostBuffer,
        first: usize,
        to: &mut Tensor,
        elements: Range<usize>,
    ) -> Result<bool> {
        let here = first..first + elements.len() * to.element().bytes();
        let Some(runs) = from.locked_runs(here.clone()) else { return Ok(false) };
        let from = &from[here];
        to.assert_alone();
        self.copy(after, to, elements, |to| copy_runs(runs, from, to))?;
        Ok(true)
    }

    fn write_integers(&self, tensor: &mut Tensor, values: &[i32]) -> Result {
        let (tensor, values) = (Lent::written(tensor), values.to_vec());
        self.later(move |device| device.write_integers(&mut tensor.mutable(), &values))
    }

    fn linear(
        &self,
        x: Mat,
        weight: Linear,
        bias: Option<&Tensor>,
        residual: Option<&Tensor>,
        out: MatMut,
    ) -> Result {
        let (x, weight, out) = (LentRows::read(x), LentWeight::read(weight), LentRows::written(out));
        let (bias, residual) = (bias.map(Lent::read), residual.map(Lent::read));
        self.later(move |device| {
            let (bias, residual) = (Lent::maybe(&bias), Lent::maybe(&residual));
            let target = &mut out.tensor.mutable();
            device.linear(x.mat(), weight.linear(), bias, residual, out.mutable_in(target))
        })
    }

    fn linear_gelu_input_gradient(
        &self,
        kind: Gelu,
        dy: Mat,
        weight: Linear,
        before: &Tensor,
        dx: &mut Tensor,
    ) -> Result {
        let (dy, weight) = (LentRows::read(dy), LentWeight::read(weight));
        let (before, dx) = (Lent::read(before), Lent::written(dx));
        self.later(move |device| {
            let dx = &mut dx.mutable();
            device.linear_gelu_input_gradient(kind, dy.mat(), weight.linear(), &before.0, dx)
        })
    }

    fn linear_input_gradient(&self, dy: Mat, weight: Linear, dx: MatMut, accumulate: bool) -> Result {
        let (dy, weight, dx) = (LentRows::read(dy), LentWeight::read(weight), LentRows::written(dx));
        self.later(move |device| {
            let target = &mut dx.tensor.mutable();
            device.linear_input_gradient(dy.mat(), weight.linear(), dx.mutable_in(target), accumulate)
        })
    }

    fn linear_weight_gradient(
        &self,
        x: Mat,
        dy: Mat,
        gradient: &mut Tensor,
        in_out: bool,
        accumulate: bool,
    ) -> Result {
        let (x, dy, gradient) = (LentRows::read(x), LentRows::read(dy), Lent::written(gradient));
        self.later(move |device| {
            device.linear_weight_gradient(x.mat(), dy.mat(), &mut gradient.mutable(), in_out, accumulate)
        })
    }

    fn bias_gradient(&self, dy: Mat, gradient: &mut Tensor, accumulate: bool) -> Result {
        let (dy, gradient) = (LentRows::read(dy), Lent::written(gradient));
        self.later(move |device| device.bias_gradient(dy.mat(), &mut gradient.mutable(), accumulate))
    }

    fn norm(
        &self,
        kind: NormKind,
        eps: f32,
        x: Mat,
        weight: &Tensor,
        bias: Option<&Tensor>,
        statistics: &mut Tensor,
        out: &mut Tensor,
    ) -> Result {
        let (x, weight, bias) = (LentRows::read(x), Lent::read(weight), bias.map(Lent::read));
        let (statistics, out) = (Lent::written(statistics), Lent::written(out));
        self.later(move |device| {
            let (statistics, out) = (&mut statistics.mutable(), &mut out.mutable());
            device.norm(kind, eps, x.mat(), &weight.0, Lent::maybe(&bias), statistics, out)
        })
    }

    fn norm_backward(
        &self,
        kind: NormKind,
        x: Mat,
        weight: &Tensor,
        bias: Option<&Tensor>,
        statistics: &Tensor,
        dy: &mut Tensor,
        weight_gradient: Sum,
        bias_gradient: Option<Sum>,
        dx: Sum,
        dx_sums: Option<Sum>,
    ) -> Result {
        let (x, weight, bias) = (LentRows::read(x), Lent::read(weight), bias.map(Lent::read));
        let (statistics, dy) = (Lent::read(statistics), Lent::written(dy));
        let (weight_gradient, dx) = (lent_sum(weight_gradient), lent_sum(dx));
        let (bias_gradient, dx_sums) = (bias_gradient.map(lent_sum), dx_sums.map(lent_sum));
        self.later(move |device| {
            let mutable = |sum: &Option<(Lent, bool)>| sum.as_ref().map(|(sum, adds)| (sum.mutable(), *adds));
            let (mut bias_gradient, mut dx_sums) = (mutable(&bias_gradient), mutable(&dx_sums));
            device.norm_backward(
                kind,
                x.mat(),
                &weight.0,
                Lent::maybe(&bias),
                &statistics.0,
                &mut dy.mutable(),
                (&mut weight_gradient.0.mutable(), weight_gradient.1),
                bias_gradient.as_mut().map(|(sum, adds)| (sum, *adds)),
                (&mut dx.0.mutable(), dx.1),
                dx_sums.as_mut().map(|(sum, adds)| (sum, *adds)),
            )
        })
    }

    fn gelu(&self, kind: Gelu, x: &Tensor, out: &mut Tensor) -> Result {
        let (x, out) = (Lent::read(x), Lent::written(out));
        self.later(move |device| device.gelu(kind, &x.0, &mut out.mutable()))
    }

    fn gelu_backward(&self, kind: Gelu, x: &mut Tensor, gradient: &mut Tensor) -> Result {
        let (x, gradient) = (Lent::written(x), Lent::written(gradient));
        self.later(move |device| device.gelu_backward(kind, &mut x.mutable(), &mut gradient.mutable()))
    }

    fn swiglu(&self, gate: &Tensor, up: &Tensor, out: &mut Tensor) -> Result {
        let (gate, up, out) = (Lent::read(gate), Lent::read(up), Lent::written(out));
        self.later(move |device| device.swiglu(&gate.0, &up.0, &mut out.mutable()))
    }

    fn swiglu_backward(&self, gate: &mut Tensor, up: &mut Tensor, gradient: &mut Tensor) -> Result {
        let (gate, up, gradient) = (Lent::written(gate), Lent::written(up), Lent::written(gradient));
        self.later(move |device| {
            device.swiglu_backward(&mut gate.mutable(), &mut up.mutable(), &mut gradient.mutable())
        })
    }

    fn rotary(&self, shape: AttentionShape, table: &Tensor, inverse: bool, qkv: &mut Tensor) -> Result {
        let (table, qkv) = (Lent::read(table), Lent::written(qkv));
        self.later(move |device| device.rotary(shape, &table.0, inverse, &mut qkv.mutable()))
    }

    fn attention(
        &self,
        shape: AttentionShape,
        dropout: Option<DropoutSite>,
        lengths: Option<&Tensor>,
        qkv: &Tensor,
        out: &mut Tensor,
        logsumexp: &mut Tensor,
    ) -> Result {
        let (dropout, lengths, qkv) = (dropout.map(LentSite::read), lengths.map(Lent::read), Lent::read(qkv));
        let (out, logsumexp) = (Lent::written(out), Lent::written(logsumexp));
        self.later(move |device| {
            let dropout = dropout.as_ref().map(LentSite::site);
            let (out, logsumexp) = (&mut out.mutable(), &mut logsumexp.mutable());
            device.attention(shape, dropout, Lent::maybe(&lengths), &qkv.0, out, logsumexp)
        })
    }

    fn attention_backward(
        &self,
        shape: AttentionShape,
        dropout: Option<DropoutSite>,
        of: AttentionBackward,
    ) -> Result {
        let (dropout, lengths) = (dropout.map(LentSite::read), of.lengths.map(Lent::read));
        let (qkv, out, logsumexp) = (Lent::read(of.qkv), Lent::read(of.out), Lent::read(of.logsumexp));
        let out_gradient = Lent::read(of.out_gradient);
        let (scratch, qkv_gradient) = (Lent::written(of.scratch), Lent::written(of.qkv_gradient));
        self.later(move |device| {
            let of = AttentionBackward {
                lengths: Lent::maybe(&lengths),
                qkv: &qkv.0,
                out: &out.0,
                logsumexp: &logsumexp.0,
                out_gradient: &out_gradient.0,
                scratch: &mut scratch.mutable(),
                qkv_gradient: &mut qkv_gradient.mutable(),
            };
            device.attention_backward(shape, dropout.as_ref().map(LentSite::site), of)
        })
    }

    fn embed(
        &self,
        tokens: &Tensor,
        sequence: usize,
        width: usize,
        table: &Tensor,
        positions: Option<&Tensor>,
        types: Option<&Tensor>,
        out: &mut Tensor,
    ) -> Result {
        let (tokens, table, out) = (Lent::read(tokens), Lent::read(table), Lent::written(out));
        let (positions, types) = (positions.map(Lent::read), types.map(Lent::read));
        self.later(move |device| {
            let (positions, types) = (Lent::maybe(&positions), Lent::maybe(&types));
            device.embed(&tokens.0, sequence, width, &table.0, positions, types, &mut out.mutable())
        })
    }

    fn embed_gradient(
        &self,
        tokens: &Tensor,
        width: usize,
        dy: &Tensor,
        gradient: &mut Tensor,
        accumulate: bool,
    ) -> Result {
        let (tokens, dy, gradient) = (Lent::read(tokens), Lent::read(dy), Lent::written(gradient));
        self.later(move |device| {
            device.embed_gradient(&tokens.0, width, &dy.0, &mut gradient.mutable(), accumulate)
        })
    }

    fn position_gradient(
        &self,
        sequence: usize,
        width: usize,
        dy: &Tensor,
        gradient: &mut Tensor,
        accumulate: bool,
    ) -> Result {
        let (dy, gradient) = (Lent::read(dy), Lent::written(gradient));
        self.later(move |device| {
            device.position_gradient(sequence, width, &dy.0, &mut gradient.mutable(), accumulate)
        })
    }

    fn patches(&self, shape: PatchShape, images: &Tensor, out: &mut Tensor) -> Result {
        let (images, out) = (Lent::read(images), Lent::written(out));
        self.later(move |device| device.patches(shape, &images.0, &mut out.mutable()))
    }

    fn place_rows(
        &self,
        sequence: usize,
        width: usize,
        first: &Tensor,
        positions: &Tensor,
        out: &mut Tensor,
    ) -> Result {
        let (first, positions, out) = (Lent::read(first), Lent::read(positions), Lent::written(out));
        self.later(move |device| {
            device.place_rows(sequence, width, &first.0, &positions.0, &mut out.mutable())
        })
    }

    fn set_rows(&self, from: Option<Mat>, to: MatMut) -> Result {
        let (from, to) = (from.map(LentRows::read), LentRows::written(to));
        self.later(move |device| {
            let target = &mut to.tensor.mutable();
            device.set_rows(from.as_ref().map(LentRows::mat), to.mutable_in(target))
        })
    }

    fn dropout(
        &self,
        site: DropoutSite,
        sequence: usize,
        cols: usize,
        residual: Option<&Tensor>,
        out: &mut Tensor,
    ) -> Result {
        let (site, residual, out) = (LentSite::read(site), residual.map(Lent::read), Lent::written(out));
        self.later(move |device| {
            device.dropout(site.site(), sequence, cols, Lent::maybe(&residual), &mut out.mutable())
        })
    }

    fn dropout_copy(
        &self,
        site: DropoutSite,
        sequence: usize,
        cols: usize,
        x: &Tensor,
        out: &mut Tensor,
    ) -> Result {
        let (site, x, out) = (LentSite::read(site), Lent::read(x), Lent::written(out));
        self.later(move |device| device.dropout_copy(site.site(), sequence, cols, &x.0, &mut out.mutable()))
    }

    fn cross_entropy(
        &self,
        targets: &Tensor,
        first: usize,
        mode: LossMode,
        logits: MatMut,
        loss: &mut Tensor,
    ) -> Result {
        let (targets, logits, loss) = (Lent::read(targets), LentRows::written(logits), Lent::written(loss));
        self.later(move |device| {
            let target = &mut logits.tensor.mutable();
            device.cross_entropy(&targets.0, first, mode, logits.mutable_in(target), &mut loss.mutable())
        })
    }

    fn class_loss(
        &self,
        targets: &Tensor,
        first: usize,
        settings: ClassLoss,
        logits: MatMut,
        loss: &mut Tensor,
        correct: Option<&mut Tensor>,
    ) -> Result {
        let (targets, logits) = (Lent::read(targets), LentRows::written(logits));
        let (loss, correct) = (Lent::written(loss), Lent::written_maybe(correct));
        self.later(move |device| {
            let (target, mut correct) = (&mut logits.tensor.mutable(), Lent::maybe_mutable(&correct));
            let (logits, loss) = (logits.mutable_in(target), &mut loss.mutable());
            device.class_loss(&targets.0, first, settings, logits, loss, correct.as_mut())
        })
    }

    fn sum_squares(&self, tensors: &[&Tensor], sum: &mut Tensor) -> Result {
        let tensors: Vec<Lent> = tensors.iter().map(|tensor| Lent::read(tensor)).collect();
        let sum = Lent::written(sum);
        self.later(move |device| {
            let tensors: Vec<&Tensor> = tensors.iter().map(|lent| &lent.0).collect();
            device.sum_squares(&tensors, &mut sum.mutable())
        })
    }

    fn adamw(&self, settings: &AdamW, guard: Guard, tensors: &mut [Updated]) -> Result {
        let settings = *settings;
        self.update_later(guard, tensors, move |device, guard, tensors| {
            device.adamw(&settings, guard, tensors)
        })
    }

    fn sgd(&self, settings: &Sgd, guard: Guard, tensors: &mut [Updated]) -> Result {
        let settings = *settings;
        self.update_later(guard, tensors, move |device, guard, tensors| device.sgd(&settings, guard, tensors))
    }
}
