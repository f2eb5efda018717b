//! Norms: how many threads share a row, and how the rows of the backward's sums are cut.

use super::launch::{Address, Grid, Parameter, at_or_null, launch, piece};
use super::{CudaDevice, PARTS, element_of};
use crate::device::{Mat, NormKind, Result, Sum};
use crate::tensor::{Element, Tensor};

/// The widest row that one warp holds in its registers, and columns that a thread of a whole block does.
const WARP_COLS: usize = 1024;
const THREAD_COLS: usize = 16;
const BLOCK_THREADS: usize = 1024;
/// Blocks of a multiprocessor whose warps have several rows each: as many as fit.
const FORWARD_BLOCKS_EACH: usize = 2;

/// BACKWARD_WARPS and LANE_PIECES of norm.cu: warps of a block with a row each, and pieces of such a row that
/// a lane has, at most.
const BACKWARD_WARPS: usize = 6;
const LANE_PIECES: usize = 4;
/// Blocks of such warps in all, and threads in all where a block shares a row. Constants, because the cut
/// decides the order of sums: what an H200 has room for, and enough for smaller ones.
const BACKWARD_BLOCKS: usize = 132 * 2;
const BACKWARD_THREADS: usize = 132 * 960;
/// Sums of each column that a block leaves room for: of the weight's gradient, the bias's, and dx.
const SETS: usize = 3;
/// Rows that each warp or block takes, at least: fewer would cost more partial sums than time.
const ROWS_EACH: usize = 4;

/// `Norm` of norm.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct ForwardParameter {
    x: Address,
    stride: i64,
    rows: i64,
    cols: i64,
    weight: Address,
    bias: Address,
    statistics: Address,
    out: Address,
    eps: f32,
    layer: i32,
}

// SAFETY: struct Norm.
unsafe impl Parameter for ForwardParameter {}

/// `NormBackward` of norm.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct BackwardParameter {
    x: Address,
    stride: i64,
    rows: i64,
    cols: i64,
    share: i64,
    weight: Address,
    bias: Address,
    statistics: Address,
    dy: Address,
    dx: Address,
    parts: Address,
    layer: i32,
    accumulate: i32,
    sum_dx: i32,
}

// SAFETY: struct NormBackward.
unsafe impl Parameter for BackwardParameter {}

/// A norm's kind as its kernels take it.
fn layer(kind: NormKind) -> i32 {
    i32::from(kind == NormKind::Layer)
}

/// What every operation of a norm relies on; the element that rows are of.
fn assert_norm(
    kind: NormKind,
    x: &Mat,
    weight: &Tensor,
    bias: Option<&Tensor>,
    statistics: &Tensor,
) -> Element {
    assert_eq!((weight.len(), statistics.len()), (x.cols, x.rows * kind.statistics()));
    assert!(bias.is_none_or(|bias| bias.len() == x.cols && bias.element() == Element::F32));
    assert_eq!((weight.element(), statistics.element()), (Element::F32, Element::F32));
    x.tensor.element()
}

/// Whether rows are aligned and made of whole pieces: WholeRows of norm.cu.
fn is_whole(x: &Mat) -> bool {
    let (element, address) = (x.tensor.element(), x.tensor.at(x.offset).0);
    address.is_multiple_of(16) && [x.stride, x.cols].iter().all(|side| side.is_multiple_of(piece(element)))
}

/// Who shares a row in the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sharers {
    Warp,
    /// A block, each thread with one piece.
    Team,
    /// A block, for any width.
    Block,
}

/// How the backward's rows are cut, by their shape alone.
struct Cut {
    sharers: Sharers,
    threads: usize,
    /// Rows of a block.
    share: usize,
    blocks: usize,
}

impl Cut {
    fn new(rows: usize, cols: usize, element: Element) -> Cut {
        const WARP_THREADS: usize = 32 * BACKWARD_WARPS;
        let pieces = cols.div_ceil(piece(element));
        let (sharers, threads, least) = match pieces {
            _ if pieces <= 32 * LANE_PIECES => (Sharers::Warp, WARP_THREADS, ROWS_EACH * BACKWARD_WARPS),
            _ if pieces <= BLOCK_THREADS => (Sharers::Team, pieces.next_multiple_of(32), ROWS_EACH),
            _ => (Sharers::Block, BLOCK_THREADS, ROWS_EACH),
        };
        let room = match sharers {
            Sharers::Warp => BACKWARD_BLOCKS,
            Sharers::Team | Sharers::Block => BACKWARD_THREADS / threads,
        };
        let most = room.min(PARTS / (SETS * cols.max(1)));
        assert!(most > 0, "rows of {cols} are too wide for partial sums");
        let share = rows.div_ceil(most).max(least);
        Cut { sharers, threads, share, blocks: rows.div_ceil(share).max(1) }
    }
}

