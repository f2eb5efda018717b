//! The queue of events, the processes, their clocks and the network between them. Everything happens one after the other,
//! in the order of the drill's clock; what comes next depends on the seed alone.

mod trouble;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use shoal_control::controller::record::{Change, Paced, Record};
use shoal_control::controller::state::{Interval, Phase, Rest};
use shoal_control::controller::{self, Action, Keeping, Proposal};
use shoal_control::log::LogError;
use shoal_control::message::{Epoch, JobId, Plan, Price, ToController, ToWorker, WorkerId};
use shoal_control::worker::{self, EngineCommand, EngineEvent};
use shoal_control::{Bug, Keeper, Settings, Worker};

use crate::checks::Checks;
use crate::coverage::Coverage;
use crate::disk::TornDisk;
use crate::engine::{Around, JobEngine, Out, Peer, Timer};
use crate::faults::{self, FAULTS_END_MS, Fault, Weather};
use crate::random::Random;
use crate::store::Store;
use crate::toy;
use crate::{Failure, Report};

/// After the faults, every job is done within this.
const PROGRESS_MS: u64 = 60_000;
const TICK_MS: u64 = 50;
/// Small, so that logs begin anew within a drill.
const LOG_BYTES_MAX: u64 = 20_000;

/// A process: the controller, or a worker by its number.
pub type Party = Option<usize>;

pub enum Happening {
    ToController(ToController),
    ToWorker {
        node: usize,
        message: ToWorker,
    },
    /// The controller sees a worker's connection end.
    Closed {
        worker: WorkerId,
    },
    /// A worker sees another's end.
    PeerClosed {
        node: usize,
        worker: WorkerId,
    },
    Peer {
        from: usize,
        node: usize,
        peer: Peer,
    },
    Planned {
        life: u64,
        job: JobId,
        request: u64,
        answer: Result<Proposal, String>,
    },
    Keep {
        life: u64,
        job: JobId,
        keeping: Keeping,
    },
    Timer {
        node: usize,
        life: u64,
        job: JobId,
        epoch: Epoch,
        timer: Timer,
    },
    Tick {
        party: Party,
        life: u64,
    },
    Start {
        party: Party,
    },
    /// The end of a preemption notice.
    Taken {
        node: usize,
        life: u64,
        back_ms: u64,
    },
    Fault(Fault),
    /// Checkpoints that were away are there again.
    Mend,
    Heal,
}

/// A machine's clock: where it began, and how fast it goes.
struct Clock {
    offset_ms: u64,
    rate_permille: u64,
}

impl Clock {
    fn at(&self, now_ms: u64) -> u64 {
        self.offset_ms + now_ms * self.rate_permille / 1_000
    }
}

pub struct Node {
    pub worker: Option<Worker>,
    pub engines: BTreeMap<JobId, JobEngine>,
    clock: Clock,
    pace_percent: u32,
    frozen_until_ms: u64,
    cramped_until_ms: u64,
    broken_until_ms: u64,
    /// Counts its processes.
    life: u64,
}

impl Node {
    /// Whether it may run anything now, by its own clock.
    pub fn may_run(&self, now_ms: u64) -> bool {
        self.worker.as_ref().is_some_and(|worker| worker.may_run(self.clock.at(now_ms)))
    }
}

pub struct World<'a> {
    seed: u64,
    bug: Option<Bug>,
    settings: Settings,
    random: Random,
    pub now_ms: u64,
    events: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    waiting: BTreeMap<u64, Happening>,
    placed: u64,
    pub keeper: Option<Keeper<TornDisk>>,
    /// While the controller is not there.
    disk: Option<TornDisk>,
    controller_clock: Clock,
    controller_frozen_until_ms: u64,
    controller_life: u64,
    controller_down_ms: u64,
    pub nodes: Vec<Node>,
    pub store: Store,
    /// Which process has which number.
    addresses: BTreeMap<WorkerId, usize>,
    cuts: BTreeMap<(Party, Party), u64>,
    weather: Weather,
    pub coverage: Coverage,
    checks: Checks,
    wrong: Option<(&'static str, String)>,
    tell: Option<&'a mut dyn FnMut(&str)>,
}

