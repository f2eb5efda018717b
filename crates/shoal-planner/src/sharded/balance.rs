//! The search itself, which knows neither models nor links: workers that take a number of samples in one of several
//! ways, each way with its time and with the room that it leaves for state. Wanted is the least time in which they
//! compute the whole batch while their rooms together hold the state.
//!
//! Larger micro-batches are faster and leave less room, so a worker that is given a time has a frontier of samples
//! against room. For a given time the question is a knapsack: most room for all samples. Its linear relaxation over
//! the frontiers' hulls refuses what cannot be; a rounding that differs from it in two workers at most accepts nearly
//! all that can; between the two an exact program decides, over all workers where that is little enough work, else over
//! some of each kind. The time is bisected.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use shoal_plan::Activations;

/// How a device computes its samples: in micro-batches of this size, the last of which may be smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Way {
    pub micro_batch: usize,
    pub activations: Activations,
}

/// One kind of device, for this search.
pub(crate) trait Worker {
    fn ways(&self) -> &[Way];
    /// Seconds (or any unit) of so many samples, at least one. For a multiple of the micro-batch it rises with the
    /// samples.
    fn seconds(&self, way: Way, samples: usize) -> f64;
    /// Bytes (or any unit) that are left for state; less than none where the samples do not fit. Falls as they rise.
    fn room(&self, way: Way, samples: usize) -> f64;
    /// The same where it computes nothing.
    fn idle_room(&self) -> f64;
    /// Whether more samples never take less time, of whatever size the last micro-batch is.
    fn rises(&self) -> bool;
}

/// What one device is given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Load {
    pub samples: usize,
    /// None where it computes nothing.
    pub way: Option<Way>,
    pub room: f64,
    pub seconds: f64,
}

#[derive(Clone, Debug)]
pub(crate) struct Balance {
    pub loads: Vec<Load>,
    pub seconds: f64,
}

/// Steps of the exact program for one time: it takes as many devices as these allow.
const EXACT_STEPS_MAX: usize = 1 << 23;
/// Halvings of the time: from the first guess to a relative 1e-12.
const BISECTIONS_MAX: usize = 80;
const CLOSE_ENOUGH: f64 = 1e-12;

/// Divides a batch over devices, each of one of the kinds, so that state of this size finds room. None where
/// that cannot be done within the time given.
pub(crate) fn balance<W: Worker>(
    workers: &[W],
    kind_of: &[usize],
    batch: usize,
    state: f64,
    within: f64,
) -> Option<Balance> {
    Search::new(workers, kind_of, batch, state).least(within)
}

/// The ways in which a worker takes so many samples: those that fit.
fn fitting<W: Worker>(worker: &W, samples: usize) -> impl Iterator<Item = Load> + '_ {
    worker.ways().iter().filter_map(move |way| {
        let way = Way { micro_batch: way.micro_batch.min(samples), ..*way };
        let (room, seconds) = (worker.room(way, samples), worker.seconds(way, samples));
        (room >= 0.0).then_some(Load { samples, way: Some(way), room, seconds })
    })
}

/// The fastest way for so many samples that leaves this much room; of equals the one with the fewest micro-batches, then
/// the one that stands first. None where none leaves it.
pub(crate) fn fastest<W: Worker>(worker: &W, samples: usize, room: f64) -> Option<Load> {
    let pieces = |load: &Load| load.way.map_or(0, |way| samples.div_ceil(way.micro_batch));
    let able = fitting(worker, samples).filter(|load| load.room >= room);
    able.min_by(|a, b| a.seconds.total_cmp(&b.seconds).then(pieces(a).cmp(&pieces(b))))
}

/// The way that leaves most room for so many samples in the time, the fastest of equals.
pub(crate) fn roomiest<W: Worker>(worker: &W, samples: usize, time: f64) -> Option<Load> {
    let able = fitting(worker, samples).filter(|load| load.seconds <= time);
    able.max_by(|a, b| a.room.total_cmp(&b.room).then(b.seconds.total_cmp(&a.seconds)))
}

#[derive(Clone)]
struct Search<'a, W> {
    workers: &'a [W],
    kind_of: &'a [usize],
    batch: usize,
    state: f64,
    /// By kind: the ways in which at least one sample fits.
    ways: Vec<Vec<Way>>,
    exact_steps_max: usize,
}

/// The most that some way allows in the time, and what room it leaves then.
#[derive(Clone, Copy, Debug)]
struct Corner {
    samples: usize,
    room: f64,
}

/// From one corner of a kind's hull to the next.
struct Edge {
    device: usize,
    /// Of the corner it leads to, in its kind's hull.
    corner: usize,
    /// What a sample costs.
    room_per_sample: f64,
}

