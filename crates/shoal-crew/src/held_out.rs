//! Held-out loss. It is measured after steps that follow from their numbers alone, so everyone who runs a plan does it at
//! the same ones, whatever happened before; by the programs that the plan compiles to for that, as any run does it. It
//! changes no state: whoever is lost meanwhile costs no step. Then the next plan begins with what was not measured.

use shoal_control::message::Epoch;
use shoal_data::Dataset;
use shoal_engine::StepOutcome;
use shoal_engine::metrics::StepRecord;
use shoal_engine::stepping::Measured;

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
            Ok(Some(Measured::Whole(outcome))) => self.tell_record(epoch, Some(with(record, outcome))),
            // Others tell more of it.
            Ok(Some(Measured::Elsewhere)) => {}
            Ok(None) | Err(_) => self.tell_record(epoch, Some(record)),
        }
        measured.map(drop)
    }

    /// Measures what a plan before this one may have left unmeasured. Only those who have the step's record tell of it, but
    /// all take part, since newcomers cannot know whether it was measured.
    pub(crate) fn make_up(&mut self, epoch: Epoch) -> Result {
        let step = self.shares.get(&epoch).ok_or(CrewError::Stopped)?.step;
        let left = self.unmeasured.take().filter(|record| record.step == step);
        let measured = self.evaluate(epoch)?;
        if let (Some(Measured::Whole(outcome)), Some(record)) = (measured, left) {
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

    /// What was measured; none where nothing is due.
    fn evaluate(&mut self, epoch: Epoch) -> Result<Option<Measured>> {
        let assembled = self.assembled.as_ref().ok_or(CrewError::Stopped)?;
        let share = self.shares.get_mut(&epoch).ok_or(CrewError::Stopped)?;
        let Some(held_out) = assembled.held_out.as_ref().filter(|_| assembled.measures(share.step)) else {
            return Ok(None);
        };
        let Share { body, evaluation, plan, step, .. } = share;
        let executor = body.executor().ok_or(CrewError::Stopped)?;
        executor.set_traces(false);
        Ok(Some(evaluation.measure(executor, plan, &assembled.chain, *step, &held_out.data)?))
    }
}

fn with(record: StepRecord, outcome: &StepOutcome) -> StepRecord {
    StepRecord { eval_loss: Some(outcome.loss()), eval_accuracy: outcome.accuracy(), ..record }
}
