//! The header of a safetensors file, checked. The `safetensors` crate's reader wants the whole file as one
//! slice, keeps the last of two tensors with one name, and does not say which tensor is wrong; so the
//! header is parsed and its layout judged here, with the crate's types, and the crate's own validation is
//! asked last: nothing is accepted that the reference would refuse.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo as Declared};
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use super::{HEADER_BYTES_MAX, METADATA_KEY, elements_of};
use crate::text;

/// Where a tensor lies in its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// From the first byte of the file.
    pub offset_bytes: u64,
    pub len_bytes: u64,
    /// The product of `shape`.
    pub elements: u64,
}

/// How a safetensors file contradicts itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("the file has {bytes} bytes, too few for a safetensors header")]
    TooShort { bytes: u64 },
    #[error("the header claims {bytes} bytes; the format allows {HEADER_BYTES_MAX}")]
    HeaderTooLarge { bytes: u64 },
    #[error("the header claims {bytes} bytes, but only {available} follow")]
    HeaderPastEnd { bytes: u64, available: u64 },
    #[error("the header is not a valid safetensors header: {reason}")]
    HeaderContent { reason: String },
    #[error("tensor {}: its offsets are reversed ({start} to {end})", text::quoted(tensor))]
    Reversed { tensor: String, start: u64, end: u64 },
    #[error("tensor {}: it ends at data byte {end}, but the file has {available}", text::quoted(tensor))]
    PastEnd { tensor: String, end: u64, available: u64 },
    #[error("tensor {}: its shape {shape:?} has more elements than can be counted", text::quoted(tensor))]
    ShapeOverflow { tensor: String, shape: Vec<usize> },
    #[error("tensor {}: shape {shape:?} of {dtype} does not fill its {bytes} bytes", text::quoted(tensor))]
    WrongLength { tensor: String, dtype: Dtype, shape: Vec<usize>, bytes: u64 },
    #[error("tensor {}: its bytes overlap those of tensor {}", text::quoted(tensor), text::quoted(other))]
    Overlap { tensor: String, other: String },
    #[error("tensor {}: {bytes} bytes before it belong to no tensor", text::quoted(tensor))]
    Hole { tensor: String, bytes: u64 },
    #[error("{bytes} bytes at the end of the file belong to no tensor")]
    Trailing { bytes: u64 },
    #[error("the safetensors library refuses the header: {reason}")]
    Refused { reason: String },
}

impl Fault {
    pub(crate) fn hint(&self) -> String {
        let advice = match self {
            Fault::TooShort { .. } | Fault::HeaderPastEnd { .. } | Fault::PastEnd { .. } => {
                "the file is probably cut short: fetch it again and compare its size with the source's"
            }
            Fault::HeaderTooLarge { .. } | Fault::HeaderContent { .. } => {
                "is this a safetensors file? A pickle or an HTML page saved under that name looks like this"
            }
            _ => "the file is damaged or was made to mislead: fetch it again from a source you trust",
        };
        advice.to_owned()
    }
}

/// A header whose every tensor lies inside the file, exactly filling it.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) tensors: BTreeMap<String, TensorInfo>,
    pub(super) metadata: BTreeMap<String, String>,
}

/// The header's length, from the file's first eight bytes and the file's size.
pub(super) fn header_bytes(prefix: [u8; 8], file_bytes: u64) -> Result<u64, Fault> {
    let bytes = u64::from_le_bytes(prefix);
    let available = file_bytes.saturating_sub(prefix.len() as u64);
    match bytes {
        _ if bytes > HEADER_BYTES_MAX => Err(Fault::HeaderTooLarge { bytes }),
        _ if bytes > available => Err(Fault::HeaderPastEnd { bytes, available }),
        _ => Ok(bytes),
    }
}

