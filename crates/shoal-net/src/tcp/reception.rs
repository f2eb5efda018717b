//! One port for many fabrics. Whoever connects says which fabric it means; its connection goes to whoever waits for that
//! fabric here, or waits itself, for a bounded time and among a bounded number: a peer may be told of a fabric a moment
//! before this worker is. What says nothing, or no hello, is turned away and holds nobody up.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustls::ServerConnection;

use super::join::{ATTEMPT_MAX, TICK_MAX, in_time, read_whole, shake_hands};
use super::stream::Reading;
use super::{Seat, check_settings, fabric_of, join};
use crate::error::{Error, Result};
use crate::fabric::Fabric;
use crate::identity::Identity;
use crate::settings::Settings;
use crate::wire::{HEADER_BYTES, Header, Hello};

/// Connections that may be about to say who they are. More are turned away.
const STRANGERS_MAX: usize = 256;
/// Connections that may wait for their fabric. The oldest make room.
const WAITING_MAX: usize = 1024;
/// How often connections that have waited too long are looked for.
const TIDY_EVERY: Duration = Duration::from_secs(1);
/// Strangers whose reasons are kept for errors.
const TURNED_AWAY_MAX: usize = 8;

/// How a reception knows who comes.
#[derive(Clone, Debug)]
pub enum Guard {
    /// By certificates of the fleet's authority; the names that count come with each fabric.
    Tls(Identity),
    /// Nobody proves anything. Only for addresses that cannot be reached from outside.
    Plain,
}

/// A connection whose maker has said what it is for.
pub(super) struct Arrival {
    pub(super) hello: Hello,
    pub(super) reading: Reading,
    pub(super) from: SocketAddr,
    came: Instant,
}

#[derive(Default)]
struct State {
    /// Who waits for connections of which fabric.
    expected: HashMap<u128, mpsc::Sender<Arrival>>,
    /// Connections of fabrics that nobody waits for yet, the oldest first.
    waiting: VecDeque<Arrival>,
    /// Why connections were turned away, the latest last.
    turned_away: VecDeque<String>,
    /// Those made here that may still stand.
    fabrics: Vec<Weak<Fabric>>,
    /// Nobody is reached from here, and nobody reaches it, before then.
    cut_until: Option<Instant>,
}

struct Shared {
    guard: Guard,
    state: Mutex<State>,
    strangers: AtomicUsize,
    closed: AtomicBool,
}

