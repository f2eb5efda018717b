//! One job as the controller knows it for good: what its owner wants, where its state is, and where it is between one plan
//! and the next. It changes by [`Change`]s alone.
//!
//! ```text
//!    Resting ──Asked──▶ Planning ──Moving──▶ Moving ──Started──▶ Running ──Stopping──▶ Stopping
//!       ▲                 ▲  ▲  ▲              │                                          │ Decided
//!       │                 │  │  └──Abandoned───┘                                          ▼
//!       │                 │  └─────────────────────────Settled──────────────────────── Settling
//!       │                 │ ▲────────────────Restored (a slice has no holder left)────────┘
//!       │      (nothing to│ │Released (its state is saved, to make room for moving it)
//!       │       run it on)▼ │
//!       └────Rested───── Saving
//! ```
//!
//! In Running, and while Stopping, workers may run the job's epoch; in every other phase nobody runs anything of it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use shoal_plan::Closing;

use super::receipt::{Before, Receipt};
use super::record::{Change, Failure, Paced, Why};
use crate::message::{Checkpoint, Epoch, Plan, Save, WorkerId};

/// Times that state may fail to be read from where it is to come from: failures may be passing ones.
pub const READ_TRIES_MAX: u32 = 3;
/// Times that workers may fail to get their state for reasons of their own, without a plan that started in between.
pub const INSTALL_TRIES_MAX: u32 = 4;
/// Times that a job which can get no further may fail to be saved: then its last checkpoint is what is left of it.
pub const SAVE_TRIES_MAX: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    Foreground,
    Background,
}

/// When a running job is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Interval {
    Steps(u64),
    /// By what saving costs and how often workers are lost.
    Auto,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobSpec {
    pub name: String,
    pub class: Class,
    /// Larger goes first.
    pub priority: i32,
    pub steps: u64,
    pub workers_min: usize,
    pub workers_max: usize,
    pub checkpoint_every: Interval,
    /// Complete ones that stay when there is another; one at least does.
    pub checkpoints_kept: usize,
    /// The job itself, which planners and engines read.
    pub description: String,
}

/// What the job's owner wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wish {
    Run,
    Pause,
    Cancel,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rest {
    Queued,
    Paused,
    /// It could not go on, for [`Job::failure`]; a wish to run has it tried again.
    Failed,
    Done,
    Cancelled,
}

/// Where a job's state is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Base {
    Fresh,
    Checkpoint(Checkpoint),
    /// In the memory of a plan's workers, all at one step unless it runs.
    Held {
        epoch: Epoch,
        plan: Plan,
        step: u64,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    Resting(Rest),
    /// Nobody runs it, and there is no plan yet; `next` is one that was made before it stopped.
    Planning {
        next: Option<Plan>,
    },
    Moving {
        plan: Plan,
        sources: Vec<WorkerId>,
    },
    Running,
    Stopping {
        after: Option<u64>,
        why: Why,
        next: Option<Plan>,
    },
    Settling {
        step: u64,
        closing: Option<Closing>,
        next: Option<Plan>,
    },
    /// At one step, to be saved before its workers are given back.
    Saving,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    pub spec: JobSpec,
    pub wish: Wish,
    pub phase: Phase,
    pub base: Base,
    /// The last that was given out.
    pub epoch: Epoch,
    /// Steps that are done. The data position is this times the batch: nothing else counts samples.
    pub committed: u64,
    pub closing: Option<Closing>,
    /// Steps ever counted, and those of them that a return to a checkpoint undid.
    pub counted: u64,
    pub undone: u64,
    /// Complete ones, oldest first.
    pub checkpoints: Vec<Checkpoint>,
    /// Newer ones that could not be read. They are kept until another is complete, and tried again at a wish to run.
    pub unreadable: Vec<Checkpoint>,
    pub saving: Option<Save>,
    /// Last given out.
    pub checkpoint: u64,
    /// Attempts in a row of which nothing came.
    #[serde(default)]
    pub unsaved: u32,
    /// How long the last complete one held training up.
    pub save_cost_ms: Option<u64>,
    /// Last given out, and the workers asked about if there is no answer yet.
    pub request: u64,
    pub asked: Option<Vec<Paced>>,
    /// The workers that the plan in force, or the last refusal, was made for.
    pub weighed: Option<Vec<Paced>>,
    /// Plans in a row whose state could not be had, for reasons that trying again may not mend; and when the last was given
    /// up.
    pub tries: u32,
    pub tried_ms: u64,
    /// Why it does not go on by itself, for its owner.
    pub failure: Option<String>,
    /// Its state is to be saved and let go of before it moves: there was no room for old and new at once.
    pub cramped: bool,
    /// How long training last paused for a change that need not have been made, from its last step's end; and since when it
    /// does.
    #[serde(default)]
    pub switch_ms: Option<u64>,
    #[serde(default)]
    pub switching_since_ms: Option<u64>,
    /// What planners foresaw for so many workers, in milliseconds a step.
    pub foreseen: BTreeMap<usize, u64>,
    /// Where its workers' time went.
    pub receipt: Receipt,
}

