//! How fast the operations that only move memory do so: microseconds of a call, and the bytes it must move at
//! least over that time, beside a plain copy's.

use std::time::Instant;

use shoal_kernels::device::SCALAR_ELEMENTS;
use shoal_kernels::random::fold;
use shoal_kernels::{
    AdamW, AttentionShape, CudaDevice, Device, Element, Gelu, Guard, Linear, LossMode, Mat, MatMut, NormKind,
    Tensor, Updated,
};

use crate::{gpu, integers, scalar};

const CALLS: u32 = 20;
const ELEMENT: Element = Element::Bf16;
const ROWS: usize = 32_768;
const WIDTH: usize = 768;
const HIDDEN: usize = 4 * WIDTH;
const VOCABULARY: usize = 50_257;
/// Rows of logits start at multiples of this.
const VOCABULARY_STRIDE: usize = 50_304;

/// Enough for the logits, or for all of an optimizer's tensors.
const BUDGET_BYTES: u64 = 8 << 30;

fn report(device: &CudaDevice, what: &str, bytes: usize, mut call: impl FnMut()) -> f64 {
    for _ in 0..3 {
        call();
    }
    device.wait().unwrap();
    let start = Instant::now();
    for _ in 0..CALLS {
        call();
    }
    device.wait().unwrap();
    let seconds = start.elapsed().as_secs_f64() / f64::from(CALLS);
    eprintln!("{what:<44} {:>9.1} us {:>8.0} GB/s", 1e6 * seconds, bytes as f64 / seconds / 1e9);
    seconds
}

fn of(device: &CudaDevice, element: Element, elements: usize) -> Tensor {
    let mut numbers = Tensor::new(device.arena(), "a rate", elements.min(1 << 20)).unwrap();
    device
        .write_floats(&mut numbers, &mut |out| {
            for (index, value) in out.iter_mut().enumerate() {
                *value = (fold(3, index as u64) % 2001) as f32 / 1000.0 - 1.0;
            }
        })
        .unwrap();
    let mut tensor = Tensor::of(device.arena(), "a rate", element, elements).unwrap();
    // Numbers at the start, zeros behind: what they are does not change the time.
    device.convert(&numbers, &mut tensor).unwrap();
    tensor
}

fn half(device: &CudaDevice, elements: usize) -> Tensor {
    of(device, ELEMENT, elements)
}

fn float(device: &CudaDevice, elements: usize) -> Tensor {
    of(device, Element::F32, elements)
}

fn norms(device: &CudaDevice) {
    let (x, mut dy, mut dx) =
        (half(device, ROWS * WIDTH), half(device, ROWS * WIDTH), half(device, ROWS * WIDTH));
    let (weight, bias) = (float(device, WIDTH), float(device, WIDTH));
    let (mut dw, mut db) = (float(device, WIDTH), float(device, WIDTH));
    let mut statistics = float(device, 2 * ROWS);
    let mat = Mat::new(&x, ROWS, WIDTH);
    report(device, "norm 32768 x 768", 2 * 2 * ROWS * WIDTH, || {
        device.norm(NormKind::Layer, 1e-5, mat, &weight, Some(&bias), &mut statistics, &mut dx).unwrap();
    });
    let mut sums = float(device, WIDTH);
    for with_sums in [false, true] {
        let label = format!("norm_backward 32768 x 768{}", if with_sums { ", sums of dx" } else { "" });
        report(device, &label, 5 * 2 * ROWS * WIDTH, || {
            device
                .norm_backward(
                    NormKind::Layer,
                    mat,
                    &weight,
                    Some(&bias),
                    &statistics,
                    &mut dy,
                    (&mut dw, true),
                    Some((&mut db, true)),
                    (&mut dx, true),
                    with_sums.then_some((&mut sums, true)),
                )
                .unwrap();
        });
    }
}

fn bias_gradients(device: &CudaDevice) {
    for outputs in [WIDTH, 3 * WIDTH, HIDDEN] {
        let (dy, mut gradient) = (half(device, ROWS * outputs), float(device, outputs));
        let label = format!("bias_gradient 32768 x {outputs}");
        report(device, &label, 2 * ROWS * outputs, || {
            device.bias_gradient(Mat::new(&dy, ROWS, outputs), &mut gradient, true).unwrap();
        });
    }
}

