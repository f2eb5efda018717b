//! What can be wrong with a folder of measurements.

use std::io;
use std::path::{Path, PathBuf};

use shoal_plan::{CompileError, ProgramError};
use thiserror::Error;

#[derive(Debug, Error)]
pub enum Error {
    #[error("{}: {cause}", path.display())]
    Io { path: PathBuf, cause: io::Error },
    #[error("{}: {cause}", path.display())]
    Json { path: PathBuf, cause: serde_json::Error },
    /// A key that is not there, or says what cannot be.
    #[error("{}: {key} {what}", path.display())]
    Key { path: PathBuf, key: String, what: String },
    #[error("{}: nothing in it is called {pattern}", path.display())]
    Nothing { path: PathBuf, pattern: &'static str },
    #[error("{name}: {cause}")]
    Costs { name: String, cause: shoal_fleet::Error },
    #[error("{name}: {cause}")]
    Compile { name: String, cause: CompileError },
    #[error("{name}: {cause}")]
    Simulate { name: String, cause: ProgramError },
}

impl Error {
    pub(super) fn key(path: &Path, key: impl Into<String>, what: impl Into<String>) -> Error {
        Error::Key { path: path.into(), key: key.into(), what: what.into() }
    }

    /// What the user can do about it, as one sentence; the command line prints it after `hint:`.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Error::Io { cause, .. } if cause.kind() == io::ErrorKind::NotFound => {
                "name the folder that has cephalo, deeppool, sailor and published_times.csv in it"
            }
            Error::Io { .. } => "check that it can be read",
            Error::Json { .. } | Error::Key { .. } => "the file is to be as it was published; take it again",
            Error::Nothing { .. } => "name the folder that the measurements are in",
            Error::Costs { cause, .. } => return cause.hint(),
            Error::Compile { .. } | Error::Simulate { .. } => return None,
        };
        Some(hint.to_owned())
    }
}
