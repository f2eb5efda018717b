//! Files that stay open, read at positions; and the integers stored in them.

use crate::error::{Error, Result};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes read at once by the passes that go through a whole file.
pub(crate) const BLOCK_BYTES: usize = 1 << 20;

/// A file that is kept open and read at positions, by any number of threads at a time.
#[derive(Debug)]
pub(crate) struct OpenFile {
    pub path: PathBuf,
    file: File,
}

impl OpenFile {
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|cause| Error::io("open", path, cause))?;
        Ok(Self { path: path.to_path_buf(), file })
    }

    /// The file's length in bytes, now.
    pub fn len(&self) -> Result<u64> {
        let metadata = self.file.metadata().map_err(|cause| Error::io("look at", &self.path, cause))?;
        Ok(metadata.len())
    }

    /// Fills `bytes` from `offset` on. The caller knows from the file's length that they are there, so an
    /// early end means that the file shrank since.
    pub fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<()> {
        self.file.read_exact_at(bytes, offset).map_err(|cause| match cause.kind() {
            io::ErrorKind::UnexpectedEof => Error::Shrank { path: self.path.clone() },
            _ => Error::io("read", &self.path, cause),
        })
    }
}

/// The little-endian integer types that tokens are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Integer {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    U64,
    I64,
}

impl Integer {
    /// Bytes of one.
    pub fn width(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 => 4,
            Self::U64 | Self::I64 => 8,
        }
    }

    /// The unsigned type of that width, if tokens are written in it.
    pub fn unsigned(width: u32) -> Option<Self> {
        match width {
            1 => Some(Self::U8),
            2 => Some(Self::U16),
            4 => Some(Self::U32),
            _ => None,
        }
    }

    /// The narrowest type that `ids` different token ids fit in.
    pub fn narrowest(ids: usize) -> Self {
        match ids {
            0..=0x100 => Self::U8,
            0x101..=0x1_0000 => Self::U16,
            _ => Self::U32,
        }
    }

    /// Appends the integers in `bytes` to `ids`. A U64 beyond i64 becomes the largest i64: no vocabulary
    /// reaches either.
    pub fn decode(self, bytes: &[u8], ids: &mut Vec<i64>) {
        match self {
            Self::U8 => ids.extend(bytes.iter().map(|&byte| i64::from(byte))),
            Self::I8 => ids.extend(bytes.iter().map(|&byte| i64::from(byte.cast_signed()))),
            Self::U16 => ids.extend(words(bytes).map(|word| i64::from(u16::from_le_bytes(word)))),
            Self::I16 => ids.extend(words(bytes).map(|word| i64::from(i16::from_le_bytes(word)))),
            Self::U32 => ids.extend(words(bytes).map(|word| i64::from(u32::from_le_bytes(word)))),
            Self::I32 => ids.extend(words(bytes).map(|word| i64::from(i32::from_le_bytes(word)))),
            Self::U64 => ids
                .extend(words(bytes).map(|word| i64::try_from(u64::from_le_bytes(word)).unwrap_or(i64::MAX))),
            Self::I64 => ids.extend(words(bytes).map(i64::from_le_bytes)),
        }
    }

    /// Appends `ids`, each of which fits, to `bytes` as they are stored.
    pub fn encode(self, ids: &[u32], bytes: &mut Vec<u8>) {
        match self {
            Self::U8 => bytes.extend(ids.iter().map(|&id| id as u8)),
            Self::U16 => bytes.extend(ids.iter().flat_map(|&id| (id as u16).to_le_bytes())),
            _ => bytes.extend(ids.iter().flat_map(|&id| id.to_le_bytes())),
        }
    }
}

/// `bytes` in pieces of `WIDTH`.
fn words<const WIDTH: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; WIDTH]> {
    bytes.as_chunks::<WIDTH>().0.iter().copied()
}
