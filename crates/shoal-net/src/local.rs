//! Workers inside one process. A message passes from the sender's memory into the receiver's through pieces of a few
//! hundred kilobytes, which stay in the cache: in safe Rust one thread cannot be lent another's memory for a while. The rules are those of the network: small messages go at once as far as the window allows, larger ones wait
//! until they are wanted, and a piece of a shaped link is taken when it is due.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::fabric::Tag;
use crate::fate::Fate;
use crate::link::{EAGER_MESSAGE_BYTES_MAX, EAGER_WINDOW_BYTES, IncomingEnd, Link, Meanwhile, OutgoingEnd};
use crate::pace::{Pacer, Progress, Turn};

/// What passes at once on a link that is not shaped.
const PIECE_BYTES: usize = 128 << 10;
/// Bytes of one message that may be between its two ends on a link that is not shaped.
const BETWEEN_BYTES_MAX: usize = 8 * PIECE_BYTES;

/// What the workers of one process share.
pub struct World {
    pub fate: Arc<Fate>,
    pub names: Vec<String>,
    left: Vec<AtomicBool>,
    /// Ordered pairs, `from * size + to`.
    pairs: Vec<Arc<Pair>>,
}

impl World {
    pub fn new(count: usize) -> Arc<World> {
        let pairs: Vec<Arc<Pair>> = (0..count * count).map(|_| Arc::default()).collect();
        let fate = Arc::new(Fate::default());
        for pair in &pairs {
            let pair = pair.clone();
            fate.on_failure(Box::new(move |_| pair.wake()));
        }
        let names = (0..count).map(|rank| format!("worker {rank}")).collect();
        let left = (0..count).map(|_| AtomicBool::new(false)).collect();
        Arc::new(World { fate, names, left, pairs })
    }

    /// A worker's end in good order: what it sent can still be received.
    pub fn leave(&self, rank: usize) {
        self.left[rank].store(true, Ordering::SeqCst);
        self.pairs.iter().for_each(|pair| pair.wake());
    }
}

/// Everything on its way from one worker to another.
#[derive(Default)]
struct Pair {
    state: Mutex<State>,
    changed: Condvar,
}

impl Pair {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of a pair panics")
    }

    fn wake(&self) {
        // Taking the lock orders this after the check of whoever is about to wait.
        drop(self.lock());
        self.changed.notify_all();
    }
}

#[derive(Default)]
struct State {
    /// Eager messages that nobody has asked for yet, in the order of their beginnings.
    inbox: HashMap<Tag, VecDeque<Early>>,
    /// The full lengths of what is in the inbox.
    inbox_bytes: usize,
    /// Messages that are waited for.
    wanted: HashMap<Tag, Wanted>,
    /// Numbers messages, so that a sender finds its own again.
    begun: u64,
    /// Pieces to be used again.
    spare: Vec<Vec<u8>>,
}

impl State {
    fn early(&mut self, tag: Tag, number: u64) -> Option<&mut Early> {
        self.inbox.get_mut(&tag)?.iter_mut().find(|early| early.number == number)
    }
}

struct Piece {
    bytes: Vec<u8>,
    /// When a shaped link delivers it.
    due: Option<Instant>,
}

/// A message that may have come in part only.
struct Early {
    number: u64,
    length: usize,
    pieces: VecDeque<Piece>,
}

#[derive(Default)]
struct Wanted {
    length: usize,
    /// The message that it gets, once a sender is at it.
    claimed_by: Option<u64>,
    /// The sender's length, where it is another.
    refused: Option<usize>,
    pieces: VecDeque<Piece>,
    bytes: usize,
}

/// One worker's end of the two directions between it and a peer.
pub struct LocalLink {
    pub world: Arc<World>,
    pub rank: usize,
    pub peer: usize,
    pub pacer: Option<Arc<Pacer>>,
    pub message_deadline: Duration,
}

impl LocalLink {
    fn pair(&self, from: usize, to: usize) -> &Pair {
        &self.world.pairs[from * self.world.names.len() + to]
    }

    fn peer_name(&self) -> String {
        self.world.names[self.peer].clone()
    }

    fn length_error(&self, tag: Tag, sent: usize, wanted: usize) -> Error {
        Error::Length { peer: self.peer_name(), tag, sent: sent as u64, wanted: wanted as u64 }
    }

    /// Waits until something changes or `moment` comes, if there is any point in it.
    fn wait<'a>(
        &self,
        pair: &'a Pair,
        state: MutexGuard<'a, State>,
        tag: Tag,
        bound: &Bound,
        moment: Option<Instant>,
    ) -> Result<MutexGuard<'a, State>> {
        let now = Instant::now();
        if moment.is_none() {
            self.still_there(tag)?;
        }
        if now >= bound.until {
            return Err(self.late(tag, bound));
        }
        let left =
            moment.map_or(bound.until, |moment| moment.min(bound.until)).saturating_duration_since(now);
        let (state, _) = pair.changed.wait_timeout(state, left).expect("no holder of a pair panics");
        self.world.fate.check()?;
        Ok(state)
    }

    fn late(&self, tag: Tag, bound: &Bound) -> Error {
        Error::Late { peer: self.peer_name(), tag, what: bound.what, limit: self.message_deadline }
    }

    fn still_there(&self, tag: Tag) -> Result<()> {
        if self.world.left[self.peer].load(Ordering::SeqCst) {
            let what = format!("message {tag}");
            return Err(Error::PeerLeft { rank: self.peer, name: self.peer_name(), what });
        }
        Ok(())
    }

    fn bound(&self, what: &'static str) -> Bound {
        Bound { until: Instant::now() + self.message_deadline, what }
    }
}

