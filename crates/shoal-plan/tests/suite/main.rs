//! The crate's tests, through its public face: one binary, since linking takes longer than running.

mod difference;
mod programs;
mod standing;
mod tables;
