//! Batch normalisation: statistics of columns, and what is made of rows with them. Each operation is one kernel.

use super::assert_floats;
use super::strips::{Strips, StripsParameter};
use crate::convolutional::{ColumnNorm, NormGradients};
use crate::cuda::launch::{Address, Parameter, launch};
use crate::cuda::reduce::RowsSum;
use crate::cuda::{CudaDevice, element_of};
use crate::device::{Mat, Result, Sum};
use crate::tensor::Tensor;

/// Sums, or statistics, of each column.
const SETS: usize = 2;

/// `ColumnNorm` of pixels.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct NormParameter {
    strips: StripsParameter,
    mean: Address,
    variance: Address,
    weight: Address,
    bias: Address,
    eps: f32,
}

// SAFETY: struct ColumnNorm.
unsafe impl Parameter for NormParameter {}

impl NormParameter {
    fn new(norm: &ColumnNorm, strips: &Strips) -> NormParameter {
        NormParameter {
            strips: strips.parameter(),
            mean: norm.mean.tensor.at(norm.mean.offset),
            variance: norm.variance.tensor.at(norm.variance.offset),
            weight: norm.weight.at(0),
            bias: norm.bias.at(0),
            eps: norm.eps,
        }
    }
}

/// `NormGradients` of pixels.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct GradientsParameter {
    bias: RowsSum,
    weight: RowsSum,
    running: [RowsSum; 2],
    factors: [f32; 2],
}

// SAFETY: struct NormGradients.
unsafe impl Parameter for GradientsParameter {}

impl GradientsParameter {
    /// # Panics
    /// If a sum has not as many numbers as there are columns.
    fn new(gradients: Option<NormGradients>, cols: usize) -> GradientsParameter {
        let to = |sum: Option<Sum>| {
            if let Some((sum, _)) = &sum {
                assert_floats(sum, cols);
            }
            RowsSum::from(sum)
        };
        let Some(NormGradients { bias, weight, running }) = gradients else {
            let none = [None, None].map(to);
            return GradientsParameter { bias: to(None), weight: to(None), running: none, factors: [0.0; 2] };
        };
        let [mean, variance] = running.map_or([None, None], |both| both.map(Some));
        let factor = |of: &Option<(f32, Sum)>| of.as_ref().map_or(0.0, |(factor, _)| *factor);
        let factors = [factor(&mean), factor(&variance)];
        let running = [mean, variance].map(|of| to(of.map(|(_, sum)| sum)));
        GradientsParameter { bias: to(Some(bias)), weight: to(Some(weight)), running, factors }
    }
}

/// What every operation of a norm relies on; where its rows start in the tensors and in the mask.
fn assert_norm(norm: &ColumnNorm, x: &Tensor, mask: Option<&Tensor>) -> (usize, usize) {
    norm.assert_fits(x, mask);
    (norm.rows.start * norm.cols, norm.rows.start * norm.cols.div_ceil(32))
}

/// Where the norm's rows start, null for none.
fn rows_at(tensor: Option<&Tensor>, first: usize) -> Address {
    tensor.map_or(Address(0), |tensor| tensor.at(first))
}

impl CudaDevice {
    pub(super) fn measure_columns(&self, x: Mat, statistics: &mut Tensor) -> Result {
        assert_floats(statistics, SETS * x.cols);
        let (strips, element) =
            (Strips::summing(x.rows, x.cols, SETS).of(x.tensor, x.offset, x.stride), x.tensor.element());
        let (held, from, stride) = (self.parts(), x.tensor.at(x.offset), x.stride);
        let (grid, parts, counters, to) = (strips.grid(), held.at(0), self.counters.at(0), statistics.at(0));
        // SAFETY: a matrix lies inside its tensor; the parts and counters suffice for a cut that sums.
        unsafe {
            launch!(
                self,
                "pixel_statistics" of element,
                grid,
                strips.parameter(),
                from,
                stride,
                parts,
                counters,
                to
            )
        }
    }

