//! A job on a fleet: its files read, its plan searched, its step described.

use std::path::{Path, PathBuf};

use serde_json::json;
use shoal_fleet::{Costs, Fleet, Node, Profile, catalogue};
use shoal_model::Chain;
use shoal_plan::memory::MemoryForecast;
use shoal_plan::{Layout, Plan, Purpose, compile_paced};
use shoal_planner::auto::{self, AutoError, Found, Request, Shape};
use shoal_planner::breakdown::{self, Bottleneck, Breakdown, Limit, Part};
use shoal_sim::{FleetWorld, Simulated};

use crate::assemble::step_shape;
use crate::error::{CliError, Result};
use crate::job::{Job, bytes_text};
use crate::machine;
use crate::show::{percent, short};
use crate::timeline::time_text;

#[derive(clap::Args)]
pub struct FleetOptions {
    /// The fleet: its machines, devices, links and prices (docs/fleet.md)
    #[arg(long, value_name = "FILE")]
    pub fleet: Option<PathBuf>,
    /// What layers were measured to take, as `shoal profile` wrote it; other kinds of devices are estimated
    #[arg(long, value_name = "FILE", requires = "fleet")]
    pub profile: Option<PathBuf>,
    /// Search one shape of plan only
    #[arg(long, value_name = "SHAPE", requires = "fleet")]
    pub shape: Option<String>,
    /// Machines that may be lost at once without taking state with them (the job's plan.survive); 0 keeps no mirrors
    #[arg(long, value_name = "MACHINES", requires = "fleet")]
    pub survive: Option<usize>,
    /// How much is tried to make the best plan better: about so many seconds, and 0 leaves it as its search has it
    #[arg(long, value_name = "SECONDS", requires = "fleet", default_value_t = EFFORT_DEFAULT)]
    pub effort: f64,
    /// The fleet as `shoal lab` has it on one machine: all shares of a GPU are parts of the one there, all `CPU`s of one processor
    #[arg(long, requires = "fleet")]
    pub lab: bool,
}

pub const EFFORT_DEFAULT: f64 = 2.0;

/// Instructions that are played through in a second of effort. Counted and not timed, so that a plan does not depend on what
/// else a machine does.
const INSTRUCTIONS_PER_SECOND: f64 = 4e6;

/// Machines that may be lost at once, where neither job nor command says how many.
pub const SURVIVE_DEFAULT: usize = 1;

/// Losses that state is to survive by its mirrors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survive {
    /// Of so many machines at once; refused where that cannot be had.
    Exactly(usize),
    /// Of as many as there are machines and memory for.
    UpTo(usize),
}

/// Whether the lab has such devices; it plays the others.
pub fn is_real_in_the_lab(kind: &str) -> bool {
    is_processor_here(kind) || catalogue::share_of(kind).is_some()
}

/// A processor like this one, as a profile names it, or any.
pub fn is_processor_here(kind: &str) -> bool {
    kind == catalogue::CPU || kind == machine::processor()
}

/// A fleet and what layers cost on it.
pub struct OnFleet {
    pub fleet: Fleet,
    pub costs: Costs,
}

impl OnFleet {
    /// What all of it costs for so long, whoever computes.
    pub fn dollars(&self, seconds: f64) -> f64 {
        self.fleet.dollars_per_hour() * seconds / 3600.0
    }
}

impl OnFleet {
    /// Refuses a table for another number of devices.
    pub fn assert_made_for(&self, plan: &Plan) -> Result {
        let (planned, there) = (plan.devices.len(), self.fleet.devices.len());
        if planned == there {
            return Ok(());
        }
        let what = format!("the table is for {planned} devices, the fleet has {there}");
        Err(CliError::said(what, "name the fleet that the table was made for"))
    }
}

impl FleetOptions {
    pub fn read(&self, job: &Job, chain: &Chain) -> Result<OnFleet> {
        let Some(file) = &self.fleet else {
            return Err(CliError::said("no fleet is named", "name one with --fleet FILE: docs/fleet.md"));
        };
        let mut fleet = Fleet::read(file)?;
        if let Some(profile) = &self.profile {
            fleet.use_measured_links(&Profile::read(profile)?);
        }
        let costs = self.costs(job, chain, &fleet)?;
        Ok(OnFleet { fleet, costs })
    }

