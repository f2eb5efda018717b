//! When shaped bytes may leave and when they arrive. Whatever has a bandwidth is a clock that says until when it is taken,
//! and a quantum takes it for its bytes' time. A link has a clock of its own; the ways that several links pass, such as an
//! interface, have clocks that those links share, on a [`Board`](crate::board) where other processes send over them too. The
//! arithmetic is on nominal times, so that a thread that wakes up late loses nothing: its next quantum follows the one
//! before as if it had woken in time.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::board::{Board, Passage};
use crate::error::Error;
use crate::settings::{LinkShape, Shape, SharedWays, Way};

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

/// A rate of nothing, or no number, would be a wait without end.
fn at_least(bytes_per_s: f64) -> f64 {
    bytes_per_s.max(BYTES_PER_S_MIN)
}

#[derive(Debug)]
struct Clock {
    bytes_per_s: f64,
    taken_until: Mutex<Option<Instant>>,
}

impl Clock {
    fn new(bytes_per_s: f64) -> Clock {
        Clock { bytes_per_s: at_least(bytes_per_s), taken_until: Mutex::new(None) }
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

/// The clocks that a worker's links share, and no other process takes.
#[derive(Debug, Default)]
pub struct Ways {
    /// Of everything it sends.
    egress: Option<Arc<Clock>>,
    /// As the shape has them.
    others: Vec<Arc<Clock>>,
}

impl Ways {
    pub fn new(shape: Option<&Shape>) -> Ways {
        let Some(shape) = shape else { return Ways::default() };
        let clock = |rate| Arc::new(Clock::new(rate));
        Ways {
            egress: shape.egress_bytes_per_s.map(clock),
            others: shape.ways.iter().map(|way| clock(way.bytes_per_s)).collect(),
        }
    }

    /// Those on the way to a peer.
    fn to(&self, shape: &Shape, peer: usize) -> Vec<Arc<Clock>> {
        let others = shape.ways.iter().zip(&self.others).filter(|(way, _)| way.peers.contains(&peer));
        self.egress.iter().chain(others.map(|(_, clock)| clock)).cloned().collect()
    }
}

/// What holds one direction of one link to its shape.
#[derive(Debug)]
pub struct Pacer {
    link: Option<Clock>,
    ways: Vec<Arc<Clock>>,
    shared: Option<Shared>,
    latency: Duration,
    /// The slowest of them all.
    bytes_per_s: f64,
}

/// The ways of a link that other processes send over too.
#[derive(Debug)]
struct Shared {
    board: Arc<Board>,
    passages: Vec<Passage>,
}

impl Shared {
    fn to(shape: &Shape, peer: usize) -> Option<Shared> {
        let SharedWays { board, ways } = shape.shared.as_ref()?;
        let passed = ways.iter().filter(|(_, way)| way.peers.contains(&peer));
        let passage =
            |(clock, way): (&usize, &Way)| Passage { clock: *clock, bytes_per_s: at_least(way.bytes_per_s) };
        let passages: Vec<Passage> = passed.map(passage).collect();
        (!passages.is_empty()).then(|| Shared { board: board.clone(), passages })
    }
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
    pub fn new(shape: Option<&Shape>, ways: &Ways, peer: usize) -> Option<Arc<Pacer>> {
        let shape = shape?;
        let LinkShape { bytes_per_s, latency } = shape.link(peer);
        let (link, ways, shared) =
            (bytes_per_s.map(Clock::new), ways.to(shape, peer), Shared::to(shape, peer));
        if link.is_none() && ways.is_empty() && shared.is_none() && latency.is_zero() {
            return None;
        }
        let passages = shared.iter().flat_map(|shared| &shared.passages);
        let clocks = link.iter().chain(ways.iter().map(|clock| &**clock));
        let rates = clocks.map(|clock| clock.bytes_per_s).chain(passages.map(|passage| passage.bytes_per_s));
        let bytes_per_s = rates.fold(UNLIMITED_BYTES_PER_S, f64::min);
        Some(Arc::new(Pacer { link, ways, shared, latency, bytes_per_s }))
    }

    /// Takes the link, and all that it passes, for the next bytes of a message. Of one write all but the `last` may leave
    /// ahead of their time: nobody has all of it sooner then. `go_on` is asked while another process keeps this one from a
    /// clock.
    pub fn take<E: From<Error>>(
        &self,
        progress: &mut Progress,
        bytes: usize,
        last: bool,
        go_on: impl FnMut() -> Result<(), E>,
    ) -> Result<Turn, E> {
        let now = Instant::now();
        // Never later than now, though the bytes before these may have a later turn: a clock that was taken from later on
        // would stand still until then, for everyone who passes it.
        let ready = match progress.through {
            Some(through) if through <= now && (progress.goes_on || now - through < WAKE_UP_LATE_MAX) => {
                through
            }
            _ => now,
        };
        let own = self.ways.iter().map(|clock| &**clock).chain(&self.link);
        let mut through = own.map(|clock| clock.take(ready, bytes)).fold(ready, Instant::max);
        // A frame without payload, such as a heartbeat, takes no time and needs no file for it: whoever is frozen while he has
        // the file's lock must not silence the others.
        if let Some(shared) = self.shared.as_ref().filter(|_| bytes > 0) {
            through = through.max(shared.board.take(&shared.passages, ready, bytes, go_on)?);
        }
        // Own bytes are counted and not the time, or whoever shares a link would wait longer for its turns.
        let ahead_bytes = progress.ahead_bytes + bytes;
        let ahead = !last && ahead_bytes as f64 <= self.bytes_per_s * AHEAD_MAX.as_secs_f64();
        let ahead_bytes = if ahead { ahead_bytes } else { 0 };
        *progress = Progress { through: Some(through), goes_on: true, ahead_bytes };
        Ok(Turn { through, arrives: through + self.latency, ahead })
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

    fn pacer(shape: &Shape, ways: &Ways, peer: usize) -> Arc<Pacer> {
        Pacer::new(Some(shape), ways, peer).expect("it is shaped")
    }

    fn take(pacer: &Pacer, progress: &mut Progress, bytes: usize, last: bool) -> Turn {
        pacer.take(progress, bytes, last, || Ok::<(), Error>(())).expect("nothing is wrong with the board")
    }

    #[test]
    fn quanta_follow_each_other_at_the_rate() {
        let shape = shape(None, Some(1e6), 20);
        let pacer = pacer(&shape, &Ways::new(Some(&shape)), 1);
        let mut progress = Progress::default();
        let first = take(&pacer, &mut progress, 10_000, true);
        let second = take(&pacer, &mut progress, 10_000, true);
        assert_eq!(second.through - first.through, Duration::from_millis(10));
        assert_eq!(second.arrives - second.through, Duration::from_millis(20));
    }

    #[test]
    fn the_egress_is_shared_by_links_and_the_slower_clock_counts() {
        let shape = shape(Some(1e6), Some(1e7), 0);
        let ways = Ways::new(Some(&shape));
        let first = take(&pacer(&shape, &ways, 1), &mut Progress::default(), 100_000, true);
        let second = take(&pacer(&shape, &ways, 2), &mut Progress::default(), 100_000, true);
        assert_eq!(second.through - first.through, Duration::from_millis(100));
    }

    #[test]
    fn a_way_is_shared_by_the_links_that_pass_it_and_by_no_others() {
        let peers = |peers: &[usize]| peers.iter().copied().collect();
        let ways = vec![
            Way { bytes_per_s: 1e6, peers: peers(&[1, 2]) },
            Way { bytes_per_s: 2e6, peers: peers(&[3]) },
        ];
        let shape = Shape { ways, ..Shape::default() };
        let ways = Ways::new(Some(&shape));
        let sent = |peer| take(&pacer(&shape, &ways, peer), &mut Progress::default(), 100_000, true).through;
        let begin = Instant::now();
        let (first, second, other) = (sent(1), sent(2), sent(3));
        assert_eq!(second - first, Duration::from_millis(100));
        assert!(other >= begin + Duration::from_millis(50) && other < second, "it waits for nobody");
        assert!(Pacer::new(Some(&shape), &ways, 4).is_none());
    }

    /// A link that is slower than a way on it goes ahead of its time there too, and whoever else passes the way loses
    /// nothing by that.
    #[test]
    fn what_goes_ahead_on_a_slow_link_leaves_no_gap_on_the_way() {
        let slow = LinkShape { bytes_per_s: Some(1e6), latency: Duration::ZERO };
        let ways = vec![Way { bytes_per_s: 1e8, peers: [1, 2].into() }];
        let shape = Shape { links: [(1, slow)].into(), ways, ..Shape::default() };
        let ways = Ways::new(Some(&shape));
        let mut progress = Progress::default();
        let begin = Instant::now();
        let ahead = pacer(&shape, &ways, 1);
        for _ in 0..3 {
            take(&ahead, &mut progress, 100_000, false);
        }
        assert!(progress.through.expect("it has begun") >= begin + Duration::from_millis(300));
        let took = Instant::now() - begin;
        let other = take(&pacer(&shape, &ways, 2), &mut Progress::default(), 100_000, true);
        assert!(other.through - begin <= Duration::from_millis(4) + took, "four times a millisecond");
    }

    #[test]
    fn half_a_millisecond_of_a_write_goes_ahead_and_its_last_bytes_never() {
        let shape = shape(None, Some(1e9), 0);
        let pacer = pacer(&shape, &Ways::new(Some(&shape)), 1);
        let mut progress = Progress::default();
        let mut ahead = |last| take(&pacer, &mut progress, 250_000, last).ahead;
        assert_eq!([(); 4].map(|()| ahead(false)), [true, true, false, true]);
        assert!(!ahead(true));
        assert_eq!([(); 3].map(|()| ahead(false)), [true, true, false], "the next write begins anew");
    }

    #[test]
    fn an_unshaped_link_has_no_pacer() {
        assert!(Pacer::new(None, &Ways::default(), 1).is_none());
        assert!(Pacer::new(Some(&Shape::default()), &Ways::default(), 1).is_none());
    }

    /// Three that stand for three processes, each with the board open for itself, by nominal times: each quantum lasts ten
    /// milliseconds and none is waited for.
    #[test]
    fn senders_of_several_processes_have_a_shared_way_between_them() {
        const QUANTA: usize = 200;
        let path = std::env::temp_dir().join(format!("shoal-shared-way-{}", std::process::id()));
        Board::create(&path, 3).expect("written");
        let begin = Instant::now();
        let send = || {
            let way = Way { bytes_per_s: 1e6, peers: [1].into() };
            let shared =
                SharedWays { board: Board::open(&path).expect("it is there"), ways: [(2, way)].into() };
            // A link that is no hindrance, and one more way that is none.
            let quick = LinkShape { bytes_per_s: Some(1e8), latency: Duration::ZERO };
            let ways = vec![Way { bytes_per_s: 1e7, peers: [1].into() }];
            let shape = Shape { ways, shared: Some(shared), other_links: quick, ..Shape::default() };
            let pacer = pacer(&shape, &Ways::new(Some(&shape)), 1);
            assert_eq!(pacer.quantum_bytes(), QUANTUM_BYTES_MIN as usize, "by the slowest of them");
            let mut progress = Progress::default();
            (0..QUANTA).map(|_| take(&pacer, &mut progress, 10_000, true).through).collect::<Vec<_>>()
        };
        let mut through: Vec<Instant> = std::thread::scope(|scope| {
            let senders: Vec<_> = (0..3).map(|_| scope.spawn(send)).collect();
            senders.into_iter().flat_map(|sender| sender.join().expect("no sender panics")).collect()
        });
        through.sort();
        // Moments of several processes agree to a microsecond.
        let even =
            |pair: &[Instant]| (pair[1] - pair[0]).abs_diff(Duration::from_millis(10)).as_micros() == 0;
        assert!(through.windows(2).all(even), "one after the other, without a gap");
        assert!(through[0] - begin >= Duration::from_millis(10));
        std::fs::remove_file(path).expect("it was there");
    }
}
