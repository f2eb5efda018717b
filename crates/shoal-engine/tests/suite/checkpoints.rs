//! A run that is stopped goes on with other devices: what four workers saved, each its own part while training went on, is
//! read by one, two, three and seven, under tables drawn at random, and the losses are those of a run that nothing
//! stopped.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use shoal_data::{Dataset, DatasetSpec, Tokenizer};
use shoal_engine::executor::Gate;
use shoal_engine::identity::Identity;
use shoal_engine::saving::shares;
use shoal_engine::{Executor, Interval, Ledger, ModelState, Run, RunEvent, RunSettings, Tiers};
use shoal_kernels::{CpuDevice, Device, LateDevice, Lateness};
use shoal_model::{Chain, TensorSpec, presets};
use shoal_net::{Fabric, Settings, in_process};
use shoal_nn::{Decay, OptimizerKind, OptimizerSettings, Schedule, ScheduleKind, init};
use shoal_plan::draw::{self, Draw};
use shoal_plan::memory::forecast_in;
use shoal_plan::{Layout, Plan, Program, Purpose, StepShape, compile, verify_all};
use shoal_state::checkpoint::Store;

pub const STEPS: u64 = 14;
/// Neither the first save nor one of those that are due.
const STOPPED: u64 = 8;
const EVERY: u64 = 3;
pub const SEQUENCE: usize = 16;
/// Of a worker's host: enough for a copy of the state.
const HOST_BYTES: u64 = 256 << 20;
/// What losses may differ by, relative to their size: sums are added up in another order.
const TOLERANCE: f64 = 1e-5;

fn settings(folder: &Path, stop_at: Option<u64>) -> RunSettings {
    RunSettings {
        steps: STEPS,
        stop_at,
        seed: 11,
        shuffle: true,
        optimizer: OptimizerSettings {
            kind: OptimizerKind::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 },
            lr: 1e-3,
            weight_decay: 0.1,
            decay: Decay::Matrices,
            clip_norm: Some(1.0),
        },
        schedule: Schedule { kind: ScheduleKind::Cosine, warmup: 3, final_share: 0.1 },
        folder: folder.to_owned(),
        checkpoint_every: Interval::Steps(EVERY),
        checkpoints_kept: 2,
        eval_every: None,
        rates: Vec::new(),
        predicted_seconds: None,
        dollars_per_hour: None,
        trace_from: None,
    }
}

/// A table of just so many devices, all of which take part.
fn table(chain: &Chain, devices: usize, draw: &mut Draw) -> Plan {
    let shape = StepShape { global_batch: 8, sequence: SEQUENCE, ..StepShape::ADAM };
    loop {
        let mut plan = draw::table(chain, shape, devices, draw);
        plan.devices.iter_mut().for_each(|device| device.workspace_bytes = CpuDevice::workspace_bytes(1));
        if plan.devices.len() == devices && Layout::new(&plan, chain).members().len() == devices {
            return plan;
        }
    }
}

pub fn data(folder: &Path) -> Dataset {
    let source = folder.join("corpus.txt");
    if !source.exists() {
        let words: Vec<String> = (0..900u32).map(|word| format!("{}", word * word % 1013)).collect();
        std::fs::write(&source, words.join(" ")).unwrap();
    }
    let tokenizer = Arc::new(Tokenizer::load("bytes", folder).unwrap());
    let spec = DatasetSpec::new(&source, tokenizer, SEQUENCE, 256, folder.join("data"));
    Dataset::open(&spec, &mut |_, _| {}).unwrap()
}

/// What the first worker told.
#[derive(Default)]
struct Told {
    losses: BTreeMap<u64, f64>,
    saved: Vec<u64>,
}

/// One worker; it resumes if there is a checkpoint.
pub fn worker(
    layout: &Layout,
    program: &Program,
    fabric: Arc<Fabric>,
    folder: &Path,
    stop_at: Option<u64>,
    gate: Option<Gate>,
) -> Run {
    let (index, chain, settings) = (program.device, layout.chain, settings(folder, stop_at));
    let predicted = forecast_in(program, layout).total();
    let name = format!("device {index}");
    let own = CpuDevice::workspace_bytes(1);
    // Some of them work behind the host's back, as GPUs do.
    let device: Arc<dyn Device> = match index % 3 {
        0 => Arc::new(LateDevice::new(&name, predicted - own, Lateness::UntilAsked).unwrap()),
        1 => Arc::new(LateDevice::new(&name, predicted - own, Lateness::Random(7)).unwrap()),
        _ => Arc::new(CpuDevice::new(&name, 1, predicted).unwrap()),
    };
    let tiers = Tiers::around(device, &format!("host of device {index}"), 1, HOST_BYTES, folder).unwrap();
    let mut state = ModelState::allocate_share(&tiers, layout, index, Some(&settings.optimizer)).unwrap();
    let store = Store::open_existing(&folder.join("checkpoints")).unwrap().with_shard_bytes_max(200_000);
    let checkpoint = store.latest().unwrap().map(|(checkpoint, _)| checkpoint);
    if checkpoint.is_none() {
        let set = |spec: &TensorSpec, _: &'static str, out: &mut [f32]| {
            init::fill(spec, 3, 0, out);
            Ok(())
        };
        state.load(&tiers, chain, &[], 0, set).unwrap();
    }
    let mut executor = Executor::with(tiers, Some(fabric), chain.clone(), SEQUENCE, state).unwrap();
    executor.set_gate(gate);
    let leads = layout.members()[0] == index;
    let identity = Identity::new(BTreeMap::new(), BTreeMap::new(), serde_json::Value::Null);
    let ledger = Ledger { identity, store, keeps_books: leads };
    let (plan, program) = (layout.plan.clone(), program.clone());
    Run::new(settings, ledger, executor, plan, program, data(folder), None, checkpoint.as_ref()).unwrap()
}

