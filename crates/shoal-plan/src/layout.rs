//! What moves, derived from the table alone: where the pieces of each layer's samples lie, who gathers whose
//! parameters, who adds up whose gradients. The compiler, the verifier, the memory forecast and the simulator all
//! ask here, so that none of them can disagree about it.

use std::collections::{BTreeMap, HashSet};

use shoal_model::{Chain, TensorUse};

use crate::program::{Lane, Pass};
use crate::table::{Activations, GradientWire, Held, Holder, Order, Plan, Residence, Samples, Slice, Tier};

/// A micro-batch of a layer and who computes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub samples: Samples,
    pub device: usize,
    pub activations: Activations,
}

/// Devices that act together: each has the instruction in its program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Group {
    /// In order.
    pub devices: Vec<usize>,
    /// Those of them that get something by it, in order.
    pub receivers: Vec<usize>,
    /// The farthest memory that takes part.
    pub tier: Tier,
}

impl Group {
    fn new(mut devices: Vec<usize>, mut receivers: Vec<usize>, tier: Tier) -> Group {
        receivers.sort_unstable();
        receivers.dedup();
        devices.extend(&receivers);
        devices.sort_unstable();
        devices.dedup();
        Group { devices, receivers, tier }
    }

    pub fn has(&self, device: usize) -> bool {
        self.devices.binary_search(&device).is_ok()
    }

    pub fn receives(&self, device: usize) -> bool {
        self.receivers.binary_search(&device).is_ok()
    }

    /// What it occupies: the network, or where one device acts alone the way between it and a tier of its host.
    pub fn lane(&self, to_device: bool) -> Lane {
        match (self.devices.len(), self.tier) {
            (1, Tier::Disk) => Lane::Disk,
            (1, _) if to_device => Lane::CopyIn,
            (1, _) => Lane::CopyOut,
            _ => Lane::Network,
        }
    }
}

/// What is in the table about one layer's movements.
#[derive(Debug, Default)]
struct LayerLayout {
    /// By sample number.
    shares: Vec<Share>,
    /// The place of each sample's share among them: it is asked for many times an instruction.
    share_of: Vec<u32>,
    readers: Vec<usize>,
    /// All it uses, each once.
    tensors: Vec<usize>,
    /// Those that no earlier layer uses.
    owned: Vec<usize>,
    /// Who gathers parameters to compute it with.
    fetch: Option<Group>,
    /// Who renews copies of the tensors that it owns after an update.
    renew: Option<Group>,
    /// Who adds up the gradients of the tensors that it owns.
    reduce: Option<Group>,
    /// Who hands their sums on to optimizer's slices that lie elsewhere, or gets some.
    hand_over: Option<Group>,
}

/// A tensor's row, to be asked by device.
#[derive(Debug)]
struct TensorLayout {
    /// By device.
    copies: Vec<(usize, Residence)>,
    /// By the device that serves them.
    optimizer: Vec<Held>,
    /// Likewise, where it is not the same.
    gradient: Option<Vec<Held>>,
    /// Those of the optimizer's slices to which the sum of their gradient is handed over.
    handed: Vec<Held>,
    /// Devices whose own memory has all of the optimizer's slices, in order.
    whole: Vec<usize>,
    /// Devices whose own memory has all of the gradient's.
    whole_gradient: Vec<usize>,
    /// Layers that use it.
    users: Vec<usize>,
    /// Elements of its gradient sum, and of the copy that layers compute with, if that is another tensor.
    gradient_elements: usize,
    copy_elements: Option<usize>,
}

impl TensorLayout {
    fn new(plan: &Plan, chain: &Chain, tensor: usize, use_of: TensorUse) -> TensorLayout {
        let row = &plan.tensors[tensor];
        let mut copies: Vec<_> =
            row.compute_copies.iter().map(|copy| (copy.device, copy.residence)).collect();
        copies.sort_unstable_by_key(|(device, _)| *device);
        let optimizer = by_device(&row.optimizer);
        let gradient = (row.gradient != row.optimizer).then(|| by_device(&row.gradient));
        let whole = whole_at(&row.optimizer, row.elements);
        let whole_gradient = whole_at(&row.gradient, row.elements);
        let handed = gradient.as_ref().map(|sums| handed(&optimizer, sums, &whole, &whole_gradient));
        let spec = &chain.tensors[tensor];
        TensorLayout {
            copies,
            optimizer,
            gradient,
            handed: handed.unwrap_or_default(),
            whole,
            whole_gradient,
            gradient_elements: use_of.gradient_elements(spec, plan.precision),
            copy_elements: use_of.copy_elements(spec, plan.precision),
            users: use_of.layers,
        }
    }

