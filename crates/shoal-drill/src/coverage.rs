//! How often each fault and each transition happened, so that a drill that never tries something shows it.

use std::collections::BTreeMap;

use shoal_control::controller::record::{Failure, Loss, Record, Why};
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
    "fault: preemption notice",
    "fault: worker joins",
    "log: torn",
    "log: begun anew",
    "worker: lease over",
    "worker: begins anew",
    "member: joined",
    "member: silent",
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
    "plan: asked",
    "plan: refused",
    "plan: declined",
    "plan: moving",
    "plan: abandoned for a member",
    "plan: abandoned for a transfer",
    "plan: abandoned by wish",
    "plan: started",
    "stop: lost",
    "stop: stalled",
    "stop: taken",
    "stop: pays",
    "stop: wished",
    "stop: finished",
    "stop: hurried",
    "settle: decided",
    "settle: some roll forward",
    "settle: done",
    "restore: from a checkpoint",
    "restore: from the beginning",
    "save: begun",
    "save: dropped",
    "save: complete",
    "rest: queued",
    "rest: paused",
    "rest: done",
    "rest: cancelled",
];

impl Coverage {
    pub fn count(&mut self, what: &'static str) {
        *self.0.entry(what).or_default() += 1;
    }

    pub fn record(&mut self, record: &Record, checkpoints: bool) {
        self.count(match record {
            Record::Joined { .. } => "member: joined",
            Record::Lost { how: Loss::Silent, .. } => "member: silent",
            Record::Lost { how: Loss::Replaced, .. } => "member: replaced",
            Record::Lost { how: Loss::Left, .. } => "member: left",
            Record::Leaving { .. } => "member: leaving",
            Record::Paced { .. } => "member: other pace",
            Record::Quarantined { .. } => "member: in quarantine",
            Record::Cleared { .. } => "member: out of quarantine",
            Record::Submitted { .. } => "job: submitted",
            Record::Wished { wish: Wish::Pause, .. } => "job: paused",
            Record::Wished { wish: Wish::Run, .. } => "job: resumed",
            Record::Wished { wish: Wish::Cancel, .. } => "job: cancelled",
            Record::Asked { .. } => "plan: asked",
            Record::Refused { .. } => "plan: refused",
            Record::Declined { .. } => "plan: declined",
            Record::Moving { .. } => "plan: moving",
            Record::Abandoned { why: Failure::Member, .. } => "plan: abandoned for a member",
            Record::Abandoned { why: Failure::Transfer, .. } => "plan: abandoned for a transfer",
            Record::Abandoned { why: Failure::Wished, .. } => "plan: abandoned by wish",
            Record::Started { .. } => "plan: started",
            Record::Committed { .. } => "step: committed",
            Record::Stopping { why: Why::Lost, .. } => "stop: lost",
            Record::Stopping { why: Why::Stalled, .. } => "stop: stalled",
            Record::Stopping { why: Why::Taken, .. } => "stop: taken",
            Record::Stopping { why: Why::Pays, .. } => "stop: pays",
            Record::Stopping { why: Why::Wished, .. } => "stop: wished",
            Record::Stopping { why: Why::Finished, .. } => "stop: finished",
            Record::Hurried { .. } => "stop: hurried",
            Record::Decided { .. } => "settle: decided",
            Record::Settled { .. } => "settle: done",
            Record::Restored { .. } if checkpoints => "restore: from a checkpoint",
            Record::Restored { .. } => "restore: from the beginning",
            Record::SaveBegun { .. } => "save: begun",
            Record::SaveDropped { .. } => "save: dropped",
            Record::SaveCompleted { .. } => "save: complete",
            Record::Rested { rest: Rest::Queued, .. } => "rest: queued",
            Record::Rested { rest: Rest::Paused, .. } => "rest: paused",
            Record::Rested { rest: Rest::Done, .. } => "rest: done",
            Record::Rested { rest: Rest::Cancelled, .. } => "rest: cancelled",
        });
    }
}
