//! A device is lost in the middle of a step, at any of its instructions: the others stop, say where they stand, agree and
//! settle. Then every slice that survives is at one step, in the bits of the run that nothing interrupted, and nothing but
//! the state is left in memory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use crate::common::{HOST_BYTES, RandomBatch, classes, fill};
use shoal_engine::{EngineError, Executor, ModelState, StepInput, Tiers};
use shoal_kernels::{Arena, CpuDevice, Device, LateDevice, Lateness};
use shoal_model::{Chain, Precision};
use shoal_net::{Fabric, Settings, in_process};
use shoal_nn::{Decay, OptimizerKind, OptimizerSettings};
use shoal_plan::draw::{self, Draw};
use shoal_plan::memory::forecast_in;
use shoal_plan::{
    Instruction, Lane, Layout, Moved, Op, Plan, Program, Purpose, Samples, Slice, Standing, StepShape, Tier,
    agree, compile, verify_all,
};

/// Tables in every test run.
const CASES: u64 = 30;

/// The number of no device.
const NOBODY: usize = usize::MAX;

/// Steps that the lost device was to see: it is lost in one of the first two, and nobody gets past the one after.
const STEPS: u64 = 4;

/// A slice by its device, tensor, memory and first element.
type Place = (usize, usize, Tier, usize);

/// The bits of a slice's parameters and of each of its optimizer's states.
type Bits = Vec<Vec<u32>>;

struct Case {
    chain: Chain,
    plan: Plan,
    settings: OptimizerSettings,
    programs: Vec<Program>,
}

fn case(seed: u64) -> Case {
    let mut draw = Draw::new(seed);
    let adam = OptimizerKind::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 };
    let settings = OptimizerSettings {
        kind: draw.of(&[adam, adam, OptimizerKind::Sgd { momentum: 0.9 }]),
        lr: 1e-3,
        weight_decay: 0.1,
        decay: Decay::Matrices,
        clip_norm: draw.of(&[Some(1.0), None]),
    };
    let (chain, sequence) = draw::model(&mut draw);
    let shape = draw::step(&mut draw, sequence);
    let optimizer_states = settings.state_names().len();
    let shape = StepShape { precision: Precision::Fp32, optimizer_states, ..shape };
    let mut plan = draw::table(&chain, shape, 5, &mut draw);
    for device in &mut plan.devices {
        device.workspace_bytes = CpuDevice::workspace_bytes(1);
    }
    let programs = compile(&plan, &chain, Purpose::Train).unwrap();
    verify_all(&programs, &plan, &chain, Purpose::Train).unwrap();
    Case { chain, plan, settings, programs }
}

/// A device of the table, and what its memories hold before the first step.
struct Member {
    executor: Executor,
    tiers: Tiers,
    used: (u64, u64),
}

impl Member {
    fn new(
        case: &Case,
        layout: &Layout,
        program: &Program,
        fabric: Arc<Fabric>,
        disk: &std::path::Path,
        lateness: Option<Lateness>,
    ) -> Member {
        let (index, budget) = (program.device, forecast_in(program, layout).total());
        let (name, host) = (format!("device {index}"), format!("host of device {index}"));
        let device: Arc<dyn Device> = match lateness {
            Some(lateness) => {
                let budget = budget - CpuDevice::workspace_bytes(1);
                Arc::new(LateDevice::new(&name, budget, lateness).unwrap())
            }
            // NaN in fresh memory: a read of something nothing wrote shows.
            None => Arc::new(CpuDevice::with_arena(Arena::poisoned(&name, budget).unwrap(), 1).unwrap()),
        };
        let tiers = Tiers::around(device, &host, 1, HOST_BYTES, disk).unwrap();
        let mut state = ModelState::allocate_share(&tiers, layout, index, Some(&case.settings)).unwrap();
        state.load(&tiers, layout.chain, &[], 0, |spec, _, out| fill(spec, out)).unwrap();
        let (chain, sequence) = (layout.chain.clone(), layout.plan.sequence);
        let executor = Executor::with(tiers.clone(), Some(fabric), chain, sequence, state).unwrap();
        let used = used(&tiers);
        Member { executor, tiers, used }
    }

