//! The cached token file: a header of 64 bytes, then the tokens, little-endian, in the narrowest unsigned
//! type that holds the tokenizer's ids.
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | `SHOALTOK` |
//! | 8..12 | version of the format |
//! | 12..16 | bytes a token: 1, 2 or 4 |
//! | 16..24 | tokens |
//! | 24..32 | documents |
//! | 32..64 | BLAKE3 of the tokens as 32-bit integers |
//!
//! It is written under another name and renamed when it is whole and on the disk.

use crate::error::{Error, Result};
use crate::files::{Integer, OpenFile};
use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

const MAGIC: [u8; 8] = *b"SHOALTOK";
const VERSION: u32 = 1;
pub(crate) const HEADER_BYTES: usize = 64;

/// Bytes gathered before they are written.
const BUFFER_BYTES: usize = 1 << 20;

/// What the header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub integer: Integer,
    pub tokens: u64,
    pub documents: u64,
    pub content: [u8; 32],
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.integer.width() as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.tokens.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.documents.to_le_bytes());
        bytes[32..64].copy_from_slice(&self.content);
        bytes
    }

    fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let four = |at: usize| bytes[at..].first_chunk().map(|four| u32::from_le_bytes(*four));
        let eight = |at: usize| bytes[at..].first_chunk().map(|eight| u64::from_le_bytes(*eight));
        if bytes[..8] != MAGIC || four(8)? != VERSION {
            return None;
        }
        Some(Self {
            integer: Integer::unsigned(four(12)?)?,
            tokens: eight(16)?,
            documents: eight(24)?,
            content: *bytes[32..].first_chunk()?,
        })
    }

    /// The file's length if it is whole.
    fn file_bytes(&self) -> Option<u64> {
        self.tokens.checked_mul(self.integer.width() as u64)?.checked_add(HEADER_BYTES as u64)
    }
}

/// Opens a token file; nothing if it is not whole, in which case it is to be made anew.
pub(crate) fn open(path: &Path) -> Result<Option<(OpenFile, Header)>> {
    if !path.try_exists().map_err(|cause| Error::io("look at", path, cause))? {
        return Ok(None);
    }
    let file = OpenFile::open(path)?;
    let length = file.len()?;
    if length < HEADER_BYTES as u64 {
        return Ok(None);
    }
    let mut bytes = [0; HEADER_BYTES];
    file.read_at(&mut bytes, 0)?;
    let header = Header::from_bytes(&bytes).filter(|header| header.file_bytes() == Some(length));
    Ok(header.map(|header| (file, header)))
}

/// A file that gets its name when it is complete and is removed if it never is.
pub(crate) struct PartFile {
    path: PathBuf,
    file: BufWriter<File>,
    complete: bool,
}

impl PartFile {
    pub fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).map_err(|cause| Error::io("create", path, cause))?;
        let file = BufWriter::with_capacity(BUFFER_BYTES, file);
        Ok(Self { path: path.into(), file, complete: false })
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|cause| Error::io("write", &self.path, cause))
    }

    /// Overwrites the first bytes.
    fn rewrite_start(&mut self, bytes: &[u8]) -> Result<()> {
        let start = self.file.seek(SeekFrom::Start(0));
        start.and_then(|_| self.file.write_all(bytes)).map_err(|cause| Error::io("write", &self.path, cause))
    }

    /// Makes sure that all is on the disk, then gives the file its name.
    pub fn rename(mut self, to: &Path) -> Result<()> {
        let flushed = self.file.flush().and_then(|()| self.file.get_ref().sync_all());
        flushed.map_err(|cause| Error::io("write", &self.path, cause))?;
        std::fs::rename(&self.path, to).map_err(|cause| Error::io("create", to, cause))?;
        self.complete = true;
        // The new name is on the disk when its folder is.
        let folder = to.parent().unwrap_or(Path::new("."));
        let synced = File::open(folder).and_then(|folder| folder.sync_all());
        synced.map_err(|cause| Error::io("write", folder, cause))
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        if !self.complete {
            // Whatever stopped the writing is the error to report; what is left here is overwritten next time.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Writes a token file.
pub(crate) struct TokenWriter {
    file: PartFile,
    integer: Integer,
    tokens: u64,
    hasher: blake3::Hasher,
    /// Kept between calls for its memory.
    scratch: Vec<u8>,
}

impl TokenWriter {
    /// Starts a file of `ids` different ids at `path`, which is not yet its final name.
    pub fn create(path: &Path, ids: usize) -> Result<Self> {
        let mut file = PartFile::create(path)?;
        file.write(&[0; HEADER_BYTES])?;
        let hasher = blake3::Hasher::new();
        Ok(Self { file, integer: Integer::narrowest(ids), tokens: 0, hasher, scratch: Vec::new() })
    }

    pub fn push(&mut self, ids: &[u32]) -> Result<()> {
        self.scratch.clear();
        Integer::U32.encode(ids, &mut self.scratch);
        self.hasher.update(&self.scratch);
        if self.integer != Integer::U32 {
            self.scratch.clear();
            self.integer.encode(ids, &mut self.scratch);
        }
        self.tokens += ids.len() as u64;
        self.file.write(&self.scratch)
    }

    /// Like [`Self::push`], for ids that are bytes.
    pub fn push_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        assert_eq!(self.integer, Integer::U8, "only the byte tokenizer's tokens are bytes");
        self.scratch.clear();
        self.scratch.extend(bytes.iter().flat_map(|&byte| u32::from(byte).to_le_bytes()));
        self.hasher.update(&self.scratch);
        self.tokens += bytes.len() as u64;
        self.file.write(bytes)
    }

    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Completes the header and gives the file its name.
    pub fn finish(mut self, documents: u64, name: &Path) -> Result<()> {
        let content = *self.hasher.finalize().as_bytes();
        let header = Header { integer: self.integer, tokens: self.tokens, documents, content };
        self.file.rewrite_start(&header.to_bytes())?;
        self.file.rename(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `/dev/full` takes no byte; it stands behind a link, since a file that is never complete is removed.
    #[test]
    fn a_full_disk_is_an_error_that_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens.part");
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        let mut writer = TokenWriter::create(&path, 256).unwrap();
        let error = (0..4).find_map(|_| writer.push_bytes(&[7; BUFFER_BYTES]).err()).expect("it was written");
        assert!(error.to_string().contains("cannot write"), "{error}");
        assert!(error.to_string().contains("tokens.part"), "{error}");
        assert!(error.hint().unwrap().contains("space"), "{error}");
        drop(writer);
        assert!(path.symlink_metadata().is_err(), "the half-made file is still there");
    }
}
