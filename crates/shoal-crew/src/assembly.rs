//! What a job's description is turned into. Descriptions are the binary's affair; a crew asks for the parts.

use std::sync::Arc;
use std::time::Duration;

use shoal_data::Dataset;
use shoal_engine::{Replay, Tiers};
use shoal_model::{Chain, TensorSpec};
use shoal_nn::{OptimizerSettings, Schedule};
use shoal_plan::{Plan, Program};
use shoal_state::checkpoint::Store;

use crate::held_out::HeldOut;

/// Sets a tensor's parameters as they are before the first step.
pub type Initial = Box<dyn FnMut(&TensorSpec, &mut [f32]) -> shoal_engine::error::Result + Send>;

/// How long each instruction of a device's program is to last, by its number, where the device plays another one.
pub type Paced = Arc<dyn Fn(&Plan, &Program) -> Vec<Duration> + Send + Sync>;

/// Turns a job's description into its parts.
pub type Assembler =
    Arc<dyn Fn(&str) -> Result<Assembled, Box<dyn std::error::Error + Send + Sync>> + Send + Sync>;

/// A job's parts on this worker.
pub struct Assembled {
    pub chain: Chain,
    pub data: Dataset,
    pub held_out: Option<HeldOut>,
    pub shuffle: bool,
    pub seed: u64,
    /// Of the whole job: the schedule goes by it.
    pub steps: u64,
    pub optimizer: OptimizerSettings,
    pub schedule: Schedule,
    pub initial: Initial,
    /// The device and what is behind it, with all the memory that plans may use here: for two plans' shares while one gives
    /// way to the other.
    pub tiers: Tiers,
    pub replay: Replay,
    pub paced: Option<Paced>,
    /// In every how many steps own work is timed. A GPU waits for each instruction of a step that is.
    pub timed_every: u64,
    /// Where checkpoints go.
    pub store: Option<Store>,
    /// What checkpoints call the job.
    pub fingerprint: String,
}
