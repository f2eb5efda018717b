//! A program's memory over its course, to the byte: what the state takes, and how high the instructions
//! pile their values on top of it. A plan is accepted or refused by this number, and the engine's counted
//! bytes never pass it.
//!
//! Lanes work side by side, so an instruction that has started counts with all it takes until something shows that it
//! has finished: one that comes after it, or the next on its lane. An instruction that may start ahead counts from
//! there on. So the number holds for every course that a program's order allows.

use foldhash::{HashMap, HashSet};
use shoal_model::footprint::{Footprint, Phase, Phases, allocation_bytes, compute_bytes, prediction_peak};
use shoal_model::{Chain, LayerKind, Precision};

use crate::layout::Layout;
use crate::program::{Instruction, Keep, Lane, Moved, Op, Pass, Program, Purpose};
use crate::table::{Held, Holder, Plan, Residence, Samples, Tier};

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
    /// What the device's program keeps in its host's memory: state, and activations at their most.
    pub host: u64,
    /// And on its disks.
    pub disk: u64,
}

impl MemoryForecast {
    pub fn total(&self) -> u64 {
        let state = self.parameters + self.copies + self.gradients + self.optimizer;
        self.workspace + state + self.constants + self.values
    }
}

/// Follows the program's values to their highest point.
pub fn forecast(program: &Program, plan: &Plan, chain: &Chain) -> MemoryForecast {
    forecast_in(program, &Layout::new(plan, chain))
}

/// The same, where the layout is at hand.
pub fn forecast_in(program: &Program, layout: &Layout) -> MemoryForecast {
    let (plan, chain, device) = (layout.plan, layout.chain, program.device);
    let training = program.purpose == Purpose::Train;
    let rotary = match chain.rotary_frequencies.len() {
        0 => 0,
        pairs => allocation_bytes(plan.sequence * 2 * pairs),
    };
    let mut meter = Meter::new(layout, device);
    let phases: Vec<Phase> = program.instructions.iter().map(|i| meter.phase(&i.op)).collect();
    let (values, highest_at) = highest(&program.instructions, &phases);
    let mut forecast = MemoryForecast {
        workspace: plan.devices[device].workspace_bytes,
        parameters: 0,
        copies: 0,
        gradients: 0,
        optimizer: 0,
        constants: rotary + ENGINE_SCALARS * allocation_bytes(2),
        values,
        highest_at,
        host: meter.host_most,
        disk: 0,
    };
    for tensor in 0..chain.tensors.len() {
        forecast.add_state(layout, device, tensor, training);
    }
    forecast
}

impl MemoryForecast {
    /// What a device keeps of a tensor all the time.
    fn add_state(&mut self, layout: &Layout, device: usize, tensor: usize, training: bool) {
        let states = if training { layout.plan.optimizer_states as u64 } else { 0 };
        for held in layout.held(tensor, device) {
            let bytes = allocation_bytes(held.slice.count());
            match held.holder.tier() {
                Tier::Device => {
                    self.parameters += bytes;
                    self.optimizer += states * bytes;
                }
                // The numbers that layers compute with are made from it when they are asked for.
                Tier::Host => self.host += bytes * (1 + states),
                Tier::Disk => self.disk += bytes * (1 + states),
            }
        }
        if training {
            self.add_gradients(layout, device, tensor);
        }
        let stays = match layout.residence(tensor, device) {
            Some(Residence::Resident) => true,
            Some(Residence::Fetched) => layout.holds_whole(tensor, device),
            None => false,
        };
        if stays {
            self.copies += copy_bytes(layout, device, tensor);
        }
    }
}

impl MemoryForecast {
    /// Room for a tensor's sums, and where the optimizer needs them elsewhere for those that it is handed.
    fn add_gradients(&mut self, layout: &Layout, device: usize, tensor: usize) {
        let whole = layout.sums_whole(tensor, device);
        if whole {
            self.gradients += allocation_bytes(layout.gradient_elements(tensor));
        }
        let in_slices = |held: &&Held| !whole || held.holder != Holder::Device(device);
        let sums = layout.summed(tensor, device).iter().filter(in_slices);
        for held in sums.chain(layout.handed(tensor, device)) {
            let bytes = allocation_bytes(held.slice.count());
            match held.holder.tier() {
                Tier::Device => self.gradients += bytes,
                Tier::Host => self.host += bytes,
                Tier::Disk => self.disk += bytes,
            }
        }
    }
}

