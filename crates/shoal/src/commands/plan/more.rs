//! What one more device of each kind would gain.

use serde::Serialize;
use shoal_model::Chain;
use shoal_planner::auto::{Candidate, Shape};

use crate::fleet_plan::{FleetOptions, OnFleet, dollars_text};
use crate::job::Job;
use crate::show::percent;
use crate::timeline::time_text;

/// Fleets beyond this are not searched once more for each kind: that would take several times as long as the plan itself,
/// to learn what one device in hundreds adds.
const DEVICES_MAX: usize = 128;

/// The fleet with one more device, planned again.
#[derive(Debug, Serialize)]
pub struct More {
    pub kind: String,
    pub shape: Option<Shape>,
    /// None where there is no plan with it.
    pub seconds: Option<f64>,
    pub dollars_per_step: Option<f64>,
    /// By how much of itself a step becomes shorter; nothing where the best plan leaves the device out.
    pub gain: f64,
}

/// None where the fleet is too large to ask.
pub fn of_each_kind(
    options: &FleetOptions,
    job: &Job,
    chain: &Chain,
    on: &OnFleet,
    best: &Candidate,
) -> Option<Vec<More>> {
    if on.fleet.devices.len() > DEVICES_MAX {
        return None;
    }
    let with = |kind: &str| {
        let fleet = on.fleet.with_one_more(kind)?;
        let costs = options.costs(job, chain, &fleet).ok()?;
        let on = OnFleet { fleet, costs };
        let found = options.search(job, chain, &on).ok()?.best;
        Some((found.shape, found.simulated.seconds, on.dollars(found.simulated.seconds)))
    };
    let more = |kind: &str| {
        let found = with(kind);
        let gain = found.map_or(0.0, |(_, seconds, _)| 1.0 - seconds / best.simulated.seconds).max(0.0);
        More {
            kind: kind.to_owned(),
            shape: found.map(|(shape, _, _)| shape),
            seconds: found.map(|(_, seconds, _)| seconds),
            dollars_per_step: found.map(|(_, _, dollars)| dollars),
            gain,
        }
    };
    Some(on.fleet.kinds().into_iter().map(more).collect())
}

pub fn print(more: &Option<Vec<More>>, on: &OnFleet) {
    let Some(more) = more else {
        println!("\nwhat one more device would gain is not searched for more than {DEVICES_MAX} devices");
        return;
    };
    let place = if on.fleet.nodes.len() == 1 { "in the machine" } else { "in a machine of its own" };
    println!("\none more device, {place}:");
    for More { kind, shape, seconds, dollars_per_step, gain } in more {
        match (shape, seconds, dollars_per_step) {
            (Some(shape), Some(seconds), Some(dollars)) if *gain > 0.0 => println!(
                "  {kind:<12} {} a step ({}), {} less; {}",
                time_text(*seconds),
                shape.name(),
                percent(*gain),
                dollars_text(*dollars)
            ),
            _ => println!("  {kind:<12} gains nothing"),
        }
    }
}
