//! `config.json` to [`ModelConfig`], a function an architecture.

use serde_json::{Map, Value};

use super::ConfigError;
use crate::config::{
    Activation, Architecture, Dropout, ImageShape, ModelConfig, Norm, NormPlace, Position, RotaryScaling,
};

/// Typed look-ups in the JSON object, with transformers' defaults where a key is absent or null.
struct Keys<'a>(&'a Map<String, Value>);

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn wrong(key: &str, found: &Value, expected: &'static str) -> ConfigError {
        ConfigError::WrongType { key: key.into(), found: found.to_string(), expected }
    }

    fn size_or(&self, key: &'static str, default: Option<usize>) -> Result<usize, ConfigError> {
        match self.get(key) {
            None => default.ok_or(ConfigError::Missing { key }),
            Some(value) => value
                .as_u64()
                .and_then(|number| usize::try_from(number).ok())
                .ok_or_else(|| Self::wrong(key, value, "a whole number")),
        }
    }

    fn size(&self, key: &'static str) -> Result<usize, ConfigError> {
        self.size_or(key, None)
    }

    fn number(&self, key: &'static str, default: f64) -> Result<f64, ConfigError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| Self::wrong(key, value, "a number")),
        }
    }

    fn flag(&self, key: &'static str, default: bool) -> Result<bool, ConfigError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| Self::wrong(key, value, "true or false")),
        }
    }

    fn text(&self, key: &'static str, default: &str) -> Result<String, ConfigError> {
        match self.get(key) {
            None => Ok(default.into()),
            Some(value) => {
                value.as_str().map(str::to_owned).ok_or_else(|| Self::wrong(key, value, "a string"))
            }
        }
    }

    fn refuse_unless(&self, key: &'static str, allowed: &[&str], default: &str) -> Result<(), ConfigError> {
        let found = self.text(key, default)?;
        if allowed.contains(&found.as_str()) {
            return Ok(());
        }
        Err(ConfigError::Unsupported {
            key,
            found: format!("\"{found}\""),
            hint: "only the activation the released models use is trained exactly",
        })
    }
}

/// Reads a `config.json`.
pub fn read(config: &Value) -> Result<ModelConfig, ConfigError> {
    let keys = Keys(config.as_object().ok_or(ConfigError::NotAnObject)?);
    let model = match keys.get("model_type").and_then(Value::as_str) {
        Some("gpt2") => read_gpt2(&keys)?,
        Some("llama") => read_llama(&keys, Architecture::Llama)?,
        Some("qwen2") => read_llama(&keys, Architecture::Qwen2)?,
        Some("bert") => read_bert(&keys)?,
        Some("vit") => read_vit(&keys)?,
        Some(other) => return Err(ConfigError::UnsupportedArchitecture { found: other.into() }),
        None => return Err(ConfigError::Missing { key: "model_type" }),
    };
    match model.defect() {
        Some(sentence) => Err(ConfigError::Defect(sentence)),
        None => Ok(model),
    }
}

fn read_gpt2(keys: &Keys) -> Result<ModelConfig, ConfigError> {
    keys.refuse_unless("activation_function", &["gelu_new", "gelu_pytorch_tanh"], "gelu_new")?;
    if keys.flag("scale_attn_by_inverse_layer_idx", false)? {
        return Err(ConfigError::Unsupported {
            key: "scale_attn_by_inverse_layer_idx",
            found: "true".into(),
            hint: "set it to false: no released GPT-2 uses it",
        });
    }
    if keys.flag("add_cross_attention", false)? {
        return Err(ConfigError::Unsupported {
            key: "add_cross_attention",
            found: "true".into(),
            hint: "only decoders without an encoder are trained",
        });
    }
    let (width, heads) = (keys.size("n_embd")?, keys.size("n_head")?);
    if heads == 0 || !width.is_multiple_of(heads) {
        return Err(ConfigError::Defect(format!("n_embd {width} is not a multiple of n_head {heads}")));
    }
    let head_size = width / heads;
    let scaled = keys.flag("scale_attn_weights", true)?;
    Ok(ModelConfig {
        architecture: Architecture::Gpt2,
        image: None,
        vocabulary: keys.size("vocab_size")?,
        width,
        layers: keys.size("n_layer")?,
        heads,
        kv_heads: heads,
        head_size,
        mlp_width: keys.size_or("n_inner", Some(4 * width))?,
        positions: keys.size_or("n_positions", Some(1024))?,
        position: Position::Learned,
        norm: Norm::Layer,
        norm_eps: keys.number("layer_norm_epsilon", 1e-5)? as f32,
        norm_place: NormPlace::Before,
        activation: Activation::GeluTanh,
        causal: true,
        attention_scale: if scaled { 1.0 / (head_size as f32).sqrt() } else { 1.0 },
        qkv_bias: true,
        attention_output_bias: true,
        mlp_bias: true,
        tied: keys.flag("tie_word_embeddings", true)?,
        token_types: 0,
        head_transform: false,
        dropout: Dropout {
            embedding: keys.number("embd_pdrop", 0.1)? as f32,
            attention: keys.number("attn_pdrop", 0.1)? as f32,
            residual: keys.number("resid_pdrop", 0.1)? as f32,
        },
        label_smoothing: 0.0,
        init_range: keys.number("initializer_range", 0.02)? as f32,
    })
}

