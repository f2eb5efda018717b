//! What must hold after every event. The rules are those of this crate's head.

use std::collections::{BTreeMap, BTreeSet};

use shoal_control::controller::record::{Change, Record};
use shoal_control::controller::state::{Base, Job, Phase, Rest, State};
use shoal_control::message::{Epoch, JobId, Plan};

use crate::engine::JobEngine;
use crate::ledger::Ledger;
use crate::toy::{self, Rights, SLICES};
use crate::world::World;

pub type Broken = (&'static str, String);

#[derive(Default)]
pub struct Checks {
    rights: Rights,
    /// The version that each epoch began at.
    began: BTreeMap<(JobId, Epoch), u64>,
    /// How far it came.
    reached: BTreeMap<(JobId, Epoch), u64>,
    /// The plan whose workers have each job's state.
    held: BTreeMap<JobId, Plan>,
    /// The largest revision that anyone was told.
    told: u64,
    /// The controller's state when it died.
    left: Option<State>,
    /// Of the controller's state when it was last looked at.
    seen: u64,
    /// Jobs that have had a complete checkpoint.
    saved: BTreeSet<JobId>,
    /// Jobs that have failed at a step that nobody gets past.
    dead_ends: BTreeSet<JobId>,
    pub ledger: Ledger,
}

impl Checks {
    pub fn told(&mut self, revision: u64) {
        self.told = self.told.max(revision);
    }

    pub fn died(&mut self, state: &State) {
        self.left = Some(state.clone());
    }

    /// What it finds in its log is all that it had said, and what it had in memory if no record is missing. Records that
    /// starting itself made are no part of what was found.
    pub fn restarted(&mut self, state: &State, made: u64) -> Option<Broken> {
        self.ledger.begin(state);
        let (told, revision, rule) = (self.told, state.revision - made, "nothing said that can be forgotten");
        self.seen = 0;
        if revision < told {
            return Some((rule, format!("{revision} records are left of {told} that workers heard of")));
        }
        let left = self.left.take().filter(|left| made == 0 && left.revision == revision)?;
        (left != *state).then(|| (rule, "the log gives another state than there was".to_owned()))
    }

    /// A job goes back to its checkpoint.
    pub fn restored(&self, job: JobId, state: &State) -> Option<Broken> {
        let plan = self.held.get(&job).filter(|plan| state.covers(plan))?;
        Some(("nothing given up", format!("{job:?} goes back, though {plan:?} is all there")))
    }

    /// A job goes past a step that nobody can do, or is moved on while it has failed at it.
    pub fn dead_end(&mut self, record: &Record, state: &State) -> Option<Broken> {
        let Record::Job { job: id, change, .. } = record else { return None };
        let job = state.jobs.get(id)?;
        let step = toy::dead_end(job.spec.steps)?;
        let past = match change {
            Change::DeadEnd { .. } => {
                self.dead_ends.insert(*id);
                false
            }
            Change::Committed { step: done, .. } | Change::Decided { step: done, .. } => {
                *done > step + 1 && !self.dead_ends.contains(id)
            }
            Change::Moving { .. } => job.has_failed(),
            _ => false,
        };
        past.then(|| ("dead ends end", format!("{id:?}: {change:?}, but nobody gets past step {step}")))
    }

    pub fn reached(&mut self, job: JobId, epoch: Epoch, version: u64) {
        let reached = self.reached.entry((job, epoch)).or_default();
        *reached = version.max(*reached);
    }

    pub fn begins(&mut self, job: JobId, epoch: Epoch, version: u64) -> Option<Broken> {
        let began = *self.began.entry((job, epoch)).or_insert(version);
        let sentence = || format!("{job:?} {epoch:?} begins at {version} here and at {began} elsewhere");
        (began != version).then(|| ("one version", sentence()))
    }

    pub fn slices(&mut self, job: JobId, engine: &JobEngine) -> Option<Broken> {
        let mut slices = engine.slices();
        let (place, slice) = slices.find(|(place, slice)| !slice.is_right(job, *place, &mut self.rights))?;
        let sentence = format!("slice {place} of {job:?} says it is at step {}, but is not", slice.version);
        Some(("every sample once", sentence))
    }

    pub fn after(&mut self, world: &World) -> Option<Broken> {
        self.one_plan(world).or_else(|| self.books(world))
    }

    /// What the controller believes workers to have, they have: a whole share of the plan in force, and where nobody runs
    /// it, at the one step.
    fn holdings(&self, world: &World, state: &State) -> Option<Broken> {
        for (id, job) in &state.jobs {
            let Base::Held { epoch, plan, step } = &job.base else { continue };
            let at_rest = match &job.phase {
                Phase::Running => false,
                Phase::Planning { .. } | Phase::Moving { .. } | Phase::Saving => true,
                _ => continue,
            };
            for (number, node) in world.nodes.iter().enumerate() {
                let worker = node.worker.as_ref().and_then(|worker| worker.id());
                let holds = |worker| plan.place(worker).is_some() && state.is_alive(worker);
                if !worker.is_some_and(holds) {
                    continue;
                }
                let engine = node.engines.get(id);
                let version = engine.and_then(|engine| engine.version(*epoch));
                let right = match at_rest {
                    true => version == Some(*step),
                    false => engine.is_some_and(|engine| engine.holds(*epoch)),
                };
                if !right {
                    let sentence =
                        format!("{id:?} {epoch:?} is at {step}, but worker {number} at {version:?}");
                    return Some(("one version", sentence));
                }
            }
        }
        None
    }

    fn one_plan(&self, world: &World) -> Option<Broken> {
        let mut running: BTreeMap<JobId, (usize, Epoch)> = BTreeMap::new();
        for (number, node) in world.nodes.iter().enumerate() {
            for (job, engine) in &node.engines {
                let Some(epoch) = engine.running().filter(|_| node.may_run(world.now_ms)) else { continue };
                let (first, other) = *running.entry(*job).or_insert((number, epoch));
                if other != epoch {
                    let sentence = format!("{job:?} runs {other:?} on {first} and {epoch:?} on {number}");
                    return Some(("one plan", sentence));
                }
            }
        }
        None
    }

    fn books(&mut self, world: &World) -> Option<Broken> {
        let state = world.keeper.as_ref()?.state();
        if state.revision == self.seen {
            return None;
        }
        self.seen = state.revision;
        self.held = state.jobs.iter().filter_map(|(id, job)| Some((*id, job.held()?.clone()))).collect();
        if let Some(broken) = self.holdings(world, state) {
            return Some(broken);
        }
        if let Some(broken) = self.receipts(world) {
            return Some(broken);
        }
        for (id, job) in &state.jobs {
            if job.counted - job.undone != job.committed {
                let sentence =
                    format!("{} counted, {} undone, {} done", job.counted, job.undone, job.committed);
                return Some(("every step counted once", sentence));
            }
            let possible = match &job.base {
                Base::Fresh => 0,
                Base::Checkpoint(checkpoint) => checkpoint.step,
                Base::Held { epoch, step, .. } => {
                    self.reached.get(&(*id, *epoch)).map_or(*step, |reached| *step.max(reached))
                }
            };
            if job.committed > possible {
                let sentence = format!("{id:?}: {} committed, {possible} done", job.committed);
                return Some(("every step counted once", sentence));
            }
            if let Some(began) = self.began.get(&(*id, job.epoch))
                && matches!(job.phase, Phase::Moving { .. })
            {
                let sentence = format!("{id:?} {:?} began at {began} before its state was there", job.epoch);
                return Some(("one plan", sentence));
            }
            if !job.checkpoints.is_empty() {
                self.saved.insert(*id);
            }
            if job.base == Base::Fresh && self.saved.contains(id) {
                return Some(("nothing begun anew", format!("{id:?} had checkpoints, and has no state")));
            }
            for checkpoint in job.checkpoints.iter().chain(&job.unreadable) {
                for part in 0..SLICES {
                    let slice = world.store.written(*id, checkpoint.id, part);
                    let right = slice.filter(|slice| slice.version == checkpoint.step);
                    if !right.is_some_and(|slice| slice.is_right(*id, part, &mut self.rights)) {
                        let sentence = format!("{id:?} {checkpoint:?} counts, but part {part} is {slice:?}");
                        return Some(("no torn checkpoint", sentence));
                    }
                }
            }
        }
        None
    }

    fn receipts(&self, world: &World) -> Option<Broken> {
        let keeper = world.keeper.as_ref()?;
        for id in keeper.state().jobs.keys() {
            // As of the last record.
            let bill = keeper.bill(*id, 0)?;
            let whole = self.ledger.whole(*id);
            if bill.parts.sum() != bill.whole || Some(bill.whole) != whole {
                return Some(("every millisecond once", format!("{id:?}: {bill:?}, but {whole:?}")));
            }
        }
        None
    }

    pub fn at_the_end(&self, world: &World) -> Option<Broken> {
        let state = world.keeper.as_ref()?.state();
        let done = |job: &&Job| job.phase == Phase::Resting(Rest::Done);
        let mut jobs = state.jobs.values().filter(done);
        let saved = |job: &&Job| {
            job.committed == job.spec.steps
                && job.checkpoints.last().is_some_and(|last| last.step == job.spec.steps)
        };
        let job = jobs.find(|job| !saved(job))?;
        Some(("progress", format!("{} is done, but not all of it is saved", job.spec.name)))
    }
}
