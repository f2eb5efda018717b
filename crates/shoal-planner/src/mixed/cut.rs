//! What a pipeline of groups takes by the model, and the cut of the chain for which that is least.
//!
//! A group is busy with its share of all samples; it starts when the first piece has come through the groups before it,
//! and after its last piece those have their backwards left. So a step takes the most, over all groups, of what the
//! group is busy and what one piece takes in those before it. What members add up and send each other comes on top, as
//! far as the last backward does not hide it.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use shoal_fleet::{Costs, Fleet, Link};
use shoal_model::Chain;
use shoal_plan::one_device::StepShape;
use shoal_plan::{Activations, DeviceRow, is_remade};

use super::deal;
use super::lineup::Lineup;
use super::table::kept;

/// Bytes of a gradient sum's element, and of each of the optimizer's.
const ELEMENT_BYTES: u64 = 4;

/// Layers' seconds, summed up from the first on.
struct Sums {
    forward: Vec<f64>,
    backward: Vec<f64>,
    /// What is made again where little is kept.
    remade: Vec<f64>,
}

impl Sums {
    fn of(sum: &[f64], layers: &Range<usize>) -> f64 {
        sum[layers.end] - sum[layers.start]
    }

    fn forward(&self, layers: &Range<usize>) -> f64 {
        Sums::of(&self.forward, layers)
    }

    /// With what is made again before it.
    fn backward(&self, layers: &Range<usize>, activations: Activations) -> f64 {
        let remade = if activations == Activations::Keep { 0.0 } else { Sums::of(&self.remade, layers) };
        Sums::of(&self.backward, layers) + remade
    }

    fn both(&self, layers: &Range<usize>, activations: Activations) -> f64 {
        self.forward(layers) + self.backward(layers, activations)
    }
}

/// A group at one size of pieces.
struct Group {
    /// Kinds of its members, with the most pieces that one of the kind takes.
    pieces: Vec<(usize, usize)>,
    /// The most of those.
    rounds: usize,
    members: usize,
    /// One of them.
    first: usize,
    /// Between two of them, if there are two.
    link: Option<Link>,
    /// Of each, without what it takes for itself.
    budgets: Vec<u64>,
}

/// Which layers are whose.
#[derive(Clone, Debug)]
pub(super) struct Cut {
    pub layers: Vec<Range<usize>>,
    /// Of the step.
    pub seconds: f64,
}

/// How a lineup is to be cut.
pub(super) struct Wanted<'a> {
    pub lineup: &'a Lineup,
    /// Whether the last layer is the first group's again.
    pub returns: bool,
    pub piece: usize,
    /// By group.
    pub activations: &'a [Activations],
    /// By group, bytes that every member keeps free for what it computes.
    pub reserves: &'a [u64],
}

pub(super) struct Model<'a> {
    pub chain: &'a Chain,
    pub step: StepShape,
    pub fleet: &'a Fleet,
    pub costs: &'a Costs,
    pub devices: &'a [DeviceRow],
    /// By device.
    kinds: Vec<usize>,
    /// By size of a piece, then kind.
    sums: BTreeMap<usize, Vec<Sums>>,
    /// Trained numbers of the layers up to each, tied ones with the first that uses them.
    parameters: Vec<u64>,
    /// Of the last layer, those that an earlier one uses.
    tied: u64,
    /// What one sample leaves between forward and backward in the layers up to each: all of it, or what it is made again
    /// from.
    saved: Vec<u64>,
    inputs: Vec<u64>,
}