/// A worker's port, as long as it lives.
pub struct Reception {
    address: SocketAddr,
    listener: Arc<TcpListener>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Reception {
    pub fn open(listener: TcpListener, guard: Guard) -> Result<Reception> {
        let unable = |cause: io::Error| Error::Settings { what: format!("cannot listen: {cause}") };
        let address = listener.local_addr().map_err(unable)?;
        if matches!(guard, Guard::Plain) && !address.ip().is_loopback() {
            return Err(Error::PlainOutside { address });
        }
        listener.set_nonblocking(false).map_err(unable)?;
        set_socket_timeout(&listener, Timeout::Recv, Some(TIDY_EVERY))
            .map_err(|error| unable(error.into()))?;
        let shared = Arc::new(Shared {
            guard,
            state: Mutex::default(),
            strangers: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
        });
        let listener = Arc::new(listener);
        let (door, behind) = (listener.clone(), shared.clone());
        let named = thread::Builder::new().name("shoal-net reception".to_owned());
        let thread = named.spawn(move || behind.receive(&door)).map_err(unable)?;
        Ok(Reception { address, listener, shared, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connects this worker with its peers in a fabric, trying until the join deadline, or until `given_up` is set.
    pub fn connect(&self, seat: Seat, settings: &Settings, given_up: &AtomicBool) -> Result<Arc<Fabric>> {
        check_settings(settings)?;
        self.check(&seat)?;
        let arrivals = self.expect(seat.fabric)?;
        let joined = join::join(&seat, &arrivals, settings, given_up)?;
        let fabric = fabric_of(&seat, joined, settings)?;
        let mut state = self.shared.state();
        state.fabrics.retain(|fabric| fabric.strong_count() > 0);
        state.fabrics.push(Arc::downgrade(&fabric));
        let cut = state.is_cut();
        drop(state);
        if cut {
            fabric.sever();
        }
        Ok(fabric)
    }

    /// For drills: ends every connection without a word, and makes and takes none for so long.
    pub fn cut(&self, lasting: Duration) {
        let mut state = self.shared.state();
        state.cut_until = Some(Instant::now() + lasting);
        state.waiting.clear();
        let standing: Vec<Arc<Fabric>> = state.fabrics.iter().filter_map(Weak::upgrade).collect();
        drop(state);
        standing.iter().for_each(|fabric| fabric.sever());
    }

    pub(super) fn guard(&self) -> &Guard {
        &self.shared.guard
    }

    pub(super) fn is_cut(&self) -> bool {
        self.shared.state().is_cut()
    }

    fn check(&self, seat: &Seat) -> Result<()> {
        let size = seat.addresses.len();
        let wrong = |what: String| Err(Error::Settings { what });
        if let Some(rank) = seat.peers.iter().chain([&seat.rank]).find(|rank| **rank >= size) {
            return wrong(format!("there is no worker {rank} among {size}"));
        }
        if seat.peers.contains(&seat.rank) {
            return wrong(format!("worker {} is its own peer", seat.rank));
        }
        match &self.shared.guard {
            Guard::Tls(_) if seat.names.len() != size => {
                wrong(format!("{} names for {size} workers", seat.names.len()))
            }
            Guard::Tls(_) => Ok(()),
            Guard::Plain => match seat.addresses.iter().find(|address| !address.ip().is_loopback()) {
                Some(address) => Err(Error::PlainOutside { address: *address }),
                None => Ok(()),
            },
        }
    }

    /// From now on connections of this fabric come here; so do those that wait for it already.
    fn expect(&self, fabric: u128) -> Result<Arrivals<'_>> {
        let (sender, receiver) = mpsc::channel();
        let mut state = self.shared.state();
        if state.expected.contains_key(&fabric) {
            return Err(Error::Settings { what: format!("fabric {fabric:x} is being joined already") });
        }
        let (known, others) = std::mem::take(&mut state.waiting)
            .into_iter()
            .partition::<VecDeque<_>, _>(|arrival| arrival.hello.fabric == fabric);
        state.waiting = others;
        for arrival in known {
            // The receiver is right here.
            let _ = sender.send(arrival);
        }
        state.expected.insert(fabric, sender);
        Ok(Arrivals { reception: self, fabric, receiver })
    }
}

impl Drop for Reception {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        // Whoever waits for connections wakes up; where the system does not do that, within a look for old ones.
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so; there is nothing to add while ending.
            let _ = thread.join();
        }
    }
}

/// The connections of one fabric, as they come.
pub(super) struct Arrivals<'a> {
    reception: &'a Reception,
    fabric: u128,
    receiver: mpsc::Receiver<Arrival>,
}

impl Arrivals<'_> {
    pub(super) fn reception(&self) -> &Reception {
        self.reception
    }

    /// The next connection, if one comes in time.
    pub(super) fn next(&self, patience: Duration) -> Option<Arrival> {
        self.receiver.recv_timeout(patience).ok()
    }

    /// Who came to the port and was not let in, as far as it is remembered.
    pub(super) fn turned_away(&self) -> Vec<String> {
        let state = self.reception.shared.state();
        let others = state
            .waiting
            .iter()
            .map(|arrival| format!("{}: worker {} of another fabric", arrival.from.ip(), arrival.hello.rank));
        let mut lines: Vec<String> = state.turned_away.iter().cloned().chain(others).collect();
        lines.dedup();
        lines.truncate(TURNED_AWAY_MAX);
        lines
    }
}

