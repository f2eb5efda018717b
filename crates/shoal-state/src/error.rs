//! What can go wrong, as one type. `Display` is the whole message and names the file and the tensor; there
//! is no source chain below it, so that nothing is printed twice. [`Error::hint`] is the sentence the
//! binary prints after `hint:`.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::checkpoint::Skipped;
use crate::tensors::{Dtype, Fault};
use crate::text;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused. `action` completes "cannot …".
    #[error("{path}: cannot {action}: {cause}")]
    Io { path: PathBuf, action: &'static str, cause: io::Error },
    /// The disk, or the user's share of it, ran out while writing.
    #[error("{path}: the disk is full ({cause}); this needs {} in all", text::size(*needed_bytes))]
    DiskFull { path: PathBuf, needed_bytes: u64, cause: io::Error },
    /// A safetensors file whose bytes and header do not agree.
    #[error("{path}: {fault}")]
    TensorFile { path: PathBuf, fault: Fault },
    /// None of the names asked for is in the file or folder.
    #[error("{path}: there is no tensor {}; {}", wanted_list(wanted), nearest_list(nearest))]
    NoTensor { path: PathBuf, wanted: Vec<String>, nearest: Vec<String> },
    /// The tensor is there with another shape than the model has.
    #[error("{path}: tensor {} has shape {found:?}, the model wants {wanted:?}", text::quoted(tensor))]
    Shape { path: PathBuf, tensor: String, found: Vec<usize>, wanted: Vec<usize> },
    /// The tensor's elements are not of a type that can be read as numbers for training.
    #[error("{path}: tensor {} holds {dtype} elements, which cannot be read as f32", text::quoted(tensor))]
    Dtype { path: PathBuf, tensor: String, dtype: Dtype },
    /// The caller's buffer does not have the tensor's size.
    #[error("{path}: tensor {} has {elements} elements, the buffer {buffer}", text::quoted(tensor))]
    Buffer { path: PathBuf, tensor: String, elements: u64, buffer: usize },
    /// Elements asked for that the tensor does not have, or not as many as the buffer.
    #[error(
        "{path}: elements {} to {} of tensor {} were asked for, which has {elements}; the buffer has {buffer}",
        range.start, range.end, text::quoted(tensor)
    )]
    Range { path: PathBuf, tensor: String, elements: u64, range: Range<usize>, buffer: usize },
    /// An object store refused, or could not be reached.
    #[error("{path}: cannot {action}: {reason}")]
    Objects { path: PathBuf, action: &'static str, reason: String },
    /// An object store is named, and this program knows none.
    #[error("{url}: this program was built without object stores")]
    NoObjects { url: String },
    /// A URL that names no place. It is not shown: there may be a secret in it.
    #[error("a URL with {}:// cannot be used: {reason}", text::printable(scheme))]
    Location { scheme: String, reason: String },
    /// A part of a checkpoint that cannot be begun.
    #[error("{path}: cannot write it: {reason}")]
    Part { path: PathBuf, reason: String },
    /// A tensor given to be written that cannot be.
    #[error("{path}: cannot write tensor {}: {reason}", text::quoted(tensor))]
    Entry { path: PathBuf, tensor: String, reason: String },
    /// A checkpoint's manifest or shard is not what was saved.
    #[error("{path}: {reason}")]
    Damaged { path: PathBuf, reason: String },
    /// A whole manifest of a format this program does not know.
    #[error("{path}: the checkpoint has format {found}; this program reads up to {known}")]
    Format { path: PathBuf, found: u32, known: u32 },
    /// The checkpoint asked for by step does not exist.
    #[error("{root}: there is no checkpoint of step {step}")]
    NoCheckpoint { root: PathBuf, step: u64, available: Vec<u64> },
    /// Checkpoints exist, and not one of them can be used.
    #[error("{root}: none of the {} checkpoints can be used: {}", skipped.len(), reasons(skipped))]
    NoneValid { root: PathBuf, skipped: Vec<Skipped> },
    /// The checkpoint has no such tensor in this role.
    #[error("{path}: the checkpoint holds no {role} of tensor {}", text::quoted(tensor))]
    NoState { path: PathBuf, tensor: String, role: String },
    /// The folder has nothing that describes its model.
    #[error("{dir}: there is neither config.json nor shape.json, so this is not a model's folder")]
    NoConfig { dir: PathBuf },
    /// config.json or the index cannot be understood.
    #[error("{path}: {reason}")]
    Json { path: PathBuf, reason: String },
    /// The folder has no weights at all.
    #[error("{dir}: there is neither model.safetensors nor model.safetensors.index.json")]
    NoWeights { dir: PathBuf },
    /// The folder's only weights are in a format that can execute code.
    #[error("{dir}: the weights are only in {file}, a pickle; pickles can execute code and are never read")]
    Pickle { dir: PathBuf, file: String },
    /// The index names a file outside the folder.
    #[error(
        "{path}: the index puts tensor {} in {}, outside the folder",
        text::quoted(tensor),
        text::quoted(file)
    )]
    IndexEscapes { path: PathBuf, tensor: String, file: String },
    /// The index names a file that is not there.
    #[error("{path}: the index names the shard {}, which is not in the folder", text::quoted(file))]
    IndexShard { path: PathBuf, file: String },
    /// A shard does not hold what the index says it does.
    #[error(
        "{path}: the index puts tensor {} in {}, which does not hold it",
        text::quoted(tensor),
        text::quoted(file)
    )]
    IndexTensor { path: PathBuf, tensor: String, file: String },
    /// The export's destination is in use, or is no place for a folder.
    #[error("{dir}: cannot export here: {reason}")]
    Destination { dir: PathBuf, reason: String },
}

