//! Making a model folder that `transformers` loads. Everything is written into a hidden folder beside the
//! destination and renamed at the end, so that an interrupted export leaves nothing that looks like a model.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::{CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE};
use crate::disk::{self, Disk, RealDisk, Writing};
use crate::error::{Error, Result};
use crate::tensors::{TensorData, TensorWriter};
use crate::text;

/// Choices of an export that have a usual answer.
#[derive(Debug, Clone)]
pub struct ExportOptions {
    /// Data bytes of one weights file; a larger tensor gets a file of its own. Default 5 GB.
    pub shard_bytes_max: u64,
    /// Replace a model folder that is already there, with all that is in it. Default no.
    pub replace: bool,
    /// The file that describes the model. Default `config.json`.
    pub config_file: &'static str,
    /// Further JSON files, by name. Default none.
    pub documents: Vec<(&'static str, Value)>,
}

impl Default for ExportOptions {
    fn default() -> ExportOptions {
        ExportOptions {
            shard_bytes_max: 5_000_000_000,
            replace: false,
            config_file: CONFIG_FILE,
            documents: Vec::new(),
        }
    }
}

/// What an export made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    pub dir: PathBuf,
    /// Names in `dir`, sorted.
    pub files: Vec<String>,
    pub bytes: u64,
}

