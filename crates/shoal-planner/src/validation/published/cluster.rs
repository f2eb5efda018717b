//! The machines that published runs were on, as far as they are known: GPUs a machine, what joins them, and the network.
//! A tensor-parallel group is one device: its GPUs divide the work and exchange their sums.

use std::collections::BTreeMap;

use shoal_fleet::catalogue::Kind;
use shoal_fleet::{Costs, Device, Error, Fleet, KindTable, LayerTable, Link, Node, TimeCurve};
use shoal_model::{Chain, LayerKind, Precision};

use super::stated::Stated;
use crate::validation::{NO_HOST, parameters};

const GIGA: f64 = 1e9;
const GIGABIT: f64 = 1e9 / 8.0;

/// The share of a link's published rate that collectives reach.
const REACHED: f64 = 0.8;

/// From GPU to GPU, and from machine to machine.
const WITHIN_LATENCY_SECONDS: f64 = 5e-6;
const NETWORK_LATENCY_SECONDS: f64 = 20e-6;

/// A kind of machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Site {
    pub gpus: usize,
    /// Each way, of one GPU to the others of its machine.
    pub within_bytes_per_second: f64,
    /// Of all the machine's network interfaces.
    pub network_bytes_per_second: f64,
}

/// As the source states it, or as such GPUs usually come: eight a machine, with NVLink between them and a network
/// interface each, of 200 or 400 Gbit/s by their generation.
pub fn site(source: &str, kind: &Kind) -> Site {
    let new = |gpus, within, network| Site {
        gpus,
        within_bytes_per_second: within,
        network_bytes_per_second: network,
    };
    if source.contains("DachengLi1/AMP") {
        return match kind.name {
            "T4" => new(4, 50.0 * GIGABIT, 50.0 * GIGABIT),
            _ => new(4, 170.0 * GIGABIT, 10.0 * GIGABIT),
        };
    }
    let nvlink = |rate: f64| REACHED * rate * GIGA;
    match kind.name {
        name if name.starts_with('H') => new(8, nvlink(450.0), REACHED * 8.0 * 400.0 * GIGABIT),
        name if name.starts_with("A100") => new(8, nvlink(300.0), REACHED * 8.0 * 200.0 * GIGABIT),
        name if name.starts_with("V100") => new(8, nvlink(150.0), REACHED * 100.0 * GIGABIT),
        _ => new(8, REACHED * kind.host_link().bytes_per_second, REACHED * 100.0 * GIGABIT),
    }
}

/// The groups of a run and what joins them, and what layers take on them.
pub fn build(stated: &Stated) -> Result<(Fleet, Costs), Error> {
    let fleet = fleet(stated);
    let count = stated.chain.layers.len();
    let mut tables: Vec<KindTable> = Vec::new();
    for group in stated.gpus.chunks(stated.tensor) {
        let name = kind_name(group);
        if tables.iter().all(|table| table.kind != name) {
            tables.push(table(stated, group[0], name)?);
        }
    }
    let layer = |layer: usize| LayerTable {
        name: stated.chain.layers[layer].name.clone(),
        parameters: parameters(&stated.chain, layer),
        output_bytes: output_bytes(stated, layer, 1) as u64,
    };
    let costs = Costs::from_tables((0..count).map(layer).collect(), &tables, &fleet)?;
    Ok((fleet, costs))
}

fn kind_name(group: &[&Kind]) -> String {
    format!("{} of {}", group.len(), group[0].name)
}

fn output_bytes(stated: &Stated, layer: usize, samples: usize) -> f64 {
    stated.chain.layers[layer].kind.output_bytes(samples, stated.sequence, stated.precision) as f64
}

fn fleet(stated: &Stated) -> Fleet {
    let (mut nodes, mut devices): (Vec<Node>, Vec<Device>) = (Vec::new(), Vec::new());
    // Groups of a machine, while it has GPUs left.
    let mut room = 0;
    for (number, group) in stated.gpus.chunks(stated.tensor).enumerate() {
        let site = site(&stated.source, group[0]);
        if room == 0 {
            room = (site.gpus / stated.tensor).max(1);
            // A group that spans machines has the interfaces of all of them.
            let machines = stated.tensor.div_ceil(site.gpus) as f64;
            let within = site.within_bytes_per_second * stated.tensor as f64;
            nodes.push(Node {
                name: format!("machine {}", nodes.len()),
                zone: 0,
                host_memory_bytes: 0,
                host_bytes_per_second: NO_HOST.bytes_per_second,
                disk: None,
                network: Link::new(machines * site.network_bytes_per_second, NETWORK_LATENCY_SECONDS),
                device_link: Some(Link::new(within, WITHIN_LATENCY_SECONDS)),
                devices: number..number,
            });
        }
        room -= 1;
        let node = nodes.len() - 1;
        nodes[node].devices.end = number + 1;
        devices.push(Device {
            name: format!("group {number}"),
            kind: kind_name(group),
            node,
            memory_bytes: 0,
            dollars_per_hour: 0.0,
            on_demand_dollars_per_hour: None,
            spot: false,
            host_link: NO_HOST,
            host_link_stated: true,
        });
    }
    let (zone_link, pairs) = (NO_HOST, BTreeMap::new());
    let zones = vec!["one".to_owned()];
    Fleet { nodes, devices, zones, zone_link, zone_pairs: pairs.clone(), node_pairs: pairs }
}

