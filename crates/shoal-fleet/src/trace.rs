//! Machines that come and go: spot traces, as clouds and researchers publish them.

use std::path::Path;

use crate::error::Result;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TraceEvent {
    /// A machine of this name comes.
    Add(String),
    /// It goes, without notice.
    Remove(String),
}

/// Events in order of their time, in seconds from the beginning.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    pub events: Vec<(f64, TraceEvent)>,
}

impl Trace {
    pub fn read(path: &Path) -> Result<Trace> {
        todo!("{path:?}")
    }

    pub fn parse(text: &str, name: &str) -> Result<Trace> {
        todo!("{text}{name}")
    }

    /// When the number of machines changed, and to what.
    pub fn counts(&self) -> Vec<(f64, usize)> {
        todo!()
    }

    /// Machines that are there at a time.
    pub fn count_at(&self, seconds: f64) -> usize {
        todo!("{seconds}")
    }

    /// From the beginning to the last event.
    pub fn seconds(&self) -> f64 {
        self.events.last().map_or(0.0, |(seconds, _)| *seconds)
    }

    /// Machines on average, up to the last event.
    pub fn mean_count(&self) -> f64 {
        todo!()
    }
}
