//! Shards are hashed in blocks. Who writes one hashes as it writes; who reads some of one reads whole blocks and checks
//! each before a byte of it is handed out. So what is read is what was hashed, whatever becomes of the file meanwhile, and
//! nobody has to read a shard to use a slice of it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::place::Source;

/// Bytes of a block: few enough that the ends of a slice cost little, many enough for one request to a store far away.
pub(super) const BLOCK_BYTES: u64 = 4 << 20;

/// More is no block that anyone wrote.
pub(super) const BLOCK_BYTES_MAX: u64 = 64 << 20;

/// Hashes what passes, block by block.
pub(super) struct Hashing {
    block_bytes: u64,
    hasher: blake3::Hasher,
    blocks: Vec<String>,
}

impl Hashing {
    pub(super) fn new(block_bytes: u64) -> Hashing {
        Hashing { block_bytes, hasher: blake3::Hasher::new(), blocks: Vec::new() }
    }

    pub(super) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = (self.block_bytes - self.hasher.count()) as usize;
            let (these, rest) = bytes.split_at(room.min(bytes.len()));
            self.hasher.update(these);
            if self.hasher.count() == self.block_bytes {
                self.end_block();
            }
            bytes = rest;
        }
    }

    fn end_block(&mut self) {
        self.blocks.push(self.hasher.finalize().to_hex().to_string());
        self.hasher.reset();
    }

    pub(super) fn finish(mut self) -> Vec<String> {
        if self.hasher.count() > 0 {
            self.end_block();
        }
        self.blocks
    }
}

/// The last block that was read and found good, of whichever of a checkpoint's files.
#[derive(Debug, Default)]
pub(super) struct LastBlock {
    file: usize,
    block: u64,
    /// Empty if there is none.
    bytes: Vec<u8>,
}

/// A file whose blocks are verified as they are read.
#[derive(Debug)]
pub(super) struct Verified {
    pub(super) path: PathBuf,
    pub(super) raw: Box<dyn Source>,
    /// Of the file.
    pub(super) bytes: u64,
    pub(super) block_bytes: u64,
    /// One for each block.
    pub(super) hashes: Vec<String>,
    /// Which of the checkpoint's files it is.
    pub(super) number: usize,
    /// One for all of a checkpoint's files, so that no more than a block is in memory.
    pub(super) last: Arc<Mutex<LastBlock>>,
}

impl Verified {
    /// Reads and verifies all of it.
    pub(super) fn verify(&self) -> Result<()> {
        (0..self.hashes.len() as u64).try_for_each(|block| self.with_block(block, |_| ()))
    }

    fn with_block<T>(&self, block: u64, use_it: impl FnOnce(&[u8]) -> T) -> Result<T> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.bytes.is_empty() || (last.file, last.block) != (self.number, block) {
            let start = block * self.block_bytes;
            let mut bytes = std::mem::take(&mut last.bytes);
            bytes.resize(self.block_bytes.min(self.bytes - start) as usize, 0);
            self.raw.read_at(start, &mut bytes)?;
            if blake3::hash(&bytes).to_hex().as_str() != self.hashes[block as usize] {
                let reason = "the shard's bytes do not match their hash in the manifest".to_owned();
                return Err(Error::Damaged { path: self.path.clone(), reason });
            }
            *last = LastBlock { file: self.number, block, bytes };
        }
        Ok(use_it(&last.bytes))
    }
}

impl Source for Arc<Verified> {
    fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        let end = offset_bytes.checked_add(out.len() as u64);
        if end.is_none_or(|end| end > self.bytes) {
            let reason = format!("a read past its {} bytes", self.bytes);
            return Err(Error::Damaged { path: self.path.clone(), reason });
        }
        let (mut offset, mut out) = (offset_bytes, out);
        while !out.is_empty() {
            let (block, within) = (offset / self.block_bytes, (offset % self.block_bytes) as usize);
            let count = out.len().min(self.block_bytes as usize - within);
            let (these, rest) = out.split_at_mut(count);
            self.with_block(block, |bytes| these.copy_from_slice(&bytes[within..within + count]))?;
            (offset, out) = (offset + count as u64, rest);
        }
        Ok(())
    }
}
