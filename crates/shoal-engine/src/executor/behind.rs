//! Updates in host memory and on disks: they wait in a line, one for each memory, and follow each other there on a thread
//! of their own. A step may end while some are under way. The next one then runs beside them; what touches a tensor of
//! theirs waits until its update has landed, and nothing else does. Everyone who reads the state between steps catches up
//! first.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use shoal_plan::{Instruction, Tier};

use super::clockwork::wait_until;
use super::moves::Land;
use super::settle::Progress;
use super::step::Step;
use super::updates::{Terms, Updates};
use super::{Executor, Gate};
use crate::error::{EngineError, Result};
use crate::lanes::Line;

/// How something ended that was under way elsewhere, and when.
pub(super) struct Ended {
    /// The number of the program's run that it is of, and its place there.
    pub(super) run: u64,
    pub(super) place: usize,
    pub(super) id: u32,
    pub(super) ending: Ending,
    pub(super) start: Instant,
    pub(super) end: Instant,
}

/// What is left to do here, or what it panicked with.
pub(super) enum Ending {
    /// Of something that lands in its own step.
    Moved(std::thread::Result<Land>),
    Updated {
        tensor: usize,
        terms: Terms,
        updates: std::thread::Result<Updates>,
    },
}

/// What is under way elsewhere.
pub(super) struct Behind {
    pub(super) ends: Sender<Ended>,
    /// Only its owner receives; the lock lets others read what else an executor has.
    ended: Mutex<Receiver<Ended>>,
    host: Line,
    disk: Line,
    /// The run and the tensor of each update that has not landed.
    updates: Vec<(u64, usize)>,
    /// The step before, where an update of it failed while the next was under way.
    owed: Option<Progress>,
    /// Why it did, until someone is told.
    unsaid: Option<EngineError>,
}

impl Default for Behind {
    fn default() -> Behind {
        let (ends, ended) = channel();
        let (host, disk) = (Line::default(), Line::default());
        Behind { ends, ended: Mutex::new(ended), host, disk, updates: Vec::new(), owed: None, unsaid: None }
    }
}

impl Behind {
    /// Tensors whose updates have not landed, once for each update.
    pub(super) fn tensors(&self) -> Vec<usize> {
        self.updates.iter().map(|(_, tensor)| *tensor).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.updates.is_empty()
    }

    fn ended(&mut self) -> &mut Receiver<Ended> {
        self.ended.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for something to end.
    pub(super) fn wait_for_end(&mut self) -> Ended {
        self.ended().recv().expect("there is always a way in")
    }

    /// The same, for a while at most.
    pub(super) fn wait_for_end_within(&mut self, most: Duration) -> Option<Ended> {
        self.ended().recv_timeout(most).ok()
    }

    /// Something that has ended.
    pub(super) fn next_ended(&mut self) -> Option<Ended> {
        self.ended().try_recv().ok()
    }

    /// Why an update failed, if nobody was told.
    pub(super) fn take_failure(&mut self) -> Option<EngineError> {
        self.unsaid.take()
    }
}

/// Slices that are being updated belong to their executor's memory: it does not end before they do.
impl Drop for Behind {
    fn drop(&mut self) {
        while !self.updates.is_empty() {
            if let Ending::Updated { .. } = self.wait_for_end().ending {
                self.updates.pop();
            }
        }
    }
}

impl Executor {
    /// Waits for the updates that the last step left under way. Whoever reads the state after such a step does so first;
    /// programs that train nothing, [`Executor::standing`] and [`Executor::settle`] do by themselves.
    pub fn catch_up(&mut self) -> Result {
        self.wait_for_updates();
        self.behind.take_failure().map_or(Ok(()), Err)
    }

    /// The same, where failures are told later.
    pub(super) fn wait_for_updates(&mut self) {
        while !self.behind.is_empty() {
            let ended = self.behind.wait_for_end();
            if let Err(error) = self.land_update(ended) {
                self.behind.unsaid.get_or_insert(error);
            }
        }
        if let Some(owed) = self.behind.owed.take() {
            self.progress = Some(owed);
        }
    }

    /// What failed before is settled.
    pub(super) fn forget_failures(&mut self) {
        self.behind.unsaid = None;
    }

    /// Puts an update in the line of its memory.
    pub(super) fn line_up(&mut self, step: &Step, instruction: &Instruction, place: usize) -> Result {
        let (Some(tensor), Some(at)) = (instruction.op.updated_tensor(), instruction.op.line()) else {
            return Err(EngineError::Movement { instruction: instruction.to_string() });
        };
        let terms = Terms::of(step.input);
        let update = self.start_update(&terms, tensor, at)?;
        let lasts = self.clockwork.duration(instruction, step.training);
        let (gate, ends) = (self.gate.clone(), self.behind.ends.clone());
        let (run, id) = (self.runs, instruction.id);
        let work = move || {
            let start = Instant::now();
            let may_go_on = |gate: &Gate| gate();
            let updates = catch_unwind(AssertUnwindSafe(|| update(gate.as_ref().is_none_or(may_go_on))));
            if let Some(lasts) = lasts {
                wait_until(start + lasts);
            }
            let (ending, end) = (Ending::Updated { tensor, terms, updates }, Instant::now());
            // The executor waits for it.
            let _ = ends.send(Ended { run, place, id, ending, start, end });
        };
        let line = if at == Tier::Disk { &self.behind.disk } else { &self.behind.host };
        line.follow(&self.lanes, work).map_err(|source| EngineError::Thread { source })?;
        self.behind.updates.push((run, tensor));
        Ok(())
    }

    /// Puts an update's slices back in their places.
    pub(super) fn land_update(&mut self, ended: Ended) -> Result {
        let Ended { run, id, ending, start, end, .. } = ended;
        let Ending::Updated { tensor, terms, updates } = ending else {
            panic!("what moves lands in its own step");
        };
        let landed = self.behind.updates.iter().position(|update| *update == (run, tensor));
        self.behind.updates.swap_remove(landed.expect("what lands was under way"));
        self.clockwork.note(id, start, end);
        let updates = updates.unwrap_or_else(|panic| resume_unwind(panic));
        let landed = self.put_back(updates);
        let is_of_another_step = self.progress.is_none_or(|progress| !progress.is_of(&terms));
        if landed.is_err() && is_of_another_step {
            // Its gradients are there yet: what the next step adds up waits for it.
            self.behind.owed = Some(Progress::owed(terms));
        }
        landed
    }
}
