//! VGG, ResNet and Inception as chains of convolutions, under torchvision's names. Every convolution is a layer, with
//! what follows it up to the next: batch norm, the sum with another branch, ReLU, a pool. A dense layer is a
//! convolution whose window covers the whole image: torchvision's matrix has that layout already. Branches that end side
//! by side are joined by a layer of its own.

mod inception;
mod join;

pub use join::{JoinSpec, Pool};

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::chain::{Chain, HeadSpec, Init, Layer, LayerKind, Predicts, TensorSpec};
use crate::config::ImageShape;
use crate::precision::Precision;
use crate::slot::Slot;

/// Means and variances over the samples and pixels of a batch, by channel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BatchNorm {
    pub eps: f32,
    /// The share of a batch in the running statistics.
    pub momentum: f32,
    /// Samples whose statistics are made together, by their numbers in the global batch: so many, the next so
    /// many, and so on; all of them where there is no number. However a plan cuts the batch, the groups stay.
    pub group: Option<usize>,
}

impl BatchNorm {
    /// The groups that samples belong to, each with its part of them.
    pub fn groups(&self, samples: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let size = self.group.unwrap_or(usize::MAX);
        (samples.start / size..samples.end.div_ceil(size)).map(move |group| {
            let (first, next) = (group * size, group.saturating_add(1).saturating_mul(size));
            (group, samples.start.max(first)..samples.end.min(next))
        })
    }

    /// Groups of a global batch.
    pub fn group_count(&self, global_batch: usize) -> usize {
        self.group.map_or(1, |size| global_batch.div_ceil(size))
    }
}

/// A convolution and what follows it.
#[derive(Clone, Debug, PartialEq)]
pub struct ConvolutionSpec {
    /// Rows, columns and channels of the images it takes.
    pub image: (usize, usize, usize),
    /// Rows and columns of the window.
    pub kernel: (usize, usize),
    pub stride: usize,
    /// Pixels above and below the image, and beside it.
    pub padding: (usize, usize),
    /// Channels that it makes.
    pub outputs: usize,
    /// Whether the images are the samples themselves, whose channels come first.
    pub first: bool,
    pub norm: Option<BatchNorm>,
    /// Whether another layer's output is added to the normed one.
    pub joins: bool,
    pub relu: bool,
    pub pool: Option<Pool>,
    pub dropout: f32,
}

/// Numbers gathered at a time for a product, and places at the least.
const SCRATCH_ELEMENTS: usize = 1 << 20;
const SCRATCH_ROWS: usize = 64;
/// The same where layers compute in halves, at the least and at the most: a GPU's library takes it as the room it
/// works in, and turns or pads what it is given there if that fits.
const HALF_SCRATCH_ELEMENTS: (usize, usize) = (1 << 24, 1 << 26);
/// Channels that a library pads the images themselves to.
const PADDED_CHANNELS: usize = 8;

fn places(size: usize, kernel: usize, stride: usize, padding: usize) -> usize {
    (size + 2 * padding - kernel) / stride + 1
}

impl ConvolutionSpec {
    /// Rows and columns before the pool.
    pub fn convolved(&self) -> (usize, usize) {
        let places = |size, kernel, padding| places(size, kernel, self.stride, padding);
        let down = places(self.image.0, self.kernel.0, self.padding.0);
        (down, places(self.image.1, self.kernel.1, self.padding.1))
    }

    /// Rows, columns and channels of what it hands on.
    pub fn output(&self) -> (usize, usize, usize) {
        let (height, width) = self.convolved();
        let (height, width) = self.pool.map_or((height, width), |pool| pool.output((height, width)));
        (height, width, self.outputs)
    }

    /// Numbers of one sample: as it comes, after the convolution, and as it goes on.
    pub fn input_elements(&self) -> usize {
        self.image.0 * self.image.1 * self.image.2
    }

    pub fn convolved_elements(&self) -> usize {
        self.convolved().0 * self.convolved().1 * self.outputs
    }

    pub fn output_elements(&self) -> usize {
        let (height, width, channels) = self.output();
        height * width * channels
    }

