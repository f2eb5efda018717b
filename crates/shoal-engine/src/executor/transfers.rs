//! What movements do on threads of their own: bytes between memories and over the fabric. They have what they were given,
//! and know nothing of the step.

use std::borrow::Cow;
use std::ops::{Deref, Range};
use std::sync::Arc;

use shoal_kernels::random::fold;
use shoal_kernels::{CpuDevice, Element, HostBuffer, Mark, Tensor};
use shoal_net::{Fabric, Tag, collective};
use shoal_nn::GroupShare;
use shoal_plan::{GatheredPart, Tier};

use crate::disk::DiskSlice;
use crate::error::Result;
use crate::state::zero_rest;
use crate::tiers::Tiers;

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

    pub(super) fn part(&self, number: u64) -> Tag {
        Tag(self.tag.0 ^ u128::from(fold(number + 1, 1)))
    }
}

/// Where each member's run lies in a buffer made of parts in the order of their devices.
pub(super) fn runs<'a>(
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
    tiers: &Tiers,
    after: &Mark,
    fabric: &Fabric,
    to: usize,
    tag: Tag,
    tensor: Tensor,
) -> Result {
    let all = 0..tensor.len();
    if tensor.is_on_host() {
        return Ok(fabric.send(to, tag, &tiers.device.host_bytes(after, &tensor, all)?)?);
    }
    let mut message = tiers.message(tensor.len() * tensor.element().bytes());
    tiers.write_message((Tier::Device, after), &tensor, all, &mut message, 0)?;
    Ok(fabric.send(to, tag, &message)?)
}

pub(super) fn receive(
    tiers: &Tiers,
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
        tiers.device.write_bytes(after, &mut room, all, &mut |_, out| {
            received = fabric.receive(from, tag, out);
        })?;
        received?;
        return Ok(room);
    }
    // Others' copies go on while this one waits for its message.
    let mut message = tiers.message(room.len() * room.element().bytes());
    fabric.receive(from, tag, &mut message)?;
    tiers.read_message((Tier::Device, after), &message, 0, &mut room, all)?;
    Ok(room)
}

/// What gathered parameters pass: the memories, what the device is to have done before, and what each part becomes.
#[derive(Clone, Copy)]
pub(super) struct Way<'a> {
    pub(super) tiers: &'a Tiers,
    pub(super) after: &'a Mark,
    pub(super) elements: &'a [Element],
}

/// Where parameters that are gathered lie.
pub(super) enum Source {
    Memory(Tier, Tensor, Range<usize>),
    Disk(DiskSlice),
}

impl Source {
    fn element(&self) -> Element {
        match self {
            Source::Memory(_, tensor, _) => tensor.element(),
            Source::Disk(_) => Element::F32,
        }
    }

    /// Their bytes, where the host can read them.
    fn bytes(&self, way: Way) -> Result<Bytes<'_>> {
        match self {
            Source::Memory(tier, tensor, elements) if tensor.is_on_host() => {
                match way.tiers.of(*tier).host_bytes(way.after, tensor, elements.clone())? {
                    Cow::Borrowed(bytes) => Ok(Bytes::InPlace(bytes)),
                    Cow::Owned(_) => panic!("what is on the host is read in place"),
                }
            }
            Source::Memory(tier, tensor, elements) => {
                let mut message = way.tiers.message(elements.len() * tensor.element().bytes());
                way.tiers.write_message((*tier, way.after), tensor, elements.clone(), &mut message, 0)?;
                Ok(Bytes::Message(message))
            }
            Source::Disk(disk) => {
                let mut message = way.tiers.message(disk.elements * size_of::<f32>());
                disk.read_parameter(message.floats_mut())?;
                Ok(Bytes::Message(message))
            }
        }
    }
}

/// Bytes that the host can read.
enum Bytes<'a> {
    InPlace(&'a [u8]),
    Message(HostBuffer),
}

impl Deref for Bytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::InPlace(bytes) => bytes,
            Bytes::Message(message) => message,
        }
    }
}

/// Writes numbers as elements of some kind, which they may be already.
fn write_as(host: &CpuDevice, element: Element, (kind, numbers): (Element, &[u8]), out: &mut [u8]) {
    match kind == element {
        true => host.copy(numbers, out),
        false => host.round(numbers, element, out),
    }
}

/// Numbers from their bytes, wherever these lie.
fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|word| f32::from_ne_bytes([word[0], word[1], word[2], word[3]])).collect()
}

/// Brings parameters onto the device where nobody else has a part in it: as they lie in host memory where that is what
/// layers compute with, else rounded piece by piece on their way.
pub(super) fn fetch(
    way: Way,
    parts: &[GatheredPart],
    sources: &[Source],
    targets: &mut [(usize, Tensor)],
) -> Result {
    let Way { tiers, after, .. } = way;
    for (tensor, copy) in targets {
        let (element, mut elements) = (copy.element(), 0);
        for (part, source) in parts.iter().zip(sources).filter(|(part, _)| part.tensor == *tensor) {
            elements += part.slice.count();
            match source {
                Source::Memory(Tier::Host, numbers, some) if numbers.element() == element => {
                    tiers.copy_in(after, numbers, some.clone(), copy, part.slice.start)?;
                }
                _ => {
                    let (kind, bytes) = (source.element(), source.bytes(way)?);
                    tiers.device.write_bytes(after, copy, part.slice.range(), &mut |at, out| {
                        let size = kind.bytes();
                        let first = at / element.bytes() * size;
                        let numbers = &bytes[first..first + out.len() / element.bytes() * size];
                        write_as(&tiers.host, element, (kind, numbers), out);
                    })?;
                }
            }
        }
        zero_rest(&*tiers.device, after, copy, elements)?;
    }
    Ok(())
}

