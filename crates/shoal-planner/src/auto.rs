//! The best of all shapes. Each search proposes a table by its own model; all are then played through on the same clock
//! and held to the same memory, and the fastest that fits wins.

use serde::Serialize;
use shoal_fleet::{Costs, Fleet};
use shoal_model::Chain;
use shoal_plan::memory::{MemoryForecast, forecast_in};
use shoal_plan::one_device::StepShape;
use shoal_plan::{Layout, Plan, Purpose, compile_paced};
use shoal_sim::{FleetWorld, Settings, Simulated, simulate};
use thiserror::Error;

use crate::pipeline::{self, PipelineWanted};
use crate::{burst, mirrors, mixed, parallel, sharded, spilled};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    Pipeline,
    Sharded,
    Burst,
    Mixed,
    Spilled,
}

impl Shape {
    pub const ALL: [Shape; 5] = [Shape::Pipeline, Shape::Sharded, Shape::Burst, Shape::Mixed, Shape::Spilled];

    pub fn name(self) -> &'static str {
        match self {
            Shape::Pipeline => "pipeline",
            Shape::Sharded => "sharded",
            Shape::Burst => "burst",
            Shape::Mixed => "mixed",
            Shape::Spilled => "spilled",
        }
    }

    pub fn named(name: &str) -> Option<Shape> {
        Shape::ALL.into_iter().find(|shape| shape.name() == name)
    }
}

/// A table, played through.
pub struct Candidate {
    pub shape: Shape,
    pub plan: Plan,
    pub simulated: Simulated,
    /// By device.
    pub memory: Vec<MemoryForecast>,
}

/// What became of a shape.
#[derive(Clone, Debug, Serialize)]
pub struct Tried {
    pub shape: Shape,
    /// Of a step, where it has a plan that fits.
    pub seconds: Option<f64>,
    /// Why there is none.
    pub refused: Option<String>,
}

pub struct Found {
    pub best: Candidate,
    /// All shapes, the fastest first.
    pub tried: Vec<Tried>,
}

#[derive(Debug, Error)]
pub enum AutoError {
    #[error("the fleet has no device")]
    NoDevice,
    #[error("no plan of any shape fits this fleet: {}", reasons(.tried))]
    Nothing { tried: Vec<Tried> },
}

impl AutoError {
    pub fn hint(&self) -> Option<String> {
        Some(
            "add devices or host memory to the fleet, shorten data.sequence, or choose a smaller model"
                .into(),
        )
    }
}

fn reasons(tried: &[Tried]) -> String {
    let said = tried
        .iter()
        .map(|tried| format!("{} ({})", tried.shape.name(), tried.refused.as_deref().unwrap_or("too slow")));
    said.collect::<Vec<_>>().join("; ")
}

/// The fastest plan of some shapes.
pub fn plan(
    chain: &Chain,
    step: StepShape,
    fleet: &Fleet,
    costs: &Costs,
    shapes: &[Shape],
) -> Result<Found, AutoError> {
    if fleet.devices.is_empty() {
        return Err(AutoError::NoDevice);
    }
    let mut best: Option<Candidate> = None;
    let mut tried = Vec::new();
    // Most searches keep one core busy.
    let searched = parallel::map(shapes, |shape| {
        propose(*shape, chain, step, fleet, costs)
            .and_then(|plans| quickest(plans.into_iter().map(|plan| play(*shape, plan, chain, fleet, costs))))
    });
    for (shape, found) in shapes.iter().copied().zip(searched) {
        let seconds = found.as_ref().ok().map(|candidate| candidate.simulated.seconds);
        match found {
            Ok(candidate) => {
                if best.as_ref().is_none_or(|best| candidate.simulated.seconds < best.simulated.seconds) {
                    best = Some(candidate);
                }
                tried.push(Tried { shape, seconds, refused: None });
            }
            Err(refused) => tried.push(Tried { shape, seconds: None, refused: Some(refused) }),
        }
    }
    tried.sort_by(|a, b| {
        let seconds = |tried: &Tried| tried.seconds.unwrap_or(f64::INFINITY);
        seconds(a).total_cmp(&seconds(b))
    });
    match best {
        Some(best) => Ok(Found { best, tried }),
        None => Err(AutoError::Nothing { tried }),
    }
}

