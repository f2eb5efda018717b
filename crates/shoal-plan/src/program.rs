//! A program: what one device does for one step, as instructions on lanes. The list is the schedule's
//! order; `after` says which of it is needed. Any other order that keeps every `after` gives the same
//! result, bit for bit.
//!
//! Instructions start in the order of the list, each when what it comes `after` has finished and its lane is free;
//! those with an `ahead` may start that many places earlier: movements as soon as they can, computations where the instruction
//! whose turn it is has to wait (a forward before a backward whose gradient is late, weights' gradients that were put off before
//! either). Nothing else may deviate: so memory has
//! a bound ([`crate::memory`]) and, since the lists of all devices come from one order of the whole step, nothing waits
//! forever.
//!
//! Updates in host memory and on disks hold up nothing behind them ([`Op::line`]). Those that nothing in the list comes
//! after ([`Program::left_behind`]) may still be under way when the next step begins: of that, what touches their
//! tensors ([`crate::effects::Effects::touches`]) comes after them.

use std::fmt;

use foldhash::HashSet;
use serde::{Deserialize, Serialize};

use crate::table::{Samples, Tier, is_zero};

/// What part of a device an instruction occupies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lane {
    Compute,
    /// From the host to the device.
    CopyIn,
    /// From the device to the host.
    CopyOut,
    /// To and from other devices. What is on it waits for its partner without holding up the rest.
    Network,
    /// The host's share of the optimizer.
    Host,
    Disk,
}

impl Lane {
    /// How many lanes do one instruction after the other; the network is not among them.
    pub const SERIAL: usize = 5;

    /// Its place among those.
    fn serial(self) -> Option<usize> {
        match self {
            Lane::Compute => Some(0),
            Lane::CopyIn => Some(1),
            Lane::CopyOut => Some(2),
            Lane::Host => Some(3),
            Lane::Disk => Some(4),
            Lane::Network => None,
        }
    }
}

/// What goes from one layer's device to another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Moved {
    /// A layer's output, to one of the layers that take it.
    Activation,
    /// Its gradient, back from that layer.
    Gradient,
}

/// The part of a step for which parameters are gathered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    Forward,
    Backward,
    /// Where forwards and backwards alternate: for both.
    Step,
    /// The next step: copies that stay are renewed from slices updated elsewhere.
    Update,
}

/// What a forward leaves for the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Keep {
    /// Everything the backward reads.
    All,
    /// The layer's input, to recompute from.
    Input,
    Nothing,
}

/// What a program is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// One training step.
    Train,
    /// The loss of some samples.
    Evaluate,
    /// The logits of each sample's next token or class, or of all its tokens where each sees all.
    Predict,
}

