//! Inception-V3's layers, under torchvision's names and without its auxiliary classifier. A block's branches are
//! convolutions one after the other, and a join at their end.

use super::{
    BATCH_NORM, BatchNorm, Builder, ConvolutionSpec, ConvolutionalConfig, DROPOUT, JoinSpec, Pool, plain,
};
use crate::chain::{Init, Layer, LayerKind};

/// Channels of the published model's first convolution, and what its channel counts are all multiples of.
pub(super) const FIRST_CHANNELS: usize = 32;
const CHANNELS_UNIT: usize = 16;
/// What another first convolution's channels are a multiple of, so that all counts are whole.
pub(super) const FIRST_UNIT: usize = FIRST_CHANNELS / CHANNELS_UNIT;
/// The least size of which something is left at the end.
pub(super) const SIZE_MIN: usize = 75;

const NORM: BatchNorm = BatchNorm { eps: 1e-3, ..BATCH_NORM };
/// Deviation of every new weight.
const DEVIATION: f32 = 0.1;
const HALVING: Pool = Pool::Max { kernel: 3, stride: 2, padding: 0 };
const BLURRING: Pool = Pool::WindowAverage { kernel: 3, stride: 1, padding: 1 };

const ONE: (usize, usize) = (1, 1);
const THREE: (usize, usize) = (3, 3);
const FIVE: (usize, usize) = (5, 5);

/// A branch's convolution: its name, the published number of outputs, its window and its stride.
type Link<'a> = (&'a str, usize, (usize, usize), usize);

pub(super) fn build(
    builder: &mut Builder,
    config: &ConvolutionalConfig,
    image: (usize, usize, usize),
    dropout: bool,
) {
    let mut build = Inception { builder, first_channels: config.first_channels };
    let mut last = build.stem(image);
    for (block, pooled) in [("Mixed_5b", 32), ("Mixed_5c", 64), ("Mixed_5d", 64)] {
        last = build.block_a(block, last, pooled);
    }
    last = build.block_b("Mixed_6a", last);
    for (block, inner) in [("Mixed_6b", 128), ("Mixed_6c", 160), ("Mixed_6d", 160), ("Mixed_6e", 192)] {
        last = build.block_c(block, last, inner);
    }
    last = build.block_d("Mixed_7a", last);
    for block in ["Mixed_7b", "Mixed_7c"] {
        last = build.block_e(block, last);
    }
    let LayerKind::Join(spec) = &mut build.builder.layers[last].kind else {
        unreachable!("a block ends in a join")
    };
    spec.pool = Some(Pool::Average);
    spec.dropout = if dropout { DROPOUT } else { 0.0 };
    let width = spec.outputs();
    builder.head("fc", width, config.classes, DEVIATION);
}

struct Inception<'a> {
    builder: &'a mut Builder,
    first_channels: usize,
}

