//! Step after step: data, schedule, evaluation, checkpoints, metrics. What happens inside a step is the
//! program's affair; what this loop owns is that a run can be stopped, killed and resumed at any moment and
//! end in the same bits.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use shoal_data::{Dataset, Order};
use shoal_model::{Chain, Precision};
use shoal_nn::{OptimizerSettings, Schedule};
use shoal_plan::{Layout, Plan, Program, Purpose, verify};
use shoal_state::checkpoint::{Checkpoint, Header, Store};

use crate::agenda::{Agenda, Interval, Teller, Told};
use crate::error::{EngineError, Result};
use crate::executor::{Executor, StepOutcome, Traced};
use crate::identity::Identity;
use crate::loss_scale::LossScale;
use crate::metrics::{Metrics, StepRecord};
use crate::saving::{Outcome, Saver};
use crate::stepping::{self, Evaluation, Measured, Terms, Work};

/// Which generator the seed belongs to, as checkpoints record it: draws are a pure function of these.
pub const RNG: &str = "mix(seed, step, sample, layer, site, element) 1";

/// Steps whose traces are kept.
const TRACED_STEPS: usize = 20;

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
    /// By kind of device.
    pub rates: Vec<KindRate>,
    /// Of a step, where the plan was simulated.
    pub predicted_seconds: Option<f64>,
    /// Of all devices together, where they have prices.
    pub dollars_per_hour: Option<f64>,
    /// The step from which on it is noted when instructions were under way; the last few steps are kept.
    pub trace_from: Option<u64>,
}

/// Devices of a kind: their share of a step's operations, and their matrix rate, all together.
#[derive(Clone, Debug)]
pub struct KindRate {
    pub kind: String,
    pub flops: f64,
    pub flops_per_second: f64,
}

impl KindRate {
    fn mfu(&self, seconds: f64) -> f64 {
        self.flops / seconds / self.flops_per_second
    }
}

/// What happened, for whoever shows it.
#[derive(Clone, Debug)]
pub enum RunEvent {
    Step(StepRecord),
    /// A checkpoint is complete, so long after it was begun.
    Saved {
        step: u64,
        bytes: u64,
        seconds: f64,
    },
    /// Training waits while checkpoints are written: a copy of the state takes more host memory than is free.
    SavesWait {
        needed_bytes: u64,
        free_bytes: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    Finished,
    Interrupted,
}

/// Where a run writes, and for which job.
pub struct Ledger {
    pub identity: Identity,
    pub store: Store,
    /// Whether this worker keeps the books for all: metrics, and which checkpoints there are. The first one does.
    pub keeps_books: bool,
}

/// One worker's side of a run. Where the plan has several, each has its own, and all go from step to step together; the
/// first keeps the books and decides what the others then do too: evaluate, save, stop.
pub struct Run {
    settings: RunSettings,
    executor: Executor,
    plan: Arc<Plan>,
    chain: Arc<Chain>,
    program: Program,
    /// The plan's devices that take part.
    members: Vec<usize>,
    data: Dataset,
    order: Order,
    eval_data: Option<Dataset>,
    evaluation: Evaluation,
    /// Of the job.
    fingerprint: String,
    /// At the worker that keeps the books.
    metrics: Option<Metrics>,
    saver: Saver,
    /// Whether it was said that saves wait.
    said_waits: bool,
    /// Steps completed.
    step: u64,
    /// In fp16.
    loss_scale: Option<LossScale>,
    /// When the step under way began.
    began: Instant,
    /// The record of the last step, until it is written.
    unwritten: Option<StepRecord>,
    last_saved: Option<u64>,
    /// When the instructions of the last steps were under way.
    traced: VecDeque<Vec<Traced>>,
}

impl Run {
    /// A run that goes on from `checkpoint`, or starts at the executor's parameters.
    #[allow(clippy::too_many_arguments)] // the parts of a run, each made by the caller
    pub fn new(
        settings: RunSettings,
        ledger: Ledger,
        mut executor: Executor,
        plan: Plan,
        program: Program,
        data: Dataset,
        eval_data: Option<Dataset>,
        checkpoint: Option<&Checkpoint>,
    ) -> Result<Run> {
        let chain = Arc::new(executor.chain().clone());
        verify(&program, &plan, &chain, Purpose::Train)?;
        let members = Layout::new(&plan, &chain).members().to_vec();
        let step = match checkpoint {
            None => 0,
            Some(checkpoint) => {
                let step = checkpoint.header().step;
                let states = settings.optimizer.state_names();
                executor.load_state(states, step, |spec, role, range, out| {
                    Ok(checkpoint.read(&spec.name, role, range, out)?)
                })?;
                step
            }
        };
        let extra = checkpoint.map(|checkpoint| &checkpoint.header().extra);
        let loss_scale = (plan.precision == Precision::Fp16)
            .then(|| extra.map_or_else(LossScale::default, LossScale::restore));
        let Ledger { identity, store, keeps_books } = ledger;
        let metrics = keeps_books.then(|| Metrics::open(&settings.folder, step)).transpose()?;
        let states = settings.optimizer.state_names();
        let saver = Saver::new(store, &plan, chain.clone(), states, &members, program.device)?;
        let order = Order::new(data.len(), settings.seed, settings.shuffle);
        let evaluation = Evaluation::new(program.device);
        Ok(Run {
            last_saved: checkpoint.map(|_| step),
            settings,
            executor,
            plan: plan.into(),
            chain,
            program,
            members,
            data,
            order,
            eval_data,
            evaluation,
            fingerprint: identity.fingerprint(),
            metrics,
            saver,
            said_waits: false,
            step,
            loss_scale,
            began: Instant::now(),
            unwritten: None,
            traced: VecDeque::new(),
        })
    }

