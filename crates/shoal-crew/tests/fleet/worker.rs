//! A worker as a process: the state machine that the controller talks to, and the crew behind it. Messages come and go as
//! lines of JSON.

use std::io::{BufRead, Write};
use std::net::TcpListener;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use shoal_control::message::{Epoch, JobId, ToController, ToWorker};
use shoal_control::worker::{Action, EngineEvent, Event};
use shoal_control::{Settings, Worker};
use shoal_crew::about::{About, DeviceAbout};
use shoal_crew::{Crew, Setup};
use shoal_kernels::CpuDevice;
use shoal_net::identity::Identity;
use shoal_net::{Guard, Reception};

use crate::job;

/// What a worker is told.
#[derive(Serialize, Deserialize)]
pub enum Told {
    Message(ToWorker),
    /// Its machine will be taken away.
    Notice {
        in_ms: u64,
    },
}

/// What it says.
#[derive(Debug, Serialize, Deserialize)]
pub enum Said {
    Message(ToController),
    Step { job: JobId, epoch: Epoch, step: u64, loss: f64, held_out: Option<f64> },
    Notice { sentence: String, fatal: bool },
}

pub fn settings() -> Settings {
    // Everything runs on few cores, and others may use them too.
    let (report_every_ms, lease_ms, halt_ms_max, deadline_ms) = (60, 1_500, 500, 2_200);
    Settings { report_every_ms, lease_ms, halt_ms_max, deadline_ms, ..Settings::default() }
}

/// What an identity's folder has.
pub const PEMS: [&str; 3] = ["certificate.pem", "key.pem", "authority.pem"];

enum In {
    Told(Told),
    Engine(JobId, EngineEvent),
    Closed,
}

fn say(said: &Said) {
    let line = serde_json::to_string(said).expect("plain data is JSON");
    let mut out = std::io::stdout().lock();
    // If nobody listens any more this process is about to end.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Under a name, with the certificate, key and authority of a folder if there is one.
pub fn run(name: &str, identity: Option<&String>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let guard = identity.map_or(Guard::Plain, |folder| {
        let [certificate, key, authority] =
            PEMS.map(|file| std::fs::read_to_string(Path::new(folder).join(file)).expect("a PEM file"));
        Guard::Tls(Identity::from_pem(&certificate, &key, &authority).expect("an identity"))
    });
    let reception = Arc::new(Reception::open(listener, guard).expect("a reception"));
    let about = About {
        name: name.to_owned(),
        address: reception.address(),
        machine: name.to_owned(),
        device: DeviceAbout {
            kind: "cpu".into(),
            memory_bytes: 64 << 20,
            workspace_bytes: CpuDevice::workspace_bytes(1),
            threads: 1,
            matrix_flops_per_second: None,
            precisions: vec!["fp32".into()],
        },
        host_memory_bytes: 64 << 20,
        disk_bytes: None,
        cores: None,
        within_machine: Vec::new(),
        network: None,
        dollars_per_hour: 0.0,
        spot: false,
        drills: false,
        stretch: None,
    };
    let boot = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock").as_millis() as u64;
    let worker = Arc::new(Mutex::new(Worker::new(settings(), name, &about.text(), boot)));
    let started = Instant::now();
    let now_ms = move || started.elapsed().as_millis() as u64;
    let leased = worker.clone();
    let (own, cache) = (name.to_owned(), format!("cache-{name}-{boot}"));
    let (crew, outlets) = Crew::new(Setup {
        about,
        reception,
        assemble: Arc::new(move |text: &str| job::assemble(text, &own, &cache)),
        may_run: Arc::new(move || leased.lock().expect("no panic").may_run(now_ms())),
        network: shoal_net::Settings {
            deadline: Duration::from_secs(2),
            message_deadline: Duration::from_secs(30),
            join_deadline: job::JOIN_DEADLINE,
            ..shoal_net::Settings::default()
        },
    });
    let (sender, inbox) = channel();
    let from_engine = sender.clone();
    let events = outlets.events;
    std::thread::spawn(move || {
        for (job, event) in events {
            if from_engine.send(In::Engine(job, event)).is_err() {
                return;
            }
        }
    });
    std::thread::spawn(move || {
        for done in outlets.steps {
            let (step, loss, held_out) = (done.record.step, done.record.loss, done.record.eval_loss);
            say(&Said::Step { job: done.job, epoch: done.epoch, step, loss, held_out });
        }
    });
    std::thread::spawn(move || {
        for notice in outlets.notices {
            let sentence = format!("{:?}: {}", notice.epoch, notice.sentence);
            say(&Said::Notice { sentence, fatal: notice.fatal });
            if notice.fatal {
                std::process::exit(3);
            }
        }
    });
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let told = serde_json::from_str(&line).expect("the test speaks properly");
            if sender.send(In::Told(told)).is_err() {
                return;
            }
        }
        let _ = sender.send(In::Closed);
    });
    loop {
        let event = match inbox.recv_timeout(Duration::from_millis(10)) {
            Ok(In::Told(Told::Message(message))) => Event::Message(message),
            Ok(In::Told(Told::Notice { in_ms })) => Event::Notice { in_ms },
            Ok(In::Engine(job, event)) => Event::Engine { job, event },
            Err(RecvTimeoutError::Timeout) => Event::Tick,
            Ok(In::Closed) | Err(RecvTimeoutError::Disconnected) => return,
        };
        let actions = worker.lock().expect("no panic").step(now_ms(), event);
        for action in actions {
            match action {
                Action::Send(message) => say(&Said::Message(message)),
                Action::Engine { job, command } => crew.command(job, command),
                Action::Exit => return,
            }
        }
    }
}
