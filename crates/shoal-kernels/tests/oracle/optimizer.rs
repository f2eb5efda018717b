//! Updates over several steps against the formulas of PyTorch's AdamW, SGD and `clip_grad_norm_`.

use proptest::prelude::*;
use shoal_kernels::device::SCALAR_ELEMENTS;
use shoal_kernels::{AdamW, Clip, Device, Sgd, Tensor};

use crate::common::{config, device, normal, tensor, unwritten};
use crate::number::{Number, number, numbers};
use crate::{CASES, assert_close, same_bits, twice};

const UPDATES: u64 = 4;

fn gradient(seed: u64, update: u64, elements: usize) -> Vec<f32> {
    normal(seed, &format!("gradient {update}"), elements)
}

/// The gradient's norm on the device, as a training step has it.
fn norm_squared(device: &impl Device, gradient: &Tensor) -> Tensor {
    let mut sum = unwritten(device, SCALAR_ELEMENTS);
    device.sum_squares(&[gradient], &mut sum).unwrap();
    sum
}

/// The gradient after clipping.
fn clipped(gradient: &[f32], max: Option<f32>) -> Vec<Number> {
    let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
    let factor = max.map_or(1.0, |max| (f64::from(max) / (norm + 1e-6)).min(1.0));
    gradient.iter().map(|g| Number::from(*g) * factor).collect()
}

/// No clipping, clipping that bites, and a limit that is never reached.
fn clip_max() -> impl Strategy<Value = Option<f32>> {
    prop::sample::select(vec![None, Some(0.3f32), Some(1e6)])
}

/// What the updates added: held on its own, because the parameter would hide a wrong update a hundred times
/// smaller than itself.
fn change(after: &[f32], before: &[f32]) -> Vec<f32> {
    after.iter().zip(before).map(|(after, before)| after - before).collect()
}

prop_compose! {
    fn adamw_settings()(
        lr in prop::sample::select(vec![0.01f32, 0.1]),
        (beta1, beta2) in prop::sample::select(vec![(0.9f32, 0.999f32), (0.8, 0.95), (0.0, 0.5)]),
        eps in prop::sample::select(vec![1e-8f32, 0.05]),
        weight_decay in prop::sample::select(vec![0.0f32, 0.1]),
    ) -> AdamW {
        AdamW { lr, beta1, beta2, eps, weight_decay, update: 1 }
    }
}

