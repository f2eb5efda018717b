//! `shoal demo`: real training here in under a minute, no download. A small model learns to add: it trains on
//! most of the sums of two two-digit numbers and is then asked the ones it has never seen.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;
use shoal_engine::generate::{Generator, likeliest};
use shoal_kernels::random::fold;
use shoal_model::{hugging_face, presets};

use crate::assemble::LocalDevice;
use crate::commands::train::train;
use crate::error::{CliError, Result};
use crate::job::{Job, duration_text};
use crate::model_folder::ModelFolder;

#[derive(clap::Args)]
pub struct Options {
    /// The folder for the demo's files; it is made anew
    #[arg(long, default_value = "shoal-demo")]
    dir: PathBuf,
    #[arg(long)]
    json: bool,
}

/// Every sum is written as "12+34=046": so many characters, so many of them the answer.
const LENGTH: usize = 9;
const ANSWER: usize = 3;
const SEQUENCE: usize = LENGTH - 1;
/// One sum in this many is held out.
const HELD_OUT: u64 = 10;
/// Sums shown at the end.
const SHOWN: usize = 8;

/// A sum as the model sees it.
fn written(a: u64, b: u64) -> String {
    format!("{a}+{b}={:03}", a + b)
}

/// The two numbers to add.
type Sum = (u64, u64);

/// All sums of two-digit numbers: (training, held out).
fn sums() -> (Vec<Sum>, Vec<Sum>) {
    let all = (10..100).flat_map(|a| (10..100).map(move |b| (a, b)));
    all.partition(|(a, b)| !fold(fold(7, *a), *b).is_multiple_of(HELD_OUT))
}

pub fn run(options: Options) -> Result {
    let dir = &options.dir;
    prepare_folder(dir)?;
    let (training, held_out) = sums();
    write_rows(&dir.join("train.safetensors"), &training)?;
    write_rows(&dir.join("held-out.safetensors"), &held_out)?;
    let config = presets::gpt2(256, 128, 2, 4, SEQUENCE);
    let text = serde_json::to_string_pretty(&hugging_face::write(&config, None)).unwrap_or_default();
    let config_path = dir.join("config.json");
    std::fs::write(&config_path, text).map_err(CliError::at(&config_path))?;
    let job_path = dir.join("job.toml");
    std::fs::write(&job_path, JOB).map_err(CliError::at(&job_path))?;
    if !options.json {
        eprintln!(
            "A small model learns to add two-digit numbers: {} sums to train on, {} held out.\n",
            training.len(),
            held_out.len()
        );
    }
    let job = Job::read(&job_path, &[])?;
    let summary = train(&job, None, None, options.json, &AtomicBool::new(false))?;
    let answers = ask(&job, &held_out)?;
    let right =
        answers.iter().zip(&held_out).filter(|(answer, (a, b))| **answer == written(*a, *b)[6..]).count();
    let share = right as f64 / held_out.len() as f64;
    if options.json {
        println!(
            "{}",
            json!({
                "held_out": held_out.len(), "right": right, "share": share, "loss": summary.loss,
                "eval_loss": summary.eval_loss, "steps": summary.steps, "seconds": summary.seconds,
            })
        );
        return Ok(());
    }
    println!("\nSums it has never seen:");
    for index in 0..SHOWN.min(held_out.len()) {
        let index = index * held_out.len() / SHOWN;
        let ((a, b), answer) = (held_out[index], &answers[index]);
        let answer = answer.trim_start_matches('0');
        let mark = if answer == (a + b).to_string() { "right" } else { "wrong" };
        println!("  {a} + {b} = {answer:<4} {mark}");
    }
    println!(
        "\n{right} of {} held-out sums right ({:.1}%) after {} of training.",
        held_out.len(),
        100.0 * share,
        duration_text(summary.seconds)
    );
    println!("The files are in {}; try: shoal train {}", dir.display(), job_path.display());
    Ok(())
}

const JOB: &str = r#"# What `shoal demo` trains: sums of two-digit numbers, one a row.
name = "demo"

[model]
from = "."
init = "random"

[data]
train = "train.safetensors"
tokenizer = "bytes"
sequence = 8
shuffle = true

[train]
global_batch = 256
steps = 500
seed = 0
optimizer = { kind = "adamw", lr = 3e-3, betas = [0.9, 0.98], weight_decay = 0.1, clip_norm = 1.0 }
schedule = { kind = "cosine", warmup = 50, final = 0.05 }

[checkpoint]
to = "run"
every = "5m"

[eval]
data = "held-out.safetensors"
every = "100 steps"
"#;

/// An empty folder; one that holds anything but an earlier demo is left alone.
fn prepare_folder(dir: &Path) -> Result {
    if dir.exists() {
        let ours = dir.join("train.safetensors").is_file() && dir.join("job.toml").is_file();
        let empty = std::fs::read_dir(dir).map_err(CliError::at(dir))?.next().is_none();
        if !ours && !empty {
            return Err(CliError::said(
                format!("{}: the folder is there and is not a demo's", dir.display()),
                "name another folder with --dir",
            ));
        }
        std::fs::remove_dir_all(dir).map_err(CliError::at(dir))?;
    }
    std::fs::create_dir_all(dir).map_err(CliError::at(dir))
}

/// Rows of tokens, and labels that count only where the answer stands.
fn write_rows(path: &Path, sums: &[Sum]) -> Result {
    let (mut tokens, mut labels) = (Vec::new(), Vec::new());
    for (a, b) in sums {
        let text = written(*a, *b);
        let characters: Vec<i32> = text.bytes().map(i32::from).collect();
        tokens.extend(&characters[..SEQUENCE]);
        labels.extend(std::iter::repeat_n(shoal_data::IGNORED, SEQUENCE - ANSWER));
        labels.extend(&characters[LENGTH - ANSWER..]);
    }
    let bytes = |values: &[i32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let (tokens, labels) = (bytes(&tokens), bytes(&labels));
    let shape = vec![sums.len(), SEQUENCE];
    let view = |data| TensorView::new(Dtype::I32, shape.clone(), data);
    let written =
        view(&tokens).and_then(|tokens| Ok((tokens, view(&labels)?))).and_then(|(tokens, labels)| {
            safetensors::serialize_to_file([("tokens", tokens), ("labels", labels)], None, path)
        });
    written.map_err(|error| {
        CliError::said(format!("{}: {error}", path.display()), "check that the folder can be written")
    })
}

/// The model's answers to sums, three characters each.
fn ask(job: &Job, sums: &[Sum]) -> Result<Vec<String>> {
    let model = ModelFolder::open(&job.run_folder, None)?;
    let chain = model.model.chain();
    let device = LocalDevice::new(None, None);
    let mut generator =
        Generator::new(&chain, SEQUENCE, device.threads, device.budget_bytes, |device, state| {
            model.fill(device, &chain, state)
        })?;
    let mut rows: Vec<Vec<i32>> = sums
        .iter()
        .map(|(a, b)| written(*a, *b).bytes().take(LENGTH - ANSWER).map(i32::from).collect())
        .collect();
    for _ in 0..ANSWER {
        let length = rows[0].len();
        let logits = generator.next_logits(&rows.concat(), length)?;
        for (row, logits) in rows.iter_mut().zip(logits.chunks(chain.vocabulary)) {
            row.push(likeliest(logits));
        }
    }
    let text = |row: &Vec<i32>| row[LENGTH - ANSWER..].iter().map(|id| *id as u8 as char).collect();
    Ok(rows.iter().map(text).collect())
}
