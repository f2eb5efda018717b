//! One peer's life. Its control frames are read, and its silence judged, by whoever waits for one of them, and by a thread of
//! its own while nobody does. Another thread sends heartbeats, and at the end goodbye or the reason. Everything else is done
//! by the threads that send and receive.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::ear::Ear;
use super::join::{Connections, TICK_MAX};
use super::lane::{Lane, Trouble, closed};
use super::sink::Sink;
use super::spin::{Leisure, Spin, Spins};
use crate::desk::{Desk, Heard};
use crate::error::{Error, Result};
use crate::fabric::Tag;
use crate::fate::Fate;
use crate::link::{Meanwhile, Nothing};
use crate::pace::{Pacer, Progress};
use crate::settings::Settings;
use crate::wire::{Header, Kind, REASON_BYTES_MAX, Violation};

/// A shorter silence is no sign of anything.
pub const DEADLINE_MIN: Duration = Duration::from_millis(100);

/// Where nobody has waited for so long the thread of control frames listens: until then those who wait do, and it would only be
/// in their way.
const STANDBY: Duration = Duration::from_millis(10);

/// Where those meet who wait for a word of the peer.
pub struct Counter {
    pub desk: Desk,
    /// Away while somebody listens, and for good once there is nothing more to hear.
    ear: Option<Ear>,
    is_deaf: bool,
    /// The ear is away only for a look.
    is_looking: bool,
    /// How often the desk has changed by what was heard.
    changes: u64,
    /// When somebody last waited here.
    attended: Option<Instant>,
    /// Threads that wait for others to listen: without any there is nobody to wake, which would be a call of the system.
    waiting: usize,
}

pub struct Peer {
    own_rank: usize,
    rank: usize,
    names: Vec<String>,
    pub fate: Arc<Fate>,
    counter: Mutex<Counter>,
    changed: Condvar,
    /// Of those who wait for the desk to change.
    pub spins: Spins,
    pub control: Sink,
    pub data: Vec<Sink>,
    pub lanes: Vec<Lane>,
    closing: AtomicBool,
    /// Wakes the threads of heartbeats and of control frames.
    pulse: (Mutex<()>, Condvar),
    deadline: Duration,
    pub message_deadline: Duration,
    pub tick: Duration,
}

impl Peer {
    pub fn start(
        own_rank: usize,
        connections: Connections,
        names: Vec<String>,
        fate: Arc<Fate>,
        pacer: Option<Arc<Pacer>>,
        leisure: &Leisure,
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
        let ear = Ear::new(incoming.next().expect("control comes first"));
        let desk = Desk::default();
        let peer = Arc::new(Peer {
            own_rank,
            rank,
            names,
            fate: fate.clone(),
            counter: Mutex::new(Counter {
                desk,
                ear: Some(ear),
                is_deaf: false,
                is_looking: false,
                changes: 0,
                attended: None,
                waiting: 0,
            }),
            changed: Condvar::new(),
            spins: Spins::new(leisure),
            control,
            data,
            lanes: incoming.map(|reading| Lane::new(reading, leisure)).collect(),
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
        threads.push(named("control").spawn(move || listener.stand_by()).map_err(unable)?);
        threads.push(named("pulse").spawn(move || beater.beat()).map_err(unable)?);
        Ok((peer, threads))
    }

    /// Begins the end of this worker's part; the threads say goodbye and stop.
    pub fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
        self.wake();
    }

    /// Ends the connections as if a cable had been cut: what is left to say has no way to go.
    pub fn sever(&self) {
        self.control.sever();
        self.data.iter().for_each(Sink::sever);
    }

    fn wake(&self) {
        // Taking a lock orders this after the check of whoever is about to wait.
        drop(self.counter());
        self.changed.notify_all();
        drop(self.pulse.0.lock().expect("nobody panics with it"));
        self.pulse.1.notify_all();
    }

    pub fn name(&self) -> &str {
        &self.names[self.rank]
    }

    pub fn counter(&self) -> MutexGuard<'_, Counter> {
        self.counter.lock().expect("nobody panics at a counter")
    }

