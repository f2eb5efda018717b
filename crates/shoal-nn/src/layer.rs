//! Forward, recompute and backward of any layer, by its kind: the things a program asks of one.

use std::ops::Range;

use shoal_kernels::device::Result;
use shoal_kernels::random::fold;
use shoal_kernels::{Device, DropoutSite, Element, Gelu, Tensor};
use shoal_model::{Activation, BlockSpec, LayerKind, Precision, Retention};

use crate::block::{BlockSaved, PutOff};
use crate::convolution::{Begun, BegunBackward, ConvolutionSaved, Groups, WithoutInput};
use crate::head::HeadSaved;
use crate::join::JoinSaved;
use crate::parameters::{Gradients, Parameters};
use crate::{block, convolution, embedding, head, join, patches};

/// What random draws depend on, beside layer, site, sample and element.
#[derive(Clone, Copy)]
pub struct Randomness<'a> {
    pub seed: u64,
    /// A scalar on the device.
    pub step: &'a Tensor,
}

/// What activations and compute copies are made of.
pub fn element(precision: Precision) -> Element {
    match precision {
        Precision::Fp32 | Precision::Tf32 => Element::F32,
        Precision::Bf16 => Element::Bf16,
        Precision::Fp16 => Element::F16,
    }
}

/// Which GELU an activation is; none for a gated one.
pub(crate) fn gelu(activation: Activation) -> Option<Gelu> {
    match activation {
        Activation::GeluTanh => Some(Gelu::Tanh),
        Activation::GeluErf => Some(Gelu::Erf),
        Activation::SwiGlu => None,
    }
}

/// One instruction's surroundings.
pub struct Call<'a> {
    pub device: &'a dyn Device,
    /// The layer's number in the chain.
    pub layer: usize,
    /// Samples of the micro-batch, by their numbers in the global batch.
    pub samples: Range<usize>,
    /// Samples of the global batch.
    pub global_batch: usize,
    pub sequence: usize,
    pub precision: Precision,
    /// None in evaluation: nothing is dropped.
    pub randomness: Option<Randomness<'a>>,
    /// Whether batches are normed by their own statistics; otherwise by the running ones.
    pub batch_statistics: bool,
    /// Cosines and sines by position, for rotary models.
    pub rotary: Option<&'a Tensor>,
}

impl Call<'_> {
    pub fn rows(&self) -> usize {
        self.samples.len() * self.sequence
    }

    /// Room for `per_row` activations a row, asked for in the layer's name.
    pub(crate) fn rows_of(&self, what: &str, per_row: usize) -> Result<Tensor> {
        self.room(what, element(self.precision), self.rows() * per_row)
    }

    /// The same for numbers that are fp32 in every precision.
    pub(crate) fn float_rows_of(&self, what: &str, per_row: usize) -> Result<Tensor> {
        self.room(what, Element::F32, self.rows() * per_row)
    }

    pub(crate) fn room(&self, what: &str, element: Element, elements: usize) -> Result<Tensor> {
        let who = format!("layer {} ({what} of samples {:?})", self.layer, self.samples);
        Ok(Tensor::of(self.device.arena(), &who, element, elements)?)
    }

    /// The dropout of one of the layer's sites, if anything is dropped.
    pub(crate) fn dropout(&self, site: u64, rate: f32) -> Option<DropoutSite<'_>> {
        let randomness = self.randomness.filter(|_| rate > 0.0)?;
        let key = [self.layer as u64, site].into_iter().fold(randomness.seed, fold);
        let first_sample = self.samples.start as u64;
        Some(DropoutSite { rate, key, step: Some(randomness.step), first_sample })
    }
}

/// What a layer is fed.
pub enum Feed {
    Tokens(Tensor),
    Images(Tensor),
    Hidden(Tensor),
    /// Rows of samples that may be padded, and the samples' lengths.
    Padded(Tensor, Tensor),
    /// Several branches' outputs: to be added, or put side by side.
    Joined(Vec<Tensor>),
    /// What its own forward began with, and another branch's output where it joins one.
    Begun(Box<Begun>, Option<Tensor>),
    /// The last layer also takes the targets.
    HiddenAndTargets(Tensor, Tensor),
}

