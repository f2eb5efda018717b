//! A profile from its text: of this format, or of the first, which knew one device.

use std::path::Path;

use serde::Deserialize;
use shoal_model::Precision;

use super::{DeviceProfile, FORMAT, LayerProfile, Profile};
use crate::catalogue;
use crate::curve::TimeCurve;
use crate::error::{Error, Result};

pub(super) fn file(path: &Path) -> Result<Profile> {
    let read = std::fs::read_to_string(path).map_err(|cause| Error::Io { path: path.into(), cause })?;
    text(&read, &path.display().to_string())
}

pub(super) fn text(text: &str, name: &str) -> Result<Profile> {
    #[derive(Deserialize)]
    struct Header {
        format: u32,
    }
    let bad = |what: String| Error::Profile { file: name.into(), what };
    let json = |error: serde_json::Error| bad(format!("it is no profile: {error}"));
    let header: Header = serde_json::from_str(text).map_err(json)?;
    let mut profile = match header.format {
        1 => serde_json::from_str::<First>(text).map_err(json)?.into(),
        FORMAT => serde_json::from_str::<Profile>(text).map_err(json)?,
        other => return Err(bad(format!("it has the format {other}; this version reads 1 and {FORMAT}"))),
    };
    for device in &mut profile.devices {
        device.kind = catalogue::name(&device.kind);
    }
    match defect(&profile) {
        Some(what) => Err(bad(what)),
        None => Ok(profile),
    }
}

fn defect(profile: &Profile) -> Option<String> {
    for device in &profile.devices {
        let of = format!("{} in {}", device.kind, device.precision.name());
        if let Some(seconds) = device.update_seconds_per_parameter.filter(|seconds| !is_time(*seconds)) {
            return Some(format!("{of}: update_seconds_per_parameter is {seconds}"));
        }
        let handling = [
            ("handling_seconds_per_byte", device.handling_seconds_per_byte),
            ("handling_seconds_per_message", device.handling_seconds_per_message),
        ];
        for (key, seconds) in handling {
            if let Some(seconds) = seconds.filter(|seconds| !is_time(*seconds)) {
                return Some(format!("{of}: {key} is {seconds}"));
            }
        }
        if let Some(alone) = device.alone.filter(|alone| !(*alone > 0.0 && *alone <= 1.0)) {
            return Some(format!("{of}: alone is {alone}, and lies above 0 and up to 1"));
        }
        if let Some(what) = device.step.as_ref().and_then(TimeCurve::defect) {
            return Some(format!("{of}: step {what}"));
        }
        for layer in &device.layers {
            let Some(first) = layer.layers.first() else {
                return Some(format!("{of}: an entry of layers names none"));
            };
            for (key, curve) in [("forward", &layer.forward), ("backward", &layer.backward)] {
                if let Some(what) = curve.defect() {
                    return Some(format!("{of}, layer {first}: {key} {what}"));
                }
            }
        }
    }
    let wrong = profile.links.iter().find(|link| {
        let rates = link.link.by_size.iter().map(|(_, rate)| *rate);
        !is_time(link.link.seconds_latency)
            || rates.chain([link.link.bytes_per_second]).any(|rate| !(rate.is_finite() && rate > 0.0))
            || !link.link.by_size.is_sorted_by(|a, b| a.0 < b.0)
    });
    wrong.map(|link| format!("the link of {}: rates are positive, and sizes rise", link.kind))
}

fn is_time(seconds: f64) -> bool {
    seconds.is_finite() && seconds >= 0.0
}

/// The first format: one device, every layer by itself, one list of samples for all.
#[derive(Deserialize)]
struct First {
    model: String,
    device: String,
    precision: Precision,
    sequence: usize,
    samples: Vec<usize>,
    step_seconds: Vec<f64>,
    layers: Vec<FirstLayer>,
}

#[derive(Deserialize)]
struct FirstLayer {
    layer: String,
    parameters: u64,
    forward_flops: u64,
    output_bytes: u64,
    forward_seconds: Vec<f64>,
    backward_seconds: Vec<f64>,
}

impl From<First> for Profile {
    fn from(first: First) -> Profile {
        let curve = |seconds: Vec<f64>| TimeCurve::new(first.samples.clone(), seconds);
        let layer = |layer: FirstLayer| LayerProfile {
            layers: vec![layer.layer],
            parameters: layer.parameters,
            forward_flops: layer.forward_flops,
            output_bytes: layer.output_bytes,
            forward: curve(layer.forward_seconds),
            backward: curve(layer.backward_seconds),
        };
        // It named GPUs as `cuda:0 (MODEL)`, and processors not at all.
        let model = first.device.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')'));
        let device = DeviceProfile {
            kind: model.unwrap_or(catalogue::CPU).to_owned(),
            precision: first.precision,
            estimated: false,
            update_seconds_per_parameter: None,
            handling_seconds_per_byte: None,
            handling_seconds_per_message: None,
            alone: None,
            step: Some(curve(first.step_seconds)),
            layers: first.layers.into_iter().map(layer).collect(),
            device: first.device,
        };
        Profile {
            format: FORMAT,
            model: first.model,
            sequence: first.sequence,
            devices: vec![device],
            links: Vec::new(),
        }
    }
}
