//! Where scalars land on the host, and where integers start from. The memory is pinned: copies from and to it
//! are queued like kernels, so that tokens go over while the device works, and any number of scalars is
//! waited for once.

use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Context;
use crate::device::Result;

/// Scalars read at a time.
const SCALARS: usize = 64;
/// Integers that may be under way at once.
const INTEGERS: usize = 1 << 20;

/// Pinned host memory.
pub(super) struct Pinned<T> {
    context: Arc<Context>,
    start: *mut T,
}

// SAFETY: owns its memory; the driver's calls may be made from any thread.
unsafe impl<T: Send> Send for Pinned<T> {}

impl<T: Copy> Pinned<T> {
    pub(super) fn new(context: Arc<Context>, elements: usize) -> Result<Pinned<T>> {
        context.enter()?;
        let mut start = std::ptr::null_mut();
        // SAFETY: writes one address.
        let result = unsafe { sys::cuMemAllocHost_v2(&mut start, elements * size_of::<T>()) };
        context.check("cuMemAllocHost", result)?;
        Ok(Pinned { context, start: start.cast() })
    }

    pub(super) fn start(&self) -> *mut T {
        self.start
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        // A copy that is still under way must be over; a failure was reported by an earlier call.
        let _ = self.context.wait();
        // SAFETY: taken in `new`, given back once.
        let _ = unsafe { sys::cuMemFreeHost(self.start.cast()) };
    }
}

/// Integers on their way to the device.
pub(super) struct Departure {
    pinned: Pinned<i32>,
    /// Integers that copies may still read.
    used: usize,
    /// The last wait that had begun when the last copy was queued: later ones wait for it too.
    queued_after: u64,
}

impl Departure {
    pub(super) fn new(context: Arc<Context>) -> Result<Departure> {
        Ok(Departure { pinned: Pinned::new(context, INTEGERS)?, used: 0, queued_after: 0 })
    }

    /// Queues a copy; false, and nothing done, where there is no room until the next wait.
    ///
    /// # Safety
    /// `to` is device memory of at least that many bytes.
    pub(super) unsafe fn send(&mut self, to: u64, values: &[i32]) -> Result<bool> {
        let context = &self.pinned.context;
        // A wait that another thread began before the last copy was queued says nothing of that copy.
        if context.waits_over() > self.queued_after {
            self.used = 0;
        }
        if self.used + values.len() > INTEGERS {
            return Ok(false);
        }
        context.enter()?;
        // SAFETY: the range is inside the pinned memory and no copy reads it; `to` by the contract.
        let sent = unsafe {
            let place = self.pinned.start.add(self.used);
            std::ptr::copy_nonoverlapping(values.as_ptr(), place, values.len());
            sys::cuMemcpyHtoDAsync_v2(to, place.cast(), size_of_val(values), context.stream())
        };
        context.check("cuMemcpyHtoD", sent)?;
        self.used += values.len();
        self.queued_after = context.waits_begun();
        Ok(true)
    }
}

pub(super) struct Landing {
    pinned: Pinned<f64>,
}

impl Landing {
    pub(super) fn new(context: Arc<Context>) -> Result<Landing> {
        Ok(Landing { pinned: Pinned::new(context, SCALARS)? })
    }

    /// Waits for what was asked of the device and reads an f64 from each address.
    ///
    /// # Safety
    /// The addresses are those of scalars on the device.
    pub(super) unsafe fn read(&mut self, addresses: &[u64]) -> Result<Vec<f64>> {
        let mut values = Vec::with_capacity(addresses.len());
        let (context, host) = (&self.pinned.context, self.pinned.start);
        context.enter()?;
        for group in addresses.chunks(SCALARS) {
            for (index, address) in group.iter().enumerate() {
                // SAFETY: there is room for as many as a group has; the address by this function's contract.
                let copied = unsafe {
                    let place = host.add(index).cast();
                    sys::cuMemcpyDtoHAsync_v2(place, *address, size_of::<f64>(), context.stream())
                };
                context.check("cuMemcpyDtoH", copied)?;
            }
            context.wait()?;
            // SAFETY: the copies are done, and nobody else writes here.
            values.extend_from_slice(unsafe { std::slice::from_raw_parts(host, group.len()) });
        }
        Ok(values)
    }
}
