//! The controller's side: its state machine and log, a planner that deals out hand-made tables, and worker processes that
//! come, go and are killed.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use shoal_control::Keeper;
use shoal_control::controller::record::{Change, Record};
use shoal_control::controller::state::{Class, Interval, Job, JobSpec, Phase, Rest, Wish};
use shoal_control::controller::{Action, Event, Proposal, Step};
use shoal_control::disk::Folder;
use shoal_control::message::{Epoch, JobId, ToWorker, WorkerId};
use shoal_crew::{Table, checkpoint_of};
use shoal_net::identity::Authority;
use shoal_state::checkpoint::Store;

use crate::job::Description;
use crate::tables;
use crate::worker::{PEMS, Said, Told, settings};

pub const JOB: JobId = JobId(1);
/// Nothing takes this long, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(240);

struct Process {
    child: Child,
    input: ChildStdin,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub struct Fleet {
    pub description: Description,
    keeper: Option<Keeper<Folder>>,
    log: PathBuf,
    started: Instant,
    workers: BTreeMap<String, Process>,
    names: BTreeMap<WorkerId, String>,
    said: Receiver<(String, Said)>,
    say: Sender<(String, Said)>,
    /// Losses by step and the epoch it was done in.
    pub losses: BTreeMap<u64, BTreeMap<Epoch, f64>>,
    /// Held-out losses that were told after a step, and steps that were told of without.
    pub held_out: BTreeMap<u64, Vec<f64>>,
    pub unmeasured: BTreeSet<u64>,
    pub changes: Vec<Change>,
    pub notices: Vec<String>,
    pub quarantined: Vec<WorkerId>,
    paces: BTreeMap<WorkerId, u32>,
    /// Which shape the planner begins with. Workers of odd ones prove who they are.
    shape: u64,
    authority: Authority,
}

impl Fleet {
    /// A fleet of so many workers that have joined, and its job.
    pub fn new(description: Description, workers: usize, shape: u64, checkpoint_every: u64) -> Fleet {
        description.prepare();
        let log = description.folder.join("log");
        let (say, said) = channel();
        let mut fleet = Fleet {
            keeper: None,
            log,
            started: Instant::now(),
            workers: BTreeMap::new(),
            names: BTreeMap::new(),
            said,
            say,
            losses: BTreeMap::new(),
            held_out: BTreeMap::new(),
            unmeasured: BTreeSet::new(),
            changes: Vec::new(),
            notices: Vec::new(),
            quarantined: Vec::new(),
            paces: BTreeMap::new(),
            shape,
            authority: Authority::new().expect("an authority"),
            description,
        };
        fleet.open();
        (0..workers).for_each(|worker| fleet.add(&format!("w{worker}")));
        fleet.until("all workers", |fleet| fleet.names.len() == workers);
        let spec = JobSpec {
            name: "the fleet's".into(),
            class: Class::Foreground,
            priority: 0,
            steps: fleet.description.steps,
            workers_min: 1,
            workers_max: 9,
            checkpoint_every: Interval::Steps(checkpoint_every),
            checkpoints_kept: 2,
            description: fleet.description.text(),
        };
        fleet.step(Event::Submit { job: JOB, spec });
        fleet
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Starts the controller, from what its log has.
    pub fn open(&mut self) {
        let disk = Folder::open(&self.log).expect("a folder for the log");
        let (keeper, step, _) = Keeper::open(settings(), disk, self.now_ms()).expect("the log opens");
        self.keeper = Some(keeper);
        self.act(step);
    }

    /// The controller's process ends.
    pub fn lose_controller(&mut self) {
        self.keeper = None;
    }

    pub fn add(&mut self, name: &str) {
        let own = std::env::current_exe().expect("the test's own path");
        let mut command = Command::new(own);
        command.args(["worker", name]);
        if self.shape % 2 == 1 {
            command.arg(self.identity(name));
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a worker starts");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let input = child.stdin.take().expect("piped");
        let (say, own) = (self.say.clone(), name.to_owned());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The last line of one that is killed may be torn.
                let Ok(said) = serde_json::from_str(&line) else { return };
                if say.send((own.clone(), said)).is_err() {
                    return;
                }
            }
        });
        self.workers.insert(name.to_owned(), Process { child, input });
    }

    /// A folder with what a worker proves itself by.
    fn identity(&self, name: &str) -> PathBuf {
        let folder = self.description.folder.join(format!("identity-{name}"));
        std::fs::create_dir_all(&folder).expect("a folder");
        let identity = self.authority.issue(name).expect("an identity");
        let pems = [identity.certificate_pem(), identity.key_pem(), identity.authority_pem()];
        for (file, pem) in PEMS.iter().zip(pems) {
            std::fs::write(folder.join(file), pem).expect("it can be written");
        }
        folder
    }

    /// Stops a process in its tracks, or has it go on.
    pub fn freeze(&self, name: &str, frozen: bool) {
        let signal = if frozen { "-STOP" } else { "-CONT" };
        let process = self.workers[name].child.id().to_string();
        assert!(Command::new("kill").args([signal, &process]).status().expect("kill runs").success());
    }

    /// What a worker's own work was found to take, in percent of what was predicted.
    pub fn pace(&self, name: &str) -> Option<u32> {
        let paces = self.paces.iter().filter(|(worker, _)| self.names[worker] == name);
        paces.map(|(_, percent)| *percent).max()
    }

