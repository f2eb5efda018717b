use proptest::prelude::*;
use shoal_fleet::{Costs, Fleet};
use shoal_model::{Chain, Precision, presets};
use shoal_plan::draw::{self, Draw};
use shoal_plan::{Activations, Holder, Purpose, StepShape, verify_all};
use shoal_sim::{FleetWorld, Settings, simulate};

use super::*;

/// Transformers large enough that their tensors are cut, and small ones of every kind.
fn model() -> impl Strategy<Value = (Chain, usize)> {
    let large = (1usize..5, any::<bool>(), 0..3, 1usize..4).prop_map(|(layers, tied, kind, scale)| {
        let mut config = match kind {
            0 => presets::gpt2(96, 32 * scale, layers, 4, 16),
            1 => presets::bert(96, 32 * scale, layers, 4, 48 * scale, 16),
            _ => presets::llama(96, 32 * scale, layers, 4, 2, 48 * scale, 16, 1e4, tied),
        };
        config.tied = tied;
        (Chain::new(&config), 16)
    });
    prop_oneof![2 => large, 1 => any::<u64>().prop_map(|seed| draw::model(&mut Draw::new(seed)))]
}

fn fleet(nodes: &[(usize, usize, bool)], host_kib: u64) -> Fleet {
    let kinds = ["T4", "A100", "L4", "P40"];
    let node = |(at, (kind, count, linked)): (usize, &(usize, usize, bool))| {
        let link = if *linked { "device_link = \"40 GB/s\"" } else { "" };
        format!(
            "[[node]]\nname = \"n{at}\"\ndevices = [{{ kind = \"{}\", count = {count} }}, {{ kind = \"{}\" }}]\n\
             host_memory = \"{host_kib} KiB\"\nnetwork = \"{} Gbit/s\"\n{link}\n",
            kinds[*kind],
            kinds[(kind + 1) % kinds.len()],
            1 + 9 * at,
        )
    };
    let text: String = nodes.iter().enumerate().map(node).collect();
    Fleet::parse(&text, "fleet").expect("a sound fleet")
}

#[derive(Clone, Debug)]
struct Asked {
    chain: Chain,
    nodes: Vec<(usize, usize, bool)>,
    step: StepShape,
    /// By device, budgets in shares of all the state.
    budgets: Vec<f64>,
    host_kib: u64,
    activations: Option<Activations>,
}

