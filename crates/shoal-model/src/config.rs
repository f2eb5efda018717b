//! One description that covers every transformer we train. GPT-2, Llama, Qwen2, BERT and ViT differ in a handful of
//! choices (what they take in, positions, norms and their place, activation, biases, tying, what attention sees);
//! naming those choices here means that layers, arithmetic and kernels are written once.

use serde::{Deserialize, Serialize};

/// The family a model belongs to: it decides tensor names and the `config.json` written at export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    Gpt2,
    Llama,
    Qwen2,
    Bert,
    Vit,
}

/// How a token learns where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Position {
    /// A table of learned vectors, added to the embedding.
    Learned,
    /// Queries and keys turned by an angle that grows with the position.
    Rotary { theta: f64, scaling: RotaryScaling },
}

/// How rotary frequencies are stretched for contexts longer than the pre-training one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RotaryScaling {
    None,
    /// Every frequency divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Llama 3: long wavelengths divided by `factor`, short ones kept, a smooth ramp between.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_positions: f64,
    },
}

impl RotaryScaling {
    /// The angle per position for one frequency pair, after scaling.
    pub fn apply(&self, frequency: f64) -> f64 {
        match *self {
            RotaryScaling::None => frequency,
            RotaryScaling::Linear { factor } => frequency / factor,
            RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                let wavelength = std::f64::consts::TAU / frequency;
                if wavelength < original_positions / high_freq_factor {
                    frequency
                } else if wavelength > original_positions / low_freq_factor {
                    frequency / factor
                } else {
                    let smooth = (original_positions / wavelength - low_freq_factor)
                        / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Norm {
    /// Mean and variance, with weight and bias.
    Layer,
    /// Root mean square, with weight only.
    Rms,
}

/// Where a block's norms stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NormPlace {
    /// `x + attention(norm(x))`, likewise for the MLP; the head norms what comes out.
    Before,
    /// `norm(x + attention(x))`, likewise for the MLP; the embedding is normed before all blocks.
    After,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// GELU by its tanh approximation, after one projection.
    GeluTanh,
    /// GELU as it is defined, by the error function, after one projection.
    GeluErf,
    /// `silu(gate) * up`, from two projections.
    SwiGlu,
}

/// Probabilities of dropping an element; zero switches the site off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Dropout {
    pub embedding: f32,
    pub attention: f32,
    pub residual: f32,
}

/// The images a model takes, and the squares it cuts them into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageShape {
    pub channels: usize,
    /// Rows of pixels, and columns.
    pub size: usize,
    /// Rows and columns of a patch; the size is a multiple of it.
    pub patch: usize,
}

impl ImageShape {
    /// Numbers of one image.
    pub fn elements(&self) -> usize {
        self.channels * self.size * self.size
    }

    pub fn patches(&self) -> usize {
        (self.size / self.patch).pow(2)
    }

    /// Numbers of one patch.
    pub fn patch_elements(&self) -> usize {
        self.channels * self.patch * self.patch
    }
}

/// A transformer over tokens, or over the patches of images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    pub architecture: Architecture,
    /// What it takes in, if that is images: their patches, and a token of its own before them whose last row says
    /// which class an image is of. Otherwise it takes tokens.
    pub image: Option<ImageShape>,
    /// Tokens that it can tell apart; classes, where it takes images.
    pub vocabulary: usize,
    pub width: usize,
    pub layers: usize,
    pub heads: usize,
    /// Heads of keys and values; `heads` is a multiple of it.
    pub kv_heads: usize,
    pub head_size: usize,
    pub mlp_width: usize,
    /// The longest sequence the model can take.
    pub positions: usize,
    pub position: Position,
    pub norm: Norm,
    pub norm_eps: f32,
    pub norm_place: NormPlace,
    pub activation: Activation,
    /// Whether a position sees only those before it and predicts the next token. Otherwise it sees all, and
    /// learns to say which token was masked there.
    pub causal: bool,
    /// Attention scores are multiplied by this before the softmax.
    pub attention_scale: f32,
    pub qkv_bias: bool,
    pub attention_output_bias: bool,
    pub mlp_bias: bool,
    /// The output projection is the token embedding.
    pub tied: bool,
    /// Rows of the table of token types, whose first is added to every token; none without such a table.
    pub token_types: usize,
    /// The head is a dense layer with the blocks' activation, a norm, and an output projection with a bias;
    /// otherwise a norm and an output projection.
    pub head_transform: bool,
    pub dropout: Dropout,
    /// The share of a target that is spread over the whole vocabulary while training.
    pub label_smoothing: f32,
    /// Standard deviation of freshly drawn matrices.
    pub init_range: f32,
}

