//! Micro-batches follow each other through the devices. A device's consecutive layers with the same cut are one unit
//! of work a micro-batch; which unit is next is decided by the plan's rule while the step is played through once, by
//! what units and transfers cost. The order of events there is the order of the lists.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use foldhash::{HashMap, HashSet};

use super::{Lists, Moving, Order, Pace, is_remade};
use crate::events::Events;
use crate::layout::{Layout, Share};
use crate::program::{Moved, Op, Pass, Purpose};
use crate::table::Samples;

/// Sends that a device may have under way; past it the next waits for the first.
const SENDS: usize = 4;

/// Units before its own in which something may already be received.
const UNITS_AHEAD: usize = 2;

/// How many times deeper than the devices behind it a device stashes under Varuna's rule.
const VARUNA_DEPTH: usize = 3;

impl Order {
    /// The most micro-batches that a device has between forward and backward where so many devices lie from it to the
    /// loss, itself among them.
    pub fn stash(self, depth: usize) -> usize {
        match self {
            Order::MicroBatchFirst => 1,
            Order::OneForwardOneBackward => depth,
            Order::Varuna => (VARUNA_DEPTH * (depth - 1)).max(1),
            Order::Gpipe | Order::LayerFirst => usize::MAX,
        }
    }
}

/// Returns when the last unit is done by the pace; what comes after the last backward is not in it.
pub(super) fn order(lists: &mut Lists, pace: &dyn Pace) -> f64 {
    if lists.purpose != Purpose::Predict {
        lists.load();
    }
    let layers = lists.layers();
    for layer in 0..layers {
        lists.gather(layer, Pass::Step);
    }
    let mut pipeline = Pipeline::new(lists, pace);
    pipeline.run();
    let foreseen = pipeline.now;
    lists.end();
    foreseen
}

/// Consecutive layers of one micro-batch on one device.
struct Unit {
    device: usize,
    layers: Range<usize>,
    share: Share,
    forward: f64,
    remake: f64,
    /// Without what is put off of it.
    backward: f64,
    put_off: f64,
    /// Devices from here to the loss.
    depth: usize,
    /// Pieces that its forward and its backward still wait for.
    awaits: [usize; 2],
    /// Made again ahead of its gradient.
    is_remade: bool,
    /// When its gradient is expected.
    gradient_at: f64,
}

/// A piece that passes from one unit to another.
#[derive(Clone, Copy)]
struct Edge {
    from: usize,
    to: usize,
    piece: Moving,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Forward,
    Remake,
    Backward,
    /// What its backward put off.
    WeightGradients,
}

#[derive(Clone, Copy, PartialEq)]
enum Event {
    Done { unit: usize, work: Work },
    Arrived { edge: usize, moved: Moved, sent: Option<usize> },
}

#[derive(Default)]
struct Worker {
    is_busy: bool,
    /// By first sample and layer.
    forwards: BTreeSet<(usize, usize, usize)>,
    backwards: BTreeSet<(usize, usize, usize)>,
    /// Units whose gradient is being made by those behind them.
    expected: BTreeSet<(usize, usize, usize)>,
    /// Units whose backward put something off, the first to do so first, and from which place on that may be done.
    put_off: VecDeque<(usize, usize)>,
    /// How many of them there may be.
    most_put_off: usize,
    forwards_left: usize,
    stashed: usize,
    most_stashed: usize,
    /// A unit that was made again and waits for its gradient.
    remade: Option<usize>,
    /// Places of sends, in order, and how many of them are over and awaited.
    sends: Vec<(usize, bool)>,
    awaited: usize,
    under_way: usize,
    /// Where its units start; of those the forwards, and the backwards with what is made again for them.
    unit_starts: Vec<usize>,
    forward_starts: Vec<usize>,
    backward_starts: Vec<usize>,
    /// How many of the other kind a forward or a backward may go before, where they wait.
    leeway: usize,
}

impl Worker {
    /// The place from which on a unit that is listed at a place may be computed: before those of the other kind that it may go
    /// before.
    fn earliest(&self, work: Work, place: usize) -> usize {
        let others = match work {
            Work::Forward => &self.backward_starts,
            Work::Backward => &self.forward_starts,
            // It would hold the largest memory for longer.
            Work::Remake | Work::WeightGradients => return place,
        };
        let first = others.len().saturating_sub(self.leeway);
        others.get(first).copied().unwrap_or(place)
    }
}

