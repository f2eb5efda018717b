//! The controller's records on a disk. They are appended in batches, each a frame with its length, its place and a
//! checksum, and each on the disk before the next is begun; so a crash can tear the last frame only. What is torn is cut
//! off when the log is opened: nothing that rests on it was ever said. A damaged frame with a good one behind it is no
//! crash but a damaged disk, and refused. From time to time the state itself is written down and the log begins anew.
//!
//! Why not an embedded store (redb, the leanest, was weighed): nothing here is ever looked up. A log is read once, from its
//! beginning, and written at its end, one flush a batch; a tree of pages writes several scattered ones for that, reserves
//! space by the megabyte where ours are kilobytes, and hides the one thing to be shown here, what remains of a torn write.
//!
//! A frame: length of its content (4 bytes), number of its first record (8), the first 16 bytes of the BLAKE3 hash of
//! these and the content, the content (JSON, a list of records). All numbers are little-endian. The snapshot is one frame
//! whose content is the state and whose number is the state's revision.

use std::io;

use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::bug::Bug;
use crate::controller::fit::Misfit;
use crate::controller::record::Record;
use crate::controller::state::State;
use crate::disk::Disk;

const LOG: &str = "log";
const LOG_PARTIAL: &str = "log.partial";
const SNAPSHOT: &str = "snapshot";
const SNAPSHOT_PARTIAL: &str = "snapshot.partial";

const CHECKSUM_BYTES: usize = 16;
const HEADER_BYTES: usize = 4 + 8 + CHECKSUM_BYTES;

#[derive(Debug, Error)]
pub enum LogError {
    #[error("the controller's log: {0}")]
    Disk(#[from] io::Error),
    #[error("the controller's log is damaged at byte {0}, before its end")]
    Damaged(u64),
    #[error("the controller's snapshot is damaged")]
    DamagedSnapshot,
    #[error("the controller's log lacks the records from {expected} to {found}")]
    Gap { expected: u64, found: u64 },
    #[error("there is a snapshot of the controller's state, but no log behind it")]
    NoLog,
    #[error("the controller's log has a record that this version does not know: {0}")]
    Unknown(serde_json::Error),
    #[error("record {number} of the controller's log does not fit what came before it: {misfit}")]
    Misfit { number: u64, misfit: Misfit },
    #[error("the controller's snapshot is of a state that cannot be: {0}")]
    MisfitSnapshot(Misfit),
    #[error("the controller came to a decision that does not fit its state, and wrote nothing: {0}")]
    Undecided(Misfit),
    #[error("an earlier write of the controller's log failed; what is on the disk is not known")]
    Failed,
}

impl LogError {
    pub fn hint(&self) -> &'static str {
        match self {
            LogError::Disk(_) | LogError::Failed => {
                "see to the disk and start the controller again; it goes on from what was written"
            }
            LogError::Damaged(_)
            | LogError::DamagedSnapshot
            | LogError::Gap { .. }
            | LogError::NoLog
            | LogError::Misfit { .. }
            | LogError::MisfitSnapshot(_) => {
                "the files are not as they were written; restore the folder, or begin with an empty one and submit the \
                 jobs again: they go on from their checkpoints"
            }
            LogError::Undecided(_) => {
                "this is a mistake in shoal: start the controller again, and report it with a copy of its folder"
            }
            LogError::Unknown(_) => "start the version that wrote it",
        }
    }
}

pub struct Log<D> {
    disk: D,
    /// Records before and in it.
    revision: u64,
    bytes: u64,
    failed: bool,
}

/// What was found at opening.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opened {
    /// Bytes that a crash had torn.
    pub cut_bytes: u64,
    /// Records that were replayed onto the snapshot.
    pub replayed: u64,
}

impl<D: Disk> Log<D> {
    /// Opens a log, or makes one, and gives the state that follows from it.
    pub fn open(disk: D, bug: Option<Bug>) -> Result<(Log<D>, State, Opened), LogError> {
        let mut log = Log { disk, revision: 0, bytes: 0, failed: false };
        let names = log.disk.names()?;
        let mut state = State::default();
        if names.contains(SNAPSHOT) {
            let bytes = log.disk.read(SNAPSHOT)?;
            let frame = Frame::first(&bytes).filter(|frame| frame.length() == bytes.len());
            let frame = frame.ok_or(LogError::DamagedSnapshot)?;
            state = frame.content()?;
            if frame.number != state.revision {
                return Err(LogError::DamagedSnapshot);
            }
            state.check().map_err(LogError::MisfitSnapshot)?;
        }
        match names.contains(LOG) {
            true => {}
            false if names.contains(SNAPSHOT) => return Err(LogError::NoLog),
            false => log.begin()?,
        }
        let bytes = log.disk.read(LOG)?;
        let (whole, replayed) = replay(&bytes, &mut state)?;
        let cut_bytes = bytes.len() as u64 - whole;
        log.bytes = bytes.len() as u64;
        if cut_bytes > 0 && bug != Some(Bug::KeepTornTail) {
            log.disk.cut(LOG, whole)?;
            log.disk.sync(LOG)?;
            log.bytes = whole;
        }
        log.revision = state.revision;
        Ok((log, state, Opened { cut_bytes, replayed }))
    }

