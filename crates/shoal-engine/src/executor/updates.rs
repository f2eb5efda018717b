//! The optimizer's side of a step: the norm of what is held here, and updates of slices in whichever memory they lie.

use shoal_kernels::device::SCALAR_ELEMENTS;
use shoal_kernels::{CpuDevice, Device, Guard, Sgd, Tensor, Updated};
use shoal_nn::OptimizerSettings;
use shoal_plan::{Holder, Tier};

use super::Executor;
use super::step::{Step, StepInput};
use crate::disk::DiskSlice;
use crate::error::{EngineError, Result};
use crate::state::{Held, HeldSlice, Kept, SliceTensors, SumRoom, SumSlice};

/// What an update is given beside tensors and the step's closing sums.
#[derive(Clone, Copy)]
pub(super) struct Terms {
    /// The version that it reads.
    pub(super) step: u64,
    settings: OptimizerSettings,
    lr: f64,
    /// The number of this update, from 1.
    update: u64,
    scale: f32,
}

impl Terms {
    /// # Panics
    /// If the input is of no training step.
    pub(super) fn of(input: &StepInput) -> Terms {
        let settings = *input.optimizer.expect("a training program comes with an optimizer");
        let (lr, update, scale) = (input.lr, input.updates + 1, input.loss_scale);
        Terms { step: input.step, settings, lr, update, scale }
    }

    /// Updates tensors. Of running statistics the share is said that a step's have in them.
    fn apply<'a>(
        &self,
        device: &dyn Device,
        (loss, norm_squared): (&Tensor, &Tensor),
        all: impl Iterator<Item = (Option<f32>, Updated<'a>)>,
    ) -> Result {
        let mut tensors = Vec::new();
        let mut running: Vec<(f32, Vec<Updated>)> = Vec::new();
        for (share, updated) in all {
            match (share, running.iter_mut().find(|(other, _)| Some(*other) == share)) {
                (None, _) => tensors.push(updated),
                (Some(_), Some((_, known))) => known.push(updated),
                (Some(share), None) => running.push((share, vec![updated])),
            }
        }
        let Terms { settings, lr, update, scale, .. } = *self;
        let guard = Guard { norm_squared, loss, scale, clip_norm: settings.clip_norm };
        settings.apply(device, lr, update, guard, &mut tensors)?;
        // Statistics are no gradients: neither the loss scale nor clipping reaches them.
        let unclipped = Guard { scale: 1.0, clip_norm: None, ..guard };
        for (share, mut all) in running {
            let settings = Sgd { lr: share, momentum: 0.0, update };
            device.sgd(&settings, unclipped, &mut all)?;
        }
        Ok(())
    }
}

/// How a tensor is updated: running statistics by the share of a step's in them, others with this decay.
#[derive(Clone, Copy)]
struct Kind {
    running: Option<f32>,
    weight_decay: f32,
}

impl Kind {
    /// The tensors of a slice, to be updated.
    fn updated<'a>(
        self,
        gradient: &'a Tensor,
        parameter: &'a mut Tensor,
        state: &'a mut [Tensor],
        copy: Option<&'a mut Tensor>,
    ) -> (Option<f32>, Updated<'a>) {
        // p -= share * (p - value), the sum being the value's negative: descent with a decay of one.
        let state = if self.running.is_some() { &mut [][..] } else { state };
        (self.running, Updated { gradient, state, parameter, copy, weight_decay: self.weight_decay })
    }
}

impl Executor {
    fn kind(&self, terms: &Terms, tensor: usize) -> Kind {
        let spec = &self.chain.tensors[tensor];
        let weight_decay = if spec.running.is_some() { 1.0 } else { terms.settings.decay_of(spec) };
        Kind { running: spec.running, weight_decay }
    }

