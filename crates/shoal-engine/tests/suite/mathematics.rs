//! What must hold for every model and every way of cutting its batch: gradients are those of the loss, the
//! cut changes nothing, the memory taken is the memory forecast, and a reordered program gives the same bits.

use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;
use shoal_data::Inputs;
use shoal_engine::executor::Batch;
use shoal_engine::{EngineError, Executor, ModelState, StepInput, StepOutcome};
use shoal_kernels::random::{fill_normal, fold, mix64};
use shoal_kernels::{Arena, CpuDevice, Device};
use shoal_model::{Activation, Chain, Dropout, ImageShape, ModelConfig, Precision, presets};
use shoal_nn::{Decay, OptimizerKind, OptimizerSettings, init};
use shoal_plan::one_device::table;
use shoal_plan::{
    Activations, DeviceOffer, Op, Plan, Program, Purpose, StepShape, compile, forecast, verify,
};

const BUDGET_BYTES: u64 = 64 << 20;

/// Random tokens or images; some targets are ignored. Where samples may be padded, most are.
struct RandomBatch {
    vocabulary: usize,
}

impl Batch for RandomBatch {
    fn read(&self, samples: Range<usize>, inputs: Inputs, targets: &mut [i32]) -> Result<(), EngineError> {
        let each = targets.len() / samples.len();
        let first = samples.start * each;
        let draw_tokens = |tokens: &mut [i32]| {
            for (place, token) in tokens.iter_mut().enumerate() {
                *token = (mix64((first + place) as u64) % self.vocabulary as u64) as i32;
            }
        };
        let mut counting = vec![each; samples.len()];
        match inputs {
            Inputs::Tokens(tokens) => draw_tokens(tokens),
            Inputs::Padded(tokens, lengths) => {
                draw_tokens(tokens);
                for ((sample, length), counting) in samples.zip(lengths).zip(&mut counting) {
                    *counting = length_of(sample, each);
                    *length = *counting as i32;
                }
            }
            Inputs::Images(images) => {
                let before = samples.start * (images.len() / samples.len());
                fill_normal(images, 9, before as u64, 1.0);
            }
        }
        for (place, target) in targets.iter_mut().enumerate() {
            let draw = mix64((first + place) as u64);
            // However unlucky the draw, the batch's first position counts.
            let padding = place % each >= counting[place / each];
            let ignored = padding || ((draw >> 40).is_multiple_of(4) && first + place > 0);
            *target = if ignored { -100 } else { ((draw >> 20) % self.vocabulary as u64) as i32 };
        }
        Ok(())
    }
}

/// How long a sample is that may be padded.
fn length_of(sample: usize, sequence: usize) -> usize {
    1 + (mix64(77 + sample as u64) % sequence as u64) as usize
}

#[derive(Clone, Debug)]
struct Case {
    config: ModelConfig,
    padded: bool,
    global_batch: usize,
    sequence: usize,
    micro_batch: usize,
    recompute: bool,
    layer_first: bool,
    threads: usize,
}

impl Case {
    fn chain(&self) -> Chain {
        Chain { padded: self.padded, ..Chain::new(&self.config) }
    }

    fn plan(&self, micro_batch: usize, recompute: bool, layer_first: bool) -> (Plan, Program) {
        let chain = self.chain();
        let offer = DeviceOffer {
            name: "cpu:0".into(),
            budget_bytes: BUDGET_BYTES,
            workspace_bytes: CpuDevice::workspace_bytes(self.threads),
            rows_enough: CpuDevice::ROWS_ENOUGH,
        };
        let shape = StepShape { global_batch: self.global_batch, sequence: self.sequence, ..StepShape::ADAM };
        let activations = if recompute { Activations::Recompute } else { Activations::Keep };
        let plan = table(&chain, shape, &offer, micro_batch, activations, layer_first);
        let program = compile(&plan, &chain, Purpose::Train).unwrap().remove(0);
        verify(&program, &plan, &chain, Purpose::Train).unwrap();
        (plan, program)
    }

