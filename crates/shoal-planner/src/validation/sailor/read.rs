//! The files as they were published: profiles, bandwidths, sizes of layers, and the plans that were run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use shoal_fleet::{Link, TimeCurve};

use crate::validation::error::Error;

/// A file and what it says.
pub struct File<T> {
    pub path: PathBuf,
    pub is: T,
}

impl<T: DeserializeOwned> File<T> {
    pub fn read(path: PathBuf) -> Result<File<T>, Error> {
        let text = std::fs::read_to_string(&path).map_err(|cause| Error::Io { path: path.clone(), cause })?;
        File::parse(path, &text)
    }

    pub fn parse(path: PathBuf, text: &str) -> Result<File<T>, Error> {
        match serde_json::from_str(text) {
            Ok(is) => Ok(File { path, is }),
            Err(cause) => Err(Error::Json { path, cause }),
        }
    }
}

impl<T> File<T> {
    pub fn missing(&self, key: impl Into<String>) -> Error {
        Error::key(&self.path, key, "is missing")
    }

    pub fn wrong(&self, key: impl Into<String>, what: impl Into<String>) -> Error {
        Error::key(&self.path, key, what)
    }
}

/// By micro-batch, by tensor-parallel degree, by layer: seconds of forward, backward and update.
pub type Profile = BTreeMap<usize, BTreeMap<usize, BTreeMap<usize, [f64; 3]>>>;

/// A polynomial in log2(bytes / 1e6), highest coefficient first, that gives GB/s; and bytes/s of long messages.
pub type Bandwidth = (Vec<f64>, f64);

/// By zone, kind of GPU and GPUs that take part, of the sender and then of the receiver.
pub type Zones<T> = BTreeMap<String, BTreeMap<String, BTreeMap<usize, T>>>;
pub type Bandwidths = Zones<Zones<Bandwidth>>;

/// By kind of GPU and GPUs that take part.
pub type IntraNode = BTreeMap<String, BTreeMap<usize, Bandwidth>>;

/// By model, tensor-parallel degree and layer.
pub type Sizes = BTreeMap<String, BTreeMap<usize, BTreeMap<usize, LayerSize>>>;

/// What a layer takes on each GPU of its tensor-parallel group, for one sample.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct LayerSize {
    pub params_floats: u64,
    pub act_output_bytes: u64,
    /// All that the backward reads.
    pub act_mem_bytes: u64,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Training {
    pub model: String,
    pub hidden_size: usize,
    pub sequence_length: usize,
    pub num_layers: usize,
    pub heads: usize,
    pub max_position_embeddings: usize,
}

/// Kind of GPU, GPUs of the machine, zone.
pub type Machine = (String, usize, String);

/// A plan that was run.
#[derive(Clone, Debug, Deserialize)]
pub struct Measured {
    pub pipeline_list: Vec<Pipeline>,
    pub mbs: usize,
    pub gbs: usize,
    /// Seconds of a step.
    pub real: f64,
    /// Bytes in use on the fullest GPU.
    pub max_mem: u64,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Pipeline {
    pub layers_per_stage: Vec<Vec<usize>>,
    /// By stage and replica: the machines of a tensor-parallel group, and its degree.
    pub tmp_per_stage: Vec<Vec<(Vec<Machine>, usize)>>,
    pub dp: Vec<usize>,
}

/// The longest message that a link is asked for: past it the published rate of long ones holds.
const LONGEST_LOG2: i32 = 10;

/// The polynomials were fitted to messages of a megabyte and more: below it they fall under nothing, and far above it
/// they turn downwards. So a link has its points from there up to where its rate stops rising.
pub fn link(file: &File<impl Sized>, key: &str, (coefficients, long): &Bandwidth) -> Result<Link, Error> {
    let rate = |log2: i32| {
        1e9 * coefficients.iter().fold(0.0, |value, coefficient| value * f64::from(log2) + coefficient)
    };
    let mut by_size: Vec<(u64, f64)> = Vec::new();
    for log2 in 0..=LONGEST_LOG2 {
        let (bytes, rate) = (1_000_000u64 << log2, rate(log2));
        if by_size.last().is_some_and(|(_, before)| rate <= *before) {
            break;
        }
        by_size.push((bytes, rate));
    }
    if !by_size.iter().map(|(_, rate)| rate).chain([long]).all(|rate| rate.is_finite() && *rate > 0.0) {
        return Err(file.wrong(key, "is no bandwidth"));
    }
    Ok(Link { bytes_per_second: *long, ..Link::measured(by_size) })
}

/// Seconds of each layer's forward and backward, by micro-batch, where a tensor-parallel group is one device.
pub fn curves(
    file: &File<Profile>,
    degree: usize,
    layers: usize,
) -> Result<(Vec<TimeCurve>, Vec<TimeCurve>), Error> {
    let curve = |layer: usize, which: usize| {
        let mut points = Vec::new();
        for (micro_batch, degrees) in &file.is {
            let Some(times) = degrees.get(&degree) else { continue };
            let key = || format!("{micro_batch}.{degree}.{layer}");
            points.push((*micro_batch, times.get(&layer).ok_or_else(|| file.missing(key()))?[which]));
        }
        let (samples, seconds) = points.into_iter().unzip();
        let curve = TimeCurve::new(samples, seconds);
        match curve.defect() {
            Some(what) => Err(file.wrong(format!("layer {layer} at degree {degree}"), what)),
            None => Ok(curve),
        }
    };
    let all = |which| (0..layers).map(|layer| curve(layer, which)).collect::<Result<Vec<_>, Error>>();
    Ok((all(0)?, all(1)?))
}

/// The plans of a folder, by name.
pub fn measured(folder: &Path) -> Result<Vec<(String, File<Measured>)>, Error> {
    let io = |cause| Error::Io { path: folder.into(), cause };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        if let Some(name) = name.strip_prefix("measured_").and_then(|name| name.strip_suffix(".json")) {
            found.push((name.to_owned(), File::read(path)?));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    match found.is_empty() {
        true => Err(Error::Nothing { path: folder.into(), pattern: "measured_*.json" }),
        false => Ok(found),
    }
}
