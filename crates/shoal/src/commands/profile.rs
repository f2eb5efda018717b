//! `shoal profile`: how long each layer's forward and backward take on this machine's device, by the number of
//! samples, written as profile.json. What is timed is what training runs: the program's instructions, by the
//! device's own clock.

mod handling;
pub mod links;
mod neighbours;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use shoal_engine::{EngineError, Replay};
use shoal_fleet::profile::{FORMAT, LinkProfile, equal_layers};
use shoal_fleet::{DeviceProfile, LayerProfile, Profile, TimeCurve, catalogue};
use shoal_model::{Chain, Model, Precision};
use shoal_plan::{Op, PlanError};

use handling::Handling;
use links::{Over, Pair};
use neighbours::{Neighbours, Steps, among};

use super::trial::{DeviceOptions, ModelOptions, Trial, TrialSettings, median, typical};
use crate::error::{CliError, Result};
use crate::in_a_box::gpu::percent_here;
use crate::job::bytes_text;
use crate::machine;

#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    of: ModelOptions,
    /// Numbers of samples to measure
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8, 16, 32, 64, 128, 256])]
    samples: Vec<usize>,
    /// Measure a transformer with so many of its blocks: they are equal, and few take less time and memory [default: all of them]
    #[arg(long)]
    blocks: Option<usize>,
    /// fp32, tf32, bf16 or fp16
    #[arg(long, default_value = "fp32")]
    precision: Precision,
    #[command(flatten)]
    on: DeviceOptions,
    /// Steps measured for each number of samples; the mean is written, without the quickest and the slowest tenth [default: 5 on
    /// a GPU; as many as take a second and a half on a processor, at least 5]
    #[arg(long)]
    rounds: Option<usize>,
    /// Others that train beside it, as workers of a fleet on this machine do [default: as many as have room on the cores that
    /// --threads leaves]
    #[arg(long)]
    neighbours: Option<usize>,
    /// Where to write it
    #[arg(long, default_value = "profile.json")]
    out: PathBuf,
    /// A profile to add this one to, such as another machine's; may be given several times
    #[arg(long)]
    merge: Vec<PathBuf>,
    /// Measure nothing: write what those have together
    #[arg(long, requires = "merge")]
    only_merge: bool,
}

/// Steps before anything is measured: the device chooses algorithms, and learns to start instructions at once.
const WARM_UP_STEPS: usize = 4;

/// Steps that are measured where nothing else is said: so many, and on a processor, whose cores others interrupt, as many as take
/// so long; a run's steps are interrupted too.
const ROUNDS_LEAST: usize = 5;
const ROUNDS_MOST: usize = 200;
const PROCESSOR_SECONDS: f64 = 1.5;

