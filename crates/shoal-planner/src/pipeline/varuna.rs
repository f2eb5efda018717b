//! Varuna's models on the machines that it was made for, one V100 and 10 Gbit/s each: our pipeline beside tensor
//! parallelism and sharded data parallelism (their traffic by arithmetic, all in their favour) and beside GPipe's
//! schedule (simulated). All times are estimated: nothing was measured on such machines.

use serde::Serialize;
use shoal_fleet::{Costs, Fleet};
use shoal_model::footprint::allocation_bytes;
use shoal_model::{Chain, Precision, presets};
use shoal_plan::one_device::StepShape;
use shoal_plan::{Activations, DeviceRow, Order};

use super::trial::{Bench, Tried};
use super::{Pipeline, PipelineError, PipelinePlanned, PipelineWanted, State, plan};
use crate::device_rows;

/// Devices that a tensor-parallel group has.
const TENSOR_GROUP: usize = 8;

/// Sums over a group's devices that each layer needs for a micro-batch: two forward and two backward.
const TENSOR_SUMS: f64 = 4.0;

/// Dollars an hour of a machine with one V100, as the large clouds ask for it; a spot machine costs about a fifth.
const DOLLARS_PER_HOUR: f64 = 3.06;
const SPOT_SHARE: f64 = 0.2;

/// What the paper claims: times quicker than tensor parallelism, and than other pipelines.
const CLAIMED_TENSOR: f64 = 18.0;
const CLAIMED_PIPELINE: f64 = 1.26;

/// A model of the paper's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Gpt2 {
    pub name: &'static str,
    pub layers: usize,
    pub width: usize,
    pub heads: usize,
}

pub const GPT2_2_5B: Gpt2 = Gpt2 { name: "GPT-2 2.5 B", layers: 54, width: 1920, heads: 20 };
pub const GPT2_8_3B: Gpt2 = Gpt2 { name: "GPT-2 8.3 B", layers: 72, width: 3072, heads: 32 };
pub const GPT2_200B: Gpt2 = Gpt2 { name: "GPT-2 200 B", layers: 100, width: 12960, heads: 108 };

const VOCABULARY: usize = 50257;
const SEQUENCE: usize = 1024;

impl Gpt2 {
    pub fn chain(&self) -> Chain {
        Chain::new(&presets::gpt2(VOCABULARY, self.width, self.layers, self.heads, SEQUENCE))
    }
}

/// So many machines with a V100 of 16 GB and 10 Gbit/s each.
pub fn machines(count: usize) -> Fleet {
    let text = format!(
        "[[node]]\nname = \"v100\"\ncount = {count}\nhost_memory = \"112 GiB\"\nnetwork = \"10 Gbit/s\"\n\
         price = {DOLLARS_PER_HOUR}\ndevices = [{{ kind = \"V100-16\" }}]\n"
    );
    Fleet::parse(&text, "v100.toml").expect("the text is ours")
}

fn shape(global_batch: usize) -> StepShape {
    StepShape { global_batch, sequence: SEQUENCE, precision: Precision::Fp16, ..StepShape::ADAM }
}

/// A model on a number of machines, four ways.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    pub model: Gpt2,
    pub parameters: u64,
    pub devices: usize,
    pub global_batch: usize,
    /// From the catalogue's figures, not from a measurement.
    pub estimated: bool,
    pub ours: Shape,
    pub tensor_parallel: Other,
    pub sharded: Other,
    pub gpipe: Other,
    pub claimed_over_tensor_parallel: f64,
    pub claimed_over_pipelines: f64,
}

/// Our pipeline in short.
#[derive(Clone, Debug, Serialize)]
pub struct Shape {
    pub seconds: f64,
    pub samples_per_second: f64,
    /// Without what is computed again.
    pub teraflops_per_device: f64,
    pub replicas: usize,
    /// Stages of the shallowest and of the deepest replica.
    pub depths: (usize, usize),
    pub micro_batch: usize,
    pub order: Order,
    pub state: State,
    pub devices_used: usize,
    pub dollars_per_step: f64,
    pub spot_dollars_per_step: f64,
}

