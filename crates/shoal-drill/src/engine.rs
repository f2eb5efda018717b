//! The toy's engine: what a real one does in one job on one worker, as far as controller and worker can tell. Gradients go
//! to all workers of the plan; whoever has all of a step's says so to all; when everyone has said so the closing sums are
//! known and the slices are updated, some sooner than others. That is the rule by which survivors can be brought to one
//! step. What travels between engines arrives or stalls, as over TCP.

use std::collections::{BTreeMap, BTreeSet};

use shoal_control::Bug;
use shoal_control::message::{Epoch, JobId, Obstacle, Plan, Save, Saved, Source, Spent, WorkerId};
use shoal_control::worker::{EngineCommand, EngineEvent};
use shoal_plan::{Closing, Standing};

use crate::random::Random;
use crate::store::{Found, Store};
use crate::toy::{self, BATCH, Samples, Slice};

/// After so long without a step done, or without state that was asked for, somebody is missing.
const STALL_MS: u64 = 700;
const HALT_MS_MAX: u64 = 80;

#[derive(Clone, Copy, Debug)]
pub struct Peer {
    pub job: JobId,
    pub from: WorkerId,
    pub epoch: Epoch,
    pub kind: PeerKind,
}

#[derive(Clone, Copy, Debug)]
pub enum PeerKind {
    Gradient { step: u64, samples: Samples },
    Have { step: u64 },
    Fetch { place: usize, step: u64, install: Epoch },
    Piece { place: usize, slice: Slice },
}

/// What keeps an engine here from installing anything.
#[derive(Clone, Copy, Debug)]
pub enum Hindrance {
    Unreadable,
    Cramped,
    Broken,
}

#[derive(Clone, Copy, Debug)]
pub enum Timer {
    Computed { step: u64 },
    Updated { step: u64, all: bool },
    Stalled { step: u64 },
    Halted,
    Settled { step: u64, closing: Closing },
    NoPiece,
    NotInstalled { obstacle: Hindrance },
    Installed,
    Written { id: u64 },
}

#[derive(Debug)]
pub enum Out {
    Peer {
        to: WorkerId,
        peer: Peer,
    },
    Timer {
        in_ms: u64,
        epoch: Epoch,
        timer: Timer,
    },
    Event(EngineEvent),
    /// An epoch starts here, with slices at this version.
    Begins {
        epoch: Epoch,
        version: u64,
    },
    /// What must not be.
    Wrong(String),
    /// State that nobody needs is in the way of what is to come.
    InTheWay(String),
}

/// What an engine's step depends on beside its state.
pub struct Around<'a> {
    pub me: WorkerId,
    pub pace_percent: u32,
    pub may_run: bool,
    /// There is room for one plan's state only.
    pub cramped: bool,
    /// Nothing can be installed here.
    pub broken: bool,
    pub bug: Option<Bug>,
    pub random: &'a mut Random,
    pub store: &'a mut Store,
    pub out: Vec<Out>,
}

/// A plan's state on one worker.
struct Share {
    plan: Plan,
    slices: BTreeMap<usize, Slice>,
    /// Slices that are still to come, and whom they were asked of.
    missing: BTreeMap<usize, WorkerId>,
    gradients: BTreeMap<u64, BTreeMap<WorkerId, Samples>>,
    haves: BTreeMap<u64, BTreeSet<WorkerId>>,
    /// The step whose gradient is here, and its samples.
    reduced: Option<(u64, Samples)>,
    closing: Option<Closing>,
}

struct Run {
    epoch: Epoch,
    steps: u64,
    after: Option<u64>,
    halting: bool,
}

pub struct JobEngine {
    job: JobId,
    shares: BTreeMap<Epoch, Share>,
    run: Option<Run>,
    installing: Option<Epoch>,
    save: Option<(Epoch, Save)>,
    /// The checkpoint that is being written, and by whom.
    writing: Option<(u64, Vec<WorkerId>)>,
    /// Steps computed here, which is nobody's business.
    position: Option<u64>,
    /// Since the epoch that runs here began.
    spent: Spent,
    /// The step that nobody gets past, if the job has one.
    dead_end: Option<u64>,
}

