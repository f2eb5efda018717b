//! `shoal verify`: our logits, gradients and losses beside a reference implementation's.

use std::path::PathBuf;

use clap::ValueEnum;
use serde_json::json;
use shoal_engine::golden::{GoldenDevice, GoldenSettings, check};
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
    /// The largest relative difference that passes
    #[arg(long, default_value_t = 1e-4)]
    tolerance: f64,
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
    };
    let mut failed = Vec::new();
    for folder in &options.folders {
        let report = check(folder, settings)?;
        let (tensor, gradient) = report.worst_gradient();
        let passed = report.worst_of_all() <= options.tolerance;
        if !passed {
            failed.push(folder.display().to_string());
        }
        if options.json {
            println!(
                "{}",
                json!({
                    "folder": folder, "passed": passed, "logits": report.logits, "gradients": report.gradients,
                    "losses": report.losses, "grad_norms": report.gradient_norms,
                })
            );
        } else {
            println!(
                "{}: logits {:.1e}, gradients {gradient:.1e} ({tensor}), {} losses {:.1e}, norms {:.1e}: {}",
                folder.display(),
                report.logits,
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
        format!("{} differ by more than {:e}", failed.join(", "), options.tolerance),
        "--json shows every tensor",
    ))
}
