//! Softmax and cross-entropy in place: the logits become their own gradient, so they exist once.

use rayon::prelude::*;

use super::CpuDevice;
use super::math::{exp, max, sum_by};
use crate::device::{LossMode, MatMut};

impl CpuDevice {
    /// The sum of the rows' losses, rows added in order.
    pub(super) fn softmax_loss(&self, targets: &[i32], mode: LossMode, logits: MatMut) -> f64 {
        let (rows, vocabulary, stride) = (logits.rows, logits.cols, logits.stride);
        assert_eq!((targets.len(), logits.offset), (rows, 0));
        // The last row may end with its last logit.
        let end = logits.tensor.len().min(rows * stride);
        let logits = &mut logits.tensor.floats_mut()[..end];
        let chunk = rows.div_ceil(4 * self.threads()).max(1);
        let parts: Vec<f64> = logits
            .par_chunks_mut(chunk * stride)
            .zip(targets.par_chunks(chunk))
            .map(|(logits, targets)| {
                self.arch.dispatch(
                    #[inline(always)]
                    || {
                        let mut sum = 0.0;
                        for (row, target) in logits.chunks_mut(stride).zip(targets) {
                            let (row, between) = row.split_at_mut(vocabulary);
                            sum += f64::from(row_loss(row, *target, mode));
                            between.fill(0.0);
                        }
                        sum
                    },
                )
            })
            .collect();
        parts.iter().sum()
    }
}

#[inline(always)]
fn row_loss(row: &mut [f32], target: i32, mode: LossMode) -> f32 {
    let Ok(target) = usize::try_from(target) else {
        if mode != LossMode::LossOnly {
            row.fill(0.0);
        }
        return 0.0;
    };
    let highest = max(row);
    let at_target = row[target];
    match mode {
        LossMode::LossOnly => {
            let sum = sum_by(row.len(), |i| exp(row[i] - highest));
            sum.ln() + (highest - at_target)
        }
        LossMode::Gradient { scale } => {
            for value in row.iter_mut() {
                *value = exp(*value - highest);
            }
            let sum = sum_by(row.len(), |i| row[i]);
            let factor = scale / sum;
            for value in row.iter_mut() {
                *value *= factor;
            }
            row[target] -= scale;
            sum.ln() + (highest - at_target)
        }
    }
}
