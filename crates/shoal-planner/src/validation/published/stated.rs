//! What a line states of its run, with what follows from it; or why that is too little to predict anything from.

use serde_json::Value;
use shoal_fleet::catalogue::{self, Kind};
use shoal_model::{Chain, ModelConfig, Precision, presets};
use shoal_plan::Activations;

use super::read::Run;
use crate::validation::error::Error;

/// Where parameters and optimizer state lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// All of a stage's on each of its replicas.
    Everywhere,
    /// Divided among the replicas; copies to compute with stay.
    Divided,
    /// Divided, and gathered layer by layer for each use.
    Fetched,
}

/// A run that can be predicted.
pub struct Stated {
    pub source: String,
    pub name: String,
    pub chain: Chain,
    pub sequence: usize,
    pub precision: Precision,
    /// The kind of each GPU, in the order of their ranks.
    pub gpus: Vec<&'static Kind>,
    pub tensor: usize,
    pub stages: usize,
    pub replicas: usize,
    /// Where the chain is cut: one more than there are stages. Stages with several runs of layers, taken in turns to
    /// shorten the bubble, are predicted with one.
    pub cuts: Vec<usize>,
    pub micro_batch: usize,
    pub global_batch: usize,
    pub activations: Activations,
    pub state: State,
    /// Whether messages and sums are under way while it computes.
    pub overlaps: bool,
    pub seconds: f64,
    /// What its publishers' own model predicts.
    pub theirs: Option<f64>,
}

/// What came of a line.
pub enum Line {
    Stated(Box<Stated>),
    Skipped { source: String, name: String, reason: String },
}

/// Megatron's vocabulary, where none is stated.
const VOCABULARY: usize = 51200;

/// Elements of an attention head, where the number of heads is not stated.
const HEAD: usize = 64;

pub fn line(run: &Run) -> Result<Line, Error> {
    let source = run.text("source")?.unwrap_or("no source").to_owned();
    let name = name(run)?;
    match stated(run, &source, &name) {
        Ok(stated) => Ok(Line::Stated(Box::new(stated))),
        Err(Stop::TooLittle(reason)) => Ok(Line::Skipped { source, name, reason }),
        Err(Stop::Wrong(error)) => Err(error),
    }
}

/// Why a line is not predicted.
enum Stop {
    TooLittle(String),
    /// Its cells say what cannot be.
    Wrong(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Wrong(error)
    }
}

fn too_little<T>(reason: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::TooLittle(reason.into()))
}

fn need<T>(value: Option<T>, what: &str) -> Result<T, Stop> {
    value.ok_or_else(|| Stop::TooLittle(format!("{what} not stated")))
}

/// A run by all that tells it from the others of its source.
fn name(run: &Run) -> Result<String, Error> {
    let cell = |column| Ok::<_, Error>(run.text(column)?.unwrap_or("?"));
    let mut name = format!("{} on {} {}", cell("model")?, cell("num_gpus")?, cell("gpu")?);
    for (column, short) in
        [("tp", "tp"), ("pp", "pp"), ("dp", "dp"), ("mbs", "mbs"), ("gbs", "gbs"), ("seq", "seq")]
    {
        if let Some(cell) = run.text(column)? {
            name += &format!(" {short} {cell}");
        }
    }
    for column in ["fsdp", "recompute", "system"] {
        if let Some(cell) = run.text(column)? {
            name += &format!(", {cell}");
        }
    }
    Ok(name)
}

fn stated(run: &Run, source: &str, name: &str) -> Result<Stated, Stop> {
    if source.contains("eth-easl/sailor") {
        return too_little("its own profile and bandwidths say more: validated by them");
    }
    let seconds: f64 = need(run.number("step_time_s")?, "its step time is")?;
    if !(seconds.is_finite() && seconds > 0.0) {
        return Err(run.wrong("step_time_s", format!("is {seconds}")).into());
    }
    let sequence = need(run.number("seq")?, "its sequence is")?;
    let config = need(model(run, sequence)?, "its model's sizes are")?;
    if let Some(what) = config.defect() {
        return too_little(format!("no model of ours: {what}"));
    }
    let chain = Chain::new(&config);
    if run.number("cp")?.is_some_and(|degree: usize| degree > 1) {
        return too_little("sequences are divided among GPUs, which our tables do not");
    }
    let precision = match run.text("precision")?.map(str::to_lowercase).as_deref() {
        // What those who leave it out train in.
        None | Some("fp16") => Precision::Fp16,
        Some("bf16" | "amp_bf16") => Precision::Bf16,
        Some(other) => return too_little(format!("the catalogue has no rate for {other}")),
    };
    let count: usize = need(run.number("num_gpus")?, "the number of its GPUs is")?;
    let gpus = gpus(run, count)?;
    let tensor: usize = need(run.number("tp")?, "its tensor-parallel degree is")?;
    let stages: usize = need(run.number("pp")?, "the number of its stages is")?;
    let replicas: usize = need(run.number("dp")?, "the number of its replicas is")?;
    if tensor.saturating_mul(stages).saturating_mul(replicas) != count || count == 0 {
        return too_little(format!("{tensor} x {stages} x {replicas} are not its {count} GPUs"));
    }
    let global_batch: usize = need(run.number("gbs")?, "its global batch is")?;
    if global_batch == 0 || !global_batch.is_multiple_of(replicas) {
        return too_little(format!("{global_batch} samples cannot be divided among {replicas} replicas"));
    }
    // Without a pipeline nothing is gained by cutting a batch that fits; with one, everything.
    let usual = if stages == 1 { global_batch / replicas } else { 1 };
    let micro_batch = run.number("mbs")?.unwrap_or(usual);
    if micro_batch == 0 || micro_batch > global_batch / replicas {
        return too_little(format!("its {replicas} replicas have no micro-batches of {micro_batch}"));
    }
    let state = match run.text("fsdp")? {
        None | Some("0") => State::Everywhere,
        Some("SHARD_GRAD_OP") => State::Divided,
        Some(_) if stages == 1 => State::Fetched,
        Some(_) => return too_little("stages whose state is divided and fetched"),
    };
    Ok(Stated {
        source: source.into(),
        name: name.into(),
        cuts: cuts(run, config.layers, stages)?,
        activations: activations(run, &chain, sequence, global_batch, count, seconds)?,
        chain,
        sequence,
        precision,
        gpus,
        tensor,
        stages,
        replicas,
        micro_batch,
        global_batch,
        state,
        // Of the systems with pipelines and whole copies only this one was made for it.
        overlaps: state != State::Everywhere || run.text("system")? == Some("OneFlow"),
        seconds,
        theirs: run.number("predicted_s_by_source")?,
    })
}

