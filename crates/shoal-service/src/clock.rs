//! The two clocks. Controllers count from the epoch, since what they write down outlives them, but never backwards while
//! they run. Workers count from their machine's start, also through suspension: a lease must not outlast a sleep.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// Milliseconds since 1970, by the system's clock at its making and by a steady one since.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    began: Instant,
    began_ms: u64,
}

impl Clock {
    pub fn start() -> Clock {
        Clock { began: Instant::now(), began_ms: unix_ms() }
    }

    pub fn now_ms(&self) -> u64 {
        self.began_ms + u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX / 2)
    }
}

pub fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(0)
}

/// Milliseconds since this machine was started.
pub fn up_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let (seconds, nanoseconds) =
        (u64::try_from(now.tv_sec).unwrap_or(0), u64::try_from(now.tv_nsec).unwrap_or(0));
    seconds * 1_000 + nanoseconds / 1_000_000
}
