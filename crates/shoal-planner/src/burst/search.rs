//! The Pareto dynamic program over the layers that all paths pass, from the last to the first, as the backward goes:
//! for each set of devices that a layer may be on, the ways to finish the step from there of which none is beaten in
//! time, device-seconds, gradients still to be added up, and memory all at once.
//!
//! Ways that cannot end within the limits are dropped early: lower bounds on what is still to come are worked out
//! beforehand, for time, for device-seconds and for mixtures of both. Where more ways are left than [`WAYS_MAX`], some
//! are thinned out; small problems never come near it, and are solved exactly.

use super::block::{SolvedLink, Solver, Weights};
use super::place::{self, Moves, Ways};
use super::structure::{self, Branch, Series};
use super::timeline::{layer_seconds, reduction_seconds};
use super::{Decision, Problem};

/// Ways that are kept for one set of one layer.
const WAYS_MAX: usize = 128;
/// Times that the limits are drawn closer around the best that was found, so that less has to be thinned out.
const ROUNDS: usize = 2;

/// What a part of a step costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Cost {
    pub seconds: f64,
    pub device_seconds: f64,
    /// What its backward makes of the gradients still to be added up: so much more, or less by what is hidden behind
    /// it, but no less than the next.
    pub backlog_change: f64,
    pub backlog_least: f64,
    /// Memory of the device that has a share of every layer.
    pub bytes: f64,
}

impl Cost {
    /// Of a backward of some seconds, whose own gradients then take others to be added up.
    pub fn with_sums(mut self, backward: f64, sums: f64) -> Cost {
        (self.backlog_change, self.backlog_least) = (sums - backward, sums);
        self
    }

    /// With what comes after it in the forward, and so before it in the backward.
    pub fn then(&self, later: &Cost) -> Cost {
        Cost {
            seconds: self.seconds + later.seconds,
            device_seconds: self.device_seconds + later.device_seconds,
            backlog_change: self.backlog_change + later.backlog_change,
            backlog_least: self.backlog_least.max(later.backlog_least + self.backlog_change),
            bytes: self.bytes + later.bytes,
        }
    }
}

/// A problem with everything about its layers and sets worked out.
pub(super) struct Field<'a> {
    pub problem: &'a Problem<'a>,
    pub ways: Ways,
    pub order: Vec<usize>,
    pub sets: Vec<Vec<usize>>,
    /// Which of the sets is one device alone.
    pub single: usize,
    pub series: Series,
    /// By layer, then set.
    layers: Vec<Cost>,
    /// By both sets.
    moves: Vec<Moves>,
}

impl<'a> Field<'a> {
    pub fn new(problem: &'a Problem<'a>, ways: Ways) -> Field<'a> {
        let order = problem.order();
        let sets = place::candidates(problem.fleet, &order, problem.global_batch);
        let mut field = Field {
            problem,
            ways,
            single: sets.iter().position(|set| set.len() == 1).unwrap_or(0),
            series: structure::series(&problem.inputs),
            layers: Vec::new(),
            moves: Vec::new(),
            order,
            sets,
        };
        for layer in 0..problem.inputs.len() {
            for set in &field.sets {
                let (forward, backward) = layer_seconds(problem, layer, set);
                let cost = Cost {
                    seconds: forward + backward,
                    device_seconds: (forward + backward) * set.len() as f64,
                    bytes: field.bytes(layer, set.len()),
                    ..Cost::default()
                };
                let sums = reduction_seconds(problem, &field.ways, layer, set);
                field.layers.push(cost.with_sums(backward, sums));
            }
        }
        for from in &field.sets {
            for to in &field.sets {
                field.moves.push(field.ways.moves(from, to, problem.global_batch));
            }
        }
        field
    }

    pub fn layer(&self, layer: usize, set: usize) -> Cost {
        self.layers[layer * self.sets.len() + set]
    }

    /// Bytes of a layer on the first of so many devices.
    pub fn bytes(&self, layer: usize, count: usize) -> f64 {
        let bytes = self.problem.memory[layer];
        (bytes.state + bytes.kept_a_sample * self.problem.global_batch.div_ceil(count) as u64) as f64
    }

    /// A layer's output from one set to another, and its gradient back.
    pub fn edge(&self, layer: usize, from: usize, to: usize) -> Cost {
        self.moving(layer, &self.moves[from * self.sets.len() + to])
    }

    pub fn moving(&self, layer: usize, moves: &Moves) -> Cost {
        let seconds = 2.0 * self.ways.seconds(moves, self.problem.costs.output_bytes(layer));
        Cost { seconds, device_seconds: seconds * moves.taking_part as f64, ..Cost::default() }
    }
}

