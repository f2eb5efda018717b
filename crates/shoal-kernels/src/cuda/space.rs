//! A GPU's memory as an address space: addresses are reserved at once, memory is put behind them in chunks
//! as the arena grows. So a budget costs nothing until it is used, blocks never move, and the driver's own
//! allocator is not asked during training.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use super::context::Context;
use crate::device::{DeviceError, Result};
use crate::memory::AddressSpace;

/// Memory is committed in multiples of this: few calls, little waste.
const CHUNK_BYTES: usize = 64 << 20;

pub(super) struct DeviceSpace {
    context: Arc<Context>,
    base: u64,
    length: usize,
    chunk: usize,
    /// The chunks behind the first addresses, in order.
    chunks: Mutex<Vec<sys::CUmemGenericAllocationHandle>>,
}

fn location(device: sys::CUdevice) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

fn properties(device: sys::CUdevice) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

impl DeviceSpace {
    pub(super) fn reserve(context: Arc<Context>, bytes: usize) -> Result<DeviceSpace> {
        context.enter()?;
        let properties = properties(context.device());
        let mut granularity = 0;
        let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: reads the properties, writes one number.
        let result = unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, &properties, option) };
        context.check("cuMemGetAllocationGranularity", result)?;
        let chunk = CHUNK_BYTES.next_multiple_of(granularity.max(1));
        let length = bytes.next_multiple_of(chunk);
        let mut base = 0;
        // SAFETY: writes one address.
        let result = unsafe { sys::cuMemAddressReserve(&mut base, length, 0, 0, 0) };
        context.check("cuMemAddressReserve", result)?;
        Ok(DeviceSpace { context, base, length, chunk, chunks: Mutex::new(Vec::new()) })
    }

    /// Puts one more chunk behind the addresses.
    fn grow(&self, chunks: &mut Vec<sys::CUmemGenericAllocationHandle>) -> Result {
        let context = &self.context;
        let at = self.base + (chunks.len() * self.chunk) as u64;
        let properties = properties(context.device());
        let mut handle = 0;
        // SAFETY: reads the properties, writes one handle.
        let created = unsafe { sys::cuMemCreate(&mut handle, self.chunk, &properties, 0) };
        context.check("cuMemCreate", created)?;
        let access = sys::CUmemAccessDesc {
            location: location(context.device()),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range lies in our reservation and nothing is mapped there yet; the handle is new.
        let mapped = unsafe { sys::cuMemMap(at, self.chunk, 0, handle, 0) };
        if let Err(error) = context.check("cuMemMap", mapped) {
            // SAFETY: the handle is ours and mapped nowhere.
            let _ = unsafe { sys::cuMemRelease(handle) };
            return Err(error);
        }
        // From here on it is ours to release, usable or not.
        chunks.push(handle);
        // SAFETY: the range was mapped just now.
        context.check("cuMemSetAccess", unsafe { sys::cuMemSetAccess(at, self.chunk, &access, 1) })
    }
}

impl AddressSpace for DeviceSpace {
    fn base(&self) -> *mut u8 {
        self.base as *mut u8
    }

    fn length(&self) -> usize {
        self.length
    }

    fn commit(&self, end: usize) -> std::result::Result<(), String> {
        let said = |error: DeviceError| error.to_string();
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        if chunks.len() * self.chunk < end {
            self.context.enter().map_err(said)?;
        }
        while chunks.len() * self.chunk < end {
            self.grow(&mut chunks).map_err(said)?;
        }
        Ok(())
    }

    fn on_host(&self) -> bool {
        false
    }
}

impl Drop for DeviceSpace {
    fn drop(&mut self) {
        // Work that still uses the memory must be over; a failure was reported by an earlier call.
        let _ = self.context.wait();
        let chunks = self.chunks.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (index, handle) in chunks.drain(..).enumerate() {
            let at = self.base + (index * self.chunk) as u64;
            // SAFETY: mapped in `grow`, and no block is left: each holds the arena that owns this space.
            unsafe {
                let _ = sys::cuMemUnmap(at, self.chunk);
                let _ = sys::cuMemRelease(handle);
            }
        }
        // SAFETY: reserved in `reserve`, with nothing mapped any more.
        let _ = unsafe { sys::cuMemAddressFree(self.base, self.length) };
    }
}
