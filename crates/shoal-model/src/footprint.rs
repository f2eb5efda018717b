//! The bytes each layer's instructions take, to the byte. The layers in `shoal-nn` allocate in the order
//! written down here, and a test there holds the two against each other: this is what lets a plan promise
//! its peak before anything runs.

use crate::chain::{BlockSpec, EmbeddingSpec, HeadSpec, LayerKind, PatchSpec, Predicts};
use crate::config::{Activation, Norm, NormPlace};
use crate::precision::Precision;

mod convolution;
mod join;

pub use convolution::{Phase, Phases};

/// Every allocation is rounded up to this many bytes: a multiple of any vector register and of the
/// alignment that GPU copies want.
pub const GRANULE_BYTES: u64 = 256;

/// Rows of logits that exist at a time where the logits are not kept: enough to keep the device busy.
pub fn head_chunk_rows(precision: Precision) -> usize {
    if precision.is_half() { 1024 } else { 128 }
}

/// Bytes of one allocation of 4-byte elements.
pub fn allocation_bytes(elements: usize) -> u64 {
    (4 * elements as u64).next_multiple_of(GRANULE_BYTES)
}

/// Bytes of one allocation of activations or of a compute copy.
pub fn compute_bytes(elements: usize, precision: Precision) -> u64 {
    ((precision.bytes() * elements) as u64).next_multiple_of(GRANULE_BYTES)
}

/// What a forward leaves behind for the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    /// Everything the backward reads.
    Saved,
    /// The layer's input alone; the rest is recomputed.
    Input,
    /// Nothing: evaluation.
    Nothing,
}

/// Bytes of one layer for one micro-batch. A `peak` is what an instruction adds, at its highest, to the
/// bytes that lived before it; its inputs are among those.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// The boundary activation the layer hands on (and, equally large, its gradient).
    pub output: u64,
    /// The boundary activation (or tokens, or images) the layer takes.
    pub input: u64,
    /// Everything kept between forward and backward, the input included.
    pub saved: u64,
    /// Forward that keeps everything the backward reads.
    pub forward_peak: u64,
    /// Forward that keeps its input or nothing.
    pub forward_lean_peak: u64,
    /// From the input to everything the backward reads.
    pub recompute_peak: u64,
    pub backward_peak: u64,
    /// Backward of a layer that puts gradients of weights off ([`LayerKind::puts_off`]).
    pub putting_off_peak: u64,
    /// What it leaves for them.
    pub put_off: u64,
}

/// Follows allocations and releases to their highest point.
struct Meter {
    live: u64,
    peak: u64,
}

impl Meter {
    fn take(&mut self, bytes: u64) -> u64 {
        self.live += bytes;
        self.peak = self.peak.max(self.live);
        bytes
    }

    fn give(&mut self, bytes: u64) {
        self.live -= bytes;
    }
}

impl LayerKind {
    /// The bytes of the boundary activation that it hands on, and of its gradient.
    pub fn output_bytes(&self, samples: usize, sequence: usize, precision: Precision) -> u64 {
        match self.output_elements(sequence) {
            0 => 0,
            elements => compute_bytes(samples * elements, precision),
        }
    }

    /// Elements of that activation a sample; the last layer hands none on.
    pub fn output_elements(&self, sequence: usize) -> usize {
        match self {
            LayerKind::Embedding(spec) => sequence * spec.width,
            LayerKind::Patches(spec) => (spec.image.patches() + 1) * spec.width,
            LayerKind::Block(spec) => sequence * spec.width,
            LayerKind::Convolution(spec) => spec.output_elements(),
            LayerKind::Join(spec) => spec.output_elements(),
            LayerKind::Head(_) => 0,
        }
    }

    /// The bytes of `samples` samples instruction by instruction, for layers that more is known of than a footprint.
    pub fn phases(&self, samples: usize, precision: Precision) -> Option<Phases> {
        match self {
            LayerKind::Convolution(spec) => Some(spec.phases(samples, precision)),
            LayerKind::Join(spec) => Some(spec.phases(samples, precision)),
            _ => None,
        }
    }

