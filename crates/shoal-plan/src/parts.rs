//! Which elements of which tensors pass between devices where a layer's parameters are gathered, or its gradients added
//! up and handed over: each element once, in runs that stand in the order of the devices they come from or go to. So
//! every device's share of a movement is one piece of one buffer, however the table has cut the tensors.

use crate::layout::Layout;
use crate::program::Pass;
use crate::table::{Held, Residence, Slice, Tier};

/// Some of a tensor's elements that a device gives to others: parameters, or sums of gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatheredPart {
    pub device: usize,
    pub tensor: usize,
    pub slice: Slice,
    /// The memory it lies in there.
    pub tier: Tier,
}

/// Some of a tensor's elements whose gradients are added up at a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReducedPart {
    pub device: usize,
    pub tensor: usize,
    pub slice: Slice,
    /// All devices that hold these elements, in order: they get the sum too.
    pub holders: Vec<usize>,
}

impl Layout<'_> {
    /// The tensors of a layer that a gathering may bring.
    fn brought_tensors(&self, layer: usize, pass: Pass) -> &[usize] {
        match pass {
            Pass::Update => self.owned(layer),
            Pass::Forward | Pass::Backward | Pass::Step => self.tensors(layer),
        }
    }

    /// Whether a device gets a tensor by one of the layer's gatherings: it has a copy of that kind, and lacks a part.
    pub fn lacks(&self, layer: usize, pass: Pass, tensor: usize, device: usize) -> bool {
        if self.holds_whole(tensor, device) {
            return false;
        }
        match (pass, self.residence(tensor, device)) {
            (Pass::Update, residence) => residence == Some(Residence::Resident),
            (_, Some(Residence::Fetched)) => self.computing(layer).any(|other| other == device),
            _ => false,
        }
    }

    /// The tensors that a device gets by a gathering.
    pub fn lacking(&self, layer: usize, pass: Pass, device: usize) -> impl Iterator<Item = usize> + '_ {
        let tensors = self.brought_tensors(layer, pass).iter().copied();
        tensors.filter(move |tensor| self.lacks(layer, pass, *tensor, device))
    }

    /// Who gives each slice of a tensor to some devices, in order: the nearest of its holders, if one of them has it itself
    /// that one.
    pub(crate) fn givers(&self, tensor: usize, receivers: &[usize]) -> Vec<&Held> {
        let distance = |held: &Held| {
            let device = held.holder.device();
            (held.holder.tier(), receivers.binary_search(&device).is_err(), device)
        };
        let slices = by_slice(&self.plan.tensors[tensor].optimizer).into_iter();
        let nearest = slices.map(|holders| holders.into_iter().min_by_key(|held| distance(held)));
        nearest.map(|held| held.expect("every slice has a holder")).collect()
    }

    /// What a gathering brings together: every tensor that someone lacks, each slice from the nearest of its holders.
    pub fn gathered_parts(&self, layer: usize, pass: Pass) -> Vec<GatheredPart> {
        let Some(group) = self.gather(layer, pass) else { return Vec::new() };
        let mut parts = Vec::new();
        for tensor in self.brought_tensors(layer, pass) {
            if !group.receivers.iter().any(|device| self.lacks(layer, pass, *tensor, *device)) {
                continue;
            }
            for held in self.givers(*tensor, &group.receivers) {
                let (device, tier) = (held.holder.device(), held.holder.tier());
                parts.push(GatheredPart { device, tensor: *tensor, slice: held.slice, tier });
            }
        }
        parts.sort_by_key(|part| (part.device, part.tensor, part.slice));
        parts
    }

    /// What a layer's reduction adds up: every slice, divided among the devices that hold it.
    pub fn reduced_parts(&self, layer: usize) -> Vec<ReducedPart> {
        let mut parts = Vec::new();
        for tensor in self.owned(layer).iter().filter(|tensor| self.is_reduced(**tensor)) {
            for held in by_slice(&self.plan.tensors[*tensor].gradient) {
                let mut holders: Vec<usize> = held.iter().map(|held| held.holder.device()).collect();
                holders.sort_unstable();
                holders.dedup();
                let Slice { start, end } = held[0].slice;
                let cut = |place: usize| start + (end - start) * place / holders.len();
                for (place, device) in holders.iter().enumerate() {
                    let slice = Slice { start: cut(place), end: cut(place + 1) };
                    if slice.count() > 0 {
                        let holders = holders.clone();
                        parts.push(ReducedPart { device: *device, tensor: *tensor, slice, holders });
                    }
                }
            }
        }
        parts.sort_by_key(|part| (part.device, part.tensor, part.slice));
        parts
    }

    /// What devices give to others where a layer's gradients are handed over: what those have not themselves.
    pub fn handed_parts(&self, layer: usize) -> Vec<GatheredPart> {
        let tensors = self.owned(layer).iter();
        let mut parts: Vec<_> = tensors.flat_map(|tensor| self.handed_parts_of(*tensor)).collect();
        parts.sort_by_key(|part| (part.device, part.tensor, part.slice));
        parts
    }

    /// Of one tensor: slices may be cut differently on both sides, so a part is what lies in one of each.
    pub(crate) fn handed_parts_of(&self, tensor: usize) -> Vec<GatheredPart> {
        let handed = self.all_handed(tensor);
        let mut parts = Vec::new();
        if handed.is_empty() {
            return parts;
        }
        for holders in by_slice(&self.plan.tensors[tensor].gradient) {
            let lacks = |held: &&Held| {
                let device = held.holder.device();
                holders.iter().all(|holder| holder.holder.device() != device)
            };
            let sum = holders[0].slice;
            let wanted: Vec<Slice> =
                handed.iter().filter(lacks).filter_map(|held| common(held.slice, sum)).collect();
            let mut cuts: Vec<usize> = wanted.iter().flat_map(|slice| [slice.start, slice.end]).collect();
            cuts.sort_unstable();
            cuts.dedup();
            let (tier, device) = nearest(&holders);
            for cut in cuts.windows(2) {
                let slice = Slice { start: cut[0], end: cut[1] };
                if wanted.iter().any(|wanted| common(*wanted, slice).is_some()) {
                    parts.push(GatheredPart { device, tensor, slice, tier });
                }
            }
        }
        parts
    }

    /// The slices of a tensor's gradient whose squares a device adds to the norm: each is counted by its first holder.
    pub fn normed_slices(&self, tensor: usize, device: usize) -> Vec<Held> {
        let first = by_slice(&self.plan.tensors[tensor].gradient).into_iter().map(|held| {
            let first = held.iter().min_by_key(|held| (held.holder.device(), held.holder.tier()));
            (*first.expect("every slice has a holder")).clone()
        });
        first.filter(|held| held.holder.device() == device).collect()
    }
}

/// The nearest of a slice's holders: its memory and its device.
fn nearest(holders: &[&Held]) -> (Tier, usize) {
    let places = holders.iter().map(|held| (held.holder.tier(), held.holder.device()));
    places.min().expect("every slice has a holder")
}

/// What lies in both of two slices.
pub fn common(a: Slice, b: Slice) -> Option<Slice> {
    let slice = Slice { start: a.start.max(b.start), end: a.end.min(b.end) };
    (slice.start < slice.end).then_some(slice)
}

/// The holders of each slice, slice after slice.
fn by_slice(held: &[Held]) -> Vec<Vec<&Held>> {
    let mut sorted: Vec<&Held> = held.iter().collect();
    sorted.sort_by_key(|held| (held.slice, held.holder));
    let mut slices: Vec<Vec<&Held>> = Vec::new();
    for held in sorted {
        match slices.last_mut() {
            Some(slice) if slice[0].slice == held.slice => slice.push(held),
            _ => slices.push(vec![held]),
        }
    }
    slices
}
