//! Attention on tensor cores, for elements of two bytes: causal or not, grouped queries, dropout,
//! samples of different lengths. It needs
//! no library but those every kernel needs, and serves where cuDNN is missing or lacks what is asked. Which
//! kernels suit depends on the head's size and on the shared memory of the GPU.
//!
//! `logsumexp` and `delta` are f32 and lie as [samples, heads, sequence].

use super::CudaDevice;
use super::context::GpuFacts;
use super::launch::{Address, DropoutParameter, Grid, Parameter, THREADS, at_or_null, parameter};
use crate::device::{AttentionBackward, AttentionShape, DropoutSite, Result};
use crate::tensor::{Element, Tensor};

/// The widest head the kernels' registers hold.
const SIZE_MAX: usize = 128;
/// Tiles of at least 32 rows go along a side of the grid.
const SEQUENCE_MAX: usize = 32 * GRID_SIDE_MAX;
/// Elements of a joint row: a tile's rows are reached by 32-bit offsets.
const ROW_MAX: usize = 1 << 23;
/// Blocks along the second and third side of a grid.
const GRID_SIDE_MAX: usize = 65_535;
/// Heads of any sample that start together, each with its longest tile. Enough to fill a GPU, few enough for
/// their keys and values to stay in its cache.
const SECTION: usize = 32;

/// `flash::Shape` of flash.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct ShapeParameter {
    samples: i32,
    sequence: i32,
    heads: i32,
    kv_heads: i32,
    size: i32,
    scale: f32,
    causal: i32,
    vectors: i32,
    lengths: Address,
}

// SAFETY: struct flash::Shape.
unsafe impl Parameter for ShapeParameter {}

impl ShapeParameter {
    /// Rows that all `tensors` hold can be copied 16 bytes at a time where each begins on such a multiple.
    fn new(shape: &AttentionShape, lengths: Option<&Tensor>, tensors: &[&Tensor]) -> ShapeParameter {
        let whole = |tensor: &&Tensor| (tensor.address() as usize).is_multiple_of(16);
        let vectors = shape.head_size.is_multiple_of(8) && tensors.iter().all(whole);
        ShapeParameter {
            samples: shape.samples as i32,
            sequence: shape.sequence as i32,
            heads: shape.heads as i32,
            kv_heads: shape.kv_heads as i32,
            size: shape.head_size as i32,
            scale: shape.scale,
            causal: shape.causal.into(),
            vectors: vectors.into(),
            lengths: at_or_null(lengths),
        }
    }
}

