//! Every decision, as a function of the state and the workers' last reports: what is the next record, if any. It is asked
//! until there is none. Each condition waits for a report that shows what it needs, so one that is late or lost only
//! delays; and each looks for its own epoch, so one from before shows nothing.

use std::collections::BTreeSet;

use shoal_plan::{Closing, Standing, meet};

use super::allocation::{Targets, available, targets};
use super::payback::{changes_every_ms, weigh};
use super::record::{Failure, Loss, Paced, Record, Why};
use super::state::{Base, Job, Phase, Rest, Wish};
use super::{Controller, Proposal, Work};
use crate::bug::Bug;
use crate::message::{Checkpoint, Epoch, JobId, Part, Plan, Progress, Save, Stage, Status, WorkerId};

/// Times that peers may fail to reach a worker, without a step done between, before it gets no work for a while.
const STRIKES_MAX: u32 = 2;

impl Controller {
    pub(super) fn next(&mut self, now_ms: u64) -> Option<Record> {
        let of_members = self.dismiss(now_ms).or_else(|| self.quarantine(now_ms));
        if of_members.is_some() {
            return of_members;
        }
        let targets = self.targets.take().unwrap_or_else(|| targets(&self.state));
        let of_jobs = self.state.jobs.iter().find_map(|(id, job)| self.next_of(now_ms, *id, job, &targets));
        self.targets = Some(targets);
        of_jobs
    }

    /// Those who wish to leave go when no job has anything on them.
    fn dismiss(&self, now_ms: u64) -> Option<Record> {
        let mut leaving = self.state.members.iter().filter(|(_, member)| member.leaves_by_ms.is_some());
        let needed = |worker: &WorkerId| self.state.jobs.values().any(|job| job.involved().contains(worker));
        let (worker, _) = leaving.find(|(worker, _)| !needed(worker))?;
        Some(Record::Lost { worker: *worker, how: Loss::Left, at_ms: now_ms })
    }

    /// A worker that the controller hears and its peers do not would hold its jobs up for ever.
    fn quarantine(&self, now_ms: u64) -> Option<Record> {
        let usable = |worker: &WorkerId| {
            let member = self.state.members.get(worker);
            member
                .is_some_and(|member| member.quarantined_until_ms.is_none() && member.leaves_by_ms.is_none())
        };
        let (worker, _) =
            self.seen.iter().find(|(worker, seen)| seen.strikes >= STRIKES_MAX && usable(worker))?;
        let jobs = self.state.jobs.values().filter(|job| job.involved().contains(worker));
        let least = jobs.map(|job| job.spec.workers_min).max()?;
        let others = self.state.members.keys().filter(|worker| usable(worker)).count() - 1;
        let until_ms = now_ms + self.settings.quarantine_ms;
        (others >= least.max(1)).then_some(Record::Quarantined { worker: *worker, until_ms })
    }

    /// Notes who could not be reached when a plan failed, and forgives when steps are done. Of several accused it is the
    /// one that most others accuse; of two that accuse each other, the younger.
    pub(super) fn blame(&mut self, record: &Record) {
        if let Record::Quarantined { worker, .. } = record
            && let Some(seen) = self.seen.get_mut(worker)
        {
            seen.strikes = 0;
        }
        let job = record.job().and_then(|id| Some((id, self.state.jobs.get(&id)?)));
        let Some((id, job)) = job else { return };
        let members: Vec<WorkerId> = job.involved().into_iter().collect();
        let culprit = |worker: &WorkerId| {
            let status = self.seen.get(worker)?.jobs.get(&id)?;
            match record {
                Record::Decided { .. } => {
                    status.part.filter(|part| Some(part.epoch) == base_epoch(job))?.culprit
                }
                Record::Abandoned { .. } => match status.next? {
                    (epoch, Progress::Failed(culprit)) if epoch == job.epoch => culprit,
                    _ => None,
                },
                _ => None,
            }
        };
        match record {
            Record::Committed { .. } => {
                for worker in members {
                    if let Some(seen) = self.seen.get_mut(&worker) {
                        seen.strikes = 0;
                    }
                }
            }
            Record::Decided { .. } | Record::Abandoned { .. } => {
                let accused: Vec<WorkerId> = members.iter().filter_map(culprit).collect();
                let votes = |worker: &WorkerId| accused.iter().filter(|other| *other == worker).count();
                let worst = accused.iter().copied().max_by_key(|worker| (votes(worker), *worker));
                if let Some(seen) = worst.and_then(|worker| self.seen.get_mut(&worker)) {
                    seen.strikes += 1;
                }
            }
            _ => {}
        }
    }

