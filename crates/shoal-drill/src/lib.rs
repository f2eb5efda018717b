//! A seeded network, clock and disk in which one controller and its workers, the machines that `shoal-control` ships, run
//! jobs of a toy while everything that can go wrong does. A seed is a whole course of events and gives the same one
//! every time, so a failure is found again by its number.
//!
//! - `faults`: what goes wrong when, and what healing is.
//! - `world`: the queue of events, the processes, their clocks and the network between them.
//! - `checks`: what must hold after every event; `ledger`: receipts, counted a second time.
//! - `toy`, `engine`, `store`: training without arithmetic, in which a wrong step can be seen for good.
//! - `disk`: a disk that tears what was not flushed.
//! - `coverage`: how often each fault and each transition happened.
//!
//! # What must hold
//!
//! 1. **One plan.** Workers that may run a job all run the same epoch of it.
//! 2. **Every sample once.** Each slice is, at each version, what exactly these steps with these samples make of it.
//! 3. **Every step counted once.** Counted less undone is what is committed, and no more is committed than was done.
//! 4. **No torn checkpoint.** Whatever the controller takes for complete is there, whole, and of one step.
//! 5. **One version.** All slices are at the same one when a plan starts, and at the one that the controller says.
//! 6. **Nothing said that can be forgotten.** A controller that starts again knows all that it had told anyone.
//! 7. **Nothing given up.** No job goes back to a checkpoint while every slice has a living holder.
//! 8. **Progress.** Once faults stop, every job that is not cancelled is done within a bounded time, or rests as failed
//!    because nothing that it was saved in can be read, or because a step of it cannot be done by anyone.
//! 9. **Nothing begun anew.** A job that had a complete checkpoint never begins from nothing.
//! 10. **Room is made.** What comes from storage does not meet old state that nobody needs.
//! 11. **Every record fits.** The controller comes to no decision that its own log would not take.
//! 12. **Every millisecond once.** The parts of each job's receipt add up to the time its workers had something of it, and
//!     to what they cost meanwhile.
//! 13. **Dead ends end.** A job goes past a step that cannot be done by anyone only after it has failed there and its owner
//!     wished it to go on; until then no plan is begun for it, and it loses nothing that was counted.

mod checks;
mod coverage;
mod disk;
mod engine;
mod faults;
mod ledger;
mod random;
mod store;
mod toy;
mod world;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use shoal_control::Bug;

pub use coverage::{ALL, Coverage};

/// What a seed went through.
#[derive(Clone, Debug)]
pub struct Report {
    pub seed: u64,
    pub events: u64,
    /// Of the drill's clock.
    pub ended_ms: u64,
    pub coverage: Coverage,
}

/// A seed after which something did not hold.
#[derive(Clone, Debug)]
pub struct Failure {
    pub seed: u64,
    pub bug: Option<Bug>,
    pub at_ms: u64,
    /// The rule, as this crate's head names it, and what was seen.
    pub rule: &'static str,
    pub seen: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { seed, bug, at_ms, rule, seen } = self;
        writeln!(out, "seed {seed}, {at_ms} ms: {rule}: {seen}")?;
        write!(
            out,
            "again, with all events: cargo run --release -p shoal-drill --example replay -- --seed {seed}"
        )?;
        match bug {
            Some(bug) => write!(out, " --bug {bug:?}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Failure {}

/// Runs a seed to its end.
pub fn run(seed: u64) -> Result<Report, Failure> {
    run_with(seed, None, None)
}

/// Likewise with a planted bug, and with someone who is told each event as it happens.
pub fn run_with(seed: u64, bug: Option<Bug>, tell: Option<&mut dyn FnMut(&str)>) -> Result<Report, Failure> {
    world::World::new(seed, bug, tell).run()
}

/// What many seeds went through.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub events: u64,
    /// In how many of them each fault and transition happened.
    pub seeds_with: BTreeMap<&'static str, u64>,
    pub failures: Vec<Failure>,
}

/// Runs seeds on all cores.
pub fn run_many(seeds: Range<u64>, bug: Option<Bug>) -> Tally {
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let part = |thread: u64| {
        let mut tally = Tally::default();
        for seed in seeds.clone().filter(|seed| seed % threads == thread) {
            match run_with(seed, bug, None) {
                Ok(report) => {
                    tally.events += report.events;
                    for what in report.coverage.0.keys() {
                        *tally.seeds_with.entry(what).or_default() += 1;
                    }
                }
                Err(failure) => tally.failures.push(failure),
            }
        }
        tally
    };
    let mut all = Tally::default();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|thread| scope.spawn(move || part(thread))).collect();
        for worker in workers {
            let tally = worker.join().expect("a drill reports its failures");
            all.events += tally.events;
            all.failures.extend(tally.failures);
            for (what, seeds) in tally.seeds_with {
                *all.seeds_with.entry(what).or_default() += seeds;
            }
        }
    });
    all.failures.sort_by_key(|failure| failure.seed);
    all
}
