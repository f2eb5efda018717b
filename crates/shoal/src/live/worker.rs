//! A worker's device as plans know it, and a job's parts on it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender};
use std::time::Duration;

use shoal_control::message::JobId;
use shoal_control::worker::EngineCommand;
use shoal_crew::about::DeviceAbout;
use shoal_crew::assembly::Initial;
use shoal_crew::held_out::HeldOut;
use shoal_crew::{About, Assembled, Assembler, Crew, Outlets, StepDone};
use shoal_engine::identity::Identity as RunIdentity;
use shoal_engine::{EngineError, Tiers};
use shoal_fleet::catalogue;
use shoal_model::Chain;
use shoal_net::Settings;
use shoal_net::identity::Identity;
use shoal_service::wire::StepLine;
use shoal_service::worker_driver::{Engine, Happening};
use shoal_state::checkpoint::Store;

use super::description::{Description, eval_every_steps};
use super::loopback;
use super::played::Played;
use super::rate::{Found, find_out};
use super::within::Within;
use crate::assemble::{self, JobData, LocalDevice};
use crate::error::{CliError, Result};
use crate::job::Job;
use crate::machine;

/// Shares of a machine's free memory where nothing is said: for what is computed, and for what is kept beside.
const PROCESSOR_SHARE: f64 = 0.6;
const HOST_SHARE: f64 = 0.3;
/// What says in a run's folder whose it is.
const RUN_FILE: &str = "run.json";
/// A GPU waits for each instruction of a step that is timed, so few are.
const GPU_TIMED_EVERY: u64 = 20;

/// What this machine gives to the fleet.
pub struct Given {
    pub device: LocalDevice,
    pub host_memory_bytes: u64,
    /// For what this worker keeps: prepared data, and state where it may lie on disk.
    pub folder: PathBuf,
    /// Where jobs' files may lie.
    pub within: Within,
    /// Where it plays another device than it is.
    pub played: Option<Played>,
}

impl Given {
    pub fn new(device: LocalDevice, memory: Option<u64>, host_memory: Option<u64>, folder: &Path) -> Given {
        let available = machine::available_bytes() as f64;
        let mut device = device;
        if device.gpu.is_none() && memory.is_none() {
            device.budget_bytes = (available * PROCESSOR_SHARE) as u64;
        }
        let host_memory_bytes = host_memory.unwrap_or((available * HOST_SHARE) as u64);
        let (folder, within) = (folder.to_owned(), Within::anywhere());
        Given { device, host_memory_bytes, folder, within, played: None }
    }

    /// What a device that is not here would give.
    pub fn playing(played: Played, folder: &Path) -> Given {
        let (device, host_memory_bytes) = (played.device(), played.host_memory_bytes());
        let (folder, within) = (folder.to_owned(), Within::anywhere());
        Given { device, host_memory_bytes, folder, within, played: Some(played) }
    }

    /// What it says of itself to others, whom it meets as `peers` has it.
    pub fn about(
        &self,
        (name, identity): (&str, &Identity),
        address: SocketAddr,
        machine: String,
        peers: &Settings,
    ) -> Result<About> {
        let kind = match self.device.gpu {
            Some(_) => catalogue::name(self.device.kind()),
            None => catalogue::CPU.to_owned(),
        };
        let link = || loopback::measured(identity, name, peers);
        // What plays another device is as quick as that one.
        let found = match self.played {
            None => find_out(&self.device, &self.folder, link)?,
            Some(_) => Found::default(),
        };
        let device = DeviceAbout {
            kind,
            memory_bytes: self.device.budget_bytes,
            workspace_bytes: self.device.offer().workspace_bytes,
            threads: self.device.threads,
            matrix_flops_per_second: found.matrix_flops_per_second,
            precisions: self.device.precisions().into_iter().map(str::to_owned).collect(),
        };
        let mut about = About {
            name: name.to_owned(),
            address,
            machine,
            device,
            host_memory_bytes: self.host_memory_bytes,
            disk_bytes: None,
            network: None,
            cores: Some(machine::cores()),
            within_machine: found.within_machine,
            dollars_per_hour: 0.0,
            spot: false,
            drills: false,
            stretch: None,
        };
        self.played.iter().for_each(|played| played.dress(&mut about));
        Ok(about)
    }

    pub fn assembler(self) -> Assembler {
        Arc::new(move |description| Ok(self.assembled(description)?))
    }

