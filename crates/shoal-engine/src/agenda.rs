//! What follows a step, and how all workers come to do the same. What is due is the first worker's to say. That rides on the
//! sum of the gradient's norm, which every step has anyway, with what each says of its own save and memory. In a round of its
//! own after each step everyone would wait for whoever is slowest with its updates, and then for the network, while nobody
//! computes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use shoal_kernels::Device;

use crate::error::Result;
use crate::run::RunSettings;
use crate::saving::Saver;

/// How often something is due.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Interval {
    Steps(u64),
    Time(Duration),
    /// As often as keeps the cost of saving near one percent of the time.
    Auto,
    /// Not at the end either: what is trained is not wanted.
    Never,
}

/// With `every = "auto"`: never more often than this, and saving takes at most a hundredth of the time.
const AUTO_LEAST: Duration = Duration::from_secs(60);
const AUTO_COST_SHARE: u32 = 100;

impl Interval {
    fn is_due(self, step: u64, since: Instant, cost: Duration) -> bool {
        match self {
            Interval::Steps(steps) => step.is_multiple_of(steps),
            Interval::Time(time) => since.elapsed() >= time,
            Interval::Auto => since.elapsed() >= AUTO_LEAST.max(cost * AUTO_COST_SHARE),
            Interval::Never => false,
        }
    }
}

/// What follows a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Verdict {
    pub(crate) evaluates: bool,
    pub(crate) saves: bool,
    pub(crate) stops: bool,
}

impl Verdict {
    fn number(self) -> f64 {
        f64::from(u8::from(self.evaluates) | u8::from(self.saves) << 1 | u8::from(self.stops) << 2)
    }

    fn of(number: f64) -> Verdict {
        let bits = number as u8;
        Verdict { evaluates: bits & 1 > 0, saves: bits & 2 > 0, stops: bits & 4 > 0 }
    }
}

/// What a run is to do beside its steps, and when it did so last.
pub(crate) struct Agenda {
    /// Of the job.
    steps: u64,
    /// The step that this run ends with.
    pub(crate) last: u64,
    evaluate_every: Option<Interval>,
    save_every: Interval,
    has_evaluated: bool,
    evaluated_at: Instant,
    saved_at: Instant,
    /// How long the last save held up steps.
    save_cost: Duration,
}

impl Agenda {
    pub(crate) fn new(settings: &RunSettings) -> Agenda {
        Agenda {
            steps: settings.steps,
            last: settings.stop_at.map_or(settings.steps, |stop| stop.min(settings.steps)),
            evaluate_every: settings.eval_every,
            save_every: settings.checkpoint_every,
            has_evaluated: false,
            evaluated_at: Instant::now(),
            saved_at: Instant::now(),
            save_cost: Duration::ZERO,
        }
    }

    /// What follows once so many steps are completed.
    pub(crate) fn after(&self, step: u64, is_asked_to_stop: bool) -> Verdict {
        let stops = is_asked_to_stop || step >= self.last;
        let due = |every: Interval| every.is_due(step, self.evaluated_at, Duration::ZERO);
        Verdict {
            evaluates: self.evaluate_every.is_some_and(|every| self.is_finished(step) || due(every)),
            saves: match self.save_every {
                Interval::Never => false,
                every => stops || every.is_due(step, self.saved_at, self.save_cost),
            },
            stops,
        }
    }

    /// Whether the job has no more steps to do.
    pub(crate) fn is_finished(&self, step: u64) -> bool {
        step >= self.steps
    }

    /// Whether a save may come while steps go on, and it is known by now what memory all that precedes it needs: evaluating
    /// may take more than steps do.
    pub(crate) fn awaits_save(&self) -> bool {
        let not_before_the_end = match self.save_every {
            Interval::Steps(every) => every >= self.last,
            Interval::Never => true,
            Interval::Time(_) | Interval::Auto => false,
        };
        !not_before_the_end && (self.evaluate_every.is_none() || self.has_evaluated)
    }

    pub(crate) fn note_evaluated(&mut self) {
        (self.has_evaluated, self.evaluated_at) = (true, Instant::now());
    }

    pub(crate) fn note_saved(&mut self, cost: Duration) {
        (self.saved_at, self.save_cost) = (Instant::now(), cost);
    }
}