fn activations(device: &CudaDevice) {
    let count = ROWS * HIDDEN;
    let [mut a, mut b, mut c] = [0, 1, 2].map(|_| half(device, count));
    report(device, "gelu 32768 x 3072", 2 * 2 * count, || device.gelu(Gelu::Tanh, &a, &mut b).unwrap());
    report(device, "gelu_backward 32768 x 3072", 4 * 2 * count, || {
        device.gelu_backward(Gelu::Tanh, &mut a, &mut b).unwrap();
    });
    report(device, "swiglu 32768 x 3072", 3 * 2 * count, || device.swiglu(&a, &b, &mut c).unwrap());
    report(device, "swiglu_backward 32768 x 3072", 6 * 2 * count, || {
        device.swiglu_backward(&mut a, &mut b, &mut c).unwrap();
    });
}

fn embedding(device: &CudaDevice) {
    // As in a text: the share of a token falls with its rank.
    let spread = (VOCABULARY as f64 + 1.0).ln();
    let token = |index: u64| {
        let lot = (fold(5, index) >> 11) as f64 / (1u64 << 53) as f64;
        ((lot * spread).exp() as i32 - 1).clamp(0, VOCABULARY as i32 - 1)
    };
    let tokens = integers(device, &(0..ROWS as u64).map(token).collect::<Vec<_>>());
    let (table, positions) = (half(device, VOCABULARY * WIDTH), half(device, 1024 * WIDTH));
    let mut out = half(device, ROWS * WIDTH);
    report(device, "embed 32768 of 50257 x 768", 2 * 2 * ROWS * WIDTH, || {
        device.embed(&tokens, 1024, WIDTH, &table, Some(&positions), None, &mut out).unwrap();
    });
    let mut gradient = float(device, VOCABULARY * WIDTH);
    for accumulate in [true, false] {
        let zeros = if accumulate { 0 } else { 4 * VOCABULARY * WIDTH };
        let label = format!("embed_gradient, accumulate {accumulate}");
        report(device, &label, 2 * ROWS * WIDTH + zeros, || {
            device.embed_gradient(&tokens, WIDTH, &out, &mut gradient, accumulate).unwrap();
        });
    }
    let mut by_position = float(device, 1024 * WIDTH);
    report(device, "position_gradient 32 x 1024 x 768", 2 * ROWS * WIDTH, || {
        device.position_gradient(1024, WIDTH, &out, &mut by_position, true).unwrap();
    });
}

fn loss(device: &CudaDevice) {
    let mut logits = half(device, ROWS * VOCABULARY_STRIDE);
    let targets: Vec<i32> = (0..ROWS as u64).map(|row| (fold(9, row) % VOCABULARY as u64) as i32).collect();
    let (targets, mut loss) = (integers(device, &targets), scalar(device, 0.0));
    report(device, "cross_entropy 32768 x 50257", 2 * 2 * ROWS * VOCABULARY, || {
        let rows = MatMut::columns(&mut logits, ROWS, 0, VOCABULARY, VOCABULARY_STRIDE);
        device.cross_entropy(&targets, 0, LossMode::Gradient { scale: 1e-3 }, rows, &mut loss).unwrap();
    });
}

/// GPT-2's of 124 million parameters.
fn gpt2() -> Vec<usize> {
    let mut lengths = vec![VOCABULARY * WIDTH, 1024 * WIDTH];
    for _ in 0..12 {
        lengths.extend([WIDTH, WIDTH, WIDTH * 3 * WIDTH, 3 * WIDTH, WIDTH * WIDTH, WIDTH]);
        lengths.extend([WIDTH, WIDTH, WIDTH * HIDDEN, HIDDEN, HIDDEN * WIDTH, WIDTH]);
    }
    lengths.extend([WIDTH, WIDTH]);
    lengths
}

