//! Any table trains the same model. Random tables from the whole space, on devices inside one process: the losses are the
//! single device's, the memory stays within the forecast, the same table gives the same bits.

mod common;

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{HOST_BYTES, RandomBatch, classes, fill};
use shoal_engine::partners::partners;
use shoal_engine::stepping::needs_table;
use shoal_engine::{EngineError, Executor, ModelState, Replay, StepInput, StepOutcome, Tiers, Traced};
use shoal_kernels::{Arena, CpuDevice, CudaDevice, Device, LateDevice, Lateness};
use shoal_model::{Chain, Precision, presets};
use shoal_net::{Fabric, Settings, in_process};
use shoal_nn::{Decay, OptimizerKind, OptimizerSettings};
use shoal_plan::draw::{self, Draw};
use shoal_plan::memory::{MemoryForecast, forecast_in};
use shoal_plan::one_device::table;
use shoal_plan::{
    Activations, DeviceOffer, DeviceRow, GradientWire, Holder, Instruction, Lane, Layout, Op, Order, Plan,
    Program, Purpose, Residence, Samples, StepShape, compile, verify_all,
};

const STEPS: u64 = 12;
/// What losses may differ by, relative to their size: sums are added up in another order.
const TOLERANCE: f64 = 1e-5;
/// Products of other shapes are other kernels there, which round otherwise.
const TOLERANCE_GPU: f64 = 1e-4;

fn optimizer() -> OptimizerSettings {
    OptimizerSettings {
        kind: OptimizerKind::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 },
        lr: 1e-3,
        weight_decay: 0.1,
        decay: Decay::Matrices,
        clip_norm: Some(1.0),
    }
}

fn train(
    executor: &mut Executor,
    steps: u64,
    run: impl FnMut(&mut Executor, &StepInput) -> Result<StepOutcome, EngineError>,
) -> Result<Vec<f64>, EngineError> {
    train_over(executor, steps, steps, run)
}

/// Over so many batches, in turn.
fn train_over(
    executor: &mut Executor,
    steps: u64,
    batches: u64,
    mut run: impl FnMut(&mut Executor, &StepInput) -> Result<StepOutcome, EngineError>,
) -> Result<Vec<f64>, EngineError> {
    let (settings, classes) = (optimizer(), classes(executor.chain()));
    let mut losses = Vec::new();
    for step in 0..steps {
        let batch = RandomBatch { classes, step: step % batches };
        // Updates in other memories go on beside the next step.
        let input = StepInput {
            leaves_updates: step + 1 < steps,
            ..StepInput::train(step, 5, 1e-3, &settings, &batch)
        };
        let outcome = run(executor, &input)?;
        losses.push(outcome.loss());
    }
    Ok(losses)
}

/// The devices that a table's are.
#[derive(Clone, Copy, PartialEq)]
enum On {
    Processor,
    /// A processor that works behind the host's back.
    Late(Lateness),
    Gpu,
}

impl On {
    fn workspace_bytes(self) -> u64 {
        match self {
            On::Processor => CpuDevice::workspace_bytes(1),
            On::Late(_) => 0,
            On::Gpu => CudaDevice::workspace_bytes(),
        }
    }

    /// With room for all that these tests do.
    fn offer(self, name: &str) -> DeviceOffer {
        let workspace_bytes = self.workspace_bytes();
        let budget_bytes = HOST_BYTES + workspace_bytes;
        DeviceOffer { name: name.into(), budget_bytes, workspace_bytes, rows_enough: CpuDevice::ROWS_ENOUGH }
    }

    fn open(self, name: &str, budget: u64) -> Arc<dyn Device> {
        match self {
            // NaN in fresh memory: a read of something nothing wrote shows.
            On::Processor => {
                Arc::new(CpuDevice::with_arena(Arena::poisoned(name, budget).unwrap(), 1).unwrap())
            }
            On::Late(lateness) => Arc::new(LateDevice::new(name, budget, lateness).unwrap()),
            On::Gpu => Arc::new(CudaDevice::new(name, 0, budget).unwrap().with_deterministic(true)),
        }
    }
}

