//! `shoal lab`: a job on a fleet in a box. The fleet's plan runs as it would there, a process a device, and what it takes
//! is set beside what was predicted. With `--trace` or `--slow` the fleet lives ([`living`]).

mod living;

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde_json::json;
use shoal_engine::{RunEvent, Traced};
use shoal_fleet::catalogue;
use shoal_model::{Chain, Precision};
use shoal_net::identity::Authority;
use shoal_plan::{Layout, Plan, Program, Purpose, compile_paced, verify_all};
use shoal_sim::{FleetWorld, Settings, simulate};

use super::train::stop_on_signals;
use super::trial::median;
use super::worker::trace_file;
use crate::error::{CliError, Result};
use crate::fleet_plan::{
    EFFORT_DEFAULT, FleetOptions, OnFleet, is_processor_here, is_real_in_the_lab, read_table,
};
use crate::in_a_box::assignment::{Assignment, Network, Report, name_of};
use crate::in_a_box::gpu::{self, Mps, Share};
use crate::in_a_box::pace::durations;
use crate::in_a_box::trace::{FORMAT, Trace};
use crate::in_a_box::ways::Ways;
use crate::in_a_box::{Namespace, Workers};
use crate::job::{Job, duration_text};
use crate::machine;
use crate::run_folder::{Known, RunFolder};
use crate::show::Progress;
use crate::timeline::time_text;

