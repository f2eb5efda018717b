//! What a path in the job means: the kind of its files, which files they are, and what identifies them.

use crate::error::{Error, Result};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Folders within folders that are followed. Links may lead in circles; real data is never this deep.
const DEPTH_MAX: usize = 16;

/// How a file holds its data, by its ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Text,
    JsonLines,
    Parquet,
    /// Token ids, end to end.
    Tokens,
    Safetensors,
    /// Folders of pictures, each a class. No file alone is of this kind.
    Pictures,
}

impl Kind {
    fn of(path: &Path) -> Option<Self> {
        let ending = path.extension()?.to_str()?.to_ascii_lowercase();
        match ending.as_str() {
            "txt" => Some(Self::Text),
            "jsonl" => Some(Self::JsonLines),
            "parquet" => Some(Self::Parquet),
            "bin" => Some(Self::Tokens),
            "safetensors" => Some(Self::Safetensors),
            _ => None,
        }
    }
}

/// One file of a source, as it was when the source was looked at.
#[derive(Debug)]
pub(crate) struct SourceFile {
    pub path: PathBuf,
    pub bytes: u64,
    /// Seconds and nanoseconds of the last change.
    modified: (i64, i64),
}

impl SourceFile {
    pub fn look_at(path: PathBuf) -> Result<Self> {
        let metadata = std::fs::metadata(&path).map_err(|cause| Error::io("look at", &path, cause))?;
        Ok(Self { bytes: metadata.len(), modified: (metadata.mtime(), metadata.mtime_nsec()), path })
    }
}

/// The files of a dataset: all of one kind, in the order of their paths.
#[derive(Debug)]
pub(crate) struct Source {
    /// The path as the job gives it: what errors about the whole are about.
    pub path: PathBuf,
    pub kind: Kind,
    pub files: Vec<SourceFile>,
}

impl Source {
    /// Finds the files of `path`: itself, or everything of one kind in the folder that it is.
    pub fn find(path: &Path) -> Result<Self> {
        if let Some(url) = path.to_str().filter(|path| is_url(path)) {
            return Err(Error::ObjectStore { url: url.into() });
        }
        let metadata = std::fs::metadata(path).map_err(|cause| match cause.kind() {
            io::ErrorKind::NotFound => Error::Missing { path: path.into() },
            _ => Error::io("look at", path, cause),
        })?;
        if !metadata.is_dir() {
            let kind = Kind::of(path).ok_or_else(|| Error::UnknownKind { path: path.into() })?;
            let files = vec![SourceFile::look_at(path.into())?];
            return Ok(Self { path: path.into(), kind, files });
        }

        let mut paths = Vec::new();
        collect(path, 0, &mut paths)?;
        paths.sort();
        let first = paths.first().ok_or_else(|| Error::NoFiles { folder: path.into() })?;
        if let Some(other) = paths.iter().find(|other| Kind::of(other) != Kind::of(first)) {
            let (first, second) = (first.clone(), other.clone());
            return Err(Error::MixedKinds { folder: path.into(), first, second });
        }
        let kind = Kind::of(first).ok_or_else(|| Error::UnknownKind { path: first.clone() })?;
        let files = paths.into_iter().map(SourceFile::look_at).collect::<Result<_>>()?;
        Ok(Self { path: path.into(), kind, files })
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// A name for what is made from these files by `recipe`: another one when a file is added, moved,
    /// resized or touched, or when the recipe differs.
    pub fn key(&self, recipe: &[&str]) -> Result<String> {
        let mut hasher = blake3::Hasher::new();
        // Every part is preceded by its length, so that no two lists of parts run into the same bytes.
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        recipe.iter().for_each(|word| part(word.as_bytes()));
        for file in &self.files {
            let whole = std::path::absolute(&file.path);
            let whole = whole.map_err(|cause| Error::io("look at", &file.path, cause))?;
            part(whole.as_os_str().as_encoded_bytes());
            part(&file.bytes.to_le_bytes());
            part(&file.modified.0.to_le_bytes());
            part(&file.modified.1.to_le_bytes());
        }
        Ok(hasher.finalize().to_hex()[..32].to_string())
    }

    /// Refuses what was made from these files if one of them changed meanwhile.
    pub fn require_unchanged(&self) -> Result<()> {
        for before in &self.files {
            let now = SourceFile::look_at(before.path.clone())?;
            if (now.bytes, now.modified) != (before.bytes, before.modified) {
                return Err(Error::Changed { path: now.path });
            }
        }
        Ok(())
    }
}

/// Whether `path` is an address with a scheme, such as `s3://bucket/folder`.
fn is_url(path: &str) -> bool {
    path.split_once("://").is_some_and(|(scheme, _)| {
        !scheme.is_empty() && scheme.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '+')
    })
}

/// Gathers the files of a known kind under `folder`. Others are passed over: folders of data come with a
/// README, a licence, the JSON beside a `.bin`.
fn collect(folder: &Path, depth: usize, paths: &mut Vec<PathBuf>) -> Result<()> {
    if depth > DEPTH_MAX {
        return Err(Error::TooDeep { folder: folder.into(), depth_max: DEPTH_MAX });
    }
    let entries = std::fs::read_dir(folder).map_err(|cause| Error::io("list", folder, cause))?;
    for entry in entries {
        let entry = entry.map_err(|cause| Error::io("list", folder, cause))?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let path = entry.path();
        let metadata = std::fs::metadata(&path).map_err(|cause| Error::io("look at", &path, cause))?;
        if metadata.is_dir() {
            collect(&path, depth + 1, paths)?;
        } else if Kind::of(&path).is_some() {
            paths.push(path);
        }
    }
    Ok(())
}
