//! What a peer may say, a planner may answer and a disk may hold, however absurd: nothing of it ends controller or worker,
//! and nothing of it gets into the controller's books.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use crate::common::{Fleet, pair, spec};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use shoal_control::controller::state::{Class, Interval, JobSpec, State, Wish};
use shoal_control::controller::{Event, Proposal};
use shoal_control::disk::Disk;
use shoal_control::log::LogError;
use shoal_control::message::*;
use shoal_control::worker::{self, EngineEvent};
use shoal_control::{Keeper, Settings, Worker};
use shoal_plan::{Closing, Standing};

/// Small ones, which mean something here, and those that no sum survives.
fn number() -> BoxedStrategy<u64> {
    prop_oneof![6 => 0..8_u64, 1 => Just(NUMBER_MAX), 1 => Just(u64::MAX), 1 => any::<u64>()].boxed()
}

fn worker_id() -> BoxedStrategy<WorkerId> {
    (0..5_u64).prop_map(WorkerId).boxed()
}

fn standing() -> BoxedStrategy<Standing> {
    let closing = (number(), number()).prop_map(|(step, targets)| {
        let (loss, norm_squared, correct) = (1.0.into(), 2.0.into(), 0.0.into());
        Closing { step, loss, norm_squared, targets, correct }
    });
    (number(), any::<bool>(), any::<bool>(), option::of(closing))
        .prop_map(|(step, applied, reduced, closing)| Standing { step, applied, reduced, closing })
        .boxed()
}

fn spent() -> BoxedStrategy<Spent> {
    (number(), number(), number())
        .prop_map(|(useful_ms, recompute_ms, bubble_ms)| Spent { useful_ms, recompute_ms, bubble_ms })
        .boxed()
}

fn obstacle() -> BoxedStrategy<Obstacle> {
    prop_oneof![
        worker_id().prop_map(Obstacle::Peer),
        Just(Obstacle::Source("gone".repeat(300))),
        Just(Obstacle::Room),
        Just(Obstacle::Worker("é".repeat(500))),
    ]
    .boxed()
}

fn saved() -> BoxedStrategy<Saved> {
    (number(), any::<bool>(), number()).prop_map(|(id, done, cost_ms)| Saved { id, done, cost_ms }).boxed()
}

fn status() -> BoxedStrategy<Status> {
    use Stage::{Running, Settling, Stopped, Stopping};
    let stage = prop_oneof![Just(Running), Just(Stopping), Just(Stopped), Just(Settling)];
    let pace = option::of((number(), any::<u32>()));
    let part = (number(), stage, standing(), option::of(worker_id()), pace, spent()).prop_map(
        |(epoch, stage, standing, culprit, pace, spent)| Part {
            epoch: Epoch(epoch),
            stage,
            standing,
            culprit,
            pace,
            spent,
        },
    );
    let progress =
        prop_oneof![Just(Progress::Underway), Just(Progress::Ready), obstacle().prop_map(Progress::Failed)];
    let next = (number().prop_map(Epoch), progress);
    let dead_end = (number().prop_map(Epoch), ".*");
    (option::of(part), option::of(next), option::of(saved()), option::of(dead_end))
        .prop_map(|(part, next, saved, dead_end)| Status { part, next, saved, dead_end })
        .boxed()
}

fn plan() -> BoxedStrategy<Plan> {
    (vec(worker_id(), 0..4), vec(vec(0..4_usize, 0..3), 0..4), number())
        .prop_map(|(members, holders, step_ms)| Plan { members, holders, step_ms, table: String::new() })
        .boxed()
}

fn job_spec() -> BoxedStrategy<JobSpec> {
    let every = prop_oneof![Just(Interval::Auto), number().prop_map(Interval::Steps)];
    (number(), 0..4_usize, 0..4_usize, every, any::<i32>())
        .prop_map(|(steps, workers_min, workers_max, checkpoint_every, priority)| JobSpec {
            steps,
            workers_min,
            workers_max,
            checkpoint_every,
            priority,
            ..spec(Class::Background, 1)
        })
        .boxed()
}

