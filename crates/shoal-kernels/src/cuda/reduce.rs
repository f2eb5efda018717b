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
/// LOSS_HELD and LOSS_THREADS of loss.cu: pieces of a row that a thread holds, and threads of a block and of a
/// multiprocessor that do so, at most; LOSS_LONG_THREADS for longer rows.
const LOSS_HELD: usize = 7;
const LOSS_THREADS: usize = 1024;
const LOSS_LONG_THREADS: usize = 512;
/// Blocks that every multiprocessor has room for.
const LOSS_BLOCKS_EACH: usize = 16;
/// Rows of a block that are on their way, at most.
const LOSS_AHEAD: usize = 2;
/// Shared memory that a multiprocessor keeps for itself for each block, and the loss kernel's own.
const LOSS_SHARED_BYTES: usize = 2048;

/// `Logits` of loss.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct LogitsParameter {
    rows: i64,
    cols: i64,
    stride: i64,
    length: i64,
    with_gradient: i32,
    ahead: i32,
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

/// Blocks of the loss that go from row to row, where threads can hold one. Which thread has which logits
/// depends on the row's length alone.
struct HeldRows {
    threads: usize,
    /// Blocks of a multiprocessor.
    each: usize,
    /// Rows on their way, as far as shared memory goes.
    ahead: usize,
    row_bytes: usize,
}

impl HeldRows {
    fn new(pieces: usize, shared_bytes: usize) -> Option<HeldRows> {
        let threads = pieces.div_ceil(LOSS_HELD).next_multiple_of(32).max(32);
        if threads > LOSS_THREADS {
            return None;
        }
        let (each, row_bytes) = ((LOSS_THREADS / threads).min(LOSS_BLOCKS_EACH), 16 * pieces);
        let fits = |ahead: usize| each * (ahead * row_bytes + LOSS_SHARED_BYTES) <= shared_bytes;
        let ahead = (1..=LOSS_AHEAD).rev().find(|ahead| fits(*ahead)).unwrap_or(0);
        Some(HeldRows { threads, each, ahead, row_bytes })
    }

    fn grid(&self, rows: usize, multiprocessors: usize) -> Grid {
        Grid {
            blocks: [rows.min(self.each * multiprocessors), 1, 1],
            threads: [self.threads, 1],
            shared_bytes: self.ahead * self.row_bytes,
        }
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
        let held = HeldRows::new(cols.div_ceil(piece(element)), self.facts.shared_bytes);
        let shape = LogitsParameter {
            rows: rows as i64,
            cols: cols as i64,
            stride: logits.stride as i64,
            length: logits.tensor.len() as i64,
            with_gradient: i32::from(with_gradient),
            ahead: held.as_ref().map_or(0, |held| held.ahead as i32),
            scale,
        };
        let whole =
            logits.stride.is_multiple_of(piece(element)) && rows * logits.stride <= logits.tensor.len();
        let parts = self.parts();
        let (targets, values, losses) = (targets.at(first), logits.tensor.at(0), parts.at(0));
        // SAFETY: lengths are asserted; the kernel checks each target against the columns.
        unsafe {
            match held {
                Some(held) => {
                    let grid = held.grid(rows, self.facts.multiprocessors);
                    match whole {
                        true => {
                            launch!(self, "cross_entropy" of element, grid, shape, targets, values, losses)
                        }
                        false => {
                            launch!(self, "cross_entropy_any" of element, grid, shape, targets, values, losses)
                        }
                    }
                }
                None => {
                    let grid = Grid { threads: [LOSS_LONG_THREADS, 1], ..Grid::blocks(rows) };
                    launch!(self, "cross_entropy_long" of element, grid, shape, targets, values, losses)
                }
            }
        }?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads that hold a row hold all of it, on every GPU the same ones, and its shared memory is there.
    #[test]
    fn rows_are_held_whole() {
        for pieces in [0, 1, 7, 8, 224, 225, 1000, 6283, 7168, 7169, 20000] {
            for shared_bytes in [64 << 10, 99 << 10, 163 << 10, 227 << 10] {
                let Some(held) = HeldRows::new(pieces, shared_bytes) else {
                    assert!(pieces > LOSS_HELD * LOSS_THREADS);
                    continue;
                };
                assert!(held.threads * LOSS_HELD >= pieces && held.threads.is_multiple_of(32));
                assert_eq!(held.threads, HeldRows::new(pieces, 0).unwrap().threads);
                assert!(held.threads * held.each <= LOSS_THREADS);
                assert!(held.grid(1 << 20, 132).shared_bytes <= shared_bytes);
            }
        }
        // GPT-2's rows of bf16 on an H200.
        assert_eq!(HeldRows::new(6283, 227 << 10).unwrap().ahead, 2);
    }
}