    fn residence(&self, device: usize) -> Option<Residence> {
        let place = self.copies.binary_search_by_key(&device, |(device, _)| *device).ok()?;
        Some(self.copies[place].1)
    }

    fn is_whole(&self, device: usize) -> bool {
        self.whole.binary_search(&device).is_ok()
    }
}

#[derive(Debug)]
pub struct Layout<'a> {
    pub plan: &'a Plan,
    pub chain: &'a Chain,
    layers: Vec<LayerLayout>,
    tensors: Vec<TensorLayout>,
    /// Devices that compute or hold something.
    members: Vec<usize>,
}

impl<'a> Layout<'a> {
    /// Of a table that [`Plan::check`] has passed.
    pub fn new(plan: &'a Plan, chain: &'a Chain) -> Layout<'a> {
        let mut layers: Vec<LayerLayout> = (0..chain.layers.len())
            .map(|layer| (layer, shares(plan, layer)))
            .map(|(layer, shares)| LayerLayout {
                share_of: (0..)
                    .zip(&shares)
                    .flat_map(|(place, share)| share.samples.range().map(move |_| place))
                    .collect(),
                shares,
                tensors: tensors(chain, layer),
                ..LayerLayout::default()
            })
            .collect();
        for (reader, layer) in chain.layers.iter().enumerate() {
            for from in &layer.inputs {
                let readers = &mut layers[*from].readers;
                if readers.last() != Some(&reader) {
                    readers.push(reader);
                }
            }
        }
        let uses = chain.uses();
        for (tensor, use_of) in uses.iter().enumerate() {
            if let Some(first) = use_of.layers.first() {
                layers[*first].owned.push(tensor);
            }
        }
        let tensors = uses.into_iter().enumerate().take(plan.tensors.len());
        let tensors =
            tensors.map(|(tensor, use_of)| TensorLayout::new(plan, chain, tensor, use_of)).collect();
        let mut layout = Layout { plan, chain, layers, tensors, members: Vec::new() };
        for layer in 0..layout.layers.len() {
            let (fetch, renew) = (layout.fetch(layer), layout.renew(layer));
            let (reduce, hand_over) = (layout.reduction(layer), layout.handing_over(layer));
            let at = &mut layout.layers[layer];
            (at.fetch, at.renew, at.reduce, at.hand_over) = (fetch, renew, reduce, hand_over);
        }
        layout.members = layout.find_members();
        layout
    }

    /// A layer's micro-batches, by sample number.
    pub fn shares(&self, layer: usize) -> &[Share] {
        &self.layers[layer].shares
    }

    /// The micro-batches of a layer that have some of these samples.
    pub fn shares_of(&self, layer: usize, samples: Samples) -> &[Share] {
        let LayerLayout { shares, share_of, .. } = &self.layers[layer];
        let place = |sample: usize| share_of.get(sample).map_or(shares.len(), |place| *place as usize);
        let first = place(samples.start);
        match samples.count() {
            0 => &[],
            _ => &shares[first..(place(samples.end - 1) + 1).clamp(first, shares.len())],
        }
    }

    /// The pieces in which these samples pass to or from a layer, and that layer's device for each.
    pub fn pieces(&self, layer: usize, samples: Samples) -> impl Iterator<Item = (Samples, usize)> + '_ {
        self.shares_of(layer, samples).iter().map(move |share| {
            let start = share.samples.start.max(samples.start);
            (Samples { start, end: share.samples.end.min(samples.end) }, share.device)
        })
    }

    /// The device's share of a layer that is just these samples.
    pub fn share(&self, device: usize, layer: usize, samples: Samples) -> Option<Share> {
        let [share] = self.shares_of(layer, samples) else { return None };
        (share.samples == samples && share.device == device).then_some(*share)
    }

    /// Layers that the device computes for just these samples and that are told how long they are.
    pub fn told_lengths(&self, device: usize, samples: Samples) -> impl Iterator<Item = usize> + '_ {
        self.chain.length_readers().filter(move |layer| self.share(device, *layer, samples).is_some())
    }

    /// Whether a device brings something of just these samples in: inputs, targets or lengths.
    pub fn loads(&self, device: usize, samples: Samples) -> bool {
        let last = self.layers.len() - 1;
        self.share(device, 0, samples).is_some()
            || self.share(device, last, samples).is_some()
            || self.told_lengths(device, samples).next().is_some()
    }

    pub fn readers(&self, layer: usize) -> &[usize] {
        &self.layers[layer].readers
    }

    /// Whether some output is taken by several layers.
    pub fn has_branches(&self) -> bool {
        self.layers.iter().any(|layer| layer.readers.len() > 1)
    }

    pub fn tensors(&self, layer: usize) -> &[usize] {
        &self.layers[layer].tensors
    }

    /// Tensors that the layer is the first to use: their gradients are complete after its backward.
    pub fn owned(&self, layer: usize) -> &[usize] {
        &self.layers[layer].owned
    }

    /// In what a layer's gradients go to where they are added up: statistics that are kept beside the parameters are no
    /// gradients, and are not rounded.
    pub fn gradient_wire(&self, layer: usize) -> GradientWire {
        let is_kept = |tensor: &usize| self.chain.tensors[*tensor].running.is_some();
        match self.owned(layer).iter().any(is_kept) {
            true => GradientWire::Fp32,
            false => self.plan.gradients,
        }
    }

    /// Devices that compute or hold something.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// Whether each layer's micro-batches are done before the next layer's begin.
    pub fn is_layered(&self) -> bool {
        self.plan.order == Order::LayerFirst
    }

    /// Whether a device's backwards of a layer put gradients of its weights off.
    pub fn puts_off(&self, device: usize, layer: usize) -> bool {
        !self.is_layered()
            && self.plan.devices[device].puts_off > 0
            && self.chain.layers[layer].kind.puts_off()
    }

    /// What part of a backward's time there that is.
    pub fn put_off_share(&self, device: usize, layer: usize) -> f64 {
        match self.puts_off(device, layer) {
            true => self.chain.layers[layer].kind.put_off_share(self.plan.sequence),
            false => 0.0,
        }
    }

    /// The part of the step that a gathering serves: forward and backward each where the order is layered.
    pub fn pass(&self, backward: bool) -> Pass {
        match (self.is_layered(), backward) {
            (false, _) => Pass::Step,
            (true, false) => Pass::Forward,
            (true, true) => Pass::Backward,
        }
    }

    pub fn gather(&self, layer: usize, pass: Pass) -> Option<&Group> {
        match pass {
            Pass::Update => self.layers[layer].renew.as_ref(),
            Pass::Forward | Pass::Backward | Pass::Step => self.layers[layer].fetch.as_ref(),
        }
    }

    pub fn reduce(&self, layer: usize) -> Option<&Group> {
        self.layers[layer].reduce.as_ref()
    }

    pub fn hand_over(&self, layer: usize) -> Option<&Group> {
        self.layers[layer].hand_over.as_ref()
    }

    /// The devices that have samples of a group whose batch norm takes them together, where they are several.
    pub fn exchange(&self, layer: usize, group: usize) -> Option<Group> {
        let norm = self.chain.batch_norm(layer)?;
        let devices: Vec<usize> = match norm.group {
            None => self.shares(layer).iter().map(|share| share.device).collect(),
            Some(size) => {
                let samples = Samples::new(group * size..(group + 1) * size);
                self.shares_of(layer, samples).iter().map(|share| share.device).collect()
            }
        };
        let group = Group::new(Vec::new(), devices, Tier::Device);
        (group.devices.len() > 1).then_some(group)
    }

    /// What becomes of a device's copy of a tensor; none where it has none.
    pub fn residence(&self, tensor: usize, device: usize) -> Option<Residence> {
        self.tensors[tensor].residence(device)
    }

    /// The parts of a tensor's optimizer state that a device serves.
    pub fn held(&self, tensor: usize, device: usize) -> &[Held] {
        of_device(&self.tensors[tensor].optimizer, device)
    }

    /// The parts of a tensor's gradient sum that a device serves.
    pub fn summed(&self, tensor: usize, device: usize) -> &[Held] {
        let TensorLayout { gradient, optimizer, .. } = &self.tensors[tensor];
        of_device(gradient.as_ref().unwrap_or(optimizer), device)
    }

    /// Those parts of its optimizer state there whose gradient was added up in another place.
    pub fn handed(&self, tensor: usize, device: usize) -> &[Held] {
        of_device(&self.tensors[tensor].handed, device)
    }

    /// The same of all devices.
    pub(crate) fn all_handed(&self, tensor: usize) -> &[Held] {
        &self.tensors[tensor].handed
    }

    /// Layers that use a tensor, in chain order.
    pub fn users(&self, tensor: usize) -> &[usize] {
        &self.tensors[tensor].users
    }

    /// Elements of a tensor's gradient sum.
    pub fn gradient_elements(&self, tensor: usize) -> usize {
        self.tensors[tensor].gradient_elements
    }

    /// Elements of the copy that layers compute with; none where they compute with the parameter itself.
    pub fn copy_elements(&self, tensor: usize) -> Option<usize> {
        self.tensors[tensor].copy_elements
    }

    /// Whether all of a tensor's state lies in the device's own memory.
    pub fn holds_whole(&self, tensor: usize, device: usize) -> bool {
        self.tensors[tensor].is_whole(device)
    }

    /// Whether all of a tensor's gradient sum does: layers there add to it in its place.
    pub fn sums_whole(&self, tensor: usize, device: usize) -> bool {
        self.tensors[tensor].whole_gradient.binary_search(&device).is_ok()
    }

    /// Devices that compute a layer.
    pub fn computing(&self, layer: usize) -> impl Iterator<Item = usize> + '_ {
        self.plan.layers[layer].compute.iter().filter(|c| !c.micro_batches.is_empty()).map(|c| c.device)
    }

    fn fetch(&self, layer: usize) -> Option<Group> {
        let mut computing: Vec<usize> = self.computing(layer).collect();
        computing.sort_unstable();
        self.brought(&self.layers[layer].tensors, |device, residence| {
            residence == Residence::Fetched && computing.binary_search(&device).is_ok()
        })
    }

    fn renew(&self, layer: usize) -> Option<Group> {
        self.brought(&self.layers[layer].owned, |_, residence| residence == Residence::Resident)
    }

    /// Who takes part where some devices get whole tensors: those that lack a part of one, and one holder of each slice.
    fn brought(&self, tensors: &[usize], wants: impl Fn(usize, Residence) -> bool) -> Option<Group> {
        let lacking = |tensor: &TensorLayout| -> Vec<usize> {
            let lacks = |device: usize, residence| wants(device, residence) && !tensor.is_whole(device);
            let copies = tensor.copies.iter().filter(|(device, residence)| lacks(*device, *residence));
            copies.map(|(device, _)| *device).collect()
        };
        let wanted: Vec<(usize, Vec<usize>)> =
            tensors.iter().map(|tensor| (*tensor, lacking(&self.tensors[*tensor]))).collect();
        let mut receivers: Vec<usize> = wanted.iter().flat_map(|(_, devices)| devices).copied().collect();
        receivers.sort_unstable();
        receivers.dedup();
        let (mut givers, mut tier) = (Vec::new(), Tier::Device);
        for (tensor, _) in wanted.iter().filter(|(_, devices)| !devices.is_empty()) {
            for held in self.givers(*tensor, &receivers) {
                givers.push(held.holder.device());
                tier = tier.max(held.holder.tier());
            }
        }
        (!receivers.is_empty()).then(|| Group::new(givers, receivers, tier))
    }

    fn reduction(&self, layer: usize) -> Option<Group> {
        let (mut devices, mut receivers, mut tier) = (Vec::new(), Vec::new(), Tier::Device);
        for tensor in self.layers[layer].owned.iter().filter(|tensor| self.is_reduced(**tensor)) {
            let held = &self.plan.tensors[*tensor].gradient;
            devices.extend(self.adding(*tensor));
            receivers.extend(held.iter().map(|held| held.holder.device()));
            tier = held.iter().map(|held| held.holder.tier()).fold(tier, Tier::max);
        }
        (!receivers.is_empty()).then(|| Group::new(devices, receivers, tier))
    }

    fn handing_over(&self, layer: usize) -> Option<Group> {
        let (mut givers, mut receivers, mut tier) = (Vec::new(), Vec::new(), Tier::Device);
        for tensor in &self.layers[layer].owned {
            let handed = self.all_handed(*tensor);
            receivers.extend(handed.iter().map(|held| held.holder.device()));
            givers.extend(self.handed_parts_of(*tensor).iter().map(|part| part.device));
            if !handed.is_empty() {
                let places = handed.iter().chain(&self.plan.tensors[*tensor].gradient);
                tier = places.map(|held| held.holder.tier()).fold(tier, Tier::max);
            }
        }
        (!receivers.is_empty()).then(|| Group::new(givers, receivers, tier))
    }

    /// Devices whose layers add to a tensor's gradient, in order.
    fn adding(&self, tensor: usize) -> Vec<usize> {
        let users = self.tensors[tensor].users.iter();
        let mut from: Vec<usize> = users.flat_map(|user| self.computing(*user)).collect();
        from.sort_unstable();
        from.dedup();
        from
    }

    /// Whether a tensor's gradient is added up over devices or memories. Where one device computes all and has all in
    /// its own memory, nothing moves.
    pub fn is_reduced(&self, tensor: usize) -> bool {
        let (from, held) = (self.adding(tensor), &self.plan.tensors[tensor].gradient);
        let alone = from.len() == 1
            && self.tensors[tensor].whole_gradient == from
            && held.iter().all(|held| held.holder == Holder::Device(from[0]));
        !alone
    }

    fn find_members(&self) -> Vec<usize> {
        let mut works = vec![false; self.plan.devices.len()];
        for layer in 0..self.layers.len() {
            self.computing(layer).for_each(|device| works[device] = true);
        }
        for row in &self.plan.tensors {
            let held = row.optimizer.iter().chain(&row.gradient);
            held.for_each(|held| works[held.holder.device()] = true);
        }
        (0..works.len()).filter(|device| works[*device]).collect()
    }
}

