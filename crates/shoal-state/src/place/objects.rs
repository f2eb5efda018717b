//! An object store: S3, Google's or Azure's, through one library. There is nothing to rename and nothing to flush: an
//! object is there whole once its upload is acknowledged. So a part is finished when its manifest is there, which is put
//! last, and removed by taking the manifest away first. The rest of the program waits for answers where it stands, so the
//! library's asynchronous calls are waited for here.
//!
//! Credentials come from the environment alone and are taken out of whatever the library says.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::TryStreamExt;
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload, WriteMultipart};
use tokio::runtime::{Builder, Runtime};

use super::{Listed, MANIFEST_FILE, Output, Place, Source, Unfinished};
use crate::error::{Error, Result};
use crate::text;

/// Smaller objects are put at once, larger ones in pieces of this size. S3 takes ten thousand pieces of at least 5 MiB.
const PIECE_BYTES: usize = 8 << 20;

/// Pieces of an object under way at once.
const PIECES_AT_ONCE: usize = 4;

/// What stands in messages where a secret was.
const HIDDEN: &str = "(hidden)";

#[derive(Debug)]
pub(crate) struct Objects {
    root: PathBuf,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    store: Box<dyn ObjectStore>,
    /// Of all keys.
    prefix: Key,
    runtime: Runtime,
    /// Values of options that nobody should read.
    secrets: Vec<String>,
}

impl Objects {
    /// The store that a URL names. `options` are the library's, by the names that the environment has for them.
    pub(crate) fn open(url: &str, options: &BTreeMap<String, String>) -> Result<Objects> {
        let secrets = options.iter().filter(|(name, value)| is_secret(name) && !value.is_empty());
        let secrets: Vec<String> = secrets.map(|(_, value)| value.clone()).collect();
        let root = PathBuf::from(url);
        let refuse =
            |reason: String| Error::Objects { path: root.clone(), action: "use the object store", reason };
        let parsed = url::Url::parse(url).map_err(|error| refuse(error.to_string()))?;
        // Who has set another one has chosen it.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let (store, prefix) = object_store::parse_url_opts(&parsed, options)
            .map_err(|error| refuse(without_secrets(&error.to_string(), &secrets)))?;
        let runtime =
            Builder::new_multi_thread().worker_threads(1).thread_name("objects").enable_all().build();
        let runtime = runtime.map_err(Error::io("start a thread for", &root))?;
        Ok(Objects { root, shared: Arc::new(Shared { store, prefix, runtime, secrets }) })
    }

    fn key(&self, part: &str, file: &str) -> Key {
        self.shared.prefix.clone().join(part).join(file)
    }
}

impl Shared {
    fn wait<T>(
        &self,
        action: &'static str,
        path: &Path,
        answer: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T> {
        self.runtime.block_on(answer).map_err(|error| {
            let reason = without_secrets(&error.to_string(), &self.secrets);
            Error::Objects { path: path.to_owned(), action, reason }
        })
    }
}

fn is_secret(option: &str) -> bool {
    let option = option.to_ascii_lowercase();
    ["secret", "token", "key", "password", "credential", "sas"].iter().any(|word| option.contains(word))
}

fn without_secrets(message: &str, secrets: &[String]) -> String {
    let hidden = secrets.iter().fold(message.to_owned(), |message, secret| message.replace(secret, HIDDEN));
    text::printable(&hidden)
}

impl Place for Objects {
    fn root(&self) -> &Path {
        &self.root
    }

    fn list(&self) -> Result<Vec<Listed>> {
        let shared = &self.shared;
        let objects = shared.store.list(Some(&shared.prefix)).try_collect::<Vec<_>>();
        let mut parts: BTreeMap<String, BTreeMap<String, u64>> = BTreeMap::new();
        for object in shared.wait("list", &self.root, objects)? {
            let names: Option<Vec<_>> = object.location.prefix_match(&shared.prefix).map(Iterator::collect);
            // Whatever else lies there is none of ours.
            if let Some([part, file]) = names.as_deref() {
                let files = parts.entry(part.as_ref().to_owned()).or_default();
                files.insert(file.as_ref().to_owned(), object.size);
            }
        }
        let listed = |(name, files): (String, BTreeMap<String, u64>)| {
            let finished = files.contains_key(MANIFEST_FILE);
            Listed { name, finished, files }
        };
        Ok(parts.into_iter().map(listed).collect())
    }

