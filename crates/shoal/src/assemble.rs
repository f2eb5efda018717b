//! From a job to the parts of a run: device, data, plan, program, state. Every command that trains or plans
//! goes through here.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};

use shoal_data::{Dataset, DatasetSpec, ImageSpec, Tokenizer, Variation};
use shoal_engine::import::reader;
use shoal_engine::{Executor, KindRate, ModelState, Replay, RunSettings, Tiers, rate};
use shoal_fleet::profile::PROCESSOR;
use shoal_kernels::cuda::GpuFacts;
use shoal_kernels::{CpuDevice, CudaDevice, Device};
use shoal_model::{Chain, ImageShape, Layer, LayerKind, Precision, TensorSpec};
use shoal_net::Fabric;
use shoal_nn::init;
use shoal_nn::layer::element;
use shoal_plan::{
    Activations, DeviceOffer, Layout, Plan, PlanError, Planned, Preferences, Purpose, StepShape, forecast,
    plan_one_device, verify,
};
use shoal_planner::GPU_PROCESS_BYTES;
use shoal_state::hugging_face::Folder;

use crate::error::{CliError, Result};
use crate::job::{DeviceChoice, ImageReading, Job, Weights};
use crate::machine;
use crate::spill;

/// The devices' names in plans and errors.
const CPU: &str = "cpu:0";
const GPU: &str = "cuda:0";

/// Bytes the process takes beside what is counted: code, libraries, the tokenizer, and for each thread its stack and what
/// the matrix products pack into. Stated with every memory forecast. From tiny models to half a billion parameters 19 to 24
/// MiB were seen on one thread, 21 to 31 on two, 32 to 59 on eight.
pub fn process_bytes(threads: usize) -> u64 {
    (16 << 20) + threads as u64 * (4 << 20)
}

/// Held-out tokens are masked alike in every run, so that held-out losses can be compared; by a seed that no
/// job is likely to have, so that held-out masks are never those trained on.
const EVAL_MASK_SEED: u64 = 0x6865_6c64_206f_7574;

/// The local device, described: the processor, or the first GPU.
pub struct LocalDevice {
    /// Where it is a GPU.
    pub gpu: Option<GpuFacts>,
    pub processor: String,
    pub threads: usize,
    pub instruction_set: &'static str,
    pub budget_bytes: u64,
}

impl LocalDevice {
    /// What a job asks for. A machine with a GPU whose libraries are missing is an error, not a silent
    /// hundredfold of the time.
    pub fn choose(
        choice: DeviceChoice,
        memory_bytes: Option<u64>,
        threads: Option<usize>,
    ) -> Result<LocalDevice> {
        let device = LocalDevice::new(memory_bytes, threads);
        let on_gpu = match choice {
            DeviceChoice::Cpu => false,
            DeviceChoice::Auto => CudaDevice::count().is_ok_and(|count| count > 0),
            DeviceChoice::Cuda => true,
        };
        if !on_gpu {
            return Ok(device);
        }
        let (facts, free_bytes) = CudaDevice::probe(0)?;
        if !CudaDevice::is_prepared(&facts)? {
            eprintln!("note: compiling the kernels for {}; once, some seconds", facts.model);
        }
        let free_bytes = free_bytes.saturating_sub(GPU_PROCESS_BYTES);
        let budget_bytes = memory_bytes.unwrap_or((free_bytes as f64 * machine::DEFAULT_SHARE) as u64);
        Ok(LocalDevice { gpu: Some(facts), budget_bytes, ..device })
    }

    /// The processor.
    pub fn new(memory_bytes: Option<u64>, threads: Option<usize>) -> LocalDevice {
        let threads = threads.unwrap_or_else(machine::cores);
        let available = machine::available_bytes().saturating_sub(process_bytes(threads));
        let budget_bytes = memory_bytes.unwrap_or((available as f64 * machine::DEFAULT_SHARE) as u64);
        LocalDevice {
            gpu: None,
            processor: machine::processor(),
            threads,
            instruction_set: CpuDevice::instruction_set(),
            budget_bytes,
        }
    }

    /// Host memory beside a step that takes so much of the device's: what is left of the budget where both are one, else
    /// what the host can spare.
    pub fn host_room_bytes(&self, step_bytes: u64) -> u64 {
        match &self.gpu {
            None => self.budget_bytes.saturating_sub(step_bytes),
            Some(_) => LocalDevice::new(None, None).budget_bytes,
        }
    }

    /// An error where the model has a size, or the job a precision, that this device has no kernel for.
    pub fn assert_takes(&self, job: &Job) -> Result {
        self.assert_computes(job.precision)?;
        let Some(facts) = &self.gpu else { return Ok(()) };
        let most = CudaDevice::head_size_max(facts);
        let Some(head) = job.model.head_size().filter(|head| *head > most) else { return Ok(()) };
        Err(CliError::said(
            format!("{}: heads of {head} are wider than the {most} it can train", self.title()),
            "set plan.device = \"cpu\"",
        ))
    }

