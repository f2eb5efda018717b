//! Runs over traces whose outcome can be said by hand.

use std::collections::BTreeSet;

use shoal_fleet::Trace;
use shoal_model::{Chain, presets};
use shoal_plan::one_device::StepShape;
use shoal_plan::{Activations, DeviceRow, Order};
use shoal_planner::breakdown::Breakdown;
use shoal_planner::pipeline::{Pipeline, Replica, Stage, State, table};
use shoal_planner::run::{Morphing, Report, Settings, Step, over};

/// Every machine a replica of the whole model; ten seconds of work between them.
fn replicas(machines: &BTreeSet<String>) -> Option<Step> {
    let chain = Chain::new(&presets::gpt2(50, 16, 2, 4, 12));
    let count = machines.len();
    if count == 0 {
        return None;
    }
    let step = StepShape { global_batch: 12, sequence: 8, ..StepShape::ADAM };
    let pipeline = Pipeline {
        replicas: (0..count)
            .map(|replica| Replica {
                samples: 12 * replica / count..12 * (replica + 1) / count,
                micro_batch: 12,
                stages: vec![Stage {
                    device: replica,
                    layers: 0..chain.layers.len(),
                    activations: Activations::Keep,
                    stash: None,
                }],
            })
            .collect(),
        order: Order::OneForwardOneBackward,
        state: State::Whole,
    };
    let rows = machines.iter().map(|name| DeviceRow {
        name: name.clone(),
        budget_bytes: u64::MAX,
        workspace_bytes: 0,
        stash: None,
        leeway: 0,
        puts_off: 0,
    });
    let seconds = 10.0 / count as f64;
    let device = Breakdown {
        computing: 0.9 * seconds,
        network: 0.06 * seconds,
        bubble: 0.04 * seconds,
        ..Breakdown::default()
    };
    let plan = table(&chain, step, rows.collect(), &pipeline);
    Some(Step { plan, seconds, devices: vec![device; count] })
}

const LIVE: Morphing =
    Morphing::Live { notice_seconds: 1.0, switch_seconds: 1.0, lost_steps: 1.5, bytes_per_second: 1e9 };

fn play(trace: &str, morphing: Morphing) -> Report {
    let settings = Settings {
        morphing,
        checkpoint_every_seconds: 100.0,
        checkpoint_seconds: 0.0,
        devices_per_machine: 1,
        dollars_per_machine_hour: 3.6,
        state_bytes: 12,
    };
    over(&Trace::parse(trace, "trace.csv").unwrap(), &settings, &mut replicas)
}

/// The plain form: seconds and machines.
const STEADY: &str = "0,2\n1001,2\n1001,0\n";

#[test]
fn an_undisturbed_run_trains_all_the_time() {
    let report = play(STEADY, LIVE);
    // One second until the first plan runs, then five seconds a step; the end costs the step under way and half of
    // the one before it.
    assert!((report.steps - 198.5).abs() < 1e-6, "{report:?}");
    assert!((report.spent.useful - 0.9 * 1985.0).abs() < 1e-6);
    assert!(
        (report.spent.wait - 0.06 * 1985.0).abs() < 1e-6
            && (report.spent.bubble - 0.04 * 1985.0).abs() < 1e-6
    );
    assert!((report.spent.morph - 2.0).abs() < 1e-6, "{report:?}");
    assert!((report.dollars - 2.0 * 1001.0 * 3.6 / 3600.0).abs() < 1e-6, "{report:?}");
}

#[test]
fn every_device_second_is_accounted_for() {
    let trace = "0,4\n300,3\n500,6\n505,2\n900,5\n1500,1\n2000,0\n";
    for morphing in [LIVE, Morphing::Restart { restart_seconds: 60.0 }] {
        let report = play(trace, morphing);
        let paid = report.dollars / 3.6 * 3600.0;
        assert!((report.spent.total() - paid).abs() < 1e-6 * paid, "{report:?}");
        assert!(report.steps > 0.0 && report.morphs > 3);
    }
}

#[test]
fn moving_state_loses_less_than_starting_again() {
    let trace = "0,4\n300,3\n600,4\n900,3\n1200,4\n1500,3\n2000,0\n";
    let (live, restart) = (play(trace, LIVE), play(trace, Morphing::Restart { restart_seconds: 60.0 }));
    assert!(live.steps > restart.steps && live.spent.lost < restart.spent.lost, "{live:?} {restart:?}");
    assert_eq!(live.restores, 0);
}

/// A plan that a machine more would make better by nothing is kept.
#[test]
fn a_change_that_does_not_pay_is_not_made() {
    let trace = "0,12\n10,13\n11.5,12\n13,13\n14.5,12\n16,13\n17.5,12\n20,0\n";
    let slow = Morphing::Live {
        notice_seconds: 100.0,
        switch_seconds: 100.0,
        lost_steps: 1.5,
        bytes_per_second: 1e9,
    };
    let report = play(trace, slow);
    assert!(report.morphs < report.changes, "{report:?}");
}
