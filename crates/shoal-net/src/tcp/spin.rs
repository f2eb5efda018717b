//! Looking again before sleeping. What a waiting thread waits for is often microseconds away, and to sleep and be woken takes
//! tens of them, more on a virtual machine. So it looks again for a moment, and lets others run between two looks. It does so
//! only as long as that pays: where nothing came in that moment the next waits sleep at once, twice as many each time; who finds that
//! somebody else had use for the core sleeps, so that it wakes on another one that is free; and where somebody computes there
//! nobody looks again for a while.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long to look again.
const SPIN_MAX: Duration = Duration::from_micros(50);
/// Who does not come back for so long after letting others run is in somebody's way.
const AWAY_MAX: Duration = Duration::from_micros(20);
/// And who does not for so long has no core to spare: somebody computes there.
const COMPUTING_MIN: Duration = Duration::from_millis(1);
/// For so many times as long nobody looks again then: to be away may take milliseconds, and must not take more than a
/// hundredth of the time.
const REST_RATIO: u32 = 100;
/// Waits that sleep at once, at the most, before one looks again.
const SKIPPED_MAX: u32 = 64;

/// Whether a worker has a core to spare for looking again, as far as its threads have found out.
#[derive(Clone, Debug)]
pub struct Leisure {
    origin: Instant,
    /// Microseconds after the origin.
    rests_until_us: Arc<AtomicU64>,
}

impl Leisure {
    pub fn new() -> Leisure {
        Leisure { origin: Instant::now(), rests_until_us: Arc::default() }
    }

    fn is_there(&self, now: Instant) -> bool {
        self.after_origin_us(now) >= self.rests_until_us.load(Ordering::Relaxed)
    }

    fn is_over(&self, now: Instant, away: Duration) {
        let until = now + away.saturating_mul(REST_RATIO);
        self.rests_until_us.store(self.after_origin_us(until), Ordering::Relaxed);
    }

    fn after_origin_us(&self, moment: Instant) -> u64 {
        moment.saturating_duration_since(self.origin).as_micros() as u64
    }
}

/// What became of looking again, for the waits of one kind. Threads may change it under each other, which does no harm.
#[derive(Debug)]
pub struct Spins {
    leisure: Leisure,
    /// Waits that are yet to sleep at once.
    left: AtomicU32,
    /// How many they were after the last time that nothing came.
    skipped: AtomicU32,
}

/// One wait.
pub struct Spin<'a> {
    spins: &'a Spins,
    state: State,
}

enum State {
    New,
    Since(Instant),
    Over,
}

impl Spins {
    pub fn new(leisure: &Leisure) -> Spins {
        Spins { leisure: leisure.clone(), left: AtomicU32::new(0), skipped: AtomicU32::new(0) }
    }

    pub fn begin(&self) -> Spin<'_> {
        Spin { spins: self, state: State::New }
    }

    fn may_begin(&self, now: Instant) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        left == 0 && self.leisure.is_there(now)
    }

    fn found_nothing(&self) {
        let skipped = (2 * self.skipped.load(Ordering::Relaxed) + 1).min(SKIPPED_MAX);
        self.skipped.store(skipped, Ordering::Relaxed);
        self.left.store(skipped, Ordering::Relaxed);
    }
}

impl Spin<'_> {
    /// Lets others run; whether to look again before sleeping.
    pub fn again(&mut self) -> bool {
        let now = Instant::now();
        let looks = self.goes_on(now);
        if looks {
            thread::yield_now();
            self.was_away(now, Instant::now());
        }
        looks
    }

    fn goes_on(&mut self, now: Instant) -> bool {
        match self.state {
            State::New if self.spins.may_begin(now) => {
                self.state = State::Since(now);
                return true;
            }
            State::Since(begin) if now - begin < SPIN_MAX => return true,
            State::Since(_) => self.spins.found_nothing(),
            State::New | State::Over => {}
        }
        self.state = State::Over;
        false
    }

    /// Others ran until it came back.
    fn was_away(&mut self, since: Instant, back: Instant) {
        let away = back - since;
        if away > AWAY_MAX {
            self.state = State::Over;
        }
        if away > COMPUTING_MIN {
            self.spins.leisure.is_over(back, away);
        }
    }

    /// What was waited for is there.
    pub fn found(&mut self) {
        if let State::Since(_) = self.state {
            self.spins.skipped.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits that sleep at once before one looks again.
    fn skipped(spins: &Spins, now: Instant) -> usize {
        (0..).take_while(|_| !spins.may_begin(now)).count()
    }

    #[test]
    fn where_nothing_comes_ever_fewer_waits_look_again_and_all_once_something_does() {
        let (spins, now) = (Spins::new(&Leisure::new()), Instant::now());
        assert_eq!(skipped(&spins, now), 0);
        let after_failures = || {
            spins.found_nothing();
            skipped(&spins, now)
        };
        assert_eq!([(); 8].map(|()| after_failures()), [1, 3, 7, 15, 31, 63, 64, 64]);
        Spin { spins: &spins, state: State::Since(now) }.found();
        assert_eq!(skipped(&spins, now), 0);
        spins.found_nothing();
        assert_eq!(skipped(&spins, now), 1, "it begins anew");
    }

    #[test]
    fn a_core_that_others_use_is_left_to_them_by_all_waits_for_a_while() {
        let leisure = Leisure::new();
        let [one, two] = [(); 2].map(|()| Spins::new(&leisure));
        let now = Instant::now();
        assert!(one.may_begin(now) && two.may_begin(now));
        let away = Duration::from_millis(3);
        leisure.is_over(now, away);
        assert!(!one.may_begin(now) && !two.may_begin(now + 99 * away));
        assert!(one.may_begin(now + 101 * away) && two.may_begin(now + 101 * away));
    }

    #[test]
    fn a_wait_looks_again_for_a_moment_only() {
        let (spins, begin) = (Spins::new(&Leisure::new()), Instant::now());
        let mut spin = spins.begin();
        assert!(spin.goes_on(begin) && spin.goes_on(begin + SPIN_MAX / 2));
        assert!(!spin.goes_on(begin + SPIN_MAX) && !spin.goes_on(begin));
        assert!(!spins.may_begin(begin), "the next wait sleeps at once");
    }

    #[test]
    fn who_is_in_the_way_of_others_sleeps_and_all_do_where_somebody_computes() {
        let (spins, begin) = (Spins::new(&Leisure::new()), Instant::now());
        for (away, sleeps, all_sleep) in
            [(AWAY_MAX, false, false), (2 * AWAY_MAX, true, false), (2 * COMPUTING_MIN, true, true)]
        {
            let mut spin = spins.begin();
            assert!(spin.goes_on(begin));
            spin.was_away(begin, begin + away);
            assert_eq!(!spin.goes_on(begin), sleeps, "{away:?}");
            assert_eq!(!spins.may_begin(begin + away), all_sleep, "{away:?}");
        }
    }
}
