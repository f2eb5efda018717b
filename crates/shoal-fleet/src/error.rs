//! What can be wrong with the files that people write about their machines.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, Error)]
pub enum Error {
    #[error("{}: {cause}", path.display())]
    Io { path: PathBuf, cause: io::Error },
    #[error("{file}: {message}")]
    Toml { file: String, message: String },
    /// A key that means nothing.
    #[error("{file}: unknown key {key}")]
    UnknownKey { file: String, key: String, hint: String },
    /// A key whose value cannot be.
    #[error("{file}: {key} {what}")]
    Value { file: String, key: String, what: String, hint: String },
    #[error("{file}, line {line}: {what}")]
    TraceLine { file: String, line: usize, what: String },
    #[error("{file}: there is no event in it")]
    EmptyTrace { file: String },
    #[error("{file}: {what}")]
    Profile { file: String, what: String },
    /// Two profiles that cannot both be true.
    #[error("the profiles contradict each other: {what}")]
    Contradiction { what: String },
    #[error("the profile has no layer {layer} of {kind}")]
    MissingLayer { kind: String, layer: String },
    #[error("the profile's layer {layer} takes {found} operations a sample, the model's {wanted}")]
    OtherModel { layer: String, found: u64, wanted: u64 },
    #[error("the profile was measured on samples of {found} rows, and these have {wanted}")]
    OtherSequence { found: usize, wanted: usize },
    #[error("nothing is known of the device kind \"{kind}\": it is in no profile, nor in the catalogue")]
    UnknownKind { kind: String, nearest: Option<&'static str> },
    #[error(
        "the profile of {kind} does not say how long its optimizer takes, and the catalogue does not know it"
    )]
    UnknownUpdate { kind: String },
    #[error("the table of {kind} has {found} layers, and there are {wanted}")]
    TableLength { kind: String, found: usize, wanted: usize },
    #[error("a curve in the table of {kind} {what}")]
    TableCurve { kind: String, what: String },
}

impl Error {
    /// What the user can do about it, as one sentence; the command line prints it after `hint:`.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Error::Io { cause, .. } => match cause.kind() {
                io::ErrorKind::NotFound => "check the path",
                io::ErrorKind::InvalidData => "the file is to be UTF-8 text",
                _ => "check that it can be read and written",
            },
            Error::Toml { .. } => "fleet files are TOML; docs/fleet.md has an example",
            Error::UnknownKey { hint, .. } | Error::Value { hint, .. } => return Some(hint.clone()),
            Error::TraceLine { .. } => {
                "lines are `milliseconds,add,node`, `milliseconds,remove,node`, or `seconds,count`, in order of time"
            }
            Error::EmptyTrace { .. } => "write a line an event, such as `0,add,node1` or `0,16`",
            Error::Profile { .. } => "write it with `shoal profile`; docs/profile.md describes it",
            Error::Contradiction { .. } => "measure the one again that is wrong, or leave it out",
            Error::MissingLayer { .. } | Error::OtherModel { .. } => {
                "measure this model with `shoal profile`, or leave the profile out"
            }
            Error::OtherSequence { wanted, .. } => {
                return Some(format!("measure again with `shoal profile --sequence {wanted}`"));
            }
            Error::UnknownKind { nearest: Some(nearest), .. } => {
                return Some(format!("did you mean {nearest}? Otherwise measure it with `shoal profile`"));
            }
            Error::UnknownKind { nearest: None, .. } => {
                "measure it with `shoal profile`, or name a kind of the catalogue (docs/fleet.md)"
            }
            Error::UnknownUpdate { .. } => "measure it again with `shoal profile`, which says it now",
            Error::TableLength { .. } | Error::TableCurve { .. } => {
                "give every kind a curve for each layer, with seconds for rising numbers of samples"
            }
        };
        Some(hint.to_owned())
    }
}