impl<'a> World<'a> {
    pub fn new(seed: u64, bug: Option<Bug>, tell: Option<&'a mut dyn FnMut(&str)>) -> World<'a> {
        let settings =
            Settings { quarantine_ms: 2_000, grace_ms: 1_200, save_every_ms_min: 500, ..Settings::default() };
        let settings = settings.check().expect("the drill's settings fence");
        let mut random = Random::new(seed);
        let course = faults::draw(&mut random);
        let mut clock =
            || Clock { offset_ms: random.below(1_000_000), rate_permille: random.between(990, 1_010) };
        let controller_clock = clock();
        let node = |clock| Node {
            worker: None,
            engines: BTreeMap::new(),
            clock,
            pace_percent: 100,
            frozen_until_ms: 0,
            cramped_until_ms: 0,
            broken_until_ms: 0,
            life: 0,
        };
        let nodes = (0..course.nodes).map(|_| node(clock())).collect();
        let mut world = World {
            seed,
            bug,
            settings,
            random,
            now_ms: 0,
            events: 0,
            queue: BinaryHeap::new(),
            waiting: BTreeMap::new(),
            placed: 0,
            keeper: None,
            disk: Some(TornDisk::default()),
            controller_clock,
            controller_frozen_until_ms: 0,
            controller_life: 0,
            controller_down_ms: 0,
            nodes,
            store: Store::default(),
            addresses: BTreeMap::new(),
            cuts: BTreeMap::new(),
            weather: course.weather,
            coverage: Coverage::default(),
            checks: Checks::default(),
            wrong: None,
            tell,
        };
        world.place(0, Happening::Start { party: None });
        for (at_ms, fault) in course.faults {
            world.place(at_ms, Happening::Fault(fault));
        }
        world.place(FAULTS_END_MS, Happening::Heal);
        world
    }

    pub fn run(mut self) -> Result<Report, Failure> {
        while let Some(Reverse((at_ms, place))) = self.queue.pop() {
            let happening = self.waiting.remove(&place).expect("what is queued is there");
            self.now_ms = at_ms;
            self.events += 1;
            self.happen(happening);
            let mut checks = std::mem::take(&mut self.checks);
            let broken = checks.after(&self);
            self.checks = checks;
            if let Some((rule, seen)) = self.wrong.take().or(broken) {
                return Err(self.failure(rule, seen));
            }
            if self.now_ms > FAULTS_END_MS && self.is_done() {
                break;
            }
            if self.now_ms > FAULTS_END_MS + PROGRESS_MS {
                let jobs =
                    self.keeper.as_ref().map(|keeper| keeper.state().jobs.values().collect::<Vec<_>>());
                let seen = format!("not done {PROGRESS_MS} ms after the last fault: {jobs:?}");
                return Err(self.failure("progress", seen));
            }
        }
        match self.checks.at_the_end(&self) {
            Some((rule, seen)) => Err(self.failure(rule, seen)),
            None => {
                let World { seed, events, now_ms: ended_ms, coverage, .. } = self;
                Ok(Report { seed, events, ended_ms, coverage })
            }
        }
    }

    fn failure(&self, rule: &'static str, seen: String) -> Failure {
        Failure { seed: self.seed, bug: self.bug, at_ms: self.now_ms, rule, seen }
    }

    fn is_done(&self) -> bool {
        let Some(keeper) = &self.keeper else { return false };
        keeper.state().jobs.iter().all(|(id, job)| match &job.phase {
            Phase::Resting(Rest::Done | Rest::Cancelled) => true,
            Phase::Resting(Rest::Failed) => {
                let dead_end = toy::dead_end(job.spec.steps).map(toy::dead_end_reason);
                let lost = || job.kept().iter().all(|kept| self.store.is_lost(*id, *kept));
                job.failure == dead_end || lost()
            }
            _ => false,
        })
    }

    fn place(&mut self, at_ms: u64, happening: Happening) {
        self.placed += 1;
        self.queue.push(Reverse((at_ms.max(self.now_ms), self.placed)));
        self.waiting.insert(self.placed, happening);
    }

    fn say(&mut self, sentence: impl FnOnce() -> String) {
        if let Some(tell) = &mut self.tell {
            tell(&format!("{:>6} ms  {}", self.now_ms, sentence()));
        }
    }

    fn happen(&mut self, happening: Happening) {
        // Whatever comes to a frozen process waits until it goes on.
        let thaws_ms = match &happening {
            Happening::ToController(_)
            | Happening::Closed { .. }
            | Happening::Planned { .. }
            | Happening::Tick { party: None, .. } => self.controller_frozen_until_ms,
            Happening::ToWorker { node, .. }
            | Happening::PeerClosed { node, .. }
            | Happening::Peer { node, .. }
            | Happening::Timer { node, .. }
            | Happening::Tick { party: Some(node), .. } => self.nodes[*node].frozen_until_ms,
            _ => 0,
        };
        if thaws_ms > self.now_ms {
            self.place(thaws_ms, happening);
            return;
        }
        match happening {
            Happening::ToController(message) => self.controller(controller::Event::Message(message)),
            Happening::ToWorker { node, message } => self.worker(node, worker::Event::Message(message)),
            Happening::Closed { worker } => self.controller(controller::Event::Closed { worker }),
            Happening::PeerClosed { node, worker } => {
                let jobs: Vec<JobId> = self.nodes[node].engines.keys().copied().collect();
                for job in jobs {
                    self.engine(node, job, |engine, around| engine.lose(worker, around));
                }
            }
            Happening::Peer { from, node, peer } => {
                if !self.is_cut(Some(from), Some(node)) {
                    self.engine(node, peer.job, |engine, around| engine.hear(peer, around));
                }
            }
            Happening::Planned { life, job, request, answer } => {
                if life == self.controller_life {
                    self.controller(controller::Event::Planned { job, request, answer });
                }
            }
            Happening::Keep { life, job, keeping } => {
                if life == self.controller_life {
                    self.store.keep(job, &keeping);
                }
            }
            Happening::Timer { node, life, job, epoch, timer } => {
                if self.nodes[node].life == life && self.nodes[node].worker.is_some() {
                    self.worker(node, worker::Event::Tick);
                    self.engine(node, job, |engine, around| engine.timer(epoch, timer, around));
                }
            }
            Happening::Tick { party: None, life } => {
                if self.keeper.is_some() && life == self.controller_life {
                    self.place(self.now_ms + TICK_MS, Happening::Tick { party: None, life });
                    self.controller(controller::Event::Tick);
                }
            }
            Happening::Tick { party: Some(node), life } => {
                if self.nodes[node].worker.is_some() && self.nodes[node].life == life {
                    self.place(self.now_ms + TICK_MS, Happening::Tick { party: Some(node), life });
                    self.worker(node, worker::Event::Tick);
                }
            }
            Happening::Start { party: None } => self.start_controller(),
            Happening::Start { party: Some(node) } => self.start_worker(node),
            Happening::Taken { node, life, back_ms } => {
                if self.nodes[node].life == life {
                    self.kill(node, back_ms);
                }
            }
            Happening::Fault(fault) => self.fault(fault),
            Happening::Mend => self.store.mend(),
            Happening::Heal => self.heal(),
        }
    }

    fn start_controller(&mut self) {
        let Some(disk) = self.disk.take() else { return };
        self.controller_life += 1;
        let now_ms = self.controller_clock.at(self.now_ms);
        match Keeper::open_with(self.settings, disk, now_ms, LOG_BYTES_MAX, self.bug) {
            Ok((keeper, step, opened)) => {
                self.say(|| format!("the controller starts: {opened:?}"));
                if opened.cut_bytes > 0 {
                    self.coverage.count("log: torn");
                }
                if let Some(broken) = self.checks.restarted(keeper.state(), step.records.len() as u64) {
                    self.wrong = Some(broken);
                }
                self.keeper = Some(keeper);
                let life = self.controller_life;
                self.place(self.now_ms + TICK_MS, Happening::Tick { party: None, life });
                self.act(step);
            }
            Err(error) => self.wrong = Some(("nothing said that can be forgotten", error.to_string())),
        }
    }

    fn kill_controller(&mut self, for_ms: u64) {
        let Some(keeper) = self.keeper.take() else { return };
        self.checks.died(keeper.state());
        let mut disk = keeper.into_disk();
        disk.lose_power(&mut self.random);
        self.disk = Some(disk);
        self.controller_frozen_until_ms = 0;
        self.place(self.now_ms + for_ms.max(1), Happening::Start { party: None });
    }

    fn controller(&mut self, event: controller::Event) {
        let Some(keeper) = &mut self.keeper else { return };
        let now_ms = self.controller_clock.at(self.now_ms);
        let log_bytes = keeper.log_bytes();
        match keeper.step(now_ms, event) {
            Ok(step) => {
                if keeper.log_bytes() < log_bytes {
                    self.coverage.count("log: begun anew");
                }
                self.act(step);
            }
            Err(error @ LogError::Undecided(_)) => {
                self.wrong = Some(("every record fits", error.to_string()))
            }
            Err(error) => {
                self.say(|| format!("the controller dies: {error}"));
                self.coverage.count("fault: controller killed while writing");
                self.kill_controller(self.controller_down_ms);
            }
        }
    }

    /// Takes the controller's actions.
    fn act(&mut self, step: controller::Step) {
        for record in &step.records {
            self.checks.ledger.record(record);
            let jobs = self.keeper.as_ref().map(|keeper| &keeper.state().jobs);
            let job = record.job().and_then(|job| jobs?.get(&job));
            self.coverage.record(record, job.is_some_and(|job| !job.checkpoints.is_empty()));
            if job.is_some_and(|job| !job.unreadable.is_empty()) {
                self.coverage.count("save: passed over");
            }
            if matches!(record, Record::Job { change: Change::SaveBegun { .. }, .. })
                && job.is_some_and(|job| job.spec.checkpoint_every == Interval::Auto)
            {
                self.coverage.count("save: interval chosen");
            }
            if let (Record::Job { job, change: Change::Restored { .. }, .. }, Some(keeper)) =
                (record, &self.keeper)
            {
                self.wrong = self.wrong.take().or_else(|| self.checks.restored(*job, keeper.state()));
            }
            if let Some(keeper) = &self.keeper {
                let broken = self.checks.dead_end(record, keeper.state());
                self.wrong = self.wrong.take().or(broken);
            }
            self.say(|| format!("{record:?}"));
        }
        for action in step.actions {
            match action {
                Action::Send { to, message } => {
                    if let Some(node) = self.addresses.get(&to).copied() {
                        self.tell_worker(node, message);
                    }
                }
                Action::Answer { name, message } => {
                    let node: usize = name.parse().expect("workers are named by their numbers");
                    if let ToWorker::Welcome { worker, .. } = &message {
                        self.addresses.insert(*worker, node);
                    }
                    self.tell_worker(node, message);
                }
                Action::Plan { job, request, workers, held } => {
                    self.plan(job, request, &workers, held.as_ref())
                }
                Action::KeepCheckpoints { job, keeping } => {
                    // Those who remove have other things to do.
                    let at_ms = self.now_ms + self.random.below(600);
                    self.place(at_ms, Happening::Keep { life: self.controller_life, job, keeping });
                }
            }
        }
    }

    fn plan(&mut self, job: JobId, request: u64, workers: &[Paced], held: Option<&Plan>) {
        let answer = toy::plan(job, workers, held, request);
        let at_ms = self.now_ms + self.random.between(5, 150);
        self.place(at_ms, Happening::Planned { life: self.controller_life, job, request, answer });
    }

    fn tell_worker(&mut self, node: usize, message: ToWorker) {
        if let ToWorker::Orders(orders) = &message {
            self.checks.told(orders.revision);
        }
        for at_ms in self.arrivals(None, Some(node)) {
            self.place(at_ms, Happening::ToWorker { node, message: message.clone() });
        }
    }

    /// When a message arrives: never, once, or twice.
    fn arrivals(&mut self, from: Party, to: Party) -> Vec<u64> {
        let Weather { lost, doubled, late } = self.weather;
        if self.is_cut(from, to) {
            return Vec::new();
        }
        if self.random.chance(lost) {
            self.coverage.count("fault: message lost");
            return Vec::new();
        }
        let mut arrivals = vec![self.now_ms + self.random.between(1, 12)];
        if self.random.chance(doubled) {
            self.coverage.count("fault: message doubled");
            arrivals.push(self.now_ms + self.random.between(1, 800));
        }
        if self.random.chance(late) {
            self.coverage.count("fault: message late");
            arrivals[0] += self.random.below(2_500);
        }
        arrivals
    }

    fn is_cut(&self, from: Party, to: Party) -> bool {
        self.cuts.get(&(from, to)).is_some_and(|until_ms| *until_ms > self.now_ms)
    }

    fn start_worker(&mut self, node: usize) {
        let (seed_boot, bug, settings) = (self.now_ms * 1_000 + 1, self.bug, self.settings);
        let process = &mut self.nodes[node];
        if process.worker.is_some() {
            return;
        }
        process.life += 1;
        process.frozen_until_ms = 0;
        let price = Price(3_600 * (node as u64 + 1));
        let mut worker = Worker::new(settings, &node.to_string(), "", seed_boot).priced(price);
        worker.plant(bug);
        process.worker = Some(worker);
        let life = process.life;
        self.say(|| format!("worker {node} starts"));
        self.place(self.now_ms, Happening::Tick { party: Some(node), life });
    }

    fn kill(&mut self, node: usize, for_ms: u64) {
        let process = &mut self.nodes[node];
        process.worker = None;
        process.engines.clear();
        process.frozen_until_ms = 0;
        self.place(self.now_ms + for_ms.max(1), Happening::Start { party: Some(node) });
    }

    fn worker(&mut self, node: usize, event: worker::Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let process = &mut self.nodes[node];
            let Some(worker) = &mut process.worker else { return };
            let now_ms = process.clock.at(self.now_ms);
            let alone = !worker.may_run(now_ms);
            let known = worker.id().is_some();
            let actions = worker.step(now_ms, event);
            if known && worker.id().is_none() {
                self.coverage.count("worker: begins anew");
            }
            for action in actions {
                match action {
                    worker::Action::Send(message) => {
                        for at_ms in self.arrivals(Some(node), None) {
                            self.place(at_ms, Happening::ToController(message.clone()));
                        }
                    }
                    worker::Action::Engine { job, command } => {
                        match &command {
                            EngineCommand::Halt { after: None, .. } if alone => {
                                self.coverage.count("worker: lease over");
                            }
                            EngineCommand::Settle { .. } => self.coverage.count("settle: some roll forward"),
                            _ => {}
                        }
                        self.say(|| format!("worker {node}: {job:?} {command:?}"));
                        events.extend(
                            self.engine_outs(node, job, |engine, around| engine.command(command, around)),
                        );
                    }
                    worker::Action::Exit => {
                        let back_ms = self.random.between(50, 1_500);
                        self.kill(node, back_ms);
                        return;
                    }
                }
            }
        }
    }

