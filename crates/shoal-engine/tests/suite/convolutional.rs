//! Convolutional models on the CPU: memory to the byte, and the running statistics of batch norms.

use std::ops::Range;
use std::sync::Arc;

use shoal_data::Inputs;
use shoal_engine::executor::Batch;
use shoal_engine::{EngineError, Executor, ModelState, StepInput};
use shoal_kernels::random::{fill_normal, fold};
use shoal_kernels::{CpuDevice, Device};
use shoal_model::convolutional::Body;
use shoal_model::{Chain, ConvolutionalConfig, LayerKind, Pool, Precision};
use shoal_nn::{Decay, OptimizerKind, OptimizerSettings, init};
use shoal_plan::one_device::table;
use shoal_plan::{
    Activations, CompileError, DeviceOffer, Order, Plan, Planned, Preferences, Purpose, StepShape, compile,
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

/// As narrow as they come, on images as small as they come or a little larger.
fn inception(size: usize, dropout: bool) -> Chain {
    let body = Body::Inception { dropout };
    Chain::convolutional(&ConvolutionalConfig { body, first_channels: 2, classes: 7, channels: 3, size })
}

/// The chain with another pool at its end, which must leave as much.
fn ending_in(mut chain: Chain, pool: Pool) -> Chain {
    let last = chain.layers.len() - 2;
    match &mut chain.layers[last].kind {
        LayerKind::Convolution(spec) => spec.pool = Some(pool),
        LayerKind::Join(spec) => spec.pool = Some(pool),
        _ => panic!("no pool at the end"),
    }
    chain
}

fn optimizer(lr: f64) -> OptimizerSettings {
    let kind = OptimizerKind::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 };
    OptimizerSettings { kind, lr, weight_decay: 0.1, decay: Decay::Matrices, clip_norm: Some(1.0) }
}

fn shape(global_batch: usize) -> StepShape {
    StepShape { global_batch, sequence: 1, ..StepShape::ADAM }
}

fn offer() -> DeviceOffer {
    let workspace_bytes = CpuDevice::workspace_bytes(1);
    DeviceOffer { name: "test".into(), budget_bytes: BUDGET_BYTES, workspace_bytes, rows_enough: 4096 }
}

fn plan(chain: &Chain, micro_batch: Option<usize>, layer_first: bool) -> Planned {
    plan_keeping(chain, micro_batch, layer_first, Activations::Keep)
}

