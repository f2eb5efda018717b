//! Everything that can be chosen about a fabric, with defaults that suit a local network.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::board::Board;
use crate::collective::TREE_BYTES_MAX;

/// What leaves a worker within this is small: exchanges take longer than its bytes.
const SMALL_SECONDS: f64 = 1e-3;

/// How a worker's fabric behaves. All workers of a fabric should agree on `streams` and `deadline`, and have to agree on
/// `tree_bytes_max`.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Silence after which a peer counts as dead. Heartbeats come four times as often.
    pub deadline: Duration,
    /// How long one message may take from its beginning, though its peer lives.
    pub message_deadline: Duration,
    /// How long to try to reach all peers when the fabric is made.
    pub join_deadline: Duration,
    /// Connections for large messages in each direction of a pair.
    pub streams: usize,
    /// Buffers up to this go by the tree, larger ones around the ring.
    pub tree_bytes_max: usize,
    /// What a lab makes of the links; `None` leaves them as they are.
    pub shape: Option<Shape>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            deadline: Duration::from_secs(10),
            message_deadline: Duration::from_secs(600),
            join_deadline: Duration::from_secs(60),
            streams: 2,
            tree_bytes_max: TREE_BYTES_MAX,
            shape: None,
        }
    }
}

/// What goes by the tree where the slowest worker sends so much a second: a tree sends a buffer once to every child, which
/// pays only while that takes next to no time.
pub fn tree_bytes_max(slowest_bytes_per_s: f64) -> usize {
    ((slowest_bytes_per_s * SMALL_SECONDS) as usize).min(TREE_BYTES_MAX)
}

/// What one worker's sending is held to. Only payload counts, and no link is slower than a kilobyte a second.
#[derive(Clone, Debug, Default)]
pub struct Shape {
    /// Bytes a second of everything this worker sends, shared by all its peers.
    pub egress_bytes_per_s: Option<f64>,
    /// The links to peers, by their rank.
    pub links: BTreeMap<usize, LinkShape>,
    /// The links to peers that `links` does not name.
    pub other_links: LinkShape,
    /// What the links to several peers have in common, and only this worker sends over.
    pub ways: Vec<Way>,
    /// What other processes send over too.
    pub shared: Option<SharedWays>,
}

impl Shape {
    pub(crate) fn link(&self, peer: usize) -> LinkShape {
        self.links.get(&peer).copied().unwrap_or(self.other_links)
    }

    /// Of everything that is shaped, bytes a second.
    pub(crate) fn rates(&self) -> impl Iterator<Item = f64> {
        let links = self.links.values().chain([&self.other_links]).filter_map(|link| link.bytes_per_s);
        let shared = self.shared.iter().flat_map(|shared| shared.ways.values());
        let ways = self.ways.iter().chain(shared).map(|way| way.bytes_per_s);
        links.chain(ways).chain(self.egress_bytes_per_s)
    }
}

/// What bytes to some peers pass beside the links to them, such as an interface.
#[derive(Clone, Debug, PartialEq)]
pub struct Way {
    pub bytes_per_s: f64,
    pub peers: BTreeSet<usize>,
}

/// Ways that workers of several processes send over, held to their rates by clocks on a board that all of them have open.
#[derive(Clone, Debug)]
pub struct SharedWays {
    pub board: Arc<Board>,
    /// Each by the number of its clock.
    pub ways: BTreeMap<usize, Way>,
}

/// One direction of one link.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkShape {
    pub bytes_per_s: Option<f64>,
    /// From the moment the last byte has left to the moment it arrives.
    pub latency: Duration,
}
