//! DeepPool's own rule, to be compared with: powers of two, a limit on each layer's own amplification, one bandwidth
//! for all. It decides by its own costs; what its decision really takes, the timeline says.

use shoal_fleet::Fleet;

use super::place::{self, Ways, share};
use super::structure::{self, Branch, Series};
use super::timeline::{self, layer_seconds};
use super::{Decision, Problem};

/// What the rule goes by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// The most device-seconds of a layer over what it takes on one device.
    pub amplification_max: f64,
    pub bytes_per_second: f64,
    /// Of every move, each way.
    pub seconds_a_move: f64,
}

const AMPLIFICATION_MAX: f64 = 2.0;
const SECONDS_A_MOVE: f64 = 40e-6;

impl Rule {
    /// Its defaults, with the bandwidth of the fleet's fastest and of its slowest link: it knows but one.
    pub fn of(fleet: &Fleet) -> Vec<Rule> {
        let links = (1..fleet.devices.len()).map(|other| fleet.link(0, other).bytes_per_second);
        let rates: Vec<f64> = links.collect();
        let fastest = rates.iter().copied().fold(0.0, f64::max);
        let slowest = rates.iter().copied().fold(f64::INFINITY, f64::min);
        let rule = |bytes_per_second: f64| Rule {
            amplification_max: AMPLIFICATION_MAX,
            bytes_per_second,
            seconds_a_move: SECONDS_A_MOVE,
        };
        match fastest > slowest {
            true => vec![rule(fastest), rule(slowest)],
            // Of one device alone there is no link, and no end to its bandwidth.
            false => vec![rule(slowest)],
        }
    }
}

/// What the rule decides, by the best of some settings of it. It says how many devices, not which: of the two ways that we know to pick them, the better one counts.
pub(super) fn decide(problem: &Problem, ways: &Ways, rules: &[Rule]) -> Decision {
    let tried = rules.iter().flat_map(|rule| placed(problem, *rule));
    let seconds = |decision: &Decision| timeline::estimate(problem, ways, decision).step_seconds;
    let timed = tried.map(|decision| (seconds(&decision), decision));
    let best = timed.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, decision)| decision);
    best.unwrap_or_else(|| problem.single_device())
}

/// What one setting decides, on devices spaced over all and on few nodes.
fn placed(problem: &Problem, rule: Rule) -> [Decision; 2] {
    let order = problem.order();
    let most = order.len().min(problem.global_batch);
    let powers = (0..usize::BITS).map(|power| 1usize << power);
    let counts = powers.take_while(|count| *count <= most).collect();
    let greedy = Greedy { problem, rule, order: &order, counts };
    let solution = greedy.whole(&structure::series(&problem.inputs));
    [false, true].map(|compact| {
        let mut devices = vec![Vec::new(); problem.inputs.len()];
        for Placed { layer, count, offset } in &solution.placed {
            let mut sets = place::candidates_of(problem.fleet, &order, &[*count]);
            devices[*layer] = match (*offset, compact) {
                (0, false) => sets.swap_remove(0),
                (0, true) => sets.pop().unwrap_or_default(),
                (offset, _) => order[offset..offset + count].to_vec(),
            };
        }
        Decision { devices }
    })
}

#[derive(Clone, Copy)]
struct Placed {
    layer: usize,
    count: usize,
    /// Devices before the first of its own.
    offset: usize,
}

/// A part of the model and its time, as the rule sees it.
#[derive(Clone, Default)]
struct Solution {
    seconds: f64,
    placed: Vec<Placed>,
}

impl Solution {
    /// Devices from the first to the last that it uses.
    fn width(&self) -> usize {
        self.placed.iter().map(|placed| placed.offset + placed.count).max().unwrap_or(0)
    }

    fn then(&self, other: &Solution) -> Solution {
        let placed = self.placed.iter().chain(&other.placed).copied().collect();
        Solution { seconds: self.seconds + other.seconds, placed }
    }
}

struct Greedy<'a> {
    problem: &'a Problem<'a>,
    rule: Rule,
    order: &'a [usize],
    /// Powers of two.
    counts: Vec<usize>,
}