impl<'a, W: Worker> Search<'a, W> {
    fn new(workers: &'a [W], kind_of: &'a [usize], batch: usize, state: f64) -> Search<'a, W> {
        let fitting = |worker: &W| {
            worker.ways().iter().copied().filter(|way| worker.room(*way, 1) >= 0.0).collect::<Vec<Way>>()
        };
        Search {
            workers,
            kind_of,
            batch,
            state,
            ways: workers.iter().map(fitting).collect(),
            exact_steps_max: EXACT_STEPS_MAX,
        }
    }

    fn least(&self, within: f64) -> Option<Balance> {
        let mut best = self.within(within)?;
        let mut refused = 0.0;
        for _ in 0..BISECTIONS_MAX {
            if best.seconds - refused <= CLOSE_ENOUGH * best.seconds {
                break;
            }
            let time = refused + (best.seconds - refused) / 2.0;
            match self.within(time) {
                Some(better) => best = better,
                None => refused = time,
            }
        }
        Some(best)
    }

    fn within(&self, time: f64) -> Option<Balance> {
        let hulls: Vec<Vec<Corner>> = (0..self.workers.len()).map(|kind| self.hull(kind, time)).collect();
        let (corners, edge) = self.relax(&hulls)?;
        let whole: Vec<usize> =
            corners.iter().zip(self.kind_of).map(|(corner, kind)| hulls[*kind][*corner].samples).collect();
        let samples = self.round(&hulls, &whole, edge, time).or_else(|| self.exactly(&whole, time))?;
        let loads: Vec<Load> = samples
            .iter()
            .enumerate()
            .map(|(device, samples)| self.load(self.kind_of[device], *samples, time))
            .collect::<Option<_>>()?;
        let seconds = loads.iter().map(|load| load.seconds).fold(0.0, f64::max);
        Some(Balance { loads, seconds })
    }

    fn load(&self, kind: usize, samples: usize, time: f64) -> Option<Load> {
        let worker = &self.workers[kind];
        match samples {
            0 => Some(Load { samples, way: None, room: worker.idle_room(), seconds: 0.0 }),
            _ => roomiest(worker, samples, time),
        }
    }

    /// The most samples of a way that fit in the time and in memory.
    fn most(&self, kind: usize, way: Way, time: f64) -> usize {
        let worker = &self.workers[kind];
        let fits = |samples: usize| {
            samples == 0 || (worker.seconds(way, samples) <= time && worker.room(way, samples) >= 0.0)
        };
        let whole = partition_point(self.batch / way.micro_batch, |count| fits(count * way.micro_batch));
        let base = whole * way.micro_batch;
        let rest = (way.micro_batch - 1).min(self.batch - base);
        match worker.rises() {
            true => base + partition_point(rest, |rest| fits(base + rest)),
            // What was measured need not: then every size of the last micro-batch is tried.
            false => base + (1..=rest).rev().find(|rest| fits(base + rest)).unwrap_or(0),
        }
    }

    /// The upper hull of a kind's frontier, from no samples on; each corner has more samples and less room.
    fn hull(&self, kind: usize, time: f64) -> Vec<Corner> {
        let worker = &self.workers[kind];
        let mut corners = vec![Corner { samples: 0, room: worker.idle_room() }];
        for way in &self.ways[kind] {
            let samples = self.most(kind, *way, time);
            if samples > 0 {
                corners.push(Corner { samples, room: worker.room(*way, samples) });
            }
        }
        corners.sort_by(|a, b| a.samples.cmp(&b.samples).then(b.room.total_cmp(&a.room)));
        let mut hull: Vec<Corner> = Vec::new();
        for corner in corners {
            if hull.last().is_some_and(|last| last.samples == corner.samples) {
                continue;
            }
            while let [.., before, last] = hull[..]
                && cost(before, last) >= cost(last, corner)
            {
                hull.pop();
            }
            hull.push(corner);
        }
        hull
    }

    /// Moves devices along their hulls, cheapest samples first, until the batch is taken. Gives each device's corner,
    /// and the last step, which overshoots; none where the batch or the state cannot be taken even in parts.
    fn relax(&self, hulls: &[Vec<Corner>]) -> Option<(Vec<usize>, Option<Edge>)> {
        let mut edges: Vec<Edge> = Vec::new();
        for (device, kind) in self.kind_of.iter().enumerate() {
            edges.extend(hulls[*kind].windows(2).enumerate().map(|(at, pair)| Edge {
                device,
                corner: at + 1,
                room_per_sample: cost(pair[0], pair[1]),
            }));
        }
        edges.sort_by(|a, b| {
            a.room_per_sample
                .total_cmp(&b.room_per_sample)
                .then((a.device, a.corner).cmp(&(b.device, b.corner)))
        });
        let mut corners = vec![0; self.kind_of.len()];
        let mut room: f64 = self.kind_of.iter().map(|kind| hulls[*kind][0].room).sum();
        let mut left = self.batch;
        for edge in edges {
            if left == 0 {
                break;
            }
            let hull = &hulls[self.kind_of[edge.device]];
            let step = hull[edge.corner].samples - hull[edge.corner - 1].samples;
            if step > left {
                room -= edge.room_per_sample * left as f64;
                return (room >= self.state).then_some((corners, Some(edge)));
            }
            (left, corners[edge.device]) = (left - step, edge.corner);
            room -= edge.room_per_sample * step as f64;
        }
        (left == 0 && room >= self.state).then_some((corners, None))
    }

    /// Samples in whole numbers, from those of the devices' corners: the device of the last step takes what is left of
    /// the batch, or the whole step while a device of some kind gives up as much.
    fn round(
        &self,
        hulls: &[Vec<Corner>],
        corners: &[usize],
        edge: Option<Edge>,
        time: f64,
    ) -> Option<Vec<usize>> {
        let mut samples = corners.to_vec();
        let Some(edge) = edge else { return self.holds(&samples, time).then_some(samples) };
        samples[edge.device] = hulls[self.kind_of[edge.device]][edge.corner].samples;
        let overshoot = samples.iter().sum::<usize>() - self.batch;
        for device in std::iter::once(edge.device).chain(self.unlike(&samples)) {
            if samples[device] >= overshoot {
                samples[device] -= overshoot;
                if self.holds(&samples, time) {
                    return Some(samples);
                }
                samples[device] += overshoot;
            }
        }
        None
    }

    /// One device of each kind and number of samples, in order.
    fn unlike(&self, samples: &[usize]) -> Vec<usize> {
        let mut seen = HashSet::new();
        (0..samples.len()).filter(|device| seen.insert((self.kind_of[*device], samples[*device]))).collect()
    }

    fn holds(&self, samples: &[usize], time: f64) -> bool {
        let mut room = 0.0;
        let mut known: Vec<((usize, usize), f64)> = Vec::new();
        for (device, samples) in samples.iter().enumerate() {
            let like = (self.kind_of[device], *samples);
            let here = match known.iter().find(|(known, _)| *known == like) {
                Some((_, room)) => *room,
                None => {
                    let Some(load) = self.load(like.0, like.1, time) else { return false };
                    known.push((like, load.room));
                    load.room
                }
            };
            room += here;
        }
        room >= self.state
    }

    /// The most room for all samples by dynamic programming: over all devices where that is not too much work, over
    /// some of each kind otherwise, while the others stay at their corners.
    fn exactly(&self, corners: &[usize], time: f64) -> Option<Vec<usize>> {
        let left = self.batch - corners.iter().sum::<usize>();
        let mut devices: Vec<usize> = Vec::new();
        // In rounds, so that all kinds have their turn.
        let mut waiting: Vec<usize> = (0..corners.len()).collect();
        'rounds: while !waiting.is_empty() {
            let mut seen = HashSet::new();
            let (round, others): (Vec<usize>, Vec<usize>) =
                waiting.iter().partition(|device| seen.insert((self.kind_of[**device], corners[**device])));
            for device in round {
                devices.push(device);
                let batch = left + devices.iter().map(|device| corners[*device]).sum::<usize>();
                let looked_up: usize = self.ways.iter().map(|ways| ways.len() * (batch + 1)).sum();
                if devices.len() * (batch + 1) * (batch + 1) + looked_up > self.exact_steps_max {
                    devices.pop();
                    break 'rounds;
                }
            }
            waiting = others;
        }
        let batch = left + devices.iter().map(|device| corners[*device]).sum::<usize>();
        let mut is_free = vec![false; corners.len()];
        devices.iter().for_each(|device| is_free[*device] = true);
        let mut state = self.state;
        for device in (0..corners.len()).filter(|device| !is_free[*device]) {
            state -= self.load(self.kind_of[device], corners[device], time)?.room;
        }
        let mut samples = corners.to_vec();
        let found = self.most_room(&devices, batch, state, time)?;
        devices.iter().zip(found).for_each(|(device, found)| samples[*device] = found);
        Some(samples)
    }

    fn most_room(&self, devices: &[usize], batch: usize, state: f64, time: f64) -> Option<Vec<usize>> {
        let rooms: Vec<Vec<f64>> = (0..self.workers.len())
            .map(|kind| {
                let room =
                    |samples| self.load(kind, samples, time).map_or(f64::NEG_INFINITY, |load| load.room);
                (0..=batch).map(room).collect()
            })
            .collect();
        let mut best = vec![f64::NEG_INFINITY; batch + 1];
        best[0] = 0.0;
        let mut taken: Vec<Vec<usize>> = Vec::with_capacity(devices.len());
        for device in devices {
            let rooms = &rooms[self.kind_of[*device]];
            let (mut next, mut choice) = (vec![f64::NEG_INFINITY; batch + 1], vec![0; batch + 1]);
            for (before, room) in best.iter().enumerate().filter(|(_, room)| room.is_finite()) {
                for (samples, here) in rooms[..=batch - before].iter().enumerate() {
                    if room + here > next[before + samples] {
                        (next[before + samples], choice[before + samples]) = (room + here, samples);
                    }
                }
            }
            best = next;
            taken.push(choice);
        }
        if best[batch] < state {
            return None;
        }
        let mut left = batch;
        let mut samples: Vec<usize> = taken
            .iter()
            .rev()
            .map(|choice| {
                let samples = choice[left];
                left -= samples;
                samples
            })
            .collect();
        samples.reverse();
        Some(samples)
    }
}

