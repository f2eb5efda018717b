//! Drills over real sockets: they reach the worker that they are for, once, if it allows them; and nobody else.

use std::sync::{Arc, Mutex};

use crate::common::*;
use shoal_control::message::{JobId, Price};
use shoal_control::worker::EngineCommand;
use shoal_service::Error;
use shoal_service::client::Client;
use shoal_service::drill::{Drill, Drilled};
use shoal_service::membership::Membership;
use shoal_service::server::Controller;
use shoal_service::worker_driver::{Engine, Happening, Notable, WorkerDriver};

/// Has nothing to do.
struct Idle;

impl Engine for Idle {
    fn command(&mut self, _: JobId, _: EngineCommand) {}
}

/// A worker that says of itself whether it may be drilled, and may do otherwise; what it showed and what was done.
struct Drillable {
    happenings: std::sync::mpsc::Sender<Happening>,
    shown: Arc<Mutex<Vec<Notable>>>,
    done: Arc<Mutex<Vec<Drill>>>,
    thread: Option<std::thread::JoinHandle<shoal_service::Result>>,
}

impl Drillable {
    fn start(fleet: &Controller, folder: &std::path::Path, name: &str, says: bool, does: bool) -> Drillable {
        let token = fleet.token(5).expect("a token").token.parse().expect("a token");
        let url = &fleet.access().url;
        let membership = Membership::open(&folder.join(name), url, Some(&token), name).expect("it joins");
        let done: Arc<Mutex<Vec<Drill>>> = Arc::default();
        let (shown, doing) = (Arc::<Mutex<Vec<Notable>>>::default(), done.clone());
        let drilled: Drilled = Box::new(move |drill| doing.lock().expect("not poisoned").push(drill));
        let about = format!("{{\"drills\":{says}}}");
        let driver = WorkerDriver::new(membership, about, Price::default());
        let driver = driver.drilled(does.then_some(drilled));
        let (happenings, show) = (driver.sender(), shown.clone());
        let run =
            move || driver.run(&mut Idle, &mut |notable| show.lock().expect("not poisoned").push(notable));
        Drillable { happenings, shown, done, thread: Some(std::thread::spawn(run)) }
    }

    fn done(&self) -> Vec<Drill> {
        self.done.lock().expect("not poisoned").clone()
    }

    fn has_shown(&self, notable: &Notable) -> usize {
        self.shown.lock().expect("not poisoned").iter().filter(|shown| *shown == notable).count()
    }
}

impl Drop for Drillable {
    fn drop(&mut self) {
        let _ = self.happenings.send(Happening::Quit);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A worker's number, once it is there.
fn number(client: &Client, name: &str) -> u64 {
    until("it joins", || {
        let workers = client.workers().expect("workers");
        workers.iter().find(|worker| worker.name == name && worker.connected).map(|worker| worker.worker)
    })
}

fn refusal(client: &Client, worker: u64, drill: Drill) -> (u16, String) {
    match client.drill(worker, drill) {
        Err(Error::Refused(refusal)) => (refusal.status, refusal.code),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_drill_is_done_by_the_worker_it_is_for_and_by_no_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let fleet = controller(folder.path(), 0);
    let one = Drillable::start(&fleet, folder.path(), "one", true, true);
    let two = Drillable::start(&fleet, folder.path(), "two", true, true);
    let owner = client(&fleet);
    let (first, second) = (number(&owner, "one"), number(&owner, "two"));
    let slow = Drill::Slow { ms: 1_000, percent: 300 };
    assert_eq!(owner.drill(first, slow).expect("it is passed on").name, "one");
    until("the drill", || (one.done() == [slow]).then_some(()));
    // One that is cut off finds its controller again by itself.
    let cut = Drill::Cut { ms: 300 };
    owner.drill(second, cut).expect("it is passed on");
    until("its return", || (two.has_shown(&Notable::Connected) == 2).then_some(()));
    assert_eq!((one.done(), two.done()), (vec![slow], vec![cut]));
    assert_eq!((one.has_shown(&Notable::Connected), two.has_shown(&Notable::Drilled(cut))), (1, 1));
}

#[test]
fn drills_are_refused_where_they_are_not_allowed_or_make_no_sense() {
    let folder = tempfile::tempdir().expect("a folder");
    let fleet = controller(folder.path(), 0);
    let shy = Drillable::start(&fleet, folder.path(), "shy", false, true);
    let strict = Drillable::start(&fleet, folder.path(), "strict", true, false);
    let owner = client(&fleet);
    let (shy_number, strict_number) = (number(&owner, "shy"), number(&owner, "strict"));
    assert_eq!(refusal(&owner, shy_number, Drill::Kill {}), (403, "no_drills".into()));
    assert_eq!(refusal(&owner, 99, Drill::Kill {}), (404, "no_such_worker".into()));
    let endless = Drill::Freeze { ms: u64::MAX };
    assert_eq!(refusal(&owner, strict_number, endless), (400, "request".into()));
    let faster = Drill::Slow { ms: 1, percent: 10 };
    assert_eq!(refusal(&owner, strict_number, faster), (400, "request".into()));
    let bearer = bearer(fleet.access().token.expose());
    for body in ["{}", "{\"kind\":\"burn\"}", "{\"kind\":\"kill\",\"pid\":1}", "{\"kind\":\"freeze\"}"] {
        let path = format!("/api/v1/workers/{strict_number}/drill");
        assert_eq!(request(&fleet, "POST", &path, &bearer, body).status, 400, "{body}");
    }
    // Whatever a controller says, the worker itself has the last word.
    owner.drill(strict_number, Drill::Kill {}).expect("it is passed on");
    until("its no", || (strict.has_shown(&Notable::DrillRefused(Drill::Kill {})) == 1).then_some(()));
    assert!(strict.done().is_empty() && shy.done().is_empty());
}
