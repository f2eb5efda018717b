//! Convolutions, ReLU and what turns or joins images, with channels last.

use proptest::prelude::*;
use shoal_kernels::convolutional::mask_elements;
use shoal_kernels::{Convolutional, Filters, Mat, MatMut, Tensor, Window};

use crate::common::{config, device, integers, normal, tensor, unwritten, whole};
use crate::number::{Number, numbers};
use crate::{CASES, assert_close, same_bits, twice};

prop_compose! {
    pub fn window()(
        samples in 1usize..=3,
        (height, width) in (1usize..=9, 1usize..=9),
        channels in prop_oneof![4 => 1usize..=20, 1 => 30usize..=70],
        (down, across) in (1usize..=4, 1usize..=4),
        stride in 1usize..=3,
        padding in (0usize..=2, 0usize..=2),
    ) -> Window {
        let kernel = (down.min(height + 2 * padding.0), across.min(width + 2 * padding.1));
        Window { samples, height, width, channels, kernel, stride, padding }
    }
}

/// Every (row of the output, place in the filters' rows, element of the images) that meet.
pub fn meetings(window: &Window) -> Vec<(usize, usize, usize)> {
    let Window { samples, height, width, channels, kernel, stride, padding } = *window;
    let (down, across) = window.places();
    let mut all = Vec::new();
    for row in 0..samples * down * across {
        let (sample, y, x) = (row / across / down, row / across % down, row % across);
        for spot in 0..window.elements() {
            let (ky, kx, channel) = (spot / channels / kernel.1, spot / channels % kernel.1, spot % channels);
            let (line, column) = (y * stride + ky, x * stride + kx);
            if (padding.0..height + padding.0).contains(&line)
                && (padding.1..width + padding.1).contains(&column)
            {
                let pixel = (sample * height + line - padding.0) * width + column - padding.1;
                all.push((row, spot, pixel * channels + channel));
            }
        }
    }
    all
}

pub fn floats(tensors: &[&Tensor]) -> Vec<Vec<f32>> {
    tensors.iter().map(|tensor| tensor.floats().to_vec()).collect()
}

/// Whether the mask lets an element through.
pub fn passes(mask: &[i32], cols: usize, element: usize) -> bool {
    let (row, column) = (element / cols, element % cols);
    mask[row * cols.div_ceil(32) + column / 32] >> (column % 32) & 1 == 1
}

/// Holds the bits against what they are of; those past a row's end are free.
pub fn assert_mask(mask: &[i32], cols: usize, rectified: &[f32]) {
    for (element, value) in rectified.iter().enumerate() {
        assert_eq!(passes(mask, cols, element), *value > 0.0, "element {element} is {value}");
    }
}

/// ReLU, whose error is at most that of what it is of.
pub fn rectified(of: &[Number]) -> Vec<Number> {
    of.iter().map(|of| Number { value: of.value.max(0.0), ..*of }).collect()
}

/// The least that a layer gives: see `ConvolutionSpec::scratch_elements`.
pub fn scratch_elements(window: &Window) -> Option<usize> {
    let fit = ((1 << 20) / window.elements()).max(64);
    (!window.is_row()).then(|| window.rows().min(fit) * window.elements())
}

