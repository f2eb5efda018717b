//! One program, once. The executor walks the list and does what each instruction says; which layer, which
//! samples and what to keep stand in the instruction. It checks on the way that what the program promised
//! holds: values are there when used, versions are the step's.

mod behind;
mod between;
mod clockwork;
mod gradients;
mod moves;
mod pieces;
mod replay;
mod settle;
mod step;
mod transfers;
mod updates;
mod walk;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use behind::Behind;
use clockwork::Clockwork;
pub use clockwork::Traced;
pub use replay::Replay;
use settle::Progress;
pub use step::{Batch, StepInput, StepOutcome, Tells};
use step::{Step, Stored};

use shoal_data::Inputs;
use shoal_kernels::device::SCALAR_ELEMENTS;
use shoal_kernels::{Device, Stamp, Tensor};
use shoal_model::{Chain, LayerKind, Retention, TensorSpec};
use shoal_net::Fabric;
use shoal_nn::layer::{self, LossSink};
use shoal_nn::{Call, Feed, Gradients, Parameters, Randomness, Saved, head};
use shoal_plan::effects::Value;
use shoal_plan::{Activations, Closing, Instruction, Keep, Layout, Op, Program, Purpose, Samples};

use crate::error::{EngineError, Result};
use crate::lanes::Lanes;
use crate::state::{ModelState, gradient_room, write};
use crate::tiers::Tiers;

/// An executor's [`Context`]. No method: that would borrow the sums, which instructions write meanwhile.
macro_rules! context {
    ($executor:ident) => {
        Context {
            device: &*$executor.device,
            chain: &$executor.chain,
            state: &$executor.state,
            step_number: &$executor.step_number,
            sequence: $executor.sequence,
        }
    };
}

/// A device with its model.
pub struct Executor {
    /// Unlike any other executor's.
    number: u64,
    replay: Replay,
    device: Arc<dyn Device>,
    tiers: Tiers,
    /// The way to the other devices.
    fabric: Option<Arc<Fabric>>,
    lanes: Lanes,
    behind: Behind,
    clockwork: Clockwork,
    /// Programs run so far, which is the same number at everyone who takes part: messages are known by it.
    runs: u64,
    chain: Chain,
    sequence: usize,
    pub state: ModelState,
    loss: Tensor,
    /// Takes the loss of recomputed forwards, which was counted before.
    discarded_loss: Tensor,
    norm_squared: Tensor,
    /// Samples whose class was predicted rightly.
    correct: Tensor,
    /// The number of the step, for what is drawn at random.
    step_number: Tensor,
    /// Samples read ahead, and the step they are for.
    ahead: (u64, HashMap<Samples, Loaded>),
    /// Samples that every step is given, whichever it asks for.
    held: HashMap<Samples, Loaded>,
    /// The training step under way, or what there was of it when it was cut short.
    progress: Option<Progress>,
    /// Of the last training step that came to its end.
    closed: Option<Closing>,
    /// A tensor that an update was at when the device failed.
    torn: Option<usize>,
    /// Asked before each instruction whether it may still be done.
    gate: Option<Gate>,
    /// When each instruction that computes was done, where someone asks: after the first stamp, one for each.
    stamps: Option<(Vec<Stamp>, Vec<Op>)>,
}

/// Whether what is under way may go on: a lease may have run out, or someone wants it to stop.
pub type Gate = Arc<dyn Fn() -> bool + Send + Sync>;

/// Samples on the device.
struct Loaded {
    inputs: Option<Tensor>,
    targets: Option<Tensor>,
    /// Of samples that may be shorter than the sequence.
    lengths: Option<Tensor>,
    /// Targets that count.
    count: u64,
}

/// What is brought onto the device of some samples.
#[derive(Clone, Copy)]
struct Wanted {
    inputs: bool,
    targets: bool,
    lengths: bool,
}

impl Wanted {
    const ALL: Wanted = Wanted { inputs: true, targets: true, lengths: true };
}

impl Loaded {
    /// The same samples for one more step.
    fn share(&self) -> Loaded {
        Loaded {
            inputs: self.inputs.as_ref().map(Tensor::share),
            targets: self.targets.as_ref().map(Tensor::share),
            lengths: self.lengths.as_ref().map(Tensor::share),
            count: self.count,
        }
    }
}

