//! A model for masked tokens through the whole road: planned, trained on text, resumed, exported, trained on;
//! and what it is not for is refused.

use std::fs;

use crate::common::{Folder, assert_same_files, checkpoint_of, column, corpus, metrics, timeless_metrics};

const STEPS: usize = 200;

fn folder() -> Folder {
    let job = format!(
        r#"
[model]
preset = "bert-tiny"
dropout = 0.01

[data]
train = "corpus.txt"
sequence = 64
shuffle = true

[train]
global_batch = 8
steps = {STEPS}
seed = 5
optimizer = {{ lr = 2e-3, weight_decay = 0.01, clip_norm = 1.0 }}
schedule = {{ kind = "linear", warmup = 20 }}

[checkpoint]
to = "run"
every = "1000 steps"

[eval]
data = "held-out.txt"
every = "50 steps"
"#
    );
    let folder = Folder::with_job(&job);
    folder.write("held-out.txt", corpus(40));
    folder
}

#[test]
fn a_model_for_masked_tokens_is_planned_trained_exported_and_trained_on() {
    let folder = folder();
    let planned = folder.shoal(&["plan", "job.toml", "--json"]).succeeds().json();
    let trained = folder.shoal(&["train", "job.toml", "--json"]).succeeds().json();
    assert_eq!(trained["memory"]["counted_bytes"], trained["memory"]["predicted_bytes"]);
    assert_eq!(trained["memory"]["predicted_bytes"], planned["memory"]["total_bytes"]);

    let lines = metrics(&folder.join("run"));
    let (losses, tokens) = (column(&lines, "loss"), column(&lines, "tokens"));
    assert!(losses[0] > 5.0 && losses[STEPS - 1] < losses[0] - 1.5, "it learns: {losses:?}");
    // Of 512 tokens a step, 15 percent are targets.
    let mean = tokens.iter().sum::<f64>() / STEPS as f64;
    assert!((mean - 0.15 * 512.0).abs() < 5.0, "{mean} targets a step");
    let held_out: Vec<f64> = lines.iter().filter_map(|line| line["eval_loss"].as_f64()).collect();
    assert!(held_out.len() >= 4 && held_out[3] < held_out[0], "{held_out:?}");

    folder.shoal(&["export", "run", "exported"]).succeeds();
    let config = fs::read_to_string(folder.join("exported/config.json")).unwrap();
    assert!(config.contains("BertForMaskedLM"), "{config}");
    let job = fs::read_to_string(folder.join("job.toml")).unwrap();
    let second =
        job.replace("preset = \"bert-tiny\"", "from = \"exported\"").replace("\"run\"", "\"second\"");
    folder.write("second.toml", second);
    folder.shoal(&["train", "second.toml", "--set", "train.steps=3"]).succeeds();
    let start = column(&metrics(&folder.join("second")), "loss")[0];
    assert!((start - losses[STEPS - 1]).abs() < 0.5, "it goes on from {} at {start}", losses[STEPS - 1]);

    for model in ["run", "exported"] {
        folder.shoal(&["generate", model, "the gull"]).fails(&[model, "masked tokens"], "gpt2");
    }
}

/// Masks are drawn anew from where they stand: stopping changes no bit.
#[test]
fn a_stopped_run_goes_on_with_the_same_masks() {
    let (straight, stopped) = (folder(), folder());
    let steps = ["--set", "train.steps=12"];
    straight.shoal(&[&["train", "job.toml"], &steps[..]].concat()).succeeds();
    stopped.shoal(&[&["train", "job.toml", "--stop-at", "5"], &steps[..]].concat()).succeeds();
    stopped.shoal(&[&["train", "job.toml"], &steps[..]].concat()).succeeds();
    assert_eq!(timeless_metrics(&straight.join("run")), timeless_metrics(&stopped.join("run")));
    let last = |folder: &Folder| checkpoint_of(&folder.join("run"), 12);
    assert_same_files(&last(&straight), &last(&stopped));
}

