//! What passes between devices and memories. Every movement starts on the device's own thread, where it takes what it
//! needs out of the step and the state; its waiting happens on a thread of its own; and it lands on the device's thread
//! again, where what came of it is put in its place. So nothing here is locked, and what a movement had is given back
//! even when it fails.

use std::ops::Range;
use std::sync::Arc;

use shoal_kernels::random::fold;
use shoal_kernels::{Device, Element, Tensor};
use shoal_net::{Fabric, Tag, collective};
use shoal_nn::layer::element;
use shoal_nn::{GradientSum, GroupShare};
use shoal_plan::effects::Value;
use shoal_plan::{GatheredPart, Instruction, Layout, Moved, Op, Pass, ReducedPart, Samples, Slice, Tier};

use super::Executor;
use super::step::{Step, Stored};
use crate::disk::DiskSlice;
use crate::error::{EngineError, Result};
use crate::state::{Gathered, Kept, Tiers, compute_room, zero_rest};

/// Puts what came of a movement in its place.
pub(super) type Land = Box<dyn FnOnce(&mut Executor, &mut Step) -> Result + Send>;

/// A movement's own part, on a thread of its own.
pub(super) type Job = Box<dyn FnOnce() -> Land + Send>;

/// A movement that leaves nothing behind but whether it went well.
fn only(result: Result) -> Land {
    Box::new(move |_, _| result)
}

/// The members of a movement and the way to them; nobody else where a device acts alone.
#[derive(Clone)]
struct Circle {
    fabric: Option<Arc<Fabric>>,
    members: Vec<usize>,
    tag: Tag,
}

