//! The controller's records as events: numbered, with the time they were written, for those who follow along. The log
//! is what counts; this is a copy for people, in a file beside it, of which the older half may be dropped.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::sync::Mutex;

use serde::{Deserialize, Serialize};
use shoal_control::controller::record::Record;
use tokio::sync::watch;

use crate::error::{Error, Result};
use crate::folder::Folder;

const FILE: &str = "events.jsonl";
const OLDER: &str = "events.older.jsonl";
const FILE_BYTES_MAX: u64 = 1 << 24;
const EVENTS_MAX: usize = 20_000;
/// In one answer.
pub const ANSWER_MAX: usize = 1_000;

/// One record, as those who ask for events get it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Noted {
    /// Records up to and with this one.
    pub revision: u64,
    /// Milliseconds since 1970.
    pub at_ms: u64,
    pub record: Record,
}

pub struct History {
    inner: Mutex<Inner>,
    /// The newest revision: what those who wait look at.
    newest: watch::Sender<u64>,
}

struct Inner {
    events: VecDeque<Noted>,
    file: File,
    bytes: u64,
}

impl History {
    /// Goes on from what the folder has; `revision` is the log's.
    pub fn open(folder: &Folder, revision: u64) -> Result<History> {
        let texts = [folder.read(OLDER)?, folder.read(FILE)?];
        let file = folder.append_to(FILE)?;
        let lines = texts.iter().flatten().flat_map(|text| text.lines());
        let mut events: VecDeque<Noted> = VecDeque::new();
        // A line that a crash tore is none.
        for noted in lines.filter_map(|line| serde_json::from_str::<Noted>(line).ok()) {
            if events.back().is_none_or(|last| last.revision < noted.revision) {
                events.push_back(noted);
            }
        }
        if events.back().is_some_and(|last| last.revision > revision) {
            // Of a log that is no longer there.
            file.set_len(0).map_err(Error::at(folder.path()))?;
            events.clear();
        }
        events.drain(..events.len().saturating_sub(EVENTS_MAX));
        let bytes = file.metadata().map_err(Error::at(folder.path()))?.len();
        let inner = Mutex::new(Inner { events, file, bytes });
        Ok(History { inner, newest: watch::Sender::new(revision) })
    }

    /// Takes in what is on the disk as `revision` and the records before it.
    pub fn add(&self, folder: &Folder, revision: u64, at_ms: u64, records: Vec<Record>) -> Result {
        if records.is_empty() {
            return Ok(());
        }
        let first = revision + 1 - records.len() as u64;
        let mut inner = self.lock();
        let mut text = Vec::new();
        for (revision, record) in (first..).zip(records) {
            let noted = Noted { revision, at_ms, record };
            serde_json::to_writer(&mut text, &noted).expect("an event is JSON");
            text.push(b'\n');
            inner.events.push_back(noted);
        }
        while inner.events.len() > EVENTS_MAX {
            inner.events.pop_front();
        }
        if inner.bytes > FILE_BYTES_MAX {
            let (file, older) = (folder.path().join(FILE), folder.path().join(OLDER));
            std::fs::rename(&file, older).map_err(Error::at(&file))?;
            (inner.file, inner.bytes) = (folder.append_to(FILE)?, 0);
        }
        inner.file.write_all(&text).map_err(Error::at(&folder.path().join(FILE)))?;
        inner.bytes += text.len() as u64;
        drop(inner);
        self.newest.send_replace(revision);
        Ok(())
    }

    /// Those after a revision, oldest first.
    pub fn after(&self, revision: u64) -> Vec<Noted> {
        let inner = self.lock();
        let from = inner.events.partition_point(|noted| noted.revision <= revision);
        inner.events.range(from..).take(ANSWER_MAX).cloned().collect()
    }

    /// All that are remembered.
    pub fn all(&self) -> Vec<Noted> {
        self.lock().events.iter().cloned().collect()
    }

    pub fn newest(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().expect("nobody panics while holding it")
    }
}
