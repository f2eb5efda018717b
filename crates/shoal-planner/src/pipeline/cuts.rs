//! Where a chain is cut for devices in a row: by dynamic programming over contiguous layers, from the loss backwards, so
//! that all that depends on the devices behind a stage is known.

use std::collections::HashMap;
use std::ops::Range;

use super::stages::{Choice, Judge, Run};

/// Places times layers up to which every cut that could be the best is looked at.
const FEW_CUTS: usize = 100;

/// How much longer than the least a period may be, where that shortens the way through. Sums in another order may
/// differ in their last bits, hence the first.
const PERIODS: [f64; 6] = [1.0 + 1e-12, 1.02, 1.05, 1.1, 1.25, 1.6];

/// A device of a row: its class, and the class of the way to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Place {
    pub class: usize,
    pub link: Option<usize>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct CutStage {
    pub layers: Range<usize>,
    pub choice: Choice,
    /// Of its boundary to the next stage, one way.
    pub transfer: f64,
    pub backward: f64,
}

/// A chain cut for a row of devices.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Cut {
    pub stages: Vec<CutStage>,
    /// Seconds from one micro-batch to the next: of the slowest stage or transfer.
    pub period: f64,
    /// Seconds of a single micro-batch there and back.
    pub fill: f64,
}

/// What is sought.
#[derive(Clone, Copy, Debug)]
enum Aim {
    /// The least period.
    Period,
    /// The least time through all stages, none of which takes longer than this.
    Fill(f64),
}

/// Of the layers from each one on, on the devices from one on.
#[derive(Clone, Debug)]
struct Row {
    best: Vec<f64>,
    /// Where the first device's layers end.
    end: Vec<u32>,
}

/// All runs of layers on devices of each class, as far as they were asked for: rows look at them again and again.
#[derive(Default)]
struct Runs {
    /// By class, then first layer, then last.
    of: Vec<Vec<Vec<Run>>>,
}

impl Runs {
    fn of(&mut self, judge: &Judge, class: usize) -> &[Vec<Run>] {
        if self.of.len() <= class {
            self.of.resize_with(class + 1, Vec::new);
        }
        let runs = &mut self.of[class];
        if runs.is_empty() {
            let layers = judge.chain.layers.len();
            runs.extend((0..layers).map(|start| {
                let mut run = judge.run(start);
                let longer = |_| {
                    judge.add(&mut run, class);
                    run.clone()
                };
                (start..layers).map(longer).collect()
            }));
        }
        runs
    }
}

fn row(
    judge: &Judge,
    runs: &[Vec<Run>],
    place: Place,
    depth: usize,
    next: Option<&Row>,
    reserve: u64,
    aim: Aim,
) -> Row {
    let layers = judge.chain.layers.len();
    let mut row = Row { best: vec![f64::INFINITY; layers + 1], end: vec![0; layers + 1] };
    for (start, runs) in runs.iter().enumerate() {
        for (end, run) in (start + 1..).zip(runs) {
            let limit = match aim {
                Aim::Period => row.best[start],
                Aim::Fill(limit) => limit,
            };
            if run.forward + run.backward > limit {
                break;
            }
            let (transfer, behind) = match (next, place.link) {
                (Some(next), Some(link)) => (judge.sized.transfer(link, end), next.best[end]),
                _ if end < layers => continue,
                _ => (0.0, 0.0),
            };
            // Nothing is gained by a stage whose followers are worse than the best.
            if behind == f64::INFINITY || behind.max(transfer) >= row.best[start] {
                continue;
            }
            let Some(choice) = judge.choose(run, place.class, depth, reserve) else { continue };
            let value = match aim {
                Aim::Period => choice.period.max(transfer).max(behind),
                Aim::Fill(limit) if choice.period.max(transfer) > limit => continue,
                Aim::Fill(_) => choice.seconds + 2.0 * transfer + behind,
            };
            if value < row.best[start] {
                (row.best[start], row.end[start]) = (value, end as u32);
            }
        }
    }
    row
}

/// The stages that rows describe, the first device's row first.
fn follow<'a>(
    judge: &Judge,
    places: &[Place],
    rows: impl Iterator<Item = &'a Row>,
    reserves: &[u64],
    runs: &mut Runs,
) -> Option<Cut> {
    let mut cut = Cut { stages: Vec::new(), period: 0.0, fill: 0.0 };
    let mut start = 0;
    for (number, (place, row)) in places.iter().zip(rows).enumerate() {
        if row.best[start] == f64::INFINITY {
            return None;
        }
        let end = row.end[start] as usize;
        let run = &runs.of(judge, place.class)[start][end - start - 1];
        let reserve = reserves.get(number).copied().unwrap_or(0);
        let choice = judge.choose(run, place.class, places.len() - number, reserve)?;
        let transfer = place.link.map_or(0.0, |link| judge.sized.transfer(link, end));
        cut.period = cut.period.max(choice.period).max(transfer);
        cut.fill += choice.seconds + 2.0 * transfer;
        cut.stages.push(CutStage { layers: start..end, choice, transfer, backward: run.backward });
        start = end;
    }
    Some(cut)
}

