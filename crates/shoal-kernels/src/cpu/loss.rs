//! Softmax and cross-entropy in place: the logits become their own gradient, so they exist once.

use rayon::prelude::*;

use super::CpuDevice;
use super::math::{exp, max, sum_by};
use crate::device::LossMode;
use crate::tensor::Tensor;

impl CpuDevice {
    /// The sum of the rows' losses, rows added in order.
    pub(super) fn softmax_loss(
        &self,
        targets: &[i32],
        vocabulary: usize,
        mode: LossMode,
        logits: &mut Tensor,
    ) -> f64 {
        let rows = targets.len();
        assert!(logits.len() >= rows * vocabulary);
        let logits = &mut logits.floats_mut()[..rows * vocabulary];
        let chunk = rows.div_ceil(4 * self.threads()).max(1);
        let parts: Vec<f64> = logits
            .par_chunks_mut(chunk * vocabulary)
            .zip(targets.par_chunks(chunk))
            .map(|(logits, targets)| {
                self.arch.dispatch(
                    #[inline(always)]
                    || {
                        let mut sum = 0.0;
                        for (row, target) in logits.chunks_exact_mut(vocabulary).zip(targets) {
                            sum += f64::from(row_loss(row, *target, mode));
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
