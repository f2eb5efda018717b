//! A folder for what others must not read: keys, tokens, the log. Nobody but its owner may enter it, one process uses it at a
//! time, and a file in it is whole or not there.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

pub struct Folder {
    path: PathBuf,
    /// Keeps a second process out.
    _lock: File,
}

impl Folder {
    /// Makes it if it is not there.
    pub fn open(path: &Path) -> Result<Folder> {
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(Error::at(path))?;
        std::fs::set_permissions(path, Permissions::from_mode(0o700)).map_err(Error::at(path))?;
        let lock = path.join("lock");
        let file = private().create(true).truncate(false).open(&lock).map_err(Error::at(&lock))?;
        file.try_lock().map_err(|_| Error::InUse { path: path.into() })?;
        Ok(Folder { path: path.to_owned(), _lock: file })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Nothing if there is no such file.
    pub fn read(&self, name: &str) -> Result<Option<String>> {
        read(&self.path.join(name))
    }

    /// Puts a file in its place; when this returns it is on the disk.
    pub fn write(&self, name: &str, content: &str) -> Result {
        let (path, partial) = (self.path.join(name), self.path.join(format!("{name}.partial")));
        let written = || {
            let mut file = private().create(true).truncate(true).open(&partial)?;
            file.write_all(content.as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&partial, &path)?;
            File::open(&self.path)?.sync_all()
        };
        written().map_err(Error::at(&path))
    }

    /// A file that grows.
    pub fn append_to(&self, name: &str) -> Result<File> {
        let path = self.path.join(name);
        private().read(true).append(true).create(true).open(&path).map_err(Error::at(&path))
    }
}

pub fn read(path: &Path) -> Result<Option<String>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::File { path: path.into(), source }),
    }
}

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_else_may_read_and_no_other_process_may_enter() {
        let parent = tempfile::tempdir().expect("a folder");
        let path = parent.path().join("fleet");
        let folder = Folder::open(&path).expect("it opens");
        folder.write("key", "secret").expect("it is written");
        folder.append_to("lines").expect("it is made");
        let mode = |path: &Path| std::fs::metadata(path).expect("it is there").permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o700);
        for file in ["key", "lines", "lock"] {
            assert_eq!(mode(&path.join(file)), 0o600, "{file}");
        }
        assert_eq!(folder.read("key").expect("it reads").as_deref(), Some("secret"));
        assert!(matches!(Folder::open(&path), Err(Error::InUse { .. })));
        drop(folder);
        Folder::open(&path).expect("it opens again");
    }
}
