//! The driver's context of one GPU and the stream that all its work goes through. One stream, in order:
//! a block that is freed and taken again is used by later work only, so the arena needs no events.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use cudarc::driver::{DriverError, result, sys};

use super::profile::Profile;
use super::recording::while_nothing_is_recorded;
use crate::device::{DeviceError, Result};
use crate::tensor::Element;

/// The driver's first version that has all we call.
const OLDEST_DRIVER: i32 = 12000;

/// What becomes of what is queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Queueing {
    Direct,
    /// It is noted down.
    Captured,
    /// Nothing: it was noted down before.
    Replayed,
}

/// A GPU, opened.
pub(super) struct Context {
    name: String,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    pub(super) profile: Profile,
    /// Waits are numbered, because several threads may be in one at a time.
    waits_begun: AtomicU64,
    waits_over: AtomicU64,
    /// A [`Queueing`].
    queueing: AtomicU8,
}

// SAFETY: the driver's handles may be used from any thread; each call makes the context current first.
unsafe impl Send for Context {}
// SAFETY: as above; the driver orders concurrent calls on a stream itself.
unsafe impl Sync for Context {}

/// What a device can do, as the driver says.
#[derive(Clone, Debug)]
pub struct GpuFacts {
    /// The model, for people.
    pub model: String,
    /// Major and minor, as in sm_90.
    pub capability: (i32, i32),
    /// Those that this process may use.
    pub multiprocessors: usize,
    /// Whether it is shared with other processes (NVIDIA's MPS), and this one perhaps has a part of it only.
    pub is_shared: bool,
    pub memory_bytes: u64,
    /// Bytes of shared memory that a block may ask for.
    pub shared_bytes: usize,
}

impl GpuFacts {
    /// Whether layers can compute with elements of this kind: whether there are products of them.
    pub fn computes(&self, element: Element) -> bool {
        match element {
            Element::F32 => true,
            Element::F16 => self.capability >= (6, 0),
            Element::Bf16 => self.capability >= (8, 0),
        }
    }
}

/// Initialises the driver, once it is sure to be there; false where it says that there is no GPU.
fn start_driver() -> Result<bool> {
    // SAFETY: only asks whether the library can be loaded.
    if !unsafe { sys::is_culib_present() } {
        return Err(DeviceError::NoLibrary { library: "libcuda.so.1", part: "the NVIDIA driver" });
    }
    match result::init() {
        Ok(()) => {}
        // A driver without a GPU, or with all of them hidden by CUDA_VISIBLE_DEVICES.
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Ok(false),
        Err(error) => return Err(failed("cuda", "cuInit", error)),
    }
    needs_driver(OLDEST_DRIVER)?;
    Ok(true)
}