    fn begin<'a>(&'a self, part: &str, _bytes: u64) -> Result<Box<dyn Unfinished + 'a>> {
        if let Some(left) = self.list()?.into_iter().find(|listed| listed.name == part) {
            self.remove(&left)?;
        }
        Ok(Box::new(Upload { objects: self, part: part.to_owned(), begun: Vec::new(), is_finished: false }))
    }

    fn remove(&self, part: &Listed) -> Result<()> {
        let manifest = part.files.keys().filter(|file| *file == MANIFEST_FILE);
        let others = part.files.keys().filter(|file| *file != MANIFEST_FILE);
        for file in manifest.chain(others) {
            let path = self.path(&part.name).join(file);
            let key = self.key(&part.name, file);
            let removed = async {
                match self.shared.store.delete(&key).await {
                    Err(object_store::Error::NotFound { .. }) => Ok(()),
                    other => other,
                }
            };
            self.shared.wait("remove", &path, removed)?;
        }
        Ok(())
    }

    fn read(&self, part: &str, file: &str, bytes_max: u64) -> Result<Option<Vec<u8>>> {
        let (path, key) = (self.path(part).join(file), self.key(part, file));
        let content = async {
            let found = self.shared.store.get(&key).await?;
            if found.meta.size > bytes_max {
                return Ok(None);
            }
            Ok(Some(found.bytes().await?.to_vec()))
        };
        self.shared.wait("read", &path, content)
    }

    fn open(&self, part: &str, file: &str) -> Result<(Box<dyn Source>, u64)> {
        let (path, key) = (self.path(part).join(file), self.key(part, file));
        let found = self.shared.wait("look at", &path, self.shared.store.head(&key))?;
        Ok((Box::new(Object { path, key, shared: self.shared.clone() }), found.size))
    }

    fn tidy(&self) -> Result<()> {
        Ok(())
    }

    fn is_near(&self) -> bool {
        false
    }
}

/// An object, read in ranges.
#[derive(Debug)]
struct Object {
    path: PathBuf,
    key: Key,
    shared: Arc<Shared>,
}

impl Source for Object {
    fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        let range = offset_bytes..offset_bytes + out.len() as u64;
        let bytes = self.shared.wait("read", &self.path, self.shared.store.get_range(&self.key, range))?;
        if bytes.len() != out.len() {
            let reason = format!("{} bytes came of the {} asked for", bytes.len(), out.len());
            return Err(Error::Damaged { path: self.path.clone(), reason });
        }
        out.copy_from_slice(&bytes);
        Ok(())
    }
}

/// A part whose manifest is not there yet.
struct Upload<'a> {
    objects: &'a Objects,
    part: String,
    /// Files that may be there.
    begun: Vec<String>,
    is_finished: bool,
}

impl Unfinished for Upload<'_> {
    fn create<'a>(&'a mut self, file: &str) -> Result<Box<dyn Output + 'a>> {
        self.begun.push(file.to_owned());
        Ok(Box::new(ObjectOutput {
            path: self.objects.path(&self.part).join(file),
            key: self.objects.key(&self.part, file),
            shared: &self.objects.shared,
            waiting: Vec::new(),
            pieces: None,
        }))
    }

    fn finish(mut self: Box<Self>, manifest: &[u8]) -> Result<()> {
        let mut output = self.create(MANIFEST_FILE)?;
        output.write(manifest)?;
        output.finish()?;
        self.is_finished = true;
        Ok(())
    }
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        if !self.is_finished {
            // Without a manifest it is no part in any case; what cannot be removed now is removed by the next opening.
            let files = self.begun.drain(..).map(|file| (file, 0)).collect();
            let part = Listed { name: std::mem::take(&mut self.part), finished: false, files };
            let _ = self.objects.remove(&part);
        }
    }
}

/// An object on its way: at once if it is small, in pieces otherwise.
struct ObjectOutput<'a> {
    path: PathBuf,
    key: Key,
    shared: &'a Shared,
    waiting: Vec<u8>,
    pieces: Option<WriteMultipart>,
}

impl Output for ObjectOutput<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let ObjectOutput { path, key, shared, waiting, pieces } = self;
        if pieces.is_none() {
            waiting.extend_from_slice(bytes);
            if waiting.len() <= PIECE_BYTES {
                return Ok(());
            }
        }
        let sent = async {
            match pieces {
                Some(pieces) => {
                    pieces.wait_for_capacity(PIECES_AT_ONCE).await?;
                    pieces.write(bytes);
                }
                None => {
                    let upload = shared.store.put_multipart(key).await?;
                    let pieces = pieces.insert(WriteMultipart::new_with_chunk_size(upload, PIECE_BYTES));
                    pieces.write(&std::mem::take(waiting));
                }
            }
            Ok(())
        };
        shared.wait("write", path, sent)
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        let (pieces, waiting) = (self.pieces.take(), std::mem::take(&mut self.waiting));
        let done = async {
            match pieces {
                Some(pieces) => pieces.finish().await.map(drop),
                None => self.shared.store.put(&self.key, PutPayload::from(waiting)).await.map(drop),
            }
        };
        self.shared.wait("write", &self.path, done)
    }
}

impl Drop for ObjectOutput<'_> {
    fn drop(&mut self) {
        if let Some(pieces) = self.pieces.take() {
            // Pieces of what never became an object are paid for until somebody says that it will not.
            let _ = self.shared.wait("give up", &self.path, pieces.abort());
        }
    }
}