/// Room that a sample costs between two corners.
fn cost(from: Corner, to: Corner) -> f64 {
    (from.room - to.room) / (to.samples - from.samples) as f64
}

/// The largest count up to a bound for which it holds, where it holds for all smaller ones.
fn partition_point(bound: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, bound);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        match holds(middle) {
            true => low = middle,
            false => high = middle - 1,
        }
    }
    low
}

/// Of the sizes up to a bound: all small ones, then ever larger steps of a sixteenth.
pub(crate) fn micro_batch_sizes(bound: usize) -> Vec<usize> {
    const EVERY_SIZE_UP_TO: usize = 64;
    let next = |size: &usize| Some(if *size < EVERY_SIZE_UP_TO { size + 1 } else { size + size / 16 });
    std::iter::successors(Some(1), next).take_while(|size| *size <= bound).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;

    use super::*;

    /// By how much more than the best a search takes, over many cases, the worst last.
    pub struct Excesses(Vec<f64>);

    /// The same cases every time: what is claimed is of their whole, not of each.
    pub fn excesses<S: Strategy>(
        count: usize,
        cases: S,
        excess: impl Fn(S::Value) -> Option<f64>,
    ) -> Excesses {
        let mut runner = TestRunner::deterministic();
        let mut case = || cases.new_tree(&mut runner).expect("every case can be made").current();
        let mut all: Vec<f64> = (0..count).filter_map(|_| excess(case())).collect();
        all.sort_by(f64::total_cmp);
        Excesses(all)
    }

    impl Excesses {
        /// On average a thousandth, and never two hundredths.
        pub fn assert_small(&self) {
            let Excesses(all) = self;
            let mean = all.iter().sum::<f64>() / all.len() as f64;
            assert!(all[0] >= -1e-9 && mean < 1e-3 && all[all.len() - 1] < 0.02, "{mean} {all:?}");
        }
    }

    /// Seconds of each size of micro-batch, and the room that each leaves.
    #[derive(Clone, Debug)]
    struct Table {
        ways: Vec<Way>,
        seconds: Vec<f64>,
        taken: Vec<f64>,
        taken_a_sample: f64,
        memory: f64,
    }

    impl Worker for Table {
        fn ways(&self) -> &[Way] {
            &self.ways
        }

        fn seconds(&self, way: Way, samples: usize) -> f64 {
            let at = |size: usize| if size == 0 { 0.0 } else { self.seconds[size - 1] };
            (samples / way.micro_batch) as f64 * at(way.micro_batch) + at(samples % way.micro_batch)
        }

        fn room(&self, way: Way, samples: usize) -> f64 {
            let largest = way.micro_batch.min(samples);
            self.memory - self.taken[largest - 1] - self.taken_a_sample * samples as f64
        }

        fn idle_room(&self) -> f64 {
            self.memory
        }

        fn rises(&self) -> bool {
            self.seconds.is_sorted()
        }
    }

    fn table() -> impl Strategy<Value = Table> {
        let sizes = 8;
        let seconds = proptest::collection::vec(0.1..4.0f64, sizes);
        let taken = proptest::collection::vec(0.0..3.0f64, sizes);
        (seconds, taken, 0.0..0.5f64, 1.0..12.0f64, any::<bool>()).prop_map(
            move |(mut seconds, mut taken, taken_a_sample, memory, rising)| {
                if rising {
                    seconds.sort_by(f64::total_cmp);
                }
                taken.sort_by(f64::total_cmp);
                let activations = Activations::Recompute;
                let ways = (1..=sizes).map(|micro_batch| Way { micro_batch, activations }).collect();
                Table { ways, seconds, taken, taken_a_sample, memory }
            },
        )
    }

    /// Devices as they are measured: a micro-batch costs something, and so does each of its samples.
    fn line() -> impl Strategy<Value = Table> {
        (0.1..2.0f64, 0.1..1.0f64, 0.0..1.0f64, 0.05..0.3f64, 0.0..0.05f64, 4.0..12.0f64).prop_map(
            |(start, each, base, taken_each, taken_a_sample, memory)| {
                let sizes = 1..=32usize;
                let line = |start: f64, each: f64| sizes.clone().map(move |size| start + each * size as f64);
                let activations = Activations::Recompute;
                let ways = sizes.clone().map(|micro_batch| Way { micro_batch, activations }).collect();
                let (seconds, taken) = (line(start, each).collect(), line(base, taken_each).collect());
                Table { ways, seconds, taken, taken_a_sample, memory }
            },
        )
    }

    /// Every division, every micro-batch size.
    fn brute(workers: &[Table], kind_of: &[usize], batch: usize, state: f64) -> Option<f64> {
        let Some((kind, others)) = kind_of.split_first() else {
            return (batch == 0 && state <= 0.0).then_some(0.0);
        };
        let worker = &workers[*kind];
        let mut best: Option<f64> = None;
        for samples in 0..=batch {
            let options: Vec<(f64, f64)> = match samples {
                0 => vec![(0.0, worker.memory)],
                _ => worker
                    .ways
                    .iter()
                    .filter(|way| way.micro_batch <= samples)
                    .map(|way| (worker.seconds(*way, samples), worker.room(*way, samples)))
                    .collect(),
            };
            for (seconds, room) in options.into_iter().filter(|(_, room)| *room >= 0.0) {
                if let Some(rest) = brute(workers, others, batch - samples, state - room) {
                    let time = seconds.max(rest);
                    best = Some(best.map_or(time, |best| best.min(time)));
                }
            }
        }
        best
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_division_is_better(
            workers in proptest::collection::vec(table(), 3),
            kind_of in proptest::collection::vec(0usize..3, 1..4),
            batch in 1usize..9,
            fullness in 0.0..1.0f64,
        ) {
            let all: f64 = kind_of.iter().map(|kind| workers[*kind].memory).sum();
            let state = fullness * all;
            let found = balance(&workers, &kind_of, batch, state, f64::INFINITY);
            let expected = brute(&workers, &kind_of, batch, state);
            prop_assert_eq!(found.is_some(), expected.is_some());
            if let (Some(found), Some(expected)) = (found, expected) {
                prop_assert!((found.seconds - expected).abs() <= 1e-9 * expected, "{found:?} against {expected}");
                prop_assert_eq!(found.loads.iter().map(|load| load.samples).sum::<usize>(), batch);
                prop_assert!(found.loads.iter().map(|load| load.room).sum::<f64>() >= state);
            }
        }

    }

    #[test]
    fn where_devices_are_many_the_best_is_rarely_missed_and_never_by_much() {
        let kind_of = proptest::collection::vec(0usize..3, 24..40);
        let cases = (proptest::collection::vec(line(), 3), kind_of, 24usize..32, 0.2..0.95f64);
        let excess = |(workers, kind_of, samples_each, fullness): (Vec<Table>, Vec<usize>, usize, f64)| {
            // More than the exact program takes, here made to do it nevertheless.
            let batch = samples_each * kind_of.len();
            let all: f64 = kind_of.iter().map(|kind| workers[*kind].memory).sum();
            let search = Search::new(&workers, &kind_of, batch, fullness * all);
            let exact = Search { exact_steps_max: usize::MAX, ..search.clone() }.least(f64::INFINITY);
            let found = search.least(f64::INFINITY);
            assert_eq!(exact.is_some(), found.is_some());
            Some(found?.seconds / exact?.seconds - 1.0)
        };
        excesses(60, cases, excess).assert_small();
    }

    #[test]
    fn sizes_are_dense_where_they_are_small() {
        let sizes = micro_batch_sizes(1024);
        assert_eq!(&sizes[..64], &(1..=64).collect::<Vec<_>>()[..]);
        assert!(sizes.len() < 120 && sizes.iter().all(|size| *size <= 1024), "{sizes:?}");
    }
}