/// What a layer keeps between forward and backward.
pub enum Saved {
    /// The input alone; [`recompute`] makes the rest.
    Input(Feed),
    Embedding(Tensor),
    Patches(Tensor),
    Block(Box<BlockSaved>),
    Convolution(Box<ConvolutionSaved>),
    Join(JoinSaved),
    Begun(Box<Begun>),
    BegunBackward(Box<BegunBackward>),
    /// What is left when its backward is over but for gradients of weights.
    PutOff(Box<PutOff>),
    Head(HeadSaved),
}

/// What is left of a kept input when its tensor is put elsewhere: see [`Saved::apart`].
pub enum SavedRest {
    /// Nothing was put elsewhere: all a first layer keeps are the samples themselves, and some layers keep no input.
    All(Saved),
    Hidden,
    Padded(Tensor),
    Targets(Tensor),
    Convolution(WithoutInput),
}

impl Saved {
    /// Takes the input that the layer will be made again from out of what it keeps.
    pub fn apart(self) -> (Option<Tensor>, SavedRest) {
        match self {
            Saved::Input(Feed::Hidden(x)) => (Some(x), SavedRest::Hidden),
            Saved::Input(Feed::Padded(x, lengths)) => (Some(x), SavedRest::Padded(lengths)),
            Saved::Input(Feed::HiddenAndTargets(x, targets)) => (Some(x), SavedRest::Targets(targets)),
            Saved::Convolution(saved) => {
                let (x, rest) = saved.apart();
                (Some(x), SavedRest::Convolution(rest))
            }
            other => (None, SavedRest::All(other)),
        }
    }
}

impl SavedRest {
    /// What [`Saved::apart`] took apart.
    ///
    /// # Panics
    /// If it took no input, or one is missing.
    pub fn with(self, input: Option<Tensor>) -> Saved {
        match (self, input) {
            (SavedRest::All(saved), None) => saved,
            (SavedRest::Hidden, Some(x)) => Saved::Input(Feed::Hidden(x)),
            (SavedRest::Padded(lengths), Some(x)) => Saved::Input(Feed::Padded(x, lengths)),
            (SavedRest::Targets(targets), Some(x)) => Saved::Input(Feed::HiddenAndTargets(x, targets)),
            (SavedRest::Convolution(rest), Some(x)) => Saved::Convolution(rest.with(x).into()),
            _ => panic!("an input that was never taken, or is missing"),
        }
    }
}

/// The loss that the last layer adds to, and what its gradient is multiplied by.
pub struct LossSink<'a> {
    pub sum: &'a mut Tensor,
    /// One over the targets of the global batch, times the loss scale.
    pub scale: f32,
    /// Where samples whose class is predicted rightly are counted, if they are.
    pub correct: Option<&'a mut Tensor>,
}

/// The part of a forward in training that comes before the statistics of its groups are known.
pub fn begin(
    kind: &LayerKind,
    call: &Call,
    parameters: &Parameters,
    feed: Feed,
    groups: &mut Groups,
) -> Result<Saved> {
    let (LayerKind::Convolution(spec), Feed::Images(x) | Feed::Hidden(x)) = (kind, feed) else {
        panic!("layer {} has no beginning", call.layer)
    };
    Ok(Saved::Begun(convolution::begin(spec, call, parameters, x, groups)?.into()))
}

/// The part of a backward that comes before the sums of its groups are known.
pub fn begin_backward(
    kind: &LayerKind,
    call: &Call,
    parameters: &Parameters,
    gradients: &mut Gradients,
    saved: Saved,
    gradient: Option<Tensor>,
    groups: &mut Groups,
) -> Result<Saved> {
    let (LayerKind::Convolution(spec), Saved::Convolution(saved), Some(dy)) = (kind, saved, gradient) else {
        panic!("the backward of layer {} has no beginning", call.layer)
    };
    let begun = convolution::begin_backward(spec, call, parameters, gradients, *saved, dy, groups)?;
    Ok(Saved::BegunBackward(begun.into()))
}

