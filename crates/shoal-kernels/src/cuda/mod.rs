//! The device operations on an NVIDIA GPU. Driver, cuBLAS and NVRTC are loaded when a device is opened: the
//! same binary starts on machines that have none of them, and says what is missing.
//!
//! - [`context`]: the driver's context and the one stream, in whose order everything happens.
//! - [`space`]: addresses reserved at once, memory put behind them as the arena grows.
//! - [`compile`]: the kernels' source to machine code, kept on disk.
//! - [`launch`]: kernels by name.
//! - [`matrix`]: products by cuBLAS, in plain fp32.
//! - [`reduce`], [`attention`]: operations of more than one kernel; the others stand in [`operations`].
//! - [`flash`]: attention on tensor cores, for elements of two bytes.
//!
//! Operations return when they are queued; reading a number waits. Sums are made in an order that depends
//! on shapes alone, so the same operation gives the same bits every time.

mod attention;
mod compile;
mod context;
#[cfg_attr(not(test), expect(dead_code))] // no operation asks for it yet
mod flash;
mod launch;
mod linear;
mod matrix;
mod operations;
mod reduce;
mod space;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use context::Context;
pub use context::GpuFacts;
use launch::{Grid, Kernels, THREADS};
use matrix::Blas;
use space::DeviceSpace;

use crate::device::Result;
use crate::memory::{Arena, reserve_bytes};
use crate::tensor::Tensor;

/// Elements of the reductions' partial sums.
const PARTS: usize = 1 << 20;

/// Blocks per multiprocessor of a kernel that walks its elements.
const BLOCKS_EACH: usize = 8;

/// One GPU.
pub struct CudaDevice {
    name: String,
    facts: GpuFacts,
    arena: Arc<Arena>,
    kernels: Kernels,
    blas: Mutex<Blas>,
    /// Partial sums between the two stages of a reduction; locked until both are queued.
    parts: Mutex<Tensor>,
    context: Arc<Context>,
}

impl CudaDevice {
    /// GPUs that can be opened; an error says what is missing.
    pub fn count() -> Result<usize> {
        context::count()
    }

    /// The widest attention head the GPU can train; ask before planning for it.
    pub fn head_size_max(facts: &GpuFacts) -> usize {
        attention::head_size_max(facts.shared_bytes)
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
        let space = DeviceSpace::reserve(context.clone(), reserve_bytes(budget))?;
        let arena = Arena::over(name, budget, Box::new(space), false);
        let workspace = Tensor::new(&arena, "the workspace of cuBLAS", matrix::WORKSPACE_BYTES / 4)?;
        let parts = Mutex::new(Tensor::new(&arena, "the partial sums of reductions", PARTS)?);
        let blas = Mutex::new(Blas::new(context.clone(), workspace)?);
        Ok(CudaDevice { name: name.into(), facts, arena, kernels, blas, parts, context })
    }

    /// Bytes a device takes for itself.
    pub fn workspace_bytes() -> u64 {
        (matrix::WORKSPACE_BYTES + 4 * PARTS) as u64
    }

    fn blas(&self) -> MutexGuard<'_, Blas> {
        // The handle holds no state between calls that a panic could leave half made.
        self.blas.lock().unwrap_or_else(PoisonError::into_inner)
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
