//! A reference implementation's training, replayed from the command line: the rows or images it trained on as a
//! safetensors file, the losses and gradient norms it saw as the answer.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::common::{Folder, column, integer_rows, metrics};

const SEQUENCE: usize = 32;

/// Samples of a batch: the reference's models of images that are convolutional saw eight at a time.
fn batch(model: &str) -> usize {
    match model {
        "vgg" | "resnet" => 8,
        "inception" => 6,
        _ => 4,
    }
}

/// Batches that the reference had in turn.
fn batches(expected: &SafeTensors) -> usize {
    (0..).take_while(|batch| expected.tensor(&format!("batch{batch}.input")).is_ok()).count()
}

/// As the losses were asked to agree.
const TOLERANCE: f64 = 1e-4;

pub fn golden(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../shoal-engine/tests/golden").join(model)
}

fn integers(file: &SafeTensors, name: &str) -> Vec<i64> {
    let (words, _) = file.tensor(name).unwrap().data().as_chunks::<8>();
    words.iter().map(|word| i64::from_le_bytes(*word)).collect()
}

/// The batches as rows. Where labels are the next tokens, a row has one token more than the sequence, which is
/// only ever a label; else labels stand beside the tokens.
pub fn rows(golden: &Path) -> Vec<u8> {
    let bytes = fs::read(golden.join("expected.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&bytes).unwrap();
    if expected.tensor("input").unwrap().dtype() == Dtype::F32 {
        return images(&expected);
    }
    let all = |name: &str| -> Vec<i64> {
        (0..batches(&expected))
            .flat_map(|batch| integers(&expected, &format!("batch{batch}.{name}")))
            .collect()
    };
    let (inputs, labels) = (all("input"), all("labels"));
    let rows = || inputs.chunks(SEQUENCE).zip(labels.chunks(SEQUENCE));
    if rows().any(|(input, labels)| input[1..] != labels[..SEQUENCE - 1]) {
        return integer_rows(&[("tokens", SEQUENCE, &inputs), ("labels", SEQUENCE, &labels)]);
    }
    let tokens: Vec<i64> =
        rows().flat_map(|(input, labels)| [input, &labels[SEQUENCE - 1..]].concat()).collect();
    integer_rows(&[("tokens", SEQUENCE + 1, &tokens)])
}

/// The same for batches of images, which are normalised already.
fn images(expected: &SafeTensors) -> Vec<u8> {
    let all = |name: &str| -> Vec<u8> {
        let batch = |batch: usize| expected.tensor(&format!("batch{batch}.{name}")).unwrap().data().to_vec();
        (0..batches(expected)).flat_map(batch).collect()
    };
    let (images, labels) = (all("input"), all("labels"));
    let mut shape = expected.tensor("input").unwrap().shape().to_vec();
    shape[0] *= batches(expected);
    let views = [
        ("labels", TensorView::new(Dtype::I64, vec![shape[0]], &labels).unwrap()),
        ("images", TensorView::new(Dtype::F32, shape, &images).unwrap()),
    ];
    safetensors::serialize(views, None).unwrap()
}

pub fn job(model: &str, reference: &Value) -> String {
    let samples = match ["vit", "vgg", "resnet", "inception"].contains(&model) {
        true => "mean = 0.0\nstd = 1.0".to_owned(),
        false => format!("sequence = {SEQUENCE}"),
    };
    let (lr, betas) = (&reference["lr"], &reference["betas"]);
    let (eps, weight_decay) = (&reference["eps"], &reference["weight_decay"]);
    let steps = reference["losses"].as_array().unwrap().len();
    format!(
        r#"
[model]
from = "{}"

[data]
train = "rows.safetensors"
{samples}
shuffle = false

[train]
global_batch = {}
steps = {steps}
optimizer = {{ kind = "adamw", lr = {lr}, betas = {betas}, eps = {eps}, weight_decay = {weight_decay}, decay = "all", clip_norm = 1.0 }}
schedule = {{ kind = "constant" }}

[checkpoint]
to = "run"
"#,
        golden(model).display(),
        batch(model)
    )
}

fn replay(model: &str) {
    let golden = golden(model);
    let reference: Value =
        serde_json::from_str(&fs::read_to_string(golden.join("losses.json")).unwrap()).unwrap();
    let folder = Folder::empty();
    folder.write("rows.safetensors", rows(&golden));
    folder.write("job.toml", job(model, &reference));
    // A batch norm's statistics are the whole batch's, so a ResNet's is not cut.
    let whole = [batch(model)];
    let micro_batches = if model == "resnet" { &whole[..] } else { &[1, 3, 4] };
    for micro_batch in micro_batches {
        for activations in ["keep", "recompute"] {
            let run = format!("run-{micro_batch}-{activations}");
            let settings = [
                format!("plan.micro_batch={micro_batch}"),
                format!("plan.activations={activations}"),
                format!("checkpoint.to={run}"),
            ];
            let mut arguments = vec!["train", "job.toml"];
            arguments.extend(settings.iter().flat_map(|setting| ["--set", setting]));
            folder.shoal(&arguments).succeeds();
            let lines = metrics(&folder.join(&run));
            for (ours, theirs) in [("loss", "losses"), ("grad_norm", "grad_norms")] {
                let expected: Vec<f64> = reference[theirs]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|value| value.as_f64().unwrap())
                    .collect();
                let found = column(&lines, ours);
                assert_eq!(found.len(), expected.len(), "{model}, {run}: one line a step");
                for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let difference = (found - expected).abs() / expected;
                    let place = format!("{model}, {run}, {ours} of step {}", step + 1);
                    assert!(difference <= TOLERANCE, "{place}: {found}, the reference has {expected}");
                }
            }
        }
    }
}

#[test]
fn gpt2_trains_as_the_reference_did() {
    replay("gpt2");
}

#[test]
fn llama_trains_as_the_reference_did() {
    replay("llama");
}

#[test]
fn qwen2_trains_as_the_reference_did() {
    replay("qwen2");
}

#[test]
fn bert_trains_as_the_reference_did() {
    replay("bert");
}

#[test]
fn vit_trains_as_the_reference_did() {
    replay("vit");
}

#[test]
fn vgg_trains_as_the_reference_did() {
    replay("vgg");
}

#[test]
fn resnet_trains_as_the_reference_did() {
    replay("resnet");
}

#[test]
fn inception_trains_as_the_reference_did() {
    replay("inception");
}
