//! Predicted steps beside measured ones, in the lab: plans of every shape on fleets of one to eight played devices, on two
//! real workers of this machine, and on two that share one of its cores.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{cargo, root};

/// Name, kinds of devices in turn, how many, network, latency, memory (which decides how many are needed), batch, shapes.
type Fleet = (
    &'static str,
    &'static [&'static str],
    usize,
    &'static str,
    &'static str,
    &'static str,
    usize,
    &'static [&'static str],
);

const FLEETS: [Fleet; 8] = [
    ("two", &["V100"], 2, "10 Gbit/s", "10 us", "627 MiB", 16, &["pipeline", "sharded", "mixed"]),
    ("three", &["V100", "T4"], 3, "25 Gbit/s", "10 us", "627 MiB", 16, &["pipeline", "sharded", "mixed"]),
    ("four", &["V100", "A10G"], 4, "25 Gbit/s", "10 us", "627 MiB", 16, &["pipeline", "sharded", "mixed"]),
    ("six", &["T4"], 6, "10 Gbit/s", "5 us", "627 MiB", 16, &["pipeline", "mixed"]),
    ("eight", &["V100", "T4"], 8, "100 Gbit/s", "5 us", "627 MiB", 16, &["pipeline", "mixed"]),
    ("fast four", &["V100"], 4, "100 Gbit/s", "1 us", "2 GiB", 64, &["burst", "sharded", "pipeline"]),
    ("fast eight", &["V100"], 8, "100 Gbit/s", "1 us", "2 GiB", 64, &["burst", "sharded"]),
    ("one", &["V100", "T4"], 1, "10 Gbit/s", "10 us", "627 MiB", 16, &["spilled", "pipeline"]),
];

const CONFIG: &str = r#"{"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 8, "n_head": 4,
"n_positions": 128, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}"#;

const JOB: &str = r#"name = "lab"
[model]
from = "model"
init = "random"
[data]
train = "corpus.txt"
sequence = 64
[train]
steps = 12
optimizer = { kind = "adamw", lr = 3e-3, clip_norm = 1.0 }
[checkpoint]
every = "1000 steps"
"#;

fn fleet((_, kinds, count, network, latency, memory, ..): &Fleet) -> String {
    let node = |number: usize| {
        let kind = kinds[number % kinds.len()];
        format!(
            "[[node]]\nname = \"n{number}\"\nhost_memory = \"16 GiB\"\nnetwork = \"{network}\"\nlatency = \"{latency}\"\n\
             devices = [{{ kind = \"{kind}\", memory = \"{memory}\" }}]\n"
        )
    };
    (0..*count).map(node).collect()
}

/// A number of a line of JSON.
pub fn number(text: &str, key: &str) -> Option<f64> {
    let rest = text.split_once(&format!("\"{key}\":"))?.1;
    rest.split([',', '}']).next()?.parse().ok()
}

pub fn build() -> Result<(), String> {
    cargo(&["build", "--release", "--package", "shoal"])
}

/// A folder with a job; what an earlier time left there would be resumed.
pub fn folder(name: &str, job: &str) -> Result<PathBuf, String> {
    let folder = root().join("target").join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(folder.join("model")).map_err(said(&folder))?;
    fs::write(folder.join("model/config.json"), CONFIG).map_err(said(&folder))?;
    fs::write(folder.join("job.toml"), job).map_err(said(&folder))?;
    let text: String =
        (0..4000).map(|line| format!("{line}: the tide and the {} boats\n", line * 7)).collect();
    fs::write(folder.join("corpus.txt"), text).map_err(said(&folder))?;
    Ok(folder)
}

pub fn said(folder: &Path) -> impl Fn(std::io::Error) -> String {
    move |error| format!("{}: {error}", folder.display())
}

pub fn print_head() {
    println!(
        "{:<12} {:<13} {:>7} {:>12} {:>12} {:>8}  memory",
        "fleet", "shape", "devices", "predicted", "measured", "off"
    );
}

pub fn print_mean(off: &[f64]) {
    let mean = off.iter().map(|off| off.abs()).sum::<f64>() / off.len() as f64;
    println!("{} plans, off by {:.1} % on average", off.len(), 100.0 * mean);
}

pub fn bench() -> Result<(), String> {
    build()?;
    let folder = folder("lab", JOB)?;
    print_head();
    let mut off = Vec::new();
    for row in &FLEETS {
        let (name, .., batch, shapes) = row;
        fs::write(folder.join("fleet.toml"), fleet(row)).map_err(said(&folder))?;
        for shape in *shapes {
            let batch = format!("train.global_batch={batch}");
            off.push(one(&folder, name, shape, &["--paced", "--set", &batch])?);
        }
    }
    print_mean(&off);
    Ok(())
}

const WORKERS_FLEET: &str = r#"[[node]]
name = "worker"
count = 2
devices = [{ kind = "CPU", memory = "4 GiB" }]
host_memory = "4 GiB"
network = "10 Gbit/s"
"#;

const WORKERS_JOB: &str = r#"name = "workers"
[model]
preset = "gpt2-mini"
[data]
train = "corpus.txt"
sequence = 64
[train]
global_batch = 8
steps = 40
[checkpoint]
every = "1000 steps"
"#;

