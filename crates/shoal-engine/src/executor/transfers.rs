//! What movements do on threads of their own: bytes between memories and over the fabric. They have what they were given,
//! and know nothing of the step.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use shoal_kernels::random::fold;
use shoal_kernels::{CpuDevice, Device, Element, Mark, Tensor};
use shoal_net::{Fabric, Tag, collective};
use shoal_nn::{GradientSum, GroupShare};
use shoal_plan::{GatheredPart, ReducedPart, Slice, Tier};

use crate::disk::DiskSlice;
use crate::error::Result;
use crate::state::{Tiers, zero_rest};

/// The members of a movement and the way to them; nobody else where a device acts alone.
#[derive(Clone)]
pub(super) struct Circle {
    pub(super) fabric: Option<Arc<Fabric>>,
    pub(super) members: Vec<usize>,
    pub(super) tag: Tag,
}

impl Circle {
    /// The fabric, where there are others.
    pub(super) fn others(&self) -> Option<&Fabric> {
        self.fabric.as_deref().filter(|_| self.members.len() > 1)
    }

    fn part(&self, number: u64) -> Tag {
        Tag(self.tag.0 ^ u128::from(fold(number + 1, 1)))
    }
}

/// Where each member's run lies in a buffer made of parts in the order of their devices.
fn runs<'a>(
    members: &[usize],
    parts: impl Iterator<Item = (usize, usize)> + Clone + 'a,
) -> Vec<Range<usize>> {
    let mut end = 0;
    let run = |member: &usize| {
        let start = end;
        end += parts.clone().filter(|(device, _)| device == member).map(|(_, length)| length).sum::<usize>();
        start..end
    };
    members.iter().map(run).collect()
}

pub(super) fn send(
    device: &dyn Device,
    after: &Mark,
    fabric: &Fabric,
    to: usize,
    tag: Tag,
    tensor: Tensor,
) -> Result {
    let bytes = device.host_bytes(after, &tensor, 0..tensor.len())?;
    Ok(fabric.send(to, tag, &bytes)?)
}

pub(super) fn receive(
    device: &dyn Device,
    after: &Mark,
    fabric: &Fabric,
    from: usize,
    tag: Tag,
    mut room: Tensor,
) -> Result<Tensor> {
    let all = 0..room.len();
    if room.is_on_host() {
        // Read from the socket where it is to lie.
        let mut received = Ok(());
        device.write_bytes(after, &mut room, all, &mut |_, out| received = fabric.receive(from, tag, out))?;
        received?;
        return Ok(room);
    }
    // Others' copies go on while this one waits for its message.
    let mut message = vec![0; room.len() * room.element().bytes()];
    fabric.receive(from, tag, &mut message)?;
    device.write_bytes(after, &mut room, all, &mut |at, out| {
        out.copy_from_slice(&message[at..at + out.len()]);
    })?;
    Ok(room)
}

/// Fills pieces with bytes that lie in one place, by the host's threads.
pub(super) fn copied<'a>(host: &'a CpuDevice, bytes: &'a [u8]) -> impl FnMut(usize, &mut [u8]) + 'a {
    |at, out| host.round(&bytes[at..at + out.len()], Element::F32, out)
}

/// What gathered parameters pass: the memories, what the device is to have done before, and the elements they become.
#[derive(Clone, Copy)]
pub(super) struct Way<'a> {
    pub(super) tiers: &'a Tiers,
    pub(super) after: &'a Mark,
    pub(super) element: Element,
}

/// Where parameters that are gathered lie.
pub(super) enum Source {
    Memory(Tier, Tensor, Range<usize>),
    Disk(DiskSlice),
}

impl Source {
    /// Their bytes in fp32, where the host can read them.
    fn bytes(&self, way: Way) -> Result<Cow<'_, [u8]>> {
        match self {
            Source::Memory(tier, tensor, elements) => {
                Ok(way.tiers.of(*tier).host_bytes(way.after, tensor, elements.clone())?)
            }
            Source::Disk(disk) => {
                let mut values = vec![0.0; disk.elements];
                disk.read_parameter(&mut values)?;
                Ok(Cow::Owned(bytemuck::cast_slice(&values).to_vec()))
            }
        }
    }
}

/// Numbers from their bytes, wherever these lie.
fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|word| f32::from_ne_bytes([word[0], word[1], word[2], word[3]])).collect()
}

/// Brings parameters onto the device where nobody else has a part in it: rounded piece by piece on their way.
pub(super) fn fetch(
    way: Way,
    parts: &[GatheredPart],
    sources: &[Source],
    targets: &mut [(usize, Tensor)],
) -> Result {
    let Way { tiers, after, element } = way;
    for (tensor, copy) in targets {
        let mut elements = 0;
        for (part, source) in parts.iter().zip(sources).filter(|(part, _)| part.tensor == *tensor) {
            let bytes = source.bytes(way)?;
            tiers.device.write_bytes(after, copy, part.slice.range(), &mut |at, out| {
                let first = at / element.bytes() * 4;
                let numbers = &bytes[first..first + out.len() / element.bytes() * 4];
                tiers.host.round(numbers, element, out);
            })?;
            elements += part.slice.count();
        }
        zero_rest(&*tiers.device, after, copy, elements)?;
    }
    Ok(())
}

