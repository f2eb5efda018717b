//! What may follow what. A controller writes no record that does not fit its state, and reads none: a log or a snapshot that
//! says otherwise is damaged or somebody else's, however good its checksums are. What holds after these checks the rest of
//! the controller relies on: places are within plans, numbers only grow, and no sum is less than what is taken from it.

use shoal_plan::Closing;
use thiserror::Error;

use super::job::{Base, Interval, Job, JobSpec, Phase};
use super::record::{Change, Record};
use super::state::{Member, State};
use crate::message::{Checkpoint, JobId, NUMBER_MAX, Plan, PlanError, Save, WorkerId};

/// Why a record, or a state, cannot be.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Misfit {
    #[error("job {} was never submitted", .0.0)]
    NoJob(JobId),
    #[error("job {} was submitted before", .0.0)]
    JobAgain(JobId),
    #[error("worker {} is not there", .0.0)]
    NoWorker(WorkerId),
    #[error("worker number {} was given out before", .0.0)]
    WorkerAgain(WorkerId),
    #[error("a number that is given out once is {found} after {last}")]
    Number { last: u64, found: u64 },
    #[error("{0} is more than any number or time can be")]
    TooLarge(u64),
    #[error("step {step} of {steps}, {committed} of which are done")]
    Step { step: u64, committed: u64, steps: u64 },
    #[error("{steps} steps with closing sums of step {closing}")]
    Closing { closing: u64, steps: u64 },
    #[error("{counted} steps were counted and {undone} undone, but {committed} are done")]
    Books { counted: u64, undone: u64, committed: u64 },
    #[error("checkpoints are out of order, or of steps that were not done")]
    Checkpoints,
    #[error("the parts of a receipt do not add up")]
    Receipt,
    #[error("nothing of the kind was under way")]
    Phase,
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Spec(#[from] SpecError),
}

/// Why a job cannot be taken on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SpecError {
    #[error("a job of {0} steps")]
    Steps(u64),
    #[error("a job for {min} to {max} workers")]
    Workers { min: usize, max: usize },
    #[error("a checkpoint every {0} steps")]
    Interval(u64),
}

impl SpecError {
    pub fn hint(&self) -> &'static str {
        match self {
            SpecError::Steps(_) => "a job has at least one step, and fewer than 2^53",
            SpecError::Workers { .. } => {
                "a job needs at least one worker, and may have as many as it needs or more"
            }
            SpecError::Interval(_) => "save after at least one step, or let the interval be chosen",
        }
    }
}

impl JobSpec {
    /// A controller takes no other jobs on.
    pub fn check(&self) -> Result<(), SpecError> {
        let JobSpec { steps, workers_min: min, workers_max: max, .. } = *self;
        if steps == 0 || steps >= NUMBER_MAX {
            return Err(SpecError::Steps(steps));
        }
        if max == 0 || min > max {
            return Err(SpecError::Workers { min, max });
        }
        match self.checkpoint_every {
            Interval::Steps(every) if every == 0 || every >= NUMBER_MAX => Err(SpecError::Interval(every)),
            _ => Ok(()),
        }
    }
}

impl State {
    /// Whether a record may come next.
    pub(super) fn fits(&self, record: &Record) -> Result<(), Misfit> {
        within(self.revision)?;
        let there = |worker: &WorkerId| match self.is_alive(*worker) {
            true => Ok(()),
            false => Err(Misfit::NoWorker(*worker)),
        };
        match record {
            Record::Joined { worker, at_ms, price, .. } => {
                within(*at_ms).and(within(price.0))?;
                grows(self.worker, worker.0).map_err(|_| Misfit::WorkerAgain(*worker))
            }
            Record::Lost { worker, at_ms, .. } => within(*at_ms).and(there(worker)),
            Record::Leaving { worker, by_ms } => within(*by_ms).and(there(worker)),
            Record::Quarantined { worker, until_ms } => within(*until_ms).and(there(worker)),
            Record::Paced { worker, .. } | Record::Cleared { worker } => there(worker),
            Record::Submitted { job, at_ms, spec } => {
                within(*at_ms)?;
                spec.check()?;
                if self.jobs.contains_key(job) { Err(Misfit::JobAgain(*job)) } else { Ok(()) }
            }
            Record::Job { job, at_ms, change } => {
                within(*at_ms)?;
                self.jobs.get(job).ok_or(Misfit::NoJob(*job))?.fits(change)
            }
        }
    }

