//! How steps of several workers end: nobody waits for the others, and yet all do the same next, as the first one says.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::checkpoints::{SEQUENCE, STEPS, data, worker};
use shoal_engine::executor::Gate;
use shoal_engine::metrics::StepRecord;
use shoal_engine::{RunEvent, StopReason};
use shoal_kernels::CpuDevice;
use shoal_model::{Chain, presets};
use shoal_net::{Settings, Tag, collective, in_process};
use shoal_plan::one_device::table;
use shoal_plan::{
    Activations, Compute, ComputeCopy, DeviceOffer, Holder, Layout, Op, Plan, Program, Purpose, Samples,
    StepShape, compile, verify_all,
};
use shoal_state::checkpoint::Store;

const WORKERS: usize = 2;

/// A model of which each worker has all, and trains half of the samples: from the norm to the next step's gradients nobody
/// needs anything of the other.
fn replicas() -> (Chain, Plan) {
    let chain = Chain::new(&presets::preset("gpt2-tiny").unwrap());
    let shape = StepShape { global_batch: 8, sequence: SEQUENCE, ..StepShape::ADAM };
    let workspace_bytes = CpuDevice::workspace_bytes(1);
    let offer = DeviceOffer {
        name: "device 0".into(),
        budget_bytes: u64::MAX,
        workspace_bytes,
        rows_enough: CpuDevice::ROWS_ENOUGH,
    };
    let mut plan = table(&chain, shape, &offer, 4, Activations::Keep, false);
    let mut second = plan.devices[0].clone();
    second.name = "device 1".into();
    plan.devices.push(second);
    for row in &mut plan.layers {
        let compute = |device: usize| Compute {
            device,
            micro_batches: vec![Samples { start: 4 * device, end: 4 * device + 4 }],
            activations: Activations::Keep,
        };
        row.compute = (0..WORKERS).map(compute).collect();
    }
    for row in &mut plan.tensors {
        let residence = row.compute_copies[0].residence;
        row.compute_copies = (0..WORKERS).map(|device| ComputeCopy { device, residence }).collect();
        for held in [&mut row.gradient, &mut row.optimizer] {
            let mut same = held[0].clone();
            same.holder = Holder::Device(1);
            held.push(same);
        }
    }
    (chain, plan)
}

/// What a worker's run came to.
struct Ran {
    reason: StopReason,
    records: BTreeMap<u64, StepRecord>,
}

/// A worker's part of a test.
struct Part<'a> {
    /// Asked before each instruction.
    gate: Option<Gate>,
    stop: &'a AtomicBool,
    /// Told of each step.
    on_step: Box<dyn FnMut(u64) + Send + 'a>,
}

