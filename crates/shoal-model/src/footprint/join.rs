//! The bytes of a join's instructions. It keeps none of its inputs, only where maxima were.

use super::convolution::{Phase, Phases};
use super::{Meter, allocation_bytes, compute_bytes};
use crate::convolutional::JoinSpec;
use crate::precision::Precision;

/// Sizes of what a join makes of one of its inputs.
struct Part {
    /// The input, and so its gradient.
    x: u64,
    /// What the pool leaves of it.
    pooled: u64,
    places: u64,
}

impl JoinSpec {
    pub fn phases(&self, samples: usize, precision: Precision) -> Phases {
        let part = |channels: &usize| {
            let pooled = samples * self.output_pixels() * channels;
            Part {
                x: compute_bytes(samples * self.pixels() * channels, precision),
                pooled: compute_bytes(pooled, precision),
                places: if self.takes_maxima() { allocation_bytes(pooled.div_ceil(4)) } else { 0 },
            }
        };
        let parts: Vec<Part> = self.channels.iter().map(part).collect();
        let output = compute_bytes(samples * self.output_elements(), precision);
        let forward = self.forward_phase(&parts, output);
        Phases {
            output,
            forward,
            forward_lean: forward,
            evaluate: Phase { gain: 0, ..forward },
            backward: self.backward_phase(&parts, output),
            ..Phases::default()
        }
    }

    fn forward_phase(&self, parts: &[Part], output: u64) -> Phase {
        let mut meter = Meter { live: 0, peak: 0 };
        if self.pool.is_some() {
            parts.iter().for_each(|part| _ = meter.take(part.places + part.pooled));
        }
        // Pooled parts become the output; one alone is it.
        if parts.len() > 1 || self.pool.is_none() {
            meter.take(output);
        }
        Phase { peak: meter.peak, gain: parts.iter().map(|part| part.places).sum(), loss: 0 }
    }

    fn backward_phase(&self, parts: &[Part], output: u64) -> Phase {
        let start = output + parts.iter().map(|part| part.places).sum::<u64>();
        let mut meter = Meter { live: start, peak: start };
        for part in parts {
            let slice = if self.pool.is_some() && parts.len() > 1 { meter.take(part.pooled) } else { 0 };
            meter.take(part.x);
            meter.give(slice + part.places);
        }
        Phase { peak: meter.peak - start, gain: 0, loss: start }
    }
}
