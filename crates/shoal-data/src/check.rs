//! The one pass over files that hold tokens or images already: every one is looked at before training starts, so that
//! a file made for another model is refused in the first minute and not at the step that meets the id. What
//! was found is noted in the cache, so the pass is not repeated for files that have not changed.

use crate::error::{Error, Result};
use crate::images::Images;
use crate::pictures::Pictures;
use crate::prepare::Claim;
use crate::rows::Rows;
use crate::source::Source;
use crate::stored::PartFile;
use crate::stream::Stream;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Part of every key: to be raised when the pass looks at something else.
const RECIPE: &str = "checked 1";

/// Tokens looked at at once.
const BLOCK_TOKENS: usize = 1 << 18;

/// Pictures that a thread decodes before the others are waited for.
const PICTURES_EACH: u64 = 32;

/// What the pass found.
#[derive(Serialize, Deserialize)]
pub(crate) struct Checked {
    /// The largest id: the files suit any model whose vocabulary is larger.
    largest: i64,
    /// BLAKE3 of the samples.
    pub content: String,
}

/// What the pass goes through: it reads just as training does, and so meets what training would.
pub(crate) enum Subject<'a> {
    Stream(&'a Stream),
    Rows { rows: &'a Rows, sequence: usize },
    Images(&'a Images),
    Pictures(&'a Pictures),
}

/// The note on `source` in the cache if it has one that holds for `vocabulary`, else a new one. `reading`
/// is what the samples depend on besides the files.
pub(crate) fn check(
    source: &Source,
    subject: &Subject<'_>,
    reading: &str,
    vocabulary: usize,
    cache: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Checked> {
    let key = source.key(&[RECIPE, reading])?;
    let name = cache.join(format!("{key}.checked"));
    if let Some(checked) = read_note(&name, vocabulary) {
        return Ok(checked);
    }
    let claim = Claim::take(cache, &key)?;
    if let Some(checked) = read_note(&name, vocabulary) {
        return Ok(checked);
    }
    let checked = match subject {
        Subject::Stream(stream) => check_stream(stream, source.bytes(), progress)?,
        Subject::Rows { rows, sequence } => check_rows(rows, *sequence, source.bytes(), progress)?,
        Subject::Images(images) => check_images(images, source.bytes(), progress)?,
        Subject::Pictures(pictures) => check_pictures(pictures, source.bytes(), progress)?,
    };
    source.require_unchanged()?;
    let note = serde_json::to_vec(&checked).map_err(|error| Error::io("write", &name, error.into()))?;
    let mut part = PartFile::create(&claim.part)?;
    part.write(&note)?;
    part.rename(&name)?;
    Ok(checked)
}

/// A note that cannot be read, or is about ids this model does not have, is as good as none: the pass then
/// finds the place to name.
fn read_note(name: &Path, vocabulary: usize) -> Option<Checked> {
    let note = std::fs::read(name).ok()?;
    let checked: Checked = serde_json::from_slice(&note).ok()?;
    let suits = usize::try_from(checked.largest).is_ok_and(|largest| largest < vocabulary);
    suits.then_some(checked)
}

fn check_stream(stream: &Stream, bytes: u64, progress: &mut dyn FnMut(u64, u64)) -> Result<Checked> {
    let mut hasher = blake3::Hasher::new();
    let mut largest = 0;
    let mut ids = Vec::new();
    let mut scratch = Vec::new();
    let mut start = 0;
    while start < stream.tokens {
        let count = (stream.tokens - start).min(BLOCK_TOKENS as u64);
        stream.read(start, count as usize, &mut ids)?;
        start += count;
        scratch.clear();
        scratch.extend(ids.iter().flat_map(|&id| (id as u32).to_le_bytes()));
        hasher.update(&scratch);
        largest = ids.iter().copied().fold(largest, i64::max);
        progress(share(bytes, start, stream.tokens), bytes);
    }
    Ok(Checked { largest, content: hasher.finalize().to_hex().to_string() })
}

fn check_rows(
    rows: &Rows,
    sequence: usize,
    bytes: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Checked> {
    let mut hasher = blake3::Hasher::new();
    let mut largest = 0;
    let mut inputs = vec![0; sequence];
    let mut labels = vec![0; sequence];
    let mut scratch = Vec::new();
    for row in 0..rows.rows {
        rows.read(row, &mut inputs, &mut labels)?;
        scratch.clear();
        let ids = inputs.iter().chain(&labels);
        scratch.extend(ids.clone().flat_map(|id| id.to_le_bytes()));
        hasher.update(&scratch);
        largest = ids.copied().fold(largest, i32::max);
        progress(share(bytes, row + 1, rows.rows), bytes);
    }
    Ok(Checked { largest: i64::from(largest), content: hasher.finalize().to_hex().to_string() })
}

fn check_images(images: &Images, bytes: u64, progress: &mut dyn FnMut(u64, u64)) -> Result<Checked> {
    let mut hasher = blake3::Hasher::new();
    let mut largest = 0;
    let mut pixels = vec![0.0; images.elements()];
    let mut scratch = Vec::new();
    for index in 0..images.count {
        let label = images.read_stored(index, &mut pixels)?;
        scratch.clear();
        scratch.extend(pixels.iter().flat_map(|pixel| pixel.to_le_bytes()));
        scratch.extend(label.to_le_bytes());
        hasher.update(&scratch);
        largest = largest.max(label);
        progress(share(bytes, index + 1, images.count), bytes);
    }
    Ok(Checked { largest: i64::from(largest), content: hasher.finalize().to_hex().to_string() })
}

/// Decodes every picture, on all processors, a block at a time.
fn check_pictures(pictures: &Pictures, bytes: u64, progress: &mut dyn FnMut(u64, u64)) -> Result<Checked> {
    let mut hasher = blake3::Hasher::new();
    for name in &pictures.classes {
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
    }
    let processors = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let mut first = 0;
    while first < pictures.count() {
        let end = (first + processors * PICTURES_EACH).min(pictures.count());
        let hashes = |worker: u64| -> Result<Vec<blake3::Hash>> {
            let from = (first + worker * PICTURES_EACH).min(end);
            let to = (from + PICTURES_EACH).min(end);
            (from..to).map(|index| Ok(pictures.decode(index)?.1)).collect()
        };
        let block: Result<Vec<Vec<blake3::Hash>>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..processors).map(|worker| scope.spawn(move || hashes(worker))).collect();
            let ended = threads.into_iter().map(|thread| thread.join());
            ended.map(|ended| ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        });
        for (index, hash) in (first..end).zip(block?.iter().flatten()) {
            hasher.update(&pictures.label(index).to_le_bytes());
            hasher.update(hash.as_bytes());
        }
        first = end;
        progress(share(bytes, first, pictures.count()), bytes);
    }
    let largest = pictures.classes.len() as i64 - 1;
    Ok(Checked { largest, content: hasher.finalize().to_hex().to_string() })
}

/// The part of `bytes` that `done` of `total` is, for progress.
fn share(bytes: u64, done: u64, total: u64) -> u64 {
    (u128::from(bytes) * u128::from(done) / u128::from(total.max(1))) as u64
}
