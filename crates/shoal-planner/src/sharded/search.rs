//! From a request to a decision: which machines take part. What a set of them can do is a [`Trial`]'s to find.

use std::collections::HashSet;

use shoal_plan::Activations;

use super::balance::{Way, micro_batch_sizes};
use super::trial::Trial;
use super::work::{MICRO_BATCH_MAX, ModelBytes, slicing_bytes};
use super::{Decision, Request, ShardedError};

/// Thresholds of network speed, nodes by themselves and devices by themselves that are tried, each.
const CANDIDATES_MAX: usize = 6;
/// Devices up to which all their sets and all their ways are tried.
const FEW_DEVICES: usize = 4;
/// Divisions of a batch over a set of devices, up to which all are tried.
pub(super) const EXHAUSTIVE_MAX: usize = 10_000;
/// How many of the best sets are improved step by step, unless devices are few, and how far from the best they may be.
const IMPROVED_MAX: usize = 3;
const IMPROVED_WITHIN: f64 = 1.25;
/// Of a few devices, the best sets that are followed farther than step by step.
const LOOKED_FARTHER_MAX: usize = 6;

pub(super) struct Search<'a> {
    pub request: &'a Request<'a>,
    pub bytes: ModelBytes,
    pub ways: Vec<Way>,
    /// All parameters, and the bytes of their state.
    pub parameters: f64,
    pub state: f64,
    /// The same in a host's memory, where rounded copies stand beside it.
    pub host_state: f64,
    /// Bytes that slices take beyond that, on each holder.
    pub slicing: f64,
}

