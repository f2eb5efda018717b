//! Rotary positions: a turn of each pair by its angle, undone by the inverse.

use proptest::prelude::*;
use shoal_kernels::Device;

use crate::common::{attention_shape, config, device, normal, rotary_table, tensor};
use crate::number::{Number, numbers};
use crate::{CASES, assert_close, same_bits, twice};

proptest! {
    #![proptest_config(config(CASES))]

    #[test]
    fn rotary(shape in attention_shape(&[2, 6, 16, 34, 64]), spare_positions in 0usize..3, threads in 1usize..=3, seed: u64) {
        let (head, width) = (shape.head_size, shape.qkv_width());
        let (half, turned) = (head / 2, (shape.heads + shape.kv_heads) * head);
        let qkv = normal(seed, "qkv", shape.rows() * width);
        // The table is made for the longest sequence; shorter ones use its start.
        let angles = rotary_table(&shape, shape.sequence + spare_positions);
        let device = device(threads);
        let results = twice(|| {
            let (angles, mut qkv) = (tensor(&device, &angles), tensor(&device, &qkv));
            device.rotary(shape, &angles, false, &mut qkv).unwrap();
            let forward = qkv.floats().to_vec();
            device.rotary(shape, &angles, true, &mut qkv).unwrap();
            vec![forward, qkv.floats().to_vec()]
        });
        let input = numbers(&qkv);
        let mut expected = input.clone();
        for row in 0..shape.rows() {
            let angles = numbers(&angles[row % shape.sequence * head..][..head]);
            for start in (0..turned).step_by(head) {
                for pair in 0..half {
                    let (low, high) = (row * width + start + pair, row * width + start + pair + half);
                    let (cosine, sine) = (angles[pair], angles[pair + half]);
                    expected[low] = input[low] * cosine - input[high] * sine;
                    expected[high] = input[low] * sine + input[high] * cosine;
                }
            }
        }
        assert_close("rotary", &results[0], &expected);
        assert_close("rotary and back", &results[1], &input);
        let values = |all: &[f32]| -> Vec<f32> {
            all.chunks_exact(width).flat_map(|row| row[turned..].to_vec()).collect()
        };
        prop_assert!(same_bits(&values(&results[0]), &values(&qkv)), "the values were touched");
        let bare = |all: &[Number]| all.iter().map(|number| number.value.powi(2)).sum::<f64>();
        prop_assert!((bare(&expected) / bare(&input) - 1.0).abs() < 1e-6, "a turn keeps lengths");
    }
}
