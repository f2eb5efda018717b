//! cuDNN: attention by its fused kernels, for elements of two bytes, and convolutions. The library is asked for
//! what it has: where it is missing, too old or without an engine for a shape, our own kernels serve.
//!
//! - [`descriptor`]: the library's objects and what it says of them.
//! - [`graph`]: operations, and the plan that the library makes of them.
//! - [`attention`]: attention as such operations.
//! - [`convolution`]: convolutions as such operations, and which of their plans is fastest.

mod attention;
mod convolution;
mod descriptor;
mod graph;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use attention::Problem;
pub(super) use convolution::{Convolution, Tensors};
use cudarc::cudnn::sys;
use descriptor::{Refusal, check};
pub(super) use graph::Made;
use graph::{Argument, Graph, Plan, Target};

use super::compile::cache_folder;
use super::context::Context;
use super::launch::Address;
use super::ranks::Ranks;
use super::recording::while_nothing_is_recorded;
use crate::device::{AttentionShape, DeviceError, Result};
use crate::tensor::Element;

/// The first version whose graphs are those of [`attention`]: older ones want other masks, and cleared sums;
/// 9.10.0 and 9.10.1 have known faults in attention.
const OLDEST_VERSION: usize = 91002;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Pass {
    Forward,
    Backward,
}

/// What a plan is made for: all of the problem but the scale, which each call passes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    pass: Pass,
    element: Element,
    causal: bool,
    samples: usize,
    sequence: usize,
    heads: usize,
    kv_heads: usize,
    head_size: usize,
}

enum Entry {
    Ready(Plan),
    /// Why there is none.
    Refused(String),
}

struct State {
    handle: sys::cudnnHandle_t,
    plans: HashMap<Key, Entry>,
    convolutions: convolution::Plans,
}

// SAFETY: a handle may be used from any thread, by one at a time: it stands behind a lock.
unsafe impl Send for State {}

pub(super) struct Cudnn {
    context: Arc<Context>,
    version: usize,
    capability: (i32, i32),
    state: Mutex<State>,
}

impl Cudnn {
    /// None where the library is missing or older than 9.10.2: our own kernels serve then.
    pub(super) fn open(context: Arc<Context>) -> Result<Option<Cudnn>> {
        // SAFETY: only asks whether the library can be loaded.
        if !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        // SAFETY: every version has it.
        let version = unsafe { sys::cudnnGetVersion() };
        if version < OLDEST_VERSION {
            return Ok(None);
        }
        let facts = context.facts()?;
        let ranks = Ranks::read(cache_folder(), "convolutions", &facts.model, &format!("cudnn{version}"));
        // The handle belongs to the context that is current now.
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let status = while_nothing_is_recorded(|| unsafe { sys::cudnnCreate(&mut handle) });
        check("cudnnCreate", || "a handle".into(), status)?;
        // From here on, dropping destroys the handle.
        let convolutions = convolution::Plans::new(ranks);
        let state = Mutex::new(State { handle, plans: HashMap::new(), convolutions });
        let cudnn = Cudnn { context, version, capability: facts.capability, state };
        // SAFETY: the stream lives as long as the context.
        let status = unsafe { sys::cudnnSetStream(handle, cudnn.context.stream().cast()) };
        check("cudnnSetStream", || "the handle".into(), status)?;
        Ok(Some(cudnn))
    }

    /// Bytes of workspace that the forward of this shape wants, None where the library has no engine for it.
    /// The first question about a shape makes its plan, which takes a while.
    pub(super) fn forward_workspace(
        &self,
        element: Element,
        shape: &AttentionShape,
    ) -> Result<Option<usize>> {
        self.workspace(Pass::Forward, Problem { element, shape: *shape })
    }

    /// The same for the backward.
    pub(super) fn backward_workspace(
        &self,
        element: Element,
        shape: &AttentionShape,
    ) -> Result<Option<usize>> {
        self.workspace(Pass::Backward, Problem { element, shape: *shape })
    }

    fn workspace(&self, pass: Pass, problem: Problem) -> Result<Option<usize>> {
        let mut state = self.state();
        Ok(match self.entry(&mut state, pass, problem)? {
            Entry::Ready(plan) => Some(plan.workspace_bytes()),
            Entry::Refused(_) => None,
        })
    }

    /// Attention of the rows of `qkv`. `logsumexp` is the natural logarithm of each row's sum of exponentials
    /// of scaled scores, an f32 for each of [samples, heads, sequence], in that order.
    ///
    /// # Safety
    /// The addresses are device memory of the shape's sizes; `workspace` is as large as asked for, and aligned
    /// like every block of the arena.
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn forward(
        &self,
        element: Element,
        shape: &AttentionShape,
        qkv: Address,
        out: Address,
        logsumexp: Address,
        workspace: Address,
    ) -> Result {
        let problem = Problem { element, shape: *shape };
        let argument = |which| match which {
            Argument::Out => out.0,
            Argument::LogSumExp => logsumexp.0,
            which => part(&problem, which, qkv, Address(0)),
        };
        // SAFETY: by this function's contract.
        unsafe { self.run(Pass::Forward, problem, &argument, workspace) }
    }

