//! What passes over a connection: frames, each a header of fixed size and then its payload. Everything about bytes from a
//! peer is judged here or in [`crate::desk`], without sockets or clocks, so that it can be fed anything.
//!
//! A header, little-endian: magic (4), version (1), kind (1), zero (2), tag (16), total (8), offset (8), length of the
//! payload (4), checksum of all before it (4). Lengths are held to their bounds before anything is allocated.

use thiserror::Error;

use crate::fabric::Tag;
use crate::link::EAGER_MESSAGE_BYTES_MAX;

pub const HEADER_BYTES: usize = 48;
const MAGIC: [u8; 4] = *b"shoa";
const VERSION: u8 = 1;

/// The longest payload of a data frame. A message is cut where its offset is a multiple of this, and the pieces go over
/// the streams in turn.
pub const STRIPE_BYTES: usize = 1 << 20;
/// The longest reason that an abort carries.
pub const REASON_BYTES_MAX: usize = 4 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// First on every connection, from its maker: tag is the fabric, total who it is, offset which stream this is.
    Hello,
    /// The answer to it, the only frame that goes against a connection's direction.
    Welcome,
    /// Says that the sender lives.
    Heartbeat,
    /// A part of a small message.
    Eager,
    /// So many bytes (total) of the window for small messages are free again.
    Credit,
    /// A message is wanted, of this total.
    Ready,
    /// A message waits to be wanted.
    Announce,
    /// The message that is wanted has another length than `total`: this one.
    Refuse,
    /// A part of a message that was wanted.
    Data,
    /// The end of the fabric: tag is one more than the culprit's rank or zero, total who says so, the payload why.
    Abort,
    /// The end of this worker's part, in good order.
    Bye,
}

const KINDS: [Kind; 11] = [
    Kind::Hello,
    Kind::Welcome,
    Kind::Heartbeat,
    Kind::Eager,
    Kind::Credit,
    Kind::Ready,
    Kind::Announce,
    Kind::Refuse,
    Kind::Data,
    Kind::Abort,
    Kind::Bye,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub kind: Kind,
    pub tag: Tag,
    /// The length of the whole message, or what the kind says.
    pub total: u64,
    /// Where in the message the payload belongs.
    pub offset: u64,
    /// Bytes of payload after the header.
    pub length: u32,
}

/// What a peer must not send. The connection ends with it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Violation {
    #[error("what came is no frame of this protocol")]
    Foreign,
    #[error("the frame's version is {0}, this worker's is {VERSION}")]
    Version(u8),
    #[error("a frame's header is damaged")]
    Checksum,
    #[error("there is no frame of kind {0}")]
    Kind(u8),
    #[error("a {kind:?} frame has {length} bytes, and {max} are the most")]
    Oversized { kind: Kind, length: u32, max: usize },
    #[error("a {kind:?} frame ends {end} bytes into a message of {total}")]
    PastTheEnd { kind: Kind, end: u64, total: u64 },
    #[error("a {0:?} frame where none can be")]
    Unexpected(Kind),
    #[error("message {tag} goes on at byte {offset}, and byte {wanted} is next")]
    OutOfOrder { tag: Tag, offset: u64, wanted: u64 },
    #[error("{0:?} came twice for message {1}")]
    Twice(Kind, Tag),
    #[error("message {0} came without being wanted")]
    Unwanted(Tag),
    #[error("message {tag} has {total} bytes in one frame and {wanted} in another")]
    OtherTotal { tag: Tag, total: u64, wanted: u64 },
    #[error("more small messages came than the window holds")]
    Window,
    #[error("more messages are begun than a worker can have")]
    TooMany,
    #[error("it says that it is worker {rank} of {size} on line {line} of {lines}")]
    Hello { rank: u64, size: u64, line: u64, lines: u64 },
}

/// What a connection is for, as its maker says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    pub fabric: u128,
    /// Its maker, among so many.
    pub rank: usize,
    pub size: usize,
    /// Which of the connections in this direction it is: control, then data.
    pub line: usize,
    pub lines: usize,
}

impl Hello {
    pub fn header(&self) -> Header {
        let halves = |low: usize, high: usize| low as u64 | (high as u64) << 32;
        Header {
            tag: Tag(self.fabric),
            total: halves(self.rank, self.size),
            offset: halves(self.line, self.lines),
            ..Header::new(Kind::Hello)
        }
    }

    pub fn of(header: &Header) -> Result<Hello, Violation> {
        if header.kind != Kind::Hello {
            return Err(Violation::Unexpected(header.kind));
        }
        let halves = |number: u64| (number & u64::from(u32::MAX), number >> 32);
        let ((rank, size), (line, lines)) = (halves(header.total), halves(header.offset));
        if rank >= size || line >= lines {
            return Err(Violation::Hello { rank, size, line, lines });
        }
        let [rank, size, line, lines] = [rank, size, line, lines].map(|number| number as usize);
        Ok(Hello { fabric: header.tag.0, rank, size, line, lines })
    }
}

