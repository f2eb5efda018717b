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
use crate::kept;

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
    /// Stages that the lineup gives it.
    stages: usize,
    /// Whether this is not the first of them.
    is_again: bool,
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
    /// Seconds within which a step is of interest.
    pub within: f64,
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

    /// The best cut, if there is one whose state fits and that may be of interest.
    pub fn cut(&self, wanted: &Wanted) -> Option<Cut> {
        let line = self.line(wanted)?;
        let (layers, stages) = (line.layers, line.groups.len());
        // By the layer that a group begins with: what a step takes from there on, and where the group's layers end.
        let mut behind = vec![None; layers + 1];
        behind[layers] = Some(line.last());
        let mut ends = vec![vec![0; layers + 1]; stages];
        for stage in (0..stages).rev() {
            let mut here: Vec<Option<Behind>> = vec![None; layers + 1];
            let starts = if stage == 0 { 0..1 } else { stage..layers };
            for start in starts {
                let ahead = behind.iter().enumerate().skip(start + 1);
                for (end, after) in ahead.filter_map(|(end, after)| Some((end, (*after)?))) {
                    // More layers would not fit either, nor keep the group busy for less.
                    let Some(found) = line.stage(stage, &(start..end), after) else { break };
                    if found.whole() <= wanted.within
                        && here[start].is_none_or(|best| found.whole() < best.whole())
                    {
                        (here[start], ends[stage][start]) = (Some(found), end);
                    }
                }
            }
            behind = here;
        }
        let seconds = behind[0]?.whole();
        let mut cut = Cut { layers: Vec::new(), seconds };
        let mut start = 0;
        for ends in &ends {
            cut.layers.push(start..ends[start]);
            start = ends[start];
        }
        cut.seconds += line.ending(&cut.layers);
        if wanted.returns {
            cut.layers.push(layers..self.chain.layers.len());
        }
        Some(cut)
    }

    /// A lineup, if it can have layers at all.
    fn line<'b>(&'b self, wanted: &'b Wanted<'b>) -> Option<Line<'b>> {
        let Wanted { lineup, returns, piece, .. } = *wanted;
        let sums = self.sums.get(&piece)?;
        let layers = self.chain.layers.len() - usize::from(returns);
        if lineup.len() > layers || returns && (lineup.len() < 2 || !self.is_tied()) {
            return None;
        }
        let group = |(place, devices): (usize, &Vec<usize>)| Group {
            stages: lineup.iter().filter(|other| *other == devices).count(),
            is_again: lineup[..place].contains(devices),
            ..self.group(devices, piece, sums)
        };
        let groups = lineup.iter().enumerate().map(group).collect();
        let after = lineup.iter().skip(1).chain(lineup.first().filter(|_| returns));
        let links = lineup.iter().zip(after).map(|(from, to)| self.fleet.link(from[0], to[0])).collect();
        Some(Line { model: self, wanted, sums, groups, links, layers })
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
            stages: 1,
            is_again: false,
        }
    }
}

/// What a step takes from some layer on.
#[derive(Clone, Copy, Debug)]
struct Behind {
    seconds: f64,
    /// One piece, there and back.
    way: f64,
    /// What groups are busy with all their stages, where this is not the first of those: it does not begin here.
    level: f64,
}

impl Behind {
    /// If nothing came before.
    fn whole(&self) -> f64 {
        self.seconds.max(self.level)
    }
}

/// A lineup at one size of pieces.
struct Line<'a> {
    model: &'a Model<'a>,
    wanted: &'a Wanted<'a>,
    /// By kind.
    sums: &'a [Sums],
    groups: Vec<Group>,
    /// From each group to the next; from the last to the first if the last layer returns there.
    links: Vec<Link>,
    /// Those that are to be cut: all but one that returns.
    layers: usize,
}