    /// The norm of the gradient where all of it is here.
    pub(super) fn gradient_norm(&mut self, step: &Step) -> Result {
        if step.layout.is_none() {
            let trained = self.state.tensors.iter().zip(&self.chain.tensors);
            let trained = trained.filter(|(_, spec)| spec.running.is_none());
            let gradients: Vec<&Tensor> =
                trained.filter_map(|(held, _)| held.gradient.as_ref().map(|sum| &sum.sum)).collect();
            return Ok(self.device.sum_squares(&gradients, &mut self.norm_squared)?);
        }
        // Where all of it is in the device's memory nobody waits for it, so that it can be part of a pass.
        let Some(elsewhere) = self.sum_squares(step)? else { return Ok(()) };
        let squares = self.device.scalar(&self.norm_squared)? + elsewhere;
        Ok(self.device.set_scalar(&mut self.norm_squared, squares)?)
    }

    /// The sum of squares of the gradients that are this device's to count.
    pub(super) fn squares(&mut self, step: &Step) -> Result<f64> {
        let elsewhere = self.sum_squares(step)?.unwrap_or(0.0);
        Ok(self.device.scalar(&self.norm_squared)? + elsewhere)
    }

    /// Has the device sum up the squares of those of them that are in its memory; the sum of the others, where there are any.
    fn sum_squares(&mut self, step: &Step) -> Result<Option<f64>> {
        let layout = step.layout.expect("shares are of a table");
        let host = &self.tiers.host;
        let (mut on_device, mut on_host, mut others) = (Vec::new(), Vec::new(), None::<f64>);
        for (tensor, held) in self.state.tensors.iter().enumerate() {
            if self.chain.tensors[tensor].running.is_some() {
                continue;
            }
            if let Some((_, squares)) = held.squares.filter(|(step_of, _)| *step_of == step.input.step) {
                *others.get_or_insert_default() += squares;
                continue;
            }
            let counted = layout.normed_slices(tensor, step.device);
            let sum = held.gradient.as_ref().filter(|_| held.keeps_sum);
            let here = |held: &&shoal_plan::Held| held.holder == Holder::Device(step.device);
            let counted_here: usize = counted.iter().filter(here).map(|held| held.slice.count()).sum();
            if let Some(sum) = sum.filter(|_| counted_here == held.elements) {
                on_device.push(&sum.sum);
            }
            for part in counted.iter().filter(|part| !here(part) || counted_here < held.elements) {
                if let Some(sum) = sum.filter(|_| here(&part)) {
                    let sum = self.device.host_floats(&sum.sum)?;
                    *others.get_or_insert_default() += host.squares(&sum[part.slice.range()]);
                    continue;
                }
                let tier = part.holder.tier();
                let sum =
                    SumSlice::find(&held.sums, tier, part.slice).expect("the state is as the table says");
                match &sum.room {
                    SumRoom::Disk(disk) => {
                        let mut gradient = vec![0.0; disk.elements];
                        disk.read_gradient(0, &mut gradient)?;
                        *others.get_or_insert_default() += host.squares(&gradient);
                    }
                    SumRoom::Memory(gradient) if tier.is_device() => on_device.push(gradient),
                    SumRoom::Memory(gradient) => on_host.push(gradient),
                }
            }
        }
        self.device.sum_squares(&on_device, &mut self.norm_squared)?;
        if !on_host.is_empty() {
            let mut sum = Tensor::new(host.arena(), "the norm of gradients on the host", SCALAR_ELEMENTS)?;
            host.sum_squares(&on_host, &mut sum)?;
            *others.get_or_insert_default() += host.scalar(&sum)?;
        }
        Ok(others)
    }

    /// Updates of several tensors in the device's own memory, at once.
    pub(super) fn update(&mut self, terms: &Terms, tensors: impl Iterator<Item = usize> + Clone) -> Result {
        let mut wanted = vec![None; self.state.tensors.len()];
        for tensor in tensors.clone() {
            wanted[tensor] = Some(self.kind(terms, tensor));
        }
        let held = self.state.tensors.iter_mut().zip(wanted);
        let updated = held.filter_map(|(held, kind)| Some((held, kind?))).flat_map(|(held, kind)| {
            let whole = held.whole().is_some();
            let Held { slices, copy, gradient, keeps_sum, sums, .. } = held;
            let sum = gradient.as_ref().filter(|_| whole && *keeps_sum).map(|sum| &sum.sum);
            let mut copy = copy.as_mut().filter(|_| whole);
            let sums = &*sums;
            slices.iter_mut().filter(|held| held.tier == Tier::Device).map(move |held| {
                held.advance(terms);
                let slice = held.slice;
                let SliceTensors { parameter, gradient, optimizer, .. } = held.tensors_mut();
                let handed = gradient.as_ref();
                let gradient =
                    handed.or(sum).or_else(|| SumSlice::find(sums, Tier::Device, slice)?.in_memory());
                let gradient = gradient.expect("the gradient was summed before the update");
                kind.updated(gradient, parameter, optimizer, copy.take())
            })
        });
        let applied = terms.apply(&*self.device, (&self.loss, &self.norm_squared), updated);
        if applied.is_err() {
            // Which of them it reached nobody knows.
            self.torn = tensors.clone().next();
        }
        applied
    }

