//! The bytes that each instruction takes and releases, by the layers' footprints and by what is shared, cut and put
//! together on the way.

use foldhash::{HashMap, HashSet};
use shoal_model::footprint::{Footprint, Phase, Phases, allocation_bytes, prediction_peak};
use shoal_model::{Chain, LayerKind, Precision};

use super::copy_bytes;
use crate::layout::Layout;
use crate::program::{Keep, Moved, Op, Pass};
use crate::table::{Residence, Samples};

/// The bytes that a device's instructions take and release, told one after the other.
#[derive(Debug)]
pub struct Meter<'a> {
    layout: &'a Layout<'a>,
    device: usize,
    chain: &'a Chain,
    sequence: usize,
    precision: Precision,
    /// How many of the layers that take an output still have it: the last to let go releases its bytes.
    readers: HashMap<(usize, Samples), usize>,
    /// How many of the layers that are told samples' lengths still have them, likewise.
    length_readers: HashMap<Samples, usize>,
    /// Pieces of a layer's output that one reader has for itself: received, cut from a larger one, put together from
    /// smaller ones, or back from the host.
    own: HashSet<(usize, usize, Samples)>,
    /// Tensors whose gradients are being added up here, to be reduced to other places.
    partial: HashSet<usize>,
    /// Layers' groups that have statistics, and those that have sums in the backward.
    groups: HashSet<(usize, usize, bool)>,
}

