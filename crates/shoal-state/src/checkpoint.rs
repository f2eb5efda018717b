//! Checkpoints: the state of a run at a step, complete or absent.
//!
//! A run's folder of checkpoints looks like this:
//!
//! ```text
//! step-00000100/manifest.json                  what is here, with the hash of every shard and its own
//! step-00000100/parameter-00001.safetensors    one role per shard, so that tools can open the weights alone
//! step-00000100/first_moment-00001.safetensors
//! step-00000200.partial/                       a save that was interrupted; the next opening removes it
//! step-00000300.replaced/                      the older of two saves of one step, while the newer moves in
//! ```
//!
//! A save works in `.partial`, flushes every shard, writes the manifest last and then renames the folder:
//! the name `step-N` is given only to what is whole and on the disk. Saving a step that exists replaces it,
//! whatever it holds: the trainer that saves it again has the state it wants kept, and the old one may be
//! the corrupt one it just recovered from. Removal renames to `.partial` first, so that what is half gone is
//! never taken for a checkpoint. Nothing in a manifest depends on time or place: the same state gives the
//! same bytes.

mod load;
mod manifest;
mod save;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use load::Checkpoint;
pub use manifest::{FORMAT, Manifest, Shard, TensorEntry};
pub use save::{Entry, Header, Saved};

use crate::disk::{self, Disk, RealDisk, Writing};
use crate::error::{Error, Result};

/// Data bytes of one shard file; a larger tensor is split over several.
pub const SHARD_BYTES_MAX: u64 = 1 << 30;

const MANIFEST_FILE: &str = "manifest.json";
const PARTIAL: &str = ".partial";
const REPLACED: &str = ".replaced";

/// A checkpoint that [`Store::latest`] passed over, and why.
#[derive(Debug)]
pub struct Skipped {
    pub step: u64,
    pub reason: Error,
}

impl fmt::Display for Skipped {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "checkpoint of step {} skipped: {}", self.step, self.reason)
    }
}

/// The folder of one run's checkpoints. One process at a time may save into it; any number may read.
#[derive(Debug)]
pub struct Store {
    root: PathBuf,
    disk: Arc<dyn Disk>,
    shard_bytes_max: u64,
}

impl Store {
    /// Opens the folder to save into it: creates it if need be, and tidies what an interrupted save,
    /// replacement or removal left behind.
    pub fn open(root: &Path) -> Result<Store> {
        Store::open_on(root, Arc::new(RealDisk))
    }

    /// Opens an existing folder to read from it, perhaps while a run saves into it: changes nothing.
    pub fn open_existing(root: &Path) -> Result<Store> {
        fs::read_dir(root).map_err(Error::io("list", root))?;
        Ok(Store { root: root.to_owned(), disk: Arc::new(RealDisk), shard_bytes_max: SHARD_BYTES_MAX })
    }

    pub(crate) fn open_on(root: &Path, disk: Arc<dyn Disk>) -> Result<Store> {
        let store = Store { root: root.to_owned(), disk, shard_bytes_max: SHARD_BYTES_MAX };
        if !disk::exists(root)? {
            fs::create_dir_all(root).map_err(Error::io("create the folder", root))?;
            store.writing(0).sync_dir(disk::parent_of(root))?;
        }
        store.tidy()?;
        Ok(store)
    }

