//! What the controller decides, one thing at a time; that it holds whatever happens is the drill's to show.

use std::collections::BTreeMap;

use crate::common::{Fleet, changes, closing, pair, spec};
use shoal_control::controller::record::{Change, Failure, Loss, Record, Why};
use shoal_control::controller::state::{Class, Interval, JobSpec, Phase, Rest, State, Wish};
use shoal_control::controller::{Action, Event};
use shoal_control::message::*;
use shoal_control::{Controller, Settings};
use shoal_plan::Standing;

#[test]
fn after_a_death_the_survivor_goes_where_the_dead_one_was() {
    let mut fleet = pair();
    // The first has applied step 0 and says so; the second only has its gradient. Then the first dies.
    let standing = Standing { closing: closing(0), ..Standing::at(1) };
    let committed = fleet.part(1, 1, 1, Stage::Running, standing);
    assert_eq!(changes(&committed), [(1, Change::Committed { step: 1, closing: closing(0) })]);
    fleet.silence(&[2]);
    let stopping = Change::Stopping { after: None, why: Why::Lost, next: None };
    assert!(changes(&fleet.records).contains(&(1, stopping)), "{:?}", fleet.records);
    let has_gradient = Standing { reduced: true, ..Standing::at(0) };
    let decided = fleet.part(2, 1, 1, Stage::Stopped, has_gradient);
    let goes_on = Change::Decided { step: 1, closing: closing(0), spent: Spent::default() };
    assert_eq!(changes(&decided), [(1, goes_on)]);
    let order = &fleet.orders[&WorkerId(2)][&JobId(1)];
    assert_eq!(order.command, Command::GoTo { step: 1, closing: closing(0) });
}

#[test]
fn one_that_starts_again_says_what_had_been_decided() {
    let mut fleet = pair();
    fleet.silence(&[2]);
    fleet.part(
        2,
        1,
        1,
        Stage::Stopped,
        Standing { step: 0, applied: true, reduced: true, closing: closing(0) },
    );
    let order = fleet.orders[&WorkerId(2)][&JobId(1)].clone();
    assert_eq!(order.command, Command::GoTo { step: 1, closing: closing(0) });

    let mut state = State::default();
    fleet.records.iter().for_each(|record| state.apply(record).expect("fits"));
    assert_eq!(state, *fleet.controller.state(), "the records are all there is to it");
    let mut again = Controller::new(Settings::default(), state);
    again.step(5_000_000, Event::Started);
    let jobs = fleet.statuses[&WorkerId(2)].clone();
    let report = Report { worker: WorkerId(2), number: 900, revision: 0, leaving_in_ms: None, jobs };
    let step = again.step(5_000_001, Event::Message(ToController::Report(report)));
    let said = step.actions.iter().any(|action| match action {
        Action::Send { message: ToWorker::Orders(orders), .. } => {
            orders.jobs.as_ref().is_some_and(|jobs| jobs[&JobId(1)] == order)
        }
        _ => false,
    });
    assert!(said, "{:?}", step.actions);
}

#[test]
fn a_newcomer_is_taken_in_if_that_pays() {
    for (step_ms, move_ms, pays) in [(70, 500, true), (100, 500, false), (99, 60_000, false)] {
        let mut fleet = pair();
        fleet.join_alone(3);
        let records = fleet.answer(step_ms, move_ms);
        match (&changes(&records)[..], pays) {
            ([(1, Change::Stopping { why: Why::Pays, after: Some(1), next: Some(_) })], true) => {}
            ([(1, Change::Declined { weighing })], false) => assert_eq!(weighing.move_ms, move_ms),
            _ => panic!("{step_ms} ms after {move_ms} ms: {records:?}"),
        }
    }
}

#[test]
fn a_change_is_expected_to_pause_as_long_as_the_last_one() {
    let mut fleet = pair();
    fleet.join_alone(3);
    fleet.answer(70, 0);
    for worker in [1, 2] {
        fleet.status(worker, 1).part.as_mut().expect("runs").stage = Stage::Stopped;
        fleet.report(worker);
    }
    fleet.now_ms += 20_000;
    fleet.start(1, 2, &[1, 2, 3]);
    fleet.join_alone(4);
    let records = fleet.answer(69, 0);
    let [(1, Change::Declined { weighing })] = &changes(&records)[..] else { panic!("{records:?}") };
    assert!((20_000..21_000).contains(&weighing.move_ms), "{weighing:?}");
}

