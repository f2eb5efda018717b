//! This worker's part of a checkpoint. Slices are copied when they are at the checkpoint's step, and written from the copy
//! while training goes on; if the host has no room for a copy, they are written where they lie, and training waits.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use shoal_control::message::{Save, Saved, WorkerId};
use shoal_control::worker::EngineEvent;
use shoal_engine::EngineError;
use shoal_engine::run::RNG;
use shoal_engine::state::PARAMETER;
use shoal_kernels::{Device, Tensor};
use shoal_plan::{Plan, Slice};
use shoal_state::checkpoint::{Header, Slice as SavedSlice, Store};

use crate::error::{CrewError, Result, lacks_room};
use crate::hands::Hands;
use crate::share::Share;

/// The number that a store knows a controller's checkpoint by. Stores give out numbers from two on.
pub fn save_number(checkpoint: u64) -> u64 {
    checkpoint + 1
}

/// A thread that writes.
pub(crate) struct Writer(JoinHandle<()>);

impl Drop for Hands {
    fn drop(&mut self) {
        self.wait_for_writer();
    }
}

/// What this worker writes of a plan's state: slices with their tensors' numbers, and their places in the share.
fn own_slices(plan: &Plan, share: &Share, save: &Save, own: WorkerId) -> Vec<(usize, usize, Slice)> {
    let holders = plan.holders();
    let writes = |devices: &Vec<usize>| {
        let entry = holders.iter().position(|entry| entry == devices);
        entry.and_then(|entry| save.writers.get(entry)) == Some(&own)
    };
    let mut slices = Vec::new();
    for (tensor, row) in plan.tensors.iter().enumerate() {
        let here = share.slices(tensor);
        for (slice, _) in row.slices().into_iter().filter(|(_, devices)| writes(devices)) {
            let has = |held: &Slice| held.start <= slice.start && slice.end <= held.end;
            slices.extend(here.iter().position(has).map(|place| (tensor, place, slice)));
        }
    }
    slices
}

impl Hands {
    /// Writes what is wanted if it is there, says that it came too late if it was, and waits otherwise.
    pub(crate) fn save_if_there(&mut self) {
        let Some((epoch, save)) = &self.wanted else { return };
        let Some(share) = self.shares.get(epoch) else { return };
        let (id, step) = (save.checkpoint.id, save.checkpoint.step);
        if share.step < step {
            return;
        }
        let (epoch, save) = self.wanted.take().expect("it was looked at");
        let began = Instant::now();
        self.wait_for_writer();
        let begun = match self.shares[&epoch].is_at(step) {
            true => self.begin_save(&self.shares[&epoch], &save, began),
            false => Err(CrewError::NotHeld { epoch: epoch.0, step, what: "its state is past that".into() }),
        };
        match begun {
            Ok(writer) => self.writer = writer,
            Err(error) => {
                self.note(Some(epoch), format!("the checkpoint of step {step} lacks a part: {error}"), false);
                self.tell(EngineEvent::Saved(saved(id, false, began)));
            }
        }
    }

    fn wait_for_writer(&mut self) {
        if let Some(Writer(thread)) = self.writer.take() {
            // A thread that panicked has said so, and its part is absent.
            let _ = thread.join();
        }
    }

