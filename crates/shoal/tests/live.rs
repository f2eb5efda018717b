//! A fleet of real processes: `shoal up`, `shoal join`, `shoal train --controller`, and what they say when something is wrong.

mod common;

use common::{Folder, JOB, Running, column, metrics};
use serde_json::Value;

/// A controller that has begun to listen, and what it said of itself.
fn up(folder: &Folder, listen: &str) -> (Running, Value) {
    // Longer than by default: tests share their machine with others.
    let mut controller = folder.start(&["up", "--listen", listen, "--json", "--deadline", "3"]);
    let said = std::cell::RefCell::new(Value::Null);
    // Its line may be seen half written.
    controller_says(&mut controller, &said);
    (controller, said.into_inner())
}

fn controller_says(controller: &mut Running, said: &std::cell::RefCell<Value>) {
    let outputs = controller.stdout_path();
    controller.wait_until("it listens", || {
        let text = std::fs::read_to_string(&outputs).unwrap_or_default();
        serde_json::from_str(&text).map(|line| *said.borrow_mut() = line).is_ok()
    });
}

fn join(folder: &Folder, url: &str, name: &str) -> Running {
    let token = folder.shoal(&["token", "--json"]).succeeds().json();
    let token = token["token"].as_str().unwrap();
    let size = ["--memory", "256MiB", "--host-memory", "256MiB", "--threads", "1", "--device", "cpu"];
    let mut arguments = vec!["join", url, "--token", token, "--name", name];
    arguments.extend(size);
    folder.start(&arguments)
}

fn ps(folder: &Folder) -> Value {
    folder.shoal(&["ps", "--json"]).succeeds().json()
}

fn names(ps: &Value) -> Vec<String> {
    let workers = ps["workers"].as_array().unwrap().iter();
    workers.map(|worker| worker["name"].as_str().unwrap().to_owned()).collect()
}

/// What every counted step came to, each once.
fn curve(folder: &Folder, job: &str) -> Vec<f64> {
    let logs = folder.shoal(&["logs", job, "--json"]).succeeds().stdout;
    let lines: Vec<Value> = logs.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let steps: Vec<u64> = lines.iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<u64>>());
    column(&lines, "loss")
}

#[test]
fn processes_train_a_job_through_the_deaths_of_workers_and_controller() {
    const STEPS: usize = 800;
    let job = JOB.replace("steps = 4\n", &format!("steps = {STEPS}\n")).replace("1000 steps", "50 steps");
    // Plans add up in different orders. Over so many steps a larger rate would make differences of last bits grow.
    let job = job.replace("lr = 1e-3", "lr = 1e-5");
    let folder = Folder::with_job(&job);
    folder.shoal(&["train", "job.toml", "--set", "checkpoint.to=alone"]).succeeds();
    let alone = column(&metrics(&folder.join("alone")), "loss");

    let (mut controller, said) = up(&folder, "127.0.0.1:0");
    let url = said["url"].as_str().unwrap().to_owned();
    let started = |name: &str| (name.to_owned(), join(&folder, &url, name));
    let mut workers: Vec<(String, Running)> = ["one", "two", "three"].map(started).into();
    controller.wait_until("three workers", || names(&ps(&folder)).len() == 3);
    let mut train = folder.start(&["train", "job.toml", "--controller", &url, "--json"]);
    let step = |ps: &Value| ps["jobs"][0]["step"].as_u64().unwrap_or(0);
    train.wait_until("some steps", || step(&ps(&folder)) >= 10);

    // A worker that works is killed; those who are left keep their processes.
    let working = ps(&folder)["jobs"][0]["workers"][0].as_str().unwrap().to_owned();
    let victim = workers.iter().position(|(name, _)| *name == working).unwrap();
    let (_, victim) = workers.remove(victim);
    victim.signal("KILL");
    assert!(victim.wait().code.is_none());
    let before = step(&ps(&folder));
    train.wait_until("steps without it", || step(&ps(&folder)) > before + 5);

    // The controller is killed and started again: workers and whoever follows find it by themselves.
    controller.signal("KILL");
    assert!(controller.wait().code.is_none());
    let (_controller, _) = up(&folder, url.strip_prefix("https://").unwrap());
    let before = step(&ps(&folder));
    workers.push(started("four"));
    train
        .wait_until("steps after that", || step(&ps(&folder)) > before || step(&ps(&folder)) == STEPS as u64);
    let trained = train.wait().succeeds().json();
    assert_eq!(trained["job"]["state"], "done");
    let receipts = folder.shoal(&["receipt", "--json"]).succeeds().json();
    assert_eq!(receipts["receipts"][0], trained["receipt"], "nothing is added after the end");
    assert_eq!(receipts["total"], Value::Null, "there is one job");
    let part = |name: &str| {
        let parts = trained["receipt"]["parts"].as_array().unwrap();
        let found = parts.iter().find(|part| part["part"] == name).unwrap();
        found["device_seconds"].as_f64().unwrap()
    };
    assert!(part("useful") > 0.0 && part("morph") > 0.0, "{trained}");
    let text = folder.shoal(&["receipt", "1"]).succeeds().stdout;
    for word in ["useful", "bubble", "wait", "morph", "lost", "a step took", "predicted", "--price"] {
        assert!(text.contains(word), "no {word} in\n{text}");
    }
    for (_, worker) in &mut workers {
        assert!(worker.is_running(), "{}", worker.output("stderr"));
    }

    let losses = curve(&folder, "1");
    assert_eq!((losses.len(), alone.len()), (STEPS, STEPS));
    for (step, (here, there)) in losses.iter().zip(&alone).enumerate() {
        assert!((here - there).abs() <= 1e-5 * there, "step {}: {here} and {there}", step + 1);
    }
    folder.shoal(&["export", "run", "exported"]).succeeds();
    let events = folder.shoal(&["events"]).succeeds().stdout;
    for event in ["joined", "submitted", "started", "lost", "rested"] {
        assert!(events.contains(event), "no {event} in\n{events}");
    }

    // Told to go, a worker is released and ends well.
    let (name, worker) = workers.remove(0);
    worker.signal("TERM");
    worker.wait().succeeds();
    assert!(!names(&ps(&folder)).contains(&name));
}

