//! Pipelines of groups.

use shoal_fleet::{Costs, Fleet};
use shoal_model::{Chain, Precision, presets};
use shoal_plan::draw::Draw;
use shoal_plan::one_device::StepShape;
use shoal_plan::{Purpose, compile, verify_all};
use shoal_planner::auto::{self, Request, Shape};
use shoal_planner::mixed::{MixedPlanned, plan, plan_singles};
use shoal_planner::{GPU_PROCESS_BYTES, GPU_WORKSPACE_BYTES};

/// Of a GPU, what its process takes for itself.
const RESERVED_MEGABYTES: u64 = (GPU_PROCESS_BYTES + GPU_WORKSPACE_BYTES) / 1_000_000 + 1;

/// What a mixture must be quicker by than every pure shape.
const WORTH: f64 = 1.2;

fn node(name: &str, devices: &str, link: &str) -> String {
    format!(
        "[[node]]\nname = \"{name}\"\nhost_memory = \"244 GiB\"\nnetwork = \"10 Gbit/s\"\n{link}devices = [{devices}]\n"
    )
}

fn gpus(kind: &str, count: usize) -> String {
    format!("{{ kind = \"{kind}\", count = {count} }}")
}

/// Every layer is some stage's, no group lies in two nodes, every device has room, and the programs are a step.
fn check(planned: &MixedPlanned, chain: &Chain, fleet: &Fleet) {
    let mut next = 0;
    for stage in &planned.mixed.stages {
        assert_eq!(stage.layers.start, next);
        next = stage.layers.end;
        assert!(stage.devices.iter().all(|device| fleet.same_node(stage.devices[0], *device)));
    }
    assert_eq!(next, chain.layers.len());
    for (row, memory) in planned.plan.devices.iter().zip(&planned.memory) {
        assert!(memory.total() <= row.budget_bytes, "{}", row.name);
    }
    let programs = compile(&planned.plan, chain, Purpose::Train).unwrap();
    verify_all(&programs, &planned.plan, chain, Purpose::Train).unwrap();
}

#[test]
fn a_model_that_fits_no_device_runs_on_groups_of_mixed_devices() {
    let chain = Chain::new(&presets::gpt2(50257, 1920, 40, 20, 1024));
    let step = StepShape { global_batch: 32, sequence: 1024, precision: Precision::Fp16, ..StepShape::ADAM };
    let link = "device_link = \"50 GB/s\"\n";
    let devices = |kind: &str| format!("{}, {}", gpus(kind, 2), gpus("V100", 2));
    let text = node("a", &devices("A10G"), link) + &node("b", &devices("L4"), link);
    let fleet = Fleet::parse(&text, "fleet.toml").unwrap();
    let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).unwrap();
    let planned = plan(&chain, step, &fleet, &costs, f64::INFINITY).unwrap().expect("it fits two nodes");
    check(&planned, &chain, &fleet);
    assert!(planned.mixed.stages.iter().any(|stage| stage.devices.len() > 1), "{:?}", planned.mixed);
}

/// On two machines of unequal GPUs and 10 Gbit/s, a model whose state fits none of them: `auto` takes a mixture, which is
/// quicker than every pure shape by so much, groups of one device among them.
#[test]
fn mixtures_earn_their_place() {
    let chain = Chain::new(&presets::preset("qwen2-1.5b").unwrap());
    let link = "device_link = \"50 GB/s\"\n";
    for (text, sequence) in [
        (node("a", &gpus("A10G", 4), "") + &node("b", &gpus("T4", 8), ""), 1024),
        (node("a", &gpus("V100", 4), link) + &node("b", &gpus("A10G", 8), ""), 2048),
    ] {
        let fleet = Fleet::parse(&text, "fleet.toml").unwrap();
        let step = StepShape { global_batch: 16, sequence, precision: Precision::Fp16, ..StepShape::ADAM };
        let state_bytes = 16 * chain.parameters() as u64;
        assert!(fleet.devices.iter().all(|device| device.memory_bytes < state_bytes));
        let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).unwrap();
        let found = auto::plan(&Request::new(&chain, step, &fleet, &costs)).unwrap();
        assert_eq!(found.best.shape, Shape::Mixed);
        for (row, memory) in found.best.plan.devices.iter().zip(&found.best.memory) {
            assert!(memory.total() <= row.budget_bytes, "{}", row.name);
        }
        let pure: Vec<f64> = found
            .tried
            .iter()
            .filter(|tried| tried.shape != Shape::Mixed)
            .filter_map(|tried| tried.seconds)
            .collect();
        assert!(pure.len() >= 2, "{:?}", found.tried);
        let least = pure.into_iter().fold(f64::INFINITY, f64::min);
        assert!(least >= WORTH * found.best.simulated.seconds, "{:?}", found.tried);
    }
}

#[test]
fn whatever_the_fleet_what_is_found_fits_and_is_a_step() {
    let (mut groups, mut singles) = (0, 0);
    for seed in 0..20 {
        let mut draw = Draw::new(seed);
        let chain = Chain::new(&presets::gpt2(100 + 300 * draw.below(4), 64, 2 + draw.below(5), 4, 16));
        let nodes = (0..1 + draw.below(4)).map(|number| {
            let devices = (0..1 + draw.below(3)).map(|_| {
                let (kind, memory) = (draw.of(&["V100", "T4", "A10G"]), draw.of(&[2, 4, 8, 100]));
                format!("{{ kind = \"{kind}\", memory = \"{} MB\" }}", RESERVED_MEGABYTES + memory)
            });
            let devices = devices.collect::<Vec<_>>().join(", ");
            node(&format!("n{number}"), &devices, "")
        });
        let fleet = Fleet::parse(&nodes.collect::<String>(), "fleet.toml").unwrap();
        let step = StepShape {
            global_batch: 1 + draw.below(12),
            sequence: 16,
            precision: draw.of(&[Precision::Fp32, Precision::Fp16]),
            ..StepShape::ADAM
        };
        let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).unwrap();
        if let Some(planned) = plan(&chain, step, &fleet, &costs, f64::INFINITY).unwrap() {
            check(&planned, &chain, &fleet);
            groups += 1;
        }
        if let Some(planned) = plan_singles(&chain, step, &fleet, &costs, f64::INFINITY).unwrap() {
            check(&planned, &chain, &fleet);
            assert!(planned.mixed.stages.iter().all(|stage| stage.devices.len() == 1));
            singles += 1;
        }
    }
    assert!((5..20).contains(&groups) && (5..20).contains(&singles), "{groups} groups, {singles} in a row");
}