    pub fn assert_computes(&self, precision: Precision) -> Result {
        let precisions = self.precisions();
        if precisions.contains(&precision.name()) {
            return Ok(());
        }
        Err(CliError::said(
            format!("{} does not compute in {}", self.title(), precision.name()),
            format!("set train.precision to one of {}", precisions.join(", ")),
        ))
    }

    /// The device's kind, as metrics name it.
    pub fn kind(&self) -> &str {
        self.gpu.as_ref().map_or(&self.processor, |facts| &facts.model)
    }

    /// One line for people.
    pub fn describe(&self) -> String {
        match &self.gpu {
            Some(facts) => {
                let (major, minor) = facts.capability;
                format!("{}, {} multiprocessors, sm_{major}{minor}", facts.model, facts.multiprocessors)
            }
            None => format!("{}, {} threads, {}", self.processor, self.threads, self.instruction_set),
        }
    }

    fn workspace_bytes(&self) -> u64 {
        match self.gpu {
            Some(_) => CudaDevice::workspace_bytes(),
            None => CpuDevice::workspace_bytes(self.threads),
        }
    }

    pub fn offer(&self) -> DeviceOffer {
        DeviceOffer {
            name: self.name().into(),
            budget_bytes: self.budget_bytes,
            workspace_bytes: self.workspace_bytes(),
            rows_enough: if self.gpu.is_some() { CudaDevice::ROWS_ENOUGH } else { CpuDevice::ROWS_ENOUGH },
        }
    }

    /// The machine's name in plans, of which the device's is made.
    pub fn node(&self) -> &'static str {
        self.name().trim_end_matches(":0")
    }

    /// The device's name in plans and errors.
    fn name(&self) -> &'static str {
        if self.gpu.is_some() { GPU } else { CPU }
    }

    pub fn open(&self, precision: Precision, deterministic: bool) -> Result<Arc<dyn Device>> {
        self.open_as(self.name(), precision, deterministic)
    }

    /// The same under a name that a plan gives it.
    pub fn open_as(&self, name: &str, precision: Precision, deterministic: bool) -> Result<Arc<dyn Device>> {
        self.open_with(name, precision, deterministic, self.budget_bytes)
    }

    fn open_with(
        &self,
        name: &str,
        precision: Precision,
        deterministic: bool,
        budget_bytes: u64,
    ) -> Result<Arc<dyn Device>> {
        let tf32 = precision == Precision::Tf32;
        Ok(match self.gpu {
            Some(_) => {
                let device = CudaDevice::new(name, 0, budget_bytes)?;
                Arc::new(device.with_tf32(tf32).with_deterministic(deterministic))
            }
            None => Arc::new(CpuDevice::new(name, self.threads, budget_bytes)?),
        })
    }

    /// The matrix rate, measured on memory of its own so that a small budget does not matter.
    pub fn measure_rate(&self, precision: Precision) -> Result<f64> {
        let bytes = rate::BYTES_MAX + self.workspace_bytes();
        let device = self.open_with("rate measurement", precision, false, bytes)?;
        Ok(rate::matrix_flops_per_second(&*device, element(precision))?)
    }

    /// Bytes beside what is counted; stated with every memory forecast.
    pub fn process_bytes(&self) -> u64 {
        if self.gpu.is_some() { GPU_PROCESS_BYTES } else { process_bytes(self.threads) }
    }

    /// The device's name, and its model where there are several kinds.
    pub fn title(&self) -> String {
        match &self.gpu {
            Some(facts) => format!("{GPU} ({})", facts.model),
            None => PROCESSOR.into(),
        }
    }

    /// The precisions it computes in, as the job file writes them.
    pub fn precisions(&self) -> Vec<&'static str> {
        let computes = |precision: &Precision| match &self.gpu {
            Some(facts) => facts.computes(element(*precision)),
            None => !precision.is_half(),
        };
        Precision::ALL
            .iter()
            .filter(|precision| computes(precision))
            .map(|precision| precision.name())
            .collect()
    }
}

/// Hears of bytes prepared, of how many.
pub type Preparing<'a> = &'a mut dyn FnMut(u64, u64);

/// A job's data: training set and, where there is one, held-out set.
pub struct JobData {
    pub train: Dataset,
    pub eval: Option<Dataset>,
}

/// Opens a job's data; text is tokenized once, into `cache`.
pub fn open_data(job: &Job, cache: &Path, progress: Preparing) -> Result<JobData> {
    match (job.model.image(), &job.images) {
        (Some(image), Some(reading)) => open_images(job, image, reading, cache, progress),
        _ => open_tokens(job, cache, progress),
    }
}

