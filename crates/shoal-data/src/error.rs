//! Everything that can be wrong with a dataset, as one type: each message names the file and the place in
//! it, and each error that the reader of the message can do something about has a hint that says what.
//!
//! Messages carry their cause's text themselves, so one line is the whole story.

use std::io;
use std::path::{Path, PathBuf};

/// The endings a dataset's files may have, as messages list them.
const ENDINGS: &str = ".txt, .jsonl, .parquet, .bin and .safetensors";

/// The result of anything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What is wrong with a dataset, a tokenizer or the cache.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("cannot {action} {}: {cause}", path.display())]
    Io { action: &'static str, path: PathBuf, cause: io::Error },
    #[error("there is no file or folder {}", path.display())]
    Missing { path: PathBuf },
    #[error("{url} is in an object store, and data is read from local files only, as yet")]
    ObjectStore { url: String },
    #[error("{} is of no known kind: data is read from {ENDINGS} files", path.display())]
    UnknownKind { path: PathBuf },
    #[error("the folder {} mixes kinds of data: {} and {}", folder.display(), first.display(), second.display())]
    MixedKinds { folder: PathBuf, first: PathBuf, second: PathBuf },
    #[error("the folder {} holds no {ENDINGS} file", folder.display())]
    NoFiles { folder: PathBuf },
    #[error("{} lies more than {depth_max} folders deep", folder.display())]
    TooDeep { folder: PathBuf, depth_max: usize },
    #[error("{} is empty", path.display())]
    Empty { path: PathBuf },
    #[error("data.sequence is 0")]
    SequenceZero,
    #[error("data.sequence is {sequence}, and {taken} of these tokens stand around each document")]
    NoRoom { sequence: usize, taken: usize },
    #[error("{} holds tokens, and nothing in it says where a document ends", path.display())]
    NoDocuments { path: PathBuf },
    #[error("{} does not fit the tokens beside it", path.display())]
    Damaged { path: PathBuf },
    #[error("{} is too short: it holds {tokens} tokens and one sample needs {needed}", path.display())]
    TooShort { path: PathBuf, tokens: u64, needed: u64 },
    #[error("{} became shorter while it was in use", path.display())]
    Shrank { path: PathBuf },
    #[error("{} was changed while it was being read", path.display())]
    Changed { path: PathBuf },

    #[error("{} is not UTF-8 text: byte {offset} does not fit", path.display())]
    NotUtf8 { path: PathBuf, offset: u64 },
    #[error("{}:{line}: {message}", path.display())]
    BadLine { path: PathBuf, line: u64, message: String },
    #[error("{}:{line}: longer than {bytes_max} bytes", path.display())]
    LineTooLong { path: PathBuf, line: u64, bytes_max: u64 },
    #[error("{}:{line}: no field {field:?}, only {}", path.display(), list(has))]
    NoField { path: PathBuf, line: u64, field: String, has: Vec<String> },
    #[error("{}:{line}: the field {field:?} is {found}, not a string", path.display())]
    NotString { path: PathBuf, line: u64, field: String, found: &'static str },
    #[error("cannot read {} as Parquet: {message}", path.display())]
    Parquet { path: PathBuf, message: String },
    #[error("{} has no column {column:?}, only {}", path.display(), list(has))]
    NoColumn { path: PathBuf, column: String, has: Vec<String> },
    #[error("the column {column:?} of {} holds {found}, not strings", path.display())]
    NotStringColumn { path: PathBuf, column: String, found: String },
    #[error("{}, row {row}: the column {column:?} is not UTF-8 text", path.display())]
    NotUtf8Row { path: PathBuf, row: u64, column: String },

    #[error("{} has {bytes} bytes, which is no multiple of the {width} of one {dtype} token", path.display())]
    BinSize { path: PathBuf, bytes: u64, width: usize, dtype: &'static str },
    #[error("cannot read {}: {message}", path.display())]
    Sidecar { path: PathBuf, message: String },
    #[error("cannot read {} as safetensors: {message}", path.display())]
    Safetensors { path: PathBuf, message: String },
    #[error("{} has no tensor \"tokens\", only {}", path.display(), list(has))]
    NoTokens { path: PathBuf, has: Vec<String> },
    #[error("the tensor {tensor:?} of {} holds {found}, not integers", path.display())]
    NotIntegers { path: PathBuf, tensor: &'static str, found: String },
    #[error("the tensor {tensor:?} of {} has shape {shape:?}, not [rows, tokens]", path.display())]
    NotRows { path: PathBuf, tensor: &'static str, shape: Vec<usize> },
    #[error("the rows of {tensor:?} in {} are {found} long: expected {expected}, found {found}", path.display())]
    RowLength {
        path: PathBuf,
        tensor: &'static str,
        expected: String,
        found: usize,
        /// The `data.sequence` that this file would fit.
        sequence: Option<usize>,
    },
    #[error("{} has {tokens} rows of \"tokens\" and {labels} rows of \"labels\"", path.display())]
    RowCounts { path: PathBuf, tokens: usize, labels: usize },

    #[error("{} is no source of images: they are read from .safetensors files, or from a folder of folders of pictures", path.display())]
    NotImages { path: PathBuf },
    #[error("{} lies in no class's folder, but in {} itself", path.display(), folder.display())]
    NoClassFolder { path: PathBuf, folder: PathBuf },
    #[error("the class's folder {} holds no picture", folder.display())]
    EmptyClass { folder: PathBuf },
    #[error("{} has the folders of {found} classes, and the model has {classes}", folder.display())]
    ClassCount { folder: PathBuf, found: usize, classes: usize },
    #[error("{} is of no class that is trained on: these are {}", folder.display(), list(known))]
    UnknownClass { folder: PathBuf, known: Vec<String> },
    #[error("{} is {found}: pictures are PNG or JPEG", path.display())]
    PictureKind { path: PathBuf, found: String },
    #[error("cannot decode the picture {}: {message}", path.display())]
    Picture { path: PathBuf, message: String },
    #[error("the picture {} is {width} x {height}, too long and thin to be scaled", path.display())]
    PictureShape { path: PathBuf, width: u32, height: u32 },
    #[error("{} holds pictures, and the model takes images of {shape:?}: channels, rows, columns", path.display())]
    NotRgb { path: PathBuf, shape: [usize; 3] },
    #[error("{} has no tensor {tensor:?}, only {}", path.display(), list(has))]
    NoTensor { path: PathBuf, tensor: &'static str, has: Vec<String> },
    #[error("the tensor \"images\" of {} holds {found}, not U8 or F32", path.display())]
    NotPixels { path: PathBuf, found: String },
    #[error("the tensor \"images\" of {} has shape {found:?}, and the model takes images of {expected:?}", path.display())]
    ImageShape { path: PathBuf, found: Vec<usize>, expected: [usize; 3] },
    #[error("the tensor \"labels\" of {} has shape {found:?}, and there are {images} images", path.display())]
    LabelShape { path: PathBuf, found: Vec<usize>, images: usize },
    #[error("{}, image {image}: a pixel is no finite number", path.display())]
    NotFinite { path: PathBuf, image: u64 },
    #[error("{}, image {image}: the label {label} is outside the model's {classes} classes", path.display())]
    NoClass { path: PathBuf, image: u64, label: i64, classes: usize },

    #[error("cannot read {} as a tokenizer: {message}", path.display())]
    TokenizerFile { path: PathBuf, message: String },
    #[error("{tokenizer} cannot encode a text: {message}")]
    Encode { tokenizer: String, message: String },
    #[error("{tokenizer} has {tokenizer_ids} token ids and the model's vocabulary only {vocabulary}")]
    VocabularyTooSmall { tokenizer: String, tokenizer_ids: usize, vocabulary: usize },
    #[error("{tokenizer} {why}, and this model learns from masked tokens")]
    NoMask { tokenizer: String, why: &'static str },
    #[error("{}, {place}: the id {id} is outside the model's vocabulary of {vocabulary}", path.display())]
    OutOfVocabulary { path: PathBuf, place: String, id: i64, vocabulary: usize },
}

impl Error {
    /// An I/O failure on `path` while trying to `action` it.
    pub(crate) fn io(action: &'static str, path: &Path, cause: io::Error) -> Self {
        Self::Io { action, path: path.to_path_buf(), cause }
    }

    /// What the user can do about it, as one sentence; the command line prints it after `hint:`.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::Io { cause, .. } => return io_hint(cause),
            Self::NoMask { .. } => "name a tokenizer.json that has \"[MASK]\" with data.tokenizer; or train on bytes with a vocabulary of 257 or more".into(),
            Self::Missing { .. } => "check the path; a relative one starts at the job file's folder".into(),
            Self::ObjectStore { .. } => "copy it to a local folder and give that path".into(),
            Self::UnknownKind { path } => unknown_kind_hint(path),
            Self::MixedKinds { .. } => "keep one kind in the folder, or name one file".into(),
            Self::NoFiles { .. } => "hidden files and other endings are not read".into(),
            Self::TooDeep { .. } => "look for a link that leads back to a folder above it".into(),
            Self::Empty { .. } => "check how it was made or copied".into(),
            Self::SequenceZero => "set data.sequence to the tokens of one sample, for example 256".into(),
            Self::NoRoom { taken, .. } => format!("set data.sequence to more than {taken}"),
            Self::NoDocuments { .. } => {
                "leave data.samples out; or name the text, as .txt, .jsonl or .parquet".into()
            }
            Self::Damaged { .. } => "remove it: it is made anew from the text".into(),
            Self::TooShort { tokens: 0 | 1, .. } => "add text".into(),
            Self::TooShort { tokens, .. } => {
                format!("add text, or set data.sequence to at most {}", tokens - 1)
            }
            Self::Shrank { .. } => "leave the data as it is while a run reads it, then resume the run".into(),
            Self::Changed { .. } => "start again when nothing writes to it any more".into(),

            Self::NotUtf8 { .. } | Self::NotUtf8Row { .. } => {
                "convert it to UTF-8, for example with iconv".into()
            }
            Self::BadLine { .. } => "each line must be one whole JSON object".into(),
            Self::LineTooLong { .. } => "each line must be one document; is this JSON Lines?".into(),
            Self::NoField { .. } => "set data.text_field to the field that holds the text".into(),
            Self::NotString { .. } => "set data.text_field to a field of strings".into(),
            Self::Parquet { .. } => "check that the file was copied whole and is not encrypted".into(),
            Self::NoColumn { .. } => "set data.text_field to the column that holds the text".into(),
            Self::NotStringColumn { .. } => "set data.text_field to a column of plain strings".into(),

            Self::BinSize { path, .. } => format!(
                "check that it was copied whole; {}.json with {{\"dtype\": \"u16\"}} or \"u32\" says which it is",
                path.display()
            ),
            Self::Sidecar { .. } => "write {\"dtype\": \"u16\"} or {\"dtype\": \"u32\"} into it".into(),
            Self::Safetensors { .. } => "check that the file was copied whole".into(),
            Self::NoTokens { .. } => "store one sample a row in an integer tensor called \"tokens\"".into(),
            Self::NotIntegers { .. } => "store ids and labels as integers, for example I32".into(),
            Self::NotRows { .. } => "store one sample a row".into(),
            Self::RowLength { sequence: Some(sequence), .. } => format!("set data.sequence = {sequence}"),
            Self::RowLength { .. } => "store sequence + 1 tokens a row".into(),
            Self::RowCounts { .. } => "store one row of \"labels\" for each row of \"tokens\"".into(),

            Self::NotImages { .. } => {
                "put PNG and JPEG files into a folder a class, or store \"images\" and \"labels\" in a .safetensors file".into()
            }
            Self::NoClassFolder { .. } => {
                "put pictures into folders, one a class: data/gull/1.jpg, data/crab/1.jpg".into()
            }
            Self::EmptyClass { .. } => "put pictures in it, or remove it".into(),
            Self::ClassCount { found, .. } => format!("set model.classes = {found}"),
            Self::UnknownClass { .. } => "held-out pictures have the same folders as those trained on".into(),
            Self::PictureKind { .. } | Self::PictureShape { .. } => {
                "convert it to PNG or JPEG of an ordinary shape, or remove it".into()
            }
            Self::Picture { .. } => "fetch it again, or remove it".into(),
            Self::NotRgb { .. } => "pictures are read as RGB; store other images in a .safetensors file".into(),
            Self::NoTensor { .. } => {
                "store images as \"images\", [count, channels, rows, columns], and classes as \"labels\"".into()
            }
            Self::NotPixels { .. } => "store pixels as U8, 0 to 255, or as F32, 0 to 1".into(),
            Self::ImageShape { .. } => {
                "store [count, channels, rows, columns], of the size that the model takes".into()
            }
            Self::LabelShape { .. } => "store one label an image".into(),
            Self::NotFinite { .. } => "check how the images were made".into(),
            Self::NoClass { .. } => "use a model with as many classes as the labels have".into(),

            Self::TokenizerFile { .. } => {
                "set data.tokenizer to \"bytes\" or to the tokenizer.json of a Hugging Face model".into()
            }
            Self::Encode { .. } => return None,
            Self::VocabularyTooSmall { tokenizer_ids, .. } => format!(
                "use the tokenizer that belongs to the model, or a model whose vocabulary is at least {tokenizer_ids}"
            ),
            Self::OutOfVocabulary { path, .. } if path.extension().is_some_and(|ending| ending == "bin") => {
                format!(
                    "use the model these tokens were made for, or say in {}.json which dtype they are",
                    path.display()
                )
            }
            Self::OutOfVocabulary { .. } => "use the model these tokens were made for".into(),
        };
        Some(hint)
    }
}

/// What to do about an I/O failure, where its kind says it.
fn io_hint(cause: &io::Error) -> Option<String> {
    /// "Too many open files" of Unix; `io::ErrorKind` has no name for it.
    const EMFILE: i32 = 24;
    let hint = match cause.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free some space there; prepared tokens take one to four bytes a token"
        }
        io::ErrorKind::PermissionDenied => "check the permissions of the file and its folder",
        io::ErrorKind::ReadOnlyFilesystem => "choose a folder that can be written to",
        _ if cause.raw_os_error() == Some(EMFILE) => {
            "join the data into fewer files, or raise the limit with `ulimit -n`"
        }
        _ => return None,
    };
    Some(hint.into())
}

/// What to do about a file of no known kind: most often it is only compressed.
fn unknown_kind_hint(path: &Path) -> String {
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    match ending {
        "gz" | "zst" | "xz" | "bz2" | "zip" | "tar" => "unpack it first".into(),
        "json" => "write one JSON object a line and call it .jsonl".into(),
        _ => "rename it if it is one of these, or convert it".into(),
    }
}

/// Names as a message lists them; a file may hold thousands, of which the first are enough.
fn list(names: &[String]) -> String {
    const SHOWN_MAX: usize = 12;
    if names.is_empty() {
        return "none".into();
    }
    let shown: Vec<String> = names.iter().take(SHOWN_MAX).map(|name| format!("{name:?}")).collect();
    match names.len().saturating_sub(SHOWN_MAX) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
