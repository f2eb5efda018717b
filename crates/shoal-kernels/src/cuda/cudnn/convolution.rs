//! Convolutions by the library's engines. It proposes several for each; on a device that need not be
//! deterministic the first few are measured once, on the call's own tensors, and the fastest is kept, on disk
//! too. A plan that was chosen is run without asking for memory or waiting.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use cudarc::cudnn::sys;
use sys::cudnnBackendNumericalNote_t as Known;

use super::descriptor::{Note, Refusal, Result as Answer};
use super::graph::{Argument, Configuration, Data, Graph, HEURISTICS, Layout, Made, Plan, Posed, Target};
use super::{Cudnn, State};
use crate::convolutional::Window;
use crate::cuda::launch::Address;
use crate::cuda::ranks::Ranks;
use crate::device::Result;
use crate::tensor::Element;

/// Multiplications from which on another proposal than the first is worth looking for: a layer of a model for
/// ImageNet has more for a single image.
const WORTH_MEASURING: usize = 1 << 25;
/// Proposals that are measured. The library has some forty; the fast ones are among its first.
const CANDIDATES_MAX: usize = 16;
/// Runs of a candidate: one to warm up, one to see whether more are worth it, then so many.
const MEASURED_RUNS: usize = 4;
/// How much slower than the fastest so far a candidate may be at first sight.
const HOPELESS: f32 = 1.5;
/// How much faster than the first proposal another must be: less is noise.
const CLEARLY_FASTER: f32 = 0.97;
/// Times that the workspace is cleared before runs are measured: it keeps the GPU busy until all of them are
/// queued, so that short ones do not wait for the host.
const HEAD_START: usize = 3;
/// How much faster a gradient of two-byte elements must be made than an f32 one, for its rounding to be worth
/// it. (The pass that adds it to the sum is not measured.)
const WORTH_ROUNDING: f32 = 0.8;

/// The engine that serves every shape in each direction, by loops that share nothing: gathered rows are faster.
const PLAIN_ENGINE: i64 = 0;

/// Engines that do not sum fp32 products of what they are given.
const INEXACT: [Known; 4] = [
    Known::CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS,
    Known::CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION,
    Known::CUDNN_NUMERICAL_NOTE_FFT,
    Known::CUDNN_NUMERICAL_NOTE_WINOGRAD,
];

/// A convolution that a plan is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::cuda) struct Convolution {
    pub(in crate::cuda) made: Made,
    pub(in crate::cuda) element: Element,
    /// Of what is made; only the filters' gradient may have another than the rest.
    pub(in crate::cuda) made_element: Element,
    pub(in crate::cuda) window: Window,
    pub(in crate::cuda) outputs: usize,
    /// Lets fp32 factors be rounded to TF32.
    pub(in crate::cuda) tf32: bool,
    pub(in crate::cuda) deterministic: bool,
}

/// Where a convolution's tensors lie: each or its gradient.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct Tensors {
    pub(in crate::cuda) images: Address,
    pub(in crate::cuda) filters: Address,
    pub(in crate::cuda) places: Address,
}

/// [outer, channels, height, width] with the channels innermost in memory.
fn channels_last(outer: usize, channels: usize, (height, width): (usize, usize)) -> Layout {
    let line = width * channels;
    Layout::new([outer, channels, height, width], [height * line, 1, line, channels])
}

impl Convolution {
    pub(super) fn graph(&self) -> Answer<Graph> {
        let Window { samples, height, width, channels, kernel, stride, padding } = self.window;
        let data = |made| Data::from(if self.made == made { self.made_element } else { self.element });
        let mut graph = Graph::default();
        let images = channels_last(samples, channels, (height, width));
        let images = graph.argument(Argument::Images, data(Made::ImageGradient), images)?;
        let filters = channels_last(self.outputs, channels, kernel);
        let filters = graph.argument(Argument::Filters, data(Made::FilterGradient), filters)?;
        let places = channels_last(samples, self.outputs, self.window.places());
        let places = graph.argument(Argument::Places, data(Made::Places), places)?;
        graph.convolution(self.made, stride, padding, [images, filters, places])?;
        Ok(graph)
    }

