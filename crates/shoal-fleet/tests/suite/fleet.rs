//! Fleet files: the example people start from, what is left out, and what is refused.

use shoal_fleet::{DeviceProfile, Error, Fleet, Link, LinkProfile, LinkScope, Profile};

const EXAMPLE: &str = include_str!("../../../../examples/fleet.toml");

const GIB: u64 = 1 << 30;

#[test]
fn the_example_is_the_fleet_it_says() {
    let fleet = Fleet::parse(EXAMPLE, "fleet.toml").unwrap();
    assert_eq!((fleet.nodes.len(), fleet.devices.len()), (6, 27));
    assert_eq!(fleet.zones, ["east", "west"]);
    assert_eq!(fleet.kinds(), ["V100-16", "A6000", "L4", "H200"]);
    let (v100, mixed, h200) = (&fleet.nodes[0], &fleet.nodes[4], &fleet.nodes[5]);
    assert_eq!((v100.name.as_str(), v100.devices.clone()), ("v100-1", 0..4));
    assert_eq!(v100.host_memory_bytes, 244 * GIB);
    assert_eq!((mixed.name.as_str(), mixed.network.seconds_latency), ("mixed", 30.0 * 1e-6));
    assert_eq!(mixed.disk.unwrap().read_bytes_per_second, 3.3e9);
    assert_eq!(mixed.host_bytes_per_second, 100e9);
    assert_eq!(h200.network.by_size.len(), 3);
    let (first, last) = (&fleet.devices[0], &fleet.devices[26]);
    assert_eq!((first.name.as_str(), first.spot, first.node), ("v100-1:0", true, 0));
    assert_eq!(first.host_link.bytes_per_second, 12e9);
    assert_eq!((last.name.as_str(), last.spot, last.dollars_per_hour), ("h200:7", false, 3.7));
    assert!((fleet.dollars_per_hour() - (16.0 * 0.92 + 0.8 + 1.4 + 29.6)).abs() < 1e-9);
}

#[test]
fn a_price_on_demand_is_the_one_said_or_that_of_what_nobody_takes_away() {
    let said = "devices = [{ kind = \"V100\", count = 4, price = 0.92, spot = true";
    let fleet = Fleet::parse(EXAMPLE, "fleet.toml").unwrap();
    assert_eq!(
        (fleet.devices[0].on_demand_dollars_per_hour, fleet.on_demand_dollars_per_hour()),
        (None, None)
    );
    assert_eq!(fleet.devices[26].on_demand_dollars_per_hour, Some(3.7));
    let text = EXAMPLE.replace(said, &format!("{said}, on_demand_price = 3.06"));
    let fleet = Fleet::parse(&text, "fleet.toml").unwrap();
    assert_eq!(fleet.devices[0].on_demand_dollars_per_hour, Some(3.06));
    assert!((fleet.on_demand_dollars_per_hour().unwrap() - (16.0 * 3.06 + 0.8 + 1.4 + 29.6)).abs() < 1e-9);
    let both = text.replace("name = \"v100\"", "name = \"v100\"\non_demand_price = 12.24");
    let error = Fleet::parse(&both, "fleet.toml").unwrap_err().to_string();
    assert!(error.contains("on_demand_price"), "{error}");
}

#[test]
fn one_more_device_is_in_a_machine_like_the_first_that_has_one() {
    let fleet = Fleet::parse(EXAMPLE, "fleet.toml").unwrap();
    let more = fleet.with_one_more("V100-16").unwrap();
    assert_eq!((more.nodes.len(), more.devices.len()), (7, 28));
    assert_eq!((more.devices[27].name.as_str(), more.devices[27].node), ("v100-1-more:0", 6));
    // To its like by their interfaces, to the machine that has a link of its own to them by that.
    assert_eq!(more.link(27, 0).bytes_per_second, 1.25e9);
    assert_eq!(more.link(27, 16), more.link(0, 16));
    assert!(fleet.with_one_more("T4").is_none());
    let one = Fleet::parse("[[node]]\nhost_memory = \"8 GiB\"\ndevices = [{ kind = \"T4\" }]", "f").unwrap();
    let two = one.with_one_more("T4").unwrap();
    assert_eq!((two.nodes.len(), two.devices.len(), two.nodes[0].devices.clone()), (1, 2, 0..2));
}

