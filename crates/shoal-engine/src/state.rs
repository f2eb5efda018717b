//! What a device keeps of a model: slices of parameters with their optimizer state, copies to compute with, gradient
//! sums. Which of them is the table's affair; one device with everything is a table like any other. Everything kept
//! carries a version, the number of updates it has seen: an instruction of step n reads version n and finds nothing else.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use shoal_kernels::{Device, Element, Mark, Tensor};
use shoal_model::{Chain, Precision, TensorSpec};
use shoal_nn::layer::element;
use shoal_nn::{GradientSum, OptimizerSettings, init};
use shoal_plan::{Holder, Layout, Pass, Residence, Slice, Tier};

use crate::disk::DiskSlice;
use crate::error::Result;
use crate::tiers::Tiers;

/// The tensors of a slice: its parameters in fp32, and what is kept for them.
pub struct SliceTensors {
    pub parameter: Tensor,
    /// The same, rounded to what layers compute with, where it lies in host memory: every gathering reads it, and the
    /// update, which has the numbers at hand, renews it.
    pub copy: Option<Tensor>,
    /// Its gradient, where that is added up elsewhere and handed over.
    pub gradient: Option<Tensor>,
    pub optimizer: Vec<Tensor>,
}

/// Where a slice lies.
pub enum Kept {
    /// In the device's memory or its host's.
    Memory(SliceTensors),
    Disk(DiskSlice),
    /// An instruction has it.
    Lent,
}

/// A slice of a tensor that is kept and updated here.
pub struct HeldSlice {
    pub slice: Slice,
    pub tier: Tier,
    pub kept: Kept,
    /// Updates applied so far.
    pub version: u64,
}

impl HeldSlice {
    /// # Panics
    /// If it lies on a disk, or an instruction has it.
    pub fn tensors(&self) -> &SliceTensors {
        match &self.kept {
            Kept::Memory(tensors) => tensors,
            Kept::Disk(_) | Kept::Lent => panic!("a slice that is not in memory"),
        }
    }

    pub fn tensors_mut(&mut self) -> &mut SliceTensors {
        match &mut self.kept {
            Kept::Memory(tensors) => tensors,
            Kept::Disk(_) | Kept::Lent => panic!("a slice that is not in memory"),
        }
    }
}

impl HeldSlice {
    /// Room for the gradient that is handed over to it; what is in memory is to be given back.
    pub fn take_gradient(&mut self) -> SumSlice {
        let room = match &mut self.kept {
            Kept::Memory(tensors) => {
                SumRoom::Memory(tensors.gradient.take().expect("room for what is handed over"))
            }
            Kept::Disk(disk) => SumRoom::Disk(disk.clone()),
            Kept::Lent => panic!("a gradient is handed over while its slice is updated"),
        };
        SumSlice { slice: self.slice, tier: self.tier, room }
    }
}

/// Some elements of a gradient's sum, in one of the device's memories.
pub struct SumSlice {
    pub slice: Slice,
    pub tier: Tier,
    pub room: SumRoom,
}

pub enum SumRoom {
    Memory(Tensor),
    Disk(DiskSlice),
}

impl SumSlice {
    /// The one that is just a slice in a memory.
    pub fn find(sums: &[SumSlice], tier: Tier, slice: Slice) -> Option<&SumSlice> {
        sums.iter().find(|sum| sum.tier == tier && sum.slice == slice)
    }

    pub fn in_memory(&self) -> Option<&Tensor> {
        match &self.room {
            SumRoom::Memory(sum) => Some(sum),
            SumRoom::Disk(_) => None,
        }
    }

    /// The same once more, to be read.
    pub fn share(&self) -> SumSlice {
        let room = match &self.room {
            SumRoom::Memory(tensor) => SumRoom::Memory(tensor.share()),
            SumRoom::Disk(disk) => SumRoom::Disk(disk.clone()),
        };
        SumSlice { slice: self.slice, tier: self.tier, room }
    }
}

