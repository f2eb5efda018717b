//! Learning rates by step: a warm-up, then constant, linear, cosine or in steps; or one cycle, up and down.

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    Constant,
    Linear,
    Cosine,
    /// Multiplied by `factor` again and again.
    Step {
        factor: f64,
        when: Milestones,
    },
    /// Up to the peak and down again, by half a cosine each way, as PyTorch's `OneCycleLR`.
    OneCycle {
        /// The share of the steps that go up.
        rise: f64,
        /// The share of the peak at the first step.
        start: f64,
    },
}

/// When a rate that goes in steps changes: after so many of the run's steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Milestones {
    Every(u64),
    /// Rising.
    At(Vec<u64>),
}

impl Milestones {
    /// How many lie behind a run that has done `step` steps.
    fn passed(&self, step: u64) -> u64 {
        match self {
            Milestones::Every(steps) => step / (*steps).max(1),
            Milestones::At(steps) => steps.partition_point(|milestone| *milestone <= step) as u64,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
        let falling = match &self.kind {
            ScheduleKind::Constant => return 1.0,
            ScheduleKind::Linear => 1.0 - progress,
            ScheduleKind::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
            ScheduleKind::Step { factor, when } => {
                return factor.powi(when.passed(step).min(i32::MAX as u64) as i32);
            }
            ScheduleKind::OneCycle { rise, start } => {
                return one_cycle(step, steps, *rise, *start, self.final_share);
            }
        };
        self.final_share + (1.0 - self.final_share) * falling
    }
}

fn one_cycle(step: u64, steps: u64, rise: f64, start: f64, end: f64) -> f64 {
    let half_cosine = |from: f64, to: f64, progress: f64| {
        to + (from - to) / 2.0 * (1.0 + (std::f64::consts::PI * progress).cos())
    };
    // The last step that goes up, as PyTorch counts: not a whole one, and before the first where few go up.
    let (step, top, last) = (step as f64, rise * steps as f64 - 1.0, steps as f64 - 1.0);
    if step <= top {
        // Of a rise of one step only its end is seen.
        return if top > 0.0 { half_cosine(start, 1.0, step / top) } else { 1.0 };
    }
    if last <= top {
        return end;
    }
    half_cosine(1.0, end, ((step - top) / (last - top)).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_rise_to_one_and_end_at_their_final_share() {
        for kind in [ScheduleKind::Constant, ScheduleKind::Linear, ScheduleKind::Cosine] {
            let last = if kind == ScheduleKind::Constant { 1.0 } else { 0.1 };
            let schedule = Schedule { kind, warmup: 10, final_share: 0.1 };
            assert!((schedule.factor(0, 100) - 0.1).abs() < 1e-12);
            assert!((schedule.factor(9, 100) - 1.0).abs() < 1e-12);
            assert!((schedule.factor(10, 100) - 1.0).abs() < 1e-12);
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

    #[track_caller]
    fn assert_factors(schedule: &Schedule, steps: u64, expected: &[(u64, f64)]) {
        for (step, expected) in expected {
            let found = schedule.factor(*step, steps);
            assert!((found - expected).abs() < 1e-12, "step {step}: {found}, PyTorch has {expected}");
        }
    }

    /// PyTorch 2.15: `OneCycleLR(max_lr=1, total_steps=…)` as it is; with pct_start 0.25, div_factor 10 and
    /// final_div_factor 100; and with a rise shorter than a step.
    #[test]
    fn one_cycle_is_pytorchs() {
        let cycle = |rise: f64, start: f64, final_share: f64| Schedule {
            kind: ScheduleKind::OneCycle { rise, start },
            warmup: 0,
            final_share,
        };
        let usual = [
            (0, 0.040000000000000036),
            (1, 0.042813780565907456),
            (10, 0.29516394846410077),
            (28, 0.9971862194340926),
            (29, 1.0),
            (30, 0.9994965352845243),
            (31, 0.9979871550490316),
            (50, 0.793893450575732),
            (75, 0.26306861650082564),
            (98, 0.0005074647154757879),
            (99, 4e-06),
        ];
        assert_factors(&cycle(0.3, 0.04, 4e-6), 100, &usual);
        let other = [
            (0, 0.09999999999999998),
            (1, 0.13223443014276737),
            (8, 0.997962365157888),
            (9, 0.9982005455269919),
            (20, 0.6195101664158709),
            (35, 0.004197535453958397),
            (36, 0.001),
        ];
        assert_factors(&cycle(0.25, 0.1, 0.001), 37, &other);
        assert_factors(&cycle(0.3, 0.04, 4e-6), 2, &[(0, 0.811745653949763), (1, 4e-6), (9, 4e-6)]);
        for steps in 1..20 {
            assert!((0..30).all(|step| cycle(1.0, 0.04, 0.0).factor(step, steps).is_finite()));
        }
    }

    /// PyTorch 2.15: `StepLR(7, 0.3)` and `MultiStepLR([5, 6, 20], 0.1)`.
    #[test]
    fn steps_are_pytorchs() {
        let every = ScheduleKind::Step { factor: 0.3, when: Milestones::Every(7) };
        let every = Schedule { kind: every, warmup: 0, final_share: 0.0 };
        assert_factors(&every, 30, &[(0, 1.0), (6, 1.0), (7, 0.3), (13, 0.3), (14, 0.09), (29, 0.0081)]);
        let at = ScheduleKind::Step { factor: 0.1, when: Milestones::At(vec![5, 6, 20]) };
        let at = Schedule { kind: at, warmup: 2, final_share: 0.0 };
        assert_factors(
            &at,
            30,
            &[(0, 0.5), (2, 1.0), (4, 1.0), (5, 0.1), (6, 0.01), (19, 0.01), (20, 0.001)],
        );
    }
}