    /// When the instructions of the last steps were under way, step by step, where that is noted.
    pub fn take_traced(&mut self) -> Vec<Vec<Traced>> {
        std::mem::take(&mut self.traced).into()
    }

    pub fn step(&self) -> u64 {
        self.step
    }

    pub fn executor(&self) -> &Executor {
        &self.executor
    }

    /// Trains until the last step, or until `stop` is set; either way the state is saved. So it is when another worker is
    /// lost and the one that keeps the books has all of it: then at the step of the loss. When this returns nothing is being
    /// saved any more.
    pub fn go(&mut self, stop: &AtomicBool, on_event: &mut dyn FnMut(RunEvent)) -> Result<StopReason> {
        let gone = self.go_on(stop, on_event);
        // A save that was begun before a failure is still worth its end.
        let mut settled = self.end_saving(on_event);
        if let Err(EngineError::Net(_)) = &gone {
            if let Err(also) = self.rescue(on_event) {
                return gone
                    .map_err(|lost| EngineError::Unsaved { lost: Box::new(lost), also: Box::new(also) });
            }
            settled = self.end_saving(on_event);
        }
        match gone {
            Ok(reason) => settled.map(|()| reason),
            Err(EngineError::NotFinite { step, what, value, .. }) => {
                Err(EngineError::NotFinite { step, what, value, checkpoint: self.last_saved })
            }
            other => other,
        }
    }

    /// Waits for what is still being written or removed.
    fn end_saving(&mut self, on_event: &mut dyn FnMut(RunEvent)) -> Result {
        self.saver.settle(true)?;
        if self.members.len() < 2 {
            self.note_saved(self.saver.done_bytes(), on_event)?;
        }
        self.saver.settle(true)
    }

    fn go_on(&mut self, stop: &AtomicBool, on_event: &mut dyn FnMut(RunEvent)) -> Result<StopReason> {
        let mut agenda = Agenda::new(&self.settings);
        let (plan, chain) = (self.plan.clone(), self.chain.clone());
        let layout = Layout::new(&plan, &chain);
        let layout = stepping::needs_table(&layout, &self.program).then_some(&layout);
        while self.step < agenda.last {
            let (mut record, told) = self.train_step(layout, &agenda, stop)?;
            if agenda.awaits_save() {
                self.saver.make_ready(self.executor.host())?;
            }
            if told.saving == 0 {
                self.note_saved(told.saved_bytes, on_event)?;
            }
            let verdict = told.verdict;
            if verdict.evaluates || verdict.saves {
                self.catch_up(&mut record)?;
            }
            if verdict.evaluates {
                self.evaluate(&mut record)?;
                agenda.note_evaluated();
            }
            self.write(record, on_event)?;
            if verdict.saves {
                let started = Instant::now();
                self.save(verdict.stops, on_event)?;
                agenda.note_saved(started.elapsed());
            }
            if verdict.stops && !agenda.is_finished(self.step) {
                return Ok(StopReason::Interrupted);
            }
        }
        // A job that asks for no steps, or resumes when all are done, still leaves a checkpoint.
        if self.last_saved != Some(self.step) {
            self.save(true, on_event)?;
        }
        Ok(if self.step >= self.settings.steps { StopReason::Finished } else { StopReason::Interrupted })
    }