pub fn run(options: Options) -> Result {
    if options.rounds == Some(0) || options.samples.is_empty() || options.samples.contains(&0) {
        let what = "--rounds and each of --samples are at least 1".to_owned();
        return Err(CliError::said(what, "leave them out for the defaults"));
    }
    let (model, sequence) = options.of.sized()?;
    // Before anything is measured: a file that cannot be read, or is of another model, would cost all of it.
    let nothing = Profile {
        format: FORMAT,
        model: options.of.model.clone(),
        sequence,
        devices: Vec::new(),
        links: Vec::new(),
    };
    let known =
        options.merge.iter().try_fold(nothing.clone(), |all, path| all.merge(Profile::read(path)?))?;
    if options.only_merge {
        known.write(&options.out)?;
        println!("wrote {}: {} kinds of devices", options.out.display(), known.devices.len());
        return Ok(());
    }
    let device = options.on.choose(options.precision)?;
    let whole = model.chain();
    let model = with_blocks(model, options.blocks)?;
    let chain = model.chain();
    let neighbours = options.neighbours.unwrap_or_else(|| match &device.gpu {
        Some(_) => 0,
        None => (machine::cores() / device.threads.max(1)).saturating_sub(1),
    });
    if neighbours > 0 {
        eprintln!("note: measured while {neighbours} more like it compute on this machine, as in a fleet");
    }
    let mut measured = Measured::new(&chain);
    let seconds_least = if device.gpu.is_none() { PROCESSOR_SECONDS } else { 0.0 };
    let settings = |samples: usize| TrialSettings {
        batch: samples,
        sequence,
        precision: options.precision,
        micro_batch: Some(samples),
        deterministic: false,
    };
    for samples in options.samples.iter().copied().collect::<BTreeSet<_>>() {
        let settings = settings(samples);
        let measure = |beside: &_| {
            let trial = Trial::new(&model, &settings, &device, None)?;
            measured.add(InStep { trial, beside }, options.rounds, seconds_least, samples)
        };
        match among(neighbours, Steps::Together, &model, &settings, &device, measure) {
            Err(CliError::Engine(EngineError::Plan(PlanError::TooSmall { needed_bytes, .. }))) => {
                eprintln!("note: {samples} samples need {}: not measured", bytes_text(needed_bytes));
            }
            added => added?,
        }
    }
    if measured.samples.is_empty() {
        let what = format!("{}: no number of samples fits its memory", device.title());
        return Err(CliError::said(what, "give it more with --memory, or take fewer --samples"));
    }
    let mut alone = None;
    if neighbours > 0 {
        let middle = settings(measured.samples[measured.samples.len() / 2]);
        let trial = Trial::new(&model, &middle, &device, None)?;
        let nobody = Neighbours::default();
        let share = measured.alone(InStep { trial, beside: &nobody }, options.rounds, seconds_least)?;
        println!("alone its layers take {:.0} % of what they take beside the others", 100.0 * share);
        alone = Some(share);
        // A fleet's workers update at the same time, for which they share the machine's memory: so do these, which compute next
        // to nothing besides.
        let sequence = if chain.image.is_some() { sequence } else { 1 };
        let settings = TrialSettings { sequence, ..settings(1) };
        let measure = |beside: &_| {
            let trial = Trial::new(&model, &settings, &device, None)?;
            measured.add_updates(InStep { trial, beside }, options.rounds)
        };
        among(neighbours, Steps::Together, &model, &settings, &device, measure)?;
    }
    let samples = measured.samples.clone();
    let share = device.gpu.as_ref().and_then(|_| percent_here());
    let kind = share
        .map_or_else(|| catalogue::name(device.kind()), |share| catalogue::share_name(share, device.kind()));
    let host = links::host(&*device.open(options.precision, false)?, &kind)?;
    let processes = Pair::start(Over::Loopback)?.link()?;
    // A GPU leaves messages to its host.
    let handling = match &device.gpu {
        Some(_) => Handling::default(),
        None => {
            let settings = settings(samples[0]);
            let mut pair = Pair::start(Over::Network)?;
            handling::measure(&mut pair, 1 + neighbours, &model, &settings, &device)?
        }
    };
    let links = vec![host, processes];
    for LinkProfile { scope, kind, link } in &links {
        let (rate, latency) = (link.bytes_per_second / 1e9, 1e6 * link.seconds_latency);
        println!("{scope:?} link of {kind}: {rate:.1} GB/s, {latency:.0} us");
    }
    if let Some(seconds) = handling.seconds_per_byte {
        println!("a gigabyte sent or received takes {:.2} s of what computes", 1e9 * seconds);
    }
    if let Some(seconds) = handling.seconds_per_message {
        println!("a message waits {:.2} ms for those who compute", 1e3 * seconds);
    }
    let profile = Profile {
        links,
        devices: vec![DeviceProfile {
            kind,
            device: device.title(),
            precision: options.precision,
            estimated: false,
            update_seconds_per_parameter: Some(measured.update_seconds() / chain.parameters() as f64),
            handling_seconds_per_byte: handling.seconds_per_byte,
            handling_seconds_per_message: handling.seconds_per_message,
            alone,
            step: Some(measured.step(&chain, &whole)),
            layers: measured.layers(&chain, &whole, options.precision, sequence),
        }],
        ..nothing
    };
    known.merge(profile)?.write(&options.out)?;
    println!("wrote {}: {} layers, {samples:?} samples", options.out.display(), whole.layers.len());
    Ok(())
}

