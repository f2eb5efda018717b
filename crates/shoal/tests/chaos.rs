//! Drills on a live fleet of real processes: whatever is killed, frozen, cut off or slowed down, the job goes on, every step
//! counts once, and the losses are those of one device.

mod common;

use common::{Folder, JOB, Running, column, metrics};
use serde_json::Value;

/// Longer than by default, since tests share their machine with others; what drills end after has to be longer still.
const DEADLINE_SECONDS: &str = "1.5";
const LASTING_SECONDS: &str = "2.5";

/// A controller that listens; its address.
fn up(folder: &Folder) -> (Running, String) {
    let arguments = ["up", "--listen", "127.0.0.1:0", "--json", "--deadline", DEADLINE_SECONDS];
    let mut controller = folder.start(&arguments);
    let (out, mut url) = (controller.stdout_path(), String::new());
    controller.wait_until("it listens", || {
        let text = std::fs::read_to_string(&out).unwrap_or_default();
        let said: Result<Value, _> = serde_json::from_str(&text);
        said.map(|said| url = said["url"].as_str().unwrap().to_owned()).is_ok()
    });
    (controller, url)
}

fn join(folder: &Folder, url: &str, name: &str, more: &[&str]) -> Running {
    let token = folder.shoal(&["token", "--json"]).succeeds().json();
    let token = token["token"].as_str().unwrap();
    let size = ["--memory", "256MiB", "--host-memory", "256MiB", "--threads", "1", "--device", "cpu"];
    folder.start(&[&["join", url, "--token", token, "--name", name], &size[..], more].concat())
}

fn ps(folder: &Folder) -> Value {
    folder.shoal(&["ps", "--json"]).succeeds().json()
}

fn step(folder: &Folder) -> u64 {
    ps(folder)["jobs"][0]["step"].as_u64().unwrap_or(0)
}

#[test]
fn a_drilled_job_has_the_losses_of_one_that_nothing_happened_to() {
    // It ends when the drill is over, however fast this machine is.
    const STEPS_COMPARED: usize = 300;
    let job = JOB.replace("1000 steps", "50 steps").replace("lr = 1e-3", "lr = 1e-5");
    let of = |steps: usize| job.replace("steps = 4\n", &format!("steps = {steps}\n"));
    let folder = Folder::with_job(&of(1_000_000));
    let constant = ["--set", "train.schedule={ kind = \"constant\" }"];
    folder.write("alone.toml", of(STEPS_COMPARED));
    folder
        .shoal(&[&["train", "alone.toml", "--set", "checkpoint.to=alone"], &constant[..]].concat())
        .succeeds();
    let alone = column(&metrics(&folder.join("alone")), "loss");

    let (mut controller, url) = up(&folder);
    let mut workers: Vec<Running> =
        ["one", "two", "three", "four"].map(|name| join(&folder, &url, name, &["--drills"])).into();
    controller.wait_until("four workers", || ps(&folder)["workers"].as_array().unwrap().len() == 4);
    folder
        .shoal(&[&["train", "job.toml", "--controller", &url, "--detach"], &constant[..]].concat())
        .succeeds();
    controller.wait_until("steps", || step(&folder) >= 5);

    let faults =
        ["--kill", "1", "--freeze", "1", "--cut", "1", "--slow", "1", "--every", "0.5", "--seed", "7"];
    let drill = [&["chaos", "--json", "--seconds", LASTING_SECONDS], &faults[..]].concat();
    let score = folder.shoal(&drill).succeeds().json();
    let of_kind = |kind: &str| {
        let faults = score["faults"].as_array().unwrap().iter();
        let found = faults.filter(|fault| fault["fault"]["drill"]["kind"] == kind).collect::<Vec<_>>();
        assert_eq!(found.len(), 1, "{kind} in {score:#}");
        found[0]["outcome"].clone()
    };
    for kind in ["kill", "freeze", "cut"] {
        let outcome = of_kind(kind);
        assert!(outcome["missed_after_ms"].is_u64(), "{kind}: {outcome}");
        assert_eq!((&outcome["replanned"], &outcome["done_again"]), (&true.into(), &0.into()), "{kind}");
    }
    assert!(of_kind("slow")["missed_after_ms"].is_null(), "slow workers are there: {score:#}");
    // The one that was killed is away, and the others are the processes that they were.
    let killed = score["killed"][0].as_str().unwrap();
    assert!(!ps(&folder)["workers"].as_array().unwrap().iter().any(|worker| worker["name"] == *killed));
    let ended = workers.iter_mut().map(|worker| u32::from(!worker.is_running())).sum::<u32>();
    assert_eq!(ended, 1);

    controller.wait_until("enough steps", || step(&folder) >= STEPS_COMPARED as u64);
    // A job that is done with goes back to its last checkpoint; one that is not has them all.
    folder.shoal(&["pause", "1"]).succeeds();
    controller.wait_until("its rest", || ps(&folder)["jobs"][0]["state"] == "paused");
    let logs = folder.shoal(&["logs", "1", "--json"]).succeeds().stdout;
    let lines: Vec<Value> = logs.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let losses = column(&lines, "loss");
    for (place, (line, (here, there))) in lines.iter().zip(losses.iter().zip(&alone)).enumerate() {
        assert_eq!(line["step"], place as u64 + 1);
        assert!((here - there).abs() <= 1e-5 * there, "step {}: {here} and {there}", place + 1);
    }
    assert!(losses.len() >= alone.len());
}

#[test]
fn who_was_not_started_for_drills_is_not_drilled() {
    let folder = Folder::with_job(&JOB.replace("steps = 4\n", "steps = 1000000\n"));
    let (mut controller, url) = up(&folder);
    folder.shoal(&["chaos", "--kill", "1"]).fails(&["no job is under way"], "shoal train");
    folder.shoal(&["chaos"]).fails(&["nothing is to be done"], "--kill");
    folder.shoal(&["chaos", "7", "--slow", "1"]).fails(&["no job 7"], "shoal ps");
    let mut one = join(&folder, &url, "one", &[]);
    folder.shoal(&["train", "job.toml", "--controller", &url, "--detach"]).succeeds();
    controller.wait_until("steps", || step(&folder) >= 2);
    folder.shoal(&["chaos", "--freeze", "1"]).fails(&["one was not started for drills"], "--drills");
    folder.shoal(&["chaos", "--cut", "1", "--worker", "two"]).fails(&["no worker two"], "shoal ps");
    folder.shoal(&["chaos", "--kill", "1", "--worker", "one"]).fails(&["without any worker"], "shoal token");
    assert!(one.is_running());
}
