//! A fleet in a box: one process a device on this machine. Processors get its cores, shares of a GPU their part of the one
//! here; devices that are not here are played, each instruction made to last as long as it was profiled or estimated to;
//! memory is what the fleet says, and so are the links, in what the workers send each other.

pub mod assignment;
pub mod gpu;
mod namespace;
pub mod pace;
pub mod trace;
pub mod ways;
mod workers;

pub use namespace::Namespace;
pub use workers::Workers;