/// An error where the driver is older than some version.
pub(super) fn needs_driver(needed: i32) -> Result {
    let mut found = 0;
    // SAFETY: writes one integer.
    check("cuda", "cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut found) })?;
    if found < needed { Err(DeviceError::OldDriver { found, needed }) } else { Ok(()) }
}

/// GPUs of this machine; an error says why none can be used.
pub(super) fn count() -> Result<usize> {
    if !start_driver()? {
        return Ok(0);
    }
    match result::device::get_count() {
        Ok(count) => Ok(count as usize),
        Err(error) => Err(failed("cuda", "cuDeviceGetCount", error)),
    }
}

/// A driver's refusal as our error.
pub(super) fn failed(device: &str, call: &'static str, error: DriverError) -> DeviceError {
    let system = match (error.error_name(), error.error_string()) {
        (Ok(name), Ok(text)) => format!("{}: {}", name.to_string_lossy(), text.to_string_lossy()),
        _ => format!("{:?}", error.0),
    };
    DeviceError::Driver { device: device.into(), call, system }
}

pub(super) fn check(device: &str, call: &'static str, result: sys::CUresult) -> Result {
    result.result().map_err(|error| failed(device, call, error))
}

impl Context {
    pub(super) fn open(name: &str, ordinal: usize) -> Result<Arc<Context>> {
        let found = count()?;
        if ordinal >= found {
            return Err(DeviceError::NoGpu { asked: ordinal, found });
        }
        let refused = |call| move |error| failed(name, call, error);
        let device = result::device::get(ordinal as i32).map_err(refused("cuDeviceGet"))?;
        // SAFETY: the device comes from the driver; it is released when `Context` is dropped.
        let context =
            unsafe { result::primary_ctx::retain(device) }.map_err(refused("cuDevicePrimaryCtxRetain"))?;
        // From here on, dropping gives back what was taken.
        let mut opened = Context {
            name: name.into(),
            device,
            context,
            stream: std::ptr::null_mut(),
            profile: Profile::default(),
            waits_begun: AtomicU64::new(0),
            waits_over: AtomicU64::new(0),
            queueing: AtomicU8::new(Queueing::Direct as u8),
        };
        opened.enter()?;
        opened.stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(refused("cuStreamCreate"))?;
        Ok(Arc::new(opened))
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn device(&self) -> sys::CUdevice {
        self.device
    }

    pub(super) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    pub(super) fn check(&self, call: &'static str, result: sys::CUresult) -> Result {
        check(&self.name, call, result)
    }

    /// Makes the context current on this thread.
    pub(super) fn enter(&self) -> Result {
        // SAFETY: the context is retained for as long as `self` lives.
        unsafe { result::ctx::set_current(self.context) }
            .map_err(|error| failed(&self.name, "cuCtxSetCurrent", error))
    }

    pub(super) fn facts(&self) -> Result<GpuFacts> {
        use sys::CUdevice_attribute as Attribute;
        let attribute = |what| {
            // SAFETY: the device comes from the driver.
            unsafe { result::device::get_attribute(self.device, what) }
                .map_err(|error| failed(&self.name, "cuDeviceGetAttribute", error))
        };
        let model = result::device::get_name(self.device)
            .map_err(|error| failed(&self.name, "cuDeviceGetName", error))?;
        // SAFETY: as above.
        let memory_bytes = unsafe { result::device::total_mem(self.device) }
            .map_err(|error| failed(&self.name, "cuDeviceTotalMem", error))?
            as u64;
        Ok(GpuFacts {
            model,
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize,
            // Drivers that do not know the question are older than the library that needs the answer.
            is_shared: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED).is_ok_and(|shared| shared != 0),
            memory_bytes,
            shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
                as usize,
        })
    }

    /// Bytes free on the card now.
    pub(super) fn free_bytes(&self) -> Result<u64> {
        self.enter()?;
        let (free, _) = result::mem_get_info().map_err(|error| failed(&self.name, "cuMemGetInfo", error))?;
        Ok(free as u64)
    }

    /// Waits for everything asked so far; errors of earlier kernels come out here.
    pub(super) fn wait(&self) -> Result {
        self.enter()?;
        let number = self.waits_begun.fetch_add(1, Ordering::SeqCst) + 1;
        // SAFETY: the stream lives as long as `self`.
        self.check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream) })?;
        self.waits_over.fetch_max(number, Ordering::SeqCst);
        Ok(())
    }

    /// The number of the last wait that was begun. What was queued before this call is over once a wait of a
    /// higher number is.
    pub(super) fn waits_begun(&self) -> u64 {
        self.waits_begun.load(Ordering::SeqCst)
    }

    /// The highest number of a wait that is over.
    pub(super) fn waits_over(&self) -> u64 {
        self.waits_over.load(Ordering::SeqCst)
    }

    pub(super) fn set_queueing(&self, queueing: Queueing) {
        self.queueing.store(queueing as u8, Ordering::Relaxed);
    }

    /// Whether what is queued now is done as it comes.
    pub(super) fn is_direct(&self) -> bool {
        self.queueing.load(Ordering::Relaxed) == Queueing::Direct as u8
    }

    /// Whether what would be queued now was noted down before.
    pub(super) fn is_replayed(&self) -> bool {
        self.queueing.load(Ordering::Relaxed) == Queueing::Replayed as u8
    }

    /// From here on what this thread queues is noted down.
    pub(super) fn begin_capture(&self) -> Result {
        self.enter()?;
        // Other calls of ours (memory for the arena, libraries' own) go on meanwhile.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives as long as `self`.
        self.check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) })?;
        self.set_queueing(Queueing::Captured);
        Ok(())
    }

    /// What was noted down.
    pub(super) fn end_capture(&self) -> Result<sys::CUgraph> {
        self.enter()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: writes one handle; the stream lives as long as `self`.
        let ended = unsafe { sys::cuStreamEndCapture(self.stream, &mut graph) };
        self.check("cuStreamEndCapture", ended)?;
        Ok(graph)
    }

    /// Copies host memory over in the stream's order. The driver has read `from` when this returns: memory
    /// that is not pinned is staged first.
    ///
    /// # Safety
    /// `to` is device memory of at least that many bytes.
    pub(super) unsafe fn copy_in<T: Copy>(&self, to: u64, from: &[T]) -> Result {
        if from.is_empty() {
            return Ok(());
        }
        // A graph would read `from` when it is gone.
        let queueing = self.queueing.load(Ordering::Relaxed);
        assert_eq!(queueing, Queueing::Direct as u8, "what is noted down copies nothing from the host");
        self.enter()?;
        let (source, bytes) = (from.as_ptr().cast::<c_void>(), size_of_val(from));
        // SAFETY: `from` is that long; `to` by this function's contract.
        self.check("cuMemcpyHtoD", unsafe { sys::cuMemcpyHtoDAsync_v2(to, source, bytes, self.stream) })
    }

    /// Copies device memory to the host and waits for it.
    ///
    /// # Safety
    /// `from` is device memory of at least that many bytes.
    pub(super) unsafe fn copy_out<T: Copy>(&self, to: &mut [T], from: u64) -> Result {
        if to.is_empty() {
            return Ok(());
        }
        self.enter()?;
        let (target, bytes) = (to.as_mut_ptr().cast::<c_void>(), size_of_val(to));
        // SAFETY: `to` is that long and borrowed until the wait below is over; `from` by the contract.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(target, from, bytes, self.stream) };
        self.check("cuMemcpyDtoH", copied)?;
        self.wait()
    }

    /// Clears `words` 4-byte elements.
    ///
    /// # Safety
    /// `at` is device memory of at least that many elements.
    pub(super) unsafe fn clear(&self, at: u64, words: usize) -> Result {
        if words == 0 || self.is_replayed() {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: by this function's contract.
        self.check("cuMemsetD32", unsafe { sys::cuMemsetD32Async(at, 0, words, self.stream) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // What fails now has been reported by an earlier call, or has nobody left to hear it.
        let _ = self.enter();
        if !self.stream.is_null() {
            // SAFETY: nobody else has the stream.
            let _ = unsafe { result::stream::destroy(self.stream) };
        }
        // SAFETY: retained in `open`, released once.
        let _ = while_nothing_is_recorded(|| unsafe { result::primary_ctx::release(self.device) });
    }
}
