//! A worker that is slowed down for a drill: its instructions are made to last a multiple of what they took before, by the
//! same clockwork that plays other devices. So the slowness is in what it tells of its own work, as a real one's would be.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use shoal_engine::Traced;
use shoal_plan::{Lane, Program};

/// How much slower than usual this worker is, and until when. All of its jobs look at it before each step.
#[derive(Default)]
pub struct Slowness(Mutex<Option<(f64, Instant)>>);

impl Slowness {
    /// From the next step on, for so long.
    pub fn begin(&self, times: f64, lasting: Duration) {
        let until = Instant::now() + lasting;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((times, until));
    }

    /// 1 is the usual pace.
    pub fn times(&self) -> f64 {
        let slow = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        slow.filter(|(_, until)| Instant::now() < *until).map_or(1.0, |(times, _)| times)
    }
}

/// What a program's instructions take at this worker's usual pace, and how far they are stretched now.
pub(crate) struct Stretch {
    /// By number; nothing before it is known.
    usual: Vec<Duration>,
    /// The usual pace is given: the device plays another one.
    is_played: bool,
    times: f64,
}

impl Stretch {
    pub(crate) fn new(played: Option<Vec<Duration>>) -> Stretch {
        let is_played = played.is_some();
        Stretch { usual: played.unwrap_or_default(), is_played, times: 1.0 }
    }

    /// Whether a step has to be timed before it can be stretched.
    pub(crate) fn lacks(&self, times: f64) -> bool {
        times != self.times && self.usual.is_empty()
    }

    /// The durations to hold instructions to from now on, where they change.
    pub(crate) fn change(&mut self, times: f64) -> Option<Vec<Duration>> {
        if times == self.times || self.usual.is_empty() {
            return None;
        }
        self.times = times;
        let is_free = times == 1.0 && !self.is_played;
        Some(if is_free { Vec::new() } else { self.usual.iter().map(|usual| usual.mul_f64(times)).collect() })
    }

    /// Notes what instructions took, unless that was not their usual time. Those that reached the device together were
    /// traced with the time of all, and have equal shares of it.
    pub(crate) fn learn(&mut self, program: &Program, traced: &[Traced]) {
        if self.is_played || self.times != 1.0 {
            return;
        }
        let moment = |traced: &Traced| (traced.start.to_bits(), traced.end.to_bits());
        let mut together: HashMap<(u64, u64), u32> = HashMap::new();
        traced.iter().for_each(|next| *together.entry(moment(next)).or_default() += 1);
        let last = program.instructions.iter().map(|next| next.id as usize + 1).max().unwrap_or(0);
        self.usual = vec![Duration::ZERO; last];
        let own: HashMap<u32, Lane> = program.instructions.iter().map(|next| (next.id, next.lane)).collect();
        for next in traced {
            if own.get(&next.id).is_some_and(|lane| *lane != Lane::Network) {
                let took = Duration::from_secs_f64((next.end - next.start).max(0.0));
                self.usual[next.id as usize] = took / together[&moment(next)];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slowness_ends_by_itself() {
        let slowness = Slowness::default();
        assert_eq!(slowness.times(), 1.0);
        slowness.begin(3.0, Duration::from_secs(600));
        assert_eq!(slowness.times(), 3.0);
        slowness.begin(3.0, Duration::ZERO);
        assert_eq!(slowness.times(), 1.0);
    }

    #[test]
    fn durations_change_with_the_slowness_alone() {
        let ms = Duration::from_millis;
        let mut played = Stretch::new(Some(vec![ms(2), ms(4)]));
        assert_eq!(played.change(1.0), None);
        assert_eq!(played.change(3.0), Some(vec![ms(6), ms(12)]));
        assert_eq!(played.change(3.0), None);
        assert_eq!(played.change(1.0), Some(vec![ms(2), ms(4)]));
        let mut unknown = Stretch::new(None);
        assert!(unknown.lacks(3.0));
        assert_eq!(unknown.change(3.0), None);
        unknown.usual = vec![ms(1)];
        assert_eq!(unknown.change(3.0), Some(vec![ms(3)]));
        assert_eq!(unknown.change(1.0), Some(Vec::new()));
    }
}
