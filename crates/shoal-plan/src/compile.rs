//! From table to program. The schedule decides the order of the list; dependencies are derived from the
//! instructions' effects alone, so there is one place that knows what must precede what.

use std::collections::{HashMap, HashSet};

use shoal_model::{Chain, LayerKind};
use thiserror::Error;

use crate::effects::{Fact, Sum, Value, effects};
use crate::program::{Instruction, Keep, Lane, Op, Program, Purpose};
use crate::table::{Activations, FORMAT, Holder, Order, Plan, Samples, TableError};

#[derive(Debug, Error, PartialEq)]
pub enum CompileError {
    #[error(transparent)]
    Table(#[from] TableError),
    #[error("{what}: movement between devices is not compiled yet")]
    Movement { what: String },
    #[error(
        "{layer} is cut into other micro-batches than the layer before it: cutting activations again is not compiled yet"
    )]
    Recut { layer: String },
    #[error(
        "{layer} norms samples together that are in different micro-batches, of which the first would be done before the last begins"
    )]
    SplitGroup { layer: String },
}

/// Compiles the program of the plan's device for one step (or one evaluation, or one prediction).
pub fn compile(plan: &Plan, chain: &Chain, purpose: Purpose) -> Result<Program, CompileError> {
    plan.check(chain)?;
    refuse_movement(plan)?;
    let ops = match purpose {
        Purpose::Train => {
            refuse_split_groups(plan, chain)?;
            training(plan, chain)
        }
        Purpose::Evaluate => evaluation(plan, chain),
        Purpose::Predict => prediction(plan, chain),
    };
    Ok(Program { format: FORMAT, purpose, device: 0, instructions: link(ops, chain) })
}

/// This compiler knows tables in which nothing moves; others are refused, never run wrongly.
fn refuse_movement(plan: &Plan) -> Result<(), CompileError> {
    for row in &plan.layers {
        let [compute] = row.compute.as_slice() else {
            return Err(CompileError::Movement {
                what: format!("{} is computed by several devices", row.layer),
            });
        };
        if compute.device != 0 {
            let what = format!("{} is computed by device {}", row.layer, compute.device);
            return Err(CompileError::Movement { what });
        }
        if compute.micro_batches != plan.layers[0].compute[0].micro_batches {
            return Err(CompileError::Recut { layer: row.layer.clone() });
        }
    }
    for row in &plan.tensors {
        let whole = |held: &[crate::table::Held]| held.len() == 1 && held[0].holder == Holder::Device(0);
        if !(whole(&row.gradient) && whole(&row.optimizer)) {
            return Err(CompileError::Movement { what: format!("{} is held in several places", row.tensor) });
        }
    }
    Ok(())
}

/// A group's micro-batches must all have begun a layer before one of them goes on: they go layer by layer.
fn refuse_split_groups(plan: &Plan, chain: &Chain) -> Result<(), CompileError> {
    if plan.order == Order::LayerFirst {
        return Ok(());
    }
    match (0..chain.layers.len()).find(|layer| splits_groups(chain, *layer, micro_batches(plan))) {
        Some(layer) => Err(CompileError::SplitGroup { layer: chain.layers[layer].name.clone() }),
        None => Ok(()),
    }
}

/// Whether some group that a layer's batch norm takes together is in several micro-batches.
pub(crate) fn splits_groups(chain: &Chain, layer: usize, batches: &[Samples]) -> bool {
    let groups = |samples: &Samples| chain.batch_norm(layer).map(|norm| norm.groups(samples.range()));
    let mut seen = HashSet::new();
    batches.iter().filter_map(groups).flatten().any(|(group, _)| !seen.insert(group))
}

fn micro_batches(plan: &Plan) -> &[Samples] {
    &plan.layers[0].compute[0].micro_batches
}

fn forward_op(plan: &Plan, chain: &Chain, layer: usize, samples: Samples) -> Op {
    let recompute = plan.layers[layer].compute[0].activations == Activations::Recompute
        && match &chain.layers[layer].kind {
            // A first layer keeps its tokens or images either way.
            LayerKind::Embedding(_) | LayerKind::Patches(_) => false,
            // Without a norm it keeps its input and bits.
            LayerKind::Convolution(spec) => spec.norm.is_some(),
            // Nothing of its inputs.
            LayerKind::Join(_) => false,
            LayerKind::Block(_) | LayerKind::Head(_) => true,
        };
    Op::Forward { layer, samples, keep: if recompute { Keep::Input } else { Keep::All } }
}

/// A layer's forward over some micro-batches: all of them begin where its groups may be in several.
fn forward_ops(plan: &Plan, chain: &Chain, layer: usize, batches: &[Samples]) -> Vec<Op> {
    let begins =
        chain.batch_norm(layer).map(|_| batches.iter().map(|samples| Op::Begin { layer, samples: *samples }));
    let forwards = batches.iter().map(|samples| forward_op(plan, chain, layer, *samples));
    begins.into_iter().flatten().chain(forwards).collect()
}

