//! Clocks that several processes of one machine share: in a lab they send over the same way, such as a node's interface.
//! They lie in a small file, eight bytes a clock, and whoever takes some of them has the file's lock meanwhile. Nobody has
//! it for longer than it takes to read and write a few bytes, unless he is frozen just then: so its wait can be ended.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::error::{Error, Result};

/// Until when a clock is taken: nanoseconds of the machine's clock, which all processes read alike and nobody sets.
const CLOCK_BYTES: usize = size_of::<u64>();

/// Looks at a lock that another has before whoever wants it sleeps between them, and for how long.
const LOOKS_AWAKE: usize = 20;
const NAP: Duration = Duration::from_micros(50);

/// Looks at two clocks, to find what they say at one moment.
const LOOKS: usize = 10;

/// No clock is taken for so long: a quantum of the slowest link lasts two seconds, and few wait in line.
const TAKEN_FOR_MAX: Duration = Duration::from_secs(3600);

/// One process's access to the clocks.
#[derive(Debug)]
pub struct Board {
    path: PathBuf,
    /// The file's lock excludes other processes, the mutex this one's threads.
    file: Mutex<File>,
    /// One moment by both clocks, to tell the one by the other.
    opened: Instant,
    opened_nanos: u64,
}

/// A clock that bytes pass, at this rate.
#[derive(Clone, Copy, Debug)]
pub struct Passage {
    pub clock: usize,
    pub bytes_per_s: f64,
}

impl Board {
    /// Writes a board of so many clocks, none of them taken, in the place of any that is there.
    pub fn create(path: &Path, clocks: usize) -> Result<()> {
        std::fs::write(path, vec![0; clocks * CLOCK_BYTES]).map_err(|cause| broken(path, cause))
    }

    pub fn open(path: &Path) -> Result<Arc<Board>> {
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = file.map_err(|cause| broken(path, cause))?;
        let (opened, opened_nanos) = same_moment();
        Ok(Arc::new(Board { path: path.to_owned(), file: Mutex::new(file), opened, opened_nanos }))
    }

    /// Takes each of these clocks for so many bytes, from `ready` at the earliest; the moment the last of them is through.
    /// `go_on` is asked while others have the lock.
    pub(crate) fn take<E: From<Error>>(
        &self,
        passages: &[Passage],
        ready: Instant,
        bytes: usize,
        go_on: impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<Instant, E> {
        let file = self.file.lock().expect("nobody panics with a board");
        self.lock(&file, go_on)?;
        let through = self.take_locked(&file, passages, ready, bytes);
        let unlocked = file.unlock().map_err(|cause| self.broken(cause));
        let through = through?;
        unlocked?;
        Ok(through)
    }

    fn lock<E: From<Error>>(
        &self,
        file: &File,
        mut go_on: impl FnMut() -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let mut looks = 0;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(()),
                Err(TryLockError::Error(cause)) => return Err(self.broken(cause).into()),
                Err(TryLockError::WouldBlock) => go_on()?,
            }
            looks += 1;
            // Who has it is done at once if he has a core.
            if looks < LOOKS_AWAKE { thread::yield_now() } else { thread::sleep(NAP) }
        }
    }

    fn take_locked(
        &self,
        file: &File,
        passages: &[Passage],
        ready: Instant,
        bytes: usize,
    ) -> Result<Instant> {
        let ready_nanos = self.nanos(ready);
        let latest = self.nanos(Instant::now()) + TAKEN_FOR_MAX.as_nanos() as u64;
        let mut through = ready_nanos;
        for passage in passages {
            let place = (passage.clock * CLOCK_BYTES) as u64;
            let mut taken_until = [0; CLOCK_BYTES];
            file.read_exact_at(&mut taken_until, place).map_err(|cause| self.broken(cause))?;
            let taken_until = u64::from_ne_bytes(taken_until);
            if taken_until > latest {
                return Err(self.broken(io::Error::other("its clocks are taken for hours")));
            }
            let lasts = Duration::from_secs_f64(bytes as f64 / passage.bytes_per_s);
            let end = taken_until.max(ready_nanos) + lasts.as_nanos() as u64;
            file.write_all_at(&end.to_ne_bytes(), place).map_err(|cause| self.broken(cause))?;
            through = through.max(end);
        }
        Ok(ready + Duration::from_nanos(through - ready_nanos))
    }

    fn nanos(&self, moment: Instant) -> u64 {
        match moment.checked_duration_since(self.opened) {
            Some(after) => self.opened_nanos + after.as_nanos() as u64,
            None => self.opened_nanos.saturating_sub((self.opened - moment).as_nanos() as u64),
        }
    }

    fn broken(&self, cause: io::Error) -> Error {
        broken(&self.path, cause)
    }
}