fn run(chain: &Chain, plan: &Plan, folder: &Path, parts: Vec<Part>) -> Vec<Ran> {
    Store::open(&folder.join("checkpoints")).unwrap();
    data(folder);
    let layout = Layout::new(plan, chain);
    let programs = compile(plan, chain, Purpose::Train).unwrap();
    verify_all(&programs, plan, chain, Purpose::Train).unwrap();
    let fabrics = in_process(WORKERS, &Settings::default());
    std::thread::scope(|scope| {
        let start = |((program, fabric), part)| {
            let (program, layout): (&Program, _) = (program, &layout);
            let Part { gate, stop, mut on_step } = part;
            scope.spawn(move || {
                let mut records = BTreeMap::new();
                let mut run = worker(layout, program, fabric, folder, None, gate);
                let gone = run.go(stop, &mut |event| {
                    if let RunEvent::Step(record) = event {
                        on_step(record.step);
                        records.insert(record.step, record);
                    }
                });
                Ran { reason: gone.unwrap(), records }
            })
        };
        let threads: Vec<_> = programs.iter().zip(fabrics).zip(parts).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// How many instructions a worker of `replicas` starts in a step before its updates, which reach the device together.
fn before_updates(chain: &Chain, plan: &Plan) -> usize {
    let program = &compile(plan, chain, Purpose::Train).unwrap()[1];
    let is_update = |op: &Op| matches!(op, Op::Update { .. });
    let before = program.instructions.iter().take_while(|next| !is_update(&next.op)).count();
    assert!(program.instructions[before..].iter().all(|next| is_update(&next.op)), "updates come last");
    before
}

/// One worker is kept from its updates until the other has told of the step, and so has begun the next one.
#[test]
fn a_step_ends_though_another_worker_has_yet_to_update() {
    let (chain, plan) = replicas();
    let folder = tempfile::tempdir().unwrap();
    let (tell, told) = channel();
    let (told, met) = (Mutex::new(told), Arc::new(Mutex::new(None)));
    let (asked, updates, seen) = (AtomicUsize::new(0), before_updates(&chain, &plan), met.clone());
    let gate = move || {
        if asked.fetch_add(1, Ordering::SeqCst) == updates {
            let first = told.lock().unwrap().recv_timeout(Duration::from_secs(60));
            *seen.lock().unwrap() = Some(first);
        }
        true
    };
    let stop = AtomicBool::new(false);
    let on_step = move |step| {
        // Only the first is heard.
        let _ = tell.send(step);
    };
    let ahead = Part { gate: None, stop: &stop, on_step: Box::new(on_step) };
    let behind = Part { gate: Some(Arc::new(gate)), stop: &stop, on_step: Box::new(|_| ()) };
    let ran = run(&chain, &plan, folder.path(), vec![ahead, behind]);
    let met: Option<Result<u64, RecvTimeoutError>> = *met.lock().unwrap();
    assert_eq!(met, Some(Ok(1)), "the first worker waited for the other's updates");
    assert!(ran.iter().all(|ran| ran.reason == StopReason::Finished && ran.records.len() as u64 == STEPS));
}

/// Who is asked to stop in the middle of a step stops at its end, and everyone with it. It is the first worker that is to
/// be asked.
#[test]
fn a_wish_to_stop_counts_at_the_end_of_the_step_that_it_came_in() {
    const IN_STEP: usize = 3;
    let (chain, plan) = replicas();
    let in_step = before_updates(&chain, &plan) + 1;
    for asked_worker in 0..WORKERS {
        let folder = tempfile::tempdir().unwrap();
        let wishes: Vec<Arc<AtomicBool>> = (0..WORKERS).map(|_| Arc::default()).collect();
        let (wish, asked) = (wishes[asked_worker].clone(), AtomicUsize::new(0));
        let gate = move || {
            // At the first of its instructions.
            if asked.fetch_add(1, Ordering::SeqCst) == (IN_STEP - 1) * in_step {
                wish.store(true, Ordering::SeqCst);
            }
            true
        };
        let mut gates: Vec<Option<Gate>> = vec![None; WORKERS];
        gates[asked_worker] = Some(Arc::new(gate));
        let part = |(gate, stop)| Part { gate, stop, on_step: Box::new(|_| ()) };
        let stops = wishes.iter().map(|wish| &**wish);
        let ran = run(&chain, &plan, folder.path(), gates.into_iter().zip(stops).map(part).collect());
        let (reason, steps) = match asked_worker {
            0 => (StopReason::Interrupted, IN_STEP as u64),
            _ => (StopReason::Finished, STEPS),
        };
        for ran in &ran {
            assert_eq!(ran.reason, reason);
            assert_eq!(ran.records.keys().copied().collect::<Vec<_>>(), (1..=steps).collect::<Vec<_>>());
        }
        let store = Store::open_existing(&folder.path().join("checkpoints")).unwrap();
        assert_eq!(store.list().unwrap().last(), Some(&steps), "all of it is saved");
        for record in ran[0].records.values() {
            let devices: Vec<&str> = record.memory_bytes.keys().map(String::as_str).collect();
            assert_eq!(devices, ["device 0", "device 1"]);
            assert!(record.memory_bytes.values().all(|bytes| *bytes > 1 << 20), "{record:?}");
        }
        assert_eq!(ran[0].records[&1].memory_bytes, ran[1].records[&1].memory_bytes);
    }
}

/// As many workers as a fleet may have tell each other as much as a step's end takes: what passes together is more than a
/// link takes without being asked.
#[test]
fn two_hundred_workers_hear_each_other() {
    const MANY: usize = 200;
    let members: Vec<usize> = (0..MANY).collect();
    std::thread::scope(|scope| {
        let members = &members;
        for fabric in in_process(MANY, &Settings::default()) {
            scope.spawn(move || {
                let mut numbers = vec![1.0; 4 + MANY];
                numbers[4 + fabric.rank()] = fabric.rank() as f64;
                collective::sum_f64(&fabric, members, &mut numbers, Tag(7)).unwrap();
                assert!(numbers[..4].iter().all(|number| *number == MANY as f64));
                for (rank, number) in numbers[4..].iter().enumerate() {
                    assert_eq!(*number, (MANY - 1 + rank) as f64);
                }
            });
        }
    });
}
