//! What a run of layers takes of a device: seconds by the costs, bytes by the footprints. Bytes are rather too few than
//! too many, so that no cut is ruled out that fits; the truth is the forecast of the compiled program, and what it adds
//! comes back as a reserve.

use std::collections::HashMap;
use std::ops::Range;

use shoal_fleet::{Costs, Fleet, Link};
use shoal_model::Chain;
use shoal_model::footprint::{allocation_bytes, compute_bytes};
use shoal_plan::memory::ENGINE_SCALARS;
use shoal_plan::one_device::StepShape;
use shoal_plan::{Activations, DeviceRow, Order, is_remade};

use super::State;
use crate::kept;

/// Devices that are alike to stages.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Class {
    /// One of them.
    pub device: usize,
    /// Without what it takes for itself.
    pub budget_bytes: u64,
}

/// The devices of a fleet by class, and the ways between them by what they take.
pub(super) struct Classes<'a> {
    pub fleet: &'a Fleet,
    pub all: Vec<Class>,
    pub of: Vec<usize>,
    pub links: Vec<Link>,
    /// Those already found, by two devices.
    known: HashMap<(usize, usize), usize>,
}

impl<'a> Classes<'a> {
    pub fn new(fleet: &'a Fleet, rows: &[DeviceRow]) -> Classes<'a> {
        let mut classes =
            Classes { fleet, all: Vec::new(), of: Vec::new(), links: Vec::new(), known: HashMap::new() };
        for (number, device) in fleet.devices.iter().enumerate() {
            let DeviceRow { budget_bytes, workspace_bytes, .. } = rows[number];
            let budget_bytes = budget_bytes.saturating_sub(workspace_bytes);
            let same = |class: &Class| {
                class.budget_bytes == budget_bytes && fleet.devices[class.device].kind == device.kind
            };
            let place = classes.all.iter().position(same).unwrap_or_else(|| {
                classes.all.push(Class { device: number, budget_bytes });
                classes.all.len() - 1
            });
            classes.of.push(place);
        }
        classes
    }

    pub fn budget(&self, device: usize) -> u64 {
        self.all[self.of[device]].budget_bytes
    }

    /// The class of the way between two devices.
    pub fn link(&mut self, from: usize, to: usize) -> usize {
        if let Some(known) = self.known.get(&(from, to)) {
            return *known;
        }
        let link = self.fleet.link(from, to);
        let place = self.links.iter().position(|other| *other == link).unwrap_or_else(|| {
            self.links.push(link);
            self.links.len() - 1
        });
        self.known.insert((from, to), place);
        place
    }
}

/// A layer's bytes for one micro-batch.
#[derive(Clone, Copy, Debug, Default)]
struct LayerBytes {
    /// All that the backward reads, its input included.
    saved: u64,
    /// What it is made again from, where it is.
    input: u64,
    /// The most a forward adds that keeps its input alone, and beyond what is saved one that keeps all.
    lean_peak: u64,
    forward_peak: u64,
    /// The most a backward adds to what is saved.
    backward_peak: u64,
    /// Whether a stage that keeps little makes it again.
    is_remade: bool,
}

/// Every layer at one size of micro-batch.
pub(super) struct Sized {
    /// By class, then layer.
    forward: Vec<Vec<f64>>,
    backward: Vec<Vec<f64>>,
    bytes: Vec<LayerBytes>,
    /// Bytes that pass the cut before each layer, one way.
    pub boundary: Vec<u64>,
    /// Seconds of that, by link class, then cut.
    transfer: Vec<Vec<f64>>,
}

impl Sized {
    pub fn new(
        chain: &Chain,
        step: StepShape,
        costs: &Costs,
        classes: &Classes,
        micro_batch: usize,
    ) -> Sized {
        let layers = chain.layers.len();
        let seconds = |of: &dyn Fn(usize, usize) -> f64| -> Vec<Vec<f64>> {
            let of_class = |class: &Class| (0..layers).map(|layer| of(layer, class.device)).collect();
            classes.all.iter().map(of_class).collect()
        };
        Sized {
            forward: seconds(&|layer, device| costs.forward(layer, device, micro_batch)),
            backward: seconds(&|layer, device| costs.backward(layer, device, micro_batch)),
            bytes: (0..layers)
                .map(|layer| {
                    let activations = kept(&chain.layers[layer].kind, Activations::Recompute);
                    let is_remade = is_remade(chain, layer, activations);
                    LayerBytes { is_remade, ..layer_bytes(chain, step, layer, micro_batch) }
                })
                .collect(),
            boundary: boundary(chain, step, micro_batch),
            transfer: Vec::new(),
        }
    }

