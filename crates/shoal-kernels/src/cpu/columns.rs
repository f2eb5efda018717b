//! Batch normalisation: a column is a channel, a row a pixel of some sample. Threads own columns where columns are
//! summed and rows elsewhere. Sums are kept in f64, because there may be a million rows.

use rayon::prelude::*;

use super::CpuDevice;
use crate::device::Mat;
use crate::tensor::Tensor;

/// Columns summed together: a cache line.
const COLUMNS: usize = 16;

/// Sums of `value(element, column)` down some columns.
#[inline(always)]
fn sums(x: &Mat, first: usize, columns: usize, value: impl Fn(usize, usize) -> f64) -> [f64; COLUMNS] {
    let mut sums = [0.0; COLUMNS];
    for row in 0..x.rows {
        for (column, sum) in sums[..columns].iter_mut().enumerate() {
            *sum += value(row, first + column);
        }
    }
    sums
}

/// What a number is multiplied by when it is normed.
fn scale(variance: f32, eps: f32) -> f32 {
    1.0 / (variance + eps).sqrt()
}

/// A matrix of one row.
fn row_of(mat: Mat<'_>) -> &[f32] {
    &mat.tensor.floats()[mat.offset..][..mat.cols]
}

impl CpuDevice {
    pub(super) fn measure_columns(&self, x: Mat, statistics: &mut Tensor) {
        assert_eq!(statistics.len(), 2 * x.cols);
        let values = &x.tensor.floats()[x.offset..];
        let (means, variances) = statistics.floats_mut().split_at_mut(x.cols);
        let rows = x.rows as f64;
        let parts = means.par_chunks_mut(COLUMNS).zip(variances.par_chunks_mut(COLUMNS));
        parts.enumerate().for_each(|(index, (means, variances))| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    let (first, columns) = (index * COLUMNS, means.len());
                    let at = |row: usize, column: usize| f64::from(values[row * x.stride + column]);
                    let totals = sums(&x, first, columns, at);
                    let mean = |column: usize| totals[column - first] / rows;
                    let squares =
                        sums(&x, first, columns, |row, column| (at(row, column) - mean(column)).powi(2));
                    for column in 0..columns {
                        means[column] = mean(first + column) as f32;
                        variances[column] = (squares[column] / rows) as f32;
                    }
                },
            );
        });
    }

    pub(super) fn norm_columns(
        &self,
        eps: f32,
        x: Mat,
        (mean, variance): (Mat, Mat),
        (weight, bias): (&Tensor, &Tensor),
        residual: Option<&Tensor>,
        out: &mut Tensor,
    ) {
        let cols = x.cols;
        assert_eq!((mean.cols, variance.cols, weight.len(), bias.len()), (cols, cols, cols, cols));
        assert_eq!(out.len(), x.rows * cols);
        assert!(residual.is_none_or(|residual| residual.len() == x.rows * cols));
        let (mean, variance, weight, bias) = (row_of(mean), row_of(variance), weight.floats(), bias.floats());
        let (values, residual) = (&x.tensor.floats()[x.offset..], residual.map(Tensor::floats));
        let chunk = x.rows.div_ceil(self.threads()).max(1);
        out.floats_mut().par_chunks_mut(chunk * cols).enumerate().for_each(|(index, out)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for (row, out) in out.chunks_exact_mut(cols).enumerate() {
                        let row = index * chunk + row;
                        let x = &values[row * x.stride..][..cols];
                        for (column, out) in out.iter_mut().enumerate() {
                            let normed = (x[column] - mean[column]) * scale(variance[column], eps);
                            *out = normed * weight[column] + bias[column];
                        }
                        if let Some(residual) = residual {
                            let residual = &residual[row * cols..][..cols];
                            out.iter_mut().zip(residual).for_each(|(out, more)| *out += more);
                        }
                    }
                },
            );
        });
    }

    pub(super) fn norm_columns_sums(
        &self,
        eps: f32,
        x: Mat,
        statistics: &Tensor,
        dy: &Tensor,
        out: &mut Tensor,
    ) {
        let cols = x.cols;
        assert_eq!((statistics.len(), dy.len(), out.len()), (2 * cols, x.rows * cols, 2 * cols));
        let (mean, variance) = statistics.floats().split_at(cols);
        let (values, dy) = (&x.tensor.floats()[x.offset..], dy.floats());
        let (plain, along) = out.floats_mut().split_at_mut(cols);
        let parts = plain.par_chunks_mut(COLUMNS).zip(along.par_chunks_mut(COLUMNS));
        parts.enumerate().for_each(|(index, (plain, along))| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    let (first, columns) = (index * COLUMNS, plain.len());
                    let slope = |row: usize, column: usize| f64::from(dy[row * cols + column]);
                    let distance =
                        |row: usize, column: usize| f64::from(values[row * x.stride + column] - mean[column]);
                    let totals = sums(&x, first, columns, slope);
                    let products =
                        sums(&x, first, columns, |row, column| slope(row, column) * distance(row, column));
                    for column in 0..columns {
                        plain[column] = totals[column] as f32;
                        let scale = f64::from(scale(variance[first + column], eps));
                        along[column] = (products[column] * scale) as f32;
                    }
                },
            );
        });
    }

    pub(super) fn norm_columns_dx(
        &self,
        eps: f32,
        x: Mat,
        statistics: &Tensor,
        weight: &Tensor,
        (sums, rows): (&Tensor, usize),
        gradient: &mut Tensor,
    ) {
        let cols = x.cols;
        assert_eq!((statistics.len(), sums.len(), weight.len()), (2 * cols, 2 * cols, cols));
        assert_eq!(gradient.len(), x.rows * cols);
        let (mean, variance) = statistics.floats().split_at(cols);
        let (plain, along) = sums.floats().split_at(cols);
        let (values, weight, share) = (&x.tensor.floats()[x.offset..], weight.floats(), 1.0 / rows as f32);
        let chunk = x.rows.div_ceil(self.threads()).max(1);
        gradient.floats_mut().par_chunks_mut(chunk * cols).enumerate().for_each(|(index, part)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for (row, slopes) in part.chunks_exact_mut(cols).enumerate() {
                        let x = &values[(index * chunk + row) * x.stride..][..cols];
                        for (column, slope) in slopes.iter_mut().enumerate() {
                            let scale = scale(variance[column], eps);
                            let normed = (x[column] - mean[column]) * scale;
                            let away = (plain[column] + normed * along[column]) * share;
                            *slope = weight[column] * scale * (*slope - away);
                        }
                    }
                },
            );
        });
    }
}
