//! A fleet in a box: real processes that train together, and what becomes of them when one fails.

mod common;

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use shoal_kernels::CudaDevice;

use common::{Folder, JOB, Outcome, column, metrics};

fn fleet(devices: usize) -> String {
    let node = |number: usize| {
        format!(
            "[[node]]\nname = \"n{number}\"\nhost_memory = \"4 GiB\"\nnetwork = \"10 Gbit/s\"\n\
             devices = [{{ kind = \"V100\", memory = \"1 GiB\", price = 1.0 }}]\n"
        )
    };
    (0..devices).map(node).collect()
}

fn folder(devices: usize) -> Folder {
    let folder = Folder::with_job(&JOB.replace("global_batch = 4", "global_batch = 8"));
    folder.write("fleet.toml", fleet(devices));
    folder
}

fn lab(folder: &Folder, arguments: &[&str]) -> Outcome {
    folder.shoal(&[&["lab", "fleet.toml", "job.toml", "--stretch", "1", "--json"], arguments].concat())
}

fn json(outcome: Outcome) -> Value {
    serde_json::from_str(&outcome.succeeds().stdout).unwrap()
}

fn losses(folder: &Folder, run: &str) -> Vec<f64> {
    column(&metrics(&folder.join(run)), "loss")
}

#[test]
fn processes_train_what_one_device_trains() {
    let folder = folder(3);
    folder
        .shoal(&["train", "job.toml", "--set", "train.steps=6", "--set", "checkpoint.to=alone", "--json"])
        .succeeds();
    let alone = losses(&folder, "alone");
    // All with mirrors: one each, unless two are asked for.
    for (shape, survive, options) in [
        ("pipeline", "2", &[][..]),
        ("sharded", "1", &["--plain"]),
        ("mixed", "1", &["--record", "trace.json"]),
    ] {
        let run = format!("checkpoint.to={shape}");
        let table = format!("{shape}.json");
        let plan = ["plan", "job.toml", "--fleet", "fleet.toml", "--shape", shape, "--table", &table];
        folder.shoal(&[&plan[..], &["--survive", survive]].concat()).succeeds();
        let told = json(lab(
            &folder,
            &[&["--set", "train.steps=6", "--set", &run, "--table", &table], options].concat(),
        ));
        assert_eq!((told["steps"].as_u64(), told["finished"].as_bool()), (Some(6), Some(true)), "{shape}");
        let devices = told["devices"].as_array().unwrap();
        assert!(shape != "mixed" || devices.len() == 3, "{shape}: {devices:?}");
        for device in devices {
            assert!(
                device["counted_bytes"].as_u64() <= device["predicted_bytes"].as_u64(),
                "{shape}: {device}"
            );
        }
        for (step, (loss, alone)) in losses(&folder, shape).iter().zip(&alone).enumerate() {
            assert!((loss / alone - 1.0).abs() < 1e-5, "{shape}: step {step}: {loss}, alone {alone}");
        }
    }
    let against =
        ["simulate", "job.toml", "--fleet", "fleet.toml", "--table", "mixed.json", "--against", "trace.json"];
    let compared = json(folder.shoal(&[&against[..], &["--json"]].concat()));
    assert!(compared["measured_seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn a_run_goes_on_from_one_fleet_to_another() {
    let folder = folder(2);
    let steps = ["--set", "train.steps=6"];
    folder
        .shoal(&[&["train", "job.toml", "--set", "checkpoint.to=alone", "--json"], &steps[..]].concat())
        .succeeds();
    folder
        .shoal(&["plan", "job.toml", "--fleet", "fleet.toml", "--shape", "mixed", "--table", "two.json"])
        .succeeds();
    let run = ["--set", "checkpoint.to=moved"];
    let told = json(lab(&folder, &[&steps[..], &run, &["--stop-at", "3", "--table", "two.json"]].concat()));
    assert_eq!((told["steps"].as_u64(), told["finished"].as_bool()), (Some(3), Some(false)));
    folder.shoal(&[&["train", "job.toml", "--json"], &steps[..], &run].concat()).succeeds();
    for (loss, alone) in losses(&folder, "moved").iter().zip(&losses(&folder, "alone")) {
        assert!((loss / alone - 1.0).abs() < 1e-5, "{loss}, alone {alone}");
    }
}

/// The processes that another started.
fn children(of: u32) -> Vec<u32> {
    let path = format!("/proc/{of}/task/{of}/children");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().map(|id| id.parse().unwrap()).collect()
}

fn signal(name: &str, process: u32) {
    let status = Command::new("kill").args([name, &process.to_string()]).status().unwrap();
    assert!(status.success());
}

/// Does something to a worker in the middle of its work: the lab ends in time, and names who was lost.
fn loses_a_worker(how: &str, names: &[&str]) {
    let folder = folder(3);
    folder
        .shoal(&["plan", "job.toml", "--fleet", "fleet.toml", "--shape", "mixed", "--table", "t.json"])
        .succeeds();
    let command =
        ["lab", "fleet.toml", "job.toml", "--table", "t.json", "--deadline", "3", "--stretch", "50"];
    let mut lab = folder.start(&[&command[..], &["--set", "train.steps=100000"]].concat());
    lab.wait_until("some steps", || {
        let lines = std::fs::read_to_string(folder.join("run").join("metrics.jsonl"));
        lines.is_ok_and(|lines| lines.lines().count() > 3)
    });
    let workers = children(lab.id());
    assert_eq!(workers.len(), 3);
    let began = Instant::now();
    signal(how, workers[1]);
    let told = lab.wait();
    // The deadline, what is granted beyond it, and a busy machine.
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    told.fails(names, "");
    for worker in workers {
        assert!(!std::path::Path::new(&format!("/proc/{worker}")).exists(), "worker {worker} is left behind");
    }
}

#[test]
fn a_worker_that_is_killed_is_named_and_nobody_hangs() {
    loses_a_worker("-KILL", &["n1:0"]);
}

#[test]
fn a_worker_that_freezes_is_named_and_nobody_hangs() {
    loses_a_worker("-STOP", &["worker 1", "is lost"]);
}

/// Where every worker has all of the state, the loss of one costs no step that was done: the first saves what it has, and
/// the run goes on from there as if nothing had happened.
#[test]
fn what_survives_whole_is_saved_at_the_step_of_the_loss() {
    let folder = folder(3);
    let shape = ["--shape", "sharded", "--table", "sharded.json"];
    folder.shoal(&[&["plan", "job.toml", "--fleet", "fleet.toml"], &shape[..]].concat()).succeeds();
    let text = std::fs::read_to_string(folder.join("sharded.json")).unwrap();
    let mut table: Value = serde_json::from_str(&text).unwrap();
    for row in table["tensors"].as_array_mut().unwrap() {
        let slice = serde_json::json!([0, row["elements"]]);
        let held = (0..3).map(|device| serde_json::json!({"holder": {"device": device}, "slice": slice}));
        row["gradient"] = held.collect();
        row["optimizer"] = row["gradient"].clone();
    }
    folder.write("replicated.json", table.to_string());
    let command = ["lab", "fleet.toml", "job.toml", "--table", "replicated.json", "--deadline", "3"];
    let command = [&command[..], &["--stretch", "1", "--set", "train.steps=100000"]].concat();
    let mut lost = folder.start(&[&command[..], &["--set", "checkpoint.to=lost"]].concat());
    lost.wait_until("some steps", || {
        let lines = std::fs::read_to_string(folder.join("lost").join("metrics.jsonl"));
        lines.is_ok_and(|lines| lines.lines().count() > 5)
    });
    signal("-KILL", children(lost.id())[2]);
    lost.wait().fails(&["n2:0"], "");
    // Every line that was written is of a step that is saved.
    let steps = metrics(&folder.join("lost")).len();
    let saved = common::checkpoint_of(&folder.join("lost"), steps as u64);
    assert!(saved.is_dir(), "{}", saved.display());

    let stop_at = (steps + 2).to_string();
    let resume = ["--set", "checkpoint.to=lost", "--stop-at", &stop_at, "--json"];
    assert_eq!(
        json(folder.shoal(&[&command[..], &resume].concat()))["steps"].as_u64(),
        Some(steps as u64 + 2)
    );
    let whole = ["--set", "checkpoint.to=whole", "--stop-at", &stop_at, "--json"];
    json(folder.shoal(&[&command[..], &whole].concat()));
    assert_eq!(losses(&folder, "lost"), losses(&folder, "whole"));
}

/// The first half of the layers computed by one device of each node, the rest by the other: two rings add up gradients over
/// the same interfaces.
fn two_rings(table: &mut Value) {
    let halves = [[0, 2], [1, 3]];
    let rows = table["layers"].as_array_mut().unwrap();
    let blocks = rows.len() - 2;
    for (number, row) in rows.iter_mut().enumerate() {
        let [one, other] = halves[usize::from(number > blocks / 2)];
        let part = |device: usize, from: usize| serde_json::json!({"device": device, "micro_batches": [[from, from + 4]], "activations": "keep"});
        row["compute"] = serde_json::json!([part(one, 0), part(other, 4)]);
    }
    for row in table["tensors"].as_array_mut().unwrap() {
        let name = row["tensor"].as_str().unwrap();
        let block = name.split_once("h.").and_then(|(_, rest)| rest.split('.').next()?.parse::<usize>().ok());
        let devices = match block {
            Some(block) => halves[usize::from(block >= blocks / 2)].to_vec(),
            None if name.contains("wpe") => halves[0].to_vec(),
            None if name.contains("ln_f") => halves[1].to_vec(),
            // The first and the last layer have it in common.
            None => vec![0, 1, 2, 3],
        };
        let slice = serde_json::json!([0, row["elements"]]);
        let held =
            devices.iter().map(|device| serde_json::json!({"holder": {"device": device}, "slice": slice}));
        row["gradient"] = held.collect();
        row["optimizer"] = row["gradient"].clone();
        let copies =
            devices.iter().map(|device| serde_json::json!({"device": device, "residence": "resident"}));
        row["compute_copies"] = copies.collect();
    }
}

#[test]
fn devices_of_a_node_have_its_interface_in_common() {
    const BYTES_PER_S: f64 = 2e6;
    let folder = folder(2);
    let text = fleet(2).replace("10 Gbit/s", "16 Mbit/s").replace("price = 1.0", "count = 2");
    folder.write("fleet.toml", text);
    let plan = ["plan", "job.toml", "--fleet", "fleet.toml", "--survive", "0", "--shape", "data-parallel"];
    folder.shoal(&[&plan[..], &["--table", "even.json"]].concat()).succeeds();
    let text = std::fs::read_to_string(folder.join("even.json")).unwrap();
    let mut table: Value = serde_json::from_str(&text).unwrap();
    two_rings(&mut table);
    table["order"] = "varuna".into();
    folder.write("rings.json", table.to_string());
    let told = json(lab(&folder, &["--paced", "--table", "rings.json", "--set", "train.steps=5"]));
    // A ring of two sends half of each gradient and half of each sum either way.
    let tensors = table["tensors"].as_array().unwrap();
    let of_rings = tensors.iter().filter(|row| row["gradient"].as_array().unwrap().len() == 2);
    let elements: u64 = of_rings.map(|row| row["elements"].as_u64().unwrap()).sum();
    let (measured, least) = (told["measured_seconds"].as_f64().unwrap(), 4.0 * elements as f64 / BYTES_PER_S);
    assert!(measured > 0.98 * least, "{measured} s, where {least} s pass the interface");
}

#[test]
fn what_a_lab_cannot_do_it_says() {
    let folder = folder(2);
    let halves = lab(&folder, &["--set", "train.precision=bf16"]);
    halves.fails(&["n0:0: the lab's processors compute in fp32, the job in bf16"], "train.precision=fp32");
    let table = lab(&folder, &["--table", "missing.json"]);
    table.fails(&["missing.json"], "check that the path exists");
}

#[test]
fn shares_of_a_gpu_are_real_or_played_but_never_more_than_it() {
    let folder = folder(3);
    let share = |share: f64| {
        let device = format!("{{ kind = \"H200\", share = {share}, memory");
        folder.write("fleet.toml", fleet(3).replace("{ kind = \"V100\", memory", &device));
    };
    share(0.25);
    let told = json(lab(&folder, &["--paced", "--set", "train.steps=3", "--shape", "mixed"]));
    assert_eq!(told["steps"].as_u64(), Some(3));
    let speeds = told["share_speeds"].as_array().unwrap();
    assert_eq!(speeds, &["25 % of H200: 0.26 of H200 as estimated"]);
    share(0.6);
    lab(&folder, &["--shape", "mixed"]).fails(&["n0:0, n1:0, n2:0", "180 % of the one GPU"], "--paced");
    if CudaDevice::count().is_ok_and(|count| count > 0) {
        return;
    }
    share(0.25);
    lab(&folder, &["--shape", "mixed"])
        .fails(&["n0:0 is a share of a GPU", "none can be used here"], "shoal doctor");
}