/// One tensor of the model and everything that is kept for it here.
pub struct Held {
    /// Of the whole tensor.
    pub elements: usize,
    /// In order. Slices in the device's own memory that make up the whole tensor are one.
    pub slices: Vec<HeldSlice>,
    /// What layers compute with, where that is not a slice itself: parameters, rounded. Copies that are fetched for each
    /// use are not among them.
    pub copy: Option<Tensor>,
    /// The version of a copy that is not renewed with the parameters.
    pub copy_version: u64,
    /// What this device's layers add to: none while an instruction has it, where nothing is trained, or, as long as
    /// nothing was added, where the sum is kept elsewhere.
    pub gradient: Option<GradientSum>,
    /// Whether the sum over all devices is kept there too.
    pub keeps_sum: bool,
    /// What else is kept here of the sum over all devices.
    pub sums: Vec<SumSlice>,
    /// Of a sum that went to the host: the step, and all its squares, which the device added up before.
    pub squares: Option<(u64, f64)>,
}

impl Held {
    fn whole_place(&self) -> Option<usize> {
        self.slices.iter().position(|held| held.tier == Tier::Device && held.slice.count() == self.elements)
    }

    /// All of the tensor, where it lies in the device's own memory.
    pub fn whole(&self) -> Option<&HeldSlice> {
        self.whole_place().map(|place| &self.slices[place])
    }

    /// The parameters, of a device that has them all in its own memory.
    pub fn parameter(&self) -> &Tensor {
        &self.whole().expect("the device has all of the tensor").tensors().parameter
    }

    /// All that is kept here of the gradient's sum over all devices, to be read.
    pub fn shared_sums(&self) -> impl Iterator<Item = SumSlice> + '_ {
        let whole = self.gradient.as_ref().filter(|_| self.keeps_sum).map(|sum| SumSlice {
            slice: Slice { start: 0, end: self.elements },
            tier: Tier::Device,
            room: SumRoom::Memory(sum.sum.share()),
        });
        whole.into_iter().chain(self.sums.iter().map(SumSlice::share))
    }

    /// The slice in a memory that has these elements, and where in it they are.
    ///
    /// # Panics
    /// If there is none: the state is not what the table says.
    pub fn find(&self, tier: Tier, wanted: Slice) -> (&HeldSlice, Range<usize>) {
        let has = |slice: Slice| slice.start <= wanted.start && wanted.end <= slice.end;
        let found = self.slices.iter().find(|held| held.tier == tier && has(held.slice));
        let found = found.expect("the state is as the table says");
        (found, wanted.start - found.slice.start..wanted.end - found.slice.start)
    }

    /// What layers compute with, and its version.
    pub fn compute(&self) -> (&Tensor, u64) {
        match (self.whole(), &self.copy) {
            (Some(whole), Some(copy)) => (copy, whole.version),
            (Some(whole), None) => (&whole.tensors().parameter, whole.version),
            (None, Some(copy)) => (copy, self.copy_version),
            (None, None) => panic!("a layer computes with parameters that were not gathered"),
        }
    }
}

/// Copies that were gathered to be computed with.
pub struct Gathered {
    pub version: u64,
    /// With their tensors' numbers.
    pub copies: Vec<(usize, Tensor)>,
}

pub struct ModelState {
    pub tensors: Vec<Held>,
    /// Copies of a layer's tensors that are there for a part of the step.
    pub gathered: HashMap<(usize, Pass), Gathered>,
    /// Cosines and sines by position, for rotary models.
    pub rotary: Option<Tensor>,
    pub precision: Precision,
}

impl ModelState {
    /// What a layer computes with, and its version.
    pub fn compute(&self, layer: usize, pass: Option<Pass>, tensor: usize) -> (&Tensor, u64) {
        let gathered = pass.and_then(|pass| self.gathered.get(&(layer, pass)));
        let copy = gathered.and_then(|gathered| {
            let (_, copy) = gathered.copies.iter().find(|(other, _)| *other == tensor)?;
            Some((copy, gathered.version))
        });
        copy.unwrap_or_else(|| self.tensors[tensor].compute())
    }

    /// Room for a whole model on one device; parameters are unset until [`ModelState::fill`] or a checkpoint sets them.
    /// Without an optimizer there is neither gradient nor optimizer state: inference.
    pub fn allocate(
        device: &dyn Device,
        chain: &Chain,
        sequence: usize,
        precision: Precision,
        optimizer: Option<&OptimizerSettings>,
    ) -> Result<ModelState> {
        let mut tensors = Vec::with_capacity(chain.tensors.len());
        for (index, spec) in chain.tensors.iter().enumerate() {
            let mut held = Held::nothing(spec);
            held.take_whole(device, spec, false, optimizer)?;
            if optimizer.is_some() {
                held.keep_sum(device, chain, index, precision)?;
            }
            held.copy = copy_room(device, chain, index, precision)?;
            tensors.push(held);
        }
        ModelState::with(device, chain, sequence, precision, tensors)
    }

