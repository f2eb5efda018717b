//! What became of a drill's faults, read from the controller's records: when a worker was missed, when the job finished its
//! next step, and which counted steps had to be done again. Nothing here knows a clock or a controller.

use std::collections::BTreeSet;

use serde::Serialize;
use shoal_control::controller::record::{Change, Record, Why};
use shoal_control::message::JobId;
use shoal_service::drill::Drill;
use shoal_service::history::Noted;

/// A fault that was ordered.
#[derive(Clone, Debug, Serialize)]
pub struct Fault {
    pub drill: Drill,
    pub worker: u64,
    pub name: String,
    /// By the controller's clock.
    pub at_ms: u64,
    /// Steps that were counted before.
    pub step: u64,
}

/// What a record means for a job under a drill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// A worker is taken for dead.
    Missed {
        worker: u64,
    },
    /// The plan in force, or the one that was to come, ends for want of a worker.
    Disturbed,
    /// A plan is in force.
    Started,
    Counted {
        step: u64,
    },
    /// Back to a checkpoint.
    Restored,
}

/// The signs of one job, in their order, with their times.
pub fn signs(job: JobId, events: &[Noted]) -> Vec<(u64, Sign)> {
    let sign = |noted: &Noted| {
        let sign = match &noted.record {
            Record::Lost { worker, .. } => Sign::Missed { worker: worker.0 },
            Record::Job { job: other, change, .. } if *other == job => match change {
                Change::Stopping { why: Why::Lost | Why::Stalled | Why::Taken, .. }
                | Change::Hurried
                | Change::Abandoned { .. } => Sign::Disturbed,
                Change::Started => Sign::Started,
                Change::Committed { step, .. } => Sign::Counted { step: *step },
                Change::Restored { .. } => Sign::Restored,
                _ => return None,
            },
            _ => return None,
        };
        Some((noted.at_ms, sign))
    };
    events.iter().filter_map(sign).collect()
}

/// What became of one fault.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Until the controller took the worker for dead, where it did.
    pub missed_after_ms: Option<u64>,
    /// Until the next step was finished: by a plan made after the fault, where the fault ended the one before.
    pub next_step_after_ms: Option<u64>,
    /// That step.
    pub next_step: Option<u64>,
    /// Whether the job had to have another plan.
    pub replanned: bool,
    /// Counted steps that had to be done again.
    pub done_again: u64,
}

/// Judges a fault by all that was recorded after it and before the next one.
pub fn outcome(fault: &Fault, signs: &[(u64, Sign)]) -> Outcome {
    let missed = |(_, sign): &&(u64, Sign)| *sign == Sign::Missed { worker: fault.worker };
    let place = |wanted: &dyn Fn(&Sign) -> bool, from: usize| {
        signs.iter().skip(from).position(|(_, sign)| wanted(sign)).map(|place| place + from)
    };
    let counted = |sign: &Sign| matches!(sign, Sign::Counted { .. });
    let disturbed = place(&|sign| matches!(sign, Sign::Disturbed | Sign::Restored), 0);
    let next = match disturbed {
        None => place(&counted, 0),
        Some(disturbed) => {
            place(&|sign| *sign == Sign::Started, disturbed).and_then(|started| place(&counted, started))
        }
    };
    let step = |place: usize| match signs[place].1 {
        Sign::Counted { step } => Some(step),
        _ => None,
    };
    Outcome {
        missed_after_ms: signs.iter().find(missed).map(|(at_ms, _)| at_ms.saturating_sub(fault.at_ms)),
        next_step_after_ms: next.map(|place| signs[place].0.saturating_sub(fault.at_ms)),
        next_step: next.and_then(step),
        replanned: disturbed.is_some(),
        done_again: done_again(fault.step, signs),
    }
}

/// Whether nothing that the fault led to is still to come, so long after it.
pub fn is_over(fault: &Fault, signs: &[(u64, Sign)], lasted_ms: u64) -> bool {
    let outcome = outcome(fault, signs);
    let missed = outcome.missed_after_ms.is_some() || !fault.drill.is_kill();
    missed && outcome.next_step_after_ms.is_some() && lasted_ms >= fault.drill.ms()
}

fn done_again(before: u64, signs: &[(u64, Sign)]) -> u64 {
    let (mut highest, mut restored, mut again) = (before, false, 0);
    for (_, sign) in signs {
        match sign {
            Sign::Restored => restored = true,
            Sign::Counted { step } => {
                if restored {
                    again += (highest + 1).saturating_sub(*step);
                    restored = false;
                    highest = *step;
                }
                highest = highest.max(*step);
            }
            _ => {}
        }
    }
    again
}

