//! How long the sharded search takes, and how it grows with the fleet and the batch.

use std::time::Instant;

use shoal_fleet::{Costs, Fleet};
use shoal_model::{Chain, Precision, presets};
use shoal_plan::StepShape;
use shoal_planner::sharded::{Request, decide, plan};

fn main() {
    println!("a Llama of 7 B parameters, 512 tokens, on mixed devices; seconds:");
    println!("devices  batch    decide      plan  step predicted  computing");
    for (scale, batch) in [(1, 64), (1, 1024), (4, 1024), (4, 8192), (16, 8192), (63, 8192)] {
        sharded_step(scale, batch);
    }
}

/// Sixteen devices of four kinds, so many times.
fn sharded_step(scale: usize, global_batch: usize) {
    let node = |name: &str, count: usize, devices: &str, network: &str| {
        format!(
            "[[node]]\nname = \"{name}\"\ncount = {}\ndevices = [{devices}]\nhost_memory = \"256 GiB\"\nnetwork = \"{network}\"\n",
            count * scale
        )
    };
    let text = [
        node("a", 1, r#"{ kind = "A100", count = 4 }"#, "100 Gbit/s"),
        node("b", 3, r#"{ kind = "L4", count = 2 }, { kind = "T4" }"#, "100 Gbit/s"),
        node("c", 3, r#"{ kind = "P40" }"#, "50 Gbit/s"),
    ];
    let fleet = Fleet::parse(&text.concat(), "fleet").expect("the fleet is one");
    let chain = Chain::new(&presets::preset("llama-7b").expect("there is such a preset"));
    let step = StepShape { global_batch, sequence: 512, precision: Precision::Fp16, ..StepShape::ADAM };
    let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).expect("the kinds are known");
    let request = Request::new(&chain, step, &fleet, &costs);
    let start = Instant::now();
    let decision = decide(&request).expect("it fits");
    let deciding = start.elapsed().as_secs_f64();
    let start = Instant::now();
    plan(&request).expect("it fits");
    println!(
        "{:7}  {global_batch:5}  {deciding:8.3}  {:8.3}  {:14.3}  {:9}",
        fleet.devices.len(),
        start.elapsed().as_secs_f64(),
        decision.seconds,
        decision.devices.iter().filter(|share| share.samples > 0).count(),
    );
}