    fn own_plan(&self) -> (Plan, Program) {
        self.plan(self.micro_batch, self.recompute, self.layer_first)
    }

    /// A fresh model whose parameters are `shift` away from their initial values along a direction.
    fn executor(&self, shift: f32, direction: u64) -> Executor {
        // NaN in fresh memory: a read of something nothing wrote shows.
        let arena = Arena::poisoned("cpu:0", BUDGET_BYTES).unwrap();
        let device: Arc<dyn Device> = Arc::new(CpuDevice::with_arena(arena, self.threads).unwrap());
        let chain = self.chain();
        let mut state =
            ModelState::allocate(&*device, &chain, self.sequence, Precision::Fp32, Some(&optimizer()))
                .unwrap();
        state
            .fill(&*device, &chain, |spec, out| {
                init::fill(spec, 3, 0, out);
                // Away from zeros and ones, so that no gradient vanishes by symmetry; and large against the
                // steps of the differences below, so that these stay in the region where the loss is smooth.
                let mut noise = vec![0.0; out.len()];
                fill_normal(&mut noise, fold(11, spec.elements() as u64), 0, 0.3);
                out.iter_mut().zip(&noise).for_each(|(value, noise)| *value += noise);
                let step = direction_of(direction, &spec.name, out.len());
                out.iter_mut().zip(&step).for_each(|(value, step)| *value += shift * step);
                Ok(())
            })
            .unwrap();
        Executor::new(device, chain, self.sequence, state).unwrap()
    }

    fn run(&self, executor: &mut Executor, program: &Program, step: u64) -> StepOutcome {
        let batch = RandomBatch { vocabulary: self.config.vocabulary };
        let settings = optimizer();
        let input = StepInput::train(step, 5, 1e-3, &settings, &batch);
        executor.run(program, &input).unwrap()
    }

    /// Losses of a few steps, then the gradients of the last.
    fn train(&self, program: &Program, steps: u64) -> (Vec<f64>, Vec<Vec<f32>>) {
        let mut executor = self.executor(0.0, 0);
        let losses = (0..steps).map(|step| self.run(&mut executor, program, step).loss()).collect();
        (losses, gradients(&executor))
    }
}

fn gradients(executor: &Executor) -> Vec<Vec<f32>> {
    let sums =
        executor.state.tensors.iter().map(|held| held.gradient.as_ref().unwrap().sum.floats().to_vec());
    sums.collect()
}

fn direction_of(direction: u64, name: &str, elements: usize) -> Vec<f32> {
    let mut out = vec![0.0; elements];
    fill_normal(&mut out, fold(direction, shoal_kernels::random::key_of(name)), 0, 1.0);
    out
}

fn optimizer() -> OptimizerSettings {
    OptimizerSettings {
        // Far above rounding: with the usual 1e-8, a gradient that is nothing but rounding makes a whole step.
        kind: OptimizerKind::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-4 },
        lr: 1e-3,
        weight_decay: 0.1,
        decay: Decay::Matrices,
        clip_norm: Some(1.0),
    }
}

