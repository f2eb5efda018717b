//! Training state outside the process: on disk, and in the folders other tools read and write.
//!
//! - [`tensors`]: safetensors files, read as if an enemy had written them and written so that the same
//!   content gives the same bytes.
//! - [`checkpoint`]: the state of a run at a step. A checkpoint is complete or does not exist; torn and
//!   corrupt ones are noticed by their hashes and never read.
//! - [`hugging_face`]: model folders as `transformers` loads and saves them.
//! - `disk`: every operation that changes a disk, behind one interface, so that tests can run out of space
//!   or lose power at each of them; `direct`: the files that it writes, past the page cache.
//!
//! All sizes and contents that come from a file are checked before they are used, and nothing here holds
//! more of a file in memory than its header and one chunk. Failures are [`Error`]s: the message names the
//! file and the tensor, [`Error::hint`] says what to do.

pub mod checkpoint;
mod direct;
mod disk;
mod error;
#[cfg(test)]
mod faults;
pub mod hugging_face;
mod place;
pub mod tensors;
mod text;

pub use error::{Error, Result};
