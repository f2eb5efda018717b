//! What there is to train on, and what it takes: devices, links, memory tiers, prices, spot traces, what was
//! measured of them, and the cost model made from both. No tensors, and nothing is printed: planners and the
//! simulator ask [`Costs`] for seconds and [`Fleet`] for who is joined to whom by what.
//!
//! - [`fleet`]: nodes, devices and links, as `fleet.toml` says them; [`link`] is one of the latter.
//! - [`catalogue`]: common devices by public figures.
//! - `chips`: who shares a chip with whom.
//! - [`trace`]: machines that come and go.
//! - [`profile`]: what was measured, as profile.json; [`curve`] is seconds by the number of samples.
//! - [`estimate`]: a profile by arithmetic, for a kind that was never measured.
//! - [`costs`]: seconds of every layer on every device.
//! - [`pace`]: devices that are slower than their kind.

pub mod catalogue;
mod chips;
pub mod costs;
pub mod curve;
mod error;
pub mod estimate;
pub mod fleet;
pub mod link;
pub mod pace;
pub mod profile;
pub mod trace;
mod units;

pub use chips::Seat;
pub use costs::{Costs, KindTable, LayerTable};
pub use curve::{Fit, TimeCurve};
pub use error::{Error, Result};
pub use fleet::{Device, Disk, Fleet, Node};
pub use link::Link;
pub use profile::{
    Corrected, Correction, DeviceProfile, LayerProfile, LinkProfile, LinkScope, Profile, Seen,
};
pub use trace::{Trace, TraceEvent};
