//! `fleet.toml`, as docs/fleet.md describes it.

use std::collections::BTreeMap;

use super::section::Section;
use super::{Device, Disk, Fleet, Node};
use crate::catalogue;
use crate::error::{Error, Result};
use crate::link::Link;

const TOP_KEYS: &[&str] = &["node", "links"];
const NODE_KEYS: &[&str] = &[
    "name",
    "count",
    "zone",
    "devices",
    "price",
    "on_demand_price",
    "spot",
    "host_memory",
    "host_bandwidth",
    "disk",
    "network",
    "latency",
    "device_link",
    "host_link",
];
const DEVICE_KEYS: &[&str] =
    &["kind", "share", "count", "memory", "price", "on_demand_price", "spot", "host_link"];
const PRICE_KEYS: [&str; 2] = ["price", "on_demand_price"];
const DISK_KEYS: &[&str] = &["size", "read", "write"];
const LINKS_KEYS: &[&str] = &["zones", "zone_latency", "pair"];
const PAIR_KEYS: &[&str] = &["between", "bandwidth", "latency", "by_size"];

/// What is taken where a file says nothing: a datacentre's usual.
const NETWORK: Link = Link::new(1.25e9, NETWORK_LATENCY_SECONDS);
const NETWORK_LATENCY_SECONDS: f64 = 50e-6;
const ZONE_LATENCY_SECONDS: f64 = 1e-3;
/// Of a copy between a device and its host or its neighbour.
const COPY_LATENCY_SECONDS: f64 = 10e-6;
const ZONE: &str = "default";

pub(super) fn fleet(text: &str, file: &str) -> Result<Fleet> {
    let table: toml::Table = toml::from_str(text).map_err(|error| Error::Toml {
        file: file.to_owned(),
        message: error.to_string().trim_end().to_owned(),
    })?;
    let top = Section::open(file, String::new(), &table, TOP_KEYS)?;
    let entries = top.sections("node", NODE_KEYS)?;
    if entries.is_empty() {
        return Err(top.bad(
            "node",
            "is missing: there is no machine",
            "write a [[node]]; docs/fleet.md has an example",
        ));
    }
    let mut reader = Reader {
        fleet: Fleet {
            nodes: Vec::new(),
            devices: Vec::new(),
            zones: Vec::new(),
            zone_link: NETWORK,
            zone_pairs: BTreeMap::new(),
            node_pairs: BTreeMap::new(),
        },
        groups: BTreeMap::new(),
    };
    for entry in &entries {
        reader.nodes(entry)?;
    }
    if reader.fleet.nodes.len() > 1
        && let Some(entry) = entries.iter().find(|entry| !entry.has("network"))
    {
        let hint = "set it to the bandwidth of its interface, such as \"10 Gbit/s\"";
        return Err(entry.bad("network", "is missing, and there are several nodes", hint));
    }
    reader.links(&top)?;
    Ok(reader.fleet)
}

struct Reader {
    fleet: Fleet,
    /// The nodes that a name stands for: one, or all copies of an entry.
    groups: BTreeMap<String, Vec<usize>>,
}

impl Reader {
    /// All copies of one entry.
    fn nodes(&mut self, entry: &Section) -> Result<()> {
        let name = entry.text("name", "set it to a name of your own")?.unwrap_or("node");
        let copies = entry.count("count")?;
        self.assert_new(name, entry)?;
        let zone = self.zone(entry.text("zone", "set it to the name of a zone")?.unwrap_or(ZONE));
        let latency = entry.seconds("latency")?.unwrap_or(NETWORK_LATENCY_SECONDS);
        let Some(host_memory_bytes) = entry.bytes("host_memory")? else {
            return Err(entry.bad(
                "host_memory",
                "is missing",
                "set it to the machine's memory, such as \"256 GiB\"",
            ));
        };
        let usual = catalogue::find(catalogue::CPU).map_or(0.0, |kind| kind.memory_bytes_per_second);
        let mut node = Node {
            name: String::new(),
            zone,
            host_memory_bytes,
            host_bytes_per_second: entry.rate("host_bandwidth")?.unwrap_or(usual),
            disk: disk(entry)?,
            network: entry.link("network", latency)?.unwrap_or(Link::new(NETWORK.bytes_per_second, latency)),
            device_link: entry.link("device_link", COPY_LATENCY_SECONDS)?,
            devices: 0..0,
        };
        let (devices, mut same) = (devices(entry)?, Vec::new());
        for copy in 1..=copies {
            node.name = if copies == 1 { name.to_owned() } else { format!("{name}-{copy}") };
            let (place, first) = (self.fleet.nodes.len(), self.fleet.devices.len());
            for (index, device) in devices.iter().enumerate() {
                let name = format!("{}:{index}", node.name);
                self.fleet.devices.push(Device { name, node: place, ..device.clone() });
            }
            node.devices = first..self.fleet.devices.len();
            if copies > 1 {
                self.assert_new(&node.name, entry)?;
                self.groups.insert(node.name.clone(), vec![place]);
            }
            same.push(place);
            self.fleet.nodes.push(node.clone());
        }
        self.groups.insert(name.to_owned(), same);
        Ok(())
    }

