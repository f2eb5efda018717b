//! Pipelines of groups.

use shoal_fleet::{Costs, Fleet};
use shoal_model::{Chain, Precision, presets};
use shoal_plan::one_device::StepShape;
use shoal_plan::{Purpose, compile, verify_all};
use shoal_planner::mixed::plan;

fn fleet() -> Fleet {
    let node = |name: &str, devices: &str| {
        format!(
            "[[node]]\nname = \"{name}\"\nhost_memory = \"256 GiB\"\nnetwork = \"10 Gbit/s\"\ndevice_link = \"50 GB/s\"\ndevices = [{devices}]\n"
        )
    };
    let text = node("a", "{ kind = \"A10G\", count = 2 }, { kind = \"V100\", count = 2 }")
        + &node("b", "{ kind = \"L4\", count = 2 }, { kind = \"V100\", count = 2 }");
    Fleet::parse(&text, "fleet.toml").unwrap()
}

#[test]
fn a_model_that_fits_no_device_runs_on_two_groups() {
    let chain = Chain::new(&presets::gpt2(50257, 1920, 40, 20, 1024));
    let step =
        StepShape { global_batch: 32, sequence: 1024, precision: Precision::Fp16, optimizer_states: 2 };
    let fleet = fleet();
    let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).unwrap();
    let planned = plan(&chain, step, &fleet, &costs).unwrap().expect("it fits two nodes");
    // Two nodes; the tied head is with the embedding again.
    assert_eq!(planned.mixed.stages.len(), 3);
    assert_eq!(planned.mixed.stages[0].devices, planned.mixed.stages[2].devices);
    println!("{:?} {:.3} s", planned.mixed, planned.simulated.seconds);
    for (row, memory) in planned.plan.devices.iter().zip(&planned.memory) {
        println!("{} {} MiB of {}", row.name, memory.total() >> 20, row.budget_bytes >> 20);
        assert!(memory.total() <= row.budget_bytes);
    }
    let programs = compile(&planned.plan, &chain, Purpose::Train).unwrap();
    verify_all(&programs, &planned.plan, &chain, Purpose::Train).unwrap();
}
