//! Sums over many rows or tensors, in two stages through the device's partial sums. How they are cut
//! depends on the shape alone.

use std::ops::Range;

use super::launch::{Address, Grid, launch};
use super::{CudaDevice, PARTS};
use crate::device::{LossMode, Mat, NormKind, Result};
use crate::tensor::Tensor;

/// Columns and lines of a block that sums columns: STRIP and STRIP_ROWS of norm.cu.
const STRIP: usize = 32;
const STRIP_ROWS: usize = 8;
/// Rows of a first-stage sum, at least; and how many such sums, at most.
const CHUNK_ROWS: usize = 128;
const CHUNKS: usize = 64;
/// Blocks that sum one tensor's squares, at most.
const SQUARES_BLOCKS: usize = 256;
/// Threads of the one block that adds up partial sums.
const LAST_THREADS: usize = 1024;

/// How the rows of a column sum are cut.
struct Cut {
    chunk: usize,
    chunks: usize,
}

impl Cut {
    fn new(rows: usize, cols: usize) -> Cut {
        let most = CHUNKS.min(PARTS / cols.max(1)).max(1);
        let chunk = rows.div_ceil(most).max(CHUNK_ROWS);
        Cut { chunk, chunks: rows.div_ceil(chunk).max(1) }
    }

    fn grid(&self, cols: usize) -> Grid {
        Grid { blocks: [cols.div_ceil(STRIP), self.chunks, 1], threads: [STRIP, STRIP_ROWS], shared_bytes: 0 }
    }
}

impl CudaDevice {
    pub(super) fn column_sums(&self, dy: Mat, gradient: &mut Tensor, accumulate: bool) -> Result {
        assert_eq!(gradient.len(), dy.cols);
        let (from, out) = (dy.tensor.at(dy.offset), gradient.at(0));
        self.in_two_stages(dy.rows, dy.cols, out, accumulate, |cut, out, accumulate| {
            let grid = cut.grid(dy.cols);
            // SAFETY: the matrix lies inside its tensor; `out` has a row of `cols` for every chunk.
            unsafe {
                launch!(
                    self,
                    "column_sums",
                    grid,
                    from,
                    dy.stride,
                    dy.rows,
                    dy.cols,
                    cut.chunk,
                    out,
                    accumulate
                )
            }
        })
    }

    /// The weight gradient of a norm: column sums of dy times the normalised row.
    pub(super) fn norm_weight_sums(
        &self,
        kind: NormKind,
        x: Mat,
        statistics: &Tensor,
        dy: &Tensor,
        gradient: &mut Tensor,
        accumulate: bool,
    ) -> Result {
        assert_eq!((gradient.len(), dy.len()), (x.cols, x.rows * x.cols));
        assert_eq!(statistics.len(), x.rows * kind.statistics());
        let layer = i32::from(kind == NormKind::Layer);
        let (from, statistics, dy) = (x.tensor.at(x.offset), statistics.at(0), dy.at(0));
        self.in_two_stages(x.rows, x.cols, gradient.at(0), accumulate, |cut, out, accumulate| {
            let (grid, chunk) = (cut.grid(x.cols), cut.chunk);
            // SAFETY: as above; the lengths of statistics and dy are asserted.
            unsafe {
                launch!(
                    self,
                    "norm_weight_sums",
                    grid,
                    layer,
                    from,
                    x.stride,
                    x.rows,
                    x.cols,
                    chunk,
                    statistics,
                    dy,
                    out,
                    accumulate
                )
            }
        })
    }

    /// Runs a first stage that writes one row of sums per chunk, and adds the rows up; or the first stage
    /// alone where there is one chunk.
    fn in_two_stages(
        &self,
        rows: usize,
        cols: usize,
        out: Address,
        accumulate: bool,
        first: impl Fn(&Cut, Address, i32) -> Result,
    ) -> Result {
        let cut = Cut::new(rows, cols);
        let accumulate = i32::from(accumulate);
        if cut.chunks == 1 {
            return first(&cut, out, accumulate);
        }
        let held = self.parts();
        let parts = held.at(0);
        assert!(cut.chunks * cols <= PARTS);
        first(&cut, parts, 0)?;
        let last = Cut { chunk: cut.chunks, chunks: 1 };
        let grid = last.grid(cols);
        // SAFETY: the first stage wrote `chunks` rows of `cols`, which fit the parts.
        unsafe {
            launch!(self, "column_sums", grid, parts, cols, cut.chunks, cols, last.chunk, out, accumulate)
        }
    }

    pub(super) fn softmax_loss(
        &self,
        targets: &Tensor,
        rows: Range<usize>,
        vocabulary: usize,
        mode: LossMode,
        logits: &mut Tensor,
        loss: &mut Tensor,
    ) -> Result {
        assert!(rows.end <= targets.len() && logits.len() >= rows.len() * vocabulary);
        assert!(rows.len() <= PARTS, "{} rows of logits at once", rows.len());
        assert_eq!(loss.len(), crate::device::SCALAR_ELEMENTS);
        let (with_gradient, scale) = match mode {
            LossMode::Gradient { scale } => (1i32, scale),
            LossMode::LossOnly => (0, 0.0),
        };
        let held = self.parts();
        let (from, losses) = (targets.at(rows.start), held.at(0));
        let (grid, values) = (Grid::blocks(rows.len()), logits.at(0));
        // SAFETY: lengths are asserted; the kernel checks each target against the vocabulary.
        unsafe {
            launch!(self, "cross_entropy", grid, from, vocabulary, with_gradient, scale, values, losses)
        }?;
        self.add_up("add_losses", losses, rows.len(), loss)
    }

    pub(super) fn squares(&self, tensors: &[&Tensor], sum: &mut Tensor) -> Result {
        assert_eq!(sum.len(), crate::device::SCALAR_ELEMENTS);
        // Partial sums are f64: two elements each.
        let most = (PARTS / 2 / tensors.len().max(1)).min(SQUARES_BLOCKS);
        assert!(most > 0, "{} tensors in one norm", tensors.len());
        let held = self.parts();
        let mut used = 0;
        for tensor in tensors.iter().filter(|tensor| !tensor.is_empty()) {
            let (from, count, parts) = (tensor.at(0), tensor.len(), held.at(2 * used));
            let mut grid = self.each(count);
            grid.blocks[0] = grid.blocks[0].min(most);
            used += grid.blocks[0];
            // SAFETY: one part for each block, and all of them fit.
            unsafe { launch!(self, "squares", grid, from, count, parts) }?;
        }
        self.add_up("add_parts", held.at(0), used, sum)
    }

    /// One block adds up parts.
    fn add_up(&self, kernel: &'static str, parts: Address, count: usize, sum: &mut Tensor) -> Result {
        let grid = Grid { blocks: [1, 1, 1], threads: [LAST_THREADS, 1], shared_bytes: 0 };
        let sum = sum.at(0);
        // SAFETY: the parts were written just before; the sum is a scalar.
        unsafe {
            match kernel {
                "add_losses" => launch!(self, "add_losses", grid, parts, count, sum),
                _ => launch!(self, "add_parts", grid, parts, count, sum),
            }
        }
    }
}
