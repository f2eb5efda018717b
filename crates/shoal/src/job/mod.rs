//! The job file: raw TOML becomes one validated [`Job`] once, and nothing downstream parses again.
//!
//! - [`keys`]: every key there is; a misspelt one is an error that suggests the nearest.
//! - [`raw`]: the file as serde reads it.
//! - [`model`]: what `[model]` names.
//! - [`images`]: how samples that are images are read.
//! - [`schedule`]: learning rates by step.
//! - [`units`]: intervals and sizes as people write them.

mod images;
mod keys;
mod model;
mod raw;
mod schedule;
mod units;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Serialize;
use serde_json::{Value, json};
use shoal_engine::{Interval, Replay};
use shoal_model::{Chain, Model, Precision, UnknownPrecision};
use shoal_nn::{Decay, OptimizerKind, OptimizerSettings, Schedule};
use shoal_plan::{Activations, GradientWire, Preferences};
use shoal_state::checkpoint::Location;

use crate::error::{CliError, Result};

pub use units::{bytes as parse_bytes, bytes_text, duration_text};

/// What a run folder calls how images were read, and the names of their classes.
pub const IMAGES_KEY: &str = "data (of images)";
pub const CLASSES_KEY: &str = "data (names of classes)";

/// What a run folder calls the place of its checkpoints where that is elsewhere, and where they are in it if not.
pub const CHECKPOINT_TO_KEY: &str = "checkpoint.to";
pub const CHECKPOINTS: &str = "checkpoints";

/// Where parameters come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Weights {
    /// Drawn anew.
    Random,
    /// Read from a model's folder.
    Folder {
        path: PathBuf,
        /// The last layer is drawn anew: the folder's has other classes.
        new_head: bool,
    },
}

/// What a job wants to be trained on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceChoice {
    /// A GPU where there is one.
    Auto,
    Cpu,
    Cuda,
}

/// How images become samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ImageReading {
    /// What is taken from each channel, and what it is divided by then.
    pub mean: Vec<f32>,
    pub std: Vec<f32>,
    pub flip: bool,
    pub crop_padding: usize,
}

/// A validated job.
#[derive(Clone, Debug)]
pub struct Job {
    pub name: String,
    pub model: Model,
    /// The imported description, if any.
    pub original_config: Option<Value>,
    pub weights: Weights,
    pub train_data: PathBuf,
    pub tokenizer: String,
    /// The folder that relative paths start from.
    pub base: PathBuf,
    pub text_field: String,
    /// Rows of one sample: its tokens, or a class's row and an image's patches.
    pub sequence: usize,
    /// Whether each document is a sample of its own, padded to the sequence; otherwise every sample is full.
    pub documents: bool,
    /// How images are read, for a model of images.
    pub images: Option<ImageReading>,
    pub shuffle: bool,
    pub global_batch: usize,
    pub steps: u64,
    pub seed: u64,
    pub precision: Precision,
    /// In what gradients go from device to device.
    pub gradients: GradientWire,
    /// Whether the same job must give the same bits on the same GPU.
    pub deterministic: bool,
    pub optimizer: OptimizerSettings,
    pub schedule: Schedule,
    pub run_folder: PathBuf,
    /// Where its checkpoints lie: in the run folder, or in an object store.
    pub checkpoints: Location,
    pub checkpoint_every: Interval,
    pub checkpoints_kept: usize,
    pub eval: Option<(PathBuf, Interval)>,
    /// What a GPU starts at once, if the job says.
    pub graphs: Option<Replay>,
    pub preferences: Preferences,
    /// The device's budget, where the job sets one.
    pub memory_bytes: Option<u64>,
    pub threads: Option<usize>,
    pub device: DeviceChoice,
    /// Machines that may be lost at once without taking state with them, where the job says how many.
    pub survive: Option<usize>,
}

impl Job {
    /// Reads a job file; `overrides` are `section.key=value`, as given on the command line.
    pub fn read(file: &Path, overrides: &[String]) -> Result<Job> {
        Job::parse_as(file, &Job::text(file, overrides)?, overrides.is_empty())
    }