    fn is_worth_measuring(&self) -> bool {
        let multiplications = self.window.rows() * self.window.elements() * self.outputs;
        !self.deterministic && multiplications >= WORTH_MEASURING
    }

    /// Whether an engine with such notes may be taken.
    fn allows(&self, notes: &[Note]) -> bool {
        let has = |note: Known| notes.contains(&Note(note as u32));
        // What tensor cores do with fp32 factors is to round them to TF32.
        let rounds = self.element == Element::F32 && has(Known::CUDNN_NUMERICAL_NOTE_TENSOR_CORE);
        !(INEXACT.into_iter().any(has)
            || rounds && !self.tf32
            || self.deterministic && has(Known::CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC))
    }
}

impl Tensors {
    fn at(&self, which: Argument) -> u64 {
        match which {
            Argument::Images => self.images.0,
            Argument::Filters => self.filters.0,
            Argument::Places => self.places.0,
            which => unreachable!("{which:?} is no part of a convolution"),
        }
    }
}

/// All that a plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) convolution: Convolution,
    pub(super) workspace_bytes: usize,
}

/// What each convolution came to. A job has some dozens.
pub(super) struct Plans {
    /// None where there is no engine.
    chosen: HashMap<Key, Option<Plan>>,
    /// Of what element filters' gradients are made, None where there is no engine; by the f32 one's key.
    gradients: HashMap<Key, Option<Element>>,
    ranks: Ranks,
}

impl Plans {
    pub(super) fn new(ranks: Ranks) -> Plans {
        Plans { chosen: HashMap::new(), gradients: HashMap::new(), ranks }
    }

    pub(super) fn clear(&mut self) {
        self.chosen.clear();
    }
}

/// One call's tensors and workspace.
#[derive(Clone, Copy)]
struct Call {
    handle: sys::cudnnHandle_t,
    tensors: Tensors,
    /// Address and bytes.
    workspace: (Address, usize),
}

impl Call {
    /// # Safety
    /// As for `Cudnn::convolve`.
    unsafe fn run(&self, plan: &Plan) -> Answer {
        // SAFETY: by this function's contract; a convolution has no scale.
        unsafe { plan.run(self.handle, 1.0, &|which| self.tensors.at(which), self.workspace.0.0) }
    }
}

/// Nothing, where the library is well and merely has none.
fn if_any<T>(answer: Answer<T>) -> Answer<Option<T>> {
    match answer {
        Ok(found) => Ok(Some(found)),
        Err(refusal) if refusal.is_about_the_graph() => Ok(None),
        Err(refusal) => Err(refusal),
    }
}

/// What the library proposes and the key allows, by its rank among all proposals.
pub(super) fn proposals(posed: &Posed, key: &Key, target: &Target) -> Answer<Vec<(usize, Configuration)>> {
    let mut all = Vec::new();
    for heuristic in HEURISTICS {
        all.extend(if_any(posed.configurations(heuristic, target))?.unwrap_or_default());
    }
    let suits = |configuration: &Configuration| {
        // Where the library does not tell, the plan will.
        let fits = configuration.workspace_bytes().unwrap_or(0) <= key.workspace_bytes;
        let is_plain = configuration.number().is_ok_and(|number| number == PLAIN_ENGINE);
        fits && !is_plain && configuration.notes().is_ok_and(|notes| key.convolution.allows(&notes))
    };
    Ok(all.into_iter().enumerate().filter(|(_, configuration)| suits(configuration)).collect())
}

