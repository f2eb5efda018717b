//! Workers as threads of the test, over each transport.

#![allow(dead_code, reason = "each test binary uses some of this")]

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use shoal_net::identity::Authority;
use shoal_net::{Endpoint, Error, Fabric, Security, Settings, connect, in_process};

pub fn settings() -> Settings {
    Settings {
        deadline: Duration::from_secs(5),
        message_deadline: Duration::from_secs(60),
        join_deadline: Duration::from_secs(30),
        ..Settings::default()
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Transport {
    InProcess,
    Plain,
    Tls,
}

pub const TRANSPORTS: [Transport; 3] = [Transport::InProcess, Transport::Plain, Transport::Tls];

pub fn fabrics(transport: Transport, count: usize, settings: &Settings) -> Vec<Arc<Fabric>> {
    match transport {
        Transport::InProcess => in_process(count, settings),
        Transport::Plain => join_all(count, settings, |_| Security::Plain)
            .into_iter()
            .map(|joined| joined.expect("joined"))
            .collect(),
        Transport::Tls => {
            let authority = Authority::new().expect("an authority");
            let security = |rank: usize| identified(&authority, rank, count);
            join_all(count, settings, security).into_iter().map(|joined| joined.expect("joined")).collect()
        }
    }
}

pub fn worker_name(rank: usize) -> String {
    format!("worker-{rank}.test")
}

/// The identity of the worker of this rank.
pub fn identified(authority: &Authority, rank: usize, count: usize) -> Security {
    let identity = authority.issue(&worker_name(rank)).expect("an identity");
    Security::Tls { identity, names: (0..count).map(worker_name).collect() }
}

pub fn listeners(count: usize) -> (Vec<TcpListener>, Vec<SocketAddr>) {
    let listeners: Vec<_> =
        (0..count).map(|_| TcpListener::bind("127.0.0.1:0").expect("a free port")).collect();
    let addresses = listeners.iter().map(|listener| listener.local_addr().expect("an address")).collect();
    (listeners, addresses)
}

/// All workers of a fabric join at once, on loopback.
pub fn join_all(
    count: usize,
    settings: &Settings,
    security: impl Fn(usize) -> Security + Sync,
) -> Vec<Result<Arc<Fabric>, Error>> {
    let (listeners, addresses) = listeners(count);
    std::thread::scope(|scope| {
        let (addresses, security) = (&addresses, &security);
        let joining: Vec<_> = listeners
            .into_iter()
            .enumerate()
            .map(|(rank, listener)| {
                scope.spawn(move || {
                    let security = security(rank);
                    connect(
                        Endpoint { rank, listener, addresses: addresses.clone(), fabric: 7, security },
                        settings,
                    )
                })
            })
            .collect();
        joining.into_iter().map(|joined| joined.join().expect("joining does not panic")).collect()
    })
}

/// What each worker's thread returns, by rank.
pub fn each<T: Send>(fabrics: &[Arc<Fabric>], work: impl Fn(&Fabric) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = fabrics.iter().map(|fabric| scope.spawn(move || work(fabric))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("the worker's thread ended in a panic"))
            .collect()
    })
}

/// Numbers without pattern, the same in every run.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// From -1 to 1.
    pub fn number(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.next() as u8).collect()
    }
}
