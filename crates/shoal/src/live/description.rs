//! A job as it travels from the command to the controller and on to workers: its file's text, with what the command line
//! changed, and where the file lies, since paths in it are relative to that. What the paths name does not travel: data and
//! models have to be there on every machine, and checkpoints go to a place that all of them share.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shoal_control::controller::state::{Class, Interval, JobSpec};
use shoal_engine::Interval as Asked;

use super::within::Within;
use crate::error::{CliError, Result};
use crate::job::Job;

/// More than any fleet has: a job takes what helps it.
const WORKERS_MAX: usize = 10_000;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The whole path.
    file: PathBuf,
    text: String,
}

impl Description {
    pub fn read(file: &Path, set: &[String]) -> Result<Description> {
        let text = Job::text(file, set)?;
        let file = std::path::absolute(file).map_err(CliError::at(file))?;
        Ok(Description { file, text })
    }

    pub fn parse(text: &str) -> Result<Description> {
        let wrong = |error: serde_json::Error| {
            let hint = "submit jobs with `shoal train JOB.toml --controller URL`";
            CliError::said(format!("the job's description cannot be read: {error}"), hint)
        };
        serde_json::from_str(text).map_err(wrong)
    }

    pub fn to_text(&self) -> String {
        serde_json::to_string(self).expect("a description is JSON")
    }

    /// Nothing is read that lies elsewhere than jobs' files may.
    pub fn job(&self, within: &Within) -> Result<Job> {
        within.check(&self.file, &self.text)?;
        Job::parse(&self.file, &self.text)
    }

    /// The same for a job that begins: what a fleet cannot do is refused.
    pub fn new_job(&self, within: &Within) -> Result<Job> {
        let job = self.job(within)?;
        if let Some((_, Asked::Time(_))) = job.eval {
            let hint = "write it in steps, \"200 steps\": members of a fleet go by steps, not by clocks";
            return Err(CliError::said("eval.every is a time", hint));
        }
        Ok(job)
    }

    /// What the controller is told of it.
    pub fn spec(&self, job: &Job, class: Class, priority: i32) -> JobSpec {
        JobSpec {
            name: job.name.clone(),
            class,
            priority,
            steps: job.steps,
            workers_min: 1,
            workers_max: WORKERS_MAX,
            checkpoint_every: match job.checkpoint_every {
                Asked::Steps(steps) => Interval::Steps(steps),
                // The controller counts steps, and knows best what saving costs on its fleet.
                // And no job asks for no checkpoints: only a fleet in a box is told so.
                Asked::Time(_) | Asked::Auto | Asked::Never => Interval::Auto,
            },
            checkpoints_kept: job.checkpoints_kept,
            description: self.to_text(),
        }
    }
}

/// How often held-out loss is measured, by steps alone.
pub fn eval_every_steps(job: &Job) -> u64 {
    match job.eval {
        Some((_, Asked::Steps(steps))) => steps,
        _ => u64::MAX,
    }
}
