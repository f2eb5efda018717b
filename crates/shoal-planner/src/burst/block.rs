//! What lies between a fork and its join, for every pair of sets that the fork and the join may be on. Branches go one
//! after another, each layer on the set that suits it, or side by side, each on devices of its own.
//!
//! Here time and device-seconds are weighed against each other at a few rates, and each rate's best is handed to the
//! search. So decisions between two rates' best are missed, which in a chain of several blocks is little.

use std::collections::HashMap;

use super::search::{Cost, Field};
use super::structure::{Branch, Series};
use super::timeline::{layer_seconds, reduction_seconds};

/// What a second of the step and a device-second weigh.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weights {
    pub seconds: f64,
    pub device_seconds: f64,
}

impl Weights {
    /// From time alone to device-seconds alone. Between them the rates at which fleets of this size trade: a step cut
    /// by one second by spending so many device-seconds.
    pub fn sweep(devices: usize) -> Vec<Weights> {
        let mut sweep = vec![Weights { seconds: 1.0, device_seconds: 0.0 }];
        let mut rate = 0.25 / devices as f64;
        while rate < 4.0 {
            sweep.push(Weights { seconds: 1.0, device_seconds: rate });
            rate *= 2.0;
        }
        sweep.push(Weights { seconds: 1e-6, device_seconds: 1.0 });
        sweep
    }

    /// Sums that take no longer than the backward they belong to are hidden in the end, the rest is not.
    pub fn score(&self, cost: &Cost) -> f64 {
        let exposed = cost.backlog_change.max(0.0);
        self.seconds * (cost.seconds + exposed) + self.device_seconds * cost.device_seconds
    }
}

/// The best way between two places at one rate.
pub(super) struct SolvedLink {
    /// By the sets before and after.
    pub cost: Vec<Cost>,
    score: Vec<f64>,
    /// Zero where branches go one after another, else one more than the place among `side_by_side`.
    how: Vec<u16>,
    branches: Vec<SolvedBranch>,
    side_by_side: Vec<Lanes>,
}

enum SolvedBranch {
    Plain,
    Series {
        layers: Vec<usize>,
        links: Vec<SolvedLink>,
        /// For each layer: the set that it is on, by the sets before the branch and of what follows the layer.
        sets: Vec<Vec<u16>>,
    },
    Bundle {
        layers: Vec<usize>,
        set: Vec<u16>,
    },
}

/// Branches on devices of their own.
#[derive(Clone)]
struct Lanes {
    /// Each branch's layers and their devices.
    branches: Vec<(Vec<usize>, Vec<usize>)>,
    cost: Cost,
    /// By set: from the fork, and to the join.
    into: Vec<Cost>,
    out: Vec<Cost>,
}

/// Solves links, remembering what lanes cost to reach.
pub(super) struct Solver<'a> {
    field: &'a Field<'a>,
    /// By a lane's devices: moves between it and every set.
    reached: HashMap<Vec<usize>, Vec<super::place::Moves>>,
}

