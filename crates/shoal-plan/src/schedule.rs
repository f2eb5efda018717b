//! The order of a whole step over all devices, as one list of instructions a device. The lists come from one order
//! of the step, in which everything stands after what it waits for; that is why no device ever waits for another
//! that waits for it.
//!
//! - [`layered`]: layer by layer, all micro-batches of one before the next.
//! - [`pipelined`]: micro-batches follow each other through the devices, by a rule and by what work costs.

mod layered;
mod pipelined;

use std::collections::HashSet;

use shoal_model::{Chain, LayerKind};

use crate::layout::{Layout, Share};
use crate::program::{Keep, Moved, Op, Pass, Purpose};
use crate::table::{Activations, Order, Samples, Tier};

/// What work costs, in seconds or any other unit: pipelines are ordered by it. It decides no result.
pub trait Pace {
    fn forward(&self, layer: usize, device: usize, samples: usize) -> f64;
    /// Without recomputation.
    fn backward(&self, layer: usize, device: usize, samples: usize) -> f64;
    /// Of so many samples' output of a layer, or its gradient.
    fn transfer(&self, layer: usize, from: usize, to: usize, samples: usize) -> f64;
}

/// Where nothing is measured: operations, and no time on the way.
pub struct ByArithmetic {
    /// Of one sample, by layer.
    forward: Vec<f64>,
}

impl ByArithmetic {
    pub fn new(chain: &Chain, sequence: usize) -> ByArithmetic {
        // Every layer takes some time, even where it multiplies nothing.
        let forward = chain.layers.iter().map(|layer| 1.0 + layer.kind.forward_flops(sequence) as f64);
        ByArithmetic { forward: forward.collect() }
    }
}

impl Pace for ByArithmetic {
    fn forward(&self, layer: usize, _device: usize, samples: usize) -> f64 {
        self.forward[layer] * samples as f64
    }

    fn backward(&self, layer: usize, device: usize, samples: usize) -> f64 {
        2.0 * self.forward(layer, device, samples)
    }

    fn transfer(&self, _layer: usize, _from: usize, _to: usize, _samples: usize) -> f64 {
        0.0
    }
}

/// An instruction in a device's list.
#[derive(Clone, Debug)]
pub(crate) struct Listed {
    pub op: Op,
    /// Places in the same list that it waits for beyond what its effects say: so that what is on its way is bounded.
    pub after: Vec<usize>,
    /// The place from which on it may start.
    pub from: usize,
}

/// The lists of all the plan's devices, and how long computing takes by the pace, as far as their order shows that.
pub(crate) fn lists(layout: &Layout, purpose: Purpose, pace: &dyn Pace) -> (Vec<Vec<Listed>>, f64) {
    let mut lists = Lists { layout, purpose, lists: vec![Vec::new(); layout.plan.devices.len()] };
    let fetches = (0..layout.chain.layers.len()).any(|layer| layout.gather(layer, Pass::Step).is_some());
    // Without a backward nothing is gained by going layer by layer, unless parameters are fetched.
    let foreseen = if layout.is_layered() && (purpose == Purpose::Train || fetches) {
        layered::order(&mut lists);
        0.0
    } else {
        pipelined::order(&mut lists, pace)
    };
    (lists.lists, foreseen)
}

/// The lists as they grow.
struct Lists<'a> {
    layout: &'a Layout<'a>,
    purpose: Purpose,
    lists: Vec<Vec<Listed>>,
}

