//! How long a pipeline's step takes by the model, and what holds it up.

use shoal_fleet::Device;

use super::candidate::{Candidate, Row};
use super::outcome::Bottleneck;
use super::search::Search;
use super::stages::boundary;
use super::{Pipeline, State};
use crate::kept;

impl Search<'_> {
    /// The pipelines, what the reduction adds behind them, and the update.
    pub(super) fn seconds(&self, candidate: &Candidate) -> f64 {
        let pipelines = candidate.rows.iter().map(|row| row.pace.seconds(row.samples)).fold(0.0, f64::max);
        let distinct: Vec<&Row> = candidate
            .distinct()
            .iter()
            .enumerate()
            .filter(|(number, first)| number == *first)
            .map(|(number, _)| &candidate.rows[number])
            .collect();
        let rates = self.reduction_rates(candidate, &distinct);
        let tails = distinct.iter().map(|row| self.tail(candidate, row, &rates));
        pipelines + tails.fold(0.0, f64::max)
    }

    /// Bytes a second at which the replicas add up each layer's gradients: rings go through all of them, and the
    /// slowest way in a ring governs.
    fn reduction_rates(&self, candidate: &Candidate, distinct: &[&Row]) -> Vec<f64> {
        let fleet = self.bench.fleet;
        let node = |device: usize| fleet.devices[device].node;
        let home = node(candidate.rows[0].devices[0]);
        let devices = || candidate.rows.iter().flat_map(|row| &row.devices);
        let alone = devices().all(|device| node(*device) == home);
        let mut rates = vec![f64::INFINITY; self.chain.layers.len()];
        if candidate.rows.len() == 1 {
            return rates;
        }
        for row in distinct {
            for (stage, device) in row.cut.stages.iter().zip(&row.devices) {
                let at = &fleet.nodes[node(*device)];
                // A node's stages have rings of their own, and one interface.
                let stages = row.devices.iter().filter(|other| node(**other) == node(*device)).count();
                let host = fleet.devices[*device].host_link.bytes_per_second;
                let rate = match alone {
                    true => at.device_link.as_ref().map_or(host, |link| link.bytes_per_second),
                    false => (at.network.bytes_per_second / stages as f64).min(host),
                };
                rates[stage.layers.clone()].iter_mut().for_each(|slowest| *slowest = slowest.min(rate));
            }
        }
        rates
    }

    /// Seconds after a replica's last backward until its parameters are new.
    fn tail(&self, candidate: &Candidate, row: &Row, rates: &[f64]) -> f64 {
        let fleet = self.bench.fleet;
        let count = candidate.rows.len();
        let (mut tail, mut drained) = (0.0f64, 0.0);
        for (stage, device) in row.cut.stages.iter().zip(&row.devices) {
            let layers = || stage.layers.clone();
            let parameters: u64 = self.parameters[layers()].iter().sum();
            let once: f64 = layers().map(|layer| self.parameters[layer] as f64 / rates[layer]).sum();
            // Of a byte for each parameter, once around.
            let around = once * (count - 1) as f64 / count as f64;
            let copy = self.step.precision.bytes() as f64;
            let sent = self.step.gradients.bytes() as f64;
            let own = parameters / count as u64;
            let (reduce, update, renew) = match candidate.state {
                State::Whole => ((sent + 4.0) * around, self.costs.update(*device, parameters), 0.0),
                State::Divided => (sent * around, self.costs.update(*device, own), copy * around),
                State::Host => {
                    let Device { host_link, node, .. } = &fleet.devices[*device];
                    let host = parameters as f64 / host_link.bytes_per_second;
                    let update = self.costs.host_update(*node, own);
                    ((sent * around).max(4.0 * host), update, copy * around.max(host))
                }
            };
            // Stages nearer the loss are done earlier, and reduce while the others still work.
            tail = tail.max((reduce - drained).max(0.0) + update + renew);
            drained += stage.backward + stage.transfer;
        }
        tail
    }

    /// What the slowest replica's micro-batches wait for.
    pub(super) fn bottleneck(&self, pipeline: &Pipeline) -> Bottleneck {
        let fleet = self.bench.fleet;
        let mut worst = Bottleneck::Stage { replica: 0, stage: 0, device: 0, seconds: 0.0 };
        let mut most = 0.0;
        for (number, replica) in pipeline.replicas.iter().enumerate() {
            let size = replica.micro_batch;
            let count = replica.samples.len().div_ceil(size) as f64;
            let bytes = boundary(self.chain, self.step, size);
            for (place, stage) in replica.stages.iter().enumerate() {
                let work = |layer: usize| {
                    let forward = self.costs.forward(layer, stage.device, size);
                    let activations = kept(&self.chain.layers[layer].kind, stage.activations);
                    let again = shoal_plan::is_remade(self.chain, layer, activations);
                    let remade = if again { forward } else { 0.0 };
                    forward + remade + self.costs.backward(layer, stage.device, size)
                };
                let seconds: f64 = stage.layers.clone().map(work).sum();
                if seconds * count > most {
                    most = seconds * count;
                    worst =
                        Bottleneck::Stage { replica: number, stage: place, device: stage.device, seconds };
                }
                if let Some(next) = replica.stages.get(place + 1) {
                    let bytes = bytes[stage.layers.end];
                    let seconds = fleet.link(stage.device, next.device).seconds(bytes);
                    if seconds * count > most {
                        most = seconds * count;
                        let (from, to) = (stage.device, next.device);
                        worst = Bottleneck::Link { replica: number, stage: place, from, to, bytes, seconds };
                    }
                }
            }
        }
        worst
    }
}
