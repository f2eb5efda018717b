//! Step times that others published for whole runs, beside what the catalogue's estimates and our simulator make of what
//! they state about them: no GPU of theirs was measured by us, and nothing is fitted. What is not stated follows a rule
//! that stands where it is applied; what has no such rule is skipped and counted.
//!
//! - [`read`]: the table.
//! - [`stated`]: what a line states.
//! - [`cluster`]: the machines, and tensor-parallel groups as devices.

mod cluster;
mod read;
mod stated;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use shoal_fleet::Fleet;
use shoal_plan::one_device::StepShape;
use shoal_plan::{DeviceRow, Layout, Op, Order, Pace, Plan, Purpose, Residence, compile_paced};
use shoal_sim::{FleetWorld, Settings, World, simulate};

use self::read::Table;
use self::stated::{Line, State, Stated};
use super::comparison::{Compared, Group, Row};
use super::error::Error;
use super::in_stream::{InStream, Place};
use crate::pipeline::{self, Pipeline, Replica, Stage};

/// Adam's.
const OPTIMIZER_STATES: usize = 2;

/// How many of those that were skipped for one reason are named.
const NAMED: usize = 3;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    pub rows: Vec<PublishedRow>,
    /// By source; runs on mixed GPUs apart.
    pub groups: Vec<Group>,
    /// The publishers' own predictions of the same rows, where they gave any.
    pub their_groups: Vec<Group>,
    pub skipped: Vec<Skipped>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PublishedRow {
    pub source: String,
    #[serde(flatten)]
    pub row: Row,
    /// What its publishers' own model predicts.
    pub theirs: Option<Compared>,
}

/// Lines of a source that state too little, or what we have no table for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Skipped {
    pub source: String,
    pub reason: String,
    pub rows: usize,
    /// Some of them.
    pub names: Vec<String>,
}

/// Sets every run of the table beside its prediction.
pub fn report(path: &Path) -> Result<Report, Error> {
    of(&Table::read(path)?)
}

fn of(table: &Table) -> Result<Report, Error> {
    let mut rows = Vec::new();
    let mut skipped: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for run in table.runs() {
        match stated::line(&run)? {
            Line::Skipped { source, name, reason } => skipped.entry((source, reason)).or_default().push(name),
            Line::Stated(stated) => rows.push(row(&stated)?),
        }
    }
    let groups = |of: fn(&PublishedRow) -> Option<Compared>| {
        let mut by_source: BTreeMap<&str, Vec<Row>> = BTreeMap::new();
        for row in &rows {
            if let Some(compared) = of(row) {
                by_source.entry(&row.source).or_default().push(Row { name: row.row.name.clone(), compared });
            }
        }
        by_source.into_iter().filter_map(|(source, rows)| Group::of(source, &rows)).collect()
    };
    let skipped = skipped.into_iter().map(|((source, reason), mut names)| {
        let rows = names.len();
        names.dedup();
        names.truncate(NAMED);
        Skipped { source, reason, rows, names }
    });
    Ok(Report {
        groups: groups(|row| Some(row.row.compared)),
        their_groups: groups(|row| row.theirs),
        skipped: skipped.collect(),
        rows,
    })
}

fn row(stated: &Stated) -> Result<PublishedRow, Error> {
    let mixed = stated.gpus.iter().any(|gpu| gpu.name != stated.gpus[0].name);
    let compared = Compared::new(predict(stated)?, stated.seconds);
    Ok(PublishedRow {
        source: if mixed { format!("{}, mixed GPUs", stated.source) } else { stated.source.clone() },
        row: Row { name: stated.name.clone(), compared },
        theirs: stated.theirs.map(|theirs| Compared::new(theirs, stated.seconds)),
    })
}