    fn next_of(&self, now_ms: u64, id: JobId, job: &Job, targets: &Targets) -> Option<Record> {
        match &job.phase {
            Phase::Resting(Rest::Done | Rest::Cancelled) => None,
            Phase::Resting(rest) => self.leave_rest(id, job, *rest, targets),
            Phase::Planning { next } => self.plan(id, job, next.as_ref(), targets),
            Phase::Moving { plan, sources } => self.moving(id, job, plan, sources, targets),
            Phase::Running => self.running(now_ms, id, job, targets),
            Phase::Stopping { after, .. } => self.stopping(now_ms, id, job, *after),
            Phase::Settling { step, .. } => self.settling(id, job, *step),
            Phase::Saving => self.saving(id, job),
        }
    }

    fn leave_rest(&self, id: JobId, job: &Job, rest: Rest, targets: &Targets) -> Option<Record> {
        match (job.wish, rest) {
            (Wish::Run, _) => self.ask(id, job, targets),
            (Wish::Pause, Rest::Queued) => Some(Record::Rested { job: id, rest: Rest::Paused }),
            (Wish::Pause, _) => None,
            (Wish::Cancel, _) => Some(Record::Rested { job: id, rest: Rest::Cancelled }),
        }
    }

    /// Asks the planner, unless it would be the same question again.
    fn ask(&self, id: JobId, job: &Job, targets: &Targets) -> Option<Record> {
        let workers = available(&self.state, targets, id);
        let paced: Vec<Paced> =
            workers.iter().map(|worker| (*worker, self.state.members[worker].pace_percent)).collect();
        let enough = workers.len() >= job.spec.workers_min.max(1);
        let same = job.asked.as_ref().or(job.weighed.as_ref()) == Some(&paced);
        (enough && !same).then_some(Record::Asked { job: id, request: job.request + 1, workers: paced })
    }

    fn plan(&self, id: JobId, job: &Job, next: Option<&Plan>, targets: &Targets) -> Option<Record> {
        if job.held().is_some_and(|plan| !self.covers(plan)) {
            return Some(Record::Restored { job: id });
        }
        let workers = available(&self.state, targets, id);
        let enough = workers.len() >= job.spec.workers_min.max(1);
        if job.wish == Wish::Run && !job.is_finished() && enough {
            if let Some(plan) = next.filter(|plan| plan.members.iter().all(|member| workers.contains(member)))
            {
                return Some(self.begin_move(id, job, plan.clone()));
            }
            // One that waits gives its workers back: others may be waiting for them.
            let refused = job.asked.is_none() && job.weighed.is_some();
            let question = self.ask(id, job, targets);
            if question.is_some() || !refused {
                return question;
            }
        }
        let rest = job.rest();
        match job.held() {
            Some(plan) if !job.is_saved() && rest != Rest::Cancelled => {
                self.begin_save(id, job, plan, job.committed)
            }
            _ => Some(Record::Rested { job: id, rest }),
        }
    }

    fn begin_move(&self, id: JobId, job: &Job, plan: Plan) -> Record {
        let sources = job.held().map(|held| self.state.alive(held)).unwrap_or_default();
        Record::Moving { job: id, epoch: Epoch(job.epoch.0 + 1), plan, sources }
    }

    fn begin_save(&self, id: JobId, job: &Job, plan: &Plan, step: u64) -> Option<Record> {
        let writers = self.state.writers(plan)?;
        let checkpoint = Checkpoint { id: job.checkpoint + 1, step };
        Some(Record::SaveBegun { job: id, save: Save { checkpoint, writers } })
    }

    /// The planner has answered.
    pub(super) fn planned(
        &mut self,
        now_ms: u64,
        id: JobId,
        request: u64,
        answer: Result<Proposal, String>,
        work: &mut Work,
    ) {
        let Some(job) = self.state.jobs.get(&id) else { return };
        let Some(asked) = job.asked.as_ref().filter(|_| job.request == request) else { return };
        let known = |member: &WorkerId| asked.iter().any(|(worker, _)| worker == member);
        let record = match answer {
            Err(reason) => Record::Refused { job: id, reason },
            Ok(Proposal { plan, .. }) if !plan.members.iter().all(known) => {
                Record::Refused { job: id, reason: "the plan has workers that were not asked for".to_owned() }
            }
            Ok(Proposal { plan, move_ms }) => match &job.phase {
                Phase::Planning { .. } => {
                    let targets = targets(&self.state);
                    let workers = available(&self.state, &targets, id);
                    let held = job.held().is_none_or(|plan| self.covers(plan));
                    if !held
                        || job.wish != Wish::Run
                        || !plan.members.iter().all(|member| workers.contains(member))
                    {
                        return;
                    }
                    self.begin_move(id, job, plan)
                }
                Phase::Running => {
                    let changes_ms = changes_every_ms(&self.state.changes, &self.settings);
                    let Some(weighing) = weigh(job, plan.step_ms, move_ms, changes_ms) else { return };
                    match weighing.pays() {
                        false => Record::Declined { job: id, weighing },
                        true => {
                            let after = Some(job.committed + 1);
                            Record::Stopping { job: id, after, why: Why::Pays, next: Some(plan) }
                        }
                    }
                }
                _ => return,
            },
        };
        self.note(now_ms, record, work);
    }

