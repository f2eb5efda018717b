//! Batch normalisation: a column is a channel, a row a pixel of some sample. Every pass walks rows in the order of
//! memory, each thread some of them, 32 columns at a time, which is a word of the mask. Sums are f32 over a block of
//! rows and f64 over blocks, because there may be a million rows; threads' parts are merged in their order.

use std::ops::Range;

use rayon::prelude::*;

use super::pixels::{WORD, rectify_word};
use super::{CpuDevice, cut};
use crate::convolutional::ColumnNorm;
use crate::device::{Mat, Sum};
use crate::tensor::Tensor;

/// Rows summed in f32: with 32 columns 8 KiB, which a second look finds in the first cache.
const BLOCK_ROWS: usize = 64;

/// One sum for each of a word's columns.
type Lanes = [f32; WORD];

/// What a number is multiplied by when it is normed.
fn scale(variance: f32, eps: f32) -> f32 {
    1.0 / (variance + eps).sqrt()
}

/// A matrix of one row.
fn row_of(mat: Mat<'_>) -> &[f32] {
    &mat.tensor.floats()[mat.offset..][..mat.cols]
}

/// `sums[column] += value(row, column)` for a block of rows. Called with a constant `width` where possible.
#[inline(always)]
fn add_down(width: usize, rows: Range<usize>, value: impl Fn(usize, usize) -> f32) -> Lanes {
    let mut sums = [0.0; WORD];
    for row in rows {
        for (lane, sum) in sums[..width].iter_mut().enumerate() {
            *sum += value(row, lane);
        }
    }
    sums
}

/// Means and squared distances from them, of some rows and columns.
struct Moments {
    rows: usize,
    means: Vec<f64>,
    squares: Vec<f64>,
}

impl Moments {
    fn none(cols: usize) -> Moments {
        Moments { rows: 0, means: vec![0.0; cols], squares: vec![0.0; cols] }
    }

    /// Takes up the moments of `rows` more rows, from column `first` on. By the means' distance: no difference of
    /// large sums is taken.
    fn merge(&mut self, rows: usize, first: usize, of: impl Iterator<Item = (f64, f64)>) {
        let (share, all) = (rows as f64 / (self.rows + rows) as f64, self.rows as f64);
        for ((mean, square), (other, more)) in
            self.means[first..].iter_mut().zip(&mut self.squares[first..]).zip(of)
        {
            let apart = other - *mean;
            *square += more + apart * apart * all * share;
            *mean += apart * share;
        }
    }
}

/// The moments of a block's columns, the second look finding the block in the cache.
#[inline(always)]
fn block_moments(width: usize, rows: usize, values: &[f32], stride: usize) -> (Lanes, Lanes) {
    let row = |row: usize| &values[row * stride..][..width];
    let mut means = add_down(width, 0..rows, |at, lane| row(at)[lane]);
    means.iter_mut().for_each(|mean| *mean /= rows as f32);
    let squares = add_down(width, 0..rows, |at, lane| (row(at)[lane] - means[lane]).powi(2));
    (means, squares)
}

impl CpuDevice {
    pub(super) fn measure_columns(&self, x: Mat, statistics: &mut Tensor) {
        assert_eq!(statistics.len(), 2 * x.cols);
        let values = &x.tensor.floats()[x.offset..];
        let parts: Vec<Range<usize>> = cut(x.rows, self.threads(), BLOCK_ROWS).collect();
        let parts: Vec<Moments> =
            parts.into_par_iter().map(|rows| self.moments_of(&x, values, rows)).collect();
        let mut all = Moments::none(x.cols);
        for part in parts {
            let of = part.means.iter().copied().zip(part.squares.iter().copied());
            all.merge(part.rows, 0, of);
            all.rows += part.rows;
        }
        let (means, variances) = statistics.floats_mut().split_at_mut(x.cols);
        means.iter_mut().zip(&all.means).for_each(|(out, mean)| *out = *mean as f32);
        let rows = x.rows as f64;
        variances.iter_mut().zip(&all.squares).for_each(|(out, square)| *out = (square / rows) as f32);
    }

