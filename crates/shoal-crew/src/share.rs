//! A plan's state on this worker: an executor with its slices, or, where the device is needed for the next plan's, the
//! slices alone in the host's memory. Either can be read and saved; only the first can run.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use shoal_control::message::{Epoch, Spent, WorkerId};
use shoal_engine::disk::DiskSlice;
use shoal_engine::error::Result as EngineResult;
use shoal_engine::metrics::StepRecord;
use shoal_engine::state::{HeldSlice, Kept};
use shoal_engine::stepping::{self, Evaluation, Terms};
use shoal_engine::{EngineError, Executor, LossScale, StepOutcome};
use shoal_kernels::{Device, Tensor};
use shoal_model::Chain;
use shoal_plan::{Closing, Plan, Program, Slice};

use crate::error::{CrewError, Result};
use crate::peers::Peers;

/// A plan's state here.
pub struct Share {
    /// With its devices named after their workers.
    pub plan: Arc<Plan>,
    /// What records and checkpoints call it.
    pub plan_id: String,
    pub peers: Peers,
    pub abouts: BTreeMap<WorkerId, String>,
    pub program: Arc<Program>,
    pub evaluation: Evaluation,
    /// What own work in a step is predicted to take.
    pub work_ms: Option<f64>,
    /// How much of a step is predicted to pass without anything to compute until others are done.
    pub bubble: f64,
    pub predicted_ms: u64,
    /// Steps that have been counted here.
    pub step: u64,
    /// In fp16, as of that step.
    pub loss_scale: Option<LossScale>,
    /// Where this worker's time under the plan went.
    pub spent: Spent,
    /// When the step under way began.
    pub began: Instant,
    pub body: Body,
}

pub enum Body {
    Executor(Box<Executor>),
    /// By tensor.
    Parked(Vec<Vec<Parked>>),
}

/// A slice that waits in the host's memory, or on its disk.
pub struct Parked {
    slice: Slice,
    version: u64,
    place: ParkedPlace,
}

enum ParkedPlace {
    /// Parameters, then each of the optimizer's states.
    Host(Vec<Tensor>),
    Disk(DiskSlice),
}

impl Body {
    pub fn executor(&mut self) -> Option<&mut Executor> {
        match self {
            Body::Executor(executor) => Some(executor),
            Body::Parked(_) => None,
        }
    }
}

impl Share {
    pub fn executor(&mut self) -> Option<&mut Executor> {
        self.body.executor()
    }

    /// What is held of a tensor, in the order of [`Share::read`].
    pub fn slices(&self, tensor: usize) -> Vec<Slice> {
        match &self.body {
            Body::Executor(executor) => {
                executor.state.tensors[tensor].slices.iter().map(|held| held.slice).collect()
            }
            Body::Parked(parked) => parked[tensor].iter().map(|parked| parked.slice).collect(),
        }
    }

