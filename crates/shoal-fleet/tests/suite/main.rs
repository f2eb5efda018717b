//! The crate's tests, through its public face: one binary, since linking takes longer than running.

mod costs;
mod fleet;
mod profile;
