//! Updates in host memory and on disks go on beside the next step: it begins without them, what touches their tensors
//! waits for them, and every number is as if each step had waited for its own.

mod common;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{HOST_BYTES, RandomBatch, classes, fill};
use shoal_engine::{EngineError, Executor, ModelState, StepInput, StepOutcome, Tiers, Traced};
use shoal_kernels::{CpuDevice, Device, LateDevice, Lateness, Tensor};
use shoal_model::{Chain, Precision, presets};
use shoal_net::{Fabric, Settings, in_process};
use shoal_nn::{Decay, OptimizerKind, OptimizerSettings};
use shoal_plan::draw::{self, Draw};
use shoal_plan::effects::effects;
use shoal_plan::memory::forecast_in;
use shoal_plan::one_device::table;
use shoal_plan::{
    Activations, DeviceOffer, Holder, Layout, Op, Order, Plan, Program, Purpose, Residence, StepShape, Tier,
    compile, verify_all,
};
use shoal_sim::flows::Resource;
use shoal_sim::{Work, World, simulate};

const STEPS: u64 = 4;

fn optimizer() -> OptimizerSettings {
    OptimizerSettings {
        kind: OptimizerKind::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 },
        lr: 1e-3,
        weight_decay: 0.1,
        decay: Decay::Matrices,
        clip_norm: Some(1.0),
    }
}

/// The bits of every slice's parameters and optimizer state.
type Bits = Vec<Vec<u32>>;

/// A device of a table.
struct Member {
    executor: Executor,
    tiers: Tiers,
}

impl Member {
    fn new(layout: &Layout, program: &Program, fabric: Option<Arc<Fabric>>, disk: &Path) -> Member {
        Member::with_host(layout, program, fabric, disk, HOST_BYTES)
    }

    fn with_host(
        layout: &Layout,
        program: &Program,
        fabric: Option<Arc<Fabric>>,
        disk: &Path,
        host_bytes: u64,
    ) -> Member {
        let (index, budget) = (program.device, forecast_in(program, layout).total());
        let device = Arc::new(CpuDevice::new(&format!("device {index}"), 1, budget).unwrap());
        Member::on(device, layout, program, fabric, disk, host_bytes)
    }

    fn on(
        device: Arc<dyn Device>,
        layout: &Layout,
        program: &Program,
        fabric: Option<Arc<Fabric>>,
        disk: &Path,
        host_bytes: u64,
    ) -> Member {
        let index = program.device;
        let host = format!("host of device {index}");
        let tiers = Tiers::around(device, &host, 1, host_bytes, disk).unwrap();
        let mut state = ModelState::allocate_share(&tiers, layout, index, Some(&optimizer())).unwrap();
        state.load(&tiers, layout.chain, &[], 0, |spec, _, out| fill(spec, out)).unwrap();
        let (chain, sequence) = (layout.chain.clone(), layout.plan.sequence);
        let executor = Executor::with(tiers.clone(), fabric, chain, sequence, state).unwrap();
        Member { executor, tiers }
    }

    fn step(
        &mut self,
        layout: &Layout,
        program: &Program,
        step: u64,
        leaves_updates: bool,
    ) -> Result<StepOutcome, EngineError> {
        let (settings, batch) = (optimizer(), RandomBatch { classes: classes(layout.chain), step });
        let input = StepInput { leaves_updates, ..StepInput::train(step, 5, 1e-3, &settings, &batch) };
        self.executor.run_in(Some(layout), program, &input)
    }

    fn bits(&self) -> Bits {
        let slices = self.executor.state.tensors.iter().flat_map(|held| &held.slices);
        let parts = slices.flat_map(|slice| {
            (0..3).map(|part| {
                slice.get(&self.tiers, part).unwrap().iter().map(|value| value.to_bits()).collect()
            })
        });
        parts.collect()
    }
}

