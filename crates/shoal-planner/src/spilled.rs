//! Models larger than the device: parameters and optimizer state wait in host memory or on disk, layers stream through
//! the device one after the other, every one loaded once a pass for all micro-batches. And several such models at once
//! on a pool of devices.

use shoal_fleet::{Costs, Fleet, Node};
use shoal_model::Chain;
use shoal_plan::memory::{MemoryForecast, after_computing, forecast_in};
use shoal_plan::one_device::StepShape;
use shoal_plan::table::FORMAT;
use shoal_plan::{
    Activations, CompileError, Compute, ComputeCopy, Held, Holder, LayerRow, Layout, Order, Plan, Program,
    ProgramError, Purpose, Residence, Samples, TensorRow, Tier, compile_in, compile_paced,
};
use shoal_sim::{FleetWorld, OnDevice, PoolJob, Settings, Simulated, simulate, simulate_jobs};
use thiserror::Error;

use crate::device_rows;

/// Shares of the layers whose state stays on the device, tried in turn.
const SHARES_ON_DEVICE: [f64; 6] = [1.0, 0.75, 0.5, 0.25, 0.1, 0.0];

#[derive(Debug, Error)]
pub enum SpilledError {
    #[error(
        "{device}: even with all state elsewhere, a step of one sample at a time needs {} MiB, it has {}: {} MiB short",
        needed_bytes.div_ceil(1 << 20),
        budget_bytes >> 20,
        needed_bytes.saturating_sub(*budget_bytes).div_ceil(1 << 20)
    )]
    TooSmall { device: String, needed_bytes: u64, budget_bytes: u64 },
    #[error(
        "{node}: the state needs {} MiB of host memory, there are {}: {} MiB short",
        needed_bytes.div_ceil(1 << 20),
        there_bytes >> 20,
        needed_bytes.saturating_sub(*there_bytes).div_ceil(1 << 20)
    )]
    HostTooSmall { node: String, needed_bytes: u64, there_bytes: u64 },
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error(transparent)]
    Program(#[from] ProgramError),
}

impl SpilledError {
    pub fn hint(&self) -> Option<String> {
        match self {
            SpilledError::TooSmall { .. } => Some("shorten the sequence, or choose a larger device".into()),
            SpilledError::HostTooSmall { .. } => {
                Some("give the node a disk in the fleet file, or choose a machine with more memory".into())
            }
            SpilledError::Compile(_) | SpilledError::Program(_) => None,
        }
    }
}

/// Where the state of a model is that runs on one device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spill {
    /// The device of the fleet.
    pub device: usize,
    pub micro_batch: usize,
    /// The number of layers, the last ones, that keep all their backward reads.
    pub kept_layers: usize,
    /// What becomes of the others' activations.
    pub activations: Activations,
    /// The share of the layers, the last ones, whose state is in the device's own memory.
    pub on_device: f64,
    /// Where that of the others is.
    pub elsewhere: Tier,
}

pub struct Spilled {
    pub spill: Spill,
    pub plan: Plan,
    pub program: Program,
    pub simulated: Simulated,
    pub memory: MemoryForecast,
}

