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
    #[error("{layer} norms the whole batch together: its statistics do not go between micro-batches yet")]
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

/// A batch norm's group is the whole batch, so a training step must see it at once.
fn refuse_split_groups(plan: &Plan, chain: &Chain) -> Result<(), CompileError> {
    let norms = |kind: &LayerKind| matches!(kind, LayerKind::Convolution(spec) if spec.norm.is_some());
    match chain.layers.iter().find(|layer| norms(&layer.kind)) {
        Some(layer) if micro_batches(plan).len() > 1 => {
            Err(CompileError::SplitGroup { layer: layer.name.clone() })
        }
        _ => Ok(()),
    }
}

fn micro_batches(plan: &Plan) -> &[Samples] {
    &plan.layers[0].compute[0].micro_batches
}

fn forward_op(plan: &Plan, chain: &Chain, layer: usize, samples: Samples) -> Op {
    let recompute = plan.layers[layer].compute[0].activations == Activations::Recompute
        // A first layer keeps its tokens or images either way; convolutions are not recomputed yet.
        && !matches!(
            chain.layers[layer].kind,
            LayerKind::Embedding(_) | LayerKind::Patches(_) | LayerKind::Convolution(_)
        );
    Op::Forward { layer, samples, keep: if recompute { Keep::Input } else { Keep::All } }
}

fn backward_ops(plan: &Plan, chain: &Chain, layer: usize, samples: Samples) -> impl Iterator<Item = Op> {
    let recompute = matches!(forward_op(plan, chain, layer, samples), Op::Forward { keep: Keep::Input, .. });
    recompute.then_some(Op::Recompute { layer, samples }).into_iter().chain([Op::Backward { layer, samples }])
}

fn training(plan: &Plan, chain: &Chain) -> Vec<Op> {
    let batches = micro_batches(plan);
    let layers = 0..chain.layers.len();
    let mut ops: Vec<Op> = batches.iter().map(|samples| Op::Load { samples: *samples }).collect();
    ops.push(Op::CountTargets);
    match plan.order {
        Order::MicroBatchFirst => {
            for samples in batches {
                ops.extend(layers.clone().map(|layer| forward_op(plan, chain, layer, *samples)));
                ops.extend(layers.clone().rev().flat_map(|layer| backward_ops(plan, chain, layer, *samples)));
            }
        }
        Order::LayerFirst => {
            for layer in layers.clone() {
                ops.extend(batches.iter().map(|samples| forward_op(plan, chain, layer, *samples)));
            }
            for layer in layers.rev() {
                ops.extend(batches.iter().flat_map(|samples| backward_ops(plan, chain, layer, *samples)));
            }
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