impl Share {
    fn version(&self) -> u64 {
        self.slices.values().map(|slice| slice.version).min().unwrap_or(0)
    }

    fn standing(&self) -> Standing {
        let step = self.version();
        let applied = self.slices.values().any(|slice| slice.version > step);
        let reduced = self.reduced.is_some_and(|(reduced, _)| reduced == step);
        Standing { step, applied, reduced, closing: self.closing }
    }
}

impl JobEngine {
    pub fn new(job: JobId) -> JobEngine {
        let shares = BTreeMap::new();
        JobEngine {
            job,
            shares,
            run: None,
            installing: None,
            save: None,
            writing: None,
            position: None,
            spent: Spent::default(),
            dead_end: None,
        }
    }

    /// The epoch that is being run here.
    pub fn running(&self) -> Option<Epoch> {
        self.run.as_ref().map(|run| run.epoch)
    }

    /// The version of the slices of a plan here, if all of them are here and at the same.
    pub fn version(&self, epoch: Epoch) -> Option<u64> {
        let share = self.shares.get(&epoch).filter(|share| share.missing.is_empty())?;
        (!share.standing().applied).then(|| share.version())
    }

    /// Whether all of a plan's state that is to be here is.
    pub fn holds(&self, epoch: Epoch) -> bool {
        self.shares.get(&epoch).is_some_and(|share| share.missing.is_empty())
    }

    /// All slices here of all plans.
    pub fn slices(&self) -> impl Iterator<Item = (usize, &Slice)> {
        self.shares.values().flat_map(|share| share.slices.iter().map(|(place, slice)| (*place, slice)))
    }

    pub fn command(&mut self, command: EngineCommand, around: &mut Around) {
        match command {
            EngineCommand::Install { epoch, installation } => {
                self.install(epoch, installation.plan, &installation.source, around)
            }
            EngineCommand::Run { epoch, steps } => {
                let Some(share) = self.shares.get(&epoch) else {
                    around.out.push(Out::Wrong(format!("{epoch:?} is to run where its state is not")));
                    return;
                };
                if share.standing().applied || !share.missing.is_empty() {
                    around.out.push(Out::Wrong(format!(
                        "{epoch:?} starts with slices of two versions, or without some"
                    )));
                }
                around.out.push(Out::Begins { epoch, version: share.version() });
                self.run = Some(Run { epoch, steps, after: None, halting: false });
                (self.spent, self.dead_end) = (Spent::default(), toy::dead_end(steps));
                self.begin_step(around);
            }
            EngineCommand::Halt { epoch, after } => {
                let Some(run) = self.run.as_mut().filter(|run| run.epoch == epoch && !run.halting) else {
                    return;
                };
                run.after = after;
                if after.is_none() {
                    run.halting = true;
                    let in_ms = around.random.between(1, HALT_MS_MAX);
                    around.out.push(Out::Timer { in_ms, epoch, timer: Timer::Halted });
                }
            }
            EngineCommand::Settle { epoch, step, closing } => {
                let (in_ms, timer) = (around.random.between(1, 40), Timer::Settled { step, closing });
                around.out.push(Out::Timer { in_ms, epoch, timer });
            }
            EngineCommand::Save { epoch, save } => {
                self.save = Some((epoch, save));
                self.save_if_there(around);
            }
            EngineCommand::KeepOnly { epochs } => {
                self.shares.retain(|epoch, _| epochs.contains(epoch));
                self.run.take_if(|run| !epochs.contains(&run.epoch));
                self.installing.take_if(|epoch| !epochs.contains(epoch));
                self.save.take_if(|(epoch, _)| !epochs.contains(epoch));
            }
        }
    }