struct Pipeline<'a, 'b> {
    lists: &'a mut Lists<'b>,
    pace: &'a dyn Pace,
    units: Vec<Unit>,
    edges: Vec<Edge>,
    /// Of each unit: edges to those behind it, and from those before it.
    outgoing: Vec<Vec<usize>>,
    incoming: Vec<Vec<usize>>,
    workers: Vec<Worker>,
    events: Events<Event>,
    now: f64,
    /// Backwards that still add to what a layer owns, by device.
    contributions: HashMap<(usize, usize), usize>,
    /// Layers that are reduced, whose holders that compute nothing of them have been told.
    told: Vec<bool>,
    /// Backwards of a layer that still read its gathered parameters, by device.
    readings: HashMap<(usize, usize), usize>,
    /// By layer, those that own what it uses.
    owners: Vec<Vec<usize>>,
    /// What is brought in as it is needed.
    loaded: HashSet<(usize, Samples)>,
}

impl<'a, 'b> Pipeline<'a, 'b> {
    fn new(lists: &'a mut Lists<'b>, pace: &'a dyn Pace) -> Pipeline<'a, 'b> {
        let layout = lists.layout;
        let (units, unit_of) = units(layout, pace);
        let edges = edges(layout, &units, &unit_of);
        let (mut outgoing, mut incoming) = (vec![Vec::new(); units.len()], vec![Vec::new(); units.len()]);
        for (number, edge) in edges.iter().enumerate() {
            outgoing[edge.from].push(number);
            incoming[edge.to].push(number);
        }
        let owners = (0..layout.chain.layers.len()).map(|layer| owners(layout, layer)).collect();
        let mut pipeline = Pipeline {
            workers: (0..layout.plan.devices.len()).map(|_| Worker::default()).collect(),
            events: Events::default(),
            now: 0.0,
            contributions: HashMap::default(),
            told: vec![false; layout.chain.layers.len()],
            readings: HashMap::default(),
            loaded: HashSet::default(),
            lists,
            pace,
            units,
            edges,
            outgoing,
            incoming,
            owners,
        };
        pipeline.prepare();
        pipeline
    }

    fn prepare(&mut self) {
        // Units are in chain order, so those behind are deep before those before them.
        for unit in (0..self.units.len()).rev() {
            let behind = self.outgoing[unit].iter().map(|edge| {
                let to = &self.units[self.edges[*edge].to];
                to.depth + usize::from(to.device != self.units[unit].device)
            });
            self.units[unit].depth = behind.max().unwrap_or(1);
        }
        let mut per_batch: HashMap<(usize, usize), usize> = HashMap::default();
        for number in 0..self.units.len() {
            self.units[number].awaits = [self.incoming[number].len(), self.outgoing[number].len()];
            let Unit { device, ref layers, share, depth, .. } = self.units[number];
            let (layers, worker) = (layers.clone(), &mut self.workers[device]);
            worker.forwards_left += 1;
            if self.incoming[number].is_empty() {
                worker.forwards.insert((share.samples.start, layers.start, number));
            }
            let count = per_batch.entry((device, share.samples.start)).or_default();
            *count += 1;
            let most = self.lists.layout.plan.order.stash(depth).saturating_mul(*count);
            worker.most_stashed = worker.most_stashed.max(most);
            for layer in layers {
                *self.readings.entry((device, layer)).or_default() += 1;
                for owner in &self.owners[layer] {
                    *self.contributions.entry((device, *owner)).or_default() += 1;
                }
            }
        }
        let layout = self.lists.layout;
        for (worker, row) in self.workers.iter_mut().zip(&layout.plan.devices) {
            worker.most_stashed = row.stash.unwrap_or(worker.most_stashed);
            worker.most_put_off = row.puts_off;
        }
        if self.lists.trains() && !layout.has_branches() {
            self.give_leeway();
        }
    }

    /// Only what comes from another device is late: activations to one end of an edge, gradients to the other.
    fn give_leeway(&mut self) {
        let rows = &self.lists.layout.plan.devices;
        for edge in &self.edges {
            let ends = [edge.from, edge.to].map(|unit| self.units[unit].device);
            if ends[0] != ends[1] {
                ends.iter().for_each(|device| self.workers[*device].leeway = rows[*device].leeway);
            }
        }
    }

