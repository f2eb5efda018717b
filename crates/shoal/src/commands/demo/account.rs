//! What became of the job on the fleet, by the controller's own records: when steps were counted, which plans were in force,
//! how long training stood still for a change.

use std::collections::BTreeMap;

use serde::Serialize;
use shoal_control::controller::record::{Change, Record, Weighing};
use shoal_control::message::{Plan, WorkerId};
use shoal_crew::Table;
use shoal_plan::{Held, Tier};
use shoal_service::client::Client;
use shoal_service::history::Noted;

use crate::error::{CliError, Result};
use crate::show::percent;

/// A worker's part in a plan, in words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WorkerPart {
    pub worker: String,
    /// Nothing, for one that only keeps something.
    pub computes: Option<String>,
    pub keeps: String,
}

/// A plan that came into force.
#[derive(Clone, Debug, Serialize)]
pub struct InForce {
    /// Since when.
    #[serde(skip)]
    pub at_ms: u64,
    /// Steps that were done before it.
    pub after_step: u64,
    pub predicted_step_ms: u64,
    pub workers: Vec<WorkerPart>,
}

#[derive(Debug, Default)]
pub struct Account {
    /// When each step was counted, in milliseconds since 1970.
    pub steps: Vec<(u64, u64)>,
    pub plans: Vec<InForce>,
    /// Why a change was not made, the last time since a worker joined.
    pub declined: Option<Weighing>,
}

/// A kill, and how training went on.
#[derive(Clone, Debug, Serialize)]
pub struct Recovery {
    /// From the kill to the first step that the others have done without the one that was killed.
    pub seconds: f64,
    /// The first of these steps.
    pub step: u64,
}

impl Account {
    pub fn read(client: &Client) -> Result<Account> {
        let (mut account, mut names) = (Account::default(), BTreeMap::new());
        let (mut after, mut moving) = (0, None);
        loop {
            let found = client.events(after, false)?.events;
            let Some(last) = found.last() else { return Ok(account) };
            after = last.revision;
            for noted in found {
                account.take(noted, &mut names, &mut moving)?;
            }
        }
    }

    fn take(
        &mut self,
        noted: Noted,
        names: &mut BTreeMap<WorkerId, String>,
        moving: &mut Option<Plan>,
    ) -> Result {
        let at_ms = noted.at_ms;
        match noted.record {
            Record::Joined { worker, name, .. } => {
                self.declined = None;
                names.insert(worker, name);
            }
            // The last step before a change of plan may be counted by it alone.
            Record::Job { change: Change::Committed { step, .. } | Change::Decided { step, .. }, .. } => {
                let is_new = self.steps.last().is_none_or(|(_, last)| *last != step);
                self.steps.extend(is_new.then_some((at_ms, step)));
            }
            Record::Job { change: Change::Moving { plan, .. }, .. } => *moving = Some(plan),
            Record::Job { change: Change::Started, .. } => {
                if let Some(plan) = moving.take() {
                    let after_step = self.steps.last().map_or(0, |(_, step)| *step);
                    let (predicted_step_ms, workers) = (plan.step_ms, parts(&plan, names)?);
                    self.plans.push(InForce { at_ms, after_step, predicted_step_ms, workers });
                }
            }
            Record::Job { change: Change::Declined { weighing }, .. } => self.declined = Some(weighing),
            _ => {}
        }
        Ok(())
    }

    /// The plan that was in force at a moment.
    pub fn before(&self, at_ms: u64) -> Option<&InForce> {
        self.plans.iter().rev().find(|plan| plan.at_ms <= at_ms)
    }

    /// The first plan after a moment with, or without, a worker.
    pub fn next(&self, at_ms: u64, worker: &str, is_in: bool) -> Option<&InForce> {
        let has = |plan: &InForce| plan.workers.iter().any(|part| part.worker == worker);
        self.plans.iter().find(|plan| plan.at_ms > at_ms && has(plan) == is_in)
    }

    /// How training went on after a worker was killed.
    pub fn recovery(&self, killed_ms: u64, worker: &str) -> Option<Recovery> {
        let since = self.next(killed_ms, worker, false)?.at_ms;
        let (at_ms, step) = self.steps.iter().find(|(at_ms, _)| *at_ms >= since)?;
        Some(Recovery { seconds: (at_ms - killed_ms) as f64 / 1e3, step: *step })
    }
}

fn parts(plan: &Plan, names: &BTreeMap<WorkerId, String>) -> Result<Vec<WorkerPart>> {
    let table =
        Table::of(plan).map_err(|error| CliError::said(error.to_string(), "is it of this version?"))?.plan;
    let unnamed = |worker: &WorkerId| format!("worker {}", worker.0);
    let part = |(device, worker): (usize, &WorkerId)| WorkerPart {
        worker: names.get(worker).cloned().unwrap_or_else(|| unnamed(worker)),
        computes: computes(&table, device),
        keeps: keeps(&table, device),
    };
    Ok(plan.members.iter().enumerate().map(part).collect())
}

/// `embedding to head: 16 of 64 samples`, and so on where a device's layers differ.
fn computes(table: &shoal_plan::Plan, device: usize) -> Option<String> {
    let mut runs: Vec<(&str, &str, usize)> = Vec::new();
    for row in &table.layers {
        let own = row.compute.iter().filter(|compute| compute.device == device);
        let samples = own.flat_map(|compute| &compute.micro_batches).map(|samples| samples.count()).sum();
        match runs.last_mut() {
            Some((_, last, same)) if *same == samples => *last = &row.layer,
            _ => runs.push((&row.layer, &row.layer, samples)),
        }
    }
    let text = |(first, last, samples): (&str, &str, usize)| {
        let layers = if first == last { first.to_owned() } else { format!("{first} to {last}") };
        format!("{layers}: {samples} of {} samples", table.global_batch)
    };
    let texts: Vec<String> = runs.into_iter().filter(|run| run.2 > 0).map(text).collect();
    (!texts.is_empty()).then(|| texts.join(", "))
}

/// How much of the state is here, and how much of what others have is mirrored here.
fn keeps(table: &shoal_plan::Plan, device: usize) -> String {
    let (mut all, mut kept, mut mirrored) = (0, 0, 0);
    for row in &table.tensors {
        all += row.elements;
        let elsewhere = |held: &Held| {
            let same = |other: &&Held| other.slice == held.slice && other.holder.tier() == Tier::Device;
            row.optimizer.iter().any(|other| same(&other) && other.holder != held.holder)
        };
        for held in row.optimizer.iter().filter(|held| held.holder.device() == device) {
            match held.holder.tier() != Tier::Device && elsewhere(held) {
                true => mirrored += held.slice.count(),
                false => kept += held.slice.count(),
            }
        }
    }
    let share = |elements: usize| percent(elements as f64 / all.max(1) as f64);
    match (kept, mirrored) {
        (0, mirrored) => format!("mirrors {} of the state", share(mirrored)),
        (kept, 0) => format!("keeps {} of the state", share(kept)),
        (kept, mirrored) => format!("keeps {} of the state, mirrors {}", share(kept), share(mirrored)),
    }
}
