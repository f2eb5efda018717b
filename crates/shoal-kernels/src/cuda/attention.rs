//! Attention: cuDNN's kernels where they serve and the work is worth planning for, else ours on tensor cores,
//! else plain ones: which of these suits the head's size and the device's shared memory. All lay `logsumexp`
//! out as [samples, heads, sequence], so that a backward need not be of the same kind as its forward.

use super::cudnn::Cudnn;
use super::launch::{Address, DropoutParameter, Grid, Parameter, at_or_null, parameter};
use super::{CudaDevice, element_of};
use crate::device::{AttentionBackward, AttentionShape, DropoutSite, Result};
use crate::tensor::{Element, Tensor};

/// The largest head that the kernels' registers hold.
const SIZE_MAX: usize = 256;
/// Sides of a block: SIDE of attention.cu.
const SIDE: usize = 16;

/// `Attention` of attention.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct ShapeParameter {
    samples: i64,
    sequence: i64,
    heads: i64,
    kv_heads: i64,
    size: i64,
    scale: f32,
    causal: i32,
    lengths: Address,
}

// SAFETY: struct Attention.
unsafe impl Parameter for ShapeParameter {}

impl ShapeParameter {
    fn new(shape: AttentionShape, lengths: Option<&Tensor>) -> ShapeParameter {
        ShapeParameter {
            samples: shape.samples as i64,
            sequence: shape.sequence as i64,
            heads: shape.heads as i64,
            kv_heads: shape.kv_heads as i64,
            size: shape.head_size as i64,
            scale: shape.scale,
            causal: shape.causal.into(),
            lengths: at_or_null(lengths),
        }
    }
}

/// A forward kernel: its tile and the widest head it takes.
struct Forward {
    tile: usize,
    size_max: usize,
    name: &'static str,
}

const FORWARD: [Forward; 3] = [
    Forward { tile: 64, size_max: 64, name: "attention_64_64" },
    Forward { tile: 32, size_max: 128, name: "attention_32_128" },
    Forward { tile: 16, size_max: 256, name: "attention_16_256" },
];

/// The two backward kernels of one tile and width, the faster ones first.
struct Backward {
    tile: usize,
    size_max: usize,
    query: &'static str,
    key_value: &'static str,
}

const BACKWARD: [Backward; 4] = [
    Backward { tile: 32, size_max: 64, query: "query_gradient_32_64", key_value: "key_value_gradient_32_64" },
    Backward {
        tile: 32,
        size_max: 128,
        query: "query_gradient_32_128",
        key_value: "key_value_gradient_32_128",
    },
    Backward {
        tile: 16,
        size_max: 128,
        query: "query_gradient_16_128",
        key_value: "key_value_gradient_16_128",
    },
    Backward {
        tile: 16,
        size_max: 256,
        query: "query_gradient_16_256",
        key_value: "key_value_gradient_16_256",
    },
];

/// Bytes of `tiles` tiles of rows and `scores` tiles of scores.
fn shared_bytes(tile: usize, size: usize, tiles: usize, scores: usize) -> usize {
    4 * (tiles * tile * (size + 1) + scores * tile * (tile + 1))
}

/// The widest head that forward and backward take with so much shared memory a block.
pub(super) fn head_size_max(shared_bytes_max: usize) -> usize {
    let fits = |size: &usize| {
        BACKWARD.iter().any(|kernel| {
            *size <= kernel.size_max && shared_bytes(kernel.tile, *size, 4, 2) <= shared_bytes_max
        })
    };
    (1..=SIZE_MAX).rev().find(fits).unwrap_or(0)
}

fn assert_shape(shape: &AttentionShape) {
    assert!(shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads));
    assert!(shape.head_size <= SIZE_MAX, "heads of {} are wider than {SIZE_MAX}", shape.head_size);
}

fn grid(shape: &AttentionShape, heads: usize, tile: usize, shared_bytes: usize) -> Grid {
    let blocks = [shape.sequence.div_ceil(tile), heads, shape.samples];
    Grid { blocks, threads: [SIDE, SIDE], shared_bytes }
}

/// Multiplications of one product of the scores from which on cuDNN is asked: it takes about a second to
/// plan its first shape and a tenth for each further one, which small ones never earn back.
const CUDNN_WORK: usize = 1 << 26;

impl CudaDevice {
    /// cuDNN, where it may be asked about this shape. Samples of different lengths are not for it: what its engines
    /// leave in the rows past a length (nothing, zeros, an infinite sum) is not documented and not the same in all
    /// of them, and here these rows are zeros.
    fn cudnn_for(
        &self,
        element: Element,
        shape: &AttentionShape,
        dropout: bool,
        lengths: Option<&Tensor>,
    ) -> Option<&Cudnn> {
        let work = shape.rows() * shape.sequence * shape.query_width();
        let worth = element != Element::F32 && !dropout && lengths.is_none() && work >= CUDNN_WORK;
        self.cudnn.as_deref().filter(|_| worth)
    }

