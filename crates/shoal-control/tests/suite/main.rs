//! The crate's tests, through its public face: one binary, since linking takes longer than running.

#[path = "../common/mod.rs"]
mod common;

mod controller;
mod hostile;
mod log;
mod receipt;
mod worker;
