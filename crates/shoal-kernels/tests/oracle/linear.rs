//! Linear layers and their gradients, in both layouts of the weight and on strided matrices.

use proptest::prelude::*;
use shoal_kernels::{Device, Linear, MatMut};

use crate::common::{
    Margin, Matrix, NO_MARGIN, config, device, gelus, margin, normal, side, tensor, unwritten,
};
use crate::number::{Number, numbers};
use crate::{CASES, assert_close, same_bits, twice};

#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    inputs: usize,
    outputs: usize,
    /// Around `x` or `dx`.
    input_margin: Margin,
    /// Around `out` or `dy`.
    output_margin: Margin,
    in_out: bool,
    accumulate: bool,
    threads: usize,
    seed: u64,
}

prop_compose! {
    fn case()(
        (rows, inputs, outputs) in (side(), side(), side()),
        (input_margin, output_margin) in (margin(), margin()),
        (in_out, accumulate) in any::<(bool, bool)>(),
        threads in 1usize..=3,
        seed: u64,
    ) -> Case {
        Case { rows, inputs, outputs, input_margin, output_margin, in_out, accumulate, threads, seed }
    }
}

impl Case {
    fn x(&self) -> Vec<f32> {
        normal(self.seed, "x", self.rows * self.inputs)
    }

    fn dy(&self) -> Vec<f32> {
        normal(self.seed, "dy", self.rows * self.outputs)
    }

    /// The weight as it is stored.
    fn weight(&self) -> Vec<f32> {
        normal(self.seed, "weight", self.inputs * self.outputs)
    }

    /// Where the weight of (input, output) is stored.
    fn place(&self, input: usize, output: usize) -> usize {
        if self.in_out { input * self.outputs + output } else { output * self.inputs + input }
    }

    /// What an accumulating operation finds: earlier sums, or else nothing it may read.
    fn before(&self, elements: usize) -> Option<Vec<f32>> {
        self.accumulate.then(|| normal(self.seed, "before", elements))
    }
}

/// A value for each (row, column), added to what was there.
fn each(
    rows: usize,
    cols: usize,
    before: Option<Vec<f32>>,
    value: impl Fn(usize, usize) -> Number,
) -> Vec<Number> {
    let mut sums = before.map_or_else(|| vec![Number::default(); rows * cols], |before| numbers(&before));
    for row in 0..rows {
        for col in 0..cols {
            sums[row * cols + col] += value(row, col);
        }
    }
    sums
}

