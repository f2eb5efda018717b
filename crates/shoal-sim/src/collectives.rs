//! What collectives take: the messages that their route has, over the ways that these pass. Which route one goes is the
//! network's to say (`shoal_net::collective::Route`), and it is asked here as it is asked there.
//!
//! Their bytes share the links on their way with whatever else passes them; beside that it counts how many messages follow each
//! other, each with its way's latency.

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
    /// Latencies that follow each other.
    pub seconds: f64,
    /// Bytes by resource, message by message.
    loads: Vec<(u32, f64)>,
    /// What resources carry beside that, at the same time.
    beside: Vec<(u32, f64)>,
    /// Bytes that a device sends or receives, message by message.
    handled: Vec<(usize, f64)>,
    /// Messages that follow each other.
    messages: f64,
}

impl Traffic {
    /// Both, one after the other.
    pub fn and(mut self, other: Traffic) -> Traffic {
        self.seconds += other.seconds;
        self.messages += other.messages;
        self.loads.extend(other.loads);
        self.beside.extend(other.beside);
        self.handled.extend(other.handled);
        self
    }

    /// What passes in several circles: those of a device one after the other, others beside them.
    pub fn of_circles<'a>(circles: impl Iterator<Item = (&'a [usize], Traffic)>) -> Traffic {
        let mut all = Traffic::default();
        // By device, what its circles so far have taken of time and messages.
        let mut until: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
        for (members, traffic) in circles {
            let before = members.iter().filter_map(|member| until.get(member).copied());
            let begun = before.fold((0.0, 0.0), |a: (f64, f64), b| (a.0.max(b.0), a.1.max(b.1)));
            let over = (begun.0 + traffic.seconds, begun.1 + traffic.messages);
            until.extend(members.iter().map(|member| (*member, over)));
            (all.seconds, all.messages) = (all.seconds.max(over.0), all.messages.max(over.1));
            all.loads.extend(traffic.loads);
            all.handled.extend(traffic.handled);
        }
        all
    }

    /// So many bytes pass these as well, at the same time.
    pub fn pass(&mut self, resources: impl IntoIterator<Item = u32>, bytes: f64) {
        self.beside.extend(resources.into_iter().map(|resource| (resource, bytes)));
    }

    /// As one transfer over all that it passes: it has as many bytes as would take the narrowest as long as the busiest is.
    pub fn work(self, resources: &[Resource]) -> Work {
        let mut loads = merged(self.loads, |sum, bytes| sum + bytes);
        loads.extend(self.beside);
        let mut loads = merged(loads, f64::max);
        loads.retain(|(_, bytes)| *bytes > 0.0);
        let rate = |resource: u32| resources[resource as usize].bytes_per_second;
        let busiest = loads.iter().map(|(resource, bytes)| bytes / rate(*resource)).fold(0.0, f64::max);
        let narrowest = loads.iter().map(|(resource, _)| rate(*resource)).fold(f64::INFINITY, f64::min);
        let handled = merged(self.handled, |sum, bytes| sum + bytes);
        Work {
            seconds: self.seconds,
            bytes: if busiest > 0.0 { busiest * narrowest } else { 0.0 },
            resources: loads.into_iter().map(|(resource, _)| resource).collect(),
            handled_bytes: handled.into_iter().map(|(_, bytes)| bytes).fold(0.0, f64::max),
            handled_messages: self.messages,
        }
    }
}

/// What is said of each thing, made one.
fn merged<T: Copy + Ord>(mut said: Vec<(T, f64)>, both: impl Fn(f64, f64) -> f64) -> Vec<(T, f64)> {
    said.sort_by_key(|(thing, _)| *thing);
    said.dedup_by(|next, kept| {
        let same = next.0 == kept.0;
        if same {
            kept.1 = both(kept.1, next.1);
        }
        same
    });
    said
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
            Route::Tree => self.tree(&|branch| slices[branch.below.clone()].iter().sum(), &|_| total),
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
            Route::Tree => self.tree(&|_| total, &|branch| in_fp32[branch.below.clone()].iter().sum()),
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
            _ => self
                .tree(&|branch| NUMBERS_BYTES * branch.below.len() as f64, &|_| NUMBERS_BYTES * count as f64),
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
        traffic.loads.extend(work.resources.iter().map(|resource| (*resource, work.bytes)));
        traffic.handled.extend([(from, bytes), (to, bytes)]);
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

    /// By branch, the bytes that come up from it and those that go down to it.
    fn tree(&self, up: &dyn Fn(&Branch) -> f64, down: &dyn Fn(&Branch) -> f64) -> Traffic {
        let count = self.members.len();
        let mut traffic = Traffic { messages: 2.0 * (count as f64).log2().ceil(), ..Traffic::default() };
        for (place, above) in self.members.iter().enumerate() {
            for branch in branches(place, count) {
                let below = self.members[branch.place];
                self.message(&mut traffic, below, *above, up(&branch));
                self.message(&mut traffic, *above, below, down(&branch));
            }
        }
        traffic.seconds = self.farthest(0, up) + self.farthest(0, down);
        traffic
    }

    /// The latencies on the longest way between a place and what is below it, of messages that have any bytes.
    fn farthest(&self, place: usize, bytes: &dyn Fn(&Branch) -> f64) -> f64 {
        let below = branches(place, self.members.len());
        let way = |branch: Branch| {
            let latency = if bytes(&branch) > 0.0 { self.latency(place, branch.place) } else { 0.0 };
            latency + self.farthest(branch.place, bytes)
        };
        below.map(way).fold(0.0, f64::max)
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
        // Up: the fourth comes to the third, and that to the first; and down again.
        is(of(&[20, 10, 10, 10, 5], |circle| circle.numbers()).seconds, 2.0 * (10.0 + 20.0));
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
    fn circles_without_a_common_member_take_no_longer_than_one() {
        let both = |other: &'static [usize]| {
            let one =
                || Traffic { seconds: 1e-5, messages: 1.0, loads: vec![(0, 1e3)], ..Traffic::default() };
            Traffic::of_circles([(&[0usize, 1][..], one()), (other, one())].into_iter())
        };
        is(both(&[2, 3]).seconds, 10.0);
        is(both(&[1, 2]).seconds, 20.0);
        let rates = [Resource { bytes_per_second: 1e9, is_pool: false }];
        is(both(&[2, 3]).work(&rates).bytes / 1e9, 2.0);
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
        // Three kilobytes leave the first for each of the others.
        is(gathered.bytes / 1e9, 6.0);
        is(gathered.seconds, 2.0 * 10.0);
        // Where only the first has anything nothing comes up.
        is(of(&[10, 10, 10], |circle| circle.gather(&[1e3, 0.0, 0.0])).seconds, 10.0);
        assert_eq!(of(&[10, 10, 10], |circle| circle.gather(&[0.0; 3])), Work::default());
    }
}