/// The fastest of some candidates; why the first has none if all are refused.
fn quickest(candidates: impl Iterator<Item = Result<Candidate, String>>) -> Result<Candidate, String> {
    let seconds = |candidate: &Candidate| candidate.simulated.seconds;
    let best = candidates.reduce(|best, other| match (best, other) {
        (Ok(best), Ok(other)) if seconds(&other) < seconds(&best) => Ok(other),
        (Err(_), Ok(other)) => Ok(other),
        (best, _) => best,
    });
    best.unwrap_or_else(|| Err("nothing was proposed".into()))
}

/// A shape's own best tables, or why it has none.
fn propose(
    shape: Shape,
    chain: &Chain,
    step: StepShape,
    fleet: &Fleet,
    costs: &Costs,
) -> Result<Vec<Plan>, String> {
    match shape {
        Shape::Pipeline => {
            let searched = pipeline::plan(chain, step, fleet, costs, &PipelineWanted::default())
                .map(|planned| planned.plan)
                .map_err(|error| error.to_string());
            // One replica in orders and with stashes that the search for replicas does not look at.
            let singles =
                mixed::plan_singles(chain, step, fleet, costs).map_err(|error| error.to_string())?;
            match (searched, singles) {
                (searched, Some(singles)) => Ok(searched.into_iter().chain([singles.plan]).collect()),
                (searched, None) => searched.map(|plan| vec![plan]),
            }
        }
        Shape::Sharded => sharded::plan(&sharded::Request::new(chain, step, fleet, costs))
            .map(|planned| vec![planned.plan])
            .map_err(|error| error.to_string()),
        Shape::Burst => {
            let problem = burst::Problem::new(chain, step, fleet, costs);
            let planned =
                burst::Planner::new(&problem).and_then(|planner| planner.plan(burst::Goal::Fastest));
            planned
                .and_then(|planned| burst::table(chain, step, fleet, &planned.decision))
                .map(|plan| vec![plan])
                .map_err(|error| error.to_string())
        }
        Shape::Mixed => match mixed::plan(chain, step, fleet, costs) {
            Ok(Some(planned)) => Ok(vec![planned.plan]),
            Ok(None) => Err("no pipeline of groups fits the nodes' devices".into()),
            Err(error) => Err(error.to_string()),
        },
        Shape::Spilled => match fleet.devices.len() {
            1 => spilled::plan(chain, step, fleet, costs, 0)
                .map(|planned| vec![planned.plan])
                .map_err(|error| error.to_string()),
            count => Err(format!("it is for one device, the fleet has {count}")),
        },
    }
}

/// A candidate whose state is on two machines at least, played through again.
pub fn mirrored(
    candidate: &Candidate,
    chain: &Chain,
    fleet: &Fleet,
    costs: &Costs,
) -> Result<Candidate, String> {
    play(candidate.shape, mirrors::mirrored(&candidate.plan, fleet), chain, fleet, costs)
}

/// Plays a table through and holds it to the fleet's memory.
fn play(shape: Shape, plan: Plan, chain: &Chain, fleet: &Fleet, costs: &Costs) -> Result<Candidate, String> {
    let layout = Layout::new(&plan, chain);
    let world = FleetWorld::new(fleet, costs, &layout);
    let programs = compile_paced(&plan, chain, Purpose::Train, &world).map_err(|error| error.to_string())?;
    let memory: Vec<MemoryForecast> = programs.iter().map(|program| forecast_in(program, &layout)).collect();
    for (row, memory) in plan.devices.iter().zip(&memory) {
        if memory.total() > row.budget_bytes {
            return Err(format!("{} would need {} bytes of {}", row.name, memory.total(), row.budget_bytes));
        }
    }
    for node in &fleet.nodes {
        let (mut host, mut disk) = (0, 0);
        for memory in &memory[node.devices.clone()] {
            host += memory.host;
            disk += memory.disk;
        }
        let room = node.disk.as_ref().map_or(0, |disk| disk.bytes);
        if host > node.host_memory_bytes || disk > room {
            let there = node.host_memory_bytes;
            return Err(format!(
                "{} would need {host} bytes of host memory of {there}, {disk} of disk of {room}",
                node.name
            ));
        }
    }
    let simulated =
        simulate(&programs, &layout, &world, Settings::default()).map_err(|error| error.to_string())?;
    drop(layout);
    Ok(Candidate { shape, plan, simulated, memory })
}
