//! The bytes of a convolution's instructions. They are more than other layers' because a batch norm cuts forward
//! and backward in two: what comes before the statistics of its group are known, and what comes after.

use super::{Meter, allocation_bytes, compute_bytes};
use crate::convolutional::ConvolutionSpec;
use crate::precision::Precision;

/// What an instruction does to the bytes alive, those aside that go from layer to layer: outputs, inputs and
/// their gradients, which several layers may share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Phase {
    /// The most it adds while it runs, its outputs included.
    pub peak: u64,
    /// What it leaves behind, and what it releases.
    pub gain: u64,
    pub loss: u64,
}

/// The bytes of a layer between images for one micro-batch, instruction by instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Phases {
    pub output: u64,
    /// How many of its inputs are kept for the backward, the first ones; others are let go by the forward.
    pub kept_inputs: usize,
    /// Statistics of one group, or their counterpart in the backward; kept until the step ends.
    pub group: u64,
    /// Up to the statistics, which are not counted: only where there is a norm.
    pub begin: Phase,
    /// What comes after the beginning (or all, where there is no norm) and keeps everything the backward reads.
    pub forward: Phase,
    /// The same, keeping what the rest is recomputed from.
    pub forward_lean: Phase,
    /// All of the forward, keeping nothing.
    pub evaluate: Phase,
    pub recompute: Phase,
    /// Up to the sums of the group, which are not counted.
    pub begin_backward: Phase,
    /// What comes after, or all.
    pub backward: Phase,
}

/// Sizes of what the layer works on.
struct Sizes {
    /// Samples as they come in, where the layer is the first.
    images: u64,
    /// The input; the layer's own where it is the first.
    x: u64,
    convolved: u64,
    output: u64,
    scratch: u64,
    mask: u64,
    places: u64,
}

impl ConvolutionSpec {
    pub fn phases(&self, samples: usize, precision: Precision) -> Phases {
        let bytes = |per_sample: usize| compute_bytes(samples * per_sample, precision);
        let sizes = Sizes {
            images: if self.first { allocation_bytes(samples * self.input_elements()) } else { 0 },
            x: bytes(self.input_elements()),
            convolved: bytes(self.convolved_elements()),
            output: bytes(self.output_elements()),
            scratch: self.scratch_elements(samples, precision).map_or(0, allocation_bytes),
            mask: if self.has_mask() { allocation_bytes(self.mask_elements(samples)) } else { 0 },
            places: if self.takes_maxima() { allocation_bytes(self.place_elements(samples)) } else { 0 },
        };
        let normed = self.norm.is_some();
        Phases {
            output: sizes.output,
            kept_inputs: 1,
            group: if normed { allocation_bytes(2 * self.outputs) } else { 0 },
            begin: self.begin_phase(&sizes),
            forward: self.forward_phase(&sizes, if normed { 0 } else { sizes.convolved }),
            forward_lean: self.forward_phase(&sizes, sizes.convolved),
            evaluate: self.evaluate_phase(&sizes),
            recompute: Phase { peak: sizes.convolved + sizes.scratch, gain: sizes.convolved, loss: 0 },
            begin_backward: self.begin_backward_phase(&sizes),
            backward: self.backward_phase(&sizes),
        }
    }

    /// Bytes of the layer's own input, beside which there is none to take from another.
    fn own_input(&self, sizes: &Sizes) -> u64 {
        if self.first { sizes.x } else { 0 }
    }

    /// The convolution itself, up to what a norm is given.
    fn convolve(&self, sizes: &Sizes, meter: &mut Meter) {
        if self.first {
            meter.take(sizes.x);
            meter.give(sizes.images);
        }
        meter.take(sizes.convolved);
        if self.norm.is_none() {
            meter.take(sizes.mask);
        }
        meter.take(sizes.scratch);
        meter.give(sizes.scratch);
    }

    /// What comes after: to the layer's output, from what the meter holds of `sizes.convolved`.
    fn follow(&self, sizes: &Sizes, meter: &mut Meter) {
        if self.norm.is_some() {
            meter.take(sizes.convolved + sizes.mask);
        }
        if self.pool.is_some() {
            meter.take(sizes.places + sizes.output);
            meter.give(sizes.convolved);
        }
    }

    fn begin_phase(&self, sizes: &Sizes) -> Phase {
        let mut meter = Meter { live: sizes.images, peak: sizes.images };
        self.convolve(sizes, &mut meter);
        let gain = self.own_input(sizes) + sizes.convolved;
        Phase { peak: meter.peak - sizes.images, gain, loss: sizes.images }
    }

    /// `dropped` is what it releases of the beginning's convolved images; without a norm they are not kept.
    fn forward_phase(&self, sizes: &Sizes, dropped: u64) -> Phase {
        let kept = sizes.mask + sizes.places;
        if self.norm.is_some() {
            let mut meter = Meter { live: sizes.convolved, peak: sizes.convolved };
            self.follow(sizes, &mut meter);
            return Phase { peak: meter.peak - sizes.convolved, gain: kept, loss: dropped };
        }
        let mut meter = Meter { live: sizes.images, peak: sizes.images };
        self.convolve(sizes, &mut meter);
        self.follow(sizes, &mut meter);
        let gain = self.own_input(sizes) + kept;
        Phase { peak: meter.peak - sizes.images, gain, loss: sizes.images }
    }

    fn evaluate_phase(&self, sizes: &Sizes) -> Phase {
        let mut meter = Meter { live: sizes.images, peak: sizes.images };
        self.convolve(sizes, &mut meter);
        self.follow(sizes, &mut meter);
        Phase { peak: meter.peak - sizes.images, gain: 0, loss: sizes.images }
    }

    /// From the gradient of the output to that of what the pool was given.
    fn unpool(&self, sizes: &Sizes, meter: &mut Meter) {
        if self.pool.is_some() {
            meter.take(sizes.convolved);
            meter.give(sizes.output + sizes.places);
        }
    }

    fn begin_backward_phase(&self, sizes: &Sizes) -> Phase {
        let start = sizes.output + sizes.places;
        let mut meter = Meter { live: start, peak: start };
        self.unpool(sizes, &mut meter);
        Phase { peak: meter.peak - start, gain: sizes.convolved, loss: sizes.output + sizes.places }
    }

    fn backward_phase(&self, sizes: &Sizes) -> Phase {
        let own = self.own_input(sizes);
        let before = if self.norm.is_some() { sizes.convolved } else { 0 };
        // The gradient that comes in: where there is a norm, its beginning has it.
        let gradient = if self.norm.is_some() { sizes.convolved } else { sizes.output };
        let places = if self.norm.is_some() { 0 } else { sizes.places };
        let start = own + before + gradient + sizes.mask + places;
        let mut meter = Meter { live: start, peak: start };
        if self.norm.is_none() {
            self.unpool(sizes, &mut meter);
        }
        meter.give(sizes.mask);
        if self.norm.is_some() && !self.joins {
            meter.give(gradient);
        }
        meter.take(sizes.scratch);
        meter.take(if self.first { 0 } else { sizes.x });
        Phase { peak: meter.peak - start, gain: 0, loss: start }
    }
}
