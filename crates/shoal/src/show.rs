//! What a person sees while a run goes on: the banner, then one line that stays current. All of it goes to
//! stderr; stdout is for data.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use shoal_data::Dataset;
use shoal_engine::RunEvent;
use shoal_engine::metrics::{RecentLosses, StepRecord};
use shoal_model::{Chain, Model};
use shoal_plan::{Activations, MemoryForecast, Planned};

use crate::assemble::LocalDevice;
use crate::job::{Job, bytes_text, duration_text};

/// Between two lines where stderr is not a terminal.
const LINE_EVERY: Duration = Duration::from_secs(2);

/// A share of the measured matrix rate that training usually reaches, for the estimate before the first step.
const USUAL_SHARE: f64 = 0.8;

/// 1234567 as `1,234,567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A count in the unit that reads best: 1.2 M.
pub fn short(number: f64) -> String {
    match number {
        n if n >= 1e9 => format!("{:.2} B", n / 1e9),
        n if n >= 1e6 => format!("{:.2} M", n / 1e6),
        n if n >= 1e4 => format!("{:.1} k", n / 1e3),
        n => format!("{n:.0}"),
    }
}

/// A rate in floating-point operations a second.
pub fn flops_text(rate: f64) -> String {
    if rate >= 1e13 { format!("{:.0} TFLOP/s", rate / 1e12) } else { format!("{:.0} GFLOP/s", rate / 1e9) }
}

