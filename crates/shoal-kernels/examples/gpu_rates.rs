//! How fast a GPU does the operations of a GPT-2's training step, and of a ResNet-50's on 128 images, each alone, in
//! bf16: microseconds of a call, and over that time the bytes it must move at least, or its floating-point
//! operations. For a GPU that does nothing else. `cargo run --release --package shoal-kernels --example gpu_rates`

use std::time::Instant;

use shoal_kernels::convolutional::{byte_elements, mask_elements};
use shoal_kernels::device::SCALAR_ELEMENTS;
use shoal_kernels::random::fold;
use shoal_kernels::{
    AdamW, AttentionBackward, AttentionShape, Averages, ColumnNorm, Convolutional, CudaDevice, Device,
    DropoutSite, Element, Gelu, Guard, Linear, LossMode, Mat, MatMut, NormKind, Tensor, Updated, Window,
};

const CALLS: u32 = 20;
const ELEMENT: Element = Element::Bf16;
const ROWS: usize = 32_768;
const WIDTH: usize = 768;
const HIDDEN: usize = 4 * WIDTH;
const VOCABULARY: usize = 50_257;
/// Rows of logits start at multiples of this.
const VOCABULARY_STRIDE: usize = 50_304;

/// Enough for the logits with their products' gradients, or for all of an optimizer's tensors.
const BUDGET_BYTES: u64 = 12 << 30;

/// Seconds of a call.
fn seconds(device: &CudaDevice, mut call: impl FnMut()) -> f64 {
    for _ in 0..3 {
        call();
    }
    device.wait().unwrap();
    let start = Instant::now();
    for _ in 0..CALLS {
        call();
    }
    device.wait().unwrap();
    start.elapsed().as_secs_f64() / f64::from(CALLS)
}

/// An operation that moves memory.
fn report(device: &CudaDevice, what: &str, bytes: usize, call: impl FnMut()) {
    let seconds = seconds(device, call);
    println!("{what:<52} {:>9.1} us {:>8.0} GB/s", 1e6 * seconds, bytes as f64 / seconds / 1e9);
}

/// An operation that computes.
fn report_flops(device: &CudaDevice, what: &str, flops: usize, call: impl FnMut()) {
    let seconds = seconds(device, call);
    println!("{what:<52} {:>9.1} us {:>8.0} TFLOP/s", 1e6 * seconds, flops as f64 / seconds / 1e12);
}

fn integers(device: &CudaDevice, values: &[i32]) -> Tensor {
    let mut tensor = Tensor::new(device.arena(), "a rate", values.len()).unwrap();
    device.write_integers(&mut tensor, values).unwrap();
    tensor
}

fn scalar(device: &CudaDevice, value: f64) -> Tensor {
    let mut scalar = Tensor::new(device.arena(), "a rate", SCALAR_ELEMENTS).unwrap();
    device.set_scalar(&mut scalar, value).unwrap();
    scalar
}

/// Numbers from -1 to 1: what a multiplier burns, and so how fast it may run, depends on its operands.
fn of(device: &CudaDevice, element: Element, elements: usize) -> Tensor {
    let mut tensor = Tensor::of(device.arena(), "a rate", element, elements).unwrap();
    // Drawing is slow: a large tensor repeats what a small one holds, at an odd length so that rows differ.
    let drawn: Vec<f32> = (0..elements.min(1_000_003) as u64)
        .map(|index| (fold(3, index) % 2001) as f32 / 1000.0 - 1.0)
        .collect();
    let fill = &mut |out: &mut [f32]| {
        for part in out.chunks_mut(drawn.len().max(1)) {
            part.copy_from_slice(&drawn[..part.len()]);
        }
    };
    device.write_floats(&mut tensor, fill).unwrap();
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

/// The products of a block and of the head, forward and both gradients.
fn products(device: &CudaDevice) {
    let shapes =
        [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH), (WIDTH, VOCABULARY_STRIDE)];
    for (inputs, outputs) in shapes {
        let (x, weight) = (half(device, ROWS * inputs), half(device, inputs * outputs));
        let (mut y, bias) = (half(device, ROWS * outputs), half(device, outputs));
        let linear = Linear { weight: &weight, inputs, outputs, in_out: true };
        let flops = 2 * ROWS * inputs * outputs;
        let name = |what: &str| format!("{what} 32768 x {inputs} to {outputs}");
        report_flops(device, &name("linear"), flops, || {
            let target = MatMut::new(&mut y, ROWS, outputs);
            device.linear(Mat::new(&x, ROWS, inputs), linear, Some(&bias), None, target).unwrap();
        });
        let (mut dx, mut gradient) = (half(device, ROWS * inputs), float(device, inputs * outputs));
        let dy = Mat::new(&y, ROWS, outputs);
        report_flops(device, &name("linear_input_gradient"), flops, || {
            let target = MatMut::new(&mut dx, ROWS, inputs);
            device.linear_input_gradient(dy, linear, target, false).unwrap();
        });
        report_flops(device, &name("linear_weight_gradient"), flops, || {
            let x = Mat::new(&x, ROWS, inputs);
            device.linear_weight_gradient(x, dy, &mut gradient, true, false).unwrap();
        });
    }
    let (x, dy) = (half(device, ROWS * WIDTH), half(device, ROWS * WIDTH));
    let (up, down) = (half(device, WIDTH * HIDDEN), half(device, HIDDEN * WIDTH));
    let (mut before, mut after) = (half(device, ROWS * HIDDEN), half(device, ROWS * HIDDEN));
    let (bias, flops) = (half(device, HIDDEN), 2 * ROWS * WIDTH * HIDDEN);
    report_flops(device, "linear_gelu 32768 x 768 to 3072", flops, || {
        let linear = Linear { weight: &up, inputs: WIDTH, outputs: HIDDEN, in_out: true };
        let x = Mat::new(&x, ROWS, WIDTH);
        device.linear_gelu(Gelu::Tanh, x, linear, Some(&bias), &mut before, &mut after).unwrap();
    });
    report_flops(device, "linear_gelu_input_gradient 32768 x 768 to 3072", flops, || {
        let linear = Linear { weight: &down, inputs: HIDDEN, outputs: WIDTH, in_out: true };
        let dy = Mat::new(&dy, ROWS, WIDTH);
        device.linear_gelu_input_gradient(Gelu::Tanh, dy, linear, &before, &mut after).unwrap();
    });
}

