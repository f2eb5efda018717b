//! Jobs' shares on one worker, behind the commands of its controller. `shoal-control`'s `Worker` says what is to be done
//! ([`EngineCommand`]) and hears what came of it ([`EngineEvent`]); a [`Crew`] does it, with real devices, peers and disks.
//!
//! ```text
//!   let (crew, outlets) = Crew::new(Setup { about, reception, assemble, may_run, network });
//!   crew.command(job, command);        // from any thread; returns at once
//!   outlets.events.recv();             // (JobId, EngineEvent): hand them to Worker::step
//!   outlets.steps.recv();              // one record a step done, of every member: the books keep each step once
//!   outlets.notices.recv();            // sentences for people; after a fatal one this process should end
//! ```
//!
//! - [`about`]: what a worker says of itself when it joins; planners make a fleet of it, peers find it by it.
//! - [`table`]: a plan between planner, controller and crew.
//! - [`assembly`]: what a job's description is turned into, which the binary does.
//! - `hands`: one job here: a thread that does its commands one after the other.
//! - `share`: a plan's state on this worker.
//! - `install`: how a share comes to be: fresh, from a checkpoint, or from those who have it.
//! - `transfer`: state from peers, as the difference of two tables.
//! - `run`: step after step, until told otherwise or a peer fails.
//! - [`held_out`]: what samples that nothing learns from come to, between steps.
//! - `save`: this worker's part of a checkpoint.
//! - `peers`: who they are and where they are reached.
//! - `brake`: how what is under way is stopped from outside.
//! - [`slowness`]: how a worker is slowed down for a drill.
//!
//! # What holds
//!
//! - Nothing of a job happens here but on its thread, so commands are done in their order. What takes long can be stopped
//!   from outside (`brake`): by `Halt`, by `KeepOnly`, or by the end of the crew.
//! - An old share is untouched while a new one is installed. If both do not fit the device, the old one goes to the host's
//!   memory first, where it can still be read and saved; if that does not fit either, the new one is not installed.
//! - Every `Install` and every `Run` is answered, within the network's deadlines, unless it is let go of.

pub mod about;
pub mod assembly;
mod brake;
pub mod error;
mod hands;
pub mod held_out;
mod install;
mod peers;
mod run;
mod save;
mod share;
pub mod slowness;
pub mod table;
mod transfer;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use shoal_control::message::{Epoch, JobId};
use shoal_control::worker::{EngineCommand, EngineEvent};
use shoal_engine::metrics::StepRecord;
use shoal_net::{Reception, Settings};

pub use about::About;
pub use assembly::{Assembled, Assembler};
use brake::Task;
pub use error::CrewError;
use hands::Hands;
pub use save::{checkpoint_of, save_number};
pub use slowness::Slowness;
pub use table::Table;

/// Whether anything may run here now: the worker's lease. It is asked before each instruction.
pub type MayRun = Arc<dyn Fn() -> bool + Send + Sync>;

/// What a crew is given.
pub struct Setup {
    /// What this worker said of itself when it joined: by this it finds itself among a plan's members.
    pub about: About,
    /// Its permanent port, which `about` names.
    pub reception: Arc<Reception>,
    pub assemble: Assembler,
    pub may_run: MayRun,
    /// `join_deadline` bounds how long peers are waited for, `deadline` how long their silence is borne.
    pub network: Settings,
}

/// A step that was done.
#[derive(Clone, Debug)]
pub struct StepDone {
    pub job: JobId,
    pub epoch: Epoch,
    pub record: StepRecord,
}

/// What people should hear.
#[derive(Clone, Debug)]
pub struct Notice {
    pub job: JobId,
    pub epoch: Option<Epoch>,
    pub sentence: String,
    /// State here can no longer be trusted or told: this process should end, so that the others go on without it.
    pub fatal: bool,
}

/// What comes out of a crew.
pub struct Outlets {
    pub events: Receiver<(JobId, EngineEvent)>,
    pub steps: Receiver<StepDone>,
    pub notices: Receiver<Notice>,
}

/// What all of a crew's threads use.
struct Crewed {
    setup: Setup,
    slowness: Arc<Slowness>,
    events: Sender<(JobId, EngineEvent)>,
    steps: Sender<StepDone>,
    notices: Sender<Notice>,
}

impl Crewed {
    fn tell(&self, job: JobId, event: EngineEvent) {
        // Whoever listened has ended, and this will.
        let _ = self.events.send((job, event));
    }

    /// A step whose loss is no number ended the run; it is none for the books.
    fn tell_step(&self, job: JobId, epoch: Epoch, record: Option<StepRecord>) {
        if let Some(record) = record.filter(|record| record.loss.is_finite()) {
            let _ = self.steps.send(StepDone { job, epoch, record });
        }
    }

    fn note(&self, job: JobId, epoch: Option<Epoch>, sentence: String, fatal: bool) {
        let _ = self.notices.send(Notice { job, epoch, sentence, fatal });
    }
}

/// A job's thread, and how it is reached.
struct Hired {
    commands: Sender<EngineCommand>,
    task: Arc<Task>,
    thread: JoinHandle<()>,
}

/// One worker's jobs. When it is dropped all that is under way is stopped, and peers are told.
pub struct Crew {
    crewed: Arc<Crewed>,
    jobs: Mutex<BTreeMap<JobId, Hired>>,
}

impl Crew {
    pub fn new(setup: Setup) -> (Crew, Outlets) {
        let ((events, event), (steps, step), (notices, notice)) = (channel(), channel(), channel());
        let crewed = Arc::new(Crewed { setup, slowness: Arc::default(), events, steps, notices });
        let crew = Crew { crewed, jobs: Mutex::default() };
        (crew, Outlets { events: event, steps: step, notices: notice })
    }

    /// By which it is slowed down for drills.
    pub fn slowness(&self) -> Arc<Slowness> {
        self.crewed.slowness.clone()
    }

    /// Has something done; what comes of it is told by events.
    pub fn command(&self, job: JobId, command: EngineCommand) {
        let mut jobs = self.jobs();
        if jobs.get(&job).is_some_and(|hired| hired.thread.is_finished()) {
            // It has said why, and that this process should end.
            return;
        }
        let hired = match jobs.entry(job) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => match hire(self.crewed.clone(), job) {
                Ok(hired) => entry.insert(hired),
                Err(error) => {
                    let sentence = format!("a thread could not be started: {error}");
                    return self.crewed.note(job, None, sentence, true);
                }
            },
        };
        let stops = brake::Stops::of(&command);
        // First the command, then the brake: a thread that begins something looks for commands once its brake can be
        // reached, so it finds one or the other.
        let _ = hired.commands.send(command);
        hired.task.stop(&stops);
    }

    fn jobs(&self) -> MutexGuard<'_, BTreeMap<JobId, Hired>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        let jobs = std::mem::take(&mut *self.jobs());
        for hired in jobs.values() {
            hired.task.stop(&brake::Stops::All);
        }
        for Hired { commands, thread, .. } in jobs.into_values() {
            drop(commands);
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

fn hire(crewed: Arc<Crewed>, job: JobId) -> std::io::Result<Hired> {
    let (commands, told) = channel();
    let task = Arc::new(Task::default());
    let own = task.clone();
    let named = std::thread::Builder::new().name(format!("job {}", job.0));
    let thread = named.spawn(move || Hands::new(crewed, job, told, own).work())?;
    Ok(Hired { commands, task, thread })
}