    /// Whether a snapshot can be one.
    pub fn check(&self) -> Result<(), Misfit> {
        within(self.revision).and(within(self.worker))?;
        let changes = self.changes;
        within(changes.count)
            .and(within(changes.first_ms))
            .and(within(changes.last_ms))
            .and(within(changes.losses))?;
        for (worker, Member { leaves_by_ms, quarantined_until_ms, price, .. }) in &self.members {
            [*leaves_by_ms, *quarantined_until_ms, Some(price.0)]
                .into_iter()
                .flatten()
                .try_for_each(within)?;
            if worker.0 > self.worker {
                return Err(Misfit::NoWorker(*worker));
            }
        }
        self.jobs.values().try_for_each(Job::check)
    }
}

impl Job {
    /// Whether a change may come next.
    fn fits(&self, change: &Change) -> Result<(), Misfit> {
        match change {
            Change::Wished { .. } | Change::Rested { .. } => Ok(()),
            Change::Asked { request, .. } => grows(self.request, *request),
            Change::Refused { .. } | Change::Declined { .. } => under_way(self.asked.is_some()),
            Change::Moving { epoch, plan, .. } => {
                plan.check()?;
                grows(self.epoch.0, epoch.0)?;
                under_way(matches!(self.phase, Phase::Planning { .. }))
            }
            Change::Abandoned { .. } | Change::Started => {
                under_way(matches!(self.phase, Phase::Moving { .. }))
            }
            Change::Committed { step, closing } => {
                self.goes_on(*step, *closing)?;
                under_way(matches!(self.phase, Phase::Running | Phase::Stopping { .. }))
            }
            Change::Stopping { after, next, .. } => {
                next.as_ref().map_or(Ok(()), Plan::check)?;
                after.map_or(Ok(()), within)?;
                under_way(matches!(self.phase, Phase::Running))
            }
            Change::Hurried => under_way(matches!(self.phase, Phase::Stopping { .. })),
            Change::Decided { step, closing, .. } => {
                self.goes_on(*step, *closing)?;
                under_way(matches!(self.phase, Phase::Stopping { .. }))
            }
            Change::DeadEnd { .. } => under_way(matches!(
                self.phase,
                Phase::Running | Phase::Stopping { .. } | Phase::Settling { .. } | Phase::Saving
            )),
            Change::Settled => under_way(matches!(self.phase, Phase::Settling { .. })),
            Change::Restored { .. } => under_way(self.held().is_some()),
            Change::Released => under_way(self.held().is_some() && self.is_saved()),
            Change::SaveBegun { save, .. } => {
                grows(self.checkpoint, save.checkpoint.id)?;
                self.may_save(save)?;
                under_way(self.held().is_some())
            }
            Change::SaveDropped => under_way(self.saving.is_some()),
            Change::SaveCompleted { cost_ms } => {
                within(*cost_ms)?;
                let saving = self.saving.as_ref().ok_or(Misfit::Phase)?;
                if saving.checkpoint.step > self.committed { Err(Misfit::Checkpoints) } else { Ok(()) }
            }
        }
    }

    fn goes_on(&self, step: u64, closing: Option<Closing>) -> Result<(), Misfit> {
        let (committed, steps) = (self.committed, self.spec.steps);
        if step < committed || step > steps {
            return Err(Misfit::Step { step, committed, steps });
        }
        match closing {
            Some(Closing { step: closing, .. }) if closing >= steps => {
                Err(Misfit::Closing { closing, steps })
            }
            _ => Ok(()),
        }
    }

