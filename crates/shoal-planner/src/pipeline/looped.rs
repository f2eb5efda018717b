//! Pipelines whose two ends are one device. Where the first and the last layers share a tensor (an embedding that is the
//! head's matrix too), a pipeline has it at both ends, and its gradient crosses the network after the last backward, when
//! there is nothing left to hide it behind. On one device it is in one place and crosses nothing; what that costs is one
//! more passage of every micro-batch, from the last device back to the first.

use std::ops::Range;

use shoal_plan::Activations;

use super::candidate::Confirmed;
use super::outcome::PipelineError;
use super::polish::POLISHED_INSTRUCTIONS;
use super::search::Search;
use super::{Pipeline, Replica, Stage};
use crate::bound::Within;

impl Search<'_> {
    /// A plan with its ends on one device, where they share something that they would have to exchange, and it fits: if it
    /// can still be made better, or takes less than so many seconds as it is.
    pub(super) fn looped(
        &self,
        confirmed: &Confirmed,
        least: f64,
    ) -> Result<Option<Confirmed>, PipelineError> {
        let replicas = confirmed.pipeline.replicas.iter().map(|replica| self.loop_of(replica));
        let Some(replicas) = replicas.collect::<Option<Vec<Replica>>>() else { return Ok(None) };
        let pipeline = Pipeline { replicas, ..confirmed.pipeline.clone() };
        let within = if self.can_polish(&pipeline, POLISHED_INSTRUCTIONS) { f64::INFINITY } else { least };
        let Some(tried) = self.bench.step_within(&pipeline, Within::seconds(within))? else {
            return Ok(None);
        };
        let fits = self.bench.short(&tried).is_empty();
        let Confirmed { estimated_seconds, kind, .. } = *confirmed;
        Ok(fits.then_some(Confirmed { estimated_seconds, kind, pipeline, tried }))
    }

    fn loop_of(&self, replica: &Replica) -> Option<Replica> {
        let (first, last) = (replica.stages.first()?, replica.stages.last()?);
        let ends = self.shared_ends(&first.layers, &last.layers)?;
        if first.device == last.device {
            return None;
        }
        let cuts = self.balanced(replica, &ends)?;
        let stages = replica.stages.iter().zip(cuts);
        let mut stages: Vec<Stage> =
            stages.map(|(stage, layers)| Stage { layers, ..stage.clone() }).collect();
        // Nothing but the head is left of most, whose backward follows its forward at once.
        stages.push(Stage { layers: ends, activations: Activations::Keep, ..first.clone() });
        Some(Replica { stages, ..replica.clone() })
    }

    /// The last layers, from the first of them on that shares a tensor with one of the first.
    fn shared_ends(&self, first: &Range<usize>, last: &Range<usize>) -> Option<Range<usize>> {
        let shared = (0..self.chain.tensors.len()).filter_map(|tensor| {
            let users = || self.chain.users(tensor);
            users().any(|layer| first.contains(&layer)).then(|| users().find(|layer| last.contains(layer)))?
        });
        shared.min().map(|start| start..self.chain.layers.len())
    }

    /// Where the layers before the ends are cut so that the slowest device, the first with the ends beside its own, is as
    /// quick as can be.
    fn balanced(&self, replica: &Replica, ends: &Range<usize>) -> Option<Vec<Range<usize>>> {
        let seconds = |stage: &Stage, layer: usize| {
            let forward = self.costs.forward(layer, stage.device, replica.micro_batch);
            let again = if stage.activations == Activations::Recompute { forward } else { 0.0 };
            forward + again + self.costs.backward(layer, stage.device, replica.micro_batch)
        };
        let (stages, layers) = (&replica.stages, ends.start);
        let own: f64 = ends.clone().map(|layer| seconds(&stages[0], layer)).sum();
        // From the last device backwards: the least that the slowest takes for the layers from each on, and where the
        // first of them ends.
        let mut rows: Vec<Vec<(f64, usize)>> = Vec::new();
        for (place, stage) in stages.iter().enumerate().rev() {
            let behind = rows.last();
            let row = (0..=layers).map(|start| {
                let mut best = (f64::INFINITY, start);
                let mut taken = if place == 0 { own } else { 0.0 };
                for end in start + 1..=layers {
                    taken += seconds(stage, end - 1);
                    let after = match behind {
                        Some(behind) => behind[end].0,
                        None if end < layers => f64::INFINITY,
                        None => 0.0,
                    };
                    if taken.max(after) < best.0 {
                        best = (taken.max(after), end);
                    }
                }
                best
            });
            let row = row.collect();
            rows.push(row);
        }
        let mut start = 0;
        let cut = |row: &Vec<(f64, usize)>| {
            let (slowest, end) = row[start];
            let layers = start..end;
            start = end;
            slowest.is_finite().then_some(layers)
        };
        rows.iter().rev().map(cut).collect()
    }
}
