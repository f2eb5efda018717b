//! The two ends of one message over TCP: how it may go, where its bytes are written, and where they are read from.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::lane::{Source, closed, read_meanwhile};
use super::peer::Peer;
use super::stream::{Writing, is_tick};
use crate::desk::{Arrival, Leave};
use crate::error::{Error, Result};
use crate::fabric::Tag;
use crate::link::{IncomingEnd, Link, Meanwhile, Nothing, OutgoingEnd};
use crate::pace::Progress;
use crate::wire::{HEADER_BYTES, Header, Kind, stream_of, stripe_left};

/// A sender that has waited this long says so, and says it again each time it has.
const ANNOUNCE_AFTER: Duration = Duration::from_secs(1);
/// How long whoever does not want to wait for a receiver waits all the same: mostly it is about to say that it wants the
/// message. Nobody may wait longer who has others' bytes before it to read, for the receiver may be waiting for those.
const BRIEFLY: Duration = Duration::from_micros(500);
/// What a receiver that looks at bytes as they come reads at once: it stays in the cache.
const SCRATCH_BYTES: usize = 64 << 10;

/// The peer as the fabric sees it.
pub struct TcpLink(pub Arc<Peer>);

impl Link for TcpLink {
    fn outgoing(&self, tag: Tag, length: usize) -> Result<Box<dyn OutgoingEnd + '_>> {
        self.0.fate.check()?;
        let until = Instant::now() + self.0.message_deadline;
        let progress = Progress::default();
        Ok(Box::new(TcpOutgoing {
            peer: &self.0,
            tag,
            length: length as u64,
            offset: 0,
            way: None,
            announced: false,
            open: None,
            progress,
            until,
        }))
    }

    fn incoming(&self, tag: Tag, length: usize) -> Result<Box<dyn IncomingEnd + '_>> {
        let peer = &*self.0;
        peer.fate.check()?;
        let word = peer.counter().desk.want(tag, length as u64);
        let Ok(word) = word else { return Err(Error::TagInUse { peer: peer.name().to_owned(), tag }) };
        let until = Instant::now() + peer.message_deadline;
        let end = TcpIncoming {
            peer,
            tag,
            length: length as u64,
            offset: 0,
            state: Receiving::Unknown,
            scratch: Vec::new(),
            until,
        };
        if let Some(word) = word
            && let Err(error) = peer.tell(&word, &[], &mut Progress::default())
            && !matches!(error, Error::PeerLeft { .. })
        {
            return Err(error);
        }
        Ok(Box::new(end))
    }
}

struct TcpOutgoing<'a> {
    peer: &'a Peer,
    tag: Tag,
    length: u64,
    offset: u64,
    way: Option<Kind>,
    /// Its receiver was told that it waits.
    announced: bool,
    /// A frame that could not be written whole without waiting.
    open: Option<OpenFrame>,
    progress: Progress,
    until: Instant,
}

struct OpenFrame {
    sink: usize,
    writing: Writing,
    header: [u8; HEADER_BYTES],
    header_left: usize,
    payload_left: usize,
}

impl OutgoingEnd for TcpOutgoing<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let way = self.way()?;
        self.progress.pause();
        let mut rest = &bytes[self.finish_frame(bytes)?..];
        if rest.is_empty() && !bytes.is_empty() {
            return Ok(());
        }
        loop {
            let (part, after) = rest.split_at(rest.len().min(self.part_bytes(way)));
            self.put(way, part, after.is_empty())?;
            self.offset += part.len() as u64;
            rest = after;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    fn write_some(&mut self, bytes: &[u8]) -> Result<usize> {
        let soon = Instant::now() + BRIEFLY;
        let way = match self.way {
            Some(way) => way,
            None => match self.begin(soon)? {
                Some(way) => *self.way.insert(way),
                None => return Ok(0),
            },
        };
        if way == Kind::Eager {
            return self.write(bytes).map(|()| bytes.len());
        }
        let mut written = 0;
        while written < bytes.len() || self.open.is_some() {
            let rest = &bytes[written..];
            if self.open.is_none() && !self.open_frame(rest.len(), soon)? {
                break;
            }
            let count = self.go_on_with_frame(rest)?;
            written += count;
            self.offset += count as u64;
            if self.open.is_some() {
                break;
            }
        }
        Ok(written)
    }

    fn holds_back(&self) -> bool {
        self.open.is_some()
    }

    fn flush(&mut self) -> Result<()> {
        self.finish_frame(&[]).map(drop)
    }
}

