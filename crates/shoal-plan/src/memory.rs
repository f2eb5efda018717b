//! A program's memory over its course, to the byte: what the state takes, and how high the instructions
//! pile their values on top of it. A plan is accepted or refused by this number, and the engine's counted
//! bytes never pass it.

use std::collections::{HashMap, HashSet};

use shoal_model::footprint::{Footprint, Phase, Phases, allocation_bytes, compute_bytes, prediction_peak};
use shoal_model::{Chain, LayerKind, Precision};

use crate::program::{Keep, Op, Program, Purpose};
use crate::table::{Plan, Samples};

/// Scalars the engine keeps on the device: the loss, a loss to discard, the norm, rightly predicted classes, the
/// step's number.
pub const ENGINE_SCALARS: u64 = 5;

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
    let mut walk = Walk {
        chain,
        sequence: plan.sequence,
        precision: plan.precision,
        readers: HashMap::new(),
        length_readers: HashMap::new(),
        groups: HashSet::new(),
    };
    for (place, instruction) in program.instructions.iter().enumerate() {
        let Phase { peak: rise, gain, loss } = walk.change(&instruction.op);
        if live + rise > peak {
            (peak, highest_at) = (live + rise, place);
        }
        live = live + gain - loss;
    }
    (peak, highest_at)
}

/// What is alive that several instructions share.
struct Walk<'a> {
    chain: &'a Chain,
    sequence: usize,
    precision: Precision,
    /// How many of the layers that take an output still have it: the last to let go releases its bytes.
    readers: HashMap<(usize, Samples), usize>,
    /// How many of the layers that are told samples' lengths still have them, likewise.
    length_readers: HashMap<Samples, usize>,
    /// Layers' groups that have statistics, and those that have sums in the backward.
    groups: HashSet<(usize, usize, bool)>,
}

