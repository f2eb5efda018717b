//! The usual sizes by name, so that a job can say `preset = "gpt2-124m"` and have no folder at hand.

use crate::config::{
    Activation, Architecture, Dropout, ImageShape, ModelConfig, Norm, NormPlace, Position, RotaryScaling,
};

/// Every preset's name, smallest first within its family.
pub const NAMES: &[&str] = &[
    "gpt2-tiny",
    "gpt2-mini",
    "gpt2-124m",
    "gpt2-355m",
    "gpt2-774m",
    "gpt2-1.5b",
    "llama-tiny",
    "llama-15m",
    "llama-110m",
    "llama-1b",
    "llama-7b",
    "qwen2-tiny",
    "qwen2-0.5b",
    "qwen2-1.5b",
    "bert-tiny",
    "bert-base",
    "bert-large",
    "vit-tiny",
    "vit-base",
    "vit-large",
];

/// The configuration behind a preset's name.
pub fn preset(name: &str) -> Option<ModelConfig> {
    Some(match name {
        "gpt2-tiny" => gpt2(256, 64, 2, 4, 256),
        "gpt2-mini" => gpt2(256, 384, 6, 6, 1024),
        "gpt2-124m" => gpt2(50257, 768, 12, 12, 1024),
        "gpt2-355m" => gpt2(50257, 1024, 24, 16, 1024),
        "gpt2-774m" => gpt2(50257, 1280, 36, 20, 1024),
        "gpt2-1.5b" => gpt2(50257, 1600, 48, 25, 1024),
        "llama-tiny" => llama(256, 64, 2, 4, 2, 176, 256, 1e4, false),
        "llama-15m" => llama(32000, 288, 6, 6, 6, 768, 256, 1e4, true),
        "llama-110m" => llama(32000, 768, 12, 12, 12, 2048, 1024, 1e4, true),
        "llama-1b" => ModelConfig {
            position: Position::Rotary {
                theta: 5e5,
                scaling: RotaryScaling::Llama3 {
                    factor: 32.0,
                    low_freq_factor: 1.0,
                    high_freq_factor: 4.0,
                    original_positions: 8192.0,
                },
            },
            ..llama(128256, 2048, 16, 32, 8, 8192, 131072, 5e5, true)
        },
        "llama-7b" => llama(32000, 4096, 32, 32, 32, 11008, 4096, 1e4, false),
        "qwen2-tiny" => qwen2(256, 64, 2, 4, 2, 176, 256),
        "qwen2-0.5b" => qwen2(151936, 896, 24, 14, 2, 4864, 131072),
        "qwen2-1.5b" => qwen2(151936, 1536, 28, 12, 2, 8960, 131072),
        // The bytes and a mask.
        "bert-tiny" => bert(257, 64, 2, 4, 160, 256),
        "bert-base" => bert(30522, 768, 12, 12, 3072, 512),
        "bert-large" => bert(30522, 1024, 24, 16, 4096, 512),
        "vit-tiny" => vit(ImageShape { channels: 3, size: 32, patch: 8 }, 10, 64, 2, 4, 160),
        "vit-base" => vit(ImageShape { channels: 3, size: 224, patch: 16 }, 1000, 768, 12, 12, 3072),
        "vit-large" => vit(ImageShape { channels: 3, size: 224, patch: 16 }, 1000, 1024, 24, 16, 4096),
        _ => return None,
    })
}

/// A GPT-2 of any size, without dropout (the released weights were trained with it, few train so today).
pub fn gpt2(vocabulary: usize, width: usize, layers: usize, heads: usize, positions: usize) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Gpt2,
        image: None,
        vocabulary,
        width,
        layers,
        heads,
        kv_heads: heads,
        head_size: width / heads,
        mlp_width: 4 * width,
        positions,
        position: Position::Learned,
        norm: Norm::Layer,
        norm_eps: 1e-5,
        norm_place: NormPlace::Before,
        activation: Activation::GeluTanh,
        causal: true,
        attention_scale: 1.0 / ((width / heads) as f32).sqrt(),
        qkv_bias: true,
        attention_output_bias: true,
        mlp_bias: true,
        tied: true,
        token_types: 0,
        head_transform: false,
        dropout: Dropout::default(),
        label_smoothing: 0.0,
        init_range: 0.02,
    }
}

