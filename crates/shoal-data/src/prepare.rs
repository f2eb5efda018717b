//! Tokenizing a text source, once: the tokens go to a file in the cache, named after everything they
//! depend on, and the next open finds it there.

use crate::documents;
use crate::encode::Encoder;
use crate::error::{Error, Result};
use crate::files::OpenFile;
use crate::source::Source;
use crate::stored::{self, Header, TokenWriter};
use crate::tokenizer::Tokenizer;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Part of every key: to be raised when the same text would give other tokens.
const RECIPE: &str = "tokens 1";

/// The tokens of `source`: those in the cache, or else made now.
pub(crate) fn prepare(
    source: &Source,
    tokenizer: &Tokenizer,
    field: &str,
    cache: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(OpenFile, Header)> {
    let key = source.key(&[RECIPE, &tokenizer.fingerprint(), field])?;
    let name = cache.join(format!("{key}.tokens"));
    if let Some(prepared) = stored::open(&name)? {
        return Ok(prepared);
    }
    let claim = Claim::take(cache, &key)?;
    // Whoever held the claim before may have made it.
    if let Some(prepared) = stored::open(&name)? {
        return Ok(prepared);
    }

    let mut writer = TokenWriter::create(&claim.part, tokenizer.vocabulary())?;
    let mut encoder = Encoder::new(tokenizer, &mut writer, source.bytes(), progress);
    for file in &source.files {
        documents::read(source.kind, file, field, &mut encoder)?;
    }
    let documents = encoder.finish()?;
    source.require_unchanged()?;
    if writer.tokens() == 0 {
        return Err(Error::Empty { path: source.path.clone() });
    }
    writer.finish(documents, &name)?;
    stored::open(&name)?.ok_or(Error::Shrank { path: name })
}

/// The right to make what `key` names: of several processes on a host that open one dataset at the same
/// time, one does the work and the others wait for it. The system lets go of it if the process dies.
pub(crate) struct Claim {
    /// Where to write meanwhile.
    pub part: PathBuf,
    _lock: File,
}

impl Claim {
    pub fn take(cache: &Path, key: &str) -> Result<Self> {
        std::fs::create_dir_all(cache).map_err(|cause| Error::io("create", cache, cause))?;
        let path = cache.join(format!("{key}.lock"));
        let lock = File::create(&path).map_err(|cause| Error::io("create", &path, cause))?;
        let part = match lock.lock() {
            Ok(()) => cache.join(format!("{key}.part")),
            // Some network file systems have no locks: then all do the work, each in a file of its own, and
            // the last to finish replaces what the others made by the same.
            Err(_) => cache.join(format!("{key}.{}.part", std::process::id())),
        };
        Ok(Self { part, _lock: lock })
    }
}
