//! Elements of two bytes on the host: how numbers go into them and come out.

use crate::tensor::Element;

impl Element {
    /// The nearest number that elements of this kind can hold; of two equally near ones the even.
    pub fn round(self, value: f32) -> f32 {
        match self {
            Element::F32 => value,
            half => half.decode(half.encode(value)),
        }
    }

    /// Writes numbers as elements of this kind, byte after byte.
    ///
    /// # Panics
    /// If there is not just room for them.
    pub fn write(self, values: &[f32], out: &mut [u8]) {
        assert_eq!(out.len(), values.len() * self.bytes());
        match self {
            Element::F32 => {
                for (value, out) in values.iter().zip(out.chunks_exact_mut(4)) {
                    out.copy_from_slice(&value.to_ne_bytes());
                }
            }
            half => {
                for (value, out) in values.iter().zip(out.chunks_exact_mut(2)) {
                    out.copy_from_slice(&half.encode(*value).to_ne_bytes());
                }
            }
        }
    }

    /// The bits of a two-byte element.
    pub(crate) fn encode(self, value: f32) -> u16 {
        match self {
            Element::F32 => panic!("an f32 has four bytes"),
            Element::Bf16 => bf16_bits(value),
            Element::F16 => f16_bits(value),
        }
    }

    pub(crate) fn decode(self, bits: u16) -> f32 {
        match self {
            Element::F32 => panic!("an f32 has four bytes"),
            Element::Bf16 => f32::from_bits(u32::from(bits) << 16),
            Element::F16 => f16_value(bits),
        }
    }
}

#[inline(always)]
pub(crate) fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        // The bit set keeps it a NaN, whatever the lower half held.
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[inline(always)]
pub(crate) fn f16_bits(value: f32) -> u16 {
    let sign = (value.to_bits() >> 16) as u16 & 0x8000;
    let size = value.to_bits() & 0x7fff_ffff;
    let rounded = if value.is_nan() {
        0x7e00
    } else if value.abs() >= 65520.0 {
        0x7c00
    } else if value.abs() >= 6.103_515_6e-5 {
        // From 2^-14 on the exponent is moved by 112, and the lower 13 bits are rounded away.
        ((size + 0xfff + (size >> 13 & 1) - (112 << 23)) >> 13) as u16
    } else {
        // Below it, numbers are multiples of 2^-24, which is the last place of a half.
        ((value.abs() + 0.5).to_bits() - 0.5f32.to_bits()) as u16
    };
    sign | rounded
}

fn f16_value(bits: u16) -> f32 {
    let (exponent, fraction) = (u32::from(bits >> 10 & 0x1f), u32::from(bits & 0x3ff));
    let size = match exponent {
        0 => fraction as f32 / 16_777_216.0,
        31 => f32::from_bits(0x7f80_0000 | fraction << 13),
        _ => f32::from_bits((exponent + 112) << 23 | fraction << 13),
    };
    if bits >> 15 == 1 { -size } else { size }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALVES: [Element; 2] = [Element::Bf16, Element::F16];

    #[test]
    fn what_an_element_holds_stays() {
        for element in HALVES {
            for bits in 0..=u16::MAX {
                let value = element.decode(bits);
                if value.is_nan() {
                    assert!(element.round(value).is_nan(), "{element:?} {bits:04x}");
                } else {
                    assert_eq!(element.encode(value), bits, "{element:?} {value}");
                }
            }
        }
    }

    /// Between two neighbours: the middle goes to the even one, everything else to the nearer.
    #[test]
    fn what_lies_between_is_rounded() {
        for element in HALVES {
            let infinity = element.encode(f32::INFINITY);
            for bits in (0..infinity - 1).chain(0x8000..0x8000 + infinity - 1) {
                let (low, high) = (element.decode(bits), element.decode(bits + 1));
                let middle = ((f64::from(low) + f64::from(high)) / 2.0) as f32;
                let even = if bits % 2 == 0 { bits } else { bits + 1 };
                assert_eq!(element.encode(middle), even, "{element:?} {middle}");
                let towards =
                    |place: f32, steps: i32| f32::from_bits((place.to_bits() as i32 + steps) as u32);
                assert_eq!(element.encode(towards(middle, -1)), bits, "{element:?} below {middle}");
                assert_eq!(element.encode(towards(middle, 1)), bits + 1, "{element:?} above {middle}");
            }
        }
        assert_eq!(Element::F16.round(65519.0), 65504.0);
        assert_eq!(Element::F16.round(65520.0), f32::INFINITY);
        assert_eq!(Element::Bf16.round(f32::MAX), f32::INFINITY);
        assert_eq!(Element::Bf16.round(1.0 + 1.0 / 256.0), 1.0);
        assert_eq!(Element::F32.round(0.1), 0.1);
    }
}
