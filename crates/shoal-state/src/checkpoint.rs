//! Checkpoints: the state of a run at a step, complete or absent.
//!
//! A checkpoint is one part or several, written by as many writers that know nothing of each other, each with the slices
//! it holds. One process alone writes one part. A run's folder of checkpoints looks like this:
//!
//! ```text
//! step-00000100-save-4-part-1-of-2/manifest.json                  what is here, with the hashes of its shards and its own
//! step-00000100-save-4-part-1-of-2/parameter-00001.safetensors    one role per shard, so that tools can open the weights alone
//! step-00000100-save-4-part-1-of-2/first_moment-00001.safetensors
//! step-00000100-save-4-part-2-of-2/…
//! step-00000200-save-5-part-1-of-2.partial/                       a part that is being written, or was interrupted
//! step-00000050/                                                  a whole checkpoint, as versions before parts wrote it
//! ```
//!
//! A part gets its name when it is whole and on the disk (how, is its [place](crate::place)'s affair), and is never
//! written again. A checkpoint is complete when all its parts are there; until then it is absent, and nobody has to say
//! which of the two it is. The number of the save is in every name, so two attempts at one step never mix; the later one
//! counts. Nothing in a manifest depends on time or place: the same state gives the same bytes.

mod blocks;
#[cfg(test)]
mod crashes;
mod load;
mod manifest;
mod name;
mod pack;
#[cfg(test)]
mod tests;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

pub use load::Checkpoint;
pub use manifest::{FORMAT, Header, Manifest, Shard, TensorEntry};
pub(crate) use name::REPLACED;
pub use pack::Slice;
pub use write::{Entry, PartWriter, Saved};

use crate::disk::{Disk, RealDisk};
use crate::error::{Error, Result};
pub use crate::place::Location;
use crate::place::{Folder, Listed, Place};
use name::PartName;

/// Data bytes of one shard file; a larger tensor is split over several.
pub const SHARD_BYTES_MAX: u64 = 1 << 30;

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

/// Where one run's checkpoints lie. Any number may write parts into it and read from it at once; one decides which saves
/// there are, and removes what is not needed any more.
#[derive(Debug, Clone)]
pub struct Store {
    place: Arc<dyn Place>,
    shard_bytes_max: u64,
    block_bytes: u64,
}

/// Something there that has a part's name.
#[derive(Debug)]
struct Found {
    name: PartName,
    listed: Listed,
}

impl Store {
    /// Opens the folder for the one who decides about its saves, while nobody writes there: creates it if need be, and
    /// removes what interrupted saves and removals left behind.
    pub fn open(root: &Path) -> Result<Store> {
        Store::open_on(root, Arc::new(RealDisk))
    }

    /// Opens an existing folder to read from it or to write parts, perhaps while others do: changes nothing.
    pub fn open_existing(root: &Path) -> Result<Store> {
        Ok(Store::at(Arc::new(Folder::existing(root, Arc::new(RealDisk))?)))
    }

    /// [`Store::open`], wherever it lies.
    pub fn open_at(location: &Location) -> Result<Store> {
        match location {
            Location::Folder(root) => Store::open(root),
            Location::Objects { url, options } => {
                let store = Store::of_objects(url, options)?;
                store.tidy()?;
                Ok(store)
            }
        }
    }

    /// [`Store::open_existing`], wherever it lies.
    pub fn open_existing_at(location: &Location) -> Result<Store> {
        match location {
            Location::Folder(root) => Store::open_existing(root),
            Location::Objects { url, options } => Store::of_objects(url, options),
        }
    }

    #[cfg(feature = "object-store")]
    fn of_objects(url: &str, options: &BTreeMap<String, String>) -> Result<Store> {
        Ok(Store::at(Arc::new(crate::place::Objects::open(url, options)?)))
    }

    #[cfg(not(feature = "object-store"))]
    fn of_objects(url: &str, _options: &BTreeMap<String, String>) -> Result<Store> {
        Err(Error::NoObjects { url: url.to_owned() })
    }