impl Circle {
    /// The fabric, where there are others.
    fn others(&self) -> Option<&Fabric> {
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

impl Executor {
    /// What a message is known by at both its ends: whichever program this is, and what it is about.
    fn tag(&self, op: &Op) -> Tag {
        let words = match *op {
            Op::Send { moved, layer, reader, samples, .. }
            | Op::Receive { moved, layer, reader, samples, .. } => {
                [1 + moved as usize, layer, reader, samples.start, samples.end]
            }
            Op::Gather { layer, pass } => [3, layer, pass as usize, 0, 0],
            Op::Reduce { layer } => [4, layer, 0, 0, 0],
            Op::Exchange { layer, group, backward } => [5, layer, group, usize::from(backward), 0],
            Op::CountTargets => [6, 0, 0, 0, 0],
            Op::SumLoss => [7, 0, 0, 0, 0],
            Op::GradientNorm => [8, 0, 0, 0, 0],
            _ => [9, 0, 0, 0, 0],
        };
        let half = |seed: u64| words.iter().fold(fold(seed, self.runs), |key, word| fold(key, *word as u64));
        Tag(u128::from(half(1)) << 64 | u128::from(half(2)))
    }

    fn fabric(&self, instruction: &Instruction) -> Result<Arc<Fabric>> {
        let alone = || EngineError::Movement { instruction: instruction.to_string() };
        self.fabric.clone().ok_or_else(alone)
    }

    fn circle(&self, instruction: &Instruction, members: Vec<usize>) -> Result<Circle> {
        let fabric = if members.len() > 1 { Some(self.fabric(instruction)?) } else { None };
        Ok(Circle { fabric, members, tag: self.tag(&instruction.op) })
    }

    /// Takes what a movement needs, and says what is left to do elsewhere.
    pub(super) fn start_move(&mut self, step: &mut Step, instruction: &Instruction) -> Result<Job> {
        step.note(&instruction.op);
        match instruction.op {
            Op::Send { moved, layer, reader, samples, to } => {
                let tensor = step.take_tensor(value(moved, layer, reader, samples));
                let (device, fabric, tag) =
                    (self.device.clone(), self.fabric(instruction)?, self.tag(&instruction.op));
                Ok(Box::new(move || only(send(&*device, &fabric, to, tag, tensor))))
            }
            Op::Receive { moved, layer, reader, samples, from } => {
                let value = value(moved, layer, reader, samples);
                let room = self.boundary(layer, samples)?;
                let (device, fabric, tag) =
                    (self.device.clone(), self.fabric(instruction)?, self.tag(&instruction.op));
                Ok(Box::new(move || {
                    let received = receive(&*device, &fabric, from, tag, room);
                    Box::new(move |_, step| {
                        step.put(value, Stored::Tensor(received?));
                        Ok(())
                    })
                }))
            }
            Op::Gather { layer, pass } => self.start_gather(step, instruction, layer, pass),
            Op::Reduce { layer } => self.start_reduce(step, instruction, layer),
            Op::Exchange { layer, group, backward } => {
                self.start_exchange(step, instruction, layer, group, backward)
            }
            Op::Offload { layer, samples } => self.start_offload(step, layer, samples),
            Op::Restore { layer, samples } => self.start_restore(step, layer, samples),
            Op::CountTargets => {
                let layout = self.layout(step, instruction)?;
                let mut members: Vec<usize> = layout.computing(self.chain.layers.len() - 1).collect();
                members.sort_unstable();
                members.dedup();
                let own = vec![step.own_targets as f64];
                self.start_sum(instruction, members, own, |_, step, sums| {
                    step.outcome.targets = sums[0] as u64;
                    step.count_targets()
                })
            }
            Op::SumLoss => {
                let members = self.layout(step, instruction)?.members().to_vec();
                let mut own = self.device.scalars(&[&self.loss, &self.correct])?;
                own.push(step.own_targets as f64);
                self.start_sum(instruction, members, own, |executor, step, sums| {
                    step.outcome.targets = sums[2] as u64;
                    let device = executor.device.clone();
                    device.set_scalar(&mut executor.loss, sums[0])?;
                    Ok(device.set_scalar(&mut executor.correct, sums[1])?)
                })
            }
            Op::GradientNorm => {
                let members = self.layout(step, instruction)?.members().to_vec();
                let own = vec![self.squares(step)?];
                self.start_sum(instruction, members, own, |executor, _, sums| {
                    let device = executor.device.clone();
                    Ok(device.set_scalar(&mut executor.norm_squared, sums[0])?)
                })
            }
            Op::Update { tensor, at } => self.start_update(step, tensor, at),
            _ => Err(EngineError::Movement { instruction: instruction.to_string() }),
        }
    }

    fn layout<'a>(&self, step: &Step<'a>, instruction: &Instruction) -> Result<&'a Layout<'a>> {
        let unplaced = || EngineError::Movement { instruction: instruction.to_string() };
        step.layout.ok_or_else(unplaced)
    }

    /// Adds up a few numbers over some devices.
    fn start_sum(
        &self,
        instruction: &Instruction,
        members: Vec<usize>,
        mut sums: Vec<f64>,
        land: impl FnOnce(&mut Executor, &mut Step, Vec<f64>) -> Result + Send + 'static,
    ) -> Result<Job> {
        let circle = self.circle(instruction, members)?;
        Ok(Box::new(move || {
            let summed = match circle.others() {
                Some(fabric) => collective::sum_f64(fabric, &circle.members, &mut sums, circle.tag),
                None => Ok(()),
            };
            Box::new(move |executor, step| {
                summed?;
                land(executor, step, sums)
            })
        }))
    }

    fn start_gather(
        &mut self,
        step: &mut Step,
        instruction: &Instruction,
        layer: usize,
        pass: Pass,
    ) -> Result<Job> {
        let layout = self.layout(step, instruction)?;
        let members = layout.gather(layer, pass).map(|group| group.devices.clone()).unwrap_or_default();
        let circle = self.circle(instruction, members)?;
        let parts = layout.gathered_parts(layer, pass);
        let version = step.input.step + u64::from(pass == Pass::Update);
        let own = parts.iter().filter(|part| part.device == step.device);
        let sources: Vec<Source> = own.map(|part| self.source(part, version)).collect::<Result<_>>()?;
        let mut targets = Vec::new();
        for tensor in layout.lacking(layer, pass, step.device) {
            let resident = (pass == Pass::Update).then(|| self.state.tensors[tensor].copy.take());
            let copy = match resident.flatten() {
                Some(copy) => copy,
                None => compute_room(&*self.device, &self.chain, tensor, self.state.precision)?,
            };
            targets.push((tensor, copy));
        }
        let (tiers, element) = (self.tiers.clone(), element(self.state.precision));
        let me = step.device;
        Ok(Box::new(move || {
            let gathered = gather(&tiers, &circle, me, element, &parts, sources, &mut targets);
            Box::new(move |executor, _| {
                if pass != Pass::Update {
                    executor.state.gathered.insert((layer, pass), Gathered { version, copies: targets });
                    return gathered;
                }
                for (tensor, copy) in targets {
                    let held = &mut executor.state.tensors[tensor];
                    (held.copy, held.copy_version) = (Some(copy), version);
                }
                gathered
            })
        }))
    }

    /// Parameters as a gathering reads them.
    fn source(&self, part: &GatheredPart, version: u64) -> Result<Source> {
        let (slice, elements) = self.state.tensors[part.tensor].find(part.tier, part.slice);
        assert_eq!(slice.version, version, "tensor {} is at another version than the step", part.tensor);
        Ok(match &slice.kept {
            Kept::Memory(tensors) => Source::Memory(part.tier, tensors.parameter.share(), elements),
            Kept::Disk(disk) => Source::Disk(disk.clone()),
            Kept::Lent => panic!("a slice is gathered while it is updated"),
        })
    }

    /// Drops what was gathered.
    pub(super) fn release(&mut self, layer: usize, pass: Pass) {
        self.state.gathered.remove(&(layer, pass));
    }

    fn start_reduce(&mut self, step: &mut Step, instruction: &Instruction, layer: usize) -> Result<Job> {
        let layout = self.layout(step, instruction)?;
        let members = layout.reduce(layer).map(|group| group.devices.clone()).unwrap_or_default();
        let circle = self.circle(instruction, members)?;
        let parts = layout.reduced_parts(layer);
        let mut tensors: Vec<usize> = parts.iter().map(|part| part.tensor).collect();
        tensors.sort_unstable();
        tensors.dedup();
        let taken = tensors.into_iter().map(|tensor| {
            let held = &mut self.state.tensors[tensor];
            let mut slices = Vec::new();
            for (place, slice) in held.slices.iter_mut().enumerate() {
                match &mut slice.kept {
                    Kept::Memory(tensors) => {
                        let gradient = tensors.gradient.take();
                        slices.extend(
                            gradient.map(|gradient| (place, slice.tier, slice.slice, Room::Memory(gradient))),
                        );
                    }
                    Kept::Disk(disk) => {
                        slices.push((place, slice.tier, slice.slice, Room::Disk(disk.clone())))
                    }
                    Kept::Lent => panic!("a gradient is added up while its slice is updated"),
                }
            }
            // What is not kept here ends with this.
            let keeps_sum = held.whole().is_some();
            Taken { tensor, sum: held.gradient.take(), keeps_sum, slices }
        });
        let mut taken: Vec<Taken> = taken.collect();
        let (tiers, me) = (self.tiers.clone(), step.device);
        Ok(Box::new(move || {
            let reduced = reduce(&tiers, &circle, me, &parts, &mut taken);
            for taken in taken.iter_mut().filter(|taken| !taken.keeps_sum) {
                taken.sum = None;
            }
            Box::new(move |executor, _| {
                for taken in taken {
                    let held = &mut executor.state.tensors[taken.tensor];
                    held.gradient = taken.sum;
                    for (place, _, _, room) in taken.slices {
                        if let Room::Memory(gradient) = room {
                            held.slices[place].tensors_mut().gradient = Some(gradient);
                        }
                    }
                }
                reduced
            })
        }))
    }

    fn start_exchange(
        &mut self,
        step: &mut Step,
        instruction: &Instruction,
        layer: usize,
        group: usize,
        backward: bool,
    ) -> Result<Job> {
        let layout = self.layout(step, instruction)?;
        let members = layout.exchange(layer, group).map(|group| group.devices).unwrap_or_default();
        let circle = self.circle(instruction, members)?;
        let known = step.groups.get(&layer).and_then(|groups| groups.get(&group));
        let own = known.expect("the group has begun here").share(&*self.device, backward)?;
        let me = step.device;
        Ok(Box::new(move || {
            let shares = exchange(&circle, me, own);
            Box::new(move |executor, step| {
                let groups = step.groups.get_mut(&layer).and_then(|groups| groups.get_mut(&group));
                let known = groups.expect("the group has begun here");
                Ok(known.complete(&*executor.device, backward, &shares?)?)
            })
        }))
    }

    fn start_offload(&mut self, step: &mut Step, layer: usize, samples: Samples) -> Result<Job> {
        let saved = step.take_saved(Value::Input { layer, samples });
        // Samples themselves stay where they are.
        let (input, rest) = match self.chain.layers[layer].inputs.is_empty() {
            true => (None, shoal_nn::SavedRest::All(saved)),
            false => saved.apart(),
        };
        let device = self.device.clone();
        Ok(Box::new(move || {
            let copy = |input: Tensor| -> Result<Vec<u8>> {
                Ok(device.host_bytes(&input, 0..input.len())?.into_owned())
            };
            let copied = input.map(copy).transpose();
            Box::new(move |_, step| {
                let offloaded = Stored::Offloaded(Box::new((rest, copied?)));
                step.put(Value::Offloaded { layer, samples }, offloaded);
                Ok(())
            })
        }))
    }

    fn start_restore(&mut self, step: &mut Step, layer: usize, samples: Samples) -> Result<Job> {
        let (rest, bytes) = step.take_offloaded(Value::Offloaded { layer, samples });
        let from = self.chain.layers[layer].inputs.first();
        let room = match (&bytes, from) {
            (Some(_), Some(from)) => Some(self.boundary(*from, samples)?),
            _ => None,
        };
        let device = self.device.clone();
        Ok(Box::new(move || {
            let restored = match (bytes, room) {
                (Some(bytes), Some(mut room)) => {
                    let all = 0..room.len();
                    let written = device.write_bytes(&mut room, all, &mut |out| out.copy_from_slice(&bytes));
                    written.map(|()| Some(room))
                }
                _ => Ok(None),
            };
            Box::new(move |_, step| {
                let saved = Stored::Saved(Box::new(rest.with(restored?)));
                step.put(Value::Restored { layer, samples }, saved);
                Ok(())
            })
        }))
    }
}

fn value(moved: Moved, layer: usize, reader: usize, samples: Samples) -> Value {
    match moved {
        Moved::Activation => Value::Activation { layer, reader, samples },
        Moved::Gradient => Value::Gradient { layer, reader, samples },
    }
}

fn send(device: &dyn Device, fabric: &Fabric, to: usize, tag: Tag, tensor: Tensor) -> Result {
    let bytes = device.host_bytes(&tensor, 0..tensor.len())?;
    Ok(fabric.send(to, tag, &bytes)?)
}

fn receive(device: &dyn Device, fabric: &Fabric, from: usize, tag: Tag, mut room: Tensor) -> Result<Tensor> {
    let (all, mut received) = (0..room.len(), Ok(()));
    device.write_bytes(&mut room, all, &mut |out| received = fabric.receive(from, tag, out))?;
    received?;
    Ok(room)
}

/// Where parameters that are gathered lie.
enum Source {
    Memory(Tier, Tensor, Range<usize>),
    Disk(DiskSlice),
}

impl Source {
    /// Writes them as layers compute with them.
    fn write(&self, tiers: &Tiers, element: Element, out: &mut [u8]) -> Result {
        match self {
            Source::Memory(tier, tensor, elements) => {
                let bytes = tiers.of(*tier).host_bytes(tensor, elements.clone())?;
                match element {
                    Element::F32 => out.copy_from_slice(&bytes),
                    half => half.write(&floats(&bytes), out),
                }
            }
            Source::Disk(disk) => {
                let mut values = vec![0.0; disk.elements];
                disk.read_parameter(&mut values)?;
                element.write(&values, out);
            }
        }
        Ok(())
    }
}

/// Numbers from their bytes, wherever these lie.
fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|word| f32::from_ne_bytes([word[0], word[1], word[2], word[3]])).collect()
}

