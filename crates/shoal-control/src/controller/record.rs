//! What the controller has learnt and decided, one record each. The state is what follows from them, in their order. Those
//! about a job that there is are a [`Change`] of it; what may follow what says `fit`.

use serde::{Deserialize, Serialize};
use shoal_plan::Closing;

use super::state::{JobSpec, Rest, Wish};
use crate::message::{Epoch, JobId, Plan, Price, Save, Spent, WorkerId};

/// A worker and what its steps take, in percent of what was predicted: what planners are given.
pub type Paced = (WorkerId, u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// Silent past the deadline.
    Silent,
    /// Its connection ended, and those who work with it lost it too; or no job has anything on it.
    Vanished,
    /// Its process began anew.
    Replaced,
    /// It wished to leave, and no job needs it any more.
    Left,
}

/// Why a plan in force ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// A worker of it is dead.
    Lost,
    /// A worker of it stopped by itself: a peer failed, or its lease ran out.
    Stalled,
    /// A worker of it is to leave, is in quarantine, or goes to another job.
    Taken,
    /// Another plan is faster by more than the change costs.
    Pays,
    /// It was paused or cancelled.
    Wished,
    /// All steps are done.
    Finished,
    /// Nobody would get further in it.
    DeadEnd,
}

/// Why a plan whose state was being moved did not come into force.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    /// A worker that was to run it, or that had state for it, is no longer to be had.
    Member,
    /// A worker could not get its state from another.
    Transfer,
    /// What the state was to be made from cannot be read.
    Source(String),
    /// A worker has no room for the new state beside the old.
    Room,
    /// A worker could not get its state for a reason of its own.
    Worker(String),
    Wished,
}

/// What a change would bring and what it costs. Written down when it is not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Weighing {
    pub step_ms: u64,
    pub step_ms_after: u64,
    pub move_ms: u64,
    /// Until the next change of the fleet is expected, or the job is done.
    pub horizon_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Record {
    Joined {
        worker: WorkerId,
        name: String,
        boot: u64,
        about: String,
        price: Price,
        at_ms: u64,
    },
    Lost {
        worker: WorkerId,
        how: Loss,
        at_ms: u64,
    },
    /// It is to leave by then.
    Leaving {
        worker: WorkerId,
        by_ms: u64,
    },
    Paced {
        worker: WorkerId,
        percent: u32,
    },
    Quarantined {
        worker: WorkerId,
        until_ms: u64,
    },
    Cleared {
        worker: WorkerId,
    },
    Submitted {
        job: JobId,
        at_ms: u64,
        spec: JobSpec,
    },
    Job {
        job: JobId,
        at_ms: u64,
        change: Change,
    },
}

/// Of one job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    Wished {
        wish: Wish,
    },
    /// The planner is asked for the best plan on these workers.
    Asked {
        request: u64,
        workers: Vec<Paced>,
    },
    /// There is no plan on them.
    Refused {
        reason: String,
    },
    /// There is one, but the one in force stays.
    Declined {
        weighing: Weighing,
    },
    /// State moves to where a new plan needs it. `sources` are those who have it.
    Moving {
        epoch: Epoch,
        plan: Plan,
        sources: Vec<WorkerId>,
    },
    Abandoned {
        why: Failure,
    },
    /// Everyone has its state: the plan is in force.
    Started,
    /// Slices can all be brought to this step, come what may while a holder of each lives.
    Committed {
        step: u64,
        closing: Option<Closing>,
    },
    /// The plan in force ends after a step, or at once.
    Stopping {
        after: Option<u64>,
        why: Why,
        next: Option<Plan>,
    },
    Hurried,
    /// Everyone has stopped, and all go on from this step. `spent` is where the time of all of them went.
    Decided {
        step: u64,
        closing: Option<Closing>,
        spent: Spent,
    },
    /// Everyone is at that step.
    Settled,
    /// Some slices are lost: all go back to the last complete checkpoint, or to the beginning if there never was one.
    Restored {
        spent: Spent,
    },
    SaveBegun {
        save: Save,
        /// The steps between two, as they were last chosen.
        every_steps: u64,
    },
    SaveDropped,
    /// `cost_ms` is how long it held training up, where it did so longest.
    SaveCompleted {
        cost_ms: u64,
    },
    /// Its state is in a checkpoint, and its workers let go of it: there was no room to move it.
    Released,
    /// It can get no further, whoever runs it: it is saved where it stands, and rests until its owner wishes otherwise.
    DeadEnd {
        reason: String,
    },
    /// Nobody has anything of it; what it will go on from is its last checkpoint.
    Rested {
        rest: Rest,
    },
}

impl Record {
    /// The job that it is about.
    pub fn job(&self) -> Option<JobId> {
        match self {
            Record::Submitted { job, .. } | Record::Job { job, .. } => Some(*job),
            _ => None,
        }
    }
}

impl Change {
    /// Whether workers get something of the job by it, or let go of it.
    pub(super) fn moves_state(&self) -> bool {
        matches!(
            self,
            Change::Moving { .. }
                | Change::Abandoned { .. }
                | Change::Started
                | Change::Restored { .. }
                | Change::Released
                | Change::Rested { .. }
        )
    }
}