impl<'a> Meter<'a> {
    pub fn new(layout: &'a Layout, device: usize) -> Meter<'a> {
        Meter {
            layout,
            device,
            chain: layout.chain,
            sequence: layout.plan.sequence,
            precision: layout.plan.precision,
            readers: HashMap::default(),
            length_readers: HashMap::default(),
            own: HashSet::default(),
            partial: HashSet::default(),
            groups: HashSet::default(),
        }
    }

    fn footprint(&self, layer: usize, samples: Samples) -> Footprint {
        self.chain.layers[layer].kind.footprint(samples.count(), self.sequence, self.precision)
    }

    /// What a backward adds at its highest, and what it leaves of gradients that it puts off.
    fn backward_bytes(&self, layer: usize, samples: Samples) -> (u64, u64) {
        let Footprint { backward_peak, putting_off_peak, put_off, .. } = self.footprint(layer, samples);
        match self.layout.puts_off(self.device, layer) {
            true => (putting_off_peak, put_off),
            false => (backward_peak, 0),
        }
    }

    fn output(&self, layer: usize, samples: Samples) -> u64 {
        self.chain.layers[layer].kind.output_bytes(samples.count(), self.sequence, self.precision)
    }

    /// Bytes of a new output: one for all readers that take it whole, and one for each that takes a piece. Those of the
    /// pieces are also given apart: they are made while there is a whole.
    fn hand_on(&mut self, layer: usize, samples: Samples) -> (u64, u64) {
        let layout = self.layout;
        let (mut whole, mut bytes) = (0, 0);
        let only = layout.readers(layer).len() == 1;
        for reader in layout.readers(layer) {
            for (piece, to) in layout.pieces(*reader, samples) {
                // What is sent while others read it is a copy: either may be done first.
                if piece == samples && (to == self.device || only) {
                    whole += 1;
                } else {
                    self.own.insert((layer, *reader, piece));
                    bytes += self.output(layer, piece);
                }
            }
        }
        if whole > 0 {
            self.readers.insert((layer, samples), whole);
            return (bytes + self.output(layer, samples), bytes);
        }
        (bytes, bytes)
    }

    /// Bytes of pieces that are made beside a whole output.
    fn cut(&self, to: usize, samples: Samples, layer: usize) -> u64 {
        let pieces = self.layout.pieces(to, samples).filter(|(piece, _)| *piece != samples);
        pieces.map(|(piece, _)| self.output(layer, piece)).sum()
    }

    /// Bytes released when a reader lets go of some outputs.
    fn let_go(&mut self, reader: usize, from: &[usize], samples: Samples) -> u64 {
        from.iter().map(|layer| self.let_go_of(*layer, reader, samples)).sum()
    }

    fn let_go_of(&mut self, layer: usize, reader: usize, samples: Samples) -> u64 {
        if self.own.remove(&(layer, reader, samples)) {
            return self.output(layer, samples);
        }
        let left = self.readers.get_mut(&(layer, samples)).expect("it was made before it was taken");
        *left -= 1;
        if *left > 0 {
            return 0;
        }
        self.readers.remove(&(layer, samples));
        self.output(layer, samples)
    }

    /// What a layer takes in several pieces is put together first.
    fn put_together(&mut self, layer: usize, from: &[usize], samples: Samples) -> Phase {
        let mut phase = Phase::default();
        for from in from {
            let pieces: Vec<Samples> = self.layout.pieces(*from, samples).map(|(piece, _)| piece).collect();
            if pieces.len() > 1 {
                phase.gain += self.output(*from, samples);
                phase.loss += pieces.iter().map(|piece| self.let_go_of(*from, layer, *piece)).sum::<u64>();
                self.own.insert((*from, layer, samples));
            }
        }
        phase.peak = phase.gain;
        phase
    }

    /// And so are the gradients of its output.
    fn put_gradients_together(&self, layer: usize, samples: Samples) -> Phase {
        let mut phase = Phase::default();
        for reader in self.layout.readers(layer) {
            let pieces: Vec<Samples> = self.layout.pieces(*reader, samples).map(|(piece, _)| piece).collect();
            if pieces.len() > 1 {
                phase.gain += self.output(layer, samples);
                phase.loss += pieces.iter().map(|piece| self.output(layer, *piece)).sum::<u64>();
            }
        }
        phase.peak = phase.gain;
        phase
    }

    /// The gradients of a layer's inputs, in the pieces in which they are handed on.
    fn gradients_handed(&self, layer: usize, samples: Samples) -> (u64, u64) {
        let (mut bytes, mut cut) = (0, 0);
        for from in &self.chain.layers[layer].inputs {
            match self.cut(*from, samples, *from) {
                0 => bytes += self.output(*from, samples),
                pieces => {
                    bytes += pieces;
                    cut += pieces;
                }
            }
        }
        (bytes, cut)
    }

    /// Bytes of gradients that a layer's first backward makes room for, where they are added up elsewhere.
    fn partial_gradients(&mut self, layer: usize) -> u64 {
        let layout = self.layout;
        let mut bytes = 0;
        for tensor in layout.tensors(layer) {
            if !layout.sums_whole(*tensor, self.device) && self.partial.insert(*tensor) {
                bytes += allocation_bytes(layout.gradient_elements(*tensor));
            }
        }
        bytes
    }

    fn reduced(&mut self, layer: usize) -> Phase {
        let layout = self.layout;
        let is_alone = layout.reduce(layer).is_none_or(|group| group.devices.len() == 1);
        let mut phase = Phase::default();
        for tensor in layout.owned(layer) {
            if self.partial.remove(tensor) {
                phase.loss += allocation_bytes(layout.gradient_elements(*tensor));
                // A scalar for the squares of what nobody else has a part in.
                phase.peak += if is_alone { allocation_bytes(2) } else { 0 };
            }
        }
        phase
    }

    /// Bytes of a layer's gathered parameters.
    fn gathered(&self, layer: usize, pass: Pass) -> u64 {
        let layout = self.layout;
        if pass == Pass::Update
            || !layout.gather(layer, pass).is_some_and(|group| group.receives(self.device))
        {
            return 0;
        }
        let fetched = layout.tensors(layer).iter().filter(|tensor| {
            layout.residence(**tensor, self.device) == Some(Residence::Fetched)
                && !layout.holds_whole(**tensor, self.device)
        });
        fetched.map(|tensor| copy_bytes(layout, self.device, *tensor)).sum()
    }

    /// Bytes of new samples' lengths, which all layers that are told share.
    fn load_lengths(&mut self, samples: Samples) -> u64 {
        match self.layout.told_lengths(self.device, samples).count() {
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
        let readers = self.layout.readers(layer).len() as u64;
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

    /// What the next instruction takes and releases.
    pub fn phase(&mut self, op: &Op) -> Phase {
        let before = match *op {
            Op::Begin { layer, samples } => self.put_together(layer, self.first_inputs(layer, 1), samples),
            Op::Forward { layer, samples, keep } => {
                let begun = keep != Keep::Nothing && self.chain.batch_norm(layer).is_some();
                self.put_together(layer, self.later_inputs(layer, usize::from(begun)), samples)
            }
            Op::Predict { layer, samples } => self.put_together(layer, self.later_inputs(layer, 0), samples),
            Op::BeginBackward { layer, samples } => self.put_gradients_together(layer, samples),
            Op::Backward { layer, samples } if self.chain.batch_norm(layer).is_none() => {
                self.put_gradients_together(layer, samples)
            }
            _ => Phase::default(),
        };
        let Phase { peak, gain, loss } = self.whole_phase(op);
        Phase { peak: before.gain + peak, gain: before.gain + gain, loss: before.loss + loss }
    }

    fn first_inputs(&self, layer: usize, count: usize) -> &'a [usize] {
        let inputs = &self.layout.chain.layers[layer].inputs;
        &inputs[..count.min(inputs.len())]
    }

    fn later_inputs(&self, layer: usize, first: usize) -> &'a [usize] {
        let inputs = &self.layout.chain.layers[layer].inputs;
        &inputs[first.min(inputs.len())..]
    }

    /// Where inputs and gradients are in one piece.
    fn whole_phase(&mut self, op: &Op) -> Phase {
        if let Op::Begin { layer, samples }
        | Op::Forward { layer, samples, .. }
        | Op::Recompute { layer, samples }
        | Op::BeginBackward { layer, samples }
        | Op::Backward { layer, samples } = *op
            && let Some(bytes) = self.chain.layers[layer].kind.phases(samples.count(), self.precision)
        {
            return self.phase_between_images(op, layer, samples, &bytes);
        }
        match *op {
            Op::Load { samples } => {
                let bytes = |per_sample: usize| allocation_bytes(samples.count() * per_sample);
                let last = self.chain.layers.len() - 1;
                let mut loaded = self.load_lengths(samples);
                if self.layout.share(self.device, 0, samples).is_some() {
                    loaded += bytes(self.chain.input_elements(self.sequence));
                }
                if self.layout.share(self.device, last, samples).is_some() {
                    loaded += bytes(self.chain.targets(self.sequence));
                }
                Phase { peak: loaded, gain: loaded, loss: 0 }
            }
            Op::Forward { layer, samples, keep } => {
                let Footprint { input, saved, forward_peak, forward_lean_peak, .. } =
                    self.footprint(layer, samples);
                let (output, cut) = self.hand_on(layer, samples);
                match keep {
                    Keep::All => Phase { peak: forward_peak + cut, gain: output + saved - input, loss: 0 },
                    Keep::Input => Phase { peak: forward_lean_peak + cut, gain: output, loss: 0 },
                    Keep::Nothing => {
                        let lengths = self.let_go_of_lengths(layer, samples);
                        let loss = self.release_inputs(layer, samples, input) + lengths;
                        Phase { peak: forward_lean_peak + cut, gain: output, loss }
                    }
                }
            }
            Op::Recompute { layer, samples } => {
                let Footprint { input, saved, recompute_peak, .. } = self.footprint(layer, samples);
                Phase { peak: recompute_peak, gain: saved - input, loss: 0 }
            }
            Op::Backward { layer, samples } => {
                let Footprint { output, saved, .. } = self.footprint(layer, samples);
                let (backward_peak, put_off) = self.backward_bytes(layer, samples);
                let merged = self.merged(layer, samples);
                let (gradients, cut) = self.gradients_handed(layer, samples);
                let partial = self.partial_gradients(layer);
                let lengths = self.let_go_of_lengths(layer, samples);
                let loss = self.release_inputs(layer, samples, saved) + output + merged + lengths;
                let peak = partial + cut + backward_peak.saturating_sub(merged);
                Phase { peak, gain: partial + gradients + put_off, loss }
            }
            Op::WeightGradients { layer, samples } => {
                let (_, loss) = self.backward_bytes(layer, samples);
                Phase { peak: 0, gain: 0, loss }
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
            Op::Gather { layer, pass } => {
                let gain = self.gathered(layer, pass);
                Phase { peak: gain, gain, loss: 0 }
            }
            Op::Release { layer, pass } => Phase { peak: 0, gain: 0, loss: self.gathered(layer, pass) },
            Op::Send { moved: Moved::Activation, layer, reader, samples, .. } => {
                Phase { peak: 0, gain: 0, loss: self.let_go_of(layer, reader, samples) }
            }
            Op::Receive { moved: Moved::Activation, layer, reader, samples, .. } => {
                self.own.insert((layer, reader, samples));
                let gain = self.output(layer, samples);
                Phase { peak: gain, gain, loss: 0 }
            }
            Op::Send { moved: Moved::Gradient, layer, samples, .. } => {
                Phase { peak: 0, gain: 0, loss: self.output(layer, samples) }
            }
            Op::Receive { moved: Moved::Gradient, layer, samples, .. } => {
                let gain = self.output(layer, samples);
                Phase { peak: gain, gain, loss: 0 }
            }
            Op::Offload { layer, samples } => {
                let loss = self.let_go(layer, self.first_inputs(layer, 1), samples);
                // Others that have it too may let go of it while it is still on its way.
                Phase { peak: self.kept_input(layer, samples) - loss, gain: 0, loss }
            }
            Op::Restore { layer, samples } => {
                let gain = self.kept_input(layer, samples);
                let inputs = self.first_inputs(layer, 1);
                self.own.extend(inputs.iter().map(|from| (*from, layer, samples)));
                Phase { peak: gain, gain, loss: 0 }
            }
            Op::Reduce { layer } => self.reduced(layer),
            // What is handed over has its room all the time.
            Op::CountTargets
            | Op::Exchange { .. }
            | Op::HandOver { .. }
            | Op::SumLoss
            | Op::GradientNorm
            | Op::Update { .. } => Phase::default(),
        }
    }

    /// What an instruction takes and releases of the host's memory: inputs that wait there.
    pub(super) fn host_phase(&self, op: &Op) -> Phase {
        match *op {
            Op::Offload { layer, samples } => {
                let gain = self.kept_input(layer, samples);
                Phase { peak: gain, gain, loss: 0 }
            }
            Op::Restore { layer, samples } => {
                Phase { peak: 0, gain: 0, loss: self.kept_input(layer, samples) }
            }
            _ => Phase::default(),
        }
    }

    /// Of so many bytes that a layer releases, those of its inputs count only if no other layer has them.
    fn release_inputs(&mut self, layer: usize, samples: Samples, bytes: u64) -> u64 {
        let taken = self.taken(layer, samples);
        let chain = self.chain;
        bytes - taken + self.let_go(layer, &chain.layers[layer].inputs, samples)
    }

    /// Bytes of the input that a layer is made again from: the first of those it takes.
    fn kept_input(&self, layer: usize, samples: Samples) -> u64 {
        self.first_inputs(layer, 1).iter().map(|from| self.output(*from, samples)).sum()
    }

    /// An instruction of a layer whose phases are known.
    fn phase_between_images(&mut self, op: &Op, layer: usize, samples: Samples, bytes: &Phases) -> Phase {
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
                let (output, cut) = self.hand_on(layer, samples);
                let mut loss = loss + self.let_go(layer, others, samples);
                if keep == Keep::Nothing {
                    loss += self.let_go(layer, x, samples);
                }
                Phase { peak: peak + cut, gain: gain + output, loss }
            }
            Op::Recompute { .. } => bytes.recompute,
            Op::BeginBackward { .. } => {
                let (new, _) = self.new_groups(layer, samples, true);
                let (groups, merged) = (new * bytes.group, self.merged(layer, samples));
                let Phase { peak, gain, loss } = bytes.begin_backward;
                let end = (gain + groups).saturating_sub(loss);
                let partial = self.partial_gradients(layer);
                let peak = partial + peak.max(end).saturating_sub(merged);
                Phase { peak, gain: partial + gain + groups, loss: loss + merged }
            }
            Op::Backward { .. } => {
                let merged = if normed { 0 } else { self.merged(layer, samples) };
                let Phase { peak, loss, .. } = bytes.backward;
                let (gradients, cut) = self.gradients_handed(layer, samples);
                let partial = self.partial_gradients(layer);
                let loss = loss + merged + self.let_go(layer, x, samples);
                let peak = partial + cut + peak.saturating_sub(merged);
                Phase { peak, gain: partial + gradients, loss }
            }
            _ => unreachable!("no instruction of a layer"),
        }
    }
}