fn gather(
    tiers: &Tiers,
    circle: &Circle,
    me: usize,
    element: Element,
    parts: &[GatheredPart],
    sources: Vec<Source>,
    targets: &mut [(usize, Tensor)],
) -> Result {
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
        source.write(tiers, element, &mut buffer[place.clone()])?;
    }
    // What others may write to from here on is no longer read.
    drop(sources);
    if let Some(fabric) = circle.others() {
        let runs = runs(&circle.members, lengths);
        collective::all_gather_bytes(fabric, &circle.members, &runs, &mut buffer, circle.tag)?;
    }
    for (tensor, copy) in targets {
        let mut elements = 0;
        for (part, place) in parts.iter().zip(&places).filter(|(part, _)| part.tensor == *tensor) {
            let bytes = &buffer[place.clone()];
            tiers.device.write_bytes(copy, part.slice.range(), &mut |out| out.copy_from_slice(bytes))?;
            elements += part.slice.count();
        }
        zero_rest(&*tiers.device, copy, elements)?;
    }
    Ok(())
}

/// Where a slice's gradient goes.
enum Room {
    Memory(Tensor),
    Disk(DiskSlice),
}

/// A tensor whose gradient is added up.
struct Taken {
    tensor: usize,
    /// What this device's layers have added up.
    sum: Option<GradientSum>,
    /// Whether the sum over all devices is kept in the same place.
    keeps_sum: bool,
    /// Its slices' places in the state, their memories and elements, and where their gradients go.
    slices: Vec<(usize, Tier, Slice, Room)>,
}

