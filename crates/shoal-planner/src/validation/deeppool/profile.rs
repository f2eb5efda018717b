//! DeepPool's profile files: a line a layer and batch size, `kind{settings}[batch][shape]`, then milliseconds in all and
//! microseconds forward and backward. The backward of a convolution is counted with the layer after it where one
//! follows that works in place; it stays there, since the two are on the same devices in any sensible plan.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::{Map, Value};
use shoal_fleet::{LayerTable, TimeCurve};
use thiserror::Error;

use crate::burst::LayerBytes;

#[derive(Debug, Error)]
pub enum ProfileError {
    #[error("{}: {cause}", path.display())]
    Io { path: PathBuf, cause: std::io::Error },
    #[error("{file}, line {line}: {what}")]
    Line { file: String, line: usize, what: String },
    #[error("{file}: {what}")]
    Model { file: String, what: String },
}

impl ProfileError {
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            ProfileError::Io { .. } => {
                "name the folder that has A100_vgg.prof, A100_wrn.prof and A100_inception.prof".into()
            }
            ProfileError::Line { .. } => {
                "a line is kind{settings}[batch][shape], milliseconds, microseconds forward and backward"
                    .into()
            }
            ProfileError::Model { .. } => {
                "every batch size lists the same layers, each fitting its inputs".into()
            }
        })
    }
}

/// A model as its file has it.
#[derive(Clone, Debug)]
pub struct Measured {
    pub layers: Vec<LayerTable>,
    pub forward: Vec<TimeCurve>,
    pub backward: Vec<TimeCurve>,
    /// By layer, the layers that it reads.
    pub inputs: Vec<Vec<usize>>,
    pub memory: Vec<LayerBytes>,
}

/// How a file's layers hang together; the file itself does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Chain,
    InceptionV3,
}

/// Bytes of a number, and of the state of a parameter: itself, its gradient and its momentum.
const NUMBER_BYTES: u64 = 4;
const STATE_BYTES: u64 = 3 * NUMBER_BYTES;

/// A layer's settings and what follows from them.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    kind: String,
    settings: Map<String, Value>,
    input: Vec<usize>,
}

pub fn read(text: &str, file: &str, shape: Shape) -> Result<Measured, ProfileError> {
    let by_batch = parse(text, file)?;
    let wrong = |what: String| ProfileError::Model { file: file.to_owned(), what };
    let mut batches = by_batch.iter();
    let Some((first, timed)) = batches.next() else { return Err(wrong("there is no layer in it".into())) };
    let rows: Vec<Row> = timed.iter().map(|timed| timed.row.clone()).collect();
    for (batch, others) in batches {
        if !others.iter().map(|timed| &timed.row).eq(&rows) {
            return Err(wrong(format!("the layers of batch {batch} are not those of batch {first}")));
        }
    }
    let curve = |layer: usize, seconds: fn(&Timed) -> f64| {
        let points = by_batch.iter().map(|(batch, timed)| (*batch, seconds(&timed[layer])));
        let (samples, seconds) = points.unzip();
        TimeCurve::new(samples, seconds)
    };
    let mut measured = Measured {
        layers: Vec::new(),
        forward: (0..rows.len()).map(|layer| curve(layer, |timed| timed.forward)).collect(),
        backward: (0..rows.len()).map(|layer| curve(layer, |timed| timed.backward)).collect(),
        inputs: Vec::new(),
        memory: Vec::new(),
    };
    let mut outputs = Vec::new();
    for (place, row) in rows.iter().enumerate() {
        let output = row.output().map_err(|what| wrong(format!("layer {place}, {}: {what}", row.kind)))?;
        let (bytes, parameters) = (elements(&output) * NUMBER_BYTES, row.parameters());
        let name = format!("{place} {}", row.kind);
        measured.layers.push(LayerTable { name, parameters, output_bytes: bytes });
        let kept_a_sample = bytes + row.inner_elements() * NUMBER_BYTES;
        measured.memory.push(LayerBytes { state: parameters * STATE_BYTES, kept_a_sample });
        outputs.push(output);
    }
    let inputs: Vec<Vec<usize>> = match shape {
        Shape::Chain => (0..rows.len()).map(|layer| layer.checked_sub(1).into_iter().collect()).collect(),
        Shape::InceptionV3 => {
            let inputs = inception(&mut measured, &mut outputs, rows.len());
            inputs.ok_or_else(|| wrong(format!("Inception-V3 does not have {} layers", rows.len())))?
        }
    };
    fits(&rows, &outputs, &inputs).map_err(wrong)?;
    measured.inputs = inputs;
    Ok(in_order(measured, rows.len()))
}

struct Timed {
    row: Row,
    forward: f64,
    backward: f64,
}

fn parse(text: &str, file: &str) -> Result<BTreeMap<usize, Vec<Timed>>, ProfileError> {
    let mut by_batch: BTreeMap<usize, Vec<Timed>> = BTreeMap::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        // Sums over all layers stand after each batch.
        if line.is_empty() || line.to_ascii_lowercase().starts_with("sum") {
            continue;
        }
        let (batch, timed) = self::line(line).ok_or_else(|| ProfileError::Line {
            file: file.to_owned(),
            line: number + 1,
            what: format!("\"{line}\" is no layer"),
        })?;
        by_batch.entry(batch).or_default().push(timed);
    }
    Ok(by_batch)
}

