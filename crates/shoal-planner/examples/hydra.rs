//! Twelve models of 1.5 billion parameters on devices that cannot hold one.

use std::error::Error;

use shoal_fleet::{Costs, Fleet};
use shoal_model::{Chain, Precision, presets};
use shoal_plan::one_device::StepShape;
use shoal_planner::pipeline::{self, PipelineWanted};
use shoal_planner::spilled::together;

const MODELS: usize = 12;
const STEPS: usize = 40;

fn main() -> Result<(), Box<dyn Error>> {
    let chain = Chain::new(&presets::preset("gpt2-1.5b").ok_or("there is no such preset")?);
    let step = StepShape { global_batch: 8, sequence: 1024, precision: Precision::Fp16, ..StepShape::ADAM };
    println!(
        "{MODELS} GPT-2 of 1.5 B parameters, 8 x 1024 tokens, {STEPS} steps each; V100s of 16 GiB in one host, estimated; seconds until all are done:"
    );
    println!("devices  together     bound  over it  one model a device  pipelines over all devices");
    for devices in [1, 2, 4, 8] {
        let text = format!(
            "[[node]]\nname = \"host\"\nhost_memory = \"512 GiB\"\nhost_bandwidth = \"300 GB/s\"\nhost_link = \"12 GB/s\"\nnetwork = \"10 Gbit/s\"\ndevices = [{{ kind = \"V100\", count = {devices}, memory = \"16 GiB\" }}]\n"
        );
        let fleet = Fleet::parse(&text, "fleet")?;
        let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence)?;
        let all = together(&chain, step, &fleet, &costs, MODELS, STEPS)?;
        // One model after another, each as the best pipeline over all devices.
        let pipelines = match pipeline::plan(&chain, step, &fleet, &costs, &PipelineWanted::default()) {
            Ok(planned) => format!("{:.1}", (MODELS * STEPS) as f64 * planned.seconds),
            Err(error) => format!("none: {error}"),
        };
        println!(
            "{devices:7} {:9.1} {:9.1} {:6.1} %  {:18.1}  {pipelines:>26}",
            all.seconds,
            all.bound_seconds,
            100.0 * (all.seconds / all.bound_seconds - 1.0),
            all.one_after_another_seconds
        );
    }
    Ok(())
}
