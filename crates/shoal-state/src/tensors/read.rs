//! Reading a safetensors file: the header once, then any tensor as `f32`, straight from its place in the
//! file. Nothing is mapped: a mapped file that another process shortens kills the reader, and its pages
//! count as memory nobody budgeted.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::f16;
use safetensors::Dtype;

use super::header::{self, Fault, TensorInfo};
use crate::disk::CHUNK_BYTES;
use crate::error::{Error, Result};
use crate::place::{OpenFile, Source};
use crate::text;

/// An open safetensors file whose header has been checked. Reads do not share a cursor, so one file can be
/// read from several threads.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    source: Box<dyn Source>,
    tensors: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
}

impl TensorFile {
    /// Opens the file and checks its header against its size. Reads nothing else.
    pub fn open(path: &Path) -> Result<TensorFile> {
        let (file, file_bytes) = OpenFile::open(path)?;
        TensorFile::from_source(path, Box::new(file), file_bytes)
    }

    pub(crate) fn from_source(path: &Path, source: Box<dyn Source>, file_bytes: u64) -> Result<TensorFile> {
        let faulty = |fault| Error::TensorFile { path: path.to_owned(), fault };
        let mut prefix = [0; 8];
        if file_bytes < prefix.len() as u64 {
            return Err(faulty(Fault::TooShort { bytes: file_bytes }));
        }
        source.read_at(0, &mut prefix)?;
        let header_bytes = header::header_bytes(prefix, file_bytes).map_err(faulty)?;
        // Bounded by `HEADER_BYTES_MAX` and by the file's size, both checked just above.
        let mut json = vec![0; header_bytes as usize];
        source.read_at(prefix.len() as u64, &mut json)?;
        let data_offset = prefix.len() as u64 + header_bytes;
        let header = header::parse(&json, data_offset, file_bytes).map_err(faulty)?;
        Ok(TensorFile { path: path.to_owned(), source, tensors: header.tensors, metadata: header.metadata })
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
        self.read_f32_range(name, 0..info.elements, out)
    }

    /// Fills `out` with some of the tensor's elements.
    pub(crate) fn read_f32_range(&self, name: &str, range: Range<u64>, out: &mut [f32]) -> Result<()> {
        let info = self.tensors.get(name).ok_or_else(|| self.no_tensor(name))?;
        let fits = range.end <= info.elements && range.end.checked_sub(range.start) == Some(out.len() as u64);
        if !fits {
            let (path, tensor) = (self.path.clone(), name.to_owned());
            return Err(Error::Buffer { path, tensor, elements: info.elements, buffer: out.len() });
        }
        let first = range.start;
        match info.dtype {
            Dtype::F32 => self.convert(info, first, out, f32::from_le_bytes),
            Dtype::F16 => self.convert(info, first, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
            Dtype::BF16 => self.convert(info, first, out, widen_bf16),
            Dtype::F64 => self.convert(info, first, out, |bytes| f64::from_le_bytes(bytes) as f32),
            dtype => Err(Error::Dtype { path: self.path.clone(), tensor: name.to_owned(), dtype }),
        }
    }

    /// Reads elements from `first` on chunk by chunk, each from its `WIDTH` bytes.
    fn convert<const WIDTH: usize>(
        &self,
        info: &TensorInfo,
        first: u64,
        out: &mut [f32],
        element: impl Fn([u8; WIDTH]) -> f32,
    ) -> Result<()> {
        let mut chunk = vec![0; CHUNK_BYTES.min(out.len() * WIDTH)];
        let mut offset_bytes = info.offset_bytes + first * WIDTH as u64;
        for some in out.chunks_mut(CHUNK_BYTES / WIDTH) {
            let bytes = &mut chunk[..some.len() * WIDTH];
            self.source.read_at(offset_bytes, bytes)?;
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
