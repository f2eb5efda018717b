//! Attention, causal and not, grouped and not, with dropout and without, padded and not, against the whole matrix of scores.
//!
//! The oracle needs the dropout's mask, and takes it from the device itself: with all scores equal and
//! values that pick out one key per column, the output is the mask. So the tests know of the mask only what
//! is promised of it.

use proptest::prelude::*;
use shoal_kernels::{AttentionBackward, AttentionShape, Device, DropoutSite};

use crate::common::{attention_shape, config, device, integers, lengths, normal, tensor, unwritten};
use crate::dropout::assert_fair;
use crate::number::{Number, number, numbers};
use crate::{CASES, assert_close, same_bits, twice};

/// Sizes of heads, on both sides of what vector loops take at once.
const HEAD_SIZES: &[usize] = &[1, 3, 8, 16, 17, 33, 64];

fn site(seed: u64, rate: f32, first_sample: u64) -> DropoutSite<'static> {
    DropoutSite { rate, key: seed ^ 0x5eed, step: None, first_sample }
}

/// What each weight is multiplied by: `[samples, heads, sequence, sequence]`, zero where the query does
/// not see the key.
fn mask(device: &impl Device, shape: AttentionShape, site: DropoutSite) -> Vec<f32> {
    let picked = 64;
    let probe = AttentionShape { kv_heads: 1, head_size: picked, ..shape };
    let sequence = shape.sequence;
    let mut mask = vec![0.0; shape.samples * shape.heads * sequence * sequence];
    for first in (0..sequence).step_by(picked) {
        let mut qkv = vec![0.0; probe.rows() * probe.qkv_width()];
        for sample in 0..shape.samples {
            for key in first..(first + picked).min(sequence) {
                let row = sample * sequence + key;
                qkv[row * probe.qkv_width() + (probe.heads + 1) * picked + key - first] = 1.0;
            }
        }
        let mut out = unwritten(device, probe.rows() * probe.query_width());
        let mut logsumexp = unwritten(device, probe.rows() * probe.heads);
        device.attention(probe, Some(site), None, &tensor(device, &qkv), &mut out, &mut logsumexp).unwrap();
        for sample in 0..shape.samples {
            for head in 0..shape.heads {
                for query in 0..sequence {
                    let row = (sample * sequence + query) * probe.query_width() + head * picked;
                    let line = ((sample * shape.heads + head) * sequence + query) * sequence;
                    for key in first..(first + picked).min(shape.keys_seen(query)) {
                        // Each of the query's equal weights is one part of the whole.
                        mask[line + key] = out.floats()[row + key - first] * shape.keys_seen(query) as f32;
                    }
                }
            }
        }
    }
    mask
}

/// One head of one sample.
struct Head<'a> {
    shape: &'a AttentionShape,
    qkv: &'a [Number],
    /// `[sequence, sequence]`
    mask: Option<&'a [f32]>,
    sample: usize,
    /// How many of the sample's rows count.
    length: usize,
    head: usize,
}

