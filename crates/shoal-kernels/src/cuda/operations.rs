//! [`Device`] for a GPU: each operation checks its shapes and queues its kernels. Whole tensors start at
//! multiples of 256 bytes, which kernels that take no stride count on.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use super::launch::{Address, DropoutParameter, Grid, Parameter, at_or_null, launch, piece};
use super::locked::LockedSpace;
use super::{CudaDevice, copies, element_of};
use crate::buffer::HostBuffer;
use crate::device::{
    AdamW, AttentionBackward, AttentionShape, ClassLoss, Device, DropoutSite, Gelu, Guard, Linear, LossMode,
    Mark, Mat, MatMut, NormKind, Pass, PatchShape, Result, SCALAR_ELEMENTS, Sgd, Span, Stamp, Sum, Updated,
};
use crate::memory::Arena;
use crate::tensor::{Element, Tensor};

/// `Turned` of elementwise.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct TurnedParameter {
    rows: i64,
    sequence: i64,
    width: i64,
    turned: u32,
    half: u32,
    sign: f32,
}

// SAFETY: struct Turned.
unsafe impl Parameter for TurnedParameter {}

impl CudaDevice {
    fn drop_rows(
        &self,
        site: DropoutSite,
        sequence: usize,
        cols: usize,
        x: Address,
        residual: Option<&Tensor>,
        out: &mut Tensor,
    ) -> Result {
        let (rows, element) = (out.len() / cols, out.element());
        assert_eq!(rows * cols, out.len());
        assert!(residual.is_none_or(|residual| residual.len() == out.len() && residual.element() == element));
        let site = DropoutParameter::from(Some(site));
        let (grid, residual, out) = (Grid::warps(rows), at_or_null(residual), out.at(0));
        // SAFETY: one warp for each whole row; the lengths agree.
        unsafe { launch!(self, "dropout" of element, grid, site, rows, sequence, cols, x, residual, out) }
    }

