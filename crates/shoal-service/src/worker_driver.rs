//! A worker as a process: the state machine between its controller and its engine. One thread steps it; the connection, the
//! engine, preemption pollers and signals tell that thread what happens, through one channel.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use shoal_control::message::{JobId, Price, ToWorker};
use shoal_control::worker::{Action, EngineCommand, EngineEvent, Event};
use shoal_control::{Settings, Worker};

use crate::clock::{unix_ms, up_ms};
use crate::drill::{Drill, Drilled};
use crate::error::{Error, Result};
use crate::membership::Membership;
use crate::tls;
use crate::uplink::Uplink;
use crate::wire::{LINES_MAX, StepLine, Up};

/// Lines that the controller has not said it has. Older ones make room: the controller knows the loss of a step without.
const LINES_KEPT_MAX: usize = 10_000;
/// Until a line that nobody has answered is said again.
const SAY_AGAIN_MS: u64 = 2_000;

/// What a worker's thread is told.
pub enum Happening {
    Connected,
    Disconnected,
    NotConnected(Error),
    Settings(Settings),
    Heard(Box<ToWorker>),
    Kept {
        job: JobId,
        steps: Vec<u64>,
    },
    /// The fleet's owner has ordered a fault.
    Drill(Drill),
    Engine {
        job: JobId,
        event: EngineEvent,
    },
    /// What a step came to, for the job's books.
    Line {
        job: JobId,
        line: StepLine,
    },
    /// This machine is to go, and why it is thought so.
    Notice {
        in_ms: u64,
        why: String,
    },
    /// Now, whatever is under way.
    Quit,
}

/// What does the work. Commands come from the worker's thread and must not hold it up; events and lines go back through
/// the sender that its maker got.
pub trait Engine: Send {
    fn command(&mut self, job: JobId, command: EngineCommand);
}

/// Until when anything may run here. Engines ask before each update, from their own threads.
#[derive(Debug, Default)]
pub struct Lease {
    ends_ms: AtomicU64,
}

impl Lease {
    pub fn may_run(&self) -> bool {
        up_ms() < self.ends_ms.load(Ordering::Acquire)
    }
}

/// What whoever shows it is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notable {
    Connected,
    Disconnected(String),
    Leaving {
        in_ms: u64,
        why: String,
    },
    /// A drill, which begins now.
    Drilled(Drill),
    /// One that this worker was not started for.
    DrillRefused(Drill),
}

pub struct WorkerDriver {
    membership: Membership,
    /// What this worker says of itself.
    about: String,
    price: Price,
    happenings: (Sender<Happening>, Receiver<Happening>),
    lease: Arc<Lease>,
    /// What does drills here; none where they are refused.
    drilled: Option<Drilled>,
}

impl WorkerDriver {
    pub fn new(membership: Membership, about: String, price: Price) -> WorkerDriver {
        WorkerDriver { membership, about, price, happenings: channel(), lease: Arc::default(), drilled: None }
    }

    /// Allows drills; the connection to the controller is cut here, all else by `drilled`.
    pub fn drilled(self, drilled: Option<Drilled>) -> WorkerDriver {
        WorkerDriver { drilled, ..self }
    }

    /// By which engines, pollers and signals tell it what happens.
    pub fn sender(&self) -> Sender<Happening> {
        self.happenings.0.clone()
    }

    pub fn lease(&self) -> Arc<Lease> {
        self.lease.clone()
    }

    pub fn membership(&self) -> &Membership {
        &self.membership
    }

    /// Until the controller has released it after a notice, the notice's time is over, or it is told to quit.
    pub fn run(self, engine: &mut dyn Engine, show: &mut dyn FnMut(Notable)) -> Result {
        let WorkerDriver { membership, about, price, happenings: (sender, receiver), lease, drilled } = self;
        let tls = tls::member(&membership.identity)?;
        let uplink = Uplink::start(membership.target.clone(), tls, membership.name.clone(), sender)?;
        let mut duty = Duty {
            name: membership.name.clone(),
            about,
            price,
            worker: None,
            uplink,
            lease,
            drilled,
            lines: BTreeMap::new(),
            leaves: None,
            connected: false,
            ever_connected: false,
            complained: String::new(),
        };
        loop {
            let happening = match receiver.recv_timeout(duty.tick()) {
                Ok(happening) => Some(happening),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            };
            if duty.on(happening, engine, show)? {
                return Ok(());
            }
        }
    }
}

/// A worker on its thread.
struct Duty {
    name: String,
    about: String,
    price: Price,
    /// From the first connection on, which says what to live by.
    worker: Option<(Settings, Worker)>,
    uplink: Uplink,
    lease: Arc<Lease>,
    drilled: Option<Drilled>,
    /// Lines that the controller has not said it has, and when each was last sent.
    lines: BTreeMap<(JobId, u64), (StepLine, u64)>,
    leaves: Option<u64>,
    connected: bool,
    ever_connected: bool,
    complained: String,
}