/// Writes `config` and `tensors` to `dir` as a model folder, with copies of `extra_files` (a
/// `tokenizer.json`, say) beside them. The tensors are written as F32; the caller sees to it that the
/// config's `dtype` says so, for `transformers` converts to that on loading.
pub fn export(
    dir: &Path,
    config: &Value,
    tensors: &[TensorData<'_>],
    extra_files: &[PathBuf],
    options: &ExportOptions,
) -> Result<Exported> {
    export_on(&RealDisk, dir, config, tensors, extra_files, options)
}

pub(crate) fn export_on(
    disk: &dyn Disk,
    dir: &Path,
    config: &Value,
    tensors: &[TensorData<'_>],
    extra_files: &[PathBuf],
    options: &ExportOptions,
) -> Result<Exported> {
    let place = Place::new(dir)?;
    let content = Content::new(&place.dir, config, tensors, extra_files, options)?;
    fs::create_dir_all(disk::parent_of(&place.dir))
        .map_err(Error::io("create the folder that holds", &place.dir))?;

    let writing = Writing { disk, needed_bytes: content.bytes };
    writing.remove_tree(&place.partial)?;
    writing.undo_half_replacement(&place.dir, &place.replaced)?;
    place.refuse_if_in_use(options)?;
    let made = content
        .write(writing, &place.partial)
        .and_then(|()| writing.put_in_place(&place.partial, &place.dir, &place.replaced));
    if made.is_err() {
        // Gives the space back; a failure here would hide the one that matters.
        let _ = writing.remove_tree(&place.partial);
    }
    made.map(|()| Exported { dir: place.dir, files: content.names(), bytes: content.bytes })
}

/// The destination and the two names beside it that an export uses on its way.
struct Place {
    dir: PathBuf,
    partial: PathBuf,
    replaced: PathBuf,
}

impl Place {
    fn new(dir: &Path) -> Result<Place> {
        // A link to a folder stands for the folder: renaming over the link itself would fail.
        let dir = if disk::exists(dir)? {
            dir.canonicalize().map_err(Error::io("follow", dir))?
        } else {
            dir.to_owned()
        };
        let Some(name) = dir.file_name() else {
            return Err(Error::Destination { dir, reason: "it is not the name of a folder".to_owned() });
        };
        let beside = |ending: &str| {
            let mut hidden = OsString::from(".");
            hidden.push(name);
            hidden.push(ending);
            dir.with_file_name(hidden)
        };
        Ok(Place { partial: beside(".export-partial"), replaced: beside(".export-replaced"), dir })
    }

    /// Only a model folder is ever replaced: a mistyped path must not cost someone their files.
    fn refuse_if_in_use(&self, options: &ExportOptions) -> Result<()> {
        let refuse =
            |reason: &str| Err(Error::Destination { dir: self.dir.clone(), reason: reason.to_owned() });
        if !disk::exists(&self.dir)? {
            return Ok(());
        }
        if !self.dir.is_dir() {
            return refuse("it is a file");
        }
        let listed = disk::entries(&self.dir)?;
        if listed.is_empty() {
            return Ok(());
        }
        if !options.replace {
            return refuse("the folder is not empty");
        }
        if !listed.contains(&self.dir.join(options.config_file)) || listed.iter().any(|path| path.is_dir()) {
            return refuse("the folder holds more than a model, so it is not replaced");
        }
        Ok(())
    }
}

/// Everything the folder will hold, laid out before anything is written.
struct Content<'a> {
    weights: Vec<(String, TensorWriter<'a>)>,
    /// Small files made here: config.json, further documents, and the index when there are shards.
    texts: Vec<(String, String)>,
    /// Names in the new folder and where they are copied from.
    copies: Vec<(String, &'a Path)>,
    bytes: u64,
}

/// `model.safetensors.index.json`, keys in the order `transformers` writes them.
#[derive(Serialize)]
struct Index<'a> {
    metadata: IndexMetadata,
    weight_map: BTreeMap<&'a str, &'a str>,
}

#[derive(Serialize)]
struct IndexMetadata {
    total_parameters: u64,
    total_size: u64,
}

impl<'a> Content<'a> {
    fn new(
        dir: &Path,
        config: &Value,
        tensors: &[TensorData<'a>],
        extra_files: &'a [PathBuf],
        options: &ExportOptions,
    ) -> Result<Content<'a>> {
        let shards = pack(tensors, options.shard_bytes_max);
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let mut weights = Vec::new();
        for (index, shard) in shards.iter().enumerate() {
            let name = match shards.len() {
                1 => WEIGHTS_FILE.to_owned(),
                count => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
            };
            let writer = TensorWriter::new(&dir.join(&name), &metadata, shard.iter().copied())?;
            weights.push((name, writer));
        }
        let mut texts = Vec::new();
        let described = std::iter::once((options.config_file, config));
        let documents = options.documents.iter().map(|(name, document)| (*name, document));
        for (name, document) in described.chain(documents) {
            texts.push((name.to_owned(), pretty(&dir.join(name), document)?));
        }
        if shards.len() > 1 {
            let index = index_of(dir, &shards, &weights)?;
            texts.push((INDEX_FILE.to_owned(), pretty(&dir.join(INDEX_FILE), &index)?));
        }
        let mut bytes = weights.iter().map(|(_, writer)| writer.bytes()).sum::<u64>();
        bytes += texts.iter().map(|(_, text)| text.len() as u64).sum::<u64>();

        let mut taken: BTreeSet<String> = weights.iter().map(|(name, _)| name.clone()).collect();
        taken.extend(texts.iter().map(|(name, _)| name.clone()));
        let mut copies = Vec::new();
        for path in extra_files {
            bytes += disk::open_regular(path)?.1;
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
            if name.is_empty() || !taken.insert(name.clone()) {
                let reason =
                    format!("{} cannot be copied: its name is taken", text::quoted(&path.to_string_lossy()));
                return Err(Error::Destination { dir: dir.to_owned(), reason });
            }
            copies.push((name, path.as_path()));
        }
        Ok(Content { weights, texts, copies, bytes })
    }

    fn names(&self) -> Vec<String> {
        let weights = self.weights.iter().map(|(name, _)| name);
        let texts = self.texts.iter().map(|(name, _)| name);
        let copies = self.copies.iter().map(|(name, _)| name);
        let mut names: Vec<String> = weights.chain(texts).chain(copies).cloned().collect();
        names.sort();
        names
    }

    fn write(&self, writing: Writing<'_>, folder: &Path) -> Result<()> {
        writing.create_dir(folder)?;
        for (name, writer) in &self.weights {
            writer.write_on(writing, &folder.join(name))?;
        }
        for (name, from) in &self.copies {
            writing.copy_file(from, &folder.join(name))?;
        }
        for (name, text) in &self.texts {
            writing.write_file(&folder.join(name), text.as_bytes())?;
        }
        writing.sync_dir(folder)
    }
}

/// Fills files in the order given, which keeps the tensors of a layer together; at least one file.
fn pack<'a>(tensors: &[TensorData<'a>], shard_bytes_max: u64) -> Vec<Vec<TensorData<'a>>> {
    let mut shards = vec![Vec::new()];
    let mut filled_bytes = 0;
    for &tensor in tensors {
        let last = shards.len() - 1;
        if !shards[last].is_empty() && filled_bytes + tensor.data_bytes() > shard_bytes_max {
            shards.push(vec![tensor]);
            filled_bytes = tensor.data_bytes();
        } else {
            shards[last].push(tensor);
            filled_bytes += tensor.data_bytes();
        }
    }
    shards
}

fn index_of<'a>(
    dir: &Path,
    shards: &[Vec<TensorData<'a>>],
    weights: &'a [(String, TensorWriter<'_>)],
) -> Result<Index<'a>> {
    let mut weight_map = BTreeMap::new();
    for (shard, (file, _)) in shards.iter().zip(weights) {
        for tensor in shard {
            if weight_map.insert(tensor.name, file.as_str()).is_some() {
                let (path, tensor) = (dir.to_owned(), tensor.name.to_owned());
                return Err(Error::Entry { path, tensor, reason: "it is given twice".to_owned() });
            }
        }
    }
    let total_parameters = shards.iter().flatten().map(|tensor| tensor.data.len() as u64).sum();
    let total_size = shards.iter().flatten().map(TensorData::data_bytes).sum();
    Ok(Index { metadata: IndexMetadata { total_parameters, total_size }, weight_map })
}

fn pretty(path: &Path, value: &impl Serialize) -> Result<String> {
    let text =
        serde_json::to_string_pretty(value).map_err(|error| Error::io("encode", path)(error.into()))?;
    Ok(text + "\n")
}
