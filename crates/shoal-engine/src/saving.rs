//! One worker's side of saving. Everyone who holds something writes a part of the checkpoint, all at the same time. A part
//! is copied to host memory at the step's end and written from there by a thread of its own while the next steps run; at
//! most one is under way. Where there is no room for the copy, or nothing runs next, it is written from where it lies, and
//! the run waits.

use std::borrow::Cow;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use shoal_kernels::{CpuDevice, Device, Tensor};
use shoal_model::Chain;
use shoal_plan::{Holder, Plan, Slice};
use shoal_state::checkpoint::{Header, Saved, Slice as Written, Store};

use crate::error::{EngineError, Result};
use crate::executor::Executor;
use crate::state::PARAMETER;

/// A slice of a tensor that a worker writes, and where it has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    pub tensor: usize,
    pub slice: Slice,
    pub holder: Holder,
}

/// Who of some devices writes what, device by device: every slice once, each by that of its holders which has the least to
/// write so far. None if something is with none of them.
pub fn shares(plan: &Plan, among: &[usize]) -> Option<Vec<Vec<Share>>> {
    let mut shares = vec![Vec::new(); among.len()];
    let mut elements = vec![0; among.len()];
    for (tensor, row) in plan.tensors.iter().enumerate() {
        let mut held: Vec<(Slice, Holder)> =
            row.optimizer.iter().map(|held| (held.slice, held.holder)).collect();
        held.sort_unstable();
        for same in held.chunk_by(|(left, _), (right, _)| left == right) {
            let place =
                |(_, holder): &(Slice, Holder)| among.iter().position(|device| *device == holder.device());
            let candidates = same.iter().filter_map(|held| Some((place(held)?, *held)));
            let (place, (slice, holder)) = candidates.min_by_key(|(place, _)| elements[*place])?;
            elements[place] += slice.count();
            shares[place].push(Share { tensor, slice, holder });
        }
    }
    Some(shares)
}

/// Which part of a checkpoint this worker writes.
pub struct Part {
    /// From 1.
    pub number: usize,
    pub of: usize,
    pub shares: Vec<Share>,
}

/// What parts are read from.
pub trait Holding {
    /// A share's parameters (0) or one of its states (from 1), where the host can read them.
    fn read(&self, share: &Share, role: usize) -> Result<Cow<'_, [f32]>>;

    /// Where the copy is counted.
    fn host(&self) -> &CpuDevice;
}

impl Holding for Executor {
    fn read(&self, share: &Share, role: usize) -> Result<Cow<'_, [f32]>> {
        self.held(share, role)
    }

    fn host(&self) -> &CpuDevice {
        Executor::host(self)
    }
}

impl Part {
    /// None where the device has nothing to write.
    fn of(plan: &Plan, among: &[usize], device: usize) -> Result<Option<Part>> {
        let all = shares(plan, among).ok_or(EngineError::Unheld)?;
        let own = among.iter().position(|other| *other == device);
        let writes = |place: &usize| !all[*place].is_empty();
        let writers: Vec<usize> = (0..among.len()).filter(writes).collect();
        let number = own.and_then(|own| writers.iter().position(|writer| *writer == own));
        Ok(number.map(|number| Part {
            number: number + 1,
            of: writers.len(),
            shares: all[writers[number]].clone(),
        }))
    }
}

/// What is under way, and when it began.
struct UnderWay {
    step: u64,
    began: Instant,
    thread: JoinHandle<(Tensor, Result<Saved>)>,
}

/// A part that was written.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    pub step: u64,
    pub bytes: u64,
    pub seconds: f64,
}

/// What was found when a save was prepared.
#[derive(Debug, Default, PartialEq)]
pub struct Prepared {
    /// A parameter's value that is no number.
    pub unfit: Option<f32>,
    /// Where there is no room for a copy: the bytes it has, and those that are free.
    pub refused: Option<(u64, u64)>,
}

/// Writes a worker's part of each checkpoint.
pub struct Saver {
    store: Store,
    chain: Arc<Chain>,
    /// Parameters and the optimizer's states.
    roles: Vec<&'static str>,
    part: Option<Part>,
    /// Host memory for the copy, kept from one save to the next.
    room: Option<Tensor>,
    /// The copy to be written next.
    copy: Option<Tensor>,
    under_way: Option<UnderWay>,
    /// Older checkpoints being removed: of large files that takes a while too.
    removing: Option<JoinHandle<Result>>,
    /// The last part that was written, until someone asks.
    done: Option<Outcome>,
}