/// The losses and the last state of every device of a table; of devices that work behind the host's back, where a lateness
/// is given.
fn trained(
    plan: &Plan,
    chain: &Chain,
    disk: &Path,
    leaves_updates: bool,
    lateness: Option<Lateness>,
) -> Vec<(Vec<u64>, Bits)> {
    let layout = Layout::new(plan, chain);
    let programs = compile(plan, chain, Purpose::Train).unwrap();
    verify_all(&programs, plan, chain, Purpose::Train).unwrap();
    let fabrics = in_process(programs.len(), &Settings::default());
    std::thread::scope(|scope| {
        let members = programs.iter().zip(fabrics).filter(|(program, _)| !program.instructions.is_empty());
        let threads: Vec<_> = members
            .map(|(program, fabric)| {
                let layout = &layout;
                scope.spawn(move || {
                    let late = |lateness: Lateness| {
                        let name = format!("device {}", program.device);
                        let budget = forecast_in(program, layout).total() - CpuDevice::workspace_bytes(1);
                        Arc::new(LateDevice::new(&name, budget, lateness).unwrap())
                    };
                    let fabric = Some(fabric);
                    let mut member = match lateness.map(late) {
                        Some(device) => Member::on(device, layout, program, fabric, disk, HOST_BYTES),
                        None => Member::new(layout, program, fabric, disk),
                    };
                    let losses = (0..STEPS).map(|step| {
                        member.step(layout, program, step, leaves_updates).unwrap().loss().to_bits()
                    });
                    let losses = losses.collect();
                    member.executor.catch_up().unwrap();
                    (losses, member.bits())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Whatever the table, and whichever memories its state lies in.
#[test]
fn no_bit_differs_from_steps_that_wait_for_their_updates() {
    let disk = tempfile::tempdir().unwrap();
    let mut left_behind = BTreeMap::<&str, usize>::new();
    for seed in 0..40 {
        let mut draw = Draw::new(500 + seed);
        let (chain, sequence) = draw::model(&mut draw);
        let shape =
            StepShape { precision: Precision::Fp32, optimizer_states: 2, ..draw::step(&mut draw, sequence) };
        let mut plan = draw::table(&chain, shape, 4, &mut draw);
        for device in &mut plan.devices {
            device.workspace_bytes = CpuDevice::workspace_bytes(1);
        }
        for program in compile(&plan, &chain, Purpose::Train).unwrap() {
            for place in program.left_behind() {
                let of_disk = program.instructions[place].op.line() == Some(Tier::Disk);
                *left_behind.entry(if of_disk { "disk" } else { "host" }).or_default() += 1;
            }
        }
        let train = |leaves: bool, lateness| trained(&plan, &chain, disk.path(), leaves, lateness);
        let waits = train(false, None);
        for lateness in [None, Some(Lateness::UntilAsked), Some(Lateness::Random(seed))] {
            assert!(waits == train(true, lateness), "seed {seed}, {lateness:?}");
        }
    }
    assert!(left_behind["host"] > 100 && left_behind["disk"] > 100, "{left_behind:?}");
}

/// A model of which one device keeps nothing: all of it is in one other memory.
fn streamed(elsewhere: Holder) -> (Chain, Plan) {
    let chain = Chain::new(&presets::llama(50, 16, 4, 4, 2, 24, 12, 1e4, false));
    let shape = StepShape { global_batch: 2, sequence: 8, ..StepShape::ADAM };
    let workspace_bytes = CpuDevice::workspace_bytes(1);
    let offer = DeviceOffer {
        name: "streamed".into(),
        budget_bytes: HOST_BYTES + workspace_bytes,
        workspace_bytes,
        rows_enough: CpuDevice::ROWS_ENOUGH,
    };
    let mut plan = table(&chain, shape, &offer, 2, Activations::Keep, false);
    plan.order = Order::LayerFirst;
    for row in &mut plan.tensors {
        row.gradient.iter_mut().chain(&mut row.optimizer).for_each(|held| held.holder = elsewhere);
        row.compute_copies.iter_mut().for_each(|copy| copy.residence = Residence::Fetched);
    }
    (chain, plan)
}

/// Every update lasts so long.
fn slow_updates(program: &Program, each: Duration) -> Vec<Duration> {
    let last = |op: &Op| if op.line().is_some() { each } else { Duration::ZERO };
    program.instructions.iter().map(|instruction| last(&instruction.op)).collect()
}

/// When each instruction was under way, step by step: each happens once a step, in the order of the steps.
fn by_step(traced: Vec<Traced>) -> HashMap<u32, Vec<Traced>> {
    let mut all = HashMap::<u32, Vec<Traced>>::new();
    traced.into_iter().for_each(|next| all.entry(next.id).or_default().push(next));
    all
}

#[test]
fn the_next_step_begins_without_updates_and_touches_nothing_of_theirs() {
    const EACH: Duration = Duration::from_millis(4);
    for elsewhere in [Holder::Host(0), Holder::Disk(0)] {
        let disk = tempfile::tempdir().unwrap();
        let (chain, plan) = streamed(elsewhere);
        let layout = Layout::new(&plan, &chain);
        let program = &compile(&plan, &chain, Purpose::Train).unwrap()[0];
        let mut member = Member::new(&layout, program, None, disk.path());
        member.executor.set_pace(slow_updates(program, EACH));
        member.executor.set_traces(true);
        for step in 0..STEPS {
            member.step(&layout, program, step, true).unwrap();
        }
        member.executor.catch_up().unwrap();
        let traced = by_step(member.executor.take_traced());
        let ids = |wanted: &dyn Fn(&Op) -> bool| -> Vec<u32> {
            let found = program.instructions.iter().filter(|instruction| wanted(&instruction.op));
            found.map(|instruction| instruction.id).collect()
        };
        let updates = ids(&|op| op.line().is_some());
        assert_eq!(updates.len(), chain.tensors.len());
        assert_eq!(program.left_behind().len(), updates.len());
        assert!(traced.values().all(|steps| steps.len() == STEPS as usize), "each instruction once a step");
        let forward = ids(&|op| matches!(op, Op::Forward { layer: 0, .. }))[0];
        for step in 1..STEPS as usize {
            let last_update = updates.iter().map(|update| traced[update][step - 1].end).fold(0.0, f64::max);
            let began = traced[&forward][step].start;
            assert!(began < last_update, "{elsewhere:?}: step {step} waited for all updates");
            let mut waited = 0;
            for instruction in &program.instructions {
                let touched: Vec<usize> = effects(&instruction.op, &layout, 0).touches().collect();
                let start = traced[&instruction.id][step].start;
                for update in &program.instructions {
                    let Some(tensor) = update.op.updated_tensor().filter(|tensor| touched.contains(tensor))
                    else {
                        continue;
                    };
                    let updated = traced[&update.id][step - 1].end;
                    assert!(start >= updated, "{instruction} began before tensor {tensor} was updated");
                    waited += 1;
                }
            }
            assert!(waited > updates.len());
            // One after the other, in the order of the list.
            for pair in updates.windows(2) {
                assert!(traced[&pair[0]][step].end <= traced[&pair[1]][step].start);
            }
        }
    }
}

/// What instructions last where a device is played, here and on the virtual clock.
struct Played;

impl Played {
    const FORWARD: Duration = Duration::from_millis(8);
    const BACKWARD: Duration = Duration::from_millis(16);
    const UPDATE: Duration = Duration::from_millis(4);

    fn lasts(op: &Op) -> Duration {
        match op {
            Op::Forward { .. } => Played::FORWARD,
            Op::Backward { .. } => Played::BACKWARD,
            Op::Update { .. } => Played::UPDATE,
            _ => Duration::ZERO,
        }
    }
}

impl World for Played {
    fn resources(&self) -> &[Resource] {
        &[]
    }

    fn alone(&self, op: &Op, _device: usize) -> Work {
        Work { seconds: Played::lasts(op).as_secs_f64(), ..Work::default() }
    }

    fn together(&self, op: &Op, device: usize) -> Work {
        self.alone(op, device)
    }
}

/// A played device takes for a step what the simulator says, and that is less than its instructions one after the other.
#[test]
fn a_step_takes_as_long_as_simulated() {
    let disk = tempfile::tempdir().unwrap();
    let (chain, plan) = streamed(Holder::Host(0));
    let layout = Layout::new(&plan, &chain);
    let programs = compile(&plan, &chain, Purpose::Train).unwrap();
    let played = |alone| {
        let settings = shoal_sim::Settings { alone, ..shoal_sim::Settings::default() };
        simulate(&programs, &layout, &Played, settings).unwrap().seconds
    };
    let (predicted, alone) = (played(false), played(true));
    // More than measurements below may be off by: a device that waited for its updates would be found out.
    assert!(alone > 1.12 * predicted, "{predicted} and {alone} s");
    let mut member = Member::new(&layout, &programs[0], None, disk.path());
    let pace = programs[0].instructions.iter().map(|instruction| Played::lasts(&instruction.op));
    member.executor.set_pace(pace.collect());
    let took = (0..8).map(|step| {
        let started = Instant::now();
        member.step(&layout, &programs[0], step, true).unwrap();
        started.elapsed().as_secs_f64()
    });
    let took: Vec<f64> = took.collect();
    // The machine may be busy with something else; no step is too quick, and one that is not disturbed is as foreseen.
    let quickest = took[1..].iter().copied().fold(f64::INFINITY, f64::min);
    assert!((0.99..1.1).contains(&(quickest / predicted)), "{took:?}, predicted {predicted}");
}

/// The state after some steps that each wait for their updates.
fn state_after(steps: u64, layout: &Layout, program: &Program, disk: &Path) -> Bits {
    let mut member = Member::new(layout, program, None, disk);
    (0..steps).for_each(|step| drop(member.step(layout, program, step, false).unwrap()));
    member.bits()
}

/// Whether it is an update that asks whether it may go on: those in a line have threads of their own.
fn is_update() -> bool {
    std::thread::current().name() == Some("lane")
}

/// Updates in lines wait until what this gives is dropped.
fn hold_updates(executor: &mut Executor) -> Sender<()> {
    let (held, waits) = channel();
    let waits = Mutex::new(waits);
    executor.set_gate(Some(Arc::new(move || {
        if is_update() {
            waits.lock().unwrap().recv().unwrap_err();
        }
        true
    })));
    held
}

/// An update that finds no room in its host's memory fails the step that runs beside it. The slice is as it was, and the
/// update is made up for when there is room.
#[test]
fn an_update_that_fails_beside_the_next_step_fails_it_and_can_be_made_up_for() {
    let disk = tempfile::tempdir().unwrap();
    let (chain, plan) = streamed(Holder::Disk(0));
    let layout = Layout::new(&plan, &chain);
    let program = &compile(&plan, &chain, Purpose::Train).unwrap()[0];
    let host_bytes = CpuDevice::workspace_bytes(1) + (1 << 20);
    for says_first in [false, true] {
        let mut member = Member::with_host(&layout, program, None, disk.path(), host_bytes);
        let held = hold_updates(&mut member.executor);
        member.step(&layout, program, 0, true).unwrap();
        let arena = member.tiers.host.arena();
        let free = (arena.budget() - arena.used()) as usize;
        let hog = Tensor::new(arena, "whatever else is there", free / 4 - 64).unwrap();
        drop(held);
        if says_first {
            let standing = member.executor.standing().unwrap();
            assert!(standing.reduced && standing.step == 0, "{standing:?}");
        }
        let failed = member.step(&layout, program, 1, true).unwrap_err().to_string();
        assert!(failed.contains("host of device 0"), "{failed}");
        let standing = member.executor.standing().unwrap();
        assert!(standing.reduced && standing.step == 0, "{standing:?}");
        assert_eq!(standing.closing.map(|closing| closing.step), Some(0));
        drop(hog);
        member.executor.set_gate(None);
        member.executor.settle(1, None).unwrap();
        assert!(member.bits() == state_after(1, &layout, program, disk.path()));
        member.step(&layout, program, 1, false).unwrap();
        assert!(member.bits() == state_after(2, &layout, program, disk.path()));
    }
}

/// What may no longer go on stops between two updates.
#[test]
fn updates_ask_whether_they_may_go_on() {
    let disk = tempfile::tempdir().unwrap();
    let (chain, plan) = streamed(Holder::Host(0));
    let layout = Layout::new(&plan, &chain);
    let program = &compile(&plan, &chain, Purpose::Train).unwrap()[0];
    let mut member = Member::new(&layout, program, None, disk.path());
    let asked = AtomicUsize::new(0);
    member
        .executor
        .set_gate(Some(Arc::new(move || !is_update() || asked.fetch_add(1, Ordering::SeqCst) < 3)));
    member.step(&layout, program, 0, true).unwrap();
    assert!(matches!(member.executor.catch_up(), Err(EngineError::Stopped)));
    let standing = member.executor.standing().unwrap();
    assert!(standing.applied && standing.reduced && standing.step == 0, "{standing:?}");
    member.executor.settle(1, None).unwrap();
    assert!(member.bits() == state_after(1, &layout, program, disk.path()));
}

/// Another worker is lost while updates of the step before are under way: they are ended, and then it is said where the
/// slices stand.
#[test]
fn who_loses_another_ends_its_updates_before_it_says_where_it_stands() {
    const EACH: Duration = Duration::from_millis(10);
    let disk = tempfile::tempdir().unwrap();
    let mut cases = 0;
    for seed in 0..200 {
        let mut draw = Draw::new(seed);
        let (chain, sequence) = draw::model(&mut draw);
        let shape =
            StepShape { precision: Precision::Fp32, optimizer_states: 2, ..draw::step(&mut draw, sequence) };
        let mut plan = draw::table(&chain, shape, 2, &mut draw);
        let layout = Layout::new(&plan, &chain);
        let programs = compile(&plan, &chain, Purpose::Train).unwrap();
        let in_lines = programs[0].instructions.iter().filter(|next| next.op.line().is_some()).count();
        let left_behind = programs[0].left_behind().len();
        // Updates that the step itself waits for would be held too, and the step with them.
        if layout.members() != [0, 1] || left_behind < 4 || left_behind < in_lines {
            continue;
        }
        cases += 1;
        for device in &mut plan.devices {
            device.workspace_bytes = CpuDevice::workspace_bytes(1);
        }
        let layout = Layout::new(&plan, &chain);
        let mut fabrics = in_process(2, &Settings::default());
        let (lost, kept) = (fabrics.pop().unwrap(), fabrics.pop().unwrap());
        let mut member = Member::new(&layout, &programs[0], Some(kept), disk.path());
        member.executor.set_pace(slow_updates(&programs[0], EACH));
        let held = hold_updates(&mut member.executor);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut member = Member::new(&layout, &programs[1], Some(lost), disk.path());
                // With this its fabric ends.
                member.step(&layout, &programs[1], 0, false).unwrap();
            });
            member.step(&layout, &programs[0], 0, true).unwrap();
        });
        let slices = member.executor.state.tensors.iter().flat_map(|held| &held.slices);
        let behind = slices.filter(|slice| slice.version == 0).count();
        assert!(behind >= programs[0].left_behind().len(), "seed {seed}: {behind} updates are under way");
        // Others hear of the step meanwhile.
        let told = member.executor.standing_so_far().unwrap();
        assert_eq!((told.step, told.reduced, told.reaches()), (0, true, 1), "seed {seed}");
        drop(held);
        assert!(matches!(member.step(&layout, &programs[0], 1, true), Err(EngineError::Net(_))));
        let standing = member.executor.standing().unwrap();
        assert_eq!((standing.step, standing.applied), (1, false), "seed {seed}");
        assert_eq!(standing.closing.map(|closing| closing.step), Some(0));
        member.executor.settle(1, standing.closing).unwrap();
    }
    assert!(cases > 5, "{cases} tables");
}