    /// Numbers under the window.
    pub fn window_elements(&self) -> usize {
        self.kernel.0 * self.kernel.1 * self.image.2
    }

    /// Whether what lies under the window is a row as it is: a pixel alone, or the whole image.
    fn is_dense(&self) -> bool {
        let one_pixel = (self.kernel, self.stride) == ((1, 1), 1);
        self.padding == (0, 0) && (one_pixel || self.kernel == (self.image.0, self.image.1))
    }

    /// Numbers (of four bytes) that what is under the window is gathered in; none where it lies in rows already.
    pub fn scratch_elements(&self, samples: usize, precision: Precision) -> Option<usize> {
        if self.is_dense() {
            return None;
        }
        let rows = samples * self.convolved().0 * self.convolved().1;
        if precision.is_half() {
            let (least, most) = HALF_SCRATCH_ELEMENTS;
            let channels = self.image.2.max(PADDED_CHANNELS);
            let halves = samples * self.image.0 * self.image.1 * channels + rows * self.outputs;
            return Some((halves / 2).clamp(least, most).max(SCRATCH_ROWS * self.window_elements()));
        }
        let most = (SCRATCH_ELEMENTS / self.window_elements()).max(SCRATCH_ROWS);
        Some(rows.min(most) * self.window_elements())
    }

    /// Whether a bit is kept for each number that the ReLU let through. A maximum that it did not let through
    /// is known by having no place.
    pub fn has_mask(&self) -> bool {
        self.relu && !self.takes_maxima()
    }

    pub fn takes_maxima(&self) -> bool {
        matches!(self.pool, Some(Pool::Max { .. }))
    }

    /// Integers of that mask: whole ones for each pixel.
    pub fn mask_elements(&self, samples: usize) -> usize {
        samples * self.convolved().0 * self.convolved().1 * self.outputs.div_ceil(32)
    }

    /// Integers with a byte for each maximum.
    pub fn place_elements(&self, samples: usize) -> usize {
        (samples * self.output_elements()).div_ceil(4)
    }
}