/// Steps that were counted again though the job did not go back to a checkpoint.
pub fn counted_twice(signs: &[(u64, Sign)]) -> BTreeSet<u64> {
    let (mut highest, mut twice) = (0, BTreeSet::new());
    for (_, sign) in signs {
        match sign {
            Sign::Restored => highest = 0,
            Sign::Counted { step } => {
                if *step <= highest {
                    twice.insert(*step);
                }
                highest = highest.max(*step);
            }
            _ => {}
        }
    }
    twice
}

/// How the loss moves from step to step: the largest change at a fault, and elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Jumps {
    pub at_faults: f64,
    pub elsewhere: f64,
}

/// `losses` by step, in order; `faults` are the first steps after them.
pub fn jumps(losses: &[(u64, f64)], faults: &BTreeSet<u64>) -> Jumps {
    let mut jumps = Jumps::default();
    for pair in losses.windows(2) {
        let jump = (pair[1].1 - pair[0].1).abs();
        let largest = match faults.contains(&pair[1].0) {
            true => &mut jumps.at_faults,
            false => &mut jumps.elsewhere,
        };
        *largest = largest.max(jump);
    }
    jumps
}

/// The value that a share of the values is not above; none of none.
pub fn quantile(values: &[u64], share: f64) -> Option<u64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let place = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(place.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(drill: Drill) -> Fault {
        Fault { drill, worker: 7, name: "two".into(), at_ms: 1_000, step: 20 }
    }

    fn counted(at_ms: u64, step: u64) -> (u64, Sign) {
        (at_ms, Sign::Counted { step })
    }

    #[test]
    fn a_step_that_was_nearly_done_is_no_recovery() {
        let kill = fault(Drill::Kill {});
        let mut signs =
            vec![counted(1_010, 21), (1_900, Sign::Missed { worker: 7 }), (1_900, Sign::Disturbed)];
        assert!(!is_over(&kill, &signs, 5_000));
        signs.extend([(2_100, Sign::Started), counted(2_150, 22), counted(2_200, 23)]);
        assert!(is_over(&kill, &signs, 5_000));
        let outcome = outcome(&kill, &signs);
        assert_eq!((outcome.missed_after_ms, outcome.next_step_after_ms), (Some(900), Some(1_150)));
        assert_eq!((outcome.next_step, outcome.replanned, outcome.done_again), (Some(22), true, 0));
    }

    #[test]
    fn what_changes_no_plan_is_over_when_it_has_lasted() {
        let slow = fault(Drill::Slow { ms: 500, percent: 300 });
        let signs = [counted(1_200, 21)];
        assert!(!is_over(&slow, &signs, 400));
        assert!(is_over(&slow, &signs, 500));
        let outcome = outcome(&slow, &signs);
        assert_eq!((outcome.next_step_after_ms, outcome.replanned), (Some(200), false));
        // Another worker's death is another matter.
        assert!(!is_over(
            &fault(Drill::Kill {}),
            &[(1_100, Sign::Missed { worker: 8 }), counted(1_200, 21)],
            9_000
        ));
    }

    #[test]
    fn steps_after_a_return_are_done_again_and_others_must_not_be() {
        let signs = [
            counted(1_010, 21),
            (1_100, Sign::Restored),
            (1_200, Sign::Started),
            counted(1_300, 11),
            counted(1_400, 12),
        ];
        assert_eq!(outcome(&fault(Drill::Kill {}), &signs).done_again, 11);
        assert!(counted_twice(&signs).is_empty());
        assert_eq!(counted_twice(&[counted(1, 5), counted(2, 5)]), BTreeSet::from([5]));
    }

    #[test]
    fn jumps_at_faults_are_told_from_others() {
        let losses = [(1, 5.0), (2, 4.5), (3, 4.25), (4, 4.5)];
        assert_eq!(jumps(&losses, &BTreeSet::from([3])), Jumps { at_faults: 0.25, elsewhere: 0.5 });
        assert_eq!(quantile(&[3, 1, 2, 4], 0.5), Some(2));
        assert_eq!(quantile(&[3, 1, 2, 4], 0.95), Some(4));
        assert_eq!(quantile(&[], 0.5), None);
    }
}