    fn run(&mut self) {
        for device in 0..self.workers.len() {
            self.start(device);
        }
        loop {
            let Some((at, event)) = self.events.pop() else {
                match self.blocked() {
                    // A cap on what is stashed must not stop the step: tables may be cut so that it would.
                    Some(unit) => self.begin(unit, Work::Forward),
                    None => return,
                }
                continue;
            };
            self.now = at;
            match event {
                Event::Done { unit, work } => self.done(unit, work),
                Event::Arrived { edge, moved, sent } => self.arrived(edge, moved, sent),
            }
        }
    }

    /// A forward that could begin but for a cap, when nothing else goes on.
    fn blocked(&self) -> Option<usize> {
        let ready = self.workers.iter().filter(|worker| !worker.is_busy);
        ready.filter_map(|worker| worker.forwards.first()).min().map(|(_, _, unit)| *unit)
    }

    /// The next unit of a device that has nothing to do.
    fn start(&mut self, device: usize) {
        if !self.workers[device].is_busy
            && self.workers[device].under_way < SENDS
            && let Some((unit, work)) = self.choose(device)
        {
            self.begin(unit, work);
        }
    }

    fn choose(&self, device: usize) -> Option<(usize, Work)> {
        let worker = &self.workers[device];
        let order = self.lists.layout.plan.order;
        let may_stash = !self.lists.trains() || worker.stashed < worker.most_stashed;
        let forward = worker.forwards.first().filter(|_| may_stash).map(|(_, _, unit)| *unit);
        let backward = worker.backwards.first().map(|(_, _, unit)| *unit);
        if order == Order::Gpipe && worker.forwards_left > 0 {
            return forward.map(|unit| (unit, Work::Forward));
        }
        let put_off = worker.put_off.front().map(|(unit, _)| (*unit, Work::WeightGradients));
        // What was made again goes first: its memory is the largest.
        if let Some(unit) = worker.remade.filter(|unit| self.units[*unit].awaits[1] == 0).or(backward) {
            let is_full = self.units[unit].put_off > 0.0 && worker.put_off.len() >= worker.most_put_off;
            return put_off.filter(|_| is_full).or(Some((unit, Work::Backward)));
        }
        let other = match order {
            Order::Varuna => self.choose_with_recomputation(worker, forward),
            _ => forward.map(|unit| (unit, Work::Forward)),
        };
        // Nobody waits for what was put off.
        other.or(put_off)
    }

    /// A forward if it ends before the next gradient comes, or before work for it must begin; else that work.
    fn choose_with_recomputation(&self, worker: &Worker, forward: Option<usize>) -> Option<(usize, Work)> {
        let ends = |unit: usize| self.now + self.units[unit].forward;
        if let Some(remade) = worker.remade {
            let in_time = |unit: &usize| ends(*unit) <= self.units[remade].gradient_at;
            return forward.filter(in_time).map(|unit| (unit, Work::Forward));
        }
        let next = worker.expected.first().map(|(_, _, unit)| *unit);
        match (forward, next) {
            (Some(forward), Some(next)) => {
                let Unit { gradient_at, remake, .. } = self.units[next];
                match ends(forward) <= gradient_at - remake {
                    true => Some((forward, Work::Forward)),
                    false => Some((next, Work::Remake)),
                }
            }
            (Some(forward), None) => Some((forward, Work::Forward)),
            (None, Some(next)) => Some((next, Work::Remake)),
            (None, None) => None,
        }
    }

    /// Lists a unit's instructions and foresees its end.
    fn begin(&mut self, number: usize, work: Work) {
        let Unit { device, ref layers, share, forward, remake, backward, put_off, is_remade, .. } =
            self.units[number];
        let (layers, key) = (layers.clone(), (share.samples.start, layers.start, number));
        let place = self.lists.lists[device].len();
        self.workers[device].unit_starts.push(place);
        self.workers[device].is_busy = true;
        let takes = match work {
            Work::Forward => {
                self.workers[device].forwards.remove(&key);
                self.workers[device].forwards_left -= 1;
                self.workers[device].stashed += 1;
                self.list_forward(number, layers);
                forward
            }
            Work::Remake => {
                self.workers[device].expected.remove(&key);
                self.workers[device].remade = Some(number);
                self.units[number].is_remade = true;
                layers.for_each(|layer| self.lists.remake(layer, self.share(number, layer)));
                remake
            }
            Work::Backward => {
                let worker = &mut self.workers[device];
                worker.backwards.remove(&key);
                worker.expected.remove(&key);
                worker.remade = worker.remade.filter(|remade| *remade != number);
                self.list_backward(number, layers, is_remade);
                if put_off > 0.0 {
                    let after = self.lists.lists[device].len();
                    self.workers[device].put_off.push_back((number, after));
                }
                let takes = if is_remade { backward } else { remake + backward };
                self.expect(number, takes);
                takes
            }
            Work::WeightGradients => {
                let (_, after) = self.workers[device].put_off.pop_front().expect("it was chosen from there");
                self.list_weight_gradients(number, layers, after);
                put_off
            }
        };
        self.may_begin_early(device, place, work, is_remade);
        self.wait_for_sends(device, place);
        self.events.push(self.now + takes, Event::Done { unit: number, work });
    }

