//! What messages between a fleet's devices have in common on their way, as the simulator has it: between nodes the sender's
//! and the receiver's interface, which all devices of a node share, each direction for itself; within a node the sender's
//! way out and the receiver's way in. A way that one worker alone sends over is its own affair; one that several send over
//! has a clock on a board that all of them read and write.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use shoal_fleet::Fleet;
use shoal_net::board::Board;

use super::assignment::WayTo;
use crate::error::Result;

/// Each of the senders' messages to each of the receivers passes it.
#[derive(Debug, PartialEq)]
struct Way {
    bytes_per_s: f64,
    senders: BTreeSet<usize>,
    receivers: BTreeSet<usize>,
}

/// All ways that there are between the devices that take part.
pub struct Ways {
    own: Vec<Way>,
    /// Those that several send over: each by the number of its clock.
    shared: Vec<Way>,
}

impl Ways {
    /// Those of a fleet so many times slower.
    pub fn new(fleet: &Fleet, members: &[usize], stretch: f64) -> Ways {
        let mut all = Vec::new();
        let mut add = |bytes_per_second: f64, senders: BTreeSet<usize>, receivers: BTreeSet<usize>| {
            if !senders.is_empty() && !receivers.is_empty() {
                all.push(Way { bytes_per_s: bytes_per_second / stretch, senders, receivers });
            }
        };
        for (number, node) in fleet.nodes.iter().enumerate() {
            let (here, elsewhere): (BTreeSet<usize>, BTreeSet<usize>) =
                members.iter().partition(|member| fleet.devices[**member].node == number);
            add(node.network.bytes_per_second, here.clone(), elsewhere.clone());
            add(node.network.bytes_per_second, elsewhere, here.clone());
            for device in &here {
                let link = node.device_link.as_ref().unwrap_or(&fleet.devices[*device].host_link);
                let others: BTreeSet<usize> = here.iter().copied().filter(|other| other != device).collect();
                add(link.bytes_per_second, [*device].into(), others.clone());
                add(link.bytes_per_second, others, [*device].into());
            }
        }
        let (shared, own) = all.into_iter().partition(|way| way.senders.len() > 1);
        Ways { own, shared }
    }

    /// Makes the board anew where there is anything to share.
    pub fn make_board(&self, path: &Path) -> Result {
        if !self.shared.is_empty() {
            Board::create(path, self.shared.len())?;
        }
        Ok(())
    }

    /// Those that a device's messages pass: its own, and the shared ones by their clocks.
    pub fn of(&self, rank: usize) -> (Vec<WayTo>, BTreeMap<usize, WayTo>) {
        let told = |way: &Way| (way.bytes_per_s, way.receivers.clone());
        let passes = |way: &Way| way.senders.contains(&rank);
        let own = self.own.iter().filter(|way| passes(way)).map(told).collect();
        let shared = self.shared.iter().enumerate().filter(|(_, way)| passes(way));
        (own, shared.map(|(clock, way)| (clock, told(way))).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes of so many devices.
    fn fleet(nodes: &[usize]) -> Fleet {
        let node = |(number, devices): (usize, &usize)| {
            format!(
                "[[node]]\nname = \"n{number}\"\nhost_memory = \"16 GiB\"\nnetwork = \"8 Gbit/s\"\n\
                 device_link = \"20 GB/s\"\ndevices = [{{ kind = \"V100\", count = {devices} }}]\n"
            )
        };
        Fleet::parse(&nodes.iter().enumerate().map(node).collect::<String>(), "fleet").unwrap()
    }

    /// Twice as slow.
    fn of(nodes: &[usize], members: &[usize], rank: usize) -> (Vec<WayTo>, BTreeMap<usize, WayTo>) {
        Ways::new(&fleet(nodes), members, 2.0).of(rank)
    }

    fn way(bytes_per_s: f64, peers: &[usize]) -> WayTo {
        (bytes_per_s, peers.iter().copied().collect())
    }

    #[test]
    fn nodes_of_two_devices_share_their_interfaces() {
        // Clocks 0 and 1 are the first node's way out and in, 2 and 3 the second's.
        let (own, shared) = of(&[2, 2], &[0, 1, 2, 3], 1);
        assert_eq!(own, [way(10e9, &[0]), way(10e9, &[0])], "between the two nobody else sends");
        assert_eq!(shared, [(0, way(0.5e9, &[2, 3])), (3, way(0.5e9, &[2, 3]))].into());
        let (_, shared) = of(&[2, 2], &[0, 1, 2, 3], 2);
        assert_eq!(shared, [(1, way(0.5e9, &[0, 1])), (2, way(0.5e9, &[0, 1]))].into());
    }

    #[test]
    fn many_senders_share_the_way_into_one() {
        // Its own way out is nobody else's.
        let into_each =
            |rate| (vec![way(rate, &[1, 2])], [(1, way(rate, &[1])), (2, way(rate, &[2]))].into());
        assert_eq!(of(&[1, 1, 1], &[0, 1, 2], 0), into_each(0.5e9));
        assert_eq!(of(&[3], &[0, 1, 2], 0), into_each(10e9));
    }

    #[test]
    fn two_that_take_part_share_nothing() {
        let nowhere = std::env::temp_dir().join(format!("shoal-no-board-{}", std::process::id()));
        for (nodes, members) in [(&[1, 1][..], [0, 1]), (&[2], [0, 1]), (&[2, 2], [1, 2])] {
            let ways = Ways::new(&fleet(nodes), &members, 1.0);
            let (own, shared) = ways.of(members[0]);
            assert!(own.len() == 2 && shared.is_empty(), "{nodes:?}: {shared:?}");
            ways.make_board(&nowhere).unwrap();
            assert!(!nowhere.exists());
        }
        assert_eq!(of(&[2, 2], &[1, 2], 0), (Vec::new(), BTreeMap::new()), "it has no part");
    }
}
