//! Updates over several steps against the formulas of PyTorch's AdamW, SGD and `clip_grad_norm_`, of several
//! tensors under one norm.

use proptest::prelude::*;
use shoal_kernels::device::SCALAR_ELEMENTS;
use shoal_kernels::{AdamW, Device, Guard, Sgd, Tensor, Updated};

use crate::common::{config, device, normal, tensor, unwritten};
use crate::number::{Number, number, numbers};
use crate::{CASES, assert_close, same_bits, twice};

const UPDATES: u64 = 4;

fn gradient(seed: u64, update: u64, elements: usize) -> Vec<f32> {
    normal(seed, &format!("gradient {update}"), elements)
}

/// Two tensors' elements, so that the norm is over more than one.
fn cut(values: &[f32]) -> [&[f32]; 2] {
    let (low, high) = values.split_at(values.len().div_ceil(3));
    [low, high]
}

fn tensors(device: &impl Device, values: &[f32]) -> [Tensor; 2] {
    cut(values).map(|part| tensor(device, part))
}

fn joined(tensors: &[Tensor; 2]) -> Vec<f32> {
    tensors.iter().flat_map(|tensor| tensor.floats().to_vec()).collect()
}

fn scalar(device: &impl Device, value: f64) -> Tensor {
    let mut scalar = unwritten(device, SCALAR_ELEMENTS);
    device.set_scalar(&mut scalar, value).unwrap();
    scalar
}

/// The gradients' norm on the device, as a training step has it.
fn norm_squared(device: &impl Device, gradients: &[Tensor; 2]) -> Tensor {
    let mut sum = unwritten(device, SCALAR_ELEMENTS);
    device.sum_squares(&gradients.each_ref(), &mut sum).unwrap();
    sum
}

/// The gradient without its scale, after clipping.
fn clipped(gradient: &[f32], scale: f32, max: Option<f32>) -> Vec<Number> {
    let scale = f64::from(scale);
    let norm = gradient.iter().map(|g| (f64::from(*g) / scale).powi(2)).sum::<f64>().sqrt();
    let factor = max.map_or(1.0, |max| (f64::from(max) / (norm + 1e-6)).min(1.0));
    gradient.iter().map(|g| Number::from(*g) * (factor / scale)).collect()
}

