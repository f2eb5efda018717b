//! What a fabric needs of one peer, whatever carries it. A message is a stream of bytes of known length, opened on both
//! sides, so that a caller can begin to send before it has everything and use what has arrived before the rest has.

use crate::error::Result;
use crate::fabric::Tag;

/// Messages up to this go at once and wait at the receiver; larger ones wait at the sender until they are wanted.
pub const EAGER_MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Eager bytes that may wait at a receiver for each peer. A message that does not fit waits at its sender.
pub const EAGER_WINDOW_BYTES: usize = 4 << 20;

/// One worker's end of the connection to one peer.
pub trait Link: Send + Sync {
    /// Begins a message. Returns at once; the first write waits for the receiver where it must.
    /// Parts of a small message go as they are written, like those of a large one.
    fn outgoing(&self, tag: Tag, length: usize) -> Result<Box<dyn OutgoingEnd + '_>>;
    /// Says that a message is wanted. Returns at once, so that it can be said ahead of time.
    fn incoming(&self, tag: Tag, length: usize) -> Result<Box<dyn IncomingEnd + '_>>;
}

/// The sending end of one message. The fabric has checked that writes do not pass its length.
pub trait OutgoingEnd: Send {
    fn write(&mut self, bytes: &[u8]) -> Result<()>;
    /// Writes what can be written without waiting for the receiver to read; how much that was. It may wait for the receiver
    /// to want the message at all.
    fn write_some(&mut self, bytes: &[u8]) -> Result<usize>;
    /// Whether something that `write_some` took has not left yet.
    fn holds_back(&self) -> bool;
    /// Waits until what was held back has left.
    fn flush(&mut self) -> Result<()>;
}

/// What a receiver has to do while nothing has come.
pub trait Meanwhile {
    /// Does some of it without waiting; whether there was anything to do. As long as there was, the receiver looks again.
    fn advance(&mut self) -> bool;
    /// The receiver is about to wait: what is left has to go on without its thread.
    fn part(&mut self);
}

/// For a receiver that has nothing else to do.
pub struct Nothing;

impl Meanwhile for Nothing {
    fn advance(&mut self) -> bool {
        false
    }

    fn part(&mut self) {}
}

/// The receiving end of one message. The fabric has checked that reads do not pass its length.
pub trait IncomingEnd: Send {
    /// The next bytes, straight into the caller's memory.
    fn read(&mut self, into: &mut [u8], meanwhile: &mut dyn Meanwhile) -> Result<()>;
    /// The next bytes, shown in pieces whose lengths are multiples of four but for the last.
    fn read_with(
        &mut self,
        length: usize,
        each: &mut dyn FnMut(&[u8]),
        meanwhile: &mut dyn Meanwhile,
    ) -> Result<()>;
}
