//! Saving: how tensors are packed into shards, and the order of writes that makes a checkpoint whole or
//! absent. The order is the point: shards, their flush, the manifest, the folder's flush, its name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::manifest::{FORMAT, Manifest, Shard, TensorEntry};
use super::{MANIFEST_FILE, PARTIAL, REPLACED, Store};
use crate::disk::Writing;
use crate::error::{Error, Result};
use crate::tensors::{TensorData, TensorWriter, elements_of};

/// What a checkpoint is of, as [`Manifest`] records it.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// The fingerprint of the job.
    pub job: String,
    /// Steps done.
    pub step: u64,
    /// Samples consumed.
    pub position: u64,
    pub seed: u64,
    /// Which generator `seed` belongs to.
    pub rng: String,
    pub plan: String,
    pub extra: BTreeMap<String, Value>,
}

/// A tensor to be saved, borrowed from where it lives.
#[derive(Debug, Clone, Copy)]
pub struct Entry<'a> {
    pub name: &'a str,
    /// Lowercase letters, digits and `_`: it becomes part of file names.
    pub role: &'a str,
    pub shape: &'a [usize],
    pub data: &'a [f32],
}

/// A checkpoint that is on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    pub path: PathBuf,
    /// Of all its files.
    pub bytes: u64,
}

impl Store {
    /// Saves a checkpoint and returns once it is on the disk. The order of `entries` does not matter. A
    /// checkpoint of the same step is replaced. When this fails, the checkpoints that were there still are.
    pub fn save<'a>(&self, header: Header, entries: impl IntoIterator<Item = Entry<'a>>) -> Result<Saved> {
        let step = header.step;
        let (partial, in_place) = (self.folder(step, PARTIAL), self.folder(step, ""));
        let pieces = pack(&partial, entries.into_iter().collect(), self.shard_bytes_max)?;
        let shards = lay_out(&partial, &pieces)?;
        let mut manifest = unhashed_manifest(header, &shards);
        let shard_bytes: u64 = manifest.shards.iter().map(|shard| shard.bytes).sum();
        // Hashes all have the same length, so the manifest already has its size.
        let bytes = shard_bytes + manifest.encode(&partial)?.len() as u64;

        let writing = self.writing(bytes);
        writing.remove_tree(&partial)?;
        let saved = write_folder(writing, &partial, &shards, &mut manifest)
            .and_then(|()| writing.put_in_place(&partial, &in_place, &self.folder(step, REPLACED)));
        if saved.is_err() {
            // Gives the space back. If that fails too, the error to report is still the first one, and the
            // next opening removes the folder.
            let _ = writing.remove_tree(&partial);
        }
        saved.map(|()| Saved { path: in_place, bytes })
    }
}

/// The manifest as it will be, but for the hashes, which are only known once the shards are written.
fn unhashed_manifest(header: Header, packed: &[PackedShard<'_>]) -> Manifest {
    let Header { job, step, position, seed, rng, plan, extra } = header;
    let shards = packed.iter().map(|shard| Shard {
        file: shard.file.clone(),
        bytes: shard.writer.bytes(),
        blake3: "0".repeat(2 * blake3::OUT_LEN),
        tensors: shard.tensors.clone(),
    });
    Manifest { format: FORMAT, job, step, position, seed, rng, plan, extra, shards: shards.collect() }
}

/// Writes the whole checkpoint into `folder` and flushes it.
fn write_folder(
    writing: Writing<'_>,
    folder: &Path,
    packed: &[PackedShard<'_>],
    manifest: &mut Manifest,
) -> Result<()> {
    writing.create_dir(folder)?;
    for (shard, entry) in packed.iter().zip(&mut manifest.shards) {
        let written = shard.writer.write_on(writing, &folder.join(&shard.file))?;
        assert_eq!(written.bytes, entry.bytes, "a shard has the size its header says");
        entry.blake3 = written.blake3;
    }
    let path = folder.join(MANIFEST_FILE);
    let unnamed = folder.join(format!("{MANIFEST_FILE}{PARTIAL}"));
    writing.write_file(&unnamed, &manifest.encode(&path)?)?;
    writing.rename(&unnamed, &path)?;
    writing.sync_dir(folder)
}

/// A shard that has been laid out and not yet written.
struct PackedShard<'a> {
    file: String,
    writer: TensorWriter<'a>,
    tensors: Vec<TensorEntry>,
}

/// Elements `start..end` of an entry.
#[derive(Clone, Copy)]
struct Piece<'a> {
    entry: Entry<'a>,
    start: usize,
    end: usize,
    /// Their number: the shape of a piece that is not the whole tensor.
    length: [usize; 1],
}

