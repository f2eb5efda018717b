//! Collectives over some of a fabric's workers: each member passes the same sorted list of ranks, the same slices and
//! the same tag. Slices are ranges of the buffer, one for each member, ascending; they may be of any length, zero too,
//! and may leave gaps, which stay as they are.
//!
//! - `ring`: large buffers. Each member talks to its two neighbours only, and everything it sends in one collective is
//!   one message. Chunks are passed on as soon as they have been added to, so that a slice much larger than the others
//!   still keeps all links busy.
//! - `tree`: small buffers, where the number of exchanges counts and not the bytes.
//! - `pairwise`: sums in bf16 on the wire. Every member sends its share straight to the slice's owner, who adds up in
//!   f32: nothing but the shares is rounded, where a ring would round every partial sum.
//!
//! Whatever the way, additions happen in an order that depends on members and slices alone: same inputs, same bits, and
//! every member ends with the same bits.

mod form;
mod pairwise;
mod ring;
mod route;
mod tree;

use std::ops::Range;

use crate::error::{Error, Result};
use crate::fabric::{Fabric, Tag};
use form::{AsBytes, AsF32, Form, HalvedF32};
use route::DIRECT_MAX;

pub use route::Route;
pub use tree::{Branch, branches};

/// What numbers look like on the wire. Sums are made in f32 whatever it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    F32,
    /// Half the bytes. What is gathered is rounded to bf16 at its owner too, so that all have the same.
    Bf16,
}

/// Buffers up to this go by the tree, where links are not so slow that it is less. It must not pass what is sent without
/// being asked for.
pub const TREE_BYTES_MAX: usize = 16 << 10;

/// Every member's slice comes to all.
pub fn all_gather(
    fabric: &Fabric,
    members: &[usize],
    slices: &[Range<usize>],
    buffer: &mut [f32],
    wire: Wire,
    tag: Tag,
) -> Result<()> {
    let group = Group::new(fabric, members, slices, buffer.len(), tag)?;
    match wire {
        Wire::F32 => group.gather(&AsF32, buffer),
        Wire::Bf16 => {
            form::round(&mut buffer[slices[group.place].clone()]);
            group.gather(&HalvedF32, buffer)
        }
    }
}

/// Every member's slice of bytes comes to all.
pub fn all_gather_bytes(
    fabric: &Fabric,
    members: &[usize],
    slices: &[Range<usize>],
    buffer: &mut [u8],
    tag: Tag,
) -> Result<()> {
    Group::new(fabric, members, slices, buffer.len(), tag)?.gather(&AsBytes, buffer)
}

/// Every member's own slice becomes the sum over all members. What the other slices then hold is undefined.
pub fn reduce_scatter(
    fabric: &Fabric,
    members: &[usize],
    slices: &[Range<usize>],
    buffer: &mut [f32],
    wire: Wire,
    tag: Tag,
) -> Result<()> {
    let group = Group::new(fabric, members, slices, buffer.len(), tag)?;
    let bytes = slices.iter().map(ExactSizeIterator::len).sum::<usize>() * AsF32::ITEM_BYTES;
    match Route::of_adding(members.len(), bytes, wire, fabric.tree_bytes_max()) {
        Route::Pairwise => pairwise::reduce_scatter(&group, buffer),
        Route::Tree => tree::reduce(&group, buffer).and_then(|()| tree::scatter(&group, buffer)),
        Route::Ring | Route::Direct => {
            ring::run(&group, &AsF32, buffer, ring::Way { reduce: Some(form::add), gather: false })
        }
    }
}

/// The whole buffer becomes the sum over all members.
pub fn all_reduce(
    fabric: &Fabric,
    members: &[usize],
    buffer: &mut [f32],
    wire: Wire,
    tag: Tag,
) -> Result<()> {
    let slices = even(buffer.len(), members.len());
    let group = Group::new(fabric, members, &slices, buffer.len(), tag)?;
    match wire {
        Wire::Bf16 => {
            pairwise::reduce_scatter(&group, buffer)?;
            form::round(&mut buffer[slices[group.place].clone()]);
            group.gather(&HalvedF32, buffer)
        }
        Wire::F32 if group.is_small::<AsF32>() => {
            tree::reduce(&group, buffer).and_then(|()| tree::broadcast(&group, &AsF32, buffer))
        }
        Wire::F32 => ring::run(&group, &AsF32, buffer, ring::Way { reduce: Some(form::add), gather: true }),
    }
}

/// A few numbers become their sums over all members, added in the order of members: for losses, norms and counts.
pub fn sum_f64(fabric: &Fabric, members: &[usize], values: &mut [f64], tag: Tag) -> Result<()> {
    let slices = vec![0..0; members.len()];
    let group = Group::new(fabric, members, &slices, 0, tag)?;
    let bytes = size_of_val(values);
    if bytes > crate::link::EAGER_MESSAGE_BYTES_MAX {
        return Err(group.wrong(format!("{} numbers are not a few", values.len())));
    }
    if Route::of_numbers(members.len()) == Route::Tree {
        return sum_by_tree(fabric, members, values, tag);
    }
    let tag = tag.part(Part::Sum as u64);
    // Everything is asked for before anything is sent, so that nobody waits for somebody who waits for it.
    let mut incoming = Vec::with_capacity(members.len());
    for (place, &member) in members.iter().enumerate() {
        incoming.push(if place == group.place { None } else { Some(fabric.incoming(member, tag, bytes)?) });
    }
    for &member in members.iter().filter(|member| **member != fabric.rank()) {
        fabric.send(member, tag, bytemuck::cast_slice(values))?;
    }
    let mut sums = vec![0.0; values.len()];
    let mut theirs = vec![0.0f64; values.len()];
    for incoming in incoming {
        match incoming {
            Some(mut incoming) => incoming.read(bytemuck::cast_slice_mut(&mut theirs))?,
            None => theirs.copy_from_slice(values),
        }
        sums.iter_mut().zip(&theirs).for_each(|(sum, value)| *sum += value);
    }
    values.copy_from_slice(&sums);
    Ok(())
}

