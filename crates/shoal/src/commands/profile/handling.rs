//! What messages take of a processor: two processes add up numbers, as workers do with gradients, while others train on all
//! cores. By so much as their steps become longer, computing was lost to copying, adding and sending, to being interrupted, and
//! to caches that hold others' numbers. And by so much as the sums of few numbers take longer than the network does, messages wait
//! for those who compute.

use std::time::{Duration, Instant};

use shoal_model::Model;

use super::super::trial::{TrialSettings, median};
use super::links::{Pair, SUMMED, USUAL_NETWORK};
use super::neighbours::{Neighbours, Steps, among};
use crate::assemble::LocalDevice;
use crate::error::Result;

/// How often it is measured; the median counts.
const TIMES: usize = 5;
/// Steps of each that are measured alone, and for how long at least.
const STEPS: usize = 3;
const LEAST: Duration = Duration::from_millis(300);
/// How often numbers are added up before it is looked whether that is enough: all of them, so that none is in a cache.
const ROUNDS: u64 = 16;

/// Numbers whose sums take next to no time on the way, and are messages like any other: those of less go by other means.
const FEW: usize = 1 << 16;
/// Messages that follow each other where two add up numbers: one to add up, one to share the sum.
const MESSAGES: f64 = 2.0;

/// Of computing, what a byte takes which is sent or received, by so many who compute, and for how long a message waits; none
/// where it does not show.
#[derive(Default)]
pub struct Handling {
    pub seconds_per_byte: Option<f64>,
    pub seconds_per_message: Option<f64>,
}

pub fn measure(
    pair: &mut Pair,
    computing: usize,
    model: &Model,
    settings: &TrialSettings,
    device: &LocalDevice,
) -> Result<Handling> {
    among(computing, Steps::Unasked, model, settings, device, |others| {
        // The first steps of those who train are longer.
        others.wait_for(2);
        let (mut lost, mut waited) = (Vec::new(), Vec::new());
        for _ in 0..TIMES {
            lost.extend(lost_by_byte(pair, computing, others)?);
            waited.push(waited_by_message(pair)?);
        }
        let shown =
            |mut all: Vec<f64>| (!all.is_empty()).then(|| median(&mut all)).filter(|seconds| *seconds > 0.0);
        Ok(Handling { seconds_per_byte: shown(lost), seconds_per_message: shown(waited) })
    })
}

fn waited_by_message(pair: &mut Pair) -> Result<f64> {
    let began = Instant::now();
    pair.add_up(FEW, ROUNDS)?;
    let each = began.elapsed().as_secs_f64() / ROUNDS as f64;
    let rate = USUAL_NETWORK.bytes_per_s.unwrap_or(f64::INFINITY);
    let on_its_way = (FEW * size_of::<f32>()) as f64 / rate;
    Ok((each - on_its_way) / MESSAGES - USUAL_NETWORK.latency.as_secs_f64())
}

/// Alone, then beside; none where no step lies within either.
fn lost_by_byte(pair: &mut Pair, computing: usize, others: &Neighbours) -> Result<Option<f64>> {
    let began = Instant::now();
    others.wait_for(STEPS);
    std::thread::sleep(LEAST.saturating_sub(began.elapsed()));
    let alone = others.step_seconds(began, Instant::now());
    // As long as that, and half as long again, since steps are longer now.
    let least = began.elapsed().mul_f64(1.5);
    let (began, mut bytes) = (Instant::now(), 0);
    while began.elapsed() < least {
        bytes += pair.add_up(SUMMED, ROUNDS)?;
    }
    let ended = Instant::now();
    let (Some(alone), Some(beside)) = (alone, others.step_seconds(began, ended)) else { return Ok(None) };
    let lost = (1.0 - alone / beside) * (ended - began).as_secs_f64() * computing as f64;
    Ok(Some(lost / bytes as f64))
}