    /// The numbers that a name was given.
    pub fn lives(&self, name: &str) -> usize {
        self.names.values().filter(|other| *other == name).count()
    }

    /// Ends a process without notice.
    pub fn kill(&mut self, name: &str) {
        drop(self.workers.remove(name).expect("it runs"));
    }

    pub fn take_away(&mut self, name: &str, in_ms: u64) {
        self.tell(name, &Told::Notice { in_ms });
    }

    pub fn wish(&mut self, wish: Wish) {
        self.step(Event::Wish { job: JOB, wish });
    }

    /// Those of a plan, in its order.
    pub fn members(&self) -> Vec<String> {
        let plan = self.job().held();
        plan.into_iter().flat_map(|plan| &plan.members).map(|worker| self.names[worker].clone()).collect()
    }

    pub fn job(&self) -> &Job {
        &self.keeper.as_ref().expect("there is a controller").state().jobs[&JOB]
    }

    pub fn process_ids(&self) -> BTreeSet<u32> {
        self.workers.values().map(|process| process.child.id()).collect()
    }

    /// Processes that have ended by themselves.
    pub fn ended(&mut self) -> Vec<String> {
        let ended = |(name, process): (&String, &mut Process)| {
            process.child.try_wait().expect("its state").map(|_| name.clone())
        };
        self.workers.iter_mut().filter_map(ended).collect()
    }

    fn tell(&mut self, name: &str, told: &Told) {
        if let Some(process) = self.workers.get_mut(name) {
            let line = serde_json::to_string(told).expect("plain data is JSON");
            // One that has ended hears nothing.
            let _ = writeln!(process.input, "{line}").and_then(|()| process.input.flush());
        }
    }

    fn step(&mut self, event: Event) {
        let now_ms = self.now_ms();
        let Some(keeper) = &mut self.keeper else { return };
        let step = keeper.step(now_ms, event).expect("the log takes it");
        assert_eq!(step.misfit, None);
        self.act(step);
    }

    fn act(&mut self, step: Step) {
        let state = self.keeper.as_ref().expect("it just stepped").state();
        self.names.extend(state.members.iter().map(|(worker, member)| (*worker, member.name.clone())));
        for record in step.records {
            match record {
                Record::Job { change, .. } => self.changes.push(change),
                Record::Quarantined { worker, .. } => self.quarantined.push(worker),
                Record::Paced { worker, percent } => drop(self.paces.insert(worker, percent)),
                _ => {}
            }
        }
        for action in step.actions {
            match action {
                Action::Send { to, message } => {
                    if let Some(name) = self.names.get(&to).cloned() {
                        self.tell(&name, &Told::Message(message));
                    }
                }
                Action::Answer { name, message } => self.answer(&name, message),
                Action::Plan { job, request, workers, .. } => {
                    let workers: Vec<WorkerId> = workers.into_iter().map(|(worker, _)| worker).collect();
                    let plan = tables::shaped(self.shape + request, workers.len());
                    let step_ms = 600 / workers.len() as u64;
                    let work_ms = tables::work_ms(&plan, self.description.paced_us);
                    let plan = Table { plan, work_ms, bubbles: Vec::new() }.message(&workers, step_ms);
                    let answer = Ok(Proposal { plan, move_ms: 10, staying_ms: None });
                    self.step(Event::Planned { job, request, answer });
                }
                Action::KeepCheckpoints { keeping, .. } => {
                    let store = Store::open_existing(&self.description.folder.join("checkpoints"));
                    let spares = |number| keeping.spares(checkpoint_of(number));
                    store.and_then(|store| store.keep_only(spares)).expect("checkpoints are removed");
                }
            }
        }
    }

    fn answer(&mut self, name: &str, message: ToWorker) {
        self.tell(name, &Told::Message(message));
    }

    /// Goes on until something is so.
    pub fn until(&mut self, what: &str, is_so: impl Fn(&Fleet) -> bool) {
        let began = Instant::now();
        while !is_so(self) {
            if began.elapsed() > PATIENCE {
                let job = self.keeper.as_ref().map(|keeper| &keeper.state().jobs[&JOB]);
                let (phase, committed) = job.map_or((None, 0), |job| (Some(&job.phase), job.committed));
                panic!("{what} never came: {committed} steps, {phase:?}\n{:#?}", self.notices);
            }
            self.pass();
        }
    }

    /// A moment passes.
    pub fn pass(&mut self) {
        match self.said.recv_timeout(Duration::from_millis(20)) {
            Ok((_, Said::Message(message))) => self.step(Event::Message(message)),
            Ok((_, Said::Step { epoch, step, loss, held_out, .. })) => {
                self.losses.entry(step).or_default().insert(epoch, loss);
                match held_out {
                    Some(held_out) => self.held_out.entry(step).or_default().push(held_out),
                    None => drop(self.unmeasured.insert(step)),
                }
            }
            Ok((name, Said::Notice { sentence, fatal })) => {
                self.notices.push(format!("{name}: {sentence}"));
                assert!(!fatal, "{name}: {sentence}");
            }
            Err(_) => {}
        }
        self.step(Event::Tick);
    }

    pub fn until_step(&mut self, step: u64) {
        self.until(&format!("step {step}"), |fleet| fleet.job().committed >= step);
    }

    pub fn until_done(&mut self) {
        self.until("the end", |fleet| matches!(fleet.job().phase, Phase::Resting(Rest::Done)));
        // What was said last.
        for _ in 0..20 {
            self.pass();
        }
    }
}