/// The cut that so many micro-batches pass the quickest; bytes to stay free by stage. Exact where there are few places
/// and layers; else among cuts whose period is a little longer than the least.
pub(super) fn best_cut(judge: &Judge, places: &[Place], reserves: &[u64], count: usize) -> Option<Cut> {
    let seconds = |cut: &Cut| cut.fill + count.saturating_sub(1) as f64 * cut.period;
    let mut runs = Runs::default();
    let mut best = cut_by(judge, places, reserves, Aim::Period, &mut runs)?;
    let mut within = |period: f64| cut_by(judge, places, reserves, Aim::Fill(period), &mut runs);
    let least = best.period;
    let mut keep = |cut: &Cut| {
        if seconds(cut) < seconds(&best) {
            best = cut.clone();
        }
    };
    if places.len() * judge.chain.layers.len() > FEW_CUTS {
        PERIODS.iter().filter_map(|more| within(least * more)).for_each(|cut| keep(&cut));
        return Some(best);
    }
    // From the quickest way through on, each next one has a shorter period.
    let mut next = within(f64::INFINITY);
    while let Some(cut) = next {
        keep(&cut);
        next = within(cut.period * (1.0 - 1e-9));
    }
    Some(best)
}

fn cut_by(judge: &Judge, places: &[Place], reserves: &[u64], aim: Aim, runs: &mut Runs) -> Option<Cut> {
    let mut rows: Vec<Row> = Vec::with_capacity(places.len());
    for (behind, place) in places.iter().rev().enumerate() {
        let reserve = reserves.get(places.len() - 1 - behind).copied().unwrap_or(0);
        let runs = runs.of(judge, place.class);
        rows.push(row(judge, runs, *place, behind + 1, rows.last(), reserve, aim));
    }
    follow(judge, places, rows.iter().rev(), reserves, runs)
}

/// Rows of many device lists, of which those with the same end share what is known of it.
#[derive(Default)]
pub(super) struct Suffixes {
    rows: Vec<(Option<usize>, Row)>,
    known: HashMap<(Option<usize>, Place), usize>,
    runs: Runs,
}

impl Suffixes {
    /// The cut of the least period.
    pub fn cut(&mut self, judge: &Judge, places: &[Place]) -> Option<Cut> {
        let mut behind: Option<usize> = None;
        for (depth, place) in places.iter().rev().enumerate() {
            let known = self.known.get(&(behind, *place)).copied();
            let number = known.unwrap_or_else(|| {
                let next = behind.map(|behind| &self.rows[behind].1);
                let runs = self.runs.of(judge, place.class);
                let row = row(judge, runs, *place, depth + 1, next, 0, Aim::Period);
                self.rows.push((behind, row));
                self.known.insert((behind, *place), self.rows.len() - 1);
                self.rows.len() - 1
            });
            behind = Some(number);
        }
        let mut rows = Vec::with_capacity(places.len());
        while let Some(number) = behind {
            rows.push(&self.rows[number].1);
            behind = self.rows[number].0;
        }
        follow(judge, places, rows.into_iter(), &[], &mut self.runs)
    }
}

/// The least that some stage lacks, wherever the chain is cut: bytes, and the place of that stage.
pub(super) fn shortage(judge: &Judge, places: &[Place]) -> (u64, usize) {
    let layers = judge.chain.layers.len();
    let mut behind: Vec<(u64, usize)> = Vec::new();
    for (number, place) in places.iter().enumerate().rev() {
        let depth = places.len() - number;
        let mut here = vec![(u64::MAX, number); layers + 1];
        for (start, least) in here.iter_mut().enumerate().take(layers) {
            let mut run = judge.run(start);
            for end in start + 1..=layers {
                judge.add(&mut run, place.class);
                let after = match behind.get(end) {
                    _ if end == layers => (0, number),
                    Some(after) => *after,
                    None => continue,
                };
                let short = (judge.short(&run, place.class, depth, 0), number).max(after);
                if short.0 < least.0 {
                    *least = short;
                }
            }
        }
        behind = here;
    }
    behind.first().copied().unwrap_or((0, 0))
}

#[cfg(test)]
mod tests {
    use shoal_fleet::{Costs, Fleet};
    use shoal_model::{Chain, presets};
    use shoal_plan::draw::Draw;
    use shoal_plan::one_device::StepShape;
    use shoal_plan::{Activations, DeviceRow, Order};

    use super::super::State;
    use super::super::stages::{Classes, Sized, StateBytes, TensorBytes};
    use super::*;