    fn assert_new(&self, name: &str, entry: &Section) -> Result<()> {
        if !self.groups.contains_key(name) {
            return Ok(());
        }
        let what = format!("is \"{name}\", and so is another node's");
        Err(entry.bad("name", what, "give every [[node]] a name of its own"))
    }

    fn zone(&mut self, name: &str) -> usize {
        let zones = &mut self.fleet.zones;
        zones.iter().position(|known| known == name).unwrap_or_else(|| {
            zones.push(name.to_owned());
            zones.len() - 1
        })
    }

    fn links(&mut self, top: &Section) -> Result<()> {
        let links = top.section("links", LINKS_KEYS)?;
        let mut between_zones = None;
        if let Some(links) = &links {
            let latency = links.seconds("zone_latency")?.unwrap_or(ZONE_LATENCY_SECONDS);
            between_zones = links.link("zones", latency)?;
            for pair in links.sections("pair", PAIR_KEYS)? {
                self.pair(&pair, latency)?;
            }
        }
        let zones = self.fleet.zones.len();
        let mut pairs = (0..zones).flat_map(|a| (a + 1..zones).map(move |b| (a, b)));
        let unsaid = pairs.find(|pair| !self.fleet.zone_pairs.contains_key(pair));
        match (between_zones, unsaid) {
            (Some(link), _) => self.fleet.zone_link = link,
            (None, None) => {}
            (None, Some((a, b))) => {
                let [a, b] = [a, b].map(|zone| &self.fleet.zones[zone]);
                let what = format!("is missing, and nothing is said of the link between {a} and {b}");
                return Err(top.bad("links.zones", what, "set it to a bandwidth, such as \"5 Gbit/s\""));
            }
        }
        Ok(())
    }

    /// A link between two zones, or between two nodes and their copies.
    fn pair(&mut self, pair: &Section, zone_latency: f64) -> Result<()> {
        let names = pair.pair("between")?;
        let zones = names.map(|name| self.fleet.zones.iter().position(|zone| zone == name));
        let nodes = names.map(|name| self.groups.get(name));
        match (zones, nodes) {
            ([Some(a), Some(b)], [None, None]) if a != b => {
                let link = pair.as_link(zone_latency)?;
                self.fleet.zone_pairs.insert((a.min(b), a.max(b)), link);
                Ok(())
            }
            ([None, None], [Some(some), Some(others)]) => {
                let link = pair.as_link(NETWORK_LATENCY_SECONDS)?;
                for (a, b) in some.iter().flat_map(|a| others.iter().map(move |b| (*a, *b))) {
                    if a != b {
                        self.fleet.node_pairs.insert((a.min(b), a.max(b)), link.clone());
                    }
                }
                Ok(())
            }
            _ => {
                let zones = self.fleet.zones.join(", ");
                let nodes = self.groups.keys().cloned().collect::<Vec<_>>().join(", ");
                let what = format!("is {names:?}, neither two zones nor two nodes");
                Err(pair.bad("between", what, format!("the zones are {zones}; the nodes are {nodes}")))
            }
        }
    }
}

