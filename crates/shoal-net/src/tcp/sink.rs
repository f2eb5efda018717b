//! Where frames leave for a peer: whole frames, one thread at a time. On a shaped link a frame leaves when the link is
//! free, and where the link has a latency a thread of its own writes it when it is due, so that many can be under way.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use super::join::TICK_MAX;
use super::stream::Writing;
use crate::pace::{Pacer, Progress, is_about_due, sleep_until};
use crate::wire::{Header, Kind};

pub struct Sink {
    slot: Arc<Slot>,
    /// The connection once more, to end it whoever has it.
    socket: TcpStream,
    pacer: Option<Arc<Pacer>>,
    /// To the thread that writes what is due; gone when the sink is closed.
    under_way: Mutex<Option<mpsc::Sender<Delayed>>>,
    /// Frames that it has not written yet.
    waiting: Arc<AtomicUsize>,
    delayed: bool,
}

/// Where the connection lies while nobody writes.
struct Slot {
    place: Mutex<Place>,
    changed: Condvar,
}

struct Place {
    writing: Option<Writing>,
    /// Threads that wait for it: without any there is nobody to wake, which would be a call of the system.
    waiting: usize,
}

impl Slot {
    fn take(&self, go_on: &mut impl FnMut() -> io::Result<()>) -> io::Result<Writing> {
        loop {
            if let Some(writing) = self.take_until(Instant::now() + TICK_MAX) {
                return Ok(writing);
            }
            go_on()?;
        }
    }

    fn take_until(&self, until: Instant) -> Option<Writing> {
        let mut place = self.place.lock().expect("no writer panics");
        loop {
            if let Some(writing) = place.writing.take() {
                return Some(writing);
            }
            let wait = until.saturating_duration_since(Instant::now());
            if wait.is_zero() {
                return None;
            }
            place.waiting += 1;
            place = self.changed.wait_timeout(place, wait).expect("no writer panics").0;
            place.waiting -= 1;
        }
    }

    fn give_back(&self, writing: Writing) {
        let mut place = self.place.lock().expect("no writer panics");
        place.writing = Some(writing);
        if place.waiting > 0 {
            self.changed.notify_one();
        }
    }

    fn write(
        &self,
        header: &Header,
        payload: &[u8],
        mut go_on: impl FnMut() -> io::Result<()>,
    ) -> io::Result<()> {
        let mut writing = self.take(&mut go_on)?;
        let written = writing.write(&header.encode(), payload, go_on);
        self.give_back(writing);
        written
    }
}

struct Delayed {
    due: Instant,
    /// More of the same write follows.
    ahead: bool,
    header: Header,
    payload: Vec<u8>,
}

impl Sink {
    /// `go_on` says, for the thread of delayed frames, whether there is any point in waiting for the peer.
    pub fn new(
        writing: Writing,
        pacer: Option<Arc<Pacer>>,
        go_on: impl Fn() -> io::Result<()> + Send + 'static,
    ) -> io::Result<(Sink, Option<JoinHandle<()>>)> {
        let socket = writing.socket().try_clone()?;
        let slot = Arc::new(Slot {
            place: Mutex::new(Place { writing: Some(writing), waiting: 0 }),
            changed: Condvar::new(),
        });
        let delayed = pacer.as_ref().is_some_and(|pacer| pacer.delays());
        let waiting = Arc::new(AtomicUsize::new(0));
        let under_way = Mutex::new(None);
        let mut sink =
            Sink { slot: slot.clone(), socket, pacer, under_way, waiting: waiting.clone(), delayed };
        if !delayed {
            return Ok((sink, None));
        }
        let (sender, receiver) = mpsc::channel::<Delayed>();
        sink.under_way = Mutex::new(Some(sender));
        let socket = sink.socket.try_clone()?;
        let thread = thread::Builder::new().name("shoal-net delay".to_owned()).spawn(move || {
            for frame in receiver {
                if !frame.ahead || !is_about_due(frame.due) {
                    sleep_until(frame.due);
                }
                if slot.write(&frame.header, &frame.payload, &go_on).is_err() {
                    // Whoever reads from this peer finds out what became of it.
                    return;
                }
                waiting.fetch_sub(1, Ordering::Release);
            }
            let _ = socket.shutdown(Shutdown::Write);
        })?;
        Ok((sink, Some(thread)))
    }

    /// The connection itself, to write a frame as far as it goes without waiting; to be given back when the frame is
    /// whole. None where others have it until then, or the link is shaped, for there frames wait for their time.
    pub fn take(&self, until: Instant) -> Option<Writing> {
        if self.pacer.is_some() { None } else { self.slot.take_until(until) }
    }

    pub fn give_back(&self, writing: Writing) {
        self.slot.give_back(writing);
    }

    /// The most that should leave in one frame.
    pub fn quantum_bytes(&self) -> usize {
        self.pacer.as_ref().map_or(usize::MAX, |pacer| pacer.quantum_bytes())
    }

    /// Writes one frame whole, the `last` of what its sender has for now or one of several. `go_on` is asked while the
    /// peer takes nothing. An error of this crate in what comes back is no fault of the connection.
    pub fn put(
        &self,
        header: &Header,
        payload: &[u8],
        progress: &mut Progress,
        last: bool,
        mut go_on: impl FnMut() -> io::Result<()>,
    ) -> io::Result<()> {
        let Some(pacer) = &self.pacer else {
            return self.slot.write(header, payload, go_on);
        };
        // Why a fabric ends is told though nothing else may leave any more.
        let bytes = if header.kind == Kind::Abort { 0 } else { payload.len() };
        if !self.delayed {
            pacer.take(progress, bytes, last, &mut go_on)?.wait();
            return self.slot.write(header, payload, go_on);
        }
        let turn = {
            // Frames are lined up under the lock, so that they stand in the order of their times.
            let under_way = self.under_way.lock().expect("nobody panics with it");
            let turn = pacer.take(progress, bytes, last, &mut go_on)?;
            // What arrives soon, with nothing before it, needs neither a copy nor a thread to be woken: its sender would sleep
            // until it has left anyway.
            let alone = under_way.is_some() && self.waiting.load(Ordering::Acquire) == 0;
            if alone && is_about_due(turn.arrives) {
                drop(under_way);
                if last {
                    sleep_until(turn.arrives);
                }
                self.slot.write(header, payload, go_on)?;
                turn.wait();
                return Ok(());
            }
            let payload = payload.to_vec();
            self.waiting.fetch_add(1, Ordering::Relaxed);
            let delayed = Delayed { due: turn.arrives, ahead: !last, header: *header, payload };
            let sent = under_way.as_ref().map(|line| line.send(delayed));
            if !matches!(sent, Some(Ok(()))) {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            turn
        };
        turn.wait();
        Ok(())
    }

    /// Ends the connection in the middle of whatever it carries.
    pub fn sever(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    /// No more frames; what is under way still arrives.
    pub fn close(&self) {
        if self.delayed {
            self.under_way.lock().expect("nobody panics with it").take();
        } else {
            let _ = self.socket.shutdown(Shutdown::Write);
        }
    }
}
