//! A fleet of this lab's own: a controller, and a worker for each machine that is there, which plays its device.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use shoal_control::controller::state::Class;
use shoal_service::history::Noted;
use shoal_service::receipt::ReceiptView;
use shoal_service::view::JobView;

use super::{DEADLINE_SECONDS, Scene};
use crate::error::{CliError, Result};
use crate::live::description::Description;
use crate::live::own_fleet::{OwnFleet, Processes};
use crate::live::played::{Cue, Part};
use crate::machine;

pub struct Stage {
    fleet: OwnFleet,
    folder: PathBuf,
    part: Part,
    /// Workers' names by their machines: another for each that comes.
    workers: BTreeMap<String, String>,
    started: usize,
    /// The last record that was read.
    revision: u64,
}

impl Stage {
    pub fn open(scene: &Scene) -> Result<Stage> {
        let folder = scene.job.run_folder.join("lab");
        let absolute = |path: &Path| std::path::absolute(path).map_err(CliError::at(path));
        let profile = scene.on_fleet.profile.as_deref().map(absolute).transpose()?;
        let deadline = scene.options.deadline.unwrap_or(DEADLINE_SECONDS);
        let mut told = vec!["--deadline".to_owned(), deadline.to_string()];
        told.extend(scene.on_fleet.shape.iter().flat_map(|shape| ["--shape".to_owned(), shape.clone()]));
        let text = |path: &PathBuf| path.to_string_lossy().into_owned();
        told.extend(profile.iter().flat_map(|profile| ["--profile".to_owned(), text(profile)]));
        let part = Part {
            fleet: absolute(&scene.options.fleet)?,
            profile,
            machine: 0,
            host_memory_bytes: machine::available_bytes(),
            stretch: scene.stretch,
            plain: scene.options.plain,
        };
        let fleet = OwnFleet::start(&folder, &Processes::default(), &told)?;
        Ok(Stage { fleet, folder, part, workers: BTreeMap::new(), started: 0, revision: 0 })
    }

    /// A machine comes, like one of the fleet's.
    pub fn add(&mut self, machine: &str, like: usize) -> Result {
        self.started += 1;
        let name = format!("lab-{}", self.started);
        let path = self.folder.join(format!("{name}.json"));
        let part = Part { machine: like, ..self.part.clone() };
        let text = serde_json::to_string(&part).map_err(|error| CliError::at(&path)(error.into()))?;
        std::fs::write(&path, text).map_err(CliError::at(&path))?;
        let path = std::path::absolute(&path).map_err(CliError::at(&path))?;
        let given = ["--machine", &name, "--plays", &path.to_string_lossy()];
        self.fleet.join(&name, &given)?;
        self.workers.insert(machine.to_owned(), name);
        Ok(())
    }

    /// A machine is taken away, without notice.
    pub fn kill(&mut self, machine: &str) -> Result {
        self.workers.remove(machine).map_or(Ok(()), |name| self.fleet.kill(&name))
    }

    /// A machine's own work takes so many percent of what it should from now on.
    pub fn pace(&self, machine: &str, percent: u32) -> Result {
        let line = serde_json::to_string(&Cue::Pace(percent)).expect("a cue is JSON");
        self.workers.get(machine).map_or(Ok(()), |name| self.fleet.tell(name, &line))
    }

    pub fn count(&self) -> usize {
        self.workers.len()
    }

    /// An error where a process has ended by itself.
    pub fn check(&self) -> Result {
        self.fleet.check()
    }

    /// Until all that were started have joined.
    pub fn await_all(&self) -> Result {
        self.fleet.await_workers(self.workers.len())
    }

    pub fn submit(&self, scene: &Scene) -> Result<u64> {
        let description = Description::read(&scene.options.job, &scene.options.set)?;
        Ok(self.fleet.client.submit(&description.spec(scene.job, Class::Foreground, 0))?)
    }

    pub fn job(&self, job: u64) -> Result<JobView> {
        Ok(self.fleet.client.job(job)?)
    }

    pub fn receipt(&self, job: u64) -> Result<ReceiptView> {
        Ok(self.fleet.client.receipt(job)?)
    }

    /// What was recorded since the last time.
    pub fn news(&mut self) -> Result<Vec<Noted>> {
        let mut all = Vec::new();
        loop {
            let events = self.fleet.client.events(self.revision, false)?.events;
            let Some(last) = events.last() else { return Ok(all) };
            self.revision = last.revision;
            all.extend(events);
        }
    }
}
