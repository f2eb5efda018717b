//! The one thread that owns the controller. Everyone else asks it: workers' connections, the API, the planners. It steps the
//! keeper, and does what comes out once the records are on the disk; so an answer that it gives is for good.
//!
//! Messages to workers may be dropped where a connection is slow: they are said again until they are heard.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use shoal_control::controller::receipt::Bill;
use shoal_control::controller::record::{Change, Record};
use shoal_control::controller::state::{JobSpec, State, Wish};
use shoal_control::controller::{Action, Event, Step};
use shoal_control::disk;
use shoal_control::message::{JobId, ToController, ToWorker, WorkerId};
use shoal_control::{Keeper, Settings};
use shoal_plan::Closing;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::books::Books;
use crate::clock::Clock;
use crate::error::{Refusal, Result};
use crate::folder::Folder;
use crate::history::History;
use crate::planning::{Candidate, Planner, Planners, Question};
use crate::wire::{Down, StepLine};

const LOG: &str = "log";
/// How long a counted step waits for a worker's line before it gets one from its closing sums.
const LINE_AWAITED_MS: u64 = 3_000;
/// What is taken in with one flush of the log: as much as is done in a few milliseconds, since whoever looks waits for it.
const AT_ONCE_MAX: usize = 200;

/// From the beginning of one round to that of the next, where there is always something to hear: a thousand workers would
/// otherwise wake the controller's thread, and it them, for each of their words.
const ROUND_MIN: Duration = Duration::from_millis(2);

/// A worker's connection, as seen from here. Letting go of it ends it.
pub struct Link {
    pub number: u64,
    pub to: mpsc::Sender<Down>,
}

/// By the name in each connection's certificate.
pub type Links = BTreeMap<String, Link>;

/// All there is to see.
#[derive(Clone, Copy)]
pub struct Sight<'a> {
    pub state: &'a State,
    pub links: &'a Links,
    /// Why there is no plan for jobs that wait for one.
    pub refusals: &'a BTreeMap<JobId, String>,
    /// Where the time of a job's workers went until now.
    pub bill: &'a dyn Fn(JobId) -> Option<Bill>,
}

/// Looks at it, on the controller's thread.
pub type Look = Box<dyn FnOnce(Sight) + Send>;

pub enum Ask {
    Connected {
        name: String,
        link: Link,
    },
    Closed {
        name: String,
        number: u64,
    },
    Heard {
        name: String,
        number: u64,
        message: Box<ToController>,
        /// A connection has so much under way and no more.
        room: OwnedSemaphorePermit,
    },
    Planned(Event),
    Submit {
        spec: Box<JobSpec>,
        reply: oneshot::Sender<std::result::Result<JobId, Refusal>>,
    },
    Wish {
        job: JobId,
        wish: Wish,
        reply: oneshot::Sender<std::result::Result<(), Refusal>>,
    },
    /// Somebody wants to look.
    Look,
    Stop,
}

/// What others ask by.
#[derive(Clone)]
pub struct Desk {
    asks: Sender<Ask>,
    looks: Looks,
}

/// Those who want to look. They do not wait behind all that workers say: a thousand of them are never silent.
type Looks = Arc<Mutex<Vec<Look>>>;

fn waiting(looks: &Looks) -> MutexGuard<'_, Vec<Look>> {
    looks.lock().expect("nobody panics while holding it")
}

fn ended() -> Refusal {
    Refusal::new(503, "ending", "the controller is ending")
}

impl Desk {
    pub fn tell(&self, ask: Ask) {
        // Nobody listens any more only when everything ends.
        let _ = self.asks.send(ask);
    }

    pub async fn submit(&self, spec: JobSpec) -> std::result::Result<JobId, Refusal> {
        let (reply, answer) = oneshot::channel();
        self.tell(Ask::Submit { spec: Box::new(spec), reply });
        answer.await.map_err(|_| ended())?
    }