impl Cudnn {
    /// Makes one tensor of a convolution from the other two. False, and nothing done, where the library has no
    /// engine for it that is content with the workspace. The first call of a kind may run the convolution many
    /// times and wait for it.
    ///
    /// # Safety
    /// The tensors are device memory of the sizes that the convolution says, the workspace of as many bytes;
    /// all are aligned like every block of the arena.
    pub(in crate::cuda) unsafe fn convolve(
        &self,
        convolution: &Convolution,
        tensors: Tensors,
        workspace: (Address, usize),
    ) -> Result<bool> {
        let mut state = self.state();
        let call = Call { handle: state.handle, tensors, workspace };
        // SAFETY: by this function's contract.
        match unsafe { self.plan(&mut state, convolution, &call) }? {
            None => Ok(false),
            Some(_) if self.context.is_replayed() => Ok(true),
            Some(plan) => {
                self.context.enter()?;
                // SAFETY: as above.
                unsafe { call.run(plan) }?;
                Ok(true)
            }
        }
    }

    /// Of what element the gradient of such filters should be made, None where there is no engine. f32, unless
    /// the library has only slow engines for that beside those of two-byte elements.
    ///
    /// # Safety
    /// As for `convolve`; where the filters lie, the gradient in f32 may be written.
    pub(in crate::cuda) unsafe fn gradient_element(
        &self,
        convolution: &Convolution,
        tensors: Tensors,
        workspace: (Address, usize),
    ) -> Result<Option<Element>> {
        let exact = Convolution { made_element: Element::F32, ..*convolution };
        let rounded = Convolution { made_element: convolution.element, ..*convolution };
        let key = Key { convolution: exact, workspace_bytes: workspace.1 };
        let mut state = self.state();
        if let Some(known) = state.convolutions.gradients.get(&key) {
            return Ok(*known);
        }
        let call = Call { handle: state.handle, tensors, workspace };
        let element = if exact == rounded {
            // SAFETY: by this function's contract; likewise below.
            unsafe { self.plan(&mut state, &exact, &call) }?.map(|_| Element::F32)
        } else {
            // SAFETY: as above.
            unsafe { self.better(&mut state, [&exact, &rounded], &call) }?
        };
        state.convolutions.gradients.insert(key, element);
        Ok(element)
    }

    /// What the better of an exact and a rounded gradient is made of, None where there is neither.
    ///
    /// # Safety
    /// As for `gradient_element`.
    unsafe fn better(
        &self,
        state: &mut State,
        ways: [&Convolution; 2],
        call: &Call,
    ) -> Result<Option<Element>> {
        let is_measured = ways[0].is_worth_measuring();
        let name = format!("rounded or not, {:?}, {}", ways[0], call.workspace.1);
        let known = if is_measured { state.convolutions.ranks.get(&name) } else { None };
        // The exact one's engine takes long to prepare: not where it is known to be the slower.
        let mut times = [None; 2];
        for (rank, (time, way)) in times.iter_mut().zip(ways).enumerate() {
            if known.is_some_and(|known| known != rank) {
                continue;
            }
            // SAFETY: by this function's contract; likewise below.
            if let Some(plan) = unsafe { self.plan(state, way, call) }? {
                // SAFETY: as above.
                let measure = || unsafe { self.measure(plan, call, f32::INFINITY) };
                *time = if is_measured && known.is_none() { measure()? } else { Some(0.0) };
            }
        }
        let best = match times {
            [Some(exact), Some(rounded)] => usize::from(rounded < WORTH_ROUNDING * exact),
            [Some(_), None] => 0,
            [None, Some(_)] => 1,
            [None, None] => return Ok(None),
        };
        if is_measured && known.is_none() {
            state.convolutions.ranks.keep(&name, best);
        }
        Ok(Some(ways[best].made_element))
    }

