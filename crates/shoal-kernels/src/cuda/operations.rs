//! [`Device`] for a GPU: each operation checks its shapes and queues its kernels.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use super::CudaDevice;
use super::launch::{DropoutParameter, Grid, at_or_null, launch};
use crate::device::{
    AdamW, AttentionShape, Clip, Device, DropoutSite, Linear, LossMode, Mat, MatMut, NormKind, Result,
    SCALAR_ELEMENTS, Sgd,
};
use crate::memory::Arena;
use crate::tensor::Tensor;

/// A norm's kind as its kernels take it.
fn layer(kind: NormKind) -> i32 {
    i32::from(kind == NormKind::Layer)
}

/// The lengths every operation of a norm relies on.
fn assert_norm(kind: NormKind, x: &Mat, weight: &Tensor, bias: Option<&Tensor>, statistics: &Tensor) {
    assert_eq!((weight.len(), statistics.len()), (x.cols, x.rows * kind.statistics()));
    assert!(bias.is_none_or(|bias| bias.len() == x.cols));
}

/// The norm's address, or null, and the limit.
fn clip_parameters(clip: Option<Clip>) -> (super::launch::Address, f32) {
    assert!(clip.is_none_or(|clip| clip.norm_squared.len() == SCALAR_ELEMENTS));
    (at_or_null(clip.map(|clip| clip.norm_squared)), clip.map_or(0.0, |clip| clip.max))
}

