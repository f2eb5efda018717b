//! The crate's tests that no GPU machine runs, through its public face: one binary, since linking takes longer than running.

#[path = "../common/mod.rs"]
mod common;

mod checkpoints;
mod convolutional;
mod mathematics;
mod steps_end;
mod survivors;
