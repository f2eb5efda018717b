//! What is won where the best plan of all shapes is made better, by how much is tried: steps simulated by public figures.
//!
//!     cargo run --release -p shoal-planner --example improve

use std::time::Instant;

use shoal_fleet::{Costs, Fleet};
use shoal_model::{Chain, Precision, presets};
use shoal_plan::one_device::StepShape;
use shoal_planner::auto::{self, Request};
use shoal_planner::improve;

/// A node's devices, and how many such nodes; the network between them.
type Row = (&'static str, &'static [(&'static str, usize)], &'static str);

const FLEETS: [Row; 5] = [
    (
        "four quarters of an H200",
        &[("{ kind = \"H200\", share = 0.25, memory = \"33 GiB\" }", 4)],
        "10 Gbit/s",
    ),
    ("eight V100", &[("{ kind = \"V100-32\" }", 8)], "10 Gbit/s"),
    ("three V100, three A10G", &[("{ kind = \"V100-32\" }", 3), ("{ kind = \"A10G\" }", 3)], "25 Gbit/s"),
    ("two nodes of four A10G", &[("{ kind = \"A10G\", count = 4 }", 2)], "10 Gbit/s"),
    (
        "two RTX 4090, four RTX 3090",
        &[("{ kind = \"RTX 4090\" }", 2), ("{ kind = \"RTX 3090\", count = 2 }", 2)],
        "10 Gbit/s",
    ),
];

const MILLIONS: [usize; 4] = [2, 8, 16, 64];

fn main() {
    let chain = Chain::new(&presets::preset("gpt2-1.5b").expect("it is a preset"));
    let step = StepShape { global_batch: 64, sequence: 1024, precision: Precision::Bf16, ..StepShape::ADAM };
    println!(
        "GPT-2 of 1.5 B parameters, 64 sequences, steps in milliseconds, by millions of instructions tried"
    );
    print!("{:<30} {:>8}", "fleet", "found");
    MILLIONS.iter().for_each(|millions| print!(" {millions:>8}"));
    println!("  seconds");
    for (name, nodes, network) in FLEETS {
        let node = |(number, (devices, count)): (usize, &(&str, usize))| {
            format!(
                "[[node]]\nname = \"n{number}\"\ncount = {count}\nhost_memory = \"128 GiB\"\n\
                 network = \"{network}\"\ndevices = [{devices}]\n"
            )
        };
        let text: String = nodes.iter().enumerate().map(node).collect();
        let fleet = Fleet::parse(&text, "fleet").expect("it is one");
        let costs =
            Costs::new(&chain, &fleet, None, step.precision, step.sequence).expect("all kinds are known");
        let request = Request::new(&chain, step, &fleet, &costs);
        let found = auto::plan(&request).expect("there is room").best;
        print!("{name:<30} {:>8.1}", 1e3 * found.simulated.seconds);
        let mut taken = 0.0;
        for millions in MILLIONS {
            let began = Instant::now();
            let better = improve(found.clone(), &request, millions * 1_000_000);
            taken = began.elapsed().as_secs_f64();
            print!(" {:>8.1}", 1e3 * better.simulated.seconds);
        }
        println!("  {taken:.1}");
    }
}
