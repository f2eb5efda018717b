//! `config.json` to and from [`ModelConfig`]. What we cannot train exactly is refused by name: a model
//! that loads but computes something else would be worse than one that does not load.

mod read;
mod write;

pub use read::read;
use thiserror::Error;
pub use write::write;

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
    /// Of a convolutional model's shape.json.
    #[error("{0}")]
    Shape(String),
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
            ConfigError::Shape(_) => Some(
                "write {\"architecture\": \"resnet50\", \"classes\": 10, \"image\": 224}, say; docs/models.md has every key"
                    .into(),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::config::{Activation, Dropout, ModelConfig, Position, RotaryScaling};
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
