//! Cephalo's published tables: one transformer layer's times and memory on many GPU kinds, and one plan that it ships.
//! Its own rules are shown to give that plan; ours is set beside theirs, rated by their latency model, for that case and
//! for every model with every mixture of kinds it was measured on.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use shoal_fleet::catalogue;
use shoal_model::{Activation, BlockSpec, LayerKind, Norm, NormPlace, Precision};
use thiserror::Error;

use crate::sharded::cephalo::{Case, Division, Gpu, LayerMilliseconds, ModelMemory, Rules};

const LATENCIES: &str = "model_latencies.json";
const MEMORY: &str = "model_memory.json";
const STATS: &str = "model_stats.json";
const SHIPPED: &str = "example_gpt_2.7b.json";

/// The GPUs of the shipped plan, which does not name them.
const SHIPPED_GPUS: [&str; 4] = ["l4", "l4", "a6000", "p40"];
/// The cluster whose memory it was made with.
const SHIPPED_CLUSTER: &str = "paper";
/// Tokens of a sample in the memory tables.
const MEMORY_SEQUENCE: usize = 512;
/// Kinds that are mixed at a time, besides all of them.
const MIXED_MAX: usize = 3;
/// GPUs of each kind that are tried until the state fits.
const COUNTS: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
const BATCH_MIN: usize = 64;
/// GPUs times the cube of the batch, past which their program would take minutes and is not run.
const THEIR_WORK_MAX: usize = 2_000_000_000;

/// GiB that Cephalo counts with, by its names; other kinds have the catalogue's.
const CAPACITIES_GIB: [(&str, f64); 12] = [
    ("a6000", 47.99),
    ("l4", 22.5),
    ("p40", 22.5),
    ("t4", 15.0),
    ("a10g", 22.49),
    ("p100", 12.0),
    ("v100x16", 16.0),
    ("v100-pciex16", 16.0),
    ("v100x32", 32.0),
    ("a100x40", 40.0),
    ("a100x80", 80.0),
    ("h100-nvl", 94.0),
];

#[derive(Debug, Error)]
pub enum CephaloError {
    #[error("{}: {cause}", path.display())]
    Io { path: PathBuf, cause: io::Error },
    #[error("{}: {cause}", path.display())]
    Json { path: PathBuf, cause: serde_json::Error },
    #[error("{file} has no {what}")]
    Missing { file: &'static str, what: String },
    #[error("the shipped case cannot be planned: {what}")]
    Golden { what: String },
}

impl CephaloError {
    /// What the user can do about it, as one sentence.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            CephaloError::Io { .. } => {
                format!("the folder is to have {LATENCIES}, {MEMORY}, {STATS} and {SHIPPED}")
            }
            CephaloError::Json { .. } | CephaloError::Missing { .. } | CephaloError::Golden { .. } => {
                "take the files as they were published".into()
            }
        })
    }
}

/// What the tables and the two planners say.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub golden: Golden,
    pub mixtures: Vec<Mixture>,
    /// Entries that cannot be used, and why.
    pub skipped: Vec<Skipped>,
}

/// The case of the shipped plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Golden {
    pub model: String,
    pub gpus: Vec<String>,
    pub batch: usize,
    pub shipped: Shipped,
    /// By its own rules.
    pub theirs: Division,
    /// Whether that is the shipped plan.
    pub agrees: bool,
    pub theirs_made_feasible: Option<Division>,
    pub ours: Option<Division>,
}

/// The part of its plan's file that says who does what.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shipped {
    pub model_name: String,
    #[serde(rename = "uneven_batch_sizes")]
    pub batches: Vec<usize>,
    #[serde(rename = "uneven_microbatches")]
    pub micro_batches: Vec<usize>,
    #[serde(rename = "split_uneven_partitions")]
    pub state: Vec<f64>,
    #[serde(rename = "seq_length")]
    pub sequence: usize,
    #[serde(rename = "autocast_dtype")]
    pub dtype: String,
}