fn event() -> BoxedStrategy<Event> {
    let job = || (0..4_u64).prop_map(JobId);
    let report = (worker_id(), number(), number(), option::of(number()), btree_map(job(), status(), 0..3));
    let report = report.prop_map(|(worker, number, revision, leaving_in_ms, jobs)| {
        ToController::Report(Report { worker, number, revision, leaving_in_ms, jobs })
    });
    let join = (0..3_u8, number(), number()).prop_map(|(name, boot, price)| ToController::Join {
        name: format!("w{name}"),
        boot,
        about: String::new(),
        price: Price(price),
    });
    let answer = prop_oneof![
        Just(Err("no".to_owned())),
        (plan(), number(), option::of(number())).prop_map(|(plan, move_ms, staying_ms)| Ok(Proposal {
            plan,
            move_ms,
            staying_ms
        })),
    ];
    let wish = prop_oneof![Just(Wish::Run), Just(Wish::Pause), Just(Wish::Cancel)];
    prop_oneof![
        1 => Just(Event::Started),
        2 => Just(Event::Tick),
        8 => report.prop_map(Event::Message),
        1 => join.prop_map(Event::Message),
        3 => (job(), number(), answer)
            .prop_map(|(job, request, answer)| Event::Planned { job, request, answer }),
        2 => (job(), job_spec()).prop_map(|(job, spec)| Event::Submit { job, spec }),
        1 => (job(), wish).prop_map(|(job, wish)| Event::Wish { job, wish }),
    ]
    .boxed()
}

fn to_worker() -> BoxedStrategy<ToWorker> {
    let source = prop_oneof![
        Just(Source::Fresh),
        (number(), number()).prop_map(|(id, step)| Source::Checkpoint(Checkpoint { id, step })),
        (number(), plan(), number(), vec(worker_id(), 0..3)).prop_map(|(epoch, plan, step, alive)| {
            Source::Held { epoch: Epoch(epoch), plan, step, alive }
        }),
    ];
    let install = (plan(), source).prop_map(|(plan, source)| {
        let (description, abouts) = (String::new(), BTreeMap::new());
        Command::Install(Installation { plan, source, description, abouts })
    });
    let command = prop_oneof![
        install,
        number().prop_map(|steps| Command::Run { steps }),
        option::of(number()).prop_map(|after| Command::Stop { after }),
        (number(), standing()).prop_map(|(step, standing)| Command::GoTo { step, closing: standing.closing }),
    ];
    let save = (number(), number(), vec(worker_id(), 0..3))
        .prop_map(|(id, step, writers)| Save { checkpoint: Checkpoint { id, step }, writers });
    let order = (number(), command, option::of(save)).prop_map(|(epoch, command, save)| Order {
        epoch: Epoch(epoch),
        command,
        save,
    });
    let jobs = option::of(btree_map((0..3_u64).prop_map(JobId), order, 0..3));
    prop_oneof![
        8 => (worker_id(), number(), number(), jobs).prop_map(|(worker, acknowledged, revision, jobs)| {
            ToWorker::Orders(Orders { worker, acknowledged, revision, jobs })
        }),
        1 => (number(), worker_id())
            .prop_map(|(boot, worker)| ToWorker::Welcome { name: "w".to_owned(), boot, worker }),
        1 => number().prop_map(|boot| ToWorker::Late { name: "w".to_owned(), boot }),
        1 => worker_id().prop_map(|worker| ToWorker::Gone { worker }),
    ]
    .boxed()
}

fn engine_event() -> BoxedStrategy<EngineEvent> {
    let epoch = || number().prop_map(Epoch);
    prop_oneof![
        epoch().prop_map(|epoch| EngineEvent::Installed { epoch }),
        (epoch(), obstacle()).prop_map(|(epoch, obstacle)| EngineEvent::NotInstalled { epoch, obstacle }),
        (epoch(), standing(), option::of((number(), any::<u32>())), spent())
            .prop_map(|(epoch, standing, pace, spent)| EngineEvent::Moved { epoch, standing, pace, spent }),
        (epoch(), standing(), option::of(worker_id()))
            .prop_map(|(epoch, standing, culprit)| EngineEvent::Halted { epoch, standing, culprit }),
        (epoch(), standing()).prop_map(|(epoch, standing)| EngineEvent::Settled { epoch, standing }),
        saved().prop_map(EngineEvent::Saved),
    ]
    .boxed()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2_000) })]

    #[test]
    fn no_message_ends_a_controller_or_gets_nonsense_into_its_books(
        events in vec((event(), prop_oneof![9 => 0..400_u64, 1 => number()]), 1..40),
        begins_running in any::<bool>(),
    ) {
        let mut fleet = if begins_running { pair() } else { Fleet::new(3) };
        let mut now_ms = fleet.now_ms;
        for (event, passes_ms) in events {
            now_ms = now_ms.saturating_add(passes_ms);
            let step = fleet.controller.step(now_ms, event);
            prop_assert_eq!(step.misfit, None);
            prop_assert_eq!(fleet.controller.state().check(), Ok(()));
        }
        let state = fleet.controller.state();
        let text = serde_json::to_string(state).expect("is written");
        prop_assert_eq!(&serde_json::from_str::<State>(&text).expect("is read"), state);
    }

    #[test]
    fn no_message_and_no_engine_ends_a_worker(
        events in vec((
            prop_oneof![
                4 => to_worker().prop_map(worker::Event::Message),
                2 => (0..3_u64, engine_event())
                    .prop_map(|(job, event)| worker::Event::Engine { job: JobId(job), event }),
                2 => Just(worker::Event::Tick),
                1 => number().prop_map(|in_ms| worker::Event::Notice { in_ms }),
            ],
            prop_oneof![9 => 0..300_u64, 1 => number()],
        ), 1..60),
    ) {
        let mut worker = Worker::new(Settings::default(), "w", "", 1);
        let welcome = ToWorker::Welcome { name: "w".to_owned(), boot: 1, worker: WorkerId(1) };
        worker.step(0, worker::Event::Message(welcome));
        let mut now_ms = 1_u64;
        for (event, passes_ms) in events {
            now_ms = now_ms.saturating_add(passes_ms);
            worker.step(now_ms, event);
        }
    }
}