fn shares(plan: &Plan, layer: usize) -> Vec<Share> {
    let rows = plan.layers[layer].compute.iter();
    let mut shares: Vec<Share> = rows
        .flat_map(|compute| {
            let (device, activations) = (compute.device, compute.activations);
            compute.micro_batches.iter().map(move |samples| Share { samples: *samples, device, activations })
        })
        .collect();
    shares.sort_unstable_by_key(|share| share.samples);
    shares
}

fn tensors(chain: &Chain, layer: usize) -> Vec<usize> {
    let mut tensors: Vec<usize> = chain.layers[layer].tensors.iter().map(|(_, tensor)| *tensor).collect();
    tensors.sort_unstable();
    tensors.dedup();
    tensors
}

fn by_device(held: &[Held]) -> Vec<Held> {
    let mut held = held.to_vec();
    held.sort_by_key(|held| (held.holder.device(), held.slice));
    held
}

/// Of slices by device, those of one.
fn of_device(held: &[Held], device: usize) -> &[Held] {
    let first = held.partition_point(|held| held.holder.device() < device);
    let end = held.partition_point(|held| held.holder.device() <= device);
    &held[first..end]
}

/// The optimizer's slices whose gradient is not added up just where they are. What a device has whole in its own memory
/// is one tensor there, however the table cuts it, and so is a whole gradient, which its layers add to.
fn handed(optimizer: &[Held], sums: &[Held], whole: &[usize], whole_gradient: &[usize]) -> Vec<Held> {
    let places: HashSet<(Holder, Slice)> = sums.iter().map(|held| (held.holder, held.slice)).collect();
    let in_place = |held: &Held| {
        let whole_there = |devices: &[usize]| match held.holder {
            Holder::Device(device) => devices.binary_search(&device).is_ok(),
            Holder::Host(_) | Holder::Disk(_) => false,
        };
        match (whole_there(whole), whole_there(whole_gradient)) {
            (false, false) => places.contains(&(held.holder, held.slice)),
            (parameters, gradient) => parameters && gradient,
        }
    };
    optimizer.iter().filter(|held| !in_place(held)).cloned().collect()
}

/// Devices whose own memory has all of a tensor, in order.
fn whole_at(held: &[Held], elements: usize) -> Vec<usize> {
    let mut here: BTreeMap<usize, usize> = BTreeMap::new();
    for held in held {
        if let Holder::Device(device) = held.holder {
            *here.entry(device).or_default() += held.slice.count();
        }
    }
    here.into_iter().filter(|(_, count)| *count == elements).map(|(device, _)| device).collect()
}