/// Bytes of what layers compute with, beside the parameters that the device holds itself.
fn copy_bytes(layout: &Layout, device: usize, tensor: usize) -> u64 {
    let precision = layout.plan.precision;
    match layout.copy_elements(tensor) {
        Some(elements) => compute_bytes(elements, precision),
        None if layout.holds_whole(tensor, device) => 0,
        None => allocation_bytes(layout.chain.tensors[tensor].elements()),
    }
}

/// Bytes of a device's memory that a program may still take once it has no layer left to compute: the rest is free for
/// another's.
pub fn after_computing(program: &Program, layout: &Layout) -> u64 {
    let forecast = forecast_in(program, layout);
    let mut meter = Meter::new(layout, program.device);
    let phases: Vec<Phase> = program.instructions.iter().map(|i| meter.phase(&i.op)).collect();
    let last = program.instructions.iter().rposition(|instruction| instruction.op.computes_layer());
    let mut most = 0;
    follow(&program.instructions, &phases, last, |live, _, is_computed| {
        if is_computed {
            most = most.max(live);
        }
    });
    forecast.total() - forecast.values + most.unsigned_abs()
}

/// The most bytes alive at a time, and the place of the instruction that brings them there.
fn highest(instructions: &[Instruction], phases: &[Phase]) -> (u64, usize) {
    let (mut most, mut highest_at) = (0i64, 0);
    follow(instructions, phases, None, |live, place, _| {
        if live > most {
            (most, highest_at) = (live, place);
        }
    });
    (most.unsigned_abs(), highest_at)
}

/// Tells of the bytes alive from place to place, and whether the last computation is over.
fn follow(
    instructions: &[Instruction],
    phases: &[Phase],
    last_computing: Option<usize>,
    mut see: impl FnMut(i64, usize, bool),
) {
    let mut course = Course::new(instructions, phases);
    let mut early: Vec<Vec<usize>> = vec![Vec::new(); instructions.len()];
    for (place, instruction) in instructions.iter().enumerate() {
        let from = place.saturating_sub(instruction.ahead as usize);
        if from < place {
            early[from].push(place);
        }
    }
    for place in 0..instructions.len() {
        let is_computed = last_computing.is_some_and(|last| last < place);
        // They may start while the instruction before this place still runs.
        for ahead in &early[place] {
            course.live += phases[*ahead].peak as i64;
        }
        see(course.live, place.saturating_sub(1), is_computed);
        course.learn(place);
        if instructions[place].ahead == 0 {
            course.live += phases[place].peak as i64;
        }
        see(course.live, place, is_computed);
        if last_computing == Some(place) {
            course.over(place);
        }
    }
}

/// Which instructions have certainly finished.
struct Course<'a> {
    instructions: &'a [Instruction],
    phases: &'a [Phase],
    /// Where each number stands, unless each stands at its own place.
    place_of: HashMap<u32, usize>,
    is_over: Vec<bool>,
    /// Places on each lane that works one after the other, and how many of them are over.
    lanes: [(Vec<usize>, usize); SERIAL_LANES],
    live: i64,
}

/// Lanes on which one instruction follows the other; the network is not among them.
const SERIAL_LANES: usize = 5;

fn serial(lane: Lane) -> Option<usize> {
    match lane {
        Lane::Compute => Some(0),
        Lane::CopyIn => Some(1),
        Lane::CopyOut => Some(2),
        Lane::Host => Some(3),
        Lane::Disk => Some(4),
        Lane::Network => None,
    }
}

