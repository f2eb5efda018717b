//! What can go wrong between workers. Every variant names the worker it is about; `hint` is the sentence the binary
//! prints after `hint:`. Errors can be cloned, because one failure ends many operations.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use crate::fabric::Tag;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Error {
    /// A worker died, froze, or was cut off. Everyone in the fabric ends with this.
    #[error("{name} is lost: {why}")]
    PeerLost { rank: usize, name: String, why: String },
    /// Somebody called `abort`.
    #[error("{by} stopped the work: {reason}")]
    Aborted { by: String, reason: String },
    /// A worker ended in good order, and this operation needs it.
    #[error("{name} has left, and {what} needs it")]
    PeerLeft { rank: usize, name: String, what: String },
    /// The two sides of a message disagree about its length.
    #[error(
        "message {tag} between this worker and {peer} has {sent} bytes at its sender and {wanted} at its receiver"
    )]
    Length { peer: String, tag: Tag, sent: u64, wanted: u64 },
    /// The peer lives, and the message did not come, or was not taken, in time.
    #[error("message {tag}: {peer} {what} within {} s", limit.as_secs_f64())]
    Late { peer: String, tag: Tag, what: &'static str, limit: Duration },
    /// Two messages with one tag between the same workers at the same time.
    #[error("message {tag} with {peer} was begun twice")]
    TagInUse { peer: String, tag: Tag },
    /// A streamed message was ended early, or carried on past its length.
    #[error("message {tag} with {peer}: {asked} bytes asked for where {left} are left")]
    Overrun { peer: String, tag: Tag, asked: usize, left: usize },
    /// A rank that is no other worker's.
    #[error("worker {rank} of {size} has no peer {peer}")]
    NoPeer { rank: usize, size: usize, peer: usize },
    /// The fabric could not be made.
    #[error("{name} could not join within {} s: {}{}", limit.as_secs_f64(), missing.join("; "), turned(turned_away))]
    Join {
        name: String,
        /// Who is missing and why, and their ranks.
        missing: Vec<String>,
        ranks: Vec<usize>,
        turned_away: Vec<String>,
        limit: Duration,
    },
    /// A connection without identities to where others could be.
    #[error("{address} can be reached from outside, and connections without TLS are for loopback only")]
    PlainOutside { address: SocketAddr },
    #[error("cannot {action}: {cause}")]
    Identity { action: &'static str, cause: String },
    /// Settings that cannot be.
    #[error("{what}")]
    Settings { what: String },
    /// The file of a lab's shared clocks.
    #[error("{}: {what}", path.display())]
    Board { path: PathBuf, what: String },
    /// Members or slices of a collective that cannot be.
    #[error("collective {tag}: {what}")]
    Collective { tag: Tag, what: String },
}

impl Error {
    /// What the user can do about it, where there is something.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Error::PeerLost { .. } => {
                Some("look at that worker's log and machine; the others stopped only because of it")
            }
            Error::Late { .. } => {
                Some("the worker answers but its work does not: it may be overloaded, or its plan another")
            }
            Error::Join { .. } => {
                Some("look whether those workers run, and whether this machine reaches their ports")
            }
            Error::Board { .. } => {
                Some("start the lab again: it makes this file anew, and its workers need it")
            }
            Error::PlainOutside { .. } => Some("give every worker an identity of the fleet's authority"),
            _ => None,
        }
    }
}

/// For what writes to connections: the error comes back whole from `io::Error::downcast`.
impl From<Error> for std::io::Error {
    fn from(error: Error) -> std::io::Error {
        std::io::Error::other(error)
    }
}

fn turned(away: &[String]) -> String {
    if away.is_empty() { String::new() } else { format!("; turned away: {}", away.join("; ")) }
}
