//! Everything that changes a disk. The operations stand behind a trait so that tests can fail or stop dead
//! at each of them; [`Writing`] adds what every caller needs: errors that name the path, and a full disk
//! told apart from other failures. Reading does not pass through here: it cannot tear anything.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::direct::DirectFile;
use crate::error::{Error, Result};

/// Bytes moved by one read or write: large enough for full disk speed, small enough to be ignored in the
/// memory budget.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;

/// The operations that change a disk.
pub(crate) trait Disk: fmt::Debug + Send + Sync {
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Creates a file that must not exist yet.
    fn create_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    /// Makes the folder's entries (creations, renames, removals) survive a power cut.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
}

/// A file being written.
pub(crate) trait DiskFile {
    /// Writes some of `bytes` and says how many.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize>;
    /// Makes what was written survive a power cut.
    fn sync(&mut self) -> io::Result<()>;
}

/// The operating system's disk.
#[derive(Debug)]
pub(crate) struct RealDisk;

impl Disk for RealDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(DirectFile::create(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        match File::open(path)?.sync_all() {
            // Some network and user-space file systems have no such operation; their renames are as
            // durable as they will get.
            Err(cause) if matches!(cause.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => Ok(()),
            other => other,
        }
    }
}

/// One piece of work that writes `needed_bytes` in all, which is what a full disk reports.
#[derive(Clone, Copy)]
pub(crate) struct Writing<'a> {
    pub(crate) disk: &'a dyn Disk,
    pub(crate) needed_bytes: u64,
}

impl Writing<'_> {
    fn failed(&self, action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        let needed_bytes = self.needed_bytes;
        move |cause| match cause.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::WriteZero => {
                Error::DiskFull { path: path.to_owned(), needed_bytes, cause }
            }
            _ => Error::io(action, path)(cause),
        }
    }

    pub(crate) fn create_dir(&self, path: &Path) -> Result<()> {
        self.disk.create_dir(path).map_err(self.failed("create the folder", path))
    }

    pub(crate) fn create(&self, path: &Path) -> Result<Sink<'_>> {
        let file = self.disk.create_file(path).map_err(self.failed("create", path))?;
        Ok(Sink { writing: *self, path: path.to_owned(), file, bytes: 0 })
    }

    pub(crate) fn write_file(&self, path: &Path, bytes: &[u8]) -> Result<u64> {
        let mut sink = self.create(path)?;
        sink.write(bytes)?;
        sink.finish()
    }

    pub(crate) fn copy_file(&self, from: &Path, to: &Path) -> Result<u64> {
        let mut source = open_regular(from)?.0;
        let mut sink = self.create(to)?;
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            match source.read(&mut chunk) {
                Ok(0) => return sink.finish(),
                Ok(count) => sink.write(&chunk[..count])?,
                Err(cause) if cause.kind() == ErrorKind::Interrupted => {}
                Err(cause) => return Err(Error::io("read", from)(cause)),
            }
        }
    }

    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.disk.rename(from, to).map_err(self.failed("rename", from))
    }

    pub(crate) fn sync_dir(&self, path: &Path) -> Result<()> {
        self.disk.sync_dir(path).map_err(self.failed("flush the folder", path))
    }

    /// Removes a file or folder with all that is in it; one that does not exist is removed already.
    pub(crate) fn remove_tree(&self, path: &Path) -> Result<()> {
        let metadata = match fs::symlink_metadata(path) {
            Err(cause) if cause.kind() == ErrorKind::NotFound => return Ok(()),
            other => other.map_err(Error::io("look at", path))?,
        };
        if !metadata.is_dir() {
            return self.disk.remove_file(path).map_err(self.failed("remove", path));
        }
        for inner in entries(path)? {
            self.remove_tree(&inner)?;
        }
        self.disk.remove_dir(path).map_err(self.failed("remove the folder", path))
    }

    /// Gives the finished folder `from` the name `to`. A folder that has that name is first renamed to
    /// `aside`, and removed once the new one is durably there: at every moment one of the two is whole
    /// under a name that [`Writing::undo_half_replacement`] knows.
    pub(crate) fn put_in_place(&self, from: &Path, to: &Path, aside: &Path) -> Result<()> {
        let replaces = exists(to)?;
        if replaces {
            // Whatever has that name now is older still.
            self.remove_tree(aside)?;
            self.rename(to, aside)?;
        }
        if let Err(error) = self.rename(from, to) {
            if replaces {
                // The first failure is the one to report; if this one fails too, the next opening repairs it.
                let _ = self.rename(aside, to);
            }
            return Err(error);
        }
        self.sync_dir(parent_of(to))?;
        self.remove_tree(aside)
    }

    /// Ends a replacement that was interrupted: with the new folder if it is in place, else with the old.
    pub(crate) fn undo_half_replacement(&self, to: &Path, aside: &Path) -> Result<()> {
        match (exists(to)?, exists(aside)?) {
            (_, false) => Ok(()),
            (true, true) => self.remove_tree(aside),
            (false, true) => self.rename(aside, to),
        }
    }
}

