//! What was measured of devices and links, as profile.json keeps it. It says nothing of how many machines there are:
//! profiles of several machines are merged into one. docs/profile.md describes the file.

mod correct;
mod merge;
mod read;
mod write;

use std::path::Path;

use serde::{Deserialize, Serialize};
use shoal_model::{Chain, Precision};

use crate::catalogue;
use crate::curve::TimeCurve;
use crate::error::Result;
use crate::link::Link;

pub use correct::{Corrected, Correction, Seen};
pub(crate) use write::{rounded, rounded_each, rounded_option, rounded_pairs};

/// How a profile calls the device that was measured where it is a processor.
pub const PROCESSOR: &str = "the processor";

/// Raised when the file's meaning changes.
pub const FORMAT: u32 = 2;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    pub format: u32,
    pub model: String,
    /// Rows of a sample: tokens, a class and its patches, or one.
    pub sequence: usize,
    pub devices: Vec<DeviceProfile>,
    #[serde(default)]
    pub links: Vec<LinkProfile>,
}

/// A model on one kind of device, in one precision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceProfile {
    /// The catalogue's name where it knows the kind.
    pub kind: String,
    /// The device that was measured, in words.
    pub device: String,
    pub precision: Precision,
    /// Whether it was worked out from public figures and not measured.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub estimated: bool,
    /// Of the optimizer on the device, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "rounded_option")]
    pub update_seconds_per_parameter: Option<f64>,
    /// Of a processor, which computes and handles messages by the same cores: what a byte that it sends or receives takes of
    /// one of them. A GPU has a host for that.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "rounded_option")]
    pub handling_seconds_per_byte: Option<f64>,
    /// And for how long a message waits there, beside its bytes, until those who compute let those run who handle it.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "rounded_option")]
    pub handling_seconds_per_message: Option<f64>,
    /// Of a device that is a part of a chip and was measured while all of it was at work: what its layers take while the others
    /// rest, as a share of that.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "rounded_option")]
    pub alone: Option<f64>,
    /// A whole step: forward, backward, update.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<TimeCurve>,
    pub layers: Vec<LayerProfile>,
}

/// Layers of the chain that are equal, measured as one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerProfile {
    /// Their names, in the order of the chain.
    pub layers: Vec<String>,
    /// Numbers that are trained, in each of them.
    pub parameters: u64,
    /// Operations of one sample's forward.
    pub forward_flops: u64,
    /// Bytes that one sample hands on.
    pub output_bytes: u64,
    pub forward: TimeCurve,
    /// Without recomputation.
    pub backward: TimeCurve,
}

/// What a measured link joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkScope {
    /// A device and its host's memory, each way.
    Host,
    /// Two devices of a node.
    Device,
    /// Two processes, by the network's protocols.
    Process,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkProfile {
    pub scope: LinkScope,
    /// The kind of the devices that it joins; for processes, what they talked over.
    pub kind: String,
    pub link: Link,
}

impl Profile {
    pub fn read(path: &Path) -> Result<Profile> {
        read::file(path)
    }

    /// From the text of a profile, of this format or an older one; errors give the name.
    pub fn parse(text: &str, name: &str) -> Result<Profile> {
        read::text(text, name)
    }

    pub fn write(&self, path: &Path) -> Result<()> {
        write::file(self, path)
    }

    /// As [`write`](Profile::write) writes it: numbers of five digits.
    pub fn to_text(&self) -> String {
        write::text(self)
    }

    /// One profile of what several machines measured. Where both measured the same, the mean is taken if they are as
    /// close as two machines of a kind are; if not, the error names what they differ in.
    pub fn merge(self, other: Profile) -> Result<Profile> {
        merge::profiles(self, other)
    }

    /// The same, held to what layers took in a run, with how far off it was.
    pub fn corrected(self, precision: Precision, seen: &[Seen]) -> Corrected {
        correct::by_what_was_seen(self, precision, seen)
    }

    /// What is known of a kind in a precision; what was measured comes before what was estimated. A processor is measured by
    /// its maker's name for it, and is what a fleet calls a CPU if it is the only one.
    pub fn device(&self, kind: &str, precision: Precision) -> Option<&DeviceProfile> {
        let found = || self.devices.iter().filter(|device| device.precision == precision);
        let is_it = |device: &&DeviceProfile| catalogue::same(&device.kind, kind);
        let measured = found().find(|device| !device.estimated && is_it(device));
        measured.or_else(|| self.only_processor(kind, precision)).or_else(|| found().find(is_it))
    }

    fn only_processor(&self, kind: &str, precision: Precision) -> Option<&DeviceProfile> {
        let is_one = |device: &&DeviceProfile| device.device == PROCESSOR && device.precision == precision;
        let mut processors = self.devices.iter().filter(is_one).filter(|device| !device.estimated);
        let first = processors.next().filter(|_| catalogue::same(kind, catalogue::CPU))?;
        processors.next().is_none().then_some(first)
    }

    pub fn link(&self, scope: LinkScope, kind: &str) -> Option<&Link> {
        let found = self.links.iter().find(|link| link.scope == scope && catalogue::same(&link.kind, kind));
        found.map(|found| &found.link)
    }
}

/// The layers of a chain that are equal: the same work by the same number of parameters. Each is measured once.
pub fn equal_layers(chain: &Chain) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let shapes = |layer: usize| {
        let tensors = chain.layers[layer].tensors.iter();
        tensors.map(|(slot, tensor)| (*slot, &chain.tensors[*tensor].shape)).collect::<Vec<_>>()
    };
    for (layer, of) in chain.layers.iter().enumerate() {
        let is_equal = |group: &&mut Vec<usize>| {
            chain.layers[group[0]].kind == of.kind && shapes(group[0]) == shapes(layer)
        };
        match groups.iter_mut().find(is_equal) {
            Some(group) => group.push(layer),
            None => groups.push(vec![layer]),
        }
    }
    groups
}

impl LayerProfile {
    /// What a chain says of equal layers; nothing is measured yet. A tied tensor counts in each layer that uses it.
    pub fn described(chain: &Chain, equal: &[usize], precision: Precision, sequence: usize) -> LayerProfile {
        let of = &chain.layers[equal[0]];
        let tensors = of.tensors.iter().map(|(_, tensor)| &chain.tensors[*tensor]);
        let trained = tensors.filter(|spec| spec.running.is_none());
        LayerProfile {
            layers: equal.iter().map(|layer| chain.layers[*layer].name.clone()).collect(),
            parameters: trained.map(|spec| spec.elements() as u64).sum(),
            forward_flops: of.kind.forward_flops(sequence),
            output_bytes: of.kind.output_bytes(1, sequence, precision),
            forward: TimeCurve::default(),
            backward: TimeCurve::default(),
        }
    }
}

impl DeviceProfile {
    pub fn layer(&self, name: &str) -> Option<&LayerProfile> {
        self.layers.iter().find(|profile| profile.layers.iter().any(|layer| layer == name))
    }
}
