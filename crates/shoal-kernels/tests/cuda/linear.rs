//! Linear layers and their gradients, in both layouts of the weight and on strided matrices.

use shoal_kernels::{Gelu, Linear};

use crate::{
    Case, SUM_TOLERANCE, Strided, TOLERANCE, active, active_unwritten, before, compare_elements, read,
};

struct Shape {
    rows: usize,
    inputs: usize,
    outputs: usize,
    in_out: bool,
    accumulate: bool,
}

fn shape(case: Case) -> Shape {
    Shape {
        rows: case.rows("rows"),
        inputs: case.side("inputs"),
        outputs: case.side("outputs"),
        in_out: case.yes("in_out"),
        accumulate: case.yes("accumulate"),
    }
}

#[test]
fn linear() {
    compare_elements("linear", TOLERANCE, |device, case| {
        let Shape { rows, inputs, outputs, in_out, .. } = shape(case);
        let x = Strided::new(device, case, "x", rows, inputs, Some(&case.normal("x", rows * inputs)));
        let weight = active(device, case, &case.normal("weight", inputs * outputs));
        let bias = case.yes("bias").then(|| active(device, case, &case.normal("bias", outputs)));
        let residual =
            case.yes("residual").then(|| active(device, case, &case.normal("residual", rows * outputs)));
        let mut out = Strided::new(device, case, "out", rows, outputs, None);
        let linear = Linear { weight: &weight, inputs, outputs, in_out };
        device.linear(x.mat(), linear, bias.as_ref(), residual.as_ref(), out.mat_mut()).unwrap();
        vec![read(device, &out.tensor)]
    });
}

#[test]
fn linear_gelu() {
    compare_elements("linear_gelu", TOLERANCE, |device, case| {
        let kind = case.pick("kind", &[Gelu::Tanh, Gelu::Erf]);
        let Shape { rows, inputs, outputs, in_out, .. } = shape(case);
        let x = Strided::new(device, case, "x", rows, inputs, Some(&case.normal("x", rows * inputs)));
        let weight = active(device, case, &case.normal("weight", inputs * outputs));
        let bias = case.yes("bias").then(|| active(device, case, &case.normal("bias", outputs)));
        let linear = Linear { weight: &weight, inputs, outputs, in_out };
        let mut before = active_unwritten(device, case, rows * outputs);
        let mut out = active_unwritten(device, case, rows * outputs);
        device.linear_gelu(kind, x.mat(), linear, bias.as_ref(), &mut before, &mut out).unwrap();
        vec![read(device, &before), read(device, &out)]
    });
}

#[test]
fn linear_gelu_input_gradient() {
    compare_elements("linear_gelu_input_gradient", TOLERANCE, |device, case| {
        let kind = case.pick("kind", &[Gelu::Tanh, Gelu::Erf]);
        let Shape { rows, inputs, outputs, in_out, .. } = shape(case);
        let dy = Strided::new(device, case, "dy", rows, outputs, Some(&case.normal("dy", rows * outputs)));
        let weight = active(device, case, &case.normal("weight", inputs * outputs));
        let before = active(device, case, &case.normal("before", rows * inputs));
        let linear = Linear { weight: &weight, inputs, outputs, in_out };
        let mut dx = active_unwritten(device, case, rows * inputs);
        device.linear_gelu_input_gradient(kind, dy.mat(), linear, &before, &mut dx).unwrap();
        vec![read(device, &dx)]
    });
}

#[test]
fn linear_input_gradient() {
    compare_elements("linear_input_gradient", TOLERANCE, |device, case| {
        let Shape { rows, inputs, outputs, in_out, accumulate } = shape(case);
        let dy = Strided::new(device, case, "dy", rows, outputs, Some(&case.normal("dy", rows * outputs)));
        let weight = active(device, case, &case.normal("weight", inputs * outputs));
        let earlier = case.normal("before", rows * inputs);
        let mut dx = Strided::new(device, case, "dx", rows, inputs, accumulate.then_some(earlier.as_slice()));
        let linear = Linear { weight: &weight, inputs, outputs, in_out };
        device.linear_input_gradient(dy.mat(), linear, dx.mat_mut(), accumulate).unwrap();
        vec![read(device, &dx.tensor)]
    });
}

#[test]
fn linear_weight_gradient() {
    compare_elements("linear_weight_gradient", SUM_TOLERANCE, |device, case| {
        let Shape { rows, inputs, outputs, in_out, accumulate } = shape(case);
        let x = Strided::new(device, case, "x", rows, inputs, Some(&case.normal("x", rows * inputs)));
        let dy = Strided::new(device, case, "dy", rows, outputs, Some(&case.normal("dy", rows * outputs)));
        let mut gradient = before(device, case, accumulate, inputs * outputs);
        device.linear_weight_gradient(x.mat(), dy.mat(), &mut gradient, in_out, accumulate).unwrap();
        vec![read(device, &gradient)]
    });
}

#[test]
fn bias_gradient() {
    compare_elements("bias_gradient", SUM_TOLERANCE, |device, case| {
        let Shape { rows, accumulate, .. } = shape(case);
        let outputs = case.pick("more outputs", &[1, 8, 31, 64, 256, 257, 300, 512, 768, 1000]);
        let dy = Strided::new(device, case, "dy", rows, outputs, Some(&case.normal("dy", rows * outputs)));
        let mut gradient = before(device, case, accumulate, outputs);
        device.bias_gradient(dy.mat(), &mut gradient, accumulate).unwrap();
        vec![read(device, &gradient)]
    });
}