    pub async fn wish(&self, job: JobId, wish: Wish) -> std::result::Result<(), Refusal> {
        let (reply, answer) = oneshot::channel();
        self.tell(Ask::Wish { job, wish, reply });
        answer.await.map_err(|_| ended())?
    }

    pub async fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(Sight) -> T + Send + 'static,
    ) -> std::result::Result<T, Refusal> {
        let (reply, answer) = oneshot::channel();
        waiting(&self.looks).push(Box::new(move |sight| drop(reply.send(look(sight)))));
        self.tell(Ask::Look);
        answer.await.map_err(|_| ended())
    }
}

pub struct Driver {
    settings: Settings,
    keeper: Keeper<disk::Folder>,
    clock: Clock,
    folder: Arc<Folder>,
    history: Arc<History>,
    books: Arc<Books>,
    planners: Planners,
    asks: Receiver<Ask>,
    looks: Looks,
    links: Links,
    /// Whose every number is or was, for those that are to be told that they are gone.
    names: BTreeMap<WorkerId, String>,
    /// Counted steps whose lines have not come, and since when.
    owed: BTreeMap<(JobId, u64), (Closing, u64)>,
    refusals: BTreeMap<JobId, String>,
    complaints: crate::Complaints,
}

impl Driver {
    /// Goes on from what the folder has.
    pub fn open(
        settings: Settings,
        folder: Arc<Folder>,
        planner: Arc<dyn Planner>,
        complaints: crate::Complaints,
    ) -> Result<(Driver, Desk, Arc<History>, Arc<Books>)> {
        let (asks, receiver) = channel();
        let looks = Looks::default();
        let desk = Desk { asks, looks: looks.clone() };
        let answers = desk.clone();
        let answers = Arc::new(move |job, request, answer| {
            answers.tell(Ask::Planned(Event::Planned { job, request, answer }));
        });
        let path = folder.path().join(LOG);
        let disk = disk::Folder::open(&path).map_err(crate::error::Error::at(&path))?;
        let clock = Clock::start();
        let (keeper, first, opened) = Keeper::open(settings, disk, clock.now_ms())?;
        if opened.cut_bytes > 0 {
            complaints(&format!(
                "{} bytes that were half written when it ended are cut off the log",
                opened.cut_bytes
            ));
        }
        let state = keeper.state();
        let history = Arc::new(History::open(&folder, state.revision - first.records.len() as u64)?);
        let books = Arc::new(Books::new());
        for job in state.jobs.keys() {
            books.open(&folder, *job)?;
        }
        let names = state.names.iter().map(|(name, (_, worker))| (*worker, name.clone())).collect();
        let planners = Planners::start(planner, answers, complaints.clone());
        let mut driver = Driver {
            settings,
            keeper,
            clock,
            folder,
            history: history.clone(),
            books: books.clone(),
            planners,
            asks: receiver,
            looks,
            links: Links::new(),
            names,
            owed: BTreeMap::new(),
            refusals: BTreeMap::new(),
            complaints,
        };
        // Lines that were still to come when it ended: nobody else may have them.
        for noted in history.all() {
            driver.note(&noted.record, clock.now_ms());
        }
        driver.act(first)?;
        Ok((driver, desk, history, books))
    }

