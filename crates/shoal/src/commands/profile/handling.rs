//! What messages take of a processor: two processes add up numbers, as workers do with gradients, while others train on all
//! cores. By so much as their steps become longer, computing was lost to copying, adding and sending, to being interrupted, and
//! to caches that hold others' numbers.

use std::time::{Duration, Instant};

use shoal_model::Model;

use super::super::trial::{TrialSettings, median};
use super::links::Pair;
use super::neighbours::{Neighbours, among};
use crate::assemble::LocalDevice;
use crate::error::Result;

/// How often it is measured; the median counts.
const TIMES: usize = 5;
/// Steps of each that are measured alone, and for how long at least.
const STEPS: usize = 3;
const LEAST: Duration = Duration::from_millis(300);
/// How often numbers are added up before it is looked whether that is enough: all of them, so that none is in a cache.
const ROUNDS: u64 = 16;

/// Seconds of computing that a byte takes which is sent or received, by so many who compute; none where it does not show.
pub fn seconds_per_byte(
    pair: &mut Pair,
    computing: usize,
    model: &Model,
    settings: &TrialSettings,
    device: &LocalDevice,
) -> Result<Option<f64>> {
    among(computing, model, settings, device, |others| {
        // The first steps of those who train are longer.
        others.wait_for(2);
        let mut all = Vec::new();
        for _ in 0..TIMES {
            all.extend(measure(pair, computing, others)?);
        }
        Ok((!all.is_empty()).then(|| median(&mut all)).filter(|seconds| *seconds > 0.0))
    })
}

/// Alone, then beside; none where no step lies within either.
fn measure(pair: &mut Pair, computing: usize, others: &Neighbours) -> Result<Option<f64>> {
    let began = Instant::now();
    others.wait_for(STEPS);
    std::thread::sleep(LEAST.saturating_sub(began.elapsed()));
    let alone = others.step_seconds(began, Instant::now());
    // As long as that, and half as long again, since steps are longer now.
    let least = began.elapsed().mul_f64(1.5);
    let (began, mut bytes) = (Instant::now(), 0);
    while began.elapsed() < least {
        bytes += pair.add_up(ROUNDS)?;
    }
    let ended = Instant::now();
    let (Some(alone), Some(beside)) = (alone, others.step_seconds(began, ended)) else { return Ok(None) };
    let lost = (1.0 - alone / beside) * (ended - began).as_secs_f64() * computing as f64;
    Ok(Some(lost / bytes as f64))
}