/// A model on a mixture of kinds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mixture {
    pub model: String,
    pub sequence: usize,
    pub dtype: String,
    pub kinds: Vec<String>,
    pub gpus_of_each: usize,
    pub batch: usize,
    pub memory: MemorySource,
    /// Whether their program was run: its time grows with the cube of the batch.
    pub theirs_tried: bool,
    /// Milliseconds of a layer, where there is such a plan.
    pub theirs_ms: Option<f64>,
    pub theirs_fit_each: bool,
    pub theirs_made_feasible_ms: Option<f64>,
    pub ours_ms: Option<f64>,
    /// What the state lacks where not even the most GPUs that are tried hold it beside a sample each.
    pub short_gib: Option<f64>,
    /// Of planning.
    pub their_seconds: f64,
    pub our_seconds: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemorySource {
    /// From their tables.
    Measured,
    /// From the layers' shape, where they have none.
    Arithmetic,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    pub what: String,
    pub why: String,
}

/// Reads the folder and plans everything in it.
pub fn report(folder: &Path) -> Result<Report, CephaloError> {
    let data = Data::read(folder)?;
    let golden = data.golden()?;
    let (profiles, mut skipped) = data.profiles();
    let mut mixtures = Vec::new();
    for ((model, sequence, dtype), gpus) in &profiles {
        let Some((memory, source)) = data.memory_of(model, *sequence, dtype) else {
            let what = format!("{model}, {sequence} tokens, {dtype}");
            skipped.push(Skipped { what, why: "neither its memory nor its size is known".into() });
            continue;
        };
        for chosen in subsets(gpus) {
            let (model, dtype) = (model.clone(), dtype.clone());
            mixtures.push(mixture(model, *sequence, dtype, &chosen, &memory, source));
        }
    }
    Ok(Report { golden, mixtures, skipped })
}

/// GPUs by model, sequence and kind of number.
type Profiles = BTreeMap<(String, usize, String), Vec<Gpu>>;

struct Data {
    latencies: Value,
    memory: Value,
    stats: Value,
    shipped: Shipped,
}

impl Data {
    fn read(folder: &Path) -> Result<Data, CephaloError> {
        Ok(Data {
            latencies: read(&folder.join(LATENCIES))?,
            memory: read(&folder.join(MEMORY))?,
            stats: read(&folder.join(STATS))?,
            shipped: read(&folder.join(SHIPPED))?,
        })
    }

    fn golden(&self) -> Result<Golden, CephaloError> {
        let Shipped { model_name: model, sequence, dtype, batches, .. } = &self.shipped;
        let gpu = |kind: &&str| {
            let what = || format!("{model} on {kind}, {sequence} tokens, {dtype}");
            let entry = &self.latencies[model][*kind][sequence.to_string()][dtype];
            gpu(kind, entry).map_err(|_| CephaloError::Missing { file: LATENCIES, what: what() })
        };
        let gpus = SHIPPED_GPUS.iter().map(gpu).collect::<Result<Vec<Gpu>, CephaloError>>()?;
        let memory = measured_memory(&self.memory[SHIPPED_CLUSTER][model], dtype).ok_or_else(|| {
            CephaloError::Missing { file: MEMORY, what: format!("{model} of {SHIPPED_CLUSTER}, {dtype}") }
        })?;
        let batch = batches.iter().sum();
        let case = Case { gpus: &gpus, memory: &memory, batch, rules: Rules::default() };
        let theirs = case.theirs().ok_or_else(|| CephaloError::Golden { what: "it has no answer".into() })?;
        let state: Vec<f64> =
            theirs.parameters.iter().map(|share| share / memory.parameters as f64).collect();
        Ok(Golden {
            model: model.clone(),
            gpus: SHIPPED_GPUS.map(String::from).into(),
            batch,
            agrees: theirs.batches == self.shipped.batches
                && theirs.micro_batches == self.shipped.micro_batches
                && state == self.shipped.state,
            shipped: self.shipped.clone(),
            theirs,
            theirs_made_feasible: case.theirs_made_feasible(),
            ours: case.ours(),
        })
    }

