//! Runs programs on real devices. There is no training loop here that knows layers or micro-batches: the
//! [`executor`] does what the next instruction says, whatever table the program came from.
//!
//! - [`state`]: parameters, gradient sums and optimizer state of a model, each with its version.
//! - [`tiers`]: the memories that it may lie in, and what is copied between them.
//! - [`executor`]: one program, once.
//! - [`disk`]: state that lies on a disk.
//! - [`stepping`]: one training step, by its number.
//! - [`run`]: step after step: data, schedule, evaluation, checkpoints, metrics.
//! - [`saving`]: one worker's part of each checkpoint, written while the next steps run.
//! - [`metrics`]: `metrics.jsonl`, one line a step, true across restarts.
//! - [`identity`]: whether a run folder belongs to this job.
//! - [`loss_scale`]: what fp16 gradients are multiplied by.
//! - [`generate`]: what a trained model says next.
//! - [`import`]: weights from a Hugging Face folder.
//! - [`golden`]: comparison with a reference implementation.
//! - [`partners`]: whom a worker exchanges messages with.
//! - [`rate`]: measured rates: the device's, against which speed is shown, and its host's.

mod agenda;
pub mod disk;
pub mod error;
pub mod executor;
pub mod generate;
pub mod golden;
pub mod identity;
pub mod import;
mod lanes;
pub mod loss_scale;
pub mod metrics;
pub mod partners;
pub mod rate;
pub mod run;
pub mod saving;
pub mod state;
pub mod stepping;
pub mod tiers;

pub use agenda::Interval;
pub use error::EngineError;
pub use executor::{Executor, Replay, StepInput, StepOutcome, Traced};
pub use loss_scale::LossScale;
pub use run::{KindRate, Ledger, Run, RunEvent, RunSettings, StopReason};
pub use state::ModelState;
pub use tiers::Tiers;