/// Parses and judges the header; `data_offset` is where the tensors' bytes begin in the file.
pub(super) fn parse(json: &[u8], data_offset: u64, file_bytes: u64) -> Result<Header, Fault> {
    let content =
        |reason: &dyn fmt::Display| Fault::HeaderContent { reason: text::printable(&reason.to_string()) };
    let text = std::str::from_utf8(json).map_err(|error| content(&error))?;
    let mut raw: RawHeader = serde_json::from_str(text).map_err(|error| content(&error))?;
    raw.tensors.sort_by(|(name, left), (other, right)| {
        left.data_offsets.cmp(&right.data_offsets).then_with(|| name.cmp(other))
    });

    let available = file_bytes.saturating_sub(data_offset);
    let mut tensors = BTreeMap::new();
    let mut end_of_last = 0;
    for (index, (name, declared)) in raw.tensors.iter().enumerate() {
        let info = check_tensor(name, declared, available, data_offset)?;
        let start = declared.data_offsets.0 as u64;
        if start < end_of_last {
            let other = raw.tensors[index - 1].0.clone();
            return Err(Fault::Overlap { tensor: name.clone(), other });
        }
        if start > end_of_last {
            return Err(Fault::Hole { tensor: name.clone(), bytes: start - end_of_last });
        }
        end_of_last = start + info.len_bytes;
        tensors.insert(name.clone(), info);
    }
    if end_of_last != available {
        return Err(Fault::Trailing { bytes: available - end_of_last });
    }
    Metadata::new(None, raw.tensors)
        .map_err(|error| Fault::Refused { reason: text::printable(&error.to_string()) })?;
    Ok(Header { tensors, metadata: raw.metadata })
}

/// Judges one tensor by itself: inside the file, and as long as its shape and type say.
fn check_tensor(
    name: &str,
    declared: &Declared,
    available: u64,
    data_offset: u64,
) -> Result<TensorInfo, Fault> {
    let tensor = || name.to_owned();
    let (start, end) = (declared.data_offsets.0 as u64, declared.data_offsets.1 as u64);
    if end < start {
        return Err(Fault::Reversed { tensor: tensor(), start, end });
    }
    if end > available {
        return Err(Fault::PastEnd { tensor: tensor(), end, available });
    }
    let shape = || declared.shape.clone();
    let (elements, bits) = elements_of(&declared.shape)
        .and_then(|elements| Some((elements, elements.checked_mul(declared.dtype.bitsize() as u64)?)))
        .ok_or_else(|| Fault::ShapeOverflow { tensor: tensor(), shape: shape() })?;
    let bytes = end - start;
    // Types of less than a byte may not fill their last byte; the format forbids it.
    if !bits.is_multiple_of(8) || bits / 8 != bytes {
        return Err(Fault::WrongLength { tensor: tensor(), dtype: declared.dtype, shape: shape(), bytes });
    }
    let offset_bytes = data_offset + start;
    Ok(TensorInfo { dtype: declared.dtype, shape: shape(), offset_bytes, len_bytes: bytes, elements })
}

/// The header as JSON gives it, with no tensor lost to another of the same name.
struct RawHeader {
    tensors: Vec<(String, Declared)>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(RawHeaderVisitor)
    }
}

struct RawHeaderVisitor;

impl<'de> Visitor<'de> for RawHeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a map of tensor names to their type, shape and offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut header = RawHeader { tensors: Vec::new(), metadata: BTreeMap::new() };
        let mut seen = BTreeSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(A::Error::custom(format_args!("{} appears twice", text::quoted(&name))));
            }
            let named = |error: A::Error| A::Error::custom(format_args!("{}: {error}", text::quoted(&name)));
            if name == METADATA_KEY {
                let metadata: Option<BTreeMap<String, String>> = map.next_value().map_err(named)?;
                header.metadata = metadata.unwrap_or_default();
            } else {
                let declared: Declared = map.next_value().map_err(named)?;
                header.tensors.push((name, declared));
            }
        }
        Ok(header)
    }
}