#[test]
fn a_plan_in_force_is_weighed_as_it_runs_now() {
    // It was foreseen to take 100 ms a step, before one of its workers became slow.
    for (staying_ms, pays) in [(None, false), (Some(120), false), (Some(290), true)] {
        let mut fleet = pair();
        fleet.join_alone(3);
        let records = fleet.answer_beside(120, 500, staying_ms);
        match (&changes(&records)[..], pays) {
            ([(1, Change::Stopping { why: Why::Pays, .. })], true) => {}
            ([(1, Change::Declined { weighing })], false) => {
                assert_eq!(weighing.step_ms, staying_ms.unwrap_or(100));
            }
            _ => panic!("{staying_ms:?}: {records:?}"),
        }
    }
}

#[test]
fn a_slow_device_is_found_by_its_own_steps_even_alone() {
    let mut fleet = Fleet::new(1);
    fleet.step(Event::Submit { job: JobId(1), spec: spec(Class::Foreground, 1) });
    fleet.answer(100, 0);
    fleet.start(1, 1, &[1]);
    let chance = [(0, 105), (1, 300), (2, 300), (3, 110), (4, 300), (5, 310), (6, 20), (7, 300), (8, 310)];
    for (step, percent) in chance {
        let part = fleet.status(1, 1).part.as_mut().expect("runs");
        part.pace = Some((step, percent));
        fleet.report(1);
        fleet.report(1);
    }
    assert!(
        !fleet.records.iter().any(|record| matches!(record, Record::Paced { .. })),
        "two in a row are chance"
    );
    for step in 9..99 {
        fleet.status(1, 1).part.as_mut().expect("runs").pace = Some((step, 180));
        fleet.report(1);
    }
    assert!(
        !fleet.records.iter().any(|record| matches!(record, Record::Paced { .. })),
        "so are many that are over in a moment, where they are not far off"
    );
    let paced = |fleet: &mut Fleet, paces: [(u64, u32); 3]| {
        let report = |pace| {
            fleet.status(1, 1).part.as_mut().expect("runs").pace = Some(pace);
            fleet.now_ms += Settings::default().slow_ms / 2;
            fleet.report(1)
        };
        paces.map(report).into_iter().flatten().collect::<Vec<Record>>()
    };
    let records = paced(&mut fleet, [(99, 110), (100, 110), (101, 110)]);
    assert!(records.is_empty(), "{records:?}");
    let records = paced(&mut fleet, [(102, 300), (103, 290), (104, 900)]);
    assert_eq!(records[0], Record::Paced { worker: WorkerId(1), percent: 290 }, "the least of them");
    assert!(matches!(changes(&records)[0], (1, Change::Asked { .. })), "{records:?}");
    // It has another pace already. That is asked about when the answer has come.
    let records = paced(&mut fleet, [(105, 900), (106, 900), (107, 900)]);
    assert_eq!(records, [Record::Paced { worker: WorkerId(1), percent: 900 }]);
    let records = fleet.answer(100, 0);
    let [(1, Change::Declined { .. }), (1, Change::Asked { .. })] = &changes(&records)[..] else {
        panic!("{records:?}")
    };
}

#[test]
fn foreground_takes_from_background_and_gives_back_what_it_does_not_need() {
    let mut fleet = Fleet::new(2);
    fleet.step(Event::Submit { job: JobId(1), spec: spec(Class::Background, 1) });
    fleet.answer(100, 0);
    fleet.start(1, 1, &[1, 2]);
    let needs_one = JobSpec { workers_max: 1, ..spec(Class::Foreground, 1) };
    let records = fleet.step(Event::Submit { job: JobId(2), spec: needs_one });
    let stopping = Change::Stopping { after: Some(1), why: Why::Taken, next: None };
    assert!(changes(&records).contains(&(1, stopping)), "{records:?}");
    assert!(fleet.asked.is_empty(), "the worker is not free yet");
    for worker in [1, 2] {
        fleet.part(worker, 1, 1, Stage::Stopped, Standing::at(0));
    }
    assert_eq!(fleet.asked.pop().map(|asked| (asked.0, asked.2)), Some((JobId(1), vec![WorkerId(1)])));
}

