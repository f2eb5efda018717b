//! `shoal plan`: the table, what it takes, and the program, as text or as files.

mod compare;
mod more;

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::json;
use shoal_model::Chain;
use shoal_plan::{Layout, Plan, Planned, Purpose, compile_paced};
use shoal_planner::auto::Found;
use shoal_sim::FleetWorld;

use crate::assemble::{self, LocalDevice};
use crate::error::{CliError, Result};
use crate::fleet_plan::{Described, FleetOptions, OnFleet, Survive, breakdown, print_layers};
use crate::job::{Job, bytes_text};
use crate::show::{elsewhere, grouped, percent, short};
use crate::timeline::time_text;

#[derive(clap::Args)]
pub struct Options {
    /// The job file
    job: PathBuf,
    /// Change a key of the job: --set plan.micro_batch=2
    #[arg(long = "set", value_name = "KEY=VALUE")]
    set: Vec<String>,
    #[command(flatten)]
    on: FleetOptions,
    /// Write the table to this file
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Write the program of one training step to this file; on a fleet a list, one a device
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Set all shapes of plan side by side: time, cost, memory, bottleneck, or why there is none
    #[arg(long, requires = "fleet", conflicts_with = "shape")]
    compare: bool,
    /// Print table and forecast as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(options: Options) -> Result {
    let job = Job::read(&options.job, &options.set)?;
    let chain = job.chain();
    if options.on.fleet.is_some() {
        return on_fleet(&options, &job, &chain);
    }
    let device = LocalDevice::choose(job.device, job.memory_bytes, job.threads)?;
    let planned = assemble::plan(&job, &chain, &device)?;
    if let Some(path) = &options.table {
        write_json(path, &planned.plan)?;
    }
    if let Some(path) = &options.program {
        write_json(path, &planned.program)?;
    }
    if options.json {
        println!("{}", summary_json(&planned, &device));
    } else {
        print_table(&job, &chain, &device, &planned);
    }
    Ok(())
}

/// The best plan for a fleet, and why.
fn on_fleet(options: &Options, job: &Job, chain: &Chain) -> Result {
    let on = options.on.read(job, chain)?;
    if options.compare {
        let shapes =
            compare::shapes(job, chain, &on, options.on.survive(job), options.on.improve_instructions());
        let best = compare::best(&shapes)?;
        write_files(options, chain, &on, &best.candidate.plan)?;
        match options.json {
            true => println!("{}", compare::json(&shapes, best, &on)),
            false => compare::print(job, &shapes, best, &on),
        }
        return Ok(());
    }
    let Found { best, tried, improved_from_seconds, survives } = options.on.search(job, chain, &on)?;
    write_files(options, chain, &on, &best.plan)?;
    let breakdown = breakdown(&best.plan, chain, &on, &best.simulated)?;
    let described = Described {
        job,
        on: &on,
        plan: &best.plan,
        simulated: &best.simulated,
        memory: &best.memory,
        breakdown: &breakdown,
    };
    // In the lab all there is of a GPU or a processor is divided.
    let more = match options.on.lab {
        true => None,
        false => more::of_each_kind(&options.on, job, chain, &on, &best),
    };
    // Shapes come with the fastest first, and that is the best.
    let runner_up = tried.get(1).and_then(|second| Some((second.shape, second.seconds?)));
    let slower = |seconds: f64| seconds / best.simulated.seconds - 1.0;
    if options.json {
        let mut summary = described.json();
        summary["shape"] = json!(best.shape);
        summary["tried"] = json!(tried);
        summary["improved_from_seconds"] = json!(improved_from_seconds);
        summary["survives"] = json!(survives);
        summary["runner_up"] =
            json!(runner_up.map(|(shape, seconds)| json!({ "shape": shape, "slower": slower(seconds) })));
        summary["one_more"] = json!(more);
        println!("{summary}");
        return Ok(());
    }
    described.print();
    println!();
    print_layers(&best.plan);
    println!("\nshape: {}", best.shape.name());
    match runner_up {
        Some((shape, seconds)) => {
            println!("runner-up: {}, {} slower", shape.name(), percent(slower(seconds)));
        }
        None => println!("runner-up: none; no other shape has a plan"),
    }
    for tried in &tried {
        match (tried.seconds, &tried.refused) {
            (Some(seconds), _) => println!("  {:<10} {} a step", tried.shape.name(), time_text(seconds)),
            (None, refused) => {
                println!(
                    "  {:<10} no plan: {}",
                    tried.shape.name(),
                    refused.as_deref().unwrap_or("none fits")
                );
            }
        }
    }
    if let Some(before) = improved_from_seconds {
        let now = best.simulated.seconds;
        println!("improved: {} a step before, {} less now", time_text(before), percent(1.0 - now / before));
    }
    let put_off = best.plan.devices.iter().map(|row| row.puts_off).max().unwrap_or(0);
    if put_off > 0 {
        println!(
            "waits: filled with gradients of weights, which of up to {put_off} units are put off for it"
        );
    }
    let leeway = best.plan.devices.iter().map(|row| row.leeway).max().unwrap_or(0);
    if leeway > 0 {
        println!("lateness: devices that wait for a message go on with up to {leeway} later units meanwhile");
    }
    println!("{}", survival_text(survives, options.on.survive(job), on.fleet.nodes.len()));
    if !options.on.lab {
        more::print(&more, &on);
    }
    Ok(())
}

