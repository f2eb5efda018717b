//! Numbers on their way to another device: rounded to its elements by all threads, since one alone is slower than the link.

use rayon::prelude::*;

use super::CpuDevice;
use crate::half::{bf16_bits, f16_bits};
use crate::tensor::Element;

/// Elements of a thread's piece: a few pages of memory.
const PIECE: usize = 1 << 15;

impl CpuDevice {
    /// Copies bytes, by all threads.
    ///
    /// # Panics
    /// If there are not as many.
    pub fn copy(&self, from: &[u8], out: &mut [u8]) {
        assert_eq!(from.len(), out.len());
        if out.len() <= 4 * PIECE || self.has_one_thread() {
            return out.copy_from_slice(from);
        }
        self.pool.install(|| {
            let all = out.par_chunks_mut(4 * PIECE).zip(from.par_chunks(4 * PIECE));
            all.for_each(|(out, from)| out.copy_from_slice(from));
        });
    }

    /// Writes numbers, of which these are the bytes, as elements of some kind, byte after byte.
    ///
    /// # Panics
    /// If there is not just room for them.
    pub fn round(&self, numbers: &[u8], element: Element, out: &mut [u8]) {
        let size = element.bytes();
        assert_eq!(numbers.len() / 4 * size, out.len());
        let pieces = |out: &mut [u8], numbers: &[u8]| {
            self.arch.dispatch(
                #[inline(always)]
                || encode(numbers, element, out),
            );
        };
        if out.len() <= size * PIECE || self.has_one_thread() {
            return pieces(out, numbers);
        }
        self.pool.install(|| {
            let all = out.par_chunks_mut(size * PIECE).zip(numbers.par_chunks(4 * PIECE));
            all.for_each(|(out, numbers)| pieces(out, numbers));
        });
    }
}

/// Writes numbers as elements of some kind: a loop for each, since one that asked for the kind within would stay scalar.
#[inline(always)]
pub(super) fn encode(numbers: &[u8], element: Element, out: &mut [u8]) {
    match element {
        Element::F32 => out.copy_from_slice(numbers),
        Element::Bf16 => encode_each(numbers, out, bf16_bits),
        Element::F16 => encode_each(numbers, out, f16_bits),
    }
}

#[inline(always)]
fn encode_each(numbers: &[u8], out: &mut [u8], encode: impl Fn(f32) -> u16) {
    for (number, out) in numbers.chunks_exact(4).zip(out.chunks_exact_mut(2)) {
        let value = f32::from_ne_bytes([number[0], number[1], number[2], number[3]]);
        out.copy_from_slice(&encode(value).to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::fill_normal;

    #[test]
    fn bytes_are_copied_however_many() {
        let device = CpuDevice::new("cpu", 3, CpuDevice::workspace_bytes(3)).unwrap();
        for count in [0, 1, 2, 4 * PIECE, 9 * PIECE + 2] {
            let from: Vec<u8> = (0..count).map(|at| (at * 7 + at / 251) as u8).collect();
            let mut out = vec![0; count];
            device.copy(&from, &mut out);
            assert!(out == from, "{count} bytes");
        }
    }

    #[test]
    fn numbers_are_rounded_as_one_by_one_however_many() {
        let device = CpuDevice::new("cpu", 3, CpuDevice::workspace_bytes(3)).unwrap();
        for count in [0, 1, 63, PIECE, 3 * PIECE + 17] {
            let mut numbers = vec![0.0f32; count];
            fill_normal(&mut numbers, 5, 0, 1e4);
            let strange = [f32::NAN, f32::INFINITY, -0.0, f32::MIN_POSITIVE, 65520.0, f32::MAX, 1e-30];
            numbers.iter_mut().zip(strange).for_each(|(number, strange)| *number = strange);
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
            for element in [Element::F32, Element::Bf16, Element::F16] {
                let mut expected = vec![0; count * element.bytes()];
                let mut found = vec![0xff; expected.len()];
                element.write(&numbers, &mut expected);
                device.round(&bytes, element, &mut found);
                assert!(found == expected, "{count} of {element:?}");
            }
        }
    }
}
