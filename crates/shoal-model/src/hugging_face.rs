//! `config.json` to and from [`ModelConfig`]. What we cannot train exactly is refused by name: a model
//! that loads but computes something else would be worse than one that does not load.

use serde_json::{Map, Value, json};
use thiserror::Error;

use crate::config::{
    Activation, Architecture, Dropout, ImageShape, ModelConfig, Norm, NormPlace, Position, RotaryScaling,
};

/// Why a `config.json` cannot be trained from. The caller knows the file and adds its name.
#[derive(Debug, Error, PartialEq)]
pub enum ConfigError {
    #[error("it is not a JSON object")]
    NotAnObject,
    #[error("key \"{key}\" is missing")]
    Missing { key: &'static str },
    #[error("key \"{key}\" is {found}, not {expected}")]
    WrongType { key: String, found: String, expected: &'static str },
    #[error("model_type \"{found}\" is not supported")]
    UnsupportedArchitecture { found: String },
    #[error("key \"{key}\" is {found}, which is not supported")]
    Unsupported { key: &'static str, found: String, hint: &'static str },
    #[error("{0}")]
    Defect(String),
}

impl ConfigError {
    pub fn hint(&self) -> Option<String> {
        match self {
            ConfigError::NotAnObject | ConfigError::Missing { .. } | ConfigError::WrongType { .. } => {
                Some("use the config.json that transformers' save_pretrained writes".into())
            }
            ConfigError::UnsupportedArchitecture { .. } => {
                Some("supported are gpt2, llama, qwen2, bert and vit".into())
            }
            ConfigError::Unsupported { hint, .. } => Some((*hint).into()),
            ConfigError::Defect(_) => Some("correct the sizes in config.json".into()),
        }
    }
}

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

/// Writes the `config.json` of a model. `original` is the one it was imported with, if any: its further
/// keys (token ids, say) are kept.
pub fn write(config: &ModelConfig, original: Option<&Value>) -> Value {
    let mut out = original.and_then(Value::as_object).cloned().unwrap_or_default();
    let ours = match config.architecture {
        Architecture::Gpt2 => write_gpt2(config),
        Architecture::Llama | Architecture::Qwen2 => write_llama(config),
        Architecture::Bert => write_bert(config),
        Architecture::Vit => write_vit(config),
    };
    out.extend(ours);
    if config.architecture == Architecture::Vit {
        name_classes(config.vocabulary, &mut out);
    }
    // Older spellings of what `rope_parameters` now says.
    if out.contains_key("rope_parameters") {
        out.remove("rope_theta");
        out.remove("rope_scaling");
    }
    // The weights are written in float32, whatever the imported file held.
    out.remove("torch_dtype");
    out.insert("dtype".into(), json!("float32"));
    Value::Object(out)
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// A float as the shortest decimal that reads back the same, not widened to fifteen digits of noise.
fn short(value: f32) -> Value {
    value.to_string().parse::<f64>().map_or(Value::Null, |number| json!(number))
}

fn write_gpt2(c: &ModelConfig) -> Map<String, Value> {
    object(json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": short(c.dropout.attention),
        "embd_pdrop": short(c.dropout.embedding),
        "resid_pdrop": short(c.dropout.residual),
        "initializer_range": short(c.init_range),
        "layer_norm_epsilon": short(c.norm_eps),
        "n_ctx": c.positions,
        "n_embd": c.width,
        "n_head": c.heads,
        "n_inner": c.mlp_width,
        "n_layer": c.layers,
        "n_positions": c.positions,
        "scale_attn_weights": c.attention_scale != 1.0 || c.head_size == 1,
        "tie_word_embeddings": c.tied,
        "vocab_size": c.vocabulary,
    }))
}

fn write_llama(c: &ModelConfig) -> Map<String, Value> {
    let qwen = c.architecture == Architecture::Qwen2;
    let mut out = object(json!({
        "architectures": [if qwen { "Qwen2ForCausalLM" } else { "LlamaForCausalLM" }],
        "model_type": if qwen { "qwen2" } else { "llama" },
        "attention_dropout": short(c.dropout.attention),
        "hidden_act": "silu",
        "hidden_size": c.width,
        "head_dim": c.head_size,
        "initializer_range": short(c.init_range),
        "intermediate_size": c.mlp_width,
        "max_position_embeddings": c.positions,
        "num_attention_heads": c.heads,
        "num_hidden_layers": c.layers,
        "num_key_value_heads": c.kv_heads,
        "rms_norm_eps": short(c.norm_eps),
        "rope_parameters": write_rotary(c),
        "tie_word_embeddings": c.tied,
        "vocab_size": c.vocabulary,
    }));
    if !qwen {
        out.insert("attention_bias".into(), json!(c.qkv_bias));
        out.insert("mlp_bias".into(), json!(c.mlp_bias));
    }
    out
}

fn write_bert(c: &ModelConfig) -> Map<String, Value> {
    object(json!({
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "attention_probs_dropout_prob": short(c.dropout.attention),
        "hidden_act": if c.activation == Activation::GeluErf { "gelu" } else { "gelu_new" },
        "hidden_dropout_prob": short(c.dropout.residual),
        "hidden_size": c.width,
        "initializer_range": short(c.init_range),
        "intermediate_size": c.mlp_width,
        "layer_norm_eps": short(c.norm_eps),
        "max_position_embeddings": c.positions,
        "num_attention_heads": c.heads,
        "num_hidden_layers": c.layers,
        "tie_word_embeddings": c.tied,
        "type_vocab_size": c.token_types,
        "vocab_size": c.vocabulary,
    }))
}

fn write_vit(c: &ModelConfig) -> Map<String, Value> {
    let Some(image) = c.image else { return Map::new() };
    object(json!({
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "attention_probs_dropout_prob": short(c.dropout.attention),
        "hidden_act": if c.activation == Activation::GeluErf { "gelu" } else { "gelu_new" },
        "hidden_dropout_prob": short(c.dropout.residual),
        "hidden_size": c.width,
        "image_size": image.size,
        "initializer_range": short(c.init_range),
        "intermediate_size": c.mlp_width,
        "layer_norm_eps": short(c.norm_eps),
        "num_attention_heads": c.heads,
        "num_channels": image.channels,
        "num_hidden_layers": c.layers,
        "patch_size": image.patch,
        "qkv_bias": c.qkv_bias,
    }))
}

/// Names for the classes, where the imported ones are not theirs: transformers counts them by their names.
fn name_classes(classes: usize, out: &mut Map<String, Value>) {
    if out.get("id2label").and_then(Value::as_object).is_some_and(|names| names.len() == classes) {
        return;
    }
    let name = |class: usize| format!("LABEL_{class}");
    let names: Map<_, _> = (0..classes).map(|class| (class.to_string(), json!(name(class)))).collect();
    let numbers: Map<_, _> = (0..classes).map(|class| (name(class), json!(class))).collect();
    out.insert("id2label".into(), Value::Object(names));
    out.insert("label2id".into(), Value::Object(numbers));
}

fn write_rotary(c: &ModelConfig) -> Value {
    let Position::Rotary { theta, scaling } = c.position else { return Value::Null };
    match scaling {
        RotaryScaling::None => json!({"rope_type": "default", "rope_theta": theta}),
        RotaryScaling::Linear { factor } => {
            json!({"rope_type": "linear", "rope_theta": theta, "factor": factor})
        }
        RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => json!({
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_positions as u64,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets::{NAMES, preset};

    #[test]
    fn every_preset_survives_writing_and_reading() {
        for name in NAMES {
            let config = preset(name).unwrap();
            assert_eq!(read(&write(&config, None)).as_ref(), Ok(&config), "{name}");
        }
    }

    #[test]
    fn absent_keys_take_the_defaults_transformers_gives_them() {
        let config =
            read(&json!({"model_type": "gpt2", "vocab_size": 10, "n_embd": 8, "n_head": 2, "n_layer": 1}))
                .unwrap();
        assert_eq!(config.mlp_width, 32);
        assert_eq!(config.dropout, Dropout { embedding: 0.1, attention: 0.1, residual: 0.1 });
        assert!(config.tied);
    }

    #[test]
    fn the_older_spelling_of_rotary_parameters_is_read() {
        let config = read(&json!({
            "model_type": "llama", "vocab_size": 10, "hidden_size": 8, "num_attention_heads": 2,
            "num_hidden_layers": 1, "intermediate_size": 16, "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0}
        }))
        .unwrap();
        let expected = Position::Rotary { theta: 5e5, scaling: RotaryScaling::Linear { factor: 2.0 } };
        assert_eq!(config.position, expected);
    }

    #[test]
    fn what_cannot_be_trained_exactly_is_refused_by_name() {
        let base = write(&preset("qwen2-tiny").unwrap(), None);
        let with = |key: &str, value: Value| {
            let mut config = base.clone();
            config[key] = value;
            read(&config).unwrap_err()
        };
        assert_eq!(
            with("model_type", json!("mamba")),
            ConfigError::UnsupportedArchitecture { found: "mamba".into() }
        );
        assert!(with("use_sliding_window", json!(true)).to_string().contains("use_sliding_window"));
        assert!(with("hidden_act", json!("relu")).to_string().contains("\"relu\""));
        assert!(with("hidden_size", json!("wide")).to_string().contains("a whole number"));
        assert!(with("num_key_value_heads", json!(3)).to_string().contains("3 key-value heads"));
        assert!(with("rope_parameters", json!({"rope_type": "yarn"})).to_string().contains("yarn"));
        assert!(with("vocab_size", json!(null)).to_string().contains("vocab_size"));
        assert!(with("num_hidden_layers", json!(-1)).hint().is_some());
    }

    #[test]
    fn a_bert_that_cannot_be_trained_exactly_is_refused_by_name() {
        let base = write(&preset("bert-tiny").unwrap(), None);
        let with = |key: &str, value: Value| {
            let mut config = base.clone();
            config[key] = value;
            read(&config)
        };
        for (key, value) in [
            ("is_decoder", json!(true)),
            ("add_cross_attention", json!(true)),
            ("tie_word_embeddings", json!(false)),
            ("position_embedding_type", json!("relative_key")),
            ("hidden_act", json!("relu")),
            ("type_vocab_size", json!(0)),
        ] {
            let error = with(key, value).unwrap_err();
            assert!(error.to_string().contains(key) && error.hint().is_some(), "{error}");
        }
        assert_eq!(with("hidden_act", json!("gelu_new")).unwrap().activation, Activation::GeluTanh);
    }

    #[test]
    fn a_vit_that_cannot_be_trained_exactly_is_refused_and_its_classes_keep_their_names() {
        let config = preset("vit-tiny").unwrap();
        let base = write(&config, None);
        for (key, value) in [
            ("image_size", json!(30)),
            ("image_size", json!([32, 64])),
            ("patch_size", json!(0)),
            ("hidden_act", json!("relu")),
            ("id2label", json!({})),
        ] {
            let mut changed = base.clone();
            changed[key] = value;
            assert!(read(&changed).unwrap_err().hint().is_some(), "{key}");
        }
        let mut named = base.clone();
        named["id2label"]["3"] = json!("a gull");
        assert_eq!(write(&config, Some(&named))["id2label"]["3"], "a gull");
        let fewer = ModelConfig { vocabulary: 4, ..config };
        assert_eq!(write(&fewer, Some(&named))["id2label"]["3"], "LABEL_3");
    }

    #[test]
    fn further_keys_of_the_imported_config_are_kept() {
        let config = preset("llama-tiny").unwrap();
        let out =
            write(&config, Some(&json!({"eos_token_id": 7, "torch_dtype": "bfloat16", "rope_theta": 1.0})));
        assert_eq!(out["eos_token_id"], 7);
        assert_eq!(out["dtype"], "float32");
        assert!(out.get("rope_theta").is_none());
    }
}
