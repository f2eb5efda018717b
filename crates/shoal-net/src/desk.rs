//! Where the messages of one peer meet: what it sent without being asked, what is wanted of it, what it wants. It is a
//! state machine without sockets, clocks or threads: frames and wishes go in, frames to be sent come out, and whatever a
//! peer must not do is a [`Violation`].

use std::collections::{HashMap, VecDeque};

use crate::fabric::Tag;
use crate::link::{EAGER_MESSAGE_BYTES_MAX, EAGER_WINDOW_BYTES};
use crate::wire::{Header, Kind, Violation};

/// What a message in the inbox costs beyond its bytes, so that empty ones are bounded too.
const EAGER_EXTRA_BYTES: usize = 128;
/// Messages of a peer that may be wanted, or wait to be, at once. Each has a thread of its own there.
const WAITING_MAX: usize = 1 << 16;
/// Credit is given back in portions of this.
const CREDIT_BYTES: usize = EAGER_WINDOW_BYTES / 4;

#[derive(Default)]
pub struct Desk {
    /// Small messages that nobody has asked for yet, in the order of their beginnings.
    inbox: HashMap<Tag, VecDeque<Early>>,
    inbox_bytes: usize,
    /// What this worker waits for.
    wanted: HashMap<Tag, Wanted>,
    /// What the peer waits for, with its length.
    ready: HashMap<Tag, u64>,
    /// What the peer waits to send, with its length.
    announced: HashMap<Tag, u64>,
    /// Bytes of the peer's window that are taken.
    window_taken: usize,
    /// Bytes of this worker's window that are free again and not yet said to be.
    credit_owed: usize,
    /// The peer said goodbye.
    pub left: bool,
}

struct Early {
    length: u64,
    arrived: u64,
    pieces: VecDeque<Vec<u8>>,
}

/// A message that is being received.
pub struct Wanted {
    length: u64,
    /// How it comes, once that is known.
    way: Option<Way>,
    /// Bytes that have come.
    arrived: u64,
    /// Parts that came without being asked for.
    pieces: VecDeque<Vec<u8>>,
    /// The sender's length, where it is another.
    other_length: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Over the control connection, as pieces.
    Eager,
    /// Over the data streams, straight into the receiver's memory.
    Data,
}

/// What a frame means beyond this peer's messages.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    Nothing,
    /// Somebody may go on who waits for this desk to change.
    Changed,
    Abort {
        culprit: Option<usize>,
        by: usize,
        reason: String,
    },
}

/// What a receiver finds.
#[derive(Debug, PartialEq, Eq)]
pub enum Arrival {
    NotYet,
    Piece(Vec<u8>),
    /// The message is to be read from the data streams.
    Data,
    OtherLength(u64),
}

/// What a sender may do.
#[derive(Debug, PartialEq, Eq)]
pub enum Leave {
    Wait,
    Eager,
    Data,
    /// The receiver wants another length: this one.
    OtherLength(u64),
}

/// Two receivers for one message.
#[derive(Debug, PartialEq, Eq)]
pub struct InUse;

impl Desk {
    /// Takes in a frame of the control connection.
    pub fn accept(&mut self, header: &Header, payload: Vec<u8>) -> Result<Heard, Violation> {
        if self.left {
            return Err(Violation::Unexpected(header.kind));
        }
        match header.kind {
            Kind::Heartbeat => Ok(Heard::Nothing),
            Kind::Eager => self.accept_eager(header, payload),
            Kind::Credit => {
                let bytes = usize::try_from(header.total).unwrap_or(usize::MAX);
                self.window_taken = self.window_taken.checked_sub(bytes).ok_or(Violation::Window)?;
                Ok(Heard::Changed)
            }
            Kind::Ready => {
                if self.ready.len() == WAITING_MAX {
                    return Err(Violation::TooMany);
                }
                match self.ready.insert(header.tag, header.total) {
                    None => Ok(Heard::Changed),
                    Some(_) => Err(Violation::Twice(Kind::Ready, header.tag)),
                }
            }
            Kind::Announce => self.accept_announce(header),
            Kind::Refuse => match self.wanted.get_mut(&header.tag) {
                Some(wanted) if wanted.way == Some(Way::Data) && wanted.arrived == 0 => {
                    wanted.other_length = Some(header.total);
                    Ok(Heard::Changed)
                }
                _ => Err(Violation::Unwanted(header.tag)),
            },
            Kind::Abort => {
                let culprit = usize::try_from(header.tag.0).ok().and_then(|number| number.checked_sub(1));
                let by = usize::try_from(header.total).unwrap_or(usize::MAX);
                Ok(Heard::Abort { culprit, by, reason: String::from_utf8_lossy(&payload).into_owned() })
            }
            Kind::Bye => {
                self.left = true;
                Ok(Heard::Changed)
            }
            Kind::Hello | Kind::Welcome | Kind::Data => Err(Violation::Unexpected(header.kind)),
        }
    }

