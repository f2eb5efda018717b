//! LayerNorm and RMSNorm: outputs, statistics that can be used again, and both kinds of gradient.

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
    accumulate: [bool; 2],
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
        accumulate: [bool; 2],
        threads in 1usize..=3,
        seed: u64,
    ) -> Case {
        Case { kind, rows, cols, margin, eps, offset, with_bias, accumulate, threads, seed }
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
    fn norm_and_norm_again(case in case()) {
        let Case { kind, rows, cols, .. } = case;
        let device = device(case.threads);
        let results = twice(|| {
            let x = Matrix::new(&device, rows, cols, case.margin, &case.x());
            let (statistics, out) = case.forward(&device, &x);
            let bias = case.bias().map(|bias| tensor(&device, &bias));
            let weight = tensor(&device, &case.weight());
            let mut again = unwritten(&device, rows * cols);
            device.norm_again(kind, x.mat(), &weight, bias.as_ref(), &statistics, &mut again).unwrap();
            [statistics, out, again].iter().map(|tensor| tensor.floats().to_vec()).collect()
        });
        let [statistics, out, again] = results.as_slice() else { unreachable!() };
        assert_written("statistics", statistics);
        prop_assert!(same_bits(out, again), "norm_again differs from norm");
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

    #[test]
    fn norm_input_gradient(case in case()) {
        let Case { kind, rows, cols, .. } = case;
        let accumulate = case.accumulate[0];
        let before = normal(case.seed, "before", rows * cols);
        let device = device(case.threads);
        let results = twice(|| {
            let x = Matrix::new(&device, rows, cols, case.margin, &case.x());
            let (statistics, _) = case.forward(&device, &x);
            let (weight, dy) = (tensor(&device, &case.weight()), tensor(&device, &case.dy()));
            let mut dx = if accumulate { tensor(&device, &before) } else { unwritten(&device, rows * cols) };
            device
                .norm_input_gradient(kind, x.mat(), &weight, &statistics, &dy, &mut dx, accumulate)
                .unwrap();
            vec![dx.floats().to_vec()]
        });
        let (weight, dy) = (numbers(&case.weight()), numbers(&case.dy()));
        let rows = case.x();
        let rows = rows.chunks_exact(cols).zip(dy.chunks_exact(cols));
        let mut expected: Vec<Number> = rows.flat_map(|(x, dy)| row_gradient(&case, x, &weight, dy)).collect();
        if accumulate {
            expected.iter_mut().zip(&before).for_each(|(sum, before)| *sum += (*before).into());
        }
        assert_close("norm_input_gradient", &results[0], &expected);
    }

    /// The two gradients accumulate or not each on its own.
    #[test]
    fn norm_parameter_gradient(case in case()) {
        let Case { kind, rows, cols, accumulate, .. } = case;
        let before = [normal(case.seed, "weight before", cols), normal(case.seed, "bias before", cols)];
        let device = device(case.threads);
        let results = twice(|| {
            let x = Matrix::new(&device, rows, cols, case.margin, &case.x());
            let (statistics, _) = case.forward(&device, &x);
            let dy = tensor(&device, &case.dy());
            let start = |which: usize| {
                if accumulate[which] { tensor(&device, &before[which]) } else { unwritten(&device, cols) }
            };
            let (mut weight, mut bias) = (start(0), start(1));
            let bias_gradient = case.with_bias.then_some(&mut bias);
            device
                .norm_parameter_gradient(
                    kind,
                    x.mat(),
                    &statistics,
                    &dy,
                    &mut weight,
                    bias_gradient,
                    accumulate,
                )
                .unwrap();
            vec![weight.floats().to_vec(), bias.floats().to_vec()]
        });
        let start = |which: usize| {
            if accumulate[which] { numbers(&before[which]) } else { vec![Number::default(); cols] }
        };
        let (mut weight, mut bias) = (start(0), start(1));
        let (x, dy) = (case.x(), numbers(&case.dy()));
        for (x, dy) in x.chunks_exact(cols).zip(dy.chunks_exact(cols)) {
            let (centred, scale) = normalise(&case, x);
            for col in 0..cols {
                weight[col] += dy[col] * centred[col] * scale;
                bias[col] += dy[col];
            }
        }
        assert_close("the weight's gradient", &results[0], &weight);
        if case.with_bias {
            assert_close("the bias's gradient", &results[1], &bias);
        }
    }
}