impl Saver {
    /// A worker of a plan. `members` are those who take part.
    pub fn new(
        store: Store,
        plan: &Plan,
        chain: Arc<Chain>,
        states: &[&'static str],
        members: &[usize],
        device: usize,
    ) -> Result<Saver> {
        Ok(Saver::of(store, chain, states, Part::of(plan, members, device)?))
    }

    /// One who was told which part to write; none where there is nothing to.
    pub fn of(store: Store, chain: Arc<Chain>, states: &[&'static str], part: Option<Part>) -> Saver {
        let roles = std::iter::once(PARAMETER).chain(states.iter().copied()).collect();
        Saver {
            store,
            chain,
            roles,
            part,
            room: None,
            copy: None,
            under_way: None,
            removing: None,
            done: None,
        }
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Makes a copy of this worker's part, if there is room and something is to run meanwhile, and looks for parameters
    /// that are no numbers: they must not push out the last checkpoint whose are. The last save must have ended.
    pub fn prepare(&mut self, held: &dyn Holding, waits: bool) -> Result<Prepared> {
        assert!(self.under_way.is_none(), "one save at a time");
        // What was copied for a save that was never begun is of no use any more.
        self.room = self.copy.take().or(self.room.take());
        let Some(part) = &self.part else { return Ok(Prepared::default()) };
        let room = match (waits, self.room.take()) {
            (true, room) => {
                self.room = room;
                Err(None)
            }
            (false, Some(room)) => Ok(room),
            (false, None) => part.room(held, self.roles.len()).map_err(Some),
        };
        match room {
            Ok(mut room) => {
                let unfit = part.copy(held, self.roles.len(), &mut room)?;
                self.copy = Some(room);
                Ok(Prepared { unfit, refused: None })
            }
            Err(refused) => {
                let mut unfit = None;
                for share in &part.shares {
                    unfit = unfit.or(first_unfit(&held.read(share, 0)?));
                }
                Ok(Prepared { unfit, refused })
            }
        }
    }

    /// Writes this worker's part of a save: beside what runs next if there is a copy, else at once.
    pub fn begin(&mut self, held: &dyn Holding, header: Header, id: u64) -> Result {
        let (step, began) = (header.step, Instant::now());
        let Some(part) = &self.part else {
            self.done = Some(Outcome { step, ..Outcome::default() });
            return Ok(());
        };
        let place = (part.number, part.of);
        if let Some(copy) = self.copy.take() {
            let job = (self.store.clone(), self.chain.clone(), self.roles.clone(), part.shares.clone());
            let thread = std::thread::Builder::new().name("checkpoint".into());
            let thread = thread.spawn(move || write_copy(job, header, id, place, copy));
            let thread = thread.map_err(|source| EngineError::Thread { source })?;
            self.under_way = Some(UnderWay { step, began, thread });
            return Ok(());
        }
        let (slices, roles) = (written(&self.chain, &self.roles, &part.shares), self.roles.len());
        let writer = self.store.begin_part(header, id, place.0, place.1)?;
        let saved = writer.write(&slices, |index| held.read(&part.shares[index / roles], index % roles))?;
        self.done = Some(Outcome { step, bytes: saved.bytes, seconds: began.elapsed().as_secs_f64() });
        Ok(())
    }

    /// From now on writes all of the state, as one part, from this device alone.
    pub fn stand_alone(&mut self, plan: &Plan, device: usize) -> Result {
        self.part = Part::of(plan, &[device], device)?;
        // The room is of the size of another part.
        (self.room, self.copy) = (None, None);
        Ok(())
    }

    /// Whether a save has begun of which no end was noted yet.
    pub fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Takes note of a save that has ended, where it has; waits for it if asked to.
    pub fn settle(&mut self, waits: bool) -> Result {
        if let Some(removing) = self.removing.take_if(|removing| waits || removing.is_finished()) {
            joined(removing)?;
        }
        if !waits && self.under_way.as_ref().is_some_and(|under_way| !under_way.thread.is_finished()) {
            return Ok(());
        }
        let Some(UnderWay { step, began, thread }) = self.under_way.take() else { return Ok(()) };
        let (room, saved) = joined(thread);
        self.room = Some(room);
        let seconds = began.elapsed().as_secs_f64();
        self.done = Some(Outcome { step, bytes: saved?.bytes, seconds });
        Ok(())
    }

    /// Removes all but the newest checkpoints, beside what runs next.
    pub fn collect(&mut self, keep: usize) -> Result {
        if let Some(removing) = self.removing.take() {
            joined(removing)?;
        }
        let store = self.store.clone();
        let remove = move || Ok(store.collect(keep).map(drop)?);
        let thread = std::thread::Builder::new().name("checkpoint".into());
        self.removing = Some(thread.spawn(remove).map_err(|source| EngineError::Thread { source })?);
        Ok(())
    }

    /// The part that was written last, once.
    pub fn take_done(&mut self) -> Option<Outcome> {
        self.done.take()
    }

    /// The bytes of the part that was written last.
    pub fn done_bytes(&self) -> u64 {
        self.done.map_or(0, |done| done.bytes)
    }
}

/// What a thread came to; its panic is ours.
fn joined<T>(thread: JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl Part {
    fn elements(&self, roles: usize) -> usize {
        roles * self.shares.iter().map(|share| share.slice.count()).sum::<usize>()
    }

    /// Host memory for a copy, or how many bytes that is and how many are free beside what steps have needed so far.
    fn room(&self, held: &dyn Holding, roles: usize) -> std::result::Result<Tensor, (u64, u64)> {
        let (arena, elements) = (held.host().arena(), self.elements(roles));
        let (needed, free) = (4 * elements as u64, arena.budget().saturating_sub(arena.peak()));
        if needed > free {
            return Err((needed, free));
        }
        Tensor::new(arena, "the copy of a checkpoint", elements).map_err(|_| (needed, free))
    }

    /// Copies all that is to be written, and returns a parameter's value that is no number.
    fn copy(&self, held: &dyn Holding, roles: usize, room: &mut Tensor) -> Result<Option<f32>> {
        let (mut rest, mut unfit) = (room.floats_mut(), None);
        for share in &self.shares {
            for role in 0..roles {
                let values = held.read(share, role)?;
                let (here, after) = rest.split_at_mut(values.len());
                here.copy_from_slice(&values);
                if role == 0 {
                    unfit = unfit.or(first_unfit(&values));
                }
                rest = after;
            }
        }
        Ok(unfit)
    }
}

/// The first value that is no number.
fn first_unfit(values: &[f32]) -> Option<f32> {
    // In pieces, each looked through without a branch.
    let is_unfit = |piece: &&[f32]| piece.iter().fold(false, |unfit, value| unfit | !value.is_finite());
    values.chunks(4096).find(is_unfit)?.iter().copied().find(|value| !value.is_finite())
}

/// What a part's slices are called: of each share its roles, one after the other.
fn written<'a>(chain: &'a Chain, roles: &'a [&'static str], shares: &[Share]) -> Vec<Written<'a>> {
    let of_share = |share: &Share| {
        let (spec, range) = (&chain.tensors[share.tensor], share.slice.range());
        roles.iter().map(move |role| Written {
            name: &spec.name,
            role,
            shape: &spec.shape,
            range: range.clone(),
        })
    };
    shares.iter().flat_map(of_share).collect()
}

type Job = (Store, Arc<Chain>, Vec<&'static str>, Vec<Share>);

/// Writes a part from its copy, and gives the copy's room back.
fn write_copy(
    job: Job,
    header: Header,
    id: u64,
    part: (usize, usize),
    room: Tensor,
) -> (Tensor, Result<Saved>) {
    let (store, chain, roles, shares) = job;
    let slices = written(&chain, &roles, &shares);
    let ends = slices.iter().scan(0, |end, slice| {
        *end += slice.range.len();
        Some(*end)
    });
    let ends: Vec<usize> = ends.collect();
    let values = room.floats();
    let data = |index: usize| {
        let end = ends[index];
        Ok::<_, shoal_state::Error>(Cow::Borrowed(&values[end - slices[index].range.len()..end]))
    };
    let writer = store.begin_part(header, id, part.0, part.1);
    let saved = writer.and_then(|writer| writer.write(&slices, data));
    (room, saved.map_err(EngineError::from))
}
