//! Learning rates by step, as `train.schedule` has them. A key that the kind does not know is refused: it would be
//! thought to do something.

use shoal_nn::{Milestones, Schedule, ScheduleKind};

use super::{Validator, raw};
use crate::error::Result;

/// What PyTorch's `OneCycleLR` takes where it is told nothing.
const RISE: f64 = 0.3;
const START: f64 = 1.0 / 25.0;
const FINAL: f64 = START / 1e4;

/// What a rate that goes in steps is multiplied by.
const FACTOR: f64 = 0.1;

impl Validator<'_> {
    pub(super) fn schedule(&self, raw: raw::Schedule) -> Result<Schedule> {
        let (in_steps, cycle) = (raw.kind == "step", raw.kind == "one_cycle");
        let set = [
            ("warmup", raw.warmup > 0, !cycle),
            ("final", raw.final_share.is_some(), !in_steps),
            ("factor", raw.factor.is_some(), in_steps),
            ("every", raw.every.is_some(), in_steps),
            ("at", raw.at.is_some(), in_steps),
            ("rise", raw.rise.is_some(), cycle),
            ("start", raw.start.is_some(), cycle),
        ];
        let kind = match raw.kind.as_str() {
            "constant" => ScheduleKind::Constant,
            "linear" => ScheduleKind::Linear,
            "cosine" => ScheduleKind::Cosine,
            "step" => self.in_steps(&raw)?,
            "one_cycle" => self.one_cycle(&raw)?,
            other => {
                let hint = "set it to \"constant\", \"linear\", \"cosine\", \"step\" or \"one_cycle\"";
                return Err(self.bad("train.schedule.kind", format!("is \"{other}\""), hint));
            }
        };
        if let Some((key, ..)) = set.iter().find(|(_, is_set, is_known)| *is_set && !is_known) {
            let what = format!("is set, but a schedule of the kind \"{}\" has none", raw.kind);
            return Err(self.bad(&format!("train.schedule.{key}"), what, "leave it out"));
        }
        let final_share = raw.final_share.unwrap_or(if cycle { FINAL } else { 0.0 });
        if !(0.0..=1.0).contains(&final_share) {
            let hint = "it is the share of the peak rate left at the end, in 0..1";
            return Err(self.bad("train.schedule.final", format!("is {final_share}"), hint));
        }
        Ok(Schedule { kind, warmup: raw.warmup, final_share })
    }

    fn in_steps(&self, raw: &raw::Schedule) -> Result<ScheduleKind> {
        let factor = raw.factor.unwrap_or(FACTOR);
        if !(factor > 0.0 && factor <= 1.0) {
            let hint = "the rate is multiplied by it: it lies above 0 and is at most 1";
            return Err(self.bad("train.schedule.factor", format!("is {factor}"), hint));
        }
        let hint = "set every = 1000, or at = [1000, 2000]: the steps after which the rate changes";
        let when = match (raw.every, &raw.at) {
            (Some(0), None) => return Err(self.bad("train.schedule.every", "is 0", hint)),
            (Some(steps), None) => Milestones::Every(steps),
            (None, Some(steps)) if !steps.is_empty() && steps.is_sorted() => Milestones::At(steps.clone()),
            (None, Some(steps)) => {
                return Err(self.bad("train.schedule.at", format!("is {steps:?}, not rising numbers"), hint));
            }
            (None, None) => return Err(self.bad("train.schedule", "has neither `every` nor `at`", hint)),
            (Some(_), Some(_)) => {
                return Err(self.bad("train.schedule", "has both `every` and `at`", "keep one of them"));
            }
        };
        Ok(ScheduleKind::Step { factor, when })
    }

    fn one_cycle(&self, raw: &raw::Schedule) -> Result<ScheduleKind> {
        let (rise, start) = (raw.rise.unwrap_or(RISE), raw.start.unwrap_or(START));
        for (key, share, hint) in [
            ("train.schedule.rise", rise, "it is the share of the steps that go up, in 0..1"),
            ("train.schedule.start", start, "it is the share of the peak rate at the first step, in 0..1"),
        ] {
            if !(0.0..=1.0).contains(&share) {
                return Err(self.bad(key, format!("is {share}"), hint));
            }
        }
        Ok(ScheduleKind::OneCycle { rise, start })
    }
}
