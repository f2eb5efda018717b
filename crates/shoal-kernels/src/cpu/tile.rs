//! The innermost product of convolutions: a tile of sums that stays in registers from the first term to the last,
//! so that operands are read where they lie and nothing is gathered.
//!
//! With intrinsics where there is AVX-512: of plain loops the compiler keeps some tile heights in registers and
//! stores others at every term, at a third of the speed.

use super::vector::InstructionSet;

/// Columns of a tile: two vectors of sixteen, and one word of a mask.
pub(super) const COLUMNS: usize = 32;
/// Most rows of a tile: 24 vectors of sums, of 32 that there are, leave room for the operands.
pub(super) const ROWS: usize = 12;

const LANES: usize = 16;

pub(super) type Tile = [[f32; COLUMNS]; ROWS];

/// Terms that lie side by side in both operands: `length` of them, `step` elements from a row's start, and from
/// row `panel_row` of the panel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub panel_row: usize,
    pub step: usize,
    pub length: usize,
}

/// Sixteen sums.
trait Lanes: Copy {
    fn zero() -> Self;
    /// # Safety
    /// The processor has the instructions; `columns` numbers from `from` on can be read. The others are zero.
    unsafe fn load(from: *const f32, columns: usize) -> Self;
    /// `self + factor * other`
    ///
    /// # Safety
    /// As above.
    unsafe fn plus(self, factor: f32, other: Self) -> Self;
    /// # Safety
    /// As above.
    unsafe fn store(self, to: &mut [f32; LANES]);
}

#[cfg(target_arch = "x86_64")]
impl Lanes for std::arch::x86_64::__m512 {
    #[inline(always)]
    fn zero() -> Self {
        // SAFETY: sixteen zeros by their bits.
        unsafe { std::mem::zeroed() }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32, columns: usize) -> Self {
        let mask = if columns < LANES { (1u16 << columns) - 1 } else { u16::MAX };
        // SAFETY: by the contract; what the mask leaves out is not read.
        unsafe { std::arch::x86_64::_mm512_maskz_loadu_ps(mask, from) }
    }

    #[inline(always)]
    unsafe fn plus(self, factor: f32, other: Self) -> Self {
        use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_set1_ps};
        // SAFETY: by the contract.
        unsafe { _mm512_fmadd_ps(_mm512_set1_ps(factor), other, self) }
    }

    #[inline(always)]
    unsafe fn store(self, to: &mut [f32; LANES]) {
        // SAFETY: by the contract.
        unsafe { std::arch::x86_64::_mm512_storeu_ps(to.as_mut_ptr(), self) }
    }
}

impl Lanes for [f32; LANES] {
    #[inline(always)]
    fn zero() -> Self {
        [0.0; LANES]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32, columns: usize) -> Self {
        let mut lanes = [0.0; LANES];
        // SAFETY: by the contract.
        let from = unsafe { std::slice::from_raw_parts(from, columns.min(LANES)) };
        lanes[..from.len()].copy_from_slice(from);
        lanes
    }

    #[inline(always)]
    unsafe fn plus(self, factor: f32, other: Self) -> Self {
        std::array::from_fn(|lane| self[lane] + factor * other[lane])
    }

    #[inline(always)]
    unsafe fn store(self, to: &mut [f32; LANES]) {
        *to = self;
    }
}

/// Both vectors of a row of `columns` numbers.
#[inline(always)]
unsafe fn load<L: Lanes>(from: *const f32, columns: usize) -> [L; 2] {
    // SAFETY: by the caller's; a second vector without columns reads nothing.
    unsafe { [L::load(from, columns), L::load(from.wrapping_add(LANES), columns.saturating_sub(LANES))] }
}

#[inline(always)]
unsafe fn add_row<L: Lanes, const R: usize>(
    sums: &mut [[L; 2]; R],
    at: impl Fn(usize) -> f32,
    other: [L; 2],
) {
    for (row, sums) in sums.iter_mut().enumerate() {
        let factor = at(row);
        // SAFETY: by the caller's.
        *sums = unsafe { [sums[0].plus(factor, other[0]), sums[1].plus(factor, other[1])] };
    }
}