fn plan_keeping(chain: &Chain, micro_batch: Option<usize>, layer_first: bool, kept: Activations) -> Planned {
    let wanted = Preferences { micro_batch, layer_first, activations: Some(kept) };
    let planned = plan_one_device(chain, shape(6), &offer(), wanted).unwrap();
    verify(&planned.program, &planned.plan, chain, Purpose::Train).unwrap();
    planned
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

/// All running statistics.
fn running(executor: &Executor) -> Vec<f32> {
    let tensors = executor.state.tensors.iter().zip(&executor.chain().tensors);
    let running = tensors.filter(|(_, spec)| spec.running.is_some());
    running.flat_map(|(held, _)| held.parameter().floats().to_vec()).collect()
}

#[test]
fn counted_bytes_are_those_forecast() {
    let mut chains = vec![
        vgg(&[1, 2], &[11], 9, false),
        vgg(&[2, 1, 1], &[6, 13], 16, true),
        vgg(&[1], &[4], 2, false),
        resnet(&[1, 1], false, 17),
        resnet(&[2, 2, 1], true, 24),
        resnet(&[1, 1, 1, 2], true, 40),
        inception(75, false),
        inception(93, true),
        ending_in(inception(107, false), Pool::Max { kernel: 2, stride: 1, padding: 0 }),
        ending_in(inception(107, true), Pool::WindowAverage { kernel: 2, stride: 1, padding: 0 }),
        ending_in(resnet(&[1, 1], false, 17), Pool::WindowAverage { kernel: 3, stride: 1, padding: 0 }),
    ];
    // In groups of two, as many as there are micro-batches and not.
    for mut grouped in [resnet(&[2, 1], true, 24), inception(75, false)] {
        grouped.set_norm_group(Some(2));
        chains.push(grouped);
    }
    for (index, chain) in chains.iter().enumerate() {
        for (micro_batch, layer_first) in [(6, false), (6, true), (2, false), (4, true), (1, true)] {
            for kept in [Activations::Keep, Activations::Recompute] {
                let planned = plan_keeping(chain, Some(micro_batch), layer_first, kept);
                let mut executor = executor(chain);
                assert!(train(&mut executor, &planned, 0..2, 1e-3).is_finite());
                let counted = executor.device().arena().peak();
                assert_eq!(
                    counted,
                    planned.memory.total(),
                    "chain {index}, {micro_batch} at a time, {kept:?}"
                );
            }
        }
    }
}

/// Statistics go between the micro-batches of a group, so that the batch's cut is not seen: not in the loss of
/// three steps, of which the later ones have learned from gradients, nor in the running statistics of the first.
#[test]
fn groups_are_normed_together_however_the_batch_is_cut() {
    for group in [None, Some(3), Some(2), Some(4)] {
        let mut chain = resnet(&[1, 2], true, 24);
        chain.set_norm_group(group);
        let outcome = |micro_batch: usize, layer_first: bool, kept: Activations| {
            let planned = plan_keeping(&chain, Some(micro_batch), layer_first, kept);
            let mut executor = executor(&chain);
            let first = train(&mut executor, &planned, 0..1, 1e-3);
            // Before anything learned enters: AdamW's first updates make much of rounding.
            let statistics = running(&executor);
            let later = [1, 2].map(|step| train(&mut executor, &planned, step..step + 1, 1e-3));
            ([first, later[0], later[1]], statistics)
        };
        let (losses, statistics) = outcome(6, false, Activations::Keep);
        let cuts = [(5, false), (4, false), (3, false), (2, true), (1, false)];
        for (micro_batch, layer_first) in cuts {
            for kept in [Activations::Keep, Activations::Recompute] {
                let (cut_losses, cut_statistics) = outcome(micro_batch, layer_first, kept);
                for (loss, cut) in losses.iter().zip(cut_losses) {
                    let off = (cut / loss - 1.0).abs();
                    assert!(off < 1e-5, "groups of {group:?}, {micro_batch} at a time: {cut}, not {loss}");
                }
                for (statistic, cut) in statistics.iter().zip(cut_statistics) {
                    let off = (cut - statistic).abs() / statistic.abs().max(0.1);
                    assert!(
                        off < 1e-4,
                        "groups of {group:?}, {micro_batch} at a time: {cut}, not {statistic}"
                    );
                }
            }
        }
    }
    // Groups are seen: other ones give another loss.
    let loss = |group: Option<usize>| {
        let mut chain = resnet(&[1, 2], true, 24);
        chain.set_norm_group(group);
        train(&mut executor(&chain), &plan(&chain, None, false), 0..1, 1e-3)
    };
    assert!((loss(None) / loss(Some(3)) - 1.0).abs() > 1e-4);
}

/// Likewise where branches end side by side. Only the first step is compared: a model so deep and narrow makes much of
/// rounding once it has learned from it.
#[test]
fn an_inception_is_normed_together_however_the_batch_is_cut() {
    for group in [None, Some(3)] {
        let mut chain = inception(107, false);
        chain.set_norm_group(group);
        let outcome = |micro_batch: usize, kept: Activations| {
            let planned = plan_keeping(&chain, Some(micro_batch), false, kept);
            let mut executor = executor(&chain);
            (train(&mut executor, &planned, 0..1, 1e-3), running(&executor))
        };
        let (loss, statistics) = outcome(6, Activations::Keep);
        for (micro_batch, kept) in
            [(4, Activations::Keep), (3, Activations::Recompute), (1, Activations::Keep)]
        {
            let (cut_loss, cut_statistics) = outcome(micro_batch, kept);
            assert!((cut_loss / loss - 1.0).abs() < 1e-5, "{micro_batch} at a time: {cut_loss}, not {loss}");
            for (statistic, cut) in statistics.iter().zip(cut_statistics) {
                let off = (cut - statistic).abs() / statistic.abs().max(0.1);
                assert!(off < 1e-4, "groups of {group:?}, {micro_batch} at a time: {cut}, not {statistic}");
            }
        }
    }
}

/// After a convolution, and over branches that are joined.
#[test]
fn a_window_as_large_as_the_image_averages_all_of_it() {
    for (chain, kernel) in [(resnet(&[1, 1], false, 17), 3), (inception(107, false), 2)] {
        let windowed = ending_in(chain.clone(), Pool::WindowAverage { kernel, stride: 1, padding: 0 });
        let [whole, windowed] = [chain, windowed].map(|chain| {
            let mut executor = executor(&chain);
            let planned = plan(&chain, None, false);
            [0, 1].map(|step| train(&mut executor, &planned, step..step + 1, 1e-5))
        });
        for (whole, windowed) in whole.iter().zip(windowed) {
            assert!((windowed / whole - 1.0).abs() < 1e-5, "{windowed}, not {whole}");
        }
    }
}

/// A group's first micro-batch cannot be done before its last one begins.
#[test]
fn a_group_in_several_micro_batches_goes_layer_by_layer() {
    let chain = resnet(&[1, 1], false, 17);
    let planned = plan(&chain, Some(3), false);
    assert_eq!(planned.plan.order, Order::LayerFirst);
    let refused = Plan { order: Order::MicroBatchFirst, ..planned.plan };
    let refused = compile(&refused, &chain, Purpose::Train).unwrap_err();
    assert!(matches!(&refused, CompileError::SplitGroup { layer } if layer == "conv1"), "{refused}");
    let mut grouped = chain;
    grouped.set_norm_group(Some(3));
    assert_eq!(plan(&grouped, Some(3), false).plan.order, Order::MicroBatchFirst);
}

/// With parameters that stand still every step has the same statistics, and the running ones go a tenth of what is
/// left of their way towards them.
#[test]
fn running_statistics_follow_the_batches() {
    let chain = resnet(&[1, 1], true, 32);
    let planned = plan(&chain, None, false);
    let mut executor = executor(&chain);
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
    let program = compile(&plan, &chain, Purpose::Evaluate).unwrap().remove(0);
    let evaluated = executor.run(&program, &StepInput::evaluate(100, &Images)).unwrap().loss();
    assert!((evaluated / trained - 1.0).abs() < 0.05, "{evaluated} in evaluation, {trained} in training");
}