#[test]
fn what_lies_between_two_devices_is_the_slowest_of_it() {
    let fleet = Fleet::parse(EXAMPLE, "fleet.toml").unwrap();
    let rate = |from: usize, to: usize| fleet.link(from, to).bytes_per_second;
    assert_eq!(fleet.link(3, 3), Link::NONE);
    assert!(fleet.same_node(0, 3) && !fleet.same_node(0, 4));
    assert_eq!(rate(0, 3), 40e9, "NVLink");
    assert_eq!(rate(16, 17), 24e9, "through the host, by PCIe");
    assert_eq!(rate(0, 4), 1.25e9, "both interfaces");
    assert_eq!((rate(0, 16), fleet.link(16, 0).seconds_latency), (2.5e9, 40.0 * 1e-6), "a pair of its own");
    assert_eq!((rate(0, 20), fleet.link(20, 0).seconds_latency), (0.625e9, 60.0 * 1e-3), "between zones");
    // Sizes that were measured hold where they are the slower.
    assert!(fleet.link(16, 20).by_size.iter().all(|(_, rate)| *rate <= 0.625e9));
}

#[test]
fn pairs_may_be_zones_and_cover_all_of_them() {
    let node = |name: &str, zone: &str| {
        format!(
            "[[node]]\nname = \"{name}\"\nzone = \"{zone}\"\nnetwork = \"10 Gbit/s\"\nhost_memory = \"64 GiB\"\n\
             devices = [{{ kind = \"T4\" }}]\n"
        )
    };
    let nodes = node("a", "x") + &node("b", "y") + &node("c", "z");
    let pair = |a: &str, b: &str, rate: &str| {
        format!("[[links.pair]]\nbetween = [\"{a}\", \"{b}\"]\nbandwidth = \"{rate}\"\n")
    };
    let pairs = pair("y", "x", "1 Gbit/s") + &pair("x", "z", "2 Gbit/s");
    let error = Fleet::parse(&format!("{nodes}{pairs}"), "f.toml").unwrap_err().to_string();
    assert!(error.contains("links.zones") && error.contains("y and z"), "{error}");
    let fleet = Fleet::parse(&format!("{nodes}{pairs}{}", pair("z", "y", "3 Gbit/s")), "f.toml").unwrap();
    assert_eq!(fleet.link(0, 1).bytes_per_second, 0.125e9);
    assert_eq!(fleet.link(2, 0).bytes_per_second, 0.25e9);
    assert_eq!(fleet.link(1, 2).bytes_per_second, 0.375e9);
}

