//! What controller and workers say to each other, and the words for it.
//!
//! There are three messages. A worker says [`ToController::Join`] until it has a number, and from then on
//! [`ToController::Report`]: its whole state, whenever that changes and every `report_every_ms`. The controller answers
//! with [`ToWorker::Orders`]: what holds for this worker now. Both may be lost, late, doubled or out of order: each replaces
//! what its sender said before, and numbers tell which is newer. [`ToWorker::Gone`] answers a worker that the controller
//! has given up: it lets go of everything and joins anew.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use shoal_plan::{Closing, Standing};
use thiserror::Error;

/// No number that is counted or given out, and no time in milliseconds, comes near this; what does is damage or a lie. It
/// leaves room to add to any of them.
pub const NUMBER_MAX: u64 = 1 << 53;

/// One life of a worker: a number that the controller gives out at joining and never again. A worker that was declared
/// dead and comes back gets another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorkerId(pub u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub u64);

/// Of a job's plans: each has its own, and later ones have larger ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

/// A plan as far as controllers look into it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// The workers that it runs on, in the order of its devices.
    pub members: Vec<WorkerId>,
    /// Who holds the same slices, replicas and mirrors: each slice's set of holders once, by their places in `members`,
    /// the one that saves them first.
    pub holders: Vec<Vec<usize>>,
    /// Predicted.
    pub step_ms: u64,
    /// The table itself, which planners write and engines read.
    pub table: String,
}

impl Plan {
    pub fn place(&self, worker: WorkerId) -> Option<usize> {
        self.members.iter().position(|member| *member == worker)
    }

    /// What everyone relies on who looks into it, wherever it came from.
    pub fn check(&self) -> Result<(), PlanError> {
        let Plan { members, holders, step_ms, .. } = self;
        let distinct: BTreeSet<&WorkerId> = members.iter().collect();
        if members.is_empty() || distinct.len() < members.len() {
            return Err(PlanError::Members);
        }
        if holders.is_empty() || holders.iter().any(Vec::is_empty) {
            return Err(PlanError::Unheld);
        }
        if let Some(place) = holders.iter().flatten().find(|place| **place >= members.len()) {
            return Err(PlanError::Place { place: *place, members: members.len() });
        }
        if *step_ms > NUMBER_MAX {
            return Err(PlanError::StepTime(*step_ms));
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PlanError {
    #[error("the plan has no workers, or one of them twice")]
    Members,
    #[error("the plan has slices that nobody holds")]
    Unheld,
    #[error("the plan has a holder at place {place}, but {members} workers only")]
    Place { place: usize, members: usize },
    #[error("the plan's steps are said to take {0} ms")]
    StepTime(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// A number that the job gives out once.
    pub id: u64,
    pub step: u64,
}

/// A checkpoint that is being made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Save {
    pub checkpoint: Checkpoint,
    /// Who writes the slices of each of the plan's sets of holders: the parts, all of which make it complete.
    pub writers: Vec<WorkerId>,
}

/// Where the state of a new plan comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Made new, as a function of the seed.
    Fresh,
    Checkpoint(Checkpoint),
    /// From those who have it in memory; `alive` are the workers of that plan that still are.
    Held {
        epoch: Epoch,
        plan: Plan,
        step: u64,
        alive: Vec<WorkerId>,
    },
}

impl Source {
    pub fn step(&self) -> u64 {
        match self {
            Source::Fresh => 0,
            Source::Checkpoint(checkpoint) => checkpoint.step,
            Source::Held { step, .. } => *step,
        }
    }
}

/// The state of a plan that may come into force, and all that is needed to get it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Installation {
    pub plan: Plan,
    pub source: Source,
    /// Of the job, as its owner gave it: engines read it.
    pub description: String,
    /// What the workers that run it or have its state said of themselves when they joined: where they are reached, for one.
    pub abouts: BTreeMap<WorkerId, String>,
}

/// What holds for a worker in a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// Get the state of a plan that may come into force, and keep all there is meanwhile.
    Install(Installation),
    /// The plan is in force. Run until `steps`; earlier plans' state is no longer needed.
    Run { steps: u64 },
    /// Stop after that step, or give up the step that is under way.
    Stop { after: Option<u64> },
    /// Bring every slice to a step, by the closing sums of the one before, and stay there.
    GoTo { step: u64, closing: Option<Closing> },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Order {
    pub epoch: Epoch,
    pub command: Command,
    pub save: Option<Save>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Orders {
    pub worker: WorkerId,
    /// The latest report heard; the lease counts from its sending.
    pub acknowledged: u64,
    /// The records that these orders follow from.
    pub revision: u64,
    /// For each job that it has something of or is to get something of; what is not named is let go. Nothing where the
    /// worker has said that it knows.
    pub jobs: Option<BTreeMap<JobId, Order>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToWorker {
    /// The answer to a joining: its number.
    Welcome {
        name: String,
        boot: u64,
        worker: WorkerId,
    },
    /// The answer to a joining whose number nobody ever used, until it was taken for dead: join anew.
    Late {
        name: String,
        boot: u64,
    },
    Orders(Orders),
    /// Taken for dead, or released after it wished to leave.
    Gone {
        worker: WorkerId,
    },
}

/// What a worker costs, in millionths of a dollar an hour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Price(pub u64);

/// What a worker does in the plan in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    Running,
    /// Told to stop, or stopping by itself: something may still be under way.
    Stopping,
    /// Nothing is under way, and nothing will be in this epoch.
    Stopped,
    /// Rolling forward.
    Settling,
}

/// A worker's part in the plan in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    pub epoch: Epoch,
    pub stage: Stage,
    pub standing: Standing,
    /// Whom it waited for in vain when it stopped by itself.
    pub culprit: Option<WorkerId>,
    /// What its own work in a step took, in percent of what was predicted; waiting for others does not count. With the step.
    pub pace: Option<(u64, u32)>,
    /// Since the plan came into force.
    pub spent: Spent,
}

/// Where a worker's time in a plan went. The rest of the time went into waiting for what moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spent {
    /// Forward, backward and update.
    pub useful_ms: u64,
    pub recompute_ms: u64,
    /// Nothing to compute until others are done.
    pub bubble_ms: u64,
}

