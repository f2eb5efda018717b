//! Attention in tiles: scores exist for a tile of queries and keys at a time, never as a whole.
//! The forward keeps one number per row and head (the logarithm of the softmax's sum); the backward makes
//! the scores again from it.

use std::ops::Range;

use super::dropout::RowMask;
use super::math::{exp, max, sum_by};
use super::matrix::single_product;
use super::{CpuDevice, SCORES};
use crate::device::{AttentionBackward, AttentionShape, DropoutSite};
use crate::tensor::Tensor;

/// Queries per tile.
pub(super) const QUERIES: usize = 64;
/// Keys per tile.
pub(super) const KEYS: usize = 256;

/// Rows of one head inside a tensor that holds several: `row(i)` is `stride` after `row(i - 1)`.
#[derive(Clone, Copy)]
struct Rows {
    start: *mut f32,
    stride: usize,
}

// SAFETY: pieces of work write the rows of different heads or samples only; see `attend` and
// `attend_backward` for who owns what.
unsafe impl Send for Rows {}
// SAFETY: as above.
unsafe impl Sync for Rows {}

impl Rows {
    fn of(tensor: &Tensor, stride: usize) -> Rows {
        Rows { start: tensor.floats().as_ptr().cast_mut(), stride }
    }

    fn of_mut(tensor: &mut Tensor, stride: usize) -> Rows {
        Rows { start: tensor.floats_mut().as_mut_ptr(), stride }
    }

    /// The rows from `row` on, from column `col` on.
    fn at(self, row: usize, col: usize) -> Rows {
        // SAFETY: callers stay inside the tensor, whose extent `attend` and `attend_backward` assert.
        Rows { start: unsafe { self.start.add(row * self.stride + col) }, ..self }
    }

    /// # Safety
    /// The row lies inside the tensor and nobody writes it meanwhile.
    unsafe fn row<'a>(self, row: usize, length: usize) -> &'a [f32] {
        // SAFETY: by this function's contract.
        unsafe { std::slice::from_raw_parts(self.start.add(row * self.stride), length) }
    }

    /// # Safety
    /// The row lies inside the tensor and nobody else touches it meanwhile.
    unsafe fn row_mut<'a>(self, row: usize, length: usize) -> &'a mut [f32] {
        // SAFETY: by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.stride), length) }
    }
}

/// `out[m, n] (+)= scale * a * b` on the calling thread; `a` and `b` may be read transposed.
///
/// # Safety
/// All elements lie inside their tensors, and nobody else writes them or reads `out` meanwhile.
unsafe fn tile_product(
    (m, n, k): (usize, usize, usize),
    out: Rows,
    accumulate: bool,
    (a, a_transposed): (Rows, bool),
    (b, b_transposed): (Rows, bool),
    scale: f32,
) {
    let matrix = |rows: Rows, transposed: bool| match transposed {
        true => (rows.start.cast_const(), 1, rows.stride),
        false => (rows.start.cast_const(), rows.stride, 1),
    };
    let out = (out.start, out.stride, 1);
    // SAFETY: by this function's contract.
    unsafe {
        single_product((m, n, k), out, accumulate, matrix(a, a_transposed), matrix(b, b_transposed), scale)
    }
}

/// How many keys of a tile, from its first on, query `query` sees.
#[inline(always)]
fn visible(shape: &AttentionShape, query: usize, keys: &Range<usize>) -> usize {
    shape.keys_seen(query).saturating_sub(keys.start).min(keys.len())
}

/// The tiles of keys that a tile of queries sees: those that its last one does.
fn key_tiles(shape: &AttentionShape, queries: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = shape.keys_seen(queries.end - 1);
    (0..end).step_by(KEYS).map(move |start| start..(start + KEYS).min(end))
}

/// A sample as its heads are computed: one of `length` rows and no others. Rows past them hold zeros.
fn without_padding(shape: &AttentionShape, lengths: Option<&[i32]>, sample: usize) -> AttentionShape {
    let length = lengths.map_or(shape.sequence, |lengths| lengths[sample] as usize);
    assert!((1..=shape.sequence).contains(&length), "{length} of {} rows count", shape.sequence);
    AttentionShape { sequence: length, ..*shape }
}

