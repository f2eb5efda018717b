//! Updates of all tensors at once, and the norm they are clipped by. The tensors' addresses go to the device
//! in a table, which is sent again only when it is another one: a training step's is always the same.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::launch::{Address, Grid, Parameter, at_or_null, launch};
use super::{CudaDevice, PARTS};
use crate::device::{AdamW, Guard, Result, SCALAR_ELEMENTS, Sgd, Updated};
use crate::memory::{Arena, MemoryError};
use crate::tensor::{Element, Tensor};

/// Tensors of one launch.
const ENTRIES: usize = 8192;
/// Words of eight bytes of an entry: `Squared` and `Updated` of optimizer.cu.
const SQUARED_WORDS: usize = 3;
const UPDATED_WORDS: usize = 8;
/// Elements of a block: CHUNK of optimizer.cu.
const CHUNK: usize = 1 << 14;

/// A table on the device, and what was last sent there.
struct Table {
    memory: Tensor,
    held: Vec<u64>,
}

/// The tables of norms, of updates and of statistics that follow their batches, each behind its lock until the
/// kernels that read it are queued.
pub(super) struct Tables {
    squared: Mutex<Table>,
    updated: Mutex<Table>,
    following: Mutex<Table>,
}

impl Tables {
    /// Bytes of all.
    pub(super) const BYTES: usize = 8 * ENTRIES * (SQUARED_WORDS + 2 * UPDATED_WORDS);

    pub(super) fn new(arena: &Arc<Arena>) -> std::result::Result<Tables, MemoryError> {
        let table = |words: usize| {
            let memory = Tensor::new(arena, "the table of tensors", 2 * ENTRIES * words)?;
            Ok(Mutex::new(Table { memory, held: Vec::new() }))
        };
        let (squared, updated) = (table(SQUARED_WORDS)?, table(UPDATED_WORDS)?);
        Ok(Tables { squared, updated, following: table(UPDATED_WORDS)? })
    }
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    // What is held is set after it was sent, so a panic between leaves a table that is sent once more.
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `Guard` of optimizer.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct GuardParameter {
    norm_squared: Address,
    loss: Address,
    scale: f32,
    clip: f32,
}

// SAFETY: struct Guard.
unsafe impl Parameter for GuardParameter {}

impl From<Guard<'_>> for GuardParameter {
    fn from(guard: Guard) -> GuardParameter {
        assert_eq!((guard.norm_squared.len(), guard.loss.len()), (SCALAR_ELEMENTS, SCALAR_ELEMENTS));
        GuardParameter {
            norm_squared: guard.norm_squared.at(0),
            loss: guard.loss.at(0),
            scale: guard.scale,
            clip: guard.clip_norm.unwrap_or(f32::INFINITY),
        }
    }
}

/// `AdamW` of optimizer.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct AdamWParameter {
    lr: f64,
    step: f32,
    root_correction: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
}

// SAFETY: struct AdamW.
unsafe impl Parameter for AdamWParameter {}

/// `Updated` of optimizer.cu, of the block's first chunk on.
fn entry(updated: &Updated, states: std::ops::RangeInclusive<usize>, first_chunk: usize) -> [u64; 8] {
    let count = updated.parameter.len();
    assert!(states.contains(&updated.state.len()), "an update with {} states", updated.state.len());
    assert!(updated.gradient.len() >= count && updated.gradient.element() == Element::F32);
    for tensor in std::iter::once(&*updated.parameter).chain(updated.state.iter()) {
        assert_eq!((tensor.len(), tensor.element()), (count, Element::F32));
    }
    let copy = updated.copy.as_deref();
    assert!(copy.is_none_or(|copy| copy.len() >= count));
    // COPY_NONE and what follows it.
    let kind: u64 = match copy.map(Tensor::element) {
        None => 0,
        Some(Element::F32) => 1,
        Some(Element::Bf16) => 2,
        Some(Element::F16) => 3,
    };
    [
        updated.gradient.at(0).0,
        updated.parameter.at(0).0,
        at_or_null(updated.state.first()).0,
        at_or_null(updated.state.get(1)).0,
        at_or_null(copy).0,
        count as u64,
        first_chunk as u64,
        u64::from(updated.weight_decay.to_bits()) | kind << 32,
    ]
}

/// Chunks of so many elements.
fn chunks(elements: usize) -> usize {
    elements.div_ceil(CHUNK)
}