    /// A job file's text, as `overrides` change it.
    pub fn text(file: &Path, overrides: &[String]) -> Result<String> {
        let text = std::fs::read_to_string(file).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => CliError::said(
                format!("{}: there is no such job file", file.display()),
                "`shoal init` writes one that runs as it is",
            ),
            std::io::ErrorKind::InvalidData => {
                CliError::said(format!("{}: it is not UTF-8 text", file.display()), "job files are TOML")
            }
            _ => CliError::File { path: file.into(), source },
        })?;
        keys::with_overrides(file, &text, overrides)
    }

    /// From a text that lies elsewhere; `file` is where its paths start from, and what errors call it.
    pub fn parse(file: &Path, text: &str) -> Result<Job> {
        Job::parse_as(file, text, false)
    }

    /// `as_it_is` where the text is the file's.
    fn parse_as(file: &Path, text: &str, as_it_is: bool) -> Result<Job> {
        Validator { file }.job(Job::raw(file, text, as_it_is)?)
    }

    fn raw(file: &Path, text: &str, as_it_is: bool) -> Result<raw::Job> {
        keys::check(file, text)?;
        toml::from_str(text).map_err(|error| {
            // With --set the text is not the file's, so a line number would mislead: show the line itself.
            let line = error
                .span()
                .and_then(|span| text.get(..span.start))
                .map(|before| before.lines().count().max(1));
            let shown = line.and_then(|line| text.lines().nth(line - 1)).unwrap_or_default();
            let place = line.filter(|_| as_it_is).map_or(String::new(), |line| format!(":{line}"));
            CliError::said(
                format!("{}{place}: `{}`: {}", file.display(), shown.trim(), error.message()),
                "the keys and their types are in the file `shoal init` writes",
            )
        })
    }

    /// Every path that a job names, by its key; nothing of them is looked at.
    pub fn paths(file: &Path, text: &str) -> Result<Vec<(&'static str, PathBuf)>> {
        let raw = Job::raw(file, text, false)?;
        let validator = Validator { file };
        let base = validator.base();
        let mut paths = vec![("data.train", join(base, &raw.data.train))];
        if raw.data.tokenizer != "bytes" {
            paths.push(("data.tokenizer", join(base, &raw.data.tokenizer)));
        }
        paths.extend(raw.model.from.map(|from| ("model.from", join(base, &from))));
        paths.extend(raw.eval.map(|eval| ("eval.data", join(base, &eval.data))));
        let name = validator.name(raw.name)?;
        let (run_folder, _) = validator.places(raw.checkpoint.to, &name)?;
        paths.push(("checkpoint.to", run_folder));
        Ok(paths)
    }

    /// The model as this job trains it.
    pub fn chain(&self) -> Chain {
        Chain { padded: self.documents, ..self.model.chain() }
    }

    /// The keys a resumed run must share with the one that started it.
    pub fn fixed_keys(&self, data_fingerprint: &str) -> BTreeMap<String, Value> {
        let weights = match &self.weights {
            Weights::Random => json!("random"),
            Weights::Folder { .. } => json!("checkpoint"),
        };
        let mut keys = BTreeMap::from([
            ("model.config".to_owned(), self.model.write(None)),
            ("model.init".to_owned(), weights),
            ("data.train (its content)".to_owned(), json!(data_fingerprint)),
            ("data.sequence".to_owned(), json!(self.sequence)),
            ("data.shuffle".to_owned(), json!(self.shuffle)),
            ("train.global_batch".to_owned(), json!(self.global_batch)),
            ("train.seed".to_owned(), json!(self.seed)),
            ("train.optimizer.kind".to_owned(), json!(self.optimizer.state_names())),
        ]);
        if self.documents {
            keys.insert("data.samples".to_owned(), json!("documents"));
        }
        if let Some(images) = &self.images {
            keys.insert(IMAGES_KEY.to_owned(), json!(images));
            keys.insert("train.label_smoothing".to_owned(), json!(self.model.label_smoothing()));
            // Unlike a cut into micro-batches, groups change what is computed.
            if let Some(samples) = self.model.norm_group() {
                keys.insert("train.norm_group".to_owned(), json!(samples));
            }
        }
        keys
    }

    /// The keys it may change.
    pub fn free_keys(&self) -> BTreeMap<String, Value> {
        let mut keys = BTreeMap::from([
            ("name".to_owned(), json!(self.name)),
            ("data.tokenizer".to_owned(), json!(self.tokenizer_path())),
            ("train.steps".to_owned(), json!(self.steps)),
            ("train.precision".to_owned(), json!(self.precision)),
            ("train.gradients".to_owned(), json!(self.gradients)),
            ("train.optimizer".to_owned(), json!(self.optimizer)),
            ("train.schedule".to_owned(), json!(self.schedule)),
        ]);
        if let Location::Objects { url, .. } = &self.checkpoints {
            keys.insert(CHECKPOINT_TO_KEY.to_owned(), json!(url));
        }
        keys
    }

    /// The tokenizer so that it can be found from anywhere.
    fn tokenizer_path(&self) -> String {
        if self.tokenizer == "bytes" {
            return self.tokenizer.clone();
        }
        let path = self.base.join(&self.tokenizer);
        std::fs::canonicalize(&path).unwrap_or(path).display().to_string()
    }
}