impl Line<'_> {
    /// What comes behind the last group.
    fn last(&self) -> Behind {
        let seconds =
            if self.wanted.returns { self.one_piece(0, &self.head(), Activations::Keep) } else { 0.0 };
        Behind { seconds, way: seconds, level: 0.0 }
    }

    fn head(&self) -> Range<usize> {
        self.layers..self.model.chain.layers.len()
    }

    /// A group that has these layers, with what is behind it; none where they do not fit, or keep it busy for too long.
    fn stage(&self, stage: usize, run: &Range<usize>, behind: Behind) -> Option<Behind> {
        let (group, activations) = (&self.groups[stage], self.wanted.activations[stage]);
        let mut busy = self.busy(group, run, activations);
        if busy > self.wanted.within {
            return None;
        }
        let (parameters, under_way) = self.fitting(stage, run)?;
        let backward = self.slowest(group, |sums| sums.backward(run, activations));
        let reduced = (group.around(ELEMENT_BYTES * parameters) - backward).max(0.0);
        if stage == 0 && self.wanted.returns {
            busy += self.busy(group, &self.head(), Activations::Keep);
        }
        let (mut one, mut network) = (self.one_piece(stage, run, activations), 0.0);
        if let Some(link) = self.links.get(stage) {
            let bytes = self.model.costs.output_bytes(run.end - 1);
            network = link.seconds(bytes * self.model.step.global_batch as u64);
            one += 2.0 * link.seconds(bytes * self.wanted.piece as u64);
        }
        // A group with several stages is taken to have as much in each.
        let all = group.stages as f64 * busy;
        let level = if group.is_again { behind.level.max(all) } else { behind.level };
        busy = if group.is_again { busy } else { all };
        // With few on the way at a time, a group waits for them to come back.
        let turns = group.rounds as f64 / under_way.min(group.rounds).max(1) as f64;
        busy = busy.max(turns * (one + behind.way));
        // Only the first group has nobody before it whose backwards hide what it adds up.
        let path = one + behind.seconds + if stage == 0 { reduced } else { 0.0 };
        let seconds = (busy + reduced).max(path).max(one + network);
        Some(Behind { seconds, way: one + behind.way, level })
    }

    /// Updates wait for the norm of all gradients; then the first group renews its copies.
    fn ending(&self, layers: &[Range<usize>]) -> f64 {
        let parameters =
            |run: &Range<usize>| self.model.parameters[run.end] - self.model.parameters[run.start];
        let update = |(group, run): (&Group, &Range<usize>)| {
            self.model.costs.update(group.first, parameters(run) / group.members as u64)
        };
        let renewed = self.model.step.precision.bytes() as u64 * layers.first().map_or(0, parameters);
        self.groups.iter().zip(layers).map(update).fold(0.0, f64::max) + self.groups[0].around(renewed)
    }

    fn slowest(&self, group: &Group, seconds: impl Fn(&Sums) -> f64) -> f64 {
        group.pieces.iter().map(|(kind, _)| seconds(&self.sums[*kind])).fold(0.0, f64::max)
    }

    /// Seconds that a group is busy with all samples.
    fn busy(&self, group: &Group, run: &Range<usize>, activations: Activations) -> f64 {
        let member = |(kind, count): &(usize, usize)| *count as f64 * self.sums[*kind].both(run, activations);
        group.pieces.iter().map(member).fold(0.0, f64::max)
    }

    fn one_piece(&self, stage: usize, run: &Range<usize>, activations: Activations) -> f64 {
        self.slowest(&self.groups[stage], |sums| sums.both(run, activations))
    }

    /// Trained numbers of a group's layers, if their state fits, and the pieces that a member has room for beside it.
    fn fitting(&self, stage: usize, run: &Range<usize>) -> Option<(u64, usize)> {
        let Line { model, wanted, .. } = *self;
        let group = &self.groups[stage];
        let mut parameters = model.parameters[run.end] - model.parameters[run.start];
        if run.end == model.chain.layers.len() && run.start > 0 {
            parameters += model.tied;
        }
        let states = ELEMENT_BYTES * (2 + model.step.optimizer_states as u64) * parameters;
        let copy = model.step.precision.bytes() as u64 * parameters;
        // Who has not all of the state adds up gradients that others hold.
        let own = if group.members > 1 { copy + ELEMENT_BYTES * parameters } else { 0 };
        let own = own + wanted.reserves[stage];
        let stages = group.stages as u64;
        let rooms = group.budgets.iter().map(|budget| (budget / stages).checked_sub(own));
        let room: u64 = rooms.sum::<Option<u64>>()?;
        let kept = if wanted.activations[stage] == Activations::Keep { &model.saved } else { &model.inputs };
        let piece = (kept[run.end] - kept[run.start]) * wanted.piece as u64;
        let left = room.checked_sub(states)? / group.members as u64;
        Some((parameters, (left / piece.max(1)) as usize)).filter(|(_, pieces)| *pieces > 0)
    }
}

