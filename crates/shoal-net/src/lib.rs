//! One worker's connections to all the others: bytes and slices of f32, over TCP or inside one process, through the
//! same interface. It knows nothing of tensors, models or plans.
//!
//! - [`fabric`]: send, receive, abort; what the engine's threads call.
//! - [`collective`]: all-gather, reduce-scatter and all-reduce over uneven slices, made of sends and receives.
//! - [`settings`]: deadlines, streams, and the shape a lab gives to links.
//! - [`identity`]: certificates of a fleet's own authority.
//! - `local`: workers inside one process.
//! - `tcp`: workers on a network, with [`wire`] and [`desk`], which judge what peers send and know no sockets:
//!   they are public so that anything can be fed to them.
//! - `fate`: why a fabric ended, told to everyone who waits.
//! - `pace`: when shaped bytes may leave and when they arrive, with [`board`], where processes share a lab's clocks.
//!
//! Three rules hold everywhere. A large message leaves only when its receiver has room for it, so memory is bounded and
//! nothing waits behind a message that nobody asked for. Every wait has a bound. And a fabric fails as a whole: the
//! first failure ends every operation, here and at the peers, with an error that names who caused it.

pub mod board;
pub mod collective;
pub mod desk;
pub mod error;
pub mod fabric;
mod fate;
pub mod identity;
mod link;
mod local;
mod pace;
pub mod settings;
mod tcp;
pub mod wire;

pub use error::{Error, Result};
pub use fabric::{Fabric, Incoming, Outgoing, Tag, in_process, in_process_each};
pub use link::EAGER_MESSAGE_BYTES_MAX;
pub use settings::{LinkShape, Settings, Shape, SharedWays, Way};
pub use tcp::{Endpoint, Guard, Reception, Seat, Security, all_but, connect};

#[cfg(target_endian = "big")]
compile_error!(
    "numbers travel as they lie in memory, which is little-endian on every machine this is built for"
);