    /// Lets what a unit computes, with what goes out of it, start ahead of units that wait. What is added up over the network
    /// keeps its place.
    fn may_begin_early(&mut self, device: usize, place: usize, work: Work, is_remade: bool) {
        let worker = &mut self.workers[device];
        let from = worker.earliest(work, place);
        match work {
            Work::Forward => worker.forward_starts.push(place),
            Work::Backward if is_remade => {}
            Work::Remake | Work::Backward => worker.backward_starts.push(place),
            Work::WeightGradients => {}
        }
        if from == place {
            return;
        }
        for listed in &mut self.lists.lists[device][place..] {
            let is_its_own = listed.op.computes_layer()
                || matches!(listed.op, Op::Send { .. } | Op::Offload { .. } | Op::Restore { .. });
            if is_its_own {
                listed.from = from;
            }
        }
    }

    /// The unit's share of one of its layers: the activations' fate may differ from layer to layer.
    fn share(&self, unit: usize, layer: usize) -> Share {
        let Unit { device, share, .. } = self.units[unit];
        self.lists.layout.share(device, layer, share.samples).expect("the unit has it")
    }

    fn list_forward(&mut self, unit: usize, layers: Range<usize>) {
        let device = self.units[unit].device;
        let samples = self.units[unit].share.samples;
        if self.lists.purpose == Purpose::Predict
            && self.lists.layout.loads(device, samples)
            && self.loaded.insert((device, samples))
        {
            self.lists.push(device, Op::Load { samples });
        }
        for layer in layers {
            let share = self.share(unit, layer);
            self.lists.begin(layer, share);
            let sends = self.lists.forward(layer, share);
            self.workers[device].sends.extend(sends.into_iter().map(|(place, _)| (place, false)));
        }
    }

    fn list_backward(&mut self, unit: usize, layers: Range<usize>, is_remade: bool) {
        let device = self.units[unit].device;
        for layer in layers.rev() {
            let share = self.share(unit, layer);
            if !is_remade {
                self.lists.remake(layer, share);
            }
            self.lists.begin_backward(layer, share);
            let sends = self.lists.backward(layer, share);
            self.workers[device].sends.extend(sends.into_iter().map(|(place, _)| (place, false)));
            if !self.lists.layout.puts_off(device, layer) {
                self.contribute(device, layer);
            }
            self.release(device, layer);
        }
    }

    /// What the backward of a unit put off. Where the device waits meanwhile, it may be done from a place on.
    fn list_weight_gradients(&mut self, unit: usize, layers: Range<usize>, from: usize) {
        let device = self.units[unit].device;
        let samples = self.units[unit].share.samples;
        for layer in layers.rev() {
            if self.lists.layout.puts_off(device, layer) {
                let place = self.lists.push(device, Op::WeightGradients { layer, samples });
                self.lists.lists[device][place].from = from;
                self.contribute(device, layer);
            }
        }
    }

    /// After one of a device's backwards of a layer has added all that it adds to sums. Those that are complete are added up at
    /// once: over the network that needs nothing of the layers before.
    fn contribute(&mut self, device: usize, layer: usize) {
        let layout = self.lists.layout;
        for owner in self.owners[layer].iter().copied() {
            let left = self.contributions.get_mut(&(device, owner)).expect("every use was counted");
            *left -= 1;
            if *left == 0
                && let Some(group) = layout.reduce(owner)
            {
                self.lists.push(device, Op::Reduce { layer: owner });
                if !std::mem::replace(&mut self.told[owner], true) {
                    for holder in &group.devices {
                        if !self.contributions.contains_key(&(*holder, owner)) {
                            self.lists.push(*holder, Op::Reduce { layer: owner });
                        }
                    }
                }
            }
        }
    }

