//! Any model a job can name: a transformer, which `config.json` describes, or a convolutional one, which
//! `shape.json` does. Whoever trains, plans or exports asks here and need not know which.

use serde_json::{Value, json};

use crate::chain::Chain;
use crate::config::{Architecture, Dropout, ImageShape, ModelConfig};
use crate::hugging_face::{self, ConfigError};
use crate::presets;
use crate::shape::{self, ConvolutionalModel};

#[derive(Clone, Debug, PartialEq)]
pub enum Model {
    Transformer(ModelConfig),
    Convolutional(ConvolutionalModel),
}

/// The file that describes a transformer.
pub const CONFIG_FILE: &str = "config.json";

impl Model {
    pub fn preset(name: &str) -> Option<Model> {
        let convolutional = || ConvolutionalModel::preset(name).map(Model::Convolutional);
        presets::preset(name).map(Model::Transformer).or_else(convolutional)
    }

    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        presets::NAMES.iter().chain(shape::NAMES).copied()
    }

    /// Reads either description.
    pub fn read(described: &Value) -> Result<Model, ConfigError> {
        match described.get("model_type").is_none() && described.get("architecture").is_some() {
            true => ConvolutionalModel::read(described).map(Model::Convolutional),
            false => hugging_face::read(described).map(Model::Transformer),
        }
    }

    /// Writes the model's description. `original` is the one it was imported with, if any: a transformer's further
    /// keys are kept.
    pub fn write(&self, original: Option<&Value>) -> Value {
        match self {
            Model::Transformer(config) => hugging_face::write(config, original),
            Model::Convolutional(model) => model.write(),
        }
    }

    /// Puts names of classes into a description that has a place for them.
    pub fn name_classes(&self, names: &[String], described: &mut Value) {
        if matches!(self, Model::Transformer(config) if config.image.is_some()) {
            let by_number = names.iter().enumerate().map(|(class, name)| (class.to_string(), json!(name)));
            let by_name = names.iter().enumerate().map(|(class, name)| (name.clone(), json!(class)));
            described["id2label"] = by_number.collect();
            described["label2id"] = by_name.collect();
        }
    }

    /// The file that describes it.
    pub fn file(&self) -> &'static str {
        match self {
            Model::Transformer(_) => CONFIG_FILE,
            Model::Convolutional(_) => shape::FILE,
        }
    }

    pub fn chain(&self) -> Chain {
        match self {
            Model::Transformer(config) => Chain::new(config),
            Model::Convolutional(model) => model.chain(),
        }
    }

    pub fn family(&self) -> &'static str {
        match self {
            Model::Transformer(config) => match config.architecture {
                Architecture::Gpt2 => "gpt2",
                Architecture::Llama => "llama",
                Architecture::Qwen2 => "qwen2",
                Architecture::Bert => "bert",
                Architecture::Vit => "vit",
            },
            Model::Convolutional(model) => model.family(),
        }
    }

    /// The images that samples are, where they are images. A convolutional model cuts them into one patch.
    pub fn image(&self) -> Option<ImageShape> {
        match self {
            Model::Transformer(config) => config.image,
            Model::Convolutional(model) => {
                let (channels, size) = (model.shape.channels, model.shape.size);
                Some(ImageShape { channels, size, patch: size })
            }
        }
    }

    /// Tokens that there are, or classes.
    pub fn vocabulary(&self) -> usize {
        match self {
            Model::Transformer(config) => config.vocabulary,
            Model::Convolutional(model) => model.shape.classes,
        }
    }

    /// Rows of the longest sample; one where a sample is not cut into rows.
    pub fn positions(&self) -> usize {
        match self {
            Model::Transformer(config) => config.positions,
            Model::Convolutional(_) => 1,
        }
    }

    /// Whether it predicts the next token.
    pub fn is_causal(&self) -> bool {
        matches!(self, Model::Transformer(config) if config.causal)
    }

    /// Width of an attention head, where there are heads.
    pub fn head_size(&self) -> Option<usize> {
        match self {
            Model::Transformer(config) => Some(config.head_size),
            Model::Convolutional(_) => None,
        }
    }

    pub fn label_smoothing(&self) -> f32 {
        match self {
            Model::Transformer(config) => config.label_smoothing,
            Model::Convolutional(model) => model.label_smoothing,
        }
    }

    pub fn set_label_smoothing(&mut self, share: f32) {
        match self {
            Model::Transformer(config) => config.label_smoothing = share,
            Model::Convolutional(model) => model.label_smoothing = share,
        }
    }

    /// Samples that batch norms take together, where there are some and not the whole batch.
    pub fn norm_group(&self) -> Option<usize> {
        match self {
            Model::Transformer(_) => None,
            Model::Convolutional(model) => model.norm_group,
        }
    }

    /// Sets how many those are; false where there is no batch norm.
    pub fn set_norm_group(&mut self, samples: usize) -> bool {
        match self {
            Model::Transformer(_) => false,
            Model::Convolutional(model) => {
                model.norm_group = Some(samples);
                model.chain().has_batch_norm()
            }
        }
    }

    /// Sets the rate of every site that drops; false where there is none.
    pub fn set_dropout(&mut self, rate: f32) -> bool {
        match self {
            Model::Transformer(config) => {
                config.dropout = Dropout { embedding: rate, attention: rate, residual: rate };
                true
            }
            Model::Convolutional(model) => {
                model.dropout = rate;
                model.drops()
            }
        }
    }

    /// Another number of classes, for a model of images.
    pub fn set_classes(&mut self, classes: usize) {
        match self {
            Model::Transformer(config) => config.vocabulary = classes,
            Model::Convolutional(model) => model.shape.classes = classes,
        }
    }

    /// Another size of images, for a model that takes them.
    pub fn set_image_size(&mut self, size: usize) {
        match self {
            Model::Transformer(config) => {
                if let Some(image) = &mut config.image {
                    image.size = size;
                    config.positions = (size / image.patch.max(1)).saturating_pow(2).saturating_add(1);
                }
            }
            Model::Convolutional(model) => model.shape.size = size,
        }
    }

    /// Whether weights for one size of images do not fit another.
    pub fn is_bound_to_size(&self) -> bool {
        match self {
            Model::Transformer(_) => true,
            Model::Convolutional(model) => model.is_bound_to_size(),
        }
    }

    /// Sizes that no arithmetic could repair, as one sentence.
    pub fn defect(&self) -> Option<String> {
        match self {
            Model::Transformer(config) => config.defect(),
            Model::Convolutional(model) => model.shape.defect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_is_read_back_from_its_own_description_and_fits_its_chain() {
        for name in Model::preset_names() {
            let model = Model::preset(name).unwrap_or_else(|| panic!("{name} is listed but unknown"));
            assert_eq!(model.defect(), None, "{name}");
            assert_eq!(Model::read(&model.write(None)).as_ref(), Ok(&model), "{name}");
            let chain = model.chain();
            let shown = (model.image(), model.vocabulary(), model.positions(), model.is_causal());
            assert_eq!(shown, (chain.image, chain.vocabulary, chain.positions, chain.causal), "{name}");
        }
    }

    #[test]
    fn classes_and_image_size_are_those_set() {
        for name in ["vit-base", "resnet18", "vgg11"] {
            let mut model = Model::preset(name).unwrap();
            model.set_classes(7);
            model.set_image_size(64);
            assert_eq!(model.defect(), None, "{name}");
            let chain = model.chain();
            let image = chain.image.unwrap();
            assert_eq!((chain.vocabulary, image.size, chain.positions), (7, 64, model.positions()), "{name}");
            model.set_image_size(0);
            assert!(model.defect().is_some(), "{name}");
        }
    }
}