    fn accept_eager(&mut self, header: &Header, payload: Vec<u8>) -> Result<Heard, Violation> {
        let Header { tag, total, offset, .. } = *header;
        let queue = self.inbox.get_mut(&tag);
        if let Some(early) = queue.and_then(VecDeque::back_mut).filter(|early| early.arrived < early.length) {
            check_place(header, early.length, early.arrived)?;
            early.arrived += payload.len() as u64;
            early.pieces.push_back(payload);
            return Ok(Heard::Nothing);
        }
        if let Some(wanted) = self.wanted.get_mut(&tag) {
            let goes_on = wanted.way == Some(Way::Eager) && wanted.arrived < wanted.length;
            if goes_on && wanted.other_length.is_none() {
                check_place(header, wanted.length, wanted.arrived)?;
            } else if wanted.way.is_none() || (wanted.way == Some(Way::Data) && wanted.arrived == 0) {
                check_place(header, total, 0)?;
                // Its place in the window is free as soon as it is taken, which is now.
                self.credit_owed += total as usize + EAGER_EXTRA_BYTES;
                wanted.way = Some(Way::Eager);
                if total != wanted.length {
                    wanted.other_length = Some(total);
                }
            } else {
                return self.begin_early(header, payload);
            }
            wanted.arrived += payload.len() as u64;
            wanted.pieces.push_back(payload);
            return Ok(Heard::Changed);
        }
        if offset > 0 {
            return Err(Violation::OutOfOrder { tag, offset, wanted: 0 });
        }
        self.begin_early(header, payload)
    }

    fn begin_early(&mut self, header: &Header, payload: Vec<u8>) -> Result<Heard, Violation> {
        check_place(header, header.total, 0)?;
        self.inbox_bytes += header.total as usize + EAGER_EXTRA_BYTES;
        if self.inbox_bytes > EAGER_WINDOW_BYTES {
            return Err(Violation::Window);
        }
        let early =
            Early { length: header.total, arrived: payload.len() as u64, pieces: VecDeque::from([payload]) };
        self.inbox.entry(header.tag).or_default().push_back(early);
        Ok(Heard::Nothing)
    }

    fn accept_announce(&mut self, header: &Header) -> Result<Heard, Violation> {
        let Header { tag, total, .. } = *header;
        // It may cross with the word that the message is wanted, which the sender has by now.
        let crossed = |wanted: &Wanted| wanted.way == Some(Way::Data) && wanted.arrived == 0;
        if self.wanted.get(&tag).is_some_and(crossed) {
            return Ok(Heard::Nothing);
        }
        if self.announced.len() == WAITING_MAX {
            return Err(Violation::TooMany);
        }
        // A sender that waits long says so again.
        self.announced.insert(tag, total);
        Ok(Heard::Changed)
    }

    /// Says that a message is wanted. What comes back is to be sent.
    pub fn want(&mut self, tag: Tag, length: u64) -> Result<Option<Header>, InUse> {
        if self.wanted.contains_key(&tag) {
            return Err(InUse);
        }
        let mut wanted =
            Wanted { length, way: None, arrived: 0, pieces: VecDeque::new(), other_length: None };
        let mut word = None;
        if let Some(early) = self.take_early(tag) {
            wanted.way = Some(Way::Eager);
            wanted.arrived = early.arrived;
            wanted.pieces = early.pieces;
            wanted.other_length = Some(early.length).filter(|other| *other != length);
        } else if length > EAGER_MESSAGE_BYTES_MAX as u64 || self.announced.contains_key(&tag) {
            word = Some(self.ask_for(tag, &mut wanted));
        }
        self.wanted.insert(tag, wanted);
        Ok(word)
    }

