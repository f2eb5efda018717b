//! Training without arithmetic. A job has [`SLICES`] slices; a slice is a version and a digest of everything that was ever
//! applied to it: which samples, by which closing sums. So what a slice must be at a version is a number known
//! beforehand, and a sample that was seen twice or never, a step applied twice, or by other sums, shows in it for good.

use shoal_control::controller::Proposal;
use shoal_control::controller::record::Paced;
use shoal_control::message::{JobId, Plan, WorkerId};
use shoal_plan::Closing;

use crate::random::mixed;

pub const SLICES: usize = 6;
/// Samples a step.
pub const BATCH: u64 = 12;
/// What a step takes one worker at full pace.
const WORK_MS: u64 = 240;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    pub version: u64,
    pub digest: u64,
}

/// Samples from the first to before the second.
pub type Samples = (u64, u64);

pub fn fresh(job: JobId, slice: usize) -> Slice {
    Slice { version: 0, digest: mixed(job.0 * 1_000 + slice as u64) }
}

impl Slice {
    pub fn apply(&mut self, samples: Samples, closing: Closing) {
        self.version += 1;
        self.digest = mixed(
            self.digest
                ^ mixed(samples.0)
                ^ mixed(samples.1).rotate_left(7)
                ^ closing.targets.rotate_left(13),
        );
    }

    /// Whether it is what every slice of that number is at that version.
    pub fn is_right(&self, job: JobId, slice: usize, rights: &mut Rights) -> bool {
        rights.digest(job, slice, self.version) == self.digest
    }
}

/// The digests that slices must have, as far as anyone asked.
#[derive(Default)]
pub struct Rights(std::collections::BTreeMap<(JobId, usize), Vec<u64>>);

impl Rights {
    fn digest(&mut self, job: JobId, slice: usize, version: u64) -> u64 {
        let known = self.0.entry((job, slice)).or_insert_with(|| vec![fresh(job, slice).digest]);
        while known.len() as u64 <= version {
            let step = known.len() as u64 - 1;
            let mut next = Slice { version: step, digest: known[step as usize] };
            next.apply((step * BATCH, (step + 1) * BATCH), closing(job, step));
            known.push(next.digest);
        }
        known[version as usize]
    }
}

pub fn closing(job: JobId, step: u64) -> Closing {
    let (loss, norm_squared, correct) = (0.0.into(), 0.0.into(), 0.0.into());
    Closing { step, loss, norm_squared, targets: mixed(job.0 ^ mixed(step)), correct }
}

/// The step whose loss is no number, in jobs of some lengths: whoever does it, nothing comes of it.
pub fn dead_end(steps: u64) -> Option<u64> {
    (steps % 8 == 3).then_some(steps / 2)
}

pub fn dead_end_reason(step: u64) -> String {
    format!("the loss of step {step} is no number")
}

/// The samples that a plan gives one of its workers, nothing to those who only hold state.
pub fn share(plan: &Plan, worker: WorkerId, start: u64) -> Option<Samples> {
    let computing = computing(plan);
    let place = computing.iter().position(|member| *member == worker)? as u64;
    let (count, first) = (computing.len() as u64, place);
    Some((start + first * BATCH / count, start + (first + 1) * BATCH / count))
}

/// What a worker's own work in a step takes it.
pub fn work_ms(plan: &Plan, pace_percent: u32) -> u64 {
    WORK_MS * u64::from(pace_percent) / 100 / computing(plan).len().max(1) as u64
}

pub fn computing(plan: &Plan) -> &[WorkerId] {
    let idle = usize::from(plan.table == "last one holds state only");
    &plan.members[..plan.members.len() - idle]
}

/// All samples of a step if the shares make up one run of them without a gap.
pub fn together(mut shares: Vec<Samples>) -> Samples {
    shares.sort_unstable();
    let joined =
        shares.iter().skip(1).try_fold(shares[0], |all, next| (all.1 == next.0).then_some((all.0, next.1)));
    // No run of samples: no slice that this is applied to will ever be right.
    joined.unwrap_or((u64::MAX, shares.iter().map(|share| share.0).sum()))
}

/// The toy's planner: everyone computes by its pace, the slices go round, each on two workers where there are two. Jobs
/// of even number do not fit one worker.
pub fn plan(job: JobId, workers: &[Paced], held: Option<&Plan>, request: u64) -> Result<Proposal, String> {
    if workers.len() < 2 && job.0.is_multiple_of(2) {
        return Err("does not fit".to_owned());
    }
    // One that is much slower than the others together would only hold them up.
    let mut members: Vec<Paced> = workers.to_vec();
    members.sort_by_key(|(worker, pace)| (*pace >= 800, *worker));
    members.truncate(SLICES);
    let count = members.len();
    let holds_only = count >= 3 && request.is_multiple_of(3);
    let computing = if holds_only { &members[..count - 1] } else { &members[..] };
    let slowest = computing.iter().map(|(_, pace)| u64::from(*pace)).max().unwrap_or(100);
    let step_ms = (WORK_MS * slowest / 100 / computing.len() as u64).max(1);
    let members: Vec<WorkerId> = members.into_iter().map(|(worker, _)| worker).collect();
    let holders = (0..SLICES).map(|slice| {
        let mut holders = vec![slice % count, (slice + 1) % count];
        // Not every plan has room for mirrors.
        holders.truncate(if request.is_multiple_of(5) { 1 } else { 2 });
        holders.dedup();
        holders
    });
    let holders = holders.collect();
    let stays = held.is_some_and(|held| held.members == members);
    let table = if holds_only { "last one holds state only" } else { "" }.to_owned();
    let plan = Plan { members, holders, step_ms, table };
    Ok(Proposal { plan, move_ms: if stays { 50 } else { 400 }, staying_ms: None })
}