#[test]
fn what_is_wrong_is_said_with_a_hint() {
    let folder = Folder::with_job(JOB);
    folder.shoal(&["ps"]).fails(&["no fleet is known here"], "shoal up");
    folder.shoal(&["join", "https://127.0.0.1:1"]).fails(&["no member of a fleet"], "--token");
    folder.shoal(&["join", "127.0.0.1:1", "--token", "x"]).fails(&["no join token"], "paste");
    folder.shoal(&["up", "--listen", "0.0.0.0:0"]).fails(&["every address"], "--host");

    let (controller, said) = up(&folder, "127.0.0.1:0");
    let url = said["url"].as_str().unwrap();
    let token = said["token"].as_str().unwrap();
    let busy = url.strip_prefix("https://").unwrap();
    folder.shoal(&["up", "--folder", "other", "--listen", busy]).fails(&["cannot listen"], "--listen");
    folder.shoal(&["up", "--listen", "127.0.0.1:0"]).fails(&["another process uses"], "--folder");
    folder.shoal(&["pause", "7"]).fails(&["no job 7"], "shoal ps");
    folder.shoal(&["receipt", "7"]).fails(&["no job 7"], "shoal ps");
    let bad = ["join", url, "--token", token, "--name", "Not A Name"];
    folder.shoal(&bad).fails(&["small letters"], "--name");
    let forged = format!("{}0", &token[..token.len() - 1]);
    let forged = if forged == token { format!("{}1", &token[..token.len() - 1]) } else { forged };
    folder
        .shoal(&["join", url, "--token", &forged, "--name", "one"])
        .fails(&["has not made this token"], "shoal token");

    // Another fleet, by its token and by its access.
    let other = Folder::with_job(JOB);
    let (_other, elsewhere) = up(&other, "127.0.0.1:0");
    let their_url = elsewhere["url"].as_str().unwrap();
    folder
        .shoal(&["join", their_url, "--token", token, "--name", "one"])
        .fails(&["another fleet"], "shoal token");
    folder.shoal(&["ps", "--controller", their_url]).fails(&["not the one"], "SHOAL_ACCESS");

    drop(controller);
    folder.shoal(&["ps"]).fails(&["no controller answers"], "shoal up");
}

