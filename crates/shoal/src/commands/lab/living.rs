//! A fleet in a box that lives: a controller, and a worker process for each machine that is there, which plays its device.
//! Machines come and go as a spot trace says ([`spot`]), or one becomes slow ([`slow`]); what the run makes of it is set
//! beside what could have been done.
//!
//! - [`stage`]: the controller and the processes.
//! - [`chronicle`]: what the controller's records say of changes.

mod chronicle;
mod slow;
mod spot;
mod stage;

use std::path::PathBuf;

use shoal_model::Chain;

use crate::error::{CliError, Result};
use crate::job::Job;

/// Silence after which a worker is taken for dead, where nobody says.
const DEADLINE_SECONDS: f64 = 0.9;

#[derive(clap::Args)]
pub struct Options {
    /// Let machines like the fleet's first come and go as a spot trace says (docs/fleet.md), without notice
    #[arg(long, value_name = "FILE", conflicts_with_all = ["record", "namespace", "unshaped", "table", "stop_at", "slow"])]
    trace: Option<PathBuf>,
    /// So many times faster than the trace
    #[arg(long, value_name = "TIMES", requires = "trace", default_value_t = 1.0)]
    faster: f64,
    /// Begin there, in seconds of this clock from the trace's beginning
    #[arg(long, value_name = "SECONDS", requires = "trace", default_value_t = 0.0)]
    from: f64,
    /// End after so many seconds, at the latest
    #[arg(long, requires = "trace")]
    seconds: Option<f64>,
    /// Let one of the fleet's devices become so many times slower in the middle of the run
    #[arg(long, value_name = "TIMES", conflicts_with_all = ["record", "namespace", "unshaped", "table", "stop_at"])]
    slow: Option<f64>,
}

/// What happens to the fleet.
pub enum Course {
    Spot { file: PathBuf, faster: f64, from: f64, seconds: f64 },
    Slow { times: f64 },
}

impl Options {
    /// None where nothing happens to it.
    pub fn course(&self) -> Result<Option<Course>> {
        let Options { trace, faster, from, seconds, slow } = self;
        let seconds = seconds.unwrap_or(f64::INFINITY);
        let positive = |value: &f64| *value > 0.0;
        if ![*faster, seconds, slow.unwrap_or(1.0)].iter().all(positive) || *from < 0.0 || from.is_nan() {
            return Err(CliError::said(
                "--faster, --seconds and --slow are above 0, --from is not below it",
                "leave them out for the whole trace at its own speed",
            ));
        }
        let spot =
            |file: &PathBuf| Course::Spot { file: file.clone(), faster: *faster, from: *from, seconds };
        Ok(trace.as_ref().map(spot).or(slow.map(|times| Course::Slow { times })))
    }
}

pub fn run(options: &super::Options, job: &Job, chain: &Chain, course: Course) -> Result {
    let on_fleet = options.on_fleet();
    let on = on_fleet.read(job, chain)?;
    if let Some(node) = on.fleet.nodes.iter().find(|node| node.devices.len() != 1) {
        let what = format!("{}: a fleet that lives is made of machines with one device each", node.name);
        return Err(CliError::said(what, "write `count = 4` for the machine instead of its devices"));
    }
    let stretch = options.stretch.unwrap_or(1.0);
    let scene = Scene { options, job, chain, on_fleet, on, stretch };
    match course {
        Course::Spot { file, faster, from, seconds } => spot::run(&scene, &file, faster, from, seconds),
        Course::Slow { times } => slow::run(&scene, times),
    }
}

/// What is played, and where.
struct Scene<'a> {
    options: &'a super::Options,
    job: &'a Job,
    chain: &'a Chain,
    on_fleet: crate::fleet_plan::FleetOptions,
    on: crate::fleet_plan::OnFleet,
    stretch: f64,
}
