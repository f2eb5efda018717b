//! Every decision, as a function of the state and the workers' last reports: what is the next record, if any. It is asked
//! until there is none. Each condition waits for a report that shows what it needs, so one that is late or lost only
//! delays; and each looks for its own epoch, so one from before shows nothing.

use std::collections::BTreeSet;

use shoal_plan::{Closing, Standing, meet};

use super::allocation::{Share, Shares};
use super::interval::save_every_steps;
use super::job::{INSTALL_TRIES_MAX, SAVE_TRIES_MAX};
use super::payback::{changes_every_ms, pause_ms, weigh};
use super::record::{Change, Failure, Loss, Paced, Record, Why};
use super::state::{Base, Interval, Job, Phase, Rest, Wish};
use super::{Controller, NOTICE_MS_MAX, Proposal, Scope, Work};
use crate::bug::Bug;
use crate::message::{
    Checkpoint, Epoch, JobId, Obstacle, Part, Plan, Progress, Save, Saved, Spent, Stage, Status, WorkerId,
};

/// Times that peers may fail to reach a worker, without a step done between, before it gets no work for a while.
const STRIKES_MAX: u32 = 2;

impl Controller {
    pub(super) fn next(&mut self, now_ms: u64, scope: &Scope) -> Option<Record> {
        if matches!(scope, Scope::All) {
            let of_members =
                self.dismiss(now_ms).or_else(|| self.vanished(now_ms)).or_else(|| self.quarantine(now_ms));
            if of_members.is_some() {
                return of_members;
            }
        }
        let shares = self.shares.take().unwrap_or_else(|| Shares::new(&self.state));
        let next_of = |(id, job): (&JobId, &Job)| {
            let change = self.next_of(now_ms, *id, job, shares.of(*id))?;
            Some(Record::Job { job: *id, at_ms: now_ms, change })
        };
        let of_jobs = match scope {
            Scope::All => self.state.jobs.iter().find_map(next_of),
            Scope::Jobs(ids) => {
                let told = ids.iter().filter_map(|id| self.state.jobs.get_key_value(id));
                told.into_iter().find_map(next_of)
            }
        };
        self.shares = Some(shares);
        of_jobs
    }

    /// Those who wish to leave go when no job has anything on them.
    fn dismiss(&self, now_ms: u64) -> Option<Record> {
        let mut leaving = self.state.members.iter().filter(|(_, member)| member.leaves_by_ms.is_some());
        let needed = |worker: &WorkerId| self.state.jobs.values().any(|job| job.involved().contains(worker));
        let (worker, _) = leaving.find(|(worker, _)| !needed(worker))?;
        Some(Record::Lost { worker: *worker, how: Loss::Left, at_ms: now_ms })
    }

