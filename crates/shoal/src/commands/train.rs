//! `shoal train`: the whole road from a job file to a trained model.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use shoal_engine::identity::Identity;
use shoal_engine::{KindRate, Ledger, Run, RunEvent, StopReason};
use shoal_model::{Chain, Precision};
use shoal_plan::Planned;

use crate::assemble::{self, LocalDevice};
use crate::error::{CliError, Result};
use crate::job::{Job, bytes_text, duration_text};
use crate::machine;
use crate::run_folder::{CHOSEN, Known, RunFolder};
use crate::show::{Progress, banner, percent};

#[derive(clap::Args)]
pub struct Options {
    /// The job file
    job: PathBuf,
    /// Change a key of the job: --set train.steps=100
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Stop after this step, save, and exit as if interrupted
    #[arg(long, value_name = "STEP")]
    stop_at: Option<u64>,
    /// Run this program instead of the one compiled from the plan
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Print a summary of the run as JSON and no progress
    #[arg(long)]
    json: bool,
}

/// What a run came to.
pub struct Summary {
    pub steps: u64,
    pub loss: Option<f64>,
    pub eval_loss: Option<f64>,
    /// Of the last step, where samples are images.
    pub accuracy: Option<f64>,
    pub eval_accuracy: Option<f64>,
    pub tokens: u64,
    pub seconds: f64,
    pub reason: StopReason,
    pub predicted_bytes: u64,
    pub counted_bytes: u64,
    /// Beside what is counted, as forecast.
    pub process_bytes: u64,
    /// What a GPU's driver counts.
    pub driver_bytes: Option<u64>,
}

pub fn run(options: Options) -> Result {
    let job = Job::read(&options.job, &options.set)?;
    let stop = stop_on_signals()?;
    let summary = train(&job, options.stop_at, options.program.as_deref(), options.json, &stop)?;
    if options.json {
        let resident = machine::resident_peak_bytes();
        println!(
            "{}",
            json!({
                "run": job.run_folder, "steps": summary.steps, "loss": summary.loss, "eval_loss": summary.eval_loss,
                "accuracy": summary.accuracy, "eval_accuracy": summary.eval_accuracy,
                "tokens": summary.tokens, "seconds": summary.seconds,
                "finished": summary.reason == StopReason::Finished,
                "memory": {
                    "predicted_bytes": summary.predicted_bytes, "counted_bytes": summary.counted_bytes,
                    "process_bytes": summary.process_bytes, "resident_peak_bytes": resident,
                    "driver_bytes": summary.driver_bytes,
                },
            })
        );
        return Ok(());
    }
    let loss = summary.loss.map_or(String::new(), |loss| format!(", loss {loss:.4}"));
    let mut held_out = summary.eval_loss.map_or(String::new(), |loss| format!(", held-out {loss:.4}"));
    if let Some(accuracy) = summary.eval_accuracy {
        held_out += &format!(" ({} right)", percent(accuracy));
    }
    let folder = job.run_folder.display();
    match summary.reason {
        StopReason::Finished => println!(
            "finished {} steps in {}{loss}{held_out}; memory {} of {} predicted\nexport it with: shoal export {folder} DIR",
            summary.steps,
            duration_text(summary.seconds),
            bytes_text(summary.counted_bytes),
            bytes_text(summary.predicted_bytes),
        ),
        StopReason::Interrupted => {
            println!(
                "stopped after step {}{loss}{held_out}; the same command goes on from there",
                summary.steps
            );
        }
    }
    Ok(())
}

/// Set by the first Ctrl-C or SIGTERM; the second ends the process at once.
pub fn stop_on_signals() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    let handler = move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        eprintln!("finishing the step and saving; interrupt again to quit without saving");
    };
    ctrlc::set_handler(handler).map_err(|error| CliError::Said {
        sentence: format!("signals cannot be handled: {error}"),
        hint: None,
    })?;
    Ok(stop)
}

/// The plan a run began with, if it still fits: how much memory is free must not change what a resumed run
/// computes. A new run, or one that no longer fits, is planned afresh.
fn resume_plan(job: &Job, chain: &Chain, device: &LocalDevice, there: Option<&Identity>) -> Result<Planned> {
    let chosen = there.and_then(|there| there.free.get(CHOSEN)).map(|choice| assemble::chosen(job, choice));
    if let Some(preferences) = chosen
        && let Ok(planned) = assemble::plan(&Job { preferences, ..job.clone() }, chain, device)
    {
        return Ok(planned);
    }
    assemble::plan(job, chain, device)
}

/// Trains a job; also the demo's road.
pub fn train(
    job: &Job,
    stop_at: Option<u64>,
    program: Option<&Path>,
    quiet: bool,
    stop: &AtomicBool,
) -> Result<Summary> {
    let chain = job.chain();
    // Another job's folder is refused before anything is written into it.
    let known = Known::read(job)?;
    let device = LocalDevice::choose(job.device, job.memory_bytes, job.threads)?;
    let mut planned = resume_plan(job, &chain, &device, known.there.as_ref())?;
    if let Some(file) = program {
        planned = assemble::with_program(planned, &chain, file)?;
    }
    let folder = RunFolder::open(job, known, assemble::choice(&planned.plan), stop_at, quiet)?;
    let checkpoint = folder.found.as_ref();
    let resumed = checkpoint.map(|checkpoint| checkpoint.header().step);
    let peak = device.measure_rate(job.precision)?;
    if !quiet {
        eprintln!("{}", banner(job, &chain, &device, &folder.data.train, &planned, peak, resumed));
    }
    if !quiet && job.precision == Precision::Fp32 && device.precisions().contains(&"bf16") {
        eprintln!("note: train.precision = \"bf16\" is several times faster on this GPU");
    }
    let executor = assemble::executor(job, &chain, &device, &planned, checkpoint.is_none())?;
    // Only now: a model that cannot be read must not bind the folder to the job that named it.
    folder.identity.claim(&job.run_folder)?;
    let rates = vec![KindRate {
        kind: device.kind().to_owned(),
        flops: job.global_batch as f64 * chain.training_flops(job.sequence) as f64,
        flops_per_second: peak,
    }];
    let settings = assemble::run_settings(job, stop_at, rates);
    let predicted_bytes = planned.memory.total();
    let mut run = Run::new(
        settings,
        Ledger { identity: folder.identity, store: folder.store, keeps_books: true },
        executor,
        planned.plan,
        planned.program,
        folder.data.train,
        folder.data.eval,
        checkpoint,
    )?;
    let mut progress = Progress::new(job.steps, run.step(), quiet);
    let (mut loss, mut eval_loss, mut tokens) = (None, None, 0);
    let (mut accuracy, mut eval_accuracy) = (None, None);
    let started = std::time::Instant::now();
    let reason = run.go(stop, &mut |event| {
        if let RunEvent::Step(record) = &event {
            (loss, tokens) = (Some(record.loss), tokens + record.tokens);
            eval_loss = record.eval_loss.or(eval_loss);
            (accuracy, eval_accuracy) = (record.accuracy, record.eval_accuracy.or(eval_accuracy));
        }
        progress.event(&event);
    });
    progress.finish();
    let reason = reason?;
    Ok(Summary {
        steps: run.step(),
        loss,
        eval_loss,
        accuracy,
        eval_accuracy,
        tokens,
        seconds: started.elapsed().as_secs_f64(),
        reason,
        predicted_bytes,
        counted_bytes: run.executor().device().arena().peak(),
        process_bytes: device.process_bytes(),
        driver_bytes: run.executor().device().driver_bytes(),
    })
}
