//! Gradients on their way: added up over the devices whose layers made them, each slice where the table keeps its sum, and
//! from there handed over to the optimizer's slices that lie elsewhere.

use std::ops::Range;

use shoal_kernels::device::SCALAR_ELEMENTS;
use shoal_kernels::{Device, HostBuffer, Mark, Tensor};
use shoal_net::{Fabric, collective};
use shoal_nn::GradientSum;
use shoal_plan::{GatheredPart, GradientWire, Held, Instruction, Layout, ReducedPart, Slice, Tier, common};

use super::Executor;
use super::moves::Job;
use super::step::Step;
use super::transfers::{Circle, collect, runs};
use crate::error::Result;
use crate::state::{self, SumRoom, SumSlice};
use crate::tiers::Tiers;

impl Executor {
    pub(super) fn start_reduce(
        &mut self,
        step: &mut Step,
        instruction: &Instruction,
        layer: usize,
    ) -> Result<Job> {
        let layout = self.layout(step, instruction)?;
        let members = layout.reduce(layer).map(|group| group.devices.clone()).unwrap_or_default();
        let circle = self.circle(instruction, members)?;
        let wire = match layout.gradient_wire(layer) {
            GradientWire::Fp32 => collective::Wire::F32,
            GradientWire::Bf16 => collective::Wire::Bf16,
        };
        let parts = layout.reduced_parts(layer);
        let mut tensors: Vec<usize> = parts.iter().map(|part| part.tensor).collect();
        tensors.sort_unstable();
        tensors.dedup();
        let carried = circle.others().is_none()
            && tensors.iter().all(|tensor| goes_to_host(&self.state.tensors[*tensor]));
        let mut squares = Vec::new();
        for tensor in tensors.iter().copied().filter(|_| carried) {
            squares.extend(self.squared(layout, step.device, tensor)?.map(|squares| (tensor, squares)));
        }
        let taken = tensors.into_iter().map(|tensor| {
            let held = &mut self.state.tensors[tensor];
            let (sum, sums) = (held.gradient.take(), std::mem::take(&mut held.sums));
            Taken { tensor, sum, keeps_sum: held.keeps_sum, sums }
        });
        let mut taken: Vec<Taken> = taken.collect();
        let (tiers, me, after) = (self.tiers.clone(), step.device, self.device.mark()?);
        let number = step.input.step;
        Ok(Box::new(move || {
            let reduced = match carried {
                true => carry(&tiers, &after, &parts, &mut taken),
                false => reduce(&tiers, &after, (&circle, wire), me, &parts, &mut taken),
            };
            let squares = reduced.and_then(|()| read_squares(&*tiers.device, &after, squares));
            // What is not kept here ends with this.
            for taken in taken.iter_mut().filter(|taken| !taken.keeps_sum) {
                taken.sum = None;
            }
            Box::new(move |executor, _| {
                for taken in taken {
                    let held = &mut executor.state.tensors[taken.tensor];
                    (held.gradient, held.sums, held.squares) = (taken.sum, taken.sums, None);
                }
                for (tensor, squares) in squares? {
                    executor.state.tensors[tensor].squares = Some((number, squares));
                }
                Ok(())
            })
        }))
    }

    /// The squares of a gradient that goes to the host, added up while it is on the device, where this device counts all of
    /// it for the norm: the host need not read it for that.
    fn squared(&self, layout: &Layout, me: usize, tensor: usize) -> Result<Option<Tensor>> {
        let spec = &self.chain.tensors[tensor];
        let counted: usize = layout.normed_slices(tensor, me).iter().map(|held| held.slice.count()).sum();
        let sum = self.state.tensors[tensor].gradient.as_ref().filter(|sum| sum.started);
        let Some(sum) = sum.filter(|_| spec.running.is_none() && counted == spec.elements()) else {
            return Ok(None);
        };
        let who = format!("squares of the gradient of {}", spec.name);
        let mut squares = Tensor::new(self.device.arena(), &who, SCALAR_ELEMENTS)?;
        self.device.sum_squares(&[&sum.sum], &mut squares)?;
        Ok(Some(squares))
    }

