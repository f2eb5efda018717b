//! What must hold for every decision: the search is never beaten by trying everything, and never slower than data
//! parallelism or the greedy rule.

use proptest::prelude::*;
use shoal_fleet::Fleet;

use super::testing::{Drawn, chain, costs, fleet};
use super::*;

fn drawn() -> impl Strategy<Value = Drawn> {
    let parameters = prop_oneof![Just(0u64), 1000u64..5_000_000];
    (0.0..2e-3, 1e-6..1e-3, parameters, 1u64..4_000_000)
        .prop_map(|(fixed, each, parameters, output_bytes)| Drawn { fixed, each, parameters, output_bytes })
}

fn fleets() -> impl Strategy<Value = Fleet> {
    prop_oneof![Just((1, 1)), Just((1, 2)), Just((1, 3)), Just((1, 4)), Just((2, 2))]
        .prop_map(|(nodes, devices)| fleet(nodes, devices))
}

/// Every way to give each layer any number of devices, near each other or far apart.
fn all_decisions(problem: &Problem) -> Vec<Decision> {
    let order = problem.order();
    let counts: Vec<usize> = (1..=order.len().min(problem.global_batch)).collect();
    let sets = place::candidates_of(problem.fleet, &order, &counts);
    decisions_of(&sets, problem.inputs.len()).collect()
}

fn decisions_of(sets: &[Vec<usize>], layers: usize) -> impl Iterator<Item = Decision> + '_ {
    let decision = move |mut number: usize| {
        let mut next = |_| {
            let set = sets[number % sets.len()].clone();
            number /= sets.len();
            set
        };
        Decision { devices: (0..layers).map(&mut next).collect() }
    };
    (0..sets.len().pow(layers as u32)).map(decision)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_chain_is_planned_better_by_trying_everything(
        layers in prop::collection::vec(drawn(), 1..6),
        fleet in fleets(),
        global_batch in 1usize..17,
        share in 0.0f64..1.0,
    ) {
        let costs = costs(&layers, &fleet);
        let problem = chain(&costs, &fleet, global_batch);
        let ways = Ways::new(&fleet, 0.0);
        let all: Vec<Estimate> =
            all_decisions(&problem).iter().map(|decision| timeline::estimate(&problem, &ways, decision)).collect();
        let least = |budget: f64| {
            let within = all.iter().filter(|estimate| estimate.device_seconds <= budget * (1.0 + 1e-9));
            within.map(|estimate| estimate.step_seconds).fold(f64::INFINITY, f64::min)
        };
        let fastest = Planner::new(&problem).unwrap().plan(Goal::Fastest).unwrap().estimate.step_seconds;
        prop_assert!((fastest - least(f64::INFINITY)).abs() <= 1e-9 * fastest);
        let device_seconds = || all.iter().map(|estimate| estimate.device_seconds);
        let (low, high) =
            (device_seconds().fold(f64::INFINITY, f64::min), device_seconds().fold(0.0, f64::max));
        let budget = low + share * (high - low);
        let within = Planner::new(&problem).unwrap().plan(Goal::DeviceSeconds(budget)).unwrap().estimate;
        prop_assert!(within.device_seconds <= budget * (1.0 + 1e-6));
        prop_assert!(within.step_seconds <= least(budget) * (1.0 + 1e-9), "{} > {}", within.step_seconds, least(budget));
        let refused = Planner::new(&problem).unwrap().plan(Goal::DeviceSeconds(low * 0.99)).unwrap_err();
        prop_assert!(matches!(refused, BurstError::Budget { .. }), "{}", refused);
    }

    /// Every point of the frontier is one that trying everything does not beat.
    #[test]
    fn the_frontier_is_the_frontier_of_everything(
        layers in prop::collection::vec(drawn(), 1..5),
        fleet in fleets(),
        global_batch in 1usize..17,
    ) {
        let costs = costs(&layers, &fleet);
        let problem = chain(&costs, &fleet, global_batch);
        let ways = Ways::new(&fleet, 0.0);
        let found = Planner::new(&problem).unwrap().frontier(f64::INFINITY);
        prop_assert!(!found.is_empty());
        for decision in all_decisions(&problem) {
            let other = timeline::estimate(&problem, &ways, &decision);
            let matched = found.iter().any(|planned| {
                planned.estimate.step_seconds <= other.step_seconds * (1.0 + 1e-9)
                    && planned.estimate.device_seconds <= other.device_seconds * (1.0 + 1e-9)
            });
            prop_assert!(matched, "{other:?} is in front of the frontier");
        }
    }

    #[test]
    fn forks_are_never_slower_than_data_parallelism_or_the_greedy_rule(
        layers in prop::collection::vec(drawn(), 7),
        fleet in prop_oneof![Just((1, 4)), Just((1, 8)), Just((2, 4))],
        global_batch in 1usize..33,
    ) {
        let fleet = super::testing::fleet(fleet.0, fleet.1);
        let costs = costs(&layers, &fleet);
        let mut problem = chain(&costs, &fleet, global_batch);
        // A fork of three branches, one of which forks again, and an edge around them.
        problem.inputs = vec![vec![], vec![0], vec![0], vec![2], vec![2], vec![0, 1, 3, 4], vec![5]];
        let ways = Ways::new(&fleet, 0.0);
        let plain = timeline::estimate(&problem, &ways, &problem.data_parallel());
        let greedy = timeline::estimate(&problem, &ways, &greedy::decide(&problem, &ways, &greedy::Rule::of(&fleet)));
        let ours = Planner::new(&problem).unwrap().plan(Goal::Fastest).unwrap().estimate;
        prop_assert!(ours.step_seconds <= plain.step_seconds && ours.step_seconds <= greedy.step_seconds);
        let same = Planner::new(&problem).unwrap().plan(Goal::DeviceSeconds(greedy.device_seconds)).unwrap().estimate;
        prop_assert!(same.step_seconds <= greedy.step_seconds);
        prop_assert!(same.device_seconds <= greedy.device_seconds * (1.0 + 1e-6));
    }

    /// Branches are searched by rule: beside everything that neighbouring devices can do, little is lost.
    #[test]
    fn forks_are_planned_nearly_as_well_by_trying_everything(
        layers in prop::collection::vec(drawn(), 5),
        devices in 2usize..4,
        global_batch in 1usize..17,
    ) {
        let fleet = fleet(1, devices);
        let costs = costs(&layers, &fleet);
        let mut problem = chain(&costs, &fleet, global_batch);
        problem.inputs = vec![vec![], vec![0], vec![0], vec![2], vec![1, 3]];
        let ways = Ways::new(&fleet, 0.0);
        let ranges = (0..devices).flat_map(|first| (first + 1..=devices).map(move |end| (first..end).collect()));
        let spaced = place::candidates(&fleet, &problem.order(), global_batch);
        let mut sets: Vec<Vec<usize>> = ranges.chain(spaced).filter(|set: &Vec<usize>| set.len() <= global_batch).collect();
        sets.sort();
        sets.dedup();
        let all = decisions_of(&sets, 5);
        let seconds = all.map(|decision| timeline::estimate(&problem, &ways, &decision).step_seconds);
        let least = seconds.fold(f64::INFINITY, f64::min);
        let planner = Planner::new(&problem).unwrap();
        let fastest = planner.plan(Goal::Fastest).unwrap().estimate.step_seconds;
        prop_assert!(fastest <= 1.02 * least, "{fastest} > {least}");
    }

    /// Memory is kept, and where it is short the search still finds what trying everything finds.
    #[test]
    fn no_device_is_overfilled(
        layers in prop::collection::vec(drawn(), 1..5),
        kept in prop::collection::vec(0u64..64, 4),
        global_batch in 1usize..13,
    ) {
        let fleet = fleet(1, 4);
        let costs = costs(&layers, &fleet);
        let mut problem = chain(&costs, &fleet, global_batch);
        for (bytes, kept) in problem.memory.iter_mut().zip(&kept) {
            *bytes = LayerBytes { state: 1 << 20, kept_a_sample: kept << 22 };
        }
        let ways = Ways::new(&fleet, 0.0);
        let fits = all_decisions(&problem).into_iter().filter(|decision| problem.overfilled(decision).is_none());
        let least = fits.map(|decision| timeline::estimate(&problem, &ways, &decision).step_seconds);
        let least = least.fold(f64::INFINITY, f64::min);
        match Planner::new(&problem).unwrap().plan(Goal::Fastest) {
            Ok(planned) => {
                prop_assert_eq!(problem.overfilled(&planned.decision), None);
                prop_assert!(planned.estimate.step_seconds <= least * (1.0 + 1e-9));
            }
            Err(error) => {
                prop_assert!(least.is_infinite());
                prop_assert!(matches!(error, BurstError::Memory { .. }), "{error}");
                prop_assert!(error.hint().is_some());
            }
        }
    }
}