    fn ask_for(&mut self, tag: Tag, wanted: &mut Wanted) -> Header {
        self.announced.remove(&tag);
        wanted.way = Some(Way::Data);
        Header::about(Kind::Ready, tag, wanted.length)
    }

    fn take_early(&mut self, tag: Tag) -> Option<Early> {
        let queue = self.inbox.get_mut(&tag)?;
        let early = queue.pop_front()?;
        if queue.is_empty() {
            self.inbox.remove(&tag);
        }
        let bytes = early.length as usize + EAGER_EXTRA_BYTES;
        self.inbox_bytes -= bytes;
        self.credit_owed += bytes;
        Some(early)
    }

    /// What has come of a message that is wanted, with what is to be sent.
    pub fn look(&mut self, tag: Tag) -> (Arrival, Option<Header>) {
        let Some(mut wanted) = self.wanted.remove(&tag) else { return (Arrival::NotYet, None) };
        let mut word = None;
        if wanted.way.is_none() && self.announced.contains_key(&tag) {
            word = Some(self.ask_for(tag, &mut wanted));
        }
        let arrival = match (wanted.other_length, wanted.pieces.pop_front()) {
            (Some(other), _) => Arrival::OtherLength(other),
            (None, Some(piece)) => Arrival::Piece(piece),
            (None, None) if wanted.way == Some(Way::Data) => Arrival::Data,
            (None, None) => Arrival::NotYet,
        };
        self.wanted.insert(tag, wanted);
        (arrival, word)
    }

    /// Judges a data frame that its receiver is about to read.
    pub fn take_data(&mut self, header: &Header) -> Result<(), Violation> {
        if header.kind != Kind::Data {
            return Err(Violation::Unexpected(header.kind));
        }
        match self.wanted.get_mut(&header.tag) {
            Some(wanted) if wanted.way == Some(Way::Data) => {
                check_place(header, wanted.length, wanted.arrived)?;
                wanted.arrived += header.length as u64;
                Ok(())
            }
            _ => Err(Violation::Unwanted(header.tag)),
        }
    }

    /// Whether a data frame may wait at the head of its stream for its receiver.
    pub fn expects_data(&self, header: &Header) -> Result<(), Violation> {
        match self.wanted.get(&header.tag) {
            _ if header.kind != Kind::Data => Err(Violation::Unexpected(header.kind)),
            Some(wanted) if wanted.way == Some(Way::Data) => Ok(()),
            _ => Err(Violation::Unwanted(header.tag)),
        }
    }

    /// The sender's length of a message that is wanted, where it is another.
    pub fn other_length(&self, tag: Tag) -> Option<u64> {
        self.wanted.get(&tag)?.other_length
    }

    /// The receiver has everything, or has given up.
    pub fn done(&mut self, tag: Tag) {
        self.wanted.remove(&tag);
    }

    /// Bytes of small messages that nobody has asked for yet, with what they cost beyond their bytes.
    pub fn inbox_bytes(&self) -> usize {
        self.inbox_bytes
    }

    /// Credit to be sent, once there is enough of it to be worth a frame.
    pub fn credit(&mut self) -> Option<Header> {
        if self.credit_owed < CREDIT_BYTES {
            return None;
        }
        Some(Header::about(Kind::Credit, Tag(0), std::mem::take(&mut self.credit_owed) as u64))
    }

    /// Whether a message may go, and how. One that was announced waits to be wanted, for its receiver may be saying so.
    pub fn begin(&mut self, tag: Tag, length: u64, announced: bool) -> Leave {
        if let Some(wanted) = self.ready.remove(&tag) {
            return if wanted == length { Leave::Data } else { Leave::OtherLength(wanted) };
        }
        let bytes = length as usize + EAGER_EXTRA_BYTES;
        let small = length <= EAGER_MESSAGE_BYTES_MAX as u64;
        if small && !announced && self.window_taken + bytes <= EAGER_WINDOW_BYTES {
            self.window_taken += bytes;
            return Leave::Eager;
        }
        Leave::Wait
    }
}

