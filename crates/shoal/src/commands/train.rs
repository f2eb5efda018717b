//! `shoal train`: the whole road from a job file to a trained model.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use shoal_engine::identity::Identity;
use shoal_engine::{KindRate, Ledger, Run, RunEvent, RunSettings, StopReason};
use shoal_model::{Chain, Precision};
use shoal_plan::Planned;
use shoal_state::checkpoint::Store;

use crate::assemble::{self, LocalDevice};
use crate::error::{CliError, Result};
use crate::job::{CLASSES_KEY, Job, bytes_text, duration_text};
use crate::machine;
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
fn stop_on_signals() -> Result<Arc<AtomicBool>> {
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

/// Keeps a second process out of the run folder for as long as it lives.
fn lock(folder: &Path) -> Result<File> {
    let path = folder.join("lock");
    let file = File::create(&path).map_err(CliError::at(&path))?;
    file.try_lock().map_err(|_| {
        CliError::said(
            format!("{}: another process is training in this run folder", folder.display()),
            "wait for it, stop it, or choose another folder with checkpoint.to",
        )
    })?;
    Ok(file)
}

/// Where a run folder remembers how its batch was cut.
const CHOSEN: &str = "plan (chosen)";

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
    let mut config = job.model.write(job.original_config.as_ref());
    // Another job's folder is refused before anything is written into it.
    let there = Identity::read(&job.run_folder)?;
    if let Some(there) = &there {
        let fingerprint = there.fixed.get("data.train (its content)").and_then(|value| value.as_str());
        let keys = job.fixed_keys(fingerprint.unwrap_or_default());
        Identity::new(keys, job.free_keys(), config.clone()).compare(there, &job.run_folder)?;
    }
    let device = LocalDevice::choose(job.device, job.memory_bytes, job.threads)?;
    let mut planned = resume_plan(job, &chain, &device, there.as_ref())?;
    if let Some(file) = program {
        planned = assemble::with_program(planned, &chain, file)?;
    }
    std::fs::create_dir_all(&job.run_folder).map_err(CliError::at(&job.run_folder))?;
    let _lock = lock(&job.run_folder)?;
    let data = assemble::open_data(job, &job.run_folder.join("data"), &mut preparing(quiet))?;
    let mut free = job.free_keys();
    free.insert(CHOSEN.into(), assemble::choice(&planned.plan));
    if let Some(names) = data.train.class_names() {
        free.insert(CLASSES_KEY.into(), json!(names));
        job.model.name_classes(names, &mut config);
    }
    let identity = Identity::new(job.fixed_keys(&data.train.fingerprint()), free, config);
    if let Some(there) = &there {
        identity.compare(there, &job.run_folder)?;
        for change in identity.changes(there, &["train.optimizer", "train.schedule", "train.precision"]) {
            eprintln!("note: {change}");
        }
    }
    let store = Store::open(&job.run_folder.join("checkpoints"))?;
    let found = store.latest()?;
    if let Some((_, skipped)) = &found {
        for skipped in skipped {
            eprintln!("warning: {skipped}");
        }
    }
    let checkpoint = found.as_ref().map(|(checkpoint, _)| checkpoint);
    let resumed = checkpoint.map(|checkpoint| checkpoint.manifest().step);
    let ends = [("train.steps =", Some(job.steps)), ("--stop-at", stop_at)];
    for (name, end) in ends.into_iter().filter_map(|(name, end)| Some((name, end?))) {
        if let Some(step) = resumed.filter(|step| *step > end) {
            return Err(CliError::said(
                format!(
                    "{}: this run is already at step {step}, past {name} {end}",
                    job.run_folder.display()
                ),
                "raise it, or choose another folder with checkpoint.to",
            ));
        }
    }
    let peak = device.measure_rate(job.precision)?;
    if !quiet {
        eprintln!("{}", banner(job, &chain, &device, &data.train, &planned, peak, resumed));
    }
    if !quiet && job.precision == Precision::Fp32 && device.precisions().contains(&"bf16") {
        eprintln!("note: train.precision = \"bf16\" is several times faster on this GPU");
    }
    let opened = device.open(job.precision, job.deterministic)?;
    let executor = assemble::executor(job, &chain, opened, &job.optimizer, checkpoint.is_none())?;
    // Only now: a model that cannot be read must not bind the folder to the job that named it.
    identity.claim(&job.run_folder)?;
    let settings = RunSettings {
        steps: job.steps,
        stop_at,
        seed: job.seed,
        shuffle: job.shuffle,
        optimizer: job.optimizer,
        schedule: job.schedule.clone(),
        folder: job.run_folder.clone(),
        checkpoint_every: job.checkpoint_every,
        checkpoints_kept: job.checkpoints_kept,
        eval_every: job.eval.as_ref().map(|(_, every)| *every),
        rates: vec![KindRate {
            kind: device.kind().to_owned(),
            flops: job.global_batch as f64 * chain.training_flops(job.sequence) as f64,
            flops_per_second: peak,
        }],
        predicted_seconds: None,
        dollars_per_hour: None,
    };
    let predicted_bytes = planned.memory.total();
    let mut run = Run::new(
        settings,
        Some(Ledger { identity, store }),
        executor,
        planned.plan,
        planned.program,
        data.train,
        data.eval,
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

/// Says how far the data's preparation is, now and then.
fn preparing(quiet: bool) -> impl FnMut(u64, u64) {
    let mut last = std::time::Instant::now();
    move |done, total| {
        if !quiet && total > 0 && last.elapsed().as_secs() >= 2 {
            last = std::time::Instant::now();
            let share = 100.0 * done as f64 / total as f64;
            eprintln!("preparing the data: {share:.0}% of {}", bytes_text(total));
        }
    }
}
