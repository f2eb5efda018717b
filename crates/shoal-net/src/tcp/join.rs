//! How the connections of a fabric come to be. Every worker makes the connections on which it sends, and lets in those on
//! which it receives, which its reception leads to it: whoever connects says which worker of which fabric it is, and under
//! TLS its certificate must bear that worker's name.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use rustls::ClientConnection;

use super::Seat;
use super::reception::{Arrival, Arrivals, Guard, Reception};
use super::stream::{Reading, Writing, is_tick};
use crate::error::{Error, Result};
use crate::fabric::Tag;
use crate::identity;
use crate::settings::Settings;
use crate::wire::{HEADER_BYTES, Header, Hello, Kind};

/// Data streams in one direction of a pair.
pub const STREAMS_MAX: usize = 64;
/// How long one attempt at a connection may take; then it is tried again.
pub const ATTEMPT_MAX: Duration = Duration::from_secs(5);
/// The pause between attempts.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
/// How often a thread that waits for a peer looks up.
pub const TICK_MAX: Duration = Duration::from_millis(50);

/// The connections with one peer: control first, then data.
pub struct Connections {
    pub peer: usize,
    pub outgoing: Vec<Writing>,
    pub incoming: Vec<Reading>,
}

/// What is needed to make and judge connections.
struct Joining<'a> {
    seat: &'a Seat,
    reception: &'a Reception,
    /// Connections in one direction of a pair.
    lines: usize,
    until: Instant,
    tick: Duration,
    /// Of whoever wants the fabric, and of this joining.
    given_up: &'a AtomicBool,
    failed: AtomicBool,
    /// Why connections were turned away, for the error if the join fails.
    turned_away: Mutex<Vec<String>>,
}

pub(super) fn join(
    seat: &Seat,
    arrivals: &Arrivals,
    settings: &Settings,
    given_up: &AtomicBool,
) -> Result<Vec<Connections>> {
    let joining = Joining {
        seat,
        reception: arrivals.reception(),
        lines: settings.streams + 1,
        until: Instant::now() + settings.join_deadline,
        tick: TICK_MAX.min(settings.deadline / 8),
        given_up,
        failed: AtomicBool::new(false),
        turned_away: Mutex::new(Vec::new()),
    };
    let peers = seat.peers.iter().copied();
    let (mut incoming, outgoing) = thread::scope(|scope| {
        let joining = &joining;
        let making: Vec<_> = peers.map(|peer| (peer, scope.spawn(move || joining.make_all(peer)))).collect();
        let making = scope.spawn(move || {
            let made = |(peer, made): (usize, thread::ScopedJoinHandle<'_, _>)| {
                (peer, made.join().expect("joining does not panic"))
            };
            let outgoing: Vec<(usize, Attempt<Vec<Writing>>)> = making.into_iter().map(made).collect();
            if outgoing.iter().any(|(_, made)| made.is_err()) {
                joining.failed.store(true, Ordering::SeqCst);
            }
            outgoing
        });
        let incoming = joining.accept_all(arrivals);
        (incoming, making.join().expect("joining does not panic"))
    });
    let names = seat.titles();
    let (mut missing, mut ranks, mut joined) = (Vec::new(), Vec::new(), Vec::new());
    for (peer, made) in outgoing {
        let came = &mut incoming[peer];
        let lacking = match made {
            Err(cause) => cause,
            Ok(_) if came.iter().any(Option::is_none) => "it did not connect".to_owned(),
            Ok(outgoing) => {
                let incoming = came.iter_mut().filter_map(Option::take).collect();
                joined.push(Connections { peer, outgoing, incoming });
                continue;
            }
        };
        missing.push(format!("{}: {lacking}", names[peer]));
        ranks.push(peer);
    }
    if missing.is_empty() {
        return Ok(joined);
    }
    let mut turned_away = joining.turned_away.into_inner().expect("nobody panics with it");
    turned_away.extend(arrivals.turned_away());
    let (name, limit) = (names[seat.rank].clone(), settings.join_deadline);
    Err(Error::Join { name, missing, ranks, turned_away, limit })
}

type Attempt<T> = std::result::Result<T, String>;