pub(super) fn gather(
    way: Way,
    circle: &Circle,
    me: usize,
    parts: &[GatheredPart],
    sources: Vec<Source>,
    targets: &mut [(usize, Tensor)],
) -> Result {
    let Way { tiers, after, elements } = way;
    // Each is let go of when it has been read: others may write to it from then on.
    let mut sources = sources.into_iter();
    let size = |place: usize| elements[place].bytes();
    let (message, places) = collect(tiers, circle, me, parts, size, |number, message, place| {
        let source = sources.next().expect("a source for each part");
        let element = elements[number];
        match &source {
            Source::Memory(tier, numbers, some) if numbers.element() == element => {
                tiers.write_message((*tier, after), numbers, some.clone(), message, place.start)
            }
            _ => {
                let bytes = source.bytes(way)?;
                tiers.host.round(&bytes, element, &mut message[place]);
                Ok(())
            }
        }
    })?;
    for (tensor, copy) in targets {
        let mut elements = 0;
        for (part, place) in parts.iter().zip(&places).filter(|(part, _)| part.tensor == *tensor) {
            let there = part.slice.range();
            tiers.read_message((Tier::Device, after), &message, place.start, copy, there)?;
            elements += part.slice.count();
        }
        zero_rest(&*tiers.device, after, copy, elements)?;
    }
    Ok(())
}

/// What devices give each other, part after part, the elements of each of so many bytes; this device's are written by a
/// function, each to its place. Returns it with each part's place.
pub(super) fn collect(
    tiers: &Tiers,
    circle: &Circle,
    me: usize,
    parts: &[GatheredPart],
    size: impl Fn(usize) -> usize,
    mut write: impl FnMut(usize, &mut HostBuffer, Range<usize>) -> Result,
) -> Result<(HostBuffer, Vec<Range<usize>>)> {
    let length = |(place, part): (usize, &GatheredPart)| (part.device, part.slice.count() * size(place));
    let lengths = parts.iter().enumerate().map(length);
    let mut message = tiers.message(lengths.clone().map(|(_, length)| length).sum());
    let mut end = 0;
    let places: Vec<Range<usize>> = lengths
        .clone()
        .map(|(_, length)| {
            end += length;
            end - length..end
        })
        .collect();
    for (number, place) in places.iter().enumerate().filter(|(number, _)| parts[*number].device == me) {
        write(number, &mut message, place.clone())?;
    }
    if let Some(fabric) = circle.others().filter(|_| !parts.is_empty()) {
        let runs = runs(&circle.members, lengths);
        collective::all_gather_bytes(fabric, &circle.members, &runs, &mut message, circle.tag)?;
    }
    Ok((message, places))
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use shoal_kernels::Device;
    use shoal_kernels::random::fill_normal;
    use shoal_plan::Slice;

    use super::*;

    /// What layers compute with is the parameters, rounded, whether the host has it rounded already or not, and however
    /// many elements of the tensor come from where; the rest of a longer copy is zero.
    #[test]
    fn fetched_parameters_are_the_same_rounded_before_or_on_their_way() {
        const ELEMENTS: usize = 70_001;
        let device = Arc::new(CpuDevice::new("cpu:0", 1, 1 << 24).unwrap());
        let tiers = Tiers::around(device.clone(), "host", 2, 1 << 24, Path::new("")).unwrap();
        let mut parameter = Tensor::new(tiers.host.arena(), "test", ELEMENTS).unwrap();
        fill_normal(parameter.floats_mut(), 3, 0, 1.0);
        let slices = [Slice { start: 0, end: 33_333 }, Slice { start: 33_333, end: ELEMENTS }];
        for element in [Element::Bf16, Element::F16, Element::F32] {
            let mut rounded = Tensor::of(tiers.host.arena(), "test", element, ELEMENTS).unwrap();
            tiers.host.convert(&parameter, &mut rounded).unwrap();
            let mut expected = vec![0; (ELEMENTS + 7) * element.bytes()];
            element.write(parameter.floats(), &mut expected[..ELEMENTS * element.bytes()]);
            for sources in [[&rounded, &parameter], [&parameter, &rounded]] {
                let part = |slice| GatheredPart { tensor: 5, slice, device: 0, tier: Tier::Host };
                let parts = slices.map(part);
                let source = |(slice, numbers): (Slice, &Tensor)| {
                    Source::Memory(Tier::Host, numbers.share(), slice.range())
                };
                let sources: Vec<Source> = slices.into_iter().zip(sources).map(source).collect();
                let copy = Tensor::of(device.arena(), "test", element, ELEMENTS + 7).unwrap();
                let mut targets = [(5, copy)];
                let way = Way { tiers: &tiers, after: &Mark::default(), elements: &[element; 2] };
                fetch(way, &parts, &sources, &mut targets).unwrap();
                let [(_, copy)] = &mut targets;
                let all = 0..copy.len();
                assert!(
                    *device.host_bytes(&Mark::default(), copy, all.clone()).unwrap() == expected,
                    "{element:?}"
                );

                let circle = Circle { fabric: None, members: vec![0], tag: Tag(0) };
                device.write_bytes(&Mark::default(), copy, all, &mut |_, out| out.fill(0xff)).unwrap();
                gather(way, &circle, 0, &parts, sources, &mut targets).unwrap();
                let [(_, copy)] = &targets;
                let all = 0..copy.len();
                assert!(*device.host_bytes(&Mark::default(), copy, all).unwrap() == expected, "{element:?}");
            }
        }
    }
}
