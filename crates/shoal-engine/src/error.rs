//! Everything that can end a run, with what to do about it.

use std::path::PathBuf;

use thiserror::Error;

#[derive(Debug, Error)]
pub enum EngineError {
    #[error(transparent)]
    Device(#[from] shoal_kernels::device::DeviceError),
    #[error(transparent)]
    Data(#[from] shoal_data::Error),
    #[error(transparent)]
    State(#[from] shoal_state::Error),
    #[error("the program is refused: {0}")]
    Program(#[from] shoal_plan::ProgramError),
    #[error(transparent)]
    Plan(#[from] shoal_plan::PlanError),
    #[error(transparent)]
    Compile(#[from] shoal_plan::CompileError),
    #[error(transparent)]
    Net(#[from] shoal_net::Error),
    #[error("{instruction} moves something between devices or memories, but this device was given no others")]
    Movement { instruction: String },
    #[error("the step was told to stop")]
    Stopped,
    #[error("a thread could not be started: {source}")]
    Thread { source: std::io::Error },
    #[error("{tensor}: an update of it was cut short, and nobody knows what it reached")]
    Torn { tensor: String },
    #[error("{lost}; what is left could not be saved: {also}")]
    Unsaved { lost: Box<EngineError>, also: Box<EngineError> },
    #[error("some of the state is with nobody who could save it")]
    Unheld,
    #[error("slices at step {from} cannot be brought to step {to}: {what}")]
    Unsettled { from: u64, to: u64, what: &'static str },
    #[error("step {step}: the {what} is {value}, not a finite number")]
    NotFinite { step: u64, what: &'static str, value: f64, checkpoint: Option<u64> },
    #[error("step {step}: none of the global batch's {samples} samples has a target to learn from")]
    NoTargets { step: u64, samples: usize },
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{path}: this run folder belongs to another job: {difference}")]
    OtherJob { path: PathBuf, difference: String },
    #[error("{path}: {what}")]
    BadRunFile { path: PathBuf, what: String },
    #[error("{path}: {what}")]
    BadReference { path: PathBuf, what: String, hint: &'static str },
}

impl From<shoal_kernels::MemoryError> for EngineError {
    fn from(error: shoal_kernels::MemoryError) -> Self {
        EngineError::Device(error.into())
    }
}

impl EngineError {
    pub fn hint(&self) -> Option<String> {
        match self {
            EngineError::Device(error) => error.hint(),
            EngineError::Data(error) => error.hint(),
            EngineError::State(error) => error.hint(),
            EngineError::Program(error) => error.hint(),
            EngineError::Plan(error) => error.hint(),
            EngineError::Compile(_) | EngineError::Stopped => None,
            EngineError::Net(error) => error.hint().map(Into::into),
            EngineError::Movement { .. } => Some("plan the job for one device whose own memory holds it".into()),
            EngineError::Thread { .. } => Some("the system's limit of threads is reached: see ulimit -u".into()),
            EngineError::Torn { .. } | EngineError::Unsettled { .. } | EngineError::Unheld => {
                Some("run the same command again: it resumes from the last checkpoint".into())
            }
            EngineError::Unsaved { lost, also } => also.hint().or_else(|| lost.hint()),
            EngineError::NotFinite { checkpoint, .. } => Some(match checkpoint {
                Some(step) => format!(
                    "the checkpoint of step {step} is intact; lower train.optimizer.lr or set clip_norm, then resume from it"
                ),
                None => "lower train.optimizer.lr, set clip_norm, or look for bad values in the data and the imported weights".into(),
            }),
            EngineError::NoTargets { .. } => {
                Some("every label of these samples is -100 (ignored): check the labels of the data".into())
            }
            EngineError::File { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
                Some("free some space and run the same command again: it resumes from the last checkpoint".into())
            }
            EngineError::File { .. } => Some("check that the path exists and can be read and written".into()),
            EngineError::OtherJob { .. } => {
                Some("choose another folder with checkpoint.to, or undo the change to resume this run".into())
            }
            EngineError::BadReference { hint, .. } => Some((*hint).into()),
            EngineError::BadRunFile { .. } => Some("remove the file to start its record anew".into()),
        }
    }
}

pub type Result<T = ()> = std::result::Result<T, EngineError>;
