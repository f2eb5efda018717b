//! Which sample stands at a position of the endless stream that training draws from.
//!
//! An epoch is a pseudo-random permutation of the samples that can be evaluated at any place without
//! being stored: so resuming at any step costs nothing, every worker can ask for its own positions, and
//! no set of workers can repeat or skip a sample. The permutation is a Feistel network (a bijection
//! whatever its round function is) on the smallest even number of bits that holds the sample count;
//! results beyond the count are fed back in until one falls inside ("cycle walking").

/// Rounds of the network. Four already hide the structure of its input; two more cost nanoseconds.
const ROUNDS: u64 = 6;

/// Bits of each half at least: with fewer, too few permutations of a handful of samples can occur.
const HALF_BITS_MIN: u32 = 3;

/// The order of the samples: a function of the seed and the position alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// Samples in one epoch.
    samples: u64,
    /// The job's seed.
    seed: u64,
    /// Whether epochs are permuted; if not, each runs through the samples as they lie.
    shuffle: bool,
}

impl Order {
    /// The order of `samples` samples.
    ///
    /// # Panics
    /// If `samples` is 0; a [`crate::Dataset`] always has at least one.
    pub fn new(samples: u64, seed: u64, shuffle: bool) -> Self {
        assert!(samples > 0, "an order needs at least one sample");
        Self { samples, seed, shuffle }
    }

    /// The epoch that `position` falls in, and the sample that stands there.
    pub fn index(&self, position: u64) -> (u64, u64) {
        let epoch = position / self.samples;
        let place = position % self.samples;
        let sample = if self.shuffle { self.permute(epoch, place) } else { place };
        assert!(sample < self.samples);
        (epoch, sample)
    }

    /// The image of `place` under the permutation of `epoch`.
    ///
    /// The network's domain is at most four times the sample count (but for a handful of samples), so
    /// fewer than four passes are needed on average; and the walk always ends, because it follows a
    /// cycle of a permutation and that cycle started inside.
    fn permute(&self, epoch: u64, place: u64) -> u64 {
        let bits = u64::BITS - (self.samples - 1).leading_zeros();
        let half_bits = bits.div_ceil(2).max(HALF_BITS_MIN);
        let half_mask = (1u64 << half_bits) - 1;
        let key = mix(mix(self.seed).wrapping_add(epoch));

        let mut value = place;
        loop {
            let (mut left, mut right) = (value >> half_bits, value & half_mask);
            for round in 0..ROUNDS {
                let scrambled = mix(mix(key.wrapping_add(round)) ^ right) & half_mask;
                (left, right) = (right, left ^ scrambled);
            }
            value = (left << half_bits) | right;
            if value < self.samples {
                return value;
            }
        }
    }
}

/// Spreads every bit of the input over the whole output: the SplitMix64 step, whose constants were
/// searched for exactly that.
pub(crate) fn mix(input: u64) -> u64 {
    let mut bits = input.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