fn open_images(
    job: &Job,
    image: ImageShape,
    reading: &ImageReading,
    cache: &Path,
    progress: Preparing,
) -> Result<JobData> {
    let mut open = |source: &Path, variation: Option<Variation>, class_names| -> Result<Dataset> {
        let spec = ImageSpec {
            source: source.to_owned(),
            shape: [image.channels, image.size, image.size],
            classes: job.model.vocabulary(),
            cache: cache.to_owned(),
            mean: reading.mean.clone(),
            deviation: reading.std.clone(),
            variation,
            class_names,
        };
        Ok(Dataset::open_images(&spec, progress)?)
    };
    let (flip, crop_padding) = (reading.flip, reading.crop_padding);
    let train = open(&job.train_data, Some(Variation { seed: job.seed, flip, crop_padding }), None)?;
    // A held-out folder's classes have the numbers that training gives them.
    let names = train.class_names().map(<[String]>::to_vec);
    let eval = job.eval.as_ref().map(|(source, _)| open(source, None, names)).transpose()?;
    Ok(JobData { train, eval })
}

fn open_tokens(job: &Job, cache: &Path, progress: Preparing) -> Result<JobData> {
    let tokenizer = Arc::new(Tokenizer::load(&job.tokenizer, &job.base)?);
    // A model that does not predict the next token learns to restore masked ones.
    let masked = |seed: u64| (!job.model.is_causal()).then_some(seed);
    let mut open = |source: &Path, masked: Option<u64>| -> Result<Dataset> {
        let spec = DatasetSpec {
            source: source.to_owned(),
            tokenizer: tokenizer.clone(),
            sequence: job.sequence,
            vocabulary: job.model.vocabulary(),
            cache: cache.to_owned(),
            text_field: job.text_field.clone(),
            masked,
            documents: job.documents,
        };
        Ok(Dataset::open(&spec, progress)?)
    };
    let train = open(&job.train_data, masked(job.seed))?;
    let eval = job.eval.as_ref().map(|(source, _)| open(source, masked(EVAL_MASK_SEED))).transpose()?;
    Ok(JobData { train, eval })
}

/// A job's step, to be planned.
pub fn step_shape(job: &Job) -> StepShape {
    StepShape {
        global_batch: job.global_batch,
        sequence: job.sequence,
        precision: job.precision,
        optimizer_states: job.optimizer.state_names().len(),
        gradients: job.gradients,
    }
}

/// Plans a job's step on the local device. A model that does not fit a GPU streams through it.
pub fn plan(job: &Job, chain: &Chain, device: &LocalDevice) -> Result<Planned> {
    device.assert_takes(job)?;
    let refused = match plan_one_device(chain, step_shape(job), &device.offer(), job.preferences) {
        Ok(planned) => return Ok(planned),
        Err(refused) => refused,
    };
    // Of a processor's budget its host's memory is a part: there is nowhere else but the disk, which nobody asked for.
    if matches!(refused, PlanError::TooSmall { .. }) && device.gpu.is_some() {
        let around = spill::Around::of(&job.run_folder);
        if let Some(streamed) = spill::plan(chain, step_shape(job), device, around)? {
            return Ok(streamed.planned);
        }
    }
    Err(refused.into())
}

/// How a plan cuts the batch, for the run folder to remember.
pub fn choice(plan: &Plan) -> Value {
    let recomputed = plan.layers.iter().any(|row| row.compute[0].activations == Activations::Recompute);
    let activations = if recomputed { Activations::Recompute } else { Activations::Keep };
    json!({"micro_batch": plan.layers[0].compute[0].micro_batches[0].count(), "activations": activations})
}

/// The job's preferences, with a remembered choice where the job leaves one open.
pub fn chosen(job: &Job, choice: &Value) -> Preferences {
    let micro_batch = choice["micro_batch"].as_u64().map(|size| size as usize);
    let activations = serde_json::from_value(choice["activations"].clone()).ok();
    Preferences {
        micro_batch: job.preferences.micro_batch.or(micro_batch),
        activations: job.preferences.activations.or(activations),
        ..job.preferences
    }
}

