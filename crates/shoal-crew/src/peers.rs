//! The workers that something is done with: their places in a fabric, where they are reached, and whose fault a failure is.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use shoal_control::message::{Epoch, JobId, WorkerId};
use shoal_net::{Error, Fabric, Seat, all_but};

use crate::Crewed;
use crate::about::About;
use crate::brake::Brake;
use crate::error::{CrewError, Result};

/// What a fabric is for. Each job has one of each kind an epoch.
#[derive(Clone, Copy)]
pub enum Purpose {
    Install = 1,
    Run = 2,
}

/// The workers of a fabric, by rank.
#[derive(Clone)]
pub struct Peers {
    pub workers: Vec<WorkerId>,
    pub rank: usize,
}

/// Who this worker is among those whose abouts were told.
pub fn own_id(own: &About, abouts: &BTreeMap<WorkerId, String>) -> Result<WorkerId> {
    let is_own = |text: &&String| {
        About::parse(text).is_ok_and(|about| about.address == own.address && about.name == own.name)
    };
    // A worker's earlier lives are over; should one be told of still, the last is it.
    let found = abouts.iter().rev().find(|(_, text)| is_own(text));
    found.map(|(worker, _)| *worker).ok_or(CrewError::Stranger)
}

impl Peers {
    pub fn new(workers: Vec<WorkerId>, own: WorkerId) -> Result<Peers> {
        let rank = workers.iter().position(|worker| *worker == own).ok_or(CrewError::Stranger)?;
        Ok(Peers { workers, rank })
    }

    pub fn rank_of(&self, worker: WorkerId) -> Option<usize> {
        self.workers.iter().position(|other| *other == worker)
    }

    /// All the others, by rank.
    pub fn everyone(&self) -> BTreeSet<usize> {
        all_but(self.rank, self.workers.len()).into_iter().collect()
    }

    /// Connects this worker with those that it exchanges messages with, by rank; none where there is nobody else.
    pub fn connect(
        &self,
        crewed: &Crewed,
        (job, epoch, purpose): (JobId, Epoch, Purpose),
        partners: BTreeSet<usize>,
        abouts: &BTreeMap<WorkerId, String>,
        brake: &Brake,
    ) -> Result<Option<Arc<Fabric>>> {
        if self.workers.len() < 2 {
            return Ok(None);
        }
        let about = |worker: &WorkerId| -> Result<About> {
            let unreachable = |what: String| CrewError::Unreachable { worker: *worker, what };
            let text = abouts.get(worker).ok_or_else(|| unreachable("nobody said where it is".into()))?;
            About::parse(text).map_err(|error| unreachable(error.to_string()))
        };
        let abouts = self.workers.iter().map(about).collect::<Result<Vec<About>>>()?;
        let number = (job.0 as u128) << 72 ^ (epoch.0 as u128) << 8 ^ purpose as u128;
        let seat = Seat {
            rank: self.rank,
            addresses: abouts.iter().map(|about| about.address).collect(),
            peers: partners.into_iter().collect(),
            fabric: number,
            names: abouts.into_iter().map(|about| about.name).collect(),
        };
        let setup = &crewed.setup;
        let connected = setup.reception.connect(seat, &setup.network, brake.flag());
        let fabric = connected.map_err(|error| match brake.is_pulled() {
            true => CrewError::Stopped,
            false => self.failure(error, None),
        })?;
        brake.attach(&fabric);
        Ok(Some(fabric))
    }

    /// What a failure of the network means: whom it was waited for in vain. Who stopped by itself is not among them: it
    /// was told to, or says itself why, or did so because of another.
    pub fn failure(&self, error: Error, fabric: Option<&Fabric>) -> CrewError {
        let rank = match &error {
            Error::PeerLost { rank, .. } => Some(*rank),
            Error::Join { ranks, .. } => ranks.first().copied(),
            Error::Late { peer, .. } => rank_called(fabric, peer),
            _ => None,
        };
        self.blame(error, rank)
    }

    /// The same where everyone goes on to the end: who stops has kept the others from theirs, whatever its reason.
    pub fn broken_off(&self, error: Error, fabric: Option<&Fabric>) -> CrewError {
        match &error {
            Error::Aborted { by, .. } => {
                let rank = rank_called(fabric, by);
                self.blame(error, rank)
            }
            Error::PeerLeft { rank, .. } => {
                let rank = Some(*rank);
                self.blame(error, rank)
            }
            _ => self.failure(error, fabric),
        }
    }

    fn blame(&self, error: Error, rank: Option<usize>) -> CrewError {
        let culprit = rank.and_then(|rank| self.workers.get(rank)).copied();
        CrewError::Net {
            error: Box::new(error),
            culprit: culprit.filter(|worker| *worker != self.workers[self.rank]),
        }
    }
}

fn rank_called(fabric: Option<&Fabric>, name: &str) -> Option<usize> {
    let fabric = fabric?;
    (0..fabric.size()).find(|rank| fabric.name(*rank) == name)
}
