//! What the API says of workers and jobs: the state as people ask for it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use shoal_control::controller::state::{Class, Job, Member, Phase, Rest, Wish};
use shoal_control::message::{JobId, WorkerId};

use crate::driver::Sight;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerView {
    pub worker: u64,
    pub name: String,
    /// Whether its connection stands.
    pub connected: bool,
    /// Milliseconds since 1970 by which it is to leave.
    pub leaves_by_ms: Option<u64>,
    /// Given no work until then: its peers could not reach it.
    pub set_aside_until_ms: Option<u64>,
    /// What its own work takes, in percent of what was predicted.
    pub pace_percent: u32,
    pub jobs: Vec<u64>,
    /// What it said of itself when it joined.
    pub about: Value,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobView {
    pub job: u64,
    pub name: String,
    /// queued, planning, moving, running, stopping, saving, paused, failed, done, cancelled.
    pub state: String,
    pub wish: Wish,
    pub class: Class,
    pub priority: i32,
    /// Steps that are done, of so many.
    pub step: u64,
    pub steps: u64,
    /// Of the newest complete checkpoint.
    pub saved_step: Option<u64>,
    /// Steps that were done again after a return to a checkpoint.
    pub undone: u64,
    /// Names of those who run it, in the order of the plan's devices.
    pub workers: Vec<String>,
    /// Plans so far.
    pub epoch: u64,
    pub predicted_step_ms: Option<u64>,
    /// Why it does not go on, where it does not.
    pub reason: Option<String>,
}

/// Each with what it said of itself, unread: that is for whoever asks, not for the controller's thread.
pub fn workers(Sight { state, links, .. }: Sight) -> Vec<(WorkerView, String)> {
    // Once a job, not once a worker and job: there may be a thousand of the one and a hundred of the other.
    let mut jobs: BTreeMap<WorkerId, Vec<u64>> = BTreeMap::new();
    for (id, job) in &state.jobs {
        job.involved().into_iter().for_each(|worker| jobs.entry(worker).or_default().push(id.0));
    }
    let view = |(id, member): (&WorkerId, &Member)| WorkerView {
        about: Value::Null,
        worker: id.0,
        name: member.name.clone(),
        connected: links.contains_key(&member.name),
        leaves_by_ms: member.leaves_by_ms,
        set_aside_until_ms: member.quarantined_until_ms,
        pace_percent: member.pace_percent,
        jobs: jobs.get(id).cloned().unwrap_or_default(),
    };
    state.members.iter().map(|member| (view(member), member.1.about.clone())).collect()
}

/// Reads what workers said of themselves.
pub fn read(workers: Vec<(WorkerView, String)>) -> Vec<WorkerView> {
    let read = |(worker, about): (WorkerView, String)| WorkerView {
        about: serde_json::from_str(&about).unwrap_or(Value::String(about)),
        ..worker
    };
    workers.into_iter().map(read).collect()
}

pub fn jobs(sight: Sight) -> Vec<JobView> {
    sight.state.jobs.iter().map(|(id, job)| view(sight, *id, job)).collect()
}

pub fn job(sight: Sight, id: JobId) -> Option<JobView> {
    sight.state.jobs.get(&id).map(|job| view(sight, id, job))
}

fn view(Sight { state, refusals, .. }: Sight, id: JobId, job: &Job) -> JobView {
    let plan = match &job.phase {
        Phase::Moving { plan, .. } => Some(plan),
        _ => job.held(),
    };
    let name = |worker: &WorkerId| {
        state
            .members
            .get(worker)
            .map_or_else(|| format!("worker {} (gone)", worker.0), |member| member.name.clone())
    };
    JobView {
        job: id.0,
        name: job.spec.name.clone(),
        state: phase_name(&job.phase).to_owned(),
        wish: job.wish,
        class: job.spec.class,
        priority: job.spec.priority,
        step: job.committed,
        steps: job.spec.steps,
        saved_step: job.checkpoints.last().map(|checkpoint| checkpoint.step),
        undone: job.undone,
        workers: plan.map(|plan| plan.members.iter().map(name).collect()).unwrap_or_default(),
        epoch: job.epoch.0,
        predicted_step_ms: plan.map(|plan| plan.step_ms),
        reason: job.failure.clone().or_else(|| refusals.get(&id).cloned()),
    }
}

pub fn phase_name(phase: &Phase) -> &'static str {
    match phase {
        Phase::Resting(Rest::Queued) => "queued",
        Phase::Resting(Rest::Paused) => "paused",
        Phase::Resting(Rest::Failed) => "failed",
        Phase::Resting(Rest::Done) => "done",
        Phase::Resting(Rest::Cancelled) => "cancelled",
        Phase::Planning { .. } => "planning",
        Phase::Moving { .. } => "moving",
        Phase::Running => "running",
        Phase::Stopping { .. } | Phase::Settling { .. } => "stopping",
        Phase::Saving => "saving",
    }
}