/// A kernel for heads of up to `width`, as flash.cu instantiates it.
struct Kernel {
    width: usize,
    warps: usize,
    /// Rows of one warp: of queries, or of keys where keys and values get their gradients.
    warp_rows: usize,
    /// Rows of the tiles that pass by.
    streamed: usize,
    names: [&'static str; 2],
}

macro_rules! names {
    ($kind:literal, $tail:literal) => {
        [concat!("flash_", $kind, "_bf16", $tail), concat!("flash_", $kind, "_f16", $tail)]
    };
}

macro_rules! kernel {
    ($width:literal, $warps:literal x $rows:literal, $streamed:literal, $kind:literal, $tail:literal) => {
        Kernel {
            width: $width,
            warps: $warps,
            warp_rows: $rows,
            streamed: $streamed,
            names: names!($kind, $tail),
        }
    };
}

// Of kernels for the same width, the faster comes first; the narrow ones fit GPUs with less shared memory.

static FORWARD: [Kernel; 3] = [
    kernel!(64, 4 x 32, 64, "attention", "_64"),
    kernel!(96, 4 x 32, 64, "attention", "_96"),
    kernel!(128, 4 x 32, 64, "attention", "_128"),
];

static QUERY: [Kernel; 5] = [
    kernel!(64, 4 x 32, 64, "query_gradient", "_64"),
    kernel!(96, 8 x 16, 64, "query_gradient", "_96"),
    kernel!(96, 4 x 16, 32, "query_gradient", "_96_narrow"),
    kernel!(128, 8 x 16, 64, "query_gradient", "_128"),
    kernel!(128, 4 x 16, 32, "query_gradient", "_128_narrow"),
];

static KEY_VALUE: [Kernel; 5] = [
    kernel!(64, 4 x 32, 32, "key_value_gradient", "_64"),
    kernel!(96, 8 x 16, 64, "key_value_gradient", "_96"),
    kernel!(96, 4 x 16, 32, "key_value_gradient", "_96_narrow"),
    kernel!(128, 8 x 16, 64, "key_value_gradient", "_128"),
    kernel!(128, 4 x 16, 32, "key_value_gradient", "_128_narrow"),
];

static DELTA: [&str; 2] = names!("delta", "");

/// Lanes that make one row's delta together.
const DELTA_LANES: usize = 8;

/// Tiles in flight: FLASH_STAGES of flash.cu.
fn stages(facts: &GpuFacts) -> usize {
    if facts.capability >= (8, 0) { 2 } else { 1 }
}

/// Shared bytes a block may take. flash.cu leaves out kernels that no GPU of an architecture is given,
/// counting on 64 KB before 8.0 and on at least 99 KB from there on.
fn room(facts: &GpuFacts) -> Option<usize> {
    let shared_bytes = facts.shared_bytes;
    if facts.capability < (8, 0) {
        return Some(shared_bytes.min(64 << 10));
    }
    (shared_bytes >= 99 << 10).then_some(shared_bytes)
}

fn forward_bytes(kernel: &Kernel, _: usize) -> usize {
    2 * kernel.width * (kernel.rows() + 2 * kernel.streamed)
}

fn query_bytes(kernel: &Kernel, stages: usize) -> usize {
    4 * kernel.width * (kernel.rows() + stages * kernel.streamed)
}

/// With three numbers for each query that passes by.
fn key_value_bytes(kernel: &Kernel, stages: usize) -> usize {
    query_bytes(kernel, stages) + 12 * stages * kernel.streamed
}

/// A kernel that fits, and its bytes of shared memory.
type Fit = (&'static Kernel, usize);

/// The first kernel that takes the head and fits the GPU.
fn find(
    kernels: &'static [Kernel],
    bytes: fn(&Kernel, usize) -> usize,
    facts: &GpuFacts,
    head_size: usize,
) -> Option<Fit> {
    let room = room(facts)?;
    let fits = |(kernel, bytes): &Fit| kernel.width >= head_size && *bytes <= room;
    kernels.iter().map(|kernel| (kernel, bytes(kernel, stages(facts)))).find(fits)
}

/// Forward, queries' gradient, keys' and values' gradient.
fn find_all(facts: &GpuFacts, head_size: usize) -> Option<[Fit; 3]> {
    Some([
        find(&FORWARD, forward_bytes, facts, head_size)?,
        find(&QUERY, query_bytes, facts, head_size)?,
        find(&KEY_VALUE, key_value_bytes, facts, head_size)?,
    ])
}

fn serves(facts: &GpuFacts, element: Element, shape: &AttentionShape) -> bool {
    let instructions = match element {
        Element::F32 => false,
        Element::Bf16 => facts.capability >= (8, 0),
        Element::F16 => facts.capability >= (7, 5),
    };
    instructions
        && (1..=SIZE_MAX).contains(&shape.head_size)
        && shape.sequence <= SEQUENCE_MAX
        && shape.qkv_width() <= ROW_MAX
        && (shape.heads * shape.samples).div_ceil(SECTION) <= GRID_SIDE_MAX
        // The highest score is looked for before it is scaled.
        && shape.scale > 0.0
        && shape.scale.is_finite()
        && find_all(facts, shape.head_size).is_some()
}

impl Kernel {
    /// Rows of a block.
    fn rows(&self) -> usize {
        self.warps * self.warp_rows
    }

    fn grid(&self, shape: &AttentionShape, heads: usize, shared_bytes: usize) -> Grid {
        let all = heads * shape.samples;
        let section = all.min(SECTION);
        let sections = if all == 0 { 0 } else { all.div_ceil(section) };
        let blocks = [section, shape.sequence.div_ceil(self.rows()), sections];
        Grid { blocks, threads: [32 * self.warps, 1], shared_bytes }
    }
}

fn of_element(names: &[&'static str; 2], element: Element) -> &'static str {
    match element {
        Element::Bf16 => names[0],
        Element::F16 => names[1],
        Element::F32 => unreachable!("refused by assert_serves"),
    }
}

impl CudaDevice {
    /// Whether these kernels serve this element, head size and GPU.
    pub(super) fn flash_serves(&self, element: Element, shape: &AttentionShape) -> bool {
        serves(&self.facts, element, shape)
    }

    fn assert_serves(&self, shape: &AttentionShape, tensors: &[&Tensor], numbers: &[&Tensor]) -> Element {
        let element = tensors[0].element();
        assert!(shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads));
        assert!(self.flash_serves(element, shape), "{element:?} {shape:?}: ask flash_serves first");
        assert!(tensors.iter().all(|tensor| tensor.element() == element));
        for tensor in numbers {
            assert_eq!(tensor.element(), Element::F32);
            assert!(tensor.len() >= shape.rows() * shape.heads);
        }
        element
    }

    pub(super) fn flash_forward(
        &self,
        shape: AttentionShape,
        dropout: Option<DropoutSite>,
        lengths: Option<&Tensor>,
        qkv: &Tensor,
        out: &mut Tensor,
        logsumexp: &mut Tensor,
    ) -> Result {
        let element = self.assert_serves(&shape, &[qkv, out], &[logsumexp]);
        shape.assert_lengths(lengths);
        assert_eq!(qkv.len(), shape.rows() * shape.qkv_width());
        assert_eq!(out.len(), shape.rows() * shape.query_width());
        let [(kernel, shared), ..] = find_all(&self.facts, shape.head_size).expect("it serves");
        let numbers = ShapeParameter::new(&shape, lengths, &[qkv, out]);
        let site = DropoutParameter::from(dropout);
        let (qkv, out, logsumexp) = (qkv.at(0), out.at(0), logsumexp.at(0));
        let mut parameters =
            [parameter(&numbers), parameter(&site), parameter(&qkv), parameter(&out), parameter(&logsumexp)];
        let grid = kernel.grid(&shape, shape.heads, shared);
        // SAFETY: the lengths are asserted against the shape, which bounds what the kernel touches.
        unsafe { self.kernels.launch(of_element(&kernel.names, element), grid, &mut parameters) }
    }

    /// Gradients of queries, keys and values.
    pub(super) fn flash_backward(
        &self,
        shape: AttentionShape,
        dropout: Option<DropoutSite>,
        of: AttentionBackward,
    ) -> Result {
        of.assert_fits(&shape);
        let tensors = [of.qkv, of.out, of.out_gradient, &*of.qkv_gradient];
        let element = self.assert_serves(&shape, &tensors, &[of.logsumexp, &*of.scratch]);
        let [_, (query, query_shared), (key_value, key_value_shared)] =
            find_all(&self.facts, shape.head_size).expect("it serves");
        let numbers = ShapeParameter::new(&shape, of.lengths, &tensors);
        let site = DropoutParameter::from(dropout);
        let units = shape.rows() * shape.heads;
        let (qkv, out, logsumexp) = (of.qkv.at(0), of.out.at(0), of.logsumexp.at(0));
        let (out_gradient, delta) = (of.out_gradient.at(0), of.scratch.at(0));
        let qkv_gradient = of.qkv_gradient.at(0);
        let mut first = [
            parameter(&numbers),
            parameter(&units),
            parameter(&out),
            parameter(&out_gradient),
            parameter(&delta),
        ];
        let mut parameters = [
            parameter(&numbers),
            parameter(&site),
            parameter(&qkv),
            parameter(&logsumexp),
            parameter(&out_gradient),
            parameter(&delta),
            parameter(&qkv_gradient),
        ];
        let by_row = Grid::blocks((DELTA_LANES * units).div_ceil(THREADS));
        let by_query = query.grid(&shape, shape.heads, query_shared);
        let by_key = key_value.grid(&shape, shape.kv_heads, key_value_shared);
        // SAFETY: as in `flash_forward`. The kernels write different columns of the gradient, all of them.
        unsafe {
            self.kernels.launch(of_element(&DELTA, element), by_row, &mut first)?;
            self.kernels.launch(of_element(&query.names, element), by_query, &mut parameters)?;
            self.kernels.launch(of_element(&key_value.names, element), by_key, &mut parameters)
        }
    }
}

#[cfg(test)]
mod tests;
