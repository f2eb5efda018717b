//! Pipelines tried out: compiled, forecast and played through. One replica by itself says how long its micro-batches
//! take, whatever their number; the whole step is tried for those that are left in the end.

use std::collections::HashMap;

use shoal_fleet::{Costs, Fleet};
use shoal_model::Chain;
use shoal_plan::memory::{forecast_in, forecasts};
use shoal_plan::one_device::StepShape;
use shoal_plan::{DeviceRow, Layout, MemoryForecast, Op, Order, Plan, Program, Purpose, compile_in};
use shoal_sim::{FleetWorld, Settings, Simulated, simulate};

use super::outcome::PipelineError;
use super::shares::Pace;
use super::{Pipeline, Replica, State, table};
use crate::bound::Within;
use crate::mirrors::mirrored;

/// Micro-batches a device of depth, and a few more, after which every further one takes the same.
const SETTLED: usize = 3;

/// Where pipelines are tried.
#[derive(Clone, Copy)]
pub(super) struct Bench<'a> {
    pub chain: &'a Chain,
    pub step: StepShape,
    pub fleet: &'a Fleet,
    pub costs: &'a Costs,
    /// Without caps on what is stashed.
    pub devices: &'a [DeviceRow],
}

/// A whole step.
pub(super) struct Tried {
    pub plan: Plan,
    pub seconds: f64,
    /// Until the last backward, as the order foresaw it.
    pub foreseen_seconds: f64,
    /// Until the last backward.
    pub pipeline_seconds: f64,
    pub simulated: Simulated,
    pub memory: Vec<MemoryForecast>,
}

/// One replica by itself.
#[derive(Clone, Debug)]
pub(super) struct TriedReplica {
    pub pace: Pace,
    /// The most bytes by stage, without the slices of state that it would have among others.
    pub bytes: Vec<u64>,
}

