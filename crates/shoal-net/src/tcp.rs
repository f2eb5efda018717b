//! Workers on a network. Between two workers stand, in each direction, one connection for control and several for data,
//! each used in its direction only: reading and writing never wait for each other, and neither does TLS. Small frames
//! and small messages go over control, where whoever waits for one reads them as they come. Large messages are cut into
//! stripes over the data streams, which the receiving threads read themselves, straight into their callers' memory.
//!
//! - `stream`: one connection, plain or TLS.
//! - `reception`: a worker's port, and which fabric a connection is for.
//! - `join`: how the connections of a fabric come to be, and who is let in.
//! - `sink`: where frames leave, held to the link's shape.
//! - `ear`: where control frames arrive.
//! - `spin`: how a thread looks again before it sleeps.
//! - `lane`: where data arrives, and which of the waiting threads reads it.
//! - `message`: the two ends of one message.
//! - `peer`: one peer's life: heartbeats, silence, goodbye.

mod ear;
mod join;
mod lane;
mod message;
mod peer;
mod reception;
mod sink;
mod spin;
mod stream;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;

use crate::error::{Error, Result};
use crate::fabric::{Fabric, Leave};
use crate::fate::Fate;
use crate::identity::Identity;
use crate::link::Link;
use crate::pace::{BYTES_PER_S_MIN, Pacer, Ways};
use crate::settings::Settings;
use join::Connections;
use message::TcpLink;
use peer::Peer;
pub use reception::{Guard, Reception};
use spin::Leisure;

/// How workers know each other.
#[derive(Clone, Debug)]
pub enum Security {
    /// Each proves by a certificate of the fleet's authority that it is the worker of this name; names by rank.
    Tls { identity: Identity, names: Vec<String> },
    /// Nobody proves anything. Only for addresses that cannot be reached from outside.
    Plain,
}

/// A worker's place in a fabric that is about to be made.
#[derive(Debug)]
pub struct Endpoint {
    pub rank: usize,
    /// Where peers reach this worker; closed once all have come.
    pub listener: TcpListener,
    /// Where each worker listens, by rank.
    pub addresses: Vec<SocketAddr>,
    /// Which fabric this is: workers of another one are turned away.
    pub fabric: u128,
    pub security: Security,
}

/// A worker's place in a fabric that is made over its reception.
#[derive(Clone, Debug)]
pub struct Seat {
    pub rank: usize,
    /// Where each worker listens, by rank.
    pub addresses: Vec<SocketAddr>,
    /// The others that it exchanges messages with, by rank, in order. Whoever is among these has this worker among its own.
    /// What ends the fabric passes from one to the next, so all are to be reached over some of them.
    pub peers: Vec<usize>,
    /// Which fabric this is: connections of another one are not for it.
    pub fabric: u128,
    /// What each worker's certificate calls it, by rank; nobody is asked where nobody proves anything.
    pub names: Vec<String>,
}

/// All workers but one.
pub fn all_but(rank: usize, size: usize) -> Vec<usize> {
    (0..size).filter(|other| *other != rank).collect()
}

impl Seat {
    /// Workers as messages name them.
    fn titles(&self) -> Vec<String> {
        let workers = self.addresses.iter().enumerate();
        workers.map(|(rank, address)| format!("worker {rank} ({address})")).collect()
    }
}

/// Connects this worker with all others, trying until the join deadline. The port serves this fabric alone.
pub fn connect(endpoint: Endpoint, settings: &Settings) -> Result<Arc<Fabric>> {
    let Endpoint { rank, listener, addresses, fabric, security } = endpoint;
    let (guard, names) = match security {
        Security::Tls { identity, names } => (Guard::Tls(identity), names),
        Security::Plain => (Guard::Plain, Vec::new()),
    };
    let reception = Reception::open(listener, guard)?;
    let peers = all_but(rank, addresses.len());
    reception.connect(Seat { rank, addresses, peers, fabric, names }, settings, &AtomicBool::new(false))
}

/// A fabric of connections that stand.
fn fabric_of(seat: &Seat, joined: Vec<Connections>, settings: &Settings) -> Result<Arc<Fabric>> {
    let (rank, names) = (seat.rank, seat.titles());
    let fate = Arc::new(Fate::default());
    let shape = settings.shape.as_ref();
    let (ways, leisure) = (Ways::new(shape), Leisure::new());
    let mut tcp = Tcp { peers: Vec::new(), threads: Vec::new() };
    let mut links: Vec<Option<Box<dyn Link>>> = names.iter().map(|_| None).collect();
    for connections in joined {
        let pacer = Pacer::new(shape, &ways, connections.peer);
        let place = connections.peer;
        let (peer, threads) =
            Peer::start(rank, connections, names.clone(), fate.clone(), pacer, &leisure, settings)?;
        links[place] = Some(Box::new(TcpLink(peer.clone())));
        tcp.peers.push(peer);
        tcp.threads.extend(threads);
    }
    Ok(Arc::new(Fabric::new(rank, names, fate, links, settings, Box::new(tcp))))
}

fn check_settings(settings: &Settings) -> Result<()> {
    let wrong = |what: String| Err(Error::Settings { what });
    if settings.streams == 0 || settings.streams > join::STREAMS_MAX {
        return wrong(format!("{} streams; there can be 1 to {}", settings.streams, join::STREAMS_MAX));
    }
    if settings.deadline < peer::DEADLINE_MIN {
        return wrong(format!(
            "a deadline of {:?} is shorter than {:?}",
            settings.deadline,
            peer::DEADLINE_MIN
        ));
    }
    if let Some(shape) = &settings.shape {
        let too_slow = |rate: &f64| rate.is_nan() || *rate < BYTES_PER_S_MIN;
        if let Some(rate) = shape.rates().find(too_slow) {
            return wrong(format!("a link of {rate} bytes/s; the slowest has {BYTES_PER_S_MIN}"));
        }
    }
    Ok(())
}

/// What keeps a fabric's connections alive, and ends them.
struct Tcp {
    peers: Vec<Arc<Peer>>,
    threads: Vec<JoinHandle<()>>,
}

impl Leave for Tcp {
    fn sever(&self) {
        self.peers.iter().for_each(|peer| peer.sever());
        // Only now: what ends here is told to whoever can still be reached.
        if let Some(peer) = self.peers.first() {
            peer.lost("the connection was cut".to_owned());
        }
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        for peer in &self.peers {
            peer.close();
        }
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so; there is nothing to add while ending.
            let _ = thread.join();
        }
    }
}
