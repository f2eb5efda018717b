//! A whole run over a spot trace, state moving between machines, beside starting again from checkpoints and beside as many
//! machines on demand.

use std::path::Path;

use serde_json::json;
use shoal_fleet::Trace;
use shoal_model::Chain;
use shoal_planner::run::{Morphing, Places, Report, Settings, Spent, over};

use crate::error::Result;
use crate::fleet_plan::{FleetOptions, OnFleet};
use crate::job::{Job, duration_text};
use crate::show::percent;
use crate::spot::{Plans, settings};

/// From a change until state begins to move: a second without a heartbeat, and a plan.
const NOTICE_SECONDS: f64 = 2.0;

/// The step under way when a machine is lost, and the one before it at the worst.
const LOST_STEPS: f64 = 1.5;

/// What starting every process again takes, libraries, data and checkpoint read: published systems wait one to two
/// minutes.
const RESTART_SECONDS: f64 = 90.0;

const MOVES: &str = "state moves";
const RESTARTS: &str = "started again";
const ON_DEMAND: &str = "on demand";

/// A way to go through the trace's hours, and what came of it.
struct Played {
    name: &'static str,
    report: Report,
    /// Where the price is known.
    dollars: Option<f64>,
}

impl Played {
    fn dollars_per_step(&self) -> Option<f64> {
        self.dollars.filter(|_| self.report.steps > 0.0).map(|dollars| dollars / self.report.steps)
    }
}

/// Plays the run through in all three ways.
pub fn run(
    options: &FleetOptions,
    job: &Job,
    chain: &Chain,
    on: &OnFleet,
    trace: &Path,
    json: bool,
) -> Result {
    let trace = Trace::read(trace)?;
    let mut plans = Plans::new(options, job, chain, on);
    let first = &on.fleet.nodes[0];
    let bytes_per_second = first.network.bytes_per_second;
    let live = Morphing::Live {
        notice_seconds: NOTICE_SECONDS,
        switch_seconds: NOTICE_SECONDS,
        lost_steps: LOST_STEPS,
        bytes_per_second,
    };
    let devices = &on.fleet.devices[first.devices.clone()];
    let price = Some(devices.iter().map(|device| device.dollars_per_hour).sum());
    let on_demand = devices.iter().map(|device| device.on_demand_dollars_per_hour).sum();
    // Nobody takes machines away that are paid for on demand: as many as the trace has on average, all the time.
    let steady = Trace::steady(trace.mean_count().round().max(1.0) as usize, trace.seconds);
    let ways = [
        (MOVES, &trace, live, price, true),
        (RESTARTS, &trace, Morphing::Restart { restart_seconds: RESTART_SECONDS }, price, true),
        (ON_DEMAND, &steady, live, on_demand, false),
    ];
    let played = ways.map(|(name, trace, morphing, dollars_per_hour, mirrored)| {
        let settings = Settings {
            dollars_per_machine_hour: dollars_per_hour.unwrap_or(0.0),
            ..settings(job, on, morphing)
        };
        let mut places = Places::default();
        let report = over(trace, &settings, &mut |machines| plans.step(places.of(machines), mirrored));
        let dollars = dollars_per_hour.map(|_| report.dollars);
        Played { name, report, dollars }
    });
    match json {
        true => println!("{}", as_json(&played)),
        false => print(job, &trace, &played),
    }
    Ok(())
}

fn as_json(played: &[Played]) -> serde_json::Value {
    let ways = played.iter().map(|Played { name, report, dollars }| {
        let mut way = json!(report);
        way["dollars"] = json!(dollars);
        (name.to_string(), way)
    });
    ways.collect::<serde_json::Map<_, _>>().into()
}

fn print(job: &Job, trace: &Trace, played: &[Played]) {
    println!(
        "{} over {} with {:.1} machines on average",
        job.name,
        duration_text(trace.seconds),
        trace.mean_count()
    );
    let line = |what: &str, value: &dyn Fn(&Played) -> String| {
        let values: String = played.iter().map(|way| format!("{:>15}", value(way))).collect();
        println!("{what:<25}{values}");
    };
    let unknown = || "not known".to_owned();
    line("", &|way| way.name.to_owned());
    line("steps", &|way| format!("{:.0}", way.report.steps));
    line("samples a second", &|way| {
        format!("{:.2}", way.report.steps * job.global_batch as f64 / way.report.seconds)
    });
    line("dollars", &|way| way.dollars.map_or_else(unknown, |dollars| format!("{dollars:.2}")));
    line("dollars a thousand steps", &|way| {
        way.dollars_per_step().map_or_else(unknown, |dollars| format!("{:.2}", 1000.0 * dollars))
    });
    line("changes, plans changed", &|way| format!("{}, {}", way.report.changes, way.report.morphs));
    line("read from a checkpoint", &|way| way.report.restores.to_string());
    println!("where the device-seconds went");
    for (name, part) in Spent::PARTS {
        line(&format!("  {name}"), &|way| {
            percent(part(&way.report.spent) / way.report.spent.total().max(f64::MIN_POSITIVE))
        });
    }
    let [moves, others @ ..] = played else { return };
    for other in others {
        let ratio = |a: Option<f64>, b: Option<f64>| match (a, b) {
            (Some(a), Some(b)) if b > 0.0 => format!("{:.2}x", a / b),
            _ => unknown(),
        };
        println!(
            "{} against {}: {} the steps, {} the dollars a step",
            moves.name,
            other.name,
            ratio(Some(moves.report.steps), Some(other.report.steps)),
            ratio(moves.dollars_per_step(), other.dollars_per_step()),
        );
    }
    if played.iter().any(|way| way.dollars.is_none()) {
        println!(
            "the fleet file does not say what these machines cost on demand: on_demand_price (docs/fleet.md)"
        );
    }
}