pub(super) fn gather(
    way: Way,
    (fabric, circle): (&Fabric, &Circle),
    me: usize,
    parts: &[GatheredPart],
    sources: Vec<Source>,
    targets: &mut [(usize, Tensor)],
) -> Result {
    let Way { tiers, after, element } = way;
    let size = element.bytes();
    let lengths = parts.iter().map(|part| (part.device, part.slice.count() * size));
    let mut buffer = vec![0u8; lengths.clone().map(|(_, length)| length).sum()];
    // Each part's place in the buffer.
    let mut end = 0;
    let places: Vec<Range<usize>> = lengths
        .clone()
        .map(|(_, length)| {
            end += length;
            end - length..end
        })
        .collect();
    let own = parts.iter().zip(&places).filter(|(part, _)| part.device == me);
    for ((_, place), source) in own.zip(&sources) {
        tiers.host.round(&source.bytes(way)?, element, &mut buffer[place.clone()]);
    }
    // What others may write to from here on is no longer read.
    drop(sources);
    let runs = runs(&circle.members, lengths);
    collective::all_gather_bytes(fabric, &circle.members, &runs, &mut buffer, circle.tag)?;
    for (tensor, copy) in targets {
        let mut elements = 0;
        for (part, place) in parts.iter().zip(&places).filter(|(part, _)| part.tensor == *tensor) {
            let mut fill = copied(&tiers.host, &buffer[place.clone()]);
            tiers.device.write_bytes(after, copy, part.slice.range(), &mut fill)?;
            elements += part.slice.count();
        }
        zero_rest(&*tiers.device, after, copy, elements)?;
    }
    Ok(())
}

/// Where a slice's gradient goes.
pub(super) enum Room {
    Memory(Tensor),
    Disk(DiskSlice),
}

/// A tensor whose gradient is added up.
pub(super) struct Taken {
    pub(super) tensor: usize,
    /// What this device's layers have added up.
    pub(super) sum: Option<GradientSum>,
    /// Whether the sum over all devices is kept in the same place.
    pub(super) keeps_sum: bool,
    /// Its slices' places in the state, their memories and elements, and where their gradients go.
    pub(super) slices: Vec<(usize, Tier, Slice, Room)>,
}

impl Taken {
    /// Whether all that is kept of the sum is in host memory.
    pub(super) fn goes_to_host(&self) -> bool {
        let on_host = |(_, tier, _, room): &(usize, Tier, Slice, Room)| {
            *tier == Tier::Host && matches!(room, Room::Memory(_))
        };
        !self.keeps_sum && self.slices.iter().all(on_host)
    }

    /// Writes a part of the whole sum wherever it is kept here.
    fn write(&mut self, tiers: &Tiers, after: &Mark, slice: Slice, values: &[f32]) -> Result {
        if let Some(sum) = self.sum.as_mut().filter(|_| self.keeps_sum) {
            let mut fill = copied(&tiers.host, bytemuck::cast_slice(values));
            tiers.device.write_bytes(after, &mut sum.sum, slice.range(), &mut fill)?;
            sum.started = true;
        }
        for (_, tier, held, room) in &mut self.slices {
            let (start, end) = (held.start.max(slice.start), held.end.min(slice.end));
            if start >= end {
                continue;
            }
            let values = &values[start - slice.start..end - slice.start];
            match room {
                Room::Disk(disk) => disk.write_gradient(start - held.start, values)?,
                Room::Memory(gradient) => {
                    let mut fill = copied(&tiers.host, bytemuck::cast_slice(values));
                    let elements = start - held.start..end - held.start;
                    tiers.of(*tier).write_bytes(after, gradient, elements, &mut fill)?;
                }
            }
        }
        Ok(())
    }
}

/// Takes gradients to the host where nobody else has a part in them, piece by piece.
pub(super) fn carry(tiers: &Tiers, after: &Mark, parts: &[ReducedPart], taken: &mut [Taken]) -> Result {
    for part in parts {
        let taken = taken.iter_mut().find(|taken| taken.tensor == part.tensor);
        let Some(Taken { sum, slices, .. }) = taken else { continue };
        let sum = sum.as_ref().filter(|sum| sum.started);
        for (_, _, held, room) in slices.iter_mut() {
            let (start, end) = (held.start.max(part.slice.start), held.end.min(part.slice.end));
            let Room::Memory(gradient) = room else { continue };
            if start >= end {
                continue;
            }
            let there = start - held.start..end - held.start;
            let mut written = Ok(());
            tiers.host.write_bytes(&Mark::default(), gradient, there, &mut |_, out| match sum {
                Some(sum) => {
                    written = tiers.device.read_bytes(after, &sum.sum, start..end, &mut |at, bytes| {
                        tiers.host.round(bytes, Element::F32, &mut out[at..at + bytes.len()]);
                    });
                }
                // Whoever added nothing stands with zeros.
                None => out.fill(0),
            })?;
            written?;
        }
    }
    Ok(())
}

