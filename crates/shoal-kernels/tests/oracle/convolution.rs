//! Convolutions, pools, batch normalisation and what joins images, with channels last.

use proptest::prelude::*;
use shoal_kernels::convolutional::mask_elements;
use shoal_kernels::{Averages, Convolutional, Filters, Mat, Tensor, Window};

use crate::common::{config, device, integers, normal, tensor, unwritten};
use crate::number::{Number, number, numbers};
use crate::{CASES, assert_close, same_bits, twice};

prop_compose! {
    fn window()(
        samples in 1usize..=3,
        (height, width) in (1usize..=9, 1usize..=9),
        channels in 1usize..=20,
        (down, across) in (1usize..=4, 1usize..=4),
        stride in 1usize..=3,
        padding in 0usize..=2,
    ) -> Window {
        let kernel = (down.min(height + 2 * padding), across.min(width + 2 * padding));
        Window { samples, height, width, channels, kernel, stride, padding }
    }
}

/// Every (row of the output, place in the filters' rows, element of the images) that meet.
fn meetings(window: &Window) -> Vec<(usize, usize, usize)> {
    let Window { samples, height, width, channels, kernel, stride, padding } = *window;
    let (down, across) = window.places();
    let mut all = Vec::new();
    for row in 0..samples * down * across {
        let (sample, y, x) = (row / across / down, row / across % down, row % across);
        for (channel, ky, kx) in (0..channels * kernel.0 * kernel.1)
            .map(|i| (i / kernel.1 / kernel.0, i / kernel.1 % kernel.0, i % kernel.1))
        {
            let (line, column) = (y * stride + ky, x * stride + kx);
            if (padding..height + padding).contains(&line) && (padding..width + padding).contains(&column) {
                let pixel = (sample * height + line - padding) * width + column - padding;
                let spot = (channel * kernel.0 + ky) * kernel.1 + kx;
                all.push((row, spot, pixel * channels + channel));
            }
        }
    }
    all
}

fn floats(tensors: &[&Tensor]) -> Vec<Vec<f32>> {
    tensors.iter().map(|tensor| tensor.floats().to_vec()).collect()
}