impl CudaDevice {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn norm_forward(
        &self,
        kind: NormKind,
        eps: f32,
        x: Mat,
        weight: &Tensor,
        bias: Option<&Tensor>,
        statistics: &mut Tensor,
        out: &mut Tensor,
    ) -> Result {
        let element = assert_norm(kind, &x, weight, bias, statistics);
        assert_eq!(out.len(), x.rows * x.cols);
        assert_eq!(out.element(), element);
        let of = ForwardParameter {
            x: x.tensor.at(x.offset),
            stride: x.stride as i64,
            rows: x.rows as i64,
            cols: x.cols as i64,
            weight: weight.at(0),
            bias: at_or_null(bias),
            statistics: statistics.at(0),
            out: out.at(0),
            eps,
            layer: layer(kind),
        };
        // SAFETY: warps go over all rows, or one block has each; the lengths agree.
        unsafe {
            if x.cols <= WARP_COLS {
                let most = FORWARD_BLOCKS_EACH * self.facts.multiprocessors;
                let grid = Grid::blocks(Grid::warps(x.rows).blocks[0].min(most));
                launch!(self, "norm" of element, grid, of)
            } else {
                let threads = x.cols.div_ceil(THREAD_COLS).next_multiple_of(32).min(BLOCK_THREADS);
                let grid = Grid { threads: [threads, 1], ..Grid::blocks(x.rows) };
                launch!(self, "norm_wide" of element, grid, of)
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    pub(super) fn norm_gradients(
        &self,
        kind: NormKind,
        x: Mat,
        weight: &Tensor,
        bias: Option<&Tensor>,
        statistics: &Tensor,
        dy: &mut Tensor,
        weight_gradient: Sum,
        bias_gradient: Option<Sum>,
        (dx, accumulate): Sum,
        dx_sums: Option<Sum>,
    ) -> Result {
        let element = assert_norm(kind, &x, weight, bias, statistics);
        assert_eq!((dy.len(), dx.len()), (x.rows * x.cols, x.rows * x.cols));
        assert_eq!(element_of(&[x.tensor, dy, dx]), element);
        let sums = [Some(weight_gradient), bias_gradient, dx_sums];
        for (sum, _) in sums.iter().flatten() {
            assert_eq!((sum.len(), sum.element()), (x.cols, Element::F32));
        }
        let cut = Cut::new(x.rows, x.cols, element);
        let held = self.parts();
        let of = BackwardParameter {
            x: x.tensor.at(x.offset),
            stride: x.stride as i64,
            rows: x.rows as i64,
            cols: i64::from(i32::try_from(x.cols).expect("a row of less than 2^31 columns")),
            share: cut.share as i64,
            weight: weight.at(0),
            bias: at_or_null(bias),
            statistics: statistics.at(0),
            dy: dy.at(0),
            dx: dx.at(0),
            parts: held.at(0),
            layer: layer(kind),
            accumulate: i32::from(accumulate),
            sum_dx: i32::from(sums[2].is_some()),
        };
        let grid = Grid { threads: [cut.threads, 1], ..Grid::blocks(cut.blocks) };
        let whole = is_whole(&x);
        // SAFETY: the lengths agree, and the sums of each block fit the parts.
        unsafe {
            match cut.sharers {
                Sharers::Warp if !whole => launch!(self, "norm_backward_any" of element, grid, of),
                Sharers::Warp => launch!(self, "norm_backward" of element, grid, of),
                Sharers::Team => launch!(self, "norm_backward_team" of element, grid, of),
                Sharers::Block => launch!(self, "norm_backward_wide" of element, grid, of),
            }
        }?;
        // SAFETY: each block wrote its sums that are asked for, side by side.
        unsafe { self.add_rows(held.at(0), SETS * x.cols, cut.blocks, x.cols, sums) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every row is in a share, shares fit the parts, and blocks are ones that a GPU starts.
    #[test]
    fn rows_are_cut_whole() {
        for element in [Element::F32, Element::Bf16] {
            for rows in [0, 1, 2, 31, 1000, 32768, 1 << 20] {
                for cols in [1, 7, 256, 257, 768, 1024, 1025, 4096, 4097, 8192, 8193, 20000, 1 << 20] {
                    let cut = Cut::new(rows, cols, element);
                    assert!(cut.blocks * cut.share >= rows && SETS * cut.blocks * cols <= PARTS);
                    assert!(cut.threads <= BLOCK_THREADS && cut.threads.is_multiple_of(32));
                    match cut.sharers {
                        Sharers::Warp => assert!(32 * LANE_PIECES * piece(element) >= cols),
                        Sharers::Team => assert!(cut.threads * piece(element) >= cols),
                        Sharers::Block => assert_eq!(cut.threads, BLOCK_THREADS),
                    }
                }
            }
        }
    }
}