/// What all workers know of each other at a step's end.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Told {
    /// The first worker's; what another has here must be nothing.
    pub(crate) verdict: Verdict,
    /// How many have not written their part of the last save yet.
    pub(crate) saving: usize,
    /// Of all parts of it that are written.
    pub(crate) saved_bytes: u64,
    /// The most memory that each worker has needed, in the order of members: as of the norm, so what updates need beyond that
    /// shows a step later.
    pub(crate) peak_bytes: Vec<u64>,
}

impl Told {
    fn numbers(&self) -> Vec<f64> {
        let first = [self.verdict.number(), self.saving as f64, self.saved_bytes as f64];
        first.into_iter().chain(self.peak_bytes.iter().map(|bytes| *bytes as f64)).collect()
    }

    /// By what everyone's numbers add up to.
    pub(crate) fn of(sums: &[f64]) -> Told {
        Told {
            verdict: Verdict::of(sums[0]),
            saving: sums[1] as usize,
            saved_bytes: sums[2] as u64,
            peak_bytes: sums[3..].iter().map(|bytes| *bytes as u64).collect(),
        }
    }
}

/// What one worker has to tell in the step under way. It is asked in the middle of it, as late as the others can still hear
/// of it: so a wish to stop counts at the end of the step that it came in.
pub(crate) struct Teller<'a> {
    /// The step's number, once it is completed.
    step: u64,
    /// The first worker's.
    agenda: Option<&'a Agenda>,
    stop: &'a AtomicBool,
    /// This worker's place among the members, and how many these are.
    place: usize,
    members: usize,
    device: Arc<dyn Device>,
    saving: Mutex<Saving<'a>>,
}

/// A save that may end during the step, and how it did.
struct Saving<'a> {
    saver: &'a mut Saver,
    settled: Result,
}

impl<'a> Teller<'a> {
    pub(crate) fn new(
        step: u64,
        agenda: Option<&'a Agenda>,
        stop: &'a AtomicBool,
        (place, members): (usize, usize),
        device: Arc<dyn Device>,
        saver: &'a mut Saver,
    ) -> Teller<'a> {
        let saving = Mutex::new(Saving { saver, settled: Ok(()) });
        Teller { step, agenda, stop, place, members, device, saving }
    }

    /// This worker's numbers, which are to be added to those of the others.
    pub(crate) fn numbers(&self) -> Vec<f64> {
        let mut saving = self.saving.lock().expect("nobody panics with it");
        let settled = saving.saver.settle(false);
        // One that has failed is never written, whatever the others have done.
        let is_under_way = saving.saver.is_under_way() || settled.is_err();
        saving.settled = settled;
        let is_asked_to_stop = self.stop.load(Ordering::Relaxed);
        let mut peak_bytes = vec![0; self.members];
        peak_bytes[self.place] = self.device.arena().peak();
        let told = Told {
            verdict: self
                .agenda
                .map_or(Verdict::default(), |agenda| agenda.after(self.step, is_asked_to_stop)),
            saving: usize::from(is_under_way),
            saved_bytes: saving.saver.done_bytes(),
            peak_bytes,
        };
        told.numbers()
    }

    /// How a save has ended that did so before the numbers were asked for.
    pub(crate) fn settled(self) -> Result {
        self.saving.into_inner().expect("nobody panics with it").settled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the first says and what everyone says of itself is what the sums say, however they are added up.
    #[test]
    fn sums_tell_what_each_told() {
        let verdict = |bits: u8| Verdict::of(f64::from(bits));
        for bits in 0..8 {
            let told = |verdict, saving, saved_bytes, place: usize| {
                let mut peak_bytes = vec![0; 3];
                peak_bytes[place] = 1 << (40 + place);
                Told { verdict, saving, saved_bytes, peak_bytes }.numbers()
            };
            let all = [
                told(verdict(bits), 0, 5, 0),
                told(Verdict::default(), 1, 0, 1),
                told(Verdict::default(), 1, 7, 2),
            ];
            let sums: Vec<f64> = (0..6).map(|place| all.iter().map(|numbers| numbers[place]).sum()).collect();
            let peak_bytes = vec![1 << 40, 1 << 41, 1 << 42];
            let expected = Told { verdict: verdict(bits), saving: 2, saved_bytes: 12, peak_bytes };
            assert_eq!(Told::of(&sums), expected);
            assert_eq!(expected.verdict.number(), f64::from(bits));
        }
    }
}