    /// Of what was appended since the last snapshot.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes records down, not yet for good.
    pub fn append(&mut self, records: &[Record]) -> Result<(), LogError> {
        let frame = frame(self.revision, &records)?;
        self.guard(|disk| disk.append(LOG, &frame))?;
        self.revision += records.len() as u64;
        self.bytes += frame.len() as u64;
        Ok(())
    }

    /// What was appended is on the disk.
    pub fn sync(&mut self) -> Result<(), LogError> {
        self.guard(|disk| disk.sync(LOG))
    }

    /// Writes the state down, and begins the log anew. Between the two the log has records that the state has too.
    pub fn snapshot(&mut self, state: &State) -> Result<(), LogError> {
        assert_eq!(state.revision, self.revision, "the state is what follows from the log");
        let bytes = frame(state.revision, state)?;
        self.guard(|disk| {
            disk.create(SNAPSHOT_PARTIAL, &bytes)?;
            disk.sync(SNAPSHOT_PARTIAL)?;
            disk.rename(SNAPSHOT_PARTIAL, SNAPSHOT)?;
            disk.sync_names()
        })?;
        self.begin()
    }

    #[doc(hidden)]
    pub fn disk_mut(&mut self) -> &mut D {
        &mut self.disk
    }

    #[doc(hidden)]
    pub fn into_disk(self) -> D {
        self.disk
    }

    /// With an empty frame, which says how many records came before.
    fn begin(&mut self) -> Result<(), LogError> {
        let bytes = frame(self.revision, &Vec::<Record>::new())?;
        self.bytes = bytes.len() as u64;
        self.guard(|disk| {
            disk.create(LOG_PARTIAL, &bytes)?;
            disk.sync(LOG_PARTIAL)?;
            disk.rename(LOG_PARTIAL, LOG)?;
            disk.sync_names()
        })
    }

    /// After a failed write or flush nobody knows what is on the disk, and trying again would not tell.
    fn guard(&mut self, write: impl FnOnce(&mut D) -> io::Result<()>) -> Result<(), LogError> {
        if self.failed {
            return Err(LogError::Failed);
        }
        write(&mut self.disk).map_err(|error| {
            self.failed = true;
            LogError::Disk(error)
        })
    }
}

/// Applies the records that the state does not have, and says where the last whole frame ends and how many there were.
fn replay(bytes: &[u8], state: &mut State) -> Result<(u64, u64), LogError> {
    let (mut at, mut replayed) = (0, 0);
    while at < bytes.len() {
        let Some(frame) = Frame::first(&bytes[at..]) else {
            let later = (at + 1..bytes.len()).any(|place| Frame::first(&bytes[place..]).is_some());
            if later {
                return Err(LogError::Damaged(at as u64));
            }
            break;
        };
        let records: Vec<Record> = frame.content()?;
        if frame.number > state.revision {
            return Err(LogError::Gap { expected: state.revision, found: frame.number });
        }
        for (number, record) in (frame.number..).zip(&records) {
            if number == state.revision {
                state.apply(record).map_err(|misfit| LogError::Misfit { number, misfit })?;
                replayed += 1;
            }
        }
        at += frame.length();
    }
    Ok((at as u64, replayed))
}

struct Frame<'a> {
    number: u64,
    content: &'a [u8],
}

impl<'a> Frame<'a> {
    /// The one that the bytes begin with, if it is whole and as it was written.
    fn first(bytes: &'a [u8]) -> Option<Frame<'a>> {
        let length = u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
        let number = u64::from_le_bytes(bytes.get(4..12)?.try_into().ok()?);
        let checksum = bytes.get(12..HEADER_BYTES)?;
        let content = bytes.get(HEADER_BYTES..)?.get(..length)?;
        (checksum == checksum_of(&bytes[..12], content)).then_some(Frame { number, content })
    }

    fn length(&self) -> usize {
        HEADER_BYTES + self.content.len()
    }

    fn content<T: DeserializeOwned>(&self) -> Result<T, LogError> {
        serde_json::from_slice(self.content).map_err(LogError::Unknown)
    }
}

fn frame(number: u64, content: &impl Serialize) -> Result<Vec<u8>, LogError> {
    let content = serde_json::to_vec(content).map_err(LogError::Unknown)?;
    let length = u32::try_from(content.len()).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
    let mut bytes = Vec::with_capacity(HEADER_BYTES + content.len());
    bytes.extend(length.to_le_bytes());
    bytes.extend(number.to_le_bytes());
    let checksum = checksum_of(&bytes, &content);
    bytes.extend(checksum);
    bytes.extend(content);
    Ok(bytes)
}

fn checksum_of(head: &[u8], content: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(head).update(content);
    let mut checksum = [0; CHECKSUM_BYTES];
    checksum.copy_from_slice(&hasher.finalize().as_bytes()[..CHECKSUM_BYTES]);
    checksum
}
