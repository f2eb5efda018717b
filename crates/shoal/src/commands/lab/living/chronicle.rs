//! What the controller's records say of a run's changes: who came and went, which plans came into force, and how long training
//! paused for each.

use serde::Serialize;
use shoal_control::controller::record::{Change, Loss, Record, Why};
use shoal_service::history::Noted;

/// From the last step that one plan did to the next plan's beginning, in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Pause {
    /// Whether a worker was lost; otherwise the change was foreseen, and planned for.
    pub lost: bool,
    /// Until it was known that the plan ends, since the last step was done.
    pub noticed_ms: u64,
    /// Until everyone had stopped, or was known to be dead, and stood at one step.
    pub stopped_ms: u64,
    pub planned_ms: u64,
    pub moved_ms: u64,
}

impl Pause {
    pub fn total_ms(&self) -> u64 {
        self.noticed_ms + self.stopped_ms + self.planned_ms + self.moved_ms
    }
}

#[derive(Default)]
pub struct Chronicle {
    pub joined: usize,
    pub lost: usize,
    pub declined: usize,
    /// Returns to a checkpoint.
    pub restored: usize,
    /// Plans whose state could not be had.
    pub abandoned: usize,
    pub pauses: Vec<Pause>,
    /// When the first plan came into force.
    pub started_ms: Option<u64>,
    /// When each step was counted, by its number.
    pub steps: Vec<(u64, u64)>,
    under_way: Option<UnderWay>,
}

/// A change that has begun.
struct UnderWay {
    lost: bool,
    last_step_ms: u64,
    stopping_ms: u64,
    settled_ms: u64,
    moving_ms: u64,
}

impl Chronicle {
    /// Steps that were done, as last counted.
    pub fn step(&self) -> u64 {
        self.steps.last().map_or(0, |(step, _)| *step)
    }

    pub fn note(&mut self, noted: &Noted) {
        let at_ms = noted.at_ms;
        match &noted.record {
            Record::Joined { .. } => self.joined += 1,
            Record::Lost { how, .. } if *how != Loss::Left => self.lost += 1,
            Record::Job { change, .. } => self.change(at_ms, change),
            _ => {}
        }
    }

    fn change(&mut self, at_ms: u64, change: &Change) {
        match change {
            Change::Committed { step, .. } => {
                self.steps.push((*step, at_ms));
                // Where nobody was lost, training goes on to the end of a step.
                let foreseen = self.under_way.iter_mut().filter(|change| !change.lost);
                foreseen.for_each(|change| change.last_step_ms = at_ms);
            }
            Change::Declined { .. } => self.declined += 1,
            Change::Restored { .. } => self.restored += 1,
            Change::Abandoned { .. } => self.abandoned += 1,
            Change::Stopping { why, .. } => {
                let last_step_ms = self.steps.last().map_or(at_ms, |(_, at)| *at);
                let last_step_ms = last_step_ms.max(self.started_ms.unwrap_or(0));
                let lost = matches!(why, Why::Lost | Why::Stalled);
                let (stopping_ms, settled_ms, moving_ms) = (at_ms, at_ms, at_ms);
                let begun = UnderWay { lost, last_step_ms, stopping_ms, settled_ms, moving_ms };
                self.under_way.get_or_insert(begun);
            }
            Change::Settled => self.under_way.iter_mut().for_each(|change| change.settled_ms = at_ms),
            Change::Moving { .. } => self.under_way.iter_mut().for_each(|change| change.moving_ms = at_ms),
            Change::Started => {
                self.started_ms.get_or_insert(at_ms);
                self.pauses.extend(self.under_way.take().map(|change| change.pause(at_ms)));
            }
            _ => {}
        }
    }
}

impl UnderWay {
    fn pause(&self, started_ms: u64) -> Pause {
        Pause {
            lost: self.lost,
            // Of a change that was foreseen the last step is done after it was begun, and this is nothing.
            noticed_ms: self.stopping_ms.saturating_sub(self.last_step_ms),
            stopped_ms: self.settled_ms.saturating_sub(self.stopping_ms.max(self.last_step_ms)),
            planned_ms: self.moving_ms.saturating_sub(self.settled_ms),
            moved_ms: started_ms.saturating_sub(self.moving_ms),
        }
    }
}