/// Everything that convolutions make of random numbers, held against f64.
fn check_convolution(
    window: Window,
    outputs: usize,
    (with_bias, with_mask, accumulate): (bool, bool, bool),
    threads: usize,
    seed: u64,
) {
    let device = device(threads);
    let (rows, elements) = (window.rows(), window.elements());
    let x = normal(seed, "x", window.input_elements());
    let (weight, bias) = (normal(seed, "weight", outputs * elements), normal(seed, "bias", outputs));
    let dy = normal(seed, "dy", rows * outputs);
    let before = normal(seed, "before", weight.len());
    let results = twice(|| {
        let (x, weight, bias) = (tensor(&device, &x), tensor(&device, &weight), tensor(&device, &bias));
        let dy = tensor(&device, &dy);
        let filters = Filters { weight: &weight, outputs };
        let bias = with_bias.then_some(&bias);
        let mut room = scratch_elements(&window).map(|elements| unwritten(&device, elements));
        let (mut out, mut dx) = (unwritten(&device, rows * outputs), unwritten(&device, x.len()));
        let mut mask = with_mask.then(|| integers(&device, &vec![7; mask_elements(rows, outputs)]));
        let mut dw = if accumulate { tensor(&device, &before) } else { unwritten(&device, weight.len()) };
        device.convolution(window, &x, filters, bias, mask.as_mut(), room.as_mut(), &mut out).unwrap();
        device.convolution_input_gradient(window, &dy, filters, room.as_mut(), &mut dx).unwrap();
        let sum = (&mut dw, accumulate);
        device.convolution_weight_gradient(window, &x, &dy, room.as_mut(), sum).unwrap();
        if let Some(mask) = mask {
            assert_mask(mask.integers(), outputs, out.floats());
        }
        floats(&[&out, &dx, &dw])
    });
    let (x, weight, bias, dy) = (numbers(&x), numbers(&weight), numbers(&bias), numbers(&dy));
    let start = |output: usize| if with_bias { bias[output] } else { Number::default() };
    let mut out: Vec<Number> = (0..rows * outputs).map(|i| start(i % outputs)).collect();
    let mut dx = vec![Number::default(); x.len()];
    let mut dw = if accumulate { numbers(&before) } else { vec![Number::default(); weight.len()] };
    for (row, spot, pixel) in meetings(&window) {
        for output in 0..outputs {
            let (here, there) = (row * outputs + output, output * elements + spot);
            out[here] += x[pixel] * weight[there];
            dx[pixel] += dy[here] * weight[there];
            dw[there] += dy[here] * x[pixel];
        }
    }
    assert_close("convolution", &results[0], &if with_mask { rectified(&out) } else { out });
    assert_close("convolution_input_gradient", &results[1], &dx);
    assert_close("convolution_weight_gradient", &results[2], &dw);
}

/// Windows as models have them, past the sizes at which work is cut into pieces and over threads.
#[test]
fn convolutions_in_several_pieces() {
    let window = |samples, size, channels, kernel: usize, stride| {
        let padding = (kernel / 2, kernel / 2);
        let kernel = (kernel, kernel);
        Window { samples, height: size, width: size, channels, kernel, stride, padding }
    };
    for (window, outputs) in [
        (window(3, 32, 3, 7, 2), 33),
        (window(7, 16, 32, 3, 1), 17),
        (window(5, 9, 48, 3, 2), 70),
        (window(5, 12, 40, 1, 2), 24),
        (window(33, 2, 64, 3, 1), 64),
        (Window { height: 5, width: 23, padding: (0, 2), ..window(3, 0, 19, 3, 1) }, 20),
    ] {
        check_convolution(window, outputs, (true, true, true), 2, 11);
        check_convolution(window, outputs, (false, false, false), 3, 12);
    }
}

