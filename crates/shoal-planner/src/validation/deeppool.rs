//! Per-layer A100 profiles by batch, and what data parallelism, DeepPool's own rule and our search make of them.
//!
//! What is assumed besides the profiles, and said in the report: the links; 40 µs to start a move of samples, as DeepPool
//! counts it; fp32 throughout; sums of gradients by bandwidth alone, hidden behind the backward as far as it goes, for
//! everyone, so that data parallelism is not made worse than it is (beside it stands data parallelism whose sums come after
//! the backward, as DeepPool's runtime has it). Its own planner knows one bandwidth for all pairs of
//! devices: that is the `flat` network. Clusters that can be had are the other one.

pub mod profile;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use shoal_fleet::{Costs, Device, Fleet, KindTable, Link, Node};
use thiserror::Error;

use crate::burst::background::Background;
use crate::burst::{BurstError, Estimate, Goal, Planner, Problem};
use profile::{Measured, ProfileError, Shape};

#[derive(Debug, Error)]
pub enum DeepPoolError {
    #[error(transparent)]
    Profile(#[from] ProfileError),
    #[error(transparent)]
    Costs(#[from] shoal_fleet::Error),
    #[error(transparent)]
    Plan(#[from] BurstError),
}

impl DeepPoolError {
    pub fn hint(&self) -> Option<String> {
        match self {
            DeepPoolError::Profile(error) => error.hint(),
            DeepPoolError::Costs(error) => error.hint(),
            DeepPoolError::Plan(error) => error.hint(),
        }
    }
}

/// A model with its file, and the limits published of it.
struct Published {
    model: &'static str,
    file: &'static str,
    shape: Shape,
    compute_only_batch: usize,
    speedup: f64,
    amplification: f64,
}

const MODELS: [Published; 3] = [
    Published {
        model: "VGG-16",
        file: "A100_vgg.prof",
        shape: Shape::Chain,
        compute_only_batch: 32,
        speedup: 5.2,
        amplification: 1.53,
    },
    Published {
        model: "WideResNet-101-2",
        file: "A100_wrn.prof",
        shape: Shape::Chain,
        compute_only_batch: 16,
        speedup: 2.6,
        amplification: 3.05,
    },
    Published {
        model: "Inception-V3",
        file: "A100_inception.prof",
        shape: Shape::InceptionV3,
        compute_only_batch: 32,
        speedup: 4.0,
        amplification: 1.98,
    },
];

const KIND: &str = "A100";
const MEMORY_BYTES: u64 = 40 << 30;
const GLOBAL_BATCH: usize = 256;
const DEVICES: [usize; 3] = [8, 64, 256];
const DEVICES_A_NODE: usize = 8;
/// NVLink of the third generation, each way.
const NVLINK_BYTES_PER_SECOND: f64 = 300e9;
/// 100 Gbit/s.
const NETWORK_BYTES_PER_SECOND: f64 = 12.5e9;
const SECONDS_A_MOVE: f64 = 40e-6;

/// What joins the devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// Every pair as within a node.
    Flat,
    /// Nodes of eight, joined by one interface each.
    Nodes,
}

#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub assumptions: Assumptions,
    pub models: Vec<ModelReport>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Assumptions {
    pub global_batch: usize,
    pub devices_a_node: usize,
    pub device_memory_bytes: u64,
    pub bytes_per_second_in_a_node: f64,
    pub bytes_per_second_between_nodes: f64,
    pub seconds_a_move: f64,
    pub background_piece_seconds: f64,
}

#[derive(Clone, Debug, Serialize)]
pub struct ModelReport {
    pub model: String,
    pub parameters: u64,
    pub compute_only: ComputeOnly,
    pub cases: Vec<Case>,
}

/// What dividing the batch over eight devices gives if nothing but computing took time.
#[derive(Clone, Debug, Serialize)]
pub struct ComputeOnly {
    pub global_batch: usize,
    pub speedup: f64,
    pub published_speedup: f64,
    /// Device-seconds over those of one device.
    pub amplification: f64,
    pub published_amplification: f64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Case {
    pub network: Network,
    pub devices: usize,
    pub single_device_seconds: f64,
    pub data_parallel: Outcome,
    pub greedy: Outcome,
    pub fastest: Outcome,
    /// The fastest that takes no more device-seconds than the greedy rule.
    pub at_greedy_device_seconds: Outcome,
    /// Of those no slower than data parallelism, the one that gets most done together with a background job.
    pub shared: Outcome,
    /// The same of those at most five percent slower.
    pub shared_within_five_percent: Outcome,
    /// The same of those no slower than the greedy rule: what DeepPool's own multiplexing is to be compared with.
    pub shared_at_greedy_pace: Outcome,
    /// Data parallelism as DeepPool's own runtime has it: sums come after the backward.
    pub data_parallel_sums_after: Outcome,
    /// Of those no slower than that, the one that gets most done together with a background job, compared with that.
    pub shared_with_sums_after: Outcome,
    /// What no sharing can pass: every device always at work, the foreground's part of it done at the best pace that any of
    /// its layers has at any number of samples. Background work is counted in devices that do nothing else, so that what
    /// data parallelism wastes of its devices is all there is to gain.
    pub throughput_ceiling: f64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    pub step_seconds: f64,
    pub device_seconds: f64,
    /// Device-seconds over those of one device.
    pub amplification: f64,
    /// Data parallelism's step over this one.
    pub speedup_over_data_parallel: f64,
    pub moving_seconds: f64,
    pub exposed_seconds: f64,
    /// What the foreground does, in devices that do nothing else at one device's pace.
    pub foreground_devices_worth: f64,
    /// What a background job does in the gaps, likewise.
    pub background_devices_worth: f64,
    /// Both over what data parallelism with a single task does.
    pub throughput_over_data_parallel: f64,
}

/// The report on the files of a folder.
pub fn report(folder: &Path) -> Result<Report, DeepPoolError> {
    let mut models = Vec::new();
    for published in &MODELS {
        let path = folder.join(published.file);
        let text = std::fs::read_to_string(&path).map_err(|cause| ProfileError::Io { path, cause })?;
        let measured = profile::read(&text, published.file, published.shape)?;
        let mut cases = Vec::new();
        for network in [Network::Flat, Network::Nodes] {
            for devices in DEVICES {
                // Within a node there is but one network.
                if network == Network::Flat || devices > DEVICES_A_NODE {
                    cases.push(case(&measured, network, devices, GLOBAL_BATCH)?);
                }
            }
        }
        models.push(ModelReport {
            model: published.model.to_owned(),
            parameters: measured.layers.iter().map(|layer| layer.parameters).sum(),
            compute_only: compute_only(&measured, published),
            cases,
        });
    }
    let assumptions = Assumptions {
        global_batch: GLOBAL_BATCH,
        devices_a_node: DEVICES_A_NODE,
        device_memory_bytes: MEMORY_BYTES,
        bytes_per_second_in_a_node: NVLINK_BYTES_PER_SECOND,
        bytes_per_second_between_nodes: NETWORK_BYTES_PER_SECOND,
        seconds_a_move: SECONDS_A_MOVE,
        background_piece_seconds: Background::PIECE_SECONDS_MIN,
    };
    Ok(Report { assumptions, models })
}

const COMPUTE_ONLY_DEVICES: usize = 8;

fn compute_only(measured: &Measured, published: &Published) -> ComputeOnly {
    let global_batch = published.compute_only_batch;
    let seconds = |samples: usize| -> f64 {
        measured.forward.iter().chain(&measured.backward).map(|curve| curve.at(samples)).sum()
    };
    let speedup = seconds(global_batch) / seconds(global_batch.div_ceil(COMPUTE_ONLY_DEVICES));
    ComputeOnly {
        global_batch,
        speedup,
        published_speedup: published.speedup,
        amplification: COMPUTE_ONLY_DEVICES as f64 / speedup,
        published_amplification: published.amplification,
    }
}

/// One model on one fleet.
pub fn case(
    measured: &Measured,
    network: Network,
    devices: usize,
    global_batch: usize,
) -> Result<Case, DeepPoolError> {
    let fleet = fleet(network, devices);
    let table = KindTable {
        kind: KIND.to_owned(),
        forward: measured.forward.clone(),
        backward: measured.backward.clone(),
        update_seconds_per_parameter: 0.0,
    };
    let costs = Costs::from_tables(measured.layers.clone(), &[table], &fleet)?;
    let problem = Problem {
        fleet: &fleet,
        costs: &costs,
        inputs: measured.inputs.clone(),
        global_batch,
        gradient_bytes_a_parameter: 4,
        seconds_a_move: SECONDS_A_MOVE,
        memory: measured.memory.clone(),
    };
    let planner = Planner::new(&problem)?;
    let single = planner.estimate(&problem.single_device());
    let plain = planner.estimate(&problem.data_parallel());
    let outcome = |estimate: &Estimate| Outcome::new(estimate, &single, &plain);
    let greedy = planner.estimate(planner.greedy());
    let fastest = planner.plan(Goal::Fastest)?.estimate;
    let same = planner.plan(Goal::DeviceSeconds(greedy.device_seconds))?.estimate;
    let paces = [plain.step_seconds, SLOWER * plain.step_seconds, greedy.step_seconds];
    let shared_over = |step_seconds_max: f64, baseline: &Estimate| -> Result<Outcome, DeepPoolError> {
        let outcome = |estimate: &Estimate| Outcome::new(estimate, &single, baseline);
        let cheapest = planner.plan(Goal::StepSeconds(step_seconds_max))?;
        let frontier = planner.frontier(step_seconds_max);
        let all = frontier.iter().map(|planned| outcome(&planned.estimate));
        let better = |a: Outcome, b: Outcome| {
            if b.throughput_over_data_parallel > a.throughput_over_data_parallel { b } else { a }
        };
        Ok(all.fold(outcome(&cheapest.estimate), better))
    };
    let shared = |step_seconds_max: f64| shared_over(step_seconds_max, &plain);
    let sums_after = planner.estimate_with_sums_after(&problem.data_parallel());
    Ok(Case {
        network,
        devices,
        single_device_seconds: single.step_seconds,
        data_parallel: outcome(&plain),
        greedy: outcome(&greedy),
        fastest: outcome(&fastest),
        at_greedy_device_seconds: outcome(&same),
        shared: shared(paces[0])?,
        shared_within_five_percent: shared(paces[1])?,
        shared_at_greedy_pace: shared(paces[2])?,
        data_parallel_sums_after: Outcome::new(&sums_after, &single, &sums_after),
        shared_with_sums_after: shared_over(sums_after.step_seconds, &sums_after)?,
        throughput_ceiling: devices as f64 * plain.step_seconds
            / least_device_seconds(measured, global_batch),
    })
}

/// Device-seconds that no division of a step's samples is below: every layer at its best pace.
fn least_device_seconds(measured: &Measured, global_batch: usize) -> f64 {
    let curves = measured.forward.iter().zip(&measured.backward);
    let least = curves.map(|(forward, backward)| {
        let of_sample = |samples: usize| (forward.at(samples) + backward.at(samples)) / samples as f64;
        (1..=global_batch).map(of_sample).fold(f64::INFINITY, f64::min)
    });
    global_batch as f64 * least.sum::<f64>()
}

/// How much slower a foreground may be made by what it shares its devices with.
const SLOWER: f64 = 1.05;

impl Outcome {
    fn new(estimate: &Estimate, single: &Estimate, plain: &Estimate) -> Outcome {
        let worth = |estimate: &Estimate| single.step_seconds / estimate.step_seconds;
        let background = Background::new(Background::PIECE_SECONDS_MIN).devices_worth(estimate);
        Outcome {
            step_seconds: estimate.step_seconds,
            device_seconds: estimate.device_seconds,
            amplification: estimate.device_seconds / single.device_seconds,
            speedup_over_data_parallel: plain.step_seconds / estimate.step_seconds,
            moving_seconds: estimate.moving_seconds,
            exposed_seconds: estimate.exposed_seconds,
            foreground_devices_worth: worth(estimate),
            background_devices_worth: background,
            throughput_over_data_parallel: (worth(estimate) + background) / worth(plain),
        }
    }
}

fn fleet(network: Network, devices: usize) -> Fleet {
    let a_node = match network {
        Network::Flat => devices,
        Network::Nodes => DEVICES_A_NODE.min(devices),
    };
    let in_a_node = Link::new(NVLINK_BYTES_PER_SECOND, 0.0);
    let node = |node: usize| Node {
        name: format!("node{node}"),
        zone: 0,
        host_memory_bytes: 0,
        host_bytes_per_second: f64::INFINITY,
        disk: None,
        network: Link::new(NETWORK_BYTES_PER_SECOND, 0.0),
        device_link: Some(in_a_node.clone()),
        devices: node * a_node..((node + 1) * a_node).min(devices),
    };
    let device = |device: usize| Device {
        name: format!("device{device}"),
        kind: KIND.to_owned(),
        node: device / a_node,
        memory_bytes: MEMORY_BYTES,
        dollars_per_hour: 0.0,
        on_demand_dollars_per_hour: None,
        spot: false,
        // What leaves a node passes its interface, which is slower than any way to the host.
        host_link: in_a_node.clone(),
        host_link_stated: true,
    };
    Fleet {
        nodes: (0..devices.div_ceil(a_node)).map(node).collect(),
        devices: (0..devices).map(device).collect(),
        zones: vec!["zone".to_owned()],
        zone_link: Link::NONE,
        zone_pairs: BTreeMap::new(),
        node_pairs: BTreeMap::new(),
    }
}

#[cfg(test)]
mod tests;
