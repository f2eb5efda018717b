//! Reading a safetensors file: the header once, then any tensor as `f32`, straight from its place in the
//! file. Nothing is mapped: a mapped file that another process shortens kills the reader, and its pages
//! count as memory nobody budgeted.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::f16;
use safetensors::Dtype;

use super::header::{self, Fault, TensorInfo};
use crate::disk::{self, CHUNK_BYTES};
use crate::error::{Error, Result};
use crate::text;

/// An open safetensors file whose header has been checked. Reads do not share a cursor, so one file can be
/// read from several threads.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
}

impl TensorFile {
    /// Opens the file and checks its header against its size. Reads nothing else.
    pub fn open(path: &Path) -> Result<TensorFile> {
        let (file, file_bytes) = disk::open_regular(path)?;
        TensorFile::from_open(path, file, file_bytes)
    }

    pub(crate) fn from_open(path: &Path, file: File, file_bytes: u64) -> Result<TensorFile> {
        let faulty = |fault| Error::TensorFile { path: path.to_owned(), fault };
        let mut prefix = [0; 8];
        if file_bytes < prefix.len() as u64 {
            return Err(faulty(Fault::TooShort { bytes: file_bytes }));
        }
        file.read_exact_at(&mut prefix, 0).map_err(Error::io("read", path))?;
        let header_bytes = header::header_bytes(prefix, file_bytes).map_err(faulty)?;
        // Bounded by `HEADER_BYTES_MAX` and by the file's size, both checked just above.
        let mut json = vec![0; header_bytes as usize];
        file.read_exact_at(&mut json, prefix.len() as u64).map_err(Error::io("read", path))?;
        let data_offset = prefix.len() as u64 + header_bytes;
        let header = header::parse(&json, data_offset, file_bytes).map_err(faulty)?;
        Ok(TensorFile { path: path.to_owned(), file, tensors: header.tensors, metadata: header.metadata })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Every tensor, in name order.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// The file's `__metadata__`.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Fills `out` with the tensor's elements, widened or rounded to `f32`. `out` must have as many.
    pub fn read_f32(&self, name: &str, out: &mut [f32]) -> Result<()> {
        let info = self.tensors.get(name).ok_or_else(|| self.no_tensor(name))?;
        if info.elements != out.len() as u64 {
            let (path, tensor) = (self.path.clone(), name.to_owned());
            return Err(Error::Buffer { path, tensor, elements: info.elements, buffer: out.len() });
        }
        match info.dtype {
            Dtype::F32 => self.convert(info, out, f32::from_le_bytes),
            Dtype::F16 => self.convert(info, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
            Dtype::BF16 => self.convert(info, out, widen_bf16),
            Dtype::F64 => self.convert(info, out, |bytes| f64::from_le_bytes(bytes) as f32),
            dtype => Err(Error::Dtype { path: self.path.clone(), tensor: name.to_owned(), dtype }),
        }
    }

    /// Reads the tensor chunk by chunk, each element from its `WIDTH` bytes.
    fn convert<const WIDTH: usize>(
        &self,
        info: &TensorInfo,
        out: &mut [f32],
        element: impl Fn([u8; WIDTH]) -> f32,
    ) -> Result<()> {
        let mut chunk = vec![0; CHUNK_BYTES.min(out.len() * WIDTH)];
        let mut offset_bytes = info.offset_bytes;
        for some in out.chunks_mut(CHUNK_BYTES / WIDTH) {
            let bytes = &mut chunk[..some.len() * WIDTH];
            self.file.read_exact_at(bytes, offset_bytes).map_err(Error::io("read", &self.path))?;
            let (words, _) = bytes.as_chunks::<WIDTH>();
            for (value, word) in some.iter_mut().zip(words) {
                *value = element(*word);
            }
            offset_bytes += bytes.len() as u64;
        }
        Ok(())
    }

    fn no_tensor(&self, name: &str) -> Error {
        let wanted = vec![name.to_owned()];
        let nearest = text::nearest(&wanted, self.tensors.keys().map(String::as_str));
        Error::NoTensor { path: self.path.clone(), wanted, nearest }
    }
}

/// bf16 is the upper half of an f32.
fn widen_bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}
