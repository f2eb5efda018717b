//! The first hour of a newcomer: each command as the help and the other commands' output suggest it.

mod common;

use std::fs;

use common::{DEADLINE, Folder, JOB, POLL, files, metrics};

#[test]
fn init_writes_a_job_that_trains_exports_and_speaks() {
    let folder = Folder::empty();
    let written = folder.shoal(&["init"]).succeeds();
    assert!(written.stdout.contains("shoal train job.toml"), "it says what comes next: {}", written.stdout);
    folder.shoal(&["init"]).fails(&["job.toml", "already"], "--force");
    let trained = folder.shoal(&["train", "job.toml", "--set", "train.steps=20"]).succeeds();
    assert!(trained.stdout.contains("finished 20 steps"), "{}", trained.stdout);
    for part in ["device", "model", "data", "batch", "memory", "step 20/20", "loss", "tok/s", "ETA"] {
        assert!(trained.stderr.contains(part), "the banner or the line has no {part}: {}", trained.stderr);
    }
    let lines = metrics(&folder.join("runs/first"));
    assert_eq!(lines.len(), 20);
    let loss = |line: usize| lines[line]["loss"].as_f64().unwrap();
    assert!(loss(19) < loss(0) - 0.5, "it learns: {} to {}", loss(0), loss(19));
    export_and_train_on(&folder);
}

/// What follows training: the model as a folder, another job that starts there, a few words from it.
fn export_and_train_on(folder: &Folder) {
    let exported = folder.shoal(&["export", "runs/first", "exported", "--json"]).succeeds().json();
    assert_eq!(exported["step"], 20);
    let before = files(&folder.join("exported"));
    for name in ["config.json", "model.safetensors"] {
        assert!(before.contains_key(name), "no {name} in {:?}", before.keys());
    }
    folder.shoal(&["export", "runs/first", "exported"]).fails(&["exported"], "empty");
    assert!(files(&folder.join("exported")) == before, "a refused export changes nothing");
    folder.shoal(&["export", "runs/first", "exported", "--replace"]).succeeds();
    assert!(files(&folder.join("exported")) == before, "the same model gives the same files");

    let job = fs::read_to_string(folder.join("job.toml")).unwrap();
    let second = job
        .replace("preset = \"gpt2-tiny\"", "from = \"exported\"")
        .replace("init = \"random\"", "init = \"checkpoint\"")
        .replace("runs/first", "runs/second");
    folder.write("second.toml", second);
    folder.shoal(&["train", "second.toml", "--set", "train.steps=3"]).succeeds();
    let first_end = metrics(&folder.join("runs/first"))[19]["loss"].as_f64().unwrap();
    let second_start = metrics(&folder.join("runs/second"))[0]["loss"].as_f64().unwrap();
    assert!((second_start - first_end).abs() < 0.3, "it goes on from there: {first_end}, {second_start}");

    let generate = |model: &str| {
        let arguments = ["generate", model, "Ada has", "--tokens", "5", "--json"];
        folder.shoal(&arguments).succeeds().json()
    };
    let said = generate("exported");
    assert_eq!((&said["prompt"], &said["tokens"]), (&"Ada has".into(), &5.into()), "{said}");
    assert_eq!(generate("runs/first"), said, "the run and what was exported from it are one model");
    let spoken = folder.shoal(&["generate", "exported", "Ada has", "--tokens", "5"]).succeeds();
    assert!(spoken.stdout.starts_with("Ada has"), "{}", spoken.stdout);
}

#[test]
fn a_job_that_names_no_run_folder_gets_one_by_its_name() {
    let folder = Folder::with_job(&JOB.replace("to = \"run\"\n", ""));
    folder.shoal(&["train", "job.toml"]).succeeds();
    assert_eq!(metrics(&folder.join("runs/test")).len(), 4);
    folder.shoal(&["export", "runs/test", "exported"]).succeeds();
}

#[test]
fn doctor_says_what_the_machine_has() {
    let folder = Folder::empty();
    let report = folder.shoal(&["doctor", "--json"]).succeeds().json();
    for key in ["threads", "matrix_flops_per_second", "memory_total_bytes", "default_budget_bytes"] {
        assert!(report[key].as_f64().is_some_and(|value| value > 0.0), "{key} in {report}");
    }
    assert!(report["disk_write_bytes_per_second"].as_f64().is_some_and(|rate| rate > 0.0), "{report}");
    assert!(files(folder.path()).is_empty(), "measuring the disk leaves nothing behind");
    assert!(folder.shoal(&["doctor"]).succeeds().stdout.lines().count() >= 4);
}