    /// `gradient *= gelu'(x)`
    pub(super) fn gelu_slope(&self, kind: Gelu, x: &Tensor, gradient: &mut Tensor) -> Result {
        let (count, element) = (x.len(), element_of(&[x, gradient]));
        assert_eq!(gradient.len(), count);
        let grid = Grid::walk(count, element);
        let name = match kind {
            Gelu::Tanh => "gelu_slope",
            Gelu::Erf => "gelu_erf_slope",
        };
        // SAFETY: the lengths agree.
        unsafe { launch!(self, name of element, grid, x.at(0), gradient.at(0), count) }
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn stamp(&self) -> Result<Stamp> {
        self.context.stamp()
    }

    fn seconds_between(&self, stamps: Vec<Stamp>) -> Result<Vec<f64>> {
        self.context.seconds_between(stamps)
    }

    fn begin_pass(&self, key: u64) -> Result<Pass> {
        self.passes.begin(&self.context, &self.arena, key)
    }

    fn end_pass(&self) -> Result {
        self.passes.end(&self.context)
    }

    fn abandon_pass(&self) {
        self.passes.abandon(&self.context);
    }

    fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    fn run(&self, work: &mut (dyn FnMut() + Send)) {
        work();
    }

    fn wait(&self) -> Result {
        self.context.wait()
    }

    fn driver_bytes(&self) -> Option<u64> {
        let free = self.context.free_bytes().ok()?;
        Some(self.facts.memory_bytes.saturating_sub(free))
    }

    fn profile(&self, on: bool) -> Result<Vec<Span>> {
        self.context.switch_profile(on)
    }

    fn computes(&self, element: Element) -> bool {
        self.facts.computes(element)
    }

    fn set_scalar(&self, scalar: &mut Tensor, value: f64) -> Result {
        assert_eq!(scalar.len(), SCALAR_ELEMENTS);
        let grid = Grid { blocks: [1, 1, 1], threads: [1, 1], shared_bytes: 0 };
        // SAFETY: a scalar holds one f64.
        unsafe { launch!(self, "set_scalar", grid, scalar.at(0), value) }
    }

    fn scalars(&self, scalars: &[&Tensor]) -> Result<Vec<f64>> {
        assert!(scalars.iter().all(|scalar| scalar.len() == SCALAR_ELEMENTS));
        let addresses: Vec<u64> = scalars.iter().map(|scalar| scalar.at(0).0).collect();
        // What a panic left there is written before it is read.
        let mut landing = self.landing.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: as above.
        unsafe { landing.read(&addresses) }
    }

    fn zero(&self, tensor: &mut Tensor) -> Result {
        // A block ends where its last whole word does, or later.
        let words = (tensor.element().bytes() * tensor.len()).div_ceil(4);
        // SAFETY: the tensor's block is ours to write.
        unsafe { self.context.clear(tensor.at(0).0, words) }
    }

    fn convert(&self, from: &Tensor, to: &mut Tensor) -> Result {
        assert_eq!(from.element(), Element::F32);
        let (count, length, element) = (from.len(), to.len(), to.element());
        assert!(count <= length);
        let grid = Grid::pieces(length, element, 1);
        // SAFETY: both are as long as said.
        unsafe { launch!(self, "convert" of element, grid, from.at(0), count, to.at(0), length) }
    }

    fn write_floats(&self, tensor: &mut Tensor, fill: &mut dyn FnMut(&mut [f32])) -> Result {
        let mut values = vec![0.0f32; tensor.len()];
        fill(&mut values);
        let (at, element) = (tensor.at(0).0, tensor.element());
        if element == Element::F32 {
            // SAFETY: the tensor is that long and ours to write.
            return unsafe { self.context.copy_in(at, &values) };
        }
        let halves: Vec<u16> = values.into_iter().map(|value| element.encode(value)).collect();
        // SAFETY: as above.
        unsafe { self.context.copy_in(at, &halves) }
    }

    fn host_floats<'a>(&self, tensor: &'a Tensor) -> Result<Cow<'a, [f32]>> {
        let (at, element) = (tensor.at(0).0, tensor.element());
        if element == Element::F32 {
            let mut values = vec![0.0f32; tensor.len()];
            // SAFETY: the tensor is that long.
            unsafe { self.context.copy_out(&mut values, at) }?;
            return Ok(Cow::Owned(values));
        }
        let mut halves = vec![0u16; tensor.len()];
        // SAFETY: as above.
        unsafe { self.context.copy_out(&mut halves, at) }?;
        Ok(Cow::Owned(halves.into_iter().map(|bits| element.decode(bits)).collect()))
    }

    fn mark(&self) -> Result<Mark> {
        copies::mark(&self.context)
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
        assert!(elements.start <= elements.end && elements.end <= tensor.len());
        let bytes = elements.len() * tensor.element().bytes();
        // SAFETY: the tensor is that long, and borrowed: nothing is asked of the device that writes it.
        unsafe { self.copies.read(after, tensor.at(elements.start).0, bytes, take) }
    }

    fn write_bytes(
        &self,
        after: &Mark,
        tensor: &mut Tensor,
        elements: Range<usize>,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result {
        assert!(elements.start <= elements.end && elements.end <= tensor.len());
        let bytes = elements.len() * tensor.element().bytes();
        // SAFETY: the tensor is that long, and ours to write: what was asked of it before is over after the mark.
        unsafe { self.copies.write(after, tensor.at(elements.start).0, bytes, fill) }
    }

    fn host_arena(&self, name: &str, budget: u64) -> Result<Arc<Arena>> {
        let space = LockedSpace::reserve(self.context.clone(), name, budget)?;
        Ok(Arena::over(name, budget, Box::new(space), false))
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
        assert!(!to.is_on_host() && first + elements.len() <= to.len());
        let Some(runs) = from.locked_runs(elements.clone()) else { return Ok(false) };
        // SAFETY: `to` is that long, and ours to write: what was asked of it before is over after the mark.
        unsafe { self.copies.copy_in(after, to.at(first).0, from.bytes_of(elements), &runs) }?;
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
        assert!(!from.is_on_host() && elements.start <= elements.end && elements.end <= from.len());
        let there = first..first + elements.len();
        let Some(runs) = to.locked_runs(there.clone()) else { return Ok(false) };
        let at = from.at(elements.start).0;
        // SAFETY: `from` is that long, and borrowed: nothing is asked of the device that writes it.
        unsafe { self.copies.copy_out(after, at, to.bytes_of_mut(there), &runs) }?;
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
        assert!(!from.is_on_host() && elements.start <= elements.end && elements.end <= from.len());
        let there = first..first + elements.len() * from.element().bytes();
        let Some(runs) = to.locked_runs(there.clone()) else { return Ok(false) };
        let at = from.at(elements.start).0;
        // SAFETY: `from` is that long, and borrowed: nothing is asked of the device that writes it.
        unsafe { self.copies.copy_out(after, at, &mut to[there], &runs) }?;
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
        assert!(!to.is_on_host() && elements.start <= elements.end && elements.end <= to.len());
        let here = first..first + elements.len() * to.element().bytes();
        let Some(runs) = from.locked_runs(here.clone()) else { return Ok(false) };
        // SAFETY: `to` is that long, and ours to write: what was asked of it before is over after the mark.
        unsafe { self.copies.copy_in(after, to.at(elements.start).0, &from[here], &runs) }?;
        Ok(true)
    }

    fn write_integers(&self, tensor: &mut Tensor, values: &[i32]) -> Result {
        assert_eq!(tensor.len(), values.len());
        // What a panic left there is overwritten.
        let mut departure = self.departure.lock().unwrap_or_else(PoisonError::into_inner);
        let to = tensor.at(0).0;
        // SAFETY: the tensor is that long and ours to write.
        if unsafe { departure.send(to, values) }? {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { self.context.copy_in(to, values) }
    }

    fn linear(
        &self,
        x: Mat,
        weight: Linear,
        bias: Option<&Tensor>,
        residual: Option<&Tensor>,
        out: MatMut,
    ) -> Result {
        self.linear_forward(x, weight, bias, residual, out)
    }

    fn linear_gelu_input_gradient(
        &self,
        kind: Gelu,
        dy: Mat,
        weight: Linear,
        before: &Tensor,
        dx: &mut Tensor,
    ) -> Result {
        self.gelu_then_linear_dx(kind, dy, weight, before, dx)
    }

    fn linear_gelu(
        &self,
        kind: Gelu,
        x: Mat,
        weight: Linear,
        bias: Option<&Tensor>,
        before: &mut Tensor,
        out: &mut Tensor,
    ) -> Result {
        self.linear_then_gelu(kind, x, weight, bias, before, out)
    }

    fn linear_input_gradient(&self, dy: Mat, weight: Linear, dx: MatMut, accumulate: bool) -> Result {
        self.linear_dx(dy, weight, dx, accumulate)
    }

    fn linear_weight_gradient(
        &self,
        x: Mat,
        dy: Mat,
        gradient: &mut Tensor,
        in_out: bool,
        accumulate: bool,
    ) -> Result {
        self.linear_dw(x, dy, gradient, in_out, accumulate)
    }

    fn bias_gradient(&self, dy: Mat, gradient: &mut Tensor, accumulate: bool) -> Result {
        self.column_sums(dy, gradient, accumulate)
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
        self.norm_forward(kind, eps, x, weight, bias, statistics, out)
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
        self.norm_gradients(
            kind,
            x,
            weight,
            bias,
            statistics,
            dy,
            weight_gradient,
            bias_gradient,
            dx,
            dx_sums,
        )
    }

    fn gelu(&self, kind: Gelu, x: &Tensor, out: &mut Tensor) -> Result {
        let (count, element) = (x.len(), element_of(&[x, out]));
        assert_eq!(out.len(), count);
        let grid = Grid::walk(count, element);
        let name = match kind {
            Gelu::Tanh => "gelu",
            Gelu::Erf => "gelu_erf",
        };
        // SAFETY: the lengths agree; likewise below.
        unsafe { launch!(self, name of element, grid, x.at(0), out.at(0), count) }
    }

    fn gelu_backward(&self, kind: Gelu, x: &mut Tensor, gradient: &mut Tensor) -> Result {
        let (count, element) = (x.len(), element_of(&[x, gradient]));
        assert_eq!(gradient.len(), count);
        let grid = Grid::walk(count, element);
        let name = match kind {
            Gelu::Tanh => "gelu_backward",
            Gelu::Erf => "gelu_erf_backward",
        };
        // SAFETY: as above.
        unsafe { launch!(self, name of element, grid, x.at(0), gradient.at(0), count) }
    }

    fn swiglu(&self, gate: &Tensor, up: &Tensor, out: &mut Tensor) -> Result {
        let (count, element) = (out.len(), element_of(&[gate, up, out]));
        assert_eq!((gate.len(), up.len()), (count, count));
        let grid = Grid::walk(count, element);
        // SAFETY: as above.
        unsafe { launch!(self, "swiglu" of element, grid, gate.at(0), up.at(0), out.at(0), count) }
    }

    fn swiglu_backward(&self, gate: &mut Tensor, up: &mut Tensor, gradient: &mut Tensor) -> Result {
        let (count, element) = (gradient.len(), element_of(&[gate, up, gradient]));
        assert_eq!((gate.len(), up.len()), (count, count));
        let (grid, gate, up) = (Grid::walk(count, element), gate.at(0), up.at(0));
        // SAFETY: as above.
        unsafe { launch!(self, "swiglu_backward" of element, grid, gate, up, gradient.at(0), count) }
    }

    fn rotary(&self, shape: AttentionShape, table: &Tensor, inverse: bool, qkv: &mut Tensor) -> Result {
        let (half, element) = (shape.head_size / 2, qkv.element());
        assert_eq!(qkv.len(), shape.rows() * shape.qkv_width());
        assert_eq!(2 * half, shape.head_size, "a head of pairs");
        assert!(table.len() >= shape.sequence * shape.head_size && table.element() == Element::F32);
        let turned = shape.heads + shape.kv_heads;
        let pairs = if half.is_multiple_of(piece(element)) { piece(element) } else { 1 };
        let units = shape.rows() * turned * (half / pairs);
        assert!(u32::try_from(units).is_ok(), "{units} groups of pairs");
        let of = TurnedParameter {
            rows: shape.rows() as i64,
            sequence: shape.sequence as i64,
            width: shape.qkv_width() as i64,
            turned: turned as u32,
            half: half as u32,
            sign: if inverse { -1.0 } else { 1.0 },
        };
        let grid = self.each(units);
        // SAFETY: lengths of the rows and of the table are asserted.
        unsafe { launch!(self, "rotary" of element, grid, of, table.at(0), qkv.at(0)) }
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
        self.attend(shape, dropout, lengths, qkv, out, logsumexp)
    }

    fn attention_backward(
        &self,
        shape: AttentionShape,
        dropout: Option<DropoutSite>,
        of: AttentionBackward,
    ) -> Result {
        self.attend_backward(shape, dropout, of)
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
        let (count, rows, element) = (tokens.len(), table.len() / width, element_of(&[table, out]));
        assert_eq!((out.len(), tokens.element()), (count * width, Element::F32));
        assert!(positions.is_none_or(|positions| positions.len() >= sequence.min(count) * width));
        assert!(types.is_none_or(|types| types.len() >= width));
        assert!([positions, types].into_iter().flatten().all(|added| added.element() == element));
        let (grid, positions, types) = (Grid::warps(count), at_or_null(positions), at_or_null(types));
        let (tokens, table, out) = (tokens.at(0), table.at(0), out.at(0));
        // SAFETY: lengths are asserted; the kernel checks each token against the table's rows.
        unsafe {
            launch!(
                self,
                "embed" of element,
                grid,
                tokens,
                count,
                sequence,
                width,
                table,
                rows,
                positions,
                types,
                out
            )
        }
    }

    fn embed_gradient(
        &self,
        tokens: &Tensor,
        width: usize,
        dy: &Tensor,
        gradient: &mut Tensor,
        accumulate: bool,
    ) -> Result {
        self.scatter_add(tokens, width, dy, gradient, accumulate)
    }

    fn position_gradient(
        &self,
        sequence: usize,
        width: usize,
        dy: &Tensor,
        gradient: &mut Tensor,
        accumulate: bool,
    ) -> Result {
        let (elements, element) = (sequence * width, dy.element());
        let samples = dy.len() / elements;
        assert_eq!(samples * elements, dy.len());
        assert!(gradient.len() >= elements && gradient.element() == Element::F32);
        if !accumulate {
            // SAFETY: the positions past the sequence.
            unsafe { self.context.clear(gradient.at(elements).0, gradient.len() - elements) }?;
        }
        let (grid, add) = (Grid::pieces(elements, element, 1), i32::from(accumulate));
        let (dy, gradient) = (dy.at(0), gradient.at(0));
        // SAFETY: lengths are asserted.
        unsafe { launch!(self, "position_gradient" of element, grid, samples, elements, dy, gradient, add) }
    }

    fn patches(&self, shape: PatchShape, images: &Tensor, out: &mut Tensor) -> Result {
        self.gather_patches(shape, images, out)
    }

    fn place_rows(
        &self,
        sequence: usize,
        width: usize,
        first: &Tensor,
        positions: &Tensor,
        out: &mut Tensor,
    ) -> Result {
        self.seat_rows(sequence, width, first, positions, out)
    }

    fn set_rows(&self, from: Option<Mat>, to: MatMut) -> Result {
        self.copy_rows(from, to)
    }

    fn dropout(
        &self,
        site: DropoutSite,
        sequence: usize,
        cols: usize,
        residual: Option<&Tensor>,
        out: &mut Tensor,
    ) -> Result {
        self.drop_rows(site, sequence, cols, out.at(0), residual, out)
    }

    fn dropout_copy(
        &self,
        site: DropoutSite,
        sequence: usize,
        cols: usize,
        x: &Tensor,
        out: &mut Tensor,
    ) -> Result {
        assert_eq!((x.len(), x.element()), (out.len(), out.element()));
        self.drop_rows(site, sequence, cols, x.at(0), None, out)
    }

    fn cross_entropy(
        &self,
        targets: &Tensor,
        first: usize,
        mode: LossMode,
        logits: MatMut,
        loss: &mut Tensor,
    ) -> Result {
        self.softmax_loss(targets, first, mode, logits, loss)
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
        self.classes_loss(targets, first, settings, logits, loss, correct)
    }

    fn sum_squares(&self, tensors: &[&Tensor], sum: &mut Tensor) -> Result {
        self.squares(tensors, sum)
    }

    fn adamw(&self, settings: &AdamW, guard: Guard, tensors: &mut [Updated]) -> Result {
        self.adamw_update(settings, guard, tensors)
    }

    fn sgd(&self, settings: &Sgd, guard: Guard, tensors: &mut [Updated]) -> Result {
        self.sgd_update(settings, guard, tensors)
    }
}
