//! Which workers are for which job: foreground before background, higher priority before lower, fair shares otherwise. It
//! depends on the state alone and changes as little as it can: a job keeps what it has as long as its share allows.

use std::collections::{BTreeMap, BTreeSet};

use super::state::{Job, State, Wish};
use crate::message::{JobId, WorkerId};

pub type Targets = BTreeMap<JobId, BTreeSet<WorkerId>>;

/// The workers that each job that is to run should have. Some may still be another job's.
pub fn targets(state: &State) -> Targets {
    let usable: BTreeSet<WorkerId> = state
        .members
        .iter()
        .filter(|(_, member)| member.leaves_by_ms.is_none() && member.quarantined_until_ms.is_none())
        .map(|(worker, _)| *worker)
        .collect();
    let counts = counts(state, usable.len());
    let mut free = usable.clone();
    let mut targets = Targets::new();
    for (job, count) in &counts {
        let mine = state.jobs[job].involved();
        let keep: BTreeSet<WorkerId> = mine.intersection(&free).copied().take(*count).collect();
        free.retain(|worker| !keep.contains(worker));
        targets.insert(*job, keep);
    }
    for (job, count) in &counts {
        let target = targets.entry(*job).or_default();
        let more: Vec<WorkerId> = free.iter().copied().take(count - target.len()).collect();
        free.retain(|worker| !more.contains(worker));
        target.extend(more);
    }
    targets
}

/// Of those, the ones that a job could be planned on now: no other job has anything on them.
pub fn available(state: &State, targets: &Targets, job: JobId) -> BTreeSet<WorkerId> {
    let Some(target) = targets.get(&job) else { return BTreeSet::new() };
    let others = state.jobs.iter().filter(|(other, _)| **other != job);
    let taken: BTreeSet<WorkerId> = others.flat_map(|(_, other)| other.involved()).collect();
    target.difference(&taken).copied().collect()
}

fn wants(job: &Job) -> bool {
    job.wish == Wish::Run && job.is_open() && !job.has_failed()
}

/// How many workers each job gets. Groups of the same class and priority are served one after the other; within a group
/// everyone gets its least first, then the rest goes round.
fn counts(state: &State, mut left: usize) -> BTreeMap<JobId, usize> {
    let mut groups: BTreeMap<_, Vec<(JobId, &Job)>> = BTreeMap::new();
    for (id, job) in state.jobs.iter().filter(|(_, job)| wants(job)) {
        groups.entry((job.spec.class, -i64::from(job.spec.priority))).or_default().push((*id, job));
    }
    let mut counts = BTreeMap::new();
    for group in groups.values() {
        for (id, job) in group {
            let least = job.spec.workers_min.max(1);
            if least <= left {
                left -= least;
                counts.insert(*id, least);
            }
        }
        let mut dealt = true;
        while left > 0 && dealt {
            dealt = false;
            for (id, job) in group {
                let Some(count) = counts.get_mut(id) else { continue };
                if left > 0 && *count < job.spec.workers_max {
                    (*count, left, dealt) = (*count + 1, left - 1, true);
                }
            }
        }
    }
    counts
}