#[test]
fn one_that_leaves_is_released_when_nothing_is_on_it() {
    let mut fleet = pair();
    fleet.join(3);
    fleet.leaving_in_ms.insert(WorkerId(3), 9_000);
    let records = fleet.report(3);
    let left = |record: &Record| matches!(record, Record::Lost { worker: WorkerId(3), how: Loss::Left, .. });
    assert!(records.iter().any(left), "{records:?}");
    fleet.leaving_in_ms.insert(WorkerId(2), 9_000);
    let records = fleet.report(2);
    let stops = |change: &(u64, Change)| {
        matches!(change, (1, Change::Stopping { after: Some(_), why: Why::Taken, .. }))
    };
    assert!(changes(&records).iter().any(stops), "{records:?}");
    assert!(fleet.controller.state().is_alive(WorkerId(2)), "it has state that others need");
}

#[test]
fn a_cancelled_job_rests_when_its_workers_have_stopped() {
    let mut fleet = pair();
    fleet.step(Event::Wish { job: JobId(1), wish: Wish::Cancel });
    fleet.part(1, 1, 1, Stage::Stopped, Standing::at(0));
    assert!(matches!(fleet.controller.state().jobs[&JobId(1)].phase, Phase::Stopping { .. }));
    fleet.part(2, 1, 1, Stage::Stopped, Standing::at(0));
    assert_eq!(fleet.controller.state().jobs[&JobId(1)].phase, Phase::Resting(Rest::Cancelled));
    assert_eq!(fleet.orders[&WorkerId(1)], BTreeMap::new(), "nothing of it is kept");
}

#[test]
fn a_joining_said_again_is_no_other_worker() {
    let mut fleet = Fleet::new(1);
    let join = |boot| {
        Event::Message(ToController::Join {
            name: "w1".to_owned(),
            boot,
            about: String::new(),
            price: Price(7),
        })
    };
    assert_eq!(fleet.step(join(1)), []);
    let records = fleet.step(join(5));
    assert!(
        matches!(records[0], Record::Lost { worker: WorkerId(1), how: Loss::Replaced, .. }),
        "{records:?}"
    );
    assert!(matches!(records[1], Record::Joined { worker: WorkerId(2), boot: 5, .. }), "{records:?}");
    assert_eq!(fleet.step(join(1)), [], "late, and from a life that is over");
}

#[test]
fn one_that_leaves_takes_part_in_moving_its_state_away() {
    let mut fleet = pair();
    fleet.leaving_in_ms.insert(WorkerId(1), 60_000);
    fleet.report(1);
    for worker in [1, 2] {
        fleet.part(worker, 1, 1, Stage::Stopped, Standing::at(0));
    }
    // The plan is for the other alone, and all of its state comes from the two.
    fleet.answer(100, 0);
    let install = |worker: u64| match &fleet.orders[&WorkerId(worker)][&JobId(1)] {
        Order { epoch, command: Command::Install(installation), .. } => (*epoch, installation.clone()),
        other => panic!("worker {worker}: {other:?}"),
    };
    let (epoch, installation) = install(2);
    assert_eq!(installation.plan.members, [WorkerId(2)]);
    assert_eq!(install(1), (epoch, installation), "it is told the same as those it sends to");
    // Once the new plan runs, nothing of the job is left to it, and it may go.
    fleet.status(2, 1).next = Some((epoch, Progress::Ready));
    let records = fleet.report(2);
    assert!(changes(&records).contains(&(1, Change::Started)), "{records:?}");
    let left = Record::Lost { worker: WorkerId(1), how: Loss::Left, at_ms: fleet.now_ms };
    assert!(records.contains(&left), "{records:?}");
}