/// What may be lost at once, and why not more.
fn survival_text(survives: usize, asked: Survive, machines: usize) -> String {
    let lost = "goes back to the last checkpoint";
    match (survives, asked) {
        (0, Survive::Exactly(_)) => {
            format!("losses: no mirrors are asked for; if a machine is lost, the run {lost}")
        }
        (0, _) if machines < 2 => {
            format!("losses: one machine has nobody to mirror its state; if it is lost, the run {lost}")
        }
        (0, _) => {
            format!("losses: there is no room for mirrors on other machines; if one is lost, the run {lost}")
        }
        (1, _) => "losses: one machine at once; all state is on two".to_owned(),
        (count, _) => format!("losses: {count} machines at once; all state is on {}", count + 1),
    }
}

/// The table and the programs, where files are named for them.
fn write_files(options: &Options, chain: &Chain, on: &OnFleet, plan: &Plan) -> Result {
    if let Some(path) = &options.table {
        write_json(path, plan)?;
    }
    if let Some(path) = &options.program {
        let layout = Layout::new(plan, chain);
        let world = FleetWorld::new(&on.fleet, &on.costs, &layout);
        write_json(path, &compile_paced(plan, chain, Purpose::Train, &world)?)?;
    }
    Ok(())
}

fn write_json(path: &Path, value: &impl Serialize) -> Result {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| CliError::Said { sentence: format!("{}: {error}", path.display()), hint: None })?;
    std::fs::write(path, text + "\n").map_err(CliError::at(path))
}

fn summary_json(planned: &Planned, device: &LocalDevice) -> serde_json::Value {
    let memory = &planned.memory;
    json!({
        "plan_id": planned.plan.id(),
        "plan": planned.plan,
        "instructions": planned.program.instructions.len(),
        "memory": {
            "total_bytes": memory.total(), "workspace_bytes": memory.workspace,
            "parameters_bytes": memory.parameters, "copies_bytes": memory.copies,
            "gradients_bytes": memory.gradients,
            "optimizer_bytes": memory.optimizer, "constants_bytes": memory.constants,
            "values_bytes": memory.values, "process_bytes": device.process_bytes(),
            "highest_at": planned.program.instructions[memory.highest_at].to_string(),
        },
    })
}

fn print_table(job: &Job, chain: &Chain, device: &LocalDevice, planned: &Planned) {
    let plan = &planned.plan;
    let sample = match chain.image {
        None => format!("{} tokens", plan.sequence),
        // One row: the image as it is.
        Some(image) if plan.sequence == 1 => format!("{} x {} pixels", image.size, image.size),
        Some(_) => format!("{} rows", plan.sequence),
    };
    println!(
        "plan {} for {} in {}: {} samples of {sample} a step",
        plan.id(),
        job.name,
        plan.precision.name(),
        plan.global_batch,
    );
    // Room for the name, and for ` (x12)` after it.
    let width = plan.layers.iter().map(|row| row.layer.len()).max().unwrap_or(0) + 5;
    println!(
        "{:<width$} {:>14} {:>13} {:>24}  activations",
        "layer", "parameters", "forward flops", "micro-batches"
    );
    // Rows that read alike are shown once.
    let describe = |index: usize| {
        let row = &plan.layers[index];
        let compute = &row.compute[0];
        let layer = &chain.layers[index];
        let parameters: usize = layer.tensors.iter().map(|(_, t)| chain.tensors[*t].elements()).sum();
        let batches = &compute.micro_batches;
        let sizes =
            format!("{} of {} on {}", batches.len(), batches[0].count(), plan.devices[compute.device].name);
        let flops = layer.kind.forward_flops(plan.sequence) * plan.global_batch as u64;
        format!(
            "{:>14} {:>13} {sizes:>24}  {:?}",
            grouped(parameters as u64),
            short(flops as f64),
            compute.activations
        )
    };
    let mut index = 0;
    while index < plan.layers.len() {
        let text = describe(index);
        let same = (index..plan.layers.len()).take_while(|other| describe(*other) == text).count();
        let name = &plan.layers[index].layer;
        let shown = if same > 1 { format!("{name} (x{same})") } else { name.clone() };
        println!("{shown:<width$} {text}");
        index += same;
    }
    let memory = &planned.memory;
    println!(
        "\nmemory on {}: {} of {}",
        plan.devices[0].name,
        bytes_text(memory.total()),
        bytes_text(plan.devices[0].budget_bytes)
    );
    for (name, bytes) in [
        ("parameters", memory.parameters),
        ("copies", memory.copies),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.values),
        ("workspace", memory.workspace + memory.constants),
    ] {
        if bytes > 0 {
            println!("  {name:<12} {:>10}", bytes_text(bytes));
        }
    }
    println!("  highest at   {}{}", planned.program.instructions[memory.highest_at], elsewhere(memory));
    println!("  and about {} for the process itself", bytes_text(device.process_bytes()));
    println!("\nprogram: {} instructions", planned.program.instructions.len());
}
