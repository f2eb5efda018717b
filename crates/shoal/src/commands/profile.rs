//! `shoal profile`: how long each layer's forward and backward take on this machine's device, by the number of
//! samples, written as profile.json. What is timed is what training runs: the program's instructions, by the
//! device's own clock.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;
use shoal_engine::{EngineError, Replay};
use shoal_model::{Chain, Precision};
use shoal_plan::{Op, PlanError};

use super::trial::{DeviceOptions, ModelOptions, Trial, TrialSettings, median};
use crate::error::{CliError, Result};
use crate::job::bytes_text;

#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    of: ModelOptions,
    /// Numbers of samples to measure
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64, 128, 256])]
    samples: Vec<usize>,
    /// fp32, tf32, bf16 or fp16
    #[arg(long, default_value = "fp32")]
    precision: Precision,
    #[command(flatten)]
    on: DeviceOptions,
    /// Steps measured for each number of samples; the median is written
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Where to write it
    #[arg(long, default_value = "profile.json")]
    out: PathBuf,
}

/// Raised when the file's meaning changes; docs/profile.md describes it.
const FORMAT: u32 = 1;

/// Steps before anything is measured: the device chooses algorithms, and learns to start instructions at once.
const WARM_UP_STEPS: usize = 4;

#[derive(Serialize)]
struct Profile {
    format: u32,
    model: String,
    device: String,
    precision: &'static str,
    /// Rows of a sample: tokens, patches, or one.
    sequence: usize,
    /// Numbers of samples that were measured.
    samples: Vec<usize>,
    /// Seconds of a whole step, by the number of samples.
    step_seconds: Vec<f64>,
    layers: Vec<LayerProfile>,
}

/// Seconds by the number of samples.
#[derive(Serialize)]
struct LayerProfile {
    layer: String,
    parameters: usize,
    /// Operations of one sample's forward.
    forward_flops: u64,
    /// Bytes that one sample hands on.
    output_bytes: u64,
    forward_seconds: Vec<f64>,
    backward_seconds: Vec<f64>,
}

pub fn run(options: Options) -> Result {
    if options.rounds == 0 || options.samples.is_empty() || options.samples.contains(&0) {
        let what = "--rounds and each of --samples are at least 1".to_owned();
        return Err(CliError::said(what, "leave them out for the defaults"));
    }
    let (model, sequence) = options.of.sized()?;
    let device = options.on.choose(options.precision)?;
    let chain = model.chain();
    let mut profile = Profile {
        format: FORMAT,
        model: options.of.model.clone(),
        device: device.title(),
        precision: options.precision.name(),
        sequence,
        samples: Vec::new(),
        step_seconds: Vec::new(),
        layers: (0..chain.layers.len())
            .map(|layer| described(&chain, layer, sequence, options.precision))
            .collect(),
    };
    for samples in options.samples.iter().copied() {
        let settings = TrialSettings {
            batch: samples,
            sequence,
            precision: options.precision,
            micro_batch: Some(samples),
            deterministic: false,
        };
        let mut trial = match Trial::new(&model, &settings, &device) {
            Err(CliError::Engine(EngineError::Plan(PlanError::TooSmall { needed_bytes, .. }))) => {
                eprintln!("note: {samples} samples need {}: not measured", bytes_text(needed_bytes));
                continue;
            }
            trial => trial?,
        };
        measure(&mut trial, &options, samples, &mut profile)?;
    }
    let text = serde_json::to_string_pretty(&profile).unwrap_or_default() + "\n";
    std::fs::write(&options.out, text).map_err(CliError::at(&options.out))?;
    println!(
        "wrote {}: {} layers, {:?} samples",
        options.out.display(),
        profile.layers.len(),
        profile.samples
    );
    Ok(())
}

fn described(chain: &Chain, layer: usize, sequence: usize, precision: Precision) -> LayerProfile {
    let of = &chain.layers[layer];
    let trained = of.tensors.iter().map(|(_, tensor)| &chain.tensors[*tensor]);
    LayerProfile {
        layer: of.name.clone(),
        parameters: trained.filter(|spec| spec.running.is_none()).map(|spec| spec.elements()).sum(),
        forward_flops: of.kind.forward_flops(sequence),
        output_bytes: of.kind.output_bytes(1, sequence, precision),
        forward_seconds: Vec::new(),
        backward_seconds: Vec::new(),
    }
}

/// Adds one number of samples to the profile.
fn measure(trial: &mut Trial, options: &Options, samples: usize, profile: &mut Profile) -> Result {
    trial.train(WARM_UP_STEPS)?;
    let step_seconds = trial.train(options.rounds)?.0 / options.rounds as f64;
    // From here on the parts of a step are wanted.
    trial.executor.set_replay(Replay::Instruction);
    trial.train(WARM_UP_STEPS)?;
    // Seconds of each layer's forward and backward, round by round.
    let mut rounds: BTreeMap<(usize, bool), Vec<f64>> = BTreeMap::new();
    for _ in 0..options.rounds {
        let mut taken: BTreeMap<(usize, bool), f64> = BTreeMap::new();
        for (op, seconds) in trial.time_instructions()? {
            let (layer, backward) = match op {
                Op::Begin { layer, .. } | Op::Forward { layer, .. } => (layer, false),
                Op::BeginBackward { layer, .. } | Op::Backward { layer, .. } => (layer, true),
                _ => continue,
            };
            *taken.entry((layer, backward)).or_default() += seconds;
        }
        for (part, seconds) in taken {
            rounds.entry(part).or_default().push(seconds);
        }
    }
    for ((layer, backward), mut seconds) in rounds {
        let layer = &mut profile.layers[layer];
        let all = if backward { &mut layer.backward_seconds } else { &mut layer.forward_seconds };
        all.push(median(&mut seconds));
    }
    profile.samples.push(samples);
    profile.step_seconds.push(step_seconds);
    eprintln!("{samples} samples: a step takes {:.3} ms", 1e3 * step_seconds);
    Ok(())
}
