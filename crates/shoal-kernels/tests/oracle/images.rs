//! Images in patches, the rows around them, and the loss of classes.

use proptest::prelude::*;
use shoal_kernels::device::SCALAR_ELEMENTS;
use shoal_kernels::{ClassLoss, Device, LossMode, Mat, MatMut, PatchShape, Tensor};

use crate::common::{config, device, normal, side, tensor, unwritten, whole};
use crate::number::{Number, number, numbers};
use crate::{CASES, assert_close, twice};

proptest! {
    #![proptest_config(config(CASES))]

    /// Pixel by pixel: which patch it falls in, and where in its row.
    #[test]
    fn patches(
        (samples, channels, side, patch) in (1usize..4, 1usize..5, 1usize..5, 1usize..6),
        threads in 1usize..=3,
        seed: u64,
    ) {
        let size = side * patch;
        let shape = PatchShape { samples, channels, size, patch };
        let images = normal(seed, "images", samples * channels * size * size);
        let width = channels * patch * patch;
        let device = device(threads);
        let out = twice(|| {
            let mut out = unwritten(&device, samples * (side * side + 1) * width);
            device.patches(shape, &tensor(&device, &images), &mut out).unwrap();
            vec![out.floats().to_vec()]
        });
        let mut expected = vec![0.0f32; out[0].len()];
        for (index, pixel) in images.iter().enumerate() {
            let (x, y) = (index % size, index / size % size);
            let (channel, sample) = (index / (size * size) % channels, index / (size * size * channels));
            let row = sample * (side * side + 1) + 1 + y / patch * side + x / patch;
            expected[row * width + (channel * patch + y % patch) * patch + x % patch] = *pixel;
        }
        prop_assert_eq!(&out[0], &expected);
    }

    #[test]
    fn rows_are_placed_and_set(
        (samples, sequence, width) in (1usize..4, side(), side()),
        spare_positions in 0usize..3,
        threads in 1usize..=3,
        seed: u64,
    ) {
        let device = device(threads);
        let rows = normal(seed, "rows", samples * sequence * width);
        let first = normal(seed, "first", width);
        let positions = normal(seed, "positions", (sequence + spare_positions) * width);
        let results = twice(|| {
            let mut out = tensor(&device, &rows);
            let (first, positions) = (tensor(&device, &first), tensor(&device, &positions));
            device.place_rows(sequence, width, &first, &positions, &mut out).unwrap();
            let placed = out.floats().to_vec();
            let stride = sequence * width;
            let from = Mat::new(&first, 1, width);
            let last = samples * stride - width;
            device.set_rows(None, MatMut::columns(&mut out, samples, 0, width, stride)).unwrap();
            let cleared = out.floats().to_vec();
            let target = MatMut { tensor: &mut out, offset: last, rows: 1, cols: width, stride: width };
            device.set_rows(Some(from), target).unwrap();
            vec![placed, cleared, out.floats().to_vec()]
        });
        let place = |index: usize| index % (sequence * width);
        let placed: Vec<f32> = rows
            .iter()
            .enumerate()
            .map(|(index, value)| if place(index) < width { first[place(index)] } else { *value })
            .enumerate()
            .map(|(index, value)| value + positions[place(index)])
            .collect();
        let zero = |(index, value): (usize, &f32)| if place(index) < width { 0.0 } else { *value };
        let cleared: Vec<f32> = placed.iter().enumerate().map(zero).collect();
        let mut set = cleared.clone();
        let last = set.len() - width;
        set[last..].copy_from_slice(&first);
        prop_assert_eq!(results, vec![placed, cleared, set]);
    }

    #[test]
    fn class_loss(
        (rows, classes) in (side(), side()),
        apart in prop::sample::select(vec![0usize, 0, 1, 16]),
        ends_whole: bool,
        spare_targets in 0usize..3,
        spread in prop::sample::select(vec![0.1f32, 1.0, 10.0]),
        ignored_per_ten in prop::sample::select(vec![0usize, 3, 10]),
        smoothing in prop::sample::select(vec![0.0f32, 0.1, 0.9]),
        scale in prop::sample::select(vec![1.0f32, 0.01, -2.0]),
        threads in 1usize..=3,
        seed: u64,
    ) {
        let logits: Vec<f32> =
            normal(seed, "logits", rows * classes).iter().map(|logit| logit * spread).collect();
        let mut targets = whole(seed, "targets", rows, classes);
        for (target, lot) in targets.iter_mut().zip(whole(seed, "ignored", rows, 10)) {
            *target = if (lot as usize) < ignored_per_ten { -100 } else { *target };
        }
        let device = device(threads);
        let all: Vec<i32> = std::iter::repeat_n(0, spare_targets).chain(targets.clone()).collect();
        let held = Tensor::from_integers(device.arena(), "targets", &all).unwrap();
        let stride = classes + apart;
        let end = rows * stride - if ends_whole { 0 } else { apart };
        let run = |mode: LossMode| {
            let mut place = unwritten(&device, end);
            for (row, logits) in logits.chunks_exact(classes).enumerate() {
                place.floats_mut()[row * stride..][..classes].copy_from_slice(logits);
            }
            let (mut loss, mut correct) = (unwritten(&device, SCALAR_ELEMENTS), unwritten(&device, SCALAR_ELEMENTS));
            device.set_scalar(&mut loss, 3.5).unwrap();
            device.set_scalar(&mut correct, 2.0).unwrap();
            let rows = MatMut::columns(&mut place, rows, 0, classes, stride);
            let settings = ClassLoss { mode, smoothing };
            device.class_loss(&held, spare_targets, settings, rows, &mut loss, Some(&mut correct)).unwrap();
            let (mut gradient, mut between) = (Vec::new(), Vec::new());
            for row in place.floats().chunks(stride) {
                gradient.extend_from_slice(&row[..classes]);
                between.extend_from_slice(&row[classes..]);
            }
            if mode != LossMode::LossOnly {
                assert!(between.iter().all(|value| *value == 0.0), "between two rows the gradient is zero");
            }
            let scalar = |tensor: &Tensor, start: f64| (device.scalar(tensor).unwrap() - start) as f32;
            vec![vec![scalar(&loss, 3.5)], vec![scalar(&correct, 2.0)], gradient]
        };
        let results = twice(|| run(LossMode::Gradient { scale }));
        let loss_only = twice(|| run(LossMode::LossOnly).into_iter().take(2).collect());

        let (mut loss, mut correct) = (Number::default(), 0.0f32);
        let mut gradient = vec![Number::default(); logits.len()];
        let share = f64::from(smoothing);
        let logits = numbers(&logits);
        for (row, target) in targets.iter().enumerate().filter(|(_, target)| **target >= 0) {
            let (row, target) = (row * classes, *target as usize);
            let line = &logits[row..row + classes];
            let highest = number(line.iter().map(|logit| logit.value).fold(f64::NEG_INFINITY, f64::max));
            correct += f32::from(line.iter().position(|logit| logit.value == highest.value) == Some(target));
            let powers: Vec<Number> = line.iter().map(|logit| (*logit - highest).exp()).collect();
            let sum: Number = powers.iter().copied().sum();
            for (col, power) in powers.iter().enumerate() {
                let hit = if col == target { 1.0 - share } else { 0.0 };
                let wanted = hit + share / classes as f64;
                loss += (sum.ln() + highest - line[col]) * wanted;
                gradient[row + col] = (*power / sum - number(wanted)) * f64::from(scale);
            }
        }
        assert_close("the loss", &results[0], &[loss]);
        assert_close("the loss alone", &loss_only[0], &[loss]);
        prop_assert_eq!(results[1][0], correct);
        prop_assert_eq!(loss_only[1][0], correct);
        assert_close("the logits' gradient", &results[2], &gradient);
    }
}