proptest! {
    #![proptest_config(config(CASES))]

    #[test]
    fn convolution_and_its_gradients(
        window in window(),
        outputs in prop_oneof![4 => 1usize..=20, 1 => 30usize..=70],
        with in any::<(bool, bool, bool)>(),
        threads in 1usize..=3,
        seed: u64,
    ) {
        check_convolution(window, outputs, with, threads, seed);
    }

    #[test]
    fn relu_gradient_follows_the_bits(
        (rows, cols) in (1usize..40, 1usize..100),
        (with_sums, accumulate) in any::<(bool, bool)>(),
        threads in 1usize..=3,
        seed: u64,
    ) {
        let device = device(threads);
        let dy = normal(seed, "dy", rows * cols);
        let before = normal(seed, "before", cols);
        let bits = whole(seed, "bits", mask_elements(rows, cols), 1 << 32);
        let results = twice(|| {
            let (mask, mut gradient) = (integers(&device, &bits), tensor(&device, &dy));
            let mut sums = if accumulate { tensor(&device, &before) } else { unwritten(&device, cols) };
            let with = with_sums.then_some((&mut sums, accumulate));
            device.relu_gradient(cols, &mask, &mut gradient, with).unwrap();
            floats(&[&gradient, &sums])
        });
        let slopes: Vec<f32> =
            dy.iter().enumerate().map(|(i, dy)| if passes(&bits, cols, i) { *dy } else { 0.0 }).collect();
        prop_assert!(same_bits(&results[0], &slopes));
        if with_sums {
            let mut sums = if accumulate { numbers(&before) } else { vec![Number::default(); cols] };
            slopes.iter().enumerate().for_each(|(i, slope)| sums[i % cols] += Number::from(*slope));
            assert_close("relu_gradient: sums", &results[1], &sums);
        }
    }

    #[test]
    fn channels_go_last(samples in 1usize..4, channels in 1usize..9, pixels in 1usize..50, seed: u64) {
        let device = device(2);
        let images = normal(seed, "images", samples * channels * pixels);
        let mut out = unwritten(&device, images.len());
        device.channels_last(samples, channels, &tensor(&device, &images), &mut out).unwrap();
        for (at, value) in out.floats().iter().enumerate() {
            let (sample, pixel, channel) = (at / channels / pixels, at / channels % pixels, at % channels);
            prop_assert_eq!(*value, images[(sample * channels + channel) * pixels + pixel]);
        }
    }

    /// Images side by side, and apart again.
    #[test]
    fn copied_rows_leave_what_lies_between(
        rows in 1usize..200,
        parts in prop::collection::vec(1usize..70, 1..5),
        threads in 1usize..=3,
        seed: u64,
    ) {
        let device = device(threads);
        let width: usize = parts.iter().sum();
        let mut joined = tensor(&device, &vec![-7.0; rows * (width + 1)]);
        let mut first = 1;
        for (index, cols) in parts.iter().enumerate() {
            let values = normal(seed, &format!("part {index}"), rows * cols);
            let part = tensor(&device, &values);
            let to = MatMut::columns(&mut joined, rows, first, *cols, width + 1);
            device.copy_rows(Mat::new(&part, rows, *cols), to).unwrap();
            for (row, values) in values.chunks(*cols).enumerate() {
                prop_assert!(same_bits(&joined.floats()[row * (width + 1) + first..][..*cols], values));
            }
            let mut back = unwritten(&device, rows * cols);
            let from = Mat::columns(&joined, rows, first, *cols, width + 1);
            device.copy_rows(from, MatMut::new(&mut back, rows, *cols)).unwrap();
            prop_assert!(same_bits(back.floats(), &values));
            first += cols;
        }
        prop_assert!(joined.floats().iter().step_by(width + 1).all(|before| *before == -7.0));
    }

    #[test]
    fn add_scaled(rows in 1usize..9, cols in 1usize..70, accumulate: bool, factor in -2f32..2.0, seed: u64) {
        let device = device(2);
        let (x, before) = (normal(seed, "x", rows * cols), normal(seed, "before", rows * cols));
        let mut out = if accumulate { tensor(&device, &before) } else { unwritten(&device, rows * cols) };
        let x_tensor = tensor(&device, &x);
        device.add_scaled(factor, Mat::new(&x_tensor, rows, cols), (&mut out, accumulate)).unwrap();
        let start = |i: usize| if accumulate { Number::from(before[i]) } else { Number::default() };
        let expected: Vec<Number> =
            (0..x.len()).map(|i| start(i) + Number::from(x[i]) * f64::from(factor)).collect();
        assert_close("add_scaled", out.floats(), &expected);
    }
}