    fn step(
        &mut self,
        case: &Case,
        layout: &Layout,
        program: &Program,
        step: u64,
        leaves_updates: bool,
    ) -> Result<(), EngineError> {
        let batch = RandomBatch { classes: classes(&case.chain), step };
        let input = StepInput { leaves_updates, ..StepInput::train(step, 5, 1e-3, &case.settings, &batch) };
        self.executor.run_in(Some(layout), program, &input).map(drop)
    }

    /// Every slice here, its version and its bits.
    fn slices(&self, device: usize, states: usize) -> BTreeMap<Place, (u64, Bits)> {
        let tensors = self.executor.state.tensors.iter().enumerate();
        let all = tensors.flat_map(|(tensor, held)| held.slices.iter().map(move |slice| (tensor, slice)));
        let bits = |(tensor, slice): (usize, &shoal_engine::state::HeldSlice)| {
            let part = |part: usize| {
                slice.get(&self.tiers, part).unwrap().iter().map(|value| value.to_bits()).collect()
            };
            let place = (device, tensor, slice.tier, slice.slice.start);
            (place, (slice.version, (0..=states).map(part).collect()))
        };
        all.map(bits).collect()
    }
}

fn used(tiers: &Tiers) -> (u64, u64) {
    (tiers.device.arena().used(), tiers.host.arena().used())
}

/// Every device's slices after each step, and before the first, of a run that nothing interrupts.
fn uninterrupted(case: &Case, disk: &std::path::Path) -> Vec<BTreeMap<Place, Bits>> {
    let layout = Layout::new(&case.plan, &case.chain);
    let states = case.settings.state_names().len();
    let fabrics = in_process(case.programs.len(), &Settings::default());
    let mut all = vec![BTreeMap::new(); STEPS as usize + 1];
    std::thread::scope(|scope| {
        let members =
            case.programs.iter().zip(fabrics).filter(|(program, _)| !program.instructions.is_empty());
        let threads: Vec<_> = members
            .map(|(program, fabric)| {
                let layout = &layout;
                scope.spawn(move || {
                    let mut member = Member::new(case, layout, program, fabric, disk, None);
                    let mut seen = vec![member.slices(program.device, states)];
                    for step in 0..STEPS {
                        member.step(case, layout, program, step, false).unwrap();
                        seen.push(member.slices(program.device, states));
                    }
                    seen
                })
            })
            .collect();
        for thread in threads {
            for (step, slices) in thread.join().unwrap().into_iter().enumerate() {
                for (place, (version, bits)) in slices {
                    assert_eq!(version, step as u64);
                    all[step].insert(place, bits);
                }
            }
        }
    });
    all
}

#[derive(Clone, Copy, Debug)]
struct Fault {
    device: usize,
    step: u64,
    /// The place in its program that it does not come to: what is under way then is cut off. Past the end it leaves in
    /// good order, and others notice when they need it.
    place: usize,
    /// Another device that stops by itself among its updates, at this place, and is still there: a full disk, say.
    stopped: Option<(usize, usize)>,
    /// By which devices are slow.
    seed: u64,
}

impl Fault {
    /// Whether steps end while updates in other memories are under way, and the fault then meets them.
    fn leaves_updates(&self) -> bool {
        self.seed.is_multiple_of(2)
    }

    /// When devices do what they are asked for, if not at once: a GPU still has work when it is lost, or another is.
    fn lateness(&self) -> Option<Lateness> {
        match self.seed / 2 % 4 {
            0 => Some(Lateness::UntilAsked),
            1 => Some(Lateness::Random(self.seed)),
            _ => None,
        }
    }

