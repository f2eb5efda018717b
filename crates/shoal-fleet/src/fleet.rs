//! What there is to train on: nodes, the devices in them, and what joins them. Read from `fleet.toml`, which
//! [`read`] knows; everything here is plain numbers, so that fleets can also be made in code.

mod read;
mod section;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use crate::catalogue;
use crate::error::{Error, Result};
use crate::link::Link;
use crate::profile::{LinkScope, Profile};

/// Nodes and devices are known by their places in these lists.
#[derive(Clone, Debug, PartialEq)]
pub struct Fleet {
    pub nodes: Vec<Node>,
    pub devices: Vec<Device>,
    pub zones: Vec<String>,
    /// Between nodes of different zones, where their pair has no link of its own.
    pub zone_link: Link,
    /// By two zones, the lower first.
    pub zone_pairs: BTreeMap<(usize, usize), Link>,
    /// By two nodes, the lower first: all that lies between their hosts.
    pub node_pairs: BTreeMap<(usize, usize), Link>,
}

/// A machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub name: String,
    pub zone: usize,
    pub host_memory_bytes: u64,
    /// Of the host's memory; all copies and the host's optimizer share it.
    pub host_bytes_per_second: f64,
    pub disk: Option<Disk>,
    /// Its network interface, which its devices share.
    pub network: Link,
    /// Between two of its devices; through the host where there is none.
    pub device_link: Option<Link>,
    pub devices: Range<usize>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    pub name: String,
    /// The catalogue's name where it knows the kind.
    pub kind: String,
    pub node: usize,
    pub memory_bytes: u64,
    pub dollars_per_hour: f64,
    /// What it would cost if it could not be taken away, where that is known.
    pub on_demand_dollars_per_hour: Option<f64>,
    /// Whether it may be taken away at any moment.
    pub spot: bool,
    /// To and from the host's memory, each way.
    pub host_link: Link,
    /// Whether the file said so, or the link follows from the kind: only then may a measured one take its place.
    pub host_link_stated: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Disk {
    pub bytes: u64,
    pub read_bytes_per_second: f64,
    pub write_bytes_per_second: f64,
}

impl Fleet {
    pub fn read(path: &Path) -> Result<Fleet> {
        let text = std::fs::read_to_string(path).map_err(|cause| Error::Io { path: path.into(), cause })?;
        Fleet::parse(&text, &path.display().to_string())
    }

    /// From the text of a `fleet.toml`, whose name errors are to give.
    pub fn parse(text: &str, name: &str) -> Result<Fleet> {
        read::fleet(text, name)
    }

    /// What a message between two devices passes: the slowest of it, at every size.
    pub fn link(&self, from: usize, to: usize) -> Link {
        let (a, b) = (&self.devices[from], &self.devices[to]);
        if from == to {
            return Link::NONE;
        }
        let through_hosts = a.host_link.slowest(&b.host_link);
        if a.node == b.node {
            return self.nodes[a.node].device_link.clone().unwrap_or(through_hosts);
        }
        self.node_link(a.node, b.node).slowest(&through_hosts)
    }

    /// Between the memories of two hosts.
    pub fn node_link(&self, from: usize, to: usize) -> Link {
        let pair = |a: usize, b: usize| (a.min(b), a.max(b));
        let (a, b) = (&self.nodes[from], &self.nodes[to]);
        if from == to {
            return Link::NONE;
        }
        if let Some(link) = self.node_pairs.get(&pair(from, to)) {
            return link.clone();
        }
        let interfaces = a.network.slowest(&b.network);
        if a.zone == b.zone {
            return interfaces;
        }
        let between = self.zone_pairs.get(&pair(a.zone, b.zone)).unwrap_or(&self.zone_link);
        interfaces.slowest(between)
    }

    /// So many machines like the first of this fleet, with these names.
    pub fn of_machines(&self, names: &[String]) -> Fleet {
        self.of_copies(0, names)
    }