/// What is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    Fastest,
    /// The one with the least device-seconds.
    Cheapest,
    /// All that nothing beats in both time and device-seconds.
    Frontier,
}

/// Steps that take more are of no interest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub step_seconds: f64,
    pub device_seconds: f64,
}

pub(super) struct Found {
    pub decisions: Vec<Decision>,
    /// Of all decisions, within the limits or not.
    pub least_device_seconds: f64,
}

/// What leads from one layer to the next, for every pair of sets.
pub(super) enum Link {
    Plain(Vec<Cost>),
    Block {
        /// By pair: costs, and which of the solutions has them.
        options: Vec<Vec<(Cost, u16)>>,
        solved: Vec<SolvedLink>,
    },
}

impl Link {
    fn options(&self, pair: usize) -> impl Iterator<Item = (Cost, u16)> + '_ {
        let (plain, block) = match self {
            Link::Plain(costs) => (Some((costs[pair], 0)), None),
            Link::Block { options, .. } => (None, Some(options[pair].iter().copied())),
        };
        plain.into_iter().chain(block.into_iter().flatten())
    }
}

/// A way to finish the step from a layer on.
#[derive(Clone, Copy, Debug)]
struct Way {
    seconds: f64,
    device_seconds: f64,
    /// Seconds of gradients that are still to be added up.
    backlog: f64,
    bytes: f64,
    /// The set of the layer after this one, its way there, and how to get there.
    next: (u16, u32),
    option: u16,
}

/// A whole step.
struct End {
    seconds: f64,
    device_seconds: f64,
    decision: Decision,
}

pub(super) fn search(field: &Field, links: &[Link], limits: Limits, wanted: Wanted) -> Found {
    let mut least = f64::INFINITY;
    let mut found: Vec<Decision> = Vec::new();
    let mut limits = limits;
    for _ in 0..ROUNDS {
        let pass = Pass::new(field, links, limits, wanted);
        least = least.min(pass.least_device_seconds());
        let ends = pass.run();
        let best = |of: fn(&End) -> f64| ends.iter().map(of).fold(f64::INFINITY, f64::min);
        let (known, best) = match wanted {
            Wanted::Frontier => (0.0, 0.0),
            Wanted::Fastest => (limits.step_seconds, best(|end| end.seconds)),
            Wanted::Cheapest => (limits.device_seconds, best(|end| end.device_seconds)),
        };
        found.extend(ends.into_iter().map(|end| end.decision));
        if best >= known {
            break;
        }
        match wanted {
            Wanted::Cheapest => limits.device_seconds = best,
            Wanted::Fastest | Wanted::Frontier => limits.step_seconds = best,
        }
    }
    Found { decisions: found, least_device_seconds: least }
}

