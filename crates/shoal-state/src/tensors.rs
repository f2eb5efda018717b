//! safetensors files. Two halves: [`TensorFile`] reads what anyone may have written, so it believes nothing
//! the header says before checking it; [`TensorWriter`] writes ours, deterministically.

mod header;
mod read;
mod write;

pub use header::{Fault, TensorInfo};
pub use read::TensorFile;
pub use safetensors::Dtype;
pub use write::{TensorData, TensorWriter};
pub(crate) use write::{TensorLayout, floats};

/// The largest header accepted, the format's own bound. It is all of a file that is held in memory.
pub const HEADER_BYTES_MAX: u64 = 100_000_000;

/// The key of the header that is not a tensor: a map of strings to strings.
const METADATA_KEY: &str = "__metadata__";

/// Elements of a shape, or `None` when there are more than can be counted.
pub(crate) fn elements_of(shape: &[usize]) -> Option<u64> {
    shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size as u64))
}
