//! [`Device`] for the CPU: each operation enters the device's thread pool and calls its kernel.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use super::CpuDevice;
use crate::device::{
    AdamW, AttentionBackward, AttentionShape, ClassLoss, Device, DropoutSite, Gelu, Guard, Linear, LossMode,
    Mark, Mat, MatMut, NormKind, PatchShape, Result, Sgd, Sum, Updated,
};
use crate::memory::Arena;
use crate::tensor::{Element, Tensor};

/// A scalar's value.
pub(crate) fn read_scalar(scalar: &Tensor) -> f64 {
    let [low, high] = scalar.integers() else { panic!("a scalar has two elements") };
    f64::from_bits(u64::from(*low as u32) | u64::from(*high as u32) << 32)
}

impl CpuDevice {
    pub(super) fn read_scalar(&self, scalar: &Tensor) -> f64 {
        read_scalar(scalar)
    }

    fn write_scalar(&self, scalar: &mut Tensor, value: f64) {
        let bits = value.to_bits();
        scalar.integers_mut().copy_from_slice(&[bits as u32 as i32, (bits >> 32) as u32 as i32]);
    }
}

impl Device for CpuDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    fn run(&self, work: &mut (dyn FnMut() + Send)) {
        self.pool.install(work);
    }

    fn wait(&self) -> Result {
        Ok(())
    }

    fn computes(&self, element: Element) -> bool {
        element == Element::F32
    }

    fn set_scalar(&self, scalar: &mut Tensor, value: f64) -> Result {
        self.write_scalar(scalar, value);
        Ok(())
    }

    fn scalars(&self, scalars: &[&Tensor]) -> Result<Vec<f64>> {
        Ok(scalars.iter().map(|scalar| self.read_scalar(scalar)).collect())
    }

    fn zero(&self, tensor: &mut Tensor) -> Result {
        self.pool.install(|| self.fill_zero(tensor));
        Ok(())
    }

    fn convert(&self, from: &Tensor, to: &mut Tensor) -> Result {
        assert_eq!(from.element(), Element::F32);
        let (count, length, element) = (from.len(), to.len(), to.element());
        self.round(from.bytes_of(0..count), element, to.bytes_of_mut(0..count));
        to.bytes_of_mut(count..length).fill(0);
        Ok(())
    }

    fn write_floats(&self, tensor: &mut Tensor, fill: &mut dyn FnMut(&mut [f32])) -> Result {
        fill(tensor.floats_mut());
        Ok(())
    }

    fn host_floats<'a>(&self, tensor: &'a Tensor) -> Result<Cow<'a, [f32]>> {
        Ok(Cow::Borrowed(tensor.floats()))
    }

    fn host_bytes<'a>(
        &self,
        _after: &Mark,
        tensor: &'a Tensor,
        elements: Range<usize>,
    ) -> Result<Cow<'a, [u8]>> {
        Ok(Cow::Borrowed(tensor.bytes_of(elements)))
    }

    fn write_bytes(
        &self,
        _after: &Mark,
        tensor: &mut Tensor,
        elements: Range<usize>,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result {
        fill(0, tensor.bytes_of_mut(elements));
        Ok(())
    }

    fn write_integers(&self, tensor: &mut Tensor, values: &[i32]) -> Result {
        tensor.integers_mut().copy_from_slice(values);
        Ok(())
    }

    fn linear(
        &self,
        x: Mat,
        weight: Linear,
        bias: Option<&Tensor>,
        residual: Option<&Tensor>,
        out: MatMut,
    ) -> Result {
        self.pool.install(|| self.linear_forward(x, weight, bias, residual, out));
        Ok(())
    }

    fn linear_gelu_input_gradient(
        &self,
        kind: Gelu,
        dy: Mat,
        weight: Linear,
        before: &Tensor,
        dx: &mut Tensor,
    ) -> Result {
        let target = MatMut::new(dx, dy.rows, weight.inputs);
        self.linear_input_gradient(dy, weight, target, false)?;
        self.pool.install(|| self.gelu_slope(kind, before, dx));
        Ok(())
    }

    fn linear_input_gradient(&self, dy: Mat, weight: Linear, dx: MatMut, accumulate: bool) -> Result {
        self.pool.install(|| self.linear_dx(dy, weight, dx, accumulate));
        Ok(())
    }

    fn linear_weight_gradient(
        &self,
        x: Mat,
        dy: Mat,
        gradient: &mut Tensor,
        in_out: bool,
        accumulate: bool,
    ) -> Result {
        self.pool.install(|| self.linear_dw(x, dy, gradient, in_out, accumulate));
        Ok(())
    }

    fn bias_gradient(&self, dy: Mat, gradient: &mut Tensor, accumulate: bool) -> Result {
        self.pool.install(|| self.column_sums(dy, gradient, accumulate));
        Ok(())
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
        self.pool.install(|| self.norm_forward(kind, eps, x, weight, bias, statistics, out));
        Ok(())
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
        (dx, accumulate): Sum,
        dx_sums: Option<Sum>,
    ) -> Result {
        self.pool.install(|| {
            self.norm_dw(kind, x, statistics, dy, weight_gradient, bias_gradient);
            self.norm_dx(kind, x, weight, statistics, dy, dx, accumulate);
            if let Some((sums, accumulate)) = dx_sums {
                self.column_sums(Mat::new(dx, x.rows, x.cols), sums, accumulate);
            }
            self.norm_replay(kind, x, weight, bias, statistics, dy);
        });
        Ok(())
    }

    fn gelu(&self, kind: Gelu, x: &Tensor, out: &mut Tensor) -> Result {
        self.pool.install(|| self.gelu_forward(kind, x, out));
        Ok(())
    }

    fn gelu_backward(&self, kind: Gelu, x: &mut Tensor, gradient: &mut Tensor) -> Result {
        self.pool.install(|| self.gelu_gradient(kind, x, gradient));
        Ok(())
    }

    fn swiglu(&self, gate: &Tensor, up: &Tensor, out: &mut Tensor) -> Result {
        self.pool.install(|| self.swiglu_forward(gate, up, out));
        Ok(())
    }

    fn swiglu_backward(&self, gate: &mut Tensor, up: &mut Tensor, gradient: &mut Tensor) -> Result {
        self.pool.install(|| self.swiglu_gradient(gate, up, gradient));
        Ok(())
    }

    fn rotary(&self, shape: AttentionShape, table: &Tensor, inverse: bool, qkv: &mut Tensor) -> Result {
        self.pool.install(|| self.rotate(shape, table, inverse, qkv));
        Ok(())
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
        self.pool.install(|| self.attend(shape, dropout, lengths, qkv, out, logsumexp));
        Ok(())
    }

    fn attention_backward(
        &self,
        shape: AttentionShape,
        dropout: Option<DropoutSite>,
        of: AttentionBackward,
    ) -> Result {
        self.pool.install(|| self.attend_backward(shape, dropout, of));
        Ok(())
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
        self.pool.install(|| self.look_up(tokens, sequence, width, table, positions, types, out));
        Ok(())
    }

    fn embed_gradient(
        &self,
        tokens: &Tensor,
        width: usize,
        dy: &Tensor,
        gradient: &mut Tensor,
        accumulate: bool,
    ) -> Result {
        self.pool.install(|| self.scatter_add(tokens, width, dy, gradient, accumulate));
        Ok(())
    }

    fn position_gradient(
        &self,
        sequence: usize,
        width: usize,
        dy: &Tensor,
        gradient: &mut Tensor,
        accumulate: bool,
    ) -> Result {
        self.pool.install(|| self.position_sums(sequence, width, dy, gradient, accumulate));
        Ok(())
    }

    fn patches(&self, shape: PatchShape, images: &Tensor, out: &mut Tensor) -> Result {
        self.pool.install(|| self.gather_patches(shape, images, out));
        Ok(())
    }

    fn place_rows(
        &self,
        sequence: usize,
        width: usize,
        first: &Tensor,
        positions: &Tensor,
        out: &mut Tensor,
    ) -> Result {
        self.pool.install(|| self.seat_rows(sequence, width, first, positions, out));
        Ok(())
    }

    fn set_rows(&self, from: Option<Mat>, to: MatMut) -> Result {
        self.pool.install(|| self.copy_rows(from, to));
        Ok(())
    }

    fn dropout(
        &self,
        site: DropoutSite,
        sequence: usize,
        cols: usize,
        residual: Option<&Tensor>,
        out: &mut Tensor,
    ) -> Result {
        self.pool.install(|| self.drop_in_place(site, sequence, cols, residual, out));
        Ok(())
    }

    fn dropout_copy(
        &self,
        site: DropoutSite,
        sequence: usize,
        cols: usize,
        x: &Tensor,
        out: &mut Tensor,
    ) -> Result {
        self.pool.install(|| self.drop_copy(site, sequence, cols, x, out));
        Ok(())
    }

    fn cross_entropy(
        &self,
        targets: &Tensor,
        first: usize,
        mode: LossMode,
        logits: MatMut,
        loss: &mut Tensor,
    ) -> Result {
        let targets = &targets.integers()[first..][..logits.rows];
        let sum = self.pool.install(|| self.softmax_loss(targets, mode, logits));
        self.write_scalar(loss, self.read_scalar(loss) + sum);
        Ok(())
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
        let targets = &targets.integers()[first..][..logits.rows];
        let (sum, hits) = self.pool.install(|| self.classes_loss(targets, settings, logits));
        self.write_scalar(loss, self.read_scalar(loss) + sum);
        if let Some(correct) = correct {
            self.write_scalar(correct, self.read_scalar(correct) + hits as f64);
        }
        Ok(())
    }

    fn sum_squares(&self, tensors: &[&Tensor], sum: &mut Tensor) -> Result {
        let total = tensors.iter().map(|tensor| self.squares(tensor.floats())).sum();
        self.write_scalar(sum, total);
        Ok(())
    }

    fn adamw(&self, settings: &AdamW, guard: Guard, tensors: &mut [Updated]) -> Result {
        self.pool.install(|| self.adamw_update(settings, guard, tensors));
        Ok(())
    }

    fn sgd(&self, settings: &Sgd, guard: Guard, tensors: &mut [Updated]) -> Result {
        self.pool.install(|| self.sgd_update(settings, guard, tensors));
        Ok(())
    }
}