/// A group of a kind: the catalogue's estimate divided by its GPUs, and the sums that they exchange.
fn table(stated: &Stated, gpu: &Kind, kind: String) -> Result<KindTable, Error> {
    let alone = alone(&stated.chain, gpu, stated.precision, stated.sequence)?;
    let degree = stated.tensor as f64;
    let link = between_gpus(stated, gpu);
    let rest = stated.global_batch / stated.replicas % stated.micro_batch;
    let mut samples = vec![rest, stated.micro_batch];
    samples.retain(|samples| *samples > 0);
    let curve = |layer: usize, backward: bool| {
        let sums = sums(&stated.chain.layers[layer].kind)[usize::from(backward)];
        let seconds = samples.iter().map(|samples| {
            let computing = match backward {
                false => alone.forward(layer, 0, *samples),
                true => alone.backward(layer, 0, *samples),
            };
            // A head hands on a loss; what its group adds up is as wide as what it takes.
            let summed = output_bytes(stated, layer.min(stated.chain.layers.len() - 2), *samples);
            computing / degree + sums * ring_seconds(&link, stated.tensor, summed)
        });
        TimeCurve::new(samples.clone(), seconds.collect())
    };
    let all = |backward| (0..stated.chain.layers.len()).map(|layer| curve(layer, backward)).collect();
    Ok(KindTable {
        kind,
        forward: all(false),
        backward: all(true),
        update_seconds_per_parameter: alone.update(0, 1) / degree,
    })
}

/// What a group's GPUs exchange their sums and parts over.
pub fn link_within(stated: &Stated, group: usize) -> Link {
    between_gpus(stated, stated.gpus[group * stated.tensor])
}

fn between_gpus(stated: &Stated, gpu: &Kind) -> Link {
    let site = site(&stated.source, gpu);
    match stated.tensor <= site.gpus {
        true => Link::new(site.within_bytes_per_second, WITHIN_LATENCY_SECONDS),
        // A ring enters and leaves each machine once.
        false => Link::new(site.network_bytes_per_second, NETWORK_LATENCY_SECONDS),
    }
}

/// What one GPU of the kind would take.
fn alone(chain: &Chain, gpu: &Kind, precision: Precision, sequence: usize) -> Result<Costs, Error> {
    let node = Node {
        name: "machine".into(),
        zone: 0,
        host_memory_bytes: 0,
        host_bytes_per_second: NO_HOST.bytes_per_second,
        disk: None,
        network: NO_HOST,
        device_link: None,
        devices: 0..1,
    };
    let device = Device {
        name: "device".into(),
        kind: gpu.name.into(),
        node: 0,
        memory_bytes: 0,
        dollars_per_hour: 0.0,
        on_demand_dollars_per_hour: None,
        spot: false,
        host_link: NO_HOST,
        host_link_stated: true,
    };
    let fleet = Fleet {
        nodes: vec![node],
        devices: vec![device],
        zones: vec!["one".to_owned()],
        zone_link: NO_HOST,
        zone_pairs: BTreeMap::new(),
        node_pairs: BTreeMap::new(),
    };
    Costs::new(chain, &fleet, None, precision, sequence)
}

/// Sums over the group of a layer's whole output, or of its gradient, in forward and backward: a block's attention and
/// its MLP each divide their inner width, an embedding and a head their vocabulary.
fn sums(kind: &LayerKind) -> [f64; 2] {
    match kind {
        LayerKind::Block(_) => [2.0, 2.0],
        LayerKind::Embedding(_) => [1.0, 0.0],
        LayerKind::Head(_) => [0.0, 1.0],
        LayerKind::Patches(_) | LayerKind::Convolution(_) | LayerKind::Join(_) => [0.0, 0.0],
    }
}

fn ring_seconds(link: &Link, members: usize, bytes: f64) -> f64 {
    let rounds = 2.0 * members.saturating_sub(1) as f64;
    rounds * (link.seconds_latency + bytes / members as f64 / link.bytes_per_second)
}
