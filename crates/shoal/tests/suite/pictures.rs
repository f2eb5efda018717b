//! Pictures in folders of classes, from the command line: trained on, evaluated, their names exported; and what is
//! wrong with one is told before training.

use std::fs;
use std::io::Cursor;

use crate::common::{Folder, column, files, metrics, timeless_metrics};
use image::{DynamicImage, ImageFormat, Rgb, RgbImage};
use serde_json::{Value, json};
use shoal_kernels::random::mix64;

const CLASSES: [&str; 3] = ["crab", "eel", "gull"];

/// A picture of a class: noise around its colour, of a size of its own.
fn picture(class: usize, number: u64, format: ImageFormat) -> Vec<u8> {
    let draw = |salt: u64| mix64(number << 20 | salt);
    let (width, height) = (24 + draw(1) as u32 % 40, 24 + draw(2) as u32 % 40);
    let image = RgbImage::from_fn(width, height, |x, y| {
        let noise = (draw(u64::from(3 + y * width + x)) % 60) as u8;
        let mut colour = [noise, noise, noise];
        colour[class] += 150;
        Rgb(colour)
    });
    let mut bytes = Cursor::new(Vec::new());
    DynamicImage::from(image).write_to(&mut bytes, format).unwrap();
    bytes.into_inner()
}

fn folder() -> Folder {
    let folder = Folder::with_job(
        r#"
[model]
from = "small"
init = "random"

[data]
train = "train"
crop_padding = 2
flip = true

[train]
global_batch = 12
steps = 24
optimizer = { kind = "sgd", lr = 0.05 }
schedule = { kind = "one_cycle" }

[checkpoint]
to = "run"
every = "1000 steps"

[eval]
data = "held-out"
every = "24 steps"
"#,
    );
    let shape = json!({
        "architecture": "resnet", "block": "basic", "blocks": [1, 1],
        "first_channels": 8, "classes": 3, "image": 32,
    });
    folder.write("small/shape.json", shape.to_string());
    for (class, name) in CLASSES.iter().enumerate() {
        for number in 0..20 {
            let (ending, format) =
                if number % 2 == 0 { ("png", ImageFormat::Png) } else { ("jpg", ImageFormat::Jpeg) };
            let bytes = picture(class, 100 * class as u64 + number, format);
            folder.write(&format!("train/{name}/{number}.{ending}"), bytes);
        }
    }
    // Fewer classes, in numbers that are training's.
    for number in 0..8 {
        folder.write(&format!("held-out/gull/{number}.png"), picture(2, 1000 + number, ImageFormat::Png));
    }
    folder
}

fn json_of(folder: &Folder, name: &str) -> Value {
    serde_json::from_slice(&fs::read(folder.join(name)).unwrap()).unwrap()
}

#[test]
fn a_resnet_learns_from_folders_of_pictures_and_their_names_go_with_it() {
    let folder = folder();
    let trained = folder.shoal(&["train", "job.toml"]).succeeds();
    for part in ["60 pictures, shown as 32 x 32", "classes 3", "right"] {
        assert!(trained.stderr.contains(part), "no {part} in {}", trained.stderr);
    }
    let lines = metrics(&folder.join("run"));
    assert!(column(&lines, "loss")[23] < 0.3, "{:?}", column(&lines, "loss"));
    assert_eq!(lines[23]["eval_accuracy"], 1.0, "a held-out gull is a gull");
    let rates = column(&lines, "lr");
    assert!((rates[0] - 0.002).abs() < 1e-9 && (rates[23] - 2e-7).abs() < 1e-12, "{rates:?}");

    folder.shoal(&["export", "run", "exported"]).succeeds();
    let names: Vec<String> = files(&folder.join("exported")).into_keys().collect();
    assert_eq!(names, ["classes.json", "model.safetensors", "preprocessor_config.json", "shape.json"]);
    assert_eq!(json_of(&folder, "exported/classes.json"), json!(CLASSES));
    let prepared = json_of(&folder, "exported/preprocessor_config.json");
    assert_eq!(prepared["crop_size"], json!({"height": 32, "width": 32}));
    let mean: Vec<f32> = serde_json::from_value(prepared["image_mean"].clone()).unwrap();
    assert_eq!(mean, [0.485, 0.456, 0.406], "torchvision's, where nothing else is said");
}