    fn moments_of(&self, x: &Mat, values: &[f32], rows: Range<usize>) -> Moments {
        let mut all = Moments::none(x.cols);
        for first_row in rows.clone().step_by(BLOCK_ROWS) {
            let rows = BLOCK_ROWS.min(rows.end - first_row);
            for first in (0..x.cols).step_by(WORD) {
                let width = WORD.min(x.cols - first);
                let (means, squares) = self.arch.dispatch(
                    #[inline(always)]
                    || {
                        let values = &values[first_row * x.stride + first..];
                        // The usual width as a constant: the loops are unrolled then.
                        if width == WORD {
                            block_moments(WORD, rows, values, x.stride)
                        } else {
                            block_moments(width, rows, values, x.stride)
                        }
                    },
                );
                let of = means.into_iter().map(f64::from).zip(squares.into_iter().map(f64::from));
                all.merge(rows, first, of.take(width));
            }
            all.rows += rows;
        }
        all
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
        norm.assert_fits(x, mask.as_deref());
        assert_eq!(out.len(), x.len());
        assert!(residual.is_none_or(|residual| residual.len() == x.len()));
        let to = Normed { mean: row_of(norm.mean), factors: factors(norm), bias: norm.bias.floats() };
        let all = norm.rows.start * cols..norm.rows.end * cols;
        let (x, residual) =
            (&x.floats()[all.clone()], residual.map(|residual| &residual.floats()[all.clone()]));
        let mut none = [];
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
                        for (word, out) in out.chunks_mut(WORD).enumerate() {
                            let (first, width) = (word * WORD, out.len());
                            let x = &x[from + first..][..width];
                            let added = residual.map(|residual| &residual[from + first..][..width]);
                            let rectify = mask.get_mut(row * words + word);
                            match width {
                                WORD => to.turn(WORD, first, x, added, rectify, out),
                                _ => to.turn(width, first, x, added, rectify, out),
                            }
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
        let cols = norm.cols;
        norm.assert_fits(x, mask);
        assert_eq!((dy.len(), out.len()), (x.len(), 2 * cols));
        let parts: Vec<Range<usize>> = cut(norm.rows.len(), self.threads(), BLOCK_ROWS).collect();
        let (values, dy) = (x.floats(), dy.floats());
        let mask = mask.map(Tensor::integers);
        let parts: Vec<Vec<f64>> = parts
            .into_par_iter()
            .map(|rows| {
                let rows = norm.rows.start + rows.start..norm.rows.start + rows.end;
                self.sums_of(rows, row_of(norm.mean), values, mask, dy)
            })
            .collect();
        let variance = row_of(norm.variance);
        for (at, out) in out.floats_mut().iter_mut().enumerate() {
            let sum: f64 = parts.iter().map(|part| part[at]).sum();
            // The first half is of `dy` alone, the second of `dy` times the distance from the mean.
            let factor = if at < cols { 1.0 } else { f64::from(scale(variance[at - cols], norm.eps)) };
            let sum = (sum * factor) as f32;
            *out = if accumulate { *out + sum } else { sum };
        }
    }

    /// Sums over some rows: of `dy` as the mask leaves it, then of that times the distance from the mean.
    fn sums_of(
        &self,
        rows: Range<usize>,
        mean: &[f32],
        x: &[f32],
        mask: Option<&[i32]>,
        dy: &[f32],
    ) -> Vec<f64> {
        let (cols, words) = (mean.len(), mean.len().div_ceil(WORD));
        let mut sums = vec![0.0; 2 * cols];
        let (plain, along) = sums.split_at_mut(cols);
        for first_row in rows.clone().step_by(BLOCK_ROWS) {
            let block = first_row..rows.end.min(first_row + BLOCK_ROWS);
            for (word, first) in (0..cols).step_by(WORD).enumerate() {
                let width = WORD.min(cols - first);
                let row = |row: usize| {
                    let at = row * cols + first;
                    let bits = mask.map_or(!0, |mask| mask[row * words + word]);
                    (&x[at..at + width], &dy[at..at + width], bits)
                };
                let (totals, products) = self.arch.dispatch(
                    #[inline(always)]
                    || match width {
                        WORD => block_sums(WORD, block.clone(), &mean[first..], row),
                        _ => block_sums(width, block.clone(), &mean[first..], row),
                    },
                );
                let to = plain[first..].iter_mut().zip(&mut along[first..]);
                for ((plain, along), (total, product)) in to.zip(totals.iter().zip(&products)) {
                    *plain += f64::from(*total);
                    *along += f64::from(*product);
                }
            }
        }
        sums
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
        let (cols, words) = (norm.cols, norm.cols.div_ceil(WORD));
        norm.assert_fits(x, mask);
        assert_eq!((dy.len(), sums.len()), (x.len(), 2 * cols));
        let slopes = Slopes::new(norm, sums.floats(), group_rows);
        let mask = mask.map(|mask| &mask.integers()[norm.rows.start * words..]);
        let chunk = norm.rows.len().div_ceil(self.threads()).max(1);
        let all = norm.rows.start * cols..norm.rows.end * cols;
        let parts = x.floats_mut()[all.clone()].par_chunks_mut(chunk * cols);
        let parts = parts.zip(dy.floats_mut()[all].par_chunks_mut(chunk * cols)).enumerate();
        parts.for_each(|(index, (x, dy))| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    let rows = x.chunks_exact_mut(cols).zip(dy.chunks_exact_mut(cols));
                    for (row, (x, dy)) in rows.enumerate() {
                        let bits = mask.map(|mask| &mask[(index * chunk + row) * words..][..words]);
                        let parts = x.chunks_mut(WORD).zip(dy.chunks_mut(WORD));
                        for (word, (x, dy)) in parts.enumerate() {
                            let bits = bits.map_or(!0, |bits| bits[word]);
                            match x.len() {
                                WORD => slopes.turn(WORD, word * WORD, x, bits, dy, keep_masked),
                                width => slopes.turn(width, word * WORD, x, bits, dy, keep_masked),
                            }
                        }
                    }
                },
            );
        });
    }
}

