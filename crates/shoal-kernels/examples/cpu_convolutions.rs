//! How fast this machine's cores do the convolutional operations of a ResNet-18's training step, each alone, at 32
//! images of 64 x 64 pixels: milliseconds of the fastest call, and GFLOP/s (padding counted like any pixel).
//! `cargo run --release --package shoal-kernels --example cpu_convolutions [threads]`

use std::time::Instant;

use shoal_kernels::convolutional::{ColumnNorm, byte_elements, mask_elements};
use shoal_kernels::random::fill_normal;
use shoal_kernels::{Convolutional, CpuDevice, Device, Filters, Mat, Tensor, Window};

const SAMPLES: usize = 32;
const CALLS: u32 = 40;
const BUDGET_BYTES: u64 = 1 << 30;
/// As many elements as a layer gives for scratch: see `ConvolutionSpec::scratch_elements`.
const SCRATCH_ELEMENTS: usize = 1 << 20;
const SCRATCH_ROWS: usize = 64;

/// Channels, outputs, size of the images, of the window, its stride, and how many such layers there are.
const LAYERS: [[usize; 6]; 11] = [
    [3, 64, 64, 7, 2, 1],
    [64, 64, 16, 3, 1, 4],
    [64, 128, 16, 3, 2, 1],
    [64, 128, 16, 1, 2, 1],
    [128, 128, 8, 3, 1, 3],
    [128, 256, 8, 3, 2, 1],
    [128, 256, 8, 1, 2, 1],
    [256, 256, 4, 3, 1, 3],
    [256, 512, 4, 3, 2, 1],
    [256, 512, 4, 1, 2, 1],
    [512, 512, 2, 3, 1, 3],
];

/// Channels and size of what is normed, and how often.
const NORMS: [[usize; 3]; 5] = [[64, 32, 1], [64, 16, 4], [128, 8, 5], [256, 4, 5], [512, 2, 5]];

/// Milliseconds of the fastest call: the cores are rarely ours alone.
fn milliseconds(mut call: impl FnMut()) -> f64 {
    call();
    let calls = (0..CALLS).map(|_| {
        let start = Instant::now();
        call();
        start.elapsed().as_secs_f64()
    });
    1e3 * calls.fold(f64::INFINITY, f64::min)
}

fn random(device: &CpuDevice, elements: usize) -> Tensor {
    let mut tensor = Tensor::new(device.arena(), "a rate", elements).unwrap();
    fill_normal(tensor.floats_mut(), 7, 0, 1.0);
    tensor
}

/// Milliseconds of all such layers in a step.
fn convolution(device: &CpuDevice, [channels, outputs, size, kernel, stride, layers]: [usize; 6]) -> f64 {
    let padding = (kernel / 2, kernel / 2);
    let (height, width) = (size, size);
    let window =
        Window { samples: SAMPLES, height, width, channels, kernel: (kernel, kernel), stride, padding };
    let (rows, elements) = (window.rows(), window.elements());
    let x = random(device, window.input_elements());
    let weight = random(device, outputs * elements);
    let (mut dx, mut gradient) = (random(device, x.len()), random(device, weight.len()));
    let (mut out, dy) = (random(device, rows * outputs), random(device, rows * outputs));
    let fit = rows.min((SCRATCH_ELEMENTS / elements).max(SCRATCH_ROWS));
    let mut scratch = (!window.is_row()).then(|| random(device, fit * elements));
    let filters = Filters { weight: &weight, outputs };
    let forward = milliseconds(|| {
        device.convolution(window, &x, filters, None, None, scratch.as_mut(), &mut out).unwrap();
    });
    let input = milliseconds(|| {
        device.convolution_input_gradient(window, &dy, filters, scratch.as_mut(), &mut dx).unwrap();
    });
    let filter = milliseconds(|| {
        let sum = (&mut gradient, false);
        device.convolution_weight_gradient(window, &x, &dy, scratch.as_mut(), sum).unwrap();
    });
    let rate = |milliseconds: f64| (2 * rows * elements * outputs) as f64 / milliseconds / 1e6;
    println!(
        "{kernel} x {kernel} / {stride}, {channels:>3} to {outputs:>3} at {size:>2}: \
         forward {forward:>7.3} ms {:>4.0} GFLOP/s, input gradient {input:>7.3} ms {:>4.0} GFLOP/s, \
         weight gradient {filter:>7.3} ms {:>4.0} GFLOP/s",
        rate(forward),
        rate(input),
        rate(filter),
    );
    // The gradient of the images themselves is nobody's input.
    layers as f64 * (forward + filter + if channels == 3 { 0.0 } else { input })
}

