//! The controller: who is there, which jobs there are, the plan in force for each, and how it changes. It is a pure state
//! machine: [`Controller::step`] takes the time and an event and gives records, to be written down, and actions, to be
//! taken once they are.
//!
//! It has two parts. What must not be lost is the [`State`], which changes by records only. What may be lost is what it
//! has heard lately: each worker's last report. Every decision is a function of the two (`advance`), and what workers are
//! told is a function of the first ([`orders`](mod@orders)). So nothing depends on having seen an event at the right
//! moment, and a controller that starts again goes on as soon as the workers have reported once more.
//!
//! A change of plan goes like this, with what makes it go on in brackets: `Stopping` (a worker is dead, stalled or taken
//! away, or a better plan pays), `Decided` (every worker of the plan has stopped or is dead), `Settled` (all are at the one
//! step), `Asked` and `Moving` (the planner has answered), `Started` (all have their new state). If a worker dies on the
//! way, what was done is still good or is done again: until `Started`, the old plan's workers keep their state.
//!
//! What may follow what is [`fit`]'s to say, for records from a disk as for those made here; `allocation`, `payback` and
//! `interval` are what decisions are weighed by; [`receipt`] keeps account of where the time went.

mod advance;
mod allocation;
pub mod fit;
mod interval;
mod job;
pub mod orders;
mod payback;
pub mod receipt;
pub mod record;
pub mod state;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::bug::Bug;
use crate::message::{
    JobId, NUMBER_MAX, Orders, Plan, Price, Report, Spent, Status, ToController, ToWorker, WorkerId,
};
use crate::settings::Settings;
use allocation::Shares;
use fit::Misfit;
use receipt::Bill;
use record::{Change, Loss, Paced, Record};
use state::{Job, JobSpec, State, Wish};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// It begins, or goes on from its log.
    Started,
    /// Time has passed: at least every `report_every_ms`.
    Tick,
    Message(ToController),
    /// A worker's connection has ended and it has no other: its process may be dead, or the network have broken.
    Closed {
        worker: WorkerId,
    },
    /// The planner's answer, or why there is no plan.
    Planned {
        job: JobId,
        request: u64,
        answer: Result<Proposal, String>,
    },
    /// Taken on if it is new and [`JobSpec::check`] has nothing against it.
    Submit {
        job: JobId,
        spec: JobSpec,
    },
    Wish {
        job: JobId,
        wish: Wish,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proposal {
    pub plan: Plan,
    /// How long training pauses for the state to move there.
    pub move_ms: u64,
    /// What a step of the plan in force takes on the workers as they are now, where that was asked: one of them may have
    /// become slow since it was made.
    pub staying_ms: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Send {
        to: WorkerId,
        message: ToWorker,
    },
    /// To one who is no member (any more, or yet).
    Answer {
        name: String,
        message: ToWorker,
    },
    /// Ask the planner, who answers with [`Event::Planned`].
    Plan {
        job: JobId,
        request: u64,
        workers: Vec<Paced>,
        held: Option<Plan>,
    },
    KeepCheckpoints {
        job: JobId,
        keeping: Keeping,
    },
}

/// Which of a job's checkpoints count. All others up to the last number that was given out then, whole or not, may be
/// removed. Whoever removes them may be late, and what was begun since is none of theirs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keeping {
    pub ids: Vec<u64>,
    pub given_out: u64,
}

impl Keeping {
    /// Whether a checkpoint is to stay.
    pub fn spares(&self, id: u64) -> bool {
        id > self.given_out || self.ids.contains(&id)
    }
}

/// What an event led to. The actions may be taken once the records are on the disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    pub records: Vec<Record>,
    pub actions: Vec<Action>,
    /// A decision that does not fit the state: a mistake in these modules. It was not made.
    pub misfit: Option<Misfit>,
}

/// The end of time, which leaves room for every deadline and notice.
const TIME_MS_MAX: u64 = NUMBER_MAX / 4;
/// The longest notice, which is as good as none.
const NOTICE_MS_MAX: u64 = NUMBER_MAX / 4;
/// A million dollars an hour.
const PRICE_MAX: Price = Price(1_000_000_000_000);

/// What was heard of a worker lately.
#[derive(Clone, Debug, Default)]
struct Seen {
    heard_ms: u64,
    /// Of its last report.
    number: u64,
    jobs: BTreeMap<JobId, Status>,
    /// The revision at which its orders last changed.
    told: u64,
    /// The last step whose pace was looked at, and those in a row that were off.
    paced: Option<(JobId, u64)>,
    off: Option<Off>,
    /// How often peers could not reach it since a step was last done.
    strikes: u32,
    /// Its connection has ended since it was last heard of.
    closed: bool,
}

