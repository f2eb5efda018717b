//! Where the time of a job's workers went, and the money: a receipt, kept up by the job's own changes, so that it survives
//! whatever they do. Each millisecond that a worker has something of the job is counted once. While a plan runs it is the
//! step's that is under way, and becomes the plan's when the step is counted. When the plan ends, its workers' own words
//! divide it into computing, recomputing, bubbles and the rest, which is waiting. What belongs to steps that are in no
//! checkpoint yet is kept apart: if the job goes back, it was lost.

use serde::{Deserialize, Serialize};

use super::job::{Job, Phase};
use super::record::Change;
use crate::message::{Price, Spent};

/// Time of workers, and what it cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Amount {
    pub worker_ms: u64,
    pub nanodollars: u64,
}

impl Amount {
    pub fn add(&mut self, other: Amount) {
        self.worker_ms = self.worker_ms.saturating_add(other.worker_ms);
        self.nanodollars = self.nanodollars.saturating_add(other.nanodollars);
    }

    fn less(self, other: Amount) -> Amount {
        Amount {
            worker_ms: self.worker_ms.saturating_sub(other.worker_ms),
            nanodollars: self.nanodollars.saturating_sub(other.nanodollars),
        }
    }

    /// So many of so many equal parts, or all.
    fn share(self, part: u64, whole: u64) -> Amount {
        Amount {
            worker_ms: share(self.worker_ms, part, whole),
            nanodollars: share(self.nanodollars, part, whole),
        }
    }
}

