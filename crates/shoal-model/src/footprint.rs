//! The bytes each layer's instructions take, to the byte. The layers in `shoal-nn` allocate in the order
//! written down here, and a test there holds the two against each other: this is what lets a plan promise
//! its peak before anything runs.

use crate::chain::{BlockSpec, EmbeddingSpec, HeadSpec, LayerKind};
use crate::config::{Activation, Norm};
use crate::precision::Precision;

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
    /// The boundary activation (or tokens) the layer takes.
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
    /// The footprint of `samples` samples of `sequence` tokens.
    pub fn footprint(&self, samples: usize, sequence: usize, precision: Precision) -> Footprint {
        let rows = samples * sequence;
        match self {
            LayerKind::Embedding(spec) => embedding(spec, rows, precision),
            LayerKind::Block(spec) => block(spec, rows, precision),
            LayerKind::Head(spec) => head(spec, rows, precision),
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
    Footprint {
        output,
        input: tokens,
        saved: tokens,
        forward_peak: output,
        forward_lean_peak: output,
        recompute_peak: 0,
        backward_peak: 0,
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
        Activation::GeluTanh => mlp,
        Activation::SwiGlu => 2 * mlp,
    };
    let kept_activation = if spec.keeps_activation(precision) { mlp } else { 0 };
    let saved = boundary
        + statistics
        + qkv
        + attention
        + logsumexp
        + boundary
        + statistics
        + pre_activations
        + kept_activation;

    // The norm's output is where the block's output ends up, so it counts once.
    let forward_peak = (saved - boundary) + boundary + (mlp - kept_activation);

    let mut meter = Meter { live: saved, peak: saved };
    let normed = meter.take(boundary);
    let activation_gradient = meter.take(mlp);
    meter.give(match spec.activation {
        // What the activation was made from (it becomes it, where that is not kept).
        Activation::GeluTanh => mlp + kept_activation,
        Activation::SwiGlu => activation_gradient,
    });
    meter.give(match spec.activation {
        Activation::GeluTanh => activation_gradient,
        Activation::SwiGlu => pre_activations,
    });
    meter.give(boundary + statistics); // the MLP norm's input and statistics
    meter.take(attention); // gradient of the attention's output
    let scratch = meter.take(float_bytes(spec.attention_scratch(precision)));
    let qkv_gradient = meter.take(qkv);
    meter.give(attention + scratch + attention + logsumexp + qkv);
    meter.give(qkv_gradient + normed + boundary + statistics);
    debug_assert_eq!(meter.live, 0);

    Footprint {
        output: boundary,
        input: boundary,
        saved,
        forward_peak,
        forward_lean_peak: forward_peak,
        // No output and so no activation that is not kept, but the normed rows.
        recompute_peak: saved,
        backward_peak: meter.peak - saved,
    }
}

fn head(spec: &HeadSpec, rows: usize, precision: Precision) -> Footprint {
    let boundary = compute_bytes(rows * spec.width, precision);
    let statistics = allocation_bytes(rows * norm_statistics(spec.norm));
    let targets = allocation_bytes(rows);
    let columns = spec.logit_columns(precision);
    let logits = compute_bytes(rows * columns, precision);
    let chunk = compute_bytes(rows.min(head_chunk_rows(precision)) * columns, precision);
    Footprint {
        output: 0,
        input: boundary + targets,
        saved: boundary + targets + statistics + logits,
        forward_peak: statistics + boundary + logits,
        forward_lean_peak: statistics + boundary + chunk,
        recompute_peak: statistics + boundary + logits,
        // The norm's output and the gradient of its input.
        backward_peak: 2 * boundary,
    }
}