    /// A device's program in the step of the fault.
    fn program(&self, program: &Program) -> Program {
        let stops = [Some((self.device, self.place)), self.stopped];
        let stop = stops.into_iter().flatten().find(|(device, _)| *device == program.device);
        let mut program = program.clone();
        if let Some((_, place)) = stop.filter(|(_, place)| *place < program.instructions.len()) {
            // What moves is not done on this lane: it fails as it starts.
            let samples = Samples { start: 0, end: 1 };
            let op = Op::Send { moved: Moved::Activation, layer: 0, reader: 1, samples, to: 0 };
            let failing = Instruction { id: u32::MAX, op, lane: Lane::Compute, after: Vec::new(), ahead: 0 };
            program.instructions.insert(place, failing);
        }
        program
    }

    /// Some of a device's instructions take their time, so that others are ahead of it or it of them. The lost one may
    /// tarry before its end: then the others have come as far as they can without it.
    fn pace(&self, program: &Program) -> Vec<Duration> {
        let mut draw = Draw::new(self.seed * 31 + program.device as u64);
        let (slow, tarries) = (draw.chance(50), draw.chance(50));
        let last = program.instructions.iter().map(|instruction| instruction.id).max().unwrap_or(0);
        let mut pace = vec![Duration::ZERO; last as usize + 1];
        for instruction in &program.instructions {
            let most_us = match instruction.op {
                Op::Update { .. } if slow => 400,
                Op::Backward { .. } if slow => 100,
                _ => 0,
            };
            pace[instruction.id as usize] = Duration::from_micros(draw.below(most_us + 1) as u64);
        }
        let before = program.instructions[..self.place.min(program.instructions.len())].iter();
        let computed = before.rev().find(|instruction| instruction.lane == Lane::Compute);
        if let Some(instruction) = computed.filter(|_| tarries && program.device == self.device) {
            pace[instruction.id as usize] = Duration::from_millis(3);
        }
        pace
    }
}

/// What happened in all faults together.
#[derive(Debug, Default)]
struct Coverage {
    faults: usize,
    rolled_forward: usize,
    stayed: usize,
    all_there_already: usize,
    survivors_behind: usize,
    survivors_partly: usize,
    survivors_without_sums: usize,
    slices_brought_on: HashMap<Tier, usize>,
    lost_slices_with_a_mirror: usize,
    faults_that_lose_slices: usize,
    slices_compared: usize,
}

/// Runs until the fault has stopped everyone, and returns those that are left.
fn interrupt(case: &Case, layout: &Layout, fault: Fault, disk: &std::path::Path) -> Vec<(usize, Member)> {
    let fabrics = in_process(case.programs.len(), &Settings::default());
    std::thread::scope(|scope| {
        let members =
            case.programs.iter().zip(fabrics).filter(|(program, _)| !program.instructions.is_empty());
        let threads: Vec<_> = members
            .map(|(program, fabric)| {
                scope.spawn(move || {
                    let lateness = fault.lateness();
                    let mut member = Member::new(case, layout, program, fabric, disk, lateness);
                    let leaves = fault.leaves_updates();
                    member.executor.set_pace(fault.pace(program));
                    if program.device == fault.device {
                        for step in 0..fault.step {
                            member.step(case, layout, program, step, leaves).unwrap();
                        }
                        let failed = member.step(case, layout, &fault.program(program), fault.step, leaves);
                        assert!(failed.is_err() || fault.place >= program.instructions.len());
                        return None;
                    }
                    let failed = (0..STEPS).find_map(|step| match step == fault.step {
                        true => member.step(case, layout, &fault.program(program), step, leaves).err(),
                        false => member.step(case, layout, program, step, leaves).err(),
                    });
                    let failed = failed.expect("nobody goes on without the one that is lost").to_string();
                    let stopped = fault.stopped.map(|(device, _)| device);
                    let named = [Some(fault.device), stopped].into_iter().flatten();
                    let named =
                        named.map(|device| format!("worker {device}")).any(|name| failed.contains(&name));
                    assert!(named || stopped == Some(program.device), "{failed}: {fault:?}");
                    Some((program.device, member))
                })
            })
            .collect();
        threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
    })
}