impl Job {
    pub(super) fn new(spec: JobSpec) -> Job {
        Job {
            spec,
            wish: Wish::Run,
            phase: Phase::Resting(Rest::Queued),
            base: Base::Fresh,
            epoch: Epoch(0),
            committed: 0,
            closing: None,
            counted: 0,
            undone: 0,
            checkpoints: Vec::new(),
            unreadable: Vec::new(),
            saving: None,
            checkpoint: 0,
            unsaved: 0,
            save_cost_ms: None,
            request: 0,
            asked: None,
            weighed: None,
            tries: 0,
            tried_ms: 0,
            failure: None,
            cramped: false,
            switch_ms: None,
            switching_since_ms: None,
            foreseen: BTreeMap::new(),
            receipt: Receipt::default(),
        }
    }

    /// Neither done nor cancelled.
    pub fn is_open(&self) -> bool {
        !matches!(self.phase, Phase::Resting(Rest::Done | Rest::Cancelled))
    }

    /// All steps are done, though perhaps not saved.
    pub fn is_finished(&self) -> bool {
        self.committed >= self.spec.steps
    }

    /// Nothing but a wish changes that.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Of the last complete checkpoint; the beginning needs none.
    pub fn saved_step(&self) -> u64 {
        self.checkpoints.last().map_or(0, |checkpoint| checkpoint.step)
    }

    pub fn is_saved(&self) -> bool {
        self.saved_step() == self.committed
    }

    /// What it becomes when nobody has anything of it.
    pub fn rest(&self) -> Rest {
        match self.wish {
            Wish::Cancel => Rest::Cancelled,
            // Also where the step that came to nothing was the last.
            _ if self.has_failed() => Rest::Failed,
            _ if self.is_finished() => Rest::Done,
            Wish::Pause => Rest::Paused,
            Wish::Run => Rest::Queued,
        }
    }

    /// The plan whose workers have the job's state.
    pub fn held(&self) -> Option<&Plan> {
        match &self.base {
            Base::Held { plan, .. } => Some(plan),
            _ => None,
        }
    }

    /// Everyone who has something of it or is to get something.
    pub fn involved(&self) -> BTreeSet<WorkerId> {
        let moving = match &self.phase {
            Phase::Moving { plan, .. } => Some(plan),
            _ => None,
        };
        self.held().into_iter().chain(moving).flat_map(|plan| plan.members.iter().copied()).collect()
    }

    /// Checkpoints that are not to be removed, whole or not.
    pub fn kept(&self) -> Vec<u64> {
        let begun = self.saving.iter().map(|save| &save.checkpoint);
        let kept = self.checkpoints.iter().chain(&self.unreadable).chain(begun);
        kept.map(|checkpoint| checkpoint.id).collect()
    }

    /// Only a change that fits (`fit`) comes here.
    pub(super) fn apply(&mut self, at_ms: u64, change: &Change) {
        let before = Before::of(self);
        self.receipt.pass(at_ms, &self.phase);
        self.time_switch(at_ms, change);
        self.take_in(change);
        if matches!(change, Change::Abandoned { .. }) {
            self.tried_ms = at_ms;
        }
        let mut receipt = self.receipt;
        receipt.follow(change, &before, self);
        self.receipt = receipt;
    }

    /// A plan that was there before the old one ended waits for nothing but the change itself.
    fn time_switch(&mut self, at_ms: u64, change: &Change) {
        let planned = matches!(self.phase, Phase::Stopping { next: Some(_), .. });
        match change {
            Change::Decided { .. } if planned => self.switching_since_ms = Some(at_ms),
            Change::Started => {
                let took_ms = self.switching_since_ms.take().map(|since_ms| at_ms.saturating_sub(since_ms));
                self.switch_ms = took_ms.or(self.switch_ms);
            }
            Change::Abandoned { .. }
            | Change::Asked { .. }
            | Change::Rested { .. }
            | Change::Restored { .. } => {
                self.switching_since_ms = None;
            }
            _ => {}
        }
    }

