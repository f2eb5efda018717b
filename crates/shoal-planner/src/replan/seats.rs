//! Who takes which place of a table. Machines that are alike may change places without changing the step: each is given
//! the place whose state it has already, as far as can be, and within a machine so is each device.

use std::collections::HashMap;

use shoal_fleet::{Device, Fleet, Node};
use shoal_plan::{DeviceRow, Held, Holder, Plan, common};

use super::InForce;

/// The same plan with its places taken by those of the equal devices that have the most of what each needs; and who has taken
/// each, if not all stay where they are.
pub(super) fn seated(plan: Plan, fleet: &Fleet, in_force: &InForce) -> (Plan, Option<Vec<usize>>) {
    let kept = Kept::new(&plan, fleet, in_force);
    let mut devices: Vec<usize> = (0..fleet.devices.len()).collect();
    let nodes =
        assigned(fleet.nodes.len(), |a, b| are_alike(fleet, a, b), |place, node| kept.by_node(place, node));
    for (place, node) in nodes.into_iter().enumerate() {
        let (from, to) = (fleet.nodes[place].devices.start, fleet.nodes[node].devices.start);
        let count = fleet.nodes[place].devices.len();
        let alike = |a: usize, b: usize| same_device(&fleet.devices[to + a], &fleet.devices[to + b]);
        let inside = assigned(count, alike, |place, device| kept.by_device(from + place, to + device));
        for (place, device) in inside.into_iter().enumerate() {
            devices[from + place] = to + device;
        }
    }
    if devices.iter().enumerate().all(|(place, device)| place == *device) {
        return (plan, None);
    }
    let bare = |row: &DeviceRow| DeviceRow { stash: None, leeway: 0, puts_off: 0, ..row.clone() };
    let rows = plan.devices.iter().map(bare).collect();
    (moved(&plan, rows, &devices), Some(devices))
}

/// A table for other rows of devices, each of its devices in a new place among them.
pub(super) fn moved(plan: &Plan, mut rows: Vec<DeviceRow>, places: &[usize]) -> Plan {
    for (row, place) in plan.devices.iter().zip(places) {
        let DeviceRow { stash, leeway, puts_off, .. } = *row;
        rows[*place] = DeviceRow { stash, leeway, puts_off, ..rows[*place].clone() };
    }
    let mut plan = Plan { devices: rows, ..plan.clone() };
    for compute in plan.layers.iter_mut().flat_map(|row| &mut row.compute) {
        compute.device = places[compute.device];
    }
    let holder = |holder: Holder| match holder {
        Holder::Device(device) => Holder::Device(places[device]),
        Holder::Host(device) => Holder::Host(places[device]),
        Holder::Disk(device) => Holder::Disk(places[device]),
    };
    for row in &mut plan.tensors {
        row.compute_copies.iter_mut().for_each(|copy| copy.device = places[copy.device]);
        row.gradient.iter_mut().chain(&mut row.optimizer).for_each(|held| held.holder = holder(held.holder));
    }
    plan
}

/// Elements that stay where they are if a device takes a place.
struct Kept<'a> {
    fleet: &'a Fleet,
    /// By place and device.
    elements: Vec<u64>,
}

impl Kept<'_> {
    fn new<'a>(plan: &Plan, fleet: &'a Fleet, in_force: &InForce) -> Kept<'a> {
        let count = fleet.devices.len();
        let mut kept = Kept { fleet, elements: vec![0; count * count] };
        let places: HashMap<&str, usize> =
            fleet.devices.iter().enumerate().map(|(place, device)| (device.name.as_str(), place)).collect();
        let now: Vec<Option<usize>> = (in_force.plan.devices.iter().zip(in_force.alive))
            .map(|(row, alive)| places.get(row.name.as_str()).copied().filter(|_| *alive))
            .collect();
        for (before, after) in in_force.plan.tensors.iter().zip(&plan.tensors) {
            let mut sources: Vec<(&Held, usize)> = (before.optimizer.iter())
                .filter_map(|held| Some((held, now[held.holder.device()]?)))
                .collect();
            sources.sort_by_key(|(held, _)| held.slice);
            for wanted in &after.optimizer {
                let row = wanted.holder.device() * count;
                let first = sources.partition_point(|(held, _)| held.slice.end <= wanted.slice.start);
                let near =
                    sources[first..].iter().take_while(|(held, _)| held.slice.start < wanted.slice.end);
                for (held, device) in near {
                    let same = common(held.slice, wanted.slice).map_or(0, |slice| slice.count());
                    kept.elements[row + device] += same as u64;
                }
            }
        }
        kept
    }

    fn by_device(&self, place: usize, device: usize) -> u64 {
        self.elements[place * self.fleet.devices.len() + device]
    }

    fn by_node(&self, place: usize, node: usize) -> u64 {
        let (places, devices) =
            (self.fleet.nodes[place].devices.clone(), self.fleet.nodes[node].devices.clone());
        places.flat_map(|place| devices.clone().map(move |device| self.by_device(place, device))).sum()
    }
}

/// By place, who takes it: of those who are like the one that has it, whoever keeps most by it, the most of all first.
fn assigned(
    count: usize,
    alike: impl Fn(usize, usize) -> bool,
    kept: impl Fn(usize, usize) -> u64,
) -> Vec<usize> {
    let pairs = (0..count).flat_map(|place| (0..count).map(move |who| (place, who)));
    let mut offers: Vec<(u64, usize, usize)> = pairs
        .filter(|(place, who)| alike(*place, *who))
        .map(|(place, who)| (kept(place, who), place, who))
        .collect();
    // Nobody changes places for nothing.
    offers.sort_by_key(|(kept, place, who)| (std::cmp::Reverse(*kept), place != who, *place, *who));
    let mut taken: Vec<Option<usize>> = vec![None; count];
    let mut is_seated = vec![false; count];
    for (_, place, who) in &offers {
        if taken[*place].is_none() && !is_seated[*who] {
            taken[*place] = Some(*who);
            is_seated[*who] = true;
        }
    }
    let seats: Vec<usize> = taken.into_iter().enumerate().map(|(place, who)| who.unwrap_or(place)).collect();
    let total = |seats: &mut dyn Iterator<Item = (usize, usize)>| -> u64 {
        seats.map(|(place, who)| kept(place, who)).sum()
    };
    let stays = total(&mut (0..count).map(|place| (place, place)));
    if stays >= total(&mut seats.iter().copied().enumerate()) { (0..count).collect() } else { seats }
}

/// Whether a step takes the same if two machines change places.
fn are_alike(fleet: &Fleet, a: usize, b: usize) -> bool {
    if a == b {
        return true;
    }
    let has_own_link = |node: usize| fleet.node_pairs.keys().any(|pair| pair.0 == node || pair.1 == node);
    let devices = |node: &Node| &fleet.devices[node.devices.clone()];
    let (one, other) = (&fleet.nodes[a], &fleet.nodes[b]);
    let same = |one: &Node, other: &Node| {
        one.zone == other.zone
            && one.host_memory_bytes == other.host_memory_bytes
            && one.host_bytes_per_second == other.host_bytes_per_second
            && one.disk == other.disk
            && one.network == other.network
            && one.device_link == other.device_link
            && one.devices.len() == other.devices.len()
    };
    same(one, other)
        && devices(one).iter().zip(devices(other)).all(|(one, other)| same_device(one, other))
        && !has_own_link(a)
        && !has_own_link(b)
}

fn same_device(one: &Device, other: &Device) -> bool {
    one.kind == other.kind && one.memory_bytes == other.memory_bytes && one.host_link == other.host_link
}
