//! A disk for tests that runs out of space, stops dead or loses power, at a chosen byte or operation. What
//! it does before that really happens, in a temporary folder, so that the production reader judges the
//! remains. It flushes nothing (a test needs no platter): it remembers what was flushed instead, and a
//! power cut takes the rest.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::disk::{Disk, DiskFile};

/// When and how the disk fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plan {
    Never,
    /// The disk has room for this many bytes. A write that does not fit is cut short, the next one refused.
    FullAfter(u64),
    /// As before, but the refused write claims to have succeeded with nothing written.
    SilentlyFullAfter(u64),
    /// Every flush finds the disk full, as delayed allocation and network disks report it.
    FullOnFlush,
    /// The process dies during this operation, counted from 0; a write gets half done.
    KilledAt(u64),
    /// The machine loses power there: bytes and, inside the folder being made, names that were not flushed
    /// are lost. Names in the folder around it survive: the order a disk is free to choose, and the worst.
    PowerLostAt(u64),
    /// All who use the disk die during this operation, and of what was not flushed anything may be left: bytes cut
    /// anywhere, or there in number and zero; names given or not. The seed says what.
    CrashAt(u64, u64),
}

/// One user's way to a disk.
#[derive(Debug)]
pub(crate) struct FaultyDisk {
    state: Arc<Mutex<State>>,
    turn: Option<Turn>,
}

/// A writer's place among several that go on by turns.
#[derive(Debug, Clone)]
struct Turn {
    turns: Arc<Turns>,
    writer: usize,
}

impl Drop for FaultyDisk {
    /// Whoever is done is waited for no longer.
    fn drop(&mut self) {
        if let Some(turn) = &self.turn {
            turn.turns.leave();
        }
    }
}

/// Lets several writers, each on a thread of its own, do one operation at a time, in an order drawn from a seed: an
/// operation begins when everyone waits for the next one.
#[derive(Debug)]
pub(crate) struct Turns {
    order: Mutex<Order>,
    changed: Condvar,
}

#[derive(Debug)]
struct Order {
    draw: u64,
    running: usize,
    waiting: Vec<usize>,
    next: Option<usize>,
}

impl Order {
    fn pick(&mut self) {
        if self.running == 0 && self.next.is_none() && !self.waiting.is_empty() {
            self.draw = mixed(self.draw);
            self.waiting.sort_unstable();
            let place = (self.draw % self.waiting.len() as u64) as usize;
            self.next = Some(self.waiting.swap_remove(place));
        }
    }
}

impl Turns {
    fn order(&self) -> MutexGuard<'_, Order> {
        self.order.lock().expect("no test panics while it holds the order")
    }

    fn wait(&self, writer: usize) {
        let mut order = self.order();
        order.running -= 1;
        order.waiting.push(writer);
        order.pick();
        self.changed.notify_all();
        let mut order = self.changed.wait_while(order, |order| order.next != Some(writer)).expect("as above");
        order.next = None;
        order.running += 1;
    }

    fn leave(&self) {
        let mut order = self.order();
        order.running -= 1;
        order.pick();
        self.changed.notify_all();
    }
}

