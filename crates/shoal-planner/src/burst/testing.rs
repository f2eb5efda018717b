//! Small fleets and costs for this module's tests.

use std::collections::BTreeMap;

use shoal_fleet::{Costs, Device, Fleet, KindTable, LayerTable, Link, Node, TimeCurve};

use super::{LayerBytes, Problem};

/// One GiB beside what a process takes.
const MEMORY_BYTES: u64 = (1 << 30) + crate::GPU_PROCESS_BYTES + crate::GPU_WORKSPACE_BYTES;

/// Nodes of equal devices, 100 GB/s within a node and 1 GB/s between.
pub fn fleet(nodes: usize, devices: usize) -> Fleet {
    let node = |node: usize| Node {
        name: format!("node{node}"),
        zone: 0,
        host_memory_bytes: 1 << 36,
        host_bytes_per_second: 1e11,
        disk: None,
        network: Link::new(1e9, 1e-5),
        device_link: Some(Link::new(1e11, 1e-6)),
        devices: node * devices..(node + 1) * devices,
    };
    let device = |device: usize| Device {
        name: format!("gpu{device}"),
        kind: "A100".into(),
        node: device / devices,
        memory_bytes: MEMORY_BYTES,
        dollars_per_hour: 0.0,
        on_demand_dollars_per_hour: None,
        spot: false,
        host_link: Link::new(1e11, 1e-6),
        host_link_stated: true,
    };
    Fleet {
        nodes: (0..nodes).map(node).collect(),
        devices: (0..nodes * devices).map(device).collect(),
        zones: vec!["zone".into()],
        zone_link: Link::NONE,
        zone_pairs: BTreeMap::new(),
        node_pairs: BTreeMap::new(),
    }
}

/// A layer as tests draw it.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// Seconds of a forward whatever the samples, and a sample; the backward takes twice as long.
    pub fixed: f64,
    pub each: f64,
    pub parameters: u64,
    pub output_bytes: u64,
}

pub fn costs(layers: &[Drawn], fleet: &Fleet) -> Costs {
    let curve = |layer: &Drawn, times: f64| {
        let samples: Vec<usize> = (1..=64).collect();
        let seconds = samples.iter().map(|samples| times * (layer.fixed + layer.each * *samples as f64));
        TimeCurve::new(samples.clone(), seconds.collect())
    };
    let table = KindTable {
        kind: "A100".into(),
        forward: layers.iter().map(|layer| curve(layer, 1.0)).collect(),
        backward: layers.iter().map(|layer| curve(layer, 2.0)).collect(),
        update_seconds_per_parameter: 0.0,
    };
    let of = |(place, layer): (usize, &Drawn)| LayerTable {
        name: format!("layer{place}"),
        parameters: layer.parameters,
        output_bytes: layer.output_bytes,
    };
    Costs::from_tables(layers.iter().enumerate().map(of).collect(), &[table], fleet).unwrap()
}

/// A chain of the layers, each reading the one before.
pub fn chain<'a>(costs: &'a Costs, fleet: &'a Fleet, global_batch: usize) -> Problem<'a> {
    let layers = costs.layers();
    let input = |layer: usize| if layer == 0 { Vec::new() } else { vec![layer - 1] };
    Problem {
        fleet,
        costs,
        inputs: (0..layers).map(input).collect(),
        global_batch,
        gradient_bytes_a_parameter: 4,
        seconds_a_move: 0.0,
        memory: vec![LayerBytes::default(); layers],
    }
}