impl Header {
    pub fn new(kind: Kind) -> Header {
        Header { kind, tag: Tag(0), total: 0, offset: 0, length: 0 }
    }

    /// A frame without payload about a message.
    pub fn about(kind: Kind, tag: Tag, total: u64) -> Header {
        Header { tag, total, ..Header::new(kind) }
    }

    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[5] = self.kind as u8;
        bytes[8..24].copy_from_slice(&self.tag.0.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.total.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.offset.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.length.to_le_bytes());
        let checksum = checksum(&bytes);
        bytes[44..48].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, Violation> {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let short = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        if bytes[0..4] != MAGIC {
            return Err(Violation::Foreign);
        }
        if bytes[4] != VERSION {
            return Err(Violation::Version(bytes[4]));
        }
        if short(44) != checksum(bytes) {
            return Err(Violation::Checksum);
        }
        let kind = *KINDS.get(bytes[5] as usize).ok_or(Violation::Kind(bytes[5]))?;
        if bytes[6..8] != [0, 0] {
            return Err(Violation::Foreign);
        }
        let tag = Tag(word(8) as u128 | (word(16) as u128) << 64);
        let header = Header { kind, tag, total: word(24), offset: word(32), length: short(40) };
        header.check()
    }

    /// Holds the payload to its bounds.
    fn check(self) -> Result<Header, Violation> {
        let Header { kind, total, offset, length, .. } = self;
        let max = match kind {
            Kind::Eager => EAGER_MESSAGE_BYTES_MAX,
            Kind::Data => STRIPE_BYTES,
            Kind::Abort => REASON_BYTES_MAX,
            _ => 0,
        };
        if length as usize > max {
            return Err(Violation::Oversized { kind, length, max });
        }
        if kind == Kind::Eager && total > EAGER_MESSAGE_BYTES_MAX as u64 {
            let length = total.min(u32::MAX as u64) as u32;
            return Err(Violation::Oversized { kind, length, max: EAGER_MESSAGE_BYTES_MAX });
        }
        if matches!(kind, Kind::Eager | Kind::Data) {
            let end = offset.saturating_add(length as u64);
            if offset > total || total - offset < length as u64 {
                return Err(Violation::PastTheEnd { kind, end, total });
            }
            // Only an empty message has an empty frame, or frames could come without end.
            if length == 0 && total > 0 {
                return Err(Violation::Unexpected(kind));
            }
        }
        Ok(self)
    }
}

/// A sum over the header in which every bit counts. It finds damage and foreign bytes; against forgery there is TLS.
fn checksum(header: &[u8; HEADER_BYTES]) -> u32 {
    let mut sum = 0x5348_4f41_4c4e_4554u64;
    for word in header[..44].chunks(4) {
        sum ^= u32::from_le_bytes(word.try_into().expect("44 is a multiple of four")) as u64;
        sum = sum.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        sum ^= sum >> 29;
    }
    (sum >> 32) as u32
}

/// Bytes until the stream changes, from this place in a message.
pub fn stripe_left(offset: u64) -> usize {
    STRIPE_BYTES - (offset % STRIPE_BYTES as u64) as usize
}

/// Which of so many streams carries this place of a message. Messages begin on different ones.
pub fn stream_of(tag: Tag, offset: u64, streams: usize) -> usize {
    ((offset / STRIPE_BYTES as u64 + (tag.0 % streams as u128) as u64) % streams as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back_as_they_were() {
        for kind in KINDS {
            let total = if kind == Kind::Data { 1 << 40 } else { 1000 };
            let length = if matches!(kind, Kind::Eager | Kind::Data | Kind::Abort) { 77 } else { 0 };
            let header = Header { kind, tag: Tag(u128::MAX / 3), total, offset: 5, length };
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
    }

    #[test]
    fn one_wrong_bit_anywhere_is_found() {
        let header =
            Header { kind: Kind::Data, tag: Tag(1 << 100), total: 1 << 33, offset: 1 << 20, length: 1 << 20 };
        for bit in 0..HEADER_BYTES * 8 {
            let mut bytes = header.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn lengths_are_bounded() {
        let refused = |header: Header| Header::decode(&header.encode()).expect_err("it is refused");
        let data = Header {
            kind: Kind::Data,
            tag: Tag(0),
            total: 1 << 40,
            offset: 0,
            length: STRIPE_BYTES as u32 + 1,
        };
        assert!(matches!(refused(data), Violation::Oversized { .. }));
        assert!(matches!(refused(Header { length: 10, total: 9, ..data }), Violation::PastTheEnd { .. }));
        assert!(matches!(
            refused(Header { length: 10, offset: u64::MAX, ..data }),
            Violation::PastTheEnd { .. }
        ));
        assert!(matches!(refused(Header { length: 0, ..data }), Violation::Unexpected(Kind::Data)));
        assert!(matches!(
            refused(Header { kind: Kind::Eager, length: 1, ..data }),
            Violation::Oversized { .. }
        ));
        assert!(matches!(
            refused(Header { kind: Kind::Ready, length: 1, ..data }),
            Violation::Oversized { .. }
        ));
    }
}
