//! Others that train on this machine while something is measured, as the workers of a fleet do. A processor with some of the
//! cores is slower while the rest compute too: they share caches, memory and the clock's limit. And what messages take of
//! processors is seen by how much slower these become.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use shoal_model::Model;

use super::super::trial::{Trial, TrialSettings, median};
use crate::assemble::LocalDevice;
use crate::error::Result;

/// When those who train begin their steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steps {
    /// With whoever is measured, as workers do that have equal parts of a batch: all compute the same layers at the same time,
    /// and those that want more of the memory than the rest are in each other's way. And it is not chance who meets whom.
    Together,
    /// One after the other.
    Unasked,
}

/// How far they are.
#[derive(Default)]
struct Course {
    /// When each one's steps ended.
    steps: Vec<Vec<Instant>>,
    /// Those who train no more, however that came.
    has_ended: Vec<bool>,
    /// Steps that all may begin.
    begun: usize,
    is_over: bool,
}

/// Those who train.
#[derive(Default)]
pub struct Neighbours {
    course: Mutex<Course>,
    changed: Condvar,
}

impl Neighbours {
    fn new(count: usize, steps: Steps) -> Neighbours {
        // A first step, which is longer than others, is theirs alone.
        let begun = if steps == Steps::Together { 1 } else { usize::MAX };
        let (steps, has_ended) = (vec![Vec::new(); count], vec![false; count]);
        let course = Course { steps, has_ended, begun, is_over: false };
        Neighbours { course: Mutex::new(course), changed: Condvar::new() }
    }

    fn course(&self) -> MutexGuard<'_, Course> {
        self.course.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until(&self, is_there: impl Fn(&Course) -> bool) -> MutexGuard<'_, Course> {
        self.changed
            .wait_while(self.course(), |course| !is_there(course))
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes how far they are, and tells all who wait for that.
    fn change(&self, change: impl FnOnce(&mut Course)) {
        change(&mut self.course());
        self.changed.notify_all();
    }

    /// Lets all of them begin a step, which whoever asks begins too. Who has failed is not waited for.
    pub fn begin_step(&self) {
        let have_ended = |course: &Course| {
            let all = course.steps.iter().zip(&course.has_ended);
            all.into_iter().all(|(steps, has_ended)| *has_ended || steps.len() >= course.begun)
        };
        let mut course = self.wait_until(have_ended);
        course.begun = course.begun.saturating_add(1);
        drop(course);
        self.changed.notify_all();
    }

    /// Waits until all have ended so many steps more. Who has failed is not waited for.
    pub fn wait_for(&self, steps: usize) {
        let wanted: Vec<usize> = self.course().steps.iter().map(|ended| ended.len() + steps).collect();
        let are_there = |course: &Course| {
            let is_there =
                |number: usize| course.has_ended[number] || course.steps[number].len() >= wanted[number];
            (0..wanted.len()).all(is_there)
        };
        drop(self.wait_until(are_there));
    }

    /// What a step took of those that lie between two moments; none where no step does.
    pub fn step_seconds(&self, from: Instant, to: Instant) -> Option<f64> {
        let mut all = Vec::new();
        for steps in &self.course().steps {
            let within = steps.windows(2).filter(|both| both[0] >= from && both[1] <= to);
            all.extend(within.map(|both| (both[1] - both[0]).as_secs_f64()));
        }
        (!all.is_empty()).then(|| median(&mut all))
    }
}

/// Whoever drops it trains no more, however that came.
struct Ends<'a>(&'a Neighbours, usize);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.change(|course| course.has_ended[self.1] = true);
    }
}

/// Whoever drops it needs the others no more, however that came.
struct Over<'a>(&'a Neighbours);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.change(|course| course.is_over = true);
    }
}

/// Does something while so many others train.
pub fn among<T>(
    count: usize,
    steps: Steps,
    model: &Model,
    settings: &TrialSettings,
    device: &LocalDevice,
    measure: impl FnOnce(&Neighbours) -> Result<T>,
) -> Result<T> {
    let neighbours = Neighbours::new(count, steps);
    let train = |number: usize| -> Result {
        let mut trial = Trial::new(model, settings, device, None)?;
        loop {
            let may_begin = |course: &Course| course.is_over || course.steps[number].len() < course.begun;
            if neighbours.wait_until(may_begin).is_over {
                return Ok(());
            }
            trial.train(1)?;
            neighbours.change(|course| course.steps[number].push(Instant::now()));
        }
    };
    std::thread::scope(|scope| {
        let spawn = |number: usize| {
            let (neighbours, train) = (&neighbours, &train);
            scope.spawn(move || {
                let _ends = Ends(neighbours, number);
                train(number)
            })
        };
        let others: Vec<_> = (0..count).map(spawn).collect();
        let measured = {
            let _over = Over(&neighbours);
            neighbours.wait_for(1);
            measure(&neighbours)
        };
        let ended = others.into_iter().map(|other| match other.join() {
            Ok(ended) => ended,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        let all = ended.collect::<Result<Vec<()>>>();
        let measured = measured?;
        // What was measured beside one that failed was measured beside fewer.
        all.map(|_| measured)
    })
}