fn line(line: &str) -> Option<(usize, Timed)> {
    let (kind, rest) = line.split_at(line.find('{')?);
    let (settings, rest) = rest.split_at(rest.find('}')? + 1);
    let Value::Object(settings) = serde_json::from_str(settings).ok()? else { return None };
    let mut fields = rest.split_whitespace();
    let (batch, shape) = fields.next()?.strip_prefix('[')?.split_once(']')?;
    let shape = shape.trim_matches(['[', ']']);
    let input: Option<Vec<usize>> = shape.split(',').map(|size| size.parse().ok()).collect();
    let _milliseconds: f64 = fields.next()?.parse().ok()?;
    let mut seconds = || Some(fields.next()?.parse::<f64>().ok()? * 1e-6);
    let (forward, backward) = (seconds()?, seconds()?);
    let row = Row { kind: kind.to_owned(), settings, input: input? };
    let batch = batch.parse().ok().filter(|batch| *batch > 0)?;
    Some((batch, Timed { row, forward, backward }))
}

fn elements(shape: &[usize]) -> u64 {
    shape.iter().map(|size| *size as u64).product()
}

impl Row {
    fn number(&self, key: &str) -> Result<usize, String> {
        let value = self.settings.get(key).and_then(Value::as_u64);
        value.map(|value| value as usize).ok_or_else(|| format!("there is no {key}"))
    }

    /// A setting for rows and columns, which may be one number for both.
    fn pair(&self, key: &str) -> Result<[usize; 2], String> {
        let Some(Value::Array(both)) = self.settings.get(key) else { return Ok([self.number(key)?; 2]) };
        match both.as_slice() {
            [a, b] => match (a.as_u64(), b.as_u64()) {
                (Some(a), Some(b)) => Ok([a as usize, b as usize]),
                _ => Err(format!("{key} are no numbers")),
            },
            _ => Err(format!("{key} is no pair")),
        }
    }

    fn image(&self) -> Result<[usize; 3], String> {
        self.input.as_slice().try_into().map_err(|_| format!("{:?} is no image", self.input))
    }

    /// Rows and columns after a window has gone over them.
    fn windowed(&self) -> Result<[usize; 2], String> {
        let [_, height, width] = self.image()?;
        let (window, padding) = (self.pair("kernel_size")?, self.pair("padding")?);
        let stride = self.number("stride")?.max(1);
        let over = |size: usize, axis: usize| {
            let room = (size + 2 * padding[axis]).checked_sub(window[axis]);
            room.map(|room| room / stride + 1).ok_or_else(|| format!("a window is larger than {size}"))
        };
        Ok([over(height, 0)?, over(width, 1)?])
    }

    fn output(&self) -> Result<Vec<usize>, String> {
        match self.kind.as_str() {
            "conv2d" => {
                let [height, width] = self.windowed()?;
                Ok(vec![self.number("out_channels")?, height, width])
            }
            "maxPool2d" | "avgPool2d" => {
                let [height, width] = self.windowed()?;
                Ok(vec![self.input[0], height, width])
            }
            "adAvgPool2d" => {
                Ok(vec![self.image()?[0], self.number("output_height")?, self.number("output_width")?])
            }
            "ReLU2d" | "ReLU1d" => Ok(self.input.clone()),
            "flatten" => Ok(vec![elements(&self.input) as usize]),
            "linear" => Ok(vec![self.number("out_features")?]),
            "ResnetBottleneck" => {
                let ([_, height, width], stride) = (self.image()?, self.stride());
                Ok(vec![BOTTLENECK_EXPANSION * self.number("planes")?, height / stride, width / stride])
            }
            other => Err(format!("\"{other}\" is no kind of layer that is known here")),
        }
    }

    fn stride(&self) -> usize {
        self.number("stride").unwrap_or(1).max(1)
    }

    /// Channels into, within and out of a bottleneck.
    fn bottleneck(&self) -> Option<[u64; 3]> {
        if self.kind != "ResnetBottleneck" {
            return None;
        }
        let number = |key: &str| self.number(key).ok();
        let (planes, base) = (number("planes")?, number("base_width")?);
        let width = planes * base / BOTTLENECK_BASE * number("groups").unwrap_or(1);
        let inner = [number("inplanes")?, width, BOTTLENECK_EXPANSION * planes];
        Some(inner.map(|channels| channels as u64))
    }

    fn parameters(&self) -> u64 {
        let number = |key: &str| self.number(key).unwrap_or(0) as u64;
        match self.kind.as_str() {
            "conv2d" => {
                let [height, width] = self.pair("kernel_size").unwrap_or_default();
                let window = (height * width) as u64;
                (number("in_channels") * window + 1) * number("out_channels")
            }
            "linear" => (number("in_features") + 1) * number("out_features"),
            "ResnetBottleneck" => {
                let [input, width, output] = self.bottleneck().unwrap_or_default();
                // Three convolutions, a batch norm after each, and one of each beside them where sizes change.
                let beside = self.settings.contains_key("downsampleParams");
                let beside = if beside { (input + 2) * output } else { 0 };
                (input + 2) * width + (9 * width + 2) * width + (width + 2) * output + beside
            }
            _ => 0,
        }
    }