#[derive(clap::Args)]
pub struct Options {
    /// The fleet file
    fleet: PathBuf,
    /// The job file
    job: PathBuf,
    /// Change a key of the job: --set train.steps=100
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    #[command(flatten)]
    search: SearchOptions,
    /// Stop after this step, save, and exit as if interrupted
    #[arg(long, value_name = "STEP")]
    stop_at: Option<u64>,
    /// Play the processors too, as fast as the profile says or public figures let expect
    #[arg(long)]
    paced: bool,
    /// Let everything last so many times longer, links too; by default as long as it takes to play devices well
    #[arg(long, value_name = "TIMES")]
    stretch: Option<f64>,
    /// Leave the links between workers as fast as this machine is
    #[arg(long)]
    unshaped: bool,
    /// Start workers in these network namespaces, one a device in the fleet's order, each at its address there; needs root
    #[arg(long, value_name = "NAME=ADDRESS", conflicts_with = "plain", requires = "unshaped")]
    namespace: Vec<Namespace>,
    /// Let workers know each other by their addresses alone, without certificates
    #[arg(long)]
    plain: bool,
    /// Seconds of silence after which a worker counts as dead; 10, or 0.9 where the fleet lives
    #[arg(long, value_name = "SECONDS")]
    deadline: Option<f64>,
    /// Save nothing, at the end either: for a measurement of a model that takes long to write
    #[arg(long, conflicts_with_all = ["stop_at", "trace", "slow"])]
    unsaved: bool,
    /// Note when each instruction was under way, for `shoal simulate --against`
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    #[command(flatten)]
    living: living::Options,
    /// Print a summary as JSON and no progress
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct SearchOptions {
    /// What layers were measured to take, as `shoal profile` wrote it; other kinds of devices are estimated
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Search one shape of plan only
    #[arg(long, value_name = "SHAPE")]
    shape: Option<String>,
    /// Machines that may be lost at once without taking state with them (the job's plan.survive); 0 keeps no mirrors
    #[arg(long, value_name = "MACHINES")]
    survive: Option<usize>,
    /// How much is tried to make the best plan better: about so many seconds, and 0 leaves it as its search has it
    #[arg(long, value_name = "SECONDS", default_value_t = EFFORT_DEFAULT)]
    effort: f64,
    /// A table that `shoal plan --lab --table` wrote; without it the best is searched
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
}

impl Options {
    fn on_fleet(&self) -> FleetOptions {
        let SearchOptions { profile, shape, survive, effort, .. } = &self.search;
        FleetOptions {
            fleet: Some(self.fleet.clone()),
            profile: profile.clone(),
            shape: shape.clone(),
            survive: *survive,
            effort: *effort,
            // What is played is known later.
            lab: false,
        }
    }
}

/// Steps at the beginning that are not measured: memory is touched for the first time, connections grow.
const WARM_UP_STEPS: u64 = 2;
/// Silence after which a worker counts as dead, where the fleet does not live.
const DEADLINE_SECONDS: f64 = 10.0;
/// How long workers may take to end beyond the deadline after which they know that one is lost.
const GRACE: Duration = Duration::from_secs(3);
/// Played instructions should last about so long: shorter ones would drown in what sleeping and waking take.
const PLAYED_SECONDS: f64 = 5e-3;

pub fn run(options: Options) -> Result {
    let job = Job::read(&options.job, &options.set)?;
    let chain = job.chain();
    let positive = |value: f64| value.is_finite() && value > 0.0;
    if options.deadline.is_some_and(|deadline| !positive(deadline))
        || options.stretch.is_some_and(|stretch| !positive(stretch))
    {
        return Err(CliError::said(
            "--deadline and --stretch are above 0",
            "leave them out for the defaults",
        ));
    }
    if let Some(course) = options.living.course()? {
        return living::run(&options, &job, &chain, course);
    }
    let stop = stop_on_signals()?;
    let planned = Prepared::new(&options, &job, &chain)?;
    planned.assert_computes(job.precision)?;
    let shares = planned.shares();
    gpu::prepare(&shares, &job)?;
    let (places, devices) = (options.namespace.len(), planned.plan.devices.len());
    if places > 0 && places != devices {
        let what = format!("{places} namespaces for {devices} devices");
        return Err(CliError::said(what, "repeat --namespace NAME=ADDRESS once for each device"));
    }
    let known = Known::read(&job)?;
    let chosen = json!({"plan": planned.plan.id()});
    let folder = RunFolder::open(&job, known, chosen, options.stop_at, options.json)?;
    folder.identity.claim(&job.run_folder)?;
    let resumed = folder.found.as_ref().map(|checkpoint| checkpoint.header().step);
    let lab = job.run_folder.join("lab");
    std::fs::create_dir_all(&lab).map_err(CliError::at(&lab))?;
    let assignments = planned.assignments(&options, &job, &lab, resumed)?;
    if !options.json {
        eprintln!("{}", planned.banner(&job, resumed));
    }
    let leader = planned.leader();
    // One whole GPU needs nobody to divide it. The server is ended after its clients.
    let divided = shares.iter().any(|share| share.percent < 100);
    let mps = divided.then(|| Mps::start(&lab)).transpose()?;
    let mut workers = Workers::start(&lab, &assignments, mps.as_ref(), &options.namespace)?;
    let mut progress = Progress::new(job.steps, resumed.unwrap_or(0), options.json);
    let (mut steps, mut loss, mut seconds, mut end) = (resumed.unwrap_or(0), None, Vec::new(), None);
    let mut memory = BTreeMap::new();
    let first_measured = steps + WARM_UP_STEPS;
    let grace = Duration::from_secs_f64(options.deadline.unwrap_or(DEADLINE_SECONDS)) + GRACE;
    let followed = workers.follow(
        leader,
        grace,
        || stop.load(Ordering::Relaxed),
        |report| match report {
            Report::Step(record) => {
                if record.step > first_measured {
                    seconds.push(record.step_ms / 1e3);
                }
                (steps, loss, memory) = (record.step, Some(record.loss), record.memory_bytes.clone());
                progress.event(&RunEvent::Step(*record));
            }
            Report::Saved { step, bytes, seconds } => {
                progress.event(&RunEvent::Saved { step, bytes, seconds })
            }
            Report::SavesWait { needed_bytes, free_bytes } => {
                progress.event(&RunEvent::SavesWait { needed_bytes, free_bytes })
            }
            Report::Done { finished, .. } => end = Some(finished),
            Report::Listening(_) => {}
        },
    );
    progress.finish();
    followed?;
    if let Some(path) = &options.record {
        planned.collect_trace(&lab)?.write(path)?;
        eprintln!("wrote {}", path.display());
    }
    let measured = (!seconds.is_empty()).then(|| median(&mut seconds));
    planned.tell(&options, &job, &Outcome { steps, loss, measured, finished: end == Some(true), memory });
    Ok(())
}

struct Outcome {
    steps: u64,
    loss: Option<f64>,
    /// Median seconds of a step.
    measured: Option<f64>,
    finished: bool,
    /// The most bytes counted, by device.
    memory: BTreeMap<String, u64>,
}

/// A plan, its programs, and how they are to be played.
struct Prepared {
    on: OnFleet,
    plan: Plan,
    programs: Vec<Program>,
    /// Of a step, on the fleet itself.
    predicted: f64,
    /// Bytes by device.
    forecast: Vec<u64>,
    /// Of each played device, seconds by instruction.
    pace: Vec<Option<Vec<f64>>>,
    /// Of each device that is a share of the GPU here, in hundredths.
    gpu_percent: Vec<Option<u32>>,
    stretch: f64,
    members: Vec<usize>,
}

/// Refuses a table whose step takes more of a device than the table gives it. Searched ones fit; others are anyone's.
fn assert_fits(plan: &Plan, programs: &[Program], forecast: &[u64]) -> Result {
    let short = |(program, needed): (&Program, &u64)| {
        let device = &plan.devices[program.device];
        let short = needed.checked_sub(device.budget_bytes).filter(|short| *short > 0)?;
        Some((device, *needed, short))
    };
    let all = programs.iter().zip(forecast).filter(|(program, _)| !program.instructions.is_empty());
    let Some((device, needed, short)) = all.filter_map(short).max_by_key(|(.., short)| *short) else {
        return Ok(());
    };
    let (name, budget) = (&device.name, device.budget_bytes);
    let what = format!("{name}: a step needs {needed} bytes, the table's budget is {budget}, {short} short");
    Err(CliError::said(
        what,
        "raise the device's budget_bytes in the table, or leave --table out and have one searched",
    ))
}

impl Prepared {
    fn new(options: &Options, job: &Job, chain: &Chain) -> Result<Prepared> {
        let (fleet_options, table) = (options.on_fleet(), &options.search.table);
        let mut on = fleet_options.read(job, chain)?;
        on.costs = on.costs.in_a_box(&on.fleet, |kind| options.paced || !is_real_in_the_lab(kind));
        let plan = match table {
            Some(path) => read_table(path, chain)?,
            None => fleet_options.search(job, chain, &on)?.best.plan,
        };
        on.assert_made_for(&plan)?;
        let layout = Layout::new(&plan, chain);
        let world = FleetWorld::new(&on.fleet, &on.costs, &layout);
        let programs = compile_paced(&plan, chain, Purpose::Train, &world)?;
        verify_all(&programs, &plan, chain, Purpose::Train)?;
        let predicted = simulate(&programs, &layout, &world, Settings::default())?.seconds;
        let forecast: Vec<u64> = programs
            .iter()
            .map(|program| shoal_plan::memory::forecast_in(program, &layout).total())
            .collect();
        assert_fits(&plan, &programs, &forecast)?;
        let gpu_percent = |program: &Program| {
            let share = catalogue::share_of(&on.fleet.devices[program.device].kind);
            share.filter(|_| !options.paced).map(|(percent, _)| percent)
        };
        let gpu_percent: Vec<Option<u32>> = programs.iter().map(gpu_percent).collect();
        let played = |program: &Program| {
            let kind = on.fleet.devices[program.device].kind.as_str();
            let here = gpu_percent[program.device].is_some() || is_processor_here(kind);
            (options.paced || !here).then(|| durations(program, &world))
        };
        let pace: Vec<Option<Vec<f64>>> = programs.iter().map(played).collect();
        let members = layout.members().to_vec();
        let stretch = options.stretch.unwrap_or_else(|| stretch_of(&pace));
        Ok(Prepared { predicted, forecast, pace, gpu_percent, stretch, members, programs, plan, on })
    }