    /// Whoever's connection has ended is dead if those who work with it say so too, or if their plan has ended by a loss anyway:
    /// there is no need to wait for its silence. Where that would cost a job its state it is waited for all the same. What it
    /// may be running until its lease is over, `fences` see to.
    fn vanished(&self, now_ms: u64) -> Option<Record> {
        let mut closed = self.seen.iter().filter(|(_, seen)| seen.closed).map(|(worker, _)| *worker);
        let worker = closed.find(|worker| {
            let jobs: Vec<(&JobId, &Job)> =
                self.state.jobs.iter().filter(|(_, job)| job.involved().contains(worker)).collect();
            let is_missed = |(id, job): &(&JobId, &Job)| {
                let mut others = job.involved().into_iter().filter(|other| other != worker);
                ends_by_loss(job) || others.any(|other| self.accused(**id, job, other) == Some(*worker))
            };
            let goes_on = |(_, job): &(&JobId, &Job)| {
                job.held().is_none_or(|plan| self.state.covers_without(plan, *worker))
            };
            jobs.is_empty() || jobs.iter().any(is_missed) && jobs.iter().all(goes_on)
        })?;
        Some(Record::Lost { worker, how: Loss::Vanished, at_ms: now_ms })
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
        // Those that have something on it, and those that may just have failed to.
        let concerned =
            |job: &&Job| matches!(job.phase, Phase::Planning { .. }) || job.involved().contains(worker);
        let least = self.state.jobs.values().filter(concerned).map(|job| job.spec.workers_min).max()?;
        let others = self.state.members.keys().filter(|other| *other != worker && usable(other)).count();
        let until_ms = now_ms + self.settings.quarantine_ms.min(NOTICE_MS_MAX);
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
        let Record::Job { job: id, change, .. } = record else { return };
        let Some(job) = self.state.jobs.get(id) else { return };
        let members: Vec<WorkerId> = job.involved().into_iter().collect();
        match change {
            Change::Committed { .. } => {
                for worker in members {
                    if let Some(seen) = self.seen.get_mut(&worker) {
                        seen.strikes = 0;
                    }
                }
            }
            Change::Decided { .. } | Change::Abandoned { .. } if !job.has_failed() => {
                let accused = |worker: &WorkerId| self.accused(*id, job, *worker);
                let accused: Vec<WorkerId> = members.iter().filter_map(accused).collect();
                let votes = |worker: &WorkerId| accused.iter().filter(|other| *other == worker).count();
                let worst = accused.iter().copied().max_by_key(|worker| (votes(worker), *worker));
                if let Some(seen) = worst.and_then(|worker| self.seen.get_mut(&worker)) {
                    seen.strikes += 1;
                }
            }
            _ => {}
        }
    }

    /// Whom a worker says that it waited for in vain, in the plan that ends or in the one that did not come; or itself.
    fn accused(&self, id: JobId, job: &Job, worker: WorkerId) -> Option<WorkerId> {
        if !matches!(job.phase, Phase::Moving { .. }) {
            let part = self.status(worker, id)?.part?;
            return part.culprit.filter(|_| Some(part.epoch) == base_epoch(job));
        }
        match self.obstacle(id, job, worker)? {
            Obstacle::Peer(peer) => Some(*peer),
            Obstacle::Worker(_) => Some(worker),
            Obstacle::Source(_) | Obstacle::Room => None,
        }
    }

    /// What keeps a worker from getting its state of the plan that is to come.
    fn obstacle(&self, id: JobId, job: &Job, worker: WorkerId) -> Option<&Obstacle> {
        match self.status(worker, id)?.next.as_ref()? {
            (epoch, Progress::Failed(obstacle)) if *epoch == job.epoch => Some(obstacle),
            _ => None,
        }
    }

    fn next_of(&self, now_ms: u64, id: JobId, job: &Job, share: &Share) -> Option<Change> {
        match &job.phase {
            Phase::Resting(Rest::Done | Rest::Cancelled) => None,
            Phase::Resting(rest) => self.leave_rest(job, *rest, share),
            Phase::Planning { next } => self.plan(now_ms, id, job, next.as_ref(), share),
            Phase::Moving { plan, sources } => self.moving(now_ms, id, job, (plan, sources), share),
            Phase::Running => self.running(now_ms, id, job, share),
            Phase::Stopping { after, .. } => self.stopping(now_ms, id, job, *after),
            Phase::Settling { step, .. } => self.settling(id, job, *step),
            Phase::Saving => self.saving(id, job),
        }
    }

    fn leave_rest(&self, job: &Job, rest: Rest, share: &Share) -> Option<Change> {
        match (job.wish, rest) {
            (Wish::Run, _) if job.has_failed() => None,
            (Wish::Run, _) => self.ask(job, share),
            (Wish::Pause, Rest::Queued) => Some(Change::Rested { rest: Rest::Paused }),
            (Wish::Pause, _) => None,
            (Wish::Cancel, _) => Some(Change::Rested { rest: Rest::Cancelled }),
        }
    }

