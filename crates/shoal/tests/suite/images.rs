//! A model of images through the whole road: planned, trained, resumed, exported, trained on; and what it is not
//! for, or what is not for it, is refused.

use std::fs;

use crate::common::{
    Colours, Folder, assert_same_files, checkpoint_of, column, corpus, metrics, timeless_metrics,
};

const STEPS: usize = 80;
const SIZE: usize = 32;

/// Ten classes.
const COLOURS: Colours = Colours { size: SIZE, classes: 10, step: 15, factors: [1, 3, 7] };

fn folder() -> Folder {
    let job = format!(
        r#"
[model]
preset = "vit-tiny"
dropout = 0.01

[data]
train = "train.safetensors"
crop_padding = 1

[train]
global_batch = 16
steps = {STEPS}
seed = 5
label_smoothing = 0.05
optimizer = {{ lr = 2e-3, weight_decay = 0.05, clip_norm = 1.0 }}
schedule = {{ kind = "cosine", warmup = 5 }}

[checkpoint]
to = "run"
every = "1000 steps"

[eval]
data = "held-out.safetensors"
every = "20 steps"
"#
    );
    let folder = Folder::with_job(&job);
    folder.write("train.safetensors", COLOURS.images(0, 400));
    folder.write("held-out.safetensors", COLOURS.images(1000, 50));
    folder
}

#[test]
fn a_model_of_images_is_planned_trained_exported_and_trained_on() {
    let folder = folder();
    let planned = folder.shoal(&["plan", "job.toml", "--json"]).succeeds().json();
    let shown = folder.shoal(&["plan", "job.toml"]).succeeds();
    assert!(shown.stdout.contains("patches") && shown.stdout.contains("16 samples"), "{}", shown.stdout);
    let trained = folder.shoal(&["train", "job.toml", "--json"]).succeeds().json();
    assert_eq!(trained["memory"]["counted_bytes"], trained["memory"]["predicted_bytes"]);
    assert_eq!(trained["memory"]["predicted_bytes"], planned["memory"]["total_bytes"]);

    let lines = metrics(&folder.join("run"));
    let (losses, accuracies) = (column(&lines, "loss"), column(&lines, "accuracy"));
    assert!((losses[0] - 10f64.ln()).abs() < 0.5, "it knows nothing yet: {}", losses[0]);
    assert!(losses[STEPS - 1] < 1.0, "it learns: {losses:?}");
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    let (early, late) = (mean(&accuracies[..5]), mean(&accuracies[STEPS - 5..]));
    assert!(late > 0.9 && late > early + 0.3, "from {early} right to {late}");
    assert!(column(&lines, "tokens").iter().all(|images| *images == 16.0));
    let held_out: Vec<f64> = lines.iter().filter_map(|line| line["eval_accuracy"].as_f64()).collect();
    assert!(held_out.len() == 4 && held_out[3] > 0.8, "{held_out:?}");
    assert_eq!(trained["eval_accuracy"].as_f64(), held_out.last().copied());

    folder.shoal(&["export", "run", "exported"]).succeeds();
    let config = fs::read_to_string(folder.join("exported/config.json")).unwrap();
    assert!(config.contains("ViTForImageClassification") && config.contains("LABEL_9"), "{config}");
    let job = fs::read_to_string(folder.join("job.toml")).unwrap();
    let second = job.replace("preset = \"vit-tiny\"", "from = \"exported\"").replace("\"run\"", "\"second\"");
    folder.write("second.toml", second);
    let resumed = folder.shoal(&["train", "second.toml", "--set", "train.steps=3"]).succeeds();
    for part in ["400 images of 32 x 32", "16 images a step", "images/s", "classes 10", "right"] {
        assert!(resumed.stderr.contains(part), "no {part} in {}", resumed.stderr);
    }
    let start = column(&metrics(&folder.join("second")), "loss")[0];
    assert!((start - losses[STEPS - 1]).abs() < 0.5, "it goes on from {} at {start}", losses[STEPS - 1]);

    for model in ["run", "exported"] {
        folder.shoal(&["generate", model, "the gull"]).fails(&[model, "images"], "gpt2");
    }
}