impl Drop for Arrivals<'_> {
    fn drop(&mut self) {
        self.reception.shared.state().expected.remove(&self.fabric);
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics with a reception's state")
    }

    /// The thread that lets connections in.
    fn receive(self: &Arc<Shared>, listener: &TcpListener) {
        let mut introductions: Vec<JoinHandle<()>> = Vec::new();
        while !self.closed.load(Ordering::SeqCst) {
            let accepted = listener.accept();
            introductions.retain(|thread| !thread.is_finished());
            self.tidy();
            match accepted {
                // Closed unheard, as if nobody listened.
                Ok(_) if self.state().is_cut() => {}
                Ok((socket, from)) if self.strangers.load(Ordering::SeqCst) < STRANGERS_MAX => {
                    self.strangers.fetch_add(1, Ordering::SeqCst);
                    let shared = self.clone();
                    let named = thread::Builder::new().name("shoal-net introduction".to_owned());
                    let started = named.spawn(move || {
                        match shared.introduce(socket) {
                            Ok((hello, reading)) => shared.lead_on(hello, reading, from),
                            Err(cause) => shared.note(from, cause),
                        }
                        shared.strangers.fetch_sub(1, Ordering::SeqCst);
                    });
                    match started {
                        Ok(thread) => introductions.push(thread),
                        Err(_) => drop(self.strangers.fetch_sub(1, Ordering::SeqCst)),
                    }
                }
                Ok((_, from)) => self.note(from, "too many were about to say who they are".to_owned()),
                Err(error) if super::stream::is_tick(&error) => {}
                // Out of descriptors, or a connection that ended before it began: neither passes by hurrying.
                Err(_) => thread::sleep(TICK_MAX.min(Duration::from_millis(2))),
            }
        }
        self.state().waiting.clear();
        for thread in introductions {
            let _ = thread.join();
        }
    }

    /// Closes connections whose makers have given them up by now.
    fn tidy(&self) {
        let mut state = self.state();
        while state.waiting.front().is_some_and(|arrival| arrival.came.elapsed() >= ATTEMPT_MAX) {
            let late = state.waiting.pop_front().expect("it was looked at");
            let line = format!("{}: worker {} of another fabric", late.from.ip(), late.hello.rank);
            state.remember(line);
        }
    }

    fn note(&self, from: SocketAddr, cause: String) {
        self.state().remember(format!("{}: {cause}", from.ip()));
    }

    /// Finds out what a connection is for. Strangers have the time of an attempt, and none once the port is closed.
    fn introduce(&self, mut socket: TcpStream) -> std::result::Result<(Hello, Reading), String> {
        let until = Instant::now() + ATTEMPT_MAX;
        let still = || match self.closed.load(Ordering::SeqCst) {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => in_time(until),
        };
        let text = |error: io::Error| error.to_string();
        join::prepare(&socket, TICK_MAX).map_err(text)?;
        let mut reading = match &self.guard {
            Guard::Plain => Reading::Plain(socket),
            Guard::Tls(identity) => {
                let mut tls =
                    ServerConnection::new(identity.server.clone()).map_err(|error| error.to_string())?;
                shake_hands(still, || tls.is_handshaking().then(|| tls.complete_io(&mut socket)))
                    .map_err(text)?;
                Reading::tls(tls, socket)
            }
        };
        let mut hello = [0; HEADER_BYTES];
        read_whole(still, &mut hello, |into| reading.read(into)).map_err(text)?;
        let header = Header::decode(&hello).map_err(|violation| violation.to_string())?;
        let hello = Hello::of(&header).map_err(|violation| violation.to_string())?;
        Ok((hello, reading))
    }

    /// To whoever waits for its fabric, or among those who wait.
    fn lead_on(&self, hello: Hello, reading: Reading, from: SocketAddr) {
        let arrival = Arrival { hello, reading, from, came: Instant::now() };
        let mut state = self.state();
        if state.is_cut() {
            return;
        }
        match state.expected.get(&hello.fabric) {
            // Whoever expected it may just have given up: then the connection closes.
            Some(expecting) => drop(expecting.send(arrival)),
            None => {
                if state.waiting.len() == WAITING_MAX {
                    state.waiting.pop_front();
                }
                state.waiting.push_back(arrival);
            }
        }
    }
}

impl State {
    fn is_cut(&self) -> bool {
        self.cut_until.is_some_and(|until| Instant::now() < until)
    }

    fn remember(&mut self, line: String) {
        if !self.turned_away.contains(&line) {
            if self.turned_away.len() == TURNED_AWAY_MAX {
                self.turned_away.pop_front();
            }
            self.turned_away.push_back(line);
        }
    }
}