    /// Bounds the data bytes of one shard file; at least one element goes into each.
    pub fn with_shard_bytes_max(mut self, bytes: u64) -> Store {
        self.shard_bytes_max = bytes;
        self
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The steps of the checkpoints that are complete, ascending: their manifest is whole and every shard
    /// has its size. Hashes are checked when one is loaded.
    pub fn list(&self) -> Result<Vec<u64>> {
        let folders = self.folders()?;
        Ok(folders
            .into_iter()
            .filter(|(step, path)| load::is_complete(path, *step))
            .map(|(step, _)| step)
            .collect())
    }

    /// The newest checkpoint whose manifest and every shard verify, with those passed over on the way to
    /// it. `None` only when there is no checkpoint at all: if there are some and none can be used, that is
    /// an error, for a run must not start anew because its state went bad. So is a newer format.
    pub fn latest(&self) -> Result<Option<(Checkpoint, Vec<Skipped>)>> {
        let mut skipped = Vec::new();
        for (step, path) in self.folders()?.into_iter().rev() {
            match Checkpoint::open(&path, step) {
                Ok(checkpoint) => return Ok(Some((checkpoint, skipped))),
                Err(error @ Error::Format { .. }) => return Err(error),
                Err(reason) => skipped.push(Skipped { step, reason }),
            }
        }
        if skipped.is_empty() { Ok(None) } else { Err(Error::NoneValid { root: self.root.clone(), skipped }) }
    }

    /// The checkpoint of one step, verified.
    pub fn load(&self, step: u64) -> Result<Checkpoint> {
        let folders = self.folders()?;
        match folders.get(&step) {
            Some(path) => Checkpoint::open(path, step),
            None => {
                let available = folders.into_keys().collect();
                Err(Error::NoCheckpoint { root: self.root.clone(), step, available })
            }
        }
    }

    /// Removes every checkpoint older than the newest `keep` complete ones and returns their steps. The
    /// newest is kept whatever `keep` says. Incomplete ones do not count as kept, and those newer than the
    /// kept ones stay, for someone to look at.
    pub fn collect(&self, keep: usize) -> Result<Vec<u64>> {
        let complete = self.list()?;
        let kept = &complete[complete.len().saturating_sub(keep.max(1))..];
        let Some(&oldest_kept) = kept.first() else { return Ok(Vec::new()) };
        let mut removed = Vec::new();
        for (step, path) in self.folders()?.range(..oldest_kept) {
            let doomed = self.folder(*step, PARTIAL);
            self.writing(0).remove_tree(&doomed)?;
            self.writing(0).rename(path, &doomed)?;
            self.writing(0).remove_tree(&doomed)?;
            removed.push(*step);
        }
        Ok(removed)
    }

    fn writing(&self, needed_bytes: u64) -> Writing<'_> {
        Writing { disk: &*self.disk, needed_bytes }
    }

    /// Removes half-made and half-removed folders, and ends half-done replacements.
    fn tidy(&self) -> Result<()> {
        for step in self.steps_with(PARTIAL)? {
            self.writing(0).remove_tree(&self.folder(step, PARTIAL))?;
        }
        for step in self.steps_with(REPLACED)? {
            self.writing(0).undo_half_replacement(&self.folder(step, ""), &self.folder(step, REPLACED))?;
        }
        Ok(())
    }

    fn folder(&self, step: u64, suffix: &str) -> PathBuf {
        self.root.join(format!("step-{step:08}{suffix}"))
    }

    /// Every checkpoint's folder, good or bad. A replacement interrupted before the new one moved in leaves
    /// the old one under its other name, which is read as well: only [`Store::open`] may repair it.
    fn folders(&self) -> Result<BTreeMap<u64, PathBuf>> {
        let set_aside =
            self.steps_with(REPLACED)?.into_iter().map(|step| (step, self.folder(step, REPLACED)));
        let in_place = self.steps_with("")?.into_iter().map(|step| (step, self.folder(step, "")));
        Ok(set_aside.chain(in_place).collect())
    }

    /// The steps of the folders named `step-N` followed by `suffix`. Other names are none of ours.
    fn steps_with(&self, suffix: &str) -> Result<BTreeSet<u64>> {
        let mut steps = BTreeSet::new();
        for path in disk::entries(&self.root)? {
            let name = path.file_name().and_then(|name| name.to_str());
            let digits = name.and_then(|name| name.strip_prefix("step-")?.strip_suffix(suffix));
            let Some(step) = digits.and_then(|digits| digits.parse().ok()) else { continue };
            if self.folder(step, suffix) == path && path.is_dir() {
                steps.insert(step);
            }
        }
        Ok(steps)
    }
}
