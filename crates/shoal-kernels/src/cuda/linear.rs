//! Linear layers: products with their bias and residual.

use super::CudaDevice;
use super::launch::{at_or_null, launch};
use super::matrix::{Epilogue, Factor, Output, Product};
use crate::device::{DeviceError, Linear, Mat, MatMut, Result};
use crate::tensor::{Element, Tensor};

fn factor(mat: Mat) -> Factor {
    let element = mat.tensor.element();
    Factor { at: mat.tensor.at(mat.offset), element, stride: mat.stride, transposed: false }
}

fn transposed(factor: Factor) -> Factor {
    Factor { transposed: !factor.transposed, ..factor }
}

/// The weight as an [inputs, outputs] matrix, however it is stored.
fn weight_factor(weight: Linear) -> Factor {
    assert_eq!(weight.weight.len(), weight.inputs * weight.outputs);
    let stride = if weight.in_out { weight.outputs } else { weight.inputs };
    let element = weight.weight.element();
    Factor { at: weight.weight.at(0), element, stride, transposed: !weight.in_out }
}

fn output(mat: &MatMut) -> Output {
    Output { at: mat.tensor.at(mat.offset), element: mat.tensor.element(), stride: mat.stride }
}

impl CudaDevice {
    /// # Safety
    /// As for `Blas::product`.
    unsafe fn product(&self, product: &Product) -> Result<bool> {
        // SAFETY: by this function's contract; products follow each other on one stream, so they may share
        // the workspace.
        unsafe { self.blas.product(product, (self.workspace.at(0), self.workspace.bytes())) }
    }

    /// `out (+)= a * b`, for which there is always an algorithm.
    ///
    /// # Safety
    /// As for `Blas::product`.
    unsafe fn plain_product(
        &self,
        shape: (usize, usize, usize),
        out: Output,
        accumulate: bool,
        a: Factor,
        b: Factor,
    ) -> Result {
        let addend = accumulate.then_some((out.at, out.stride));
        let product = Product { shape, a, b, addend, out, epilogue: Epilogue::Plain, tf32: false };
        // SAFETY: by this function's contract.
        match unsafe { self.product(&product) }? {
            true => Ok(()),
            false => {
                let said = format!("no algorithm for {} x {} x {}", shape.0, shape.1, shape.2);
                Err(DeviceError::Blas { call: "cublasLtMatmulAlgoGetHeuristic", said })
            }
        }
    }

    pub(super) fn linear_forward(
        &self,
        x: Mat,
        weight: Linear,
        bias: Option<&Tensor>,
        residual: Option<&Tensor>,
        out: MatMut,
    ) -> Result {
        assert_eq!((x.rows, x.cols, weight.outputs), (out.rows, weight.inputs, out.cols));
        let element = out.tensor.element();
        assert!(bias.is_none_or(|bias| bias.len() >= out.cols && bias.element() == element));
        assert!(residual.is_none_or(|residual| residual.len() == out.rows * out.cols));
        assert!(residual.is_none_or(|residual| residual.element() == element));
        let (shape, to) = ((out.rows, out.cols, x.cols), output(&out));
        let (a, b) = (factor(x), weight_factor(weight));
        let addend = residual.map(|residual| (residual.at(0), out.cols));
        let epilogue = bias.map_or(Epilogue::Plain, |bias| Epilogue::Bias(bias.at(0)));
        // SAFETY: `Mat` and `MatMut` lie inside their tensors; the shapes are asserted.
        if unsafe { self.product(&Product { shape, a, b, addend, out: to, epilogue, tf32: false }) }? {
            return Ok(());
        }
        // The product adds onto what the output already holds, so bias and residual cost one writing pass.
        let accumulate = bias.is_some() || residual.is_some();
        if accumulate {
            assert_eq!(element, Element::F32);
            let (bias, residual) = (at_or_null(bias), at_or_null(residual));
            let grid = self.each(out.rows * out.cols);
            // SAFETY: the matrix lies inside its tensor, which we borrow to write; lengths are asserted.
            unsafe { launch!(self, "prefill", grid, bias, residual, to.at, out.rows, out.cols, out.stride) }?;
        }
        // SAFETY: as above.
        unsafe { self.plain_product(shape, to, accumulate, a, b) }
    }

    pub(super) fn linear_dx(&self, dy: Mat, weight: Linear, dx: MatMut, accumulate: bool) -> Result {
        assert_eq!((dy.rows, dy.cols, weight.inputs), (dx.rows, weight.outputs, dx.cols));
        let shape = (dx.rows, dx.cols, dy.cols);
        let weight = transposed(weight_factor(weight));
        // SAFETY: as in `linear_forward`.
        unsafe { self.plain_product(shape, output(&dx), accumulate, factor(dy), weight) }
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
        let to = Output { at: gradient.at(0), element: gradient.element(), stride: right.cols };
        // SAFETY: as in `linear_forward`.
        unsafe { self.plain_product(shape, to, accumulate, transposed(factor(left)), factor(right)) }
    }
}
