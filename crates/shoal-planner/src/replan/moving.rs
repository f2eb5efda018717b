//! How long state takes from where one table has it to where another wants it. All of it moves at once, and the longest
//! queue decides: of a machine's network interface each way, of what joins two machines, of a device's way to its host and to
//! its neighbours, of a disk.

use std::collections::HashMap;

use shoal_fleet::Fleet;
use shoal_plan::difference::{Difference, Place};
use shoal_plan::{Plan, Tier};

use super::InForce;

/// A change of plan.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moving {
    /// That training pauses for it.
    pub seconds: f64,
    /// Of state that changes its place.
    pub bytes: u64,
    /// Some slice has no holder any more that is there: everyone goes back to a checkpoint, and reads its own there.
    pub restores: bool,
}

/// From the plan in force to another on this fleet. Where there is none, nothing is to move.
pub fn between(in_force: Option<InForce>, after: &Plan, fleet: &Fleet) -> Moving {
    let Some(in_force) = in_force else { return Moving::default() };
    let difference = Difference::new(in_force.plan, after, |device| in_force.is_there(device));
    let element_bytes = 4 * (1 + after.optimizer_states as u64);
    let mut queues = Queues::new(fleet);
    let restores = !difference.lost.is_empty();
    if restores {
        for held in after.tensors.iter().flat_map(|row| &row.optimizer) {
            let (device, tier) = (&after.devices[held.holder.device()].name, held.holder.tier());
            let to = Place { device: device.clone(), tier };
            queues.add(None, &to, element_bytes * held.slice.count() as u64);
        }
    } else {
        for moved in &difference.moves {
            queues.add(Some(&moved.from), &moved.to, element_bytes * moved.slice.count() as u64);
        }
    }
    Moving { seconds: queues.seconds(), bytes: queues.moved_bytes, restores }
}

/// What bytes pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Way {
    /// Of a node.
    Out(usize),
    In(usize),
    /// From one node to another, beside their interfaces.
    Between(usize, usize),
    /// Of a device.
    ToHost(usize),
    FromHost(usize),
    ToPeers(usize),
    FromPeers(usize),
    /// Of a node's disk.
    Read(usize),
    Write(usize),
}

struct Queues<'a> {
    fleet: &'a Fleet,
    devices: HashMap<&'a str, usize>,
    bytes: HashMap<Way, u64>,
    moved_bytes: u64,
    latency: f64,
}

impl<'a> Queues<'a> {
    fn new(fleet: &'a Fleet) -> Queues<'a> {
        let devices = fleet.devices.iter().enumerate();
        let devices = devices.map(|(place, device)| (device.name.as_str(), place)).collect();
        Queues { fleet, devices, bytes: HashMap::new(), moved_bytes: 0, latency: 0.0 }
    }

    /// One who is not in the fleet any more, or a store of checkpoints, is behind the receiver's network.
    fn add(&mut self, from: Option<&Place>, to: &Place, bytes: u64) {
        self.moved_bytes += bytes;
        let source = from.and_then(|from| Some((self.device(from)?, from.tier)));
        let Some(target) = self.device(to) else { return };
        let node = |device: usize| self.fleet.devices[device].node;
        let mut ways = match source {
            None => vec![Way::In(node(target))],
            Some((source, _)) if source == target => Vec::new(),
            Some((source, _)) if node(source) == node(target) => {
                vec![Way::ToPeers(source), Way::FromPeers(target)]
            }
            Some((source, _)) => {
                let (a, b) = (node(source), node(target));
                vec![Way::Out(a), Way::In(b), Way::Between(a, b)]
            }
        };
        self.latency = self.latency.max(match source {
            Some((source, _)) => self.fleet.link(source, target).seconds_latency,
            None => self.fleet.nodes[node(target)].network.seconds_latency,
        });
        let inside = source.is_some_and(|(source, _)| source != target && node(source) == node(target));
        if let Some((source, tier)) = source {
            ways.extend(match tier {
                Tier::Device if !inside => Some(Way::ToHost(source)),
                Tier::Disk => Some(Way::Read(node(source))),
                _ => None,
            });
        }
        ways.extend(match to.tier {
            Tier::Device if !inside => Some(Way::FromHost(target)),
            Tier::Disk => Some(Way::Write(node(target))),
            _ => None,
        });
        for way in ways {
            *self.bytes.entry(way).or_default() += bytes;
        }
    }

    fn device(&self, place: &Place) -> Option<usize> {
        self.devices.get(place.device.as_str()).copied()
    }

    fn rate(&self, way: Way) -> f64 {
        let Fleet { nodes, devices, .. } = self.fleet;
        let peers = |device: usize| {
            let link = nodes[devices[device].node].device_link.as_ref();
            link.unwrap_or(&devices[device].host_link).bytes_per_second
        };
        let disk = |node: usize| nodes[node].disk.as_ref();
        match way {
            Way::Out(node) | Way::In(node) => nodes[node].network.bytes_per_second,
            Way::Between(a, b) => self.fleet.node_link(a, b).bytes_per_second,
            Way::ToHost(device) | Way::FromHost(device) => devices[device].host_link.bytes_per_second,
            Way::ToPeers(device) | Way::FromPeers(device) => peers(device),
            Way::Read(node) => disk(node).map_or(f64::INFINITY, |disk| disk.read_bytes_per_second),
            Way::Write(node) => disk(node).map_or(f64::INFINITY, |disk| disk.write_bytes_per_second),
        }
    }

    fn seconds(&self) -> f64 {
        let queues = self.bytes.iter().map(|(way, bytes)| *bytes as f64 / self.rate(*way));
        let longest = queues.fold(0.0, f64::max);
        if self.moved_bytes == 0 { 0.0 } else { longest + self.latency }
    }
}
