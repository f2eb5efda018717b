//! Where the process's own memory comes from: the system's allocator, asked in a way that lets it use again what it is given back.
//!
//! Matrix products pack what they read into aligned blocks of up to some MiB, hundreds of times a step. The system cuts an aligned block
//! out of a larger one and keeps the rests; what is then freed is too small for the next block of the same size and the rest
//! that it is cut from, so now and then more is taken. On two threads 22 to 60 MiB were seen where 9 are in use.
//! A plain block that is so much larger, with the aligned one inside, is as large the next time.

use std::alloc::{GlobalAlloc, Layout, System};

/// What the system's blocks lie at in any case.
const ALIGNED: usize = 16;

/// Before an aligned block, the address of the plain one that it lies in.
type Within = *mut u8;

/// The process's allocator, for binaries that train.
pub struct Allocator;

impl Allocator {
    /// The plain block for an aligned one; none where no size has so much.
    fn plain(layout: Layout) -> Option<Layout> {
        // At most this much lies before the aligned block: the plain one is at 16 bytes, and the address needs 8.
        let size = layout.size().checked_add(layout.align())?;
        Layout::from_size_align(size, ALIGNED).ok()
    }

    /// The aligned block within a plain one, which may be none.
    ///
    /// # Safety
    /// The plain block was allocated for this alignment.
    unsafe fn aligned(plain: *mut u8, align: usize) -> *mut u8 {
        if plain.is_null() {
            return plain;
        }
        // SAFETY: alignments are powers of two above 16 here, so from an address at 16 to the next at `align` it is 16 to `align`
        // bytes, which the plain block has more; the address before it lies within them.
        unsafe {
            let block = plain.add(align - plain.addr() % align);
            block.cast::<Within>().sub(1).write(plain);
            block
        }
    }
}

// SAFETY: blocks are the system's own, or lie within one of the system's that is larger by their alignment. Every block is given
// back with the layout that it was asked for with, by which it is known which of both it is.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.align() <= ALIGNED {
            // SAFETY: by the caller's contract.
            return unsafe { System.alloc(layout) };
        }
        let Some(plain) = Allocator::plain(layout) else { return std::ptr::null_mut() };
        // SAFETY: the plain block is not empty, and it is one for this alignment.
        unsafe { Allocator::aligned(System.alloc(plain), layout.align()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.align() <= ALIGNED {
            // SAFETY: by the caller's contract.
            return unsafe { System.alloc_zeroed(layout) };
        }
        let Some(plain) = Allocator::plain(layout) else { return std::ptr::null_mut() };
        // SAFETY: as above; what is written lies before the aligned block.
        unsafe { Allocator::aligned(System.alloc_zeroed(plain), layout.align()) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if layout.align() <= ALIGNED {
            // SAFETY: by the caller's contract it is the system's.
            return unsafe { System.dealloc(block, layout) };
        }
        let plain = Allocator::plain(layout).expect("it was allocated by it");
        // SAFETY: the address before an aligned block is that of its plain one, whose layout follows from this.
        unsafe { System.dealloc(block.cast::<Within>().sub(1).read(), plain) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if layout.align() <= ALIGNED {
            // SAFETY: by the caller's contract.
            return unsafe { System.realloc(block, layout, size) };
        }
        // SAFETY: by the caller's contract the size is one that a layout of this alignment may have; the blocks are two.
        unsafe {
            let larger = self.alloc(Layout::from_size_align_unchecked(size, layout.align()));
            if !larger.is_null() {
                std::ptr::copy_nonoverlapping(block, larger, layout.size().min(size));
                self.dealloc(block, layout);
            }
            larger
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_every_alignment_are_whole_and_apart() {
        let mut blocks: Vec<(*mut u8, Layout, u8)> = Vec::new();
        for round in 0..400usize {
            let layout = Layout::from_size_align(1 + (round * 7919) % 5000, 1 << (round % 14)).unwrap();
            // SAFETY: no layout here is empty; blocks are written and read within their sizes and given back once.
            unsafe {
                let block = match round % 2 {
                    0 => Allocator.alloc_zeroed(layout),
                    _ => Allocator.alloc(layout),
                };
                assert!(!block.is_null() && block.addr() % layout.align() == 0, "{layout:?}");
                if round % 2 == 0 {
                    assert!((0..layout.size()).all(|at| block.add(at).read() == 0), "{layout:?}");
                }
                block.write_bytes(round as u8, layout.size());
                blocks.push((block, layout, round as u8));
                if round % 3 == 0 {
                    let (block, layout, mark) = blocks.swap_remove(round % blocks.len());
                    let larger = Allocator.realloc(block, layout, layout.size() + 100);
                    assert!((0..layout.size()).all(|at| larger.add(at).read() == mark), "{layout:?}");
                    Allocator.dealloc(
                        larger,
                        Layout::from_size_align(layout.size() + 100, layout.align()).unwrap(),
                    );
                }
            }
        }
        for (block, layout, mark) in blocks {
            // SAFETY: as above.
            unsafe {
                assert!((0..layout.size()).all(|at| block.add(at).read() == mark), "{layout:?}");
                Allocator.dealloc(block, layout);
            }
        }
    }
}