impl Spent {
    pub fn add(&mut self, other: &Spent) {
        self.useful_ms = self.useful_ms.saturating_add(other.useful_ms);
        self.recompute_ms = self.recompute_ms.saturating_add(other.recompute_ms);
        self.bubble_ms = self.bubble_ms.saturating_add(other.bubble_ms);
    }
}

/// What kept a worker from getting its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Obstacle {
    /// One who has some of it could not be reached, or did not give it.
    Peer(WorkerId),
    /// What it is made from cannot be read, here or by anyone: a checkpoint is damaged or gone, or what the job begins
    /// with. In a sentence for the job's owner.
    Source(String),
    /// The state that is here and the state that is to come do not fit at once.
    Room,
    /// Something about this worker, in a sentence for the job's owner.
    Worker(String),
}

/// A worker's state of the plan that may come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Progress {
    Underway,
    Ready,
    /// Could not get all of it.
    Failed(Obstacle),
}

/// What became of a worker's part of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Saved {
    /// The checkpoint's.
    pub id: u64,
    /// It is on the disk; or it came too late for it.
    pub done: bool,
    /// How long training was held up for it here: writing that goes on beside it does not count.
    pub cost_ms: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {
    pub part: Option<Part>,
    pub next: Option<(Epoch, Progress)>,
    /// The checkpoint that it was last asked for.
    pub saved: Option<Saved>,
    /// Why the job can get no further, whoever runs it: a step of that epoch came to no number, for one. In a sentence for
    /// the job's owner.
    #[serde(default)]
    pub dead_end: Option<(Epoch, String)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    pub worker: WorkerId,
    /// Counts its reports.
    pub number: u64,
    /// Of the newest orders it has heard.
    pub revision: u64,
    /// It wants to leave, or will be taken away in so many milliseconds.
    pub leaving_in_ms: Option<u64>,
    pub jobs: BTreeMap<JobId, Status>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToController {
    /// `boot` grows with every joining under a name, across restarts of its process.
    Join {
        name: String,
        boot: u64,
        /// What it has and where it is reached: planners and engines read it.
        about: String,
        price: Price,
    },
    Report(Report),
}
