//! A profile by arithmetic, for a kind of device that was never measured: operations at a share of the catalogue's
//! matrix rate, no faster than memory lets them, and the start of every kernel. Good to a factor of two, and always
//! marked as estimated.

use shoal_model::{Chain, LayerKind, Precision};

use crate::catalogue::Kind;
use crate::curve::TimeCurve;
use crate::profile::{DeviceProfile, LayerProfile, equal_layers};

/// The share of the published rate that training reaches: whole steps of transformers on tensor cores come to 0.4 to
/// 0.6 of it, on plain fp32 units to more.
const TENSOR_EFFICIENCY: f64 = 0.5;
const FP32_EFFICIENCY: f64 = 0.7;
/// The same of memory.
const MEMORY_EFFICIENCY: f64 = 0.8;
/// From one kernel to the next where their starts are all that counts.
const LAUNCH_SECONDS: f64 = 3e-6;

/// Numbers of samples that are worked out.
const SAMPLES: [usize; 11] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];

/// What a layer's forward takes of a device, and its backward.
struct Work {
    kernels: f64,
    /// Once, whatever the number of samples: its parameters.
    fixed_bytes: f64,
    flops: f64,
    bytes: f64,
}

/// What the catalogue makes of a chain.
pub fn device(chain: &Chain, kind: &Kind, precision: Precision, sequence: usize) -> DeviceProfile {
    let row = |group: Vec<usize>| {
        let mut row = LayerProfile::described(chain, &group, precision, sequence);
        let of = &chain.layers[group[0]].kind;
        [row.forward, row.backward] =
            work(of, row.parameters, precision, sequence).map(|work| curve(&work, kind, precision));
        row
    };
    DeviceProfile {
        kind: kind.name.to_owned(),
        device: "by public figures".to_owned(),
        precision,
        estimated: true,
        update_seconds_per_parameter: Some(update_seconds(kind, precision)),
        handling_seconds_per_byte: None,
        handling_seconds_per_message: None,
        alone: None,
        step: None,
        layers: equal_layers(chain).into_iter().map(row).collect(),
    }
}

/// Adam on the device for one parameter: gradient, parameter and moments come in, the latter three go out, and so does
/// the copy that layers compute with.
pub(crate) fn update_seconds(kind: &Kind, precision: Precision) -> f64 {
    let copy_bytes = if precision.is_half() { precision.bytes() } else { 0 };
    (28 + copy_bytes) as f64 / (MEMORY_EFFICIENCY * kind.memory_bytes_per_second)
}

fn curve(work: &Work, kind: &Kind, precision: Precision) -> TimeCurve {
    let rate = kind.flops(precision);
    let efficiency = if rate > kind.fp32_flops { TENSOR_EFFICIENCY } else { FP32_EFFICIENCY };
    let at = |samples: usize| {
        let (samples, bandwidth) = (samples as f64, MEMORY_EFFICIENCY * kind.memory_bytes_per_second);
        let computing = samples * work.flops / (efficiency * rate);
        let moving = (work.fixed_bytes + samples * work.bytes) / bandwidth;
        work.kernels * LAUNCH_SECONDS + computing.max(moving)
    };
    TimeCurve::new(SAMPLES.to_vec(), SAMPLES.map(at).to_vec())
}

/// Forward and backward of one sample.
fn work(kind: &LayerKind, parameters: u64, precision: Precision, sequence: usize) -> [Work; 2] {
    let element = precision.bytes() as f64;
    let kept = || {
        let footprint = kind.footprint(1, sequence, precision);
        (footprint.saved + footprint.output) as f64
    };
    // What the forward moves: most of what it makes is written once and read once.
    let (kernels, bytes) = match kind {
        LayerKind::Embedding(_) => (2.0, 2.0 * kept()),
        LayerKind::Patches(_) => (3.0, 2.0 * kept()),
        LayerKind::Block(_) => (12.0, 2.0 * kept()),
        LayerKind::Head(head) => {
            let logits = head.rows(1, sequence) * head.logit_columns(precision);
            (4.0, 2.0 * (kept() + element * logits as f64))
        }
        LayerKind::Convolution(spec) => {
            let elements = spec.input_elements() + 2 * spec.convolved_elements() + spec.output_elements();
            (3.0, element * elements as f64)
        }
        LayerKind::Join(spec) => {
            let elements = spec.pixels() * spec.outputs() + spec.output_elements();
            (spec.channels.len() as f64, element * elements as f64)
        }
    };
    // Images have no gradient: the product that would make it is left out.
    let takes_images = match kind {
        LayerKind::Patches(_) => true,
        LayerKind::Convolution(spec) => spec.first,
        _ => false,
    };
    let backward_products = if takes_images { 1.0 } else { 2.0 };
    let flops = kind.forward_flops(sequence) as f64;
    // The rows of an embedding that no token names are not touched.
    let read = if matches!(kind, LayerKind::Embedding(_)) { 0.0 } else { parameters as f64 };
    let forward = Work { kernels, fixed_bytes: element * read, flops, bytes };
    let backward = Work {
        kernels: 2.0 * kernels,
        // Parameters are read again, gradient sums of four bytes are read and written.
        fixed_bytes: (element + 8.0) * read,
        flops: backward_products * flops,
        bytes: 2.0 * bytes,
    };
    [forward, backward]
}
