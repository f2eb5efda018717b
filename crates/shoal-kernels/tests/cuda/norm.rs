//! Norms, their statistics and gradients, on strided rows.

use shoal_kernels::{Device, NormKind};

use crate::{
    Case, SUM_TOLERANCE, Strided, TOLERANCE, active, active_before, active_unwritten, before,
    compare_elements, read, tensor, unwritten,
};

const EPS: f32 = 1e-5;

struct Shape {
    kind: NormKind,
    rows: usize,
    cols: usize,
    with_bias: bool,
}

/// Rows of one warp, of several warps, of a block, and wider than a block's registers. (A row of one or two
/// elements has a deviation of nothing, and its norm no digits.)
fn shape(case: Case) -> Shape {
    let kind = case.pick("kind", &[NormKind::Layer, NormKind::Rms]);
    let with_bias = case.yes("bias");
    let (rows, cols) = match case.pick("width", &[0, 0, 0, 1, 1, 2]) {
        0 => (case.rows("rows"), case.side("cols").max(7)),
        1 => (
            case.pick("many rows", &[1, 5, 64, 700]),
            case.pick("cols", &[256, 512, 768, 1000, 1024, 1032, 1280, 2048]),
        ),
        _ => {
            (case.pick("few rows", &[1, 3, 9, 40]), case.pick("cols", &[3000, 4096, 4104, 8192, 9001, 20000]))
        }
    };
    Shape { kind, rows, cols, with_bias }
}

fn input(device: &dyn Device, case: Case, shape: &Shape) -> Strided {
    let values = case.normal("x", shape.rows * shape.cols);
    Strided::new(device, case, "x", shape.rows, shape.cols, Some(&values))
}

#[test]
fn norm() {
    compare_elements("norm", TOLERANCE, |device, case| {
        let shape = shape(case);
        let x = input(device, case, &shape);
        let weight = tensor(device, &case.normal("weight", shape.cols));
        let bias = shape.with_bias.then(|| tensor(device, &case.normal("bias values", shape.cols)));
        let mut statistics = unwritten(device, shape.rows * shape.kind.statistics());
        let mut out = active_unwritten(device, case, shape.rows * shape.cols);
        device.norm(shape.kind, EPS, x.mat(), &weight, bias.as_ref(), &mut statistics, &mut out).unwrap();
        vec![read(device, &statistics), read(device, &out)]
    });
}

#[test]
fn norm_backward() {
    compare_elements("norm backward", SUM_TOLERANCE, |device, case| {
        let shape = shape(case);
        let (rows, cols) = (shape.rows, shape.cols);
        let x = input(device, case, &shape);
        let weight = tensor(device, &case.normal("weight", cols));
        let bias = shape.with_bias.then(|| tensor(device, &case.normal("bias values", cols)));
        let mut dy = active(device, case, &case.normal("dy", rows * cols));
        let mut statistics = unwritten(device, rows * shape.kind.statistics());
        let mut out = active_unwritten(device, case, rows * cols);
        device.norm(shape.kind, EPS, x.mat(), &weight, bias.as_ref(), &mut statistics, &mut out).unwrap();
        let accumulate =
            ["weight", "bias", "dx", "dx sums"].map(|which| case.yes(&format!("accumulate {which}")));
        let mut weight_gradient = before(device, case, accumulate[0], cols);
        let mut bias_gradient = before(device, case, accumulate[1], cols);
        let mut dx = active_before(device, case, accumulate[2], rows * cols);
        let with_sums = case.yes("sum dx");
        let mut dx_sums = before(device, case, accumulate[3], cols);
        device
            .norm_backward(
                shape.kind,
                x.mat(),
                &weight,
                bias.as_ref(),
                &statistics,
                &mut dy,
                (&mut weight_gradient, accumulate[0]),
                shape.with_bias.then_some((&mut bias_gradient, accumulate[1])),
                (&mut dx, accumulate[2]),
                with_sums.then_some((&mut dx_sums, accumulate[3])),
            )
            .unwrap();
        let (out, again) = (read(device, &out), read(device, &dy));
        let differ = out.values.iter().zip(&again.values).position(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!(differ, None, "the output made again differs here from the norm's");
        let mut results = vec![read(device, &dx), read(device, &weight_gradient), again];
        if shape.with_bias {
            results.push(read(device, &bias_gradient));
        }
        if with_sums {
            results.push(read(device, &dx_sums));
        }
        results
    });
}
