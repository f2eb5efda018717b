//! LayerNorm and RMSNorm over rows. Rows are cut over the threads for outputs and input gradients, columns
//! for parameter gradients, so that nothing is summed in an order that depends on timing.

use rayon::prelude::*;

use super::CpuDevice;
use super::math::sum_by;
use crate::device::{Mat, NormKind, Sum};
use crate::tensor::Tensor;

/// Subtracted mean and multiplied reciprocal of one row.
#[inline(always)]
fn row_statistics(kind: NormKind, statistics: &[f32]) -> (f32, f32) {
    match kind {
        NormKind::Layer => (statistics[0], statistics[1]),
        NormKind::Rms => (0.0, statistics[0]),
    }
}

#[inline(always)]
fn measure(kind: NormKind, eps: f32, x: &[f32], statistics: &mut [f32]) {
    let n = x.len() as f32;
    match kind {
        NormKind::Layer => {
            let mean = sum_by(x.len(), |i| x[i]) / n;
            let variance = sum_by(x.len(), |i| (x[i] - mean) * (x[i] - mean)) / n;
            statistics[0] = mean;
            statistics[1] = 1.0 / (variance + eps).sqrt();
        }
        NormKind::Rms => statistics[0] = 1.0 / (sum_by(x.len(), |i| x[i] * x[i]) / n + eps).sqrt(),
    }
}

#[inline(always)]
fn apply(mean: f32, scale: f32, x: &[f32], weight: &[f32], bias: Option<&[f32]>, out: &mut [f32]) {
    match bias {
        Some(bias) => {
            for (((out, x), w), b) in out.iter_mut().zip(x).zip(weight).zip(bias) {
                *out = ((x - mean) * scale).mul_add(*w, *b);
            }
        }
        None => {
            for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
                *out = (x - mean) * scale * w;
            }
        }
    }
}

/// Weight and bias as slices of one row's length.
fn parameter_slices<'a>(
    weight: &'a Tensor,
    bias: Option<&'a Tensor>,
    cols: usize,
) -> (&'a [f32], Option<&'a [f32]>) {
    assert_eq!(weight.len(), cols);
    assert!(bias.is_none_or(|bias| bias.len() == cols));
    (weight.floats(), bias.map(Tensor::floats))
}

