//! To each layer the number of devices that suits it, under a budget of device-seconds.
//!
//! A layer whose work does not divide well goes on few devices, and the others are free meanwhile, for other jobs. The
//! search knows the whole step: it trades the step's time against device-seconds over all layers together.
//!
//! What a step is taken to cost:
//! - Layers go one after the other, forward and then back; a layer's devices have equal runs of samples, and the one
//!   that takes longest decides. The optimizer's time on a layer's parameters is counted with its backward.
//! - Where two layers are on different devices, samples move between them, and their gradients back, while both sides
//!   wait. The slowest device or node interface decides.
//! - Gradients are added up layer by layer as the backward leaves them, one sum at a time, hidden behind the backward
//!   of the layers before; samples on their way go first. What is left when the backward ends is waited for.
//! - Device-seconds are what a layer's devices spend on it, what both sides spend on moving samples, and what the first
//!   layer's devices wait at the end.
//!
//! - [`structure`]: series and branches, found from the layers' inputs.
//! - [`place`]: sets of devices, and what moving and adding up cost between and over them.
//! - [`timeline`]: a decision's step in time, device by device.
//! - [`planner`]: the best decision for a goal.
//! - [`search`]: the Pareto dynamic program; [`block`] prepares what lies between a fork and its join for it.
//! - [`polish`]: what is left to gain where branches share few devices.
//! - [`greedy`]: DeepPool's own rule, to be compared with.
//! - [`background`]: what other jobs get done in the gaps.
//! - [`table`]: the plan's table of a decision.

pub mod background;
mod block;
pub mod greedy;
pub mod place;
mod planner;
mod polish;
mod search;
pub mod structure;
pub mod table;
pub mod timeline;

use serde::Serialize;
use shoal_fleet::{Costs, Fleet};
use shoal_model::{Chain, LayerKind};
use shoal_plan::StepShape;
use thiserror::Error;

use crate::{GPU_PROCESS_BYTES, GPU_WORKSPACE_BYTES};

use place::Ways;
pub use planner::Planner;
pub use table::table;
pub use timeline::Estimate;

/// What a layer takes of a device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerBytes {
    /// Its parameters, their gradients and the optimizer's state.
    pub state: u64,
    /// What a sample leaves there between forward and backward.
    pub kept_a_sample: u64,
}

/// A step to be planned.
#[derive(Clone, Debug)]
pub struct Problem<'a> {
    pub fleet: &'a Fleet,
    pub costs: &'a Costs,
    /// By layer, the earlier layers whose outputs it takes; none for the first.
    pub inputs: Vec<Vec<usize>>,
    pub global_batch: usize,
    pub gradient_bytes_a_parameter: u64,
    /// Of starting a move of samples between two layers, beyond what its links take.
    pub seconds_a_move: f64,
    /// By layer.
    pub memory: Vec<LayerBytes>,
}

/// Gradients are added up in fp32, whatever the precision.
const GRADIENT_BYTES: u64 = 4;

impl<'a> Problem<'a> {
    /// A chain of ours, whose costs these are.
    pub fn new(chain: &Chain, step: StepShape, fleet: &'a Fleet, costs: &'a Costs) -> Problem<'a> {
        let copy = if step.precision.bytes() < 4 { step.precision.bytes() as u64 } else { 0 };
        let state = 4 * (2 + step.optimizer_states as u64) + copy;
        let bytes = |layer: usize| LayerBytes {
            state: state * costs.parameters(layer),
            kept_a_sample: kept_bytes(&chain.layers[layer].kind, step),
        };
        Problem {
            fleet,
            costs,
            inputs: chain.layers.iter().map(|layer| layer.inputs.clone()).collect(),
            global_batch: step.global_batch,
            gradient_bytes_a_parameter: GRADIENT_BYTES,
            seconds_a_move: 0.0,
            memory: (0..chain.layers.len()).map(bytes).collect(),
        }
    }

    fn ways(&self) -> Ways {
        Ways::new(self.fleet, self.seconds_a_move)
    }

    fn check(&self) -> Result<(), BurstError> {
        if self.fleet.devices.is_empty() {
            return Err(BurstError::NoDevices);
        }
        if self.global_batch == 0 {
            return Err(BurstError::NoSamples);
        }
        let layers = self.costs.layers();
        if layers == 0 || self.inputs.len() != layers || self.memory.len() != layers {
            return Err(BurstError::Layers { costs: layers, inputs: self.inputs.len() });
        }
        for (layer, inputs) in self.inputs.iter().enumerate() {
            if inputs.is_empty() != (layer == 0) || inputs.iter().any(|input| *input >= layer) {
                return Err(BurstError::Inputs { layer });
            }
        }
        let is_read = |layer: usize| self.inputs.iter().any(|inputs| inputs.contains(&layer));
        if let Some(layer) = (0..layers - 1).find(|layer| !is_read(*layer)) {
            return Err(BurstError::Unread { layer });
        }
        self.check_memory()
    }

    /// Without branches the device that is taken first has a share of every layer, and so all of the state. Where that alone
    /// is too much, no search need find it out: with a thousand devices it takes seconds.
    fn check_memory(&self) -> Result<(), BurstError> {
        let is_chain =
            self.inputs.iter().enumerate().skip(1).all(|(layer, inputs)| inputs[..] == [layer - 1]);
        let first = self.order()[0];
        let needed_bytes = self.memory.iter().map(|bytes| bytes.state).sum();
        let budget_bytes = self.memory_bytes(first);
        if !is_chain || needed_bytes <= budget_bytes {
            return Ok(());
        }
        let device = self.fleet.devices[first].name.clone();
        Err(BurstError::Memory { device, needed_bytes, budget_bytes })
    }

    /// Devices in the order in which they are taken: nodes stay together, those with the most memory first.
    fn order(&self) -> Vec<usize> {
        let fleet = self.fleet;
        let memory = |node: usize| {
            let devices = fleet.nodes[node].devices.clone();
            devices.map(|device| fleet.devices[device].memory_bytes).max().unwrap_or(0)
        };
        let mut nodes: Vec<usize> = (0..fleet.nodes.len()).collect();
        nodes.sort_by_key(|node| std::cmp::Reverse(memory(*node)));
        let mut order: Vec<usize> = Vec::new();
        for node in nodes {
            order.extend(fleet.nodes[node].devices.clone());
        }
        order
    }

    /// Every layer on every device that the batch has a sample for.
    pub fn data_parallel(&self) -> Decision {
        let order = self.order();
        let count = order.len().min(self.global_batch);
        Decision { devices: vec![order[..count].to_vec(); self.inputs.len()] }
    }

    /// Every layer on the one device that is taken first.
    pub fn single_device(&self) -> Decision {
        Decision { devices: vec![vec![self.order()[0]]; self.inputs.len()] }
    }

    /// Memory of a device that a plan may fill.
    fn memory_bytes(&self, device: usize) -> u64 {
        let taken = GPU_PROCESS_BYTES + GPU_WORKSPACE_BYTES;
        self.fleet.devices[device].memory_bytes.saturating_sub(taken)
    }

    /// The device whose memory a decision overfills most, with what it needs and has.
    fn overfilled(&self, decision: &Decision) -> Option<(usize, u64, u64)> {
        let mut needed = vec![0; self.fleet.devices.len()];
        for (devices, bytes) in decision.devices.iter().zip(&self.memory) {
            for (position, device) in devices.iter().enumerate() {
                let samples = place::share(self.global_batch, devices.len(), position).count();
                needed[*device] += bytes.state + bytes.kept_a_sample * samples as u64;
            }
        }
        let over = needed.into_iter().enumerate();
        over.map(|(device, needed)| (device, needed, self.memory_bytes(device)))
            .filter(|(_, needed, has)| needed > has)
            .max_by_key(|(_, needed, has)| needed - has)
    }
}

