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

    /// A product with its epilogue, or, where the library has no such product or it was measured to be the slower, the same in
    /// pieces. Both overwrite what they make, whatever it held.
    ///
    /// # Safety
    /// As for `Blas::product`.
    unsafe fn together_or_apart(&self, product: &Product, mut apart: impl FnMut() -> Result) -> Result {
        // SAFETY: by this function's contract.
        let together = || unsafe { self.product(product) };
        let measured = || together().map(drop);
        if !self.blas.is_quicker_apart(product, self.workspace.bytes(), measured, &mut apart)? && together()?
        {
            return Ok(());
        }
        apart()
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
        let epilogue = Epilogue::Gelu {
            bias: bias.map(|bias| bias.at(0)),
            before: before.at(0),
            before_stride: shape.1,
        };
        let product = Product {
            shape,
            a: factor(x),
            b: weight_factor(weight),
            addend: None,
            out: Output { at: out.at(0), element, stride: shape.1 },
            epilogue,
            tf32: self.tf32,
            fastest: !self.deterministic,
        };
        let mut apart = || {
            self.linear_forward(x, weight, bias, None, MatMut::new(before, shape.0, shape.1))?;
            self.gelu(kind, before, out)
        };
        if !self.fuses_gelu(kind, element) {
            return apart();
        }
        // SAFETY: as in `linear_forward`.
        unsafe { self.together_or_apart(&product, apart) }
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
        let product = Product {
            shape,
            a: factor(dy),
            b: transposed(weight_factor(weight)),
            addend: None,
            out: Output { at: dx.at(0), element, stride: shape.1 },
            epilogue: Epilogue::GeluBackward { before: before.at(0), before_stride: shape.1 },
            tf32: self.tf32,
            fastest: !self.deterministic,
        };
        let mut apart = || {
            self.linear_dx(dy, weight, MatMut::new(dx, shape.0, shape.1), false)?;
            self.gelu_slope(kind, before, dx)
        };
        if !self.fuses_gelu(kind, element) {
            return apart();
        }
        // SAFETY: as in `linear_forward`.
        unsafe { self.together_or_apart(&product, apart) }
    }

    /// Fused GELU may pay on GPUs from Hopper on; before, it slows the product more than a pass costs. In fp32
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::fill_normal;

    const ROWS: usize = 1024;
    const INPUTS: usize = 1024;
    const OUTPUTS: usize = 4096;

    /// What goes through GELU, what comes out, and the gradient that goes back through it; of products so large that both
    /// ways of making them are measured where that is allowed.
    fn through_gelu(gpu: &CudaDevice, always_apart: bool) -> [Vec<f32>; 3] {
        let normal = |key: u64, elements: usize, deviation: f32| {
            let mut tensor = Tensor::of(gpu.arena(), "a test", Element::Bf16, elements).unwrap();
            gpu.write_floats(&mut tensor, &mut |out| fill_normal(out, key, 0, deviation)).unwrap();
            tensor
        };
        let (x, dy) = (normal(1, ROWS * INPUTS, 1.0), normal(2, ROWS * INPUTS, 1.0));
        let (weight, bias) =
            (normal(3, INPUTS * OUTPUTS, (INPUTS as f32).powf(-0.5)), normal(4, OUTPUTS, 1.0));
        // Whatever they hold.
        let [mut before, mut out, mut dx] = [5, 6, 7].map(|key| normal(key, ROWS * OUTPUTS, 1.0));
        let (x, dy) = (Mat::new(&x, ROWS, INPUTS), Mat::new(&dy, ROWS, INPUTS));
        let up = Linear { weight: &weight, inputs: INPUTS, outputs: OUTPUTS, in_out: true };
        let down = Linear { weight: &weight, inputs: OUTPUTS, outputs: INPUTS, in_out: true };
        if always_apart {
            let sums = MatMut::new(&mut before, ROWS, OUTPUTS);
            gpu.linear_forward(x, up, Some(&bias), None, sums).unwrap();
            gpu.gelu(Gelu::Tanh, &before, &mut out).unwrap();
            gpu.linear_dx(dy, down, MatMut::new(&mut dx, ROWS, OUTPUTS), false).unwrap();
            gpu.gelu_slope(Gelu::Tanh, &before, &mut dx).unwrap();
        } else {
            gpu.linear_then_gelu(Gelu::Tanh, x, up, Some(&bias), &mut before, &mut out).unwrap();
            gpu.gelu_then_linear_dx(Gelu::Tanh, dy, down, &before, &mut dx).unwrap();
        }
        [&before, &out, &dx].map(|tensor| gpu.host_floats(tensor).unwrap().into_owned())
    }

    #[test]
    fn gelu_is_the_same_on_a_products_way_to_memory_and_after_it() {
        match CudaDevice::count() {
            Ok(count) if count > 0 => {}
            found => return eprintln!("skipped: {found:?} GPUs"),
        }
        let gpu = CudaDevice::new("cuda:0", 0, 1 << 30).unwrap();
        let chosen = through_gelu(&gpu, false);
        assert!(chosen == through_gelu(&gpu, false), "what was chosen once stays");
        let apart = through_gelu(&gpu, true);
        // One that is held to the same bits everywhere measures nothing: it does all of it together.
        let together = through_gelu(&gpu.with_deterministic(true), false);
        for other in [apart, together] {
            for ((name, found), other) in ["before", "out", "dx"].into_iter().zip(&chosen).zip(&other) {
                let difference: f64 = found.iter().zip(other).map(|(a, b)| f64::from(a - b).powi(2)).sum();
                let norm: f64 = other.iter().map(|b| f64::from(*b).powi(2)).sum();
                let off = (difference / norm).sqrt();
                assert!(off < 1e-2, "{name} is off by {off}");
            }
        }
    }
}
