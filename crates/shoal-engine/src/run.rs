//! Step after step: data, schedule, evaluation, checkpoints, metrics. What happens inside a step is the
//! program's affair; what this loop owns is that a run can be stopped, killed and resumed at any moment and
//! end in the same bits.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use shoal_data::{Dataset, Inputs, Order};
use shoal_kernels::Tensor;
use shoal_model::{Chain, Precision};
use shoal_nn::{OptimizerSettings, Schedule};
use shoal_plan::one_device::table;
use shoal_plan::{Activations, DeviceOffer, Plan, Program, Purpose, StepShape, compile, verify};
use shoal_state::checkpoint::{Checkpoint, Entry, Header, Store};

use crate::error::{EngineError, Result};
use crate::executor::{Batch, Executor, StepInput, StepOutcome};
use crate::identity::Identity;
use crate::loss_scale::LossScale;
use crate::metrics::{Metrics, StepRecord};
use crate::state::write;

/// How often something is due.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Interval {
    Steps(u64),
    Time(Duration),
    /// As often as keeps the cost of saving near one percent of the time.
    Auto,
}

/// Which generator the seed belongs to, as checkpoints record it: draws are a pure function of these.
const RNG: &str = "mix(seed, step, sample, layer, site, element) 1";

/// With `every = "auto"`: never more often than this, and saving takes at most a hundredth of the time.
const AUTO_LEAST: Duration = Duration::from_secs(60);
const AUTO_COST_SHARE: u32 = 100;

/// What a run is to do; everything in it has been validated.
pub struct RunSettings {
    pub steps: u64,
    /// Stop, save and return after this step, as if interrupted.
    pub stop_at: Option<u64>,
    pub seed: u64,
    pub shuffle: bool,
    pub optimizer: OptimizerSettings,
    pub schedule: Schedule,
    pub folder: PathBuf,
    pub checkpoint_every: Interval,
    pub checkpoints_kept: usize,
    pub eval_every: Option<Interval>,
    /// Operations of one sample's training step.
    pub flops_per_sample: u64,
    /// The device's kind and measured matrix rate.
    pub device_kind: String,
    pub peak_flops_per_second: f64,
}

/// What happened, for whoever shows it.
#[derive(Clone, Debug)]
pub enum RunEvent {
    Step(StepRecord),
    Saved { step: u64, bytes: u64, seconds: f64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    Finished,
    Interrupted,
}

/// Samples of the endless stream from some position on.
struct Window<'a> {
    data: &'a Dataset,
    order: &'a Order,
    first: u64,
}

impl Batch for Window<'_> {
    fn read(&self, samples: Range<usize>, inputs: Inputs, targets: &mut [i32]) -> Result {
        let places: Vec<(u64, u64)> =
            samples.map(|sample| self.order.index(self.first + sample as u64)).collect();
        Ok(self.data.read_all(&places, inputs, targets)?)
    }
}

pub struct Run {
    settings: RunSettings,
    identity: Identity,
    executor: Executor,
    plan: Plan,
    program: Program,
    data: Dataset,
    order: Order,
    eval_data: Option<Dataset>,
    /// Evaluation programs by number of samples: whole batches, and the last one.
    eval_programs: HashMap<usize, Program>,
    store: Store,
    metrics: Metrics,
    /// Steps completed.
    step: u64,
    /// In fp16.
    loss_scale: Option<LossScale>,
    last_saved: Option<u64>,
}

impl Run {
    /// A run that goes on from `checkpoint`, or starts at the executor's parameters.
    #[allow(clippy::too_many_arguments)] // the parts of a run, each made by the caller
    pub fn new(
        settings: RunSettings,
        identity: Identity,
        mut executor: Executor,
        plan: Plan,
        program: Program,
        data: Dataset,
        eval_data: Option<Dataset>,
        store: Store,
        checkpoint: Option<&Checkpoint>,
    ) -> Result<Run> {
        verify(&program, &plan, executor.chain(), Purpose::Train)?;
        let step = match checkpoint {
            None => 0,
            Some(checkpoint) => restore(checkpoint, &settings.optimizer, &mut executor)?,
        };
        let extra = checkpoint.map(|checkpoint| &checkpoint.manifest().extra);
        let loss_scale = (plan.precision == Precision::Fp16)
            .then(|| extra.map_or_else(LossScale::default, LossScale::restore));
        let metrics = Metrics::open(&settings.folder, step)?;
        let order = Order::new(data.len(), settings.seed, settings.shuffle);
        Ok(Run {
            last_saved: checkpoint.map(|_| step),
            settings,
            identity,
            executor,
            plan,
            program,
            data,
            order,
            eval_data,
            eval_programs: HashMap::new(),
            store,
            metrics,
            step,
            loss_scale,
        })
    }

