//! A fleet in a box that lives: a run over a spot trace, and one with a device that becomes slow. What is trained is tiny, and
//! what its layers last on a V100 is written down so that a step takes about as long as one of a large model: many machines
//! can then be played by few cores.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{cargo, root};

const CONFIG: &str = r#"{"model_type": "gpt2", "vocab_size": 256, "n_embd": 16, "n_layer": 6, "n_head": 2,
"n_positions": 64, "tie_word_embeddings": false, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}"#;

const JOB: &str = r#"name = "living"
[model]
from = "model"
init = "random"
[data]
train = "corpus.txt"
sequence = 16
[train]
global_batch = 48
steps = 100000
optimizer = { kind = "adamw", lr = 1e-4, clip_norm = 1.0 }
[checkpoint]
every = "auto"
"#;

/// Of one device each. A message of the tiny model takes on this network what one of the large model would on 10 Gbit/s; its
/// latency is what passing something on takes at least where two cores wake the threads of so many processes.
fn fleet(machines: usize) -> String {
    format!(
        "[[node]]\nname = \"p3\"\ncount = {machines}\ndevices = [{{ kind = \"V100\", price = 0.918, spot = true }}]\n\
         host_memory = \"61 GiB\"\nnetwork = \"1 MB/s\"\nlatency = \"500 us\"\n"
    )
}

/// A layer's row: its names, numbers as the model has them, and the seconds of one sample's forward.
type Row = (&'static str, u64, u64, u64, f64);

const BLOCKS: &str = r#""block 0", "block 1", "block 2", "block 3", "block 4", "block 5""#;
const ROWS: [Row; 3] = [
    (r#""embedding""#, 4352, 0, 1024, 0.02),
    (BLOCKS, 3280, 107_008, 1024, 1.0),
    (r#""head""#, 4128, 131_072, 0, 0.3),
];
/// What starting an instruction takes, beside its samples.
const START_SECONDS: f64 = 1e-3;

/// What the layers last, where one sample's forward through a block takes so long.
fn profile(block_seconds: f64) -> String {
    let curve = |sample_seconds: f64| {
        let samples = [1, 2, 4, 8, 16, 32, 64];
        let seconds = samples.map(|count| (START_SECONDS + f64::from(count) * sample_seconds).to_string());
        let samples = samples.map(|count| count.to_string());
        format!("{{\"samples\": [{}], \"seconds\": [{}]}}", samples.join(", "), seconds.join(", "))
    };
    let row = |(names, parameters, flops, bytes, share): Row| {
        format!(
            "{{\"layers\": [{names}], \"parameters\": {parameters}, \"forward_flops\": {flops}, \
             \"output_bytes\": {bytes}, \"forward\": {}, \"backward\": {}}}",
            curve(share * block_seconds),
            curve(2.0 * share * block_seconds)
        )
    };
    format!(
        "{{\"format\": 2, \"model\": \"living\", \"sequence\": 16, \"links\": [], \"devices\": [{{\"kind\": \"V100-16\", \
         \"device\": \"played\", \"precision\": \"fp32\", \"update_seconds_per_parameter\": 1e-7, \"layers\": [{}]}}]}}",
        ROWS.map(row).join(", ")
    )
}

/// Builds the binary and writes what it is given.
fn prepare(machines: usize, block_seconds: f64) -> Result<PathBuf, String> {
    cargo(&["build", "--release", "--package", "shoal"])?;
    let folder = root().join("target/living");
    let said = |error: std::io::Error| format!("{}: {error}", folder.display());
    // A run's folder serves once.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(folder.join("model")).map_err(said)?;
    fs::write(folder.join("model/config.json"), CONFIG).map_err(said)?;
    fs::write(folder.join("job.toml"), JOB).map_err(said)?;
    fs::write(folder.join("fleet.toml"), fleet(machines)).map_err(said)?;
    fs::write(folder.join("profile.json"), profile(block_seconds)).map_err(said)?;
    let text: String =
        (0..4000).map(|line| format!("{line}: the tide and the {} boats\n", line * 7)).collect();
    fs::write(folder.join("corpus.txt"), text).map_err(said)?;
    Ok(folder)
}

fn lab(folder: &Path, arguments: &[&str]) -> Result<(), String> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    let all =
        [&["lab", "fleet.toml", "job.toml", "--profile", "profile.json", "--plain"], arguments].concat();
    eprintln!("$ cd {} && shoal {}", folder.display(), all.join(" "));
    let status = Command::new(target.join("release/shoal"))
        .args(&all)
        .current_dir(folder)
        .status()
        .map_err(|error| format!("shoal lab: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("shoal lab: {status}")) }
}

/// Machines of a spot trace, twenty times faster; further words go to the lab.
pub fn trace(file: &str, more: &[&str]) -> Result<(), String> {
    let file = std::path::absolute(file).map_err(|error| format!("{file}: {error}"))?;
    let folder = prepare(32, 15e-3)?;
    lab(&folder, &[&["--trace", &file.to_string_lossy(), "--faster", "20"], more].concat())
}

/// One of four devices becomes three times slower.
pub fn slow() -> Result<(), String> {
    let folder = prepare(4, 4e-3)?;
    lab(&folder, &["--slow", "3"])
}
