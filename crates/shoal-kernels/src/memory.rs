//! One arena per device: a reserved range of addresses from which blocks are cut and to which they return.
//!
//! Why not the system allocator: a training step frees and takes the same few large blocks again and again,
//! and each trip through `mmap` would fault its pages in anew; and a budget is only worth something if every
//! byte passes one gate. Blocks are placed at the lowest address that fits and merge when freed, so the
//! resident size stays close to the counted peak.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::{MmapMut, MmapOptions};
use thiserror::Error;

/// Every block is a multiple of this and starts at one.
pub const GRANULE_BYTES: usize = 256;

#[derive(Debug, Error)]
pub enum MemoryError {
    #[error(
        "{device}: {who} asks for {asked} bytes, but {used} of the budget of {budget} are in use ({short} short)"
    )]
    OverBudget { device: String, who: String, asked: u64, used: u64, budget: u64, short: u64 },
    #[error("{device}: {who} asks for {asked} bytes, which no hole between the blocks in use can take")]
    Fragmented { device: String, who: String, asked: u64 },
    #[error("{device}: {who} asks for {asked} bytes, which the system does not have: {system}")]
    Commit { device: String, who: String, asked: u64, system: String },
    #[error("{device}: the system refused to reserve {bytes} bytes of addresses: {source}")]
    Reserve { device: String, bytes: u64, source: std::io::Error },
}

impl MemoryError {
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            MemoryError::OverBudget { .. } | MemoryError::Fragmented { .. } => {
                "give the device a larger budget, or train with smaller micro-batches or recomputation".into()
            }
            MemoryError::Commit { .. } => {
                "something else uses the device's memory: end it, or give this run a smaller budget".into()
            }
            MemoryError::Reserve { .. } => {
                "lower the device's budget, or raise the limit on address space (ulimit -v)".into()
            }
        })
    }
}

/// A reserved range of addresses, on the host or on a device. Addresses cost nothing; memory stands behind
/// them once committed.
pub(crate) trait AddressSpace: Send + Sync {
    /// The first address, a multiple of [`GRANULE_BYTES`].
    fn base(&self) -> *mut u8;

    fn length(&self) -> usize;

    /// Makes sure that memory stands behind the first `end` bytes; otherwise what the system said.
    fn commit(&self, end: usize) -> Result<(), String>;

    /// Whether the host may read and write these addresses.
    fn on_host(&self) -> bool;

    /// Where the first `end` bytes are page-locked, so that a device copies from and to them by itself: the bytes at whose
    /// multiples a copy must be cut.
    fn locked_piece_bytes(&self, _end: usize) -> Option<usize> {
        None
    }

    /// Why memory that was to be page-locked is not.
    fn refusal(&self) -> Option<String> {
        None
    }
}

/// Host memory: the system puts pages behind addresses when they are touched.
pub(crate) struct HostSpace {
    base: *mut u8,
    length: usize,
    /// Keeps the range mapped.
    _mapping: MmapMut,
}

// SAFETY: `base` is only turned into slices by `Block`, which owns its range exclusively.
unsafe impl Send for HostSpace {}
// SAFETY: as above.
unsafe impl Sync for HostSpace {}

impl HostSpace {
    /// Addresses for a budget.
    pub(crate) fn reserve(device: &str, budget: u64) -> Result<HostSpace, MemoryError> {
        let length = reserve_bytes(budget);
        let refused = |source| MemoryError::Reserve { device: device.into(), bytes: length as u64, source };
        let mut mapping = MmapOptions::new().len(length).no_reserve_swap().map_anon().map_err(refused)?;
        // Large pages spare the matrix products most of their address translations; a refusal is harmless.
        let _ = mapping.advise(memmap2::Advice::HugePage);
        Ok(HostSpace { base: mapping.as_mut_ptr(), length, _mapping: mapping })
    }
}

impl AddressSpace for HostSpace {
    fn base(&self) -> *mut u8 {
        self.base
    }

    fn length(&self) -> usize {
        self.length
    }

    fn commit(&self, _end: usize) -> Result<(), String> {
        Ok(())
    }

    fn on_host(&self) -> bool {
        true
    }
}

/// A device's memory.
pub struct Arena {
    device: String,
    budget: u64,
    space: Box<dyn AddressSpace>,
    free: Mutex<FreeList>,
    /// Fills new blocks with NaN, so that a test sees a read of memory nothing wrote. Host memory only.
    poison: bool,
}

/// Addresses reserved for a budget. They cost nothing until touched: twice the budget leaves room for the
/// holes that training leaves between blocks. (No fixed factor is enough for every order of calls; a step's
/// order, the same each time, stays far below.)
pub(crate) fn reserve_bytes(budget: u64) -> usize {
    (2 * budget as usize + (64 << 20)).next_multiple_of(1 << 21)
}

