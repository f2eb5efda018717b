//! How the connections of a fabric come to be. Every worker makes the connections on which it sends, and lets in those on
//! which it receives: whoever connects says which worker of which fabric it is, and under TLS its certificate must bear
//! that worker's name. Whatever else comes to the port is turned away and holds nobody up.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rustls::{ClientConnection, ServerConnection};

use super::stream::{Reading, Writing, is_tick};
use super::{Endpoint, Security};
use crate::error::{Error, Result};
use crate::fabric::Tag;
use crate::identity;
use crate::settings::Settings;
use crate::wire::{HEADER_BYTES, Header, Kind};

/// Data streams in one direction of a pair.
pub const STREAMS_MAX: usize = 64;
/// How long one attempt at a connection may take; then it is tried again.
const ATTEMPT_MAX: Duration = Duration::from_secs(5);
/// The pause between attempts, and between looks at the listener.
const RETRY_PAUSE: Duration = Duration::from_millis(20);
const ACCEPT_PAUSE: Duration = Duration::from_millis(2);
/// Connections that may be about to say who they are. More are turned away.
const STRANGERS_MAX: usize = 256;
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
    rank: usize,
    size: usize,
    /// Connections in one direction of a pair.
    lines: usize,
    fabric: u128,
    security: &'a Security,
    addresses: &'a [SocketAddr],
    until: Instant,
    tick: Duration,
    given_up: AtomicBool,
    /// Everyone has come, and nobody else is waited for.
    all_in: AtomicBool,
    /// Why connections were turned away, for the error if the join fails.
    turned_away: Mutex<Vec<String>>,
}

pub fn join(endpoint: Endpoint, names: &[String], settings: &Settings) -> Result<Vec<Connections>> {
    let joining = Joining {
        rank: endpoint.rank,
        size: endpoint.addresses.len(),
        lines: settings.streams + 1,
        fabric: endpoint.fabric,
        security: &endpoint.security,
        addresses: &endpoint.addresses,
        until: Instant::now() + settings.join_deadline,
        tick: TICK_MAX.min(settings.deadline / 8),
        given_up: AtomicBool::new(false),
        all_in: AtomicBool::new(false),
        turned_away: Mutex::new(Vec::new()),
    };
    let peers = || (0..names.len()).filter(|peer| *peer != endpoint.rank);
    let (incoming, outgoing) = thread::scope(|scope| {
        let accepting = scope.spawn(|| joining.accept_all(&endpoint.listener));
        let making: Vec<_> = peers()
            .map(|peer| {
                (
                    peer,
                    scope.spawn({
                        let joining = &joining;
                        move || joining.make_all(peer)
                    }),
                )
            })
            .collect();
        let outgoing: Vec<_> = making
            .into_iter()
            .map(|(peer, made)| (peer, made.join().expect("joining does not panic")))
            .collect();
        if outgoing.iter().any(|(_, made)| made.is_err()) {
            joining.given_up.store(true, Ordering::SeqCst);
        }
        (accepting.join().expect("accepting does not panic"), outgoing)
    });
    let mut missing = Vec::new();
    let mut joined = Vec::new();
    for ((peer, made), mut came) in outgoing.into_iter().zip(incoming) {
        match made {
            Err(cause) => missing.push(format!("{}: {cause}", names[peer])),
            Ok(_) if came.iter().any(Option::is_none) => {
                missing.push(format!("{}: it did not connect", names[peer]))
            }
            Ok(outgoing) => {
                let incoming = came.iter_mut().filter_map(Option::take).collect();
                joined.push(Connections { peer, outgoing, incoming });
            }
        }
    }
    if missing.is_empty() {
        return Ok(joined);
    }
    let turned_away = joining.turned_away.into_inner().expect("nobody panics with it");
    Err(Error::Join {
        name: names[endpoint.rank].clone(),
        missing,
        turned_away,
        limit: settings.join_deadline,
    })
}