impl Group {
    /// Seconds in which so many bytes, in slices at all members, come to each of them.
    fn around(&self, bytes: u64) -> f64 {
        let passed = bytes * (self.members as u64 - 1) / self.members as u64;
        self.link.as_ref().map_or(0.0, |link| link.seconds(passed))
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

#[cfg(test)]
mod tests {
    use shoal_model::{Precision, presets};
    use shoal_plan::draw::Draw;

    use super::*;
    use crate::device_rows;

    #[test]
    fn no_cut_between_two_groups_is_better_than_the_one_found() {
        let (mut with, mut without) = (0, 0);
        for seed in 0..200 {
            let mut draw = Draw::new(seed);
            let chain = Chain::new(&presets::gpt2(100 + 300 * draw.below(4), 64, 2 + draw.below(6), 4, 16));
            let nodes = ["a", "b"].map(|name| {
                let (kind, count) = (draw.of(&["V100", "T4", "A10G"]), 1 + draw.below(3));
                let megabytes = 655 + draw.of(&[1, 2, 4, 100]);
                format!(
                    "[[node]]\nname = \"{name}\"\nhost_memory = \"1 GiB\"\nnetwork = \"1 Gbit/s\"\n\
                     devices = [{{ kind = \"{kind}\", count = {count}, memory = \"{megabytes} MB\" }}]\n"
                )
            });
            let fleet = Fleet::parse(&nodes.concat(), "fleet").unwrap();
            let step = StepShape {
                global_batch: 1 + draw.below(9),
                sequence: 16,
                precision: Precision::Fp16,
                ..StepShape::ADAM
            };
            let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).unwrap();
            let (devices, piece) = (device_rows(&fleet), 1 + draw.below(2));
            let model = Model::new(&chain, step, &fleet, &costs, &devices, &[piece]);
            let lineup: Lineup = fleet.nodes.iter().map(|node| node.devices.clone().collect()).collect();
            let activations = [draw.of(&[Activations::Keep, Activations::Recompute]), Activations::Keep];
            let returns = draw.below(2) == 1;
            let wanted = Wanted {
                lineup: &lineup,
                returns,
                piece,
                activations: &activations,
                reserves: &[0, 0],
                within: f64::INFINITY,
            };
            let line = model.line(&wanted).unwrap();
            let at = |middle: usize| {
                let second = line.stage(1, &(middle..line.layers), line.last())?;
                let first = line.stage(0, &(0..middle), second)?;
                Some(first.seconds)
            };
            let least = (1..line.layers).filter_map(at).fold(f64::INFINITY, f64::min);
            match model.cut(&wanted) {
                Some(cut) => {
                    assert_eq!(cut.layers.last().map(|last| last.end), Some(chain.layers.len()));
                    let groups = &cut.layers[..2];
                    assert_eq!(cut.seconds, least + line.ending(groups), "seed {seed}");
                    // What is not of interest does not change what is.
                    let within = |within: f64| model.cut(&Wanted { within, ..wanted });
                    assert_eq!(within(least).map(|cut| cut.layers), Some(cut.layers), "seed {seed}");
                    assert!(within(0.999 * least).is_none(), "seed {seed}");
                    with += 1;
                }
                None => {
                    assert_eq!(least, f64::INFINITY, "seed {seed}");
                    without += 1;
                }
            }
        }
        assert!(with > 50 && without > 10, "{with} cut, {without} fit nowhere");
    }
}
