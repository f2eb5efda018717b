//! `shoal chaos`: a drill on one's own live run. It orders faults at random moments on random workers of a job's plan, one
//! after the other, and scores how the job takes them.

mod score;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shoal_control::message::JobId;
use shoal_kernels::random::mix64;
use shoal_service::client::Client;
use shoal_service::clock::unix_ms;
use shoal_service::drill::{Drill, is_allowed};
use shoal_service::view::{JobView, WorkerView};

use self::score::{Fault, Jumps, Outcome, Sign};
use crate::error::{CliError, Result};
use crate::live::follow::{is_over, patiently};
use crate::live::reach::Reach;
use crate::show::table;

#[derive(clap::Args)]
pub struct Options {
    /// The job's number, as `shoal ps` shows it; otherwise the one that there is
    job: Option<u64>,
    /// Workers to kill; they stay away until someone starts them again
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    kill: usize,
    /// Workers to freeze
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    freeze: usize,
    /// Workers to cut off from the controller and from each other
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    cut: usize,
    /// Workers to slow down
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    slow: usize,
    /// How long a worker stays frozen, cut off or slow
    #[arg(long, value_name = "SECONDS", default_value_t = 4.0)]
    seconds: f64,
    /// How much longer a slow worker's work takes
    #[arg(long, value_name = "TIMES", default_value_t = 3.0)]
    times: f64,
    /// Between the recovery from a fault and the next one, on average
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    every: f64,
    /// Fixes what is drawn; otherwise the clock does
    #[arg(long)]
    seed: Option<u64>,
    /// Only these workers; otherwise all of the job's plan that allow drills
    #[arg(long, value_name = "NAME")]
    worker: Vec<String>,
    #[command(flatten)]
    reach: Reach,
}

/// How long a job may take to go on after a fault, beyond the fault itself.
const GO_ON_MAX: Duration = Duration::from_secs(60);
/// How long lines of steps that are counted may be on their way.
const LINES_MAX: Duration = Duration::from_secs(15);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Steps before the first fault whose losses show what is usual.
const STEPS_BEFORE: u64 = 50;

pub fn run(options: Options) -> Result {
    let faults = drawn(&options)?;
    let client = options.reach.client()?;
    let job = find(&client, options.job)?;
    let mut watch = Watch::new(&client, job.job)?;
    let seed = options.seed.unwrap_or_else(unix_ms);
    let mut random = Random { seed, drawn: 0 };
    let mut done: Vec<(Fault, Outcome)> = Vec::new();
    for drill in shuffled(faults, &mut random) {
        let wait = options.every * (0.2 + 1.6 * random.share());
        std::thread::sleep(Duration::from_secs_f64(wait));
        let fault = order(&client, &options, job.job, drill, &mut random, &mut watch)?;
        if !options.reach.json {
            eprintln!("{} {} at step {}", drill.name(), fault.name, fault.step);
        }
        let outcome = watch.until_over(&fault)?;
        done.push((fault, outcome));
    }
    let books = Books::read(&client, &watch, &done)?;
    let score = Score { job, seed, twice: score::counted_twice(&watch.signs), books, done };
    match options.reach.json {
        true => println!("{}", score.json()),
        false => print!("{}", score.text()),
    }
    score.judge()
}

/// What is to be done, as it was asked for.
fn drawn(options: &Options) -> Result<Vec<Drill>> {
    let Options { kill, freeze, cut, slow, seconds, times, every, .. } = *options;
    if kill + freeze + cut + slow == 0 {
        return Err(CliError::said(
            "nothing is to be done",
            "say what: --kill 1 --freeze 1 --cut 1 --slow 1",
        ));
    }
    if !(0.0..=600.0).contains(&seconds)
        || !(0.0..=3600.0).contains(&every)
        || !(1.0..=100.0).contains(&times)
    {
        let what = format!("--seconds {seconds}, --every {every} or --times {times} is out of range");
        return Err(CliError::said(
            what,
            "faults last up to 600 seconds, and slow workers are 1 to 100 times slower",
        ));
    }
    let ms = (seconds * 1e3) as u64;
    let percent = (times * 100.0).round() as u32;
    let kinds = [
        (Drill::Kill {}, kill),
        (Drill::Freeze { ms }, freeze),
        (Drill::Cut { ms }, cut),
        (Drill::Slow { ms, percent }, slow),
    ];
    Ok(kinds.into_iter().flat_map(|(drill, count)| std::iter::repeat_n(drill, count)).collect())
}

