//! A job on a fleet: its files read, its plan searched, its step described.

use std::path::PathBuf;

use serde_json::json;
use shoal_fleet::{Costs, Fleet, Profile};
use shoal_model::Chain;
use shoal_plan::memory::MemoryForecast;
use shoal_plan::{Plan, StepShape};
use shoal_planner::auto::{self, Found, Shape};
use shoal_sim::Simulated;

use crate::assemble::step_shape;
use crate::error::{CliError, Result};
use crate::job::{Job, bytes_text};
use crate::show::{percent, short};
use crate::timeline::time_text;

#[derive(clap::Args)]
pub struct FleetOptions {
    /// The fleet: its machines, devices, links and prices (docs/fleet.md)
    #[arg(long, value_name = "FILE")]
    pub fleet: Option<PathBuf>,
    /// What layers were measured to take, as `shoal profile` wrote it; other kinds of devices are estimated
    #[arg(long, value_name = "FILE", requires = "fleet")]
    profile: Option<PathBuf>,
    /// Search one shape of plan only
    #[arg(long, value_name = "SHAPE", requires = "fleet")]
    shape: Option<String>,
}

/// A fleet and what layers cost on it.
pub struct OnFleet {
    pub fleet: Fleet,
    pub costs: Costs,
}

impl FleetOptions {
    pub fn read(&self, job: &Job, chain: &Chain) -> Result<OnFleet> {
        let Some(file) = &self.fleet else {
            return Err(CliError::said("no fleet is named", "name one with --fleet FILE: docs/fleet.md"));
        };
        let mut fleet = Fleet::read(file)?;
        if let Some(profile) = &self.profile {
            fleet.use_measured_links(&Profile::read(profile)?);
        }
        let costs = self.costs(job, chain, &fleet)?;
        Ok(OnFleet { fleet, costs })
    }

    /// What layers cost on a fleet.
    pub fn costs(&self, job: &Job, chain: &Chain, fleet: &Fleet) -> Result<Costs> {
        let profile = self.profile.as_deref().map(Profile::read).transpose()?;
        Ok(Costs::new(chain, fleet, profile.as_ref(), job.precision, job.sequence)?)
    }

    fn shapes(&self) -> Result<Vec<Shape>> {
        let Some(name) = self.shape.as_deref().filter(|name| *name != "auto") else {
            return Ok(Shape::ALL.to_vec());
        };
        let names: Vec<&str> = Shape::ALL.iter().map(|shape| shape.name()).collect();
        Shape::named(name).map(|shape| vec![shape]).ok_or_else(|| {
            let what = format!("--shape: there is no shape \"{name}\"");
            CliError::said(what, format!("the shapes are auto, {}", names.join(", ")))
        })
    }

    /// The best plan.
    pub fn search(&self, job: &Job, chain: &Chain, on: &OnFleet) -> Result<Found> {
        let step: StepShape = step_shape(job);
        auto::plan(chain, step, &on.fleet, &on.costs, &self.shapes()?)
            .map_err(|error| CliError::Said { sentence: error.to_string(), hint: error.hint() })
    }
}

/// A step as people read it.
pub struct Described<'a> {
    pub job: &'a Job,
    pub on: &'a OnFleet,
    pub plan: &'a Plan,
    pub simulated: &'a Simulated,
    pub memory: &'a [MemoryForecast],
}

