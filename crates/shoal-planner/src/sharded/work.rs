//! What a device's samples take: seconds by the cost model, bytes by what each layer's instructions need. The bytes are
//! an estimate on the high side, known for any number of samples at once; a table is accepted by its forecast alone.

use shoal_fleet::{Costs, Link};
use shoal_model::footprint::{GRANULE_BYTES, allocation_bytes, compute_bytes};
use shoal_model::{Chain, LayerKind};
use shoal_plan::{Activations, StepShape};

use super::balance::{Way, Worker};

/// The largest micro-batch that is looked at: beyond it no device gains.
pub(crate) const MICRO_BATCH_MAX: usize = 512;

/// Layers that are alike in all that matters here.
#[derive(Clone, Debug)]
pub(crate) struct Layers {
    /// One of them.
    pub layer: usize,
    pub count: usize,
    /// Bytes that are gathered, and whose gradients are reduced.
    pub gathered: f64,
    pub reduced: f64,
    /// Whether its forward is done again before its backward where activations are not kept.
    pub is_remade: bool,
    /// By samples: bytes of the input it is made again from.
    input: Vec<u64>,
}

/// Bytes by the number of samples of a micro-batch, for all layers together.
#[derive(Debug)]
pub(crate) struct ModelBytes {
    pub groups: Vec<Layers>,
    /// Everything between forward and backward.
    saved: Vec<u64>,
    /// The inputs of layers that are made again, and everything of the others.
    kept: Vec<u64>,
    /// Of `kept`, what may go to the host.
    offloaded: Vec<u64>,
    /// The largest boundary activation.
    boundary: Vec<u64>,
    /// The most that one micro-batch's instructions add.
    transient: Vec<u64>,
    /// Tokens or images, and targets.
    loaded: Vec<u64>,
    /// Copies and gradients that are there at once: of three layers in a row, since what comes next may be on its way
    /// before what went is gone; and gradients of tied tensors from their last layer to their first.
    fetched: u64,
    constant: u64,
}

impl ModelBytes {
    pub fn new(chain: &Chain, step: StepShape, largest: usize) -> ModelBytes {
        let StepShape { sequence, precision, .. } = step;
        let groups = groups(chain, step, largest);
        let table = |bytes: &dyn Fn(usize) -> u64| (0..=largest).map(bytes).collect::<Vec<u64>>();
        let output = |layer: usize, samples: usize| {
            chain.layers[layer].kind.output_bytes(samples, sequence, precision)
        };
        let layer_bytes =
            |group: &Layers, samples| layer_bytes(&chain.layers[group.layer].kind, step, samples);
        let over = |samples: usize, bytes: &dyn Fn(&Layers) -> u64| -> u64 {
            if samples == 0 { 0 } else { groups.iter().map(|group| group.count as u64 * bytes(group)).sum() }
        };
        let rotary = match chain.rotary_frequencies.len() {
            0 => 0,
            pairs => allocation_bytes(sequence * 2 * pairs),
        };
        ModelBytes {
            saved: table(&|samples| {
                over(samples, &|group| layer_bytes(group, samples).saved + group.input[samples])
            }),
            kept: table(&|samples| {
                over(samples, &|group| match group.is_remade {
                    true => group.input[samples],
                    false => layer_bytes(group, samples).saved + group.input[samples],
                })
            }),
            offloaded: table(&|samples| {
                over(samples, &|group| if group.is_remade { group.input[samples] } else { 0 })
            }),
            boundary: table(&|samples| match samples {
                0 => 0,
                _ => groups.iter().map(|group| output(group.layer, samples)).max().unwrap_or(0),
            }),
            transient: table(&|samples| match samples {
                0 => 0,
                _ => groups.iter().map(|group| layer_bytes(group, samples).transient).max().unwrap_or(0),
            }),
            loaded: table(&|samples| match samples {
                0 => 0,
                _ => {
                    let bytes = |each: usize| allocation_bytes(samples * each);
                    bytes(chain.input_elements(sequence)) + bytes(chain.targets(sequence)) + bytes(1)
                }
            }),
            fetched: fetched_bytes(chain, step),
            constant: rotary + shoal_plan::memory::ENGINE_SCALARS * allocation_bytes(2),
            groups,
        }
    }

    /// Bytes on the device of samples computed in a way, state aside.
    pub fn device(&self, way: Way, samples: usize) -> u64 {
        let sum = |bytes: &[u64]| {
            let (whole, rest) = (samples / way.micro_batch, samples % way.micro_batch);
            whole as u64 * bytes[way.micro_batch] + bytes[rest]
        };
        let largest = way.micro_batch.min(samples);
        let kept = match way.activations {
            Activations::Keep => sum(&self.saved),
            Activations::Recompute => sum(&self.kept),
            // On their way to the host and back: two micro-batches' inputs.
            Activations::Offload => {
                sum(&self.kept) - sum(&self.offloaded) + sum(&self.boundary) + 2 * self.boundary[largest]
            }
        };
        // Beside what is kept, a boundary of all samples: outputs on their way to the next layer, or gradients.
        let passing = sum(&self.boundary) + 2 * self.boundary[largest];
        self.constant + self.fetched + sum(&self.loaded) + kept + passing + self.transient[largest]
    }

