//! `shoal demo`: real training here in under a minute, no download. A controller and four workers, each a process of its own,
//! teach a small model to add; one worker is killed on the way and another one joins. The same on one device stands
//! beside it, and the model is asked sums that it has never seen.

mod account;
mod course;
mod picture;
mod sums;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use shoal_engine::metrics::{self, StepRecord};

use crate::commands::train::{Summary, stop_on_signals, train};
use crate::error::{CliError, Result};
use crate::job::{Job, duration_text};
use crate::live::description::Description;
use crate::live::own_fleet::Processes;
use crate::live::receipt;
use crate::live::within::Within;
use crate::show::table;
use account::InForce;
use course::{Course, NEWCOMER, PRICE};
use sums::{Sum, written};

#[derive(clap::Args)]
pub struct Options {
    /// The folder for the demo's files; it is made anew
    #[arg(long, default_value = "shoal-demo")]
    dir: PathBuf,
    /// Train in this process alone, on the GPU if there is one, and start no others
    #[arg(long)]
    alone: bool,
    /// Fewer are quicker and teach it less
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(50..))]
    steps: u64,
    #[arg(long)]
    json: bool,
}

/// Sums shown at the end.
const SHOWN: usize = 8;
/// Steps on either side of the kill whose losses are compared.
const AROUND: u64 = 20;

pub fn run(options: Options) -> Result {
    let dir = &options.dir;
    sums::prepare_folder(dir)?;
    let (training, held_out) = sums::sums();
    let job_path = sums::write(dir, &training, &held_out)?;
    if !options.json {
        eprintln!(
            "A small model learns to add two-digit numbers: {} sums to train on, {} held out.\n",
            training.len(),
            held_out.len()
        );
    }
    match options.alone {
        true => alone(&options, &job_path, &held_out),
        false => fleet(&options, &job_path, &held_out),
    }
}

/// What the model makes of sums that it has never seen.
struct Answers<'a> {
    held_out: &'a [Sum],
    said: Vec<String>,
    right: usize,
}

