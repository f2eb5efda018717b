//! Documents as samples of their own: each is framed as the tokenizer's model expects it (`[CLS]` before, `[SEP]`
//! after, where it has these) and padded to the sequence; one that is too long is cut into several pieces.
//!
//! Beside the tokens, end to end, lies a file with each document's end. It is read where it is needed, and
//! memory holds two numbers for every thousand documents.

use crate::error::{Error, Result};
use crate::files::OpenFile;
use crate::stream::Stream;
use crate::tokenizer::Tokenizer;
use std::ops::Range;

/// Documents whose ends are read at once.
const BLOCK_DOCUMENTS: u64 = 1024;

/// Bytes of one document's end.
pub(crate) const END_BYTES: u64 = 8;

/// What stands around a document's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    before: Option<u32>,
    after: Option<u32>,
    padding: u32,
}

impl Frame {
    pub fn of(tokenizer: &Tokenizer) -> Self {
        let id = |token: &str| tokenizer.id_of(token);
        Self { before: id("[CLS]"), after: id("[SEP]"), padding: id("[PAD]").unwrap_or(0) }
    }

    /// Tokens that it takes of a sample.
    fn tokens(&self) -> usize {
        self.before.iter().chain(&self.after).count()
    }
}

/// What comes before a block of documents.
#[derive(Debug)]
struct Before {
    pieces: u64,
    tokens: u64,
}

/// The pieces of one or more documents, in order.
#[derive(Debug)]
pub(crate) struct Pieces {
    pub stream: Stream,
    ends: OpenFile,
    documents: u64,
    frame: Frame,
    /// Tokens of a document in one sample, at the most.
    room: usize,
    blocks: Vec<Before>,
    pub count: u64,
    /// BLAKE3 of where documents end and of what stands around them.
    pub cut: blake3::Hash,
}

impl Pieces {
    /// Looks through the ends of `documents` documents, whose tokens `stream` holds.
    pub fn new(
        stream: Stream,
        ends: OpenFile,
        documents: u64,
        frame: Frame,
        sequence: usize,
    ) -> Result<Self> {
        let room = sequence.saturating_sub(frame.tokens());
        if room == 0 {
            return Err(Error::NoRoom { sequence, taken: frame.tokens() });
        }
        let cut = blake3::Hash::from_bytes([0; 32]);
        let mut pieces = Self { stream, ends, documents, frame, room, blocks: Vec::new(), count: 0, cut };
        let mut hasher = blake3::Hasher::new();
        hasher.update(format!("{frame:?}").as_bytes());
        let mut tokens = 0;
        for block in 0..documents.div_ceil(BLOCK_DOCUMENTS) {
            pieces.blocks.push(Before { pieces: pieces.count, tokens });
            for end in pieces.ends_of(block)? {
                // A file that was damaged must not be read past its tokens.
                if end < tokens || end > pieces.stream.tokens {
                    return Err(Error::Damaged { path: pieces.ends.path.clone() });
                }
                pieces.count += (end - tokens).div_ceil(room as u64);
                tokens = end;
                hasher.update(&end.to_le_bytes());
            }
        }
        pieces.cut = hasher.finalize();
        Ok(pieces)
    }

    /// Where the documents of a block end.
    fn ends_of(&self, block: u64) -> Result<Vec<u64>> {
        let first = block * BLOCK_DOCUMENTS;
        let count = BLOCK_DOCUMENTS.min(self.documents - first);
        let mut bytes = vec![0; (count * END_BYTES) as usize];
        self.ends.read_at(&mut bytes, first * END_BYTES)?;
        Ok(bytes.as_chunks().0.iter().map(|end| u64::from_le_bytes(*end)).collect())
    }

    /// The tokens of piece `index`.
    fn find(&self, index: u64) -> Result<Range<u64>> {
        let block = self.blocks.partition_point(|before| before.pieces <= index) - 1;
        let Before { mut pieces, tokens: mut start } = self.blocks[block];
        for end in self.ends_of(block as u64)? {
            let own = (end - start).div_ceil(self.room as u64);
            if index < pieces + own {
                let first = start + (index - pieces) * self.room as u64;
                return Ok(first..end.min(first + self.room as u64));
            }
            (pieces, start) = (pieces + own, end);
        }
        // The file became another one since it was looked through.
        Err(Error::Damaged { path: self.ends.path.clone() })
    }

    /// Reads piece `index` into a sample: which of its tokens are the document's, and how long it is without its
    /// padding.
    pub fn read(&self, index: u64, inputs: &mut [i32]) -> Result<(Range<usize>, usize)> {
        let found = self.find(index)?;
        let mut ids = Vec::new();
        self.stream.read(found.start, (found.end - found.start) as usize, &mut ids)?;
        let framed = self.frame.before.map(i64::from).into_iter().chain(ids.iter().copied());
        let framed: Vec<i64> = framed.chain(self.frame.after.map(i64::from)).collect();
        inputs.fill(self.frame.padding as i32);
        for (input, id) in inputs.iter_mut().zip(&framed) {
            *input = *id as i32;
        }
        let first = usize::from(self.frame.before.is_some());
        Ok((first..first + ids.len(), framed.len()))
    }
}
