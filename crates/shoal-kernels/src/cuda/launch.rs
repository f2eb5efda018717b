//! Loaded kernels and how they are started: a kernel's name, its grid, and its parameters in order. The
//! parameters' types are checked against nothing but the reader's eye, so each launch stands next to the
//! asserts that make it sound, and the tests call every kernel.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{result, sys};

use super::compile::{Image, Unit};
use super::context::{Context, failed};
use super::recording::while_nothing_is_recorded;
use crate::device::{DropoutSite, Result};
use crate::tensor::{Element, Tensor};

/// Threads of a block wherever the kernel does not say otherwise: THREADS of common.cu.
pub(super) const THREADS: usize = 256;
/// AHEAD of elementwise.cu.
const AHEAD: usize = 2;

/// How a kernel is called that there is for each kind of element: `name_f32`, `name_bf16`, `name_f16`.
fn symbol(name: &str, element: Option<Element>) -> String {
    match element {
        None => name.into(),
        Some(Element::F32) => format!("{name}_f32"),
        Some(Element::Bf16) => format!("{name}_bf16"),
        Some(Element::F16) => format!("{name}_f16"),
    }
}

/// Whether a kernel may ask for more shared memory than every kernel gets.
fn takes_much_shared(name: &str) -> bool {
    ["attention_", "query_gradient_", "key_value_gradient_", "flash_", "cross_entropy"]
        .iter()
        .any(|start| name.starts_with(start))
}

/// Elements that a thread moves at once: `Piece::SIZE` of common.cu.
pub(super) const fn piece(element: Element) -> usize {
    16 / element.bytes()
}

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
    step: Address,
    threshold: u32,
    scale: f32,
}

impl From<Option<DropoutSite<'_>>> for DropoutParameter {
    fn from(site: Option<DropoutSite>) -> DropoutParameter {
        match site {
            Some(site) => DropoutParameter {
                key: site.key,
                first_sample: site.first_sample,
                step: at_or_null(site.step),
                threshold: (f64::from(site.rate) * 4_294_967_296.0) as u32,
                scale: 1.0 / (1.0 - site.rate),
            },
            // Every hash is at least 0: nothing is dropped.
            None => DropoutParameter { key: 0, first_sample: 0, step: Address(0), threshold: 0, scale: 1.0 },
        }
    }
}

// SAFETY: a pointer.
unsafe impl Parameter for Address {}
// SAFETY: i64; sizes fit its positive half.
unsafe impl Parameter for usize {}
// SAFETY: int.
unsafe impl Parameter for i32 {}
// SAFETY: u32.
unsafe impl Parameter for u32 {}
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

    /// One warp for each of `count`.
    pub(super) fn warps(count: usize) -> Grid {
        Grid::blocks(count.div_ceil(THREADS / 32))
    }

    /// As many blocks as it takes for each thread to have `each` pieces of `count` elements.
    pub(super) fn pieces(count: usize, element: Element, each: usize) -> Grid {
        Grid::blocks(count.div_ceil(each * THREADS * piece(element)))
    }

    /// For `walk` of elementwise.cu.
    pub(super) fn walk(count: usize, element: Element) -> Grid {
        Grid::pieces(count, element, AHEAD)
    }
}

/// The kernels, loaded on one device: those that every training step uses at once, others when first asked
/// for, because compiling them takes a while and most runs never do.
pub(super) struct Kernels {
    context: Arc<Context>,
    capability: (i32, i32),
    shared_bytes: usize,
    loaded: Mutex<Loaded>,
}

#[derive(Default)]
struct Loaded {
    modules: HashMap<Unit, sys::CUmodule>,
    functions: HashMap<(&'static str, Option<Element>), sys::CUfunction>,
}

// SAFETY: handles of the driver, which may be used from any thread.
unsafe impl Send for Loaded {}

impl Kernels {
    pub(super) fn load(
        context: Arc<Context>,
        capability: (i32, i32),
        shared_bytes: usize,
    ) -> Result<Kernels> {
        // From the first module on, dropping unloads what is there.
        let kernels = Kernels { context, capability, shared_bytes, loaded: Mutex::default() };
        kernels.load_units(&mut kernels.loaded(), &Unit::FIRST)?;
        Ok(kernels)
    }

