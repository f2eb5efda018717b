//! The fleet's hour: a controller and four workers train the job, one worker is killed, another one joins.

use std::cell::RefCell;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use shoal_control::controller::state::Class;
use shoal_engine::RunEvent;
use shoal_engine::metrics::StepRecord;
use shoal_service::clock::unix_ms;
use shoal_service::receipt::ReceiptView;
use shoal_service::view::JobView;

use super::account::Account;
use crate::error::{CliError, Result};
use crate::job::Job;
use crate::live::description::Description;
use crate::live::follow::follow_by;
use crate::live::own_fleet::{OwnFleet, Processes};
use crate::show::Progress;

const WORKERS: [&str; 4] = ["one", "two", "three", "four"];
pub const NEWCOMER: &str = "five";
/// What each worker gives. The price is for the receipt's sake.
pub const PRICE: &str = "0.10";
const GIVEN: [&str; 10] =
    ["--device", "cpu", "--threads", "1", "--memory", "256MiB", "--host-memory", "256MiB", "--price", PRICE];
/// In percent of the steps.
const KILL_AT: u64 = 35;
const JOIN_AT: u64 = 60;
/// Without any step for so long, something is wrong that nobody has told.
const PATIENCE: Duration = Duration::from_secs(120);

/// Something that happened to a worker.
#[derive(Clone, Debug)]
pub struct Happened {
    pub worker: String,
    /// The last step that was known to be counted.
    pub step: u64,
    pub at_ms: u64,
}

pub struct Course {
    pub losses: Vec<(u64, f64)>,
    pub killed: Option<Happened>,
    pub joined: Option<Happened>,
    /// From the first worker's start to the job's end.
    pub seconds: f64,
    pub view: JobView,
    pub account: Account,
    pub receipt: ReceiptView,
}

/// Trains the job, in processes that are gone when this returns.
pub fn run(
    dir: &Path,
    job: &Job,
    description: &Description,
    processes: &Processes,
    quiet: bool,
) -> Result<Course> {
    let began = Instant::now();
    let fleet = OwnFleet::start(&dir.join("fleet"), processes, &[])?;
    for name in WORKERS {
        fleet.join(name, &GIVEN)?;
    }
    fleet.await_workers(WORKERS.len())?;
    let number = fleet.client.submit(&description.spec(job, Class::Foreground, 0))?;
    let mut trial = Trial { fleet: &fleet, job, quiet, losses: Vec::new(), killed: None, joined: None };
    let view = trial.follow(number)?;
    let Trial { losses, killed, joined, .. } = trial;
    if view.state != "done" {
        let reason = view.reason.as_deref().unwrap_or("nobody said why");
        let what = format!("the demo's job is {} at step {}: {reason}", view.state, view.step);
        return Err(CliError::said(what, format!("see the logs in {}", dir.join("fleet").display())));
    }
    let (account, receipt) = (Account::read(&fleet.client)?, fleet.client.receipt(number)?);
    fleet.check()?;
    Ok(Course { losses, killed, joined, seconds: began.elapsed().as_secs_f64(), view, account, receipt })
}

struct Trial<'a> {
    fleet: &'a OwnFleet,
    job: &'a Job,
    quiet: bool,
    losses: Vec<(u64, f64)>,
    killed: Option<Happened>,
    joined: Option<Happened>,
}

impl Trial<'_> {
    fn follow(&mut self, number: u64) -> Result<JobView> {
        let (fleet, quiet) = (self.fleet, self.quiet);
        let mut last = (0, Instant::now());
        let mut ask = |after: u64| {
            // What fails here is a process that has ended, if one has.
            let logs = fleet.client.logs(number, after, true);
            fleet.check()?;
            let logs = logs?;
            if logs.job.step > last.0 {
                last = (logs.job.step, Instant::now());
            }
            if last.1.elapsed() > PATIENCE {
                let what = format!("no step was done for {} s after step {}", PATIENCE.as_secs(), last.0);
                return Err(CliError::said(what, "see the logs in the demo's fleet folder"));
            }
            Ok(logs)
        };
        let progress = RefCell::new(Progress::new(self.job.steps, 0, quiet));
        let mut show = |line: &Value| {
            if let Ok(record) = serde_json::from_value::<StepRecord>(line.clone()) {
                progress.borrow_mut().event(&RunEvent::Step(record));
            }
            let (step, loss) = (line["step"].as_u64(), line["loss"].as_f64());
            self.losses.extend(step.zip(loss));
            step.map_or(Ok(()), |step| self.act(step, &progress.borrow()))
        };
        // Why it does not go on, where somebody knows.
        let mut tell = |view: &JobView| {
            let reason = view.reason.as_ref().map(|reason| format!("the job is {}: {reason}", view.state));
            reason.iter().for_each(|reason| progress.borrow().say(reason));
        };
        let view = follow_by(&mut ask, 0, &mut show, &mut tell)?;
        progress.into_inner().finish();
        Ok(view)
    }

    /// What is done to the fleet after a step.
    fn act(&mut self, step: u64, progress: &Progress) -> Result {
        let is_past = |part: u64| step >= self.job.steps * part / 100;
        let happened = |worker: &str| Happened { worker: worker.to_owned(), step, at_ms: unix_ms() };
        if self.killed.is_none() && is_past(KILL_AT) {
            let Some(victim) = self.victim()? else { return Ok(()) };
            self.killed = Some(happened(&victim));
            self.fleet.kill(&victim)?;
            progress.say(&format!("step {step}: worker {victim} is killed (SIGKILL)"));
        } else if self.killed.is_some() && self.joined.is_none() && is_past(JOIN_AT) {
            self.joined = Some(happened(NEWCOMER));
            self.fleet.join(NEWCOMER, &GIVEN)?;
            progress.say(&format!("step {step}: worker {NEWCOMER} joins"));
        }
        Ok(())
    }

    /// One of several workers of the plan in force, who computes.
    fn victim(&self) -> Result<Option<String>> {
        let account = Account::read(&self.fleet.client)?;
        let Some(plan) = account.plans.last().filter(|plan| plan.workers.len() > 1) else { return Ok(None) };
        let computing = plan.workers.iter().rev().find(|part| part.computes.is_some());
        Ok(computing.map(|part| part.worker.clone()))
    }
}
