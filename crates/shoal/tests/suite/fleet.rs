//! Plans for a fleet, and their steps on a virtual clock.

use std::fs;

use serde_json::Value;

use crate::common::{Folder, JOB, Outcome};

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
    let played = json(simulate(&folder, &["--json", "--table", "plan.json", "--timeline", "step.svg"]));
    assert_eq!(planned["plan_id"], played["plan_id"]);
    assert_eq!(planned["step_seconds"], played["step_seconds"]);
    assert_eq!(played["devices"].as_array().unwrap().len(), 5);
    let hourly = 2.0 * 1.2 + 0.9 + 2.0 * 0.7;
    let dollars = played["step_seconds"].as_f64().unwrap() * hourly / 3600.0;
    assert!((played["dollars_per_step"].as_f64().unwrap() / dollars - 1.0).abs() < 1e-9);
    let drawn = fs::read_to_string(folder.join("step.svg")).unwrap();
    assert!(drawn.starts_with("<svg") && drawn.trim_end().ends_with("</svg>") && drawn.contains("a:0"));
    // What each bar is, where, from when to when.
    assert!(
        drawn.contains("(forward of layer ") && drawn.contains(", on ") && drawn.contains(", from "),
        "{drawn}"
    );
}

#[test]
fn a_timeline_is_a_drawing_or_a_page_by_its_name() {
    let folder = folder();
    simulate(&folder, &["--timeline", "step.html"]).succeeds();
    let page = fs::read_to_string(folder.join("step.html")).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.contains("<svg") && page.contains("</html>"));
    // The one address in it is the name of SVG's namespace, which nobody fetches.
    assert_eq!(page.matches("http").count(), page.matches("xmlns=\"http://www.w3.org/2000/svg\"").count());
    simulate(&folder, &["--timeline", "step.png"]).fails(&["step.png"], ".svg");
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
fn a_plan_says_why() {
    let folder = folder();
    let planned = json(plan(&folder, &["--json"]));
    let step = planned["step_seconds"].as_f64().unwrap();
    for device in planned["devices"].as_array().unwrap() {
        let parts = device["seconds"].as_object().unwrap().values().map(|part| part.as_f64().unwrap());
        assert!((parts.sum::<f64>() / step - 1.0).abs() < 1e-9, "{device}");
    }
    let seconds: Vec<f64> =
        planned["tried"].as_array().unwrap().iter().filter_map(|tried| tried["seconds"].as_f64()).collect();
    assert!(
        (planned["runner_up"]["slower"].as_f64().unwrap() - (seconds[1] / seconds[0] - 1.0)).abs() < 1e-9
    );
    let kinds: Vec<&str> =
        planned["one_more"].as_array().unwrap().iter().map(|more| more["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["A10G", "V100-16", "L4"]);
    let text = plan(&folder, &[]).succeeds().stdout;
    for said in ["bottleneck: ", "runner-up: ", "one more device", "host memory of a", "a thousand", "bubble"]
    {
        assert!(text.contains(said), "{said}: {text}");
    }
}

/// Mirrors are planned with, as many as job or command say, and refused where they cannot be had.
#[test]
fn state_is_on_as_many_machines_as_losses_ask_for() {
    let folder = folder();
    let survives = |arguments: &[&str]| {
        let planned = json(plan(&folder, &[&["--json", "--table", "plan.json"], arguments].concat()));
        let text = fs::read_to_string(folder.join("plan.json")).unwrap();
        let table: Value = serde_json::from_str(&text).unwrap();
        let machine = |held: &Value| {
            let device = held["holder"].as_object().unwrap().values().next().unwrap().as_u64().unwrap();
            usize::from(device >= 3)
        };
        // Of every slice, the machines that have it.
        let everywhere = table["tensors"].as_array().unwrap().iter().all(|row| {
            let held = row["optimizer"].as_array().unwrap();
            held.iter().all(|one| {
                let same = held.iter().filter(|other| other["slice"] == one["slice"]);
                same.map(machine).collect::<std::collections::BTreeSet<_>>().len() == 2
            })
        });
        (planned["survives"].as_u64().unwrap(), everywhere)
    };
    assert_eq!(survives(&[]), (1, true));
    assert_eq!(survives(&["--survive", "1"]), (1, true));
    assert_eq!(survives(&["--set", "plan.survive=1"]), (1, true));
    assert_eq!(survives(&["--survive", "0"]).0, 0);
    assert_eq!(survives(&["--survive", "1", "--set", "plan.survive=0"]), (1, true));
    plan(&folder, &["--survive", "2"]).fails(&["2 machines", "has 2"], "--survive");
    let text = plan(&folder, &[]).succeeds().stdout;
    assert!(text.contains("losses: one machine at once"), "{text}");
    folder.write("fleet.toml", FLEET.split("[[node]]\nname = \"b\"").next().unwrap());
    let text = plan(&folder, &[]).succeeds().stdout;
    assert!(text.contains("one machine has nobody to mirror"), "{text}");
}

#[test]
fn shapes_are_set_side_by_side() {
    let folder = folder();
    let compared = json(plan(&folder, &["--compare", "--json", "--table", "plan.json"]));
    let shapes = compared["shapes"].as_array().unwrap();
    let names: Vec<&str> = shapes.iter().map(|row| row["shape"].as_str().unwrap()).collect();
    for shape in ["pipeline", "sharded", "burst", "mixed", "spilled"] {
        assert!(names.contains(&shape), "{names:?}");
        let row = shapes.iter().find(|row| row["shape"] == shape).unwrap();
        assert!(row["step_seconds"].as_f64().is_some() != row["refused"].is_string(), "{row}");
    }
    let fastest = shapes.iter().filter_map(|row| row["step_seconds"].as_f64()).fold(f64::INFINITY, f64::min);
    let best = shapes.iter().find(|row| row["shape"] == compared["auto"]).unwrap();
    assert_eq!(best["step_seconds"].as_f64().unwrap(), fastest);
    let played = json(simulate(&folder, &["--json", "--table", "plan.json"]));
    assert_eq!(played["plan_id"], best["plan_id"]);
    // What one of them lacks is said by how much.
    let large = ["--compare", "--set", "model.preset=gpt2-1.5b", "--set", "train.global_batch=2"];
    folder.write("fleet.toml", FLEET.replace("\"L4\",", "\"L4\", memory = \"6 GiB\","));
    let text = plan(&folder, &large).succeeds().stdout;
    assert!(text.contains("no plan") && text.contains("short"), "{text}");
    assert!(text.contains("auto takes") && text.contains("tightest memory"), "{text}");
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
    // Three devices a machine; ten machine-steps of 600 seconds, and as many machines on demand as there were on average.
    for (way, machine_seconds) in
        [("state moves", 6000.0), ("started again", 6000.0), ("on demand", 3.0 * 2400.0)]
    {
        let spent = reports[way]["spent"].as_object().unwrap();
        let seconds: f64 = spent.values().map(|part| part.as_f64().unwrap()).sum();
        assert!((seconds / (3.0 * machine_seconds) - 1.0).abs() < 0.01, "{way}: {spent:?}");
        assert!(spent["wait"].as_f64().unwrap() > 0.0, "{way}: {spent:?}");
    }
    let on_demand = &reports["on demand"];
    assert_eq!((on_demand["spent"]["lost"].as_f64(), on_demand["morphs"].as_u64()), (Some(0.0), Some(1)));
    // Machines that nobody may take away cost on demand what they cost.
    let hourly = (2.0 * 1.2 + 0.9) * 3.0;
    assert!((on_demand["dollars"].as_f64().unwrap() - hourly * 2400.0 / 3600.0).abs() < 1e-6, "{on_demand}");
    folder.write("fleet.toml", FLEET.replace("price = 0.9", "price = 0.9, spot = true"));
    let unpriced = json(simulate(&folder, &["--json", "--trace", "trace.csv"]));
    assert!(unpriced["on demand"]["dollars"].is_null(), "{unpriced}");
    let said = simulate(&folder, &["--trace", "trace.csv"]).succeeds().stdout;
    assert!(said.contains("on_demand_price") && said.contains("not known"), "{said}");
    let priced = "price = 0.9, spot = true, on_demand_price = 3.0";
    folder.write("fleet.toml", FLEET.replace("price = 0.9", priced));
    let priced = json(simulate(&folder, &["--json", "--trace", "trace.csv"]));
    let hourly = (2.0 * 1.2 + 3.0) * 3.0;
    let dollars = priced["on demand"]["dollars"].as_f64().unwrap();
    assert!((dollars - hourly * 2400.0 / 3600.0).abs() < 1e-6, "{priced}");
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

/// What is run where nobody plans stands beside the searched shapes and is planned by its name; `auto` never takes it.
#[test]
fn usual_ways_stand_beside_the_shapes_that_are_searched() {
    let folder = folder();
    let compared = json(plan(&folder, &["--compare", "--survive", "0", "--json"]));
    let rows = compared["shapes"].as_array().unwrap();
    for name in ["even", "data-parallel"] {
        let row = rows.iter().find(|row| row["shape"] == name).unwrap();
        let planned = json(plan(&folder, &["--shape", name, "--survive", "0", "--json"]));
        assert_eq!(row["plan_id"], planned["plan_id"], "{name}");
        assert!(planned["step_seconds"].as_f64().unwrap() > 0.0);
        assert_ne!(compared["auto"], name);
    }
    plan(&folder, &["--shape", "evn"]).fails(&["there is no shape \"evn\""], "data-parallel");
}

/// A reader that is gone before the first line is no reason for more than an end.
#[test]
fn whoever_has_read_enough_may_leave() {
    let folder = folder();
    let command = format!("{} plan job.toml --fleet fleet.toml | true", env!("CARGO_BIN_EXE_shoal"));
    let mut shell = std::process::Command::new("sh");
    let output = shell.args(["-c", &command]).current_dir(folder.path()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}