    fn install(&mut self, epoch: Epoch, plan: Plan, source: &Source, around: &mut Around) {
        let place = plan.place(around.me).unwrap_or(usize::MAX);
        let holds = |holders: &Vec<usize>| holders.contains(&place);
        let mine: Vec<usize> = (0..plan.holders.len()).filter(|slice| holds(&plan.holders[*slice])).collect();
        let mut share = Share {
            plan,
            slices: BTreeMap::new(),
            missing: BTreeMap::new(),
            gradients: BTreeMap::new(),
            haves: BTreeMap::new(),
            reduced: None,
            closing: None,
        };
        let mut hindrance = around.broken.then_some(Hindrance::Broken);
        if around.cramped && !self.shares.is_empty() {
            hindrance = Some(Hindrance::Cramped);
            if !matches!(source, Source::Held { .. }) {
                around.out.push(Out::InTheWay(format!("{epoch:?} comes from {source:?} beside old state")));
            }
        }
        for slice in mine {
            let found = match source {
                Source::Fresh => Some(toy::fresh(self.job, slice)),
                Source::Checkpoint(checkpoint) => match around.store.read(self.job, checkpoint.id, slice) {
                    Found::Whole(found) => Some(found),
                    Found::Unreadable => {
                        hindrance = hindrance.or(Some(Hindrance::Unreadable));
                        None
                    }
                    Found::Missing => {
                        let sentence = format!("{checkpoint:?} counts but lacks part {slice}");
                        around.out.push(Out::Wrong(sentence));
                        None
                    }
                },
                Source::Held { epoch, step, .. } => {
                    let held = self.shares.get(epoch).and_then(|share| share.slices.get(&slice));
                    held.copied().filter(|slice| slice.version == *step)
                }
            };
            match (found, source) {
                (Some(found), _) => drop(share.slices.insert(slice, found)),
                (None, Source::Held { epoch: held, plan, step, alive }) => {
                    let holders = plan.holders[slice].iter().map(|place| plan.members[*place]);
                    let holders: Vec<WorkerId> = holders.filter(|holder| alive.contains(holder)).collect();
                    let Some(of) = holders.get(around.random.below(holders.len() as u64) as usize) else {
                        around
                            .out
                            .push(Out::Wrong(format!("slice {slice} is to be fetched, but nobody has it")));
                        continue;
                    };
                    share.missing.insert(slice, *of);
                    let kind = PeerKind::Fetch { place: slice, step: *step, install: epoch };
                    let peer = Peer { job: self.job, from: around.me, epoch: *held, kind };
                    around.out.push(Out::Peer { to: *of, peer });
                }
                _ => {}
            }
        }
        self.installing = Some(epoch);
        if self.position.is_none() {
            self.position = Some(source.step());
        }
        let soon_ms = around.random.between(5, 60);
        let (in_ms, timer) = match (hindrance, share.missing.is_empty()) {
            (Some(obstacle), _) => (soon_ms, Timer::NotInstalled { obstacle }),
            (None, true) => (soon_ms, Timer::Installed),
            (None, false) => (STALL_MS, Timer::NoPiece),
        };
        around.out.push(Out::Timer { in_ms, epoch, timer });
        self.shares.insert(epoch, share);
    }

    pub fn hear(&mut self, peer: Peer, around: &mut Around) {
        let Peer { from, epoch, kind, .. } = peer;
        let Some(share) = self.shares.get_mut(&epoch) else { return };
        match kind {
            PeerKind::Gradient { step, samples } => {
                share.gradients.entry(step).or_default().insert(from, samples);
                self.advance(around);
            }
            PeerKind::Have { step } => {
                share.haves.entry(step).or_default().insert(from);
                self.advance(around);
            }
            PeerKind::Fetch { place, step, install } => {
                let Some(slice) = share.slices.get(&place).filter(|slice| slice.version == step) else {
                    return;
                };
                let kind = PeerKind::Piece { place, slice: *slice };
                let peer = Peer { job: self.job, from: around.me, epoch: install, kind };
                around.out.push(Out::Peer { to: from, peer });
            }
            PeerKind::Piece { place, slice } => {
                if share.missing.remove(&place).is_some() {
                    share.slices.insert(place, slice);
                    if share.missing.is_empty() {
                        around.out.push(Out::Timer { in_ms: 1, epoch, timer: Timer::Installed });
                    }
                }
            }
        }
    }

