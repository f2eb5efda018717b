//! A fleet's life over real sockets: workers join, a job runs, the controller dies and comes back, machines leave.

use crate::common::*;
use shoal_control::controller::record::Record;
use shoal_control::message::{Price, Report, ToController, WorkerId};
use shoal_service::client::Client;
use shoal_service::server::Controller;
use shoal_service::uplink::Uplink;
use shoal_service::wire::Up;
use shoal_service::worker_driver::{Happening, Notable};
use shoal_service::{Error, membership, tls};

fn state(client: &Client, job: u64) -> String {
    client.job(job).expect("the job").state
}

fn workers(client: &Client) -> Vec<String> {
    client.workers().expect("workers").into_iter().map(|worker| worker.name).collect()
}

/// Every counted step's loss, in order.
fn curve(client: &Client, job: u64) -> Vec<f64> {
    let mut losses = Vec::new();
    loop {
        let lines = client.logs(job, losses.len() as u64, false).expect("logs").lines;
        if lines.is_empty() {
            return losses;
        }
        for line in lines {
            assert_eq!(line["step"], losses.len() as u64 + 1, "each step once, in order");
            losses.push(line["loss"].as_f64().expect("a loss"));
        }
    }
}

#[test]
fn a_job_runs_to_its_end_through_deaths_of_workers_and_controller() {
    const STEPS: u64 = 300;
    let folder = tempfile::tempdir().expect("a folder");
    let mut fleet = controller(folder.path(), 0);
    let port = target(&fleet).port;
    let one = TestWorker::start(&fleet, folder.path(), "one");
    until("one joins", || workers(&client(&fleet)).contains(&"one".to_owned()).then_some(()));
    let job = client(&fleet).submit(&spec("toy", STEPS)).expect("a job");
    let after = |fleet: &Controller, step: u64| {
        until("steps", || (client(fleet).job(job).expect("the job").step >= step).then_some(()));
    };
    after(&fleet, 30);

    // The controller dies and comes back: the worker finds it again and nothing is lost.
    let before = client(&fleet).job(job).expect("the job");
    drop(fleet);
    fleet = controller(folder.path(), port);
    let again = client(&fleet).job(job).expect("the job");
    assert!(again.step >= before.step && again.epoch == before.epoch, "{before:?} {again:?}");
    after(&fleet, before.step + 30);
    let connections =
        one.shown.lock().expect("not poisoned").iter().filter(|shown| **shown == Notable::Connected).count();
    assert!(connections >= 2, "it connected again by itself");

    // The worker dies; another one takes over from the last checkpoint.
    let two = TestWorker::start(&fleet, folder.path(), "two");
    until("two joins", || workers(&client(&fleet)).contains(&"two".to_owned()).then_some(()));
    one.kill();
    until("the end", || (state(&client(&fleet), job) == "done").then_some(()));
    let view = client(&fleet).job(job).expect("the job");
    assert_eq!((view.step, view.saved_step), (STEPS, Some(STEPS)));
    let losses =
        until("all lines", || Some(curve(&client(&fleet), job)).filter(|curve| curve.len() as u64 == STEPS));
    for (step, found) in (1..).zip(losses) {
        assert!((found - loss(step)).abs() < 1e-12, "step {step}");
    }

    // Every device-second is somewhere, the steps that died with the worker too; nobody has anything of the job any more.
    let receipt = client(&fleet).receipt(job).expect("a receipt");
    let sum: f64 = receipt.parts.iter().map(|part| part.device_seconds).sum();
    assert!(sum > 0.0 && (sum - receipt.device_seconds).abs() < 1e-6, "{receipt:?}");
    assert_eq!(receipt.steps, STEPS + view.undone);
    let lost = receipt.parts.iter().find(|part| part.part == "lost").expect("a part");
    assert!(lost.device_seconds > 0.0 && receipt.predicted_step_ms.is_some(), "{receipt:?}");
    assert_eq!(client(&fleet).receipt(job).expect("a receipt"), receipt);

    // Events have numbers without gaps, across the restart.
    let events = client(&fleet).events(0, false).expect("events");
    let revisions: Vec<u64> = events.events.iter().map(|noted| noted.revision).collect();
    assert_eq!(revisions, (1..=revisions.len() as u64).collect::<Vec<u64>>());
    assert!(
        events
            .events
            .iter()
            .any(|noted| matches!(&noted.record, Record::Joined { name, .. } if name == "two"))
    );
    drop(two);
}

