//! Writing a part. The order of writes is the point: shards, each flushed, the manifest, and only then the part is one.
//! Writers of a checkpoint know nothing of each other: each writes its own part under a name that has the save's number
//! in it, and whoever reads sees by the names whether all are there.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use super::Store;
use super::blocks::Hashing;
use super::manifest::{FORMAT, Header, Manifest, Shard};
use super::name::{FORMAT_1_ID, PartName};
use super::pack::{PackedShard, Slice, pack};
use crate::error::{Error, Result};
use crate::place::{MANIFEST_FILE, Output, Unfinished};
use crate::tensors::{elements_of, floats};

/// A whole tensor to be saved, borrowed from where it lives.
#[derive(Debug, Clone, Copy)]
pub struct Entry<'a> {
    pub name: &'a str,
    /// Lowercase letters, digits and `_`: it becomes part of file names.
    pub role: &'a str,
    pub shape: &'a [usize],
    pub data: &'a [f32],
}

/// What has been saved and is out of a power cut's reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    pub path: PathBuf,
    /// Of all files.
    pub bytes: u64,
}

/// A part that was begun. Nothing is written before [`PartWriter::write`].
#[derive(Debug)]
#[must_use]
pub struct PartWriter<'a> {
    store: &'a Store,
    header: Header,
    name: PartName,
}

impl Store {
    /// Begins part `part` (from 1) of the `of` that make up save number `id`. Numbers are given out once, by whoever
    /// decides that a checkpoint is made: a part that is finished is never written again.
    pub fn begin_part(&self, header: Header, id: u64, part: usize, of: usize) -> Result<PartWriter<'_>> {
        let name = PartName { step: header.step, id, of, part };
        let path = self.place.path(&name.to_string());
        let refuse = |reason: &str| Err(Error::Part { path: path.clone(), reason: reason.to_owned() });
        if !(1..=of).contains(&part) {
            return refuse("there is no such part");
        }
        if id == FORMAT_1_ID {
            return refuse("the save's number belongs to an earlier format");
        }
        if self.parts()?.iter().any(|found| found.name == name && found.listed.finished) {
            return refuse("the part is there already");
        }
        Ok(PartWriter { store: self, header, name })
    }

    /// Saves a checkpoint of one part and returns once it is safe. The order of `entries` does not matter. Other
    /// checkpoints of the same step are removed after that: who saves it again has the state it wants kept. When this
    /// fails, the checkpoints that were there still are.
    pub fn save<'a>(&self, header: Header, entries: impl IntoIterator<Item = Entry<'a>>) -> Result<Saved> {
        let (step, id) = (header.step, self.next_id(header.step)?);
        let entries: Vec<Entry<'a>> = entries.into_iter().collect();
        let writer = self.begin_part(header, id, 1, 1)?;
        for entry in &entries {
            if elements_of(entry.shape) != Some(entry.data.len() as u64) {
                let reason =
                    format!("its shape {:?} does not have {} elements", entry.shape, entry.data.len());
                let path = self.place.root().to_owned();
                return Err(Error::Entry { path, tensor: entry.name.to_owned(), reason });
            }
        }
        let slice = |entry: &Entry<'a>| {
            let Entry { name, role, shape, data } = *entry;
            Slice { name, role, shape, range: 0..data.len() }
        };
        let slices: Vec<Slice<'a>> = entries.iter().map(slice).collect();
        let saved = writer.write(&slices, |index| Ok::<_, Error>(Cow::Borrowed(entries[index].data)))?;
        self.remove_where(|name| name.step == step && name.id < id)?;
        Ok(saved)
    }
}