/// What is held out is measured on a fleet as on one device, and a loss that is no number ends the job with its reason.
#[test]
fn a_fleet_measures_what_is_held_out_and_says_where_a_loss_is_no_number() {
    let job = JOB.replace("steps = 4\n", "steps = 25\n")
        + "[eval]\ndata = \"held-out.txt\"\nevery = \"10 steps\"\n";
    let folder = Folder::with_job(&job);
    folder.write("held-out.txt", common::corpus(60));
    folder.shoal(&["train", "job.toml", "--set", "checkpoint.to=alone"]).succeeds();
    let held_out = |lines: &[Value]| -> Vec<(u64, f64)> {
        let of = |line: &Value| Some((line["step"].as_u64()?, line["eval_loss"].as_f64()?));
        lines.iter().filter_map(of).collect()
    };
    let alone = held_out(&metrics(&folder.join("alone")));
    assert_eq!(alone.iter().map(|(step, _)| *step).collect::<Vec<u64>>(), [10, 20, 25]);

    let (mut controller, said) = up(&folder, "127.0.0.1:0");
    let url = said["url"].as_str().unwrap().to_owned();
    let _workers = [join(&folder, &url, "one"), join(&folder, &url, "two")];
    controller.wait_until("two workers", || names(&ps(&folder)).len() == 2);
    let rate = &ps(&folder)["workers"][0]["about"]["device"]["matrix_flops_per_second"];
    assert!(rate.as_f64().is_some_and(|rate| rate > 1e8), "{rate}");

    let by_clock = ["train", "job.toml", "--controller", &url, "--set", "eval.every=5m"];
    folder.shoal(&by_clock).fails(&["eval.every is a time"], "in steps");
    let trained = folder.shoal(&["train", "job.toml", "--controller", &url, "--json"]).succeeds().json();
    let logs = folder.shoal(&["logs", "1", "--json"]).succeeds().stdout;
    let lines: Vec<Value> = logs.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let fleet = held_out(&lines);
    assert_eq!(fleet.len(), alone.len());
    for ((step, here), (other, there)) in fleet.iter().zip(&alone) {
        assert!(step == other && (here - there).abs() <= 1e-5 * there, "step {step}: {here} and {there}");
    }
    assert_eq!(trained["eval_loss"].as_f64(), fleet.last().map(|(_, loss)| *loss));
    assert!(folder.shoal(&["logs", "1"]).succeeds().stdout.contains("held-out "));

    let wild = ["train", "job.toml", "--controller", &url, "--set", "train.optimizer.lr=1e30", "--set"];
    folder
        .shoal(&[&wild[..], &["checkpoint.to=wild"]].concat())
        .fails(&["the loss is ", "step 2"], "shoal resume");
    let ps = ps(&folder);
    assert_eq!((&ps["jobs"][1]["state"], &ps["jobs"][1]["saved_step"]), (&"failed".into(), &2.into()));
}

#[test]
fn jobs_name_files_only_where_they_may() {
    let folder = Folder::with_job(JOB);
    folder.write("elsewhere/corpus.txt", common::corpus(50));
    folder.write("jobs/job.toml", JOB);
    folder.write("jobs/corpus.txt", common::corpus(50));
    std::os::unix::fs::symlink(folder.join("elsewhere"), folder.join("jobs/link")).unwrap();
    let arguments = ["up", "--listen", "127.0.0.1:0", "--json", "--jobs-under", "jobs"];
    let mut controller = folder.start(&arguments);
    let said = std::cell::RefCell::new(Value::Null);
    controller_says(&mut controller, &said);
    let url = said.borrow()["url"].as_str().unwrap().to_owned();
    let train = |sets: &[&str]| {
        let mut arguments = vec!["train", "jobs/job.toml", "--controller", &url, "--detach"];
        sets.iter().for_each(|set| arguments.extend(["--set", set]));
        folder.shoal(&arguments)
    };
    for set in ["data.train=link/corpus.txt", "data.train=../elsewhere/corpus.txt", "checkpoint.to=../run"] {
        train(&[set]).fails(&["which jobs may not name here"], "--jobs-under");
    }
    assert!(!folder.join("run").exists(), "a refused job has left something");
    train(&[]).succeeds();
}
