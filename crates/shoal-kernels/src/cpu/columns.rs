//! Batch normalisation: a column is a channel, a row a pixel of some sample. Threads own columns where columns are
//! summed and rows elsewhere. Sums are kept in f64, because there may be a million rows.

use rayon::prelude::*;

use super::CpuDevice;
use super::pixels::{let_through, rectify_row};
use crate::convolutional::{ColumnNorm, mask_elements};
use crate::device::{Mat, Sum};
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
        norm: &ColumnNorm,
        x: &Tensor,
        residual: Option<&Tensor>,
        mask: Option<&mut Tensor>,
        out: &mut Tensor,
    ) {
        let (cols, words) = (norm.cols, norm.cols.div_ceil(32));
        assert_fits(norm, x, mask.as_deref());
        assert_eq!(out.len(), x.len());
        assert!(residual.is_none_or(|residual| residual.len() == x.len()));
        let (mean, bias, factors) = (row_of(norm.mean), norm.bias.floats(), factors(norm));
        let all = norm.rows.start * cols..norm.rows.end * cols;
        let (x, residual) =
            (&x.floats()[all.clone()], residual.map(|residual| &residual.floats()[all.clone()]));
        let mut none = [];
        let masked = mask.is_some();
        let mask = match mask {
            Some(mask) => &mut mask.integers_mut()[norm.rows.start * words..norm.rows.end * words],
            None => &mut none[..],
        };
        let chunk = norm.rows.len().div_ceil(self.threads()).max(1);
        // As many parts of the mask as there are of the rows, empty ones where there is no mask.
        let mut masks: Vec<&mut [i32]> = mask.chunks_mut(chunk * words).collect();
        masks.resize_with(norm.rows.len().div_ceil(chunk), || &mut []);
        let parts = out.floats_mut()[all].par_chunks_mut(chunk * cols).zip(masks);
        parts.enumerate().for_each(|(index, (out, mask))| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for (row, out) in out.chunks_exact_mut(cols).enumerate() {
                        let from = (index * chunk + row) * cols;
                        let x = &x[from..][..cols];
                        for (column, out) in out.iter_mut().enumerate() {
                            *out = (x[column] - mean[column]) * factors[column] + bias[column];
                        }
                        if let Some(residual) = residual {
                            let residual = &residual[from..][..cols];
                            out.iter_mut().zip(residual).for_each(|(out, more)| *out += more);
                        }
                        if masked {
                            rectify_row(out, &mut mask[row * words..][..words]);
                        }
                    }
                },
            );
        });
    }

    pub(super) fn norm_columns_sums(
        &self,
        norm: &ColumnNorm,
        x: &Tensor,
        mask: Option<&Tensor>,
        dy: &Tensor,
        (out, accumulate): Sum,
    ) {
        let (cols, words) = (norm.cols, norm.cols.div_ceil(32));
        assert_fits(norm, x, mask);
        assert_eq!((dy.len(), out.len()), (x.len(), 2 * cols));
        let (mean, variance) = (row_of(norm.mean), row_of(norm.variance));
        let mask = mask.map(|mask| &mask.integers()[norm.rows.start * words..]);
        let rows = Mat::new(x, x.len() / cols, cols).rows(norm.rows.start, norm.rows.len());
        let (values, dy) = (&x.floats()[rows.offset..], &dy.floats()[rows.offset..]);
        let (plain, along) = out.floats_mut().split_at_mut(cols);
        let parts = plain.par_chunks_mut(COLUMNS).zip(along.par_chunks_mut(COLUMNS));
        parts.enumerate().for_each(|(index, (plain, along))| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    let (first, columns) = (index * COLUMNS, plain.len());
                    let slope = |row: usize, column: usize| match mask {
                        Some(mask) if !let_through(&mask[row * words..][..words], column) => 0.0,
                        _ => f64::from(dy[row * cols + column]),
                    };
                    let distance =
                        |row: usize, column: usize| f64::from(values[row * cols + column] - mean[column]);
                    let totals = sums(&rows, first, columns, slope);
                    let products =
                        sums(&rows, first, columns, |row, column| slope(row, column) * distance(row, column));
                    for column in 0..columns {
                        let scale = f64::from(scale(variance[first + column], norm.eps));
                        let (total, product) = (totals[column] as f32, (products[column] * scale) as f32);
                        plain[column] = if accumulate { plain[column] + total } else { total };
                        along[column] = if accumulate { along[column] + product } else { product };
                    }
                },
            );
        });
    }

    pub(super) fn norm_columns_dx(
        &self,
        norm: &ColumnNorm,
        (sums, group_rows): (&Tensor, usize),
        mask: Option<&Tensor>,
        dy: &mut Tensor,
        keep_masked: bool,
        x: &mut Tensor,
    ) {
        let (cols, words) = (norm.cols, norm.cols.div_ceil(32));
        assert_fits(norm, x, mask);
        assert_eq!((dy.len(), sums.len()), (x.len(), 2 * cols));
        let (mean, variance, weight) = (row_of(norm.mean), row_of(norm.variance), norm.weight.floats());
        let (plain, along) = sums.floats().split_at(cols);
        let mask = mask.map(|mask| &mask.integers()[norm.rows.start * words..]);
        let share = 1.0 / group_rows as f32;
        let chunk = norm.rows.len().div_ceil(self.threads()).max(1);
        let all = norm.rows.start * cols..norm.rows.end * cols;
        let parts = x.floats_mut()[all.clone()].par_chunks_mut(chunk * cols);
        parts.zip(dy.floats_mut()[all].par_chunks_mut(chunk * cols)).enumerate().for_each(
            |(index, (x, dy))| {
                self.arch.dispatch(
                    #[inline(always)]
                    || {
                        for (row, (x, dy)) in
                            x.chunks_exact_mut(cols).zip(dy.chunks_exact_mut(cols)).enumerate()
                        {
                            let mask = mask.map(|mask| &mask[(index * chunk + row) * words..][..words]);
                            for (column, (x, dy)) in x.iter_mut().zip(dy).enumerate() {
                                let passes = mask.is_none_or(|mask| let_through(mask, column));
                                let slope = if passes { *dy } else { 0.0 };
                                let scale = scale(variance[column], norm.eps);
                                let normed = (*x - mean[column]) * scale;
                                let away = (plain[column] + normed * along[column]) * share;
                                *x = weight[column] * scale * (slope - away);
                                if keep_masked {
                                    *dy = slope;
                                }
                            }
                        }
                    },
                );
            },
        );
    }
}