    pub fn lost(&self, why: String) -> Error {
        self.fate.fail(Error::PeerLost { rank: self.rank, name: self.name().to_owned(), why })
    }

    pub fn broke_rules(&self, violation: Violation) -> Error {
        self.lost(format!("it broke the protocol: {violation}"))
    }

    pub fn has_left(&self, tag: Tag) -> Error {
        Error::PeerLeft { rank: self.rank, name: self.name().to_owned(), what: format!("message {tag}") }
    }

    pub fn other_length(&self, tag: Tag, sent: u64, wanted: u64) -> Error {
        Error::Length { peer: self.name().to_owned(), tag, sent, wanted }
    }

    pub fn late(&self, tag: Tag, what: &'static str) -> Error {
        Error::Late { peer: self.name().to_owned(), tag, what, limit: self.message_deadline }
    }

    /// What a broken connection means. Control says it best: a goodbye or a reason comes before its end. So its reader
    /// is waited for, and the connection itself is the reason only if that hears nothing.
    pub fn verdict(&self, tag: Tag, why: String) -> Error {
        let until = Instant::now() + self.deadline;
        let (mut spin, mut counter) = (self.spins.begin(), self.counter());
        loop {
            if let Err(failure) = self.fate.check() {
                return failure;
            }
            if counter.desk.left {
                return self.has_left(tag);
            }
            if Instant::now() >= until {
                drop(counter);
                return self.lost(why);
            }
            counter = self.wait(counter, &mut spin, until, &mut Nothing);
        }
    }

    /// What it means that a data stream gave nothing.
    pub fn trouble(&self, trouble: Trouble, tag: Tag, until: Instant) -> Error {
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

    /// Sends a control frame for a thread that sends or receives.
    pub fn tell(&self, header: &Header, payload: &[u8], progress: &mut Progress) -> Result<()> {
        let until = Instant::now() + self.deadline;
        let sent = self.control.put(header, payload, progress, true, || self.worth_waiting(until));
        sent.map_err(|error| self.unsent(header.tag, error))
    }

    /// What it means that something could not be sent: what is wrong here ends the fabric by itself.
    pub fn unsent(&self, tag: Tag, error: io::Error) -> Error {
        match error.downcast::<Error>() {
            Ok(own) => self.fate.fail(own),
            Err(error) => self.verdict(tag, closed(&error)),
        }
    }

    pub fn worth_waiting(&self, until: Instant) -> io::Result<()> {
        if self.fate.failed() || Instant::now() >= until {
            Err(io::ErrorKind::TimedOut.into())
        } else {
            Ok(())
        }
    }

    /// The thread of heartbeats.
    fn beat(&self) {
        loop {
            let last = match self.fate.check().err() {
                Some(failure) => Some(self.abort_frame(&failure)),
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
            let _ = self.control.put(&header, &payload, &mut Progress::default(), true, go_on);
            if last.is_some() {
                self.control.close();
                self.data.iter().for_each(Sink::close);
                return;
            }
            self.rest(self.deadline / 4);
        }
    }

    /// Sleeps so long, unless the end begins.
    fn rest(&self, time: Duration) {
        let pulse = self.pulse.0.lock().expect("nobody panics with it");
        if !self.fate.failed() && !self.closing.load(Ordering::SeqCst) {
            drop(self.pulse.1.wait_timeout(pulse, time).expect("nobody panics with it"));
        }
    }

    /// What this peer is told about a failure.
    fn abort_frame(&self, failure: &Error) -> (Header, Vec<u8>) {
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
        (header, payload)
    }

    /// Waits until what was seen at the counter may have changed, or until then; what there is to do meanwhile is done first. Who
    /// finds nobody listening listens.
    pub fn wait<'a>(
        &'a self,
        mut counter: MutexGuard<'a, Counter>,
        spin: &mut Spin,
        until: Instant,
        meanwhile: &mut dyn Meanwhile,
    ) -> MutexGuard<'a, Counter> {
        counter.attended = Some(Instant::now());
        let seen = counter.changes;
        counter = self.listen(counter, Duration::ZERO);
        if counter.changes != seen {
            return counter;
        }
        drop(counter);
        // Without the ear, for it may be waited for there too.
        if meanwhile.advance() || spin.again() {
            return self.counter();
        }
        meanwhile.part();
        counter = self.counter();
        let patience = until.saturating_duration_since(Instant::now());
        if counter.changes != seen || self.fate.failed() || patience.is_zero() {
            return counter;
        }
        if counter.ear.is_some() {
            return self.listen(counter, patience.min(self.tick));
        }
        if counter.is_looking {
            // It is back at once, and who only looked wakes nobody.
            drop(counter);
            thread::yield_now();
            return self.counter();
        }
        counter.waiting += 1;
        counter = self.changed.wait_timeout(counter, patience).expect("nobody panics at a counter").0;
        counter.waiting -= 1;
        counter
    }