/// Another way to do the same.
#[derive(Clone, Debug, Serialize)]
pub struct Other {
    pub seconds: f64,
    /// Of it, or beside it, what the devices compute and what is on the network.
    pub computing_seconds: f64,
    pub network_seconds: f64,
    /// Whether its state and activations fit the devices at all.
    pub fits: bool,
    /// How many times quicker ours is.
    pub ratio: f64,
}

impl Other {
    fn new(seconds: f64, computing_seconds: f64, network_seconds: f64, fits: bool, ours: f64) -> Other {
        Other { seconds, computing_seconds, network_seconds, fits, ratio: seconds / ours }
    }
}

/// The largest model, on machines whose hosts keep its optimizer.
#[derive(Clone, Debug, Serialize)]
pub struct Huge {
    pub model: Gpt2,
    pub parameters: u64,
    pub devices: usize,
    pub global_batch: usize,
    pub estimated: bool,
    pub ours: Shape,
    /// Of the fullest device, and its budget.
    pub device_bytes: u64,
    pub budget_bytes: u64,
    /// Of the fullest host.
    pub host_bytes: u64,
}

struct Case {
    model: Gpt2,
    chain: Chain,
    fleet: Fleet,
    costs: Costs,
    step: StepShape,
    rows: Vec<DeviceRow>,
}

impl Case {
    fn new(model: Gpt2, devices: usize, global_batch: usize) -> Case {
        let (chain, fleet, step) = (model.chain(), machines(devices), shape(global_batch));
        let costs = Costs::new(&chain, &fleet, None, step.precision, step.sequence)
            .expect("the catalogue knows the device");
        let rows = device_rows(&fleet);
        Case { model, chain, fleet, costs, step, rows }
    }

    fn parameters(&self) -> u64 {
        self.chain.tensors.iter().map(|tensor| tensor.elements() as u64).sum()
    }

    fn layers(&self) -> usize {
        self.chain.layers.len()
    }

    fn estimated(&self) -> bool {
        self.fleet.kinds().iter().all(|kind| self.costs.estimated(kind))
    }

    /// Seconds of all layers for so many samples at once, forward and backward.
    fn passes(&self, samples: usize, forwards: f64) -> f64 {
        let layer = |layer: usize| {
            forwards * self.costs.forward(layer, 0, samples) + self.costs.backward(layer, 0, samples)
        };
        (0..self.layers()).map(layer).sum()
    }

    fn bytes_per_second(&self) -> f64 {
        self.fleet.nodes[0].network.bytes_per_second
    }

    fn shape(&self, planned: &PipelinePlanned) -> Shape {
        let replicas = &planned.pipeline.replicas;
        let depths = || replicas.iter().map(|replica| replica.stages.len());
        let flops: u64 = self.chain.layers.iter().map(|layer| 3 * layer.kind.forward_flops(SEQUENCE)).sum();
        let (batch, seconds) = (self.step.global_batch as f64, planned.seconds);
        let devices = self.fleet.devices.len() as f64;
        let dollars = self.fleet.dollars_per_hour() / 3600.0 * seconds;
        Shape {
            seconds,
            samples_per_second: batch / seconds,
            teraflops_per_device: flops as f64 * batch / seconds / devices / 1e12,
            replicas: replicas.len(),
            depths: (depths().min().unwrap_or(0), depths().max().unwrap_or(0)),
            micro_batch: replicas.iter().map(|replica| replica.micro_batch).max().unwrap_or(0),
            order: planned.pipeline.order,
            state: planned.pipeline.state,
            devices_used: depths().sum(),
            dollars_per_step: dollars,
            spot_dollars_per_step: SPOT_SHARE * dollars,
        }
    }

