//! A worker's answers to what is old, doubled or missing.

use std::collections::BTreeMap;

use shoal_control::message::*;
use shoal_control::worker::{Action, EngineCommand, EngineEvent, Event};
use shoal_control::{Settings, Worker};
use shoal_plan::{Closing, Standing};

const JOB: JobId = JobId(1);
const ME: WorkerId = WorkerId(7);

fn plan() -> Plan {
    Plan { members: vec![ME], holders: vec![vec![0]], step_ms: 100, table: String::new() }
}

fn orders(acknowledged: u64, revision: u64, epoch: u64, command: Command) -> Event {
    let order = Order { epoch: Epoch(epoch), command, save: None };
    let jobs = Some(BTreeMap::from([(JOB, order)]));
    Event::Message(ToWorker::Orders(Orders { worker: ME, acknowledged, revision, jobs }))
}

fn install() -> Command {
    install_from(Source::Fresh)
}

fn install_from(source: Source) -> Command {
    let (description, abouts) = ("a job".to_owned(), BTreeMap::new());
    Command::Install(Installation { plan: plan(), source, description, abouts })
}

fn engine(event: EngineEvent) -> Event {
    Event::Engine { job: JOB, event }
}

fn commands(actions: Vec<Action>) -> Vec<EngineCommand> {
    let command = |action| match action {
        Action::Engine { command, .. } => Some(command),
        _ => None,
    };
    actions.into_iter().filter_map(command).collect()
}

/// The last report among actions.
fn report(actions: &[Action]) -> &Report {
    let report = |action| match action {
        &Action::Send(ToController::Report(ref report)) => Some(report),
        _ => None,
    };
    actions.iter().filter_map(report).next_back().expect("a report")
}

/// A worker whose epoch 1 runs since `now_ms`, with a lease from then.
fn running(now_ms: u64) -> Worker {
    let mut worker = Worker::new(Settings::default(), "w", "", 1).priced(Price(5));
    let joins = worker.step(now_ms, Event::Tick);
    assert_eq!(
        joins,
        [Action::Send(ToController::Join {
            name: "w".to_owned(),
            boot: 1,
            about: String::new(),
            price: Price(5)
        })]
    );
    let welcome = ToWorker::Welcome { name: "w".to_owned(), boot: 1, worker: ME };
    assert_eq!(report(&worker.step(now_ms, Event::Message(welcome))).number, 1);
    worker.step(now_ms, orders(1, 10, 1, install()));
    worker.step(now_ms, engine(EngineEvent::Installed { epoch: Epoch(1) }));
    let run = commands(worker.step(now_ms, orders(1, 11, 1, Command::Run { steps: 9 })));
    assert!(run.contains(&EngineCommand::Run { epoch: Epoch(1), steps: 9 }), "{run:?}");
    worker
}

#[test]
fn what_is_said_twice_is_done_once() {
    let mut worker = running(1_000);
    assert_eq!(commands(worker.step(1_001, orders(1, 11, 1, Command::Run { steps: 9 }))), []);
    assert_eq!(commands(worker.step(1_002, orders(1, 10, 1, install()))), [], "older than what was heard");
    let stop = || orders(1, 12, 1, Command::Stop { after: Some(4) });
    assert_eq!(
        commands(worker.step(1_003, stop())),
        [EngineCommand::Halt { epoch: Epoch(1), after: Some(4) }]
    );
    assert_eq!(commands(worker.step(1_004, stop())), []);
    let hurry = orders(1, 13, 1, Command::Stop { after: None });
    assert_eq!(commands(worker.step(1_005, hurry)), [EngineCommand::Halt { epoch: Epoch(1), after: None }]);
}

#[test]
fn without_a_lease_it_stops_and_never_runs_that_epoch_again() {
    let lease_ms = Settings::default().lease_ms;
    let mut worker = running(1_000);
    assert!(worker.may_run(1_000 + lease_ms - 1));
    assert_eq!(commands(worker.step(1_000 + lease_ms - 1, Event::Tick)), []);
    let halt = commands(worker.step(1_000 + lease_ms, Event::Tick));
    assert_eq!(halt, [EngineCommand::Halt { epoch: Epoch(1), after: None }]);
    let standing = Standing::at(3);
    let halted = EngineEvent::Halted { epoch: Epoch(1), standing, culprit: None };
    let actions = worker.step(1_650, engine(halted));
    let said = report(&actions);
    assert_eq!(said.jobs[&JOB].part.map(|part| part.stage), Some(Stage::Stopped));
    let again = orders(said.number, 11, 1, Command::Run { steps: 9 });
    assert_eq!(commands(worker.step(1_660, again)), [], "a lease again, but the epoch is over");
}

