//! A plan that was run, checked, and the table that it is in our terms.

use shoal_model::{Chain, Precision};
use shoal_plan::one_device::StepShape;
use shoal_plan::{Activations, DeviceRow, Order, Plan};

use super::read::{File, Machine, Measured};
use crate::pipeline::{self, Pipeline, Replica, Stage, State};
use crate::validation::error::Error;

/// The engine keeps and sends fp32; what its libraries make of that in products is in the profile.
const PRECISION: Precision = Precision::Fp32;

/// Adam's.
const OPTIMIZER_STATES: usize = 2;

/// A tensor-parallel group: one machine's GPUs.
#[derive(Clone, Debug)]
pub struct GroupOf {
    pub gpu: String,
    pub zone: String,
    pub degree: usize,
}

impl GroupOf {
    /// As a kind of device of its own.
    pub fn kind(&self) -> String {
        format!("{} of {}", self.degree, self.gpu)
    }
}

/// A measured plan, checked.
pub struct Run {
    pub stages: Vec<Vec<usize>>,
    pub replicas: usize,
    /// Stage by stage, its replicas one after the other.
    pub groups: Vec<GroupOf>,
    pub micro_batch: usize,
    pub global_batch: usize,
}

impl Run {
    pub fn new(file: &File<Measured>, chain: &Chain) -> Result<Run, Error> {
        let Measured { pipeline_list, mbs, gbs, real, max_mem } = &file.is;
        if !(real.is_finite() && *real > 0.0) {
            return Err(file.wrong("real", format!("is {real} seconds")));
        }
        if *max_mem == 0 {
            return Err(file.wrong("max_mem", "is 0"));
        }
        let [pipeline] = pipeline_list.as_slice() else {
            return Err(
                file.wrong("pipeline_list", format!("has {} pipelines, not one", pipeline_list.len()))
            );
        };
        let stages = pipeline.layers_per_stage.clone();
        let all: Vec<usize> = stages.iter().flatten().copied().collect();
        if stages.iter().any(Vec::is_empty) || all != (0..chain.layers.len()).collect::<Vec<_>>() {
            let what = format!("does not have the {} layers in order", chain.layers.len());
            return Err(file.wrong("layers_per_stage", what));
        }
        let replicas = pipeline.dp.first().copied().unwrap_or(0);
        let even = pipeline.dp.iter().all(|other| *other == replicas);
        if replicas == 0 || !even || pipeline.dp.len() != stages.len() {
            return Err(file.wrong("dp", format!("is {:?}, not one number for all stages", pipeline.dp)));
        }
        if *mbs == 0 || *gbs == 0 || gbs % replicas.saturating_mul(*mbs) != 0 {
            return Err(
                file.wrong("gbs", format!("is {gbs}: no number of micro-batches of {mbs} in {replicas}"))
            );
        }
        let stated: Vec<_> = pipeline.tmp_per_stage.iter().flatten().collect();
        if pipeline.tmp_per_stage.iter().any(|stage| stage.len() != replicas)
            || stated.len() != replicas * stages.len()
        {
            return Err(file.wrong("tmp_per_stage", "does not have a group for each stage and replica"));
        }
        let group = |(machines, degree): &(Vec<Machine>, usize)| match machines.as_slice() {
            [(gpu, gpus, zone)] if gpus == degree && *degree > 0 => {
                Ok(GroupOf { gpu: gpu.clone(), zone: zone.clone(), degree: *degree })
            }
            _ => Err(file.wrong("tmp_per_stage", "has a group that is not all of one machine's GPUs")),
        };
        let groups = stated.into_iter().map(group).collect::<Result<_, _>>()?;
        Ok(Run { stages, replicas, groups, micro_batch: *mbs, global_batch: *gbs })
    }

    pub fn table(&self, chain: &Chain, sequence: usize) -> Plan {
        let samples = self.global_batch / self.replicas;
        let replica = |replica: usize| Replica {
            samples: replica * samples..(replica + 1) * samples,
            micro_batch: self.micro_batch,
            stages: (0..self.stages.len())
                .map(|stage| Stage {
                    device: stage * self.replicas + replica,
                    layers: self.stages[stage][0]..self.stages[stage][0] + self.stages[stage].len(),
                    activations: Activations::Keep,
                    stash: None,
                })
                .collect(),
        };
        let pipeline = Pipeline {
            replicas: (0..self.replicas).map(replica).collect(),
            order: Order::OneForwardOneBackward,
            state: State::Whole,
        };
        let devices = (0..self.groups.len()).map(|number| DeviceRow {
            name: format!("group {number}"),
            budget_bytes: u64::MAX,
            workspace_bytes: 0,
            stash: None,
            leeway: 0,
            puts_off: 0,
        });
        let step = StepShape {
            global_batch: self.global_batch,
            sequence,
            precision: PRECISION,
            optimizer_states: OPTIMIZER_STATES,
            gradients: Default::default(),
        };
        pipeline::table(chain, step, devices.collect(), &pipeline)
    }
}
