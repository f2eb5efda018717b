//! Following a job from afar: what its counted steps came to, as they are counted.

use std::time::{Duration, Instant};

use serde_json::Value;
use shoal_service::Error;
use shoal_service::client::{Client, Logs};
use shoal_service::view::JobView;

use crate::error::Result;

/// How long a controller that does not answer is tried again: it may be starting anew.
const AWAY_MAX: Duration = Duration::from_secs(60);
const TRY_EVERY: Duration = Duration::from_millis(500);

/// A job that has nothing more to say by itself.
pub fn is_over(view: &JobView) -> bool {
    matches!(view.state.as_str(), "done" | "cancelled" | "failed" | "paused")
}

/// Shows lines after a step and what becomes of the job, until it is over.
pub fn follow(
    client: &Client,
    job: u64,
    after: u64,
    show: &mut dyn FnMut(&Value),
    tell: &mut dyn FnMut(&JobView),
) -> Result<JobView> {
    let mut ask = |after| patiently(|| client.logs(job, after, true));
    let mut show = |line: &Value| {
        show(line);
        Ok(())
    };
    follow_by(&mut ask, after, &mut show, tell)
}

/// The same for one who asks in a way of its own, and may have enough of it.
pub fn follow_by(
    ask: &mut dyn FnMut(u64) -> Result<Logs>,
    mut after: u64,
    show: &mut dyn FnMut(&Value) -> Result,
    tell: &mut dyn FnMut(&JobView),
) -> Result<JobView> {
    let mut told: Option<(String, Option<String>)> = None;
    loop {
        let Logs { lines, job: view } = ask(after)?;
        for line in &lines {
            after = line["step"].as_u64().unwrap_or(after).max(after);
            show(line)?;
        }
        let now = (view.state.clone(), view.reason.clone());
        if told.as_ref() != Some(&now) {
            tell(&view);
            told = Some(now);
        }
        if lines.is_empty() && is_over(&view) {
            return Ok(view);
        }
        if lines.is_empty() {
            // Something else has happened, or nothing for long: there is no hurry.
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// A question that is asked again while nobody answers.
pub fn patiently<T>(mut ask: impl FnMut() -> shoal_service::Result<T>) -> Result<T> {
    let began = Instant::now();
    loop {
        match ask() {
            Err(Error::Unreachable { .. }) if began.elapsed() < AWAY_MAX => std::thread::sleep(TRY_EVERY),
            answer => return Ok(answer?),
        }
    }
}
