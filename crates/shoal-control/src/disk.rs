//! What a log needs of a disk, so that a drill can lose power at any moment and tear what was being written.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A folder of files. What [`Disk::append`] and [`Disk::create`] have written is there after a crash once [`Disk::sync`] has
/// returned; before that, any part of it may be, or not. A name is there once [`Disk::sync_names`] has returned.
pub trait Disk {
    fn names(&self) -> io::Result<BTreeSet<String>>;
    fn read(&self, name: &str) -> io::Result<Vec<u8>>;
    /// Makes a file with this content; one of that name is emptied first.
    fn create(&mut self, name: &str, bytes: &[u8]) -> io::Result<()>;
    fn append(&mut self, name: &str, bytes: &[u8]) -> io::Result<()>;
    fn cut(&mut self, name: &str, length: u64) -> io::Result<()>;
    fn sync(&mut self, name: &str) -> io::Result<()>;
    /// Takes another file's place, if there is one.
    fn rename(&mut self, from: &str, to: &str) -> io::Result<()>;
    fn sync_names(&mut self) -> io::Result<()>;
}

/// A real folder.
pub struct Folder(PathBuf);

impl Folder {
    /// Makes it if it is not there.
    pub fn open(path: &Path) -> io::Result<Folder> {
        std::fs::create_dir_all(path)?;
        Ok(Folder(path.to_owned()))
    }
}

impl Disk for Folder {
    fn names(&self) -> io::Result<BTreeSet<String>> {
        let name =
            |entry: io::Result<std::fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
        std::fs::read_dir(&self.0)?.map(name).collect()
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        std::fs::read(self.0.join(name))
    }

    fn create(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        File::create(self.0.join(name))?.write_all(bytes)
    }

    fn append(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        OpenOptions::new().append(true).open(self.0.join(name))?.write_all(bytes)
    }

    fn cut(&mut self, name: &str, length: u64) -> io::Result<()> {
        OpenOptions::new().write(true).open(self.0.join(name))?.set_len(length)
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        File::open(self.0.join(name))?.sync_all()
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        std::fs::rename(self.0.join(from), self.0.join(to))
    }

    fn sync_names(&mut self) -> io::Result<()> {
        File::open(&self.0)?.sync_all()
    }
}
