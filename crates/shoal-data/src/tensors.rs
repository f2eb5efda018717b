//! The header of a `.safetensors` file. It comes from anywhere, so nothing in it is believed: its length is
//! held against the file's before it is read, the library checks that the tensors cover the data without
//! gap or overlap and that shapes fit sizes, and the end of the last is held against the file's.

use crate::error::{Error, Result};
use crate::files::{Integer, OpenFile};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

/// Bytes of a header at most, as the format has it.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Bytes of the header's length, at the file's start.
const LENGTH_BYTES: u64 = 8;

/// A matrix of integers in a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub integer: Integer,
    /// Where in the file it begins.
    pub offset: u64,
    pub rows: usize,
    pub columns: usize,
}

/// The header of `file`, and where its data begins.
pub(crate) fn read_header(file: &OpenFile) -> Result<(Metadata, u64)> {
    let refuse = |message: String| Error::Safetensors { path: file.path.clone(), message };
    let length = file.len()?;
    if length < LENGTH_BYTES {
        return Err(refuse(format!("{length} bytes hold no header")));
    }
    let mut bytes = [0; LENGTH_BYTES as usize];
    file.read_at(&mut bytes, 0)?;
    let header_bytes = u64::from_le_bytes(bytes);
    if header_bytes > HEADER_BYTES_MAX || header_bytes > length - LENGTH_BYTES {
        return Err(refuse(format!(
            "it claims a header of {header_bytes} bytes; there may be {HEADER_BYTES_MAX} at most, and the file has {length}"
        )));
    }
    let mut header = vec![0; header_bytes as usize];
    file.read_at(&mut header, LENGTH_BYTES)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| refuse(error.to_string()))?;

    let start = LENGTH_BYTES + header_bytes;
    let data = metadata.data_len() as u64;
    if data != length - start {
        return Err(refuse(format!(
            "its tensors take {data} bytes, and {} follow the header",
            length - start
        )));
    }
    Ok((metadata, start))
}

/// The matrix of integers called `tensor`, which `info` describes, in the data that begins at `start`.
pub(crate) fn matrix(file: &OpenFile, tensor: &'static str, info: &TensorInfo, start: u64) -> Result<Matrix> {
    let path = || file.path.clone();
    let integer = integer(info.dtype).ok_or_else(|| Error::NotIntegers {
        path: path(),
        tensor,
        found: info.dtype.to_string(),
    })?;
    let &[rows, columns] = info.shape.as_slice() else {
        return Err(Error::NotRows { path: path(), tensor, shape: info.shape.clone() });
    };
    if rows == 0 {
        return Err(Error::Empty { path: path() });
    }
    Ok(Matrix { integer, offset: start + info.data_offsets.0 as u64, rows, columns })
}

pub(crate) fn integer(dtype: Dtype) -> Option<Integer> {
    match dtype {
        Dtype::U8 => Some(Integer::U8),
        Dtype::I8 => Some(Integer::I8),
        Dtype::U16 => Some(Integer::U16),
        Dtype::I16 => Some(Integer::I16),
        Dtype::U32 => Some(Integer::U32),
        Dtype::I32 => Some(Integer::I32),
        Dtype::U64 => Some(Integer::U64),
        Dtype::I64 => Some(Integer::I64),
        _ => None,
    }
}
