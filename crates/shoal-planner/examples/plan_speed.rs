//! How long planning and simulating take, and how they grow with the fleet: `cargo xtask bench plan` runs it.

use std::time::Instant;

use shoal_fleet::{Costs, Fleet};
use shoal_model::{Chain, Precision, presets};
use shoal_plan::memory::forecast_in;
use shoal_plan::one_device::StepShape;
use shoal_plan::{Activations, DeviceRow, Layout, Order, Purpose, compile_paced, verify_all};
use shoal_planner::auto::{self, Request, Shape};
use shoal_planner::pipeline::{Pipeline, PipelineWanted, Replica, Stage, State, plan, table};
use shoal_planner::replan::{InForce, replan};
use shoal_sim::{FleetWorld, Settings, simulate};

const MICRO_BATCHES: usize = 64;
const STAGES: usize = 32;

fn main() {
    let mut words = std::env::args().skip(1);
    if words.next().is_some_and(|word| word == "anew") {
        return all_anew(words.next().and_then(|devices| devices.parse().ok()));
    }
    println!("a pipeline step of {STAGES} stages and {MICRO_BATCHES} micro-batches a replica, seconds:");
    println!("devices  instructions   compile    verify  forecast  simulate  step simulated");
    for replicas in [1, 4, 16, 32] {
        pipeline_step(replicas);
    }
    println!("the search for a pipeline, 2.5 B parameters:");
    println!("devices  kinds  samples   seconds  step simulated  replicas");
    for (devices, samples) in [(16, 128), (64, 512), (256, 2048), (1024, 8192)] {
        search(devices, samples, "[[node]]\nname = \"v\"\ncount = 1\ndevices = [{ kind = \"V100\" }]\n");
        search(devices, samples, MIXED);
    }
    println!("the best of all shapes, 1.5 B parameters, and each shape by itself:");
    println!("devices  kinds  samples   seconds  step simulated  {}", names().join("  "));
    for (devices, samples) in [(16, 128), (64, 512), (256, 2048), (1024, 8192)] {
        best(devices, samples);
    }
    all_anew(None);
}

/// As users have it, with state on two machines: the first plan, and the one after a loss.
fn all_anew(only: Option<usize>) {
    println!("planned anew after a machine is lost and another has slowed down, state on two machines:");
    println!("devices  kinds  samples   seconds  of cores  step simulated     pause");
    for (devices, samples) in [(4, 32), (8, 64), (16, 128), (32, 256), (64, 512), (256, 2048), (1024, 8192)] {
        if only.is_none_or(|only| only == devices) {
            anew(devices, samples);
        }
    }
}

/// Plans for mixed devices after one more machine is gone and the first takes half as long again.
fn anew(devices: usize, samples: usize) {
    let before = with_one_more(devices);
    let chain = Chain::new(&presets::gpt2(50257, 1600, 48, 25, 1024));
    let step =
        StepShape { global_batch: samples, sequence: 1024, precision: Precision::Fp16, ..StepShape::ADAM };
    let request = |fleet, costs| Request { survive: 1, ..Request::new(&chain, step, fleet, costs) };
    let costs = |fleet| Costs::new(&chain, fleet, None, step.precision, step.sequence).expect("known kinds");
    let before_costs = costs(&before);
    let paces = vec![100; before.devices.len()];
    let first = replan(&request(&before, &before_costs), &paces, None).expect("there is room");
    let mut after = before.clone();
    let gone = after.nodes.pop().expect("there are machines").devices;
    after.devices.truncate(gone.start);
    let alive: Vec<bool> = (0..before.devices.len()).map(|device| !gone.contains(&device)).collect();
    let in_force = InForce { plan: &first.plan, alive: &alive };
    let mut paces = vec![100; gone.start];
    paces[after.nodes[0].devices.clone()].fill(150);
    let after_costs = costs(&after);
    let request = request(&after, &after_costs);
    let spent = spent_seconds();
    let (next, seconds) = timed(|| replan(&request, &paces, Some(in_force)).expect("there is room for it"));
    println!(
        "{devices:>7} {:>6} {samples:>8} {seconds:>9.2} {:>9.2} {:>13.2} s {:>7.2} s",
        after.kinds().len() + 1,
        spent_seconds() - spent,
        next.step_seconds,
        next.moving.seconds
    );
}

/// Mixed machines with so many devices, and one machine more. Few devices are of one machine of each kind.
fn with_one_more(devices: usize) -> Fleet {
    let machines = devices / 4;
    let quarter = machines.div_ceil(4);
    let mut left = machines + 1;
    let kinds = MIXED.split("[[node]]").filter(|node| !node.trim().is_empty());
    let nodes = kinds.enumerate().map(|(place, node)| {
        // The last kind has all that are left.
        let count = if place == 2 { left } else { quarter.min(left) };
        left -= count;
        let own = if node.contains("count = 2\n") { 2 } else { 1 };
        let node = node.replacen(&format!("count = {own}\n"), &format!("count = {count}\n"), 1);
        match count {
            0 => String::new(),
            _ => format!("[[node]]\nhost_memory = \"244 GiB\"\nnetwork = \"10 Gbit/s\"{node}"),
        }
    });
    Fleet::parse(&nodes.collect::<String>(), "fleet").expect("the fleet is one")
}

/// Seconds that this process's threads have spent on cores: what others do there does not count.
fn spent_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    // User and system time, in hundredths.
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

fn names() -> Vec<String> {
    Shape::ALL.iter().map(|shape| format!("{:>8}", shape.name())).collect()
}