/// The losses of one device that has all.
fn alone(chain: &Chain, shape: StepShape, on: On) -> Vec<f64> {
    let offer = on.offer("alone");
    let plan = table(chain, shape, &offer, shape.global_batch, Activations::Keep, false);
    let program = compile(&plan, chain, Purpose::Train).unwrap().remove(0);
    let device = on.open("alone", offer.budget_bytes);
    let mut state =
        ModelState::allocate(&*device, chain, shape.sequence, shape.precision, Some(&optimizer())).unwrap();
    state.fill(&*device, chain, fill).unwrap();
    let mut executor = Executor::new(device, chain.clone(), shape.sequence, state).unwrap();
    train(&mut executor, STEPS, |executor, input| executor.run(&program, input)).unwrap()
}

/// What the engine takes of host memory beside the forecast: sums that norms and updates there go by.
const HOST_SUMS_BYTES: u64 = 3 * 256;

/// A device of the table with a budget of just its forecast.
fn member(
    layout: &Layout,
    program: &Program,
    fabric: Arc<Fabric>,
    disk: &std::path::Path,
    on: On,
) -> (Executor, MemoryForecast) {
    let index = program.device;
    let predicted = forecast_in(program, layout);
    let device = on.open(&format!("device {index}"), predicted.total());
    let tiers = Tiers::around(device, &format!("host of device {index}"), 1, HOST_BYTES, disk).unwrap();
    let mut state = ModelState::allocate_share(&tiers, layout, index, Some(&optimizer())).unwrap();
    state.load(&tiers, layout.chain, &[], 0, |spec, _, out| fill(spec, out)).unwrap();
    let chain = layout.chain.clone();
    (Executor::with(tiers, Some(fabric), chain, layout.plan.sequence, state).unwrap(), predicted)
}

/// What is done with a device's executor before it trains, and after.
type Around<'a> =
    (&'a (dyn Fn(&Program, &mut Executor) + Sync), &'a (dyn Fn(&Program, &mut Executor) + Sync));

/// The losses that each device of a table saw.
fn together(plan: &Plan, chain: &Chain, disk: &std::path::Path, on: On) -> Vec<Vec<f64>> {
    together_around(plan, chain, disk, on, (&|_, _| {}, &|_, _| {}))
}

