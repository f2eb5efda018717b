//! One peer's messages and its life. Two threads serve it: one reads control frames and judges its silence, the other
//! sends heartbeats, and at the end goodbye or the reason. Everything else is done by the threads that send and receive.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::join::{Connections, TICK_MAX};
use super::lane::{Lane, Source, Trouble, closed, read_some};
use super::sink::Sink;
use super::stream::{Reading, Writing, is_tick};
use crate::desk::{Arrival, Desk, Heard, Leave};
use crate::error::{Error, Result};
use crate::fabric::Tag;
use crate::fate::Fate;
use crate::link::{IncomingEnd, Link, OutgoingEnd};
use crate::pace::{Pacer, Progress};
use crate::settings::Settings;
use crate::wire::{HEADER_BYTES, Header, Kind, REASON_BYTES_MAX, Violation, stream_of, stripe_left};

/// A shorter silence is no sign of anything.
pub const DEADLINE_MIN: Duration = Duration::from_millis(100);
/// A sender that has waited this long says so, and says it again each time it has.
const ANNOUNCE_AFTER: Duration = Duration::from_secs(1);
/// What a receiver that looks at bytes as they come reads at once: it stays in the cache.
const SCRATCH_BYTES: usize = 64 << 10;

pub struct Peer {
    own_rank: usize,
    rank: usize,
    names: Vec<String>,
    fate: Arc<Fate>,
    desk: Mutex<Desk>,
    changed: Condvar,
    control: Sink,
    data: Vec<Sink>,
    lanes: Vec<Lane>,
    closing: AtomicBool,
    /// Wakes the thread of heartbeats.
    pulse: (Mutex<()>, Condvar),
    deadline: Duration,
    message_deadline: Duration,
    tick: Duration,
}