    pub fn timer(&mut self, epoch: Epoch, timer: Timer, around: &mut Around) {
        match timer {
            Timer::Computed { step } => self.computed(epoch, step, around),
            Timer::Updated { step, all } => self.update(epoch, step, all, around),
            Timer::Stalled { step } => self.stalled(epoch, step, around),
            Timer::Halted => {
                if self.running() == Some(epoch) {
                    self.halt(None, around);
                }
            }
            Timer::Settled { step, closing } => self.settle(epoch, step, closing, around),
            Timer::NoPiece => {
                let Some(share) = self.shares.get(&epoch).filter(|_| self.installing == Some(epoch)) else {
                    return;
                };
                if let Some(culprit) = share.missing.values().next().copied() {
                    self.installing = None;
                    let obstacle = Obstacle::Peer(culprit);
                    around.out.push(Out::Event(EngineEvent::NotInstalled { epoch, obstacle }));
                }
            }
            Timer::NotInstalled { obstacle } => {
                if self.installing.take_if(|installing| *installing == epoch).is_some() {
                    let obstacle = match obstacle {
                        Hindrance::Unreadable => Obstacle::Source("the checkpoint cannot be read".to_owned()),
                        Hindrance::Cramped => Obstacle::Room,
                        Hindrance::Broken => Obstacle::Worker("nothing works here".to_owned()),
                    };
                    around.out.push(Out::Event(EngineEvent::NotInstalled { epoch, obstacle }));
                }
            }
            Timer::Installed => {
                if self.installing.take_if(|installing| *installing == epoch).is_some() {
                    around.out.push(Out::Event(EngineEvent::Installed { epoch }));
                }
            }
            Timer::Written { id } => self.written(id, around),
        }
    }

    /// The share that is being run, if anything may be done with it.
    fn active(&mut self, around: &Around) -> Option<(&mut Share, &Run)> {
        let run = self.run.as_ref().filter(|run| !run.halting && around.may_run)?;
        Some((self.shares.get_mut(&run.epoch)?, run))
    }

    fn begin_step(&mut self, around: &mut Around) {
        self.save_if_there(around);
        let Some((share, run)) = self.active(around) else { return };
        let (epoch, step) = (run.epoch, share.version());
        if step >= run.steps || run.after.is_some_and(|after| step > after) {
            self.halt(None, around);
            return;
        }
        if toy::computing(&share.plan).contains(&around.me) {
            let in_ms = toy::work_ms(&share.plan, around.pace_percent) + around.random.below(10);
            around.out.push(Out::Timer { in_ms, epoch, timer: Timer::Computed { step } });
        }
        let in_ms = STALL_MS + share.plan.step_ms * 2;
        around.out.push(Out::Timer { in_ms, epoch, timer: Timer::Stalled { step } });
        self.advance(around);
    }

    fn computed(&mut self, epoch: Epoch, step: u64, around: &mut Around) {
        let mut own = self.position;
        self.position = self.position.map(|position| position + 1);
        let (job, bug) = (self.job, around.bug);
        let Some((share, run)) = self.active(around) else { return };
        let start = match own.take().filter(|_| bug == Some(Bug::OwnPosition)) {
            Some(position) => position * BATCH,
            None => step * BATCH,
        };
        let Some(samples) = toy::share(&share.plan, around.me, start).filter(|_| run.epoch == epoch) else {
            return;
        };
        let kind = PeerKind::Gradient { step, samples };
        say_all(share, Peer { job, from: around.me, epoch, kind }, &mut around.out);
    }