fn backward_ops(plan: &Plan, chain: &Chain, layer: usize, batches: &[Samples]) -> Vec<Op> {
    let recomputed = |samples: Samples| {
        matches!(forward_op(plan, chain, layer, samples), Op::Forward { keep: Keep::Input, .. })
            .then_some(Op::Recompute { layer, samples })
    };
    let backward = |samples: Samples| Op::Backward { layer, samples };
    let all = batches.iter().copied();
    match chain.batch_norm(layer) {
        Some(_) => all
            .clone()
            .flat_map(|samples| recomputed(samples).into_iter().chain([Op::BeginBackward { layer, samples }]))
            .chain(all.map(backward))
            .collect(),
        None => all.flat_map(|samples| recomputed(samples).into_iter().chain([backward(samples)])).collect(),
    }
}

fn training(plan: &Plan, chain: &Chain) -> Vec<Op> {
    let batches = micro_batches(plan);
    let layers = 0..chain.layers.len();
    let mut ops: Vec<Op> = batches.iter().map(|samples| Op::Load { samples: *samples }).collect();
    ops.push(Op::CountTargets);
    match plan.order {
        Order::MicroBatchFirst => {
            for batch in batches.chunks(1) {
                ops.extend(layers.clone().flat_map(|layer| forward_ops(plan, chain, layer, batch)));
                ops.extend(layers.clone().rev().flat_map(|layer| backward_ops(plan, chain, layer, batch)));
            }
        }
        Order::LayerFirst => {
            ops.extend(layers.clone().flat_map(|layer| forward_ops(plan, chain, layer, batches)));
            ops.extend(layers.rev().flat_map(|layer| backward_ops(plan, chain, layer, batches)));
        }
    }
    ops.extend([Op::SumLoss, Op::GradientNorm]);
    ops.extend((0..chain.tensors.len()).map(|tensor| Op::Update { tensor }));
    ops
}

fn evaluation(plan: &Plan, chain: &Chain) -> Vec<Op> {
    let batches = micro_batches(plan);
    let mut ops: Vec<Op> = batches.iter().map(|samples| Op::Load { samples: *samples }).collect();
    ops.push(Op::CountTargets);
    for samples in batches {
        let forward = |layer| Op::Forward { layer, samples: *samples, keep: Keep::Nothing };
        ops.extend((0..chain.layers.len()).map(forward));
    }
    ops.push(Op::SumLoss);
    ops
}

fn prediction(plan: &Plan, chain: &Chain) -> Vec<Op> {
    let last = chain.layers.len() - 1;
    let mut ops = Vec::new();
    for samples in micro_batches(plan).iter().copied() {
        ops.push(Op::Load { samples });
        ops.extend((0..last).map(|layer| Op::Forward { layer, samples, keep: Keep::Nothing }));
        ops.push(Op::Predict { layer: last, samples });
    }
    ops
}

fn lane(op: &Op) -> Lane {
    match op {
        Op::Load { .. } => Lane::CopyIn,
        _ => Lane::Compute,
    }
}

/// Numbers the instructions and derives what each must follow.
fn link(ops: Vec<Op>, chain: &Chain) -> Vec<Instruction> {
    let mut maker: HashMap<Value, u32> = HashMap::new();
    let mut fact_maker: HashMap<Fact, u32> = HashMap::new();
    let mut last_addition: HashMap<Sum, u32> = HashMap::new();
    let mut readers: HashMap<usize, Vec<u32>> = HashMap::new();
    let mut instructions = Vec::with_capacity(ops.len());
    for (id, op) in (0u32..).zip(ops) {
        let effects = effects(&op, chain);
        let mut after: HashSet<u32> = HashSet::new();
        after.extend(effects.uses_up.iter().filter_map(|value| maker.get(value)));
        after.extend(effects.needs.iter().filter_map(|fact| fact_maker.get(fact)));
        for sum in effects.needs_complete.iter().chain(&effects.adds_to) {
            after.extend(last_addition.get(sum));
        }
        if let Some(Fact::Updated { tensor }) = effects.establishes {
            after.extend(readers.remove(&tensor).unwrap_or_default());
        }
        maker.extend(effects.makes.iter().map(|value| (*value, id)));
        fact_maker.extend(effects.establishes.map(|fact| (fact, id)));
        last_addition.extend(effects.adds_to.iter().map(|sum| (*sum, id)));
        for tensor in effects.reads_tensors {
            readers.entry(tensor).or_default().push(id);
        }
        let mut after: Vec<u32> = after.into_iter().collect();
        after.sort_unstable();
        instructions.push(Instruction { id, op, lane: lane(&op), after });
    }
    instructions
}