/// The model, or, where it is asked for, a transformer with fewer of its blocks.
fn with_blocks(mut model: Model, blocks: Option<usize>) -> Result<Model> {
    let Some(blocks) = blocks else { return Ok(model) };
    let refused =
        |what: &str| Err(CliError::said(format!("--blocks: {what}"), "leave it out for all layers"));
    match &mut model {
        Model::Convolutional(_) => return refused("a convolutional model has none, its layers differ"),
        Model::Transformer(_) if blocks == 0 => return refused("one at least is measured"),
        Model::Transformer(config) if config.layers < blocks => {
            return refused(&format!("the model has {}", config.layers));
        }
        Model::Transformer(config) => config.layers = blocks,
    }
    Ok(model)
}

/// What is measured, and those who begin each step with it.
struct InStep<'a> {
    trial: Trial,
    beside: &'a Neighbours,
}

impl InStep<'_> {
    /// Seconds that so many steps took.
    fn train(&mut self, steps: usize) -> Result<f64> {
        let mut seconds = 0.0;
        for _ in 0..steps {
            self.beside.begin_step();
            seconds += self.trial.train(1)?.0;
        }
        Ok(seconds)
    }

    fn time_instructions(&mut self) -> Result<Vec<(Op, f64)>> {
        self.beside.begin_step();
        self.trial.time_instructions()
    }
}

/// What is known so far.
struct Measured {
    samples: Vec<usize>,
    /// By the number of samples.
    step_seconds: Vec<f64>,
    /// Of the whole model's update: the number of samples does not change it.
    updates: Vec<f64>,
    /// By layer, then by the number of samples.
    forward: Vec<Vec<f64>>,
    backward: Vec<Vec<f64>>,
}

impl Measured {
    fn new(chain: &Chain) -> Measured {
        let nothing = vec![Vec::new(); chain.layers.len()];
        Measured {
            samples: Vec::new(),
            step_seconds: Vec::new(),
            updates: Vec::new(),
            forward: nothing.clone(),
            backward: nothing,
        }
    }

    /// Adds one number of samples, measured in so many steps, or in as many as take so long.
    fn add(
        &mut self,
        mut trial: InStep,
        rounds: Option<usize>,
        seconds_least: f64,
        samples: usize,
    ) -> Result {
        let rounds = enough(&mut trial, rounds, seconds_least)?;
        let step_seconds = trial.train(rounds)? / rounds as f64;
        for (part, seconds) in parts(&mut trial, rounds)? {
            let all = match part {
                Part::Forward(layer) => &mut self.forward[layer],
                Part::Backward(layer) => &mut self.backward[layer],
                Part::Update => &mut self.updates,
            };
            all.push(seconds);
        }
        self.samples.push(samples);
        self.step_seconds.push(step_seconds);
        eprintln!("{samples} samples: a step takes {:.3} ms", 1e3 * step_seconds);
        Ok(())
    }

    /// Updates alone, in place of those that were measured with layers.
    fn add_updates(&mut self, mut trial: InStep, rounds: Option<usize>) -> Result {
        let rounds = enough(&mut trial, rounds, PROCESSOR_SECONDS)?;
        let updates = parts(&mut trial, rounds)?.remove(&Part::Update);
        self.updates = updates.into_iter().collect();
        Ok(())
    }

    /// What layers take while nobody else computes, as a share of what was measured for as many samples as the middle one of those
    /// that were.
    fn alone(&self, mut trial: InStep, rounds: Option<usize>, seconds_least: f64) -> Result<f64> {
        let rounds = enough(&mut trial, rounds, seconds_least)?;
        let parts = parts(&mut trial, rounds)?.into_iter().filter(|(part, _)| *part != Part::Update);
        let alone: f64 = parts.map(|(_, seconds)| seconds).sum();
        let place = self.samples.len() / 2;
        let beside: f64 = self.forward.iter().chain(&self.backward).map(|seconds| seconds[place]).sum();
        // Where nobody is in another's way it is chance which of the two is longer.
        Ok((alone / beside).min(1.0))
    }

