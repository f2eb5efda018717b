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

/// Sums of what was seen and what was expected.
#[derive(Clone, Copy, Default)]
struct Sums(f64, f64);

impl Sums {
    fn of<'a>(all: impl Iterator<Item = &'a Seen>) -> Sums {
        all.fold(Sums::default(), |Sums(seen, expected), next| {
            Sums(seen + next.seconds, expected + next.expected_seconds)
        })
    }

    fn times(self) -> Option<f64> {
        let times = self.0 / self.1;
        (times.is_finite() && times > 0.0).then_some(times)
    }
}

/// Curves are stretched as a whole: one size of pieces was seen, and the others are taken to differ likewise. Layers of a
/// kind of device that none was seen of differ as all of that device's do.
pub(super) fn by_what_was_seen(
    mut profile: Profile,
    precision: Precision,
    seen: &[Seen],
) -> (Profile, Vec<Correction>) {
    let mut corrections = Vec::new();
    // A fleet may call a device otherwise than the profile does.
    let mut seen = seen.to_vec();
    for seen in &mut seen {
        if let Some(device) = profile.device(&seen.kind, precision) {
            seen.kind.clone_from(&device.kind);
        }
    }
    for device in profile.devices.iter_mut().filter(|device| device.precision == precision) {
        let here = || seen.iter().filter(|seen| catalogue::same(&seen.kind, &device.kind));
        let Some(all) = Sums::of(here()).times() else { continue };
        for row in &mut device.layers {
            let of = |is_backward: bool| {
                let these =
                    here().filter(|seen| seen.is_backward == is_backward && row.layers.contains(&seen.layer));
                Sums::of(these).times()
            };
            let (forward, backward) = (of(false), of(true));
            if let (Some(forward), Some(backward), Some(layer)) = (forward, backward, row.layers.first()) {
                let (kind, layer) = (device.kind.clone(), layer.clone());
                corrections.push(Correction { kind, layer, forward, backward });
            }
            row.forward = row.forward.slowed(forward.unwrap_or(all));
            row.backward = row.backward.slowed(backward.unwrap_or(all));
        }
        device.step = device.step.as_ref().map(|step| step.slowed(all));
    }
    (profile, corrections)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve::TimeCurve;
    use crate::profile::{DeviceProfile, FORMAT, LayerProfile};

    #[test]
    fn layers_that_were_seen_are_corrected_by_themselves_and_others_as_their_device() {
        let row = |name: &str| LayerProfile {
            layers: vec![name.into()],
            parameters: 1,
            forward_flops: 1,
            output_bytes: 1,
            forward: TimeCurve::new(vec![1, 2], vec![1.0, 2.0]),
            backward: TimeCurve::new(vec![1, 2], vec![2.0, 4.0]),
        };
        let device = |kind: &str| DeviceProfile {
            kind: kind.into(),
            device: kind.into(),
            precision: Precision::Bf16,
            estimated: false,
            update_seconds_per_parameter: None,
            handling_seconds_per_byte: None,
            handling_seconds_per_message: None,
            step: None,
            layers: vec![row("block 0"), row("head")],
        };
        let profile = Profile {
            format: FORMAT,
            model: "test".into(),
            sequence: 1,
            devices: vec![device("a"), device("b")],
            links: Vec::new(),
        };
        let seen = |is_backward, seconds, expected_seconds| Seen {
            kind: "a".into(),
            layer: "block 0".into(),
            is_backward,
            seconds,
            expected_seconds,
        };
        let seen = [seen(false, 3.0, 2.0), seen(false, 3.0, 2.0), seen(true, 2.0, 4.0)];
        let (corrected, corrections) = by_what_was_seen(profile.clone(), Precision::Bf16, &seen);
        let [a, b] = &corrected.devices[..] else { panic!("two devices") };
        assert_eq!(a.layers[0].forward.seconds, [1.5, 3.0]);
        assert_eq!(a.layers[0].backward.seconds, [1.0, 2.0]);
        assert_eq!(a.layers[1].forward.seconds, [1.0, 2.0]);
        assert_eq!(b, &profile.devices[1]);
        assert_eq!(corrections.len(), 1);
        assert_eq!((corrections[0].forward, corrections[0].backward), (1.5, 0.5));
    }
}
