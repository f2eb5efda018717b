//! The ring: every member sends to the next and receives from the one before, all in one message each way. For a sum,
//! slices go around gathering shares until they reach their owners; for a gathering, they go around until everyone has
//! them; an all-reduce is the one followed by the other without a pause.
//!
//! What a member sends is the slice it begins with and then what it received, in the same order, all but the last. So a
//! chunk is handed from the thread that receives to the thread that sends, and, where it comes around a second time,
//! back: the chunk itself moves between the two, and neither touches what the other has.

use std::sync::mpsc;
use std::thread;

use super::form::Form;
use super::{Group, Part};
use crate::error::Result;
use crate::fabric::Incoming;

/// What is passed on at once. Small enough to be in the cache when it is sent on, large enough to be worth a call.
const CHUNK_BYTES_MAX: usize = 512 << 10;
/// A slice is cut into at least so many chunks where they would not become too small, so that work overlaps.
const CHUNKS_A_SLICE: usize = 4;
const CHUNK_BYTES_MIN: usize = 128 << 10;

/// Adds what comes to what is there.
type Add<T> = fn(&mut Incoming, &mut [T]) -> Result<()>;

/// Which turns of the ring are made.
pub struct Way<T> {
    pub reduce: Option<Add<T>>,
    pub gather: bool,
}

pub fn run<F: Form>(group: &Group, form: &F, buffer: &mut [F::Item], way: Way<F::Item>) -> Result<()> {
    let turns = group.size() - 1;
    if turns == 0 {
        return Ok(());
    }
    // Places of the slices received, with what is done to them.
    let reduced = (2..=turns + 1).map(|steps| (group.before(steps), way.reduce));
    let gathered = (1..=turns).map(|steps| (group.before(steps), None));
    let received: Vec<(usize, Option<Add<F::Item>>)> = match (way.reduce, way.gather) {
        (Some(_), true) => reduced.chain(gathered).collect(),
        (Some(_), false) => reduced.collect(),
        (None, _) => gathered.collect(),
    };
    let first = if way.reduce.is_some() { group.before(1) } else { group.place };
    let bytes_of = |place: usize| group.slices[place].len() * F::ITEM_BYTES;
    let last = received.last().map_or(0, |(place, _)| bytes_of(*place));
    let bytes_in: usize = received.iter().map(|(place, _)| bytes_of(*place)).sum();
    let bytes_out = bytes_of(first) + bytes_in - last;

    let tag = group.tag(Part::Ring);
    let incoming = match bytes_in {
        0 => None,
        bytes => Some(group.fabric.incoming(group.members[group.before(1)], tag, bytes)?),
    };
    let outgoing = match bytes_out {
        0 => None,
        bytes => Some(group.fabric.outgoing(group.members[group.after(1)], tag, bytes)?),
    };
    let mut slices = cut(group, buffer, F::ITEM_BYTES);
    let chunk_counts: Vec<usize> = slices.iter().map(|slice| slice.as_ref().map_or(0, Vec::len)).collect();
    let (to_send, chunks_to_send) = mpsc::channel();
    let (sent, chunks_sent) = mpsc::channel();
    for chunk in slices[first].take().into_iter().flatten() {
        to_send.send(chunk).expect("the other end is here");
    }
    let receiving = || {
        let Some(mut incoming) = incoming else { return Ok(()) };
        let last = received.len() - 1;
        let to_send = to_send;
        for (number, (place, add)) in received.into_iter().enumerate() {
            let mut here = slices[place].take().map(Vec::into_iter);
            for _ in 0..chunk_counts[place] {
                let chunk = match &mut here {
                    Some(chunks) => chunks.next(),
                    // It was sent before it comes around again. If it does not come back, sending has failed.
                    None => chunks_sent.recv().ok(),
                };
                let Some(chunk) = chunk else { return group.failure() };
                match add {
                    Some(add) => add(&mut incoming, chunk)?,
                    None => form.read(&mut incoming, chunk)?,
                }
                // Sending may have failed and be gone; its own error says why.
                if number < last && to_send.send(chunk).is_err() {
                    return group.failure();
                }
            }
        }
        Ok(())
    };
    let sending = move || {
        let Some(mut outgoing) = outgoing else { return Ok(()) };
        for chunk in chunks_to_send {
            form.write(&mut outgoing, chunk)?;
            // Nobody takes it back in the last turn.
            let _ = sent.send(chunk);
        }
        Ok(())
    };
    thread::scope(|scope| {
        let sending = scope.spawn(sending);
        let received = receiving();
        received.and(sending.join().expect("sending does not panic"))
    })
}

/// The chunks of each slice.
fn cut<'a, T>(group: &Group, buffer: &'a mut [T], item_bytes: usize) -> Vec<Option<Vec<&'a mut [T]>>> {
    let mut rest = buffer;
    let mut begin = 0;
    let mut slices = Vec::with_capacity(group.size());
    for slice in group.slices {
        let (here, after) = rest.split_at_mut(slice.end - begin);
        let bytes = (slice.len() * item_bytes / CHUNKS_A_SLICE).clamp(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX);
        slices.push(Some(here[slice.start - begin..].chunks_mut(bytes / item_bytes).collect()));
        begin = slice.end;
        rest = after;
    }
    slices
}