#[test]
fn jobs_are_paused_resumed_and_cancelled() {
    let folder = tempfile::tempdir().expect("a folder");
    let fleet = controller(folder.path(), 0);
    let client = client(&fleet);
    let _one = TestWorker::start(&fleet, folder.path(), "one");
    let job = client.submit(&spec("long", 1_000_000)).expect("a job");
    until("it runs", || (client.job(job).expect("the job").step > 5).then_some(()));
    client.wish(job, "pause").expect("a pause");
    until("it rests", || (state(&client, job) == "paused").then_some(()));
    let rested = client.job(job).expect("the job");
    assert_eq!(rested.saved_step, Some(rested.step), "what was done is saved");
    client.wish(job, "resume").expect("it goes on");
    until("it runs on", || (client.job(job).expect("the job").step > rested.step).then_some(()));
    client.wish(job, "cancel").expect("its end");
    until("it ends", || (state(&client, job) == "cancelled").then_some(()));
    let refused = client.wish(job, "resume");
    assert!(matches!(refused, Err(Error::Refused(refusal)) if refusal.code == "job_ended"));
    let refused = client.wish(job + 1, "pause");
    assert!(matches!(refused, Err(Error::Refused(refusal)) if refusal.code == "no_such_job"));
    let metrics = request(&fleet, "GET", "/metrics", &bearer(fleet.access().token.expose()), "");
    let text = String::from_utf8(metrics.body).expect("text");
    assert!(text.contains("shoal_workers 1\n") && text.contains("state=\"cancelled\"} 1"), "{text}");
}

#[test]
fn a_machine_that_is_told_to_go_is_released() {
    let folder = tempfile::tempdir().expect("a folder");
    let fleet = controller(folder.path(), 0);
    let client = client(&fleet);
    let mut one = TestWorker::start(&fleet, folder.path(), "one");
    let job = client.submit(&spec("long", 1_000_000)).expect("a job");
    until("it runs", || (client.job(job).expect("the job").step > 5).then_some(()));
    let notice = Happening::Notice { in_ms: 600_000, why: "a test".into() };
    one.happenings.send(notice).expect("it listens");
    one.end().expect("it is released long before its time is over");
    assert!(workers(&client).is_empty());
    let view = client.job(job).expect("the job");
    assert_eq!((view.state.as_str(), view.saved_step), ("queued", Some(view.step)), "nothing is lost");
    // It comes back without a token, under its name, and the job goes on.
    let _one = TestWorker::start(&fleet, folder.path(), "one");
    until("it runs on", || (client.job(job).expect("the job").step > view.step).then_some(()));
}

#[test]
fn a_worker_speaks_for_nobody_else() {
    let folder = tempfile::tempdir().expect("a folder");
    let fleet = controller(folder.path(), 0);
    let client = client(&fleet);
    let _one = TestWorker::start(&fleet, folder.path(), "one");
    until("one joins", || workers(&client).contains(&"one".to_owned()).then_some(()));
    let token = fleet.token(5).expect("a token").token.parse().expect("a token");
    let two = membership::join(&target(&fleet), &token, "two").expect("it joins");
    let (sender, happenings) = std::sync::mpsc::channel();
    let uplink = Uplink::start(target(&fleet), tls::member(&two).expect("an identity"), "two".into(), sender);
    let uplink = uplink.expect("an uplink");
    let next = |wanted: fn(&Happening) -> bool| loop {
        let happening = happenings.recv_timeout(PATIENCE).expect("something happens");
        if wanted(&happening) {
            return happening;
        }
    };
    next(|happening| matches!(happening, Happening::Settings(_)));

    // Another's number: a report that would have the other leave counts for nothing.
    let one = WorkerId(client.workers().expect("workers")[0].worker);
    let report = Report {
        worker: one,
        number: u64::MAX,
        revision: 0,
        leaving_in_ms: Some(0),
        jobs: Default::default(),
    };
    uplink.say(Up::Control(ToController::Report(report)));
    next(|happening| matches!(happening, Happening::Heard(_)));
    assert_eq!(client.workers().expect("workers")[0].leaves_by_ms, None);

    // Another's name: the connection is cut, and nobody has been replaced.
    let about = "{}".to_owned();
    uplink.say(Up::Control(ToController::Join {
        name: "one".into(),
        boot: u64::MAX,
        about,
        price: Price::default(),
    }));
    next(|happening| matches!(happening, Happening::Disconnected));
    assert_eq!(client.workers().expect("workers")[0].worker, one.0);
}

#[test]
fn only_one_controller_uses_a_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let _fleet = controller(folder.path(), 0);
    let second = Controller::start(options(folder.path(), 0), std::sync::Arc::new(OneWorker), complaints().0);
    assert!(matches!(second, Err(Error::InUse { .. })));
}