impl Lists<'_> {
    fn push(&mut self, device: usize, op: Op) -> usize {
        let place = self.lists[device].len();
        self.lists[device].push(Listed { op, after: Vec::new(), from: place });
        place
    }

    fn layers(&self) -> usize {
        self.layout.chain.layers.len()
    }

    fn trains(&self) -> bool {
        self.purpose == Purpose::Train
    }

    /// What each device needs of its samples (inputs, targets, lengths), and the count of all targets.
    fn load(&mut self) {
        let (layout, last) = (self.layout, self.layers() - 1);
        let mut loaded = HashSet::new();
        for layer in [0].into_iter().chain(layout.chain.length_readers()).chain([last]) {
            for share in layout.shares(layer) {
                if loaded.insert((share.device, share.samples)) {
                    self.push(share.device, Op::Load { samples: share.samples });
                }
            }
        }
        if self.purpose != Purpose::Predict {
            let mut counting: Vec<usize> = self.layout.computing(last).collect();
            counting.sort_unstable();
            counting.dedup();
            counting.into_iter().for_each(|device| {
                self.push(device, Op::CountTargets);
            });
        }
    }

    fn keep(&self, layer: usize, share: Share) -> Keep {
        match self.purpose {
            Purpose::Train if is_remade(self.layout.chain, layer, share.activations) => Keep::Input,
            Purpose::Train => Keep::All,
            Purpose::Evaluate | Purpose::Predict => Keep::Nothing,
        }
    }

    fn begin(&mut self, layer: usize, share: Share) {
        if self.trains() && self.layout.chain.batch_norm(layer).is_some() {
            self.push(share.device, Op::Begin { layer, samples: share.samples });
        }
    }

    /// A forward, what it hands to other devices, and its input's way to the host. Returns the places of the sends.
    fn forward(&mut self, layer: usize, share: Share) -> Vec<(usize, Moving)> {
        let (device, samples) = (share.device, share.samples);
        if self.purpose == Purpose::Predict && layer + 1 == self.layers() {
            self.push(device, Op::Predict { layer, samples });
            return Vec::new();
        }
        let keep = self.keep(layer, share);
        self.push(device, Op::Forward { layer, samples, keep });
        let layout = self.layout;
        let handed = layout.readers(layer).iter().flat_map(|reader| {
            let pieces = layout.pieces(*reader, samples);
            pieces.map(|(samples, to)| Moving { layer, reader: *reader, samples, to })
        });
        let sent: Vec<Moving> = handed.filter(|piece| piece.to != device).collect();
        let places = self.send(device, Moved::Activation, sent);
        if keep == Keep::Input && share.activations == Activations::Offload {
            self.push(device, Op::Offload { layer, samples });
        }
        places
    }

    /// What stands before a backward: the kept input is made into all that it reads.
    fn remake(&mut self, layer: usize, share: Share) {
        let (device, samples) = (share.device, share.samples);
        if self.keep(layer, share) == Keep::Input {
            if share.activations == Activations::Offload {
                self.push(device, Op::Restore { layer, samples });
            }
            self.push(device, Op::Recompute { layer, samples });
        }
    }

    fn begin_backward(&mut self, layer: usize, share: Share) {
        if self.layout.chain.batch_norm(layer).is_some() {
            self.push(share.device, Op::BeginBackward { layer, samples: share.samples });
        }
    }

    fn backward(&mut self, layer: usize, share: Share) -> Vec<(usize, Moving)> {
        let (device, samples) = (share.device, share.samples);
        self.push(device, Op::Backward { layer, samples });
        let layout = self.layout;
        let handed = layout.chain.layers[layer].inputs.iter().flat_map(|from| {
            let pieces = layout.pieces(*from, samples);
            pieces.map(|(samples, to)| Moving { layer: *from, reader: layer, samples, to })
        });
        let sent: Vec<Moving> = handed.filter(|piece| piece.to != device).collect();
        self.send(device, Moved::Gradient, sent)
    }

    fn send(&mut self, device: usize, moved: Moved, pieces: Vec<Moving>) -> Vec<(usize, Moving)> {
        let sent = pieces.into_iter().map(|piece| {
            let Moving { layer, reader, samples, to } = piece;
            (self.push(device, Op::Send { moved, layer, reader, samples, to }), piece)
        });
        sent.collect()
    }

    /// Loss, norm, updates, and the copies that they make stale.
    fn end(&mut self) {
        let layout = self.layout;
        if self.purpose == Purpose::Predict {
            return;
        }
        if self.trains() {
            self.hand_over();
        }
        for device in layout.members() {
            self.push(*device, Op::SumLoss);
        }
        if self.purpose == Purpose::Evaluate {
            return;
        }
        for device in layout.members() {
            self.push(*device, Op::GradientNorm);
        }
        for tensor in self.updated() {
            for device in layout.members() {
                let mut tiers: Vec<Tier> =
                    layout.held(tensor, *device).iter().map(|held| held.holder.tier()).collect();
                tiers.sort_unstable();
                tiers.dedup();
                for at in tiers {
                    self.push(*device, Op::Update { tensor, at });
                }
            }
        }
        for layer in 0..self.layers() {
            self.gather(layer, Pass::Update);
        }
    }

    /// Tensors in the order of their updates. In a line they follow each other, and the next step may begin before all are
    /// over: first those whose copies this step still renews, then the others as the next forward needs them.
    fn updated(&self) -> Vec<usize> {
        let layout = self.layout;
        let mut tensors: Vec<usize> = (0..layout.chain.tensors.len()).collect();
        tensors.sort_by_key(|tensor| {
            let first_user = layout.users(*tensor)[0];
            (layout.gather(first_user, Pass::Update).is_none(), first_user)
        });
        tensors
    }

    /// Sums of gradients to where they are needed. It may begin as soon as they are complete; it is listed here since
    /// whatever stood behind it would have to wait for that too.
    fn hand_over(&mut self) {
        let layout = self.layout;
        let groups: Vec<_> = (0..self.layers()).map(|layer| layout.hand_over(layer)).collect();
        if groups.iter().all(Option::is_none) {
            return;
        }
        let complete: Vec<Vec<usize>> = self.lists.iter().map(|list| self.complete_from(list)).collect();
        for (layer, group) in groups.into_iter().enumerate() {
            for device in group.iter().flat_map(|group| &group.devices) {
                let place = self.push(*device, Op::HandOver { layer });
                self.lists[*device][place].from = complete[*device][layer].min(place);
            }
        }
    }

    /// From which place on a device's gradients of what each layer owns are complete; where it has none, from nowhere.
    fn complete_from(&self, list: &[Listed]) -> Vec<usize> {
        let layout = self.layout;
        let mut from = vec![usize::MAX; self.layers()];
        for (place, listed) in list.iter().enumerate() {
            match listed.op {
                Op::Reduce { layer } => from[layer] = place + 1,
                Op::Backward { layer, .. } | Op::WeightGradients { layer, .. } => {
                    layout.tensors(layer).iter().for_each(|t| from[layout.users(*t)[0]] = place + 1);
                }
                _ => {}
            }
        }
        from
    }

    fn gather(&mut self, layer: usize, pass: Pass) {
        let layout = self.layout;
        for device in layout.gather(layer, pass).iter().flat_map(|group| &group.devices) {
            self.push(*device, Op::Gather { layer, pass });
        }
    }
}

/// A piece on its way between two layers, and to whom.
#[derive(Clone, Copy, Debug)]
struct Moving {
    layer: usize,
    reader: usize,
    samples: Samples,
    to: usize,
}

/// Whether a layer's forward keeps its input alone, to be made again from.
pub fn is_remade(chain: &Chain, layer: usize, activations: Activations) -> bool {
    activations != Activations::Keep
        && match &chain.layers[layer].kind {
            // A first layer keeps its tokens or images either way.
            LayerKind::Embedding(_) | LayerKind::Patches(_) => false,
            // Without a norm it keeps its input and bits.
            LayerKind::Convolution(spec) => spec.norm.is_some(),
            // Nothing of its inputs.
            LayerKind::Join(_) => false,
            LayerKind::Block(_) | LayerKind::Head(_) => true,
        }
}
