//! Tokenizing a text source, once: the tokens go to a file in the cache, named after everything they
//! depend on, and the next open finds it there. Where documents are to stay apart, a second file says where each
//! ends.

use crate::documents;
use crate::encode::Encoder;
use crate::error::{Error, Result};
use crate::files::OpenFile;
use crate::pieces::END_BYTES;
use crate::source::Source;
use crate::stored::{self, Header, PartFile, TokenWriter};
use crate::tokenizer::Tokenizer;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Part of every key: to be raised when the same text would give other tokens.
const RECIPE: &str = "tokens 1";

/// The same for documents that nothing separates, as their ends are noted.
const RECIPE_APART: &str = "documents 1";

/// Tokens that have been prepared.
pub(crate) struct Prepared {
    pub tokens: OpenFile,
    pub header: Header,
    /// Where documents end, if they are kept apart: a little-endian u64 each, the tokens up to there.
    pub ends: Option<OpenFile>,
}

/// The files that tokens are kept in.
struct Names {
    tokens: PathBuf,
    ends: Option<PathBuf>,
}

impl Names {
    /// Opens the files; nothing if they are not all there and whole.
    fn open(&self) -> Result<Option<Prepared>> {
        let Some((tokens, header)) = stored::open(&self.tokens)? else { return Ok(None) };
        let Some(name) = &self.ends else { return Ok(Some(Prepared { tokens, header, ends: None })) };
        if !name.try_exists().map_err(|cause| Error::io("look at", name, cause))? {
            return Ok(None);
        }
        let ends = OpenFile::open(name)?;
        let whole = Some(ends.len()?) == header.documents.checked_mul(END_BYTES);
        Ok(whole.then_some(Prepared { tokens, header, ends: Some(ends) }))
    }
}

/// The tokens of `source`: those in the cache, or else made now. `apart` keeps documents apart.
pub(crate) fn prepare(
    source: &Source,
    tokenizer: &Tokenizer,
    field: &str,
    apart: bool,
    cache: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Prepared> {
    let recipe = if apart { RECIPE_APART } else { RECIPE };
    let key = source.key(&[recipe, &tokenizer.fingerprint(), field])?;
    let name = |ending: &str| cache.join(format!("{key}.{ending}"));
    let names = Names { tokens: name("tokens"), ends: apart.then(|| name("ends")) };
    if let Some(prepared) = names.open()? {
        return Ok(prepared);
    }
    let claim = Claim::take(cache, &key)?;
    // Whoever held the claim before may have made it.
    if let Some(prepared) = names.open()? {
        return Ok(prepared);
    }

    let mut writer = TokenWriter::create(&claim.part, tokenizer.vocabulary())?;
    let ends_part = claim.part.with_extension("ends.part");
    let mut ends = names.ends.as_ref().map(|_| PartFile::create(&ends_part)).transpose()?;
    let mut encoder = Encoder::new(tokenizer, &mut writer, ends.as_mut(), source.bytes(), progress);
    for file in &source.files {
        documents::read(source.kind, file, field, &mut encoder)?;
    }
    let documents = encoder.finish()?;
    source.require_unchanged()?;
    if writer.tokens() == 0 {
        return Err(Error::Empty { path: source.path.clone() });
    }
    // The tokens come last: where they are, all is.
    if let Some((ends, name)) = ends.zip(names.ends.as_ref()) {
        ends.rename(name)?;
    }
    writer.finish(documents, &names.tokens)?;
    names.open()?.ok_or(Error::Shrank { path: names.tokens })
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