fn config() -> impl Strategy<Value = ModelConfig> {
    let sizes = (1usize..3, 1usize..4, 1usize..3, 1usize..7, 3usize..40);
    let flags = any::<[bool; 4]>();
    (sizes, flags, 0usize..4, 0usize..3).prop_map(
        |((layers, kv, group, half, vocabulary), flags, kind, drop)| {
            let [tied, bias, output_bias, mlp_bias] = flags;
            let (heads, head) = (kv * group, 2 * half);
            // A norm over two or four numbers is nearly a step function: no difference could follow it.
            let head = if kind > 0 && heads * head < 8 { 8 } else { head };
            let mut config = if kind == 3 {
                let image = ImageShape { channels: kv, size: 4 * layers, patch: 2 * group };
                let mut vit = presets::vit(image, vocabulary, heads * head, layers, heads, 14);
                vit.qkv_bias = bias;
                vit.label_smoothing = if output_bias { 0.1 } else { 0.0 };
                vit
            } else if kind == 2 {
                let mut bert = presets::bert(vocabulary, heads * head, layers, heads, 14, 90);
                bert.activation = if bias { Activation::GeluErf } else { Activation::GeluTanh };
                bert.token_types = 1 + usize::from(mlp_bias);
                bert
            } else if kind == 1 {
                presets::gpt2(vocabulary, heads * head, layers, heads, 90)
            } else {
                // A head size of its own: queries need not be as wide as the model.
                let mut llama = presets::llama(vocabulary, 18, layers, heads, kv, 14, 90, 1e4, tied);
                llama.head_size = head;
                llama.attention_scale = 1.0 / (head as f32).sqrt();
                llama.qkv_bias = bias;
                llama.attention_output_bias = output_bias;
                llama.mlp_bias = mlp_bias;
                llama
            };
            config.tied = tied && config.image.is_none();
            // Not so much that a whole row may be dropped: the norm of a row of zeros is infinitely steep.
            let rate = [0.0, 0.1, 0.2][drop];
            config.dropout = Dropout { embedding: rate, attention: rate, residual: rate };
            config
        },
    )
}

fn case() -> impl Strategy<Value = Case> {
    let shape = (1usize..6, prop_oneof![9 => 2usize..12, 1 => 65usize..80], 1usize..6);
    (config(), shape, any::<[bool; 3]>(), 1usize..3).prop_map(|(config, shape, flags, threads)| {
        let (global_batch, sequence, micro_batch) = shape;
        let sequence = if config.image.is_some() { config.positions } else { sequence };
        Case {
            padded: flags[2] && config.image.is_none(),
            config,
            global_batch,
            sequence,
            micro_batch: micro_batch.min(global_batch),
            recompute: flags[0],
            layer_first: flags[1],
            threads,
        }
    })
}

fn relative(a: &[Vec<f32>], b: &[Vec<f32>]) -> f64 {
    let pairs = || a.iter().flatten().zip(b.iter().flatten());
    let distance: f64 = pairs().map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let length: f64 = pairs().map(|(a, _)| f64::from(*a).powi(2)).sum();
    (distance / length.max(1e-20)).sqrt()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// The slope of the loss along a random direction, by differences, is the gradient's. Dropout draws the
    /// same masks each time, because the step is the same.
    #[test]
    fn gradients_are_those_of_the_loss(case in case(), direction in any::<u64>()) {
        let (_, program) = case.own_plan();
        let mut executor = case.executor(0.0, direction);
        case.run(&mut executor, &program, 0);
        let found = gradients(&executor);
        let chain = case.chain();
        let slope: f64 = chain.tensors.iter().zip(&found).map(|(spec, gradient)| {
            let step = direction_of(direction, &spec.name, gradient.len());
            gradient.iter().zip(&step).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum::<f64>()
        }).sum();
        let length = found.iter().flatten().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let loss = |shift: f32| case.run(&mut case.executor(shift, direction), &program, 0).loss();
        // Richardson: the error of the central difference falls with the fourth power of the step, so the
        // step can be long enough for losses in f32, whose rounding moves the quotient by some 4e-4.
        let h = 1e-3f32;
        let central = |h: f32| (loss(h) - loss(-h)) / (2.0 * f64::from(h));
        let numeric = (4.0 * central(h / 2.0) - central(h)) / 3.0;
        prop_assert!((numeric - slope).abs() <= 1e-2 * length.max(0.2),
            "differences {numeric}, gradient {slope}, length {length}");
    }

    /// However the batch is cut and whatever is kept: the same losses and gradients, ignored targets included.
    #[test]
    fn the_cut_of_the_batch_changes_nothing(case in case()) {
        let (_, whole) = case.plan(case.global_batch, false, false);
        let (_, cut) = case.own_plan();
        let ((_, reference), (_, found)) = (case.train(&whole, 1), case.train(&cut, 1));
        let (losses, cut_losses) = (case.train(&whole, 3).0, case.train(&cut, 3).0);
        for (a, b) in losses.iter().zip(&cut_losses) {
            prop_assert!((a - b).abs() <= 1e-5 * a.abs(), "{losses:?} against {cut_losses:?}");
        }
        prop_assert!(relative(&reference, &found) <= 1e-5, "{}", relative(&reference, &found));
    }

    /// The bytes counted at the highest are the bytes forecast, and none are left over.
    #[test]
    fn memory_is_what_was_forecast(case in case()) {
        let (plan, program) = case.own_plan();
        let predicted = forecast(&program, &plan, &case.chain()).total();
        let mut executor = case.executor(0.0, 0);
        let arena = executor.device().arena().clone();
        let resting = arena.used();
        case.run(&mut executor, &program, 0);
        prop_assert_eq!(arena.peak(), predicted);
        prop_assert_eq!(arena.used(), resting);
        drop(executor);
        prop_assert_eq!(arena.used(), 0);
    }

    /// A legal reordering gives the same bits.
    #[test]
    fn a_reordered_program_gives_the_same_bits(case in case(), seed in any::<u64>()) {
        let (plan, program) = case.own_plan();
        let mut reordered = program.clone();
        reordered.instructions.clear();
        let mut waiting = program.instructions.clone();
        let mut draw = seed;
        while !waiting.is_empty() {
            let done: Vec<u32> = reordered.instructions.iter().map(|i| i.id).collect();
            let ready: Vec<usize> = (0..waiting.len())
                .filter(|at| waiting[*at].after.iter().all(|id| done.contains(id)))
                .collect();
            draw = mix64(draw);
            reordered.instructions.push(waiting.remove(ready[draw as usize % ready.len()]));
        }
        verify(&reordered, &plan, &case.chain(), Purpose::Train).unwrap();
        let (losses, found) = case.train(&program, 2);
        let (other_losses, other) = case.train(&reordered, 2);
        prop_assert_eq!(losses, other_losses);
        prop_assert!(found == other, "gradients differ in some bit");
    }
}

