//! Which devices a layer is on, and what it costs to move samples from one set of devices to another or to add up a
//! gradient over one. A set's devices have the samples in equal runs, in its order.

use shoal_fleet::{Fleet, Link};
use shoal_plan::Samples;

/// The samples of a position among so many: runs that differ by one at most, of which the first is a longest.
pub fn share(global_batch: usize, count: usize, position: usize) -> Samples {
    let start = |position: usize| (position * global_batch).div_ceil(count);
    Samples::new(start(position)..start(position + 1))
}

/// Every pair of devices by what joins them.
pub struct Ways {
    links: Vec<Link>,
    /// By both devices: which of the links.
    between: Vec<u16>,
    devices: usize,
    node_of: Vec<usize>,
    /// By node: which of the links its interface is.
    interface: Vec<u16>,
    seconds_a_move: f64,
}

impl Ways {
    /// Starting a move takes so long beyond what its links take.
    pub fn new(fleet: &Fleet, seconds_a_move: f64) -> Ways {
        let mut links: Vec<Link> = Vec::new();
        let mut place = |link: Link| match links.iter().position(|known| *known == link) {
            Some(place) => place as u16,
            None => {
                links.push(link);
                links.len() as u16 - 1
            }
        };
        let devices = fleet.devices.len();
        let pairs = (0..devices * devices).map(|pair| place(fleet.link(pair / devices, pair % devices)));
        let between = pairs.collect();
        let interface = fleet.nodes.iter().map(|node| place(node.network.clone())).collect();
        let node_of = fleet.devices.iter().map(|device| device.node).collect();
        Ways { links, between, devices, node_of, interface, seconds_a_move }
    }

    fn link(&self, from: usize, to: usize) -> u16 {
        self.between[from * self.devices + to]
    }

    /// What moves when samples that are on some devices are wanted on others.
    pub fn moves(&self, from: &[usize], to: &[usize], global_batch: usize) -> Moves {
        let mut most = vec![0; self.links.len()];
        // What the giver and the taker at hand pass by each link: both lists are gone through once.
        let (mut given, mut taken) = (vec![0; self.links.len()], vec![0; self.links.len()]);
        // Out of and into each node.
        let mut crossed = vec![[0; 2]; self.interface.len()];
        let (mut a, mut b) = (0, 0);
        while a < from.len() && b < to.len() {
            let (left, right) = (share(global_batch, from.len(), a), share(global_batch, to.len(), b));
            let count = left.end.min(right.end).saturating_sub(left.start.max(right.start));
            let (giver, taker) = (from[a], to[b]);
            if giver != taker && count > 0 {
                let link = self.link(giver, taker) as usize;
                given[link] += count;
                taken[link] += count;
                let ends = [giver, taker].map(|device| self.node_of[device]);
                if ends[0] != ends[1] {
                    crossed[ends[0]][0] += count;
                    crossed[ends[1]][1] += count;
                }
            }
            if left.end <= right.end {
                settle(&mut given, &mut most);
                a += 1;
            }
            if right.end <= left.end {
                settle(&mut taken, &mut most);
                b += 1;
            }
        }
        for (interface, both) in self.interface.iter().zip(&crossed) {
            let known = &mut most[*interface as usize];
            *known = both.iter().copied().fold(*known, usize::max);
        }
        let most = (0u16..).zip(most).filter(|(_, samples)| *samples > 0);
        let most: Vec<(u16, usize)> = most.collect();
        let taking_part = if most.is_empty() { 0 } else { self.distinct(from, to) };
        Moves { most, taking_part }
    }

    /// Devices of two lists, each once.
    fn distinct(&self, from: &[usize], to: &[usize]) -> usize {
        let mut is_there = vec![false; self.devices];
        from.iter().chain(to).filter(|device| !std::mem::replace(&mut is_there[**device], true)).count()
    }

    /// Seconds of moving so many bytes a sample, one way. What goes out and what comes in pass at the same time; the
    /// slowest device or interface decides.
    pub fn seconds(&self, moves: &Moves, sample_bytes: u64) -> f64 {
        let each = moves.most.iter();
        let slowest = each
            .map(|(link, samples)| self.links[*link as usize].seconds(*samples as u64 * sample_bytes))
            .fold(0.0, f64::max);
        self.starting_seconds(moves) + slowest
    }

    /// What of it is for starting the move.
    pub fn starting_seconds(&self, moves: &Moves) -> f64 {
        if moves.most.is_empty() { 0.0 } else { self.seconds_a_move }
    }

    /// Whether devices are on more than one node.
    pub fn span_nodes(&self, devices: &[usize]) -> bool {
        devices.windows(2).any(|pair| self.node_of[pair[0]] != self.node_of[pair[1]])
    }

