//! How much of a core a controller takes for many workers and jobs, and how long `ps` takes then. The controller is this
//! process; workers and whoever asks are another, so that what is measured is the controller's alone. Workers are real up to
//! the engine: TLS, channel and state machine; the engine counts steps.
//!
//!     cargo run --release --package shoal-service --example load [WORKERS] [JOBS] [SECONDS]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt};
use rustix::time::{ClockId, clock_gettime};
use shoal_control::controller::state::{Class, Interval, JobSpec};
use shoal_control::controller::{Keeping, Proposal};
use shoal_control::message::{Epoch, JobId, Plan, Saved, Spent, ToWorker};
use shoal_control::worker::{Action, EngineCommand, EngineEvent, Event};
use shoal_control::{Settings, Worker};
use shoal_plan::{Closing, Standing};
use shoal_service::access::Access;
use shoal_service::client::Client;
use shoal_service::clock::{unix_ms, up_ms};
use shoal_service::membership;
use shoal_service::planning::{Planner, Question, Unfit};
use shoal_service::server::{Controller, Options};
use shoal_service::wire::{self, Down, StepLine, Up};
use shoal_service::{tls, uplink};
use tokio_tungstenite::tungstenite::Message;

const STEP_MS: u64 = 1_000;
/// Between two looks of whoever watches.
const PS_EVERY: Duration = Duration::from_millis(50);
/// No record has this number.
const NEVER: u64 = 1 << 50;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let first = arguments.next();
    if first.as_deref() == Some("fleet") {
        let mut number = || arguments.next().and_then(|text| text.parse().ok()).expect("a number");
        let (workers, jobs, seconds) = (number(), number(), number());
        let access = std::env::var("SHOAL_ACCESS").expect("where the controller is");
        return fleet(Path::new(&access), workers, jobs, seconds as u64);
    }
    let mut number = |given: Option<String>, usual: usize| {
        given.or_else(|| arguments.next()).map_or(usual, |text| text.parse().expect("a number"))
    };
    let workers = number(first, 1_000);
    let (jobs, seconds) = (number(None, 100), number(None, 30));
    let folder = tempfile::tempdir().expect("a folder");
    let options = Options {
        listen: ([127, 0, 0, 1], 0).into(),
        folder: folder.path().to_owned(),
        hosts: Vec::new(),
        settings: Settings::default(),
    };
    let complaints = Arc::new(|what: &str| eprintln!("controller: {what}"));
    let controller = Controller::start(options, Arc::new(Even), complaints).expect("a controller");
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["fleet", &workers.to_string(), &jobs.to_string(), &seconds.to_string()])
        .env("SHOAL_ACCESS", folder.path().join("access.json"))
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("the fleet");
    let lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().expect("its words")));
    let mut began = (Instant::now(), 0.0);
    for line in lines.map_while(Result::ok) {
        if line == "begin" {
            began = (Instant::now(), processor_seconds());
        } else if line == "end" {
            let share = (processor_seconds() - began.1) / began.0.elapsed().as_secs_f64();
            println!("controller: {:.2} of a core", share);
        } else {
            println!("{line}");
        }
    }
    child.wait().expect("the fleet ends");
    drop(controller);
}

fn processor_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Plans on all the workers that it is asked about.
struct Even;

impl Planner for Even {
    fn take(&self, _: &str) -> Result<(), Unfit> {
        Ok(())
    }

    fn plan(&self, question: &Question) -> Result<Proposal, String> {
        let members: Vec<_> = question.workers.iter().map(|candidate| candidate.worker).collect();
        let holders = vec![(0..members.len()).collect()];
        Ok(Proposal {
            plan: Plan { members, holders, step_ms: STEP_MS, table: "{}".into() },
            move_ms: 1,
            staying_ms: None,
        })
    }

    fn keep_checkpoints(&self, _: JobId, _: &str, _: &Keeping) -> Result<(), String> {
        Ok(())
    }
}

