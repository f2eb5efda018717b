//! Small improvements of a decision with branches, judged by the timeline: layers, whole branches and pairs of both are
//! tried on other devices. The search prepares branches by rule (one after another, or in lanes of fixed devices); on a
//! few devices there are better ways between those, and few enough to try.

use super::Decision;
use super::planner::Choice;
use super::structure::{Branch, Series};

/// With more devices the sets would be too many, and what is left to gain too little.
const DEVICES_MAX: usize = 8;
/// Layers times devices that the timeline is asked about from each start.
const WORK_MAX: usize = 500_000;
/// Starts beside the best decision and data parallelism.
const STARTS_MAX: usize = 24;

/// Improves the choice's best decision, and plain data parallelism beside it, as long as something is found and within a
/// bound on work; keeps the best of all.
pub(super) fn polish(choice: &mut Choice, series: &Series, sets: &[Vec<usize>], order: &[usize]) {
    let links: Vec<Vec<Vec<usize>>> = links(series);
    if order.len() > DEVICES_MAX || links.is_empty() {
        return;
    }
    let mut sets = sets.to_vec();
    for first in 0..order.len() {
        sets.extend((first + 1..=order.len()).map(|end| order[first..end].to_vec()));
    }
    sets.retain(|set| set.len() <= choice.problem.global_batch);
    sets.sort();
    sets.dedup();
    for start in starts(choice, &links, &sets, order.len()) {
        let mut climbing = choice.afresh();
        climbing.offer(start);
        let mut left = WORK_MAX / (choice.problem.inputs.len() * order.len());
        while let Some(best) = climbing.best.as_ref().map(|best| best.decision.clone()) {
            if !improve(&mut climbing, &best, &links, &sets, &mut left) {
                choice.offer(best);
                break;
            }
        }
    }
}

/// Where to climb from: the best decision, plain data parallelism, and the best of what either becomes when two parts of a
/// fork are moved at once, though each of these is worse: a third move may then be better than all.
fn starts(choice: &Choice, links: &[Vec<Vec<usize>>], sets: &[Vec<usize>], devices: usize) -> Vec<Decision> {
    let best = choice.best.as_ref().map(|best| best.decision.clone());
    let mut starts: Vec<Decision> =
        [best, Some(choice.problem.data_parallel())].into_iter().flatten().collect();
    let pairs: usize = links.iter().map(|groups| groups.len() * groups.len() / 2).sum();
    let work = starts.len() * pairs * sets.len() * sets.len() * choice.problem.inputs.len() * devices;
    if work > WORK_MAX {
        return starts;
    }
    let mut moved: Vec<(f64, Decision)> = Vec::new();
    for start in &starts {
        for (one, other) in links.iter().flat_map(|groups| disjoint(groups)) {
            for (set, second) in sets.iter().flat_map(|set| sets.iter().map(move |second| (set, second))) {
                let mut decision = start.clone();
                for (layers, set) in [(one, set), (other, second)] {
                    layers.iter().for_each(|layer| decision.devices[*layer].clone_from(set));
                }
                let mut offered = choice.afresh();
                offered.offer(decision);
                moved.extend(offered.best.map(|best| (best.estimate.step_seconds, best.decision)));
            }
        }
    }
    moved.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.devices.cmp(&b.1.devices)));
    moved.dedup_by(|a, b| a.1.devices == b.1.devices);
    starts.extend(moved.into_iter().take(STARTS_MAX).map(|(_, decision)| decision));
    starts
}

/// Every two groups that have no layer in common.
fn disjoint(groups: &[Vec<usize>]) -> impl Iterator<Item = (&Vec<usize>, &Vec<usize>)> {
    let pairs = groups.iter().enumerate();
    pairs
        .flat_map(|(place, one)| groups[place + 1..].iter().map(move |other| (one, other)))
        .filter(|(one, other)| !one.iter().any(|layer| other.contains(layer)))
}

/// Tries everything around a decision; whether something is better. The first move that is ends the round.
fn improve(
    choice: &mut Choice,
    best: &Decision,
    links: &[Vec<Vec<usize>>],
    sets: &[Vec<usize>],
    left: &mut usize,
) -> bool {
    let mut tried = |moved: &[(&[usize], &Vec<usize>)]| {
        if *left == 0 {
            return false;
        }
        *left -= 1;
        let mut decision = best.clone();
        for (layers, set) in moved {
            layers.iter().for_each(|layer| decision.devices[*layer].clone_from(set));
        }
        choice.offer(decision)
    };
    let every_layer: Vec<Vec<usize>> = (0..best.devices.len()).map(|layer| vec![layer]).collect();
    for group in every_layer.iter().chain(links.iter().flatten()) {
        if sets.iter().any(|set| tried(&[(group, set)])) {
            return true;
        }
    }
    for groups in links {
        for (one, other) in disjoint(groups) {
            for set in sets {
                if sets.iter().any(|second| tried(&[(one, set), (other, second)])) {
                    return true;
                }
            }
        }
    }
    false
}

/// Of every fork, however deep, what may be moved: its branches and their layers.
fn links(series: &Series) -> Vec<Vec<Vec<usize>>> {
    let mut found = Vec::new();
    for branches in series.links.iter().filter(|branches| branches.len() > 1) {
        let whole = branches.iter().map(Branch::layers).filter(|layers| !layers.is_empty());
        let mut groups: Vec<Vec<usize>> = whole.collect();
        let single: Vec<Vec<usize>> = groups.iter().flatten().map(|layer| vec![*layer]).collect();
        groups.extend(single);
        groups.sort();
        groups.dedup();
        found.push(groups);
    }
    for branch in series.links.iter().flatten() {
        if let Branch::Series(inner) = branch {
            found.extend(links(inner));
        }
    }
    found
}
