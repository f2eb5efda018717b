//! Pipelines whose stages are groups: each stage is computed by several devices, unequal ones too, which divide every
//! micro-batch between them and the optimizer's state as their memory allows. What is dear stays inside a group, which
//! is a node here, and only activations pass between nodes: fewer stages than devices, so less of the step is spent
//! filling and draining. Where first and last layer share a tensor (a tied embedding), the last goes to the first group
//! too, so that the tensor's gradient stays inside it.

use std::ops::Range;

use shoal_fleet::{Costs, Fleet};
use shoal_model::Chain;
use shoal_plan::memory::{MemoryForecast, forecast_in};
use shoal_plan::one_device::StepShape;
use shoal_plan::table::FORMAT;
use shoal_plan::{
    Activations, CompileError, Compute, ComputeCopy, Held, Holder, LayerRow, Layout, Order, Plan,
    ProgramError, Purpose, Residence, Samples, TensorRow, compile_paced,
};
use shoal_sim::{FleetWorld, Settings, Simulated, simulate};

use crate::device_rows;

/// A run of layers and the devices that share it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupStage {
    pub devices: Vec<usize>,
    pub layers: Range<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mixed {
    pub stages: Vec<GroupStage>,
    pub micro_batch: usize,
    pub activations: Activations,
    pub order: Order,
}

pub struct MixedPlanned {
    pub mixed: Mixed,
    pub plan: Plan,
    pub simulated: Simulated,
    /// By device.
    pub memory: Vec<MemoryForecast>,
}

/// The best pipeline of groups, one a node, that fits; none where no such pipeline does.
pub fn plan(
    chain: &Chain,
    step: StepShape,
    fleet: &Fleet,
    costs: &Costs,
) -> Result<Option<MixedPlanned>, PlayError> {
    let groups: Vec<Vec<usize>> = fleet.nodes.iter().map(|node| node.devices.clone().collect()).collect();
    let search = Search { chain, step, fleet, costs, groups: &groups };
    let mut best: Option<MixedPlanned> = None;
    for activations in [Activations::Keep, Activations::Recompute] {
        for micro_batch in micro_batches(step.global_batch) {
            for returns in [false, true] {
                let Some(stages) = search.cut(micro_batch, activations, returns) else { continue };
                let mixed = Mixed { stages, micro_batch, activations, order: Order::OneForwardOneBackward };
                let played = search.play(mixed)?;
                let rows = played.plan.devices.iter().zip(&played.memory);
                let fits = rows.into_iter().all(|(row, memory)| memory.total() <= row.budget_bytes);
                let quicker = |best: &MixedPlanned| played.simulated.seconds < best.simulated.seconds;
                if fits && best.as_ref().is_none_or(quicker) {
                    best = Some(played);
                }
            }
        }
    }
    Ok(best)
}

/// A table that does not compile or does not run: a defect of ours, not of the fleet.
#[derive(Debug, thiserror::Error)]
pub enum PlayError {
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error(transparent)]
    Program(#[from] ProgramError),
}

fn micro_batches(batch: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> = (1..=batch).map(|count| batch.div_ceil(count)).collect();
    sizes.dedup();
    sizes
}

struct Search<'a> {
    chain: &'a Chain,
    step: StepShape,
    fleet: &'a Fleet,
    costs: &'a Costs,
    groups: &'a [Vec<usize>],
}