fn small_case() -> Case {
    Case {
        config: presets::preset("gpt2-tiny").unwrap(),
        padded: false,
        global_batch: 2,
        sequence: 4,
        micro_batch: 1,
        recompute: false,
        layer_first: false,
        threads: 1,
    }
}

/// One sample of a padded batch, without its padding.
struct Alone {
    batch: RandomBatch,
    sample: usize,
    /// Of the padded batch.
    sequence: usize,
}

impl Batch for Alone {
    fn read(&self, _: Range<usize>, inputs: Inputs, targets: &mut [i32]) -> Result<(), EngineError> {
        let (mut tokens, mut labels, mut length) = (vec![0; self.sequence], vec![0; self.sequence], [0]);
        let room = Inputs::Padded(&mut tokens, &mut length);
        self.batch.read(self.sample..self.sample + 1, room, &mut labels)?;
        let length = length[0] as usize;
        inputs.tokens().copy_from_slice(&tokens[..length]);
        targets.copy_from_slice(&labels[..length]);
        Ok(())
    }
}

/// Padding is as good as nothing: a padded batch has the losses and gradients of its samples, each alone.
#[test]
fn padding_changes_nothing() {
    for (seed, (causal, sequence, samples)) in
        [(false, 11, 5), (false, 70, 4), (true, 9, 3), (false, 300, 2)].into_iter().enumerate()
    {
        let config = match causal {
            true => presets::gpt2(31, 24, 2, 3, 300),
            false => presets::bert(31, 24, 2, 3, 40, 300),
        };
        let whole = Case {
            config,
            padded: true,
            global_batch: samples,
            sequence,
            micro_batch: 1 + seed % 2,
            recompute: seed % 2 == 1,
            layer_first: false,
            threads: 2,
        };
        let mut executor = whole.executor(0.0, 0);
        let padded = whole.run(&mut executor, &whole.own_plan().1, 0);
        let found = gradients(&executor);
        let (mut loss_sum, mut targets) = (0.0, 0);
        let mut expected: Vec<Vec<f64>> = found.iter().map(|gradient| vec![0.0; gradient.len()]).collect();
        for sample in 0..samples {
            let length = length_of(sample, sequence);
            let one =
                Case { padded: false, global_batch: 1, micro_batch: 1, sequence: length, ..whole.clone() };
            let batch = Alone { batch: RandomBatch { vocabulary: 31 }, sample, sequence };
            let mut executor = one.executor(0.0, 0);
            let settings = optimizer();
            let outcome =
                match executor.run(&one.own_plan().1, &StepInput::train(0, 5, 1e-3, &settings, &batch)) {
                    Err(EngineError::NoTargets { .. }) => continue,
                    outcome => outcome.unwrap(),
                };
            loss_sum += outcome.loss_sum;
            targets += outcome.targets;
            for (sum, gradient) in expected.iter_mut().zip(gradients(&executor)) {
                let share = outcome.targets as f64 / padded.targets as f64;
                sum.iter_mut().zip(&gradient).for_each(|(sum, g)| *sum += share * f64::from(*g));
            }
        }
        assert_eq!(padded.targets, targets);
        assert!((padded.loss_sum - loss_sum).abs() <= 1e-5 * loss_sum, "{} {loss_sum}", padded.loss_sum);
        let expected: Vec<Vec<f32>> =
            expected.iter().map(|sum| sum.iter().map(|value| *value as f32).collect()).collect();
        let off = relative(&expected, &found);
        assert!(off <= 1e-5, "{samples} samples of up to {sequence}: {off:e}");
    }
}

