//! What must hold for every table made of a burst decision, the search's own or any other: it compiles, its programs
//! verify and meet, and it is only handed out if every device's memory holds it.

use std::collections::BTreeMap;

use proptest::prelude::*;
use shoal_fleet::{Costs, Device, Fleet, Link, Node};
use shoal_model::convolutional::{self, Body, ConvolutionalConfig};
use shoal_model::{Chain, Precision, presets};
use shoal_plan::{
    Activations, Holder, Layout, Plan, Purpose, StepShape, compile, compile_paced, forecast, verify_all,
};
use shoal_planner::GPU_PROCESS_BYTES;
use shoal_planner::burst::table::{State, table_with};
use shoal_planner::burst::{BurstError, Decision, Goal, Planner, Problem, table};
use shoal_sim::{FleetWorld, Settings, simulate};

/// Two nodes of so many devices.
fn fleet(devices: usize, memory_bytes: u64) -> Fleet {
    let link = Link::new(1e9, 1e-6);
    let node = |node: usize| Node {
        name: format!("node{node}"),
        zone: 0,
        host_memory_bytes: 1 << 36,
        host_bytes_per_second: 1e11,
        disk: None,
        network: Link::new(1e8, 1e-5),
        device_link: Some(link.clone()),
        devices: node * devices..(node + 1) * devices,
    };
    let device = |device: usize| Device {
        name: format!("gpu{device}"),
        kind: "A100".into(),
        node: device / devices,
        memory_bytes,
        dollars_per_hour: 0.0,
        on_demand_dollars_per_hour: None,
        spot: false,
        host_link: link.clone(),
        host_link_stated: true,
    };
    Fleet {
        nodes: (0..2).map(node).collect(),
        devices: (0..2 * devices).map(device).collect(),
        zones: vec!["zone".into()],
        zone_link: Link::NONE,
        zone_pairs: BTreeMap::new(),
        node_pairs: BTreeMap::new(),
    }
}

fn convolutional(body: Body, first_channels: usize, size: usize) -> Chain {
    Chain::convolutional(&ConvolutionalConfig { body, first_channels, classes: 5, channels: 3, size })
}

/// Small models of every shape: plain, tied, padded, residual with norms over the batch or groups of it, branched.
fn chain() -> impl Strategy<Value = Chain> {
    (0..6, any::<bool>(), 1usize..4, prop_oneof![Just(None), (1usize..5).prop_map(Some)]).prop_map(
        |(kind, flag, layers, group)| {
            let mut chain = match kind {
                0 => Chain { padded: flag, ..Chain::new(&presets::gpt2(50, 16, layers, 4, 12)) },
                1 => Chain::new(&presets::llama(50, 16, layers, 4, 2, 24, 12, 1e4, flag)),
                2 => convolutional(
                    Body::Vgg { groups: vec![1, layers], classifier: vec![8], dropout: flag },
                    4,
                    8,
                ),
                3 | 4 => convolutional(
                    Body::Resnet { blocks: vec![1, layers, 1, 1], bottleneck: flag, widening: 1 },
                    4,
                    32,
                ),
                _ => convolutional(Body::Inception { dropout: flag }, 4, 80),
            };
            chain.set_norm_group(group);
            chain
        },
    )
}

fn step(global_batch: usize, half: bool) -> StepShape {
    let precision = if half { Precision::Bf16 } else { Precision::Fp32 };
    StepShape { global_batch, sequence: 8, precision, ..StepShape::ADAM }
}

/// What compiles, verifies and meets; the most bytes that a device needs.
fn checked(plan: &Plan, chain: &Chain) -> Result<u64, TestCaseError> {
    prop_assert_eq!(plan.check(chain), Ok(()));
    let programs = compile(plan, chain, Purpose::Train).unwrap();
    prop_assert_eq!(verify_all(&programs, plan, chain, Purpose::Train), Ok(()));
    let needed = programs.iter().map(|program| forecast(program, plan, chain).total());
    Ok(needed.max().unwrap_or(0))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_planned_compiles_verifies_and_fits(
        chain in chain(),
        devices in 1usize..4,
        global_batch in 1usize..17,
        half in any::<bool>(),
        amplification in prop::option::of(1.0f64..4.0),
    ) {
        let (fleet, step) = (fleet(devices, 1 << 34), step(global_batch, half));
        let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).unwrap();
        let problem = Problem::new(&chain, step, &fleet, &costs);
        let planner = Planner::new(&problem).unwrap();
        let planned = planner.plan(amplification.map_or(Goal::Fastest, Goal::Amplification)).unwrap();
        let plain = planner.estimate(&problem.data_parallel());
        prop_assert!(amplification.is_some() || planned.estimate.step_seconds <= plain.step_seconds);
        let plan = table(&chain, step, &fleet, &planned.decision).unwrap();
        prop_assert!(checked(&plan, &chain)? <= 1 << 34);
    }

    /// Any decision is a table, with state whole or sliced, kept or recomputed.
    #[test]
    fn every_decision_is_a_table(
        chain in chain(),
        devices in 1usize..4,
        global_batch in 1usize..9,
        draws in prop::collection::vec((0usize..6, 1usize..7), 120),
        sliced in any::<bool>(),
        recompute in any::<bool>(),
    ) {
        let (fleet, step) = (fleet(devices, 1 << 34), step(global_batch, false));
        let all = fleet.devices.len();
        let of = |layer: usize| {
            let (first, count) = draws[layer % draws.len()];
            (0..count.min(all).min(global_batch)).map(|place| (first + place) % all).collect()
        };
        let decision = Decision { devices: (0..chain.layers.len()).map(of).collect() };
        let state = if sliced { State::Sliced } else { State::Whole };
        let activations = if recompute { Activations::Recompute } else { Activations::Keep };
        checked(&table_with(&chain, step, &fleet, &decision, state, activations), &chain)?;
    }
}