/// The table of a model that streams through a device. The fleet's other devices have no part in it.
pub fn table(chain: &Chain, step: StepShape, fleet: &Fleet, spill: &Spill) -> Plan {
    let Spill { device, micro_batch, kept_layers, activations, on_device, elsewhere } = *spill;
    let starts = (0..step.global_batch).step_by(micro_batch.max(1));
    let micro_batches: Vec<Samples> =
        starts.map(|start| Samples { start, end: (start + micro_batch).min(step.global_batch) }).collect();
    // What the last layers keep is used up first: room for making the others' again.
    let first_kept = chain.layers.len().saturating_sub(kept_layers);
    let layers = chain.layers.iter().enumerate().map(|(number, layer)| {
        let activations = if number < first_kept { activations } else { Activations::Keep };
        let compute = vec![Compute { device, micro_batches: micro_batches.clone(), activations }];
        LayerRow { layer: layer.name.clone(), compute }
    });
    // The last layers stay: their backward follows their forward, so they would be loaded twice for nothing.
    let first_here = ((1.0 - on_device) * chain.layers.len() as f64).round() as usize;
    let tensors = (0..chain.tensors.len()).map(|tensor| {
        let spec = &chain.tensors[tensor];
        let stays = chain.users(tensor).all(|layer| layer >= first_here);
        let (holder, residence) = match (stays, elsewhere) {
            (true, _) | (_, Tier::Device) => (Holder::Device(device), Residence::Resident),
            (false, Tier::Host) => (Holder::Host(device), Residence::Fetched),
            (false, Tier::Disk) => (Holder::Disk(device), Residence::Fetched),
        };
        let held = vec![Held { holder, slice: Samples { start: 0, end: spec.elements() } }];
        TensorRow {
            tensor: spec.name.clone(),
            elements: spec.elements(),
            compute_copies: vec![ComputeCopy { device, residence }],
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

/// The fastest way to run a model's step on one device of a fleet, with as much of its state elsewhere as must be.
pub fn plan(
    chain: &Chain,
    step: StepShape,
    fleet: &Fleet,
    costs: &Costs,
    device: usize,
) -> Result<Spilled, SpilledError> {
    let budget_bytes = device_rows(fleet)[device].budget_bytes;
    search(chain, step, fleet, costs, device, budget_bytes, &SHARES_ON_DEVICE)
}

fn search(
    chain: &Chain,
    step: StepShape,
    fleet: &Fleet,
    costs: &Costs,
    device: usize,
    budget_bytes: u64,
    shares_on_device: &[f64],
) -> Result<Spilled, SpilledError> {
    let node = &fleet.nodes[fleet.devices[device].node];
    let tiers = match node.disk {
        Some(_) => vec![Tier::Host, Tier::Disk],
        None => vec![Tier::Host],
    };
    let room = Room { budget_bytes, node, least: u64::MAX, least_host: u64::MAX };
    let mut search = Search { chain, step, fleet, costs, room, best: None };
    for elsewhere in tiers {
        for micro_batch in sizes(step.global_batch) {
            for activations in [Activations::Recompute, Activations::Offload] {
                for on_device in shares_on_device.iter().copied() {
                    let kept_layers = 0;
                    let spill = Spill { device, micro_batch, kept_layers, activations, on_device, elsewhere };
                    // Less on the device is slower, or no faster, unless the room keeps activations.
                    if search.keep_most(spill)? == Some(chain.layers.len()) {
                        break;
                    }
                }
            }
        }
    }
    let Search { room: Room { least, least_host, .. }, best, .. } = search;
    best.ok_or_else(|| match least > budget_bytes {
        true => SpilledError::TooSmall {
            device: fleet.devices[device].name.clone(),
            needed_bytes: least,
            budget_bytes,
        },
        false => SpilledError::HostTooSmall {
            node: node.name.clone(),
            needed_bytes: least_host,
            there_bytes: node.host_memory_bytes,
        },
    })
}

/// What there is, and the least that was needed of it.
struct Room<'a> {
    budget_bytes: u64,
    node: &'a Node,
    least: u64,
    least_host: u64,
}

impl Room<'_> {
    fn fits(&mut self, memory: &MemoryForecast) -> bool {
        self.least = self.least.min(memory.total());
        if memory.total() > self.budget_bytes {
            return false;
        }
        self.least_host = self.least_host.min(memory.host);
        let disk = self.node.disk.as_ref().is_none_or(|disk| memory.disk <= disk.bytes);
        memory.host <= self.node.host_memory_bytes && disk
    }
}

struct Search<'a> {
    chain: &'a Chain,
    step: StepShape,
    fleet: &'a Fleet,
    costs: &'a Costs,
    room: Room<'a>,
    best: Option<Spilled>,
}

impl Search<'_> {
    /// Tries a spill with as many layers kept as there is room for, and none; how many that is, if even none fits nothing.
    fn keep_most(&mut self, spill: Spill) -> Result<Option<usize>, SpilledError> {
        if !self.fits(&spill)? {
            return Ok(None);
        }
        let (mut fits, mut too_many) = (0, self.chain.layers.len() + 1);
        while too_many - fits > 1 {
            let kept_layers = fits.midpoint(too_many);
            match self.fits(&Spill { kept_layers, ..spill })? {
                true => fits = kept_layers,
                false => too_many = kept_layers,
            }
        }
        for kept_layers in [0, fits] {
            let tried = self.tried(Spill { kept_layers, ..spill })?;
            let seconds = tried.simulated.seconds;
            if self.best.as_ref().is_none_or(|best| seconds < best.simulated.seconds) {
                self.best = Some(tried);
            }
        }
        Ok(Some(fits))
    }

    fn fits(&mut self, spill: &Spill) -> Result<bool, SpilledError> {
        let plan = table(self.chain, self.step, self.fleet, spill);
        let layout = Layout::new(&plan, self.chain);
        let world = FleetWorld::new(self.fleet, self.costs, &layout);
        let programs = compile_in(&layout, Purpose::Train, &world)?;
        Ok(self.room.fits(&forecast_in(&programs[spill.device], &layout)))
    }

    fn tried(&self, spill: Spill) -> Result<Spilled, SpilledError> {
        let plan = table(self.chain, self.step, self.fleet, &spill);
        let layout = Layout::new(&plan, self.chain);
        let world = FleetWorld::new(self.fleet, self.costs, &layout);
        let mut programs = compile_in(&layout, Purpose::Train, &world)?;
        let simulated = simulate(&programs, &layout, &world, Settings::default())?;
        let program = programs.swap_remove(spill.device);
        let memory = forecast_in(&program, &layout);
        drop(layout);
        Ok(Spilled { spill, plan, program, simulated, memory })
    }
}

/// Micro-batch sizes that cut a batch evenly, the largest first.
fn sizes(batch: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> = (1..=batch).map(|count| batch.div_ceil(count)).collect();
    sizes.dedup();
    sizes.retain(|size| size.is_power_of_two() || *size == batch);
    sizes
}

