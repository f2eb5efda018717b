//! Host memory for what is on its way: between a device and its host, or to another machine. It comes from an arena, so that
//! the same pages serve again: fresh ones would be faulted in for each message, which takes longer than the message. Where
//! that arena's pages are locked, the device copies from and to them by itself.

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use crate::memory::{Arena, Block};

/// Bytes with one owner, aligned for any element; what they are is unspecified until written.
pub struct HostBuffer {
    room: Room,
    length: usize,
}

enum Room {
    Arena(Block),
    /// In words, for their alignment.
    Own(Vec<u64>),
}

impl HostBuffer {
    /// So many bytes of an arena of host memory, or of the system where that has no room for them.
    ///
    /// # Panics
    /// If the arena's memory is not the host's.
    pub fn new(arena: &Arc<Arena>, length: usize) -> HostBuffer {
        let room = match arena.take("a message", length) {
            Ok(block) => Room::Arena(block),
            Err(_) => Room::Own(vec![0; length.div_ceil(size_of::<u64>())]),
        };
        assert!(!matches!(&room, Room::Arena(block) if !block.on_host()), "messages wait in host memory");
        HostBuffer { room, length }
    }

    /// As f32.
    ///
    /// # Panics
    /// If the bytes are no multiple of theirs.
    pub fn floats_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(self)
    }

    /// The parts of some of the bytes, from the first of them on, that a device can copy by itself; none where it cannot.
    pub(crate) fn locked_runs(&self, bytes: Range<usize>) -> Option<Vec<Range<usize>>> {
        let Room::Arena(block) = &self.room else { return None };
        let mut runs = block.locked_runs(bytes.clone())?;
        runs.iter_mut().for_each(|run| *run = run.start - bytes.start..run.end - bytes.start);
        Some(runs)
    }
}

impl Deref for HostBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.room {
            // SAFETY: the block is the host's, that long, initialised by the system or written since, and ours alone.
            Room::Arena(block) => unsafe { std::slice::from_raw_parts(block.start(), self.length) },
            Room::Own(words) => &bytemuck::cast_slice(words)[..self.length],
        }
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.room {
            // SAFETY: as above, and `&mut self` makes the access exclusive.
            Room::Arena(block) => unsafe { std::slice::from_raw_parts_mut(block.start(), self.length) },
            Room::Own(words) => &mut bytemuck::cast_slice_mut(words)[..self.length],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_of_the_arena_while_it_has_room() {
        let arena = Arena::new("messages", 1 << 12).unwrap();
        let mut first = HostBuffer::new(&arena, 3000);
        let mut second = HostBuffer::new(&arena, 3000);
        assert_eq!(arena.used(), 3072);
        first.fill(1);
        second.floats_mut().fill(0.5);
        assert!(first.len() == 3000 && first.iter().all(|byte| *byte == 1));
        assert!(bytemuck::cast_slice::<u8, f32>(&second).iter().all(|number| *number == 0.5));
        let place = first.as_ptr();
        drop(first);
        assert_eq!(HostBuffer::new(&arena, 2000).as_ptr(), place);
        assert!(HostBuffer::new(&arena, 0).is_empty());
    }
}