impl Inception<'_> {
    /// A convolution of some layer's output, or of the samples; its outputs are the published number.
    fn convolution(
        &mut self,
        name: &str,
        from: Option<usize>,
        outputs: usize,
        spec: ConvolutionSpec,
    ) -> usize {
        let outputs = outputs / CHANNELS_UNIT * (self.first_channels / FIRST_UNIT);
        let spec = ConvolutionSpec { first: from.is_none(), norm: Some(NORM), outputs, ..spec };
        let (conv, norm) = (format!("{name}.conv"), format!("{name}.bn"));
        let layer = self.builder.convolution(&conv, &norm, spec, from.into_iter().collect());
        let weight = self.builder.layers[layer].tensors[0].1;
        self.builder.tensors[weight].init = Init::Normal(DEVIATION);
        layer
    }

    fn stem(&mut self, image: (usize, usize, usize)) -> usize {
        let rows = [
            ("Conv2d_1a_3x3", 32, 3, 2, 0, None),
            ("Conv2d_2a_3x3", 32, 3, 1, 0, None),
            ("Conv2d_2b_3x3", 64, 3, 1, 1, Some(HALVING)),
            ("Conv2d_3b_1x1", 80, 1, 1, 0, None),
            ("Conv2d_4a_3x3", 192, 3, 1, 0, Some(HALVING)),
        ];
        let mut last = None;
        for (name, outputs, kernel, stride, padding, pool) in rows {
            let image = last.map_or(image, |last| self.builder.output(last));
            let padding = (padding, padding);
            let spec = ConvolutionSpec { padding, pool, ..plain(image, kernel, stride, 0) };
            last = Some(self.convolution(name, last, outputs, spec));
        }
        last.expect("a stem has layers")
    }

    /// Convolutions one after the other. Those of stride 1 leave rows and columns as many as they were, others have
    /// no padding.
    fn branch(&mut self, block: &str, from: usize, links: &[Link]) -> usize {
        links.iter().fold(from, |from, (name, outputs, kernel, stride)| {
            let padding = if *stride == 1 { (kernel.0 / 2, kernel.1 / 2) } else { (0, 0) };
            let image = self.builder.output(from);
            let spec = ConvolutionSpec { kernel: *kernel, padding, ..plain(image, 1, *stride, 0) };
            self.convolution(&format!("{block}.{name}"), Some(from), *outputs, spec)
        })
    }

    fn join(&mut self, name: String, inputs: Vec<usize>, pool: Option<Pool>) -> usize {
        let (height, width, _) = self.builder.output(inputs[0]);
        let channels = inputs.iter().map(|input| self.builder.output(*input).2).collect();
        let kind = LayerKind::Join(JoinSpec { image: (height, width), channels, pool, dropout: 0.0 });
        self.builder.layers.push(Layer { name, kind, tensors: Vec::new(), inputs });
        self.builder.layers.len() - 1
    }

    /// The branch that pools first.
    fn pool_branch(&mut self, block: &str, from: usize, outputs: usize) -> usize {
        let pooled = self.join(format!("{block}.pool"), vec![from], Some(BLURRING));
        self.branch(block, pooled, &[("branch_pool", outputs, ONE, 1)])
    }

    fn block_a(&mut self, block: &str, from: usize, pooled: usize) -> usize {
        let one = self.branch(block, from, &[("branch1x1", 64, ONE, 1)]);
        let five = self.branch(block, from, &[("branch5x5_1", 48, ONE, 1), ("branch5x5_2", 64, FIVE, 1)]);
        let three = self.branch(
            block,
            from,
            &[
                ("branch3x3dbl_1", 64, ONE, 1),
                ("branch3x3dbl_2", 96, THREE, 1),
                ("branch3x3dbl_3", 96, THREE, 1),
            ],
        );
        let pooled = self.pool_branch(block, from, pooled);
        self.join(block.into(), vec![one, five, three, pooled], None)
    }

    fn block_b(&mut self, block: &str, from: usize) -> usize {
        let three = self.branch(block, from, &[("branch3x3", 384, THREE, 2)]);
        let twice = self.branch(
            block,
            from,
            &[
                ("branch3x3dbl_1", 64, ONE, 1),
                ("branch3x3dbl_2", 96, THREE, 1),
                ("branch3x3dbl_3", 96, THREE, 2),
            ],
        );
        let pooled = self.join(format!("{block}.pool"), vec![from], Some(HALVING));
        self.join(block.into(), vec![three, twice, pooled], None)
    }

    fn block_c(&mut self, block: &str, from: usize, inner: usize) -> usize {
        let one = self.branch(block, from, &[("branch1x1", 192, ONE, 1)]);
        let seven = self.branch(
            block,
            from,
            &[
                ("branch7x7_1", inner, ONE, 1),
                ("branch7x7_2", inner, (1, 7), 1),
                ("branch7x7_3", 192, (7, 1), 1),
            ],
        );
        let twice = self.branch(
            block,
            from,
            &[
                ("branch7x7dbl_1", inner, ONE, 1),
                ("branch7x7dbl_2", inner, (7, 1), 1),
                ("branch7x7dbl_3", inner, (1, 7), 1),
                ("branch7x7dbl_4", inner, (7, 1), 1),
                ("branch7x7dbl_5", 192, (1, 7), 1),
            ],
        );
        let pooled = self.pool_branch(block, from, 192);
        self.join(block.into(), vec![one, seven, twice, pooled], None)
    }

    fn block_d(&mut self, block: &str, from: usize) -> usize {
        let three = self.branch(block, from, &[("branch3x3_1", 192, ONE, 1), ("branch3x3_2", 320, THREE, 2)]);
        let seven = self.branch(
            block,
            from,
            &[
                ("branch7x7x3_1", 192, ONE, 1),
                ("branch7x7x3_2", 192, (1, 7), 1),
                ("branch7x7x3_3", 192, (7, 1), 1),
                ("branch7x7x3_4", 192, THREE, 2),
            ],
        );
        let pooled = self.join(format!("{block}.pool"), vec![from], Some(HALVING));
        self.join(block.into(), vec![three, seven, pooled], None)
    }

    /// Two of its branches part again at their end.
    fn block_e(&mut self, block: &str, from: usize) -> usize {
        let mut ends = vec![self.branch(block, from, &[("branch1x1", 320, ONE, 1)])];
        let three = self.branch(block, from, &[("branch3x3_1", 384, ONE, 1)]);
        ends.push(self.branch(block, three, &[("branch3x3_2a", 384, (1, 3), 1)]));
        ends.push(self.branch(block, three, &[("branch3x3_2b", 384, (3, 1), 1)]));
        let links = [("branch3x3dbl_1", 448, ONE, 1), ("branch3x3dbl_2", 384, THREE, 1)];
        let twice = self.branch(block, from, &links);
        ends.push(self.branch(block, twice, &[("branch3x3dbl_3a", 384, (1, 3), 1)]));
        ends.push(self.branch(block, twice, &[("branch3x3dbl_3b", 384, (3, 1), 1)]));
        ends.push(self.pool_branch(block, from, 192));
        self.join(block.into(), ends, None)
    }
}
