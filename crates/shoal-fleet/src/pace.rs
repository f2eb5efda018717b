//! Devices that were seen to work slower than their kind, or quicker: each pace makes a kind of its own, so that whoever
//! takes devices of a kind for alike is right to. And whole fleets that are played slower than they are, links too.

use crate::costs::Costs;
use crate::fleet::Fleet;
use crate::link::Link;

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

/// The fleet and its costs, where everything lasts so many times longer: what devices and hosts do, and what passes links
/// and disks.
pub fn stretched(fleet: &Fleet, costs: &Costs, times: f64) -> (Fleet, Costs) {
    let (mut fleet, mut costs) = (fleet.clone(), costs.clone());
    if times == 1.0 {
        return (fleet, costs);
    }
    for (index, device) in fleet.devices.iter_mut().enumerate() {
        device.kind = format!("{}, {times} times slower", device.kind);
        costs.stretch(index, &device.kind, times);
        stretch(&mut device.host_link, times);
    }
    for node in &mut fleet.nodes {
        node.host_bytes_per_second /= times;
        stretch(&mut node.network, times);
        node.device_link.iter_mut().for_each(|link| stretch(link, times));
        if let Some(disk) = &mut node.disk {
            disk.read_bytes_per_second /= times;
            disk.write_bytes_per_second /= times;
        }
    }
    stretch(&mut fleet.zone_link, times);
    let pairs = fleet.zone_pairs.values_mut().chain(fleet.node_pairs.values_mut());
    pairs.for_each(|link| stretch(link, times));
    costs.stretch_hosts(times);
    (fleet, costs)
}

fn stretch(link: &mut Link, times: f64) {
    link.seconds_latency *= times;
    link.bytes_per_second /= times;
    link.by_size.iter_mut().for_each(|(_, rate)| *rate /= times);
}
