//! A model unrolled into its chain of layers: the rows of a plan. Every tensor is listed once; a tied
//! tensor is one entry that two layers name, so that a plan has one row for its state and both layers'
//! gradients go to it.

use std::borrow::Cow;

use crate::config::{Activation, Architecture, ImageShape, ModelConfig, Norm, NormPlace, Position};
use crate::convolutional::{ConvolutionSpec, JoinSpec};
use crate::slot::Slot;

/// How a tensor of a new model is drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Zeros,
    Ones,
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
}

/// One tensor of the model, under the name that its library (Hugging Face's, torchvision) gives it and with the
/// shape that it has there.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    pub name: String,
    pub shape: Vec<usize>,
    pub init: Init,
    /// Where images meet the tensor: how many channels they have. The library's rows are then [channels, pixels],
    /// ours [pixels, channels], as images lie here.
    pub turned: Option<usize>,
    /// The share that a step's value has in it, where it is a running statistic of batches and not trained.
    pub running: Option<f32>,
}

impl TensorSpec {
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// From the library's layout to ours.
    ///
    /// # Panics
    /// If a length is not the tensor's; likewise below.
    pub fn turn_in(&self, theirs: &[f32], ours: &mut [f32]) {
        match self.turned {
            Some(channels) => self.turn(channels, theirs, ours),
            None => ours.copy_from_slice(theirs),
        }
    }

    /// From our layout to the library's.
    pub fn turn_out<'a>(&self, ours: &'a [f32]) -> Cow<'a, [f32]> {
        let Some(channels) = self.turned else { return Cow::Borrowed(ours) };
        let mut theirs = vec![0.0; ours.len()];
        self.turn(self.row_elements() / channels, ours, &mut theirs);
        Cow::Owned(theirs)
    }

    fn row_elements(&self) -> usize {
        self.elements() / self.shape[0]
    }

    /// Every row of [first, others] to [others, first].
    fn turn(&self, first: usize, from: &[f32], to: &mut [f32]) {
        let (row, others) = (self.row_elements(), self.row_elements() / first);
        assert_eq!((from.len(), to.len()), (self.elements(), self.elements()));
        for (from, to) in from.chunks_exact(row).zip(to.chunks_exact_mut(row)) {
            for (index, to) in to.iter_mut().enumerate() {
                *to = from[index % first * others + index / first];
            }
        }
    }

    /// Matrices are decayed under `decay = "matrices"`; norms and biases are not.
    pub fn is_matrix(&self) -> bool {
        self.shape.len() >= 2
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingSpec {
    pub vocabulary: usize,
    pub width: usize,
    /// Kind and epsilon of the norm that the sum of embeddings goes through, where it does.
    pub norm: Option<(Norm, f32)>,
    pub dropout: f32,
}

/// Images to rows: a row for the class, then one a patch.
#[derive(Clone, Debug, PartialEq)]
pub struct PatchSpec {
    pub image: ImageShape,
    pub width: usize,
    pub dropout: f32,
}

/// A transformer block.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockSpec {
    pub width: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_size: usize,
    pub mlp_width: usize,
    pub rotary: bool,
    pub norm: Norm,
    pub norm_eps: f32,
    pub norm_place: NormPlace,
    pub activation: Activation,
    /// Whether a position sees only those before it.
    pub causal: bool,
    pub attention_scale: f32,
    pub attention_dropout: f32,
    pub residual_dropout: f32,
    /// GPT-2 stores matrices as [in, out]; everyone else as [out, in].
    pub weights_in_out: bool,
}

impl BlockSpec {
    pub fn query_width(&self) -> usize {
        self.heads * self.head_size
    }

    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_size
    }

    pub fn qkv_width(&self) -> usize {
        self.query_width() + 2 * self.kv_width()
    }
}

/// What a head's logits are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Predicts {
    /// At each position the next token.
    NextToken,
    /// At each position the token that belongs there.
    OwnToken,
    /// The class of the sample, at its first position alone.
    Class,
}

