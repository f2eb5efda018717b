//! Runs of layers on devices one after the other, in one or several replicas, which may cut the chain differently and
//! take different numbers of samples.

use std::ops::Range;

use shoal_model::Chain;
use shoal_plan::one_device::StepShape;
use shoal_plan::table::FORMAT;
use shoal_plan::{
    Activations, Compute, ComputeCopy, DeviceRow, Held, Holder, LayerRow, Order, Plan, Residence, Samples,
    TensorRow,
};

/// A device and the layers that it computes of its replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    pub device: usize,
    pub layers: Range<usize>,
}

/// Some of the samples, and the stages that they pass, which have all layers between them.
#[derive(Clone, Debug, PartialEq, Eq)]
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

    fn device(&self, layer: usize) -> Option<usize> {
        self.stages.iter().find(|stage| stage.layers.contains(&layer)).map(|stage| stage.device)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pipeline {
    pub replicas: Vec<Replica>,
    pub order: Order,
    pub activations: Activations,
    /// Whether replicas divide the optimizer's state of a layer among them, or each keeps all of it.
    pub divides_state: bool,
}

/// The table of a pipeline.
pub fn table(chain: &Chain, step: StepShape, devices: Vec<DeviceRow>, pipeline: &Pipeline) -> Plan {
    let layers = chain.layers.iter().enumerate().map(|(number, layer)| {
        let compute = pipeline.replicas.iter().filter_map(|replica| {
            let device = replica.device(number)?;
            let activations = pipeline.activations;
            Some(Compute { device, micro_batches: replica.micro_batches(), activations })
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
        devices,
        order: pipeline.order,
        layers: layers.collect(),
        tensors: tensors.collect(),
    }
}

fn tensor_row(chain: &Chain, pipeline: &Pipeline, tensor: usize) -> TensorRow {
    let spec = &chain.tensors[tensor];
    let users: Vec<usize> = chain.users(tensor).collect();
    let mut devices: Vec<usize> = users
        .iter()
        .flat_map(|layer| pipeline.replicas.iter().filter_map(|replica| replica.device(*layer)))
        .collect();
    devices.sort_unstable();
    devices.dedup();
    let copies = devices.iter().map(|device| ComputeCopy { device: *device, residence: Residence::Resident });
    let elements = spec.elements();
    let count = devices.len();
    let held: Vec<Held> = match pipeline.divides_state && elements >= count {
        true => (0..count)
            .map(|place| Held {
                holder: Holder::Device(devices[place]),
                slice: Samples { start: elements * place / count, end: elements * (place + 1) / count },
            })
            .collect(),
        false => devices
            .iter()
            .map(|device| Held {
                holder: Holder::Device(*device),
                slice: Samples { start: 0, end: elements },
            })
            .collect(),
    };
    TensorRow {
        tensor: spec.name.clone(),
        elements,
        compute_copies: copies.collect(),
        gradient: held.clone(),
        optimizer: held,
    }
}
