//! Elementary functions without branches or calls, so that loops over them vectorise. Each is accurate to
//! a few units in the last place over the range training meets; the tests hold them against f64.

/// Lanes of the widest register: sums are kept in this many partial sums whatever the hardware, so that
/// the instruction set decides speed and rounding only inside a product's fused multiply-add.
pub(super) const LANES: usize = 16;

/// `e^x`; clamped where f32 would overflow or vanish.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts, so that subtracting n of them loses nothing.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest whole number.
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let mut p = 1.987_569_1e-4_f32;
    p = p.mul_add(r, 1.398_2e-3);
    p = p.mul_add(r, 8.333_452e-3);
    p = p.mul_add(r, 4.166_579_6e-2);
    p = p.mul_add(r, 1.666_666_5e-1);
    p = p.mul_add(r, 0.5);
    p = p.mul_add(r * r, r) + 1.0;
    // The whole number sits in the low bits of `shifted`; added to the exponent it multiplies by 2^n.
    let scale = f32::from_bits(shifted.to_bits().wrapping_shl(23).wrapping_add(0x3f80_0000));
    p * scale
}

/// `1 / (1 + e^-x)`
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

const GELU_SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)
const GELU_CUBE: f32 = 0.044_715;

/// GELU by its tanh approximation: `x * (1 + tanh(u)) / 2`, which is `x * sigmoid(2u)`.
#[inline(always)]
pub(super) fn gelu(x: f32) -> f32 {
    let u = GELU_SCALE * x * (GELU_CUBE * x).mul_add(x, 1.0);
    x * sigmoid(2.0 * u)
}

/// GELU and its derivative.
#[inline(always)]
pub(super) fn gelu_both(x: f32) -> (f32, f32) {
    let u = GELU_SCALE * x * (GELU_CUBE * x).mul_add(x, 1.0);
    let s = sigmoid(2.0 * u);
    let slope = GELU_SCALE * (3.0 * GELU_CUBE * x).mul_add(x, 1.0);
    (x * s, (2.0 * x * s * (1.0 - s)).mul_add(slope, s))
}

/// The error function, to within a unit in the last place: an odd polynomial near zero; further out the
/// logarithm of what is missing to one is a polynomial. (Fits by N. Juffa.)
#[inline(always)]
pub(super) fn erf(x: f32) -> f32 {
    const NEAR: f32 = 0.927_734_4;
    let (t, s) = (x.abs(), x * x);
    let mut near = -5.967_617e-4_f32;
    near = near.mul_add(s, 4.991_194_2e-3);
    near = near.mul_add(s, -2.676_813_5e-2);
    near = near.mul_add(s, 1.128_199_25e-1);
    near = near.mul_add(s, -3.761_253_4e-1);
    near = near.mul_add(s, 1.283_791_7e-1);
    near = near.mul_add(x, x);
    let low = (-3.883_964_4e-3_f32).mul_add(t, 2.425_462_2e-2);
    let mut far = (-1.728_534_7e-5_f32).mul_add(t, 3.831_971_3e-4);
    far = far.mul_add(s, low);
    far = far.mul_add(t, -1.067_778_8e-1);
    far = far.mul_add(t, -6.348_467e-1);
    far = far.mul_add(t, -1.287_175_1e-1);
    far = far.mul_add(t, -t);
    let far = (1.0 - exp(far)).copysign(x);
    if t > NEAR { far } else { near }
}

/// The share of the normal distribution below `x`.
#[inline(always)]
fn normal_share(x: f32) -> f32 {
    0.5 * (1.0 + erf(std::f32::consts::FRAC_1_SQRT_2 * x))
}

/// GELU as it is defined: `x` times the normal distribution's share below it.
#[inline(always)]
pub(super) fn gelu_erf(x: f32) -> f32 {
    x * normal_share(x)
}

/// The same and its derivative.
#[inline(always)]
pub(super) fn gelu_erf_both(x: f32) -> (f32, f32) {
    const DENSITY_AT_ZERO: f32 = 0.398_942_3; // 1 / sqrt(2 pi)
    let share = normal_share(x);
    (x * share, (x * DENSITY_AT_ZERO).mul_add(exp(-0.5 * x * x), share))
}

