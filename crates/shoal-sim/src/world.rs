//! What instructions cost on a fleet: times from the profile, bytes from the table, and the ways between devices,
//! hosts and disks that bytes pass.

use std::collections::BTreeMap;

use shoal_fleet::costs::Handling;
use shoal_fleet::{Costs, Fleet, Link, Seat};
use shoal_model::LayerKind;
use shoal_net::collective::Wire;
use shoal_plan::{GatheredPart, GradientWire, Layout, Op, Pace, Pass, ReducedPart, Samples, Slice, Tier};

use crate::collectives::{Circle, Traffic};
use crate::flows::Resource;

/// Of a forward with a batch norm, the part before its statistics; of its backward likewise.
const BEGIN_SHARE: f64 = 0.7;
const BEGIN_BACKWARD_SHARE: f64 = 0.3;

/// What something takes: some time, then bytes over resources that it shares with others.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Work {
    pub seconds: f64,
    pub bytes: f64,
    pub resources: Vec<u32>,
    /// Bytes that everyone who takes part sends or receives, each way counted, and the messages that follow each other in it.
    pub handled_bytes: f64,
    pub handled_messages: f64,
}

impl Work {
    fn seconds(seconds: f64) -> Work {
        Work { seconds, ..Work::default() }
    }
}

/// Where programs run.
pub trait World {
    /// What bytes pass.
    fn resources(&self) -> &[Resource];

    /// An instruction that a device runs by itself.
    fn alone(&self, op: &Op, device: usize) -> Work;

    /// One that several have in common, of which this device is one.
    fn together(&self, op: &Op, device: usize) -> Work;

    /// What messages take of a device's computing.
    fn handling(&self, _device: usize) -> Handling {
        Handling::default()
    }

    /// Where a device sits on a chip that it is a part of.
    fn seat(&self, _device: usize) -> Option<Seat> {
        None
    }
}

/// A fleet, its costs and a table for it: the plan's devices are the fleet's, in its order.
pub struct FleetWorld<'a> {
    pub fleet: &'a Fleet,
    pub costs: &'a Costs,
    pub layout: &'a Layout<'a>,
    resources: Vec<Resource>,
    gathers: Vec<BTreeMap<Pass, Work>>,
    reductions: Vec<Work>,
    hand_overs: Vec<Work>,
    small: Work,
}

/// Resources of a device: its ways to and from its host, and to and from the other devices of its node.
const DEVICE_RESOURCES: u32 = 4;
/// Resources of a node: its ways out and in, its memory, its disk's reading and writing.
const NODE_RESOURCES: u32 = 5;

#[derive(Clone, Copy)]
enum Way {
    FromHost = 0,
    ToHost = 1,
    ToPeers = 2,
    FromPeers = 3,
}

#[derive(Clone, Copy)]
enum Shared {
    Out = 0,
    In = 1,
    Memory = 2,
    DiskRead = 3,
    DiskWrite = 4,
}

/// Bytes a second of what is never the narrowest.
const UNLIMITED: f64 = 1e18;

