//! Where scalars land on the host. The memory is pinned: copies into it are queued like kernels, so any number
//! of scalars is waited for once.

use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Context;
use crate::device::Result;

/// Scalars read at a time.
const SCALARS: usize = 64;

pub(super) struct Landing {
    context: Arc<Context>,
    host: *mut f64,
}

// SAFETY: owns its memory; the driver's calls may be made from any thread.
unsafe impl Send for Landing {}

impl Landing {
    pub(super) fn new(context: Arc<Context>) -> Result<Landing> {
        context.enter()?;
        let mut host = std::ptr::null_mut();
        // SAFETY: writes one address.
        let result = unsafe { sys::cuMemAllocHost_v2(&mut host, SCALARS * size_of::<f64>()) };
        context.check("cuMemAllocHost", result)?;
        Ok(Landing { context, host: host.cast() })
    }

    /// Waits for what was asked of the device and reads an f64 from each address.
    ///
    /// # Safety
    /// The addresses are those of scalars on the device.
    pub(super) unsafe fn read(&mut self, addresses: &[u64]) -> Result<Vec<f64>> {
        let mut values = Vec::with_capacity(addresses.len());
        self.context.enter()?;
        for group in addresses.chunks(SCALARS) {
            for (index, address) in group.iter().enumerate() {
                // SAFETY: there is room for as many as a group has; the address by this function's contract.
                let copied = unsafe {
                    let place = self.host.add(index).cast();
                    sys::cuMemcpyDtoHAsync_v2(place, *address, size_of::<f64>(), self.context.stream())
                };
                self.context.check("cuMemcpyDtoH", copied)?;
            }
            self.context.wait()?;
            // SAFETY: the copies are done, and nobody else writes here.
            values.extend_from_slice(unsafe { std::slice::from_raw_parts(self.host, group.len()) });
        }
        Ok(values)
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        // A copy that is still under way must be over; a failure was reported by an earlier call.
        let _ = self.context.wait();
        // SAFETY: taken in `new`, given back once.
        let _ = unsafe { sys::cuMemFreeHost(self.host.cast()) };
    }
}