#[test]
fn plan_shows_the_table_and_writes_nothing_unasked() {
    let folder = Folder::empty();
    folder.shoal(&["init"]).succeeds();
    let before = files(folder.path());
    // A budget of its own: otherwise the table says how much memory was free at that moment.
    let command = ["plan", "job.toml", "--set", "plan.memory=1GiB"];
    let plan = folder.shoal(&[&command[..], &["--json"]].concat()).succeeds().json();
    let (memory, table) = (&plan["memory"], &plan["plan"]);
    assert_eq!(table["global_batch"], 16);
    assert_eq!(table["layers"].as_array().map(Vec::len), Some(4), "embedding, two blocks, head");
    let parts = ["workspace", "parameters", "gradients", "optimizer", "constants", "values"];
    let sum: u64 = parts.iter().map(|part| memory[format!("{part}_bytes")].as_u64().unwrap()).sum();
    assert_eq!(memory["total_bytes"].as_u64(), Some(sum), "{memory}");
    let text = folder.shoal(&command).succeeds().stdout;
    for part in ["embedding", "block 0", "head", "memory", "program"] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    assert!(files(folder.path()) == before, "planning changed the folder");
    let files_asked = ["--table", "table.json", "--program", "program.json"];
    folder.shoal(&[&command[..], &files_asked].concat()).succeeds();
    let read = |name: &str| -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(folder.join(name)).unwrap()).unwrap()
    };
    assert!(&read("table.json") == table, "the file and the JSON differ");
    assert_eq!(read("program.json")["instructions"].as_array().unwrap().len(), plan["instructions"]);
}

#[test]
fn the_demo_learns_to_add_though_a_worker_is_killed() {
    let folder = Folder::empty();
    let report = folder.shoal(&["demo", "--json"]).succeeds().json();
    assert!(report["share"].as_f64().unwrap() > 0.5, "most held-out sums are right: {report}");
    assert!(report["held_out"].as_u64().unwrap() > 500, "{report}");
    assert_eq!(report["steps"], 600, "{report}");
    let killed = &report["killed"];
    let is_in = |plan: &str| {
        let workers = killed[plan]["workers"].as_array().unwrap_or_else(|| panic!("no {plan} in {report}"));
        workers.iter().any(|part| part["worker"] == killed["worker"])
    };
    assert!(is_in("before") && !is_in("after"), "{report}");
    assert!(killed["recovery"]["seconds"].as_f64().unwrap() > 0.0, "{report}");
    assert!(report["joined"]["step"].as_u64() > killed["step"].as_u64(), "{report}");
    // Later on, differences of last bits grow: the learning rate is large.
    assert!(report["difference"]["early"].as_f64().unwrap() < 1e-5, "{report}");
    let spent: f64 = report["receipt"]["parts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|part| part["device_seconds"].as_f64().unwrap())
        .sum();
    assert!(spent > 0.0 && (spent - report["receipt"]["device_seconds"].as_f64().unwrap()).abs() < 1e-3);
    let picture = fs::read_to_string(folder.join("shoal-demo/demo.svg")).unwrap();
    let said = format!("{} is killed", killed["worker"].as_str().unwrap());
    assert!(picture.starts_with("<svg") && picture.contains(&said), "no {said:?} in the picture");
    assert_eq!(processes_of(&folder), 0, "something is left running");
    // A folder that is not a demo's is left alone.
    folder.write("mine/notes.txt", "keep me");
    folder.shoal(&["demo", "--dir", "mine"]).fails(&["mine"], "--dir");
    assert!(folder.join("mine/notes.txt").is_file());
}

/// Processes whose command names something in the folder.
fn processes_of(folder: &Folder) -> usize {
    let path = folder.path().to_str().unwrap();
    let commands = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path().join("cmdline"));
    let texts = commands.filter_map(|file| fs::read(file).ok());
    texts.filter(|text| String::from_utf8_lossy(text).contains(path)).count()
}

#[test]
fn the_demo_leaves_nothing_running_however_it_ends() {
    let folder = Folder::empty();
    for (signal, code) in [("KILL", None), ("INT", Some(130))] {
        let mut demo = folder.start(&["demo", "--steps", "50"]);
        demo.wait_until("controller and workers run", || processes_of(&folder) == 5);
        demo.signal(signal);
        assert_eq!(demo.wait().code, code);
        let began = std::time::Instant::now();
        while processes_of(&folder) > 0 {
            assert!(began.elapsed() < DEADLINE, "something is left running after SIG{signal}");
            std::thread::sleep(POLL);
        }
    }
}

#[test]
fn the_demo_runs_alone_where_others_may_not_be_started() {
    let folder = Folder::empty();
    let report = folder.shoal(&["demo", "--alone", "--steps", "50", "--json"]).succeeds().json();
    assert_eq!((&report["steps"], &report["held_out"]), (&50.into(), &791.into()), "{report}");
    let said = folder.shoal(&["demo", "--alone", "--steps", "50"]).succeeds().stdout;
    assert!(said.contains("Sums it has never seen") && said.contains("of 791"), "{said}");
}