fn assert_fits(norm: &ColumnNorm, x: &Tensor, mask: Option<&Tensor>) {
    let cols = norm.cols;
    assert_eq!((norm.mean.cols, norm.variance.cols), (cols, cols));
    assert_eq!((norm.weight.len(), norm.bias.len()), (cols, cols));
    assert!(norm.rows.end * cols <= x.len() && x.len().is_multiple_of(cols));
    assert!(mask.is_none_or(|mask| mask.len() == mask_elements(x.len() / cols, cols)));
}

/// What each column's distance from the mean is multiplied by.
fn factors(norm: &ColumnNorm) -> Vec<f32> {
    let of = row_of(norm.variance).iter().zip(norm.weight.floats());
    of.map(|(variance, weight)| weight * scale(*variance, norm.eps)).collect()
}

/// By the means' distance: no difference of large sums is taken.
pub(super) fn merge_columns((of, of_rows): (&Tensor, usize), (into, into_rows): (&mut Tensor, usize)) {
    assert_eq!(of.len(), into.len());
    let (of_share, into_share) = {
        let all = (of_rows + into_rows) as f64;
        (of_rows as f64 / all, into_rows as f64 / all)
    };
    let cols = of.len() / 2;
    let (of_mean, of_variance) = of.floats().split_at(cols);
    let (mean, variance) = into.floats_mut().split_at_mut(cols);
    for column in 0..cols {
        let apart = f64::from(of_mean[column]) - f64::from(mean[column]);
        let within = of_share * f64::from(of_variance[column]) + into_share * f64::from(variance[column]);
        variance[column] = (within + of_share * into_share * apart * apart) as f32;
        mean[column] = (f64::from(mean[column]) + of_share * apart) as f32;
    }
}