    /// What layers cost on a fleet.
    pub fn costs(&self, job: &Job, chain: &Chain, fleet: &Fleet) -> Result<Costs> {
        let profile = self.profile.as_deref().map(Profile::read).transpose()?;
        let costs = Costs::new(chain, fleet, profile.as_ref(), job.precision, job.sequence)?;
        Ok(if self.lab { costs.in_a_box(fleet, |kind| !is_real_in_the_lab(kind)) } else { costs })
    }

    /// What the command says, or else the job, or else nobody.
    pub fn survive(&self, job: &Job) -> Survive {
        let asked = self.survive.or(job.survive);
        asked.map_or(Survive::UpTo(SURVIVE_DEFAULT), Survive::Exactly)
    }

    /// The best plan, made better.
    pub fn search(&self, job: &Job, chain: &Chain, on: &OnFleet) -> Result<Found> {
        let shapes = shapes(self.shape.as_deref())?;
        of_shapes(job, chain, on, &shapes, self.survive(job), self.improve_instructions())
            .map_err(|error| CliError::said(error.to_string(), error.hint()))
    }

    pub fn improve_instructions(&self) -> usize {
        (self.effort.max(0.0) * INSTRUCTIONS_PER_SECOND) as usize
    }

    /// The best plan as searches have it: what a fleet that lives is planned with, where every moment counts.
    pub fn search_surviving(
        &self,
        job: &Job,
        chain: &Chain,
        on: &OnFleet,
        survive: Survive,
    ) -> Result<Found> {
        of_shapes(job, chain, on, &shapes(self.shape.as_deref())?, survive, 0)
            .map_err(|error| CliError::said(error.to_string(), error.hint()))
    }
}

/// The shapes to search, where one may be named.
pub fn shapes(name: Option<&str>) -> Result<Vec<Shape>> {
    let Some(name) = name.filter(|name| *name != "auto") else { return Ok(Shape::ALL.to_vec()) };
    let known = Shape::ALL.into_iter().chain(Shape::USUAL);
    let names: Vec<&str> = known.map(Shape::name).collect();
    Shape::named(name).map(|shape| vec![shape]).ok_or_else(|| {
        let what = format!("--shape: there is no shape \"{name}\"");
        CliError::said(what, format!("the shapes are auto, {}", names.join(", ")))
    })
}

/// The best plan of some shapes.
pub fn of_shapes(
    job: &Job,
    chain: &Chain,
    on: &OnFleet,
    shapes: &[Shape],
    survive: Survive,
    improve_instructions: usize,
) -> std::result::Result<Found, AutoError> {
    let request = Request {
        shapes,
        improve_instructions,
        ..Request::new(chain, step_shape(job), &on.fleet, &on.costs)
    };
    match survive {
        Survive::Exactly(survive) => auto::plan(&Request { survive, ..request }),
        Survive::UpTo(survive) => auto::plan_surviving(&Request { survive, ..request }),
    }
}

/// Where the time of a plan's step goes, by device.
pub fn breakdown(plan: &Plan, chain: &Chain, on: &OnFleet, simulated: &Simulated) -> Result<Vec<Breakdown>> {
    let layout = Layout::new(plan, chain);
    let world = FleetWorld::new(&on.fleet, &on.costs, &layout);
    let programs = compile_paced(plan, chain, Purpose::Train, &world)?;
    Ok(breakdown::of(&programs, simulated, &layout)?)
}

/// What holds a step up, as a phrase.
pub fn bottleneck_text(bottleneck: &Bottleneck, plan: &Plan) -> String {
    let device = &plan.devices[bottleneck.device].name;
    let share = percent(bottleneck.share);
    match bottleneck.what {
        Limit::Computing => format!("{device} computes {share} of the step"),
        Limit::Network => format!("{device}, the busiest, waits {share} of the step for the network"),
        Limit::Copies => format!("{device}, the busiest, waits {share} of the step for its host or disk"),
        Limit::Bubble => format!("{device}, the busiest, waits {share} of the step for others' work"),
    }
}

