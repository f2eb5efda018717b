//! Numbers as a pure function of where they are used. There is no generator state: a dropout mask is a
//! function of (seed, step, sample, layer, site, element) and an initial weight of (seed, tensor name,
//! element), so neither notices how the work is cut, and there is nothing to lose at a restart.

/// Mixes 64 bits so that each input bit reaches every output bit.
#[inline(always)]
pub fn mix64(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Mixes 32 bits; cheap enough to run once per element inside a vectorised loop.
#[inline(always)]
pub fn mix32(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x21f0_aaad);
    x = (x ^ (x >> 15)).wrapping_mul(0x735a_2d97);
    x ^ (x >> 15)
}

/// Folds one more coordinate into a key.
#[inline(always)]
pub fn fold(key: u64, coordinate: u64) -> u64 {
    mix64(
        key.wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_add(coordinate.wrapping_mul(0xd6e8_feb8_6659_fd93)),
    )
}

/// A 64-bit key for a name.
pub fn key_of(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |key, byte| fold(key, u64::from(byte)))
}

/// Uniform in (0, 1], never zero, so that its logarithm is finite.
fn uniform(bits: u64) -> f64 {
    ((bits >> 11) + 1) as f64 / (1u64 << 53) as f64
}

/// Writes normally distributed numbers with the given deviation; element `i` depends on `(key, i)` alone.
pub fn fill_normal(out: &mut [f32], key: u64, first: u64, deviation: f32) {
    for (index, value) in (first..).zip(out.iter_mut()) {
        let radius = (-2.0 * uniform(fold(key, 2 * index)).ln()).sqrt();
        let angle = std::f64::consts::TAU * uniform(fold(key, 2 * index + 1));
        *value = (radius * angle.cos()) as f32 * deviation;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_their_moments_and_do_not_depend_on_the_cut() {
        let mut whole = vec![0.0; 100_000];
        fill_normal(&mut whole, key_of("wte"), 0, 0.5);
        let mean = whole.iter().map(|x| f64::from(*x)).sum::<f64>() / 1e5;
        let variance = whole.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 1e5;
        let fourth = whole.iter().map(|x| f64::from(*x).powi(4)).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.01, "{mean}");
        assert!((variance - 0.25).abs() < 0.005, "{variance}");
        assert!((fourth / variance.powi(2) - 3.0).abs() < 0.1, "{fourth}");
        let mut part = vec![0.0; 10];
        fill_normal(&mut part, key_of("wte"), 500, 0.5);
        assert_eq!(part, whole[500..510]);
    }

    #[test]
    fn mixing_is_balanced_in_every_bit() {
        for bit in 0..32 {
            let ones = (0..1u32 << 16).filter(|x| mix32(*x) >> bit & 1 == 1).count();
            assert!((ones as i64 - (1 << 15)).abs() < 700, "bit {bit}: {ones}");
        }
    }
}
