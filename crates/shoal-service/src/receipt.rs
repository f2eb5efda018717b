//! What the API says of where a job's time and money went: the controller's bill in the units that people read. The names
//! of the parts are those of `shoal simulate --trace`.

use serde::{Deserialize, Serialize};
use shoal_control::controller::receipt::Amount;
use shoal_control::message::JobId;

use crate::driver::Sight;
use crate::view::phase_name;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiptView {
    pub job: u64,
    pub name: String,
    pub state: String,
    /// Of all workers together, while they had something of the job.
    pub device_seconds: f64,
    pub dollars: f64,
    /// Where they went: together all of it.
    pub parts: Vec<PartView>,
    /// Steps that were counted, those that a return to a checkpoint undid among them.
    pub steps: u64,
    /// What these steps took on average, and were to take by their plans.
    pub step_ms: Option<f64>,
    pub predicted_step_ms: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PartView {
    /// useful, recompute, bubble, wait, checkpoint, morph or lost.
    pub part: String,
    pub device_seconds: f64,
    /// Of the device-seconds.
    pub share: f64,
    pub dollars: f64,
}

/// Until now.
pub fn receipt(sight: Sight, id: JobId) -> Option<ReceiptView> {
    let (job, bill) = (sight.state.jobs.get(&id)?, (sight.bill)(id)?);
    let whole = seconds(bill.whole);
    let parts = bill.parts.named().map(|(name, amount)| PartView {
        part: name.to_owned(),
        device_seconds: seconds(amount),
        share: seconds(amount) / whole.max(f64::MIN_POSITIVE),
        dollars: dollars(amount),
    });
    let mean = |ms: u64| (job.counted > 0).then(|| ms as f64 / job.counted as f64);
    Some(ReceiptView {
        job: id.0,
        name: job.spec.name.clone(),
        state: phase_name(&job.phase).to_owned(),
        device_seconds: whole,
        dollars: dollars(bill.whole),
        parts: parts.into(),
        steps: job.counted,
        step_ms: mean(bill.steps_ms),
        predicted_step_ms: mean(bill.foreseen_ms),
    })
}

fn seconds(amount: Amount) -> f64 {
    amount.worker_ms as f64 / 1e3
}

fn dollars(amount: Amount) -> f64 {
    amount.nanodollars as f64 / 1e9
}