impl<'a> Solver<'a> {
    pub fn new(field: &'a Field<'a>) -> Solver<'a> {
        Solver { field, reached: HashMap::new() }
    }

    /// The best ways between a layer and the next that all paths pass, one a rate.
    pub fn solve(
        &mut self,
        branches: &[Branch],
        from: usize,
        to: usize,
        sweep: &[Weights],
    ) -> Vec<SolvedLink> {
        let mut known = HashMap::new();
        sweep.iter().map(|weights| self.link(branches, from, to, *weights, &mut known)).collect()
    }

    fn link(
        &mut self,
        branches: &[Branch],
        from: usize,
        to: usize,
        weights: Weights,
        known: &mut HashMap<Vec<usize>, Vec<Lanes>>,
    ) -> SolvedLink {
        let field = self.field;
        let size = field.sets.len();
        let mut solved = SolvedLink {
            cost: vec![Cost::default(); size * size],
            score: vec![0.0; size * size],
            how: vec![0; size * size],
            branches: Vec::new(),
            side_by_side: Vec::new(),
        };
        for branch in branches {
            let (costs, scores, branch) = match branch {
                Branch::Series(series) => self.series(series, from, to, weights, known),
                Branch::Bundle(layers) => self.bundle(layers, from, to, weights),
            };
            solved.cost.iter_mut().zip(&costs).for_each(|(sum, cost)| *sum = sum.then(cost));
            solved.score.iter_mut().zip(&scores).for_each(|(sum, score)| *sum += score);
            solved.branches.push(branch);
        }
        let all: Vec<usize> = branches.iter().flat_map(Branch::layers).collect();
        if branches.iter().filter(|branch| !branch.is_plain()).count() > 1 {
            solved.side_by_side = known.entry(all).or_insert_with(|| self.lanes(branches, from, to)).clone();
        }
        let plain = branches.iter().filter(|branch| branch.is_plain()).count();
        for (option, lanes) in solved.side_by_side.iter().enumerate() {
            let score = |costs: &[Cost]| costs.iter().map(|cost| weights.score(cost)).collect::<Vec<f64>>();
            let (own, into, out) = (weights.score(&lanes.cost), score(&lanes.into), score(&lanes.out));
            for pair in 0..size * size {
                let (before, after) = (pair / size, pair % size);
                let mut whole = own + into[before] + out[after];
                if plain > 0 {
                    whole += weights.score(&field.edge(from, before, after)) * plain as f64;
                }
                if whole < solved.score[pair] {
                    (solved.score[pair], solved.how[pair]) = (whole, option as u16 + 1);
                    let mut cost = lanes.into[before].then(&lanes.cost).then(&lanes.out[after]);
                    for _ in 0..plain {
                        cost = cost.then(&field.edge(from, before, after));
                    }
                    solved.cost[pair] = cost;
                }
            }
        }
        solved
    }

    fn plain(&self, from: usize, weights: Weights) -> (Vec<Cost>, Vec<f64>) {
        let size = self.field.sets.len();
        let costs: Vec<Cost> =
            (0..size * size).map(|pair| self.field.edge(from, pair / size, pair % size)).collect();
        let scores = costs.iter().map(|cost| weights.score(cost)).collect();
        (costs, scores)
    }

    fn series(
        &mut self,
        series: &Series,
        from: usize,
        to: usize,
        weights: Weights,
        known: &mut HashMap<Vec<usize>, Vec<Lanes>>,
    ) -> (Vec<Cost>, Vec<f64>, SolvedBranch) {
        if series.layers.is_empty() {
            let (costs, scores) = self.plain(from, weights);
            return (costs, scores, SolvedBranch::Plain);
        }
        let (field, size) = (self.field, self.field.sets.len());
        let places: Vec<usize> =
            [from].into_iter().chain(series.layers.iter().copied()).chain([to]).collect();
        let mut links = Vec::new();
        let mut sets = Vec::new();
        let (mut costs, mut scores) = (Vec::new(), Vec::new());
        for (at, branches) in series.links.iter().enumerate() {
            let link = self.link(branches, places[at], places[at + 1], weights, known);
            if at == 0 {
                (costs, scores) = (link.cost.clone(), link.score.clone());
            } else {
                let best = least_plus(&scores, &link.score, size);
                let cost = |pair: usize| {
                    let (before, after, through) = (pair / size, pair % size, best.1[pair] as usize);
                    costs[before * size + through].then(&link.cost[through * size + after])
                };
                costs = (0..size * size).map(cost).collect();
                scores = best.0;
                sets.push(best.1);
            }
            if let Some(layer) = series.layers.get(at) {
                for pair in 0..size * size {
                    let own = field.layer(*layer, pair % size);
                    costs[pair] = costs[pair].then(&own);
                    scores[pair] += weights.score(&own);
                }
            }
            links.push(link);
        }
        (costs, scores, SolvedBranch::Series { layers: series.layers.clone(), links, sets })
    }

    fn bundle(
        &self,
        layers: &[usize],
        from: usize,
        to: usize,
        weights: Weights,
    ) -> (Vec<Cost>, Vec<f64>, SolvedBranch) {
        let (field, size) = (self.field, self.field.sets.len());
        let ends = Ends::new(field, layers, from, to);
        let on = |set: usize| {
            layers.iter().fold(Cost::default(), |sum, layer| sum.then(&field.layer(*layer, set)))
        };
        let own: Vec<Cost> = (0..size).map(on).collect();
        let cost = |before: usize, set: usize, after: usize| {
            ends.cost(
                |source| field.edge(source, before, set),
                |source| field.edge(source, set, after),
                &own[set],
            )
        };
        let mut best = (Vec::new(), Vec::new(), Vec::new());
        for pair in 0..size * size {
            let tried = (0..size).map(|set| cost(pair / size, set, pair % size));
            let scored = tried.enumerate().map(|(set, cost)| (weights.score(&cost), cost, set));
            let (score, cost, set) =
                scored.min_by(|a, b| a.0.total_cmp(&b.0)).expect("there is a device, so there is a set");
            best.0.push(cost);
            best.1.push(score);
            best.2.push(set as u16);
        }
        (best.0, best.1, SolvedBranch::Bundle { layers: layers.to_vec(), set: best.2 })
    }

    /// Ways to put branches side by side: as many lanes as there are branches or fewer, on all devices, half of them,
    /// and so on, with devices in proportion to the branches' work.
    fn lanes(&mut self, branches: &[Branch], from: usize, to: usize) -> Vec<Lanes> {
        let field = self.field;
        let mut parts: Vec<(f64, Vec<usize>)> = branches
            .iter()
            .filter(|branch| !branch.is_plain())
            .map(|branch| {
                let layers = branch.layers();
                (layers.iter().map(|layer| field.layer(*layer, field.single).seconds).sum(), layers)
            })
            .collect();
        parts.sort_by(|a, b| b.0.total_cmp(&a.0));
        let most = field.order.len().min(field.problem.global_batch);
        let mut found = Vec::new();
        for lanes in 2..=parts.len() {
            let (work, lane_of) = longest_first(&parts, lanes);
            let mut total = most;
            while total >= lanes {
                let sizes = proportional(&work, total);
                let devices = &field.order[..total];
                let mut start = 0;
                let sets: Vec<Vec<usize>> = sizes
                    .iter()
                    .map(|size| {
                        start += size;
                        devices[start - size..start].to_vec()
                    })
                    .collect();
                found.push(self.lanes_on(&parts, &lane_of, &sets, from, to));
                total /= 2;
            }
        }
        found
    }

    fn lanes_on(
        &mut self,
        parts: &[(f64, Vec<usize>)],
        lane_of: &[usize],
        sets: &[Vec<usize>],
        from: usize,
        to: usize,
    ) -> Lanes {
        let (field, size) = (self.field, self.field.sets.len());
        let mut each = vec![(0.0, 0.0); sets.len()];
        let mut sums = 0.0;
        let mut lanes = Lanes {
            branches: Vec::new(),
            cost: Cost::default(),
            into: vec![Cost::default(); size],
            out: vec![Cost::default(); size],
        };
        for ((_, layers), lane) in parts.iter().zip(lane_of) {
            let set = &sets[*lane];
            for layer in layers {
                let (forward, backward) = layer_seconds(field.problem, *layer, set);
                each[*lane].0 += forward;
                each[*lane].1 += backward;
                lanes.cost.device_seconds += (forward + backward) * set.len() as f64;
                sums += reduction_seconds(field.problem, &field.ways, *layer, set);
                if *lane == 0 {
                    lanes.cost.bytes += field.bytes(*layer, set.len());
                }
            }
            let batch = field.problem.global_batch;
            let moves = self.reached.entry(set.clone()).or_insert_with(|| {
                field.sets.iter().map(|other| field.ways.moves(other, set, batch)).collect()
            });
            let ends = Ends::new(field, layers, from, to);
            for (other, moves) in moves.iter().enumerate() {
                // All of a fork's moves are started at the same time, and all of a join's.
                let add = |sum: &mut Cost, source: usize| {
                    let mut cost = field.moving(source, moves);
                    if sum.seconds > 0.0 {
                        cost.seconds -= 2.0 * field.ways.starting_seconds(moves);
                    }
                    *sum = sum.then(&cost);
                };
                (0..ends.entries).for_each(|_| add(&mut lanes.into[other], from));
                ends.exits.iter().for_each(|source| add(&mut lanes.out[other], *source));
            }
            lanes.branches.push((layers.clone(), set.clone()));
        }
        let backward = each.iter().map(|lane| lane.1).fold(0.0, f64::max);
        lanes.cost.seconds = each.iter().map(|lane| lane.0).fold(0.0, f64::max) + backward;
        lanes.cost = lanes.cost.with_sums(backward, sums);
        lanes
    }
}

