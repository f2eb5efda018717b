//! Whether a run folder belongs to this job. `run.json` holds the job's settled keys; the same command may
//! go on with the run, another job may not write over it. Keys that do not change what is learned up to a
//! given step (how long to train, how often to save, how to cut the work) may differ.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{EngineError, Result};

const FILE: &str = "run.json";
const FORMAT: u32 = 1;

/// A job as its run folder remembers it: `section.key` to value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Identity {
    pub format: u32,
    /// Keys a resumed run must share.
    pub fixed: BTreeMap<String, Value>,
    /// Keys it may change.
    pub free: BTreeMap<String, Value>,
    /// The model's `config.json`, for export.
    pub config: Value,
}

impl Identity {
    pub fn new(fixed: BTreeMap<String, Value>, free: BTreeMap<String, Value>, config: Value) -> Identity {
        Identity { format: FORMAT, fixed, free, config }
    }

    /// A short name that two equal jobs share.
    pub fn fingerprint(&self) -> String {
        let text = serde_json::to_string(&self.fixed).unwrap_or_default();
        shoal_plan::table::short_hash(text.as_bytes())
    }

    pub fn read(folder: &Path) -> Result<Option<Identity>> {
        let path = folder.join(FILE);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(EngineError::File { path, source }),
        };
        let bad = |what: String| EngineError::BadRunFile { path: path.clone(), what };
        let identity: Identity =
            serde_json::from_str(&text).map_err(|error| bad(format!("it is not a run record: {error}")))?;
        if identity.format != FORMAT {
            return Err(bad(format!("it is of format {}, this version reads {FORMAT}", identity.format)));
        }
        Ok(Some(identity))
    }

    /// Claims the folder for this job, or finds that it already is this job's.
    pub fn claim(&self, folder: &Path) -> Result {
        if let Some(there) = Identity::read(folder)? {
            self.compare(&there, folder)?;
        }
        std::fs::create_dir_all(folder)
            .map_err(|source| EngineError::File { path: folder.into(), source })?;
        let path = folder.join(FILE);
        let temporary = folder.join("run.json.partial");
        let text = serde_json::to_string_pretty(self).unwrap_or_default() + "\n";
        let write = || -> std::io::Result<()> {
            std::fs::write(&temporary, &text)?;
            std::fs::File::open(&temporary)?.sync_all()?;
            std::fs::rename(&temporary, &path)
        };
        write().map_err(|source| EngineError::File { path: path.clone(), source })
    }

    /// An error where the folder belongs to another job.
    pub fn compare(&self, there: &Identity, folder: &Path) -> Result {
        match self.difference(there) {
            Some(difference) => Err(EngineError::OtherJob { path: folder.to_owned(), difference }),
            None => Ok(()),
        }
    }

    /// Keys that may change and did, in words; `only` says which are worth telling.
    pub fn changes(&self, there: &Identity, only: &[&str]) -> Vec<String> {
        let change = |key: &&str| difference_at(key, there.free.get(*key), self.free.get(*key));
        only.iter().filter_map(change).collect()
    }

    /// The first key that differs, in words.
    fn difference(&self, there: &Identity) -> Option<String> {
        let keys: BTreeSet<&String> = self.fixed.keys().chain(there.fixed.keys()).collect();
        keys.into_iter().find_map(|key| difference_at(key, there.fixed.get(key), self.fixed.get(key)))
    }
}

/// What differs at a key, or inside it where both sides are objects.
fn difference_at(key: &str, before: Option<&Value>, now: Option<&Value>) -> Option<String> {
    if let (Some(Value::Object(before)), Some(Value::Object(now))) = (before, now) {
        let inner: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
        let at = |name: &String| difference_at(&format!("{key}.{name}"), before.get(name), now.get(name));
        return inner.into_iter().find_map(at);
    }
    let show = |value: Option<&Value>| value.map_or("not set".to_owned(), Value::to_string);
    (before != now).then(|| format!("{key} was {} there and is {} now", show(before), show(now)))
}