/// What the model is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "architecture", rename_all = "lowercase")]
pub enum Body {
    /// Groups of 3 x 3 convolutions, each ending in a pool, then dense layers.
    Vgg {
        /// Convolutions of each group.
        groups: Vec<usize>,
        /// Outputs of the dense layers before the last.
        classifier: Vec<usize>,
        /// Whether the dense layers are dropped from.
        dropout: bool,
    },
    /// A stem of 7 x 7, then four groups of residual blocks.
    Resnet {
        /// Blocks of each group.
        blocks: Vec<usize>,
        /// Whether a block is 1 x 1, 3 x 3, 1 x 1 with four times the channels at its end; else 3 x 3, 3 x 3.
        bottleneck: bool,
        /// The inner width of a bottleneck as a multiple of the usual one.
        widening: usize,
    },
    /// Inception-V3: a stem, then blocks of branches that are joined.
    Inception {
        /// Whether the last layer's input is dropped from.
        dropout: bool,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConvolutionalConfig {
    pub body: Body,
    /// Channels of the first convolution: 64 in the published models, 32 in Inception; others are in proportion.
    pub first_channels: usize,
    pub classes: usize,
    /// Channels of a sample.
    pub channels: usize,
    /// Rows and columns of a sample.
    pub size: usize,
}

/// torchvision's constants.
const BATCH_NORM: BatchNorm = BatchNorm { eps: 1e-5, momentum: 0.1, group: None };
const DROPOUT: f32 = 0.5;
const EXPANSION: usize = 4;

/// A published model by its name in torchvision, for images of 224 x 224 (Inception: 299 x 299) and 1000 classes.
pub fn preset(name: &str) -> Option<ConvolutionalConfig> {
    let vgg =
        |groups: [usize; 5]| Body::Vgg { groups: groups.into(), classifier: vec![4096, 4096], dropout: true };
    let resnet = |blocks: [usize; 4], bottleneck: bool, widening: usize| Body::Resnet {
        blocks: blocks.into(),
        bottleneck,
        widening,
    };
    let body = match name {
        "vgg11" => vgg([1, 1, 2, 2, 2]),
        "vgg13" => vgg([2, 2, 2, 2, 2]),
        "vgg16" => vgg([2, 2, 3, 3, 3]),
        "vgg19" => vgg([2, 2, 4, 4, 4]),
        "resnet18" => resnet([2, 2, 2, 2], false, 1),
        "resnet34" => resnet([3, 4, 6, 3], false, 1),
        "resnet50" => resnet([3, 4, 6, 3], true, 1),
        "resnet101" => resnet([3, 4, 23, 3], true, 1),
        "resnet152" => resnet([3, 8, 36, 3], true, 1),
        "wide_resnet50_2" => resnet([3, 4, 6, 3], true, 2),
        "wide_resnet101_2" => resnet([3, 4, 23, 3], true, 2),
        "inception_v3" => Body::Inception { dropout: true },
        _ => return None,
    };
    let (first_channels, size) = match body {
        Body::Inception { .. } => (inception::FIRST_CHANNELS, 299),
        Body::Vgg { .. } | Body::Resnet { .. } => (64, 224),
    };
    Some(ConvolutionalConfig { body, first_channels, classes: 1000, channels: 3, size })
}

/// A model as `shape.json` describes it, beside weights that come without a config.json.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Shape {
    architecture: String,
    first_channels: usize,
    classes: usize,
    image: usize,
    classifier: Option<Vec<usize>>,
    block: Option<String>,
    blocks: Option<Vec<usize>>,
    expansion: Option<usize>,
    batch_norm: Option<bool>,
}

/// Sizes so large that products of them would overflow are refused.
const SIZE_MAX: usize = 1 << 16;
const BLOCKS_MAX: usize = 1 << 10;

impl ConvolutionalConfig {
    /// Reads `shape.json`, or says in a sentence why it cannot be.
    pub fn read(shape: &serde_json::Value) -> Result<ConvolutionalConfig, String> {
        let shape = Shape::deserialize(shape).map_err(|error| error.to_string())?;
        let body = if shape.architecture == "resnet" {
            let bottleneck = match shape.block.as_deref() {
                Some("bottleneck") => true,
                Some("basic") => false,
                other => return Err(format!("the block is {other:?}, not \"bottleneck\" or \"basic\"")),
            };
            let expansion = if bottleneck { EXPANSION } else { 1 };
            if shape.expansion.is_some_and(|found| found != expansion) {
                return Err(format!("the expansion of such blocks is {expansion}"));
            }
            Body::Resnet { blocks: shape.blocks.unwrap_or_default(), bottleneck, widening: 1 }
        } else {
            match preset(&shape.architecture).map(|preset| preset.body) {
                Some(Body::Vgg { .. }) if shape.batch_norm == Some(true) => {
                    return Err("a VGG with batch norm is not known here".into());
                }
                Some(Body::Vgg { groups, .. }) => {
                    Body::Vgg { groups, classifier: shape.classifier.unwrap_or_default(), dropout: false }
                }
                Some(Body::Inception { .. }) => Body::Inception { dropout: false },
                _ => return Err(format!("{:?} is no architecture known here", shape.architecture)),
            }
        };
        let Shape { first_channels, classes, image, .. } = shape;
        let config = ConvolutionalConfig { body, first_channels, classes, channels: 3, size: image };
        config.defect().map_or(Ok(config), Err)
    }

