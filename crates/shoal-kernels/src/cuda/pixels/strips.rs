//! How blocks share out rows of columns: threads have eight columns each, so many side by side; blocks have a strip of
//! columns and a chunk of rows. Where columns are summed the cut depends on the shape alone, because it decides the
//! order of sums.

use crate::cuda::launch::{Grid, Parameter, THREADS};
use crate::cuda::{COUNTERS, CudaDevice, PARTS};
use crate::tensor::Tensor;

/// EIGHT and SUM_THREADS of pixels.cu.
pub(super) const EIGHT: usize = 8;
const SUM_THREADS: usize = 512;
/// Blocks that sum, about: two for each multiprocessor of an H200, like those of other column sums.
const SUM_BLOCKS: usize = 132 * 2;
/// Blocks of each multiprocessor that pass over rows, about: a few times what runs at once, so that one that is
/// late holds up little.
const PASS_BLOCKS_EACH: usize = 12;
/// Rows of each thread, at least: what it has on their way together.
const ROWS_EACH: usize = 4;
/// Threads side by side, at most.
const ACROSS_MAX: usize = 32;

/// `Strips` of pixels.cu.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct StripsParameter {
    rows: i32,
    chunk: i32,
    cols: i32,
    across: i32,
    whole: i32,
}

// SAFETY: struct Strips.
unsafe impl Parameter for StripsParameter {}

/// Threads side by side that have so many eights, or a strip of them: a power of two.
pub(super) fn across(eights: usize) -> usize {
    eights.next_power_of_two().min(ACROSS_MAX)
}

/// A cut of rows and columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strips {
    rows: usize,
    cols: usize,
    threads: usize,
    across: usize,
    strips: usize,
    chunk: usize,
    whole: bool,
}

impl Strips {
    fn new(rows: usize, cols: usize, eights: usize, threads: usize, blocks: usize) -> Strips {
        assert!(rows < 1 << 30 && cols < 1 << 30, "{rows} rows of {cols}");
        let across = across(eights);
        let strips = eights.div_ceil(across);
        let most = (blocks / strips.max(1)).max(1);
        let chunk = rows.div_ceil(most).max(ROWS_EACH * (threads / across));
        Strips { rows, cols, threads, across, strips, chunk, whole: cols.is_multiple_of(EIGHT) }
    }

    /// For kernels that make rows from rows; where they fill a mask, they go on to the end of its integers.
    pub(super) fn passing(device: &CudaDevice, rows: usize, cols: usize, fills_mask: bool) -> Strips {
        let eights = if fills_mask { 4 * cols.div_ceil(32) } else { cols.div_ceil(EIGHT) };
        let blocks = PASS_BLOCKS_EACH * device.facts.multiprocessors;
        Strips::new(rows, cols, eights, THREADS, blocks)
    }

    /// For kernels that leave so many sums of each column.
    pub(super) fn summing(rows: usize, cols: usize, sets: usize) -> Strips {
        let strips = Strips::new(rows, cols, cols.div_ceil(EIGHT), SUM_THREADS, SUM_BLOCKS);
        let chunks = strips.chunks();
        // One chunk needs no partial sums.
        let parts = chunks * strips.strips * strips.across * EIGHT * sets;
        assert!(chunks == 1 || strips.strips <= COUNTERS && parts <= PARTS);
        strips
    }

    /// The same for rows that may lie apart, in so far as these do.
    pub(super) fn of(self, tensor: &Tensor, offset: usize, stride: usize) -> Strips {
        let bytes = tensor.element().bytes();
        let aligned = tensor.at(offset).0.is_multiple_of(16) && (bytes * stride).is_multiple_of(16);
        Strips { whole: self.whole && aligned, ..self }
    }

    fn chunks(&self) -> usize {
        self.rows.div_ceil(self.chunk).max(1)
    }

    pub(super) fn grid(&self) -> Grid {
        Grid { blocks: [self.strips, self.chunks(), 1], threads: [self.threads, 1], shared_bytes: 0 }
    }

    pub(super) fn parameter(&self) -> StripsParameter {
        StripsParameter {
            rows: self.rows as i32,
            chunk: self.chunk as i32,
            cols: self.cols as i32,
            across: self.across as i32,
            whole: i32::from(self.whole),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every row is in a chunk and every column in a strip, and grids are ones that a GPU starts.
    #[test]
    fn rows_and_columns_are_cut_whole() {
        for rows in [0, 1, 2, 49, 1000, 6272, 401_408, 1 << 29] {
            for cols in [1, 7, 8, 9, 64, 65, 96, 256, 257, 2048, 2049, 20_000] {
                for sets in [1, 2] {
                    let cut = Strips::summing(rows, cols, sets);
                    assert!(cut.chunks() * cut.chunk >= rows && cut.strips * cut.across * EIGHT >= cols);
                    // Numbers past the end that threads try are still ints.
                    assert!(cut.chunks() * cut.chunk + ROWS_EACH * cut.threads < 1 << 31);
                    assert!(cut.across.is_power_of_two() && cut.across <= ACROSS_MAX);
                    assert!(cut.chunks() < 1 << 16 && cut.threads == SUM_THREADS);
                }
            }
        }
    }
}