impl CudaDevice {
    fn drop_rows(
        &self,
        site: DropoutSite,
        sequence: usize,
        cols: usize,
        x: super::launch::Address,
        residual: Option<&Tensor>,
        out: &mut Tensor,
    ) -> Result {
        let rows = out.len() / cols;
        assert_eq!(rows * cols, out.len());
        assert!(residual.is_none_or(|residual| residual.len() == out.len()));
        let site = DropoutParameter::from(Some(site));
        let (grid, residual, out) = (Grid::blocks(rows), at_or_null(residual), out.at(0));
        // SAFETY: one block for each whole row; the lengths agree.
        unsafe { launch!(self, "dropout", grid, site, sequence, cols, x, residual, out) }
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.name
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

    fn set_scalar(&self, scalar: &mut Tensor, value: f64) -> Result {
        assert_eq!(scalar.len(), SCALAR_ELEMENTS);
        let grid = Grid { blocks: [1, 1, 1], threads: [1, 1], shared_bytes: 0 };
        // SAFETY: a scalar holds one f64.
        unsafe { launch!(self, "set_scalar", grid, scalar.at(0), value) }
    }

    fn scalar(&self, scalar: &Tensor) -> Result<f64> {
        assert_eq!(scalar.len(), SCALAR_ELEMENTS);
        let mut value = [0.0f64];
        // SAFETY: as above.
        unsafe { self.context.copy_out(&mut value, scalar.at(0).0) }?;
        Ok(value[0])
    }

    fn zero(&self, tensor: &mut Tensor) -> Result {
        // SAFETY: the tensor is ours to write.
        unsafe { self.context.clear(tensor.at(0).0, tensor.len()) }
    }

    fn write_floats(&self, tensor: &mut Tensor, fill: &mut dyn FnMut(&mut [f32])) -> Result {
        let mut values = vec![0.0f32; tensor.len()];
        fill(&mut values);
        // SAFETY: the tensor is that long and ours to write.
        unsafe { self.context.copy_in(tensor.at(0).0, &values) }
    }

    fn host_floats<'a>(&self, tensor: &'a Tensor) -> Result<Cow<'a, [f32]>> {
        let mut values = vec![0.0f32; tensor.len()];
        // SAFETY: the tensor is that long.
        unsafe { self.context.copy_out(&mut values, tensor.at(0).0) }?;
        Ok(Cow::Owned(values))
    }

    fn write_integers(&self, tensor: &mut Tensor, values: &[i32]) -> Result {
        assert_eq!(tensor.len(), values.len());
        // SAFETY: the tensor is that long and ours to write.
        unsafe { self.context.copy_in(tensor.at(0).0, values) }
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
        assert_norm(kind, &x, weight, bias, statistics);
        assert_eq!(out.len(), x.rows * x.cols);
        let (grid, from, bias) = (Grid::blocks(x.rows), x.tensor.at(x.offset), at_or_null(bias));
        let (weight, statistics, out) = (weight.at(0), statistics.at(0), out.at(0));
        let kind = layer(kind);
        // SAFETY: one block for each row; the lengths agree.
        unsafe {
            launch!(
                self,
                "norm_forward",
                grid,
                kind,
                eps,
                from,
                x.stride,
                x.cols,
                weight,
                bias,
                statistics,
                out
            )
        }
    }

    fn norm_again(
        &self,
        kind: NormKind,
        x: Mat,
        weight: &Tensor,
        bias: Option<&Tensor>,
        statistics: &Tensor,
        out: &mut Tensor,
    ) -> Result {
        assert_norm(kind, &x, weight, bias, statistics);
        assert_eq!(out.len(), x.rows * x.cols);
        let (grid, from, bias) = (Grid::blocks(x.rows), x.tensor.at(x.offset), at_or_null(bias));
        let (weight, statistics, out) = (weight.at(0), statistics.at(0), out.at(0));
        let kind = layer(kind);
        // SAFETY: as for `norm`.
        unsafe {
            launch!(self, "norm_again", grid, kind, from, x.stride, x.cols, weight, bias, statistics, out)
        }
    }

    fn norm_input_gradient(
        &self,
        kind: NormKind,
        x: Mat,
        weight: &Tensor,
        statistics: &Tensor,
        dy: &Tensor,
        dx: &mut Tensor,
        accumulate: bool,
    ) -> Result {
        assert_norm(kind, &x, weight, None, statistics);
        assert_eq!((dy.len(), dx.len()), (x.rows * x.cols, x.rows * x.cols));
        let (grid, from) = (Grid::blocks(x.rows), x.tensor.at(x.offset));
        let (weight, statistics, dy, dx) = (weight.at(0), statistics.at(0), dy.at(0), dx.at(0));
        let (kind, accumulate) = (layer(kind), i32::from(accumulate));
        // SAFETY: as for `norm`.
        unsafe {
            launch!(
                self,
                "norm_input_gradient",
                grid,
                kind,
                from,
                x.stride,
                x.cols,
                weight,
                statistics,
                dy,
                dx,
                accumulate
            )
        }
    }

    fn norm_parameter_gradient(
        &self,
        kind: NormKind,
        x: Mat,
        statistics: &Tensor,
        dy: &Tensor,
        weight_gradient: &mut Tensor,
        bias_gradient: Option<&mut Tensor>,
        accumulate: [bool; 2],
    ) -> Result {
        if let Some(bias) = bias_gradient {
            self.column_sums(Mat::new(dy, x.rows, x.cols), bias, accumulate[1])?;
        }
        self.norm_weight_sums(kind, x, statistics, dy, weight_gradient, accumulate[0])
    }

    fn gelu(&self, x: &Tensor, out: &mut Tensor) -> Result {
        assert_eq!(x.len(), out.len());
        // SAFETY: the lengths agree; likewise below.
        unsafe { launch!(self, "gelu", self.each(x.len()), x.at(0), out.at(0), x.len()) }
    }

    fn gelu_backward(&self, x: &mut Tensor, gradient: &mut Tensor) -> Result {
        assert_eq!(x.len(), gradient.len());
        // SAFETY: as above.
        unsafe { launch!(self, "gelu_backward", self.each(x.len()), x.at(0), gradient.at(0), x.len()) }
    }

    fn swiglu(&self, gate: &Tensor, up: &Tensor, out: &mut Tensor) -> Result {
        let count = out.len();
        assert_eq!((gate.len(), up.len()), (count, count));
        // SAFETY: as above.
        unsafe { launch!(self, "swiglu", self.each(count), gate.at(0), up.at(0), out.at(0), count) }
    }

    fn swiglu_backward(&self, gate: &mut Tensor, up: &mut Tensor, gradient: &mut Tensor) -> Result {
        let count = gradient.len();
        assert_eq!((gate.len(), up.len()), (count, count));
        let grid = self.each(count);
        // SAFETY: as above.
        unsafe { launch!(self, "swiglu_backward", grid, gate.at(0), up.at(0), gradient.at(0), count) }
    }

    fn rotary(&self, shape: AttentionShape, table: &Tensor, inverse: bool, qkv: &mut Tensor) -> Result {
        let half = shape.head_size / 2;
        assert_eq!(qkv.len(), shape.rows() * shape.qkv_width());
        assert_eq!(2 * half, shape.head_size, "a head of pairs");
        assert!(table.len() >= shape.sequence * shape.head_size);
        let (rows, width, turned) = (shape.rows(), shape.qkv_width(), shape.heads + shape.kv_heads);
        let sign = if inverse { -1.0f32 } else { 1.0 };
        let (grid, qkv, table) = (self.each(rows * turned * half), qkv.at(0), table.at(0));
        // SAFETY: lengths of the rows and of the table are asserted.
        unsafe { launch!(self, "rotary", grid, qkv, table, rows, shape.sequence, width, turned, half, sign) }
    }

    fn attention(
        &self,
        shape: AttentionShape,
        dropout: Option<DropoutSite>,
        qkv: &Tensor,
        out: &mut Tensor,
        logsumexp: &mut Tensor,
    ) -> Result {
        self.attend(shape, dropout, qkv, out, logsumexp)
    }

    fn attention_backward(
        &self,
        shape: AttentionShape,
        dropout: Option<DropoutSite>,
        qkv: &Tensor,
        out: &Tensor,
        logsumexp: &Tensor,
        out_gradient: &Tensor,
        delta: &mut Tensor,
        qkv_gradient: &mut Tensor,
    ) -> Result {
        self.attend_backward(shape, dropout, qkv, out, logsumexp, out_gradient, delta, qkv_gradient)
    }

    fn embed(
        &self,
        tokens: &Tensor,
        sequence: usize,
        width: usize,
        table: &Tensor,
        positions: Option<&Tensor>,
        out: &mut Tensor,
    ) -> Result {
        let (count, rows) = (tokens.len(), table.len() / width);
        assert_eq!(out.len(), count * width);
        assert!(positions.is_none_or(|positions| positions.len() >= sequence.min(count) * width));
        let (grid, positions) = (self.each(out.len()), at_or_null(positions));
        let (tokens, table, out) = (tokens.at(0), table.at(0), out.at(0));
        // SAFETY: lengths are asserted; the kernel checks each token against the table's rows.
        unsafe { launch!(self, "embed", grid, tokens, count, sequence, width, table, rows, positions, out) }
    }

    fn embed_gradient(
        &self,
        tokens: &Tensor,
        width: usize,
        dy: &Tensor,
        gradient: &mut Tensor,
        accumulate: bool,
    ) -> Result {
        let (count, rows) = (tokens.len(), gradient.len() / width);
        assert_eq!(dy.len(), count * width);
        if !accumulate {
            self.zero(gradient)?;
        }
        let (grid, tokens, dy, gradient) = (Grid::blocks(count), tokens.at(0), dy.at(0), gradient.at(0));
        // SAFETY: as for `embed`.
        unsafe { launch!(self, "embed_gradient", grid, tokens, count, width, dy, gradient, rows) }
    }

    fn position_gradient(
        &self,
        sequence: usize,
        width: usize,
        dy: &Tensor,
        gradient: &mut Tensor,
        accumulate: bool,
    ) -> Result {
        let elements = sequence * width;
        let samples = dy.len() / elements;
        assert_eq!(samples * elements, dy.len());
        assert!(gradient.len() >= elements);
        if !accumulate {
            self.zero(gradient)?;
        }
        let (grid, dy, gradient) = (self.each(elements), dy.at(0), gradient.at(0));
        // SAFETY: lengths are asserted.
        unsafe { launch!(self, "position_gradient", grid, samples, elements, dy, gradient) }
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
        assert_eq!(x.len(), out.len());
        self.drop_rows(site, sequence, cols, x.at(0), None, out)
    }

    fn cross_entropy(
        &self,
        targets: &Tensor,
        rows: Range<usize>,
        vocabulary: usize,
        mode: LossMode,
        logits: &mut Tensor,
        loss: &mut Tensor,
    ) -> Result {
        self.softmax_loss(targets, rows, vocabulary, mode, logits, loss)
    }

    fn sum_squares(&self, tensors: &[&Tensor], sum: &mut Tensor) -> Result {
        self.squares(tensors, sum)
    }

    fn adamw(
        &self,
        settings: &AdamW,
        clip: Option<Clip>,
        gradient: &Tensor,
        first: &mut Tensor,
        second: &mut Tensor,
        parameter: &mut Tensor,
    ) -> Result {
        let s = settings;
        let count = parameter.len();
        assert_eq!((gradient.len(), first.len(), second.len()), (count, count, count));
        let correction1 = 1.0 - f64::from(s.beta1).powf(s.update as f64);
        let correction2 = 1.0 - f64::from(s.beta2).powf(s.update as f64);
        let step = (f64::from(s.lr) / correction1) as f32;
        let root_correction = correction2.sqrt() as f32;
        let keep = (1.0 - f64::from(s.lr) * f64::from(s.weight_decay)) as f32;
        let (norm, max) = clip_parameters(clip);
        let (first, second, parameter) = (first.at(0), second.at(0), parameter.at(0));
        // SAFETY: lengths are asserted; the norm is a scalar.
        unsafe {
            launch!(
                self,
                "adamw",
                self.each(count),
                norm,
                max,
                step,
                root_correction,
                keep,
                s.beta1,
                s.beta2,
                s.eps,
                gradient.at(0),
                first,
                second,
                parameter,
                count
            )
        }
    }

    fn sgd(
        &self,
        settings: &Sgd,
        clip: Option<Clip>,
        gradient: &Tensor,
        velocity: Option<&mut Tensor>,
        parameter: &mut Tensor,
    ) -> Result {
        let s = settings;
        let count = parameter.len();
        assert_eq!(gradient.len(), count);
        assert!(velocity.as_ref().is_none_or(|velocity| velocity.len() == count));
        let (norm, max) = clip_parameters(clip);
        let velocity = at_or_null(velocity.as_deref());
        let first = i32::from(s.update == 1);
        // SAFETY: as for `adamw`.
        unsafe {
            launch!(
                self,
                "sgd",
                self.each(count),
                norm,
                max,
                s.lr,
                s.weight_decay,
                s.momentum,
                first,
                gradient.at(0),
                velocity,
                parameter.at(0),
                count
            )
        }
    }
}