    /// Until it is told to stop, or its disk fails.
    pub fn run(mut self) -> Result {
        let every = Duration::from_millis((self.settings.report_every_ms / 3).max(1));
        let mut due = Instant::now() + every;
        let mut began = Instant::now();
        loop {
            // Who is asked all the time does better to take in several at once.
            std::thread::sleep(ROUND_MIN.saturating_sub(began.elapsed()));
            let first = match self.asks.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Ok(ask) => Some(ask),
                Err(RecvTimeoutError::Timeout) => None,
            };
            began = Instant::now();
            self.show();
            let more: Vec<Ask> = self.asks.try_iter().take(AT_ONCE_MAX).collect();
            if !self.hear_all(first.into_iter().chain(more))? {
                return Ok(());
            }
            // Those whose word came with the others'.
            self.show();
            // Also when there is always something to hear.
            if Instant::now() >= due {
                due = Instant::now() + every;
                self.step_all(vec![Event::Tick])?;
                self.pay_lines();
            }
        }
    }

    /// Lets those look who want to. All that there is to see is on the disk.
    fn show(&self) {
        let looks = std::mem::take(&mut *waiting(&self.looks));
        let (keeper, now_ms) = (&self.keeper, self.clock.now_ms());
        let bill = |job| keeper.bill(job, now_ms);
        for look in looks {
            let (links, refusals) = (&self.links, &self.refusals);
            look(Sight { state: keeper.state(), links, refusals, bill: &bill });
        }
    }

    /// Takes in what has come meanwhile, with one flush of the log for all that workers and planners said. Says whether it
    /// goes on.
    fn hear_all(&mut self, asks: impl Iterator<Item = Ask>) -> Result<bool> {
        let mut events = Vec::new();
        for ask in asks {
            match ask {
                Ask::Heard { name, number, message, room } => {
                    if self.links.get(&name).is_some_and(|link| link.number == number) {
                        events.extend(self.admit(&name, *message));
                    }
                    drop(room);
                }
                Ask::Planned(event) => events.push(event),
                Ask::Connected { name, link } => drop(self.links.insert(name, link)),
                Ask::Closed { name, number } => {
                    if self.links.get(&name).is_some_and(|link| link.number == number) {
                        self.links.remove(&name);
                        let known = self.keeper.state().names.get(&name);
                        events.extend(known.map(|(_, worker)| Event::Closed { worker: *worker }));
                    }
                }
                Ask::Submit { spec, reply } => {
                    let last = self.keeper.state().jobs.keys().next_back();
                    let job = JobId(last.map_or(1, |last| last.0 + 1));
                    self.books.open(&self.folder, job)?;
                    self.step_all(vec![Event::Submit { job, spec: *spec }])?;
                    let _ = reply.send(Ok(job));
                }
                Ask::Wish { job, wish, reply } => {
                    let refusal = self.refuse(job, wish);
                    if refusal.is_none() {
                        self.step_all(vec![Event::Wish { job, wish }])?;
                    }
                    let _ = reply.send(refusal.map_or(Ok(()), Err));
                }
                // They have, or do when all this is on the disk.
                Ask::Look => {}
                Ask::Stop => return Ok(false),
            }
        }
        self.step_all(events)?;
        Ok(true)
    }

    /// A worker speaks for itself alone: under the name in its certificate, and under numbers that were given to it.
    fn admit(&mut self, name: &str, message: ToController) -> Option<Event> {
        match &message {
            ToController::Join { name: claimed, .. } if claimed != name => {
                (self.complaints)(&format!("{name} would join as {claimed}, and is cut off"));
                self.links.remove(name);
                None
            }
            // Another's number, or one of a log that is no longer there: it has to join anew, and nothing of this counts.
            ToController::Report(report)
                if self.names.get(&report.worker).is_none_or(|owner| owner != name) =>
            {
                self.send(name, ToWorker::Gone { worker: report.worker });
                None
            }
            _ => Some(Event::Message(message)),
        }
    }

    fn refuse(&self, job: JobId, wish: Wish) -> Option<Refusal> {
        let Some(state) = self.keeper.state().jobs.get(&job) else { return Some(no_such_job(job)) };
        if state.is_open() && (state.wish != Wish::Cancel || wish == Wish::Cancel) {
            return None;
        }
        let message = format!("job {} has ended or is being cancelled", job.0);
        Some(Refusal::new(409, "job_ended", message))
    }

    fn step_all(&mut self, events: Vec<Event>) -> Result {
        if events.is_empty() {
            return Ok(());
        }
        let step = self.keeper.step_all(self.clock.now_ms(), events)?;
        self.act(step)
    }

    fn act(&mut self, step: Step) -> Result {
        let now_ms = self.clock.now_ms();
        step.records.iter().for_each(|record| self.note(record, now_ms));
        for action in step.actions {
            match action {
                Action::Send { to, message } => {
                    if let Some(name) = self.names.get(&to) {
                        self.send(name, message);
                    }
                }
                Action::Answer { name, message } => self.send(&name, message),
                Action::Plan { job, request, workers, held } => {
                    let question = self.question(job, request, workers, held);
                    question.into_iter().for_each(|question| self.planners.ask(question));
                }
                Action::KeepCheckpoints { job, keeping } => {
                    let state = self.keeper.state().jobs.get(&job);
                    let description = state.map(|state| state.spec.description.as_str()).unwrap_or_default();
                    self.planners.keep_checkpoints(job, description, keeping);
                }
            }
        }
        self.history.add(&self.folder, self.keeper.state().revision, now_ms, step.records)
    }

    fn note(&mut self, record: &Record, now_ms: u64) {
        match record {
            Record::Joined { worker, name, .. } => drop(self.names.insert(*worker, name.clone())),
            Record::Job { job, change: Change::Committed { step, closing: Some(closing) }, .. } => {
                self.owed.insert((*job, *step), (*closing, now_ms));
            }
            _ => {}
        }
        self.note_refusal(record);
    }

    fn note_refusal(&mut self, record: &Record) {
        match record {
            Record::Job { job, change: Change::Refused { reason }, .. } => {
                self.refusals.insert(*job, reason.clone());
            }
            Record::Job { job, change: Change::Moving { .. } | Change::Wished { .. }, .. } => {
                self.refusals.remove(job);
            }
            _ => {}
        }
    }

    fn send(&self, name: &str, message: ToWorker) {
        if let Some(link) = self.links.get(name) {
            let _ = link.to.try_send(Down::Control(message));
        }
    }

    fn question(
        &self,
        job: JobId,
        request: u64,
        workers: Vec<(WorkerId, u32)>,
        held: Option<shoal_control::message::Plan>,
    ) -> Option<Question> {
        let state = self.keeper.state();
        let candidate = |(worker, pace_percent): (WorkerId, u32)| {
            let member = state.members.get(&worker)?;
            Some(Candidate { worker, name: member.name.clone(), pace_percent, about: member.about.clone() })
        };
        let workers = workers.into_iter().map(candidate).collect::<Option<Vec<Candidate>>>()?;
        let description = state.jobs.get(&job)?.spec.description.clone();
        let held = held.map(|plan| (plan.clone(), state.alive(&plan)));
        Some(Question { job, request, description, workers, held })
    }

    /// Counted steps whose lines nobody has sent get what the controller knows of them.
    fn pay_lines(&mut self) {
        let now_ms = self.clock.now_ms();
        let books = &self.books;
        self.owed.retain(|(job, step), _| !books.has(*job, *step));
        let due = |since: &u64| now_ms >= since + LINE_AWAITED_MS;
        let late: Vec<(JobId, u64)> =
            self.owed.iter().filter(|(_, (_, since))| due(since)).map(|(key, _)| *key).collect();
        for (job, step) in late {
            let Some((closing, _)) = self.owed.remove(&(job, step)) else { continue };
            let line = StepLine { step, record: closing_line(&closing) };
            if let Some(Err(error)) = self.books.keep(job, &[line]) {
                (self.complaints)(&format!("job {}: its books cannot be written: {error}", job.0));
            }
        }
    }
}

pub fn no_such_job(job: JobId) -> Refusal {
    Refusal::new(404, "no_such_job", format!("there is no job {}", job.0)).hint("`shoal ps` lists them")
}

fn closing_line(closing: &Closing) -> serde_json::Map<String, serde_json::Value> {
    let loss = f64::from(closing.loss) / closing.targets.max(1) as f64;
    let mut record = serde_json::Map::new();
    record.insert("loss".into(), loss.into());
    record.insert("tokens".into(), closing.targets.into());
    record
}
