//! Where mixtures earn their place: on two machines of unequal GPUs joined by 10 Gbit/s, models that fit no single GPU,
//! the best plan of every pure shape beside the best pipeline of groups.

use std::time::Instant;

use shoal_fleet::{Costs, Fleet};
use shoal_model::{Chain, ModelConfig, Precision, presets};
use shoal_plan::one_device::StepShape;
use shoal_planner::auto::{self, Shape};
use shoal_planner::mixed;
use shoal_planner::pipeline::{self, PipelineWanted};

fn node(name: &str, devices: &str, link: &str) -> String {
    let link = if link.is_empty() { String::new() } else { format!("device_link = \"{link}\"\n") };
    format!(
        "[[node]]\nname = \"{name}\"\nhost_memory = \"244 GiB\"\nnetwork = \"10 Gbit/s\"\n{link}devices = [{devices}]\n"
    )
}

fn fleets() -> Vec<(&'static str, String)> {
    let gpus = |kind: &str, count: usize| format!("{{ kind = \"{kind}\", count = {count} }}");
    vec![
        ("4 V100nv, 4 A10G", node("a", &gpus("V100", 4), "50 GB/s") + &node("b", &gpus("A10G", 4), "")),
        ("4 V100nv, 8 A10G", node("a", &gpus("V100", 4), "50 GB/s") + &node("b", &gpus("A10G", 8), "")),
        ("4 V100nv, 8 T4", node("a", &gpus("V100", 4), "50 GB/s") + &node("b", &gpus("T4", 8), "")),
        ("8 V100nv, 8 A10G", node("a", &gpus("V100", 8), "50 GB/s") + &node("b", &gpus("A10G", 8), "")),
        ("2 4090, 2 A10G", node("a", &gpus("RTX 4090", 2), "") + &node("b", &gpus("A10G", 2), "")),
        ("4 A10G, 8 T4", node("a", &gpus("A10G", 4), "") + &node("b", &gpus("T4", 8), "")),
        ("4 L4, 8 V100nv", node("a", &gpus("L4", 4), "") + &node("b", &gpus("V100", 8), "50 GB/s")),
        ("2 4090, 4 3090", node("a", &gpus("RTX 4090", 2), "") + &node("b", &gpus("RTX 3090", 4), "")),
        ("2 4090, 8 3090", node("a", &gpus("RTX 4090", 2), "") + &node("b", &gpus("RTX 3090", 8), "")),
        ("2 A100nv, 8 V100nv", node("a", &gpus("A100", 2), "300 GB/s") + &node("b", &gpus("V100", 8), "50 GB/s")),
    ]
}

fn models() -> Vec<(&'static str, ModelConfig)> {
    vec![
        ("gpt2-1.5b", presets::preset("gpt2-1.5b").expect("a preset")),
        ("qwen2-1.5b", presets::preset("qwen2-1.5b").expect("a preset")),
        ("llama-3b", presets::llama(32000, 3200, 26, 32, 32, 8640, 2048, 1e4, false)),
    ]
}

fn main() {
    let mut only: Vec<String> = std::env::args().skip(1).collect();
    let mode = only.remove(0);
    for (fleet_name, text) in fleets() {
        let fleet = Fleet::parse(&text, "fleet").expect("the fleet is one");
        for (model_name, config) in models() {
            for (sequence, global_batch) in [(1024, 16), (1024, 32), (2048, 8), (2048, 16), (2048, 32)] {
                let label = format!("{fleet_name} | {model_name} | {sequence} | {global_batch}");
                if !only.iter().all(|part| label.contains(part.as_str())) {
                    continue;
                }
                let chain = Chain::new(&config);
                let step =
                    StepShape { global_batch, sequence, precision: Precision::Fp16, optimizer_states: 2 };
                let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence).expect("known");
                print!("{label}: ");
                if mode == "pure" {
                    let mut pure: Vec<(String, f64)> = Vec::new();
                    for replicas in [None, Some(1), Some(2), Some(4)] {
                        let wanted = PipelineWanted { replicas, ..PipelineWanted::default() };
                        if let Ok(planned) = pipeline::plan(&chain, step, &fleet, &costs, &wanted) {
                            let depth: Vec<usize> =
                                planned.pipeline.replicas.iter().map(|replica| replica.stages.len()).collect();
                            pure.push((format!("pipeline{replicas:?} {depth:?}"), planned.seconds));
                        }
                    }
                    if let Ok(found) = auto::plan(&chain, step, &fleet, &costs, &[Shape::Sharded, Shape::Burst]) {
                        for tried in found.tried {
                            if let Some(seconds) = tried.seconds {
                                pure.push((tried.shape.name().to_owned(), seconds));
                            }
                        }
                    }
                    pure.sort_by(|a, b| a.1.total_cmp(&b.1));
                    for (name, seconds) in pure.iter().take(4) {
                        print!("{:.1} ms {name}, ", seconds * 1e3);
                    }
                    println!();
                } else {
                    let start = Instant::now();
                    let mixed = if mode == "single" { mixed::plan_singles(&chain, step, &fleet, &costs) } else { mixed::plan(&chain, step, &fleet, &costs) }.expect("it plays");
                    let took = start.elapsed().as_secs_f64();
                    match mixed {
                        Some(planned) => {
                            print!("{:.1} ms mixed, took {took:.2} s, {:?} {:?}", planned.simulated.seconds * 1e3, planned.mixed.order, planned.mixed.stash);
                            for stage in &planned.mixed.stages {
                                print!(" {:?}:{:?}/{}{}{:?}", stage.devices, stage.layers, stage.piece, if stage.activations == shoal_plan::Activations::Keep { "k" } else { "r" }, stage.copies);
                            }
                            println!();
                            if mode == "detail" {
                                let layout = shoal_plan::Layout::new(&planned.plan, &chain);
                                let world = shoal_sim::FleetWorld::new(&fleet, &costs, &layout);
                                let programs = shoal_plan::compile_paced(&planned.plan, &chain, shoal_plan::Purpose::Train, &world).unwrap();
                                for program in &programs {
                                    let spans = &planned.simulated.spans[program.device];
                                    let last = |pick: &dyn Fn(&shoal_plan::Op) -> bool| program.instructions.iter().zip(spans).filter(|(i, _)| pick(&i.op)).map(|(_, s)| s.end).fold(0.0, f64::max);
                                    let first = |pick: &dyn Fn(&shoal_plan::Op) -> bool| program.instructions.iter().zip(spans).filter(|(i, _)| pick(&i.op)).map(|(_, s)| s.start).fold(9.0, f64::min);
                                    use shoal_plan::Op;
                                    println!("  {} first fwd {:.3} first bwd {:.3} last fwd {:.3} bwd {:.3} reduce {:.3} update {:.3} gather {:.3}", program.device, first(&|o| matches!(o, Op::Forward{..})), first(&|o| matches!(o, Op::Backward{..})), last(&|o| matches!(o, Op::Forward{..})), last(&|o| matches!(o, Op::Backward{..})), last(&|o| matches!(o, Op::Reduce{..})), last(&|o| matches!(o, Op::Update{..})), last(&|o| matches!(o, Op::Gather{..})));
                                }
                                for (device, time) in planned.simulated.devices.iter().enumerate() {
                                    println!("   {device} {time:.3?} {}", planned.memory[device].total() >> 20);
                                }
                            }
                        }
                        None => println!("none, took {took:.2} s"),
                    }
                }
            }
        }
    }
}