impl<'a> FleetWorld<'a> {
    pub fn new(fleet: &'a Fleet, costs: &'a Costs, layout: &'a Layout) -> FleetWorld<'a> {
        let mut world = FleetWorld {
            fleet,
            costs,
            layout,
            resources: resources(fleet),
            gathers: Vec::new(),
            reductions: Vec::new(),
            hand_overs: Vec::new(),
            small: Work::default(),
        };
        world.small = world.small_sum(layout.members());
        for layer in 0..layout.chain.layers.len() {
            // What a layer is computed with is brought the same way, whenever that is.
            let used = world.gather(layer, Pass::Step);
            let renewed = world.gather(layer, Pass::Update);
            let of_each = [
                (Pass::Forward, used.clone()),
                (Pass::Backward, used.clone()),
                (Pass::Step, used),
                (Pass::Update, renewed),
            ];
            world.gathers.push(of_each.into_iter().filter_map(|(pass, work)| Some((pass, work?))).collect());
            world.reductions.push(world.reduction(layer));
            world.hand_overs.push(world.hand_over(layer));
        }
        world
    }

    fn device(&self, device: usize, way: Way) -> u32 {
        device as u32 * DEVICE_RESOURCES + way as u32
    }

    fn node(&self, device: usize, shared: Shared) -> u32 {
        let node = self.fleet.devices[device].node as u32;
        self.fleet.devices.len() as u32 * DEVICE_RESOURCES + node * NODE_RESOURCES + shared as u32
    }

    fn output_bytes(&self, layer: usize, samples: Samples) -> f64 {
        let plan = self.layout.plan;
        let kind = &self.layout.chain.layers[layer].kind;
        kind.output_bytes(samples.count(), plan.sequence, plan.precision) as f64
    }

    /// The input that a layer is made again from.
    fn kept_bytes(&self, layer: usize, samples: Samples) -> f64 {
        let first = self.layout.chain.layers[layer].inputs.first();
        first.map_or(0.0, |from| self.output_bytes(*from, samples))
    }

    /// Between a device and its host, one way.
    fn host_way(&self, device: usize, bytes: f64, in_or_out: Way) -> Work {
        let link = &self.fleet.devices[device].host_link;
        let resources = vec![self.device(device, in_or_out), self.node(device, Shared::Memory)];
        Work { seconds: link.seconds_latency, bytes, resources, ..Work::default() }
    }

    /// From one device to another.
    fn way(&self, from: usize, to: usize, bytes: f64) -> Work {
        let link = self.fleet.link(from, to);
        let resources = match self.fleet.same_node(from, to) {
            true => vec![self.device(from, Way::ToPeers), self.device(to, Way::FromPeers)],
            false => vec![self.node(from, Shared::Out), self.node(to, Shared::In)],
        };
        let seconds = link.seconds_latency;
        let work = Work { seconds, bytes, resources, handled_bytes: bytes, handled_messages: 1.0 };
        slowed(work, &link, &self.resources)
    }

    fn circle<'w>(&'w self, members: &'w [usize], way: &'w dyn Fn(usize, usize, f64) -> Work) -> Circle<'w> {
        Circle { fleet: self.fleet, members, way }
    }

    /// Parts of a buffer, each of so many bytes at a device, to all of some devices.
    fn gathered(&self, devices: &[usize], parts: impl Iterator<Item = (usize, f64)>) -> Traffic {
        let way = |from, to, bytes| self.way(from, to, bytes);
        self.circle(devices, &way).gather(&slices(devices, parts))
    }

    /// Parameters of a layer, from their holders to those who lack them.
    fn gather(&self, layer: usize, pass: Pass) -> Option<Work> {
        let group = self.layout.gather(layer, pass)?;
        let size = self.layout.plan.precision.bytes() as f64;
        let parts = self.layout.gathered_parts(layer, pass);
        let bytes = |part: &GatheredPart| part.slice.count() as f64 * size;
        let mut traffic = self.gathered(&group.devices, parts.iter().map(|part| (part.device, bytes(part))));
        let total: f64 = parts.iter().map(bytes).sum();
        let own = |device: usize| -> f64 {
            // What lies farther away is brought like that of others.
            let here = parts.iter().filter(|part| part.device == device && part.tier == Tier::Device);
            here.map(bytes).sum()
        };
        let lacking = group.receivers.iter().map(|device| total - own(*device)).fold(0.0, f64::max);
        traffic.pass(self.tiers(&group.devices, group.tier, true), lacking);
        Some(traffic.work(&self.resources))
    }

    /// What is passed on the way to or from memories farther away than the devices' own.
    fn tiers(&self, devices: &[usize], tier: Tier, to_device: bool) -> Vec<u32> {
        let (way, disk) = match to_device {
            true => (Way::FromHost, Shared::DiskRead),
            false => (Way::ToHost, Shared::DiskWrite),
        };
        let mut passed = Vec::new();
        for device in devices {
            if tier != Tier::Device {
                passed.extend([self.device(*device, way), self.node(*device, Shared::Memory)]);
            }
            if tier == Tier::Disk {
                passed.push(self.node(*device, disk));
            }
        }
        passed
    }

    /// Gradients of what a layer owns, to their holders: added up, and what has several holders once more to all of them.
    fn reduction(&self, layer: usize) -> Work {
        let Some(group) = self.layout.reduce(layer) else { return Work::default() };
        let parts = self.layout.reduced_parts(layer);
        let elements = |part: &ReducedPart| part.slice.count() as f64;
        let wire = match self.layout.gradient_wire(layer) {
            GradientWire::Fp32 => Wire::F32,
            GradientWire::Bf16 => Wire::Bf16,
        };
        let way = |from, to, bytes| self.way(from, to, bytes);
        let added = slices(&group.devices, parts.iter().map(|part| (part.device, elements(part))));
        let mut traffic = self.circle(&group.devices, &way).add(&added, wire);
        let mut shared: BTreeMap<&[usize], Vec<(usize, f64)>> = BTreeMap::new();
        for part in parts.iter().filter(|part| part.holders.len() > 1) {
            shared.entry(&part.holders).or_default().push((part.device, 4.0 * elements(part)));
        }
        let shared =
            shared.into_iter().map(|(holders, theirs)| (holders, self.gathered(holders, theirs.into_iter())));
        traffic = traffic.and(Traffic::of_circles(shared));
        let total = 4.0 * parts.iter().map(elements).sum::<f64>();
        traffic.pass(self.tiers(&group.devices, group.tier, false), total);
        traffic.work(&self.resources)
    }

    /// Their sums from there to the optimizer's slices. What stays on a device's own memory takes no time beside the rest.
    fn hand_over(&self, layer: usize) -> Work {
        let Some(group) = self.layout.hand_over(layer) else { return Work::default() };
        let parts = self.layout.handed_parts(layer);
        let bytes = |slice: Slice| 4.0 * slice.count() as f64;
        let mut traffic =
            self.gathered(&group.devices, parts.iter().map(|part| (part.device, bytes(part.slice))));
        let passed: f64 = parts.iter().map(|part| bytes(part.slice)).sum();
        let handed = |device: &usize| -> f64 {
            let held =
                self.layout.owned(layer).iter().flat_map(|tensor| self.layout.handed(*tensor, *device));
            held.map(|held| bytes(held.slice)).sum()
        };
        let most = group.receivers.iter().map(handed).fold(passed, f64::max);
        traffic.pass(self.tiers(&group.devices, group.tier, false), most);
        traffic.work(&self.resources)
    }

    /// A batch norm's statistics, from all that have samples of a group to each of them.
    fn exchange(&self, layer: usize, group: usize) -> Work {
        let Some(group) = self.layout.exchange(layer, group) else { return Work::default() };
        let columns = match &self.layout.chain.layers[layer].kind {
            LayerKind::Convolution(spec) => spec.outputs,
            _ => 0,
        };
        // A count, and two numbers a column.
        let share = (8 + 2 * 4 * columns) as f64;
        let shares = group.devices.iter().map(|device| (*device, share));
        self.gathered(&group.devices, shares).work(&self.resources)
    }

    /// A few numbers, summed over devices.
    fn small_sum(&self, devices: &[usize]) -> Work {
        let way = |from, to, bytes| self.way(from, to, bytes);
        self.circle(devices, &way).numbers().work(&self.resources)
    }

    /// What no step is below: the bytes of parameters and gradients that pass the busiest link or memory, at its rate.
    pub fn carrying_seconds(&self) -> f64 {
        let mut bytes = vec![0.0; self.resources.len()];
        let layered = self.layout.is_layered();
        let gathers = self.gathers.iter().flatten().filter(|(pass, _)| match pass {
            Pass::Forward | Pass::Backward => layered,
            Pass::Step => !layered,
            Pass::Update => true,
        });
        let gathers = gathers.map(|(_, work)| work);
        for work in gathers.chain(&self.reductions).chain(&self.hand_overs) {
            work.resources.iter().for_each(|resource| bytes[*resource as usize] += work.bytes);
        }
        let seconds = bytes.iter().zip(&self.resources).map(|(bytes, of)| bytes / of.bytes_per_second);
        seconds.fold(0.0, f64::max)
    }
}

