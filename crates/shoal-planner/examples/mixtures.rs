//! Where mixtures earn their place: two machines of unequal GPUs joined by 10 Gbit/s, and models whose state fits no single
//! GPU of them. The best plan of every pure shape stands beside the best pipeline of groups.
//!
//! The bound is what no plan is below: all devices computing all the time, nothing made again, nothing moved. `of it` is its
//! part of the best plan's step, the pure shapes among them: what no plan at all can be quicker by. A ratio of 1.00 says that
//! no mixture was found that is quicker than the best pure shape, which is then what `auto` takes.
//!
//! Pipelines are given every chance: the search is asked for several numbers of replicas, and the search for groups for
//! groups of one device. Words after the command keep only the rows that contain them all.

use std::env;

use shoal_fleet::{Costs, Fleet};
use shoal_model::{Chain, ModelConfig, Precision, presets};
use shoal_plan::one_device::StepShape;
use shoal_planner::auto::{self, Request, Shape};
use shoal_planner::mixed::{self, Mixed, PlayError};
use shoal_planner::pipeline::{self, PipelineWanted};

/// A machine's GPUs: their kind and number, and what joins them where that is not PCIe.
type Gpus = (&'static str, usize, Option<&'static str>);

const V100S: Gpus = ("V100", 4, Some("50 GB/s"));
const A10GS: Gpus = ("A10G", 4, None);

const FLEETS: [[Gpus; 2]; 9] = [
    [V100S, A10GS],
    [V100S, ("A10G", 8, None)],
    [V100S, ("T4", 8, None)],
    [A10GS, ("T4", 8, None)],
    // Smaller ones.
    [("V100", 2, Some("50 GB/s")), ("A10G", 2, None)],
    [A10GS, ("T4", 2, None)],
    [A10GS, ("T4", 4, None)],
    [("L4", 4, None), ("T4", 4, None)],
    [("RTX 4090", 2, None), ("RTX 3090", 4, None)],
];

/// Tokens of a sample, and samples of a step.
const STEPS: [(usize, usize); 5] = [(1024, 16), (1024, 32), (2048, 8), (2048, 16), (2048, 32)];

/// Numbers of replicas that pipelines are asked for, beside what the search chooses.
const REPLICAS: [Option<usize>; 4] = [None, Some(1), Some(2), Some(4)];

fn main() -> Result<(), PlayError> {
    let words: Vec<String> = env::args().skip(1).collect();
    let llama = presets::llama(32000, 3200, 26, 32, 32, 8640, 2048, 1e4, false);
    let models =
        [("qwen2-1.5b", preset("qwen2-1.5b")), ("gpt2-1.5b", preset("gpt2-1.5b")), ("llama-3b", llama)];
    println!("step in ms; the ratio is that of the best pure shape's to the best of all");
    println!(
        "fleet                   model       tokens  samples  pipeline  sharded    burst    mixed    bound  of it  ratio  groups"
    );
    for machines in FLEETS {
        let fleet = Fleet::parse(&machines.map(node).concat(), "fleet").expect("the fleet is one");
        for (model, config) in &models {
            for (sequence, global_batch) in STEPS {
                let label = format!(
                    "{:<23} {model:<11} {sequence:>6} {global_batch:>8}",
                    machines.map(|(kind, count, _)| format!("{count} {kind}")).join(" + ")
                );
                // Learned positions end where they end.
                let fits = config.positions >= sequence;
                if fits && words.iter().all(|word| label.contains(word.as_str())) {
                    let step =
                        StepShape { global_batch, sequence, precision: Precision::Fp16, ..StepShape::ADAM };
                    row(&label, &Chain::new(config), step, &fleet)?;
                }
            }
        }
    }
    Ok(())
}

fn preset(name: &str) -> ModelConfig {
    presets::preset(name).expect("it is a preset")
}

fn node((kind, count, link): Gpus) -> String {
    let link = link.map_or(String::new(), |link| format!("device_link = \"{link}\"\n"));
    format!(
        "[[node]]\nname = \"{kind}\"\nhost_memory = \"244 GiB\"\nnetwork = \"10 Gbit/s\"\n{link}\
         devices = [{{ kind = \"{kind}\", count = {count} }}]\n"
    )
}

/// Plans one step in every shape and prints what came of it.
fn row(label: &str, chain: &Chain, step: StepShape, fleet: &Fleet) -> Result<(), PlayError> {
    let costs = Costs::new(chain, fleet, None, step.precision, step.sequence).expect("the kinds are known");
    let replicas = REPLICAS.into_iter().filter_map(|replicas| {
        let wanted = PipelineWanted { replicas, ..PipelineWanted::default() };
        Some(pipeline::plan(chain, step, fleet, &costs, &wanted).ok()?.seconds)
    });
    let singles = mixed::plan_singles(chain, step, fleet, &costs, f64::INFINITY)?;
    let singles = singles.map(|planned| planned.simulated.seconds);
    let pipeline = replicas.chain(singles).fold(f64::INFINITY, f64::min);
    let of_shape = |shape: Shape| {
        let found = auto::plan(&Request { shapes: &[shape], ..Request::new(chain, step, fleet, &costs) });
        found.map_or(f64::INFINITY, |found| found.best.simulated.seconds)
    };
    let (sharded, burst) = (of_shape(Shape::Sharded), of_shape(Shape::Burst));
    let mixed = mixed::plan(chain, step, fleet, &costs, f64::INFINITY)?;
    let seconds = mixed.as_ref().map_or(f64::INFINITY, |planned| planned.simulated.seconds);
    let shown = |seconds: f64| match seconds.is_finite() {
        true => format!("{:.0}", 1e3 * seconds),
        false => "-".to_owned(),
    };
    let pure = pipeline.min(sharded).min(burst);
    let bound = bound(chain, step, fleet, &costs);
    println!(
        "{label} {:>9} {:>8} {:>8} {:>8} {:>8} {:>6.2} {:>6.2}  {}",
        shown(pipeline),
        shown(sharded),
        shown(burst),
        shown(seconds),
        shown(bound),
        bound / pure.min(seconds),
        pure / pure.min(seconds),
        mixed.map_or(String::new(), |planned| groups(&planned.mixed, fleet))
    );
    Ok(())
}

/// Seconds of all samples if every device computes whole samples as fast as it can.
fn bound(chain: &Chain, step: StepShape, fleet: &Fleet, costs: &Costs) -> f64 {
    let of_sample = |device: usize, samples: usize| -> f64 {
        let of_layer = |layer| costs.forward(layer, device, samples) + costs.backward(layer, device, samples);
        (0..chain.layers.len()).map(of_layer).sum::<f64>() / samples as f64
    };
    let rate = |device: usize| {
        let sizes = (1..=step.global_batch).map(|samples| of_sample(device, samples));
        1.0 / sizes.fold(f64::INFINITY, f64::min)
    };
    step.global_batch as f64 / (0..fleet.devices.len()).map(rate).sum::<f64>()
}

/// Each stage's devices and number of layers.
fn groups(mixed: &Mixed, fleet: &Fleet) -> String {
    let stages = mixed.stages.iter().map(|stage| {
        let kind = &fleet.devices[stage.devices[0]].kind;
        format!("{} {kind}: {}", stage.devices.len(), stage.layers.len())
    });
    stages.collect::<Vec<_>>().join(", ")
}