    pub(super) fn start_hand_over(
        &mut self,
        step: &mut Step,
        instruction: &Instruction,
        layer: usize,
    ) -> Result<Job> {
        let (layout, me) = (self.layout(step, instruction)?, step.device);
        let members = layout.hand_over(layer).map(|group| group.devices.clone()).unwrap_or_default();
        let circle = self.circle(instruction, members)?;
        let parts = layout.handed_parts(layer);
        let (mut sums, mut handed) = (Vec::new(), Vec::new());
        for tensor in layout.owned(layer).iter().copied() {
            let held = &mut self.state.tensors[tensor];
            sums.extend(held.shared_sums().map(|sum| (tensor, sum)));
            let parts = layout.handed(tensor, me);
            let slices = held.slices.iter_mut().enumerate().filter(|(_, slice)| {
                let has = |part: &Held| {
                    part.holder.tier() == slice.tier && common(part.slice, slice.slice).is_some()
                };
                parts.iter().any(has)
            });
            handed.extend(slices.map(|(place, slice)| (tensor, place, slice.take_gradient())));
        }
        let (tiers, after) = (self.tiers.clone(), self.device.mark()?);
        Ok(Box::new(move || {
            let done = hand_over(&tiers, &after, (&circle, me), &parts, &sums, &mut handed);
            drop(sums);
            Box::new(move |executor, _| {
                for (tensor, place, SumSlice { room, .. }) in handed {
                    if let SumRoom::Memory(gradient) = room {
                        executor.state.tensors[tensor].slices[place].tensors_mut().gradient = Some(gradient);
                    }
                }
                done
            })
        }))
    }
}

impl SumSlice {
    /// Sets what it has of some elements of the whole gradient, which stand in a message from byte `first` on.
    fn write(
        &mut self,
        tiers: &Tiers,
        after: &Mark,
        elements: Slice,
        message: &HostBuffer,
        first: usize,
    ) -> Result {
        let Some(both) = common(self.slice, elements) else { return Ok(()) };
        let first = first + (both.start - elements.start) * size_of::<f32>();
        let there = both.start - self.slice.start..both.end - self.slice.start;
        match &mut self.room {
            SumRoom::Disk(disk) => {
                let bytes = &message[first..first + there.len() * size_of::<f32>()];
                disk.write_gradient(there.start, bytemuck::cast_slice(bytes))
            }
            SumRoom::Memory(sum) => tiers.read_message((self.tier, after), message, first, sum, there),
        }
    }

    /// Reads some of its elements into a message, from byte `first` on.
    fn read(
        &self,
        tiers: &Tiers,
        after: &Mark,
        elements: Slice,
        message: &mut HostBuffer,
        first: usize,
    ) -> Result {
        let here = elements.start - self.slice.start..elements.end - self.slice.start;
        match &self.room {
            SumRoom::Disk(disk) => {
                let out = &mut message[first..first + here.len() * size_of::<f32>()];
                disk.read_gradient(here.start, bytemuck::cast_slice_mut(out))
            }
            SumRoom::Memory(sum) => tiers.write_message((self.tier, after), sum, here, message, first),
        }
    }
}

/// A tensor whose gradient is added up.
struct Taken {
    tensor: usize,
    /// What this device's layers have added up.
    sum: Option<GradientSum>,
    /// Whether the sum over all devices is kept in the same place.
    keeps_sum: bool,
    /// Where else it is kept here.
    sums: Vec<SumSlice>,
}

/// Whether all that is kept of a tensor's sum is in host memory.
fn goes_to_host(held: &state::Held) -> bool {
    let on_host = |sum: &SumSlice| sum.tier == Tier::Host && matches!(sum.room, SumRoom::Memory(_));
    !held.keeps_sum && held.sums.iter().all(on_host)
}

/// Scalars from the device, beside what it computes.
fn read_squares(
    device: &dyn Device,
    after: &Mark,
    squares: Vec<(usize, Tensor)>,
) -> Result<Vec<(usize, f64)>> {
    let read = |(tensor, squares): (usize, Tensor)| -> Result<(usize, f64)> {
        let bytes = device.host_bytes(after, &squares, 0..SCALAR_ELEMENTS)?;
        Ok((tensor, f64::from_ne_bytes((&*bytes).try_into().expect("a scalar has eight bytes"))))
    };
    squares.into_iter().map(read).collect()
}

impl Taken {
    /// Writes a part of the whole sum, which stands in a message from byte `first` on, wherever it is kept here.
    fn write(
        &mut self,
        tiers: &Tiers,
        after: &Mark,
        slice: Slice,
        message: &HostBuffer,
        first: usize,
    ) -> Result {
        if let Some(sum) = self.sum.as_mut().filter(|_| self.keeps_sum) {
            tiers.read_message((Tier::Device, after), message, first, &mut sum.sum, slice.range())?;
        }
        self.sums.iter_mut().try_for_each(|sum| sum.write(tiers, after, slice, message, first))
    }
}

/// Takes gradients to the host where nobody else has a part in them.
fn carry(tiers: &Tiers, after: &Mark, parts: &[ReducedPart], taken: &mut [Taken]) -> Result {
    for part in parts {
        let taken = taken.iter_mut().find(|taken| taken.tensor == part.tensor);
        let Some(Taken { sum, sums, .. }) = taken else { continue };
        let sum = sum.as_ref().filter(|sum| sum.started);
        for kept in sums.iter_mut() {
            let (Some(both), SumRoom::Memory(room)) = (common(kept.slice, part.slice), &mut kept.room) else {
                continue;
            };
            let there = both.start - kept.slice.start..both.end - kept.slice.start;
            match sum {
                Some(sum) => tiers.copy_out(after, &sum.sum, both.range(), room, there.start)?,
                // Whoever added nothing stands with zeros.
                None => {
                    tiers.host.write_bytes(&Mark::default(), room, there, &mut |_, out| out.fill(0))?;
                }
            }
        }
    }
    Ok(())
}

