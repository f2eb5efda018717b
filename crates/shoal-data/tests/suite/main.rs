//! The crate's tests, through its public face: one binary, since linking takes longer than running.

mod cache;
mod common;
mod documents;
mod hostile;
mod images;
mod masking;
mod order;
mod packing;
mod pictures;
mod refusals;
mod sources;
mod tokenizers;