/// Which ranges are free, and how much was in use at the highest.
struct FreeList {
    /// Offset to length; neighbours are always merged.
    ranges: BTreeMap<usize, usize>,
    used: u64,
    peak: u64,
}

impl Arena {
    /// A number for which blocks are in use: the same blocks, the same number.
    pub(crate) fn layout(&self) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        self.free_list().ranges.hash(&mut hasher);
        hasher.finish()
    }

    pub fn new(device: &str, budget: u64) -> Result<Arc<Arena>, MemoryError> {
        Arena::build(device, budget, false)
    }

    /// An arena whose blocks start out as NaN.
    pub fn poisoned(device: &str, budget: u64) -> Result<Arc<Arena>, MemoryError> {
        Arena::build(device, budget, true)
    }

    fn build(device: &str, budget: u64, poison: bool) -> Result<Arc<Arena>, MemoryError> {
        let space = HostSpace::reserve(device, budget)?;
        Ok(Arena::over(device, budget, Box::new(space), poison))
    }

    /// An arena over any addresses.
    pub(crate) fn over(device: &str, budget: u64, space: Box<dyn AddressSpace>, poison: bool) -> Arc<Arena> {
        let ranges = BTreeMap::from([(0, space.length())]);
        let free = Mutex::new(FreeList { ranges, used: 0, peak: 0 });
        Arc::new(Arena { device: device.into(), budget, space, free, poison })
    }

    fn free_list(&self) -> MutexGuard<'_, FreeList> {
        // The list is consistent between statements, so a panic elsewhere does not spoil it.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn device(&self) -> &str {
        &self.device
    }

    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Bytes in use now.
    pub fn used(&self) -> u64 {
        self.free_list().used
    }

    /// The most bytes in use at once since the start.
    pub fn peak(&self) -> u64 {
        self.free_list().peak
    }

    /// Why memory of an arena that was to be page-locked is not: it is as good as any other, only slower to copy.
    pub fn refusal(&self) -> Option<String> {
        self.space.refusal()
    }

    /// Cuts a block; `who` is named if the budget refuses.
    pub(crate) fn take(self: &Arc<Self>, who: &str, bytes: usize) -> Result<Block, MemoryError> {
        let length = bytes.max(1).next_multiple_of(GRANULE_BYTES);
        let mut free = self.free_list();
        let (used, asked) = (free.used, length as u64);
        if used + asked > self.budget {
            let (device, who, budget) = (self.device.clone(), who.into(), self.budget);
            let short = used + asked - budget;
            return Err(MemoryError::OverBudget { device, who, asked, used, budget, short });
        }
        let fit =
            free.ranges.iter().find(|(_, size)| **size >= length).map(|(offset, size)| (*offset, *size));
        let Some((offset, size)) = fit else {
            return Err(MemoryError::Fragmented { device: self.device.clone(), who: who.into(), asked });
        };
        self.space.commit(offset + length).map_err(|system| MemoryError::Commit {
            device: self.device.clone(),
            who: who.into(),
            asked,
            system,
        })?;
        free.ranges.remove(&offset);
        if size > length {
            free.ranges.insert(offset + length, size - length);
        }
        free.used += length as u64;
        free.peak = free.peak.max(free.used);
        drop(free);
        let mut block = Block { arena: self.clone(), offset, length, is_lent: false };
        if self.poison {
            block.bytes_mut().fill(0xff);
        }
        Ok(block)
    }

    fn give_back(&self, mut offset: usize, mut length: usize) {
        let mut free = self.free_list();
        free.used -= length as u64;
        if let Some(next) = free.ranges.remove(&(offset + length)) {
            length += next;
        }
        let before = free.ranges.range(..offset).next_back().map(|(start, size)| (*start, *size));
        if let Some((start, size)) = before
            && start + size == offset
        {
            free.ranges.remove(&start);
            offset = start;
            length += size;
        }
        free.ranges.insert(offset, length);
    }
}

/// A range of the arena with one owner; it returns when dropped.
pub(crate) struct Block {
    arena: Arc<Arena>,
    offset: usize,
    length: usize,
    /// Whether it is another block's range, which returns when that one is dropped.
    is_lent: bool,
}

impl Block {
    /// The same range for a processor that plays a device with memory of its own: it reads and writes there what the host
    /// must not. It does not keep the range.
    ///
    /// # Safety
    /// The arena's memory is the host's, whatever it says of itself, and whoever has the lent block uses it in the order in
    /// which its owners asked for it, as a device's stream would.
    pub(crate) unsafe fn lend(&self) -> Block {
        Block { arena: self.arena.clone(), offset: self.offset, length: self.length, is_lent: true }
    }

