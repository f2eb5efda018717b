//! A ResNet and a VGG through the whole road: planned, trained, resumed, exported under torchvision's names,
//! trained on with other classes; and what does not fit them is refused.

use std::fs;

use crate::common::{Colours, Folder, assert_same_files, checkpoint_of, column, metrics, timeless_metrics};
use safetensors::SafeTensors;
use serde_json::{Value, json};

const SIZE: usize = 32;
const CLASSES: u64 = 4;

const COLOURS: Colours = Colours { size: SIZE, classes: CLASSES, step: 40, factors: [1, 2, 3] };

/// A folder with a small ResNet's shape, and a job that trains it from nothing.
fn folder() -> Folder {
    let folder = Folder::with_job(
        r#"
[model]
from = "small"
init = "random"

[data]
train = "train.safetensors"
crop_padding = 2
flip = true

[train]
global_batch = 16
steps = 40
seed = 5
label_smoothing = 0.05
optimizer = { kind = "sgd", lr = 0.05, momentum = 0.9, weight_decay = 1e-4 }
schedule = { kind = "cosine", warmup = 5 }

[checkpoint]
to = "run"
every = "1000 steps"

[eval]
data = "held-out.safetensors"
every = "20 steps"
"#,
    );
    let shape = json!({
        "architecture": "resnet", "block": "basic", "blocks": [1, 1],
        "first_channels": 8, "classes": CLASSES, "image": SIZE,
    });
    folder.write("small/shape.json", shape.to_string());
    folder.write("train.safetensors", COLOURS.images(0, 200));
    folder.write("held-out.safetensors", COLOURS.images(1000, 40));
    folder
}

fn shape_of(folder: &Folder, name: &str) -> Value {
    serde_json::from_slice(&fs::read(folder.join(name).join("shape.json")).unwrap()).unwrap()
}