/// By member, in order, what parts it has of a buffer.
fn slices(members: &[usize], parts: impl Iterator<Item = (usize, f64)>) -> Vec<f64> {
    let mut slices = vec![0.0; members.len()];
    for (device, size) in parts {
        slices[members.binary_search(&device).expect("who has a part is a member")] += size;
    }
    slices
}

/// Links that were measured may be slower for messages of a size than their nodes' interfaces: so many more bytes.
fn slowed(mut work: Work, link: &Link, resources: &[Resource]) -> Work {
    let rates = work.resources.iter().map(|resource| resources[*resource as usize].bytes_per_second);
    let narrowest = rates.fold(UNLIMITED, f64::min);
    let alone = link.seconds(work.bytes as u64) - link.seconds_latency;
    work.bytes = work.bytes.max(alone * narrowest);
    work
}

fn resources(fleet: &Fleet) -> Vec<Resource> {
    let link = |bytes_per_second| Resource { bytes_per_second, is_pool: false };
    let pool = |bytes_per_second| Resource { bytes_per_second, is_pool: true };
    let mut all = Vec::new();
    for device in &fleet.devices {
        let node = &fleet.nodes[device.node];
        let host = device.host_link.bytes_per_second;
        let peers = node.device_link.as_ref().map_or(host, |link| link.bytes_per_second);
        all.extend([host, host, peers, peers].map(link));
    }
    for node in &fleet.nodes {
        let (read, write) = node
            .disk
            .as_ref()
            .map_or((UNLIMITED, UNLIMITED), |disk| (disk.read_bytes_per_second, disk.write_bytes_per_second));
        let network = node.network.bytes_per_second;
        all.extend([link(network), link(network), pool(node.host_bytes_per_second), pool(read), pool(write)]);
    }
    all
}