type Attempt<T> = std::result::Result<T, String>;

impl Joining<'_> {
    fn over(&self) -> bool {
        self.given_up.load(Ordering::SeqCst) || Instant::now() >= self.until
    }

    fn prepare(&self, socket: &TcpStream) -> io::Result<()> {
        socket.set_nonblocking(false)?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(self.tick))?;
        socket.set_write_timeout(Some(self.tick))
    }

    fn hello(&self, line: usize) -> Header {
        let total = self.rank as u64 | (self.size as u64) << 32;
        let offset = line as u64 | (self.lines as u64) << 32;
        Header { tag: Tag(self.fabric), total, offset, ..Header::new(Kind::Hello) }
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
        let mut socket = TcpStream::connect_timeout(&self.addresses[peer], patience).map_err(text)?;
        self.prepare(&socket).map_err(text)?;
        let mut answer = [0; HEADER_BYTES];
        let made = match self.security {
            Security::Plain => {
                let mut made = Writing::Plain(socket);
                made.write(&self.hello(line).encode(), &[], || in_time(until)).map_err(text)?;
                let Writing::Plain(socket) = &mut made else { unreachable!("it was made plain") };
                read_whole(|| in_time(until), &mut answer, |into| io::Read::read(socket, into))
                    .map_err(text)?;
                made
            }
            Security::Tls { identity, names } => {
                let name = identity::server_name(&names[peer]).map_err(|error| error.to_string())?;
                let mut tls = ClientConnection::new(identity.client.clone(), name)
                    .map_err(|error| error.to_string())?;
                shake_hands(|| in_time(until), || tls.is_handshaking().then(|| tls.complete_io(&mut socket)))
                    .map_err(text)?;
                let mut made = Writing::Tls(Box::new(tls), socket);
                made.write(&self.hello(line).encode(), &[], || in_time(until)).map_err(text)?;
                let Writing::Tls(tls, socket) = &mut made else { unreachable!("it was made with TLS") };
                let mut stream = rustls::Stream::new(tls.as_mut(), socket);
                read_whole(|| in_time(until), &mut answer, |into| io::Read::read(&mut stream, into))
                    .map_err(text)?;
                made
            }
        };
        let answer = Header::decode(&answer).map_err(|violation| violation.to_string())?;
        let wanted = Header { tag: Tag(self.fabric), total: peer as u64, ..Header::new(Kind::Welcome) };
        if answer != wanted {
            return Err("who answers there is another worker".to_owned());
        }
        Ok(made)
    }

    /// Lets peers in until all have come or time is over; by peer and line.
    fn accept_all(&self, listener: &TcpListener) -> Vec<Vec<Option<Reading>>> {
        let mut came: Vec<Vec<Option<Reading>>> =
            (0..self.size).map(|_| (0..self.lines).map(|_| None).collect()).collect();
        let mut left = (self.size - 1) * self.lines;
        let strangers = AtomicUsize::new(0);
        let (known, introduced) = mpsc::channel::<(usize, usize, Reading)>();
        if listener.set_nonblocking(true).is_ok() {
            thread::scope(|scope| {
                while left > 0 && !self.over() {
                    for (peer, line, reading) in introduced.try_iter() {
                        // A connection made anew replaces one whose answer was lost.
                        left -= usize::from(came[peer][line].replace(reading).is_none());
                    }
                    match listener.accept() {
                        Ok((socket, from)) if strangers.load(Ordering::SeqCst) < STRANGERS_MAX => {
                            strangers.fetch_add(1, Ordering::SeqCst);
                            let (known, strangers) = (known.clone(), &strangers);
                            scope.spawn(move || {
                                match self.introduce(socket) {
                                    Ok(someone) => drop(known.send(someone)),
                                    Err(cause) => self.note(from, cause),
                                }
                                strangers.fetch_sub(1, Ordering::SeqCst);
                            });
                        }
                        Ok(_) => {}
                        Err(_) => thread::sleep(ACCEPT_PAUSE),
                    }
                }
                self.all_in.store(true, Ordering::SeqCst);
            });
        }
        came.remove(self.rank);
        came
    }

    fn note(&self, from: SocketAddr, cause: String) {
        let mut turned_away = self.turned_away.lock().expect("nobody panics with it");
        let line = format!("{}: {cause}", from.ip());
        if turned_away.len() < TURNED_AWAY_MAX && !turned_away.contains(&line) {
            turned_away.push(line);
        }
    }

    /// Strangers have the time of an attempt, and none once everyone has come.
    fn stranger_in_time(&self, until: Instant) -> io::Result<()> {
        if self.all_in.load(Ordering::SeqCst) { Err(io::ErrorKind::TimedOut.into()) } else { in_time(until) }
    }

    /// Finds out who connected.
    fn introduce(&self, mut socket: TcpStream) -> Attempt<(usize, usize, Reading)> {
        let until = (Instant::now() + ATTEMPT_MAX).min(self.until);
        let text = |error: io::Error| error.to_string();
        self.prepare(&socket).map_err(text)?;
        let mut hello = [0; HEADER_BYTES];
        let mut reading = match self.security {
            Security::Plain => Reading::Plain(socket),
            Security::Tls { identity, .. } => {
                let mut tls =
                    ServerConnection::new(identity.server.clone()).map_err(|error| error.to_string())?;
                shake_hands(
                    || self.stranger_in_time(until),
                    || tls.is_handshaking().then(|| tls.complete_io(&mut socket)),
                )
                .map_err(text)?;
                Reading::tls(tls, socket)
            }
        };
        read_whole(|| self.stranger_in_time(until), &mut hello, |into| reading.read(into)).map_err(text)?;
        let hello = Header::decode(&hello).map_err(|violation| violation.to_string())?;
        let (peer, line) = self.judge(&hello)?;
        if let (Security::Tls { names, .. }, Reading::Tls(tls, _)) = (self.security, &reading) {
            let name = identity::server_name(&names[peer]).map_err(|error| error.to_string())?;
            let certificate = tls.peer_certificates().and_then(|chain| chain.first());
            if !certificate.is_some_and(|certificate| identity::bears_name(certificate, &name)) {
                return Err(format!("it says that it is worker {peer}, and its certificate is another's"));
            }
        }
        let welcome = Header { tag: Tag(self.fabric), total: self.rank as u64, ..Header::new(Kind::Welcome) };
        reading.answer(&welcome.encode(), || self.stranger_in_time(until)).map_err(text)?;
        Ok((peer, line, reading))
    }

    fn judge(&self, hello: &Header) -> Attempt<(usize, usize)> {
        let halves = |number: u64| ((number & u32::MAX as u64) as usize, (number >> 32) as usize);
        let (peer, size) = halves(hello.total);
        let (line, lines) = halves(hello.offset);
        if hello.kind != Kind::Hello {
            return Err(format!("it began with {:?}", hello.kind));
        }
        if hello.tag.0 != self.fabric {
            return Err(format!("worker {peer} of another fabric"));
        }
        if size != self.size || peer >= size || peer == self.rank {
            return Err(format!(
                "it says that it is worker {peer} of {size}, and this is worker {} of {}",
                self.rank, self.size
            ));
        }
        if lines != self.lines || line >= lines {
            return Err(format!(
                "worker {peer} has {} streams, and this worker {}",
                lines.max(1) - 1,
                self.lines - 1
            ));
        }
        Ok((peer, line))
    }
}

/// Strangers whose reasons are kept for the error.
const TURNED_AWAY_MAX: usize = 8;

fn in_time(until: Instant) -> io::Result<()> {
    if Instant::now() < until { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
}

fn shake_hands(
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

fn read_whole(
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