    /// Sizes that no chain can be built from, as one sentence.
    pub fn defect(&self) -> Option<String> {
        let sizes = [self.first_channels, self.classes, self.channels, self.size];
        let (parts, pools) = match &self.body {
            Body::Vgg { groups, classifier, .. } => ([&groups[..], classifier].concat(), groups.len()),
            Body::Resnet { blocks, widening, .. } => ([&blocks[..], &[*widening]].concat(), 0),
            Body::Inception { .. } => (Vec::new(), 0),
        };
        if sizes.iter().chain(&parts).any(|size| *size == 0 || *size > SIZE_MAX) {
            return Some(format!("a size is 0 or past the limit of {SIZE_MAX}"));
        }
        match &self.body {
            Body::Vgg { classifier, .. } if classifier.is_empty() => {
                Some("there are no dense layers before the last".into())
            }
            Body::Vgg { groups, .. } if groups.len() > 5 || self.size >> pools == 0 => {
                Some(format!("images of size {} cannot be halved {pools} times", self.size))
            }
            Body::Resnet { blocks, .. } if !(1..=4).contains(&blocks.len()) => {
                Some(format!("{} groups of blocks, not one to four", blocks.len()))
            }
            Body::Vgg { groups: counts, .. } | Body::Resnet { blocks: counts, .. }
                if counts.iter().sum::<usize>() > BLOCKS_MAX =>
            {
                Some(format!("more than {BLOCKS_MAX} blocks"))
            }
            Body::Inception { .. } if !self.first_channels.is_multiple_of(inception::FIRST_UNIT) => {
                let (first, unit) = (self.first_channels, inception::FIRST_UNIT);
                Some(format!("an Inception's first channels are a multiple of {unit}, not {first}"))
            }
            Body::Inception { .. } if self.size < inception::SIZE_MIN => {
                let least = inception::SIZE_MIN;
                Some(format!(
                    "of images of size {} nothing is left at the end: {least} is the least",
                    self.size
                ))
            }
            _ => None,
        }
    }
}

impl Chain {
    pub fn convolutional(config: &ConvolutionalConfig) -> Chain {
        let mut builder = Builder { layers: Vec::new(), tensors: Vec::new() };
        let image = (config.size, config.size, config.channels);
        match &config.body {
            Body::Vgg { groups, classifier, dropout } => {
                builder.vgg(config, image, groups, classifier, *dropout);
            }
            Body::Resnet { blocks, bottleneck, widening } => {
                builder.resnet(config, image, blocks, *bottleneck, *widening);
            }
            Body::Inception { dropout } => inception::build(&mut builder, config, image, *dropout),
        }
        let whole = ImageShape { channels: config.channels, size: config.size, patch: config.size };
        Chain {
            layers: builder.layers,
            tensors: builder.tensors,
            rotary_frequencies: Vec::new(),
            positions: 1,
            vocabulary: config.classes,
            causal: false,
            image: Some(whole),
            padded: false,
        }
    }

    /// A layer's batch norm, if it has one.
    pub fn batch_norm(&self, layer: usize) -> Option<BatchNorm> {
        match &self.layers[layer].kind {
            LayerKind::Convolution(spec) => spec.norm,
            _ => None,
        }
    }

    /// Whether some layer's statistics are those of several samples together.
    pub fn has_batch_norm(&self) -> bool {
        (0..self.layers.len()).any(|layer| self.batch_norm(layer).is_some())
    }

    /// Sets how many samples every batch norm takes together; none for the whole batch.
    pub fn set_norm_group(&mut self, group: Option<usize>) {
        for layer in &mut self.layers {
            if let LayerKind::Convolution(ConvolutionSpec { norm: Some(norm), .. }) = &mut layer.kind {
                norm.group = group;
            }
        }
    }
}

struct Builder {
    layers: Vec<Layer>,
    tensors: Vec<TensorSpec>,
}

/// A plain convolution; what follows is set by whoever builds it.
fn plain(image: (usize, usize, usize), kernel: usize, stride: usize, outputs: usize) -> ConvolutionSpec {
    ConvolutionSpec {
        image,
        kernel: (kernel, kernel),
        stride,
        padding: (kernel / 2, kernel / 2),
        outputs,
        first: false,
        norm: None,
        joins: false,
        relu: true,
        pool: None,
        dropout: 0.0,
    }
}

impl Builder {
    fn tensor(&mut self, slot: Slot, name: String, shape: Vec<usize>, init: Init) -> (Slot, usize) {
        self.tensors.push(TensorSpec { name, shape, init, turned: None, running: None });
        (slot, self.tensors.len() - 1)
    }

