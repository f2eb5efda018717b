//! Asking the planner, beside everything else: a plan may take a second, and heartbeats do not wait. A few threads answer
//! questions; a job's newer question replaces one that nobody has begun.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use shoal_control::controller::Proposal;
use shoal_control::message::{JobId, Plan, WorkerId};

/// Threads that plan at a time.
const PLANNERS_MAX: usize = 2;

/// What the controller needs of those who know what jobs and plans are.
pub trait Planner: Send + Sync + 'static {
    /// Reads a job and takes it on, or says why not, and what may be done about it.
    fn take(&self, description: &str) -> Result<(), Unfit>;
    /// The best plan for a job on these workers, or why there is none.
    fn plan(&self, question: &Question) -> Result<Proposal, String>;
    /// All other checkpoints of the job, whole or not, may be removed.
    fn keep_checkpoints(&self, job: JobId, description: &str, ids: &[u64]) -> Result<(), String>;
}

/// Why a job is not taken on.
#[derive(Clone, Debug)]
pub struct Unfit {
    pub why: String,
    pub hint: Option<String>,
}

#[derive(Clone, Debug)]
pub struct Question {
    pub job: JobId,
    pub request: u64,
    pub description: String,
    pub workers: Vec<Candidate>,
    /// The plan whose workers have the job's state, and those of them that live.
    pub held: Option<(Plan, Vec<WorkerId>)>,
}

#[derive(Clone, Debug)]
pub struct Candidate {
    pub worker: WorkerId,
    pub name: String,
    /// What its steps take, in percent of what its kind was measured at.
    pub pace_percent: u32,
    /// What it said of itself when it joined.
    pub about: String,
}

enum Errand {
    Plan(Question),
    Keep { description: String, ids: Vec<u64> },
}

#[derive(Default)]
struct Waiting {
    /// One of each kind a job, by which is newer.
    errands: BTreeMap<(JobId, bool), Errand>,
    ended: bool,
}

/// The threads that plan.
pub struct Planners {
    shared: Arc<(Mutex<Waiting>, Condvar)>,
}

/// Where answers go: job, request, the plan or why there is none.
pub type Answers = Arc<dyn Fn(JobId, u64, Result<Proposal, String>) + Send + Sync>;

impl Planners {
    pub fn start(planner: Arc<dyn Planner>, answers: Answers, complaints: crate::Complaints) -> Planners {
        let shared = Arc::new((Mutex::new(Waiting::default()), Condvar::new()));
        for _ in 0..PLANNERS_MAX {
            let (shared, planner) = (shared.clone(), planner.clone());
            let (answers, complaints) = (answers.clone(), complaints.clone());
            std::thread::spawn(move || {
                while let Some((job, errand)) = next(&shared) {
                    run(&*planner, job, errand, &answers, &complaints);
                }
            });
        }
        Planners { shared }
    }

    pub fn ask(&self, question: Question) {
        self.put((question.job, true), Errand::Plan(question));
    }

    pub fn keep_checkpoints(&self, job: JobId, description: &str, ids: Vec<u64>) {
        self.put((job, false), Errand::Keep { description: description.to_owned(), ids });
    }

    fn put(&self, key: (JobId, bool), errand: Errand) {
        lock(&self.shared.0).errands.insert(key, errand);
        self.shared.1.notify_one();
    }
}

impl Drop for Planners {
    fn drop(&mut self) {
        lock(&self.shared.0).ended = true;
        self.shared.1.notify_all();
    }
}

fn lock(waiting: &Mutex<Waiting>) -> MutexGuard<'_, Waiting> {
    waiting.lock().expect("nobody panics while holding it")
}

fn next(shared: &(Mutex<Waiting>, Condvar)) -> Option<(JobId, Errand)> {
    let mut waiting = lock(&shared.0);
    loop {
        if waiting.ended {
            return None;
        }
        if let Some(((job, _), errand)) = waiting.errands.pop_first() {
            return Some((job, errand));
        }
        waiting = shared.1.wait(waiting).expect("nobody panics while holding it");
    }
}

fn run(planner: &dyn Planner, job: JobId, errand: Errand, answers: &Answers, complaints: &crate::Complaints) {
    match errand {
        Errand::Plan(question) => {
            // A planner that fails must cost its job an answer and nobody else anything.
            let planned = catch_unwind(AssertUnwindSafe(|| planner.plan(&question)));
            let answer = planned.unwrap_or_else(|_| Err("the planner failed; see its message".into()));
            answers(job, question.request, answer);
        }
        Errand::Keep { description, ids } => {
            let kept = catch_unwind(AssertUnwindSafe(|| planner.keep_checkpoints(job, &description, &ids)));
            if let Ok(Err(why)) = kept {
                complaints(&format!("job {}: old checkpoints were not removed: {why}", job.0));
            }
        }
    }
}
