//! What can keep a crew from doing what it is told. Each error knows which of the plan's workers is to blame, if one is.

use shoal_control::message::{Obstacle, WorkerId};
use shoal_engine::EngineError;
use shoal_kernels::device::DeviceError;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum CrewError {
    #[error("what a worker says of itself is not understood: {what}")]
    About { what: String },
    #[error("{worker:?} cannot be reached: {what}")]
    Unreachable { worker: WorkerId, what: String },
    #[error("the plan's table is not understood: {what}")]
    Table { what: String },
    #[error("this worker is none of those that the plan names")]
    Stranger,
    #[error("the job cannot be assembled here: {0}")]
    Assembly(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("{0}")]
    Engine(#[from] EngineError),
    #[error("{error}")]
    Net { error: Box<shoal_net::Error>, culprit: Option<WorkerId> },
    #[error("nobody has {slices} slices of the state any more, among them {first}")]
    Lost { slices: usize, first: String },
    #[error("the state of {epoch} that is to be taken over is not here at step {step}: {what}")]
    NotHeld { epoch: u64, step: u64, what: String },
    #[error("the checkpoint of step {step} cannot be read: {source}")]
    Checkpoint { step: u64, source: shoal_state::Error },
    #[error("the job has no place for checkpoints")]
    NoStore,
    #[error("it was told to stop")]
    Stopped,
}

impl CrewError {
    /// What the user can do about it, where there is something.
    pub fn hint(&self) -> Option<String> {
        match self {
            CrewError::Engine(error) => error.hint(),
            CrewError::Net { error, .. } => error.hint().map(Into::into),
            CrewError::Checkpoint { source, .. } => source.hint(),
            CrewError::Unreachable { .. } => {
                Some("look whether that worker runs a version of this program like ours".into())
            }
            CrewError::NoStore => Some("set checkpoint.to, so that state can outlive its workers".into()),
            _ => None,
        }
    }

    /// Whom it was waited for in vain.
    pub fn culprit(&self) -> Option<WorkerId> {
        match self {
            CrewError::Unreachable { worker, .. } => Some(*worker),
            CrewError::Net { culprit, .. } => *culprit,
            _ => None,
        }
    }

    /// Why no other worker and no other plan would get further, where that is so: everyone has the same sums.
    pub(crate) fn dead_end(&self) -> Option<String> {
        let CrewError::Engine(error) = self else { return None };
        match error {
            EngineError::NotFinite { .. } | EngineError::NoTargets { .. } => Some(match error.hint() {
                Some(hint) => format!("{error} (hint: {hint})"),
                None => error.to_string(),
            }),
            _ => None,
        }
    }

    /// Why no other plan would get further here, where that is so: data or a device that fail.
    pub(crate) fn keeps_from_running(&self) -> Option<Obstacle> {
        match self {
            CrewError::Engine(EngineError::Net(_) | EngineError::Stopped) => None,
            _ if self.dead_end().is_some() => None,
            CrewError::Engine(error) => Some(Obstacle::Worker(error.to_string())),
            _ => None,
        }
    }

    /// What kept this worker from its state, as the controller is told.
    pub(crate) fn obstacle(&self) -> Obstacle {
        match self {
            CrewError::Engine(error) if lacks_room(error) => Obstacle::Room,
            CrewError::Checkpoint { .. } | CrewError::NoStore | CrewError::Lost { .. } => {
                Obstacle::Source(self.to_string())
            }
            _ => match self.culprit() {
                Some(worker) => Obstacle::Peer(worker),
                None => Obstacle::Worker(self.to_string()),
            },
        }
    }
}

impl From<shoal_state::Error> for CrewError {
    fn from(error: shoal_state::Error) -> CrewError {
        CrewError::Engine(error.into())
    }
}

/// Whether a device or a host has too little room.
pub(crate) fn lacks_room(error: &EngineError) -> bool {
    matches!(error, EngineError::Device(DeviceError::Memory(_)))
}

pub(crate) type Result<T = ()> = std::result::Result<T, CrewError>;