    /// A convolution, called `name` like its weight, and its norm's name if it has one. Its inputs are other layers'
    /// outputs. Returns its number.
    fn convolution(&mut self, name: &str, norm: &str, spec: ConvolutionSpec, inputs: Vec<usize>) -> usize {
        let (outputs, channels, (height, width)) = (spec.outputs, spec.image.2, spec.kernel);
        let deviation = (2.0 / (outputs * height * width) as f32).sqrt();
        let shape = vec![outputs, channels, height, width];
        let weight = format!("{name}.weight");
        let mut tensors = vec![self.tensor(Slot::ConvolutionWeight, weight, shape, Init::Normal(deviation))];
        self.tensors[tensors[0].1].turned = (spec.kernel != (1, 1)).then_some(channels);
        match spec.norm {
            None => {
                let bias = format!("{name}.bias");
                tensors.push(self.tensor(Slot::ConvolutionBias, bias, vec![outputs], Init::Zeros));
            }
            Some(settings) => {
                let rows = [
                    (Slot::BatchNormWeight, "weight", Init::Ones, None),
                    (Slot::BatchNormBias, "bias", Init::Zeros, None),
                    (Slot::RunningMean, "running_mean", Init::Zeros, Some(settings.momentum)),
                    (Slot::RunningVariance, "running_var", Init::Ones, Some(settings.momentum)),
                ];
                for (slot, part, init, running) in rows {
                    tensors.push(self.tensor(slot, format!("{norm}.{part}"), vec![outputs], init));
                    self.tensors.last_mut().expect("it was just added").running = running;
                }
            }
        }
        let kind = LayerKind::Convolution(spec);
        self.layers.push(Layer { name: name.into(), kind, tensors, inputs });
        self.layers.len() - 1
    }

    fn output(&self, layer: usize) -> (usize, usize, usize) {
        match &self.layers[layer].kind {
            LayerKind::Convolution(spec) => spec.output(),
            LayerKind::Join(spec) => spec.output(),
            _ => unreachable!("only convolutions and joins come before the head"),
        }
    }

    /// The last dense layer, on rows of `width`, and the loss.
    fn head(&mut self, name: &str, width: usize, classes: usize, deviation: f32) {
        let (weight, bias) = (format!("{name}.weight"), format!("{name}.bias"));
        let tensors = vec![
            self.tensor(Slot::OutputWeight, weight, vec![classes, width], Init::Normal(deviation)),
            self.tensor(Slot::OutputBias, bias, vec![classes], Init::Zeros),
        ];
        let kind = LayerKind::Head(HeadSpec {
            vocabulary: classes,
            width,
            transform: None,
            norm: None,
            norm_eps: BATCH_NORM.eps,
            predicts: Predicts::Class,
            label_smoothing: 0.0,
        });
        let inputs = vec![self.layers.len() - 1];
        self.layers.push(Layer { name: name.into(), kind, tensors, inputs });
    }

    fn vgg(
        &mut self,
        config: &ConvolutionalConfig,
        mut image: (usize, usize, usize),
        groups: &[usize],
        classifier: &[usize],
        dropout: bool,
    ) {
        // The number in a name counts torchvision's modules: a convolution and its ReLU are two, a pool one.
        let mut module = 0;
        for (group, convolutions) in groups.iter().enumerate() {
            let outputs = config.first_channels << group.min(3);
            for index in 0..*convolutions {
                let pool = Pool::Max { kernel: 2, stride: 2, padding: 0 };
                let spec = ConvolutionSpec {
                    first: module == 0,
                    pool: (index + 1 == *convolutions).then_some(pool),
                    ..plain(image, 3, 1, outputs)
                };
                let inputs = self.layers.len().checked_sub(1).into_iter().collect();
                let layer = self.convolution(&format!("features.{module}"), "", spec, inputs);
                image = self.output(layer);
                module += 2;
            }
            module += 1;
        }
        let modules = if dropout { 3 } else { 2 };
        for (index, outputs) in classifier.iter().enumerate() {
            let spec = ConvolutionSpec {
                kernel: (image.0, image.1),
                padding: (0, 0),
                dropout: if dropout { DROPOUT } else { 0.0 },
                ..plain(image, 1, 1, *outputs)
            };
            let inputs = vec![self.layers.len() - 1];
            let layer = self.convolution(&format!("classifier.{}", modules * index), "", spec, inputs);
            let weight = self.layers[layer].tensors[0].1;
            self.tensors[weight].shape = vec![*outputs, image.0 * image.1 * image.2];
            self.tensors[weight].init = Init::Normal(0.01);
            image = self.output(layer);
        }
        self.head(&format!("classifier.{}", modules * classifier.len()), image.2, config.classes, 0.01);
    }

