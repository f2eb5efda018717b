//! State that lies on a disk: a slice's parameters, gradient and optimizer state in a file that is ours alone. It has no
//! name once it is open, so nothing of it outlives the process: what is to last is a checkpoint's affair.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{EngineError, Result};

/// One after the other: parameters, gradient, then each of the optimizer's states, all in fp32.
#[derive(Clone)]
pub struct DiskSlice {
    file: Arc<File>,
    /// What the file was called, for messages.
    path: Arc<Path>,
    pub elements: usize,
    pub states: usize,
}

impl DiskSlice {
    /// A file of zeros for a slice.
    pub fn create(folder: &Path, tensor: &str, elements: usize, states: usize) -> Result<DiskSlice> {
        static FILES: AtomicU64 = AtomicU64::new(0);
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{number}.{tensor}", std::process::id());
        let path: PathBuf = folder.join(name);
        let failed = |source| EngineError::File { path: path.clone(), source };
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).map_err(failed)?;
        std::fs::remove_file(&path).map_err(failed)?;
        file.set_len((4 * elements * (2 + states)) as u64).map_err(failed)?;
        Ok(DiskSlice { file: Arc::new(file), path: path.as_path().into(), elements, states })
    }

    /// The same slice on a disk that takes nothing more.
    #[cfg(test)]
    pub(crate) fn read_only(&self) -> DiskSlice {
        use std::os::fd::AsRawFd;
        let file = File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd())).unwrap();
        DiskSlice { file: Arc::new(file), ..self.clone() }
    }

    fn place(&self, part: usize) -> u64 {
        (4 * self.elements * part) as u64
    }

    fn read(&self, part: usize, first: usize, out: &mut [f32]) -> Result {
        let failed = |source| EngineError::File { path: self.path.to_path_buf(), source };
        let place = self.place(part) + 4 * first as u64;
        self.file.read_exact_at(bytemuck::cast_slice_mut(out), place).map_err(failed)
    }

    fn write(&self, part: usize, first: usize, values: &[f32]) -> Result {
        let failed = |source| EngineError::File { path: self.path.to_path_buf(), source };
        let place = self.place(part) + 4 * first as u64;
        self.file.write_all_at(bytemuck::cast_slice(values), place).map_err(failed)
    }

    pub fn read_parameter(&self, out: &mut [f32]) -> Result {
        self.read(0, 0, out)
    }

    pub fn write_parameter(&self, values: &[f32]) -> Result {
        self.write(0, 0, values)
    }

    /// Reads some of the gradient, from an element on.
    pub fn read_gradient(&self, first: usize, out: &mut [f32]) -> Result {
        self.read(1, first, out)
    }

    /// Writes some of the gradient, from an element on.
    pub fn write_gradient(&self, first: usize, values: &[f32]) -> Result {
        self.write(1, first, values)
    }

    pub fn read_state(&self, state: usize, out: &mut [f32]) -> Result {
        self.read(2 + state, 0, out)
    }

    pub fn write_state(&self, state: usize, values: &[f32]) -> Result {
        self.write(2 + state, 0, values)
    }
}
