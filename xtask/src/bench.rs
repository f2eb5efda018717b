//! Training speed on this machine's processor, beside PyTorch's from the same minutes: the two run in turn,
//! so that a busy neighbour or a warm processor hits both.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::{cargo, root};

/// (width, layers, heads, vocabulary, sequence, batch)
const SHAPES: [[usize; 6]; 3] =
    [[768, 12, 12, 50257, 256, 4], [512, 8, 8, 8192, 256, 8], [384, 6, 6, 256, 256, 16]];
/// Measurements of each side; the median is shown.
const ROUNDS: usize = 5;
/// A round lasts about this long.
const ROUND_SECONDS: f64 = 4.0;

/// One side of the comparison: a process that trains so many steps a line.
struct Side {
    child: Child,
    answers: BufReader<ChildStdout>,
}

impl Side {
    fn start(command: &mut Command) -> Result<Side, String> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{command:?}: {error}"))?;
        let answers = BufReader::new(child.stdout.take().ok_or("no output to read")?);
        Ok(Side { child, answers })
    }

    fn numbers(&mut self) -> Result<Vec<f64>, String> {
        let mut line = String::new();
        self.answers.read_line(&mut line).map_err(|error| error.to_string())?;
        let numbers: Vec<f64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        if numbers.is_empty() { Err("the process ended without an answer".into()) } else { Ok(numbers) }
    }

    /// Seconds that so many steps took.
    fn train(&mut self, steps: usize) -> Result<f64, String> {
        let stdin = self.child.stdin.as_mut().ok_or("no input to write")?;
        writeln!(stdin, "{steps}").map_err(|error| error.to_string())?;
        Ok(self.numbers()?[0])
    }

    /// Ends the process; its resident growth in bytes.
    fn finish(mut self) -> Result<f64, String> {
        drop(self.child.stdin.take());
        let growth = self.numbers()?[0];
        self.child.wait().map_err(|error| error.to_string())?;
        Ok(growth)
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A Python that has PyTorch.
fn python() -> Option<String> {
    let python = env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let probe = Command::new(&python).args(["-c", "import torch"]).stderr(Stdio::null()).status();
    probe.is_ok_and(|status| status.success()).then_some(python)
}

pub fn cpu() -> Result<(), String> {
    cargo(&["build", "--release", "--package", "shoal-engine", "--example", "train_step"])?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let python = python();
    if python.is_none() {
        eprintln!("no Python with PyTorch found: our figures alone (set PYTHON to name one)");
    }
    println!("f32, AdamW, clipping, {threads} threads; tokens a second, median of {ROUNDS}, the two in turn");
    println!(
        "{:<34} {:>10} {:>10} {:>7} {:>11} {:>11}",
        "width,layers,heads,vocab,seq,batch", "shoal", "PyTorch", "ratio", "shoal MiB", "PyTorch MiB"
    );
    for shape in SHAPES {
        let mut arguments: Vec<String> = shape.iter().map(usize::to_string).collect();
        arguments.push(threads.to_string());
        let program = root().join("target/release/examples/train_step");
        let ours = Side::start(Command::new(program).args(&arguments))?;
        let theirs = match &python {
            None => None,
            Some(python) => {
                let script = root().join("xtask/peer/train_step.py");
                Some(Side::start(Command::new(python).arg(script).args(&arguments))?)
            }
        };
        compare(shape, ours, theirs)?;
    }
    Ok(())
}

fn compare(shape: [usize; 6], mut ours: Side, mut theirs: Option<Side>) -> Result<(), String> {
    let tokens = (shape[4] * shape[5]) as f64;
    // The first step pays for memory and warm-up; the second says how many fill a round.
    ours.train(1)?;
    let steps = (ROUND_SECONDS / ours.train(1)?).ceil() as usize;
    if let Some(theirs) = &mut theirs {
        theirs.train(2)?;
    }
    let (mut our_rates, mut their_rates) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        our_rates.push(steps as f64 * tokens / ours.train(steps)?);
        if let Some(theirs) = &mut theirs {
            their_rates.push(steps as f64 * tokens / theirs.train(steps)?);
        }
    }
    let mib = |bytes: f64| format!("{:.0}", bytes / f64::from(1 << 20));
    let name = shape.map(|number| number.to_string()).join(",");
    let (our_rate, our_memory) = (median(our_rates), mib(ours.finish()?));
    match theirs {
        None => println!("{name:<34} {our_rate:>10.0} {:>10} {:>7} {our_memory:>11}", "-", "-"),
        Some(theirs) => {
            let (their_rate, their_memory) = (median(their_rates), mib(theirs.finish()?));
            println!(
                "{name:<34} {our_rate:>10.0} {their_rate:>10.0} {:>7.3} {our_memory:>11} {their_memory:>11}",
                our_rate / their_rate
            );
        }
    }
    Ok(())
}
