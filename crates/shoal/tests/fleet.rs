//! Plans for a fleet, and their steps on a virtual clock.

mod common;

use std::fs;

use serde_json::Value;

use common::{Folder, JOB, Outcome};

const FLEET: &str = r#"
[[node]]
name = "a"
host_memory = "64 GiB"
network = "10 Gbit/s"
devices = [{ kind = "A10G", count = 2, price = 1.2 }, { kind = "V100", price = 0.9 }]

[[node]]
name = "b"
host_memory = "64 GiB"
network = "10 Gbit/s"
devices = [{ kind = "L4", count = 2, price = 0.7 }]
"#;

fn folder() -> Folder {
    let folder = Folder::with_job(&JOB.replace("global_batch = 4", "global_batch = 16"));
    folder.write("fleet.toml", FLEET);
    folder
}

fn plan(folder: &Folder, arguments: &[&str]) -> Outcome {
    folder.shoal(&[&["plan", "job.toml", "--fleet", "fleet.toml"], arguments].concat())
}

fn simulate(folder: &Folder, arguments: &[&str]) -> Outcome {
    folder.shoal(&[&["simulate", "job.toml", "--fleet", "fleet.toml"], arguments].concat())
}

fn json(outcome: Outcome) -> Value {
    serde_json::from_str(&outcome.succeeds().stdout).unwrap()
}

#[test]
fn a_plan_for_a_fleet_is_written_and_simulated() {
    let folder = folder();
    let planned = json(plan(&folder, &["--json", "--table", "plan.json", "--program", "programs.json"]));
    let programs: Value =
        serde_json::from_str(&fs::read_to_string(folder.join("programs.json")).unwrap()).unwrap();
    assert_eq!(programs.as_array().unwrap().len(), 5);
    let played = json(simulate(&folder, &["--json", "--table", "plan.json", "--picture", "step.svg"]));
    assert_eq!(planned["plan_id"], played["plan_id"]);
    assert_eq!(planned["step_seconds"], played["step_seconds"]);
    assert_eq!(played["devices"].as_array().unwrap().len(), 5);
    let hourly = 2.0 * 1.2 + 0.9 + 2.0 * 0.7;
    let dollars = played["step_seconds"].as_f64().unwrap() * hourly / 3600.0;
    assert!((played["dollars_per_step"].as_f64().unwrap() / dollars - 1.0).abs() < 1e-9);
    let picture = fs::read_to_string(folder.join("step.svg")).unwrap();
    assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>") && picture.contains("a:0"));
}

#[test]
fn slowness_makes_a_step_longer_and_repeats() {
    let folder = folder();
    plan(&folder, &["--table", "plan.json"]).succeeds();
    let take = |arguments: &[&str]| {
        let played = json(simulate(&folder, &[&["--json", "--table", "plan.json"], arguments].concat()));
        played["step_seconds"].as_f64().unwrap()
    };
    let (steady, slow) = (take(&[]), take(&["--jitter", "0.5"]));
    assert!(steady < slow && slow < 1.6 * steady, "{steady} {slow}");
    assert_eq!(slow, take(&["--jitter", "0.5", "--seed", "0"]));
    assert_ne!(slow, take(&["--jitter", "0.5", "--seed", "1"]));
}

#[test]
fn what_is_wrong_is_named() {
    let folder = folder();
    folder.shoal(&["simulate", "job.toml"]).fails(&["no fleet"], "--fleet");
    plan(&folder, &["--shape", "oblong"]).fails(&["oblong"], "mixed");
    simulate(&folder, &["--jitter=-1"]).fails(&["jitter"], "leave it out");
    folder.write("plan.json", "{}");
    simulate(&folder, &["--table", "plan.json"]).fails(&["plan.json"], "shoal plan");
    plan(&folder, &["--table", "plan.json"]).succeeds();
    folder.write("fleet.toml", FLEET.replace("count = 2, price = 0.7", "count = 1"));
    simulate(&folder, &["--table", "plan.json"]).fails(&["5 devices", "4"], "the fleet");
    folder.write("fleet.toml", FLEET.replace("A10G", "A10Q"));
    plan(&folder, &[]).fails(&["fleet.toml", "A10Q"], "did you mean A10");
    folder.write("fleet.toml", FLEET.replace("\"A10G\",", "\"A10G\", memory = \"600 MiB\","));
    plan(&folder, &["--set", "model.preset=gpt2-1.5b"]).fails(&["no plan"], "add devices");
}

#[test]
fn a_run_over_a_trace_is_accounted_for() {
    let folder = folder();
    folder.write("trace.csv", "0,3\n600,2\n1200,4\n1800,1\n2400,0\n");
    let reports = json(simulate(&folder, &["--json", "--trace", "trace.csv"]));
    let steps = |way: &str| reports[way]["steps"].as_f64().unwrap();
    assert!(steps("state moves") > steps("started again") && steps("started again") > 0.0, "{reports}");
    let spent = reports["state moves"]["spent"].as_object().unwrap();
    let seconds: f64 = spent.values().map(|part| part.as_f64().unwrap()).sum();
    // Three devices a machine.
    let machine_seconds = 600.0 * (3 + 2 + 4 + 1) as f64;
    assert!((seconds / (3.0 * machine_seconds) - 1.0).abs() < 0.01, "{spent:?}");
    folder.write("trace.csv", "0,3\nsoon,2\n");
    simulate(&folder, &["--trace", "trace.csv"]).fails(&["trace.csv", "2"], "");
}

#[test]
fn a_folder_without_published_data_is_refused() {
    let folder = folder();
    folder.shoal(&["validate", "."]).fails(&["none of", "cephalo", "published_times.csv"], "folder");
    folder.write("cephalo/nothing.json", "{}");
    folder.shoal(&["validate", "."]).fails(&["cephalo"], "");
}
