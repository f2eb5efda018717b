//! What each instruction reads, makes, uses up and adds to. This is the whole truth about dependencies: the
//! compiler derives `after` from it, the verifier judges a reordered program by it, and the engine's store
//! holds exactly these values.
//!
//! Values are linear: one instruction makes each, one uses it up. Sums are added to by several instructions
//! whose order is fixed, because floating-point addition is not associative. All of it is about one device: what
//! goes to another is used up by a send here and made by a receive there.

use std::fmt;

use crate::layout::Layout;
use crate::program::{Keep, Moved, Op, Pass};
use crate::table::{Activations, Residence, Samples, Tier};

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
    /// A layer's output, for one of the layers that take it: where branches part, a forward makes several. Where
    /// that layer is cut differently, each piece is a value.
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
    /// The same in host memory.
    Offloaded {
        layer: usize,
        samples: Samples,
    },
    /// The same, back from there.
    Restored {
        layer: usize,
        samples: Samples,
    },
    /// What gradients of a layer's weights are made of that its backward put off.
    PutOff {
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
    /// The layer's gathered parameters are here.
    Gathered {
        layer: usize,
        pass: Pass,
    },
    /// They no longer are.
    Released {
        layer: usize,
        pass: Pass,
    },
    /// A group's sums over all its devices.
    Exchanged {
        layer: usize,
        group: usize,
        backward: bool,
    },
    /// The sums over all devices of the gradients of the tensors that the layer owns.
    Reduced {
        layer: usize,
    },
    /// Those sums, where the optimizer's slices are.
    HandedOver {
        layer: usize,
    },
    /// The next version of the slices of a tensor in one kind of memory.
    Updated {
        tensor: usize,
        at: Tier,
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
            Value::Offloaded { layer, samples } => {
                write!(f, "the offloaded input of layer {layer}, {samples}")
            }
            Value::Restored { layer, samples } => {
                write!(f, "the restored input of layer {layer}, {samples}")
            }
            Value::PutOff { layer, samples } => {
                write!(f, "what layer {layer}'s backward put off, {samples}")
            }
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
            Fact::Gathered { layer, pass } => write!(f, "layer {layer}'s gathered parameters ({pass:?})"),
            Fact::Released { layer, pass } => write!(f, "the release of layer {layer} ({pass:?})"),
            Fact::Exchanged { layer, group, .. } => {
                write!(f, "the exchanged sums of layer {layer}'s group {group}")
            }
            Fact::Reduced { layer } => write!(f, "layer {layer}'s reduced gradients"),
            Fact::HandedOver { layer } => write!(f, "layer {layer}'s gradients where they are needed"),
            Fact::Updated { tensor, .. } => write!(f, "the update of tensor {tensor}"),
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
    /// A layer's gathered parameters that are read: they must not have been released.
    pub reads_gathered: Option<(usize, Pass)>,
    /// Tensors whose copies are replaced by the next version: whoever reads this one's comes before.
    pub replaces: Vec<usize>,
}

impl Effects {
    /// Tensors whose parameters it reads or replaces, or whose gradient it adds to or reads: what the step before still
    /// does with them must be over.
    pub fn touches(&self) -> impl Iterator<Item = usize> + '_ {
        let gradients = self.adds_to.iter().chain(&self.needs_complete).filter_map(|sum| match sum {
            Sum::Gradient { tensor } => Some(*tensor),
            _ => None,
        });
        self.reads_tensors.iter().chain(&self.replaces).copied().chain(gradients)
    }
}

/// The effects of an instruction on one of the plan's devices.
pub fn effects(op: &Op, layout: &Layout, device: usize) -> Effects {
    Of { layout, device }.effects(op)
}

struct Of<'a> {
    layout: &'a Layout<'a>,
    device: usize,
}

