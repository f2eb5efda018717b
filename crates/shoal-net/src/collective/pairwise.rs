//! Sums in bf16 on the wire: in step s every member sends to the one s places on and receives from the one s places
//! back, so that no link has two at once. The bytes are those of a ring; what is rounded is each share, once.

use std::thread;

use super::form::{self, Form, HalvedF32};
use super::{Group, Part};
use crate::error::Result;

pub fn reduce_scatter(group: &Group, buffer: &mut [f32]) -> Result<()> {
    let tag = group.tag(Part::Pairwise);
    let own = group.slices[group.place].clone();
    let own_bytes = own.len() * HalvedF32::ITEM_BYTES;
    let (before, rest) = buffer.split_at_mut(own.start);
    let (mine, after) = rest.split_at_mut(own.len());
    let (before, after) = (&*before, &*after);
    let sending = || {
        for place in (1..group.size()).map(|step| group.after(step)) {
            let slice = group.slices[place].clone();
            if slice.is_empty() {
                continue;
            }
            let items = match place < group.place {
                true => &before[slice],
                false => &after[slice.start - own.end..slice.end - own.end],
            };
            let bytes = items.len() * HalvedF32::ITEM_BYTES;
            let mut outgoing = group.fabric.outgoing(group.members[place], tag, bytes)?;
            HalvedF32.write(&mut outgoing, items)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let sending = scope.spawn(sending);
        // Each is asked for when it is read: what comes and waits would be in the way of others.
        let mut steps = if own_bytes > 0 { 1..group.size() } else { 0..0 };
        let received = steps.try_for_each(|step| {
            let from = group.members[group.before(step)];
            form::add_halved(&mut group.fabric.incoming(from, tag, own_bytes)?, mine)
        });
        received.and(sending.join().expect("sending does not panic"))
    })
}