/// Sum of `term(i)` over `0..n` in [`LANES`] partial sums, folded in a fixed order.
#[inline(always)]
pub(super) fn sum_by(n: usize, term: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let whole = n / LANES * LANES;
    let mut start = 0;
    while start < whole {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += term(start + lane);
        }
        start += LANES;
    }
    for index in whole..n {
        lanes[index - whole] += term(index);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The largest of the values; `-inf` for none.
#[inline(always)]
pub(super) fn max(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (best, value) in lanes.iter_mut().zip(chunk) {
            *best = if *value > *best { *value } else { *best };
        }
    }
    for (best, value) in lanes.iter_mut().zip(rest) {
        *best = if *value > *best { *value } else { *best };
    }
    lanes.iter().fold(f32::NEG_INFINITY, |best, value| if *value > best { *value } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elementary_functions_agree_with_f64() {
        let mut x = -86.0f32;
        while x < 86.0 {
            let wide = f64::from(x);
            assert!((f64::from(exp(x)) / wide.exp() - 1.0).abs() < 3e-7, "exp({x})");
            let expected = 0.5 * wide * (1.0 + (0.797_884_560_8 * (wide + 0.044_715 * wide.powi(3))).tanh());
            assert!((f64::from(gelu(x)) - expected).abs() < 1e-6 * wide.abs().max(1.0), "gelu({x})");
            let (value, slope) = gelu_both(x);
            assert_eq!(value, gelu(x));
            let h = 1e-4;
            let at = |x: f64| 0.5 * x * (1.0 + (0.797_884_560_8 * (x + 0.044_715 * x.powi(3))).tanh());
            let numeric = (at(wide + h) - at(wide - h)) / (2.0 * h);
            assert!((f64::from(slope) - numeric).abs() < 2e-6, "gelu'({x}): {slope} against {numeric}");
            x += 0.0371;
        }
        assert!(exp(-1000.0) >= 0.0 && exp(-1000.0) < 1e-37);
        assert!(exp(1000.0).is_finite());
    }

    /// The series whose terms are all positive: no difference of large terms, whatever `x` is.
    fn wide_erf(x: f64) -> f64 {
        let (mut term, mut sum, mut n) = (x, 0.0, 0.0);
        while term.abs() > 1e-18 * f64::abs(sum) {
            sum += term;
            n += 1.0;
            term *= 2.0 * x * x / (2.0 * n + 1.0);
        }
        std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum
    }

    #[test]
    fn the_error_function_and_its_gelu_agree_with_f64() {
        let share = |x: f64| 0.5 * (1.0 + wide_erf(x * std::f64::consts::FRAC_1_SQRT_2));
        let mut x = -9.0f32;
        while x < 9.0 {
            let wide = f64::from(x);
            assert!((f64::from(erf(x)) - wide_erf(wide)).abs() < 1.2e-7, "erf({x})");
            let (value, slope) = gelu_erf_both(x);
            assert_eq!(value, gelu_erf(x));
            assert!((f64::from(value) - wide * share(wide)).abs() < 2e-7 * wide.abs().max(1.0), "gelu({x})");
            let expected = share(wide) + wide * (-0.5 * wide * wide).exp() / std::f64::consts::TAU.sqrt();
            assert!((f64::from(slope) - expected).abs() < 3e-7, "gelu'({x}): {slope} against {expected}");
            x += 0.001_37;
        }
        assert_eq!((erf(30.0), erf(-30.0), erf(1e30), erf(0.0)), (1.0, -1.0, 1.0, 0.0));
        assert_eq!((gelu_erf(-1e4), gelu_erf(1e4)), (0.0, 1e4));
        assert!(gelu_erf_both(-1e4).1.abs() < 1e-30 && gelu_erf_both(1e4).1 == 1.0);
    }

    #[test]
    fn sums_and_maxima_cover_every_element_whatever_the_length() {
        for n in 0..70 {
            let values: Vec<f32> = (0..n).map(|i| (i as f32 * 7.0) % 13.0 - 20.0).collect();
            let sum: f32 = values.iter().sum();
            assert_eq!(sum_by(n, |i| values[i]), sum);
            let expected = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(max(&values), expected);
        }
    }
}