/// Divides the entries into shards of at most `shard_bytes_max` data bytes: one role per shard, tensors in
/// name order, none split unless it is larger than a shard.
fn pack<'a>(folder: &Path, mut entries: Vec<Entry<'a>>, shard_bytes_max: u64) -> Result<Vec<Vec<Piece<'a>>>> {
    entries.sort_by_key(|entry| (entry.role, entry.name));
    check(folder, &entries)?;
    let elements_max =
        usize::try_from(shard_bytes_max / size_of::<f32>() as u64).unwrap_or(usize::MAX).max(1);
    Ok(entries
        .chunk_by(|left, right| left.role == right.role)
        .flat_map(|same_role| pack_role(same_role, elements_max))
        .collect())
}

fn pack_role<'a>(entries: &[Entry<'a>], elements_max: usize) -> Vec<Vec<Piece<'a>>> {
    let mut full = Vec::new();
    let mut shard: Vec<Piece<'a>> = Vec::new();
    let mut room = elements_max;
    for piece in entries.iter().flat_map(|&entry| split(entry, elements_max)) {
        let [elements] = piece.length;
        if elements > room {
            full.push(std::mem::take(&mut shard));
            room = elements_max;
        }
        room -= elements;
        shard.push(piece);
    }
    full.push(shard);
    full
}

/// An entry as one piece, or as several of `elements_max` each.
fn split(entry: Entry<'_>, elements_max: usize) -> impl Iterator<Item = Piece<'_>> {
    let elements = entry.data.len();
    // An empty tensor is one piece too.
    let count = elements.div_ceil(elements_max).max(1);
    (0..count).map(move |index| {
        let start = index * elements_max;
        let end = elements.min(start.saturating_add(elements_max));
        Piece { entry, start, end, length: [end - start] }
    })
}

/// Names each shard after its role and makes its header.
fn lay_out<'a>(folder: &Path, packed: &'a [Vec<Piece<'a>>]) -> Result<Vec<PackedShard<'a>>> {
    let mut shards = Vec::with_capacity(packed.len());
    for same_role in packed.chunk_by(|left, right| role_of(left) == role_of(right)) {
        for (index, pieces) in same_role.iter().enumerate() {
            let file = format!("{}-{:05}.safetensors", role_of(pieces), index + 1);
            let writer =
                TensorWriter::new(&folder.join(&file), &BTreeMap::new(), pieces.iter().map(Piece::data))?;
            shards.push(PackedShard {
                file,
                writer,
                tensors: pieces.iter().map(Piece::manifest_entry).collect(),
            });
        }
    }
    Ok(shards)
}

/// The role all pieces of a shard share. A shard is never empty.
fn role_of<'a>(pieces: &[Piece<'a>]) -> &'a str {
    pieces[0].entry.role
}

impl Piece<'_> {
    fn data(&self) -> TensorData<'_> {
        let data = &self.entry.data[self.start..self.end];
        let whole = data.len() == self.entry.data.len();
        TensorData { name: self.entry.name, shape: if whole { self.entry.shape } else { &self.length }, data }
    }

    fn manifest_entry(&self) -> TensorEntry {
        TensorEntry {
            name: self.entry.name.to_owned(),
            role: self.entry.role.to_owned(),
            shape: self.entry.shape.to_vec(),
            start: self.start as u64,
            end: self.end as u64,
        }
    }
}

fn check(folder: &Path, sorted: &[Entry<'_>]) -> Result<()> {
    let refuse = |entry: &Entry<'_>, reason: String| {
        Err(Error::Entry { path: folder.to_owned(), tensor: entry.name.to_owned(), reason })
    };
    for entry in sorted {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        if entry.role.is_empty() || !entry.role.bytes().all(plain) {
            return refuse(entry, format!("its role {:?} cannot be part of a file name", entry.role));
        }
        if elements_of(entry.shape) != Some(entry.data.len() as u64) {
            return refuse(
                entry,
                format!("its shape {:?} does not have {} elements", entry.shape, entry.data.len()),
            );
        }
    }
    let same = |[left, right]: &&[Entry<'_>; 2]| (left.role, left.name) == (right.role, right.name);
    match sorted.array_windows().find(same) {
        Some([twice, _]) => refuse(twice, format!("it is given twice as {}", twice.role)),
        None => Ok(()),
    }
}