/// Steps one after the other that were all slower than what is known of a device, or all quicker.
#[derive(Clone, Copy, Debug)]
struct Off {
    steps: u32,
    since_ms: u64,
    is_slower: bool,
    /// Of the one that was least off: what may be taken for the device's own, and not for chance.
    percent: u32,
}

impl Off {
    fn with(self, more: Off) -> Off {
        if self.is_slower != more.is_slower {
            return more;
        }
        let percent = match self.is_slower {
            true => self.percent.min(more.percent),
            false => self.percent.max(more.percent),
        };
        Off { steps: self.steps + more.steps, percent, ..self }
    }
}

pub struct Controller {
    settings: Settings,
    state: State,
    seen: BTreeMap<WorkerId, Seen>,
    /// Since when jobs have been stopping.
    stopping_ms: BTreeMap<JobId, u64>,
    /// Where the time of those went who were lost since a job's plan came into force.
    departed: BTreeMap<JobId, Spent>,
    /// Before when none of a job's plans starts: until then a worker that has vanished may run the one before on its lease.
    fences: BTreeMap<JobId, u64>,
    /// The last worker that joined, and when.
    newcomer: Option<(WorkerId, u64)>,
    /// Of the last event.
    now_ms: u64,
    /// As they follow from the state, which steps that are done do not change; they are much work for many jobs.
    shares: Option<Shares>,
    bug: Option<Bug>,
}

/// An event that is being worked on.
#[derive(Default)]
struct Work {
    step: Step,
    /// Workers whose orders may have changed.
    touched: BTreeSet<WorkerId>,
    /// Jobs whose checkpoints may have changed.
    saved: BTreeSet<JobId>,
    scope: Scope,
}

/// What there may be something to decide about. A report tells of few jobs, and there are many reports.
#[derive(Default)]
enum Scope {
    #[default]
    All,
    Jobs(BTreeSet<JobId>),
}

impl Controller {
    /// From a state that its records gave; [`Event::Started`] has to come first.
    pub fn new(settings: Settings, state: State) -> Controller {
        Controller {
            settings,
            state,
            seen: BTreeMap::new(),
            stopping_ms: BTreeMap::new(),
            departed: BTreeMap::new(),
            fences: BTreeMap::new(),
            newcomer: None,
            now_ms: 0,
            shares: None,
            bug: None,
        }
    }

    /// For the drill.
    #[doc(hidden)]
    pub fn plant(&mut self, bug: Option<Bug>) {
        self.bug = bug;
    }

    pub fn state(&self) -> &State {
        &self.state
    }

    /// Where the time of a job's workers went until now.
    pub fn bill(&self, job: JobId, now_ms: u64) -> Option<Bill> {
        let state = self.state.jobs.get(&job)?;
        let spent = match state.phase {
            state::Phase::Running | state::Phase::Stopping { .. } => self.spent(job, state),
            _ => Spent::default(),
        };
        Some(state.receipt.bill(now_ms, &state.phase, &spent))
    }

    pub fn step(&mut self, now_ms: u64, event: Event) -> Step {
        // Whatever is added to a time stays a number that can be written down.
        let now_ms = now_ms.min(TIME_MS_MAX);
        let mut work = Work::default();
        self.wake(now_ms);
        match event {
            Event::Started => self.start(now_ms, &mut work),
            Event::Tick => self.watch(now_ms, &mut work),
            Event::Message(ToController::Join { name, boot, about, price }) => {
                self.join(now_ms, name, boot, (about, price), &mut work)
            }
            Event::Message(ToController::Report(report)) => self.hear(now_ms, report, &mut work),
            Event::Closed { worker } => {
                if let Some(seen) = self.seen.get_mut(&worker) {
                    seen.closed = true;
                }
            }
            Event::Planned { job, request, answer } => self.planned(now_ms, job, request, answer, &mut work),
            Event::Submit { job, spec } => {
                if !self.state.jobs.contains_key(&job) && spec.check().is_ok() {
                    self.note(now_ms, Record::Submitted { job, at_ms: now_ms, spec }, &mut work);
                }
            }
            Event::Wish { job, wish } => self.wish(now_ms, job, wish, &mut work),
        }
        while work.step.misfit.is_none()
            && let Some(record) = self.next(now_ms, &work.scope)
        {
            self.note(now_ms, record, &mut work);
        }
        self.tell(&mut work);
        work.step
    }