/// `1 micro-batch`, `2 micro-batches`.
fn counted(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// Rows under a head, in columns as wide as they have to be.
pub fn table(head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let head: Vec<String> = head.iter().map(|name| (*name).to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// A share: 91.4 %.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// Samples that are images.
fn images(data: &Dataset, size: usize) -> String {
    let count = grouped(data.len());
    match data.kept_bytes_max() {
        0 => format!("{count} images of {size} x {size}"),
        kept => {
            format!("{count} pictures, shown as {size} x {size}; up to {} of them kept", bytes_text(kept))
        }
    }
}

/// What a model is made of.
fn layers(model: &Model, chain: &Chain) -> String {
    match model {
        Model::Transformer(config) => format!("{} layers of {}", config.layers, config.width),
        Model::Convolutional(_) => format!("{} layers", chain.layers.len()),
    }
}

/// What is about to run, and what it will take.
pub fn banner(
    job: &Job,
    chain: &Chain,
    device: &LocalDevice,
    data: &Dataset,
    planned: &Planned,
    peak: f64,
    resumed: Option<u64>,
) -> String {
    let micro_batches = &planned.plan.layers[0].compute[0].micro_batches;
    let (first, last) = (micro_batches[0].count(), micro_batches[micro_batches.len() - 1].count());
    let ragged = if first == last { String::new() } else { format!(", the last of {last}") };
    let tokens = job.global_batch as u64 * job.sequence as u64;
    let (kinds, samples, batch, seen) = match job.model.image() {
        None => (
            "vocabulary",
            format!(
                "{} tokens, {} samples of {}{}",
                short(data.tokens() as f64),
                grouped(data.len()),
                if job.documents { "up to " } else { "" },
                job.sequence
            ),
            format!("{} x {} = {} tokens", job.global_batch, job.sequence, grouped(tokens)),
            format!("{} tokens", short((job.steps * tokens) as f64)),
        ),
        Some(image) => (
            "classes",
            images(data, image.size),
            format!("{} images", job.global_batch),
            format!("{} images", short((job.steps * job.global_batch as u64) as f64)),
        ),
    };
    let epochs = job.steps as f64 * job.global_batch as f64 / data.len() as f64;
    let memory = &planned.memory;
    let flops = chain.training_flops(job.sequence) as f64 * job.global_batch as f64;
    let left = job.steps - resumed.unwrap_or(0).min(job.steps);
    let recomputed =
        planned.plan.layers.iter().any(|row| row.compute[0].activations == Activations::Recompute);
    let copies = match memory.copies {
        0 => String::new(),
        bytes => format!(" and {} of copies in {}", bytes_text(bytes), job.precision.name()),
    };
    let lines = [
        format!("shoal {} · {}", env!("CARGO_PKG_VERSION"), job.name),
        format!(
            "  device   {}, {} in {}, measured",
            device.describe(),
            flops_text(peak),
            job.precision.name()
        ),
        format!(
            "  model    {}, {} parameters: {}, {kinds} {}",
            job.model.family(),
            short(chain.parameters() as f64),
            layers(&job.model, chain),
            grouped(job.model.vocabulary() as u64)
        ),
        format!("  data     {}: {samples}", job.train_data.display()),
        format!(
            "  batch    {batch} a step, as {} of {first}{ragged}",
            counted(micro_batches.len(), "micro-batch", "micro-batches")
        ),
        format!(
            "  steps    {} = {seen} = {epochs:.1} epochs; about {} to go",
            grouped(job.steps),
            duration_text(left as f64 * flops / (USUAL_SHARE * peak))
        ),
        format!(
            "  memory   {} predicted of {}, and {} for the process itself",
            bytes_text(memory.total()),
            bytes_text(device.budget_bytes),
            bytes_text(device.process_bytes())
        ),
        format!(
            "           parameters {}{}, gradients {}, optimizer {}, activations {} ({})",
            bytes_text(memory.parameters),
            copies,
            bytes_text(memory.gradients),
            bytes_text(memory.optimizer),
            bytes_text(memory.values),
            if recomputed { "recomputed" } else { "kept" }
        ) + &elsewhere(memory),
        format!(
            "  run      {}, plan {}: {}",
            job.run_folder.display(),
            planned.plan.id(),
            resumed.map_or("new".to_owned(), |step| format!("resumes after step {step}"))
        ),
    ];
    lines.join("\n")
}

/// What of a model that does not fit its device waits beside it.
pub fn elsewhere(memory: &MemoryForecast) -> String {
    match (memory.host, memory.disk) {
        (0, 0) => String::new(),
        (host, 0) => {
            format!("\n           streams through the device: {} wait in host memory", bytes_text(host))
        }
        (host, disk) => format!(
            "\n           streams through the device: {} wait in host memory, {} on disk",
            bytes_text(host),
            bytes_text(disk)
        ),
    }
}

/// The line that stays current.
pub struct Progress {
    bar: Option<ProgressBar>,
    steps: u64,
    recent: RecentLosses,
    last_line: Option<Instant>,
    /// Recent seconds a step, smoothed, for the time to go.
    seconds: Option<f64>,
    quiet: bool,
}

impl Progress {
    pub fn new(steps: u64, at: u64, quiet: bool) -> Progress {
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(steps).with_position(at);
            let style = ProgressStyle::with_template("{wide_bar:.cyan/dim}\n{msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Progress { bar, steps, recent: RecentLosses::default(), last_line: None, seconds: None, quiet }
    }

    /// A line that stays.
    pub fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(line),
            None if !self.quiet => eprintln!("{line}"),
            None => {}
        }
    }

    pub fn event(&mut self, event: &RunEvent) {
        match event {
            RunEvent::Step(record) => self.step(record),
            RunEvent::Saved { step, bytes, seconds } => {
                self.say(&format!("saved step {step}: {} in {seconds:.1} s", bytes_text(*bytes)));
            }
            RunEvent::SavesWait { needed_bytes, free_bytes } => self.say(&format!(
                "note: training waits while checkpoints are written: a copy of the state takes {} of host memory, {} are free",
                bytes_text(*needed_bytes),
                bytes_text(*free_bytes),
            )),
        }
    }

    fn step(&mut self, record: &StepRecord) {
        let score = self.recent.z_score(record.loss);
        let now = record.step_ms / 1e3;
        let smoothed = self.seconds.map_or(now, |before| 0.9 * before + 0.1 * now);
        self.seconds = Some(smoothed);
        let left = smoothed * (self.steps - record.step.min(self.steps)) as f64;
        let line = step_line(record, self.steps, score, left);
        if let Some(eval) = record.eval_loss {
            let right =
                record.eval_accuracy.map_or(String::new(), |share| format!(", {} right", percent(share)));
            self.say(&format!("step {}: held-out loss {eval:.4}{right}", record.step));
        }
        match &self.bar {
            Some(bar) => {
                bar.set_position(record.step);
                bar.set_message(line);
            }
            None => {
                let due = self.last_line.is_none_or(|at| at.elapsed() >= LINE_EVERY);
                if due || record.step == self.steps {
                    self.say(&line);
                    self.last_line = Some(Instant::now());
                }
            }
        }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

fn step_line(record: &StepRecord, steps: u64, score: f64, left_seconds: f64) -> String {
    // Played devices have no rate to be measured against.
    let mfu =
        record.mfu.values().next().map_or(String::new(), |mfu| format!("{:.0}% of peak  ", 100.0 * mfu));
    let memory = record.memory_bytes.values().sum();
    let (right, unit) = match record.accuracy {
        Some(share) => (format!("  {} right", percent(share)), "images/s"),
        None => (String::new(), "tok/s"),
    };
    let norm = match record.grad_norm {
        Some(norm) => format!("norm {norm:.3}"),
        None => "overflow: skipped".into(),
    };
    format!(
        "step {}/{steps}  loss {:.4} (z {score:+.1}){right}  {norm}  lr {:.2e}  {} {unit}  {mfu}{}  ETA {}",
        record.step,
        record.loss,
        record.lr,
        short(record.tokens_per_s),
        bytes_text(memory),
        duration_text(left_seconds)
    )
}