impl Walk<'_> {
    fn footprint(&self, layer: usize, samples: Samples) -> Footprint {
        self.chain.layers[layer].kind.footprint(samples.count(), self.sequence, self.precision)
    }

    fn output(&self, layer: usize, samples: Samples) -> u64 {
        self.chain.layers[layer].kind.output_bytes(samples.count(), self.sequence, self.precision)
    }

    /// Bytes of a new output, which all its readers share.
    fn hand_on(&mut self, layer: usize, samples: Samples) -> u64 {
        match self.chain.readers(layer).count() {
            0 => 0,
            readers => {
                self.readers.insert((layer, samples), readers);
                self.output(layer, samples)
            }
        }
    }

    /// Bytes released when one of the readers lets go of some outputs.
    fn let_go(&mut self, from: &[usize], samples: Samples) -> u64 {
        let mut released = 0;
        for layer in from {
            let left = self.readers.get_mut(&(*layer, samples)).expect("it was made before it was taken");
            *left -= 1;
            if *left == 0 {
                self.readers.remove(&(*layer, samples));
                released += self.output(*layer, samples);
            }
        }
        released
    }

    /// Bytes of new samples' lengths, which all layers that are told share.
    fn load_lengths(&mut self, samples: Samples) -> u64 {
        match self.chain.length_readers().count() {
            0 => 0,
            readers => {
                self.length_readers.insert(samples, readers);
                allocation_bytes(samples.count())
            }
        }
    }

    /// Bytes released when a layer is done with samples' lengths, if it is told them.
    fn let_go_of_lengths(&mut self, layer: usize, samples: Samples) -> u64 {
        if !self.chain.takes_lengths(layer) {
            return 0;
        }
        let left = self.length_readers.get_mut(&samples).expect("lengths are loaded before they are read");
        *left -= 1;
        if *left > 0 { 0 } else { allocation_bytes(samples.count()) }
    }

    /// Bytes of the outputs that a layer takes, whoever else does.
    fn taken(&self, layer: usize, samples: Samples) -> u64 {
        self.chain.layers[layer].inputs.iter().map(|from| self.output(*from, samples)).sum()
    }

    /// Bytes of the gradients beyond the first that a layer's output gets: they are one before its backward
    /// begins.
    fn merged(&self, layer: usize, samples: Samples) -> u64 {
        let readers = self.chain.readers(layer).count() as u64;
        readers.saturating_sub(1) * self.output(layer, samples)
    }

    /// The layer's groups among these samples that are seen for the first time, and whether there are others.
    fn new_groups(&mut self, layer: usize, samples: Samples, backward: bool) -> (u64, bool) {
        let Some(norm) = self.chain.batch_norm(layer) else { return (0, false) };
        let (mut new, mut others) = (0, false);
        for (group, _) in norm.groups(samples.range()) {
            match self.groups.insert((layer, group, backward)) {
                true => new += 1,
                false => others = true,
            }
        }
        (new, others)
    }

    fn change(&mut self, op: &Op) -> Phase {
        if let Op::Begin { layer, samples }
        | Op::Forward { layer, samples, .. }
        | Op::Recompute { layer, samples }
        | Op::BeginBackward { layer, samples }
        | Op::Backward { layer, samples } = *op
            && let Some(bytes) = self.chain.layers[layer].kind.phases(samples.count(), self.precision)
        {
            return self.phase(op, layer, samples, &bytes);
        }
        match *op {
            Op::Load { samples } => {
                let bytes = |per_sample: usize| allocation_bytes(samples.count() * per_sample);
                let inputs = self.chain.input_elements(self.sequence);
                let lengths = self.load_lengths(samples);
                let loaded = bytes(inputs) + bytes(self.chain.targets(self.sequence)) + lengths;
                Phase { peak: loaded, gain: loaded, loss: 0 }
            }
            Op::Forward { layer, samples, keep } => {
                let Footprint { input, saved, forward_peak, forward_lean_peak, .. } =
                    self.footprint(layer, samples);
                let output = self.hand_on(layer, samples);
                match keep {
                    Keep::All => Phase { peak: forward_peak, gain: output + saved - input, loss: 0 },
                    Keep::Input => Phase { peak: forward_lean_peak, gain: output, loss: 0 },
                    Keep::Nothing => {
                        let lengths = self.let_go_of_lengths(layer, samples);
                        let loss = self.release_inputs(layer, samples, input) + lengths;
                        Phase { peak: forward_lean_peak, gain: output, loss }
                    }
                }
            }
            Op::Recompute { layer, samples } => {
                let Footprint { input, saved, recompute_peak, .. } = self.footprint(layer, samples);
                Phase { peak: recompute_peak, gain: saved - input, loss: 0 }
            }
            Op::Backward { layer, samples } => {
                let Footprint { output, saved, backward_peak, .. } = self.footprint(layer, samples);
                let merged = self.merged(layer, samples);
                let gain = self.taken(layer, samples);
                let lengths = self.let_go_of_lengths(layer, samples);
                let loss = self.release_inputs(layer, samples, saved) + output + merged + lengths;
                Phase { peak: backward_peak.saturating_sub(merged), gain, loss }
            }
            Op::Predict { layer, samples } => {
                let Footprint { input, .. } = self.footprint(layer, samples);
                let peak = match &self.chain.layers[layer].kind {
                    LayerKind::Head(spec) => {
                        prediction_peak(spec, samples.count(), self.sequence, self.precision)
                    }
                    _ => 0,
                };
                Phase { peak, gain: 0, loss: self.release_inputs(layer, samples, input) }
            }
            Op::Begin { .. } | Op::BeginBackward { .. } => unreachable!("only batch norms have beginnings"),
            Op::CountTargets | Op::SumLoss | Op::GradientNorm | Op::Update { .. } => Phase::default(),
        }
    }

    /// Of so many bytes that a layer releases, those of its inputs count only if no other layer has them.
    fn release_inputs(&mut self, layer: usize, samples: Samples, bytes: u64) -> u64 {
        let taken = self.taken(layer, samples);
        let chain = self.chain;
        bytes - taken + self.let_go(&chain.layers[layer].inputs, samples)
    }

    /// An instruction of a layer whose phases are known.
    fn phase(&mut self, op: &Op, layer: usize, samples: Samples, bytes: &Phases) -> Phase {
        let chain = self.chain;
        let inputs = &chain.layers[layer].inputs;
        let (x, others) = inputs.split_at(inputs.len().min(bytes.kept_inputs));
        let normed = chain.batch_norm(layer).is_some();
        match *op {
            Op::Begin { .. } => {
                let (new, merges) = self.new_groups(layer, samples, false);
                let groups = new * bytes.group;
                // Statistics are made when the scratch is given back; those of a group that has some already
                // stand beside them until they are merged.
                let most = groups + if merges { bytes.group } else { 0 };
                let Phase { peak, gain, loss } = bytes.begin;
                Phase { peak: peak.max((gain + most).saturating_sub(loss)), gain: gain + groups, loss }
            }
            Op::Forward { keep, .. } => {
                let Phase { peak, gain, loss } = match keep {
                    Keep::All => bytes.forward,
                    Keep::Input => bytes.forward_lean,
                    Keep::Nothing => bytes.evaluate,
                };
                let output = self.hand_on(layer, samples);
                let mut loss = loss + self.let_go(others, samples);
                if keep == Keep::Nothing {
                    loss += self.let_go(x, samples);
                }
                Phase { peak, gain: gain + output, loss }
            }
            Op::Recompute { .. } => bytes.recompute,
            Op::BeginBackward { .. } => {
                let (new, _) = self.new_groups(layer, samples, true);
                let (groups, merged) = (new * bytes.group, self.merged(layer, samples));
                let Phase { peak, gain, loss } = bytes.begin_backward;
                let end = (gain + groups).saturating_sub(loss);
                let peak = peak.max(end).saturating_sub(merged);
                Phase { peak, gain: gain + groups, loss: loss + merged }
            }
            Op::Backward { .. } => {
                let merged = if normed { 0 } else { self.merged(layer, samples) };
                let Phase { peak, loss, .. } = bytes.backward;
                let gain = self.taken(layer, samples);
                let loss = loss + merged + self.let_go(x, samples);
                Phase { peak: peak.saturating_sub(merged), gain, loss }
            }
            _ => unreachable!("no instruction of a layer"),
        }
    }
}