/// Whom a member exchanges messages with in whatever collective these take part in, but for sums in bf16, which pass between
/// any two. Whoever is among a worker's has that worker among its own.
pub fn partners(members: &[usize], rank: usize) -> Vec<usize> {
    let size = members.len();
    let Ok(place) = members.binary_search(&rank) else { return Vec::new() };
    if size <= DIRECT_MAX {
        return members.iter().copied().filter(|member| *member != rank).collect();
    }
    let ring = [(place + 1) % size, (place + size - 1) % size];
    ring.into_iter().chain(tree::neighbours(place, size)).map(|place| members[place]).collect()
}

/// Everyone gets everyone's numbers up and down the tree, and adds them up itself.
fn sum_by_tree(fabric: &Fabric, members: &[usize], values: &mut [f64], tag: Tag) -> Result<()> {
    let own_bytes = size_of_val(values);
    let slices: Vec<Range<usize>> =
        (0..members.len()).map(|place| place * own_bytes..(place + 1) * own_bytes).collect();
    let mut all = vec![0.0; members.len() * values.len()];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut all);
    let group = Group::new(fabric, members, &slices, bytes.len(), tag)?;
    bytes[slices[group.place].clone()].copy_from_slice(bytemuck::cast_slice(values));
    tree::gather(&group, &AsBytes, bytes)?;
    tree::broadcast(&group, &AsBytes, bytes)?;
    values.fill(0.0);
    for theirs in all.chunks_exact(values.len().max(1)) {
        values.iter_mut().zip(theirs).for_each(|(sum, value)| *sum += value);
    }
    Ok(())
}

/// Slices of a buffer that differ by one element at most.
pub fn even(length: usize, members: usize) -> Vec<Range<usize>> {
    (0..members).map(|place| length * place / members..length * (place + 1) / members).collect()
}

/// The messages of a collective that may pass between the same two workers in the same direction.
enum Part {
    Ring,
    Up,
    Down,
    Pairwise,
    Sum,
}

/// Who takes part in one collective, checked.
struct Group<'a> {
    fabric: &'a Fabric,
    members: &'a [usize],
    slices: &'a [Range<usize>],
    /// This worker's place among the members.
    place: usize,
    tag: Tag,
}

impl<'a> Group<'a> {
    fn new(
        fabric: &'a Fabric,
        members: &'a [usize],
        slices: &'a [Range<usize>],
        length: usize,
        tag: Tag,
    ) -> Result<Group<'a>> {
        let wrong = |what: String| Error::Collective { tag, what };
        if !members.is_sorted_by(|a, b| a < b) {
            return Err(wrong(format!("the members {members:?} are not ascending")));
        }
        if let Some(&member) = members.last()
            && member >= fabric.size()
        {
            return Err(wrong(format!("there is no worker {member} among {}", fabric.size())));
        }
        let Ok(place) = members.binary_search(&fabric.rank()) else {
            return Err(wrong(format!("worker {} is not among the members {members:?}", fabric.rank())));
        };
        if slices.len() != members.len() {
            return Err(wrong(format!("{} slices for {} members", slices.len(), members.len())));
        }
        let mut end = 0;
        for slice in slices {
            if slice.start < end || slice.end < slice.start || slice.end > length {
                return Err(wrong(format!(
                    "slice {slice:?} is out of order or outside of {length} elements"
                )));
            }
            end = slice.end;
        }
        Ok(Group { fabric, members, slices, place, tag })
    }

    fn wrong(&self, what: String) -> Error {
        Error::Collective { tag: self.tag, what }
    }

    /// What ended the fabric, for a half of a collective that finds the other gone.
    fn failure(&self) -> Result<()> {
        match self.fabric.failure() {
            Some(failure) => Err(failure),
            None => Err(self.wrong("one half of it ended before the other".to_owned())),
        }
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    /// The place so many steps after this one's, around the ring.
    fn after(&self, steps: usize) -> usize {
        (self.place + steps) % self.size()
    }

    /// The place so many steps before this one's, around the ring.
    fn before(&self, steps: usize) -> usize {
        (self.place + self.size() - steps % self.size()) % self.size()
    }

    fn tag(&self, part: Part) -> Tag {
        self.tag.part(part as u64)
    }

    /// Whether to go by the tree.
    fn is_small<F: Form>(&self) -> bool {
        let bytes = self.slices.iter().map(ExactSizeIterator::len).sum::<usize>() * F::ITEM_BYTES;
        Route::of_gathering(self.size(), bytes, self.fabric.tree_bytes_max()) == Route::Tree
    }

    fn gather<F: Form>(&self, form: &F, buffer: &mut [F::Item]) -> Result<()> {
        if self.is_small::<F>() {
            return tree::gather(self, form, buffer).and_then(|()| tree::broadcast(self, form, buffer));
        }
        ring::run(self, form, buffer, ring::Way { reduce: None, gather: true })
    }
}
