//! The job that the fleet trains: a tiny transformer on text that is made up. Also the same on one device, uninterrupted,
//! which is what the fleet's curve is held to.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shoal_crew::assembly::{Assembled, Paced};
use shoal_crew::held_out::HeldOut;
use shoal_data::{Dataset, DatasetSpec, Inputs, Order, Tokenizer};
use shoal_engine::executor::Batch;
use shoal_engine::stepping::{Terms, Work};
use shoal_engine::{Executor, ModelState, Replay, StepInput, Tiers};
use shoal_kernels::{CpuDevice, Device, LateDevice, Lateness};
use shoal_model::{Chain, Precision, presets};
use shoal_nn::{Decay, OptimizerKind, OptimizerSettings, Schedule, ScheduleKind, init};
use shoal_plan::one_device::table;
use shoal_plan::{Activations, DeviceOffer, Op, Plan, Program, Purpose, StepShape, compile};
use shoal_state::checkpoint::Store;

pub const GLOBAL_BATCH: usize = 8;
pub const SEQUENCE: usize = 16;
/// How long peers are waited for until they are connected.
pub const JOIN_DEADLINE: Duration = Duration::from_secs(6);
const VOCABULARY: usize = 256;
const SEED: u64 = 11;
const TEXT: &str = "text.txt";
const HELD_OUT: &str = "held-out.txt";
/// Enough of them that a worker can be killed in their midst.
const HELD_OUT_BATCHES: usize = 50;

/// What the controller is given, and engines read.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Description {
    pub folder: PathBuf,
    pub steps: u64,
    /// Of a device's own memory.
    pub device_bytes: u64,
    /// What each forward and backward of a micro-batch is made to last.
    pub paced_us: u64,
    pub lr: f64,
    /// After how many steps held-out loss is measured, if it is.
    pub eval_every: Option<u64>,
    /// A worker whose work lasts so many times as long as it should.
    pub slow: Option<(String, u32)>,
    /// One that takes longer to get ready than peers wait for a connection.
    pub late: Option<String>,
}

impl Description {
    pub fn text(&self) -> String {
        serde_json::to_string(self).expect("plain data is JSON")
    }

    /// Makes the folder's content.
    pub fn prepare(&self) {
        let words = ["shoal", "of", "fish", "turns", "at", "once", "and", "none", "leads", "it"];
        let mut number = 7u64;
        let mut text = String::new();
        while text.len() < 20_000 {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            text += words[(number >> 33) as usize % words.len()];
            text.push(if (number >> 60) == 0 { '\n' } else { ' ' });
        }
        let write = |name: &str, text: &str| {
            std::fs::write(self.folder.join(name), text).expect("the folder can be written");
        };
        // A number of samples that leaves the last batch smaller than the others.
        write(HELD_OUT, &text[..SEQUENCE * (HELD_OUT_BATCHES * GLOBAL_BATCH + 3) + 1]);
        write(TEXT, &text);
        Store::open(&self.folder.join("checkpoints")).expect("a store");
    }
}

pub fn chain() -> Chain {
    Chain::new(&presets::gpt2(VOCABULARY, 32, 4, 4, 64))
}

pub fn shape() -> StepShape {
    StepShape {
        global_batch: GLOBAL_BATCH,
        sequence: SEQUENCE,
        precision: Precision::Fp32,
        optimizer_states: optimizer(0.0).state_names().len(),
        gradients: Default::default(),
    }
}

fn optimizer(lr: f64) -> OptimizerSettings {
    OptimizerSettings {
        // Far above rounding: with the usual 1e-8, a gradient that is nothing but rounding makes a whole step.
        kind: OptimizerKind::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-4 },
        lr,
        weight_decay: 0.1,
        decay: Decay::Matrices,
        clip_norm: Some(1.0),
    }
}

fn schedule() -> Schedule {
    Schedule { kind: ScheduleKind::Cosine, warmup: 5, final_share: 0.1 }
}

fn data(folder: &Path, name: &str, cache: &str) -> Dataset {
    let source = folder.join(name);
    let spec = DatasetSpec::new(source, Arc::new(Tokenizer::Bytes), SEQUENCE, VOCABULARY, folder.join(cache));
    Dataset::open(&spec, &mut |_, _| {}).expect("the data opens")
}