fn find(client: &Client, asked: Option<u64>) -> Result<JobView> {
    if let Some(job) = asked {
        return Ok(client.job(job)?);
    }
    let mut open: Vec<JobView> = client.jobs()?.into_iter().filter(|job| !is_over(job)).collect();
    match (open.pop(), open.is_empty()) {
        (Some(job), true) => Ok(job),
        (None, _) => {
            Err(CliError::said("no job is under way", "submit one: shoal train JOB.toml --controller URL"))
        }
        _ => Err(CliError::said(
            "several jobs are under way",
            "name one by its number, as `shoal ps` shows it",
        )),
    }
}

/// Numbers that a seed fixes.
struct Random {
    seed: u64,
    drawn: u64,
}

impl Random {
    fn next(&mut self) -> u64 {
        self.drawn += 1;
        mix64(mix64(self.seed) ^ self.drawn)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    /// From 0 to 1.
    fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn shuffled(mut drills: Vec<Drill>, random: &mut Random) -> Vec<Drill> {
    for place in (1..drills.len()).rev() {
        drills.swap(place, random.below(place + 1));
    }
    drills
}

/// Has a fault done to some worker of the plan that is there.
fn order(
    client: &Client,
    options: &Options,
    job: u64,
    drill: Drill,
    random: &mut Random,
    watch: &mut Watch,
) -> Result<Fault> {
    let until = Instant::now() + GO_ON_MAX;
    loop {
        let view = watch.look()?;
        if is_over(&view) {
            let what =
                format!("job {job} is {} at step {}, and the drill is not over", view.state, view.step);
            return Err(CliError::said(
                what,
                "drill a longer job, with fewer faults or sooner: --every SECONDS",
            ));
        }
        let workers = patiently(|| client.workers())?;
        if drill.is_kill() && workers.len() < 2 {
            let what = "a kill would leave the job without any worker";
            return Err(CliError::said(what, "have another one join first: `shoal token` shows how"));
        }
        let candidates = candidates(&view, &workers, &options.worker)?;
        let leaves_one = workers.iter().filter(|worker| worker.connected).count() > 1;
        if !candidates.is_empty() && (leaves_one || !drill.is_kill()) {
            let worker = candidates[random.below(candidates.len())];
            match client.drill(worker.worker, drill) {
                Ok(answer) => {
                    let (name, at_ms) = (answer.name, answer.at_ms);
                    return Ok(Fault { drill, worker: worker.worker, name, at_ms, step: view.step });
                }
                // It has just gone, or its connection has: others may be there.
                Err(shoal_service::Error::Refused(refusal)) if [404, 409].contains(&refusal.status) => {}
                Err(error) => return Err(error.into()),
            }
        }
        if Instant::now() >= until {
            let what = format!("job {job} has had no worker to drill for {} s", GO_ON_MAX.as_secs());
            return Err(CliError::said(what, "see `shoal ps` and `shoal events`"));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Those of the job's plan that may be drilled. Others that were asked for by name are an error.
fn candidates<'a>(job: &JobView, workers: &'a [WorkerView], asked: &[String]) -> Result<Vec<&'a WorkerView>> {
    let refused = |worker: &&WorkerView| !is_allowed(&worker.about);
    if let Some(unknown) = asked.iter().find(|name| !workers.iter().any(|worker| worker.name == **name)) {
        return Err(CliError::said(format!("there is no worker {unknown}"), "`shoal ps` lists them"));
    }
    let in_plan = |worker: &&WorkerView| job.workers.contains(&worker.name) && worker.connected;
    let wanted = |worker: &&WorkerView| asked.is_empty() || asked.contains(&worker.name);
    let there: Vec<&WorkerView> = workers.iter().filter(in_plan).filter(wanted).collect();
    if let Some(worker) = there.iter().copied().find(refused)
        && (there.iter().all(&refused) || !asked.is_empty())
    {
        let what = format!("{} was not started for drills", worker.name);
        return Err(CliError::said(what, "its owner allows them: shoal join … --drills"));
    }
    Ok(there.into_iter().filter(|worker| !refused(worker)).collect())
}

/// A job's records as they come.
struct Watch<'a> {
    client: &'a Client,
    job: u64,
    revision: u64,
    signs: Vec<(u64, Sign)>,
    /// Steps that were counted when the drill began.
    first: u64,
}

impl<'a> Watch<'a> {
    fn new(client: &'a Client, job: u64) -> Result<Watch<'a>> {
        // Whatever the number, the newest comes with the answer.
        let revision = client.events(u64::MAX / 2, false)?.revision;
        let first = client.job(job)?.step;
        Ok(Watch { client, job, revision, signs: Vec::new(), first })
    }

    /// Takes in what was recorded meanwhile; how the job is.
    fn look(&mut self) -> Result<JobView> {
        loop {
            let found = patiently(|| self.client.events(self.revision, false))?;
            let Some(last) = found.events.last() else { break };
            self.revision = last.revision;
            self.signs.extend(score::signs(JobId(self.job), &found.events));
        }
        patiently(|| self.client.job(self.job))
    }

    /// Until all that a fault led to has happened.
    fn until_over(&mut self, fault: &Fault) -> Result<Outcome> {
        let (began, patience) = (Instant::now(), GO_ON_MAX + Duration::from_millis(fault.drill.ms()));
        loop {
            let view = self.look()?;
            let first = self.signs.partition_point(|(at_ms, _)| *at_ms < fault.at_ms);
            let signs = &self.signs[first..];
            let lasted_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
            if score::is_over(fault, signs, lasted_ms) || is_over(&view) || began.elapsed() >= patience {
                return Ok(score::outcome(fault, signs));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// What the job's books have of the drill's time.
struct Books {
    /// How the job is in the end.
    state: String,
    first: u64,
    last: u64,
    /// Steps that are not there, or not once.
    wrong: Vec<u64>,
    jumps: Jumps,
}

impl Books {
    fn read(client: &Client, watch: &Watch, done: &[(Fault, Outcome)]) -> Result<Books> {
        let JobView { state, step: last, .. } = patiently(|| client.job(watch.job))?;
        let first = watch.first + 1;
        let until = Instant::now() + LINES_MAX;
        loop {
            let lines = lines(client, watch.job, watch.first.saturating_sub(STEPS_BEFORE))?;
            let mut times: BTreeMap<u64, usize> = (first..=last).map(|step| (step, 0)).collect();
            for (step, _) in &lines {
                times.entry(*step).and_modify(|times| *times += 1);
            }
            let wrong: Vec<u64> =
                times.into_iter().filter(|(_, times)| *times != 1).map(|(step, _)| step).collect();
            if wrong.is_empty() || Instant::now() >= until {
                let faults: BTreeSet<u64> =
                    done.iter().filter_map(|(_, outcome)| outcome.next_step).collect();
                return Ok(Books { state, first, last, wrong, jumps: score::jumps(&lines, &faults) });
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Steps and losses after a step.
fn lines(client: &Client, job: u64, mut after: u64) -> Result<Vec<(u64, f64)>> {
    let mut all = Vec::new();
    loop {
        let found = patiently(|| client.logs(job, after, false))?.lines;
        let read = |line: &Value| Some((line["step"].as_u64()?, line["loss"].as_f64().unwrap_or(f64::NAN)));
        let found: Vec<(u64, f64)> = found.iter().filter_map(read).collect();
        let Some((last, _)) = found.last() else { return Ok(all) };
        after = *last;
        all.extend(found);
    }
}

struct Score {
    job: JobView,
    seed: u64,
    done: Vec<(Fault, Outcome)>,
    /// Steps that were counted twice.
    twice: BTreeSet<u64>,
    books: Books,
}

impl Score {
    fn next_steps_ms(&self) -> Vec<u64> {
        self.done.iter().filter_map(|(_, outcome)| outcome.next_step_after_ms).collect()
    }

    fn killed(&self) -> Vec<&str> {
        let killed = self.done.iter().filter(|(fault, _)| fault.drill.is_kill());
        killed.map(|(fault, _)| fault.name.as_str()).collect()
    }

    fn json(&self) -> Value {
        let one = |(fault, outcome): &(Fault, Outcome)| json!({ "fault": fault, "outcome": outcome });
        let times = self.next_steps_ms();
        let quantile = |share| score::quantile(&times, share);
        json!({
            "job": self.job.job,
            "seed": self.seed,
            "faults": self.done.iter().map(one).collect::<Vec<_>>(),
            "next_step_after_ms": { "p50": quantile(0.5), "p95": quantile(0.95), "max": quantile(1.0) },
            "done_again": self.done.iter().map(|(_, outcome)| outcome.done_again).sum::<u64>(),
            "counted_twice": self.twice,
            "books": { "first": self.books.first, "last": self.books.last, "wrong": self.books.wrong },
            "loss_jump": self.books.jumps,
            "killed": self.killed(),
        })
    }

    fn text(&self) -> String {
        let seconds = |ms: Option<u64>| ms.map_or("-".into(), |ms| format!("{:.2} s", ms as f64 / 1e3));
        let row = |(fault, outcome): &(Fault, Outcome)| {
            vec![
                fault.drill.name().to_owned(),
                fault.name.clone(),
                fault.step.to_string(),
                seconds(outcome.missed_after_ms),
                seconds(outcome.next_step_after_ms),
                if outcome.replanned { "yes" } else { "no" }.to_owned(),
                outcome.done_again.to_string(),
            ]
        };
        let head =
            ["fault", "worker", "at step", "missed after", "next step after", "new plan", "done again"];
        let mut text = table(&head, self.done.iter().map(row));
        let times = self.next_steps_ms();
        let quantile = |share| seconds(score::quantile(&times, share));
        let again: u64 = self.done.iter().map(|(_, outcome)| outcome.done_again).sum();
        let Books { first, last, wrong, jumps, .. } = &self.books;
        text += &format!(
            "\nnext finished step after {} (p50), {} (p95), {} (most); {again} counted steps done again\n",
            quantile(0.5),
            quantile(0.95),
            quantile(1.0),
        );
        text += &format!(
            "steps {first} to {last}: {}\n",
            match wrong.is_empty() {
                true => "each once in the books".to_owned(),
                false => format!("{} are not once in the books", wrong.len()),
            }
        );
        text += &format!(
            "from step to step the loss changed by at most {:.4} at a fault, {:.4} elsewhere\n",
            jumps.at_faults, jumps.elsewhere
        );
        if !self.killed().is_empty() {
            text += &format!(
                "killed, and away until they are started again with the same `shoal join URL`: {}\n",
                self.killed().join(" ")
            );
        }
        text + &format!("seed {}\n", self.seed)
    }

    fn judge(&self) -> Result {
        let hint = "`shoal events --steps` and the workers' messages say what happened";
        let fail = |what: String| Err(CliError::said(what, hint));
        // A job that was done before the fault took hold had no step left.
        let stuck = |(_, outcome): &&(Fault, Outcome)| outcome.next_step_after_ms.is_none();
        if let Some((fault, _)) = self.done.iter().find(stuck).filter(|_| self.books.state != "done") {
            return fail(format!(
                "job {} finished no step after the {} of {}",
                self.job.job,
                fault.drill.name(),
                fault.name
            ));
        }
        if let Some(step) = self.twice.first() {
            return fail(format!("step {step} was counted twice"));
        }
        if let Some(step) = self.books.wrong.first() {
            return fail(format!("step {step} is in the job's books never, or more than once"));
        }
        Ok(())
    }
}
