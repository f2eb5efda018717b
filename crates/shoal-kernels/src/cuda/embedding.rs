//! The gradient of a table of tokens: positions sorted by token, then sums of each token's rows.

use super::launch::{Address, Grid, Parameter, launch};
use super::{CudaDevice, PARTS};
use crate::device::{Device, Result};
use crate::tensor::{Element, Tensor};

/// Tokens sorted at a time; more are added up batch after batch.
const BATCH: usize = 1 << 20;
/// Threads of a sorting block, and the digits it counts: DIGITS of embedding.cu, which are of DIGIT_BITS.
const DIGITS: usize = 256;
const DIGIT_BITS: usize = 8;
/// Blocks of the sort, at most: each reads the counts of all of them.
const SORT_BLOCKS: usize = 64;
/// Rows of one token that a warp adds up, at least.
const PIECE_ROWS: usize = 32;

/// `Sorted` of embedding.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct SortedParameter {
    tokens: Address,
    order: Address,
    count: u32,
    table_rows: u32,
}

// SAFETY: struct Sorted.
unsafe impl Parameter for SortedParameter {}

/// Where things lie among the parts, in words, and how the work is cut: by the shape alone.
struct Plan {
    /// Places that a block of the sort has.
    tile: usize,
    blocks: usize,
    orders: [usize; 2],
    counts: usize,
    starts: usize,
    partial: usize,
    /// Rows of one token that a warp adds up.
    length: usize,
}

impl Plan {
    fn new(count: usize, table_rows: usize, width: usize) -> Plan {
        let tile = count.div_ceil(SORT_BLOCKS).next_multiple_of(DIGITS);
        let blocks = count.div_ceil(tile);
        let counts = 2 * count;
        let starts = counts + blocks * DIGITS;
        // The partial rows are read four words at a time.
        let partial = (starts + table_rows).next_multiple_of(4);
        let rows = PARTS.saturating_sub(partial) / width.max(1);
        assert!(rows > 0, "the sums of a table of {table_rows} rows of {width} have no room");
        let length = count.div_ceil(rows).max(PIECE_ROWS);
        Plan { tile, blocks, orders: [0, count], counts, starts, partial, length }
    }
}

impl CudaDevice {
    pub(super) fn scatter_add(
        &self,
        tokens: &Tensor,
        width: usize,
        dy: &Tensor,
        gradient: &mut Tensor,
        accumulate: bool,
    ) -> Result {
        let table_rows = gradient.len() / width;
        assert_eq!(dy.len(), tokens.len() * width);
        assert_eq!((tokens.element(), gradient.element()), (Element::F32, Element::F32));
        assert!(table_rows < 1 << 31, "a table of {table_rows} rows");
        if !accumulate {
            self.zero(gradient)?;
        }
        for first in (0..tokens.len()).step_by(BATCH) {
            let count = BATCH.min(tokens.len() - first);
            let of = SortedParameter {
                tokens: tokens.at(first),
                order: Address(0),
                count: count as u32,
                table_rows: table_rows as u32,
            };
            // SAFETY: the lengths are asserted; the batch ends where the tokens do.
            unsafe { self.add_batch(of, width, (dy.element(), dy.at(first * width)), gradient.at(0)) }?;
        }
        Ok(())
    }

    /// # Safety
    /// There are as many tokens as `of` says, a row of `width` elements of dy for each, and as many rows of
    /// the gradient as `of` says.
    unsafe fn add_batch(
        &self,
        mut of: SortedParameter,
        width: usize,
        (element, dy): (Element, Address),
        gradient: Address,
    ) -> Result {
        let count = of.count as usize;
        let plan = Plan::new(count, of.table_rows as usize, width);
        let held = self.parts();
        let (counts, starts, partial) = (held.at(plan.counts), held.at(plan.starts), held.at(plan.partial));
        let sorting = Grid { threads: [DIGITS, 1], ..Grid::blocks(plan.blocks) };
        // Keys go up to `table_rows`, which stands for all tokens outside of the table.
        let bits = (u32::BITS - of.table_rows.leading_zeros()) as usize;
        let (tile, length) = (plan.tile as u32, plan.length as u32);
        for round in 0..bits.div_ceil(DIGIT_BITS).max(1) {
            let (shift, moved) = ((round * DIGIT_BITS) as i32, held.at(plan.orders[round % 2]));
            // SAFETY: the parts have room for both orders and for each block's counts; a round reads one order
            // and writes the other.
            unsafe {
                launch!(self, "sort_count", sorting, of, shift, tile, counts)?;
                launch!(self, "sort_move", sorting, of, shift, tile, counts, moved)?;
            }
            of.order = moved;
        }
        // SAFETY: as above; starts has a word for each row of the table, and partial a row of `width` for every
        // `length` tokens. The kernels check tokens against the table.
        unsafe {
            launch!(self, "token_starts", self.each(count), of, starts)?;
            let by_place = Grid::warps(count);
            launch!(self, "token_sums" of element, by_place, of, starts, length, width, dy, gradient, partial)?;
            let by_piece = Grid::blocks(count.div_ceil(plan.length));
            launch!(self, "add_token_parts", by_piece, of, starts, length, width, partial, gradient)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everything fits the parts, in its own place.
    #[test]
    fn a_batch_fits_the_parts() {
        for count in [1, 2, 255, 256, 257, 32768, 100_003, BATCH] {
            for (table_rows, width) in [(1, 1), (50257, 768), (151_936, 4096), (262_144, 16384)] {
                let plan = Plan::new(count, table_rows, width);
                assert!(plan.blocks <= SORT_BLOCKS && plan.blocks * plan.tile >= count);
                assert_eq!(plan.tile % DIGITS, 0);
                assert!(plan.partial + count.div_ceil(plan.length) * width <= PARTS);
                assert!(plan.length >= PIECE_ROWS && plan.partial.is_multiple_of(4));
            }
        }
    }
}
