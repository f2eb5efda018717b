//! The manifest of a part: what it is of and what lies in which shard. It is JSON that people can read, and its last
//! field is the hash of every byte before it, so that a damaged manifest is noticed before anything in it is believed.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::name::{FORMAT_1_ID, PartName};
use crate::error::{Error, Result};
use crate::text;

/// The format this program writes. It reads the one before too: a whole checkpoint in one folder, which is one part.
pub const FORMAT: u32 = 2;

/// A manifest of a million slices has about this size; more is not a manifest.
pub(super) const MANIFEST_BYTES_MAX: u64 = 500_000_000;

const HASH_BEFORE: &str = ",\n  \"blake3\": \"";
const HASH_AFTER: &str = "\"\n}\n";
const HASH_CHARS: usize = 2 * blake3::OUT_LEN;

/// What a checkpoint is of. All its parts say the same.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Header {
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
}

/// What a part holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub format: u32,
    /// The number of the save. Parts of two saves never mix.
    pub id: u64,
    /// Which part this is, from 1, of how many.
    pub part: usize,
    pub of: usize,
    #[serde(flatten)]
    pub header: Header,
    /// Shards are hashed in blocks of so many bytes, so that some of one can be read and verified alone. In format 1 they
    /// are hashed whole.
    pub block_bytes: Option<u64>,
    pub shards: Vec<Shard>,
}

/// One file of a part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// A name in the part's folder.
    pub file: String,
    pub bytes: u64,
    /// BLAKE3 of each block.
    pub blocks: Vec<String>,
    pub tensors: Vec<TensorEntry>,
}

/// A slice of one tensor in one role.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    pub name: String,
    /// What the shard calls it, if not `name`: one shard may hold several slices of a tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// `parameter`, `first_moment`, `second_moment`, `momentum`, …
    pub role: String,
    /// Of the whole tensor.
    pub shape: Vec<usize>,
    /// The slice's first element, in the order of the flattened tensor.
    pub start: u64,
    /// One past its last.
    pub end: u64,
}

impl TensorEntry {
    pub(super) fn key(&self) -> &str {
        self.key.as_deref().unwrap_or(&self.name)
    }
}

impl Manifest {
    pub(super) fn name(&self) -> PartName {
        PartName { step: self.header.step, id: self.id, of: self.of, part: self.part }
    }

    /// The file's bytes, the hash included. The same manifest gives the same bytes.
    pub(crate) fn encode(&self, path: &Path) -> Result<Vec<u8>> {
        let mut sorted = self.clone();
        // A map of JSON keeps the order of insertion when some other crate asks serde_json to.
        sorted.header.extra.values_mut().for_each(Value::sort_all_objects);
        let mut bytes = serde_json::to_vec_pretty(&sorted)
            .map_err(|error| Error::io("encode the manifest", path)(error.into()))?;
        bytes.truncate(bytes.len() - "\n}".len());
        let hash = blake3::hash(&bytes).to_hex();
        for part in [HASH_BEFORE, hash.as_str(), HASH_AFTER] {
            bytes.extend_from_slice(part.as_bytes());
        }
        Ok(bytes)
    }

    /// Verifies a manifest's bytes, if there are no more of them than a manifest can have.
    pub(crate) fn decode(path: &Path, bytes: Option<Vec<u8>>) -> Result<Manifest> {
        let damaged = |reason: &str| Error::Damaged { path: path.to_owned(), reason: reason.to_owned() };
        let bytes = bytes.ok_or_else(|| damaged("the manifest is larger than any manifest can be"))?;
        let body =
            verified_body(&bytes).ok_or_else(|| damaged("the manifest does not match its own hash"))?;
        let not_understood = |error: serde_json::Error| {
            damaged(&format!("the manifest: {}", text::printable(&error.to_string())))
        };

        let probe: Probe = serde_json::from_slice(&body).map_err(not_understood)?;
        match probe.format {
            FORMAT => serde_json::from_slice(&body).map_err(not_understood),
            1 => {
                let old: Format1 = serde_json::from_slice(&body).map_err(not_understood)?;
                Ok(old.into())
            }
            found => Err(Error::Format { path: path.to_owned(), found, known: FORMAT }),
        }
    }
}

/// The part of a manifest that every format has.
#[derive(Deserialize)]
struct Probe {
    format: u32,
}

/// A manifest as format 1 had it.
#[derive(Deserialize)]
struct Format1 {
    #[serde(flatten)]
    header: Header,
    shards: Vec<Shard1>,
}

#[derive(Deserialize)]
struct Shard1 {
    file: String,
    bytes: u64,
    blake3: String,
    tensors: Vec<TensorEntry>,
}

impl From<Format1> for Manifest {
    fn from(old: Format1) -> Manifest {
        let shard =
            |Shard1 { file, bytes, blake3, tensors }| Shard { file, bytes, blocks: vec![blake3], tensors };
        let shards = old.shards.into_iter().map(shard).collect();
        Manifest { format: 1, id: FORMAT_1_ID, part: 1, of: 1, header: old.header, block_bytes: None, shards }
    }
}

/// The manifest's JSON without the hash, if the hash is that of the JSON.
fn verified_body(bytes: &[u8]) -> Option<Vec<u8>> {
    let rest = bytes.strip_suffix(HASH_AFTER.as_bytes())?;
    let (rest, hash) = rest.split_at_checked(rest.len().checked_sub(HASH_CHARS)?)?;
    let hashed = rest.strip_suffix(HASH_BEFORE.as_bytes())?;
    (blake3::hash(hashed).to_hex().as_bytes() == hash).then(|| [hashed, b"\n}"].concat())
}
