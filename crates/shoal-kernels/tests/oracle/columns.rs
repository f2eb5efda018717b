//! Batch normalisation: columns are channels, and each group of rows has statistics of its own.

use std::ops::Range;

use proptest::prelude::*;
use shoal_kernels::convolutional::{ColumnNorm, mask_elements};
use shoal_kernels::{Convolutional, Mat, NormGradients};

use crate::common::{config, device, integers, normal, tensor, unwritten};
use crate::convolution::{assert_mask, floats, passes, rectified};
use crate::number::{Number, number, numbers};
use crate::{CASES, assert_close, same_bits, twice};

const EPS: f32 = 1e-5;

/// A batch of normed numbers, its groups one after the other with rows around them that belong to none.
#[derive(Clone, Debug)]
struct Batch {
    groups: Vec<Range<usize>>,
    rows: usize,
    cols: usize,
}

prop_compose! {
    fn batch()(
        sizes in prop::collection::vec(prop_oneof![4 => 2usize..50, 1 => 200usize..400], 1..=3),
        cols in prop_oneof![4 => 1usize..70, 1 => 120usize..140],
        (above, below) in (0usize..3, 0usize..3),
    ) -> Batch {
        let mut groups: Vec<Range<usize>> = Vec::new();
        for size in sizes {
            let start = groups.last().map_or(above, |last| last.end);
            groups.push(start..start + size);
        }
        let rows = groups.last().unwrap().end + below;
        Batch { groups, rows, cols }
    }
}

/// The norm of one group in f64: what each step makes of its rows.
struct Expected {
    statistics: Vec<Number>,
    out: Vec<Number>,
    sums: Vec<Number>,
    gradient: Vec<Number>,
}

/// `x` and `added` are the group's rows, `dy` as the mask leaves it.
fn expect(
    cols: usize,
    x: &[f32],
    [weight, bias]: [&[f32]; 2],
    added: Option<&[f32]>,
    dy: &[f32],
) -> Expected {
    let n = (x.len() / cols) as f64;
    let (x, weight, bias, dy) = (numbers(x), numbers(weight), numbers(bias), numbers(dy));
    let down = |value: &dyn Fn(usize) -> Number| -> Vec<Number> {
        (0..cols).map(|column| (column..x.len()).step_by(cols).map(value).sum()).collect()
    };
    let over_rows =
        |sums: Vec<Number>| -> Vec<Number> { sums.into_iter().map(|sum| sum * (1.0 / n)).collect() };
    let mean = over_rows(down(&|i| x[i]));
    let apart = |i: usize| x[i] - mean[i % cols];
    let variance = over_rows(down(&|i| apart(i) * apart(i)));
    let deviation: Vec<Number> = variance.iter().map(|v| (*v + number(f64::from(EPS))).sqrt()).collect();
    let normed = |i: usize| apart(i) / deviation[i % cols];
    let (plain, along) = (down(&|i| dy[i]), down(&|i| dy[i] * normed(i)));
    let all = |value: &dyn Fn(usize) -> Number| (0..x.len()).map(value).collect::<Vec<_>>();
    let out = all(&|i| {
        let value = normed(i) * weight[i % cols] + bias[i % cols];
        added.map_or(value, |added| value + Number::from(added[i]))
    });
    let gradient = all(&|i| {
        let c = i % cols;
        weight[c] / deviation[c] * (dy[i] - (plain[c] + normed(i) * along[c]) * (1.0 / n))
    });
    Expected { statistics: [mean, variance].concat(), out, sums: [plain, along].concat(), gradient }
}

