//! Cross-entropy in place: losses that add up, gradients where the logits were.

use proptest::prelude::*;
use shoal_kernels::device::SCALAR_ELEMENTS;
use shoal_kernels::{Device, LossMode, MatMut, Tensor};

use crate::common::{config, device, normal, side, tensor, unwritten, whole};
use crate::number::{Number, number, numbers};
use crate::{CASES, assert_close, twice};

proptest! {
    #![proptest_config(config(CASES))]

    #[test]
    fn cross_entropy(
        (rows, vocabulary) in (side(), side()),
        // Between two rows' logits, which a gradient makes zero.
        apart in prop::sample::select(vec![0usize, 0, 1, 7, 16]),
        // Whether there is as much behind the last row.
        ends_whole: bool,
        // Rows and targets that the operation is not told of.
        (spare_rows, spare_targets) in (0usize..3, 0usize..3),
        spread in prop::sample::select(vec![0.1f32, 1.0, 10.0, 100.0]),
        ignored_per_ten in prop::sample::select(vec![0usize, 3, 10]),
        scale in prop::sample::select(vec![1.0f32, 0.01, -2.0]),
        start in prop::sample::select(vec![0.0f64, 3.5]),
        threads in 1usize..=3,
        seed: u64,
    ) {
        let logits: Vec<f32> =
            normal(seed, "logits", rows * vocabulary).iter().map(|logit| logit * spread).collect();
        let mut targets = whole(seed, "targets", rows, vocabulary);
        for (target, lot) in targets.iter_mut().zip(whole(seed, "ignored", rows, 10)) {
            if (lot as usize) < ignored_per_ten {
                *target = if lot == 0 { -1 } else { -100 };
            }
        }
        let device = device(threads);
        let all: Vec<i32> = std::iter::repeat_n(vocabulary as i32 - 1, spare_targets).chain(targets.clone()).collect();
        let held = Tensor::from_integers(device.arena(), "targets", &all).unwrap();
        let stride = vocabulary + apart;
        let rows_end = rows * stride - if ends_whole || spare_rows > 0 { 0 } else { apart };
        let run = |mode: LossMode| {
            let mut place = unwritten(&device, rows_end + spare_rows * stride);
            for (row, logits) in logits.chunks_exact(vocabulary).enumerate() {
                place.floats_mut()[row * stride..][..vocabulary].copy_from_slice(logits);
            }
            let mut loss = unwritten(&device, SCALAR_ELEMENTS);
            device.set_scalar(&mut loss, start).unwrap();
            let rows = MatMut::columns(&mut place, rows, 0, vocabulary, stride);
            device.cross_entropy(&held, spare_targets, mode, rows, &mut loss).unwrap();
            let (written, rest) = place.floats().split_at(rows_end);
            assert!(rest.iter().all(|value| value.is_nan()), "a row past the targets was written");
            let (mut gradient, mut between) = (Vec::new(), Vec::new());
            for row in written.chunks(stride) {
                gradient.extend_from_slice(&row[..vocabulary]);
                between.extend_from_slice(&row[vocabulary..]);
            }
            if mode != LossMode::LossOnly {
                assert!(between.iter().all(|value| *value == 0.0), "between two rows the gradient is zero");
            }
            vec![vec![(device.scalar(&loss).unwrap() - start) as f32], gradient]
        };
        let results = twice(|| run(LossMode::Gradient { scale }));
        let loss_only = twice(|| run(LossMode::LossOnly).into_iter().take(1).collect());

        let mut loss = Number::default();
        let mut gradient = vec![Number::default(); logits.len()];
        let logits = numbers(&logits);
        for (row, target) in targets.iter().enumerate().filter(|(_, target)| **target >= 0) {
            let row = row * vocabulary;
            let line = &logits[row..row + vocabulary];
            let highest = number(line.iter().map(|logit| logit.value).fold(f64::NEG_INFINITY, f64::max));
            let powers: Vec<Number> = line.iter().map(|logit| (*logit - highest).exp()).collect();
            let sum: Number = powers.iter().copied().sum();
            loss += sum.ln() + highest - line[*target as usize];
            for (col, power) in powers.iter().enumerate() {
                let hit = if col == *target as usize { 1.0 } else { 0.0 };
                gradient[row + col] = (*power / sum - number(hit)) * f64::from(scale);
            }
        }
        assert_close("the loss", &results[0], &[loss]);
        assert_close("the loss alone", &loss_only[0], &[loss]);
        assert_close("the logits' gradient", &results[1], &gradient);
    }

    /// Micro-batches add to one scalar: two calls are one call over both.
    #[test]
    fn losses_add_up_over_calls(rows in 2usize..70, vocabulary in side(), threads in 1usize..=3, seed: u64) {
        let logits = normal(seed, "logits", rows * vocabulary);
        let targets = whole(seed, "targets", rows, vocabulary);
        let device = device(threads);
        let targets = Tensor::from_integers(device.arena(), "targets", &targets).unwrap();
        let loss = |cuts: &[usize]| {
            let mut loss = unwritten(&device, SCALAR_ELEMENTS);
            device.set_scalar(&mut loss, 0.0).unwrap();
            for rows in cuts.windows(2) {
                let mut part = tensor(&device, &logits[rows[0] * vocabulary..rows[1] * vocabulary]);
                let part = MatMut::new(&mut part, rows[1] - rows[0], vocabulary);
                device.cross_entropy(&targets, rows[0], LossMode::LossOnly, part, &mut loss).unwrap();
            }
            device.scalar(&loss).unwrap()
        };
        // The rows' losses are the same numbers; f64 adds them in another order.
        let (whole, parts) = (loss(&[0, rows]), loss(&[0, rows / 2, rows]));
        prop_assert!((whole - parts).abs() <= 1e-13 * whole.abs(), "{whole} against {parts}");
    }
}
