//! A worker that plays a device of a fleet file on this machine's processor: what it computes is real, each instruction lasts as
//! long as it would there, and what it sends is held to that machine's network. `shoal lab` starts such workers.

use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shoal_crew::assembly::Paced;
use shoal_crew::{About, Slowness};
use shoal_fleet::pace::stretched;
use shoal_fleet::{Costs, Fleet, Profile};
use shoal_model::Chain;
use shoal_net::settings::tree_bytes_max;
use shoal_net::{LinkShape, Shape};
use shoal_plan::{Layout, Plan, Program};
use shoal_planner::GPU_PROCESS_BYTES;
use shoal_sim::FleetWorld;

use crate::assemble::LocalDevice;
use crate::error::{CliError, Result};
use crate::in_a_box::pace::durations;
use crate::job::Job;

/// What a worker is to play, in a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    pub fleet: PathBuf,
    pub profile: Option<PathBuf>,
    /// Its machine, by its place in the fleet; it has one device.
    pub machine: usize,
    /// The most that may be taken of this machine's memory for its host's. All machines of a kind are told the same: those that
    /// differ are no longer alike.
    pub host_memory_bytes: u64,
    /// Everything lasts so many times longer.
    pub stretch: f64,
    /// Peers are known by their addresses alone.
    pub plain: bool,
}

/// What its starter says to it, a line each. When there is nobody any more to say something, it ends.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cue {
    /// What its work takes from now on, in percent of what it should.
    Pace(u32),
}

pub struct Played {
    pub part: Part,
    fleet: Fleet,
    profile: Option<Profile>,
}

impl Played {
    pub fn read(file: &Path) -> Result<Played> {
        let text = std::fs::read_to_string(file).map_err(CliError::at(file))?;
        let part: Part = serde_json::from_str(&text).map_err(|error| {
            let what = format!("{}: it is no part to play: {error}", file.display());
            CliError::said(what, "`shoal lab` starts such workers itself")
        })?;
        let profile = part.profile.as_deref().map(Profile::read).transpose()?;
        let mut fleet = Fleet::read(&part.fleet)?;
        profile.iter().for_each(|profile| fleet.use_measured_links(profile));
        let is_there = fleet.nodes.get(part.machine).is_some_and(|node| node.devices.len() == 1);
        if !is_there {
            let what = format!("{}: no machine {} with one device", part.fleet.display(), part.machine);
            return Err(CliError::said(what, "only machines of one device can be played so"));
        }
        Ok(Played { part, fleet, profile })
    }

    /// The processor's memory is what the device's would be.
    pub fn device(&self) -> LocalDevice {
        let node = &self.fleet.nodes[self.part.machine];
        let device = &self.fleet.devices[node.devices.start];
        LocalDevice::new(Some(device.memory_bytes.saturating_sub(GPU_PROCESS_BYTES)), Some(1))
    }

    pub fn host_memory_bytes(&self) -> u64 {
        self.fleet.nodes[self.part.machine].host_memory_bytes.min(self.part.host_memory_bytes)
    }

    /// Says of a worker that it is what it plays.
    pub fn dress(&self, about: &mut About) {
        let node = &self.fleet.nodes[self.part.machine];
        let device = &self.fleet.devices[node.devices.start];
        about.device.kind.clone_from(&device.kind);
        about.network = Some((node.network.bytes_per_second, node.network.seconds_latency));
        (about.dollars_per_hour, about.spot) = (device.dollars_per_hour, device.spot);
        about.stretch = Some(self.part.stretch);
    }

    /// What everything it sends is held to.
    pub fn shape(&self) -> Shape {
        let network = &self.fleet.nodes[self.part.machine].network;
        let rate = network.bytes_per_second / self.part.stretch;
        let latency = Duration::from_secs_f64(network.seconds_latency * self.part.stretch);
        Shape {
            egress_bytes_per_s: Some(rate),
            other_links: LinkShape { bytes_per_s: Some(rate), latency },
            ..Shape::default()
        }
    }

    /// What is small on the slowest network of the fleet, which everyone knows by the same file.
    pub fn tree_bytes_max(&self) -> usize {
        let rates = self.fleet.nodes.iter().map(|node| node.network.bytes_per_second);
        tree_bytes_max(rates.fold(f64::INFINITY, f64::min) / self.part.stretch)
    }

    /// How long a job's instructions last there.
    pub fn paced(&self, job: &Job, chain: &Chain) -> Result<Paced> {
        let costs_of = {
            let (chain, profile) = (chain.clone(), self.profile.clone());
            let (precision, sequence) = (job.precision, job.sequence);
            move |fleet: &Fleet| Costs::new(&chain, fleet, profile.as_ref(), precision, sequence)
        };
        let (fleet, machine, stretch) = (self.fleet.clone(), self.part.machine, self.part.stretch);
        costs_of(&fleet.of_copies(machine, &["it".to_owned()]))?;
        let chain = chain.clone();
        let lasting = move |plan: &Plan, program: &Program| {
            // What its own work takes depends on nobody else, so all may be taken for machines like this one.
            let names: Vec<String> = plan.devices.iter().map(|device| device.name.clone()).collect();
            let fleet = fleet.of_copies(machine, &names);
            let costs = costs_of(&fleet).expect("one machine has costs, so its copies have");
            let (fleet, costs) = stretched(&fleet, &costs, stretch);
            let layout = Layout::new(plan, &chain);
            let world = FleetWorld::new(&fleet, &costs, &layout);
            durations(program, &world).into_iter().map(Duration::from_secs_f64).collect()
        };
        Ok(Arc::new(lasting))
    }
}

/// Hears cues until there are no more; then whoever started it is gone, and this process ends.
pub fn follow_cues(slowness: Arc<Slowness>) {
    const FOR_GOOD: Duration = Duration::from_secs(1 << 30);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(std::io::Result::ok) {
            if let Ok(Cue::Pace(percent)) = serde_json::from_str(&line) {
                slowness.begin(f64::from(percent.max(1)) / 100.0, FOR_GOOD);
            }
        }
        std::process::exit(0);
    });
}
