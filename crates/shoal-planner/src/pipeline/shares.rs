//! How many samples each replica takes: so many that all are done at about the same time, and together exactly the
//! global batch.

/// A replica as far as its samples go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// Seconds of one micro-batch alone.
    pub fill: f64,
    /// Seconds of each further one.
    pub period: f64,
    /// Samples of a micro-batch.
    pub micro_batch: usize,
}

impl Pace {
    /// The same where samples are counted by so many.
    pub fn in_units(self, samples: usize) -> Pace {
        Pace { micro_batch: (self.micro_batch / samples).max(1), ..self }
    }

    pub fn seconds(&self, samples: usize) -> f64 {
        match samples.div_ceil(self.micro_batch) {
            0 => 0.0,
            count => self.fill + (count - 1) as f64 * self.period,
        }
    }

    /// The most samples in so many seconds, in whole micro-batches.
    fn samples(&self, seconds: f64, most: usize) -> usize {
        if seconds < self.fill {
            return 0;
        }
        // By the very sum that `seconds` makes, so that whoever has all of them has no fewer in that time.
        let count = if self.period > 0.0 { ((seconds - self.fill) / self.period) as usize } else { most };
        count.saturating_add(1).saturating_mul(self.micro_batch).min(most)
    }
}

/// Seconds of so many samples at the pace that suits them best.
pub(super) fn least_seconds(paces: &[Pace], samples: usize) -> f64 {
    paces.iter().map(|pace| pace.seconds(samples)).fold(f64::INFINITY, f64::min)
}

/// Samples of each replica: some may get none. A replica may go at any pace of its kind.
pub(super) fn shares(total: usize, kinds: &[Vec<Pace>], of: &[usize]) -> Vec<usize> {
    let most = |kind: &Vec<Pace>, seconds: f64| {
        kind.iter().map(|pace| pace.samples(seconds, total)).max().unwrap_or(0)
    };
    let mut counts = vec![0; kinds.len()];
    of.iter().for_each(|kind| counts[*kind] += 1);
    let taken = |seconds: f64| -> usize {
        kinds.iter().zip(&counts).map(|(kind, count)| count * most(kind, seconds)).sum()
    };
    let alone = kinds.iter().map(|kind| least_seconds(kind, total));
    let (mut low, mut high) = (0.0, alone.fold(f64::INFINITY, f64::min) * (1.0 + 1e-9));
    // To a millionth: what is left is less than any step's noise.
    while high - low > 1e-6 * high {
        let middle = (low + high) / 2.0;
        if taken(middle) < total {
            low = middle;
        } else {
            high = middle;
        }
    }
    let by_kind: Vec<usize> = kinds.iter().map(|kind| most(kind, high)).collect();
    let mut samples: Vec<usize> = of.iter().map(|kind| by_kind[*kind]).collect();
    let surplus = samples.iter().sum::<usize>().saturating_sub(total);
    shed(&mut samples, surplus, kinds, of);
    samples
}

/// Takes samples away from whoever is done last.
fn shed(samples: &mut [usize], mut surplus: usize, kinds: &[Vec<Pace>], of: &[usize]) {
    let seconds = |place: usize, samples: usize| least_seconds(&kinds[of[place]], samples);
    while surplus > 0 {
        let mut order: Vec<(f64, usize)> = (0..samples.len())
            .filter(|place| samples[*place] > 0)
            .map(|place| (seconds(place, samples[place]), place))
            .collect();
        order.sort_by(|a, b| b.0.total_cmp(&a.0));
        // One each, the slowest first: many are alike.
        for (_, place) in order {
            // A micro-batch of the pace it goes at, or as much of it as is too many.
            let best = |a: &&Pace, b: &&Pace| a.seconds(samples[place]).total_cmp(&b.seconds(samples[place]));
            let size = kinds[of[place]].iter().min_by(best).map_or(1, |pace| pace.micro_batch);
            let cut = ((samples[place] - 1) % size + 1).min(surplus);
            samples[place] -= cut;
            surplus -= cut;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn all_samples_are_taken_and_no_share_could_be_better(
            kinds in proptest::collection::vec(
                // Of steps of a millisecond the next micro-batch may seem to be for nothing: sharing what is there delays some.
                proptest::collection::vec(
                    (
                        prop_oneof![0.1..3.0f64, 1e-4..1e-3f64],
                        prop_oneof![0.1..1.0f64, 0.0..1e-12f64],
                        1usize..4,
                    ),
                    1..3,
                ),
                1..4,
            ),
            total in 1usize..9,
        ) {
            let pace = |(more, period, micro_batch)| Pace { fill: period + more, period, micro_batch };
            let kinds: Vec<Vec<Pace>> =
                kinds.into_iter().map(|kind| kind.into_iter().map(pace).collect()).collect();
            let of: Vec<usize> = (0..kinds.len()).collect();
            let found = shares(total, &kinds, &of);
            prop_assert_eq!(found.iter().sum::<usize>(), total);
            let seconds = |shares: &[usize]| {
                kinds.iter().zip(shares).map(|(kind, samples)| least_seconds(kind, *samples)).fold(0.0, f64::max)
            };
            let mut best = f64::INFINITY;
            let mut shares = vec![0; kinds.len()];
            loop {
                if shares.iter().sum::<usize>() == total {
                    best = seconds(&shares).min(best);
                }
                let Some(place) = shares.iter().position(|share| *share < total) else { break };
                shares[place] += 1;
                shares[..place].fill(0);
            }
            prop_assert!(seconds(&found) <= best * (1.0 + 1e-5), "{} > {best}", seconds(&found));
        }
    }
}
