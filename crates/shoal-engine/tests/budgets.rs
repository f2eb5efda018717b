//! Random small models, batches, precisions and budgets. Whatever a budget is, one of three things happens:
//! the planner says that it is too small, training runs inside it to the byte that was forecast, or (where
//! the program is run on less than it was planned for) our own error names who asked. Never the driver's, and
//! nothing is left behind. A few cases on the CPU; ten thousand on a GPU, where there is one.

use std::ops::Range;
use std::sync::Arc;

use shoal_data::Inputs;
use shoal_engine::executor::Batch;
use shoal_engine::{EngineError, Executor, ModelState, StepInput};
use shoal_kernels::device::DeviceError;
use shoal_kernels::random::{fold, mix64};
use shoal_kernels::{Arena, CpuDevice, CudaDevice, Device, MemoryError};
use shoal_model::{Chain, Dropout, ImageShape, ModelConfig, Precision, presets};
use shoal_nn::{Decay, OptimizerKind, OptimizerSettings, init};
use shoal_plan::{Activations, DeviceOffer, PlanError, Planned, Preferences, StepShape, plan_one_device};

const CPU_CASES: u64 = 60;
const GPU_CASES: u64 = 10_000;

/// Cases on the GPU, unless `SHOAL_BUDGET_CASES` asks for another number.
fn gpu_cases() -> u64 {
    let asked = std::env::var("SHOAL_BUDGET_CASES").ok();
    asked.map_or(GPU_CASES, |text| text.parse().expect("SHOAL_BUDGET_CASES is a number"))
}

/// Tokens, padded where they may be, or grey images.
struct RandomSamples {
    vocabulary: usize,
}

impl Batch for RandomSamples {
    fn read(&self, samples: Range<usize>, inputs: Inputs, targets: &mut [i32]) -> Result<(), EngineError> {
        let token = |place: usize| (mix64(place as u64) % self.vocabulary as u64) as i32;
        let first = samples.start * targets.len();
        let each = targets.len() / samples.len();
        let draw = |tokens: &mut [i32]| {
            tokens.iter_mut().enumerate().for_each(|(index, input)| *input = token(first + index));
        };
        match inputs {
            Inputs::Tokens(tokens) => draw(tokens),
            Inputs::Padded(tokens, lengths) => {
                draw(tokens);
                let length = |sample: usize| 1 + (mix64(sample as u64) % each as u64) as i32;
                samples.zip(lengths).for_each(|(sample, to)| *to = length(sample));
            }
            Inputs::Images(images) => images.fill(0.25),
        }
        targets.iter_mut().enumerate().for_each(|(index, target)| *target = token(first + index + 1));
        Ok(())
    }
}

/// One case's random choices.
#[derive(Clone, Copy)]
struct Case(u64);

impl Case {
    fn pick<T: Copy>(self, name: u64, choices: &[T]) -> T {
        choices[(fold(self.0, name) % choices.len() as u64) as usize]
    }

    fn config(self) -> ModelConfig {
        let heads: usize = self.pick(0, &[1, 2, 3, 4]);
        let kv_heads = if heads.is_multiple_of(2) { self.pick(1, &[heads, heads / 2]) } else { heads };
        let width = heads * self.pick(2, &[2, 8, 16, 20, 64, 80]);
        let layers = self.pick(3, &[1, 2]);
        let vocabulary = self.pick(4, &[17, 64, 257, 1000]);
        let mlp = self.pick(5, &[8, 33, 128, 256]);
        let positions = 128;
        let mut config = match self.pick(6, &[0, 1, 2, 3, 4]) {
            0 => ModelConfig { mlp_width: mlp, ..presets::gpt2(vocabulary, width, layers, heads, positions) },
            1 => {
                let tied = self.pick(7, &[true, false]);
                presets::llama(vocabulary, width, layers, heads, kv_heads, mlp, positions, 1e4, tied)
            }
            2 => presets::bert(vocabulary, width, layers, heads, mlp, positions),
            3 => {
                let (channels, patch) = (self.pick(20, &[1, 3]), self.pick(21, &[1, 4, 7]));
                let image = ImageShape { channels, size: patch * self.pick(22, &[1, 2, 5]), patch };
                presets::vit(image, vocabulary, width, layers, heads, mlp)
            }
            _ => presets::qwen2(vocabulary, width, layers, heads, kv_heads, mlp, positions),
        };
        // A row of two numbers of which none is left has no variance: by BERT's own 1e-12 its gradient would leave the
        // range of fp32, and this is about memory.
        config.norm_eps = config.norm_eps.max(1e-5);
        if self.pick(8, &[true, false, false]) {
            config.dropout = Dropout { embedding: 0.1, attention: 0.2, residual: 0.1 };
        }
        config
    }