    /// The update of a tensor's slices in another memory: what is to be done on any thread, if it still may by then, and then
    /// here.
    pub(super) fn start_update(
        &mut self,
        terms: &Terms,
        tensor: usize,
        at: Tier,
    ) -> Result<impl FnOnce(bool) -> Updates + Send + use<>> {
        let (terms, kind) = (*terms, self.kind(terms, tensor));
        let decided = self.device.scalars(&[&self.loss, &self.norm_squared])?;
        let mut slices = Vec::new();
        let Held { slices: all, sums, .. } = &mut self.state.tensors[tensor];
        for (place, held) in all.iter_mut().enumerate().filter(|(_, held)| held.tier == at) {
            held.assert_at(&terms);
            let sum = SumSlice::find(sums, at, held.slice).map(SumSlice::share);
            slices.push((place, std::mem::replace(&mut held.kept, Kept::Lent), sum));
        }
        let host = self.tiers.host.clone();
        Ok(move |may_go_on: bool| {
            let slices = slices.into_iter().map(|(place, kept, sum)| {
                let (kept, applied, result) = match may_go_on {
                    true => update_slice(&host, &terms, kind, &decided, kept, sum.as_ref()),
                    false => (kept, false, Err(EngineError::Stopped)),
                };
                UpdatedSlice { place, kept, applied, result }
            });
            Updates { tensor, slices: slices.collect() }
        })
    }

    /// Puts slices that were updated elsewhere back in their places.
    pub(super) fn put_back(&mut self, updates: Updates) -> Result {
        let mut result = Ok(());
        for slice in updates.slices {
            let held = &mut self.state.tensors[updates.tensor].slices[slice.place];
            held.kept = slice.kept;
            held.version += u64::from(slice.applied);
            result = result.and(slice.result);
        }
        result
    }
}

/// Slices of a tensor that were updated in another memory.
pub(super) struct Updates {
    tensor: usize,
    slices: Vec<UpdatedSlice>,
}

struct UpdatedSlice {
    place: usize,
    kept: Kept,
    /// Whether it is at the next version; if not it is at the last, whole either way.
    applied: bool,
    result: Result,
}

impl HeldSlice {
    fn assert_at(&self, terms: &Terms) {
        assert_eq!(self.version, terms.step, "a slice is at another version than the step");
    }

    /// Raises the version from the step's to the next.
    fn advance(&mut self, terms: &Terms) {
        self.assert_at(terms);
        self.version += 1;
    }
}

/// Updates a slice by its gradient, the one that it was handed or else this sum, and says whether it is at the next
/// version. It is whole whatever fails: a slice that its disk does not take stays in host memory.
fn update_slice(
    host: &CpuDevice,
    terms: &Terms,
    kind: Kind,
    decided: &[f64],
    kept: Kept,
    sum: Option<&SumSlice>,
) -> (Kept, bool, Result) {
    let apply = |tensors: &mut SliceTensors| apply_on_host(host, terms, kind, decided, tensors, sum);
    match kept {
        Kept::Memory(mut tensors) => {
            let result = apply(&mut tensors);
            (Kept::Memory(tensors), result.is_ok(), result)
        }
        Kept::Disk(disk) => {
            let updated = read(host, &disk).and_then(|mut tensors| {
                apply(&mut tensors)?;
                Ok(tensors)
            });
            match updated {
                Err(error) => (Kept::Disk(disk), false, Err(error)),
                Ok(mut tensors) => match write_back(&disk, &tensors) {
                    Ok(()) => (Kept::Disk(disk), true, Ok(())),
                    Err(error) => {
                        // What is added up for it is still added up in its place.
                        tensors.gradient = tensors.gradient.filter(|_| sum.is_none());
                        (Kept::Memory(tensors), true, Err(error))
                    }
                },
            }
        }
        Kept::Lent => panic!("a slice is updated twice at once"),
    }
}