    fn resnet(
        &mut self,
        config: &ConvolutionalConfig,
        image: (usize, usize, usize),
        blocks: &[usize],
        bottleneck: bool,
        widening: usize,
    ) {
        let stem = ConvolutionSpec {
            first: true,
            norm: Some(BATCH_NORM),
            pool: Some(Pool::Max { kernel: 3, stride: 2, padding: 1 }),
            ..plain(image, 7, 2, config.first_channels)
        };
        let mut last = self.convolution("conv1", "bn1", stem, Vec::new());
        for (group, count) in blocks.iter().enumerate() {
            for index in 0..*count {
                let stride = if group > 0 && index == 0 { 2 } else { 1 };
                let prefix = format!("layer{}.{index}", group + 1);
                let width = config.first_channels << group;
                let block = match bottleneck {
                    true => vec![
                        (width * widening, 1, 1),
                        (width * widening, 3, stride),
                        (width * EXPANSION, 1, 1),
                    ],
                    false => vec![(width, 3, stride), (width, 3, 1)],
                };
                last = self.residual_block(&prefix, last, &block, stride);
            }
        }
        let Some(LayerKind::Convolution(spec)) = self.layers.get_mut(last).map(|layer| &mut layer.kind)
        else {
            unreachable!("the last layer is a convolution")
        };
        spec.pool = Some(Pool::Average);
        let width = spec.outputs;
        self.head("fc", width, config.classes, 1.0 / (3.0 * width as f32).sqrt());
    }

