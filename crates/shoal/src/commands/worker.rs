//! `shoal worker`: one device of a lab, in a process of its own. It is started by `shoal lab`, which tells it the rest.

use std::io::{BufRead, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use shoal_engine::identity::Identity;
use shoal_engine::{Executor, Interval, Ledger, Run, RunEvent, StopReason, Tiers, Traced};
use shoal_model::Chain;
use shoal_net::{Endpoint, Fabric, Security, connect};
use shoal_state::checkpoint::Store;

use crate::assemble::{self, LocalDevice};
use crate::error::{CliError, Result};
use crate::in_a_box::assignment::{Assignment, Network, Order, Report, name_of};
use crate::job::{DeviceChoice, Job};
use crate::run_folder::data_folder;

#[derive(clap::Args)]
pub struct Options {
    /// What this worker is to do, as `shoal lab` wrote it
    assignment: PathBuf,
}

fn say(report: &Report) -> Result {
    let line = serde_json::to_string(report).expect("a report is JSON");
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(CliError::at(Path::new("the lab")))
}

pub fn run(options: Options) -> Result {
    let text = std::fs::read_to_string(&options.assignment).map_err(CliError::at(&options.assignment))?;
    let assignment: Assignment = serde_json::from_str(&text).map_err(|error| {
        let what = format!("{}: it is no assignment: {error}", options.assignment.display());
        CliError::said(what, "`shoal lab` starts its workers itself")
    })?;
    let rank = assignment.program.device;
    let fabric = join(&assignment.network, rank, assignment.plan.devices.len())?;
    let stop = Arc::new(AtomicBool::new(false));
    let orders = listen(stop.clone());
    if assignment.program.instructions.is_empty() {
        // It has no part; the others reach all of the fleet, so it stays until the lab closes its orders.
        let _ = orders.join();
        return Ok(());
    }
    train(&assignment, fabric, &stop)
}

/// Connects with all others, when the lab says where they are.
fn join(network: &Network, rank: usize, size: usize) -> Result<Arc<Fabric>> {
    let at = |error| CliError::at(Path::new(&network.listen.to_string()))(error);
    let listener = TcpListener::bind((network.listen, 0)).map_err(at)?;
    say(&Report::Listening(listener.local_addr().map_err(at)?))?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).map_err(CliError::at(Path::new("the lab")))?;
    let Ok(Order::Join(addresses)) = serde_json::from_str(&line) else {
        return Err(CliError::said("the lab did not say where the others are", "it may have ended"));
    };
    let security = match &network.identity {
        None => Security::Plain,
        Some([certificate, key, authority]) => Security::Tls {
            identity: shoal_net::identity::Identity::from_pem(certificate, key, authority)?,
            names: (0..size).map(name_of).collect(),
        },
    };
    let endpoint = Endpoint { rank, listener, addresses, fabric: network.fabric, security };
    Ok(connect(endpoint, &network.settings()?)?)
}

/// Hears orders until there are no more: then the lab is gone, and the run is to end.
fn listen(stop: Arc<AtomicBool>) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(std::io::Result::ok) {
            if matches!(serde_json::from_str(&line), Ok(Order::Stop)) {
                stop.store(true, Ordering::Relaxed);
            }
        }
        stop.store(true, Ordering::Relaxed);
    })
}

fn train(assignment: &Assignment, fabric: Arc<Fabric>, stop: &AtomicBool) -> Result {
    let job = Job::read(&assignment.job, &assignment.set)?;
    let chain = job.chain();
    let mut executor = executor(assignment, &job, &chain, fabric)?;
    if !assignment.pace.is_empty() {
        executor.set_pace(assignment.pace.iter().map(|seconds| Duration::from_secs_f64(*seconds)).collect());
    }
    let data = assemble::open_data(&job, &data_folder(&job), &mut |_, _| {})?;
    let store = || Store::open_existing_at(&job.checkpoints);
    let checkpoint = assignment.checkpoint.map(|step| store()?.load(step)).transpose()?;
    let missing = || CliError::said("the lab did not claim the run folder", "start it again");
    let identity = Identity::read(&job.run_folder)?.ok_or_else(missing)?;
    let ledger = Ledger { identity, store: store()?, keeps_books: assignment.leads };
    let mut settings = assemble::run_settings(&job, assignment.stop_at, Vec::new());
    settings.predicted_seconds = Some(assignment.predicted_seconds);
    settings.dollars_per_hour = Some(assignment.dollars_per_hour).filter(|dollars| *dollars > 0.0);
    settings.trace_from = assignment.trace_from;
    if !assignment.saves {
        settings.checkpoint_every = Interval::Never;
    }
    let (plan, program) = (assignment.plan.clone(), assignment.program.clone());
    let mut run =
        Run::new(settings, ledger, executor, plan, program, data.train, data.eval, checkpoint.as_ref())?;
    let mut lost = None;
    let reason = run.go(stop, &mut |event| {
        if !assignment.leads {
            return;
        }
        let said = say(&match event {
            RunEvent::Step(record) => Report::Step(Box::new(record)),
            RunEvent::Saved { step, bytes, seconds } => Report::Saved { step, bytes, seconds },
            RunEvent::SavesWait { needed_bytes, free_bytes } => {
                Report::SavesWait { needed_bytes, free_bytes }
            }
        });
        lost = lost.take().or(said.err());
    })?;
    if let Some(error) = lost {
        return Err(error);
    }
    if assignment.trace_from.is_some() {
        write_trace(&assignment.folder, assignment.program.device, &run.take_traced())?;
    }
    if assignment.leads {
        say(&Report::Done { steps: run.step(), finished: reason == StopReason::Finished })?;
    }
    Ok(())
}

/// A device of this machine with the plan's budget, and its share of the model.
fn executor(assignment: &Assignment, job: &Job, chain: &Chain, fabric: Arc<Fabric>) -> Result<Executor> {
    let (plan, index) = (&assignment.plan, assignment.program.device);
    let row = &plan.devices[index];
    let host_name = format!("host of {}", row.name);
    let device = match assignment.gpu_percent {
        Some(_) => LocalDevice::choose(DeviceChoice::Cuda, Some(row.budget_bytes), Some(assignment.threads))?,
        None => LocalDevice::new(Some(row.budget_bytes), Some(assignment.threads)),
    };
    let device = device.open_as(&row.name, job.precision, job.deterministic)?;
    let Assignment { threads, host_bytes, folder, .. } = assignment;
    let tiers = Tiers::around(device, &host_name, *threads, *host_bytes, folder)?;
    let fresh = assignment.checkpoint.is_none();
    assemble::share_executor(job, chain, plan, index, tiers, Some(fabric), fresh)
}

/// Where a worker leaves its trace for the lab.
pub fn trace_file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("trace-{rank}.json"))
}

fn write_trace(folder: &Path, rank: usize, traced: &[Vec<Traced>]) -> Result {
    let path = trace_file(folder, rank);
    let text = serde_json::to_string(traced).map_err(|error| CliError::at(&path)(error.into()))?;
    std::fs::write(&path, text).map_err(CliError::at(&path))
}
