//! State on several machines.

use std::collections::BTreeSet;

use shoal_fleet::{Costs, Fleet};
use shoal_model::{Chain, Precision, presets};
use shoal_plan::difference::Difference;
use shoal_plan::draw::{self, Draw};
use shoal_plan::one_device::StepShape;
use shoal_plan::{Plan, Purpose, compile, verify_all};
use shoal_planner::auto::{self, AutoError, Request, Shape};
use shoal_planner::mirrors::{MirrorError, mirrored};

fn machines(count: usize, devices: usize, host_memory: &str) -> Fleet {
    let text = format!(
        "[[node]]\nname = \"m\"\ncount = {count}\nhost_memory = \"{host_memory}\"\nnetwork = \"1 Gbit/s\"\n\
         devices = [{{ kind = \"V100\", count = {devices} }}]\n"
    );
    Fleet::parse(&text, "fleet.toml").unwrap()
}

fn chain() -> Chain {
    Chain::new(&presets::gpt2(50, 64, 6, 4, 32))
}

const STEP: StepShape = StepShape {
    global_batch: 8,
    sequence: 32,
    precision: Precision::Fp32,
    optimizer_states: 2,
    gradients: shoal_plan::GradientWire::Fp32,
};

/// Slices that nobody has once some machines are gone.
fn lost(plan: &Plan, fleet: &Fleet, gone: &[usize]) -> usize {
    let names: BTreeSet<&str> = gone
        .iter()
        .flat_map(|node| &fleet.devices[fleet.nodes[*node].devices.clone()])
        .map(|device| device.name.as_str())
        .collect();
    Difference::new(plan, plan, |device| !names.contains(device)).lost.len()
}

/// All ways to choose so many of the first numbers.
fn choices(count: usize, of: usize) -> Vec<Vec<usize>> {
    (0..1usize << of)
        .filter(|set| set.count_ones() as usize == count)
        .map(|set| (0..of).filter(|number| set & (1 << number) != 0).collect())
        .collect()
}

/// Whatever the table, any so many machines may go; and the mirrored table is a step like any other.
#[test]
fn no_machines_take_state_with_them() {
    let mut was_lost = 0;
    for seed in 0..30 {
        let mut draw = Draw::new(seed);
        let fleet = machines(2 + draw.below(4), 1 + draw.below(3), "8 GiB");
        let costs = Costs::new(&chain(), &fleet, None, STEP.precision, STEP.sequence).unwrap();
        let chain = chain();
        let survive = 1 + draw.below(fleet.nodes.len() - 1);
        let shape = draw.of(&[Shape::Pipeline, Shape::Sharded, Shape::Mixed, Shape::Burst]);
        let shapes = [shape];
        let request = Request { shapes: &shapes, ..Request::new(&chain, STEP, &fleet, &costs) };
        let Ok(plain) = auto::plan(&request) else { continue };
        let found = auto::plan(&Request { survive, ..request }).unwrap();
        assert_eq!(found.survives, survive);
        let plan = found.best.plan;
        let programs = compile(&plan, &chain, Purpose::Train).unwrap();
        verify_all(&programs, &plan, &chain, Purpose::Train).unwrap();
        for gone in choices(survive, fleet.nodes.len()) {
            was_lost += usize::from(lost(&plain.best.plan, &fleet, &gone) > 0);
            assert_eq!(lost(&plan, &fleet, &gone), 0, "seed {seed}, without {gone:?}");
        }
        assert_eq!(mirrored(&plan, &fleet, survive).unwrap(), plan, "what has its mirrors needs no more");
        // Mirrors are rated: what they hold is in the forecast.
        let hosts: u64 = found.best.memory.iter().map(|memory| memory.host).sum();
        let mirrors = |plan: &Plan| plan.tensors.iter().map(|row| row.optimizer.len()).sum::<usize>();
        assert_eq!(hosts > 0, mirrors(&plan) > mirrors(&plain.best.plan), "seed {seed}");
    }
    assert!(was_lost > 10, "{was_lost}");
}

/// Random tables of every kind, not only those that searches find.
#[test]
fn any_table_can_be_mirrored() {
    let mut mirrors = 0;
    for seed in 0..300 {
        let mut draw = Draw::new(seed);
        let (chain, sequence) = draw::model(&mut draw);
        let step = draw::step(&mut draw, sequence);
        let mut plan = draw::table(&chain, step, 6, &mut draw);
        let devices = plan.devices.len();
        let fleet = match devices.is_multiple_of(2) && draw.chance(50) {
            true => machines(devices / 2, 2, "8 GiB"),
            false => machines(devices, 1, "8 GiB"),
        };
        if fleet.nodes.len() < 2 {
            continue;
        }
        for (row, device) in plan.devices.iter_mut().zip(&fleet.devices) {
            row.name.clone_from(&device.name);
        }
        let survive = 1 + draw.below(fleet.nodes.len() - 1);
        let safe = mirrored(&plan, &fleet, survive).unwrap();
        safe.check(&chain).unwrap();
        let programs = compile(&safe, &chain, Purpose::Train).unwrap();
        verify_all(&programs, &safe, &chain, Purpose::Train).unwrap();
        for gone in choices(survive, fleet.nodes.len()) {
            assert_eq!(lost(&safe, &fleet, &gone), 0, "seed {seed}, without {gone:?}");
        }
        mirrors += usize::from(safe != plan);
    }
    assert!(mirrors > 50, "{mirrors}");
}

#[test]
fn too_few_machines_or_too_little_memory_is_refused() {
    let chain = chain();
    let fleet = machines(2, 1, "8 GiB");
    let costs = Costs::new(&chain, &fleet, None, STEP.precision, STEP.sequence).unwrap();
    let request = Request { survive: 2, ..Request::new(&chain, STEP, &fleet, &costs) };
    let refused = auto::plan(&request).err().expect("two machines are not three");
    assert!(matches!(refused, AutoError::Mirrors(MirrorError::Machines { survive: 2, machines: 2 })));
    assert_eq!(auto::plan_surviving(&request).unwrap().survives, 1);
    let roomy = machines(3, 1, "8 GiB");
    let costs = Costs::new(&chain, &roomy, None, STEP.precision, STEP.sequence).unwrap();
    let shapes = [Shape::Sharded];
    let request = Request { shapes: &shapes, ..Request::new(&chain, STEP, &roomy, &costs) };
    let plan = auto::plan(&request).unwrap().best.plan;
    let refused = mirrored(&plan, &machines(3, 1, "1 KiB"), 2).unwrap_err();
    assert!(matches!(refused, MirrorError::Room { short_bytes: 1.., .. }), "{refused}");
}
