//! The plan: one row per layer (which device runs which samples, in which micro-batches, and what becomes
//! of its activations) and one row per tensor (who holds its compute copy, its gradient sum and its
//! optimizer slices). A tied tensor has one row, whichever layers use it.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use shoal_model::{Chain, Precision};
use thiserror::Error;

/// Written into every plan and program; raised when their meaning changes.
pub const FORMAT: u32 = 3;

/// A run of samples by their numbers in the global batch; in JSON `[start, end]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "[usize; 2]", from = "[usize; 2]")]
pub struct Samples {
    pub start: usize,
    pub end: usize,
}

impl Samples {
    pub fn new(range: Range<usize>) -> Samples {
        Samples { start: range.start, end: range.end }
    }

    pub fn range(self) -> Range<usize> {
        self.start..self.end
    }

    pub fn count(self) -> usize {
        self.end.saturating_sub(self.start)
    }
}

impl From<[usize; 2]> for Samples {
    fn from([start, end]: [usize; 2]) -> Samples {
        Samples { start, end }
    }
}

impl From<Samples> for [usize; 2] {
    fn from(samples: Samples) -> [usize; 2] {
        [samples.start, samples.end]
    }
}

impl fmt::Display for Samples {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "samples {}..{}", self.start, self.end)
    }
}

/// A piece of a tensor, in elements; in JSON `[start, end]`.
pub type Slice = Samples;

/// What becomes of a layer's inner tensors between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activations {
    Keep,
    /// Made again from the layer's input.
    Recompute,
    /// The same, and the input waits in host memory.
    Offload,
}

/// One device's share of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compute {
    /// Index into [`Plan::devices`].
    pub device: usize,
    pub micro_batches: Vec<Samples>,
    pub activations: Activations,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerRow {
    pub layer: String,
    pub compute: Vec<Compute>,
}

/// A place that holds state. Each is served by one device's lanes: host memory and disks by a device of their
/// machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Holder {
    /// A device's own memory.
    Device(usize),
    /// The memory of the host that the device is in.
    Host(usize),
    /// A disk of that host.
    Disk(usize),
}

impl Holder {
    /// The device whose program does what is done there.
    pub fn device(self) -> usize {
        match self {
            Holder::Device(device) | Holder::Host(device) | Holder::Disk(device) => device,
        }
    }

    /// The same kind of memory, of another device or its host.
    pub fn of(self, device: usize) -> Holder {
        match self {
            Holder::Device(_) => Holder::Device(device),
            Holder::Host(_) => Holder::Host(device),
            Holder::Disk(_) => Holder::Disk(device),
        }
    }

    pub fn tier(self) -> Tier {
        match self {
            Holder::Device(_) => Tier::Device,
            Holder::Host(_) => Tier::Host,
            Holder::Disk(_) => Tier::Disk,
        }
    }
}

/// A kind of memory, the nearest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    #[default]
    Device,
    Host,
    Disk,
}

impl Tier {
    pub fn is_device(&self) -> bool {
        *self == Tier::Device
    }
}

/// Whether a compute copy stays or is brought for each use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Residence {
    /// It stays, and each update renews it.
    Resident,
    /// It is gathered from the optimizer's slices before it is used, and dropped afterwards.
    Fetched,
}

/// A device's copy of a tensor, as its layers read it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ComputeCopy {
    pub device: usize,
    pub residence: Residence,
}

/// A slice and who holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Held {
    pub holder: Holder,
    pub slice: Slice,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRow {
    pub tensor: String,
    pub elements: usize,
    pub compute_copies: Vec<ComputeCopy>,
    /// Who adds up which slice of the gradient. A slice may have several holders, which all get the whole sum.
    pub gradient: Vec<Held>,
    /// Who keeps and updates which slice of the parameters and of the optimizer's state. Several holders of a
    /// slice apply the same update: replicas where they compute with it, mirrors where they keep it against loss.
    pub optimizer: Vec<Held>,
}

impl TensorRow {
    /// Each slice of the optimizer's column once, with the devices that serve its holders, in the table's order.
    pub fn slices(&self) -> BTreeMap<Slice, Vec<usize>> {
        let mut slices: BTreeMap<Slice, Vec<usize>> = BTreeMap::new();
        for held in &self.optimizer {
            let devices = slices.entry(held.slice).or_default();
            if !devices.contains(&held.holder.device()) {
                devices.push(held.holder.device());
            }
        }
        slices
    }
}

/// In which order a device works through its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// A micro-batch goes forward through all the device's layers and straight back: least memory.
    MicroBatchFirst,
    /// All micro-batches of a layer before the next layer: each layer's parameters are wanted once.
    LayerFirst,
    /// Backward before forward, with as many micro-batches under way as there are devices behind this one.
    OneForwardOneBackward,
    /// Backward before recomputation before forward, by what they cost; recomputation is done while the gradient is
    /// still on its way.
    Varuna,
    /// All forwards, then all backwards.
    Gpipe,
}