fn share(amount: u64, part: u64, whole: u64) -> u64 {
    if part >= whole {
        return amount;
    }
    let exact = u128::from(amount) * u128::from(part) / u128::from(whole);
    u64::try_from(exact).unwrap_or(amount)
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parts {
    /// Forward, backward and update of steps that count.
    pub useful: Amount,
    pub recompute: Amount,
    /// During those steps, nothing to compute until others are done.
    pub bubble: Amount,
    /// During those steps, nothing to compute while something moves.
    pub wait: Amount,
    /// Held up by saving.
    pub checkpoint: Amount,
    /// From the end of a plan until another is in force, or the workers are given back.
    pub morph: Amount,
    /// Steps that were given up, or done and undone.
    pub lost: Amount,
}

impl Parts {
    pub fn named(&self) -> [(&'static str, Amount); 7] {
        let Parts { useful, recompute, bubble, wait, checkpoint, morph, lost } = *self;
        [
            ("useful", useful),
            ("recompute", recompute),
            ("bubble", bubble),
            ("wait", wait),
            ("checkpoint", checkpoint),
            ("morph", morph),
            ("lost", lost),
        ]
    }

    pub fn sum(&self) -> Amount {
        let mut sum = Amount::default();
        self.named().into_iter().for_each(|(_, amount)| sum.add(amount));
        sum
    }

    fn each(&mut self) -> [&mut Amount; 7] {
        let Parts { useful, recompute, bubble, wait, checkpoint, morph, lost } = self;
        [useful, recompute, bubble, wait, checkpoint, morph, lost]
    }

    fn add(&mut self, other: &Parts) {
        for (mine, (_, theirs)) in self.each().into_iter().zip(other.named()) {
            mine.add(theirs);
        }
    }

    /// Takes out a share of what steps took: of all parts but those that no step took.
    fn take_steps(&mut self, part: u64, whole: u64) -> Parts {
        let mut taken = Parts::default();
        for (mine, theirs) in self.each().into_iter().zip(taken.each()).take(5) {
            *theirs = mine.share(part, whole);
            *mine = mine.less(*theirs);
        }
        taken
    }

    /// What a plan's steps took, divided as its workers say. `held_up_ms` is what saving took of it.
    fn divide(pot: Amount, spent: &Spent, held_up_ms: u64) -> Parts {
        let mut left = pot;
        let mut take = |ms: u64| {
            let taken = left.share(ms, left.worker_ms);
            left = left.less(taken);
            taken
        };
        let [useful, recompute, bubble, checkpoint] =
            [spent.useful_ms, spent.recompute_ms, spent.bubble_ms, held_up_ms].map(&mut take);
        Parts { useful, recompute, bubble, checkpoint, wait: left, ..Parts::default() }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    /// Everything, counted beside the parts.
    pub whole: Amount,
    /// Of what cannot be undone any more, and of what no step took.
    settled: Parts,
    /// Of steps of plans that have ended, in no checkpoint yet.
    unsaved: Parts,
    /// Of steps whose checkpoints could not be read, which may yet be.
    unreadable: Parts,
    /// Of the plan in force: its steps up to the last complete checkpoint, those since, and the step under way.
    running_saved: Amount,
    running: Amount,
    step: Amount,
    step_ms: u64,
    /// By checkpoints, since the plan came into force.
    held_up_ms: u64,
    /// What the steps that were counted took, and were to take by their plans: without the time of workers together.
    pub steps_ms: u64,
    pub foreseen_ms: u64,
    /// Counted up to then, for so many workers at that price together.
    at_ms: u64,
    workers: u64,
    price: Price,
}

/// Where all of it went, as far as is known now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bill {
    pub whole: Amount,
    pub parts: Parts,
    pub steps_ms: u64,
    pub foreseen_ms: u64,
}

/// Of a job before a change.
pub(super) struct Before {
    committed: u64,
    undone: u64,
    saved_step: u64,
    unreadable: usize,
    given_up: bool,
    runs: bool,
}

impl Before {
    pub(super) fn of(job: &Job) -> Before {
        Before {
            committed: job.committed,
            undone: job.undone,
            saved_step: job.saved_step(),
            unreadable: job.unreadable.len(),
            given_up: !matches!(job.phase, Phase::Stopping { after: Some(_), .. }),
            runs: runs(&job.phase),
        }
    }
}

fn runs(phase: &Phase) -> bool {
    matches!(phase, Phase::Running | Phase::Stopping { .. })
}

impl Receipt {
    /// Time has passed in a phase.
    pub(super) fn pass(&mut self, at_ms: u64, phase: &Phase) {
        let passed_ms = at_ms.saturating_sub(self.at_ms);
        self.at_ms = at_ms;
        let nanodollars = u128::from(self.price.0) * u128::from(passed_ms) / 3_600;
        let amount = Amount {
            worker_ms: self.workers.saturating_mul(passed_ms),
            nanodollars: u64::try_from(nanodollars).unwrap_or(u64::MAX),
        };
        self.whole.add(amount);
        match runs(phase) {
            true => {
                self.step.add(amount);
                self.step_ms = self.step_ms.saturating_add(passed_ms);
            }
            false => self.settled.morph.add(amount),
        }
    }

    /// Whether all time is in exactly one of its parts.
    pub(super) fn adds_up(&self) -> bool {
        let mut sum = Amount::default();
        [self.settled, self.unsaved, self.unreadable].iter().for_each(|parts| sum.add(parts.sum()));
        [self.running_saved, self.running, self.step].into_iter().for_each(|amount| sum.add(amount));
        sum.worker_ms == self.whole.worker_ms
    }

    /// Until when it is counted.
    pub fn at_ms(&self) -> u64 {
        self.at_ms
    }

    /// From now on so many workers have something of the job, at so much together.
    pub(super) fn engage(&mut self, workers: u64, price: Price) {
        (self.workers, self.price) = (workers, price);
    }

    /// What a change of a job means for where its time went.
    pub(super) fn follow(&mut self, change: &Change, before: &Before, job: &Job) {
        match change {
            Change::Committed { .. } => self.count(job, before),
            Change::Decided { spent, .. } => {
                self.count(job, before);
                self.end_plan(spent, before.given_up);
            }
            Change::Restored { spent } if before.runs => self.end_plan(spent, true),
            Change::SaveCompleted { cost_ms } => {
                self.held_up_ms = self.held_up_ms.saturating_add(cost_ms.saturating_mul(self.workers));
                self.save(before, job.saved_step());
            }
            _ => {}
        }
        self.go_back(before, job);
    }

    fn count(&mut self, job: &Job, before: &Before) {
        let steps = job.committed.saturating_sub(before.committed);
        if steps == 0 {
            return;
        }
        self.running.add(std::mem::take(&mut self.step));
        self.steps_ms = self.steps_ms.saturating_add(std::mem::take(&mut self.step_ms));
        let step_ms = job.held().map_or(0, |plan| plan.step_ms);
        self.foreseen_ms = self.foreseen_ms.saturating_add(steps.saturating_mul(step_ms));
    }

    /// `given_up`: so was the step that was under way.
    fn end_plan(&mut self, spent: &Spent, given_up: bool) {
        let rest = std::mem::take(&mut self.step);
        match given_up {
            true => self.settled.lost.add(rest),
            false => self.settled.morph.add(rest),
        }
        let (saved, unsaved) = self.divide(spent);
        self.settled.add(&saved);
        self.unsaved.add(&unsaved);
        (self.running, self.running_saved) = (Amount::default(), Amount::default());
        (self.step_ms, self.held_up_ms) = (0, 0);
    }

    /// What the steps of the plan in force took: of those that are in a checkpoint, and of the others.
    fn divide(&self, spent: &Spent) -> (Parts, Parts) {
        let mut all = self.running_saved;
        all.add(self.running);
        let part = |ms| share(ms, self.running_saved.worker_ms, all.worker_ms);
        let saved = Spent {
            useful_ms: part(spent.useful_ms),
            recompute_ms: part(spent.recompute_ms),
            bubble_ms: part(spent.bubble_ms),
        };
        let unsaved = Spent {
            useful_ms: spent.useful_ms - saved.useful_ms,
            recompute_ms: spent.recompute_ms - saved.recompute_ms,
            bubble_ms: spent.bubble_ms - saved.bubble_ms,
        };
        let held_up_ms = part(self.held_up_ms);
        (
            Parts::divide(self.running_saved, &saved, held_up_ms),
            Parts::divide(self.running, &unsaved, self.held_up_ms - held_up_ms),
        )
    }

    /// A checkpoint is complete: what its steps took is safe, those done since are not.
    fn save(&mut self, before: &Before, step: u64) {
        let part = step.saturating_sub(before.saved_step);
        let whole = before.committed.saturating_sub(before.saved_step);
        let safe = self.unsaved.take_steps(part, whole);
        self.settled.add(&safe);
        let safe = self.running.share(part, whole);
        self.running_saved.add(safe);
        self.running = self.running.less(safe);
        // What could not be read is passed over for good.
        self.settled.lost.add(std::mem::take(&mut self.unreadable).sum());
    }

    /// Steps that were done no longer count, or count again.
    fn go_back(&mut self, before: &Before, job: &Job) {
        if job.unreadable.len() > before.unreadable {
            let part = before.committed.saturating_sub(job.committed);
            let passed_over = self.settled.take_steps(part, before.committed);
            self.unreadable.add(&passed_over);
        } else if job.undone < before.undone {
            self.settled.add(&std::mem::take(&mut self.unreadable));
        } else if job.undone > before.undone {
            self.settled.lost.add(std::mem::take(&mut self.unsaved).sum());
        }
    }

    /// Where it all went until now, by the last word of the workers of the plan in force.
    pub(super) fn bill(&self, now_ms: u64, phase: &Phase, spent: &Spent) -> Bill {
        let mut receipt = *self;
        receipt.pass(now_ms, phase);
        receipt.running.add(std::mem::take(&mut receipt.step));
        let (saved, unsaved) = receipt.divide(spent);
        let mut parts = receipt.settled;
        [saved, unsaved, receipt.unsaved].iter().for_each(|more| parts.add(more));
        parts.lost.add(receipt.unreadable.sum());
        let Receipt { whole, steps_ms, foreseen_ms, .. } = receipt;
        Bill { whole, parts, steps_ms, foreseen_ms }
    }
}