    /// Room for what the table gives a device.
    pub fn allocate_share(
        tiers: &Tiers,
        layout: &Layout,
        index: usize,
        optimizer: Option<&OptimizerSettings>,
    ) -> Result<ModelState> {
        let (chain, plan, device) = (layout.chain, layout.plan, &*tiers.device);
        let mut tensors = Vec::with_capacity(chain.tensors.len());
        for (tensor, spec) in chain.tensors.iter().enumerate() {
            let mut held = Held::nothing(spec);
            let whole = layout.holds_whole(tensor, index);
            let handed = layout.handed(tensor, index);
            if whole {
                let is_handed = handed.iter().any(|part| part.holder == Holder::Device(index));
                held.take_whole(device, spec, is_handed, optimizer)?;
            }
            for part in layout
                .held(tensor, index)
                .iter()
                .filter(|part| !whole || part.holder != Holder::Device(index))
            {
                let (slice, tier) = (part.slice, part.holder.tier());
                held.slices.push(match tier {
                    Tier::Disk => HeldSlice::on_disk(&tiers.disk, spec, slice, optimizer)?,
                    _ => {
                        let is_handed = handed.contains(part);
                        let mut kept =
                            HeldSlice::in_memory(tiers.of(tier), spec, slice, tier, is_handed, optimizer)?;
                        if tier == Tier::Host {
                            kept.add_copy(tiers, spec, copy_element(chain, tensor, plan.precision))?;
                        }
                        kept
                    }
                });
            }
            if optimizer.is_some() {
                held.keep_sums(tiers, layout, tensor, index)?;
            }
            let resident = layout.residence(tensor, index) == Some(Residence::Resident);
            if whole && layout.residence(tensor, index).is_some() {
                held.copy = copy_room(device, chain, tensor, plan.precision)?;
            } else if resident {
                held.copy = Some(compute_room(device, chain, tensor, plan.precision)?);
            }
            tensors.push(held);
        }
        ModelState::with(device, chain, plan.sequence, plan.precision, tensors)
    }

    fn with(
        device: &dyn Device,
        chain: &Chain,
        sequence: usize,
        precision: Precision,
        tensors: Vec<Held>,
    ) -> Result<ModelState> {
        assert!(
            device.computes(element(precision)),
            "ask a device what it computes in before planning for it"
        );
        let rotary = match init::rotary_table(chain, sequence) {
            Some(table) => {
                let mut tensor = Tensor::new(device.arena(), "the rotary table", table.len())?;
                device.write_floats(&mut tensor, &mut |out| out.copy_from_slice(&table))?;
                Some(tensor)
            }
            None => None,
        };
        Ok(ModelState { tensors, gathered: HashMap::new(), rotary, precision })
    }

    /// Sets every parameter of a device that has them all, tensor by tensor.
    pub fn fill(
        &mut self,
        device: &dyn Device,
        chain: &Chain,
        mut set: impl FnMut(&TensorSpec, &mut [f32]) -> Result,
    ) -> Result {
        for (held, spec) in self.tensors.iter_mut().zip(&chain.tensors) {
            let place = held.whole_place().expect("the device has all of the tensor");
            let parameter = &mut held.slices[place].tensors_mut().parameter;
            write(device, parameter, |out| set(spec, out))?;
            if let Some(copy) = &mut held.copy {
                device.convert(parameter, copy)?;
            }
        }
        Ok(())
    }