impl Duty {
    fn tick(&self) -> Duration {
        let report_every_ms = self.worker.as_ref().map_or(150, |(settings, _)| settings.report_every_ms);
        Duration::from_millis((report_every_ms / 3).max(1))
    }

    /// Takes in what happened, and says whether this worker's time is over.
    fn on(
        &mut self,
        happening: Option<Happening>,
        engine: &mut dyn Engine,
        show: &mut dyn FnMut(Notable),
    ) -> Result<bool> {
        let event = match happening {
            None => Event::Tick,
            Some(Happening::Heard(message)) => Event::Message(*message),
            Some(Happening::Engine { job, event }) => Event::Engine { job, event },
            Some(Happening::Notice { in_ms, why }) => {
                // The first word counts: a machine that is to go does not get longer by being told again.
                if self.leaves.is_some() {
                    return Ok(false);
                }
                self.leaves = Some(up_ms() + in_ms);
                show(Notable::Leaving { in_ms, why });
                Event::Notice { in_ms }
            }
            Some(Happening::Quit) => return Ok(true),
            Some(other) => {
                self.on_link(other, show)?;
                Event::Tick
            }
        };
        let over = self.step(event, engine);
        Ok(over || self.leaves.is_some_and(|leaves| up_ms() >= leaves))
    }

    fn on_link(&mut self, happening: Happening, show: &mut dyn FnMut(Notable)) -> Result {
        match happening {
            Happening::Connected => {
                (self.connected, self.ever_connected) = (true, true);
                self.complained.clear();
                show(Notable::Connected);
                self.send_lines(true);
            }
            Happening::Disconnected => {
                self.connected = false;
                show(Notable::Disconnected("the connection broke".into()));
            }
            Happening::NotConnected(error) => {
                let hopeless = matches!(error, Error::Refused(_) | Error::OtherFleet { .. });
                if hopeless && !self.ever_connected {
                    return Err(error);
                }
                let what = error.to_string();
                if self.complained != what {
                    self.complained.clone_from(&what);
                    show(Notable::Disconnected(what));
                }
            }
            Happening::Settings(settings) => match &self.worker {
                Some((known, _)) if *known == settings => {}
                Some(_) => return Err(Error::NewSettings),
                None => {
                    let settings = settings.check()?;
                    let worker = Worker::new(settings, &self.name, &self.about, unix_ms());
                    let worker = worker.priced(self.price);
                    self.worker = Some((settings, worker));
                }
            },
            Happening::Kept { job, steps } => {
                steps.iter().for_each(|step| drop(self.lines.remove(&(job, *step))));
            }
            Happening::Line { job, line } => {
                self.lines.insert((job, line.step), (line, 0));
                while self.lines.len() > LINES_KEPT_MAX {
                    self.lines.pop_first();
                }
            }
            Happening::Drill(drill) => match &mut self.drilled {
                None => show(Notable::DrillRefused(drill)),
                Some(drilled) => {
                    show(Notable::Drilled(drill));
                    if let Drill::Cut { ms } = drill {
                        self.uplink.cut(Duration::from_millis(ms));
                    }
                    drilled(drill);
                }
            },
            Happening::Heard(_) | Happening::Engine { .. } | Happening::Notice { .. } | Happening::Quit => {}
        }
        Ok(())
    }

    /// Steps the machine, and says whether the controller has released it.
    fn step(&mut self, event: Event, engine: &mut dyn Engine) -> bool {
        let Some((_, worker)) = &mut self.worker else { return false };
        let actions = worker.step(up_ms(), event);
        // Before its commands: an engine that is told to run asks for the lease.
        self.lease.ends_ms.store(worker.lease_ends_ms(), Ordering::Release);
        // One who is released says no more: it would join again.
        let over = actions.contains(&Action::Exit);
        // A report must not overtake the lines of the steps that it tells of. What it says it says again.
        let speaks = self.send_lines(false) && !over;
        for action in actions {
            match action {
                Action::Send(message) => {
                    if speaks {
                        self.uplink.say(Up::Control(message));
                    }
                }
                Action::Engine { job, command } => engine.command(job, command),
                Action::Exit => {}
            }
        }
        over
    }

    /// Sends lines that are new, or that nobody has answered for a while; all of them over a new connection. Says whether
    /// none is left.
    fn send_lines(&mut self, all: bool) -> bool {
        if !self.connected {
            return false;
        }
        let now_ms = up_ms();
        let mut due: BTreeMap<JobId, Vec<StepLine>> = BTreeMap::new();
        for ((job, _), (line, sent_ms)) in &self.lines {
            if all || now_ms >= *sent_ms + SAY_AGAIN_MS {
                due.entry(*job).or_default().push(line.clone());
            }
        }
        for (job, lines) in due {
            for lines in lines.chunks(LINES_MAX) {
                if !self.uplink.say(Up::Steps { job, lines: lines.to_vec() }) {
                    return false;
                }
                for line in lines {
                    self.lines.entry((job, line.step)).and_modify(|(_, sent_ms)| *sent_ms = now_ms);
                }
            }
        }
        true
    }
}