/// A Llama of any size.
#[allow(clippy::too_many_arguments)] // a preset's row of numbers reads best as a row
pub fn llama(
    vocabulary: usize,
    width: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    mlp_width: usize,
    positions: usize,
    theta: f64,
    tied: bool,
) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        image: None,
        vocabulary,
        width,
        layers,
        heads,
        kv_heads,
        head_size: width / heads,
        mlp_width,
        positions,
        position: Position::Rotary { theta, scaling: RotaryScaling::None },
        norm: Norm::Rms,
        norm_eps: 1e-5,
        norm_place: NormPlace::Before,
        activation: Activation::SwiGlu,
        causal: true,
        attention_scale: 1.0 / ((width / heads) as f32).sqrt(),
        qkv_bias: false,
        attention_output_bias: false,
        mlp_bias: false,
        tied,
        token_types: 0,
        head_transform: false,
        dropout: Dropout::default(),
        label_smoothing: 0.0,
        init_range: 0.02,
    }
}

/// A Qwen2 of any size: a Llama with biased queries, keys and values and a tied head.
pub fn qwen2(
    vocabulary: usize,
    width: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    mlp_width: usize,
    positions: usize,
) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Qwen2,
        norm_eps: 1e-6,
        qkv_bias: true,
        ..llama(vocabulary, width, layers, heads, kv_heads, mlp_width, positions, 1e6, true)
    }
}

/// A BERT of any size, for masked tokens, without dropout as the others.
pub fn bert(
    vocabulary: usize,
    width: usize,
    layers: usize,
    heads: usize,
    mlp_width: usize,
    positions: usize,
) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Bert,
        mlp_width,
        norm_eps: 1e-12,
        norm_place: NormPlace::After,
        activation: Activation::GeluErf,
        causal: false,
        token_types: 2,
        head_transform: true,
        ..gpt2(vocabulary, width, layers, heads, positions)
    }
}

/// A ViT of any size, for classes of images, without dropout as the others.
pub fn vit(
    image: ImageShape,
    classes: usize,
    width: usize,
    layers: usize,
    heads: usize,
    mlp_width: usize,
) -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Vit,
        image: Some(image),
        mlp_width,
        norm_eps: 1e-12,
        activation: Activation::GeluErf,
        causal: false,
        tied: false,
        ..gpt2(classes, width, layers, heads, image.patches() + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Chain;

    #[test]
    fn every_name_has_a_sound_preset_of_the_size_it_claims() {
        for name in NAMES {
            let config = preset(name).unwrap_or_else(|| panic!("{name} is listed but unknown"));
            assert_eq!(config.defect(), None, "{name}");
        }
        let millions = |name: &str| Chain::new(&preset(name).unwrap()).parameters() as f64 / 1e6;
        // Published parameter counts.
        for (name, expected) in [
            ("gpt2-124m", 124.44),
            ("gpt2-355m", 354.82),
            ("gpt2-774m", 774.03),
            ("gpt2-1.5b", 1557.61),
            ("llama-1b", 1235.81),
            ("llama-7b", 6738.42),
            ("qwen2-0.5b", 494.03),
            ("qwen2-1.5b", 1543.71),
            // Without the pooler, which has no part in masked tokens.
            ("bert-base", 109.51),
            ("bert-large", 335.17),
            ("vit-base", 86.57),
            ("vit-large", 304.33),
        ] {
            assert!((millions(name) - expected).abs() < 0.01, "{name}: {}", millions(name));
        }
        assert_eq!(preset("gpt2-125m"), None);
    }
}
