//! What saving costs a run: steps of gpt2-124m's whole state, paced to last a second and a half as on some other device,
//! with a checkpoint every ten steps and without any, by turns. Wants two quiet cores, 6 GB of memory and 5 GB of disk:
//! where the steps without saving last longer than they are paced to, something else had the cores.
//! `cargo xtask bench checkpoint` runs it; arguments name the folder to save into and the seconds that a step lasts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use shoal_data::{Dataset, DatasetSpec, Tokenizer};
use shoal_engine::identity::Identity;
use shoal_engine::{EngineError, Executor, Interval, Ledger, ModelState, Run, RunEvent, RunSettings, Tiers};
use shoal_kernels::CpuDevice;
use shoal_model::{Chain, presets};
use shoal_nn::{Decay, OptimizerKind, OptimizerSettings, Schedule, ScheduleKind, init};
use shoal_plan::one_device::table;
use shoal_plan::{Activations, DeviceOffer, Purpose, StepShape, compile};
use shoal_state::checkpoint::Store;

const STEP_SECONDS: f64 = 1.5;
const EVERY: u64 = 10;
/// Steps that are measured, after the first one.
const MEASURED: u64 = 40;
const ROUNDS: usize = 2;
const SEQUENCE: usize = 8;
/// For the copy of the state: three times 124 million numbers.
const HOST_BYTES: u64 = 2 << 30;

fn main() -> Result<(), EngineError> {
    let folder = tempfile::tempdir_in(std::env::args().nth(1).map_or_else(std::env::temp_dir, PathBuf::from));
    let folder = folder.map_err(|source| EngineError::File { path: std::env::temp_dir(), source })?;
    let seconds = std::env::args().nth(2).and_then(|text| text.parse().ok()).unwrap_or(STEP_SECONDS);
    let step = Duration::from_secs_f64(seconds);
    println!("gpt2-124m, steps paced to {seconds:.1} s, checkpoints every {EVERY} steps");
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        without.push(seconds_a_step(&folder.path().join(format!("without-{round}")), step, u64::MAX)?);
        with.push(seconds_a_step(&folder.path().join(format!("with-{round}")), step, EVERY)?);
        println!(
            "round {round}: {:.4} s a step without, {:.4} s with: {:+.2} %",
            without[round],
            with[round],
            100.0 * (with[round] / without[round] - 1.0),
        );
    }
    let mean = |times: &[f64]| times.iter().sum::<f64>() / times.len() as f64;
    println!("overhead {:+.2} % (asked for: under 3 %)", 100.0 * (mean(&with) / mean(&without) - 1.0));
    Ok(())
}

/// The mean of some steps, saves between them included.
fn seconds_a_step(folder: &Path, step: Duration, every: u64) -> Result<f64, EngineError> {
    let file = |source| EngineError::File { path: folder.to_owned(), source };
    std::fs::create_dir_all(folder).map_err(file)?;
    let text = folder.join("corpus.txt");
    std::fs::write(&text, "checkpoints in parts, beside what runs. ".repeat(200)).map_err(file)?;
    let tokenizer = Arc::new(Tokenizer::load("bytes", folder)?);
    let data = Dataset::open(
        &DatasetSpec::new(&text, tokenizer, SEQUENCE, 256, folder.join("data")),
        &mut |_, _| {},
    )?;

    let config = presets::preset("gpt2-124m").expect("a preset");
    let (chain, threads) = (Chain::new(&config), 2);
    let shape = StepShape { global_batch: 1, sequence: SEQUENCE, ..StepShape::ADAM };
    let budget_bytes = 4 << 30;
    let offer = DeviceOffer {
        name: "cpu:0".into(),
        budget_bytes,
        workspace_bytes: CpuDevice::workspace_bytes(threads),
        rows_enough: CpuDevice::ROWS_ENOUGH,
    };
    let plan = table(&chain, shape, &offer, 1, Activations::Keep, false);
    let program = compile(&plan, &chain, Purpose::Train)?.swap_remove(0);
    let settings = settings(folder, every);
    let device = Arc::new(CpuDevice::new("cpu:0", threads, budget_bytes)?);
    let mut state =
        ModelState::allocate(&*device, &chain, SEQUENCE, shape.precision, Some(&settings.optimizer))?;
    state.fill(&*device, &chain, |spec, out| {
        init::fill(spec, 0, 0, out);
        Ok(())
    })?;
    let mut executor = Executor::with(Tiers::with_room(device, HOST_BYTES)?, None, chain, SEQUENCE, state)?;
    let instructions = program.instructions.len() as u32;
    executor.set_pace(vec![step / instructions; instructions as usize]);

    let identity = Identity::new(BTreeMap::new(), BTreeMap::new(), serde_json::Value::Null);
    let ledger = Ledger { identity, store: Store::open(&folder.join("checkpoints"))?, keeps_books: true };
    let mut run = Run::new(settings, ledger, executor, plan, program, data, None, None)?;
    let (stop, mut first, mut last) = (AtomicBool::new(false), None, None);
    run.go(&stop, &mut |event| match event {
        RunEvent::Step(record) if record.step == 1 => first = Some(Instant::now()),
        RunEvent::Step(record) if record.step == 1 + MEASURED => {
            last = Some(Instant::now());
            stop.store(true, Ordering::Relaxed);
        }
        RunEvent::Step(_) => {}
        RunEvent::Saved { step, bytes, seconds } => {
            println!("  saved step {step}: {:.2} GB in {seconds:.1} s", bytes as f64 / 1e9);
        }
        RunEvent::SavesWait { .. } => println!("  no room for a copy: training waits"),
    })?;
    std::fs::remove_dir_all(folder).map_err(file)?;
    let between = last.zip(first).map(|(last, first)| last.duration_since(first));
    Ok(between.map_or(f64::NAN, |between| between.as_secs_f64() / MEASURED as f64))
}

fn settings(folder: &Path, every: u64) -> RunSettings {
    RunSettings {
        steps: MEASURED + 3,
        stop_at: None,
        seed: 0,
        shuffle: false,
        optimizer: OptimizerSettings {
            kind: OptimizerKind::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 },
            lr: 1e-4,
            weight_decay: 0.1,
            decay: Decay::Matrices,
            clip_norm: Some(1.0),
        },
        schedule: Schedule { kind: ScheduleKind::Constant, warmup: 0, final_share: 1.0 },
        folder: folder.to_owned(),
        checkpoint_every: Interval::Steps(every),
        checkpoints_kept: 2,
        eval_every: None,
        rates: Vec::new(),
        predicted_seconds: None,
        dollars_per_hour: None,
        trace_from: None,
    }
}