/// What leads from each layer that all paths pass to the next.
pub(super) fn links(field: &Field) -> Vec<Link> {
    let (size, cuts) = (field.sets.len(), &field.series.layers);
    let sweep = Weights::sweep(field.order.len());
    let mut solver = Solver::new(field);
    let between = cuts.windows(2).zip(&field.series.links[1..]);
    let link = |(ends, branches): (&[usize], &Vec<Branch>)| {
        if branches.len() == 1 && branches[0].is_plain() {
            let costs = (0..size * size).map(|pair| field.edge(ends[0], pair / size, pair % size));
            return Link::Plain(costs.collect());
        }
        let solved = solver.solve(branches, ends[0], ends[1], &sweep);
        let options = (0..size * size).map(|pair| {
            let mut options: Vec<(Cost, u16)> = Vec::new();
            for (place, link) in solved.iter().enumerate() {
                if !options.iter().any(|(cost, _)| *cost == link.cost[pair]) {
                    options.push((link.cost[pair], place as u16));
                }
            }
            options
        });
        Link::Block { options: options.collect(), solved }
    };
    between.map(link).collect()
}

/// A mixture of what ways are compared by that must not pass a limit, and the least of it that is still to come: by
/// layer that all paths pass, then set.
struct Bound {
    mixture: Mixture,
    limit: f64,
    to_come: Vec<Vec<f64>>,
}

#[derive(Clone, Copy)]
struct Mixture {
    seconds: f64,
    device_seconds: f64,
    /// At the end a step takes its seconds and what is then still to be added up: a part hides no more than its
    /// backward of it.
    backlog: f64,
}

impl Mixture {
    fn of(&self, cost: &Cost) -> f64 {
        let backlog = self.backlog * cost.backlog_change;
        self.seconds * cost.seconds + self.device_seconds * cost.device_seconds + backlog
    }
}

impl Bound {
    fn new(field: &Field, links: &[Link], mixture: Mixture, limit: f64) -> Bound {
        let size = field.sets.len();
        let mut to_come = vec![vec![0.0; size]];
        for (link, layer) in links.iter().zip(&field.series.layers) {
            let before: Vec<f64> = (0..size).map(|set| mixture.of(&field.layer(*layer, set))).collect();
            let known = &to_come[to_come.len() - 1];
            let least = |after: usize| {
                let from = (0..size).map(|set| {
                    let options = link.options(set * size + after).map(|(cost, _)| mixture.of(&cost));
                    known[set] + before[set] + options.fold(f64::INFINITY, f64::min)
                });
                from.fold(f64::INFINITY, f64::min)
            };
            to_come.push((0..size).map(least).collect());
        }
        Bound { mixture, limit, to_come }
    }

    fn allows(&self, cut: usize, set: usize, way: &Way) -> bool {
        let Mixture { seconds, device_seconds, backlog } = self.mixture;
        let so_far = seconds * way.seconds + device_seconds * way.device_seconds + backlog * way.backlog;
        so_far + self.to_come[cut][set] <= self.limit
    }
}

/// Sums of the same numbers in different orders differ by less.
const ROUNDING: f64 = 1.0 + 1e-9;

struct Pass<'a> {
    field: &'a Field<'a>,
    links: &'a [Link],
    bounds: Vec<Bound>,
    /// What the memory of the device that has a share of every layer allows.
    bytes_limit: f64,
    /// By layer that all paths pass: the least bytes of those before it, whatever their sets.
    bytes_to_come: Vec<f64>,
    compared: Compared,
}

/// What ways are compared by besides time and what is still to be added up.
#[derive(Clone, Copy)]
struct Compared {
    device_seconds: bool,
    /// Where memory can be short at all.
    bytes: bool,
}