    /// Works out the transfers over links that were found since.
    pub fn know_links(&mut self, classes: &Classes) {
        for link in &classes.links[self.transfer.len()..] {
            self.transfer.push(self.boundary.iter().map(|bytes| link.seconds(*bytes)).collect());
        }
    }

    /// Seconds of the boundary before a layer over a link.
    pub fn transfer(&self, link: usize, cut: usize) -> f64 {
        self.transfer[link][cut]
    }

    /// Seconds of all layers, forward and backward.
    pub fn whole(&self, class: usize) -> f64 {
        self.forward[class].iter().chain(&self.backward[class]).sum()
    }
}

fn layer_bytes(chain: &Chain, step: StepShape, layer: usize, samples: usize) -> LayerBytes {
    let kind = &chain.layers[layer].kind;
    let Some(phases) = kind.phases(samples, step.precision) else {
        let of = kind.footprint(samples, step.sequence, step.precision);
        return LayerBytes {
            saved: of.saved,
            input: of.input,
            lean_peak: of.forward_lean_peak,
            forward_peak: of.forward_peak.saturating_sub(of.saved - of.input),
            backward_peak: of.backward_peak.max(of.recompute_peak.saturating_sub(of.saved - of.input)),
            is_remade: false,
        };
    };
    let inputs = &chain.layers[layer].inputs;
    let input: u64 = inputs
        .iter()
        .take(phases.kept_inputs)
        .map(|from| chain.layers[*from].kind.output_bytes(samples, step.sequence, step.precision))
        .sum();
    let left = (phases.begin.gain + phases.forward.gain)
        .saturating_sub(phases.begin.loss + phases.forward.loss)
        + 2 * phases.group;
    LayerBytes {
        saved: input + left,
        input,
        lean_peak: phases.begin.peak.max(phases.forward_lean.peak),
        forward_peak: phases.begin.peak.max(phases.forward.peak).saturating_sub(left),
        backward_peak: phases.begin_backward.peak.max(phases.backward.peak).max(phases.recompute.peak),
        is_remade: false,
    }
}

/// Bytes that pass each cut, one way: an output goes to each of its readers behind it.
pub(super) fn boundary(chain: &Chain, step: StepShape, samples: usize) -> Vec<u64> {
    let mut bytes = vec![0; chain.layers.len() + 1];
    for (reader, layer) in chain.layers.iter().enumerate() {
        for from in &layer.inputs {
            let kind = &chain.layers[*from].kind;
            let output = kind.output_bytes(samples, step.sequence, step.precision);
            bytes[from + 1..=reader].iter_mut().for_each(|cut| *cut += output);
        }
    }
    bytes
}

/// A tensor as far as its state goes.
pub(super) struct TensorBytes {
    users: Vec<usize>,
    elements: usize,
    whole: u64,
    gradient: u64,
    /// What layers compute with, where that is not the parameter itself.
    copy: Option<u64>,
}

impl TensorBytes {
    pub fn all(chain: &Chain, step: StepShape) -> Vec<TensorBytes> {
        let of = |tensor: usize| {
            let elements = chain.tensors[tensor].elements();
            let copy = chain.copy_elements(tensor, step.precision);
            TensorBytes {
                users: chain.users(tensor).collect(),
                elements,
                whole: allocation_bytes(elements),
                gradient: allocation_bytes(chain.gradient_elements(tensor, step.precision)),
                copy: copy.map(|elements| compute_bytes(elements, step.precision)),
            }
        };
        (0..chain.tensors.len()).map(of).collect()
    }

    /// Of those, its part of parameters, sum and optimizer's state, where replicas divide them.
    fn slices(&self, step: StepShape, state: State, replicas: usize) -> u64 {
        match state {
            State::Divided if replicas > 1 => {
                let slice = self.elements.div_ceil(replicas * self.users.len());
                allocation_bytes(slice) * (2 + step.optimizer_states as u64)
            }
            _ => 0,
        }
    }