impl Bench<'_> {
    pub fn plan(&self, pipeline: &Pipeline) -> Plan {
        table(self.chain, self.step, self.devices.to_vec(), pipeline)
    }

    /// The whole step.
    pub fn step(&self, pipeline: &Pipeline) -> Result<Tried, PipelineError> {
        self.whole(self.plan(pipeline))
    }

    /// The same with the mirrors that survive so many losses, if there is room for them.
    pub fn step_mirrored(&self, pipeline: &Pipeline, survive: usize) -> Result<Tried, PipelineError> {
        let plan = self.plan(pipeline);
        let mirrored = (survive > 0).then(|| mirrored(&plan, self.fleet, survive).ok()).flatten();
        self.whole(mirrored.unwrap_or(plan))
    }

    fn whole(&self, plan: Plan) -> Result<Tried, PipelineError> {
        Ok(self.play_within(plan, Within::any())?.expect("no step takes forever"))
    }

    /// The same, if it is of interest: memory is looked at only then.
    pub fn step_within(&self, pipeline: &Pipeline, within: Within) -> Result<Option<Tried>, PipelineError> {
        self.play_within(self.plan(pipeline), within)
    }

    fn play_within(&self, plan: Plan, within: Within) -> Result<Option<Tried>, PipelineError> {
        let layout = Layout::new(&plan, self.chain);
        let world = FleetWorld::new(self.fleet, self.costs, &layout);
        let Some(ordered) = within.order(&layout, &world)? else { return Ok(None) };
        let foreseen_seconds = ordered.foreseen_seconds;
        let programs = ordered.link();
        let simulated = simulate(&programs, &layout, &world, Settings::default())?;
        if simulated.seconds >= within.seconds {
            return Ok(None);
        }
        let memory = forecasts(&programs, &layout);
        let pipeline_seconds = last_backward(&programs, &simulated);
        let seconds = simulated.seconds;
        drop(layout);
        Ok(Some(Tried { seconds, foreseen_seconds, pipeline_seconds, simulated, memory, plan }))
    }

    /// Whether a step fits, without playing it through.
    pub fn fits(&self, pipeline: &Pipeline) -> Result<bool, PipelineError> {
        let plan = self.plan(pipeline);
        let layout = Layout::new(&plan, self.chain);
        let world = FleetWorld::new(self.fleet, self.costs, &layout);
        let programs = compile_in(&layout, Purpose::Train, &world)?;
        let fits = |program: &Program| {
            forecast_in(program, &layout).total() <= self.devices[program.device].budget_bytes
        };
        Ok(programs.iter().all(fits))
    }

    /// Bytes by which devices, or their hosts, have less than a step takes.
    pub fn short(&self, tried: &Tried) -> HashMap<usize, u64> {
        let mut short = HashMap::new();
        for (device, memory) in tried.memory.iter().enumerate() {
            let bytes = memory.total().saturating_sub(self.devices[device].budget_bytes);
            if bytes > 0 {
                short.insert(device, bytes);
            }
        }
        for node in &self.fleet.nodes {
            let host: u64 = tried.memory[node.devices.clone()].iter().map(|memory| memory.host).sum();
            let bytes = host.saturating_sub(node.host_memory_bytes);
            if bytes > 0 {
                // Fewer layers, or none offloaded, leave the host more.
                short.extend(node.devices.clone().map(|device| (device, bytes)));
            }
        }
        short
    }

    /// So many micro-batches through one replica: seconds until the last backward, bytes by stage.
    fn play(
        &self,
        replica: &Replica,
        count: usize,
        order: Order,
        state: State,
    ) -> Result<(f64, Vec<u64>), PipelineError> {
        let samples = 0..count * replica.micro_batch;
        let step = StepShape { global_batch: samples.end, ..self.step };
        let alone = Replica { samples, ..replica.clone() };
        let pipeline = Pipeline { replicas: vec![alone], order, state };
        let plan = table(self.chain, step, self.devices.to_vec(), &pipeline);
        let layout = Layout::new(&plan, self.chain);
        let world = FleetWorld::new(self.fleet, self.costs, &layout);
        let programs = compile_in(&layout, Purpose::Train, &world)?;
        let simulated = simulate(&programs, &layout, &world, Settings::default())?;
        let bytes = replica
            .stages
            .iter()
            .map(|stage| forecast_in(&programs[stage.device], &layout).total())
            .collect();
        Ok((last_backward(&programs, &simulated), bytes))
    }

    /// How a replica fares that is to take so many micro-batches.
    pub fn replica(
        &self,
        replica: &Replica,
        count: usize,
        order: Order,
        state: State,
        replicas: usize,
    ) -> Result<TriedReplica, PipelineError> {
        // Among others, it adds up gradients that go elsewhere and has only a copy to compute with.
        let state = if replicas > 1 && state == State::Divided { State::Host } else { state };
        let more = count.min(SETTLED * replica.stages.len() + 2);
        let few = more.div_ceil(2);
        let (seconds, bytes) = self.play(replica, more, order, state)?;
        if more == few {
            let pace = Pace { fill: seconds, period: seconds, micro_batch: replica.micro_batch };
            return Ok(TriedReplica { pace, bytes });
        }
        let (before, _) = self.play(replica, few, order, state)?;
        // Where latencies count for most, more may even take less: what waits for what comes out otherwise.
        let period = ((seconds - before) / (more - few) as f64).max(0.0);
        let fill = seconds - (more - 1) as f64 * period;
        let pace = Pace { fill: fill.max(period), period, micro_batch: replica.micro_batch };
        Ok(TriedReplica { pace, bytes })
    }
}

/// When the last backward ends.
pub(super) fn last_backward(programs: &[Program], simulated: &Simulated) -> f64 {
    let spans = programs.iter().zip(&simulated.spans).flat_map(|(program, spans)| {
        let backward = |op: &Op| matches!(op, Op::Backward { .. });
        program.instructions.iter().zip(spans).filter(move |(i, _)| backward(&i.op)).map(|(_, span)| span.end)
    });
    spans.fold(0.0, f64::max)
}