/// A worker's parts of the job. `cache` is its own: several start at once.
pub fn assemble(
    text: &str,
    worker: &str,
    cache: &str,
) -> Result<Assembled, Box<dyn std::error::Error + Send + Sync>> {
    let description: Description = serde_json::from_str(text)?;
    if description.late.as_deref() == Some(worker) {
        std::thread::sleep(JOIN_DEADLINE + Duration::from_secs(1));
    }
    let disk = description.folder.join("disk");
    std::fs::create_dir_all(&disk)?;
    // Some workers' devices work behind the host's back, as GPUs do.
    let own_bytes = CpuDevice::workspace_bytes(1);
    let late = |lateness: Lateness| LateDevice::new("cpu", description.device_bytes - own_bytes, lateness);
    let device: Arc<dyn Device> = match worker.bytes().map(usize::from).sum::<usize>() % 3 {
        0 => Arc::new(CpuDevice::new("cpu", 1, description.device_bytes)?),
        1 => Arc::new(late(Lateness::UntilAsked)?),
        _ => Arc::new(late(Lateness::Random(SEED))?),
    };
    let tiers = Tiers::around(device, "host", 1, 64 << 20, &disk)?;
    let slow = description.slow.as_ref().filter(|(slow, _)| slow == worker);
    let times = slow.map_or(1, |(_, times)| *times);
    let lasts = times * Duration::from_micros(description.paced_us);
    let paced: Paced = Arc::new(move |_: &Plan, program: &Program| {
        let last = program.instructions.iter().map(|next| next.id).max().unwrap_or(0);
        let mut durations = vec![Duration::ZERO; last as usize + 1];
        for next in &program.instructions {
            if matches!(next.op, Op::Forward { .. } | Op::Backward { .. }) {
                durations[next.id as usize] = lasts;
            }
        }
        durations
    });
    Ok(Assembled {
        chain: chain(),
        data: data(&description.folder, TEXT, cache),
        held_out: description
            .eval_every
            .map(|every_steps| HeldOut { data: data(&description.folder, HELD_OUT, cache), every_steps }),
        shuffle: true,
        seed: SEED,
        steps: description.steps,
        optimizer: optimizer(description.lr),
        schedule: schedule(),
        initial: Box::new(|spec, out| {
            init::fill(spec, SEED, 0, out);
            Ok(())
        }),
        tiers,
        replay: Replay::Step,
        paced: Some(paced),
        timed_every: 1,
        store: Some(Store::open_existing(&description.folder.join("checkpoints"))?),
        fingerprint: "the fleet's".into(),
    })
}

/// The job on one device that nothing interrupts.
pub fn uninterrupted(description: &Description) -> Curve {
    let (chain, optimizer, schedule) = (chain(), optimizer(description.lr), schedule());
    let device: Arc<dyn Device> = Arc::new(CpuDevice::new("cpu", 1, 64 << 20).expect("memory"));
    let mut state = ModelState::allocate(&*device, &chain, SEQUENCE, Precision::Fp32, Some(&optimizer))
        .expect("room for the model");
    let filled = state.fill(&*device, &chain, |spec, out| {
        init::fill(spec, SEED, 0, out);
        Ok(())
    });
    filled.expect("parameters are set");
    let plan = table(&chain, shape(), &offer("cpu"), 2, Activations::Keep, false);
    let program = compile(&plan, &chain, Purpose::Train).expect("it compiles").remove(0);
    let mut executor = Executor::new(device, chain, SEQUENCE, state).expect("an executor");
    let (data, held_out) =
        (data(&description.folder, TEXT, "reference"), data(&description.folder, HELD_OUT, "reference"));
    let order = Order::new(data.len(), SEED, true);
    let terms = Terms {
        steps: description.steps,
        seed: SEED,
        optimizer: &optimizer,
        schedule: &schedule,
        data: &data,
        order: &order,
    };
    let work = Work { plan: &plan, program: &program, layout: None, tells: None };
    let mut course = Curve::default();
    for step in 0..description.steps {
        course.losses.push(terms.train(&mut executor, work, step, None).expect("a step").loss());
        let done = step + 1;
        if description.eval_every.is_some_and(|every| done.is_multiple_of(every) || done == description.steps)
        {
            course.held_out.insert(done, evaluate(&mut executor, &held_out, done));
        }
    }
    course
}

/// What one device's training comes to: each step's loss, and the held-out loss after those that measure it.
#[derive(Default)]
pub struct Curve {
    pub losses: Vec<f64>,
    pub held_out: BTreeMap<u64, f64>,
}

/// Some samples in their order, from the first of them on.
struct Rows<'a>(&'a Dataset, u64);

impl Batch for Rows<'_> {
    fn read(
        &self,
        samples: Range<usize>,
        inputs: Inputs,
        targets: &mut [i32],
    ) -> shoal_engine::error::Result {
        let places: Vec<(u64, u64)> = samples.map(|sample| (0, self.1 + sample as u64)).collect();
        Ok(self.0.read_all(&places, inputs, targets)?)
    }
}

/// Sample by sample, so that no batches are alike to those of the fleet.
fn evaluate(executor: &mut Executor, data: &Dataset, step: u64) -> f64 {
    let shape = StepShape { global_batch: 1, ..shape() };
    let plan = table(executor.chain(), shape, &offer("cpu"), 1, Activations::Keep, false);
    let program = compile(&plan, executor.chain(), Purpose::Evaluate).expect("it compiles").remove(0);
    let (mut loss, mut targets) = (0.0, 0);
    for sample in 0..data.len() {
        let outcome =
            executor.run(&program, &StepInput::evaluate(step, &Rows(data, sample))).expect("a loss");
        (loss, targets) = (loss + outcome.loss_sum, targets + outcome.targets);
    }
    loss / targets as f64
}

pub fn offer(name: &str) -> DeviceOffer {
    DeviceOffer {
        name: name.into(),
        budget_bytes: 64 << 20,
        workspace_bytes: CpuDevice::workspace_bytes(1),
        rows_enough: CpuDevice::ROWS_ENOUGH,
    }
}
