//! A step: what it is given, what it gives, and the values between its instructions.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use shoal_data::Inputs;
use shoal_kernels::Tensor;
use shoal_nn::{Groups, OptimizerSettings, Saved, SavedRest};
use shoal_plan::effects::Value;
use shoal_plan::{Layout, Op, Samples};

use crate::error::{EngineError, Result};

/// Where a step's samples come from, by their numbers in the global batch.
pub trait Batch: Sync {
    /// Writes the samples' inputs and targets, sample after sample.
    fn read(&self, samples: Range<usize>, inputs: Inputs, targets: &mut [i32]) -> Result;
}

/// Gives numbers of this worker.
pub type Tells<'a> = dyn Fn() -> Vec<f64> + Sync + 'a;

/// What one run of a program is given.
pub struct StepInput<'a> {
    /// Steps completed before this one: the version that instructions read.
    pub step: u64,
    pub seed: u64,
    /// The scheduled learning rate.
    pub lr: f64,
    pub optimizer: Option<&'a OptimizerSettings>,
    /// Updates applied before this step: all steps but those that an overflow skipped.
    pub updates: u64,
    /// What the gradients are multiplied by on their way; 1 except in fp16.
    pub loss_scale: f32,
    pub batch: &'a dyn Batch,
    /// Whether batch norms go by the batch's own statistics even where nothing is trained.
    pub batch_statistics: bool,
    /// The next step's samples, where they are known: they are read while the device works on this one's.
    pub next: Option<&'a dyn Batch>,
    /// Whether this step may end while its updates in host memory and on disks are under way: what comes next is a
    /// training step, or [`Executor::catch_up`](super::Executor::catch_up).
    pub leaves_updates: bool,
    /// What else is added up over all devices beside the norm, number by number: everyone gives as many. It is asked for
    /// when this device's part of the norm is known. Without others there is no such sum, and nothing is asked.
    pub tells: Option<&'a Tells<'a>>,
}

impl<'a> StepInput<'a> {
    /// A training step in which nothing was ever skipped.
    pub fn train(
        step: u64,
        seed: u64,
        lr: f64,
        optimizer: &'a OptimizerSettings,
        batch: &'a dyn Batch,
    ) -> Self {
        StepInput {
            step,
            seed,
            lr,
            optimizer: Some(optimizer),
            updates: step,
            loss_scale: 1.0,
            batch,
            batch_statistics: false,
            next: None,
            leaves_updates: false,
            tells: None,
        }
    }

    /// Losses or logits at the state after `step` steps.
    pub fn evaluate(step: u64, batch: &'a dyn Batch) -> Self {
        StepInput {
            step,
            seed: 0,
            lr: 0.0,
            optimizer: None,
            updates: step,
            loss_scale: 1.0,
            batch,
            batch_statistics: false,
            next: None,
            leaves_updates: false,
            tells: None,
        }
    }
}

/// What one run of a program gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutcome {
    /// Sum of the losses of all targets.
    pub loss_sum: f64,
    /// Targets that count.
    pub targets: u64,
    /// Of these predicted rightly, where they are classes.
    pub correct: Option<u64>,
    pub gradient_norm: f64,
    /// The gradient overflowed its range: nothing was updated.
    pub overflowed: bool,
    /// What everyone's numbers came to: see [`StepInput::tells`].
    pub told: Vec<f64>,
    /// Logits, sample by sample, of the next token, the class or every position; from predictions only.
    pub logits: Vec<f32>,
}

impl StepOutcome {
    /// Mean loss over the targets.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.targets as f64
    }

    /// The share of the targets that was predicted rightly, where they are classes.
    pub fn accuracy(&self) -> Option<f64> {
        self.correct.map(|correct| correct as f64 / self.targets as f64)
    }
}

/// A value between the instruction that makes it and the one that uses it up.
pub(super) enum Stored {
    Tensor(Tensor),
    Saved(Box<Saved>),
    /// A kept input that is in host memory.
    Offloaded(Box<(SavedRest, Option<Tensor>)>),
}

/// One step under way.
pub(super) struct Step<'a> {
    pub(super) input: &'a StepInput<'a>,
    /// The table, where others have a part in it.
    pub(super) layout: Option<&'a Layout<'a>>,
    /// Which of its devices this is.
    pub(super) device: usize,
    pub(super) training: bool,
    pub(super) values: HashMap<Value, Stored>,
    /// What batch norms know of their groups, by layer.
    pub(super) groups: HashMap<usize, Groups>,
    /// Layers whose backwards leave gradients of weights for later.
    pub(super) puts_off: HashSet<usize>,
    /// Samples of the global batch.
    pub(super) global_batch: usize,
    /// Targets among the samples that were loaded here.
    pub(super) own_targets: u64,
    /// What the end of the step reads from the device.
    pub(super) sums_loss: bool,
    pub(super) measures_norm: bool,
    pub(super) outcome: StepOutcome,
}

impl Step<'_> {
    /// What the end of the step does because of an instruction.
    pub(super) fn note(&mut self, op: &Op) {
        self.sums_loss |= matches!(op, Op::SumLoss);
        self.measures_norm |= matches!(op, Op::GradientNorm);
    }

    /// Where the samples lie that were brought onto the device: inputs (0), targets (1) and lengths (2), these once for
    /// each layer that is told.
    pub(super) fn sample_places(&self) -> impl Iterator<Item = (Samples, u8, u64)> + '_ {
        self.values.iter().filter_map(|(value, stored)| match (value, stored) {
            (Value::Inputs(samples), Stored::Tensor(tensor)) => Some((*samples, 0, tensor.place())),
            (Value::Targets(samples), Stored::Tensor(tensor)) => Some((*samples, 1, tensor.place())),
            (Value::Lengths { samples, .. }, Stored::Tensor(tensor)) => Some((*samples, 2, tensor.place())),
            _ => None,
        })
    }

    pub(super) fn put(&mut self, value: Value, stored: Stored) {
        let before = self.values.insert(value, stored);
        assert!(before.is_none(), "{value:?} was made twice");
    }

    pub(super) fn take(&mut self, value: Value) -> Stored {
        self.values.remove(&value).unwrap_or_else(|| panic!("{value:?} was never made"))
    }

    pub(super) fn take_tensor(&mut self, value: Value) -> Tensor {
        match self.take(value) {
            Stored::Tensor(tensor) => tensor,
            _ => panic!("{value:?} is no tensor"),
        }
    }

    pub(super) fn take_saved(&mut self, value: Value) -> Saved {
        match self.take(value) {
            Stored::Saved(saved) => *saved,
            _ => panic!("{value:?} is nothing that a layer saved"),
        }
    }

    pub(super) fn take_offloaded(&mut self, value: Value) -> (SavedRest, Option<Tensor>) {
        match self.take(value) {
            Stored::Offloaded(offloaded) => *offloaded,
            _ => panic!("{value:?} is not in host memory"),
        }
    }

    pub(super) fn loss_scale(&self) -> f32 {
        (f64::from(self.input.loss_scale) / self.outcome.targets.max(1) as f64) as f32
    }

    pub(super) fn count_targets(&self) -> Result {
        if self.training && self.outcome.targets == 0 {
            return Err(EngineError::NoTargets { step: self.input.step + 1, samples: self.global_batch });
        }
        Ok(())
    }

    pub(super) fn not_finite(&self, what: &'static str, value: f64) -> EngineError {
        EngineError::NotFinite { step: self.input.step + 1, what, value, checkpoint: None }
    }
}