#[test]
fn a_stopped_run_goes_on_with_the_same_pictures() {
    let (straight, stopped) = (folder(), folder());
    let steps = ["--set", "train.steps=6"];
    straight.shoal(&[&["train", "job.toml"], &steps[..]].concat()).succeeds();
    stopped.shoal(&[&["train", "job.toml", "--stop-at", "2"], &steps[..]].concat()).succeeds();
    stopped.shoal(&[&["train", "job.toml"], &steps[..]].concat()).succeeds();
    assert_eq!(timeless_metrics(&straight.join("run")), timeless_metrics(&stopped.join("run")));
    stopped.write("train/eel/new.png", picture(1, 7, ImageFormat::Png));
    let more = ["train", "job.toml", "--set", "train.steps=7"];
    stopped.shoal(&more).fails(&["run", "data.train"], "checkpoint.to");
}

#[test]
fn a_vit_takes_names_from_folders_and_means_from_what_lies_beside_it() {
    let folder = folder();
    let preset = ["--set", "model.preset=vit-tiny", "--set", "model.classes=3", "--set", "train.steps=2"];
    let job = fs::read_to_string(folder.join("job.toml")).unwrap();
    folder.write("job.toml", job.replace("from = \"small\"\ninit = \"random\"", ""));
    let mean = ["--set", "data.mean=[0.1,0.2,0.3]"];
    folder.shoal(&[&["train", "job.toml"], &preset[..], &mean].concat()).succeeds();
    folder.shoal(&["export", "run", "exported"]).succeeds();
    let config = json_of(&folder, "exported/config.json");
    assert_eq!((&config["id2label"]["2"], &config["label2id"]["gull"]), (&json!("gull"), &json!(2)));

    let second = ["train", "job.toml", "--set", "model.from=exported", "--set", "train.steps=1"];
    let place = ["--set", "checkpoint.to=second"];
    folder.shoal(&[&second[..], &place].concat()).succeeds();
    let run = json_of(&folder, "second/run.json");
    let reading = &run["fixed"]["data (of images)"];
    let numbers = |key: &str| serde_json::from_value::<Vec<f32>>(reading[key].clone()).unwrap();
    assert_eq!((numbers("mean"), numbers("std")), (vec![0.1, 0.2, 0.3], vec![0.5; 3]));
    folder.write("exported/preprocessor_config.json", "{\"image_mean\": [0.5], \"image_std\": [1, 1, 1]}");
    folder.shoal(&second).fails(&["preprocessor_config.json", "image_mean", "[0.5]"], "data.mean");
    folder.write("exported/preprocessor_config.json", "{\"rescale_factor\": 1.0}");
    folder.shoal(&second).fails(&["preprocessor_config.json", "0..1"], "data.mean");
}

#[test]
fn what_is_wrong_with_a_picture_is_told_before_training() {
    let folder = folder();
    let train = |settings: &[&str]| folder.shoal(&[&["train", "job.toml"], settings].concat());
    train(&["--set", "model.classes=4"]).fails(&["train", "3 classes", "has 4"], "model.classes = 3");
    folder.write("held-out/whelk/1.png", picture(0, 1, ImageFormat::Png));
    train(&[]).fails(&["held-out/whelk", "crab"], "held-out");
    fs::remove_dir_all(folder.join("held-out/whelk")).unwrap();
    let whole = fs::read(folder.join("train/eel/1.jpg")).unwrap();
    folder.write("train/eel/1.jpg", &whole[..whole.len() / 2]);
    train(&[]).fails(&["train/eel/1.jpg", "ends too soon"], "fetch it again");
    folder.write("train/eel/1.jpg", "<html>not found</html>");
    train(&[]).fails(&["train/eel/1.jpg", "no known kind"], "PNG or JPEG");
    fs::remove_file(folder.join("train/eel/1.jpg")).unwrap();
    folder.write("train/stray.png", whole);
    train(&[]).fails(&["train/stray.png"], "one a class");
    assert!(metrics(&folder.join("run")).is_empty(), "nothing was trained");
}

/// The job that the README shows, on folders as it describes them.
#[test]
fn the_readmes_job_is_planned_and_trains() {
    let readme = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md")).unwrap();
    let (_, section) = readme.split_once("## Train on pictures").unwrap();
    let job: String = section
        .lines()
        .skip_while(|line| !line.starts_with("    [model]"))
        .take_while(|line| line.is_empty() || line.starts_with("    "))
        .map(|line| format!("{}\n", line.trim_start()))
        .collect();
    let folder = Folder::with_job(&job);
    for (class, name) in ["crab", "gull"].iter().enumerate() {
        for part in ["train", "held-out"] {
            let bytes = picture(class, class as u64, ImageFormat::Png);
            folder.write(&format!("pictures/{part}/{name}/1.png"), bytes);
        }
    }
    let settings = ["--set", "train.steps=1", "--set", "train.global_batch=2", "--set", "plan.device=cpu"];
    folder.shoal(&[&["plan", "job.toml"], &settings[..]].concat()).succeeds();
    folder.shoal(&[&["train", "job.toml"], &settings[..]].concat()).succeeds();
}