/// Turns what serde read into what the program relies on.
struct Validator<'a> {
    file: &'a Path,
}

impl Validator<'_> {
    fn bad(&self, key: &str, what: impl std::fmt::Display, hint: impl Into<String>) -> CliError {
        CliError::said(format!("{}: {key} {what}", self.file.display()), hint)
    }

    /// Where relative paths start from.
    fn base(&self) -> &Path {
        self.file.parent().unwrap_or(Path::new(""))
    }

    fn name(&self, name: Option<String>) -> Result<String> {
        match name {
            Some(name) if name.trim().is_empty() || name.contains('/') || name.starts_with('.') => {
                let hint = "it may name a folder: a word without `/` that does not start with a dot";
                Err(self.bad("name", format!("is \"{name}\""), hint))
            }
            Some(name) => Ok(name),
            None => {
                Ok(self.file.file_stem().map_or("job".into(), |stem| stem.to_string_lossy().into_owned()))
            }
        }
    }

    /// The run folder, and where checkpoints go.
    fn places(&self, to: Option<String>, name: &str) -> Result<(PathBuf, Location)> {
        let (base, run_folder) = (self.base(), format!("runs/{name}"));
        let (run_folder, checkpoints) = match to {
            // What is no checkpoint stays here.
            Some(url) if url.contains("://") => {
                let location = Location::parse(&url, base, std::env::vars()).map_err(|error| {
                    let hint = error.hint().unwrap_or_default();
                    self.bad("checkpoint.to", format!("is no place for checkpoints: {error}"), hint)
                })?;
                let folder = if let Location::Folder(path) = &location {
                    path.clone()
                } else {
                    join(base, &run_folder)
                };
                (folder, Some(location).filter(|location| matches!(location, Location::Objects { .. })))
            }
            Some(folder) => (join(base, &folder), None),
            None => (join(base, &run_folder), None),
        };
        let checkpoints = checkpoints.unwrap_or_else(|| Location::Folder(run_folder.join(CHECKPOINTS)));
        Ok((run_folder, checkpoints))
    }

    fn job(&self, raw: raw::Job) -> Result<Job> {
        let base = self.base();
        let name = self.name(raw.name)?;
        let (mut model, original_config, weights) = self.model(&raw.model, base)?;
        let data = raw.data;
        let folder = raw.model.from.as_deref().map(|from| join(base, from));
        let images = self.images(&data, &model, folder.as_deref())?;
        let sequence = self.sequence(data.sequence, &model)?;
        let documents = self.documents(data.samples.as_deref(), &model)?;
        let train = raw.train;
        if let Some(smoothing) = train.label_smoothing {
            if model.image().is_none() {
                let hint = "only the classes of images are smoothed; leave it out";
                return Err(self.bad("train.label_smoothing", "is set, but the model takes tokens", hint));
            }
            if !(0.0..1.0).contains(&smoothing) {
                let hint = "it is the share of a label that goes to all classes, in 0..1";
                return Err(self.bad("train.label_smoothing", format!("is {smoothing}"), hint));
            }
            model.set_label_smoothing(smoothing);
        }
        if let Some(samples) = train.norm_group {
            if samples == 0 {
                let hint = "it is how many samples a batch norm takes together; left out, the whole batch";
                return Err(self.bad("train.norm_group", "is 0", hint));
            }
            if !model.set_norm_group(samples) {
                let hint = "leave it out";
                return Err(self.bad("train.norm_group", "is set, but the model has no batch norm", hint));
            }
        }
        if train.global_batch == 0 {
            return Err(self.bad("train.global_batch", "is 0", "a step trains on at least one sample"));
        }
        if train.steps == 0 {
            return Err(self.bad("train.steps", "is 0", "train at least one step"));
        }
        let precision: Precision = train.precision.parse().map_err(|known: UnknownPrecision| {
            let what = format!("\"{}\" is not a precision", train.precision);
            self.bad("train.precision", what, known.to_string())
        })?;
        let gradients = match train.gradients.as_str() {
            "fp32" => GradientWire::Fp32,
            "bf16" => GradientWire::Bf16,
            other => {
                let hint = "gradients go between devices in \"fp32\" or \"bf16\"";
                return Err(self.bad("train.gradients", format!("is \"{other}\""), hint));
            }
        };
        let interval = |key: &str, text: &str| {
            units::interval(text).map_err(|what| {
                self.bad(key, what, "write \"100 steps\", \"30s\", \"5m\", \"2h\" or \"auto\"")
            })
        };
        let checkpoint = raw.checkpoint;
        let (run_folder, checkpoints) = self.places(checkpoint.to, &name)?;
        if checkpoint.keep == 0 {
            return Err(self.bad("checkpoint.keep", "is 0", "keep at least one checkpoint"));
        }
        let eval = match raw.eval {
            None => None,
            Some(eval) => match interval("eval.every", &eval.every)? {
                Interval::Auto => {
                    return Err(self.bad("eval.every", "is \"auto\"", "write \"200 steps\" or \"5m\""));
                }
                every => Some((join(base, &eval.data), every)),
            },
        };
        let checkpoint_every = interval("checkpoint.every", &checkpoint.every)?;
        Ok(Job {
            name,
            model,
            original_config,
            weights,
            train_data: join(base, &data.train),
            tokenizer: data.tokenizer,
            base: base.to_owned(),
            text_field: data.text_field,
            sequence,
            documents,
            images,
            shuffle: data.shuffle,
            global_batch: train.global_batch,
            steps: train.steps,
            seed: train.seed,
            precision,
            gradients,
            deterministic: train.deterministic,
            optimizer: self.optimizer(train.optimizer)?,
            schedule: self.schedule(train.schedule)?,
            run_folder,
            checkpoints,
            checkpoint_every,
            checkpoints_kept: checkpoint.keep,
            eval,
            graphs: self.graphs(&raw.plan)?,
            preferences: self.preferences(&raw.plan)?,
            memory_bytes: self.memory(&raw.plan)?,
            threads: self.threads(&raw.plan)?,
            device: self.device(&raw.plan)?,
            survive: raw.plan.survive,
        })
    }

    fn sequence(&self, sequence: Option<usize>, model: &Model) -> Result<usize> {
        let positions = model.positions();
        match (sequence, model.image()) {
            (None, None) => {
                Err(self.bad("data.sequence", "is missing", "set it to the tokens of one sample"))
            }
            (Some(0), None) => Err(self.bad("data.sequence", "is 0", "a sample has at least one token")),
            (Some(sequence), None) if sequence > positions => Err(self.bad(
                "data.sequence",
                format!("is {sequence}, but the model has {positions} positions"),
                format!("set data.sequence to {positions} or less"),
            )),
            (Some(sequence), None) => Ok(sequence),
            (None, Some(_)) => Ok(positions),
            (Some(_), Some(_)) => {
                Err(self.bad("data.sequence", "is set, but the model takes images", "leave it out"))
            }
        }
    }

    /// Whether documents are samples.
    fn documents(&self, samples: Option<&str>, model: &Model) -> Result<bool> {
        let key = "data.samples";
        match samples {
            None => Ok(false),
            Some(_) if model.image().is_some() => {
                Err(self.bad(key, "is set, but the model takes images", "leave it out"))
            }
            Some("packed") => Ok(false),
            Some("documents") if model.is_causal() => Err(self.bad(
                key,
                "is \"documents\", but the model predicts the next token",
                "leave it out: documents then follow each other, and no token is padding",
            )),
            Some("documents") => Ok(true),
            Some(other) => {
                Err(self.bad(key, format!("is \"{other}\""), "set it to \"packed\" or \"documents\""))
            }
        }
    }

    fn optimizer(&self, raw: raw::Optimizer) -> Result<OptimizerSettings> {
        let key = |name: &str| format!("train.optimizer.{name}");
        let bad = |name: &str, value: f64, hint: &str| Err(self.bad(&key(name), format!("is {value}"), hint));
        if !((raw.lr as f32).is_finite() && raw.lr > 0.0) {
            return bad("lr", raw.lr, "the learning rate is a positive number");
        }
        if let Some(beta) = raw.betas.iter().find(|beta| !(0.0..1.0).contains(*beta)) {
            return bad("betas", f64::from(*beta), "both lie in 0..1");
        }
        if !(raw.eps.is_finite() && raw.eps > 0.0) {
            return bad("eps", f64::from(raw.eps), "it is a small positive number");
        }
        if !(raw.weight_decay.is_finite() && raw.weight_decay >= 0.0) {
            return bad("weight_decay", f64::from(raw.weight_decay), "it is zero or positive");
        }
        if !(0.0..1.0).contains(&raw.momentum) {
            return bad("momentum", f64::from(raw.momentum), "it lies in 0..1");
        }
        if let Some(max) = raw.clip_norm.filter(|max| !(max.is_finite() && *max > 0.0)) {
            return bad("clip_norm", f64::from(max), "it is positive; leave it out to clip nothing");
        }
        let kind = match raw.kind.as_str() {
            "adamw" => OptimizerKind::AdamW { beta1: raw.betas[0], beta2: raw.betas[1], eps: raw.eps },
            "sgd" => OptimizerKind::Sgd { momentum: raw.momentum },
            other => {
                return Err(self.bad(
                    &key("kind"),
                    format!("is \"{other}\""),
                    "set it to \"adamw\" or \"sgd\"",
                ));
            }
        };
        let decay = match raw.decay.as_str() {
            "matrices" => Decay::Matrices,
            "all" => Decay::All,
            other => {
                return Err(self.bad(
                    &key("decay"),
                    format!("is \"{other}\""),
                    "set it to \"matrices\" or \"all\"",
                ));
            }
        };
        Ok(OptimizerSettings {
            kind,
            lr: raw.lr,
            weight_decay: raw.weight_decay,
            decay,
            clip_norm: raw.clip_norm,
        })
    }

    fn preferences(&self, raw: &raw::Plan) -> Result<Preferences> {
        let activations = match raw.activations.as_deref() {
            None | Some("auto") => None,
            Some("keep") => Some(Activations::Keep),
            Some("recompute") => Some(Activations::Recompute),
            Some(other) => {
                let hint = "set it to \"keep\", \"recompute\" or \"auto\"";
                return Err(self.bad("plan.activations", format!("is \"{other}\""), hint));
            }
        };
        let layer_first = match raw.order.as_deref() {
            None | Some("micro_batch_first") => false,
            Some("layer_first") => true,
            Some(other) => {
                let hint = "set it to \"micro_batch_first\" or \"layer_first\"";
                return Err(self.bad("plan.order", format!("is \"{other}\""), hint));
            }
        };
        Ok(Preferences { micro_batch: raw.micro_batch, activations, layer_first })
    }

    fn graphs(&self, raw: &raw::Plan) -> Result<Option<Replay>> {
        Ok(Some(match raw.graphs.as_deref() {
            None | Some("auto") => return Ok(None),
            Some("off") => Replay::Nothing,
            Some("step") => Replay::Step,
            Some("instruction") => Replay::Instruction,
            Some(other) => {
                let hint = "set it to \"auto\", \"step\", \"instruction\" or \"off\"";
                return Err(self.bad("plan.graphs", format!("is \"{other}\""), hint));
            }
        }))
    }

    fn memory(&self, raw: &raw::Plan) -> Result<Option<u64>> {
        let text = match &raw.memory {
            None => return Ok(None),
            Some(raw::Size::Bytes(bytes)) => bytes.to_string(),
            Some(raw::Size::Text(text)) => text.clone(),
        };
        units::bytes(&text)
            .map(Some)
            .map_err(|what| self.bad("plan.memory", what, "write \"512MiB\", \"4GiB\" or \"8GB\""))
    }

    fn device(&self, raw: &raw::Plan) -> Result<DeviceChoice> {
        let Some(name) = raw.device.as_deref() else { return Ok(DeviceChoice::Auto) };
        DeviceChoice::from_str(name, false).map_err(|_| {
            let hint = "set it to \"cpu\", \"cuda\" or \"auto\"";
            self.bad("plan.device", format!("is \"{name}\""), hint)
        })
    }

    fn threads(&self, raw: &raw::Plan) -> Result<Option<usize>> {
        match raw.threads {
            Some(0) => Err(self.bad("plan.threads", "is 0", "use at least one thread, or leave it out")),
            Some(threads) if threads > 1024 => {
                Err(self.bad("plan.threads", format!("is {threads}"), "use at most 1024 threads"))
            }
            threads => Ok(threads),
        }
    }
}

fn join(base: &Path, path: &str) -> PathBuf {
    // An address is left as it is, so that the error about it shows what was written.
    if path.contains("://") { PathBuf::from(path) } else { base.join(path) }
}
