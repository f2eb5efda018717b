//! Loading: a checkpoint is verified, every byte of it, before any of it is handed out. The files stay
//! open from the check to the last read, so what is read is what was checked, even if the run that owns the
//! folder removes it meanwhile.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::MANIFEST_FILE;
use super::manifest::{Manifest, Shard, TensorEntry};
use crate::disk;
use crate::error::{Error, Result};
use crate::tensors::{Dtype, TensorFile, elements_of};

/// A verified checkpoint, open for reading.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    files: Vec<TensorFile>,
    /// Where each tensor's slices are, by role and name, in element order and without gaps.
    slices: BTreeMap<(String, String), Vec<Slice>>,
}

#[derive(Debug, Clone, Copy)]
struct Slice {
    file: usize,
    start: u64,
    end: u64,
}

impl Checkpoint {
    pub(super) fn open(path: &Path, step: u64) -> Result<Checkpoint> {
        let manifest = read_manifest(path, step)?;
        let mut files = Vec::with_capacity(manifest.shards.len());
        for shard in &manifest.shards {
            files.push(open_shard(path, shard)?);
        }
        let slices = index(path, &manifest)?;
        Ok(Checkpoint { path: path.to_owned(), manifest, files, slices })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Whether the checkpoint holds this tensor in this role.
    pub fn contains(&self, name: &str, role: &str) -> bool {
        self.slices.contains_key(&(role.to_owned(), name.to_owned()))
    }

    /// Fills `out` with the whole tensor, bit for bit as it was saved. `out` must have its size.
    pub fn read(&self, name: &str, role: &str, out: &mut [f32]) -> Result<()> {
        let slices = self.slices.get(&(role.to_owned(), name.to_owned())).ok_or_else(|| Error::NoState {
            path: self.path.clone(),
            tensor: name.to_owned(),
            role: role.to_owned(),
        })?;
        let elements = slices.last().map_or(0, |slice| slice.end);
        if elements != out.len() as u64 {
            let (path, tensor) = (self.path.clone(), name.to_owned());
            return Err(Error::Buffer { path, tensor, elements, buffer: out.len() });
        }
        for slice in slices {
            // In range: slices are contiguous and the last one ends at `out`'s length.
            self.files[slice.file].read_f32(name, &mut out[slice.start as usize..slice.end as usize])?;
        }
        Ok(())
    }
}

/// Whether the manifest is whole and every shard has its size: what can be known without reading it all.
pub(super) fn is_complete(folder: &Path, step: u64) -> bool {
    let has_size = |shard: &Shard| {
        fs::metadata(folder.join(&shard.file)).is_ok_and(|file| file.is_file() && file.len() == shard.bytes)
    };
    read_manifest(folder, step).is_ok_and(|manifest| manifest.shards.iter().all(has_size))
}

fn damaged(path: &Path, reason: String) -> Error {
    Error::Damaged { path: path.to_owned(), reason }
}

fn read_manifest(folder: &Path, step: u64) -> Result<Manifest> {
    let path = folder.join(MANIFEST_FILE);
    let manifest = Manifest::read(&path)?;
    if manifest.step != step {
        return Err(damaged(
            &path,
            format!("the manifest is of step {}, the folder of step {step}", manifest.step),
        ));
    }
    for shard in &manifest.shards {
        if Path::new(&shard.file).file_name() != Some(shard.file.as_ref()) {
            return Err(damaged(
                &path,
                format!("the shard {:?} would lie outside the checkpoint", shard.file),
            ));
        }
    }
    Ok(manifest)
}

/// Opens a shard after checking its size, its hash and that it holds what the manifest says.
fn open_shard(folder: &Path, shard: &Shard) -> Result<TensorFile> {
    let path = folder.join(&shard.file);
    let (file, bytes) = disk::open_regular(&path)?;
    if bytes != shard.bytes {
        return Err(damaged(
            &path,
            format!("the shard has {bytes} bytes, the manifest says {}", shard.bytes),
        ));
    }
    if hash(&path, &file)? != shard.blake3 {
        return Err(damaged(&path, "the shard's bytes do not match their hash in the manifest".to_owned()));
    }
    let tensors = TensorFile::from_open(&path, file, bytes)?;
    for entry in &shard.tensors {
        let held = tensors.tensors().get(&entry.name);
        if !held.is_some_and(|info| {
            info.dtype == Dtype::F32 && Some(info.elements) == entry.end.checked_sub(entry.start)
        }) {
            return Err(damaged(
                &path,
                format!("the shard does not hold the manifest's slice of {:?}", entry.name),
            ));
        }
    }
    Ok(tensors)
}

fn hash(path: &Path, file: &File) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(file).map_err(Error::io("read", path))?;
    Ok(hasher.finalize().to_hex().to_string())
}

/// Finds every tensor's slices and checks that together they are the whole tensor, once.
fn index(folder: &Path, manifest: &Manifest) -> Result<BTreeMap<(String, String), Vec<Slice>>> {
    let mut found: BTreeMap<(String, String), (&TensorEntry, Vec<Slice>)> = BTreeMap::new();
    for (file, shard) in manifest.shards.iter().enumerate() {
        for entry in &shard.tensors {
            let key = (entry.role.clone(), entry.name.clone());
            let slice = Slice { file, start: entry.start, end: entry.end };
            found.entry(key).or_insert_with(|| (entry, Vec::new())).1.push(slice);
        }
    }
    let mut slices = BTreeMap::new();
    for (key, (entry, mut pieces)) in found {
        pieces.sort_by_key(|piece| (piece.start, piece.end));
        let end = pieces.iter().try_fold(0, |end, piece| (piece.start == end).then_some(piece.end));
        if end.is_none() || end != elements_of(&entry.shape) {
            let reason = format!("the slices of {:?} ({}) are not the whole tensor", entry.name, entry.role);
            return Err(damaged(&folder.join(MANIFEST_FILE), reason));
        }
        slices.insert(key, pieces);
    }
    Ok(slices)
}
