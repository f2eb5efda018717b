//! One profile from two. What only one of them measured is taken over; what both measured must agree.

use std::collections::BTreeMap;

use super::{DeviceProfile, LayerProfile, LinkProfile, Profile};
use crate::catalogue;
use crate::curve::TimeCurve;
use crate::error::{Error, Result};

/// How far apart two measurements of one kind may lie, as a share of the larger. Clocks, cooling and neighbours make
/// a tenth or two; more than this is another device, or a mistake.
const AGREEMENT: f64 = 0.25;

pub(super) fn profiles(mut one: Profile, other: Profile) -> Result<Profile> {
    let differ = |what: String| Err(Error::Contradiction { what });
    if one.model != other.model {
        return differ(format!("one is of the model {}, the other of {}", one.model, other.model));
    }
    if one.sequence != other.sequence {
        return differ(format!("one has samples of {} rows, the other of {}", one.sequence, other.sequence));
    }
    for device in other.devices {
        let same = |known: &&mut DeviceProfile| {
            known.precision == device.precision && catalogue::same(&known.kind, &device.kind)
        };
        match one.devices.iter_mut().find(same) {
            None => one.devices.push(device),
            // A measurement stands in for an estimate.
            Some(known) if known.estimated && !device.estimated => *known = device,
            Some(known) if device.estimated && !known.estimated => {}
            Some(known) => merge_device(known, device)?,
        }
    }
    for link in other.links {
        let same =
            |known: &&mut LinkProfile| known.scope == link.scope && catalogue::same(&known.kind, &link.kind);
        match one.links.iter_mut().find(same) {
            None => one.links.push(link),
            Some(known) => merge_link(known, &link),
        }
    }
    Ok(one)
}

fn merge_device(known: &mut DeviceProfile, device: DeviceProfile) -> Result<()> {
    let of = format!("{} in {}", known.kind, known.precision.name());
    known.update_seconds_per_parameter =
        match (known.update_seconds_per_parameter, device.update_seconds_per_parameter) {
            (Some(a), Some(b)) => Some(agreed(a, b, || format!("{of}: the update of a parameter"))?),
            (a, b) => a.or(b),
        };
    // It swings with whatever else runs, as links do.
    let least = |known: Option<f64>, other: Option<f64>| match (known, other) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    };
    known.handling_seconds_per_byte =
        least(known.handling_seconds_per_byte, device.handling_seconds_per_byte);
    known.handling_seconds_per_message =
        least(known.handling_seconds_per_message, device.handling_seconds_per_message);
    known.alone = match (known.alone, device.alone) {
        (Some(a), Some(b)) => Some((a + b) / 2.0),
        (a, b) => a.or(b),
    };
    known.step = match (known.step.take(), device.step) {
        (Some(a), Some(b)) => Some(merge_curve(&a, &b, &format!("{of}: a step"))?),
        (a, b) => a.or(b),
    };
    let (mut rows, mut others) = (std::mem::take(&mut known.layers), device.layers);
    let is_grouped_alike = others.iter().all(|other| {
        let shares = |row: &&LayerProfile| row.layers.iter().any(|name| other.layers.contains(name));
        rows.iter().find(shares).is_none_or(|row| row.layers == other.layers)
    });
    if !is_grouped_alike {
        (rows, others) = (split(rows), split(others));
    }
    for other in others {
        match rows.iter_mut().find(|row| row.layers == other.layers) {
            None => rows.push(other),
            Some(row) => merge_layer(row, &other, &of)?,
        }
    }
    known.layers = rows;
    Ok(())
}

/// Every layer by itself, where two profiles hold different layers to be equal.
fn split(rows: Vec<LayerProfile>) -> Vec<LayerProfile> {
    let single =
        |row: &LayerProfile, name: &String| LayerProfile { layers: vec![name.clone()], ..row.clone() };
    rows.iter().flat_map(|row| row.layers.iter().map(move |name| single(row, name))).collect()
}

fn merge_layer(row: &mut LayerProfile, other: &LayerProfile, of: &str) -> Result<()> {
    let name = &row.layers[0];
    let counts = [
        ("parameters", row.parameters, other.parameters),
        ("forward_flops", row.forward_flops, other.forward_flops),
        ("output_bytes", row.output_bytes, other.output_bytes),
    ];
    if let Some((key, a, b)) = counts.into_iter().find(|(_, a, b)| a != b) {
        return Err(Error::Contradiction {
            what: format!("{of}: {key} of {name} is {a} in one and {b} in the other"),
        });
    }
    row.forward = merge_curve(&row.forward, &other.forward, &format!("{of}: {name}'s forward"))?;
    row.backward =
        merge_curve(&row.backward, &other.backward, &format!("{of}: {}'s backward", row.layers[0]))?;
    Ok(())
}

fn merge_curve(one: &TimeCurve, other: &TimeCurve, of: &str) -> Result<TimeCurve> {
    let points = |curve: &TimeCurve| -> Vec<(usize, f64)> {
        curve.samples.iter().copied().zip(curve.seconds.iter().copied()).collect()
    };
    let mut all: BTreeMap<usize, f64> = points(one).into_iter().collect();
    for (samples, seconds) in points(other) {
        let seconds = match all.get(&samples) {
            Some(known) => agreed(*known, seconds, || format!("{of} of {samples} samples"))?,
            None => seconds,
        };
        all.insert(samples, seconds);
    }
    let (samples, seconds) = all.into_iter().unzip();
    Ok(TimeCurve { samples, seconds, line: one.line.or(other.line) })
}

/// Links swing with whatever else uses them: the best that was seen is what a link can do.
fn merge_link(known: &mut LinkProfile, other: &LinkProfile) {
    let (link, other) = (&mut known.link, &other.link);
    link.bytes_per_second = link.bytes_per_second.max(other.bytes_per_second);
    link.seconds_latency = link.seconds_latency.min(other.seconds_latency);
    let mut by_size: BTreeMap<u64, f64> = link.by_size.iter().copied().collect();
    for (bytes, measured) in &other.by_size {
        let best = by_size.entry(*bytes).or_insert(*measured);
        *best = best.max(*measured);
    }
    link.by_size = by_size.into_iter().collect();
}

/// The mean of two times that are close.
fn agreed(one: f64, other: f64, what: impl Fn() -> String) -> Result<f64> {
    if (one - other).abs() > AGREEMENT * one.max(other) {
        let what = format!("{} takes {one:.4e} s in one and {other:.4e} s in the other", what());
        return Err(Error::Contradiction { what });
    }
    Ok((one + other) / 2.0)
}
