//! What collectives take: the messages that their route has, over the ways that these pass. Which route one goes is the
//! network's to say (`shoal_net::collective::Route`), and it is asked here as it is asked there.
//!
//! What passes a ring, or between all pairs, shares the links on its way with whatever else passes them. A tree's messages are
//! so small that they take next to nothing of a link: each takes what it takes alone, and what counts is how many follow
//! each other.

use std::collections::BTreeMap;

use shoal_fleet::Fleet;
use shoal_net::EAGER_MESSAGE_BYTES_MAX;
use shoal_net::collective::{Branch, Route, TREE_BYTES_MAX, Wire, branches};

use crate::flows::Resource;
use crate::world::Work;

/// Numbers of eight bytes that small sums have.
const NUMBERS_BYTES: f64 = 64.0;

/// Among more members than this not every pair is looked at: neighbours, and ways from the first one, stand for all.
const ALL_PAIRS_MAX: usize = 16;

/// What a collective makes pass, and what it waits for beside that.
#[derive(Clone, Debug, Default)]
pub(crate) struct Traffic {
    /// Latencies that follow each other, with all of messages that share nothing.
    pub seconds: f64,
    /// Bytes by resource.
    loads: BTreeMap<u32, f64>,
    /// Bytes that each device sends or receives.
    handled: BTreeMap<usize, f64>,
    /// Messages that follow each other.
    messages: f64,
}

impl Traffic {
    /// Both, one after the other.
    pub fn and(mut self, other: Traffic) -> Traffic {
        self.seconds += other.seconds;
        self.messages += other.messages;
        other.loads.into_iter().for_each(|(resource, bytes)| self.load(resource, bytes));
        other.handled.into_iter().for_each(|(device, bytes)| self.handle(device, bytes));
        self
    }

    fn load(&mut self, resource: u32, bytes: f64) {
        *self.loads.entry(resource).or_default() += bytes;
    }

    fn handle(&mut self, device: usize, bytes: f64) {
        *self.handled.entry(device).or_default() += bytes;
    }

    /// So many bytes pass these as well, at the same time.
    pub fn pass(&mut self, resources: impl IntoIterator<Item = u32>, bytes: f64) {
        for resource in resources {
            let load = self.loads.entry(resource).or_default();
            *load = load.max(bytes);
        }
    }

    /// As one transfer over all that it passes: it has as many bytes as would take the narrowest as long as the busiest is.
    pub fn work(self, resources: &[Resource]) -> Work {
        let loads = || self.loads.iter().filter(|(_, bytes)| **bytes > 0.0);
        let rate = |resource: &u32| resources[*resource as usize].bytes_per_second;
        let busiest = loads().map(|(resource, bytes)| bytes / rate(resource)).fold(0.0, f64::max);
        let narrowest = loads().map(|(resource, _)| rate(resource)).fold(f64::INFINITY, f64::min);
        Work {
            seconds: self.seconds,
            bytes: if busiest > 0.0 { busiest * narrowest } else { 0.0 },
            resources: loads().map(|(resource, _)| *resource).collect(),
            handled_bytes: self.handled.into_values().fold(0.0, f64::max),
            handled_messages: self.messages,
        }
    }
}

/// Some devices, in order, and what passes between two of them.
pub(crate) struct Circle<'a> {
    pub fleet: &'a Fleet,
    pub members: &'a [usize],
    /// One message, from a device to another.
    pub way: &'a dyn Fn(usize, usize, f64) -> Work,
}