fn query_tiles(sequence: usize) -> impl Iterator<Item = Range<usize>> {
    (0..sequence).step_by(QUERIES).map(move |start| start..(start + QUERIES).min(sequence))
}

/// One head's queries, keys and values (or their gradients) inside joint rows.
#[derive(Clone, Copy)]
struct Head {
    query: Rows,
    key: Rows,
    value: Rows,
}

impl Head {
    fn new(shape: &AttentionShape, qkv: Rows, sample: usize, head: usize) -> Head {
        let group = shape.heads / shape.kv_heads;
        let rows = qkv.at(sample * shape.sequence, 0);
        let column = |index: usize| rows.at(0, index * shape.head_size);
        Head {
            query: column(head),
            key: column(shape.heads + head / group),
            value: column(shape.heads + shape.kv_heads + head / group),
        }
    }
}

impl CpuDevice {
    pub(super) fn attend(
        &self,
        shape: AttentionShape,
        dropout: Option<DropoutSite>,
        lengths: Option<&Tensor>,
        qkv: &Tensor,
        out: &mut Tensor,
        logsumexp: &mut Tensor,
    ) {
        assert!(shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads));
        shape.assert_lengths(lengths);
        let lengths = lengths.map(Tensor::integers);
        assert_eq!(qkv.len(), shape.rows() * shape.qkv_width());
        assert_eq!(out.len(), shape.rows() * shape.query_width());
        assert_eq!(logsumexp.len(), shape.rows() * shape.heads);
        let qkv = Rows::of(qkv, shape.qkv_width());
        let out = Rows::of_mut(out, shape.query_width());
        let lse = Rows::of_mut(logsumexp, shape.heads);
        // Each unit owns one head's columns of one sample's rows of `out` and `logsumexp`.
        self.each_unit(shape.samples * shape.heads, |unit, scratch| {
            let (sample, head) = (unit / shape.heads, unit % shape.heads);
            let first = sample * shape.sequence;
            let out = out.at(first, head * shape.head_size);
            let lse = lse.at(first, head);
            let site = dropout.map(|site| (site, sample, head * shape.sequence));
            let own = without_padding(&shape, lengths, sample);
            for queries in query_tiles(own.sequence) {
                let head = Head::new(&shape, qkv, sample, head);
                self.arch.dispatch(
                    #[inline(always)]
                    || forward_tile(&own, site, head, out, lse, queries.clone(), scratch),
                );
            }
            for row in own.sequence..shape.sequence {
                // SAFETY: this unit owns the row, and its element of `lse`.
                unsafe {
                    out.row_mut(row, shape.head_size).fill(0.0);
                    lse.row_mut(row, 1)[0] = 0.0;
                }
            }
        });
    }

    pub(super) fn attend_backward(
        &self,
        shape: AttentionShape,
        dropout: Option<DropoutSite>,
        of: AttentionBackward,
    ) {
        assert!(shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads));
        of.assert_fits(&shape);
        let AttentionBackward { lengths, qkv, out, logsumexp, out_gradient, scratch: delta, qkv_gradient } =
            of;
        let lengths = lengths.map(Tensor::integers);
        let qkv = Rows::of(qkv, shape.qkv_width());
        let gradient = Rows::of_mut(qkv_gradient, shape.qkv_width());
        let (out, dout) = (Rows::of(out, shape.query_width()), Rows::of(out_gradient, shape.query_width()));
        let (lse, delta) = (Rows::of(logsumexp, shape.heads), Rows::of_mut(delta, shape.heads));
        let group = shape.heads / shape.kv_heads;
        // Each unit owns one key-value head of one sample and the query heads that share it, because
        // their gradients of keys and values add up.
        self.each_unit(shape.samples * shape.kv_heads, |unit, scratch| {
            let (sample, kv_head) = (unit / shape.kv_heads, unit % shape.kv_heads);
            let first = sample * shape.sequence;
            let own = without_padding(&shape, lengths, sample);
            for (index, head) in (kv_head * group..(kv_head + 1) * group).enumerate() {
                let site = dropout.map(|site| (site, sample, head * shape.sequence));
                let column = head * shape.head_size;
                let context = Backward {
                    shape: &own,
                    site,
                    input: Head::new(&shape, qkv, sample, head),
                    gradient: Head::new(&shape, gradient, sample, head),
                    out: out.at(first, column),
                    dout: dout.at(first, column),
                    lse: lse.at(first, head),
                    delta: delta.at(first, head),
                };
                self.arch.dispatch(
                    #[inline(always)]
                    || {
                        context.prepare(index == 0);
                        context.clear(own.sequence..shape.sequence);
                        for queries in query_tiles(own.sequence) {
                            context.tile(queries, scratch);
                        }
                    },
                );
            }
        });
    }

    /// Runs `work` for each unit on the pool, with the running thread's own score tiles.
    fn each_unit(&self, units: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
        // Finer than the threads, so that a thread that falls behind does not hold up the other.
        let pieces = super::cut(units, 4 * self.threads(), 1);
        rayon::scope(|scope| {
            for range in pieces {
                let work = &work;
                scope.spawn(move |_| {
                    let mut scratch = self.scratch();
                    range.for_each(|unit| work(unit, &mut scratch.floats_mut()[..SCORES]));
                });
            }
        });
    }
}