/// A planned step with the program of a file in place of the compiled one, checked first.
pub fn with_program(mut planned: Planned, chain: &Chain, file: &Path) -> Result<Planned> {
    let text = std::fs::read_to_string(file).map_err(CliError::at(file))?;
    planned.program = serde_json::from_str(&text).map_err(|error| {
        CliError::said(
            format!("{}: it is not a program: {error}", file.display()),
            "write one with `shoal plan JOB.toml --program FILE`",
        )
    })?;
    let refused = |error: shoal_plan::ProgramError| CliError::Said {
        sentence: format!("{}: the program is refused: {error}", file.display()),
        hint: error.hint(),
    };
    verify(&planned.program, &planned.plan, chain, Purpose::Train).map_err(refused)?;
    planned.memory = forecast(&planned.program, &planned.plan, chain);
    let (needed, budget) = (planned.memory.total(), planned.plan.devices[0].budget_bytes);
    if needed > budget {
        return Err(CliError::said(
            format!(
                "{}: in this order the step needs {needed} bytes, the budget is {budget}",
                file.display()
            ),
            "an order that takes micro-batches back sooner needs less; or raise plan.memory",
        ));
    }
    Ok(planned)
}

/// Tensors with a row a token or class.
fn output_names(chain: &Chain) -> Vec<&str> {
    let slots = chain.layers.iter().flat_map(|layer| &layer.tensors);
    slots.filter(|(slot, _)| slot.is_output()).map(|(_, index)| chain.tensors[*index].name.as_str()).collect()
}

/// Room for a job's model on the local device; its parameters are set unless a checkpoint will set them.
pub fn executor(
    job: &Job,
    chain: &Chain,
    device: &LocalDevice,
    planned: &Planned,
    set_parameters: bool,
) -> Result<Executor> {
    let (precision, deterministic) = (job.precision, job.deterministic);
    if spill::is_spilled(&planned.plan) {
        let folder = job.run_folder.join("spilled");
        let around = spill::Around::of(&job.run_folder);
        let tiers = spill::tiers(device, around, planned, precision, deterministic, &folder)?;
        return share_executor(job, chain, &planned.plan, 0, tiers, None, set_parameters);
    }
    // Room for a copy of the state too, from which checkpoints are written while training goes on.
    let room_bytes = device.host_room_bytes(planned.memory.total());
    let tiers = Tiers::with_room(device.open(precision, deterministic)?, room_bytes)?;
    let mut executor = share_executor(job, chain, &planned.plan, 0, tiers, None, set_parameters)?;
    executor.set_replay(job.graphs.unwrap_or_else(|| usual_replay(chain)));
    Ok(executor)
}

/// One of a plan's devices, with its share of a job's model; parameters as above.
pub fn share_executor(
    job: &Job,
    chain: &Chain,
    plan: &Plan,
    index: usize,
    tiers: Tiers,
    fabric: Option<Arc<Fabric>>,
    set_parameters: bool,
) -> Result<Executor> {
    let layout = Layout::new(plan, chain);
    let mut state = ModelState::allocate_share(&tiers, &layout, index, Some(&job.optimizer))?;
    spill::tell_refusal(&tiers);
    if set_parameters {
        set_initial(job, chain, |set| Ok(state.load(&tiers, chain, &[], 0, |spec, _, out| set(spec, out))?))?;
    }
    Ok(Executor::with(tiers, fabric, chain.clone(), job.sequence, state)?)
}

/// What a job's run is to do, on devices of these kinds.
pub fn run_settings(job: &Job, stop_at: Option<u64>, rates: Vec<KindRate>) -> RunSettings {
    RunSettings {
        steps: job.steps,
        stop_at,
        seed: job.seed,
        shuffle: job.shuffle,
        optimizer: job.optimizer,
        schedule: job.schedule.clone(),
        folder: job.run_folder.clone(),
        checkpoint_every: job.checkpoint_every,
        checkpoints_kept: job.checkpoints_kept,
        eval_every: job.eval.as_ref().map(|(_, every)| *every),
        rates,
        predicted_seconds: None,
        dollars_per_hour: None,
        trace_from: None,
    }
}

/// Hands over what sets a job's parameters before its first step.
pub fn set_initial(
    job: &Job,
    chain: &Chain,
    state: impl FnOnce(&mut dyn FnMut(&TensorSpec, &mut [f32]) -> shoal_engine::error::Result) -> Result,
) -> Result {
    match &job.weights {
        Weights::Folder { path, new_head } => {
            let folder = Folder::described_by(path, job.model.file())?;
            let outputs = output_names(chain);
            state(&mut reader(&folder, |spec, out| {
                let draws = *new_head && outputs.contains(&spec.name.as_str());
                if draws {
                    init::fill(spec, job.seed, 0, out);
                }
                draws
            }))
        }
        Weights::Random => state(&mut |spec, out| {
            init::fill(spec, job.seed, 0, out);
            Ok(())
        }),
    }
}

/// What a device that can should start at once. Steps of convolutional models are many small kernels; others'
/// are long enough that the next one is always waiting.
pub fn usual_replay(chain: &Chain) -> Replay {
    let convolves = |layer: &Layer| matches!(layer.kind, LayerKind::Convolution(_));
    if chain.layers.iter().any(convolves) { Replay::Step } else { Replay::Nothing }
}