impl Circle<'_> {
    /// Every member's slice, in bytes, to all.
    pub fn gather(&self, slices: &[f64]) -> Traffic {
        let total: f64 = slices.iter().sum();
        if self.members.len() < 2 || total <= 0.0 {
            return Traffic::default();
        }
        match Route::of_gathering(self.members.len(), total as usize, TREE_BYTES_MAX) {
            Route::Tree => {
                let up = self.up(0, &|below: &Branch| slices[below.below.clone()].iter().sum());
                let down = self.down(0, 0.0, &|_| total);
                self.tree(up + down, total)
            }
            // Nobody is sent what is its own.
            _ => self.ring(slices, &|place| total - slices[self.next(place)], &|place| place),
        }
    }

    /// The sums of buffers that all members have, each slice, in elements, at its member.
    pub fn add(&self, slices: &[f64], wire: Wire) -> Traffic {
        let elements: f64 = slices.iter().sum();
        if self.members.len() < 2 || elements <= 0.0 {
            return Traffic::default();
        }
        let in_fp32: Vec<f64> = slices.iter().map(|slice| 4.0 * slice).collect();
        let total = 4.0 * elements;
        match Route::of_adding(self.members.len(), total as usize, wire, TREE_BYTES_MAX) {
            Route::Pairwise => self.pairwise(&slices.iter().map(|slice| 2.0 * slice).collect::<Vec<f64>>()),
            Route::Tree => {
                let up = self.up(0, &|_| total);
                let down = self.down(0, 0.0, &|below| in_fp32[below.below.clone()].iter().sum());
                self.tree(up + down, total)
            }
            // A share begins behind its slice's owner and ends there.
            _ => self.ring(&in_fp32, &|place| total - in_fp32[place], &|place| self.next(place)),
        }
    }

    /// A few numbers' sums to all.
    pub fn numbers(&self) -> Traffic {
        let count = self.members.len();
        match Route::of_numbers(count) {
            _ if count < 2 => Traffic::default(),
            Route::Direct => Traffic { seconds: self.longest_way(), ..Traffic::default() },
            _ => {
                let up = self.up(0, &|below| NUMBERS_BYTES * below.below.len() as f64);
                let down = self.down(0, 0.0, &|_| NUMBERS_BYTES * count as f64);
                Traffic { seconds: up + down, ..Traffic::default() }
            }
        }
    }

    fn next(&self, place: usize) -> usize {
        (place + 1) % self.members.len()
    }

    fn latency(&self, from: usize, to: usize) -> f64 {
        self.fleet.link(self.members[from], self.members[to]).seconds_latency
    }

    /// By slice from where it begins on around all links but the last. By place, `carried` is what the link to the next carries.
    fn ring(
        &self,
        slices: &[f64],
        carried: &dyn Fn(usize) -> f64,
        begins: &dyn Fn(usize) -> usize,
    ) -> Traffic {
        let count = self.members.len();
        let latencies: Vec<f64> = (0..count).map(|place| self.latency(place, self.next(place))).collect();
        let around: f64 = latencies.iter().sum();
        let mut traffic = Traffic { messages: (count - 1) as f64, ..Traffic::default() };
        for (place, from) in self.members.iter().enumerate() {
            let to = self.members[self.next(place)];
            let bytes = carried(place);
            if bytes > 0.0 {
                self.message(&mut traffic, *from, to, bytes);
            }
        }
        let travels = |slice: usize| {
            let first = begins(slice);
            let last = (first + count - 1) % count;
            // What is large waits at its sender until the receiver has said that it wants it.
            let is_asked_for = carried(first) > EAGER_MESSAGE_BYTES_MAX as f64;
            around - latencies[last] + if is_asked_for { latencies[first] } else { 0.0 }
        };
        let slices = (0..count).filter(|slice| slices[*slice] > 0.0);
        traffic.seconds = slices.map(travels).fold(0.0, f64::max);
        traffic
    }

    /// By place, the bytes that each is sent by all others.
    fn pairwise(&self, slices: &[f64]) -> Traffic {
        let count = self.members.len();
        let mut traffic = Traffic { messages: (count - 1) as f64, ..Traffic::default() };
        let total: f64 = slices.iter().sum();
        for (place, from) in self.members.iter().enumerate() {
            if count > ALL_PAIRS_MAX {
                let to = self.next(place);
                self.message(&mut traffic, *from, self.members[to], total - slices[place]);
                continue;
            }
            for (to, slice) in
                self.members.iter().zip(slices).filter(|(to, slice)| *to != from && **slice > 0.0)
            {
                self.message(&mut traffic, *from, *to, *slice);
            }
        }
        let longest = self.longest_way();
        let is_asked_for = slices.iter().any(|slice| *slice > EAGER_MESSAGE_BYTES_MAX as f64);
        // What is large is asked for one after the other.
        traffic.seconds = if is_asked_for { 2.0 * (count - 1) as f64 * longest } else { longest };
        traffic
    }

    fn message(&self, traffic: &mut Traffic, from: usize, to: usize, bytes: f64) {
        let work = (self.way)(from, to, bytes);
        work.resources.iter().for_each(|resource| traffic.load(*resource, work.bytes));
        traffic.handle(from, bytes);
        traffic.handle(to, bytes);
    }

    fn longest_way(&self) -> f64 {
        let count = self.members.len();
        let from = |place: usize| -> f64 {
            let others: Vec<usize> = match count <= ALL_PAIRS_MAX || place == 0 {
                true => (0..count).filter(|other| *other != place).collect(),
                false => vec![self.next(place)],
            };
            others.into_iter().map(|other| self.latency(place, other)).fold(0.0, f64::max)
        };
        (0..count).map(from).fold(0.0, f64::max)
    }

    /// Until a place has what comes up to it.
    fn up(&self, place: usize, bytes: &dyn Fn(&Branch) -> f64) -> f64 {
        let below = branches(place, self.members.len());
        below
            .map(|branch| self.up(branch.place, bytes) + self.seconds(branch.place, place, bytes(&branch)))
            .fold(0.0, f64::max)
    }

    /// Until all below a place have what comes down, where it had it at a moment. The farthest is sent to first.
    fn down(&self, place: usize, had: f64, bytes: &dyn Fn(&Branch) -> f64) -> f64 {
        let (mut last, mut sent) = (had, had);
        for branch in branches(place, self.members.len()).rev() {
            let bytes_there = bytes(&branch);
            let arrives = sent + self.seconds(place, branch.place, bytes_there);
            sent = arrives - if bytes_there > 0.0 { self.latency(place, branch.place) } else { 0.0 };
            last = last.max(self.down(branch.place, arrives, bytes));
        }
        last
    }

    fn seconds(&self, from: usize, to: usize, bytes: f64) -> f64 {
        match bytes > 0.0 {
            true => self.fleet.link(self.members[from], self.members[to]).seconds(bytes as u64),
            false => 0.0,
        }
    }

    fn tree(&self, seconds: f64, total: f64) -> Traffic {
        let levels = (self.members.len() as f64).log2().ceil();
        let handled = self.members.iter().map(|device| (*device, 2.0 * total)).collect();
        Traffic { seconds, messages: 2.0 * levels, handled, ..Traffic::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Machines of one device, by the microseconds of their networks, each of 1 GB/s.
    fn fleet(latencies_us: &[usize]) -> Fleet {
        let node = |(number, latency): (usize, &usize)| {
            format!(
                "[[node]]\nname = \"n{number}\"\nhost_memory = \"1 GiB\"\nnetwork = \"1 GB/s\"\nlatency = \"{latency} us\"\n\
                 devices = [{{ kind = \"V100\" }}]\n"
            )
        };
        Fleet::parse(&latencies_us.iter().enumerate().map(node).collect::<String>(), "fleet").unwrap()
    }

    /// Machine i's way out is resource 2 i, its way in 2 i + 1.
    fn way(from: usize, to: usize, bytes: f64) -> Work {
        Work { bytes, resources: vec![2 * from as u32, 2 * to as u32 + 1], ..Work::default() }
    }

    fn of(latencies_us: &[usize], asked: impl Fn(&Circle) -> Traffic) -> Work {
        let fleet = fleet(latencies_us);
        let members: Vec<usize> = (0..latencies_us.len()).collect();
        let rates = vec![Resource { bytes_per_second: 1e9, is_pool: false }; 2 * members.len()];
        asked(&Circle { fleet: &fleet, members: &members, way: &way }).work(&rates)
    }

    fn is(found: f64, microseconds: f64) {
        assert!((found - 1e-6 * microseconds).abs() < 1e-9, "{} us, not {microseconds}", 1e6 * found);
    }

    #[test]
    fn a_few_numbers_take_one_exchange_among_few_and_a_tree_among_more() {
        // The longest way is between any two, as between the last two.
        is(of(&[10, 10, 10, 90], |circle| circle.numbers()).seconds, 90.0);
        assert_eq!(of(&[10], |circle| circle.numbers()), Work::default());
        // Up: the third comes to the second, that and the fifth to the first; and down again. 64 bytes a member take 64 ns.
        let up = 10.0 + 0.064 + 20.0 + 2.0 * 0.064;
        let down = 5.0 * 0.064;
        let found = of(&[20, 10, 10, 10, 5], |circle| circle.numbers()).seconds;
        assert!(found > 1e-6 * (up + 30.0) && found < 1e-6 * (up + 30.0 + 4.0 * down), "{found}");
    }

    #[test]
    fn large_buffers_go_around_the_ring() {
        let slices = [4e6, 0.0, 2e6];
        let gathered = of(&[10, 20, 30], |circle| circle.gather(&slices));
        // Who has nothing is sent all six, who has most the least.
        is(gathered.bytes / 1e9, 6e3);
        // Ways of 20, 30 and 30: the last slice passes the third and the first, after it was asked for over the third.
        is(gathered.seconds, 30.0 + 30.0 + 20.0);
        let added = of(&[10, 20, 30], |circle| circle.add(&slices.map(|bytes| bytes / 4.0), Wire::F32));
        is(added.bytes / 1e9, 6e3);
        assert_eq!((added.handled_messages, gathered.resources.len()), (2.0, 6));
        // Two exchange their halves.
        let both = of(&[10, 10], |circle| circle.gather(&[1e6, 1e6]));
        is(both.bytes / 1e9, 1e3);
        is(both.seconds, 20.0);
    }

    #[test]
    fn what_goes_as_halves_passes_between_all_pairs() {
        let added = of(&[10, 10, 10], |circle| circle.add(&[3e6, 3e6, 3e6], Wire::Bf16));
        // Each sends two of three slices, of two bytes an element.
        is(added.bytes / 1e9, 12e3);
        is(added.seconds, 2.0 * 2.0 * 10.0);
        // Small shares need not be asked for, and follow each other at once.
        is(of(&[10, 10, 10], |circle| circle.add(&[300.0; 3], Wire::Bf16)).seconds, 10.0);
    }

    #[test]
    fn small_buffers_go_up_and_down_the_tree() {
        let gathered = of(&[10, 10, 10], |circle| circle.gather(&[1e3, 1e3, 1e3]));
        assert_eq!(gathered.bytes, 0.0);
        // Both children's kilobytes at once, then three to the one and three to the other.
        is(gathered.seconds, 10.0 + 1.0 + 3.0 + 3.0 + 10.0);
        assert_eq!(of(&[10, 10, 10], |circle| circle.gather(&[0.0; 3])), Work::default());
    }
}