fn norm(device: &CpuDevice, [cols, size, layers]: [usize; 3]) -> f64 {
    let rows = SAMPLES * size * size;
    let [mut x, residual, mut dy, mut out] = [0; 4].map(|_| random(device, rows * cols));
    let [weight, bias] = [0; 2].map(|_| random(device, cols));
    let [mut statistics, mut sums] = [0; 2].map(|_| random(device, 2 * cols));
    let mut mask = Tensor::zeros(device.arena(), "a rate", mask_elements(rows, cols)).unwrap();
    let measure =
        milliseconds(|| device.column_statistics(Mat::new(&x, rows, cols), &mut statistics).unwrap());
    let [mean, variance] = [0, 1].map(|row| Mat::new(&statistics, 2, cols).rows(row, 1));
    let norm = ColumnNorm { eps: 1e-5, rows: 0..rows, cols, mean, variance, weight: &weight, bias: &bias };
    let forward =
        milliseconds(|| device.column_norm(&norm, &x, Some(&residual), Some(&mut mask), &mut out).unwrap());
    let sum = milliseconds(|| {
        device.column_norm_sums(&norm, &x, Some(&mask), &dy, (&mut sums, false), None).unwrap()
    });
    device.zero(&mut sums).unwrap();
    let gradient = milliseconds(|| {
        device.column_norm_gradient(&norm, &sums, rows, Some(&mask), &mut dy, true, &mut x).unwrap();
    });
    println!(
        "norm of {cols:>3} at {size:>2}: statistics {measure:>6.3} ms, forward with residual and ReLU {forward:>6.3} \
         ms, sums {sum:>6.3} ms, gradient {gradient:>6.3} ms"
    );
    layers as f64 * (measure + forward + sum + gradient)
}

fn max_pool(device: &CpuDevice) -> f64 {
    let (kernel, stride, padding) = ((3, 3), 2, (1, 1));
    let window = Window { samples: SAMPLES, height: 32, width: 32, channels: 64, kernel, stride, padding };
    let elements = window.rows() * window.channels;
    let (x, mut dx) = (random(device, window.input_elements()), random(device, window.input_elements()));
    let (mut out, dy) = (random(device, elements), random(device, elements));
    let mut places = Tensor::zeros(device.arena(), "a rate", byte_elements(elements)).unwrap();
    let forward = milliseconds(|| device.max_pool(window, &x, None, false, &mut places, &mut out).unwrap());
    let gradient = milliseconds(|| device.max_pool_gradient(window, &places, &dy, &mut dx, None).unwrap());
    println!("max pool 3 x 3 / 2 of 64 at 32: forward {forward:.3} ms, gradient {gradient:.3} ms");
    forward + gradient
}

fn main() {
    let threads = std::env::args().nth(1).map_or(2, |threads| threads.parse().expect("a number of threads"));
    let device = CpuDevice::new("cpu", threads, BUDGET_BYTES).unwrap();
    let convolutions: f64 = LAYERS.into_iter().map(|layer| convolution(&device, layer)).sum();
    let norms: f64 = NORMS.into_iter().map(|layer| norm(&device, layer)).sum();
    let pool = max_pool(&device);
    let all = convolutions + norms + pool;
    println!(
        "a step: {convolutions:.1} ms of convolutions, {norms:.1} of norms, {pool:.1} of the pool, {all:.1} in all"
    );
}
