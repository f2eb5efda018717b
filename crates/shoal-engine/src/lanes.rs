//! Threads for what must not hold up the rest: messages that wait for a partner, copies, updates on the host. Each thing
//! has a thread to itself while it lasts, since most of it is waiting; threads are kept for the next.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    idle: usize,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Jobs run outside of the lock, so a panic cannot leave the queue half changed.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut queue = self.queue();
        loop {
            match queue.jobs.pop_front() {
                Some(job) => {
                    drop(queue);
                    job();
                    queue = self.queue();
                }
                None if queue.closed => return,
                None => {
                    queue.idle += 1;
                    queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
                    queue.idle -= 1;
                }
            }
        }
    }
}

/// As many threads as were ever needed at once.
#[derive(Default)]
pub(crate) struct Lanes {
    shared: Arc<Shared>,
}

impl Lanes {
    /// Starts something at once, whatever else is under way.
    pub(crate) fn start(&self, job: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let mut queue = self.shared.queue();
        queue.jobs.push_back(Box::new(job));
        if queue.jobs.len() > queue.idle {
            let shared = self.shared.clone();
            let started = std::thread::Builder::new().name("lane".into()).spawn(move || shared.work());
            if let Err(error) = started {
                queue.jobs.pop_back();
                return Err(error);
            }
        }
        self.shared.wake.notify_one();
        Ok(())
    }
}

/// Jobs that follow one another, on a thread of their own while there are any. None of them panics.
#[derive(Clone, Default)]
pub(crate) struct Line {
    shared: Arc<Mutex<Waiting>>,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    is_served: bool,
}

impl Line {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts something when all that came before has ended.
    pub(crate) fn follow(&self, lanes: &Lanes, job: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let mut waiting = self.waiting();
        if !waiting.is_served {
            let line = self.clone();
            lanes.start(move || line.serve())?;
            waiting.is_served = true;
        }
        waiting.jobs.push_back(Box::new(job));
        Ok(())
    }

    fn serve(&self) {
        while let Some(job) = self.next() {
            job();
        }
    }

    fn next(&self) -> Option<Job> {
        let mut waiting = self.waiting();
        let job = waiting.jobs.pop_front();
        waiting.is_served = job.is_some();
        job
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.shared.queue().closed = true;
        self.shared.wake.notify_all();
    }
}