/// A head's dropout: the site, the sample within the micro-batch, the number of the head's first row.
type HeadDropout<'a> = Option<(DropoutSite<'a>, usize, usize)>;

#[inline(always)]
fn mask_of(site: &HeadDropout, query: usize) -> Option<RowMask> {
    site.as_ref()
        .map(|(site, sample, first_row)| RowMask::new(site, *sample as u64, (first_row + query) as u64))
}

#[inline(always)]
fn forward_tile(
    shape: &AttentionShape,
    site: HeadDropout,
    head: Head,
    out: Rows,
    lse: Rows,
    queries: Range<usize>,
    scratch: &mut [f32],
) {
    let size = shape.head_size;
    let rows = queries.len();
    let mut highest = [f32::NEG_INFINITY; QUERIES];
    let mut sums = [0.0f32; QUERIES];
    let scores = Rows { start: scratch.as_mut_ptr(), stride: KEYS };
    for keys in key_tiles(shape, &queries) {
        let cols = keys.len();
        // SAFETY: the tile lies inside this head's rows; scores are this thread's.
        unsafe {
            let (q, k) = (head.query.at(queries.start, 0), head.key.at(keys.start, 0));
            tile_product((rows, cols, size), scores, false, (q, false), (k, true), shape.scale);
        }
        for row in 0..rows {
            let query = queries.start + row;
            let seen = visible(shape, query, &keys);
            // SAFETY: the tile is this thread's.
            let (line, hidden) = unsafe { scores.row_mut(row, cols) }.split_at_mut(seen);
            hidden.fill(0.0);
            let before = highest[row];
            let best = max(line).max(before);
            for score in line.iter_mut() {
                *score = exp(*score - best);
            }
            let sum = sum_by(line.len(), |i| line[i]);
            if let Some(mask) = mask_of(&site, query) {
                for (col, score) in line.iter_mut().enumerate() {
                    *score *= mask.factor(keys.start + col);
                }
            }
            let shrink = if before == f32::NEG_INFINITY { 0.0 } else { exp(before - best) };
            sums[row] = sums[row] * shrink + sum;
            highest[row] = best;
            if keys.start > 0 {
                // SAFETY: this unit owns the row.
                for value in unsafe { out.row_mut(query, size) } {
                    *value *= shrink;
                }
            }
        }
        // SAFETY: this unit owns its head's columns of `out`.
        unsafe {
            let (o, v) = (out.at(queries.start, 0), head.value.at(keys.start, 0));
            tile_product((rows, size, cols), o, keys.start > 0, (scores, false), (v, false), 1.0);
        }
    }
    for row in 0..rows {
        let query = queries.start + row;
        let inverse = 1.0 / sums[row];
        // SAFETY: this unit owns the row, and its element of `lse`.
        unsafe {
            for value in out.row_mut(query, size) {
                *value *= inverse;
            }
            lse.row_mut(query, 1)[0] = highest[row] + sums[row].ln();
        }
    }
}

/// Everything the backward of one head reads and writes.
struct Backward<'a> {
    shape: &'a AttentionShape,
    site: HeadDropout<'a>,
    input: Head,
    gradient: Head,
    out: Rows,
    dout: Rows,
    lse: Rows,
    delta: Rows,
}