fn read_llama(keys: &Keys, architecture: Architecture) -> Result<ModelConfig, ConfigError> {
    keys.refuse_unless("hidden_act", &["silu", "swish"], "silu")?;
    let qwen = architecture == Architecture::Qwen2;
    let sliding = keys.flag("use_sliding_window", false)?
        || keys
            .get("layer_types")
            .and_then(Value::as_array)
            .is_some_and(|kinds| kinds.iter().any(|kind| kind != "full_attention"));
    if sliding {
        return Err(ConfigError::Unsupported {
            key: "use_sliding_window",
            found: "true".into(),
            hint: "only full attention is trained; set use_sliding_window to false if sequences fit the window",
        });
    }
    let (width, heads) = (keys.size("hidden_size")?, keys.size("num_attention_heads")?);
    if heads == 0 {
        return Err(ConfigError::Defect("num_attention_heads is 0".into()));
    }
    let head_size = keys.size_or("head_dim", Some(width / heads))?;
    let attention_bias = keys.flag("attention_bias", false)?;
    Ok(ModelConfig {
        architecture,
        image: None,
        vocabulary: keys.size("vocab_size")?,
        width,
        layers: keys.size("num_hidden_layers")?,
        heads,
        kv_heads: keys.size_or("num_key_value_heads", Some(heads))?,
        head_size,
        mlp_width: keys.size("intermediate_size")?,
        positions: keys.size_or("max_position_embeddings", Some(2048))?,
        position: rotary(keys)?,
        norm: Norm::Rms,
        norm_eps: keys.number("rms_norm_eps", 1e-6)? as f32,
        norm_place: NormPlace::Before,
        activation: Activation::SwiGlu,
        causal: true,
        attention_scale: 1.0 / (head_size as f32).sqrt(),
        qkv_bias: qwen || attention_bias,
        attention_output_bias: !qwen && attention_bias,
        mlp_bias: !qwen && keys.flag("mlp_bias", false)?,
        tied: keys.flag("tie_word_embeddings", false)?,
        token_types: 0,
        head_transform: false,
        dropout: Dropout { attention: keys.number("attention_dropout", 0.0)? as f32, ..Dropout::default() },
        label_smoothing: 0.0,
        init_range: keys.number("initializer_range", 0.02)? as f32,
    })
}

/// The activation of an encoder's MLP.
fn gelu(keys: &Keys) -> Result<Activation, ConfigError> {
    match keys.text("hidden_act", "gelu")?.as_str() {
        "gelu" => Ok(Activation::GeluErf),
        "gelu_new" | "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        other => Err(ConfigError::Unsupported {
            key: "hidden_act",
            found: format!("\"{other}\""),
            hint: "supported are gelu, gelu_new and gelu_pytorch_tanh",
        }),
    }
}

/// Width and heads of an encoder; the first is a multiple of the second.
fn width_and_heads(keys: &Keys) -> Result<(usize, usize), ConfigError> {
    let (width, heads) = (keys.size("hidden_size")?, keys.size("num_attention_heads")?);
    if heads == 0 || !width.is_multiple_of(heads) {
        let sentence = format!("hidden_size {width} is not a multiple of num_attention_heads {heads}");
        return Err(ConfigError::Defect(sentence));
    }
    Ok((width, heads))
}

fn read_bert(keys: &Keys) -> Result<ModelConfig, ConfigError> {
    let activation = gelu(keys)?;
    let positions = keys.text("position_embedding_type", "absolute")?;
    if positions != "absolute" {
        return Err(ConfigError::Unsupported {
            key: "position_embedding_type",
            found: format!("\"{positions}\""),
            hint: "only absolute positions are trained",
        });
    }
    let flags = [
        ("is_decoder", false, "a BERT that sees only earlier tokens is not trained; set it to false"),
        ("add_cross_attention", false, "only models without an encoder beside them are trained"),
        ("tie_word_embeddings", true, "only an output projection tied to the word embedding is trained"),
    ];
    for (key, supported, hint) in flags {
        if keys.flag(key, supported)? != supported {
            return Err(ConfigError::Unsupported { key, found: (!supported).to_string(), hint });
        }
    }
    let (width, heads) = width_and_heads(keys)?;
    let token_types = keys.size_or("type_vocab_size", Some(2))?;
    if token_types == 0 {
        return Err(ConfigError::Defect("type_vocab_size is 0".into()));
    }
    let head_size = width / heads;
    let dropout = keys.number("hidden_dropout_prob", 0.1)? as f32;
    Ok(ModelConfig {
        architecture: Architecture::Bert,
        image: None,
        vocabulary: keys.size("vocab_size")?,
        width,
        layers: keys.size("num_hidden_layers")?,
        heads,
        kv_heads: heads,
        head_size,
        mlp_width: keys.size("intermediate_size")?,
        positions: keys.size_or("max_position_embeddings", Some(512))?,
        position: Position::Learned,
        norm: Norm::Layer,
        norm_eps: keys.number("layer_norm_eps", 1e-12)? as f32,
        norm_place: NormPlace::After,
        activation,
        causal: false,
        attention_scale: 1.0 / (head_size as f32).sqrt(),
        qkv_bias: true,
        attention_output_bias: true,
        mlp_bias: true,
        tied: true,
        token_types,
        head_transform: true,
        dropout: Dropout {
            embedding: dropout,
            attention: keys.number("attention_probs_dropout_prob", 0.1)? as f32,
            residual: dropout,
        },
        label_smoothing: 0.0,
        init_range: keys.number("initializer_range", 0.02)? as f32,
    })
}