/// Attention by whatever the device takes for it.
fn attention(device: &CudaDevice, by: &str) {
    for (samples, heads, kv_heads, sequence, head_size, dropped) in [
        (32, 12, 12, 1024, 64, false),
        (8, 25, 25, 1024, 64, false),
        (8, 32, 8, 1024, 64, false),
        (4, 32, 8, 2048, 128, false),
        (32, 12, 12, 1024, 64, true),
    ] {
        let scale = (head_size as f32).powf(-0.5);
        let shape = AttentionShape { samples, sequence, heads, kv_heads, head_size, scale, causal: true };
        let site = dropped.then_some(DropoutSite { rate: 0.1, key: 1, step: None, first_sample: 0 });
        let (qkv, mut gradient) =
            (half(device, shape.rows() * shape.qkv_width()), half(device, shape.rows() * shape.qkv_width()));
        let (mut out, out_gradient) = (
            half(device, shape.rows() * shape.query_width()),
            half(device, shape.rows() * shape.query_width()),
        );
        let mut logsumexp = float(device, shape.rows() * heads);
        // As much as a block gives: see BlockSpec::attention_scratch.
        let mut scratch = float(device, shape.rows() * 2 * (heads + shape.query_width()));
        // Two products forward and five backward, of which a causal mask leaves half.
        let flops = samples * heads * sequence * sequence * head_size;
        let dropout = if dropped { ", dropout 0.1" } else { "" };
        let name = |what: &str| {
            format!("{what} {by}, {samples} x {heads} ({kv_heads}) x {sequence} x {head_size}{dropout}")
        };
        report_flops(device, &name("attention"), 2 * flops, || {
            device.attention(shape, site, None, &qkv, &mut out, &mut logsumexp).unwrap();
        });
        report_flops(device, &name("backward"), 5 * flops, || {
            let of = AttentionBackward {
                lengths: None,
                qkv: &qkv,
                out: &out,
                logsumexp: &logsumexp,
                out_gradient: &out_gradient,
                scratch: &mut scratch,
                qkv_gradient: &mut gradient,
            };
            device.attention_backward(shape, site, of).unwrap();
        });
    }
}

/// Images of a ResNet-50's step.
const IMAGES: usize = 128;