proptest! {
    #![proptest_config(config(CASES))]

    /// The partial sums are of fixed length: the number of threads changes no bit.
    #[test]
    fn sum_squares(
        lengths in prop::collection::vec(prop_oneof![3 => 1usize..500, 1 => 16_000usize..50_000], 0..4),
        threads in 1usize..=3,
        seed: u64,
    ) {
        let all: Vec<Vec<f32>> =
            lengths.iter().enumerate().map(|(i, n)| normal(seed, &format!("tensor {i}"), *n)).collect();
        let sum = |threads: usize| {
            let device = device(threads);
            let tensors: Vec<Tensor> = all.iter().map(|values| tensor(&device, values)).collect();
            let mut sum = unwritten(&device, SCALAR_ELEMENTS);
            device.sum_squares(&tensors.iter().collect::<Vec<_>>(), &mut sum).unwrap();
            device.scalar(&sum).unwrap()
        };
        let result = sum(threads);
        for threads in [1, 3, threads] {
            prop_assert_eq!(result.to_bits(), sum(threads).to_bits());
        }
        let expected: Number = all.iter().flatten().map(|x| number(f64::from(*x).powi(2))).sum();
        assert_close("sum_squares", &[result as f32], &[expected]);
    }

    #[test]
    fn adamw(
        settings in adamw_settings(),
        max in clip_max(),
        elements in 1usize..1000,
        threads in 1usize..=3,
        seed: u64,
    ) {
        let start = normal(seed, "parameter", elements);
        let device = device(threads);
        let results = twice(|| {
            let mut parameter = tensor(&device, &start);
            let zeros = || tensor(&device, &vec![0.0; elements]);
            let (mut first, mut second) = (zeros(), zeros());
            for update in 1..=UPDATES {
                let gradient = tensor(&device, &gradient(seed, update, elements));
                let norm = norm_squared(&device, &gradient);
                let clip = max.map(|max| Clip { norm_squared: &norm, max });
                let settings = AdamW { update, ..settings };
                device.adamw(&settings, clip, &gradient, &mut first, &mut second, &mut parameter).unwrap();
            }
            vec![change(parameter.floats(), &start), first.floats().to_vec(), second.floats().to_vec()]
        });

        let [lr, beta1, beta2, eps, decay] =
            [settings.lr, settings.beta1, settings.beta2, settings.eps, settings.weight_decay].map(f64::from);
        let mut parameter = numbers(&start);
        let mut first = vec![Number::default(); elements];
        let mut second = first.clone();
        for update in 1..=UPDATES {
            let correction1 = 1.0 - beta1.powi(update as i32);
            let correction2 = 1.0 - beta2.powi(update as i32);
            for (i, g) in clipped(&gradient(seed, update, elements), max).into_iter().enumerate() {
                parameter[i] = parameter[i] * (1.0 - lr * decay);
                first[i] = first[i] * beta1 + g * (1.0 - beta1);
                second[i] = second[i] * beta2 + g * g * (1.0 - beta2);
                let denominator = second[i].sqrt() * (1.0 / correction2.sqrt()) + number(eps);
                parameter[i] = parameter[i] - first[i] / denominator * (lr / correction1);
            }
        }
        let changes: Vec<Number> =
            parameter.iter().zip(&start).map(|(after, before)| *after - Number::from(*before)).collect();
        assert_close("the first moment", &results[1], &first);
        assert_close("the second moment", &results[2], &second);
        assert_close("adamw", &results[0], &changes);
    }

    #[test]
    fn sgd(
        lr in prop::sample::select(vec![0.01f32, 0.3]),
        momentum in prop::option::of(prop::sample::select(vec![0.0f32, 0.9])),
        weight_decay in prop::sample::select(vec![0.0f32, 0.1]),
        max in clip_max(),
        elements in 1usize..1000,
        threads in 1usize..=3,
        seed: u64,
    ) {
        let start = normal(seed, "parameter", elements);
        let device = device(threads);
        let results = twice(|| {
            let mut parameter = tensor(&device, &start);
            // The first update starts the momentum, whatever an earlier run left there.
            let mut velocity = tensor(&device, &normal(seed, "left over", elements));
            for update in 1..=UPDATES {
                let gradient = tensor(&device, &gradient(seed, update, elements));
                let norm = norm_squared(&device, &gradient);
                let clip = max.map(|max| Clip { norm_squared: &norm, max });
                let settings = Sgd { lr, momentum: momentum.unwrap_or(0.7), weight_decay, update };
                let velocity = momentum.is_some().then_some(&mut velocity);
                device.sgd(&settings, clip, &gradient, velocity, &mut parameter).unwrap();
            }
            vec![change(parameter.floats(), &start), velocity.floats().to_vec()]
        });
        let mut parameter = numbers(&start);
        let mut velocity = vec![Number::default(); elements];
        for update in 1..=UPDATES {
            for (i, g) in clipped(&gradient(seed, update, elements), max).into_iter().enumerate() {
                let kept = momentum.map_or(0.0, f64::from);
                velocity[i] = velocity[i] * kept + g + parameter[i] * f64::from(weight_decay);
                parameter[i] = parameter[i] - velocity[i] * f64::from(lr);
            }
        }
        let changes: Vec<Number> =
            parameter.iter().zip(&start).map(|(after, before)| *after - Number::from(*before)).collect();
        assert_close("sgd", &results[0], &changes);
        match momentum {
            Some(_) => assert_close("the velocity", &results[1], &velocity),
            None => {
                let untouched = same_bits(&results[1], &normal(seed, "left over", elements));
                prop_assert!(untouched, "there was no momentum to keep");
            }
        }
    }
}
