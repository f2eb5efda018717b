//! One worker's end of everything: what the engine's threads call. Every operation blocks its thread and no other.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::collective::TREE_BYTES_MAX;
use crate::error::{Error, Result};
use crate::fate::Fate;
use crate::link::{IncomingEnd, Link, Meanwhile, Nothing, OutgoingEnd};
use crate::local::{LocalLink, World};
use crate::pace::{Pacer, Ways};
use crate::settings::Settings;

/// What a message is about: the two sides compute the same number. Between two workers, in one direction, a tag may be
/// used again once its message has been received.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tag(pub u128);

impl Tag {
    /// A tag for a part of what this one is about, as far from all others as a hash is.
    pub fn part(self, number: u64) -> Tag {
        let mixed = (self.0 ^ ((number as u128 + 1) << 64 | number as u128)).wrapping_mul(MIX);
        Tag((mixed ^ mixed >> 67).wrapping_mul(MIX))
    }
}

/// An odd number without pattern: its multiples spread over all bits.
const MIX: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;

impl fmt::Display for Tag {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:x}", self.0)
    }
}

/// One worker's connections to all the others. Any number of threads may use it at once.
pub struct Fabric {
    rank: usize,
    names: Vec<String>,
    fate: Arc<Fate>,
    /// The first worker that had left when something here needed it. Whatever else is given up then is given up because
    /// of it.
    missed: OnceLock<Error>,
    /// By rank; none for the worker itself.
    links: Vec<Option<Box<dyn Link>>>,
    /// Buffers up to this go by the tree.
    tree_bytes_max: usize,
    /// Says goodbye when the fabric is dropped.
    leave: Box<dyn Leave>,
}

/// What ends a worker's part in a fabric in good order when it is dropped.
pub(crate) trait Leave: Send + Sync {
    /// Ends every connection at once, as a cut cable does. What has no connections has nothing to cut.
    fn sever(&self) {}
}

struct LeaveWorld {
    world: Arc<World>,
    rank: usize,
}

impl Leave for LeaveWorld {}

impl Drop for LeaveWorld {
    fn drop(&mut self) {
        self.world.leave(self.rank);
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Fabric({} of {})", self.names[self.rank], self.names.len())
    }
}

impl Fabric {
    pub(crate) fn new(
        rank: usize,
        names: Vec<String>,
        fate: Arc<Fate>,
        links: Vec<Option<Box<dyn Link>>>,
        settings: &Settings,
        leave: Box<dyn Leave>,
    ) -> Fabric {
        let tree_bytes_max = settings.tree_bytes_max.min(TREE_BYTES_MAX);
        Fabric { rank, names, fate, missed: OnceLock::new(), links, tree_bytes_max, leave }
    }

    /// Lets go of the links to all others but these, as if they had never been made.
    pub fn keep_links(&mut self, peers: &BTreeSet<usize>) {
        for (peer, link) in self.links.iter_mut().enumerate() {
            link.take_if(|_| !peers.contains(&peer));
        }
    }

    pub(crate) fn tree_bytes_max(&self) -> usize {
        self.tree_bytes_max
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn size(&self) -> usize {
        self.names.len()
    }

    /// A worker as messages name it.
    pub fn name(&self, rank: usize) -> &str {
        self.names.get(rank).map_or("a worker that does not exist", |name| name)
    }

    /// Sends a message; when this returns the bytes have been handed on and the buffer may change.
    pub fn send(&self, to: usize, tag: Tag, bytes: &[u8]) -> Result<()> {
        self.outgoing(to, tag, bytes.len())?.write(bytes)
    }

    /// Receives a message of exactly this length into the caller's memory.
    pub fn receive(&self, from: usize, tag: Tag, into: &mut [u8]) -> Result<()> {
        self.incoming(from, tag, into.len())?.read(into)
    }

    /// Begins a message that is written in parts. What was begun must be ended: a message given up ends the fabric, for
    /// its receiver could not go on.
    pub fn outgoing(&self, to: usize, tag: Tag, length: usize) -> Result<Outgoing<'_>> {
        let end = self.link(to)?.outgoing(tag, length).inspect_err(|error| self.note(error))?;
        Ok(Outgoing {
            end,
            message: Message {
                fabric: self,
                peer: to,
                tag,
                length,
                left: length,
                started: false,
                over: false,
            },
        })
    }

    /// Says that a message is wanted, which is then read in parts. Saying so early spares the sender its wait. What was
    /// begun must be ended: a message given up ends the fabric, for its sender could not go on.
    pub fn incoming(&self, from: usize, tag: Tag, length: usize) -> Result<Incoming<'_>> {
        let end = self.link(from)?.incoming(tag, length).inspect_err(|error| self.note(error))?;
        Ok(Incoming {
            end,
            message: Message {
                fabric: self,
                peer: from,
                tag,
                length,
                left: length,
                started: false,
                over: false,
            },
        })
    }

    /// Ends the fabric: everyone who waits, here and at the peers, ends with this reason and this worker's name.
    pub fn abort(&self, reason: &str) {
        self.fate.fail(Error::Aborted { by: self.names[self.rank].clone(), reason: reason.to_owned() });
    }

    /// Ends all of its connections without a word: peers find them closed, and so does this worker.
    pub(crate) fn sever(&self) {
        self.leave.sever();
    }

    /// The failure that ended the fabric, if there was one.
    pub fn failure(&self) -> Option<Error> {
        self.fate.check().err()
    }

    fn note(&self, error: &Error) {
        if let Error::PeerLeft { .. } = error {
            // The first is what is told.
            let _ = self.missed.set(error.clone());
        }
    }

    fn link(&self, peer: usize) -> Result<&dyn Link> {
        self.links.get(peer).and_then(|link| link.as_deref()).ok_or(Error::NoPeer {
            rank: self.rank,
            size: self.names.len(),
            peer,
        })
    }
}