    fn may_save(&self, save: &Save) -> Result<(), Misfit> {
        let (step, committed, steps) = (save.checkpoint.step, self.committed, self.spec.steps);
        if step < committed || step > steps {
            return Err(Misfit::Step { step, committed, steps });
        }
        if save.writers.is_empty() { Err(Misfit::Checkpoints) } else { Ok(()) }
    }

    fn check(&self) -> Result<(), Misfit> {
        self.spec.check()?;
        let Job { counted, undone, committed, .. } = *self;
        let cost_ms = self.save_cost_ms.unwrap_or(0);
        let switch_ms = self.switch_ms.unwrap_or(0).max(self.switching_since_ms.unwrap_or(0));
        let given_out = [self.epoch.0, self.checkpoint, self.request];
        for number in given_out.into_iter().chain([self.tried_ms, counted, undone, cost_ms, switch_ms]) {
            within(number)?;
        }
        if counted.checked_sub(undone) != Some(committed) {
            return Err(Misfit::Books { counted, undone, committed });
        }
        if !self.receipt.adds_up() {
            return Err(Misfit::Receipt);
        }
        self.goes_on(committed, self.closing)?;
        self.check_checkpoints()?;
        let (moving, next) = match &self.phase {
            Phase::Moving { plan, .. } => (Some(plan), None),
            Phase::Planning { next } | Phase::Stopping { next, .. } => (None, next.as_ref()),
            Phase::Settling { step, closing, next } => {
                self.goes_on(*step, *closing)?;
                (None, next.as_ref())
            }
            Phase::Resting(_) | Phase::Running | Phase::Saving => (None, None),
        };
        for plan in self.held().into_iter().chain(moving).chain(next) {
            plan.check()?;
        }
        let needs_workers = matches!(
            self.phase,
            Phase::Running | Phase::Stopping { .. } | Phase::Settling { .. } | Phase::Saving
        );
        under_way(self.held().is_some() || !needs_workers)
    }

    fn check_checkpoints(&self) -> Result<(), Misfit> {
        let all: Vec<&Checkpoint> = self.checkpoints.iter().chain(&self.unreadable).collect();
        let ordered = all.windows(2).all(|pair| pair[0].id < pair[1].id && pair[0].step <= pair[1].step);
        let known =
            all.iter().all(|checkpoint| checkpoint.id <= self.checkpoint && checkpoint.step <= self.counted);
        let done = self.saved_step() <= self.committed;
        let base = match &self.base {
            Base::Fresh => self.committed == 0 && all.is_empty(),
            Base::Checkpoint(checkpoint) => {
                self.checkpoints.last() == Some(checkpoint) && self.committed == checkpoint.step
            }
            Base::Held { step, .. } => *step <= self.committed,
        };
        if !(ordered && known && done && base) {
            return Err(Misfit::Checkpoints);
        }
        self.saving.as_ref().map_or(Ok(()), |save| self.may_have_begun(save))
    }

    /// Steps may have been done since it was begun.
    fn may_have_begun(&self, save: &Save) -> Result<(), Misfit> {
        let known = save.checkpoint.id <= self.checkpoint && save.checkpoint.step <= self.spec.steps;
        if known && !save.writers.is_empty() { Ok(()) } else { Err(Misfit::Checkpoints) }
    }
}

fn within(number: u64) -> Result<(), Misfit> {
    if number < NUMBER_MAX { Ok(()) } else { Err(Misfit::TooLarge(number)) }
}

fn grows(last: u64, found: u64) -> Result<(), Misfit> {
    within(found)?;
    if found > last { Ok(()) } else { Err(Misfit::Number { last, found }) }
}

fn under_way(is: bool) -> Result<(), Misfit> {
    if is { Ok(()) } else { Err(Misfit::Phase) }
}
