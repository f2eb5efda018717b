//! The job file as serde reads it: types and defaults, no judgement.

use serde::Deserialize;

#[derive(Deserialize)]
pub(super) struct Job {
    pub name: Option<String>,
    pub model: Model,
    pub data: Data,
    pub train: Train,
    #[serde(default)]
    pub checkpoint: Checkpoint,
    pub eval: Option<Eval>,
    #[serde(default)]
    pub plan: Plan,
}

#[derive(Deserialize)]
pub(super) struct Model {
    pub from: Option<String>,
    pub preset: Option<String>,
    pub init: Option<String>,
    /// For models of images, in place of the preset's or the folder's.
    pub classes: Option<usize>,
    pub image_size: Option<usize>,
    pub dropout: Option<f32>,
}

#[derive(Deserialize)]
pub(super) struct Data {
    pub train: String,
    #[serde(default = "bytes")]
    pub tokenizer: String,
    /// Tokens of one sample; models of images have none.
    pub sequence: Option<usize>,
    pub samples: Option<String>,
    #[serde(default = "yes")]
    pub shuffle: bool,
    #[serde(default = "text")]
    pub text_field: String,
    /// How images are normalised and varied; none of it for tokens.
    pub mean: Option<Channels>,
    pub std: Option<Channels>,
    pub flip: Option<bool>,
    pub crop_padding: Option<usize>,
}

/// A number for every channel, or one each.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Channels {
    All(f32),
    Each(Vec<f32>),
}

#[derive(Deserialize)]
pub(super) struct Train {
    pub global_batch: usize,
    pub steps: u64,
    #[serde(default)]
    pub seed: u64,
    #[serde(default = "fp32")]
    pub precision: String,
    #[serde(default = "fp32")]
    pub gradients: String,
    #[serde(default)]
    pub deterministic: bool,
    pub label_smoothing: Option<f32>,
    pub norm_group: Option<usize>,
    #[serde(default)]
    pub optimizer: Optimizer,
    #[serde(default)]
    pub schedule: Schedule,
}

#[derive(Deserialize)]
#[serde(default)]
pub(super) struct Optimizer {
    pub kind: String,
    pub lr: f64,
    pub betas: [f32; 2],
    pub eps: f32,
    pub momentum: f32,
    pub weight_decay: f32,
    pub decay: String,
    pub clip_norm: Option<f32>,
}

impl Default for Optimizer {
    fn default() -> Optimizer {
        Optimizer {
            kind: "adamw".into(),
            lr: 3e-4,
            betas: [0.9, 0.95],
            eps: 1e-8,
            momentum: 0.9,
            weight_decay: 0.0,
            decay: "matrices".into(),
            clip_norm: None,
        }
    }
}

#[derive(Deserialize)]
#[serde(default)]
pub(super) struct Schedule {
    pub kind: String,
    pub warmup: u64,
    #[serde(rename = "final")]
    pub final_share: Option<f64>,
    /// Of a rate that goes in steps.
    pub factor: Option<f64>,
    pub every: Option<u64>,
    pub at: Option<Vec<u64>>,
    /// Of one cycle.
    pub rise: Option<f64>,
    pub start: Option<f64>,
}

impl Default for Schedule {
    fn default() -> Schedule {
        Schedule {
            kind: "constant".into(),
            warmup: 0,
            final_share: None,
            factor: None,
            every: None,
            at: None,
            rise: None,
            start: None,
        }
    }
}

#[derive(Deserialize)]
#[serde(default)]
pub(super) struct Checkpoint {
    /// `runs/NAME` where it is left out.
    pub to: Option<String>,
    pub every: String,
    pub keep: usize,
}

impl Default for Checkpoint {
    fn default() -> Checkpoint {
        Checkpoint { to: None, every: "auto".into(), keep: 2 }
    }
}

#[derive(Deserialize)]
pub(super) struct Eval {
    pub data: String,
    pub every: String,
}

/// A size in bytes, or as people write it.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Size {
    Bytes(u64),
    Text(String),
}

#[derive(Default, Deserialize)]
pub(super) struct Plan {
    pub micro_batch: Option<usize>,
    pub activations: Option<String>,
    pub order: Option<String>,
    pub memory: Option<Size>,
    pub threads: Option<usize>,
    pub device: Option<String>,
    pub graphs: Option<String>,
    pub survive: Option<usize>,
}

fn bytes() -> String {
    "bytes".into()
}

fn text() -> String {
    "text".into()
}

fn fp32() -> String {
    "fp32".into()
}

fn yes() -> bool {
    true
}