    /// Bytes on a device that computes with it.
    fn kept(&self, step: StepShape, state: State, replicas: usize) -> u64 {
        let states = step.optimizer_states as u64;
        match state {
            State::Whole => self.whole * (1 + states) + self.gradient + self.copy.unwrap_or(0),
            State::Divided if replicas == 1 => self.kept(step, State::Whole, 1),
            // Gradients of all of it are added up here before they go to their holders.
            State::Divided => self.slices(step, state, replicas) + self.kept(step, State::Host, replicas),
            State::Host => self.gradient + self.copy.unwrap_or(self.whole),
        }
    }
}

/// What is kept of the layers' tensors all the time, where so many replicas keep it.
pub(super) struct StateBytes {
    pub replicas: usize,
    /// By layer.
    bytes: Vec<u64>,
    /// Of those, what replicas divide.
    slices: Vec<u64>,
    /// Of the first, what an earlier layer uses too: not twice where both are in one stage.
    tied: Vec<Vec<(usize, u64)>>,
}

impl StateBytes {
    pub fn new(
        layers: usize,
        step: StepShape,
        tensors: &[TensorBytes],
        state: State,
        replicas: usize,
    ) -> StateBytes {
        let mut all = StateBytes {
            replicas,
            bytes: vec![0; layers],
            slices: vec![0; layers],
            tied: vec![Vec::new(); layers],
        };
        for tensor in tensors {
            let bytes = tensor.kept(step, state, replicas);
            if let Some(first) = tensor.users.first() {
                all.slices[*first] += tensor.slices(step, state, replicas);
            }
            for (place, layer) in tensor.users.iter().enumerate() {
                all.bytes[*layer] += bytes;
                if let Some(before) = place.checked_sub(1) {
                    all.tied[*layer].push((tensor.users[before], bytes));
                }
            }
        }
        all
    }
}

/// Numbers that are trained, by layer; a tied tensor counts in each of its layers.
pub(super) fn parameters(layers: usize, tensors: &[TensorBytes]) -> Vec<u64> {
    let mut parameters = vec![0; layers];
    for tensor in tensors {
        tensor.users.iter().for_each(|layer| parameters[*layer] += tensor.elements as u64);
    }
    parameters
}

/// How a stage is run, and the seconds of a micro-batch in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Choice {
    pub activations: Activations,
    /// Only where it is less than the order asks for.
    pub stash: Option<usize>,
    pub seconds: f64,
    /// More than the seconds where a short stash keeps the stage waiting.
    pub period: f64,
}

/// What stages are judged by.
pub(super) struct Judge<'a> {
    pub chain: &'a Chain,
    pub step: StepShape,
    pub classes: &'a Classes<'a>,
    pub sized: &'a Sized,
    pub state: &'a StateBytes,
    pub order: Order,
    /// Those that may be chosen.
    pub activations: &'a [Activations],
}

/// Layers from one on, one after the other, and what they sum up to.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    start: usize,
    end: usize,
    pub forward: f64,
    pub backward: f64,
    remake: f64,
    state: u64,
    saved: u64,
    /// What is kept where the rest is made again.
    lean: u64,
    /// What offloading takes off that.
    offloaded: u64,
    /// What is made again, of all layers and of the largest.
    remade: u64,
    remade_most: u64,
    forward_peak: u64,
    lean_peak: u64,
    backward_peak: u64,
    /// Of a layer that is made again just before.
    remade_backward_peak: u64,
}