    /// Asks the planner, unless it would be the same question again.
    fn ask(&self, job: &Job, share: &Share) -> Option<Change> {
        let pace = |worker: &WorkerId| Some((*worker, self.state.members.get(worker)?.pace_percent));
        let paced: Vec<Paced> = share.available.iter().filter_map(pace).collect();
        let enough = paced.len() >= job.spec.workers_min.max(1);
        let same = match (&job.asked, &job.weighed) {
            // There is no hurry, and an answer is worth having: who asks anew at every change of pace may never get one.
            (Some(asked), _) if job.phase == Phase::Running => {
                asked.iter().map(|(worker, _)| worker).eq(paced.iter().map(|(worker, _)| worker))
            }
            (Some(asked), _) => *asked == paced,
            // The plan in force was not worse than any on these and others: fewer give no better one.
            (None, Some(weighed)) if job.phase == Phase::Running => {
                paced.iter().all(|paced| weighed.contains(paced))
            }
            (None, weighed) => weighed.as_ref() == Some(&paced),
        };
        (enough && !same).then_some(Change::Asked { request: job.request + 1, workers: paced })
    }

    fn plan(&self, now_ms: u64, id: JobId, job: &Job, next: Option<&Plan>, share: &Share) -> Option<Change> {
        if job.held().is_some_and(|plan| !self.covers(plan)) {
            return Some(Change::Restored { spent: self.spent(id, job) });
        }
        if let Some(plan) = job.held().filter(|_| self.makes_room(job)) {
            return match job.is_saved() {
                true => Some(Change::Released),
                false => self.begin_save(job, plan, job.committed),
            };
        }
        let workers = &share.available;
        let enough = workers.len() >= job.spec.workers_min.max(1);
        if job.wish == Wish::Run && !job.is_finished() && !job.has_failed() && enough {
            if self.waits(now_ms, job) {
                return None;
            }
            if let Some(plan) = next.filter(|plan| plan.members.iter().all(|member| workers.contains(member)))
            {
                return Some(self.begin_move(job, plan.clone()));
            }
            // One that waits gives its workers back: others may be waiting for them.
            let refused = job.asked.is_none() && job.weighed.is_some();
            let question = self.ask(job, share);
            if question.is_some() || !refused {
                return question;
            }
        }
        let rest = job.rest();
        match job.held() {
            Some(plan) if !job.is_saved() && rest != Rest::Cancelled => {
                self.begin_save(job, plan, job.committed)
            }
            _ => Some(Change::Rested { rest }),
        }
    }

    /// What could not be had a moment ago may be there in a while.
    fn waits(&self, now_ms: u64, job: &Job) -> bool {
        let Some(doublings) = job.tries.checked_sub(1) else { return false };
        let pause_ms = self.settings.retry_ms.saturating_mul(1 << doublings.min(INSTALL_TRIES_MAX));
        now_ms < job.tried_ms.saturating_add(pause_ms)
    }

    fn begin_move(&self, job: &Job, plan: Plan) -> Change {
        let sources = job.held().map(|held| self.state.alive(held)).unwrap_or_default();
        Change::Moving { epoch: Epoch(job.epoch.0 + 1), plan, sources }
    }

    /// Whether its state is to be in a checkpoint alone for a while, because it could not be moved otherwise.
    fn makes_room(&self, job: &Job) -> bool {
        job.cramped && job.wish == Wish::Run && !job.is_finished()
    }