    fn moving(
        &self,
        id: JobId,
        job: &Job,
        plan: &Plan,
        sources: &[WorkerId],
        targets: &Targets,
    ) -> Option<Record> {
        let abandon = |why| Some(Record::Abandoned { job: id, why });
        if job.wish != Wish::Run {
            return abandon(Failure::Wished);
        }
        let target = targets.get(&id);
        let usable = |worker: &WorkerId| target.is_some_and(|target| target.contains(worker));
        if !plan.members.iter().all(usable) || !sources.iter().all(|source| self.state.is_alive(*source)) {
            return abandon(Failure::Member);
        }
        let progress = |worker: &WorkerId| match self.status(*worker, id)?.next? {
            (epoch, progress) if epoch == job.epoch => Some(progress),
            _ => None,
        };
        if plan.members.iter().any(|worker| matches!(progress(worker), Some(Progress::Failed(_)))) {
            return abandon(Failure::Transfer);
        }
        let mut members = self.all_but_last(&plan.members, Bug::StartUnready);
        members.all(|worker| progress(worker) == Some(Progress::Ready)).then_some(Record::Started { job: id })
    }

    fn running(&self, now_ms: u64, id: JobId, job: &Job, targets: &Targets) -> Option<Record> {
        let plan = job.held()?;
        if let Some((step, closing)) = self.progress(id, job, plan) {
            return Some(Record::Committed { job: id, step, closing });
        }
        let stop = |after, why| Some(Record::Stopping { job: id, after, why, next: None });
        let target = targets.get(&id);
        let taken: Vec<WorkerId> = plan
            .members
            .iter()
            .copied()
            .filter(|worker| !target.is_some_and(|t| t.contains(worker)))
            .collect();
        if !plan.members.iter().all(|worker| self.state.is_alive(*worker)) {
            return stop(None, Why::Lost);
        }
        if job.is_finished() {
            return stop(Some(job.spec.steps - 1), Why::Finished);
        }
        if self.parts(id, job, plan).any(|(_, part)| part.is_some_and(|part| part.stage == Stage::Stopped)) {
            return stop(None, Why::Stalled);
        }
        let end = Some(job.committed + 1);
        match job.wish {
            Wish::Run => {}
            Wish::Pause => return stop(end, Why::Wished),
            Wish::Cancel => return stop(None, Why::Wished),
        }
        if !taken.is_empty() {
            // Short notices leave no time for the end of a step.
            let by_ms = taken.iter().filter_map(|worker| self.state.members[worker].leaves_by_ms).min();
            let in_time = by_ms.is_none_or(|by| by > now_ms + 2 * plan.step_ms);
            return stop(end.filter(|_| in_time), Why::Taken);
        }
        self.save_running(id, job, plan).or_else(|| self.ask(id, job, targets))
    }

    /// Begins a checkpoint when one is due, and ends it.
    fn save_running(&self, id: JobId, job: &Job, plan: &Plan) -> Option<Record> {
        if let Some(save) = &job.saving {
            return self.end_save(id, save);
        }
        let last = job.saved_step();
        let step = job.committed + self.settings.save_ahead_steps;
        let due = job.committed >= last + job.spec.checkpoint_every_steps && step < job.spec.steps;
        if due { self.begin_save(id, job, plan, step) } else { None }
    }

    /// Complete when every writer has its part on the disk; dropped if one came too late for it or died.
    fn end_save(&self, id: JobId, save: &Save) -> Option<Record> {
        let saved = |worker: &WorkerId| match self.status(*worker, id)?.saved? {
            (checkpoint, done) if checkpoint == save.checkpoint.id => Some(done),
            _ => None,
        };
        let failed = |worker: &WorkerId| !self.state.is_alive(*worker) || saved(worker) == Some(false);
        if save.writers.iter().any(failed) {
            return Some(Record::SaveDropped { job: id });
        }
        let mut writers = self.all_but_last(&save.writers, Bug::PartMissing);
        writers.all(|worker| saved(worker) == Some(true)).then_some(Record::SaveCompleted { job: id })
    }

