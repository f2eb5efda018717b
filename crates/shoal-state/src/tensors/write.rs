//! Writing safetensors files. The `safetensors` crate has a serializer too, but it can neither hash while
//! it writes, nor report which byte the disk refused, nor keep a stable order of `__metadata__` (it is a
//! hash map there); so the header is made here and the tensors stream from the slices that hold them.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use super::{HEADER_BYTES_MAX, METADATA_KEY, elements_of};
use crate::disk::{CHUNK_BYTES, RealDisk, Writing, Written};
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
    /// The length prefix and the padded JSON.
    header: Vec<u8>,
    /// In name order, which is their order in the file.
    tensors: Vec<TensorData<'a>>,
    bytes: u64,
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
        check(path, &tensors)?;
        let header = encode_header(path, metadata, &tensors)?;
        let bytes = header.len() as u64 + tensors.iter().map(TensorData::data_bytes).sum::<u64>();
        Ok(TensorWriter { header, tensors, bytes })
    }

    /// The size the file will have.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes the file, which must not exist yet, and flushes it to the disk.
    pub fn write(&self, path: &Path) -> Result<Written> {
        self.write_on(Writing { disk: &RealDisk, needed_bytes: self.bytes }, path)
    }

    pub(crate) fn write_on(&self, writing: Writing<'_>, path: &Path) -> Result<Written> {
        let mut sink = writing.create(path)?;
        sink.write(&self.header)?;
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        for tensor in &self.tensors {
            for some in tensor.data.chunks(CHUNK_BYTES / size_of::<f32>()) {
                chunk.clear();
                chunk.extend(some.iter().flat_map(|value| value.to_le_bytes()));
                sink.write(&chunk)?;
            }
        }
        sink.finish()
    }
}

fn check(path: &Path, sorted: &[TensorData<'_>]) -> Result<()> {
    let refuse = |tensor: &TensorData<'_>, reason: String| {
        Err(Error::Entry { path: path.to_owned(), tensor: tensor.name.to_owned(), reason })
    };
    for tensor in sorted {
        if tensor.name == METADATA_KEY {
            return refuse(tensor, "the format keeps this name for itself".to_owned());
        }
        if elements_of(tensor.shape) != Some(tensor.data.len() as u64) {
            let reason =
                format!("its shape {:?} does not have its {} elements", tensor.shape, tensor.data.len());
            return refuse(tensor, reason);
        }
    }
    match sorted.array_windows().find(|[left, right]| left.name == right.name) {
        Some([twice, _]) => refuse(twice, "it is given twice".to_owned()),
        None => Ok(()),
    }
}

/// A value of the header's map.
#[derive(Serialize)]
#[serde(untagged)]
enum Item<'a> {
    Metadata(&'a BTreeMap<String, String>),
    Tensor { dtype: &'static str, shape: &'a [usize], data_offsets: [u64; 2] },
}

fn encode_header(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    sorted: &[TensorData<'_>],
) -> Result<Vec<u8>> {
    let mut items = BTreeMap::new();
    if !metadata.is_empty() {
        items.insert(METADATA_KEY, Item::Metadata(metadata));
    }
    let mut start = 0;
    for tensor in sorted {
        let end = start + tensor.data_bytes();
        items.insert(
            tensor.name,
            Item::Tensor { dtype: "F32", shape: tensor.shape, data_offsets: [start, end] },
        );
        start = end;
    }

    let mut header = vec![0; size_of::<u64>()];
    serde_json::to_writer(&mut header, &items)
        .map_err(|error| Error::io("encode the header of", path)(error.into()))?;
    header.resize(header.len().next_multiple_of(ALIGNMENT_BYTES), b' ');
    let json_bytes = (header.len() - size_of::<u64>()) as u64;
    if json_bytes > HEADER_BYTES_MAX {
        let reason = format!("the header has {json_bytes} bytes, the format allows {HEADER_BYTES_MAX}");
        let tensor = sorted.first().map_or("", |tensor| tensor.name).to_owned();
        return Err(Error::Entry { path: path.to_owned(), tensor, reason });
    }
    header[..size_of::<u64>()].copy_from_slice(&json_bytes.to_le_bytes());
    Ok(header)
}
