//! Norms, their statistics and gradients, on strided rows.

use shoal_kernels::{Device, NormKind};

use crate::{Case, SUM_TOLERANCE, Strided, before, compare, compare_within, read, tensor, unwritten};

const EPS: f32 = 1e-5;

struct Shape {
    kind: NormKind,
    rows: usize,
    cols: usize,
    accumulate: bool,
    with_bias: bool,
}

fn shape(case: Case) -> Shape {
    Shape {
        kind: case.pick("kind", &[NormKind::Layer, NormKind::Rms]),
        rows: case.rows("rows"),
        // A row of one or two elements has a deviation of nothing, and its norm no digits.
        cols: case.side("cols").max(7),
        accumulate: case.yes("accumulate"),
        with_bias: case.yes("bias"),
    }
}

fn input(device: &dyn Device, case: Case, shape: &Shape) -> Strided {
    let values = case.normal("x", shape.rows * shape.cols);
    Strided::new(device, case, "x", shape.rows, shape.cols, Some(&values))
}

#[test]
fn norm_and_norm_again() {
    compare("norm", |device, case| {
        let shape = shape(case);
        let x = input(device, case, &shape);
        let weight = tensor(device, &case.normal("weight", shape.cols));
        let bias = shape.with_bias.then(|| tensor(device, &case.normal("bias values", shape.cols)));
        let mut statistics = unwritten(device, shape.rows * shape.kind.statistics());
        let (mut out, mut again) =
            (unwritten(device, shape.rows * shape.cols), unwritten(device, shape.rows * shape.cols));
        device.norm(shape.kind, EPS, x.mat(), &weight, bias.as_ref(), &mut statistics, &mut out).unwrap();
        device.norm_again(shape.kind, x.mat(), &weight, bias.as_ref(), &statistics, &mut again).unwrap();
        vec![read(device, &statistics), read(device, &out), read(device, &again)]
    });
}

#[test]
fn norm_gradients() {
    compare_within("norm gradients", SUM_TOLERANCE, |device, case| {
        let shape = shape(case);
        let (rows, cols) = (shape.rows, shape.cols);
        let x = input(device, case, &shape);
        let weight = tensor(device, &case.normal("weight", cols));
        let dy = tensor(device, &case.normal("dy", rows * cols));
        let mut statistics = unwritten(device, rows * shape.kind.statistics());
        let mut out = unwritten(device, rows * cols);
        device.norm(shape.kind, EPS, x.mat(), &weight, None, &mut statistics, &mut out).unwrap();
        let mut dx = before(device, case, shape.accumulate, rows * cols);
        device
            .norm_input_gradient(shape.kind, x.mat(), &weight, &statistics, &dy, &mut dx, shape.accumulate)
            .unwrap();
        let mut weight_gradient = before(device, case, shape.accumulate, cols);
        let mut bias_gradient = before(device, case, !shape.accumulate, cols);
        device
            .norm_parameter_gradient(
                shape.kind,
                x.mat(),
                &statistics,
                &dy,
                &mut weight_gradient,
                shape.with_bias.then_some(&mut bias_gradient),
                [shape.accumulate, !shape.accumulate],
            )
            .unwrap();
        let mut results = vec![read(device, &dx), read(device, &weight_gradient)];
        if shape.with_bias {
            results.push(read(device, &bias_gradient));
        }
        results
    });
}
