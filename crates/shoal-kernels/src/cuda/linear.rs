//! Linear layers: products with their bias, residual and activation.

use super::CudaDevice;
use super::launch::{at_or_null, launch};
use super::matrix::{Epilogue, Factor, Output, Product};
use crate::device::{Device, DeviceError, Gelu, Linear, Mat, MatMut, Result};
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
        let name = || {
            let (m, n, k) = product.shape;
            format!("product {m} x {n} x {k}{}", product.epilogue.name())
        };
        let (workspace, _held) = ((self.workspace.at(0), self.workspace.bytes()), self.hold_workspace());
        // SAFETY: by this function's contract; products follow each other on one stream, so they may share
        // the workspace.
        self.context.timed(name, || unsafe { self.blas.product(product, workspace) })
    }

    /// `out (+)= a * b`, for which there is always an algorithm.
    ///
    /// # Safety
    /// As for `Blas::product`.
    pub(super) unsafe fn plain_product(
        &self,
        shape: (usize, usize, usize),
        out: Output,
        accumulate: bool,
        a: Factor,
        b: Factor,
    ) -> Result {
        let addend = accumulate.then_some((out.at, out.stride));
        let product = Product {
            shape,
            a,
            b,
            addend,
            out,
            epilogue: Epilogue::Plain,
            tf32: self.tf32,
            fastest: !self.deterministic,
        };
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
        if unsafe {
            self.product(&Product {
                shape,
                a,
                b,
                addend,
                out: to,
                epilogue,
                tf32: self.tf32,
                fastest: !self.deterministic,
            })
        }? {
            return Ok(());
        }
        // The product adds onto what the output already holds, so bias and residual cost one writing pass.
        let accumulate = bias.is_some() || residual.is_some();
        if accumulate {
            let (bias, residual) = (at_or_null(bias), at_or_null(residual));
            let grid = self.each(out.rows * out.cols);
            // SAFETY: the matrix lies inside its tensor, which we borrow to write; lengths are asserted.
            unsafe {
                launch!(self, "prefill" of element, grid, bias, residual, to.at, out.rows, out.cols, out.stride)
            }?;
        }
        // SAFETY: as above.
        unsafe { self.plain_product(shape, to, accumulate, a, b) }
    }

    /// A product and the GELU of it, in one pass where the library has that.
    pub(super) fn linear_then_gelu(
        &self,
        kind: Gelu,
        x: Mat,
        weight: Linear,
        bias: Option<&Tensor>,
        before: &mut Tensor,
        out: &mut Tensor,
    ) -> Result {
        let (shape, element) = ((x.rows, weight.outputs, x.cols), out.element());
        assert_eq!((before.len(), out.len()), (shape.0 * shape.1, shape.0 * shape.1));
        assert_eq!((before.element(), x.cols), (element, weight.inputs));
        assert!(bias.is_none_or(|bias| bias.len() >= shape.1 && bias.element() == element));
        if self.fuses_gelu(kind, element) {
            let bias = bias.map(|bias| bias.at(0));
            let epilogue = Epilogue::Gelu { bias, before: before.at(0), before_stride: shape.1 };
            let to = Output { at: out.at(0), element, stride: shape.1 };
            let (a, b) = (factor(x), weight_factor(weight));
            let product = Product {
                shape,
                a,
                b,
                addend: None,
                out: to,
                epilogue,
                tf32: self.tf32,
                fastest: !self.deterministic,
            };
            // SAFETY: as in `linear_forward`.
            if unsafe { self.product(&product) }? {
                return Ok(());
            }
        }
        self.linear_forward(x, weight, bias, None, MatMut::new(before, shape.0, shape.1))?;
        self.gelu(kind, before, out)
    }

    /// The gradient of a product's input and through the GELU that made it.
    pub(super) fn gelu_then_linear_dx(
        &self,
        kind: Gelu,
        dy: Mat,
        weight: Linear,
        before: &Tensor,
        dx: &mut Tensor,
    ) -> Result {
        let (shape, element) = ((dy.rows, weight.inputs, dy.cols), dx.element());
        assert_eq!((before.len(), dx.len()), (shape.0 * shape.1, shape.0 * shape.1));
        assert_eq!((before.element(), dy.cols), (element, weight.outputs));
        if self.fuses_gelu(kind, element) {
            let epilogue = Epilogue::GeluBackward { before: before.at(0), before_stride: shape.1 };
            let to = Output { at: dx.at(0), element, stride: shape.1 };
            let (a, b) = (factor(dy), transposed(weight_factor(weight)));
            let product = Product {
                shape,
                a,
                b,
                addend: None,
                out: to,
                epilogue,
                tf32: self.tf32,
                fastest: !self.deterministic,
            };
            // SAFETY: as in `linear_forward`.
            if unsafe { self.product(&product) }? {
                return Ok(());
            }
        }
        self.linear_dx(dy, weight, MatMut::new(dx, shape.0, shape.1), false)?;
        self.gelu_slope(kind, before, dx)
    }

    /// Fused GELU pays on GPUs from Hopper on; before, it slows the product more than a pass costs. In fp32
    /// our own kernel is closer to the exact function. The library has the tanh approximation alone.
    fn fuses_gelu(&self, kind: Gelu, element: Element) -> bool {
        kind == Gelu::Tanh && element != Element::F32 && self.facts.capability >= (9, 0)
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
