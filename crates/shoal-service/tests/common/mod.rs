//! A fleet in one process: a real controller on a real socket, workers that join it for real, and in place of planner and
//! engine the simplest that keep their promises: plans of one worker, and steps that are counted and no more.
#![allow(dead_code)] // Each test uses a part of it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use shoal_control::Settings;
use shoal_control::controller::state::{Class, Interval, JobSpec};
use shoal_control::controller::{Keeping, Proposal};
use shoal_control::message::{Checkpoint, Epoch, JobId, Plan, Price, Saved, Spent};
use shoal_control::worker::{EngineCommand, EngineEvent};
use shoal_plan::{Closing, Standing};
use shoal_service::Complaints;
use shoal_service::client::Client;
use shoal_service::http::{Answer, Call, Target, block_on, exchange};
use shoal_service::membership::Membership;
use shoal_service::planning::{Planner, Question, Unfit};
use shoal_service::server::{Controller, Options};
use shoal_service::wire::StepLine;
use shoal_service::worker_driver::{Engine, Happening, Lease, Notable, WorkerDriver};

pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct OneWorker;

impl Planner for OneWorker {
    fn take(&self, description: &str) -> Result<(), Unfit> {
        let unfit = || Unfit { why: "it cannot be read".into(), hint: None };
        (description != "unreadable").then_some(()).ok_or_else(unfit)
    }

    fn plan(&self, question: &Question) -> Result<Proposal, String> {
        // The one who has the state, if it may be used; else whoever comes first.
        let held = question.held.iter().flat_map(|(plan, _)| plan.members.clone());
        let known = |worker: &_| question.workers.iter().any(|candidate| candidate.worker == *worker);
        let first = question.workers.first().map(|candidate| candidate.worker);
        let worker = held.into_iter().find(known).or(first).ok_or("there is nobody")?;
        let plan = Plan { members: vec![worker], holders: vec![vec![0]], step_ms: 5, table: "toy".into() };
        Ok(Proposal { plan, move_ms: 1, staying_ms: None })
    }

    fn keep_checkpoints(&self, _: JobId, _: &str, _: &Keeping) -> Result<(), String> {
        Ok(())
    }
}

/// Quiet, but for who looks.
pub fn complaints() -> (Complaints, Arc<Mutex<Vec<String>>>) {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let told = heard.clone();
    (Arc::new(move |what: &str| told.lock().expect("not poisoned").push(what.to_owned())), heard)
}

pub fn options(folder: &Path, port: u16) -> Options {
    // Longer than by default: tests share their machine with others.
    let settings = Settings {
        report_every_ms: 100,
        lease_ms: 2_000,
        halt_ms_max: 200,
        deadline_ms: 3_000,
        ..Settings::default()
    };
    let listen = SocketAddr::from(([127, 0, 0, 1], port));
    Options { listen, folder: folder.join("controller"), hosts: Vec::new(), settings }
}

pub fn controller(folder: &Path, port: u16) -> Controller {
    Controller::start(options(folder, port), Arc::new(OneWorker), complaints().0).expect("a controller")
}

pub fn target(controller: &Controller) -> Target {
    controller.access().url.parse().expect("its own address")
}

pub fn client(controller: &Controller) -> Client {
    Client::new(controller.access(), None).expect("a client")
}

pub fn spec(name: &str, steps: u64) -> JobSpec {
    JobSpec {
        name: name.into(),
        class: Class::Foreground,
        priority: 0,
        steps,
        workers_min: 1,
        workers_max: 1,
        checkpoint_every: Interval::Steps(20),
        checkpoints_kept: 1,
        description: "a toy".into(),
    }
}

/// Any request, with whatever the caller wants to show.
pub fn request(
    controller: &Controller,
    method: &str,
    path: &str,
    headers: &[(&str, String)],
    body: &str,
) -> Answer {
    let access = controller.access();
    let tls = shoal_service::tls::trusting(&access.authority).expect("its authority");
    let call = Call {
        method,
        path,
        headers: headers.to_vec(),
        body: body.as_bytes().to_vec(),
        within: PATIENCE,
        answer_bytes_max: 1 << 24,
    };
    block_on(exchange(&target(controller), Some(&tls), call)).expect("a runtime").expect("an answer")
}

pub fn bearer(token: &str) -> Vec<(&'static str, String)> {
    vec![("authorization", format!("Bearer {token}")), ("content-type", "application/json".into())]
}

/// Waits for what must come; a test that never sees it fails here.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(Instant::now() < end, "{what}: not within {} s", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A worker on threads of its own.
pub struct TestWorker {
    pub name: String,
    pub happenings: Sender<Happening>,
    pub shown: Arc<Mutex<Vec<Notable>>>,
    thread: Option<JoinHandle<shoal_service::Result>>,
}

impl TestWorker {
    /// Joins with a fresh token, or comes back with what its folder has.
    pub fn start(controller: &Controller, folder: &Path, name: &str) -> TestWorker {
        let url = &controller.access().url;
        let folder = folder.join(name);
        let token = match folder.exists() {
            true => None,
            false => Some(controller.token(5).expect("a token").token.parse().expect("a token")),
        };
        let membership = Membership::open(&folder, url, token.as_ref(), name).expect("a membership");
        TestWorker::of(membership)
    }

