//! A worker between the controller and its engine: a pure state machine. It tells the controller all that is so here, does
//! what its newest orders say, and stops by itself when its lease has run out.
//!
//! For each job it has two things, of which each may be missing: a part in the plan in force, and the state of the plan
//! that may come.
//!
//! ```text
//!                 Install                Installed
//!     next:  ∅ ───────────▶ Underway ─────────────▶ Ready ──┐ Run: becomes the part; the old one is let go
//!                               └──▶ Failed                 │ Stop, GoTo: likewise, without having run
//!                                                           ▼
//!     part:  Running ──Stop, lease over──▶ Stopping ──Halted──▶ Stopped ⇄ Settling (GoTo)
//!               └───────────────Halted: a peer failed, or done────▲
//! ```
//!
//! `Stopped` is the end of an epoch: whatever is said later, it does not run again. The old part is kept until the new plan
//! runs, because until then the controller may go back to it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};
use shoal_plan::{Closing, Standing};

use crate::bug::Bug;
use crate::message::{
    Command, Epoch, Installation, JobId, Obstacle, Order, Orders, Part, Price, Progress, Report, Save, Saved,
    Source, Spent, Stage, Status, ToController, ToWorker, WorkerId,
};
use crate::settings::Settings;

/// Reports whose sending is remembered until they are acknowledged. Older ones would give no lease any more.
const UNACKNOWLEDGED_MAX: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// Time has passed.
    Tick,
    Message(ToWorker),
    Engine {
        job: JobId,
        event: EngineEvent,
    },
    /// This machine is to go: a wish, or a preemption notice with the time that is left.
    Notice {
        in_ms: u64,
    },
}

/// What an engine says of one job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EngineEvent {
    Installed {
        epoch: Epoch,
    },
    NotInstalled {
        epoch: Epoch,
        obstacle: Obstacle,
    },
    /// Something about its standing has changed.
    Moved {
        epoch: Epoch,
        standing: Standing,
        pace: Option<(u64, u32)>,
        /// Since the epoch began to run.
        spent: Spent,
    },
    /// Nothing is under way any more: as told, at the end of the run, or because a peer failed.
    Halted {
        epoch: Epoch,
        standing: Standing,
        culprit: Option<WorkerId>,
    },
    Settled {
        epoch: Epoch,
        standing: Standing,
    },
    /// Its part of a checkpoint is on the disk, or its state is past that step.
    Saved(Saved),
    /// No worker would get further in the job, under whatever plan. Told before whatever else tells of that step.
    DeadEnd {
        epoch: Epoch,
        reason: String,
    },
}

/// What an engine is to do in one job. All are done at once or reported later, and may be told twice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EngineCommand {
    Install {
        epoch: Epoch,
        installation: Installation,
    },
    Run {
        epoch: Epoch,
        steps: u64,
    },
    /// After that step, or now.
    Halt {
        epoch: Epoch,
        after: Option<u64>,
    },
    /// Applies the step before `step` to those slices that have not seen it.
    Settle {
        epoch: Epoch,
        step: u64,
        closing: Closing,
    },
    /// When its slices are at the checkpoint's step.
    Save {
        epoch: Epoch,
        save: Save,
    },
    /// Its state of all plans but these, stopping whatever is under way there.
    KeepOnly {
        epochs: BTreeSet<Epoch>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Send(ToController),
    Engine {
        job: JobId,
        command: EngineCommand,
    },
    /// The controller has released it.
    Exit,
}

