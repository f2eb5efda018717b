//! Dropout: which elements fall, and that the rest make up for them.

use proptest::prelude::*;
use shoal_kernels::{Device, DropoutSite};

use crate::common::{config, device, normal, side, tensor, unwritten};
use crate::number::{Number, numbers};
use crate::{CASES, assert_close, same_bits, twice};

/// Holds a mask's rows to what is promised: elements are dropped at the rate, the others scaled so that the
/// expectation stays, and two rows that lie one of the distances `apart` have nothing to do with each other
/// (they are neighbours, or the same row of another head or sample).
///
/// Counts may be six deviations away, which a fair mask is once in 10^7 at worst; below some hundred elements
/// chance allows anything.
pub fn assert_fair(rows: &[Vec<f32>], apart: &[usize], rate: f32) {
    let kept = 1.0 / (1.0 - f64::from(rate));
    for factor in rows.iter().flatten() {
        let factor = f64::from(*factor);
        assert!(factor == 0.0 || (factor / kept - 1.0).abs() < 1e-6, "a factor of {factor} at rate {rate}");
    }
    let within = |what: &str, hits: usize, of: usize, chance: f64| {
        let deviation = (of as f64 * chance * (1.0 - chance)).sqrt();
        let away = hits as f64 - of as f64 * chance;
        assert!(of < 500 || away.abs() <= 6.0 * deviation, "{what}: {hits} of {of} at a chance of {chance}");
    };
    let rate = f64::from(rate);
    let (dropped, all) =
        (rows.iter().flatten().filter(|factor| **factor == 0.0).count(), rows.iter().flatten().count());
    within("dropped", dropped, all, rate);
    for apart in apart {
        let both = rows.iter().zip(rows.iter().skip(*apart));
        let pairs: Vec<(&f32, &f32)> = both.flat_map(|(one, other)| one.iter().zip(other)).collect();
        let alike = pairs.iter().filter(|(one, other)| (**one == 0.0) == (**other == 0.0)).count();
        within("alike in two rows", alike, pairs.len(), rate * rate + (1.0 - rate) * (1.0 - rate));
    }
}

/// What a site multiplies each element by: what it makes of ones.
fn mask(device: &impl Device, site: DropoutSite, sequence: usize, cols: usize, rows: usize) -> Vec<f32> {
    let mut out = tensor(device, &vec![1.0; rows * cols]);
    device.dropout(site, sequence, cols, None, &mut out).unwrap();
    out.floats().to_vec()
}

proptest! {
    #![proptest_config(config(CASES))]

    #[test]
    fn dropout(
        (samples, sequence, cols) in (1usize..5, side(), side()),
        rate in prop::sample::select(vec![0.0f32, 0.1, 0.5, 0.9]),
        with_residual: bool,
        first_sample in 0u64..1000,
        threads in 1usize..=3,
        seed: u64,
    ) {
        let site = DropoutSite { rate, key: seed, step: None, first_sample };
        let elements = samples * sequence * cols;
        let (x, residual) = (normal(seed, "x", elements), normal(seed, "residual", elements));
        let device = device(threads);
        let results = twice(|| {
            let residual = with_residual.then(|| tensor(&device, &residual));
            let (x, mut out) = (tensor(&device, &x), tensor(&device, &x));
            device.dropout(site, sequence, cols, residual.as_ref(), &mut out).unwrap();
            let mut copy = unwritten(&device, elements);
            device.dropout_copy(site, sequence, cols, &x, &mut copy).unwrap();
            vec![out.floats().to_vec(), copy.floats().to_vec(), x.floats().to_vec()]
        });
        prop_assert!(same_bits(&results[2], &x), "the copied tensor was written");
        let mask = mask(&device, site, sequence, cols, samples * sequence);
        assert_fair(&mask.chunks_exact(cols).map(<[f32]>::to_vec).collect::<Vec<_>>(), &[1, sequence], rate);
        let dropped: Vec<Number> =
            numbers(&x).iter().zip(&mask).map(|(x, factor)| *x * Number::from(*factor)).collect();
        let start = if with_residual { numbers(&residual) } else { vec![Number::default(); elements] };
        let sums: Vec<Number> = start.iter().zip(&dropped).map(|(a, b)| *a + *b).collect();
        assert_close("dropout", &results[0], &sums);
        assert_close("dropout_copy", &results[1], &dropped);
    }

    /// The mask belongs to the sample, not to the call or the threads.
    #[test]
    fn dropout_does_not_notice_how_samples_are_cut(
        (sequence, cols) in (side(), side()),
        cut in 0usize..=4,
        first_sample in 0u64..1 << 40,
        threads in 1usize..=3,
        seed: u64,
    ) {
        let site = DropoutSite { rate: 0.3, key: seed, step: None, first_sample };
        let later = DropoutSite { first_sample: first_sample + cut as u64, ..site };
        let (one, other) = (device(threads), device(1));
        let all = mask(&one, site, sequence, cols, 4 * sequence);
        let mut parts = mask(&other, site, sequence, cols, cut * sequence);
        parts.extend(mask(&other, later, sequence, cols, (4 - cut) * sequence));
        prop_assert_eq!(all, parts);
    }

    /// Another site, step or layer is another key, and draws its own mask.
    #[test]
    fn another_key_is_another_mask(key: u64, other in 1u64..1000, rate in 0.1f32..0.9) {
        let device = device(1);
        let at = |key: u64| mask(&device, DropoutSite { rate, key, step: None, first_sample: 0 }, 16, 256, 16);
        assert_fair(&[at(key), at(key.wrapping_add(other))], &[1], rate);
    }
}