    /// Takes the step under way as far as what has arrived allows.
    fn advance(&mut self, around: &mut Around) {
        let (job, me, bug, spent) = (self.job, around.me, around.bug, self.spent);
        let Some((share, run)) = self.active(around) else { return };
        let (epoch, step, partly) = (run.epoch, share.version(), share.standing().applied);
        let gradients = share.gradients.get(&step);
        let complete = |gradients: &&BTreeMap<WorkerId, Samples>| {
            toy::computing(&share.plan).iter().all(|worker| gradients.contains_key(worker))
        };
        let fresh = share.reduced.is_none_or(|(reduced, _)| reduced < step) && !partly;
        if let Some(gradients) = gradients.filter(complete).filter(|_| fresh) {
            share.reduced = Some((step, toy::together(gradients.values().copied().collect())));
            let kind = PeerKind::Have { step };
            say_all(share, Peer { job, from: me, epoch, kind }, &mut around.out);
        }
        let have = share.haves.get(&step).map_or(0, BTreeSet::len);
        let everyone = have == share.plan.members.len() || bug == Some(Bug::UpdateEarly);
        let reduced = share.reduced.is_some_and(|(reduced, _)| reduced == step);
        let open = share.closing.is_none_or(|closing| closing.step < step);
        if reduced && everyone && open {
            share.closing = Some(toy::closing(job, step));
            let (standing, spent) = (share.standing(), spent);
            around.out.push(Out::Event(EngineEvent::Moved { epoch, standing, pace: None, spent }));
            // Some update at once, others take their time.
            let slow = around.random.chance(20);
            let in_ms = around.random.between(1, if slow { 150 } else { 10 });
            around.out.push(Out::Timer { in_ms, epoch, timer: Timer::Updated { step, all: false } });
        }
    }

    /// Updates the first half of the slices, then the others.
    fn update(&mut self, epoch: Epoch, step: u64, all: bool, around: &mut Around) {
        let (pace, mut spent) = (around.pace_percent, self.spent);
        let Some((share, run)) = self.active(around) else { return };
        let Some((_, samples)) = share.reduced.filter(|(reduced, _)| *reduced == step && run.epoch == epoch)
        else {
            return;
        };
        let closing = share.closing.expect("updates are begun when it is known");
        let count = share.slices.len();
        let some = if all { count } else { count / 2 };
        share.slices.values_mut().take(some).filter(|slice| slice.version == step).for_each(|slice| {
            slice.apply(samples, closing);
        });
        if !all {
            let in_ms = around.random.between(1, 5);
            around.out.push(Out::Timer { in_ms, epoch, timer: Timer::Updated { step, all: true } });
            return;
        }
        let computes = toy::computing(&share.plan).contains(&around.me);
        let (standing, pace) = (share.standing(), computes.then_some((step, pace)));
        share.gradients.retain(|other, _| *other > step);
        share.haves.retain(|other, _| *other > step);
        if computes {
            let work_ms = toy::work_ms(&share.plan, around.pace_percent);
            spent.add(&Spent { useful_ms: work_ms, recompute_ms: work_ms / 4, bubble_ms: 3 });
        }
        if self.dead_end == Some(step) {
            self.say_dead_end(epoch, step, around);
            self.halt(None, around);
            return;
        }
        around.out.push(Out::Event(EngineEvent::Moved { epoch, standing, pace, spent }));
        self.spent = spent;
        self.begin_step(around);
    }

    fn stalled(&mut self, epoch: Epoch, step: u64, around: &mut Around) {
        let Some((share, run)) = self.active(around) else { return };
        if run.epoch != epoch || share.version() > step {
            return;
        }
        let (gradients, haves) = (share.gradients.get(&step), share.haves.get(&step));
        let silent = |worker: &&WorkerId| !gradients.is_some_and(|all| all.contains_key(worker));
        let computing = toy::computing(&share.plan);
        let unready = |worker: &&WorkerId| !haves.is_some_and(|all| all.contains(worker));
        let missing = computing.iter().find(silent).or_else(|| share.plan.members.iter().find(unready));
        let culprit = missing.copied().filter(|worker| *worker != around.me);
        self.halt(culprit, around);
    }

