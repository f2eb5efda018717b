//! What elements look like on the wire, and the additions of what comes from it.

use crate::error::Result;
use crate::fabric::{Incoming, Outgoing};
use crate::link::Meanwhile;

/// How elements are written to and read from a message.
pub trait Form: Sync {
    type Item: Copy + Send + Sync;
    /// Bytes of one element on the wire.
    const ITEM_BYTES: usize;
    fn write(&self, outgoing: &mut Outgoing, items: &[Self::Item]) -> Result<()>;
    fn read(
        &self,
        incoming: &mut Incoming,
        items: &mut [Self::Item],
        meanwhile: &mut dyn Meanwhile,
    ) -> Result<()>;
    /// The elements as they are written, where they travel as they lie in memory.
    fn view<'a>(&self, items: &'a [Self::Item]) -> Option<&'a [u8]>;
}

pub struct AsBytes;

impl Form for AsBytes {
    type Item = u8;
    const ITEM_BYTES: usize = 1;

    fn write(&self, outgoing: &mut Outgoing, items: &[u8]) -> Result<()> {
        outgoing.write(items)
    }

    fn read(&self, incoming: &mut Incoming, items: &mut [u8], meanwhile: &mut dyn Meanwhile) -> Result<()> {
        incoming.read_meanwhile(items, meanwhile)
    }

    fn view<'a>(&self, items: &'a [u8]) -> Option<&'a [u8]> {
        Some(items)
    }
}

pub struct AsF32;

impl Form for AsF32 {
    type Item = f32;
    const ITEM_BYTES: usize = 4;

    fn write(&self, outgoing: &mut Outgoing, items: &[f32]) -> Result<()> {
        outgoing.write(bytemuck::cast_slice(items))
    }

    fn read(&self, incoming: &mut Incoming, items: &mut [f32], meanwhile: &mut dyn Meanwhile) -> Result<()> {
        incoming.read_meanwhile(bytemuck::cast_slice_mut(items), meanwhile)
    }

    fn view<'a>(&self, items: &'a [f32]) -> Option<&'a [u8]> {
        Some(bytemuck::cast_slice(items))
    }
}

/// f32 that travels as bf16.
pub struct HalvedF32;

impl Form for HalvedF32 {
    type Item = f32;
    const ITEM_BYTES: usize = 2;

    fn write(&self, outgoing: &mut Outgoing, items: &[f32]) -> Result<()> {
        let mut halves = [0u16; HALVES_AT_ONCE];
        for part in items.chunks(HALVES_AT_ONCE) {
            halves.iter_mut().zip(part).for_each(|(half, item)| *half = halved(*item));
            outgoing.write(bytemuck::cast_slice(&halves[..part.len()]))?;
        }
        Ok(())
    }

    fn read(&self, incoming: &mut Incoming, items: &mut [f32], meanwhile: &mut dyn Meanwhile) -> Result<()> {
        let items_bytes = items.len() * Self::ITEM_BYTES;
        let mut rest = items;
        let take = |piece: &[u8]| {
            let (halves, _) = piece.as_chunks();
            let (here, after) = std::mem::take(&mut rest).split_at_mut(halves.len());
            here.iter_mut().zip(halves).for_each(|(item, half)| *item = whole(*half));
            rest = after;
        };
        incoming.read_with_meanwhile(items_bytes, take, meanwhile)
    }

    fn view<'a>(&self, _: &'a [f32]) -> Option<&'a [u8]> {
        None
    }
}

/// Elements converted at once, on the stack.
const HALVES_AT_ONCE: usize = 8192;

/// Adds what comes in f32 to what is there.
pub fn add(incoming: &mut Incoming, items: &mut [f32], meanwhile: &mut dyn Meanwhile) -> Result<()> {
    let items_bytes = size_of_val(items);
    let mut rest = items;
    let add = |piece: &[u8]| {
        let (theirs, _) = piece.as_chunks();
        let (here, after) = std::mem::take(&mut rest).split_at_mut(theirs.len());
        here.iter_mut().zip(theirs).for_each(|(item, their)| *item += f32::from_le_bytes(*their));
        rest = after;
    };
    incoming.read_with_meanwhile(items_bytes, add, meanwhile)
}

/// Adds what comes in bf16 to what is there.
pub fn add_halved(incoming: &mut Incoming, items: &mut [f32]) -> Result<()> {
    let mut rest = items;
    incoming.read_with(rest.len() * HalvedF32::ITEM_BYTES, |piece| {
        let (theirs, _) = piece.as_chunks();
        let (here, after) = std::mem::take(&mut rest).split_at_mut(theirs.len());
        here.iter_mut().zip(theirs).for_each(|(item, their)| *item += whole(*their));
        rest = after;
    })
}

/// Gives numbers the value that bf16 keeps of them.
pub fn round(items: &mut [f32]) {
    items.iter_mut().for_each(|item| *item = whole(halved(*item).to_le_bytes()));
}

/// The nearest bf16, the even one of two. What is no number stays none.
fn halved(item: f32) -> u16 {
    let bits = item.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // Rounding could carry what is no number into an infinity, or around to zero.
    (if item.is_nan() { bits >> 16 | 0x40 } else { rounded }) as u16
}

fn whole(half: [u8; 2]) -> f32 {
    f32::from_bits((u16::from_le_bytes(half) as u32) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_is_the_nearest_and_the_even_of_two() {
        let kept = |item: f32| whole(halved(item).to_le_bytes());
        assert_eq!(kept(1.0), 1.0);
        assert_eq!(kept(1.0 + 1.0 / 256.0), 1.0, "halfway goes to the even one, down");
        assert_eq!(kept(1.0 + 3.0 / 256.0), 1.0 + 4.0 / 256.0, "halfway goes to the even one, up");
        assert_eq!(kept(1.0 + 1.1 / 256.0), 1.0 + 2.0 / 256.0);
        assert_eq!(kept(f32::MAX), f32::INFINITY);
        assert_eq!(kept(-f32::INFINITY), -f32::INFINITY);
        assert!(kept(f32::NAN).is_nan() && kept(f32::from_bits(0x7f80_0001)).is_nan());
        assert!(kept(f32::from_bits(0xffff_ffff)).is_nan());
        assert_eq!(kept(-0.0).to_bits(), (-0.0f32).to_bits());
    }
}