/// Slices, whole ones as the table has them, that only the lost device held.
fn expected_losses(plan: &Plan, lost: usize) -> BTreeSet<(usize, Slice)> {
    let rows = plan.tensors.iter().enumerate();
    let slices = rows.flat_map(|(tensor, row)| {
        let survives = |slice: Slice| {
            row.optimizer.iter().any(|held| held.slice == slice && held.holder.device() != lost)
        };
        let all = row.optimizer.iter().map(|held| held.slice);
        all.filter(move |slice| !survives(*slice)).map(move |slice| (tensor, slice))
    });
    slices.collect()
}

/// One fault: afterwards all that survives is at one step.
fn settle_after(
    case: &Case,
    expected: &[BTreeMap<Place, Bits>],
    fault: Fault,
    disk: &std::path::Path,
    coverage: &mut Coverage,
) {
    let layout = Layout::new(&case.plan, &case.chain);
    let states = case.settings.state_names().len();
    let mut left = interrupt(case, &layout, fault, disk);
    let standings: Vec<(usize, Standing)> =
        left.iter_mut().map(|(device, member)| (*device, member.executor.standing().unwrap())).collect();
    let target = agree(&case.plan, &standings).unwrap();
    let lost = expected_losses(&case.plan, fault.device);
    assert_eq!(target.lost.iter().copied().collect::<BTreeSet<_>>(), lost);
    // The lost one may have been the only one that knew the sums of the step before.
    assert!((fault.step.saturating_sub(1)..=fault.step + 1).contains(&target.step), "{target:?}");

    coverage.faults += 1;
    coverage.faults_that_lose_slices += usize::from(!lost.is_empty());
    let behind = standings.iter().filter(|(_, standing)| standing.step < target.step).count();
    coverage.survivors_behind += behind;
    coverage.survivors_partly += standings.iter().filter(|(_, standing)| standing.applied).count();
    coverage.rolled_forward += usize::from(behind > 0);
    coverage.stayed += usize::from(behind == 0 && target.step <= fault.step);
    coverage.all_there_already += usize::from(behind == 0 && target.step > fault.step);

    for ((device, member), (_, standing)) in left.iter_mut().zip(&standings) {
        let without_sums = standing.step < target.step && standing.closing != target.closing;
        coverage.survivors_without_sums += usize::from(without_sums);
        let before = member.slices(*device, states);
        member.executor.settle(target.step, target.closing).unwrap();
        let after = member.slices(*device, states);
        assert_eq!(after.len(), before.len());
        for (place, (version, bits)) in &after {
            assert_eq!(*version, target.step, "{place:?}");
            assert!(*bits == expected[target.step as usize][place], "{place:?} has other bits");
            coverage.slices_compared += 1;
            if before[place].0 < *version {
                *coverage.slices_brought_on.entry(place.2).or_default() += 1;
            }
        }
        assert_eq!(used(&member.tiers), member.used, "device {device} keeps more than its state");
        let settled = member.executor.standing().unwrap();
        assert_eq!((settled.step, settled.applied), (target.step, false));
        assert_eq!(settled.closing, target.closing);
    }
    for row in &case.plan.tensors {
        let of_lost = row.optimizer.iter().filter(|held| held.holder.device() == fault.device);
        let mirrored = of_lost.filter(|held| {
            let same = |other: &&shoal_plan::Held| other.slice == held.slice && other.holder != held.holder;
            row.optimizer.iter().any(|other| same(&other) && other.holder.device() != fault.device)
        });
        coverage.lost_slices_with_a_mirror += mirrored.count();
    }
}

fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|number| number.parse().ok()).unwrap_or(usual)
}

/// Programs of at most so many instructions are stopped at each of them.
const SMALL_PROGRAM: usize = 40;
/// Of longer ones at so many; of all at as many of their updates and what follows.
const RANDOM_PLACES: usize = 6;

fn norm(program: &Program) -> usize {
    let norm = |instruction: &Instruction| instruction.op == Op::GradientNorm;
    program.instructions.iter().position(norm).expect("every device that takes part has the norm")
}

