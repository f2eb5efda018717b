//! A model trained on random tokens or images, as fast as it goes: what `bench` and `profile` measure.

use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use shoal_data::Inputs;
use shoal_engine::executor::Batch;
use shoal_engine::{EngineError, Executor, ModelState, StepInput, Tiers};
use shoal_kernels::random::{fill_normal, mix64};
use shoal_model::{Chain, Model, Precision, presets};
use shoal_nn::{Decay, OptimizerKind, OptimizerSettings, init};
use shoal_plan::{Layout, Op, PlanError, Planned, Preferences, StepShape, plan_one_device};

use crate::assemble::{LocalDevice, usual_replay};
use crate::error::{CliError, Result};
use crate::job::{DeviceChoice, parse_bytes};
use crate::spill::{self, Around};

/// Tokens of a sample where nothing is said.
const SEQUENCE: usize = 1024;

/// Which model, and of what size its samples are.
#[derive(clap::Args)]
pub struct ModelOptions {
    /// A preset (gpt2-124m, llama-1b, resnet50, …), or gpt2:WIDTH,LAYERS,HEADS,VOCABULARY, or bert: and the same
    pub model: String,
    /// Tokens of a sample [default: 1024, or the model's positions where these are fewer]
    #[arg(long)]
    sequence: Option<usize>,
    /// Rows and columns of an image [default: the model's own]
    #[arg(long)]
    image_size: Option<usize>,
}

/// What to run it on.
#[derive(clap::Args)]
pub struct DeviceOptions {
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    device: DeviceChoice,
    /// The device's budget, such as 12GiB
    #[arg(long)]
    memory: Option<String>,
    #[arg(long)]
    threads: Option<usize>,
}

impl DeviceOptions {
    /// The device, which computes in the precision.
    pub fn choose(&self, precision: Precision) -> Result<LocalDevice> {
        let memory = self.memory.as_deref().map(parse_bytes).transpose();
        let memory =
            memory.map_err(|what| CliError::said(format!("--memory {what}"), "write 12GiB or 800MiB"))?;
        let device = LocalDevice::choose(self.device, memory, self.threads)?;
        device.assert_computes(precision)?;
        Ok(device)
    }
}

impl ModelOptions {
    /// The model as the options want it, and the rows of a sample.
    pub fn sized(&self) -> Result<(Model, usize)> {
        let mut model = model(&self.model)?;
        let bad = |what: String, hint: &str| Err(CliError::said(what, hint));
        if self.sequence == Some(0) {
            return bad("--sequence is at least 1".to_owned(), "leave it out for the default");
        }
        if model.image().is_some() {
            if self.sequence.is_some() {
                return bad(
                    format!("{}: an image has no --sequence", self.model),
                    "--image-size sets its size",
                );
            }
            if let Some(size) = self.image_size {
                model.set_image_size(size);
            }
            if let Some(defect) = model.defect() {
                return bad(format!("--image-size: {defect}"), "leave it out for the model's own");
            }
            let positions = model.positions();
            return Ok((model, positions));
        }
        if self.image_size.is_some() {
            return bad(format!("{}: it takes tokens, not images", self.model), "leave --image-size out");
        }
        let positions = model.positions();
        let sequence = self.sequence.unwrap_or(SEQUENCE.min(positions));
        if sequence > positions {
            let what = format!("--sequence is {sequence}, but {} has {positions} positions", self.model);
            return bad(what, "leave it out for as many as there are");
        }
        if let Model::Transformer(config) = &mut model {
            config.positions = sequence;
        }
        Ok((model, sequence))
    }
}

fn model(name: &str) -> Result<Model> {
    let unknown = || {
        CliError::said(
            format!("\"{name}\" is not a model"),
            format!(
                "the presets are {}; or write gpt2:WIDTH,LAYERS,HEADS,VOCABULARY, or bert: and the same",
                Model::preset_names().collect::<Vec<_>>().join(", ")
            ),
        )
    };
    let Some((family, shape)) = name.split_once(':') else {
        return Model::preset(name).ok_or_else(unknown);
    };
    let numbers: Vec<usize> = shape.split(',').filter_map(|number| number.parse().ok()).collect();
    match (family, &numbers[..]) {
        (_, [width, _, heads, vocabulary])
            if *heads == 0 || !width.is_multiple_of(*heads) || width * vocabulary == 0 =>
        {
            Err(unknown())
        }
        ("gpt2", [width, layers, heads, vocabulary]) => {
            Ok(Model::Transformer(presets::gpt2(*vocabulary, *width, *layers, *heads, 1 << 20)))
        }
        ("bert", [width, layers, heads, vocabulary]) => {
            let config = presets::bert(*vocabulary, *width, *layers, *heads, 4 * width, 1 << 20);
            Ok(Model::Transformer(config))
        }
        _ => Err(unknown()),
    }
}

pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The mean without the least and the greatest tenth. What is added up to a longer time counts by its mean, since it is more
/// often much longer than usual than much shorter; what happens once in a while and not in every run does not count.
pub fn typical(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let left_out = values.len().div_ceil(10).min((values.len() - 1) / 2);
    let middle = &values[left_out..values.len() - left_out];
    middle.iter().sum::<f64>() / middle.len() as f64
}

/// Random tokens; the target is the next one.
struct RandomTokens {
    vocabulary: usize,
    sequence: usize,
}

impl Batch for RandomTokens {
    fn read(
        &self,
        samples: Range<usize>,
        inputs: Inputs,
        targets: &mut [i32],
    ) -> std::result::Result<(), EngineError> {
        let tokens = inputs.tokens();
        let token = |place: usize| (mix64(place as u64) % self.vocabulary as u64) as i32;
        let first = samples.start * self.sequence;
        for (index, (input, target)) in tokens.iter_mut().zip(targets).enumerate() {
            (*input, *target) = (token(first + index), token(first + index + 1));
        }
        Ok(())
    }
}

/// Noise of random classes, drawn once.
struct RandomImages {
    pixels: Vec<f32>,
    labels: Vec<i32>,
}

impl RandomImages {
    fn new(samples: usize, elements: usize, classes: usize) -> RandomImages {
        let mut pixels = vec![0.0; samples * elements];
        fill_normal(&mut pixels, 0, 0, 1.0);
        let label = |sample: usize| (mix64(sample as u64) % classes as u64) as i32;
        RandomImages { pixels, labels: (0..samples).map(label).collect() }
    }
}

impl Batch for RandomImages {
    fn read(
        &self,
        samples: Range<usize>,
        inputs: Inputs,
        targets: &mut [i32],
    ) -> std::result::Result<(), EngineError> {
        let each = self.pixels.len() / self.labels.len();
        inputs.images().copy_from_slice(&self.pixels[samples.start * each..samples.end * each]);
        targets.copy_from_slice(&self.labels[samples]);
        Ok(())
    }
}

/// As models of the kind are usually trained.
fn optimizer(model: &Model) -> OptimizerSettings {
    match model {
        Model::Transformer(_) => OptimizerSettings {
            kind: OptimizerKind::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 },
            lr: 3e-4,
            weight_decay: 0.1,
            decay: Decay::Matrices,
            clip_norm: Some(1.0),
        },
        Model::Convolutional(_) => OptimizerSettings {
            kind: OptimizerKind::Sgd { momentum: 0.9 },
            // So low that a VGG learns from one image over and over without overflowing; the speed is the same.
            lr: 1e-4,
            weight_decay: 1e-4,
            decay: Decay::All,
            clip_norm: None,
        },
    }
}

/// What to train it on, and in what.
#[derive(Clone, Copy)]
pub struct TrialSettings {
    pub batch: usize,
    /// Rows of a sample.
    pub sequence: usize,
    pub precision: Precision,
    pub micro_batch: Option<usize>,
    /// Only kernels that give the same bits every time.
    pub deterministic: bool,
}

/// A step of a model, planned on one device.
fn plan(
    model: &Model,
    settings: &TrialSettings,
    device: &LocalDevice,
) -> std::result::Result<Planned, PlanError> {
    let wanted = Preferences { micro_batch: settings.micro_batch, ..Preferences::default() };
    plan_one_device(&model.chain(), shape(model, settings), &device.offer(), wanted)
}

fn shape(model: &Model, settings: &TrialSettings) -> StepShape {
    let TrialSettings { batch, sequence, precision, .. } = *settings;
    let optimizer_states = optimizer(model).state_names().len();
    StepShape { global_batch: batch, sequence, precision, optimizer_states, gradients: Default::default() }
}

/// Whether all of it fits the device.
pub fn fits(model: &Model, settings: &TrialSettings, device: &LocalDevice) -> bool {
    plan(model, settings, device).is_ok()
}

