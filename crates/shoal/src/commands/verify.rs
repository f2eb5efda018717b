//! `shoal verify`: our logits, gradients and losses beside a reference implementation's.

use std::path::PathBuf;

use clap::ValueEnum;
use serde_json::json;
use shoal_engine::Replay;
use shoal_engine::golden::{GoldenDevice, GoldenSettings, check};
use shoal_model::Precision;
use shoal_plan::Activations;

use crate::error::{CliError, Result};
use crate::machine;

#[derive(Clone, Copy, ValueEnum)]
enum Kept {
    Keep,
    Recompute,
}

#[derive(Clone, Copy, ValueEnum)]
enum Where {
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, ValueEnum)]
enum Graphs {
    Off,
    Step,
    Instruction,
}

/// What fp32 must come to unless the command line says otherwise.
const FP32_TOLERANCE: f64 = 1e-4;

#[derive(clap::Args)]
pub struct Options {
    /// Folders with config.json, model.safetensors, expected.safetensors and losses.json
    #[arg(required = true)]
    folders: Vec<PathBuf>,
    /// Samples of a micro-batch
    #[arg(long)]
    micro_batch: Option<usize>,
    /// What to do with activations
    #[arg(long, value_enum)]
    activations: Option<Kept>,
    /// All micro-batches of a layer before the next layer
    #[arg(long)]
    layer_first: bool,
    /// What to compute on
    #[arg(long, value_enum, default_value_t = Where::Cpu)]
    device: Where,
    /// What a GPU starts at once: a step as a CUDA graph, or each instruction as one
    #[arg(long, value_enum, default_value_t = Graphs::Off)]
    graphs: Graphs,
    /// What to compute in: fp32, tf32, bf16 or fp16
    #[arg(long, default_value = "fp32")]
    precision: Precision,
    /// The largest relative difference that passes [default: 1e-4 in fp32; else 1e-2 for losses and 3e-2
    /// for the gradient as a whole]
    #[arg(long)]
    tolerance: Option<f64>,
    #[arg(long)]
    json: bool,
}

pub fn run(options: Options) -> Result {
    let settings = GoldenSettings {
        micro_batch: options.micro_batch,
        activations: options.activations.map(|kept| match kept {
            Kept::Keep => Activations::Keep,
            Kept::Recompute => Activations::Recompute,
        }),
        layer_first: options.layer_first,
        device: match options.device {
            Where::Cpu => GoldenDevice::Cpu { threads: machine::cores() },
            Where::Cuda => GoldenDevice::Cuda { ordinal: 0 },
        },
        precision: options.precision,
        replay: match options.graphs {
            Graphs::Off => Replay::Nothing,
            Graphs::Step => Replay::Step,
            Graphs::Instruction => Replay::Instruction,
        },
    };
    let precision = settings.precision;
    if matches!(options.device, Where::Cpu) && precision.is_half() {
        return Err(CliError::said(
            format!("the processor does not compute in {}", precision.name()),
            "add --device cuda, or leave --precision out",
        ));
    }
    let mut failed = Vec::new();
    for folder in &options.folders {
        let report = check(folder, settings)?;
        let (tensor, gradient) = report.worst_gradient();
        let passed = match (options.tolerance, precision) {
            (Some(tolerance), _) => report.worst_of_all() <= tolerance,
            (None, Precision::Fp32) => report.worst_of_all() <= FP32_TOLERANCE,
            (None, _) => report.agrees(precision),
        };
        if !passed {
            failed.push(folder.display().to_string());
        }
        if options.json {
            println!(
                "{}",
                json!({
                    "folder": folder, "passed": passed, "logits": report.logits, "gradients": report.gradients,
                    "whole_gradient": report.whole_gradient,
                    "losses": report.losses, "grad_norms": report.gradient_norms,
                })
            );
        } else {
            println!(
                "{}: logits {:.1e}, gradients {gradient:.1e} ({tensor}) and {:.1e} as a whole, {} losses {:.1e}, norms {:.1e}: {}",
                folder.display(),
                report.logits,
                report.whole_gradient,
                report.losses.len(),
                report.worst_loss(),
                report.worst_gradient_norm(),
                if passed { "agrees" } else { "DIFFERS" }
            );
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(CliError::said(
        format!("{} differ by more than rounding in {} explains", failed.join(", "), precision.name()),
        "--json shows every tensor",
    ))
}
