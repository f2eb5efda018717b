//! A controller and workers that do as they are told at once, for tests of what it decides.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::BTreeMap;

use shoal_control::controller::record::{Change, Record};
use shoal_control::controller::state::{Class, Interval, JobSpec, State};
use shoal_control::controller::{Action, Event, Proposal};
use shoal_control::message::*;
use shoal_control::{Controller, Settings};
use shoal_plan::{Closing, Standing};

pub struct Fleet {
    pub controller: Controller,
    pub now_ms: u64,
    pub records: Vec<Record>,
    pub numbers: BTreeMap<WorkerId, u64>,
    pub statuses: BTreeMap<WorkerId, BTreeMap<JobId, Status>>,
    pub leaving_in_ms: BTreeMap<WorkerId, u64>,
    /// What the planner is asked.
    pub asked: Vec<(JobId, u64, Vec<WorkerId>)>,
    pub orders: BTreeMap<WorkerId, BTreeMap<JobId, Order>>,
}

pub fn spec(class: Class, workers_min: usize) -> JobSpec {
    let (name, steps) = (format!("{class:?}"), 1_000);
    let (priority, workers_max, checkpoint_every, checkpoints_kept) = (0, 9, Interval::Steps(1_000), 2);
    JobSpec {
        name,
        class,
        priority,
        steps,
        workers_min,
        workers_max,
        checkpoint_every,
        checkpoints_kept,
        description: String::new(),
    }
}

impl Fleet {
    pub fn new(workers: u64) -> Fleet {
        let mut fleet = Fleet {
            controller: Controller::new(Settings::default(), State::default()),
            now_ms: 0,
            records: Vec::new(),
            numbers: BTreeMap::new(),
            statuses: BTreeMap::new(),
            leaving_in_ms: BTreeMap::new(),
            asked: Vec::new(),
            orders: BTreeMap::new(),
        };
        fleet.step(Event::Started);
        (1..=workers).for_each(|number| fleet.join(number));
        fleet
    }

    pub fn step(&mut self, event: Event) -> Vec<Record> {
        self.now_ms += 1;
        let step = self.controller.step(self.now_ms, event);
        assert_eq!(step.misfit, None);
        for action in step.actions {
            match action {
                Action::Plan { job, request, workers, .. } => {
                    self.asked.push((job, request, workers.into_iter().map(|(worker, _)| worker).collect()));
                }
                Action::Send { to, message: ToWorker::Orders(orders) } => {
                    if let Some(jobs) = orders.jobs {
                        self.orders.insert(to, jobs);
                    }
                }
                _ => {}
            }
        }
        self.records.extend(step.records.clone());
        step.records
    }

    pub fn join(&mut self, number: u64) {
        self.step(Event::Message(ToController::Join {
            name: format!("w{number}"),
            boot: 1,
            about: format!("at {number}"),
            price: Price::default(),
        }));
        self.numbers.insert(WorkerId(number), 0);
    }

    /// One joins, and no other for a while.
    pub fn join_alone(&mut self, number: u64) {
        self.join(number);
        self.report(number);
        self.now_ms += Settings::default().gather_ms;
        self.step(Event::Tick);
    }

    /// A report of what a worker is now said to be doing.
    pub fn report(&mut self, worker: u64) -> Vec<Record> {
        let worker = WorkerId(worker);
        let number = self.numbers.get_mut(&worker).expect("joined");
        *number += 1;
        let jobs = self.statuses.get(&worker).cloned().unwrap_or_default();
        let leaving_in_ms = self.leaving_in_ms.get(&worker).copied();
        let report = Report { worker, number: *number, revision: u64::MAX, leaving_in_ms, jobs };
        self.step(Event::Message(ToController::Report(report)))
    }

    pub fn status(&mut self, worker: u64, job: u64) -> &mut Status {
        self.statuses.entry(WorkerId(worker)).or_default().entry(JobId(job)).or_default()
    }

    /// The planner's answer to the last question: all of the workers, each slice on two.
    pub fn answer(&mut self, step_ms: u64, move_ms: u64) -> Vec<Record> {
        self.answer_beside(step_ms, move_ms, None)
    }

    /// The same beside what a step of the plan in force takes now.
    pub fn answer_beside(&mut self, step_ms: u64, move_ms: u64, staying_ms: Option<u64>) -> Vec<Record> {
        let (job, request, members) = self.asked.pop().expect("a question");
        let count = members.len();
        let holders = (0..count).map(|place| vec![place, (place + 1) % count]).collect();
        let plan = Plan { members, holders, step_ms, table: String::new() };
        self.step(Event::Planned { job, request, answer: Ok(Proposal { plan, move_ms, staying_ms }) })
    }

    /// Everyone has its state, and runs.
    pub fn start(&mut self, job: u64, epoch: u64, workers: &[u64]) {
        for worker in workers {
            self.status(*worker, job).next = Some((Epoch(epoch), Progress::Ready));
            self.report(*worker);
        }
        for worker in workers {
            self.part(*worker, job, epoch, Stage::Running, Standing::at(0));
        }
    }

    pub fn part(
        &mut self,
        worker: u64,
        job: u64,
        epoch: u64,
        stage: Stage,
        standing: Standing,
    ) -> Vec<Record> {
        let part =
            Part { epoch: Epoch(epoch), stage, standing, culprit: None, pace: None, spent: Spent::default() };
        *self.status(worker, job) = Status { part: Some(part), next: None, saved: None, dead_end: None };
        self.report(worker)
    }

    pub fn silence(&mut self, heard: &[u64]) {
        let until_ms = self.now_ms + Settings::default().deadline_ms + 1;
        while self.now_ms < until_ms {
            self.now_ms += 100;
            heard.iter().for_each(|worker| drop(self.report(*worker)));
            self.step(Event::Tick);
        }
    }
}

/// The changes of jobs among records.
pub fn changes(records: &[Record]) -> Vec<(u64, Change)> {
    let change = |record: &Record| match record {
        Record::Job { job, change, .. } => Some((job.0, change.clone())),
        _ => None,
    };
    records.iter().filter_map(change).collect()
}

pub fn closing(step: u64) -> Option<Closing> {
    let (loss, norm_squared, correct) = (1.0.into(), 2.0.into(), 0.0.into());
    Some(Closing { step, loss, norm_squared, targets: 8, correct })
}

/// A job of two workers that runs its first plan.
pub fn pair() -> Fleet {
    let mut fleet = Fleet::new(2);
    fleet.step(Event::Submit { job: JobId(1), spec: spec(Class::Foreground, 1) });
    fleet.answer(100, 0);
    fleet.start(1, 1, &[1, 2]);
    assert!(changes(&fleet.records).contains(&(1, Change::Started)));
    fleet
}
