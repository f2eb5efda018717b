//! Whether a change that need not be made is worth making: the steps done until the next change is expected, with it and
//! without it.

use super::record::Weighing;
use super::state::{Changes, Job};
use crate::settings::Settings;

/// The mean time between changes of the fleet so far, once there were a few.
pub fn changes_every_ms(changes: &Changes, settings: &Settings) -> u64 {
    const FEW: u64 = 4;
    if changes.count < FEW {
        return settings.changes_every_ms;
    }
    changes.last_ms.saturating_sub(changes.first_ms) / (changes.count - 1)
}

/// How long training stands still for a change: at least as long as the last time, whatever moves. Before there was one, two
/// reports: everyone has to stop, and to say so.
pub fn pause_ms(job: &Job, move_ms: u64, settings: &Settings) -> u64 {
    move_ms.max(job.switch_ms.unwrap_or(2 * settings.report_every_ms))
}

/// By what a step takes with the plan in force and with the other, where there is one in force.
pub fn weigh(
    job: &Job,
    (step_ms, step_ms_after): (Option<u64>, u64),
    move_ms: u64,
    changes_ms: u64,
) -> Option<Weighing> {
    let step_ms = step_ms?;
    let remaining_ms = (job.spec.steps - job.committed.min(job.spec.steps)).saturating_mul(step_ms);
    Some(Weighing { step_ms, step_ms_after, move_ms, horizon_ms: changes_ms.min(remaining_ms) })
}

impl Weighing {
    /// More steps are done within the horizon, though it begins with a pause.
    pub fn pays(&self) -> bool {
        let trained_ms = u128::from(self.horizon_ms.saturating_sub(self.move_ms));
        trained_ms * u128::from(self.step_ms) > u128::from(self.horizon_ms) * u128::from(self.step_ms_after)
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::Record;
    use super::super::state::State;
    use super::*;
    use crate::message::{Price, WorkerId};

    #[test]
    fn a_change_pays_if_the_pause_is_made_up_for_before_the_next() {
        let weighing = Weighing { step_ms: 200, step_ms_after: 100, move_ms: 1_000, horizon_ms: 2_001 };
        assert!(weighing.pays());
        assert!(!Weighing { horizon_ms: 2_000, ..weighing }.pays(), "only just made up for");
        assert!(!Weighing { horizon_ms: 900, ..weighing }.pays(), "the pause is longer than what is left");
        assert!(!Weighing { step_ms_after: 200, move_ms: 0, ..weighing }.pays(), "no gain");
    }

    #[test]
    fn machines_that_come_together_are_one_change() {
        let mut state = State::default();
        for (number, at_ms) in [(1, 0), (2, 10), (3, 999), (4, 1_000), (5, 1_001), (6, 9_000)] {
            let (worker, name, about) = (WorkerId(number), format!("w{number}"), String::new());
            let joined = Record::Joined { worker, name, boot: 1, about, price: Price(0), at_ms };
            state.apply(&joined).expect("fits");
        }
        assert_eq!(state.changes, Changes { count: 3, first_ms: 0, last_ms: 9_000, losses: 0 });
    }

    #[test]
    fn changes_are_expected_as_often_as_they_were_seen() {
        let settings = Settings::default();
        let seen = Changes { count: 5, first_ms: 1_000, last_ms: 9_000, losses: 0 };
        assert_eq!(changes_every_ms(&seen, &settings), 2_000);
        assert_eq!(changes_every_ms(&Changes { count: 3, ..seen }, &settings), settings.changes_every_ms);
    }
}