impl<'a> Search<'a> {
    pub fn new(request: &'a Request<'a>) -> Search<'a> {
        let (chain, step) = (request.chain, request.step);
        let largest = step.global_batch.min(MICRO_BATCH_MAX);
        let kinds = [Activations::Keep, Activations::Recompute, Activations::Offload];
        let allowed = kinds.into_iter().filter(|kind| request.activations.is_none_or(|only| only == *kind));
        let sizes = micro_batch_sizes(largest);
        let ways = allowed.flat_map(|activations| {
            sizes.iter().map(move |micro_batch| Way { micro_batch: *micro_batch, activations })
        });
        let parameters = chain.tensors.iter().map(|tensor| tensor.elements()).sum::<usize>() as f64;
        let rounded_bytes = if step.precision.is_half() { step.precision.bytes() } else { 0 };
        Search {
            bytes: ModelBytes::new(chain, step, largest),
            ways: ways.collect(),
            parameters,
            state: parameters * 4.0 * (2 + step.optimizer_states) as f64,
            host_state: parameters * (4 * (2 + step.optimizer_states) + rounded_bytes) as f64,
            slicing: slicing_bytes(chain, step),
            request,
        }
    }

    /// The best of all sets of machines, where forecasts have shown by how much estimates of devices are wrong.
    pub fn best(&self, corrections: &[f64]) -> Result<Decision, ShardedError> {
        self.best_with(corrections, EXHAUSTIVE_MAX)
    }

    /// The same, with so many divisions at the most tried one by one for a set.
    pub fn best_with(&self, corrections: &[f64], exhaustive: usize) -> Result<Decision, ShardedError> {
        let mut trials: Vec<(f64, Trial)> = Vec::new();
        let mut least = f64::INFINITY;
        for used in self.candidates(corrections) {
            for spills in [false, true] {
                let mut trial = Trial::new(self, &used, spills, corrections);
                // What a set costs is known only when its movements are: of a few devices none is passed over before.
                let within = if self.has_few_devices() { f64::INFINITY } else { IMPROVED_WITHIN * least };
                let found = trial.divide(within);
                if let Some(seconds) = trial.divide_exhaustively(exhaustive).or(found) {
                    least = least.min(seconds);
                    trials.push((seconds, trial));
                }
            }
        }
        trials.sort_by(|a, b| a.0.total_cmp(&b.0));
        trials.truncate(if self.has_few_devices() { trials.len() } else { IMPROVED_MAX });
        trials.retain(|(seconds, _)| *seconds <= IMPROVED_WITHIN * least);
        for (seconds, trial) in &mut trials {
            *seconds = trial.improve().unwrap_or(*seconds);
        }
        trials.sort_by(|a, b| a.0.total_cmp(&b.0));
        if self.has_few_devices() {
            trials.iter_mut().take(LOOKED_FARTHER_MAX).for_each(|(_, trial)| trial.look_farther());
        }
        let improved = trials.into_iter().filter_map(|(_, trial)| trial.into_best());
        improved.min_by(|a, b| a.seconds.total_cmp(&b.seconds)).ok_or_else(|| self.no_room(corrections))
    }

    pub fn has_few_devices(&self) -> bool {
        self.request.fleet.devices.len() <= FEW_DEVICES
    }

    /// Sets of devices worth trying: all of them, those behind networks of some speed, single nodes, single devices; of
    /// a few devices, every set, those that differ in no more than which of a node's equal devices they have once.
    fn candidates(&self, corrections: &[f64]) -> Vec<Vec<bool>> {
        let fleet = self.request.fleet;
        let count = fleet.devices.len();
        if self.has_few_devices() {
            let set = |bits: usize| (0..count).map(|device| bits >> device & 1 == 1).collect();
            let sets = (1..1 << count).rev().map(set);
            return sets.filter(|used: &Vec<bool>| self.has_first(used, corrections)).collect();
        }
        let mut candidates = vec![vec![true; count]];
        let rate = |node: usize| fleet.nodes[node].network.bytes_per_second;
        let mut rates: Vec<f64> = (0..fleet.nodes.len()).map(rate).collect();
        rates.sort_by(f64::total_cmp);
        rates.dedup();
        for least in rates.into_iter().skip(1).take(CANDIDATES_MAX) {
            candidates.push(fleet.devices.iter().map(|device| rate(device.node) >= least).collect());
        }
        let like = |device: usize| {
            let (row, device) = (&self.request.devices[device], &fleet.devices[device]);
            (&device.kind, row.budget_bytes, row.workspace_bytes)
        };
        let mut nodes: Vec<_> = fleet.nodes.iter().map(|node| node.devices.clone()).collect();
        let mut singles: Vec<_> = (0..count).map(|device| device..device + 1).collect();
        for places in [&mut nodes, &mut singles] {
            let mut seen = HashSet::new();
            places.retain(|devices| seen.insert(devices.clone().map(like).collect::<Vec<_>>()));
            for devices in places.iter().take(CANDIDATES_MAX) {
                candidates.push((0..count).map(|device| devices.contains(&device)).collect());
            }
        }
        candidates
    }

    /// Whether a set has the first of its nodes' equal devices: a node's first serves its host, so none is better.
    fn has_first(&self, used: &[bool], corrections: &[f64]) -> bool {
        let Request { fleet, devices: rows, .. } = self.request;
        let alike = |one: usize, other: usize| {
            let (a, b) = (&fleet.devices[one], &fleet.devices[other]);
            (a.node, &a.kind, &a.host_link) == (b.node, &b.kind, &b.host_link)
                && rows[one].budget_bytes == rows[other].budget_bytes
                && rows[one].workspace_bytes == rows[other].workspace_bytes
                && corrections[one] == corrections[other]
        };
        let passed_over = |later: usize| (0..later).any(|device| !used[device] && alike(device, later));
        !(0..used.len()).any(|later| used[later] && passed_over(later))
    }

    /// What is short where nothing fits: the state everywhere, and the samples divided evenly, each device in the way that
    /// leaves most room.
    fn no_room(&self, corrections: &[f64]) -> ShardedError {
        let count = self.request.fleet.devices.len();
        let all = Trial::new(self, &vec![true; count], true, corrections);
        let batch = self.request.step.global_batch;
        let samples = |device: usize| batch * (device + 1) / count - batch * device / count;
        let working: f64 = (0..count).map(|device| all.most_room(device, samples(device))).sum();
        let (room, taken) = (all.rooms(), all.idle_rooms() - working);
        let (needed_bytes, room_bytes) = ((self.state + taken.max(0.0)) as u64, room as u64);
        // Where all of them together have room, one has not: the one whose share is farthest beyond it.
        let over = |device: usize| (-all.most_room(device, samples(device))).max(0.0) as u64;
        let fullest = (0..count).max_by_key(|device| over(*device)).filter(|device| over(*device) > 0);
        match fullest.filter(|_| needed_bytes <= room_bytes) {
            Some(device) => ShardedError::TooManySamples {
                device: self.request.devices[device].name.clone(),
                samples: samples(device),
                short_bytes: over(device),
            },
            None => ShardedError::NoRoom {
                samples: batch,
                needed_bytes,
                room_bytes,
                short_bytes: needed_bytes.saturating_sub(room_bytes),
            },
        }
    }
}