fn updates(device: &CudaDevice) {
    let lengths = gpt2();
    let total: usize = lengths.iter().sum();
    assert_eq!((lengths.len(), total), (148, 124_439_808));
    let all = |element: Element| -> Vec<Tensor> {
        lengths.iter().map(|elements| of(device, element, *elements)).collect()
    };
    let (gradients, mut parameters, mut copies) = (all(Element::F32), all(Element::F32), all(ELEMENT));
    let mut states: Vec<Vec<Tensor>> =
        lengths.iter().map(|elements| vec![float(device, *elements), float(device, *elements)]).collect();
    for state in &mut states {
        // Second moments are not negative.
        device.zero(&mut state[1]).unwrap();
    }
    let mut norm = Tensor::new(device.arena(), "a rate", SCALAR_ELEMENTS).unwrap();
    let tensors: Vec<&Tensor> = gradients.iter().collect();
    report(device, "sum_squares, 124M in 148 tensors", 4 * total, || {
        device.sum_squares(&tensors, &mut norm).unwrap();
    });
    let loss = scalar(device, 1.0);
    let guard = Guard { norm_squared: &norm, loss: &loss, scale: 1.0, clip_norm: Some(1.0) };
    let settings = AdamW { lr: 1e-5, beta1: 0.9, beta2: 0.95, eps: 1e-8, update: 10 };
    let owned = parameters.iter_mut().zip(&mut states).zip(&mut copies);
    let mut updated: Vec<Updated> = gradients
        .iter()
        .zip(owned)
        .map(|(gradient, ((parameter, state), copy))| Updated {
            gradient,
            state,
            parameter,
            copy: Some(copy),
            weight_decay: 0.1,
        })
        .collect();
    report(device, "adamw, 124M in 148 tensors, bf16 copies", 30 * total, || {
        device.adamw(&settings, guard, &mut updated).unwrap();
    });
}

fn rotary(device: &CudaDevice) {
    let shape = AttentionShape {
        samples: 8,
        sequence: 1024,
        heads: 32,
        kv_heads: 8,
        head_size: 64,
        scale: 1.0,
        causal: true,
    };
    let table = float(device, shape.sequence * shape.head_size);
    let mut qkv = half(device, shape.rows() * shape.qkv_width());
    let turned = shape.rows() * (shape.heads + shape.kv_heads) * shape.head_size;
    report(device, "rotary 8192 x 40 of 48 heads x 64", 2 * 2 * turned, || {
        device.rotary(shape, &table, false, &mut qkv).unwrap();
    });
}

/// The slope of gelu runs behind a product; a product with next to no inner side shows it.
fn slope(device: &CudaDevice) {
    const INNER: usize = 8;
    let (dy, weight) = (half(device, ROWS * INNER), half(device, HIDDEN * INNER));
    let (before, mut dx) = (half(device, ROWS * HIDDEN), half(device, ROWS * HIDDEN));
    let linear = Linear { weight: &weight, inputs: HIDDEN, outputs: INNER, in_out: true };
    let dy = Mat::new(&dy, ROWS, INNER);
    let bytes = 2 * ROWS * HIDDEN;
    let alone = report(device, "linear_input_gradient 32768 x 3072, from 8", bytes, || {
        device.linear_input_gradient(dy, linear, MatMut::new(&mut dx, ROWS, HIDDEN), false).unwrap();
    });
    let both = report(device, "linear_gelu_input_gradient, the same", 2 * bytes, || {
        device.linear_gelu_input_gradient(Gelu::Tanh, dy, linear, &before, &mut dx).unwrap();
    });
    eprintln!("{:<44} {:>9.1} us", "gelu_slope, the difference", 1e6 * (both - alone));
}

#[test]
#[ignore = "a measurement, for a GPU that does nothing else"]
fn report_rates() {
    if gpu().is_none() {
        return;
    }
    let device = &CudaDevice::new("cuda:rates", 0, BUDGET_BYTES).unwrap();
    let (from, mut to) = (float(device, 1 << 28), float(device, 1 << 28));
    report(device, "convert, a copy of 1 GiB", 2 << 30, || device.convert(&from, &mut to).unwrap());
    drop((from, to));
    norms(device);
    bias_gradients(device);
    activations(device);
    embedding(device);
    rotary(device);
    loss(device);
    updates(device);
    slope(device);
}
