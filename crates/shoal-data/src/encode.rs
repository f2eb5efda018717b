//! Documents to one stream of tokens, in the order of the documents, in bounded memory; with a token between them, or
//! with a note of where each ends.
//!
//! A `tokenizer.json` is slow (megabytes a second), so text is gathered into jobs and several threads
//! encode them side by side; jobs are cut by the text alone, so the tokens depend neither on the number of
//! threads nor on the kind of file the text came from.

use crate::documents::Documents;
use crate::error::{Error, Result};
use crate::stored::{PartFile, TokenWriter};
use crate::tokenizer::Tokenizer;
use std::thread;

/// Bytes of text encoded at once: large enough that seams are rare, small enough for memory, since the
/// tokenizer keeps hundreds of bytes a token while it works (60 MiB a thread for a byte-level BPE).
const CHUNK_BYTES: usize = 256 << 10;

/// How far back from the end of a chunk a seam is looked for.
const SEAM_BYTES_MAX: usize = 64 << 10;

/// Threads that encode, at most: each has a job of its own in memory.
const THREADS_MAX: usize = 8;

/// Encodes documents and writes their tokens.
pub(crate) struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    writer: &'a mut TokenWriter,
    /// Where documents' ends are written, if they are; otherwise a token separates them.
    ends: Option<&'a mut PartFile>,
    /// Told the bytes read so far and in all.
    progress: &'a mut dyn FnMut(u64, u64),
    bytes_read: u64,
    bytes_total: u64,
    /// Documents begun that have any text.
    documents: u64,
    /// Whether the current document has any text yet.
    begun: bool,
    /// The end of the current document's text that is in no job yet.
    tail: String,
    /// The job being filled, and full ones waiting for the next round.
    job: Job,
    round: Vec<Job>,
    threads: usize,
}

/// Text for one thread to encode.
#[derive(Default)]
struct Job {
    /// Pieces of text; the flag says that a document ends after the piece.
    pieces: Vec<(String, bool)>,
    bytes: usize,
}

