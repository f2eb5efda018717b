//! Where the time goes: events around each kernel while someone asks, nothing at all otherwise.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use cudarc::driver::sys;

use super::context::{self, Context};
use crate::device::{Result, Span, Stamp};

/// The first driver that tells the time between events by the call we use.
const EVENT_TIMES: i32 = 12080;

/// Kernels timed since profiling was started, or `None`.
#[derive(Default)]
pub(super) struct Profile(Mutex<Option<Vec<Timed>>>);

struct Timed {
    name: String,
    start: sys::CUevent,
    end: sys::CUevent,
}

// SAFETY: events are handles of the driver, which may be used from any thread.
unsafe impl Send for Timed {}

impl Profile {
    fn timed(&self) -> std::sync::MutexGuard<'_, Option<Vec<Timed>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Context {
    /// Does some work that queues kernels, and takes its time where that is wanted.
    pub(super) fn timed<T>(
        &self,
        name: impl FnOnce() -> String,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if self.profile.timed().is_none() {
            return work();
        }
        let start = self.mark()?;
        let result = work()?;
        let end = self.mark()?;
        if let Some(timed) = self.profile.timed().as_mut() {
            timed.push(Timed { name: name(), start, end });
        }
        Ok(result)
    }

    pub(super) fn is_profiled(&self) -> bool {
        self.profile.timed().is_some()
    }

    /// An event at the stream's end.
    fn mark(&self) -> Result<sys::CUevent> {
        self.enter()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: writes one handle.
        self.check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, 0) })?;
        // SAFETY: the event is new, the stream lives as long as `self`.
        self.check("cuEventRecord", unsafe { sys::cuEventRecord(event, self.stream()) })?;
        Ok(event)
    }

    /// Milliseconds between two events, which are over with this.
    ///
    /// # Safety
    /// Both were recorded, and the stream has passed them.
    unsafe fn between(&self, start: sys::CUevent, end: sys::CUevent) -> Result<f32> {
        // SAFETY: by this function's contract; destroyed once.
        unsafe {
            let milliseconds = self.apart(start, end)?;
            self.check("cuEventDestroy", sys::cuEventDestroy_v2(start))?;
            self.check("cuEventDestroy", sys::cuEventDestroy_v2(end))?;
            Ok(milliseconds)
        }
    }

    /// # Safety
    /// As for `between`.
    unsafe fn apart(&self, start: sys::CUevent, end: sys::CUevent) -> Result<f32> {
        let mut milliseconds = 0.0f32;
        // SAFETY: by this function's contract.
        let taken = unsafe { sys::cuEventElapsedTime_v2(&mut milliseconds, start, end) };
        self.check("cuEventElapsedTime", taken)?;
        Ok(milliseconds)
    }

    pub(super) fn stamp(&self) -> Result<Stamp> {
        context::needs_driver(EVENT_TIMES)?;
        Ok(Stamp { asked: Instant::now(), mark: self.mark()? as u64 })
    }

    pub(super) fn seconds_between(&self, stamps: Vec<Stamp>) -> Result<Vec<f64>> {
        self.wait()?;
        let events: Vec<sys::CUevent> = stamps.iter().map(|stamp| stamp.mark as sys::CUevent).collect();
        // SAFETY: they are events of `stamp`, which the stream has passed.
        let apart =
            |pair: &[sys::CUevent]| unsafe { self.apart(pair[0], pair[1]) }.map(|ms| f64::from(ms) / 1e3);
        let seconds = events.windows(2).map(apart).collect();
        for event in events {
            // SAFETY: the stamps were used up, so that each is destroyed once.
            self.check("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(event) })?;
        }
        seconds
    }

    /// Milliseconds that the GPU takes for what `work` queues; with a driver that cannot tell, those until it
    /// is done.
    pub(super) fn milliseconds(&self, work: impl FnOnce() -> Result) -> Result<f32> {
        if context::needs_driver(EVENT_TIMES).is_err() {
            self.wait()?;
            let started = Instant::now();
            work()?;
            self.wait()?;
            return Ok(1e3 * started.elapsed().as_secs_f32());
        }
        let start = self.mark()?;
        work()?;
        let end = self.mark()?;
        self.wait()?;
        // SAFETY: both are from just now, and were waited for.
        unsafe { self.between(start, end) }
    }

    /// Starts or stops; what was timed until now, by name.
    pub(super) fn switch_profile(&self, on: bool) -> Result<Vec<Span>> {
        self.wait()?;
        if on {
            context::needs_driver(EVENT_TIMES)?;
        }
        let timed = std::mem::replace(&mut *self.profile.timed(), on.then(Vec::new));
        let mut spans: HashMap<String, Span> = HashMap::new();
        for Timed { name, start, end } in timed.into_iter().flatten() {
            // SAFETY: both come from `mark`, and were waited for.
            let milliseconds = unsafe { self.between(start, end) }?;
            let span = spans.entry(name.clone()).or_insert(Span { name, calls: 0, seconds: 0.0 });
            span.calls += 1;
            span.seconds += f64::from(milliseconds) / 1e3;
        }
        Ok(spans.into_values().collect())
    }
}