/// The other process.
fn fleet(access: &Path, workers: usize, jobs: usize, seconds: u64) {
    let access = Access::read(access).expect("a fleet");
    let client = Client::new(&access, None).expect("a client");
    let target: shoal_service::http::Target = access.url.parse().expect("its address");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    for number in 0..workers {
        let name = format!("worker-{number}");
        let token = client.token(60, None).expect("a token").token.parse().expect("a token");
        let identity = membership::join(&target, &token, &name).expect("it joins");
        let tls = tls::member(&identity).expect("an identity");
        let target = target.clone();
        runtime.spawn(async move {
            loop {
                if let Ok(socket) = uplink::connect(&target, &tls, &name).await {
                    work(socket, &name).await;
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        });
    }
    let wait = |what: &str, mut happened: Box<dyn FnMut() -> bool + '_>| {
        let began = Instant::now();
        while !happened() {
            assert!(began.elapsed() < Duration::from_secs(120), "waited in vain for {what}");
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    wait("workers", Box::new(|| client.workers().expect("workers").len() == workers));
    for number in 0..jobs {
        client.submit(&spec(number, workers.div_ceil(jobs))).expect("a job");
    }
    let running = || client.jobs().expect("jobs").iter().filter(|job| job.state == "running").count();
    wait("jobs", Box::new(|| running() == jobs));
    println!("begin");
    let counted = |client: &Client| client.jobs().expect("jobs").iter().map(|job| job.step).sum::<u64>();
    let (began, before, mut took, mut bare) = (Instant::now(), counted(&client), Vec::new(), Vec::new());
    while began.elapsed() < Duration::from_secs(seconds) {
        // Each is a command of its own, with a connection of its own.
        let asker = || Client::new(&access, None).expect("a client");
        let (ps, other) = (asker(), asker());
        let asked = Instant::now();
        ps.jobs().expect("jobs");
        ps.workers().expect("workers");
        took.push(asked.elapsed().as_secs_f64() * 1e3);
        // One that the controller's thread has no part in: what connecting and waiting for a core take.
        let asked = Instant::now();
        other.events(NEVER, false).expect("no events");
        bare.push(asked.elapsed().as_secs_f64() * 1e3);
        std::thread::sleep(PS_EVERY);
    }
    println!("end");
    let steps = (counted(&client) - before) as f64 / began.elapsed().as_secs_f64();
    let alive = client.workers().expect("workers").len();
    println!("{workers} workers ({alive} alive at the end), {jobs} jobs, {steps:.0} steps counted a second");
    println!("ps, two questions: {}", spread(took));
    println!("beside it one that is answered without the controller's thread: {}", spread(bare));
    runtime.shutdown_background();
}

fn spread(mut took: Vec<f64>) -> String {
    took.sort_by(f64::total_cmp);
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
    format!("p50 {:.1} ms, p99 {:.1} ms, most {:.1} ms of {}", at(0.5), at(0.99), at(1.0), took.len())
}

fn spec(number: usize, workers: usize) -> JobSpec {
    JobSpec {
        name: format!("job-{number}"),
        class: Class::Foreground,
        priority: 0,
        steps: 1_000_000,
        workers_min: 1,
        workers_max: workers,
        checkpoint_every: Interval::Steps(100),
        checkpoints_kept: 1,
        description: "counted".into(),
    }
}

/// A share whose steps are counted by the clock.
struct Share {
    from: u64,
    step: u64,
    since_ms: Option<u64>,
    save: Option<(u64, u64)>,
}

/// A worker's life on one connection; it begins anew on the next.
async fn work(socket: tokio_tungstenite::WebSocketStream<shoal_service::http::Stream>, name: &str) {
    let (mut to, mut from) = socket.split();
    let Some(Ok(Message::Text(text))) = from.next().await else { return };
    let Ok(Down::Settings(settings)) = wire::down(&text) else { return };
    let mut worker = Worker::new(settings, name, "{}", unix_ms());
    let mut shares: BTreeMap<(JobId, Epoch), Share> = BTreeMap::new();
    let mut tick = tokio::time::interval(Duration::from_millis(settings.report_every_ms / 3));
    loop {
        let mut events = Vec::new();
        let mut lines = Vec::new();
        tokio::select! {
            _ = tick.tick() => {
                advance(&mut shares, &mut events, &mut lines);
                events.push(Event::Tick);
            }
            heard = from.next() => {
                let Some(Ok(Message::Text(text))) = heard else { return };
                match wire::down(&text) {
                    Ok(Down::Control(message @ (ToWorker::Orders(_) | ToWorker::Welcome { .. }))) => {
                        events.push(Event::Message(message));
                    }
                    Ok(Down::Kept { .. }) => {}
                    _ => return,
                }
            }
        }
        let mut ups = lines;
        while let Some(event) = events.pop() {
            for action in worker.step(up_ms(), event) {
                match action {
                    Action::Send(message) => ups.push(Up::Control(message)),
                    Action::Engine { job, command } => obey(&mut shares, job, command, &mut events),
                    Action::Exit => return,
                }
            }
        }
        for up in ups {
            let text = serde_json::to_string(&up).expect("messages are JSON");
            if to.feed(Message::text(text)).await.is_err() {
                return;
            }
        }
        if to.flush().await.is_err() {
            return;
        }
    }
}

fn standing(step: u64) -> Standing {
    let zero = 0.0.into();
    let closing = |step| Closing { step, loss: 8.0.into(), norm_squared: zero, targets: 8, correct: zero };
    Standing { closing: step.checked_sub(1).map(closing), ..Standing::at(step) }
}

fn advance(shares: &mut BTreeMap<(JobId, Epoch), Share>, events: &mut Vec<Event>, lines: &mut Vec<Up>) {
    let now_ms = unix_ms();
    for ((job, epoch), share) in shares {
        let Some(since_ms) = share.since_ms else { continue };
        // By the wall clock, so that all of a job's workers are at the same step or next to it.
        let step = share.from + now_ms / STEP_MS - since_ms / STEP_MS;
        if step == share.step {
            continue;
        }
        share.step = step;
        let record = serde_json::json!({ "loss": 1.0, "step_ms": STEP_MS, "tokens": 8 });
        let record = record.as_object().expect("an object").clone();
        lines.push(Up::Steps { job: *job, lines: vec![StepLine { step, record }] });
        let moved = EngineEvent::Moved {
            epoch: *epoch,
            standing: standing(step),
            pace: Some((step, 100)),
            spent: Spent::default(),
        };
        events.push(Event::Engine { job: *job, event: moved });
        events.extend(save(share).map(|event| Event::Engine { job: *job, event }));
    }
}

fn save(share: &mut Share) -> Option<EngineEvent> {
    let (id, step) = share.save.take_if(|(_, step)| *step <= share.step)?;
    Some(EngineEvent::Saved(Saved { id, done: step == share.step, cost_ms: 1 }))
}

fn obey(
    shares: &mut BTreeMap<(JobId, Epoch), Share>,
    job: JobId,
    command: EngineCommand,
    events: &mut Vec<Event>,
) {
    let mut tell = |event| events.push(Event::Engine { job, event });
    match command {
        EngineCommand::Install { epoch, installation } => {
            let from = installation.source.step();
            shares.insert((job, epoch), Share { from, step: from, since_ms: None, save: None });
            tell(EngineEvent::Installed { epoch });
        }
        EngineCommand::Run { epoch, .. } => {
            if let Some(share) = shares.get_mut(&(job, epoch)) {
                (share.from, share.since_ms) = (share.step, Some(unix_ms()));
            }
        }
        EngineCommand::Halt { epoch, .. } => {
            if let Some(share) = shares.get_mut(&(job, epoch)) {
                share.since_ms = None;
                tell(EngineEvent::Halted { epoch, standing: standing(share.step), culprit: None });
            }
        }
        EngineCommand::Settle { epoch, step, .. } => {
            if let Some(share) = shares.get_mut(&(job, epoch)) {
                share.step = step;
                tell(EngineEvent::Settled { epoch, standing: standing(step) });
            }
        }
        EngineCommand::Save { epoch, save: asked } => {
            if let Some(share) = shares.get_mut(&(job, epoch)) {
                share.save = Some((asked.checkpoint.id, asked.checkpoint.step));
                save(share).into_iter().for_each(tell);
            }
        }
        EngineCommand::KeepOnly { epochs } => {
            shares.retain(|(of, epoch), _| *of != job || epochs.contains(epoch));
        }
    }
}
