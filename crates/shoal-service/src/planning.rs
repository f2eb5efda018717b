//! Asking the planner, beside everything else: a plan may take a second, and heartbeats do not wait. A few threads answer
//! questions; a job's newer question replaces one that nobody has begun. Where there is none, the planner looks ahead: a
//! plan that is known before a worker is lost is time that training does not stand still.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use rustix::process::setpriority_process;
use shoal_control::controller::{Keeping, Proposal};
use shoal_control::message::{JobId, Plan, WorkerId};

/// The nice value of what nobody waits for. On Linux it is the calling thread's, and of those that it starts.
const LEAST_URGENT: i32 = 19;

/// Threads that plan at a time.
const PLANNERS_MAX: usize = 2;

/// What the controller needs of those who know what jobs and plans are.
pub trait Planner: Send + Sync + 'static {
    /// Reads a job and takes it on, or says why not, and what may be done about it.
    fn take(&self, description: &str) -> Result<(), Unfit>;
    /// The best plan for a job on these workers, or why there is none.
    fn plan(&self, question: &Question) -> Result<Proposal, String>;
    /// May find out what it will answer if a worker of these is lost. It is to come back soon after `is_free` says no.
    fn foresee(&self, _question: &Question, _is_free: &dyn Fn() -> bool) {}
    /// Removes checkpoints of the job that do not count any more.
    fn keep_checkpoints(&self, job: JobId, description: &str, keeping: &Keeping) -> Result<(), String>;
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
    Keep { description: String, keeping: Keeping },
    Foresee(Question),
}

/// What kind of errand it is, the most urgent first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Plan,
    Keep,
    Foresee,
}

#[derive(Default)]
struct Waiting {
    /// One of each kind a job: the newest.
    errands: BTreeMap<(Kind, JobId), Errand>,
    /// Somebody looks ahead: others are there for what is asked.
    foresees: bool,
    ended: bool,
}

impl Waiting {
    fn take(&mut self) -> Option<(JobId, Errand)> {
        let (kind, job) = *self.errands.keys().next()?;
        if kind == Kind::Foresee && self.foresees {
            return None;
        }
        self.foresees |= kind == Kind::Foresee;
        self.errands.remove(&(kind, job)).map(|errand| (job, errand))
    }

    /// Nobody waits for an answer.
    fn is_idle(&self) -> bool {
        !self.ended && self.errands.keys().all(|(kind, _)| *kind == Kind::Foresee)
    }
}

/// The threads that plan.
pub struct Planners {
    shared: Arc<Shared>,
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
                    run(&*planner, &shared, job, errand, &answers, &complaints);
                }
            });
        }
        Planners { shared }
    }

    pub fn ask(&self, question: Question) {
        put(&self.shared, (Kind::Plan, question.job), Errand::Plan(question));
    }

    pub fn keep_checkpoints(&self, job: JobId, description: &str, keeping: Keeping) {
        let errand = Errand::Keep { description: description.to_owned(), keeping };
        put(&self.shared, (Kind::Keep, job), errand);
    }
}

type Shared = (Mutex<Waiting>, Condvar);

fn put(shared: &Shared, key: (Kind, JobId), errand: Errand) {
    lock(&shared.0).errands.insert(key, errand);
    shared.1.notify_one();
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

fn next(shared: &Shared) -> Option<(JobId, Errand)> {
    let mut waiting = lock(&shared.0);
    loop {
        if waiting.ended {
            return None;
        }
        if let Some(found) = waiting.take() {
            return Some(found);
        }
        waiting = shared.1.wait(waiting).expect("nobody panics while holding it");
    }
}

fn run(
    planner: &dyn Planner,
    shared: &Shared,
    job: JobId,
    errand: Errand,
    answers: &Answers,
    complaints: &crate::Complaints,
) {
    match errand {
        Errand::Plan(question) => {
            // A planner that fails must cost its job an answer and nobody else anything.
            let planned = catch_unwind(AssertUnwindSafe(|| planner.plan(&question)));
            let answer = planned.unwrap_or_else(|_| Err("the planner failed; see its message".into()));
            let found = answer.is_ok();
            answers(job, question.request, answer);
            if found {
                put(shared, (Kind::Foresee, job), Errand::Foresee(question));
            }
        }
        Errand::Foresee(question) => {
            let is_free = || lock(&shared.0).is_idle();
            // On a thread of its own, which gives way to all else and could not become urgent again. What it does not find
            // out it will be asked.
            std::thread::scope(|scope| {
                let looks = || {
                    let _ = setpriority_process(None, LEAST_URGENT);
                    let _ = catch_unwind(AssertUnwindSafe(|| planner.foresee(&question, &is_free)));
                };
                let _ = std::thread::Builder::new().spawn_scoped(scope, looks);
            });
            lock(&shared.0).foresees = false;
            shared.1.notify_one();
        }
        Errand::Keep { description, keeping } => {
            let kept =
                catch_unwind(AssertUnwindSafe(|| planner.keep_checkpoints(job, &description, &keeping)));
            if let Ok(Err(why)) = kept {
                complaints(&format!("job {}: old checkpoints were not removed: {why}", job.0));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};

    use super::*;

    /// Says what it is asked and what it looks ahead for, which it does until somebody else waits.
    struct Noting(Mutex<Sender<(&'static str, u64)>>);

    impl Noting {
        fn say(&self, what: &'static str, request: u64) {
            let _ = self.0.lock().unwrap().send((what, request));
        }
    }

    impl Planner for Noting {
        fn take(&self, _: &str) -> Result<(), Unfit> {
            Ok(())
        }

        fn plan(&self, question: &Question) -> Result<Proposal, String> {
            self.say("asked", question.request);
            let plan = Plan { step_ms: 1, members: Vec::new(), holders: Vec::new(), table: String::new() };
            match question.request {
                2 => Err("no".into()),
                _ => Ok(Proposal { plan, move_ms: 0, staying_ms: None }),
            }
        }

        fn foresee(&self, question: &Question, is_free: &dyn Fn() -> bool) {
            self.say("ahead", question.request);
            while is_free() {
                std::thread::yield_now();
            }
            self.say("enough", question.request);
        }

        fn keep_checkpoints(&self, _: JobId, _: &str, _: &Keeping) -> Result<(), String> {
            Ok(())
        }
    }

    #[test]
    fn looking_ahead_makes_way_for_questions() {
        let (sender, said) = channel();
        let answers: Answers = Arc::new(|_, _, _| {});
        let planner = Arc::new(Noting(Mutex::new(sender)));
        let planners = Planners::start(planner, answers, Arc::new(|_: &str| {}));
        let ask = |request| {
            let (description, workers) = (String::new(), Vec::new());
            planners.ask(Question { job: JobId(1), request, description, workers, held: None });
        };
        ask(1);
        assert_eq!([said.recv().unwrap(), said.recv().unwrap()], [("asked", 1), ("ahead", 1)]);
        // Nothing is foreseen where there is no plan.
        ask(2);
        let mut next = [said.recv().unwrap(), said.recv().unwrap()];
        next.sort_unstable();
        assert_eq!(next, [("asked", 2), ("enough", 1)]);
        ask(3);
        assert_eq!([said.recv().unwrap(), said.recv().unwrap()], [("asked", 3), ("ahead", 3)]);
        drop(planners);
        assert_eq!(said.recv().unwrap(), ("enough", 3));
    }
}