impl<'a> Model<'a> {
    pub fn new(
        chain: &'a Chain,
        step: StepShape,
        fleet: &'a Fleet,
        costs: &'a Costs,
        devices: &'a [DeviceRow],
        pieces: &[usize],
    ) -> Model<'a> {
        let mut place: HashMap<&str, usize> = HashMap::new();
        let mut examples = Vec::new();
        let mut kinds = Vec::new();
        for (number, device) in fleet.devices.iter().enumerate() {
            kinds.push(*place.entry(&device.kind).or_insert_with(|| {
                examples.push(number);
                examples.len() - 1
            }));
        }
        let layers = chain.layers.len();
        let mut parameters = vec![0; layers + 1];
        let mut tied = 0;
        for tensor in 0..chain.tensors.len() {
            let elements = chain.tensors[tensor].elements() as u64;
            if let Some(first) = chain.users(tensor).next() {
                parameters[first + 1] += elements;
                let last = chain.users(tensor).last();
                tied += if first + 1 < layers && last == Some(layers - 1) { elements } else { 0 };
            }
        }
        (0..layers).for_each(|layer| parameters[layer + 1] += parameters[layer]);
        let of_size = |piece: &usize| {
            (*piece, examples.iter().map(|device| sums(chain, costs, *device, *piece)).collect())
        };
        Model {
            chain,
            step,
            fleet,
            costs,
            devices,
            kinds,
            sums: pieces.iter().map(of_size).collect(),
            parameters,
            tied,
            saved: kept_bytes(chain, step, Activations::Keep),
            inputs: kept_bytes(chain, step, Activations::Recompute),
        }
    }

    pub fn is_tied(&self) -> bool {
        self.tied > 0
    }

    /// Samples a second through the whole chain, by device.
    pub fn speeds(&self) -> Vec<f64> {
        let Some((piece, sums)) = self.sums.first_key_value() else { return vec![1.0; self.kinds.len()] };
        let all = 0..self.chain.layers.len();
        let speed = |kind: &usize| *piece as f64 / sums[*kind].both(&all, Activations::Keep).max(1e-12);
        self.kinds.iter().map(speed).collect()
    }

    /// The best cut, if there is one whose state fits.
    pub fn cut(&self, wanted: &Wanted) -> Option<Cut> {
        let Wanted { lineup, returns, piece, activations, .. } = *wanted;
        let sums = self.sums.get(&piece)?;
        let all = self.chain.layers.len();
        let layers = if returns { all - 1 } else { all };
        let stages = lineup.len();
        if stages > layers || returns && (stages < 2 || !self.is_tied()) {
            return None;
        }
        let groups: Vec<Group> = lineup.iter().map(|devices| self.group(devices, piece, sums)).collect();
        let head = layers..all;
        let samples = self.step.global_batch;
        // The least a step takes from each group and layer on, and where that group's layers end.
        let mut behind = vec![f64::INFINITY; layers + 1];
        behind[layers] =
            if returns { self.one_piece(&groups[0], sums, &head, Activations::Keep) } else { 0.0 };
        // What one piece takes from there on and back.
        let mut way = vec![0.0; layers + 1];
        way[layers] = behind[layers];
        let mut ends = vec![vec![0; layers + 1]; stages];
        for (stage, group) in groups.iter().enumerate().rev() {
            let mut here = vec![f64::INFINITY; layers + 1];
            let mut way_here = vec![0.0; layers + 1];
            let starts = if stage == 0 { 0..1 } else { stage..layers };
            let next = match stage + 1 < stages {
                true => Some(lineup[stage + 1][0]),
                false => returns.then(|| lineup[0][0]),
            };
            let link = next.map(|next| self.fleet.link(group.first, next));
            for start in starts {
                for end in start + 1..=layers - (stages - 1 - stage) {
                    if behind[end] == f64::INFINITY {
                        continue;
                    }
                    let run = start..end;
                    let Some((parameters, under_way)) = self.fitting(wanted, stage, group, &run) else {
                        break;
                    };
                    let backward = self.slowest(group, sums, |sums| sums.backward(&run, activations[stage]));
                    let reduced = (self.reduction(group, parameters) - backward).max(0.0);
                    let mut busy = self.busy(group, sums, &run, activations[stage]);
                    let mut one = self.one_piece(group, sums, &run, activations[stage]);
                    if stage == 0 && returns {
                        busy += self.busy(group, sums, &head, Activations::Keep);
                    }
                    let mut network = 0.0;
                    if let Some(link) = &link {
                        let bytes = self.costs.output_bytes(end - 1);
                        network = link.seconds(bytes * samples as u64);
                        one += 2.0 * link.seconds(bytes * piece as u64);
                    }
                    // With few on the way at a time, a group waits for them to come back.
                    let turns = group.rounds as f64 / under_way.min(group.rounds).max(1) as f64;
                    busy = busy.max(turns * (one + way[end]));
                    let mut seconds = (busy + reduced).max(one + behind[end]).max(one + network);
                    if stage == 0 {
                        seconds = seconds.max(one + behind[end] + reduced);
                    }
                    if seconds < here[start] {
                        (here[start], ends[stage][start]) = (seconds, end);
                        way_here[start] = one + way[end];
                    }
                }
            }
            (behind, way) = (here, way_here);
        }
        if behind[0] == f64::INFINITY {
            return None;
        }
        let mut cut = Cut { layers: Vec::new(), seconds: behind[0] };
        let mut start = 0;
        for ends in &ends {
            cut.layers.push(start..ends[start]);
            start = ends[start];
        }
        // Updates wait for the norm of all gradients.
        let ending = |(group, layers): (&Group, &Range<usize>)| {
            let parameters = self.parameters[layers.end] - self.parameters[layers.start];
            let own = parameters / group.members as u64;
            self.costs.update(group.first, own) + self.renewal(group, parameters)
        };
        cut.seconds += groups.iter().zip(&cut.layers).map(ending).fold(0.0, f64::max);
        if returns {
            cut.layers.push(head);
        }
        Some(cut)
    }

    fn group(&self, devices: &[usize], piece: usize, sums: &[Sums]) -> Group {
        let all = 0..self.chain.layers.len();
        let seconds: Vec<f64> =
            devices.iter().map(|device| sums[self.kinds[*device]].both(&all, Activations::Keep)).collect();
        let mut busy = vec![0.0; devices.len()];
        let mut counts = vec![0; devices.len()];
        for _ in 0..self.step.global_batch.div_ceil(piece) {
            let member = deal::next(&busy, |member| seconds[member]);
            busy[member] += seconds[member];
            counts[member] += 1;
        }
        let mut pieces: BTreeMap<usize, usize> = BTreeMap::new();
        for (device, count) in devices.iter().zip(counts) {
            let most = pieces.entry(self.kinds[*device]).or_default();
            *most = count.max(*most);
        }
        let budget = |device: &usize| {
            let DeviceRow { budget_bytes, workspace_bytes, .. } = self.devices[*device];
            budget_bytes.saturating_sub(workspace_bytes)
        };
        Group {
            rounds: pieces.values().copied().max().unwrap_or(0),
            pieces: pieces.into_iter().filter(|(_, count)| *count > 0).collect(),
            members: devices.len(),
            first: devices[0],
            link: devices.get(1).map(|second| self.fleet.link(devices[0], *second)),
            budgets: devices.iter().map(budget).collect(),
        }
    }

    fn slowest(&self, group: &Group, sums: &[Sums], seconds: impl Fn(&Sums) -> f64) -> f64 {
        group.pieces.iter().map(|(kind, _)| seconds(&sums[*kind])).fold(0.0, f64::max)
    }

    /// Seconds that the group is busy with all samples.
    fn busy(&self, group: &Group, sums: &[Sums], run: &Range<usize>, activations: Activations) -> f64 {
        let member = |(kind, count): &(usize, usize)| *count as f64 * sums[*kind].both(run, activations);
        group.pieces.iter().map(member).fold(0.0, f64::max)
    }

    fn one_piece(&self, group: &Group, sums: &[Sums], run: &Range<usize>, activations: Activations) -> f64 {
        self.slowest(group, sums, |sums| sums.both(run, activations))
    }

    /// Trained numbers of a group's layers, if their state fits, and the pieces that a member has room for beside it.
    fn fitting(
        &self,
        wanted: &Wanted,
        stage: usize,
        group: &Group,
        run: &Range<usize>,
    ) -> Option<(u64, usize)> {
        let mut parameters = self.parameters[run.end] - self.parameters[run.start];
        if run.end == self.chain.layers.len() && run.start > 0 {
            parameters += self.tied;
        }
        let states = ELEMENT_BYTES * (2 + self.step.optimizer_states as u64) * parameters;
        let copy = self.step.precision.bytes() as u64 * parameters;
        // Who has not all of the state adds up gradients that others hold.
        let own = if group.members > 1 { copy + ELEMENT_BYTES * parameters } else { 0 };
        let own = own + wanted.reserves[stage];
        let rooms = group.budgets.iter().map(|budget| budget.checked_sub(own));
        let room: u64 = rooms.sum::<Option<u64>>()?;
        let kept = if wanted.activations[stage] == Activations::Keep { &self.saved } else { &self.inputs };
        let piece = (kept[run.end] - kept[run.start]) * wanted.piece as u64;
        let left = room.checked_sub(states)? / group.members as u64;
        Some((parameters, (left / piece.max(1)) as usize)).filter(|(_, pieces)| *pieces > 0)
    }

    /// Seconds in which bytes of all of a group's parameters pass around it.
    fn around(&self, group: &Group, bytes: u64) -> f64 {
        let passed = bytes * (group.members as u64 - 1) / group.members as u64;
        group.link.as_ref().map_or(0.0, |link| link.seconds(passed))
    }

    fn reduction(&self, group: &Group, parameters: u64) -> f64 {
        self.around(group, ELEMENT_BYTES * parameters)
    }

    fn renewal(&self, group: &Group, parameters: u64) -> f64 {
        self.around(group, self.step.precision.bytes() as u64 * parameters)
    }
}

