//! Why a fabric ended. The first failure stays: whatever fails after it fails because of it.

use std::sync::{Mutex, OnceLock};

use crate::error::{Error, Result};

/// Called once, when the fabric fails: wakes whoever waits.
type Alarm = Box<dyn Fn(&Error) + Send + Sync>;

#[derive(Default)]
pub struct Fate {
    failure: OnceLock<Error>,
    alarms: Mutex<Vec<Alarm>>,
}

impl Fate {
    /// The failure, if there was one.
    pub fn check(&self) -> Result<()> {
        match self.failure.get() {
            Some(failure) => Err(failure.clone()),
            None => Ok(()),
        }
    }

    pub fn failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// Has `alarm` called when the fabric fails, or now if it has failed.
    pub fn on_failure(&self, alarm: Alarm) {
        let mut alarms = self.alarms.lock().expect("no alarm panics");
        match self.failure.get() {
            Some(failure) => alarm(failure),
            None => alarms.push(alarm),
        }
    }

    /// Ends the fabric with this failure, unless it has one; the one that counts.
    pub fn fail(&self, failure: Error) -> Error {
        let mut first = false;
        let counts = self.failure.get_or_init(|| {
            first = true;
            failure
        });
        if first {
            for alarm in self.alarms.lock().expect("no alarm panics").drain(..) {
                alarm(counts);
            }
        }
        counts.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn aborted(reason: &str) -> Error {
        Error::Aborted { by: "worker 1".into(), reason: reason.into() }
    }

    #[test]
    fn the_first_failure_stays_and_every_alarm_rings_once() {
        let fate = Fate::default();
        let rung = Arc::new(AtomicUsize::new(0));
        for _ in 0..2 {
            let rung = rung.clone();
            fate.on_failure(Box::new(move |_| {
                rung.fetch_add(1, Ordering::SeqCst);
            }));
        }
        assert_eq!(fate.fail(aborted("first")), aborted("first"));
        assert_eq!(fate.fail(aborted("second")), aborted("first"));
        assert_eq!(rung.load(Ordering::SeqCst), 2);
        let late = rung.clone();
        fate.on_failure(Box::new(move |_| {
            late.fetch_add(1, Ordering::SeqCst);
        }));
        assert_eq!(rung.load(Ordering::SeqCst), 3);
    }
}
