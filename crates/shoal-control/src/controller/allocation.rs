//! Which workers are for which job: foreground before background, higher priority before lower. Among equals each gets its
//! least, and every further worker goes where it helps most: where it makes steps faster by the largest factor, by what
//! planners have foreseen for so many workers. Where nothing was foreseen, twice the workers are taken to be twice as fast,
//! which makes the shares fair; where it is known not to help at all, a worker is left for those who come after. It
//! depends on the state alone and changes as little as it can: a job keeps what it has as long as its share allows.

use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use super::state::{Job, State, Wish};
use crate::message::{JobId, WorkerId};

/// The workers of one job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Those that it should have, if it is to run. Some may still be another job's.
    pub target: BTreeSet<WorkerId>,
    /// Of those, the ones that it could be planned on now: no other job has anything on them.
    pub available: BTreeSet<WorkerId>,
}

pub struct Shares {
    shares: BTreeMap<JobId, Share>,
    none: Share,
}

impl Shares {
    pub fn of(&self, job: JobId) -> &Share {
        self.shares.get(&job).unwrap_or(&self.none)
    }

    pub fn new(state: &State) -> Shares {
        let usable = |worker: &WorkerId| {
            let member = state.members.get(worker);
            member
                .is_some_and(|member| member.leaves_by_ms.is_none() && member.quarantined_until_ms.is_none())
        };
        let mut free: BTreeSet<WorkerId> = state.members.keys().copied().filter(usable).collect();
        let has: BTreeMap<JobId, BTreeSet<WorkerId>> =
            state.jobs.iter().map(|(id, job)| (*id, job.involved())).collect();
        let counts = counts(state, &has, free.len());
        let mut shares: BTreeMap<JobId, Share> = BTreeMap::new();
        for (id, count) in &counts {
            let mut target = BTreeSet::new();
            for worker in &has[id] {
                if target.len() < *count && free.remove(worker) {
                    target.insert(*worker);
                }
            }
            shares.insert(*id, Share { target, available: BTreeSet::new() });
        }
        for (id, share) in &mut shares {
            while share.target.len() < counts[id]
                && let Some(worker) = free.pop_first()
            {
                share.target.insert(worker);
            }
        }
        let owners = owners(&has);
        for (id, share) in &mut shares {
            let mine = |worker: &&WorkerId| owners.get(worker).is_none_or(|owner| *owner == Some(*id));
            share.available = share.target.iter().filter(mine).copied().collect();
        }
        Shares { shares, none: Share::default() }
    }
}

/// The job that has something on a worker; none if several do.
fn owners(has: &BTreeMap<JobId, BTreeSet<WorkerId>>) -> BTreeMap<WorkerId, Option<JobId>> {
    let mut owners = BTreeMap::new();
    for (id, workers) in has {
        for worker in workers {
            owners.entry(*worker).and_modify(|owner| *owner = None).or_insert(Some(*id));
        }
    }
    owners
}

fn wants(job: &Job) -> bool {
    job.wish == Wish::Run && job.is_open() && !job.has_failed()
}

/// How many workers each job gets. Groups of the same class and priority are served one after the other.
fn counts(
    state: &State,
    has: &BTreeMap<JobId, BTreeSet<WorkerId>>,
    mut left: usize,
) -> BTreeMap<JobId, usize> {
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
        deal(state, has, group, &mut counts, &mut left);
    }
    counts
}

/// Deals out what is left to jobs of one group, one worker after the other.
fn deal(
    state: &State,
    has: &BTreeMap<JobId, BTreeSet<WorkerId>>,
    group: &[(JobId, &Job)],
    counts: &mut BTreeMap<JobId, usize>,
    left: &mut usize,
) {
    // The largest gain first; of equal ones the job with the fewest, then the oldest.
    let bid = |id: JobId, count: usize| {
        let job = state.jobs.get(&id)?;
        let gain = gain_millionths(job, count, has[&id].len());
        let wanted = count < job.spec.workers_max && gain > 0;
        wanted.then_some((gain, std::cmp::Reverse((count, id))))
    };
    let mut bids: BinaryHeap<_> = group.iter().filter_map(|(id, _)| bid(*id, *counts.get(id)?)).collect();
    while *left > 0
        && let Some((_, std::cmp::Reverse((count, id)))) = bids.pop()
    {
        *left -= 1;
        counts.insert(id, count + 1);
        bids.extend(bid(id, count + 1));
    }
}