impl TcpOutgoing<'_> {
    fn way(&mut self) -> Result<Kind> {
        let way = match self.way {
            Some(way) => way,
            None => {
                let way = self.begin(self.until)?;
                way.ok_or_else(|| self.peer.late(self.tag, "did not take it"))?
            }
        };
        self.way = Some(way);
        Ok(way)
    }

    /// Takes a stream for a frame of the next bytes, if the link lets frames be cut short, and the stream is free soon.
    fn open_frame(&mut self, bytes: usize, soon: Instant) -> Result<bool> {
        let part = bytes.min(self.part_bytes(Kind::Data));
        let sink = stream_of(self.tag, self.offset, self.peer.data.len());
        let Some(writing) = self.peer.data[sink].take(soon) else { return Ok(false) };
        let (total, offset, length) = (self.length, self.offset, part as u32);
        let header = Header { kind: Kind::Data, tag: self.tag, total, offset, length }.encode();
        self.open = Some(OpenFrame { sink, writing, header, header_left: HEADER_BYTES, payload_left: part });
        Ok(true)
    }

    /// Writes what goes of the open frame without waiting, and closes it when it is whole; bytes of payload written.
    fn go_on_with_frame(&mut self, bytes: &[u8]) -> Result<usize> {
        let Some(frame) = &mut self.open else { return Ok(0) };
        let payload = &bytes[..bytes.len().min(frame.payload_left)];
        let mut written = 0;
        let mut result = Ok(());
        while result.is_ok() && (frame.header_left + frame.payload_left > 0 || frame.writing.holds_back()) {
            let header = &frame.header[HEADER_BYTES - frame.header_left..];
            if header.is_empty() && written == payload.len() && frame.payload_left > 0 {
                break;
            }
            match frame.writing.write_now(header, &payload[written..]) {
                Ok(count) => {
                    let of_header = count.min(frame.header_left);
                    frame.header_left -= of_header;
                    frame.payload_left -= count - of_header;
                    written += count - of_header;
                }
                Err(error) if is_tick(&error) => break,
                Err(error) => result = Err(error),
            }
        }
        result.map_err(|error| self.peer.verdict(self.tag, closed(&error)))?;
        if frame.header_left + frame.payload_left == 0 && !frame.writing.holds_back() {
            self.close_frame();
        }
        Ok(written)
    }

    fn close_frame(&mut self) {
        if let Some(frame) = self.open.take() {
            self.peer.data[frame.sink].give_back(frame.writing);
        }
    }

    /// Ends a frame that was begun, waiting as long as it takes; bytes of it that were among these.
    fn finish_frame(&mut self, bytes: &[u8]) -> Result<usize> {
        let Some(frame) = &mut self.open else { return Ok(0) };
        let part = bytes.len().min(frame.payload_left);
        let (peer, until) = (self.peer, self.until);
        let header = &frame.header[HEADER_BYTES - frame.header_left..];
        let sent = frame.writing.write(header, &bytes[..part], || peer.worth_waiting(until));
        frame.header_left = 0;
        frame.payload_left -= part;
        let whole = frame.payload_left == 0;
        sent.map_err(|error| self.unsent(error))?;
        if whole {
            self.close_frame();
        }
        self.offset += part as u64;
        Ok(part)
    }

    fn unsent(&self, error: io::Error) -> Error {
        match (self.peer.fate.check(), Instant::now() >= self.until) {
            (Err(failure), _) => failure,
            (Ok(()), true) => self.peer.late(self.tag, "did not take it"),
            (Ok(()), false) => self.peer.unsent(self.tag, error),
        }
    }

    /// The most that can be in the next frame.
    fn part_bytes(&self, way: Kind) -> usize {
        let most = if way == Kind::Data { stripe_left(self.offset) } else { usize::MAX };
        most.min(self.peer.control.quantum_bytes())
    }

    fn put(&mut self, way: Kind, part: &[u8], last: bool) -> Result<()> {
        let header = Header {
            kind: way,
            tag: self.tag,
            total: self.length,
            offset: self.offset,
            length: part.len() as u32,
        };
        if way == Kind::Eager {
            return self.peer.tell(&header, part, &mut self.progress);
        }
        let (peer, until) = (self.peer, self.until);
        let sink = &peer.data[stream_of(self.tag, self.offset, peer.data.len())];
        let sent = sink.put(&header, part, &mut self.progress, last, || peer.worth_waiting(until));
        sent.map_err(|error| self.unsent(error))
    }

    /// Waits until the message may go: when it is wanted, or at once when it is small and the window has room. None where
    /// that did not come until then.
    fn begin(&mut self, until: Instant) -> Result<Option<Kind>> {
        let peer = self.peer;
        // A small message that has to wait is not wanted before its receiver knows of it.
        let mut announce_at = Instant::now()
            + if self.length <= crate::link::EAGER_MESSAGE_BYTES_MAX as u64 {
                Duration::ZERO
            } else {
                ANNOUNCE_AFTER
            };
        let (mut spin, mut counter) = (peer.spins.begin(), peer.counter());
        loop {
            peer.fate.check()?;
            match counter.desk.begin(self.tag, self.length, self.announced) {
                _ if counter.desk.left => return Err(peer.has_left(self.tag)),
                Leave::Eager => return Ok(Some(Kind::Eager)),
                Leave::Data => {
                    spin.found();
                    return Ok(Some(Kind::Data));
                }
                Leave::OtherLength(wanted) => {
                    drop(counter);
                    let refusal = Header::about(Kind::Refuse, self.tag, self.length);
                    peer.tell(&refusal, &[], &mut self.progress)?;
                    return Err(peer.other_length(self.tag, self.length, wanted));
                }
                Leave::Wait => {}
            }
            let now = Instant::now();
            if now >= until {
                return Ok(None);
            }
            if now >= announce_at {
                drop(counter);
                peer.tell(&Header::about(Kind::Announce, self.tag, self.length), &[], &mut self.progress)?;
                self.announced = true;
                announce_at = now + ANNOUNCE_AFTER;
                counter = peer.counter();
                continue;
            }
            counter = peer.wait(counter, &mut spin, announce_at.min(until), &mut Nothing);
        }
    }
}

