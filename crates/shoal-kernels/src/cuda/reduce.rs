//! Sums over many rows, in two stages through the device's partial sums. How they are cut, and in which order
//! the parts are added, depends on the shape alone.

use super::launch::{Address, Grid, Parameter, launch, parameter, piece};
use super::{COUNTERS, CudaDevice, PARTS};
use crate::device::{LossMode, Mat, MatMut, Result, SCALAR_ELEMENTS, Sum};
use crate::tensor::{Element, Tensor};

/// Pieces and lines of a block that sums columns: STRIP and STRIP_LINES of norm.cu.
const STRIP: usize = 32;
const STRIP_LINES: usize = 8;
/// Blocks that sum columns, about, and rows of each at least. A constant like those of norms: two blocks for
/// each multiprocessor of an H200, which have enough on its way; more would leave more partial sums.
const COLUMN_BLOCKS: usize = 132 * 2;
const CHUNK_ROWS: usize = 64;
/// Columns and lines of a block that adds up partial rows.
const LAST_STRIP: usize = 32;
/// Threads of the one block that adds up partial sums.
const LAST_THREADS: usize = 1024;
/// Threads of a block of the loss, at most: LOSS_THREADS of loss.cu.
const LOSS_THREADS: usize = 512;
/// Shared memory that a multiprocessor keeps for itself for each block, and the loss kernel's own.
const LOSS_SHARED_BYTES: usize = 2048;

/// `Logits` of loss.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct LogitsParameter {
    cols: i64,
    stride: i64,
    length: i64,
    with_gradient: i32,
    keep: i32,
    scale: f32,
}

// SAFETY: struct Logits.
unsafe impl Parameter for LogitsParameter {}

/// `RowsSum` of norm.cu.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RowsSum {
    out: Address,
    accumulate: i32,
}

// SAFETY: struct RowsSum.
unsafe impl Parameter for RowsSum {}

impl From<Option<Sum<'_>>> for RowsSum {
    fn from(sum: Option<Sum>) -> RowsSum {
        sum.map_or(RowsSum { out: Address(0), accumulate: 0 }, |(out, accumulate)| RowsSum {
            out: out.at(0),
            accumulate: i32::from(accumulate),
        })
    }
}

impl CudaDevice {
    pub(super) fn column_sums(&self, dy: Mat, gradient: &mut Tensor, accumulate: bool) -> Result {
        assert!(gradient.len() >= dy.cols && gradient.element() == Element::F32);
        if !accumulate {
            // SAFETY: what follows the sums in the tensor.
            unsafe { self.context.clear(gradient.at(dy.cols).0, gradient.len() - dy.cols) }?;
        }
        let element = dy.tensor.element();
        let strips = dy.cols.div_ceil(STRIP * piece(element));
        let most = (COLUMN_BLOCKS / strips.max(1)).max(1);
        let chunk = dy.rows.div_ceil(most).max(CHUNK_ROWS);
        let chunks = dy.rows.div_ceil(chunk).max(1);
        // One chunk needs no partial sums.
        assert!(chunks == 1 || strips <= COUNTERS && chunks * strips * STRIP * piece(element) <= PARTS);
        let grid = Grid { blocks: [strips, chunks, 1], threads: [STRIP, STRIP_LINES], shared_bytes: 0 };
        let (from, held) = (dy.tensor.at(dy.offset), self.parts());
        let to = RowsSum::from(Some((gradient, accumulate)));
        // SAFETY: the matrix lies inside its tensor; the parts have room for a strip's sums of every block,
        // and there is a counter for every strip.
        unsafe {
            launch!(
                self,
                "column_sums" of element,
                grid,
                from,
                dy.stride,
                dy.rows,
                dy.cols,
                chunk,
                held.at(0),
                self.counters.at(0),
                to
            )
        }
    }

    /// Each output `(+)=` the sum of partial rows: the first of their first `cols` columns, others of the
    /// columns that follow.
    ///
    /// # Safety
    /// The parts have so many rows, the outputs `cols` floats.
    pub(super) unsafe fn add_rows(
        &self,
        parts: Address,
        stride: usize,
        rows: usize,
        cols: usize,
        sums: [Option<Sum>; 3],
    ) -> Result {
        let last = sums.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        let grid = Grid {
            blocks: [cols.div_ceil(LAST_STRIP), last, 1],
            threads: [LAST_STRIP, LAST_STRIP],
            shared_bytes: 0,
        };
        let [first, second, third] = sums.map(RowsSum::from);
        // SAFETY: by this function's contract.
        unsafe { launch!(self, "add_rows", grid, parts, stride, rows, cols, first, second, third) }
    }

    pub(super) fn softmax_loss(
        &self,
        targets: &Tensor,
        first: usize,
        mode: LossMode,
        logits: MatMut,
        loss: &mut Tensor,
    ) -> Result {
        let (rows, cols, element) = (logits.rows, logits.cols, logits.tensor.element());
        assert!(first + rows <= targets.len());
        assert_eq!(logits.offset, 0, "rows of logits start with their tensor");
        assert!(rows <= PARTS, "{rows} rows of logits at once");
        // Columns are numbered by an int, and the last numbers tried lie past the row.
        assert!(logits.stride < 1 << 30, "rows of {} logits", logits.stride);
        assert_eq!(loss.len(), SCALAR_ELEMENTS);
        let (with_gradient, scale) = match mode {
            LossMode::Gradient { scale } => (true, scale),
            LossMode::LossOnly => (false, 0.0),
        };
        let pieces = cols.div_ceil(piece(element));
        // Rows are kept where two blocks of a multiprocessor can do so: one computes while the other loads.
        // Others are read again, from the cache if they are lucky; the bits are the same.
        let keep = with_gradient && 2 * (16 * pieces + LOSS_SHARED_BYTES) <= self.facts.shared_bytes;
        let shape = LogitsParameter {
            cols: cols as i64,
            stride: logits.stride as i64,
            length: logits.tensor.len() as i64,
            with_gradient: i32::from(with_gradient),
            keep: i32::from(keep),
            scale,
        };
        let grid = Grid {
            blocks: [rows, 1, 1],
            threads: [pieces.next_multiple_of(32).clamp(32, LOSS_THREADS), 1],
            shared_bytes: if keep { 16 * pieces } else { 0 },
        };
        let held = self.parts();
        let (targets, values, losses) = (targets.at(first), logits.tensor.at(0), held.at(0));
        // SAFETY: lengths are asserted; the kernel checks each target against the columns.
        unsafe { launch!(self, "cross_entropy" of element, grid, shape, targets, values, losses) }?;
        // SAFETY: one loss for each row was written just before.
        unsafe { self.add_up("add_losses", losses, rows, loss) }
    }

    /// One block adds up parts.
    ///
    /// # Safety
    /// The parts are as many, of the kind that the kernel reads; the sum is a scalar.
    pub(super) unsafe fn add_up(
        &self,
        kernel: &'static str,
        parts: Address,
        count: usize,
        sum: &mut Tensor,
    ) -> Result {
        let grid = Grid { blocks: [1, 1, 1], threads: [LAST_THREADS, 1], shared_bytes: 0 };
        let sum = sum.at(0);
        // SAFETY: by this function's contract.
        unsafe {
            self.kernels.launch(kernel, grid, &mut [parameter(&parts), parameter(&count), parameter(&sum)])
        }
    }
}
