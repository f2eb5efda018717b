//! Where a job's time and money went, over a course whose every millisecond is known.

use crate::common::spec;
use shoal_control::controller::receipt::{Amount, Bill, Parts};
use shoal_control::controller::record::{Change, Failure, Loss, Record, Why};
use shoal_control::controller::state::{Class, Rest, State, Wish};
use shoal_control::message::*;
use shoal_control::{Controller, Settings};

const JOB: JobId = JobId(1);

/// The state that follows from what happened when.
struct Course(State);

impl Course {
    /// Two workers, of one and two thousand nanodollars a millisecond, and a job.
    fn new() -> Course {
        let mut course = Course(State::default());
        for (number, price) in [(1, 3_600_000), (2, 7_200_000)] {
            let (worker, name) = (WorkerId(number), format!("w{number}"));
            let (about, price) = (String::new(), Price(price));
            course.apply(Record::Joined { worker, name, boot: 1, about, price, at_ms: 500 });
        }
        course.apply(Record::Submitted { job: JOB, at_ms: 700, spec: spec(Class::Foreground, 1) });
        course
    }

    fn apply(&mut self, record: Record) {
        self.0.apply(&record).unwrap_or_else(|misfit| panic!("{record:?}: {misfit}"));
    }

    fn at(&mut self, at_ms: u64, change: Change) {
        self.apply(Record::Job { job: JOB, at_ms, change });
    }

    /// A plan of both workers comes into force after 200 ms.
    fn start(&mut self, at_ms: u64, epoch: u64) {
        let members = vec![WorkerId(1), WorkerId(2)];
        let plan = Plan { members, holders: vec![vec![0], vec![1]], step_ms: 90, table: String::new() };
        self.at(at_ms, Change::Asked { request: epoch, workers: Vec::new() });
        self.at(at_ms, Change::Moving { epoch: Epoch(epoch), plan, sources: Vec::new() });
        self.at(at_ms + 200, Change::Started);
    }

    fn commit(&mut self, at_ms: u64, step: u64) {
        self.at(at_ms, Change::Committed { step, closing: None });
    }

    fn save(&mut self, at_ms: u64, id: u64, step: u64) {
        let save = Save { checkpoint: Checkpoint { id, step }, writers: vec![WorkerId(1)] };
        self.at(at_ms, Change::SaveBegun { save, every_steps: 2 });
    }

    fn bill(&self, now_ms: u64) -> Bill {
        let controller = Controller::new(Settings::default(), self.0.clone());
        let bill = controller.bill(JOB, now_ms).expect("there");
        assert_eq!(bill.parts.sum(), bill.whole, "the parts add up to the whole");
        bill
    }
}

fn worker_ms(parts: &Parts) -> [u64; 7] {
    parts.named().map(|(_, amount)| amount.worker_ms)
}

#[test]
fn every_millisecond_of_a_course_is_somewhere() {
    let mut course = Course::new();
    assert_eq!(course.bill(900), Bill::default(), "nobody has anything of it");
    course.start(1_100, 1);
    course.commit(1_400, 1);
    course.commit(1_500, 2);
    course.save(1_500, 1, 2);
    course.commit(1_600, 3);
    course.at(1_600, Change::SaveCompleted { cost_ms: 10 });
    course.commit(1_700, 4);
    // 2 × 200 ms until it began, then four steps of 2 × 100 ms, which nobody has accounted for yet.
    assert_eq!(worker_ms(&course.bill(1_700).parts), [0, 0, 0, 780, 20, 400, 0]);
    course.apply(Record::Lost { worker: WorkerId(2), how: Loss::Silent, at_ms: 1_750 });
    course.at(1_760, Change::Stopping { after: None, why: Why::Lost, next: None });
    let spent = Spent { useful_ms: 500, recompute_ms: 100, bubble_ms: 40 };
    course.at(1_800, Change::Decided { step: 4, closing: None, spent });
    // A fifth step was begun and given up: 2 × 50 ms, and 50 ms more of the one that was left.
    assert_eq!(worker_ms(&course.bill(1_800).parts), [500, 100, 40, 140, 20, 400, 150]);
    course.at(1_800, Change::Settled);
    course.at(1_900, Change::Restored { spent: Spent::default() });
    // Back to the second of four steps: half of what they took is lost.
    let bill = course.bill(1_900);
    assert_eq!(worker_ms(&bill.parts), [250, 50, 20, 70, 10, 500, 550]);
    let (first, second) = (800 * 1_000, 650 * 2_000);
    assert_eq!(bill.whole, Amount { worker_ms: 800 + 650, nanodollars: first + second });
    assert_eq!((bill.steps_ms, bill.foreseen_ms), (400, 360));
    assert_eq!(course.bill(9_000).whole, bill.whole, "nobody has anything of it");
}

#[test]
fn steps_whose_checkpoint_cannot_be_read_are_lost_until_it_can() {
    let mut course = Course::new();
    course.start(1_000, 1);
    for step in 1..=4 {
        course.commit(1_200 + 100 * step, step);
        if step % 2 == 0 {
            course.save(1_200 + 100 * step, step / 2, step);
            course.at(1_200 + 100 * step, Change::SaveCompleted { cost_ms: 0 });
        }
    }
    course.at(1_600, Change::Stopping { after: Some(3), why: Why::Wished, next: None });
    let spent = Spent { useful_ms: 800, ..Spent::default() };
    course.at(1_600, Change::Decided { step: 4, closing: None, spent });
    course.at(1_600, Change::Settled);
    course.at(1_600, Change::Rested { rest: Rest::Paused });
    assert_eq!(worker_ms(&course.bill(1_600).parts), [800, 0, 0, 0, 0, 400, 0]);
    for (try_, lost) in [(0, 0), (1, 0), (2, 400)] {
        course.start_in_vain(2_000 + try_ * 100, 2 + try_);
        let parts = course.bill(3_000).parts;
        assert_eq!((parts.useful.worker_ms, parts.lost.worker_ms), (800 - lost, lost));
    }
    assert_eq!(course.0.jobs[&JOB].committed, 2);
    for try_ in 3..6 {
        course.start_in_vain(2_000 + try_ * 100, 2 + try_);
    }
    assert_eq!(course.0.jobs[&JOB].failure.as_deref(), Some("gone"), "there is no older one");
    course.at(2_600, Change::Rested { rest: Rest::Failed });
    course.at(2_700, Change::Wished { wish: Wish::Run });
    let parts = course.bill(3_000).parts;
    assert_eq!((parts.useful.worker_ms, parts.lost.worker_ms), (800, 0));
    assert_eq!(course.0.jobs[&JOB].committed, 4, "all of them are tried again");
}

impl Course {
    fn start_in_vain(&mut self, at_ms: u64, epoch: u64) {
        let members = vec![WorkerId(1), WorkerId(2)];
        let plan = Plan { members, holders: vec![vec![0], vec![1]], step_ms: 90, table: String::new() };
        self.at(at_ms, Change::Asked { request: epoch, workers: Vec::new() });
        self.at(at_ms, Change::Moving { epoch: Epoch(epoch), plan, sources: Vec::new() });
        self.at(at_ms, Change::Abandoned { why: Failure::Source("gone".to_owned()) });
    }
}