    fn write(&mut self, record: StepRecord, on_event: &mut dyn FnMut(RunEvent)) -> Result {
        self.unwritten = None;
        if let Some(metrics) = &mut self.metrics {
            metrics.append(&record)?;
        }
        on_event(RunEvent::Step(record));
        Ok(())
    }

    /// Saves what there is when another worker was lost, where this one keeps the books and holds every slice.
    fn rescue(&mut self, on_event: &mut dyn FnMut(RunEvent)) -> Result {
        if self.metrics.is_none() {
            return Ok(());
        }
        // The others end, so where they stand does not matter: this state alone is one of the run's.
        let own = self.executor.standing()?;
        let Ok(target) = shoal_plan::agree(&self.plan, &[(self.program.device, own)]) else { return Ok(()) };
        let outcome = target
            .closing
            .filter(|_| target.step > self.step)
            .map(|sums| stepping::outcome_of(&self.chain, &sums, self.loss_scale));
        // A step that would have ended the run is none to go on from.
        let ends = |outcome: &StepOutcome| {
            let can_fall = self.loss_scale.is_some_and(|scale| scale.can_fall());
            !outcome.loss().is_finite() || (outcome.overflowed && !can_fall)
        };
        if !target.lost.is_empty() || outcome.as_ref().is_some_and(ends) {
            return Ok(());
        }
        self.executor.settle(target.step, target.closing)?;
        let record = match outcome {
            Some(outcome) => Some(self.complete_step(&outcome)),
            None => self.unwritten.take(),
        };
        if let Some(record) = record {
            self.write(record, on_event)?;
        }
        if self.last_saved == Some(self.step) {
            return Ok(());
        }
        // From here on this worker is alone.
        self.members = vec![self.program.device];
        self.saver.stand_alone(&self.plan, self.program.device)?;
        self.save(true, on_event)
    }

    /// One step, and what everyone has told the others in it.
    fn train_step(
        &mut self,
        layout: Option<&Layout>,
        agenda: &Agenda,
        stop: &AtomicBool,
    ) -> Result<(StepRecord, Told)> {
        let traces = self.settings.trace_from.is_some_and(|from| self.step >= from);
        self.executor.set_traces(traces);
        self.began = Instant::now();
        let settings = &self.settings;
        let terms = Terms {
            steps: settings.steps,
            seed: settings.seed,
            optimizer: &settings.optimizer,
            schedule: &settings.schedule,
            data: &self.data,
            order: &self.order,
        };
        let (agenda, device) = (self.metrics.is_some().then_some(agenda), self.executor.device().clone());
        let place = (self.place(), self.members.len());
        let teller = Teller::new(self.step + 1, agenda, stop, place, device, &mut self.saver);
        let tells = || teller.numbers();
        let work = Work { plan: &self.plan, program: &self.program, layout, tells: Some(&tells) };
        let outcome = terms.train(&mut self.executor, work, self.step, self.loss_scale)?;
        // Who is alone adds up nothing.
        let alone = (self.members.len() < 2).then(|| teller.numbers());
        let told = Told::of(alone.as_ref().unwrap_or(&outcome.told));
        let settled = teller.settled();
        if traces {
            self.executor.set_traces(false);
            self.traced.push_back(self.executor.take_traced());
            self.traced.drain(..self.traced.len().saturating_sub(TRACED_STEPS));
        }
        let mut record = self.complete_step(&outcome);
        self.name_peaks(&mut record, &told);
        self.unwritten = Some(record.clone());
        // A save that failed beside this step is told now; the checkpoints before it are as they were.
        settled.map(|()| (record, told))
    }

    /// This worker's place among the members.
    fn place(&self) -> usize {
        let own = self.members.iter().position(|member| *member == self.program.device);
        own.expect("a worker is a member")
    }

    /// Notes everyone's memory, where there are others.
    fn name_peaks(&self, record: &mut StepRecord, told: &Told) {
        if self.members.len() < 2 {
            return;
        }
        let peaks = self.members.iter().zip(&told.peak_bytes);
        record.memory_bytes =
            peaks.map(|(member, peak)| (self.plan.devices[*member].name.clone(), *peak)).collect();
    }

    /// Waits for what the step has left under way, where something else follows than the next one: that is the step's time
    /// too.
    fn catch_up(&mut self, record: &mut StepRecord) -> Result {
        let started = Instant::now();
        self.executor.catch_up()?;
        let seconds = record.step_ms / 1e3 + started.elapsed().as_secs_f64();
        self.took(record, seconds);
        self.unwritten = Some(record.clone());
        Ok(())
    }