/// What a sample leaves in memory between forward and backward.
fn kept_bytes(kind: &LayerKind, step: StepShape) -> u64 {
    match kind.phases(1, step.precision) {
        Some(phases) => {
            let gain = phases.begin.gain + phases.forward.gain;
            gain.saturating_sub(phases.begin.loss + phases.forward.loss)
        }
        None => kind.footprint(1, step.sequence, step.precision).saved,
    }
}

/// The devices of every layer; each set's devices have equal runs of samples, in the set's order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Decision {
    pub devices: Vec<Vec<usize>>,
}

/// A decision and what it is taken to cost.
#[derive(Clone, Debug)]
pub struct Planned {
    pub decision: Decision,
    pub estimate: Estimate,
}

/// What is wanted of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// The fastest step, whatever it takes.
    Fastest,
    /// The fastest step that takes no more device-seconds.
    DeviceSeconds(f64),
    /// The fastest step that takes no more than so many times the device-seconds of one device alone.
    Amplification(f64),
    /// The least device-seconds of all steps that take no longer.
    StepSeconds(f64),
}

#[derive(Debug, Error, PartialEq)]
pub enum BurstError {
    #[error("the fleet has no device")]
    NoDevices,
    #[error("the global batch has no sample")]
    NoSamples,
    #[error("there are costs of {costs} layers and inputs of {inputs}")]
    Layers { costs: usize, inputs: usize },
    #[error("layer {layer} does not take its inputs from earlier layers")]
    Inputs { layer: usize },
    #[error("no layer takes what layer {layer} makes")]
    Unread { layer: usize },
    #[error("no plan takes {budget_seconds} device-seconds or less: the least is {least_seconds}")]
    Budget { budget_seconds: f64, least_seconds: f64 },
    #[error("no plan takes {wanted_seconds} seconds a step or less")]
    Pace { wanted_seconds: f64 },
    #[error(
        "{device}: the step needs {} MiB, and there are {}: {} MiB short",
        needed_bytes.div_ceil(1 << 20),
        budget_bytes >> 20,
        needed_bytes.saturating_sub(*budget_bytes).div_ceil(1 << 20)
    )]
    Memory { device: String, needed_bytes: u64, budget_bytes: u64 },
    #[error(transparent)]
    Compile(#[from] shoal_plan::CompileError),
}

impl BurstError {
    /// What the user can do about it, as one sentence.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            BurstError::NoDevices => "name a device in fleet.toml".into(),
            BurstError::NoSamples => "set train.global_batch to 1 or more".into(),
            BurstError::Layers { .. } | BurstError::Inputs { .. } | BurstError::Unread { .. } => {
                "give every layer its costs, its memory and the earlier layers that it reads".into()
            }
            BurstError::Budget { least_seconds, .. } => {
                format!("allow {least_seconds} device-seconds or more")
            }
            BurstError::Pace { .. } => "ask for the fastest plan to see what is possible".into(),
            BurstError::Memory { needed_bytes, budget_bytes, .. } => format!(
                "{} bytes are short: add devices, or keep the state in slices",
                needed_bytes.saturating_sub(*budget_bytes)
            ),
            BurstError::Compile(_) => return None,
        })
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
