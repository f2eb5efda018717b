//! Pipelines whose stages are groups: each stage is computed by several devices of a node, unequal ones too, which deal
//! the samples out among them piece by piece and divide the optimizer's state as their memory allows. What is dear stays
//! inside a node, and only activations pass between nodes. So there are fewer stages than devices, and less of the step
//! is spent filling and draining: with `m` micro-batches, a pipeline of `p` devices has `(p - 1) / m` of its work as
//! bubbles, one that begins with a group of `g` devices and ends with another only `g / m`.
//!
//! Where first and last layer share a tensor (a tied embedding), the last may return to the first group, so that the
//! tensor's gradient stays inside it.
//!
//! - `lineup`: in which groups a fleet's devices may stand one behind the other.
//! - `deal`: which member of a group takes which samples.
//! - `cut`: the layers of each group, by dynamic programming over what a step takes by the model.
//! - [`table()`]: the plan's table of a pipeline of groups.
//! - `search`: the best by the model are tried out, the best of those improved step by step.

mod cut;
mod deal;
mod lineup;
mod search;
mod table;

use std::ops::Range;

use serde::Serialize;
use shoal_plan::memory::MemoryForecast;
use shoal_plan::{Activations, CompileError, Order, Plan, ProgramError, Residence};
use shoal_sim::Simulated;

pub use search::{plan, plan_singles};
pub use table::table;

/// A run of layers and the devices that share it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupStage {
    pub devices: Vec<usize>,
    pub layers: Range<usize>,
    /// Samples that a member takes at a time.
    pub piece: usize,
    pub activations: Activations,
    /// Of its members' copies of parameters: renewed after the update, or gathered at the next step's begin, while a
    /// stage behind others still waits for its first piece.
    pub copies: Residence,
    /// The most pieces that a member has between forward and backward; by default what the order asks for.
    pub stash: Option<usize>,
}

/// A pipeline of groups. A group may have several stages that do not follow each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mixed {
    pub stages: Vec<GroupStage>,
    pub order: Order,
}

pub struct MixedPlanned {
    pub mixed: Mixed,
    pub plan: Plan,
    pub simulated: Simulated,
    /// Until the last backward, as the order alone foresaw it.
    pub foreseen_seconds: f64,
    /// By device, the most pieces that it has between forward and backward.
    pub stashed: Vec<usize>,
    /// By device.
    pub memory: Vec<MemoryForecast>,
}

/// A table that does not compile or does not run: a defect of ours, not of the fleet.
#[derive(Debug, thiserror::Error)]
pub enum PlayError {
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error(transparent)]
    Program(#[from] ProgramError),
}
