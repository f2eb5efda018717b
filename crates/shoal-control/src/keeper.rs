//! Controller and log together. This is the one way to run a controller: records are on the disk before the actions that
//! rest on them come out.

use crate::bug::Bug;
use crate::controller::receipt::Bill;
use crate::controller::state::State;
use crate::controller::{Controller, Event, Step};
use crate::disk::Disk;
use crate::log::{Log, LogError, Opened};
use crate::message::JobId;
use crate::settings::Settings;

/// The log begins anew after this much.
pub const LOG_BYTES_MAX: u64 = 1 << 22;

pub struct Keeper<D> {
    controller: Controller,
    log: Log<D>,
    log_bytes_max: u64,
    bug: Option<Bug>,
}

impl<D: Disk> Keeper<D> {
    /// Goes on from what the disk has, and gives what is to be done first.
    pub fn open(settings: Settings, disk: D, now_ms: u64) -> Result<(Keeper<D>, Step, Opened), LogError> {
        Keeper::open_with(settings, disk, now_ms, LOG_BYTES_MAX, None)
    }

    /// For the drill.
    #[doc(hidden)]
    pub fn open_with(
        settings: Settings,
        disk: D,
        now_ms: u64,
        log_bytes_max: u64,
        bug: Option<Bug>,
    ) -> Result<(Keeper<D>, Step, Opened), LogError> {
        let (log, state, opened) = Log::open(disk, bug)?;
        let mut controller = Controller::new(settings, state);
        controller.plant(bug);
        let mut keeper = Keeper { controller, log, log_bytes_max, bug };
        let step = keeper.step(now_ms, Event::Started)?;
        Ok((keeper, step, opened))
    }

    pub fn state(&self) -> &State {
        self.controller.state()
    }

    /// Where the time of a job's workers went until now.
    pub fn bill(&self, job: JobId, now_ms: u64) -> Option<Bill> {
        self.controller.bill(job, now_ms)
    }

    /// Of the log since it was last begun anew.
    pub fn log_bytes(&self) -> u64 {
        self.log.bytes()
    }

    /// Takes in an event, and gives what may now be done and told. After an error nothing more may be done with it: what is
    /// on the disk is for the next to find out.
    pub fn step(&mut self, now_ms: u64, event: Event) -> Result<Step, LogError> {
        self.step_all(now_ms, [event])
    }

    /// Likewise with all events that have come meanwhile, whose records reach the disk at once: with many workers, waiting
    /// for the disk once an event would be most of what a controller does.
    pub fn step_all(
        &mut self,
        now_ms: u64,
        events: impl IntoIterator<Item = Event>,
    ) -> Result<Step, LogError> {
        let mut all = Step::default();
        for event in events {
            let step = self.controller.step(now_ms, event);
            all.records.extend(step.records);
            all.actions.extend(step.actions);
            if let Some(misfit) = step.misfit {
                return Err(LogError::Undecided(misfit));
            }
        }
        if !all.records.is_empty() {
            self.log.append(&all.records)?;
            if self.bug != Some(Bug::SayBeforeSync) {
                self.log.sync()?;
            }
        }
        if self.log.bytes() > self.log_bytes_max {
            self.log.snapshot(self.controller.state())?;
        }
        Ok(all)
    }

    /// For one who plays crashes.
    #[doc(hidden)]
    pub fn disk_mut(&mut self) -> &mut D {
        self.log.disk_mut()
    }

    /// For one who plays crashes.
    #[doc(hidden)]
    pub fn into_disk(self) -> D {
        self.log.into_disk()
    }
}
