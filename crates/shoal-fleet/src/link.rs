//! What a message costs on its way.

use serde::{Deserialize, Serialize};

/// Latency and bandwidth, or what was measured by message size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    #[serde(serialize_with = "crate::profile::rounded")]
    pub seconds_latency: f64,
    /// Of a message so long that its latency does not matter.
    #[serde(serialize_with = "crate::profile::rounded")]
    pub bytes_per_second: f64,
    /// Bytes of a message, rising, and the bytes per second it was seen to move at, its latency included. Empty
    /// where nothing was measured.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        serialize_with = "crate::profile::rounded_pairs"
    )]
    pub by_size: Vec<(u64, f64)>,
}

impl Link {
    /// Within one device: nothing moves.
    pub const NONE: Link =
        Link { seconds_latency: 0.0, bytes_per_second: f64::INFINITY, by_size: Vec::new() };

    pub const fn new(bytes_per_second: f64, seconds_latency: f64) -> Link {
        Link { seconds_latency, bytes_per_second, by_size: Vec::new() }
    }

    /// From message sizes and the rates that were measured. The longest message stands for all longer ones, the
    /// shortest one's time for the latency.
    ///
    /// # Panics
    /// If nothing was measured.
    pub fn measured(mut by_size: Vec<(u64, f64)>) -> Link {
        by_size.sort_by_key(|(bytes, _)| *bytes);
        let ((least, first_rate), (_, last_rate)) = (by_size[0], by_size[by_size.len() - 1]);
        Link { seconds_latency: least as f64 / first_rate, bytes_per_second: last_rate, by_size }
    }

    /// Seconds from the first byte sent to the last byte received. Longer messages never take less, whatever the
    /// noise in the measured rates.
    pub fn seconds(&self, bytes: u64) -> f64 {
        let Some((least, rate)) = self.by_size.first() else {
            return self.seconds_latency + bytes as f64 / self.bytes_per_second;
        };
        // The line that we are on: its beginning and, once found, its end.
        let first = *least as f64 / rate;
        let (mut before, mut at) = (0, self.seconds_latency.min(first));
        for (size, rate) in &self.by_size {
            let then = (*size as f64 / rate).max(at);
            if bytes <= *size {
                let share = (bytes - before) as f64 / (size - before).max(1) as f64;
                return at + share * (then - at);
            }
            (before, at) = (*size, then);
        }
        at + (bytes - before) as f64 / self.bytes_per_second
    }

    /// What lies between two ends when a message passes through both links piece by piece: at every size the slower
    /// of the two.
    pub fn slowest(&self, other: &Link) -> Link {
        let mut sizes: Vec<u64> = self.by_size.iter().chain(&other.by_size).map(|(size, _)| *size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let rate = |size: u64| (size, size as f64 / self.seconds(size).max(other.seconds(size)));
        Link {
            seconds_latency: self.seconds_latency.max(other.seconds_latency),
            bytes_per_second: self.bytes_per_second.min(other.bytes_per_second),
            by_size: sizes.into_iter().map(rate).collect(),
        }
    }
}