impl Peer {
    pub fn start(
        own_rank: usize,
        connections: Connections,
        names: Vec<String>,
        fate: Arc<Fate>,
        pacer: Option<Arc<Pacer>>,
        settings: &Settings,
    ) -> Result<(Arc<Peer>, Vec<JoinHandle<()>>)> {
        let rank = connections.peer;
        let unable = |cause: io::Error| Error::Settings { what: format!("cannot start a thread: {cause}") };
        let mut threads = Vec::new();
        let mut sinks = Vec::new();
        for writing in connections.outgoing {
            let fate = fate.clone();
            let go_on = move || if fate.failed() { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) };
            let (sink, thread) = Sink::new(writing, pacer.clone(), go_on).map_err(unable)?;
            sinks.push(sink);
            threads.extend(thread);
        }
        let mut incoming = connections.incoming.into_iter();
        let (control, data) = (sinks.remove(0), sinks);
        let reading = incoming.next().expect("control comes first");
        let peer = Arc::new(Peer {
            own_rank,
            rank,
            names,
            fate: fate.clone(),
            desk: Mutex::default(),
            changed: Condvar::new(),
            control,
            data,
            lanes: incoming.map(Lane::new).collect(),
            closing: AtomicBool::new(false),
            pulse: Default::default(),
            deadline: settings.deadline,
            message_deadline: settings.message_deadline,
            tick: TICK_MAX.min(settings.deadline / 8),
        });
        let alarmed = Arc::downgrade(&peer);
        fate.on_failure(Box::new(move |_| {
            if let Some(peer) = alarmed.upgrade() {
                peer.wake();
            }
        }));
        let (listener, beater) = (peer.clone(), peer.clone());
        let named = |what: &str| thread::Builder::new().name(format!("shoal-net {what} {rank}"));
        threads.push(named("control").spawn(move || listener.listen(reading)).map_err(unable)?);
        threads.push(named("pulse").spawn(move || beater.beat()).map_err(unable)?);
        Ok((peer, threads))
    }

    /// Begins the end of this worker's part; the threads say goodbye and stop.
    pub fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        // Taking a lock orders this after the check of whoever is about to wait.
        drop(self.desk());
        self.changed.notify_all();
        drop(self.pulse.0.lock().expect("nobody panics with it"));
        self.pulse.1.notify_all();
    }

    fn name(&self) -> &str {
        &self.names[self.rank]
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().expect("nobody panics with a desk")
    }

    fn lost(&self, why: String) -> Error {
        self.fate.fail(Error::PeerLost { rank: self.rank, name: self.name().to_owned(), why })
    }

    fn broke_rules(&self, violation: Violation) -> Error {
        self.lost(format!("it broke the protocol: {violation}"))
    }

    fn has_left(&self, tag: Tag) -> Error {
        Error::PeerLeft { rank: self.rank, name: self.name().to_owned(), what: format!("message {tag}") }
    }

    fn other_length(&self, tag: Tag, sent: u64, wanted: u64) -> Error {
        Error::Length { peer: self.name().to_owned(), tag, sent, wanted }
    }

    fn late(&self, tag: Tag, what: &'static str) -> Error {
        Error::Late { peer: self.name().to_owned(), tag, what, limit: self.message_deadline }
    }

    /// What a broken connection means. Control says it best: a goodbye or a reason comes before its end. So its reader
    /// is waited for, and the connection itself is the reason only if that hears nothing.
    fn verdict(&self, tag: Tag, why: String) -> Error {
        let until = Instant::now() + self.deadline;
        let mut desk = self.desk();
        loop {
            if let Err(failure) = self.fate.check() {
                return failure;
            }
            if desk.left {
                return self.has_left(tag);
            }
            if Instant::now() >= until {
                drop(desk);
                return self.lost(why);
            }
            desk = self.changed.wait_timeout(desk, self.tick).expect("nobody panics with a desk").0;
        }
    }

    /// Sends a control frame for a thread that sends or receives.
    fn tell(&self, header: &Header, payload: &[u8], progress: &mut Progress) -> Result<()> {
        let until = Instant::now() + self.deadline;
        let sent = self.control.put(header, payload, progress, || self.worth_waiting(until));
        sent.map_err(|error| self.verdict(header.tag, closed(&error)))
    }

    fn worth_waiting(&self, until: Instant) -> io::Result<()> {
        if self.fate.failed() || Instant::now() >= until {
            Err(io::ErrorKind::TimedOut.into())
        } else {
            Ok(())
        }
    }

    /// The thread of heartbeats.
    fn beat(&self) {
        let mut progress = Progress::default();
        loop {
            let last = match self.fate.check().err() {
                Some(failure) => self.abort_frame(&failure),
                None if self.closing.load(Ordering::SeqCst) => Some((Header::new(Kind::Bye), Vec::new())),
                None => None,
            };
            let (header, payload) = last.clone().unwrap_or((Header::new(Kind::Heartbeat), Vec::new()));
            // The failure is known: what is left to say has a tick of patience, more would hold up the end.
            let until = Instant::now() + if last.is_some() { self.deadline / 4 } else { self.deadline };
            let go_on = || match last.is_some() {
                true if Instant::now() >= until => Err(io::ErrorKind::TimedOut.into()),
                true => Ok(()),
                false => self.worth_waiting(until),
            };
            // If it cannot be sent the reader of this peer finds out why.
            let _ = self.control.put(&header, &payload, &mut progress, go_on);
            if last.is_some() {
                self.control.close();
                self.data.iter().for_each(Sink::close);
                return;
            }
            let pulse = self.pulse.0.lock().expect("nobody panics with it");
            if !self.fate.failed() && !self.closing.load(Ordering::SeqCst) {
                drop(self.pulse.1.wait_timeout(pulse, self.deadline / 4).expect("nobody panics with it"));
            }
        }
    }

    /// What this peer is told about a failure.
    fn abort_frame(&self, failure: &Error) -> Option<(Header, Vec<u8>)> {
        let (culprit, by, reason) = match failure {
            Error::PeerLost { rank, why, .. } => (*rank as u128 + 1, self.own_rank, why),
            Error::Aborted { by, reason } => {
                (0, self.names.iter().position(|name| name == by).unwrap_or(self.own_rank), reason)
            }
            other => (0, self.own_rank, &other.to_string()),
        };
        let mut end = reason.len().min(REASON_BYTES_MAX);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        let payload = reason.as_bytes()[..end].to_vec();
        let header = Header { length: end as u32, ..Header::about(Kind::Abort, Tag(culprit), by as u64) };
        Some((header, payload))
    }

    /// The thread of control frames.
    fn listen(&self, mut reading: Reading) {
        let mut heard = Instant::now();
        let mut bytes = [0; HEADER_BYTES];
        loop {
            let read = self.fill(&mut reading, &mut bytes, &mut heard).and_then(|()| {
                let header = Header::decode(&bytes).map_err(Trouble::Violation)?;
                let mut payload = vec![0; header.length as usize];
                self.fill(&mut reading, &mut payload, &mut heard)?;
                self.desk().accept(&header, payload).map_err(Trouble::Violation)
            });
            match read {
                Ok(Heard::Nothing) => {}
                Ok(Heard::Changed) => self.changed.notify_all(),
                Ok(Heard::Abort { culprit, by, reason }) => return self.hear_abort(culprit, by, reason),
                Err(Trouble::Stopped) if self.fate.failed() || self.closing.load(Ordering::SeqCst) => return,
                Err(Trouble::Stopped) => {
                    let silence = heard.elapsed().as_secs_f64();
                    return drop(self.lost(format!("nothing was heard of it for {silence:.1} s")));
                }
                Err(Trouble::Closed(_)) if self.desk().left => return self.changed.notify_all(),
                Err(Trouble::Closed(why)) => return drop(self.lost(why)),
                Err(Trouble::Violation(violation)) => return drop(self.broke_rules(violation)),
            }
        }
    }

    fn fill(
        &self,
        reading: &mut Reading,
        into: &mut [u8],
        heard: &mut Instant,
    ) -> std::result::Result<(), Trouble> {
        let mut filled = 0;
        while filled < into.len() {
            let mut go_on = || {
                let silent = heard.elapsed() >= self.deadline;
                !silent && !self.fate.failed() && !self.closing.load(Ordering::SeqCst)
            };
            filled += read_some(reading, &mut into[filled..], &mut go_on)?;
            *heard = Instant::now();
        }
        Ok(())
    }

    fn hear_abort(&self, culprit: Option<usize>, by: usize, reason: String) {
        let name = |rank: usize| self.names.get(rank).cloned().unwrap_or_else(|| self.name().to_owned());
        self.fate.fail(match culprit {
            Some(rank) => Error::PeerLost { rank, name: name(rank), why: reason },
            None => Error::Aborted { by: name(by), reason },
        });
    }
}

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
            open: None,
            progress,
            until,
        }))
    }

    fn incoming(&self, tag: Tag, length: usize) -> Result<Box<dyn IncomingEnd + '_>> {
        let peer = &*self.0;
        peer.fate.check()?;
        let word = peer.desk().want(tag, length as u64);
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
            self.put(way, part)?;
            self.offset += part.len() as u64;
            rest = after;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    fn write_some(&mut self, bytes: &[u8]) -> Result<usize> {
        if self.way()? == Kind::Eager {
            return self.write(bytes).map(|()| bytes.len());
        }
        let mut written = 0;
        while written < bytes.len() || self.open.is_some() {
            let rest = &bytes[written..];
            if self.open.is_none() && !self.open_frame(rest.len()) {
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
}

impl TcpOutgoing<'_> {
    fn way(&mut self) -> Result<Kind> {
        let way = match self.way {
            Some(way) => way,
            None => self.begin()?,
        };
        self.way = Some(way);
        Ok(way)
    }

    /// Takes a stream for a frame of the next bytes, if the link lets frames be cut short.
    fn open_frame(&mut self, bytes: usize) -> bool {
        let part = bytes.min(self.part_bytes(Kind::Data));
        let sink = stream_of(self.tag, self.offset, self.peer.data.len());
        let Some(writing) = self.peer.data[sink].take() else { return false };
        let (total, offset, length) = (self.length, self.offset, part as u32);
        let header = Header { kind: Kind::Data, tag: self.tag, total, offset, length }.encode();
        self.open = Some(OpenFrame { sink, writing, header, header_left: HEADER_BYTES, payload_left: part });
        true
    }

    /// Writes what goes of the open frame without waiting, and closes it when it is whole; bytes of payload written.
    fn go_on_with_frame(&mut self, bytes: &[u8]) -> Result<usize> {
        let Some(frame) = &mut self.open else { return Ok(0) };
        let switch = |writing: &Writing, wait: bool| writing.socket().set_nonblocking(!wait);
        let payload = &bytes[..bytes.len().min(frame.payload_left)];
        let mut written = 0;
        let mut result = switch(&frame.writing, false);
        while result.is_ok() && (frame.header_left + frame.payload_left > 0 || frame.writing.holds_back()) {
            let header = &frame.header[HEADER_BYTES - frame.header_left..];
            if header.is_empty() && written == payload.len() && frame.payload_left > 0 {
                break;
            }
            match frame.writing.write_some(header, &payload[written..]) {
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
        let result = result.and(switch(&frame.writing, true));
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
            (Ok(()), false) => self.peer.verdict(self.tag, closed(&error)),
        }
    }

    /// The most that can be in the next frame.
    fn part_bytes(&self, way: Kind) -> usize {
        let most = if way == Kind::Data { stripe_left(self.offset) } else { usize::MAX };
        most.min(self.peer.control.quantum_bytes())
    }

    fn put(&mut self, way: Kind, part: &[u8]) -> Result<()> {
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
        let sent = sink.put(&header, part, &mut self.progress, || peer.worth_waiting(until));
        sent.map_err(|error| self.unsent(error))
    }

    /// Waits until the message may go: when it is wanted, or at once when it is small and the window has room.
    fn begin(&mut self) -> Result<Kind> {
        let peer = self.peer;
        // A small message that has to wait is not wanted before its receiver knows of it.
        let mut announce_at = Instant::now()
            + if self.length <= crate::link::EAGER_MESSAGE_BYTES_MAX as u64 {
                Duration::ZERO
            } else {
                ANNOUNCE_AFTER
            };
        let mut announced = false;
        let mut desk = peer.desk();
        loop {
            peer.fate.check()?;
            match desk.begin(self.tag, self.length, announced) {
                _ if desk.left => return Err(peer.has_left(self.tag)),
                Leave::Eager => return Ok(Kind::Eager),
                Leave::Data => return Ok(Kind::Data),
                Leave::OtherLength(wanted) => {
                    drop(desk);
                    let refusal = Header::about(Kind::Refuse, self.tag, self.length);
                    peer.tell(&refusal, &[], &mut self.progress)?;
                    return Err(peer.other_length(self.tag, self.length, wanted));
                }
                Leave::Wait => {}
            }
            let now = Instant::now();
            if now >= self.until {
                return Err(peer.late(self.tag, "did not take it"));
            }
            if now >= announce_at {
                drop(desk);
                peer.tell(&Header::about(Kind::Announce, self.tag, self.length), &[], &mut self.progress)?;
                announced = true;
                announce_at = now + ANNOUNCE_AFTER;
                desk = peer.desk();
                continue;
            }
            let wait = announce_at.min(self.until).saturating_duration_since(now);
            desk = peer.changed.wait_timeout(desk, wait).expect("nobody panics with a desk").0;
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
    fn read(&mut self, into: &mut [u8]) -> Result<()> {
        let mut filled = 0;
        loop {
            filled += self.read_part(&mut into[filled..])?;
            if filled == into.len() {
                return Ok(());
            }
        }
    }

    fn read_with(&mut self, length: usize, each: &mut dyn FnMut(&[u8])) -> Result<()> {
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.resize(SCRATCH_BYTES.min(length.max(scratch.len())), 0);
        let mut left = length;
        loop {
            let part = left.min(SCRATCH_BYTES);
            self.read(&mut scratch[..part])?;
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
    fn read_part(&mut self, into: &mut [u8]) -> Result<usize> {
        loop {
            match &mut self.state {
                Receiving::Unknown => self.look()?,
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
                Receiving::Streams => self.next_frame()?,
                Receiving::Frame { source, left, .. } => {
                    let most = into.len().min(*left);
                    let (peer, until) = (self.peer, self.until);
                    let count = match most {
                        0 => Ok(0),
                        _ => read_some(&mut source.reading, &mut into[..most], &mut || {
                            peer.worth_waiting(until).is_ok()
                        }),
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
    fn look(&mut self) -> Result<()> {
        let peer = self.peer;
        let mut desk = peer.desk();
        loop {
            peer.fate.check()?;
            let (arrival, word) = desk.look(self.tag);
            match arrival {
                Arrival::Piece(bytes) => {
                    self.state = Receiving::Piece { bytes, used: 0 };
                    return Ok(());
                }
                Arrival::OtherLength(sent) => return Err(peer.other_length(self.tag, sent, self.length)),
                Arrival::Data => {
                    drop(desk);
                    self.state = Receiving::Streams;
                    return word.map_or(Ok(()), |word| peer.tell(&word, &[], &mut Progress::default()));
                }
                Arrival::NotYet if desk.left => return Err(peer.has_left(self.tag)),
                Arrival::NotYet => {}
            }
            let wait = self.until.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                return Err(peer.late(self.tag, "did not send it"));
            }
            desk = peer.changed.wait_timeout(desk, wait).expect("nobody panics with a desk").0;
        }
    }

    fn next_frame(&mut self) -> Result<()> {
        let (peer, tag, until) = (self.peer, self.tag, self.until);
        let lane = stream_of(tag, self.offset, peer.lanes.len());
        let go_on = || peer.worth_waiting(until).is_ok() && peer.desk().other_length(tag).is_none();
        let expected = |header: &Header| peer.desk().expects_data(header);
        let next = peer.lanes[lane].next(tag, peer.tick, go_on, expected);
        let (header, source) = match next {
            Ok(next) => next,
            Err(trouble) => {
                if let Some(sent) = peer.desk().other_length(tag) {
                    return Err(peer.other_length(tag, sent, self.length));
                }
                return Err(peer.trouble(trouble, tag, until));
            }
        };
        let judged = peer.desk().take_data(&header);
        self.state = Receiving::Frame { lane, source: Box::new(source), left: header.length as usize };
        judged.map_err(|violation| peer.broke_rules(violation))
    }
}

impl Peer {
    fn trouble(&self, trouble: Trouble, tag: Tag, until: Instant) -> Error {
        match trouble {
            Trouble::Closed(why) => self.verdict(tag, why),
            Trouble::Violation(violation) => self.broke_rules(violation),
            Trouble::Stopped => match self.fate.check() {
                Err(failure) => failure,
                Ok(()) if Instant::now() >= until => self.late(tag, "did not send it"),
                Ok(()) => self.verdict(tag, "its message stopped".to_owned()),
            },
        }
    }
}

impl Drop for TcpIncoming<'_> {
    fn drop(&mut self) {
        self.end_frame();
        let credit = {
            let mut desk = self.peer.desk();
            desk.done(self.tag);
            desk.credit()
        };
        if let Some(credit) = credit {
            // A peer that is gone needs none.
            let _ = self.peer.tell(&credit, &[], &mut Progress::default());
        }
    }
}
