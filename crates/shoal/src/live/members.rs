//! The fleet that the workers who are there make, by what each said of itself. It is written down as a fleet file would be,
//! so what nobody said is as it is for those.

use std::collections::BTreeMap;

use shoal_control::message::WorkerId;
use shoal_crew::About;
use shoal_fleet::{Device, Fleet, Link, Node, catalogue};
use shoal_planner::GPU_PROCESS_BYTES;
use shoal_service::planning::Candidate;
use toml::{Table, Value};

use crate::error::{CliError, Result};

/// Between two workers of one machine where nobody measured it, in bytes a second: through its memory.
const WITHIN_MACHINE: &str = "4 GB/s";
/// What a message takes there at least: two threads are woken, and cores are shared.
const WITHIN_MACHINE_LATENCY: &str = "100 us";
/// Between machines, where a worker does not say.
const NETWORK: &str = "10 Gbit/s";

/// The pace of a worker that was not seen to be off, in percent.
const USUAL: u32 = 100;

/// Paces up to so many percent of one are about the same.
const ABOUT_PERCENT: u64 = 125;

/// Workers as the devices of a fleet.
pub struct Members {
    pub fleet: Fleet,
    /// By device.
    pub workers: Vec<WorkerId>,
    /// What each takes by its measured rate, in percent of what the catalogue says of its kind.
    pub rated_percent: Vec<u32>,
    /// The same of what it was seen to take, in percent of that.
    pub pace_percent: Vec<u32>,
    /// How many times slower than it is all of it is played.
    pub stretch: f64,
}

/// A worker's device in tables.
pub fn device_name(worker: WorkerId) -> String {
    format!("worker {}", worker.0)
}

impl Members {
    /// Of those who compute in a precision, which is to be at least one.
    pub fn new(candidates: &[Candidate], precision: &str) -> Result<Members> {
        let mut machines: BTreeMap<String, Vec<(&Candidate, About)>> = BTreeMap::new();
        for candidate in candidates {
            let about = About::parse(&candidate.about).map_err(|error| {
                CliError::said(format!("{}: {error}", candidate.name), "is it of this version?")
            })?;
            if about.device.precisions.iter().any(|known| known == precision) {
                machines.entry(about.machine.clone()).or_default().push((candidate, about));
            }
        }
        if machines.is_empty() {
            let hint = "change train.precision, or add a worker that does";
            return Err(CliError::said(format!("no worker computes in {precision}"), hint));
        }
        let stretch = stretch(machines.values().flatten())?;
        let links: BTreeMap<String, Link> = machines
            .iter()
            .filter_map(|(machine, members)| Some((machine.clone(), neighbours_link(members)?)))
            .collect();
        let is_one = machines.len() == 1;
        let network = if is_one { WITHIN_MACHINE } else { NETWORK };
        if is_one {
            // There is no other machine to keep mirrors on. They are still worth keeping on other workers of this one: a
            // process may die alone.
            let all: Vec<(&Candidate, About)> = machines.into_values().flatten().collect();
            machines = all.into_iter().map(|member| (member.0.name.clone(), vec![member])).collect();
        }
        let nodes =
            machines.iter().map(|(name, members)| Value::Table(node(name, members, network))).collect();
        let text = Table::from_iter([("node".to_owned(), Value::Array(nodes))]);
        let mut fleet = Fleet::parse(&text.to_string(), "the fleet that has joined")?;
        let all: Vec<&(&Candidate, About)> = machines.values().flatten().collect();
        for (device, (candidate, _)) in fleet.devices.iter_mut().zip(&all) {
            device.name = device_name(candidate.worker);
        }
        let workers: Vec<WorkerId> = all.iter().map(|(candidate, _)| candidate.worker).collect();
        for node in &mut fleet.nodes {
            let (_, about) = all[node.devices.start];
            match (links.get(&about.machine), is_one) {
                (Some(link), true) if about.network.is_none() => node.network = link.clone(),
                (Some(link), false) => node.device_link = Some(link.clone()),
                _ => {}
            }
        }
        let paces: Vec<(&str, u32)> = all
            .iter()
            .map(|(candidate, about)| (about.device.kind.as_str(), candidate.pace_percent))
            .collect();
        let rated_percent = all.iter().map(|(_, about)| rated(about)).collect();
        Ok(Members { fleet, workers, rated_percent, pace_percent: expected(&paces), stretch })
    }
}

