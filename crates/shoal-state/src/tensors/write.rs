//! Writing safetensors files. The `safetensors` crate has a serializer too, but it can neither
//! report which byte the disk refused nor keep a stable order of `__metadata__` (it is a hash map there);
//! so the header is made here and the tensors stream from the slices that hold them.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use super::{HEADER_BYTES_MAX, METADATA_KEY, elements_of};
use crate::disk::{CHUNK_BYTES, RealDisk, Writing};
use crate::error::{Error, Result};

/// The header is padded so that the tensors after it are aligned to this.
const ALIGNMENT_BYTES: usize = 8;

/// A tensor to be written, borrowed from where it lives.
#[derive(Debug, Clone, Copy)]
pub struct TensorData<'a> {
    pub name: &'a str,
    pub shape: &'a [usize],
    pub data: &'a [f32],
}

impl TensorData<'_> {
    pub(crate) fn data_bytes(&self) -> u64 {
        size_of_val(self.data) as u64
    }
}

/// A file ready to be written: its header made, its size known. The bytes depend on the tensors and the
/// metadata alone, not on the order in which they were given.
#[derive(Debug)]
pub struct TensorWriter<'a> {
    layout: TensorLayout,
    /// In name order, which is their order in the file.
    tensors: Vec<TensorData<'a>>,
}

impl<'a> TensorWriter<'a> {
    /// Checks the tensors and makes the header. `path` is only named in errors.
    pub fn new(
        path: &Path,
        metadata: &BTreeMap<String, String>,
        tensors: impl IntoIterator<Item = TensorData<'a>>,
    ) -> Result<TensorWriter<'a>> {
        let mut tensors: Vec<TensorData<'a>> = tensors.into_iter().collect();
        tensors.sort_by_key(|tensor| tensor.name);
        for tensor in &tensors {
            if elements_of(tensor.shape) != Some(tensor.data.len() as u64) {
                let reason =
                    format!("its shape {:?} does not have its {} elements", tensor.shape, tensor.data.len());
                return refuse(path, tensor.name, reason);
            }
        }
        let named = tensors.iter().map(|tensor| (tensor.name, tensor.shape, tensor.data.len() as u64));
        Ok(TensorWriter { layout: TensorLayout::new(path, metadata, named)?, tensors })
    }

    /// The size the file will have.
    pub fn bytes(&self) -> u64 {
        self.layout.bytes
    }

    /// Writes the file, which must not exist yet, flushes it to the disk and returns its bytes.
    pub fn write(&self, path: &Path) -> Result<u64> {
        self.write_on(Writing { disk: &RealDisk, needed_bytes: self.bytes() }, path)
    }

    pub(crate) fn write_on(&self, writing: Writing<'_>, path: &Path) -> Result<u64> {
        let mut sink = writing.create(path)?;
        sink.write(&self.layout.header)?;
        for tensor in &self.tensors {
            floats(tensor.data, |bytes| sink.write(bytes))?;
        }
        sink.finish()
    }
}

/// What precedes the tensors' bytes in a file of fp32 tensors.
#[derive(Debug)]
pub(crate) struct TensorLayout {
    /// The length prefix and the padded JSON.
    pub(crate) header: Vec<u8>,
    /// Of the whole file.
    pub(crate) bytes: u64,
}

impl TensorLayout {
    /// Of tensors whose data follows in the order given, each by its name, shape and elements.
    pub(crate) fn new<'a>(
        path: &Path,
        metadata: &BTreeMap<String, String>,
        tensors: impl IntoIterator<Item = (&'a str, &'a [usize], u64)>,
    ) -> Result<TensorLayout> {
        let mut items = BTreeMap::new();
        let mut start = 0;
        for (name, shape, elements) in tensors {
            let end = start + elements * size_of::<f32>() as u64;
            let item = Item::Tensor { dtype: "F32", shape, data_offsets: [start, end] };
            if name == METADATA_KEY {
                return refuse(path, name, "the format keeps this name for itself".to_owned());
            }
            if items.insert(name, item).is_some() {
                return refuse(path, name, "it is given twice".to_owned());
            }
            start = end;
        }
        let first = items.keys().next().copied().unwrap_or_default();
        if !metadata.is_empty() {
            items.insert(METADATA_KEY, Item::Metadata(metadata));
        }
        let header = encode_header(path, first, &items)?;
        let bytes = header.len() as u64 + start;
        Ok(TensorLayout { header, bytes })
    }
}

/// Hands floats on as the bytes that a file has, some at a time.
pub(crate) fn floats(data: &[f32], mut take: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    const WIDTH: usize = size_of::<f32>();
    let mut chunk = Vec::new();
    for some in data.chunks(CHUNK_BYTES / WIDTH) {
        if cfg!(target_endian = "little") {
            take(bytemuck::cast_slice(some))?;
            continue;
        }
        chunk.clear();
        chunk.extend(some.iter().flat_map(|value| value.to_le_bytes()));
        take(&chunk)?;
    }
    Ok(())
}

fn refuse<T>(path: &Path, tensor: &str, reason: String) -> Result<T> {
    Err(Error::Entry { path: path.to_owned(), tensor: tensor.to_owned(), reason })
}

/// A value of the header's map.
#[derive(Serialize)]
#[serde(untagged)]
enum Item<'a> {
    Metadata(&'a BTreeMap<String, String>),
    Tensor { dtype: &'static str, shape: &'a [usize], data_offsets: [u64; 2] },
}

fn encode_header(path: &Path, first: &str, items: &BTreeMap<&str, Item<'_>>) -> Result<Vec<u8>> {
    let mut header = vec![0; size_of::<u64>()];
    serde_json::to_writer(&mut header, items)
        .map_err(|error| Error::io("encode the header of", path)(error.into()))?;
    header.resize(header.len().next_multiple_of(ALIGNMENT_BYTES), b' ');
    let json_bytes = (header.len() - size_of::<u64>()) as u64;
    if json_bytes > HEADER_BYTES_MAX {
        let reason = format!("the header has {json_bytes} bytes, the format allows {HEADER_BYTES_MAX}");
        return refuse(path, first, reason);
    }
    header[..size_of::<u64>()].copy_from_slice(&json_bytes.to_le_bytes());
    Ok(header)
}
