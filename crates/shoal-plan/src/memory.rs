//! A program's memory over its course, to the byte: what the state takes, and how high the instructions
//! pile their values on top of it. A plan is accepted or refused by this number, and the engine's counted
//! bytes never pass it.

use shoal_model::footprint::{Footprint, allocation_bytes, compute_bytes, prediction_peak};
use shoal_model::{Chain, LayerKind, Precision};

use crate::program::{Keep, Op, Program, Purpose};
use crate::table::{Plan, Samples};

/// Scalars the engine keeps on the device: the loss, a loss to discard, the norm, rightly predicted classes.
pub const ENGINE_SCALARS: u64 = 4;

/// Where a device's bytes go at the highest point of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryForecast {
    /// What the device takes for itself.
    pub workspace: u64,
    pub parameters: u64,
    /// What layers compute with, where that is not the parameters themselves.
    pub copies: u64,
    pub gradients: u64,
    pub optimizer: u64,
    /// Tables and scalars.
    pub constants: u64,
    /// The highest sum of values alive at once.
    pub values: u64,
    /// The instruction (its place in the list) at which that is.
    pub highest_at: usize,
}

impl MemoryForecast {
    pub fn total(&self) -> u64 {
        let state = self.parameters + self.copies + self.gradients + self.optimizer;
        self.workspace + state + self.constants + self.values
    }
}

/// Follows the program's values to their highest point.
pub fn forecast(program: &Program, plan: &Plan, chain: &Chain) -> MemoryForecast {
    let state: u64 = chain.tensors.iter().map(|tensor| allocation_bytes(tensor.elements())).sum();
    let copies = (0..chain.tensors.len())
        .filter_map(|tensor| chain.copy_elements(tensor, plan.precision))
        .map(|elements| compute_bytes(elements, plan.precision))
        .sum();
    let gradients = (0..chain.tensors.len())
        .map(|tensor| allocation_bytes(chain.gradient_elements(tensor, plan.precision)))
        .sum();
    let training = program.purpose == Purpose::Train;
    let rotary = match chain.rotary_frequencies.len() {
        0 => 0,
        pairs => allocation_bytes(plan.sequence * 2 * pairs),
    };
    let (values, highest_at) = values_peak(program, plan, chain);
    MemoryForecast {
        workspace: plan.devices[program.device].workspace_bytes,
        parameters: state,
        copies,
        gradients: if training { gradients } else { 0 },
        optimizer: if training { plan.optimizer_states as u64 * state } else { 0 },
        constants: rotary + ENGINE_SCALARS * allocation_bytes(2),
        values,
        highest_at,
    }
}

fn values_peak(program: &Program, plan: &Plan, chain: &Chain) -> (u64, usize) {
    let (mut live, mut peak, mut highest_at) = (0u64, 0u64, 0usize);
    for (place, instruction) in program.instructions.iter().enumerate() {
        let Change { peak: rise, gain, loss } = change(&instruction.op, plan.sequence, plan.precision, chain);
        if live + rise > peak {
            (peak, highest_at) = (live + rise, place);
        }
        live = live + gain - loss;
    }
    (peak, highest_at)
}

/// What one instruction does to the bytes alive.
struct Change {
    /// The most it adds while it runs.
    peak: u64,
    /// What it leaves behind, and what it releases.
    gain: u64,
    loss: u64,
}

fn change(op: &Op, sequence: usize, precision: Precision, chain: &Chain) -> Change {
    let footprint = |layer: usize, samples: Samples| {
        chain.layers[layer].kind.footprint(samples.count(), sequence, precision)
    };
    // Outputs beyond the first.
    let copies = |layer: usize| (chain.readers(layer).count() as u64).saturating_sub(1);
    let none = Change { peak: 0, gain: 0, loss: 0 };
    match *op {
        Op::Load { samples } => {
            let bytes = |per_sample: usize| allocation_bytes(samples.count() * per_sample);
            let loaded = bytes(chain.input_elements(sequence)) + bytes(chain.targets(sequence));
            Change { peak: loaded, gain: loaded, loss: 0 }
        }
        Op::Forward { layer, samples, keep } => {
            let Footprint { output, input, saved, forward_peak, forward_lean_peak, .. } =
                footprint(layer, samples);
            let change = |peak: u64, gain: u64, loss: u64| {
                // Copies of the output for further branches are made when all else is done.
                let gain = gain + copies(layer) * output;
                Change { peak: peak.max(gain.saturating_sub(loss)), gain, loss }
            };
            match keep {
                Keep::All => change(forward_peak, output + saved, input),
                Keep::Input => change(forward_lean_peak, output, 0),
                Keep::Nothing => change(forward_lean_peak, output, input),
            }
        }
        Op::Recompute { layer, samples } => {
            let Footprint { input, saved, recompute_peak, .. } = footprint(layer, samples);
            Change { peak: recompute_peak, gain: saved, loss: input }
        }
        Op::Backward { layer, samples } => {
            let Footprint { output, saved, backward_peak, .. } = footprint(layer, samples);
            let inputs = chain.layers[layer].inputs.iter();
            let input_gradients = inputs.map(|from| footprint(*from, samples).output).sum();
            // The branches' gradients are one before the layer begins.
            let merged = copies(layer) * output;
            let peak = backward_peak.saturating_sub(merged);
            Change { peak, gain: input_gradients, loss: saved + output + merged }
        }
        Op::Predict { layer, samples } => {
            let Footprint { input, .. } = footprint(layer, samples);
            let peak = match &chain.layers[layer].kind {
                LayerKind::Head(spec) => prediction_peak(spec, samples.count(), sequence, precision),
                _ => 0,
            };
            Change { peak, gain: 0, loss: input }
        }
        Op::CountTargets | Op::SumLoss | Op::GradientNorm | Op::Update { .. } => none,
    }
}
