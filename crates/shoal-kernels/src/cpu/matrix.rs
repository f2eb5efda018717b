//! Matrix products by the `gemm` crate, cut over the threads by us: the crate's own threading reached 186
//! of the 217 GFLOP/s that two independent halves reach on two cores.

use gemm_common::Parallelism;
use gemm_f32::gemm::f32::get_gemm_fn;

use super::cut;

/// A matrix to read: pointer, then strides between rows and between columns.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    values: &'a [f32],
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Source<'a> {
    pub(super) fn new(values: &'a [f32], row_stride: usize, col_stride: usize) -> Self {
        Source { values, row_stride, col_stride }
    }

    /// Rows become columns.
    pub(super) fn transposed(self) -> Self {
        Source { row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    fn assert_covers(&self, rows: usize, cols: usize) {
        let last = (rows - 1) * self.row_stride + (cols - 1) * self.col_stride;
        assert!(last < self.values.len(), "a {rows} x {cols} matrix in {} elements", self.values.len());
    }
}

/// A matrix to write. Rows, or columns, are contiguous.
pub(super) struct Target<'a> {
    values: &'a mut [f32],
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Target<'a> {
    pub(super) fn new(values: &'a mut [f32], row_stride: usize, col_stride: usize) -> Self {
        Target { values, row_stride, col_stride }
    }
}

/// Columns a kernel call gets at most. It copies them into a buffer of its own, up to the size of the last
/// cache; so cut, that buffer stays at a few MiB a thread, which what is stated for the process covers.
const PACKED_COLUMNS: usize = 2048;

/// One product on the calling thread: `out[m, n] (+)= scale * a * b`, each matrix as (pointer, row stride,
/// column stride).
///
/// # Safety
/// All elements lie inside their allocations, and nobody else writes them or reads `out` meanwhile.
#[inline]
pub(super) unsafe fn single_product(
    (m, n, k): (usize, usize, usize),
    out: (*mut f32, usize, usize),
    accumulate: bool,
    a: (*const f32, usize, usize),
    b: (*const f32, usize, usize),
    scale: f32,
) {
    // The kernels write down columns and are twice as fast there: rows are columns of the transpose.
    if out.2 < out.1 {
        let transposed = |(pointer, row, col): (*const f32, usize, usize)| (pointer, col, row);
        let out = (out.0, out.2, out.1);
        // SAFETY: the same elements by other names.
        return unsafe { single_product((n, m, k), out, accumulate, transposed(b), transposed(a), scale) };
    }
    for first in (0..n).step_by(PACKED_COLUMNS) {
        // SAFETY: by this function's contract; each round takes some columns of `b` and of `out`.
        unsafe {
            get_gemm_fn()(
                m,
                PACKED_COLUMNS.min(n - first),
                k,
                out.0.add(first * out.2),
                out.2 as isize,
                out.1 as isize,
                accumulate,
                a.0,
                a.2 as isize,
                a.1 as isize,
                b.0.add(first * b.2),
                b.2 as isize,
                b.1 as isize,
                1.0,
                scale,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
}

/// Pointers that cross into the pool's threads.
#[derive(Clone, Copy)]
struct Pointers {
    out: *mut f32,
    a: *const f32,
    b: *const f32,
}

// SAFETY: the pieces cut below write disjoint elements of `out` and only read `a` and `b`, which stay
// borrowed until the pool has joined.
unsafe impl Send for Pointers {}
// SAFETY: as above.
unsafe impl Sync for Pointers {}

/// Below this many multiply-adds a second thread costs more than it brings.
const PARALLEL_MIN: usize = 1 << 17;

/// `out[m, n] (+)= scale * a[m, k] * b[k, n]`, on up to `threads` threads of the pool this runs in.
#[allow(clippy::too_many_arguments)]
pub(super) fn product(
    threads: usize,
    (m, n, k): (usize, usize, usize),
    out: Target,
    accumulate: bool,
    a: Source,
    b: Source,
    scale: f32,
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(k > 0, "a product over no elements");
    a.assert_covers(m, k);
    b.assert_covers(k, n);
    Source::new(out.values, out.row_stride, out.col_stride).assert_covers(m, n);
    let pointers = Pointers { out: out.values.as_mut_ptr(), a: a.values.as_ptr(), b: b.values.as_ptr() };
    let piece = move |rows: std::ops::Range<usize>, cols: std::ops::Range<usize>| {
        let pointers: Pointers = pointers; // whole, so that its Send and Sync count
        // SAFETY: the asserts above keep every element of the three matrices inside its slice; the
        // ranges of different pieces do not overlap, so each element of `out` has one writer.
        unsafe {
            let out_start = pointers.out.add(rows.start * out.row_stride + cols.start * out.col_stride);
            single_product(
                (rows.len(), cols.len(), k),
                (out_start, out.row_stride, out.col_stride),
                accumulate,
                (pointers.a.add(rows.start * a.row_stride), a.row_stride, a.col_stride),
                (pointers.b.add(cols.start * b.col_stride), b.row_stride, b.col_stride),
                scale,
            );
        }
    };
    if threads == 1 || m * n * k < PARALLEL_MIN {
        return piece(0..m, 0..n);
    }
    // The longer side is cut: each piece packs the shorter operand again, and that is the smaller cost.
    rayon::scope(|scope| {
        if n >= m {
            cut(n, threads, 64).for_each(|cols| scope.spawn(move |_| piece(0..m, cols)));
        } else {
            cut(m, threads, 64).for_each(|rows| scope.spawn(move |_| piece(rows, 0..n)));
        }
    });
}
