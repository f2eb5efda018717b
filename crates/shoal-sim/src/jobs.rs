//! Several jobs on a pool of devices: each step of each job runs whole on some device, which one is decided when it
//! begins ([`shoal_plan::dispatch`]). A device takes on its next step when the one before has nothing left to compute:
//! its last copies and updates, and the other's first, go on side by side.

use shoal_plan::dispatch::{Waiting, next};
use shoal_plan::{Layout, Meetings, Program};

use crate::clock::{Clock, Milestone, Settings};
use crate::flows::Resource;
use crate::world::World;

/// A job's step on one of the devices.
#[derive(Clone, Copy)]
pub struct OnDevice<'a> {
    pub program: &'a Program,
    pub layout: &'a Layout<'a>,
    pub world: &'a dyn World,
    /// Bytes of the device's memory that it takes.
    pub bytes: u64,
    /// Those that it keeps when it has nothing left to compute.
    pub bytes_after: u64,
}

pub struct PoolJob<'a> {
    pub priority: u32,
    pub steps: usize,
    /// What a step takes where nothing else runs, by which jobs are compared.
    pub step_seconds: f64,
    /// By device.
    pub on: Vec<OnDevice<'a>>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Played {
    /// When the last job ended.
    pub seconds: f64,
    /// When each did.
    pub ends: Vec<f64>,
}

/// Plays jobs through on devices that have so many bytes each.
pub fn simulate_jobs(
    jobs: &[PoolJob],
    budgets: &[u64],
    resources: &[Resource],
    settings: Settings,
) -> Played {
    let nobody = Meetings::default();
    let mut clock = Clock::new(budgets.len(), &nobody, resources, settings);
    let mut pool = Pool {
        jobs,
        left: jobs.iter().map(|job| job.steps).collect(),
        is_running: vec![false; jobs.len()],
        of: Vec::new(),
        free: budgets.to_vec(),
        computing: vec![None; budgets.len()],
        ends: vec![0.0; jobs.len()],
    };
    (0..budgets.len()).for_each(|device| pool.take_on(&mut clock, device));
    (0..budgets.len()).for_each(|device| clock.go_on(device));
    clock.run(&mut |clock, program, milestone| pool.reached(clock, program, milestone));
    Played { seconds: clock.now, ends: pool.ends }
}

struct Pool<'j, 'a> {
    jobs: &'j [PoolJob<'a>],
    /// Steps of each job that have not begun.
    left: Vec<usize>,
    is_running: Vec<bool>,
    /// The job and the device of each program that was started.
    of: Vec<(usize, usize)>,
    free: Vec<u64>,
    /// The program of each device that still computes.
    computing: Vec<Option<usize>>,
    ends: Vec<f64>,
}

impl<'a> Pool<'_, 'a> {
    /// A device without anything to compute takes on the next step.
    fn take_on(&mut self, clock: &mut Clock<'a>, device: usize) {
        if self.computing[device].is_some() {
            return;
        }
        let waiting: Vec<Waiting> = (0..self.jobs.len())
            .filter(|job| self.left[*job] > 0 && !self.is_running[*job])
            .map(|job| Waiting {
                job,
                priority: self.jobs[job].priority,
                remaining_seconds: self.left[job] as f64 * self.jobs[job].step_seconds,
                bytes: self.jobs[job].on[device].bytes,
            })
            .collect();
        let Some(Waiting { job, bytes, .. }) = next(&waiting, self.free[device]) else { return };
        let OnDevice { program, layout, world, .. } = self.jobs[job].on[device];
        let number = clock.add(program, layout, world, device);
        debug_assert_eq!(number, self.of.len());
        self.of.push((job, device));
        self.left[job] -= 1;
        self.is_running[job] = true;
        self.free[device] -= bytes;
        self.computing[device] = Some(number);
    }

    fn reached(&mut self, clock: &mut Clock<'a>, program: usize, milestone: Milestone) {
        let (job, device) = self.of[program];
        match milestone {
            Milestone::Computed => {
                let OnDevice { bytes, bytes_after, .. } = self.jobs[job].on[device];
                self.free[device] += bytes - bytes_after;
                self.computing[device] = None;
                self.take_on(clock, device);
            }
            // A job's next step may be another device's: it begins when all of this one is over.
            Milestone::Listed => {}
            Milestone::Over => {
                self.is_running[job] = false;
                self.free[device] += self.jobs[job].on[device].bytes_after;
                self.ends[job] = clock.now;
                // Whoever found nothing to do may now.
                for device in 0..self.computing.len() {
                    self.take_on(clock, device);
                    clock.go_on(device);
                }
            }
        }
    }
}
