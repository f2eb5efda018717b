//! A processor that works behind the host's back, as GPUs do. What it is asked for waits in a line and is done in that order,
//! later: when somebody waits for it, or after pauses of any length. Copies go beside the line, as soon as the mark
//! that they were given is reached. Its memory is not the host's to read, blocks of it are taken again while work on what
//! lay there before still waits, and passes are noted down and replayed. So whoever asks a device in the wrong order, or
//! looks too early, gets other numbers here than from [`CpuDevice`], on any machine; with the right order they are the
//! same to the bit.
//!
//! - [`queue`]: the line, and the thread that works it off.
//! - [`passes`]: what is asked again and again, noted down.
//! - [`operations`], [`images`]: each operation, put into the line.

mod images;
mod operations;
mod passes;
mod queue;

use std::ops::Range;
use std::sync::Arc;

use passes::Passes;
use queue::{Queue, Work};

use crate::cpu::CpuDevice;
use crate::device::{Mark, Mat, MatMut, Result};
use crate::memory::{AddressSpace, Arena, HostSpace, MemoryError};
use crate::tensor::Tensor;

/// When work is done that nobody waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lateness {
    /// Never by itself: somebody has to wait for it, and each look whether it is done brings the device an operation further.
    UntilAsked,
    /// After pauses that follow from a seed.
    Random(u64),
}

/// A processor of one thread behind a line of work.
pub struct LateDevice {
    arena: Arc<Arena>,
    queue: Arc<Queue>,
    passes: Passes,
}

/// Host memory in either part: as the device's, where the host's threads must not look, or as the host's, of which the device
/// copies the first bytes by itself. Not all, so that both ways are gone.
struct PlayedSpace {
    host: HostSpace,
    is_device: bool,
}

impl PlayedSpace {
    const LOCKED_BYTES: usize = 256 << 10;
    /// Copies are cut at its multiples.
    const PIECE_BYTES: usize = 3 << 10;

    fn arena(name: &str, budget: u64, is_device: bool) -> std::result::Result<Arc<Arena>, MemoryError> {
        let space = PlayedSpace { host: HostSpace::reserve(name, budget)?, is_device };
        Ok(Arena::over(name, budget, Box::new(space), false))
    }
}

impl AddressSpace for PlayedSpace {
    fn base(&self) -> *mut u8 {
        self.host.base()
    }

    fn length(&self) -> usize {
        self.host.length()
    }

    fn commit(&self, end: usize) -> std::result::Result<(), String> {
        self.host.commit(end)
    }

    fn on_host(&self) -> bool {
        !self.is_device
    }

    fn locked_piece_bytes(&self, end: usize) -> Option<usize> {
        (!self.is_device && end <= PlayedSpace::LOCKED_BYTES).then_some(PlayedSpace::PIECE_BYTES)
    }
}

impl LateDevice {
    /// A device with a memory budget in bytes, none of which it takes for itself.
    pub fn new(name: &str, budget: u64, lateness: Lateness) -> std::result::Result<LateDevice, MemoryError> {
        let arena = PlayedSpace::arena(name, budget, true)?;
        let processor = CpuDevice::new(name, 1, CpuDevice::workspace_bytes(1))?;
        Ok(LateDevice { arena, queue: Queue::start(processor, lateness), passes: Passes::default() })
    }

    /// How many passes were replayed so far.
    pub fn replayed(&self) -> usize {
        self.passes.replayed()
    }

    /// Puts an operation into the line, or into what is being noted down.
    fn later(&self, work: impl Fn(&CpuDevice) -> Result + Send + Sync + 'static) -> Result {
        let work: Work = Arc::new(work);
        match self.passes.note(work) {
            Some(work) => self.queue.push([work]),
            None => Ok(()),
        }
    }

    /// Waits for all that was asked for.
    fn wait_for_all(&self) -> Result {
        self.passes.assert_nothing_waits();
        self.queue.wait_for(self.queue.asked())
    }

    /// Copies between a tensor of the device and bytes of the host, when the mark is reached.
    fn copy(
        &self,
        after: &Mark,
        tensor: &Tensor,
        elements: Range<usize>,
        copy: impl FnOnce(&mut [u8]),
    ) -> Result {
        assert!(!tensor.is_on_host() && elements.start <= elements.end && elements.end <= tensor.len());
        after.wait()?;
        // SAFETY: the memory is the host's. What was asked of the tensor before the mark is over, and it is borrowed: nothing
        // else is asked of it.
        copy(unsafe { tensor.lend() }.bytes_of_mut(elements));
        Ok(())
    }
}

/// A tensor of the device as work in its line sees it.
struct Lent(Tensor);

impl Lent {
    fn read(tensor: &Tensor) -> Lent {
        assert!(!tensor.is_on_host(), "a device works on its own memory");
        // SAFETY: the memory is the host's, and the line is worked off in the order of asking.
        Lent(unsafe { tensor.lend() })
    }

    fn written(tensor: &mut Tensor) -> Lent {
        tensor.assert_alone();
        Lent::read(tensor)
    }

    fn written_maybe(tensor: Option<&mut Tensor>) -> Option<Lent> {
        tensor.map(Lent::written)
    }

    fn maybe(lent: &Option<Lent>) -> Option<&Tensor> {
        lent.as_ref().map(|lent| &lent.0)
    }

    fn maybe_mutable(lent: &Option<Lent>) -> Option<Tensor> {
        lent.as_ref().map(Lent::mutable)
    }

    /// To write to: work is noted down and done more than once, so it does not own what it writes.
    fn mutable(&self) -> Tensor {
        // SAFETY: as for `read`; one operation of the line is done at a time, and has it once.
        unsafe { self.0.lend() }
    }
}

/// A sum, likewise, and whether to add to it.
type LentSum = (Lent, bool);

fn lent_sum((sum, accumulate): (&mut Tensor, bool)) -> LentSum {
    (Lent::written(sum), accumulate)
}

/// Rows of a tensor, likewise.
struct LentRows {
    tensor: Lent,
    offset: usize,
    rows: usize,
    cols: usize,
    stride: usize,
}

impl LentRows {
    fn read(mat: Mat) -> LentRows {
        let Mat { tensor, offset, rows, cols, stride } = mat;
        LentRows { tensor: Lent::read(tensor), offset, rows, cols, stride }
    }

    fn written(mat: MatMut) -> LentRows {
        let MatMut { tensor, offset, rows, cols, stride } = mat;
        LentRows { tensor: Lent::written(tensor), offset, rows, cols, stride }
    }

    fn mat(&self) -> Mat<'_> {
        let LentRows { ref tensor, offset, rows, cols, stride } = *self;
        Mat { tensor: &tensor.0, offset, rows, cols, stride }
    }

    /// The rows in a tensor that is theirs to write.
    fn mutable_in<'a>(&self, tensor: &'a mut Tensor) -> MatMut<'a> {
        let LentRows { offset, rows, cols, stride, .. } = *self;
        MatMut { tensor, offset, rows, cols, stride }
    }
}

#[cfg(test)]
mod tests;
