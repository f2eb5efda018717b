//! One device becomes slow: after how many steps that is found and planned around, and how fast the run is afterwards beside the
//! best plan for the fleet as it then is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;
use shoal_control::controller::record::Record;
use shoal_fleet::pace::{paced, stretched};
use shoal_service::history::Noted;

use super::Scene;
use super::chronicle::Chronicle;
use super::stage::Stage;
use crate::commands::train::stop_on_signals;
use crate::error::{CliError, Result};
use crate::fleet_plan::{OnFleet, Survive};
use crate::live::follow::is_over;
use crate::show::percent;
use crate::timeline::time_text;

/// Steps that are measured at each speed, and those before them that are not.
const STEPS: usize = 10;
const WARM_UP_STEPS: usize = 2;
/// Steps within which something has to happen before the run is judged as it is.
const STEPS_MAX: u64 = 40;
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What became of it, in steps from the one under way when the device slowed down.
#[derive(Default)]
struct Course {
    found_after: Option<u64>,
    replanned_after: Option<u64>,
    before_seconds: f64,
    after_seconds: f64,
}

pub fn run(scene: &Scene, times: f64) -> Result {
    let stop = stop_on_signals()?;
    let slowed_percent = (100.0 * times).round() as u32;
    let course = play(scene, slowed_percent, &stop)?;
    let best = best_seconds(scene, slowed_percent)?;
    let reached = best / course.after_seconds;
    if scene.options.json {
        println!(
            "{}",
            json!({
                "found_after_steps": course.found_after, "replanned_after_steps": course.replanned_after,
                "step_seconds_before": course.before_seconds, "step_seconds_after": course.after_seconds,
                "best_step_seconds": best, "of_best": reached,
            })
        );
        return Ok(());
    }
    let steps = |found: Option<u64>| found.map_or("never".to_owned(), |steps| format!("after {steps} steps"));
    println!("one of {} devices became {times} times slower", scene.on.fleet.devices.len());
    println!("found       {}", steps(course.found_after));
    println!("replanned   {}", steps(course.replanned_after));
    println!(
        "a step      {} before, {} after; {} by the best plan for the slow fleet: {} of its throughput",
        time_text(course.before_seconds),
        time_text(course.after_seconds),
        time_text(best),
        percent(reached),
    );
    Ok(())
}

fn play(scene: &Scene, slowed_percent: u32, stop: &AtomicBool) -> Result<Course> {
    let mut stage = Stage::open(scene)?;
    let names: Vec<String> = scene.on.fleet.nodes.iter().map(|node| node.name.clone()).collect();
    for (place, name) in names.iter().enumerate() {
        stage.add(name, place)?;
    }
    stage.await_all()?;
    let job = stage.submit(scene)?;
    let mut watch = Watch { stage, stop, job, chronicle: Chronicle::default() };
    let before_seconds = watch.steps()?;

    watch.stage.pace(names.last().map_or("", String::as_str), slowed_percent)?;
    let (slowed, plans) = (watch.chronicle.step(), watch.chronicle.pauses.len());
    let mut course = Course { before_seconds, ..Course::default() };
    while watch.chronicle.step() < slowed + STEPS_MAX && course.replanned_after.is_none() {
        for noted in watch.pass()? {
            watch.chronicle.note(&noted);
            let since = watch.chronicle.step() - slowed;
            if matches!(noted.record, Record::Paced { .. }) {
                course.found_after.get_or_insert(since);
            }
            if watch.chronicle.pauses.len() > plans {
                course.replanned_after.get_or_insert(since);
            }
        }
    }
    course.after_seconds = watch.steps()?;
    Ok(course)
}

/// A run that is looked at now and then.
struct Watch<'a> {
    stage: Stage,
    stop: &'a AtomicBool,
    job: u64,
    chronicle: Chronicle,
}

impl Watch<'_> {
    /// What has happened since the last time.
    fn pass(&mut self) -> Result<Vec<Noted>> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(CliError::said("it was interrupted", "it needs some tens of steps"));
        }
        std::thread::sleep(LOOK_EVERY);
        self.stage.check()?;
        let view = self.stage.job(self.job)?;
        if is_over(&view) {
            let what = format!("the job is {} after {} steps, too early to judge", view.state, view.step);
            return Err(CliError::said(what, "let it have more: --set train.steps=1000"));
        }
        self.stage.news()
    }

    /// Waits for some steps, and says how long one of the later ones took on average.
    fn steps(&mut self) -> Result<f64> {
        let first = self.chronicle.steps.len() + WARM_UP_STEPS;
        while self.chronicle.steps.len() <= first + STEPS {
            for noted in self.pass()? {
                self.chronicle.note(&noted);
            }
        }
        let (from, to) = (self.chronicle.steps[first], self.chronicle.steps[first + STEPS]);
        Ok((to.1 - from.1) as f64 / 1e3 / (to.0 - from.0) as f64)
    }
}

/// A step of the best plan for the fleet whose last device is slow.
fn best_seconds(scene: &Scene, slowed_percent: u32) -> Result<f64> {
    let (fleet, costs) = stretched(&scene.on.fleet, &scene.on.costs, scene.stretch);
    let mut percents = vec![100; fleet.devices.len()];
    percents.iter_mut().last().into_iter().for_each(|percent| *percent = slowed_percent);
    let (fleet, costs) = paced(&fleet, &costs, &percents);
    let survive = match scene.on_fleet.survive(scene.job) {
        Survive::Exactly(survive) | Survive::UpTo(survive) => Survive::UpTo(survive),
    };
    let on = OnFleet { fleet, costs };
    let found = scene.on_fleet.search_surviving(scene.job, scene.chain, &on, survive)?;
    Ok(found.best.simulated.seconds)
}