impl<'a> Answers<'a> {
    fn of(run: &Path, held_out: &'a [Sum]) -> Result<Answers<'a>> {
        let said = sums::ask(run, held_out)?;
        let is_right = |(answer, (a, b)): &(&String, &Sum)| **answer == written(*a, *b)[6..];
        let right = said.iter().zip(held_out).filter(is_right).count();
        Ok(Answers { held_out, said, right })
    }

    fn share(&self) -> f64 {
        self.right as f64 / self.held_out.len() as f64
    }

    fn print(&self) {
        println!("\nSums it has never seen:");
        for index in 0..SHOWN.min(self.held_out.len()) {
            let index = index * self.held_out.len() / SHOWN;
            let ((a, b), answer) = (self.held_out[index], &self.said[index]);
            let answer = answer.trim_start_matches('0');
            let mark = if answer == (a + b).to_string() { "right" } else { "wrong" };
            println!("  {a} + {b} = {answer:<4} {mark}");
        }
        let (right, count) = (self.right, self.held_out.len());
        println!("\n{right} of {count} held-out sums right ({:.1}%).", 100.0 * self.share());
    }
}

/// Everything in this process.
fn alone(options: &Options, job_path: &Path, held_out: &[Sum]) -> Result {
    let job = Job::read(job_path, &[format!("train.steps={}", options.steps)])?;
    let stop = stop_on_signals()?;
    let summary = train(&job, None, None, options.json, &stop)?;
    let answers = Answers::of(&job.run_folder, held_out)?;
    let Summary { loss, eval_loss, steps, seconds, .. } = summary;
    if options.json {
        let (count, right, share) = (held_out.len(), answers.right, answers.share());
        println!(
            "{}",
            json!({
                "held_out": count, "right": right, "share": share, "loss": loss, "eval_loss": eval_loss,
                "steps": steps, "seconds": seconds,
            })
        );
        return Ok(());
    }
    answers.print();
    println!("{} of training. The files are in {}.", duration_text(seconds), options.dir.display());
    Ok(())
}

/// Whatever ends this process ends the others: signals here, everything else by the leash that they are on. Gives what says
/// that it was a signal.
fn end_on_signals(processes: &Processes) -> Result<Arc<AtomicBool>> {
    let (processes, interrupted) = (processes.clone(), Arc::new(AtomicBool::new(false)));
    let flag = interrupted.clone();
    let handler = move || {
        flag.store(true, Ordering::SeqCst);
        processes.end();
        eprintln!("\ninterrupted; the demo's processes are ended");
        std::process::exit(130);
    };
    let handled = ctrlc::set_handler(handler).map_err(|error| CliError::Said {
        sentence: format!("signals cannot be handled: {error}"),
        hint: None,
    });
    handled.map(|()| interrupted)
}

fn fleet(options: &Options, job_path: &Path, held_out: &[Sum]) -> Result {
    let (dir, quiet) = (&options.dir, options.json);
    let processes = Processes::default();
    let interrupted = end_on_signals(&processes)?;
    let say = |line: &str| {
        if !quiet {
            eprintln!("{line}");
        }
    };
    let set = [format!("train.steps={}", options.steps)];
    say("First on one device, undisturbed, to compare with.");
    let here = ["checkpoint.to=alone".to_owned(), "plan.device=cpu".to_owned()];
    let alone_job = Job::read(job_path, &[&set[..], &here].concat())?;
    let alone = train(&alone_job, None, None, quiet, &AtomicBool::new(false))?;
    let alone_losses = losses(&alone_job.run_folder)?;

    say("\nNow on a fleet: a controller and four workers, each a process of its own.");
    let description = Description::read(job_path, &set)?;
    let job = description.job(&Within::anywhere())?;
    let course = course::run(dir, &job, &description, &processes, quiet);
    while interrupted.load(Ordering::SeqCst) {
        // What failed did so because of that, and the process is about to end.
        std::thread::park();
    }
    let course = course?;
    let picture_path = dir.join("demo.svg");
    let answers = Answers::of(&job.run_folder, held_out)?;
    let shown = Shown { course, alone, alone_losses, answers, dir, picture_path };
    let picture = picture::svg(&shown.course, &shown.alone_losses, &shown.comparison());
    std::fs::write(&shown.picture_path, picture).map_err(CliError::at(&shown.picture_path))?;
    match options.json {
        true => println!("{}", shown.json()),
        false => shown.print(),
    }
    Ok(())
}

/// A run's losses by step.
fn losses(run: &Path) -> Result<Vec<(u64, f64)>> {
    let path = run.join(metrics::FILE);
    let text = std::fs::read_to_string(&path).map_err(CliError::at(&path))?;
    let records = text.lines().filter_map(|line| serde_json::from_str::<StepRecord>(line).ok());
    Ok(records.map(|record| (record.step, record.loss)).collect())
}

/// All that the demo has to tell.
struct Shown<'a> {
    course: Course,
    alone: Summary,
    alone_losses: Vec<(u64, f64)>,
    answers: Answers<'a>,
    dir: &'a Path,
    picture_path: PathBuf,
}