/// Runs a layer; the last layer has no output but adds to the loss. The groups are those of a layer that began.
pub fn forward(
    kind: &LayerKind,
    call: &Call,
    parameters: &Parameters,
    feed: Feed,
    retention: Retention,
    groups: Option<&Groups>,
    loss: Option<LossSink>,
) -> Result<(Option<Tensor>, Option<Saved>)> {
    match (kind, feed) {
        (LayerKind::Embedding(spec), Feed::Tokens(tokens)) => {
            let output = embedding::forward(spec, call, parameters, &tokens)?;
            let saved = (retention != Retention::Nothing).then_some(Saved::Embedding(tokens));
            Ok((Some(output), saved))
        }
        (LayerKind::Patches(spec), Feed::Images(images)) => {
            let output = patches::forward(spec, call, parameters, &images)?;
            let saved = (retention != Retention::Nothing).then_some(Saved::Patches(images));
            Ok((Some(output), saved))
        }
        (LayerKind::Block(spec), Feed::Hidden(x)) => {
            forward_block(spec, call, parameters, x, None, retention)
        }
        (LayerKind::Block(spec), Feed::Padded(x, lengths)) => {
            forward_block(spec, call, parameters, x, Some(lengths), retention)
        }
        (LayerKind::Convolution(spec), feed) => {
            let (saved, output) = match feed {
                Feed::Begun(begun, other) => {
                    let groups = groups.expect("a layer that began has groups");
                    convolution::finish(spec, call, parameters, *begun, other, groups)?
                }
                Feed::Images(x) | Feed::Hidden(x) if retention != Retention::Nothing => {
                    convolution::forward(spec, call, parameters, x)?
                }
                Feed::Images(x) | Feed::Hidden(x) => {
                    return Ok((Some(convolution::evaluate(spec, call, parameters, x, None)?), None));
                }
                Feed::Joined(mut both) => {
                    let other = both.pop();
                    let x = both.pop().expect("a sum is of two branches");
                    return Ok((Some(convolution::evaluate(spec, call, parameters, x, other)?), None));
                }
                _ => panic!("layer {} takes images", call.layer),
            };
            let saved = if retention == Retention::Input { saved.lean() } else { saved };
            Ok((Some(output), Some(Saved::Convolution(saved.into()))))
        }
        (LayerKind::Join(spec), feed) => {
            let inputs = match feed {
                Feed::Hidden(x) => vec![x],
                Feed::Joined(inputs) => inputs,
                _ => panic!("layer {} takes other layers' outputs", call.layer),
            };
            let (saved, output) = join::forward(spec, call, &inputs)?;
            Ok((Some(output), (retention != Retention::Nothing).then_some(Saved::Join(saved))))
        }
        (LayerKind::Head(spec), Feed::HiddenAndTargets(x, targets)) => {
            let loss = loss.expect("the last layer has a loss to add to");
            let saved = match retention {
                Retention::Saved => {
                    Some(Saved::Head(head::forward(spec, call, parameters, x, targets, loss)?))
                }
                Retention::Input => {
                    head::loss_only(spec, call, parameters, &x, &targets, loss)?;
                    Some(Saved::Input(Feed::HiddenAndTargets(x, targets)))
                }
                Retention::Nothing => {
                    head::loss_only(spec, call, parameters, &x, &targets, loss)?;
                    None
                }
            };
            Ok((None, saved))
        }
        _ => panic!("layer {} was fed what it does not take", call.layer),
    }
}

fn forward_block(
    spec: &BlockSpec,
    call: &Call,
    parameters: &Parameters,
    x: Tensor,
    lengths: Option<Tensor>,
    retention: Retention,
) -> Result<(Option<Tensor>, Option<Saved>)> {
    let (saved, output) = block::forward(spec, call, parameters, x, lengths, true)?;
    let saved = match retention {
        Retention::Saved => Some(Saved::Block(saved.into())),
        Retention::Input => Some(Saved::Input(saved.into_input())),
        Retention::Nothing => None,
    };
    Ok((output, saved))
}

