//! Every layer on every device: how many samples a device computes and how much state it keeps are decided separately,
//! by what each can do and hold. A device may compute nothing and keep state, or the reverse; what no device has room
//! for is kept in hosts' memory.
//!
//! A step takes, layer by layer, the longer of gathering its parameters and its forward, then the longer of gathering
//! and reducing and its recomputation and backward; the slowest device counts, and the update comes on top.
//!
//! - `balance`: the search for the division, knowing neither models nor links.
//! - `work`: what samples take on a device, in seconds and bytes.
//! - `movement`: what gathering and reducing take over the fleet's links.
//! - `shares`: how the state is divided over the rooms that are left.
//! - `trial`: one set of machines, and all of this together; `search`: which machines take part.
//! - [`table()`]: the plan's table of a decision.
//! - [`cephalo`]: the published system that this shape comes from, by its own rules.

pub(crate) mod balance;
pub mod cephalo;
mod movement;
mod search;
mod shares;
mod table;
mod trial;
mod work;

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use shoal_fleet::{Costs, Fleet};
use shoal_model::Chain;
use shoal_plan::memory::forecasts;
use shoal_plan::{
    Activations, CompileError, DeviceRow, Layout, MemoryForecast, Plan, Program, Purpose, StepShape, compile,
};
use thiserror::Error;

use crate::device_rows;

pub use balance::Way;
pub use table::table;
pub(crate) use work::is_remade;

/// Tries until the forecasts of all devices are within their budgets.
const FORECASTS_MAX: usize = 8;
/// What a second search must gain to be looked at.
const WORTH_IT: f64 = 0.995;

/// What is to be planned.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    pub chain: &'a Chain,
    pub step: StepShape,
    pub fleet: &'a Fleet,
    pub costs: &'a Costs,
    /// As plans know them, with their budgets.
    pub devices: Vec<DeviceRow>,
    /// By node, what may be used of its host's memory.
    pub host_bytes: Vec<u64>,
    /// What every device does with activations, where that is not to be searched.
    pub activations: Option<Activations>,
}

impl<'a> Request<'a> {
    /// With all the memory that the fleet has.
    pub fn new(chain: &'a Chain, step: StepShape, fleet: &'a Fleet, costs: &'a Costs) -> Request<'a> {
        Request {
            chain,
            step,
            fleet,
            costs,
            devices: device_rows(fleet),
            host_bytes: fleet.nodes.iter().map(|node| node.host_memory_bytes).collect(),
            activations: None,
        }
    }
}

/// Who computes and who keeps how much.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// By device of the fleet.
    pub devices: Vec<DeviceShare>,
    /// By node, the share of the state that is in its host's memory.
    pub hosts: Vec<f64>,
    /// The step, by the cost model.
    pub seconds: f64,
    /// Of all layers' parameters, once.
    pub gather_seconds: f64,
    /// Of all layers' gradients.
    pub reduce_seconds: f64,
    pub update_seconds: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceShare {
    pub samples: usize,
    /// None where it computes nothing.
    pub way: Option<Way>,
    /// Its share of the state.
    pub state: f64,
    /// What its samples take, without the update.
    pub seconds: f64,
    /// On the high side.
    pub estimated_bytes: u64,
    pub budget_bytes: u64,
    pub workspace_bytes: u64,
}

/// A table that fits, its programs and what they take.
#[derive(Clone, Debug)]
pub struct Planned {
    pub decision: Decision,
    pub plan: Plan,
    /// By device, likewise below.
    pub programs: Vec<Program>,
    pub memory: Vec<MemoryForecast>,
}

#[derive(Debug, Error)]
pub enum ShardedError {
    #[error(
        "the state and {samples} samples, divided evenly, take {} MiB, all devices and hosts together have {} MiB for them: {} MiB short",
        needed_bytes.div_ceil(1 << 20),
        room_bytes >> 20,
        short_bytes.div_ceil(1 << 20)
    )]
    NoRoom { samples: usize, needed_bytes: u64, room_bytes: u64, short_bytes: u64 },
    #[error(
        "{place}: its part takes {} MiB more than its budget of {} MiB",
        over_bytes.div_ceil(1 << 20),
        budget_bytes >> 20
    )]
    TooTight { place: String, over_bytes: u64, budget_bytes: u64 },
    #[error(
        "{device}: an even part of {samples} samples lacks {} MiB there or in its host's memory, whatever becomes of activations",
        short_bytes.div_ceil(1 << 20)
    )]
    TooManySamples { device: String, samples: usize, short_bytes: u64 },
    #[error("the global batch has no samples")]
    EmptyBatch,
    #[error(transparent)]
    Compile(#[from] CompileError),
}