impl Executor {
    /// A device that has all of a model in its own memory.
    pub fn new(
        device: Arc<dyn Device>,
        chain: Chain,
        sequence: usize,
        state: ModelState,
    ) -> Result<Executor> {
        Executor::with(Tiers::only(device)?, None, chain, sequence, state)
    }

    /// One of a plan's devices, with its share of the model.
    pub fn with(
        tiers: Tiers,
        fabric: Option<Arc<Fabric>>,
        chain: Chain,
        sequence: usize,
        state: ModelState,
    ) -> Result<Executor> {
        let device = tiers.device.clone();
        let scalar = |who: &str| Tensor::new(device.arena(), who, SCALAR_ELEMENTS);
        let (loss, discarded_loss) = (scalar("the loss")?, scalar("the discarded loss")?);
        let (norm_squared, correct) = (scalar("the gradient norm")?, scalar("right predictions")?);
        let step_number = scalar("the step's number")?;
        static EXECUTORS: AtomicU64 = AtomicU64::new(0);
        Ok(Executor {
            number: EXECUTORS.fetch_add(1, Ordering::Relaxed),
            replay: Replay::Nothing,
            device,
            tiers,
            fabric,
            lanes: Lanes::default(),
            behind: Behind::default(),
            clockwork: Clockwork::default(),
            runs: 0,
            chain,
            sequence,
            state,
            loss,
            discarded_loss,
            norm_squared,
            correct,
            step_number,
            ahead: (0, HashMap::new()),
            held: HashMap::new(),
            progress: None,
            closed: None,
            torn: None,
            gate: None,
            stamps: None,
        })
    }

    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    pub fn chain(&self) -> &Chain {
        &self.chain
    }

    pub fn sequence(&self) -> usize {
        self.sequence
    }

    /// Changes the sequence length of what runs next; rotary models need a table at least that long.
    pub fn set_sequence(&mut self, sequence: usize) {
        self.sequence = sequence;
    }

    /// Makes each instruction of training programs last so long, by its number: the device plays another one. Messages
    /// are not held up here: that is the fabric's part.
    pub fn set_pace(&mut self, durations: Vec<Duration>) {
        self.clockwork.pace = Some(durations);
    }

    /// Whether programs that run from now on note when their instructions were under way.
    pub fn set_traces(&mut self, traces: bool) {
        self.clockwork.traces = traces;
    }

    /// What was noted since the last time.
    pub fn take_traced(&mut self) -> Vec<Traced> {
        std::mem::take(&mut self.clockwork.traced)
    }

    /// The way to the others, which were not to be reached yet when the state was set.
    pub fn set_fabric(&mut self, fabric: Option<Arc<Fabric>>) {
        self.fabric = fabric;
    }

    /// Has programs ask before each instruction, updates among them, whether they may go on; they end with
    /// [`EngineError::Stopped`] where not, and the state can be settled as after any failure.
    pub fn set_gate(&mut self, gate: Option<Gate>) {
        self.gate = gate;
    }

    pub fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    /// Runs a verified program of a device that has all to itself.
    pub fn run(&mut self, program: &Program, input: &StepInput) -> Result<StepOutcome> {
        self.run_in(None, program, input)
    }

    /// Runs a verified program of one of a table's devices, the one that this executor's state was allocated for; without
    /// a table, of a device that has all to itself.
    pub fn run_in(
        &mut self,
        layout: Option<&Layout>,
        program: &Program,
        input: &StepInput,
    ) -> Result<StepOutcome> {
        let goes_on = program.purpose == Purpose::Train && layout.is_some();
        if !goes_on {
            self.wait_for_updates();
        }
        if let Some(error) = self.behind.take_failure() {
            return Err(error);
        }
        let device = self.device.clone();
        let mut result = Ok(StepOutcome::default());
        self.runs += 1;
        device.run(&mut || result = self.walk(program, layout, input));
        result
    }

