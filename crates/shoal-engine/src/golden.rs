//! Comparison with a reference implementation. A golden folder is a Hugging Face model (or a
//! convolutional one with torchvision's names, described by `shape.json`) with
//! `expected.safetensors` (input, labels, logits, loss, grad.NAME, batch0.. as made by the reference) and
//! `losses.json` (losses and gradient norms of AdamW steps over those batches). Samples that are padded at their
//! end have an `attention_mask` beside their input: ones, then zeros. The tests run it on the small models they
//! ship; `shoal verify DIR` on any other.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use shoal_data::Inputs;
use shoal_kernels::{CpuDevice, CudaDevice, Device};
use shoal_model::model::CONFIG_FILE;
use shoal_model::{Chain, Model, Precision, TensorSpec, shape};
use shoal_nn::{Decay, GradientSum, OptimizerKind, OptimizerSettings};
use shoal_plan::one_device::table;
use shoal_plan::{
    Activations, DeviceOffer, Preferences, Purpose, StepShape, compile, plan_one_device, verify,
};
use shoal_state::hugging_face::Folder;

use crate::error::{EngineError, Result};
use crate::executor::{Batch, Executor, Replay, StepInput};
use crate::import::import;
use crate::state::ModelState;

/// What the comparison runs on.
#[derive(Clone, Copy, Debug)]
pub enum GoldenDevice {
    Cpu { threads: usize },
    Cuda { ordinal: usize },
}

impl GoldenDevice {
    fn open(self, precision: Precision) -> Result<Arc<dyn Device>> {
        Ok(match self {
            GoldenDevice::Cpu { threads } => Arc::new(CpuDevice::new("cpu", threads, BUDGET_BYTES)?),
            GoldenDevice::Cuda { ordinal } => {
                let device = CudaDevice::new("cuda", ordinal, BUDGET_BYTES)?;
                Arc::new(device.with_tf32(precision == Precision::Tf32))
            }
        })
    }

    fn workspace_bytes(self) -> u64 {
        match self {
            GoldenDevice::Cpu { threads } => CpuDevice::workspace_bytes(threads),
            GoldenDevice::Cuda { .. } => CudaDevice::workspace_bytes(),
        }
    }
}

/// How to cut the batch, what to keep, and where.
#[derive(Clone, Copy, Debug)]
pub struct GoldenSettings {
    pub micro_batch: Option<usize>,
    pub activations: Option<Activations>,
    pub layer_first: bool,
    pub device: GoldenDevice,
    pub precision: Precision,
    /// What the device may start at once.
    pub replay: Replay,
}

/// Differences from the reference, each relative to what the reference says.
#[derive(Clone, Debug)]
pub struct GoldenReport {
    pub logits: f64,
    /// ‖difference‖ over max(own norm, 1e-6 x the global norm), by tensor.
    pub gradients: Vec<(String, f64)>,
    /// The same over all tensors together.
    pub whole_gradient: f64,
    /// (expected, found)
    pub losses: Vec<(f64, f64)>,
    pub gradient_norms: Vec<(f64, f64)>,
}

impl GoldenReport {
    pub fn worst_gradient(&self) -> (&str, f64) {
        let worst = self.gradients.iter().max_by(|a, b| a.1.total_cmp(&b.1));
        worst.map_or(("", 0.0), |(name, difference)| (name, *difference))
    }

    fn worst(pairs: &[(f64, f64)]) -> f64 {
        let apart = pairs.iter().map(|(expected, found)| (found - expected).abs() / expected.abs());
        apart.fold(0.0, |worst, next| if next.is_nan() { f64::INFINITY } else { worst.max(next) })
    }

    pub fn worst_loss(&self) -> f64 {
        GoldenReport::worst(&self.losses)
    }

    pub fn worst_gradient_norm(&self) -> f64 {
        GoldenReport::worst(&self.gradient_norms)
    }

