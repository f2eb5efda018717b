//! `shoal simulate`: one step of a plan on a virtual clock. The programs are those that the engine would run.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use shoal_fleet::Trace;
use shoal_model::Chain;
use shoal_plan::{Layout, Plan, Purpose, compile_paced, memory, verify_all};
use shoal_planner::auto;
use shoal_planner::run::{self, Morphing, Places, Report};
use shoal_sim::{FleetWorld, Jitter, Settings, simulate};

use crate::error::{CliError, Result};
use crate::fleet_plan::{Described, FleetOptions, OnFleet};
use crate::job::{Job, duration_text};
use crate::show::percent;
use crate::timeline;

/// From a change until state begins to move: a second without a heartbeat, and a plan.
const NOTICE_SECONDS: f64 = 2.0;

/// What starting every process again takes, libraries, data and checkpoint read: published systems wait one to two
/// minutes.
const RESTART_SECONDS: f64 = 90.0;

const CHECKPOINT_EVERY_SECONDS: f64 = 600.0;

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
    /// Play a whole run over a spot trace (docs/fleet.md), on machines like the fleet's first
    #[arg(long, value_name = "FILE", conflicts_with_all = ["table", "picture"])]
    trace: Option<PathBuf>,
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
    let on = options.on.read(&job, &chain)?;
    if let Some(trace) = &options.trace {
        return over_trace(&options, &job, &chain, &on, trace);
    }
    let plan = match &options.table {
        Some(path) => read_table(path, &chain)?,
        None => options.on.search(&job, &chain, &on)?.best.plan,
    };
    if on.fleet.devices.len() != plan.devices.len() {
        let (planned, there) = (plan.devices.len(), on.fleet.devices.len());
        let what = format!("the table is for {planned} devices, the fleet has {there}");
        return Err(CliError::said(what, "name the fleet that the table was made for"));
    }
    let layout = Layout::new(&plan, &chain);
    let world = FleetWorld::new(&on.fleet, &on.costs, &layout);
    let programs = compile_paced(&plan, &chain, Purpose::Train, &world)?;
    verify_all(&programs, &plan, &chain, Purpose::Train)?;
    let jitter = (options.jitter > 0.0).then_some(Jitter { seed: options.seed, most: options.jitter });
    let simulated = simulate(&programs, &layout, &world, Settings { jitter, memory: false })?;
    let memory: Vec<_> = programs.iter().map(|program| memory::forecast_in(program, &layout)).collect();
    if let Some(path) = &options.picture {
        let names: Vec<String> = plan.devices.iter().map(|device| device.name.clone()).collect();
        std::fs::write(path, timeline::svg(&programs, &simulated, &names)).map_err(CliError::at(path))?;
        eprintln!("wrote {}", path.display());
    }
    let described = Described { job: &job, on: &on, plan: &plan, simulated: &simulated, memory: &memory };
    match options.json {
        true => println!("{}", described.json()),
        false => described.print(),
    }
    Ok(())
}

/// Live morphing beside starting again from checkpoints.
fn over_trace(options: &Options, job: &Job, chain: &Chain, on: &OnFleet, trace: &Path) -> Result {
    let trace = Trace::read(trace)?;
    let first = &on.fleet.nodes[0];
    let devices = &on.fleet.devices[first.devices.clone()];
    let settings = |morphing| run::Settings {
        morphing,
        checkpoint_every_seconds: CHECKPOINT_EVERY_SECONDS,
        checkpoint_seconds: 0.0,
        dollars_per_machine_hour: devices.iter().map(|device| device.dollars_per_hour).sum(),
        state_bytes: 4 * (1 + job.optimizer.state_names().len() as u64),
    };
    let bytes_per_second = first.network.bytes_per_second;
    let ways = [
        ("state moves", Morphing::Live { notice_seconds: NOTICE_SECONDS, bytes_per_second }),
        ("started again", Morphing::Restart { restart_seconds: RESTART_SECONDS }),
    ];
    let mut steps: HashMap<usize, Option<run::Step>> = HashMap::new();
    let mut reports = Vec::new();
    for (name, morphing) in ways {
        let mut places = Places::default();
        let mut plan_for = |machines: &BTreeSet<String>| {
            let fleet = on.fleet.of_machines(places.of(machines));
            let names: Vec<String> = fleet.devices.iter().map(|device| device.name.clone()).collect();
            let known = steps.entry(machines.len()).or_insert_with(|| {
                let costs = options.on.costs(job, chain, &fleet).ok()?;
                let on = OnFleet { fleet, costs };
                let best = options.on.search(job, chain, &on).ok()?.best;
                let best = auto::mirrored(&best, chain, &on.fleet, &on.costs).unwrap_or(best);
                Some(run::Step { plan: best.plan, simulated: best.simulated })
            });
            // Machines are alike, so the plan for so many of them is one, whoever they are.
            let mut step = known.clone()?;
            for (row, name) in step.plan.devices.iter_mut().zip(names) {
                row.name = name;
            }
            Some(step)
        };
        reports.push((name, run::over(&trace, &settings(morphing), &mut plan_for)));
    }
    match options.json {
        true => println!("{}", serde_json::json!(reports.iter().cloned().collect::<BTreeMap<_, _>>())),
        false => print_runs(job, &trace, &reports),
    }
    Ok(())
}

fn print_runs(job: &Job, trace: &Trace, reports: &[(&str, Report)]) {
    println!(
        "{} over {} with {:.1} machines on average",
        job.name,
        duration_text(trace.seconds()),
        trace.mean_count()
    );
    println!("{:<25}{}", "", reports.iter().map(|(name, _)| format!("{name:>15}")).collect::<String>());
    let line = |what: &str, value: &dyn Fn(&Report) -> String| {
        let values: String = reports.iter().map(|(_, report)| format!("{:>15}", value(report))).collect();
        println!("{what:<25}{values}");
    };
    line("steps", &|report| format!("{:.0}", report.steps));
    line("samples a second", &|report| {
        format!("{:.2}", report.steps * job.global_batch as f64 / report.seconds)
    });
    line("dollars", &|report| format!("{:.2}", report.dollars));
    line("dollars a thousand steps", &|report| format!("{:.2}", 1000.0 * report.dollars / report.steps));
    line("changes, plans changed", &|report| format!("{}, {}", report.changes, report.morphs));
    line("read from a checkpoint", &|report| report.restores.to_string());
    let parts: [(&str, fn(&run::Spent) -> f64); 6] = [
        ("useful", |spent| spent.useful),
        ("recomputation", |spent| spent.recompute),
        ("bubbles and waits", |spent| spent.bubble),
        ("morphing", |spent| spent.morph),
        ("done again", |spent| spent.lost),
        ("unused", |spent| spent.unused),
    ];
    for (name, part) in parts {
        line(name, &|report| percent(part(&report.spent) / report.spent.total().max(f64::MIN_POSITIVE)));
    }
}

fn read_table(path: &Path, chain: &Chain) -> Result<Plan> {
    let text = std::fs::read_to_string(path).map_err(CliError::at(path))?;
    let refused = |what: String| {
        let hint = "write it with `shoal plan JOB.toml --fleet FILE --table FILE` for the same job";
        CliError::said(format!("{}: {what}", path.display()), hint)
    };
    let plan: Plan = serde_json::from_str(&text).map_err(|error| refused(error.to_string()))?;
    plan.check(chain).map_err(|error| refused(error.to_string()))?;
    Ok(plan)
}