/// What both ends of a message keep account of.
struct Message<'a> {
    fabric: &'a Fabric,
    peer: usize,
    tag: Tag,
    length: usize,
    left: usize,
    /// Something was asked of it: an empty message is over only then.
    started: bool,
    /// It ended with an error that both sides see.
    over: bool,
}

impl Message<'_> {
    /// Whether there is anything to do: a message that is empty is done with in one call, in others such calls say nothing.
    fn take(&mut self, bytes: usize) -> Result<bool> {
        if bytes > self.left {
            let peer = self.fabric.name(self.peer).to_owned();
            return Err(Error::Overrun { peer, tag: self.tag, asked: bytes, left: self.left });
        }
        Ok(bytes > 0 || self.length == 0 && !self.started)
    }

    fn note(&mut self, bytes: usize, result: Result<()>) -> Result<()> {
        self.started = true;
        match &result {
            Ok(()) => self.left -= bytes,
            Err(error @ (Error::Length { .. } | Error::PeerLeft { .. })) => {
                self.over = true;
                self.fabric.note(error);
            }
            Err(_) => {}
        }
        result
    }
}

impl Drop for Message<'_> {
    fn drop(&mut self) {
        let ended = self.over || (self.left == 0 && self.started);
        if !ended && !self.fabric.fate.failed() {
            let peer = self.fabric.name(self.peer);
            let given_up =
                || format!("message {} with {peer} was given up with {} bytes to go", self.tag, self.left);
            self.fabric.abort(&self.fabric.missed.get().map_or_else(given_up, |missed| missed.to_string()));
        }
    }
}

/// A message on its way out.
pub struct Outgoing<'a> {
    end: Box<dyn OutgoingEnd + 'a>,
    message: Message<'a>,
}

impl Outgoing<'_> {
    /// The next bytes. When this returns they have been handed on.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        if !self.message.take(bytes.len())? {
            return Ok(());
        }
        let result = self.end.write(bytes);
        self.message.note(bytes.len(), result)
    }

    /// As many of the next bytes as can be handed on without waiting for the receiver to read; how many. Zero says
    /// nothing about what `write` could do. Some may be held back: the message ends with `flush` or `write`.
    pub fn write_some(&mut self, bytes: &[u8]) -> Result<usize> {
        if !self.message.take(bytes.len())? && !self.end.holds_back() {
            return Ok(0);
        }
        let result = self.end.write_some(bytes);
        let count = *result.as_ref().unwrap_or(&0);
        self.message.note(count, result.map(drop))?;
        Ok(count)
    }

    /// Whether something that `write_some` took has not been handed on yet.
    pub fn holds_back(&self) -> bool {
        self.end.holds_back()
    }

    /// Hands on what is held back, waiting as long as it takes.
    pub fn flush(&mut self) -> Result<()> {
        self.end.flush()
    }
}

/// A message on its way in.
pub struct Incoming<'a> {
    end: Box<dyn IncomingEnd + 'a>,
    message: Message<'a>,
}

impl Incoming<'_> {
    /// The next bytes, into the caller's memory.
    pub fn read(&mut self, into: &mut [u8]) -> Result<()> {
        self.read_meanwhile(into, &mut Nothing)
    }

    /// The same for a caller that has other things to do before it waits.
    pub(crate) fn read_meanwhile(&mut self, into: &mut [u8], meanwhile: &mut dyn Meanwhile) -> Result<()> {
        if !self.message.take(into.len())? {
            return Ok(());
        }
        let result = self.end.read(into, meanwhile);
        self.message.note(into.len(), result)
    }

    /// The next bytes, shown in pieces as they come. A piece ends where a write of the sender ended, or at a multiple of
    /// four bytes.
    pub fn read_with(&mut self, length: usize, each: impl FnMut(&[u8])) -> Result<()> {
        self.read_with_meanwhile(length, each, &mut Nothing)
    }

    /// The same for a caller that has other things to do before it waits.
    pub(crate) fn read_with_meanwhile(
        &mut self,
        length: usize,
        mut each: impl FnMut(&[u8]),
        meanwhile: &mut dyn Meanwhile,
    ) -> Result<()> {
        if !self.message.take(length)? {
            return Ok(());
        }
        let result = self.end.read_with(length, &mut each, meanwhile);
        self.message.note(length, result)
    }
}

/// The fabrics of workers inside one process, by rank.
pub fn in_process(count: usize, settings: &Settings) -> Vec<Arc<Fabric>> {
    in_process_each(&vec![settings.clone(); count])
}

/// The same, each worker with settings of its own: links differ in a lab.
pub fn in_process_each(settings: &[Settings]) -> Vec<Arc<Fabric>> {
    let world = World::new(settings.len());
    let fabric = |(rank, settings): (usize, &Settings)| {
        let shape = settings.shape.as_ref();
        let ways = Ways::new(shape);
        let link = |peer: usize| -> Option<Box<dyn Link>> {
            let pacer = Pacer::new(shape, &ways, peer);
            let message_deadline = settings.message_deadline;
            (peer != rank).then(|| {
                Box::new(LocalLink { world: world.clone(), rank, peer, pacer, message_deadline }) as _
            })
        };
        let links = (0..world.names.len()).map(link).collect();
        let leave = Box::new(LeaveWorld { world: world.clone(), rank });
        Arc::new(Fabric::new(rank, world.names.clone(), world.fate.clone(), links, settings, leave))
    };
    settings.iter().enumerate().map(fabric).collect()
}