/// Layers and tensors are numbered as in the model's chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Op {
    /// Bring the samples' inputs and targets onto the device.
    Load {
        samples: Samples,
    },
    /// Count the global batch's targets: one over it weighs the loss.
    CountTargets,
    /// Bring a layer's parameters from their holders to those who compute it.
    Gather {
        layer: usize,
        pass: Pass,
    },
    /// Drop what was gathered.
    Release {
        layer: usize,
        pass: Pass,
    },
    /// A piece of what one layer hands to another, to the other's device.
    Send {
        moved: Moved,
        layer: usize,
        reader: usize,
        samples: Samples,
        to: usize,
    },
    Receive {
        moved: Moved,
        layer: usize,
        reader: usize,
        samples: Samples,
        from: usize,
    },
    /// The part of a forward in training that comes before the statistics of its groups are known, and adds to
    /// them: a layer with a batch norm has it before [`Op::Forward`].
    Begin {
        layer: usize,
        samples: Samples,
    },
    /// Add up the statistics of a group whose samples are on several devices.
    Exchange {
        layer: usize,
        group: usize,
        backward: bool,
    },
    Forward {
        layer: usize,
        samples: Samples,
        keep: Keep,
    },
    /// The kept input of a layer, to host memory.
    Offload {
        layer: usize,
        samples: Samples,
    },
    /// Back from there.
    Restore {
        layer: usize,
        samples: Samples,
    },
    Recompute {
        layer: usize,
        samples: Samples,
    },
    /// The part of a backward that adds to the sums of its groups, before [`Op::Backward`], which needs them whole.
    BeginBackward {
        layer: usize,
        samples: Samples,
    },
    Backward {
        layer: usize,
        samples: Samples,
    },
    /// The part of a backward that nothing but the sums waits for: gradients of weights that [`Op::Backward`] put off.
    WeightGradients {
        layer: usize,
        samples: Samples,
    },
    /// Add up the gradients of the tensors that the layer is the first to use, each slice at its holders.
    Reduce {
        layer: usize,
    },
    /// Bring the sums of those gradients from where they were added up to the optimizer's slices that lie elsewhere.
    HandOver {
        layer: usize,
    },
    /// The last layer's logits, of what [`Purpose::Predict`] says.
    Predict {
        layer: usize,
        samples: Samples,
    },
    /// The step's loss, and whether it is a number.
    SumLoss,
    /// The global norm of the gradient, by which updates are clipped.
    GradientNorm,
    /// Apply the gradient to the slices of a tensor that are here, in one kind of memory: their next version.
    Update {
        tensor: usize,
        #[serde(default, skip_serializing_if = "Tier::is_device")]
        at: Tier,
    },
}

impl Op {
    /// Whether it moves something between devices, or between their memory and others.
    pub fn moves(&self) -> bool {
        match self {
            Op::Gather { .. }
            | Op::Release { .. }
            | Op::Send { .. }
            | Op::Receive { .. }
            | Op::Exchange { .. }
            | Op::Offload { .. }
            | Op::Restore { .. }
            | Op::Reduce { .. }
            | Op::HandOver { .. } => true,
            Op::Update { at, .. } => !at.is_device(),
            _ => false,
        }
    }

    /// Of an update in another memory than the device's own: that memory. Such updates wait in a line, one for each memory,
    /// and follow each other there whatever the list goes on to meanwhile.
    pub fn line(&self) -> Option<Tier> {
        match self {
            Op::Update { at, .. } if !at.is_device() => Some(*at),
            _ => None,
        }
    }

    /// The tensor that it updates.
    pub fn updated_tensor(&self) -> Option<usize> {
        match self {
            Op::Update { tensor, .. } => Some(*tensor),
            _ => None,
        }
    }

    /// Whether it computes a layer, or a part of one.
    pub fn computes_layer(&self) -> bool {
        matches!(
            self,
            Op::Begin { .. }
                | Op::Forward { .. }
                | Op::Recompute { .. }
                | Op::BeginBackward { .. }
                | Op::Backward { .. }
                | Op::WeightGradients { .. }
                | Op::Predict { .. }
        )
    }

