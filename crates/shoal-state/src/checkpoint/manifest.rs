//! The manifest of a checkpoint: what it is of and what lies in which shard. It is JSON that people can
//! read, and its last field is the hash of every byte before it, so that a damaged manifest is noticed
//! before anything in it is believed.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::disk;
use crate::error::{Error, Result};
use crate::text;

/// The format this program writes, and the only one it reads.
pub const FORMAT: u32 = 1;

/// A manifest of a million slices has about this size; more is not a manifest.
const MANIFEST_BYTES_MAX: u64 = 500_000_000;

const HASH_BEFORE: &str = ",\n  \"blake3\": \"";
const HASH_AFTER: &str = "\"\n}\n";
const HASH_CHARS: usize = 2 * blake3::OUT_LEN;

/// What a checkpoint holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub format: u32,
    /// The fingerprint of the job: a checkpoint continues this job and no other.
    pub job: String,
    /// Steps done.
    pub step: u64,
    /// Samples consumed: where the data goes on.
    pub position: u64,
    pub seed: u64,
    /// Which generator `seed` belongs to.
    pub rng: String,
    /// The plan that was in force.
    pub plan: String,
    /// Whatever else the run needs to go on, by name.
    pub extra: BTreeMap<String, Value>,
    pub shards: Vec<Shard>,
}

/// One file of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// A name in the checkpoint's folder.
    pub file: String,
    pub bytes: u64,
    pub blake3: String,
    pub tensors: Vec<TensorEntry>,
}

/// A slice of one tensor in one role. The shard holds it under `name`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    pub name: String,
    /// `parameter`, `first_moment`, `second_moment`, `momentum`, …
    pub role: String,
    /// Of the whole tensor.
    pub shape: Vec<usize>,
    /// The slice's first element, in the order of the flattened tensor.
    pub start: u64,
    /// One past its last.
    pub end: u64,
}

impl Manifest {
    /// The file's bytes, the hash included. The same manifest gives the same bytes.
    pub(crate) fn encode(&self, path: &Path) -> Result<Vec<u8>> {
        let mut sorted = self.clone();
        // A map of JSON keeps the order of insertion when some other crate asks serde_json to.
        sorted.extra.values_mut().for_each(Value::sort_all_objects);
        let mut bytes = serde_json::to_vec_pretty(&sorted)
            .map_err(|error| Error::io("encode the manifest", path)(error.into()))?;
        bytes.truncate(bytes.len() - "\n}".len());
        let hash = blake3::hash(&bytes).to_hex();
        for part in [HASH_BEFORE, hash.as_str(), HASH_AFTER] {
            bytes.extend_from_slice(part.as_bytes());
        }
        Ok(bytes)
    }

    /// Reads and verifies a manifest.
    pub(crate) fn read(path: &Path) -> Result<Manifest> {
        let damaged = |reason: &str| Error::Damaged { path: path.to_owned(), reason: reason.to_owned() };
        let bytes = disk::read_bounded(path, MANIFEST_BYTES_MAX)?
            .ok_or_else(|| damaged("the manifest is larger than any manifest can be"))?;
        let body =
            verified_body(&bytes).ok_or_else(|| damaged("the manifest does not match its own hash"))?;
        let not_understood = |error: serde_json::Error| {
            damaged(&format!("the manifest: {}", text::printable(&error.to_string())))
        };

        let probe: Probe = serde_json::from_slice(&body).map_err(not_understood)?;
        if probe.format != FORMAT {
            return Err(Error::Format { path: path.to_owned(), found: probe.format, known: FORMAT });
        }
        serde_json::from_slice(&body).map_err(not_understood)
    }
}

/// The part of a manifest that every format has.
#[derive(Deserialize)]
struct Probe {
    format: u32,
}

/// The manifest's JSON without the hash, if the hash is that of the JSON.
fn verified_body(bytes: &[u8]) -> Option<Vec<u8>> {
    let rest = bytes.strip_suffix(HASH_AFTER.as_bytes())?;
    let (rest, hash) = rest.split_at_checked(rest.len().checked_sub(HASH_CHARS)?)?;
    let hashed = rest.strip_suffix(HASH_BEFORE.as_bytes())?;
    (blake3::hash(hashed).to_hex().as_bytes() == hash).then(|| [hashed, b"\n}"].concat())
}