/// A job of two workers that was saved at step 1 and at step 2, and is paused.
fn saved_twice() -> Fleet {
    let mut fleet = pair();
    for step in 1..=2 {
        let standing = Standing { closing: closing(step - 1), ..Standing::at(step) };
        let epoch = if step == 1 { 1 } else { 2 };
        for worker in [1, 2] {
            fleet.part(worker, 1, epoch, Stage::Running, standing);
        }
        fleet.step(Event::Wish { job: JobId(1), wish: Wish::Pause });
        for worker in [1, 2] {
            fleet.part(worker, 1, epoch, Stage::Stopped, standing);
        }
        for worker in [1, 2] {
            fleet.status(worker, 1).saved = Some(Saved { id: step, done: true, cost_ms: 40 });
            fleet.report(worker);
        }
        fleet.statuses.clear();
        if step == 1 {
            fleet.step(Event::Wish { job: JobId(1), wish: Wish::Run });
            fleet.answer(100, 0);
            fleet.start(1, 2, &[1, 2]);
        }
    }
    let job = &fleet.controller.state().jobs[&JobId(1)];
    assert_eq!(job.checkpoints, [Checkpoint { id: 1, step: 1 }, Checkpoint { id: 2, step: 2 }]);
    assert_eq!(job.save_cost_ms, Some(40));
    fleet
}

/// The first worker says why it could not get its state of a plan; what follows at once, and what after a while.
fn hinder(fleet: &mut Fleet, obstacle: Obstacle) -> Vec<(u64, Change)> {
    let epoch = fleet.controller.state().jobs[&JobId(1)].epoch;
    fleet.status(1, 1).next = Some((epoch, Progress::Failed(obstacle)));
    let mut records = fleet.report(1);
    fleet.now_ms += 10_000;
    records.extend(fleet.step(Event::Tick));
    changes(&records)
}

#[test]
fn a_checkpoint_that_cannot_be_read_is_passed_over_and_the_last_one_is_not_begun_without() {
    let mut fleet = saved_twice();
    let unreadable = || Obstacle::Source("part 3 is damaged".to_owned());
    fleet.step(Event::Wish { job: JobId(1), wish: Wish::Run });
    for committed in [2, 2, 2, 1, 1, 1] {
        let job = &fleet.controller.state().jobs[&JobId(1)];
        assert_eq!(job.committed, committed);
        fleet.answer(100, 0);
        hinder(&mut fleet, unreadable());
    }
    let job = &fleet.controller.state().jobs[&JobId(1)];
    assert_eq!((job.phase.clone(), job.committed), (Phase::Resting(Rest::Failed), 1));
    assert_eq!(job.failure.as_deref(), Some("part 3 is damaged"));
    assert_eq!(job.kept(), [1, 2], "its owner may mend what could not be read");
    assert!(fleet.asked.is_empty() && fleet.step(Event::Tick).is_empty(), "it waits for its owner");
    // The owner has seen to it.
    fleet.step(Event::Wish { job: JobId(1), wish: Wish::Run });
    let job = &fleet.controller.state().jobs[&JobId(1)];
    assert_eq!((job.committed, &job.failure), (2, &None));
    fleet.answer(100, 0);
    fleet.statuses.clear();
    let epoch = fleet.controller.state().jobs[&JobId(1)].epoch;
    fleet.start(1, epoch.0, &[1, 2]);
    assert_eq!(fleet.controller.state().jobs[&JobId(1)].phase, Phase::Running);
}

#[test]
fn what_could_not_be_read_is_tried_again_after_longer_and_longer_pauses() {
    let mut fleet = saved_twice();
    fleet.step(Event::Wish { job: JobId(1), wish: Wish::Run });
    let retry_ms = Settings::default().retry_ms;
    for pause_ms in [retry_ms, 2 * retry_ms] {
        fleet.answer(100, 0);
        let epoch = fleet.controller.state().jobs[&JobId(1)].epoch;
        fleet.status(1, 1).next = Some((epoch, Progress::Failed(Obstacle::Source("away".to_owned()))));
        fleet.report(1);
        fleet.now_ms += pause_ms - 2;
        fleet.step(Event::Tick);
        assert!(fleet.asked.is_empty(), "not yet");
        fleet.step(Event::Tick);
        assert_eq!(fleet.asked.len(), 1);
    }
}

