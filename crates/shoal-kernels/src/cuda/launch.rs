//! Loaded kernels and how they are started: a kernel's name, its grid, and its parameters in order. The
//! parameters' types are checked against nothing but the reader's eye, so each launch stands next to the
//! asserts that make it sound, and the tests call every kernel.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::compile::Image;
use super::context::{Context, failed};
use super::flash;
use crate::device::{DropoutSite, Result};
use crate::tensor::Tensor;

/// Threads of a block wherever the kernel does not say otherwise.
pub(super) const THREADS: usize = 256;

/// All kernels that are launched by name.
const KERNELS: &[&str] = &[
    "gelu",
    "gelu_backward",
    "swiglu",
    "swiglu_backward",
    "rotary",
    "dropout",
    "prefill",
    "set_scalar",
    "norm_forward",
    "norm_again",
    "norm_input_gradient",
    "column_sums",
    "norm_weight_sums",
    "embed",
    "embed_gradient",
    "position_gradient",
    "cross_entropy",
    "add_losses",
    "squares",
    "add_parts",
    "adamw",
    "sgd",
    "attention_64_64",
    "attention_32_128",
    "attention_16_256",
    "attention_delta",
    "query_gradient_32_64",
    "query_gradient_32_128",
    "query_gradient_16_128",
    "query_gradient_16_256",
    "key_value_gradient_32_64",
    "key_value_gradient_32_128",
    "key_value_gradient_16_128",
    "key_value_gradient_16_256",
];

/// What a kernel may take as a parameter: plain data of the size and layout the kernel declares.
///
/// # Safety
/// The type is what the kernels call by the name in the comment.
pub(super) unsafe trait Parameter: Copy {}

/// A device address, null for none.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Address(pub(super) u64);

/// `Dropout` of common.cu.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct DropoutParameter {
    key: u64,
    first_sample: u64,
    threshold: u32,
    scale: f32,
}

impl From<Option<DropoutSite>> for DropoutParameter {
    fn from(site: Option<DropoutSite>) -> DropoutParameter {
        match site {
            Some(site) => DropoutParameter {
                key: site.key,
                first_sample: site.first_sample,
                threshold: (f64::from(site.rate) * 4_294_967_296.0) as u32,
                scale: 1.0 / (1.0 - site.rate),
            },
            // Every hash is at least 0: nothing is dropped.
            None => DropoutParameter { key: 0, first_sample: 0, threshold: 0, scale: 1.0 },
        }
    }
}

// SAFETY: a pointer.
unsafe impl Parameter for Address {}
// SAFETY: i64; sizes fit its positive half.
unsafe impl Parameter for usize {}
// SAFETY: int.
unsafe impl Parameter for i32 {}
// SAFETY: float.
unsafe impl Parameter for f32 {}
// SAFETY: double.
unsafe impl Parameter for f64 {}
// SAFETY: struct Dropout.
unsafe impl Parameter for DropoutParameter {}

/// Where the driver reads a parameter from; the parameter must outlive the launch, which copies it.
pub(super) fn parameter<P: Parameter>(value: &P) -> *mut c_void {
    std::ptr::from_ref(value).cast_mut().cast()
}

impl Tensor {
    /// Where the tensor lies on the device, from element `offset` on.
    pub(super) fn at(&self, offset: usize) -> Address {
        Address(self.address() as u64 + (self.element().bytes() * offset) as u64)
    }
}

pub(super) fn at_or_null(tensor: Option<&Tensor>) -> Address {
    tensor.map_or(Address(0), |tensor| tensor.at(0))
}

/// Blocks and threads of a launch.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    pub(super) blocks: [usize; 3],
    pub(super) threads: [usize; 2],
    pub(super) shared_bytes: usize,
}

impl Grid {
    /// One block for each of `count`.
    pub(super) fn blocks(count: usize) -> Grid {
        Grid { blocks: [count, 1, 1], threads: [THREADS, 1], shared_bytes: 0 }
    }
}

/// The kernels, loaded on one device.
pub(super) struct Kernels {
    context: Arc<Context>,
    module: sys::CUmodule,
    functions: HashMap<&'static str, sys::CUfunction>,
}

// SAFETY: handles of the driver, which may be used from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Loads the kernels; machine code from the disk that does not load is compiled again.
    pub(super) fn load(
        context: Arc<Context>,
        capability: (i32, i32),
        shared_bytes: usize,
    ) -> Result<Kernels> {
        context.enter()?;
        let load = |image: &Image| {
            // SAFETY: the image is machine code, or PTX with its final zero, made by the compiler.
            unsafe { result::module::load_data(image.bytes.as_ptr().cast()) }
                .map_err(|error| failed(context.name(), "cuModuleLoadData", error))
        };
        let image = Image::get(capability)?;
        let module = match load(&image) {
            Err(_) if image.cached => load(&Image::fresh(capability)?)?,
            loaded => loaded?,
        };
        let mut kernels = Kernels { context: context.clone(), module, functions: HashMap::new() };
        for name in KERNELS.iter().chain(flash::names()) {
            let device = context.name();
            let refused = |call| move |error| failed(device, call, error);
            let symbol = CString::new(*name).expect("a kernel's name has no zero byte");
            // SAFETY: the module is loaded.
            let function = unsafe { result::module::get_function(module, symbol) }
                .map_err(refused("cuModuleGetFunction"))?;
            if name.contains("attention_") || name.contains("gradient_") {
                let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                // SAFETY: the function was found just now.
                unsafe { result::function::set_function_attribute(function, most, shared_bytes as i32) }
                    .map_err(refused("cuFuncSetAttribute"))?;
            }
            kernels.functions.insert(name, function);
        }
        Ok(kernels)
    }

    /// Starts a kernel on the stream.
    ///
    /// # Safety
    /// The parameters are those the kernel declares, and what it does with them stays inside memory that
    /// the caller may use so.
    pub(super) unsafe fn launch(
        &self,
        name: &'static str,
        grid: Grid,
        parameters: &mut [*mut c_void],
    ) -> Result {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        self.context.enter()?;
        let function = self.functions[name];
        let [x, y, z] = grid.blocks.map(|blocks| u32::try_from(blocks).expect("a grid of 32 bits"));
        let [width, height] = grid.threads.map(|threads| threads as u32);
        // SAFETY: by this function's contract; the stream and the module live as long as `self`.
        let launched = unsafe {
            sys::cuLaunchKernel(
                function,
                x,
                y,
                z,
                width,
                height,
                1,
                grid.shared_bytes as u32,
                self.context.stream(),
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.context.check(name, launched)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let _ = self.context.wait();
        // SAFETY: loaded in `load`; no kernel of it runs any more.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

/// Starts a kernel of a `CudaDevice`: `launch!(device, "name", grid, parameters...)`.
macro_rules! launch {
    ($device:expr, $name:literal, $grid:expr, $($value:expr),+ $(,)?) => {
        $device.kernels.launch($name, $grid, &mut [$($crate::cuda::launch::parameter(&$value)),+])
    };
}
pub(super) use launch;