impl Members {
    /// All that a plan depends on: two fleets that are alike in it have the same.
    pub fn likeness(&self) -> impl std::fmt::Debug {
        let Fleet { nodes, devices, .. } = &self.fleet;
        let nodes: Vec<Node> =
            nodes.iter().map(|node| Node { name: String::new(), ..node.clone() }).collect();
        let devices: Vec<Device> =
            devices.iter().map(|device| Device { name: String::new(), ..device.clone() }).collect();
        (nodes, devices, self.rated_percent.clone(), self.pace_percent.clone())
    }
}

/// Links between those that are played and those that are not would be neither's.
fn stretch<'a>(mut members: impl Iterator<Item = &'a (&'a Candidate, About)>) -> Result<f64> {
    let of = |(_, about): &(&Candidate, About)| about.stretch.unwrap_or(1.0);
    let first = members.next().map_or(1.0, of);
    match members.find(|other| of(other) != first) {
        None => Ok(first),
        Some((other, _)) => {
            let what = format!("{} is played at another speed than the others", other.name);
            Err(CliError::said(what, "a lab's workers are for its own controller"))
        }
    }
}

/// From one of a machine's workers to another, where that was measured. When all of them exchange something, and there are
/// more of them than cores, it takes as many times longer. Whether their own work does depends on how much of a step it is:
/// that is for their paces to show.
fn neighbours_link(members: &[(&Candidate, About)]) -> Option<Link> {
    let abouts = || members.iter().map(|(_, about)| about);
    let cores = abouts().filter_map(|about| about.cores).max();
    let times = cores.map_or(1.0, |cores| (members.len() as f64 / cores.max(1) as f64).max(1.0));
    // The best that any of them saw: others may have had the cores while the rest looked.
    let mut by_size: BTreeMap<u64, f64> = BTreeMap::new();
    let is_rate = |(size, rate): &&(u64, f64)| *size > 0 && rate.is_finite() && *rate > 0.0;
    for (size, rate) in abouts().flat_map(|about| about.within_machine.iter().filter(is_rate)) {
        let best = by_size.entry(*size).or_default();
        *best = best.max(*rate);
    }
    let slower = |(size, rate): (u64, f64)| (size, leveled_rate(rate) / times);
    let by_size: Vec<(u64, f64)> = by_size.into_iter().map(slower).collect();
    (!by_size.is_empty()).then(|| Link::measured(by_size))
}

/// Rates that differ by less than this are taken for the same: measuring has its noise, and planners find their way sooner
/// among devices that are alike.
const RATES_APART: f64 = 1.1;

/// What a worker's own work takes by its measured rate, in percent of what it takes its kind as the catalogue has it.
fn rated(about: &About) -> u32 {
    let rate = about.device.matrix_flops_per_second.filter(|rate| rate.is_finite() && *rate > 0.0);
    match (rate, catalogue::find(&about.device.kind)) {
        (Some(rate), Some(kind)) => {
            (100.0 * leveled_rate(kind.fp32_flops / rate)).round().clamp(1.0, 1e6) as u32
        }
        _ => USUAL,
    }
}

/// The nearest of those that are told apart.
fn leveled_rate(rate: f64) -> f64 {
    RATES_APART.powf((rate.ln() / RATES_APART.ln()).round())
}

/// What workers' own work is expected to take, in percent of what was predicted, by their kinds and what they were seen to
/// take. Where most of a kind were seen to be off, one that was not is taken for the middle one of those: it may be a
/// newcomer, which would otherwise seem faster than all who have worked. Those of a kind that are about as fast are taken
/// for equally fast: that they are not is noise, and a planner has to tell apart what differs.
fn expected(paces: &[(&str, u32)]) -> Vec<u32> {
    let of = |(kind, pace): &(&str, u32)| {
        let mut alike: Vec<u32> =
            paces.iter().filter(|other| other.0 == *kind).map(|other| other.1).collect();
        let count = alike.len();
        alike.retain(|pace| *pace != USUAL);
        alike.sort_unstable();
        let own = match alike.get(alike.len() / 2) {
            Some(middle) if *pace == USUAL && 2 * alike.len() > count => *middle,
            _ => *pace,
        };
        leveled(own, &alike)
    };
    paces.iter().map(of).collect()
}