#[test]
fn a_worker_that_nothing_can_be_installed_on_gets_no_work() {
    let mut fleet = saved_twice();
    fleet.step(Event::Wish { job: JobId(1), wish: Wish::Run });
    let broken = || Obstacle::Worker("no driver".to_owned());
    fleet.answer(100, 0);
    hinder(&mut fleet, broken());
    fleet.answer(100, 0);
    hinder(&mut fleet, broken());
    let quarantined = fleet.controller.state().members[&WorkerId(1)].quarantined_until_ms;
    assert!(quarantined.is_some(), "{:?}", fleet.records.last());
    assert_eq!(fleet.asked.pop().map(|asked| asked.2), Some(vec![WorkerId(2)]));
}

#[test]
fn a_job_that_cannot_begin_says_why_and_asks_for_its_owner() {
    let sentence = || "the folder of its weights is not there".to_owned();
    for (obstacle, tries) in [(Obstacle::Source(sentence()), 3), (Obstacle::Worker(sentence()), 4)] {
        let mut fleet = Fleet::new(1);
        fleet.step(Event::Submit { job: JobId(1), spec: spec(Class::Foreground, 1) });
        for _ in 0..tries {
            assert!(!fleet.controller.state().jobs[&JobId(1)].has_failed());
            fleet.answer(100, 0);
            hinder(&mut fleet, obstacle.clone());
        }
        let job = &fleet.controller.state().jobs[&JobId(1)];
        assert_eq!((&job.phase, &job.failure), (&Phase::Resting(Rest::Failed), &Some(sentence())));
        assert!(fleet.asked.is_empty());
        fleet.step(Event::Wish { job: JobId(1), wish: Wish::Run });
        assert_eq!(fleet.asked.len(), 1, "it is tried again");
    }
}

#[test]
fn where_there_is_no_room_to_move_state_goes_through_a_checkpoint() {
    let mut fleet = pair();
    fleet.join_alone(3);
    fleet.answer(50, 10);
    let standing = Standing { closing: closing(0), ..Standing::at(1) };
    for worker in [1, 2] {
        fleet.part(worker, 1, 1, Stage::Stopped, standing);
    }
    let begun = hinder(&mut fleet, Obstacle::Room);
    assert_eq!(begun[0].1, Change::Abandoned { why: Failure::Room });
    assert!(matches!(begun[1].1, Change::SaveBegun { .. }), "{begun:?}");
    assert!(fleet.orders[&WorkerId(1)][&JobId(1)].save.is_some(), "nobody has let go yet");
    for worker in [1, 2] {
        fleet.status(worker, 1).saved = Some(Saved { id: 1, done: true, cost_ms: 40 });
        fleet.report(worker);
    }
    assert!(changes(&fleet.records).contains(&(1, Change::Released)));
    assert_eq!(fleet.orders[&WorkerId(1)], BTreeMap::new(), "everyone lets go");
    fleet.answer(50, 10);
    let Command::Install(installation) = &fleet.orders[&WorkerId(1)][&JobId(1)].command else {
        panic!("{:?}", fleet.orders[&WorkerId(1)])
    };
    assert_eq!(installation.source, Source::Checkpoint(Checkpoint { id: 1, step: 1 }));
}

/// All workers of the first job's plan are at a step; gives the interval of a checkpoint that begins then.
fn save_begun(fleet: &mut Fleet, step: u64) -> Option<u64> {
    let standing = Standing { closing: closing(step - 1), ..Standing::at(step) };
    let begun = |(_, change): (u64, Change)| match change {
        Change::SaveBegun { every_steps, .. } => Some(every_steps),
        _ => None,
    };
    let records: Vec<Record> =
        [1, 2].into_iter().flat_map(|worker| fleet.part(worker, 1, 1, Stage::Running, standing)).collect();
    changes(&records).into_iter().find_map(begun)
}

