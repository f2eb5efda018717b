//! Loading. What is known when a checkpoint is open: all its parts are there, their manifests are whole and agree, every
//! shard has its size and holds what its manifest says, and the slices are each tensor in each role exactly once. What is
//! known when elements are handed out: the bytes they came from match their hashes. Files on a disk stay open from the
//! first check to the last read, so what is removed meanwhile can still be read.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::Found;
use super::blocks::{BLOCK_BYTES_MAX, LastBlock, Verified};
use super::manifest::{Header, MANIFEST_BYTES_MAX, Manifest, Shard, TensorEntry};
use crate::disk::CHUNK_BYTES;
use crate::error::{Error, Result};
use crate::place::{MANIFEST_FILE, Place, Source};
use crate::tensors::{Dtype, TensorFile, elements_of};

/// A checkpoint, open for reading.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    /// Of its parts, in order; there is at least one.
    manifests: Vec<Manifest>,
    files: Vec<ShardFile>,
    /// Each tensor's slices, by role and name, in element order and without gaps.
    tensors: BTreeMap<(String, String), Vec<Piece>>,
}

#[derive(Debug)]
struct ShardFile {
    tensors: TensorFile,
    /// None in format 1, whose shards are verified whole when they are opened.
    verified: Option<Arc<Verified>>,
}

/// Some elements of a tensor, and where they are.
#[derive(Debug)]
struct Piece {
    file: usize,
    key: String,
    range: Range<u64>,
}

impl Checkpoint {
    /// Opens a checkpoint of which all parts are listed, in order.
    pub(super) fn open(place: &dyn Place, parts: &[&Found]) -> Result<Checkpoint> {
        let path = place.path(&parts[0].listed.name);
        let mut manifests: Vec<Manifest> = Vec::with_capacity(parts.len());
        let mut files = Vec::new();
        let last = Arc::new(Mutex::new(LastBlock::default()));
        for part in parts {
            let manifest = read_manifest(place, part)?;
            if manifests.first().is_some_and(|first| first.header != manifest.header) {
                let of = place.path(&part.listed.name).join(MANIFEST_FILE);
                return Err(damaged(&of, "it does not agree with the first part's manifest".to_owned()));
            }
            for shard in &manifest.shards {
                let block_bytes = manifest.block_bytes;
                files.push(open_shard(place, &part.listed.name, shard, block_bytes, files.len(), &last)?);
            }
            manifests.push(manifest);
        }
        let tensors = index(&path, &manifests)?;
        Ok(Checkpoint { path, manifests, files, tensors })
    }

    /// The first part's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn header(&self) -> &Header {
        &self.manifests[0].header
    }

    /// The number of the save.
    pub fn id(&self) -> u64 {
        self.manifests[0].id
    }

    /// Of the parts, in order.
    pub fn manifests(&self) -> &[Manifest] {
        &self.manifests
    }

    /// Whether the checkpoint holds this tensor in this role.
    pub fn contains(&self, name: &str, role: &str) -> bool {
        self.tensors.contains_key(&(role.to_owned(), name.to_owned()))
    }

    /// Reads every byte and compares it with its hash.
    pub fn verify(&self) -> Result<()> {
        self.files.iter().filter_map(|file| file.verified.as_ref()).try_for_each(|file| file.verify())
    }

    /// Fills `out` with the elements `range` of a tensor, bit for bit as they were saved, whichever parts they lie in. Just
    /// the blocks that hold them are read, and each is verified first.
    pub fn read(&self, name: &str, role: &str, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let pieces = self.tensors.get(&(role.to_owned(), name.to_owned())).ok_or_else(|| Error::NoState {
            path: self.path.clone(),
            tensor: name.to_owned(),
            role: role.to_owned(),
        })?;
        let elements = pieces.last().map_or(0, |piece| piece.range.end);
        if range.end as u64 > elements || range.end.checked_sub(range.start) != Some(out.len()) {
            let (path, tensor) = (self.path.clone(), name.to_owned());
            return Err(Error::Range { path, tensor, elements, range, buffer: out.len() });
        }
        let (start, end) = (range.start as u64, range.end as u64);
        let first = pieces.partition_point(|piece| piece.range.end <= start);
        for piece in pieces[first..].iter().take_while(|piece| piece.range.start < end) {
            let wanted = piece.range.start.max(start)..piece.range.end.min(end);
            let within = wanted.start - piece.range.start..wanted.end - piece.range.start;
            let room = &mut out[(wanted.start - start) as usize..(wanted.end - start) as usize];
            self.files[piece.file].tensors.read_f32_range(&piece.key, within, room)?;
        }
        Ok(())
    }
}

/// Whether every part's manifest is whole and every shard has its size: what can be known without opening a shard.
pub(super) fn is_complete(place: &dyn Place, parts: &[&Found]) -> bool {
    parts.iter().all(|part| {
        let has_size = |shard: &Shard| part.listed.files.get(&shard.file) == Some(&shard.bytes);
        read_manifest(place, part).is_ok_and(|manifest| manifest.shards.iter().all(has_size))
    })
}

fn damaged(path: &Path, reason: String) -> Error {
    Error::Damaged { path: path.to_owned(), reason }
}

