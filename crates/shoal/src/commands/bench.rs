//! `shoal bench`: how fast a model trains here, on random tokens or images, and beside PyTorch where a Python has it.
//! The two take turns, so that a busy neighbour or a warm device hits both.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use serde_json::json;
use shoal_model::{Model, Precision};
use shoal_nn::{OptimizerKind, OptimizerSettings};
use shoal_plan::Planned;

use super::trial::{DeviceOptions, ModelOptions, Trial, TrialSettings, fits, median};
use crate::assemble::LocalDevice;
use crate::error::{CliError, Result};
use crate::job::bytes_text;
use crate::machine;
use crate::show::{flops_text, short};
use crate::spill::Around;
use crate::timeline::time_text;

const PEER: &str = include_str!("peer.py");

const PEER_HINT: &str = "--peer names a Python that has PyTorch";

#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    of: ModelOptions,
    /// Samples of a step
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// fp32, tf32, bf16 or fp16
    #[arg(long, default_value = "fp32")]
    precision: Precision,
    #[command(flatten)]
    on: DeviceOptions,
    /// Samples of a micro-batch
    #[arg(long)]
    micro_batch: Option<usize>,
    /// Measurements of each side; the median is shown
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// About how long a measurement lasts
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// A Python with PyTorch to run beside us
    #[arg(long, value_name = "PYTHON")]
    peer: Option<String>,
    /// The peer runs without torch.compile
    #[arg(long)]
    eager: bool,
    /// Only kernels that give the same bits every time
    #[arg(long)]
    deterministic: bool,
    /// Where a step's time goes on a GPU: milliseconds by kernel
    #[arg(long)]
    profile: bool,
    #[arg(long)]
    json: bool,
}

/// Steps before anything is measured.
const WARM_UP_STEPS: usize = 3;

