//! One worker's side of saving. Everyone who holds something writes a part of the checkpoint, all at the same time. A part
//! is copied to host memory at the step's end and written from there by a thread of its own while the next steps run; at
//! most one is under way. Where there is no room for the copy, or nothing runs next, it is written from where it lies, and
//! the run waits.

use std::borrow::Cow;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use shoal_kernels::{Arena, CpuDevice, Device, Tensor};
use shoal_model::Chain;
use shoal_plan::parallel::map_into;
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

/// Host memory for copies, kept from one save to the next.
#[derive(Default)]
pub struct Room {
    /// Whose memory it is.
    arena: Weak<Arena>,
    memory: Option<Tensor>,
    /// The first one while its pages are being put in place.
    making: Option<JoinHandle<Tensor>>,
    /// The most that was taken for copies.
    taken_bytes: u64,
    /// The most that steps have needed beside them.
    steps_bytes: u64,
}

impl Room {
    /// Memory for so many numbers, or how many bytes that is and how many are free beside what steps have needed so far.
    fn take(&mut self, host: &CpuDevice, elements: usize) -> std::result::Result<Tensor, (u64, u64)> {
        self.keep_to(host);
        if let Some(making) = self.making.take() {
            self.memory = Some(joined(making));
        }
        // What is too small goes back first.
        let memory = self.memory.take().filter(|memory| memory.len() >= elements);
        memory.map_or_else(|| self.allocate(host, elements), Ok)
    }

    fn allocate(&mut self, host: &CpuDevice, elements: usize) -> std::result::Result<Tensor, (u64, u64)> {
        let arena = host.arena();
        // What was taken for copies before has been part of the peak.
        self.steps_bytes = self.steps_bytes.max(arena.peak().saturating_sub(self.taken_bytes));
        let (needed, free) = (4 * elements as u64, arena.budget().saturating_sub(self.steps_bytes));
        if needed > free {
            return Err((needed, free));
        }
        let memory = Tensor::new(arena, "the copy of a checkpoint", elements).map_err(|_| (needed, free))?;
        self.taken_bytes = self.taken_bytes.max(needed);
        Ok(memory)
    }

    /// What is another's is of no use here.
    fn keep_to(&mut self, host: &CpuDevice) {
        let arena = Arc::downgrade(host.arena());
        if !self.arena.ptr_eq(&arena) {
            *self = Room { arena, ..Room::default() };
        }
    }

    fn put_back(&mut self, memory: Tensor) {
        self.memory = Some(memory);
    }

    /// The system puts pages in place when they are first written, which can take twenty times as long as a copy does: that
    /// is done by a thread of its own, so that the first save does not hold up training for it.
    fn make_ready(&mut self, host: &CpuDevice, elements: usize) -> Result {
        self.keep_to(host);
        if self.memory.is_some() || self.making.is_some() {
            return Ok(());
        }
        // Where there is none, the first save says so.
        let Ok(mut memory) = self.allocate(host, elements) else { return Ok(()) };
        let touch = move || {
            memory.floats_mut().iter_mut().step_by(PAGE_ELEMENTS).for_each(|first| *first = 0.0);
            memory
        };
        self.making = Some(beside(touch)?);
        Ok(())
    }
}

/// Numbers in the smallest page that systems have.
const PAGE_ELEMENTS: usize = 4096 / size_of::<f32>();

