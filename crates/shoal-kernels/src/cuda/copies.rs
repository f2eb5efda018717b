//! Bytes between the host and the device beside the stream that computes. Each direction has a stream of its own. What lies
//! in page-locked memory the device copies by itself. The rest goes piece by piece through a few chunks of pinned memory:
//! while one piece is on the link the host fills or empties the next, and kernels go on meanwhile.
//!
//! What is copied must not be used by work that is still queued. Whoever asks brings a [`Mark`]: it is waited for before
//! the first byte moves, and when a call returns its last byte has moved. So memory that is copied belongs to whoever asked
//! for all the time, and the arena goes on needing no events.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{result, sys};

use super::context::Context;
use super::landing::Pinned;
use crate::device::{Mark, Place, Result};

/// Bytes of a piece: long enough for the link's full rate, short enough that the first one is soon on its way.
const CHUNK_BYTES: usize = 8 << 20;
/// Pieces under way at a time in a direction.
const CHUNKS: usize = 4;

/// An event of the driver that is waited for asleep.
struct Event {
    context: Arc<Context>,
    event: sys::CUevent,
}

// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    fn new(context: &Arc<Context>) -> Result<Event> {
        context.enter()?;
        let flags = sys::CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32
            | sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        let mut event = std::ptr::null_mut();
        // SAFETY: writes one handle.
        context.check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) })?;
        Ok(Event { context: context.clone(), event })
    }

    /// From here on it stands for what the stream has been given so far.
    fn record(&self, stream: sys::CUstream) -> Result {
        // SAFETY: both are the driver's and live.
        self.context.check("cuEventRecord", unsafe { sys::cuEventRecord(self.event, stream) })
    }

    fn wait(&self) -> Result {
        self.context.enter()?;
        // SAFETY: it lives as long as `self`.
        self.context.check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.event) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // What fails now has been reported by an earlier call. The driver keeps what is still recorded.
        let _ = self.context.enter();
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { sys::cuEventDestroy_v2(self.event) };
    }
}

impl Place for Event {
    fn wait(&self) -> Result {
        Event::wait(self)
    }

    fn is_reached(&self) -> Result<bool> {
        self.context.enter()?;
        // SAFETY: it lives as long as `self`.
        match unsafe { sys::cuEventQuery(self.event) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => self.context.check("cuEventQuery", other).map(|()| true),
        }
    }
}

/// The place that the computing stream's work has come to.
pub(super) fn mark(context: &Arc<Context>) -> Result<Mark> {
    let event = Event::new(context)?;
    event.record(context.stream())?;
    Ok(Mark::at(Arc::new(event)))
}

/// One direction.
struct Side {
    context: Arc<Context>,
    stream: sys::CUstream,
    chunks: Pinned<u8>,
    /// Of each chunk: its copy is over.
    over: Vec<Event>,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Side {}

impl Side {
    fn new(context: &Arc<Context>) -> Result<Side> {
        let chunks = Pinned::new(context.clone(), CHUNKS * CHUNK_BYTES)?;
        let over = (0..CHUNKS).map(|_| Event::new(context)).collect::<Result<_>>()?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| super::context::failed(context.name(), "cuStreamCreate", error))?;
        Ok(Side { context: context.clone(), stream, chunks, over })
    }

    /// Waits for whatever is under way, after a failure.
    fn settle(&self) {
        // The failure that led here is the one to report.
        // SAFETY: the stream lives as long as `self`.
        let _ = unsafe { sys::cuStreamSynchronize(self.stream) };
    }

    fn chunk(&mut self, number: usize, bytes: usize) -> &mut [u8] {
        assert!(bytes <= CHUNK_BYTES);
        // SAFETY: the chunks are this side's, which is borrowed; any bits are bytes. No copy is under way on this one:
        // it was waited for.
        unsafe {
            let start = self.chunks.start().add(number % CHUNKS * CHUNK_BYTES);
            std::slice::from_raw_parts_mut(start, bytes)
        }
    }