    /// The devices that take part as shares of the GPU here.
    fn shares(&self) -> Vec<Share<'_>> {
        let share = |index: &usize| {
            let percent = self.gpu_percent[*index]?;
            let (_, whole) = catalogue::share_of(&self.on.fleet.devices[*index].kind)?;
            Some(Share { name: &self.plan.devices[*index].name, percent, whole })
        };
        self.members.iter().filter_map(share).collect()
    }

    /// Processors compute in fp32 alone, whichever device they play.
    fn assert_computes(&self, precision: Precision) -> Result {
        let processor = self.members.iter().find(|index| self.gpu_percent[**index].is_none());
        let Some(processor) = processor.filter(|_| precision != Precision::Fp32) else { return Ok(()) };
        let name = &self.plan.devices[*processor].name;
        let what = format!("{name}: the lab's processors compute in fp32, the job in {}", precision.name());
        Err(CliError::said(what, "add --set train.precision=fp32, or give every device a share of a GPU"))
    }

    /// How it is known how fast each kind of share is.
    fn speeds(&self) -> Vec<String> {
        let costs = &self.on.costs;
        let shares = self.on.fleet.kinds().into_iter().filter(|kind| catalogue::share_of(kind).is_some());
        let speed = |kind: &str| match (costs.scaled(kind), costs.estimated(kind)) {
            (None, _) => format!("{kind}: as measured"),
            (Some((whole, rate)), false) => format!("{kind}: {rate:.2} of {whole} as measured"),
            (Some((whole, rate)), true) => format!("{kind}: {rate:.2} of {whole} as estimated"),
        };
        shares.map(speed).collect()
    }

