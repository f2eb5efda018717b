//! What it is worth to compute ahead where something is late: steps of the best pipelines while every instruction and every
//! message takes longer by a random part of itself, or some messages stop on their way, by how many units a device may go ahead.
//!
//!     cargo run --release -p shoal-planner --example late

use shoal_fleet::{Costs, Fleet};
use shoal_model::{Chain, Precision, presets};
use shoal_plan::draw::Draw;
use shoal_plan::memory::forecasts;
use shoal_plan::one_device::StepShape;
use shoal_plan::{Layout, Op, Purpose, compile_paced};
use shoal_planner::auto::{self, Request, Shape};
use shoal_sim::flows::Resource;
use shoal_sim::{FleetWorld, Jitter, Settings, Work, World, simulate};

const FLEETS: [(&str, &str, usize, &str); 4] = [
    ("eight V100", "{ kind = \"V100-32\" }", 8, "10 Gbit/s"),
    ("eight V100, slow network", "{ kind = \"V100-32\" }", 8, "2 Gbit/s"),
    ("two nodes of four A10G", "{ kind = \"A10G\", count = 4 }", 2, "10 Gbit/s"),
    ("four L4", "{ kind = \"L4\" }", 4, "5 Gbit/s"),
];
const LEEWAY: [usize; 4] = [0, 1, 2, 4];
const SEEDS: u64 = 16;

/// By how much of itself everything takes longer, at the most.
const JITTER: [f64; 5] = [0.0, 0.2, 0.5, 1.0, 3.0];

/// How many of a hundred messages stop, and for how long.
const STOPPED_PERCENT: [usize; 3] = [1, 3, 10];
const STOPPED_SECONDS: f64 = 0.2;

/// Some messages stop on their way for a while, as those do whose packets are lost.
struct Stalls<'a> {
    world: &'a FleetWorld<'a>,
    seed: u64,
    percent: usize,
}

impl World for Stalls<'_> {
    fn resources(&self) -> &[Resource] {
        self.world.resources()
    }

    fn alone(&self, op: &Op, device: usize) -> Work {
        self.world.alone(op, device)
    }

    fn together(&self, op: &Op, device: usize) -> Work {
        let mut work = self.world.together(op, device);
        if let Op::Send { layer, samples, moved, .. } | Op::Receive { layer, samples, moved, .. } = *op {
            let which = (layer * 2 + moved as usize) * 4096 + samples.start;
            let mut draw = Draw::new(self.seed.wrapping_mul(0x9e37_79b9) ^ (which as u64) << 20);
            if draw.chance(self.percent) {
                work.seconds += STOPPED_SECONDS;
            }
        }
        work
    }
}

fn main() {
    let chain = Chain::new(&presets::preset("gpt2-1.5b").expect("it is a preset"));
    let step = StepShape { global_batch: 64, sequence: 1024, precision: Precision::Fp16, ..StepShape::ADAM };
    println!("GPT-2 of 1.5 B parameters, 64 sequences; milliseconds, means of {SEEDS}");
    print!("{:<18} {:>9}", "", "fullest");
    JITTER.iter().for_each(|most| print!(" {:>9}", format!("+{:.0} %", 100.0 * most)));
    STOPPED_PERCENT.iter().for_each(|percent| print!(" {:>9}", format!("{percent} % stop")));
    println!();
    for (name, devices, count, network) in FLEETS {
        let text = format!(
            "[[node]]\nname = \"n\"\ncount = {count}\nhost_memory = \"128 GiB\"\nnetwork = \"{network}\"\ndevices = [{devices}]\n"
        );
        let fleet = Fleet::parse(&text, "fleet").expect("it is one");
        let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).expect("known kinds");
        let request = Request { shapes: &[Shape::Pipeline], ..Request::new(&chain, step, &fleet, &costs) };
        let found = auto::plan(&request).expect("there is room").best;
        println!("{name}, {network}, {:?}", found.plan.order);
        for leeway in LEEWAY {
            let mut plan = found.plan.clone();
            plan.devices.iter_mut().for_each(|row| row.leeway = leeway);
            let layout = Layout::new(&plan, &chain);
            let world = FleetWorld::new(&fleet, &costs, &layout);
            let programs = compile_paced(&plan, &chain, Purpose::Train, &world).expect("it compiles");
            let memory = forecasts(&programs, &layout);
            let most = memory.iter().map(|memory| memory.total()).max().unwrap_or(0);
            let fullest = most as f64 / (1u64 << 30) as f64;
            print!("{:<18} {:>9}", format!("  ahead by {leeway}"), format!("{fullest:.1} GiB"));
            let show = |seconds: &dyn Fn(u64) -> f64| {
                print!(" {:>9.1}", 1e3 * (0..SEEDS).map(seconds).sum::<f64>() / SEEDS as f64);
            };
            for most in JITTER {
                let settings = |seed| Settings { jitter: Some(Jitter { seed, most }), ..Settings::default() };
                show(&|seed| simulate(&programs, &layout, &world, settings(seed)).expect("it ends").seconds);
            }
            for percent in STOPPED_PERCENT {
                show(&|seed| {
                    let world = Stalls { world: &world, seed, percent };
                    simulate(&programs, &layout, &world, Settings::default()).expect("it ends").seconds
                });
            }
            println!();
        }
    }
}
