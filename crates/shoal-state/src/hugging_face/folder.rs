//! Reading a model folder someone downloaded. The index is as untrusted as the tensors: it may name files
//! outside the folder, files that are missing, and tensors that are not where it says. All of that is found
//! when the folder is opened, before a run has spent any time.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::{CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE};
use crate::disk;
use crate::error::{Error, Result};
use crate::tensors::{TensorFile, TensorInfo};
use crate::text;

/// Bytes of config.json or the index: the largest published are below ten million.
const JSON_BYTES_MAX: u64 = 100_000_000;

/// Endings of files that unpickle: loading one runs whatever its author put in it.
const PICKLE_ENDINGS: [&str; 5] = [".bin", ".pt", ".pth", ".ckpt", ".pkl"];

/// An open model folder. Its headers have been checked; tensors are read when asked for.
#[derive(Debug)]
pub struct Folder {
    dir: PathBuf,
    config: Value,
    files: Vec<TensorFile>,
    /// Which of `files` holds each tensor.
    holders: BTreeMap<String, usize>,
}

/// `model.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Folder {
    pub fn open(dir: &Path) -> Result<Folder> {
        Folder::described_by(dir, CONFIG_FILE)
    }

    /// The same for a folder whose model is described by another file than config.json.
    pub fn described_by(dir: &Path, config_file: &str) -> Result<Folder> {
        // First, so that a folder that does not exist is not reported as one without a config.
        let listed = disk::entries(dir)?;
        let config = read_config(dir, config_file)?;
        let (files, holders) = if disk::exists(&dir.join(WEIGHTS_FILE))? {
            open_single(&dir.join(WEIGHTS_FILE))?
        } else if disk::exists(&dir.join(INDEX_FILE))? {
            open_sharded(dir, &dir.join(INDEX_FILE))?
        } else {
            return Err(no_weights(dir, &listed));
        };
        Ok(Folder { dir: dir.to_owned(), config, files, holders })
    }

    /// What describes the model, an object.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.holders.keys().map(String::as_str)
    }

    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.files[*self.holders.get(name)?].tensors().get(name)
    }

    /// Fills `out` with the first of `names` that the folder has, as `f32`. A tensor's name differs between
    /// a model saved with its head and without it, hence several.
    pub fn read(&self, names: &[String], shape: &[usize], out: &mut [f32]) -> Result<()> {
        let Some((name, &holder)) = names.iter().find_map(|name| self.holders.get_key_value(name)) else {
            let nearest = text::nearest(names, self.names());
            return Err(Error::NoTensor { path: self.dir.clone(), wanted: names.to_vec(), nearest });
        };
        let file = &self.files[holder];
        let found = file.tensors().get(name).map_or(&[][..], |info| &info.shape);
        if found != shape {
            return Err(Error::Shape {
                path: file.path().to_owned(),
                tensor: name.clone(),
                found: found.to_vec(),
                wanted: shape.to_vec(),
            });
        }
        file.read_f32(name, out)
    }
}

fn read_config(dir: &Path, file: &str) -> Result<Value> {
    let path = dir.join(file);
    if !disk::exists(&path)? {
        return Err(Error::NoConfig { dir: dir.to_owned() });
    }
    let config: Value = read_json(&path)?;
    if config.is_object() { Ok(config) } else { Err(json_error(&path, "it is not a JSON object")) }
}

fn read_json<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T> {
    let bytes = disk::read_bounded(path, JSON_BYTES_MAX)?
        .ok_or_else(|| json_error(path, &format!("it is larger than {}", text::size(JSON_BYTES_MAX))))?;
    serde_json::from_slice(&bytes).map_err(|error| {
        json_error(path, &format!("it cannot be understood: {}", text::printable(&error.to_string())))
    })
}

fn json_error(path: &Path, reason: &str) -> Error {
    Error::Json { path: path.to_owned(), reason: reason.to_owned() }
}

type Opened = (Vec<TensorFile>, BTreeMap<String, usize>);

fn open_single(path: &Path) -> Result<Opened> {
    let file = TensorFile::open(path)?;
    let holders = file.tensors().keys().map(|name| (name.clone(), 0)).collect();
    Ok((vec![file], holders))
}

/// Opens every shard the index names and checks that each holds what the index says.
fn open_sharded(dir: &Path, index_path: &Path) -> Result<Opened> {
    let index: Index = read_json(index_path)?;
    for (tensor, file) in &index.weight_map {
        if !stays_inside(file) {
            let (path, tensor, file) = (index_path.to_owned(), tensor.clone(), file.clone());
            return Err(Error::IndexEscapes { path, tensor, file });
        }
    }

    let mut files = Vec::new();
    let mut opened = BTreeMap::new();
    for name in index.weight_map.values().collect::<BTreeSet<_>>() {
        let path = dir.join(name);
        // Follows links: the download cache keeps every file as one.
        if !path.try_exists().map_err(Error::io("look at", &path))? {
            return Err(Error::IndexShard { path: index_path.to_owned(), file: name.clone() });
        }
        opened.insert(name, files.len());
        files.push(TensorFile::open(&path)?);
    }

    let mut holders = BTreeMap::new();
    for (tensor, file) in &index.weight_map {
        let holder = opened[file];
        if !files[holder].tensors().contains_key(tensor) {
            let (path, tensor, file) = (index_path.to_owned(), tensor.clone(), file.clone());
            return Err(Error::IndexTensor { path, tensor, file });
        }
        holders.insert(tensor.clone(), holder);
    }
    Ok((files, holders))
}

/// Whether a path in the index is a plain way down from the folder.
fn stays_inside(file: &str) -> bool {
    let mut components = Path::new(file).components().peekable();
    components.peek().is_some() && components.all(|component| matches!(component, Component::Normal(_)))
}

/// Tells a folder of pickles from one without weights.
fn no_weights(dir: &Path, listed: &[PathBuf]) -> Error {
    let pickle = listed.iter().filter_map(|path| path.file_name()?.to_str()).find(|name| {
        PICKLE_ENDINGS.iter().any(|ending| name.ends_with(ending)) && *name != "training_args.bin"
    });
    match pickle {
        Some(name) => Error::Pickle { dir: dir.to_owned(), file: name.to_owned() },
        None => Error::NoWeights { dir: dir.to_owned() },
    }
}