/// What gradients were multiplied by on their way.
fn scale() -> impl Strategy<Value = f32> {
    prop::sample::select(vec![1.0f32, 1024.0, 0.5])
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
    ) -> AdamW {
        AdamW { lr, beta1, beta2, eps, update: 1 }
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
        // Each tensor's own.
        decays in prop::sample::select(vec![[0.0f32, 0.0], [0.1, 0.0], [0.1, 0.3]]),
        scale in scale(),
        max in clip_max(),
        elements in 2usize..1000,
        threads in 1usize..=3,
        seed: u64,
    ) {
        let start = normal(seed, "parameter", elements);
        let device = device(threads);
        let loss = scalar(&device, 1.5);
        let results = twice(|| {
            let mut parameters = tensors(&device, &start);
            let zeros = |parameter: &Tensor| tensor(&device, &vec![0.0; parameter.len()]);
            let mut states = parameters.each_ref().map(|parameter| [zeros(parameter), zeros(parameter)]);
            for update in 1..=UPDATES {
                let gradients = tensors(&device, &gradient(seed, update, elements));
                let norm = norm_squared(&device, &gradients);
                let guard = Guard { norm_squared: &norm, loss: &loss, scale, clip_norm: max };
                let settings = AdamW { update, ..settings };
                let mut updated: Vec<Updated> = gradients
                    .iter()
                    .zip(parameters.iter_mut().zip(&mut states))
                    .zip(decays)
                    .map(|((gradient, (parameter, state)), weight_decay)| {
                        Updated { gradient, state, parameter, copy: None, weight_decay }
                    })
                    .collect();
                device.adamw(&settings, guard, &mut updated).unwrap();
            }
            let moment = |which: usize| -> Vec<f32> {
                states.iter().flat_map(|state| state[which].floats().to_vec()).collect()
            };
            vec![change(&joined(&parameters), &start), moment(0), moment(1)]
        });

        let [lr, beta1, beta2, eps] =
            [settings.lr, settings.beta1, settings.beta2, settings.eps].map(f64::from);
        let mut parameter = numbers(&start);
        let mut first = vec![Number::default(); elements];
        let mut second = first.clone();
        let decay = |i: usize| f64::from(decays[usize::from(i >= cut(&start)[0].len())]);
        for update in 1..=UPDATES {
            let correction1 = 1.0 - beta1.powi(update as i32);
            let correction2 = 1.0 - beta2.powi(update as i32);
            for (i, g) in clipped(&gradient(seed, update, elements), scale, max).into_iter().enumerate() {
                parameter[i] = parameter[i] * (1.0 - lr * decay(i));
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
        decays in prop::sample::select(vec![[0.0f32, 0.0], [0.1, 0.0], [0.1, 0.3]]),
        scale in scale(),
        max in clip_max(),
        elements in 2usize..1000,
        threads in 1usize..=3,
        seed: u64,
    ) {
        let start = normal(seed, "parameter", elements);
        let device = device(threads);
        let loss = scalar(&device, -2.0);
        let results = twice(|| {
            let mut parameters = tensors(&device, &start);
            // The first update starts the momentum, whatever an earlier run left there.
            let mut velocities = tensors(&device, &normal(seed, "left over", elements));
            for update in 1..=UPDATES {
                let gradients = tensors(&device, &gradient(seed, update, elements));
                let norm = norm_squared(&device, &gradients);
                let guard = Guard { norm_squared: &norm, loss: &loss, scale, clip_norm: max };
                let settings = Sgd { lr, momentum: momentum.unwrap_or(0.7), update };
                let kept = if momentum.is_some() { 1 } else { 0 };
                let mut updated: Vec<Updated> = gradients
                    .iter()
                    .zip(parameters.iter_mut().zip(velocities.chunks_mut(1)))
                    .zip(decays)
                    .map(|((gradient, (parameter, velocity)), weight_decay)| {
                        Updated { gradient, state: &mut velocity[..kept], parameter, copy: None, weight_decay }
                    })
                    .collect();
                device.sgd(&settings, guard, &mut updated).unwrap();
            }
            vec![change(&joined(&parameters), &start), joined(&velocities)]
        });
        let mut parameter = numbers(&start);
        let mut velocity = vec![Number::default(); elements];
        let decay = |i: usize| f64::from(decays[usize::from(i >= cut(&start)[0].len())]);
        for update in 1..=UPDATES {
            for (i, g) in clipped(&gradient(seed, update, elements), scale, max).into_iter().enumerate() {
                let kept = momentum.map_or(0.0, f64::from);
                velocity[i] = velocity[i] * kept + g + parameter[i] * decay(i);
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

    /// A norm or a loss that is no finite number leaves everything as it was.
    #[test]
    fn what_is_not_finite_changes_nothing(
        spoilt in prop::sample::select(vec![f64::NAN, f64::INFINITY, f64::NEG_INFINITY]),
        by_norm: bool,
        max in clip_max(),
        elements in 1usize..500,
        threads in 1usize..=3,
        seed: u64,
    ) {
        let device = device(threads);
        let (good, bad) = (scalar(&device, 2.0), scalar(&device, spoilt));
        let (norm_squared, loss) = if by_norm { (&bad, &good) } else { (&good, &bad) };
        let guard = Guard { norm_squared, loss, scale: 1.0, clip_norm: max };
        let gradient = tensor(&device, &gradient(seed, 1, elements));
        let values = ["parameter", "first", "second"].map(|name| normal(seed, name, elements));
        let [mut parameter, first, second] = values.each_ref().map(|values| tensor(&device, values));
        let mut state = [first, second];
        let adamw = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.95, eps: 1e-8, update: 3 };
        let sgd = Sgd { lr: 0.1, momentum: 0.9, update: 3 };
        let (all, one) = (2, 1);
        for kept in [all, one] {
            let updated = Updated {
                gradient: &gradient,
                state: &mut state[..kept],
                parameter: &mut parameter,
                copy: None,
                weight_decay: 0.1,
            };
            match kept {
                2 => device.adamw(&adamw, guard, &mut [updated]).unwrap(),
                _ => device.sgd(&sgd, guard, &mut [updated]).unwrap(),
            }
        }
        for (tensor, before) in [&parameter, &state[0], &state[1]].into_iter().zip(&values) {
            prop_assert!(same_bits(tensor.floats(), before));
        }
    }
}
