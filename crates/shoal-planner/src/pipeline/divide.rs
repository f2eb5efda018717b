//! Ways to divide a fleet's devices among replicas, each a list of devices in a row. A node's devices stay together, so
//! that few boundaries cross slow links.

use std::collections::BTreeSet;

use super::stages::Classes;

/// Devices of each replica, in the order of their stages.
pub(super) type Division = Vec<Vec<usize>>;

/// Fleets so small that every division is tried.
pub(super) const FEW_DEVICES: usize = 4;

/// Depths that are tried with fewer devices than there are.
const DEPTHS: [usize; 15] = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64];

/// Numbers of replicas that are all tried; past them, those that a depth gives.
const EVERY_COUNT: usize = 16;

/// What bounds a division.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Every replica has a sample, at least.
    pub replicas_most: usize,
    /// Every stage has a layer, at least.
    pub depth_most: usize,
    pub replicas: Option<usize>,
}

impl Bounds {
    fn allow(&self, division: &Division) -> bool {
        let count = division.len();
        (1..=self.replicas_most).contains(&count)
            && self.replicas.is_none_or(|wanted| wanted == count)
            && division.iter().all(|row| (1..=self.depth_most).contains(&row.len()))
    }
}

/// All that are worth a look; `speeds` by class.
pub(super) fn divisions(classes: &Classes, speeds: &[f64], bounds: Bounds) -> Vec<Division> {
    let mut found = match classes.of.len() <= FEW_DEVICES {
        true => every(classes.of.len()),
        false => likely(classes, speeds, bounds),
    };
    found.retain(|division| bounds.allow(division));
    found
}

/// Every choice of devices in every order, cut into rows everywhere.
fn every(devices: usize) -> Vec<Division> {
    let mut found: Vec<Division> = vec![Vec::new()];
    for device in 0..devices {
        for place in 0..found.len() {
            let division = found[place].clone();
            for row in 0..division.len() {
                for at in 0..=division[row].len() {
                    let mut with = division.clone();
                    with[row].insert(at, device);
                    found.push(with);
                }
            }
            let mut with = division;
            with.push(vec![device]);
            found.push(with);
        }
    }
    found
}

fn likely(classes: &Classes, speeds: &[f64], bounds: Bounds) -> Vec<Division> {
    let mut found = Vec::new();
    let mut by_speed: Vec<usize> = (0..classes.all.len()).collect();
    by_speed.sort_by(|a, b| speeds[*b].total_cmp(&speeds[*a]));
    // The quickest classes alone, then with the next, up to all.
    for count in 1..=by_speed.len() {
        let rank = |device: &usize| by_speed.iter().position(|class| *class == classes.of[*device]);
        let mut devices: Vec<usize> =
            (0..classes.of.len()).filter(|device| rank(device).is_some_and(|rank| rank < count)).collect();
        let node = |device: &usize| {
            let node = classes.fleet.devices[*device].node;
            (classes.fleet.nodes[node].zone, node)
        };
        let near: Vec<usize> = {
            let mut near = devices.clone();
            near.sort_by_key(|device| (node(device), rank(device), *device));
            // Nodes of the same devices are neighbours.
            near.sort_by_key(|device| {
                let (zone, node) = node(device);
                let kinds: Vec<Option<usize>> =
                    near_kinds(classes, node).into_iter().map(|device| rank(&device)).collect();
                (zone, kinds, node)
            });
            near
        };
        devices.sort_by_key(|device| (rank(device), node(device), *device));
        for replicas in counts(devices.len(), bounds) {
            found.push(even(&near, replicas, |_| 1.0));
            for depth in DEPTHS.into_iter().filter(|depth| depth * replicas < devices.len()) {
                let row = |place: usize| devices[place * depth..(place + 1) * depth].to_vec();
                found.push((0..replicas).map(row).collect());
            }
            if count > 1 {
                found.push(even(&near, replicas, |device| speeds[classes.of[device]]));
                found.push(even(&devices, replicas, |device| speeds[classes.of[device]]));
                found.push(even(&devices, replicas, |device| classes.budget(device) as f64));
                found.push(striped(classes, &devices, &by_speed, replicas));
            }
        }
    }
    found
}

fn near_kinds(classes: &Classes, node: usize) -> Vec<usize> {
    classes.fleet.nodes[node].devices.clone().collect()
}

/// Numbers of replicas worth a look.
fn counts(devices: usize, bounds: Bounds) -> BTreeSet<usize> {
    if let Some(wanted) = bounds.replicas {
        return BTreeSet::from([wanted]);
    }
    let by_depth =
        (1..=bounds.depth_most.min(devices)).flat_map(|depth| [devices / depth, devices.div_ceil(depth)]);
    let most = bounds.replicas_most.min(devices);
    by_depth.chain(1..=EVERY_COUNT).chain([most]).filter(|count| (1..=most).contains(count)).collect()
}

/// Neighbours together, so that the rows weigh about the same.
fn even(devices: &[usize], replicas: usize, weight: impl Fn(usize) -> f64) -> Division {
    let total: f64 = devices.iter().map(|device| weight(*device)).sum();
    let (mut division, mut passed) = (vec![Vec::new(); replicas], 0.0);
    for device in devices {
        // By its middle, a device belongs where most of it lies.
        let middle = passed + weight(*device) / 2.0;
        let row = (middle / total * replicas as f64) as usize;
        division[row.min(replicas - 1)].push(*device);
        passed += weight(*device);
    }
    division
}

/// To every row its part of every class.
fn striped(classes: &Classes, devices: &[usize], by_speed: &[usize], replicas: usize) -> Division {
    let mut division: Division = vec![Vec::new(); replicas];
    for class in by_speed {
        let own: Vec<usize> =
            devices.iter().copied().filter(|device| classes.of[*device] == *class).collect();
        for (row, part) in even(&own, replicas, |_| 1.0).into_iter().enumerate() {
            division[row].extend(part);
        }
    }
    division
}

/// Orders of a row's devices that keep neighbours together.
pub(super) fn orders(classes: &Classes, row: &[usize]) -> Vec<Vec<usize>> {
    let first = classes.of[row[0]];
    // Of a few devices every order is a division of its own.
    if classes.of.len() <= FEW_DEVICES || row.iter().all(|device| classes.of[*device] == first) {
        return vec![row.to_vec()];
    }
    let memory = |device: &usize| classes.budget(*device);
    let (mut large_first, mut small_first) = (row.to_vec(), row.to_vec());
    large_first.sort_by_key(|device| std::cmp::Reverse(memory(device)));
    small_first.sort_by_key(memory);
    let mut orders = vec![row.to_vec(), row.iter().rev().copied().collect(), large_first, small_first];
    orders.dedup();
    orders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_division_of_three_devices_is_there_once() {
        let mut all = every(3);
        // Lists of lists of some of three things: 1 + 3 + 3 * 3 + 13.
        assert_eq!(all.len(), 26);
        for division in &mut all {
            division.sort();
        }
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 26);
    }

    #[test]
    fn rows_weigh_the_same_and_nothing_is_left_out() {
        let weights = [4.0, 4.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0];
        let division = even(&[0, 1, 2, 3, 4, 5, 6, 7], 4, |device| weights[device]);
        assert_eq!(division, [vec![0], vec![1], vec![2, 3, 4, 5], vec![6, 7]]);
        let counts: Vec<usize> = even(&(0..7).collect::<Vec<_>>(), 3, |_| 1.0).iter().map(Vec::len).collect();
        assert_eq!(counts.iter().sum::<usize>(), 7);
        assert!(counts.iter().all(|count| (2..=3).contains(count)));
    }
}
