//! Moments and passes: how one who asks a device for work speaks of when it is done, since a device may work behind the
//! host's back.

use std::sync::Arc;
use std::time::Instant;

use super::Result;

/// What one kind of kernel took while a device was profiled.
#[derive(Clone, Debug)]
pub struct Span {
    pub name: String,
    pub calls: usize,
    pub seconds: f64,
}

/// A moment in the course of what a device is asked for: see [`Device::stamp`].
pub struct Stamp {
    /// When it was asked for.
    pub(crate) asked: Instant,
    /// The device's own mark, where it works behind the host's back.
    pub(crate) mark: u64,
}

/// A place in the order of what a device is asked for: see [`Device::mark`]. One by default where it is done as soon as it
/// is asked.
#[derive(Clone, Default)]
pub struct Mark(Option<Arc<dyn Place>>);

/// What a device knows a mark by.
pub(crate) trait Place: Send + Sync {
    fn wait(&self) -> Result;
    fn is_reached(&self) -> Result<bool>;
}

impl Mark {
    pub(crate) fn at(place: Arc<dyn Place>) -> Mark {
        Mark(Some(place))
    }

    /// Waits until the device has come there.
    pub(crate) fn wait(&self) -> Result {
        self.0.as_ref().map_or(Ok(()), |place| place.wait())
    }

    /// Whether the device has come there.
    pub fn is_reached(&self) -> Result<bool> {
        self.0.as_ref().map_or(Ok(true), |place| place.is_reached())
    }
}

/// How a pass over some operations goes: see [`Device::begin_pass`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Each operation is queued when it is asked for.
    Direct,
    /// Operations are noted down, and queued together when the pass ends.
    Recorded,
    /// They were noted down before: none is asked for again, and all are queued when the pass ends.
    Replayed,
}
