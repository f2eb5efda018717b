//! `shape.json` to and from a convolutional model: what `config.json` is to the others. The architecture may be a
//! published model's name, which then answers for every size that is left out.

use serde_json::{Map, Value, json};

use crate::chain::{Chain, LayerKind};
use crate::convolutional::{self, Body, ConvolutionSpec, ConvolutionalConfig, JoinSpec};
use crate::hugging_face::ConfigError;

/// The file beside the weights.
pub const FILE: &str = "shape.json";

/// Every published model's name, as torchvision has it.
pub const NAMES: &[&str] = &[
    "vgg11",
    "vgg13",
    "vgg16",
    "vgg19",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "wide_resnet50_2",
    "wide_resnet101_2",
    "inception_v3",
];

/// What torchvision drops of a VGG's dense layers, and before an Inception's last.
const DROPOUT: f32 = 0.5;

/// A convolutional model, and how it is trained where its shape does not say.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvolutionalModel {
    pub shape: ConvolutionalConfig,
    /// The share that a VGG or Inception with dropout drops.
    pub dropout: f32,
    /// The share of a label that is spread over all classes while training.
    pub label_smoothing: f32,
    /// Samples that batch norms take together; none for the whole batch.
    pub norm_group: Option<usize>,
}

impl ConvolutionalModel {
    pub fn preset(name: &str) -> Option<ConvolutionalModel> {
        Some(ConvolutionalModel {
            shape: convolutional::preset(name)?,
            dropout: DROPOUT,
            label_smoothing: 0.0,
            norm_group: None,
        })
    }

    /// Whether it has layers that drop.
    pub fn drops(&self) -> bool {
        matches!(self.shape.body, Body::Vgg { dropout: true, .. } | Body::Inception { dropout: true })
    }

    /// Whether a tensor's shape depends on the size of the images.
    pub fn is_bound_to_size(&self) -> bool {
        matches!(self.shape.body, Body::Vgg { .. })
    }

    /// The architecture's family.
    pub fn family(&self) -> &'static str {
        match self.shape.body {
            Body::Vgg { .. } => "vgg",
            Body::Resnet { .. } => "resnet",
            Body::Inception { .. } => "inception",
        }
    }

    pub fn chain(&self) -> Chain {
        let mut chain = Chain::convolutional(&self.shape);
        for layer in &mut chain.layers {
            match &mut layer.kind {
                LayerKind::Convolution(ConvolutionSpec { dropout, .. })
                | LayerKind::Join(JoinSpec { dropout, .. })
                    if *dropout > 0.0 =>
                {
                    *dropout = self.dropout;
                }
                LayerKind::Head(head) => head.label_smoothing = self.label_smoothing,
                _ => {}
            }
        }
        chain.set_norm_group(self.norm_group);
        chain
    }

    /// Reads `shape.json`.
    pub fn read(shape: &Value) -> Result<ConvolutionalModel, ConfigError> {
        let mut keys = shape.as_object().ok_or(ConfigError::NotAnObject)?.clone();
        let dropout = take_dropout(&mut keys)?;
        let widening = take_widening(&mut keys)?;
        let name = keys.get("architecture").and_then(Value::as_str).unwrap_or_default();
        let preset = convolutional::preset(name);
        if preset.is_none() && name != "resnet" {
            let known = "\"resnet\" and the published models' names are";
            return Err(ConfigError::Shape(format!("the architecture {name:?} is not known; {known}")));
        }
        if let Some(preset) = &preset {
            // What is written wins, but for the architecture itself.
            let (written, published) = (keys.clone(), write_shape(preset));
            keys = published;
            keys.extend(written.into_iter().filter(|(key, _)| key != "architecture"));
            keys.remove("widening");
        }
        let mut shape = ConvolutionalConfig::read(&Value::Object(keys)).map_err(ConfigError::Shape)?;
        match (&mut shape.body, preset.map(|preset| preset.body)) {
            (Body::Vgg { dropout: drops, .. } | Body::Inception { dropout: drops }, _) => {
                *drops = dropout.is_some();
            }
            (Body::Resnet { widening: wide, .. }, published) => {
                if dropout.is_some() {
                    return Err(ConfigError::Shape("a ResNet has no dropout".into()));
                }
                let published = match published {
                    Some(Body::Resnet { widening, .. }) => widening,
                    _ => 1,
                };
                *wide = widening.unwrap_or(published);
            }
        }
        if let Some(defect) = shape.defect() {
            return Err(ConfigError::Shape(defect));
        }
        let dropout = dropout.unwrap_or(DROPOUT);
        Ok(ConvolutionalModel { shape, dropout, label_smoothing: 0.0, norm_group: None })
    }

    /// Writes `shape.json`.
    pub fn write(&self) -> Value {
        let mut keys = write_shape(&self.shape);
        if self.drops() {
            // The shortest decimal that reads back the same.
            let rate: f64 = self.dropout.to_string().parse().unwrap_or_default();
            keys.insert("dropout".into(), json!(rate));
        }
        Value::Object(keys)
    }
}

