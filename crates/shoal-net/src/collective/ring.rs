//! The ring: every member sends to the next and receives from the one before, all in one message each way. For a sum,
//! slices go around gathering shares until they reach their owners; for a gathering, they go around until everyone has
//! them; an all-reduce is the one followed by the other without a pause.
//!
//! What a member sends is the slice it begins with and then what it received, in the same order, all but the last. So a
//! chunk is handed from the half that receives to the half that sends, and, where it comes around a second time, back:
//! the chunk itself moves between the two, and neither touches what the other has.

use std::collections::VecDeque;
use std::sync::mpsc;
use std::thread;

use super::form::Form;
use super::{Group, Part, TREE_BYTES_MAX};
use crate::error::{Error, Result};
use crate::fabric::{Incoming, Outgoing};
use crate::link::Meanwhile;

/// What is passed on at once. Small enough to be in the cache when it is sent on, large enough to be worth its calls: each
/// chunk is a frame, and a frame costs ten microseconds.
const CHUNK_BYTES: usize = 512 << 10;
/// Where a slice has to be passed on while it comes, it is cut into at least so many chunks that are not too small.
const CHUNKS_A_SLICE: usize = 4;
const CHUNK_BYTES_MIN: usize = 128 << 10;
/// Slices up to so many times the mean are about even.
const EVEN_RATIO_MAX: usize = 2;

/// Adds what comes to what is there.
type Add<T> = fn(&mut Incoming, &mut [T], &mut dyn Meanwhile) -> Result<()>;

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
    thread::scope(|scope| {
        let mut sending = Sending {
            form,
            outgoing,
            queue: VecDeque::new(),
            from: 0,
            sent: VecDeque::new(),
            apart: None,
            failure: None,
            scope,
        };
        let half = &mut sending;
        let receiving = move || {
            let sending = half;
            for chunk in slices[first].take().into_iter().flatten() {
                sending.pass(chunk);
            }
            let Some(mut incoming) = incoming else { return Ok(()) };
            let last = received.len() - 1;
            for (number, (place, add)) in received.into_iter().enumerate() {
                let mut here = slices[place].take().map(Vec::into_iter);
                for _ in 0..chunk_counts[place] {
                    let chunk = match &mut here {
                        Some(chunks) => chunks.next(),
                        // It was sent before it comes around again. If it does not come back, sending has failed.
                        None => sending.take_back(),
                    };
                    let Some(chunk) = chunk else {
                        return sending.failure.take().map_or_else(|| group.failure(), Err);
                    };
                    sending.advance();
                    match add {
                        Some(add) => add(&mut incoming, chunk, sending)?,
                        None => form.read(&mut incoming, chunk, sending)?,
                    }
                    if number < last {
                        sending.pass(chunk);
                    }
                }
            }
            Ok(())
        };
        // What was being received is given up, if it failed, before the wait for the other half.
        let received = receiving();
        let sent = match &received {
            Ok(()) => sending.end(),
            Err(_) => sending.give_up(),
        };
        received.and(sent)
    })
}

/// The sending half. It is done in passing, by the thread that receives: a chunk before each that is read, and more while
/// there is nothing to read, so that what is under way stays in the cache. From the moment on that the receiver does not
/// want it yet, or that nothing can be read either, a thread of its own does it.
struct Sending<'scope, 'env, 'a, 'f, F: Form> {
    form: &'f F,
    outgoing: Option<Outgoing<'f>>,
    queue: VecDeque<&'a mut [F::Item]>,
    /// Bytes of the first in the queue that have been sent.
    from: usize,
    /// Chunks that may come around again, in the order they were sent in.
    sent: VecDeque<&'a mut [F::Item]>,
    apart: Option<Apart<'scope, 'a, F::Item>>,
    /// Why nothing more is sent.
    failure: Option<Error>,
    scope: &'scope thread::Scope<'scope, 'env>,
}

/// Sending in a thread of its own.
struct Apart<'scope, 'a, T> {
    queue: mpsc::Sender<&'a mut [T]>,
    sent: mpsc::Receiver<&'a mut [T]>,
    thread: thread::ScopedJoinHandle<'scope, Result<()>>,
}

