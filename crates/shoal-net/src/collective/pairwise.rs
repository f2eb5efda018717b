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
    // Everything is asked for before anything is sent, so that nobody waits for somebody who waits for it.
    let mut incoming = Vec::with_capacity(group.size());
    if own_bytes > 0 {
        for step in 1..group.size() {
            incoming.push(group.fabric.incoming(group.members[group.before(step)], tag, own_bytes)?);
        }
    }
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
        let received = incoming.iter_mut().try_for_each(|incoming| form::add_halved(incoming, mine));
        // What is left unread is given up before the wait for the other half, which might need to hear of it.
        drop(incoming);
        received.and(sending.join().expect("sending does not panic"))
    })
}
