//! How often each fault and each transition happened, so that a drill that never tries something shows it.

use std::collections::BTreeMap;

use shoal_control::controller::record::{Change, Failure, Loss, Record, Why};
use shoal_control::controller::state::{Rest, Wish};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage(pub BTreeMap<&'static str, u64>);

/// Everything that must happen in at least one of a hundred seeds.
pub const ALL: &[&str] = &[
    "fault: message lost",
    "fault: message late",
    "fault: message doubled",
    "fault: worker killed",
    "fault: worker frozen",
    "fault: worker slowed",
    "fault: controller killed",
    "fault: controller killed while writing",
    "fault: controller frozen",
    "fault: worker cut off",
    "fault: two workers cut off from each other",
    "fault: controller cut off",
    "fault: one way cut",
    "fault: connections reset",
    "fault: preemption notice",
    "fault: worker joins",
    "fault: worker without room",
    "fault: worker where nothing works",
    "fault: checkpoints away",
    "fault: checkpoints damaged",
    "log: torn",
    "log: begun anew",
    "worker: lease over",
    "worker: begins anew",
    "member: joined",
    "member: silent",
    "member: vanished",
    "member: replaced",
    "member: left",
    "member: leaving",
    "member: other pace",
    "member: in quarantine",
    "member: out of quarantine",
    "job: submitted",
    "job: paused",
    "job: resumed",
    "job: cancelled",
    "job: dead end",
    "plan: asked",
    "plan: refused",
    "plan: declined",
    "plan: moving",
    "plan: abandoned for a member",
    "plan: abandoned for a transfer",
    "plan: abandoned for a checkpoint",
    "plan: abandoned for room",
    "plan: abandoned for a worker of its own",
    "plan: abandoned by wish",
    "plan: started",
    "stop: lost",
    "stop: stalled",
    "stop: taken",
    "stop: pays",
    "stop: wished",
    "stop: finished",
    "stop: dead end",
    "stop: hurried",
    "settle: decided",
    "settle: some roll forward",
    "settle: done",
    "restore: from a checkpoint",
    "restore: from the beginning",
    "save: begun",
    "save: dropped",
    "save: complete",
    "save: to make room",
    "save: passed over",
    "save: interval chosen",
    "rest: queued",
    "rest: paused",
    "rest: failed",
    "rest: done",
    "rest: cancelled",
];

impl Coverage {
    pub fn count(&mut self, what: &'static str) {
        *self.0.entry(what).or_default() += 1;
    }

    /// `checkpoints`: whether the job that it is about has any.
    pub fn record(&mut self, record: &Record, checkpoints: bool) {
        self.count(match record {
            Record::Joined { .. } => "member: joined",
            Record::Lost { how: Loss::Silent, .. } => "member: silent",
            Record::Lost { how: Loss::Vanished, .. } => "member: vanished",
            Record::Lost { how: Loss::Replaced, .. } => "member: replaced",
            Record::Lost { how: Loss::Left, .. } => "member: left",
            Record::Leaving { .. } => "member: leaving",
            Record::Paced { .. } => "member: other pace",
            Record::Quarantined { .. } => "member: in quarantine",
            Record::Cleared { .. } => "member: out of quarantine",
            Record::Submitted { .. } => "job: submitted",
            Record::Job { change, .. } => of_change(change, checkpoints),
        });
    }
}

fn of_change(change: &Change, checkpoints: bool) -> &'static str {
    match change {
        Change::Wished { wish: Wish::Pause } => "job: paused",
        Change::Wished { wish: Wish::Run } => "job: resumed",
        Change::Wished { wish: Wish::Cancel } => "job: cancelled",
        Change::Asked { .. } => "plan: asked",
        Change::Refused { .. } => "plan: refused",
        Change::Declined { .. } => "plan: declined",
        Change::Moving { .. } => "plan: moving",
        Change::Abandoned { why } => match why {
            Failure::Member => "plan: abandoned for a member",
            Failure::Transfer => "plan: abandoned for a transfer",
            Failure::Source(_) => "plan: abandoned for a checkpoint",
            Failure::Room => "plan: abandoned for room",
            Failure::Worker(_) => "plan: abandoned for a worker of its own",
            Failure::Wished => "plan: abandoned by wish",
        },
        Change::Started => "plan: started",
        Change::Committed { .. } => "step: committed",
        Change::Stopping { why, .. } => match why {
            Why::Lost => "stop: lost",
            Why::Stalled => "stop: stalled",
            Why::Taken => "stop: taken",
            Why::Pays => "stop: pays",
            Why::Wished => "stop: wished",
            Why::Finished => "stop: finished",
            Why::DeadEnd => "stop: dead end",
        },
        Change::DeadEnd { .. } => "job: dead end",
        Change::Hurried => "stop: hurried",
        Change::Decided { .. } => "settle: decided",
        Change::Settled => "settle: done",
        Change::Restored { .. } if checkpoints => "restore: from a checkpoint",
        Change::Restored { .. } => "restore: from the beginning",
        Change::SaveBegun { .. } => "save: begun",
        Change::SaveDropped => "save: dropped",
        Change::SaveCompleted { .. } => "save: complete",
        Change::Released => "save: to make room",
        Change::Rested { rest } => match rest {
            Rest::Queued => "rest: queued",
            Rest::Paused => "rest: paused",
            Rest::Failed => "rest: failed",
            Rest::Done => "rest: done",
            Rest::Cancelled => "rest: cancelled",
        },
    }
}