    fn leader(&self) -> usize {
        self.members.first().copied().unwrap_or(0)
    }

    fn banner(&self, job: &Job, resumed: Option<u64>) -> String {
        let played = self.pace.iter().filter(|pace| pace.is_some()).count();
        let shares = self.shares().len();
        let real = self.members.len().saturating_sub(played + shares);
        let shares = if shares > 0 { format!("{shares} shares of the GPU here, ") } else { String::new() };
        let speeds = self.speeds();
        let speeds = speeds.iter().map(|speed| format!("\n  speed    {speed}")).collect::<String>();
        let slower =
            if self.stretch > 1.0 { format!(", {:.0} times slower", self.stretch) } else { String::new() };
        [
            format!("shoal {} · {} in the lab", env!("CARGO_PKG_VERSION"), job.name),
            format!(
                "  fleet    {} devices, {shares}{real} of them processors here, {played} played{slower}{speeds}",
                self.plan.devices.len()
            ),
            format!(
                "  plan     {}: {} a step predicted",
                self.plan.id(),
                time_text(self.predicted * self.stretch)
            ),
            format!(
                "  steps    {}; about {} to go",
                job.steps,
                duration_text((job.steps - resumed.unwrap_or(0)) as f64 * self.predicted * self.stretch)
            ),
            format!(
                "  run      {}: {}",
                job.run_folder.display(),
                resumed.map_or("new".to_owned(), |step| format!("resumes after step {step}"))
            ),
        ]
        .join("\n")
    }

    fn assignments(
        &self,
        options: &Options,
        job: &Job,
        folder: &Path,
        checkpoint: Option<u64>,
    ) -> Result<Vec<Assignment>> {
        let authority = if options.plain { None } else { Some(Authority::new()?) };
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let fabric = now.as_nanos() ^ (u128::from(std::process::id()) << 64);
        let real = self.pace.iter().filter(|pace| pace.is_none()).count().max(1);
        let available = machine::available_bytes();
        let (ways, board) = (Ways::new(&self.on.fleet, &self.members, self.stretch), folder.join("ways"));
        if !options.unshaped {
            ways.make_board(&board)?;
        }
        let mut all = Vec::new();
        for program in &self.programs {
            let rank = program.device;
            let identity = authority.as_ref().map(|authority| authority.issue(&name_of(rank))).transpose()?;
            let network = Network {
                listen: options
                    .namespace
                    .get(rank)
                    .map_or(Ipv4Addr::LOCALHOST.into(), |namespace| namespace.address),
                fabric,
                deadline_seconds: options.deadline.unwrap_or(DEADLINE_SECONDS),
                identity: identity.map(|identity| {
                    [identity.certificate_pem(), identity.key_pem(), identity.authority_pem()]
                        .map(str::to_owned)
                }),
                links: BTreeMap::new(),
                ways: Vec::new(),
                board: None,
            };
            let node = &self.on.fleet.nodes[self.on.fleet.devices[rank].node];
            all.push(Assignment {
                job: options.job.clone(),
                set: options.set.clone(),
                stop_at: options.stop_at,
                plan: self.plan.clone(),
                program: program.clone(),
                leads: rank == self.leader(),
                saves: !options.unsaved,
                checkpoint,
                gpu_percent: self.gpu_percent[rank],
                threads: match self.pace[rank] {
                    Some(_) => 1,
                    None => job.threads.unwrap_or((machine::cores() / real).max(1)),
                },
                host_bytes: (node.host_memory_bytes / node.devices.len().max(1) as u64).min(available),
                folder: folder.to_owned(),
                pace: self.pace[rank].iter().flatten().map(|seconds| seconds * self.stretch).collect(),
                network: match options.unshaped {
                    true => network,
                    false => self.shaped(network, rank, &ways, &board),
                },
                trace_from: options.record.as_ref().map(|_| checkpoint.unwrap_or(0) + WARM_UP_STEPS),
                predicted_seconds: self.predicted * self.stretch,
                dollars_per_hour: self.on.fleet.dollars_per_hour(),
            });
        }
        Ok(all)
    }