    fn stopping(&self, now_ms: u64, id: JobId, job: &Job, after: Option<u64>) -> Option<Record> {
        let plan = job.held()?;
        if let Some((step, closing)) = self.progress(id, job, plan) {
            return Some(Record::Committed { job: id, step, closing });
        }
        let parts: Vec<(WorkerId, Option<Part>)> = self.parts(id, job, plan).collect();
        let stopped = |part: &Option<Part>| part.filter(|part| part.stage == Stage::Stopped);
        let place = |worker: WorkerId| plan.members.iter().position(|member| *member == worker);
        let standing =
            |(worker, part): &(WorkerId, Option<Part>)| Some((place(*worker)?, stopped(part)?.standing));
        let standings: Option<Vec<(usize, Standing)>> = parts.iter().map(standing).collect();
        let Some(standings) = standings else {
            let lost = !plan.members.iter().all(|worker| self.state.is_alive(*worker));
            let stalled =
                parts.iter().any(|(_, part)| stopped(part).is_some_and(|part| part.culprit.is_some()));
            let since_ms = self.stopping_ms.get(&id).copied().unwrap_or(0);
            let late = now_ms >= since_ms + self.settings.grace_ms;
            return (after.is_some() && (lost || stalled || late)).then_some(Record::Hurried { job: id });
        };
        if self.bug == Some(Bug::GoBack) {
            let step =
                standings.iter().map(|(_, standing)| standing.step).min().unwrap_or(0).max(job.committed);
            return Some(Record::Decided { job: id, step, closing: None });
        }
        match meet(job.committed, job.closing, &standings) {
            Ok((step, closing)) if self.covers(plan) => Some(Record::Decided { job: id, step, closing }),
            _ => Some(Record::Restored { job: id }),
        }
    }

    fn settling(&self, id: JobId, job: &Job, step: u64) -> Option<Record> {
        let plan = job.held()?;
        if !self.covers(plan) {
            return Some(Record::Restored { job: id });
        }
        let there = |part: Option<Part>| {
            part.is_some_and(|part| {
                part.stage == Stage::Stopped && part.standing.step == step && !part.standing.applied
            })
        };
        let all = self.parts(id, job, plan).all(|(_, part)| there(part) || self.bug == Some(Bug::GoBack));
        all.then_some(Record::Settled { job: id })
    }

    fn saving(&self, id: JobId, job: &Job) -> Option<Record> {
        let plan = job.held()?;
        if !self.covers(plan) {
            return Some(Record::Restored { job: id });
        }
        if let Some(save) = &job.saving {
            return self.end_save(id, save);
        }
        if !job.is_saved() {
            return self.begin_save(id, job, plan, job.committed);
        }
        Some(Record::Rested { job: id, rest: job.rest() })
    }

    /// How far the plan in force has come beyond what is committed.
    fn progress(&self, id: JobId, job: &Job, plan: &Plan) -> Option<(u64, Option<Closing>)> {
        let standings = self.parts(id, job, plan).filter_map(|(_, part)| Some(part?.standing));
        let ahead =
            standings.max_by_key(Standing::reaches).filter(|standing| standing.reaches() > job.committed)?;
        Some((ahead.reaches(), ahead.closing))
    }

    /// The plan's living workers, and what they last said of their parts in it.
    fn parts(&self, id: JobId, job: &Job, plan: &Plan) -> impl Iterator<Item = (WorkerId, Option<Part>)> {
        let epoch = base_epoch(job);
        let mut alive = self.state.alive(plan);
        if self.bug == Some(Bug::DecideEarly) && alive.len() > 1 {
            alive.pop();
        }
        alive.into_iter().map(move |worker| {
            let part = self.status(worker, id).and_then(|status| status.part);
            (worker, part.filter(|part| Some(part.epoch) == epoch))
        })
    }

    fn status(&self, worker: WorkerId, job: JobId) -> Option<&Status> {
        self.seen.get(&worker)?.jobs.get(&job)
    }

    fn covers(&self, plan: &Plan) -> bool {
        if self.bug == Some(Bug::GiveUp) && self.state.alive(plan).len() < plan.members.len() {
            return false;
        }
        self.state.covers(plan) || self.bug == Some(Bug::ForgetHolders) && !self.state.alive(plan).is_empty()
    }

    /// All of them, unless the bug is planted.
    fn all_but_last<'a>(&self, workers: &'a [WorkerId], bug: Bug) -> impl Iterator<Item = &'a WorkerId> {
        let distinct: BTreeSet<&WorkerId> = workers.iter().collect();
        let left_out = distinct.last().copied().filter(|_| self.bug == Some(bug) && distinct.len() > 1);
        workers.iter().filter(move |worker| Some(*worker) != left_out)
    }
}

/// The epoch of the plan whose workers have the job's state.
fn base_epoch(job: &Job) -> Option<Epoch> {
    match &job.base {
        Base::Held { epoch, .. } => Some(*epoch),
        _ => None,
    }
}