/// A frame as the log's head describes it, with a good checksum whatever is in it.
fn frame(number: u64, content: &serde_json::Value) -> Vec<u8> {
    let content = serde_json::to_vec(content).expect("is written");
    let mut bytes = u32::try_from(content.len()).expect("short").to_le_bytes().to_vec();
    bytes.extend(number.to_le_bytes());
    let mut hasher = blake3::Hasher::new();
    hasher.update(&bytes).update(&content);
    bytes.extend(&hasher.finalize().as_bytes()[..16]);
    bytes.extend(content);
    bytes
}

/// A disk that never loses power.
#[derive(Clone, Default)]
struct Memory(BTreeMap<String, Vec<u8>>);

impl Memory {
    fn file(&mut self, name: &str) -> io::Result<&mut Vec<u8>> {
        self.0.get_mut(name).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl Disk for Memory {
    fn names(&self) -> io::Result<BTreeSet<String>> {
        Ok(self.0.keys().cloned().collect())
    }
    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        self.0.get(name).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
    fn create(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.0.insert(name.to_owned(), bytes.to_vec());
        Ok(())
    }
    fn append(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.file(name)?.extend(bytes);
        Ok(())
    }
    fn cut(&mut self, name: &str, length: u64) -> io::Result<()> {
        self.file(name)?.truncate(usize::try_from(length).unwrap_or(usize::MAX));
        Ok(())
    }
    fn sync(&mut self, _: &str) -> io::Result<()> {
        Ok(())
    }
    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        let file = std::mem::take(self.file(from)?);
        self.0.remove(from);
        self.create(to, &file)
    }
    fn sync_names(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Opens what a disk has, and lets the controller that comes of it work for a while.
fn open(files: &[(&str, Vec<u8>)]) -> Result<(), LogError> {
    let disk = Memory(files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone())).collect());
    let (mut keeper, _, _) = Keeper::open(Settings::default(), disk, 10_000)?;
    let jobs: Vec<JobId> = keeper.state().jobs.keys().copied().collect();
    let members: Vec<WorkerId> = keeper.state().members.keys().copied().collect();
    for round in 1..8 {
        for worker in &members {
            let status = |job: &JobId| {
                let part = keeper.state().jobs[job].held().map(|_| Part {
                    epoch: keeper.state().jobs[job].epoch,
                    stage: Stage::Stopped,
                    standing: Standing::at(round),
                    culprit: None,
                    pace: Some((round, 200)),
                    spent: Spent::default(),
                });
                let next = Some((keeper.state().jobs[job].epoch, Progress::Ready));
                let saved = Some(Saved { id: keeper.state().jobs[job].checkpoint, done: true, cost_ms: 1 });
                (*job, Status { part, next, saved, dead_end: None })
            };
            let jobs = jobs.iter().map(status).collect();
            let report = Report { worker: *worker, number: round, revision: 0, leaving_in_ms: None, jobs };
            keeper.step(10_000 + round, Event::Message(ToController::Report(report)))?;
        }
        keeper.step(10_000 + round * 200, Event::Tick)?;
    }
    Ok(())
}

/// Every place in a value, as the way there.
fn places(value: &serde_json::Value, way: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    found.push(way.clone());
    let mut inside = |key: String, value: &serde_json::Value| {
        way.push(key);
        places(value, way, found);
        way.pop();
    };
    match value {
        serde_json::Value::Array(values) => {
            values.iter().enumerate().for_each(|(place, value)| inside(place.to_string(), value));
        }
        serde_json::Value::Object(values) => {
            values.iter().for_each(|(key, value)| inside(key.clone(), value));
        }
        _ => {}
    }
}

fn at<'a>(value: &'a mut serde_json::Value, way: &[String]) -> &'a mut serde_json::Value {
    way.iter().fold(value, |value, key| match value {
        serde_json::Value::Array(values) => &mut values[key.parse::<usize>().expect("a place")],
        other => &mut other[key.as_str()],
    })
}