    /// The footprint of `samples` samples of `sequence` rows.
    ///
    /// # Panics
    /// For layers that have [`LayerKind::phases`].
    pub fn footprint(&self, samples: usize, sequence: usize, precision: Precision) -> Footprint {
        let rows = samples * sequence;
        match self {
            LayerKind::Convolution(_) | LayerKind::Join(_) => panic!("such a layer has phases"),
            LayerKind::Embedding(spec) => embedding(spec, rows, precision),
            LayerKind::Block(spec) => block(spec, rows, precision),
            LayerKind::Patches(spec) => patches(spec, samples, precision),
            LayerKind::Head(spec) => head(spec, samples, sequence, precision),
        }
    }
}

/// Floats a norm keeps per row: mean and reciprocal deviation, or the reciprocal root mean square.
pub fn norm_statistics(norm: Norm) -> usize {
    match norm {
        Norm::Layer => 2,
        Norm::Rms => 1,
    }
}

fn embedding(spec: &EmbeddingSpec, rows: usize, precision: Precision) -> Footprint {
    let output = compute_bytes(rows * spec.width, precision);
    let tokens = allocation_bytes(rows);
    // A norm's input and statistics are not kept: looking up again is cheap.
    let normed = spec.norm.map_or(0, |(norm, _)| output + allocation_bytes(rows * norm_statistics(norm)));
    Footprint {
        output,
        input: tokens,
        saved: tokens,
        forward_peak: output + normed,
        forward_lean_peak: output + normed,
        recompute_peak: 0,
        // Those, and the gradient of the norm's input.
        backward_peak: if normed > 0 { normed + output } else { 0 },
        ..Footprint::default()
    }
}

fn patches(spec: &PatchSpec, samples: usize, precision: Precision) -> Footprint {
    let rows = samples * (spec.image.patches() + 1);
    let output = compute_bytes(rows * spec.width, precision);
    let images = allocation_bytes(samples * spec.image.elements());
    // Gathered again in the backward: the images themselves are what is kept.
    let gathered = compute_bytes(rows * spec.image.patch_elements(), precision);
    Footprint {
        output,
        input: images,
        saved: images,
        forward_peak: gathered + output,
        forward_lean_peak: gathered + output,
        recompute_peak: 0,
        backward_peak: gathered,
        ..Footprint::default()
    }
}

