//! Text to token ids and back: bytes as they are, or a `tokenizer.json` through the library that defines
//! that format.

use crate::error::{Error, Result};
use serde::de::IgnoredAny;
use std::path::{Path, PathBuf};

/// Ids of the byte tokenizer; the one that follows is the mask, for models that have room for it.
const BYTES: usize = 256;

/// Tokens that end a document, the first one a tokenizer has wins: what base models were pretrained with
/// comes before what a chat turn ends in, since a tokenizer for chat often has both.
const ENDS_OF_DOCUMENT: [&str; 8] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
    "<|im_end|>",
    "[SEP]",
];

/// What stands in the place of a token that a model is to restore.
const MASK: &str = "[MASK]";

/// What turns text into token ids.
#[derive(Debug)]
pub enum Tokenizer {
    /// Every byte of the UTF-8 text is a token.
    Bytes,
    /// A `tokenizer.json`.
    File(Box<TokenizerFile>),
}

/// A `tokenizer.json`, read.
#[derive(Debug)]
pub struct TokenizerFile {
    /// Where it was read from, for messages.
    path: PathBuf,
    /// The library's tokenizer, its truncation and padding off.
    inner: tokenizers::Tokenizer,
    /// The highest id and one.
    vocabulary: usize,
    /// The token that follows each document.
    end_of_document: Option<u32>,
    /// BLAKE3 of the file.
    fingerprint: String,
}

impl Tokenizer {
    /// The tokenizer that `data.tokenizer` names: `bytes`, or the path of a `tokenizer.json` or of the
    /// folder it lies in, from `base` if it is relative.
    pub fn load(spec: &str, base: &Path) -> Result<Self> {
        if spec == "bytes" {
            return Ok(Self::Bytes);
        }
        let mut path = base.join(spec);
        if path.is_dir() {
            path.push("tokenizer.json");
        }
        let refuse = |message: String| Error::TokenizerFile { path: path.clone(), message };
        let content = std::fs::read(&path).map_err(|cause| refuse(cause.to_string()))?;
        // The library panics on some files that are not JSON at all.
        serde_json::from_slice::<IgnoredAny>(&content).map_err(|cause| refuse(cause.to_string()))?;
        let mut inner =
            tokenizers::Tokenizer::from_bytes(&content).map_err(|cause| refuse(cause.to_string()))?;
        // A file may carry the truncation and padding of whoever saved it; both would cut or fill documents.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|cause| refuse(cause.to_string()))?;

        let highest = inner.get_vocab(true).into_values().max();
        let highest = highest.ok_or_else(|| refuse("it has no tokens".into()))?;
        let added = inner.get_added_tokens_decoder();
        let id_of = |end: &&str| added.iter().find(|(_, token)| token.content == *end).map(|(&id, _)| id);
        let end_of_document = ENDS_OF_DOCUMENT.iter().find_map(id_of);
        Ok(Self::File(Box::new(TokenizerFile {
            vocabulary: highest as usize + 1,
            end_of_document,
            fingerprint: blake3::hash(&content).to_hex().to_string(),
            inner,
            path,
        })))
    }

    /// The highest id and one, added tokens included.
    pub fn vocabulary(&self) -> usize {
        match self {
            Self::Bytes => BYTES,
            Self::File(file) => file.vocabulary,
        }
    }

    /// The token that separates documents, if there is one. Byte 0 occurs in no ordinary text.
    pub fn end_of_document(&self) -> Option<u32> {
        match self {
            Self::Bytes => Some(0),
            Self::File(file) => file.end_of_document,
        }
    }

    /// The token that stands for a masked one, if there is one.
    pub(crate) fn mask(&self) -> Option<u32> {
        match self {
            Self::Bytes => Some(BYTES as u32),
            Self::File(file) => file.inner.token_to_id(MASK),
        }
    }

    /// The id of a token, if there is such a token. Bytes have none but themselves.
    pub(crate) fn id_of(&self, token: &str) -> Option<u32> {
        match self {
            Self::Bytes => None,
            Self::File(file) => file.inner.token_to_id(token),
        }
    }

    /// The ids that stand for no piece of text (the mask among them), and those that do, each in order.
    pub(crate) fn special_and_ordinary(&self) -> (Vec<u32>, Vec<u32>) {
        let mut ids: Vec<u32> = match self {
            Self::Bytes => (0..BYTES as u32).collect(),
            Self::File(file) => file.inner.get_vocab(true).into_values().collect(),
        };
        ids.sort_unstable();
        let mut special: Vec<u32> = self.end_of_document().into_iter().chain(self.mask()).collect();
        if let Self::File(file) = self {
            let added = file.inner.get_added_tokens_decoder();
            special.extend(added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id));
        }
        special.sort_unstable();
        special.dedup();
        ids.retain(|id| special.binary_search(id).is_err());
        (special, ids)
    }

    /// The ids of `text`; none are added at its start or end. Special tokens written out in the text
    /// become their ids, as they do when Hugging Face's tokenizers prepare a dataset.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Self::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Self::File(file) => match file.inner.encode_fast(text, false) {
                Ok(encoding) => Ok(encoding.get_ids().to_vec()),
                Err(cause) => Err(Error::Encode { tokenizer: self.name(), message: cause.to_string() }),
            },
        }
    }

    /// The text of `ids`, special tokens included. Bytes that are no UTF-8 become the replacement
    /// character; ids that no token has are left out.
    pub fn decode(&self, ids: &[u32]) -> String {
        match self {
            Self::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Self::File(file) => file.inner.decode(ids, false).unwrap_or_else(|_| {
                // The file's decoder refuses these tokens: their own spelling is the next best.
                ids.iter().filter_map(|&id| file.inner.id_to_token(id)).collect()
            }),
        }
    }

    /// What identifies the tokenizer's content; part of the name of whatever was made with it.
    pub fn fingerprint(&self) -> String {
        match self {
            Self::Bytes => "bytes".into(),
            Self::File(file) => file.fingerprint.clone(),
        }
    }

    /// What messages call it.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Bytes => "the tokenizer \"bytes\"".into(),
            Self::File(file) => format!("the tokenizer {}", file.path.display()),
        }
    }
}
