//! The search for the best table on a single device: the largest micro-batch worth having that fits with
//! everything kept; if not even one sample fits so, the same with recomputation; if not even that fits, an
//! error that says how much is needed.

use shoal_model::{Chain, LayerKind, Precision};
use thiserror::Error;

use crate::compile::{CompileError, compile, splits_groups};
use crate::memory::{MemoryForecast, forecast};
use crate::program::{Program, Purpose};
use crate::table::{
    Activations, Compute, ComputeCopy, DeviceRow, FORMAT, GradientWire, Held, Holder, LayerRow, Order, Plan,
    Residence, Samples, TensorRow,
};

/// The device to plan for.
#[derive(Clone, Debug)]
pub struct DeviceOffer {
    pub name: String,
    pub budget_bytes: u64,
    pub workspace_bytes: u64,
    /// Tokens of a micro-batch past which the device's matrix products gain nothing more.
    pub rows_enough: usize,
}

/// What the user fixed; the rest is searched.
#[derive(Clone, Copy, Debug, Default)]
pub struct Preferences {
    /// Samples of a micro-batch.
    pub micro_batch: Option<usize>,
    pub activations: Option<Activations>,
    pub layer_first: bool,
}

/// The step to plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepShape {
    pub global_batch: usize,
    pub sequence: usize,
    pub precision: Precision,
    /// State tensors the optimizer keeps per parameter tensor.
    pub optimizer_states: usize,
    pub gradients: GradientWire,
}

impl StepShape {
    /// A sample of one row in fp32 with Adam's two states and exact gradients: most steps are told by what they differ in.
    pub const ADAM: StepShape = StepShape {
        global_batch: 1,
        sequence: 1,
        precision: Precision::Fp32,
        optimizer_states: 2,
        gradients: GradientWire::Fp32,
    };
}