impl<'a> Encoder<'a> {
    pub fn new(
        tokenizer: &'a Tokenizer,
        writer: &'a mut TokenWriter,
        ends: Option<&'a mut PartFile>,
        bytes_total: u64,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Self {
        let threads = thread::available_parallelism().map_or(1, |threads| threads.get().min(THREADS_MAX));
        Self {
            tokenizer,
            writer,
            ends,
            progress,
            bytes_read: 0,
            bytes_total,
            documents: 0,
            begun: false,
            tail: String::new(),
            job: Job::default(),
            round: Vec::new(),
            threads,
        }
    }

    /// Encodes what is left and says how many documents there were.
    pub fn finish(mut self) -> Result<u64> {
        self.close_job();
        self.run_round()?;
        (self.progress)(self.bytes_total, self.bytes_total);
        Ok(self.documents)
    }

    /// Puts a piece of the current document into the job, and runs a round when enough jobs are full.
    fn add(&mut self, piece: String, ends: bool) -> Result<()> {
        self.job.bytes += piece.len();
        self.job.pieces.push((piece, ends));
        if self.job.bytes >= CHUNK_BYTES {
            self.close_job();
            if self.round.len() == self.threads {
                self.run_round()?;
            }
        }
        Ok(())
    }

    fn close_job(&mut self) {
        let job = std::mem::take(&mut self.job);
        if !job.pieces.is_empty() {
            self.round.push(job);
        }
    }

    /// Encodes the waiting jobs side by side and writes their tokens in order.
    fn run_round(&mut self) -> Result<()> {
        let tokenizer = self.tokenizer;
        let separator = tokenizer.end_of_document().filter(|_| self.ends.is_none());
        let round = std::mem::take(&mut self.round);
        let results: Vec<Result<Encoded>> = thread::scope(|scope| {
            let threads: Vec<_> =
                round.iter().map(|job| scope.spawn(|| job.encode(tokenizer, separator))).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| {
                let (tokenizer, message) = (tokenizer.name(), "the tokenizer's library failed".into());
                thread.join().unwrap_or(Err(Error::Encode { tokenizer, message }))
            };
            threads.into_iter().map(join).collect()
        });
        for encoded in results {
            let Encoded { tokens, ends } = encoded?;
            let before = self.writer.tokens();
            self.writer.push(&tokens)?;
            ends.into_iter().try_for_each(|end| self.note_end(before + end as u64))?;
        }
        Ok(())
    }

    /// A document ends after so many tokens.
    fn note_end(&mut self, tokens: u64) -> Result<()> {
        self.ends.as_mut().map_or(Ok(()), |ends| ends.write(&tokens.to_le_bytes()))
    }
}

/// A job's tokens, and after how many of them documents end.
struct Encoded {
    tokens: Vec<u32>,
    ends: Vec<usize>,
}

impl Job {
    fn encode(&self, tokenizer: &Tokenizer, separator: Option<u32>) -> Result<Encoded> {
        let (mut tokens, mut ends) = (Vec::new(), Vec::new());
        for (piece, is_last) in &self.pieces {
            tokens.extend(tokenizer.encode(piece)?);
            if *is_last {
                tokens.extend(separator);
                ends.push(tokens.len());
            }
        }
        Ok(Encoded { tokens, ends })
    }
}

impl Documents for Encoder<'_> {
    fn text(&mut self, mut piece: &str) -> Result<()> {
        if piece.is_empty() {
            return Ok(());
        }
        if !self.begun {
            self.begun = true;
            self.documents += 1;
            // Bytes have no token of their own for the end of a document: 0 stands between two documents,
            // and a single document is its bytes and nothing else.
            let separated = self.ends.is_none() && self.documents > 1;
            if matches!(self.tokenizer, Tokenizer::Bytes) && separated {
                self.writer.push(&[0])?;
            }
        }
        if matches!(self.tokenizer, Tokenizer::Bytes) {
            return self.writer.push_bytes(piece.as_bytes());
        }
        while !piece.is_empty() {
            // Four bytes more than a chunk: room for one more character, whatever the tail holds.
            let room = CHUNK_BYTES + 4 - self.tail.len();
            let (fits, rest) = piece.split_at(piece.floor_char_boundary(room));
            self.tail.push_str(fits);
            piece = rest;
            if self.tail.len() > CHUNK_BYTES {
                let rest = self.tail.split_off(seam(&self.tail));
                let chunk = std::mem::replace(&mut self.tail, rest);
                self.add(chunk, false)?;
            }
        }
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.begun) {
            return Ok(());
        }
        if matches!(self.tokenizer, Tokenizer::Bytes) {
            return self.note_end(self.writer.tokens());
        }
        let tail = std::mem::take(&mut self.tail);
        self.add(tail, true)
    }

    fn advance(&mut self, bytes: u64) {
        self.bytes_read += bytes;
        (self.progress)(self.bytes_read, self.bytes_total);
    }
}

/// Where to cut a text that is longer than a chunk, within its first `CHUNK_BYTES`.
///
/// Tokenizers split text into words before anything else and most let a word begin with the white space
/// before it, so a cut just before white space that follows a letter or digit leaves the tokens as they
/// would have been. (After punctuation it might not: some take a line's end into the punctuation.) Failing
/// that, the cut goes before any white space, or, in text that has none, between two characters.
fn seam(text: &str) -> usize {
    let end = text.floor_char_boundary(CHUNK_BYTES);
    let start = text.floor_char_boundary(end.saturating_sub(SEAM_BYTES_MAX));
    let mut any_space = None;
    let mut after: Option<(usize, char)> = None;
    for (place, before) in text[start..end].char_indices().rev() {
        if let Some((place, space)) = after
            && space.is_whitespace()
        {
            if before.is_alphanumeric() {
                return start + place;
            }
            if !before.is_whitespace() {
                any_space = any_space.or(Some(start + place));
            }
        }
        after = Some((place, before));
    }
    any_space.unwrap_or(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seam_lies_before_white_space_that_follows_a_word() {
        let filler = "x".repeat(CHUNK_BYTES - 20);
        let words = format!("{filler} one two  three, four and so on");
        let cut = seam(&words);
        assert_eq!(&words[cut..], "  three, four and so on");

        let punctuated = format!("{filler}--- - !!!!!!!!!!!!!!!!!!!!!!");
        assert_eq!(&punctuated[seam(&punctuated)..], " !!!!!!!!!!!!!!!!!!!!!!");
    }

    #[test]
    fn a_text_without_white_space_is_cut_between_characters() {
        let text = "é".repeat(CHUNK_BYTES);
        assert_eq!(seam(&text), CHUNK_BYTES);
        let text = format!("x{text}");
        assert_eq!(seam(&text), CHUNK_BYTES - 1);
    }
}
