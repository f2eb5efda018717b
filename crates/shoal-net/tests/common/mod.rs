//! Workers as threads of the test, over each transport.

#![allow(dead_code, reason = "each test binary uses some of this")]

use std::sync::Arc;
use std::time::Duration;

use shoal_net::{Fabric, Settings, in_process};

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
}

pub const TRANSPORTS: [Transport; 1] = [Transport::InProcess];

pub fn fabrics(transport: Transport, count: usize, settings: &Settings) -> Vec<Arc<Fabric>> {
    match transport {
        Transport::InProcess => in_process(count, settings),
    }
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