proptest! {
    #![proptest_config(config(CASES))]

    #[test]
    fn batch_normalisation(
        batch in batch(),
        shift in prop::sample::select(vec![0.0f32, 3.0]),
        (with_residual, with_mask, keep_masked) in any::<(bool, bool, bool)>(),
        threads in 1usize..=3,
        seed: u64,
    ) {
        let Batch { groups, rows, cols } = batch;
        let device = device(threads);
        let x: Vec<f32> = normal(seed, "x", rows * cols).iter().map(|x| x + shift).collect();
        let (weight, bias) = (normal(seed, "weight", cols), normal(seed, "bias", cols));
        let (residual, dy) = (normal(seed, "residual", rows * cols), normal(seed, "dy", rows * cols));
        let bits = vec![7; mask_elements(rows, cols)];
        let masks = std::cell::RefCell::new(Vec::new());
        let results = twice(|| {
            let (mut x, weight, bias) = (tensor(&device, &x), tensor(&device, &weight), tensor(&device, &bias));
            let (residual, mut dy) = (tensor(&device, &residual), tensor(&device, &dy));
            let residual = with_residual.then_some(&residual);
            let mut mask = with_mask.then(|| integers(&device, &bits));
            let mut out = unwritten(&device, rows * cols);
            let mut made = Vec::new();
            let [mut of_bias, mut of_weight, mut of_mean, mut of_variance] =
                [0; 4].map(|_| unwritten(&device, cols));
            let mut begun = false;
            for group in &groups {
                let (mut statistics, mut sums) = (unwritten(&device, 2 * cols), unwritten(&device, 2 * cols));
                let rows_of_x = Mat::new(&x, rows, cols).rows(group.start, group.len());
                device.column_statistics(rows_of_x, &mut statistics).unwrap();
                let [mean, variance] = [0, 1].map(|row| Mat::new(&statistics, 2, cols).rows(row, 1));
                let norm = |rows: Range<usize>| {
                    ColumnNorm { eps: EPS, rows, cols, mean, variance, weight: &weight, bias: &bias }
                };
                device.column_norm(&norm(group.clone()), &x, residual, mask.as_mut(), &mut out).unwrap();
                // The sums of a group in two parts, the gradients too.
                let middle = group.start + group.len() / 3;
                let parts = [norm(group.start..middle), norm(middle..group.end)];
                for (part, more) in parts.iter().zip([false, true]) {
                    let running = [(2.0, (&mut of_mean, begun)), (-3.0, (&mut of_variance, begun))];
                    let gradients = NormGradients {
                        bias: (&mut of_bias, begun),
                        weight: (&mut of_weight, begun),
                        running: (!more).then_some(running),
                    };
                    let to = (&mut sums, more);
                    device.column_norm_sums(part, &x, mask.as_ref(), &dy, to, Some(gradients)).unwrap();
                    begun = true;
                }
                for part in &parts {
                    let (all, mask) = (group.len(), mask.as_ref());
                    device.column_norm_gradient(part, &sums, all, mask, &mut dy, keep_masked, &mut x).unwrap();
                }
                made.extend(floats(&[&statistics, &sums]));
            }
            *masks.borrow_mut() = mask.map_or(Vec::new(), |mask| mask.integers().to_vec());
            made.extend(floats(&[&of_bias, &of_weight, &of_mean, &of_variance]));
            [floats(&[&out, &x, &dy]), made].concat()
        });
        let mask = masks.into_inner();
        let left = |i: usize| if with_mask && !passes(&mask, cols, i) { 0.0 } else { dy[i] };
        let slopes: Vec<f32> = (0..dy.len()).map(left).collect();
        let mut gradients = vec![Number::default(); 4 * cols];
        for (index, group) in groups.iter().enumerate() {
            let elements = group.start * cols..group.end * cols;
            let [out, dx, kept] = [0, 1, 2].map(|at| &results[at][elements.clone()]);
            let added = with_residual.then_some(&residual[elements.clone()]);
            let slopes = &slopes[elements.clone()];
            let expected = expect(cols, &x[elements.clone()], [&weight, &bias], added, slopes);
            if with_mask {
                let words = cols.div_ceil(32);
                assert_mask(&mask[group.start * words..group.end * words], cols, out);
                assert_close("column_norm", out, &rectified(&expected.out));
            } else {
                assert_close("column_norm", out, &expected.out);
            }
            assert_close("column_statistics", &results[3 + 2 * index], &expected.statistics);
            assert_close("column_norm_sums", &results[4 + 2 * index], &expected.sums);
            let factors = [1.0, 1.0, 2.0, -3.0];
            let added = expected.sums.iter().chain(&expected.statistics).enumerate();
            added.for_each(|(at, value)| gradients[at] += *value * factors[at / cols]);
            assert_close("column_norm_gradient", dx, &expected.gradient);
            let left = if keep_masked { slopes } else { &dy[elements] };
            prop_assert!(same_bits(kept, left));
        }
        for (gradient, expected) in results[3 + 2 * groups.len()..].iter().zip(gradients.chunks(cols)) {
            assert_close("gradients of the norm", gradient, expected);
        }
        // Rows of no group stay as they were.
        let inside = groups[0].start * cols..groups[groups.len() - 1].end * cols;
        for at in (0..rows * cols).filter(|at| !inside.contains(at)) {
            prop_assert!(results[0][at].is_nan() && results[1][at] == x[at] && results[2][at] == dy[at]);
            prop_assert!(!with_mask || mask[at / cols * cols.div_ceil(32)] == 7);
        }
    }

    #[test]
    fn parts_merge_to_the_whole(
        sizes in prop::collection::vec(1usize..60, 2..=4),
        cols in 1usize..70,
        apart in prop::sample::select(vec![0.0f32, 3.0]),
        seed: u64,
    ) {
        let device = device(2);
        let rows: usize = sizes.iter().sum();
        let mut x = normal(seed, "x", rows * cols);
        let mut parts = Vec::new();
        for (index, size) in sizes.iter().enumerate() {
            let first: usize = sizes[..index].iter().sum();
            x[first * cols..(first + size) * cols].iter_mut().for_each(|x| *x += apart * index as f32);
            parts.push(first..first + size);
        }
        let results = twice(|| {
            let x = tensor(&device, &x);
            let mut whole = unwritten(&device, 2 * cols);
            for part in &parts {
                let rows = Mat::new(&x, rows, cols).rows(part.start, part.len());
                if part.start == 0 {
                    device.column_statistics(rows, &mut whole).unwrap();
                } else {
                    let mut statistics = unwritten(&device, 2 * cols);
                    device.column_statistics(rows, &mut statistics).unwrap();
                    device.merge_statistics((&statistics, part.len()), (&mut whole, part.start)).unwrap();
                }
            }
            floats(&[&whole])
        });
        let ones = vec![1.0; cols];
        let expected = expect(cols, &x, [&ones, &ones], None, &x);
        assert_close("merge_statistics", &results[0], &expected.statistics);
    }
}