    pub(crate) fn open_on(root: &Path, disk: Arc<dyn Disk>) -> Result<Store> {
        let store = Store::at(Arc::new(Folder::make(root, disk)?));
        store.tidy()?;
        Ok(store)
    }

    fn at(place: Arc<dyn Place>) -> Store {
        Store { place, shard_bytes_max: SHARD_BYTES_MAX, block_bytes: blocks::BLOCK_BYTES }
    }

    /// Bounds the data bytes of one shard file; at least one element goes into each.
    pub fn with_shard_bytes_max(mut self, bytes: u64) -> Store {
        self.shard_bytes_max = bytes;
        self
    }

    #[cfg(test)]
    pub(crate) fn with_block_bytes(mut self, bytes: u64) -> Store {
        self.block_bytes = bytes;
        self
    }

    pub fn root(&self) -> &Path {
        self.place.root()
    }

    /// A number for a save that no save of this step has, finished or not. It counts from 1 at every step, so a run that
    /// was interrupted writes the same bytes as one that was not. Someone who gives out numbers otherwise is free to.
    pub fn next_id(&self, step: u64) -> Result<u64> {
        let parts = self.parts()?;
        let of_step = parts.iter().filter(|found| found.name.step == step);
        Ok(of_step.map(|found| found.name.id).max().unwrap_or(name::FORMAT_1_ID) + 1)
    }

    /// The steps of the checkpoints that are complete, ascending: all parts are there, their manifests are whole
    /// and every shard has its size. Hashes are checked when one is loaded.
    pub fn list(&self) -> Result<Vec<u64>> {
        let steps: BTreeSet<u64> = self.complete()?.into_iter().map(|(step, _)| step).collect();
        Ok(steps.into_iter().collect())
    }

    /// The newest checkpoint that is complete and sound, with those passed over on the way to it. In a folder every byte
    /// of it is verified; in an object store all but the shards' content, which is when it is read. `None` only when
    /// there is no checkpoint at all: if there are some and none can be used, that is an error, for a run must not start
    /// anew because its state went bad. So is a newer format.
    pub fn latest(&self) -> Result<Option<(Checkpoint, Vec<Skipped>)>> {
        let mut skipped = Vec::new();
        let found = self.parts()?;
        for ((step, _), parts) in whole(&found).into_iter().rev() {
            let opened = Checkpoint::open(&*self.place, &parts).and_then(|checkpoint| {
                if self.place.is_near() {
                    checkpoint.verify()?;
                }
                Ok(checkpoint)
            });
            match opened {
                Ok(checkpoint) => return Ok(Some((checkpoint, skipped))),
                Err(error @ Error::Format { .. }) => return Err(error),
                Err(reason) => skipped.push(Skipped { step, reason }),
            }
        }
        let root = self.root().to_owned();
        if skipped.is_empty() { Ok(None) } else { Err(Error::NoneValid { root, skipped }) }
    }

    /// The last checkpoint that was saved of a step. Its content is verified as it is read.
    pub fn load(&self, step: u64) -> Result<Checkpoint> {
        let found = self.parts()?;
        let whole = whole(&found);
        match whole.range((step, 0)..=(step, u64::MAX)).next_back() {
            Some((_, parts)) => Checkpoint::open(&*self.place, parts),
            None => Err(self.absent(step, &whole)),
        }
    }

    /// The checkpoint of a step that a save made. Its content is verified as it is read.
    pub fn load_save(&self, step: u64, id: u64) -> Result<Checkpoint> {
        let found = self.parts()?;
        let whole = whole(&found);
        match whole.get(&(step, id)) {
            Some(parts) => Checkpoint::open(&*self.place, parts),
            None => Err(self.absent(step, &whole)),
        }
    }

