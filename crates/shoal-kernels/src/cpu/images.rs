//! Images in patches, the rows around them, and the loss of classes.

use rayon::prelude::*;

use super::CpuDevice;
use super::math::{exp, max, sum_by};
use crate::device::{ClassLoss, LossMode, Mat, MatMut, PatchShape};
use crate::tensor::Tensor;

impl CpuDevice {
    pub(super) fn gather_patches(&self, shape: PatchShape, images: &Tensor, out: &mut Tensor) {
        let PatchShape { samples, channels, size, patch } = shape;
        let (columns, patch_elements) = (size / patch, channels * patch * patch);
        assert_eq!(images.len(), samples * channels * size * size);
        assert_eq!(out.len(), samples * shape.rows() * patch_elements);
        let images = images.floats();
        out.floats_mut().par_chunks_mut(patch_elements).enumerate().for_each(|(row, out)| {
            let (sample, place) = (row / shape.rows(), row % shape.rows());
            let Some(place) = place.checked_sub(1) else { return out.fill(0.0) };
            let corner = place / columns * patch * size + place % columns * patch;
            for (line, out) in out.chunks_exact_mut(patch).enumerate() {
                let (channel, line) = (line / patch, line % patch);
                let from = (sample * channels + channel) * size * size + corner + line * size;
                out.copy_from_slice(&images[from..from + patch]);
            }
        });
    }

    pub(super) fn seat_rows(
        &self,
        sequence: usize,
        width: usize,
        first: &Tensor,
        positions: &Tensor,
        out: &mut Tensor,
    ) {
        let (first, positions) = (&first.floats()[..width], &positions.floats()[..sequence * width]);
        assert!(out.len().is_multiple_of(sequence * width));
        out.floats_mut().par_chunks_mut(width).enumerate().for_each(|(row, out)| {
            let place = row % sequence;
            if place == 0 {
                out.copy_from_slice(first);
            }
            for (out, position) in out.iter_mut().zip(&positions[place * width..]) {
                *out += position;
            }
        });
    }

    pub(super) fn copy_rows(&self, from: Option<Mat>, to: MatMut) {
        assert!(from.is_none_or(|from| (from.rows, from.cols) == (to.rows, to.cols)));
        let values = &mut to.tensor.floats_mut()[to.offset..];
        for (row, out) in values.chunks_mut(to.stride).take(to.rows).enumerate() {
            let out = &mut out[..to.cols];
            match from {
                None => out.fill(0.0),
                Some(from) => {
                    let start = from.offset + row * from.stride;
                    out.copy_from_slice(&from.tensor.floats()[start..start + from.cols]);
                }
            }
        }
    }

    /// The sum of the rows' losses, and how many rows have their target as their likeliest class.
    pub(super) fn classes_loss(
        &self,
        targets: &[i32],
        ClassLoss { mode, smoothing }: ClassLoss,
        logits: MatMut,
    ) -> (f64, u64) {
        let (rows, classes, stride) = (logits.rows, logits.cols, logits.stride);
        assert_eq!((targets.len(), logits.offset), (rows, 0));
        let (mut sum, mut correct) = (0.0, 0);
        for (row, target) in logits.tensor.floats_mut().chunks_mut(stride).zip(targets) {
            let (row, between) = row.split_at_mut(classes);
            between.fill(0.0);
            let Ok(target) = usize::try_from(*target) else {
                row.fill(0.0);
                continue;
            };
            let highest = max(row);
            correct += u64::from(row.iter().position(|logit| *logit == highest) == Some(target));
            let (at_target, mean) = (row[target], sum_by(classes, |i| row[i]) / classes as f32);
            row.iter_mut().for_each(|value| *value = exp(*value - highest));
            let total = sum_by(classes, |i| row[i]);
            sum += f64::from(total.ln() + (highest - at_target) + smoothing * (at_target - mean));
            if let LossMode::Gradient { scale } = mode {
                let everywhere = scale * smoothing / classes as f32;
                row.iter_mut().for_each(|value| *value = *value * (scale / total) - everywhere);
                row[target] -= scale * (1.0 - smoothing);
            }
        }
        (sum, correct)
    }
}
