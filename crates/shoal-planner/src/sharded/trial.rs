//! One set of machines: what moving parameters costs them, and the division that follows. Moving depends on who keeps
//! what, which depends on the division: the two are brought into line in a few rounds, and the best of what was met is
//! kept by what it really costs. That is then improved step by step.

use std::cmp::Ordering;
use std::collections::HashSet;

use shoal_plan::Activations;

use super::balance::{Load, Way, Worker, balance, fastest, roomiest};
use super::movement::{Ring, Shares};
use super::search::Search;
use super::shares::level;
use super::work::{DeviceWork, Movements, Terms};
use super::{Decision, DeviceShare, Request};

/// Rounds in which division and movements are brought into line.
const ROUNDS_MAX: usize = 4;
/// Passes over all devices in which each is tried with other ways and samples.
const PASSES_MAX: usize = 4;

/// Divisions from which steps are tried at once where devices are few, and how many steps in a row.
const BEAM_WIDTH: usize = 8;
const BEAM_STEPS_MAX: usize = 4;

/// Ways of a device that are tried for a number of samples where devices are few.
const CHOICES_MAX: usize = 6;

/// How much longer devices may take where that leaves more room.
const SLACKS: [f64; 4] = [1.02, 1.1, 1.3, 2.0];

pub(super) struct Trial<'a> {
    search: &'a Search<'a>,
    /// By device of the fleet, which of the workers it is; none where it takes no part.
    kind_of: Vec<Option<usize>>,
    workers: Vec<DeviceWork<'a>>,
    /// By node, bytes of state that its host may keep.
    host_rooms: Vec<f64>,
    best: Option<(Vec<Load>, Decision)>,
    /// Whether all divisions were tried.
    is_exact: bool,
}

