//! Rotary positions: element i of a head and element i + half of it form a pair, turned together.

use rayon::prelude::*;

use super::CpuDevice;
use crate::device::AttentionShape;
use crate::tensor::Tensor;

impl CpuDevice {
    pub(super) fn rotate(&self, shape: AttentionShape, table: &Tensor, inverse: bool, qkv: &mut Tensor) {
        let (head, half) = (shape.head_size, shape.head_size / 2);
        let width = shape.qkv_width();
        assert_eq!(qkv.len(), shape.rows() * width);
        assert_eq!(2 * half, head, "a head of pairs");
        assert!(table.len() >= shape.sequence * head);
        let table = table.floats();
        let turned = (shape.heads + shape.kv_heads) * head;
        let chunk = shape.rows().div_ceil(self.threads()).max(1);
        qkv.floats_mut().par_chunks_mut(chunk * width).enumerate().for_each(|(index, rows)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for (row, values) in rows.chunks_exact_mut(width).enumerate() {
                        let position = (index * chunk + row) % shape.sequence;
                        let angles = &table[position * head..(position + 1) * head];
                        let (cosines, sines) = angles.split_at(half);
                        let sign = if inverse { -1.0 } else { 1.0 };
                        for values in values[..turned].chunks_exact_mut(head) {
                            let (low, high) = values.split_at_mut(half);
                            let pairs = low.iter_mut().zip(high).zip(cosines.iter().zip(sines));
                            for ((low, high), (cosine, sine)) in pairs {
                                let (a, b, sine) = (*low, *high, sign * sine);
                                *low = a * cosine - b * sine;
                                *high = b * cosine + a * sine;
                            }
                        }
                    }
                },
            );
        });
    }
}
