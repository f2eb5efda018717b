//! A run's folder before its first step: whether it is this job's, that nobody else trains in it, its data prepared, and
//! the checkpoint to go on from.

use std::fs::File;
use std::path::Path;

use serde_json::{Value, json};
use shoal_engine::identity::Identity;
use shoal_state::checkpoint::{Checkpoint, Location, Store};

use crate::assemble::{self, JobData};
use crate::error::{CliError, Result};
use crate::job::{CLASSES_KEY, Job, bytes_text};

/// Where a run folder remembers how its batch was cut.
pub const CHOSEN: &str = "plan (chosen)";

/// A folder that is this job's, for as long as it is open.
pub struct RunFolder {
    pub data: JobData,
    pub identity: Identity,
    pub store: Store,
    /// The newest checkpoint that is whole.
    pub found: Option<Checkpoint>,
    /// Keeps a second process out.
    _lock: File,
}

/// What is known of a run folder before anything is written into it.
pub struct Known {
    pub there: Option<Identity>,
    config: Value,
}

impl Known {
    /// Refuses another job's folder.
    pub fn read(job: &Job) -> Result<Known> {
        let config = job.model.write(job.original_config.as_ref());
        let there = Identity::read(&job.run_folder)?;
        if let Some(there) = &there {
            let fingerprint = there.fixed.get("data.train (its content)").and_then(|value| value.as_str());
            let keys = job.fixed_keys(fingerprint.unwrap_or_default());
            Identity::new(keys, job.free_keys(), config.clone()).compare(there, &job.run_folder)?;
        }
        Ok(Known { there, config })
    }
}

impl RunFolder {
    /// Opens it, or makes it; `chosen` is how the plan cuts the batch.
    pub fn open(
        job: &Job,
        known: Known,
        chosen: Value,
        stop_at: Option<u64>,
        quiet: bool,
    ) -> Result<RunFolder> {
        let Known { there, mut config } = known;
        std::fs::create_dir_all(&job.run_folder).map_err(CliError::at(&job.run_folder))?;
        let _lock = lock(&job.run_folder)?;
        let data = assemble::open_data(job, &data_folder(job), &mut preparing(quiet))?;
        let mut free = job.free_keys();
        free.insert(CHOSEN.into(), chosen);
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
        let store = Store::open_at(&job.checkpoints)?;
        let found = store.latest()?.map(|(checkpoint, skipped)| {
            skipped.iter().for_each(|skipped| eprintln!("warning: {skipped}"));
            checkpoint
        });
        if let Some(checkpoint) = &found {
            assert_own(job, &identity, checkpoint)?;
            assert_ahead(job, checkpoint.header().step, stop_at)?;
        }
        Ok(RunFolder { data, identity, store, found, _lock })
    }
}

/// Where a run's prepared data lies.
pub fn data_folder(job: &Job) -> std::path::PathBuf {
    job.run_folder.join("data")
}

/// Refuses another job's checkpoints: a folder says itself whose it is, an object store does not.
fn assert_own(job: &Job, identity: &Identity, checkpoint: &Checkpoint) -> Result {
    let place = &job.checkpoints;
    if matches!(place, Location::Objects { .. }) && checkpoint.header().job != identity.fingerprint() {
        return Err(CliError::said(
            format!("{}: the checkpoints there are another job's", place.shown()),
            "choose another place with checkpoint.to, or undo the change to the job",
        ));
    }
    Ok(())
}

/// Refuses to go on from a step that lies past the end.
fn assert_ahead(job: &Job, step: u64, stop_at: Option<u64>) -> Result {
    let ends = [("train.steps =", Some(job.steps)), ("--stop-at", stop_at)];
    for (name, end) in ends.into_iter().filter_map(|(name, end)| Some((name, end?))) {
        if step > end {
            let folder = job.run_folder.display();
            return Err(CliError::said(
                format!("{folder}: this run is already at step {step}, past {name} {end}"),
                "raise it, or choose another folder with checkpoint.to",
            ));
        }
    }
    Ok(())
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