impl Drop for TcpOutgoing<'_> {
    fn drop(&mut self) {
        self.close_frame();
    }
}

struct TcpIncoming<'a> {
    peer: &'a Peer,
    tag: Tag,
    length: u64,
    /// Bytes of the message that have been read.
    offset: u64,
    state: Receiving,
    scratch: Vec<u8>,
    until: Instant,
}

/// Where the next bytes of a message are.
enum Receiving {
    Unknown,
    Piece {
        bytes: Vec<u8>,
        used: usize,
    },
    /// On the data streams.
    Streams,
    /// In a frame that is being read.
    Frame {
        lane: usize,
        source: Box<Source>,
        left: usize,
    },
}

impl IncomingEnd for TcpIncoming<'_> {
    fn read(&mut self, into: &mut [u8], meanwhile: &mut dyn Meanwhile) -> Result<()> {
        let mut filled = 0;
        loop {
            filled += self.read_part(&mut into[filled..], meanwhile)?;
            if filled == into.len() {
                return Ok(());
            }
        }
    }

    fn read_with(
        &mut self,
        length: usize,
        each: &mut dyn FnMut(&[u8]),
        meanwhile: &mut dyn Meanwhile,
    ) -> Result<()> {
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.resize(SCRATCH_BYTES.min(length.max(scratch.len())), 0);
        let mut left = length;
        loop {
            let part = left.min(SCRATCH_BYTES);
            self.read(&mut scratch[..part], meanwhile)?;
            each(&scratch[..part]);
            left -= part;
            if left == 0 {
                self.scratch = scratch;
                return Ok(());
            }
        }
    }
}

