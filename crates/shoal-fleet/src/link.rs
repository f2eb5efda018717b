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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_link_takes_its_latency_and_its_bandwidth() {
        let link = Link::new(1e9, 1e-3);
        assert_eq!(link.seconds(0), 1e-3);
        assert_eq!(link.seconds(1_000_000_000), 1.001);
        assert_eq!(Link::NONE.seconds(u64::MAX), 0.0);
    }

    #[test]
    fn measured_sizes_take_what_was_measured_and_others_lie_between() {
        let link = Link::measured(vec![(1_000_000, 1e9), (1000, 1e7)]);
        assert!((link.seconds(1000) - 1e-4).abs() < 1e-12);
        assert!((link.seconds(1_000_000) - 1e-3).abs() < 1e-12);
        assert!((link.seconds(500_500) - 5.5e-4).abs() < 1e-12);
        assert!((link.seconds(2_000_000) - 2e-3).abs() < 1e-12);
        // Nothing is faster than the shortest message that was measured.
        assert_eq!(link.seconds(0), link.seconds_latency);
    }

    #[test]
    fn the_slowest_of_two_links_governs_at_every_size() {
        let (quick, wide) = (Link::new(1e9, 1e-6), Link::new(1e10, 1e-3));
        let both = quick.slowest(&wide);
        assert_eq!((both.seconds_latency, both.bytes_per_second), (1e-3, 1e9));
        let measured = Link::measured(vec![(1 << 10, 1e8), (1 << 20, 5e8)]);
        let both = quick.slowest(&measured);
        for bytes in [1 << 10, 1 << 20] {
            assert!((both.seconds(bytes) - measured.seconds(bytes)).abs() < 1e-12);
        }
    }

    fn any_link() -> impl Strategy<Value = Link> {
        let sizes = proptest::collection::btree_map(1u64..1 << 30, 1e6..1e11, 0..8);
        (0.0..1e-2, 1e6..1e11, sizes).prop_map(|(seconds_latency, bytes_per_second, sizes)| Link {
            seconds_latency,
            bytes_per_second,
            by_size: sizes.into_iter().collect(),
        })
    }

    proptest! {
        #[test]
        fn longer_messages_never_take_less(link in any_link(), other in any_link(), a in 0u64..1 << 31, b in 0u64..1 << 31) {
            let (less, more) = (a.min(b), a.max(b));
            for link in [&link, &link.slowest(&other)] {
                let (quick, slow) = (link.seconds(less), link.seconds(more));
                prop_assert!(quick >= 0.0 && quick <= slow * (1.0 + 1e-9), "{} > {} s", quick, slow);
            }
        }
    }
}
