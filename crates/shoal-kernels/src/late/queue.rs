//! The line of work and the thread that works it off.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::Lateness;
use crate::cpu::CpuDevice;
use crate::device::{Device, DeviceError, Mark, Place, Result};
use crate::random::fold;

/// An operation, which may be done more than once.
pub(super) type Work = Arc<dyn Fn(&CpuDevice) -> Result + Send + Sync>;

/// Most operations follow each other without a pause; of so many one waits, up to so long.
const PAUSED_OF: u64 = 8;
const PAUSE_US_MAX: u64 = 400;

#[derive(Default)]
struct State {
    waiting: VecDeque<Work>,
    /// How many operations were ever asked for, are done, and are waited for.
    asked: u64,
    done: u64,
    wanted: u64,
    /// The first thing that went wrong. From then on nothing is done, and everyone is told.
    failure: Option<String>,
    is_closed: bool,
}

pub(super) struct Queue {
    name: String,
    state: Mutex<State>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Queue {
    pub(super) fn start(processor: CpuDevice, lateness: Lateness) -> Arc<Queue> {
        let name = processor.name().to_owned();
        let (state, changed, thread) = (Mutex::default(), Condvar::new(), Mutex::default());
        let queue = Arc::new(Queue { name, state, changed, thread });
        let line = queue.clone();
        let worker = std::thread::spawn(move || line.work(&processor, lateness));
        *queue.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(worker);
        queue
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Its parts are changed together, between which nothing panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, processor: &CpuDevice, lateness: Lateness) {
        while let Some((number, work)) = self.next(lateness) {
            let mut result = Ok(());
            let done = catch_unwind(AssertUnwindSafe(|| processor.run(&mut || result = work(processor))));
            let failure = match (done, result) {
                (Ok(()), Ok(())) => None,
                (Ok(()), Err(error)) => Some(error.to_string()),
                (Err(panic), _) => Some(said(&*panic)),
            };
            let mut state = self.state();
            state.done = number + 1;
            if let Some(failure) = failure {
                state.failure = Some(failure);
                state.waiting.clear();
            }
            self.changed.notify_all();
        }
    }

    /// The next operation and its number, when its time has come; none when the device is closed.
    fn next(&self, lateness: Lateness) -> Option<(u64, Work)> {
        let mut state = self.state();
        while !state.is_closed && state.waiting.is_empty() {
            state = self.wait(state);
        }
        let number = state.done;
        let is_wanted = |state: &State| state.is_closed || state.wanted > number;
        match lateness {
            Lateness::UntilAsked => {
                while !is_wanted(&state) {
                    state = self.wait(state);
                }
            }
            Lateness::Random(seed) => {
                let draw = fold(seed, number);
                if draw.is_multiple_of(PAUSED_OF) {
                    let pause = Duration::from_micros((draw >> 32) % PAUSE_US_MAX);
                    let waited = self.changed.wait_timeout_while(state, pause, |state| !is_wanted(state));
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
        if state.is_closed {
            return None;
        }
        state.waiting.pop_front().map(|work| (number, work))
    }

    fn told(&self, state: &State) -> Result {
        match &state.failure {
            Some(failure) => Err(DeviceError::Driver {
                device: self.name.clone(),
                call: "something asked for earlier",
                system: failure.clone(),
            }),
            None => Ok(()),
        }
    }

    pub(super) fn push(&self, works: impl IntoIterator<Item = Work>) -> Result {
        let mut state = self.state();
        self.told(&state)?;
        let before = state.waiting.len();
        state.waiting.extend(works);
        state.asked += (state.waiting.len() - before) as u64;
        self.changed.notify_all();
        Ok(())
    }

    /// How many operations were asked for so far.
    pub(super) fn asked(&self) -> u64 {
        self.state().asked
    }

    /// Waits until so many are done.
    pub(super) fn wait_for(&self, number: u64) -> Result {
        let mut state = self.state();
        state.wanted = state.wanted.max(number);
        self.changed.notify_all();
        while state.done < number && state.failure.is_none() && !state.is_closed {
            state = self.wait(state);
        }
        self.told(&state)
    }

    pub(super) fn mark(self: &Arc<Queue>) -> Mark {
        Mark::at(Arc::new(Reached { number: self.asked(), queue: self.clone() }))
    }

    /// What waits is dropped: nobody is left who could see it.
    pub(super) fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // Operations' panics are caught, and there is nothing else that could.
            let _ = thread.join();
        }
    }
}

/// What a panic said.
fn said(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "it panicked".into())
}

/// The place behind so many operations.
struct Reached {
    queue: Arc<Queue>,
    number: u64,
}

impl Place for Reached {
    fn wait(&self) -> Result {
        self.queue.wait_for(self.number)
    }

    fn is_reached(&self) -> Result<bool> {
        let mut state = self.queue.state();
        self.queue.told(&state)?;
        if state.done >= self.number {
            return Ok(true);
        }
        // Who looks again and again gets there, though not at once.
        state.wanted = state.wanted.max((state.done + 1).min(self.number));
        self.queue.changed.notify_all();
        Ok(false)
    }
}
