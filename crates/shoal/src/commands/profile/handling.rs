//! What messages take of a processor: two processes add up numbers, as workers do with gradients, while others train on all
//! cores. By so much as their steps become longer, computing was lost to copying, adding and sending, to being interrupted, and
//! to caches that hold others' numbers.

use std::time::{Duration, Instant};

use shoal_model::Model;

use super::super::trial::TrialSettings;
use super::links::Pair;
use super::neighbours::{Neighbours, among};
use crate::assemble::LocalDevice;
use crate::error::Result;

/// Steps of each that are measured alone, and for how long at least.
const STEPS: usize = 6;
const LEAST: Duration = Duration::from_millis(800);
/// Rounds by which it is seen how long one takes.
const FIRST_ROUNDS: u64 = 4;
/// Bounds what is added up beside very long steps.
const ROUNDS_MAX: u64 = 5_000;

/// Seconds of computing that a byte takes which is sent or received, by so many who compute; none where it does not show.
pub fn seconds_per_byte(
    pair: &mut Pair,
    computing: usize,
    model: &Model,
    settings: &TrialSettings,
    device: &LocalDevice,
) -> Result<Option<f64>> {
    among(computing, model, settings, device, |others| measure(pair, computing, others))
}

fn measure(pair: &mut Pair, computing: usize, others: &Neighbours) -> Result<Option<f64>> {
    // The first steps of those who train are longer, and so are the first sums.
    others.wait_for(2);
    let began = Instant::now();
    others.wait_for(STEPS);
    std::thread::sleep(LEAST.saturating_sub(began.elapsed()));
    let (alone, lasted) = (others.step_seconds(began, Instant::now()), began.elapsed());
    let began = Instant::now();
    pair.add_up(FIRST_ROUNDS)?;
    let rounds = FIRST_ROUNDS as f64 * lasted.as_secs_f64() / began.elapsed().as_secs_f64();
    let began = Instant::now();
    let bytes = pair.add_up(((1.5 * rounds) as u64 + 1).min(ROUNDS_MAX))?;
    let ended = Instant::now();
    let (Some(alone), Some(beside)) = (alone, others.step_seconds(began, ended)) else { return Ok(None) };
    let lost = (1.0 - alone / beside).max(0.0) * (ended - began).as_secs_f64() * computing as f64;
    Ok((lost > 0.0).then_some(lost / bytes as f64))
}
