//! From a pipeline of groups to its table.

use shoal_fleet::Costs;
use shoal_model::Chain;
use shoal_plan::one_device::StepShape;
use shoal_plan::table::FORMAT;
use shoal_plan::{
    Compute, ComputeCopy, DeviceRow, Held, Holder, LayerRow, Plan, Residence, Samples, TensorRow,
};

use super::deal::deal;
use super::{GroupStage, Mixed};
use crate::kept;

/// The table. The devices of a group hold its state in slices as large as their `rooms`, which are in any unit, by device.
pub fn table(
    chain: &Chain,
    step: StepShape,
    costs: &Costs,
    mut devices: Vec<DeviceRow>,
    mixed: &Mixed,
    rooms: &[f64],
) -> Plan {
    // A device with two stages stashes as the first says.
    for stage in mixed.stages.iter().rev() {
        stage.devices.iter().for_each(|device| devices[*device].stash = stage.stash);
    }
    let dealt = deal(costs, &mixed.stages, step.global_batch);
    let mut layers: Vec<LayerRow> = Vec::new();
    for (stage, dealt) in mixed.stages.iter().zip(&dealt) {
        for layer in &chain.layers[stage.layers.clone()] {
            let own = stage.devices.iter().zip(dealt).filter(|(_, pieces)| !pieces.is_empty());
            let compute = own.map(|(device, pieces)| Compute {
                device: *device,
                micro_batches: pieces.clone(),
                activations: kept(&layer.kind, stage.activations),
            });
            layers.push(LayerRow { layer: layer.name.clone(), compute: compute.collect() });
        }
    }
    let tensors = (0..chain.tensors.len()).map(|tensor| tensor_row(chain, mixed, &layers, tensor, rooms));
    Plan {
        format: FORMAT,
        global_batch: step.global_batch,
        sequence: step.sequence,
        precision: step.precision,
        optimizer_states: step.optimizer_states,
        gradients: step.gradients,
        devices,
        order: mixed.order,
        tensors: tensors.collect(),
        layers,
    }
}

/// Copies where it is computed; the state in slices over all devices of those stages.
fn tensor_row(chain: &Chain, mixed: &Mixed, rows: &[LayerRow], tensor: usize, rooms: &[f64]) -> TensorRow {
    let spec = &chain.tensors[tensor];
    let users: Vec<usize> = chain.users(tensor).collect();
    let mut computing: Vec<usize> =
        users.iter().flat_map(|layer| rows[*layer].compute.iter().map(|compute| compute.device)).collect();
    computing.sort_unstable();
    computing.dedup();
    let uses = |stage: &&GroupStage| users.iter().any(|layer| stage.layers.contains(layer));
    let mut holders: Vec<usize> =
        mixed.stages.iter().filter(uses).flat_map(|stage| stage.devices.clone()).collect();
    holders.sort_unstable();
    holders.dedup();
    let held = slices(spec.elements(), &holders, rooms);
    // A device with two stages that use it keeps it as the first does.
    let residence = |device: usize| {
        let own = mixed.stages.iter().filter(uses).find(|stage| stage.devices.contains(&device));
        own.map_or(Residence::Resident, |stage| stage.copies)
    };
    let copies =
        computing.iter().map(|device| ComputeCopy { device: *device, residence: residence(*device) });
    TensorRow {
        tensor: spec.name.clone(),
        elements: spec.elements(),
        compute_copies: copies.collect(),
        gradient: held.clone(),
        optimizer: held,
    }
}

/// Elements divided by what rooms there are; evenly where there are none.
fn slices(elements: usize, holders: &[usize], rooms: &[f64]) -> Vec<Held> {
    let total: f64 = holders.iter().map(|device| rooms[*device]).sum();
    let (mut held, mut below, mut start) = (Vec::new(), 0.0, 0);
    for (place, device) in holders.iter().enumerate() {
        below += if total > 0.0 { rooms[*device] / total } else { 1.0 / holders.len() as f64 };
        let last = place + 1 == holders.len();
        let end = if last { elements } else { ((elements as f64 * below) as usize).clamp(start, elements) };
        if end > start {
            held.push(Held { holder: Holder::Device(*device), slice: Samples { start, end } });
        }
        start = end;
    }
    held
}
