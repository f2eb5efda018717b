//! A file that is written past the page cache. Checkpoints are large and nobody reads them soon: through the cache they
//! take several times the processor's time, push out what others have there, and hold those up who write too. The bytes
//! are gathered in memory that is aligned as the disk wants it. The end of a file, and all of a small one, goes the usual
//! way, and so does everything where the file system knows no other.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::disk::DiskFile;

/// What addresses, places and lengths are multiples of: the largest sector and page that disks here have.
const ALIGNMENT: usize = 4096;
/// Bytes of one write.
const GATHERED_BYTES: usize = 1 << 20;

pub(crate) struct DirectFile {
    file: File,
    /// Whether writes go past the cache.
    direct: bool,
    gathered: Gathered,
}

impl DirectFile {
    /// A file that must not exist yet.
    pub(crate) fn create(path: &Path) -> io::Result<DirectFile> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        let flags = OFlags::DIRECT.bits() as i32;
        let (file, direct) = match options.clone().custom_flags(flags).open(path) {
            Ok(file) => (file, true),
            // The file system does not know it. It may have made the file before it said so.
            Err(error) if error.kind() == ErrorKind::InvalidInput => match std::fs::remove_file(path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => (options.open(path)?, false),
            },
            Err(error) => return Err(error),
        };
        Ok(DirectFile { file, direct, gathered: Gathered::default() })
    }

    /// Writes what is gathered, a whole number of sectors if past the cache.
    fn flush(&mut self) -> io::Result<()> {
        let DirectFile { file, direct, gathered } = self;
        let mut rest = gathered.bytes();
        while !rest.is_empty() {
            match file.write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Larger sectors than any known disk has; or a write that was cut short in the middle of one.
                Err(error) if error.kind() == ErrorKind::InvalidInput && *direct => {
                    *direct = false;
                    use_cache(file)?;
                }
                Err(error) => return Err(error),
            }
        }
        gathered.filled = 0;
        Ok(())
    }
}

impl DiskFile for DirectFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = self.gathered.take(bytes);
        if self.gathered.is_full() {
            self.flush()?;
        }
        Ok(taken)
    }

    fn sync(&mut self) -> io::Result<()> {
        if self.direct && self.gathered.filled > 0 {
            self.direct = false;
            use_cache(&self.file)?;
        }
        self.flush()?;
        self.file.sync_all()
    }
}

fn use_cache(file: &File) -> io::Result<()> {
    let flags = fcntl_getfl(file)?;
    Ok(fcntl_setfl(file, flags - OFlags::DIRECT)?)
}

/// Bytes that wait to be written, from an aligned address on.
#[derive(Default)]
struct Gathered {
    /// Larger than what is gathered by the bytes before the first aligned one. Empty until something is.
    room: Vec<u8>,
    start: usize,
    filled: usize,
}

impl Gathered {
    fn take(&mut self, bytes: &[u8]) -> usize {
        if self.room.is_empty() {
            self.room = vec![0; GATHERED_BYTES + ALIGNMENT];
            self.start = self.room.as_ptr().addr().wrapping_neg() % ALIGNMENT;
        }
        let taken = bytes.len().min(GATHERED_BYTES - self.filled);
        let at = self.start + self.filled;
        self.room[at..at + taken].copy_from_slice(&bytes[..taken]);
        self.filled += taken;
        taken
    }

    fn is_full(&self) -> bool {
        self.filled == GATHERED_BYTES
    }

    fn bytes(&self) -> &[u8] {
        &self.room[self.start..self.start + self.filled]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_what_was_written_whatever_its_size_and_pieces() {
        let folder = tempfile::tempdir().unwrap();
        let many: Vec<u8> =
            (0..2 * GATHERED_BYTES + 5_000).map(|place| (place * 31 + place / 257) as u8).collect();
        let sizes = [0, 1, ALIGNMENT, GATHERED_BYTES - 1, GATHERED_BYTES, GATHERED_BYTES + 1, many.len()];
        for (size, piece) in sizes.into_iter().zip([1, 7, 4096, 100_000, 1 << 20, GATHERED_BYTES, usize::MAX])
        {
            let path = folder.path().join(format!("{size}"));
            let mut file = DirectFile::create(&path).unwrap();
            for mut bytes in many[..size].chunks(piece.min(many.len())) {
                while !bytes.is_empty() {
                    let taken = file.write(bytes).unwrap();
                    bytes = &bytes[taken..];
                }
            }
            file.sync().unwrap();
            assert!(std::fs::read(&path).unwrap() == many[..size], "{size} bytes in pieces of {piece}");
            let again = DirectFile::create(&path).err().map(|error| error.kind());
            assert_eq!(again, Some(ErrorKind::AlreadyExists));
        }
    }
}
