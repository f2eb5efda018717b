//! A run that was stopped, interrupted or killed ends in the same bits as one that was left alone; a damaged
//! checkpoint is passed over aloud; one run folder is one process's.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use crate::common::{
    Folder, Running, assert_same_files, checkpoint_of, checkpoints, corpus, damage, files, metrics,
    timeless_metrics,
};

const STEPS: u64 = 120;
/// Short, so that a kill at any moment has a checkpoint close behind it.
const CHECKPOINT_EVERY: u64 = 5;

/// Dropout, shuffling, warm-up and a held-out set: whatever a step depends on besides the parameters. The
/// budget is left to the machine, as most jobs leave it.
fn job() -> String {
    format!(
        r#"
[model]
preset = "gpt2-tiny"
dropout = 0.1

[data]
train = "corpus.txt"
sequence = 48
shuffle = true

[train]
global_batch = 6
steps = {STEPS}
seed = 11
optimizer = {{ lr = 2e-3, weight_decay = 0.1, clip_norm = 1.0 }}
schedule = {{ kind = "cosine", warmup = 10, final = 0.1 }}

[checkpoint]
to = "run"
every = "{CHECKPOINT_EVERY} steps"
keep = 3

[eval]
data = "held-out.txt"
every = "7 steps"
"#
    )
}

fn folder() -> Folder {
    let folder = Folder::with_job(&job());
    folder.write("held-out.txt", corpus(30));
    folder
}

/// The run that nothing disturbed.
static STRAIGHT: LazyLock<Folder> = LazyLock::new(|| {
    let folder = folder();
    folder.shoal(&["train", "job.toml"]).succeeds();
    folder
});

fn train(folder: &Folder) -> Running {
    folder.start(&["train", "job.toml"])
}

/// Runs to the end and compares with the undisturbed run.
#[track_caller]
fn finish_and_compare(folder: &Folder) {
    train(folder).wait().succeeds();
    assert_as_undisturbed(folder);
}

#[track_caller]
fn assert_as_undisturbed(folder: &Folder) {
    let (run, straight) = (folder.join("run"), STRAIGHT.join("run"));
    let (found, expected) = (timeless_metrics(&run), timeless_metrics(&straight));
    assert_eq!(expected.len() as u64, STEPS, "one line a step");
    assert_eq!(found.len(), expected.len(), "one line a step");
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found, expected);
    }
    assert!(expected.iter().any(|line| line.get("eval_loss").is_some()), "the held-out set was measured");
    let steps = |run: &Path| -> Vec<_> {
        checkpoints(run).iter().map(|path| path.file_name().unwrap().to_owned()).collect()
    };
    assert_eq!(steps(&run), steps(&straight), "the same checkpoints are kept");
    for (found, expected) in checkpoints(&run).iter().zip(checkpoints(&straight)) {
        assert_same_files(found, &expected);
    }
}

#[test]
fn stopping_at_a_step_changes_nothing() {
    let folder = folder();
    // 33 is neither a checkpoint's nor an evaluation's step, 35 is both.
    for stop in [33, 35] {
        let outcome = folder.shoal(&["train", "job.toml", "--stop-at", &stop.to_string()]).succeeds();
        assert!(outcome.stdout.contains(&format!("stopped after step {stop}")), "{}", outcome.stdout);
        assert_eq!(metrics(&folder.join("run")).len(), stop);
        assert!(checkpoint_of(&folder.join("run"), stop as u64).is_dir());
    }
    finish_and_compare(&folder);
    // Once more: all steps are done, nothing moves.
    finish_and_compare(&folder);
}

#[test]
fn an_interrupt_finishes_the_step_saves_and_resumes() {
    let folder = folder();
    let run = folder.join("run");
    for (signal, after) in [("INT", 4), ("TERM", 40)] {
        let mut running = train(&folder);
        running.wait_until("some steps", || metrics(&run).len() >= after);
        running.signal(signal);
        let outcome = running.wait().succeeds();
        assert!(outcome.stdout.contains("stopped after step"), "SIG{signal}: {}", outcome.stdout);
        let done = metrics(&run).len() as u64;
        assert!(done < STEPS, "the signal came too late to test anything");
        assert!(checkpoint_of(&run, done).is_dir(), "step {done} is saved");
    }
    finish_and_compare(&folder);
}