    fn engine(&mut self, node: usize, job: JobId, call: impl FnOnce(&mut JobEngine, &mut Around)) {
        for event in self.engine_outs(node, job, call) {
            self.worker(node, event);
        }
    }

    /// Lets an engine work, sends what it sends, and gives what it tells its worker.
    fn engine_outs(
        &mut self,
        node: usize,
        job: JobId,
        call: impl FnOnce(&mut JobEngine, &mut Around),
    ) -> Vec<worker::Event> {
        let process = &mut self.nodes[node];
        let Some(me) = process.worker.as_ref().and_then(Worker::id) else {
            // Released: there is nothing of the job here any more.
            process.engines.remove(&job);
            return Vec::new();
        };
        let (may_run, life, pace_percent) =
            (process.may_run(self.now_ms), process.life, process.pace_percent);
        let (cramped, broken) =
            (process.cramped_until_ms > self.now_ms, process.broken_until_ms > self.now_ms);
        let engine = process.engines.entry(job).or_insert_with(|| JobEngine::new(job));
        let (bug, random, store) = (self.bug, &mut self.random, &mut self.store);
        let mut around =
            Around { me, pace_percent, may_run, cramped, broken, bug, random, store, out: Vec::new() };
        call(engine, &mut around);
        let outs = around.out;
        if self.wrong.is_none() {
            self.wrong = self.checks.slices(job, engine);
        }
        let mut events = Vec::new();
        for out in outs {
            match out {
                Out::Timer { in_ms, epoch, timer } => {
                    self.place(self.now_ms + in_ms, Happening::Timer { node, life, job, epoch, timer });
                }
                Out::Peer { to, peer } => {
                    let Some(to) = self.addresses.get(&to).copied() else { continue };
                    let in_ms = if to == node { 0 } else { self.random.between(1, 8) };
                    if !self.is_cut(Some(node), Some(to)) {
                        self.place(self.now_ms + in_ms, Happening::Peer { from: node, node: to, peer });
                    }
                }
                Out::Event(event) => {
                    self.say(|| format!("worker {node}: {job:?} {event:?}"));
                    if let EngineEvent::Moved { epoch, standing, .. } = &event {
                        self.checks.reached(job, *epoch, standing.reaches());
                    }
                    events.push(worker::Event::Engine { job, event });
                }
                Out::Begins { epoch, version } => {
                    self.wrong = self.wrong.take().or_else(|| self.checks.begins(job, epoch, version));
                }
                Out::InTheWay(sentence) => {
                    self.wrong = self.wrong.take().or(Some(("room is made", sentence)))
                }
                Out::Wrong(sentence) => self.wrong = self.wrong.take().or(Some(("one version", sentence))),
            }
        }
        events
    }
}