    fn assembled(&self, description: &str) -> Result<Assembled> {
        let job = Description::parse(description)?.job(&self.within)?;
        let chain = job.chain();
        self.device.assert_takes(&job)?;
        // Each worker prepares its own: several on one machine do not write into each other's files.
        let own = self.folder.join("jobs").join(shoal_plan::table::short_hash(description.as_bytes()));
        let JobData { train: data, eval } = assemble::open_data(&job, &own.join("data"), &mut |_, _| {})?;
        let identity = identity(&job, &data.fingerprint(), &self.folder)?;
        let threads = self.device.threads;
        let device = self.device.open(job.precision, job.deterministic)?;
        let tiers = Tiers::around(device, "host", threads, self.host_memory_bytes, &own.join("state"))?;
        let store = Store::open_existing_at(&job.checkpoints)?;
        Ok(Assembled {
            data,
            held_out: eval.map(|data| HeldOut { data, every_steps: eval_every_steps(&job) }),
            shuffle: job.shuffle,
            seed: job.seed,
            steps: job.steps,
            optimizer: job.optimizer,
            schedule: job.schedule.clone(),
            tiers,
            replay: job.graphs.unwrap_or_else(|| assemble::usual_replay(&chain)),
            paced: self.played.as_ref().map(|played| played.paced(&job, &chain)).transpose()?,
            timed_every: if self.device.gpu.is_some() { GPU_TIMED_EVERY } else { 1 },
            store: Some(store),
            fingerprint: identity.fingerprint(),
            initial: initial(job, chain.clone()),
            chain,
        })
    }
}

/// What the run folder calls the job, so that what is trained can be exported from there. Workers write the same.
fn identity(job: &Job, data_fingerprint: &str, worker: &Path) -> Result<RunIdentity> {
    let config = job.model.write(job.original_config.as_ref());
    let identity = RunIdentity::new(job.fixed_keys(data_fingerprint), job.free_keys(), config);
    match RunIdentity::read(&job.run_folder)? {
        Some(there) => identity.compare(&there, &job.run_folder)?,
        None => announce(&identity, &job.run_folder, worker)?,
    }
    Ok(identity)
}

/// Many may do so at once, and any of them may be killed: each writes where nobody else does, and what is whole takes its
/// place in one move.
fn announce(identity: &RunIdentity, run_folder: &Path, worker: &Path) -> Result {
    let own = shoal_plan::table::short_hash(worker.as_os_str().as_encoded_bytes());
    let aside = run_folder.join(format!("run.json.{own}"));
    identity.claim(&aside)?;
    let file = aside.join(RUN_FILE);
    std::fs::rename(&file, run_folder.join(RUN_FILE)).map_err(CliError::at(&file))?;
    std::fs::remove_dir(&aside).map_err(CliError::at(&aside))
}

fn initial(job: Job, chain: Chain) -> Initial {
    Box::new(move |spec, out| {
        let set = assemble::set_initial(&job, &chain, |set| Ok(set(spec, out)?));
        set.map_err(|error| match error {
            CliError::Engine(error) => error,
            other => {
                let source = std::io::Error::other(other.to_string());
                EngineError::File { path: job.base.clone(), source }
            }
        })
    })
}

/// The crew as a worker's thread commands it.
pub struct Hired(pub Crew);

impl Engine for Hired {
    fn command(&mut self, job: JobId, command: EngineCommand) {
        self.0.command(job, command);
    }
}

/// Between two looks for lines and sentences while no event comes.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Tells the worker's thread what the crew says: lines of steps before the events that tell of them.
pub fn pass_on(outlets: Outlets, happenings: Sender<Happening>) {
    std::thread::spawn(move || {
        loop {
            let event = outlets.events.recv_timeout(LOOK_EVERY);
            for StepDone { job, record, .. } in outlets.steps.try_iter() {
                let step = record.step;
                if let Ok(serde_json::Value::Object(record)) = serde_json::to_value(record) {
                    let _ = happenings.send(Happening::Line { job, line: StepLine { step, record } });
                }
            }
            for notice in outlets.notices.try_iter() {
                eprintln!("job {}: {}", notice.job.0, notice.sentence);
                if notice.fatal {
                    let _ = happenings.send(Happening::Quit);
                }
            }
            let told = match event {
                Ok((job, event)) => happenings.send(Happening::Engine { job, event }),
                Err(RecvTimeoutError::Timeout) => Ok(()),
                Err(RecvTimeoutError::Disconnected) => return,
            };
            if told.is_err() {
                return;
            }
        }
    });
}