    fn update_seconds(&self) -> f64 {
        median(&mut self.updates.clone())
    }

    /// What some layers take, forward or backward: their mean, so that the sum over the chain stays.
    fn mean(&self, of: &[Vec<f64>], equal: &[usize]) -> Vec<f64> {
        let at = |index: usize| equal.iter().map(|layer| of[*layer][index]).sum::<f64>() / equal.len() as f64;
        (0..self.samples.len()).map(at).collect()
    }

    /// Equal layers as one row, with all that the whole has of them.
    fn layers(
        &self,
        chain: &Chain,
        whole: &Chain,
        precision: Precision,
        sequence: usize,
    ) -> Vec<LayerProfile> {
        let curve =
            |of: &[Vec<f64>], equal: &[usize]| TimeCurve::new(self.samples.clone(), self.mean(of, equal));
        let row = |(measured, all): (Vec<usize>, Vec<usize>)| LayerProfile {
            forward: curve(&self.forward, &measured),
            backward: curve(&self.backward, &measured),
            ..LayerProfile::described(whole, &all, precision, sequence)
        };
        equal_layers(chain).into_iter().zip(equal_layers(whole)).map(row).collect()
    }

    /// A whole step; layers that were left out, and their update, take what those like them took.
    fn step(&self, chain: &Chain, whole: &Chain) -> TimeCurve {
        let mut seconds = self.step_seconds.clone();
        for (measured, all) in equal_layers(chain).into_iter().zip(equal_layers(whole)) {
            let left_out = (all.len() - measured.len()) as f64;
            for of in [&self.forward, &self.backward] {
                let each = self.mean(of, &measured);
                seconds.iter_mut().zip(each).for_each(|(step, layer)| *step += left_out * layer);
            }
        }
        let times = whole.parameters() as f64 / chain.parameters() as f64;
        seconds.iter_mut().for_each(|step| *step += (times - 1.0) * self.update_seconds());
        TimeCurve::new(self.samples.clone(), seconds)
    }
}

/// How many steps to measure, unless it is said: as many as take so long.
fn enough(trial: &mut InStep, rounds: Option<usize>, seconds_least: f64) -> Result<usize> {
    let warm_seconds = trial.train(WARM_UP_STEPS)?;
    let enough = (seconds_least * WARM_UP_STEPS as f64 / warm_seconds).ceil() as usize;
    Ok(rounds.unwrap_or(enough.clamp(ROUNDS_LEAST, ROUNDS_MOST)))
}

/// What the parts of a step take, by so many of them.
fn parts(trial: &mut InStep, rounds: usize) -> Result<BTreeMap<Part, f64>> {
    trial.trial.executor.set_replay(Replay::Instruction);
    trial.train(WARM_UP_STEPS)?;
    // Seconds of each, round by round.
    let mut parts: BTreeMap<Part, Vec<f64>> = BTreeMap::new();
    for _ in 0..rounds {
        let mut taken: BTreeMap<Part, f64> = BTreeMap::new();
        for (op, seconds) in trial.time_instructions()? {
            let Some(part) = Part::of(&op) else { continue };
            *taken.entry(part).or_default() += seconds;
        }
        for (part, seconds) in taken {
            parts.entry(part).or_default().push(seconds);
        }
    }
    Ok(parts.into_iter().map(|(part, mut seconds)| (part, typical(&mut seconds))).collect())
}

/// What an instruction's time counts towards.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Forward(usize),
    Backward(usize),
    Update,
}

impl Part {
    fn of(op: &Op) -> Option<Part> {
        match *op {
            Op::Begin { layer, .. } | Op::Forward { layer, .. } => Some(Part::Forward(layer)),
            Op::BeginBackward { layer, .. } | Op::Backward { layer, .. } => Some(Part::Backward(layer)),
            // What comes behind the last backward, by the parameter.
            Op::GradientNorm | Op::Update { .. } => Some(Part::Update),
            _ => None,
        }
    }
}
