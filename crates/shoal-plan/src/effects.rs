//! What each instruction reads, makes, uses up and adds to. This is the whole truth about dependencies: the
//! compiler derives `after` from it, the verifier judges a reordered program by it, and the engine's store
//! holds exactly these values.
//!
//! Values are linear: one instruction makes each, one uses it up. Sums are added to by several instructions
//! whose order is fixed, because floating-point addition is not associative.

use std::fmt;

use shoal_model::Chain;

use crate::program::{Keep, Op};
use crate::table::Samples;

/// Something an instruction makes and another uses up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Value {
    /// Tokens or images, as they come in.
    Inputs(Samples),
    Targets(Samples),
    /// How long samples are that may be shorter than the sequence, for one of the layers that are told: a load makes
    /// one for each.
    Lengths {
        layer: usize,
        samples: Samples,
    },
    /// A layer's output, for one of the layers that take it: where branches part, a forward makes several.
    Activation {
        layer: usize,
        reader: usize,
        samples: Samples,
    },
    /// A forward that has begun: it waits for the statistics of its groups.
    Begun {
        layer: usize,
        samples: Samples,
    },
    /// A backward that has begun: it waits for the sums of its groups.
    BegunBackward {
        layer: usize,
        samples: Samples,
    },
    /// What a layer's backward reads.
    Saved {
        layer: usize,
        samples: Samples,
    },
    /// What a layer is recomputed from.
    Input {
        layer: usize,
        samples: Samples,
    },
    /// The gradient of a layer's output, as far as it comes from one of the layers that take it.
    Gradient {
        layer: usize,
        reader: usize,
        samples: Samples,
    },
}

/// Something that is true for the rest of the step once made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fact {
    TargetCount,
    Loss,
    GradientNorm,
    /// The tensor's next version.
    Updated {
        tensor: usize,
    },
}

/// A buffer several instructions add to, in a fixed order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sum {
    TargetCount,
    Loss,
    Gradient {
        tensor: usize,
    },
    /// Of a group of samples that a batch norm takes together.
    Statistics {
        layer: usize,
        group: usize,
    },
    /// What the gradients of that group's members all depend on.
    GradientStatistics {
        layer: usize,
        group: usize,
    },
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Value::Inputs(samples) => write!(f, "the inputs of {samples}"),
            Value::Targets(samples) => write!(f, "the targets of {samples}"),
            Value::Lengths { layer, samples } => {
                write!(f, "the lengths of {samples} for layer {layer}")
            }
            Value::Activation { layer, reader, samples } if *reader == layer + 1 => {
                write!(f, "the output of layer {layer}, {samples}")
            }
            Value::Activation { layer, reader, samples } => {
                write!(f, "the output of layer {layer} for layer {reader}, {samples}")
            }
            Value::Begun { layer, samples } => write!(f, "layer {layer}'s begun forward, {samples}"),
            Value::BegunBackward { layer, samples } => write!(f, "layer {layer}'s begun backward, {samples}"),
            Value::Saved { layer, samples } => write!(f, "what layer {layer} saved, {samples}"),
            Value::Input { layer, samples } => write!(f, "the kept input of layer {layer}, {samples}"),
            Value::Gradient { layer, reader, samples } if *reader == layer + 1 => {
                write!(f, "the gradient of layer {layer}'s output, {samples}")
            }
            Value::Gradient { layer, reader, samples } => {
                write!(f, "the gradient of layer {layer}'s output from layer {reader}, {samples}")
            }
        }
    }
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Fact::TargetCount => write!(f, "the count of the targets"),
            Fact::Loss => write!(f, "the loss"),
            Fact::GradientNorm => write!(f, "the gradient norm"),
            Fact::Updated { tensor } => write!(f, "the update of tensor {tensor}"),
        }
    }
}