/// A device as a plan knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceRow {
    pub name: String,
    /// The most bytes the plan may use there.
    pub budget_bytes: u64,
    /// Bytes the device takes for itself, whatever it runs.
    pub workspace_bytes: u64,
    /// The most micro-batches it may have between forward and backward; by default what the order asks for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stash: Option<usize>,
    /// How many backwards a forward may go before where their gradients are late, and how many forwards a backward where
    /// their inputs are. By default computations keep their order. Of no use where nothing comes from another device, nor in
    /// chains with branches: there whoever is the last to read a shared value depends on that order, and with it when its
    /// memory is free.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub leeway: usize,
    /// How many units' gradients of weights may wait while backwards that other devices wait for go first: in time in which it
    /// would have nothing to do they are added up. Only where micro-batches follow each other, and of layers that can
    /// ([`LayerKind::puts_off`](shoal_model::LayerKind::puts_off)). By default none do.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub puts_off: usize,
}

/// What is not written.
pub(crate) fn is_zero<T: Default + PartialEq>(number: &T) -> bool {
    *number == T::default()
}

/// In what gradients go to where they are added up; they are added up in fp32 always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GradientWire {
    #[default]
    Fp32,
    /// Half the bytes, with the eight bits of each number that count most.
    Bf16,
}

impl GradientWire {
    pub fn bytes(self) -> usize {
        match self {
            GradientWire::Fp32 => 4,
            GradientWire::Bf16 => 2,
        }
    }

    fn is_exact(&self) -> bool {
        *self == GradientWire::Fp32
    }
}

/// The table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    pub format: u32,
    pub global_batch: usize,
    /// Tokens of a sample.
    pub sequence: usize,
    pub precision: Precision,
    /// State tensors the optimizer keeps per parameter tensor.
    pub optimizer_states: usize,
    #[serde(default, skip_serializing_if = "GradientWire::is_exact")]
    pub gradients: GradientWire,
    pub devices: Vec<DeviceRow>,
    pub order: Order,
    pub layers: Vec<LayerRow>,
    pub tensors: Vec<TensorRow>,
}

/// Why a table is not one: each names the row.
#[derive(Debug, Error, PartialEq)]
pub enum TableError {
    #[error("the plan is of format {found}, this program reads format {FORMAT}")]
    Format { found: u32 },
    #[error("the plan has {found} layer rows, the model {expected}")]
    LayerCount { found: usize, expected: usize },
    #[error("layer row {row} is called \"{found}\", the model's layer is \"{expected}\"")]
    LayerName { row: usize, found: String, expected: String },
    #[error("{layer}: {what}")]
    Compute { layer: String, what: String },
    #[error("the plan has {found} tensor rows, the model {expected}")]
    TensorCount { found: usize, expected: usize },
    #[error("tensor {tensor}: {what}")]
    Tensor { tensor: String, what: String },
}

/// Twelve hexadecimal digits that name some content.
pub fn short_hash(content: &[u8]) -> String {
    blake3::hash(content).to_hex()[..12].to_owned()
}

impl Plan {
    /// A short name that two equal plans share. Budgets do not count: they vary with what else a machine
    /// runs, and change nothing about a plan that fits.
    pub fn id(&self) -> String {
        let mut plan = self.clone();
        plan.devices.iter_mut().for_each(|device| device.budget_bytes = 0);
        short_hash(serde_json::to_string(&plan).unwrap_or_default().as_bytes())
    }

