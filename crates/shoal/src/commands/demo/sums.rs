//! What the demo trains: a small model learns to add. It sees most of the sums of two two-digit numbers, and is then
//! asked the ones that it has never seen.

use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, TensorView};
use shoal_engine::generate::{Generator, likeliest};
use shoal_kernels::random::fold;
use shoal_model::{hugging_face, presets};

use crate::assemble::LocalDevice;
use crate::error::{CliError, Result};
use crate::model_folder::ModelFolder;

/// Every sum is written as "12+34=046": so many characters, so many of them the answer.
const LENGTH: usize = 9;
const ANSWER: usize = 3;
const SEQUENCE: usize = LENGTH - 1;
/// One sum in this many is held out.
const HELD_OUT: u64 = 10;

/// A sum as the model sees it.
pub fn written(a: u64, b: u64) -> String {
    format!("{a}+{b}={:03}", a + b)
}

/// The two numbers to add.
pub type Sum = (u64, u64);

/// All sums of two-digit numbers: (training, held out).
pub fn sums() -> (Vec<Sum>, Vec<Sum>) {
    let all = (10..100).flat_map(|a| (10..100).map(move |b| (a, b)));
    all.partition(|(a, b)| !fold(fold(7, *a), *b).is_multiple_of(HELD_OUT))
}

/// Writes data, model and job into the folder; gives the job's file.
pub fn write(dir: &Path, training: &[Sum], held_out: &[Sum]) -> Result<PathBuf> {
    write_rows(&dir.join("train.safetensors"), training)?;
    write_rows(&dir.join("held-out.safetensors"), held_out)?;
    let config = presets::gpt2(256, 128, 2, 4, SEQUENCE);
    let text = serde_json::to_string_pretty(&hugging_face::write(&config, None)).unwrap_or_default();
    let config_path = dir.join("config.json");
    std::fs::write(&config_path, text).map_err(CliError::at(&config_path))?;
    let job_path = dir.join("job.toml");
    std::fs::write(&job_path, JOB).map_err(CliError::at(&job_path))?;
    Ok(job_path)
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
global_batch = 48
steps = 600
seed = 0
optimizer = { kind = "adamw", lr = 3e-3, betas = [0.9, 0.98], weight_decay = 0.1, clip_norm = 0.3 }
schedule = { kind = "cosine", warmup = 50, final = 0.05 }

[checkpoint]
to = "run"
every = "5m"

[eval]
data = "held-out.safetensors"
every = "100 steps"
"#;

/// An empty folder; one that holds anything but an earlier demo is left alone.
pub fn prepare_folder(dir: &Path) -> Result {
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

/// The answers to sums of a run's model, three characters each.
pub fn ask(run: &Path, sums: &[Sum]) -> Result<Vec<String>> {
    let model = ModelFolder::open(run, None)?;
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