/// How long to wait, and what did not happen then.
struct Bound {
    until: Instant,
    what: &'static str,
}

impl Link for LocalLink {
    fn outgoing(&self, tag: Tag, length: usize) -> Result<Box<dyn OutgoingEnd + '_>> {
        self.world.fate.check()?;
        let bound = self.bound("did not take it");
        Ok(Box::new(LocalOutgoing {
            link: self,
            tag,
            length,
            number: None,
            progress: Progress::default(),
            bound,
        }))
    }

    fn incoming(&self, tag: Tag, length: usize) -> Result<Box<dyn IncomingEnd + '_>> {
        self.world.fate.check()?;
        let pair = self.pair(self.peer, self.rank);
        let mut state = pair.lock();
        if state.wanted.contains_key(&tag) {
            return Err(Error::TagInUse { peer: self.peer_name(), tag });
        }
        let mut wanted = Wanted { length, ..Wanted::default() };
        if let Some(queue) = state.inbox.get_mut(&tag) {
            let early = queue.pop_front().expect("an empty queue is removed");
            if queue.is_empty() {
                state.inbox.remove(&tag);
            }
            state.inbox_bytes -= early.length;
            if early.length != length {
                return Err(self.length_error(tag, early.length, length));
            }
            wanted.claimed_by = Some(early.number);
            wanted.bytes = early.pieces.iter().map(|piece| piece.bytes.len()).sum();
            wanted.pieces = early.pieces;
        }
        state.wanted.insert(tag, wanted);
        drop(state);
        pair.changed.notify_all();
        let bound = self.bound("did not send it");
        Ok(Box::new(LocalIncoming { link: self, tag, length, piece: None, used: 0, bound }))
    }
}

struct LocalOutgoing<'a> {
    link: &'a LocalLink,
    tag: Tag,
    length: usize,
    /// The message's number, once it may go.
    number: Option<u64>,
    progress: Progress,
    bound: Bound,
}

impl OutgoingEnd for LocalOutgoing<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let number = match self.number {
            Some(number) => number,
            None => self.begin()?,
        };
        self.number = Some(number);
        let piece_bytes = self.link.pacer.as_ref().map_or(PIECE_BYTES, |pacer| pacer.quantum_bytes());
        self.progress.pause();
        // A message of no bytes is a piece of no bytes.
        let parts = bytes.chunks(piece_bytes).chain(bytes.is_empty().then_some(bytes));
        for part in parts {
            self.hand_over(number, part)?;
        }
        Ok(())
    }

    /// Nothing: what there is room for is not worth a second way.
    fn write_some(&mut self, _: &[u8]) -> Result<usize> {
        Ok(0)
    }

    fn holds_back(&self) -> bool {
        false
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

impl LocalOutgoing<'_> {
    /// Waits until the message may go: when it is wanted, or when it is small and the inbox has room for it.
    fn begin(&mut self) -> Result<u64> {
        let pair = self.link.pair(self.link.rank, self.link.peer);
        let mut state = pair.lock();
        loop {
            self.link.world.fate.check()?;
            let number = state.begun + 1;
            if let Some(wanted) = state.wanted.get_mut(&self.tag).filter(|wanted| wanted.claimed_by.is_none())
            {
                wanted.claimed_by = Some(number);
                if wanted.length != self.length {
                    wanted.refused = Some(self.length);
                    let error = self.link.length_error(self.tag, self.length, wanted.length);
                    pair.changed.notify_all();
                    return Err(error);
                }
                state.begun = number;
                return Ok(number);
            }
            self.link.still_there(self.tag)?;
            if self.length <= EAGER_MESSAGE_BYTES_MAX && state.inbox_bytes + self.length <= EAGER_WINDOW_BYTES
            {
                let early = Early { number, length: self.length, pieces: VecDeque::new() };
                state.inbox.entry(self.tag).or_default().push_back(early);
                state.inbox_bytes += self.length;
                state.begun = number;
                return Ok(number);
            }
            state = self.link.wait(pair, state, self.tag, &self.bound, None)?;
        }
    }

    /// When a shaped link takes so many of its next bytes.
    fn turn(&mut self, bytes: usize) -> Result<Option<Turn>> {
        let Some(pacer) = &self.link.pacer else { return Ok(None) };
        let (fate, until) = (&self.link.world.fate, self.bound.until);
        let go_on =
            || if Instant::now() < until { fate.check() } else { Err(self.link.late(self.tag, &self.bound)) };
        let turn = pacer.take(&mut self.progress, bytes, true, go_on);
        turn.map(Some).map_err(|error| fate.fail(error))
    }

    fn hand_over(&mut self, number: u64, part: &[u8]) -> Result<()> {
        let pair = self.link.pair(self.link.rank, self.link.peer);
        let turn = self.turn(part.len())?;
        let between_max = self.link.pacer.as_ref().map_or(BETWEEN_BYTES_MAX, |pacer| pacer.bytes_under_way());
        let mut bytes = pair.lock().spare.pop().unwrap_or_default();
        bytes.clear();
        bytes.extend_from_slice(part);
        let piece = Piece { bytes, due: turn.map(|turn| turn.arrives) };
        let mut state = pair.lock();
        loop {
            self.link.world.fate.check()?;
            if let Some(wanted) =
                state.wanted.get_mut(&self.tag).filter(|wanted| wanted.claimed_by == Some(number))
            {
                if wanted.bytes < between_max {
                    wanted.bytes += piece.bytes.len();
                    wanted.pieces.push_back(piece);
                    break;
                }
            } else if let Some(early) = state.early(self.tag, number) {
                early.pieces.push_back(piece);
                break;
            }
            // There is no room, or the receiver gave the message up, which fails the fabric in a moment.
            state = self.link.wait(pair, state, self.tag, &self.bound, None)?;
        }
        drop(state);
        pair.changed.notify_all();
        if let Some(turn) = turn {
            turn.wait();
        }
        Ok(())
    }
}

