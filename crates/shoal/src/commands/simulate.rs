//! `shoal simulate`: one step of a plan on a virtual clock. The programs are those that the engine would run.

mod against;
mod trace;

use std::path::PathBuf;

use shoal_fleet::Profile;
use shoal_plan::{Layout, Meetings, Purpose, compile_paced, memory, verify_all};
use shoal_planner::breakdown;
use shoal_sim::{FleetWorld, Jitter, Settings, simulate};

use crate::error::{CliError, Result};
use crate::fleet_plan::{Described, FleetOptions, read_table};
use crate::in_a_box::trace::Trace;
use crate::job::Job;
use crate::timeline::{Drawing, Timeline, time_text};

#[derive(clap::Args)]
pub struct Options {
    /// The job file
    job: PathBuf,
    /// Change a key of the job: --set train.global_batch=64
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    #[command(flatten)]
    on: FleetOptions,
    /// A table that `shoal plan --table` wrote; without it the best is searched
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Let every instruction take up to so much longer: 0.1 is a tenth
    #[arg(long, default_value_t = 0.0)]
    jitter: f64,
    /// Which random slowness
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Play a whole run over a spot trace (docs/fleet.md), on machines like the fleet's first
    #[arg(long, value_name = "FILE", conflicts_with_all = ["table", "timeline"])]
    trace: Option<PathBuf>,
    /// Set a step that really ran beside this: a trace that `shoal lab --record` wrote
    #[arg(long, value_name = "TRACE", conflicts_with = "trace")]
    against: Option<PathBuf>,
    /// Write the profile again, with layers lasting as long as they did in that trace
    #[arg(long, value_name = "FILE", requires_all = ["against", "profile"])]
    correct: Option<PathBuf>,
    /// Draw what each device does when: FILE.svg, or FILE.html to point at instructions
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(options: Options) -> Result {
    let job = Job::read(&options.job, &options.set)?;
    if !(0.0..=100.0).contains(&options.jitter) {
        return Err(CliError::said("--jitter is between 0 and 100", "leave it out for none"));
    }
    let chain = job.chain();
    let drawing = options.timeline.as_deref().map(Drawing::named).transpose()?;
    let mut on = options.on.read(&job, &chain)?;
    let ran = options.against.as_deref().map(Trace::read).transpose()?;
    if let Some(ran) = &ran {
        on.costs = on.costs.in_a_box(&on.fleet, |kind| ran.played.iter().any(|played| played == kind));
    }
    if let Some(trace) = &options.trace {
        return trace::run(&options.on, &job, &chain, &on, trace, options.json);
    }
    let plan = match &options.table {
        Some(path) => read_table(path, &chain)?,
        None => options.on.search(&job, &chain, &on)?.best.plan,
    };
    on.assert_made_for(&plan)?;
    let layout = Layout::new(&plan, &chain);
    let world = FleetWorld::new(&on.fleet, &on.costs, &layout);
    let programs = compile_paced(&plan, &chain, Purpose::Train, &world)?;
    verify_all(&programs, &plan, &chain, Purpose::Train)?;
    let jitter = (options.jitter > 0.0).then_some(Jitter { seed: options.seed, most: options.jitter });
    let simulated = simulate(&programs, &layout, &world, Settings { jitter, ..Settings::default() })?;
    if let Some(trace) = ran {
        let meetings = Meetings::new(&programs, &layout)?;
        let comparison = against::Comparison::new(&trace, &plan, &programs, &meetings, &simulated)?;
        match options.json {
            true => println!("{}", comparison.json()),
            false => comparison.print(),
        }
        if let (Some(to), Some(profile)) = (&options.correct, &options.on.profile) {
            let seen = against::seen(&trace, &programs, &chain, &on);
            let corrected = Profile::read(profile)?.corrected(job.precision, &seen);
            corrected.profile.write(to)?;
            if !options.json {
                against::print_corrections(&corrected);
            }
            eprintln!("wrote {}", to.display());
        }
        return Ok(());
    }
    let memory: Vec<_> = programs.iter().map(|program| memory::forecast_in(program, &layout)).collect();
    if let Some(drawing) = drawing {
        let timeline = Timeline {
            title: format!("{}, plan {}: {} a step", job.name, plan.id(), time_text(simulated.seconds)),
            programs: &programs,
            spans: &breakdown::active(&programs, &simulated, &layout)?,
            seconds: simulated.seconds,
            names: plan.devices.iter().map(|device| device.name.as_str()).collect(),
        };
        drawing.write(&timeline)?;
        eprintln!("wrote {}", drawing.path.display());
    }
    let breakdown = breakdown::of(&programs, &simulated, &layout)?;
    let described = Described {
        job: &job,
        on: &on,
        plan: &plan,
        simulated: &simulated,
        memory: &memory,
        breakdown: &breakdown,
    };
    match options.json {
        true => println!("{}", described.json()),
        false => described.print(),
    }
    Ok(())
}
