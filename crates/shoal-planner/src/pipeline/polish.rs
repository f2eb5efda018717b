//! A good plan made better step by step: its neighbours are played through as long as that is cheap. Where steps are
//! small, this finds what the model of them is too coarse for.

use std::collections::HashMap;

use shoal_plan::{Activations, parallel};

use super::candidate::Confirmed;
use super::outcome::PipelineError;
use super::search::Search;
use super::trial::Tried;
use super::{Pipeline, Replica, Stage};
use crate::bound::Within;

/// Instructions that may be played through to make a good plan better, step by step.
pub(super) const POLISHED_INSTRUCTIONS: usize = 150_000;

impl Search<'_> {
    /// About how many instructions a step has.
    pub(super) fn instructions(&self, pipeline: &Pipeline) -> usize {
        let layers = self.chain.layers.len();
        let of = |replica: &Replica| {
            let stages = replica.stages.len();
            replica.samples.len().div_ceil(replica.micro_batch) * (3 * layers + 4 * stages)
        };
        pipeline.replicas.iter().map(of).sum::<usize>() + 2 * self.chain.tensors.len()
    }

    /// Whether a plan is so small that its neighbours are tried. Of neighbours that are only looked at in part, few are the
    /// best.
    pub(super) fn can_polish(&self, pipeline: &Pipeline, left: usize) -> bool {
        8 * self.instructions(pipeline) <= left
    }

    /// Tries a plan's neighbours and goes where it gets better, as long as that is cheap. `known` are plans that were tried
    /// before, with what they do not fall below: ways from different plans often meet.
    pub(super) fn polish(
        &self,
        confirmed: &mut Confirmed,
        known: &mut HashMap<Pipeline, f64>,
    ) -> Result<(), PipelineError> {
        let mut left = POLISHED_INSTRUCTIONS;
        while self.can_polish(&confirmed.pipeline, left) {
            let mut neighbours = self.neighbours(&confirmed.pipeline);
            neighbours.retain(|neighbour| match left.checked_sub(self.instructions(neighbour)) {
                Some(rest) => {
                    left = rest;
                    true
                }
                None => false,
            });
            let within = Within::quicker(confirmed.tried.seconds, confirmed.tried.foreseen_seconds);
            let least = within.seconds;
            let mut canonical: Vec<Pipeline> = Vec::new();
            neighbours.retain(|neighbour| {
                let look = self.canonical(neighbour);
                let is_new =
                    known.get(&look).is_none_or(|seconds| *seconds < least) && !canonical.contains(&look);
                canonical.extend(Some(look).filter(|_| is_new));
                is_new
            });
            let others = parallel::map(&neighbours, |neighbour| self.bench.step_within(neighbour, within));
            let mut better: Option<(usize, Tried)> = None;
            for (number, (other, look)) in others.into_iter().zip(canonical).enumerate() {
                let other = other?.filter(|other| self.bench.short(other).is_empty());
                let seconds = other.as_ref().map_or(least, |other| other.seconds);
                known.insert(look, seconds);
                let Some(other) = other else { continue };
                if better.as_ref().is_none_or(|(_, best)| other.seconds < best.seconds) {
                    better = Some((number, other));
                }
            }
            match better {
                Some((number, other)) => {
                    (confirmed.pipeline, confirmed.tried) = (neighbours.swap_remove(number), other);
                }
                None => break,
            }
        }
        Ok(())
    }

    /// What stands for a plan and for those that take as long because they differ only in which of a node's equal devices
    /// has what, or which of the replicas on such devices.
    fn canonical(&self, pipeline: &Pipeline) -> Pipeline {
        let mut replicas: Vec<Replica> =
            pipeline.replicas.iter().map(|one| self.canonical_replica(one)).collect();
        replicas.sort_by_cached_key(|replica| {
            let stages = replica.stages.iter();
            let stages = stages
                .map(|stage| (stage.device, stage.layers.start, stage.activations as usize, stage.stash));
            (replica.samples.end, replica.micro_batch, stages.collect::<Vec<_>>())
        });
        Pipeline { replicas, ..*pipeline }
    }

    /// The same of one replica: its devices are the first of those that are like them.
    fn canonical_replica(&self, replica: &Replica) -> Replica {
        let fleet = self.bench.fleet;
        let mut seen: Vec<(usize, usize)> = Vec::new();
        let stages = replica.stages.iter().map(|stage| {
            let alike = |other: usize| {
                self.classes.of[other] == self.classes.of[stage.device]
                    && fleet.same_node(other, stage.device)
            };
            let known = seen.iter().find(|(device, _)| *device == stage.device).map(|(_, first)| *first);
            let device = known.unwrap_or_else(|| {
                let before = seen.iter().filter(|(device, _)| alike(*device)).count();
                let first = (0..fleet.devices.len()).filter(|other| alike(*other)).nth(before);
                seen.push((stage.device, first.unwrap_or(stage.device)));
                first.unwrap_or(stage.device)
            });
            Stage { device, ..stage.clone() }
        });
        let stages = stages.collect();
        Replica { samples: 0..replica.samples.len(), stages, ..*replica }
    }

    /// Plans that differ in one cut, one size, some samples, or one stage's activations.
    fn neighbours(&self, pipeline: &Pipeline) -> Vec<Pipeline> {
        let mut found = Vec::new();
        for (number, replica) in pipeline.replicas.iter().enumerate() {
            let mut with = |change: &dyn Fn(&mut Replica)| {
                let mut other = pipeline.clone();
                change(&mut other.replicas[number]);
                if other != *pipeline {
                    found.push(other);
                }
            };
            for (place, stages) in replica.stages.windows(2).enumerate() {
                if stages[1].layers.len() > 1 {
                    with(&|replica| {
                        replica.stages[place].layers.end += 1;
                        replica.stages[place + 1].layers.start += 1;
                    });
                }
                if stages[0].layers.len() > 1 {
                    with(&|replica| {
                        replica.stages[place].layers.end -= 1;
                        replica.stages[place + 1].layers.start -= 1;
                    });
                }
            }
            if self.wanted.micro_batch.is_none() {
                let most = replica.samples.len().next_multiple_of(self.grain);
                let size = replica.micro_batch;
                for size in [size + self.grain, size.saturating_sub(self.grain), 2 * size, most] {
                    if (self.grain..=most).contains(&size) {
                        with(&|replica| replica.micro_batch = size);
                    }
                }
            }
            if self.wanted.activations.is_none() {
                for place in 0..replica.stages.len() {
                    with(&|replica| {
                        let activations = &mut replica.stages[place].activations;
                        *activations = match activations {
                            Activations::Keep => Activations::Recompute,
                            Activations::Recompute | Activations::Offload => Activations::Keep,
                        };
                    });
                }
            }
        }
        found.extend(self.moved_samples(pipeline));
        found
    }

    /// Some samples from one replica to another: what is between them moves up or down.
    fn moved_samples(&self, pipeline: &Pipeline) -> Vec<Pipeline> {
        let mut found = Vec::new();
        let replicas = &pipeline.replicas;
        for (from, giver) in replicas.iter().enumerate() {
            for to in (0..replicas.len()).filter(|to| *to != from) {
                let mut amounts = vec![self.grain, giver.micro_batch, replicas[to].micro_batch];
                amounts.sort_unstable();
                amounts.dedup();
                for amount in amounts.into_iter().filter(|amount| *amount < giver.samples.len()) {
                    let mut counts: Vec<usize> =
                        replicas.iter().map(|replica| replica.samples.len()).collect();
                    counts[from] -= amount;
                    counts[to] += amount;
                    let mut other = pipeline.clone();
                    let mut next = 0;
                    for (replica, count) in other.replicas.iter_mut().zip(counts) {
                        replica.samples = next..next + count;
                        next += count;
                    }
                    // Groups of samples that are normed together stay together.
                    if other.replicas.iter().all(|replica| replica.samples.start % self.grain == 0) {
                        found.push(other);
                    }
                }
            }
        }
        found
    }
}
