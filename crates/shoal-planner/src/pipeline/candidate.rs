//! Pipelines as the search has them in hand: rows of devices of which many are alike, cut and given samples.

use std::collections::HashMap;

use shoal_plan::Order;

use super::cuts::{Cut, Place};
use super::shares::Pace;
use super::trial::Tried;
use super::{Pipeline, Stage, State};

/// A replica of a candidate.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub devices: Vec<usize>,
    pub places: Vec<Place>,
    pub cut: Cut,
    pub pace: Pace,
    pub samples: usize,
    /// Bytes that turned out to be missing, by stage.
    pub reserves: Vec<u64>,
}

#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub rows: Vec<Row>,
    pub order: Order,
    pub state: State,
    pub seconds: f64,
}

impl Candidate {
    /// What makes it another kind of plan than the next.
    pub fn kind(&self) -> Kind {
        let devices = self.rows.iter().map(|row| row.devices.len()).sum();
        let size = self.rows.first().map_or(0, |row| row.pace.micro_batch);
        (self.rows.len(), devices, size, self.state, self.order == Order::Varuna)
    }

    /// For each row the first that is like it.
    pub fn distinct(&self) -> Vec<usize> {
        let mut seen: HashMap<(&[Place], usize), usize> = HashMap::new();
        self.rows
            .iter()
            .enumerate()
            .map(|(number, row)| *seen.entry((&row.places, row.pace.micro_batch)).or_insert(number))
            .collect()
    }
}

/// Replicas, devices, samples of a micro-batch, where state is, and which order.
pub(super) type Kind = (usize, usize, usize, State, bool);

/// A candidate whose whole step was tried, and fits.
pub(super) struct Confirmed {
    pub estimated_seconds: f64,
    pub kind: Kind,
    pub pipeline: Pipeline,
    pub tried: Tried,
}

/// A row to be tried by itself.
pub(super) struct Trial {
    pub row: Row,
    pub order: Order,
    pub state: State,
    /// Among how many, at least, state is divided.
    pub replicas: usize,
}

/// All that its outcome depends on.
pub(super) type Key = (Vec<Place>, usize, usize, State, bool, usize);

impl Trial {
    pub fn key(&self) -> Key {
        let Trial { row, order, state, replicas } = self;
        let count = row.samples.div_ceil(row.pace.micro_batch);
        (row.places.clone(), row.pace.micro_batch, *replicas, *state, *order == Order::Varuna, count)
    }
}

/// A row's cut, as it came out of its trial.
#[derive(Clone, Debug)]
pub(super) struct Tuned {
    pub cut: Cut,
    pub pace: Pace,
    pub reserves: Vec<u64>,
}

/// What is known of a row of devices at every size of micro-batch.
pub(super) struct Options {
    /// Devices in the best order for each.
    pub by_size: Vec<(Vec<usize>, Vec<Place>, Cut, usize)>,
}

impl Options {
    pub fn paces(&self, grain: usize) -> Vec<Pace> {
        let pace = |(_, _, cut, size): &(Vec<usize>, Vec<Place>, Cut, usize)| {
            Pace { fill: cut.fill, period: cut.period, micro_batch: *size }.in_units(grain)
        };
        self.by_size.iter().map(pace).collect()
    }
}

/// The stages of a cut on these devices. A stage runs no further ahead of the next than the order has it: what it hands
/// over beyond that would wait there.
pub(super) fn stages(devices: &[usize], cut: &Cut, order: Order) -> Vec<Stage> {
    let mut stages: Vec<Stage> = devices
        .iter()
        .zip(&cut.stages)
        .map(|(device, stage)| Stage {
            device: *device,
            layers: stage.layers.clone(),
            activations: stage.choice.activations,
            stash: stage.choice.stash,
        })
        .collect();
    let mut most = usize::MAX;
    for (behind, stage) in stages.iter_mut().rev().enumerate() {
        let asked = order.stash(behind + 1);
        let holds = stage.stash.unwrap_or(asked).min(most);
        stage.stash = (holds < asked).then_some(holds);
        most = holds + (order.stash(behind + 2) - asked);
    }
    stages
}

/// Fewer numbers of replicas than there are, so that what is known of one serves its neighbours: none higher, so that
/// no device is thought to hold less than it does.
pub(super) fn bucket(replicas: usize) -> usize {
    let power = 1 << replicas.ilog2();
    if replicas >= power + power / 2 && power > 1 { power + power / 2 } else { power }
}