/// The mean of those that are about as fast, of paces that rise.
fn leveled(own: u32, paces: &[u32]) -> u32 {
    let mut rest = paces;
    while let Some(first) = rest.first() {
        let count = rest.partition_point(|pace| u64::from(*pace) * 100 <= u64::from(*first) * ABOUT_PERCENT);
        let (group, others) = rest.split_at(count);
        if group.contains(&own) {
            return (group.iter().map(|pace| u64::from(*pace)).sum::<u64>() / count as u64) as u32;
        }
        rest = others;
    }
    own
}

/// What a machine has left differs from moment to moment. So much that nearly as much is the same, and no more than there
/// is: planners find their way sooner among machines that are alike.
fn about_bytes(count: u64) -> u64 {
    const BITS: u32 = 4;
    let below = (u64::BITS - count.leading_zeros()).saturating_sub(BITS);
    count >> below << below
}

fn bytes(count: u64) -> Value {
    Value::String(format!("{count} B"))
}

fn node(name: &str, members: &[(&Candidate, About)], usual_network: &str) -> Table {
    // A processor's memory is its host's, and both count.
    let host = |about: &About| match about.device.kind == catalogue::CPU {
        true => about.host_memory_bytes.saturating_add(memory_bytes(about)),
        false => about.host_memory_bytes,
    };
    let host_bytes = about_bytes(members.iter().map(|(_, about)| host(about)).fold(0, u64::saturating_add));
    let disk_bytes = members.iter().filter_map(|(_, about)| about.disk_bytes).fold(0, u64::saturating_add);
    let mut node = Table::new();
    node.insert("name".into(), name.into());
    node.insert("host_memory".into(), bytes(host_bytes));
    node.insert("device_link".into(), WITHIN_MACHINE.into());
    let network = members.iter().find_map(|(_, about)| about.network);
    match network {
        None => {
            node.insert("network".into(), usual_network.into());
            if usual_network == WITHIN_MACHINE {
                node.insert("latency".into(), WITHIN_MACHINE_LATENCY.into());
            }
        }
        Some((rate, latency)) => {
            node.insert("network".into(), format!("{rate} B/s").into());
            node.insert("latency".into(), format!("{latency} s").into());
        }
    }
    if disk_bytes > 0 {
        let mut disk = Table::new();
        disk.insert("size".into(), bytes(disk_bytes));
        disk.insert("read".into(), "1 GB/s".into());
        disk.insert("write".into(), "1 GB/s".into());
        node.insert("disk".into(), disk.into());
    }
    let devices = members.iter().map(|(_, about)| Value::Table(device(about)));
    node.insert("devices".into(), Value::Array(devices.collect()));
    node
}

/// As fleet files say it: with what the process takes for itself, which workers have left out.
fn memory_bytes(about: &About) -> u64 {
    let given = match about.device.kind == catalogue::CPU {
        true => about_bytes(about.device.memory_bytes),
        false => about.device.memory_bytes,
    };
    given.saturating_add(GPU_PROCESS_BYTES)
}

