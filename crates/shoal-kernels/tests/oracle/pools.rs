//! Pools over images with their channels last.

use proptest::prelude::*;
use shoal_kernels::convolutional::{NO_PLACE, byte_elements};
use shoal_kernels::{Averages, Convolutional, Window};

use crate::common::{config, device, integers, normal, tensor, unwritten};
use crate::convolution::{floats, meetings, window};
use crate::number::{Number, numbers};
use crate::{CASES, assert_close, same_bits, twice};

proptest! {
    #![proptest_config(config(CASES))]

    #[test]
    fn max_pool_takes_the_first_of_the_largest(
        window in window(),
        (with_bias, rectify, with_sums, accumulate) in any::<(bool, bool, bool, bool)>(),
        threads in 1usize..=3,
        seed: u64,
    ) {
        let (kernel, padding) = (window.kernel, window.padding);
        let padding = (padding.0.min(kernel.0 - 1), padding.1.min(kernel.1 - 1));
        let window = Window { padding, ..window };
        prop_assume!(kernel.0 <= window.height + 2 * padding.0 && kernel.1 <= window.width + 2 * padding.1);
        let device = device(threads);
        // Few different numbers, so that equals are frequent.
        let x: Vec<f32> = normal(seed, "x", window.input_elements()).iter().map(|x| x.round()).collect();
        let (channels, elements) = (window.channels, window.rows() * window.channels);
        let (bias, dy) = (normal(seed, "bias", channels), normal(seed, "dy", elements));
        let before = normal(seed, "before", channels);
        let results = twice(|| {
            let mut places = integers(&device, &vec![7; byte_elements(elements)]);
            let (mut out, mut dx) = (unwritten(&device, elements), unwritten(&device, x.len()));
            let mut sums = if accumulate { tensor(&device, &before) } else { unwritten(&device, channels) };
            let added = with_bias.then(|| tensor(&device, &bias));
            device.max_pool(window, &tensor(&device, &x), added.as_ref(), rectify, &mut places, &mut out).unwrap();
            let with = with_sums.then_some((&mut sums, accumulate));
            device.max_pool_gradient(window, &places, &tensor(&device, &dy), &mut dx, with).unwrap();
            let bytes = places.integers().iter().flat_map(|word| word.to_ne_bytes());
            let places = bytes.take(elements).map(f32::from).collect();
            [floats(&[&out, &dx, &sums]), vec![places]].concat()
        });
        // The place and the element; places are met in order, so the first of equals stays.
        let mut best: Vec<Option<(usize, usize)>> = vec![None; elements];
        for (row, spot, element) in meetings(&window) {
            let best = &mut best[row * channels + element % channels];
            if best.is_none_or(|best| x[element] > x[best.1]) {
                *best = Some((spot / channels, element));
            }
        }
        let (mut out, mut places) = (Vec::new(), Vec::new());
        let mut dx = vec![Number::default(); x.len()];
        for (at, best) in best.into_iter().enumerate() {
            let (place, element) = best.unwrap();
            let value = if with_bias { x[element] + bias[at % channels] } else { x[element] };
            let stopped = rectify && value <= 0.0;
            out.push(if stopped { 0.0 } else { value });
            places.push(if stopped { f32::from(NO_PLACE) } else { place as f32 });
            if !stopped {
                dx[element] += Number::from(dy[at]);
            }
        }
        prop_assert!(same_bits(&results[0], &out));
        prop_assert!(same_bits(&results[3], &places));
        assert_close("max_pool_gradient", &results[1], &dx);
        if with_sums {
            let mut sums = if accumulate { numbers(&before) } else { vec![Number::default(); channels] };
            dx.iter().enumerate().for_each(|(i, dx)| sums[i % channels] += *dx);
            assert_close("max_pool_gradient: sums", &results[2], &sums);
        }
    }

    #[test]
    fn a_window_averages_with_zeros_around_the_image(window in window(), threads in 1usize..=3, seed: u64) {
        let device = device(threads);
        let (channels, area) = (window.channels, window.kernel.0 * window.kernel.1);
        let x = normal(seed, "x", window.input_elements());
        let dy = normal(seed, "dy", window.rows() * channels);
        let results = twice(|| {
            let (mut out, mut dx) = (unwritten(&device, dy.len()), unwritten(&device, x.len()));
            device.window_average(window, &tensor(&device, &x), &mut out).unwrap();
            device.window_average_gradient(window, &tensor(&device, &dy), &mut dx).unwrap();
            floats(&[&out, &dx])
        });
        let (x, dy) = (numbers(&x), numbers(&dy));
        let (mut out, mut dx) = (vec![Number::default(); dy.len()], vec![Number::default(); x.len()]);
        for (row, _, element) in meetings(&window) {
            let at = row * channels + element % channels;
            out[at] += x[element] * (1.0 / area as f64);
            dx[element] += dy[at] * (1.0 / area as f64);
        }
        assert_close("window_average", &results[0], &out);
        assert_close("window_average_gradient", &results[1], &dx);
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
}