impl Greedy<'_> {
    fn compute_seconds(&self, layer: usize, count: usize) -> f64 {
        let (forward, backward) = layer_seconds(self.problem, layer, &self.order[..count]);
        forward + backward
    }

    fn sync_seconds(&self, layer: usize, count: usize) -> f64 {
        let bytes = self.problem.costs.parameters(layer) * self.problem.gradient_bytes_a_parameter;
        if count > 1 { bytes as f64 / self.rule.bytes_per_second } else { 0.0 }
    }

    fn layer(&self, layer: usize, count: usize) -> Solution {
        let seconds = self.compute_seconds(layer, count) + self.sync_seconds(layer, count);
        Solution { seconds, placed: vec![Placed { layer, count, offset: 0 }] }
    }

    fn admits(&self, layer: usize, count: usize) -> bool {
        let alone = self.compute_seconds(layer, 1);
        count == 1 || self.layer(layer, count).seconds * count as f64 <= self.rule.amplification_max * alone
    }

    /// Seconds of a layer's output on its way from the first so many devices to the first so many others, and of its
    /// gradient back.
    fn moving_seconds(&self, layer: usize, from: usize, to: usize) -> f64 {
        if from == to {
            return 0.0;
        }
        let batch = self.problem.global_batch;
        let samples = (0..from.max(to)).map(|device| {
            let of = |count: usize| if device < count { share(batch, count, device).range() } else { 0..0 };
            let (had, wanted) = (of(from), of(to));
            let stays = had.end.min(wanted.end).saturating_sub(had.start.max(wanted.start));
            had.len().max(wanted.len()) - stays
        });
        let bytes = samples.max().unwrap_or(0) as u64 * self.problem.costs.output_bytes(layer);
        2.0 * (bytes as f64 / self.rule.bytes_per_second + self.rule.seconds_a_move)
    }

    fn whole(&self, series: &Series) -> Solution {
        let first = series.layers[0];
        let mut best: Vec<(usize, Solution)> =
            self.counts.iter().map(|count| (*count, self.layer(first, *count))).collect();
        for (at, ends) in series.layers.windows(2).enumerate() {
            best = self.step(&best, &series.links[at + 1], (ends[0], true), ends[1]);
        }
        // The last layer's amplification is not looked at.
        let ends = best.into_iter().map(|(_, solution)| solution);
        ends.min_by(|a, b| a.seconds.total_cmp(&b.seconds)).unwrap_or_default()
    }

    /// The next layer on every count, from the counts of the layer before that are admitted.
    fn step(
        &self,
        best: &[(usize, Solution)],
        link: &[Branch],
        (from, is_judged): (usize, bool),
        to: usize,
    ) -> Vec<(usize, Solution)> {
        let to_count = |count: usize| {
            let admitted = best.iter().filter(|(before, _)| !is_judged || self.admits(from, *before));
            let ways = admitted.map(|(before, solution)| {
                let between = self.link(link, (from, *before), (to, count));
                solution.then(&between).then(&self.layer(to, count))
            });
            (count, ways.min_by(|a, b| a.seconds.total_cmp(&b.seconds)).unwrap_or_default())
        };
        self.counts.iter().map(|count| to_count(*count)).collect()
    }

    /// Each branch for itself, the longest first; the others beside it where there are idle devices and they end
    /// before it does, else after it.
    fn link(&self, branches: &[Branch], from: (usize, usize), to: (usize, usize)) -> Solution {
        let mut solved: Vec<Solution> = branches.iter().map(|branch| self.branch(branch, from, to)).collect();
        solved.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        let longest = solved.first().map_or(0.0, |solution| solution.seconds);
        let mut whole = Solution::default();
        let mut used = 0;
        for mut solution in solved {
            let width = solution.width();
            let beside = solution.seconds + self.apart_seconds(&solution, from, to);
            if used > 0 && width > 0 && used + width <= self.order.len() && beside <= longest {
                solution.placed.iter_mut().for_each(|placed| placed.offset += used);
                solution.seconds = 0.0;
                used += width;
            } else {
                used = used.max(width);
            }
            whole = whole.then(&solution);
        }
        whole
    }

    /// Seconds of moving all samples to other devices and back again.
    fn apart_seconds(&self, solution: &Solution, from: (usize, usize), to: (usize, usize)) -> f64 {
        let (Some(first), Some(last)) = (solution.placed.first(), solution.placed.last()) else { return 0.0 };
        let way = |layer: usize, a: usize, b: usize| {
            let samples = self.problem.global_batch.div_ceil(a.min(b)) as u64;
            let bytes = samples * self.problem.costs.output_bytes(layer);
            2.0 * (bytes as f64 / self.rule.bytes_per_second + self.rule.seconds_a_move)
        };
        way(from.0, from.1, first.count) + way(last.layer, last.count, to.1)
    }

    fn branch(&self, branch: &Branch, from: (usize, usize), to: (usize, usize)) -> Solution {
        let series = match branch {
            Branch::Series(series) => series,
            // Of no series it knows nothing: all on one device.
            Branch::Bundle(layers) => {
                let each = layers.iter().map(|layer| self.layer(*layer, 1));
                return each.fold(Solution::default(), |sum, layer| sum.then(&layer));
            }
        };
        if series.layers.is_empty() {
            return Solution { seconds: self.moving_seconds(from.0, from.1, to.1), placed: Vec::new() };
        }
        // The fork's count is decided already.
        let mut best = vec![(from.1, Solution::default())];
        let mut before = None;
        for (layer, link) in series.layers.iter().zip(&series.links) {
            best = self.step(&best, link, before.map_or((from.0, false), |layer| (layer, true)), *layer);
            before = Some(*layer);
        }
        let (last, layer) = (&series.links[series.layers.len()], series.layers[series.layers.len() - 1]);
        let admitted = best.iter().filter(|(known, _)| self.admits(layer, *known));
        let ways = admitted.map(|(known, solution)| solution.then(&self.link(last, (layer, *known), to)));
        ways.min_by(|a, b| a.seconds.total_cmp(&b.seconds)).unwrap_or_default()
    }
}