    /// Every cut of the layers from one on.
    fn every_cut(layers: usize, start: usize, stages: usize) -> Vec<Vec<usize>> {
        if stages == 1 {
            return vec![vec![layers]];
        }
        let with = |end: usize| {
            every_cut(layers, end, stages - 1).into_iter().map(move |mut ends| {
                ends.insert(0, end);
                ends
            })
        };
        (start + 1..layers + 2 - stages).flat_map(with).collect()
    }

    /// Period and fill of a cut; none where a stage does not fit.
    fn judged(judge: &Judge, places: &[Place], ends: &[usize]) -> Option<(f64, f64)> {
        let (mut start, mut period, mut fill) = (0, 0.0f64, 0.0);
        for (number, (place, end)) in places.iter().zip(ends).enumerate() {
            let mut run = judge.run(start);
            (start..*end).for_each(|_| judge.add(&mut run, place.class));
            let choice = judge.choose(&run, place.class, places.len() - number, 0)?;
            let transfer = place.link.map_or(0.0, |link| judge.sized.transfer(link, *end));
            period = period.max(choice.period).max(transfer);
            fill += choice.seconds + 2.0 * transfer;
            start = *end;
        }
        Some((period, fill))
    }

    #[test]
    fn no_cut_is_better_than_the_one_found() {
        let (mut with, mut without) = (0, 0);
        for seed in 0..300 {
            let mut draw = Draw::new(seed);
            let config = presets::gpt2(300 * draw.below(8) + 50, 64, 1 + draw.below(5), 4, 16);
            let chain = Chain::new(&config);
            let devices = 1 + draw.below(3);
            let nodes = (0..devices).map(|number| {
                let kind = draw.of(&["V100", "T4", "A100"]);
                let memory = draw.of(&[1_000_000, 2_000_000, 100_000_000]);
                let network = draw.of(&["10 Mbit/s", "100 Mbit/s", "10 Gbit/s"]);
                format!(
                    "[[node]]\nname = \"n{number}\"\nhost_memory = \"1 GiB\"\nnetwork = \"{network}\"\n\
                     devices = [{{ kind = \"{kind}\", memory = \"{memory} B\" }}]\n"
                )
            });
            let fleet = Fleet::parse(&nodes.collect::<String>(), "fleet.toml").unwrap();
            let rows: Vec<DeviceRow> = fleet
                .devices
                .iter()
                .map(|device| DeviceRow {
                    name: device.name.clone(),
                    budget_bytes: device.memory_bytes,
                    workspace_bytes: 0,
                    stash: None,
                    leeway: 0,
                    puts_off: 0,
                })
                .collect();
            let step = StepShape { global_batch: 8, sequence: 16, ..StepShape::ADAM };
            let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).unwrap();
            let mut classes = Classes::new(&fleet, &rows);
            let places: Vec<Place> = (0..devices)
                .map(|number| Place {
                    class: classes.of[number],
                    link: (number + 1 < devices).then(|| classes.link(number, number + 1)),
                })
                .collect();
            let mut sized = Sized::new(&chain, step, &costs, &classes, 1 + draw.below(4));
            sized.know_links(&classes);
            let layers = chain.layers.len();
            let tensors = TensorBytes::all(&chain, step);
            let judge = Judge {
                chain: &chain,
                step,
                classes: &classes,
                sized: &sized,
                state: &StateBytes::new(layers, step, &tensors, State::Divided, 1 + draw.below(2)),
                order: draw.of(&[Order::Varuna, Order::OneForwardOneBackward]),
                activations: &[Activations::Keep, Activations::Recompute, Activations::Offload],
            };
            let all: Vec<(f64, f64)> = every_cut(layers, 0, devices)
                .iter()
                .filter_map(|ends| judged(&judge, &places, ends))
                .collect();
            let period = all.iter().map(|(period, _)| *period).fold(f64::INFINITY, f64::min);
            let found = Suffixes::default().cut(&judge, &places);
            assert_eq!(found.map_or(f64::INFINITY, |cut| cut.period), period, "seed {seed}");
            for count in [1, 3, 20] {
                let seconds = |(period, fill): (f64, f64)| fill + (count - 1) as f64 * period;
                let least = all.iter().map(|both| seconds(*both)).fold(f64::INFINITY, f64::min);
                match best_cut(&judge, &places, &[], count) {
                    Some(cut) => {
                        assert!(seconds((cut.period, cut.fill)) <= least * (1.0 + 1e-9), "seed {seed}");
                        with += 1;
                    }
                    None => {
                        assert_eq!(least, f64::INFINITY, "seed {seed}");
                        without += 1;
                    }
                }
            }
        }
        assert!(with > 300 && without > 30, "{with} cut, {without} fit nowhere");
    }
}
