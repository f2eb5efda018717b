//! The plan's table of a decision: every layer's samples in equal runs over its devices, layer by layer, and its state
//! where it is computed: whole on each of the devices, or in slices over them where memory is short.

use shoal_fleet::Fleet;
use shoal_model::Chain;
use shoal_plan::layout::Layout;
use shoal_plan::memory::forecast_in;
use shoal_plan::table::FORMAT;
use shoal_plan::{
    Activations, Compute, ComputeCopy, Held, Holder, LayerRow, Order, Plan, Purpose, Residence, Samples,
    StepShape, TensorRow, compile,
};

use super::place::share;
use super::{BurstError, Decision};
use crate::device_rows;

/// Where the state of a layer lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// All of it on each device that computes with it: gradients are added up, and nothing else moves.
    Whole,
    /// A slice on each, and whole copies of the parameters alone, which each update renews.
    Sliced,
}

/// The table of a decision that fits every device's memory: with whole state if that fits, else with slices, else with
/// activations recomputed too.
pub fn table(chain: &Chain, step: StepShape, fleet: &Fleet, decision: &Decision) -> Result<Plan, BurstError> {
    let tries = [
        (State::Whole, Activations::Keep),
        (State::Sliced, Activations::Keep),
        (State::Sliced, Activations::Recompute),
    ];
    let mut nearest: Option<BurstError> = None;
    for (state, activations) in tries {
        let plan = table_with(chain, step, fleet, decision, state, activations);
        match overfilled(&plan, chain)? {
            None => return Ok(plan),
            Some((device, needed_bytes)) => {
                let row = &plan.devices[device];
                let (device, budget_bytes) = (row.name.clone(), row.budget_bytes);
                nearest = Some(BurstError::Memory { device, needed_bytes, budget_bytes });
            }
        }
    }
    Err(nearest.unwrap_or(BurstError::NoDevices))
}

/// The device that a plan overfills most, and what it would need there.
fn overfilled(plan: &Plan, chain: &Chain) -> Result<Option<(usize, u64)>, BurstError> {
    let programs = compile(plan, chain, Purpose::Train)?;
    let layout = Layout::new(plan, chain);
    let needed = programs.iter().map(|program| (program.device, forecast_in(program, &layout).total()));
    let over = needed.filter(|(device, needed)| *needed > plan.devices[*device].budget_bytes);
    Ok(over.max_by_key(|(device, needed)| needed - plan.devices[*device].budget_bytes))
}

/// The table with everything said.
pub fn table_with(
    chain: &Chain,
    step: StepShape,
    fleet: &Fleet,
    decision: &Decision,
    state: State,
    activations: Activations,
) -> Plan {
    let StepShape { global_batch, sequence, precision, optimizer_states, gradients } = step;
    let compute = |devices: &Vec<usize>| {
        let shares = devices.iter().enumerate().map(|(position, device)| Compute {
            device: *device,
            micro_batches: vec![share(global_batch, devices.len(), position)],
            activations,
        });
        shares.filter(|compute| compute.micro_batches[0].count() > 0).collect()
    };
    let layers = chain.layers.iter().zip(&decision.devices);
    let layers =
        layers.map(|(layer, devices)| LayerRow { layer: layer.name.clone(), compute: compute(devices) });
    let layers: Vec<LayerRow> = layers.collect();
    let tensor = |(index, tensor): (usize, &shoal_model::TensorSpec)| {
        let computing = chain.users(index).flat_map(|layer| &layers[layer].compute);
        let mut devices: Vec<usize> = computing.map(|compute| compute.device).collect();
        devices.sort_unstable();
        devices.dedup();
        let held = held(&devices, tensor.elements(), state);
        let copy = |device: &usize| ComputeCopy { device: *device, residence: Residence::Resident };
        TensorRow {
            tensor: tensor.name.clone(),
            elements: tensor.elements(),
            compute_copies: devices.iter().map(copy).collect(),
            gradient: held.clone(),
            optimizer: held,
        }
    };
    Plan {
        format: FORMAT,
        global_batch,
        sequence,
        precision,
        optimizer_states,
        gradients,
        devices: device_rows(fleet),
        order: Order::LayerFirst,
        tensors: chain.tensors.iter().enumerate().map(tensor).collect(),
        layers,
    }
}

fn held(devices: &[usize], elements: usize, state: State) -> Vec<Held> {
    let slice = |position: usize| match state {
        State::Whole => Samples::new(0..elements),
        State::Sliced => share(elements, devices.len(), position),
    };
    let all = devices.iter().enumerate();
    let held = all.map(|(position, device)| Held { holder: Holder::Device(*device), slice: slice(position) });
    // A tensor of few elements leaves some devices without any.
    held.filter(|held| held.slice.count() > 0).collect()
}