impl Search<'_> {
    /// How a group divides some samples: each next one to whoever would be done with it first.
    fn divide(&self, group: &[usize], samples: usize) -> Vec<usize> {
        let middle = self.chain.layers.len() / 2;
        let mut counts = vec![0; group.len()];
        for _ in 0..samples {
            let next = (0..group.len()).min_by(|a, b| {
                let done = |member: usize| self.seconds(middle, group[member], counts[member] + 1);
                done(*a).total_cmp(&done(*b))
            });
            counts[next.expect("a node has a device")] += 1;
        }
        counts
    }

    fn seconds(&self, layer: usize, device: usize, samples: usize) -> f64 {
        self.costs.forward(layer, device, samples) + self.costs.backward(layer, device, samples)
    }

    /// Whether some tensor is used by the first and by the last layer.
    fn is_tied(&self) -> bool {
        let last = self.chain.layers.len() - 1;
        let first = self.chain.layers[0].tensors.iter().map(|(_, tensor)| *tensor);
        first.into_iter().any(|tensor| self.chain.users(tensor).any(|layer| layer == last))
    }

    /// Cuts the chain so that the slowest stage is as fast as can be: stage by stage, the best last cut for each layer.
    /// Where the pipeline `returns`, the last layer is the first group's, which only tied tensors ask for.
    fn cut(&self, micro_batch: usize, activations: Activations, returns: bool) -> Option<Vec<GroupStage>> {
        let stages = self.groups.len();
        let last = self.chain.layers.len() - 1;
        let layers = if returns { last } else { last + 1 };
        if stages > layers || returns && (stages < 2 || !self.is_tied()) {
            return None;
        }
        let again = if activations == Activations::Keep { 0.0 } else { 1.0 };
        // Of each stage, what its layers up to each take.
        let sums: Vec<Vec<f64>> = self
            .groups
            .iter()
            .map(|group| {
                let counts = self.divide(group, micro_batch);
                let mut sum = vec![0.0; layers + 1];
                for layer in 0..layers {
                    let take = |(device, samples): (&usize, &usize)| {
                        self.seconds(layer, *device, *samples)
                            + again * self.costs.forward(layer, *device, *samples)
                    };
                    let slowest = group.iter().zip(&counts).map(take).fold(0.0, f64::max);
                    sum[layer + 1] = sum[layer] + slowest;
                }
                sum
            })
            .collect();
        let returned = if returns {
            let counts = self.divide(&self.groups[0], micro_batch);
            let take = |(device, samples): (&usize, &usize)| self.seconds(last, *device, *samples);
            self.groups[0].iter().zip(&counts).map(take).fold(0.0, f64::max)
        } else {
            0.0
        };
        let mut best = vec![vec![f64::INFINITY; layers + 1]; stages + 1];
        let mut from = vec![vec![0; layers + 1]; stages + 1];
        best[0][0] = 0.0;
        for stage in 0..stages {
            for end in stage + 1..=layers {
                for start in stage..end {
                    let also = if stage == 0 { returned } else { 0.0 };
                    let slowest = best[stage][start].max(also + sums[stage][end] - sums[stage][start]);
                    if slowest < best[stage + 1][end] {
                        (best[stage + 1][end], from[stage + 1][end]) = (slowest, start);
                    }
                }
            }
        }
        let mut cut = Vec::new();
        let mut end = layers;
        for stage in (0..stages).rev() {
            let start = from[stage + 1][end];
            cut.push(GroupStage { devices: self.groups[stage].clone(), layers: start..end });
            end = start;
        }
        cut.reverse();
        if returns {
            cut.push(GroupStage { devices: self.groups[0].clone(), layers: last..last + 1 });
        }
        Some(cut)
    }

    fn play(&self, mixed: Mixed) -> Result<MixedPlanned, PlayError> {
        let plan = self.table(&mixed);
        let layout = Layout::new(&plan, self.chain);
        let world = FleetWorld::new(self.fleet, self.costs, &layout);
        let programs = compile_paced(&plan, self.chain, Purpose::Train, &world)?;
        let simulated = simulate(&programs, &layout, &world, Settings::default())?;
        let memory = programs.iter().map(|program| forecast_in(program, &layout)).collect();
        drop(layout);
        Ok(MixedPlanned { mixed, plan, simulated, memory })
    }

    /// The table of a pipeline of groups.
    fn table(&self, mixed: &Mixed) -> Plan {
        let Search { chain, step, fleet, .. } = *self;
        let mut rows: Vec<LayerRow> = Vec::new();
        for stage in &mixed.stages {
            let mut shares: Vec<Vec<Samples>> = vec![Vec::new(); stage.devices.len()];
            for start in (0..step.global_batch).step_by(mixed.micro_batch) {
                let samples = mixed.micro_batch.min(step.global_batch - start);
                let mut next = start;
                for (member, count) in self.divide(&stage.devices, samples).into_iter().enumerate() {
                    if count > 0 {
                        shares[member].push(Samples { start: next, end: next + count });
                    }
                    next += count;
                }
            }
            for layer in stage.layers.clone() {
                let compute = stage.devices.iter().zip(&shares).filter(|(_, own)| !own.is_empty());
                let compute = compute.map(|(device, own)| Compute {
                    device: *device,
                    micro_batches: own.clone(),
                    activations: mixed.activations,
                });
                rows.push(LayerRow { layer: chain.layers[layer].name.clone(), compute: compute.collect() });
            }
        }
        let tensors = (0..chain.tensors.len()).map(|tensor| self.tensor_row(mixed, &rows, tensor)).collect();
        Plan {
            format: FORMAT,
            global_batch: step.global_batch,
            sequence: step.sequence,
            precision: step.precision,
            optimizer_states: step.optimizer_states,
            devices: device_rows(fleet),
            order: mixed.order,
            layers: rows,
            tensors,
        }
    }

    /// Copies where it is computed; the state in slices over all devices of those stages, by their memory.
    fn tensor_row(&self, mixed: &Mixed, rows: &[LayerRow], tensor: usize) -> TensorRow {
        let spec = &self.chain.tensors[tensor];
        let users: Vec<usize> = self.chain.users(tensor).collect();
        let mut computing: Vec<usize> =
            users.iter().flat_map(|layer| rows[*layer].compute.iter().map(|c| c.device)).collect();
        computing.sort_unstable();
        computing.dedup();
        let stages =
            mixed.stages.iter().filter(|stage| users.iter().any(|layer| stage.layers.contains(layer)));
        let mut holders: Vec<usize> = stages.flat_map(|stage| stage.devices.clone()).collect();
        holders.sort_unstable();
        holders.dedup();
        let memory = |device: &usize| u128::from(self.fleet.devices[*device].memory_bytes);
        let total: u128 = holders.iter().map(memory).sum();
        let elements = spec.elements();
        let (mut held, mut below, mut start) = (Vec::new(), 0u128, 0);
        for device in &holders {
            below += memory(device);
            let end = (elements as u128 * below / total.max(1)) as usize;
            if end > start {
                held.push(Held { holder: Holder::Device(*device), slice: Samples { start, end } });
            }
            start = end;
        }
        let copies =
            computing.iter().map(|device| ComputeCopy { device: *device, residence: Residence::Resident });
        TensorRow {
            tensor: spec.name.clone(),
            elements,
            compute_copies: copies.collect(),
            gradient: held.clone(),
            optimizer: held,
        }
    }
}