    pub(super) fn attend(
        &self,
        shape: AttentionShape,
        dropout: Option<DropoutSite>,
        lengths: Option<&Tensor>,
        qkv: &Tensor,
        out: &mut Tensor,
        logsumexp: &mut Tensor,
    ) -> Result {
        assert_shape(&shape);
        shape.assert_lengths(lengths);
        let element = element_of(&[qkv, out]);
        assert_eq!(qkv.len(), shape.rows() * shape.qkv_width());
        assert_eq!(out.len(), shape.rows() * shape.query_width());
        assert_eq!(logsumexp.len(), shape.rows() * shape.heads);
        if let Some(cudnn) = self.cudnn_for(element, &shape, dropout.is_some(), lengths)
            && let Some(bytes) = cudnn.forward_workspace(element, &shape)?
            && bytes <= self.workspace.bytes()
        {
            let (qkv, out, logsumexp) = (qkv.at(0), out.at(0), logsumexp.at(0));
            let (workspace, _held) = (self.workspace.at(0), self.hold_workspace());
            // SAFETY: the lengths are asserted; calls follow each other on one stream, so they may share the
            // workspace.
            let run = || unsafe { cudnn.forward(element, &shape, qkv, out, logsumexp, workspace) };
            return self.context.timed(|| "attention by cuDNN".into(), run);
        }
        if self.flash_serves(element, &shape) {
            return self.flash_forward(shape, dropout, lengths, qkv, out, logsumexp);
        }
        self.attend_plainly(shape, dropout, lengths, qkv, out, logsumexp)
    }

    fn attend_plainly(
        &self,
        shape: AttentionShape,
        dropout: Option<DropoutSite>,
        lengths: Option<&Tensor>,
        qkv: &Tensor,
        out: &mut Tensor,
        logsumexp: &mut Tensor,
    ) -> Result {
        let element = qkv.element();
        let room = |kernel: &&Forward| {
            (element == Element::F32 || kernel.size_max == SIZE_MAX)
                && kernel.size_max >= shape.head_size
                && shared_bytes(kernel.tile, shape.head_size, 2, 1) <= self.facts.shared_bytes
        };
        let kernel = FORWARD.iter().find(room).expect("some tile fits every GPU's shared memory");
        let shared = shared_bytes(kernel.tile, shape.head_size, 2, 1);
        let grid = grid(&shape, shape.heads, kernel.tile, shared);
        let (shape, site) = (ShapeParameter::new(shape, lengths), DropoutParameter::from(dropout));
        let (qkv, out, logsumexp) = (qkv.at(0), out.at(0), logsumexp.at(0));
        let mut parameters =
            [parameter(&shape), parameter(&site), parameter(&qkv), parameter(&out), parameter(&logsumexp)];
        // SAFETY: the caller asserted the lengths against the shape, which bounds what the kernel touches.
        unsafe { self.kernels.launch_of(kernel.name, element, grid, &mut parameters) }
    }

    pub(super) fn attend_backward(
        &self,
        shape: AttentionShape,
        dropout: Option<DropoutSite>,
        of: AttentionBackward,
    ) -> Result {
        assert_shape(&shape);
        of.assert_fits(&shape);
        let element = element_of(&[of.qkv, of.out, of.out_gradient, of.qkv_gradient]);
        if !self.deterministic
            && let Some(cudnn) = self.cudnn_for(element, &shape, dropout.is_some(), of.lengths)
            && let Some(bytes) = cudnn.backward_workspace(element, &shape)?
            && bytes <= of.scratch.bytes()
        {
            let (qkv, out, logsumexp) = (of.qkv.at(0), of.out.at(0), of.logsumexp.at(0));
            let (dy, dx, workspace) = (of.out_gradient.at(0), of.qkv_gradient.at(0), of.scratch.at(0));
            // SAFETY: the lengths are asserted.
            let run = || unsafe { cudnn.backward(element, &shape, qkv, out, logsumexp, dy, dx, workspace) };
            return self.context.timed(|| "attention backward by cuDNN".into(), run);
        }
        if self.flash_serves(element, &shape) {
            return self.flash_backward(shape, dropout, of);
        }
        self.attend_backward_plainly(shape, dropout, of)
    }

    fn attend_backward_plainly(
        &self,
        shape: AttentionShape,
        dropout: Option<DropoutSite>,
        of: AttentionBackward,
    ) -> Result {
        let element = of.qkv.element();
        let room = |kernel: &&Backward| {
            (element == Element::F32 || kernel.size_max == SIZE_MAX)
                && kernel.size_max >= shape.head_size
                && shared_bytes(kernel.tile, shape.head_size, 4, 2) <= self.facts.shared_bytes
        };
        let kernel = BACKWARD.iter().find(room).unwrap_or_else(|| {
            panic!("heads of {} need more shared memory than this GPU has", shape.head_size)
        });
        let shared = shared_bytes(kernel.tile, shape.head_size, 4, 2);
        let by_row = Grid::warps(shape.rows() * shape.heads);
        let by_query = grid(&shape, shape.heads, kernel.tile, shared);
        let by_key = grid(&shape, shape.kv_heads, kernel.tile, shared);
        let (shape, site) = (ShapeParameter::new(shape, of.lengths), DropoutParameter::from(dropout));
        let (qkv, out, logsumexp) = (of.qkv.at(0), of.out.at(0), of.logsumexp.at(0));
        let (out_gradient, delta) = (of.out_gradient.at(0), of.scratch.at(0));
        let qkv_gradient = of.qkv_gradient.at(0);
        let mut first = [parameter(&shape), parameter(&out), parameter(&out_gradient), parameter(&delta)];
        let mut parameters = [
            parameter(&shape),
            parameter(&site),
            parameter(&qkv),
            parameter(&logsumexp),
            parameter(&out_gradient),
            parameter(&delta),
            parameter(&qkv_gradient),
        ];
        // SAFETY: as in `attend_plainly`. The kernels write different columns of the gradient, all of them.
        unsafe {
            self.kernels.launch_of("attention_delta", element, by_row, &mut first)?;
            self.kernels.launch_of(kernel.query, element, by_query, &mut parameters)?;
            self.kernels.launch_of(kernel.key_value, element, by_key, &mut parameters)
        }
    }
}