/// A part must be of the message that it says and follow the part before it.
fn check_place(header: &Header, length: u64, arrived: u64) -> Result<(), Violation> {
    let Header { tag, total, offset, length: part, .. } = *header;
    if total != length {
        return Err(Violation::OtherTotal { tag, total, wanted: length });
    }
    if offset != arrived {
        return Err(Violation::OutOfOrder { tag, offset, wanted: arrived });
    }
    // The header's own check holds its end to its total, and so to this length.
    debug_assert!(arrived + part as u64 <= length);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn eager(tag: u128, total: u64, offset: u64, length: u32) -> Header {
        Header { kind: Kind::Eager, tag: Tag(tag), total, offset, length }
    }

    #[test]
    fn a_small_message_waits_in_parts_and_goes_on_once_it_is_wanted() {
        let mut desk = Desk::default();
        assert_eq!(desk.accept(&eager(1, 4, 0, 2), vec![1, 2]), Ok(Heard::Nothing));
        assert_eq!(desk.want(Tag(1), 4), Ok(None));
        assert_eq!(desk.look(Tag(1)), (Arrival::Piece(vec![1, 2]), None));
        assert_eq!(desk.look(Tag(1)), (Arrival::NotYet, None));
        assert_eq!(desk.accept(&eager(1, 4, 2, 2), vec![3, 4]), Ok(Heard::Changed));
        assert_eq!(desk.look(Tag(1)), (Arrival::Piece(vec![3, 4]), None));
        assert_eq!(desk.inbox_bytes(), 0);
    }

    #[test]
    fn a_tag_used_again_is_received_in_the_order_of_sending() {
        let mut desk = Desk::default();
        for byte in [1, 2] {
            desk.accept(&eager(1, 1, 0, 1), vec![byte]).expect("in order");
        }
        for byte in [1, 2] {
            assert_eq!(desk.want(Tag(1), 1), Ok(None));
            assert_eq!(desk.want(Tag(1), 1), Err(InUse));
            assert_eq!(desk.look(Tag(1)).0, Arrival::Piece(vec![byte]));
            desk.done(Tag(1));
        }
    }

    #[test]
    fn large_messages_are_asked_for_and_small_ones_when_they_are_announced() {
        let mut desk = Desk::default();
        assert_eq!(desk.want(Tag(1), 1 << 20), Ok(Some(Header::about(Kind::Ready, Tag(1), 1 << 20))));
        assert_eq!(desk.want(Tag(2), 10), Ok(None));
        assert_eq!(desk.accept(&Header::about(Kind::Announce, Tag(2), 10), vec![]), Ok(Heard::Changed));
        assert_eq!(desk.look(Tag(2)), (Arrival::Data, Some(Header::about(Kind::Ready, Tag(2), 10))));
    }

    #[test]
    fn data_is_taken_in_order_and_only_if_it_is_wanted() {
        let mut desk = Desk::default();
        let data =
            |offset: u64| Header { kind: Kind::Data, tag: Tag(1), total: 100_000, offset, length: 50_000 };
        assert_eq!(desk.take_data(&data(0)), Err(Violation::Unwanted(Tag(1))));
        desk.want(Tag(1), 100_000).expect("nobody else wants it");
        let out_of_order = Violation::OutOfOrder { tag: Tag(1), offset: 50_000, wanted: 0 };
        assert_eq!(desk.take_data(&data(50_000)), Err(out_of_order));
        assert_eq!(desk.take_data(&data(0)), Ok(()));
        assert_eq!(desk.take_data(&data(50_000)), Ok(()));
    }

    #[test]
    fn the_window_bounds_both_sides() {
        let mut sender = Desk::default();
        let mut receiver = Desk::default();
        let length = EAGER_MESSAGE_BYTES_MAX as u64;
        let mut count = 0u128;
        while sender.begin(Tag(count), length, false) == Leave::Eager {
            let header = eager(count, length, 0, length as u32);
            assert_eq!(receiver.accept(&header, vec![0; length as usize]), Ok(Heard::Nothing));
            count += 1;
        }
        let one_more = eager(count, length, 0, length as u32);
        assert_eq!(receiver.accept(&one_more, vec![0; length as usize]), Err(Violation::Window));
        // What was received is free again, at both.
        for tag in 0..count {
            receiver.want(Tag(tag), length).expect("nobody else wants it");
            receiver.done(Tag(tag));
        }
        let credit = receiver.credit().expect("there is enough to be worth a frame");
        assert_eq!(sender.accept(&credit, vec![]), Ok(Heard::Changed));
        assert_eq!(sender.begin(Tag(count), length, false), Leave::Eager);
    }
}