    /// Groups of eight that divide every layer: their arithmetic is divided perfectly, but they wait for each other's
    /// sums. What is left over idles.
    fn tensor_parallel(&self, ours: f64) -> Other {
        let groups = (self.fleet.devices.len() / TENSOR_GROUP).max(1);
        let samples = self.step.global_batch.div_ceil(groups);
        let (size, group) = (self.step.precision.bytes() as f64, TENSOR_GROUP as f64);
        let computing = self.passes(1, 1.0) / group * samples as f64;
        let activation = size * (SEQUENCE * self.model.width) as f64;
        let around = 2.0 * (group - 1.0) / group / self.bytes_per_second();
        let sums = TENSOR_SUMS * self.model.layers as f64 * samples as f64 * activation * around;
        // Groups add up their gradients and divide the optimizer, as our replicas do.
        let own = self.parameters() as f64 / group;
        let groups = groups as f64;
        let reduction = (4.0 + size) * own * (groups - 1.0) / groups / self.bytes_per_second();
        let network = sums + reduction;
        // A copy, a sum, and a share of the rest: without any activations.
        let state = own * (size + 4.0 + 16.0 / groups);
        let fits = state < self.budget() as f64;
        Other::new(computing + network, computing, network, fits, ours)
    }

    /// Every parameter on every device for each micro-batch, twice, and every gradient back once. As few micro-batches
    /// as memory lets it have, and all that can overlap does.
    fn sharded(&self, ours: f64) -> Other {
        let devices = self.fleet.devices.len();
        let samples = self.step.global_batch.div_ceil(devices);
        let size = self.step.precision.bytes() as f64;
        let holds = (1..=samples).rev().find(|count| self.sharded_bytes(*count) <= self.budget());
        let micro_batch = holds.unwrap_or(1);
        let rounds = samples.div_ceil(micro_batch) as f64;
        let share = (devices - 1) as f64 / devices as f64;
        let moved = (2.0 * size + 4.0) * self.parameters() as f64 * share;
        let network = rounds * moved / self.bytes_per_second();
        let computing = rounds * self.passes(micro_batch, 2.0);
        Other::new(computing.max(network), computing, network, holds.is_some(), ours)
    }

    fn budget(&self) -> u64 {
        self.rows[0].budget_bytes - self.rows[0].workspace_bytes
    }

    /// State divided among all; two layers' parameters and a layer's gradients whole; inputs of all layers, and one
    /// layer's activations.
    fn sharded_bytes(&self, samples: usize) -> u64 {
        let layers = self.chain.layers.iter();
        let of = |tensors: &[(shoal_model::Slot, usize)]| -> u64 {
            tensors.iter().map(|(_, tensor)| self.chain.tensors[*tensor].elements() as u64).sum()
        };
        let largest = layers.clone().map(|layer| of(&layer.tensors)).max().unwrap_or(0);
        let size = self.step.precision.bytes() as u64;
        let footprints = layers
            .map(|layer| layer.kind.footprint(samples, SEQUENCE, self.step.precision))
            .collect::<Vec<_>>();
        let inputs: u64 = footprints.iter().map(|of| of.input).sum();
        let peak = footprints.iter().map(|of| of.saved - of.input + of.backward_peak).max().unwrap_or(0);
        let state = allocation_bytes(self.parameters() as usize / self.fleet.devices.len()) * 4;
        state + largest * (2 * size + 4) + inputs + peak
    }

    /// Our stages under GPipe's schedule: all forwards, then all backwards, in as many rounds as memory makes it take.
    fn gpipe(&self, ours: &PipelinePlanned) -> Result<Other, PipelineError> {
        let mut best: Option<Other> = None;
        for activations in [Activations::Keep, Activations::Recompute] {
            let mut pipeline = ours.pipeline.clone();
            pipeline.order = Order::Gpipe;
            for stage in pipeline.replicas.iter_mut().flat_map(|replica| &mut replica.stages) {
                (stage.activations, stage.stash) = (activations, None);
            }
            if let Some(other) = self.rounds(&pipeline, ours.seconds)?
                && best.as_ref().is_none_or(|best| other.seconds < best.seconds)
            {
                best = Some(other);
            }
        }
        let impossible = || Other::new(f64::INFINITY, f64::INFINITY, 0.0, false, ours.seconds);
        Ok(best.unwrap_or_else(impossible))
    }

