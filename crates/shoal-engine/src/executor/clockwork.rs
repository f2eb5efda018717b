//! When instructions happen: how long they are made to last, where a device is played by another, and when they did.

use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};
use shoal_plan::Instruction;

/// When an instruction was under way, in seconds of the machine's clock.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Traced {
    /// The instruction's number in its program.
    pub id: u32,
    pub start: f64,
    pub end: f64,
}

/// A pause after which the next instruction no longer follows directly on the last.
const FOLLOWS: Duration = Duration::from_micros(400);
/// Sleeping may take this much longer than asked: the rest is waited for awake.
const OVERSLEEP: Duration = Duration::from_micros(120);

#[derive(Default)]
pub(super) struct Clockwork {
    /// How long each of a training program's instructions lasts, by its number, where that is not up to the device.
    pub(super) pace: Option<Vec<Duration>>,
    /// When the last instruction that was held up was to end.
    last_end: Option<Instant>,
    pub(super) traces: bool,
    pub(super) traced: Vec<Traced>,
}

impl Clockwork {
    /// How long an instruction is to last.
    pub(super) fn duration(&self, instruction: &Instruction, training: bool) -> Option<Duration> {
        let pace = self.pace.as_ref().filter(|_| training)?;
        pace.get(instruction.id as usize).copied()
    }

    /// Waits until instructions that began then have lasted as long as they are to. What one was late by is taken off the
    /// next, so that delays do not add up.
    pub(super) fn hold(&mut self, began: Instant, instructions: &[Instruction], training: bool) {
        if self.pace.is_none() || !training {
            return;
        }
        let lasts: Duration = instructions.iter().filter_map(|next| self.duration(next, training)).sum();
        let follows = self.last_end.filter(|end| began.saturating_duration_since(*end) < FOLLOWS);
        let end = follows.unwrap_or(began) + lasts;
        wait_until(end);
        self.last_end = Some(end);
    }

    pub(super) fn note(&mut self, id: u32, start: Instant, end: Instant) {
        if self.traces {
            let (start, end) = (seconds(start), seconds(end));
            self.traced.push(Traced { id, start, end });
        }
    }
}

/// Waits until then.
pub(super) fn wait_until(end: Instant) {
    let left = end.saturating_duration_since(Instant::now());
    std::thread::sleep(left.saturating_sub(OVERSLEEP));
    while Instant::now() < end {
        std::thread::yield_now();
    }
}

/// A moment by the machine's clock, which all its processes share.
fn seconds(moment: Instant) -> f64 {
    let ago = moment.elapsed();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(ago).as_secs_f64()
}