fn asked() -> impl Strategy<Value = Asked> {
    let nodes = proptest::collection::vec((0usize..4, 1usize..3, any::<bool>()), 1..3);
    let step = (1usize..17, any::<bool>());
    let kinds = [None, Some(Activations::Keep), Some(Activations::Recompute), Some(Activations::Offload)];
    let budgets = proptest::collection::vec(0.1..3.0f64, 6);
    (model(), nodes, step, budgets, prop_oneof![Just(64u64), Just(1 << 14)], 0usize..4).prop_map(
        move |((chain, sequence), nodes, (global_batch, half), budgets, host_kib, kind)| {
            let precision = if half { Precision::Bf16 } else { Precision::Fp32 };
            let step = StepShape { global_batch, sequence, precision, ..StepShape::ADAM };
            Asked { chain, nodes, step, budgets, host_kib, activations: kinds[kind] }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_planned_compiles_verifies_and_fits(asked in asked()) {
        let chain = &asked.chain;
        let fleet = fleet(&asked.nodes, asked.host_kib);
        let costs = Costs::new(chain, &fleet, None, asked.step.precision, asked.step.sequence).expect("known kinds");
        let state = 16.0 * chain.tensors.iter().map(|tensor| tensor.elements()).sum::<usize>() as f64;
        let mut request = Request::new(chain, asked.step, &fleet, &costs);
        request.activations = asked.activations;
        for (row, share) in request.devices.iter_mut().zip(&asked.budgets) {
            (row.budget_bytes, row.workspace_bytes) = ((share * state) as u64, 1 << 10);
        }
        match plan(&request) {
            Ok(Planned { decision, plan, programs, memory }) => {
                prop_assert_eq!(verify_all(&programs, &plan, chain, Purpose::Train), Ok(()));
                for (memory, row) in memory.iter().zip(&plan.devices) {
                    prop_assert!(memory.total() <= row.budget_bytes);
                }
                prop_assert_eq!(decision.devices.iter().map(|share| share.samples).sum::<usize>(), asked.step.global_batch);
                let kept: f64 = decision.devices.iter().map(|share| share.state).sum::<f64>() + decision.hosts.iter().sum::<f64>();
                prop_assert!((kept - 1.0).abs() < 1e-9);
                prop_assert!(decision.seconds > 0.0);
            }
            Err(
                ShardedError::NoRoom { .. }
                | ShardedError::TooTight { .. }
                | ShardedError::TooManySamples { .. },
            ) => {}
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}

fn text_of(nodes: &[(&str, usize, &str, &str)]) -> String {
    let node = |(devices, count, host, network): &(&str, usize, &str, &str)| {
        let name = devices.to_lowercase().replace(|c: char| !c.is_ascii_alphanumeric(), "");
        format!(
            "[[node]]\nname = \"{name}\"\ncount = {count}\ndevices = [{devices}]\nhost_memory = \"{host}\"\nnetwork = \"{network}\"\n"
        )
    };
    nodes.iter().map(node).collect()
}

fn step(global_batch: usize, sequence: usize) -> StepShape {
    StepShape { global_batch, sequence, precision: Precision::Fp16, ..StepShape::ADAM }
}

/// Plans a preset on a fleet.
fn planned(preset: &str, step: StepShape, fleet: &Fleet) -> (Chain, Costs, Planned) {
    let chain = Chain::new(&presets::preset(preset).expect("a preset"));
    let costs = Costs::new(&chain, fleet, None, step.precision, step.sequence).expect("known kinds");
    let planned = plan(&Request::new(&chain, step, fleet, &costs)).expect("it fits");
    (chain, costs, planned)
}

#[test]
fn the_simulator_agrees_with_the_cost_model() {
    for (preset, batch, nodes) in [
        ("gpt2-1.5b", 256, vec![("{ kind = \"A100\", count = 4 }", 4, "256 GiB", "100 Gbit/s")]),
        (
            "gpt2-1.5b",
            512,
            vec![
                ("{ kind = \"A6000\" }, { kind = \"L4\", count = 2 }", 2, "256 GiB", "100 Gbit/s"),
                ("{ kind = \"P40\", count = 2 }", 1, "128 GiB", "100 Gbit/s"),
            ],
        ),
        ("llama-7b", 256, vec![("{ kind = \"A100\", count = 8 }", 1, "512 GiB", "100 Gbit/s")]),
    ] {
        let fleet = Fleet::parse(&text_of(&nodes), "fleet").expect("a sound fleet");
        let (chain, costs, planned) = planned(preset, step(batch, 512), &fleet);
        let layout = Layout::new(&planned.plan, &chain);
        let world = FleetWorld::new(&fleet, &costs, &layout);
        let simulated = simulate(&planned.programs, &layout, &world, Settings::default()).expect("it runs");
        let ratio = simulated.seconds / planned.decision.seconds;
        assert!(
            (0.95..1.1).contains(&ratio),
            "{preset}: {} s, predicted {:?}",
            simulated.seconds,
            planned.decision
        );
    }
}

#[test]
fn a_slow_device_with_memory_keeps_state_and_computes_little_or_nothing() {
    // Two fast GPUs that cannot hold the model's 109 GB of state, and old ones that can.
    let nodes = [("{ kind = \"A100\", count = 2 }, { kind = \"P40\", count = 4 }", 1, "1 GiB", "100 Gbit/s")];
    let fleet = Fleet::parse(&text_of(&nodes), "fleet").expect("a sound fleet");
    let (_, _, planned) = planned("llama-7b", step(16, 512), &fleet);
    let Decision { devices, hosts, .. } = &planned.decision;
    let old: usize = devices[2..].iter().map(|share| share.samples).sum();
    assert!(old <= 2, "{devices:?}");
    assert!(devices[2..].iter().all(|share| share.state > 0.05), "{devices:?}");
    assert!(devices.iter().any(|share| share.way.is_none() && share.state > 0.05), "{devices:?}");
    assert_eq!(hosts, &[0.0]);
}

#[test]
fn hosts_keep_what_devices_cannot() {
    let nodes = [("{ kind = \"A100\", count = 2 }", 1, "256 GiB", "100 Gbit/s")];
    let fleet = Fleet::parse(&text_of(&nodes), "fleet").expect("a sound fleet");
    let (_, _, planned) = planned("llama-7b", step(64, 512), &fleet);
    assert!(planned.decision.hosts[0] > 0.2, "{:?}", planned.decision);
    let held = planned.plan.tensors.iter().flat_map(|row| &row.optimizer);
    assert!(held.clone().any(|held| held.holder == Holder::Host(0)));
    assert!(planned.memory[0].host > 20 << 30, "{:?}", planned.memory[0]);
}

#[test]
fn what_does_not_fit_is_refused_with_what_is_short() {
    let nodes = [("{ kind = \"T4\" }", 1, "8 GiB", "10 Gbit/s")];
    let fleet = Fleet::parse(&text_of(&nodes), "fleet").expect("a sound fleet");
    let chain = Chain::new(&presets::preset("llama-7b").expect("a preset"));
    let step = step(8, 512);
    let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).expect("known kinds");
    let error = plan(&Request::new(&chain, step, &fleet, &costs)).expect_err("108 GB do not fit");
    let ShardedError::NoRoom { needed_bytes, room_bytes, short_bytes, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(*short_bytes, needed_bytes - room_bytes);
    assert!(*short_bytes > 80_000_000_000 && error.hint().is_some(), "{error}");
    // Where the state has room but the samples have not, that is what is short.
    let many = StepShape { global_batch: 100_000, ..step };
    let nodes = [("{ kind = \"T4\" }", 1, "512 GiB", "10 Gbit/s")];
    let fleet = Fleet::parse(&text_of(&nodes), "fleet").expect("a sound fleet");
    let error = plan(&Request::new(&chain, many, &fleet, &costs)).expect_err("they do not fit");
    let short = match &error {
        ShardedError::NoRoom { short_bytes, samples: 100_000, .. } => *short_bytes,
        ShardedError::TooManySamples { short_bytes, samples: 100_000, .. } => *short_bytes,
        other => panic!("{other}"),
    };
    assert!(short > 1 << 30, "{error}");
    let nothing = StepShape { global_batch: 0, ..step };
    let error = plan(&Request::new(&chain, nothing, &fleet, &costs)).expect_err("there is nothing to do");
    assert!(matches!(error, ShardedError::EmptyBatch));
}
