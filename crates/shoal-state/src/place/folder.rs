//! A folder of parts, each a folder in it. A part is written under its name with `.partial` after it: shards, each
//! flushed, the manifest, the folder's own flush; then it takes its name, which only what is whole and on the disk has.
//! Removal takes the name away first, so that what is half gone is never taken for a part.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Listed, MANIFEST_FILE, Output, PARTIAL, Place, Source, Unfinished};
use crate::checkpoint::REPLACED;
use crate::disk::{self, Disk, Sink, Writing};
use crate::error::{Error, Result};

#[derive(Debug)]
pub(crate) struct Folder {
    root: PathBuf,
    disk: Arc<dyn Disk>,
}

impl Folder {
    /// A folder that exists.
    pub(crate) fn existing(root: &Path, disk: Arc<dyn Disk>) -> Result<Folder> {
        fs::read_dir(root).map_err(Error::io("list", root))?;
        Ok(Folder { root: root.to_owned(), disk })
    }

    /// A folder, made if need be.
    pub(crate) fn make(root: &Path, disk: Arc<dyn Disk>) -> Result<Folder> {
        let folder = Folder { root: root.to_owned(), disk };
        if !disk::exists(root)? {
            fs::create_dir_all(root).map_err(Error::io("create the folder", root))?;
            folder.writing(0).sync_dir(disk::parent_of(root))?;
        }
        Ok(folder)
    }

    fn writing(&self, needed_bytes: u64) -> Writing<'_> {
        Writing { disk: &*self.disk, needed_bytes }
    }

    fn partial(&self, part: &str) -> PathBuf {
        self.root.join(format!("{part}{PARTIAL}"))
    }
}

impl Place for Folder {
    fn root(&self) -> &Path {
        &self.root
    }

    fn list(&self) -> Result<Vec<Listed>> {
        let mut listed = Vec::new();
        for path in disk::entries(&self.root)? {
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            if !path.is_dir() {
                continue;
            }
            let (name, finished) = match name.strip_suffix(PARTIAL) {
                Some(name) => (name, false),
                None => (name, true),
            };
            let files = if finished { sizes(&path) } else { BTreeMap::new() };
            listed.push(Listed { name: name.to_owned(), finished, files });
        }
        Ok(listed)
    }

    fn begin<'a>(&'a self, part: &str, bytes: u64) -> Result<Box<dyn Unfinished + 'a>> {
        let writing = self.writing(bytes);
        let (partial, in_place) = (self.partial(part), self.root.join(part));
        writing.remove_tree(&partial)?;
        writing.create_dir(&partial)?;
        Ok(Box::new(Partial { writing, partial, in_place, is_named: false }))
    }

    fn remove(&self, part: &Listed) -> Result<()> {
        let (writing, doomed) = (self.writing(0), self.partial(&part.name));
        writing.remove_tree(&doomed)?;
        if part.finished {
            writing.rename(&self.root.join(&part.name), &doomed)?;
            // Or a power cut could bring the name back to what is half gone.
            writing.sync_dir(&self.root)?;
            writing.remove_tree(&doomed)?;
        }
        Ok(())
    }

    fn read(&self, part: &str, file: &str, bytes_max: u64) -> Result<Option<Vec<u8>>> {
        disk::read_bounded(&self.path(part).join(file), bytes_max)
    }

    fn open(&self, part: &str, file: &str) -> Result<(Box<dyn Source>, u64)> {
        let (file, bytes) = OpenFile::open(&self.path(part).join(file))?;
        Ok((Box::new(file), bytes))
    }

    fn tidy(&self) -> Result<()> {
        for path in disk::entries(&self.root)? {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if let Some(step) = name.strip_suffix(REPLACED).filter(|name| name.starts_with("step-")) {
                self.writing(0).undo_half_replacement(&self.root.join(step), &path)?;
            }
        }
        Ok(())
    }

    fn is_near(&self) -> bool {
        true
    }
}

/// The files in a part's folder; one that cannot be looked at is one that is not there.
fn sizes(part: &Path) -> BTreeMap<String, u64> {
    let Ok(paths) = disk::entries(part) else { return BTreeMap::new() };
    let size = |path: &PathBuf| {
        let metadata = fs::metadata(path).ok().filter(|file| file.is_file())?;
        Some((path.file_name()?.to_str()?.to_owned(), metadata.len()))
    };
    paths.iter().filter_map(size).collect()
}

struct Partial<'a> {
    writing: Writing<'a>,
    partial: PathBuf,
    in_place: PathBuf,
    is_named: bool,
}

impl Unfinished for Partial<'_> {
    fn create<'a>(&'a mut self, file: &str) -> Result<Box<dyn Output + 'a>> {
        Ok(Box::new(self.writing.create(&self.partial.join(file))?))
    }

    fn finish(mut self: Box<Self>, manifest: &[u8]) -> Result<()> {
        let path = self.partial.join(MANIFEST_FILE);
        let unnamed = self.partial.join(format!("{MANIFEST_FILE}{PARTIAL}"));
        self.writing.write_file(&unnamed, manifest)?;
        self.writing.rename(&unnamed, &path)?;
        self.writing.sync_dir(&self.partial)?;
        self.writing.rename(&self.partial, &self.in_place)?;
        self.is_named = true;
        self.writing.sync_dir(disk::parent_of(&self.in_place))
    }
}

impl Drop for Partial<'_> {
    fn drop(&mut self) {
        if !self.is_named {
            // Gives the space back. If that fails too, the error to report is still the first one, and the next
            // opening removes the folder.
            let _ = self.writing.remove_tree(&self.partial);
        }
    }
}

impl Output for Sink<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        Sink::write(self, bytes)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        Sink::finish(*self).map(drop)
    }
}

/// A file on a disk, open for reading: what is read is what was there when it was opened, even if it is removed
/// meanwhile.
#[derive(Debug)]
pub(crate) struct OpenFile {
    path: PathBuf,
    file: File,
}

impl OpenFile {
    pub(crate) fn open(path: &Path) -> Result<(OpenFile, u64)> {
        let (file, bytes) = disk::open_regular(path)?;
        Ok((OpenFile { path: path.to_owned(), file }, bytes))
    }
}

impl Source for OpenFile {
    fn read_at(&self, offset_bytes: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, offset_bytes).map_err(Error::io("read", &self.path))
    }
}