    /// Seconds until every device has the sum of all: twice around one ring, node by node, as steps are played through. What
    /// leaves a node by its interface is as much as what passes any other link of the ring: adding up within each node first
    /// would send less, but no program does it. Of the ring's latencies as many count as a tree has levels: the others pass
    /// while other layers' sums are on the links.
    pub fn reduction_seconds(&self, devices: &[usize], bytes: u64) -> f64 {
        let count = devices.len();
        if count < 2 || bytes == 0 {
            return 0.0;
        }
        let mut ring = devices.to_vec();
        ring.sort_by_key(|device| (self.node_of[*device], *device));
        let passed = 2 * bytes * (count as u64 - 1) / count as u64;
        let levels = 2.0 * (count as f64).log2().ceil();
        let around = (0..count).map(|at| &self.links[self.link(ring[at], ring[(at + 1) % count]) as usize]);
        let seconds = around.map(|link| link.seconds(passed) + (levels - 1.0) * link.seconds_latency);
        seconds.fold(0.0, f64::max)
    }
}

/// A device has passed all that it does.
fn settle(passed: &mut [usize], most: &mut [usize]) {
    for (passed, most) in passed.iter_mut().zip(most) {
        *most = std::mem::take(passed).max(*most);
    }
}

/// The most samples that any device moves by each kind of link, or any node by its interface.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Moves {
    most: Vec<(u16, usize)>,
    /// Devices that give or take; none where nothing moves.
    pub taking_part: usize,
}

/// Up to so many devices every count is tried.
const COUNTS_ALL_MAX: usize = 16;

/// Device counts that are worth trying: all up to [`COUNTS_ALL_MAX`], beyond it those that change the largest share,
/// and all devices.
pub fn counts(global_batch: usize, devices: usize) -> Vec<usize> {
    let most = devices.min(global_batch);
    let mut counts: Vec<usize> = Vec::new();
    for count in 1..=most {
        let largest = global_batch.div_ceil(count);
        let changes = counts.last().is_none_or(|known| global_batch.div_ceil(*known) > largest);
        if changes || count <= COUNTS_ALL_MAX {
            counts.push(count);
        }
    }
    if counts.last() != Some(&most) {
        counts.push(most);
    }
    counts
}

/// So many devices of a list, evenly spaced. A device then stands at about the same part of the batch whatever the
/// count, so that little moves between two counts.
pub fn spaced(of: &[usize], count: usize) -> Vec<usize> {
    (0..count).map(|position| of[position * of.len() / count]).collect()
}

/// The sets worth trying: of each count, spaced over all devices and spaced over the fewest nodes that have as many.
/// The first moves samples least; the second adds up gradients without leaving a node.
pub fn candidates(fleet: &Fleet, order: &[usize], global_batch: usize) -> Vec<Vec<usize>> {
    candidates_of(fleet, order, &counts(global_batch, order.len()))
}

pub fn candidates_of(fleet: &Fleet, order: &[usize], counts: &[usize]) -> Vec<Vec<usize>> {
    let mut sets = Vec::new();
    for count in counts {
        let last = fleet.devices[order[count - 1]].node;
        let whole = order.iter().rposition(|device| fleet.devices[*device].node == last);
        let compact = spaced(&order[..whole.map_or(*count, |place| place + 1)], *count);
        for set in [spaced(order, *count), compact] {
            if !sets.contains(&set) {
                sets.push(set);
            }
        }
    }
    sets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_counts_those_that_change_the_largest_share_are_tried() {
        assert_eq!(counts(256, 20)[14..], [15, 16, 18, 19, 20]);
        assert_eq!(counts(32, 64)[15..], [16, 32]);
        assert_eq!(counts(32, 30)[15..], [16, 30]);
        assert_eq!(counts(3, 8), [1, 2, 3]);
    }

    #[test]
    fn half_of_the_devices_take_over_half_of_what_they_lack() {
        let fleet = crate::burst::testing::fleet(1, 8);
        let ways = Ways::new(&fleet, 0.0);
        let all: Vec<usize> = (0..8).collect();
        let moves = ways.moves(&all, &spaced(&all, 4), 64);
        // Each of the four keeps its own eight and gets its neighbour's eight.
        assert_eq!(moves.most.iter().map(|(_, samples)| *samples).collect::<Vec<_>>(), [8]);
        assert_eq!(ways.moves(&all, &all, 64), Moves::default());
    }

    #[test]
    fn what_leaves_a_node_shares_its_interface() {
        let fleet = crate::burst::testing::fleet(2, 4);
        let ways = Ways::new(&fleet, 0.0);
        let all: Vec<usize> = (0..8).collect();
        // All of the second node's 32 samples pass its interface at 1 GB/s.
        let moves = ways.moves(&all, &[0, 1, 2, 3], 64);
        assert!((ways.seconds(&moves, 1_000_000) - (0.032 + 1e-5)).abs() < 1e-9);
        let within = ways.moves(&all, &[0, 2, 4, 6], 64);
        assert!((ways.seconds(&within, 1_000_000) - (8e6 / 1e11 + 1e-6)).abs() < 1e-9);
    }
}