/// The model, where enough of its sizes is stated.
fn model(run: &Run, sequence: usize) -> Result<Option<ModelConfig>, Error> {
    let (layers, width) = (run.number::<usize>("layers")?, run.number::<usize>("hidden")?);
    let (Some(layers), Some(width)) = (layers, width) else { return Ok(None) };
    let name = run.text("model")?.unwrap_or("");
    // A generator of images, whose line has another model's sizes.
    if name == "TransGAN" {
        return Ok(None);
    }
    let heads = run.number("heads")?.unwrap_or(width / HEAD).max(1);
    let vocabulary = run.number("vocab")?.unwrap_or(VOCABULARY);
    if name.starts_with("Llama3") {
        // As published with the weights; the table has no column for them.
        let mlp_width = if width == 16384 { 53248 } else { width * 7 / 2 };
        return Ok(Some(presets::llama(
            vocabulary, width, layers, heads, 8, mlp_width, sequence, 5e5, false,
        )));
    }
    Ok(Some(presets::gpt2(vocabulary, width, layers, heads, sequence)))
}

/// The kinds of all GPUs: one, or those of a mixture one after the other.
fn gpus(run: &Run, count: usize) -> Result<Vec<&'static Kind>, Stop> {
    let stated = need(run.text("gpu")?, "its GPU is")?;
    let names: Vec<&str> = stated.split('+').collect();
    let counts = match names.len() {
        1 => vec![count],
        _ => {
            let text = run.text("gpu_mix")?.unwrap_or("{}");
            let mix: Value = serde_json::from_str(text)
                .map_err(|cause| run.wrong("gpu_mix", format!("is {text}: {cause}")))?;
            let of = |name: &&str| mix.get(name).and_then(Value::as_u64).unwrap_or(0) as usize;
            names.iter().map(of).collect()
        }
    };
    if counts.iter().sum::<usize>() != count {
        return Err(run.wrong("gpu_mix", format!("does not have {count} GPUs of {stated}")).into());
    }
    let mut gpus = Vec::new();
    for (name, count) in names.iter().zip(counts) {
        let Some(kind) = kind(name) else { return too_little(format!("the catalogue does not know {name}")) };
        gpus.extend(std::iter::repeat_n(kind, count));
    }
    Ok(gpus)
}

/// By the catalogue; what stands behind the name (a socket, a limit of power) is left out until it is known.
fn kind(name: &str) -> Option<&'static Kind> {
    let mut name = name;
    loop {
        if let Some(kind) = catalogue::find(name) {
            return Some(kind);
        }
        name = &name[..name.rfind('-')?];
    }
}

/// Where the chain is cut: as stated, or with as many blocks in each as in the next.
fn cuts(run: &Run, blocks: usize, parts: usize) -> Result<Vec<usize>, Stop> {
    let last = blocks + 2;
    let cuts: Vec<usize> = match run.text("layer_split")? {
        Some(text) => {
            let theirs: Vec<usize> = serde_json::from_str(text)
                .map_err(|cause| run.wrong("layer_split", format!("is {text}: {cause}")))?;
            // They count what stands before and behind the blocks as layers of their own, of which we have one each.
            let around = theirs.last().copied().unwrap_or(0).saturating_sub(blocks) / 2;
            let ours = |(place, cut): (usize, &usize)| match place {
                0 => 0,
                _ if place + 1 == theirs.len() => last,
                _ => (cut + 1).saturating_sub(around).min(last),
            };
            theirs.iter().enumerate().map(ours).collect()
        }
        None => (0..=parts)
            .map(|part| match part {
                0 => 0,
                _ if part == parts => last,
                _ => 1 + blocks * part / parts,
            })
            .collect(),
    };
    match cuts.len() == parts + 1 && cuts.is_sorted_by(|a, b| a < b) {
        true => Ok(cuts),
        false => too_little(format!("of {parts} stages some have no layer of ours")),
    }
}

/// Stated, or told by the operations that a step is said to be: with recomputation they are four times a forward's,
/// without three times.
fn activations(
    run: &Run,
    chain: &Chain,
    sequence: usize,
    global_batch: usize,
    gpus: usize,
    seconds: f64,
) -> Result<Activations, Error> {
    let remade = match run.text("recompute")? {
        Some(text) => text == "full",
        None => run.number::<f64>("tflops_per_gpu")?.is_some_and(|rate| {
            let step = rate * 1e12 * seconds * gpus as f64;
            let forward = chain.forward_flops(sequence) as f64 * global_batch as f64;
            step > 3.5 * forward
        }),
    };
    Ok(if remade { Activations::Recompute } else { Activations::Keep })
}