    /// Starts a copy for each of the runs, and waits for all.
    fn copy(&self, runs: &[Range<usize>], start: impl Fn(&Range<usize>, sys::CUstream) -> Result) -> Result {
        runs.iter().try_for_each(|run| start(run, self.stream))?;
        // The stream is in order: with the last, all are over. None of the chunks is under way, nor its event.
        self.over[0].record(self.stream)?;
        self.over[0].wait()
    }

    /// # Safety
    /// `to` is device memory of that many bytes that nothing else uses until this returns.
    unsafe fn write(&mut self, to: u64, bytes: usize, fill: &mut dyn FnMut(usize, &mut [u8])) -> Result {
        let mut last = None;
        for (number, piece) in pieces(bytes).enumerate() {
            if number >= CHUNKS {
                self.over[number % CHUNKS].wait()?;
            }
            let from = self.chunk(number, piece.len());
            fill(piece.start, from);
            let from = from.as_ptr().cast::<c_void>();
            let to = to + piece.start as u64;
            // SAFETY: the piece lies in both, `to` by this function's contract.
            let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, piece.len(), self.stream) };
            self.context.check("cuMemcpyHtoD", copied)?;
            self.over[number % CHUNKS].record(self.stream)?;
            last = Some(number % CHUNKS);
        }
        // The stream is in order: with the last, all are over.
        last.map_or(Ok(()), |last| self.over[last].wait())
    }

    /// Starts the copy of a piece into its chunk.
    ///
    /// # Safety
    /// `from` is device memory that the piece lies in.
    unsafe fn fetch(&mut self, from: u64, number: usize, piece: &Range<usize>) -> Result {
        let to = self.chunk(number, piece.len()).as_mut_ptr().cast::<c_void>();
        // SAFETY: the piece lies in both, `from` by this function's contract.
        let copied =
            unsafe { sys::cuMemcpyDtoHAsync_v2(to, from + piece.start as u64, piece.len(), self.stream) };
        self.context.check("cuMemcpyDtoH", copied)?;
        self.over[number % CHUNKS].record(self.stream)
    }

    /// # Safety
    /// `from` is device memory of that many bytes that nothing else writes until this returns.
    unsafe fn read(&mut self, from: u64, bytes: usize, take: &mut dyn FnMut(usize, &[u8])) -> Result {
        let pieces: Vec<Range<usize>> = pieces(bytes).collect();
        for (number, piece) in pieces.iter().enumerate().take(CHUNKS) {
            // SAFETY: by this function's contract.
            unsafe { self.fetch(from, number, piece) }?;
        }
        for (number, piece) in pieces.iter().enumerate() {
            self.over[number % CHUNKS].wait()?;
            take(piece.start, self.chunk(number, piece.len()));
            if let Some(next) = pieces.get(number + CHUNKS) {
                // SAFETY: by this function's contract.
                unsafe { self.fetch(from, number + CHUNKS, next) }?;
            }
        }
        Ok(())
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        // What fails now has been reported by an earlier call.
        let _ = self.context.enter();
        self.settle();
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { result::stream::destroy(self.stream) };
    }
}

/// Where the bytes of a message are cut.
fn pieces(bytes: usize) -> impl Iterator<Item = Range<usize>> {
    (0..bytes).step_by(CHUNK_BYTES).map(move |start| start..(start + CHUNK_BYTES).min(bytes))
}

/// Both directions of a device, made when something first moves that way.
pub(super) struct Copies {
    context: Arc<Context>,
    inward: Mutex<Option<Side>>,
    outward: Mutex<Option<Side>>,
}

impl Copies {
    pub(super) fn new(context: Arc<Context>) -> Copies {
        Copies { context, inward: Mutex::new(None), outward: Mutex::new(None) }
    }

