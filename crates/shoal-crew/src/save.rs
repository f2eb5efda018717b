//! This worker's part of a checkpoint, by whom the controller named for it. Slices are copied when they are at the
//! checkpoint's step and written from the copy while training goes on, as [`shoal_engine::saving`] does it for any run.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use shoal_control::message::{Epoch, Save, Saved, WorkerId};
use shoal_control::worker::EngineEvent;
use shoal_engine::EngineError;
use shoal_engine::run::RNG;
use shoal_engine::saving::{Holding, Part, Saver, Share as Written};
use shoal_kernels::CpuDevice;
use shoal_plan::Plan;
use shoal_state::checkpoint::Header;

use crate::error::{CrewError, Result};
use crate::hands::Hands;
use crate::share::Share;

/// The number that a store knows a controller's checkpoint by. Stores give out numbers from two on.
pub fn save_number(checkpoint: u64) -> u64 {
    checkpoint + 1
}

/// The other way.
pub fn checkpoint_of(save_number: u64) -> u64 {
    save_number.saturating_sub(1)
}

/// A part that is being written.
pub(crate) struct Saving {
    id: u64,
    saver: Saver,
    /// How long training was held up for it.
    cost_ms: u64,
}

impl Drop for Hands {
    fn drop(&mut self) {
        self.end_saving();
    }
}

impl Hands {
    /// Whether a checkpoint is wanted of a step that has been done.
    pub(crate) fn saves_now(&self) -> bool {
        let wanted = self.wanted.as_ref();
        wanted.is_some_and(|(epoch, save)| {
            self.shares.get(epoch).is_some_and(|share| share.step >= save.checkpoint.step)
        })
    }

    /// Writes what is wanted if it is there, says that it came too late if it was, and waits otherwise.
    pub(crate) fn save_if_there(&mut self) {
        self.look_at_saving();
        if !self.saves_now() {
            return;
        }
        let (epoch, save) = self.wanted.take().expect("it was looked at");
        let step = save.checkpoint.step;
        let began = Instant::now();
        self.end_saving();
        let begun = match self.shares[&epoch].is_at(step) {
            true => self.begin_save(epoch, &save),
            false => Err(CrewError::NotHeld { epoch: epoch.0, step, what: "its state is past that".into() }),
        };
        let (id, cost_ms) = (save.checkpoint.id, began.elapsed().as_millis() as u64);
        match begun {
            Ok(saver) => {
                self.saving = Some(Saving { id, saver, cost_ms });
                self.look_at_saving();
            }
            Err(error) => {
                self.note(Some(epoch), format!("the checkpoint of step {step} lacks a part: {error}"), false);
                self.tell_dead_end(epoch, Some(&error));
                self.tell(EngineEvent::Saved(Saved { id, done: false, cost_ms }));
            }
        }
    }

    /// Says so if what was being written is.
    pub(crate) fn look_at_saving(&mut self) {
        let Some(Saving { saver, .. }) = &mut self.saving else { return };
        let looked = saver.settle(false);
        if looked.is_err() || !saver.is_under_way() {
            self.tell_saved(looked);
        }
    }

    /// Waits for what is being written, and says what became of it.
    fn end_saving(&mut self) {
        let Some(Saving { saver, .. }) = &mut self.saving else { return };
        let written = saver.settle(true);
        self.tell_saved(written);
    }

    fn tell_saved(&mut self, written: shoal_engine::error::Result) {
        let Some(Saving { id, saver, cost_ms }) = self.saving.take() else { return };
        self.room = saver.into_room();
        if let Err(error) = &written {
            self.note(None, format!("a part of a checkpoint was not written: {error}"), false);
        }
        self.tell(EngineEvent::Saved(Saved { id, done: written.is_ok(), cost_ms }));
    }

    /// Copies this worker's part and has it written; where there is no room for a copy, writes it.
    fn begin_save(&mut self, epoch: Epoch, save: &Save) -> Result<Saver> {
        let room = std::mem::take(&mut self.room);
        let (share, assembled) = (&self.shares[&epoch], self.assembled()?);
        let store = assembled.store.clone().ok_or(CrewError::NoStore)?;
        let own = share.peers.workers[share.peers.rank];
        let part = part_of(&share.plan, share.peers.rank, save, own);
        let (chain, states) = (Arc::new(assembled.chain.clone()), assembled.optimizer.state_names());
        let mut saver = Saver::of(store, chain, states, part).with_room(room);
        let held = Readable { share, host: &assembled.tiers.host };
        let prepared = saver.prepare(&held, false)?;
        if let Some(value) = prepared.unfit {
            let (step, what) = (save.checkpoint.step, "value of a parameter");
            let value = f64::from(value);
            return Err(EngineError::NotFinite { step, what, value, checkpoint: None }.into());
        }
        saver.begin(&held, self.header(share, save.checkpoint.step)?, save_number(save.checkpoint.id))?;
        Ok(saver)
    }

    /// The same for all parts.
    fn header(&self, share: &Share, step: u64) -> Result<Header> {
        let assembled = self.assembled()?;
        let mut extra = BTreeMap::new();
        if let Some(scale) = &share.loss_scale {
            scale.save(&mut extra);
        }
        Ok(Header {
            job: assembled.fingerprint.clone(),
            step,
            position: step * share.plan.global_batch as u64,
            seed: assembled.seed,
            rng: RNG.into(),
            plan: share.plan_id.clone(),
            extra,
        })
    }
}

/// What a worker writes of a plan's state: the slices of those sets of holders that it was named for.
fn part_of(plan: &Plan, rank: usize, save: &Save, own: WorkerId) -> Option<Part> {
    let mut writers = save.writers.clone();
    writers.sort_unstable();
    writers.dedup();
    let number = writers.iter().position(|writer| *writer == own)? + 1;
    let sets = plan.holders();
    let writes = |devices: &Vec<usize>| {
        let set = sets.iter().position(|set| set == devices);
        set.and_then(|set| save.writers.get(set)) == Some(&own)
    };
    let mut shares = Vec::new();
    for (tensor, row) in plan.tensors.iter().enumerate() {
        for (slice, _) in row.slices().into_iter().filter(|(_, devices)| writes(devices)) {
            let here = row.optimizer.iter().find(|held| held.slice == slice && held.holder.device() == rank);
            shares.extend(here.map(|held| Written { tensor, slice, holder: held.holder }));
        }
    }
    Some(Part { number, of: writers.len(), shares })
}

/// A share as parts are read from it, wherever it lies.
struct Readable<'a> {
    share: &'a Share,
    host: &'a CpuDevice,
}

impl Holding for Readable<'_> {
    fn read(&self, written: &Written, role: usize) -> shoal_engine::error::Result<Cow<'_, [f32]>> {
        self.share.read_slice(written.tensor, written.slice, role)
    }

    fn host(&self) -> &CpuDevice {
        self.host
    }
}