fn reduce(
    tiers: &Tiers,
    after: &Mark,
    (circle, wire): (&Circle, collective::Wire),
    me: usize,
    parts: &[ReducedPart],
    taken: &mut [Taken],
) -> Result {
    let lengths = parts.iter().map(|part| (part.device, part.slice.count()));
    let elements: usize = lengths.clone().map(|(_, length)| length).sum();
    let mut message = tiers.message(elements * size_of::<f32>());
    let mut start = 0;
    let mut places = Vec::with_capacity(parts.len());
    for part in parts {
        let place = start..start + part.slice.count();
        start = place.end;
        let own = taken.iter().find(|taken| taken.tensor == part.tensor);
        match own.and_then(|taken| taken.sum.as_ref()).filter(|sum| sum.started) {
            Some(sum) => {
                let (first, some) = (place.start * size_of::<f32>(), part.slice.range());
                tiers.write_message((Tier::Device, after), &sum.sum, some, &mut message, first)?;
            }
            // Whoever added nothing stands with zeros.
            None => message.floats_mut()[place.clone()].fill(0.0),
        }
        places.push(place);
    }
    if let Some(fabric) = circle.others() {
        let runs = runs(&circle.members, lengths);
        let numbers = message.floats_mut();
        collective::reduce_scatter(fabric, &circle.members, &runs, numbers, wire, circle.tag)?;
        share_sums(tiers, fabric, circle, me, parts, &places, numbers)?;
    }
    for (part, place) in parts.iter().zip(&places).filter(|(part, _)| part.holders.contains(&me)) {
        let taken = taken.iter_mut().find(|taken| taken.tensor == part.tensor);
        let taken = taken.expect("whoever holds a slice takes part");
        if taken.keeps_sum && taken.sum.is_none() {
            panic!("a device that has a tensor has its gradient");
        }
        taken.write(tiers, after, part.slice, &message, place.start * size_of::<f32>())?;
    }
    Ok(())
}

/// Sums of slices that several devices hold, each added up at one of them, to the others.
fn share_sums(
    tiers: &Tiers,
    fabric: &Fabric,
    circle: &Circle,
    me: usize,
    parts: &[ReducedPart],
    places: &[Range<usize>],
    sums: &mut [f32],
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
        let elements: usize = lengths.clone().map(|(_, length)| length).sum();
        let mut message = tiers.message(elements * size_of::<f32>());
        let shared = message.floats_mut();
        let mut rest = &mut shared[..];
        for (_, place) in &theirs {
            let (these, after) = rest.split_at_mut(place.len());
            these.copy_from_slice(&sums[place.clone()]);
            rest = after;
        }
        let (runs, wire) = (runs(holders, lengths), collective::Wire::F32);
        collective::all_gather(fabric, holders, &runs, shared, wire, circle.part(number as u64))?;
        let mut rest = &shared[..];
        for (_, place) in theirs {
            let (these, after) = rest.split_at(place.len());
            sums[place].copy_from_slice(these);
            rest = after;
        }
    }
    Ok(())
}

/// Sums from where they are kept to the slices that need them: what others have comes from them, the rest from here.
fn hand_over(
    tiers: &Tiers,
    after: &Mark,
    (circle, me): (&Circle, usize),
    parts: &[GatheredPart],
    sums: &[(usize, SumSlice)],
    handed: &mut [(usize, usize, SumSlice)],
) -> Result {
    let size = |_| size_of::<f32>();
    let (message, places) = collect(tiers, circle, me, parts, size, |number, message, place| {
        let part = &parts[number];
        let has = |sum: &SumSlice| common(sum.slice, part.slice) == Some(part.slice);
        let own =
            sums.iter().find(|(tensor, sum)| *tensor == part.tensor && sum.tier == part.tier && has(sum));
        let (_, own) = own.expect("whoever gives a part keeps its sum");
        own.read(tiers, after, part.slice, message, place.start)
    })?;
    for (tensor, _, target) in handed {
        for (part, place) in parts.iter().zip(&places).filter(|(part, _)| part.tensor == *tensor) {
            target.write(tiers, after, part.slice, &message, place.start)?;
        }
        for (_, sum) in sums.iter().filter(|(other, _)| other == tensor) {
            let Some(both) = common(sum.slice, target.slice) else { continue };
            let mut message = tiers.message(both.count() * size_of::<f32>());
            sum.read(tiers, after, both, &mut message, 0)?;
            target.write(tiers, after, both, &message, 0)?;
        }
    }
    Ok(())
}