impl CudaDevice {
    /// Sends a table unless it is there already; its address, until the lock is let go.
    fn send(&self, table: &mut Table, words: Vec<u64>) -> Result<Address> {
        assert!(2 * words.len() <= table.memory.len());
        if table.held != words {
            // SAFETY: the words fit; earlier kernels that read the table come before it on the stream.
            unsafe { self.context.copy_in(table.memory.at(0).0, &words) }?;
            table.held = words;
        }
        Ok(table.memory.at(0))
    }

    pub(super) fn squares(&self, tensors: &[&Tensor], sum: &mut Tensor) -> Result {
        assert_eq!(sum.len(), SCALAR_ELEMENTS);
        let tensors: Vec<&Tensor> = tensors.iter().filter(|tensor| !tensor.is_empty()).copied().collect();
        let (mut table, held) = (lock(&self.tables.squared), self.parts());
        let mut used = 0;
        for group in tensors.chunks(ENTRIES) {
            let (mut words, mut blocks) = (Vec::with_capacity(SQUARED_WORDS * group.len()), 0);
            for tensor in group {
                assert_eq!(tensor.element(), Element::F32);
                words.extend([tensor.at(0).0, tensor.len() as u64, blocks as u64]);
                blocks += chunks(tensor.len());
            }
            // Partial sums are f64: two elements each.
            let parts = held.at(2 * used);
            used += blocks;
            assert!(2 * used <= PARTS, "{used} chunks in one norm");
            let (grid, entries) = (Grid::blocks(blocks), group.len() as i32);
            let entries_at = self.send(&mut table, words)?;
            // SAFETY: one block for each chunk of the table's tensors, and one part for each block.
            unsafe { launch!(self, "squares", grid, entries_at, entries, parts) }?;
        }
        // SAFETY: so many parts were written just before.
        unsafe { self.add_up("add_parts", held.at(0), used, sum) }
    }

    /// Starts an update for each group of tensors that fit the table: `start(grid, table, entries)`.
    fn update(
        &self,
        states: std::ops::RangeInclusive<usize>,
        tensors: &mut [Updated],
        start: impl Fn(Grid, Address, i32) -> Result,
    ) -> Result {
        // Statistics have no states; they take turns with the parameters, and both tables stay.
        let follow = tensors.iter().all(|updated| updated.state.is_empty());
        let mut table = lock(if follow { &self.tables.following } else { &self.tables.updated });
        for group in tensors.chunks(ENTRIES) {
            let (mut words, mut blocks, mut entries) =
                (Vec::with_capacity(UPDATED_WORDS * group.len()), 0, 0);
            for updated in group.iter().filter(|updated| !updated.parameter.is_empty()) {
                words.extend(entry(updated, states.clone(), blocks));
                blocks += chunks(updated.parameter.len());
                entries += 1;
            }
            let at = self.send(&mut table, words)?;
            start(Grid::blocks(blocks), at, entries)?;
        }
        Ok(())
    }

    pub(super) fn adamw_update(&self, s: &AdamW, guard: Guard, tensors: &mut [Updated]) -> Result {
        let guard = GuardParameter::from(guard);
        let correction1 = 1.0 - f64::from(s.beta1).powf(s.update as f64);
        let correction2 = 1.0 - f64::from(s.beta2).powf(s.update as f64);
        let by = AdamWParameter {
            lr: f64::from(s.lr),
            step: (f64::from(s.lr) / correction1) as f32,
            root_correction: correction2.sqrt() as f32,
            beta1: s.beta1,
            beta2: s.beta2,
            eps: s.eps,
        };
        self.update(2..=2, tensors, |grid, table, entries| {
            // SAFETY: one block for each chunk of the table's tensors, whose lengths are asserted.
            unsafe { launch!(self, "adamw", grid, guard, by, table, entries) }
        })
    }

    pub(super) fn sgd_update(&self, s: &Sgd, guard: Guard, tensors: &mut [Updated]) -> Result {
        let guard = GuardParameter::from(guard);
        let first = i32::from(s.update == 1);
        self.update(0..=1, tensors, |grid, table, entries| {
            // SAFETY: as for AdamW.
            unsafe { launch!(self, "sgd", grid, guard, s.lr, s.momentum, first, table, entries) }
        })
    }
}