    /// Sets whatever of the state is here, as it is after some updates, by what gives whole tensors.
    pub fn load(
        &mut self,
        tiers: &Tiers,
        chain: &Chain,
        states: &[&'static str],
        version: u64,
        mut read: impl FnMut(&TensorSpec, &'static str, &mut [f32]) -> Result,
    ) -> Result {
        // Pieces are cut from the last whole that was asked for.
        let mut last: Option<(String, &str, Vec<f32>)> = None;
        self.load_ranges(tiers, chain, states, version, |spec, role, range, out| {
            if out.len() == spec.elements() {
                return read(spec, role, out);
            }
            let is_wanted = |(name, of, _): &(String, &str, Vec<f32>)| *name == spec.name && *of == role;
            if !last.as_ref().is_some_and(is_wanted) {
                let mut whole = vec![0.0; spec.elements()];
                read(spec, role, &mut whole)?;
                last = Some((spec.name.clone(), role, whole));
            }
            out.copy_from_slice(&last.as_ref().map_or(&[][..], |(_, _, whole)| whole)[range]);
            Ok(())
        })
    }

    /// Sets whatever of the state is here, tensor by tensor and role by role, as it is after some updates: parameters,
    /// and the optimizer's states by their names. Only elements that are here are asked for.
    pub fn load_ranges(
        &mut self,
        tiers: &Tiers,
        chain: &Chain,
        states: &[&'static str],
        version: u64,
        mut read: impl FnMut(&TensorSpec, &'static str, Range<usize>, &mut [f32]) -> Result,
    ) -> Result {
        let roles: Vec<&'static str> = std::iter::once(PARAMETER).chain(states.iter().copied()).collect();
        for (held, spec) in self.tensors.iter_mut().zip(&chain.tensors) {
            for (part, role) in roles.iter().enumerate() {
                for slice in &mut held.slices {
                    let range = slice.slice.range();
                    slice.set(tiers, part, |out| read(spec, role, range, out))?;
                }
            }
            let whole = held.whole_place();
            match (&mut held.copy, whole) {
                (Some(copy), Some(place)) => {
                    tiers.device.convert(&held.slices[place].tensors().parameter, copy)?;
                }
                (Some(copy), None) => {
                    let mut values = vec![0.0; spec.elements()];
                    read(spec, PARAMETER, 0..values.len(), &mut values)?;
                    let element = copy.element();
                    let mark = tiers.device.mark()?;
                    tiers.device.write_bytes(&mark, copy, 0..values.len(), &mut |at, out| {
                        let first = at / element.bytes();
                        element.write(&values[first..first + out.len() / element.bytes()], out);
                    })?;
                    zero_rest(&*tiers.device, &mark, copy, values.len())?;
                }
                (None, _) => {}
            }
            held.copy_version = version;
            held.slices.iter_mut().for_each(|slice| slice.version = version);
        }
        Ok(())
    }
}

/// What checkpoints call parameters.
pub const PARAMETER: &str = "parameter";

impl Held {
    fn nothing(spec: &TensorSpec) -> Held {
        Held {
            elements: spec.elements(),
            slices: Vec::new(),
            copy: None,
            copy_version: 0,
            gradient: None,
            keeps_sum: false,
            sums: Vec::new(),
            squares: None,
        }
    }

    /// Makes room for all of the tensor in the device's own memory.
    fn take_whole(
        &mut self,
        device: &dyn Device,
        spec: &TensorSpec,
        is_handed: bool,
        optimizer: Option<&OptimizerSettings>,
    ) -> Result {
        let all = Slice { start: 0, end: self.elements };
        self.slices.push(HeldSlice::in_memory(device, spec, all, Tier::Device, is_handed, optimizer)?);
        Ok(())
    }

    /// Makes room for a whole gradient: it is the sum that layers add to.
    fn keep_sum(
        &mut self,
        device: &dyn Device,
        chain: &Chain,
        tensor: usize,
        precision: Precision,
    ) -> Result {
        self.gradient = Some(gradient_room(device, chain, tensor, precision)?);
        self.keeps_sum = true;
        Ok(())
    }

    /// Makes room for what the table has a device keep of a gradient.
    fn keep_sums(&mut self, tiers: &Tiers, layout: &Layout, tensor: usize, index: usize) -> Result {
        let whole = layout.sums_whole(tensor, index);
        if whole {
            self.keep_sum(&*tiers.device, layout.chain, tensor, layout.plan.precision)?;
        }
        let name = &layout.chain.tensors[tensor].name;
        let in_slices = |part: &&shoal_plan::Held| !whole || part.holder != Holder::Device(index);
        for part in layout.summed(tensor, index).iter().filter(in_slices) {
            let (slice, tier) = (part.slice, part.holder.tier());
            let here = self.slices.iter().find(|held| held.tier == tier && held.slice == slice);
            let room = match (tier, here.map(|held| &held.kept)) {
                // A slice on a disk has room for its gradient in the same file.
                (Tier::Disk, Some(Kept::Disk(disk))) => SumRoom::Disk(disk.clone()),
                (Tier::Disk, _) => SumRoom::Disk(DiskSlice::create(&tiers.disk, name, slice.count(), 0)?),
                _ => {
                    let who = format!("gradient of {name}");
                    SumRoom::Memory(Tensor::new(tiers.of(tier).arena(), &who, slice.count())?)
                }
            };
            self.sums.push(SumSlice { slice, tier, room });
        }
        Ok(())
    }
}

impl HeldSlice {
    /// Sets the slice's parameters (0) or one of its states (from 1).
    fn set(&mut self, tiers: &Tiers, part: usize, read: impl FnOnce(&mut [f32]) -> Result) -> Result {
        match &mut self.kept {
            Kept::Memory(tensors) => {
                let tensor = match part {
                    0 => &mut tensors.parameter,
                    state => &mut tensors.optimizer[state - 1],
                };
                write(tiers.of(self.tier), tensor, read)?;
                match &mut tensors.copy {
                    Some(copy) if part == 0 => Ok(tiers.host.convert(&tensors.parameter, copy)?),
                    _ => Ok(()),
                }
            }
            Kept::Disk(disk) => {
                let mut values = vec![0.0; disk.elements];
                read(&mut values)?;
                match part {
                    0 => disk.write_parameter(&values),
                    state => disk.write_state(state - 1, &values),
                }
            }
            Kept::Lent => panic!("state is set between steps"),
        }
    }

    /// The slice's parameters (0) or one of its states (from 1), where the host can read them.
    pub fn get<'a>(&'a self, tiers: &Tiers, part: usize) -> Result<Cow<'a, [f32]>> {
        let from_disk = |disk: &DiskSlice| {
            let mut values = vec![0.0; disk.elements];
            match part {
                0 => disk.read_parameter(&mut values)?,
                state => disk.read_state(state - 1, &mut values)?,
            }
            Ok(Cow::Owned(values))
        };
        match (&self.kept, part) {
            (Kept::Memory(tensors), 0) => Ok(tiers.of(self.tier).host_floats(&tensors.parameter)?),
            (Kept::Memory(tensors), state) => {
                Ok(tiers.of(self.tier).host_floats(&tensors.optimizer[state - 1])?)
            }
            (Kept::Disk(disk), _) => from_disk(disk),
            (Kept::Lent, _) => panic!("state is read between steps"),
        }
    }

    fn in_memory(
        device: &dyn Device,
        spec: &TensorSpec,
        slice: Slice,
        tier: Tier,
        is_handed: bool,
        optimizer: Option<&OptimizerSettings>,
    ) -> Result<HeldSlice> {
        let room = |what: &str| Tensor::new(device.arena(), &format!("{what} {}", spec.name), slice.count());
        let parameter = room("parameter")?;
        let gradient = (is_handed && optimizer.is_some()).then(|| room("gradient of")).transpose()?;
        let state = |name: &&str| -> Result<Tensor> {
            let mut state = room(&format!("{name} of"))?;
            device.zero(&mut state)?;
            Ok(state)
        };
        let names = optimizer.map_or(&[][..], |settings| settings.state_names());
        let optimizer = names.iter().map(state).collect::<Result<_>>()?;
        let kept = Kept::Memory(SliceTensors { parameter, copy: None, gradient, optimizer });
        Ok(HeldSlice { slice, tier, kept, version: 0 })
    }

    /// Room for the rounded copy of a slice in host memory, where layers compute with one.
    fn add_copy(&mut self, tiers: &Tiers, spec: &TensorSpec, element: Element) -> Result {
        if element != Element::F32 {
            let who = format!("rounded copy of {}", spec.name);
            let copy = Tensor::of(tiers.host.arena(), &who, element, self.slice.count())?;
            self.tensors_mut().copy = Some(copy);
        }
        Ok(())
    }

    fn on_disk(
        folder: &Path,
        spec: &TensorSpec,
        slice: Slice,
        optimizer: Option<&OptimizerSettings>,
    ) -> Result<HeldSlice> {
        let states = optimizer.map_or(0, |settings| settings.state_names().len());
        let kept = Kept::Disk(DiskSlice::create(folder, &spec.name, slice.count(), states)?);
        Ok(HeldSlice { slice, tier: Tier::Disk, kept, version: 0 })
    }
}

/// Room for a copy to compute with beside parameters that are there whole, where it is another tensor.
fn copy_room(
    device: &dyn Device,
    chain: &Chain,
    tensor: usize,
    precision: Precision,
) -> Result<Option<Tensor>> {
    let copy = chain.copy_elements(tensor, precision);
    copy.map(|_| compute_room(device, chain, tensor, precision)).transpose()
}

/// Room for all that layers compute with.
pub(crate) fn compute_room(
    device: &dyn Device,
    chain: &Chain,
    tensor: usize,
    precision: Precision,
) -> Result<Tensor> {
    let spec = &chain.tensors[tensor];
    let elements = chain.copy_elements(tensor, precision).unwrap_or(spec.elements());
    let element = copy_element(chain, tensor, precision);
    Ok(Tensor::of(device.arena(), &format!("compute copy of {}", spec.name), element, elements)?)
}

/// What such a copy is made of: layers read some parameters in fp32 whatever the precision.
pub(crate) fn copy_element(chain: &Chain, tensor: usize, precision: Precision) -> Element {
    chain.copy_elements(tensor, precision).map_or(Element::F32, |_| element(precision))
}

/// Room for the sum that layers add to.
pub(crate) fn gradient_room(
    device: &dyn Device,
    chain: &Chain,
    tensor: usize,
    precision: Precision,
) -> Result<GradientSum> {
    let who = format!("gradient of {}", chain.tensors[tensor].name);
    let elements = chain.gradient_elements(tensor, precision);
    Ok(GradientSum { sum: Tensor::new(device.arena(), &who, elements)?, started: false })
}

/// Clears what stands in a copy past the parameters: rows that only round its length up.
pub(crate) fn zero_rest(device: &dyn Device, after: &Mark, copy: &mut Tensor, elements: usize) -> Result {
    let rest = elements..copy.len();
    if !rest.is_empty() {
        device.write_bytes(after, copy, rest, &mut |_, out| out.fill(0))?;
    }
    Ok(())
}

/// Sets a tensor by a function that may fail.
pub fn write(device: &dyn Device, tensor: &mut Tensor, set: impl FnOnce(&mut [f32]) -> Result) -> Result {
    let (mut set, mut result) = (Some(set), Ok(()));
    device.write_floats(tensor, &mut |out| {
        if let Some(set) = set.take() {
            result = set(out);
        }
    })?;
    result
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use shoal_kernels::CpuDevice;
    use shoal_model::presets;

    use super::*;

    /// What a host keeps for layers that compute in halves is its parameters, rounded, from the start and whenever they are
    /// set again; what layers read in fp32 has no copy.
    #[test]
    fn a_host_keeps_rounded_copies_of_what_it_is_given() {
        let chain = Chain::new(&presets::preset("gpt2-tiny").unwrap());
        let device = Arc::new(CpuDevice::new("cpu:0", 1, 1 << 24).unwrap());
        let tiers = Tiers::around(device, "host", 2, 1 << 24, Path::new("")).unwrap();
        for (tensor, spec) in chain.tensors.iter().enumerate().take(8) {
            let slice = Slice { start: spec.elements() / 3, end: spec.elements() };
            let mut held = HeldSlice::in_memory(&*tiers.host, spec, slice, Tier::Host, false, None).unwrap();
            held.add_copy(&tiers, spec, copy_element(&chain, tensor, Precision::Bf16)).unwrap();
            for key in 0..2 {
                let fill = |out: &mut [f32]| {
                    shoal_kernels::random::fill_normal(out, key, 0, 1.0);
                    Ok(())
                };
                held.set(&tiers, 0, fill).unwrap();
                let SliceTensors { parameter, copy, .. } = held.tensors();
                assert_eq!(copy.is_none(), spec.name.contains("ln_"), "{}", spec.name);
                let Some(copy) = copy else { continue };
                let mut expected = vec![0; 2 * slice.count()];
                Element::Bf16.write(parameter.floats(), &mut expected);
                let found = tiers.host.host_bytes(&Mark::default(), copy, 0..copy.len()).unwrap();
                assert!(*found == expected, "{}", spec.name);
            }
        }
    }

    /// Norms compute in fp32 in every precision, so their parameters are gathered as they are.
    #[test]
    fn what_layers_read_in_fp32_is_copied_in_fp32() {
        let chain = Chain::new(&presets::preset("gpt2-tiny").unwrap());
        let device = CpuDevice::new("cpu:0", 1, 1 << 30).unwrap();
        for (tensor, spec) in chain.tensors.iter().enumerate() {
            let is_norm = spec.name.contains("ln_");
            let room = compute_room(&device, &chain, tensor, Precision::Bf16).unwrap();
            assert_eq!(room.element() == Element::F32, is_norm, "{}", spec.name);
            assert_eq!(
                compute_room(&device, &chain, tensor, Precision::Fp32).unwrap().element(),
                Element::F32
            );
        }
    }
}