impl Joining<'_> {
    fn over(&self) -> bool {
        let given_up = self.given_up.load(Ordering::SeqCst) || self.failed.load(Ordering::SeqCst);
        given_up || Instant::now() >= self.until
    }

    /// Makers have the time of an attempt, and none once there is no point in it.
    fn still(&self, until: Instant) -> io::Result<()> {
        if self.over() { Err(io::ErrorKind::TimedOut.into()) } else { in_time(until) }
    }

    fn hello(&self, line: usize) -> Header {
        let Seat { rank, fabric, addresses, .. } = self.seat;
        let (rank, fabric, size) = (*rank, *fabric, addresses.len());
        Hello { fabric, rank, size, line, lines: self.lines }.header()
    }

    fn welcome(&self, rank: usize) -> Header {
        Header { tag: Tag(self.seat.fabric), total: rank as u64, ..Header::new(Kind::Welcome) }
    }

    /// All connections to one peer, each tried until it stands or time is over.
    fn make_all(&self, peer: usize) -> Attempt<Vec<Writing>> {
        (0..self.lines)
            .map(|line| {
                let mut before = None;
                loop {
                    match self.make(peer, line) {
                        Ok(made) => return Ok(made),
                        // The last attempt was cut short; why the one before failed says more.
                        Err(cause) if self.over() => return Err(before.unwrap_or(cause)),
                        Err(cause) => before = Some(cause),
                    }
                    thread::sleep(RETRY_PAUSE);
                }
            })
            .collect()
    }

    fn make(&self, peer: usize, line: usize) -> Attempt<Writing> {
        let until = (Instant::now() + ATTEMPT_MAX).min(self.until);
        let patience = until.saturating_duration_since(Instant::now()).max(self.tick);
        let text = |error: io::Error| error.to_string();
        if self.reception.is_cut() {
            return Err("this worker is cut off".to_owned());
        }
        let mut socket = TcpStream::connect_timeout(&self.seat.addresses[peer], patience).map_err(text)?;
        prepare(&socket, self.tick).map_err(text)?;
        leave_unpaced_on_loopback(&socket).map_err(text)?;
        let mut answer = [0; HEADER_BYTES];
        let made = match self.reception.guard() {
            Guard::Plain => {
                let mut made = Writing::Plain(socket);
                made.write(&self.hello(line).encode(), &[], || self.still(until)).map_err(text)?;
                let Writing::Plain(socket) = &mut made else { unreachable!("it was made plain") };
                read_whole(|| self.still(until), &mut answer, |into| io::Read::read(socket, into))
                    .map_err(text)?;
                made
            }
            Guard::Tls(identity) => {
                let name =
                    identity::server_name(&self.seat.names[peer]).map_err(|error| error.to_string())?;
                let mut tls = ClientConnection::new(identity.client.clone(), name)
                    .map_err(|error| error.to_string())?;
                shake_hands(
                    || self.still(until),
                    || tls.is_handshaking().then(|| tls.complete_io(&mut socket)),
                )
                .map_err(text)?;
                let mut made = Writing::Tls(Box::new(tls), socket);
                made.write(&self.hello(line).encode(), &[], || self.still(until)).map_err(text)?;
                let Writing::Tls(tls, socket) = &mut made else { unreachable!("it was made with TLS") };
                let mut stream = rustls::Stream::new(tls.as_mut(), socket);
                read_whole(|| self.still(until), &mut answer, |into| io::Read::read(&mut stream, into))
                    .map_err(text)?;
                made
            }
        };
        let answer = Header::decode(&answer).map_err(|violation| violation.to_string())?;
        if answer != self.welcome(peer) {
            return Err("who answers there is another worker".to_owned());
        }
        Ok(made)
    }

    /// Lets peers in until all have come or there is no point in it any more; by peer and line.
    fn accept_all(&self, arrivals: &Arrivals) -> Vec<Vec<Option<Reading>>> {
        let size = self.seat.addresses.len();
        let mut came: Vec<Vec<Option<Reading>>> =
            (0..size).map(|_| (0..self.lines).map(|_| None).collect()).collect();
        let mut left = self.seat.peers.len() * self.lines;
        while left > 0 && !self.over() {
            let Some(arrival) = arrivals.next(self.tick) else { continue };
            let from = arrival.from;
            match self.let_in(arrival) {
                // A connection made anew replaces one whose answer was lost.
                Ok((peer, line, reading)) => {
                    left -= usize::from(came[peer][line].replace(reading).is_none());
                }
                Err(cause) => self.note(from, cause),
            }
        }
        came
    }

    fn note(&self, from: SocketAddr, cause: String) {
        let mut turned_away = self.turned_away.lock().expect("nobody panics with it");
        let line = format!("{}: {cause}", from.ip());
        if turned_away.len() < TURNED_AWAY_MAX && !turned_away.contains(&line) {
            turned_away.push(line);
        }
    }

    /// Makes sure who connected, and answers.
    fn let_in(&self, arrival: Arrival) -> Attempt<(usize, usize, Reading)> {
        let Arrival { hello, mut reading, .. } = arrival;
        let until = (Instant::now() + ATTEMPT_MAX).min(self.until);
        let text = |error: io::Error| error.to_string();
        self.judge(&hello)?;
        if let Reading::Tls(tls, _) = &reading {
            let name =
                identity::server_name(&self.seat.names[hello.rank]).map_err(|error| error.to_string())?;
            let certificate = tls.peer_certificates().and_then(|chain| chain.first());
            if !certificate.is_some_and(|certificate| identity::bears_name(certificate, &name)) {
                return Err(format!(
                    "it says that it is worker {}, and its certificate is another's",
                    hello.rank
                ));
            }
        }
        prepare(reading.socket(), self.tick).map_err(text)?;
        reading.answer(&self.welcome(self.seat.rank).encode(), || self.still(until)).map_err(text)?;
        Ok((hello.rank, hello.line, reading))
    }

    fn judge(&self, hello: &Hello) -> Attempt<()> {
        let (own, own_size) = (self.seat.rank, self.seat.addresses.len());
        let Hello { rank, size, line, lines, .. } = *hello;
        if size != own_size || rank >= size || rank == own {
            return Err(format!(
                "it says that it is worker {rank} of {size}, and this is worker {own} of {own_size}"
            ));
        }
        if !self.seat.peers.contains(&rank) {
            return Err(format!("worker {rank} has nothing to exchange with worker {own}"));
        }
        if lines != self.lines || line >= lines {
            let (theirs, ours) = (lines.max(1) - 1, self.lines - 1);
            return Err(format!("worker {rank} has {theirs} streams, and this worker {ours}"));
        }
        Ok(())
    }
}