    /// What fp32 is judged by: the largest of all differences.
    pub fn worst_of_all(&self) -> f64 {
        let all = [self.logits, self.worst_gradient().1, self.worst_loss(), self.worst_gradient_norm()];
        // A NaN anywhere is the worst there is.
        all.iter()
            .fold(0.0, |worst: f64, value| if value.is_nan() { f64::INFINITY } else { worst.max(*value) })
    }
}

/// The reference is fp32: so close must fp32 come (every part), so close half precision (losses, and the
/// gradient as a whole).
pub const EXACT: f64 = 1e-3;
pub const HALF_LOSSES: f64 = 1e-2;
pub const HALF_GRADIENT: f64 = 3e-2;

impl GoldenReport {
    /// Whether the differences are those of rounding in this precision.
    pub fn agrees(&self, precision: Precision) -> bool {
        // Written so that a NaN never passes.
        match precision {
            Precision::Fp32 => self.worst_of_all() <= EXACT,
            Precision::Tf32 | Precision::Bf16 | Precision::Fp16 => {
                self.worst_loss() <= HALF_LOSSES && self.whole_gradient <= HALF_GRADIENT
            }
        }
    }
}

#[derive(Deserialize)]
struct Losses {
    lr: f64,
    betas: [f32; 2],
    eps: f32,
    weight_decay: f32,
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
}

/// What goes in.
#[derive(Clone)]
enum Given {
    Tokens(Vec<i32>),
    Images(Vec<f32>),
}

/// Samples and their targets.
#[derive(Clone)]
struct Rows {
    samples: usize,
    sequence: usize,
    given: Given,
    /// How many of each sample's positions count, where not all do.
    lengths: Option<Vec<i32>>,
    targets: Vec<i32>,
}

impl Rows {
    /// The same samples cut to their first `length` tokens.
    fn prefix(&self, length: usize) -> Rows {
        let cut = |rows: &[i32]| rows.chunks(self.sequence).flat_map(|row| row[..length].to_vec()).collect();
        let Given::Tokens(tokens) = &self.given else { panic!("an image has no beginning") };
        let given = Given::Tokens(cut(tokens));
        let lengths =
            self.lengths.as_ref().map(|all| all.iter().map(|own| (*own).min(length as i32)).collect());
        Rows { samples: self.samples, sequence: length, given, lengths, targets: cut(&self.targets) }
    }

    /// Of logits at every position, those at positions that count: what stands at padding is nobody's affair, and
    /// the reference's is another than ours.
    fn counting(&self, logits: &[f32]) -> Vec<f32> {
        let Some(lengths) = &self.lengths else { return logits.to_vec() };
        let samples = logits.chunks(logits.len() / self.samples).zip(lengths);
        let counts =
            |(all, length): (&[f32], &i32)| all[..all.len() / self.sequence * *length as usize].to_vec();
        samples.flat_map(counts).collect()
    }

    /// What samples have of something that all of them have equally much of.
    fn part<'a, T>(&self, samples: &Range<usize>, all: &'a [T]) -> &'a [T] {
        let each = all.len() / self.samples;
        &all[samples.start * each..samples.end * each]
    }
}

impl Batch for Rows {
    fn read(&self, samples: Range<usize>, inputs: Inputs, targets: &mut [i32]) -> Result {
        match (&self.given, &self.lengths) {
            (Given::Tokens(tokens), Some(all)) => {
                let (room, lengths) = inputs.padded();
                room.copy_from_slice(self.part(&samples, tokens));
                lengths.copy_from_slice(self.part(&samples, all));
            }
            (Given::Tokens(tokens), None) => inputs.tokens().copy_from_slice(self.part(&samples, tokens)),
            (Given::Images(images), _) => inputs.images().copy_from_slice(self.part(&samples, images)),
        }
        targets.copy_from_slice(self.part(&samples, &self.targets));
        Ok(())
    }
}

/// The reference's file, or a sentence on what is wrong with it.
struct Expected<'a> {
    path: &'a Path,
    file: SafeTensors<'a>,
}