#[test]
fn a_resnet_is_planned_trained_exported_and_trained_on_with_other_classes() {
    let folder = folder();
    let planned = folder.shoal(&["plan", "job.toml", "--json"]).succeeds().json();
    let shown = folder.shoal(&["plan", "job.toml"]).succeeds().stdout;
    assert!(
        shown.contains("layer2.0.downsample.0") && shown.contains("16 samples of 32 x 32 pixels"),
        "{shown}"
    );
    let trained = folder.shoal(&["train", "job.toml", "--json"]).succeeds().json();
    assert_eq!(trained["memory"]["counted_bytes"], trained["memory"]["predicted_bytes"]);
    assert_eq!(trained["memory"]["predicted_bytes"], planned["memory"]["total_bytes"]);
    let lines = metrics(&folder.join("run"));
    let losses = column(&lines, "loss");
    assert!((losses[0] - (CLASSES as f64).ln()).abs() < 0.5, "it knows nothing yet: {}", losses[0]);
    assert!(losses[39] < 0.6, "it learns: {losses:?}");
    // By the running statistics, which follow the batches.
    assert!(trained["eval_accuracy"].as_f64().unwrap() > 0.9, "{trained}");

    folder.shoal(&["export", "run", "exported"]).succeeds();
    assert_eq!(shape_of(&folder, "exported")["blocks"], json!([1, 1]));
    let bytes = fs::read(folder.join("exported/model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("conv1.weight").unwrap().shape(), [8, 3, 7, 7]);
    assert_eq!(file.tensor("layer2.0.downsample.1.running_var").unwrap().shape(), [16]);
    assert_eq!(file.tensor("fc.weight").unwrap().shape(), [4, 16]);
    folder.shoal(&["export", "run", "exported"]).fails(&["exported", "not empty"], "");
    folder.shoal(&["export", "run", "exported", "--replace"]).succeeds();

    // From the exported folder: the same model, in fewer words.
    let job = fs::read_to_string(folder.join("job.toml")).unwrap();
    let from = job.replace("from = \"small\"\ninit = \"random\"", "from = \"exported\"");
    folder.write("second.toml", from.replace("\"run\"", "\"second\""));
    let steps = ["--set", "train.steps=2", "--set", "train.schedule.warmup=0"];
    let resumed = folder.shoal(&[&["train", "second.toml"], &steps[..]].concat()).succeeds();
    for part in ["resnet", "7 layers", "200 images of 32 x 32", "classes 4", "right"] {
        assert!(resumed.stderr.contains(part), "no {part} in {}", resumed.stderr);
    }
    let start = column(&metrics(&folder.join("second")), "loss")[0];
    assert!(start < 0.7, "it goes on from {} at {start}", losses[39]);

    // With more classes only the last layer is new; with images of another size a ResNet's weights still fit.
    let other = ["train", "second.toml", "--set", "model.classes=6", "--set", "checkpoint.to=third"];
    folder.shoal(&[&other[..], &steps].concat()).succeeds();
    let start = column(&metrics(&folder.join("third")), "loss")[0];
    assert!(start > 0.9, "a new last layer knows no class: {start}");
    folder.shoal(&["export", "third", "wider"]).succeeds();
    assert_eq!(shape_of(&folder, "wider")["classes"], 6);
    folder.shoal(&["plan", "second.toml", "--set", "model.image_size=48"]).succeeds();

    for model in ["run", "exported"] {
        folder.shoal(&["generate", model, "the gull"]).fails(&[model, "images"], "gpt2");
    }
}

#[test]
fn a_stopped_resnet_goes_on_bit_for_bit() {
    let (straight, stopped) = (folder(), folder());
    let steps = ["--set", "train.steps=8"];
    straight.shoal(&[&["train", "job.toml"], &steps[..]].concat()).succeeds();
    stopped.shoal(&[&["train", "job.toml", "--stop-at", "3"], &steps[..]].concat()).succeeds();
    stopped.shoal(&[&["train", "job.toml"], &steps[..]].concat()).succeeds();
    assert_eq!(timeless_metrics(&straight.join("run")), timeless_metrics(&stopped.join("run")));
    let last = |folder: &Folder| checkpoint_of(&folder.join("run"), 8);
    assert_same_files(&last(&straight), &last(&stopped));
    let other = ["train", "job.toml", "--set", "train.steps=9", "--set", "model.classes=5"];
    stopped.shoal(&other).fails(&["run", "classes"], "checkpoint.to");
}

#[test]
fn a_vgg_trains_from_its_shape_with_dropout() {
    let folder = folder();
    let shape = json!({
        "architecture": "vgg11", "first_channels": 4, "classifier": [16], "dropout": 0.1,
        "classes": CLASSES, "image": SIZE,
    });
    folder.write("small/shape.json", shape.to_string());
    let settings = ["--set", "train.steps=3", "--set", "plan.micro_batch=5"];
    folder.shoal(&[&["train", "job.toml"], &settings[..]].concat()).succeeds();
    folder.shoal(&["export", "run", "exported"]).succeeds();
    assert_eq!(shape_of(&folder, "exported"), shape);
    let bytes = fs::read(folder.join("exported/model.safetensors")).unwrap();
    let names = SafeTensors::deserialize(&bytes).unwrap();
    // The number counts the ReLU and the dropout between the dense layers.
    assert!(names.names().contains(&"classifier.3.weight"), "{:?}", names.names());
}

#[test]
fn every_published_model_is_planned_by_its_name() {
    let folder = folder();
    let job = fs::read_to_string(folder.join("job.toml")).unwrap();
    folder.write("job.toml", job.replace("from = \"small\"\n", "preset = \"resnet18\"\n"));
    for (preset, parameters) in [
        ("vgg11", 132_863_336u64),
        ("vgg16", 138_357_544),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("resnet152", 60_192_808),
        ("wide_resnet50_2", 68_883_240),
        ("wide_resnet101_2", 126_886_696),
        ("inception_v3", 23_834_568),
    ] {
        let setting = format!("model.preset={preset}");
        let settings = ["--set", &setting, "--set", "plan.memory=64GiB", "--set", "train.global_batch=2"];
        let plan = folder.shoal(&[&["plan", "job.toml", "--json"], &settings[..]].concat()).succeeds().json();
        let running = |name: &Value| name.as_str().unwrap().contains("running_");
        let tensors = plan["plan"]["tensors"].as_array().unwrap().iter();
        let trained = tensors.filter(|tensor| !running(&tensor["tensor"]));
        assert_eq!(
            trained.map(|tensor| tensor["elements"].as_u64().unwrap()).sum::<u64>(),
            parameters,
            "{preset}"
        );
    }
}

#[test]
fn what_does_not_fit_a_convolutional_model_is_refused() {
    let folder = folder();
    let plan = |setting: &str| folder.shoal(&["plan", "job.toml", "--set", setting]);
    plan("model.dropout=0.1").fails(&["model.dropout", "has none"], "leave it out");
    plan("model.classes=0").fails(&["model.classes", "is 0"], "at least 1");
    plan("model.image_size=0").fails(&["model.image_size", "is 0"], "multiple");
    plan("data.sequence=17").fails(&["data.sequence", "images"], "leave it out");
    plan("plan.micro_batch=4").succeeds();
    plan("train.norm_group=0").fails(&["train.norm_group", "is 0"], "whole batch");
    plan("plan.graphs=some").fails(&["plan.graphs", "some"], "instruction");
    plan("train.precision=bf16").fails(&["bf16"], "fp32");
    plan("model.init=checkpoint").succeeds();
    folder
        .shoal(&["train", "job.toml", "--set", "model.init=checkpoint"])
        .fails(&["small", "model.safetensors"], "random");

    folder.write("small/shape.json", "{\"architecture\": \"resnet51\"}");
    plan("train.steps=1").fails(&["shape.json", "resnet51"], "docs/models.md");
    folder.write("small/shape.json", "{");
    plan("train.steps=1").fails(&["shape.json", "not JSON"], "docs/models.md");
    fs::remove_file(folder.join("small/shape.json")).unwrap();
    plan("train.steps=1").fails(&["small", "neither config.json nor shape.json"], "shoal export");

    let job = fs::read_to_string(folder.join("job.toml")).unwrap();
    folder.write("job.toml", job.replace("from = \"small\"", "preset = \"resnet18\""));
    plan("model.preset=resnet19").fails(&["resnet19"], "resnet1");
    let text = ["plan", "job.toml", "--set", "model.preset=gpt2-tiny", "--set", "model.classes=3"];
    folder.shoal(&text).fails(&["model.classes", "tokens"], "leave it out");
    plan("model.preset=vit-tiny").succeeds();
    let vit = ["plan", "job.toml", "--set", "model.preset=vit-tiny", "--set", "model.image_size=36"];
    folder.shoal(&vit).fails(&["model.image_size", "36", "patches"], "multiple");
}