/// Each document a sample of its own: trained, evaluated, stopped and resumed, in whatever cut; memory is what was
/// planned.
#[test]
fn documents_are_samples_of_their_own() {
    let folder = folder();
    let lines = |seed: usize, count: usize| -> String {
        let words = ["kelp", "foam", "the jetty", "gulls and crabs", "a rope", "tide"];
        let text = |line: usize| -> Vec<&str> {
            (0..1 + (line * 5 + seed) % 9).map(|word| words[(line * 7 + word * 3) % words.len()]).collect()
        };
        (0..count).map(|line| format!("{{\"text\": \"{}\"}}\n", text(line).join(" "))).collect()
    };
    folder.write("train.jsonl", lines(0, 120));
    folder.write("held-out.jsonl", lines(1, 11));
    let job = fs::read_to_string(folder.join("job.toml")).unwrap();
    let job = job
        .replace("\"corpus.txt\"", "\"train.jsonl\"\nsamples = \"documents\"")
        .replace("held-out.txt", "held-out.jsonl")
        .replace(&format!("steps = {STEPS}"), "steps = 60");
    folder.write("job.toml", &job);
    for (other, run) in [("recompute", "cut"), ("keep", "stopped")] {
        let plan = format!("\n[plan]\nmicro_batch = 3\nactivations = \"{other}\"\n");
        folder.write(&format!("{run}.toml"), job.replace("\"run\"", &format!("\"{run}\"")) + &plan);
    }
    let planned = folder.shoal(&["plan", "job.toml", "--json"]).succeeds().json();
    let trained = folder.shoal(&["train", "job.toml", "--json"]).succeeds().json();
    assert_eq!(trained["memory"]["counted_bytes"], trained["memory"]["predicted_bytes"]);
    assert_eq!(trained["memory"]["predicted_bytes"], planned["memory"]["total_bytes"]);
    let whole = metrics(&folder.join("run"));
    let losses = column(&whole, "loss");
    assert!(losses[59] < losses[0] - 1.0, "it learns: {losses:?}");
    assert!(whole.iter().any(|line| line["eval_loss"].as_f64().is_some_and(f64::is_finite)));

    folder.shoal(&["train", "cut.toml"]).succeeds();
    let cut = column(&metrics(&folder.join("cut")), "loss");
    for (step, (a, b)) in losses.iter().zip(&cut).enumerate() {
        assert!((a - b).abs() < 1e-3 * a, "step {step}: {a} whole, {b} cut and recomputed");
    }
    let stopped = ["train", "stopped.toml", "--set", "train.steps=12"];
    folder.shoal(&[&stopped[..], &["--stop-at", "5"]].concat()).succeeds();
    folder.shoal(&stopped).succeeds();
    let resumed = column(&metrics(&folder.join("stopped")), "tokens");
    assert_eq!(resumed, column(&whole, "tokens")[..12], "the same documents, masked alike");

    let packed = ["train", "job.toml", "--set", "data.samples=packed"];
    folder.shoal(&packed).fails(&["another job", "data.samples"], "checkpoint.to");
    folder.shoal(&["export", "run", "exported"]).succeeds();
}

#[test]
fn documents_are_samples_for_masked_tokens_alone() {
    let folder = folder();
    let set =
        |setting: &'static str| ["train", "job.toml", "--set", setting, "--set", "data.samples=documents"];
    folder.shoal(&set("model.preset=gpt2-tiny")).fails(&["data.samples", "next token"], "leave it out");
    let wrong = ["train", "job.toml", "--set", "data.samples=lines"];
    folder.shoal(&wrong).fails(&["data.samples", "lines"], "documents");
}

#[test]
fn a_vocabulary_without_room_for_a_mask_is_refused() {
    let folder = folder();
    let config = r#"{"model_type": "bert", "vocab_size": 256, "hidden_size": 16, "num_attention_heads": 2,
        "num_hidden_layers": 1, "intermediate_size": 32, "max_position_embeddings": 64}"#;
    folder.write("small/config.json", config);
    let job = fs::read_to_string(folder.join("job.toml")).unwrap();
    let small = "from = \"small\"\ninit = \"random\"";
    folder.write("job.toml", job.replace("preset = \"bert-tiny\"", small));
    folder.shoal(&["train", "job.toml"]).fails(&["bytes", "no room for a mask"], "257");
}