impl ShardedError {
    /// What the user can do about it, as one sentence.
    pub fn hint(&self) -> Option<String> {
        match self {
            ShardedError::NoRoom { .. } | ShardedError::TooTight { .. } => Some(
                "add devices or hosts with more memory, raise their budgets, or shorten data.sequence".into(),
            ),
            ShardedError::TooManySamples { .. } => {
                Some("lower train.global_batch, add devices or host memory, or shorten data.sequence".into())
            }
            ShardedError::EmptyBatch => Some("set train.global_batch to at least 1".into()),
            ShardedError::Compile(_) => None,
        }
    }
}

/// The best division by the cost model, its memory estimated.
pub fn decide(request: &Request) -> Result<Decision, ShardedError> {
    if request.step.global_batch == 0 {
        return Err(ShardedError::EmptyBatch);
    }
    search::Search::new(request).best(&vec![0.0; request.fleet.devices.len()])
}

/// The best division whose table fits every device by its forecast.
pub fn plan(request: &Request) -> Result<Planned, ShardedError> {
    if request.step.global_batch == 0 {
        return Err(ShardedError::EmptyBatch);
    }
    let search = search::Search::new(request);
    let mut corrections = vec![0.0; request.fleet.devices.len()];
    let mut tries = 0;
    let planned = loop {
        tries += 1;
        let planned = confirm(request, search.best(&corrections)?)?;
        match planned.over(request) {
            None => break planned,
            Some(over) if tries == FORECASTS_MAX => return Err(over),
            Some(_) => planned.correct(request, &mut corrections, |memory, share| {
                memory.total().saturating_sub(share.budget_bytes) as f64
            }),
        }
    };
    // Estimates are on the high side: with what the forecast says instead there may be a faster one.
    planned.correct(request, &mut corrections, |memory, share| match share.way {
        Some(_) => memory.total() as f64 - share.estimated_bytes as f64,
        None => 0.0,
    });
    let faster = search.best(&corrections).ok();
    match faster.filter(|faster| faster.seconds < WORTH_IT * planned.decision.seconds) {
        None => Ok(planned),
        Some(faster) => {
            let faster = confirm(request, faster)?;
            Ok(if faster.over(request).is_none() { faster } else { planned })
        }
    }
}

fn confirm(request: &Request, decision: Decision) -> Result<Planned, ShardedError> {
    let plan = table(request.chain, request.step, request.fleet, &decision);
    let programs = compile(&plan, request.chain, Purpose::Train)?;
    let layout = Layout::new(&plan, request.chain);
    let memory = forecasts(&programs, &layout);
    Ok(Planned { decision, plan, programs, memory })
}

impl Planned {
    /// What is over its budget, if anything is.
    fn over(&self, request: &Request) -> Option<ShardedError> {
        let rows = self.memory.iter().zip(&self.plan.devices);
        let devices = rows.map(|(memory, row)| (&row.name, memory.total(), row.budget_bytes));
        let nodes = request.fleet.nodes.iter().zip(&request.host_bytes).map(|(node, host_bytes)| {
            let host = self.memory[node.devices.clone()].iter().map(|memory| memory.host).sum();
            (&node.name, host, *host_bytes)
        });
        let (place, taken, budget_bytes) = devices.chain(nodes).find(|(_, taken, budget)| taken > budget)?;
        Some(ShardedError::TooTight { place: place.clone(), over_bytes: taken - budget_bytes, budget_bytes })
    }

    /// Corrects the estimates of devices, those that are alike by the most that one of them asks for: so they stay alike.
    fn correct(
        &self,
        request: &Request,
        corrections: &mut [f64],
        lacking: impl Fn(&MemoryForecast, &DeviceShare) -> f64,
    ) {
        let mut most: HashMap<_, f64> = HashMap::new();
        let like = |device: usize| {
            let (row, share) = (&self.plan.devices[device], &self.decision.devices[device]);
            (&request.fleet.devices[device].kind, row.budget_bytes, row.workspace_bytes, share.way.is_some())
        };
        for (device, (memory, share)) in self.memory.iter().zip(&self.decision.devices).enumerate() {
            let lacking = lacking(memory, share);
            most.entry(like(device)).and_modify(|most| *most = most.max(lacking)).or_insert(lacking);
        }
        for (device, correction) in corrections.iter_mut().enumerate() {
            *correction += most[&like(device)];
        }
    }
}

#[cfg(test)]
mod tests;