    fn host(&self, way: Way, samples: usize) -> u64 {
        match way.activations {
            Activations::Offload => {
                let (whole, rest) = (samples / way.micro_batch, samples % way.micro_batch);
                whole as u64 * self.offloaded[way.micro_batch] + self.offloaded[rest]
            }
            Activations::Keep | Activations::Recompute => 0,
        }
    }
}

/// Bytes of all of a layer's tensors, each once.
fn tensor_bytes(chain: &Chain, layer: usize, bytes: impl Fn(usize) -> u64) -> u64 {
    let mut tensors: Vec<usize> = chain.layers[layer].tensors.iter().map(|(_, tensor)| *tensor).collect();
    tensors.sort_unstable();
    tensors.dedup();
    tensors.into_iter().map(bytes).sum()
}

fn copy_bytes(chain: &Chain, step: StepShape, layer: usize) -> u64 {
    tensor_bytes(chain, layer, |tensor| match chain.copy_elements(tensor, step.precision) {
        Some(elements) => compute_bytes(elements, step.precision),
        None => allocation_bytes(chain.tensors[tensor].elements()),
    })
}

fn gradient_bytes(chain: &Chain, step: StepShape, tensor: usize) -> u64 {
    allocation_bytes(chain.gradient_elements(tensor, step.precision))
}

/// Layers that are alike, together.
fn groups(chain: &Chain, step: StepShape, largest: usize) -> Vec<Layers> {
    let StepShape { sequence, precision, .. } = step;
    let mut groups: Vec<Layers> = Vec::new();
    for (layer, at) in chain.layers.iter().enumerate() {
        let gathered = copy_bytes(chain, step, layer) as f64;
        let known = groups.iter_mut().find(|group| {
            let like = &chain.layers[group.layer];
            like.kind == at.kind && group.gathered == gathered && like.inputs.len() == at.inputs.len()
        });
        if let Some(group) = known {
            group.count += 1;
            continue;
        }
        // A tied tensor's gradient is reduced once, with the first layer that uses it.
        let reduced = tensor_bytes(chain, layer, |tensor| match chain.users(tensor).next() == Some(layer) {
            true => gradient_bytes(chain, step, tensor),
            false => 0,
        });
        let input = |samples| match at.inputs.first() {
            Some(from) => chain.layers[*from].kind.output_bytes(samples, sequence, precision),
            None => 0,
        };
        groups.push(Layers {
            layer,
            count: 1,
            gathered,
            reduced: reduced as f64,
            is_remade: is_remade(&at.kind),
            input: (0..=largest).map(input).collect(),
        });
    }
    groups
}

/// Copies and gradients that are on a device at once.
fn fetched_bytes(chain: &Chain, step: StepShape) -> u64 {
    let layers = 0..chain.layers.len();
    let is_tied = |tensor: usize| chain.users(tensor).count() > 1;
    let apart = |tensor: usize| if is_tied(tensor) { 0 } else { gradient_bytes(chain, step, tensor) };
    let copies: Vec<u64> = layers.clone().map(|layer| copy_bytes(chain, step, layer)).collect();
    let gradients: Vec<u64> = layers.map(|layer| tensor_bytes(chain, layer, apart)).collect();
    let in_a_row = |bytes: &[u64]| -> u64 {
        let from = |at: usize| bytes[at..bytes.len().min(at + 3)].iter().sum();
        (0..bytes.len()).map(from).max().unwrap_or(0)
    };
    let tied = (0..chain.tensors.len()).filter(|tensor| is_tied(*tensor));
    let tied: u64 = tied.map(|tensor| gradient_bytes(chain, step, tensor)).sum();
    in_a_row(&copies) + in_a_row(&gradients) + tied
}

/// What a plan's layer row may say other than to keep everything.
pub(crate) fn is_remade(kind: &LayerKind) -> bool {
    match kind {
        LayerKind::Block(_) | LayerKind::Head(_) => true,
        LayerKind::Convolution(spec) => spec.norm.is_some(),
        LayerKind::Embedding(_) | LayerKind::Patches(_) | LayerKind::Join(_) => false,
    }
}

struct LayerBytes {
    /// Without its input.
    saved: u64,
    transient: u64,
}

fn layer_bytes(kind: &LayerKind, step: StepShape, samples: usize) -> LayerBytes {
    if let Some(phases) = kind.phases(samples, step.precision) {
        let saved = phases.begin.gain + phases.forward.gain + 2 * phases.group;
        let forward = phases.begin.peak.max(phases.forward.peak).max(phases.forward_lean.peak);
        let backward =
            phases.recompute.peak + phases.begin_backward.peak + phases.backward.peak + phases.output;
        return LayerBytes { saved, transient: forward.max(backward) };
    }
    let bytes = kind.footprint(samples, step.sequence, step.precision);
    let saved = bytes.saved.saturating_sub(bytes.input);
    let forward = bytes.forward_peak.max(bytes.forward_lean_peak);
    LayerBytes { saved, transient: forward.max(bytes.recompute_peak.max(saved + bytes.backward_peak)) }
}