impl TcpIncoming<'_> {
    /// Some of the next bytes; none only of an empty message.
    fn read_part(&mut self, into: &mut [u8], meanwhile: &mut dyn Meanwhile) -> Result<usize> {
        loop {
            match &mut self.state {
                Receiving::Unknown => self.look(meanwhile)?,
                Receiving::Piece { bytes, used } => {
                    let count = into.len().min(bytes.len() - *used);
                    into[..count].copy_from_slice(&bytes[*used..*used + count]);
                    *used += count;
                    let over = *used == bytes.len();
                    if over {
                        self.state = Receiving::Unknown;
                    }
                    self.offset += count as u64;
                    return Ok(count);
                }
                Receiving::Streams => self.next_frame(meanwhile)?,
                Receiving::Frame { source, left, .. } => {
                    let most = into.len().min(*left);
                    let (peer, until) = (self.peer, self.until);
                    let count = match most {
                        0 => Ok(0),
                        _ => read_meanwhile(
                            &mut source.reading,
                            &source.spins,
                            &mut into[..most],
                            &mut || peer.worth_waiting(until).is_ok(),
                            meanwhile,
                        ),
                    };
                    let count = count.map_err(|trouble| peer.trouble(trouble, self.tag, until))?;
                    *left -= count;
                    if *left == 0 {
                        self.end_frame();
                    }
                    self.offset += count as u64;
                    return Ok(count);
                }
            }
        }
    }

    fn end_frame(&mut self) {
        if let Receiving::Frame { lane, source, .. } = std::mem::replace(&mut self.state, Receiving::Streams)
        {
            self.peer.lanes[lane].give_back(*source);
        }
    }

    /// Finds out how the message comes.
    fn look(&mut self, meanwhile: &mut dyn Meanwhile) -> Result<()> {
        let peer = self.peer;
        let (mut spin, mut counter) = (peer.spins.begin(), peer.counter());
        loop {
            peer.fate.check()?;
            let (arrival, word) = counter.desk.look(self.tag);
            match arrival {
                Arrival::Piece(bytes) => {
                    spin.found();
                    self.state = Receiving::Piece { bytes, used: 0 };
                    return Ok(());
                }
                Arrival::OtherLength(sent) => return Err(peer.other_length(self.tag, sent, self.length)),
                Arrival::Data => {
                    drop(counter);
                    self.state = Receiving::Streams;
                    return word.map_or(Ok(()), |word| peer.tell(&word, &[], &mut Progress::default()));
                }
                Arrival::NotYet if counter.desk.left => return Err(peer.has_left(self.tag)),
                Arrival::NotYet if Instant::now() >= self.until => {
                    return Err(peer.late(self.tag, "did not send it"));
                }
                Arrival::NotYet => counter = peer.wait(counter, &mut spin, self.until, meanwhile),
            }
        }
    }

    fn next_frame(&mut self, meanwhile: &mut dyn Meanwhile) -> Result<()> {
        let (peer, tag, until) = (self.peer, self.tag, self.until);
        let lane = stream_of(tag, self.offset, peer.lanes.len());
        let go_on = || peer.worth_waiting(until).is_ok() && peer.counter().desk.other_length(tag).is_none();
        let expected = |header: &Header| peer.counter().desk.expects_data(header);
        let next = peer.lanes[lane].next(tag, peer.tick, go_on, expected, meanwhile);
        let (header, source) = match next {
            Ok(next) => next,
            Err(trouble) => {
                if let Some(sent) = peer.counter().desk.other_length(tag) {
                    return Err(peer.other_length(tag, sent, self.length));
                }
                return Err(peer.trouble(trouble, tag, until));
            }
        };
        let judged = peer.counter().desk.take_data(&header);
        self.state = Receiving::Frame { lane, source: Box::new(source), left: header.length as usize };
        judged.map_err(|violation| peer.broke_rules(violation))
    }
}

impl Drop for TcpIncoming<'_> {
    fn drop(&mut self) {
        self.end_frame();
        let credit = {
            let desk = &mut self.peer.counter().desk;
            desk.done(self.tag);
            desk.credit()
        };
        if let Some(credit) = credit {
            // A peer that is gone needs none.
            let _ = self.peer.tell(&credit, &[], &mut Progress::default());
        }
    }
}