/// One worker's whole life.
fn work(
    layout: &Layout,
    program: &Program,
    fabric: Arc<Fabric>,
    folder: &Path,
    stop_at: Option<u64>,
) -> Told {
    let mut run = worker(layout, program, fabric, folder, stop_at, None);
    let mut told = Told::default();
    run.go(&AtomicBool::new(false), &mut |event| match event {
        RunEvent::Step(record) => drop(told.losses.insert(record.step, record.loss)),
        RunEvent::Saved { step, .. } => told.saved.push(step),
        RunEvent::SavesWait { .. } => panic!("there is room for a copy"),
    })
    .unwrap();
    told
}

/// What the first of a table's workers told.
fn train(plan: &Plan, chain: &Chain, folder: &Path, stop_at: Option<u64>) -> Told {
    Store::open(&folder.join("checkpoints")).unwrap();
    data(folder);
    let layout = Layout::new(plan, chain);
    let programs = compile(plan, chain, Purpose::Train).unwrap();
    verify_all(&programs, plan, chain, Purpose::Train).unwrap();
    let fabrics = in_process(programs.len(), &Settings::default());
    std::thread::scope(|scope| {
        let start = |(program, fabric)| {
            let layout = &layout;
            scope.spawn(move || work(layout, program, fabric, folder, stop_at))
        };
        let workers: Vec<_> = programs.iter().zip(fabrics).map(start).collect();
        let mut told: Vec<Told> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
        told.swap_remove(layout.members()[0])
    })
}

fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        match entry.path().is_dir() {
            true => copy_tree(&entry.path(), &to.join(entry.file_name())),
            false => drop(std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap()),
        }
    }
}

#[test]
fn four_workers_checkpoint_resumes_on_one_two_three_and_seven() {
    let environment = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let first = environment("SHOAL_SEED").unwrap_or(0);
    let chain = Chain::new(&presets::preset("gpt2-tiny").unwrap());
    let straight = tempfile::tempdir().unwrap();
    let expected = train(&table(&chain, 1, &mut Draw::new(1)), &chain, straight.path(), None).losses;
    assert_eq!(expected.len() as u64, STEPS);
    let mut worst = 0f64;
    for seed in first..first + environment("SHOAL_CASES").unwrap_or(2) {
        let draw = &mut Draw::new(seed);
        let plan = table(&chain, 4, draw);
        let stopped = tempfile::tempdir().unwrap();
        let told = train(&plan, &chain, stopped.path(), Some(STOPPED));
        assert_eq!(told.saved, [3, 6, STOPPED], "seed {seed}: every save became a checkpoint");
        let store = Store::open_existing(&stopped.path().join("checkpoints")).unwrap();
        assert_eq!(store.list().unwrap(), [6, STOPPED], "seed {seed}: two are kept");
        let members = Layout::new(&plan, &chain).members().to_vec();
        let writers = shares(&plan, &members).unwrap().iter().filter(|share| !share.is_empty()).count();
        assert_eq!(store.load(STOPPED).unwrap().manifests().len(), writers, "seed {seed}");
        for devices in [1, 2, 3, 7] {
            let resumed = tempfile::tempdir().unwrap();
            copy_tree(stopped.path(), resumed.path());
            let told = train(&table(&chain, devices, draw), &chain, resumed.path(), None);
            let steps: Vec<u64> = told.losses.keys().copied().collect();
            assert_eq!(steps, (STOPPED + 1..=STEPS).collect::<Vec<_>>(), "it goes on where it was");
            for (step, loss) in &told.losses {
                let off = (loss - expected[step]).abs() / expected[step];
                worst = worst.max(off);
                assert!(
                    off <= TOLERANCE,
                    "SHOAL_SEED={seed} on {devices}: step {step}: {loss}, {}",
                    expected[step]
                );
            }
        }
    }
    println!("losses off by at most {worst:.1e}");
}

/// Replicas divide what they all have, and what one alone has it writes.
#[test]
fn every_slice_is_written_once_by_one_of_its_holders() {
    let chain = Chain::new(&presets::preset("gpt2-tiny").unwrap());
    for seed in 0..50 {
        let plan = table(&chain, 4, &mut Draw::new(seed));
        let members = Layout::new(&plan, &chain).members().to_vec();
        let shares = shares(&plan, &members).expect("everyone is there");
        for (tensor, row) in plan.tensors.iter().enumerate() {
            let all = shares.iter().zip(&members);
            let mut written: Vec<_> = all
                .flat_map(|(shares, device)| shares.iter().map(move |share| (share, *device)))
                .filter(|(share, _)| share.tensor == tensor)
                .map(|(share, device)| {
                    assert_eq!(share.holder.device(), device, "seed {seed}");
                    let held =
                        |held: &&shoal_plan::Held| (held.slice, held.holder) == (share.slice, share.holder);
                    assert!(
                        row.optimizer.iter().any(|row| held(&row)),
                        "seed {seed}: it holds what it writes"
                    );
                    share.slice
                })
                .collect();
            written.sort_unstable();
            let end = written.iter().try_fold(0, |end, slice| (slice.start == end).then_some(slice.end));
            assert_eq!(end, Some(row.elements), "seed {seed}: {} is written once", row.tensor);
        }
    }
}
