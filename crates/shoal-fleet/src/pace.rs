//! Devices that were seen to work slower than their kind, or quicker: each pace makes a kind of its own, so that whoever
//! takes devices of a kind for alike is right to.

use crate::costs::Costs;
use crate::fleet::Fleet;

/// What all devices take that are as quick as their kind.
pub const AS_PROFILED_PERCENT: u32 = 100;

/// The fleet and its costs, where every device takes so many hundredths of what its kind does. Its kind is then called
/// `V100 at 300 %`.
///
/// # Panics
/// If there is not a pace for every device.
pub fn paced(fleet: &Fleet, costs: &Costs, percent: &[u32]) -> (Fleet, Costs) {
    assert_eq!(fleet.devices.len(), percent.len(), "a pace a device");
    let (mut fleet, mut costs) = (fleet.clone(), costs.clone());
    for (device, percent) in percent.iter().enumerate() {
        if *percent != AS_PROFILED_PERCENT {
            // Nothing is done in no time.
            let percent = (*percent).max(1);
            let kind = &mut fleet.devices[device].kind;
            *kind = format!("{kind} at {percent} %");
            costs.stretch(device, kind, f64::from(percent) / 100.0);
        }
    }
    (fleet, costs)
}