fn disk(entry: &Section) -> Result<Option<Disk>> {
    let Some(disk) = entry.section("disk", DISK_KEYS)? else { return Ok(None) };
    let missing = |key: &str| {
        disk.bad(key, "is missing", "write disk = { size = \"2 TB\", read = \"3 GB/s\", write = \"2 GB/s\" }")
    };
    Ok(Some(Disk {
        bytes: disk.bytes("size")?.ok_or_else(|| missing("size"))?,
        read_bytes_per_second: disk.rate("read")?.ok_or_else(|| missing("read"))?,
        write_bytes_per_second: disk.rate("write")?.ok_or_else(|| missing("write"))?,
    }))
}

/// The devices of one copy of a node; their names and nodes are filled in by the copy.
fn devices(entry: &Section) -> Result<Vec<Device>> {
    let mut devices = Vec::new();
    let spot = entry.flag("spot")?.unwrap_or(false);
    let host_link = entry.link("host_link", COPY_LATENCY_SECONDS)?;
    for said in entry.sections("devices", DEVICE_KEYS)? {
        let Some(kind) = said.text("kind", "set it to a name such as \"V100\"")? else {
            return Err(said.bad("kind", "is missing", "set it to a name such as \"V100\""));
        };
        let known = catalogue::find(kind);
        let unknown = |key: &str| match (known, catalogue::nearest(kind)) {
            (Some(_), _) => {
                said.bad(key, "is missing", "a processor's share of its host's memory must be said")
            }
            (None, nearest) => {
                let what = format!("is \"{kind}\", which the catalogue does not know, and {key} is missing");
                let or = "set memory and host_link for a kind of your own";
                let hint = match nearest {
                    Some(name) => format!("did you mean {name}? Or {or}"),
                    None => format!("{or}; docs/fleet.md lists the kinds"),
                };
                said.bad("kind", what, hint)
            }
        };
        let share = said.percent("share")?;
        if share.is_some() && known.is_some_and(|known| known.pcie_generation.is_none()) {
            let hint = "leave it out: processors of one machine share its cores";
            return Err(said.bad("share", "is set for a processor", hint));
        }
        let whole = known.and_then(|known| known.memory_bytes);
        let part = |bytes: u64| share.map_or(bytes, |percent| bytes / 100 * u64::from(percent));
        let memory = said.bytes("memory")?.or(whole.map(part));
        let own_link = said.link("host_link", COPY_LATENCY_SECONDS)?.or(host_link.clone());
        let host_link_stated = own_link.is_some();
        let link = own_link.or(known.map(|known| known.host_link()));
        let device = Device {
            name: String::new(),
            kind: share.map_or_else(|| catalogue::name(kind), |share| catalogue::share_name(share, kind)),
            node: 0,
            memory_bytes: memory.ok_or_else(|| unknown("memory"))?,
            dollars_per_hour: said.dollars("price")?.unwrap_or(0.0),
            on_demand_dollars_per_hour: said.dollars("on_demand_price")?,
            spot: said.flag("spot")?.unwrap_or(spot),
            host_link: link.ok_or_else(|| unknown("host_link"))?,
            host_link_stated,
        };
        if let Some(key) = PRICE_KEYS.into_iter().find(|key| entry.has(key) && said.has(key)) {
            let hint = "keep the node's or its devices'";
            return Err(said.bad(key, "is set, and so is the node's", hint));
        }
        devices.extend(vec![device; said.count("count")?]);
    }
    if devices.is_empty() {
        let hint = "write devices = [{ kind = \"V100\", count = 4 }]";
        return Err(entry.bad("devices", "is missing or empty", hint));
    }
    let count = devices.len() as f64;
    let [price, on_demand] = PRICE_KEYS.map(|key| entry.dollars(key));
    let (price, on_demand) = (price?, on_demand?);
    for device in &mut devices {
        device.dollars_per_hour = price.map_or(device.dollars_per_hour, |dollars| dollars / count);
        let said = on_demand.map(|dollars| dollars / count).or(device.on_demand_dollars_per_hour);
        // What nobody may take away has its price on demand already.
        device.on_demand_dollars_per_hour = said.or((!device.spot).then_some(device.dollars_per_hour));
    }
    Ok(devices)
}
