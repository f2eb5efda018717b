//! The difference of two tables: what must move so that state which lies as one says comes to lie as the other does.
//! Morphing, resuming on another fleet, importing and exporting are all this. Holders are told apart by their devices'
//! names, since a device's number may differ from table to table.

use std::collections::{BTreeMap, HashMap};

use crate::table::{Held, Holder, Plan, Residence, Samples, Slice, TensorRow, Tier};

/// A holder by name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    pub device: String,
    pub tier: Tier,
}

/// A slice of a tensor's state (parameters and all that the optimizer keeps for them) that moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    pub tensor: usize,
    pub slice: Slice,
    pub from: Place,
    pub to: Place,
}

/// What must move, and what nobody has any more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    pub moves: Vec<Move>,
    /// Slices of tensors without a holder that is still there: they are only in checkpoints.
    pub lost: Vec<(usize, Slice)>,
}

impl Difference {
    /// From one table to another of the same model, where of the first only these devices are still there.
    pub fn new(before: &Plan, after: &Plan, is_there: impl Fn(&str) -> bool) -> Difference {
        let mut difference = Difference::default();
        let mut senders = Senders::default();
        for (tensor, (old, new)) in before.tensors.iter().zip(&after.tensors).enumerate() {
            let sources = sources(before, &old.optimizer, &is_there);
            let mut lost = Vec::new();
            for held in &new.optimizer {
                let to = place(after, held.holder);
                for (slice, holders) in overlaps(&sources, held.slice) {
                    if holders.contains(&to) {
                        continue;
                    }
                    match senders.choose(slice, holders, &to) {
                        None => lost.push((tensor, slice)),
                        Some(from) => difference.moves.push(Move { tensor, slice, from, to: to.clone() }),
                    }
                }
            }
            lost.sort_unstable();
            lost.dedup();
            difference.lost.extend(lost);
        }
        difference
    }

    /// Parameters alone, for copies to compute with that stay on a device of the second table: what of them neither lies there
    /// in the first already nor comes with the state.
    pub fn copies(before: &Plan, after: &Plan, is_there: impl Fn(&str) -> bool) -> Vec<Move> {
        let (mut moves, mut senders) = (Vec::new(), Senders::default());
        for (tensor, (old, new)) in before.tensors.iter().zip(&after.tensors).enumerate() {
            let sources = sources(before, &old.optimizer, &is_there);
            let resident = new.compute_copies.iter().filter(|copy| copy.residence == Residence::Resident);
            for device in resident.map(|copy| copy.device) {
                let (to, kept) = (place(after, Holder::Device(device)), kept(new, device));
                let is_here = |holder: &Place| holder.device == to.device;
                for (part, holders) in sources.iter().filter(|(_, holders)| !holders.iter().any(is_here)) {
                    for slice in without(*part, &kept) {
                        // What nobody has is lost with the state.
                        let from = senders.choose(slice, holders, &to);
                        moves.extend(from.map(|from| Move { tensor, slice, from, to: to.clone() }));
                    }
                }
            }
        }
        moves
    }

    /// Elements that each place receives, and that each sends.
    pub fn traffic(&self) -> BTreeMap<Place, (u64, u64)> {
        let mut traffic: BTreeMap<Place, (u64, u64)> = BTreeMap::new();
        for Move { slice, from, to, .. } in &self.moves {
            traffic.entry(to.clone()).or_default().0 += slice.count() as u64;
            traffic.entry(from.clone()).or_default().1 += slice.count() as u64;
        }
        traffic
    }
}

/// What each place has been asked to send.
#[derive(Default)]
struct Senders(HashMap<Place, u64>);

impl Senders {
    /// Who sends a slice: another memory of the same device, or else whoever sends least so far.
    fn choose(&mut self, slice: Slice, holders: &[Place], to: &Place) -> Option<Place> {
        let load = |from: &&Place| (from.device != to.device, self.0.get(*from).copied().unwrap_or_default());
        let from = holders.iter().min_by_key(load)?.clone();
        *self.0.entry(from.clone()).or_default() += slice.count() as u64;
        Some(from)
    }
}

/// What a device keeps of a tensor's state, in order.
fn kept(row: &TensorRow, device: usize) -> Vec<Slice> {
    let own = row.optimizer.iter().filter(|held| held.holder.device() == device);
    let mut slices: Vec<Slice> = own.map(|held| held.slice).collect();
    slices.sort_unstable();
    slices
}

/// What is left of a slice without others, which are in order.
fn without(slice: Slice, others: &[Slice]) -> Vec<Slice> {
    let (mut left, mut start) = (Vec::new(), slice.start);
    for other in others.iter().filter(|other| other.start < slice.end && other.end > slice.start) {
        if other.start > start {
            left.push(Samples { start, end: other.start });
        }
        start = start.max(other.end);
    }
    if start < slice.end {
        left.push(Samples { start, end: slice.end });
    }
    left
}

fn place(plan: &Plan, holder: Holder) -> Place {
    Place { device: plan.devices[holder.device()].name.clone(), tier: holder.tier() }
}

/// A tensor cut wherever a holder's slice begins or ends, with those that have each part and are still there.
fn sources(plan: &Plan, held: &[Held], is_there: &impl Fn(&str) -> bool) -> Vec<(Slice, Vec<Place>)> {
    let mut cuts: Vec<usize> = held.iter().flat_map(|held| [held.slice.start, held.slice.end]).collect();
    cuts.sort_unstable();
    cuts.dedup();
    let mut parts: Vec<(Slice, Vec<Place>)> =
        cuts.windows(2).map(|pair| (Samples { start: pair[0], end: pair[1] }, Vec::new())).collect();
    for held in held {
        let place = place(plan, held.holder);
        if is_there(&place.device) {
            let first = parts.partition_point(|(slice, _)| slice.start < held.slice.start);
            for (slice, holders) in &mut parts[first..] {
                if slice.end > held.slice.end {
                    break;
                }
                holders.push(place.clone());
            }
        }
    }
    parts
}

/// The parts that a slice is made of.
fn overlaps(parts: &[(Slice, Vec<Place>)], slice: Slice) -> impl Iterator<Item = (Slice, &Vec<Place>)> + '_ {
    let first = parts.partition_point(|(part, _)| part.end <= slice.start);
    parts[first..].iter().take_while(move |(part, _)| part.start < slice.end).map(move |(part, holders)| {
        let (start, end) = (part.start.max(slice.start), part.end.min(slice.end));
        (Samples { start, end }, holders)
    })
}
