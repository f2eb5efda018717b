//! What a plan's devices do together between two steps: tell each other a few numbers, and bring the whole state to one of
//! them.

use std::borrow::Cow;

use shoal_kernels::random::fold;
use shoal_net::{Tag, collective};
use shoal_plan::{Holder, Plan, Slice, TensorRow};

use super::Executor;
use crate::error::{EngineError, Result};

/// Parameters and the optimizer's states of a tensor, whole.
pub type Whole<'a> = Vec<Cow<'a, [f32]>>;

impl Executor {
    /// What the next thing that is done together is known by.
    fn next_tag(&mut self) -> Tag {
        self.runs += 1;
        Tag(u128::from(fold(3, self.runs)) << 64 | u128::from(fold(4, self.runs)))
    }

    /// Adds up a few numbers over a plan's devices.
    pub fn sum(&mut self, members: &[usize], numbers: &mut [f64]) -> Result {
        let tag = self.next_tag();
        let Some(fabric) = self.fabric.as_ref().filter(|_| members.len() > 1) else { return Ok(()) };
        Ok(collective::sum_f64(fabric, members, numbers, tag)?)
    }

    /// Brings every tensor's parameters and states to one of the devices; the others get nothing.
    pub fn collect(
        &mut self,
        plan: &Plan,
        members: &[usize],
        to: usize,
        states: usize,
    ) -> Result<Option<Vec<Whole<'_>>>> {
        let tag = self.next_tag();
        let own = self.fabric.as_ref().filter(|_| members.len() > 1).map_or(to, |fabric| fabric.rank());
        let mut all = Vec::new();
        for (tensor, row) in plan.tensors.iter().enumerate() {
            let held = &self.state.tensors[tensor];
            let mut whole: Option<Whole> = match held.whole().filter(|_| own == to) {
                // What is here already needs no copy where the host can read it.
                Some(whole) => {
                    Some((0..=states).map(|part| whole.get(&self.tiers, part)).collect::<Result<_>>()?)
                }
                None => (own == to).then(|| vec![Cow::Owned(vec![0.0; row.elements]); states + 1]),
            };
            for (slice, holder) in sent(row, to) {
                for part in 0..=states {
                    let words = [tensor, slice.start, part];
                    let key = words.iter().fold(tag.0 as u64, |key, word| fold(key, *word as u64));
                    let tag = Tag(tag.0 ^ u128::from(key));
                    let mut room = whole.as_mut().map(|whole| &mut whole[part].to_mut()[slice.range()]);
                    if holder.device() == own {
                        let (found, within) = held.find(holder.tier(), slice);
                        let values = &found.get(&self.tiers, part)?[within];
                        match &mut room {
                            Some(room) => room.copy_from_slice(values),
                            None => self.to_others()?.send(to, tag, bytemuck::cast_slice(values))?,
                        }
                    } else if let Some(room) = room {
                        self.to_others()?.receive(holder.device(), tag, bytemuck::cast_slice_mut(room))?;
                    }
                }
            }
            all.extend(whole);
        }
        Ok((own == to).then_some(all))
    }

    fn to_others(&self) -> Result<&shoal_net::Fabric> {
        let alone = || EngineError::Movement { instruction: "the collection of the state".into() };
        self.fabric.as_deref().ok_or_else(alone)
    }
}

/// A tensor's slices and who brings each to a device; none where that has all of it in its own memory.
fn sent(row: &TensorRow, to: usize) -> Vec<(Slice, Holder)> {
    let there = row.optimizer.iter().filter(|held| held.holder == Holder::Device(to));
    if there.map(|held| held.slice.count()).sum::<usize>() == row.elements {
        return Vec::new();
    }
    let mut slices: Vec<_> = row.optimizer.iter().map(|held| (held.slice, held.holder)).collect();
    slices.sort_by_key(|(slice, holder)| (*slice, holder.device() != to, *holder));
    slices.dedup_by_key(|(slice, _)| *slice);
    slices
}
