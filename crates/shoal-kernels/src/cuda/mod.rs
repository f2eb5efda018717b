//! The device operations on an NVIDIA GPU. Driver, cuBLASLt and NVRTC are loaded when a device is opened:
//! the same binary starts on machines that have none of them, and says what is missing.
//!
//! - [`context`]: the driver's context and the one stream, in whose order everything happens.
//! - [`space`]: addresses reserved at once, memory put behind them as the arena grows.
//! - [`compile`]: the kernels' source to machine code, kept on disk.
//! - [`launch`]: kernels by name.
//! - [`matrix`]: products by cuBLASLt, with what follows them; [`ranks`]: which of its answers is fastest.
//! - [`attention`]: which kernels attend: [`cudnn`]'s, those of [`flash`] on tensor cores, or plain ones.
//! - [`norm`], [`reduce`], [`embedding`], [`optimizer`]: operations of more than one kernel; the others stand
//!   in [`operations`].
//! - [`convolution`]: convolutions by [`cudnn`], or by products of gathered rows; [`pixels`]: what else is done
//!   to images.
//! - [`copies`]: bytes to and from the host's memory, beside what is computed.
//! - [`locked`]: host memory that is copied without the host's threads.
//! - [`landing`]: where scalars are read and integers sent.
//! - [`passes`]: what is done again and again, started at once.
//! - [`profile`]: how long each kernel takes, where someone asks.
//!
//! Operations return when they are queued; reading a number waits. Sums are made in an order that depends
//! on shapes alone, so the same operation gives the same bits every time; but for cuDNN's attention backward,
//! for some of its convolutions' gradients, and for products and convolutions whose algorithm was chosen by
//! measuring, none of which a deterministic device uses.

mod attention;
mod compile;
mod context;
mod convolution;
mod copies;
mod cudnn;
mod embedding;
mod flash;
mod images;
mod landing;
mod launch;
mod linear;
mod locked;
mod matrix;
mod norm;
mod operations;
mod optimizer;
mod passes;
mod pixels;
mod profile;
mod ranks;
mod recording;
mod reduce;
mod space;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use context::Context;
pub use context::GpuFacts;
use copies::Copies;
use cudnn::Cudnn;
use landing::{Departure, Landing};
use launch::{Grid, Kernels, THREADS};
use matrix::Blas;
use optimizer::Tables;
use passes::Passes;
use space::DeviceSpace;

use crate::device::Result;
use crate::memory::{Arena, reserve_bytes};
use crate::tensor::{Element, Tensor};

/// Elements of the reductions' partial sums: room for the backward of a wide norm, and for sorting a million
/// tokens.
const PARTS: usize = 1 << 22;

/// Counters of the blocks that are done, one for each strip of columns that several blocks sum.
const COUNTERS: usize = 256;

/// Blocks per multiprocessor of a kernel that walks its elements.
const BLOCKS_EACH: usize = 8;

/// One GPU.
pub struct CudaDevice {
    name: String,
    facts: GpuFacts,
    tf32: bool,
    deterministic: bool,
    arena: Arc<Arena>,
    kernels: Arc<Kernels>,
    blas: Arc<Blas>,
    /// Where it is installed.
    cudnn: Option<Arc<Cudnn>>,
    /// What libraries use for themselves, one call after the other.
    workspace: Tensor,
    /// Held while a call that uses the workspace is queued: it may be several kernels, between which another
    /// thread's must not come.
    workspace_use: Mutex<()>,
    /// Partial sums between the two stages of a reduction; locked until both are queued.
    parts: Mutex<Tensor>,
    /// All zero between kernels.
    counters: Tensor,
    tables: Tables,
    landing: Mutex<Landing>,
    departure: Mutex<Departure>,
    passes: Passes,
    copies: Copies,
    context: Arc<Context>,
}

/// What devices on the same GPU share.
struct Libraries {
    facts: GpuFacts,
    kernels: Arc<Kernels>,
    blas: Arc<Blas>,
    cudnn: Option<Arc<Cudnn>>,
    context: Arc<Context>,
}

/// The kind of element that all these tensors have.
fn element_of(tensors: &[&Tensor]) -> Element {
    let element = tensors[0].element();
    assert!(tensors.iter().all(|tensor| tensor.element() == element), "tensors of different elements");
    element
}

impl CudaDevice {
    /// Rows past which matrix products gain nothing more.
    pub const ROWS_ENOUGH: usize = 1 << 15;

    /// GPUs that can be opened; an error says what is missing.
    pub fn count() -> Result<usize> {
        context::count()
    }