#[test]
fn how_often_is_saved_follows_from_what_saving_cost() {
    let mut fleet = Fleet::new(2);
    let spec = JobSpec { checkpoint_every: Interval::Auto, ..spec(Class::Foreground, 1) };
    fleet.step(Event::Submit { job: JobId(1), spec });
    fleet.answer(100, 0);
    fleet.start(1, 1, &[1, 2]);
    // The first comes after ten seconds, by the plan; nobody knows yet what it costs.
    assert_eq!(save_begun(&mut fleet, 99), None);
    assert_eq!(save_begun(&mut fleet, 100), Some(100));
    save_begun(&mut fleet, 102);
    for worker in [1, 2] {
        fleet.status(worker, 1).saved = Some(Saved { id: 1, done: true, cost_ms: 100 * worker });
        fleet.report(worker);
    }
    assert!(changes(&fleet.records).contains(&(1, Change::SaveCompleted { cost_ms: 200 })));
    // Of sqrt(2 · 200 · 600,000) ms, 155 steps.
    assert_eq!(save_begun(&mut fleet, 102 + 154), None);
    assert_eq!(save_begun(&mut fleet, 102 + 155), Some(155));
}

#[test]
fn a_machine_that_does_not_help_one_job_goes_to_the_next() {
    let mut fleet = Fleet::new(0);
    for job in [1, 2] {
        fleet.step(Event::Submit { job: JobId(job), spec: spec(Class::Foreground, 1) });
        fleet.join(job);
        fleet.report(job);
        fleet.answer(100, 0);
        fleet.start(job, 1, &[job]);
    }
    fleet.join_alone(3);
    assert_eq!(fleet.asked.last().map(|(job, _, workers)| (job.0, workers.len())), Some((1, 2)));
    let records = fleet.answer(100, 0);
    assert!(matches!(changes(&records)[0], (1, Change::Declined { .. })), "{records:?}");
    assert_eq!(
        fleet.asked.last().map(|(job, _, workers)| (job.0, workers.clone())),
        Some((2, vec![WorkerId(2), WorkerId(3)]))
    );
    let records = fleet.answer(60, 0);
    assert!(matches!(changes(&records)[0], (2, Change::Stopping { why: Why::Pays, .. })), "{records:?}");
}

/// A job of two workers that has come to a dead end after its first step, of which both have said.
fn dead_end() -> Fleet {
    let mut fleet = pair();
    for worker in [1, 2] {
        let standing = Standing { closing: closing(0), ..Standing::at(1) };
        fleet.status(worker, 1).dead_end = Some((Epoch(1), "step 1: the loss is NaN".into()));
        let part = fleet.status(worker, 1).part.as_mut().expect("runs");
        (part.stage, part.standing, part.culprit) = (Stage::Stopped, standing, Some(WorkerId(3 - worker)));
        fleet.report(worker);
    }
    fleet
}

#[test]
fn a_dead_end_fails_the_job_where_it_stands_and_blames_nobody() {
    let mut fleet = dead_end();
    let told = changes(&fleet.records);
    let reason = "step 1: the loss is NaN".to_owned();
    assert_eq!(
        told.iter().filter(|(_, change)| *change == Change::DeadEnd { reason: reason.clone() }).count(),
        1
    );
    let (_, last) = told.last().expect("something");
    let Change::SaveBegun { save, .. } = last else { panic!("{told:?}") };
    assert_eq!(save.checkpoint.step, 1);
    for worker in [1, 2] {
        fleet.status(worker, 1).saved = Some(Saved { id: save.checkpoint.id, done: true, cost_ms: 1 });
        fleet.report(worker);
    }
    let job = &fleet.controller.state().jobs[&JobId(1)];
    assert_eq!((&job.phase, job.committed, job.saved_step()), (&Phase::Resting(Rest::Failed), 1, 1));
    assert_eq!(job.failure, Some(reason));
    let blamed = |record: &Record| matches!(record, Record::Quarantined { .. });
    assert!(!fleet.records.iter().any(blamed), "{:?}", fleet.records);
    assert!(fleet.asked.is_empty(), "another plan was asked for");
    let resumed = fleet.step(Event::Wish { job: JobId(1), wish: Wish::Run });
    assert!(
        matches!(changes(&resumed)[..], [(1, Change::Wished { .. }), (1, Change::Asked { .. })]),
        "{resumed:?}"
    );
}