impl Of<'_> {
    fn last(&self) -> usize {
        self.layout.chain.layers.len() - 1
    }

    /// What a layer takes from another, in the pieces in which it comes.
    fn taken(&self, layer: usize, from: usize, samples: Samples) -> impl Iterator<Item = Value> + '_ {
        self.layout.pieces(from, samples).map(move |(samples, _)| Value::Activation {
            layer: from,
            reader: layer,
            samples,
        })
    }

    /// What a layer is fed first: the step's inputs, or the first of the layers whose outputs it takes.
    fn first_feed(&self, layer: usize, samples: Samples) -> Vec<Value> {
        match self.layout.chain.layers[layer].inputs.first() {
            Some(from) => self.taken(layer, *from, samples).collect(),
            None => vec![Value::Inputs(samples)],
        }
    }

    /// The other outputs it takes; some layers also the samples' lengths, the last also the targets.
    fn other_feed(&self, layer: usize, samples: Samples) -> Vec<Value> {
        let others = self.layout.chain.layers[layer].inputs.iter().skip(1);
        let mut feed: Vec<Value> = others.flat_map(|from| self.taken(layer, *from, samples)).collect();
        feed.extend(self.layout.chain.takes_lengths(layer).then_some(Value::Lengths { layer, samples }));
        feed.extend((layer == self.last()).then_some(Value::Targets(samples)));
        feed
    }

    fn feed(&self, layer: usize, samples: Samples) -> Vec<Value> {
        let mut feed = self.first_feed(layer, samples);
        feed.extend(self.other_feed(layer, samples));
        feed
    }

    /// What a backward takes.
    fn backward_feed(&self, layer: usize, samples: Samples) -> Vec<Value> {
        let gradients = self.layout.readers(layer).iter().flat_map(|reader| {
            let pieces = self.layout.pieces(*reader, samples);
            pieces.map(move |(samples, _)| Value::Gradient { layer, reader: *reader, samples })
        });
        std::iter::once(Value::Saved { layer, samples }).chain(gradients).collect()
    }

    fn groups(&self, layer: usize, samples: Samples) -> impl Iterator<Item = usize> + use<> {
        let groups = self.layout.chain.batch_norm(layer).map(|norm| norm.groups(samples.range()));
        groups.into_iter().flatten().map(|(group, _)| group)
    }

    /// The facts that groups' sums are there from all devices, for those that are on several.
    fn exchanged(&self, layer: usize, samples: Samples, backward: bool) -> Vec<Fact> {
        self.groups(layer, samples)
            .filter(|group| self.layout.exchange(layer, *group).is_some())
            .map(|group| Fact::Exchanged { layer, group, backward })
            .collect()
    }

    /// What an instruction that computes a layer reads of its parameters.
    fn reading(&self, layer: usize, backward: bool, mut effects: Effects) -> Effects {
        let (layout, pass) = (self.layout, self.layout.pass(backward));
        if layout.gather(layer, pass).is_some_and(|group| group.receives(self.device)) {
            effects.needs.push(Fact::Gathered { layer, pass });
            effects.reads_gathered = Some((layer, pass));
        }
        effects.reads_tensors = layout.tensors(layer).to_vec();
        effects
    }

    fn effects(&self, op: &Op) -> Effects {
        match *op {
            Op::Load { samples } => self.load(samples),
            Op::CountTargets => Effects {
                needs_complete: vec![Sum::TargetCount],
                establishes: Some(Fact::TargetCount),
                ..Effects::default()
            },
            Op::Gather { layer, pass } => self.gather(layer, pass),
            Op::Release { layer, pass } => Effects {
                needs: vec![Fact::Gathered { layer, pass }],
                establishes: Some(Fact::Released { layer, pass }),
                ..Effects::default()
            },
            Op::Send { moved, layer, reader, samples, .. } => {
                Effects { uses_up: vec![moved_value(moved, layer, reader, samples)], ..Effects::default() }
            }
            Op::Receive { moved, layer, reader, samples, .. } => {
                Effects { makes: vec![moved_value(moved, layer, reader, samples)], ..Effects::default() }
            }
            Op::Begin { layer, samples } => {
                let statistics = self.groups(layer, samples).map(|group| Sum::Statistics { layer, group });
                let begun = Effects {
                    uses_up: self.first_feed(layer, samples),
                    makes: vec![Value::Begun { layer, samples }],
                    adds_to: statistics.collect(),
                    ..Effects::default()
                };
                self.reading(layer, false, begun)
            }
            Op::Exchange { layer, group, backward } => Effects {
                needs_complete: vec![match backward {
                    false => Sum::Statistics { layer, group },
                    true => Sum::GradientStatistics { layer, group },
                }],
                establishes: Some(Fact::Exchanged { layer, group, backward }),
                ..Effects::default()
            },
            Op::Forward { layer, samples, keep } => self.forward(layer, samples, keep),
            Op::Offload { layer, samples } => Effects {
                uses_up: vec![Value::Input { layer, samples }],
                makes: vec![Value::Offloaded { layer, samples }],
                ..Effects::default()
            },
            Op::Restore { layer, samples } => Effects {
                uses_up: vec![Value::Offloaded { layer, samples }],
                makes: vec![Value::Restored { layer, samples }],
                ..Effects::default()
            },
            Op::Recompute { layer, samples } => {
                let share = self.layout.share(self.device, layer, samples);
                let offloaded = share.is_some_and(|share| share.activations == Activations::Offload);
                let remade = Effects {
                    uses_up: vec![match offloaded {
                        true => Value::Restored { layer, samples },
                        false => Value::Input { layer, samples },
                    }],
                    makes: vec![Value::Saved { layer, samples }],
                    ..Effects::default()
                };
                self.reading(layer, true, remade)
            }
            Op::BeginBackward { layer, samples } => {
                let sums = self.groups(layer, samples).map(|group| Sum::GradientStatistics { layer, group });
                let begun = Effects {
                    uses_up: self.backward_feed(layer, samples),
                    makes: vec![Value::BegunBackward { layer, samples }],
                    adds_to: sums.collect(),
                    ..Effects::default()
                };
                self.reading(layer, true, begun)
            }
            Op::Backward { layer, samples } => self.backward(layer, samples),
            Op::WeightGradients { layer, samples } => Effects {
                uses_up: vec![Value::PutOff { layer, samples }],
                adds_to: self.sums(layer, |put_off| put_off),
                ..Effects::default()
            },
            Op::Reduce { layer } => Effects {
                needs_complete: self.gradients(layer),
                establishes: Some(Fact::Reduced { layer }),
                ..Effects::default()
            },
            Op::HandOver { layer } => Effects {
                needs: self.reduced(layer).into_iter().collect(),
                needs_complete: self.gradients(layer),
                establishes: Some(Fact::HandedOver { layer }),
                ..Effects::default()
            },
            Op::Predict { layer, samples } => {
                let fed = Effects { uses_up: self.feed(layer, samples), ..Effects::default() };
                self.reading(layer, false, fed)
            }
            Op::SumLoss => Effects {
                needs_complete: vec![Sum::Loss],
                establishes: Some(Fact::Loss),
                ..Effects::default()
            },
            Op::GradientNorm => self.gradient_norm(),
            // A loss that is no number stops the step before anything is updated.
            Op::Update { tensor, at } => Effects {
                needs: vec![Fact::GradientNorm, Fact::Loss],
                establishes: Some(Fact::Updated { tensor, at }),
                replaces: vec![tensor],
                ..Effects::default()
            },
        }
    }

    fn load(&self, samples: Samples) -> Effects {
        let mut effects = Effects::default();
        if self.layout.share(self.device, 0, samples).is_some() {
            effects.makes.push(Value::Inputs(samples));
        }
        if self.layout.share(self.device, self.last(), samples).is_some() {
            effects.makes.push(Value::Targets(samples));
            effects.adds_to.push(Sum::TargetCount);
        }
        let told = self.layout.told_lengths(self.device, samples);
        effects.makes.extend(told.map(|layer| Value::Lengths { layer, samples }));
        effects
    }

    fn gather(&self, layer: usize, pass: Pass) -> Effects {
        let tensors = match pass {
            Pass::Update => self.layout.owned(layer),
            Pass::Forward | Pass::Backward | Pass::Step => self.layout.tensors(layer),
        };
        let mut effects = Effects { establishes: Some(Fact::Gathered { layer, pass }), ..Effects::default() };
        let held = tensors.iter().flat_map(|tensor| {
            let held = self.layout.held(*tensor, self.device).iter();
            held.map(|held| (*tensor, held.holder.tier()))
        });
        match pass {
            Pass::Update => {
                effects.needs = held.map(|(tensor, at)| Fact::Updated { tensor, at }).collect();
                let renewed = |tensor: &&usize| {
                    self.layout.residence(**tensor, self.device) == Some(Residence::Resident)
                };
                effects.replaces = tensors.iter().filter(renewed).copied().collect();
            }
            Pass::Forward | Pass::Backward | Pass::Step => {
                effects.reads_tensors = held.map(|(tensor, _)| tensor).collect();
            }
        }
        effects.needs.dedup();
        effects
    }

    fn forward(&self, layer: usize, samples: Samples, keep: Keep) -> Effects {
        let begun = keep != Keep::Nothing && self.layout.chain.batch_norm(layer).is_some();
        let mut uses_up = match begun {
            true => vec![Value::Begun { layer, samples }],
            false => self.first_feed(layer, samples),
        };
        uses_up.extend(self.other_feed(layer, samples));
        let readers = self.layout.readers(layer).iter();
        let mut makes: Vec<Value> = readers
            .flat_map(|reader| {
                let pieces = self.layout.pieces(*reader, samples);
                pieces.map(|(samples, _)| Value::Activation { layer, reader: *reader, samples })
            })
            .collect();
        makes.extend(match keep {
            Keep::All => Some(Value::Saved { layer, samples }),
            Keep::Input => Some(Value::Input { layer, samples }),
            Keep::Nothing => None,
        });
        let statistics = self.groups(layer, samples).map(|group| Sum::Statistics { layer, group });
        let mut effects = Effects {
            uses_up,
            makes,
            needs_complete: if begun { statistics.collect() } else { vec![] },
            needs: if begun { self.exchanged(layer, samples, false) } else { vec![] },
            ..Effects::default()
        };
        if layer == self.last() {
            effects.needs.push(Fact::TargetCount);
            effects.adds_to.push(Sum::Loss);
        }
        self.reading(layer, false, effects)
    }

    fn backward(&self, layer: usize, samples: Samples) -> Effects {
        let chain = self.layout.chain;
        let whole = self.groups(layer, samples).map(|group| Sum::GradientStatistics { layer, group });
        let inputs = chain.layers[layer].inputs.iter();
        let puts_off = self.layout.puts_off(self.device, layer);
        let mut effects = Effects {
            uses_up: match chain.batch_norm(layer) {
                Some(_) => vec![Value::BegunBackward { layer, samples }],
                None => self.backward_feed(layer, samples),
            },
            needs_complete: whole.collect(),
            needs: self.exchanged(layer, samples, true),
            makes: inputs
                .flat_map(|from| {
                    let pieces = self.layout.pieces(*from, samples);
                    pieces.map(|(samples, _)| Value::Gradient { layer: *from, reader: layer, samples })
                })
                .collect(),
            adds_to: self.sums(layer, |put_off| !(puts_off && put_off)),
            ..Effects::default()
        };
        effects.makes.extend(puts_off.then_some(Value::PutOff { layer, samples }));
        self.reading(layer, true, effects)
    }

    /// The gradient sums that a layer adds to, of which some may be put off.
    fn sums(&self, layer: usize, adds: impl Fn(bool) -> bool) -> Vec<Sum> {
        let tensors = self.layout.chain.layers[layer].tensors.iter();
        let added = tensors.filter(|(slot, _)| adds(slot.may_be_put_off()));
        added.map(|(_, tensor)| Sum::Gradient { tensor: *tensor }).collect()
    }

    /// The gradient sums of the tensors that a layer owns.
    fn gradients(&self, layer: usize) -> Vec<Sum> {
        self.layout.owned(layer).iter().map(|tensor| Sum::Gradient { tensor: *tensor }).collect()
    }

    /// The fact that a layer's gradients are added up, for those who take part in it.
    fn reduced(&self, layer: usize) -> Option<Fact> {
        let group = self.layout.reduce(layer).filter(|group| group.has(self.device));
        group.map(|_| Fact::Reduced { layer })
    }

    /// The fact that they are where the optimizer's slices are, for those who give or get them.
    fn handed_over(&self, layer: usize) -> Option<Fact> {
        let group = self.layout.hand_over(layer).filter(|group| group.has(self.device));
        group.map(|_| Fact::HandedOver { layer })
    }

    /// All that updates read is here before anyone adds to the norm, so when it is known, every holder can update.
    fn gradient_norm(&self) -> Effects {
        let layers = 0..self.layout.chain.layers.len();
        Effects {
            needs: layers
                .clone()
                .flat_map(|layer| [self.reduced(layer), self.handed_over(layer)])
                .flatten()
                .collect(),
            needs_complete: layers.flat_map(|layer| self.gradients(layer)).collect(),
            establishes: Some(Fact::GradientNorm),
            ..Effects::default()
        }
    }
}

fn moved_value(moved: Moved, layer: usize, reader: usize, samples: Samples) -> Value {
    match moved {
        Moved::Activation => Value::Activation { layer, reader, samples },
        Moved::Gradient => Value::Gradient { layer, reader, samples },
    }
}