fn block(spec: &BlockSpec, rows: usize, precision: Precision) -> Footprint {
    let bytes = |per_row: usize| compute_bytes(rows * per_row, precision);
    let float_bytes = |per_row: usize| allocation_bytes(rows * per_row);
    let boundary = bytes(spec.width);
    let statistics = float_bytes(norm_statistics(spec.norm));
    let (qkv, attention) = (bytes(spec.qkv_width()), bytes(spec.query_width()));
    let logsumexp = float_bytes(spec.heads);
    let mlp = bytes(spec.mlp_width);
    let pre_activations = match spec.activation {
        Activation::GeluTanh | Activation::GeluErf => mlp,
        Activation::SwiGlu => 2 * mlp,
    };
    // The last norm's input, where norms come after.
    let last_sum = if spec.norm_place == NormPlace::After { boundary } else { 0 };
    let kept_activation = if spec.keeps_activation(precision) { mlp } else { 0 };
    let saved = boundary
        + statistics
        + qkv
        + attention
        + logsumexp
        + boundary
        + statistics
        + pre_activations
        + kept_activation
        + last_sum;

    // The norm's output is where the block's output ends up, so it counts once.
    let forward_peak = (saved - boundary) + boundary + (mlp - kept_activation);

    // The highest point of a backward, and what it leaves.
    let backward = |puts_off: bool| {
        let put_off = |bytes: u64| if puts_off { bytes } else { 0 };
        let mut meter = Meter { live: saved, peak: saved };
        let normed = meter.take(boundary);
        if spec.norm_place == NormPlace::After {
            meter.give(last_sum + statistics);
        }
        let activation_gradient = meter.take(mlp);
        meter.give(match spec.activation {
            // What the activation was made from (it becomes it, where that is not kept).
            Activation::GeluTanh | Activation::GeluErf => mlp + kept_activation,
            Activation::SwiGlu => activation_gradient,
        });
        // The gradients of what the MLP projected its rows to.
        let up_gradients = match spec.activation {
            Activation::GeluTanh | Activation::GeluErf => activation_gradient,
            Activation::SwiGlu => pre_activations,
        };
        meter.give(up_gradients - put_off(up_gradients));
        meter.give(boundary + statistics); // of the norm between attention and MLP
        meter.take(put_off(boundary)); // scratch beside the rows that stay for the gradients put off
        meter.take(attention); // gradient of the attention's output
        let scratch = meter.take(float_bytes(spec.attention_scratch(precision)));
        let qkv_gradient = meter.take(qkv);
        meter.give(attention + scratch + attention + logsumexp + qkv);
        // The input and two rooms of normed rows: two of the three stay.
        meter.give(qkv_gradient - put_off(qkv_gradient) + normed + boundary - put_off(boundary));
        if spec.norm_place == NormPlace::Before {
            meter.give(statistics);
        }
        (meter.peak - saved, meter.live)
    };
    let (backward_peak, nothing) = backward(false);
    debug_assert_eq!(nothing, 0);
    let (putting_off_peak, put_off) = backward(true);

    Footprint {
        output: boundary,
        input: boundary,
        saved,
        forward_peak,
        forward_lean_peak: forward_peak,
        recompute_peak: match spec.norm_place {
            // No output and so no activation that is not kept, but the normed rows.
            NormPlace::Before => saved,
            // The last norm's input is all but the output.
            NormPlace::After => forward_peak,
        },
        backward_peak,
        putting_off_peak,
        put_off,
    }
}

fn head(spec: &HeadSpec, samples: usize, sequence: usize, precision: Precision) -> Footprint {
    let boundary = compute_bytes(samples * sequence * spec.width, precision);
    // From here on only the rows that have logits.
    let rows = spec.rows(samples, sequence);
    let projected = compute_bytes(rows * spec.width, precision);
    let (normed, statistics) = match spec.norm {
        Some(norm) => (projected, allocation_bytes(rows * norm_statistics(norm))),
        None => (0, 0),
    };
    let targets = allocation_bytes(rows);
    let columns = spec.logit_columns(precision);
    let logits = compute_bytes(rows * columns, precision);
    let chunk = compute_bytes(rows.min(head_chunk_rows(precision)) * columns, precision);
    // What the dense layer makes, and its activation.
    let transformed = if spec.transform.is_some() { 2 * normed } else { 0 };
    Footprint {
        output: 0,
        input: boundary + targets,
        saved: boundary + targets + transformed + statistics + logits,
        forward_peak: transformed + statistics + normed + logits,
        forward_lean_peak: transformed + statistics + normed + chunk,
        recompute_peak: transformed + statistics + normed + logits,
        // The norm's output and the gradient of its input; where there is a dense layer, its input's gradient
        // takes the place of the former. Where not every row has logits, then the gradient of all.
        backward_peak: projected + normed + if spec.predicts == Predicts::Class { boundary } else { 0 },
        ..Footprint::default()
    }
}

/// What a prediction adds, at its highest, to the bytes that lived before it.
pub fn prediction_peak(spec: &HeadSpec, samples: usize, sequence: usize, precision: Precision) -> u64 {
    let rows = spec.predicted_rows(samples, sequence);
    let boundary = compute_bytes(rows * spec.width, precision);
    let transformed = if spec.transform.is_some() { 2 * boundary } else { 0 };
    let normed = spec.norm.map_or(0, |norm| boundary + allocation_bytes(rows * norm_statistics(norm)));
    transformed + normed + compute_bytes(rows * spec.logit_columns(precision), precision)
}