    pub(super) fn merge_columns(
        &self,
        (of, of_rows): (&Tensor, usize),
        (into, into_rows): (&mut Tensor, usize),
    ) -> Result {
        assert_eq!(of.len() % SETS, 0);
        assert_floats(of, into.len());
        assert_floats(into, of.len());
        let (cols, share) = (of.len() / SETS, of_rows as f64 / (of_rows + into_rows) as f64);
        let (grid, of, into) = (self.each(cols), of.at(0), into.at(0));
        // SAFETY: both have two numbers for each column.
        unsafe { launch!(self, "pixel_merge", grid, cols, of, share, into) }
    }

    pub(super) fn norm_columns(
        &self,
        norm: &ColumnNorm,
        x: &Tensor,
        residual: Option<&Tensor>,
        mask: Option<&mut Tensor>,
        out: &mut Tensor,
    ) -> Result {
        let (first, first_word) = assert_norm(norm, x, mask.as_deref());
        let element = element_of(&[x, residual.unwrap_or(x), out]);
        assert_eq!((out.len(), residual.unwrap_or(x).len()), (x.len(), x.len()));
        let strips = Strips::passing(self, norm.rows.len(), norm.cols, mask.is_some());
        let (grid, norm) = (strips.grid(), NormParameter::new(norm, &strips));
        let (x, residual) = (x.at(first), rows_at(residual, first));
        let (mask, out) = (rows_at(mask.as_deref(), first_word), out.at(first));
        // SAFETY: the lengths are asserted.
        unsafe { launch!(self, "pixel_norm" of element, grid, norm, x, residual, mask, out) }
    }

    pub(super) fn norm_columns_sums(
        &self,
        norm: &ColumnNorm,
        x: &Tensor,
        mask: Option<&Tensor>,
        dy: &Tensor,
        (sums, accumulate): Sum,
        gradients: Option<NormGradients>,
    ) -> Result {
        let ((first, first_word), element) = (assert_norm(norm, x, mask), element_of(&[x, dy]));
        assert_eq!(dy.len(), x.len());
        assert_floats(sums, SETS * norm.cols);
        let gradients = GradientsParameter::new(gradients, norm.cols);
        let strips = Strips::summing(norm.rows.len(), norm.cols, SETS);
        let (grid, norm) = (strips.grid(), NormParameter::new(norm, &strips));
        let (x, mask, dy) = (x.at(first), rows_at(mask, first_word), dy.at(first));
        let (held, to) = (self.parts(), RowsSum::from(Some((sums, accumulate))));
        let (parts, counters) = (held.at(0), self.counters.at(0));
        // SAFETY: the lengths are asserted; the parts and counters suffice for a cut that sums.
        unsafe {
            launch!(
                self,
                "pixel_norm_sums" of element,
                grid,
                norm,
                x,
                mask,
                dy,
                parts,
                counters,
                to,
                gradients
            )
        }
    }

    pub(super) fn norm_columns_gradient(
        &self,
        norm: &ColumnNorm,
        (sums, group_rows): (&Tensor, usize),
        mask: Option<&Tensor>,
        dy: &mut Tensor,
        keep_masked: bool,
        x: &mut Tensor,
    ) -> Result {
        let ((first, first_word), element) = (assert_norm(norm, x, mask), element_of(&[x, dy]));
        assert_eq!(dy.len(), x.len());
        assert_floats(sums, SETS * norm.cols);
        let strips = Strips::passing(self, norm.rows.len(), norm.cols, false);
        let (grid, norm) = (strips.grid(), NormParameter::new(norm, &strips));
        // Without a mask dy is what is left of it already.
        let (share, keep) = (1.0 / group_rows as f32, i32::from(keep_masked && mask.is_some()));
        let (sums, mask) = (sums.at(0), rows_at(mask, first_word));
        let (dy, x) = (dy.at(first), x.at(first));
        // SAFETY: the lengths are asserted.
        unsafe { launch!(self, "pixel_norm_gradient" of element, grid, norm, sums, share, mask, dy, keep, x) }
    }
}
