//! Planning anew when machines have gone, come or slowed down.

use std::collections::BTreeSet;

use shoal_fleet::{Costs, Fleet};
use shoal_model::{Chain, Precision, presets};
use shoal_plan::difference::Difference;
use shoal_plan::draw::Draw;
use shoal_plan::one_device::StepShape;
use shoal_plan::{Plan, Purpose, compile, verify_all};
use shoal_planner::auto::Request;
use shoal_planner::replan::moving::{self, Moving};
use shoal_planner::replan::{InForce, Replanned, replan, replan_as};
use shoal_planner::{GPU_PROCESS_BYTES, GPU_WORKSPACE_BYTES};

/// Of a GPU, what its process takes for itself.
const RESERVED_MEGABYTES: u64 = (GPU_PROCESS_BYTES + GPU_WORKSPACE_BYTES) / 1_000_000 + 1;

const STEP: StepShape = StepShape {
    global_batch: 8,
    sequence: 16,
    precision: Precision::Fp32,
    optimizer_states: 2,
    gradients: shoal_plan::GradientWire::Fp32,
};

/// Machines, each a table of a fleet file and its name.
fn fleet(machines: &[String]) -> Fleet {
    Fleet::parse(&machines.concat(), "fleet.toml").unwrap()
}

fn machine(name: &str, devices: &str) -> String {
    format!(
        "[[node]]\nname = \"{name}\"\nhost_memory = \"1 GiB\"\nnetwork = \"10 Gbit/s\"\ndevices = [{devices}]\n"
    )
}

/// With its devices as quick as their kinds.
fn plan_for(
    chain: &Chain,
    fleet: &Fleet,
    survive: usize,
    paces: &[u32],
    in_force: Option<InForce>,
) -> Replanned {
    let costs = Costs::new(chain, fleet, None, STEP.precision, STEP.sequence).unwrap();
    let request = Request { survive, ..Request::new(chain, STEP, fleet, &costs) };
    replan(&request, paces, in_force).expect("there is room for it")
}

/// Its devices are the fleet's, it fits them, and its programs are a step.
fn check(planned: &Replanned, chain: &Chain, fleet: &Fleet) {
    let names: Vec<&str> = planned.plan.devices.iter().map(|row| row.name.as_str()).collect();
    assert_eq!(names, fleet.devices.iter().map(|device| device.name.as_str()).collect::<Vec<_>>());
    planned.plan.check(chain).unwrap();
    for (row, memory) in planned.plan.devices.iter().zip(&planned.memory) {
        assert!(memory.total() <= row.budget_bytes, "{}", row.name);
    }
    let programs = compile(&planned.plan, chain, Purpose::Train).unwrap();
    verify_all(&programs, &planned.plan, chain, Purpose::Train).unwrap();
    assert!(planned.step_seconds.is_finite() && planned.step_seconds > 0.0);
    let Moving { seconds, bytes, .. } = planned.moving;
    assert!(
        seconds.is_finite() && seconds >= 0.0 && (bytes == 0) == (seconds == 0.0),
        "{:?}",
        planned.moving
    );
}

/// Every slice that has no holder outside some machines.
fn lost_with(plan: &Plan, fleet: &Fleet, gone: &BTreeSet<usize>) -> usize {
    let names: BTreeSet<&str> = fleet
        .devices
        .iter()
        .filter(|device| gone.contains(&device.node))
        .map(|device| device.name.as_str())
        .collect();
    Difference::new(plan, plan, |device| !names.contains(device)).lost.len()
}

