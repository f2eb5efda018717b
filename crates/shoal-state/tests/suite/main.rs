//! The crate's tests, through its public face: one binary, since linking takes longer than running.

#[path = "../common/mod.rs"]
mod common;

mod checkpoint;
mod hugging_face;
mod parts;
mod tensors_attacks;
mod tensors_roundtrip;