/// By how much one more worker than `count` makes a job's steps faster, in millionths of its speed.
fn gain_millionths(job: &Job, count: usize, has: usize) -> u64 {
    const WHOLE: u64 = 1_000_000;
    let later = job.foreseen.range(count + 1..);
    let known = job.foreseen.get(&count).and_then(|now_ms| {
        // One more may help only together with others.
        let gain = |(workers, then_ms): (&usize, &u64)| {
            now_ms.saturating_sub(*then_ms).saturating_mul(WHOLE)
                / (*then_ms).max(1)
                / (workers - count) as u64
        };
        later.map(gain).max()
    });
    let gain = known.unwrap_or(WHOLE / count.max(1) as u64);
    // Workers that change hands cost both jobs a change of plan.
    if count < has { gain.saturating_add(gain / 4) } else { gain }
}

#[cfg(test)]
mod tests {
    use super::super::record::Record;
    use super::super::state::{Class, Interval, JobSpec};
    use super::*;
    use crate::message::Price;

    /// Jobs by class and priority, and workers.
    fn state(workers: u64, jobs: &[(Class, i32)]) -> State {
        let mut state = State::default();
        for number in 1..=workers {
            let (worker, name, about) = (WorkerId(number), format!("w{number}"), String::new());
            let joined = Record::Joined { worker, name, boot: 1, about, price: Price(0), at_ms: 0 };
            state.apply(&joined).expect("fits");
        }
        for (job, (class, priority)) in (1..).map(JobId).zip(jobs.iter().copied()) {
            let spec = JobSpec {
                name: String::new(),
                class,
                priority,
                steps: 10,
                workers_min: 1,
                workers_max: 99,
                checkpoint_every: Interval::Auto,
                checkpoints_kept: 1,
                description: String::new(),
            };
            state.apply(&Record::Submitted { job, at_ms: 0, spec }).expect("fits");
        }
        state
    }

    fn sizes(state: &State) -> Vec<usize> {
        let shares = Shares::new(state);
        state.jobs.keys().map(|id| shares.of(*id).target.len()).collect()
    }

    fn foresee(state: &mut State, job: u64, step_ms: &[(usize, u64)]) {
        let job = state.jobs.get_mut(&JobId(job)).expect("submitted");
        job.foreseen.extend(step_ms.iter().copied());
    }

    use Class::{Background, Foreground};

    #[test]
    fn shares_are_fair_where_nothing_is_known() {
        assert_eq!(sizes(&state(7, &[(Foreground, 0), (Foreground, 0), (Foreground, 0)])), [3, 2, 2]);
    }

    #[test]
    fn priorities_come_before_gains_and_foreground_before_both() {
        let mut state = state(4, &[(Background, 9), (Foreground, 0), (Foreground, 5)]);
        assert_eq!(sizes(&state), [0, 0, 4]);
        state.jobs.get_mut(&JobId(3)).expect("submitted").spec.workers_max = 2;
        assert_eq!(sizes(&state), [0, 2, 2]);
    }

    #[test]
    fn a_new_machine_goes_where_it_helps_most() {
        let mut state = state(4, &[(Foreground, 0), (Foreground, 0)]);
        foresee(&mut state, 1, &[(1, 100), (2, 90), (3, 88)]);
        foresee(&mut state, 2, &[(1, 100), (2, 55), (3, 40)]);
        assert_eq!(sizes(&state), [1, 3]);
    }

    #[test]
    fn a_machine_that_helps_nobody_is_left_for_those_who_come_after() {
        let mut state = state(6, &[(Foreground, 0), (Background, 0)]);
        foresee(&mut state, 1, &[(1, 100), (2, 60), (3, 60)]);
        assert_eq!(sizes(&state), [2, 4]);
        foresee(&mut state, 1, &[(5, 20)]);
        assert_eq!(
            sizes(&state),
            [6, 0],
            "three more help together, and what another one would do nobody knows"
        );
    }

    #[test]
    fn what_was_foreseen_for_more_is_forgotten_when_a_machine_joins() {
        let mut state = state(3, &[(Foreground, 0)]);
        foresee(&mut state, 1, &[(1, 100), (2, 100)]);
        assert_eq!(sizes(&state), [1]);
        let (worker, name, about) = (WorkerId(9), "new".to_owned(), String::new());
        let joined = Record::Joined { worker, name, boot: 1, about, price: Price(0), at_ms: 0 };
        state.apply(&joined).expect("fits");
        assert_eq!(sizes(&state), [4], "it may be a better one");
    }
}
