//! `metrics.jsonl`: one line a step. After a restart the lines past the checkpoint are cut off before the
//! steps are done again, so the file reads as if nothing had happened.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{EngineError, Result};
use crate::executor::StepOutcome;

pub const FILE: &str = "metrics.jsonl";

/// One step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Steps completed, this one included.
    pub step: u64,
    pub loss: f64,
    /// Missing where the gradient overflowed and the step was skipped.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub grad_norm: Option<f64>,
    /// What fp16 gradients were multiplied by.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub loss_scale: Option<f32>,
    pub lr: f64,
    /// Targets of this step: tokens, or images.
    pub tokens: u64,
    /// The share of images whose class was predicted rightly, where samples are images.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub accuracy: Option<f64>,
    /// Held-out loss, at the steps that measure it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub eval_loss: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub eval_accuracy: Option<f64>,
    pub step_ms: f64,
    pub tokens_per_s: f64,
    /// Useful operations over the measured matrix rate, by device kind.
    pub mfu: BTreeMap<String, f64>,
    /// Highest bytes counted so far, by device.
    pub memory_bytes: BTreeMap<String, u64>,
    pub plan: String,
    /// Known once the plan was simulated against a profile.
    pub predicted_ms: Option<f64>,
    /// Known where devices have prices.
    pub dollars: Option<f64>,
}

impl StepRecord {
    /// What a step's outcome says of it; what devices, profiles and prices say is to be added.
    pub fn of(
        step: u64,
        outcome: &StepOutcome,
        lr: f64,
        loss_scale: Option<f32>,
        seconds: f64,
        plan: String,
    ) -> StepRecord {
        StepRecord {
            step,
            loss: outcome.loss(),
            grad_norm: (!outcome.overflowed).then_some(outcome.gradient_norm),
            loss_scale,
            lr,
            tokens: outcome.targets,
            accuracy: outcome.accuracy(),
            eval_loss: None,
            eval_accuracy: None,
            step_ms: seconds * 1e3,
            tokens_per_s: outcome.targets as f64 / seconds,
            mfu: BTreeMap::new(),
            memory_bytes: BTreeMap::new(),
            plan,
            predicted_ms: None,
            dollars: None,
        }
    }
}

/// The open file.
pub struct Metrics {
    path: PathBuf,
    file: File,
}

impl Metrics {
    /// Opens the file and cuts it after the line of `step`: what came later will be done again.
    pub fn open(folder: &Path, step: u64) -> Result<Metrics> {
        let path = folder.join(FILE);
        let failed = |source| EngineError::File { path: path.clone(), source };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed)?;
        let keep = kept_bytes(&file, step).map_err(failed)?;
        file.set_len(keep).map_err(failed)?;
        let mut metrics = Metrics { path: path.clone(), file };
        std::io::Seek::seek(&mut metrics.file, std::io::SeekFrom::End(0)).map_err(failed)?;
        Ok(metrics)
    }

    pub fn append(&mut self, record: &StepRecord) -> Result {
        let failed = |source| EngineError::File { path: self.path.clone(), source };
        let mut line = serde_json::to_string(record).map_err(|error| failed(error.into()))?;
        line.push('\n');
        // One write: a reader, or a crash, sees whole lines or none.
        self.file.write_all(line.as_bytes()).map_err(failed)
    }
}

/// Bytes up to the end of the last whole line whose step is at most `step`.
fn kept_bytes(file: &File, step: u64) -> std::io::Result<u64> {
    #[derive(Deserialize)]
    struct Line {
        step: u64,
    }
    let mut reader = BufReader::new(file);
    let (mut kept, mut line) = (0, Vec::new());
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line)?;
        let whole = line.ends_with(b"\n");
        match serde_json::from_slice::<Line>(&line) {
            Ok(parsed) if whole && parsed.step <= step => kept += read as u64,
            _ => return Ok(kept),
        }
    }
}

/// Every record of a run.
pub fn read(folder: &Path) -> Result<Vec<StepRecord>> {
    let path = folder.join(FILE);
    let text =
        std::fs::read_to_string(&path).map_err(|source| EngineError::File { path: path.clone(), source })?;
    let parse = |(number, line): (usize, &str)| {
        serde_json::from_str(line).map_err(|error| EngineError::BadRunFile {
            path: path.clone(),
            what: format!("line {}: {error}", number + 1),
        })
    };
    text.lines().enumerate().map(parse).collect()
}

/// Mean and deviation of recent losses, so that an outlier shows.
#[derive(Default)]
pub struct RecentLosses {
    losses: std::collections::VecDeque<f64>,
}

impl RecentLosses {
    const WINDOW: usize = 128;

    /// How many deviations `loss` lies from the mean of those before it; then it joins them.
    pub fn z_score(&mut self, loss: f64) -> f64 {
        let n = self.losses.len() as f64;
        let mean = self.losses.iter().sum::<f64>() / n.max(1.0);
        let variance = self.losses.iter().map(|loss| (loss - mean).powi(2)).sum::<f64>() / n.max(1.0);
        let score = if n < 2.0 || variance == 0.0 { 0.0 } else { (loss - mean) / variance.sqrt() };
        self.losses.push_back(loss);
        if self.losses.len() > RecentLosses::WINDOW {
            self.losses.pop_front();
        }
        score
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64) -> StepRecord {
        StepRecord {
            step,
            loss: 1.5,
            grad_norm: Some(1.0),
            loss_scale: None,
            lr: 0.1,
            tokens: 10,
            accuracy: None,
            eval_loss: None,
            eval_accuracy: None,
            step_ms: 1.0,
            tokens_per_s: 10.0,
            mfu: Default::default(),
            memory_bytes: Default::default(),
            plan: "p".into(),
            predicted_ms: None,
            dollars: None,
        }
    }

    #[test]
    fn lines_past_the_checkpoint_and_torn_lines_are_cut() {
        let folder = tempfile::tempdir().unwrap();
        let mut metrics = Metrics::open(folder.path(), 0).unwrap();
        (1..=5).for_each(|step| metrics.append(&record(step)).unwrap());
        std::fs::OpenOptions::new()
            .append(true)
            .open(folder.path().join(FILE))
            .unwrap()
            .write_all(b"{\"step\":6,\"lo")
            .unwrap();
        let mut metrics = Metrics::open(folder.path(), 3).unwrap();
        metrics.append(&record(4)).unwrap();
        let steps: Vec<u64> = read(folder.path()).unwrap().iter().map(|record| record.step).collect();
        assert_eq!(steps, [1, 2, 3, 4]);
    }

    #[test]
    fn an_outlier_shows_in_its_score() {
        let mut recent = RecentLosses::default();
        for step in 0..50 {
            assert!(recent.z_score(2.0 + 0.01 * f64::from(step % 2)).abs() < 3.0);
        }
        assert!(recent.z_score(3.0) > 50.0);
    }
}