    /// Takes in the next frame if it comes before that much time has passed, unless somebody else is listening.
    fn listen<'a>(
        &'a self,
        mut counter: MutexGuard<'a, Counter>,
        patience: Duration,
    ) -> MutexGuard<'a, Counter> {
        let Some(mut ear) = counter.ear.take() else { return counter };
        let only_looks = patience.is_zero();
        counter.is_looking = only_looks;
        drop(counter);
        let next = ear.next(patience);
        counter = self.counter();
        counter.is_looking = false;
        let silence = ear.silence();
        let heard = match next {
            Ok(Some((header, payload))) => counter.desk.accept(&header, payload).map_err(Trouble::Violation),
            Ok(None) if !only_looks && silence >= self.deadline => Err(Trouble::Stopped),
            Ok(None) => Ok(Heard::Nothing),
            Err(trouble) => Err(trouble),
        };
        let is_news = !matches!(heard, Ok(Heard::Nothing));
        counter.changes += u64::from(is_news);
        if counter.waiting > 0 && (is_news || !only_looks) {
            self.changed.notify_all();
        }
        if let Ok(Heard::Nothing | Heard::Changed) = heard {
            counter.ear = Some(ear);
            return counter;
        }
        counter.is_deaf = true;
        let has_left = counter.desk.left;
        // Whatever ends the fabric wakes everyone who waits here.
        drop(counter);
        match heard {
            Ok(Heard::Nothing | Heard::Changed) => {}
            // Who has said goodbye owes nothing more.
            Err(Trouble::Stopped | Trouble::Closed(_)) if has_left => {}
            Ok(Heard::Abort { culprit, by, reason }) => self.hear_abort(culprit, by, reason),
            Err(Trouble::Stopped) => {
                drop(self.lost(format!("nothing was heard of it for {:.1} s", silence.as_secs_f64())));
            }
            Err(Trouble::Closed(why)) => drop(self.lost(why)),
            Err(Trouble::Violation(violation)) => drop(self.broke_rules(violation)),
        }
        self.counter()
    }

    /// The thread of control frames, for those that nobody waits for.
    fn stand_by(&self) {
        let standby = STANDBY.min(self.tick);
        loop {
            let counter = self.counter();
            if counter.is_deaf || self.fate.failed() || self.closing.load(Ordering::SeqCst) {
                return;
            }
            let is_attended = counter.attended.is_some_and(|attended| attended.elapsed() < standby);
            let is_listening = counter.ear.is_none();
            if !is_listening && !is_attended {
                drop(self.listen(counter, self.tick));
                continue;
            }
            drop(counter);
            // Who listens now may do so for long.
            self.rest(if is_listening { self.tick } else { standby });
        }
    }

    fn hear_abort(&self, culprit: Option<usize>, by: usize, reason: String) {
        let name = |rank: usize| self.names.get(rank).cloned().unwrap_or_else(|| self.name().to_owned());
        self.fate.fail(match culprit {
            Some(rank) => Error::PeerLost { rank, name: name(rank), why: reason },
            None => Error::Aborted { by: name(by), reason },
        });
    }
}
