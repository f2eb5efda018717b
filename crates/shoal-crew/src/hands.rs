//! One job on this worker: a thread that does its commands one after the other. What it holds is its own, so nothing here
//! is locked; what takes long is stopped through its brake, and looks at its commands between two steps.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use shoal_control::message::{Epoch, Installation, JobId, Obstacle, Save};
use shoal_control::worker::{EngineCommand, EngineEvent};
use shoal_data::Order;
use shoal_engine::metrics::StepRecord;
use shoal_engine::saving::Room;
use shoal_engine::stepping::Terms;
use shoal_engine::{EngineError, LossScale, StepOutcome};
use shoal_plan::Closing;

use crate::Crewed;
use crate::assembly::Assembled;
use crate::brake::Task;
use crate::error::{CrewError, Result};
use crate::save::Saving;
use crate::share::Share;

/// How often what is being written is looked at while there is nothing else to do.
const SAVING_LOOK: Duration = Duration::from_millis(20);

pub(crate) struct Hands {
    pub(crate) crewed: Arc<Crewed>,
    pub(crate) job: JobId,
    pub(crate) told: Receiver<EngineCommand>,
    pub(crate) task: Arc<Task>,
    /// Its parts, made when they are first needed, and the description that they were made from.
    pub(crate) assembled: Option<Assembled>,
    description: String,
    pub(crate) shares: BTreeMap<Epoch, Share>,
    /// Why steps cannot be done here. Another plan would not help, so none is installed until the job is let go of.
    pub(crate) failed: Option<Obstacle>,
    /// The last step's record, if its held-out loss was due and could not be measured.
    pub(crate) unmeasured: Option<StepRecord>,
    /// What is to be saved when its step is there.
    pub(crate) wanted: Option<(Epoch, Save)>,
    pub(crate) saving: Option<Saving>,
    /// For copies of what is saved.
    pub(crate) room: Room,
}

impl Hands {
    pub(crate) fn new(
        crewed: Arc<Crewed>,
        job: JobId,
        told: Receiver<EngineCommand>,
        task: Arc<Task>,
    ) -> Hands {
        Hands {
            crewed,
            job,
            told,
            task,
            assembled: None,
            description: String::new(),
            shares: BTreeMap::new(),
            failed: None,
            unmeasured: None,
            wanted: None,
            saving: None,
            room: Room::default(),
        }
    }

    /// The thread.
    pub(crate) fn work(mut self) {
        let worked = catch_unwind(AssertUnwindSafe(|| {
            while let Some(command) = self.next() {
                self.obey(command);
            }
        }));
        if let Err(panic) = worked {
            self.note(None, format!("the job's thread ended in a panic: {}", said(&*panic)), true);
        }
    }