#[test]
fn a_dead_end_that_cannot_be_saved_is_not_saved_for_ever() {
    let mut fleet = dead_end();
    let mut saves = 0;
    while let Some(save) = fleet.controller.state().jobs[&JobId(1)].saving.clone() {
        saves += 1;
        assert!(saves < 10, "it is tried again and again");
        fleet.status(1, 1).saved = Some(Saved { id: save.checkpoint.id, done: false, cost_ms: 1 });
        fleet.report(1);
    }
    let job = &fleet.controller.state().jobs[&JobId(1)];
    assert_eq!((&job.phase, job.committed, saves), (&Phase::Resting(Rest::Failed), 0, 3));
}

/// A job of three workers that runs its first plan.
fn trio() -> Fleet {
    let mut fleet = Fleet::new(3);
    fleet.step(Event::Submit { job: JobId(1), spec: spec(Class::Foreground, 1) });
    fleet.answer(100, 0);
    fleet.start(1, 1, &[1, 2, 3]);
    fleet
}

fn vanishes(worker: u64) -> impl Fn(&Record) -> bool {
    move |record| matches!(record, Record::Lost { worker: lost, how: Loss::Vanished, .. } if lost.0 == worker)
}

#[test]
fn those_who_join_together_are_one_question() {
    let mut fleet = pair();
    fleet.join(3);
    fleet.report(3);
    assert!(fleet.asked.is_empty(), "others may come");
    fleet.join_alone(4);
    let workers: Vec<u64> =
        fleet.asked.iter().flat_map(|(_, _, workers)| workers).map(|worker| worker.0).collect();
    assert_eq!(workers, [1, 2, 3, 4]);
}

#[test]
fn one_whose_connection_ended_and_whose_plan_stalls_is_dead_and_its_lease_is_waited_for() {
    let mut fleet = trio();
    let heard_ms = fleet.now_ms;
    assert_eq!(fleet.step(Event::Closed { worker: WorkerId(3) }), [], "it may come back");
    fleet.part(1, 1, 1, Stage::Stopped, Standing::at(0));
    assert!(fleet.records.iter().any(vanishes(3)), "{:?}", fleet.records);
    fleet.part(2, 1, 1, Stage::Stopped, Standing::at(0));
    fleet.answer(100, 0);
    for worker in [1, 2] {
        fleet.status(worker, 1).next = Some((Epoch(2), Progress::Ready));
        fleet.report(worker);
    }
    let started = (1, Change::Started);
    let first = changes(&fleet.records).iter().filter(|change| **change == started).count();
    assert_eq!(first, 1, "the third may still run the plan before");
    let deadline_ms = Settings::default().deadline_ms;
    while fleet.now_ms < heard_ms + deadline_ms {
        let records = fleet.step(Event::Tick);
        assert!(!changes(&records).contains(&started) || fleet.now_ms >= heard_ms + deadline_ms - 1);
        [1, 2].iter().for_each(|worker| drop(fleet.report(*worker)));
    }
    fleet.step(Event::Tick);
    assert_eq!(changes(&fleet.records).iter().filter(|change| **change == started).count(), 2);
}

#[test]
fn one_whose_connection_ended_is_waited_for_where_nobody_misses_it_or_it_alone_has_something() {
    // Its peers still hear it.
    let mut fleet = trio();
    fleet.step(Event::Closed { worker: WorkerId(3) });
    fleet.report(3);
    fleet.part(1, 1, 1, Stage::Stopped, Standing::at(0));
    fleet.status(1, 1).part.as_mut().expect("it has a part").culprit = Some(WorkerId(3));
    let records = fleet.report(1);
    assert!(!records.iter().any(vanishes(3)), "it was heard of since: {records:?}");
    // One with nothing to do is no loss, and no plan should count on it.
    let mut fleet = Fleet::new(1);
    let records = fleet.step(Event::Closed { worker: WorkerId(1) });
    assert!(records.iter().any(vanishes(1)), "{records:?}");
}
