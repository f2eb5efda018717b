//! Every operation of `Device` on the CPU against the same thing written plainly in f64, over random shapes,
//! strides and numbers of threads.
//!
//! Outputs start as NaN and must hold none afterwards: every element was written, and nothing that was not
//! an input was read. Every operation runs twice and must give the same bits.

#[path = "../common/mod.rs"]
mod common;

mod activation;
mod attention;
mod columns;
mod convolution;
mod dropout;
mod embedding;
mod images;
mod linear;
mod loss;
mod norm;
mod number;
mod optimizer;
mod pools;
mod rotary;

use common::{config, device, normal, tensor, unwritten};
use number::Number;
use proptest::prelude::*;
use shoal_kernels::device::SCALAR_ELEMENTS;
use shoal_kernels::{Device, Gelu};

/// Of each property. All of them together take some five seconds on one core.
const CASES: u32 = 200;

/// f32 rounds each term by up to 6e-8 of it, and over the up to 1000 terms summed here the roundings add up
/// like a random walk, to some 1e-6; thousands of cases came to at most 4e-6. A single missing term, or a
/// constant that is wrong in its fourth digit, is far above.
const TOLERANCE: f64 = 1e-5;

/// The result of an operation run twice, on outputs made anew: the bits must agree.
fn twice(run: impl Fn() -> Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    let (once, again) = (run(), run());
    let same =
        once.len() == again.len() && once.iter().zip(&again).all(|(once, again)| same_bits(once, again));
    assert!(same, "two runs of the same operation differ");
    once
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn assert_written(what: &str, out: &[f32]) {
    let missed = out.iter().position(|value| value.is_nan());
    assert_eq!(missed, None, "{what}: this element of {} is NaN", out.len());
}

/// Holds `out` against the oracle: ‖out − expected‖ relative to ‖expected‖. Where the expected values are the
/// small difference of large terms, a fiftieth of the terms takes their place: f32 cannot be better than
/// what its terms allow.
fn assert_close(what: &str, out: &[f32], expected: &[Number]) {
    assert_eq!(out.len(), expected.len(), "{what}");
    assert_written(what, out);
    let norm = |squares: &dyn Fn(usize) -> f64| (0..out.len()).map(squares).sum::<f64>().sqrt();
    let error = norm(&|i| (f64::from(out[i]) - expected[i].value).powi(2));
    let value = norm(&|i| expected[i].value.powi(2));
    let size = norm(&|i| expected[i].size.powi(2));
    let floor = value.max(0.02 * size).max(1e-30);
    assert!(error <= TOLERANCE * floor, "{what}: off by {:.2e} of {floor:.3e}", error / floor);
}

proptest! {
    #![proptest_config(config(CASES))]

    #[test]
    fn scalars_keep_every_bit(bits in any::<u64>()) {
        let device = device(1);
        let mut scalar = unwritten(&device, SCALAR_ELEMENTS);
        device.set_scalar(&mut scalar, f64::from_bits(bits)).unwrap();
        prop_assert_eq!(device.scalar(&scalar).unwrap().to_bits(), bits);
        let mut other = unwritten(&device, SCALAR_ELEMENTS);
        device.set_scalar(&mut other, 0.25).unwrap();
        let both: Vec<u64> =
            device.scalars(&[&other, &scalar]).unwrap().into_iter().map(f64::to_bits).collect();
        prop_assert_eq!(both, vec![0.25f64.to_bits(), bits]);
    }

    /// What is left of a longer tensor becomes zero.
    #[test]
    fn convert(elements in 0usize..500, longer in 0usize..20, threads in 1usize..=3, seed: u64) {
        let device = device(threads);
        let values = normal(seed, "x", elements);
        let mut to = unwritten(&device, elements + longer);
        device.convert(&tensor(&device, &values), &mut to).unwrap();
        let (copy, rest) = to.floats().split_at(elements);
        prop_assert!(same_bits(copy, &values));
        prop_assert!(rest.iter().all(|value| value.to_bits() == 0));
    }

    #[test]
    fn zero_reaches_every_element(elements in 1usize..1000, threads in 1usize..=3) {
        let device = device(threads);
        let mut values = unwritten(&device, elements);
        device.zero(&mut values).unwrap();
        prop_assert!(values.floats().iter().all(|value| value.to_bits() == 0));
    }

    /// Operations inside `run` are already on the device's threads; that must change nothing.
    #[test]
    fn operations_inside_run_give_the_same_bits(elements in 1usize..1000, threads in 1usize..=3, seed: u64) {
        let device = device(threads);
        let x = tensor(&device, &normal(seed, "x", elements));
        let (mut outside, mut inside) = (unwritten(&device, elements), unwritten(&device, elements));
        device.gelu(Gelu::Tanh, &x, &mut outside).unwrap();
        let mut calls = 0;
        device.run(&mut || {
            calls += 1;
            device.gelu(Gelu::Tanh, &x, &mut inside).unwrap();
        });
        prop_assert_eq!(calls, 1);
        prop_assert!(same_bits(outside.floats(), inside.floats()));
    }
}
