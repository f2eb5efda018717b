//! What the controller knows for good: members, jobs, and where each job is between one plan and the next. It changes by
//! records alone ([`State::apply`]), so that replaying the log gives it back.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::fit::Misfit;
pub use super::job::{Base, Class, Interval, Job, JobSpec, Phase, Rest, Wish};
use super::record::{Loss, Record};
use crate::message::{Installation, JobId, Plan, Price, Source, WorkerId};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    pub name: String,
    pub boot: u64,
    pub about: String,
    pub price: Price,
    pub leaves_by_ms: Option<u64>,
    pub pace_percent: u32,
    pub quarantined_until_ms: Option<u64>,
}

/// Changes of the fleet so close together are taken as one.
const TOGETHER_MS: u64 = 1_000;

/// When the fleet changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Changes {
    pub count: u64,
    pub first_ms: u64,
    pub last_ms: u64,
    /// Those of them that were losses without notice.
    pub losses: u64,
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
    /// What follows from a record; nothing where it cannot follow.
    pub fn apply(&mut self, record: &Record) -> Result<(), Misfit> {
        self.fits(record)?;
        self.revision += 1;
        match record {
            Record::Joined { worker, name, boot, about, price, at_ms } => {
                self.worker = worker.0;
                self.names.insert(name.clone(), (*boot, *worker));
                let member = Member {
                    name: name.clone(),
                    boot: *boot,
                    about: about.clone(),
                    price: *price,
                    leaves_by_ms: None,
                    pace_percent: 100,
                    quarantined_until_ms: None,
                };
                self.members.insert(*worker, member);
                self.changed(*at_ms);
                self.hope();
            }
            Record::Lost { worker, how, at_ms } => {
                self.members.remove(worker);
                for job in self.jobs.values_mut().filter(|job| job.involved().contains(worker)) {
                    job.receipt.pass(*at_ms, &job.phase);
                    engage(&self.members, job);
                }
                if *how != Loss::Left {
                    self.changed(*at_ms);
                    self.changes.losses += 1;
                }
            }
            Record::Leaving { worker, by_ms } => {
                self.member(*worker, |member| member.leaves_by_ms = Some(*by_ms))
            }
            Record::Paced { worker, percent } => {
                self.member(*worker, |member| member.pace_percent = *percent);
                self.hope();
            }
            Record::Quarantined { worker, until_ms } => {
                self.member(*worker, |member| member.quarantined_until_ms = Some(*until_ms));
            }
            Record::Cleared { worker } => {
                self.member(*worker, |member| member.quarantined_until_ms = None);
                self.hope();
            }
            Record::Submitted { job, spec, .. } => drop(self.jobs.insert(*job, Job::new(spec.clone()))),
            Record::Job { job, at_ms, change } => {
                let job = self.jobs.get_mut(job).ok_or(Misfit::NoJob(*job))?;
                job.apply(*at_ms, change);
                if change.moves_state() {
                    engage(&self.members, job);
                }
            }
        }
        Ok(())
    }

    fn member(&mut self, worker: WorkerId, change: impl FnOnce(&mut Member)) {
        if let Some(member) = self.members.get_mut(&worker) {
            change(member);
        }
    }

    /// There are other workers than those that planners were asked about: more of them may help after all.
    fn hope(&mut self) {
        for job in self.jobs.values_mut() {
            let count = job.held().map_or(0, |plan| plan.members.len());
            job.foreseen.retain(|workers, _| *workers <= count);
        }
    }

    /// Machines that come or go together are one change: a fleet that starts says nothing of how often it will change.
    fn changed(&mut self, at_ms: u64) {
        let Changes { count, first_ms, last_ms, .. } = &mut self.changes;
        if *count == 0 {
            *first_ms = at_ms;
        }
        if *count == 0 || at_ms >= last_ms.saturating_add(TOGETHER_MS) {
            *count += 1;
            *last_ms = at_ms;
        }
    }

    pub fn is_alive(&self, worker: WorkerId) -> bool {
        self.members.contains_key(&worker)
    }

    pub fn alive(&self, plan: &Plan) -> Vec<WorkerId> {
        plan.members.iter().copied().filter(|worker| self.is_alive(*worker)).collect()
    }

    /// Whether every slice of a plan has a holder left.
    pub fn covers(&self, plan: &Plan) -> bool {
        self.holds_all(plan, |_| true)
    }

    /// Whether it would if a worker were lost.
    pub fn covers_without(&self, plan: &Plan, lost: WorkerId) -> bool {
        self.holds_all(plan, |worker| worker != lost)
    }

    fn holds_all(&self, plan: &Plan, counts: impl Fn(WorkerId) -> bool) -> bool {
        let has = |place: &usize| counts(plan.members[*place]) && self.is_alive(plan.members[*place]);
        plan.holders.iter().all(|holders| holders.iter().any(has))
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

/// Counts who has something of a job.
fn engage(members: &BTreeMap<WorkerId, Member>, job: &mut Job) {
    let involved = job.involved();
    let alive = || involved.iter().filter_map(|worker| members.get(worker));
    let price = alive().fold(0_u64, |sum, member| sum.saturating_add(member.price.0));
    job.receipt.engage(alive().count() as u64, Price(price));
}
