//! A controller under load: `load [WORKERS] [JOBS] [SECONDS]`, by default 1,000 workers, 100 jobs and 20 seconds of a virtual
//! clock. Workers are the real machines, each between the controller and an engine that does nothing but step; they report
//! every 150 ms and whenever a step is done, and every second one of them dies and another joins. Only the keeper's
//! work is counted: decisions, records, and the log on a real disk.

use std::collections::BTreeMap;
use std::process::ExitCode;

use shoal_control::controller::state::{Class, Interval, JobSpec};
use shoal_control::controller::{Action, Event, Proposal};
use shoal_control::disk::Folder;
use shoal_control::message::*;
use shoal_control::worker::{self, EngineCommand, EngineEvent};
use shoal_control::{Keeper, Settings, Worker};
use shoal_plan::{Closing, Standing};

/// Of the virtual clock.
const ROUND_MS: u64 = 50;
/// What a step takes one worker.
const WORK_MS: u64 = 4_000;

/// One machine: the worker, and the epochs that its engine runs.
struct Machine {
    worker: Worker,
    running: BTreeMap<JobId, Running>,
    installed: BTreeMap<(JobId, Epoch), (u64, u64)>,
}

struct Running {
    epoch: Epoch,
    step: u64,
    step_ms: u64,
    since_ms: u64,
    after: Option<u64>,
}

fn closing(step: u64) -> Closing {
    let (loss, norm_squared, correct) = (1.0.into(), 1.0.into(), 0.0.into());
    Closing { step, loss, norm_squared, targets: 1, correct }
}

impl Machine {
    fn new(number: u64) -> Machine {
        let name = format!("machine {number}");
        let about = format!("{{\"address\":\"10.0.{}.{}:7000\"}}", number / 256, number % 256);
        let worker = Worker::new(Settings::default(), &name, &about, 1).priced(Price(1_000_000));
        Machine { worker, running: BTreeMap::new(), installed: BTreeMap::new() }
    }

    /// Takes an event in, and gives what is said to the controller.
    fn step(&mut self, now_ms: u64, event: worker::Event) -> Vec<ToController> {
        let mut said = Vec::new();
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            for action in self.worker.step(now_ms, event) {
                match action {
                    worker::Action::Send(message) => said.push(message),
                    worker::Action::Engine { job, command } => {
                        events.extend(
                            self.engine(now_ms, job, command)
                                .map(|event| worker::Event::Engine { job, event }),
                        );
                    }
                    worker::Action::Exit => {}
                }
            }
        }
        said
    }

    fn engine(&mut self, now_ms: u64, job: JobId, command: EngineCommand) -> Option<EngineEvent> {
        match command {
            EngineCommand::Install { epoch, installation } => {
                let step = installation.source.step();
                self.installed.insert((job, epoch), (step, installation.plan.step_ms));
                Some(EngineEvent::Installed { epoch })
            }
            EngineCommand::Run { epoch, .. } => {
                let (step, step_ms) = self.installed[&(job, epoch)];
                self.running.insert(job, Running { epoch, step, step_ms, since_ms: now_ms, after: None });
                None
            }
            EngineCommand::Halt { epoch, after: None } => {
                let running = self.running.remove(&job)?;
                let standing = Standing::at(running.step);
                self.installed.insert((job, epoch), (running.step, running.step_ms));
                Some(EngineEvent::Halted { epoch, standing, culprit: None })
            }
            EngineCommand::Halt { after, .. } => {
                self.running.get_mut(&job)?.after = after;
                None
            }
            EngineCommand::Settle { epoch, step, .. } => {
                Some(EngineEvent::Settled { epoch, standing: Standing::at(step) })
            }
            EngineCommand::Save { save, .. } => {
                Some(EngineEvent::Saved(Saved { id: save.checkpoint.id, done: true, cost_ms: 20 }))
            }
            EngineCommand::KeepOnly { epochs } => {
                self.installed.retain(|(owner, epoch), _| *owner != job || epochs.contains(epoch));
                None
            }
        }
    }

    /// Steps that are done by now.
    fn advance(&mut self, now_ms: u64) -> Vec<ToController> {
        let mut events = Vec::new();
        for (job, running) in &mut self.running {
            if now_ms < running.since_ms + running.step_ms {
                continue;
            }
            let step = running.step;
            (running.step, running.since_ms) = (step + 1, now_ms);
            let standing = Standing { closing: Some(closing(step)), ..Standing::at(step + 1) };
            let spent = Spent { useful_ms: running.step_ms * (step + 1), ..Spent::default() };
            let (epoch, pace) = (running.epoch, Some((step, 100)));
            events.push((*job, EngineEvent::Moved { epoch, standing, pace, spent }));
            if running.after.is_some_and(|after| step >= after) {
                events.push((*job, EngineEvent::Halted { epoch, standing, culprit: None }));
            }
        }
        for (job, event) in &events {
            if let EngineEvent::Halted { epoch, standing, .. } = event {
                let step_ms = self.running.remove(job).map_or(1, |running| running.step_ms);
                self.installed.insert((*job, *epoch), (standing.step, step_ms));
            }
        }
        let mut said = Vec::new();
        for (job, event) in events {
            said.extend(self.step(now_ms, worker::Event::Engine { job, event }));
        }
        said.extend(self.step(now_ms, worker::Event::Tick));
        said
    }
}

