//! Runs the programs of a step on a virtual clock, as the engine runs them on devices: instructions start in their
//! order, each when what it comes after has finished and its lane is free; what goes between devices starts when all
//! who take part are there, and shares the links it passes with whatever else passes them. A step that leaves updates
//! under way is played after another one, beside what that has left: so long is every step of a run.
//!
//! - [`clock`]: the clock itself.
//! - `collectives`: what passes, and how long that takes, where many take part.
//! - [`flows`]: transfers that share links, and how long they take.
//! - `handling`: what messages take of processors that compute.
//! - `sharing`: what computing takes on chips that several devices share.
//! - [`jobs`]: several jobs on a pool of devices.
//! - [`world`]: what instructions cost on a fleet with a profile.

pub mod clock;
mod collectives;
pub mod flows;
mod handling;
pub mod jobs;
mod sharing;
pub mod world;

pub use clock::{Jitter, Settings, Simulated, Span, simulate};
pub use jobs::{OnDevice, PoolJob, simulate_jobs};
pub use world::{FleetWorld, Work, World};