    /// Who holds the same slices of state, replicas and mirrors: the holders of each slice once, by device, the first in the
    /// table first. Slices belong to the same entry if they have the same holders in the same order.
    pub fn holders(&self) -> Vec<Vec<usize>> {
        let sets = self.tensors.iter().flat_map(|row| row.slices().into_values());
        sets.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// The same table for a batch of fewer samples: the first ones.
    pub fn of_first(&self, samples: usize) -> Plan {
        let mut plan = Plan { global_batch: samples.min(self.global_batch), ..self.clone() };
        for compute in plan.layers.iter_mut().flat_map(|row| &mut row.compute) {
            compute.micro_batches.retain(|batch| batch.start < samples);
            for batch in &mut compute.micro_batches {
                batch.end = batch.end.min(samples);
            }
        }
        plan.layers
            .iter_mut()
            .for_each(|row| row.compute.retain(|compute| !compute.micro_batches.is_empty()));
        plan
    }

    /// Whether this is a table for that model: every sample visits every layer once, every element of every
    /// tensor has its holders.
    pub fn check(&self, chain: &Chain) -> Result<(), TableError> {
        if self.format != FORMAT {
            return Err(TableError::Format { found: self.format });
        }
        if self.layers.len() != chain.layers.len() {
            return Err(TableError::LayerCount { found: self.layers.len(), expected: chain.layers.len() });
        }
        for (row, (planned, layer)) in self.layers.iter().zip(&chain.layers).enumerate() {
            if planned.layer != layer.name {
                let (found, expected) = (planned.layer.clone(), layer.name.clone());
                return Err(TableError::LayerName { row, found, expected });
            }
            self.check_layer(planned)?;
        }
        if self.tensors.len() != chain.tensors.len() {
            let (found, expected) = (self.tensors.len(), chain.tensors.len());
            return Err(TableError::TensorCount { found, expected });
        }
        let mut users: Vec<Vec<usize>> = vec![Vec::new(); chain.tensors.len()];
        for (layer, row) in chain.layers.iter().enumerate() {
            row.tensors.iter().for_each(|(_, tensor)| users[*tensor].push(layer));
        }
        for (index, row) in self.tensors.iter().enumerate() {
            let spec = &chain.tensors[index];
            let wrong = |what: String| TableError::Tensor { tensor: spec.name.clone(), what };
            if row.tensor != spec.name || row.elements != spec.elements() {
                return Err(wrong(format!("the row is for {} of {} elements", row.tensor, row.elements)));
            }
            self.check_slices(row, "gradient", &row.gradient)?;
            self.check_slices(row, "optimizer", &row.optimizer)?;
            let mut copies = HashSet::new();
            for copy in &row.compute_copies {
                if copy.device >= self.devices.len() {
                    return Err(wrong(format!("there is no device {}", copy.device)));
                }
                if !copies.insert(copy.device) {
                    return Err(wrong(format!("device {} has two copies", copy.device)));
                }
            }
            for layer in &users[index] {
                let row = &self.layers[*layer];
                if let Some(compute) = row.compute.iter().find(|compute| !copies.contains(&compute.device)) {
                    let (device, layer) = (compute.device, &row.layer);
                    return Err(wrong(format!("device {device} computes {layer} without a copy")));
                }
            }
        }
        Ok(())
    }

    fn check_layer(&self, row: &LayerRow) -> Result<(), TableError> {
        let wrong = |what: String| TableError::Compute { layer: row.layer.clone(), what };
        if let Some(compute) = row.compute.iter().find(|compute| compute.device >= self.devices.len()) {
            return Err(wrong(format!("there is no device {}", compute.device)));
        }
        let mut pieces: Vec<Samples> =
            row.compute.iter().flat_map(|compute| compute.micro_batches.iter().copied()).collect();
        pieces.sort();
        let mut next = 0;
        for piece in pieces {
            if piece.count() == 0 {
                return Err(wrong(format!("the micro-batch of {piece} is empty")));
            }
            if piece.start != next {
                return Err(wrong(format!(
                    "sample {} is computed twice or not at all",
                    next.min(piece.start)
                )));
            }
            next = piece.end;
        }
        if next != self.global_batch {
            return Err(wrong(format!(
                "{next} samples are computed, the global batch is {}",
                self.global_batch
            )));
        }
        Ok(())
    }

    fn check_slices(&self, row: &TensorRow, column: &str, held: &[Held]) -> Result<(), TableError> {
        let wrong = |what: String| TableError::Tensor { tensor: row.tensor.clone(), what };
        let mut slices: Vec<(Slice, Holder)> = held.iter().map(|held| (held.slice, held.holder)).collect();
        slices.sort();
        let mut next = 0;
        for (place, (slice, holder)) in slices.iter().enumerate() {
            if slice.count() == 0 {
                return Err(wrong(format!("{column}: a slice of {holder:?} is empty")));
            }
            // Slices are the same for all their holders, or apart.
            let again = place > 0 && slices[place - 1].0 == *slice;
            if !again && slice.start != next {
                let element = next.min(slice.start);
                return Err(wrong(format!(
                    "{column}: element {element} has no holder, or holders of different slices"
                )));
            }
            if again && slices[place - 1].1 == *holder {
                return Err(wrong(format!("{column}: {holder:?} holds elements {}.. twice", slice.start)));
            }
            next = slice.end;
        }
        if next != row.elements {
            return Err(wrong(format!("{column}: {next} of {} elements have a holder", row.elements)));
        }
        let devices = held.iter().map(|held| held.holder.device());
        match devices.into_iter().find(|device| *device >= self.devices.len()) {
            Some(device) => Err(wrong(format!("{column}: there is no device {device}"))),
            None => Ok(()),
        }
    }
}