#[derive(Debug, Error)]
pub enum PlanError {
    #[error(
        "{device}: training needs at least {needed_bytes} bytes ({} MiB; one sample at a time, {how}), the budget is {budget_bytes} ({} MiB): {short_bytes} short",
        needed_bytes.div_ceil(1 << 20),
        budget_bytes >> 20
    )]
    TooSmall { device: String, needed_bytes: u64, budget_bytes: u64, short_bytes: u64, how: &'static str },
    #[error("a micro-batch of {micro_batch} samples was asked for, but the global batch has {global_batch}")]
    MicroBatch { micro_batch: usize, global_batch: usize },
    #[error(transparent)]
    Compile(#[from] CompileError),
}

impl PlanError {
    pub fn hint(&self) -> Option<String> {
        match self {
            PlanError::TooSmall { .. } => {
                Some("raise plan.memory, shorten data.sequence, or choose a smaller model".into())
            }
            PlanError::MicroBatch { .. } => {
                Some("set plan.micro_batch to between 1 and train.global_batch, or leave it out".into())
            }
            PlanError::Compile(CompileError::SplitGroup { .. }) => {
                Some("set plan.order to \"layer_first\", or leave it out".into())
            }
            PlanError::Compile(_) => None,
        }
    }
}

/// A table, its program and what it takes.
pub struct Planned {
    pub plan: Plan,
    pub program: Program,
    pub memory: MemoryForecast,
}

/// Finds the best training plan that fits.
pub fn plan_one_device(
    chain: &Chain,
    step: StepShape,
    device: &DeviceOffer,
    wanted: Preferences,
) -> Result<Planned, PlanError> {
    let StepShape { global_batch, sequence, .. } = step;
    if let Some(micro_batch) = wanted.micro_batch.filter(|size| *size == 0 || *size > global_batch) {
        return Err(PlanError::MicroBatch { micro_batch, global_batch });
    }
    let try_plan = |micro_batch: usize, activations: Activations| -> Result<Planned, PlanError> {
        let plan = table(chain, step, device, micro_batch, activations, wanted.layer_first);
        let program = compile(&plan, chain, Purpose::Train)?.remove(0);
        let memory = forecast(&program, &plan, chain);
        Ok(Planned { plan, program, memory })
    };
    let sizes = match wanted.micro_batch {
        Some(size) => vec![size],
        None => candidate_sizes(global_batch, sequence, device.rows_enough),
    };
    let kinds = match wanted.activations {
        Some(kind) => vec![kind],
        None => vec![Activations::Keep, Activations::Recompute],
    };
    let mut least: Option<Planned> = None;
    for kind in &kinds {
        for size in &sizes {
            let planned = try_plan(*size, *kind)?;
            if planned.memory.total() <= device.budget_bytes {
                return Ok(planned);
            }
            if least.as_ref().is_none_or(|other| planned.memory.total() < other.memory.total()) {
                least = Some(planned);
            }
        }
    }
    let needed_bytes = least.map_or(0, |planned| planned.memory.total());
    Err(PlanError::TooSmall {
        device: device.name.clone(),
        needed_bytes,
        budget_bytes: device.budget_bytes,
        short_bytes: needed_bytes.saturating_sub(device.budget_bytes),
        how: match kinds.last() {
            Some(Activations::Recompute) => "recomputing",
            _ => "keeping activations",
        },
    })
}

/// Micro-batch sizes worth trying, the best first: as large as helps, then smaller.
fn candidate_sizes(global_batch: usize, sequence: usize, rows_enough: usize) -> Vec<usize> {
    let most = (rows_enough / sequence.max(1)).clamp(1, global_batch);
    // Even pieces: a ragged last micro-batch is correct but wastes a little.
    let mut sizes: Vec<usize> =
        (1..=most).rev().map(|size| global_batch.div_ceil(global_batch.div_ceil(size))).collect();
    sizes.dedup();
    sizes
}

/// The table with one entry in every row.
pub fn table(
    chain: &Chain,
    step: StepShape,
    device: &DeviceOffer,
    micro_batch: usize,
    activations: Activations,
    layer_first: bool,
) -> Plan {
    let StepShape { global_batch, sequence, precision, optimizer_states, gradients } = step;
    let micro_batches: Vec<Samples> = (0..global_batch)
        .step_by(micro_batch)
        .map(|start| Samples { start, end: (start + micro_batch).min(global_batch) })
        .collect();
    // Groups that are cut make it go layer by layer.
    let layer_first =
        layer_first || (0..chain.layers.len()).any(|layer| splits_groups(chain, layer, &micro_batches));
    let layers = chain.layers.iter().map(|layer| {
        // The head's backward follows its forward at once: recomputing it would only cost.
        let recomputed = matches!(layer.kind, LayerKind::Block(_) | LayerKind::Convolution(_))
            && activations == Activations::Recompute;
        let activations = if recomputed { Activations::Recompute } else { Activations::Keep };
        let compute = Compute { device: 0, micro_batches: micro_batches.clone(), activations };
        LayerRow { layer: layer.name.clone(), compute: vec![compute] }
    });
    let tensors = chain.tensors.iter().map(|tensor| {
        let whole = vec![Held { holder: Holder::Device(0), slice: Samples::new(0..tensor.elements()) }];
        TensorRow {
            tensor: tensor.name.clone(),
            elements: tensor.elements(),
            compute_copies: vec![ComputeCopy { device: 0, residence: Residence::Resident }],
            gradient: whole.clone(),
            optimizer: whole,
        }
    });
    Plan {
        format: FORMAT,
        global_batch,
        sequence,
        precision,
        optimizer_states,
        gradients,
        devices: vec![DeviceRow {
            name: device.name.clone(),
            budget_bytes: device.budget_bytes,
            workspace_bytes: device.workspace_bytes,
            stash: None,
            leeway: 0,
            puts_off: 0,
        }],
        order: if layer_first { Order::LayerFirst } else { Order::MicroBatchFirst },
        layers: layers.collect(),
        tensors: tensors.collect(),
    }
}
