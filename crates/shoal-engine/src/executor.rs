//! One program, once. The executor walks the list and does what each instruction says; which layer, which
//! samples and what to keep stand in the instruction. It checks on the way that what the program promised
//! holds: values are there when used, versions are the step's.

mod replay;
mod step;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use replay::Replay;
use replay::only_computes;
pub use step::{Batch, StepInput, StepOutcome};
use step::{Step, Stored};

use shoal_data::Inputs;
use shoal_kernels::device::SCALAR_ELEMENTS;
use shoal_kernels::{Device, Guard, Mat, Sgd, Stamp, Tensor, Updated};
use shoal_model::{Chain, LayerKind, Retention};
use shoal_nn::layer::{self, LossSink};
use shoal_nn::{Call, Feed, Gradients, Parameters, Randomness, Saved, head};
use shoal_plan::effects::Value;
use shoal_plan::{Instruction, Keep, Op, Program, Purpose, Samples, Tier};

use crate::error::{EngineError, Result};
use crate::state::{ModelState, write};

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
    /// When each instruction that computes was done, where someone asks: after the first stamp, one for each.
    stamps: Option<(Vec<Stamp>, Vec<Op>)>,
}

/// Samples on the device.
struct Loaded {
    inputs: Tensor,
    targets: Tensor,
    /// Of samples that may be shorter than the sequence.
    lengths: Option<Tensor>,
    /// Targets that count.
    count: u64,
}

impl Loaded {
    /// The same samples for one more step.
    fn share(&self) -> Loaded {
        Loaded {
            inputs: self.inputs.share(),
            targets: self.targets.share(),
            lengths: self.lengths.as_ref().map(Tensor::share),
            count: self.count,
        }
    }
}

