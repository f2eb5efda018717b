//! Tokens in a row, over one or more files, cut into windows: a window is `sequence` inputs and one token
//! more, and the next begins with that one, so every token but the very first is a label exactly once.

use crate::IGNORED;
use crate::error::{Error, Result};
use crate::files::{Integer, OpenFile};

/// One file's stretch of the stream.
#[derive(Debug)]
struct Segment {
    file: OpenFile,
    integer: Integer,
    /// Where in the file its tokens begin.
    offset: u64,
    /// The number in the stream of its first token.
    first: u64,
    tokens: u64,
}

/// A row of tokens.
#[derive(Debug)]
pub(crate) struct Stream {
    segments: Vec<Segment>,
    pub tokens: u64,
    /// The model's vocabulary: no id may reach it.
    vocabulary: usize,
}

impl Stream {
    pub fn new(vocabulary: usize) -> Self {
        Self { segments: Vec::new(), tokens: 0, vocabulary }
    }

    /// Appends the `tokens` tokens that begin at `offset` of `file`.
    pub fn append(&mut self, file: OpenFile, integer: Integer, offset: u64, tokens: u64) {
        self.segments.push(Segment { file, integer, offset, first: self.tokens, tokens });
        self.tokens += tokens;
    }

    /// Windows of `sequence` labels, the last of which may be short.
    pub fn windows(&self, sequence: usize) -> u64 {
        self.tokens.saturating_sub(1).div_ceil(sequence as u64)
    }

    /// Replaces `ids` by the `count` tokens from number `start` on.
    pub fn read(&self, start: u64, count: usize, ids: &mut Vec<i64>) -> Result<()> {
        assert!(start + count as u64 <= self.tokens, "tokens beyond the stream's end");
        ids.clear();
        let mut bytes = Vec::new();
        let mut segment = self.segments.partition_point(|segment| segment.first + segment.tokens <= start);
        while ids.len() < count {
            let Segment { file, integer, offset, first, tokens } = &self.segments[segment];
            let within = start + ids.len() as u64 - first;
            let wanted = (count - ids.len()).min(usize::try_from(tokens - within).unwrap_or(usize::MAX));
            bytes.resize(wanted * integer.width(), 0);
            file.read_at(&mut bytes, offset + within * integer.width() as u64)?;
            let before = ids.len();
            integer.decode(&bytes, ids);
            let outside = |id: &i64| usize::try_from(*id).map_or(true, |id| id >= self.vocabulary);
            if let Some(place) = ids[before..].iter().position(outside) {
                return Err(Error::OutOfVocabulary {
                    path: file.path.clone(),
                    place: format!("token {}", within + place as u64),
                    id: ids[before + place],
                    vocabulary: self.vocabulary,
                });
            }
            segment += 1;
        }
        Ok(())
    }

    /// Reads the inputs of window `index` alone and says how many there are; where the stream ends before the
    /// window does, the others are 0.
    pub fn read_inputs(&self, index: u64, inputs: &mut [i32]) -> Result<usize> {
        let start = index * inputs.len() as u64;
        let left = usize::try_from(self.tokens - start).unwrap_or(usize::MAX);
        let mut ids = Vec::new();
        self.read(start, left.min(inputs.len()), &mut ids)?;
        inputs.fill(0);
        for (input, &id) in inputs.iter_mut().zip(&ids) {
            *input = id as i32;
        }
        Ok(ids.len())
    }

    /// Reads window `index`. Where the stream ends before the window does, inputs are 0 and labels ignored.
    pub fn read_window(&self, index: u64, inputs: &mut [i32], labels: &mut [i32]) -> Result<()> {
        let sequence = inputs.len();
        let start = index * sequence as u64;
        let left = usize::try_from(self.tokens - start).unwrap_or(usize::MAX);
        let mut ids = Vec::new();
        self.read(start, left.min(sequence + 1), &mut ids)?;
        inputs.fill(0);
        labels.fill(IGNORED);
        for (input, &id) in inputs.iter_mut().zip(&ids) {
            *input = id as i32;
        }
        for (label, &id) in labels.iter_mut().zip(&ids[1..]) {
            *label = id as i32;
        }
        Ok(())
    }
}