    pub fn step(&self) -> u64 {
        self.step
    }

    pub fn executor(&self) -> &Executor {
        &self.executor
    }

    /// Trains until the last step, or until `stop` is set; either way the state is saved.
    pub fn go(&mut self, stop: &AtomicBool, on_event: &mut dyn FnMut(RunEvent)) -> Result<StopReason> {
        let mut saved_at = Instant::now();
        let mut evaluated_at = Instant::now();
        let mut save_cost = Duration::ZERO;
        let last = self.settings.stop_at.map_or(self.settings.steps, |stop| stop.min(self.settings.steps));
        while self.step < last {
            let mut record = self.train_step()?;
            let finished = self.step >= self.settings.steps;
            let stopping = stop.load(Ordering::Relaxed) || self.step >= last;
            if let Some(every) = self.settings.eval_every
                && (finished || due(every, self.step, evaluated_at, Duration::ZERO))
            {
                let held_out = self.evaluate()?;
                (record.eval_loss, record.eval_accuracy) = (Some(held_out.loss()), held_out.accuracy());
                evaluated_at = Instant::now();
            }
            self.metrics.append(&record)?;
            on_event(RunEvent::Step(record));
            if stopping || due(self.settings.checkpoint_every, self.step, saved_at, save_cost) {
                let started = Instant::now();
                self.save(on_event)?;
                save_cost = started.elapsed();
                saved_at = Instant::now();
            }
            if stopping && !finished {
                return Ok(StopReason::Interrupted);
            }
        }
        // A job that asks for no steps, or resumes when all are done, still leaves a checkpoint.
        if self.last_saved != Some(self.step) {
            self.save(on_event)?;
        }
        Ok(if self.step >= self.settings.steps { StopReason::Finished } else { StopReason::Interrupted })
    }

    fn train_step(&mut self) -> Result<StepRecord> {
        let started = Instant::now();
        let settings = &self.settings;
        let lr = settings.optimizer.lr * settings.schedule.factor(self.step, settings.steps);
        let samples = self.plan.global_batch as u64;
        let window = |step: u64| Window { data: &self.data, order: &self.order, first: step * samples };
        let (batch, next) = (window(self.step), window(self.step + 1));
        let last = self.step + 1 >= settings.steps;
        let (scale, skipped) = self.loss_scale.map_or((1.0, 0), |state| (state.scale, state.skipped));
        let input = StepInput {
            updates: self.step - skipped.min(self.step),
            loss_scale: scale,
            next: if last { None } else { Some(&next) },
            ..StepInput::train(self.step, settings.seed, lr, &settings.optimizer, &batch)
        };
        let outcome = self.executor.run(&self.program, &input).map_err(|error| match error {
            EngineError::NotFinite { step, what, value, .. } => {
                EngineError::NotFinite { step, what, value, checkpoint: self.last_saved }
            }
            other => other,
        })?;
        if let Some(scale) = &mut self.loss_scale {
            if outcome.overflowed && !scale.can_fall() {
                let (step, what, value) = (self.step + 1, "norm of the gradient", outcome.gradient_norm);
                return Err(EngineError::NotFinite { step, what, value, checkpoint: self.last_saved });
            }
            scale.after(outcome.overflowed);
        }
        self.step += 1;
        let seconds = started.elapsed().as_secs_f64();
        let useful = samples as f64 * settings.flops_per_sample as f64 / seconds;
        let arena = self.executor.device().arena();
        let device = arena.device().to_owned();
        Ok(StepRecord {
            step: self.step,
            loss: outcome.loss(),
            grad_norm: (!outcome.overflowed).then_some(outcome.gradient_norm),
            loss_scale: self.loss_scale.map(|_| scale),
            lr,
            tokens: outcome.targets,
            accuracy: outcome.accuracy(),
            eval_loss: None,
            eval_accuracy: None,
            step_ms: seconds * 1e3,
            tokens_per_s: outcome.targets as f64 / seconds,
            mfu: BTreeMap::from([(settings.device_kind.clone(), useful / settings.peak_flops_per_second)]),
            memory_bytes: BTreeMap::from([(device, arena.peak())]),
            plan: self.plan.id(),
            predicted_ms: None,
            dollars: None,
        })
    }

