//! Trains a GPT-2 of a given size on random tokens, a few steps at a time on request: one side of
//! `cargo xtask bench cpu`. Arguments: width layers heads vocabulary sequence batch threads. For each line on
//! stdin (a number of steps) it prints the seconds they took; at the end of input, the resident growth.

use std::io::{BufRead, Write};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use shoal_engine::executor::Batch;
use shoal_engine::{Executor, ModelState, StepInput};
use shoal_kernels::{CpuDevice, Device};
use shoal_model::{Chain, Precision, presets};
use shoal_nn::{Decay, OptimizerKind, OptimizerSettings, init};
use shoal_plan::{DeviceOffer, Preferences, StepShape, plan_one_device};

/// Random tokens; the target is the next one.
struct RandomTokens {
    vocabulary: usize,
    sequence: usize,
}

impl Batch for RandomTokens {
    fn read(
        &self,
        samples: Range<usize>,
        tokens: &mut [i32],
        targets: &mut [i32],
    ) -> Result<(), shoal_engine::EngineError> {
        let token =
            |place: usize| (shoal_kernels::random::mix64(place as u64) % self.vocabulary as u64) as i32;
        let first = samples.start * self.sequence;
        for (index, (input, target)) in tokens.iter_mut().zip(targets).enumerate() {
            (*input, *target) = (token(first + index), token(first + index + 1));
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|text| text.parse()).collect::<Result<_, _>>()?;
    let [width, layers, heads, vocabulary, sequence, batch, threads] = numbers[..] else {
        return Err("wanted: width layers heads vocabulary sequence batch threads".into());
    };
    let before = resident_bytes()?;
    let chain = Chain::new(&presets::gpt2(vocabulary, width, layers, heads, sequence));
    let optimizer = OptimizerSettings {
        kind: OptimizerKind::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 },
        lr: 3e-4,
        weight_decay: 0.1,
        decay: Decay::Matrices,
        clip_norm: Some(1.0),
    };
    let budget_bytes = 16 << 30;
    let device: Arc<dyn Device> = Arc::new(CpuDevice::new("cpu", threads, budget_bytes)?);
    let offer = DeviceOffer {
        name: "cpu".into(),
        budget_bytes,
        workspace_bytes: CpuDevice::workspace_bytes(threads),
        rows_enough: CpuDevice::ROWS_ENOUGH,
    };
    let (precision, optimizer_states) = (Precision::Fp32, optimizer.state_names().len());
    let shape = StepShape { global_batch: batch, sequence, precision, optimizer_states };
    let micro_batch = std::env::var("MICRO_BATCH").ok().map(|text| text.parse()).transpose()?;
    let wanted = Preferences { micro_batch, ..Preferences::default() };
    let planned = plan_one_device(&chain, shape, &offer, wanted)?;
    let mut state = ModelState::allocate(&*device, &chain, sequence, precision, Some(&optimizer))?;
    state.fill(&*device, &chain, |spec, out| {
        init::fill(spec, 0, 0, out);
        Ok(())
    })?;
    let mut executor = Executor::new(device.clone(), chain, sequence, state)?;
    let data = RandomTokens { vocabulary, sequence };
    let mut step = 0;
    let (stdin, mut stdout) = (std::io::stdin(), std::io::stdout());
    for line in stdin.lock().lines() {
        let steps: u64 = line?.trim().parse()?;
        let started = Instant::now();
        let mut loss = 0.0;
        for _ in 0..steps {
            let input = StepInput::train(step, 0, 3e-4, &optimizer, &data);
            loss = executor.run(&planned.program, &input)?.loss();
            step += 1;
        }
        writeln!(stdout, "{} {loss}", started.elapsed().as_secs_f64())?;
        stdout.flush()?;
    }
    let growth = resident_bytes()?.saturating_sub(before);
    writeln!(stdout, "{growth} {} {}", device.arena().peak(), planned.memory.total())?;
    Ok(())
}

/// The most memory this process has had resident.
fn resident_bytes() -> Result<u64, Box<dyn std::error::Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).ok_or("no VmHWM")?;
    let kib: u64 = line.split_whitespace().nth(1).ok_or("no number")?.parse()?;
    Ok(kib << 10)
}