impl<'a> Trial<'a> {
    /// Whether hosts may keep state too.
    pub fn new(search: &'a Search<'a>, used: &[bool], spills: bool, corrections: &[f64]) -> Trial<'a> {
        let Request { fleet, devices, host_bytes, costs, .. } = search.request;
        let in_use: Vec<usize> = fleet
            .nodes
            .iter()
            .map(|node| node.devices.clone().filter(|device| used[*device]).count())
            .collect();
        let mut kinds: Vec<Terms> = Vec::new();
        let mut workers = Vec::new();
        let kind_of = (0..used.len())
            .map(|at| {
                let (device, row) = (&fleet.devices[at], &devices[at]);
                let host = host_bytes[device.node] as f64 / in_use[device.node].max(1) as f64;
                let terms = Terms {
                    kind: device.kind.clone(),
                    host_link: device.host_link.clone(),
                    budget: row.budget_bytes.saturating_sub(row.workspace_bytes) as f64 - search.slicing,
                    // Where the host keeps state too, a half is for that.
                    host_budget: if spills { host / 2.0 } else { host },
                    correction: corrections[at],
                };
                used[at].then(|| {
                    kinds.iter().position(|known| *known == terms).unwrap_or_else(|| {
                        workers.push(DeviceWork::new(at, &terms, costs, &search.bytes, &search.ways));
                        kinds.push(terms);
                        kinds.len() - 1
                    })
                })
            })
            .collect();
        let host_room = |(node, host): (usize, &u64)| match spills && in_use[node] > 0 {
            true => (*host as f64 / 2.0 - search.slicing).max(0.0) * search.state / search.host_state,
            false => 0.0,
        };
        let host_rooms = host_bytes.iter().enumerate().map(host_room).collect();
        Trial { search, kind_of, workers, host_rooms, best: None, is_exact: false }
    }

    /// All the room for state where nothing is computed.
    pub fn rooms(&self) -> f64 {
        self.idle_rooms() + self.host_rooms.iter().sum::<f64>()
    }

    /// The same on devices alone.
    pub fn idle_rooms(&self) -> f64 {
        self.kind_of.iter().flatten().map(|kind| self.workers[*kind].idle_room().max(0.0)).sum()
    }

    /// What so many samples leave of a device's room in the way that leaves most; below zero by what they lack where they do
    /// not fit.
    pub fn most_room(&self, device: usize, samples: usize) -> f64 {
        let Some(worker) = self.kind_of[device].map(|kind| &self.workers[kind]) else { return 0.0 };
        let ways = self.search.ways.iter().filter(|way| way.micro_batch <= samples);
        let rooms = ways.map(|way| worker.room_or_lack(*way, samples));
        rooms.reduce(f64::max).unwrap_or_else(|| worker.idle_room())
    }

    /// The best division's seconds, if one is found within a time.
    pub fn divide(&mut self, within: f64) -> Option<f64> {
        let search = self.search;
        let devices: Vec<usize> = (0..self.kind_of.len()).filter(|at| self.kind_of[*at].is_some()).collect();
        let kinds: Vec<usize> = self.kind_of.iter().copied().flatten().collect();
        let on_devices = (search.state - self.host_rooms.iter().sum::<f64>()).max(0.0);
        let idle: Vec<Load> = (0..self.kind_of.len()).map(|at| self.load(at, 0, None)).collect();
        let computes: Vec<bool> = self.kind_of.iter().map(Option::is_some).collect();
        let mut movements = self.movements(&computes, &self.shares(&idle)?);
        for _ in 0..ROUNDS_MAX {
            self.workers.iter_mut().for_each(|worker| worker.movements = movements.clone());
            let batch = search.request.step.global_batch;
            let Some(found) = balance(&self.workers, &kinds, batch, on_devices, within) else { break };
            let mut loads = idle.clone();
            devices.iter().zip(&found.loads).for_each(|(device, load)| loads[*device] = *load);
            let Some(shares) = self.shares(&loads) else { break };
            self.consider(&loads);
            // Whoever got less state than it has room for may use the rest to be faster.
            self.choose(&mut loads, |worker, device, samples| {
                fastest(worker, samples, shares.devices[device] * search.state)
            });
            self.consider(&loads);
            // Those that compute move less if they keep more, which may be worth some time.
            for slack in SLACKS {
                let mut slow = loads.clone();
                self.choose(&mut slow, |worker, _, samples| roomiest(worker, samples, slack * found.seconds));
                self.consider(&slow);
            }
            let computes: Vec<bool> = loads.iter().map(|load| load.samples > 0).collect();
            let moved = self.movements(&computes, &shares);
            if moved == movements {
                break;
            }
            movements = moved;
        }
        self.best.as_ref().map(|(_, decision)| decision.seconds)
    }

    /// Other ways for the same samples, where there are such.
    fn choose(&self, loads: &mut [Load], way: impl Fn(&DeviceWork, usize, usize) -> Option<Load>) {
        for (device, load) in loads.iter_mut().enumerate().filter(|(_, load)| load.samples > 0) {
            let worker = self.kind_of[device].map(|kind| &self.workers[kind]);
            let found = worker.and_then(|worker| way(worker, device, load.samples));
            *load = found.unwrap_or(*load);
        }
    }

    /// The best of all divisions in all ways, where they are few enough to be tried one by one.
    pub fn divide_exhaustively(&mut self, divisions_max: usize) -> Option<f64> {
        let batch = self.search.request.step.global_batch;
        if batch > divisions_max / self.search.ways.len().max(1) {
            return None;
        }
        // By samples, in how many ways the devices seen so far can divide them.
        let mut divisions = vec![0usize; batch + 1];
        divisions[0] = 1;
        let mut choices: Vec<Vec<Load>> = Vec::new();
        for device in 0..self.kind_of.len() {
            let most = if self.kind_of[device].is_some() { batch } else { 0 };
            let here: Vec<Load> = (0..=most).flat_map(|samples| self.all_loads(device, samples)).collect();
            let mut next = vec![0usize; batch + 1];
            for load in &here {
                for (before, count) in divisions[..=batch - load.samples].iter().enumerate() {
                    let sum = &mut next[before + load.samples];
                    *sum = sum.saturating_add(*count);
                }
            }
            divisions = next;
            choices.push(here);
        }
        if divisions[batch] > divisions_max {
            return None;
        }
        self.each(&choices, batch, &mut Vec::new());
        self.is_exact = true;
        self.best.as_ref().map(|(_, decision)| decision.seconds)
    }

    /// Every way to compute so many samples on a device.
    fn all_loads(&self, device: usize, samples: usize) -> Vec<Load> {
        if samples == 0 {
            return vec![self.load(device, 0, None)];
        }
        let ways = self.search.ways.iter().filter(|way| way.micro_batch <= samples);
        ways.map(|way| self.load(device, samples, Some(*way))).filter(|load| load.room >= 0.0).collect()
    }

    /// Considers every division of what is left over the devices that have nothing yet.
    fn each(&mut self, choices: &[Vec<Load>], left: usize, loads: &mut Vec<Load>) {
        let Some(here) = choices.get(loads.len()) else { return self.consider(loads) };
        let is_last = loads.len() + 1 == choices.len();
        for load in here.iter().filter(|load| load.samples <= left && (!is_last || load.samples == left)) {
            loads.push(*load);
            self.each(choices, left - load.samples, loads);
            loads.pop();
        }
    }

    /// The best, improved by other ways for devices that are alike and by samples handed from one to another, as long as
    /// that helps.
    pub fn improve(&mut self) -> Option<f64> {
        for _ in 0..PASSES_MAX {
            let before = self.best.as_ref()?.1.seconds;
            self.try_ways();
            self.try_moves();
            if self.best.as_ref()?.1.seconds >= before {
                break;
            }
        }
        self.best.as_ref().map(|(_, decision)| decision.seconds)
    }

    pub fn into_best(self) -> Option<Decision> {
        self.best.map(|(_, decision)| decision)
    }

    /// Looks farther than one step: two devices that hold the rest up alike have to be relieved both, and a division that is
    /// better as a whole may lie behind one that is worse. Several of the next best are followed side by side.
    pub fn look_farther(&mut self) {
        let Some(best) = self.best.clone().filter(|_| !self.is_exact) else { return };
        // By device, those that are alike in any order: its samples, the size of its micro-batches, and what it does with
        // activations.
        let mut seen = HashSet::new();
        let places: Vec<_> = (0..best.0.len()).map(|device| self.place(device)).collect();
        let key = |(place, load): (&(usize, Option<usize>), &Load)| {
            let way = load.way.map(|way| (way.micro_batch, way.activations as usize));
            (*place, load.samples, way)
        };
        let mut front = vec![best];
        for _ in 0..BEAM_STEPS_MAX {
            let mut next: Vec<(Vec<Load>, Decision)> = Vec::new();
            for loads in front.iter().flat_map(|(base, _)| self.neighbours(base)) {
                let mut keys: Vec<_> = places.iter().zip(&loads).map(key).collect();
                keys.sort_unstable();
                if !seen.insert(keys) {
                    continue;
                }
                let Some(shares) = self.shares(&loads) else { continue };
                let decision = self.rate(&loads, &shares);
                next.push((loads, decision));
            }
            next.sort_by(|a, b| order(&a.1, &b.1));
            next.truncate(BEAM_WIDTH);
            let Some((loads, decision)) = next.first() else { return };
            if self.best.as_ref().is_none_or(|(_, best)| is_better(decision, best)) {
                self.best = Some((loads.clone(), decision.clone()));
            }
            front = next;
        }
    }

    /// All divisions one step away: samples handed from one device to another.
    fn neighbours(&self, base: &[Load]) -> Vec<Vec<Load>> {
        let mut all = Vec::new();
        for from in self.first_alike(base, None) {
            let others = self.first_alike(base, Some(from));
            for amount in amounts(base[from].samples) {
                let rest = self.choices(from, base[from].samples - amount);
                for to in others.iter().copied() {
                    for taken in self.choices(to, base[to].samples + amount) {
                        for left in &rest {
                            let mut loads = base.to_vec();
                            (loads[to], loads[from]) = (taken, *left);
                            all.push(loads);
                        }
                    }
                }
            }
        }
        all
    }

    /// Of devices that take part, are alike and have the same to do, the first; without one of them.
    fn first_alike(&self, loads: &[Load], but: Option<usize>) -> Vec<usize> {
        let taking_part = |device: &usize| self.kind_of[*device].is_some() && Some(*device) != but;
        let mut found: Vec<usize> = Vec::new();
        for device in (0..loads.len()).filter(taking_part) {
            let like = |other: &usize| (self.place(*other), loads[*other]);
            if found.iter().all(|other| like(other) != like(&device)) {
                found.push(device);
            }
        }
        found
    }

    /// What tells a device from others: its node and its worker.
    fn place(&self, device: usize) -> (usize, Option<usize>) {
        (self.search.request.fleet.devices[device].node, self.kind_of[device])
    }

    fn try_ways(&mut self) {
        for device in self.unlike() {
            let Some((loads, _)) = &self.best else { return };
            let (like, base) = (loads[device], loads.clone());
            for way in &self.search.ways {
                if like.samples == 0 || way.micro_batch > like.samples {
                    continue;
                }
                let mut loads = base.clone();
                for at in (0..loads.len())
                    .filter(|at| self.kind_of[*at] == self.kind_of[device] && base[*at] == like)
                {
                    loads[at] = self.load(at, like.samples, Some(*way));
                }
                self.consider(&loads);
            }
        }
    }

    fn try_moves(&mut self) {
        let unlike = self.unlike();
        for (from, to) in unlike.iter().flat_map(|from| unlike.iter().map(move |to| (*from, *to))) {
            let Some((base, _)) = self.best.clone() else { return };
            if from == to {
                continue;
            }
            let all = base[from].samples;
            for amount in amounts(all) {
                for taken in self.choices(to, base[to].samples + amount) {
                    for left in self.choices(from, all - amount) {
                        let mut loads = base.clone();
                        (loads[to], loads[from]) = (taken, left);
                        self.consider(&loads);
                    }
                }
            }
        }
    }

    /// Ways worth trying for so many samples on a device: those than which none is both faster and leaves more room, or,
    /// where these are many, some from end to end.
    fn choices(&self, device: usize, samples: usize) -> Vec<Load> {
        let Some(worker) = self.kind_of[device].map(|kind| &self.workers[kind]) else { return Vec::new() };
        let seconds = |load: &Load| load.way.map_or(0.0, |way| worker.seconds(way, samples));
        let all = self.all_loads(device, samples).into_iter();
        let mut all: Vec<(f64, Load)> = all.map(|load| (seconds(&load), load)).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.room.total_cmp(&a.1.room)));
        let mut best: Vec<Load> = Vec::new();
        for (_, load) in all {
            if best.last().is_none_or(|last| load.room > last.room) {
                best.push(load);
            }
        }
        let most = if self.search.has_few_devices() { CHOICES_MAX } else { 3 };
        if best.len() <= most {
            return best;
        }
        (0..most).map(|place| best[place * (best.len() - 1) / (most - 1)]).collect()
    }

    /// One of the devices of each kind that have the same to do.
    fn unlike(&self) -> Vec<usize> {
        let Some((loads, _)) = &self.best else { return Vec::new() };
        let mut seen: Vec<(Option<usize>, Load)> = Vec::new();
        let mut first = |device: &usize| {
            let like = (self.kind_of[*device], loads[*device]);
            let is_new = like.0.is_some() && !seen.contains(&like);
            seen.push(like);
            is_new
        };
        (0..loads.len()).filter(|device| first(device)).collect()
    }

    fn load(&self, device: usize, samples: usize, way: Option<Way>) -> Load {
        let worker = self.kind_of[device].map(|kind| &self.workers[kind]);
        let way =
            way.filter(|_| samples > 0).map(|way| Way { micro_batch: way.micro_batch.min(samples), ..way });
        let room = match (worker, way) {
            (None, _) => 0.0,
            (Some(worker), None) => worker.idle_room(),
            (Some(worker), Some(way)) => worker.room(way, samples),
        };
        Load { samples, way, room, seconds: 0.0 }
    }

    /// Keeps a division if it fits and is better than the best.
    pub fn consider(&mut self, loads: &[Load]) {
        if loads.iter().any(|load| load.way.is_some() && load.room < 0.0) {
            return;
        }
        let Some(shares) = self.shares(loads) else { return };
        let decision = self.rate(loads, &shares);
        if self.best.as_ref().is_none_or(|(_, best)| is_better(&decision, best)) {
            self.best = Some((loads.to_vec(), decision));
        }
    }

    /// The state in the devices' rooms, as evenly as they allow, and what finds none there in the hosts'.
    fn shares(&self, loads: &[Load]) -> Option<Shares> {
        let state = self.search.state;
        let rooms: Vec<f64> = loads.iter().map(|load| load.room.max(0.0)).collect();
        let here = rooms.iter().sum::<f64>().min(state);
        let (left, host_room) = (state - here, self.host_rooms.iter().sum::<f64>());
        if left > host_room {
            return None;
        }
        let hosts = self.host_rooms.iter().map(|own| if left > 0.0 { left * own / host_room } else { 0.0 });
        let share = |bytes: f64| bytes / state;
        Some(Shares {
            devices: level(&rooms, here).into_iter().map(share).collect(),
            hosts: hosts.map(share).collect(),
        })
    }

    fn movements(&self, computes: &[bool], shares: &Shares) -> Movements {
        let groups = &self.search.bytes.groups;
        let ring = Ring::new(self.search.request.fleet, computes, shares);
        Movements {
            gather: groups.iter().map(|group| ring.gather(group.gathered)).collect(),
            reduce: groups.iter().map(|group| ring.reduce(group.reduced)).collect(),
        }
    }

    /// What a division really costs with its shares.
    fn rate(&self, loads: &[Load], shares: &Shares) -> Decision {
        let search = self.search;
        let Request { costs, devices: rows, .. } = search.request;
        let computes: Vec<bool> = loads.iter().map(|load| load.samples > 0).collect();
        let movements = self.movements(&computes, shares);
        let share = |device: usize| {
            let Load { samples, way, .. } = loads[device];
            let (seconds, bytes) = match (way, self.kind_of[device].map(|kind| &self.workers[kind])) {
                (Some(way), Some(worker)) => {
                    (worker.seconds_with(&movements, way, samples), search.bytes.device(way, samples))
                }
                _ => (0.0, 0),
            };
            let state = (shares.devices[device] * search.state + search.slicing) as u64;
            DeviceShare {
                samples,
                way,
                state: shares.devices[device],
                seconds,
                estimated_bytes: rows[device].workspace_bytes + bytes + state,
                budget_bytes: rows[device].budget_bytes,
                workspace_bytes: rows[device].workspace_bytes,
            }
        };
        let devices: Vec<DeviceShare> = (0..loads.len()).map(share).collect();
        let layers = devices.iter().map(|device| device.seconds).fold(0.0, f64::max);
        let kept = |share: f64| (share * search.parameters) as u64;
        let on_device = shares.devices.iter().enumerate().map(|(at, share)| costs.update(at, kept(*share)));
        let on_host = shares.hosts.iter().enumerate().map(|(at, share)| costs.host_update(at, kept(*share)));
        let update = on_device.chain(on_host).fold(0.0, f64::max);
        let counted = |seconds: &[f64]| -> f64 {
            search.bytes.groups.iter().zip(seconds).map(|(group, seconds)| group.count as f64 * seconds).sum()
        };
        Decision {
            devices,
            hosts: shares.hosts.clone(),
            seconds: layers + update,
            gather_seconds: counted(&movements.gather),
            reduce_seconds: counted(&movements.reduce),
            update_seconds: update,
        }
    }
}