impl Executor {
    pub fn new(
        device: Arc<dyn Device>,
        chain: Chain,
        sequence: usize,
        state: ModelState,
    ) -> Result<Executor> {
        let scalar = |who: &str| Tensor::new(device.arena(), who, SCALAR_ELEMENTS);
        let (loss, discarded_loss) = (scalar("the loss")?, scalar("the discarded loss")?);
        let (norm_squared, correct) = (scalar("the gradient norm")?, scalar("right predictions")?);
        let step_number = scalar("the step's number")?;
        static EXECUTORS: AtomicU64 = AtomicU64::new(0);
        Ok(Executor {
            number: EXECUTORS.fetch_add(1, Ordering::Relaxed),
            replay: Replay::Nothing,
            device,
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

    /// Runs a verified program.
    pub fn run(&mut self, program: &Program, input: &StepInput) -> Result<StepOutcome> {
        let device = self.device.clone();
        let mut result = Ok(StepOutcome::default());
        device.run(&mut || result = self.walk(program, input));
        result
    }

    fn walk(&mut self, program: &Program, input: &StepInput) -> Result<StepOutcome> {
        for sum in [&mut self.loss, &mut self.discarded_loss, &mut self.correct] {
            self.device.zero(sum)?;
        }
        if self.chain.drops() {
            self.device.set_scalar(&mut self.step_number, input.step as f64)?;
        }
        let mut step = Step {
            input,
            training: program.purpose == Purpose::Train,
            values: HashMap::new(),
            groups: HashMap::new(),
            global_batch: program.loaded_samples(),
            sums_loss: false,
            measures_norm: false,
            outcome: StepOutcome::default(),
        };
        let mut rest = program.instructions.as_slice();
        while let [instruction, after @ ..] = rest {
            // Instructions of a kind that stand together reach the device together: updates, because most tensors
            // are small, and what only computes, because it may be known already.
            let together = |like: fn(&Op) -> bool| rest.iter().take_while(|next| like(&next.op)).count();
            rest = if matches!(instruction.op, Op::Update { at: Tier::Device, .. }) {
                let (updates, others) =
                    rest.split_at(together(|op| matches!(op, Op::Update { at: Tier::Device, .. })));
                self.update(&mut step, updates)?;
                self.stamp(Some(instruction.op))?;
                others
            } else if only_computes(&instruction.op) && step.training {
                let (computing, others) = rest.split_at(together(only_computes));
                self.compute(&mut step, computing)?;
                others
            } else {
                self.execute(&mut step, instruction)?;
                after
            };
        }
        // The device has its work; what the next step needs is read and sent behind it.
        if let Some(next) = input.next.filter(|_| self.held.is_empty()) {
            self.read_ahead(program, input.step + 1, next)?;
        }
        self.finish(&mut step)?;
        Ok(step.outcome)
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
            Op::Predict { layer, samples } => self.predict(step, layer, samples),
            Op::SumLoss => Ok(()),
            Op::GradientNorm => self.gradient_norm(),
            _ => Err(EngineError::Movement { instruction: instruction.to_string() }),
        }
    }

    /// Reads the program's samples once, for all steps from now on: what is measured then is training alone.
    pub fn hold_samples(&mut self, program: &Program, batch: &dyn Batch) -> Result {
        for instruction in &program.instructions {
            if let Op::Load { samples } = instruction.op {
                let loaded = self.read(batch, samples)?;
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
            (None, None) => self.read(step.input.batch, samples)?,
        };
        step.outcome.targets += loaded.count;
        step.put(Value::Inputs(samples), Stored::Tensor(loaded.inputs));
        step.put(Value::Targets(samples), Stored::Tensor(loaded.targets));
        if let Some(lengths) = loaded.lengths {
            for layer in self.chain.length_readers() {
                step.put(Value::Lengths { layer, samples }, Stored::Tensor(lengths.share()));
            }
        }
        Ok(())
    }

    fn read(&self, batch: &dyn Batch, samples: Samples) -> Result<Loaded> {
        let (arena, device) = (self.device.arena(), &*self.device);
        let elements = samples.count() * self.chain.input_elements(self.sequence);
        let mut inputs = Tensor::new(arena, &format!("the inputs of {samples}"), elements)?;
        let mut target_ids = vec![0; samples.count() * self.chain.targets(self.sequence)];
        let mut targets = Tensor::new(arena, &format!("the targets of {samples}"), target_ids.len())?;
        let mut lengths = None;
        if self.chain.image.is_some() {
            write(device, &mut inputs, |out| {
                batch.read(samples.range(), Inputs::Images(out), &mut target_ids)
            })?;
        } else if self.chain.padded {
            let (mut tokens, mut counts) = (vec![0; elements], vec![0; samples.count()]);
            batch.read(samples.range(), Inputs::Padded(&mut tokens, &mut counts), &mut target_ids)?;
            let fits = |count: &i32| (1..=self.sequence as i32).contains(count);
            assert!(counts.iter().all(fits), "lengths of {counts:?} in sequences of {}", self.sequence);
            device.write_integers(&mut inputs, &tokens)?;
            let room = Tensor::new(arena, &format!("the lengths of {samples}"), counts.len())?;
            device.write_integers(lengths.insert(room), &counts)?;
        } else {
            let mut tokens = vec![0; elements];
            batch.read(samples.range(), Inputs::Tokens(&mut tokens), &mut target_ids)?;
            device.write_integers(&mut inputs, &tokens)?;
        }
        device.write_integers(&mut targets, &target_ids)?;
        let count = target_ids.iter().filter(|target| **target >= 0).count() as u64;
        Ok(Loaded { inputs, targets, lengths, count })
    }

    /// Reads what the program loads, for the step after this one.
    fn read_ahead(&mut self, program: &Program, step: u64, batch: &dyn Batch) -> Result {
        self.ahead = (step, HashMap::new());
        for instruction in &program.instructions {
            if let Op::Load { samples } = instruction.op {
                let loaded = self.read(batch, samples)?;
                self.ahead.1.insert(samples, loaded);
            }
        }
        Ok(())
    }

    /// What a layer is fed, taken from the values.
    fn feed(&self, step: &mut Step, layer: usize, samples: Samples) -> Feed {
        match self.chain.layers[layer].kind {
            LayerKind::Embedding(_) => Feed::Tokens(step.take_tensor(Value::Inputs(samples))),
            LayerKind::Patches(_) => Feed::Images(step.take_tensor(Value::Inputs(samples))),
            LayerKind::Block(_) if self.chain.takes_lengths(layer) => {
                let hidden = self.take_inputs(step, layer, samples).remove(0);
                Feed::Padded(hidden, step.take_tensor(Value::Lengths { layer, samples }))
            }
            LayerKind::Block(_) | LayerKind::Convolution(_) | LayerKind::Join(_) => {
                let mut inputs = self.take_inputs(step, layer, samples);
                match inputs.len() {
                    0 => Feed::Images(step.take_tensor(Value::Inputs(samples))),
                    1 => Feed::Hidden(inputs.remove(0)),
                    _ => Feed::Joined(inputs),
                }
            }
            LayerKind::Head(_) => {
                let hidden = self.take_inputs(step, layer, samples).remove(0);
                Feed::HiddenAndTargets(hidden, step.take_tensor(Value::Targets(samples)))
            }
        }
    }

    /// The outputs of earlier layers that a layer takes.
    fn take_inputs(&self, step: &mut Step, layer: usize, samples: Samples) -> Vec<Tensor> {
        let inputs = self.chain.layers[layer].inputs.iter();
        inputs
            .map(|from| step.take_tensor(Value::Activation { layer: *from, reader: layer, samples }))
            .collect()
    }

    /// The output for every reader: where branches part they share it, and only read it.
    fn part(&self, step: &mut Step, layer: usize, samples: Samples, output: &Tensor) {
        for reader in self.chain.readers(layer) {
            step.put(Value::Activation { layer, reader, samples }, Stored::Tensor(output.share()));
        }
    }

    /// The gradient of a layer's output, added up over its readers in their order; none for the last layer.
    fn merge(&self, step: &mut Step, layer: usize, samples: Samples) -> Result<Option<Tensor>> {
        let mut sum: Option<Tensor> = None;
        for reader in self.chain.readers(layer) {
            let part = step.take_tensor(Value::Gradient { layer, reader, samples });
            match &mut sum {
                None => sum = Some(part),
                Some(sum) => self.device.add_scaled(1.0, rows(&part, samples), (sum, true))?,
            }
        }
        Ok(sum)
    }

    /// The part of a forward that comes before its groups' statistics are complete.
    fn begin(&mut self, step: &mut Step, layer: usize, samples: Samples) -> Result {
        let feed = match self.chain.layers[layer].inputs.first() {
            Some(from) => {
                Feed::Hidden(step.take_tensor(Value::Activation { layer: *from, reader: layer, samples }))
            }
            None => Feed::Images(step.take_tensor(Value::Inputs(samples))),
        };
        let mut groups = step.groups.remove(&layer).unwrap_or_default();
        let (call, parameters) = context!(self).layer(step, layer, samples);
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
            let other = other
                .map(|from| step.take_tensor(Value::Activation { layer: *from, reader: layer, samples }));
            Feed::Begun(begun, other)
        } else {
            self.feed(step, layer, samples)
        };
        let retention = match keep {
            Keep::All => Retention::Saved,
            Keep::Input => Retention::Input,
            Keep::Nothing => Retention::Nothing,
        };
        let scale = step.loss_scale();
        let loss = LossSink { sum: &mut self.loss, scale, correct: Some(&mut self.correct) };
        let (call, parameters) = context!(self).layer(step, layer, samples);
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
            self.part(step, layer, samples, &output);
        }
        Ok(())
    }

    fn recompute(&mut self, step: &mut Step, layer: usize, samples: Samples) -> Result {
        let input = step.take_saved(Value::Input { layer, samples });
        let loss = LossSink { sum: &mut self.discarded_loss, scale: step.loss_scale(), correct: None };
        let (call, parameters) = context!(self).layer(step, layer, samples);
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
        let groups = step.groups.remove(&layer);
        let result = self.with_gradients(step, layer, samples, |kind, call, parameters, gradients| {
            layer::backward(kind, call, parameters, gradients, saved, gradient, groups.as_ref())
        })?;
        step.groups.extend(groups.map(|groups| (layer, groups)));
        for (from, gradient) in self.chain.layers[layer].inputs.iter().zip(result) {
            let value = Value::Gradient { layer: *from, reader: layer, samples };
            step.put(value, Stored::Tensor(gradient));
        }
        Ok(())
    }

    /// Lends a layer's gradient sums to a part of its backward.
    fn with_gradients<T>(
        &mut self,
        step: &Step,
        layer: usize,
        samples: Samples,
        work: impl FnOnce(&LayerKind, &Call, &Parameters, &mut Gradients) -> shoal_kernels::device::Result<T>,
    ) -> Result<T> {
        let slots = self.chain.layers[layer].tensors.clone();
        let lent = slots.iter().map(|(slot, tensor)| {
            let sum = self.state.tensors[*tensor].gradient.take();
            (*slot, sum.expect("a training program runs on a state that holds gradients"))
        });
        let mut gradients = Gradients::new(lent.collect());
        let result = {
            let (call, parameters) = context!(self).layer(step, layer, samples);
            work(&self.chain.layers[layer].kind, &call, &parameters, &mut gradients)
        };
        for ((_, sum), (_, tensor)) in gradients.into_entries().zip(&slots) {
            self.state.tensors[*tensor].gradient = Some(sum);
        }
        Ok(result?)
    }

    fn predict(&mut self, step: &mut Step, layer: usize, samples: Samples) -> Result {
        let LayerKind::Head(spec) = &self.chain.layers[layer].kind else {
            panic!("predictions come from the last layer")
        };
        let hidden = self.take_inputs(step, layer, samples).remove(0);
        step.take_tensor(Value::Targets(samples));
        let (call, parameters) = context!(self).layer(step, layer, samples);
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

    /// The norm of all parameters together: not a number as soon as one of them is not.
    pub fn parameter_norm(&mut self) -> Result<f64> {
        let parameters: Vec<&Tensor> = self.state.tensors.iter().map(|held| &held.parameter).collect();
        self.device.sum_squares(&parameters, &mut self.norm_squared)?;
        Ok(self.device.scalar(&self.norm_squared)?.sqrt())
    }

    fn gradient_norm(&mut self) -> Result {
        let trained = self.state.tensors.iter().zip(&self.chain.tensors);
        let trained = trained.filter(|(_, spec)| spec.running.is_none());
        let gradients: Vec<&Tensor> =
            trained.filter_map(|(held, _)| held.gradient.as_ref().map(|sum| &sum.sum)).collect();
        Ok(self.device.sum_squares(&gradients, &mut self.norm_squared)?)
    }

    /// Updates of several tensors, at once.
    fn update(&mut self, step: &mut Step, updates: &[Instruction]) -> Result {
        let settings = step.input.optimizer.expect("a training program comes with an optimizer");
        let mut wanted = vec![false; self.state.tensors.len()];
        for instruction in updates {
            if let Op::Update { tensor, .. } = instruction.op {
                wanted[tensor] = true;
            }
        }
        let mut tensors = Vec::with_capacity(updates.len());
        // Statistics, by the share of a step's in them.
        let mut running: Vec<(f32, Vec<Updated>)> = Vec::new();
        let all = self.state.tensors.iter_mut().zip(&self.chain.tensors).zip(wanted);
        for ((held, spec), _) in all.filter(|(_, wanted)| *wanted) {
            assert_eq!(held.version, step.input.step, "{} is at another version than the step", spec.name);
            held.version += 1;
            let gradient = held.gradient.as_mut().expect("the gradient was summed before the update");
            gradient.started = false;
            if let Some(share) = spec.running {
                // p -= share * (p - value), the sum being the value's negative: descent with a decay of one.
                let (state, copy) = (&mut [][..], held.copy.as_mut());
                let (gradient, parameter) = (&gradient.sum, &mut held.parameter);
                let updated = Updated { gradient, state, parameter, copy, weight_decay: 1.0 };
                match running.iter_mut().find(|(other, _)| *other == share) {
                    Some((_, all)) => all.push(updated),
                    None => running.push((share, vec![updated])),
                }
                continue;
            }
            tensors.push(Updated {
                gradient: &gradient.sum,
                state: &mut held.optimizer,
                parameter: &mut held.parameter,
                copy: held.copy.as_mut(),
                weight_decay: settings.decay_of(spec),
            });
        }
        let guard = Guard {
            norm_squared: &self.norm_squared,
            loss: &self.loss,
            scale: step.input.loss_scale,
            clip_norm: settings.clip_norm,
        };
        settings.apply(&*self.device, step.input.lr, step.input.updates + 1, guard, &mut tensors)?;
        // Statistics are no gradients: neither the loss scale nor clipping reaches them.
        let unclipped = Guard { scale: 1.0, clip_norm: None, ..guard };
        for (share, mut all) in running {
            let settings = Sgd { lr: share, momentum: 0.0, update: step.input.updates + 1 };
            self.device.sgd(&settings, unclipped, &mut all)?;
        }
        Ok(())
    }
}

/// A value as a row a sample.
fn rows(value: &Tensor, samples: Samples) -> Mat<'_> {
    Mat::new(value, samples.count(), value.len() / samples.count())
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
    fn layer(&self, step: &Step, layer: usize, samples: Samples) -> (Call<'a>, Parameters<'a>) {
        (self.call(step, layer, samples), self.parameters(step, layer))
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

    fn parameters(&self, step: &Step, layer: usize) -> Parameters<'a> {
        let entries = self.chain.layers[layer].tensors.iter().map(|(slot, tensor)| {
            let held = &self.state.tensors[*tensor];
            assert!(
                !step.training || held.version == step.input.step,
                "tensor {tensor} is at version {}, the step reads {}",
                held.version,
                step.input.step
            );
            (*slot, held.compute())
        });
        Parameters::new(entries.collect())
    }
}
