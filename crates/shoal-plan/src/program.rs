//! A program: what one device does for one step, as instructions on lanes. The list is the schedule's
//! order; `after` says which of it is needed. Any other order that keeps every `after` gives the same
//! result, bit for bit.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::table::Samples;

/// What part of a device an instruction occupies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lane {
    Compute,
    CopyIn,
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
    /// The part of a forward in training that comes before the statistics of its groups are known, and adds to
    /// them: a layer with a batch norm has it before [`Op::Forward`].
    Begin {
        layer: usize,
        samples: Samples,
    },
    Forward {
        layer: usize,
        samples: Samples,
        keep: Keep,
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
    /// The last layer's logits, of what [`Purpose::Predict`] says.
    Predict {
        layer: usize,
        samples: Samples,
    },
    /// The step's loss, and whether it is a number.
    SumLoss,
    /// The global norm of the gradient, by which updates are clipped.
    GradientNorm,
    /// Apply the gradient: the tensor's next version.
    Update {
        tensor: usize,
    },
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Op::Load { samples } => write!(f, "load {samples}"),
            Op::CountTargets => write!(f, "count the targets"),
            Op::Begin { layer, samples } => write!(f, "beginning of layer {layer}'s forward, {samples}"),
            Op::Forward { layer, samples, .. } => write!(f, "forward of layer {layer}, {samples}"),
            Op::Recompute { layer, samples } => write!(f, "recompute of layer {layer}, {samples}"),
            Op::BeginBackward { layer, samples } => {
                write!(f, "beginning of layer {layer}'s backward, {samples}")
            }
            Op::Backward { layer, samples } => write!(f, "backward of layer {layer}, {samples}"),
            Op::Predict { layer, samples } => write!(f, "predict from layer {layer}, {samples}"),
            Op::SumLoss => write!(f, "sum the loss"),
            Op::GradientNorm => write!(f, "gradient norm"),
            Op::Update { tensor } => write!(f, "update of tensor {tensor}"),
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
    /// Samples that it loads: those of the global batch.
    pub fn loaded_samples(&self) -> usize {
        let loaded = self.instructions.iter().map(|instruction| match instruction.op {
            Op::Load { samples } => samples.count(),
            _ => 0,
        });
        loaded.sum()
    }
}