    fn step(self, config: &ModelConfig, precisions: &[Precision]) -> StepShape {
        StepShape {
            global_batch: self.pick(9, &[1, 2, 3, 5, 8]),
            sequence: match config.image {
                Some(_) => config.positions,
                None => self.pick(10, &[1, 5, 16, 33, 100]),
            },
            precision: self.pick(11, precisions),
            optimizer_states: 2,
            gradients: Default::default(),
        }
    }
}

fn optimizer() -> OptimizerSettings {
    OptimizerSettings {
        kind: OptimizerKind::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 },
        lr: 1e-3,
        weight_decay: 0.1,
        decay: Decay::Matrices,
        clip_norm: Some(1.0),
    }
}

/// Two steps, and an arena that outlives them.
fn train(
    device: Arc<dyn Device>,
    chain: &Chain,
    step: StepShape,
    planned: &Planned,
) -> Result<(f64, u64), EngineError> {
    let settings = optimizer();
    let mut state = ModelState::allocate(&*device, chain, step.sequence, step.precision, Some(&settings))?;
    state.fill(&*device, chain, |spec, out| {
        init::fill(spec, 1, 0, out);
        Ok(())
    })?;
    let mut executor = Executor::new(device.clone(), chain.clone(), step.sequence, state)?;
    let batch = RandomSamples { vocabulary: chain.vocabulary };
    let mut loss = f64::NAN;
    for index in 0..2 {
        let input = StepInput {
            loss_scale: if step.precision == Precision::Fp16 { 256.0 } else { 1.0 },
            ..StepInput::train(index, 3, 1e-3, &settings, &batch)
        };
        loss = executor.run(&planned.program, &input)?.loss();
    }
    Ok((loss, device.arena().peak()))
}

/// What the cases came to.
#[derive(Debug, Default)]
struct Tally {
    trained: u64,
    too_small: u64,
    refused: u64,
}

fn run_case(
    case: Case,
    precisions: &[Precision],
    workspace_bytes: u64,
    open: &dyn Fn(u64, Precision) -> Result<Arc<dyn Device>, DeviceError>,
    tally: &mut Tally,
) {
    let config = case.config();
    let step = case.step(&config, precisions);
    let padded = config.image.is_none() && case.pick(17, &[true, false]);
    let chain = Chain { padded, ..Chain::new(&config) };
    let label = format!("case {:#x}: {config:?}, padded {padded}, {step:?}", case.0);
    // From hardly anything to plenty, beside what the device needs for itself.
    let budget_bytes = workspace_bytes + (20_000.0 * 1.6f64.powi((fold(case.0, 12) % 20) as i32)) as u64;
    let offer = DeviceOffer { name: "test".into(), budget_bytes, workspace_bytes, rows_enough: 1 << 15 };
    let wanted = Preferences {
        activations: case.pick(13, &[None, None, Some(Activations::Recompute)]),
        layer_first: case.pick(14, &[true, false]),
        micro_batch: None,
    };
    let planned = match plan_one_device(&chain, step, &offer, wanted) {
        Ok(planned) => planned,
        Err(PlanError::TooSmall { .. }) => {
            tally.too_small += 1;
            return;
        }
        Err(error) => panic!("{label}: {error}"),
    };
    let forecast = planned.memory.total();
    // One case in four gets less than it was planned for.
    let short = case.pick(15, &[0, 0, 0, 1]) * (1 + fold(case.0, 16) % (forecast - workspace_bytes));
    let given = if short > 0 { forecast - short.min(forecast - workspace_bytes) } else { budget_bytes };
    let device = open(given, step.precision).unwrap_or_else(|error| panic!("{label}: {error}"));
    let arena: Arc<Arena> = device.arena().clone();
    match train(device, &chain, step, &planned) {
        Ok((loss, counted)) => {
            assert_eq!(short, 0, "{label}: trained on {given} bytes, {short} less than forecast");
            assert!(loss.is_finite(), "{label}: the loss is {loss}");
            assert_eq!(counted, forecast, "{label}: counted is not what was forecast");
            tally.trained += 1;
        }
        Err(EngineError::Device(DeviceError::Memory(
            MemoryError::OverBudget { .. } | MemoryError::Fragmented { .. },
        ))) if short > 0 => tally.refused += 1,
        Err(error) => panic!("{label}: {error}"),
    }
    assert_eq!(arena.used(), 0, "{label}: bytes were left behind");
}