/// A moment of this process and of the machine's clock. Between the two looks the thread may have had to wait: the closest of
/// several is taken.
fn same_moment() -> (Instant, u64) {
    let look = |_| {
        let (before, now, after) = (Instant::now(), clock_gettime(ClockId::Monotonic), Instant::now());
        (after - before, before, now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
    };
    let (_, moment, nanos) = (0..LOOKS).map(look).min().expect("there is more than one look");
    (moment, nanos)
}

fn broken(path: &Path, cause: io::Error) -> Error {
    let what = match cause.kind() {
        io::ErrorKind::UnexpectedEof => "it is shorter than its clocks".to_owned(),
        _ => cause.to_string(),
    };
    Error::Board { path: path.to_owned(), what }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("shoal-board-{name}-{}", std::process::id()))
    }

    fn whatever() -> Result<()> {
        Ok(())
    }

    #[test]
    fn each_clock_is_taken_from_where_it_was_left_and_the_last_one_counts() {
        let path = path("clocks");
        Board::create(&path, 2).unwrap();
        let (one, other) = (Board::open(&path).unwrap(), Board::open(&path).unwrap());
        let ready = Instant::now();
        let (slow, quick) = (Passage { clock: 0, bytes_per_s: 1e6 }, Passage { clock: 1, bytes_per_s: 4e6 });
        let take = |board: &Board, passages: &[Passage], bytes| {
            (board.take(passages, ready, bytes, whatever).unwrap() - ready).as_millis()
        };
        assert_eq!(take(&one, &[slow, quick], 12_000), 12, "3 ms of the quick one");
        assert_eq!(take(&other, &[quick], 8_000), 5);
        assert_eq!(take(&other, &[slow, quick], 4_000), 16);
        let later = ready + Duration::from_millis(100);
        let through = one.take(&[quick], later, 4_000, whatever).unwrap();
        assert_eq!(through - later, Duration::from_millis(1), "from its time on");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn what_is_wrong_with_a_board_names_its_file() {
        let path = path("wrong");
        let named = |error: Error, what: &str| {
            let text = error.to_string();
            assert!(text.contains(path.to_str().unwrap()) && text.contains(what), "{text}");
            assert!(error.hint().is_some());
        };
        named(Board::open(&path).unwrap_err(), "No such file");
        Board::create(&path, 1).unwrap();
        let board = Board::open(&path).unwrap();
        let take = |clock| board.take(&[Passage { clock, bytes_per_s: 1e6 }], Instant::now(), 1000, whatever);
        take(0).unwrap();
        named(take(1).unwrap_err(), "shorter than its clocks");
        std::fs::write(&path, [0xff; CLOCK_BYTES]).unwrap();
        named(take(0).unwrap_err(), "taken for hours");
        // Unlocked again in spite of all that.
        Board::create(&path, 1).unwrap();
        take(0).unwrap();
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_lock_that_another_keeps_is_waited_for_as_long_as_there_is_a_point() {
        let path = path("kept");
        Board::create(&path, 1).unwrap();
        let board = Board::open(&path).unwrap();
        let frozen = File::open(&path).unwrap();
        frozen.lock().unwrap();
        let mut asked = 0;
        let passage = Passage { clock: 0, bytes_per_s: 1e6 };
        let given_up = board.take(&[passage], Instant::now(), 1000, || {
            asked += 1;
            let lost = Error::Aborted { by: "worker 1".into(), reason: "it is frozen".into() };
            if asked < 50 { Ok(()) } else { Err(lost) }
        });
        assert!(matches!(given_up, Err(Error::Aborted { .. })), "{given_up:?}");
        frozen.unlock().unwrap();
        board.take(&[passage], Instant::now(), 1000, whatever).unwrap();
        std::fs::remove_file(path).unwrap();
    }
}
