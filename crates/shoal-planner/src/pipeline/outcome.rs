//! What is asked of the search, and what it answers.

use serde::Serialize;
use shoal_plan::{Activations, CompileError, DeviceRow, MemoryForecast, Order, Plan, ProgramError};
use shoal_sim::Simulated;
use thiserror::Error;

use super::{Pipeline, State};

/// What the user fixed; the rest is searched.
#[derive(Clone, Debug, Default)]
pub struct PipelineWanted {
    pub replicas: Option<usize>,
    /// Samples of a micro-batch.
    pub micro_batch: Option<usize>,
    pub activations: Option<Activations>,
    /// [`Order::Varuna`] or [`Order::OneForwardOneBackward`].
    pub order: Option<Order>,
    /// Unless it is said, hosts keep state only where it fits no other way.
    pub state: Option<State>,
    /// The fleet's devices as plans know them; by default with all their memory ([`crate::device_rows`]).
    pub devices: Option<Vec<DeviceRow>>,
    /// Machines that may be lost at once. Of plans so large that only one is played through, that one has its mirrors.
    pub survive: usize,
}

/// The best pipeline that was found.
#[derive(Clone, Debug)]
pub struct PipelinePlanned {
    pub pipeline: Pipeline,
    pub plan: Plan,
    /// Of the simulated step.
    pub seconds: f64,
    /// Until the last backward; what is left is reduction that was not hidden, the norm, and the update.
    pub pipeline_seconds: f64,
    /// By the model, before it was simulated.
    pub estimated_seconds: f64,
    pub simulated: Simulated,
    /// By device of the fleet.
    pub memory: Vec<MemoryForecast>,
    pub bottleneck: Bottleneck,
    /// The best of another kind: other replicas, order, micro-batch or place of state.
    pub runner_up: Option<RunnerUp>,
}

/// What a replica's micro-batches wait for.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Bottleneck {
    /// A stage's work, forward, backward and what is made again.
    Stage { replica: usize, stage: usize, device: usize, seconds: f64 },
    /// What passes from a stage to the next.
    Link { replica: usize, stage: usize, from: usize, to: usize, bytes: u64, seconds: f64 },
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunnerUp {
    pub pipeline: Pipeline,
    pub seconds: f64,
    /// Whether its whole step was played through, or only each of its replicas.
    pub is_simulated: bool,
}

#[derive(Debug, Error)]
pub enum PipelineError {
    #[error("there is no device in the fleet")]
    NoDevice,
    #[error("{what} was asked for, but the global batch has {global_batch} samples")]
    TooFewSamples { what: String, global_batch: usize },
    #[error("a pipeline cannot run in the order {order:?}")]
    Order { order: Order },
    #[error(
        "no pipeline over {devices} devices fits: at the best cut, {device} lacks {short_bytes} bytes ({} MiB) beside its {budget_bytes} ({} MiB), with one sample at a time and {how}",
        short_bytes.div_ceil(1 << 20),
        budget_bytes >> 20
    )]
    TooSmall { devices: usize, device: String, short_bytes: u64, budget_bytes: u64, how: &'static str },
    #[error("no pipeline of {replicas} replicas can be made of {devices} devices and {layers} layers")]
    NoDivision { replicas: usize, devices: usize, layers: usize },
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error(transparent)]
    Program(#[from] ProgramError),
}

impl PipelineError {
    /// What the user can do about it, as one sentence.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            PipelineError::NoDevice => "add a [[node]] with devices to the fleet file".into(),
            PipelineError::TooFewSamples { .. } => {
                "ask for no more than train.global_batch, or raise it".into()
            }
            PipelineError::Order { .. } => {
                "choose \"varuna\" or \"one_forward_one_backward\", or leave it out".into()
            }
            PipelineError::TooSmall { devices, short_bytes, .. } => {
                let more = short_bytes.div_ceil(1 << 20);
                format!(
                    "give that device {more} MiB more, use more than {devices} devices, or shorten data.sequence"
                )
            }
            PipelineError::NoDivision { .. } => "ask for fewer replicas, or leave their number out".into(),
            PipelineError::Compile(_) => return None,
            PipelineError::Program(error) => return error.hint(),
        })
    }
}