/// How many of its samples a device may hand on: one, two, four and so on, and all.
fn amounts(all: usize) -> impl Iterator<Item = usize> {
    let amounts = std::iter::successors(Some(1), |amount| Some(2 * amount));
    amounts.take_while(move |amount| *amount < all).chain((all > 0).then_some(all))
}

/// The faster first; of those that are as fast, the one in which fewer devices are the slowest, and so on down.
fn order(one: &Decision, other: &Decision) -> Ordering {
    let descending = |decision: &Decision| {
        let mut seconds: Vec<f64> = decision.devices.iter().map(|device| device.seconds).collect();
        seconds.sort_by(|a, b| b.total_cmp(a));
        seconds
    };
    let (a, b) = (descending(one), descending(other));
    let lower = || a.iter().zip(&b).map(|(a, b)| a.total_cmp(b)).find(|order| order.is_ne());
    one.seconds.total_cmp(&other.seconds).then_with(|| lower().unwrap_or(Ordering::Equal))
}

/// Faster; or as fast, with less on its way to hosts and in fewer pieces.
fn is_better(one: &Decision, other: &Decision) -> bool {
    let fuss = |decision: &Decision| -> (usize, usize) {
        let ways = decision.devices.iter().filter_map(|share| Some((share.samples, share.way?)));
        let pieces = ways.clone().map(|(samples, way)| samples.div_ceil(way.micro_batch)).sum();
        (ways.filter(|(_, way)| way.activations == Activations::Offload).count(), pieces)
    };
    one.seconds < other.seconds || (one.seconds == other.seconds && fuss(one) < fuss(other))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use shoal_fleet::{Costs, Fleet};
    use shoal_model::{Chain, Precision, presets};
    use shoal_plan::StepShape;

    use super::super::balance::tests::excesses;
    use super::super::search::EXHAUSTIVE_MAX;
    use super::*;

    /// Every division of a batch over the first devices, in all ways that fit.
    fn divisions(trial: &Trial, devices: usize, batch: usize) -> Vec<Vec<Load>> {
        if devices == 0 {
            return if batch == 0 { vec![Vec::new()] } else { Vec::new() };
        }
        let (mut all, last) = (Vec::new(), devices - 1);
        for samples in 0..=if trial.kind_of[last].is_some() { batch } else { 0 } {
            let ways = trial.search.ways.iter().filter(|way| way.micro_batch <= samples).copied().map(Some);
            let ways: Vec<Option<Way>> = if samples == 0 { vec![None] } else { ways.collect() };
            for division in divisions(trial, last, batch - samples) {
                all.extend(
                    ways.iter().map(|way| [&division[..], &[trial.load(last, samples, *way)]].concat()),
                );
            }
        }
        all
    }

    /// The least time over all sets of devices, all divisions and all ways.
    fn brute(search: &Search) -> Option<f64> {
        let count = search.request.fleet.devices.len();
        let mut least: Option<f64> = None;
        for (set, spills) in (1..1usize << count).flat_map(|set| [(set, false), (set, true)]) {
            let used: Vec<bool> = (0..count).map(|device| set >> device & 1 == 1).collect();
            let mut trial = Trial::new(search, &used, spills, &vec![0.0; count]);
            for division in divisions(&trial, count, search.request.step.global_batch) {
                trial.consider(&division);
            }
            if let Some((_, best)) = trial.best {
                least = Some(least.map_or(best.seconds, |least| least.min(best.seconds)));
            }
        }
        least
    }

    /// Devices of some kinds, all in one node or each in its own.
    fn fleet(kinds: &[usize], apart: bool, gigabits: usize) -> Fleet {
        let device = |kind: &usize| format!("{{ kind = \"{}\" }}", ["T4", "A100", "L4", "P40"][*kind]);
        let node = |name: usize, devices: &[usize]| {
            let devices: Vec<String> = devices.iter().map(device).collect();
            format!(
                "[[node]]\nname = \"n{name}\"\ndevices = [{}]\nhost_memory = \"1 MiB\"\nnetwork = \"{gigabits} Gbit/s\"\n",
                devices.join(", ")
            )
        };
        let text: String = match apart {
            true => kinds.iter().enumerate().map(|(at, kind)| node(at, &[*kind])).collect(),
            false => node(0, kinds),
        };
        Fleet::parse(&text, "fleet").expect("a sound fleet")
    }

    /// What the search finds and what brute force does, for devices with budgets in shares of the state.
    fn both(
        chain: &Chain,
        step: StepShape,
        fleet: &Fleet,
        budgets: &[f64],
        activations: Option<Activations>,
        exhaustive: usize,
    ) -> (Option<f64>, Option<f64>) {
        let costs = Costs::new(chain, fleet, None, step.precision, step.sequence).expect("known kinds");
        let mut request = Request { activations, ..Request::new(chain, step, fleet, &costs) };
        let state = 16.0 * chain.tensors.iter().map(|tensor| tensor.elements()).sum::<usize>() as f64;
        for (row, share) in request.devices.iter_mut().zip(budgets) {
            (row.budget_bytes, row.workspace_bytes) = ((share * state) as u64, 0);
        }
        let search = Search::new(&request);
        let found = search.best_with(&vec![0.0; fleet.devices.len()], exhaustive);
        (found.ok().map(|found| found.seconds), brute(&search))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn brute_force_is_never_better_on_small_cases(
            (count, batch) in prop_oneof![(Just(2usize), 1usize..9), (Just(3usize), 1usize..9)],
            kinds in proptest::collection::vec(0usize..4, 3),
            budgets in proptest::collection::vec(0.2..2.0f64, 3),
            (apart, gigabits, width) in (any::<bool>(), 1usize..400, 1usize..9),
        ) {
            let chain = Chain::new(&presets::gpt2(512, 64 * width, 3, 4, 64));
            let fleet = fleet(&kinds[..count], apart, gigabits);
            let step = StepShape { global_batch: batch, sequence: 32, ..StepShape::ADAM };
            let (found, least) = both(&chain, step, &fleet, &budgets, None, EXHAUSTIVE_MAX);
            prop_assert_eq!(found, least);
        }
    }

    #[test]
    fn without_trying_all_the_best_is_rarely_missed_and_never_by_much() {
        let devices = prop_oneof![(Just(2usize), 8usize..33), (Just(3usize), 8usize..17)];
        let kinds = proptest::collection::vec(0usize..4, 3);
        let budgets = proptest::collection::vec(0.3..2.0f64, 3);
        let network = (any::<bool>(), 25usize..400, any::<bool>());
        let chain = Chain::new(&presets::gpt2(8192, 1024, 6, 16, 512));
        excesses(2000, (devices, kinds, budgets, network, 0usize..3), |asked| {
            let ((count, batch), kinds, budgets, (apart, gigabits, half), activations) = asked;
            let fleet = fleet(&kinds[..count], apart, gigabits);
            let precision = if half { Precision::Fp16 } else { Precision::Fp32 };
            let step = StepShape { global_batch: batch, sequence: 512, precision, ..StepShape::ADAM };
            // One of them at a time, so that brute force comes to an end.
            let activations = [Activations::Keep, Activations::Recompute, Activations::Offload][activations];
            let (found, least) = both(&chain, step, &fleet, &budgets, Some(activations), 0);
            assert_eq!(found.is_some(), least.is_some());
            Some(found? / least? - 1.0)
        })
        .assert_small();
    }
}