    /// One who was frozen has heard nobody, which says nothing about them.
    fn wake(&mut self, now_ms: u64) {
        if now_ms > self.now_ms.saturating_add(2 * self.settings.report_every_ms) {
            self.seen.values_mut().for_each(|seen| seen.heard_ms = now_ms);
        }
        self.now_ms = now_ms;
    }

    /// Nobody knows when workers were last heard of, so each gets a whole deadline.
    fn start(&mut self, now_ms: u64, work: &mut Work) {
        for worker in self.state.members.keys() {
            let seen = Seen { heard_ms: now_ms, told: self.state.revision, ..Seen::default() };
            self.seen.insert(*worker, seen);
        }
        // Nor who had vanished.
        let until_ms = now_ms.saturating_add(self.settings.deadline_ms);
        self.fences.extend(self.state.jobs.keys().map(|job| (*job, until_ms)));
        work.saved.extend(self.state.jobs.keys());
        if self.bug == Some(Bug::ForgetPlanner) {
            return;
        }
        for (job, state) in &self.state.jobs {
            work.step.actions.extend(plan_action(*job, state));
        }
    }

    /// Who has been silent for too long, and who may be used again.
    fn watch(&mut self, now_ms: u64, work: &mut Work) {
        let deadline_ms = match self.bug {
            Some(Bug::DeadTooSoon) => self.settings.report_every_ms * 2,
            _ => self.settings.deadline_ms,
        };
        let silent = |seen: &Seen| now_ms >= seen.heard_ms.saturating_add(deadline_ms);
        let lost: Vec<WorkerId> =
            self.seen.iter().filter(|(_, seen)| silent(seen)).map(|(worker, _)| *worker).collect();
        for worker in lost {
            self.note(now_ms, Record::Lost { worker, how: Loss::Silent, at_ms: now_ms }, work);
        }
        let over = |until: Option<u64>| until.is_some_and(|until| now_ms >= until);
        let members = self.state.members.iter().filter(|(_, member)| over(member.quarantined_until_ms));
        let cleared: Vec<WorkerId> = members.map(|(worker, _)| *worker).collect();
        for worker in cleared {
            self.note(now_ms, Record::Cleared { worker }, work);
        }
    }

    fn join(
        &mut self,
        now_ms: u64,
        name: String,
        boot: u64,
        (about, price): (String, Price),
        work: &mut Work,
    ) {
        let known = self.state.names.get(&name).copied();
        let worker = match known {
            // A message from before: its sender has begun anew since.
            Some((last, _)) if boot < last => return,
            Some((last, worker)) if boot == last => worker,
            other => {
                if let Some((_, worker)) = other.filter(|(_, worker)| self.state.is_alive(*worker)) {
                    self.note(now_ms, Record::Lost { worker, how: Loss::Replaced, at_ms: now_ms }, work);
                }
                let worker = WorkerId(self.state.worker + 1);
                let price = Price(price.0.min(PRICE_MAX.0));
                let record = Record::Joined { worker, name: name.clone(), boot, about, price, at_ms: now_ms };
                self.note(now_ms, record, work);
                worker
            }
        };
        let message = match self.state.is_alive(worker) {
            true => ToWorker::Welcome { name: name.clone(), boot, worker },
            false => ToWorker::Late { name: name.clone(), boot },
        };
        work.step.actions.push(Action::Answer { name, message });
    }

    /// Takes a report in, and answers it. Unless it leads to records, only the jobs that it says something new of matter.
    fn hear(&mut self, now_ms: u64, report: Report, work: &mut Work) {
        work.scope = Scope::Jobs(BTreeSet::new());
        let Report { worker, number, revision, leaving_in_ms, jobs } = report;
        let Some(member) = self.state.members.get(&worker) else {
            let message = ToWorker::Gone { worker };
            work.step.actions.push(Action::Send { to: worker, message });
            return;
        };
        if !self.is_credible(&jobs) {
            return;
        }
        let leaves = leaving_in_ms.filter(|_| member.leaves_by_ms.is_none());
        let seen = self.seen.entry(worker).or_default();
        if number <= seen.number {
            if self.bug == Some(Bug::CountAgain) {
                self.count_again(now_ms, &jobs, work);
            }
            return;
        }
        (seen.heard_ms, seen.number, seen.closed) = (now_ms, number, false);
        if seen.jobs != jobs {
            let old = std::mem::replace(&mut seen.jobs, jobs);
            let is_new = |(id, status): &(&JobId, &Status)| old.get(id) != Some(*status);
            let told = seen.jobs.iter().filter(is_new).map(|(id, _)| *id);
            let silent = old.keys().copied().filter(|id| !seen.jobs.contains_key(id));
            work.scope = Scope::Jobs(told.chain(silent).collect());
            self.judge_pace(now_ms, worker, work);
        }
        if let Some(in_ms) = leaves {
            let by_ms = now_ms + in_ms.min(NOTICE_MS_MAX);
            self.note(now_ms, Record::Leaving { worker, by_ms }, work);
        }
        if self.seen.get(&worker).is_some_and(|seen| revision < seen.told) {
            work.touched.insert(worker);
        } else {
            let orders = Orders { worker, acknowledged: number, revision: self.state.revision, jobs: None };
            work.step.actions.push(Action::Send { to: worker, message: ToWorker::Orders(orders) });
        }
    }

