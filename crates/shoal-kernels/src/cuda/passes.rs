//! Passes over the same operations, noted down as graphs of the driver. A convolutional step on few samples is a
//! thousand kernels of some microseconds each: queued one by one they wait for the host, started as one graph
//! they follow each other.
//!
//! A graph holds addresses. It serves as long as memory is in use as it was when it was made, which the arena's
//! layout tells; any other layout is another graph.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use super::context::{Context, Queueing};
use super::recording::Recording;
use crate::device::{Pass, Result};
use crate::memory::Arena;
use crate::random::fold;

/// Passes that are queued as they come before one is noted down: libraries choose their algorithms, kernels are
/// loaded, tables are sent and memory is put behind addresses.
const DIRECT_PASSES: u32 = 2;

/// Graphs kept; past it all are dropped, because something keeps changing.
const GRAPHS_MAX: usize = 4096;

/// A graph that can be started.
struct Graph {
    context: Arc<Context>,
    executable: sys::CUgraphExec,
}

// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for Graph {}

impl Graph {
    /// From what was captured, which is used up.
    fn new(context: &Arc<Context>, captured: sys::CUgraph) -> Result<Graph> {
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph was captured just now; writes one handle.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(&mut executable, captured, 0) };
        // SAFETY: the executable has what it needs of it.
        let _ = unsafe { sys::cuGraphDestroy(captured) };
        context.check("cuGraphInstantiate", made)?;
        Ok(Graph { context: context.clone(), executable })
    }

    fn start(&self) -> Result {
        self.context.enter()?;
        // SAFETY: both live as long as `self`.
        let started = unsafe { sys::cuGraphLaunch(self.executable, self.context.stream()) };
        self.context.check("cuGraphLaunch", started)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // It may be running; a failure was reported by an earlier call.
        let _ = self.context.wait();
        // SAFETY: made in `new`, destroyed once.
        let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
    }
}

enum Known {
    /// Passed over so often.
    Seen(u32),
    Noted(Graph),
}

#[derive(Default)]
struct State {
    known: HashMap<u64, Known>,
    /// The pass under way.
    current: Option<(u64, Pass, Option<Recording>)>,
}

#[derive(Default)]
pub(super) struct Passes(Mutex<State>);

impl Passes {
    fn state(&self) -> MutexGuard<'_, State> {
        // Entries are inserted whole or not at all.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, context: &Context, arena: &Arena, key: u64) -> Result<Pass> {
        let mut state = self.state();
        assert!(state.current.is_none(), "a pass begins when the one before has ended");
        let key = fold(key, arena.layout());
        if state.known.len() >= GRAPHS_MAX {
            state.known.clear();
        }
        let mut recording = None;
        let pass = match state.known.entry(key).or_insert(Known::Seen(0)) {
            // Kernels that are timed one by one are started so.
            _ if context.is_profiled() => Pass::Direct,
            Known::Noted(_) => {
                context.set_queueing(Queueing::Replayed);
                Pass::Replayed
            }
            Known::Seen(times) if *times < DIRECT_PASSES => {
                *times += 1;
                Pass::Direct
            }
            Known::Seen(_) => {
                recording = Some(Recording::begin());
                context.begin_capture()?;
                Pass::Recorded
            }
        };
        state.current = Some((key, pass, recording));
        Ok(pass)
    }

    pub(super) fn end(&self, context: &Arc<Context>) -> Result {
        let mut state = self.state();
        let (key, pass, recording) = state.current.take().expect("a pass was begun");
        context.set_queueing(Queueing::Direct);
        if pass == Pass::Recorded {
            let graph = Graph::new(context, context.end_capture()?)?;
            state.known.insert(key, Known::Noted(graph));
        }
        drop(recording);
        match &state.known[&key] {
            Known::Noted(graph) if pass != Pass::Direct => graph.start(),
            _ => Ok(()),
        }
    }

    pub(super) fn abandon(&self, context: &Context) {
        let pass = self.state().current.take();
        context.set_queueing(Queueing::Direct);
        if let Some((_, Pass::Recorded, _)) = pass
            // The error that led here is the one to report.
            && let Ok(captured) = context.end_capture()
        {
            // SAFETY: captured just now, and nothing else has it.
            let _ = unsafe { sys::cuGraphDestroy(captured) };
        }
    }
}