/// The other side: a process that does the same.
struct Peer {
    child: Child,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    fn start(python: &str, job: &serde_json::Value) -> Result<Peer> {
        let failed = |what: String| CliError::said(what, PEER_HINT);
        let mut child = Command::new(python)
            .args(["-c", PEER, &job.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| failed(format!("{python}: {error}")))?;
        let answers = child.stdout.take().ok_or_else(|| failed(format!("{python}: no output to read")))?;
        Ok(Peer { child, answers: BufReader::new(answers) })
    }

    fn numbers(&mut self) -> Result<Vec<f64>> {
        let mut line = String::new();
        self.answers.read_line(&mut line).map_err(CliError::at(Path::new("the peer")))?;
        let numbers: Vec<f64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        match numbers.is_empty() {
            true => Err(CliError::said(
                "the peer ended without an answer".to_owned(),
                "what it said stands above; --peer names a Python that has PyTorch, torchvision (VGG, ResNet, Inception) and transformers",
            )),
            false => Ok(numbers),
        }
    }

    fn ask(&mut self, steps: usize) {
        let written = self.child.stdin.as_mut().map(|stdin| writeln!(stdin, "{steps}"));
        // A peer that ended is told by the answer that does not come.
        drop(written);
    }

    /// Seconds that the steps last asked for took.
    fn answer(&mut self) -> Result<f64> {
        Ok(self.numbers()?[0])
    }

    /// Ends the process; the most memory it had.
    fn finish(mut self) -> Result<f64> {
        drop(self.child.stdin.take());
        let memory = self.numbers()?[0];
        self.child.wait().map_err(CliError::at(Path::new("the peer")))?;
        Ok(memory)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Its input is closed or about to be: it ends by itself, unless it hangs.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Few a second with a decimal: models of images are slow to count.
fn rate_text(rate: f64) -> String {
    if rate < 100.0 { format!("{rate:.1}") } else { short(rate) }
}

pub fn run(options: Options) -> Result {
    if [options.batch, options.rounds].contains(&0) {
        let what = "--batch and --rounds are at least 1".to_owned();
        return Err(CliError::said(what, "leave them out for the defaults"));
    }
    let (model, sequence) = options.of.sized()?;
    let precision = options.precision;
    let device = options.on.choose(precision)?;
    let start_peer = |python: &str, offload: bool| -> Result<Peer> {
        let job = json!({
            "config": described(&model, &options.of.model), "batch": options.batch,
            "sequence": sequence, "precision": precision.name(), "threads": device.threads,
            "device": if device.gpu.is_some() { "cuda" } else { "cpu" },
            // Compiling for a processor needs a C++ compiler and gains little there.
            "compile": device.gpu.is_some() && !options.eager && !offload, "offload": offload,
        });
        let mut peer = Peer::start(python, &job)?;
        // Its first steps compile, which takes long: it begins while we make our model.
        peer.ask(WARM_UP_STEPS);
        Ok(peer)
    };
    let before = machine::resident_peak_bytes().unwrap_or(0);
    let settings = TrialSettings {
        batch: options.batch,
        sequence,
        precision,
        micro_batch: options.micro_batch,
        deterministic: options.deterministic,
    };
    // Nothing goes to a disk: it would be all that is measured.
    let around = Around { disk_bytes: 0, ..Around::of(Path::new(".")) };
    let beside = device.gpu.as_ref().map(|_| (around, Path::new("")));
    // Two models that stream would have to share the host's memory and its link: they go one after the other.
    let in_turn = fits(&model, &settings, &device);
    let python = options.peer.as_deref();
    let mut peer = python.filter(|_| in_turn).map(|python| start_peer(python, false)).transpose()?;
    let mut ours = Trial::new(&model, &settings, &device, beside)?;
    // The first steps pay for memory and warm-up.
    ours.train(WARM_UP_STEPS)?;
    if let Some(peer) = &mut peer {
        peer.answer()?;
    }
    let steps = (options.seconds / (ours.train(2)?.0 / 2.0)).ceil().max(1.0) as usize;
    // What is counted: tokens, or images.
    let each = if model.image().is_some() { 1 } else { sequence };
    let counted = (steps * options.batch * each) as f64;
    let (mut our_rates, mut their_rates, mut loss) = (Vec::new(), Vec::new(), f64::NAN);
    for _ in 0..options.rounds {
        let (seconds, last) = ours.train(steps)?;
        (loss, _) = (last, our_rates.push(counted / seconds));
        if let Some(peer) = &mut peer {
            peer.ask(steps);
            their_rates.push(counted / peer.answer()?);
        }
    }
    let opened = ours.executor.device().clone();
    let mut measured = Measured {
        work: match model.image() {
            Some(image) => Work::Images { size: image.size },
            None => Work::Tokens { sequence },
        },
        optimizer: ours.optimizer,
        per_step: (options.batch * each) as f64,
        flops_each: ours.executor.chain().training_flops(sequence) as f64 / each as f64,
        ours: median(&mut our_rates),
        theirs: None,
        loss,
        predicted: ours.planned.memory.total() + ours.held_bytes,
        predicted_seconds: ours.predicted_seconds,
        counted: opened.arena().peak(),
        driver: opened.driver_bytes(),
        resident: machine::resident_peak_bytes().unwrap_or(0).saturating_sub(before),
        peak: device.measure_rate(precision)?,
    };
    if options.profile {
        profile(&mut ours)?;
    }
    let planned = ours.planned;
    drop((opened, ours.executor));
    if let Some(python) = python.filter(|_| !in_turn) {
        let mut late = start_peer(python, true)?;
        late.answer()?;
        for _ in 0..options.rounds {
            late.ask(steps);
            their_rates.push(counted / late.answer()?);
        }
        peer = Some(late);
    }
    if let Some(peer) = peer {
        measured.theirs = Some((median(&mut their_rates), peer.finish()?));
    }
    if options.json {
        println!("{}", measured.json(&options, &device));
    } else {
        measured.print(&options, &device, &planned, in_turn);
    }
    Ok(())
}

/// The model as the peer is told of it: torchvision's by name, others by their config.json.
fn described(model: &Model, name: &str) -> serde_json::Value {
    match model {
        Model::Transformer(_) => model.write(None),
        Model::Convolutional(model) => json!({
            "model_type": "torchvision", "name": name,
            "classes": model.shape.classes, "image_size": model.shape.size,
        }),
    }
}

/// What samples are.
enum Work {
    Tokens { sequence: usize },
    Images { size: usize },
}

impl Work {
    /// What is counted, in full and as a line has it.
    fn counted(&self) -> (&'static str, &'static str) {
        match self {
            Work::Tokens { .. } => ("tokens", "tok"),
            Work::Images { .. } => ("images", "images"),
        }
    }
}

/// What came out.
struct Measured {
    work: Work,
    optimizer: OptimizerSettings,
    /// Tokens or images of a step.
    per_step: f64,
    /// Operations of each.
    flops_each: f64,
    /// Tokens or images a second.
    ours: f64,
    /// The same, and bytes at the most.
    theirs: Option<(f64, f64)>,
    loss: f64,
    predicted: u64,
    /// Of a step that streams.
    predicted_seconds: Option<f64>,
    counted: u64,
    driver: Option<u64>,
    resident: u64,
    /// Measured matrix rate, operations a second.
    peak: f64,
}

impl Measured {
    fn mfu(&self) -> f64 {
        self.ours * self.flops_each / self.peak
    }

    fn json(&self, options: &Options, device: &LocalDevice) -> serde_json::Value {
        let mut out = json!({
            "model": options.of.model, "batch": options.batch,
            "precision": options.precision.name(), "device": device.kind(), "loss": self.loss,
            "mfu": self.mfu(), "matrix_flops_per_second": self.peak,
            "ratio": self.theirs.map(|theirs| self.ours / theirs.0),
            "predicted_step_seconds": self.predicted_seconds,
            "memory": {
                "predicted_bytes": self.predicted, "counted_bytes": self.counted,
                "driver_bytes": self.driver, "resident_growth_bytes": self.resident,
                "process_bytes": device.process_bytes(), "peer_bytes": self.theirs.map(|theirs| theirs.1),
            },
        });
        match self.work {
            Work::Tokens { sequence } => out["sequence"] = json!(sequence),
            Work::Images { size } => out["image_size"] = json!(size),
        }
        let (counted, _) = self.work.counted();
        out[format!("{counted}_per_second")] = json!(self.ours);
        out[format!("peer_{counted}_per_second")] = json!(self.theirs.map(|theirs| theirs.0));
        out
    }

    fn print(&self, options: &Options, device: &LocalDevice, planned: &Planned, in_turn: bool) {
        println!(
            "{}, {} in {}, measured",
            device.describe(),
            flops_text(self.peak),
            options.precision.name()
        );
        let micro_batches = &planned.plan.layers[0].compute[0].micro_batches;
        let samples = match self.work {
            Work::Tokens { sequence } => format!("{} x {sequence} tokens", options.batch),
            Work::Images { size } => format!("{} images of {size} x {size}", options.batch),
        };
        let optimizer = match self.optimizer.kind {
            OptimizerKind::AdamW { .. } => "AdamW, clipping",
            OptimizerKind::Sgd { .. } => "SGD with momentum",
        };
        println!(
            "{}, {samples} in micro-batches of {}, {optimizer}; median of {}{}",
            options.of.model,
            micro_batches[0].count(),
            options.rounds,
            match (self.theirs.is_some(), in_turn) {
                (false, _) => "",
                (true, true) => ", the two in turn",
                (true, false) => ", one after the other; state on the host, PyTorch's by FSDP2",
            }
        );
        let row = |name: &str, rate: f64, memory: String| {
            let (ms, flops) = (1e3 * self.per_step / rate, rate * self.flops_each);
            println!(
                "{name:<10} {:>10} {}/s {ms:>10.1} ms {:>14}  {memory}",
                rate_text(rate),
                self.work.counted().1,
                flops_text(flops)
            );
        };
        let beside = match self.driver {
            Some(bytes) => format!("the driver counts {}", bytes_text(bytes)),
            None => format!("resident {}", bytes_text(self.resident)),
        };
        let memory = format!(
            "{} predicted, {} counted, {beside}",
            bytes_text(self.predicted),
            bytes_text(self.counted)
        );
        row("shoal", self.ours, memory);
        if let Some((rate, bytes)) = self.theirs {
            row("PyTorch", rate, bytes_text(bytes as u64));
            println!("ratio      {:>10.3}", self.ours / rate);
        }
        if let Some(predicted) = self.predicted_seconds {
            let off = 100.0 * (predicted * self.ours / self.per_step - 1.0);
            println!("a step was predicted to take {} ({off:+.1} %)", time_text(predicted));
        }
        println!("{:.0}% of the measured matrix rate; loss {:.4}", 100.0 * self.mfu(), self.loss);
    }
}

/// Steps that are timed kernel by kernel.
const PROFILED_STEPS: usize = 5;

fn profile(ours: &mut Trial) -> Result {
    let device = ours.executor.device().clone();
    device.profile(true)?;
    ours.train(PROFILED_STEPS)?;
    let mut spans = device.profile(false)?;
    spans.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    let total: f64 = spans.iter().map(|span| span.seconds).sum();
    println!("\n{:<52} {:>8} {:>10} {:>7}", "kernel", "calls", "ms a step", "share");
    for span in &spans {
        println!(
            "{:<52} {:>8} {:>10.3} {:>6.1}%",
            span.name,
            span.calls / PROFILED_STEPS,
            1e3 * span.seconds / PROFILED_STEPS as f64,
            100.0 * span.seconds / total
        );
    }
    println!("{:<52} {:>8} {:>10.3}", "all", "", 1e3 * total / PROFILED_STEPS as f64);
    Ok(())
}