    /// The fewest rounds that fit, each through the whole pipeline and back; gradients are added up after the last.
    fn rounds(&self, pipeline: &Pipeline, ours: f64) -> Result<Option<Other>, PipelineError> {
        let most = pipeline.replicas.iter().map(|replica| replica.samples.len()).max().unwrap_or(1);
        let mut rounds = 1;
        while rounds <= most {
            let (step, round) = round(self.step, pipeline, rounds);
            let bench = Bench {
                chain: &self.chain,
                step,
                fleet: &self.fleet,
                costs: &self.costs,
                devices: &self.rows,
            };
            // Whether it fits is soon said; how long it takes only of what fits.
            if bench.fits(&round)? {
                let Tried { seconds, pipeline_seconds, simulated, .. } = bench.step(&round)?;
                let busy = simulated.devices.iter().map(|device| device.computing + device.recomputing);
                let computing = busy.fold(0.0, f64::max) * rounds as f64;
                let total = pipeline_seconds * rounds as f64 + (seconds - pipeline_seconds);
                return Ok(Some(Other::new(total, computing, seconds - pipeline_seconds, true, ours)));
            }
            rounds *= 2;
        }
        Ok(None)
    }
}

/// One of so many equal rounds of a pipeline's step.
fn round(step: StepShape, pipeline: &Pipeline, rounds: usize) -> (StepShape, Pipeline) {
    let mut round = pipeline.clone();
    let mut next = 0;
    for replica in &mut round.replicas {
        let samples = replica.samples.len().div_ceil(rounds);
        replica.samples = next..next + samples;
        next += samples;
    }
    (StepShape { global_batch: next, ..step }, round)
}

/// A model on so many machines: ours, and the others beside it.
pub fn compare(model: Gpt2, devices: usize, global_batch: usize) -> Result<Comparison, PipelineError> {
    let case = Case::new(model, devices, global_batch);
    let planned = plan(&case.chain, case.step, &case.fleet, &case.costs, &PipelineWanted::default())?;
    Ok(Comparison {
        model,
        parameters: case.parameters(),
        devices,
        global_batch,
        estimated: case.estimated(),
        ours: case.shape(&planned),
        tensor_parallel: case.tensor_parallel(planned.seconds),
        sharded: case.sharded(planned.seconds),
        gpipe: case.gpipe(&planned)?,
        claimed_over_tensor_parallel: CLAIMED_TENSOR,
        claimed_over_pipelines: CLAIMED_PIPELINE,
    })
}

/// The model of 200 B parameters with its optimizer on the hosts.
pub fn huge(devices: usize, global_batch: usize) -> Result<Huge, PipelineError> {
    let case = Case::new(GPT2_200B, devices, global_batch);
    let wanted = PipelineWanted { state: Some(State::Host), ..PipelineWanted::default() };
    let planned = plan(&case.chain, case.step, &case.fleet, &case.costs, &wanted)?;
    Ok(Huge {
        model: case.model,
        parameters: case.parameters(),
        devices,
        global_batch,
        estimated: case.estimated(),
        ours: case.shape(&planned),
        device_bytes: planned.memory.iter().map(|memory| memory.total()).max().unwrap_or(0),
        budget_bytes: case.rows[0].budget_bytes,
        host_bytes: planned.memory.iter().map(|memory| memory.host).max().unwrap_or(0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_models_have_the_sizes_that_they_are_called_by() {
        for (model, billions) in [(GPT2_2_5B, 2.5), (GPT2_8_3B, 8.3), (GPT2_200B, 200.0)] {
            let parameters: usize = model.chain().tensors.iter().map(|tensor| tensor.elements()).sum();
            assert!((parameters as f64 / 1e9 / billions - 1.0).abs() < 0.02, "{}: {parameters}", model.name);
        }
    }

    #[test]
    fn our_pipeline_is_many_times_quicker_than_tensor_parallelism() {
        let found = compare(GPT2_2_5B, 60, 512).unwrap();
        assert!(found.estimated);
        assert!(found.tensor_parallel.ratio > 15.0, "{found:?}");
        assert!(found.sharded.ratio > 1.0 && found.gpipe.ratio > 1.0, "{found:?}");
    }

    #[test]
    fn a_model_of_200_billion_fits_102_devices_and_their_hosts() {
        let found = huge(102, 64).unwrap();
        assert!(found.device_bytes <= found.budget_bytes);
        assert!(found.host_bytes > 30 << 30, "{found:?}");
        assert_eq!((found.ours.state, found.ours.devices_used), (State::Host, 102));
    }
}