/// The device whose memory is fullest: its place, and how full.
pub fn tightest(plan: &Plan, memory: &[MemoryForecast]) -> Option<(usize, f64)> {
    let fullness = |(place, memory): (usize, &MemoryForecast)| {
        (place, memory.total() as f64 / plan.devices[place].budget_bytes.max(1) as f64)
    };
    memory.iter().enumerate().map(fullness).max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))
}

/// A step as people read it.
pub struct Described<'a> {
    pub job: &'a Job,
    pub on: &'a OnFleet,
    pub plan: &'a Plan,
    pub simulated: &'a Simulated,
    pub memory: &'a [MemoryForecast],
    /// By device.
    pub breakdown: &'a [Breakdown],
}

impl Described<'_> {
    fn dollars_per_step(&self) -> f64 {
        self.on.dollars(self.simulated.seconds)
    }

    /// Kinds of devices whose times nobody measured.
    fn estimated(&self) -> Vec<&str> {
        self.on.fleet.kinds().into_iter().filter(|kind| self.on.costs.estimated(kind)).collect()
    }

    /// Of each node, what its devices keep in its host's memory and on its disk.
    fn nodes(&self) -> impl Iterator<Item = (&Node, u64, u64)> {
        self.on.fleet.nodes.iter().map(|node| {
            let here = &self.memory[node.devices.clone()];
            (node, here.iter().map(|memory| memory.host).sum(), here.iter().map(|memory| memory.disk).sum())
        })
    }

    pub fn json(&self) -> serde_json::Value {
        let devices = self.plan.devices.iter().zip(self.breakdown).zip(self.memory);
        let rows = devices.map(|((device, time), memory)| {
            json!({
                "name": device.name, "seconds": time, "memory_bytes": memory.total(),
                "budget_bytes": device.budget_bytes, "host_bytes": memory.host, "disk_bytes": memory.disk,
            })
        });
        let nodes = self.nodes().map(|(node, host, disk)| {
            json!({
                "name": node.name, "host_bytes": host, "host_memory_bytes": node.host_memory_bytes,
                "disk_bytes": disk, "disk_room_bytes": node.disk.map_or(0, |disk| disk.bytes),
            })
        });
        json!({
            "plan_id": self.plan.id(),
            "step_seconds": self.simulated.seconds,
            "dollars_per_step": self.dollars_per_step(),
            "estimated_kinds": self.estimated(),
            "bottleneck": breakdown::bottleneck(self.breakdown),
            "devices": rows.collect::<Vec<_>>(),
            "nodes": nodes.collect::<Vec<_>>(),
        })
    }

    pub fn print(&self) {
        let (plan, seconds) = (self.plan, self.simulated.seconds);
        let rows = (plan.global_batch * plan.sequence) as f64 / seconds;
        let what = if plan.sequence == 1 { "images" } else { "rows" };
        println!(
            "plan {} for {} on {} devices: {} a step, {} {what} a second, {}",
            plan.id(),
            self.job.name,
            plan.devices.len(),
            time_text(seconds),
            short(rows),
            dollars_text(self.dollars_per_step())
        );
        let estimated = self.estimated();
        if !estimated.is_empty() {
            println!("estimated from public figures, not measured: {}", estimated.join(", "));
        }
        if let Some(bottleneck) = breakdown::bottleneck(self.breakdown) {
            println!("bottleneck: {}", bottleneck_text(&bottleneck, plan));
        }
        self.print_devices();
    }

    fn print_devices(&self) {
        let plan = self.plan;
        let width = plan.devices.iter().map(|device| device.name.len()).max().unwrap_or(0).max(11);
        let cells = |shares: &Breakdown, of: f64| -> String {
            let cell =
                |(name, part): &Part| format!(" {:>w$}", percent(part(shares) / of), w = name.len().max(7));
            Breakdown::PARTS.iter().map(cell).collect()
        };
        let names = Breakdown::PARTS.iter().map(|(name, _)| format!(" {name:>7}"));
        println!("{:<width$}{}  memory", "device", names.collect::<String>());
        let line = |place: usize| {
            let (time, memory) = (&self.breakdown[place], &self.memory[place]);
            format!(
                "{}  {} of {}",
                cells(time, self.simulated.seconds),
                bytes_text(memory.total()),
                bytes_text(plan.devices[place].budget_bytes),
            )
        };
        let lines: Vec<String> = (0..plan.devices.len()).map(line).collect();
        each_once(&lines, |place, same| {
            let more = if same > 1 { format!("  (and {} more)", same - 1) } else { String::new() };
            println!("{:<width$}{}{more}", plan.devices[place].name, lines[place]);
        });
        if self.breakdown.len() > 1 {
            let sum = self.breakdown.iter().fold(Breakdown::default(), |sum, one| sum.plus(one));
            let all = self.simulated.seconds * self.breakdown.len() as f64;
            println!("{:<width$}{}", "all of them", cells(&sum, all));
        }
        let hosts: Vec<String> = self
            .nodes()
            .map(|(node, host, disk)| {
                let room = node.disk.map_or(0, |disk| disk.bytes);
                let disk = match disk {
                    0 => String::new(),
                    _ => format!(", {} of {} on its disk", bytes_text(disk), bytes_text(room)),
                };
                format!("{} of {}{disk}", bytes_text(host), bytes_text(node.host_memory_bytes))
            })
            .collect();
        each_once(&hosts, |place, same| {
            let more = if same > 1 { format!("  (and {} more)", same - 1) } else { String::new() };
            println!("host memory of {}: {}{more}", self.on.fleet.nodes[place].name, hosts[place]);
        });
    }
}