impl Error {
    /// For `map_err`: the operating system refused `action` on `path`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        move |cause| Error::Io { path: path.to_owned(), action, cause }
    }

    /// What the reader of the message can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Error::Io { cause, .. } => io_hint(cause.kind()).map(str::to_owned),
            Error::DiskFull { path, needed_bytes, .. } => Some(format!(
                "free at least {} on the disk that holds {}, or write to another one; what was saved before is intact",
                text::size(*needed_bytes),
                path.parent().unwrap_or(path).display(),
            )),
            Error::TensorFile { fault, .. } => Some(fault.hint()),
            Error::NoTensor { .. } => {
                Some("check that config.json or shape.json names the architecture these weights belong to".to_owned())
            }
            Error::Shape { .. } => Some(
                "compare the sizes in config.json or shape.json (widths, vocabulary or classes, layers, positions) with the weights"
                    .to_owned(),
            ),
            Error::Dtype { .. } => Some("convert the weights to F32, BF16 or F16 first".to_owned()),
            Error::Buffer { .. }
            | Error::Range { .. }
            | Error::Part { .. }
            | Error::Entry { .. }
            | Error::NoState { .. } => None,
            Error::Objects { .. } => Some(
                "check bucket, region and credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and their like) in the environment"
                    .to_owned(),
            ),
            Error::NoObjects { .. } => {
                Some("build it with `--features object-store`, or name a folder".to_owned())
            }
            Error::Location { .. } => Some("name a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX".to_owned()),
            Error::Damaged { .. } => {
                Some("this checkpoint cannot be trusted; go back to an earlier one".to_owned())
            }
            Error::Format { .. } => Some(
                "use the version of the program that saved it, or move its folder away to go on from an earlier one"
                    .to_owned(),
            ),
            Error::NoCheckpoint { available, .. } if available.is_empty() => {
                Some("no checkpoint has been saved there yet".to_owned())
            }
            Error::NoCheckpoint { available, .. } => Some(format!("the checkpoints there: {available:?}")),
            Error::NoneValid { .. } => Some(
                "restore the folder from a copy, or name another folder to start anew; nothing was removed"
                    .to_owned(),
            ),
            Error::NoConfig { .. } => Some(
                "give the folder that holds config.json (or shape.json) and model.safetensors, as save_pretrained or `shoal export` writes it"
                    .to_owned(),
            ),
            Error::Json { .. } => Some("correct the file, or fetch it again from its source".to_owned()),
            Error::NoWeights { .. } => {
                Some("fetch the weights too, or set init = \"random\" to train from nothing".to_owned())
            }
            Error::Pickle { .. } => Some(
                "load the model once with transformers and save it with save_pretrained(DIR, safe_serialization=True)"
                    .to_owned(),
            ),
            Error::IndexEscapes { .. } => {
                Some("do not use this folder: an honest index names only files beside it".to_owned())
            }
            Error::IndexShard { .. } => Some("fetch the missing shard; the download was cut short".to_owned()),
            Error::IndexTensor { .. } => {
                Some("fetch the index and its shards again, all of the same revision".to_owned())
            }
            Error::Destination { .. } => Some("choose a folder that is empty or does not exist yet".to_owned()),
        }
    }
}

fn io_hint(kind: io::ErrorKind) -> Option<&'static str> {
    match kind {
        io::ErrorKind::NotFound => Some("check the path; nothing is there"),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            Some("check who owns the path and whether this user may use it")
        }
        io::ErrorKind::UnexpectedEof => {
            Some("the file became shorter while it was read; is something writing to it?")
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Some("free space on that disk"),
        _ => None,
    }
}

fn wanted_list(wanted: &[String]) -> String {
    match wanted {
        [] => "(no name was given)".to_owned(),
        [only] => text::quoted(only),
        [first, others @ ..] => format!("{} (nor {})", text::quoted(first), text::quoted_list(others)),
    }
}

fn nearest_list(nearest: &[String]) -> String {
    match nearest {
        [] => "it has none at all".to_owned(),
        names => format!("the nearest names are {}", text::quoted_list(names)),
    }
}

fn reasons(skipped: &[Skipped]) -> String {
    let each = skipped.iter().map(|skip| format!("step {}: {}", skip.step, skip.reason));
    each.collect::<Vec<_>>().join("; ")
}
