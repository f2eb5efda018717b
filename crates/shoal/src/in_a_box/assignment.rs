//! What a lab tells its workers, and what they tell it: a file for each before it starts, then lines of JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shoal_engine::metrics::StepRecord;
use shoal_net::board::Board;
use shoal_net::{LinkShape, Settings, Shape, SharedWays, Way};
use shoal_plan::{Plan, Program};

use crate::error::Result;

/// One worker's part.
#[derive(Serialize, Deserialize)]
pub struct Assignment {
    pub job: PathBuf,
    pub set: Vec<String>,
    pub stop_at: Option<u64>,
    pub plan: Plan,
    pub program: Program,
    /// Whether it keeps the books: metrics and checkpoints.
    pub leads: bool,
    /// Whether what is trained is kept.
    pub saves: bool,
    /// The checkpoint to go on from.
    pub checkpoint: Option<u64>,
    /// Hundredths of the GPU here that are its own; none where it is a processor, or played by one.
    pub gpu_percent: Option<u32>,
    pub threads: usize,
    pub host_bytes: u64,
    /// Where it may keep files of its own.
    pub folder: PathBuf,
    /// Seconds that each instruction is made to last, by its number; empty where the device is what it says.
    pub pace: Vec<f64>,
    pub network: Network,
    /// The step from which on it notes when its instructions were under way.
    pub trace_from: Option<u64>,
    pub predicted_seconds: f64,
    pub dollars_per_hour: f64,
}

/// What it knows of the others, and how they are reached.
#[derive(Clone, Serialize, Deserialize)]
pub struct Network {
    /// Where it listens.
    pub listen: IpAddr,
    /// Which fabric this is: two labs on one machine must not meet.
    pub fabric: u128,
    pub deadline_seconds: f64,
    /// Its certificate, its key and the fleet's authority; none where nobody proves anything.
    pub identity: Option<[String; 3]>,
    /// Bytes a second and seconds to each of the others.
    pub links: BTreeMap<usize, (f64, f64)>,
    /// What links have in common: bytes a second, and to whom.
    pub ways: Vec<WayTo>,
    /// The same of what others send over too, by the number of its clock on the board, and where that lies.
    pub board: Option<(PathBuf, BTreeMap<usize, WayTo>)>,
}

pub type WayTo = (f64, BTreeSet<usize>);

impl Network {
    pub fn settings(&self) -> Result<Settings> {
        let link = |(peer, (rate, seconds)): (&usize, &(f64, f64))| {
            let latency = Duration::from_secs_f64(*seconds);
            (*peer, LinkShape { bytes_per_s: Some(*rate), latency })
        };
        let way = |(rate, peers): &WayTo| Way { bytes_per_s: *rate, peers: peers.clone() };
        let shared = match &self.board {
            None => None,
            Some((path, ways)) => {
                let ways = ways.iter().map(|(clock, to)| (*clock, way(to))).collect();
                Some(SharedWays { board: Board::open(path)?, ways })
            }
        };
        let shape = Shape {
            egress_bytes_per_s: None,
            links: self.links.iter().map(link).collect(),
            other_links: LinkShape::default(),
            ways: self.ways.iter().map(way).collect(),
            shared,
        };
        let deadline = Duration::from_secs_f64(self.deadline_seconds);
        let shaped = !self.links.is_empty();
        Ok(Settings { deadline, shape: shaped.then_some(shape), ..Settings::default() })
    }
}

/// A worker's name in its certificate.
pub fn name_of(rank: usize) -> String {
    format!("worker-{rank}")
}

/// What a worker says, a line each.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    Listening(SocketAddr),
    Step(Box<StepRecord>),
    Saved { step: u64, bytes: u64, seconds: f64 },
    SavesWait { needed_bytes: u64, free_bytes: u64 },
    Done { steps: u64, finished: bool },
}

/// What it is told, a line each.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Where each worker listens, by rank.
    Join(Vec<SocketAddr>),
    /// End after this step, saved.
    Stop,
}
