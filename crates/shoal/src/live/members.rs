//! The fleet that the workers who are there make, by what each said of itself. It is written down as a fleet file would be,
//! so what nobody said is as it is for those.

use std::collections::BTreeMap;

use shoal_control::message::WorkerId;
use shoal_crew::About;
use shoal_fleet::{Fleet, catalogue};
use shoal_planner::GPU_PROCESS_BYTES;
use shoal_service::planning::Candidate;
use toml::{Table, Value};

use crate::error::{CliError, Result};

/// Between two workers of one machine, in bytes a second: through its memory.
const WITHIN_MACHINE: &str = "4 GB/s";
/// Between machines, where a worker does not say.
const NETWORK: &str = "10 Gbit/s";

/// The pace of a worker that was not seen to be off, in percent.
const USUAL: u32 = 100;

/// Workers as the devices of a fleet.
pub struct Members {
    pub fleet: Fleet,
    /// By device.
    pub workers: Vec<WorkerId>,
    /// What each takes by its measured rate, in percent of what the catalogue says of its kind.
    pub rated_percent: Vec<u32>,
    /// The same of what it was seen to take, in percent of that.
    pub pace_percent: Vec<u32>,
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
        let network = if machines.len() == 1 { WITHIN_MACHINE } else { NETWORK };
        if machines.len() == 1 {
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
        let workers = all.iter().map(|(candidate, _)| candidate.worker).collect();
        let paces: Vec<(&str, u32)> = all
            .iter()
            .map(|(candidate, about)| (about.device.kind.as_str(), candidate.pace_percent))
            .collect();
        let rated_percent = all.iter().map(|(_, about)| rated(about)).collect();
        Ok(Members { fleet, workers, rated_percent, pace_percent: expected(&paces) })
    }
}

/// Rates that differ by less than this are taken for the same: measuring has its noise, and planners find their way sooner
/// among devices that are alike.
const RATES_APART: f64 = 1.1;

/// What a worker's own work takes by its measured rate, in percent of what it takes its kind as the catalogue has it.
fn rated(about: &About) -> u32 {
    let rate = about.device.matrix_flops_per_second.filter(|rate| rate.is_finite() && *rate > 0.0);
    match (rate, catalogue::find(&about.device.kind)) {
        (Some(rate), Some(kind)) => {
            let steps = (kind.fp32_flops / rate).ln() / RATES_APART.ln();
            (100.0 * RATES_APART.powf(steps.round())).round().clamp(1.0, 1e6) as u32
        }
        _ => USUAL,
    }
}

/// What workers' own work is expected to take, in percent of what was predicted, by their kinds and what they were seen to
/// take. One that was never seen to be off is taken for the middle one of its kind that was: a newcomer would otherwise
/// seem faster than all who have worked.
fn expected(paces: &[(&str, u32)]) -> Vec<u32> {
    let of = |(kind, pace): &(&str, u32)| {
        let mut alike: Vec<u32> =
            paces.iter().filter(|other| other.0 == *kind && other.1 != USUAL).map(|other| other.1).collect();
        alike.sort_unstable();
        match alike.get(alike.len() / 2) {
            Some(middle) if *pace == USUAL => *middle,
            _ => *pace,
        }
    };
    paces.iter().map(of).collect()
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
    let host_bytes = members.iter().map(|(_, about)| host(about)).fold(0, u64::saturating_add);
    let disk_bytes = members.iter().filter_map(|(_, about)| about.disk_bytes).fold(0, u64::saturating_add);
    let mut node = Table::new();
    node.insert("name".into(), name.into());
    node.insert("host_memory".into(), bytes(host_bytes));
    node.insert("device_link".into(), WITHIN_MACHINE.into());
    let network = members.iter().find_map(|(_, about)| about.network);
    match network {
        None => drop(node.insert("network".into(), usual_network.into())),
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
    about.device.memory_bytes.saturating_add(GPU_PROCESS_BYTES)
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
    fn a_newcomer_is_taken_for_one_of_its_kind() {
        let paces = [("CPU", 1500), ("CPU", 100), ("T4", 100), ("CPU", 1200), ("CPU", 1300), ("V100", 300)];
        assert_eq!(expected(&paces), [1500, 1300, 100, 1200, 1300, 300]);
    }
}
