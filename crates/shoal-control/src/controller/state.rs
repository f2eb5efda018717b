//! What the controller knows for good: members, jobs, and where each job is between one plan and the next. It changes by
//! records alone ([`State::apply`]), so that replaying the log gives it back.
//!
//! ```text
//!    Resting ──Asked──▶ Planning ──Moving──▶ Moving ──Started──▶ Running ──Stopping──▶ Stopping
//!       ▲                 ▲  ▲  ▲              │                                          │ Decided
//!       │                 │  │  └──Abandoned───┘                                          ▼
//!       │                 │  └─────────────────────────Settled──────────────────────── Settling
//!       └─Rested── Saving ◀┘ (nothing to run it on, or it is not to run)                  │
//!                         ▲───────────────Restored (a slice has no holder left)───────────┘
//! ```
//!
//! In Running, and while Stopping, workers may run the job's epoch; in every other phase nobody runs anything of it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use shoal_plan::Closing;

use super::record::{Loss, Paced, Record, Why};
use crate::message::{Checkpoint, Epoch, Installation, JobId, Plan, Save, Source, WorkerId};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    Foreground,
    Background,
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
    pub checkpoint_every_steps: u64,
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
    pub saving: Option<Save>,
    /// Last given out.
    pub checkpoint: u64,
    /// Last given out, and the workers asked about if there is no answer yet.
    pub request: u64,
    pub asked: Option<Vec<Paced>>,
    /// The workers that the plan in force, or the last refusal, was made for.
    pub weighed: Option<Vec<Paced>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    pub name: String,
    pub boot: u64,
    pub about: String,
    pub leaves_by_ms: Option<u64>,
    pub pace_percent: u32,
    pub quarantined_until_ms: Option<u64>,
}

/// When the fleet changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Changes {
    pub count: u64,
    pub first_ms: u64,
    pub last_ms: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Records applied.
    pub revision: u64,
    /// Those who are alive.
    pub members: BTreeMap<WorkerId, Member>,
    /// Every name's last boot, and the number it got.
    pub names: BTreeMap<String, (u64, WorkerId)>,
    pub jobs: BTreeMap<JobId, Job>,
    pub worker: u64,
    pub changes: Changes,
}

impl State {
    pub fn apply(&mut self, record: &Record) {
        self.revision += 1;
        match record {
            Record::Joined { worker, name, boot, about, at_ms } => {
                self.worker = self.worker.max(worker.0);
                self.names.insert(name.clone(), (*boot, *worker));
                let member = Member {
                    name: name.clone(),
                    boot: *boot,
                    about: about.clone(),
                    leaves_by_ms: None,
                    pace_percent: 100,
                    quarantined_until_ms: None,
                };
                self.members.insert(*worker, member);
                self.changed(*at_ms);
            }
            Record::Lost { worker, how, at_ms } => {
                self.members.remove(worker);
                if *how != Loss::Left {
                    self.changed(*at_ms);
                }
            }
            Record::Leaving { worker, by_ms } => {
                self.member(*worker, |member| member.leaves_by_ms = Some(*by_ms))
            }
            Record::Paced { worker, percent } => {
                self.member(*worker, |member| member.pace_percent = *percent)
            }
            Record::Quarantined { worker, until_ms } => {
                self.member(*worker, |member| member.quarantined_until_ms = Some(*until_ms));
            }
            Record::Cleared { worker } => self.member(*worker, |member| member.quarantined_until_ms = None),
            Record::Submitted { job, spec } => drop(self.jobs.insert(*job, Job::new(spec.clone()))),
            other => {
                let job = other.job().and_then(|job| self.jobs.get_mut(&job));
                job.expect("records are about jobs that were submitted").apply(other);
            }
        }
    }

    fn member(&mut self, worker: WorkerId, change: impl FnOnce(&mut Member)) {
        if let Some(member) = self.members.get_mut(&worker) {
            change(member);
        }
    }

    fn changed(&mut self, at_ms: u64) {
        if self.changes.count == 0 {
            self.changes.first_ms = at_ms;
        }
        self.changes.count += 1;
        self.changes.last_ms = at_ms;
    }

    pub fn is_alive(&self, worker: WorkerId) -> bool {
        self.members.contains_key(&worker)
    }

    pub fn alive(&self, plan: &Plan) -> Vec<WorkerId> {
        plan.members.iter().copied().filter(|worker| self.is_alive(*worker)).collect()
    }

    /// Whether every slice of a plan has a holder left.
    pub fn covers(&self, plan: &Plan) -> bool {
        plan.holders.iter().all(|holders| holders.iter().any(|place| self.is_alive(plan.members[*place])))
    }

