//! A disk that loses power: what was not flushed may be there in part, garbled, or not at all. A fuse lets the power go
//! between two of the log's own operations.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use shoal_control::disk::Disk;

use crate::random::Random;

#[derive(Clone, Default)]
struct File {
    /// What is there for good, and what is there as long as there is power.
    flushed: Vec<u8>,
    written: Vec<u8>,
}

#[derive(Default)]
pub struct TornDisk {
    files: Vec<File>,
    names: BTreeMap<String, usize>,
    flushed_names: BTreeMap<String, usize>,
    /// Operations until the power goes.
    pub fuse: Option<u64>,
}

impl TornDisk {
    /// What the next start finds. Says whether anything was torn.
    pub fn lose_power(&mut self, random: &mut Random) -> bool {
        self.fuse = None;
        let mut torn = false;
        for file in &mut self.files {
            if file.written == file.flushed {
                continue;
            }
            torn = true;
            let common = match file.written.starts_with(&file.flushed) {
                true => file.flushed.len(),
                false => 0,
            };
            let kept = random.between(common as u64, file.written.len() as u64) as usize;
            file.written.truncate(kept);
            if kept > common && random.chance(50) {
                let from = random.between(common as u64, kept as u64 - 1) as usize;
                file.written[from..].fill(0);
            }
            file.flushed.clone_from(&file.written);
        }
        if random.chance(50) {
            self.names.clone_from(&self.flushed_names);
        } else {
            self.flushed_names.clone_from(&self.names);
        }
        torn
    }

    fn burn(&mut self) -> io::Result<()> {
        match &mut self.fuse {
            Some(0) => Err(io::Error::other("the power is gone")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn file(&mut self, name: &str) -> io::Result<&mut File> {
        let place = *self.names.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(&mut self.files[place])
    }
}

impl Disk for TornDisk {
    fn names(&self) -> io::Result<BTreeSet<String>> {
        Ok(self.names.keys().cloned().collect())
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let place = *self.names.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(self.files[place].written.clone())
    }

    fn create(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.burn()?;
        self.files.push(File { flushed: Vec::new(), written: bytes.to_vec() });
        self.names.insert(name.to_owned(), self.files.len() - 1);
        Ok(())
    }

    fn append(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.file(name)?.written.extend(bytes);
        // What was appended may reach the disk though the power goes before anyone hears of it.
        self.burn()
    }

    fn cut(&mut self, name: &str, length: u64) -> io::Result<()> {
        self.burn()?;
        self.file(name)?.written.truncate(length as usize);
        Ok(())
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        self.burn()?;
        let file = self.file(name)?;
        file.flushed.clone_from(&file.written);
        Ok(())
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        self.burn()?;
        let place = self.names.remove(from).ok_or(io::ErrorKind::NotFound)?;
        self.names.insert(to.to_owned(), place);
        Ok(())
    }

    fn sync_names(&mut self) -> io::Result<()> {
        self.burn()?;
        self.flushed_names.clone_from(&self.names);
        Ok(())
    }
}
