//! When shaped bytes may leave and when they arrive. A link of given bandwidth is a clock that says until when it is
//! taken; a quantum takes it for its bytes' time, and a worker's egress is one more clock that all its links share. The
//! arithmetic is on nominal times, so that a thread that wakes up late loses nothing: its next quantum follows the one
//! before as if it had woken in time.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::settings::Shape;

/// Bytes that take a shaped link at once: what others wait behind, and how finely a message is cut. So much as takes
/// about this long, within bounds.
const QUANTUM_SECONDS: f64 = 0.25e-3;
const QUANTUM_BYTES_MIN: f64 = 2048.0;
const QUANTUM_BYTES_MAX: f64 = (256 << 10) as f64;

/// What of a message may leave before its time at once, if more of the same write follows: to sleep and be woken for every
/// quantum would take the sender, and the receiver with it, more than the bytes themselves.
const AHEAD_MAX: Duration = Duration::from_micros(500);

/// A sender that comes back with more of a message this late after its last quantum was waiting for something else, not
/// merely woken late.
const WAKE_UP_LATE_MAX: Duration = Duration::from_millis(5);

/// The slowest link there can be.
pub const BYTES_PER_S_MIN: f64 = 1000.0;

#[derive(Debug)]
struct Clock {
    bytes_per_s: f64,
    taken_until: Mutex<Option<Instant>>,
}

impl Clock {
    fn new(bytes_per_s: f64) -> Clock {
        // A rate of nothing, or no number, would be a wait without end.
        Clock { bytes_per_s: bytes_per_s.max(BYTES_PER_S_MIN), taken_until: Mutex::new(None) }
    }

    /// Takes the clock for so many bytes, from `ready` at the earliest; the moment they are through.
    fn take(&self, ready: Instant, bytes: usize) -> Instant {
        let mut taken_until = self.taken_until.lock().expect("no holder of a clock panics");
        let begin = taken_until.map_or(ready, |until| until.max(ready));
        let end = begin + Duration::from_secs_f64(bytes as f64 / self.bytes_per_s);
        *taken_until = Some(end);
        end
    }
}

/// The clocks of everything one worker sends.
#[derive(Clone, Debug, Default)]
pub struct Egress(Option<Arc<Clock>>);

impl Egress {
    pub fn new(shape: Option<&Shape>) -> Egress {
        Egress(shape.and_then(|shape| shape.egress_bytes_per_s).map(|rate| Arc::new(Clock::new(rate))))
    }
}

/// What holds one direction of one link to its shape.
#[derive(Debug)]
pub struct Pacer {
    egress: Egress,
    link: Option<Clock>,
    latency: Duration,
    /// The slower of the two.
    bytes_per_s: f64,
}

/// What became of some bytes' turn on a link.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// When they have left.
    pub through: Instant,
    /// When they arrive.
    pub arrives: Instant,
    /// Whether their sender may go on before.
    pub ahead: bool,
}

impl Turn {
    /// Sleeps until the bytes may leave.
    pub fn wait(&self) {
        if !self.ahead {
            sleep_until(self.through);
        }
    }
}

/// The place of one message's next quantum in time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    through: Option<Instant>,
    /// The next bytes were there already when the last ones left.
    goes_on: bool,
    /// Bytes that have left since the sender last slept.
    ahead_bytes: usize,
}

impl Progress {
    /// The bytes that follow come from a call of the sender's: they are there only now.
    pub fn pause(&mut self) {
        self.goes_on = false;
    }
}

impl Pacer {
    /// `None` where nothing is to be held back.
    pub fn new(shape: Option<&Shape>, egress: &Egress, peer: usize) -> Option<Arc<Pacer>> {
        let link = shape?.link(peer);
        let clock = link.bytes_per_s.map(Clock::new);
        if egress.0.is_none() && clock.is_none() && link.latency.is_zero() {
            return None;
        }
        let rates = [egress.0.as_ref().map(|clock| clock.bytes_per_s), link.bytes_per_s];
        let bytes_per_s = rates.into_iter().flatten().fold(UNLIMITED_BYTES_PER_S, f64::min);
        Some(Arc::new(Pacer { egress: egress.clone(), link: clock, latency: link.latency, bytes_per_s }))
    }