    /// Does something with one direction, when the mark has been passed; others of that direction wait.
    fn with(
        &self,
        side: &Mutex<Option<Side>>,
        after: &Mark,
        work: impl FnOnce(&mut Side) -> Result,
    ) -> Result {
        after.wait()?;
        self.context.enter()?;
        // A panic in `fill` or `take` leaves copies under way at worst, which are waited for now.
        let mut side: MutexGuard<Option<Side>> = side.lock().unwrap_or_else(|poisoned: PoisonError<_>| {
            let side: MutexGuard<Option<Side>> = poisoned.into_inner();
            side.iter().for_each(Side::settle);
            side
        });
        let side = match &mut *side {
            Some(side) => side,
            none => none.insert(Side::new(&self.context)?),
        };
        work(side).inspect_err(|_| side.settle())
    }

    /// Copies page-locked bytes to the device, a run of them at a time.
    ///
    /// # Safety
    /// `to` is device memory of that many bytes, which after the mark nothing else uses until this returns.
    pub(super) unsafe fn copy_in(&self, after: &Mark, to: u64, from: &[u8], runs: &[Range<usize>]) -> Result {
        self.with(&self.inward, after, |side| {
            side.copy(runs, |run, stream| {
                let (to, from) = (to + run.start as u64, from[run.clone()].as_ptr().cast::<c_void>());
                // SAFETY: the run lies in both, `to` by this function's contract; `from` is borrowed until all is over.
                let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, run.len(), stream) };
                self.context.check("cuMemcpyHtoD", copied)
            })
        })
    }

    /// Copies bytes of the device to page-locked memory, a run of them at a time.
    ///
    /// # Safety
    /// `from` is device memory of that many bytes, which after the mark nothing writes until this returns.
    pub(super) unsafe fn copy_out(
        &self,
        after: &Mark,
        from: u64,
        to: &mut [u8],
        runs: &[Range<usize>],
    ) -> Result {
        assert!(runs.iter().all(|run| run.start <= run.end && run.end <= to.len()));
        // Runs are copied side by side, so each starts from the same address.
        let to = to.as_mut_ptr();
        self.with(&self.outward, after, |side| {
            side.copy(runs, |run, stream| {
                // SAFETY: the run lies in both, `from` by this function's contract; `to` is borrowed until all is over.
                let copied = unsafe {
                    let to = to.add(run.start).cast::<c_void>();
                    sys::cuMemcpyDtoHAsync_v2(to, from + run.start as u64, run.len(), stream)
                };
                self.context.check("cuMemcpyDtoH", copied)
            })
        })
    }

    /// Lets `fill` write so many bytes, piece by piece with where each begins, and copies them over.
    ///
    /// # Safety
    /// `to` is device memory of that many bytes, which after the mark nothing else uses until this returns.
    pub(super) unsafe fn write(
        &self,
        after: &Mark,
        to: u64,
        bytes: usize,
        fill: &mut dyn FnMut(usize, &mut [u8]),
    ) -> Result {
        // SAFETY: by this function's contract.
        self.with(&self.inward, after, |side| unsafe { side.write(to, bytes, fill) })
    }

    /// Hands so many bytes to `take`, piece by piece with where each begins.
    ///
    /// # Safety
    /// `from` is device memory of that many bytes, which after the mark nothing writes until this returns.
    pub(super) unsafe fn read(
        &self,
        after: &Mark,
        from: u64,
        bytes: usize,
        take: &mut dyn FnMut(usize, &[u8]),
    ) -> Result {
        // SAFETY: by this function's contract.
        self.with(&self.outward, after, |side| unsafe { side.read(from, bytes, take) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_all_of_it_in_order() {
        for bytes in [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 9 * CHUNK_BYTES - 3] {
            let all: Vec<_> = pieces(bytes).collect();
            assert_eq!(all.iter().map(Range::len).sum::<usize>(), bytes);
            assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(all.iter().all(|piece| (1..=CHUNK_BYTES).contains(&piece.len())));
        }
    }
}