    /// After one of a device's backwards of a layer: nothing reads its gathered parameters any more after the last.
    fn release(&mut self, device: usize, layer: usize) {
        let layout = self.lists.layout;
        let left = self.readings.get_mut(&(device, layer)).expect("every unit was counted");
        *left -= 1;
        if *left == 0 && layout.gather(layer, Pass::Step).is_some_and(|group| group.receives(device)) {
            self.lists.push(device, Op::Release { layer, pass: Pass::Step });
        }
    }

    /// Units before this one learn when their gradients will come.
    fn expect(&mut self, unit: usize, takes: f64) {
        for place in 0..self.incoming[unit].len() {
            let edge = self.incoming[unit][place];
            let Edge { from, piece, .. } = self.edges[edge];
            let way = self.way(unit, from, piece);
            let at = self.now + takes + way;
            let before = &mut self.units[from];
            before.gradient_at = before.gradient_at.max(at);
            if before.remake > 0.0 && !before.is_remade {
                let key = (before.share.samples.start, before.layers.start, from);
                self.workers[before.device].expected.insert(key);
            }
            self.start(self.units[from].device);
        }
    }

    fn way(&self, from: usize, to: usize, piece: Moving) -> f64 {
        let (from, to) = (self.units[from].device, self.units[to].device);
        if from == to { 0.0 } else { self.pace.transfer(piece.layer, from, to, piece.samples.count()) }
    }

    /// The unit at this place waits for sends that are over in this order, but for the last few.
    fn wait_for_sends(&mut self, device: usize, place: usize) {
        let worker = &mut self.workers[device];
        while worker.awaited + SENDS < worker.sends.len() && worker.sends[worker.awaited].1 {
            let sent = worker.sends[worker.awaited].0;
            self.lists.lists[device][place].after.push(sent);
            worker.awaited += 1;
        }
    }

    fn done(&mut self, number: usize, work: Work) {
        let device = self.units[number].device;
        self.workers[device].is_busy = false;
        match work {
            Work::Forward => {
                for place in 0..self.outgoing[number].len() {
                    self.hand_over(self.outgoing[number][place], Moved::Activation);
                }
                if self.lists.trains() {
                    if self.outgoing[number].is_empty() {
                        self.ready_backward(number);
                    }
                } else {
                    self.workers[device].stashed -= 1;
                }
            }
            Work::Remake | Work::WeightGradients => {}
            Work::Backward => {
                self.workers[device].stashed -= 1;
                for place in 0..self.incoming[number].len() {
                    self.hand_over(self.incoming[number][place], Moved::Gradient);
                }
            }
        }
        self.start(device);
    }

    /// A piece goes to the other end of its edge.
    fn hand_over(&mut self, edge: usize, moved: Moved) {
        let Edge { from, to, piece } = self.edges[edge];
        let (giver, taker) = match moved {
            Moved::Activation => (from, to),
            Moved::Gradient => (to, from),
        };
        let (source, target) = (self.units[giver].device, self.units[taker].device);
        let mut sent = None;
        if source != target {
            let Moving { layer, reader, samples, .. } = piece;
            let place = self.lists.push(target, Op::Receive { moved, layer, reader, samples, from: source });
            let worker = &self.workers[target];
            let starts = &worker.unit_starts;
            let early = starts.len().checked_sub(UNITS_AHEAD).map_or(0, |unit| starts[unit]);
            let work = if moved == Moved::Activation { Work::Forward } else { Work::Backward };
            self.lists.lists[target][place].from = early.min(worker.earliest(work, place));
            sent = self.sent_place(source, moved, piece, target);
            self.workers[source].under_way += 1;
        }
        let way = self.way(giver, taker, piece);
        self.events.push(self.now + way, Event::Arrived { edge, moved, sent });
    }

    /// Which of a device's sends a piece is.
    fn sent_place(&self, source: usize, moved: Moved, piece: Moving, to: usize) -> Option<usize> {
        let Moving { layer, reader, samples, .. } = piece;
        let op = Op::Send { moved, layer, reader, samples, to };
        let worker = &self.workers[source];
        worker.sends.iter().rposition(|(place, _)| self.lists.lists[source][*place].op == op)
    }