    /// The fleet's links, as one of its devices sends over them.
    fn shaped(&self, mut network: Network, rank: usize, ways: &Ways, board: &Path) -> Network {
        let fleet = &self.on.fleet;
        for other in (0..fleet.devices.len()).filter(|other| *other != rank) {
            let link = fleet.link(rank, other);
            let (rate, latency) = (link.bytes_per_second, link.seconds_latency);
            network.links.insert(other, (rate / self.stretch, latency * self.stretch));
        }
        let (own, shared) = ways.of(rank);
        network.ways = own;
        network.board = (!shared.is_empty()).then(|| (board.to_owned(), shared));
        network
    }

    fn collect_trace(&self, folder: &Path) -> Result<Trace> {
        let mut steps: Vec<Vec<Vec<Traced>>> = Vec::new();
        for rank in 0..self.plan.devices.len() {
            if !self.members.contains(&rank) {
                steps.iter_mut().for_each(|step| step.push(Vec::new()));
                continue;
            }
            let path = trace_file(folder, rank);
            let text = std::fs::read_to_string(&path).map_err(CliError::at(&path))?;
            let own: Vec<Vec<Traced>> =
                serde_json::from_str(&text).map_err(|error| CliError::at(&path)(error.into()))?;
            if steps.len() < own.len() {
                // Devices before this one that have no part.
                steps.resize(own.len(), vec![Vec::new(); rank]);
            }
            steps.iter_mut().zip(own).for_each(|(step, own)| step.push(own));
        }
        let played = self.on.fleet.devices.iter().zip(&self.pace).filter(|(_, pace)| pace.is_some());
        let played: BTreeSet<String> = played.map(|(device, _)| device.kind.clone()).collect();
        let played = played.into_iter().collect();
        Ok(Trace { format: FORMAT, plan: self.plan.id(), stretch: self.stretch, played, steps })
    }

    fn tell(&self, options: &Options, job: &Job, outcome: &Outcome) {
        let predicted = self.predicted * self.stretch;
        let off = outcome.measured.map(|measured| predicted / measured - 1.0);
        let name = |index: usize| &self.plan.devices[index].name;
        if options.json {
            let devices = self.members.iter().map(|index| {
                let counted = outcome.memory.get(name(*index));
                json!({"name": name(*index), "predicted_bytes": self.forecast[*index], "counted_bytes": counted})
            });
            println!(
                "{}",
                json!({
                    "run": job.run_folder, "plan_id": self.plan.id(), "steps": outcome.steps, "loss": outcome.loss,
                    "finished": outcome.finished, "stretch": self.stretch, "predicted_seconds": predicted,
                    "measured_seconds": outcome.measured, "prediction_off": off,
                    "devices": devices.collect::<Vec<_>>(), "share_speeds": self.speeds(),
                })
            );
            return;
        }
        let how = if outcome.finished { "finished" } else { "stopped after" };
        let loss = outcome.loss.map_or(String::new(), |loss| format!(", loss {loss:.4}"));
        println!("{how} {} steps{loss}", outcome.steps);
        if let (Some(measured), Some(off)) = (outcome.measured, off) {
            println!(
                "a step took {}, predicted {} ({:+.1} %)",
                time_text(measured),
                time_text(predicted),
                100.0 * off
            );
        }
        let over = self.members.iter().filter(|index| {
            outcome.memory.get(name(**index)).is_some_and(|counted| *counted > self.forecast[**index])
        });
        match over.count() {
            0 => println!("memory stayed within its forecast on every device"),
            count => println!("memory passed its forecast on {count} devices"),
        }
        if options.unsaved {
            return;
        }
        println!("export it with: shoal export {} DIR", job.run_folder.display());
    }
}

/// So much slower that instructions which take time last long enough to be played.
fn stretch_of(pace: &[Option<Vec<f64>>]) -> f64 {
    let lasting = pace.iter().flatten().flatten().filter(|seconds| **seconds > 0.0);
    let (count, sum) = lasting.fold((0.0, 0.0), |(count, sum), seconds| (count + 1.0, sum + seconds));
    if count == 0.0 { 1.0 } else { (PLAYED_SECONDS * count / sum).max(1.0) }
}
