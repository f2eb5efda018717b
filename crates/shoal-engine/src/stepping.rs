//! One training step, as each of its workers does it. All that a step is given is a function of its number: samples,
//! learning rate, what is drawn at random. So whoever does it, on whatever plan and after whatever happened, does the same
//! step. What follows steps (books, checkpoints, orders) is the affair of whoever calls this. So is when held-out loss is
//! measured; how, is here too.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

use shoal_data::{Dataset, Inputs, Order};
use shoal_model::Chain;
use shoal_nn::{OptimizerSettings, Schedule};
use shoal_plan::{Closing, Layout, Op, Plan, Program, Purpose, compile, verify};

use crate::error::{EngineError, Result};
use crate::executor::{Batch, Executor, StepInput, StepOutcome, Tells};
use crate::loss_scale::LossScale;

/// What all steps of a job have in common.
#[derive(Clone, Copy)]
pub struct Terms<'a> {
    /// Of the whole job: the schedule goes by it.
    pub steps: u64,
    pub seed: u64,
    pub optimizer: &'a OptimizerSettings,
    pub schedule: &'a Schedule,
    pub data: &'a Dataset,
    pub order: &'a Order,
}

/// A step's work for one worker.
#[derive(Clone, Copy)]
pub struct Work<'a> {
    pub plan: &'a Plan,
    pub program: &'a Program,
    /// Where anything of the step happens elsewhere than in the device's own memory.
    pub layout: Option<&'a Layout<'a>>,
    /// What this worker tells the others in the step: see [`StepInput::tells`].
    pub tells: Option<&'a Tells<'a>>,
}

/// Samples of the endless stream from some position on.
struct Window<'a> {
    data: &'a Dataset,
    order: &'a Order,
    first: u64,
}

impl Batch for Window<'_> {
    fn read(&self, samples: Range<usize>, inputs: Inputs, targets: &mut [i32]) -> Result {
        let places: Vec<(u64, u64)> =
            samples.map(|sample| self.order.index(self.first + sample as u64)).collect();
        Ok(self.data.read_all(&places, inputs, targets)?)
    }
}

impl Terms<'_> {
    /// The scheduled rate of a step.
    pub fn lr(&self, step: u64) -> f64 {
        self.optimizer.lr * self.schedule.factor(step, self.steps)
    }

    /// Does the step after `step` others.
    pub fn train(
        &self,
        executor: &mut Executor,
        work: Work,
        step: u64,
        loss_scale: Option<LossScale>,
    ) -> Result<StepOutcome> {
        let samples = work.plan.global_batch as u64;
        let window = |step: u64| Window { data: self.data, order: self.order, first: step * samples };
        let (batch, next) = (window(step), window(step + 1));
        let last = step + 1 >= self.steps;
        let (scale, skipped) = loss_scale.map_or((1.0, 0), |state| (state.scale, state.skipped));
        let input = StepInput {
            updates: step - skipped.min(step),
            loss_scale: scale,
            next: if last { None } else { Some(&next) },
            leaves_updates: !last,
            tells: work.tells,
            ..StepInput::train(step, self.seed, self.lr(step), self.optimizer, &batch)
        };
        let outcome = executor.run_in(work.layout, work.program, &input)?;
        if outcome.overflowed && loss_scale.is_some_and(|scale| !scale.can_fall()) {
            let (step, what, value) = (step + 1, "norm of the gradient", outcome.gradient_norm);
            return Err(EngineError::NotFinite { step, what, value, checkpoint: None });
        }
        Ok(outcome)
    }
}

/// A worker's part of measuring held-out loss under one plan.
pub struct Evaluation {
    /// The worker's, in the plan.
    device: usize,
    /// Plans and programs by number of samples: whole batches, and the last one. Made when they are first needed.
    programs: HashMap<usize, (Plan, Program)>,
}

/// What a worker knows of a held-out loss.
pub enum Measured {
    Whole(StepOutcome),
    /// Some of the sums were made without this worker: it computes none of those samples and keeps no state.
    Elsewhere,
}

impl Evaluation {
    pub fn new(device: usize) -> Evaluation {
        Evaluation { device, programs: HashMap::new() }
    }

    /// Goes through all held-out samples in batches as large as the plan's, after `step` steps. It changes no state.
    pub fn measure(
        &mut self,
        executor: &mut Executor,
        plan: &Plan,
        chain: &Chain,
        step: u64,
        data: &Dataset,
    ) -> Result<Measured> {
        let order = Order::new(data.len(), 0, false);
        let (mut whole, mut first, mut knows) = (StepOutcome::default(), 0, true);
        while first < data.len() {
            let samples = (plan.global_batch as u64).min(data.len() - first) as usize;
            let (plan, program) = self.program(plan, chain, samples)?;
            let layout = Layout::new(plan, chain);
            let layout = needs_table(&layout, program).then_some(&layout);
            knows &= program.instructions.iter().any(|next| matches!(next.op, Op::SumLoss));
            let window = Window { data, order: &order, first };
            let outcome = executor.run_in(layout, program, &StepInput::evaluate(step, &window))?;
            whole.loss_sum += outcome.loss_sum;
            whole.targets += outcome.targets;
            whole.correct = outcome.correct.map(|correct| correct + whole.correct.unwrap_or(0));
            first += samples as u64;
        }
        Ok(if knows { Measured::Whole(whole) } else { Measured::Elsewhere })
    }

    /// What the worker does for so many samples.
    fn program(&mut self, plan: &Plan, chain: &Chain, samples: usize) -> Result<&(Plan, Program)> {
        match self.programs.entry(samples) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(place) => {
                let plan = plan.of_first(samples);
                let program = compile(&plan, chain, Purpose::Evaluate)?.swap_remove(self.device);
                verify(&program, &plan, chain, Purpose::Evaluate)?;
                Ok(place.insert((plan, program)))
            }
        }
    }
}

/// What a step gave, by its closing sums and the scale that its loss had.
pub fn outcome_of(chain: &Chain, closing: &Closing, loss_scale: Option<LossScale>) -> StepOutcome {
    let scale = loss_scale.map_or(1.0, |state| state.scale);
    let gradient_norm = f64::from(closing.norm_squared).sqrt() / f64::from(scale);
    StepOutcome {
        loss_sum: closing.loss.into(),
        targets: closing.targets,
        correct: chain.image.map(|_| f64::from(closing.correct) as u64),
        gradient_norm,
        overflowed: !gradient_norm.is_finite(),
        told: Vec::new(),
        logits: Vec::new(),
    }
}

/// Whether a program's steps cannot be made without the table: something happens elsewhere than in its device's own memory, or one
/// layer's micro-batches are not the next one's.
pub fn needs_table(layout: &Layout, program: &Program) -> bool {
    let samples = |layer: usize| layout.shares(layer).iter().map(|share| share.samples);
    layout.members().len() > 1
        || program.instructions.iter().any(|instruction| instruction.op.moves())
        || (1..layout.chain.layers.len()).any(|layer| !samples(layer).eq(samples(layer - 1)))
}
