//! What it takes to bring a layer's parameters together where it is computed, and its gradients back to their holders.
//!
//! All who take part form a ring, node by node, so each node's network interface is crossed once each way, whatever
//! the number of devices behind it. Every link carries what the neediest device lacks; the slowest link counts. So
//! the more evenly slices are cut, the less has to move: it is the smallest slice among those who compute that decides.
//! Where a host keeps a part, the way between hosts and devices carries it too.

use shoal_fleet::{Fleet, Link};

/// Who keeps which share of every tensor; together they are one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shares {
    pub devices: Vec<f64>,
    /// By node, in its host's memory.
    pub hosts: Vec<f64>,
}

/// The ring of a fleet's devices that compute or keep something.
pub(crate) struct Ring {
    /// Each differs from the others.
    links: Vec<Link>,
    latency: f64,
    count: usize,
    /// Of every layer, what the neediest lacks.
    lacking: f64,
    /// Bytes a second between hosts and devices, where hosts take part.
    host_rate: f64,
}

impl Ring {
    pub fn new(fleet: &Fleet, computes: &[bool], shares: &Shares) -> Ring {
        let spills = |node: usize| shares.hosts[node] > 0.0;
        // A host is served by its node's first device.
        let serves = |device: usize| {
            let node = fleet.devices[device].node;
            spills(node) && fleet.nodes[node].devices.start == device
        };
        let members: Vec<usize> = (0..fleet.devices.len())
            .filter(|device| computes[*device] || shares.devices[*device] > 0.0 || serves(*device))
            .collect();
        let least = (0..computes.len()).filter(|at| computes[*at]).map(|at| shares.devices[at]);
        let lacking = (1.0 - least.fold(1.0, f64::min)).max(0.0);
        let (mut links, mut latency): (Vec<Link>, f64) = (Vec::new(), 0.0);
        if members.len() > 1 {
            for (place, from) in members.iter().enumerate() {
                let link = fleet.link(*from, members[(place + 1) % members.len()]);
                latency += link.seconds_latency;
                if !links.contains(&link) {
                    links.push(link);
                }
            }
        }
        let host_rate = match shares.hosts.iter().any(|share| *share > 0.0) {
            false => f64::INFINITY,
            true => members.iter().fold(f64::INFINITY, |rate, device| {
                let device = &fleet.devices[*device];
                rate.min(device.host_link.bytes_per_second)
                    .min(fleet.nodes[device.node].host_bytes_per_second)
            }),
        };
        Ring { links, latency, count: members.len(), lacking, host_rate }
    }

    /// Seconds of one gathering of a layer of so many bytes.
    pub fn gather(&self, bytes: f64) -> f64 {
        self.seconds(self.lacking * bytes)
    }

    /// Seconds of one reduction, once around.
    pub fn reduce(&self, bytes: f64) -> f64 {
        match self.count {
            0 | 1 if self.lacking == 0.0 => 0.0,
            0 | 1 => self.seconds(bytes),
            count => self.seconds(bytes * (count - 1) as f64 / count as f64),
        }
    }

    fn seconds(&self, bytes: f64) -> f64 {
        if bytes < 1.0 {
            return 0.0;
        }
        let moved = self.links.iter().map(|link| link.seconds(bytes as u64) - link.seconds_latency);
        let slowest = moved.fold(bytes / self.host_rate, f64::max);
        // A ring of n has n - 1 steps, and each waits for one link.
        slowest + self.latency * self.count.saturating_sub(1) as f64 / self.count.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleet() -> Fleet {
        let node = |name: &str| {
            format!(
                "[[node]]\nname = \"{name}\"\ndevices = [{{ kind = \"A100\", count = 2 }}]\nhost_memory = \"64 GiB\"\n\
                 network = {{ bandwidth = \"1 GB/s\", latency = \"0 us\" }}\n\
                 device_link = {{ bandwidth = \"100 GB/s\", latency = \"0 us\" }}\n"
            )
        };
        Fleet::parse(&(node("a") + &node("b")), "fleet").expect("a sound fleet")
    }

    fn ring(computes: [bool; 4], devices: [f64; 4], hosts: [f64; 2]) -> Ring {
        Ring::new(&fleet(), &computes, &Shares { devices: devices.into(), hosts: hosts.into() })
    }

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-3 * expected.max(1e-3), "{found} against {expected}");
    }

    #[test]
    fn the_smallest_slice_decides_what_crosses_the_slowest_link() {
        let even = ring([true; 4], [0.25; 4], [0.0; 2]);
        near(even.gather(4e9), 3.0);
        near(even.reduce(4e9), 3.0);
        near(ring([true; 4], [0.5, 0.5, 0.0, 0.0], [0.0; 2]).gather(4e9), 4.0);
        // Within a node nothing crosses its interface.
        near(ring([true, true, false, false], [0.5, 0.5, 0.0, 0.0], [0.0; 2]).gather(4e9), 0.02);
    }

    #[test]
    fn what_lies_where_it_is_wanted_does_not_move() {
        let alone = ring([true, false, false, false], [1.0, 0.0, 0.0, 0.0], [0.0; 2]);
        assert_eq!((alone.gather(4e9), alone.reduce(4e9)), (0.0, 0.0));
        let from_host = ring([true, false, false, false], [0.5, 0.0, 0.0, 0.0], [0.5, 0.0]);
        let rate = fleet().devices[0].host_link.bytes_per_second;
        near(from_host.gather(4e9), 2e9 / rate);
    }
}
