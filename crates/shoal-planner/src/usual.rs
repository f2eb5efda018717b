//! What is run where nobody plans: every device computes every layer for an equal number of samples, and keeps either all of
//! the state (data parallel) or an equal slice of every tensor (sharded evenly, as FSDP does it). `auto` does not look
//! here; these are what its plans are set beside.

use shoal_fleet::Fleet;
use shoal_model::Chain;
use shoal_plan::table::FORMAT;
use shoal_plan::{
    Activations, Compute, ComputeCopy, Held, Holder, LayerRow, Order, Plan, Residence, Samples, StepShape,
    TensorRow,
};

use crate::device_rows;
use crate::sharded::is_remade;

/// Who keeps the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Everyone,
    InEqualSlices,
}

/// The tables to choose from: micro-batches of every power of two, with activations kept, remade or offloaded.
pub fn tables(chain: &Chain, step: StepShape, fleet: &Fleet, state: State) -> Vec<Plan> {
    let devices = fleet.devices.len();
    let most = step.global_batch.div_ceil(devices.max(1)).max(1);
    let sizes = std::iter::successors(Some(most), |size| (*size > 1).then(|| size.div_ceil(2)));
    let ways = [Activations::Keep, Activations::Recompute, Activations::Offload];
    sizes
        .flat_map(|size| ways.map(|activations| table(chain, step, fleet, state, size, activations)))
        .collect()
}

fn table(
    chain: &Chain,
    step: StepShape,
    fleet: &Fleet,
    state: State,
    micro_batch: usize,
    activations: Activations,
) -> Plan {
    let devices = fleet.devices.len();
    let computing: Vec<(usize, Vec<Samples>)> = (0..devices)
        .map(|device| (device, micro_batches(equal(step.global_batch, devices, device), micro_batch)))
        .filter(|(_, batches)| !batches.is_empty())
        .collect();
    let layers = chain.layers.iter().map(|layer| {
        let activations = if is_remade(&layer.kind) { activations } else { Activations::Keep };
        let compute = computing.iter().map(|(device, batches)| Compute {
            device: *device,
            micro_batches: batches.clone(),
            activations,
        });
        LayerRow { layer: layer.name.clone(), compute: compute.collect() }
    });
    let tensors = chain.tensors.iter().map(|tensor| {
        let elements = tensor.elements();
        let slice = |device: usize| match state {
            State::Everyone => Samples::new(0..elements),
            State::InEqualSlices => equal(elements, devices, device),
        };
        let held: Vec<Held> = (0..devices)
            .map(|device| Held { holder: Holder::Device(device), slice: slice(device) })
            .filter(|held| held.slice.count() > 0)
            .collect();
        let residence = match state {
            State::Everyone => Residence::Resident,
            State::InEqualSlices => Residence::Fetched,
        };
        let copies = computing.iter().map(|(device, _)| ComputeCopy { device: *device, residence });
        TensorRow {
            tensor: tensor.name.clone(),
            elements,
            compute_copies: copies.collect(),
            gradient: held.clone(),
            optimizer: held,
        }
    });
    Plan {
        format: FORMAT,
        global_batch: step.global_batch,
        sequence: step.sequence,
        precision: step.precision,
        optimizer_states: step.optimizer_states,
        gradients: step.gradients,
        devices: device_rows(fleet),
        order: Order::LayerFirst,
        layers: layers.collect(),
        tensors: tensors.collect(),
    }
}

/// The part of so many that is one of some devices'.
fn equal(all: usize, devices: usize, device: usize) -> Samples {
    Samples { start: all * device / devices, end: all * (device + 1) / devices }
}

fn micro_batches(samples: Samples, most: usize) -> Vec<Samples> {
    let starts = samples.range().step_by(most);
    starts.map(|start| Samples { start, end: samples.end.min(start + most) }).collect()
}

#[cfg(test)]
mod tests {
    use shoal_fleet::{Costs, Fleet};
    use shoal_model::{Precision, presets};

    use super::*;
    use crate::auto::{Request, Shape, plan};

    const STEP: StepShape = StepShape {
        global_batch: 10,
        sequence: 64,
        precision: Precision::Fp32,
        optimizer_states: 2,
        gradients: shoal_plan::GradientWire::Fp32,
    };

    fn fleet(memory: &str) -> Fleet {
        let text = format!(
            "[[node]]\ndevices = [{{ kind = \"V100-16\", memory = \"{memory}\" }}, {{ kind = \"T4\", memory = \"{memory}\" }}, \
             {{ kind = \"T4\", memory = \"{memory}\" }}]\nhost_memory = \"64 GiB\"\n"
        );
        Fleet::parse(&text, "three").unwrap()
    }

    #[test]
    fn everyone_has_as_many_samples_as_the_others_and_as_much_state() {
        let chain = Chain::new(&presets::preset("gpt2-tiny").unwrap());
        let fleet = fleet("8 GiB");
        for state in [State::Everyone, State::InEqualSlices] {
            let tables = tables(&chain, STEP, &fleet, state);
            assert_eq!(tables.len(), 3 * 3, "micro-batches of 4, 2 and 1");
            for table in tables {
                table.check(&chain).unwrap();
                for row in &table.layers {
                    let samples = |compute: &Compute| {
                        compute.micro_batches.iter().map(|batch| batch.count()).sum::<usize>()
                    };
                    assert_eq!(row.compute.iter().map(samples).collect::<Vec<_>>(), [3, 3, 4]);
                }
                for row in &table.tensors {
                    let counts: Vec<usize> = row.optimizer.iter().map(|held| held.slice.count()).collect();
                    match state {
                        State::Everyone => assert_eq!(counts, [row.elements; 3]),
                        State::InEqualSlices => {
                            assert!(counts.iter().all(|count| count.abs_diff(row.elements / 3) <= 1));
                        }
                    }
                }
            }
        }
    }

    /// They are found by their names, and slices need less memory than everything.
    #[test]
    fn they_are_planned_when_they_are_asked_for() {
        let chain = Chain::new(&presets::preset("gpt2-124m").unwrap());
        let found = |memory: &str, name: &str| {
            let fleet = fleet(memory);
            let costs = Costs::new(&chain, &fleet, None, STEP.precision, STEP.sequence).unwrap();
            let shapes = [Shape::named(name).unwrap()];
            plan(&Request { shapes: &shapes, ..Request::new(&chain, STEP, &fleet, &costs) })
                .map(|found| found.best)
        };
        assert!(found("16 GiB", "data-parallel").is_ok());
        assert!(found("2 GiB", "data-parallel").is_err());
        assert_eq!(found("2 GiB", "even").unwrap().shape, Shape::Even);
        assert!(!Shape::ALL.contains(&Shape::Even) && !Shape::ALL.contains(&Shape::DataParallel));
    }
}