impl Head<'_> {
    /// Where the element of a row lies; `part` is 0 for queries, 1 for keys, 2 for values.
    fn place(&self, part: usize, row: usize, element: usize) -> usize {
        let shape = self.shape;
        let shared = self.head / (shape.heads / shape.kv_heads);
        let head = [self.head, shape.heads + shared, shape.heads + shape.kv_heads + shared][part];
        (self.sample * shape.sequence + row) * shape.qkv_width() + head * shape.head_size + element
    }

    fn at(&self, part: usize, row: usize, element: usize) -> Number {
        self.qkv[self.place(part, row, element)]
    }

    fn out_place(&self, row: usize, element: usize) -> usize {
        let width = self.shape.query_width();
        (self.sample * self.shape.sequence + row) * width + self.head * self.shape.head_size + element
    }

    fn factor(&self, query: usize, key: usize) -> Number {
        self.mask.map_or(number(1.0), |mask| mask[query * self.shape.sequence + key].into())
    }

    fn keys_seen(&self, query: usize) -> usize {
        self.shape.keys_seen(query).min(self.length)
    }

    /// The softmax over the keys that a query sees, and the logarithm of its sum.
    fn probabilities(&self, query: usize) -> (Vec<Number>, Number) {
        let score = |key: usize| {
            let terms = (0..self.shape.head_size).map(|e| self.at(0, query, e) * self.at(1, key, e));
            terms.sum::<Number>() * f64::from(self.shape.scale)
        };
        let scores: Vec<Number> = (0..self.keys_seen(query)).map(score).collect();
        let highest = number(scores.iter().map(|score| score.value).fold(f64::NEG_INFINITY, f64::max));
        let powers: Vec<Number> = scores.iter().map(|score| (*score - highest).exp()).collect();
        let sum: Number = powers.iter().copied().sum();
        (powers.iter().map(|power| *power / sum).collect(), sum.ln() + highest)
    }

    fn forward(&self, out: &mut [Number], logsumexp: &mut [Number]) {
        for query in 0..self.length {
            let (weights, sum) = self.probabilities(query);
            for element in 0..self.shape.head_size {
                let terms = weights.iter().enumerate();
                out[self.out_place(query, element)] =
                    terms.map(|(key, p)| *p * self.factor(query, key) * self.at(2, key, element)).sum();
            }
            logsumexp[(self.sample * self.shape.sequence + query) * self.shape.heads + self.head] = sum;
        }
    }

    fn backward(&self, dout: &[Number], gradient: &mut [Number]) {
        let size = self.shape.head_size;
        let scale = f64::from(self.shape.scale);
        for query in 0..self.length {
            let (weights, _) = self.probabilities(query);
            let slope = |key: usize| {
                let terms = (0..size).map(|e| dout[self.out_place(query, e)] * self.at(2, key, e));
                terms.sum::<Number>() * self.factor(query, key).value
            };
            let slopes: Vec<Number> = (0..self.keys_seen(query)).map(slope).collect();
            let average: Number = weights.iter().zip(&slopes).map(|(p, slope)| *p * *slope).sum();
            for (key, (p, slope)) in weights.iter().zip(&slopes).enumerate() {
                let score_gradient = *p * (*slope - average) * scale;
                let passed = *p * self.factor(query, key);
                for e in 0..size {
                    gradient[self.place(0, query, e)] += score_gradient * self.at(1, key, e);
                    gradient[self.place(1, key, e)] += score_gradient * self.at(0, query, e);
                    gradient[self.place(2, key, e)] += passed * dout[self.out_place(query, e)];
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(config(CASES))]

    #[test]
    fn attention_and_its_backward(
        shape in attention_shape(HEAD_SIZES),
        rate in prop::option::of(prop::sample::select(vec![0.1f32, 0.5])),
        padded: bool,
        threads in 1usize..=3,
        first_sample in 0u64..1000,
        seed: u64,
    ) {
        let device = device(threads);
        let dropout = rate.map(|rate| site(seed, rate, first_sample));
        let lengths = padded.then(|| lengths(seed, &shape));
        let qkv = normal(seed, "qkv", shape.rows() * shape.qkv_width());
        let dout = normal(seed, "dout", shape.rows() * shape.query_width());
        let results = twice(|| {
            let (qkv, dout) = (tensor(&device, &qkv), tensor(&device, &dout));
            let lengths = lengths.as_ref().map(|lengths| integers(&device, lengths));
            let lengths = lengths.as_ref();
            let mut out = unwritten(&device, dout.len());
            let mut logsumexp = unwritten(&device, shape.rows() * shape.heads);
            device.attention(shape, dropout, lengths, &qkv, &mut out, &mut logsumexp).unwrap();
            let (mut delta, mut gradient) =
                (unwritten(&device, logsumexp.len()), unwritten(&device, qkv.len()));
            device
                .attention_backward(shape, dropout, AttentionBackward { lengths, qkv: &qkv, out: &out, logsumexp: &logsumexp, out_gradient: &dout, scratch: &mut delta, qkv_gradient: &mut gradient })
                .unwrap();
            [out, logsumexp, gradient].iter().map(|tensor| tensor.floats().to_vec()).collect()
        });
        let mask = dropout.map(|site| mask(&device, shape, site));
        let (qkv, dout) = (numbers(&qkv), numbers(&dout));
        let mut out = vec![Number::default(); dout.len()];
        let mut logsumexp = vec![Number::default(); shape.rows() * shape.heads];
        let mut gradient = vec![Number::default(); qkv.len()];
        for sample in 0..shape.samples {
            for head in 0..shape.heads {
                let square = shape.sequence * shape.sequence;
                let mask = mask.as_ref().map(|mask| &mask[(sample * shape.heads + head) * square..][..square]);
                let length = lengths.as_ref().map_or(shape.sequence, |lengths| lengths[sample] as usize);
                let head = Head { shape: &shape, qkv: &qkv, mask, sample, length, head };
                head.forward(&mut out, &mut logsumexp);
                head.backward(&dout, &mut gradient);
            }
        }
        assert_close("attention", &results[0], &out);
        assert_close("logsumexp", &results[1], &logsumexp);
        // Each part on its own: the gradients of values are larger and would hide the others.
        let (queries, keys) = (shape.query_width(), shape.kv_heads * shape.head_size);
        for (what, columns) in [
            ("the queries' gradient", 0..queries),
            ("the keys' gradient", queries..queries + keys),
            ("the values' gradient", queries + keys..shape.qkv_width()),
        ] {
            let width = shape.qkv_width();
            let part: Vec<f32> =
                results[2].chunks_exact(width).flat_map(|row| row[columns.clone()].to_vec()).collect();
            let expected: Vec<Number> =
                gradient.chunks_exact(width).flat_map(|row| row[columns.clone()].to_vec()).collect();
            assert_close(what, &part, &expected);
        }
    }

    /// Scores far outside the range of f32's exponential: only their differences matter.
    #[test]
    fn attention_bears_large_scores(size in 50f32..2000.0, sequence in 1usize..80, seed: u64) {
        let device = device(1);
        let shape =
            AttentionShape { samples: 1, sequence, heads: 1, kv_heads: 1, head_size: 4, scale: 1.0, causal: true };
        let mut qkv = normal(seed, "qkv", shape.rows() * shape.qkv_width());
        // One common part in queries and keys adds `±size` to every score.
        let sign = if seed.is_multiple_of(2) { 1.0 } else { -1.0 };
        for row in qkv.chunks_exact_mut(shape.qkv_width()) {
            (row[0], row[4]) = (size.sqrt(), sign * size.sqrt());
        }
        let mut out = unwritten(&device, shape.rows() * shape.query_width());
        let mut logsumexp = unwritten(&device, shape.rows());
        device.attention(shape, None, None, &tensor(&device, &qkv), &mut out, &mut logsumexp).unwrap();
        let qkv = numbers(&qkv);
        let head = Head { shape: &shape, qkv: &qkv, mask: None, sample: 0, length: sequence, head: 0 };
        let mut expected = vec![Number::default(); out.len()];
        let mut sums = vec![Number::default(); logsumexp.len()];
        head.forward(&mut expected, &mut sums);
        assert_close("attention", out.floats(), &expected);
        assert_close("logsumexp", logsumexp.floats(), &sums);
    }

    /// The mask belongs to the sample, not to the call, the head's neighbours or the threads.
    #[test]
    fn attention_dropout_does_not_notice_how_samples_are_cut(
        rate in prop::sample::select(vec![0.1f32, 0.5, 0.8]),
        heads in 1usize..=3,
        sequence in prop::sample::select(vec![17usize, 63, 65]),
        first_sample in 0u64..1000,
        threads in 1usize..=3,
        causal: bool,
        seed: u64,
    ) {
        let whole =
            AttentionShape { samples: 4, sequence, heads, kv_heads: 1, head_size: 1, scale: 1.0, causal };
        let half = AttentionShape { samples: 2, ..whole };
        let (one, other) = (device(threads), device(1));
        let all = mask(&one, whole, site(seed, rate, first_sample));
        let mut parts = mask(&other, half, site(seed, rate, first_sample));
        parts.extend(mask(&other, half, site(seed, rate, first_sample + 2)));
        let kept = |mask: &[f32]| -> Vec<bool> { mask.iter().map(|factor| *factor != 0.0).collect() };
        prop_assert_eq!(kept(&all), kept(&parts));
        let seen = |row: &[f32], query: usize| row[..whole.keys_seen(query)].to_vec();
        let rows: Vec<Vec<f32>> =
            all.chunks_exact(sequence).enumerate().map(|(row, mask)| seen(mask, row % sequence)).collect();
        assert_fair(&rows, &[1, sequence, heads * sequence], rate);
    }

    #[test]
    fn attention_dropout_at_rate_zero_drops_nothing(shape in attention_shape(&[1, 8, 17]), seed: u64) {
        let device = device(2);
        let qkv = tensor(&device, &normal(seed, "qkv", shape.rows() * shape.qkv_width()));
        let run = |dropout: Option<DropoutSite>| {
            let mut out = unwritten(&device, shape.rows() * shape.query_width());
            let mut logsumexp = unwritten(&device, shape.rows() * shape.heads);
            device.attention(shape, dropout, None, &qkv, &mut out, &mut logsumexp).unwrap();
            out.floats().to_vec()
        };
        prop_assert!(same_bits(&run(None), &run(Some(site(seed, 0.0, 0)))));
    }
}
