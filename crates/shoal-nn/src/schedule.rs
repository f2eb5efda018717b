//! Learning rates by step: a warm-up, then constant, linear or cosine.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    Constant,
    Linear,
    Cosine,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    pub kind: ScheduleKind,
    /// Steps over which the rate rises from nothing to its peak.
    pub warmup: u64,
    /// The share of the peak that is left at the last step.
    pub final_share: f64,
}

impl Schedule {
    /// The factor on the peak rate at `step`, counted from 0, of `steps` in all.
    pub fn factor(&self, step: u64, steps: u64) -> f64 {
        if step < self.warmup {
            return (step + 1) as f64 / self.warmup as f64;
        }
        // From 0 at the end of the warm-up to 1 at the last step.
        let span = steps.saturating_sub(self.warmup + 1).max(1);
        let progress = ((step - self.warmup) as f64 / span as f64).min(1.0);
        let falling = match self.kind {
            ScheduleKind::Constant => return 1.0,
            ScheduleKind::Linear => 1.0 - progress,
            ScheduleKind::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        };
        self.final_share + (1.0 - self.final_share) * falling
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_rise_to_one_and_end_at_their_final_share() {
        for kind in [ScheduleKind::Constant, ScheduleKind::Linear, ScheduleKind::Cosine] {
            let schedule = Schedule { kind, warmup: 10, final_share: 0.1 };
            assert!((schedule.factor(0, 100) - 0.1).abs() < 1e-12);
            assert!((schedule.factor(9, 100) - 1.0).abs() < 1e-12);
            assert!((schedule.factor(10, 100) - 1.0).abs() < 1e-12);
            let last = if kind == ScheduleKind::Constant { 1.0 } else { 0.1 };
            assert!((schedule.factor(99, 100) - last).abs() < 1e-12);
            assert!((schedule.factor(5000, 100) - last).abs() < 1e-12);
            for step in 10..99 {
                assert!(schedule.factor(step + 1, 100) <= schedule.factor(step, 100) + 1e-12);
            }
        }
    }

    #[test]
    fn a_run_of_one_step_and_no_warm_up_trains_at_the_peak() {
        let schedule = Schedule { kind: ScheduleKind::Cosine, warmup: 0, final_share: 0.0 };
        assert_eq!(schedule.factor(0, 1), 1.0);
    }
}