#[test]
fn an_acknowledgement_gives_a_lease_from_the_reports_sending() {
    let settings = Settings::default();
    let mut worker = running(1_000);
    let sent_ms = 1_000 + settings.report_every_ms;
    let number = report(&worker.step(sent_ms, Event::Tick)).number;
    let acknowledged = Orders { worker: ME, acknowledged: number, revision: 11, jobs: None };
    worker.step(sent_ms + 300, Event::Message(ToWorker::Orders(acknowledged)));
    assert!(worker.may_run(sent_ms + settings.lease_ms - 1));
    assert!(!worker.may_run(sent_ms + settings.lease_ms));
}

#[test]
fn old_state_is_kept_until_the_new_plan_runs() {
    let mut worker = running(1_000);
    worker.step(1_001, orders(1, 12, 1, Command::Stop { after: None }));
    let halted = EngineEvent::Halted { epoch: Epoch(1), standing: Standing::at(3), culprit: None };
    worker.step(1_002, engine(halted));
    let held = || Source::Held { epoch: Epoch(1), plan: plan(), step: 3, alive: vec![ME] };
    let moved = commands(worker.step(1_003, orders(1, 14, 2, install_from(held()))));
    assert_eq!(moved[0], EngineCommand::KeepOnly { epochs: [Epoch(1)].into() });
    worker.step(1_004, engine(EngineEvent::Installed { epoch: Epoch(2) }));
    // The new plan is abandoned: what was kept is still what counts.
    let closing = None;
    let stay = commands(worker.step(1_005, orders(1, 15, 1, Command::GoTo { step: 3, closing })));
    assert_eq!(stay, [EngineCommand::KeepOnly { epochs: [Epoch(1)].into() }]);
    worker.step(1_006, orders(1, 16, 3, install_from(held())));
    worker.step(1_007, engine(EngineEvent::Installed { epoch: Epoch(3) }));
    let run = commands(worker.step(1_008, orders(1, 17, 3, Command::Run { steps: 9 })));
    assert_eq!(run[0], EngineCommand::KeepOnly { epochs: [Epoch(3)].into() });
}

#[test]
fn what_comes_from_storage_finds_the_room_of_what_is_not_needed() {
    let mut worker = running(1_000);
    worker.step(1_001, orders(1, 12, 1, Command::Stop { after: None }));
    let halted = EngineEvent::Halted { epoch: Epoch(1), standing: Standing::at(3), culprit: None };
    worker.step(1_002, engine(halted));
    let source = Source::Checkpoint(Checkpoint { id: 1, step: 3 });
    let actions = worker.step(1_003, orders(1, 14, 2, install_from(source)));
    assert_eq!(report(&actions).jobs[&JOB].part, None);
    assert_eq!(commands(actions)[0], EngineCommand::KeepOnly { epochs: [].into() });
}

#[test]
fn it_rolls_forward_once_and_by_the_sums_it_is_told() {
    let mut worker = running(1_000);
    worker.step(1_001, orders(1, 12, 1, Command::Stop { after: None }));
    let halted = EngineEvent::Halted { epoch: Epoch(1), standing: Standing::at(3), culprit: None };
    worker.step(1_002, engine(halted));
    let (loss, norm_squared, correct) = (1.0.into(), 2.0.into(), 3.0.into());
    let closing = Closing { step: 3, loss, norm_squared, targets: 4, correct };
    let go = || orders(1, 13, 1, Command::GoTo { step: 4, closing: Some(closing) });
    let settle = [EngineCommand::Settle { epoch: Epoch(1), step: 4, closing }];
    assert_eq!(commands(worker.step(1_003, go())), settle);
    assert_eq!(commands(worker.step(1_004, go())), []);
    let standing = Standing { closing: Some(closing), ..Standing::at(4) };
    worker.step(1_005, engine(EngineEvent::Settled { epoch: Epoch(1), standing }));
    assert_eq!(commands(worker.step(1_006, go())), [], "it is there");
}

#[test]
fn one_that_was_given_up_lets_go_and_joins_anew() {
    let mut worker = running(1_000);
    let gone = |worker| Event::Message(ToWorker::Gone { worker });
    assert_eq!(commands(worker.step(1_001, gone(WorkerId(6)))), [], "an earlier life's");
    let actions = worker.step(1_002, gone(ME));
    let join = Action::Send(ToController::Join {
        name: "w".to_owned(),
        boot: 2,
        about: String::new(),
        price: Price(5),
    });
    assert!(actions.contains(&join), "{actions:?}");
    assert_eq!(commands(actions), [EngineCommand::KeepOnly { epochs: [].into() }]);
    assert!(!worker.may_run(1_003));
}