/// What a value becomes: another number, nothing, or it goes.
fn spoilt(value: &serde_json::Value) -> Vec<serde_json::Value> {
    use serde_json::json;
    match value {
        serde_json::Value::Number(number) => {
            let number = number.as_u64().unwrap_or(0);
            let others = [0, 1, number.wrapping_add(1), number.wrapping_sub(1), NUMBER_MAX, u64::MAX];
            others.into_iter().map(|other| json!(other)).collect()
        }
        serde_json::Value::Array(values) => {
            let mut twice = values.clone();
            twice.extend(values.last().cloned());
            vec![json!([]), json!(twice), json!(values.iter().rev().collect::<Vec<_>>())]
        }
        serde_json::Value::Null => vec![json!(7)],
        serde_json::Value::Bool(is) => vec![json!(!is)],
        _ => vec![serde_json::Value::Null],
    }
}

/// A course with a loss, a checkpoint, a plan that did not come and one that does, as a log has it.
fn course() -> (Vec<serde_json::Value>, serde_json::Value) {
    let mut fleet = pair();
    let standing = Standing { closing: crate::common::closing(0), ..Standing::at(1) };
    fleet.part(1, 1, 1, Stage::Running, standing);
    fleet.part(2, 1, 1, Stage::Running, standing);
    fleet.step(Event::Wish { job: JobId(1), wish: Wish::Pause });
    for worker in [1, 2] {
        fleet.part(worker, 1, 1, Stage::Stopped, standing);
    }
    for worker in [1, 2] {
        fleet.status(worker, 1).saved = Some(Saved { id: 1, done: true, cost_ms: 9 });
        fleet.report(worker);
    }
    fleet.statuses.clear();
    fleet.step(Event::Wish { job: JobId(1), wish: Wish::Run });
    fleet.answer(100, 0);
    fleet.status(1, 1).next = Some((Epoch(2), Progress::Failed(Obstacle::Source("gone".to_owned()))));
    fleet.report(1);
    fleet.now_ms += 10_000;
    fleet.step(Event::Tick);
    fleet.answer(100, 0);
    fleet.start(1, 3, &[1, 2]);
    fleet.silence(&[2]);
    assert!(fleet.records.len() > 18, "{:?}", fleet.records);
    let state = serde_json::to_value(fleet.controller.state()).expect("is written");
    (fleet.records.iter().map(|record| serde_json::to_value(record).expect("is written")).collect(), state)
}

#[test]
fn logs_and_snapshots_with_good_checksums_and_wrong_contents_are_refused_or_harmless() {
    let (records, state) = course();
    let mut refused = 0;
    let mut tried = 0;
    let mut try_log = |records: &serde_json::Value| {
        tried += 1;
        if let Err(error) = open(&[("log", frame(0, records))]) {
            assert!(!matches!(error, LogError::Undecided(_) | LogError::Disk(_)), "{error}\n{records}");
            assert!(!error.hint().is_empty());
            refused += 1;
        }
    };
    let whole = serde_json::Value::Array(records.clone());
    try_log(&whole);
    let mut ways = Vec::new();
    places(&whole, &mut Vec::new(), &mut ways);
    for way in &ways {
        for other in spoilt(at(&mut whole.clone(), way)) {
            let mut mutant = whole.clone();
            *at(&mut mutant, way) = other;
            try_log(&mutant);
        }
    }
    for place in 0..records.len() {
        let (mut without, mut twice, mut swapped) = (records.clone(), records.clone(), records.clone());
        without.remove(place);
        twice.insert(place, records[place].clone());
        swapped.swap(place, (place + 1) % records.len());
        [without, twice, swapped].into_iter().for_each(|mutant| try_log(&mutant.into()));
    }
    println!("{refused} of {tried} logs refused");
    assert!(refused * 4 > tried, "{refused} of {tried}");

    let (mut refused, mut tried) = (0, 0);
    let revision = state["revision"].as_u64().expect("a number");
    let mut ways = Vec::new();
    places(&state, &mut Vec::new(), &mut ways);
    for way in &ways {
        for other in spoilt(at(&mut state.clone(), way)) {
            let mut mutant = state.clone();
            *at(&mut mutant, way) = other;
            let files =
                [("snapshot", frame(revision, &mutant)), ("log", frame(revision, &serde_json::json!([])))];
            tried += 1;
            if let Err(error) = open(&files) {
                assert!(!matches!(error, LogError::Undecided(_) | LogError::Disk(_)), "{error}\n{mutant}");
                refused += 1;
            }
        }
    }
    println!("{refused} of {tried} snapshots refused");
    assert!(refused * 4 > tried, "{refused} of {tried}");
}