/// One job here.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Slot {
    part: Option<Part>,
    /// How far the part was told to stop: not, after a step, or now.
    halting: Option<Option<u64>>,
    next: Option<Next>,
    saving: Option<u64>,
    saved: Option<Saved>,
    dead_end: Option<(Epoch, String)>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Next {
    epoch: Epoch,
    step: u64,
    progress: Progress,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Worker {
    settings: Settings,
    name: String,
    about: String,
    price: Price,
    boot: u64,
    id: Option<WorkerId>,
    /// Of reports sent.
    number: u64,
    /// Reports that are not acknowledged, and when they were sent.
    unacknowledged: VecDeque<(u64, u64)>,
    lease_ends_ms: u64,
    revision: u64,
    leaves_at_ms: Option<u64>,
    slots: BTreeMap<JobId, Slot>,
    /// What was last said, and when.
    said: BTreeMap<JobId, Status>,
    said_ms: Option<u64>,
    #[serde(skip)]
    bug: Option<Bug>,
}

impl Worker {
    /// `about` is for planners and engines. `boot` is larger than that of every worker that has ever had the name: the time
    /// of its start will do.
    pub fn new(settings: Settings, name: &str, about: &str, boot: u64) -> Worker {
        Worker {
            settings,
            name: name.to_owned(),
            about: about.to_owned(),
            price: Price::default(),
            boot,
            id: None,
            number: 0,
            unacknowledged: VecDeque::new(),
            lease_ends_ms: 0,
            revision: 0,
            leaves_at_ms: None,
            slots: BTreeMap::new(),
            said: BTreeMap::new(),
            said_ms: None,
            bug: None,
        }
    }

    /// Says what it costs, for the receipts of the jobs that it works for.
    pub fn priced(self, price: Price) -> Worker {
        Worker { price, ..self }
    }

    /// For the drill.
    #[doc(hidden)]
    pub fn plant(&mut self, bug: Option<Bug>) {
        self.bug = bug;
    }

    pub fn id(&self) -> Option<WorkerId> {
        self.id
    }

    /// Whether anything may run here now. Engines ask before each update, since a machine that was frozen may go on in the
    /// middle of one.
    pub fn may_run(&self, now_ms: u64) -> bool {
        now_ms < self.lease_ends_ms || self.bug == Some(Bug::IgnoreLease)
    }

    /// Until when [`Worker::may_run`] holds, for engines that ask from threads of their own.
    pub fn lease_ends_ms(&self) -> u64 {
        self.lease_ends_ms
    }

    /// Takes in what happened. `now_ms` is this machine's clock, which only has to go forward, also through suspension.
    pub fn step(&mut self, now_ms: u64, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        // First of all: a machine that was frozen must not do anything on the strength of an old lease.
        self.stop_if_lapsed(now_ms, &mut actions);
        match event {
            Event::Tick => {}
            Event::Notice { in_ms } => self.leaves_at_ms = Some(now_ms.saturating_add(in_ms)),
            Event::Engine { job, event } => self.hear_engine(job, event, &mut actions),
            Event::Message(message) => self.hear(now_ms, message, &mut actions),
        }
        self.speak(now_ms, &mut actions);
        actions
    }

    fn stop_if_lapsed(&mut self, now_ms: u64, actions: &mut Vec<Action>) {
        if self.may_run(now_ms) {
            return;
        }
        for (job, slot) in &mut self.slots {
            slot.halt(*job, None, actions);
        }
    }

    fn hear(&mut self, now_ms: u64, message: ToWorker, actions: &mut Vec<Action>) {
        match message {
            ToWorker::Welcome { name, boot, worker } => {
                if self.id.is_none() && name == self.name && boot == self.boot {
                    self.id = Some(worker);
                    self.said_ms = None;
                }
            }
            ToWorker::Late { name, boot } => {
                if self.id.is_none() && name == self.name && boot == self.boot {
                    self.begin_anew(actions);
                }
            }
            ToWorker::Gone { worker } => {
                if self.id == Some(worker) {
                    self.begin_anew(actions);
                }
            }
            ToWorker::Orders(orders) => {
                if self.id == Some(orders.worker) {
                    self.obey(now_ms, orders, actions);
                }
            }
        }
    }

    /// The controller has given this life up.
    fn begin_anew(&mut self, actions: &mut Vec<Action>) {
        for job in std::mem::take(&mut self.slots).into_keys() {
            let command = EngineCommand::KeepOnly { epochs: BTreeSet::new() };
            actions.push(Action::Engine { job, command });
        }
        if self.leaves_at_ms.is_some() {
            actions.push(Action::Exit);
        }
        let boot = self.boot.saturating_add(1);
        let mut anew = Worker::new(self.settings, &self.name, &self.about, boot).priced(self.price);
        anew.leaves_at_ms = self.leaves_at_ms;
        anew.bug = self.bug;
        *self = anew;
    }

    fn obey(&mut self, now_ms: u64, orders: Orders, actions: &mut Vec<Action>) {
        let sent_ms = |number| self.unacknowledged.iter().find(|sent| sent.0 == number).map(|sent| sent.1);
        if let Some(sent_ms) = sent_ms(orders.acknowledged) {
            self.lease_ends_ms = self.lease_ends_ms.max(sent_ms.saturating_add(self.settings.lease_ms));
            self.unacknowledged.retain(|sent| sent.0 >= orders.acknowledged);
        }
        let old = orders.revision < self.revision && self.bug != Some(Bug::ObeyOld);
        let may_run = self.may_run(now_ms);
        let Some(jobs) = orders.jobs.filter(|_| !old && may_run) else { return };
        self.revision = orders.revision;
        for (job, slot) in &mut self.slots {
            if !jobs.contains_key(job) {
                slot.let_go(*job, actions);
            }
        }
        self.slots.retain(|job, _| jobs.contains_key(job));
        for (job, order) in jobs {
            self.slots.entry(job).or_default().obey(job, order, self.bug, actions);
        }
    }

    fn hear_engine(&mut self, job: JobId, event: EngineEvent, actions: &mut Vec<Action>) {
        let Some(slot) = self.slots.get_mut(&job) else { return };
        match event {
            EngineEvent::Installed { epoch } => {
                slot.progress(epoch, Progress::Ready);
                if self.bug == Some(Bug::DropEarly) {
                    let command = EngineCommand::KeepOnly { epochs: [epoch].into() };
                    actions.push(Action::Engine { job, command });
                }
            }
            EngineEvent::NotInstalled { epoch, obstacle } => slot.progress(epoch, Progress::Failed(obstacle)),
            EngineEvent::Saved(saved) => {
                slot.saved = Some(saved).filter(|saved| slot.saving == Some(saved.id));
            }
            EngineEvent::DeadEnd { epoch, reason } => {
                if slot.part.is_some_and(|part| part.epoch == epoch) {
                    slot.dead_end = Some((epoch, reason));
                }
            }
            EngineEvent::Moved { epoch, standing, pace, spent } => {
                if let Some(part) = slot.part.as_mut().filter(|part| part.epoch == epoch) {
                    (part.standing, part.spent) = (standing, spent);
                    part.pace = pace.or(part.pace);
                }
            }
            EngineEvent::Halted { epoch, standing, culprit } => {
                if let Some(part) = slot.part.as_mut().filter(|part| part.epoch == epoch) {
                    (part.stage, part.standing, part.culprit) = (Stage::Stopped, standing, culprit);
                }
            }
            EngineEvent::Settled { epoch, standing } => {
                if let Some(part) = slot.part.as_mut().filter(|part| part.epoch == epoch) {
                    (part.stage, part.standing) = (Stage::Stopped, standing);
                }
            }
        }
    }

    /// Says what is so here, if it is something new or has not been said for a while.
    fn speak(&mut self, now_ms: u64, actions: &mut Vec<Action>) {
        let due =
            self.said_ms.is_none_or(|said| now_ms >= said.saturating_add(self.settings.report_every_ms));
        let Some(worker) = self.id else {
            if due {
                let (name, about) = (self.name.clone(), self.about.clone());
                let join = ToController::Join { name, boot: self.boot, about, price: self.price };
                actions.push(Action::Send(join));
                self.said_ms = Some(now_ms);
            }
            return;
        };
        let jobs: BTreeMap<JobId, Status> =
            self.slots.iter().map(|(job, slot)| (*job, slot.status())).collect();
        if !due && jobs == self.said {
            return;
        }
        self.number += 1;
        if self.unacknowledged.len() == UNACKNOWLEDGED_MAX {
            self.unacknowledged.pop_front();
        }
        self.unacknowledged.push_back((self.number, now_ms));
        self.said.clone_from(&jobs);
        self.said_ms = Some(now_ms);
        let leaving_in_ms = self.leaves_at_ms.map(|at| at.saturating_sub(now_ms));
        let report = Report { worker, number: self.number, revision: self.revision, leaving_in_ms, jobs };
        actions.push(Action::Send(ToController::Report(report)));
    }
}

impl Slot {
    fn status(&self) -> Status {
        let next = self.next.as_ref().map(|next| (next.epoch, next.progress.clone()));
        Status { part: self.part, next, saved: self.saved, dead_end: self.dead_end.clone() }
    }

    fn progress(&mut self, epoch: Epoch, progress: Progress) {
        if let Some(next) = self.next.as_mut().filter(|next| next.epoch == epoch) {
            next.progress = progress;
        }
    }

    fn let_go(&mut self, job: JobId, actions: &mut Vec<Action>) {
        let command = EngineCommand::KeepOnly { epochs: BTreeSet::new() };
        actions.push(Action::Engine { job, command });
    }

    fn halt(&mut self, job: JobId, after: Option<u64>, actions: &mut Vec<Action>) {
        let Some(part) = &mut self.part else { return };
        let told = self.halting.is_some_and(|halting| halting.is_none() || halting == after);
        if !matches!(part.stage, Stage::Running | Stage::Stopping) || told {
            return;
        }
        part.stage = Stage::Stopping;
        self.halting = Some(after);
        let command = EngineCommand::Halt { epoch: part.epoch, after };
        actions.push(Action::Engine { job, command });
    }

    fn obey(&mut self, job: JobId, order: Order, bug: Option<Bug>, actions: &mut Vec<Action>) {
        let Order { epoch, command, save } = order;
        match command {
            Command::Install(installation) => self.install(job, epoch, installation, bug, actions),
            Command::Run { steps } => {
                let again = bug == Some(Bug::ObeyOld)
                    && self.part.is_some_and(|part| part.epoch == epoch && part.stage == Stage::Stopped);
                if self.promote(job, epoch, Stage::Running, actions) || again {
                    if let Some(part) = &mut self.part {
                        part.stage = Stage::Running;
                    }
                    actions.push(Action::Engine { job, command: EngineCommand::Run { epoch, steps } });
                }
            }
            Command::Stop { after } => {
                self.promote(job, epoch, Stage::Stopped, actions);
                if self.part.is_some_and(|part| part.epoch == epoch) {
                    self.halt(job, after, actions);
                }
            }
            Command::GoTo { step, closing } => {
                self.promote(job, epoch, Stage::Stopped, actions);
                self.go_to(job, epoch, step, closing, bug, actions);
            }
        }
        self.save(job, epoch, save, actions);
    }

    fn install(
        &mut self,
        job: JobId,
        epoch: Epoch,
        installation: Installation,
        bug: Option<Bug>,
        actions: &mut Vec<Action>,
    ) {
        let newest = self.part.map(|part| part.epoch).max(self.next.as_ref().map(|next| next.epoch));
        if newest.is_some_and(|newest| newest >= epoch) {
            return;
        }
        // What comes from storage needs nothing that is here, and may need its room.
        if !matches!(installation.source, Source::Held { .. }) && bug != Some(Bug::KeepOld) {
            (self.part, self.halting, self.dead_end) = (None, None, None);
        }
        // Of the plan that did not come, nothing is needed; of the one in force, everything.
        let epochs = self.part.iter().map(|part| part.epoch).collect();
        actions.push(Action::Engine { job, command: EngineCommand::KeepOnly { epochs } });
        self.next = Some(Next { epoch, step: installation.source.step(), progress: Progress::Underway });
        actions.push(Action::Engine { job, command: EngineCommand::Install { epoch, installation } });
    }

    /// The plan whose state is ready is in force. Says whether that is news.
    fn promote(&mut self, job: JobId, epoch: Epoch, stage: Stage, actions: &mut Vec<Action>) -> bool {
        let ready = |next: &Next| next.epoch == epoch && next.progress == Progress::Ready;
        let Some(next) = self.next.take_if(|next| ready(next)) else { return false };
        let standing = Standing::at(next.step);
        self.part = Some(Part { epoch, stage, standing, culprit: None, pace: None, spent: Spent::default() });
        (self.halting, self.dead_end) = (None, None);
        actions.push(Action::Engine { job, command: EngineCommand::KeepOnly { epochs: [epoch].into() } });
        true
    }

    fn go_to(
        &mut self,
        job: JobId,
        epoch: Epoch,
        step: u64,
        closing: Option<Closing>,
        bug: Option<Bug>,
        actions: &mut Vec<Action>,
    ) {
        let Some(part) =
            self.part.as_mut().filter(|part| part.epoch == epoch && part.stage == Stage::Stopped)
        else {
            return;
        };
        let before = step.checked_sub(1);
        let behind = before == Some(part.standing.step) || bug == Some(Bug::SettleAgain);
        if let Some(closing) = closing.filter(|closing| behind && before == Some(closing.step)) {
            part.stage = Stage::Settling;
            actions.push(Action::Engine { job, command: EngineCommand::Settle { epoch, step, closing } });
        }
        // Nothing of the plan that did not come is needed.
        if self.next.take().is_some() {
            actions.push(Action::Engine { job, command: EngineCommand::KeepOnly { epochs: [epoch].into() } });
        }
    }

    fn save(&mut self, job: JobId, epoch: Epoch, save: Option<Save>, actions: &mut Vec<Action>) {
        let id = save.as_ref().map(|save| save.checkpoint.id);
        if id == self.saving {
            return;
        }
        (self.saving, self.saved) = (id, None);
        if let Some(save) = save {
            actions.push(Action::Engine { job, command: EngineCommand::Save { epoch, save } });
        }
    }
}