/// Final norm, output projection and cross-entropy.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadSpec {
    pub vocabulary: usize,
    pub width: usize,
    /// A dense layer with this activation comes before the norm.
    pub transform: Option<Activation>,
    /// None where rows are projected as they come.
    pub norm: Option<Norm>,
    pub norm_eps: f32,
    pub predicts: Predicts,
    /// The share of a target that is spread over all columns while training.
    pub label_smoothing: f32,
}

impl HeadSpec {
    /// Rows that have logits, and so targets.
    pub fn rows(&self, samples: usize, sequence: usize) -> usize {
        match self.predicts {
            Predicts::NextToken | Predicts::OwnToken => samples * sequence,
            Predicts::Class => samples,
        }
    }

    /// Rows of logits that a prediction consists of: each sample's next token or class, or all of its positions.
    pub fn predicted_rows(&self, samples: usize, sequence: usize) -> usize {
        match self.predicts {
            Predicts::OwnToken => samples * sequence,
            Predicts::NextToken | Predicts::Class => samples,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum LayerKind {
    Embedding(EmbeddingSpec),
    Patches(PatchSpec),
    Block(BlockSpec),
    Convolution(ConvolutionSpec),
    Join(JoinSpec),
    Head(HeadSpec),
}

/// One row of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    pub name: String,
    pub kind: LayerKind,
    /// The layer's tensors, as indices into [`Chain::tensors`].
    pub tensors: Vec<(Slot, usize)>,
    /// Earlier layers whose outputs it takes: mostly the one before; several where branches join; none for the
    /// first.
    pub inputs: Vec<usize>,
}

/// The model as the planner, the program and the engine see it.
#[derive(Clone, Debug, PartialEq)]
pub struct Chain {
    pub layers: Vec<Layer>,
    pub tensors: Vec<TensorSpec>,
    /// Angle per position of each rotary frequency pair; empty where positions are learned.
    pub rotary_frequencies: Vec<f64>,
    /// The longest sequence the model can take.
    pub positions: usize,
    pub vocabulary: usize,
    /// Whether positions see only those before them and predict the next token.
    pub causal: bool,
    /// The images that samples are; where there are none, samples are sequences of tokens.
    pub image: Option<ImageShape>,
    /// Whether samples may be shorter than the sequence: each then comes with its length, for every block to see.
    pub padded: bool,
}

impl Chain {
    pub fn new(config: &ModelConfig) -> Chain {
        let mut builder = Builder { config, tensors: Vec::new() };
        let mut layers = vec![match config.image {
            None => builder.embedding(),
            Some(image) => builder.patches(image),
        }];
        layers.extend((0..config.layers).map(|index| builder.block(index)));
        layers.push(builder.head(&layers[0]));
        for (index, layer) in layers.iter_mut().enumerate().skip(1) {
            layer.inputs = vec![index - 1];
        }
        Chain {
            layers,
            tensors: builder.tensors,
            rotary_frequencies: config.rotary_frequencies(),
            positions: config.positions,
            vocabulary: config.vocabulary,
            causal: config.causal,
            image: config.image,
            padded: false,
        }
    }

    /// The layers that are told how long samples are.
    pub fn length_readers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.layers.len()).filter(|layer| self.takes_lengths(*layer))
    }

    pub fn takes_lengths(&self, layer: usize) -> bool {
        self.padded && matches!(self.layers[layer].kind, LayerKind::Block(_))
    }

    /// Numbers of one sample as it comes in: its tokens, or its pixels. Each has four bytes.
    pub fn input_elements(&self, sequence: usize) -> usize {
        self.image.map_or(sequence, |image| image.elements())
    }

    /// Targets of one sample.
    pub fn targets(&self, sequence: usize) -> usize {
        if self.image.is_some() { 1 } else { sequence }
    }