    /// A slice's parameters (0) or one of its states (from 1).
    pub fn read(&self, tensor: usize, place: usize, part: usize) -> EngineResult<Cow<'_, [f32]>> {
        match &self.body {
            Body::Executor(executor) => {
                executor.state.tensors[tensor].slices[place].get(executor.tiers(), part)
            }
            Body::Parked(parked) => parked[tensor][place].read(part),
        }
    }

    /// The same of elements that lie in one slice, in whichever memory.
    pub fn read_slice(&self, tensor: usize, wanted: Slice, part: usize) -> EngineResult<Cow<'_, [f32]>> {
        let slices = self.slices(tensor);
        let has = |slice: &Slice| slice.start <= wanted.start && wanted.end <= slice.end;
        let place = slices.iter().position(has).ok_or_else(|| {
            let tensor = &self.plan.tensors[tensor].tensor;
            EngineError::Torn { tensor: format!("{tensor} {}..{}", wanted.start, wanted.end) }
        })?;
        let first = slices[place].start;
        let within = wanted.start - first..wanted.end - first;
        Ok(match self.read(tensor, place, part)? {
            Cow::Borrowed(values) => Cow::Borrowed(&values[within]),
            Cow::Owned(values) if within.len() == values.len() => Cow::Owned(values),
            Cow::Owned(values) => Cow::Owned(values[within].to_vec()),
        })
    }

    /// Whether every slice is at a step, and nothing past it.
    pub fn is_at(&self, step: u64) -> bool {
        let at = |version: u64| version == step;
        match &self.body {
            Body::Executor(executor) => {
                let mut held = executor.state.tensors.iter().flat_map(|held| &held.slices);
                held.all(|held| at(held.version) && !matches!(held.kept, Kept::Lent))
            }
            Body::Parked(parked) => parked.iter().flatten().all(|parked| at(parked.version)),
        }
    }

    /// Moves everything out of the device's memory. Where the host has no room for it, nothing has changed.
    pub fn park(&mut self, chain: &Chain) -> Result {
        let Body::Executor(executor) = &mut self.body else { return Ok(()) };
        let (tiers, mut parked) = (executor.tiers().clone(), Vec::new());
        for (held, spec) in executor.state.tensors.iter().zip(&chain.tensors) {
            let park = |held: &HeldSlice| -> EngineResult<Parked> {
                let place = match &held.kept {
                    Kept::Disk(disk) => ParkedPlace::Disk(disk.clone()),
                    Kept::Memory(tensors) => {
                        let who = format!("{} of the plan before", spec.name);
                        let copy = |part: usize| -> EngineResult<Tensor> {
                            let values = held.get(&tiers, part)?;
                            Ok(Tensor::from_floats(tiers.host.arena(), &who, &values)?)
                        };
                        let parts = 0..=tensors.optimizer.len();
                        ParkedPlace::Host(parts.map(copy).collect::<EngineResult<_>>()?)
                    }
                    Kept::Lent => return Err(EngineError::Torn { tensor: spec.name.clone() }),
                };
                Ok(Parked { slice: held.slice, version: held.version, place })
            };
            parked.push(held.slices.iter().map(park).collect::<EngineResult<_>>()?);
        }
        self.body = Body::Parked(parked);
        Ok(())
    }

    /// Counts a step that was applied; what the books keep of it.
    pub fn complete(&mut self, terms: &Terms, outcome: &StepOutcome) -> StepRecord {
        let (lr, loss_scale) = (terms.lr(self.step), self.loss_scale.map(|state| state.scale));
        if let Some(scale) = &mut self.loss_scale {
            scale.after(outcome.overflowed);
        }
        self.step += 1;
        let seconds = self.began.elapsed().as_secs_f64();
        let memory_bytes = match &self.body {
            Body::Executor(executor) => {
                let arena = executor.device().arena();
                BTreeMap::from([(self.plan.devices[self.peers.rank].name.clone(), arena.peak())])
            }
            Body::Parked(_) => BTreeMap::new(),
        };
        StepRecord {
            memory_bytes,
            predicted_ms: Some(self.predicted_ms as f64).filter(|predicted| *predicted > 0.0),
            ..StepRecord::of(self.step, outcome, lr, loss_scale, seconds, self.plan_id.clone())
        }
    }

    /// The same for one that is known by its closing sums, if they are those of the next step.
    pub fn complete_by(
        &mut self,
        chain: &Chain,
        terms: &Terms,
        closing: &Closing,
    ) -> Option<(StepOutcome, StepRecord)> {
        let is_next = closing.step == self.step;
        let outcome = is_next.then(|| stepping::outcome_of(chain, closing, self.loss_scale))?;
        let record = self.complete(terms, &outcome);
        Some((outcome, record))
    }

    /// An error where the state is not at a step.
    pub fn expect_at(&self, epoch: Epoch, step: u64) -> Result {
        match self.is_at(step) {
            true => Ok(()),
            false => {
                let what = format!("it is at step {}, or part of it is", self.step);
                Err(CrewError::NotHeld { epoch: epoch.0, step, what })
            }
        }
    }
}

impl Parked {
    fn read(&self, part: usize) -> EngineResult<Cow<'_, [f32]>> {
        match &self.place {
            ParkedPlace::Host(tensors) => Ok(Cow::Borrowed(tensors[part].floats())),
            ParkedPlace::Disk(disk) => {
                let mut values = vec![0.0; disk.elements];
                match part {
                    0 => disk.read_parameter(&mut values)?,
                    state => disk.read_state(state - 1, &mut values)?,
                }
                Ok(Cow::Owned(values))
            }
        }
    }
}
