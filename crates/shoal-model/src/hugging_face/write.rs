//! [`ModelConfig`] to `config.json`, a function an architecture.

use serde_json::{Map, Value, json};

use crate::config::{Activation, Architecture, ModelConfig, Position, RotaryScaling};

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