    /// Whether some layer drops elements while it is trained.
    pub fn drops(&self) -> bool {
        self.layers.iter().any(|layer| match &layer.kind {
            LayerKind::Embedding(spec) => spec.dropout > 0.0,
            LayerKind::Patches(spec) => spec.dropout > 0.0,
            LayerKind::Block(spec) => spec.attention_dropout.max(spec.residual_dropout) > 0.0,
            LayerKind::Convolution(spec) => spec.dropout > 0.0,
            LayerKind::Join(spec) => spec.dropout > 0.0,
            LayerKind::Head(_) => false,
        })
    }

    /// Layers that take a layer's output, in chain order: more than one where branches part.
    pub fn readers(&self, layer: usize) -> impl Iterator<Item = usize> + '_ {
        let takes = move |reader: &usize| self.layers[*reader].inputs.contains(&layer);
        (layer + 1..self.layers.len()).filter(takes)
    }

    /// Layers that use a tensor, in chain order: more than one where it is tied.
    pub fn users(&self, tensor: usize) -> impl Iterator<Item = usize> + '_ {
        self.layers
            .iter()
            .enumerate()
            .filter(move |(_, layer)| layer.tensors.iter().any(|(_, index)| *index == tensor))
            .map(|(index, _)| index)
    }
}

/// Collects tensors while the layers are laid out.
struct Builder<'a> {
    config: &'a ModelConfig,
    tensors: Vec<TensorSpec>,
}