    /// Whether a report can be true. One that cannot is not heard, so that whoever keeps saying such things falls silent, and
    /// is taken for dead.
    fn is_credible(&self, jobs: &BTreeMap<JobId, Status>) -> bool {
        jobs.iter().all(|(id, status)| {
            let (Some(job), Some(part)) = (self.state.jobs.get(id), status.part) else { return true };
            let closed = part
                .standing
                .closing
                .is_none_or(|closing| closing.step <= part.standing.step && closing.step < job.spec.steps);
            closed && part.standing.step <= job.spec.steps
        })
    }

    fn count_again(&mut self, now_ms: u64, jobs: &BTreeMap<JobId, Status>, work: &mut Work) {
        for (job, status) in jobs {
            let Some(state) = self.state.jobs.get(job) else { continue };
            let counted = |part: &crate::message::Part| {
                part.epoch == state.epoch && part.standing.reaches() == state.committed
            };
            if matches!(state.phase, state::Phase::Running) && status.part.as_ref().is_some_and(counted) {
                let change = Change::Committed { step: state.committed + 1, closing: None };
                self.note(now_ms, Record::Job { job: *job, at_ms: now_ms, change }, work);
            }
        }
    }

    /// A device whose own work takes another time than what is known of it, in several steps one after the other.
    fn judge_pace(&mut self, now_ms: u64, worker: WorkerId, work: &mut Work) {
        let Some(member) = self.state.members.get(&worker) else { return };
        let known = u64::from(member.pace_percent);
        let Some(seen) = self.seen.get_mut(&worker) else { return };
        let mut paces = seen.jobs.iter().filter_map(|(job, status)| Some((*job, status.part?.pace?)));
        let Some((job, (step, percent))) = paces.next_back() else { return };
        if seen.paced == Some((job, step)) {
            return;
        }
        seen.paced = Some((job, step));
        let percent = percent.max(1);
        let (measured, factor) = (u64::from(percent), u64::from(self.settings.slow_percent));
        let is_slower = measured * 100 >= known * factor;
        let is_off = is_slower || known * 100 >= measured * factor;
        let off = is_off.then_some(Off { steps: 1, since_ms: now_ms, is_slower, percent });
        seen.off = off.map(|off| seen.off.map_or(off, |before| before.with(off)));
        let Settings { slow_steps, slow_ms, .. } = self.settings;
        let is_certain = |off: &Off| {
            // Twice what is known is no shared core's doing for a moment; one that is faster loses nothing by waiting.
            let is_far = u64::from(off.percent) >= 2 * known;
            let lasts = now_ms.saturating_sub(off.since_ms) >= slow_ms;
            off.steps >= slow_steps && (lasts || is_far)
        };
        if let Some(off) = seen.off.filter(is_certain) {
            seen.off = None;
            self.note(now_ms, Record::Paced { worker, percent: off.percent }, work);
        }
    }

    fn wish(&mut self, now_ms: u64, job: JobId, wish: Wish, work: &mut Work) {
        let Some(state) = self.state.jobs.get(&job) else { return };
        let is_news = state.wish != wish || wish == Wish::Run && state.has_failed();
        if state.is_open() && is_news && state.wish != Wish::Cancel {
            self.note(now_ms, Record::Job { job, at_ms: now_ms, change: Change::Wished { wish } }, work);
        }
    }