#[test]
fn short_memory_slices_the_state_then_recomputes_then_says_how_much_is_short() {
    let chain = Chain::new(&presets::gpt2(50, 64, 3, 4, 16));
    let step = StepShape { sequence: 16, ..step(8, false) };
    let decision = Decision { devices: vec![(0..4).collect(); chain.layers.len()] };
    let needed = |state: State, activations: Activations| {
        let plan = table_with(&chain, step, &fleet(2, 1 << 34), &decision, state, activations);
        checked(&plan, &chain).unwrap()
    };
    let whole = needed(State::Whole, Activations::Keep);
    let sliced = needed(State::Sliced, Activations::Keep);
    let recomputed = needed(State::Sliced, Activations::Recompute);
    assert!(recomputed < sliced && sliced < whole, "{recomputed} {sliced} {whole}");
    let made = |budget: u64| table(&chain, step, &fleet(2, budget + GPU_PROCESS_BYTES), &decision);
    let is_sliced = |plan: &Plan| {
        let row = &plan.tensors[0].optimizer;
        row.iter()
            .any(|held| held.holder == Holder::Device(0) && held.slice.count() < plan.tensors[0].elements)
    };
    let activations = |plan: &Plan| plan.layers[1].compute[0].activations;
    assert!(!is_sliced(&made(whole).unwrap()));
    let plan = made(whole - 1).unwrap();
    assert!(is_sliced(&plan) && activations(&plan) == Activations::Keep);
    let plan = made(sliced - 1).unwrap();
    assert!(is_sliced(&plan) && activations(&plan) == Activations::Recompute);
    match made(recomputed - 1).unwrap_err() {
        BurstError::Memory { needed_bytes, budget_bytes, .. } => {
            assert_eq!((needed_bytes, budget_bytes), (recomputed, recomputed - 1));
        }
        other => panic!("{other}"),
    }
}

/// Data parallelism, whose step is what its gradients' sums leave of the backward, by the search's model and played through.
#[test]
fn the_simulator_agrees_with_the_cost_model() {
    let chain = Chain::convolutional(&convolutional::preset("vgg16").unwrap());
    let step = StepShape {
        global_batch: 256,
        sequence: 1,
        precision: Precision::Bf16,
        optimizer_states: 1,
        gradients: Default::default(),
    };
    let a100s = "host_memory = \"512 GiB\"\nnetwork = \"100 Gbit/s\"\ndevices = [{ kind = \"A100\", count";
    for (count, each, link) in [
        (8, 1, ""),
        (1, 8, ""),
        (1, 8, "device_link = \"300 GB/s\""),
        (2, 4, "device_link = \"300 GB/s\""),
        (2, 4, ""),
    ] {
        let text = format!("[[node]]\ncount = {count}\n{link}\n{a100s} = {each} }}]\n");
        let fleet = Fleet::parse(&text, "fleet").unwrap();
        let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).unwrap();
        let problem = Problem::new(&chain, step, &fleet, &costs);
        let decision = problem.data_parallel();
        let estimated = Planner::new(&problem).unwrap().estimate(&decision).step_seconds;
        let plan = table(&chain, step, &fleet, &decision).unwrap();
        let layout = Layout::new(&plan, &chain);
        let world = FleetWorld::new(&fleet, &costs, &layout);
        let programs = compile_paced(&plan, &chain, Purpose::Train, &world).unwrap();
        let simulated = simulate(&programs, &layout, &world, Settings::default()).unwrap().seconds;
        let ratio = simulated / estimated;
        assert!((0.99..1.09).contains(&ratio), "{text}: estimated {estimated}, simulated {simulated}");
    }
}