/// Several models, each for so many steps, on all devices of a fleet.
pub struct Together {
    /// When the last ended.
    pub seconds: f64,
    /// No schedule of these steps ends before this: their work on compute lanes divided by the devices, or what the hosts'
    /// memories must carry. Other plans may compute less: those that recompute nothing.
    pub bound_seconds: f64,
    /// Each device running one model to its end, then another.
    pub one_after_another_seconds: f64,
}

/// Plays `copies` of a model through, `steps` steps each, on a pool of equal devices. All state is on the host, where
/// every device finds it.
pub fn together(
    chain: &Chain,
    step: StepShape,
    fleet: &Fleet,
    costs: &Costs,
    copies: usize,
    steps: usize,
) -> Result<Together, SpilledError> {
    let budget_bytes = device_rows(fleet)[0].budget_bytes;
    let of = Pooled { chain, step, fleet, costs, copies, steps };
    let whole = search(chain, step, fleet, costs, 0, budget_bytes, &[0.0])?;
    let mut best = of.play(&whole)?;
    // With so much less memory a step, or half of it, one step's end and the next one's beginning go on side by side.
    let layout = Layout::new(&whole.plan, chain);
    let beside = budget_bytes.saturating_sub(after_computing(&whole.program, &layout));
    for budget_bytes in [beside, budget_bytes / 2] {
        match search(chain, step, fleet, costs, 0, budget_bytes, &[0.0]) {
            Ok(smaller) => {
                let played = of.play(&smaller)?;
                if played.seconds < best.seconds {
                    best = played;
                }
            }
            Err(SpilledError::TooSmall { .. } | SpilledError::HostTooSmall { .. }) => {}
            Err(other) => return Err(other),
        }
    }
    Ok(best)
}

struct Pooled<'a> {
    chain: &'a Chain,
    step: StepShape,
    fleet: &'a Fleet,
    costs: &'a Costs,
    copies: usize,
    steps: usize,
}

impl Pooled<'_> {
    fn play(&self, best: &Spilled) -> Result<Together, SpilledError> {
        let Pooled { chain, step, fleet, costs, copies, steps } = *self;
        let devices = fleet.devices.len();
        let plans: Vec<Plan> =
            (0..devices).map(|device| table(chain, step, fleet, &Spill { device, ..best.spill })).collect();
        let layouts: Vec<Layout> = plans.iter().map(|plan| Layout::new(plan, chain)).collect();
        let worlds: Vec<FleetWorld> =
            layouts.iter().map(|layout| FleetWorld::new(fleet, costs, layout)).collect();
        let mut programs = Vec::new();
        for (device, world) in worlds.iter().enumerate() {
            programs.push(compile_paced(&plans[device], chain, Purpose::Train, world)?.swap_remove(device));
        }
        let on: Vec<OnDevice> = (0..devices)
            .map(|device| OnDevice {
                program: &programs[device],
                layout: &layouts[device],
                world: &worlds[device],
                bytes: best.memory.total(),
                bytes_after: after_computing(&programs[device], &layouts[device]),
            })
            .collect();
        let jobs = |count: usize| -> Vec<PoolJob> {
            let job = || PoolJob { priority: 0, steps, step_seconds: best.simulated.seconds, on: on.clone() };
            (0..count).map(|_| job()).collect()
        };
        let budgets: Vec<u64> = device_rows(fleet).iter().map(|row| row.budget_bytes).collect();
        let resources = shoal_sim::World::resources(&worlds[0]);
        let play = |count| simulate_jobs(&jobs(count), &budgets, resources, Settings::default()).seconds;
        // As many models as there are devices, again and again; the last round may be smaller.
        let (rounds, rest) = (copies / devices, copies % devices);
        let one_after_another_seconds =
            rounds as f64 * play(devices) + if rest > 0 { play(rest) } else { 0.0 };
        let time = best.simulated.devices[0];
        let computing = (time.computing + time.recomputing + time.updating) * (copies * steps) as f64;
        let carried = host_bytes(best) * (copies * steps) as f64;
        let bandwidth: f64 = fleet.nodes.iter().map(|node| node.host_bytes_per_second).sum();
        Ok(Together {
            seconds: play(copies),
            bound_seconds: (computing / devices as f64).max(carried / bandwidth),
            one_after_another_seconds,
        })
    }
}

/// Bytes that one step moves through its host's memory.
fn host_bytes(best: &Spilled) -> f64 {
    let plan = &best.plan;
    let size = plan.precision.bytes() as u64;
    let spilled = plan.tensors.iter().filter(|row| matches!(row.optimizer[0].holder, Holder::Host(_)));
    let elements: u64 = spilled.map(|row| row.elements as u64).sum();
    // Loaded twice, the gradient back once, and the update.
    let state = elements * (2 * size + 4 + shoal_fleet::costs::HOST_UPDATE_BYTES);
    let rounded = if plan.precision.is_half() { size } else { 0 };
    state as f64 + 2.0 * best.memory.host.saturating_sub(elements * (16 + rounded)) as f64
}
