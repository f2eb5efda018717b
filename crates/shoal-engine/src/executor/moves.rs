//! What passes between devices and memories. Every movement starts on the device's own thread, where it takes what it
//! needs out of the step and the state; its waiting happens on a thread of its own; and it lands on the device's thread
//! again, where what came of it is put in its place. So nothing here is locked, and what a movement had is given back
//! even when it fails. What it copies waits for the device as far as it had been asked when the movement started, and not
//! for what it is asked meanwhile: by then the movement alone has that memory.

use std::sync::Arc;

use shoal_kernels::random::fold;
use shoal_kernels::{Device, Tensor};
use shoal_net::{Fabric, Tag, collective};
use shoal_plan::effects::Value;
use shoal_plan::{GatheredPart, Instruction, Layout, Moved, Op, Pass, Samples};

use super::Executor;
use super::step::{Step, Stored};
use super::transfers::{Circle, Source, Way, exchange, fetch, gather, receive, send};
use crate::error::{EngineError, Result};
use crate::state::{Gathered, Kept, compute_room, copy_element};

/// Puts what came of a movement in its place.
pub(super) type Land = Box<dyn FnOnce(&mut Executor, &mut Step) -> Result + Send>;

/// A movement's own part, on a thread of its own.
pub(super) type Job = Box<dyn FnOnce() -> Land + Send>;

/// A movement that leaves nothing behind but whether it went well.
fn only(result: Result) -> Land {
    Box::new(move |_, _| result)
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
            Op::HandOver { layer } => [10, layer, 0, 0, 0],
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

    pub(super) fn circle(&self, instruction: &Instruction, members: Vec<usize>) -> Result<Circle> {
        let fabric = if members.len() > 1 { Some(self.fabric(instruction)?) } else { None };
        Ok(Circle { fabric, members, tag: self.tag(&instruction.op) })
    }

    /// Takes what a movement needs, and says what is left to do elsewhere.
    pub(super) fn start_move(&mut self, step: &mut Step, instruction: &Instruction) -> Result<Job> {
        step.note(&instruction.op);
        match instruction.op {
            Op::Send { moved, layer, reader, samples, to } => {
                let tensor = step.take_tensor(value(moved, layer, reader, samples));
                let (tiers, fabric, tag) =
                    (self.tiers.clone(), self.fabric(instruction)?, self.tag(&instruction.op));
                let after = self.device.mark()?;
                Ok(Box::new(move || only(send(&tiers, &after, &fabric, to, tag, tensor))))
            }
            Op::Receive { moved, layer, reader, samples, from } => {
                let value = value(moved, layer, reader, samples);
                let room = self.boundary(layer, samples)?;
                let (tiers, fabric, tag) =
                    (self.tiers.clone(), self.fabric(instruction)?, self.tag(&instruction.op));
                let after = self.device.mark()?;
                Ok(Box::new(move || {
                    let received = receive(&tiers, &after, &fabric, from, tag, room);
                    Box::new(move |_, step| {
                        step.put(value, Stored::Tensor(received?));
                        Ok(())
                    })
                }))
            }
            Op::Gather { layer, pass } => self.start_gather(step, instruction, layer, pass),
            Op::Reduce { layer } => self.start_reduce(step, instruction, layer),
            Op::HandOver { layer } => self.start_hand_over(step, instruction, layer),
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
                let mut own = vec![self.squares(step)?];
                // The last that everyone hears from everyone in a step.
                own.extend(step.input.tells.into_iter().flat_map(|tells| tells()));
                self.start_sum(instruction, members, own, |executor, step, sums| {
                    step.outcome.told = sums[1..].to_vec();
                    let device = executor.device.clone();
                    Ok(device.set_scalar(&mut executor.norm_squared, sums[0])?)
                })
            }
            _ => Err(EngineError::Movement { instruction: instruction.to_string() }),
        }
    }

    pub(super) fn layout<'a>(&self, step: &Step<'a>, instruction: &Instruction) -> Result<&'a Layout<'a>> {
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
        let element = |part: &GatheredPart| copy_element(&self.chain, part.tensor, self.state.precision);
        let (tiers, elements) = (self.tiers.clone(), parts.iter().map(element).collect::<Vec<_>>());
        let (me, after) = (step.device, self.device.mark()?);
        Ok(Box::new(move || {
            let way = Way { tiers: &tiers, after: &after, elements: &elements };
            let gathered = match circle.others() {
                Some(_) => gather(way, &circle, me, &parts, sources, &mut targets),
                None => fetch(way, &parts, &sources, &mut targets),
            };
            Box::new(move |executor, _| {
                if pass != Pass::Update {
                    executor.state.gathered.insert((layer, pass), Gathered { version, copies: targets });
                    return gathered;
                }
                for (tensor, copy) in targets {
                    let held = &mut executor.state.tensors[tensor];
                    held.copy = Some(copy);
                    if gathered.is_ok() {
                        held.copy_version = version;
                    }
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
            Kept::Memory(tensors) => {
                let numbers = tensors.copy.as_ref().unwrap_or(&tensors.parameter);
                Source::Memory(part.tier, numbers.share(), elements)
            }
            Kept::Disk(disk) => Source::Disk(disk.clone()),
            Kept::Lent => panic!("a slice is gathered while it is updated"),
        })
    }

    /// Drops what was gathered.
    pub(super) fn release(&mut self, layer: usize, pass: Pass) {
        self.state.gathered.remove(&(layer, pass));
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
        let room = |input: Tensor| -> Result<(Tensor, Tensor)> {
            let who = format!("the input of layer {layer}, {samples}");
            let room = Tensor::of(self.tiers.host.arena(), &who, input.element(), input.len())?;
            Ok((input, room))
        };
        let moved = input.map(room).transpose()?;
        let (tiers, after) = (self.tiers.clone(), self.device.mark()?);
        Ok(Box::new(move || {
            let copy = |(input, mut room): (Tensor, Tensor)| {
                tiers.copy_out(&after, &input, 0..input.len(), &mut room, 0).map(|()| room)
            };
            let copied = moved.map(copy).transpose();
            Box::new(move |_, step| {
                let offloaded = Stored::Offloaded(Box::new((rest, copied?)));
                step.put(Value::Offloaded { layer, samples }, offloaded);
                Ok(())
            })
        }))
    }

    fn start_restore(&mut self, step: &mut Step, layer: usize, samples: Samples) -> Result<Job> {
        let (rest, kept) = step.take_offloaded(Value::Offloaded { layer, samples });
        let from = self.chain.layers[layer].inputs.first();
        let moved = match (kept, from) {
            (Some(kept), Some(from)) => Some((kept, self.boundary(*from, samples)?)),
            _ => None,
        };
        let (tiers, after) = (self.tiers.clone(), self.device.mark()?);
        Ok(Box::new(move || {
            let copy = |(kept, mut room): (Tensor, Tensor)| {
                tiers.copy_in(&after, &kept, 0..kept.len(), &mut room, 0).map(|()| room)
            };
            let restored = moved.map(copy).transpose();
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