    /// The next command, once there is one; looks meanwhile at what is being written.
    fn next(&mut self) -> Option<EngineCommand> {
        while self.saving.is_some() {
            match self.told.recv_timeout(SAVING_LOOK) {
                Ok(command) => return Some(command),
                Err(RecvTimeoutError::Timeout) => self.look_at_saving(),
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
        self.told.recv().ok()
    }

    pub(crate) fn obey(&mut self, command: EngineCommand) {
        match command {
            EngineCommand::Install { epoch, installation } => self.install(epoch, &installation),
            EngineCommand::Run { epoch, steps } => self.run(epoch, steps),
            // Nothing runs: whatever did has said that it ended.
            EngineCommand::Halt { .. } => {}
            EngineCommand::Settle { epoch, step, closing } => self.settle(epoch, step, closing),
            EngineCommand::Save { epoch, save } => {
                self.wanted = Some((epoch, save));
                self.save_if_there();
            }
            EngineCommand::KeepOnly { epochs } => {
                self.shares.retain(|epoch, _| epochs.contains(epoch));
                self.wanted.take_if(|(epoch, _)| !epochs.contains(epoch));
                if epochs.is_empty() {
                    // The device's memory is others' from now on.
                    (self.assembled, self.failed, self.room) = (None, None, Room::default());
                }
            }
        }
    }

    fn install(&mut self, epoch: Epoch, installation: &Installation) {
        if self.shares.contains_key(&epoch) {
            return self.tell(EngineEvent::Installed { epoch });
        }
        if let Some(obstacle) = self.failed.clone() {
            return self.tell(EngineEvent::NotInstalled { epoch, obstacle });
        }
        let brake = self.task.begin(epoch);
        let installed = self.try_install(epoch, installation, &brake);
        self.task.end();
        match installed {
            Ok(share) => {
                self.shares.extend(share.map(|share| (epoch, share)));
                self.tell(EngineEvent::Installed { epoch });
            }
            // It was let go of: nobody waits for it.
            Err(_) if brake.is_pulled() => {}
            Err(error) => {
                self.note(Some(epoch), format!("the new plan's state could not be had: {error}"), false);
                self.tell(EngineEvent::NotInstalled { epoch, obstacle: error.obstacle() });
            }
        }
    }

    /// Applies what a step that was cut short still owes, by sums that everyone agreed on.
    fn settle(&mut self, epoch: Epoch, step: u64, closing: Closing) {
        let Some(share) = self.shares.get_mut(&epoch) else {
            return self.note(Some(epoch), "what is to be settled is not here".to_owned(), true);
        };
        let settled = match share.executor() {
            Some(executor) => executor
                .settle(step, Some(closing))
                .and_then(|()| executor.standing())
                .map_err(CrewError::from),
            None => Err(CrewError::NotHeld { epoch: epoch.0, step, what: "it waits in host memory".into() }),
        };
        match settled {
            Ok(standing) => {
                self.complete_by(epoch, &closing);
                self.tell(EngineEvent::Settled { epoch, standing });
                self.save_if_there();
            }
            Err(error) => self.note(Some(epoch), format!("a step could not be settled: {error}"), true),
        }
    }

    /// Counts a step that is known by its closing sums, if it is the next one, and tells what came of it.
    pub(crate) fn complete_by(&mut self, epoch: Epoch, closing: &Closing) {
        let (Some(share), Some(assembled)) = (self.shares.get_mut(&epoch), &self.assembled) else { return };
        let order = order_of(assembled);
        let (terms, scale) = (terms_of(assembled, &order), share.loss_scale);
        let Some((outcome, record)) = share.complete_by(&assembled.chain, &terms, closing) else { return };
        let step = record.step;
        self.tell_record(epoch, Some(record));
        self.tell_dead_end(epoch, not_finite(step, &outcome, scale).as_ref());
    }

    /// Tells if an error is one that everyone would meet.
    pub(crate) fn tell_dead_end(&self, epoch: Epoch, error: Option<&CrewError>) {
        if let Some(reason) = error.and_then(CrewError::dead_end) {
            self.tell(EngineEvent::DeadEnd { epoch, reason });
        }
    }

    /// Makes the job's parts, if they are not made.
    pub(crate) fn assemble(&mut self, description: &str) -> Result {
        if self.assembled.is_none() || self.description != description {
            let assembled = (self.crewed.setup.assemble)(description).map_err(CrewError::Assembly)?;
            (self.assembled, self.description) = (Some(assembled), description.to_owned());
        }
        Ok(())
    }

    pub(crate) fn assembled(&self) -> Result<&Assembled> {
        self.assembled.as_ref().ok_or(CrewError::Stopped)
    }

    pub(crate) fn tell(&self, event: EngineEvent) {
        self.crewed.tell(self.job, event);
    }

    pub(crate) fn note(&self, epoch: Option<Epoch>, sentence: String, fatal: bool) {
        self.crewed.note(self.job, epoch, sentence, fatal);
    }
}

pub(crate) fn order_of(assembled: &Assembled) -> Order {
    Order::new(assembled.data.len(), assembled.seed, assembled.shuffle)
}

pub(crate) fn terms_of<'a>(assembled: &'a Assembled, order: &'a Order) -> Terms<'a> {
    Terms {
        steps: assembled.steps,
        seed: assembled.seed,
        optimizer: &assembled.optimizer,
        schedule: &assembled.schedule,
        data: &assembled.data,
        order,
    }
}

/// What stepping says of a step whose sums no run goes on from: they are no numbers, and no scale of the loss explains it.
fn not_finite(step: u64, outcome: &StepOutcome, scale: Option<LossScale>) -> Option<CrewError> {
    let can_fall = scale.is_some_and(|scale| scale.can_fall());
    let (what, value) = match outcome.loss() {
        loss if !loss.is_finite() => ("loss", loss),
        _ if outcome.overflowed && !can_fall => ("norm of the gradient", outcome.gradient_norm),
        _ => return None,
    };
    Some(EngineError::NotFinite { step, what, value, checkpoint: None }.into())
}

fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("nobody knows why")
}