/// Plans for mixed devices as `shoal plan` does, and what each of its searches takes.
fn best(devices: usize, samples: usize) {
    let fleet = fleet(MIXED, devices / fleet(MIXED, 1).devices.len());
    let chain = Chain::new(&presets::gpt2(50257, 1600, 48, 25, 1024));
    let step =
        StepShape { global_batch: samples, sequence: 1024, precision: Precision::Fp16, ..StepShape::ADAM };
    let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).expect("the kinds are known");
    let request = Request::new(&chain, step, &fleet, &costs);
    let (found, seconds) = timed(|| auto::plan(&request).expect("there is room for it"));
    let alone = Shape::ALL.map(|shape| {
        let (_, seconds) = timed(|| auto::plan(&Request { shapes: &[shape], ..request }).is_ok());
        format!("{seconds:>8.2}")
    });
    println!(
        "{devices:>7} {:>6} {samples:>8} {seconds:>9.2} {:>13.2} s  {}",
        fleet.kinds().len(),
        found.best.simulated.seconds,
        alone.join("  ")
    );
}

/// Sixteen devices of three kinds.
const MIXED: &str = r#"
[[node]]
name = "a"
count = 1
devices = [{ kind = "A100", count = 4 }]
device_link = "300 GB/s"
[[node]]
name = "v"
count = 1
devices = [{ kind = "V100", count = 4 }]
[[node]]
name = "t"
count = 2
devices = [{ kind = "T4", count = 4 }]
"#;

/// Plans for as many copies of some nodes as make up so many devices.
fn search(devices: usize, samples: usize, nodes: &str) {
    let one = fleet(nodes, 1);
    let fleet = fleet(nodes, devices / one.devices.len());
    let chain = Chain::new(&presets::gpt2(50257, 1920, 54, 20, 1024));
    let step =
        StepShape { global_batch: samples, sequence: 1024, precision: Precision::Fp16, ..StepShape::ADAM };
    let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).expect("the kinds are known");
    let wanted = PipelineWanted::default();
    let (planned, seconds) =
        timed(|| plan(&chain, step, &fleet, &costs, &wanted).expect("there is room for it"));
    println!(
        "{devices:>7} {:>6} {samples:>8} {seconds:>9.2} {:>13.2} s {:>9}",
        fleet.kinds().len(),
        planned.seconds,
        planned.pipeline.replicas.len()
    );
}

fn fleet(nodes: &str, copies: usize) -> Fleet {
    let text = nodes.split("[[node]]").filter(|node| !node.trim().is_empty()).map(|node| {
        let count: usize = if node.contains("count = 2\n") { 2 } else { 1 };
        let node = node.replacen(&format!("count = {count}\n"), &format!("count = {}\n", count * copies), 1);
        format!("[[node]]\nhost_memory = \"244 GiB\"\nnetwork = \"10 Gbit/s\"{node}")
    });
    Fleet::parse(&text.collect::<String>(), "fleet").expect("the fleet is one")
}

fn pipeline_step(replicas: usize) {
    let chain = Chain::new(&presets::gpt2(50257, 1920, 62, 20, 1024));
    let devices = replicas * STAGES;
    let fleet = Fleet::parse(
        &format!(
            "[[node]]\nname = \"spot\"\ncount = {devices}\nhost_memory = \"64 GiB\"\nnetwork = \"10 Gbit/s\"\ndevices = [{{ kind = \"V100\" }}]\n"
        ),
        "fleet",
    )
    .expect("the fleet is one");
    let step = StepShape {
        global_batch: replicas * MICRO_BATCHES,
        sequence: 1024,
        precision: Precision::Fp16,
        ..StepShape::ADAM
    };
    let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).expect("V100 is known");
    let layers = chain.layers.len();
    let pipeline = Pipeline {
        replicas: (0..replicas)
            .map(|replica| Replica {
                samples: replica * MICRO_BATCHES..(replica + 1) * MICRO_BATCHES,
                micro_batch: 1,
                stages: (0..STAGES)
                    .map(|stage| Stage {
                        device: replica * STAGES + stage,
                        layers: layers * stage / STAGES..layers * (stage + 1) / STAGES,
                        activations: Activations::Recompute,
                        stash: None,
                    })
                    .collect(),
            })
            .collect(),
        order: Order::Varuna,
        state: State::Divided,
    };
    let rows = fleet.devices.iter().map(|device| DeviceRow {
        name: device.name.clone(),
        budget_bytes: device.memory_bytes,
        workspace_bytes: 0,
        stash: None,
        leeway: 0,
        puts_off: 0,
    });
    let plan = table(&chain, step, rows.collect(), &pipeline);
    let layout = Layout::new(&plan, &chain);
    let world = FleetWorld::new(&fleet, &costs, &layout);
    let (programs, compiling) =
        timed(|| compile_paced(&plan, &chain, Purpose::Train, &world).expect("it compiles"));
    let ((), verifying) =
        timed(|| verify_all(&programs, &plan, &chain, Purpose::Train).expect("it is a step"));
    let (_, forecasting) =
        timed(|| programs.iter().map(|program| forecast_in(program, &layout).total()).max());
    let (simulated, simulating) =
        timed(|| simulate(&programs, &layout, &world, Settings::default()).expect("it ends"));
    let instructions: usize = programs.iter().map(|program| program.instructions.len()).sum();
    println!(
        "{devices:>7} {instructions:>13} {compiling:>9.2} {verifying:>9.2} {forecasting:>9.2} {simulating:>9.2} {:>13.2} s",
        simulated.seconds
    );
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed().as_secs_f64())
}
