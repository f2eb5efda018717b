//! What the controller's records say of a run's changes: who came and went, which plans came into force, and how long training
//! paused for each.

use serde::Serialize;
use shoal_control::controller::record::{Change, Loss, Record, Why};
use shoal_service::history::Noted;

/// From the last step that one plan did until the next plan's steps go on, in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Pause {
    /// Whether a worker was lost; otherwise the change was foreseen, and planned for.
    pub lost: bool,
    /// Whether a plan that was to come was given up on the way.
    pub disturbed: bool,
    /// Until it was known that the plan ends, since the last step was done, or since the plan came into force.
    pub noticed_ms: u64,
    /// Until everyone had stopped, or was known to be dead, and stood at one step.
    pub stopped_ms: u64,
    pub planned_ms: u64,
    pub moved_ms: u64,
    /// What the first step took beyond what steps of the plan are foreseen to take.
    pub began_ms: u64,
}

impl Pause {
    pub fn total_ms(&self) -> u64 {
        self.noticed_ms + self.stopped_ms + self.planned_ms + self.moved_ms + self.began_ms
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
    /// When the plan in force came into force.
    in_force_ms: u64,
    under_way: Option<UnderWay>,
}

/// A change that has begun.
struct UnderWay {
    lost: bool,
    last_step_ms: u64,
    stopping_ms: u64,
    settled_ms: u64,
    moving_ms: u64,
    disturbed: bool,
    /// What a step of the plan that comes is foreseen to take.
    step_ms: u64,
    /// The plan is in force, and its first step is under way.
    started_ms: Option<u64>,
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
                self.end(Some(at_ms));
                // Where nobody was lost, training goes on to the end of a step.
                let foreseen = self.under_way.iter_mut().filter(|change| !change.lost);
                foreseen.for_each(|change| change.last_step_ms = at_ms);
            }
            Change::Declined { .. } => self.declined += 1,
            Change::Restored { .. } => self.restored += 1,
            Change::Abandoned { .. } => {
                self.abandoned += 1;
                self.under_way.iter_mut().for_each(|change| change.disturbed = true);
            }
            Change::Stopping { why, .. } => {
                self.end(None);
                let last_step_ms = self.steps.last().map_or(at_ms, |(_, at)| *at).max(self.in_force_ms);
                let begun = UnderWay {
                    lost: matches!(why, Why::Lost | Why::Stalled),
                    last_step_ms,
                    stopping_ms: at_ms,
                    settled_ms: at_ms,
                    moving_ms: at_ms,
                    disturbed: false,
                    step_ms: 0,
                    started_ms: None,
                };
                self.under_way.get_or_insert(begun);
            }
            Change::Settled => self.under_way.iter_mut().for_each(|change| change.settled_ms = at_ms),
            Change::Moving { plan, .. } => self.under_way.iter_mut().for_each(|change| {
                (change.moving_ms, change.step_ms) = (at_ms, plan.step_ms);
            }),
            Change::Started => {
                self.started_ms.get_or_insert(at_ms);
                self.in_force_ms = at_ms;
                self.under_way.iter_mut().for_each(|change| change.started_ms = Some(at_ms));
            }
            _ => {}
        }
    }

    /// A change is over when the first step that it was made for is done, or when the next one begins.
    fn end(&mut self, first_step_ms: Option<u64>) {
        let over = self.under_way.take_if(|change| change.started_ms.is_some());
        self.pauses.extend(over.map(|change| change.pause(first_step_ms)));
    }
}

impl UnderWay {
    fn pause(&self, first_step_ms: Option<u64>) -> Pause {
        let started_ms = self.started_ms.unwrap_or(self.moving_ms);
        let usual_ms = started_ms + self.step_ms;
        Pause {
            lost: self.lost,
            disturbed: self.disturbed,
            began_ms: first_step_ms.map_or(0, |at_ms| at_ms.saturating_sub(usual_ms)),
            // Of a change that was foreseen the last step is done after it was begun, and this is nothing.
            noticed_ms: self.stopping_ms.saturating_sub(self.last_step_ms),
            stopped_ms: self.settled_ms.saturating_sub(self.stopping_ms.max(self.last_step_ms)),
            planned_ms: self.moving_ms.saturating_sub(self.settled_ms),
            moved_ms: started_ms.saturating_sub(self.moving_ms),
        }
    }
}