    fn take_in(&mut self, change: &Change) {
        match change {
            Change::Wished { wish } => self.hear_wish(*wish),
            Change::Asked { request, workers } => {
                self.request = *request;
                self.asked = Some(workers.clone());
                if matches!(self.phase, Phase::Resting(_)) {
                    self.phase = Phase::Planning { next: None };
                }
            }
            Change::Refused { .. } => self.weighed = self.asked.take(),
            Change::Declined { weighing } => self.answered(weighing.step_ms_after),
            Change::Moving { epoch, plan, sources } => {
                self.epoch = *epoch;
                self.answered(plan.step_ms);
                self.phase = Phase::Moving { plan: plan.clone(), sources: sources.clone() };
            }
            Change::Abandoned { why } => {
                self.plan_again(None);
                self.stumble(why);
            }
            Change::Started => self.start(),
            Change::Committed { step, closing } => self.commit(*step, *closing),
            Change::Stopping { after, why, next } => {
                if let Some(plan) = next {
                    self.answered(plan.step_ms);
                }
                (self.asked, self.saving) = (None, None);
                self.phase = Phase::Stopping { after: *after, why: *why, next: next.clone() };
            }
            Change::Hurried => {
                if let Phase::Stopping { after, .. } = &mut self.phase {
                    *after = None;
                }
            }
            Change::Decided { step, closing, .. } => {
                self.commit(*step, *closing);
                if let Phase::Stopping { next, .. } = &mut self.phase {
                    let next = next.take();
                    self.phase = Phase::Settling { step: *step, closing: *closing, next };
                }
            }
            Change::Settled => self.settle(),
            Change::Restored { .. } | Change::Released => {
                self.go_back();
                self.plan_again(None);
            }
            Change::SaveBegun { save, .. } => {
                self.checkpoint = save.checkpoint.id;
                self.saving = Some(save.clone());
                if matches!(self.phase, Phase::Planning { .. }) {
                    self.forget_next();
                    self.phase = Phase::Saving;
                }
            }
            Change::DeadEnd { reason } => (self.failure, self.unsaved) = (Some(reason.clone()), 0),
            Change::SaveDropped => {
                self.saving = None;
                self.unsaved = self.unsaved.saturating_add(1);
            }
            Change::SaveCompleted { cost_ms } => {
                (self.save_cost_ms, self.unsaved) = (Some(*cost_ms), 0);
                self.checkpoints.extend(self.saving.take().map(|save| save.checkpoint));
                let old = self.checkpoints.len().saturating_sub(self.spec.checkpoints_kept.max(1));
                self.checkpoints.drain(..old);
                self.unreadable.clear();
            }
            Change::Rested { rest } => {
                self.go_back();
                self.forget_next();
                self.asked = None;
                self.phase = Phase::Resting(*rest);
            }
        }
    }

    fn hear_wish(&mut self, wish: Wish) {
        self.wish = wish;
        if wish == Wish::Run && self.has_failed() {
            (self.failure, self.tries, self.weighed) = (None, 0, None);
            if let Phase::Resting(rest) = &mut self.phase {
                *rest = Rest::Queued;
                // Newer than all that are left, or they would not have been tried before them.
                self.checkpoints.append(&mut self.unreadable);
                self.go_back();
            }
        }
    }

    /// The planner has said what a step would take on those it was asked about.
    fn answered(&mut self, step_ms: u64) {
        if let Some(asked) = self.asked.take() {
            self.foreseen.insert(asked.len(), step_ms);
            self.weighed = Some(asked);
        }
    }

    fn start(&mut self) {
        if let Phase::Moving { plan, .. } = std::mem::replace(&mut self.phase, Phase::Running) {
            self.base = Base::Held { epoch: self.epoch, plan, step: self.committed };
            (self.closing, self.tries, self.cramped) = (None, 0, false);
        }
    }

    /// A plan's state could not be had. What trying again does not mend is passed over, or the job's owner is told.
    fn stumble(&mut self, why: &Failure) {
        let (reason, tries_max) = match why {
            Failure::Member | Failure::Transfer | Failure::Wished => return,
            Failure::Room if self.held().is_some() => {
                self.cramped = true;
                return;
            }
            Failure::Room => ("a worker has no room for its share of the plan", INSTALL_TRIES_MAX),
            Failure::Worker(reason) => (reason.as_str(), INSTALL_TRIES_MAX),
            Failure::Source(reason) => (reason.as_str(), READ_TRIES_MAX),
        };
        self.tries = self.tries.saturating_add(1);
        if self.tries < tries_max {
            return;
        }
        self.tries = 0;
        // To begin anew would undo all that its owner believes to be saved, so the last one is never passed over.
        let older = matches!((why, &self.base), (Failure::Source(_), Base::Checkpoint(_)))
            && self.checkpoints.len() > 1;
        if older {
            let newest = self.checkpoints.pop();
            self.unreadable.splice(..0, newest);
            self.go_back();
        } else {
            self.failure = Some(reason.to_owned());
        }
    }

    fn commit(&mut self, step: u64, closing: Option<Closing>) {
        self.counted += step - self.committed;
        self.committed = step;
        self.closing = closing;
    }

    fn settle(&mut self) {
        let Phase::Settling { step: at, next, .. } = &mut self.phase else { return };
        let (at, next) = (*at, next.take());
        if let Base::Held { step, .. } = &mut self.base {
            *step = at;
        }
        self.plan_again(next);
    }

    fn plan_again(&mut self, next: Option<Plan>) {
        self.asked = None;
        if next.is_none() {
            self.weighed = None;
        }
        self.phase = Phase::Planning { next };
    }

    /// A plan that was made is not taken. A refusal stands: the same question has the same answer.
    fn forget_next(&mut self) {
        if let Phase::Planning { next: Some(_) } = self.phase {
            self.weighed = None;
        }
    }

    /// To what storage has.
    fn go_back(&mut self) {
        self.base = self.checkpoints.last().map_or(Base::Fresh, |checkpoint| Base::Checkpoint(*checkpoint));
        self.committed = self.saved_step();
        self.undone = self.counted - self.committed;
        (self.closing, self.saving, self.cramped) = (None, None, false);
    }
}