impl Builder<'_> {
    fn tensor(&mut self, slot: Slot, name: String, shape: Vec<usize>, init: Init) -> (Slot, usize) {
        self.tensors.push(TensorSpec { name, shape, init, turned: None, running: None });
        (slot, self.tensors.len() - 1)
    }

    /// A norm's weight and, where its kind has one, bias.
    fn norm(
        &mut self,
        (weight, bias): (Slot, Slot),
        weight_name: &str,
        bias_name: &str,
    ) -> Vec<(Slot, usize)> {
        let width = self.config.width;
        let mut tensors = vec![self.tensor(weight, weight_name.into(), vec![width], Init::Ones)];
        if self.config.norm == Norm::Layer {
            tensors.push(self.tensor(bias, bias_name.into(), vec![width], Init::Zeros));
        }
        tensors
    }

    fn embedding(&mut self) -> Layer {
        let c = self.config;
        let normal = Init::Normal(c.init_range);
        let (tokens, positions) = match c.architecture {
            Architecture::Gpt2 => ("transformer.wte.weight", "transformer.wpe.weight"),
            Architecture::Llama | Architecture::Qwen2 => ("model.embed_tokens.weight", ""),
            Architecture::Bert => {
                ("bert.embeddings.word_embeddings.weight", "bert.embeddings.position_embeddings.weight")
            }
            Architecture::Vit => unreachable!("it takes images"),
        };
        let shape = vec![c.vocabulary, c.width];
        let mut tensors = vec![self.tensor(Slot::TokenEmbedding, tokens.into(), shape, normal)];
        if c.position == Position::Learned {
            let shape = vec![c.positions, c.width];
            tensors.push(self.tensor(Slot::PositionEmbedding, positions.into(), shape, normal));
        }
        if c.token_types > 0 {
            let (name, shape) =
                ("bert.embeddings.token_type_embeddings.weight", vec![c.token_types, c.width]);
            tensors.push(self.tensor(Slot::TokenTypeEmbedding, name.into(), shape, normal));
        }
        let norm = (c.norm_place == NormPlace::After).then_some((c.norm, c.norm_eps));
        if norm.is_some() {
            let name = "bert.embeddings.LayerNorm";
            let slots = (Slot::EmbeddingNormWeight, Slot::EmbeddingNormBias);
            tensors.extend(self.norm(slots, &format!("{name}.weight"), &format!("{name}.bias")));
        }
        let kind = LayerKind::Embedding(EmbeddingSpec {
            vocabulary: c.vocabulary,
            width: c.width,
            norm,
            dropout: c.dropout.embedding,
        });
        Layer { name: "embedding".into(), kind, tensors, inputs: Vec::new() }
    }

    fn patches(&mut self, image: ImageShape) -> Layer {
        let c = self.config;
        let normal = Init::Normal(c.init_range);
        let name = |part: &str| format!("vit.embeddings.{part}");
        let weight = vec![c.width, image.channels, image.patch, image.patch];
        let rows = [
            (Slot::ClassToken, "cls_token", vec![1, 1, c.width], normal),
            (Slot::PositionEmbedding, "position_embeddings", vec![1, c.positions, c.width], normal),
            (Slot::PatchWeight, "patch_embeddings.projection.weight", weight, normal),
            (Slot::PatchBias, "patch_embeddings.projection.bias", vec![c.width], Init::Zeros),
        ];
        let tensors = rows.map(|(slot, part, shape, init)| self.tensor(slot, name(part), shape, init)).into();
        let kind = LayerKind::Patches(PatchSpec { image, width: c.width, dropout: c.dropout.embedding });
        Layer { name: "patches".into(), kind, tensors, inputs: Vec::new() }
    }

    fn block(&mut self, index: usize) -> Layer {
        let c = self.config;
        let kind = LayerKind::Block(BlockSpec {
            width: c.width,
            heads: c.heads,
            kv_heads: c.kv_heads,
            head_size: c.head_size,
            mlp_width: c.mlp_width,
            rotary: matches!(c.position, Position::Rotary { .. }),
            norm: c.norm,
            norm_eps: c.norm_eps,
            norm_place: c.norm_place,
            activation: c.activation,
            causal: c.causal,
            attention_scale: c.attention_scale,
            attention_dropout: c.dropout.attention,
            residual_dropout: c.dropout.residual,
            weights_in_out: c.architecture == Architecture::Gpt2,
        });
        let tensors = match c.architecture {
            Architecture::Gpt2 => self.gpt2_block(index),
            Architecture::Llama | Architecture::Qwen2 => self.llama_block(index),
            Architecture::Bert => self.bert_block(index),
            Architecture::Vit => self.vit_block(index),
        };
        Layer { name: format!("block {index}"), kind, tensors, inputs: Vec::new() }
    }

    fn gpt2_block(&mut self, index: usize) -> Vec<(Slot, usize)> {
        let c = self.config;
        let name = |part: &str| format!("transformer.h.{index}.{part}");
        let normal = Init::Normal(c.init_range);
        // Projections back into the residual stream start smaller, the deeper the model.
        let residual = Init::Normal(c.init_range / (2.0 * c.layers as f32).sqrt());
        let (w, f) = (c.width, c.mlp_width);
        let (query, qkv) = (c.query_width(), c.qkv_width());
        let rows: [(Slot, &str, Vec<usize>, Init); 12] = [
            (Slot::AttentionNormWeight, "ln_1.weight", vec![w], Init::Ones),
            (Slot::AttentionNormBias, "ln_1.bias", vec![w], Init::Zeros),
            (Slot::QkvWeight, "attn.c_attn.weight", vec![w, qkv], normal),
            (Slot::QkvBias, "attn.c_attn.bias", vec![qkv], Init::Zeros),
            (Slot::AttentionOutputWeight, "attn.c_proj.weight", vec![query, w], residual),
            (Slot::AttentionOutputBias, "attn.c_proj.bias", vec![w], Init::Zeros),
            (Slot::MlpNormWeight, "ln_2.weight", vec![w], Init::Ones),
            (Slot::MlpNormBias, "ln_2.bias", vec![w], Init::Zeros),
            (Slot::UpWeight, "mlp.c_fc.weight", vec![w, f], normal),
            (Slot::UpBias, "mlp.c_fc.bias", vec![f], Init::Zeros),
            (Slot::DownWeight, "mlp.c_proj.weight", vec![f, w], residual),
            (Slot::DownBias, "mlp.c_proj.bias", vec![w], Init::Zeros),
        ];
        rows.into_iter().map(|(slot, part, shape, init)| self.tensor(slot, name(part), shape, init)).collect()
    }

    fn llama_block(&mut self, index: usize) -> Vec<(Slot, usize)> {
        let c = self.config;
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let normal = Init::Normal(c.init_range);
        let (w, f, q, k) = (c.width, c.mlp_width, c.query_width(), c.kv_width());
        let rows: [(bool, Slot, &str, Vec<usize>, Init); 16] = [
            (true, Slot::AttentionNormWeight, "input_layernorm.weight", vec![w], Init::Ones),
            (true, Slot::QueryWeight, "self_attn.q_proj.weight", vec![q, w], normal),
            (c.qkv_bias, Slot::QueryBias, "self_attn.q_proj.bias", vec![q], Init::Zeros),
            (true, Slot::KeyWeight, "self_attn.k_proj.weight", vec![k, w], normal),
            (c.qkv_bias, Slot::KeyBias, "self_attn.k_proj.bias", vec![k], Init::Zeros),
            (true, Slot::ValueWeight, "self_attn.v_proj.weight", vec![k, w], normal),
            (c.qkv_bias, Slot::ValueBias, "self_attn.v_proj.bias", vec![k], Init::Zeros),
            (true, Slot::AttentionOutputWeight, "self_attn.o_proj.weight", vec![w, q], normal),
            (
                c.attention_output_bias,
                Slot::AttentionOutputBias,
                "self_attn.o_proj.bias",
                vec![w],
                Init::Zeros,
            ),
            (true, Slot::MlpNormWeight, "post_attention_layernorm.weight", vec![w], Init::Ones),
            (true, Slot::GateWeight, "mlp.gate_proj.weight", vec![f, w], normal),
            (c.mlp_bias, Slot::GateBias, "mlp.gate_proj.bias", vec![f], Init::Zeros),
            (true, Slot::UpWeight, "mlp.up_proj.weight", vec![f, w], normal),
            (c.mlp_bias, Slot::UpBias, "mlp.up_proj.bias", vec![f], Init::Zeros),
            (true, Slot::DownWeight, "mlp.down_proj.weight", vec![w, f], normal),
            (c.mlp_bias, Slot::DownBias, "mlp.down_proj.bias", vec![w], Init::Zeros),
        ];
        rows.into_iter()
            .filter(|row| row.0)
            .map(|(_, slot, part, shape, init)| self.tensor(slot, name(part), shape, init))
            .collect()
    }

    fn bert_block(&mut self, index: usize) -> Vec<(Slot, usize)> {
        let c = self.config;
        let name = |part: &str| format!("bert.encoder.layer.{index}.{part}");
        let normal = Init::Normal(c.init_range);
        let (w, f, q, k) = (c.width, c.mlp_width, c.query_width(), c.kv_width());
        let rows: [(Slot, &str, Vec<usize>, Init); 16] = [
            (Slot::QueryWeight, "attention.self.query.weight", vec![q, w], normal),
            (Slot::QueryBias, "attention.self.query.bias", vec![q], Init::Zeros),
            (Slot::KeyWeight, "attention.self.key.weight", vec![k, w], normal),
            (Slot::KeyBias, "attention.self.key.bias", vec![k], Init::Zeros),
            (Slot::ValueWeight, "attention.self.value.weight", vec![k, w], normal),
            (Slot::ValueBias, "attention.self.value.bias", vec![k], Init::Zeros),
            (Slot::AttentionOutputWeight, "attention.output.dense.weight", vec![w, q], normal),
            (Slot::AttentionOutputBias, "attention.output.dense.bias", vec![w], Init::Zeros),
            (Slot::AttentionNormWeight, "attention.output.LayerNorm.weight", vec![w], Init::Ones),
            (Slot::AttentionNormBias, "attention.output.LayerNorm.bias", vec![w], Init::Zeros),
            (Slot::UpWeight, "intermediate.dense.weight", vec![f, w], normal),
            (Slot::UpBias, "intermediate.dense.bias", vec![f], Init::Zeros),
            (Slot::DownWeight, "output.dense.weight", vec![w, f], normal),
            (Slot::DownBias, "output.dense.bias", vec![w], Init::Zeros),
            (Slot::MlpNormWeight, "output.LayerNorm.weight", vec![w], Init::Ones),
            (Slot::MlpNormBias, "output.LayerNorm.bias", vec![w], Init::Zeros),
        ];
        rows.into_iter().map(|(slot, part, shape, init)| self.tensor(slot, name(part), shape, init)).collect()
    }

    fn vit_block(&mut self, index: usize) -> Vec<(Slot, usize)> {
        let c = self.config;
        let name = |part: &str| format!("vit.encoder.layer.{index}.{part}");
        let normal = Init::Normal(c.init_range);
        let (w, f, q, k) = (c.width, c.mlp_width, c.query_width(), c.kv_width());
        let rows: [(bool, Slot, &str, Vec<usize>, Init); 16] = [
            (true, Slot::AttentionNormWeight, "layernorm_before.weight", vec![w], Init::Ones),
            (true, Slot::AttentionNormBias, "layernorm_before.bias", vec![w], Init::Zeros),
            (true, Slot::QueryWeight, "attention.attention.query.weight", vec![q, w], normal),
            (c.qkv_bias, Slot::QueryBias, "attention.attention.query.bias", vec![q], Init::Zeros),
            (true, Slot::KeyWeight, "attention.attention.key.weight", vec![k, w], normal),
            (c.qkv_bias, Slot::KeyBias, "attention.attention.key.bias", vec![k], Init::Zeros),
            (true, Slot::ValueWeight, "attention.attention.value.weight", vec![k, w], normal),
            (c.qkv_bias, Slot::ValueBias, "attention.attention.value.bias", vec![k], Init::Zeros),
            (true, Slot::AttentionOutputWeight, "attention.output.dense.weight", vec![w, q], normal),
            (true, Slot::AttentionOutputBias, "attention.output.dense.bias", vec![w], Init::Zeros),
            (true, Slot::MlpNormWeight, "layernorm_after.weight", vec![w], Init::Ones),
            (true, Slot::MlpNormBias, "layernorm_after.bias", vec![w], Init::Zeros),
            (true, Slot::UpWeight, "intermediate.dense.weight", vec![f, w], normal),
            (true, Slot::UpBias, "intermediate.dense.bias", vec![f], Init::Zeros),
            (true, Slot::DownWeight, "output.dense.weight", vec![w, f], normal),
            (true, Slot::DownBias, "output.dense.bias", vec![w], Init::Zeros),
        ];
        rows.into_iter()
            .filter(|row| row.0)
            .map(|(_, slot, part, shape, init)| self.tensor(slot, name(part), shape, init))
            .collect()
    }

    fn head(&mut self, embedding: &Layer) -> Layer {
        let c = self.config;
        let (norm_weight, norm_bias) = match c.architecture {
            Architecture::Gpt2 => ("transformer.ln_f.weight", "transformer.ln_f.bias"),
            Architecture::Llama | Architecture::Qwen2 => ("model.norm.weight", ""),
            Architecture::Bert => {
                ("cls.predictions.transform.LayerNorm.weight", "cls.predictions.transform.LayerNorm.bias")
            }
            Architecture::Vit => ("vit.layernorm.weight", "vit.layernorm.bias"),
        };
        let mut tensors = Vec::new();
        if c.head_transform {
            let name = |part: &str| format!("cls.predictions.{part}");
            let normal = Init::Normal(c.init_range);
            let rows = [
                (Slot::OutputBias, "bias", vec![c.vocabulary], Init::Zeros),
                (Slot::TransformWeight, "transform.dense.weight", vec![c.width, c.width], normal),
                (Slot::TransformBias, "transform.dense.bias", vec![c.width], Init::Zeros),
            ];
            tensors.extend(rows.map(|(slot, part, shape, init)| self.tensor(slot, name(part), shape, init)));
        }
        tensors.extend(self.norm((Slot::FinalNormWeight, Slot::FinalNormBias), norm_weight, norm_bias));
        let classes = c.image.is_some();
        tensors.push(if c.tied {
            (Slot::OutputWeight, embedding.tensors[0].1)
        } else {
            let name = if classes { "classifier.weight" } else { "lm_head.weight" };
            let shape = vec![c.vocabulary, c.width];
            self.tensor(Slot::OutputWeight, name.into(), shape, Init::Normal(c.init_range))
        });
        if classes {
            let name = "classifier.bias".into();
            tensors.push(self.tensor(Slot::OutputBias, name, vec![c.vocabulary], Init::Zeros));
        }
        let kind = LayerKind::Head(HeadSpec {
            vocabulary: c.vocabulary,
            width: c.width,
            transform: c.head_transform.then_some(c.activation),
            norm: Some(c.norm),
            norm_eps: c.norm_eps,
            predicts: match (classes, c.causal) {
                (true, _) => Predicts::Class,
                (false, true) => Predicts::NextToken,
                (false, false) => Predicts::OwnToken,
            },
            label_smoothing: c.label_smoothing,
        });
        Layer { name: "head".into(), kind, tensors, inputs: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets::preset;

    #[test]
    fn a_tied_head_names_the_embedding_and_an_untied_one_its_own_matrix() {
        let tied = Chain::new(&preset("gpt2-tiny").unwrap());
        assert_eq!(tied.users(0).collect::<Vec<_>>(), [0, 3]);
        assert!(tied.tensors.iter().all(|t| t.name != "lm_head.weight"));
        let untied = Chain::new(&preset("llama-tiny").unwrap());
        assert_eq!(untied.users(0).collect::<Vec<_>>(), [0]);
        assert_eq!(untied.tensors.last().unwrap().name, "lm_head.weight");
    }

    #[test]
    fn a_model_for_masked_tokens_has_the_tensors_transformers_writes() {
        let chain = Chain::new(&preset("bert-tiny").unwrap());
        assert_eq!(chain.users(0).collect::<Vec<_>>(), [0, 3]);
        assert_eq!(chain.tensors.len(), 5 + 2 * 16 + 5);
        let bias = chain.tensors.iter().position(|t| t.name == "cls.predictions.bias").unwrap();
        // A row a token in the weight and the bias alike: both are padded where rows are.
        assert_eq!(chain.gradient_elements(bias, crate::Precision::Fp32), 257);
        assert_eq!(chain.gradient_elements(bias, crate::Precision::Bf16), 320);
        assert_eq!(chain.gradient_elements(0, crate::Precision::Bf16), 320 * 64);
    }

    #[test]
    fn a_model_of_images_has_the_tensors_transformers_writes() {
        let chain = Chain::new(&preset("vit-tiny").unwrap());
        assert_eq!(chain.tensors.len(), 4 + 2 * 16 + 4);
        assert_eq!((chain.input_elements(17), chain.targets(17)), (3 * 32 * 32, 1));
        let shape = |name: &str| &chain.tensors.iter().find(|tensor| tensor.name == name).unwrap().shape;
        assert_eq!(shape("vit.embeddings.patch_embeddings.projection.weight"), &[64, 3, 8, 8]);
        assert_eq!(shape("vit.embeddings.position_embeddings"), &[1, 17, 64]);
        assert_eq!(shape("classifier.weight"), &[10, 64]);
    }

    #[test]
    fn names_are_unique() {
        for name in crate::presets::NAMES {
            let chain = Chain::new(&preset(name).unwrap());
            let mut names: Vec<_> = chain.tensors.iter().map(|t| &t.name).collect();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), chain.tensors.len(), "{name}");
        }
    }
}