/// A file being written.
pub(crate) struct Sink<'a> {
    writing: Writing<'a>,
    path: PathBuf,
    file: Box<dyn DiskFile>,
    bytes: u64,
}

impl Sink<'_> {
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match self.file.write(rest) {
                // A disk that takes nothing and says nothing is full too.
                Ok(0) => {
                    let nothing_taken = io::Error::from(ErrorKind::WriteZero);
                    return Err(self.writing.failed("write", &self.path)(nothing_taken));
                }
                Ok(count) => rest = &rest[count..],
                Err(cause) if cause.kind() == ErrorKind::Interrupted => {}
                Err(cause) => return Err(self.writing.failed("write", &self.path)(cause)),
            }
        }
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Flushes the file to the disk itself, where a delayed "disk full" also shows, and returns its bytes.
    pub(crate) fn finish(mut self) -> Result<u64> {
        self.file.sync().map_err(self.writing.failed("flush", &self.path))?;
        Ok(self.bytes)
    }
}

/// Opens a file for reading, with its size. Pipes and devices are refused: opening one can block forever.
pub(crate) fn open_regular(path: &Path) -> Result<(File, u64)> {
    let metadata = fs::metadata(path).map_err(Error::io("open", path))?;
    if !metadata.is_file() {
        return Err(Error::io("open", path)(io::Error::new(ErrorKind::InvalidInput, "not a regular file")));
    }
    let file = File::open(path).map_err(Error::io("open", path))?;
    let bytes = file.metadata().map_err(Error::io("look at", path))?.len();
    Ok((file, bytes))
}

/// The whole of a small file; `Ok(None)` when it has more than `bytes_max`.
pub(crate) fn read_bounded(path: &Path, bytes_max: u64) -> Result<Option<Vec<u8>>> {
    let (file, _) = open_regular(path)?;
    let mut bytes = Vec::new();
    file.take(bytes_max + 1).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    Ok((bytes.len() as u64 <= bytes_max).then_some(bytes))
}

/// The paths in a folder, sorted, so that what is done with them happens in the same order everywhere.
pub(crate) fn entries(dir: &Path) -> Result<Vec<PathBuf>> {
    let listed = fs::read_dir(dir).map_err(Error::io("list", dir))?;
    let mut paths = Vec::new();
    for entry in listed {
        paths.push(entry.map_err(Error::io("list", dir))?.path());
    }
    paths.sort();
    Ok(paths)
}

pub(crate) fn exists(path: &Path) -> Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(cause) if cause.kind() == ErrorKind::NotFound => Ok(false),
        Err(cause) => Err(Error::io("look at", path)(cause)),
    }
}

/// The folder that holds `path`; a bare name lies in the current one.
pub(crate) fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}
