//! Runs of layers on devices one after the other, in one or several replicas, which may cut the chain differently and
//! take different numbers of samples.
//!
//! - [`table`]: from a pipeline to its table.
//! - [`plan`]: the search for the best one. It divides the devices among replicas (`divide`), cuts the chain for each
//!   by what stages take (`stages`, `cuts`), gives each its samples (`shares`), and has the best tried out (`trial`), with
//!   their ends on one device too where these share a tensor (`looped`).
//! - [`varuna`]: the pipelines of a published system beside ours.

mod candidate;
mod cuts;
mod divide;
mod looped;
mod outcome;
mod polish;
mod rating;
mod search;
mod shares;
mod stages;
mod trial;
pub mod varuna;

use std::ops::Range;

use serde::Serialize;
use shoal_model::Chain;
use shoal_plan::one_device::StepShape;
use shoal_plan::table::FORMAT;
use shoal_plan::{
    Activations, Compute, ComputeCopy, DeviceRow, Held, Holder, LayerRow, Order, Plan, Residence, Samples,
    TensorRow,
};

pub use outcome::{Bottleneck, PipelineError, PipelinePlanned, PipelineWanted, RunnerUp};
pub use search::plan;

/// A device and the layers that it computes of its replica.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Stage {
    pub device: usize,
    pub layers: Range<usize>,
    pub activations: Activations,
    /// The most micro-batches between forward and backward, where memory holds fewer than the order asks for.
    pub stash: Option<usize>,
}

/// Some of the samples, and the stages that they pass, which have all layers between them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Replica {
    pub samples: Range<usize>,
    /// Samples of a micro-batch; the last may have fewer.
    pub micro_batch: usize,
    pub stages: Vec<Stage>,
}

impl Replica {
    fn micro_batches(&self) -> Vec<Samples> {
        let starts = self.samples.clone().step_by(self.micro_batch.max(1));
        starts.map(|start| Samples { start, end: (start + self.micro_batch).min(self.samples.end) }).collect()
    }

    fn stage(&self, layer: usize) -> Option<&Stage> {
        self.stages.iter().find(|stage| stage.layers.contains(&layer))
    }
}

/// Where a layer's parameters and optimizer state are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Every replica keeps all of it.
    Whole,
    /// Replicas divide it among them.
    Divided,
    /// The same in their hosts' memories, where it is updated too.
    Host,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Pipeline {
    pub replicas: Vec<Replica>,
    pub order: Order,
    pub state: State,
}

/// The table of a pipeline.
pub fn table(chain: &Chain, step: StepShape, mut devices: Vec<DeviceRow>, pipeline: &Pipeline) -> Plan {
    for stage in pipeline.replicas.iter().flat_map(|replica| &replica.stages) {
        devices[stage.device].stash = stage.stash;
    }
    let micro_batches: Vec<Vec<Samples>> = pipeline.replicas.iter().map(Replica::micro_batches).collect();
    let layers = chain.layers.iter().enumerate().map(|(number, layer)| {
        let compute = pipeline.replicas.iter().zip(&micro_batches).filter_map(|(replica, micro_batches)| {
            let stage = replica.stage(number)?;
            let activations = match pipeline.order {
                Order::LayerFirst => stage.activations,
                _ => crate::kept(&layer.kind, stage.activations),
            };
            Some(Compute { device: stage.device, micro_batches: micro_batches.clone(), activations })
        });
        LayerRow { layer: layer.name.clone(), compute: compute.collect() }
    });
    let tensors = (0..chain.tensors.len()).map(|tensor| tensor_row(chain, pipeline, tensor));
    Plan {
        format: FORMAT,
        global_batch: step.global_batch,
        sequence: step.sequence,
        precision: step.precision,
        optimizer_states: step.optimizer_states,
        gradients: step.gradients,
        order: pipeline.order,
        layers: layers.collect(),
        tensors: tensors.collect(),
        devices,
    }
}

fn tensor_row(chain: &Chain, pipeline: &Pipeline, tensor: usize) -> TensorRow {
    let spec = &chain.tensors[tensor];
    let users: Vec<usize> = chain.users(tensor).collect();
    let mut devices: Vec<usize> = users
        .iter()
        .flat_map(|layer| pipeline.replicas.iter().filter_map(|replica| replica.stage(*layer)))
        .map(|stage| stage.device)
        .collect();
    devices.sort_unstable();
    devices.dedup();
    let copies = devices.iter().map(|device| ComputeCopy { device: *device, residence: Residence::Resident });
    let elements = spec.elements();
    let holder = |device: usize| match pipeline.state {
        State::Host => Holder::Host(device),
        State::Whole | State::Divided => Holder::Device(device),
    };
    let whole = Samples { start: 0, end: elements };
    let held: Vec<Held> = match pipeline.state {
        State::Whole => devices.iter().map(|device| Held { holder: holder(*device), slice: whole }).collect(),
        State::Divided | State::Host => {
            // A tensor of few elements is divided among so many.
            let count = devices.len().min(elements);
            let slice =
                |place| Samples { start: elements * place / count, end: elements * (place + 1) / count };
            (0..count).map(|place| Held { holder: holder(devices[place]), slice: slice(place) }).collect()
        }
    };
    TensorRow {
        tensor: spec.name.clone(),
        elements,
        compute_copies: copies.collect(),
        gradient: held.clone(),
        optimizer: held,
    }
}