#[inline(always)]
unsafe fn keep<L: Lanes, const R: usize>(sums: [[L; 2]; R], out: &mut Tile) {
    for (sums, out) in sums.into_iter().zip(out) {
        let (first, second) = out.split_at_mut(LANES);
        // SAFETY: by the caller's.
        unsafe {
            sums[0].store(first.try_into().expect("sixteen columns"));
            sums[1].store(second.try_into().expect("sixteen columns"));
        }
    }
}

/// See [`rows_by_panel`].
#[inline(always)]
unsafe fn rows_by_panel_of<L: Lanes, const R: usize>(
    rows: &[*const f32; ROWS],
    runs: &[Run],
    panel: *const f32,
    out: &mut Tile,
) {
    let mut sums = [[L::zero(); 2]; R];
    for run in runs {
        let rows: [*const f32; R] = std::array::from_fn(|row| rows[row].wrapping_add(run.step));
        for term in 0..run.length {
            // SAFETY: by the caller's.
            unsafe {
                let other = load(panel.add((run.panel_row + term) * COLUMNS), COLUMNS);
                add_row(&mut sums, |row| *rows[row].add(term), other);
            }
        }
    }
    // SAFETY: by the caller's.
    unsafe { keep(sums, out) }
}

/// See [`pairs`].
#[inline(always)]
unsafe fn pairs_of<L: Lanes, const R: usize>(
    (left, right): (*const f32, *const f32),
    at: &[(usize, usize)],
    columns: usize,
    out: &mut Tile,
) {
    let mut sums = [[L::zero(); 2]; R];
    for (from, other) in at {
        // SAFETY: by the caller's.
        unsafe {
            let (from, other) = (left.add(*from), load(right.add(*other), columns));
            add_row(&mut sums, |row| *from.add(row), other);
        }
    }
    // SAFETY: by the caller's.
    unsafe { keep(sums, out) }
}

/// Calls a kernel compiled for so many rows, with the vectors of the instruction set.
macro_rules! of_height {
    ($arch:expr, $rows:expr, $kernel:ident $arguments:tt) => {
        match $arch {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => of_height!($arch, $rows, std::arch::x86_64::__m512, $kernel $arguments,
                1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
            arch => of_height!(arch, $rows, [f32; LANES], $kernel $arguments,
                1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
        }
    };
    ($arch:expr, $rows:expr, $lanes:ty, $kernel:ident $arguments:tt, $($height:literal),*) => {
        match $rows {
            $($height => $arch.dispatch(
                #[inline(always)]
                // SAFETY: by the caller's; the instruction set was found on this processor.
                || unsafe { $kernel::<$lanes, $height> $arguments },
            ),)*
            _ => unreachable!("a tile has 1 to {ROWS} rows"),
        }
    };
}

/// `out[row][column] = Σ rows[row][term] * panel[term][column]` over the terms of all runs, for the first `height`
/// rows.
///
/// # Safety
/// The runs lie inside of what each of the rows points into, and inside of the panel.
pub(super) unsafe fn rows_by_panel(
    arch: InstructionSet,
    height: usize,
    rows: &[*const f32; ROWS],
    runs: &[Run],
    panel: *const f32,
    out: &mut Tile,
) {
    of_height!(arch, height, rows_by_panel_of(rows, runs, panel, out))
}

/// `out[row][column] = Σ left[from + row] * right[other + column]` over pairs `(from, other)`, for the first `height`
/// rows and `columns` columns.
///
/// # Safety
/// Every pair is followed by so many numbers on both sides.
pub(super) unsafe fn pairs(
    arch: InstructionSet,
    (height, columns): (usize, usize),
    operands: (*const f32, *const f32),
    at: &[(usize, usize)],
    out: &mut Tile,
) {
    of_height!(arch, height, pairs_of(operands, at, columns, out))
}
