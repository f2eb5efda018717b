//! Updates, and the norm they are clipped by.

use shoal_kernels::{AdamW, Clip, Sgd, Tensor};

use crate::{Case, compare, read, scalar, tensor};

fn count(case: Case) -> usize {
    case.side("count") * case.rows("rows")
}

#[test]
fn sum_squares() {
    compare("sum_squares", |device, case| {
        let tensors: Vec<Tensor> = (0..case.pick("tensors", &[1, 2, 40]))
            .map(|index| {
                let name = format!("tensor {index}");
                let elements = case.side(&name) * case.pick(&name, &[1, 7, 400]);
                tensor(device, &case.normal(&name, elements))
            })
            .collect();
        let all: Vec<&Tensor> = tensors.iter().collect();
        let mut sum = scalar(device, f64::NAN);
        device.sum_squares(&all, &mut sum).unwrap();
        vec![vec![device.scalar(&sum).unwrap() as f32]]
    });
}

#[test]
fn adamw() {
    compare("adamw", |device, case| {
        let elements = count(case);
        let settings = AdamW {
            lr: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            update: case.pick("update", &[1, 2, 1000]),
        };
        let norm = scalar(device, case.pick("norm", &[0.04, 9.0]));
        let clip = case.yes("clip").then_some(Clip { norm_squared: &norm, max: 1.0 });
        let gradient = tensor(device, &case.normal("gradient", elements));
        let mut first = tensor(device, &case.normal("first", elements));
        let squares: Vec<f32> = case.normal("second", elements).iter().map(|x| x * x).collect();
        let mut second = tensor(device, &squares);
        let mut parameter = tensor(device, &case.normal("parameter", elements));
        device.adamw(&settings, clip, &gradient, &mut first, &mut second, &mut parameter).unwrap();
        vec![read(device, &first), read(device, &second), read(device, &parameter)]
    });
}

#[test]
fn sgd() {
    compare("sgd", |device, case| {
        let elements = count(case);
        let settings =
            Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.01, update: case.pick("update", &[1, 2]) };
        let norm = scalar(device, case.pick("norm", &[0.04, 9.0]));
        let clip = case.yes("clip").then_some(Clip { norm_squared: &norm, max: 1.0 });
        let gradient = tensor(device, &case.normal("gradient", elements));
        // The first update must not read what the velocity held.
        let start = if settings.update == 1 { vec![f32::NAN; elements] } else { case.normal("v", elements) };
        let mut velocity = case.yes("momentum").then(|| tensor(device, &start));
        let mut parameter = tensor(device, &case.normal("parameter", elements));
        device.sgd(&settings, clip, &gradient, velocity.as_mut(), &mut parameter).unwrap();
        let mut results = vec![read(device, &parameter)];
        results.extend(velocity.map(|velocity| read(device, &velocity)));
        results
    });
}