impl World for FleetWorld<'_> {
    fn resources(&self) -> &[Resource] {
        &self.resources
    }

    fn alone(&self, op: &Op, device: usize) -> Work {
        let normed = |layer: usize| self.layout.chain.batch_norm(layer).is_some();
        let put_off = |layer: usize| self.layout.put_off_share(device, layer);
        let forward = |layer, samples: Samples| self.costs.forward(layer, device, samples.count());
        let backward = |layer, samples: Samples| self.costs.backward(layer, device, samples.count());
        match *op {
            Op::Begin { layer, samples } => Work::seconds(BEGIN_SHARE * forward(layer, samples)),
            Op::Forward { layer, samples, keep } => {
                let begun = normed(layer) && keep != shoal_plan::Keep::Nothing;
                let share = if begun { 1.0 - BEGIN_SHARE } else { 1.0 };
                Work::seconds(share * forward(layer, samples))
            }
            Op::Recompute { layer, samples } | Op::Predict { layer, samples } => {
                Work::seconds(forward(layer, samples))
            }
            Op::BeginBackward { layer, samples } => {
                Work::seconds(BEGIN_BACKWARD_SHARE * backward(layer, samples))
            }
            Op::Backward { layer, samples } => {
                let share = if normed(layer) { 1.0 - BEGIN_BACKWARD_SHARE } else { 1.0 };
                Work::seconds((share - put_off(layer)) * backward(layer, samples))
            }
            Op::WeightGradients { layer, samples } => {
                Work::seconds(put_off(layer) * backward(layer, samples))
            }
            Op::Load { samples } => {
                let chain = self.layout.chain;
                let elements = chain.input_elements(self.layout.plan.sequence) * samples.count();
                self.host_way(device, 4.0 * elements as f64, Way::FromHost)
            }
            Op::Offload { layer, samples } => {
                self.host_way(device, self.kept_bytes(layer, samples), Way::ToHost)
            }
            Op::Restore { layer, samples } => {
                self.host_way(device, self.kept_bytes(layer, samples), Way::FromHost)
            }
            Op::Gather { layer, pass } => self.gathers[layer].get(&pass).cloned().unwrap_or_default(),
            Op::Reduce { layer } => self.reductions[layer].clone(),
            Op::HandOver { layer } => self.hand_overs[layer].clone(),
            Op::Update { tensor, at } => self.update(tensor, device, at),
            Op::CountTargets
            | Op::Release { .. }
            | Op::Exchange { .. }
            | Op::Send { .. }
            | Op::Receive { .. }
            | Op::SumLoss
            | Op::GradientNorm => Work::default(),
        }
    }

    fn together(&self, op: &Op, device: usize) -> Work {
        match *op {
            Op::Send { layer, samples, to, .. } => self.way(device, to, self.output_bytes(layer, samples)),
            Op::Receive { layer, samples, from, .. } => {
                self.way(from, device, self.output_bytes(layer, samples))
            }
            Op::Exchange { layer, group, .. } => self.exchange(layer, group),
            Op::CountTargets | Op::SumLoss | Op::GradientNorm => self.small.clone(),
            _ => self.alone(op, device),
        }
    }

    fn handling(&self, device: usize) -> Handling {
        self.costs.handling(device)
    }

    fn seat(&self, device: usize) -> Option<Seat> {
        self.costs.seat(device)
    }
}

impl FleetWorld<'_> {
    fn update(&self, tensor: usize, device: usize, at: Tier) -> Work {
        let held = self.layout.held(tensor, device).iter().filter(|held| held.holder.tier() == at);
        let elements: usize = held.map(|held| held.slice.count()).sum();
        match at {
            Tier::Device => Work::seconds(self.costs.update(device, elements as u64)),
            Tier::Host => Work {
                seconds: 0.0,
                bytes: (shoal_fleet::costs::HOST_UPDATE_BYTES * elements as u64) as f64,
                resources: vec![self.node(device, Shared::Memory)],
                ..Work::default()
            },
            Tier::Disk => {
                let states = 1 + self.layout.plan.optimizer_states;
                let resources =
                    vec![self.node(device, Shared::DiskRead), self.node(device, Shared::DiskWrite)];
                Work { bytes: (4 * states * elements) as f64, resources, ..Work::default() }
            }
        }
    }
}

impl Pace for FleetWorld<'_> {
    fn forward(&self, layer: usize, device: usize, samples: usize) -> f64 {
        self.costs.forward(layer, device, samples)
    }

    fn backward(&self, layer: usize, device: usize, samples: usize) -> f64 {
        self.costs.backward(layer, device, samples)
    }

    fn transfer(&self, layer: usize, from: usize, to: usize, samples: usize) -> f64 {
        let bytes = self.output_bytes(layer, Samples { start: 0, end: samples });
        self.fleet.link(from, to).seconds(bytes as u64)
    }
}
