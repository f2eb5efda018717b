//! The memory a plan predicts is the memory training takes: to the byte in what is counted, within a few
//! percent in what the system sees, and a budget is met exactly or refused with the figure that would do.

mod common;

use common::{Folder, JOB, corpus, metrics};

const MIB: f64 = (1 << 20) as f64;

/// The share by which the resident growth may differ from the prediction.
const RESIDENT_SHARE: f64 = 0.05;

/// From here on the models are large enough that the process's own memory is not what is tested.
const PREDICTED_LEAST_BYTES: f64 = 200.0 * MIB;

struct Figures {
    predicted: f64,
    counted: f64,
    process: f64,
    resident: f64,
}

/// Trains a preset for one step and reads the memory it took.
fn figures(preset: &str, sequence: usize, batch: usize, settings: &[&str]) -> Figures {
    let folder = Folder::with_job(JOB);
    folder.write("corpus.txt", corpus(2000));
    let model = [
        format!("model.preset={preset}"),
        format!("data.sequence={sequence}"),
        format!("train.global_batch={batch}"),
        "train.steps=1".to_owned(),
        // Packing buffers are the threads': the same number everywhere gives the same figures.
        "plan.threads=2".to_owned(),
    ];
    let mut arguments = vec!["train", "job.toml", "--json"];
    arguments.extend(model.iter().flat_map(|setting| ["--set", setting]));
    arguments.extend(settings.iter().flat_map(|setting| ["--set", *setting]));
    let summary = folder.shoal(&arguments).succeeds().json();
    let bytes = |name: &str| summary["memory"][name].as_f64().unwrap_or_else(|| panic!("{name}: {summary}"));
    let figures = Figures {
        predicted: bytes("predicted_bytes"),
        counted: bytes("counted_bytes"),
        process: bytes("process_bytes"),
        resident: bytes("resident_peak_bytes"),
    };
    println!(
        "{preset} {batch} x {sequence} {settings:?}: predicted {:.1} MiB, counted {:.1}, resident {:.1}",
        figures.predicted / MIB,
        figures.counted / MIB,
        figures.resident / MIB
    );
    figures
}

/// What must hold for models of any size.
fn assert_counted_as_predicted(figures: &Figures) {
    assert!(figures.counted <= figures.predicted, "more was counted than predicted");
    assert!(figures.counted >= 0.99 * figures.predicted, "far less was counted than predicted");
}

fn assert_resident_as_predicted(preset: &str, sequence: usize, batch: usize, settings: &[&str]) {
    let figures = figures(preset, sequence, batch, settings);
    assert_counted_as_predicted(&figures);
    assert!(figures.predicted >= PREDICTED_LEAST_BYTES, "too small to tell");
    let grown = figures.resident - figures.process;
    let difference = (grown - figures.predicted).abs() / figures.predicted;
    assert!(
        difference <= RESIDENT_SHARE,
        "resident memory grew by {:.1} MiB, {:.1} were predicted: {:.1}% apart",
        grown / MIB,
        figures.predicted / MIB,
        100.0 * difference
    );
}

#[test]
fn activations_that_are_kept_are_foreseen() {
    assert_resident_as_predicted("gpt2-mini", 256, 16, &["plan.activations=keep"]);
}

#[test]
fn activations_that_are_recomputed_are_foreseen() {
    assert_resident_as_predicted(
        "gpt2-mini",
        256,
        32,
        &["plan.activations=recompute", "plan.micro_batch=32"],
    );
}

#[test]
fn small_micro_batches_and_long_sequences_are_foreseen() {
    assert_resident_as_predicted("gpt2-mini", 256, 8, &["plan.micro_batch=2"]);
    let long = ["plan.activations=recompute", "plan.micro_batch=5"];
    assert_resident_as_predicted("gpt2-mini", 1024, 5, &long);
}

#[test]
fn a_large_vocabulary_is_foreseen() {
    assert_resident_as_predicted("llama-15m", 128, 12, &["plan.activations=keep"]);
    assert_resident_as_predicted("llama-15m", 128, 2, &["plan.activations=keep"]);
}

#[test]
fn a_large_vocabulary_with_recomputation_is_foreseen() {
    assert_resident_as_predicted("llama-15m", 128, 12, &["plan.activations=recompute"]);
}

#[test]
fn every_byte_of_small_models_is_counted_as_predicted() {
    for preset in ["gpt2-tiny", "llama-tiny", "qwen2-tiny"] {
        for settings in [
            &["plan.activations=keep", "plan.micro_batch=3"][..],
            &["plan.activations=recompute", "plan.micro_batch=1", "plan.order=layer_first"],
            &["train.optimizer.kind=sgd", "model.dropout=0.2"],
        ] {
            assert_counted_as_predicted(&figures(preset, 64, 8, settings));
        }
    }
}

#[test]
fn a_budget_too_small_is_refused_with_the_figure_that_is_enough() {
    // A held-out set too: evaluating must fit into what training needs.
    let folder = Folder::with_job(&format!("{JOB}\n[eval]\ndata = \"corpus.txt\"\nevery = \"2 steps\"\n"));
    let train = |bytes: u64| {
        let memory = format!("plan.memory={bytes}B");
        folder.shoal(&["train", "job.toml", "--set", &memory])
    };
    let outcome = train(1 << 20).fails(&["cpu:0", "needs at least", "the budget is 1048576"], "plan.memory");
    let (_, rest) = outcome.stderr.split_once("needs at least ").unwrap();
    let needed: u64 = rest.split(' ').next().unwrap().parse().expect("a number of bytes");
    train(needed - 1).fails(&[&format!("needs at least {needed} bytes"), "1 short"], "plan.memory");
    assert!(!folder.join("run").exists(), "a plan that does not fit leaves nothing behind");
    train(needed).succeeds();
    assert_eq!(metrics(&folder.join("run")).len(), 4);
}
