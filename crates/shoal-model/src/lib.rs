//! What is trained: the chain of layers of each architecture, the names and shapes of its tensors, and
//! parameters, floating-point operations and bytes by arithmetic. No I/O and no tensors: the planner and
//! the simulator reason about a model of any size with nothing but this crate.
//!
//! - [`config`]: one description that covers every transformer we train.
//! - [`hugging_face`]: `config.json` to and from that description.
//! - [`presets`]: the usual sizes by name.
//! - [`chain`]: the description unrolled into layers and tensors, the rows of a plan.
//! - [`convolutional`]: VGG and ResNet, as chains of convolutions.
//! - [`shape`]: `shape.json` to and from a convolutional model.
//! - [`model`]: either kind of model, as jobs and folders name it.
//! - [`precision`]: in which numbers it is computed, and what that changes about its tensors.
//! - [`slot`]: what a tensor is to its layer.
//! - [`arithmetic`]: parameters and floating-point operations.
//! - [`footprint`]: the bytes each layer's forward and backward take, to the byte.

pub mod arithmetic;
pub mod chain;
pub mod config;
pub mod convolutional;
pub mod footprint;
pub mod hugging_face;
pub mod model;
pub mod precision;
pub mod presets;
pub mod shape;
pub mod slot;

pub use chain::{
    BlockSpec, Chain, EmbeddingSpec, HeadSpec, Init, Layer, LayerKind, PatchSpec, Predicts, TensorSpec,
};
pub use config::{
    Activation, Architecture, Dropout, ImageShape, ModelConfig, Norm, NormPlace, Position, RotaryScaling,
};
pub use convolutional::{BatchNorm, ConvolutionSpec, ConvolutionalConfig, JoinSpec, Pool};
pub use footprint::{Footprint, Retention};
pub use hugging_face::ConfigError;
pub use model::Model;
pub use precision::{Precision, TensorUse, UnknownPrecision};
pub use shape::ConvolutionalModel;
pub use slot::Slot;