impl Described<'_> {
    fn dollars_per_step(&self) -> f64 {
        self.on.fleet.dollars_per_hour() * self.simulated.seconds / 3600.0
    }

    /// Kinds of devices whose times nobody measured.
    fn estimated(&self) -> Vec<&str> {
        self.on.fleet.kinds().into_iter().filter(|kind| self.on.costs.estimated(kind)).collect()
    }

    pub fn json(&self) -> serde_json::Value {
        let devices = self.plan.devices.iter().zip(&self.simulated.devices).zip(self.memory);
        let rows = devices.map(|((device, time), memory)| {
            json!({
                "name": device.name, "seconds": time, "memory_bytes": memory.total(),
                "budget_bytes": device.budget_bytes, "host_bytes": memory.host, "disk_bytes": memory.disk,
            })
        });
        json!({
            "plan_id": self.plan.id(),
            "step_seconds": self.simulated.seconds,
            "dollars_per_step": self.dollars_per_step(),
            "estimated_kinds": self.estimated(),
            "devices": rows.collect::<Vec<_>>(),
        })
    }

    pub fn print(&self) {
        let (plan, seconds) = (self.plan, self.simulated.seconds);
        let rows = (plan.global_batch * plan.sequence) as f64 / seconds;
        let what = if plan.sequence == 1 { "images" } else { "rows" };
        println!(
            "plan {} for {} on {} devices: {} a step, {} {what} a second, ${:.5} a step",
            plan.id(),
            self.job.name,
            plan.devices.len(),
            time_text(seconds),
            short(rows),
            self.dollars_per_step()
        );
        let estimated = self.estimated();
        if !estimated.is_empty() {
            println!("estimated from public figures, not measured: {}", estimated.join(", "));
        }
        self.print_devices();
    }

    fn print_devices(&self) {
        let (plan, seconds) = (self.plan, self.simulated.seconds);
        let width = plan.devices.iter().map(|device| device.name.len()).max().unwrap_or(0).max(6);
        println!(
            "{:<width$} {:>10} {:>12} {:>9} {:>8}  memory",
            "device", "computing", "recomputing", "updating", "idle"
        );
        let line = |index: usize| {
            let (time, memory) = (&self.simulated.devices[index], &self.memory[index]);
            let beside = match memory.host {
                0 => String::new(),
                host => format!(", {} on the host", bytes_text(host)),
            };
            format!(
                "{:>10} {:>12} {:>9} {:>8}  {} of {}{beside}",
                percent(time.computing / seconds),
                percent(time.recomputing / seconds),
                percent(time.updating / seconds),
                percent(time.idle / seconds),
                bytes_text(memory.total()),
                bytes_text(plan.devices[index].budget_bytes),
            )
        };
        // Devices that fare alike are shown once.
        let lines: Vec<String> = (0..plan.devices.len()).map(line).collect();
        let mut index = 0;
        while index < lines.len() {
            let same = lines[index..].iter().take_while(|line| **line == lines[index]).count();
            let more = if same > 1 { format!("  (and {} more)", same - 1) } else { String::new() };
            println!("{:<width$} {}{more}", plan.devices[index].name, lines[index]);
            index += same;
        }
    }
}

/// The layers, with who computes how much of each; rows that read alike are shown once.
pub fn print_layers(plan: &Plan) {
    let width = plan.layers.iter().map(|row| row.layer.len()).max().unwrap_or(0) + 6;
    println!("{:<width$} computed by", "layer");
    let describe = |index: usize| {
        let compute = &plan.layers[index].compute;
        let shares: Vec<String> = compute
            .iter()
            .take(4)
            .map(|compute| {
                let samples: usize = compute.micro_batches.iter().map(|samples| samples.count()).sum();
                let batches = compute.micro_batches.len();
                let name = &plan.devices[compute.device].name;
                format!("{name}: {samples} samples in {batches} ({:?})", compute.activations)
            })
            .collect();
        let more = compute.len().saturating_sub(shares.len());
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        shares.join(", ") + &more
    };
    let lines: Vec<String> = (0..plan.layers.len()).map(describe).collect();
    let mut index = 0;
    while index < lines.len() {
        let same = lines[index..].iter().take_while(|line| **line == lines[index]).count();
        let name = &plan.layers[index].layer;
        let shown = if same > 1 { format!("{name} (x{same})") } else { name.clone() };
        println!("{shown:<width$} {}", lines[index]);
        index += same;
    }
}
