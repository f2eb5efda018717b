//! A profile held to what a run took. Layers are measured one after the other; in a run all devices of a machine are busy at
//! once, for long: clocks fall, memory is shared. By how much is known once something has run.

use shoal_model::Precision;

use super::Profile;
use crate::catalogue;

/// What a layer took on a kind of device in a run, beside what the profile says of as many samples.
#[derive(Clone, Debug)]
pub struct Seen {
    pub kind: String,
    pub layer: String,
    pub is_backward: bool,
    pub seconds: f64,
    pub expected_seconds: f64,
    /// How much of the rest of its chip computed meanwhile, where the device is a part of one.
    pub beside: Option<f64>,
}

/// How many times longer than profiled equal layers took on a kind of device.
#[derive(Clone, Debug, PartialEq)]
pub struct Correction {
    pub kind: String,
    /// The first of them.
    pub layer: String,
    pub forward: f64,
    pub backward: f64,
}

/// A profile that was held to what was seen, and how far off it was.
#[derive(Clone, Debug)]
pub struct Corrected {
    pub profile: Profile,
    pub layers: Vec<Correction>,
    /// Kinds of devices that are parts of chips: what layers take while the others rest, of what they take beside them.
    pub alone: Vec<(String, f64)>,
}

/// Sums of what was seen and what was expected.
#[derive(Clone, Copy, Default)]
struct Sums(f64, f64);

impl Sums {
    /// Where layers take a share of their time while neighbours rest.
    fn of<'a>(all: impl Iterator<Item = &'a Seen>, alone: f64) -> Sums {
        all.fold(Sums::default(), |Sums(seen, expected), next| {
            let slowness = alone + (1.0 - alone) * next.beside.unwrap_or(1.0);
            Sums(seen + next.seconds, expected + slowness * next.expected_seconds)
        })
    }

    fn times(self) -> Option<f64> {
        let times = self.0 / self.1;
        (times.is_finite() && times > 0.0).then_some(times)
    }
}

/// By how much of its chip's rest must vary what computes beside a device (a standard deviation) for its effect to be seen.
const BESIDE_VARIES: f64 = 0.1;
/// No chip is shared by so many that one of them takes less of its time while the others rest.
const ALONE_LEAST: f64 = 0.05;

/// What layers take while neighbours rest, as a share of what they take beside them: by the line through what was seen, each
/// by its length. None where neighbours computed about as much all the time.
fn alone<'a>(all: impl Iterator<Item = &'a Seen>) -> Option<f64> {
    let points = all.filter_map(|seen| {
        let times = seen.seconds / seen.expected_seconds;
        let is_one = times.is_finite() && seen.expected_seconds > 0.0;
        Some((seen.expected_seconds, seen.beside?, times)).filter(|_| is_one)
    });
    let [mut weight, mut x, mut y, mut xx, mut xy] = [0.0; 5];
    for (seconds, beside, times) in points {
        weight += seconds;
        x += seconds * beside;
        y += seconds * times;
        xx += seconds * beside * beside;
        xy += seconds * beside * times;
    }
    let variance = xx / weight - (x / weight).powi(2);
    // Nothing at all is no number, and does not vary.
    if variance.is_nan() || variance < BESIDE_VARIES * BESIDE_VARIES {
        return None;
    }
    let slope = (xy / weight - x / weight * y / weight) / variance;
    let at_rest = y / weight - slope * x / weight;
    Some((at_rest / (at_rest + slope)).clamp(ALONE_LEAST, 1.0)).filter(|alone| !alone.is_nan())
}