/// Two real workers, each with half of the cores, by a profile that is measured first.
pub fn workers() -> Result<(), String> {
    build()?;
    let folder = folder("workers", WORKERS_JOB)?;
    fs::write(folder.join("fleet.toml"), WORKERS_FLEET).map_err(said(&folder))?;
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get() / 2).max(1).to_string();
    profile(&folder, EVERYWHERE, &["--threads", &threads])?;
    print_head();
    let mut off = Vec::new();
    for (name, links) in [("10 Gbit/s", None), ("unshaped", Some("--unshaped"))] {
        for shape in ["pipeline", "data-parallel", "sharded"] {
            let usual = ["--plain", "--profile", "profile.json"];
            let arguments: Vec<&str> = usual.into_iter().chain(links).collect();
            off.push(one(&folder, name, shape, &arguments)?);
        }
    }
    print_mean(&off);
    on_one_core(&folder)
}

/// Programs before a command, which decide where it runs.
pub type Where = &'static [&'static str];
pub const EVERYWHERE: Where = &[];
const ONE_CORE: Where = &["taskset", "--cpu-list", "0"];

fn shoal(place: Where) -> Command {
    let binary = root().join("target/release/shoal");
    match place {
        [] => Command::new(binary),
        [program, arguments @ ..] => {
            let mut command = Command::new(program);
            command.args(arguments).arg(binary);
            command
        }
    }
}

fn profile(folder: &Path, place: Where, arguments: &[&str]) -> Result<(), String> {
    let mut profile = shoal(place);
    profile.args(["profile", "gpt2-mini", "--sequence", "64", "--device", "cpu", "--samples", "1,2,4,8"]);
    match profile.args(arguments).current_dir(folder).status() {
        Ok(status) if status.success() => Ok(()),
        _ => Err("shoal profile failed".to_owned()),
    }
}

/// Samples of the batch of eight that the first of two workers computes; the other has the rest.
const UNEVEN: [usize; 4] = [4, 5, 6, 7];

/// Two real workers that share a core, and compute by turns: each is twice as quick while the other rests. Where they have unequal
/// parts of the batch one rests for long.
fn on_one_core(folder: &Path) -> Result<(), String> {
    profile(folder, ONE_CORE, &["--threads", "1", "--neighbours", "1", "--out", "core.json"])?;
    let usual = ["--plain", "--unshaped", "--profile", "core.json"];
    print_head();
    let mut off = vec![beside(folder, ONE_CORE, "one core", "pipeline", &["--shape", "pipeline"], &usual)?];
    let mut plan = shoal(EVERYWHERE);
    plan.args(["plan", "job.toml", "--fleet", "fleet.toml", "--survive", "0", "--shape", "data-parallel"]);
    let planned = plan.args(["--table", "even.json"]).current_dir(folder).output();
    if !planned.is_ok_and(|output| output.status.success()) {
        return Err("shoal plan failed".to_owned());
    }
    let text = fs::read_to_string(folder.join("even.json")).map_err(said(folder))?;
    for first in UNEVEN {
        let mut table: serde_json::Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        for row in table["layers"].as_array_mut().into_iter().flatten() {
            row["compute"][0]["micro_batches"] = serde_json::json!([[0, first]]);
            row["compute"][1]["micro_batches"] = serde_json::json!([[first, 8]]);
        }
        fs::write(folder.join("uneven.json"), table.to_string()).map_err(said(folder))?;
        let shape = format!("{first} and {}", 8 - first);
        off.push(beside(folder, ONE_CORE, "one core", &shape, &["--table", "uneven.json"], &usual)?);
    }
    print_mean(&off);
    Ok(())
}

fn one(folder: &Path, name: &str, shape: &str, arguments: &[&str]) -> Result<f64, String> {
    beside(folder, EVERYWHERE, name, shape, &["--shape", shape], arguments)
}

/// Runs a plan in the lab and prints what it took beside what was predicted; returns how far that was off.
pub fn beside(
    folder: &Path,
    place: Where,
    name: &str,
    shape: &str,
    planned: &[&str],
    arguments: &[&str],
) -> Result<f64, String> {
    let run = format!("checkpoint.to=runs/{name}-{shape}").replace(' ', "-").replace("/s", "-s");
    let output = shoal(place)
        .args(["lab", "fleet.toml", "job.toml", "--json", "--survive", "0", "--set", &run])
        .args(planned)
        .args(arguments)
        .current_dir(folder)
        .output()
        .map_err(|error| format!("shoal lab: {error}"))?;
    let told = String::from_utf8_lossy(&output.stdout);
    let failed = || format!("{name}, {shape}: {}", String::from_utf8_lossy(&output.stderr));
    let find = |key: &str| number(&told, key).ok_or_else(failed);
    let (predicted, measured, off) =
        (find("predicted_seconds")?, find("measured_seconds")?, find("prediction_off")?);
    let bytes = |key: &str| -> Vec<f64> {
        told.split(&format!("\"{key}\":"))
            .skip(1)
            .filter_map(|rest| rest.split([',', '}']).next()?.parse().ok())
            .collect()
    };
    let (counted, forecast) = (bytes("counted_bytes"), bytes("predicted_bytes"));
    let within = counted.iter().zip(&forecast).all(|(counted, forecast)| counted <= forecast);
    println!(
        "{name:<12} {shape:<13} {:>7} {:>9.1} ms {:>9.1} ms {:>+6.1} %  {}",
        counted.len(),
        1e3 * predicted,
        1e3 * measured,
        100.0 * off,
        if within { "within its forecast" } else { "PAST ITS FORECAST" }
    );
    Ok(off)
}