impl Expected<'_> {
    fn bad(&self, what: String) -> EngineError {
        EngineError::BadRunFile { path: self.path.to_owned(), what }
    }

    fn floats(&self, name: &str) -> Result<Vec<f32>> {
        let view = self.file.tensor(name).map_err(|error| self.bad(format!("{name}: {error}")))?;
        if view.dtype() != Dtype::F32 {
            return Err(self.bad(format!("{name} is {:?}, not F32", view.dtype())));
        }
        Ok(view.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    fn shape(&self, name: &str) -> Result<Vec<usize>> {
        let view = self.file.tensor(name).map_err(|error| self.bad(format!("{name}: {error}")))?;
        Ok(view.shape().to_vec())
    }

    fn integers(&self, name: &str) -> Result<Vec<i32>> {
        let view = self.file.tensor(name).map_err(|error| self.bad(format!("{name}: {error}")))?;
        if view.dtype() != Dtype::I64 {
            return Err(self.bad(format!("{name} is {:?}, not I64", view.dtype())));
        }
        let words = view.data().as_chunks::<8>().0.iter();
        Ok(words.map(|bytes| i64::from_le_bytes(*bytes) as i32).collect())
    }

    fn has(&self, name: &str) -> bool {
        self.file.tensor(name).is_ok()
    }

    /// Small whole numbers, whichever type they are stored as.
    fn flags(&self, name: &str) -> Result<Vec<i64>> {
        let view = self.file.tensor(name).map_err(|error| self.bad(format!("{name}: {error}")))?;
        let data = view.data();
        Ok(match view.dtype() {
            Dtype::I64 => data.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
            Dtype::I32 => {
                data.as_chunks().0.iter().map(|bytes| i64::from(i32::from_le_bytes(*bytes))).collect()
            }
            Dtype::U8 | Dtype::BOOL => data.iter().map(|byte| i64::from(*byte)).collect(),
            other => return Err(self.bad(format!("{name} is {other:?}, not integers"))),
        })
    }

    /// How long the samples are, from a mask of ones and then zeros each.
    fn lengths(&self, name: &str, samples: usize, sequence: usize) -> Result<Vec<i32>> {
        let refuse = |what: String, hint| EngineError::BadReference { path: self.path.into(), what, hint };
        let shape = self.shape(name)?;
        if shape != [samples, sequence] {
            let what = format!("{name} has the shape {shape:?}, its input {:?}", [samples, sequence]);
            return Err(refuse(what, "a mask has a number for each token"));
        }
        let length_of = |(sample, mask): (usize, &[i64])| {
            let ones = mask.iter().take_while(|flag| **flag == 1).count();
            if ones == 0 || mask[ones..].iter().any(|flag| *flag != 0) {
                let what = format!("{name} is not ones and then zeros in sample {sample}");
                return Err(refuse(what, "samples are padded at their end, and have at least one token"));
            }
            Ok(ones as i32)
        };
        self.flags(name)?.chunks(sequence).enumerate().map(length_of).collect()
    }

    /// Every token is of the first type here.
    fn refuse_types(&self, name: &str) -> Result {
        if self.has(name) && self.flags(name)?.iter().any(|kind| *kind != 0) {
            let what = format!("{name} is not all zeros");
            let hint = "every token is of the first type here: leave token_type_ids out";
            return Err(EngineError::BadReference { path: self.path.into(), what, hint });
        }
        Ok(())
    }

    /// Targets at padding would have to be predicted from what is not there.
    fn refuse_padded_targets(
        &self,
        labels: &str,
        sequence: usize,
        lengths: &[i32],
        targets: &[i32],
    ) -> Result {
        let counts =
            |(length, own): (&i32, &[i32])| own[*length as usize..].iter().any(|target| *target >= 0);
        if lengths.iter().zip(targets.chunks(sequence)).any(counts) {
            let what = format!("{labels} has labels at padding");
            let hint = "set labels to -100 where the attention_mask is 0";
            return Err(EngineError::BadReference { path: self.path.into(), what, hint });
        }
        Ok(())
    }

    fn rows(&self, chain: &Chain, prefix: &str) -> Result<Rows> {
        let (input, labels) = (format!("{prefix}input"), format!("{prefix}labels"));
        let shape = self.shape(&input)?;
        let samples = shape.first().copied().unwrap_or_default();
        let (sequence, fits) = match chain.image {
            Some(image) => (chain.positions, shape[1..] == [image.channels, image.size, image.size]),
            None => (shape.get(1).copied().unwrap_or_default(), shape.len() == 2),
        };
        let targets = self.integers(&labels)?;
        if !fits || samples == 0 || sequence == 0 || targets.len() != samples * chain.targets(sequence) {
            let lengths = targets.len();
            return Err(self.bad(format!("{input} of the shape {shape:?} does not fit {lengths} labels")));
        }
        let given = match chain.image {
            Some(_) => Given::Images(self.floats(&input)?),
            None => Given::Tokens(self.integers(&input)?),
        };
        let mask = format!("{prefix}attention_mask");
        let mut lengths = None;
        if chain.image.is_none() {
            self.refuse_types(&format!("{prefix}token_type_ids"))?;
            if self.has(&mask) {
                let found = self.lengths(&mask, samples, sequence)?;
                self.refuse_padded_targets(&labels, sequence, &found, &targets)?;
                lengths = Some(found);
            }
        }
        Ok(Rows { samples, sequence, given, lengths, targets })
    }

    /// The reference's gradient of a tensor.
    fn gradient(&self, name: &str) -> Result<Vec<f32>> {
        let ours = format!("grad.{name}");
        if self.has(&ours) {
            return self.floats(&ours);
        }
        self.floats(&format!("grad.{}", computed_name(name)))
    }
}

/// What newer versions of transformers call a ViT's tensor while they compute; their files keep the older name.
fn computed_name(name: &str) -> String {
    let renamed = [
        (".encoder.layer.", ".layers."),
        (".attention.attention.query.", ".attention.q_proj."),
        (".attention.attention.key.", ".attention.k_proj."),
        (".attention.attention.value.", ".attention.v_proj."),
        (".attention.output.dense.", ".attention.o_proj."),
        (".intermediate.dense.", ".mlp.fc1."),
        (".output.dense.", ".mlp.fc2."),
    ];
    renamed.iter().fold(name.to_owned(), |name, (then, now)| name.replace(then, now))
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|value| value * value).sum::<f64>().sqrt()
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    norm(a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)))
}