    fn loaded(&self) -> MutexGuard<'_, Loaded> {
        // Modules and functions are inserted whole or not at all.
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads units; machine code from the disk that does not load is compiled again.
    fn load_units(&self, loaded: &mut Loaded, units: &[Unit]) -> Result {
        self.context.enter()?;
        let load = |image: &Image| {
            // SAFETY: the image is machine code, or PTX with its final zero, made by the compiler.
            unsafe { result::module::load_data(image.bytes.as_ptr().cast()) }
                .map_err(|error| failed(self.context.name(), "cuModuleLoadData", error))
        };
        for image in Image::all(self.capability, units)? {
            let module = match load(&image) {
                Err(_) if image.cached => load(&image.fresh()?)?,
                loaded => loaded?,
            };
            loaded.modules.insert(image.unit, module);
        }
        Ok(())
    }

    /// A kernel by name, looked up once.
    fn function(&self, name: &'static str, element: Option<Element>) -> Result<sys::CUfunction> {
        let mut loaded = self.loaded();
        if let Some(function) = loaded.functions.get(&(name, element)) {
            return Ok(*function);
        }
        let symbol = symbol(name, element);
        let unit = Unit::of(&symbol);
        if !loaded.modules.contains_key(&unit) {
            self.load_units(&mut loaded, &[unit])?;
        }
        let function = self.find(loaded.modules[&unit], name, symbol)?;
        loaded.functions.insert((name, element), function);
        Ok(function)
    }

    /// Looks a kernel up in its module, and lets it have the shared memory it may ask for.
    fn find(&self, module: sys::CUmodule, name: &str, symbol: String) -> Result<sys::CUfunction> {
        use sys::CUfunction_attribute as Attribute;
        let device = self.context.name();
        let refused = |call| move |error| failed(device, call, error);
        let symbol = CString::new(symbol).expect("a kernel's name has no zero byte");
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(module, symbol) }
            .map_err(refused("cuModuleGetFunction"))?;
        if takes_much_shared(name) {
            let fixed = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            let most = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let share = Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            // SAFETY: the function was found just now.
            let fixed_bytes = unsafe { result::function::get_function_attribute(function, fixed) }
                .map_err(refused("cuFuncGetAttribute"))?;
            // As much as there is, and no cache in its place: two blocks of the loss fit only so.
            for (attribute, value) in [(most, self.shared_bytes as i32 - fixed_bytes), (share, 100)] {
                // SAFETY: as above.
                unsafe { result::function::set_function_attribute(function, attribute, value) }
                    .map_err(refused("cuFuncSetAttribute"))?;
            }
        }
        Ok(function)
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
        // SAFETY: by this function's contract.
        unsafe { self.start(name, None, grid, parameters) }
    }

    /// The same for a kernel there is for each kind of element.
    ///
    /// # Safety
    /// As for `launch`; the tensors that the kernel declares by T hold such elements.
    pub(super) unsafe fn launch_of(
        &self,
        name: &'static str,
        element: Element,
        grid: Grid,
        parameters: &mut [*mut c_void],
    ) -> Result {
        // SAFETY: by this function's contract.
        unsafe { self.start(name, Some(element), grid, parameters) }
    }

    /// # Safety
    /// As for the two above.
    unsafe fn start(
        &self,
        name: &'static str,
        element: Option<Element>,
        grid: Grid,
        parameters: &mut [*mut c_void],
    ) -> Result {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        self.context.enter()?;
        let function = self.function(name, element)?;
        if self.context.is_replayed() {
            return Ok(());
        }
        let [x, y, z] = grid.blocks.map(|blocks| u32::try_from(blocks).expect("a grid of 32 bits"));
        let [width, height] = grid.threads.map(|threads| threads as u32);
        let parameters = parameters.as_mut_ptr();
        // SAFETY: by this function's contract; the stream and the module live as long as `self`.
        let launch = || unsafe {
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
                parameters,
                std::ptr::null_mut(),
            )
        };
        self.context.timed(|| name.into(), || self.context.check(name, launch()))
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let _ = self.context.wait();
        while_nothing_is_recorded(|| {
            for module in self.loaded().modules.values() {
                // SAFETY: loaded in `load`; no kernel of it runs any more.
                let _ = unsafe { result::module::unload(*module) };
            }
        });
    }
}

/// Starts a kernel of a `CudaDevice`: `launch!(device, "name", grid, parameters...)`, or
/// `launch!(device, "name" of element, grid, parameters...)` where there is one for each kind of element.
macro_rules! launch {
    ($device:expr, $name:tt of $element:expr, $grid:expr, $($value:expr),+ $(,)?) => {
        $device.kernels.launch_of(
            $name,
            $element,
            $grid,
            &mut [$($crate::cuda::launch::parameter(&$value)),+],
        )
    };
    ($device:expr, $name:literal, $grid:expr, $($value:expr),+ $(,)?) => {
        $device.kernels.launch($name, $grid, &mut [$($crate::cuda::launch::parameter(&$value)),+])
    };
}
pub(super) use launch;