pub(super) fn reduce(
    tiers: &Tiers,
    after: &Mark,
    circle: &Circle,
    me: usize,
    parts: &[ReducedPart],
    taken: &mut [Taken],
) -> Result {
    let lengths = parts.iter().map(|part| (part.device, part.slice.count()));
    let mut buffer = vec![0f32; lengths.clone().map(|(_, length)| length).sum()];
    let mut start = 0;
    let mut places = Vec::with_capacity(parts.len());
    for part in parts {
        let place = start..start + part.slice.count();
        start = place.end;
        let own = taken.iter().find(|taken| taken.tensor == part.tensor);
        // Whoever added nothing stands with zeros.
        if let Some(sum) = own.and_then(|taken| taken.sum.as_ref()).filter(|sum| sum.started) {
            let room = bytemuck::cast_slice_mut::<f32, u8>(&mut buffer[place.clone()]);
            tiers.device.read_bytes(after, &sum.sum, part.slice.range(), &mut |at, bytes| {
                tiers.host.round(bytes, Element::F32, &mut room[at..at + bytes.len()]);
            })?;
        }
        places.push(place);
    }
    if let Some(fabric) = circle.others() {
        let runs = runs(&circle.members, lengths);
        let wire = collective::Wire::F32;
        collective::reduce_scatter(fabric, &circle.members, &runs, &mut buffer, wire, circle.tag)?;
        share_sums(fabric, circle, me, parts, &places, &mut buffer)?;
    }
    for (part, place) in parts.iter().zip(&places).filter(|(part, _)| part.holders.contains(&me)) {
        let taken = taken.iter_mut().find(|taken| taken.tensor == part.tensor);
        let taken = taken.expect("whoever holds a slice takes part");
        if taken.keeps_sum && taken.sum.is_none() {
            panic!("a device that has a tensor has its gradient");
        }
        taken.write(tiers, after, part.slice, &buffer[place.clone()])?;
    }
    Ok(())
}

/// Sums of slices that several devices hold, each added up at one of them, to the others.
fn share_sums(
    fabric: &Fabric,
    circle: &Circle,
    me: usize,
    parts: &[ReducedPart],
    places: &[Range<usize>],
    buffer: &mut [f32],
) -> Result {
    let mut circles: Vec<&Vec<usize>> =
        parts.iter().map(|part| &part.holders).filter(|holders| holders.len() > 1).collect();
    circles.sort_unstable();
    circles.dedup();
    for (number, holders) in circles.into_iter().enumerate().filter(|(_, holders)| holders.contains(&me)) {
        let theirs: Vec<(usize, Range<usize>)> = parts
            .iter()
            .zip(places)
            .filter(|(part, _)| part.holders == *holders)
            .map(|(part, place)| (part.device, place.clone()))
            .collect();
        let lengths = theirs.iter().map(|(device, place)| (*device, place.len()));
        let mut shared: Vec<f32> =
            theirs.iter().flat_map(|(_, place)| buffer[place.clone()].iter().copied()).collect();
        let (runs, wire) = (runs(holders, lengths), collective::Wire::F32);
        collective::all_gather(fabric, holders, &runs, &mut shared, wire, circle.part(number as u64))?;
        let mut rest = &shared[..];
        for (_, place) in theirs {
            let (these, after) = rest.split_at(place.len());
            buffer[place].copy_from_slice(these);
            rest = after;
        }
    }
    Ok(())
}

/// Every member's share of a group, in the members' order.
pub(super) fn exchange(circle: &Circle, me: usize, own: GroupShare) -> Result<Vec<GroupShare>> {
    let Some(fabric) = circle.others() else { return Ok(vec![own]) };
    let each = 8 + 4 * own.columns.len();
    let runs: Vec<Range<usize>> =
        (0..circle.members.len()).map(|place| place * each..(place + 1) * each).collect();
    let mut buffer = vec![0u8; each * circle.members.len()];
    let place = circle.members.iter().position(|member| *member == me).expect("a member of its own circle");
    let here = &mut buffer[runs[place].clone()];
    here[..8].copy_from_slice(&own.rows.to_ne_bytes());
    here[8..].copy_from_slice(bytemuck::cast_slice(&own.columns));
    collective::all_gather_bytes(fabric, &circle.members, &runs, &mut buffer, circle.tag)?;
    let share = |bytes: &[u8]| GroupShare {
        rows: u64::from_ne_bytes(bytes[..8].try_into().expect("eight bytes")),
        columns: floats(&bytes[8..]),
    };
    Ok(buffer.chunks_exact(each).map(share).collect())
}