    /// Removes every checkpoint older than the newest `keep` complete ones, complete or not, and of those of one step
    /// all before the last that is complete; returns the steps that are gone. The newest is kept whatever `keep`
    /// says. Incomplete ones do not count as kept, and those newer than the kept ones stay, for someone to look at.
    pub fn collect(&self, keep: usize) -> Result<Vec<u64>> {
        // The last save of each step.
        let complete: BTreeMap<u64, u64> = self.complete()?.into_iter().collect();
        let Some(&oldest_kept) = complete.keys().rev().take(keep.max(1)).next_back() else {
            return Ok(Vec::new());
        };
        let is_old = |name: PartName| {
            name.step < oldest_kept || complete.get(&name.step).is_some_and(|last| name.id < *last)
        };
        let mut steps = self.remove_where(is_old)?;
        steps.retain(|step| *step < oldest_kept);
        Ok(steps.into_iter().collect())
    }

    /// Removes everything that belongs to other saves than are spared, complete or not.
    pub fn keep_only(&self, spares: impl Fn(u64) -> bool) -> Result<()> {
        self.remove_where(|name| !spares(name.id)).map(drop)
    }

    /// Removes the parts that are so called and returns their steps, where any of them was finished.
    fn remove_where(&self, doomed: impl Fn(PartName) -> bool) -> Result<BTreeSet<u64>> {
        let mut steps = BTreeSet::new();
        for found in self.parts()?.iter().filter(|found| doomed(found.name)) {
            self.place.remove(&found.listed)?;
            if found.listed.finished {
                steps.insert(found.name.step);
            }
        }
        Ok(steps)
    }

    fn absent(&self, step: u64, whole: &BTreeMap<(u64, u64), Vec<&Found>>) -> Error {
        let available: BTreeSet<u64> = whole.keys().map(|(step, _)| *step).collect();
        Error::NoCheckpoint { root: self.root().to_owned(), step, available: available.into_iter().collect() }
    }

    /// Removes what is half made or half removed, and ends what earlier versions left half done.
    fn tidy(&self) -> Result<()> {
        for found in self.parts()?.iter().filter(|found| !found.listed.finished) {
            self.place.remove(&found.listed)?;
        }
        self.place.tidy()
    }

    /// Everything there with a part's name, good or bad. Other names are none of ours. A folder that a save of format 1
    /// set aside counts where the one that was to replace it did not get its name.
    fn parts(&self) -> Result<Vec<Found>> {
        let listed = self.place.list()?;
        let names: BTreeSet<String> = listed.iter().map(|listed| listed.name.clone()).collect();
        let format_1 = |name: &str| match name.strip_suffix(REPLACED) {
            Some(replaced) if names.contains(replaced) => None,
            Some(replaced) => PartName::parse_format_1(replaced),
            None => PartName::parse_format_1(name),
        };
        let named = |listed: Listed| {
            let name = PartName::parse(&listed.name).or_else(|| format_1(&listed.name))?;
            Some(Found { name, listed })
        };
        Ok(listed.into_iter().filter_map(named).collect())
    }

    /// Step and number of the saves that are complete, ascending.
    fn complete(&self) -> Result<Vec<(u64, u64)>> {
        let found = self.parts()?;
        let whole = whole(&found).into_iter();
        Ok(whole.filter(|(_, parts)| load::is_complete(&*self.place, parts)).map(|(save, _)| save).collect())
    }
}

/// The saves of which all parts are finished, by step and number, each with its parts in order. If somebody gave one
/// number to two saves that were cut differently, the one of more parts counts, every time.
fn whole(found: &[Found]) -> BTreeMap<(u64, u64), Vec<&Found>> {
    let mut finished: Vec<&Found> = found.iter().filter(|found| found.listed.finished).collect();
    finished.sort_by_key(|found| found.name);
    let of_one_save = |left: &&Found, right: &&Found| {
        PartName { part: 0, ..left.name } == PartName { part: 0, ..right.name }
    };
    let saves = finished.chunk_by(of_one_save).filter(|parts| parts.len() == parts[0].name.of);
    saves.map(|parts| ((parts[0].name.step, parts[0].name.id), parts.to_vec())).collect()
}