impl<'a> Pass<'a> {
    fn new(field: &'a Field<'a>, links: &'a [Link], limits: Limits, wanted: Wanted) -> Pass<'a> {
        let time = limits.step_seconds * ROUNDING;
        let device = limits.device_seconds * ROUNDING;
        let mixture = |rate: f64, backlog: f64| Mixture { seconds: 1.0, device_seconds: rate, backlog };
        let only = Mixture { seconds: 0.0, device_seconds: 1.0, backlog: 0.0 };
        let mut bounds = vec![Bound::new(field, links, only, device)];
        let mut rates = vec![0.0];
        if device.is_finite() {
            let sweep = Weights::sweep(field.order.len());
            let mixed = sweep.iter().filter(|weights| weights.device_seconds > 0.0);
            rates.extend(mixed.map(|weights| weights.device_seconds / weights.seconds));
        }
        if time.is_finite() {
            for rate in rates {
                let limit = if rate > 0.0 { time + rate * device } else { time };
                for backlog in [0.0, 1.0] {
                    bounds.push(Bound::new(field, links, mixture(rate, backlog), limit));
                }
            }
        }
        let size = field.sets.len();
        let least =
            |layer: &usize| (0..size).map(|set| field.layer(*layer, set).bytes).fold(f64::INFINITY, f64::min);
        let mut bytes_to_come = vec![0.0];
        for (link, layer) in links.iter().zip(&field.series.layers) {
            let inner = (0..size * size).flat_map(|pair| link.options(pair).map(|(cost, _)| cost.bytes));
            let known = bytes_to_come[bytes_to_come.len() - 1];
            bytes_to_come.push(known + least(layer) + inner.fold(f64::INFINITY, f64::min));
        }
        let bytes_limit = field.problem.memory_bytes(field.order[0]) as f64;
        let layers = 0..field.problem.inputs.len();
        let most: f64 = layers.map(|layer| field.bytes(layer, 1)).sum();
        let compared = Compared {
            // Without a budget the fastest is the fastest, whatever it takes.
            device_seconds: device.is_finite() || wanted != Wanted::Fastest,
            bytes: most > bytes_limit,
        };
        Pass { field, links, bounds, bytes_limit, bytes_to_come, compared }
    }

    fn least_device_seconds(&self) -> f64 {
        let last = self.links.len();
        let layer = self.field.series.layers[last];
        let own =
            |set: usize| self.bounds[0].to_come[last][set] + self.field.layer(layer, set).device_seconds;
        (0..self.field.sets.len()).map(own).fold(f64::INFINITY, f64::min)
    }

    fn allows(&self, cut: usize, set: usize, way: &Way) -> bool {
        way.bytes + self.bytes_to_come[cut] <= self.bytes_limit
            && self.bounds.iter().all(|bound| bound.allows(cut, set, way))
    }

    /// The frontier of whole steps, the fastest first.
    fn run(&self) -> Vec<End> {
        let (size, cuts) = (self.field.sets.len(), &self.field.series.layers);
        // From the last layer to the first.
        let mut ways: Vec<Vec<Vec<Way>>> = Vec::new();
        let last = cuts.len() - 1;
        let start =
            Way { seconds: 0.0, device_seconds: 0.0, backlog: 0.0, bytes: 0.0, next: (0, 0), option: 0 };
        let begin = |set: usize| {
            let way = self.through(&start, &self.field.layer(cuts[last], set));
            if self.allows(last, set, &way) { vec![way] } else { Vec::new() }
        };
        ways.push((0..size).map(begin).collect());
        for cut in (0..last).rev() {
            let after = &ways[ways.len() - 1];
            let layer = (0..size).map(|set| self.reach(cut, set, after)).collect();
            ways.push(layer);
        }
        self.ends(&ways)
    }

    /// Ways at a layer on a set, from all ways at the layer after it.
    fn reach(&self, cut: usize, set: usize, after: &[Vec<Way>]) -> Vec<Way> {
        let size = self.field.sets.len();
        let own = self.field.layer(self.field.series.layers[cut], set);
        let mut reached = Vec::new();
        for (next, ways) in after.iter().enumerate() {
            for (cost, option) in self.links[cut].options(set * size + next) {
                for (place, way) in ways.iter().enumerate() {
                    let mut way = self.through(&self.through(way, &cost), &own);
                    (way.next, way.option) = ((next as u16, place as u32), option);
                    if self.allows(cut, set, &way) {
                        reached.push(way);
                    }
                }
            }
        }
        thinned(unbeaten(reached, self.compared))
    }

    fn through(&self, way: &Way, cost: &Cost) -> Way {
        Way {
            seconds: way.seconds + cost.seconds,
            device_seconds: way.device_seconds + cost.device_seconds,
            backlog: (way.backlog + cost.backlog_change).max(cost.backlog_least),
            bytes: way.bytes + cost.bytes,
            ..*way
        }
    }

    /// Whole steps: the first layer's devices wait for what is still to be added up.
    fn ends(&self, ways: &[Vec<Vec<Way>>]) -> Vec<End> {
        let first = &ways[ways.len() - 1];
        let mut ends: Vec<(Way, usize, usize)> = Vec::new();
        for (set, of_set) in first.iter().enumerate() {
            for (place, way) in of_set.iter().enumerate() {
                let mut way = *way;
                way.seconds += way.backlog;
                way.device_seconds += way.backlog * self.field.sets[set].len() as f64;
                way.backlog = 0.0;
                if self.allows(0, set, &way) {
                    ends.push((way, set, place));
                }
            }
        }
        let key = |way: &Way| (way.seconds, way.device_seconds);
        ends.sort_by(|a, b| key(&a.0).partial_cmp(&key(&b.0)).unwrap_or(std::cmp::Ordering::Equal));
        let mut least = f64::INFINITY;
        // Memory elsewhere than on the first device is judged later: where it may be short, all stay.
        ends.retain(|(way, ..)| {
            let better = way.device_seconds < least;
            least = least.min(way.device_seconds);
            better || self.compared.bytes
        });
        let end = |(way, set, place): (Way, usize, usize)| End {
            seconds: way.seconds,
            device_seconds: way.device_seconds,
            decision: self.decision(ways, set, place),
        };
        ends.into_iter().map(end).collect()
    }

    fn decision(&self, ways: &[Vec<Vec<Way>>], set: usize, place: usize) -> Decision {
        let (field, cuts) = (self.field, &self.field.series.layers);
        let mut devices = vec![Vec::new(); field.problem.inputs.len()];
        let (mut set, mut place) = (set, place);
        for (cut, at) in ways.iter().rev().enumerate() {
            devices[cuts[cut]].clone_from(&field.sets[set]);
            let way = at[set][place];
            let (next, next_place) = way.next;
            if let Some(Link::Block { solved, .. }) = self.links.get(cut) {
                solved[way.option as usize].write(&field.sets, set, next as usize, &mut devices);
            }
            (set, place) = (next as usize, next_place as usize);
        }
        Decision { devices }
    }
}

/// Ways that no other beats in everything, by time.
fn unbeaten(mut ways: Vec<Way>, compared: Compared) -> Vec<Way> {
    let key = |way: &Way| (way.seconds, way.device_seconds, way.backlog);
    ways.sort_unstable_by(|a, b| key(a).partial_cmp(&key(b)).unwrap_or(std::cmp::Ordering::Equal));
    let least = ways.iter().map(|way| way.backlog).fold(f64::INFINITY, f64::min);
    let mut kept: Vec<Way> = Vec::new();
    // Most ways have hidden everything but their last layer's gradient; against those a single number decides.
    let mut least_with_none: Option<f64> = None;
    for way in ways {
        let beaten_in_one =
            |least: f64| !compared.bytes && (!compared.device_seconds || least <= way.device_seconds);
        let beats = |other: &Way| {
            (!compared.device_seconds || other.device_seconds <= way.device_seconds)
                && other.backlog <= way.backlog
                && (!compared.bytes || other.bytes <= way.bytes)
        };
        if least_with_none.is_some_and(beaten_in_one) || kept.iter().rev().any(beats) {
            continue;
        }
        if way.backlog == least {
            let known = least_with_none.unwrap_or(f64::INFINITY);
            least_with_none = Some(known.min(way.device_seconds));
        }
        kept.push(way);
    }
    kept
}

/// At most [`WAYS_MAX`] of them, evenly over time, with both ends.
fn thinned(ways: Vec<Way>) -> Vec<Way> {
    if ways.len() <= WAYS_MAX {
        return ways;
    }
    let last = ways.len() - 1;
    (0..WAYS_MAX).map(|at| ways[at * last / (WAYS_MAX - 1)]).collect()
}
