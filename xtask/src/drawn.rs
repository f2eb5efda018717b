//! Predicted steps beside measured ones where nobody has chosen the cases: small fleets of unequal machines, devices and
//! networks, small models of every architecture and plans of every shape, all drawn from a seed. Whatever a forecast has
//! learnt from the fleets of `bench lab`, it did not learn these.

use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Value, json};

use crate::lab::{EVERYWHERE, beside, build, folder, print_head, print_mean, said};

const USAGE: &str = "cargo xtask bench drawn [--seed N] [--count N]";

const KINDS: [&str; 7] = ["V100", "T4", "A10G", "L4", "A100-40", "RTX 3090", "P100"];
const SHAPES: [&str; 7] = ["auto", "pipeline", "sharded", "burst", "mixed", "even", "data-parallel"];
/// Samples and pixels of the images that convolutional models train on.
const IMAGES: usize = 64;
const IMAGE_SIZE: usize = 32;
const CLASSES: usize = 10;

/// Numbers that follow from a seed (splitmix64).
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[(self.next() % all.len() as u64) as usize]
    }
}

pub fn bench(arguments: &[&str]) -> Result<(), String> {
    let (mut seed, mut count) = (1u64, 20usize);
    for pair in arguments.chunks(2) {
        match *pair {
            ["--seed", text] => seed = text.parse().map_err(|_| USAGE.to_owned())?,
            ["--count", text] => count = text.parse().map_err(|_| USAGE.to_owned())?,
            _ => return Err(USAGE.to_owned()),
        }
    }
    build()?;
    let mut off = Vec::new();
    print_head();
    for seed in (seed..).take(count) {
        let mut draw = Draw(seed);
        let batch = draw.of(&[4, 7, 8, 12, 16, 24, 32]);
        let (job, sequence) = job(&mut draw, batch);
        let folder = folder("drawn", &job)?;
        let model = model(&mut draw, &folder).map_err(said(&folder))?;
        fs::write(folder.join("fleet.toml"), fleet(&mut draw)).map_err(said(&folder))?;
        let shape = draw.of(&SHAPES);
        let planned = if shape == "auto" { Vec::new() } else { vec!["--shape", shape] };
        let name = format!("{seed} {}", model.name);
        let data = [format!("data.train={}", model.data), format!("data.sequence={sequence}")];
        let mut arguments = vec!["--paced", "--set", &data[0]];
        if !model.has_images {
            arguments.extend(["--set", &data[1]]);
        }
        match beside(&folder, EVERYWHERE, &name, shape, &planned, &arguments) {
            Ok(one) => off.push(one),
            // Not every fleet has a plan of every shape.
            Err(sentence) if sentence.contains("no plan of any shape fits") => {
                println!("{name:<12} {shape:<13} no plan");
            }
            Err(sentence) => return Err(sentence),
        }
    }
    print_mean(&off);
    Ok(())
}

/// A job, but for the length of its sequences, which images have none of.
fn job(draw: &mut Draw, batch: usize) -> (String, usize) {
    let optimizer = draw.of(&[
        "{ kind = \"adamw\", lr = 1e-3, clip_norm = 1.0 }",
        "{ kind = \"sgd\", lr = 0.01, momentum = 0.9 }",
    ]);
    let gradients = draw.of(&["fp32", "fp32", "bf16"]);
    let sequence = draw.of(&[16, 32, 64]);
    let text = format!(
        "name = \"drawn\"\n[model]\nfrom = \"model\"\ninit = \"random\"\n[data]\ntrain = \"corpus.txt\"\n\
         [train]\nglobal_batch = {batch}\nsteps = 8\ngradients = \"{gradients}\"\noptimizer = {optimizer}\n\
         [checkpoint]\nevery = \"1000 steps\"\n"
    );
    (text, sequence)
}