    /// First byte of the block, aligned to [`GRANULE_BYTES`].
    pub(crate) fn start(&self) -> *mut u8 {
        // SAFETY: the free list only hands out ranges inside the mapping.
        unsafe { self.arena.space.base().add(self.offset) }
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Whether the host may read and write the block.
    pub(crate) fn on_host(&self) -> bool {
        self.is_lent || self.arena.space.on_host()
    }

    /// The parts of some of the block's bytes that a device can copy by itself, each in one go; none where it cannot.
    pub(crate) fn locked_runs(&self, bytes: Range<usize>) -> Option<Vec<Range<usize>>> {
        assert!(bytes.start <= bytes.end && bytes.end <= self.length);
        let piece = self.arena.space.locked_piece_bytes(self.offset + self.length)?;
        let (mut runs, mut start) = (Vec::new(), bytes.start);
        while start < bytes.end {
            let next_cut = (self.offset + start + 1).next_multiple_of(piece) - self.offset;
            let end = next_cut.min(bytes.end);
            runs.push(start..end);
            start = end;
        }
        Some(runs)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the range is mapped, zero-initialised by the system or written since, and ours alone.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.length) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if !self.is_lent {
            self.arena.give_back(self.offset, self.length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn past_the_budget_the_error_names_who_asked() {
        let arena = Arena::new("cpu:0", 4096).unwrap();
        let _held = arena.take("weights", 3000).unwrap();
        let error = arena.take("the logits", 2000).err().unwrap();
        let text = error.to_string();
        assert!(text.contains("cpu:0") && text.contains("the logits") && text.contains("4096"), "{text}");
        assert!(error.hint().is_some());
        assert_eq!(arena.used(), 3072);
    }

    /// Host memory whose first bytes are page-locked, in small pieces.
    struct Locked {
        host: HostSpace,
        locked: usize,
    }

    const PIECE_BYTES: usize = 1000;

    impl AddressSpace for Locked {
        fn base(&self) -> *mut u8 {
            self.host.base()
        }

        fn length(&self) -> usize {
            self.host.length()
        }

        fn commit(&self, _end: usize) -> Result<(), String> {
            Ok(())
        }

        fn on_host(&self) -> bool {
            true
        }

        fn locked_piece_bytes(&self, end: usize) -> Option<usize> {
            (end <= self.locked).then_some(PIECE_BYTES)
        }
    }

    #[test]
    fn what_a_device_copies_by_itself_is_cut_where_pieces_end() {
        let space = Locked { host: HostSpace::reserve("host", 1 << 20).unwrap(), locked: 6000 };
        let arena = Arena::over("host", 1 << 20, Box::new(space), false);
        let _first = arena.take("test", 700).unwrap();
        let block = arena.take("test", 3000).unwrap();
        assert_eq!(block.offset, 768);
        // Pieces end at 232 and at each thousand from there.
        assert_eq!(block.locked_runs(0..3000).unwrap(), [0..232, 232..1232, 1232..2232, 2232..3000]);
        assert_eq!(block.locked_runs(232..1232).unwrap(), std::slice::from_ref(&(232..1232)));
        assert_eq!(block.locked_runs(231..233).unwrap(), [231..232, 232..233]);
        assert_eq!(block.locked_runs(5..5).unwrap(), []);
        // Past what is locked nothing is, nor what lies there in part.
        let past = arena.take("test", 3000).unwrap();
        assert_eq!(past.locked_runs(0..10), None);
    }

    proptest! {
        /// Blocks never overlap, and after any order of releases the arena is whole again.
        #[test]
        fn any_order_of_taking_and_giving_leaves_no_trace(
            steps in prop::collection::vec((0usize..6000, any::<prop::sample::Index>(), any::<bool>()), 1..80)
        ) {
            let arena = Arena::new("cpu:0", 1 << 20).unwrap();
            let mut held: Vec<Block> = Vec::new();
            for (bytes, which, release) in steps {
                if release && !held.is_empty() {
                    held.swap_remove(which.index(held.len()));
                } else if let Ok(block) = arena.take("test", bytes) {
                    for other in &held {
                        let apart = block.offset + block.length <= other.offset
                            || other.offset + other.length <= block.offset;
                        prop_assert!(apart);
                    }
                    held.push(block);
                }
                prop_assert_eq!(arena.used(), held.iter().map(|block| block.length as u64).sum::<u64>());
            }
            held.clear();
            prop_assert_eq!(arena.used(), 0);
            prop_assert_eq!(arena.free_list().ranges.len(), 1);
        }
    }
}