#[test]
fn wrong_files_are_refused_with_file_key_and_hint() {
    // What the node is, what the message names, what the hint says.
    let cases = [
        ("devices = [{ knd = \"T4\" }]", "node[0].devices[0].knd", "did you mean node[0].devices[0].kind?"),
        ("host_memry = \"1 GiB\"", "node[0].host_memry", "did you mean node[0].host_memory?"),
        ("wheels = 4", "unknown key node[0].wheels", "keys here are"),
        ("devices = [{ kind = \"V10O\" }]", "\"V10O\"", "did you mean V100-16?"),
        ("devices = [{ kind = \"abacus\" }]", "\"abacus\"", "docs/fleet.md"),
        ("devices = [{ kind = \"CPU\" }]", "node[0].devices[0].memory is missing", "processor"),
        ("devices = [{ kind = \"T4\", memory = \"16\" }]", "node[0].devices[0].memory is \"16\"", "GiB"),
        ("devices = [{ kind = \"T4\", memory = 16 }]", "memory is a integer", "GiB"),
        ("devices = [{ kind = \"T4\", count = 0 }]", "node[0].devices[0].count is 0", "from 1"),
        ("devices = [{ kind = \"T4\", price = -1 }]", "node[0].devices[0].price is -1", "dollars"),
        ("devices = [{ kind = \"T4\", spot = 1 }]", "node[0].devices[0].spot", "true or false"),
        ("devices = []", "node[0].devices is missing or empty", "kind = \"V100\""),
        ("devices = \"T4\"", "node[0].devices is a string", "list of tables"),
        ("devices = [{ kind = \"T4\" }]\nnetwork = \"10 Gb/s\"", "bits or bytes", "Gbit/s"),
        (
            "devices = [{ kind = \"T4\" }]\nnetwork = { latency = \"1 ms\" }",
            "node[0].network has no bandwidth",
            "Gbit/s",
        ),
        ("devices = [{ kind = \"T4\" }]\nlatency = \"soon\"", "node[0].latency is \"soon\"", "50 us"),
        ("devices = [{ kind = \"T4\" }]\ncount = 2", "node[0].network is missing", "10 Gbit/s"),
        (
            "devices = [{ kind = \"T4\" }]\ndisk = { size = \"1 TB\" }",
            "node[0].disk.read is missing",
            "disk = {",
        ),
        (
            "price = 4\ndevices = [{ kind = \"T4\", price = 1 }]",
            "node[0].devices[0].price",
            "keep the node's",
        ),
        (
            "devices = [{ kind = \"T4\" }]\n[links]\nzone = \"1 Gbit/s\"",
            "links.zone",
            "did you mean links.zones?",
        ),
        (
            "devices = [{ kind = \"T4\" }]\n[[links.pair]]\nbetween = [\"a\", \"b\"]\nbandwidth = \"1 GB/s\"",
            "links.pair[0].between",
            "the nodes are node",
        ),
        (
            "devices = [{ kind = \"T4\" }]\n[[node]]\nhost_memory = \"1 GiB\"\ndevices = [{ kind = \"T4\" }]",
            "\"node\", and so is",
            "name of its own",
        ),
        ("devices = [", "f.toml", "TOML"),
    ];
    for (said, named, hinted) in cases {
        let error =
            Fleet::parse(&format!("[[node]]\nhost_memory = \"64 GiB\"\n{said}\n"), "f.toml").unwrap_err();
        let (message, hint) = (error.to_string(), error.hint().unwrap_or_default());
        assert!(message.starts_with("f.toml: ") && message.contains(named), "{said}: {message}");
        assert!(hint.contains(hinted), "{said}: {hint}");
    }
    let error = Fleet::parse("", "f.toml").unwrap_err().to_string();
    assert!(error.contains("no machine"), "{error}");
    let error = Fleet::parse("[[node]]\ndevices = [{ kind = \"T4\" }]", "f.toml").unwrap_err().to_string();
    assert!(error.contains("host_memory is missing"), "{error}");
    let missing = std::path::Path::new("no such folder/fleet.toml");
    assert!(matches!(Fleet::read(missing), Err(Error::Io { .. })));
}

#[test]
fn a_kind_of_ones_own_needs_its_memory_and_link() {
    let text = "[[node]]\nhost_memory = \"64 GiB\"\nhost_link = \"3 GB/s\"\n\
                devices = [{ kind = \"Quirk 9\", memory = \"6 GiB\" }]";
    let fleet = Fleet::parse(text, "f.toml").unwrap();
    assert_eq!((fleet.devices[0].kind.as_str(), fleet.devices[0].memory_bytes), ("Quirk 9", 6 * GIB));
    assert_eq!(fleet.devices[0].host_link.bytes_per_second, 3e9);
}

#[test]
fn measured_links_take_the_place_of_those_that_nothing_was_said_of() {
    let text = "[[node]]\nhost_memory = \"64 GiB\"\n\
                devices = [{ kind = \"T4\" }, { kind = \"T4\", host_link = \"3 GB/s\" }]";
    let mut fleet = Fleet::parse(text, "f.toml").unwrap();
    let link = |scope, rate| LinkProfile { scope, kind: "Tesla T4".into(), link: Link::new(rate, 1e-5) };
    let devices: Vec<DeviceProfile> = Vec::new();
    let links = vec![link(LinkScope::Host, 11e9), link(LinkScope::Device, 7e9)];
    fleet.use_measured_links(&Profile { format: 2, model: "m".into(), sequence: 1, devices, links });
    let rates: Vec<f64> = fleet.devices.iter().map(|device| device.host_link.bytes_per_second).collect();
    assert_eq!(rates, [11e9, 3e9]);
    assert_eq!(fleet.link(0, 1).bytes_per_second, 7e9);
}

