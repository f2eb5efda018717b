//! A fleet in a box that lives: machines that come and go without notice, and a device that becomes slow. What is counted is
//! steps and plans; how long they take is for `cargo xtask bench trace` and `slow`.

mod common;

use common::{Folder, JOB, Outcome};
use serde_json::Value;

/// Four machines whose layers last a while: a sample's forward through a block five milliseconds.
fn folder() -> Folder {
    let job = JOB.replace("global_batch = 4", "global_batch = 8").replace("steps = 4\n", "steps = 100000\n");
    let folder = Folder::with_job(&job);
    folder.write(
        "fleet.toml",
        "[[node]]\nname = \"m\"\ncount = 4\nhost_memory = \"4 GiB\"\nnetwork = \"1 Gbit/s\"\n\
         devices = [{ kind = \"V100\", memory = \"1 GiB\", price = 1.0 }]\n",
    );
    let told =
        folder.shoal(&["profile", "gpt2-tiny", "--sequence", "32", "--samples", "1,2,4,8", "--rounds", "1"]);
    told.succeeds();
    let text = std::fs::read_to_string(folder.join("profile.json")).unwrap();
    folder.write("profile.json", played(serde_json::from_str(&text).unwrap()).to_string());
    folder
}

/// The same layers on another device, which takes its time.
fn played(mut profile: Value) -> Value {
    let curve = |seconds: f64| {
        let samples = [1.0, 2.0, 4.0, 8.0];
        serde_json::json!({"samples": [1, 2, 4, 8], "seconds": samples.map(|count| 1e-3 + count * seconds)})
    };
    profile["links"] = Value::Array(Vec::new());
    let device = &mut profile["devices"][0];
    (device["kind"], device["device"]) = ("V100-16".into(), "played".into());
    for key in ["handling_seconds_per_byte", "handling_seconds_per_message"] {
        device[key] = Value::Null;
    }
    for layer in device["layers"].as_array_mut().unwrap() {
        let seconds = if layer["layers"][0].as_str().unwrap().starts_with("block") { 5e-3 } else { 1e-3 };
        (layer["forward"], layer["backward"]) = (curve(seconds), curve(2.0 * seconds));
    }
    profile
}

/// A longer deadline than usual: tests share their machine with others.
fn lab(folder: &Folder, arguments: &[&str]) -> Outcome {
    let always = ["lab", "fleet.toml", "job.toml", "--profile", "profile.json", "--deadline", "3", "--json"];
    folder.shoal(&[&always[..], arguments].concat())
}

#[test]
fn machines_come_and_go_as_a_trace_says() {
    let folder = folder();
    let events = ["0,add,a", "0,add,b", "0,add,c", "200000,remove,b", "300000,add,d", "600000,remove,a"];
    folder.write("spot.csv", events.join("\n"));
    let told = lab(&folder, &["--trace", "spot.csv", "--faster", "20"]).succeeds().json();
    // With the last event the trace is over.
    assert_eq!((&told["kills"], &told["joined"]), (&1.into(), &4.into()), "{told}");
    assert!(told["steps"].as_u64().unwrap() > 0 && told["undone"] == 0, "{told}");
    // It was noticed, and planned around.
    assert!(told["plans"].as_u64().unwrap() >= 2 && told["pauses"][0]["lost"] == true, "{told}");
    let possible = told["possible_steps"].as_f64().unwrap();
    for (steps, goodput) in [("steps", "goodput"), ("simulated", "simulated_goodput")] {
        let steps = told[steps].as_f64().or(told[steps]["steps"].as_f64()).unwrap();
        assert!((told[goodput].as_f64().unwrap() - steps / possible).abs() < 1e-9, "{told}");
    }
    // Every device-second that was there is somewhere.
    let spent = told["device_seconds"].as_object().unwrap();
    let sum: f64 = spent.values().map(|seconds| seconds.as_f64().unwrap()).sum();
    let there = 3.0 * 10.0 + 2.0 * 5.0 + 3.0 * 15.0;
    assert!(sum >= there - 1e-3, "{sum} of {there}: {told}");

    // A run's folder serves once, and traces are read before anything is started.
    lab(&folder, &["--trace", "spot.csv", "--faster", "20"])
        .fails(&["another job's already"], "checkpoint.to");
    folder.write("spot.csv", "0,add,a\n0,add,a\n");
    lab(&folder, &["--trace", "spot.csv"]).fails(&["spot.csv, line 2"], "");
    lab(&folder, &["--trace", "spot.csv", "--faster", "0"]).fails(&["above 0"], "leave them out");
}

#[test]
fn a_device_that_becomes_slow_is_found_and_planned_around() {
    let folder = folder();
    let told = lab(&folder, &["--slow", "3"]).succeeds().json();
    let steps = |key: &str| told[key].as_u64().unwrap_or_else(|| panic!("{key}: {told}"));
    assert!(steps("found_after_steps") <= 5, "{told}");
    assert!(steps("replanned_after_steps") >= steps("found_after_steps"), "{told}");
}