impl<'scope, 'a: 'scope, 'f: 'scope, F: Form> Sending<'scope, '_, 'a, 'f, F> {
    fn pass(&mut self, chunk: &'a mut [F::Item]) {
        match &self.apart {
            // The thread may have failed and be gone; its own error says why.
            Some(apart) => drop(apart.queue.send(chunk)),
            None => self.queue.push_back(chunk),
        }
    }

    /// Sends what goes of the next chunk without waiting; whether it was any of it.
    fn send_some(&mut self) -> bool {
        let (Some(outgoing), Some(chunk)) = (&mut self.outgoing, self.queue.front()) else { return false };
        let bytes = self.form.view(chunk);
        let written = match bytes {
            Some(bytes) => outgoing.write_some(&bytes[self.from..]),
            None => Ok(0),
        };
        match written {
            Ok(count) => {
                self.from += count;
                let whole = bytes.is_some_and(|bytes| self.from == bytes.len()) && !outgoing.holds_back();
                if whole {
                    self.from = 0;
                    self.sent.extend(self.queue.pop_front());
                } else if count == 0 && !outgoing.holds_back() {
                    // It has waited as long as it may for the receiver, or for others on the stream.
                    self.part_ways();
                }
                whole || count > 0
            }
            Err(failure) => {
                self.failure = Some(failure);
                self.queue.clear();
                self.outgoing = None;
                false
            }
        }
    }

    fn part_ways(&mut self) {
        let Some(mut outgoing) = self.outgoing.take() else { return };
        let (queue, chunks) = mpsc::channel::<&'a mut [F::Item]>();
        let (done, sent) = mpsc::channel();
        for chunk in self.queue.drain(..) {
            queue.send(chunk).expect("the other end is here");
        }
        let (form, mut from) = (self.form, std::mem::take(&mut self.from));
        let thread = self.scope.spawn(move || {
            for chunk in chunks {
                send(form, &mut outgoing, chunk, std::mem::take(&mut from))?;
                // Nobody takes it back in the last turn.
                let _ = done.send(chunk);
            }
            Ok(())
        });
        self.apart = Some(Apart { queue, sent, thread });
    }

    fn take_back(&mut self) -> Option<&'a mut [F::Item]> {
        while self.sent.is_empty() && self.advance() {}
        if self.sent.is_empty() {
            self.part();
        }
        match (self.sent.pop_front(), &self.apart) {
            (Some(chunk), _) => Some(chunk),
            (None, Some(apart)) => apart.sent.recv().ok(),
            (None, None) => None,
        }
    }

    /// Waits for everything to be sent.
    fn end(mut self) -> Result<()> {
        if let Some(outgoing) = &mut self.outgoing {
            for chunk in self.queue.drain(..) {
                send(self.form, outgoing, chunk, std::mem::take(&mut self.from))?;
            }
        }
        self.give_up()
    }

    /// Waits for the thread that sends, if there is one.
    fn give_up(self) -> Result<()> {
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        match self.apart {
            Some(Apart { queue, thread, .. }) => {
                drop(queue);
                thread.join().expect("sending does not panic")
            }
            None => Ok(()),
        }
    }
}

impl<'scope, 'a: 'scope, 'f: 'scope, F: Form> Meanwhile for Sending<'scope, '_, 'a, 'f, F> {
    fn advance(&mut self) -> bool {
        self.send_some()
    }

    fn part(&mut self) {
        if !self.queue.is_empty() {
            self.part_ways();
        }
    }
}

/// Sends what is left of a chunk, waiting as long as it takes.
fn send<F: Form>(form: &F, outgoing: &mut Outgoing, chunk: &[F::Item], from: usize) -> Result<()> {
    outgoing.flush()?;
    match form.view(chunk) {
        Some(bytes) => outgoing.write(&bytes[from..]),
        None => form.write(outgoing, chunk),
    }
}

/// The least that is passed on at once. Where slices are about even every link is busy all the time, whatever they are cut
/// into. A slice that is larger than the others keeps all links busy only in chunks, and where links are slow chunks are what
/// hides their latency.
fn chunk_bytes_min(group: &Group) -> usize {
    let lengths = || group.slices.iter().map(ExactSizeIterator::len);
    let even = lengths().max().unwrap_or(0) * group.size() <= EVEN_RATIO_MAX * lengths().sum::<usize>();
    let slow = group.fabric.tree_bytes_max() < TREE_BYTES_MAX;
    if even && !slow { CHUNK_BYTES } else { CHUNK_BYTES_MIN }
}

/// The chunks of each slice.
fn cut<'a, T>(group: &Group, buffer: &'a mut [T], item_bytes: usize) -> Vec<Option<Vec<&'a mut [T]>>> {
    let bytes_min = chunk_bytes_min(group);
    let mut rest = buffer;
    let mut begin = 0;
    let mut slices = Vec::with_capacity(group.size());
    for slice in group.slices {
        let (here, after) = rest.split_at_mut(slice.end - begin);
        let bytes = (slice.len() * item_bytes / CHUNKS_A_SLICE).clamp(bytes_min, CHUNK_BYTES);
        slices.push(Some(here[slice.start - begin..].chunks_mut(bytes / item_bytes).collect()));
        begin = slice.end;
        rest = after;
    }
    slices
}