/// Writes a worker's part of each checkpoint.
pub struct Saver {
    store: Store,
    chain: Arc<Chain>,
    /// Parameters and the optimizer's states.
    roles: Vec<&'static str>,
    part: Option<Part>,
    room: Room,
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
            room: Room::default(),
            copy: None,
            under_way: None,
            removing: None,
            done: None,
        }
    }

    /// One with memory that served others before.
    pub fn with_room(mut self, room: Room) -> Saver {
        self.room = room;
        self
    }

    /// What others may use after it.
    pub fn into_room(self) -> Room {
        self.room
    }

    /// Has memory for the first copy made ready beside what runs, once it is known what steps need.
    pub fn make_ready(&mut self, host: &CpuDevice) -> Result {
        match &self.part {
            Some(part) if self.under_way.is_none() && self.copy.is_none() => {
                self.room.make_ready(host, part.elements(self.roles.len()))
            }
            _ => Ok(()),
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
        if let Some(copy) = self.copy.take() {
            self.room.put_back(copy);
        }
        let Some(part) = &self.part else { return Ok(Prepared::default()) };
        let elements = part.elements(self.roles.len());
        let room = match waits {
            true => Err(None),
            false => self.room.take(held.host(), elements).map_err(Some),
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
            let thread = beside(move || write_copy(job, header, id, place, copy))?;
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
        if let Some(copy) = self.copy.take() {
            self.room.put_back(copy);
        }
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
        self.room.put_back(room);
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
        self.removing = Some(beside(remove)?);
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

/// Does something on a thread of its own, beside steps.
fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
    let thread = std::thread::Builder::new().name("checkpoint".into());
    thread.spawn(work).map_err(|source| EngineError::Thread { source })
}

/// What a thread came to; its panic is ours.
fn joined<T>(thread: JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl Part {
    fn elements(&self, roles: usize) -> usize {
        roles * self.shares.iter().map(|share| share.slice.count()).sum::<usize>()
    }

    /// Copies all that is to be written, and returns a parameter's value that is no number.
    fn copy(&self, held: &dyn Holding, roles: usize, room: &mut Tensor) -> Result<Option<f32>> {
        let mut rest = room.floats_mut();
        let mut pieces = Vec::new();
        let mut unfit = None;
        for share in &self.shares {
            for role in 0..roles {
                let values = held.read(share, role)?;
                let (here, after) = rest.split_at_mut(values.len());
                rest = after;
                match values {
                    // Where the state lies in the host's memory, all cores copy: one does not use all of the memory's bandwidth.
                    Cow::Borrowed(values) => {
                        let both = values.chunks(PIECE_ELEMENTS).zip(here.chunks_mut(PIECE_ELEMENTS));
                        pieces.extend(both.map(|(from, to)| (role, from, to)));
                    }
                    Cow::Owned(values) => unfit = unfit.or(copy_piece((role, &values, here))),
                }
            }
        }
        Ok(map_into(pieces, copy_piece).into_iter().fold(unfit, Option::or))
    }
}

/// Numbers that one core copies at a time.
const PIECE_ELEMENTS: usize = 4 << 20;

fn copy_piece((role, from, to): (usize, &[f32], &mut [f32])) -> Option<f32> {
    to.copy_from_slice(from);
    if role == 0 { first_unfit(from) } else { None }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn host(budget: u64) -> CpuDevice {
        CpuDevice::new("host", 1, CpuDevice::workspace_bytes(1) + budget).unwrap()
    }

    /// A copy's memory serves the next one, is no part of what steps need, and is never taken from what they do.
    #[test]
    fn room_serves_again_and_leaves_steps_theirs() {
        const MIB: usize = 1 << 20;
        let host = host(16 << 20);
        let step = Tensor::new(host.arena(), "a step", 2 * MIB).unwrap();
        let mut room = Room::default();
        room.make_ready(&host, MIB).unwrap();
        let memory = room.take(&host, MIB).unwrap();
        let place = memory.place();
        room.put_back(memory);
        // A smaller part fits where the larger one was; a larger one does not, and the smaller is given up first.
        let memory = room.take(&host, MIB / 2).unwrap();
        assert_eq!(memory.place(), place);
        room.put_back(memory);
        let used = host.arena().peak();
        let memory = room.take(&host, 2 * MIB - 64).unwrap();
        assert!(memory.len() == 2 * MIB - 64 && host.arena().peak() < used + (5 << 20));
        drop(memory);
        drop(step);
        // Steps had 8 MiB of the 16, whatever is in use now.
        assert!(matches!(room.take(&host, 2 * MIB + 64), Err((_, free)) if free <= 8 << 20));
        let other = self::host(16 << 20);
        assert!(room.take(&other, 3 * MIB).is_ok(), "what one host has used says nothing about another");
    }
}