    /// All entries of the latencies that say what is needed, and what is wrong with the others.
    fn profiles(&self) -> (Profiles, Vec<Skipped>) {
        let (mut profiles, mut skipped) = (Profiles::new(), Vec::new());
        for (model, kinds) in entries(&self.latencies) {
            for (kind, sequences) in entries(kinds) {
                for (sequence, dtypes) in entries(sequences) {
                    for (dtype, entry) in entries(dtypes) {
                        let what = format!("{model} on {kind}, {sequence} tokens, {dtype}");
                        match (sequence.parse(), gpu(kind, entry)) {
                            (Ok(sequence), Ok(gpu)) => {
                                let key = (model.clone(), sequence, dtype.clone());
                                profiles.entry(key).or_default().push(gpu);
                            }
                            (Err(_), _) => skipped.push(Skipped { what, why: "no number of tokens".into() }),
                            (_, Err(why)) => skipped.push(Skipped { what, why }),
                        }
                    }
                }
            }
        }
        (profiles, skipped)
    }

    fn memory_of(&self, model: &str, sequence: usize, dtype: &str) -> Option<(ModelMemory, MemorySource)> {
        let mut clusters: Vec<_> = entries(&self.memory).collect();
        clusters.sort_by_key(|(name, _)| *name != SHIPPED_CLUSTER);
        let measured = clusters.into_iter().find_map(|(_, models)| measured_memory(&models[model], dtype));
        match measured.filter(|_| sequence == MEMORY_SEQUENCE) {
            Some(memory) => Some((memory, MemorySource::Measured)),
            None => {
                Some((by_arithmetic(&self.stats[model], model, sequence, dtype)?, MemorySource::Arithmetic))
            }
        }
    }
}

fn read<T: for<'a> Deserialize<'a>>(path: &Path) -> Result<T, CephaloError> {
    let text =
        std::fs::read_to_string(path).map_err(|cause| CephaloError::Io { path: path.into(), cause })?;
    serde_json::from_str(&text).map_err(|cause| CephaloError::Json { path: path.into(), cause })
}

