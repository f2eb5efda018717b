//! A run while machines come and go, beside the same in the simulator. Goodput is what was trained against what the machines
//! that were there could have trained: at each moment steps of the best plan for so many, as if they had always been there.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use shoal_fleet::Trace;
use shoal_fleet::trace::TraceEvent;
use shoal_planner::run::{Morphing, Places, Report, Spent, over};
use shoal_service::receipt::ReceiptView;
use shoal_service::view::JobView;

use super::Scene;
use super::chronicle::{Chronicle, Pause};
use super::stage::Stage;
use crate::commands::train::stop_on_signals;
use crate::error::{CliError, Result};
use crate::job::duration_text;
use crate::live::follow::is_over;
use crate::show::percent;
use crate::spot::{Plans, settings};

/// Between two looks at what is due.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Between two looks at the records.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// Of the step that is under way when a machine is lost, on average.
const LOST_STEPS: f64 = 0.5;
/// How long the first plan may take to come into force.
const START_LIMIT: Duration = Duration::from_secs(120);

/// What a run came to.
struct Ran {
    seconds: f64,
    view: JobView,
    chronicle: Chronicle,
    kills: usize,
    /// Device-seconds, by what they went for.
    spent: Vec<(String, f64)>,
}

pub fn run(scene: &Scene, file: &Path, faster: f64, from: f64, seconds: f64) -> Result {
    let trace = Trace::read(file)?.faster(faster).piece(from, seconds);
    let stop = stop_on_signals()?;
    let ran = play(scene, &trace, &stop)?;
    // Who was there is known by the trace; how much of it was played, by the clock.
    let trace = trace.piece(0.0, ran.seconds);
    let mut plans = Plans::new(&scene.on_fleet, scene.job, scene.chain, &scene.on).stretched(scene.stretch);
    let possible = possible_steps(&trace, &mut plans);
    let network = scene.on.fleet.nodes[0].network.bytes_per_second / scene.stretch;
    let step_seconds = ran.seconds / possible.max(1.0);
    let [notice_seconds, switch_seconds] = measured(&ran.chronicle.pauses, step_seconds);
    let lost_steps = LOST_STEPS;
    let live = Morphing::Live { notice_seconds, switch_seconds, lost_steps, bytes_per_second: network };
    let mut places = Places::default();
    let simulated = over(&trace, &settings(scene.job, &scene.on, live), &mut |machines| {
        plans.step(places.of(machines), true)
    });
    let told = Told { trace: &trace, ran: &ran, possible, simulated, told: [notice_seconds, switch_seconds] };
    match scene.options.json {
        true => println!("{}", told.json()),
        false => told.print(scene, file, faster),
    }
    Ok(())
}

