//! What other jobs get done while a step leaves devices idle. A background job runs in pieces that cannot be cut, so a
//! gap is worth as many whole pieces as fit into it, and one shorter than a piece is worth nothing.

use serde::Serialize;

use super::Estimate;

/// A job that fills gaps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Background {
    /// Its smallest piece.
    pub piece_seconds: f64,
}

impl Background {
    /// The smallest piece that is worth launching: below it, starting and stopping would show in the foreground.
    pub const PIECE_SECONDS_MIN: f64 = 0.5e-3;

    pub fn new(piece_seconds: f64) -> Background {
        Background { piece_seconds: piece_seconds.max(Background::PIECE_SECONDS_MIN) }
    }

    /// Devices' worth of background work that a step's gaps hold: one is a device that does nothing else.
    pub fn devices_worth(&self, estimate: &Estimate) -> f64 {
        let pieces: f64 = estimate
            .busy
            .iter()
            .flat_map(|busy| idle_seconds(busy, estimate.step_seconds))
            .map(|gap| (gap / self.piece_seconds).floor())
            .sum();
        pieces * self.piece_seconds / estimate.step_seconds
    }
}

/// The gaps of a device. Steps follow each other, so the gap at the end goes on in the next step's beginning; a device
/// that is never busy is free all the time.
fn idle_seconds(busy: &[std::ops::Range<f64>], step_seconds: f64) -> Vec<f64> {
    let (Some(first), Some(last)) = (busy.first(), busy.last()) else { return vec![step_seconds] };
    let mut gaps: Vec<f64> = busy.windows(2).map(|pair| pair[1].start - pair[0].end).collect();
    gaps.push(step_seconds - last.end + first.start);
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimate(busy: Vec<Vec<std::ops::Range<f64>>>) -> Estimate {
        Estimate { step_seconds: 10e-3, device_seconds: 0.0, moving_seconds: 0.0, exposed_seconds: 0.0, busy }
    }

    #[test]
    fn gaps_are_charged_by_whole_pieces() {
        let background = Background::new(1e-3);
        let busy = vec![vec![1e-3..4e-3, 4.9e-3..7.5e-3]];
        // 0.9 ms hold nothing; 2.5 ms at the end and 1 ms at the beginning are one gap of three pieces.
        assert!((background.devices_worth(&estimate(busy)) - 0.3).abs() < 1e-9);
        assert_eq!(background.devices_worth(&estimate(vec![vec![0.0..10e-3]])), 0.0);
    }

    #[test]
    fn an_idle_device_is_worth_one_and_no_piece_is_smaller_than_the_smallest() {
        let worth = Background::new(1e-9).devices_worth(&estimate(vec![Vec::new()]));
        assert!((worth - 1.0).abs() < 1e-9, "{worth}");
        assert_eq!(Background::new(1e-9).piece_seconds, Background::PIECE_SECONDS_MIN);
    }
}