    /// Who is to write each part of a plan's state.
    pub fn writers(&self, plan: &Plan) -> Option<Vec<WorkerId>> {
        let first = |holders: &Vec<usize>| {
            let mut members = holders.iter().map(|place| plan.members[*place]);
            members.find(|worker| self.is_alive(*worker))
        };
        plan.holders.iter().map(first).collect()
    }

    /// What a worker needs to get its share of a plan.
    pub fn installation(&self, job: &Job, plan: &Plan) -> Installation {
        let source = self.source(&job.base);
        let holders = match &source {
            Source::Held { alive, .. } => alive.as_slice(),
            Source::Fresh | Source::Checkpoint(_) => &[],
        };
        let about = |worker: &WorkerId| Some((*worker, self.members.get(worker)?.about.clone()));
        let abouts = plan.members.iter().chain(holders).filter_map(about).collect();
        Installation { plan: plan.clone(), source, description: job.spec.description.clone(), abouts }
    }

    fn source(&self, base: &Base) -> Source {
        match base {
            Base::Fresh => Source::Fresh,
            Base::Checkpoint(checkpoint) => Source::Checkpoint(*checkpoint),
            Base::Held { epoch, plan, step } => {
                Source::Held { epoch: *epoch, plan: plan.clone(), step: *step, alive: self.alive(plan) }
            }
        }
    }
}

impl Job {
    fn new(spec: JobSpec) -> Job {
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
            saving: None,
            checkpoint: 0,
            request: 0,
            asked: None,
            weighed: None,
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

    fn apply(&mut self, record: &Record) {
        match record {
            Record::Wished { wish, .. } => self.wish = *wish,
            Record::Asked { request, workers, .. } => {
                self.request = *request;
                self.asked = Some(workers.clone());
                if matches!(self.phase, Phase::Resting(_)) {
                    self.phase = Phase::Planning { next: None };
                }
            }
            Record::Refused { .. } | Record::Declined { .. } => self.weighed = self.asked.take(),
            Record::Moving { epoch, plan, sources, .. } => {
                self.epoch = *epoch;
                if let Some(asked) = self.asked.take() {
                    self.weighed = Some(asked);
                }
                self.phase = Phase::Moving { plan: plan.clone(), sources: sources.clone() };
            }
            Record::Abandoned { .. } => self.plan_again(None),
            Record::Started { .. } => {
                if let Phase::Moving { plan, .. } = std::mem::replace(&mut self.phase, Phase::Running) {
                    self.base = Base::Held { epoch: self.epoch, plan, step: self.committed };
                    self.closing = None;
                }
            }
            Record::Committed { step, closing, .. } => self.commit(*step, *closing),
            Record::Stopping { after, why, next, .. } => {
                if next.is_some() {
                    self.weighed = self.asked.take();
                }
                (self.asked, self.saving) = (None, None);
                self.phase = Phase::Stopping { after: *after, why: *why, next: next.clone() };
            }
            Record::Hurried { .. } => {
                if let Phase::Stopping { after, .. } = &mut self.phase {
                    *after = None;
                }
            }
            Record::Decided { step, closing, .. } => {
                self.commit(*step, *closing);
                if let Phase::Stopping { next, .. } = &mut self.phase {
                    let next = next.take();
                    self.phase = Phase::Settling { step: *step, closing: *closing, next };
                }
            }
            Record::Settled { .. } => self.settle(),
            Record::Restored { .. } => {
                self.go_back();
                self.plan_again(None);
            }
            Record::SaveBegun { save, .. } => {
                self.checkpoint = save.checkpoint.id;
                self.saving = Some(save.clone());
                if matches!(self.phase, Phase::Planning { .. }) {
                    self.forget_next();
                    self.phase = Phase::Saving;
                }
            }
            Record::SaveDropped { .. } => self.saving = None,
            Record::SaveCompleted { .. } => {
                self.checkpoints.extend(self.saving.take().map(|save| save.checkpoint));
                let old = self.checkpoints.len().saturating_sub(self.spec.checkpoints_kept.max(1));
                self.checkpoints.drain(..old);
            }
            Record::Rested { rest, .. } => {
                self.go_back();
                self.forget_next();
                self.asked = None;
                self.phase = Phase::Resting(*rest);
            }
            Record::Joined { .. }
            | Record::Lost { .. }
            | Record::Leaving { .. }
            | Record::Paced { .. }
            | Record::Quarantined { .. }
            | Record::Cleared { .. }
            | Record::Submitted { .. } => unreachable!("not about a job that there is"),
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
        let step = self.saved_step();
        self.undone += self.committed - step;
        (self.committed, self.closing, self.saving) = (step, None, None);
    }
}