/// What follows a convolution, forward and backward, over images of `side` pixels.
fn pixels(device: &CudaDevice, side: usize, cols: usize) {
    let (rows, count) = (IMAGES * side * side, IMAGES * side * side * cols);
    let name = |what: &str| format!("{what} {rows} x {cols}");
    let (mut x, mut dy, mut out) = (half(device, count), half(device, count), half(device, count));
    let (weight, bias, mut statistics) = (float(device, cols), float(device, cols), float(device, 2 * cols));
    let (mut sums, bits) = (float(device, 2 * cols), count / 8);
    let mut mask = integers(device, &vec![0x3c3c_3c3c; mask_elements(rows, cols)]);
    report(device, &name("column_statistics"), 2 * count, || {
        device.column_statistics(Mat::new(&x, rows, cols), &mut statistics).unwrap();
    });
    let of = Mat::new(&statistics, 2, cols);
    let (mean, variance) = (of.rows(0, 1), of.rows(1, 1));
    let norm = ColumnNorm { eps: 1e-5, rows: 0..rows, cols, mean, variance, weight: &weight, bias: &bias };
    report(device, &name("column_norm, ReLU"), 2 * 2 * count + bits, || {
        device.column_norm(&norm, &x, None, Some(&mut mask), &mut out).unwrap();
    });
    report(device, &name("column_norm, residual, ReLU"), 3 * 2 * count + bits, || {
        device.column_norm(&norm, &x, Some(&dy), Some(&mut mask), &mut out).unwrap();
    });
    report(device, &name("column_norm_sums"), 2 * 2 * count + bits, || {
        device.column_norm_sums(&norm, &x, Some(&mask), &dy, (&mut sums, false), None).unwrap();
    });
    for keep in [false, true] {
        let label = name(if keep { "column_norm_gradient, dy kept" } else { "column_norm_gradient" });
        let moved = if keep { 4 } else { 3 };
        report(device, &label, moved * 2 * count + bits, || {
            device.column_norm_gradient(&norm, &sums, rows, Some(&mask), &mut dy, keep, &mut x).unwrap();
        });
    }
    report(device, &name("relu_gradient"), 2 * 2 * count + bits, || {
        device.relu_gradient(cols, &mask, &mut dy, None).unwrap();
    });
    let mut columns = float(device, cols);
    report(device, &name("relu_gradient, sums"), 2 * 2 * count + bits, || {
        device.relu_gradient(cols, &mask, &mut dy, Some((&mut columns, false))).unwrap();
    });
    report(device, &name("add_scaled"), 3 * 2 * count, || {
        device.add_scaled(1.0, Mat::new(&dy, rows, cols), (&mut out, true)).unwrap();
    });
}

/// The pools of a ResNet-50, and how its images come in.
fn pools(device: &CudaDevice) {
    let images = float(device, IMAGES * 3 * 224 * 224);
    let mut turned = half(device, images.len());
    report(device, "channels_last 128 x 3 x 224 x 224", 6 * images.len(), || {
        device.channels_last(IMAGES, 3, &images, &mut turned).unwrap();
    });
    let (height, width, channels) = (112, 112, 64);
    let window =
        Window { samples: IMAGES, height, width, channels, kernel: (3, 3), stride: 2, padding: (1, 1) };
    let elements = window.rows() * channels;
    let (mut x, mut out) = (half(device, window.input_elements()), half(device, elements));
    let (bias, mut sums) = (float(device, channels), float(device, channels));
    let mut places = integers(device, &vec![0; byte_elements(elements)]);
    let bytes = 2 * x.len() + 3 * elements;
    report(device, "max_pool 3 x 3 of 128 x 112 x 112 x 64", bytes, || {
        device.max_pool(window, &x, Some(&bias), true, &mut places, &mut out).unwrap();
    });
    report(device, "max_pool_gradient", bytes, || {
        device.max_pool_gradient(window, &places, &out, &mut x, None).unwrap();
    });
    report(device, "max_pool_gradient, sums", bytes + 3 * elements, || {
        device.max_pool_gradient(window, &places, &out, &mut x, Some((&mut sums, false))).unwrap();
    });
    let shape = Averages { samples: IMAGES, height: 7, width: 7, channels: 2048, bins: (1, 1) };
    let (mut x, mut out) = (half(device, IMAGES * 7 * 7 * 2048), half(device, IMAGES * 2048));
    let bytes = 2 * (x.len() + out.len());
    report(device, "average_pool 128 x 7 x 7 x 2048", bytes, || {
        device.average_pool(shape, &x, &mut out).unwrap();
    });
    report(device, "average_pool_gradient 128 x 7 x 7 x 2048", bytes, || {
        device.average_pool_gradient(shape, &out, &mut x).unwrap();
    });
}

fn main() {
    let device = match CudaDevice::new("cuda:0", 0, BUDGET_BYTES) {
        Ok(device) => device,
        Err(error) => {
            eprintln!("error: {error}");
            std::process::exit(1);
        }
    };
    let device = &device;
    let (from, mut to) = (float(device, 1 << 28), float(device, 1 << 28));
    report(device, "convert, a copy of 1 GiB", 2 << 30, || device.convert(&from, &mut to).unwrap());
    drop((from, to));
    products(device);
    attention(device, "as chosen");
    let own = device.beside("cuda:0 without cuDNN", BUDGET_BYTES).unwrap().without_cudnn();
    attention(&own, "our own");
    norms(device);
    bias_gradients(device);
    activations(device);
    embedding(device);
    rotary(device);
    pixels(device, 56, 256);
    pixels(device, 7, 2048);
    pools(device);
    loss(device);
    updates(device);
}
