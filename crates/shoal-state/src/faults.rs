//! A disk for tests that runs out of space, stops dead or loses power, at a chosen byte or operation. What
//! it does before that really happens, in a temporary folder, so that the production reader judges the
//! remains. It flushes nothing (a test needs no platter): it remembers what was flushed instead, and a
//! power cut takes the rest.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

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
}

#[derive(Debug)]
pub(crate) struct FaultyDisk(Arc<Mutex<State>>);

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
    /// How many of those are flushed.
    moved_flushed: usize,
}

#[derive(Debug)]
enum Name {
    Created(PathBuf),
    Renamed(PathBuf, PathBuf),
}

struct FaultyFile {
    disk: Arc<Mutex<State>>,
    index: usize,
}

impl FaultyDisk {
    pub(crate) fn new(plan: Plan) -> FaultyDisk {
        FaultyDisk(Arc::new(Mutex::new(State {
            plan,
            operations: 0,
            bytes: 0,
            dead: false,
            files: Vec::new(),
            names: Vec::new(),
            moved: Vec::new(),
            moved_flushed: 0,
        })))
    }

    pub(crate) fn shared(plan: Plan) -> Arc<FaultyDisk> {
        Arc::new(FaultyDisk::new(plan))
    }

    /// Whether the planned death has happened.
    pub(crate) fn died(&self) -> bool {
        lock(&self.0).dead
    }

    /// Whether a power cut now would take nothing.
    pub(crate) fn is_flushed(&self) -> bool {
        let state = lock(&self.0);
        let whole = |(file, flushed): &(File, u64)| file.metadata().is_ok_and(|file| file.len() == *flushed);
        state.names.is_empty() && state.moved_flushed == state.moved.len() && state.files.iter().all(whole)
    }

    /// Bytes written so far.
    pub(crate) fn bytes(&self) -> u64 {
        lock(&self.0).bytes
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("no test panics while it holds the disk")
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
        let (Plan::KilledAt(last) | Plan::PowerLostAt(last)) = self.plan else { return Ok(()) };
        if self.operations == last {
            self.dead = true;
            if matches!(self.plan, Plan::PowerLostAt(_)) {
                self.lose_power()?;
            }
            return Err(dead());
        }
        self.operations += 1;
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
        lock(&self.0).operate()?;
        fs::create_dir(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let mut state = lock(&self.0);
        state.operate()?;
        let file = File::create_new(path)?;
        state.names.push(Name::Created(path.to_owned()));
        state.files.push((file, 0));
        Ok(Box::new(FaultyFile { disk: self.0.clone(), index: state.files.len() - 1 }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = lock(&self.0);
        state.operate()?;
        fs::rename(from, to)?;
        if to.is_dir() {
            state.moved.push((from.to_owned(), to.to_owned()));
        } else {
            state.names.push(Name::Renamed(from.to_owned(), to.to_owned()));
        }
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        lock(&self.0).operate()?;
        fs::remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        lock(&self.0).operate()?;
        fs::remove_dir(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = lock(&self.0);
        state.operate()?;
        state.names.retain(|(Name::Created(name) | Name::Renamed(_, name))| name.parent() != Some(path));
        if state.moved.iter().all(|(_, to)| to.parent() == Some(path)) {
            state.moved_flushed = state.moved.len();
        }
        Ok(())
    }
}

impl DiskFile for FaultyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
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
        if matches!(state.plan, Plan::KilledAt(last) | Plan::PowerLostAt(last) if last == state.operations) {
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
