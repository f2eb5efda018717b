//! The innermost product of convolutions: a tile of sums that stays in registers from the first term to the last,
//! so that operands are read where they lie and nothing is gathered.
//!
//! With intrinsics: of plain loops the compiler keeps some tile heights in registers and
//! stores others at every term, at a third of the speed.

use super::cut;
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
    /// As above; `columns` numbers from `to` on can be written, the others are not.
    unsafe fn store(self, to: *mut f32, columns: usize);
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
        // SAFETY: by the contract; what the mask leaves out is not read.
        unsafe { std::arch::x86_64::_mm512_maskz_loadu_ps(first_lanes(columns), from) }
    }

    #[inline(always)]
    unsafe fn plus(self, factor: f32, other: Self) -> Self {
        use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_set1_ps};
        // SAFETY: by the contract.
        unsafe { _mm512_fmadd_ps(_mm512_set1_ps(factor), other, self) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, columns: usize) {
        // SAFETY: by the contract; what the mask leaves out is not written.
        unsafe { std::arch::x86_64::_mm512_mask_storeu_ps(to, first_lanes(columns), self) }
    }
}

/// The mask of a vector's first columns.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn first_lanes(columns: usize) -> u16 {
    if columns < LANES { (1 << columns) - 1 } else { u16::MAX }
}

#[cfg(target_arch = "x86_64")]
impl Lanes for [std::arch::x86_64::__m256; 2] {
    #[inline(always)]
    fn zero() -> Self {
        // SAFETY: sixteen zeros by their bits.
        unsafe { std::mem::zeroed() }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32, columns: usize) -> Self {
        if columns >= LANES {
            // SAFETY: by the contract; unaligned.
            return unsafe { from.cast::<Self>().read_unaligned() };
        }
        // SAFETY: by the contract, and any bits are lanes.
        unsafe { std::mem::transmute(<[f32; LANES]>::load(from, columns)) }
    }

    #[inline(always)]
    unsafe fn plus(self, factor: f32, other: Self) -> Self {
        use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_set1_ps};
        // SAFETY: by the contract.
        unsafe {
            let factor = _mm256_set1_ps(factor);
            [_mm256_fmadd_ps(factor, other[0], self[0]), _mm256_fmadd_ps(factor, other[1], self[1])]
        }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, columns: usize) {
        // SAFETY: by the contract, and lanes are numbers.
        unsafe { std::mem::transmute::<Self, [f32; LANES]>(self).store(to, columns) }
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
    unsafe fn store(self, to: *mut f32, columns: usize) {
        // SAFETY: by the contract.
        let to = unsafe { std::slice::from_raw_parts_mut(to, columns.min(LANES)) };
        to.copy_from_slice(&self[..to.len()]);
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
unsafe fn store<L: Lanes>(values: [L; 2], to: *mut f32, columns: usize) {
    // SAFETY: by the caller's; a second vector without columns writes nothing.
    unsafe {
        values[0].store(to, columns);
        values[1].store(to.wrapping_add(LANES), columns.saturating_sub(LANES));
    }
}

/// See [`rows_by_panel`].
#[inline(always)]
unsafe fn rows_by_panel_of<L: Lanes, const R: usize>(
    rows: &[*const f32],
    runs: &[Run],
    panel: *const f32,
    out: &mut [[f32; COLUMNS]],
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
    for (sums, out) in sums.into_iter().zip(out) {
        // SAFETY: by the caller's.
        unsafe { store(sums, out.as_mut_ptr(), COLUMNS) };
    }
}

/// See [`pairs`].
#[inline(always)]
unsafe fn pairs_of<L: Lanes, const R: usize>(
    (left, right): (*const f32, *const f32),
    at: &[(usize, usize)],
    columns: usize,
    (out, stride): (*mut f32, usize),
) {
    let mut sums = [[L::zero(); 2]; R];
    for (from, other) in at {
        // SAFETY: by the caller's.
        unsafe {
            let (from, other) = (left.add(*from), load(right.add(*other), columns));
            add_row(&mut sums, |row| *from.add(row), other);
        }
    }
    for (row, sums) in sums.into_iter().enumerate() {
        // SAFETY: by the caller's.
        unsafe {
            let out = out.add(row * stride);
            let before: [L; 2] = load(out, columns);
            store([before[0].plus(1.0, sums[0]), before[1].plus(1.0, sums[1])], out, columns);
        }
    }
}

/// Rows whose sums fit the registers: of sixteen, twelve are for sums where a row takes four of them.
fn rows_at_once(arch: InstructionSet) -> usize {
    match arch {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 => ROWS,
        _ => 3,
    }
}

/// Calls a kernel compiled for so many rows, with the vectors of the instruction set.
macro_rules! of_height {
    ($arch:expr, $rows:expr, $kernel:ident $arguments:tt) => {{
        #[cfg(target_arch = "x86_64")]
        use std::arch::x86_64::{__m256, __m512};
        match $arch {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => of_height!(InstructionSet::Avx512, $rows, __m512, $kernel $arguments,
                1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 =>
                of_height!(InstructionSet::Avx2, $rows, [__m256; 2], $kernel $arguments, 1, 2, 3),
            InstructionSet::Plain =>
                of_height!(InstructionSet::Plain, $rows, [f32; LANES], $kernel $arguments, 1, 2, 3),
        }
    }};
    ($arch:expr, $rows:expr, $lanes:ty, $kernel:ident $arguments:tt, $($height:literal),*) => {
        match $rows {
            $($height => $arch.dispatch(
                #[inline(always)]
                // SAFETY: by the caller's; the instruction set was found on this processor.
                || unsafe { $kernel::<$lanes, $height> $arguments },
            ),)*
            height => unreachable!("a tile of {height} rows"),
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
    for some in cut(height, usize::MAX, rows_at_once(arch)) {
        let (rows, out) = (&rows[some.clone()], &mut out[some.clone()]);
        of_height!(arch, some.len(), rows_by_panel_of(rows, runs, panel, out))
    }
}

/// `out[row][column] += Σ left[from + row] * right[other + column]` over pairs `(from, other)`, for `height` rows
/// and `columns` columns; rows of `out`, a pointer, are a stride apart.
///
/// # Safety
/// Every pair is followed by so many numbers on both sides. The elements of `out` lie inside of what it points
/// into, and nobody else touches them meanwhile.
pub(super) unsafe fn pairs(
    arch: InstructionSet,
    (height, columns): (usize, usize),
    (left, right): (*const f32, *const f32),
    at: &[(usize, usize)],
    (out, stride): (*mut f32, usize),
) {
    for some in cut(height, usize::MAX, rows_at_once(arch)) {
        // SAFETY: by this function's contract.
        let (left, out) = unsafe { (left.add(some.start), out.add(some.start * stride)) };
        of_height!(arch, some.len(), pairs_of((left, right), at, columns, (out, stride)))
    }
}