fn spec(number: u64) -> JobSpec {
    JobSpec {
        name: format!("job {number}"),
        class: if number.is_multiple_of(4) { Class::Background } else { Class::Foreground },
        priority: (number % 3) as i32,
        steps: 1_000_000,
        workers_min: 2,
        workers_max: 12,
        checkpoint_every: Interval::Auto,
        checkpoints_kept: 2,
        description: "x".repeat(2_000),
    }
}

/// Everyone asked, each slice on two of them.
fn plan(members: Vec<WorkerId>) -> Proposal {
    let count = members.len();
    let holders = (0..count).map(|place| vec![place, (place + 1) % count]).collect();
    let step_ms = WORK_MS / count as u64;
    Proposal {
        plan: Plan { members, holders, step_ms, table: "t".repeat(4_000) },
        move_ms: 500,
        staying_ms: None,
    }
}

/// Nanoseconds that this thread has been on a processor.
fn cpu_ns() -> std::io::Result<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let number = text.split_whitespace().next().and_then(|word| word.parse().ok());
    number.ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}

fn run(workers: u64, jobs: u64, seconds: u64) -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let (mut keeper, _, _) = Keeper::open(Settings::default(), Folder::open(folder.path())?, 0)?;
    let mut machines: BTreeMap<String, Machine> =
        (0..workers).map(|number| (format!("machine {number}"), Machine::new(number))).collect();
    let mut names: BTreeMap<WorkerId, String> = BTreeMap::new();
    let (mut born, mut now_ms) = (workers, 0_u64);
    let (mut rounds_ns, mut events, mut records) = (Vec::new(), 0_u64, 0_u64);
    let mut inbox: Vec<Event> =
        (0..jobs).map(|job| Event::Submit { job: JobId(job), spec: spec(job) }).collect();
    // The first seconds, in which all join and all jobs begin, are counted apart.
    let warm_up_ms = 3_000;
    while now_ms < warm_up_ms + seconds * 1_000 {
        now_ms += ROUND_MS;
        if now_ms > warm_up_ms && now_ms.is_multiple_of(1_000) {
            machines.pop_first();
            machines.insert(format!("machine {born}"), Machine::new(born));
            born += 1;
        }
        inbox.extend(machines.values_mut().flat_map(|machine| machine.advance(now_ms)).map(Event::Message));
        inbox.push(Event::Tick);
        let began_ns = cpu_ns()?;
        let count = inbox.len() as u64;
        let step = keeper.step_all(now_ms, inbox.drain(..))?;
        records += step.records.len() as u64;
        let round_ns = cpu_ns()? - began_ns;
        if now_ms > warm_up_ms {
            events += count;
            rounds_ns.push(round_ns);
        } else {
            records = 0;
        }
        for action in step.actions {
            let (name, message) = match action {
                Action::Answer { name, message } => {
                    if let ToWorker::Welcome { worker, .. } = &message {
                        names.insert(*worker, name.clone());
                    }
                    (name, message)
                }
                Action::Send { to, message } => (names.get(&to).cloned().unwrap_or_default(), message),
                Action::Plan { job, request, workers, .. } => {
                    let members = workers.into_iter().map(|(worker, _)| worker).collect();
                    inbox.push(Event::Planned { job, request, answer: Ok(plan(members)) });
                    continue;
                }
                Action::KeepCheckpoints { .. } => continue,
            };
            if let Some(machine) = machines.get_mut(&name) {
                let said = machine.step(now_ms, worker::Event::Message(message));
                inbox.extend(said.into_iter().map(Event::Message));
            }
        }
    }
    let state = keeper.state();
    let running = state.jobs.values().filter(|job| job.held().is_some()).count();
    let steps: u64 = state.jobs.values().map(|job| job.counted).sum();
    println!("{workers} workers, {jobs} jobs ({running} with workers, {steps} steps), {seconds} s");
    println!("{} events and {} records a second", events / seconds, records / seconds);
    println!("{:.3} CPU seconds a second", rounds_ns.iter().sum::<u64>() as f64 / 1e9 / seconds as f64);
    rounds_ns.sort_unstable();
    let at = |percent: usize| rounds_ns[(rounds_ns.len() - 1) * percent / 100] as f64 / 1e6;
    println!(
        "every {ROUND_MS} ms: {:.1} ms in the middle, {:.1} p99, {:.1} at worst",
        at(50),
        at(99),
        at(100)
    );
    Ok(())
}

fn main() -> ExitCode {
    let numbers: Vec<Option<u64>> = std::env::args().skip(1).map(|argument| argument.parse().ok()).collect();
    let number = |place: usize, usual| numbers.get(place).copied().unwrap_or(Some(usual));
    let (Some(workers), Some(jobs), Some(seconds @ 1..)) = (number(0, 1_000), number(1, 100), number(2, 20))
    else {
        eprintln!("these are no numbers\nhint: load [WORKERS] [JOBS] [SECONDS]");
        return ExitCode::FAILURE;
    };
    match run(workers, jobs, seconds) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
