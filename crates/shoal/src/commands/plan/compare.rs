//! `shoal plan --compare`: all shapes of plan for one job and fleet, side by side.

use serde_json::json;
use shoal_model::Chain;
use shoal_planner::auto::{self, AutoError, Candidate, Request, Shape, Tried};
use shoal_planner::breakdown::{Breakdown, bottleneck};
use shoal_planner::spilled::{self, Spilled};

use crate::assemble::step_shape;
use crate::error::{CliError, Result};
use crate::fleet_plan::{OnFleet, Survive, bottleneck_text, breakdown, of_shapes, tightest};
use crate::job::{Job, bytes_text};
use crate::show::percent;
use crate::timeline::time_text;

/// A shape's best plan, played through.
pub struct Planned {
    pub candidate: Candidate,
    breakdown: Vec<Breakdown>,
}

/// A shape, and its plan or why it has none.
pub type Row = (Shape, std::result::Result<Planned, String>);

/// Every shape, and what is run where nobody plans.
pub fn shapes(
    job: &Job,
    chain: &Chain,
    on: &OnFleet,
    survive: Survive,
    improve_instructions: usize,
) -> Vec<Row> {
    let of = |shape: Shape| {
        let candidate =
            match of_shapes(job, chain, on, &[shape], survive, improve_instructions).map_err(reason) {
                Ok(found) => found.best,
                // It is for one device: of a fleet, the one that it is fastest on.
                Err(_) if shape == Shape::Spilled => on_one_device(job, chain, on, survive)?,
                Err(refused) => return Err(refused),
            };
        let breakdown =
            breakdown(&candidate.plan, chain, on, &candidate.simulated).map_err(|error| error.to_string())?;
        Ok(Planned { candidate, breakdown })
    };
    Shape::ALL.into_iter().chain(Shape::USUAL).map(|shape| (shape, of(shape))).collect()
}

/// The model streamed through one device of the fleet, the best of each kind's first; the others have no part in it.
fn on_one_device(
    job: &Job,
    chain: &Chain,
    on: &OnFleet,
    survive: Survive,
) -> std::result::Result<Candidate, String> {
    let mut best = None::<Spilled>;
    let mut refused = String::new();
    for kind in on.fleet.kinds() {
        let Some(device) = on.fleet.devices.iter().position(|device| device.kind == kind) else { continue };
        match spilled::plan(chain, step_shape(job), &on.fleet, &on.costs, device) {
            Ok(found)
                if best.as_ref().is_none_or(|best| found.simulated.seconds < best.simulated.seconds) =>
            {
                best = Some(found);
            }
            Ok(_) => {}
            Err(error) => refused = error.to_string(),
        }
    }
    let plan = best.ok_or(refused)?.plan;
    let with = |survive: usize| {
        let request = Request::new(chain, step_shape(job), &on.fleet, &on.costs);
        auto::rated(Shape::Spilled, &plan, &Request { survive, ..request })
    };
    match survive {
        Survive::Exactly(survive) => with(survive),
        Survive::UpTo(survive) => with(survive).or_else(|_| with(0)),
    }
}

/// Why one shape has no plan.
fn reason(error: AutoError) -> String {
    match error {
        AutoError::Nothing { mut tried } if tried.len() == 1 => {
            tried.remove(0).refused.unwrap_or_else(|| "none fits".into())
        }
        other => other.to_string(),
    }
}

/// The fastest; where there is none, what each shape is short of.
pub fn best(shapes: &[Row]) -> Result<&Planned> {
    let searched = shapes.iter().filter(|(shape, _)| Shape::ALL.contains(shape));
    let planned = searched.filter_map(|(_, planned)| planned.as_ref().ok());
    let seconds = |planned: &Planned| planned.candidate.simulated.seconds;
    planned.min_by(|a, b| seconds(a).total_cmp(&seconds(b))).ok_or_else(|| {
        let tried = shapes.iter().map(|(shape, planned)| Tried {
            shape: *shape,
            seconds: None,
            refused: planned.as_ref().err().cloned(),
        });
        let error = AutoError::Nothing { tried: tried.collect() };
        CliError::said(error.to_string(), error.hint())
    })
}

pub fn json(shapes: &[Row], best: &Planned, on: &OnFleet) -> serde_json::Value {
    let row = |(shape, planned): &Row| match planned {
        Err(refused) => json!({ "shape": shape, "refused": refused }),
        Ok(Planned { candidate, breakdown }) => {
            let dollars = on.dollars(candidate.simulated.seconds);
            let tightest = tightest(&candidate.plan, &candidate.memory).map(|(place, share)| {
                let bytes = candidate.memory[place].total();
                json!({ "device": candidate.plan.devices[place].name, "bytes": bytes, "share": share })
            });
            json!({
                "shape": shape, "plan_id": candidate.plan.id(), "step_seconds": candidate.simulated.seconds,
                "dollars_per_step": dollars, "dollars_per_thousand_steps": 1000.0 * dollars,
                "tightest": tightest, "bottleneck": bottleneck(breakdown),
            })
        }
    };
    let rows: Vec<serde_json::Value> = shapes.iter().map(row).collect();
    json!({ "auto": best.candidate.shape, "shapes": rows })
}

pub fn print(job: &Job, shapes: &[Row], best: &Planned, on: &OnFleet) {
    println!("{} on {} devices", job.name, on.fleet.devices.len());
    println!(
        "{:<13} {:>10} {:>11} {:>15}  {:<34} bottleneck",
        "shape", "a step", "$ a step", "$ 1,000 steps", "tightest memory"
    );
    let line = |name: &str, Planned { candidate, breakdown }: &Planned| {
        let seconds = candidate.simulated.seconds;
        let dollars = on.dollars(seconds);
        let tight = tightest(&candidate.plan, &candidate.memory).map_or(String::new(), |(place, share)| {
            let row = &candidate.plan.devices[place];
            format!("{}: {} of {}", row.name, percent(share), bytes_text(row.budget_bytes))
        });
        let held_up = bottleneck(breakdown).map(|found| bottleneck_text(&found, &candidate.plan));
        println!(
            "{name:<13} {:>10} {dollars:>11.5} {:>15.2}  {tight:<34} {}",
            time_text(seconds),
            1000.0 * dollars,
            held_up.unwrap_or_default()
        );
    };
    for (shape, planned) in shapes {
        match planned {
            Ok(planned) => line(shape.name(), planned),
            Err(refused) => println!("{:<13} no plan: {refused}", shape.name()),
        }
    }
    line("auto", best);
    println!("auto takes {}", best.candidate.shape.name());
}