fn together_around(
    plan: &Plan,
    chain: &Chain,
    disk: &std::path::Path,
    on: On,
    (before, after): Around,
) -> Vec<Vec<f64>> {
    let layout = Layout::new(plan, chain);
    let programs = compile(plan, chain, Purpose::Train).unwrap();
    verify_all(&programs, plan, chain, Purpose::Train).unwrap();
    let mut fabrics = in_process(programs.len(), &Settings::default());
    for (program, fabric) in programs.iter().zip(&mut fabrics) {
        // Nobody needs others than those that the program names.
        Arc::get_mut(fabric).expect("nobody has it yet").keep_links(&partners(&layout, program));
    }
    std::thread::scope(|scope| {
        let members = programs.iter().zip(fabrics).filter(|(program, _)| !program.instructions.is_empty());
        let threads: Vec<_> = members
            .map(|(program, fabric)| {
                let layout = &layout;
                scope.spawn(move || {
                    let (mut executor, predicted) = member(layout, program, fabric, disk, on);
                    before(program, &mut executor);
                    // As runs have it: who has all to itself needs no table.
                    let table = needs_table(layout, program).then_some(layout);
                    let losses =
                        train(&mut executor, STEPS, |executor, input| executor.run_in(table, program, input));
                    let (peak, total) = (executor.device().arena().peak(), predicted.total());
                    assert!(peak <= total, "device {}: {peak} bytes of {total}", program.device);
                    // What comes from a disk passes through host memory, uncounted.
                    if predicted.disk == 0 {
                        let own = CpuDevice::workspace_bytes(1) + HOST_SUMS_BYTES;
                        let (peak, total) = (executor.host().arena().peak(), predicted.host + own);
                        assert!(peak <= total, "host of device {}: {peak} bytes of {total}", program.device);
                    }
                    after(program, &mut executor);
                    losses.unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

struct Case {
    chain: Chain,
    plan: Plan,
    shape: StepShape,
}

fn case(seed: u64, on: On) -> Case {
    let mut draw = Draw::new(seed);
    let (chain, sequence) = draw::model(&mut draw);
    let shape = StepShape { precision: Precision::Fp32, ..draw::step(&mut draw, sequence) };
    let mut plan = draw::table(&chain, shape, 5, &mut draw);
    for device in &mut plan.devices {
        device.workspace_bytes = on.workspace_bytes();
    }
    Case { chain, plan, shape }
}

fn first_seed() -> u64 {
    std::env::var("SHOAL_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0)
}

fn cases(usual: u64) -> Range<u64> {
    let count = std::env::var("SHOAL_CASES").ok().and_then(|count| count.parse().ok()).unwrap_or(usual);
    first_seed()..first_seed() + count
}

/// Trains random tables and compares their losses with those of one device that has all.
fn compare(seeds: Range<u64>, on: On, tolerance: f64) {
    let disk = tempfile::tempdir().unwrap();
    let (mut features, mut worst) = (BTreeMap::<&str, usize>::new(), 0f64);
    let count = seeds.end - seeds.start;
    for seed in seeds {
        let again = format!("SHOAL_SEED={seed} SHOAL_CASES=1");
        let Case { chain, plan, shape } = case(seed, on);
        for feature in draw::features(&plan, &chain) {
            *features.entry(feature).or_default() += 1;
        }
        let expected = alone(&chain, shape, on);
        let found = std::panic::catch_unwind(|| together(&plan, &chain, disk.path(), on));
        let found = found.unwrap_or_else(|_| panic!("{again}: a device failed"));
        for losses in found {
            for (step, (loss, expected)) in losses.iter().zip(&expected).enumerate() {
                let off = (loss - expected).abs() / expected.abs();
                worst = worst.max(off);
                assert!(off <= tolerance, "{again}: step {step}: {loss}, alone {expected}");
            }
        }
    }
    println!("{count} tables, losses off by at most {worst:.1e}");
    for (feature, tables) in features {
        println!("{:5.1} % {feature}", 100.0 * tables as f64 / count as f64);
    }
}

#[test]
fn any_table_trains_the_same_model() {
    compare(cases(120), On::Processor, TOLERANCE);
}

/// Each device has just its forecast, and some of what it moves to its host and back takes long.
fn with_slow_copies(chain: &Chain, plan: &Plan, is_slow: impl Fn(usize, &Instruction) -> bool + Sync) {
    let disk = tempfile::tempdir().unwrap();
    let delay = |program: &Program, executor: &mut Executor| {
        let mut durations = vec![Duration::ZERO; program.instructions.len()];
        for next in program.instructions.iter().filter(|next| is_slow(program.device, next)) {
            durations[next.id as usize] = Duration::from_micros(500);
        }
        executor.set_pace(durations);
    };
    together_around(plan, chain, disk.path(), On::Processor, (&delay, &|_, _| {}));
}

#[test]
fn copies_that_take_long_take_no_more_memory_than_forecast() {
    for seed in cases(40) {
        let Case { chain, plan, .. } = case(seed, On::Processor);
        let slow = |device: usize, next: &Instruction| {
            let which = seed << 32 | (next.id as u64) << 8 | device as u64;
            next.lane != Lane::Compute && Draw::new(which).chance(25)
        };
        let done = std::panic::catch_unwind(AssertUnwindSafe(|| with_slow_copies(&chain, &plan, slow)));
        assert!(done.is_ok(), "SHOAL_SEED={seed} SHOAL_CASES=1: a device failed");
    }
}

/// A layer's input waits to be on its host while another layer, which adds it to its own output, is done with it.
#[test]
fn an_input_on_its_way_to_the_host_counts_though_all_others_are_done_with_it() {
    let mut draw = Draw::new(1);
    let mut chain = loop {
        let (chain, _) = draw::model(&mut draw);
        if chain.has_batch_norm() {
            break chain;
        }
    };
    chain.set_norm_group(Some(1));
    let shape = StepShape { global_batch: 5, sequence: 1, precision: Precision::Fp32, ..StepShape::ADAM };
    let mut plan = table(&chain, shape, &On::Processor.offer("alone"), 1, Activations::Recompute, false);
    // The step is highest where the last micro-batch, which is larger, has just begun.
    plan.order = Order::Gpipe;
    for compute in plan.layers.iter_mut().flat_map(|row| &mut row.compute) {
        compute.micro_batches.truncate(3);
        compute.micro_batches.push(Samples { start: 3, end: 5 });
    }
    // The last but one: its block adds what it takes to what the last layer makes.
    let added_to = chain.layers.iter().rposition(|layer| layer.inputs.len() > 1).unwrap();
    plan.layers[added_to - 1].compute[0].activations = Activations::Offload;
    with_slow_copies(&chain, &plan, |_, next| matches!(next.op, Op::Offload { .. }));
}

/// As GPUs do. Whatever the engine asks of a device in the wrong order, or looks at before it is there, shows: the numbers are
/// those of a processor that has done everything when it is asked, to the bit.
#[test]
fn a_device_behind_the_hosts_back_trains_the_same_model() {
    let disk = tempfile::tempdir().unwrap();
    for seed in cases(60) {
        let mut draw = Draw::new(seed);
        let lateness = if draw.chance(50) { Lateness::UntilAsked } else { Lateness::Random(seed) };
        let replay = draw.of(&[Replay::Nothing, Replay::Step, Replay::Instruction]);
        let again = format!("SHOAL_SEED={seed} SHOAL_CASES=1, {lateness:?}, {replay:?}");
        let train = |on: On| {
            let Case { chain, plan, .. } = case(seed, on);
            let before = |_: &Program, executor: &mut Executor| executor.set_replay(replay);
            together_around(&plan, &chain, disk.path(), on, (&before, &|_, _| {}))
        };
        let expected = train(On::Processor);
        let found = std::panic::catch_unwind(AssertUnwindSafe(|| train(On::Late(lateness))));
        let found = found.unwrap_or_else(|_| panic!("{again}: a device failed"));
        assert_eq!(found, expected, "{again}");
    }
}

/// One device with all of a model, as a run of its own has it and as a table's only device: what it has noted down of earlier
/// steps gives the same bits as asking for everything again.
#[test]
fn a_step_that_is_noted_down_trains_the_same_model() {
    for (seed, by_table) in cases(8).flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut draw = Draw::new(seed);
        let (chain, sequence) = draw::model(&mut draw);
        let shape = StepShape { precision: Precision::Fp32, ..draw::step(&mut draw, sequence) };
        let largest = 1 + draw.below(shape.global_batch);
        let train = |device: Arc<dyn Device>, replay: Replay| {
            let offer = On::Late(Lateness::UntilAsked).offer("alone");
            let activations = [Activations::Keep, Activations::Recompute][seed as usize % 2];
            let plan = table(&chain, shape, &offer, largest, activations, false);
            let layout = Layout::new(&plan, &chain);
            let program = compile(&plan, &chain, Purpose::Train).unwrap().remove(0);
            let (precision, optimizer) = (shape.precision, optimizer());
            let mut state =
                ModelState::allocate(&*device, &chain, sequence, precision, Some(&optimizer)).unwrap();
            state.fill(&*device, &chain, fill).unwrap();
            let mut executor = Executor::new(device, chain.clone(), sequence, state).unwrap();
            executor.set_replay(replay);
            let layout = by_table.then_some(&layout);
            // Two batches, since what depends on their targets is noted down for each.
            train_over(&mut executor, STEPS, 2, |executor, input| executor.run_in(layout, &program, input))
                .unwrap()
        };
        let budget = HOST_BYTES;
        let expected = train(Arc::new(CpuDevice::new("alone", 1, budget).unwrap()), Replay::Nothing);
        for replay in [Replay::Nothing, Replay::Step, Replay::Instruction] {
            for lateness in [Lateness::UntilAsked, Lateness::Random(seed)] {
                let device = Arc::new(LateDevice::new("alone", budget, lateness).unwrap());
                let again = format!("SHOAL_SEED={seed} SHOAL_CASES=1, {lateness:?}, {replay:?}, {by_table}");
                assert_eq!(train(device.clone(), replay), expected, "{again}");
                // Two steps as they come, a third is noted down; where memory is not in use as it was, that begins again.
                let replays = replay != Replay::Nothing;
                assert_eq!(device.replayed() > 4, replays, "{again}: {} replayed", device.replayed());
            }
        }
    }
}

#[test]
fn any_table_trains_the_same_model_on_a_gpu() {
    if !CudaDevice::count().is_ok_and(|count| count > 0) {
        eprintln!("skipped: there is no GPU");
        return;
    }
    compare(cases(60), On::Gpu, TOLERANCE_GPU);
}

/// One device that keeps nothing of a model: its parameters come from the host for each use, its gradients go there, and the
/// host's optimizer updates them. The losses, and those of the same micro-batches with everything in the device's memory.
fn spilled(precision: Precision, on: On) -> [Vec<f64>; 2] {
    let mut draw = Draw::new(7);
    let (chain, sequence) = loop {
        let (chain, sequence) = draw::model(&mut draw);
        // Statistics that run along would be kept on the host too, where nothing of interest happens to them.
        if chain.image.is_none() && !chain.padded {
            break (chain, sequence);
        }
    };
    let shape = StepShape { precision, ..draw::step(&mut draw, sequence) };
    let offer = on.offer("spilled");
    let mut plan = table(&chain, shape, &offer, shape.global_batch, Activations::Keep, false);
    for row in &mut plan.tensors {
        row.gradient.iter_mut().chain(&mut row.optimizer).for_each(|held| held.holder = Holder::Host(0));
        row.compute_copies.iter_mut().for_each(|copy| copy.residence = Residence::Fetched);
    }
    let disk = tempfile::tempdir().unwrap();
    [together(&plan, &chain, disk.path(), on).remove(0), alone(&chain, shape, on)]
}

#[test]
fn a_model_on_the_host_trains_as_one_on_the_device() {
    let [spilled, alone] = spilled(Precision::Fp32, On::Processor);
    // The same operations on the same numbers, wherever they lie.
    assert_eq!(spilled, alone);
}

#[test]
fn a_model_on_the_host_trains_as_one_on_a_gpu() {
    /// The two optimizers round otherwise, and a parameter between two halves may then go to the other.
    const TOLERANCE_HALVES: f64 = 2e-3;
    if !CudaDevice::count().is_ok_and(|count| count > 0) {
        eprintln!("skipped: there is no GPU");
        return;
    }
    for (precision, tolerance) in [(Precision::Fp32, TOLERANCE_GPU), (Precision::Bf16, TOLERANCE_HALVES)] {
        let [spilled, alone] = spilled(precision, On::Gpu);
        for (step, (loss, expected)) in spilled.iter().zip(&alone).enumerate() {
            let off = (loss - expected).abs() / expected.abs();
            assert!(off <= tolerance, "{precision:?}: step {step}: {loss}, alone {expected}");
        }
    }
}

/// Two stages of a model without tied tensors, a sample at a time.
fn two_stages(samples: usize, leeway: usize) -> (Chain, Plan) {
    let chain = Chain::new(&presets::llama(50, 16, 4, 4, 2, 24, 12, 1e4, false));
    let shape = StepShape { global_batch: samples, sequence: 8, ..StepShape::ADAM };
    let offer = DeviceOffer {
        name: "first".into(),
        budget_bytes: u64::MAX,
        workspace_bytes: On::Processor.workspace_bytes(),
        rows_enough: CpuDevice::ROWS_ENOUGH,
    };
    let mut plan = table(&chain, shape, &offer, 1, Activations::Keep, false);
    plan.order = Order::OneForwardOneBackward;
    plan.devices[0].leeway = leeway;
    plan.devices.push(DeviceRow { name: "second".into(), ..plan.devices[0].clone() });
    for (layer, row) in plan.layers.iter_mut().enumerate() {
        row.compute[0].device = usize::from(layer > 2);
    }
    for (tensor, row) in plan.tensors.iter_mut().enumerate() {
        let device = plan.layers[chain.users(tensor).next().unwrap()].compute[0].device;
        row.compute_copies[0].device = device;
        row.gradient
            .iter_mut()
            .chain(&mut row.optimizer)
            .for_each(|held| held.holder = Holder::Device(device));
    }
    (chain, plan)
}

/// The second stage takes far longer than the first expects. While it waits for gradients the first computes forwards that
/// stand further behind, within its memory; and every number is as if it had not.
#[test]
fn a_device_that_waits_computes_what_comes_later_and_nothing_else_changes() {
    let disk = tempfile::tempdir().unwrap();
    let train = |leeway: usize| {
        let (chain, plan) = two_stages(8, leeway);
        let ahead = AtomicUsize::new(0);
        let before = |program: &Program, executor: &mut Executor| {
            let lasts = |next: &Instruction| match next.op {
                Op::Backward { .. } if program.device == 1 => Duration::from_millis(2),
                _ => Duration::ZERO,
            };
            executor.set_pace(program.instructions.iter().map(lasts).collect());
            executor.set_traces(program.device == 0);
        };
        let after = |program: &Program, executor: &mut Executor| {
            let computes = |traced: &Traced| program.instructions[traced.id as usize].op.computes_layer();
            let order: Vec<Traced> = executor.take_traced().into_iter().filter(computes).collect();
            let overtakes = |pair: &&[Traced]| {
                let [one, other] = [pair[0].id, pair[1].id].map(|id| program.instructions[id as usize].op);
                matches!((one, other), (Op::Forward { .. }, Op::Backward { .. })) && pair[0].id > pair[1].id
            };
            ahead.fetch_add(order.windows(2).filter(overtakes).count(), Ordering::SeqCst);
        };
        let losses = together_around(&plan, &chain, disk.path(), On::Processor, (&before, &after));
        (losses, ahead.into_inner())
    };
    let (in_order, none) = train(0);
    assert_eq!(none, 0);
    for leeway in [1, 3] {
        let (losses, ahead) = train(leeway);
        assert_eq!(losses, in_order);
        // Gradients are late in every step.
        assert!(ahead >= STEPS as usize, "{ahead} times a backward was overtaken");
    }
}

#[test]
fn the_same_table_gives_the_same_bits() {
    let disk = tempfile::tempdir().unwrap();
    for seed in cases(12) {
        let Case { chain, plan, .. } = case(1000 + seed, On::Processor);
        let train = || together(&plan, &chain, disk.path(), On::Processor);
        assert_eq!(train(), train(), "seed {}", 1000 + seed);
    }
}

/// Eight bits of a gradient are enough to train, and all devices still see the same numbers.
#[test]
fn gradients_may_go_in_halves() {
    const TOLERANCE_ROUNDED: f64 = 2e-3;
    let disk = tempfile::tempdir().unwrap();
    let mut rounded = 0;
    for seed in cases(24) {
        let Case { chain, mut plan, shape } = case(2000 + seed, On::Processor);
        let expected = alone(&chain, shape, On::Processor);
        let exact = together(&plan, &chain, disk.path(), On::Processor);
        plan.gradients = GradientWire::Bf16;
        let found = together(&plan, &chain, disk.path(), On::Processor);
        rounded += usize::from(found != exact);
        for losses in &found {
            assert_eq!(losses, &found[0], "seed {}", 2000 + seed);
            for (step, (loss, expected)) in losses.iter().zip(&expected).enumerate() {
                let off = (loss - expected).abs() / expected.abs();
                assert!(
                    off <= TOLERANCE_ROUNDED,
                    "seed {}, step {step}: {loss}, alone {expected}",
                    2000 + seed
                );
            }
        }
    }
    assert!(rounded > 0, "in some table gradients pass between devices");
}