/// What norms a number: `(x - mean) * factor + bias`.
struct Normed<'a> {
    mean: &'a [f32],
    factors: Vec<f32>,
    bias: &'a [f32],
}

impl Normed<'_> {
    /// Up to 32 numbers from column `first` on, plus what is added to them, then ReLU where there is a word to fill.
    #[inline(always)]
    fn turn(
        &self,
        width: usize,
        first: usize,
        x: &[f32],
        added: Option<&[f32]>,
        word: Option<&mut i32>,
        out: &mut [f32],
    ) {
        let mean = &self.mean[first..][..width];
        let factors = &self.factors[first..][..width];
        let bias = &self.bias[first..][..width];
        let (x, out) = (&x[..width], &mut out[..width]);
        for lane in 0..width {
            out[lane] = (x[lane] - mean[lane]) * factors[lane] + bias[lane];
        }
        if let Some(added) = added {
            let added = &added[..width];
            for lane in 0..width {
                out[lane] += added[lane];
            }
        }
        if let Some(word) = word {
            *word = rectify_word(width, out);
        }
    }
}

/// Sums over a block of rows, see [`CpuDevice::sums_of`]. `row` gives numbers, gradients and bits.
#[inline(always)]
fn block_sums<'a>(
    width: usize,
    rows: Range<usize>,
    mean: &[f32],
    row: impl Fn(usize) -> (&'a [f32], &'a [f32], i32),
) -> (Lanes, Lanes) {
    let (mut totals, mut products) = ([0.0; WORD], [0.0; WORD]);
    let mean = &mean[..width];
    for at in rows {
        let (x, dy, bits) = row(at);
        let (x, dy) = (&x[..width], &dy[..width]);
        for lane in 0..width {
            let slope = if bits & (1 << lane) != 0 { dy[lane] } else { 0.0 };
            totals[lane] += slope;
            products[lane] += slope * (x[lane] - mean[lane]);
        }
    }
    (totals, products)
}

/// What makes the gradient of a normed number: `of_slope * dy - (constant + of_distance * (x - mean))`.
struct Slopes<'a> {
    mean: &'a [f32],
    of_slope: Vec<f32>,
    of_distance: Vec<f32>,
    constant: Vec<f32>,
}

impl<'a> Slopes<'a> {
    fn new(norm: &ColumnNorm<'a>, sums: &[f32], group_rows: usize) -> Slopes<'a> {
        let (plain, along) = sums.split_at(norm.cols);
        let (variance, of_slope) = (row_of(norm.variance), factors(norm));
        let share = |column: usize| of_slope[column] / group_rows as f32;
        let distance = |column: usize| share(column) * along[column] * scale(variance[column], norm.eps);
        let of_distance = (0..norm.cols).map(distance).collect();
        let constant = (0..norm.cols).map(|column| share(column) * plain[column]).collect();
        Slopes { mean: row_of(norm.mean), of_slope, of_distance, constant }
    }

    /// Up to 32 numbers from column `first` on become their gradients.
    #[inline(always)]
    fn turn(&self, width: usize, first: usize, x: &mut [f32], bits: i32, dy: &mut [f32], keep_masked: bool) {
        let mean = &self.mean[first..][..width];
        let of_slope = &self.of_slope[first..][..width];
        let of_distance = &self.of_distance[first..][..width];
        let constant = &self.constant[first..][..width];
        let (x, dy) = (&mut x[..width], &mut dy[..width]);
        for lane in 0..width {
            let slope = if bits & (1 << lane) != 0 { dy[lane] } else { 0.0 };
            let away = constant[lane] + of_distance[lane] * (x[lane] - mean[lane]);
            x[lane] = of_slope[lane] * slope - away;
            if keep_masked {
                dy[lane] = slope;
            }
        }
    }
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