impl fmt::Display for Sum {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Sum::TargetCount => write!(f, "the count of the targets"),
            Sum::Loss => write!(f, "the loss"),
            Sum::Gradient { tensor } => write!(f, "the gradient of tensor {tensor}"),
            Sum::Statistics { layer, group } => write!(f, "the statistics of layer {layer}'s group {group}"),
            Sum::GradientStatistics { layer, group } => {
                write!(f, "the sums of layer {layer}'s group {group} in the backward")
            }
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct Effects {
    pub uses_up: Vec<Value>,
    pub makes: Vec<Value>,
    pub needs: Vec<Fact>,
    pub establishes: Option<Fact>,
    pub adds_to: Vec<Sum>,
    /// Sums that must be complete.
    pub needs_complete: Vec<Sum>,
    /// Tensors read at the step's own version: their update must come later.
    pub reads_tensors: Vec<usize>,
}

/// The effects of an instruction on a model.
pub fn effects(op: &Op, chain: &Chain) -> Effects {
    let last = chain.layers.len() - 1;
    let tensors = |layer: usize| chain.layers[layer].tensors.iter().map(|(_, tensor)| *tensor).collect();
    // What a layer is fed: the step's inputs, or earlier layers' outputs; some also the samples' lengths, the last also
    // the targets.
    let feed = |layer: usize, samples: Samples| {
        let inputs = chain.layers[layer].inputs.iter();
        let mut feed: Vec<Value> =
            inputs.map(|from| Value::Activation { layer: *from, reader: layer, samples }).collect();
        feed.extend((layer == 0).then_some(Value::Inputs(samples)));
        feed.extend(chain.takes_lengths(layer).then_some(Value::Lengths { layer, samples }));
        feed.extend((layer == last).then_some(Value::Targets(samples)));
        feed
    };
    // What a backward takes.
    let backward_feed = |layer: usize, samples: Samples| {
        let gradients = chain.readers(layer).map(|reader| Value::Gradient { layer, reader, samples });
        std::iter::once(Value::Saved { layer, samples }).chain(gradients).collect()
    };
    let groups = |layer: usize, samples: Samples| {
        let groups = chain.batch_norm(layer).map(|norm| norm.groups(samples.range()));
        groups.into_iter().flatten().map(|(group, _)| group)
    };
    match *op {
        Op::Load { samples } => {
            let mut makes = vec![Value::Inputs(samples), Value::Targets(samples)];
            makes.extend(chain.length_readers().map(|layer| Value::Lengths { layer, samples }));
            Effects { makes, adds_to: vec![Sum::TargetCount], ..Effects::default() }
        }
        Op::CountTargets => Effects {
            needs_complete: vec![Sum::TargetCount],
            establishes: Some(Fact::TargetCount),
            ..Effects::default()
        },
        Op::Begin { layer, samples } => {
            let mut uses_up = feed(layer, samples);
            uses_up.truncate(1);
            Effects {
                uses_up,
                makes: vec![Value::Begun { layer, samples }],
                adds_to: groups(layer, samples).map(|group| Sum::Statistics { layer, group }).collect(),
                reads_tensors: tensors(layer),
                ..Effects::default()
            }
        }
        Op::Forward { layer, samples, keep } => {
            let begun = keep != Keep::Nothing && chain.batch_norm(layer).is_some();
            let mut uses_up = feed(layer, samples);
            if begun {
                uses_up[0] = Value::Begun { layer, samples };
            }
            let statistics = groups(layer, samples).map(|group| Sum::Statistics { layer, group });
            let readers = chain.readers(layer);
            let mut makes: Vec<Value> =
                readers.map(|reader| Value::Activation { layer, reader, samples }).collect();
            makes.extend(match keep {
                Keep::All => Some(Value::Saved { layer, samples }),
                Keep::Input => Some(Value::Input { layer, samples }),
                Keep::Nothing => None,
            });
            Effects {
                uses_up,
                makes,
                needs: if layer == last { vec![Fact::TargetCount] } else { vec![] },
                needs_complete: if begun { statistics.collect() } else { vec![] },
                adds_to: if layer == last { vec![Sum::Loss] } else { vec![] },
                reads_tensors: tensors(layer),
                ..Effects::default()
            }
        }
        Op::Recompute { layer, samples } => Effects {
            uses_up: vec![Value::Input { layer, samples }],
            makes: vec![Value::Saved { layer, samples }],
            reads_tensors: tensors(layer),
            ..Effects::default()
        },
        Op::BeginBackward { layer, samples } => Effects {
            uses_up: backward_feed(layer, samples),
            makes: vec![Value::BegunBackward { layer, samples }],
            adds_to: groups(layer, samples).map(|group| Sum::GradientStatistics { layer, group }).collect(),
            reads_tensors: tensors(layer),
            ..Effects::default()
        },
        Op::Backward { layer, samples } => {
            let sums: Vec<usize> = tensors(layer);
            let whole = groups(layer, samples).map(|group| Sum::GradientStatistics { layer, group });
            Effects {
                uses_up: match chain.batch_norm(layer) {
                    Some(_) => vec![Value::BegunBackward { layer, samples }],
                    None => backward_feed(layer, samples),
                },
                needs_complete: whole.collect(),
                makes: chain.layers[layer]
                    .inputs
                    .iter()
                    .map(|from| Value::Gradient { layer: *from, reader: layer, samples })
                    .collect(),
                adds_to: sums.iter().map(|tensor| Sum::Gradient { tensor: *tensor }).collect(),
                reads_tensors: sums,
                ..Effects::default()
            }
        }
        Op::Predict { layer, samples } => {
            Effects { uses_up: feed(layer, samples), reads_tensors: tensors(layer), ..Effects::default() }
        }
        Op::SumLoss => {
            Effects { needs_complete: vec![Sum::Loss], establishes: Some(Fact::Loss), ..Effects::default() }
        }
        Op::GradientNorm => Effects {
            needs_complete: (0..chain.tensors.len()).map(|tensor| Sum::Gradient { tensor }).collect(),
            establishes: Some(Fact::GradientNorm),
            ..Effects::default()
        },
        // A loss that is no number stops the step before anything is updated.
        Op::Update { tensor } => Effects {
            needs: vec![Fact::GradientNorm, Fact::Loss],
            establishes: Some(Fact::Updated { tensor }),
            ..Effects::default()
        },
    }
}