/// Curves are stretched as a whole: one size of pieces was seen, and the others are taken to differ likewise. Layers of a
/// kind of device that none was seen of differ as all of that device's do.
pub(super) fn by_what_was_seen(mut profile: Profile, precision: Precision, seen: &[Seen]) -> Corrected {
    let (mut layers, mut alones) = (Vec::new(), Vec::new());
    // A fleet may call a device otherwise than the profile does.
    let mut seen = seen.to_vec();
    for seen in &mut seen {
        if let Some(device) = profile.device(&seen.kind, precision) {
            seen.kind.clone_from(&device.kind);
        }
    }
    for device in profile.devices.iter_mut().filter(|device| device.precision == precision) {
        let here = || seen.iter().filter(|seen| catalogue::same(&seen.kind, &device.kind));
        let found = alone(here());
        let alone = found.or(device.alone).unwrap_or(1.0);
        let Some(all) = Sums::of(here(), alone).times() else { continue };
        for row in &mut device.layers {
            let of = |is_backward: bool| {
                let these =
                    here().filter(|seen| seen.is_backward == is_backward && row.layers.contains(&seen.layer));
                Sums::of(these, alone).times()
            };
            let (forward, backward) = (of(false), of(true));
            if let (Some(forward), Some(backward), Some(layer)) = (forward, backward, row.layers.first()) {
                let (kind, layer) = (device.kind.clone(), layer.clone());
                layers.push(Correction { kind, layer, forward, backward });
            }
            row.forward = row.forward.slowed(forward.unwrap_or(all));
            row.backward = row.backward.slowed(backward.unwrap_or(all));
        }
        device.step = device.step.as_ref().map(|step| step.slowed(all));
        if let Some(alone) = found {
            device.alone = Some(alone);
            alones.push((device.kind.clone(), alone));
        }
    }
    Corrected { profile, layers, alone: alones }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve::TimeCurve;
    use crate::profile::{DeviceProfile, FORMAT, LayerProfile};

    fn profile(kinds: &[&str], names: &[&str]) -> Profile {
        let row = |name: &&str| LayerProfile {
            layers: vec![name.to_string()],
            parameters: 1,
            forward_flops: 1,
            output_bytes: 1,
            forward: TimeCurve::new(vec![1, 2], vec![1.0, 2.0]),
            backward: TimeCurve::new(vec![1, 2], vec![2.0, 4.0]),
        };
        let device = |kind: &&str| DeviceProfile {
            kind: kind.to_string(),
            device: kind.to_string(),
            precision: Precision::Bf16,
            estimated: false,
            update_seconds_per_parameter: None,
            handling_seconds_per_byte: None,
            handling_seconds_per_message: None,
            alone: None,
            step: None,
            layers: names.iter().map(row).collect(),
        };
        Profile {
            format: FORMAT,
            model: "test".into(),
            sequence: 1,
            devices: kinds.iter().map(device).collect(),
            links: Vec::new(),
        }
    }

    #[test]
    fn layers_that_were_seen_are_corrected_by_themselves_and_others_as_their_device() {
        let profile = profile(&["a", "b"], &["block 0", "head"]);
        let seen = |is_backward, seconds, expected_seconds| Seen {
            kind: "a".into(),
            layer: "block 0".into(),
            is_backward,
            seconds,
            expected_seconds,
            beside: None,
        };
        let seen = [seen(false, 3.0, 2.0), seen(false, 3.0, 2.0), seen(true, 2.0, 4.0)];
        let Corrected { profile: corrected, layers: corrections, alone } =
            by_what_was_seen(profile.clone(), Precision::Bf16, &seen);
        assert!(alone.is_empty());
        let [a, b] = &corrected.devices[..] else { panic!("two devices") };
        assert_eq!(a.layers[0].forward.seconds, [1.5, 3.0]);
        assert_eq!(a.layers[0].backward.seconds, [1.0, 2.0]);
        assert_eq!(a.layers[1].forward.seconds, [1.0, 2.0]);
        assert_eq!(b, &profile.devices[1]);
        assert_eq!(corrections.len(), 1);
        assert_eq!((corrections[0].forward, corrections[0].backward), (1.5, 0.5));
    }

    #[test]
    fn what_layers_take_alone_is_seen_where_neighbours_rest_now_and_then() {
        let profile = profile(&["25 % of H200"], &["block 0"]);
        // Beside all others everything takes 1.5 times what was profiled, and alone 0.8 of that.
        let seen = |is_backward: bool, beside: f64| {
            let expected_seconds = if is_backward { 2.0 } else { 1.0 };
            Seen {
                kind: "25 % of H200".into(),
                layer: "block 0".into(),
                is_backward,
                seconds: 1.5 * expected_seconds * (0.8 + 0.2 * beside),
                expected_seconds,
                beside: Some(beside),
            }
        };
        let varied = [seen(false, 0.0), seen(true, 0.25), seen(false, 1.0), seen(true, 1.0)];
        let corrected = by_what_was_seen(profile.clone(), Precision::Bf16, &varied);
        let device = &corrected.profile.devices[0];
        assert!((corrected.alone[0].1 - 0.8).abs() < 1e-9 && device.alone == Some(corrected.alone[0].1));
        let curves = [&device.layers[0].forward, &device.layers[0].backward].map(|curve| curve.seconds[0]);
        assert!((curves[0] - 1.5).abs() < 1e-9 && (curves[1] - 3.0).abs() < 1e-9, "{curves:?}");
        // Where they always computed as much, nothing is known of how it is alone; what was known before stays.
        let steady = [seen(false, 0.9), seen(true, 0.95)];
        let mut known = profile;
        known.devices[0].alone = Some(0.7);
        let corrected = by_what_was_seen(known, Precision::Bf16, &steady);
        assert!(corrected.alone.is_empty());
        assert_eq!(corrected.profile.devices[0].alone, Some(0.7));
    }
}