impl Backward<'_> {
    /// `delta`, the rows' products of output and its gradient; clears the sums that tiles add to.
    #[inline(always)]
    fn prepare(&self, first_of_group: bool) {
        let size = self.shape.head_size;
        for row in 0..self.shape.sequence {
            // SAFETY: this unit owns the head's rows of `delta` and of the gradients.
            unsafe {
                let (out, dout) = (self.out.row(row, size), self.dout.row(row, size));
                self.delta.row_mut(row, 1)[0] = sum_by(size, |i| out[i] * dout[i]);
                if first_of_group {
                    self.gradient.key.row_mut(row, size).fill(0.0);
                    self.gradient.value.row_mut(row, size).fill(0.0);
                }
            }
        }
    }

    /// Nothing reaches the rows past a sample's length.
    fn clear(&self, rows: Range<usize>) {
        for row in rows {
            for part in [self.gradient.query, self.gradient.key, self.gradient.value] {
                // SAFETY: this unit owns the head's rows of the gradients.
                unsafe { part.row_mut(row, self.shape.head_size) }.fill(0.0);
            }
        }
    }

    #[inline(always)]
    fn tile(&self, queries: Range<usize>, scratch: &mut [f32]) {
        let (shape, size, rows) = (self.shape, self.shape.head_size, queries.len());
        let (weights, slopes) = scratch.split_at_mut(QUERIES * KEYS);
        let weights_tile = Rows { start: weights.as_mut_ptr(), stride: KEYS };
        let slopes_tile = Rows { start: slopes.as_mut_ptr(), stride: KEYS };
        let query = self.input.query.at(queries.start, 0);
        let dout = self.dout.at(queries.start, 0);
        for keys in key_tiles(shape, &queries) {
            let cols = keys.len();
            let (key, value) = (self.input.key.at(keys.start, 0), self.input.value.at(keys.start, 0));
            // SAFETY: tiles inside this head's rows; scores are this thread's.
            unsafe {
                tile_product(
                    (rows, cols, size),
                    weights_tile,
                    false,
                    (query, false),
                    (key, true),
                    shape.scale,
                );
                tile_product((rows, cols, size), slopes_tile, false, (dout, false), (value, true), 1.0);
            }
            for row in 0..rows {
                let index = queries.start + row;
                let seen = visible(shape, index, &keys);
                // SAFETY: written by the forward and by `prepare`; nobody writes them now.
                let (lse, delta) = unsafe { (self.lse.row(index, 1)[0], self.delta.row(index, 1)[0]) };
                // SAFETY: the tiles are this thread's.
                let (weights, slopes) =
                    unsafe { (weights_tile.row_mut(row, cols), slopes_tile.row_mut(row, cols)) };
                let ((weights, hidden_weights), (slopes, hidden_slopes)) =
                    (weights.split_at_mut(seen), slopes.split_at_mut(seen));
                hidden_weights.fill(0.0);
                hidden_slopes.fill(0.0);
                match mask_of(&self.site, index) {
                    None => {
                        for (weight, slope) in weights.iter_mut().zip(slopes) {
                            *weight = exp(*weight - lse);
                            *slope = *weight * (*slope - delta) * shape.scale;
                        }
                    }
                    Some(mask) => {
                        for (col, (weight, slope)) in weights.iter_mut().zip(slopes).enumerate() {
                            let factor = mask.factor(keys.start + col);
                            let probability = exp(*weight - lse);
                            *slope = probability * (factor * *slope - delta) * shape.scale;
                            *weight = probability * factor;
                        }
                    }
                }
            }
            let gradient = &self.gradient;
            // SAFETY: this unit owns its key-value head's gradients and this head's query gradients.
            unsafe {
                let dv = gradient.value.at(keys.start, 0);
                tile_product((cols, size, rows), dv, true, (weights_tile, true), (dout, false), 1.0);
                let dq = gradient.query.at(queries.start, 0);
                let onto = keys.start > 0;
                tile_product((rows, size, cols), dq, onto, (slopes_tile, false), (key, false), 1.0);
                let dk = gradient.key.at(keys.start, 0);
                tile_product((cols, size, rows), dk, true, (slopes_tile, true), (query, false), 1.0);
            }
        }
    }
}