    /// Numbers a sample leaves inside the layer besides its output: what goes into and out of the norms within.
    fn inner_elements(&self) -> u64 {
        let (Some([_, width, output]), Ok([_, height, breadth])) = (self.bottleneck(), self.image()) else {
            return 0;
        };
        let (before, stride) = ((height * breadth) as u64, self.stride() as u64);
        let after = before / (stride * stride);
        2 * width * before + 2 * width * after + output * after
    }
}

/// ResNet's constants.
const BOTTLENECK_EXPANSION: usize = 4;
const BOTTLENECK_BASE: usize = 64;

/// Layers before Inception-V3's first block.
const STEM: usize = 7;

/// Its blocks: of every branch how many layers it has, and whether its last two stand side by side.
const BLOCKS: [(usize, &[(usize, bool)]); 5] = [
    (3, &[(1, false), (2, false), (3, false), (2, false)]),
    (1, &[(1, false), (3, false), (1, false)]),
    (4, &[(1, false), (3, false), (5, false), (2, false)]),
    (1, &[(2, false), (4, false), (1, false)]),
    (2, &[(1, false), (3, true), (4, true), (2, false)]),
];

/// Inception-V3's edges. A join is added after every block, at the end of the lists: the file has none, since putting
/// channels side by side takes no time there. None where the number of layers is another.
fn inception(
    measured: &mut Measured,
    outputs: &mut Vec<Vec<usize>>,
    layers: usize,
) -> Option<Vec<Vec<usize>>> {
    let mut inputs: Vec<Vec<usize>> =
        (0..STEM).map(|layer| layer.checked_sub(1).into_iter().collect()).collect();
    inputs.resize(layers.max(STEM), Vec::new());
    let (mut next, mut before) = (STEM, STEM - 1);
    for (times, branches) in BLOCKS {
        for _ in 0..times {
            let mut joined = Vec::new();
            for (length, forks) in branches {
                if next + length > layers {
                    return None;
                }
                for place in 0..*length {
                    // The second of two side by side reads what the first reads.
                    let reads = if *forks && place + 1 == *length { 2 } else { 1 };
                    inputs[next + place] = vec![if place == 0 { before } else { next + place - reads }];
                }
                next += length;
                joined.extend(if *forks { next - 2..next } else { next - 1..next });
            }
            let channels = joined.iter().map(|layer| outputs[*layer][0]).sum();
            let output = [&[channels], &outputs[joined[0]][1..]].concat();
            before = inputs.len();
            let output_bytes = elements(&output) * NUMBER_BYTES;
            measured.layers.push(LayerTable { name: format!("{before} join"), parameters: 0, output_bytes });
            measured.memory.push(LayerBytes { state: 0, kept_a_sample: output_bytes });
            for curves in [&mut measured.forward, &mut measured.backward] {
                curves.push(TimeCurve::new(vec![1], vec![0.0]));
            }
            outputs.push(output);
            inputs.push(joined);
        }
    }
    (next == layers).then_some(inputs)
}

/// Whether every layer's input is what the layers before it make.
fn fits(rows: &[Row], outputs: &[Vec<usize>], inputs: &[Vec<usize>]) -> Result<(), String> {
    for (layer, row) in rows.iter().enumerate() {
        for input in &inputs[layer] {
            if elements(&outputs[*input]) != elements(&row.input) {
                let (kind, made, wanted) = (&row.kind, &outputs[*input], &row.input);
                return Err(format!(
                    "layer {layer}, {kind}, takes {wanted:?}, and layer {input} makes {made:?}"
                ));
            }
        }
    }
    Ok(())
}

/// Layers that were added at the end, each where its last input has just been computed.
fn in_order(measured: Measured, rows: usize) -> Measured {
    let layers = measured.layers.len();
    let place = |layer: usize| match layer < rows {
        true => (layer, 0),
        false => (measured.inputs[layer].iter().copied().max().unwrap_or(0), 1),
    };
    let mut order: Vec<usize> = (0..layers).collect();
    order.sort_by_key(|layer| place(*layer));
    let mut now = vec![0; layers];
    order.iter().enumerate().for_each(|(at, layer)| now[*layer] = at);
    let inputs = |layer: &usize| measured.inputs[*layer].iter().map(|input| now[*input]).collect();
    Measured {
        inputs: order.iter().map(inputs).collect(),
        layers: order.iter().map(|layer| measured.layers[*layer].clone()).collect(),
        forward: order.iter().map(|layer| measured.forward[*layer].clone()).collect(),
        backward: order.iter().map(|layer| measured.backward[*layer].clone()).collect(),
        memory: order.iter().map(|layer| measured.memory[*layer]).collect(),
    }
}

#[cfg(test)]
mod tests;
