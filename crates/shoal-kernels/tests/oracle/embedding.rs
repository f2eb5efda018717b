//! Table look-ups, and gradients that return to the rows they came from.

use proptest::prelude::*;
use shoal_kernels::Device;

use crate::common::{config, device, integers, normal, side, tensor, unwritten, whole};
use crate::number::{Number, numbers};
use crate::{CASES, assert_close, same_bits, twice};

#[derive(Clone, Copy, Debug)]
struct Case {
    samples: usize,
    sequence: usize,
    width: usize,
    /// Few rows, so that tokens repeat; some rows meet no token.
    vocabulary: usize,
    /// Rows of the position table past the sequence.
    spare_positions: usize,
    accumulate: bool,
    threads: usize,
    seed: u64,
}

prop_compose! {
    fn case()(
        (samples, sequence, width) in (1usize..5, side(), side()),
        vocabulary in 1usize..40,
        spare_positions in 0usize..4,
        accumulate: bool,
        threads in 1usize..=3,
        seed: u64,
    ) -> Case {
        Case { samples, sequence, width, vocabulary, spare_positions, accumulate, threads, seed }
    }
}

impl Case {
    fn rows(&self) -> usize {
        self.samples * self.sequence
    }

    fn tokens(&self) -> Vec<i32> {
        whole(self.seed, "tokens", self.rows(), self.vocabulary)
    }

    fn dy(&self) -> Vec<f32> {
        normal(self.seed, "dy", self.rows() * self.width)
    }
}

proptest! {
    #![proptest_config(config(CASES))]

    /// The additions of an element have one order: the bits are known.
    #[test]
    fn embed(case in case(), with_positions: bool, with_types: bool) {
        let Case { sequence, width, seed, .. } = case;
        let table = normal(seed, "table", case.vocabulary * width);
        let positions =
            with_positions.then(|| normal(seed, "positions", (sequence + case.spare_positions) * width));
        let types = with_types.then(|| normal(seed, "types", 2 * width));
        let device = device(case.threads);
        let out = twice(|| {
            let (tokens, table) = (integers(&device, &case.tokens()), tensor(&device, &table));
            let positions = positions.as_ref().map(|positions| tensor(&device, positions));
            let types = types.as_ref().map(|types| tensor(&device, types));
            let mut out = unwritten(&device, case.rows() * width);
            device
                .embed(&tokens, sequence, width, &table, positions.as_ref(), types.as_ref(), &mut out)
                .unwrap();
            vec![out.floats().to_vec()]
        });
        let mut expected = Vec::new();
        for (row, token) in case.tokens().into_iter().enumerate() {
            for col in 0..width {
                let place = positions.as_ref().map(|all| all[row % sequence * width + col]);
                let value = table[token as usize * width + col];
                let placed = place.map_or(value, |place| value + place);
                expected.push(types.as_ref().map_or(placed, |types| placed + types[col]));
            }
        }
        prop_assert!(same_bits(&out[0], &expected));
    }

    /// Each sum belongs to one thread and is made in the tokens' order: the number of threads changes no bit.
    #[test]
    fn embed_gradient(case in case()) {
        let Case { width, vocabulary, accumulate, .. } = case;
        let before = normal(case.seed, "before", vocabulary * width);
        let run = |threads: usize| {
            let device = device(threads);
            let (tokens, dy) = (integers(&device, &case.tokens()), tensor(&device, &case.dy()));
            let mut gradient =
                if accumulate { tensor(&device, &before) } else { unwritten(&device, before.len()) };
            device.embed_gradient(&tokens, width, &dy, &mut gradient, accumulate).unwrap();
            vec![gradient.floats().to_vec()]
        };
        let gradient = twice(|| run(case.threads));
        prop_assert!(same_bits(&gradient[0], &run(1)[0]) && same_bits(&gradient[0], &run(3)[0]));
        let mut expected =
            if accumulate { numbers(&before) } else { vec![Number::default(); before.len()] };
        for (token, dy) in case.tokens().into_iter().zip(case.dy().chunks_exact(width)) {
            for (col, dy) in dy.iter().enumerate() {
                expected[token as usize * width + col] += (*dy).into();
            }
        }
        assert_close("embed_gradient", &gradient[0], &expected);
    }

    /// Positions past the sequence have no gradient, but theirs must not stay unwritten.
    #[test]
    fn position_gradient(case in case()) {
        let Case { sequence, width, accumulate, .. } = case;
        let before = normal(case.seed, "before", (sequence + case.spare_positions) * width);
        let device = device(case.threads);
        let gradient = twice(|| {
            let dy = tensor(&device, &case.dy());
            let mut gradient =
                if accumulate { tensor(&device, &before) } else { unwritten(&device, before.len()) };
            device.position_gradient(sequence, width, &dy, &mut gradient, accumulate).unwrap();
            vec![gradient.floats().to_vec()]
        });
        let mut expected =
            if accumulate { numbers(&before) } else { vec![Number::default(); before.len()] };
        for (row, dy) in case.dy().chunks_exact(width).enumerate() {
            for (col, dy) in dy.iter().enumerate() {
                expected[row % sequence * width + col] += (*dy).into();
            }
        }
        assert_close("position_gradient", &gradient[0], &expected);
    }
}