fn device(about: &About) -> Table {
    let mut device = Table::new();
    device.insert("kind".into(), about.device.kind.as_str().into());
    device.insert("memory".into(), bytes(memory_bytes(about)));
    device.insert("price".into(), about.dollars_per_hour.into());
    device.insert("spot".into(), about.spot.into());
    device
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_as_quick_as_they_were_measured_and_near_ones_are_alike() {
        let about = |kind: &str, rate: Option<f64>| {
            let rate = rate.map_or("null".to_owned(), |rate| rate.to_string());
            let device = format!(
                r#"{{"kind":"{kind}","memory_bytes":1,"workspace_bytes":1,"threads":1,"precisions":["fp32"],"matrix_flops_per_second":{rate}}}"#
            );
            let text = format!(
                r#"{{"name":"a","address":"127.0.0.1:1","machine":"m","device":{device},"host_memory_bytes":1}}"#
            );
            About::parse(&text).unwrap()
        };
        let cpu = catalogue::find(catalogue::CPU).unwrap().fp32_flops;
        assert_eq!(rated(&about("CPU", Some(cpu))), 100);
        assert_eq!(rated(&about("CPU", None)), 100);
        assert_eq!(rated(&about("V100", None)), 100);
        let tenth = rated(&about("CPU", Some(cpu / 10.0)));
        assert!((950..1050).contains(&tenth), "{tenth}");
        assert_eq!(rated(&about("CPU", Some(cpu / 10.2))), tenth);
        assert!(rated(&about("CPU", Some(cpu / 13.0))) > tenth);
        assert!(rated(&about("CPU", Some(cpu * 4.0))) < 30);
        for nonsense in [0.0, -1.0, 1e-300] {
            assert!(rated(&about("CPU", Some(nonsense))) >= 100);
        }
    }

    #[test]
    fn workers_of_one_machine_exchange_as_quickly_as_they_measured_and_its_cores_allow() {
        let candidate = |number: u64, machine: &str, cores: usize, rate: f64| {
            let device =
                r#"{"kind":"CPU","memory_bytes":1,"workspace_bytes":1,"threads":1,"precisions":["fp32"]}"#;
            let about = format!(
                r#"{{"name":"w{number}","address":"127.0.0.1:1","machine":"{machine}","device":{device},"host_memory_bytes":1,"cores":{cores},"within_machine":[[1000,{}],[1000000,{rate}]]}}"#,
                rate / 100.0,
            );
            Candidate { worker: WorkerId(number), name: format!("w{number}"), pace_percent: 100, about }
        };
        let four: Vec<Candidate> = (1..=4).map(|number| candidate(number, "m", 2, 1e9)).collect();
        let members = Members::new(&four, "fp32").unwrap();
        let seconds = members.fleet.link(0, 1).seconds(1_000_000);
        assert!((1.8e-3..2.2e-3).contains(&seconds), "two cores for four: {seconds}");
        let alone = Members::new(&four[..2], "fp32").unwrap();
        assert!((0.9e-3..1.1e-3).contains(&alone.fleet.link(0, 1).seconds(1_000_000)));
        // Of two machines, what was measured is between the workers of each.
        let two = [&four[..2], &[candidate(5, "other", 1, 5e8), candidate(6, "other", 1, 4e8)]].concat();
        let members = Members::new(&two, "fp32").unwrap();
        assert!((3.6e-3..4.4e-3).contains(&members.fleet.link(2, 3).seconds(1_000_000)));
        assert_eq!(
            members.fleet.nodes[0].network, members.fleet.nodes[1].network,
            "the network is as it was"
        );
    }

    #[test]
    fn machines_with_nearly_as_much_memory_are_alike() {
        assert_eq!(about_bytes(20_100_000_000), about_bytes(20_900_000_000));
        assert!((0..200).map(|number| (1 << 20) | (number * 7_919_999)).all(|count| {
            let about = about_bytes(count);
            about <= count && 8 * about > 7 * count
        }));
        assert_eq!((about_bytes(0), about_bytes(15), about_bytes(33)), (0, 15, 32));
    }

    #[test]
    fn a_newcomer_is_taken_for_one_of_its_kind() {
        let paces = [("CPU", 1500), ("CPU", 100), ("T4", 100), ("CPU", 1200), ("CPU", 1300), ("V100", 300)];
        assert_eq!(expected(&paces), [1333, 1333, 100, 1333, 1333, 300]);
    }

    #[test]
    fn only_those_who_are_much_slower_are_told_apart() {
        let paces = [("V100", 100), ("V100", 150), ("V100", 160), ("V100", 300), ("V100", 187), ("T4", 200)];
        assert_eq!(expected(&paces), [165, 165, 165, 300, 165, 200]);
        let one = [("V100", 100), ("V100", 300), ("V100", 100), ("V100", 100)];
        assert_eq!(expected(&one), [100, 300, 100, 100], "the others are as they were");
    }
}