impl CpuDevice {
    fn row_chunk(&self, rows: usize) -> usize {
        rows.div_ceil(self.threads()).max(1)
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn norm_forward(
        &self,
        kind: NormKind,
        eps: f32,
        x: Mat,
        weight: &Tensor,
        bias: Option<&Tensor>,
        statistics: &mut Tensor,
        out: &mut Tensor,
    ) {
        let (cols, per_row) = (x.cols, kind.statistics());
        assert_eq!((out.len(), statistics.len()), (x.rows * cols, x.rows * per_row));
        let (weight, bias) = parameter_slices(weight, bias, cols);
        let values = &x.tensor.floats()[x.offset..];
        let chunk = self.row_chunk(x.rows);
        let outs = out.floats_mut().par_chunks_mut(chunk * cols);
        let stats = statistics.floats_mut().par_chunks_mut(chunk * per_row);
        outs.zip(stats).enumerate().for_each(|(index, (out, stats))| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    let rows = out.chunks_exact_mut(cols).zip(stats.chunks_exact_mut(per_row));
                    for (row, (out, stats)) in rows.enumerate() {
                        let from = (index * chunk + row) * x.stride;
                        let x = &values[from..from + cols];
                        measure(kind, eps, x, stats);
                        let (mean, scale) = row_statistics(kind, stats);
                        apply(mean, scale, x, weight, bias, out);
                    }
                },
            );
        });
    }

    pub(super) fn norm_replay(
        &self,
        kind: NormKind,
        x: Mat,
        weight: &Tensor,
        bias: Option<&Tensor>,
        statistics: &Tensor,
        out: &mut Tensor,
    ) {
        let (cols, per_row) = (x.cols, kind.statistics());
        assert_eq!((out.len(), statistics.len()), (x.rows * cols, x.rows * per_row));
        let (weight, bias) = parameter_slices(weight, bias, cols);
        let stats = statistics.floats();
        let values = &x.tensor.floats()[x.offset..];
        let chunk = self.row_chunk(x.rows);
        out.floats_mut().par_chunks_mut(chunk * cols).enumerate().for_each(|(index, out)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for (row, out) in out.chunks_exact_mut(cols).enumerate() {
                        let row = index * chunk + row;
                        let (mean, scale) = row_statistics(kind, &stats[row * per_row..]);
                        let from = row * x.stride;
                        apply(mean, scale, &values[from..from + cols], weight, bias, out);
                    }
                },
            );
        });
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn norm_dx(
        &self,
        kind: NormKind,
        x: Mat,
        weight: &Tensor,
        statistics: &Tensor,
        dy: &Tensor,
        dx: &mut Tensor,
        accumulate: bool,
    ) {
        let (cols, per_row) = (x.cols, kind.statistics());
        assert_eq!((dy.len(), dx.len(), weight.len()), (x.rows * cols, x.rows * cols, cols));
        let (weight, stats) = (weight.floats(), statistics.floats());
        let values = &x.tensor.floats()[x.offset..];
        let chunk = self.row_chunk(x.rows);
        let pairs = dx.floats_mut().par_chunks_mut(chunk * cols).zip(dy.floats().par_chunks(chunk * cols));
        pairs.enumerate().for_each(|(index, (dx, dy))| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    let rows = dx.chunks_exact_mut(cols).zip(dy.chunks_exact(cols));
                    for (row, (dx, dy)) in rows.enumerate() {
                        let row = index * chunk + row;
                        let (mean, scale) = row_statistics(kind, &stats[row * per_row..]);
                        let from = row * x.stride;
                        let x = &values[from..from + cols];
                        let n = cols as f32;
                        // With x̂ the normalised row and g = dy * weight:
                        // dx = scale * (g - mean(g) - x̂ * mean(g * x̂)), and no mean(g) for the root mean square.
                        let along = sum_by(cols, |i| dy[i] * weight[i] * ((x[i] - mean) * scale)) / n;
                        let average = match kind {
                            NormKind::Layer => sum_by(cols, |i| dy[i] * weight[i]) / n,
                            NormKind::Rms => 0.0,
                        };
                        for (((dx, dy), w), x) in dx.iter_mut().zip(dy).zip(weight).zip(x) {
                            let normal = (x - mean) * scale;
                            let value = scale * (dy * w - average - normal * along);
                            *dx = if accumulate { *dx + value } else { value };
                        }
                    }
                },
            );
        });
    }

    pub(super) fn norm_dw(
        &self,
        kind: NormKind,
        x: Mat,
        statistics: &Tensor,
        dy: &Tensor,
        (weight_gradient, accumulate): Sum,
        bias_gradient: Option<Sum>,
    ) {
        let (cols, per_row) = (x.cols, kind.statistics());
        assert_eq!((weight_gradient.len(), dy.len()), (cols, x.rows * cols));
        let (dy_all, stats) = (dy.floats(), statistics.floats());
        let values = &x.tensor.floats()[x.offset..];
        if let Some((bias, accumulate)) = bias_gradient {
            self.column_sums(Mat::new(dy, x.rows, cols), bias, accumulate);
        }
        let chunk = cols.div_ceil(self.threads()).next_multiple_of(16);
        weight_gradient.floats_mut().par_chunks_mut(chunk).enumerate().for_each(|(index, sums)| {
            let first = index * chunk;
            self.arch.dispatch(
                #[inline(always)]
                || {
                    if !accumulate {
                        sums.fill(0.0);
                    }
                    for row in 0..x.rows {
                        let (mean, scale) = row_statistics(kind, &stats[row * per_row..]);
                        let x = &values[row * x.stride + first..][..sums.len()];
                        let dy = &dy_all[row * cols + first..][..sums.len()];
                        for ((sum, x), dy) in sums.iter_mut().zip(x).zip(dy) {
                            *sum += dy * ((x - mean) * scale);
                        }
                    }
                },
            );
        });
    }
}
