//! Between two steps: a plan's devices tell each other a few numbers, and what each holds is read.

use std::borrow::Cow;

use shoal_kernels::CpuDevice;
use shoal_kernels::random::fold;
use shoal_net::{Tag, collective};

use super::Executor;
use crate::error::Result;
use crate::saving::Share;

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

    /// What is here of a tensor's slice: its parameters (0) or one of the optimizer's states (from 1). After a step that may
    /// have left updates under way, [`Executor::catch_up`] comes first.
    pub fn held(&self, share: &Share, part: usize) -> Result<Cow<'_, [f32]>> {
        let (found, within) = self.state.tensors[share.tensor].find(share.holder.tier(), share.slice);
        Ok(match found.get(&self.tiers, part)? {
            Cow::Borrowed(values) => Cow::Borrowed(&values[within]),
            Cow::Owned(values) if within.len() == values.len() => Cow::Owned(values),
            Cow::Owned(values) => Cow::Owned(values[within].to_vec()),
        })
    }

    /// What keeps host memory.
    pub fn host(&self) -> &CpuDevice {
        &self.tiers.host
    }
}
