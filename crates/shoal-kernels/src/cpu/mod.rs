//! The device operations on the cores of this machine. Work is cut into pieces that do not depend on
//! timing (rows, columns or heads), so the same operation gives the same bits every time.
//!
//! Vector code is written as plain loops that [`vector`] compiles once per instruction set and picks at
//! start; the shapes of the loops (fixed-width accumulators, branch-free functions) are chosen so that the
//! compiler turns them into full-width instructions.

mod activation;
mod attention;
mod dropout;
mod embedding;
mod linear;
mod loss;
mod math;
mod matrix;
mod norm;
mod operations;
mod optimizer;
mod rotary;
mod vector;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rayon::ThreadPool;
use vector::InstructionSet;

use crate::memory::{Arena, MemoryError};
use crate::tensor::Tensor;

/// Elements of one thread's score tiles: the backward has two.
const SCORES: usize = 2 * attention::QUERIES * attention::KEYS;

/// The cores of this machine, or some of them, as one device.
pub struct CpuDevice {
    name: String,
    arena: Arc<Arena>,
    pool: ThreadPool,
    arch: InstructionSet,
    /// Score tiles, one set per thread: taken once, so that no operation's footprint depends on the threads.
    scratch: Vec<Mutex<Tensor>>,
}

impl CpuDevice {
    /// A device of `threads` threads with a memory budget in bytes.
    pub fn new(name: &str, threads: usize, budget: u64) -> Result<CpuDevice, MemoryError> {
        CpuDevice::with_arena(Arena::new(name, budget)?, threads)
    }

    /// A device on an arena of the caller's.
    pub fn with_arena(arena: Arc<Arena>, threads: usize) -> Result<CpuDevice, MemoryError> {
        let name = arena.device().to_owned();
        let label = name.clone();
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(move |index| format!("{label} {index}"))
            .build()
            .expect("the system can start the device's threads");
        let scratch = (0..threads.max(1))
            .map(|_| Tensor::new(&arena, "the score tiles of attention", SCORES).map(Mutex::new))
            .collect::<Result<_, _>>()?;
        Ok(CpuDevice { name, arena, pool, arch: InstructionSet::detect(), scratch })
    }

    /// Bytes a device of `threads` threads takes for itself.
    pub fn workspace_bytes(threads: usize) -> u64 {
        (threads.max(1) * SCORES * 4) as u64
    }

    /// The running thread's score tiles.
    fn scratch(&self) -> MutexGuard<'_, Tensor> {
        let thread = self.pool.current_thread_index().expect("operations run inside the device's pool");
        self.scratch[thread].lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// The instruction set in use, for people.
    pub fn instruction_set() -> &'static str {
        InstructionSet::detect().name()
    }
}

/// Cuts `0..total` into at most `parts` ranges whose lengths are multiples of `unit` (but for the last).
fn cut(total: usize, parts: usize, unit: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let step = total.div_ceil(parts.max(1)).next_multiple_of(unit).max(unit);
    (0..total).step_by(step).map(move |start| start..(start + step).min(total))
}
