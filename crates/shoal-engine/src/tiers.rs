//! The memories around a device: its own, its host's, a folder on its disk, and where messages wait on their way to or from
//! others. What is copied between two of them is copied here, by the device itself where it can.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use shoal_kernels::{Arena, CpuDevice, Device, HostBuffer, Mark, Tensor};
use shoal_plan::Tier;

use crate::error::Result;

/// The memories of a device: its own, its host's, and a folder on its host's disk.
#[derive(Clone)]
pub struct Tiers {
    pub device: Arc<dyn Device>,
    /// Keeps and updates what lies in host memory.
    pub host: Arc<CpuDevice>,
    pub disk: Arc<Path>,
    /// Where messages wait: beside every budget, since they are there for moments.
    messages: Arc<Arena>,
}

/// Addresses for messages; larger ones have memory of their own.
const MESSAGES_BYTES: u64 = 64 << 30;

/// The memory of a device's messages.
fn message_room(device: &dyn Device) -> Result<Arc<Arena>> {
    match device.host_arena("messages", MESSAGES_BYTES) {
        Ok(arena) => Ok(arena),
        // Where so many addresses are not to be had, each message has memory of its own.
        Err(_) => Ok(Arena::new("messages", 0)?),
    }
}

impl Tiers {
    /// A device, what keeps its host's memory, and a folder on its disk.
    pub fn new(device: Arc<dyn Device>, host: Arc<CpuDevice>, disk: &Path) -> Result<Tiers> {
        let messages = message_room(&*device)?;
        Ok(Tiers { device, host, disk: disk.into(), messages })
    }

    /// A device whose state is all in its own memory needs no other; what is asked of them is refused.
    pub fn only(device: Arc<dyn Device>) -> Result<Tiers> {
        Tiers::with_room(device, 0)
    }

    /// The same, with so many bytes of its host's memory for copies of its state.
    pub fn with_room(device: Arc<dyn Device>, host_bytes: u64) -> Result<Tiers> {
        let arena = Arena::new("host", host_bytes + CpuDevice::workspace_bytes(1))?;
        let host = Arc::new(CpuDevice::with_arena(arena, 1)?);
        Tiers::new(device, host, Path::new(""))
    }

    /// A device with so many bytes of its host's memory, which so many of the host's threads take care of, and a folder on
    /// its disk.
    pub fn around(
        device: Arc<dyn Device>,
        host: &str,
        threads: usize,
        host_bytes: u64,
        disk: &Path,
    ) -> Result<Tiers> {
        let arena = device.host_arena(host, host_bytes + CpuDevice::workspace_bytes(threads))?;
        let host = Arc::new(CpuDevice::with_arena(arena, threads)?);
        Tiers::new(device, host, disk)
    }

    /// Copies some elements from host memory to the device's own, from element `first` on.
    pub(crate) fn copy_in(
        &self,
        after: &Mark,
        from: &Tensor,
        elements: Range<usize>,
        to: &mut Tensor,
        first: usize,
    ) -> Result {
        if self.device.copy_in(after, from, elements.clone(), to, first)? {
            return Ok(());
        }
        let there = first..first + elements.len();
        let bytes = self.host.host_bytes(&Mark::default(), from, elements)?;
        Ok(self.device.write_bytes(after, to, there, &mut |at, out| {
            self.host.copy(&bytes[at..at + out.len()], out);
        })?)
    }

    /// Copies some elements from the device's memory to its host's, from element `first` on.
    pub(crate) fn copy_out(
        &self,
        after: &Mark,
        from: &Tensor,
        elements: Range<usize>,
        to: &mut Tensor,
        first: usize,
    ) -> Result {
        if self.device.copy_out(after, from, elements.clone(), to, first)? {
            return Ok(());
        }
        let (there, mut read) = (first..first + elements.len(), Ok(()));
        self.host.write_bytes(&Mark::default(), to, there, &mut |_, out| {
            read = self.device.read_bytes(after, from, elements.clone(), &mut |at, bytes| {
                self.host.copy(bytes, &mut out[at..at + bytes.len()]);
            });
        })?;
        Ok(read?)
    }

    /// Room for a message of so many bytes.
    pub(crate) fn message(&self, bytes: usize) -> HostBuffer {
        HostBuffer::new(&self.messages, bytes)
    }

    /// Copies some elements of a tensor in some memory into a message, from byte `first` on.
    pub(crate) fn write_message(
        &self,
        (tier, after): (Tier, &Mark),
        from: &Tensor,
        elements: Range<usize>,
        message: &mut HostBuffer,
        first: usize,
    ) -> Result {
        if tier == Tier::Device
            && self.device.copy_to_buffer(after, from, elements.clone(), message, first)?
        {
            return Ok(());
        }
        let out = &mut message[first..];
        Ok(self.of(tier).read_bytes(after, from, elements, &mut |at, bytes| {
            self.host.copy(bytes, &mut out[at..at + bytes.len()]);
        })?)
    }

    /// Copies what stands in a message from byte `first` on into some elements of a tensor in some memory.
    pub(crate) fn read_message(
        &self,
        (tier, after): (Tier, &Mark),
        message: &HostBuffer,
        first: usize,
        to: &mut Tensor,
        elements: Range<usize>,
    ) -> Result {
        if tier == Tier::Device
            && self.device.copy_from_buffer(after, message, first, to, elements.clone())?
        {
            return Ok(());
        }
        let bytes = &message[first..];
        Ok(self.of(tier).write_bytes(after, to, elements, &mut |at, out| {
            self.host.copy(&bytes[at..at + out.len()], out);
        })?)
    }

    /// What keeps memory of a kind.
    pub fn of(&self, tier: Tier) -> &dyn Device {
        match tier {
            Tier::Device => &*self.device,
            Tier::Host | Tier::Disk => &*self.host,
        }
    }
}
