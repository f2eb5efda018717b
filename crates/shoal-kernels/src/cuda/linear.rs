//! Linear layers: products with their bias and residual.

use super::CudaDevice;
use super::launch::{at_or_null, launch};
use super::matrix::Factor;
use crate::device::{Linear, Mat, MatMut, Result};
use crate::tensor::Tensor;

fn factor(mat: Mat) -> Factor {
    Factor { at: mat.tensor.at(mat.offset), stride: mat.stride, transposed: false }
}

fn transposed(factor: Factor) -> Factor {
    Factor { transposed: !factor.transposed, ..factor }
}

/// The weight as an [inputs, outputs] matrix, however it is stored.
fn weight_factor(weight: Linear) -> Factor {
    assert_eq!(weight.weight.len(), weight.inputs * weight.outputs);
    let stride = if weight.in_out { weight.outputs } else { weight.inputs };
    Factor { at: weight.weight.at(0), stride, transposed: !weight.in_out }
}

impl CudaDevice {
    pub(super) fn linear_forward(
        &self,
        x: Mat,
        weight: Linear,
        bias: Option<&Tensor>,
        residual: Option<&Tensor>,
        out: MatMut,
    ) -> Result {
        assert_eq!((x.rows, x.cols, weight.outputs), (out.rows, weight.inputs, out.cols));
        assert!(bias.is_none_or(|bias| bias.len() >= out.cols));
        assert!(residual.is_none_or(|residual| residual.len() == out.rows * out.cols));
        let target = out.tensor.at(out.offset);
        // The product adds onto what the output already holds, so bias and residual cost one writing pass.
        let accumulate = bias.is_some() || residual.is_some();
        if accumulate {
            let (bias, residual) = (at_or_null(bias), at_or_null(residual));
            let grid = self.each(out.rows * out.cols);
            // SAFETY: the matrix lies inside its tensor, which we borrow to write; lengths are asserted.
            unsafe {
                launch!(self, "prefill", grid, bias, residual, target, out.rows, out.cols, out.stride)
            }?;
        }
        let shape = (out.rows, out.cols, x.cols);
        let to = (target, out.stride);
        // SAFETY: `Mat` and `MatMut` lie inside their tensors; the shapes are asserted.
        unsafe { self.blas().product(shape, to, accumulate, factor(x), weight_factor(weight)) }
    }

    pub(super) fn linear_dx(&self, dy: Mat, weight: Linear, dx: MatMut, accumulate: bool) -> Result {
        assert_eq!((dy.rows, dy.cols, weight.inputs), (dx.rows, weight.outputs, dx.cols));
        let shape = (dx.rows, dx.cols, dy.cols);
        let to = (dx.tensor.at(dx.offset), dx.stride);
        // SAFETY: as in `linear_forward`.
        unsafe { self.blas().product(shape, to, accumulate, factor(dy), transposed(weight_factor(weight))) }
    }

    pub(super) fn linear_dw(
        &self,
        x: Mat,
        dy: Mat,
        gradient: &mut Tensor,
        in_out: bool,
        accumulate: bool,
    ) -> Result {
        assert_eq!(x.rows, dy.rows);
        assert_eq!(gradient.len(), x.cols * dy.cols);
        let (left, right) = if in_out { (x, dy) } else { (dy, x) };
        let shape = (left.cols, right.cols, x.rows);
        let to = (gradient.at(0), right.cols);
        // SAFETY: as in `linear_forward`.
        unsafe { self.blas().product(shape, to, accumulate, transposed(factor(left)), factor(right)) }
    }
}
