//! `shoal simulate`: one step of a plan on a virtual clock. The programs are those that the engine would run.

use std::path::PathBuf;

use serde_json::json;
use shoal_model::Chain;
use shoal_plan::{Layout, Plan, Program, Purpose, compile_paced, memory, verify_all};
use shoal_sim::{FleetWorld, Jitter, Settings, Simulated, simulate};

use super::plan::FleetOptions;
use crate::error::{CliError, Result};
use crate::job::{Job, bytes_text};
use crate::show::{percent, short};
use crate::timeline::{self, time_text};

#[derive(clap::Args)]
pub struct Options {
    /// The job file
    job: PathBuf,
    /// Change a key of the job: --set train.global_batch=64
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    #[command(flatten)]
    on: FleetOptions,
    /// A table that `shoal plan --table` wrote; without it the best is searched
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Let every instruction take up to so much longer: 0.1 is a tenth
    #[arg(long, default_value_t = 0.0)]
    jitter: f64,
    /// Which random slowness
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Write a picture of the step, as SVG
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(options: Options) -> Result {
    let job = Job::read(&options.job, &options.set)?;
    if !(0.0..=100.0).contains(&options.jitter) {
        return Err(CliError::said("--jitter is between 0 and 100", "leave it out for none"));
    }
    let chain = job.chain();
    let plan = match &options.table {
        Some(path) => read_table(path, &chain)?,
        None => options.on.plan(&job, &chain)?,
    };
    let played = Played::new(&options, &job, &chain, &plan)?;
    if let Some(path) = &options.picture {
        let names: Vec<String> = plan.devices.iter().map(|device| device.name.clone()).collect();
        let picture = timeline::svg(&played.programs, &played.simulated, &names);
        std::fs::write(path, picture).map_err(CliError::at(path))?;
        eprintln!("wrote {}", path.display());
    }
    match options.json {
        true => println!("{}", played.json(&plan)),
        false => played.print(&job, &plan),
    }
    Ok(())
}

fn read_table(path: &PathBuf, chain: &Chain) -> Result<Plan> {
    let text = std::fs::read_to_string(path).map_err(CliError::at(path))?;
    let refused = |what: String| {
        let hint = "write it with `shoal plan JOB.toml --fleet FILE --table FILE` for the same job";
        CliError::said(format!("{}: {what}", path.display()), hint)
    };
    let plan: Plan = serde_json::from_str(&text).map_err(|error| refused(error.to_string()))?;
    plan.check(chain).map_err(|error| refused(error.to_string()))?;
    Ok(plan)
}

/// A step, and what came of it.
struct Played {
    programs: Vec<Program>,
    simulated: Simulated,
    memory: Vec<memory::MemoryForecast>,
    dollars_per_hour: f64,
    estimated: Vec<String>,
}

impl Played {
    fn new(options: &Options, job: &Job, chain: &Chain, plan: &Plan) -> Result<Played> {
        let (fleet, costs) = options.on.read(job, chain)?;
        if fleet.devices.len() != plan.devices.len() {
            let (planned, there) = (plan.devices.len(), fleet.devices.len());
            let what = format!("the table is for {planned} devices, the fleet has {there}");
            return Err(CliError::said(what, "name the fleet that the table was made for"));
        }
        let layout = Layout::new(plan, chain);
        let world = FleetWorld::new(&fleet, &costs, &layout);
        let programs = compile_paced(plan, chain, Purpose::Train, &world)?;
        verify_all(&programs, plan, chain, Purpose::Train)?;
        let jitter = (options.jitter > 0.0).then_some(Jitter { seed: options.seed, most: options.jitter });
        let simulated = simulate(&programs, &layout, &world, Settings { jitter, memory: false })?;
        let kinds = fleet.kinds();
        Ok(Played {
            memory: programs.iter().map(|program| memory::forecast_in(program, &layout)).collect(),
            programs,
            simulated,
            dollars_per_hour: fleet.dollars_per_hour(),
            estimated: kinds.iter().filter(|kind| costs.estimated(kind)).map(|kind| kind.to_string()).collect(),
        })
    }

    fn json(&self, plan: &Plan) -> serde_json::Value {
        let devices = plan.devices.iter().zip(&self.simulated.devices).zip(&self.memory);
        let rows = devices.map(|((device, time), memory)| {
            json!({
                "name": device.name, "seconds": time, "memory_bytes": memory.total(),
                "host_bytes": memory.host, "disk_bytes": memory.disk,
            })
        });
        json!({
            "plan_id": plan.id(),
            "step_seconds": self.simulated.seconds,
            "dollars_per_step": self.dollars_per_hour * self.simulated.seconds / 3600.0,
            "estimated_kinds": self.estimated,
            "devices": rows.collect::<Vec<_>>(),
        })
    }

    fn print(&self, job: &Job, plan: &Plan) {
        let seconds = self.simulated.seconds;
        let rows = (plan.global_batch * plan.sequence) as f64 / seconds;
        println!(
            "plan {} for {} on {} devices: {} a step, {} rows a second, ${:.4} a step",
            plan.id(),
            job.name,
            plan.devices.len(),
            time_text(seconds),
            short(rows),
            self.dollars_per_hour * seconds / 3600.0
        );
        if !self.estimated.is_empty() {
            println!("estimated from public figures, not measured: {}", self.estimated.join(", "));
        }
        let width = plan.devices.iter().map(|device| device.name.len()).max().unwrap_or(0).max(6);
        println!(
            "{:<width$} {:>10} {:>12} {:>9} {:>8} {:>11}",
            "device", "computing", "recomputing", "updating", "idle", "memory"
        );
        // Devices that fare alike are shown once.
        let lines: Vec<String> = self.simulated.devices.iter().zip(&self.memory).map(|(time, memory)| {
            format!(
                "{:>10} {:>12} {:>9} {:>8} {:>11}",
                percent(time.computing / seconds),
                percent(time.recomputing / seconds),
                percent(time.updating / seconds),
                percent(time.idle / seconds),
                bytes_text(memory.total()),
            )
        }).collect();
        let mut index = 0;
        while index < lines.len() {
            let same = lines[index..].iter().take_while(|line| **line == lines[index]).count();
            let name = &plan.devices[index].name;
            let more = if same > 1 { format!("  (and {} more)", same - 1) } else { String::new() };
            println!("{name:<width$} {}{more}", lines[index]);
            index += same;
        }
    }
}