/// Starts the fleet and the job, then lets machines come and go.
fn play(scene: &Scene, trace: &Trace, stop: &AtomicBool) -> Result<Ran> {
    let quiet = scene.options.json;
    let mut stage = Stage::open(scene)?;
    let mut due = trace.events.iter().peekable();
    let mut chronicle = Chronicle::default();
    let mut kills = 0;
    while let Some((_, event)) = due.next_if(|(at, _)| *at <= 0.0) {
        if let TraceEvent::Add(machine) = event {
            stage.add(machine, 0)?;
        }
    }
    if !quiet {
        eprintln!("starting {} workers", stage.count());
    }
    stage.await_all()?;
    let job = stage.submit(scene)?;
    let until = Instant::now() + START_LIMIT;
    while chronicle.started_ms.is_none() {
        if Instant::now() >= until || stop.load(Ordering::Relaxed) {
            return Err(CliError::said("no plan came into force", "the logs are in the run's lab folder"));
        }
        std::thread::sleep(LOOK_EVERY);
        stage.check()?;
        stage.news()?.iter().for_each(|noted| chronicle.note(noted));
    }
    let began = Instant::now();
    let before = stage.receipt(job)?;
    let mut asked = Instant::now();
    let mut view = stage.job(job)?;
    let end = Duration::from_secs_f64(trace.seconds);
    while began.elapsed() < end && !is_over(&view) && !stop.load(Ordering::Relaxed) {
        while let Some((_, event)) = due.next_if(|(at, _)| *at <= began.elapsed().as_secs_f64()) {
            match event {
                TraceEvent::Add(machine) => stage.add(machine, 0)?,
                TraceEvent::Remove(machine) => {
                    stage.kill(machine)?;
                    kills += 1;
                }
            }
        }
        if asked.elapsed() >= ASK_EVERY {
            asked = Instant::now();
            stage.check()?;
            view = stage.job(job)?;
            stage.news()?.iter().for_each(|noted| chronicle.note(noted));
            if !quiet {
                show(began.elapsed(), end, &stage, &view, &chronicle);
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let seconds = began.elapsed().as_secs_f64();
    view = stage.job(job)?;
    let spent = difference(&before, &stage.receipt(job)?);
    stage.news()?.iter().for_each(|noted| chronicle.note(noted));
    if !quiet && std::io::stderr().is_terminal() {
        eprintln!();
    }
    if view.state == "failed" {
        let reason = view.reason.as_deref().unwrap_or("nobody said why");
        return Err(CliError::said(
            format!("the job failed: {reason}"),
            "its records are in the run's lab folder",
        ));
    }
    Ok(Ran { seconds, view, chronicle, kills, spent })
}

/// Device-seconds by what they went for, from one receipt to the next.
fn difference(before: &ReceiptView, after: &ReceiptView) -> Vec<(String, f64)> {
    let parts = before.parts.iter().zip(&after.parts);
    parts.map(|(before, after)| (after.part.clone(), after.device_seconds - before.device_seconds)).collect()
}

/// One line that is written over where there is a terminal, and now and then where there is none.
fn show(now: Duration, end: Duration, stage: &Stage, view: &JobView, chronicle: &Chronicle) {
    const EVERY_SECONDS: u64 = 10;
    let line = format!(
        "{} of {}: {} machines, {} on {} of them, step {}, {} plans",
        duration_text(now.as_secs_f64()),
        duration_text(end.as_secs_f64()),
        stage.count(),
        view.state,
        view.workers.len(),
        view.step,
        chronicle.pauses.len() + 1,
    );
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[K{line}");
    } else if now.as_millis() % u128::from(1000 * EVERY_SECONDS)
        < ASK_EVERY.as_millis() + LOOK_EVERY.as_millis()
    {
        eprintln!("{line}");
    }
}

/// What the machines that are there could do, if nothing ever changed.
fn possible_steps(trace: &Trace, plans: &mut Plans) -> f64 {
    let (mut machines, mut places, mut now, mut steps) = (BTreeSet::new(), Places::default(), 0.0, 0.0);
    let mut pass = |machines: &BTreeSet<String>, seconds: f64| {
        let step = plans.step(places.of(machines), true).filter(|_| seconds > 0.0);
        steps += step.map_or(0.0, |step| seconds / step.seconds);
    };
    for (at, event) in &trace.events {
        pass(&machines, at - now);
        now = *at;
        match event {
            TraceEvent::Add(machine) => drop(machines.insert(machine.clone())),
            TraceEvent::Remove(machine) => drop(machines.remove(machine)),
        }
    }
    pass(&machines, trace.seconds - now);
    steps
}

/// What the simulator is told: how long pauses were beside the moving of state, after a loss and after a change that was
/// foreseen. A loss is counted from the last step that was done; what was done of the next one is what the simulator takes
/// off. Where a plan was given up on the way there were two changes, which the simulator counts itself.
fn measured(pauses: &[Pause], step_seconds: f64) -> [f64; 2] {
    let until_moving = |is_lost: bool| {
        let such = || pauses.iter().filter(move |pause| pause.lost == is_lost);
        let undisturbed = such().any(|pause| !pause.disturbed);
        let pauses = such().filter(|pause| !(undisturbed && pause.disturbed));
        mean(pauses.map(|pause| pause.total_ms() - pause.moved_ms)) / 1e3
    };
    [(until_moving(true) - LOST_STEPS * step_seconds).max(0.0), until_moving(false)]
}

fn mean(values: impl Iterator<Item = u64>) -> f64 {
    let (count, sum) = values.fold((0.0, 0.0), |(count, sum), value| (count + 1.0, sum + value as f64));
    if count == 0.0 { 0.0 } else { sum / count }
}

/// What is told at the end.
struct Told<'a> {
    trace: &'a Trace,
    ran: &'a Ran,
    possible: f64,
    simulated: Report,
    /// What the simulator was told: seconds beside the moving of state, after a loss and after another change.
    told: [f64; 2],
}

impl Told<'_> {
    fn goodput(&self) -> [f64; 2] {
        [self.ran.view.step as f64, self.simulated.steps]
            .map(|steps| steps / self.possible.max(f64::MIN_POSITIVE))
    }

    /// Device-seconds by what they went for, here and in the simulator; those that nobody had are unused.
    fn spent(&self) -> Vec<(String, f64, f64)> {
        let there = self.trace.mean_count() * self.trace.seconds;
        let used: f64 = self.ran.spent.iter().map(|(_, seconds)| seconds).sum();
        let here = |name: &str| {
            let found = self.ran.spent.iter().find(|(part, _)| part == name);
            found.map_or((there - used).max(0.0), |(_, seconds)| *seconds)
        };
        let parts = Spent::PARTS.iter();
        parts.map(|(name, part)| (name.to_string(), here(name), part(&self.simulated.spent))).collect()
    }

    fn json(&self) -> serde_json::Value {
        let [lab, simulated] = self.goodput();
        let Chronicle { joined, lost, declined, restored, abandoned, pauses, .. } = &self.ran.chronicle;
        json!({
            "seconds": self.ran.seconds, "steps": self.ran.view.step, "possible_steps": self.possible,
            "goodput": lab, "simulated_goodput": simulated, "points_apart": 100.0 * (lab - simulated),
            "kills": self.ran.kills, "joined": joined, "lost": lost, "plans": pauses.len() + 1,
            "declined": declined, "restored": restored, "abandoned": abandoned, "undone": self.ran.view.undone,
            "device_seconds": self.spent().into_iter().map(|(name, here, _)| (name, here)).collect::<BTreeMap<_, _>>(),
            "pauses": pauses, "notice_seconds": self.told[0], "switch_seconds": self.told[1], "simulated": self.simulated,
        })
    }

    fn print(&self, scene: &Scene, file: &Path, faster: f64) {
        let Told { trace, ran, possible, simulated, .. } = self;
        let Chronicle { joined, lost, declined, restored, abandoned, pauses, .. } = &ran.chronicle;
        println!(
            "{} over {} of {}, {faster} times faster, with {:.1} machines on average",
            scene.job.name,
            duration_text(ran.seconds),
            file.display(),
            trace.mean_count(),
        );
        println!("{:<31}{:>12}{:>12}", "", "here", "simulated");
        println!("{:<31}{:>12}{:>12.0}", "steps", ran.view.step, simulated.steps);
        let [here, there] = self.goodput();
        println!(
            "{:<31}{:>12}{:>12}   {:+.1} points; {possible:.0} steps were possible",
            "of surviving capacity",
            percent(here),
            percent(there),
            100.0 * (here - there),
        );
        println!("{:<31}{:>12}{:>12}", "plans changed", pauses.len(), simulated.morphs);
        println!("{:<31}{:>12}{:>12}", "read from a checkpoint", restored, simulated.restores);
        println!(
            "{} killed, {joined} joined, {lost} found dead, {} steps undone",
            ran.kills, ran.view.undone
        );
        println!("{declined} changes declined, {abandoned} given up on the way");
        println!("where the device-seconds went");
        let spent = self.spent();
        let whole =
            |of: fn(&(String, f64, f64)) -> f64| spent.iter().map(of).sum::<f64>().max(f64::MIN_POSITIVE);
        let (here, there) = (whole(|part| part.1), whole(|part| part.2));
        for (name, seconds, simulated) in &spent {
            println!("  {name:<29}{:>12}{:>12}", percent(seconds / here), percent(simulated / there));
        }
        for (what, is_lost) in [("a loss", true), ("a change that was foreseen", false)] {
            self.print_pauses(what, is_lost);
        }
        println!(
            "the simulator was told, as measured, that pauses last {:.2} s beside the moving of state after a loss, and \
             {:.2} s after a change that was foreseen",
            self.told[0], self.told[1]
        );
    }

    fn print_pauses(&self, what: &str, is_lost: bool) {
        let pauses: Vec<&Pause> =
            self.ran.chronicle.pauses.iter().filter(|pause| pause.lost == is_lost).collect();
        let mut totals: Vec<u64> = pauses.iter().map(|pause| pause.total_ms()).collect();
        totals.sort_unstable();
        let Some(median) = totals.get(totals.len() / 2) else { return };
        let part = |of: fn(&Pause) -> u64| mean(pauses.iter().map(|pause| of(pause))) / 1e3;
        println!(
            "pause at {what}, {} times: median {:.2} s; on average noticed {:.2} s after the last step, stopped {:.2}, \
             planned {:.2}, moved {:.2}, began {:.2}",
            totals.len(),
            *median as f64 / 1e3,
            part(|pause| pause.noticed_ms),
            part(|pause| pause.stopped_ms),
            part(|pause| pause.planned_ms),
            part(|pause| pause.moved_ms),
            part(|pause| pause.began_ms),
        );
    }
}