/// What a step costs, and a thousand.
pub fn dollars_text(dollars_per_step: f64) -> String {
    format!("${dollars_per_step:.5} a step, ${:.2} a thousand", 1000.0 * dollars_per_step)
}

/// Lines that read alike and follow each other are shown once: the first one's place, and how many they are.
fn each_once(lines: &[String], mut show: impl FnMut(usize, usize)) {
    let mut place = 0;
    while place < lines.len() {
        let same = lines[place..].iter().take_while(|line| **line == lines[place]).count();
        show(place, same);
        place += same;
    }
}

/// The layers, with who computes how much of each; rows that read alike are shown once.
pub fn print_layers(plan: &Plan) {
    let width = plan.layers.iter().map(|row| row.layer.len()).max().unwrap_or(0) + 6;
    println!("{:<width$} computed by", "layer");
    let describe = |index: usize| {
        let compute = &plan.layers[index].compute;
        let shares: Vec<String> = compute
            .iter()
            .take(4)
            .map(|compute| {
                let samples: usize = compute.micro_batches.iter().map(|samples| samples.count()).sum();
                let batches = compute.micro_batches.len();
                let name = &plan.devices[compute.device].name;
                format!("{name}: {samples} samples in {batches} ({:?})", compute.activations)
            })
            .collect();
        let more = compute.len().saturating_sub(shares.len());
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        shares.join(", ") + &more
    };
    let lines: Vec<String> = (0..plan.layers.len()).map(describe).collect();
    each_once(&lines, |place, same| {
        let name = &plan.layers[place].layer;
        let shown = if same > 1 { format!("{name} (x{same})") } else { name.clone() };
        println!("{shown:<width$} {}", lines[place]);
    });
}

/// A table that was written for this model.
pub fn read_table(path: &Path, chain: &Chain) -> Result<Plan> {
    let text = std::fs::read_to_string(path).map_err(CliError::at(path))?;
    let refused = |what: String| {
        let hint = "write it with `shoal plan JOB.toml --fleet FILE --table FILE` for the same job";
        CliError::said(format!("{}: {what}", path.display()), hint)
    };
    let plan: Plan = serde_json::from_str(&text).map_err(|error| refused(error.to_string()))?;
    plan.check(chain).map_err(|error| refused(error.to_string()))?;
    Ok(plan)
}
