//! Errors as people see them: one sentence that names the file, key or device, and a hint.

use std::path::{Path, PathBuf};

use shoal_engine::EngineError;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum CliError {
    #[error("{sentence}")]
    Said { sentence: String, hint: Option<String> },
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Fleet(#[from] shoal_fleet::Error),
    #[error(transparent)]
    Service(#[from] shoal_service::Error),
}

impl CliError {
    pub fn said(sentence: impl Into<String>, hint: impl Into<String>) -> CliError {
        CliError::Said { sentence: sentence.into(), hint: Some(hint.into()) }
    }

    /// For `map_err`: an error of the file system with its path.
    pub fn at(path: &Path) -> impl FnOnce(std::io::Error) -> CliError + use<> {
        let path = path.to_owned();
        move |source| CliError::File { path, source }
    }

    pub fn hint(&self) -> Option<String> {
        match self {
            CliError::Said { hint, .. } => hint.clone(),
            CliError::File { .. } => Some("check that the path exists and can be read and written".into()),
            CliError::Engine(error) => error.hint(),
            CliError::Fleet(error) => error.hint(),
            CliError::Service(error) => error.hint(),
        }
    }
}

macro_rules! through_engine {
    ($($kind:ty),*) => {$(
        impl From<$kind> for CliError {
            fn from(error: $kind) -> CliError {
                CliError::Engine(error.into())
            }
        }
    )*};
}

through_engine!(
    shoal_data::Error,
    shoal_state::Error,
    shoal_kernels::MemoryError,
    shoal_kernels::device::DeviceError,
    shoal_plan::PlanError,
    shoal_plan::CompileError,
    shoal_plan::ProgramError,
    shoal_net::Error
);

pub type Result<T = ()> = std::result::Result<T, CliError>;