proptest! {
    #![proptest_config(config(CASES))]

    #[test]
    fn convolution_and_its_gradients(
        window in window(),
        outputs in 1usize..=20,
        fit in 1usize..40,
        (with_bias, accumulate) in any::<(bool, bool)>(),
        threads in 1usize..=3,
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
            let mut room = (!window.is_pixel()).then(|| unwritten(&device, fit * elements));
            let (mut out, mut dx) = (unwritten(&device, rows * outputs), unwritten(&device, x.len()));
            let mut dw =
                if accumulate { tensor(&device, &before) } else { unwritten(&device, weight.len()) };
            device.convolution(window, &x, filters, bias, room.as_mut(), &mut out).unwrap();
            device.convolution_input_gradient(window, &dy, filters, room.as_mut(), &mut dx).unwrap();
            let sum = (&mut dw, accumulate);
            device.convolution_weight_gradient(window, &x, &dy, room.as_mut(), sum).unwrap();
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
        assert_close("convolution", &results[0], &out);
        assert_close("convolution_input_gradient", &results[1], &dx);
        assert_close("convolution_weight_gradient", &results[2], &dw);
    }

    #[test]
    fn max_pool_takes_the_first_of_the_largest(window in window(), threads in 1usize..=3, seed: u64) {
        let padding = window.padding.min(window.kernel.0.min(window.kernel.1) - 1);
        let window = Window { padding, ..window };
        prop_assume!(window.kernel.0 <= window.height + 2 * padding && window.kernel.1 <= window.width + 2 * padding);
        let device = device(threads);
        // Few different numbers, so that equals are frequent.
        let x: Vec<f32> = normal(seed, "x", window.input_elements()).iter().map(|x| x.round()).collect();
        let (channels, elements) = (window.channels, window.rows() * window.channels);
        let dy = normal(seed, "dy", elements);
        let results = twice(|| {
            let (mut out, mut places) = (unwritten(&device, elements), unwritten(&device, elements));
            let mut dx = unwritten(&device, x.len());
            device.max_pool(window, &tensor(&device, &x), &mut places, &mut out).unwrap();
            device.max_pool_gradient(window, &places, &tensor(&device, &dy), &mut dx).unwrap();
            floats(&[&out, &dx])
        });
        let mut best: Vec<Option<usize>> = vec![None; elements];
        // By row, then by pixel: the first of equals stands first.
        let mut all = meetings(&window);
        all.sort_by_key(|(row, _, element)| (*row, *element));
        for (row, _, element) in all {
            let best = &mut best[row * channels + element % channels];
            if best.is_none_or(|best| x[element] > x[best]) {
                *best = Some(element);
            }
        }
        let mut dx = vec![Number::default(); x.len()];
        for (at, best) in best.iter().enumerate() {
            dx[best.unwrap()] += number(f64::from(dy[at]));
        }
        let out: Vec<f32> = best.iter().map(|best| x[best.unwrap()]).collect();
        prop_assert!(same_bits(&results[0], &out));
        assert_close("max_pool_gradient", &results[1], &dx);
    }

    #[test]
    fn averages_over_any_number_of_bins(
        (samples, height, width, channels) in (1usize..=3, 1usize..=9, 1usize..=9, 1usize..=20),
        bins in (1usize..=9, 1usize..=9),
        threads in 1usize..=3,
        seed: u64,
    ) {
        let shape = Averages { samples, height, width, channels, bins };
        let device = device(threads);
        let x = normal(seed, "x", samples * height * width * channels);
        let dy = normal(seed, "dy", samples * bins.0 * bins.1 * channels);
        let results = twice(|| {
            let (mut out, mut dx) = (unwritten(&device, dy.len()), unwritten(&device, x.len()));
            device.average_pool(shape, &tensor(&device, &x), &mut out).unwrap();
            device.average_pool_gradient(shape, &tensor(&device, &dy), &mut dx).unwrap();
            floats(&[&out, &dx])
        });
        let (x, dy) = (numbers(&x), numbers(&dy));
        let (mut out, mut dx) = (vec![Number::default(); dy.len()], vec![Number::default(); x.len()]);
        // A bin goes from where the exact share begins, rounded down, to where it ends, rounded up.
        let edge = |at: usize, bins: usize, size: usize| (at * size) as f64 / bins as f64;
        let range = |at: usize, bins: usize, size: usize| {
            edge(at, bins, size).floor() as usize..edge(at + 1, bins, size).ceil() as usize
        };
        for (at, out) in out.iter_mut().enumerate() {
            let (channel, place) = (at % channels, at / channels);
            let (sample, y, z) = (place / bins.1 / bins.0, place / bins.1 % bins.0, place % bins.1);
            let (lines, columns) = (range(y, bins.0, height), range(z, bins.1, width));
            let share = 1.0 / (lines.len() * columns.len()) as f64;
            for line in lines {
                for column in columns.clone() {
                    let from = ((sample * height + line) * width + column) * channels + channel;
                    *out += x[from] * share;
                    dx[from] += dy[at] * share;
                }
            }
        }
        assert_close("average_pool", &results[0], &out);
        assert_close("average_pool_gradient", &results[1], &dx);
    }

    #[test]
    fn relu_remembers_what_was_positive(elements in 1usize..400, threads in 1usize..=3, seed: u64) {
        let device = device(threads);
        let (x, dy) = (normal(seed, "x", elements), normal(seed, "dy", elements));
        let mut mask = integers(&device, &vec![7; mask_elements(elements)]);
        let (mut masked, mut plain) = (tensor(&device, &x), tensor(&device, &x));
        let mut gradient = tensor(&device, &dy);
        device.relu(&mut masked, Some(&mut mask)).unwrap();
        device.relu(&mut plain, None).unwrap();
        device.relu_gradient(&mask, &mut gradient).unwrap();
        let expected: Vec<f32> = x.iter().map(|x| x.max(0.0)).collect();
        prop_assert!(same_bits(masked.floats(), &expected) && same_bits(plain.floats(), &expected));
        let slopes: Vec<f32> = x.iter().zip(&dy).map(|(x, dy)| if *x > 0.0 { *dy } else { 0.0 }).collect();
        prop_assert!(same_bits(gradient.floats(), &slopes));
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

    #[test]
    fn batch_normalisation(
        (rows, cols) in (2usize..120, 1usize..70),
        shift in prop::sample::select(vec![0.0f32, 3.0]),
        with_residual: bool,
        threads in 1usize..=3,
        seed: u64,
    ) {
        const EPS: f32 = 1e-5;
        let device = device(threads);
        let x: Vec<f32> = normal(seed, "x", rows * cols).iter().map(|x| x + shift).collect();
        let (weight, bias) = (normal(seed, "weight", cols), normal(seed, "bias", cols));
        let (residual, dy) = (normal(seed, "residual", rows * cols), normal(seed, "dy", rows * cols));
        let results = twice(|| {
            let (x, weight, bias) = (tensor(&device, &x), tensor(&device, &weight), tensor(&device, &bias));
            let (residual, dy) = (tensor(&device, &residual), tensor(&device, &dy));
            let (mut statistics, mut sums) = (unwritten(&device, 2 * cols), unwritten(&device, 2 * cols));
            let mut out = unwritten(&device, rows * cols);
            let rows_of_x = Mat::new(&x, rows, cols);
            device.column_statistics(rows_of_x, &mut statistics).unwrap();
            let [mean, variance] = [0, 1].map(|row| Mat::new(&statistics, 2, cols).rows(row, 1));
            let added = with_residual.then_some(&residual);
            device.column_norm(EPS, rows_of_x, mean, variance, &weight, &bias, added, &mut out).unwrap();
            device.column_norm_sums(EPS, rows_of_x, &statistics, &dy, &mut sums).unwrap();
            let mut gradient = tensor(&device, dy.floats());
            let to = &mut gradient;
            device.column_norm_gradient(EPS, rows_of_x, &statistics, &weight, &sums, rows, to).unwrap();
            floats(&[&statistics, &out, &sums, &gradient])
        });
        let (x, weight, bias) = (numbers(&x), numbers(&weight), numbers(&bias));
        let (residual, dy) = (numbers(&residual), numbers(&dy));
        let down = |value: &dyn Fn(usize) -> Number, column: usize| -> Number {
            (0..rows).map(|row| value(row * cols + column)).sum()
        };
        let columns = |value: &dyn Fn(usize) -> Number| (0..cols).map(value).collect::<Vec<_>>();
        let n = rows as f64;
        let mean = columns(&|c| down(&|i| x[i], c) * (1.0 / n));
        let variance = columns(&|c| down(&|i| (x[i] - mean[c]) * (x[i] - mean[c]), c) * (1.0 / n));
        let normed = |i: usize| (x[i] - mean[i % cols]) / (variance[i % cols] + number(f64::from(EPS))).sqrt();
        let plain = columns(&|c| down(&|i| dy[i], c));
        let along = columns(&|c| down(&|i| dy[i] * normed(i), c));
        let all = |value: &dyn Fn(usize) -> Number| (0..rows * cols).map(value).collect::<Vec<_>>();
        let out = all(&|i| {
            let value = normed(i) * weight[i % cols] + bias[i % cols];
            if with_residual { value + residual[i] } else { value }
        });
        let gradient = all(&|i| {
            let c = i % cols;
            let slope = dy[i] - (plain[c] + normed(i) * along[c]) * (1.0 / n);
            weight[c] / (variance[c] + number(f64::from(EPS))).sqrt() * slope
        });
        assert_close("column_statistics", &results[0], &[mean.clone(), variance.clone()].concat());
        assert_close("column_norm", &results[1], &out);
        assert_close("column_norm_sums", &results[2], &[plain.clone(), along.clone()].concat());
        assert_close("column_norm_gradient", &results[3], &gradient);
    }
}