impl Taken {
    /// Writes a part of the whole sum wherever it is kept here.
    fn write(&mut self, tiers: &Tiers, slice: Slice, values: &[f32]) -> Result {
        if let Some(sum) = self.sum.as_mut().filter(|_| self.keeps_sum) {
            let bytes = bytemuck::cast_slice(values);
            tiers.device.write_bytes(&mut sum.sum, slice.range(), &mut |out| out.copy_from_slice(bytes))?;
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
                    let bytes = bytemuck::cast_slice(values);
                    let elements = start - held.start..end - held.start;
                    tiers.of(*tier).write_bytes(gradient, elements, &mut |out| out.copy_from_slice(bytes))?;
                }
            }
        }
        Ok(())
    }
}

fn reduce(tiers: &Tiers, circle: &Circle, me: usize, parts: &[ReducedPart], taken: &mut [Taken]) -> Result {
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
            let bytes = tiers.device.host_bytes(&sum.sum, part.slice.range())?;
            bytemuck::cast_slice_mut::<f32, u8>(&mut buffer[place.clone()]).copy_from_slice(&bytes);
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
        taken.write(tiers, part.slice, &buffer[place.clone()])?;
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
fn exchange(circle: &Circle, me: usize, own: GroupShare) -> Result<Vec<GroupShare>> {
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