fn entries(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

fn numbers(value: &Value) -> Option<Vec<f64>> {
    value.as_array()?.iter().map(Value::as_f64).collect()
}

/// A GPU from an entry: lines of forward and backward, then perhaps their tables. Some are older: one line for both.
fn gpu(kind: &str, entry: &Value) -> Result<Gpu, String> {
    let times = |place: usize| {
        let line = numbers(&entry[place]).filter(|line| line.len() == 2);
        let line = line.ok_or("it has no lines for forward and backward by themselves")?;
        let table = numbers(&entry[place + 2]).unwrap_or_default();
        Ok::<_, String>(LayerMilliseconds { table, slope: line[0], intercept: line[1] })
    };
    let theirs = CAPACITIES_GIB.iter().find(|(known, _)| *known == kind).map(|(_, gib)| *gib);
    let ours = || Some(catalogue::find(kind)?.memory_bytes? as f64 / (1u64 << 30) as f64);
    let capacity_gib = theirs.or_else(ours).ok_or("nobody says how much memory it has")?;
    Ok(Gpu { kind: kind.to_owned(), capacity_gib, forward: times(0)?, backward: times(1)? })
}

fn measured_memory(model: &Value, dtype: &str) -> Option<ModelMemory> {
    let compute_gib = numbers(&model["profiled_compute_memory"][dtype])?;
    let parameters = model["parameters"].as_u64()?;
    (!compute_gib.is_empty()).then_some(ModelMemory { parameters, compute_gib })
}

/// What a model's layers take by their shape: three layers' parameters and gradients at once, as in our own plans, and
/// one micro-batch's values. Two entries, since it grows evenly.
fn by_arithmetic(stats: &Value, name: &str, sequence: usize, dtype: &str) -> Option<ModelMemory> {
    let number = |key: &str| stats[key].as_u64().map(|number| number as usize);
    let (width, layer) = (number("hidden_size")?, number("parameters_per_layer")?);
    let gated = name.contains("llama") || name.contains("mistral");
    let (matrices, activation) = if gated { (3, Activation::SwiGlu) } else { (2, Activation::GeluTanh) };
    let heads = width.div_ceil(128);
    let spec = BlockSpec {
        width,
        heads,
        kv_heads: heads,
        head_size: width / heads,
        mlp_width: layer.saturating_sub(4 * width * width) / (matrices * width),
        rotary: gated,
        norm: if gated { Norm::Rms } else { Norm::Layer },
        norm_eps: 1e-5,
        norm_place: NormPlace::Before,
        activation,
        causal: true,
        attention_scale: 1.0,
        attention_dropout: 0.0,
        residual_dropout: 0.0,
        weights_in_out: false,
    };
    let precision = if dtype == "float16" { Precision::Fp16 } else { Precision::Fp32 };
    let (kind, fixed) = (LayerKind::Block(spec), 3 * layer * (precision.bytes() + 4));
    let gib = |samples: usize| {
        let bytes = kind.footprint(samples, sequence, precision);
        // Its input and its output's gradient are among what lives before.
        let values = bytes.input + bytes.output + bytes.saved + bytes.backward_peak;
        (fixed as u64 + values) as f64 / (1u64 << 30) as f64
    };
    let parameters = stats["total_parameters"].as_u64()?;
    Some(ModelMemory { parameters, compute_gib: vec![gib(1), gib(2)] })
}

/// One, two or three of the kinds, in all ways, and all of them.
fn subsets(gpus: &[Gpu]) -> Vec<Vec<Gpu>> {
    let mut all: Vec<Vec<Gpu>> = vec![Vec::new()];
    for gpu in gpus {
        let grown = all.iter().filter(|some| some.len() < MIXED_MAX);
        let grown: Vec<Vec<Gpu>> =
            grown.map(|some| [&some[..], std::slice::from_ref(gpu)].concat()).collect();
        all.extend(grown);
    }
    all.retain(|some| !some.is_empty());
    if gpus.len() > MIXED_MAX {
        all.push(gpus.to_vec());
    }
    all
}

fn mixture(
    model: String,
    sequence: usize,
    dtype: String,
    kinds: &[Gpu],
    memory: &ModelMemory,
    source: MemorySource,
) -> Mixture {
    let rules = Rules::default();
    // Each with one sample at a time.
    let room: f64 = kinds.iter().map(|gpu| rules.room_gib(gpu, memory, 1).max(0.0)).sum();
    let fits = |count: &&usize| **count as f64 * room >= memory.state_gib();
    let most = COUNTS[COUNTS.len() - 1];
    let gpus_of_each = *COUNTS.iter().find(fits).unwrap_or(&most);
    let gpus: Vec<Gpu> = kinds.iter().flat_map(|gpu| vec![gpu.clone(); gpus_of_each]).collect();
    let batch = BATCH_MIN.max(2 * gpus.len());
    let case = Case { gpus: &gpus, memory, batch, rules };
    let theirs_tried = gpus.len() * batch.pow(3) <= THEIR_WORK_MAX;
    let start = Instant::now();
    let theirs = theirs_tried.then(|| case.theirs()).flatten();
    let their_seconds = start.elapsed().as_secs_f64();
    let feasible = theirs_tried.then(|| case.theirs_made_feasible()).flatten();
    let start = Instant::now();
    let ours = case.ours();
    let our_seconds = start.elapsed().as_secs_f64();
    Mixture {
        model,
        sequence,
        dtype,
        kinds: kinds.iter().map(|gpu| gpu.kind.clone()).collect(),
        gpus_of_each,
        batch,
        memory: source,
        theirs_tried,
        theirs_ms: theirs.as_ref().map(|plan| plan.layer_ms),
        theirs_fit_each: theirs.is_some_and(|plan| plan.fits_each()),
        theirs_made_feasible_ms: feasible.map(|plan| plan.layer_ms),
        short_gib: ours.is_none().then(|| (memory.state_gib() - gpus_of_each as f64 * room).max(0.0)),
        ours_ms: ours.map(|plan| plan.layer_ms),
        their_seconds,
        our_seconds,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENCY: &str = r#"{ "deepspeedgpt_2.7b": {
        "l4": { "512": { "float16": [[7.415036, 1.181504], [10.94616, 4.842824]] } },
        "a6000": { "512": { "float16": [[2.835478, 0.664214], [4.22101, 2.404014]] } },
        "p40": { "512": { "float16": [[15.637328, 4.132932], [28.016862, 1.877118]] } },
        "t4": { "512": { "float16": [3.0, 1.5] } } } }"#;
    const TAKES: &str = r#"{ "paper": { "deepspeedgpt_2.7b": { "parameters": 2770621440,
        "profiled_compute_memory": { "float16": [1.120, 1.490, 1.863, 2.233] } } } }"#;
    const PLAN: &str = r#"{ "model_name": "deepspeedgpt_2.7b", "uneven_batch_sizes": [13, 12, 34, 5],
        "split_uneven_partitions": [0.25, 0.25, 0.25, 0.25], "uneven_microbatches": [1, 2, 1, 1],
        "seq_length": 512, "autocast_dtype": "float16" }"#;

    /// A folder of its own for a test, with these files.
    fn folder(name: &str, files: &[(&str, &str)]) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("shoal-cephalo-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        for (name, text) in files {
            std::fs::write(folder.join(name), text).expect("a file");
        }
        folder
    }

    #[test]
    fn a_folder_is_read_and_all_in_it_planned() {
        let files = [(LATENCIES, LATENCY), (MEMORY, TAKES), (STATS, "{}"), (SHIPPED, PLAN)];
        let folder = folder("whole", &files);
        let report = report(&folder).expect("a sound folder");
        std::fs::remove_dir_all(folder).expect("it was made above");
        assert!(report.golden.agrees, "{:?}", report.golden);
        // Three kinds: each, in twos, all.
        assert_eq!(report.mixtures.len(), 7);
        for mixture in &report.mixtures {
            let (ours, theirs) = (mixture.ours_ms, mixture.theirs_made_feasible_ms);
            assert!(ours.is_some() && theirs.is_none_or(|theirs| ours <= Some(theirs)), "{mixture:?}");
        }
        assert_eq!(report.skipped.len(), 1);
        let text = serde_json::to_string(&report).expect("a report is JSON");
        assert_eq!(serde_json::from_str::<Report>(&text).expect("and back").golden, report.golden);
    }

    #[test]
    fn what_is_missing_is_named() {
        let folder = folder("part", &[(LATENCIES, "{}"), (MEMORY, TAKES), (STATS, "{}"), (SHIPPED, PLAN)]);
        let error = report(&folder).expect_err("it has no times").to_string();
        std::fs::remove_dir_all(folder).expect("it was made above");
        assert_eq!(error, "model_latencies.json has no deepspeedgpt_2.7b on l4, 512 tokens, float16");
        let error = report(Path::new("nowhere")).expect_err("there is no such folder");
        assert!(error.hint().is_some_and(|hint| hint.contains(SHIPPED)));
    }

    #[test]
    fn memory_by_arithmetic_is_three_layers_and_the_samples() {
        let stats = serde_json::json!({
            "hidden_size": 4096, "parameters_per_layer": 201379840, "total_parameters": 6855204864u64
        });
        let memory = by_arithmetic(&stats, "deepspeedgpt_6.7b", 512, "float16").expect("all is said");
        let each = memory.compute_gib(2) - memory.compute_gib(1);
        let fixed = (3 * 201_379_840u64 * (2 + 4)) as f64 / (1u64 << 30) as f64;
        assert!((memory.compute_gib(1) - each - fixed).abs() < 1e-3, "{memory:?}");
        // 512 rows with at least the eight widths of projections, attention and MLP that a backward reads, in halves.
        assert!(each > (512 * 8 * 4096 * 2) as f64 / (1u64 << 30) as f64, "{memory:?}");
    }
}