/// A number that nobody sees a pattern in.
pub(crate) fn mixed(seed: u64) -> u64 {
    let mut bits = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[derive(Debug)]
struct State {
    plan: Plan,
    operations: u64,
    bytes: u64,
    dead: bool,
    /// Every file written, with how much of it has been flushed.
    files: Vec<(File, u64)>,
    /// Names given and not yet flushed.
    names: Vec<Name>,
    /// Renames of folders, to find the names inside again.
    moved: Vec<(PathBuf, PathBuf)>,
    /// Which of those are flushed.
    moved_flushed: Vec<bool>,
}

#[derive(Debug)]
enum Name {
    Created(PathBuf),
    Renamed(PathBuf, PathBuf),
}

struct FaultyFile {
    disk: Arc<Mutex<State>>,
    turn: Option<Turn>,
    index: usize,
}

impl FaultyDisk {
    pub(crate) fn new(plan: Plan) -> FaultyDisk {
        let state = Arc::new(Mutex::new(State {
            plan,
            operations: 0,
            bytes: 0,
            dead: false,
            files: Vec::new(),
            names: Vec::new(),
            moved: Vec::new(),
            moved_flushed: Vec::new(),
        }));
        FaultyDisk { state, turn: None }
    }

    /// The same disk for several writers, who use it by turns.
    pub(crate) fn by_turns(&self, writers: usize, seed: u64) -> Vec<Arc<FaultyDisk>> {
        let order = Order { draw: seed, running: writers, waiting: Vec::new(), next: None };
        let turns = Arc::new(Turns { order: Mutex::new(order), changed: Condvar::new() });
        let turn = |writer| Some(Turn { turns: turns.clone(), writer });
        (0..writers)
            .map(|writer| Arc::new(FaultyDisk { state: self.state.clone(), turn: turn(writer) }))
            .collect()
    }

    /// Waits for this user's turn.
    fn state(&self) -> MutexGuard<'_, State> {
        await_turn(&self.turn);
        lock(&self.state)
    }

    pub(crate) fn shared(plan: Plan) -> Arc<FaultyDisk> {
        Arc::new(FaultyDisk::new(plan))
    }

    /// Whether the planned death has happened.
    pub(crate) fn died(&self) -> bool {
        lock(&self.state).dead
    }

    /// Whether a power cut now would take nothing.
    pub(crate) fn is_flushed(&self) -> bool {
        let state = lock(&self.state);
        let whole = |(file, flushed): &(File, u64)| file.metadata().is_ok_and(|file| file.len() == *flushed);
        state.names.is_empty()
            && state.moved_flushed.iter().all(|flushed| *flushed)
            && state.files.iter().all(whole)
    }

    /// Bytes written so far.
    pub(crate) fn bytes(&self) -> u64 {
        lock(&self.state).bytes
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("no test panics while it holds the disk")
}

fn await_turn(turn: &Option<Turn>) {
    if let Some(Turn { turns, writer }) = turn {
        turns.wait(*writer);
    }
}

fn dead() -> io::Error {
    io::Error::other("the process is dead")
}

impl State {
    /// Counts an operation; an error means that it does not happen.
    fn operate(&mut self) -> io::Result<()> {
        if self.dead {
            return Err(dead());
        }
        if self.last_operation() == Some(self.operations) {
            self.dead = true;
            match self.plan {
                Plan::PowerLostAt(_) => self.lose_power()?,
                Plan::CrashAt(_, seed) => self.lose_some(seed)?,
                _ => {}
            }
            return Err(dead());
        }
        self.operations += 1;
        Ok(())
    }

    /// The operation that everything ends with.
    fn last_operation(&self) -> Option<u64> {
        match self.plan {
            Plan::KilledAt(last) | Plan::PowerLostAt(last) | Plan::CrashAt(last, _) => Some(last),
            _ => None,
        }
    }

    /// What was not flushed is lost, there, or half there, each thing for itself.
    fn lose_some(&mut self, seed: u64) -> io::Result<()> {
        let mut draw = seed;
        let mut below = |count: u64| {
            draw = mixed(draw);
            draw % count
        };
        for (file, flushed) in &self.files {
            let written = file.metadata()?.len();
            if written > *flushed {
                file.set_len(flushed + below(written - flushed + 1))?;
                if below(3) == 0 {
                    // The size got to the disk, the bytes did not.
                    file.set_len(written)?;
                }
            }
        }
        // Names inside the folders first: where those are now is known.
        for name in self.names.drain(..).rev().filter(|_| below(2) == 0) {
            let _ = match name {
                Name::Created(path) => fs::remove_file(now_at(&self.moved, &path)),
                Name::Renamed(from, to) => fs::rename(now_at(&self.moved, &to), now_at(&self.moved, &from)),
            };
        }
        // Later renames rest on earlier ones: from some place on none has happened.
        let first = self.moved_flushed.iter().rposition(|flushed| *flushed).map_or(0, |last| last + 1);
        let kept = first + below((self.moved.len() - first + 1) as u64) as usize;
        for (from, to) in self.moved.drain(kept..).rev() {
            // Where the folder was removed since, it stays so.
            let _ = fs::rename(to, from);
        }
        Ok(())
    }

    fn lose_power(&mut self) -> io::Result<()> {
        for (file, flushed) in &self.files {
            file.set_len(*flushed)?;
        }
        for name in self.names.drain(..).rev() {
            // A name that is already gone again is lost anyway.
            let _ = match name {
                Name::Created(path) => fs::remove_file(now_at(&self.moved, &path)),
                Name::Renamed(from, to) => fs::rename(now_at(&self.moved, &to), now_at(&self.moved, &from)),
            };
        }
        Ok(())
    }
}

/// Where a file is now, given the renames of the folder it was made in.
fn now_at(moved: &[(PathBuf, PathBuf)], path: &Path) -> PathBuf {
    moved.iter().fold(path.to_owned(), |path, (from, to)| match path.strip_prefix(from) {
        Ok(inner) => to.join(inner),
        Err(_) => path,
    })
}

impl Disk for FaultyDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.state().operate()?;
        fs::create_dir(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let mut state = self.state();
        state.operate()?;
        let file = File::create_new(path)?;
        state.names.push(Name::Created(path.to_owned()));
        state.files.push((file, 0));
        Ok(Box::new(FaultyFile {
            disk: self.state.clone(),
            turn: self.turn.clone(),
            index: state.files.len() - 1,
        }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        fs::rename(from, to)?;
        if to.is_dir() {
            state.moved.push((from.to_owned(), to.to_owned()));
            state.moved_flushed.push(false);
        } else {
            state.names.push(Name::Renamed(from.to_owned(), to.to_owned()));
        }
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.state().operate()?;
        fs::remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.state().operate()?;
        fs::remove_dir(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        state.names.retain(|(Name::Created(name) | Name::Renamed(_, name))| name.parent() != Some(path));
        let State { moved, moved_flushed, .. } = &mut *state;
        for ((_, to), flushed) in moved.iter().zip(moved_flushed) {
            *flushed |= to.parent() == Some(path);
        }
        Ok(())
    }
}

impl DiskFile for FaultyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        await_turn(&self.turn);
        let mut state = lock(&self.disk);
        let left = match state.plan {
            Plan::FullAfter(room) | Plan::SilentlyFullAfter(room) => (room - state.bytes) as usize,
            _ => usize::MAX,
        };
        match (left, state.plan) {
            (0, Plan::SilentlyFullAfter(_)) => return Ok(0),
            (0, _) => return Err(io::ErrorKind::StorageFull.into()),
            _ => {}
        }
        let mut count = bytes.len().min(left);
        if state.last_operation() == Some(state.operations) {
            count /= 2;
        }
        if !state.dead {
            let index = self.index;
            state.files[index].0.write_all(&bytes[..count])?;
            state.bytes += count as u64;
        }
        state.operate()?;
        Ok(count)
    }

    fn sync(&mut self) -> io::Result<()> {
        await_turn(&self.turn);
        let mut state = lock(&self.disk);
        if state.plan == Plan::FullOnFlush {
            return Err(io::ErrorKind::StorageFull.into());
        }
        state.operate()?;
        let (file, flushed) = &mut state.files[self.index];
        *flushed = file.metadata()?.len();
        Ok(())
    }
}
