//! The bytes each layer's instructions take, to the byte. The layers in `shoal-nn` allocate in the order
//! written down here, and a test there holds the two against each other: this is what lets a plan promise
//! its peak before anything runs.

use crate::chain::{BlockSpec, EmbeddingSpec, HeadSpec, LayerKind};
use crate::config::{Activation, Norm};

/// Every allocation is rounded up to this many bytes: a multiple of any vector register and of the
/// alignment that GPU copies want.
pub const GRANULE_BYTES: u64 = 256;

/// Rows of logits that exist at a time where the logits are not kept.
pub const HEAD_CHUNK_ROWS: usize = 128;

/// Bytes of one allocation of 4-byte elements.
pub fn allocation_bytes(elements: usize) -> u64 {
    (4 * elements as u64).next_multiple_of(GRANULE_BYTES)
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
    pub fn footprint(&self, samples: usize, sequence: usize) -> Footprint {
        let rows = samples * sequence;
        match self {
            LayerKind::Embedding(spec) => embedding(spec, rows),
            LayerKind::Block(spec) => block(spec, rows),
            LayerKind::Head(spec) => head(spec, rows),
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

fn embedding(spec: &EmbeddingSpec, rows: usize) -> Footprint {
    let output = allocation_bytes(rows * spec.width);
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

fn block(spec: &BlockSpec, rows: usize) -> Footprint {
    let bytes = |per_row: usize| allocation_bytes(rows * per_row);
    let boundary = bytes(spec.width);
    let statistics = bytes(norm_statistics(spec.norm));
    let (qkv, attention) = (bytes(spec.qkv_width()), bytes(spec.query_width()));
    let logsumexp = bytes(spec.heads);
    let mlp = bytes(spec.mlp_width);
    let pre_activations = match spec.activation {
        Activation::GeluTanh => mlp,
        Activation::SwiGlu => 2 * mlp,
    };
    let saved = boundary + statistics + qkv + attention + logsumexp + boundary + statistics + pre_activations;

    // The norm's output is where the block's output ends up, so it counts once.
    let forward_peak = (saved - boundary) + boundary + mlp;

    let mut meter = Meter { live: saved, peak: saved };
    let normed = meter.take(boundary);
    let activation_gradient = meter.take(mlp);
    meter.give(match spec.activation {
        Activation::GeluTanh => mlp, // the activation itself, once its weight gradient is done
        Activation::SwiGlu => activation_gradient,
    });
    meter.give(match spec.activation {
        Activation::GeluTanh => activation_gradient,
        Activation::SwiGlu => pre_activations,
    });
    meter.give(boundary + statistics); // the MLP norm's input and statistics
    meter.take(attention); // gradient of the attention's output
    let delta = meter.take(logsumexp);
    let qkv_gradient = meter.take(qkv);
    meter.give(attention + delta + attention + logsumexp + qkv);
    meter.give(qkv_gradient + normed + boundary + statistics);
    debug_assert_eq!(meter.live, 0);

    Footprint {
        output: boundary,
        input: boundary,
        saved,
        forward_peak,
        forward_lean_peak: forward_peak,
        // No output and so no activation, but the normed rows.
        recompute_peak: saved,
        backward_peak: meter.peak - saved,
    }
}

fn head(spec: &HeadSpec, rows: usize) -> Footprint {
    let boundary = allocation_bytes(rows * spec.width);
    let statistics = allocation_bytes(rows * norm_statistics(spec.norm));
    let targets = allocation_bytes(rows);
    let logits = allocation_bytes(rows * spec.vocabulary);
    let chunk = allocation_bytes(rows.min(HEAD_CHUNK_ROWS) * spec.vocabulary);
    Footprint {
        output: 0,
        input: boundary + targets,
        saved: boundary + targets + statistics + logits,
        forward_peak: statistics + boundary + logits,
        forward_lean_peak: statistics + boundary + chunk,
        recompute_peak: statistics + boundary + logits,
        // The norm's output first; the logits are gone before the input's gradient is made.
        backward_peak: boundary.max((2 * boundary).saturating_sub(logits)),
    }
}