    /// The layer whose parameters or values it is about.
    pub fn layer(&self) -> Option<usize> {
        match *self {
            Op::Gather { layer, .. }
            | Op::Release { layer, .. }
            | Op::Send { layer, .. }
            | Op::Receive { layer, .. }
            | Op::Begin { layer, .. }
            | Op::Exchange { layer, .. }
            | Op::Forward { layer, .. }
            | Op::Offload { layer, .. }
            | Op::Restore { layer, .. }
            | Op::Recompute { layer, .. }
            | Op::BeginBackward { layer, .. }
            | Op::Backward { layer, .. }
            | Op::WeightGradients { layer, .. }
            | Op::Reduce { layer }
            | Op::HandOver { layer }
            | Op::Predict { layer, .. } => Some(layer),
            Op::Load { .. } | Op::CountTargets | Op::SumLoss | Op::GradientNorm | Op::Update { .. } => None,
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Op::Load { samples } => write!(f, "load {samples}"),
            Op::CountTargets => write!(f, "count the targets"),
            Op::Gather { layer, pass } => write!(f, "gather layer {layer}, {pass:?}"),
            Op::Release { layer, pass } => write!(f, "release layer {layer}, {pass:?}"),
            Op::Send { moved, layer, reader, samples, to } => {
                write!(f, "send layer {layer}'s {moved:?} of layer {reader} to device {to}, {samples}")
            }
            Op::Receive { moved, layer, reader, samples, from } => {
                write!(f, "receive layer {layer}'s {moved:?} of layer {reader} from device {from}, {samples}")
            }
            Op::Exchange { layer, group, backward } => {
                let pass = if *backward { "backward" } else { "forward" };
                write!(f, "exchange of layer {layer}'s group {group} in the {pass}")
            }
            Op::Offload { layer, samples } => write!(f, "offload layer {layer}'s input, {samples}"),
            Op::Restore { layer, samples } => write!(f, "restore layer {layer}'s input, {samples}"),
            Op::Reduce { layer } => write!(f, "reduce layer {layer}'s gradients"),
            Op::HandOver { layer } => write!(f, "hand over layer {layer}'s gradients"),
            Op::Begin { layer, samples } => write!(f, "beginning of layer {layer}'s forward, {samples}"),
            Op::Forward { layer, samples, .. } => write!(f, "forward of layer {layer}, {samples}"),
            Op::Recompute { layer, samples } => write!(f, "recompute of layer {layer}, {samples}"),
            Op::BeginBackward { layer, samples } => {
                write!(f, "beginning of layer {layer}'s backward, {samples}")
            }
            Op::Backward { layer, samples } => write!(f, "backward of layer {layer}, {samples}"),
            Op::WeightGradients { layer, samples } => {
                write!(f, "weight gradients of layer {layer}, {samples}")
            }
            Op::Predict { layer, samples } => write!(f, "predict from layer {layer}, {samples}"),
            Op::SumLoss => write!(f, "sum the loss"),
            Op::GradientNorm => write!(f, "gradient norm"),
            Op::Update { tensor, at: Tier::Device } => write!(f, "update of tensor {tensor}"),
            Op::Update { tensor, at } => write!(f, "update of tensor {tensor} at the {at:?}"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instruction {
    /// Its place in the compiled schedule; it keeps it when the list is reordered.
    pub id: u32,
    #[serde(flatten)]
    pub op: Op,
    pub lane: Lane,
    /// Instructions that must have finished before this one starts.
    pub after: Vec<u32>,
    /// How many places before its own it may start: before instructions that stand earlier have. What its memory
    /// takes is counted from there on.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub ahead: u32,
}

impl Instruction {
    /// Whether it computes, and may do so ahead of its turn.
    pub fn computes_ahead(&self) -> bool {
        self.ahead > 0 && self.lane == Lane::Compute
    }

    /// The lane that it needs free, by its place among those that do one after the other. Updates of other memories have
    /// lines of their own instead.
    pub fn serial(&self) -> Option<usize> {
        self.lane.serial().filter(|_| self.op.line().is_none())
    }
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "instruction {} ({})", self.id, self.op)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    pub format: u32,
    pub purpose: Purpose,
    /// Index into the plan's devices.
    pub device: usize,
    pub instructions: Vec<Instruction>,
}

impl Program {
    /// Places of updates that the next step may begin without: those in a line that nothing in the list comes after.
    pub fn left_behind(&self) -> Vec<usize> {
        let in_line = || self.instructions.iter().enumerate().filter(|(_, next)| next.op.line().is_some());
        let Some(least) = in_line().map(|(_, next)| next.id).min() else { return Vec::new() };
        let awaited = self.instructions.iter().flat_map(|next| &next.after).filter(|id| **id >= least);
        let awaited: HashSet<u32> = awaited.copied().collect();
        in_line().filter(|(_, next)| !awaited.contains(&next.id)).map(|(place, _)| place).collect()
    }

    /// Samples that it loads: those of the global batch.
    pub fn loaded_samples(&self) -> usize {
        let loaded = self.instructions.iter().map(|instruction| match instruction.op {
            Op::Load { samples } => samples.count(),
            _ => 0,
        });
        loaded.sum()
    }
}