/// Seconds of one gathering and one reduction, by group of layers.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Movements {
    pub gather: Vec<f64>,
    pub reduce: Vec<f64>,
}

impl Movements {
    fn still(groups: usize) -> Movements {
        Movements { gather: vec![0.0; groups], reduce: vec![0.0; groups] }
    }
}

/// Devices that compute alike: what they do with samples, and the room that leaves.
#[derive(Debug)]
pub(crate) struct DeviceWork<'a> {
    bytes: &'a ModelBytes,
    ways: &'a [Way],
    /// What its seconds are reckoned with.
    pub movements: Movements,
    /// By group of layers and samples.
    forward: Vec<Vec<f64>>,
    backward: Vec<Vec<f64>>,
    host_link: Link,
    /// What the state and the samples may take.
    budget: f64,
    /// What its host's memory may take of its activations.
    host_budget: f64,
    /// Bytes beyond the estimate that a forecast has shown, or short of it.
    correction: f64,
    rises: bool,
}

/// What a device has, as far as the search goes: devices of which all this is equal are one kind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Terms {
    pub kind: String,
    pub host_link: Link,
    pub budget: f64,
    pub host_budget: f64,
    pub correction: f64,
}

impl<'a> DeviceWork<'a> {
    pub fn new(
        device: usize,
        terms: &Terms,
        costs: &Costs,
        bytes: &'a ModelBytes,
        ways: &'a [Way],
    ) -> DeviceWork<'a> {
        let sizes = bytes.boundary.len();
        let forward = |group: &Layers| (0..sizes).map(|s| costs.forward(group.layer, device, s)).collect();
        let backward = |group: &Layers| (0..sizes).map(|s| costs.backward(group.layer, device, s)).collect();
        let forward: Vec<Vec<f64>> = bytes.groups.iter().map(forward).collect();
        let backward: Vec<Vec<f64>> = bytes.groups.iter().map(backward).collect();
        let rises = forward.iter().chain(&backward).all(|seconds| seconds.is_sorted());
        DeviceWork {
            bytes,
            ways,
            movements: Movements::still(bytes.groups.len()),
            forward,
            backward,
            host_link: terms.host_link.clone(),
            budget: terms.budget,
            host_budget: terms.host_budget,
            correction: terms.correction,
            rises,
        }
    }

    /// All layers, forward and backward, each with its gathering beside it.
    pub fn seconds_with(&self, movements: &Movements, way: Way, samples: usize) -> f64 {
        let (whole, rest) = ((samples / way.micro_batch) as f64, samples % way.micro_batch);
        let mut seconds = 0.0;
        for (at, group) in self.bytes.groups.iter().enumerate() {
            let sum = |times: &[f64]| whole * times[way.micro_batch] + times[rest];
            let (forward, backward) = (sum(&self.forward[at]), sum(&self.backward[at]));
            let copied = match way.activations {
                Activations::Offload if group.is_remade => {
                    let copy = |samples: usize| match group.input[samples] {
                        0 => 0.0,
                        bytes => self.host_link.seconds(bytes),
                    };
                    whole * copy(way.micro_batch) + copy(rest)
                }
                _ => 0.0,
            };
            let again = if group.is_remade && way.activations != Activations::Keep { forward } else { 0.0 };
            let (gather, reduce) = (movements.gather[at], movements.reduce[at]);
            let both = gather.max(forward).max(copied) + (gather + reduce).max(again + backward).max(copied);
            seconds += group.count as f64 * both;
        }
        seconds
    }

    /// What is left of its memory; below zero by what it lacks, or its host for what is sent there.
    pub fn room_or_lack(&self, way: Way, samples: usize) -> f64 {
        let way = Way { micro_batch: way.micro_batch.min(samples), ..way };
        let host = self.host_budget - self.bytes.host(way, samples) as f64;
        let here = self.budget - self.bytes.device(way, samples) as f64 - self.correction;
        if host < 0.0 { here.min(host) } else { here }
    }
}

impl Worker for DeviceWork<'_> {
    fn ways(&self) -> &[Way] {
        self.ways
    }

    fn seconds(&self, way: Way, samples: usize) -> f64 {
        self.seconds_with(&self.movements, way, samples)
    }

    fn room(&self, way: Way, samples: usize) -> f64 {
        let way = Way { micro_batch: way.micro_batch.min(samples), ..way };
        if self.bytes.host(way, samples) as f64 > self.host_budget {
            return -1.0;
        }
        self.budget - self.bytes.device(way, samples) as f64 - self.correction
    }

    fn idle_room(&self) -> f64 {
        self.budget - self.bytes.constant as f64 - self.correction
    }

    fn rises(&self) -> bool {
        self.rises
    }
}

/// The most that slices of tensors take beyond their elements: each part of a slice's state is rounded up, and a slice
/// may have one element more than its share.
pub(crate) fn slicing_bytes(chain: &Chain, step: StepShape) -> f64 {
    (chain.tensors.len() * (2 + step.optimizer_states)) as f64 * (GRANULE_BYTES + 4) as f64
}