#[test]
fn whoever_is_lost_training_goes_on_by_a_plan_for_those_who_are_left() {
    let (mut restored, mut moved, mut fewer) = (0, 0, 0);
    for seed in 0..40 {
        let mut draw = Draw::new(seed);
        let chain = Chain::new(&presets::gpt2(100 + 300 * draw.below(3), 64, 2 + draw.below(4), 4, 16));
        let machines: Vec<String> = (0..2 + draw.below(4))
            .map(|number| {
                let devices = (0..1 + draw.below(2)).map(|_| {
                    let (kind, memory) = (draw.of(&["V100", "T4"]), draw.of(&[4, 8, 100]));
                    format!("{{ kind = \"{kind}\", memory = \"{} MB\" }}", RESERVED_MEGABYTES + memory)
                });
                machine(&format!("n{number}"), &devices.collect::<Vec<_>>().join(", "))
            })
            .collect();
        let before = fleet(&machines);
        let count = before.nodes.len();
        let survive = draw.below(count.min(3));
        let paces: Vec<u32> = before.devices.iter().map(|_| draw.of(&[100, 100, 100, 250])).collect();
        let first = plan_for(&chain, &before, survive, &paces, None);
        check(&first, &chain, &before);
        assert_eq!((first.survives, first.moving), (survive, Moving::default()), "seed {seed}");

        let gone: BTreeSet<usize> = (0..1 + draw.below(count - 1)).map(|_| draw.below(count)).collect();
        if gone.len() <= survive {
            assert_eq!(lost_with(&first.plan, &before, &gone), 0, "seed {seed}");
        }
        let alive: Vec<bool> = before.devices.iter().map(|device| !gone.contains(&device.node)).collect();
        let left: Vec<String> = machines
            .iter()
            .enumerate()
            .filter(|(node, _)| !gone.contains(node))
            .map(|(_, machine)| machine.clone())
            .collect();
        let after = fleet(&left);
        let paces: Vec<u32> = paces.iter().zip(&alive).filter(|(_, a)| **a).map(|(pace, _)| *pace).collect();
        let in_force = InForce { plan: &first.plan, alive: &alive };
        let next = plan_for(&chain, &after, survive, &paces, Some(in_force));
        check(&next, &chain, &after);
        assert_eq!(next.survives, survive.min(after.nodes.len() - 1), "seed {seed}");
        assert_eq!(next.moving, moving::between(Some(in_force), &next.plan, &after));
        assert_eq!(next.moving.restores, lost_with(&first.plan, &before, &gone) > 0, "seed {seed}");
        restored += usize::from(next.moving.restores);
        moved += usize::from(!next.moving.restores && next.moving.bytes > 0);
        fewer += usize::from(next.survives < survive);
    }
    assert!(restored >= 3 && moved >= 8 && fewer >= 3, "{restored} restored, {moved} moved, {fewer} fewer");
}

fn v100s(names: &[&str]) -> Fleet {
    let machines: Vec<String> = names.iter().map(|name| machine(name, "{ kind = \"V100\" }")).collect();
    fleet(&machines)
}

fn small() -> Chain {
    Chain::new(&presets::gpt2(512, 256, 6, 4, 64))
}

#[test]
fn where_nothing_changes_nothing_moves() {
    let (chain, fleet) = (small(), v100s(&["a", "b", "c"]));
    let first = plan_for(&chain, &fleet, 1, &[100; 3], None);
    let in_force = InForce { plan: &first.plan, alive: &[true; 3] };
    let again = plan_for(&chain, &fleet, 1, &[100; 3], Some(in_force));
    assert_eq!(again.moving, Moving::default());
    assert_eq!(again.plan, first.plan);
    // The same machines, named in another order.
    let turned = v100s(&["c", "a", "b"]);
    let again = plan_for(&chain, &turned, 1, &[100; 3], Some(in_force));
    assert_eq!(again.moving, Moving::default());
    check(&again, &chain, &turned);
}

/// A machine that comes back under its name comes back with empty hands.
#[test]
fn a_name_is_not_its_state() {
    let (chain, fleet) = (small(), v100s(&["a", "b", "c"]));
    let first = plan_for(&chain, &fleet, 1, &[100; 3], None);
    let in_force = InForce { plan: &first.plan, alive: &[true, false, true] };
    let again = plan_for(&chain, &fleet, 1, &[100; 3], Some(in_force));
    assert!(again.moving.bytes > 0 && !again.moving.restores, "{:?}", again.moving);
}