/// Images are varied by where they stand: stopping changes no bit, and neither does another cut of the batch's
/// reading.
#[test]
fn a_stopped_run_goes_on_with_the_same_images() {
    let (straight, stopped) = (folder(), folder());
    let steps = ["--set", "train.steps=8", "--set", "data.flip=true"];
    straight.shoal(&[&["train", "job.toml"], &steps[..]].concat()).succeeds();
    stopped.shoal(&[&["train", "job.toml", "--stop-at", "3"], &steps[..]].concat()).succeeds();
    stopped.shoal(&[&["train", "job.toml"], &steps[..]].concat()).succeeds();
    assert_eq!(timeless_metrics(&straight.join("run")), timeless_metrics(&stopped.join("run")));
    let last = |folder: &Folder| checkpoint_of(&folder.join("run"), 8);
    assert_same_files(&last(&straight), &last(&stopped));
    // Other images than the run began with.
    let other = ["train", "job.toml", "--set", "train.steps=9", "--set", "data.mean=0.4"];
    stopped.shoal(&other).fails(&["run", "of images"], "");
}

#[test]
fn what_does_not_fit_a_model_of_images_is_refused() {
    let folder = folder();
    let train = |setting: &str| folder.shoal(&["train", "job.toml", "--set", setting]);
    train("data.sequence=17").fails(&["data.sequence", "images"], "leave it out");
    train("data.mean=[0.5,0.5]").fails(&["data.mean"], "3: one a channel");
    train("data.std=0").fails(&["data.std", "is 0"], "positive");
    train("data.crop_padding=33").fails(&["data.crop_padding", "33"], "their own size");
    train("train.label_smoothing=1.5").fails(&["train.label_smoothing", "1.5"], "0..1");
    train("data.train=corpus.txt").fails(&["corpus.txt", "no source of images"], ".safetensors");
    folder.write("corpus.txt", corpus(40));
    let tokens = ["train", "job.toml", "--set", "model.preset=gpt2-tiny", "--set", "data.sequence=32"];
    folder.shoal(&tokens).fails(&["data.crop_padding", "tokens"], "leave it out");
}

/// Tiny models, once each: that figures come out is what is held, not which.
#[test]
fn models_of_images_are_measured() {
    let folder = Folder::empty();
    let quick = ["--batch", "2", "--device", "cpu", "--rounds", "1", "--seconds", "0.01"];
    let vit = folder.shoal(&[&["bench", "vit-tiny", "--json"], &quick[..]].concat()).succeeds().json();
    let small = ["bench", "resnet18", "--image-size", "32"];
    let resnet = folder.shoal(&[&small[..], &["--json"], &quick].concat()).succeeds().json();
    for measured in [&vit, &resnet] {
        assert!(measured["images_per_second"].as_f64().unwrap() > 0.0, "{measured}");
        assert_eq!(measured["image_size"], 32);
        assert_eq!(measured["memory"]["counted_bytes"], measured["memory"]["predicted_bytes"]);
    }
    let shown = folder.shoal(&[&small[..], &quick].concat()).succeeds().stdout;
    assert!(shown.contains("2 images of 32 x 32") && shown.contains("SGD with momentum"), "{shown}");
    assert!(shown.contains("images/s"), "{shown}");
    let bench = |arguments: &[&str]| folder.shoal(&[&["bench"], arguments].concat());
    bench(&["resnet18", "--sequence", "3"]).fails(&["resnet18", "--sequence"], "--image-size");
    bench(&["gpt2-tiny", "--image-size", "32"]).fails(&["gpt2-tiny", "tokens"], "--image-size");
    bench(&["vgg11", "--image-size", "8"]).fails(&["--image-size", "halved"], "own");
    bench(&["inception_v3", "--image-size", "74"]).fails(&["--image-size", "75"], "own");
    bench(&["bert-base", "--sequence", "513"]).fails(&["--sequence", "512 positions"], "leave it out");
    bench(&["resnet19"]).fails(&["resnet19"], "resnet18");
}