    pub fn of(membership: Membership) -> TestWorker {
        let name = membership.name.clone();
        let driver = WorkerDriver::new(membership, "{\"toy\":true}".into(), Price::default());
        let happenings = driver.sender();
        let mut engine = Toy { happenings: happenings.clone(), lease: driver.lease(), runs: BTreeMap::new() };
        let shown: Arc<Mutex<Vec<Notable>>> = Arc::default();
        let show = shown.clone();
        let run =
            move || driver.run(&mut engine, &mut |notable| show.lock().expect("not poisoned").push(notable));
        let thread = Some(std::thread::spawn(run));
        TestWorker { name, happenings, shown, thread }
    }

    /// As if its process were killed.
    pub fn kill(mut self) {
        let _ = self.happenings.send(Happening::Quit);
        self.end().expect("it ends");
    }

    pub fn end(&mut self) -> shoal_service::Result {
        self.thread.take().expect("it runs").join().expect("it does not panic")
    }
}

impl Drop for TestWorker {
    fn drop(&mut self) {
        let _ = self.happenings.send(Happening::Quit);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Toy {
    happenings: Sender<Happening>,
    lease: Arc<Lease>,
    runs: BTreeMap<(JobId, Epoch), ToyRun>,
}

/// A share: where it stands, whether it is to stop, and the checkpoint that it is asked for.
#[derive(Clone)]
struct ToyRun {
    step: Arc<Mutex<u64>>,
    stop: Arc<AtomicBool>,
    save: Arc<Mutex<Option<Checkpoint>>>,
}

impl Engine for Toy {
    fn command(&mut self, job: JobId, command: EngineCommand) {
        let tell = |event| drop(self.happenings.send(Happening::Engine { job, event }));
        match command {
            EngineCommand::Install { epoch, installation } => {
                let step = Arc::new(Mutex::new(installation.source.step()));
                self.runs.insert((job, epoch), ToyRun { step, stop: Arc::default(), save: Arc::default() });
                tell(EngineEvent::Installed { epoch });
            }
            EngineCommand::Run { epoch, steps } => {
                let (run, lease) = (self.runs[&(job, epoch)].clone(), self.lease.clone());
                let happenings = self.happenings.clone();
                std::thread::spawn(move || run.go(job, epoch, steps, &lease, &happenings));
            }
            EngineCommand::Halt { epoch, .. } => self.runs[&(job, epoch)].stop.store(true, Ordering::Relaxed),
            EngineCommand::Settle { epoch, step, .. } => {
                *self.runs[&(job, epoch)].step.lock().expect("not poisoned") = step;
                tell(EngineEvent::Settled { epoch, standing: Standing::at(step) });
            }
            EngineCommand::Save { epoch, save } => {
                let run = &self.runs[&(job, epoch)];
                *run.save.lock().expect("not poisoned") = Some(save.checkpoint);
                run.save(*run.step.lock().expect("not poisoned")).into_iter().for_each(tell);
            }
            EngineCommand::KeepOnly { epochs } => self.runs.retain(|(of, epoch), run| {
                let keep = *of != job || epochs.contains(epoch);
                run.stop.fetch_or(!keep, Ordering::Relaxed);
                keep
            }),
        }
    }
}

impl ToyRun {
    /// Its part of the checkpoint, once it has come to that step.
    fn save(&self, step: u64) -> Option<EngineEvent> {
        let asked = self.save.lock().expect("not poisoned").take_if(|asked| asked.step <= step)?;
        Some(EngineEvent::Saved(Saved { id: asked.id, done: asked.step == step, cost_ms: 0 }))
    }

    fn go(&self, job: JobId, epoch: Epoch, steps: u64, lease: &Lease, happenings: &Sender<Happening>) {
        let tell = |event| drop(happenings.send(Happening::Engine { job, event }));
        let mut standing = Standing::at(*self.step.lock().expect("not poisoned"));
        while standing.step < steps && !self.stop.load(Ordering::Relaxed) && lease.may_run() {
            std::thread::sleep(Duration::from_millis(5));
            let closing = closing(standing.step);
            standing = Standing { closing: Some(closing), ..Standing::at(standing.step + 1) };
            // Whoever asks for a checkpoint meanwhile sees this step or is seen at it.
            let mut step = self.step.lock().expect("not poisoned");
            *step = standing.step;
            self.save(standing.step).into_iter().for_each(tell);
            drop(step);
            let record = serde_json::json!({ "loss": loss(standing.step), "by": "worker" });
            let line =
                StepLine { step: standing.step, record: record.as_object().expect("an object").clone() };
            let _ = happenings.send(Happening::Line { job, line });
            tell(EngineEvent::Moved { epoch, standing, pace: None, spent: Spent::default() });
        }
        tell(EngineEvent::Halted { epoch, standing, culprit: None });
    }
}

/// After so many steps.
pub fn loss(step: u64) -> f64 {
    1.0 / (step as f64)
}

fn closing(step: u64) -> Closing {
    let zero = 0.0.into();
    Closing { step, loss: (loss(step + 1) * 8.0).into(), norm_squared: zero, targets: 8, correct: zero }
}