    /// Copies this worker's part and has it written, or writes it.
    fn begin_save(&self, share: &Share, save: &Save, began: Instant) -> Result<Option<Writer>> {
        let assembled = self.assembled()?;
        let store = assembled.store.clone().ok_or(CrewError::NoStore)?;
        let own = share.peers.workers[share.peers.rank];
        let mut writers = save.writers.clone();
        writers.sort_unstable();
        writers.dedup();
        let part = writers.iter().position(|writer| *writer == own).ok_or(CrewError::Stranger)?;
        let part = Part {
            header: self.header(share, save.checkpoint.step)?,
            number: save_number(save.checkpoint.id),
            part: part + 1,
            of: writers.len(),
            slices: self.named_slices(share, save, own)?,
        };
        let id = save.checkpoint.id;
        match copies(share, &part, &assembled.tiers.host) {
            Ok(copies) => {
                let (crewed, job) = (self.crewed.clone(), self.job);
                // What is left goes on beside training.
                let told = saved(id, true, began);
                let write = move || {
                    let written = part.write(&store, |place| Ok(Cow::Borrowed(copies[place].floats())));
                    if let Err(error) = &written {
                        crewed.note(
                            job,
                            None,
                            format!("a part of a checkpoint was not written: {error}"),
                            false,
                        );
                    }
                    crewed.tell(job, EngineEvent::Saved(Saved { done: written.is_ok(), ..told }));
                };
                let named = std::thread::Builder::new().name(format!("save of job {}", job.0));
                let started = named.spawn(write).map_err(|source| EngineError::Thread { source })?;
                Ok(Some(Writer(started)))
            }
            Err(CrewError::Engine(error)) if lacks_room(&error) => {
                part.write(&store, |place| part.read(share, place))?;
                self.tell(EngineEvent::Saved(saved(id, true, began)));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

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

    fn named_slices(&self, share: &Share, save: &Save, own: WorkerId) -> Result<Vec<Named>> {
        let assembled = self.assembled()?;
        let roles: Vec<&'static str> =
            std::iter::once(PARAMETER).chain(assembled.optimizer.state_names().iter().copied()).collect();
        let mut named = Vec::new();
        for (tensor, place, slice) in own_slices(&share.plan, share, save, own) {
            let spec = &assembled.chain.tensors[tensor];
            for (part, role) in roles.iter().enumerate() {
                let (name, shape) = (spec.name.clone(), spec.shape.clone());
                named.push(Named { name, shape, role, tensor, place, part, slice });
            }
        }
        Ok(named)
    }
}

/// What became of a part, and how long training was held up for it.
fn saved(id: u64, done: bool, began: Instant) -> Saved {
    Saved { id, done, cost_ms: began.elapsed().as_millis() as u64 }
}

/// A slice in one role, as it is found here and as checkpoints call it.
struct Named {
    name: String,
    shape: Vec<usize>,
    role: &'static str,
    tensor: usize,
    place: usize,
    part: usize,
    slice: Slice,
}

struct Part {
    header: Header,
    number: u64,
    part: usize,
    of: usize,
    slices: Vec<Named>,
}

impl Part {
    fn read<'a>(&self, share: &'a Share, place: usize) -> Result<Cow<'a, [f32]>> {
        let Named { tensor, place, part, slice, .. } = &self.slices[place];
        let first = share.slices(*tensor)[*place].start;
        let within = slice.start - first..slice.end - first;
        Ok(match share.read(*tensor, *place, *part)? {
            Cow::Borrowed(values) => Cow::Borrowed(&values[within]),
            Cow::Owned(values) => Cow::Owned(values[within].to_vec()),
        })
    }

    fn write<'d>(&self, store: &Store, mut data: impl FnMut(usize) -> Result<Cow<'d, [f32]>>) -> Result {
        let slices: Vec<SavedSlice<'_>> = self
            .slices
            .iter()
            .map(|named| SavedSlice {
                name: &named.name,
                role: named.role,
                shape: &named.shape,
                range: named.slice.range(),
            })
            .collect();
        let begun = store.begin_part(self.header.clone(), self.number, self.part, self.of);
        let begun = begun.map_err(EngineError::from)?;
        begun.write(&slices, |place| data(place))?;
        Ok(())
    }
}

/// The part's slices once more, in the host's memory.
fn copies(share: &Share, part: &Part, host: &Arc<impl Device>) -> Result<Vec<Tensor>> {
    let copy = |place: usize| -> Result<Tensor> {
        let values = part.read(share, place)?;
        Ok(Tensor::from_floats(host.arena(), "a checkpoint's copy", &values).map_err(EngineError::from)?)
    };
    (0..part.slices.len()).map(copy).collect()
}
