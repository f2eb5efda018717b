//! The crate's tests, through its public face: one binary, since linking takes longer than running.

#[path = "../common/mod.rs"]
mod common;

mod access;
mod drills;
mod fuzz;
mod life;
mod notices;