impl Judge<'_> {
    pub fn run(&self, start: usize) -> Run {
        Run { start, end: start, ..Run::default() }
    }

    pub fn add(&self, run: &mut Run, class: usize) {
        let layer = run.end;
        run.end += 1;
        let forward = self.sized.forward[class][layer];
        run.forward += forward;
        run.backward += self.sized.backward[class][layer];
        let bytes = self.sized.bytes[layer];
        let twice = self.state.tied[layer].iter().filter(|(before, _)| *before >= run.start);
        run.state += self.state.bytes[layer] - twice.map(|(_, bytes)| bytes).sum::<u64>();
        run.saved += bytes.saved;
        run.forward_peak = run.forward_peak.max(bytes.forward_peak);
        run.lean_peak = run.lean_peak.max(bytes.lean_peak);
        run.backward_peak = run.backward_peak.max(bytes.backward_peak);
        if bytes.is_remade {
            let made = bytes.saved - bytes.input;
            run.remake += forward;
            run.lean += bytes.input;
            run.offloaded += bytes.input;
            run.remade += made;
            run.remade_most = run.remade_most.max(made);
            run.remade_backward_peak = run.remade_backward_peak.max(made + bytes.backward_peak);
        } else {
            run.lean += bytes.saved;
            run.remade_backward_peak = run.remade_backward_peak.max(bytes.backward_peak);
        }
    }

    /// Bytes beside the stash: state, the highest instruction, what is on its way.
    fn fixed(&self, run: &Run, depth: usize, activations: Activations) -> u64 {
        let boundary = &self.sized.boundary;
        let on_the_way = boundary[run.start] + boundary[run.end];
        let samples = self.step.global_batch.div_ceil(self.state.replicas);
        let mut loaded = 0;
        if run.start == 0 {
            loaded += allocation_bytes(samples * self.chain.input_elements(self.step.sequence));
        }
        if run.end == self.chain.layers.len() {
            loaded += allocation_bytes(samples * self.chain.targets(self.step.sequence));
        }
        let highest = match activations {
            Activations::Keep => run.forward_peak.max(run.backward_peak),
            // Ahead of its gradient a whole stage is made again.
            _ if self.order == Order::Varuna && depth > 1 => {
                run.remade + run.lean_peak.max(run.backward_peak)
            }
            _ => run.lean_peak.max(run.remade_backward_peak),
        };
        // Offloaded inputs of the micro-batch that is being worked on are still, or again, here.
        let passing = if activations == Activations::Offload { run.offloaded } else { 0 };
        run.state + on_the_way + loaded + highest + passing + self.constant_bytes()
    }

    /// Bytes of state that a replica by itself lacks, because its share of what all divide is not there.
    pub fn divided_bytes(&self, layers: Range<usize>) -> u64 {
        self.state.slices[layers].iter().sum()
    }

    fn constant_bytes(&self) -> u64 {
        ENGINE_SCALARS * allocation_bytes(2) + self.rotary_bytes()
    }

    fn rotary_bytes(&self) -> u64 {
        match self.chain.rotary_frequencies.len() {
            0 => 0,
            pairs => allocation_bytes(self.step.sequence * 2 * pairs),
        }
    }

    /// Bytes of one more stashed micro-batch.
    fn stashed(&self, run: &Run, activations: Activations) -> u64 {
        match activations {
            Activations::Keep => run.saved,
            Activations::Recompute => run.lean,
            Activations::Offload => run.lean - run.offloaded,
        }
    }

    /// Bytes that the run lacks on a device of a class, at its leanest: none where it fits.
    pub fn short(&self, run: &Run, class: usize, depth: usize, reserve: u64) -> u64 {
        let needed = self.activations.iter().map(|activations| {
            self.fixed(run, depth, *activations) + self.stashed(run, *activations) + reserve
        });
        needed.min().unwrap_or(0).saturating_sub(self.classes.all[class].budget_bytes)
    }

    /// The quickest way to run it so that it fits, so many devices before the loss; `reserve` bytes are to stay free.
    pub fn choose(&self, run: &Run, class: usize, depth: usize, reserve: u64) -> Option<Choice> {
        let budget = self.classes.all[class].budget_bytes;
        let mut best: Option<Choice> = None;
        for activations in self.activations.iter().copied() {
            let fixed = self.fixed(run, depth, activations) + reserve;
            let stashed = self.stashed(run, activations).max(1);
            let holds = (budget.saturating_sub(fixed) / stashed) as usize;
            if fixed > budget || holds == 0 {
                continue;
            }
            let remade = if activations == Activations::Keep { 0.0 } else { run.remake };
            let seconds = run.forward + run.backward + remade;
            // Fewer than the devices behind it, and it waits for their gradients.
            let period = seconds * (depth as f64 / holds as f64).max(1.0);
            let stash = (holds < self.order.stash(depth)).then_some(holds);
            if best.is_none_or(|best| period < best.period) {
                best = Some(Choice { activations, stash, seconds, period });
            }
        }
        best
    }
}