    /// So many machines like one of this fleet's, with these names.
    pub fn of_copies(&self, node: usize, names: &[String]) -> Fleet {
        let first = &self.nodes[node];
        let mut fleet = Fleet {
            nodes: Vec::new(),
            devices: Vec::new(),
            zone_pairs: BTreeMap::new(),
            node_pairs: BTreeMap::new(),
            ..self.clone()
        };
        for (node, name) in names.iter().enumerate() {
            let start = fleet.devices.len();
            for (place, device) in self.devices[first.devices.clone()].iter().enumerate() {
                fleet.devices.push(Device { name: format!("{name}:{place}"), node, ..device.clone() });
            }
            let devices = start..fleet.devices.len();
            fleet.nodes.push(Node { name: name.clone(), devices, ..first.clone() });
        }
        fleet
    }

    /// The fleet with one more device of a kind it has: beside the others where there is one machine, otherwise in a further
    /// machine like the first that has such a device, and alone there. None where it has no such device.
    pub fn with_one_more(&self, kind: &str) -> Option<Fleet> {
        let like = self.devices.iter().find(|device| device.kind == kind)?;
        let mut fleet = self.clone();
        let place = fleet.devices.len();
        if let [node] = &mut fleet.nodes[..] {
            fleet.devices.push(Device { name: format!("{}:{place}", node.name), ..like.clone() });
            node.devices.end += 1;
            return Some(fleet);
        }
        let name = format!("{}-more", self.nodes[like.node].name);
        let node = Node { name, devices: place..place + 1, ..self.nodes[like.node].clone() };
        fleet.devices.push(Device {
            name: format!("{}:0", node.name),
            node: fleet.nodes.len(),
            ..like.clone()
        });
        // Whatever joins that machine to others joins this one too.
        for ((a, b), link) in &self.node_pairs {
            for other in
                [(*a, *b), (*b, *a)].into_iter().filter(|pair| pair.0 == like.node).map(|pair| pair.1)
            {
                fleet.node_pairs.insert((other, fleet.nodes.len()), link.clone());
            }
        }
        fleet.nodes.push(node);
        Some(fleet)
    }

    pub fn same_node(&self, a: usize, b: usize) -> bool {
        self.devices[a].node == self.devices[b].node
    }

    pub fn dollars_per_hour(&self) -> f64 {
        self.devices.iter().map(|device| device.dollars_per_hour).sum()
    }

    /// Without spot prices; none where that of a device is not known.
    pub fn on_demand_dollars_per_hour(&self) -> Option<f64> {
        self.devices.iter().map(|device| device.on_demand_dollars_per_hour).sum()
    }

    /// The kinds of its devices, each once, in the order of the devices.
    pub fn kinds(&self) -> Vec<&str> {
        let mut kinds: Vec<&str> = Vec::new();
        for device in &self.devices {
            if !kinds.contains(&device.kind.as_str()) {
                kinds.push(&device.kind);
            }
        }
        kinds
    }

    /// Measured links in the place of those that follow from the kind; what the file says stays.
    pub fn use_measured_links(&mut self, profile: &Profile) {
        for device in self.devices.iter_mut().filter(|device| !device.host_link_stated) {
            let measured = |kind: &str| profile.link(LinkScope::Host, kind);
            let of_whole = || measured(catalogue::share_of(&device.kind)?.1);
            if let Some(link) = measured(&device.kind).or_else(of_whole) {
                device.host_link = link.clone();
            }
        }
        // Workers of one machine are processes: what was measured between two of those holds for any devices.
        let processes = profile.links.iter().find(|link| link.scope == LinkScope::Process);
        for node in self.nodes.iter_mut().filter(|node| node.device_link.is_none()) {
            let mut kinds = self.devices[node.devices.clone()].iter().map(|device| &device.kind);
            let Some(first) = kinds.next() else { continue };
            // What was measured between two of a kind says nothing of a mixture.
            let of_kind =
                if kinds.all(|kind| kind == first) { profile.link(LinkScope::Device, first) } else { None };
            node.device_link = of_kind.or(processes.map(|found| &found.link)).cloned();
        }
    }
}