/// A model that trains so many steps when asked.
pub struct Trial {
    pub executor: Executor,
    /// What samples take that stay on the device.
    pub held_bytes: u64,
    pub planned: Planned,
    /// Of a step that streams.
    pub predicted_seconds: Option<f64>,
    /// Whether state is elsewhere than on the device.
    pub streams: bool,
    pub optimizer: OptimizerSettings,
    chain: Chain,
    data: Box<dyn Batch>,
    loss_scale: f32,
    step: u64,
}

impl Trial {
    /// A model that does not fit the device streams through it where there is something beside it; what goes to a disk
    /// goes into the folder.
    pub fn new(
        model: &Model,
        settings: &TrialSettings,
        device: &LocalDevice,
        beside: Option<(Around, &Path)>,
    ) -> Result<Trial> {
        let TrialSettings { batch, sequence, precision, deterministic, .. } = *settings;
        let (chain, optimizer) = (model.chain(), optimizer(model));
        let (planned, predicted_seconds) = match plan(model, settings, device) {
            Err(refused @ PlanError::TooSmall { .. }) => {
                let streamed =
                    beside.map(|(around, _)| spill::plan(&chain, shape(model, settings), device, around));
                let streamed = streamed.transpose()?.flatten().ok_or(refused)?;
                (streamed.planned, Some(streamed.seconds))
            }
            other => (other?, None),
        };
        let streams = spill::is_spilled(&planned.plan);
        let tiers = match beside.filter(|_| streams) {
            Some((around, folder)) => {
                spill::tiers(device, around, &planned, precision, deterministic, folder)?
            }
            None => Tiers::only(device.open(precision, deterministic)?)?,
        };
        let layout = Layout::new(&planned.plan, &chain);
        let mut state = ModelState::allocate_share(&tiers, &layout, 0, Some(&optimizer))?;
        spill::tell_refusal(&tiers);
        state.load(&tiers, &chain, &[], 0, |spec, _, out| {
            init::fill(spec, 0, 0, out);
            Ok(())
        })?;
        drop(layout);
        let vocabulary = chain.vocabulary;
        let data: Box<dyn Batch> = match chain.image {
            Some(image) => Box::new(RandomImages::new(batch, image.elements(), vocabulary)),
            None => Box::new(RandomTokens { vocabulary, sequence }),
        };
        let (of_images, replay) = (chain.image.is_some(), usual_replay(&chain));
        let mut executor = Executor::with(tiers, None, chain.clone(), sequence, state)?;
        if !streams {
            executor.set_replay(replay);
        }
        let mut held_bytes = 0;
        if of_images && device.gpu.is_some() {
            // The peer's images are on its device from the start too.
            let before = executor.device().arena().used();
            executor.hold_samples(&planned.program, &*data)?;
            held_bytes = executor.device().arena().used() - before;
        }
        // A scale that does not overflow: skipped steps would be no training.
        let loss_scale = if precision == Precision::Fp16 { 1024.0 } else { 1.0 };
        Ok(Trial {
            held_bytes,
            executor,
            chain,
            streams,
            planned,
            predicted_seconds,
            optimizer,
            data,
            loss_scale,
            step: 0,
        })
    }

    /// Seconds that so many steps took, and the last one's loss.
    pub fn train(&mut self, steps: usize) -> Result<(f64, f64)> {
        let started = Instant::now();
        let mut loss = f64::NAN;
        let layout = self.streams.then(|| Layout::new(&self.planned.plan, &self.chain));
        for number in 1..=steps {
            let input = StepInput {
                loss_scale: self.loss_scale,
                next: Some(&*self.data),
                leaves_updates: number < steps,
                ..StepInput::train(self.step, 0, self.optimizer.lr, &self.optimizer, &*self.data)
            };
            loss = self.executor.run_in(layout.as_ref(), &self.planned.program, &input)?.loss();
            self.step += 1;
        }
        Ok((started.elapsed().as_secs_f64(), loss))
    }

    /// One step, and the seconds of each instruction that computes.
    pub fn time_instructions(&mut self) -> Result<Vec<(Op, f64)>> {
        let input = StepInput {
            loss_scale: self.loss_scale,
            ..StepInput::train(self.step, 0, self.optimizer.lr, &self.optimizer, &*self.data)
        };
        self.step += 1;
        Ok(self.executor.time_instructions(&self.planned.program, &input)?)
    }
}