proptest! {
    #![proptest_config(config(CASES))]

    #[test]
    fn linear(case in case(), with_bias: bool, with_residual: bool) {
        let Case { rows, inputs, outputs, seed, .. } = case;
        let (x, weight) = (case.x(), case.weight());
        let bias = with_bias.then(|| normal(seed, "bias", outputs));
        let residual = with_residual.then(|| normal(seed, "residual", rows * outputs));
        let device = device(case.threads);
        let out = twice(|| {
            let x = Matrix::new(&device, rows, inputs, case.input_margin, &x);
            let weight = tensor(&device, &weight);
            let bias = bias.as_ref().map(|bias| tensor(&device, bias));
            let residual = residual.as_ref().map(|residual| tensor(&device, residual));
            let linear = Linear { weight: &weight, inputs, outputs, in_out: case.in_out };
            let mut out = Matrix::unwritten(&device, rows, outputs, case.output_margin);
            device.linear(x.mat(), linear, bias.as_ref(), residual.as_ref(), out.mat_mut()).unwrap();
            vec![out.values()]
        });
        let (x, weight) = (numbers(&x), numbers(&weight));
        let expected = each(rows, outputs, residual, |row, output| {
            let bias = bias.as_ref().map_or(Number::default(), |bias| bias[output].into());
            bias + (0..inputs).map(|i| x[row * inputs + i] * weight[case.place(i, output)]).sum::<Number>()
        });
        assert_close("linear", &out[0], &expected);
    }

    /// A projection and the activation behind it, and the way back through an activation before one: each is
    /// the two operations it is made of.
    #[test]
    fn linear_with_gelu(case in case(), kind in gelus(), with_bias: bool) {
        let Case { rows, inputs, outputs, seed, .. } = case;
        let device = device(case.threads);
        let x = Matrix::new(&device, rows, inputs, case.input_margin, &case.x());
        let dy = Matrix::new(&device, rows, outputs, case.output_margin, &case.dy());
        let (weight, bias) = (tensor(&device, &case.weight()), tensor(&device, &normal(seed, "bias", outputs)));
        let bias = with_bias.then_some(&bias);
        let linear = Linear { weight: &weight, inputs, outputs, in_out: case.in_out };
        let fused = twice(|| {
            let (mut before, mut out) = (unwritten(&device, rows * outputs), unwritten(&device, rows * outputs));
            device.linear_gelu(kind, x.mat(), linear, bias, &mut before, &mut out).unwrap();
            let hidden = tensor(&device, &normal(seed, "hidden", rows * inputs));
            let mut dx = unwritten(&device, rows * inputs);
            device.linear_gelu_input_gradient(kind, dy.mat(), linear, &hidden, &mut dx).unwrap();
            [before, out, dx].iter().map(|tensor| tensor.floats().to_vec()).collect()
        });
        let mut before = unwritten(&device, rows * outputs);
        device.linear(x.mat(), linear, bias, None, MatMut::new(&mut before, rows, outputs)).unwrap();
        let mut out = unwritten(&device, rows * outputs);
        device.gelu(kind, &before, &mut out).unwrap();
        let mut dx = unwritten(&device, rows * inputs);
        device.linear_input_gradient(dy.mat(), linear, MatMut::new(&mut dx, rows, inputs), false).unwrap();
        let mut hidden = tensor(&device, &normal(seed, "hidden", rows * inputs));
        device.gelu_backward(kind, &mut hidden, &mut dx).unwrap();
        for (what, found, expected) in
            [("before", &fused[0], &before), ("out", &fused[1], &out), ("dx", &fused[2], &dx)]
        {
            assert_close(what, found, &numbers(expected.floats()));
        }
    }

    #[test]
    fn linear_input_gradient(case in case()) {
        let Case { rows, inputs, outputs, .. } = case;
        let (dy, weight, before) = (case.dy(), case.weight(), case.before(rows * inputs));
        let device = device(case.threads);
        let dx = twice(|| {
            let dy = Matrix::new(&device, rows, outputs, case.output_margin, &dy);
            let weight = tensor(&device, &weight);
            let linear = Linear { weight: &weight, inputs, outputs, in_out: case.in_out };
            let mut dx = match &before {
                Some(before) => Matrix::new(&device, rows, inputs, case.input_margin, before),
                None => Matrix::unwritten(&device, rows, inputs, case.input_margin),
            };
            device.linear_input_gradient(dy.mat(), linear, dx.mat_mut(), case.accumulate).unwrap();
            vec![dx.values()]
        });
        let (dy, weight) = (numbers(&dy), numbers(&weight));
        let expected = each(rows, inputs, before, |row, input| {
            (0..outputs).map(|o| dy[row * outputs + o] * weight[case.place(input, o)]).sum()
        });
        assert_close("linear_input_gradient", &dx[0], &expected);
    }

    #[test]
    fn linear_weight_gradient(case in case()) {
        let Case { rows, inputs, outputs, in_out, accumulate, .. } = case;
        let (x, dy, before) = (case.x(), case.dy(), case.before(inputs * outputs));
        let device = device(case.threads);
        let gradient = twice(|| {
            let x = Matrix::new(&device, rows, inputs, case.input_margin, &x);
            let dy = Matrix::new(&device, rows, outputs, case.output_margin, &dy);
            let mut gradient = match &before {
                Some(before) => tensor(&device, before),
                None => unwritten(&device, inputs * outputs),
            };
            device.linear_weight_gradient(x.mat(), dy.mat(), &mut gradient, in_out, accumulate).unwrap();
            vec![gradient.floats().to_vec()]
        });
        let (x, dy) = (numbers(&x), numbers(&dy));
        let start = before.unwrap_or_else(|| vec![0.0; inputs * outputs]);
        let mut expected = numbers(&start);
        for input in 0..inputs {
            for output in 0..outputs {
                let terms = (0..rows).map(|row| x[row * inputs + input] * dy[row * outputs + output]);
                expected[case.place(input, output)] += terms.sum();
            }
        }
        assert_close("linear_weight_gradient", &gradient[0], &expected);
    }

    /// Each sum belongs to one thread and is made row after row: the number of threads changes no bit.
    #[test]
    fn bias_gradient(case in case(), longer in 0usize..20) {
        let Case { rows, outputs, accumulate, .. } = case;
        let (dy, before) = (case.dy(), case.before(outputs + longer));
        let run = |threads: usize| {
            let device = device(threads);
            let dy = Matrix::new(&device, rows, outputs, case.output_margin, &dy);
            let mut gradient = match &before {
                Some(before) => tensor(&device, before),
                None => unwritten(&device, outputs + longer),
            };
            device.bias_gradient(dy.mat(), &mut gradient, accumulate).unwrap();
            vec![gradient.floats().to_vec()]
        };
        let gradient = twice(|| run(case.threads));
        prop_assert!(same_bits(&gradient[0], &run(1)[0]) && same_bits(&gradient[0], &run(3)[0]));
        let dy = numbers(&dy);
        let expected =
            each(1, outputs + longer, before, |_, output| {
                let rows = if output < outputs { rows } else { 0 };
                (0..rows).map(|row| dy[row * outputs + output]).sum()
            });
        assert_close("bias_gradient", &gradient[0], &expected);
    }
}

/// Long enough for the products to be cut over the threads along each side.
#[test]
fn large_products_are_cut_without_loss() {
    for (rows, inputs, outputs) in [(300, 65, 33), (33, 65, 300), (130, 129, 131)] {
        for threads in 1..=3 {
            let case = Case {
                rows,
                inputs,
                outputs,
                input_margin: NO_MARGIN,
                output_margin: NO_MARGIN,
                in_out: threads == 2,
                accumulate: false,
                threads,
                seed: 7,
            };
            let device = device(threads);
            let (x, weight) = (case.x(), case.weight());
            let x_tensor = Matrix::new(&device, rows, inputs, NO_MARGIN, &x);
            let weight_tensor = tensor(&device, &weight);
            let linear = Linear { weight: &weight_tensor, inputs, outputs, in_out: case.in_out };
            let mut out = Matrix::unwritten(&device, rows, outputs, NO_MARGIN);
            device.linear(x_tensor.mat(), linear, None, None, out.mat_mut()).unwrap();
            let (x, weight) = (numbers(&x), numbers(&weight));
            let expected = each(rows, outputs, None, |row, output| {
                (0..inputs).map(|i| x[row * inputs + i] * weight[case.place(i, output)]).sum()
            });
            assert_close("a large product", &out.values(), &expected);
        }
    }
}
