//! The crate's tests, through its public face: one binary, since linking takes longer than running.

#[path = "../common/mod.rs"]
mod common;

mod collectives;
mod identity;
mod messages;
mod reception;
mod wire;
