//! LayerNorm and RMSNorm: outputs, statistics that can be used again, and a backward that gives all gradients
//! and the output again.

use proptest::prelude::*;
use shoal_kernels::{Device, NormKind, Tensor};

use crate::common::{Margin, Matrix, config, device, margin, normal, side, tensor, unwritten};
use crate::number::{Number, number, numbers};
use crate::{CASES, assert_close, assert_written, same_bits, twice};

#[derive(Clone, Copy, Debug)]
struct Case {
    kind: NormKind,
    rows: usize,
    cols: usize,
    margin: Margin,
    eps: f32,
    /// Added to every element of `x`: a mean that the variance must not feel.
    offset: f32,
    with_bias: bool,
    with_sums: bool,
    /// The gradients of weight, bias and input, and the last one's sums, each on its own.
    accumulate: [bool; 4],
    threads: usize,
    seed: u64,
}

prop_compose! {
    fn case()(
        kind in prop::sample::select(vec![NormKind::Layer, NormKind::Rms]),
        (rows, cols) in (side(), side()),
        margin in margin(),
        eps in prop::sample::select(vec![1e-6f32, 1e-5, 0.1]),
        offset in prop::sample::select(vec![0.0f32, 0.5, -4.0]),
        with_bias: bool,
        with_sums: bool,
        accumulate: [bool; 4],
        threads in 1usize..=3,
        seed: u64,
    ) -> Case {
        Case { kind, rows, cols, margin, eps, offset, with_bias, with_sums, accumulate, threads, seed }
    }
}

impl Case {
    fn x(&self) -> Vec<f32> {
        normal(self.seed, "x", self.rows * self.cols).iter().map(|x| x + self.offset).collect()
    }

    fn weight(&self) -> Vec<f32> {
        normal(self.seed, "weight", self.cols)
    }

    fn bias(&self) -> Option<Vec<f32>> {
        self.with_bias.then(|| normal(self.seed, "bias", self.cols))
    }

    fn dy(&self) -> Vec<f32> {
        normal(self.seed, "dy", self.rows * self.cols)
    }

    /// The forward on a device: its statistics and its output.
    fn forward(&self, device: &impl Device, x: &Matrix) -> (Tensor, Tensor) {
        let bias = self.bias().map(|bias| tensor(device, &bias));
        let mut statistics = unwritten(device, self.rows * self.kind.statistics());
        let mut out = unwritten(device, self.rows * self.cols);
        let weight = tensor(device, &self.weight());
        device.norm(self.kind, self.eps, x.mat(), &weight, bias.as_ref(), &mut statistics, &mut out).unwrap();
        (statistics, out)
    }
}

/// One row as its deviations from the subtracted mean, and the reciprocal they are multiplied by.
fn normalise(case: &Case, x: &[f32]) -> (Vec<Number>, Number) {
    let x = numbers(x);
    let per = 1.0 / x.len() as f64;
    let mean = match case.kind {
        NormKind::Layer => x.iter().copied().sum::<Number>() * per,
        NormKind::Rms => Number::default(),
    };
    let centred: Vec<Number> = x.iter().map(|x| *x - mean).collect();
    let variance = centred.iter().map(|c| *c * *c).sum::<Number>() * per;
    (centred, number(1.0) / (variance + case.eps.into()).sqrt())
}

/// One row's input gradient from the full matrix of derivatives
/// `∂x̂ᵢ/∂xⱼ = scale * (δᵢⱼ - 1/n) - scale³ * cᵢ * cⱼ / n`, the `1/n` only where a mean is subtracted.
fn row_gradient(case: &Case, x: &[f32], weight: &[Number], dy: &[Number]) -> Vec<Number> {
    let (centred, scale) = normalise(case, x);
    let per = 1.0 / x.len() as f64;
    let cube = scale * scale * scale;
    let derivative = |i: usize, j: usize| {
        let own = if i == j { scale } else { Number::default() };
        let mean = if case.kind == NormKind::Layer { scale * per } else { Number::default() };
        own - mean - cube * centred[i] * centred[j] * per
    };
    let column = |j: usize| (0..x.len()).map(|i| dy[i] * weight[i] * derivative(i, j)).sum();
    (0..x.len()).map(column).collect()
}