    /// The widest attention head the GPU can train; ask before planning for it.
    pub fn head_size_max(facts: &GpuFacts) -> usize {
        attention::head_size_max(facts.shared_bytes)
    }

    /// Whether the kernels for such a GPU are on the disk; if not, opening one compiles them for some seconds.
    pub fn is_prepared(facts: &GpuFacts) -> Result<bool> {
        compile::Image::are_kept(facts.capability)
    }

    /// What the GPU is, and the bytes free on it, without opening it for work.
    pub fn probe(ordinal: usize) -> Result<(GpuFacts, u64)> {
        let context = Context::open(&format!("cuda:{ordinal}"), ordinal)?;
        Ok((context.facts()?, context.free_bytes()?))
    }

    /// A GPU with a memory budget in bytes, which may be less than the card has.
    pub fn new(name: &str, ordinal: usize, budget: u64) -> Result<CudaDevice> {
        let context = Context::open(name, ordinal)?;
        let facts = context.facts()?;
        let kernels = Kernels::load(context.clone(), facts.capability, facts.shared_bytes)?;
        let blas = Blas::new(context.clone())?;
        let cudnn = Cudnn::open(context.clone())?;
        let libraries = Libraries {
            facts,
            kernels: kernels.into(),
            blas: blas.into(),
            cudnn: cudnn.map(Arc::new),
            context,
        };
        CudaDevice::over(libraries, name, budget)
    }

    /// The same GPU with a budget of its own beside this one's.
    pub fn beside(&self, name: &str, budget: u64) -> Result<CudaDevice> {
        CudaDevice::over(self.libraries(), name, budget)
    }

    /// For as long as a call that uses the workspace is being queued.
    fn hold_workspace(&self) -> MutexGuard<'_, ()> {
        self.workspace_use.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn libraries(&self) -> Libraries {
        let (facts, context) = (self.facts.clone(), self.context.clone());
        let (kernels, blas, cudnn) = (self.kernels.clone(), self.blas.clone(), self.cudnn.clone());
        Libraries { facts, kernels, blas, cudnn, context }
    }

    fn over(libraries: Libraries, name: &str, budget: u64) -> Result<CudaDevice> {
        let Libraries { facts, kernels, blas, cudnn, context } = libraries;
        let space = DeviceSpace::reserve(context.clone(), reserve_bytes(budget))?;
        let arena = Arena::over(name, budget, Box::new(space), false);
        let counters = Tensor::new(&arena, "the counters of reductions", COUNTERS)?;
        // SAFETY: the tensor is that long, and ours.
        unsafe { context.clear(counters.at(0).0, COUNTERS) }?;
        Ok(CudaDevice {
            name: name.into(),
            facts,
            tf32: false,
            deterministic: false,
            workspace: Tensor::new(&arena, "the workspace of libraries", matrix::WORKSPACE_BYTES / 4)?,
            workspace_use: Mutex::new(()),
            parts: Mutex::new(Tensor::new(&arena, "the partial sums of reductions", PARTS)?),
            counters,
            tables: Tables::new(&arena)?,
            landing: Mutex::new(Landing::new(context.clone())?),
            departure: Mutex::new(Departure::new(context.clone())?),
            passes: Passes::default(),
            copies: Copies::new(context.clone()),
            arena,
            kernels,
            blas,
            cudnn,
            context,
        })
    }

    /// Lets fp32 products round their inputs to TF32.
    pub fn with_tf32(mut self, tf32: bool) -> CudaDevice {
        self.tf32 = tf32;
        self
    }

    /// Keeps to kernels that give the same bits every time.
    pub fn with_deterministic(mut self, deterministic: bool) -> CudaDevice {
        self.deterministic = deterministic;
        self
    }

    /// As on a machine that lacks cuDNN: our own kernels attend and convolve.
    pub fn without_cudnn(mut self) -> CudaDevice {
        self.cudnn = None;
        self
    }

    /// Bytes a device takes for itself.
    pub fn workspace_bytes() -> u64 {
        (matrix::WORKSPACE_BYTES + 4 * (PARTS + COUNTERS) + Tables::BYTES) as u64
    }

    fn parts(&self) -> MutexGuard<'_, Tensor> {
        // Scratch: whatever a panic left there is written before it is read.
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A grid that walks `count` elements.
    fn each(&self, count: usize) -> Grid {
        Grid::blocks(count.div_ceil(THREADS).min(BLOCKS_EACH * self.facts.multiprocessors))
    }
}