#[test]
fn a_kill_at_any_moment_costs_only_steps() {
    let folder = folder();
    let run = folder.join("run");
    // Before the first checkpoint, then ever later; each count is passed anew, for steps past the last
    // checkpoint are done again.
    for after in [2, 9, 23, 24, 51] {
        let mut running = train(&folder);
        running.wait_until("some steps", || metrics(&run).len() > after);
        running.signal("KILL");
        assert_eq!(running.wait().code, None, "the process died of the signal");
        let newest = checkpoints(&run).last().map(|path| path.join("manifest.json"));
        assert!(newest.is_none_or(|manifest| manifest.is_file()), "what is named a checkpoint is whole");
    }
    finish_and_compare(&folder);
}

#[test]
fn a_kill_while_a_checkpoint_is_being_saved_leaves_the_one_before() {
    let folder = folder();
    let run = folder.join("run");
    let saving = || {
        let Ok(entries) = fs::read_dir(run.join("checkpoints")) else { return false };
        entries.flatten().any(|entry| entry.path().extension().is_some())
    };
    for after in [0, 20, 40] {
        let mut running = train(&folder);
        running.wait_until("a save", || metrics(&run).len() > after && saving());
        running.signal("KILL");
        assert_eq!(running.wait().code, None, "the process died of the signal");
    }
    finish_and_compare(&folder);
    assert!(!saving(), "nothing half-saved is left");
}

#[test]
fn a_damaged_newest_checkpoint_is_passed_over_aloud() {
    let folder = folder();
    let run = folder.join("run");
    folder.shoal(&["train", "job.toml", "--stop-at", "42"]).succeeds();
    damage(&checkpoint_of(&run, 42).join("second_moment-00001.safetensors"));
    let outcome = train(&folder).wait().succeeds();
    let warning = outcome.stderr.lines().find(|line| line.starts_with("warning: ")).expect("a warning");
    assert!(warning.contains("step 42") && warning.contains("second_moment-00001.safetensors"), "{warning}");
    assert!(outcome.stderr.contains("resumes after step 40"), "{}", outcome.stderr);
    assert_as_undisturbed(&folder);
}

#[test]
fn when_every_checkpoint_is_damaged_nothing_starts_anew() {
    let folder = folder();
    let run = folder.join("run");
    folder.shoal(&["train", "job.toml", "--stop-at", "12"]).succeeds();
    let kept = checkpoints(&run);
    assert!(kept.len() > 1);
    for checkpoint in &kept {
        damage(&checkpoint.join("parameter-00001.safetensors"));
    }
    let before: Vec<_> = kept.iter().map(|path| files(path)).collect();
    let lines = metrics(&run);
    let refused = train(&folder).wait();
    refused.fails(&["checkpoints", "step 12", "parameter-00001.safetensors"], "restore");
    assert_eq!(metrics(&run), lines, "what was measured is still there");
    let after: Vec<_> = kept.iter().map(|path| files(path)).collect();
    assert!(before == after, "what was saved is still there");
}

#[test]
fn a_run_folder_is_one_process_at_a_time() {
    let folder = folder();
    let run = folder.join("run");
    // So long that it cannot end by itself before the second has been refused.
    let mut first = folder.start(&["train", "job.toml", "--set", "train.steps=100000"]);
    first.wait_until("a step", || !metrics(&run).is_empty());
    let second = folder.shoal(&["train", "job.toml", "--set", "train.steps=100000"]);
    second.fails(&["run", "another process"], "checkpoint.to");
    assert!(first.is_running(), "the first goes on");
    let seen = metrics(&run).len();
    first.wait_until("another step", || metrics(&run).len() > seen);
    first.signal("INT");
    first.wait().succeeds();
    // The lock went with the process: whoever comes next may have the folder.
    let done = metrics(&run).len() as u64;
    let steps = format!("train.steps={}", done + 2);
    folder.shoal(&["train", "job.toml", "--set", &steps]).succeeds();
    assert_eq!(metrics(&run).len() as u64, done + 2);
}