    fn begin_save(&self, job: &Job, plan: &Plan, step: u64) -> Option<Change> {
        let writers = self.state.writers(plan)?;
        let checkpoint = Checkpoint { id: job.checkpoint + 1, step };
        let every_steps = self.save_every_steps(job);
        Some(Change::SaveBegun { save: Save { checkpoint, writers }, every_steps })
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
        let change = match answer {
            Err(reason) => Change::Refused { reason },
            Ok(Proposal { plan, .. }) if !plan.members.iter().all(known) => {
                Change::Refused { reason: "the plan has workers that were not asked for".to_owned() }
            }
            Ok(Proposal { plan, .. }) if plan.check().is_err() => {
                let reason = plan.check().err().map(|error| error.to_string()).unwrap_or_default();
                Change::Refused { reason }
            }
            Ok(Proposal { plan, move_ms, staying_ms }) => match &job.phase {
                Phase::Planning { .. } => {
                    let shares = Shares::new(&self.state);
                    let workers = &shares.of(id).available;
                    let held = job.held().is_none_or(|plan| self.covers(plan));
                    if !held
                        || job.wish != Wish::Run
                        || !plan.members.iter().all(|member| workers.contains(member))
                    {
                        return;
                    }
                    self.begin_move(job, plan)
                }
                Phase::Running => {
                    let changes_ms = changes_every_ms(&self.state.changes, &self.settings);
                    let pause_ms = pause_ms(job, move_ms, &self.settings);
                    let staying_ms = staying_ms.or(job.held().map(|held| held.step_ms));
                    let Some(weighing) = weigh(job, (staying_ms, plan.step_ms), pause_ms, changes_ms) else {
                        return;
                    };
                    match weighing.pays() {
                        false => Change::Declined { weighing },
                        true => {
                            let after = Some(job.committed + 1);
                            Change::Stopping { after, why: Why::Pays, next: Some(plan) }
                        }
                    }
                }
                _ => return,
            },
        };
        self.note(now_ms, Record::Job { job: id, at_ms: now_ms, change }, work);
    }

    fn moving(
        &self,
        now_ms: u64,
        id: JobId,
        job: &Job,
        (plan, sources): (&Plan, &[WorkerId]),
        share: &Share,
    ) -> Option<Change> {
        let abandon = |why| Some(Change::Abandoned { why });
        if job.wish != Wish::Run {
            return abandon(Failure::Wished);
        }
        let usable = |worker: &WorkerId| share.target.contains(worker);
        if !plan.members.iter().all(usable) || !sources.iter().all(|source| self.state.is_alive(*source)) {
            return abandon(Failure::Member);
        }
        let obstacles = plan.members.iter().filter_map(|worker| self.obstacle(id, job, *worker));
        if let Some(failure) = worst(obstacles) {
            let forgets = self.bug == Some(Bug::ReadForever) && matches!(failure, Failure::Source(_));
            return abandon(if forgets { Failure::Transfer } else { failure });
        }
        let ready = |worker: &WorkerId| {
            let next = self.status(*worker, id).and_then(|status| status.next.as_ref());
            next.is_some_and(|(epoch, progress)| *epoch == job.epoch && *progress == Progress::Ready)
        };
        let fenced = self.fences.get(&id).is_some_and(|until_ms| now_ms < *until_ms)
            && self.bug != Some(Bug::StartUnfenced);
        let all = !fenced && self.all_but_last(&plan.members, Bug::StartUnready).all(ready);
        all.then_some(Change::Started)
    }

    fn running(&self, now_ms: u64, id: JobId, job: &Job, share: &Share) -> Option<Change> {
        let plan = job.held()?;
        if let Some((step, closing)) = self.progress(id, job, plan) {
            return Some(Change::Committed { step, closing });
        }
        if let Some(dead_end) = self.dead_end(id, job, plan) {
            return Some(dead_end);
        }
        let stop = |after, why| Some(Change::Stopping { after, why, next: None });
        let taken: Vec<WorkerId> =
            plan.members.iter().copied().filter(|worker| !share.target.contains(worker)).collect();
        if !plan.members.iter().all(|worker| self.state.is_alive(*worker)) {
            return stop(None, Why::Lost);
        }
        if job.is_finished() {
            return stop(Some(job.spec.steps - 1), Why::Finished);
        }
        if job.has_failed() {
            return stop(None, Why::DeadEnd);
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
            let leaves_by_ms = |worker: &WorkerId| self.state.members.get(worker)?.leaves_by_ms;
            let by_ms = taken.iter().filter_map(leaves_by_ms).min();
            let in_time = by_ms.is_none_or(|by| by > now_ms + 2 * plan.step_ms);
            return stop(end.filter(|_| in_time), Why::Taken);
        }
        self.save_running(id, job, plan)
            .or_else(|| self.ask(job, share).filter(|_| !self.gathers(now_ms, job)))
    }