/// The update itself. What can fail in it fails before the first number changes: room for the sums it goes by, and what
/// lies on a disk.
fn apply_on_host(
    host: &CpuDevice,
    terms: &Terms,
    kind: Kind,
    decided: &[f64],
    tensors: &mut SliceTensors,
    sum: Option<&SumSlice>,
) -> Result {
    let scalar = |value: f64| -> Result<Tensor> {
        let mut scalar = Tensor::new(host.arena(), "what an update on the host goes by", SCALAR_ELEMENTS)?;
        host.set_scalar(&mut scalar, value)?;
        Ok(scalar)
    };
    let (loss, norm_squared) = (scalar(decided[0])?, scalar(decided[1])?);
    let SliceTensors { parameter, copy, gradient, optimizer } = tensors;
    let from_disk = match sum.map(|sum| &sum.room) {
        Some(SumRoom::Disk(disk)) if gradient.is_none() => Some(read_gradient(host, disk)?),
        _ => None,
    };
    let gradient = gradient.as_ref().or(from_disk.as_ref()).or(sum.and_then(SumSlice::in_memory));
    let gradient = gradient.expect("the gradient was summed before the update");
    let updated = kind.updated(gradient, parameter, optimizer, copy.as_mut());
    terms.apply(host, (&loss, &norm_squared), std::iter::once(updated))
}

fn write_back(disk: &DiskSlice, tensors: &SliceTensors) -> Result {
    disk.write_parameter(tensors.parameter.floats())?;
    let mut states = tensors.optimizer.iter().enumerate();
    states.try_for_each(|(number, state)| disk.write_state(number, state.floats()))
}

/// A slice from its disk, in host memory for as long as it is updated.
fn read(host: &CpuDevice, disk: &DiskSlice) -> Result<SliceTensors> {
    let room = || Tensor::new(host.arena(), "a slice from a disk", disk.elements);
    let mut parameter = room()?;
    disk.read_parameter(parameter.floats_mut())?;
    let gradient = read_gradient(host, disk)?;
    let mut optimizer = Vec::with_capacity(disk.states);
    for state in 0..disk.states {
        let mut tensor = room()?;
        disk.read_state(state, tensor.floats_mut())?;
        optimizer.push(tensor);
    }
    Ok(SliceTensors { parameter, copy: None, gradient: Some(gradient), optimizer })
}

fn read_gradient(host: &CpuDevice, disk: &DiskSlice) -> Result<Tensor> {
    let mut gradient = Tensor::new(host.arena(), "a gradient from a disk", disk.elements)?;
    disk.read_gradient(0, gradient.floats_mut())?;
    Ok(gradient)
}

#[cfg(test)]
mod tests {
    use shoal_kernels::{Element, Mark};
    use shoal_nn::{Decay, OptimizerKind};
    use shoal_plan::Slice;

    use super::*;

    const ELEMENTS: usize = 5;