impl Shown<'_> {
    /// The largest relative difference between the two curves up to a step.
    fn difference(&self, upto: u64) -> f64 {
        let both = self.course.losses.iter().zip(&self.alone_losses);
        let until = both.take_while(|((step, _), _)| *step <= upto);
        until.map(|((_, fleet), (_, alone))| ((fleet - alone) / alone).abs()).fold(0.0, f64::max)
    }

    /// Up to where differences of last bits have not had the time to grow.
    fn early(&self) -> u64 {
        self.course.view.step / 20
    }

    /// Each plan adds up in an order of its own, and so large a learning rate soon makes something of it.
    fn comparison(&self) -> String {
        let early = self.early();
        let difference = self.difference(early);
        format!(
            "Over the first {early} steps they differ by {difference:.0e} at most; then last bits grow, kill or no kill."
        )
    }

    fn json(&self) -> Value {
        let Shown { course, alone, answers, .. } = self;
        let account = &course.account;
        let killed = course.killed.as_ref().map(|killed| {
            json!({
                "worker": killed.worker, "step": killed.step,
                "recovery": account.recovery(killed.at_ms, &killed.worker),
                "steps_undone": course.view.undone,
                "before": account.before(killed.at_ms),
                "after": account.next(killed.at_ms, &killed.worker, false),
            })
        });
        let joined = course.joined.as_ref().map(|joined| {
            let plan = account.next(joined.at_ms, &joined.worker, true);
            json!({ "worker": joined.worker, "step": joined.step, "plan": plan })
        });
        json!({
            "held_out": answers.held_out.len(), "right": answers.right, "share": answers.share(),
            "loss": course.losses.last().map(|last| last.1), "steps": course.view.step,
            "seconds": course.seconds, "picture": self.picture_path,
            "alone": { "loss": alone.loss, "seconds": alone.seconds },
            "difference": { "early": self.difference(self.early()), "whole": self.difference(u64::MAX) },
            "killed": killed, "joined": joined, "receipt": course.receipt,
        })
    }

    fn print(&self) {
        println!("\nThe loss on the fleet, over {} steps:\n", self.course.view.step);
        print!("{}", picture::text(&self.course));
        self.print_curves();
        self.print_changes();
        println!("\n{}", receipt::text(&self.course.receipt).trim_end());
        println!("  (at ${PRICE} an hour for each worker, for the sake of the example)");
        self.answers.print();
        let seconds = duration_text(self.course.seconds);
        println!("The fleet took {seconds} in all; alone it was {}.", duration_text(self.alone.seconds));
        println!(
            "The picture is {}; logs and the job are in {}.",
            self.picture_path.display(),
            self.dir.display()
        );
    }

    fn print_curves(&self) {
        let (loss, alone) = (self.course.losses.last().map(|last| last.1), self.alone.loss);
        let text = |loss: Option<f64>| loss.map_or("unknown".into(), |loss| format!("{loss:.4}"));
        println!("\nIt ends at {}, on one device at {}. {}", text(loss), text(alone), self.comparison());
    }

    fn print_changes(&self) {
        let Course { losses, account, killed, joined, view, .. } = &self.course;
        let Some(killed) = killed else {
            println!("\nNobody was killed: the plan had no second worker at the time.");
            return;
        };
        println!("\nWorker {} was killed after step {}.", killed.worker, killed.step);
        match account.recovery(killed.at_ms, &killed.worker) {
            Some(recovery) => println!(
                "{:.2} s later the others had done step {}. Finished steps done again: {}.",
                recovery.seconds, recovery.step, view.undone
            ),
            None => println!("The others went on with the plan that they had."),
        }
        let around = |losses: &[(u64, f64)]| mean_around(losses, killed.step);
        if let (Some(fleet), Some(alone)) = (around(losses), around(&self.alone_losses)) {
            println!(
                "The loss of the {AROUND} steps before and after it: {:.3} and {:.3}; on one device {:.3} and {:.3}.",
                fleet.0, fleet.1, alone.0, alone.1
            );
        }
        print_plan("the plan before", account.before(killed.at_ms));
        print_plan("the plan after", account.next(killed.at_ms, &killed.worker, false));
        let Some(joined) = joined else { return };
        let plan = account.next(joined.at_ms, NEWCOMER, true);
        match (plan, account.declined) {
            (Some(plan), _) => {
                println!(
                    "\nWorker {NEWCOMER} was started after step {} and works since step {}.",
                    joined.step, plan.after_step
                );
            }
            (None, Some(weighing)) => println!(
                "\nWorker {NEWCOMER} joined, and the plan stayed as it was: a step would have taken {} ms instead of {}, the change {} ms.",
                weighing.step_ms_after, weighing.step_ms, weighing.move_ms
            ),
            (None, None) => println!("\nWorker {NEWCOMER} joined too late to get work."),
        }
        print_plan("the plan with it", plan);
    }
}

/// The mean of a few steps up to one, and of those after it.
fn mean_around(losses: &[(u64, f64)], step: u64) -> Option<(f64, f64)> {
    let mean = |first: u64| {
        let some =
            losses.iter().filter(|(step, _)| (first..first + AROUND).contains(step)).map(|some| some.1);
        let (count, sum) = some.fold((0_u32, 0.0), |(count, sum), loss| (count + 1, sum + loss));
        (count > 0).then(|| sum / f64::from(count))
    };
    Some((mean((step + 1).saturating_sub(AROUND))?, mean(step + 1)?))
}

fn print_plan(when: &str, plan: Option<&InForce>) {
    let Some(plan) = plan else { return };
    println!("  {when} ({} workers):", plan.workers.len());
    let row = |part: &account::WorkerPart| {
        let computes = part.computes.as_deref().unwrap_or("computes nothing").to_owned();
        vec![format!("    {}", part.worker), computes, part.keeps.clone()]
    };
    let text = table(&["", "", ""], plan.workers.iter().map(row));
    // The table's head is empty here.
    print!("{}", text.split_once('\n').map_or("", |(_, rows)| rows));
}
