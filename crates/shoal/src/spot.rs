//! Whole runs over a spot trace, on machines like the fleet's first: the best plan for however many there are, and what the
//! simulator is told of changes.

use std::collections::HashMap;

use shoal_fleet::pace::stretched;
use shoal_model::Chain;
use shoal_planner::run::{Morphing, Settings, Step};

use crate::fleet_plan::{FleetOptions, OnFleet, Survive, breakdown};
use crate::job::Job;

const CHECKPOINT_EVERY_SECONDS: f64 = 600.0;

/// How a run goes, at no price.
pub fn settings(job: &Job, on: &OnFleet, morphing: Morphing) -> Settings {
    Settings {
        morphing,
        checkpoint_every_seconds: CHECKPOINT_EVERY_SECONDS,
        checkpoint_seconds: 0.0,
        devices_per_machine: on.fleet.nodes[0].devices.len(),
        dollars_per_machine_hour: 0.0,
        state_bytes: 4 * (1 + job.optimizer.state_names().len() as u64),
    }
}

/// Plans for so many machines, each searched once: machines are alike, so it is one plan whoever they are.
pub struct Plans<'a> {
    options: &'a FleetOptions,
    job: &'a Job,
    chain: &'a Chain,
    on: &'a OnFleet,
    /// Everything lasts so many times longer.
    stretch: f64,
    known: HashMap<(usize, bool), Option<Step>>,
}

impl<'a> Plans<'a> {
    pub fn new(options: &'a FleetOptions, job: &'a Job, chain: &'a Chain, on: &'a OnFleet) -> Plans<'a> {
        Plans { options, job, chain, on, stretch: 1.0, known: HashMap::new() }
    }

    pub fn stretched(self, stretch: f64) -> Plans<'a> {
        Plans { stretch, ..self }
    }

    /// With the job's mirrors, where they are asked for and fit.
    pub fn step(&mut self, machines: &[String], mirrored: bool) -> Option<Step> {
        let Plans { options, job, chain, on, stretch, known } = self;
        let fleet = on.fleet.of_machines(machines);
        let names: Vec<String> = fleet.devices.iter().map(|device| device.name.clone()).collect();
        let known = known.entry((machines.len(), mirrored)).or_insert_with(|| {
            let costs = options.costs(job, chain, &fleet).ok()?;
            let (fleet, costs) = stretched(&fleet, &costs, *stretch);
            let on = OnFleet { fleet, costs };
            let survive = match options.survive(job) {
                _ if !mirrored => Survive::Exactly(0),
                // Fewer machines are better than none.
                Survive::Exactly(survive) | Survive::UpTo(survive) => Survive::UpTo(survive),
            };
            let best = options.search_surviving(job, chain, &on, survive).ok()?.best;
            let devices = breakdown(&best.plan, chain, &on, &best.simulated).ok()?;
            Some(Step { plan: best.plan, seconds: best.simulated.seconds, devices })
        });
        let mut step = known.clone()?;
        for (row, name) in step.plan.devices.iter_mut().zip(names) {
            row.name = name;
        }
        Some(step)
    }
}
