//! Host memory that the GPU copies from and to by itself: its pages are locked, piece by piece as the arena grows. Locking
//! faults pages in one after the other, so threads do that first, side by side.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use super::context::Context;
use super::recording::while_nothing_is_recorded;
use crate::device::Result;
use crate::memory::{AddressSpace, HostSpace, MemoryError};

/// Memory is locked in multiples of this: few calls, little waste.
const PIECE_BYTES: usize = 128 << 20;

/// The smallest page that a system may have.
const PAGE_BYTES: usize = 4096;

/// Host memory of which the first bytes are locked.
pub(super) struct LockedSpace {
    context: Arc<Context>,
    host: HostSpace,
    /// A multiple of the pieces, or all.
    locked: AtomicUsize,
    /// Why nothing more is locked; held while something is.
    refused: Mutex<Option<String>>,
}

impl LockedSpace {
    pub(super) fn reserve(
        context: Arc<Context>,
        name: &str,
        budget: u64,
    ) -> std::result::Result<LockedSpace, MemoryError> {
        let host = HostSpace::reserve(name, budget)?;
        Ok(LockedSpace { context, host, locked: AtomicUsize::new(0), refused: Mutex::new(None) })
    }

    /// The pieces of the first bytes.
    fn pieces(&self, end: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let length = self.host.length();
        (0..end).step_by(PIECE_BYTES).map(move |start| (start, PIECE_BYTES.min(length - start)))
    }

    /// Puts pages behind a piece that no block has had yet.
    fn fault_in(&self, start: usize, bytes: usize) {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let share = bytes.div_ceil(threads).next_multiple_of(PAGE_BYTES);
        let base = self.host.base() as usize + start;
        std::thread::scope(|scope| {
            for first in (0..bytes).step_by(share) {
                let touch = move || {
                    for page in (first..(first + share).min(bytes)).step_by(PAGE_BYTES) {
                        // SAFETY: inside the mapping, and nobody else's: the arena has handed out nothing past what is
                        // locked, and asks for one piece at a time.
                        unsafe { ((base + page) as *mut u8).write_volatile(0) };
                    }
                };
                // Where there is no thread to be had, locking does it.
                let _ = std::thread::Builder::new().spawn_scoped(scope, touch);
            }
        });
    }

    fn lock(&self, start: usize, bytes: usize) -> Result {
        self.fault_in(start, bytes);
        self.context.enter()?;
        // SAFETY: inside the mapping, whose base is at a page, as pieces are.
        let registered = while_nothing_is_recorded(|| unsafe {
            let first = self.host.base().add(start).cast::<c_void>();
            sys::cuMemHostRegister_v2(first, bytes, sys::CU_MEMHOSTREGISTER_PORTABLE)
        });
        self.context.check("cuMemHostRegister", registered)
    }
}

impl AddressSpace for LockedSpace {
    fn base(&self) -> *mut u8 {
        self.host.base()
    }

    fn length(&self) -> usize {
        self.host.length()
    }

    fn commit(&self, end: usize) -> std::result::Result<(), String> {
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let locked = self.locked.load(Ordering::Acquire);
        if refused.is_some() || locked >= end {
            return Ok(());
        }
        for (start, bytes) in self.pieces(end).skip_while(|(start, _)| *start < locked) {
            // What is not locked is host memory like any other.
            if let Err(error) = self.lock(start, bytes) {
                *refused = Some(error.to_string());
                break;
            }
            self.locked.store(start + bytes, Ordering::Release);
        }
        Ok(())
    }

    fn on_host(&self) -> bool {
        true
    }

    fn locked_piece_bytes(&self, end: usize) -> Option<usize> {
        (end <= self.locked.load(Ordering::Acquire)).then_some(PIECE_BYTES)
    }

    fn refusal(&self) -> Option<String> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for LockedSpace {
    fn drop(&mut self) {
        // What fails now has been reported by an earlier call. Copies were waited for by whoever asked for them.
        let _ = self.context.enter();
        let locked = *self.locked.get_mut();
        while_nothing_is_recorded(|| {
            for (start, _) in self.pieces(locked) {
                // SAFETY: registered in `lock`, and no block is left: each holds the arena that owns this space.
                let _ = unsafe { sys::cuMemHostUnregister(self.host.base().add(start).cast()) };
            }
        });
    }
}