    /// Notes how long a step took, and what that makes of it.
    fn took(&self, record: &mut StepRecord, seconds: f64) {
        let settings = &self.settings;
        record.step_ms = seconds * 1e3;
        record.tokens_per_s = record.tokens as f64 / seconds;
        record.mfu = settings.rates.iter().map(|rate| (rate.kind.clone(), rate.mfu(seconds))).collect();
        record.dollars = settings.dollars_per_hour.map(|dollars| dollars * seconds / 3600.0);
    }

    /// The scheduled rate of the step under way.
    fn lr(&self) -> f64 {
        self.settings.optimizer.lr * self.settings.schedule.factor(self.step, self.settings.steps)
    }

    /// Counts a step that was applied.
    fn complete_step(&mut self, outcome: &StepOutcome) -> StepRecord {
        let lr = self.lr();
        let loss_scale = self.loss_scale.map(|state| state.scale);
        if let Some(scale) = &mut self.loss_scale {
            scale.after(outcome.overflowed);
        }
        self.step += 1;
        let settings = &self.settings;
        let seconds = self.began.elapsed().as_secs_f64();
        let arena = self.executor.device().arena();
        let device = arena.device().to_owned();
        let mut record = StepRecord {
            memory_bytes: BTreeMap::from([(device, arena.peak())]),
            predicted_ms: settings.predicted_seconds.map(|seconds| 1e3 * seconds),
            ..StepRecord::of(self.step, outcome, lr, loss_scale, seconds, self.plan.id())
        };
        self.took(&mut record, seconds);
        record
    }

    /// Adds held-out loss, and how many targets were predicted rightly, to a step's record.
    fn evaluate(&mut self, record: &mut StepRecord) -> Result {
        let Some(data) = &self.eval_data else { return Ok(()) };
        let measured =
            self.evaluation.measure(&mut self.executor, &self.plan, &self.chain, self.step, data)?;
        if let Measured::Whole(outcome) = measured {
            (record.eval_loss, record.eval_accuracy) = (Some(outcome.loss()), outcome.accuracy());
        }
        Ok(())
    }

    /// Begins a save of everyone's part; returns when it is complete if asked to wait for that, or if there is no room for
    /// a copy.
    fn save(&mut self, waits: bool, on_event: &mut dyn FnMut(RunEvent)) -> Result {
        self.executor.catch_up()?;
        self.saver.settle(true)?;
        let prepared = self.saver.prepare(&self.executor, waits)?;
        // The save's number is the first worker's to give; what is no number adds up to what is none.
        let id = if self.metrics.is_some() { self.saver.store().next_id(self.step)? } else { 0 };
        let mut numbers =
            [id as f64, f64::from(prepared.unfit.unwrap_or(0.0)), self.saver.done_bytes() as f64];
        self.executor.sum(&self.members, &mut numbers)?;
        // Everyone has come here, so everyone's part of the save before is written.
        self.note_saved(numbers[2] as u64, on_event)?;
        if !numbers[1].is_finite() {
            let (step, what, value) = (self.step, "value of a parameter", numbers[1]);
            return Err(EngineError::NotFinite { step, what, value, checkpoint: None });
        }
        if let Some((needed_bytes, free_bytes)) = prepared.refused.filter(|_| !self.said_waits) {
            self.said_waits = true;
            on_event(RunEvent::SavesWait { needed_bytes, free_bytes });
        }
        self.saver.begin(&self.executor, self.header(), numbers[0] as u64)?;
        if waits {
            let mut bytes = [self.saver.done_bytes() as f64];
            self.executor.sum(&self.members, &mut bytes)?;
            self.note_saved(bytes[0] as u64, on_event)?;
        }
        Ok(())
    }

    /// Takes note that everyone's part of a save is written: it is a checkpoint, and older ones are not needed.
    fn note_saved(&mut self, bytes: u64, on_event: &mut dyn FnMut(RunEvent)) -> Result {
        let Some(Outcome { step, seconds, .. }) = self.saver.take_done() else { return Ok(()) };
        self.last_saved = Some(step);
        if self.metrics.is_some() {
            self.saver.collect(self.settings.checkpoints_kept)?;
            on_event(RunEvent::Saved { step, bytes, seconds });
        }
        Ok(())
    }

    /// What a checkpoint of now is of.
    fn header(&self) -> Header {
        let mut extra = BTreeMap::new();
        if let Some(scale) = &self.loss_scale {
            scale.save(&mut extra);
        }
        Header {
            job: self.fingerprint.clone(),
            step: self.step,
            position: self.step * self.plan.global_batch as u64,
            seed: self.settings.seed,
            rng: RNG.into(),
            plan: self.plan.id(),
            extra,
        }
    }
}
