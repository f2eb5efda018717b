//! The best decision for a goal: what the search finds, beside plain data parallelism and DeepPool's own rule, judged by
//! the timeline and by memory.

use super::place::Ways;
use super::polish::polish;
use super::search::{Field, Limits, Link, Wanted, links, search};
use super::{BurstError, Decision, Estimate, Goal, Planned, Problem, greedy, timeline};

/// Two sums of the same numbers in different orders are the same budget.
const ROUNDING: f64 = 1.0 + 1e-9;

/// A problem with what all goals share worked out.
pub struct Planner<'a> {
    field: Field<'a>,
    links: Vec<Link>,
    greedy: Decision,
}

impl<'a> Planner<'a> {
    pub fn new(problem: &'a Problem<'a>) -> Result<Planner<'a>, BurstError> {
        problem.check()?;
        let field = Field::new(problem, problem.ways());
        let greedy = greedy::decide(problem, &field.ways, &greedy::Rule::of(problem.fleet));
        Ok(Planner { links: links(&field), field, greedy })
    }

    /// What a decision is taken to cost.
    pub fn estimate(&self, decision: &Decision) -> Estimate {
        timeline::estimate(self.field.problem, &self.field.ways, decision)
    }

    /// The same where gradients are added up when the backward has ended, none of it hidden, as DeepPool's runtime does.
    pub fn estimate_with_sums_after(&self, decision: &Decision) -> Estimate {
        let Field { problem, ways, .. } = &self.field;
        let layers = decision.devices.iter().enumerate();
        let sums: f64 =
            layers.map(|(layer, devices)| timeline::reduction_seconds(problem, ways, layer, devices)).sum();
        let hidden = self.estimate(decision);
        let waited = sums - hidden.exposed_seconds;
        Estimate {
            step_seconds: hidden.step_seconds + waited,
            device_seconds: hidden.device_seconds + waited * decision.devices[0].len() as f64,
            exposed_seconds: sums,
            ..hidden
        }
    }

    /// DeepPool's own rule.
    pub fn greedy(&self) -> &Decision {
        &self.greedy
    }

    /// The best decision for a goal. Plain data parallelism and DeepPool's own rule are among those it is chosen from.
    pub fn plan(&self, goal: Goal) -> Result<Planned, BurstError> {
        let problem = self.field.problem;
        let alone = self.estimate(&problem.single_device()).device_seconds;
        let unlimited = Limits { step_seconds: f64::INFINITY, device_seconds: f64::INFINITY };
        let limits = match goal {
            Goal::Fastest => unlimited,
            Goal::DeviceSeconds(most) => Limits { device_seconds: most * ROUNDING, ..unlimited },
            Goal::Amplification(most) => Limits { device_seconds: most * alone * ROUNDING, ..unlimited },
            Goal::StepSeconds(most) => Limits { step_seconds: most * ROUNDING, ..unlimited },
        };
        let cheapest = matches!(goal, Goal::StepSeconds(_));
        let ways = &self.field.ways;
        let mut choice = Choice { problem, ways, limits, cheapest, best: None, overfilled: None };
        choice.offer(problem.data_parallel());
        choice.offer(problem.single_device());
        choice.offer(self.greedy.clone());
        let wanted = if cheapest { Wanted::Cheapest } else { Wanted::Fastest };
        let found = search(&self.field, &self.links, choice.closer_limits(), wanted);
        found.decisions.into_iter().for_each(|decision| {
            choice.offer(decision);
        });
        polish(&mut choice, &self.field.series, &self.field.sets, &self.field.order);
        match (choice.best, choice.overfilled) {
            (Some(planned), _) => Ok(planned),
            (None, Some((device, needed_bytes, budget_bytes))) => {
                let device = problem.fleet.devices[device].name.clone();
                Err(BurstError::Memory { device, needed_bytes, budget_bytes })
            }
            (None, None) => Err(match goal {
                Goal::StepSeconds(wanted_seconds) => BurstError::Pace { wanted_seconds },
                _ => BurstError::Budget {
                    budget_seconds: limits.device_seconds,
                    least_seconds: found.least_device_seconds,
                },
            }),
        }
    }

    /// Decisions none of which is beaten by another in both time and device-seconds, fastest first, all at least as
    /// fast as asked.
    pub fn frontier(&self, step_seconds_max: f64) -> Vec<Planned> {
        let problem = self.field.problem;
        let limits = Limits { step_seconds: step_seconds_max * ROUNDING, device_seconds: f64::INFINITY };
        let mut decisions = search(&self.field, &self.links, limits, Wanted::Frontier).decisions;
        decisions.push(problem.data_parallel());
        let fits = decisions.into_iter().filter(|decision| problem.overfilled(decision).is_none());
        let mut planned: Vec<Planned> = fits
            .map(|decision| Planned { estimate: self.estimate(&decision), decision })
            .filter(|planned| planned.estimate.step_seconds <= step_seconds_max * ROUNDING)
            .collect();
        let key = |planned: &Planned| (planned.estimate.step_seconds, planned.estimate.device_seconds);
        planned.sort_by(|a, b| key(a).partial_cmp(&key(b)).unwrap_or(std::cmp::Ordering::Equal));
        let mut least = f64::INFINITY;
        planned.retain(|planned| {
            let better = planned.estimate.device_seconds < least;
            least = least.min(planned.estimate.device_seconds);
            better
        });
        planned
    }
}

/// The best of what is offered.
pub(super) struct Choice<'a> {
    pub problem: &'a Problem<'a>,
    ways: &'a Ways,
    limits: Limits,
    /// Whether the least device-seconds are best, and not the least time.
    cheapest: bool,
    pub best: Option<Planned>,
    overfilled: Option<(usize, u64, u64)>,
}

impl<'a> Choice<'a> {
    /// The same choice with nothing offered yet.
    pub fn afresh(&self) -> Choice<'a> {
        Choice { best: None, overfilled: None, ..*self }
    }

    fn key(&self, estimate: &Estimate) -> (f64, f64) {
        match self.cheapest {
            true => (estimate.device_seconds, estimate.step_seconds),
            false => (estimate.step_seconds, estimate.device_seconds),
        }
    }

    /// Takes a decision if it is better than the best so far.
    pub fn offer(&mut self, decision: Decision) -> bool {
        let estimate = timeline::estimate(self.problem, self.ways, &decision);
        let Limits { step_seconds, device_seconds } = self.limits;
        if estimate.device_seconds > device_seconds || estimate.step_seconds > step_seconds {
            return false;
        }
        if let Some(over) = self.problem.overfilled(&decision) {
            let nearer = |known: &(usize, u64, u64)| over.1 - over.2 < known.1 - known.2;
            if self.overfilled.as_ref().is_none_or(nearer) {
                self.overfilled = Some(over);
            }
            return false;
        }
        let better = self.best.as_ref().is_none_or(|best| self.key(&estimate) < self.key(&best.estimate));
        if better {
            self.best = Some(Planned { decision, estimate });
        }
        better
    }

    /// What is worse than the best so far need not be looked for.
    fn closer_limits(&self) -> Limits {
        let (mut limits, best) = (self.limits, self.best.as_ref().map(|best| &best.estimate));
        match (best, self.cheapest) {
            (Some(best), true) => limits.device_seconds = limits.device_seconds.min(best.device_seconds),
            (Some(best), false) => limits.step_seconds = limits.step_seconds.min(best.step_seconds),
            (None, _) => {}
        }
        limits
    }
}
