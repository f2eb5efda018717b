//! State on two machines.

use std::collections::BTreeSet;

use shoal_fleet::{Costs, Fleet};
use shoal_model::{Chain, Precision, presets};
use shoal_plan::difference::Difference;
use shoal_plan::one_device::StepShape;
use shoal_plan::{Purpose, compile, verify_all};
use shoal_planner::{mirrors, mixed};

/// Whichever machine goes, every slice is still somewhere; and the mirrored table is a step like any other.
#[test]
fn no_machine_takes_state_with_it() {
    let chain = Chain::new(&presets::gpt2(50, 64, 6, 4, 32));
    let step = StepShape { global_batch: 8, sequence: 32, precision: Precision::Fp32, optimizer_states: 2 };
    let text = "[[node]]\nname = \"m\"\ncount = 3\nhost_memory = \"8 GiB\"\nnetwork = \"1 Gbit/s\"\ndevices = [{ kind = \"V100\", count = 2 }]\n";
    let fleet = Fleet::parse(text, "fleet.toml").unwrap();
    let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).unwrap();
    let plain = mixed::plan(&chain, step, &fleet, &costs).unwrap().unwrap().plan;
    let plan = mirrors::mirrored(&plain, &fleet);
    let programs = compile(&plan, &chain, Purpose::Train).unwrap();
    verify_all(&programs, &plan, &chain, Purpose::Train).unwrap();
    for node in &fleet.nodes {
        let gone: BTreeSet<&str> =
            fleet.devices[node.devices.clone()].iter().map(|device| device.name.as_str()).collect();
        let lost = |plan| Difference::new(plan, plan, |device| !gone.contains(device)).lost;
        assert!(!lost(&plain).is_empty());
        assert!(lost(&plan).is_empty(), "{}", node.name);
    }
    assert_eq!(mirrors::mirrored(&plan, &fleet), plan, "what has a mirror needs no other");
}