#[test]
fn a_slow_device_gets_less_to_do() {
    let chain = Chain::new(&presets::gpt2(512, 1024, 8, 8, 64));
    let fleet = v100s(&["a", "b", "c", "d"]);
    let first = plan_for(&chain, &fleet, 0, &[100; 4], None);
    let in_force = InForce { plan: &first.plan, alive: &[true; 4] };
    let paces = [100, 300, 100, 100];
    let next = plan_for(&chain, &fleet, 0, &paces, Some(in_force));
    check(&next, &chain, &fleet);
    let samples = |plan: &Plan, device: usize| -> usize {
        let compute = plan.layers.iter().flat_map(|row| &row.compute).filter(|one| one.device == device);
        compute.flat_map(|one| &one.micro_batches).map(|batch| batch.count()).sum()
    };
    assert!(samples(&first.plan, 1) > 0);
    assert!(samples(&next.plan, 1) < samples(&first.plan, 1), "{:?}", next.plan.layers);
    // The others wait for it, or do its work.
    assert!(next.step_seconds > first.step_seconds && next.step_seconds < 2.0 * first.step_seconds);
    // What staying would have cost is said beside it: the plan in force on the devices as they are.
    let [before, after] = [plan_for(&chain, &fleet, 0, &[100; 4], Some(in_force)), next];
    let staying = [before.staying_seconds.unwrap(), after.staying_seconds.unwrap()];
    assert!((staying[0] - first.step_seconds).abs() < 1e-9 * first.step_seconds);
    assert!(staying[1] > staying[0] && staying[1] >= after.step_seconds / 1.02, "{staying:?}");
}

/// Machines that are alike take the places of a plan that was found for others.
#[test]
fn a_plan_that_was_found_serves_a_fleet_like_the_one_it_was_for() {
    let (chain, before, after) = (small(), v100s(&["a", "b", "c"]), v100s(&["d", "a", "b"]));
    let first = plan_for(&chain, &before, 1, &[100; 3], None);
    let in_force = InForce { plan: &first.plan, alive: &[true, true, false] };
    let costs = Costs::new(&chain, &after, None, STEP.precision, STEP.sequence).unwrap();
    let request = Request { survive: 1, ..Request::new(&chain, STEP, &after, &costs) };
    let again = replan_as(&request, &[100; 3], Some(in_force), &first.plan).expect("it fits");
    check(&again, &chain, &after);
    assert!((again.step_seconds - first.step_seconds).abs() < 1e-9 * first.step_seconds);
    // Those who stay keep what they have: what moves is the newcomer's share, as after a search.
    let searched = plan_for(&chain, &after, 1, &[100; 3], Some(in_force));
    assert!(again.moving.bytes > 0 && again.moving.bytes <= searched.moving.bytes, "{:?}", again.moving);
    let two = v100s(&["a", "b"]);
    let costs = Costs::new(&chain, &two, None, STEP.precision, STEP.sequence).unwrap();
    let request = Request { survive: 1, ..Request::new(&chain, STEP, &two, &costs) };
    assert!(replan_as(&request, &[100; 2], Some(in_force), &first.plan).is_none(), "it is for three");
}

/// Whoever saves first stands first, and each set of holders is named once.
#[test]
fn holders_are_named_once_in_the_tables_order() {
    let (chain, fleet) = (small(), v100s(&["a", "b", "c"]));
    let planned = plan_for(&chain, &fleet, 1, &[100; 3], None);
    let holders = planned.plan.holders();
    let distinct: BTreeSet<&Vec<usize>> = holders.iter().collect();
    assert_eq!(distinct.len(), holders.len());
    for row in &planned.plan.tensors {
        for devices in row.slices().values() {
            assert!(holders.contains(devices) && devices.len() > 1, "{devices:?} of {holders:?}");
        }
    }
}
