//! A job on a fleet that lives: what the controller's and the workers' processes know of jobs, plans and devices.
//!
//! - [`description`]: a job as it travels.
//! - [`planner`]: plans for the workers that are there; [`members`], the fleet that they make.
//! - [`worker`]: a worker's device, and a job's parts on it; [`rate`], how quick it is, [`loopback`], how quick messages between neighbours; [`played`], one that plays a device which
//!   is not here; [`drill`], the faults that it does to itself when asked.
//! - [`within`]: where jobs' files may lie.
//! - [`reach`] and [`follow`]: how commands find a controller, and follow a job; [`receipt`], where its time went.
//! - [`own_fleet`]: a whole fleet on this machine for as long as a command runs; [`leash`], what ends it with the command.

pub mod description;
pub mod drill;
pub mod follow;
pub mod leash;
mod loopback;
pub mod members;
pub mod own_fleet;
pub mod planner;
pub mod played;
mod rate;
pub mod reach;
pub mod receipt;
pub mod within;
pub mod worker;
