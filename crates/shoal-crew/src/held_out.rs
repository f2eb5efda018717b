//! Held-out loss. It is measured after steps that follow from their numbers alone, so everyone who runs a plan does it at
//! the same ones, whatever happened before; by the programs that the plan compiles to for that, as any run does it. It
//! changes no state: whoever is lost meanwhile costs no step. Then the next plan begins with what was not measured.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use shoal_control::message::Epoch;
use shoal_data::{Dataset, Inputs, Order};
use shoal_engine::executor::Batch;
use shoal_engine::metrics::StepRecord;
use shoal_engine::stepping::is_shared;
use shoal_engine::{EngineError, StepInput, StepOutcome};
use shoal_model::Chain;
use shoal_plan::{Layout, Op, Plan, Program, Purpose, compile, verify};

use crate::assembly::Assembled;
use crate::error::{CrewError, Result};
use crate::hands::Hands;
use crate::share::Share;

/// Samples that nothing learns from.
pub struct HeldOut {
    pub data: Dataset,
    /// Measured after every so many steps, and after the last.
    pub every_steps: u64,
}

/// A plan's evaluation programs for this worker, by number of samples: whole batches, and the last one.
pub type Programs = HashMap<usize, Arc<(Plan, Program)>>;

/// Samples in their order from one of them on.
struct Window<'a> {
    data: &'a Dataset,
    order: &'a Order,
    first: u64,
}

impl Batch for Window<'_> {
    fn read(
        &self,
        samples: Range<usize>,
        inputs: Inputs,
        targets: &mut [i32],
    ) -> shoal_engine::error::Result {
        let places: Vec<(u64, u64)> =
            samples.map(|sample| self.order.index(self.first + sample as u64)).collect();
        Ok(self.data.read_all(&places, inputs, targets)?)
    }
}

impl Assembled {
    /// Whether held-out loss is measured after a step.
    fn measures(&self, step: u64) -> bool {
        let due = |held_out: &HeldOut| step >= self.steps || step.is_multiple_of(held_out.every_steps);
        step > 0 && self.held_out.as_ref().is_some_and(due)
    }
}

impl Hands {
    /// Measures held-out loss, if it is due after the steps that are done, and tells what the last one came to. Everyone of
    /// the plan comes here after the same steps.
    pub(crate) fn measure(&mut self, epoch: Epoch, record: StepRecord) -> Result {
        let measured = self.evaluate(epoch);
        match &measured {
            Ok(Measured::Whole(outcome)) => self.tell_record(epoch, Some(with(record, outcome))),
            // Others tell more of it.
            Ok(Measured::Elsewhere) => {}
            Ok(Measured::NotDue) | Err(_) => self.tell_record(epoch, Some(record)),
        }
        measured.map(drop)
    }

    /// Measures what a plan before this one may have left unmeasured. Only those who have the step's record tell of it, but
    /// all take part, since newcomers cannot know whether it was measured.
    pub(crate) fn make_up(&mut self, epoch: Epoch) -> Result {
        let step = self.shares.get(&epoch).ok_or(CrewError::Stopped)?.step;
        let left = self.unmeasured.take().filter(|record| record.step == step);
        let measured = self.evaluate(epoch)?;
        if let (Measured::Whole(outcome), Some(record)) = (measured, left) {
            self.tell_record(epoch, Some(with(record, &outcome)));
        }
        Ok(())
    }

    /// Tells what a step came to. One that lacks its held-out loss is remembered.
    pub(crate) fn tell_record(&mut self, epoch: Epoch, record: Option<StepRecord>) {
        if let (Some(record), Ok(assembled)) = (&record, self.assembled()) {
            let lacks = assembled.measures(record.step) && record.eval_loss.is_none();
            self.unmeasured = lacks.then(|| record.clone());
        }
        self.crewed.tell_step(self.job, epoch, record);
    }

    fn evaluate(&mut self, epoch: Epoch) -> Result<Measured> {
        let assembled = self.assembled.as_ref().ok_or(CrewError::Stopped)?;
        let share = self.shares.get_mut(&epoch).ok_or(CrewError::Stopped)?;
        match assembled.held_out.as_ref().filter(|_| assembled.measures(share.step)) {
            Some(held_out) => evaluate(share, &assembled.chain, &held_out.data),
            None => Ok(Measured::NotDue),
        }
    }
}

/// What a worker knows of a held-out loss.
enum Measured {
    NotDue,
    Whole(StepOutcome),
    /// Some of the sums were made without this worker: it computes none of those samples and keeps no state.
    Elsewhere,
}

fn with(record: StepRecord, outcome: &StepOutcome) -> StepRecord {
    StepRecord { eval_loss: Some(outcome.loss()), eval_accuracy: outcome.accuracy(), ..record }
}

fn evaluate(share: &mut Share, chain: &Chain, data: &Dataset) -> Result<Measured> {
    let order = Order::new(data.len(), 0, false);
    let (step, batch) = (share.step, share.plan.global_batch as u64);
    let (mut whole, mut first, mut knows) = (StepOutcome::default(), 0, true);
    while first < data.len() {
        let samples = batch.min(data.len() - first) as usize;
        let compiled = program(share, chain, samples)?;
        let (plan, program) = &*compiled;
        let layout = Layout::new(plan, chain);
        let layout = is_shared(&layout, program).then_some(&layout);
        knows &= program.instructions.iter().any(|next| matches!(next.op, Op::SumLoss));
        let window = Window { data, order: &order, first };
        let executor = share.executor().ok_or(CrewError::Stopped)?;
        executor.set_traces(false);
        let outcome = executor.run_in(layout, program, &StepInput::evaluate(step, &window))?;
        whole.loss_sum += outcome.loss_sum;
        whole.targets += outcome.targets;
        whole.correct = outcome.correct.map(|correct| correct + whole.correct.unwrap_or(0));
        first += samples as u64;
    }
    Ok(if knows { Measured::Whole(whole) } else { Measured::Elsewhere })
}

/// What this worker does for so many samples under its share's plan.
fn program(share: &mut Share, chain: &Chain, samples: usize) -> Result<Arc<(Plan, Program)>> {
    if let Some(known) = share.evaluation.get(&samples) {
        return Ok(known.clone());
    }
    let plan = share.plan.of_first(samples);
    let mut programs = compile(&plan, chain, Purpose::Evaluate).map_err(EngineError::from)?;
    let program = programs.swap_remove(share.program.device);
    verify(&program, &plan, chain, Purpose::Evaluate).map_err(EngineError::from)?;
    let compiled = Arc::new((plan, program));
    share.evaluation.insert(samples, compiled.clone());
    Ok(compiled)
}
