//! The mathematics of GPT-2, Llama and Qwen2 against transformers: logits, every gradient, and twelve steps
//! of AdamW, whichever micro-batches cut the batch and whatever is kept.

use std::path::Path;

use shoal_engine::golden::{GoldenSettings, check};
use shoal_plan::Activations;

fn compare(model: &str) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(model);
    for micro_batch in [1, 2, 3, 4] {
        for activations in [Activations::Keep, Activations::Recompute] {
            for layer_first in [false, true] {
                let settings = GoldenSettings {
                    micro_batch: Some(micro_batch),
                    activations: Some(activations),
                    layer_first,
                    threads: 2,
                };
                let report = check(&dir, settings).unwrap_or_else(|error| panic!("{model}: {error}"));
                let worst = report.worst_of_all();
                assert!(worst <= 1e-4, "{model}, {settings:?}: {worst:e}\n{report:#?}");
            }
        }
    }
}

#[test]
fn gpt2_agrees_with_transformers() {
    compare("gpt2");
}

#[test]
fn llama_agrees_with_transformers() {
    compare("llama");
}

#[test]
fn qwen2_agrees_with_transformers() {
    compare("qwen2");
}