/// Bytes that one sample leaves in the layers up to each.
fn kept_bytes(chain: &Chain, step: StepShape, activations: Activations) -> Vec<u64> {
    let mut sum = vec![0];
    for (number, layer) in chain.layers.iter().enumerate() {
        let remade = is_remade(chain, number, kept(&layer.kind, activations));
        let bytes = match layer.kind.phases(1, step.precision) {
            Some(_) => layer.kind.output_bytes(1, step.sequence, step.precision),
            None => {
                let footprint = layer.kind.footprint(1, step.sequence, step.precision);
                if remade { footprint.input } else { footprint.saved }
            }
        };
        sum.push(sum[number] + bytes);
    }
    sum
}

fn sums(chain: &Chain, costs: &Costs, device: usize, piece: usize) -> Sums {
    let sum = |of: &dyn Fn(usize) -> f64| {
        let mut sum = vec![0.0];
        (0..chain.layers.len()).for_each(|layer| sum.push(sum[layer] + of(layer)));
        sum
    };
    let remade = |layer: usize| {
        let activations = kept(&chain.layers[layer].kind, Activations::Recompute);
        if is_remade(chain, layer, activations) { costs.forward(layer, device, piece) } else { 0.0 }
    };
    Sums {
        forward: sum(&|layer| costs.forward(layer, device, piece)),
        backward: sum(&|layer| costs.backward(layer, device, piece)),
        remade: sum(&remade),
    }
}