/// Channels, rows and columns of an image: so many that no product of them overflows.
const IMAGE_SIZE_MAX: usize = 1 << 14;

impl ModelConfig {
    /// Width of the joint query, key and value rows.
    pub fn qkv_width(&self) -> usize {
        self.query_width() + 2 * self.kv_width()
    }

    pub fn query_width(&self) -> usize {
        self.heads * self.head_size
    }

    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_size
    }

    /// Angles per position of each frequency pair; empty where positions are learned.
    pub fn rotary_frequencies(&self) -> Vec<f64> {
        match self.position {
            Position::Learned => Vec::new(),
            Position::Rotary { theta, scaling } => (0..self.head_size / 2)
                .map(|pair| scaling.apply(theta.powf(-2.0 * pair as f64 / self.head_size as f64)))
                .collect(),
        }
    }

    /// Sizes that no arithmetic could repair, as one sentence.
    pub fn defect(&self) -> Option<String> {
        let zero = [
            (self.vocabulary, "vocabulary size"),
            (self.width, "hidden size"),
            (self.layers, "number of layers"),
            (self.heads, "number of heads"),
            (self.kv_heads, "number of key-value heads"),
            (self.head_size, "head size"),
            (self.mlp_width, "intermediate size"),
            (self.positions, "number of positions"),
        ]
        .into_iter()
        .find(|(value, _)| *value == 0);
        if let Some((_, name)) = zero {
            return Some(format!("the {name} is 0"));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Some(format!(
                "{} heads cannot share {} key-value heads evenly",
                self.heads, self.kv_heads
            ));
        }
        if matches!(self.position, Position::Rotary { .. }) && !self.head_size.is_multiple_of(2) {
            return Some(format!("rotary positions need an even head size, not {}", self.head_size));
        }
        for (rate, site) in [
            (self.dropout.embedding, "embedding"),
            (self.dropout.attention, "attention"),
            (self.dropout.residual, "residual"),
        ] {
            if !(0.0..1.0).contains(&rate) {
                return Some(format!("the {site} dropout is {rate}, not in 0..1"));
            }
        }
        if let Some(image) = self.image {
            let none = [image.channels, image.size, image.patch].contains(&0);
            if none || !image.size.is_multiple_of(image.patch) {
                return Some(format!(
                    "images of {} channels and size {} cannot be cut into patches of {}",
                    image.channels, image.size, image.patch
                ));
            }
            if [image.channels, image.size].iter().any(|size| *size > IMAGE_SIZE_MAX) {
                return Some(format!("an image's size is past the limit of {IMAGE_SIZE_MAX}"));
            }
            if self.positions != image.patches() + 1 {
                return Some(format!("{} positions for {} patches", self.positions, image.patches()));
            }
        }
        if !(0.0..1.0).contains(&self.label_smoothing) {
            return Some(format!("the label smoothing is {}, not in 0..1", self.label_smoothing));
        }
        if self.head_transform && self.activation == Activation::SwiGlu {
            return Some("a gated activation has no place in the head".into());
        }
        if !(self.norm_eps > 0.0 && self.norm_eps.is_finite()) {
            return Some(format!("the norm's epsilon is {}, not a positive number", self.norm_eps));
        }
        // Sizes whose product would overflow the arithmetic are refused before anything multiplies them.
        const SIZE_MAX: usize = 1 << 24;
        [self.vocabulary, self.width, self.layers, self.heads, self.head_size, self.mlp_width, self.positions]
            .into_iter()
            .find(|size| *size > SIZE_MAX)
            .map(|size| format!("a size of {size} is past the limit of {SIZE_MAX}"))
    }
}
