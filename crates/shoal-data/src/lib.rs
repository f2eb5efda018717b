//! Text, tokens and images on disk, turned into numbered samples, and the order in which they are trained on.
//!
//! The life of a sample: [`Tokenizer`] turns text into token ids; [`Dataset::open`] finds the files,
//! tokenizes text once into a cache, checks every id against the model's vocabulary, and from then on
//! serves any sample by positioned reads; [`Order`] says which sample stands at which position of the
//! endless stream the steps draw from.
//!
//! | module | owns |
//! |---|---|
//! | `tokenizer` | text to ids and back |
//! | `source` | what a path in the job means: its kind, its files, their identity |
//! | `documents` | reading `.txt`, `.jsonl` and `.parquet` as a stream of documents |
//! | `encode` | documents to one stream of tokens, on several threads, in bounded memory |
//! | `prepare`, `stored` | the cached token file: when it is made, what it looks like |
//! | `stream` | tokens in a row over one or more files, cut into windows |
//! | `pieces` | documents as samples of their own, framed and padded |
//! | `tensors`, `rows` | `.safetensors` files: the header, then one row a sample |
//! | `masking` | which tokens are hidden from a model that learns to restore them |
//! | `check` | the one pass that looks at every id before training starts |
//! | `images` | images and their classes, and how training varies them |
//! | `pictures` | PNG and JPEG files in folders of classes |
//! | `inputs` | where samples are read to |
//! | `dataset` | what the rest of the system sees |
//! | `order` | position in the stream to sample |
//!
//! Memory does not grow with the data, but for the names of pictures: nothing is mapped, and no file but a picture is
//! read whole. Nothing here prints.

mod check;
mod dataset;
mod documents;
mod encode;
mod error;
mod files;
mod images;
mod inputs;
mod masking;
mod order;
mod pictures;
mod pieces;
mod prepare;
mod rows;
mod source;
mod stored;
mod stream;
mod tensors;
mod tokenizer;

pub use dataset::{Dataset, DatasetSpec, Samples};
pub use error::{Error, Result};
pub use images::{ImageSpec, Variation};
pub use inputs::Inputs;
pub use order::Order;
pub use tokenizer::Tokenizer;

/// The label of a position that counts for nothing in the loss.
pub const IGNORED: i32 = -100;