    /// Takes the link for the next bytes of a message. Of one write all but the `last` may leave ahead of their time: nobody
    /// has all of it sooner then.
    pub fn take(&self, progress: &mut Progress, bytes: usize, last: bool) -> Turn {
        let now = Instant::now();
        let ready = match progress.through {
            Some(through) if progress.goes_on => through,
            Some(through) if through <= now && now - through < WAKE_UP_LATE_MAX => through,
            Some(through) => now.max(through),
            None => now,
        };
        let egress = self.egress.0.as_ref().map_or(ready, |clock| clock.take(ready, bytes));
        let link = self.link.as_ref().map_or(ready, |clock| clock.take(ready, bytes));
        let through = egress.max(link);
        // Own bytes are counted and not the time, or whoever shares a link would wait longer for its turns.
        let ahead_bytes = progress.ahead_bytes + bytes;
        let ahead = !last && ahead_bytes as f64 <= self.bytes_per_s * AHEAD_MAX.as_secs_f64();
        let ahead_bytes = if ahead { ahead_bytes } else { 0 };
        *progress = Progress { through: Some(through), goes_on: true, ahead_bytes };
        Turn { through, arrives: through + self.latency, ahead }
    }

    /// Whether bytes arrive later than they have left.
    pub fn delays(&self) -> bool {
        !self.latency.is_zero()
    }

    /// What takes the link at once.
    pub fn quantum_bytes(&self) -> usize {
        let bytes = (self.bytes_per_s * QUANTUM_SECONDS).clamp(QUANTUM_BYTES_MIN, QUANTUM_BYTES_MAX);
        // A multiple of the elements that a sum is made of.
        bytes as usize & !63
    }

    /// Bytes that can be under way at once; whoever holds them back must have room for so many.
    pub fn bytes_under_way(&self) -> usize {
        (self.bytes_per_s * self.latency.as_secs_f64()) as usize + 16 * self.quantum_bytes()
    }
}

/// What a link with latency and no given bandwidth is taken to carry, to bound what is under way.
const UNLIMITED_BYTES_PER_S: f64 = 12.5e9;

/// Whether bytes that may arrive ahead of a moment may do so now.
pub fn is_about_due(moment: Instant) -> bool {
    moment.saturating_duration_since(Instant::now()) <= AHEAD_MAX
}

/// Sleeps until a moment that may have passed.
pub fn sleep_until(moment: Instant) {
    let left = moment.saturating_duration_since(Instant::now());
    if !left.is_zero() {
        std::thread::sleep(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::LinkShape;
    use std::collections::BTreeMap;

    fn shape(egress: Option<f64>, link: Option<f64>, latency_ms: u64) -> Shape {
        let links = BTreeMap::from([(
            1,
            LinkShape { bytes_per_s: link, latency: Duration::from_millis(latency_ms) },
        )]);
        Shape { egress_bytes_per_s: egress, links, ..Shape::default() }
    }

    #[test]
    fn quanta_follow_each_other_at_the_rate() {
        let shape = shape(None, Some(1e6), 20);
        let pacer = Pacer::new(Some(&shape), &Egress::new(Some(&shape)), 1).expect("the link is shaped");
        let mut progress = Progress::default();
        let first = pacer.take(&mut progress, 10_000, true);
        let second = pacer.take(&mut progress, 10_000, true);
        assert_eq!(second.through - first.through, Duration::from_millis(10));
        assert_eq!(second.arrives - second.through, Duration::from_millis(20));
    }

    #[test]
    fn the_egress_is_shared_by_links_and_the_slower_clock_counts() {
        let shape = shape(Some(1e6), Some(1e7), 0);
        let egress = Egress::new(Some(&shape));
        let one = Pacer::new(Some(&shape), &egress, 1).expect("shaped");
        let two = Pacer::new(Some(&shape), &egress, 2).expect("shaped");
        let first = one.take(&mut Progress::default(), 100_000, true);
        let second = two.take(&mut Progress::default(), 100_000, true);
        assert_eq!(second.through - first.through, Duration::from_millis(100));
    }

    #[test]
    fn half_a_millisecond_of_a_write_goes_ahead_and_its_last_bytes_never() {
        let shape = shape(None, Some(1e9), 0);
        let pacer = Pacer::new(Some(&shape), &Egress::new(Some(&shape)), 1).expect("the link is shaped");
        let mut progress = Progress::default();
        let mut ahead = |last| pacer.take(&mut progress, 250_000, last).ahead;
        assert_eq!([(); 4].map(|()| ahead(false)), [true, true, false, true]);
        assert!(!ahead(true));
        assert_eq!([(); 3].map(|()| ahead(false)), [true, true, false], "the next write begins anew");
    }

    #[test]
    fn an_unshaped_link_has_no_pacer() {
        assert!(Pacer::new(None, &Egress::default(), 1).is_none());
        assert!(Pacer::new(Some(&Shape::default()), &Egress::default(), 1).is_none());
    }
}