    /// All columns of `qkv_gradient`, from what the forward took and left. The queries' gradient is summed by
    /// whichever block comes first: its last bits vary from run to run.
    ///
    /// # Safety
    /// As for the forward.
    #[allow(clippy::too_many_arguments)]
    pub(super) unsafe fn backward(
        &self,
        element: Element,
        shape: &AttentionShape,
        qkv: Address,
        out: Address,
        logsumexp: Address,
        out_gradient: Address,
        qkv_gradient: Address,
        workspace: Address,
    ) -> Result {
        let problem = Problem { element, shape: *shape };
        let argument = |which| match which {
            Argument::Out => out.0,
            Argument::LogSumExp => logsumexp.0,
            Argument::OutGradient => out_gradient.0,
            which => part(&problem, which, qkv, qkv_gradient),
        };
        // SAFETY: by this function's contract.
        unsafe { self.run(Pass::Backward, problem, &argument, workspace) }
    }

    /// # Safety
    /// As for the forward.
    unsafe fn run(
        &self,
        pass: Pass,
        problem: Problem,
        argument: &dyn Fn(Argument) -> u64,
        workspace: Address,
    ) -> Result {
        let mut state = self.state();
        let handle = state.handle;
        let plan = match self.entry(&mut state, pass, problem)? {
            Entry::Ready(plan) => plan,
            Entry::Refused(reason) => {
                return Err(DeviceError::Cudnn { call: "cudnnBackendExecute", said: reason.clone() });
            }
        };
        if self.context.is_replayed() {
            return Ok(());
        }
        self.context.enter()?;
        if let Some((offset, count, value)) = plan.filled() {
            use cudarc::driver::sys::cuMemsetD32Async;
            let at = workspace.0 + offset as u64;
            // SAFETY: inside the workspace, which is as large as the plan asks for.
            let filled = unsafe { cuMemsetD32Async(at, value, count, self.context.stream()) };
            self.context.check("cuMemsetD32", filled)?;
        }
        // SAFETY: by this function's contract.
        Ok(unsafe { plan.run(handle, problem.shape.scale, argument, workspace.0) }?)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // An entry is inserted whole or not at all.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn entry<'a>(&self, state: &'a mut State, pass: Pass, problem: Problem) -> Result<&'a Entry> {
        let Problem { element, shape } = problem;
        let AttentionShape { samples, sequence, heads, kv_heads, head_size, causal, scale: _ } = shape;
        let key = Key { pass, element, causal, samples, sequence, heads, kv_heads, head_size };
        if !state.plans.contains_key(&key) {
            self.context.enter()?;
            let target = Target::Handle(state.handle);
            let entry = match unsuitable(pass, &problem, self.capability) {
                Some(reason) => Entry::Refused(reason.into()),
                None => match build(pass, &problem, self.version, &target) {
                    Ok(plan) => Entry::Ready(plan),
                    Err(refusal) if refusal.is_about_the_graph() => Entry::Refused(refusal.to_string()),
                    Err(refusal) => return Err(refusal.into()),
                },
            };
            state.plans.insert(key, entry);
        }
        Ok(&state.plans[&key])
    }
}

impl Drop for Cudnn {
    fn drop(&mut self) {
        let _ = self.context.wait();
        let mut state = self.state();
        state.plans.clear();
        state.convolutions.clear();
        // SAFETY: made in `open`, destroyed once; nothing of it runs any more.
        while_nothing_is_recorded(|| unsafe { sys::cudnnDestroy(state.handle) });
    }
}

/// Where queries, keys and values start within the first joint row, or their gradients.
fn part(problem: &Problem, which: Argument, qkv: Address, qkv_gradient: Address) -> u64 {
    let shape = &problem.shape;
    let (base, head) = match which {
        Argument::Query => (qkv, 0),
        Argument::Key => (qkv, shape.heads),
        Argument::Value => (qkv, shape.heads + shape.kv_heads),
        Argument::QueryGradient => (qkv_gradient, 0),
        Argument::KeyGradient => (qkv_gradient, shape.heads),
        Argument::ValueGradient => (qkv_gradient, shape.heads + shape.kv_heads),
        which => unreachable!("{which:?} is a tensor of its own"),
    };
    base.0 + (problem.element.bytes() * head * shape.head_size) as u64
}

/// What the library is not asked for, because its answer is known, or would be wrong.
fn unsuitable(pass: Pass, problem: &Problem, capability: (i32, i32)) -> Option<&'static str> {
    let shape = &problem.shape;
    // Only Hopper's kernels have room for more.
    let head_size_max = if capability.0 == 9 { 256 } else { 128 };
    if problem.element == Element::F32 {
        Some("elements of four bytes")
    } else if shape.samples == 0 || shape.sequence == 0 {
        Some("nothing to attend to")
    } else if shape.kv_heads == 0 || !shape.heads.is_multiple_of(shape.kv_heads) {
        Some("heads that do not share keys evenly")
    } else if !shape.head_size.is_multiple_of(8) || shape.head_size > head_size_max {
        Some("heads that are no multiple of 8, or too wide")
    } else if pass == Pass::Backward && shape.sequence == 1 {
        Some("the backward of a single row")
    } else {
        None
    }
}

fn build(
    pass: Pass,
    problem: &Problem,
    version: usize,
    target: &Target,
) -> std::result::Result<Plan, Refusal> {
    let graph: Graph = match pass {
        Pass::Forward => attention::forward(problem)?,
        Pass::Backward => attention::backward(problem, version)?,
    };
    graph.plan(target)
}