/// Edges between a part of a model and the layers around it.
struct Ends {
    from: usize,
    /// Edges from the layer before.
    entries: usize,
    /// Layers that the layer after takes.
    exits: Vec<usize>,
}

impl Ends {
    fn new(field: &Field, layers: &[usize], from: usize, to: usize) -> Ends {
        let inputs = &field.problem.inputs;
        let entries = layers.iter().flat_map(|layer| &inputs[*layer]).filter(|input| **input == from).count();
        let exits = inputs[to].iter().copied().filter(|input| layers.contains(input)).collect();
        Ends { from, entries, exits }
    }

    fn cost(&self, into: impl Fn(usize) -> Cost, out: impl Fn(usize) -> Cost, own: &Cost) -> Cost {
        let entered = (0..self.entries).fold(Cost::default(), |sum, _| sum.then(&into(self.from)));
        self.exits.iter().fold(entered.then(own), |sum, exit| sum.then(&out(*exit)))
    }
}

/// The least sum over what lies between, and where it is.
fn least_plus(a: &[f64], b: &[f64], size: usize) -> (Vec<f64>, Vec<u16>) {
    let mut least = vec![f64::INFINITY; size * size];
    let mut at = vec![0u16; size * size];
    for before in 0..size {
        let (row, places) = (&mut least[before * size..][..size], &mut at[before * size..][..size]);
        for through in 0..size {
            let first = a[before * size + through];
            for ((least, place), second) in
                row.iter_mut().zip(places.iter_mut()).zip(&b[through * size..][..size])
            {
                if first + second < *least {
                    (*least, *place) = (first + second, through as u16);
                }
            }
        }
    }
    (least, at)
}

