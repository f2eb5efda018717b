//! Layers and optimizers with explicit forward and backward, on the kernels. There is no tape: a layer's
//! backward can start from a gradient that came over a network, and what lives between forward and
//! backward is decided by the plan, not discovered.
//!
//! - [`layer`]: forward, recompute and backward of any layer, by its kind.
//! - [`embedding`], [`patches`], [`block`], [`convolution`], [`join`], [`head`]: the kinds.
//! - [`parameters`]: a layer's view of its tensors and of the gradient sums it adds to.
//! - [`optimizer`], [`schedule`]: updates and learning rates.
//! - [`init`]: the values a new model starts from.

pub mod block;
pub mod convolution;
pub mod embedding;
pub mod head;
pub mod init;
pub mod join;
pub mod layer;
mod norm;
pub mod optimizer;
pub mod parameters;
pub mod patches;
mod pool;
pub mod schedule;

pub use convolution::{GroupShare, Groups};
pub use layer::{Call, Feed, Randomness, Saved, SavedRest};
pub use optimizer::{Decay, OptimizerKind, OptimizerSettings};
pub use parameters::{GradientSum, Gradients, Parameters};
pub use schedule::{Milestones, Schedule, ScheduleKind};

// Bytes are predicted by one crate and taken by another: both must round alike.
const _: () = assert!(shoal_model::footprint::GRANULE_BYTES == shoal_kernels::memory::GRANULE_BYTES as u64);
