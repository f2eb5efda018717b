//! The same job on the processor and on a GPU: the same curve, and a checkpoint of one goes on on the other.
//! In half precision, an interrupted run ends in the bits of an undisturbed one where the job asks for that.
//! Without a GPU each test says that it was skipped.

mod common;

use common::{Folder, assert_same_files, checkpoint_of, column, corpus, metrics, timeless_metrics};
use shoal_kernels::CudaDevice;

const STEPS: u64 = 200;

fn job(train: &str) -> String {
    format!(
        r#"
[model]
preset = "llama-tiny"

[data]
train = "corpus.txt"
sequence = 64

[train]
global_batch = 8
steps = {STEPS}
seed = 4
{train}
optimizer = {{ lr = 2e-3, weight_decay = 0.1, clip_norm = 1.0 }}
schedule = {{ kind = "cosine", warmup = 10, final = 0.1 }}

[checkpoint]
to = "run"
every = "50 steps"
keep = 10

[eval]
data = "held-out.txt"
every = "100 steps"
"#
    )
}

fn folder(train: &str) -> Folder {
    let folder = Folder::with_job(&job(train));
    folder.write("held-out.txt", corpus(30));
    folder
}

fn has_gpu() -> bool {
    let found = CudaDevice::count().is_ok_and(|count| count > 0);
    if !found {
        eprintln!("skipped: no GPU on this machine");
    }
    found
}

/// Losses by step, held-out losses among them.
fn losses(folder: &Folder) -> Vec<f64> {
    let lines = metrics(&folder.join("run"));
    assert_eq!(lines.len() as u64, STEPS);
    let numbers = |line: &serde_json::Value| {
        [line["loss"].as_f64(), line["eval_loss"].as_f64()].into_iter().flatten().collect::<Vec<_>>()
    };
    lines.iter().flat_map(numbers).collect()
}

#[track_caller]
fn assert_close(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let apart = found.iter().zip(expected).map(|(a, b)| (a - b).abs() / b.abs());
    let worst =
        apart.fold(0.0, |worst: f64, next| if next.is_nan() { f64::INFINITY } else { worst.max(next) });
    assert!(worst <= tolerance, "{what}: losses differ by {worst:.1e}");
    eprintln!("{what}: {} losses differ by at most {worst:.1e}", found.len());
}

#[test]
fn a_gpu_trains_as_the_processor_does_and_each_resumes_the_other() {
    if !has_gpu() {
        return;
    }
    let on = |device: &str| format!("plan.device={device}");
    let run = |folder: &Folder, device: &str, stop_at: Option<&str>| {
        let (set, mut arguments) = (on(device), vec!["train", "job.toml", "--set"]);
        arguments.push(&set);
        arguments.extend(stop_at.iter().flat_map(|step| ["--stop-at", step]));
        folder.shoal(&arguments).succeeds();
    };
    let straight = ["cpu", "cuda"].map(|device| {
        let folder = folder("");
        run(&folder, device, None);
        losses(&folder)
    });
    assert_close("the GPU against the processor", &straight[1], &straight[0], 1e-3);
    for (first, then) in [("cuda", "cpu"), ("cpu", "cuda")] {
        let folder = folder("");
        run(&folder, first, Some("100"));
        run(&folder, then, None);
        assert_close(&format!("{first}, then {then}"), &losses(&folder), &straight[0], 1e-3);
    }
}

#[test]
fn half_precision_follows_the_curve_of_fp32() {
    if !has_gpu() {
        return;
    }
    let curve = |precision: &str| {
        let folder = folder(&format!("precision = \"{precision}\""));
        folder.shoal(&["train", "job.toml"]).succeeds();
        losses(&folder)
    };
    let exact = curve("fp32");
    for precision in ["tf32", "bf16", "fp16"] {
        // Rounding acts like a little noise on the gradient: the curves stay together, not the bits.
        assert_close(precision, &curve(precision), &exact, 3e-2);
    }
}

#[test]
fn an_interrupted_run_in_half_precision_ends_in_the_same_bits() {
    if !has_gpu() {
        return;
    }
    for precision in ["bf16", "fp16"] {
        let train = format!("precision = \"{precision}\"\ndeterministic = true");
        let (straight, stopped) = (folder(&train), folder(&train));
        straight.shoal(&["train", "job.toml"]).succeeds();
        for stop in ["30", "110"] {
            stopped.shoal(&["train", "job.toml", "--stop-at", stop]).succeeds();
        }
        stopped.shoal(&["train", "job.toml"]).succeeds();
        let (found, expected) =
            (timeless_metrics(&stopped.join("run")), timeless_metrics(&straight.join("run")));
        assert_eq!(found, expected, "{precision}");
        let last = |folder: &Folder| checkpoint_of(&folder.join("run"), STEPS);
        assert_same_files(&last(&stopped), &last(&straight));
        eprintln!("{precision}: {} lines and the last checkpoint are the same", found.len());
    }
}

/// Two shares of the GPU, a process each, train what the whole one trains.
#[test]
fn shares_of_the_gpu_train_together() {
    if !has_gpu() {
        return;
    }
    let kind = CudaDevice::probe(0).unwrap().0.model;
    if shoal_fleet::catalogue::find(&kind).is_none() {
        eprintln!("skipped: the catalogue does not know {kind}");
        return;
    }
    let places = std::env::var_os("PATH").unwrap_or_default();
    if !std::env::split_paths(&places).any(|place| place.join("nvidia-cuda-mps-control").exists()) {
        eprintln!("skipped: nvidia-cuda-mps-control is not here");
        return;
    }
    let folder = folder("precision = \"bf16\"\ndeterministic = true");
    let node = |number: usize| {
        format!(
            "[[node]]\nname = \"n{number}\"\nhost_memory = \"4 GiB\"\nnetwork = \"10 Gbit/s\"\n\
             devices = [{{ kind = \"{kind}\", share = 0.25, memory = \"4 GiB\" }}]\n"
        )
    };
    folder.write("fleet.toml", node(0) + &node(1));
    let steps = ["--set", "train.steps=10"];
    let alone = ["train", "job.toml", "--json", "--set", "checkpoint.to=alone"];
    folder.shoal(&[&alone[..], &steps].concat()).succeeds();
    for shape in ["sharded", "pipeline"] {
        let run = format!("checkpoint.to={shape}");
        let lab = ["lab", "fleet.toml", "job.toml", "--json", "--shape", shape, "--set", &run];
        let told = folder.shoal(&[&lab[..], &steps].concat()).succeeds();
        let told: serde_json::Value = serde_json::from_str(&told.stdout).unwrap();
        eprintln!("{shape}: {told}");
        assert_eq!((told["steps"].as_u64(), told["finished"].as_bool()), (Some(10), Some(true)), "{told}");
        for device in told["devices"].as_array().unwrap() {
            assert!(device["counted_bytes"].as_u64() <= device["predicted_bytes"].as_u64(), "{device}");
        }
        let [found, expected] = [shape, "alone"].map(|run| column(&metrics(&folder.join(run)), "loss"));
        // Other micro-batches are other products in halves, whose roundings are of some thousandths.
        assert_close(shape, &found, &expected, 1e-2);
    }
}
