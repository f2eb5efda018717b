//! The arithmetic of the oracles: f64 that carries along how large its terms were. A sum that cancels is
//! small, but the rounding of its terms is not, so "relative to the result" alone would call a correct f32
//! sum wrong whenever it happens to land near zero.

use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// A value, and the size of what it was made of: computed in f32, the error is a few units in the last
/// place of `size`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Number {
    pub value: f64,
    pub size: f64,
}

pub fn number(value: f64) -> Number {
    Number { value, size: value.abs() }
}

pub fn numbers(values: &[f32]) -> Vec<Number> {
    values.iter().map(|value| Number::from(*value)).collect()
}

impl From<f32> for Number {
    fn from(value: f32) -> Number {
        number(f64::from(value))
    }
}

impl Number {
    /// An error of `e` in the exponent is a relative error of `e`.
    pub fn exp(self) -> Number {
        let value = self.value.exp();
        Number { value, size: value * self.size.max(1.0) }
    }

    pub fn ln(self) -> Number {
        let value = self.value.ln();
        Number { value, size: value.abs() + self.size / self.value }
    }

    pub fn sqrt(self) -> Number {
        let value = self.value.sqrt();
        let passed_on = if value > 0.0 { self.size / (2.0 * value) } else { 0.0 };
        Number { value, size: value + passed_on }
    }

    pub fn tanh(self) -> Number {
        let value = self.value.tanh();
        Number { value, size: value.abs() + (1.0 - value * value) * self.size }
    }

    pub fn erf(self) -> Number {
        let value = erf(self.value);
        let slope = std::f64::consts::FRAC_2_SQRT_PI * (-self.value * self.value).exp();
        Number { value, size: value.abs() + slope * self.size }
    }
}

/// The error function in f64, by the series whose terms are all positive.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, 0.0, 0.0);
    while term.abs() > 1e-18 * f64::abs(sum) {
        sum += term;
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
    }
    std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

impl Add for Number {
    type Output = Number;
    fn add(self, other: Number) -> Number {
        Number { value: self.value + other.value, size: self.size + other.size }
    }
}

impl AddAssign for Number {
    fn add_assign(&mut self, other: Number) {
        *self = *self + other;
    }
}

impl Sub for Number {
    type Output = Number;
    fn sub(self, other: Number) -> Number {
        self + -other
    }
}

impl Neg for Number {
    type Output = Number;
    fn neg(self) -> Number {
        Number { value: -self.value, size: self.size }
    }
}

impl Mul for Number {
    type Output = Number;
    fn mul(self, other: Number) -> Number {
        // The errors of both factors, each enlarged by the other factor's value.
        let (a, b) = (self.value.abs(), other.value.abs());
        Number { value: self.value * other.value, size: (self.size * b).max(a * other.size) }
    }
}

impl Mul<f64> for Number {
    type Output = Number;
    fn mul(self, factor: f64) -> Number {
        Number { value: self.value * factor, size: self.size * factor.abs() }
    }
}

impl Div for Number {
    type Output = Number;
    fn div(self, other: Number) -> Number {
        let value = self.value / other.value;
        Number { value, size: (self.size.max(value.abs() * other.size)) / other.value.abs() }
    }
}

impl Sum for Number {
    fn sum<I: Iterator<Item = Number>>(terms: I) -> Number {
        terms.fold(Number::default(), Add::add)
    }
}