/// Devices of a machine exchange what processes do, unless something nearer was measured or said.
#[test]
fn unequal_devices_of_a_machine_have_the_link_between_processes() {
    let linked = |said: &str| {
        let text = format!(
            "[[node]]\nhost_memory = \"64 GiB\"\n{said}devices = [{{ kind = \"T4\" }}, {{ kind = \"L4\" }}]"
        );
        let mut fleet = Fleet::parse(&text, "f.toml").unwrap();
        let link =
            |scope, kind: &str, rate| LinkProfile { scope, kind: kind.into(), link: Link::new(rate, 1e-5) };
        let links = vec![link(LinkScope::Device, "T4", 7e9), link(LinkScope::Process, "TCP, loopback", 4e9)];
        let devices: Vec<DeviceProfile> = Vec::new();
        fleet.use_measured_links(&Profile { format: 2, model: "m".into(), sequence: 1, devices, links });
        fleet.link(0, 1).bytes_per_second
    };
    assert_eq!(linked(""), 4e9);
    assert_eq!(linked("device_link = \"9 GB/s\"\n"), 9e9);
}

#[test]
fn the_examples_of_shares_are_fleets() {
    let shares = include_str!("../../../../examples/h200-shares.toml");
    let spilled = include_str!("../../../../examples/h200-spilled.toml");
    let uneven = include_str!("../../../../examples/h200-uneven.toml");
    let fleet = |text: &str| Fleet::parse(text, "fleet.toml").unwrap();
    assert_eq!((fleet(shares).devices.len(), fleet(shares).kinds()), (4, vec!["25 % of H200"]));
    assert_eq!(fleet(uneven).kinds().len(), 4);
    assert_eq!(fleet(shares).link(0, 3).bytes_per_second, 1.25e9);
    assert_eq!((fleet(spilled).devices.len(), fleet(spilled).kinds()), (1, vec!["100 % of H200"]));
}

#[test]
fn a_share_of_a_device_is_a_kind_with_its_part_of_the_memory() {
    let of = |device: &str| {
        let text = format!("[[node]]\nhost_memory = \"64 GiB\"\ndevices = [{{ {device} }}]");
        Fleet::parse(&text, "fleet.toml")
    };
    let fleet = of("kind = \"NVIDIA H200\", share = 0.25, count = 4").unwrap();
    assert_eq!((fleet.devices.len(), fleet.kinds()), (4, vec!["25 % of H200"]));
    assert_eq!(fleet.devices[0].memory_bytes, (143771 << 20) / 100 * 25);
    assert_eq!(fleet.devices[0].host_link.bytes_per_second, 52e9);
    assert_eq!(of("kind = \"H200\", share = 1").unwrap().kinds(), ["100 % of H200"]);
    let said = of("kind = \"H200\", share = 0.1, memory = \"8 GiB\"").unwrap();
    assert_eq!(said.devices[0].memory_bytes, 8 * GIB);
    for (share, names) in [
        ("kind = \"H200\", share = 1.5", "share is 1.5"),
        ("kind = \"H200\", share = 0.255", "share is 0.255"),
        ("kind = \"H200\", share = \"a\"", "share"),
        ("kind = \"CPU\", memory = \"1 GiB\", share = 0.5", "processor"),
        ("kind = \"H200\", shares = 0.5", "unknown key"),
    ] {
        let error = of(share).unwrap_err();
        assert!(error.to_string().contains(names) && error.hint().is_some(), "{error}");
    }
}

#[test]
fn a_share_has_the_measured_link_of_the_whole() {
    let text = "[[node]]\nhost_memory = \"64 GiB\"\ndevices = [{ kind = \"H200\", share = 0.5 }]";
    let mut fleet = Fleet::parse(text, "fleet.toml").unwrap();
    let link = LinkProfile { scope: LinkScope::Host, kind: "H200".into(), link: Link::new(33e9, 1e-5) };
    let profile =
        Profile { format: 2, model: "m".into(), sequence: 1, devices: Vec::new(), links: vec![link] };
    fleet.use_measured_links(&profile);
    assert_eq!(fleet.devices[0].host_link.bytes_per_second, 33e9);
}
