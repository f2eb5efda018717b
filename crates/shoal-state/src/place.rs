//! Where the parts of checkpoints lie: a folder, or an object store. A place knows files and which parts are finished;
//! what the files mean is the checkpoint's affair. Places differ in how a part comes into being (a folder takes its name, a
//! manifest is put last) and agree in what that means: a finished part is whole and stays as it is until it is removed.

mod folder;
mod location;
#[cfg(feature = "object-store")]
mod objects;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

pub(crate) use folder::{Folder, OpenFile};
pub use location::Location;
#[cfg(feature = "object-store")]
pub(crate) use objects::Objects;

use crate::error::Result;

/// The file that says what a part holds. It is written last.
pub(crate) const MANIFEST_FILE: &str = "manifest.json";

/// What is not finished yet, or half removed, has a name that ends in this, where names can be changed.
pub(crate) const PARTIAL: &str = ".partial";

/// What lies at a place under one name.
#[derive(Debug)]
pub(crate) struct Listed {
    pub(crate) name: String,
    pub(crate) finished: bool,
    /// Its files and their bytes.
    pub(crate) files: BTreeMap<String, u64>,
}

pub(crate) trait Place: fmt::Debug + Send + Sync {
    /// How messages name it.
    fn root(&self) -> &Path;

    fn path(&self, part: &str) -> PathBuf {
        self.root().join(part)
    }

    /// Everything that may be a part, finished or not, in the order of names.
    fn list(&self) -> Result<Vec<Listed>>;

    /// Begins a part that will have so many bytes in all. What is left of an unfinished one of that name is removed.
    fn begin<'a>(&'a self, part: &str, bytes: u64) -> Result<Box<dyn Unfinished + 'a>>;

    /// Removes a part, finished or not. At every moment before the end it is whole, or unfinished.
    fn remove(&self, part: &Listed) -> Result<()>;

    /// The whole of a small file; `Ok(None)` when it has more than `bytes_max`.
    fn read(&self, part: &str, file: &str, bytes_max: u64) -> Result<Option<Vec<u8>>>;

    /// A file to be read at any place of it, and its bytes.
    fn open(&self, part: &str, file: &str) -> Result<(Box<dyn Source>, u64)>;

    /// Ends what was interrupted. Only for who knows that nobody writes here meanwhile.
    fn tidy(&self) -> Result<()>;

    /// Whether all of a checkpoint is read once before any of it is used: there and back again is cheap here.
    fn is_near(&self) -> bool;
}

/// A part that is being written. If it is dropped before it is finished, the place takes back what it can.
pub(crate) trait Unfinished {
    fn create<'a>(&'a mut self, file: &str) -> Result<Box<dyn Output + 'a>>;

    /// Writes the manifest and makes the part a finished one, durably.
    fn finish(self: Box<Self>, manifest: &[u8]) -> Result<()>;
}

/// A file that is being written.
pub(crate) trait Output {
    fn write(&mut self, bytes: &[u8]) -> Result<()>;

    /// Returns when the file is where a power cut does not reach it.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// Bytes that can be read at any place. Reads do not share a cursor, so several threads may read at once.
pub(crate) trait Source: fmt::Debug + Send + Sync {
    fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<()>;
}