impl<'a> Course<'a> {
    fn new(instructions: &'a [Instruction], phases: &'a [Phase]) -> Course<'a> {
        let mut lanes: [(Vec<usize>, usize); SERIAL_LANES] = Default::default();
        for (place, instruction) in instructions.iter().enumerate() {
            if let Some(lane) = serial(instruction.lane).filter(|_| instruction.ahead == 0) {
                lanes[lane].0.push(place);
            }
        }
        let places = || instructions.iter().enumerate();
        let reordered = places().any(|(place, instruction)| instruction.id as usize != place);
        Course {
            place_of: match reordered {
                true => places().map(|(place, instruction)| (instruction.id, place)).collect(),
                false => HashMap::default(),
            },
            is_over: vec![false; instructions.len()],
            instructions,
            phases,
            lanes,
            live: 0,
        }
    }

    fn place(&self, id: u32) -> Option<usize> {
        match self.place_of.is_empty() {
            true => Some(id as usize),
            false => self.place_of.get(&id).copied(),
        }
    }

    /// The instruction at this place has started: what it came after has finished, and what its lane did before.
    fn learn(&mut self, place: usize) {
        let instruction = &self.instructions[place];
        for id in &instruction.after {
            if let Some(earlier) = self.place(*id).filter(|earlier| *earlier < place) {
                self.lane_up_to(earlier);
                self.over(earlier);
            }
        }
        if instruction.ahead == 0 {
            self.lane_up_to(place);
        }
    }

    /// All that stands before a place on its lane is over.
    fn lane_up_to(&mut self, place: usize) {
        let Instruction { lane, ahead, .. } = self.instructions[place];
        let Some(lane) = serial(lane).filter(|_| ahead == 0) else { return };
        while let Some(next) = self.lanes[lane].0.get(self.lanes[lane].1).filter(|next| **next < place) {
            self.over(*next);
            self.lanes[lane].1 += 1;
        }
    }

    fn over(&mut self, place: usize) {
        if !std::mem::replace(&mut self.is_over[place], true) {
            let Phase { peak, gain, loss } = self.phases[place];
            self.live += gain as i64 - loss as i64 - peak as i64;
        }
    }
}

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
    /// Bytes of activations in host memory.
    host: u64,
    host_most: u64,
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
            host: 0,
            host_most: 0,
            groups: HashSet::default(),
        }
    }

    fn footprint(&self, layer: usize, samples: Samples) -> Footprint {
        self.chain.layers[layer].kind.footprint(samples.count(), self.sequence, self.precision)
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

    fn reduced(&mut self, layer: usize) -> u64 {
        let layout = self.layout;
        let mut bytes = 0;
        for tensor in layout.owned(layer) {
            if self.partial.remove(tensor) {
                bytes += allocation_bytes(layout.gradient_elements(*tensor));
            }
        }
        bytes
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
                let Footprint { output, saved, backward_peak, .. } = self.footprint(layer, samples);
                let merged = self.merged(layer, samples);
                let (gradients, cut) = self.gradients_handed(layer, samples);
                let partial = self.partial_gradients(layer);
                let lengths = self.let_go_of_lengths(layer, samples);
                let loss = self.release_inputs(layer, samples, saved) + output + merged + lengths;
                let peak = partial + cut + backward_peak.saturating_sub(merged);
                Phase { peak, gain: partial + gradients, loss }
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
                self.host += self.kept_input(layer, samples);
                self.host_most = self.host_most.max(self.host);
                let inputs = self.first_inputs(layer, 1);
                Phase { peak: 0, gain: 0, loss: self.let_go(layer, inputs, samples) }
            }
            Op::Restore { layer, samples } => {
                let gain = self.kept_input(layer, samples);
                self.host -= gain;
                let inputs = self.first_inputs(layer, 1);
                self.own.extend(inputs.iter().map(|from| (*from, layer, samples)));
                Phase { peak: gain, gain, loss: 0 }
            }
            Op::Reduce { layer } => Phase { peak: 0, gain: 0, loss: self.reduced(layer) },
            // What is handed over has its room all the time.
            Op::CountTargets
            | Op::Exchange { .. }
            | Op::HandOver { .. }
            | Op::SumLoss
            | Op::GradientNorm
            | Op::Update { .. } => Phase::default(),
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
