//! How a part's slices are packed into shards: one role a shard, so that tools can open the weights alone; slices in the
//! order of names and places, none split unless it is larger than a shard. The same slices give the same files, in
//! whichever order they are named.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use super::manifest::{Shard, TensorEntry};
use crate::error::{Error, Result};
use crate::tensors::{TensorLayout, elements_of};

/// Elements of a tensor in one role, to be saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice<'a> {
    pub name: &'a str,
    /// Lowercase letters, digits and `_`: it becomes part of file names.
    pub role: &'a str,
    /// Of the whole tensor.
    pub shape: &'a [usize],
    /// In the order of the flattened tensor.
    pub range: Range<usize>,
}

/// A shard that has been laid out and not yet written.
pub(super) struct PackedShard {
    pub(super) layout: TensorLayout,
    /// In the order of their bytes.
    pub(super) pieces: Vec<Piece>,
    /// As the manifest names it, but for its hashes, which are only known once it is written.
    pub(super) shard: Shard,
}

/// What one shard holds of a slice: elements counted from the slice's first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) slice: usize,
    pub(super) within: Range<usize>,
}

/// Divides slices into shards of at most `shard_bytes_max` data bytes.
pub(super) fn pack(folder: &Path, slices: &[Slice<'_>], shard_bytes_max: u64) -> Result<Vec<PackedShard>> {
    let mut order: Vec<usize> = (0..slices.len()).collect();
    order.sort_by_key(|index| {
        let Slice { role, name, range, .. } = &slices[*index];
        (*role, *name, range.start, range.end)
    });
    check(folder, slices, &order)?;
    let elements_max =
        usize::try_from(shard_bytes_max / size_of::<f32>() as u64).unwrap_or(usize::MAX).max(1);
    let mut shards = Vec::new();
    for same_role in order.chunk_by(|left, right| slices[*left].role == slices[*right].role) {
        for (number, pieces) in fill(slices, same_role, elements_max).into_iter().enumerate() {
            shards.push(lay_out(folder, slices, number + 1, pieces)?);
        }
    }
    Ok(shards)
}

/// Fills one shard after the other.
fn fill(slices: &[Slice<'_>], order: &[usize], elements_max: usize) -> Vec<Vec<Piece>> {
    let mut full = Vec::new();
    let mut shard: Vec<Piece> = Vec::new();
    let mut room = elements_max;
    for piece in order.iter().flat_map(|&slice| split(slice, slices[slice].range.len(), elements_max)) {
        if piece.within.len() > room {
            full.push(std::mem::take(&mut shard));
            room = elements_max;
        }
        room -= piece.within.len();
        shard.push(piece);
    }
    full.push(shard);
    full
}

/// A slice as one piece, or as several of `elements_max` each.
fn split(slice: usize, elements: usize, elements_max: usize) -> impl Iterator<Item = Piece> {
    // An empty slice is one piece too.
    let count = elements.div_ceil(elements_max).max(1);
    (0..count).map(move |index| {
        let start = index * elements_max;
        Piece { slice, within: start..elements.min(start.saturating_add(elements_max)) }
    })
}

/// Names a shard after its role and makes its header. A shard is never empty.
fn lay_out(folder: &Path, slices: &[Slice<'_>], number: usize, pieces: Vec<Piece>) -> Result<PackedShard> {
    let file = format!("{}-{number:05}.safetensors", slices[pieces[0].slice].role);
    let tensors: Vec<TensorEntry> = pieces.iter().map(|piece| entry(slices, piece)).collect();
    let lengths: Vec<[usize; 1]> = pieces.iter().map(|piece| [piece.within.len()]).collect();
    let named = tensors.iter().zip(&lengths).map(|(entry, length)| {
        // A slice that is not the whole tensor is a row of numbers.
        let shape = if entry.key.is_none() { &entry.shape[..] } else { &length[..] };
        (entry.key(), shape, length[0] as u64)
    });
    let layout = TensorLayout::new(&folder.join(&file), &BTreeMap::new(), named)?;
    let shard = Shard { file, bytes: layout.bytes, blocks: Vec::new(), tensors };
    Ok(PackedShard { layout, pieces, shard })
}

fn entry(slices: &[Slice<'_>], piece: &Piece) -> TensorEntry {
    let slice = &slices[piece.slice];
    let (start, end) = (slice.range.start + piece.within.start, slice.range.start + piece.within.end);
    let is_whole = elements_of(slice.shape) == Some((end - start) as u64);
    TensorEntry {
        name: slice.name.to_owned(),
        key: (!is_whole).then(|| format!("{}[{start}..{end}]", slice.name)),
        role: slice.role.to_owned(),
        shape: slice.shape.to_vec(),
        start: start as u64,
        end: end as u64,
    }
}

fn check(folder: &Path, slices: &[Slice<'_>], order: &[usize]) -> Result<()> {
    let refuse = |slice: &Slice<'_>, reason: String| {
        Err(Error::Entry { path: folder.to_owned(), tensor: slice.name.to_owned(), reason })
    };
    let mut last: Option<&Slice> = None;
    for slice in order.iter().map(|index| &slices[*index]) {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        if slice.role.is_empty() || !slice.role.bytes().all(plain) {
            return refuse(slice, format!("its role {:?} cannot be part of a file name", slice.role));
        }
        let Range { start, end } = slice.range;
        if start > end || elements_of(slice.shape).is_none_or(|elements| end as u64 > elements) {
            return refuse(
                slice,
                format!("its shape {:?} does not have elements {start} to {end}", slice.shape),
            );
        }
        let same = |last: &&Slice| (last.role, last.name) == (slice.role, slice.name);
        if let Some(last) = last.filter(same) {
            if last.range.end > start || last.range == slice.range {
                return refuse(slice, format!("some of it is given twice as {}", slice.role));
            }
            if last.shape != slice.shape {
                return refuse(slice, format!("it has two shapes, {:?} and {:?}", last.shape, slice.shape));
            }
        }
        last = Some(slice);
    }
    Ok(())
}