/// Seconds of a step.
fn predict(stated: &Stated) -> Result<f64, Error> {
    let name = || stated.name.clone();
    let (fleet, costs) = cluster::build(stated).map_err(|cause| Error::Costs { name: name(), cause })?;
    let plan = table(stated);
    let layout = Layout::new(&plan, &stated.chain);
    let world = FleetWorld::new(&fleet, &costs, &layout);
    let play = |world: &dyn World, pace: &dyn Pace| {
        let programs = compile_paced(&plan, &stated.chain, Purpose::Train, pace)
            .map_err(|cause| Error::Compile { name: name(), cause })?;
        simulate(&programs, &layout, world, Settings::default())
            .map_err(|cause| Error::Simulate { name: name(), cause })
    };
    if stated.overlaps {
        return Ok(play(&world, &world)?.seconds);
    }
    let places = (0..fleet.devices.len()).map(|device| place(stated, &fleet, device)).collect();
    let reduce_seconds = reduce_seconds(stated, &world);
    let boundary_bytes = stated.chain.layers[0].kind.output_bytes(1, stated.sequence, stated.precision);
    let world = InStream::new(world, places, boundary_bytes, reduce_seconds);
    Ok(play(&world, &world)?.seconds)
}

/// Where a device stands in its pipeline.
fn place(stated: &Stated, fleet: &Fleet, device: usize) -> Place {
    let stage = device / stated.replicas;
    let neighbour = |there: Option<usize>| {
        let there = there.filter(|there| *there < fleet.devices.len())?;
        Some(fleet.link(device, there))
    };
    Place {
        first_layer: stated.cuts[stage],
        last_layer: stated.cuts[stage + 1] - 1,
        before: neighbour(device.checked_sub(stated.replicas)),
        behind: neighbour(Some(device + stated.replicas)),
        host: None,
        within: (stated.tensor > 1).then(|| cluster::link_within(stated, device)),
        degree: stated.tensor,
    }
}

/// Of the stage whose gradients take longest, one layer's after the other's.
fn reduce_seconds(stated: &Stated, world: &FleetWorld) -> f64 {
    let of_layer = |layer: usize| {
        let work = world.alone(&Op::Reduce { layer }, 0);
        let passed = work.resources.iter().map(|resource| world.resources()[*resource as usize]);
        let rates = passed.map(|resource| resource.bytes_per_second);
        let narrowest = rates.fold(f64::INFINITY, f64::min);
        work.seconds + work.bytes / narrowest
    };
    let of_stage = |stage: usize| (stated.cuts[stage]..stated.cuts[stage + 1]).map(of_layer).sum();
    (0..stated.stages).map(of_stage).fold(0.0, f64::max)
}

fn table(stated: &Stated) -> Plan {
    let (stages, replicas) = (stated.stages, stated.replicas);
    let samples = stated.global_batch / replicas;
    // Ranks go through a stage's replicas before they go to the next stage.
    let replica = |replica: usize| Replica {
        samples: replica * samples..(replica + 1) * samples,
        micro_batch: stated.micro_batch,
        stages: (0..stages)
            .map(|stage| Stage {
                device: stage * replicas + replica,
                layers: stated.cuts[stage]..stated.cuts[stage + 1],
                activations: stated.activations,
                stash: None,
            })
            .collect(),
    };
    let fetched = stated.state == State::Fetched;
    let pipeline = Pipeline {
        replicas: (0..replicas).map(replica).collect(),
        // What is fetched layer by layer is computed layer by layer. Where batches are cut, those who measured fetch for
        // each micro-batch again: they hide it behind computation, as we do.
        order: if fetched { Order::LayerFirst } else { Order::OneForwardOneBackward },
        state: match stated.state {
            State::Everywhere => pipeline::State::Whole,
            State::Divided | State::Fetched => pipeline::State::Divided,
        },
    };
    let devices = (0..stages * replicas).map(|number| DeviceRow {
        name: format!("group {number}"),
        budget_bytes: u64::MAX,
        workspace_bytes: 0,
        stash: None,
        leeway: 0,
        puts_off: 0,
    });
    let step = StepShape {
        global_batch: stated.global_batch,
        sequence: stated.sequence,
        precision: stated.precision,
        optimizer_states: OPTIMIZER_STATES,
        gradients: Default::default(),
    };
    let mut plan = pipeline::table(&stated.chain, step, devices.collect(), &pipeline);
    if fetched {
        for row in &mut plan.tensors {
            let divided = row.optimizer.iter().any(|held| held.slice.count() < row.elements);
            let copies = row.compute_copies.iter_mut().filter(|_| divided);
            copies.for_each(|copy| copy.residence = Residence::Fetched);
        }
    }
    plan
}