fn read_manifest(place: &dyn Place, part: &Found) -> Result<Manifest> {
    let path = place.path(&part.listed.name).join(MANIFEST_FILE);
    let manifest =
        Manifest::decode(&path, place.read(&part.listed.name, MANIFEST_FILE, MANIFEST_BYTES_MAX)?)?;
    let wrong = |reason: String| Err(damaged(&path, reason));
    let expected = part.name;
    if manifest.header.step != expected.step {
        let step = manifest.header.step;
        return wrong(format!("the manifest is of step {step}, the folder of step {}", expected.step));
    }
    if manifest.name() != expected {
        return wrong(format!("the manifest is of {}, the folder of {expected}", manifest.name()));
    }
    for shard in &manifest.shards {
        if Path::new(&shard.file).file_name() != Some(shard.file.as_ref()) {
            return wrong(format!("the shard {:?} would lie outside the checkpoint", shard.file));
        }
        let blocks = match manifest.block_bytes {
            Some(bytes) if !(1..=BLOCK_BYTES_MAX).contains(&bytes) => {
                return wrong(format!("shards are not hashed in blocks of {bytes} bytes"));
            }
            Some(bytes) => shard.bytes.div_ceil(bytes),
            None => 1,
        };
        if blocks != shard.blocks.len() as u64 {
            return wrong(format!(
                "the shard {:?} has {} hashes, not {blocks}",
                shard.file,
                shard.blocks.len()
            ));
        }
    }
    Ok(manifest)
}

/// Opens a shard after checking its size and that it holds what the manifest says.
fn open_shard(
    place: &dyn Place,
    part: &str,
    shard: &Shard,
    block_bytes: Option<u64>,
    number: usize,
    last: &Arc<Mutex<LastBlock>>,
) -> Result<ShardFile> {
    let path = place.path(part).join(&shard.file);
    let (raw, bytes) = place.open(part, &shard.file)?;
    if bytes != shard.bytes {
        return Err(damaged(
            &path,
            format!("the shard has {bytes} bytes, the manifest says {}", shard.bytes),
        ));
    }
    let (source, verified): (Box<dyn Source>, _) = match block_bytes {
        Some(block_bytes) => {
            let (hashes, last) = (shard.blocks.clone(), last.clone());
            let verified =
                Arc::new(Verified { path: path.clone(), raw, bytes, block_bytes, hashes, number, last });
            (Box::new(verified.clone()), Some(verified))
        }
        None if hash(&*raw, bytes)? != shard.blocks[0] => {
            let reason = "the shard's bytes do not match their hash in the manifest";
            return Err(damaged(&path, reason.to_owned()));
        }
        None => (raw, None),
    };
    let tensors = TensorFile::from_source(&path, source, bytes)?;
    for entry in &shard.tensors {
        let held = tensors.tensors().get(entry.key());
        if !held.is_some_and(|info| {
            info.dtype == Dtype::F32 && Some(info.elements) == entry.end.checked_sub(entry.start)
        }) {
            let reason = format!("the shard does not hold the manifest's slice of {:?}", entry.name);
            return Err(damaged(&path, reason));
        }
    }
    Ok(ShardFile { tensors, verified })
}

/// Of a whole shard, as format 1 has it.
fn hash(raw: &dyn Source, bytes: u64) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    let mut chunk = vec![0; CHUNK_BYTES.min(bytes as usize)];
    while hasher.count() < bytes {
        let count = (bytes - hasher.count()).min(chunk.len() as u64) as usize;
        raw.read_at(hasher.count(), &mut chunk[..count])?;
        hasher.update(&chunk[..count]);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Finds every tensor's slices and checks that together they are the whole tensor, once.
fn index(folder: &Path, manifests: &[Manifest]) -> Result<BTreeMap<(String, String), Vec<Piece>>> {
    let mut found: BTreeMap<(String, String), (&TensorEntry, Vec<Piece>)> = BTreeMap::new();
    let shards = manifests.iter().flat_map(|manifest| &manifest.shards);
    for (file, shard) in shards.enumerate() {
        for entry in &shard.tensors {
            let piece = Piece { file, key: entry.key().to_owned(), range: entry.start..entry.end };
            let key = (entry.role.clone(), entry.name.clone());
            let (first, pieces) = found.entry(key).or_insert_with(|| (entry, Vec::new()));
            if first.shape != entry.shape {
                let reason = format!("{:?} ({}) is said to have two shapes", entry.name, entry.role);
                return Err(damaged(&folder.join(MANIFEST_FILE), reason));
            }
            pieces.push(piece);
        }
    }
    let mut tensors = BTreeMap::new();
    for (key, (entry, mut pieces)) in found {
        pieces.sort_by_key(|piece| (piece.range.start, piece.range.end));
        let end =
            pieces.iter().try_fold(0, |end, piece| (piece.range.start == end).then_some(piece.range.end));
        if end.is_none() || end != elements_of(&entry.shape) {
            let reason = format!("the slices of {:?} ({}) are not the whole tensor", entry.name, entry.role);
            return Err(damaged(&folder.join(MANIFEST_FILE), reason));
        }
        tensors.insert(key, pieces);
    }
    Ok(tensors)
}