/// Makes everything the backward reads from the layer's input.
pub fn recompute(
    kind: &LayerKind,
    call: &Call,
    parameters: &Parameters,
    saved: Saved,
    loss: Option<LossSink>,
) -> Result<Saved> {
    match (kind, saved) {
        (LayerKind::Block(spec), Saved::Input(Feed::Hidden(x))) => {
            let (saved, _) = block::forward(spec, call, parameters, x, None, false)?;
            Ok(Saved::Block(saved.into()))
        }
        (LayerKind::Block(spec), Saved::Input(Feed::Padded(x, lengths))) => {
            let (saved, _) = block::forward(spec, call, parameters, x, Some(lengths), false)?;
            Ok(Saved::Block(saved.into()))
        }
        (LayerKind::Head(spec), Saved::Input(Feed::HiddenAndTargets(x, targets))) => {
            let loss = loss.expect("the last layer has a loss scale");
            Ok(Saved::Head(head::forward(spec, call, parameters, x, targets, loss)?))
        }
        (LayerKind::Convolution(spec), Saved::Convolution(saved)) => {
            Ok(Saved::Convolution(convolution::recompute(spec, call, parameters, *saved)?.into()))
        }
        (_, saved) => Ok(saved), // tokens or images are all that a first layer ever keeps
    }
}

/// From the gradient of the output to the gradients of the inputs, those of tokens and images left out; adds the
/// parameters' gradients up.
pub fn backward(
    kind: &LayerKind,
    call: &Call,
    parameters: &Parameters,
    gradients: &mut Gradients,
    saved: Saved,
    gradient: Option<Tensor>,
    groups: Option<&Groups>,
) -> Result<Vec<Tensor>> {
    match (kind, saved, gradient) {
        (LayerKind::Embedding(spec), Saved::Embedding(tokens), Some(dy)) => {
            embedding::backward(spec, call, parameters, gradients, &tokens, dy)?;
            Ok(Vec::new())
        }
        (LayerKind::Patches(spec), Saved::Patches(images), Some(dy)) => {
            patches::backward(spec, call, gradients, &images, dy)?;
            Ok(Vec::new())
        }
        (LayerKind::Block(spec), Saved::Block(saved), Some(dy)) => {
            block::backward(spec, call, parameters, gradients, *saved, dy, false).map(|(dx, _)| vec![dx])
        }
        (LayerKind::Convolution(spec), Saved::Convolution(saved), Some(dy)) => {
            convolution::backward(spec, call, parameters, gradients, *saved, dy)
        }
        (LayerKind::Convolution(spec), Saved::BegunBackward(begun), None) => {
            let groups = groups.expect("a layer that began has groups");
            convolution::finish_backward(spec, call, parameters, gradients, *begun, groups)
        }
        (LayerKind::Join(spec), Saved::Join(saved), Some(dy)) => join::backward(spec, call, saved, dy),
        (LayerKind::Head(spec), Saved::Head(saved), None) => {
            head::backward(spec, call, parameters, gradients, saved).map(|dx| vec![dx])
        }
        _ => panic!("layer {} was handed what its backward does not take", call.layer),
    }
}

/// The same of a layer that puts gradients of weights off ([`LayerKind::puts_off`]): with what [`weight_gradients`] adds them
/// up from.
pub fn backward_putting_off(
    kind: &LayerKind,
    call: &Call,
    parameters: &Parameters,
    gradients: &mut Gradients,
    saved: Saved,
    gradient: Option<Tensor>,
) -> Result<(Vec<Tensor>, Saved)> {
    let (LayerKind::Block(spec), Saved::Block(saved), Some(dy)) = (kind, saved, gradient) else {
        panic!("layer {} puts nothing off", call.layer)
    };
    let (dx, put_off) = block::backward(spec, call, parameters, gradients, *saved, dy, true)?;
    let put_off = put_off.expect("a block puts off what it is asked to");
    Ok((vec![dx], Saved::PutOff(put_off.into())))
}

/// Adds up the gradients that a backward put off.
pub fn weight_gradients(kind: &LayerKind, call: &Call, gradients: &mut Gradients, put_off: &Saved) -> Result {
    match (kind, put_off) {
        (LayerKind::Block(spec), Saved::PutOff(put_off)) => {
            block::weight_gradients(spec, call, gradients, put_off)
        }
        _ => panic!("layer {} put nothing off", call.layer),
    }
}