fn take_dropout(keys: &mut Map<String, Value>) -> Result<Option<f32>, ConfigError> {
    let Some(value) = keys.remove("dropout").filter(|value| !value.is_null()) else { return Ok(None) };
    match value.as_f64().map(|rate| rate as f32).filter(|rate| (0.0..1.0).contains(rate)) {
        Some(rate) => Ok(Some(rate)),
        None => Err(ConfigError::Shape(format!("the dropout is {value}, not a number in 0..1"))),
    }
}

fn take_widening(keys: &mut Map<String, Value>) -> Result<Option<usize>, ConfigError> {
    let Some(value) = keys.remove("widening").filter(|value| !value.is_null()) else { return Ok(None) };
    match value.as_u64() {
        Some(factor) => Ok(Some(factor as usize)),
        None => Err(ConfigError::Shape(format!("the widening is {value}, not a whole number"))),
    }
}

/// All of a shape but for dropout.
fn write_shape(shape: &ConvolutionalConfig) -> Map<String, Value> {
    let mut keys = Map::new();
    let mut set = |key: &str, value: Value| keys.insert(key.into(), value);
    match &shape.body {
        Body::Vgg { groups, classifier, .. } => {
            let same = |name: &&&str| {
                let body = convolutional::preset(name).map(|preset| preset.body);
                matches!(body, Some(Body::Vgg { groups: published, .. }) if published == *groups)
            };
            set("architecture", json!(NAMES.iter().find(same)));
            set("classifier", json!(classifier));
        }
        Body::Resnet { blocks, bottleneck, widening } => {
            set("architecture", json!("resnet"));
            set("block", json!(if *bottleneck { "bottleneck" } else { "basic" }));
            set("blocks", json!(blocks));
            if *widening != 1 {
                set("widening", json!(widening));
            }
        }
        Body::Inception { .. } => {
            set("architecture", json!("inception_v3"));
        }
    }
    set("first_channels", json!(shape.first_channels));
    set("classes", json!(shape.classes));
    set("image", json!(shape.size));
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_published_model_survives_writing_and_reading_and_its_name_says_it_all() {
        for name in NAMES {
            let mut model = ConvolutionalModel::preset(name).unwrap();
            (model.shape.classes, model.shape.size) = (10, 96);
            if model.drops() {
                model.dropout = 0.2;
            }
            assert_eq!(ConvolutionalModel::read(&model.write()).as_ref(), Ok(&model), "{name}");
            let mut short = json!({"architecture": name, "classes": 10, "image": 96});
            if model.drops() {
                short["dropout"] = json!(0.2);
            }
            assert_eq!(ConvolutionalModel::read(&short).as_ref(), Ok(&model), "{name}");
        }
    }

    #[test]
    fn a_shape_that_cannot_be_trained_is_refused() {
        for (key, value) in [
            ("architecture", json!("resnet51")),
            ("architecture", json!(50)),
            ("dropout", json!(0.5)),
            ("widening", json!("two")),
            ("widening", json!(0)),
            ("classes", json!(-1)),
            ("image", json!(0)),
            ("kinds", json!(10)),
        ] {
            let mut shape = json!({"architecture": "resnet50"});
            assert!(ConvolutionalModel::read(&shape).is_ok());
            shape[key] = value;
            assert!(ConvolutionalModel::read(&shape).unwrap_err().hint().is_some(), "{key}");
        }
        let mut shape = json!({"architecture": "vgg16", "dropout": 1.0});
        assert!(ConvolutionalModel::read(&shape).is_err());
        shape["dropout"] = json!(0.0);
        assert!(ConvolutionalModel::read(&shape).unwrap().drops());
    }

    #[test]
    fn dropout_and_smoothing_reach_their_layers_and_names_stay() {
        let mut model = ConvolutionalModel::preset("vgg11").unwrap();
        (model.dropout, model.label_smoothing) = (0.25, 0.1);
        let chain = model.chain();
        let rates: Vec<f32> = chain
            .layers
            .iter()
            .filter_map(|layer| match &layer.kind {
                LayerKind::Convolution(spec) if spec.dropout > 0.0 => Some(spec.dropout),
                _ => None,
            })
            .collect();
        assert_eq!(rates, [0.25, 0.25]);
        assert!(
            matches!(&chain.layers.last().unwrap().kind, LayerKind::Head(head) if head.label_smoothing == 0.1)
        );
        model.dropout = 0.0;
        assert!(model.chain().layers.iter().any(|layer| layer.name == "classifier.3"));
    }
}