/// A gradient past its numbers' range is found in its norm. The step then changes no bit, and what follows is
/// as if it had not been.
#[test]
fn a_step_that_overflows_is_skipped_exactly() {
    let case = small_case();
    let (_, program) = case.own_plan();
    let (settings, batch) = (optimizer(), RandomBatch { vocabulary: case.config.vocabulary });
    let state = |executor: &Executor| -> Vec<Vec<f32>> {
        let all = executor.state.tensors.iter();
        all.flat_map(|held| {
            std::iter::once(held.parameter()).chain(&held.whole().unwrap().tensors().optimizer)
        })
        .map(|tensor| tensor.floats().to_vec())
        .collect()
    };
    let step = |executor: &mut Executor, step: u64, updates: u64, loss_scale: f32| {
        let input = StepInput { updates, loss_scale, ..StepInput::train(step, 5, 1e-3, &settings, &batch) };
        executor.run(&program, &input).unwrap()
    };
    let mut executor = case.executor(0.0, 0);
    assert!(!step(&mut executor, 0, 0, 1024.0).overflowed);
    let before = state(&executor);
    let skipped = step(&mut executor, 1, 1, f32::MAX);
    assert!(skipped.overflowed && skipped.loss().is_finite());
    assert!(state(&executor) == before, "a skipped step changed something");
    let after = step(&mut executor, 2, 1, 1024.0);
    assert!(!after.overflowed && after.gradient_norm.is_finite());

    // The same without the skipped step; nothing random is in this model, so the step's number does not matter.
    let mut straight = case.executor(0.0, 0);
    step(&mut straight, 0, 0, 1024.0);
    step(&mut straight, 1, 1, 1024.0);
    assert!(state(&executor) == state(&straight), "what follows differs");
}

#[test]
fn a_step_without_any_target_is_refused_before_it_divides_by_nothing() {
    struct NoTargets;
    impl Batch for NoTargets {
        fn read(&self, _: Range<usize>, inputs: Inputs, targets: &mut [i32]) -> Result<(), EngineError> {
            inputs.tokens().fill(1);
            targets.fill(-100);
            Ok(())
        }
    }
    let case = small_case();
    let (_, program) = case.own_plan();
    let settings = optimizer();
    let input = StepInput::train(0, 0, 1e-3, &settings, &NoTargets);
    let error = case.executor(0.0, 0).run(&program, &input).unwrap_err();
    assert!(matches!(error, EngineError::NoTargets { step: 1, samples: 2 }), "{error}");
    assert!(matches!(program.instructions[0].op, Op::Load { .. }));
}
