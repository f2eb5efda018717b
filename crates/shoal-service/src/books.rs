//! What every counted step of every job came to: one line a step, in a file a job. Lines come from workers, who say them
//! until they are kept, so a step may come twice: the later line stands. A step that was counted though the only ones who
//! had its line died gets one from the closing sums, which the controller has.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use serde_json::Value;
use shoal_control::message::JobId;
use tokio::sync::watch;

use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::wire::StepLine;

/// In one answer.
pub const ANSWER_MAX: usize = 1_000;

/// The files of all jobs.
pub struct Books {
    books: Mutex<BTreeMap<JobId, Book>>,
    /// Counts what was written, for those who wait.
    written: watch::Sender<u64>,
}

struct Book {
    file: File,
    bytes: u64,
    /// Where each step's line lies.
    lines: BTreeMap<u64, (u64, usize)>,
}

/// The name follows from the job's number alone: nothing that anybody says becomes a path.
fn file_name(job: JobId) -> String {
    format!("steps-{}.jsonl", job.0)
}

impl Books {
    pub fn new() -> Books {
        Books { books: Mutex::new(BTreeMap::new()), written: watch::Sender::new(0) }
    }

    /// Opens the book of a job that there is.
    pub fn open(&self, folder: &Folder, job: JobId) -> Result {
        let name = file_name(job);
        let path = folder.path().join(&name);
        let text = folder.read(&name)?.unwrap_or_default();
        let file = folder.append_to(&name)?;
        let mut book = Book { file, bytes: 0, lines: BTreeMap::new() };
        for line in text.split_inclusive('\n') {
            // What a crash tore is cut off, and comes again.
            let Some(step) = step_of(line).filter(|_| line.ends_with('\n')) else {
                book.file.set_len(book.bytes).map_err(Error::at(&path))?;
                break;
            };
            book.note(step, line.len());
        }
        self.lock().insert(job, book);
        Ok(())
    }

    /// Writes lines down. `None` if there is no such job.
    pub fn keep(&self, job: JobId, lines: &[StepLine]) -> Option<std::io::Result<()>> {
        let mut books = self.lock();
        let kept = books.get_mut(&job)?.keep(lines);
        drop(books);
        self.written.send_modify(|count| *count += 1);
        Some(kept)
    }

    /// Whether a step has its line.
    pub fn has(&self, job: JobId, step: u64) -> bool {
        self.lock().get(&job).is_some_and(|book| book.lines.contains_key(&step))
    }

    /// The lines after a step and up to another, in order.
    pub fn after(&self, job: JobId, step: u64, upto: u64) -> std::io::Result<Vec<Value>> {
        let books = self.lock();
        let Some(book) = books.get(&job).filter(|_| step < upto) else { return Ok(Vec::new()) };
        let lines = book.lines.range(step + 1..=upto).take(ANSWER_MAX);
        lines.map(|(_, (at, length))| book.read(*at, *length)).collect()
    }

    pub fn written(&self) -> watch::Receiver<u64> {
        self.written.subscribe()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<JobId, Book>> {
        self.books.lock().expect("nobody panics while holding it")
    }
}

impl Default for Books {
    fn default() -> Books {
        Books::new()
    }
}

fn step_of(line: &str) -> Option<u64> {
    serde_json::from_str::<Value>(line).ok()?.get("step")?.as_u64()
}

impl Book {
    fn keep(&mut self, lines: &[StepLine]) -> std::io::Result<()> {
        for line in lines {
            let mut record = line.record.clone();
            record.insert("step".into(), line.step.into());
            let mut text = serde_json::to_string(&record)?;
            text.push('\n');
            self.file.write_all(text.as_bytes()).inspect_err(|_| {
                // What is half written must not stand before the next line.
                let _ = self.file.set_len(self.bytes);
            })?;
            self.note(line.step, text.len());
        }
        Ok(())
    }

    fn note(&mut self, step: u64, length: usize) {
        self.lines.insert(step, (self.bytes, length));
        self.bytes += length as u64;
    }

    fn read(&self, at: u64, length: usize) -> std::io::Result<Value> {
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, at)?;
        Ok(serde_json::from_slice(&bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(step: u64, loss: f64) -> StepLine {
        let record = serde_json::json!({ "loss": loss });
        StepLine { step, record: record.as_object().expect("an object").clone() }
    }

    #[test]
    fn each_step_has_its_latest_line_also_after_a_torn_write() {
        let parent = tempfile::tempdir().expect("a folder");
        let folder = Folder::open(parent.path()).expect("it opens");
        let (job, books) = (JobId(1), Books::new());
        assert!(books.keep(job, &[line(1, 1.0)]).is_none(), "there is no such job");
        books.open(&folder, job).expect("it opens");
        books.keep(job, &[line(1, 4.0), line(2, 3.0)]).expect("a job").expect("written");
        books.keep(job, &[line(2, 2.5), line(3, 2.0)]).expect("a job").expect("written");
        let path = parent.path().join(file_name(job));
        std::fs::OpenOptions::new()
            .append(true)
            .open(&path)
            .and_then(|mut file| file.write_all(b"{\"step\":4,\"lo"))
            .expect("torn");

        let books = Books::new();
        books.open(&folder, job).expect("it opens");
        books.keep(job, &[line(4, 1.5)]).expect("a job").expect("written");
        let losses = |after, upto| {
            let lines = books.after(job, after, upto).expect("it reads");
            lines.iter().map(|line| line["loss"].as_f64().expect("a loss")).collect::<Vec<f64>>()
        };
        assert_eq!(losses(0, 9), [4.0, 2.5, 2.0, 1.5]);
        assert_eq!(losses(1, 3), [2.5, 2.0]);
        assert_eq!(losses(4, 2), [0.0; 0]);
    }
}