    /// Convolutions of (outputs, kernel, stride), the last joined by the block's input: as it is where its shape is
    /// the block's output's, else through a 1 x 1 convolution. Returns the number of the last.
    fn residual_block(
        &mut self,
        prefix: &str,
        input: usize,
        block: &[(usize, usize, usize)],
        stride: usize,
    ) -> usize {
        let image = self.output(input);
        let outputs = block[block.len() - 1].0;
        let skipped = if stride != 1 || image.2 != outputs {
            let spec =
                ConvolutionSpec { norm: Some(BATCH_NORM), relu: false, ..plain(image, 1, stride, outputs) };
            let (name, norm) = (format!("{prefix}.downsample.0"), format!("{prefix}.downsample.1"));
            self.convolution(&name, &norm, spec, vec![input])
        } else {
            input
        };
        let mut last = input;
        for (index, (outputs, kernel, stride)) in block.iter().enumerate() {
            let joins = index + 1 == block.len();
            let spec = ConvolutionSpec {
                norm: Some(BATCH_NORM),
                joins,
                ..plain(self.output(last), *kernel, *stride, *outputs)
            };
            let (name, norm) = (format!("{prefix}.conv{}", index + 1), format!("{prefix}.bn{}", index + 1));
            let inputs = if joins { vec![last, skipped] } else { vec![last] };
            last = self.convolution(&name, &norm, spec, inputs);
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_torchvisions() {
        let published = [
            ("vgg11", 132_863_336),
            ("vgg13", 133_047_848),
            ("vgg16", 138_357_544),
            ("vgg19", 143_667_240),
            ("resnet18", 11_689_512),
            ("resnet34", 21_797_672),
            ("resnet50", 25_557_032),
            ("resnet101", 44_549_160),
            ("resnet152", 60_192_808),
            ("wide_resnet50_2", 68_883_240),
            ("wide_resnet101_2", 126_886_696),
            // Without the auxiliary classifier.
            ("inception_v3", 23_834_568),
        ];
        for (name, parameters) in published {
            assert_eq!(Chain::convolutional(&preset(name).unwrap()).parameters(), parameters, "{name}");
        }
    }

    #[test]
    fn an_image_costs_the_published_operations() {
        // Multiply-adds in billions, from torchvision's table.
        for (name, published) in
            [("vgg16", 15.47), ("resnet18", 1.81), ("resnet50", 4.09), ("inception_v3", 5.71)]
        {
            let flops = Chain::convolutional(&preset(name).unwrap()).forward_flops(1) as f64;
            assert!((flops / 2e9 / published - 1.0).abs() < 0.01, "{name}: {flops}");
        }
    }

    #[test]
    fn a_shape_that_no_chain_can_have_is_refused() {
        let sizes = r#""first_channels": 8, "classes": 10, "image": 32"#;
        let vgg = &format!(r#"{{"architecture": "vgg11", "classifier": [4], {sizes}}}"#);
        let resnet = &format!(r#"{{"architecture": "resnet", "block": "basic", "blocks": [1, 1], {sizes}}}"#);
        let read = |text: &str| ConvolutionalConfig::read(&serde_json::from_str(text).unwrap());
        let inception =
            &r#"{"architecture": "inception_v3", "first_channels": 6, "classes": 10, "image": 75}"#
                .to_owned();
        assert!(read(vgg).is_ok() && read(resnet).is_ok() && read(inception).is_ok());
        let spoiled = [
            (vgg, "32", "31"),
            (vgg, "[4]", "[]"),
            (vgg, "[4]", "[0]"),
            (vgg, "vgg11", "vgg12"),
            (vgg, "8", "99999999999"),
            (resnet, "basic", "other"),
            (resnet, "[1, 1]", "[]"),
            (resnet, "[1, 1]", "[60000, 60000]"),
            (resnet, "classes", "kinds"),
            (inception, "75", "74"),
            (inception, "6", "5"),
        ];
        for (text, from, to) in spoiled {
            assert!(read(&text.replace(from, to)).is_err(), "{to}");
        }
    }

    #[test]
    fn branches_part_and_join() {
        let chain = Chain::convolutional(&preset("resnet50").unwrap());
        let at = |name: &str| chain.layers.iter().position(|layer| layer.name == name).unwrap();
        let readers = |name: &str| chain.readers(at(name)).collect::<Vec<_>>();
        assert_eq!(readers("conv1"), [at("layer1.0.downsample.0"), at("layer1.0.conv1")]);
        assert_eq!(readers("layer1.0.downsample.0"), [at("layer1.0.conv3")]);
        assert_eq!(readers("layer1.0.conv3"), [at("layer1.1.conv1"), at("layer1.1.conv3")]);
        assert_eq!(readers("layer4.2.conv3"), [at("fc")]);
    }

    #[test]
    fn an_inception_narrows_in_proportion_and_its_branches_end_side_by_side() {
        let shape = r#"{"architecture": "inception_v3", "first_channels": 2, "classes": 10, "image": 75}"#;
        let config = ConvolutionalConfig::read(&serde_json::from_str(shape).unwrap()).unwrap();
        let (narrow, published) =
            (Chain::convolutional(&config), Chain::convolutional(&preset("inception_v3").unwrap()));
        let channels = |chain: &Chain, name: &str| {
            let layer = chain.layers.iter().find(|layer| layer.name == name).unwrap();
            let LayerKind::Join(spec) = &layer.kind else { panic!("{name} joins nothing") };
            spec.channels.clone()
        };
        assert_eq!(channels(&published, "Mixed_6a"), [384, 96, 288]);
        assert_eq!(channels(&narrow, "Mixed_6a"), [24, 6, 18]);
        assert_eq!(channels(&published, "Mixed_7c"), [320, 384, 384, 384, 384, 192]);
        let at = |name: &str| narrow.layers.iter().position(|layer| layer.name == name).unwrap();
        let readers = |name: &str| narrow.readers(at(name)).collect::<Vec<_>>();
        let heads = ["branch1x1.conv", "branch5x5_1.conv", "branch3x3dbl_1.conv", "pool"];
        assert_eq!(readers("Mixed_5b"), heads.map(|head| at(&format!("Mixed_5c.{head}"))));
        let parted = ["Mixed_7b.branch3x3_2a.conv", "Mixed_7b.branch3x3_2b.conv"];
        assert_eq!(readers("Mixed_7b.branch3x3_1.conv"), parted.map(at));
    }
}