fn length(a: &[f32]) -> f64 {
    norm(a.iter().map(|a| f64::from(*a)))
}

/// The folder's weights, and the model they are of.
fn open(dir: &Path) -> Result<(Folder, Chain)> {
    let file = if dir.join(shape::FILE).is_file() { shape::FILE } else { CONFIG_FILE };
    let folder = Folder::described_by(dir, file)?;
    let model = Model::read(folder.config())
        .map_err(|error| EngineError::BadRunFile { path: dir.join(file), what: error.to_string() })?;
    Ok((folder, model.chain()))
}

/// Runs the comparison.
pub fn check(dir: &Path, settings: GoldenSettings) -> Result<GoldenReport> {
    let read =
        |path: &Path| std::fs::read(path).map_err(|source| EngineError::File { path: path.into(), source });
    let bad = |file: &str, what: String| EngineError::BadRunFile { path: dir.join(file), what };
    let (folder, mut chain) = open(dir)?;
    let (expected_path, losses_path) = (dir.join("expected.safetensors"), dir.join("losses.json"));
    let bytes = read(&expected_path)?;
    let file =
        SafeTensors::deserialize(&bytes).map_err(|error| bad("expected.safetensors", error.to_string()))?;
    let expected = Expected { path: &expected_path, file };
    let losses: Losses = serde_json::from_slice(&read(&losses_path)?)
        .map_err(|error| bad("losses.json", error.to_string()))?;

    let optimizer = OptimizerSettings {
        kind: OptimizerKind::AdamW { beta1: losses.betas[0], beta2: losses.betas[1], eps: losses.eps },
        lr: losses.lr,
        weight_decay: losses.weight_decay,
        decay: Decay::All,
        clip_norm: Some(1.0),
    };
    let first = expected.rows(&chain, "")?;
    let batches = (0..).map(|index| format!("batch{index}."));
    let batches = batches.take_while(|prefix| expected.has(&format!("{prefix}input")));
    let batches = batches.map(|prefix| expected.rows(&chain, &prefix)).collect::<Result<Vec<Rows>>>()?;
    let batches = if batches.is_empty() { vec![first.clone()] } else { batches };
    chain.padded = batches.iter().chain([&first]).any(|rows| rows.lengths.is_some());
    let device = settings.device.open(settings.precision)?;
    let bench = Bench { chain: &chain, folder: &folder, optimizer: &optimizer, settings, device };
    let gradients = bench.gradients(&first)?;
    let (losses_found, norms_found) = bench.steps(&batches, losses.losses.len())?;
    let logits = first.counting(&bench.logits(&first)?);
    let expected_logits = first.counting(&expected.floats("logits")?);
    let mut references = Vec::new();
    let trained = || chain.tensors.iter().filter(|spec| spec.running.is_none());
    for spec in trained() {
        references.push(expected.gradient(&spec.name)?);
    }
    let global = norm(references.iter().map(|reference| length(reference)));
    let apart = norm(gradients.iter().zip(&references).map(|(found, reference)| distance(found, reference)));
    let gradients = trained().zip(&gradients).zip(&references).map(|((spec, found), reference)| {
        let floor = length(reference).max(1e-6 * global);
        (spec.name.clone(), distance(found, reference) / floor)
    });
    Ok(GoldenReport {
        logits: distance(&logits, &expected_logits) / length(&expected_logits),
        gradients: gradients.collect(),
        whole_gradient: apart / global,
        losses: losses.losses.iter().copied().zip(losses_found).collect(),
        gradient_norms: losses.grad_norms.iter().copied().zip(norms_found).collect(),
    })
}