/// Strangers whose reasons are kept for the error.
const TURNED_AWAY_MAX: usize = 8;

pub(super) fn prepare(socket: &TcpStream, tick: Duration) -> io::Result<()> {
    socket.set_nonblocking(false)?;
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(tick))?;
    socket.set_write_timeout(Some(tick))
}

/// Where the system paces what a connection sends (BBR does), every frame waits for timers. A network has use for that; inside
/// of one machine it takes a third of the speed, and it would blur what a lab's links are held to.
fn leave_unpaced_on_loopback(socket: &TcpStream) -> io::Result<()> {
    if socket.peer_addr()?.ip().is_loopback() {
        // Every kernel has this one and lets everybody choose it. Without it the connection is as good as any other.
        let _ = sockopt::set_tcp_congestion(socket, "reno");
    }
    Ok(())
}

pub(super) fn in_time(until: Instant) -> io::Result<()> {
    if Instant::now() < until { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
}

pub(super) fn shake_hands(
    still_in_time: impl Fn() -> io::Result<()>,
    mut go_on: impl FnMut() -> Option<io::Result<(usize, usize)>>,
) -> io::Result<()> {
    while let Some(result) = go_on() {
        match result {
            Ok(_) => {}
            Err(error) if is_tick(&error) => still_in_time()?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

pub(super) fn read_whole(
    still_in_time: impl Fn() -> io::Result<()>,
    into: &mut [u8],
    mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
) -> io::Result<()> {
    let mut filled = 0;
    while filled < into.len() {
        match read(&mut into[filled..]) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed")),
            Ok(count) => filled += count,
            Err(error) if is_tick(&error) => still_in_time()?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
