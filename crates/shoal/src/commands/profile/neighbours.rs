//! Others that train on this machine while something is measured, as the workers of a fleet do. A processor with some of the
//! cores is slower while the rest compute too: they share caches, memory and the clock's limit. And what messages take of
//! processors is seen by how much slower these become.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shoal_model::Model;

use super::super::trial::{Trial, TrialSettings, median};
use crate::assemble::LocalDevice;
use crate::error::Result;

/// How often it is looked how far they are.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// How far one who trains is.
#[derive(Default)]
struct Course {
    /// When its steps ended.
    steps: Vec<Instant>,
    is_over: bool,
}

/// Those who train.
pub struct Neighbours(Vec<Mutex<Course>>);

impl Neighbours {
    fn of(&self, number: usize) -> MutexGuard<'_, Course> {
        self.0[number].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all have ended so many steps more. Who has failed is not waited for.
    pub fn wait_for(&self, steps: usize) {
        let wanted: Vec<usize> =
            (0..self.0.len()).map(|number| self.of(number).steps.len() + steps).collect();
        let is_there = |number: usize| {
            let course = self.of(number);
            course.is_over || course.steps.len() >= wanted[number]
        };
        while !(0..self.0.len()).all(is_there) {
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// What a step took of those that lie between two moments; none where no step does.
    pub fn step_seconds(&self, from: Instant, to: Instant) -> Option<f64> {
        let mut all = Vec::new();
        for number in 0..self.0.len() {
            let course = self.of(number);
            let within = course.steps.windows(2).filter(|both| both[0] >= from && both[1] <= to);
            all.extend(within.map(|both| (both[1] - both[0]).as_secs_f64()));
        }
        (!all.is_empty()).then(|| median(&mut all))
    }
}

/// Whoever drops it trains no more, however that came.
struct Over<'a>(&'a Neighbours, usize);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.of(self.1).is_over = true;
    }
}

/// Does something while so many others train.
pub fn among<T>(
    count: usize,
    model: &Model,
    settings: &TrialSettings,
    device: &LocalDevice,
    measure: impl FnOnce(&Neighbours) -> Result<T>,
) -> Result<T> {
    let neighbours = Neighbours((0..count).map(|_| Mutex::default()).collect());
    let is_over = AtomicBool::new(false);
    let train = |number: usize| -> Result {
        let mut trial = Trial::new(model, settings, device, None)?;
        while !is_over.load(Ordering::Relaxed) {
            trial.train(1)?;
            neighbours.of(number).steps.push(Instant::now());
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let spawn = |number: usize| {
            let (neighbours, train) = (&neighbours, &train);
            scope.spawn(move || {
                let _over = Over(neighbours, number);
                train(number)
            })
        };
        let others: Vec<_> = (0..count).map(spawn).collect();
        neighbours.wait_for(1);
        let measured = measure(&neighbours);
        is_over.store(true, Ordering::Relaxed);
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