/// What every part of the comparison runs on.
struct Bench<'a> {
    chain: &'a Chain,
    folder: &'a Folder,
    optimizer: &'a OptimizerSettings,
    settings: GoldenSettings,
    device: Arc<dyn Device>,
}

/// Memory for the comparison: golden models are small.
const BUDGET_BYTES: u64 = 4 << 30;

impl Bench<'_> {
    fn executor(&self, sequence: usize, train: bool) -> Result<Executor> {
        let device = self.device.clone();
        let optimizer = train.then_some(self.optimizer);
        let mut state =
            ModelState::allocate(&*device, self.chain, sequence, self.settings.precision, optimizer)?;
        import(self.folder, &*device, self.chain, &mut state)?;
        let mut executor = Executor::new(device, self.chain.clone(), sequence, state)?;
        executor.set_replay(self.settings.replay);
        Ok(executor)
    }

    /// A fixed one: the models are small and few steps are taken.
    fn loss_scale(&self) -> f32 {
        if self.settings.precision == Precision::Fp16 { 1024.0 } else { 1.0 }
    }

    fn offer(&self) -> DeviceOffer {
        let workspace_bytes = self.settings.device.workspace_bytes();
        let name = self.device.name().into();
        DeviceOffer { name, budget_bytes: BUDGET_BYTES, workspace_bytes, rows_enough: 4096 }
    }

    fn shape(&self, rows: &Rows) -> StepShape {
        let optimizer_states = self.optimizer.state_names().len();
        let precision = self.settings.precision;
        StepShape {
            global_batch: rows.samples,
            sequence: rows.sequence,
            precision,
            optimizer_states,
            gradients: Default::default(),
        }
    }

    /// Trains over the batches in turn; losses and gradient norms of each step.
    fn train(&self, executor: &mut Executor, batches: &[Rows], steps: usize) -> Result<(Vec<f64>, Vec<f64>)> {
        let wanted = Preferences {
            micro_batch: self.settings.micro_batch.map(|size| size.min(batches[0].samples)),
            activations: self.settings.activations,
            layer_first: self.settings.layer_first,
        };
        let planned = plan_one_device(self.chain, self.shape(&batches[0]), &self.offer(), wanted)?;
        verify(&planned.program, &planned.plan, self.chain, Purpose::Train)?;
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..steps {
            let batch = &batches[step % batches.len()];
            let input = StepInput {
                loss_scale: self.loss_scale(),
                ..StepInput::train(step as u64, 0, self.optimizer.lr, self.optimizer, batch)
            };
            let outcome = executor.run(&planned.program, &input)?;
            losses.push(outcome.loss());
            norms.push(outcome.gradient_norm);
        }
        Ok((losses, norms))
    }

    /// Gradients of the first batch at the imported weights.
    fn gradients(&self, rows: &Rows) -> Result<Vec<Vec<f32>>> {
        let mut executor = self.executor(rows.sequence, true)?;
        self.train(&mut executor, std::slice::from_ref(rows), 1)?;
        let device = executor.device();
        let sums = executor.state.tensors.iter().zip(&self.chain.tensors);
        let sums = sums.filter(|(_, spec)| spec.running.is_none());
        let sums = sums.filter_map(|(held, spec)| Some((held.gradient.as_ref()?, spec)));
        let unscaled = |(gradient, spec): (&GradientSum, &TensorSpec)| -> Result<Vec<f32>> {
            let scaled = device.host_floats(&gradient.sum)?;
            let turned = spec.turn_out(&scaled[..spec.elements()]);
            Ok(turned.iter().map(|gradient| gradient / self.loss_scale()).collect())
        };
        sums.map(unscaled).collect()
    }

    fn steps(&self, batches: &[Rows], steps: usize) -> Result<(Vec<f64>, Vec<f64>)> {
        let mut executor = self.executor(batches[0].sequence, true)?;
        self.train(&mut executor, batches, steps)
    }

    /// All logits: of the whole at once where a position's are not the next token's, else the next-token logits
    /// of every prefix.
    fn logits(&self, rows: &Rows) -> Result<Vec<f32>> {
        let (samples, sequence, vocabulary) = (rows.samples, rows.sequence, self.chain.vocabulary);
        let mut executor = self.executor(sequence, false)?;
        if !self.chain.causal {
            return self.predict(&mut executor, rows);
        }
        let mut all = vec![0.0; samples * sequence * vocabulary];
        for length in 1..=sequence {
            let logits = self.predict(&mut executor, &rows.prefix(length))?;
            for (sample, logits) in logits.chunks(vocabulary).enumerate() {
                let at = (sample * sequence + length - 1) * vocabulary;
                all[at..at + vocabulary].copy_from_slice(logits);
            }
        }
        Ok(all)
    }

    fn predict(&self, executor: &mut Executor, rows: &Rows) -> Result<Vec<f32>> {
        // Here a batch norm goes by the statistics of what it sees at once.
        let cut = self.settings.micro_batch.filter(|_| !self.chain.has_batch_norm());
        let micro_batch = cut.unwrap_or(usize::MAX).min(rows.samples);
        let plan = table(self.chain, self.shape(rows), &self.offer(), micro_batch, Activations::Keep, false);
        let program = compile(&plan, self.chain, Purpose::Predict)?.remove(0);
        verify(&program, &plan, self.chain, Purpose::Predict)?;
        executor.set_sequence(rows.sequence);
        // The reference's logits are those of its training forward.
        let input = StepInput { batch_statistics: true, ..StepInput::evaluate(0, rows) };
        Ok(executor.run(&program, &input)?.logits)
    }
}
