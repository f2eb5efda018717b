//! A trained model on disk: a run folder or a model's own, seen alike by whoever reads one.

use std::path::{Path, PathBuf};

use serde_json::Value;
use shoal_data::Tokenizer;
use shoal_engine::identity::Identity;
use shoal_engine::import::import;
use shoal_engine::{EngineError, ModelState};
use shoal_kernels::Device;
use shoal_model::model::CONFIG_FILE;
use shoal_model::{Chain, ConfigError, Model, shape};
use shoal_state::checkpoint::{Checkpoint, Location, Store};
use shoal_state::hugging_face::Folder;

use crate::error::{CliError, Result};
use crate::job::{CHECKPOINT_TO_KEY, CHECKPOINTS, CLASSES_KEY, IMAGES_KEY};
use crate::preprocessor;

/// The names of a convolutional model's classes, a list.
const CLASSES_FILE: &str = "classes.json";

/// Where the parameters are.
enum Source {
    Run(Box<Checkpoint>),
    Folder(Box<Folder>),
}

pub struct ModelFolder {
    pub path: PathBuf,
    pub model: Model,
    /// As `config.json` or `shape.json` has it.
    pub raw_config: Value,
    source: Source,
    /// What a run was trained with: the tokenizer, how images were normalised, the names of classes.
    trained_with: Option<String>,
    reading: Option<Value>,
    classes: Option<Value>,
}

impl ModelFolder {
    /// Opens a run folder (its newest checkpoint, or the one of `step`) or a Hugging Face folder.
    pub fn open(path: &Path, step: Option<u64>) -> Result<ModelFolder> {
        if let Some(identity) = Identity::read(path)? {
            return ModelFolder::open_run(path, identity, step);
        }
        if !path.is_dir() {
            return Err(CliError::said(
                format!("{}: there is no such folder", path.display()),
                "name a run folder (checkpoint.to of the job) or a model's folder",
            ));
        }
        let file = if path.join(shape::FILE).is_file() { shape::FILE } else { CONFIG_FILE };
        let folder = Folder::described_by(path, file)?;
        let raw_config = folder.config().clone();
        let model = Model::read(&raw_config).map_err(config_error(&path.join(file)))?;
        let source = Source::Folder(Box::new(folder));
        Ok(ModelFolder {
            path: path.to_owned(),
            model,
            raw_config,
            source,
            trained_with: None,
            reading: None,
            classes: None,
        })
    }

    fn open_run(path: &Path, identity: Identity, step: Option<u64>) -> Result<ModelFolder> {
        let elsewhere = identity.free.get(CHECKPOINT_TO_KEY).and_then(Value::as_str).unwrap_or(CHECKPOINTS);
        let checkpoints = Location::parse(elsewhere, path, std::env::vars())?;
        let none = || {
            CliError::said(
                format!("{}: the run has no checkpoint yet", path.display()),
                "let it train until its first checkpoint, or stop it with Ctrl-C",
            )
        };
        if matches!(&checkpoints, Location::Folder(folder) if !folder.is_dir()) {
            return Err(none());
        }
        let store = Store::open_existing_at(&checkpoints)?;
        let checkpoint = match step {
            Some(step) => store.load(step)?,
            None => store.latest()?.ok_or_else(none)?.0,
        };
        let model = Model::read(&identity.config).map_err(config_error(&path.join("run.json")))?;
        let trained_with = identity.free.get("data.tokenizer").and_then(Value::as_str).map(str::to_owned);
        let source = Source::Run(Box::new(checkpoint));
        Ok(ModelFolder {
            path: path.to_owned(),
            model,
            source,
            trained_with,
            reading: identity.fixed.get(IMAGES_KEY).cloned(),
            classes: identity.free.get(CLASSES_KEY).cloned(),
            raw_config: identity.config,
        })
    }

    /// The checkpoint's step, for a run.
    pub fn step(&self) -> Option<u64> {
        match &self.source {
            Source::Run(checkpoint) => Some(checkpoint.header().step),
            Source::Folder(_) => None,
        }
    }

    /// Sets every parameter.
    pub fn fill(
        &self,
        device: &dyn Device,
        chain: &Chain,
        state: &mut ModelState,
    ) -> std::result::Result<(), EngineError> {
        match &self.source {
            Source::Folder(folder) => import(folder, device, chain, state),
            Source::Run(checkpoint) => state.fill(device, chain, |spec, out| {
                Ok(checkpoint.read(&spec.name, "parameter", 0..out.len(), out)?)
            }),
        }
    }

    /// Files beside weights and description: the tokenizer, or how images are prepared where no run says it.
    pub fn files_beside(&self) -> Vec<PathBuf> {
        let prepared = self.path.join(preprocessor::FILE);
        let prepared = Some(prepared).filter(|path| self.reading.is_none() && path.is_file());
        self.tokenizer_file().into_iter().chain(prepared).collect()
    }

    /// What is known of the images and classes of a run, as files to write.
    pub fn documents(&self) -> Vec<(&'static str, Value)> {
        let mut documents = Vec::new();
        if let (Some(image), Some(reading)) = (self.model.image(), &self.reading) {
            let prepared = preprocessor::write(&reading["mean"], &reading["std"], image.size);
            documents.push((preprocessor::FILE, prepared));
        }
        // A ViT's config.json has the names itself.
        if let (Model::Convolutional(_), Some(classes)) = (&self.model, &self.classes) {
            documents.push((CLASSES_FILE, classes.clone()));
        }
        documents
    }

    /// The `tokenizer.json` that belongs to the model, if there is one.
    pub fn tokenizer_file(&self) -> Option<PathBuf> {
        let trained = self.trained_with.as_deref().filter(|name| *name != "bytes").map(PathBuf::from);
        trained.or_else(|| Some(self.path.join("tokenizer.json"))).filter(|path| path.is_file())
    }

    /// The tokenizer to speak with the model: the one named, its own, or bytes where the vocabulary is theirs.
    pub fn tokenizer(&self, named: Option<&str>) -> Result<Tokenizer> {
        if let Some(name) = named {
            return Ok(Tokenizer::load(name, Path::new("."))?);
        }
        if let Some(file) = self.tokenizer_file() {
            return Ok(Tokenizer::load(&file.to_string_lossy(), Path::new("."))?);
        }
        if self.trained_with.as_deref() == Some("bytes") || self.model.vocabulary() == 256 {
            return Ok(Tokenizer::Bytes);
        }
        Err(CliError::said(
            format!("{}: there is no tokenizer.json", self.path.display()),
            "name one with --tokenizer, or say --tokenizer bytes",
        ))
    }
}

fn config_error(path: &Path) -> impl FnOnce(ConfigError) -> CliError + use<> {
    let path = path.to_owned();
    move |error| CliError::Said { sentence: format!("{}: {error}", path.display()), hint: error.hint() }
}
