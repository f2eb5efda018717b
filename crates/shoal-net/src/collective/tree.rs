//! The tree, for small buffers: member 0 is the root, and place p's children are p + 1, p + 2, p + 4, … up to the lowest
//! bit of p, so that below each stands a run of places. Everything fits into what is sent without being asked for.

use std::ops::Range;

use super::form::{self, AsF32, Form};
use super::{Group, Part};
use crate::error::Result;
use crate::link::Nothing;

/// One edge of the tree: a place, and the run of places at and below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Branch {
    pub place: usize,
    pub below: Range<usize>,
}

/// Whom a place exchanges messages with.
pub fn neighbours(place: usize, size: usize) -> impl Iterator<Item = usize> {
    branches(place, size).chain(above(place, size)).map(|edge| edge.place)
}

fn children(group: &Group) -> impl DoubleEndedIterator<Item = Branch> {
    branches(group.place, group.size())
}

fn parent(group: &Group) -> Option<Branch> {
    above(group.place, group.size())
}

/// The children of a place among so many, nearest first.
pub fn branches(place: usize, size: usize) -> impl DoubleEndedIterator<Item = Branch> {
    let strides: Vec<usize> =
        (0..).map(|bit| 1 << bit).take_while(|stride| *stride < size && place & stride == 0).collect();
    strides.into_iter().filter(move |stride| place + stride < size).map(move |stride| {
        let child = place + stride;
        Branch { place: child, below: child..(child + stride).min(size) }
    })
}

/// The parent of a place, and the run of places that is its own; none for the root.
fn above(place: usize, size: usize) -> Option<Branch> {
    if place == 0 {
        return None;
    }
    let stride = place & place.wrapping_neg();
    Some(Branch { place: place - stride, below: place..(place + stride).min(size) })
}

/// The root's slices become the sums over all members.
pub fn reduce(group: &Group, buffer: &mut [f32]) -> Result<()> {
    let all = 0..group.size();
    for child in children(group) {
        receive::<AsF32>(group, child.place, &all, Part::Up, buffer, |incoming, items| {
            form::add(incoming, items, &mut Nothing)
        })?;
    }
    match parent(group) {
        Some(parent) => send(group, parent.place, &all, Part::Up, &AsF32, buffer),
        None => Ok(()),
    }
}

/// The root gets every member's slice.
pub fn gather<F: Form>(group: &Group, form: &F, buffer: &mut [F::Item]) -> Result<()> {
    for child in children(group) {
        receive::<F>(group, child.place, &child.below, Part::Up, buffer, |incoming, items| {
            form.read(incoming, items, &mut Nothing)
        })?;
    }
    match parent(group) {
        Some(parent) => send(group, parent.place, &parent.below, Part::Up, form, buffer),
        None => Ok(()),
    }
}

/// Everyone gets the root's slices.
pub fn broadcast<F: Form>(group: &Group, form: &F, buffer: &mut [F::Item]) -> Result<()> {
    let all = 0..group.size();
    if let Some(parent) = parent(group) {
        receive::<F>(group, parent.place, &all, Part::Down, buffer, |incoming, items| {
            form.read(incoming, items, &mut Nothing)
        })?;
    }
    // The farthest first: it has the most below it.
    children(group).rev().try_for_each(|child| send(group, child.place, &all, Part::Down, form, buffer))
}

/// Every member gets its slice from the root.
pub fn scatter(group: &Group, buffer: &mut [f32]) -> Result<()> {
    if let Some(parent) = parent(group) {
        let (place, below) = (parent.place, &parent.below);
        receive::<AsF32>(group, place, below, Part::Down, buffer, |incoming, items| {
            AsF32.read(incoming, items, &mut Nothing)
        })?;
    }
    children(group)
        .rev()
        .try_for_each(|child| send(group, child.place, &child.below, Part::Down, &AsF32, buffer))
}

fn wire_bytes<F: Form>(group: &Group, places: &Range<usize>) -> usize {
    group.slices[places.clone()].iter().map(ExactSizeIterator::len).sum::<usize>() * F::ITEM_BYTES
}

/// The slices of these places, one after the other; nothing at all where they are empty.
fn send<F: Form>(
    group: &Group,
    to: usize,
    places: &Range<usize>,
    part: Part,
    form: &F,
    buffer: &[F::Item],
) -> Result<()> {
    let bytes = wire_bytes::<F>(group, places);
    if bytes == 0 {
        return Ok(());
    }
    let mut outgoing = group.fabric.outgoing(group.members[to], group.tag(part), bytes)?;
    group.slices[places.clone()]
        .iter()
        .try_for_each(|slice| form.write(&mut outgoing, &buffer[slice.clone()]))
}

fn receive<F: Form>(
    group: &Group,
    from: usize,
    places: &Range<usize>,
    part: Part,
    buffer: &mut [F::Item],
    take: impl Fn(&mut crate::fabric::Incoming, &mut [F::Item]) -> Result<()>,
) -> Result<()> {
    let bytes = wire_bytes::<F>(group, places);
    if bytes == 0 {
        return Ok(());
    }
    let mut incoming = group.fabric.incoming(group.members[from], group.tag(part), bytes)?;
    group.slices[places.clone()].iter().try_for_each(|slice| take(&mut incoming, &mut buffer[slice.clone()]))
}