/// Where a program is stopped.
fn places(program: &Program, draw: &mut Draw) -> Vec<usize> {
    let (count, norm) = (program.instructions.len(), norm(program));
    let mut places: Vec<usize> = match count <= SMALL_PROGRAM {
        true => (0..=count).collect(),
        false => (0..RANDOM_PLACES).map(|_| draw.below(count)).collect(),
    };
    // Here some know the step's sums and some do not.
    places.extend([norm, norm + 1, norm + 1, norm + 1]);
    places.extend((0..RANDOM_PLACES).map(|_| norm + 1 + draw.below(count - norm)));
    places
}

/// A survivor that stops by itself among its updates.
fn stopped(case: &Case, members: &[usize], lost: usize, draw: &mut Draw) -> Option<(usize, usize)> {
    let device = draw.of(members);
    let updates = case.programs[device].instructions.iter().enumerate();
    let updates = updates.filter(|(_, instruction)| matches!(instruction.op, Op::Update { .. }));
    let updates: Vec<usize> = updates.map(|(place, _)| place).collect();
    let stops = device != lost && !updates.is_empty() && draw.chance(60);
    stops.then(|| (device, draw.of(&updates)))
}

/// What befalls a table's devices, one thing after the other. One that has all to itself is not lost, but stops.
fn faults(case: &Case, seed: u64) -> Vec<Fault> {
    let layout = Layout::new(&case.plan, &case.chain);
    let (members, mut draw) = (layout.members(), Draw::new(seed));
    let device = draw.of(members);
    let program = &case.programs[device];
    let places = places(program, &mut draw).into_iter().enumerate();
    let fault = |(number, place): (usize, usize)| {
        let (step, seed) = (draw.below(2) as u64, seed * 1000 + number as u64);
        if members.len() == 1 {
            let stopped = Some((device, place.min(program.instructions.len() - 1)));
            return Fault { device: NOBODY, step, place: 0, stopped, seed };
        }
        let late = place > norm(program);
        let stopped = if late { stopped(case, members, device, &mut draw) } else { None };
        Fault { device, step, place, stopped, seed }
    };
    places.map(fault).collect()
}

#[test]
fn whoever_is_lost_wherever_it_is_the_others_settle_at_one_step() {
    let disk = tempfile::tempdir().unwrap();
    let (first, count) = (number("SHOAL_SEED", 0), number("SHOAL_CASES", CASES));
    let (mut coverage, mut alone, mut handing, mut handing_on) = (Coverage::default(), 0, 0, 0);
    for seed in first..first + count {
        let case = case(seed);
        let features = draw::features(&case.plan, &case.chain);
        handing += usize::from(features.contains("gradients that are handed over"));
        handing_on += usize::from(features.contains("gradients handed to other devices"));
        let expected = uninterrupted(&case, disk.path());
        let faults = faults(&case, seed);
        alone += usize::from(faults.iter().all(|fault| fault.device == NOBODY));
        for fault in faults {
            let settled = std::panic::AssertUnwindSafe(|| {
                settle_after(&case, &expected, fault, disk.path(), &mut coverage);
            });
            if std::panic::catch_unwind(settled).is_err() {
                panic!("SHOAL_SEED={seed} SHOAL_CASES=1: {fault:?}");
            }
        }
    }
    println!(
        "{count} tables, {alone} of one device, {handing} that hand gradients over, {handing_on} to other devices:"
    );
    println!("{coverage:#?}");
    if count >= CASES {
        let brought = |tier: Tier| coverage.slices_brought_on.get(&tier).copied().unwrap_or_default();
        assert!(coverage.rolled_forward > 0 && coverage.stayed > 0);
        assert!(coverage.survivors_partly > 0 && coverage.survivors_without_sums > 0);
        assert!([Tier::Device, Tier::Host, Tier::Disk].map(brought).iter().all(|slices| *slices > 0));
        assert!(coverage.lost_slices_with_a_mirror > 0 && coverage.faults_that_lose_slices > 0);
        assert!(handing > 0 && handing_on > 0);
    }
}