fn fleet(draw: &mut Draw) -> String {
    let kinds = [draw.of(&KINDS), draw.of(&KINDS), draw.of(&KINDS)];
    let memory = draw.of(&["640 MiB", "1 GiB", "4 GiB"]);
    let nodes = draw.of(&[1, 2, 2, 3, 4]);
    let mut text = String::new();
    for node in 0..nodes {
        let (kind, devices) = (draw.of(&kinds), draw.of(&[1, 1, 2, 3]));
        let (network, latency) = (draw.of(&[1, 5, 10, 25, 100]), draw.of(&[1, 5, 20, 100]));
        let link = draw.of(&["", "", "", "device_link = \"50 GB/s\"\n"]);
        text += &format!(
            "[[node]]\nname = \"n{node}\"\nhost_memory = \"16 GiB\"\nnetwork = \"{network} Gbit/s\"\nlatency = \"{latency} us\"\n\
             {link}devices = [{{ kind = \"{kind}\", memory = \"{memory}\", count = {devices} }}]\n"
        );
    }
    text
}

struct Model {
    name: &'static str,
    /// The file it trains on.
    data: &'static str,
    has_images: bool,
}

/// Writes a model of some architecture, and images if it wants such.
fn model(draw: &mut Draw, folder: &Path) -> io::Result<Model> {
    let heads = draw.of(&[2, 4]);
    let (width, layers) = (heads * draw.of(&[8, 16]), draw.of(&[2, 3, 5, 8]));
    let name = draw.of(&["gpt2", "llama", "qwen2", "bert", "vit", "vgg", "resnet"]);
    let transformer = json!({
        "model_type": name, "vocab_size": 257, "hidden_size": width, "intermediate_size": 3 * width,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads / 2,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0,
        "tie_word_embeddings": draw.of(&[true, false]),
    });
    let with = |mut config: Value, more: Value| {
        for (key, value) in more.as_object().into_iter().flatten() {
            config[key] = value.clone();
        }
        config
    };
    let dense = json!({
        "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": 1e-12, "tie_word_embeddings": true,
    });
    let file = if matches!(name, "vgg" | "resnet") { "shape.json" } else { "config.json" };
    let config = match name {
        "gpt2" => json!({
            "model_type": name, "vocab_size": 257, "n_embd": width, "n_layer": layers, "n_head": heads,
            "n_positions": 128, "resid_pdrop": 0.1, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }),
        "bert" => with(with(transformer, dense), json!({"type_vocab_size": 2})),
        "vit" => {
            let classes: serde_json::Map<String, Value> =
                (0..CLASSES).map(|class| (class.to_string(), json!(format!("class {class}")))).collect();
            let image = json!({
                "image_size": IMAGE_SIZE, "patch_size": 8, "num_channels": 3, "qkv_bias": true, "id2label": classes,
            });
            with(with(transformer, dense), image)
        }
        "vgg" => json!({
            "architecture": "vgg11", "first_channels": 8, "classifier": [32, 32], "classes": CLASSES, "image": IMAGE_SIZE,
        }),
        "resnet" => json!({
            "architecture": "resnet", "block": draw.of(&["basic", "bottleneck"]), "first_channels": 4,
            "blocks": [1, 2, 1, 1], "classes": CLASSES, "image": IMAGE_SIZE,
        }),
        _ => transformer,
    };
    // What `folder` has put there is another model's.
    let _ = fs::remove_file(folder.join("model/config.json"));
    fs::write(folder.join("model").join(file), config.to_string())?;
    if !matches!(name, "vit" | "vgg" | "resnet") {
        return Ok(Model { name, data: "corpus.txt", has_images: false });
    }
    fs::write(folder.join("images.safetensors"), images(draw))?;
    Ok(Model { name, data: "images.safetensors", has_images: true })
}

/// A safetensors file of noise and labels.
fn images(draw: &mut Draw) -> Vec<u8> {
    let pixels = IMAGES * 3 * IMAGE_SIZE * IMAGE_SIZE;
    let labels = pixels + 8 * IMAGES;
    let header = json!({
        "images": {"dtype": "U8", "shape": [IMAGES, 3, IMAGE_SIZE, IMAGE_SIZE], "data_offsets": [0, pixels]},
        "labels": {"dtype": "I64", "shape": [IMAGES], "data_offsets": [pixels, labels]},
    });
    let mut header = header.to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend((0..pixels).map(|_| draw.next() as u8));
    file.extend((0..IMAGES).flat_map(|_| (draw.next() % CLASSES as u64).to_le_bytes()));
    file
}