    /// The plan of a convolution, chosen at the first call.
    ///
    /// # Safety
    /// As for `convolve`.
    unsafe fn plan<'a>(
        &self,
        state: &'a mut State,
        convolution: &Convolution,
        call: &Call,
    ) -> Result<Option<&'a Plan>> {
        let key = Key { convolution: *convolution, workspace_bytes: call.workspace.1 };
        let Plans { chosen, ranks, .. } = &mut state.convolutions;
        let plan = match chosen.entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            // SAFETY: by this function's contract.
            Entry::Vacant(new) => new.insert(unsafe { self.choose(ranks, &key, call) }?),
        };
        Ok(plan.as_ref())
    }

    /// The library's first proposal, or, where measuring is allowed and worth it, the fastest.
    ///
    /// # Safety
    /// As for `convolve`.
    unsafe fn choose(&self, ranks: &mut Ranks, key: &Key, call: &Call) -> Result<Option<Plan>> {
        self.context.enter()?;
        let target = Target::Handle(call.handle);
        let graph = key.convolution.graph();
        let Some(posed) = if_any(graph.and_then(|graph| graph.pose(&target)))? else { return Ok(None) };
        let mut proposals = proposals(&posed, key, &target)?;
        let fits = |plan: &Plan| plan.workspace_bytes() <= key.workspace_bytes;
        let prepare = |configuration| posed.prepare(configuration, &target).ok().filter(fits);
        if !key.convolution.is_worth_measuring() {
            return Ok(proposals.into_iter().find_map(|(_, configuration)| prepare(configuration)));
        }
        let name = format!("{key:?}");
        if let Some(known) = ranks.get(&name) {
            let place = proposals.iter().position(|(rank, _)| *rank == known);
            if let Some(plan) = place.and_then(|place| prepare(proposals.remove(place).1)) {
                return Ok(Some(plan));
            }
        }
        let candidates = proposals
            .into_iter()
            .filter_map(|(rank, configuration)| Some((rank, prepare(configuration)?)))
            .take(CANDIDATES_MAX);
        // SAFETY: by this function's contract.
        let Some((rank, plan)) = (unsafe { self.fastest(candidates, call) })? else { return Ok(None) };
        ranks.keep(&name, rank);
        Ok(Some(plan))
    }

    /// The fastest of some plans, with its rank; the first, unless another is clearly faster.
    ///
    /// # Safety
    /// As for `convolve`.
    unsafe fn fastest(
        &self,
        candidates: impl Iterator<Item = (usize, Plan)>,
        call: &Call,
    ) -> Result<Option<(usize, Plan)>> {
        let mut best: Option<(f32, (usize, Plan))> = None;
        for candidate in candidates {
            let bound = best.as_ref().map_or(f32::INFINITY, |(time, _)| *time);
            // SAFETY: by this function's contract; what is made is overwritten each time.
            let Some(time) = (unsafe { self.measure(&candidate.1, call, bound) })? else { continue };
            if time < CLEARLY_FASTER * bound {
                best = Some((time, candidate));
            }
        }
        Ok(best.map(|(_, candidate)| candidate))
    }

    /// Milliseconds of a run. None where it is refused, or seen to be far slower than `bound`.
    ///
    /// # Safety
    /// As for `convolve`.
    unsafe fn measure(&self, plan: &Plan, call: &Call, bound: f32) -> Result<Option<f32>> {
        // SAFETY: by this function's contract; likewise below.
        let run = || unsafe { call.run(plan) };
        // Kernels are loaded when they first run.
        if run().is_err() {
            return Ok(None);
        }
        self.context.wait()?;
        let few = |runs: usize| {
            let (at, bytes) = call.workspace;
            for _ in 0..HEAD_START {
                // SAFETY: as above; no run counts on what the workspace holds.
                unsafe { self.context.clear(at.0, bytes / 4) }?;
            }
            let all = || (0..runs).try_for_each(|_| run().map_err(Refusal::into));
            Ok(self.context.milliseconds(all)? / runs as f32)
        };
        if few(1)? > HOPELESS * bound {
            return Ok(None);
        }
        few(MEASURED_RUNS).map(Some)
    }
}