    fn arrived(&mut self, edge: usize, moved: Moved, sent: Option<usize>) {
        let Edge { from, to, .. } = self.edges[edge];
        let (giver, taker, which) = match moved {
            Moved::Activation => (from, to, 0),
            Moved::Gradient => (to, from, 1),
        };
        if let Some(sent) = sent {
            let source = self.units[giver].device;
            self.workers[source].sends[sent].1 = true;
            self.workers[source].under_way -= 1;
            self.start(source);
        }
        let unit = &mut self.units[taker];
        unit.awaits[which] -= 1;
        if unit.awaits[which] == 0 {
            let device = unit.device;
            match moved {
                Moved::Activation => {
                    let key = (unit.share.samples.start, unit.layers.start, taker);
                    self.workers[device].forwards.insert(key);
                }
                Moved::Gradient => self.ready_backward(taker),
            }
            self.start(device);
        }
    }

    fn ready_backward(&mut self, number: usize) {
        let Unit { device, ref layers, share, is_remade, .. } = self.units[number];
        let key = (share.samples.start, layers.start, number);
        self.workers[device].expected.remove(&key);
        if !is_remade {
            self.workers[device].backwards.insert(key);
        }
    }
}

/// Layers that own what a layer uses: the first users of its tensors.
fn owners(layout: &Layout, layer: usize) -> Vec<usize> {
    let mut owners: Vec<usize> =
        layout.tensors(layer).iter().map(|tensor| layout.users(*tensor)[0]).collect();
    owners.sort_unstable();
    owners.dedup();
    owners
}

/// The units in chain order, and which of them each share of each layer belongs to.
fn units(layout: &Layout, pace: &dyn Pace) -> (Vec<Unit>, Vec<Vec<usize>>) {
    let mut units: Vec<Unit> = Vec::new();
    let mut unit_of: Vec<Vec<usize>> = Vec::new();
    for layer in 0..layout.chain.layers.len() {
        let mut here = Vec::new();
        for share in layout.shares(layer) {
            let before = layer.checked_sub(1).and_then(|before| {
                let place = layout.shares(before).partition_point(|other| other.samples < share.samples);
                let other = layout.shares(before).get(place)?;
                let same = other.samples == share.samples && other.device == share.device;
                same.then(|| unit_of[before][place])
            });
            let number = before.unwrap_or_else(|| {
                units.push(Unit::new(layer, *share));
                units.len() - 1
            });
            units[number].add(layout, layer, *share, pace);
            here.push(number);
        }
        unit_of.push(here);
    }
    (units, unit_of)
}

impl Unit {
    fn new(layer: usize, share: Share) -> Unit {
        Unit {
            device: share.device,
            layers: layer..layer,
            share,
            forward: 0.0,
            remake: 0.0,
            backward: 0.0,
            put_off: 0.0,
            depth: 1,
            awaits: [0, 0],
            is_remade: false,
            gradient_at: 0.0,
        }
    }

    fn add(&mut self, layout: &Layout, layer: usize, share: Share, pace: &dyn Pace) {
        let samples = share.samples.count();
        let forward = pace.forward(layer, share.device, samples);
        self.layers.end = layer + 1;
        self.forward += forward;
        let backward = pace.backward(layer, share.device, samples);
        let put_off = backward * layout.put_off_share(share.device, layer);
        self.backward += backward - put_off;
        self.put_off += put_off;
        if is_remade(layout.chain, layer, share.activations) {
            self.remake += forward;
        }
    }
}

fn edges(layout: &Layout, units: &[Unit], unit_of: &[Vec<usize>]) -> Vec<Edge> {
    let mut edges = Vec::new();
    for (from, unit) in units.iter().enumerate() {
        for layer in unit.layers.clone() {
            for reader in layout.readers(layer) {
                let samples = unit.share.samples;
                let first =
                    layout.shares(*reader).partition_point(|share| share.samples.end <= samples.start);
                for (offset, (samples, device)) in layout.pieces(*reader, samples).enumerate() {
                    let to = unit_of[*reader][first + offset];
                    if to != from {
                        let piece = Moving { layer, reader: *reader, samples, to: device };
                        edges.push(Edge { from, to, piece });
                    }
                }
            }
        }
    }
    edges
}