/// Each part, the longest first, to the lane that has the least so far: each lane's work, and each part's lane.
fn longest_first(parts: &[(f64, Vec<usize>)], lanes: usize) -> (Vec<f64>, Vec<usize>) {
    let mut work = vec![0.0; lanes];
    let place = |(part, _): &(f64, Vec<usize>)| {
        let lane = (0..lanes).min_by(|a, b| f64::total_cmp(&work[*a], &work[*b])).unwrap_or(0);
        work[lane] += part;
        lane
    };
    let lane_of = parts.iter().map(place).collect();
    (work, lane_of)
}

/// Whole numbers of at least one with a sum, as near to a proportion as eighths of the sum allow: equal sizes are then
/// met again and again.
fn proportional(work: &[f64], total: usize) -> Vec<usize> {
    let all: f64 = work.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let unit = (total / 8).max(1);
    let mut sizes: Vec<usize> = work
        .iter()
        .map(|work| ((work / all * total as f64 / unit as f64).round() as usize * unit).max(1))
        .collect();
    while sizes.iter().sum::<usize>() != total {
        let sum: usize = sizes.iter().sum();
        // The lane that has most for its work gives, the one that has least gets.
        let load = |lane: &usize| work[*lane] / sizes[*lane] as f64;
        let lanes = 0..sizes.len();
        match sum > total {
            true => {
                let lane = lanes.filter(|lane| sizes[*lane] > 1).min_by(|a, b| load(a).total_cmp(&load(b)));
                lane.into_iter().for_each(|lane| sizes[lane] -= 1);
            }
            false => {
                let lane = lanes.max_by(|a, b| load(a).total_cmp(&load(b)));
                lane.into_iter().for_each(|lane| sizes[lane] += 1);
            }
        }
    }
    sizes
}

impl SolvedLink {
    /// Writes down the devices of all layers in the link, for given sets before and after.
    pub fn write(&self, sets: &[Vec<usize>], before: usize, after: usize, devices: &mut [Vec<usize>]) {
        let pair = before * sets.len() + after;
        match self.how[pair] {
            0 => self.branches.iter().for_each(|branch| branch.write(sets, before, after, devices)),
            option => {
                for (layers, set) in &self.side_by_side[option as usize - 1].branches {
                    layers.iter().for_each(|layer| devices[*layer].clone_from(set));
                }
            }
        }
    }
}

impl SolvedBranch {
    fn write(&self, sets: &[Vec<usize>], before: usize, after: usize, devices: &mut [Vec<usize>]) {
        match self {
            SolvedBranch::Plain => {}
            SolvedBranch::Bundle { layers, set } => {
                let set = &sets[set[before * sets.len() + after] as usize];
                layers.iter().for_each(|layer| devices[*layer].clone_from(set));
            }
            SolvedBranch::Series { layers, links, sets: chosen } => {
                let mut next = after;
                for at in (0..layers.len()).rev() {
                    let own = chosen[at][before * sets.len() + next] as usize;
                    devices[layers[at]].clone_from(&sets[own]);
                    links[at + 1].write(sets, own, next, devices);
                    next = own;
                }
                links[0].write(sets, before, next, devices);
            }
        }
    }
}