    /// Whether others may be about to join that one plan should be made for.
    fn gathers(&self, now_ms: u64, job: &Job) -> bool {
        let Some((worker, at_ms)) = self.newcomer else { return false };
        let is_known = job.weighed.iter().flatten().any(|(known, _)| *known == worker);
        !is_known && now_ms < at_ms.saturating_add(self.settings.gather_ms)
    }

    /// Begins a checkpoint when one is due, and ends it.
    fn save_running(&self, id: JobId, job: &Job, plan: &Plan) -> Option<Change> {
        if let Some(save) = &job.saving {
            return self.end_save(id, job, save);
        }
        let step = job.committed.saturating_add(self.settings.save_ahead_steps);
        let due_step = job.saved_step().saturating_add(self.save_every_steps(job));
        let due = job.committed >= due_step && step < job.spec.steps;
        if due { self.begin_save(job, plan, step) } else { None }
    }

    fn save_every_steps(&self, job: &Job) -> u64 {
        match job.spec.checkpoint_every {
            Interval::Steps(steps) => steps,
            Interval::Auto => save_every_steps(job, &self.state, &self.settings, self.now_ms),
        }
    }

    /// Complete when every writer has its part on the disk; dropped if one came too late for it or died.
    fn end_save(&self, id: JobId, job: &Job, save: &Save) -> Option<Change> {
        let saved = |worker: &WorkerId| {
            let saved = self.status(*worker, id)?.saved?;
            (saved.id == save.checkpoint.id).then_some(saved)
        };
        let too_late = |worker: &WorkerId| saved(worker).is_some_and(|saved| !saved.done);
        if save.writers.iter().any(|worker| !self.state.is_alive(*worker) || too_late(worker)) {
            return Some(Change::SaveDropped);
        }
        if save.checkpoint.step > job.committed {
            return None;
        }
        let writers = self.all_but_last(&save.writers, Bug::PartMissing);
        let done: Option<Vec<Saved>> = writers.map(saved).collect();
        let cost_ms = done?.iter().map(|saved| saved.cost_ms).max().unwrap_or(0);
        Some(Change::SaveCompleted { cost_ms: cost_ms.min(NOTICE_MS_MAX) })
    }

    fn stopping(&self, now_ms: u64, id: JobId, job: &Job, after: Option<u64>) -> Option<Change> {
        let plan = job.held()?;
        if let Some((step, closing)) = self.progress(id, job, plan) {
            return Some(Change::Committed { step, closing });
        }
        if let Some(dead_end) = self.dead_end(id, job, plan) {
            return Some(dead_end);
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
            // Two steps may be left to do, however long they are.
            let grace_ms = self.settings.grace_ms.max(plan.step_ms.saturating_mul(3));
            let late = now_ms >= since_ms.saturating_add(grace_ms);
            return (after.is_some() && (lost || stalled || late)).then_some(Change::Hurried);
        };
        if self.bug == Some(Bug::GoBack) {
            let step =
                standings.iter().map(|(_, standing)| standing.step).min().unwrap_or(0).max(job.committed);
            return Some(Change::Decided { step, closing: None, spent: Spent::default() });
        }
        match meet(job.committed, job.closing, &standings) {
            Ok((step, closing)) if self.covers(plan) => {
                Some(Change::Decided { step, closing, spent: self.spent(id, job) })
            }
            _ => Some(Change::Restored { spent: self.spent(id, job) }),
        }
    }