#[test]
fn branches_that_do_not_divide_go_side_by_side() {
    let long = Drawn { fixed: 4e-3, each: 1e-6, parameters: 0, output_bytes: 100 };
    let short = Drawn { fixed: 1e-5, ..long.clone() };
    let fleet = fleet(1, 4);
    let costs = costs(&[short.clone(), long.clone(), long, short], &fleet);
    let mut problem = chain(&costs, &fleet, 16);
    problem.inputs = vec![vec![], vec![0], vec![0], vec![1, 2]];
    let planned = Planner::new(&problem).unwrap().plan(Goal::Fastest).unwrap();
    let [one, other] = [&planned.decision.devices[1], &planned.decision.devices[2]];
    assert!(one.iter().all(|device| !other.contains(device)), "{one:?} {other:?}");
    let serial = Planner::new(&problem).unwrap().estimate(&problem.data_parallel()).step_seconds;
    assert!(planned.estimate.step_seconds < 0.6 * serial);
}

#[test]
fn a_layer_that_does_not_divide_leaves_devices_to_others() {
    let divides = Drawn { fixed: 0.0, each: 1e-3, parameters: 0, output_bytes: 100 };
    let does_not = Drawn { fixed: 5e-3, each: 0.0, parameters: 1_000_000, output_bytes: 100 };
    let fleet = fleet(1, 4);
    let costs = costs(&[divides, does_not], &fleet);
    let problem = chain(&costs, &fleet, 16);
    let planned = Planner::new(&problem).unwrap().plan(Goal::Amplification(1.1)).unwrap();
    assert_eq!(planned.decision.devices.iter().map(Vec::len).collect::<Vec<_>>(), [4, 1]);
    let plain = Planner::new(&problem).unwrap().estimate(&problem.data_parallel());
    assert!(planned.estimate.device_seconds < plain.device_seconds);
    let background = background::Background::new(0.5e-3);
    // Three devices have the 15 ms of the second layer, and less what moving takes.
    let gaps = background.devices_worth(&planned.estimate) * planned.estimate.step_seconds;
    assert!(gaps > 3.0 * 14e-3 && gaps <= 3.0 * 15e-3, "{gaps}");
}
