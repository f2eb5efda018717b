//! GELU and SwiGLU, and the backward passes that also give the forward's output again.

use proptest::prelude::*;
use shoal_kernels::{Device, Gelu};

use crate::common::{config, device, gelus, normal, tensor, unwritten};
use crate::number::{Number, number, numbers};
use crate::{CASES, assert_close, twice};

/// Normal numbers made wide enough, at times, to reach the flat ends of the functions.
fn values(seed: u64, name: &str, elements: usize, spread: f32) -> Vec<f32> {
    normal(seed, name, elements).iter().map(|value| value * spread).collect()
}

fn spread() -> impl Strategy<Value = f32> {
    prop::sample::select(vec![0.1f32, 1.0, 3.0, 20.0])
}

/// sqrt(2 / pi) and the cube's coefficient, as the tanh approximation is defined.
const GELU: (f64, f64) = (0.797_884_560_802_865_4, 0.044_715);

fn gelu(kind: Gelu, x: Number) -> Number {
    let sign = match kind {
        Gelu::Tanh => ((x + x * x * x * GELU.1) * GELU.0).tanh(),
        Gelu::Erf => (x * std::f64::consts::FRAC_1_SQRT_2).erf(),
    };
    x * (number(1.0) + sign) * 0.5
}

fn gelu_slope(kind: Gelu, x: Number) -> Number {
    match kind {
        Gelu::Tanh => {
            let tanh = ((x + x * x * x * GELU.1) * GELU.0).tanh();
            let inner_slope = (number(1.0) + x * x * (3.0 * GELU.1)) * GELU.0;
            (number(1.0) + tanh) * 0.5 + x * (number(1.0) - tanh * tanh) * inner_slope * 0.5
        }
        Gelu::Erf => {
            let share = (number(1.0) + (x * std::f64::consts::FRAC_1_SQRT_2).erf()) * 0.5;
            share + x * (x * x * -0.5).exp() * (1.0 / std::f64::consts::TAU.sqrt())
        }
    }
}

fn sigmoid(x: Number) -> Number {
    number(1.0) / (number(1.0) + (-x).exp())
}

fn silu_slope(x: Number) -> Number {
    let s = sigmoid(x);
    s + x * s * (number(1.0) - s)
}

proptest! {
    #![proptest_config(config(CASES))]

    #[test]
    fn gelu_forward_and_backward(
        kind in gelus(),
        elements in 1usize..1000,
        spread in spread(),
        threads in 1usize..=3,
        seed: u64,
    ) {
        let (x, dy) = (values(seed, "x", elements, spread), normal(seed, "dy", elements));
        let device = device(threads);
        let results = twice(|| {
            let (mut x, mut gradient) = (tensor(&device, &x), tensor(&device, &dy));
            let mut out = unwritten(&device, elements);
            device.gelu(kind, &x, &mut out).unwrap();
            device.gelu_backward(kind, &mut x, &mut gradient).unwrap();
            [out, x, gradient].iter().map(|tensor| tensor.floats().to_vec()).collect()
        });
        let (x, dy) = (numbers(&x), numbers(&dy));
        let expected: Vec<Number> = x.iter().map(|x| gelu(kind, *x)).collect();
        let gradient: Vec<Number> = x.iter().zip(&dy).map(|(x, dy)| *dy * gelu_slope(kind, *x)).collect();
        assert_close("gelu", &results[0], &expected);
        assert_close("gelu again", &results[1], &expected);
        assert_close("gelu_backward", &results[2], &gradient);
    }

    #[test]
    fn swiglu_forward_and_backward(elements in 1usize..1000, spread in spread(), threads in 1usize..=3, seed: u64) {
        let (gate, up) = (values(seed, "gate", elements, spread), normal(seed, "up", elements));
        let dy = normal(seed, "dy", elements);
        let device = device(threads);
        let results = twice(|| {
            let (mut gate, mut up, mut gradient) =
                (tensor(&device, &gate), tensor(&device, &up), tensor(&device, &dy));
            let mut out = unwritten(&device, elements);
            device.swiglu(&gate, &up, &mut out).unwrap();
            device.swiglu_backward(&mut gate, &mut up, &mut gradient).unwrap();
            [out, gate, up, gradient].iter().map(|tensor| tensor.floats().to_vec()).collect()
        });
        let (gate, up, dy) = (numbers(&gate), numbers(&up), numbers(&dy));
        let at = |value: &dyn Fn(usize) -> Number| (0..elements).map(value).collect::<Vec<_>>();
        let product = at(&|i| gate[i] * sigmoid(gate[i]) * up[i]);
        assert_close("swiglu", &results[0], &product);
        assert_close("swiglu again", &results[3], &product);
        let gate_gradient = at(&|i| dy[i] * up[i] * silu_slope(gate[i]));
        assert_close("the gate's gradient", &results[1], &gate_gradient);
        let up_gradient = at(&|i| dy[i] * gate[i] * sigmoid(gate[i]));
        assert_close("the up's gradient", &results[2], &up_gradient);
    }
}
