//! The order is a permutation of every epoch, for every size; it depends on seed and epoch; and it looks
//! like chance.

use proptest::prelude::*;
use shoal_data::Order;
use std::collections::HashMap;

/// The samples of one epoch, in order.
fn epoch(order: &Order, samples: u64, epoch: u64) -> Vec<u64> {
    let at = |position| {
        let (found, sample) = order.index(position);
        assert_eq!(found, epoch);
        sample
    };
    (epoch * samples..(epoch + 1) * samples).map(at).collect()
}

fn assert_permutation(samples: u64, seed: u64, number: u64) {
    let mut seen = vec![false; samples as usize];
    for sample in epoch(&Order::new(samples, seed, true), samples, number) {
        assert!(!std::mem::replace(&mut seen[sample as usize], true), "{sample} of {samples} twice");
    }
}

/// How far the counts of `outcomes` outcomes stray from being equally likely, in standard deviations.
fn strangeness(counts: impl Iterator<Item = u64>, outcomes: u64, draws: u64) -> f64 {
    let expected = draws as f64 / outcomes as f64;
    let mut seen = 0;
    let mut chi_square = 0.0;
    for count in counts {
        seen += 1;
        chi_square += (count as f64 - expected).powi(2) / expected;
    }
    chi_square += (outcomes - seen) as f64 * expected;
    let freedom = (outcomes - 1) as f64;
    (chi_square - freedom) / (2.0 * freedom).sqrt()
}

#[test]
fn every_small_size_is_permuted() {
    for samples in 1..=300 {
        for number in 0..4 {
            assert_permutation(samples, 17, number);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_size_is_permuted(samples in 1u64..5000, seed: u64, number in 0u64..1_000_000) {
        assert_permutation(samples, seed, number);
    }

    #[test]
    fn no_split_of_the_positions_repeats_or_skips(
        samples in 1u64..500, epochs in 1u64..4, seed: u64, mut cuts in prop::collection::vec(any::<u64>(), 0..8)
    ) {
        let end = samples * epochs;
        cuts.iter_mut().for_each(|cut| *cut %= end);
        cuts.extend([0, end]);
        cuts.sort();
        let mut times = vec![0; samples as usize];
        for range in cuts.windows(2) {
            // Each range is drawn by a worker of its own, which knows only seed and position.
            let order = Order::new(samples, seed, true);
            (range[0]..range[1]).for_each(|position| times[order.index(position).1 as usize] += 1);
        }
        prop_assert!(times.iter().all(|&times| times == epochs));
    }

    #[test]
    fn very_many_samples_stay_in_range(samples in 1u64 << 40.., seed: u64, position: u64) {
        let (number, sample) = Order::new(samples, seed, true).index(position);
        prop_assert_eq!(number, position / samples);
        prop_assert!(sample < samples);
    }
}

#[test]
fn without_shuffling_samples_come_as_they_lie() {
    let order = Order::new(5, 3, false);
    let drawn: Vec<_> = (0..12).map(|position| order.index(position)).collect();
    assert_eq!(drawn[..6], [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0)]);
    assert_eq!(drawn[11], (2, 1));
}

#[test]
fn epochs_and_seeds_differ() {
    let samples = 1000;
    let first = epoch(&Order::new(samples, 1, true), samples, 0);
    let next = epoch(&Order::new(samples, 1, true), samples, 1);
    let other = epoch(&Order::new(samples, 2, true), samples, 0);
    let same_place = |a: &[u64], b: &[u64]| a.iter().zip(b).filter(|(a, b)| a == b).count();
    // Two random permutations agree in one place on average.
    assert!(same_place(&first, &next) < 8);
    assert!(same_place(&first, &other) < 8);
    assert!(same_place(&next, &other) < 8, "one seed's epoch must not be the next seed's");
    assert_eq!(first, epoch(&Order::new(samples, 1, true), samples, 0));
}

#[test]
fn all_orders_of_a_few_samples_are_equally_likely() {
    for (samples, orders) in [(2, 2), (3, 6), (4, 24), (5, 120)] {
        let draws = orders * 500;
        for seed in 0..3 {
            let order = Order::new(samples, seed, true);
            let mut counts = HashMap::new();
            for number in 0..draws {
                *counts.entry(epoch(&order, samples, number)).or_insert(0u64) += 1;
            }
            let strange = strangeness(counts.into_values(), orders, draws);
            assert!(strange < 4.5, "{samples} samples, seed {seed}: {strange}");
        }
    }
}

#[test]
fn any_sample_is_as_likely_at_any_place_and_after_any_other() {
    for samples in [7u64, 60, 129] {
        let epochs = 4000;
        let order = Order::new(samples, 99, true);
        let mut at_place = vec![0u64; (samples * samples) as usize];
        let mut step = vec![0u64; samples as usize - 1];
        for number in 0..epochs {
            let drawn = epoch(&order, samples, number);
            for (place, &sample) in drawn.iter().enumerate() {
                at_place[place * samples as usize + sample as usize] += 1;
            }
            for pair in drawn.windows(2) {
                step[((pair[1] + samples - pair[0]) % samples) as usize - 1] += 1;
            }
        }
        let strange = strangeness(at_place.into_iter(), samples * samples, samples * epochs);
        assert!(strange < 4.5, "{samples} samples by place: {strange}");
        let strange = strangeness(step.into_iter(), samples - 1, (samples - 1) * epochs);
        assert!(strange < 4.5, "{samples} samples by step: {strange}");
    }
}

#[test]
fn seeds_that_follow_each_other_are_as_good_as_any() {
    let (samples, seeds) = (50u64, 20_000);
    let mut first = vec![0u64; samples as usize];
    (0..seeds).for_each(|seed| first[Order::new(samples, seed, true).index(0).1 as usize] += 1);
    let strange = strangeness(first.into_iter(), samples, seeds);
    assert!(strange < 4.5, "{strange}");
}