    /// The connection to a peer has ended.
    pub fn lose(&mut self, peer: WorkerId, around: &mut Around) {
        if self.active(around).is_some_and(|(share, _)| share.plan.place(peer).is_some()) {
            self.halt(Some(peer), around);
        }
    }

    fn halt(&mut self, culprit: Option<WorkerId>, around: &mut Around) {
        let Some(run) = self.run.take() else { return };
        if let Some(share) = self.shares.get(&run.epoch) {
            let (epoch, standing) = (run.epoch, share.standing());
            around.out.push(Out::Event(EngineEvent::Halted { epoch, standing, culprit }));
        }
    }

    fn say_dead_end(&self, epoch: Epoch, step: u64, around: &mut Around) {
        let reason = toy::dead_end_reason(step);
        around.out.push(Out::Event(EngineEvent::DeadEnd { epoch, reason }));
    }

    fn settle(&mut self, epoch: Epoch, step: u64, closing: Closing, around: &mut Around) {
        if step.checked_sub(1).is_some_and(|before| self.dead_end == Some(before)) {
            self.say_dead_end(epoch, step - 1, around);
        }
        let Some(share) = self.shares.get_mut(&epoch) else { return };
        let again = around.bug == Some(Bug::SettleAgain);
        for slice in share.slices.values_mut().filter(|slice| slice.version < step || again) {
            match share.reduced {
                Some((reduced, samples)) if reduced + 1 == step => slice.apply(samples, closing),
                _ => {
                    let sentence = format!("to go to step {step} without the gradient of the one before");
                    around.out.push(Out::Wrong(sentence));
                }
            }
        }
        share.closing = Some(closing);
        let standing = share.standing();
        around.out.push(Out::Event(EngineEvent::Settled { epoch, standing }));
    }

    /// Copies what is to be saved when it is at its step.
    fn save_if_there(&mut self, around: &mut Around) {
        let Some((epoch, save)) = &self.save else { return };
        let Some(share) = self.shares.get(epoch) else { return };
        let (id, standing) = (save.checkpoint.id, share.standing());
        if standing.step < save.checkpoint.step {
            return;
        }
        if standing.step > save.checkpoint.step || standing.applied {
            self.save = None;
            around.out.push(Out::Event(saved(id, false)));
            return;
        }
        for (part, _) in save.writers.iter().enumerate().filter(|(_, writer)| **writer == around.me) {
            match share.slices.get(&part) {
                Some(slice) => around.store.begin(self.job, id, part, *slice),
                None => around.out.push(Out::Wrong(format!("slice {part} is to be saved where it is not"))),
            }
        }
        if around.bug == Some(Bug::SavedTooSoon) {
            around.out.push(Out::Event(saved(id, true)));
        }
        let in_ms = around.random.between(10, 150);
        around.out.push(Out::Timer { in_ms, epoch: *epoch, timer: Timer::Written { id } });
        // It is written from the copy, whatever becomes of the state.
        self.writing = self.save.take().map(|(_, save)| (id, save.writers));
    }

    fn written(&mut self, id: u64, around: &mut Around) {
        let Some((_, writers)) = self.writing.take_if(|(writing, _)| *writing == id) else { return };
        for (part, _) in writers.iter().enumerate().filter(|(_, writer)| **writer == around.me) {
            around.store.end(self.job, id, part);
        }
        around.out.push(Out::Event(saved(id, true)));
    }
}

fn saved(id: u64, done: bool) -> EngineEvent {
    EngineEvent::Saved(Saved { id, done, cost_ms: 5 })
}

fn say_all(share: &Share, peer: Peer, out: &mut Vec<Out>) {
    out.extend(share.plan.members.iter().map(|to| Out::Peer { to: *to, peer }));
}