    /// The losses of every target of the held-out set, and how many were predicted rightly.
    fn evaluate(&mut self) -> Result<StepOutcome> {
        let mut whole = StepOutcome::default();
        let Some(data) = &self.eval_data else { return Ok(whole) };
        let order = Order::new(data.len(), 0, false);
        let batch_size = self.plan.global_batch as u64;
        let mut first = 0;
        while first < data.len() {
            let samples = batch_size.min(data.len() - first) as usize;
            if !self.eval_programs.contains_key(&samples) {
                let program = evaluation_program(&self.plan, self.executor.chain(), samples)?;
                self.eval_programs.insert(samples, program);
            }
            let batch = Window { data, order: &order, first };
            let input = StepInput::evaluate(self.step, &batch);
            let outcome = self.executor.run(&self.eval_programs[&samples], &input)?;
            whole.loss_sum += outcome.loss_sum;
            whole.targets += outcome.targets;
            whole.correct = outcome.correct.map(|correct| correct + whole.correct.unwrap_or(0));
            first += samples as u64;
        }
        Ok(whole)
    }

    fn save(&mut self, on_event: &mut dyn FnMut(RunEvent)) -> Result {
        let started = Instant::now();
        // Parameters that are no numbers must not push out the last checkpoint whose are.
        let norm = self.executor.parameter_norm()?;
        if !norm.is_finite() {
            let (step, what, checkpoint) = (self.step, "norm of the parameters", self.last_saved);
            return Err(EngineError::NotFinite { step, what, value: norm, checkpoint });
        }
        let mut extra = BTreeMap::new();
        if let Some(scale) = &self.loss_scale {
            scale.save(&mut extra);
        }
        let header = Header {
            job: self.identity.fingerprint(),
            step: self.step,
            position: self.step * self.plan.global_batch as u64,
            seed: self.settings.seed,
            rng: RNG.into(),
            plan: self.plan.id(),
            extra,
        };
        let device = self.executor.device().clone();
        let names = self.settings.optimizer.state_names();
        // (name, role, shape, numbers): borrowed where the host holds them, copied over where it does not.
        let mut tensors = Vec::new();
        for (held, spec) in self.executor.state.tensors.iter().zip(&self.executor.chain().tensors) {
            let kept = held.whole().expect("a run of one device has all of every tensor").tensors();
            tensors.push((spec, "parameter", device.host_floats(&kept.parameter)?));
            for (state, role) in kept.optimizer.iter().zip(names) {
                tensors.push((spec, role, device.host_floats(state)?));
            }
        }
        let entries = tensors.iter().map(|(spec, role, data)| Entry {
            name: &spec.name,
            role,
            shape: &spec.shape,
            data,
        });
        let saved = self.store.save(header, entries)?;
        self.store.collect(self.settings.checkpoints_kept)?;
        self.last_saved = Some(self.step);
        let seconds = started.elapsed().as_secs_f64();
        on_event(RunEvent::Saved { step: self.step, bytes: saved.bytes, seconds });
        Ok(())
    }
}

fn due(every: Interval, step: u64, since: Instant, cost: Duration) -> bool {
    match every {
        Interval::Steps(steps) => step.is_multiple_of(steps),
        Interval::Time(time) => since.elapsed() >= time,
        Interval::Auto => since.elapsed() >= AUTO_LEAST.max(cost * AUTO_COST_SHARE),
    }
}

/// The program that evaluates `samples` samples with the training plan's micro-batches.
fn evaluation_program(training: &Plan, chain: &Chain, samples: usize) -> Result<Program> {
    let micro_batch = training.layers[0].compute[0].micro_batches[0].count().min(samples);
    let device = &training.devices[0];
    let offer = DeviceOffer {
        name: device.name.clone(),
        budget_bytes: device.budget_bytes,
        workspace_bytes: device.workspace_bytes,
        rows_enough: usize::MAX,
    };
    let shape = StepShape {
        global_batch: samples,
        sequence: training.sequence,
        precision: training.precision,
        optimizer_states: training.optimizer_states,
    };
    let plan = table(chain, shape, &offer, micro_batch, Activations::Keep, false);
    let program = compile(&plan, chain, Purpose::Evaluate)?.remove(0);
    verify(&program, &plan, chain, Purpose::Evaluate)?;
    Ok(program)
}

/// Brings parameters and optimizer state back; the step they are of.
fn restore(checkpoint: &Checkpoint, optimizer: &OptimizerSettings, executor: &mut Executor) -> Result<u64> {
    let step = checkpoint.manifest().step;
    let (device, specs) = (executor.device().clone(), executor.chain().tensors.clone());
    for (held, spec) in executor.state.tensors.iter_mut().zip(&specs) {
        let read = |role: &str, tensor: &mut Tensor| {
            write(&*device, tensor, |out| Ok(checkpoint.read(&spec.name, role, out)?))
        };
        for slice in &mut held.slices {
            let kept = slice.tensors_mut();
            read("parameter", &mut kept.parameter)?;
            for (state, role) in kept.optimizer.iter_mut().zip(optimizer.state_names()) {
                read(role, state)?;
            }
            slice.version = step;
        }
    }
    executor.state.refresh_copies(&*device)?;
    Ok(step)
}