#[test]
fn any_budget_on_the_cpu() {
    let open = |budget: u64, _: Precision| -> Result<Arc<dyn Device>, DeviceError> {
        Ok(Arc::new(CpuDevice::new("test", 1, budget)?))
    };
    let mut tally = Tally::default();
    for seed in 0..CPU_CASES {
        let workspace = CpuDevice::workspace_bytes(1);
        run_case(Case(mix64(seed)), &[Precision::Fp32], workspace, &open, &mut tally);
    }
    assert!(tally.trained > 0 && tally.too_small > 0 && tally.refused > 0, "{tally:?}");
}

#[test]
fn any_budget_on_a_gpu() {
    match CudaDevice::count() {
        Ok(0) | Err(_) => return eprintln!("skipped: no GPU on this machine"),
        Ok(_) => {}
    }
    let first = CudaDevice::new("test", 0, 1 << 30).unwrap_or_else(|error| panic!("{error}"));
    let computed: Vec<Precision> = Precision::ALL
        .into_iter()
        .filter(|precision| first.computes(shoal_nn::layer::element(*precision)))
        .collect();
    let open = |budget: u64, precision: Precision| -> Result<Arc<dyn Device>, DeviceError> {
        Ok(Arc::new(first.beside("test", budget)?.with_tf32(precision == Precision::Tf32)))
    };
    let mut tally = Tally::default();
    for seed in 0..gpu_cases() {
        run_case(Case(mix64(seed)), &computed, CudaDevice::workspace_bytes(), &open, &mut tally);
    }
    eprintln!("{} cases on the GPU: {tally:?}", gpu_cases());
}

/// Models of some hundred megabytes: what the driver counts is what was forecast, to 5 % and one chunk of its
/// memory, beside what context and libraries took before.
#[test]
fn a_gpu_driver_counts_what_was_forecast() {
    const CHUNK_BYTES: f64 = (64 << 20) as f64;
    match CudaDevice::count() {
        Ok(0) | Err(_) => return eprintln!("skipped: no GPU on this machine"),
        Ok(_) => {}
    }
    let first = CudaDevice::new("test", 0, 1 << 30).unwrap_or_else(|error| panic!("{error}"));
    let cases = [
        ("gpt2-mini", 16, 256, Precision::Fp32, None),
        ("gpt2-124m", 8, 512, Precision::Fp32, Some(Activations::Recompute)),
        ("gpt2-124m", 8, 1024, Precision::Bf16, None),
        ("gpt2-355m", 8, 512, Precision::Bf16, Some(Activations::Recompute)),
        ("llama-110m", 8, 512, Precision::Fp16, None),
        ("qwen2-0.5b", 2, 512, Precision::Bf16, None),
    ];
    // Twice: libraries load kernels at their first use, and keep them.
    for round in 0..2 {
        for (preset, global_batch, sequence, precision, activations) in cases {
            if !first.computes(shoal_nn::layer::element(precision)) {
                continue;
            }
            let chain = Chain::new(&presets::preset(preset).unwrap());
            let step = StepShape { global_batch, sequence, precision, ..StepShape::ADAM };
            let workspace_bytes = CudaDevice::workspace_bytes();
            let (name, budget_bytes) = ("test".into(), 40 << 30);
            let offer = DeviceOffer { name, budget_bytes, workspace_bytes, rows_enough: 4096 };
            let wanted = Preferences { activations, ..Preferences::default() };
            let planned = plan_one_device(&chain, step, &offer, wanted).unwrap();
            let before = first.driver_bytes().unwrap();
            let device: Arc<dyn Device> = Arc::new(first.beside("test", budget_bytes).unwrap());
            let arena = device.arena().clone();
            let held = device.clone();
            train(device, &chain, step, &planned).unwrap_or_else(|error| panic!("{preset}: {error}"));
            let grown = (held.driver_bytes().unwrap() - before) as f64;
            drop(held);
            assert_eq!(arena.used(), 0, "{preset}: bytes were left behind");
            let forecast = planned.memory.total() as f64;
            let off = (grown - forecast) / forecast;
            eprintln!(
                "{preset} {global_batch} x {sequence} {}: forecast {:.0} MiB, the driver counts {:.0} ({:+.1}%)",
                precision.name(),
                forecast / 1_048_576.0,
                grown / 1_048_576.0,
                100.0 * off
            );
            let apart = (grown - forecast).abs();
            assert!(round == 0 || apart <= 0.05 * forecast + CHUNK_BYTES, "{preset}: {grown} for {forecast}");
        }
    }
}