    fn terms() -> Terms {
        let settings = OptimizerSettings {
            kind: OptimizerKind::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8 },
            lr: 1e-2,
            weight_decay: 0.1,
            decay: Decay::All,
            clip_norm: Some(1.0),
        };
        Terms { step: 3, settings, lr: 1e-2, update: 4, scale: 1.0 }
    }

    /// A slice with different numbers in each of its parts.
    fn slice(folder: &std::path::Path) -> DiskSlice {
        let disk = DiskSlice::create(folder, "tensor", ELEMENTS, 2).unwrap();
        let numbers = |from: usize| (from..from + ELEMENTS).map(|n| 0.1 * n as f32).collect::<Vec<_>>();
        disk.write_parameter(&numbers(1)).unwrap();
        disk.write_gradient(0, &numbers(20)).unwrap();
        disk.write_state(0, &numbers(40)).unwrap();
        disk.write_state(1, &numbers(60)).unwrap();
        disk
    }

    fn floats(tensors: &SliceTensors) -> Vec<Vec<f32>> {
        let parts = std::iter::once(&tensors.parameter).chain(&tensors.optimizer);
        parts.map(|tensor| tensor.floats().to_vec()).collect()
    }

    /// An update on the host renews the rounded copy with the parameters, and leaves both where the loss is no number.
    #[test]
    fn rounded_copies_are_updated_with_their_parameters() {
        let host = CpuDevice::new("host", 2, CpuDevice::workspace_bytes(2) + (1 << 20)).unwrap();
        let kind = Kind { running: None, weight_decay: 0.1 };
        let room = |value: f32| Tensor::from_floats(host.arena(), "test", &[value; ELEMENTS]).unwrap();
        for element in [Element::Bf16, Element::F16] {
            let mut copy = Tensor::of(host.arena(), "test", element, ELEMENTS).unwrap();
            host.convert(&room(1.0 / 3.0), &mut copy).unwrap();
            let tensors = SliceTensors {
                parameter: room(1.0 / 3.0),
                copy: Some(copy),
                gradient: Some(room(0.5)),
                optimizer: vec![room(0.1), room(0.2)],
            };
            let mut kept = Kept::Memory(tensors);
            for (loss, changes) in [(f64::NAN, false), (1.0, true)] {
                let (after, applied, result) = update_slice(&host, &terms(), kind, &[loss, 4.0], kept, None);
                assert!(applied && result.is_ok());
                let Kept::Memory(tensors) = &after else { panic!("the slice is not in memory") };
                assert_eq!(tensors.parameter.floats()[0] != 1.0 / 3.0, changes);
                let mut expected = vec![0; 2 * ELEMENTS];
                element.write(tensors.parameter.floats(), &mut expected);
                let copy = tensors.copy.as_ref().unwrap();
                assert!(*host.host_bytes(&Mark::default(), copy, 0..ELEMENTS).unwrap() == expected);
                kept = after;
            }
        }
    }

    /// A disk that fails when the new version is written leaves neither the old slice nor a mixture: the new one is whole,
    /// in memory.
    #[test]
    fn a_slice_that_its_disk_does_not_take_stays_whole() {
        let folder = tempfile::tempdir().unwrap();
        let host = CpuDevice::new("host", 1, CpuDevice::workspace_bytes(1) + (1 << 20)).unwrap();
        let kind = Kind { running: None, weight_decay: 0.1 };
        let disk = slice(folder.path());
        let all = Slice { start: 0, end: ELEMENTS };
        let sum = SumSlice { slice: all, tier: Tier::Disk, room: SumRoom::Disk(disk.clone()) };
        let update = |kept: Kept| update_slice(&host, &terms(), kind, &[1.0, 4.0], kept, Some(&sum));
        let before = floats(&read(&host, &disk).unwrap());

        let (kept, applied, failed) = update(Kept::Disk(disk.read_only()));
        assert!(applied && failed.is_err());
        let Kept::Memory(in_memory) = kept else { panic!("the slice is not in memory") };
        assert_eq!(floats(&read(&host, &disk).unwrap()), before);

        let (kept, applied, done) = update(Kept::Disk(disk));
        assert!(applied && done.is_ok());
        let Kept::Disk(disk) = kept else { panic!("the slice is not on its disk") };
        let updated = floats(&read(&host, &disk).unwrap());
        assert_ne!(updated, before);
        assert_eq!(floats(&in_memory), updated);

        // From there on it goes by what is added up for it on the disk, as the one on the disk does.
        disk.write_gradient(0, &[0.5; ELEMENTS]).unwrap();
        let (Kept::Memory(in_memory), true, Ok(())) = update(Kept::Memory(in_memory)) else { panic!() };
        let (Kept::Disk(disk), true, Ok(())) = update(Kept::Disk(disk)) else { panic!() };
        assert_ne!(floats(&in_memory), updated);
        assert_eq!(floats(&in_memory), floats(&read(&host, &disk).unwrap()));
    }
}
