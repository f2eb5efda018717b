//! A whole run over a spot trace, state moving between machines beside starting again from checkpoints.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use shoal_fleet::Trace;
use shoal_model::Chain;
use shoal_planner::auto;
use shoal_planner::run::{Morphing, Places, Report, Settings, Spent, Step, over};

use crate::error::Result;
use crate::fleet_plan::{FleetOptions, OnFleet};
use crate::job::{Job, duration_text};
use crate::show::percent;

/// A part of what was spent.
type Share = fn(&Spent) -> f64;

/// From a change until state begins to move: a second without a heartbeat, and a plan.
const NOTICE_SECONDS: f64 = 2.0;

/// What starting every process again takes, libraries, data and checkpoint read: published systems wait one to two
/// minutes.
const RESTART_SECONDS: f64 = 90.0;

const CHECKPOINT_EVERY_SECONDS: f64 = 600.0;

/// Live morphing beside starting again from checkpoints.
pub fn run(
    options: &FleetOptions,
    job: &Job,
    chain: &Chain,
    on: &OnFleet,
    trace: &Path,
    json: bool,
) -> Result {
    let trace = Trace::read(trace)?;
    let first = &on.fleet.nodes[0];
    let devices = &on.fleet.devices[first.devices.clone()];
    let settings = |morphing| Settings {
        morphing,
        checkpoint_every_seconds: CHECKPOINT_EVERY_SECONDS,
        checkpoint_seconds: 0.0,
        devices_per_machine: devices.len(),
        dollars_per_machine_hour: devices.iter().map(|device| device.dollars_per_hour).sum(),
        state_bytes: 4 * (1 + job.optimizer.state_names().len() as u64),
    };
    let bytes_per_second = first.network.bytes_per_second;
    let ways = [
        ("state moves", Morphing::Live { notice_seconds: NOTICE_SECONDS, bytes_per_second }),
        ("started again", Morphing::Restart { restart_seconds: RESTART_SECONDS }),
    ];
    let mut steps: HashMap<usize, Option<Step>> = HashMap::new();
    let mut reports = Vec::new();
    for (name, morphing) in ways {
        let mut places = Places::default();
        let mut plan_for = |machines: &BTreeSet<String>| {
            let fleet = on.fleet.of_machines(places.of(machines));
            let names: Vec<String> = fleet.devices.iter().map(|device| device.name.clone()).collect();
            let known = steps.entry(machines.len()).or_insert_with(|| {
                let costs = options.costs(job, chain, &fleet).ok()?;
                let on = OnFleet { fleet, costs };
                let best = options.search(job, chain, &on).ok()?.best;
                let best = auto::mirrored(&best, chain, &on.fleet, &on.costs).unwrap_or(best);
                Some(Step { plan: best.plan, simulated: best.simulated })
            });
            // Machines are alike, so the plan for so many of them is one, whoever they are.
            let mut step = known.clone()?;
            for (row, name) in step.plan.devices.iter_mut().zip(names) {
                row.name = name;
            }
            Some(step)
        };
        reports.push((name, over(&trace, &settings(morphing), &mut plan_for)));
    }
    match json {
        true => println!("{}", serde_json::json!(reports.iter().cloned().collect::<BTreeMap<_, _>>())),
        false => print(job, &trace, &reports),
    }
    Ok(())
}

fn print(job: &Job, trace: &Trace, reports: &[(&str, Report)]) {
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
    let parts: [(&str, Share); 6] = [
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