impl PartWriter<'_> {
    /// Writes the part and returns once it is safe. `data` gives the elements of a slice by its place among `slices`; it
    /// is asked for one after the other, so no more than one has to be in memory.
    pub fn write<'d, E: From<Error>>(
        self,
        slices: &[Slice<'_>],
        data: impl FnMut(usize) -> std::result::Result<Cow<'d, [f32]>, E>,
    ) -> std::result::Result<Saved, E> {
        let PartWriter { store, name, .. } = &self;
        let path = store.place.path(&name.to_string());
        let packed = pack(&path, slices, store.shard_bytes_max)?;
        let mut manifest = self.unhashed_manifest(&packed);
        let manifest_path = path.join(MANIFEST_FILE);
        // Hashes all have the same length, so the manifest already has its size.
        let manifest_bytes = manifest.encode(&manifest_path)?.len() as u64;
        let bytes = manifest_bytes + manifest.shards.iter().map(|shard| shard.bytes).sum::<u64>();

        let mut unfinished = store.place.begin(&name.to_string(), bytes)?;
        let mut given = Given { path: &path, slices, data, last: None };
        for (packed, shard) in packed.iter().zip(&mut manifest.shards) {
            let mut writing = ShardWriting::begin(&mut *unfinished, packed, store.block_bytes)?;
            for piece in &packed.pieces {
                writing.write(&given.slice(piece.slice)?[piece.within.clone()])?;
            }
            shard.blocks = writing.finish(shard.bytes)?;
        }
        unfinished.finish(&manifest.encode(&manifest_path)?)?;
        Ok(Saved { path, bytes })
    }

    /// The manifest as it will be, but for the hashes, which are only known once the shards are written.
    fn unhashed_manifest(&self, packed: &[PackedShard]) -> Manifest {
        let PartWriter { store, header, name } = self;
        let shards = packed.iter().map(|packed| Shard {
            blocks: vec![
                "0".repeat(2 * blake3::OUT_LEN);
                packed.shard.bytes.div_ceil(store.block_bytes) as usize
            ],
            ..packed.shard.clone()
        });
        Manifest {
            format: FORMAT,
            id: name.id,
            part: name.part,
            of: name.of,
            header: header.clone(),
            block_bytes: Some(store.block_bytes),
            shards: shards.collect(),
        }
    }
}

/// The slices' elements as they are asked for. The pieces of one that is split come one after the other, so the last one
/// is kept.
struct Given<'s, 'd, F> {
    path: &'s Path,
    slices: &'s [Slice<'s>],
    data: F,
    last: Option<(usize, Cow<'d, [f32]>)>,
}

impl<'d, F> Given<'_, 'd, F> {
    fn slice<E: From<Error>>(&mut self, index: usize) -> std::result::Result<&[f32], E>
    where
        F: FnMut(usize) -> std::result::Result<Cow<'d, [f32]>, E>,
    {
        if self.last.as_ref().is_none_or(|(at, _)| *at != index) {
            self.last = None;
            let values = (self.data)(index)?;
            let slice = &self.slices[index];
            if values.len() != slice.range.len() {
                let reason = format!("{} elements were given for {:?}", values.len(), slice.range);
                let (path, tensor) = (self.path.to_owned(), slice.name.to_owned());
                return Err(Error::Entry { path, tensor, reason }.into());
            }
            self.last = Some((index, values));
        }
        Ok(self.last.as_ref().map_or(&[], |(_, values)| values))
    }
}

/// A shard on its way, hashed as it is written.
struct ShardWriting<'a> {
    output: Box<dyn Output + 'a>,
    hashing: Hashing,
    bytes: u64,
}

impl<'a> ShardWriting<'a> {
    fn begin(
        part: &'a mut dyn Unfinished,
        packed: &PackedShard,
        block_bytes: u64,
    ) -> Result<ShardWriting<'a>> {
        let output = part.create(&packed.shard.file)?;
        let mut writing = ShardWriting { output, hashing: Hashing::new(block_bytes), bytes: 0 };
        writing.put(&packed.layout.header)?;
        Ok(writing)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.hashing.update(bytes);
        self.bytes += bytes.len() as u64;
        self.output.write(bytes)
    }

    fn write(&mut self, values: &[f32]) -> Result<()> {
        floats(values, |bytes| self.put(bytes))
    }

    /// The hashes of its blocks.
    fn finish(self, expected_bytes: u64) -> Result<Vec<String>> {
        assert_eq!(self.bytes, expected_bytes, "a shard has the size its header says");
        self.output.finish()?;
        Ok(self.hashing.finish())
    }
}