    fn settling(&self, id: JobId, job: &Job, step: u64) -> Option<Change> {
        let plan = job.held()?;
        if !self.covers(plan) {
            return Some(Change::Restored { spent: self.spent(id, job) });
        }
        if let Some(dead_end) = self.dead_end(id, job, plan) {
            return Some(dead_end);
        }
        let there = |part: Option<Part>| {
            part.is_some_and(|part| {
                part.stage == Stage::Stopped && part.standing.step == step && !part.standing.applied
            })
        };
        let all = self.parts(id, job, plan).all(|(_, part)| there(part) || self.bug == Some(Bug::GoBack));
        all.then_some(Change::Settled)
    }

    fn saving(&self, id: JobId, job: &Job) -> Option<Change> {
        let plan = job.held()?;
        if !self.covers(plan) {
            return Some(Change::Restored { spent: self.spent(id, job) });
        }
        if let Some(dead_end) = self.dead_end(id, job, plan) {
            return Some(dead_end);
        }
        if let Some(save) = &job.saving {
            return self.end_save(id, job, save);
        }
        let gives_up = job.has_failed() && job.unsaved >= SAVE_TRIES_MAX;
        if !job.is_saved() && !gives_up {
            return self.begin_save(job, plan, job.committed);
        }
        match self.makes_room(job) && job.is_saved() {
            true => Some(Change::Released),
            false => Some(Change::Rested { rest: job.rest() }),
        }
    }

    /// What a worker of the plan in force says of why nobody would get further, once. All pass the same steps with the same
    /// sums, so one word is enough, and nobody is to blame.
    fn dead_end(&self, id: JobId, job: &Job, plan: &Plan) -> Option<Change> {
        if job.has_failed() || self.bug == Some(Bug::PassDeadEnd) {
            return None;
        }
        let epoch = base_epoch(job);
        let said = |worker: &WorkerId| {
            let (of, reason) = self.status(*worker, id)?.dead_end.as_ref()?;
            (Some(*of) == epoch).then(|| Change::DeadEnd { reason: brief(reason) })
        };
        plan.members.iter().find_map(said)
    }

    /// Where the time of the workers of the plan in force went, as far as they have said.
    pub(super) fn spent(&self, id: JobId, job: &Job) -> Spent {
        let mut spent = self.departed.get(&id).copied().unwrap_or_default();
        let parts = job.held().into_iter().flat_map(|plan| self.parts(id, job, plan));
        parts.filter_map(|(_, part)| part).for_each(|part| spent.add(&part.spent));
        spent
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

/// Whether its plan is being replaced, or is about to be because somebody was lost.
fn ends_by_loss(job: &Job) -> bool {
    match job.phase {
        Phase::Stopping { why, .. } => matches!(why, Why::Lost | Why::Stalled),
        Phase::Settling { .. } | Phase::Planning { .. } | Phase::Moving { .. } => true,
        Phase::Resting(_) | Phase::Running | Phase::Saving => false,
    }
}

/// The epoch of the plan whose workers have the job's state.
fn base_epoch(job: &Job) -> Option<Epoch> {
    match &job.base {
        Base::Held { epoch, .. } => Some(*epoch),
        _ => None,
    }
}

/// Of what keeps workers from getting their state, what matters most: no other worker helps where nothing can be read.
fn worst<'a>(obstacles: impl Iterator<Item = &'a Obstacle>) -> Option<Failure> {
    let rank = |obstacle: &&Obstacle| match obstacle {
        Obstacle::Peer(_) => 0,
        Obstacle::Worker(_) => 1,
        Obstacle::Room => 2,
        Obstacle::Source(_) => 3,
    };
    Some(match obstacles.max_by_key(rank)? {
        Obstacle::Peer(_) => Failure::Transfer,
        Obstacle::Worker(reason) => Failure::Worker(brief(reason)),
        Obstacle::Room => Failure::Room,
        Obstacle::Source(reason) => Failure::Source(brief(reason)),
    })
}

/// What a worker says is written down, but not without end.
fn brief(sentence: &str) -> String {
    const CHARACTERS_MAX: usize = 400;
    sentence.chars().take(CHARACTERS_MAX).collect()
}