struct LocalIncoming<'a> {
    link: &'a LocalLink,
    tag: Tag,
    length: usize,
    /// What is being taken from, and how much of it has been.
    piece: Option<Piece>,
    used: usize,
    bound: Bound,
}

impl IncomingEnd for LocalIncoming<'_> {
    fn read(&mut self, into: &mut [u8], meanwhile: &mut dyn Meanwhile) -> Result<()> {
        let (length, mut filled) = (into.len(), 0);
        let mut copy = |part: &[u8]| {
            into[filled..filled + part.len()].copy_from_slice(part);
            filled += part.len();
        };
        self.read_with(length, &mut copy, meanwhile)
    }

    fn read_with(
        &mut self,
        length: usize,
        each: &mut dyn FnMut(&[u8]),
        meanwhile: &mut dyn Meanwhile,
    ) -> Result<()> {
        let mut left = length;
        loop {
            if self.piece.as_ref().is_none_or(|piece| self.used == piece.bytes.len()) {
                while meanwhile.advance() {}
                meanwhile.part();
                self.next_piece()?;
            }
            self.wait_until_due()?;
            let piece = self.piece.as_ref().expect("a piece was just taken");
            let part = left.min(piece.bytes.len() - self.used);
            each(&piece.bytes[self.used..self.used + part]);
            self.used += part;
            left -= part;
            if left == 0 {
                return Ok(());
            }
        }
    }
}

impl LocalIncoming<'_> {
    fn pair(&self) -> &Pair {
        self.link.pair(self.link.peer, self.link.rank)
    }

    fn next_piece(&mut self) -> Result<()> {
        let used = self.piece.take();
        let pair = self.link.pair(self.link.peer, self.link.rank);
        let mut state = pair.lock();
        if let Some(piece) = used {
            state.spare.push(piece.bytes);
        }
        let piece = loop {
            self.link.world.fate.check()?;
            let wanted =
                state.wanted.get_mut(&self.tag).expect("what is being received is among what is wanted");
            if let Some(sent) = wanted.refused {
                return Err(self.link.length_error(self.tag, sent, self.length));
            }
            if let Some(piece) = wanted.pieces.pop_front() {
                wanted.bytes -= piece.bytes.len();
                break piece;
            }
            state = self.link.wait(pair, state, self.tag, &self.bound, None)?;
        };
        drop(state);
        pair.changed.notify_all();
        self.piece = Some(piece);
        self.used = 0;
        Ok(())
    }

    /// A wait and no sleep, so that an abort ends it.
    fn wait_until_due(&mut self) -> Result<()> {
        let Some(due) = self.piece.as_mut().and_then(|piece| piece.due.take()) else { return Ok(()) };
        let pair = self.pair();
        while Instant::now() < due {
            drop(self.link.wait(pair, pair.lock(), self.tag, &self.bound, Some(due))?);
        }
        Ok(())
    }
}

impl Drop for LocalIncoming<'_> {
    fn drop(&mut self) {
        let piece = self.piece.take();
        let mut state = self.pair().lock();
        if let Some(piece) = piece {
            state.spare.push(piece.bytes);
        }
        // Spare pieces are for messages under way; those of a burst are not kept.
        state.spare.truncate(SPARE_PIECES_MAX);
        state.wanted.remove(&self.tag);
    }
}

/// Pieces that a pair keeps to use again.
const SPARE_PIECES_MAX: usize = 2 * BETWEEN_BYTES_MAX / PIECE_BYTES;