    /// Sets whatever of the state is here: see [`ModelState::load_ranges`].
    pub fn load_state(
        &mut self,
        states: &[&'static str],
        version: u64,
        read: impl FnMut(&TensorSpec, &'static str, Range<usize>, &mut [f32]) -> Result,
    ) -> Result {
        self.catch_up()?;
        self.state.load_ranges(&self.tiers, &self.chain, states, version, read)
    }

    fn execute(&mut self, step: &mut Step, instruction: &Instruction) -> Result {
        step.note(&instruction.op);
        match instruction.op {
            Op::Load { samples } => self.load(step, samples),
            Op::CountTargets => step.count_targets(),
            Op::Begin { layer, samples } => self.begin(step, layer, samples),
            Op::Forward { layer, samples, keep } => self.forward(step, layer, samples, keep),
            Op::Recompute { layer, samples } => self.recompute(step, layer, samples),
            Op::BeginBackward { layer, samples } => self.begin_backward(step, layer, samples),
            Op::Backward { layer, samples } => self.backward(step, layer, samples),
            Op::WeightGradients { layer, samples } => self.weight_gradients(step, layer, samples),
            Op::Predict { layer, samples } => self.predict(step, layer, samples),
            Op::Release { layer, pass } => {
                self.release(layer, pass);
                Ok(())
            }
            Op::SumLoss => Ok(()),
            Op::GradientNorm => self.gradient_norm(step),
            _ => Err(EngineError::Movement { instruction: instruction.to_string() }),
        }
    }

    /// Reads the program's samples once, for all steps from now on: what is measured then is training alone.
    pub fn hold_samples(&mut self, program: &Program, batch: &dyn Batch) -> Result {
        for instruction in &program.instructions {
            if let Op::Load { samples } = instruction.op {
                let loaded = self.read(batch, samples, Wanted::ALL)?;
                self.held.insert(samples, loaded);
            }
        }
        Ok(())
    }

    fn load(&mut self, step: &mut Step, samples: Samples) -> Result {
        let ahead = if self.ahead.0 == step.input.step { self.ahead.1.remove(&samples) } else { None };
        let loaded = match (self.held.get(&samples), ahead.filter(|_| step.training)) {
            (Some(held), _) => held.share(),
            (None, Some(ahead)) => ahead,
            (None, None) => self.read(step.input.batch, samples, self.wanted(step, samples))?,
        };
        step.own_targets += loaded.count;
        step.outcome.targets += loaded.count;
        if let Some(inputs) = loaded.inputs {
            step.put(Value::Inputs(samples), Stored::Tensor(inputs));
        }
        if let Some(targets) = loaded.targets {
            step.put(Value::Targets(samples), Stored::Tensor(targets));
        }
        if let Some(lengths) = loaded.lengths {
            for layer in self.told(step, samples) {
                step.put(Value::Lengths { layer, samples }, Stored::Tensor(lengths.share()));
            }
        }
        Ok(())
    }

    /// Layers that are told these samples' lengths here.
    fn told(&self, step: &Step, samples: Samples) -> Vec<usize> {
        match step.layout {
            Some(layout) => layout.told_lengths(step.device, samples).collect(),
            None => self.chain.length_readers().collect(),
        }
    }

    /// What of these samples this device needs.
    fn wanted(&self, step: &Step, samples: Samples) -> Wanted {
        let Some(layout) = step.layout else { return Wanted::ALL };
        let computes = |layer: usize| layout.share(step.device, layer, samples).is_some();
        Wanted {
            inputs: computes(0),
            targets: computes(self.chain.layers.len() - 1),
            lengths: !self.told(step, samples).is_empty(),
        }
    }

    fn read(&self, batch: &dyn Batch, samples: Samples, wanted: Wanted) -> Result<Loaded> {
        let (arena, device) = (self.device.arena(), &*self.device);
        let elements = samples.count() * self.chain.input_elements(self.sequence);
        let room =
            |what: &str, elements: usize| Tensor::new(arena, &format!("the {what} of {samples}"), elements);
        let mut inputs = wanted.inputs.then(|| room("inputs", elements)).transpose()?;
        let mut target_ids = vec![0; samples.count() * self.chain.targets(self.sequence)];
        let mut lengths = None;
        if self.chain.image.is_some() {
            match &mut inputs {
                Some(inputs) => write(device, inputs, |out| {
                    batch.read(samples.range(), Inputs::Images(out), &mut target_ids)
                })?,
                None => {
                    batch.read(samples.range(), Inputs::Images(&mut vec![0.0; elements]), &mut target_ids)?;
                }
            }
        } else {
            let mut tokens = vec![0; elements];
            if self.chain.padded {
                let mut counts = vec![0; samples.count()];
                batch.read(samples.range(), Inputs::Padded(&mut tokens, &mut counts), &mut target_ids)?;
                let fits = |count: &i32| (1..=self.sequence as i32).contains(count);
                assert!(counts.iter().all(fits), "lengths of {counts:?} in sequences of {}", self.sequence);
                if wanted.lengths {
                    device.write_integers(lengths.insert(room("lengths", counts.len())?), &counts)?;
                }
            } else {
                batch.read(samples.range(), Inputs::Tokens(&mut tokens), &mut target_ids)?;
            }
            if let Some(inputs) = &mut inputs {
                device.write_integers(inputs, &tokens)?;
            }
        }
        let mut targets = wanted.targets.then(|| room("targets", target_ids.len())).transpose()?;
        if let Some(targets) = &mut targets {
            device.write_integers(targets, &target_ids)?;
        }
        let counts = target_ids.iter().filter(|target| wanted.targets && **target >= 0);
        Ok(Loaded { inputs, targets, lengths, count: counts.count() as u64 })
    }

    /// Reads what the program loads, for the step after this one.
    fn read_ahead(&mut self, program: &Program, step: u64, batch: &dyn Batch) -> Result {
        self.ahead = (step, HashMap::new());
        for instruction in &program.instructions {
            if let Op::Load { samples } = instruction.op {
                let loaded = self.read(batch, samples, Wanted::ALL)?;
                self.ahead.1.insert(samples, loaded);
            }
        }
        Ok(())
    }

    /// What a layer is fed, taken from the values.
    fn feed(&self, step: &mut Step, layer: usize, samples: Samples) -> Result<Feed> {
        Ok(match self.chain.layers[layer].kind {
            LayerKind::Embedding(_) => Feed::Tokens(step.take_tensor(Value::Inputs(samples))),
            LayerKind::Patches(_) => Feed::Images(step.take_tensor(Value::Inputs(samples))),
            LayerKind::Block(_) if self.chain.takes_lengths(layer) => {
                let hidden = self.take_inputs(step, layer, samples)?.remove(0);
                Feed::Padded(hidden, step.take_tensor(Value::Lengths { layer, samples }))
            }
            LayerKind::Block(_) | LayerKind::Convolution(_) | LayerKind::Join(_) => {
                let mut inputs = self.take_inputs(step, layer, samples)?;
                match inputs.len() {
                    0 => Feed::Images(step.take_tensor(Value::Inputs(samples))),
                    1 => Feed::Hidden(inputs.remove(0)),
                    _ => Feed::Joined(inputs),
                }
            }
            LayerKind::Head(_) => {
                let hidden = self.take_inputs(step, layer, samples)?.remove(0);
                Feed::HiddenAndTargets(hidden, step.take_tensor(Value::Targets(samples)))
            }
        })
    }

    /// The part of a forward that comes before its groups' statistics are complete.
    fn begin(&mut self, step: &mut Step, layer: usize, samples: Samples) -> Result {
        let feed = match self.chain.layers[layer].inputs.first() {
            Some(from) => Feed::Hidden(self.take_input(step, layer, *from, samples)?),
            None => Feed::Images(step.take_tensor(Value::Inputs(samples))),
        };
        let mut groups = step.groups.remove(&layer).unwrap_or_default();
        let (call, parameters) = context!(self).layer(step, layer, samples, false);
        let kind = &self.chain.layers[layer].kind;
        let begun = layer::begin(kind, &call, &parameters, feed, &mut groups)?;
        step.groups.insert(layer, groups);
        step.put(Value::Begun { layer, samples }, Stored::Saved(Box::new(begun)));
        Ok(())
    }

    fn forward(&mut self, step: &mut Step, layer: usize, samples: Samples, keep: Keep) -> Result {
        let begun = keep != Keep::Nothing && self.chain.batch_norm(layer).is_some();
        let feed = if begun {
            let Saved::Begun(begun) = step.take_saved(Value::Begun { layer, samples }) else {
                panic!("layer {layer} did not begin")
            };
            let other = self.chain.layers[layer].inputs.get(1);
            let other = other.map(|from| self.take_input(step, layer, *from, samples)).transpose()?;
            Feed::Begun(begun, other)
        } else {
            self.feed(step, layer, samples)?
        };
        let retention = match keep {
            Keep::All => Retention::Saved,
            Keep::Input => Retention::Input,
            Keep::Nothing => Retention::Nothing,
        };
        let scale = step.loss_scale();
        let loss = LossSink { sum: &mut self.loss, scale, correct: Some(&mut self.correct) };
        let (call, parameters) = context!(self).layer(step, layer, samples, false);
        let kind = &self.chain.layers[layer].kind;
        let groups = step.groups.get(&layer);
        let (output, saved) = layer::forward(kind, &call, &parameters, feed, retention, groups, Some(loss))?;
        if let Some(saved) = saved {
            let value = match keep {
                Keep::Input => Value::Input { layer, samples },
                _ => Value::Saved { layer, samples },
            };
            step.put(value, Stored::Saved(Box::new(saved)));
        }
        if let Some(output) = output {
            self.hand_on(step, layer, samples, output)?;
        }
        Ok(())
    }

    fn recompute(&mut self, step: &mut Step, layer: usize, samples: Samples) -> Result {
        let offloaded = step.layout.and_then(|layout| layout.share(step.device, layer, samples));
        let input =
            step.take_saved(match offloaded.is_some_and(|share| share.activations == Activations::Offload) {
                true => Value::Restored { layer, samples },
                false => Value::Input { layer, samples },
            });
        let loss = LossSink { sum: &mut self.discarded_loss, scale: step.loss_scale(), correct: None };
        let (call, parameters) = context!(self).layer(step, layer, samples, true);
        let saved = layer::recompute(&self.chain.layers[layer].kind, &call, &parameters, input, Some(loss))?;
        step.put(Value::Saved { layer, samples }, Stored::Saved(Box::new(saved)));
        Ok(())
    }

    /// The part of a backward that comes before its groups' sums are complete.
    fn begin_backward(&mut self, step: &mut Step, layer: usize, samples: Samples) -> Result {
        let saved = step.take_saved(Value::Saved { layer, samples });
        let gradient = self.merge(step, layer, samples)?;
        let mut groups = step.groups.remove(&layer).expect("the layer began its forward");
        let begun = self.with_gradients(step, layer, samples, |kind, call, parameters, gradients| {
            layer::begin_backward(kind, call, parameters, gradients, saved, gradient, &mut groups)
        })?;
        step.groups.insert(layer, groups);
        step.put(Value::BegunBackward { layer, samples }, Stored::Saved(Box::new(begun)));
        Ok(())
    }

    fn backward(&mut self, step: &mut Step, layer: usize, samples: Samples) -> Result {
        let (saved, gradient) = match self.chain.batch_norm(layer) {
            Some(_) => (step.take_saved(Value::BegunBackward { layer, samples }), None),
            None => {
                let saved = step.take_saved(Value::Saved { layer, samples });
                (saved, self.merge(step, layer, samples)?)
            }
        };
        if step.puts_off.contains(&layer) {
            let (result, put_off) =
                self.with_gradients(step, layer, samples, |kind, call, parameters, gradients| {
                    layer::backward_putting_off(kind, call, parameters, gradients, saved, gradient)
                })?;
            step.put(Value::PutOff { layer, samples }, Stored::Saved(Box::new(put_off)));
            return self.hand_back(step, layer, samples, result);
        }
        let groups = step.groups.remove(&layer);
        let result = self.with_gradients(step, layer, samples, |kind, call, parameters, gradients| {
            layer::backward(kind, call, parameters, gradients, saved, gradient, groups.as_ref())
        })?;
        step.groups.extend(groups.map(|groups| (layer, groups)));
        self.hand_back(step, layer, samples, result)
    }

    /// What a backward put off. The parameters may have been given back since.
    fn weight_gradients(&mut self, step: &mut Step, layer: usize, samples: Samples) -> Result {
        let put_off = step.take_saved(Value::PutOff { layer, samples });
        let mut gradients = self.lend_gradients(layer)?;
        let call = context!(self).call(step, layer, samples);
        let kind = &self.chain.layers[layer].kind;
        let result = layer::weight_gradients(kind, &call, &mut gradients, &put_off);
        self.take_gradients_back(layer, gradients);
        Ok(result?)
    }

    /// Lends a layer's gradient sums to a part of its backward.
    fn with_gradients<T>(
        &mut self,
        step: &Step,
        layer: usize,
        samples: Samples,
        work: impl FnOnce(&LayerKind, &Call, &Parameters, &mut Gradients) -> shoal_kernels::device::Result<T>,
    ) -> Result<T> {
        let mut gradients = self.lend_gradients(layer)?;
        let result = {
            let (call, parameters) = context!(self).layer(step, layer, samples, true);
            work(&self.chain.layers[layer].kind, &call, &parameters, &mut gradients)
        };
        self.take_gradients_back(layer, gradients);
        Ok(result?)
    }

    fn lend_gradients(&mut self, layer: usize) -> Result<Gradients> {
        let slots = &self.chain.layers[layer].tensors;
        let mut lent = Vec::with_capacity(slots.len());
        for (slot, tensor) in slots {
            let sum = match self.state.tensors[*tensor].gradient.take() {
                Some(sum) => sum,
                // A sum that is kept elsewhere begins with the first addition here.
                None => gradient_room(&*self.device, &self.chain, *tensor, self.state.precision)?,
            };
            lent.push((*slot, sum));
        }
        Ok(Gradients::new(lent))
    }

    fn take_gradients_back(&mut self, layer: usize, gradients: Gradients) {
        for ((_, sum), (_, tensor)) in gradients.into_entries().zip(&self.chain.layers[layer].tensors) {
            self.state.tensors[*tensor].gradient = Some(sum);
        }
    }

    fn predict(&mut self, step: &mut Step, layer: usize, samples: Samples) -> Result {
        let LayerKind::Head(spec) = &self.chain.layers[layer].kind else {
            panic!("predictions come from the last layer")
        };
        let hidden = self.take_inputs(step, layer, samples)?.remove(0);
        step.take_tensor(Value::Targets(samples));
        let (call, parameters) = context!(self).layer(step, layer, samples, false);
        let logits = head::predict(spec, &call, &parameters, &hidden)?;
        let columns = spec.logit_columns(self.state.precision);
        for row in self.device.host_floats(&logits)?.chunks(columns) {
            step.outcome.logits.extend_from_slice(&row[..spec.vocabulary]);
        }
        Ok(())
    }

    /// The one place where a step waits for its device: loss and norm come over together. Updates have
    /// looked at both on the device and changed nothing where one of them is no number, so a run that stops
    /// here still has its last good parameters.
    fn finish(&mut self, step: &mut Step) -> Result {
        if !step.sums_loss {
            return Ok(());
        }
        let scalars = self.device.scalars(&[&self.loss, &self.norm_squared, &self.correct])?;
        step.outcome.loss_sum = scalars[0];
        self.note_ended(&scalars);
        step.outcome.correct = self.chain.image.map(|_| scalars[2] as u64);
        let loss = step.outcome.loss();
        if step.training && !loss.is_finite() {
            return Err(step.not_finite("loss", loss));
        }
        if step.measures_norm {
            let norm = scalars[1].sqrt() / f64::from(step.input.loss_scale);
            step.outcome.gradient_norm = norm;
            step.outcome.overflowed = !norm.is_finite();
            if step.outcome.overflowed && step.input.loss_scale == 1.0 {
                return Err(step.not_finite("norm of the gradient", norm));
            }
        }
        Ok(())
    }
}

/// What instructions of a layer read, borrowed apart from what they write.
struct Context<'a> {
    device: &'a dyn Device,
    chain: &'a Chain,
    state: &'a ModelState,
    step_number: &'a Tensor,
    sequence: usize,
}

impl<'a> Context<'a> {
    /// What one of the layer's instructions is handed.
    fn layer(
        &self,
        step: &Step,
        layer: usize,
        samples: Samples,
        backward: bool,
    ) -> (Call<'a>, Parameters<'a>) {
        (self.call(step, layer, samples), self.parameters(step, layer, backward))
    }

    fn call(&self, step: &Step, layer: usize, samples: Samples) -> Call<'a> {
        let randomness = Randomness { seed: step.input.seed, step: self.step_number };
        Call {
            device: self.device,
            layer,
            samples: samples.range(),
            global_batch: step.global_batch,
            sequence: self.sequence,
            randomness: step.training.then_some(randomness),
            batch_statistics: step.training || step.input.batch_statistics,
            precision: self.state.precision,
            rotary: self.state.rotary.as_ref(),
        }
    }

    fn parameters(&self, step: &Step, layer: usize, backward: bool) -> Parameters<'a> {
        let pass = step.layout.map(|layout| layout.pass(backward));
        let entries = self.chain.layers[layer].tensors.iter().map(|(slot, tensor)| {
            let (copy, version) = self.state.compute(layer, pass, *tensor);
            let wanted = step.input.step;
            assert!(
                !step.training || version == wanted,
                "tensor {tensor} is at version {version}, the step reads {wanted}"
            );
            (*slot, copy)
        });
        Parameters::new(entries.collect())
    }
}