    /// Writes a record down, and what follows from it.
    fn note(&mut self, now_ms: u64, record: Record, work: &mut Work) {
        let involved = |state: &State| {
            let job = record.job().and_then(|job| state.jobs.get(&job));
            job.map(Job::involved).unwrap_or_default()
        };
        let tells = match &record {
            Record::Job { change, .. } => !matches!(
                change,
                Change::Committed { .. }
                    | Change::Asked { .. }
                    | Change::Refused { .. }
                    | Change::Declined { .. }
            ),
            _ => false,
        };
        if tells {
            work.touched.append(&mut involved(&self.state));
        }
        let commits = matches!(record, Record::Job { change: Change::Committed { .. }, .. });
        if !commits {
            self.shares = None;
            work.scope = Scope::All;
        }
        self.blame(&record);
        self.fence(&record);
        if let Err(misfit) = self.state.apply(&record) {
            work.step.misfit = Some(misfit);
            return;
        }
        if tells {
            work.touched.append(&mut involved(&self.state));
        }
        match &record {
            Record::Joined { worker, .. } => {
                let seen = Seen { heard_ms: now_ms, ..Seen::default() };
                self.seen.insert(*worker, seen);
                self.newcomer = Some((*worker, now_ms));
            }
            Record::Lost { worker, .. } => {
                let seen = self.seen.remove(worker);
                self.remember_departed(seen.map(|seen| seen.jobs).unwrap_or_default());
                let message = ToWorker::Gone { worker: *worker };
                work.step.actions.push(Action::Send { to: *worker, message });
            }
            Record::Job { job, change, .. } => self.follow(now_ms, *job, change, work),
            _ => {}
        }
        work.step.records.push(record);
    }

    /// A worker that is not waited for to be silent for long may still be running.
    fn fence(&mut self, record: &Record) {
        let Record::Lost { worker, how: Loss::Vanished, .. } = record else { return };
        let Some(seen) = self.seen.get(worker) else { return };
        let until_ms = seen.heard_ms.saturating_add(self.settings.deadline_ms);
        let jobs = self.state.jobs.iter().filter(|(_, job)| job.involved().contains(worker));
        for (job, _) in jobs {
            let fence = self.fences.entry(*job).or_default();
            *fence = until_ms.max(*fence);
        }
    }

    fn follow(&mut self, now_ms: u64, id: JobId, change: &Change, work: &mut Work) {
        let Some(job) = self.state.jobs.get(&id) else { return };
        match change {
            Change::Asked { .. } => work.step.actions.extend(plan_action(id, job)),
            Change::Stopping { .. } => {
                self.stopping_ms.insert(id, now_ms);
                work.saved.insert(id);
            }
            Change::SaveBegun { .. } if self.bug == Some(Bug::RemoveEarly) => {
                let keeping = Keeping { ids: vec![job.checkpoint], given_out: job.checkpoint };
                work.step.actions.push(Action::KeepCheckpoints { job: id, keeping });
            }
            Change::Decided { .. } => drop(self.departed.remove(&id)),
            Change::Started => drop(self.fences.remove(&id)),
            Change::Restored { .. } => {
                self.departed.remove(&id);
                work.saved.insert(id);
            }
            Change::SaveDropped | Change::SaveCompleted { .. } | Change::Rested { .. } => {
                work.saved.insert(id);
            }
            _ => {}
        }
    }

    fn remember_departed(&mut self, jobs: BTreeMap<JobId, Status>) {
        for (id, status) in jobs {
            let base = self.state.jobs.get(&id).map(|job| &job.base);
            if let (Some(part), Some(state::Base::Held { epoch, .. })) = (status.part, base)
                && part.epoch == *epoch
            {
                self.departed.entry(id).or_default().add(&part.spent);
            }
        }
    }

    /// What goes out at the end: orders to those whose orders changed, and which checkpoints count.
    fn tell(&mut self, work: &mut Work) {
        for worker in std::mem::take(&mut work.touched) {
            let Some(seen) = self.seen.get_mut(&worker) else { continue };
            seen.told = self.state.revision;
            let jobs = Some(orders::orders(&self.state, worker));
            let orders = Orders { worker, acknowledged: seen.number, revision: self.state.revision, jobs };
            work.step.actions.push(Action::Send { to: worker, message: ToWorker::Orders(orders) });
        }
        for job in &work.saved {
            let Some(state) = self.state.jobs.get(job) else { continue };
            let mut ids = state.kept();
            if self.bug == Some(Bug::RemoveUnreadable) {
                ids.retain(|id| !state.unreadable.iter().any(|checkpoint| checkpoint.id == *id));
            }
            let given_out = if self.bug == Some(Bug::RemoveLate) { u64::MAX } else { state.checkpoint };
            let keeping = Keeping { ids, given_out };
            work.step.actions.push(Action::KeepCheckpoints { job: *job, keeping });
        }
    }
}

fn plan_action(id: JobId, job: &Job) -> Option<Action> {
    let workers = job.asked.clone()?;
    Some(Action::Plan { job: id, request: job.request, workers, held: job.held().cloned() })
}