proptest! {
    #![proptest_config(config(CASES))]

    #[test]
    fn norm(case in case()) {
        let Case { rows, cols, .. } = case;
        let device = device(case.threads);
        let results = twice(|| {
            let x = Matrix::new(&device, rows, cols, case.margin, &case.x());
            let (statistics, out) = case.forward(&device, &x);
            [statistics, out].iter().map(|tensor| tensor.floats().to_vec()).collect()
        });
        let [statistics, out] = results.as_slice() else { unreachable!() };
        assert_written("statistics", statistics);
        let (weight, bias) = (numbers(&case.weight()), case.bias());
        let mut expected = Vec::new();
        for x in case.x().chunks_exact(cols) {
            let (centred, scale) = normalise(&case, x);
            for col in 0..cols {
                let bias = bias.as_ref().map_or(Number::default(), |bias| bias[col].into());
                expected.push(centred[col] * scale * weight[col] + bias);
            }
        }
        assert_close("norm", out, &expected);
    }

    /// Three gradients and the last one's column sums, which accumulate or not each on its own, and the output
    /// again in the place of its gradient.
    #[test]
    fn norm_backward(case in case()) {
        let Case { kind, rows, cols, accumulate, .. } = case;
        let names = ["weight before", "bias before", "before", "sums before"];
        let before: Vec<Vec<f32>> = names
            .iter()
            .zip([cols, cols, rows * cols, cols])
            .map(|(name, elements)| normal(case.seed, name, elements))
            .collect();
        let device = device(case.threads);
        let results = twice(|| {
            let x = Matrix::new(&device, rows, cols, case.margin, &case.x());
            let (statistics, out) = case.forward(&device, &x);
            let bias = case.bias().map(|bias| tensor(&device, &bias));
            let (weight, mut dy) = (tensor(&device, &case.weight()), tensor(&device, &case.dy()));
            let start = |which: usize| match accumulate[which] {
                true => tensor(&device, &before[which]),
                false => unwritten(&device, before[which].len()),
            };
            let [mut dw, mut db, mut dx, mut dx_sums] = [0, 1, 2, 3].map(start);
            device
                .norm_backward(
                    kind,
                    x.mat(),
                    &weight,
                    bias.as_ref(),
                    &statistics,
                    &mut dy,
                    (&mut dw, accumulate[0]),
                    case.with_bias.then_some((&mut db, accumulate[1])),
                    (&mut dx, accumulate[2]),
                    case.with_sums.then_some((&mut dx_sums, accumulate[3])),
                )
                .unwrap();
            [dw, db, dx, dx_sums, out, dy].iter().map(|tensor| tensor.floats().to_vec()).collect()
        });
        let [dw, db, dx, dx_sums, out, again] = results.as_slice() else { unreachable!() };
        assert_written("the output again", again);
        prop_assert!(same_bits(out, again), "the output made again differs from the norm's");

        let start = |which: usize| match accumulate[which] {
            true => numbers(&before[which]),
            false => vec![Number::default(); before[which].len()],
        };
        let [mut weight_sums, mut bias_sums, mut sums, mut column_sums] = [0, 1, 2, 3].map(start);
        let (x, weight, dy) = (case.x(), numbers(&case.weight()), numbers(&case.dy()));
        let lines = x.chunks_exact(cols).zip(dy.chunks_exact(cols));
        for ((x, dy), sums) in lines.zip(sums.chunks_exact_mut(cols)) {
            let (centred, scale) = normalise(&case, x);
            for col in 0..cols {
                weight_sums[col] += dy[col] * centred[col] * scale;
                bias_sums[col] += dy[col];
            }
            for (sum, slope) in sums.iter_mut().zip(row_gradient(&case, x, &weight, dy)) {
                *sum += slope;
            }
            for (column, sum) in column_sums.iter_mut().zip(sums.iter()) {
                *column += *sum;
            }
        }
        assert_close("the weight's gradient", dw, &weight_sums);
        if case.with_bias {
            assert_close("the bias's gradient", db, &bias_sums);
        }
        assert_close("the input's gradient", dx, &sums);
        if case.with_sums {
            assert_close("its column sums", dx_sums, &column_sums);
        }
    }
}
