//! Convolutional models on the CPU: memory to the byte, and the running statistics of batch norms.

use std::ops::Range;
use std::sync::Arc;

use shoal_data::Inputs;
use shoal_engine::executor::Batch;
use shoal_engine::{EngineError, Executor, ModelState, StepInput};
use shoal_kernels::random::{fill_normal, fold};
use shoal_kernels::{CpuDevice, Device};
use shoal_model::convolutional::Body;
use shoal_model::{Chain, ConvolutionalConfig, Precision};
use shoal_nn::{Decay, OptimizerKind, OptimizerSettings, init};
use shoal_plan::one_device::table;
use shoal_plan::{
    Activations, CompileError, DeviceOffer, PlanError, Planned, Preferences, Purpose, StepShape, compile,
    plan_one_device, verify,
};

const BUDGET_BYTES: u64 = 1 << 30;

/// Noise, of a class that its number decides.
struct Images;

impl Batch for Images {
    fn read(&self, samples: Range<usize>, inputs: Inputs, targets: &mut [i32]) -> Result<(), EngineError> {
        let pixels = inputs.images();
        let each = pixels.len() / samples.len();
        for (sample, pixels) in samples.clone().zip(pixels.chunks_mut(each)) {
            fill_normal(pixels, fold(7, sample as u64), 0, 1.0);
        }
        samples.zip(targets).for_each(|(sample, target)| *target = (sample % 3) as i32);
        Ok(())
    }
}

fn vgg(groups: &[usize], classifier: &[usize], size: usize, dropout: bool) -> Chain {
    let body = Body::Vgg { groups: groups.into(), classifier: classifier.into(), dropout };
    Chain::convolutional(&ConvolutionalConfig { body, first_channels: 5, classes: 7, channels: 3, size })
}

fn resnet(blocks: &[usize], bottleneck: bool, size: usize) -> Chain {
    let body = Body::Resnet { blocks: blocks.into(), bottleneck, widening: 1 };
    Chain::convolutional(&ConvolutionalConfig { body, first_channels: 5, classes: 7, channels: 3, size })
}

fn optimizer(lr: f64) -> OptimizerSettings {
    let kind = OptimizerKind::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 };
    OptimizerSettings { kind, lr, weight_decay: 0.1, decay: Decay::Matrices, clip_norm: Some(1.0) }
}

fn shape(global_batch: usize) -> StepShape {
    StepShape { global_batch, sequence: 1, precision: Precision::Fp32, optimizer_states: 2 }
}

fn offer() -> DeviceOffer {
    let workspace_bytes = CpuDevice::workspace_bytes(1);
    DeviceOffer { name: "test".into(), budget_bytes: BUDGET_BYTES, workspace_bytes, rows_enough: 4096 }
}

fn plan(chain: &Chain, micro_batch: Option<usize>, layer_first: bool) -> Result<Planned, PlanError> {
    let wanted = Preferences { micro_batch, layer_first, ..Preferences::default() };
    plan_one_device(chain, shape(6), &offer(), wanted)
}

fn executor(chain: &Chain) -> Executor {
    let device: Arc<dyn Device> = Arc::new(CpuDevice::new("test", 1, BUDGET_BYTES).unwrap());
    let settings = optimizer(0.0);
    let mut state = ModelState::allocate(&*device, chain, 1, Precision::Fp32, Some(&settings)).unwrap();
    let fill = |spec: &shoal_model::TensorSpec, out: &mut [f32]| {
        init::fill(spec, 1, 0, out);
        Ok(())
    };
    state.fill(&*device, chain, fill).unwrap();
    Executor::new(device, chain.clone(), 1, state).unwrap()
}

fn train(executor: &mut Executor, planned: &Planned, steps: Range<u64>, lr: f64) -> f64 {
    let settings = optimizer(lr);
    let mut loss = f64::NAN;
    for step in steps {
        let input = StepInput::train(step, 3, lr, &settings, &Images);
        loss = executor.run(&planned.program, &input).unwrap().loss();
    }
    loss
}

#[test]
fn counted_bytes_are_those_forecast() {
    let chains = [
        vgg(&[1, 2], &[11], 9, false),
        vgg(&[2, 1, 1], &[6, 13], 16, true),
        vgg(&[1], &[4], 2, false),
        resnet(&[1, 1], false, 17),
        resnet(&[2, 2, 1], true, 24),
        resnet(&[1, 1, 1, 2], true, 40),
    ];
    for (index, chain) in chains.iter().enumerate() {
        for (micro_batch, layer_first) in [(6, false), (6, true), (2, false), (4, true)] {
            if micro_batch < 6 && chain.has_batch_norm() {
                continue;
            }
            let planned = plan(chain, Some(micro_batch), layer_first).unwrap();
            verify(&planned.program, &planned.plan, chain, Purpose::Train).unwrap();
            let mut executor = executor(chain);
            assert!(train(&mut executor, &planned, 0..2, 1e-3).is_finite());
            let counted = executor.device().arena().peak();
            assert_eq!(counted, planned.memory.total(), "chain {index}, micro-batches of {micro_batch}");
        }
    }
}

#[test]
fn a_batch_that_is_normed_together_is_not_cut() {
    let chain = resnet(&[1, 1], false, 17);
    let refused = plan(&chain, Some(3), false).err().unwrap();
    assert!(matches!(&refused, PlanError::Compile(CompileError::SplitGroup { layer }) if layer == "conv1"));
    assert!(refused.hint().is_some());
    assert_eq!(plan(&chain, None, false).unwrap().plan.layers[0].compute[0].micro_batches.len(), 1);
}

/// With parameters that stand still every step has the same statistics, and the running ones go a tenth of what is
/// left of their way towards them.
#[test]
fn running_statistics_follow_the_batches() {
    let chain = resnet(&[1, 1], true, 32);
    let planned = plan(&chain, None, false).unwrap();
    let mut executor = executor(&chain);
    let running = |executor: &Executor| -> Vec<f32> {
        let tensors = executor.state.tensors.iter().zip(&chain.tensors);
        let running = tensors.filter(|(_, spec)| spec.running.is_some());
        running.flat_map(|(held, _)| held.parameter.floats().to_vec()).collect()
    };
    let start = running(&executor);
    train(&mut executor, &planned, 0..1, 0.0);
    let first = running(&executor);
    let trained = train(&mut executor, &planned, 1..2, 0.0);
    let second = running(&executor);
    for ((start, first), second) in start.iter().zip(&first).zip(&second) {
        let expected = first + 0.9 * (first - start);
        assert!((second - expected).abs() <= 1e-5 * expected.abs().max(1.0), "{start}, {first}, {second}");
    }
    assert!(start.iter().zip(&first).any(|(start, first)| (start - first).abs() > 0.01));

    // In the end an evaluation sees what training saw, but for the running variance's other divisor.
    train(&mut executor, &planned, 2..100, 0.0);
    let plan = table(&chain, shape(6), &offer(), 2, Activations::Keep, false);
    let program = compile(&plan, &chain, Purpose::Evaluate).unwrap();
    let evaluated = executor.run(&program, &StepInput::evaluate(100, &Images)).unwrap().loss();
    assert!((evaluated / trained - 1.0).abs() < 0.05, "{evaluated} in evaluation, {trained} in training");
}
