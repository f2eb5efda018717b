//! Parameters and floating-point operations by arithmetic. Counted are the matrix products a step cannot
//! do without: recomputation is overhead, not work, and the causal half of attention is counted as half.

use crate::chain::{BlockSpec, Chain, LayerKind, PatchSpec};
use crate::config::Activation;

impl Chain {
    /// Parameters of the whole model; a tied tensor counts once, running statistics do not.
    pub fn parameters(&self) -> u64 {
        self.tensors
            .iter()
            .filter(|tensor| tensor.running.is_none())
            .map(|tensor| tensor.elements() as u64)
            .sum()
    }

    /// Forward operations of one sample through the whole chain.
    pub fn forward_flops(&self, sequence: usize) -> u64 {
        self.layers.iter().map(|layer| layer.kind.forward_flops(sequence)).sum()
    }

    /// Operations of one sample's training step: the backward costs two products per forward one, but for
    /// images, which have no gradient.
    pub fn training_flops(&self, sequence: usize) -> u64 {
        let products = |kind: &LayerKind| match kind {
            LayerKind::Patches(_) => 2,
            LayerKind::Convolution(spec) if spec.first => 2,
            _ => 3,
        };
        self.layers.iter().map(|layer| products(&layer.kind) * layer.kind.forward_flops(sequence)).sum()
    }
}

impl LayerKind {
    /// Forward operations of one sample through this layer.
    pub fn forward_flops(&self, sequence: usize) -> u64 {
        match self {
            LayerKind::Embedding(_) | LayerKind::Join(_) => 0,
            LayerKind::Patches(PatchSpec { image, width, .. }) => {
                2 * image.patches() as u64 * image.patch_elements() as u64 * *width as u64
            }
            LayerKind::Convolution(spec) => 2 * (spec.convolved_elements() * spec.window_elements()) as u64,
            LayerKind::Block(block) => block_flops(block, sequence),
            LayerKind::Head(head) => {
                let transform = if head.transform.is_some() { head.width } else { 0 };
                2 * head.rows(1, sequence) as u64 * head.width as u64 * (head.vocabulary + transform) as u64
            }
        }
    }

    /// Whether its backward can leave gradients of weights for later.
    pub fn puts_off(&self) -> bool {
        matches!(self, LayerKind::Block(_))
    }

    /// How much of a backward's time the gradients take that may be put off.
    pub fn put_off_share(&self, sequence: usize) -> f64 {
        let LayerKind::Block(block) = self else { return 0.0 };
        let projections = mlp_projections(block) - 1;
        let outputs = block.qkv_width() + projections as usize * block.mlp_width;
        let flops = 2 * sequence as u64 * block.width as u64 * outputs as u64;
        PRODUCTS_PACE * flops as f64 / (2 * self.forward_flops(sequence)) as f64
    }
}

/// Of the time that a product takes by its part of a backward's operations, what it does take: norms and attention, which have few
/// operations, take the rest.
const PRODUCTS_PACE: f64 = 0.8;

fn mlp_projections(block: &BlockSpec) -> u64 {
    match block.activation {
        Activation::GeluTanh | Activation::GeluErf => 2,
        Activation::SwiGlu => 3,
    }
}

fn block_flops(block: &BlockSpec, sequence: usize) -> u64 {
    let (t, width) = (sequence as u64, block.width as u64);
    let query = block.query_width() as u64;
    let mlp = mlp_projections(block) * width * block.mlp_width as u64;
    let weights = width * block.qkv_width() as u64 + query * width + mlp;
    let pairs = if block.causal { t * (t + 1) / 2 } else { t * t };
    // Two products (scores and values), two operations each.
    let attention = 2 * 2 * query * pairs;
    2 * t * weights + attention
}

#[cfg(test)]
mod tests {
    use crate::{Chain, presets::preset};

    #[test]
    fn training_flops_are_close_to_six_per_parameter_and_token() {
        let chain = Chain::new(&preset("gpt2-124m").unwrap());
        let per_token = chain.training_flops(1024) as f64 / 1024.0;
        let estimate = 6.0 * chain.parameters() as f64;
        // Attention adds, the position table takes away.
        assert!(per_token > estimate && per_token < 1.1 * estimate, "{per_token} against {estimate}");
    }

    #[test]
    fn an_image_costs_the_published_operations() {
        let config = preset("vit-base").unwrap();
        // 17.6 billion multiply-adds are published with the model, 2 operations each.
        let forward = Chain::new(&config).forward_flops(config.positions) as f64;
        assert!((forward / 2.0 / 17.56e9 - 1.0).abs() < 0.01, "{forward}");
    }
}