fn read_vit(keys: &Keys) -> Result<ModelConfig, ConfigError> {
    let activation = gelu(keys)?;
    let (width, heads) = width_and_heads(keys)?;
    let image = ImageShape {
        channels: keys.size_or("num_channels", Some(3))?,
        size: keys.size_or("image_size", Some(224))?,
        patch: keys.size_or("patch_size", Some(16))?,
    };
    let positions = match image.patch {
        0 => return Err(ConfigError::Defect("patch_size is 0".into())),
        _ => (image.size / image.patch).saturating_pow(2).saturating_add(1),
    };
    let head_size = width / heads;
    let dropout = keys.number("hidden_dropout_prob", 0.0)? as f32;
    Ok(ModelConfig {
        architecture: Architecture::Vit,
        image: Some(image),
        vocabulary: classes(keys)?,
        width,
        layers: keys.size("num_hidden_layers")?,
        heads,
        kv_heads: heads,
        head_size,
        mlp_width: keys.size("intermediate_size")?,
        positions,
        position: Position::Learned,
        norm: Norm::Layer,
        norm_eps: keys.number("layer_norm_eps", 1e-12)? as f32,
        norm_place: NormPlace::Before,
        activation,
        causal: false,
        attention_scale: 1.0 / (head_size as f32).sqrt(),
        qkv_bias: keys.flag("qkv_bias", true)?,
        attention_output_bias: true,
        mlp_bias: true,
        tied: false,
        token_types: 0,
        head_transform: false,
        dropout: Dropout {
            embedding: dropout,
            attention: keys.number("attention_probs_dropout_prob", 0.0)? as f32,
            residual: dropout,
        },
        label_smoothing: 0.0,
        init_range: keys.number("initializer_range", 0.02)? as f32,
    })
}

/// As many classes as have names; transformers writes no number, and takes two where there are no names.
fn classes(keys: &Keys) -> Result<usize, ConfigError> {
    match keys.get("id2label") {
        None => keys.size_or("num_labels", Some(2)),
        Some(value) => {
            let names = value.as_object().ok_or_else(|| Keys::wrong("id2label", value, "an object"))?;
            Ok(names.len())
        }
    }
}

/// Rotary parameters in either place that transformers has kept them: `rope_parameters`, or a top-level
/// `rope_theta` beside `rope_scaling`.
fn rotary(keys: &Keys) -> Result<Position, ConfigError> {
    let empty = Map::new();
    let section = match keys.get("rope_parameters").or_else(|| keys.get("rope_scaling")) {
        None => &empty,
        Some(value) => value.as_object().ok_or_else(|| Keys::wrong("rope_parameters", value, "an object"))?,
    };
    let rope = Keys(section);
    let theta = rope.number("rope_theta", keys.number("rope_theta", 10_000.0)?)?;
    let kind = rope.text("rope_type", &rope.text("type", "default")?)?;
    if rope.number("partial_rotary_factor", 1.0)? != 1.0 {
        return Err(ConfigError::Unsupported {
            key: "partial_rotary_factor",
            found: "not 1".into(),
            hint: "only whole heads are turned",
        });
    }
    let scaling = match kind.as_str() {
        "default" => RotaryScaling::None,
        "linear" => RotaryScaling::Linear { factor: rope.number("factor", 1.0)? },
        "llama3" => RotaryScaling::Llama3 {
            factor: rope.number("factor", 8.0)?,
            low_freq_factor: rope.number("low_freq_factor", 1.0)?,
            high_freq_factor: rope.number("high_freq_factor", 4.0)?,
            original_positions: rope.number("original_max_position_embeddings", 8192.0)?,
        },
        other => {
            return Err(ConfigError::Unsupported {
                key: "rope_type",
                found: format!("\"{other}\""),
                hint: "supported are default, linear and llama3",
            });
        }
    };
    Ok(Position::Rotary { theta, scaling })
}
