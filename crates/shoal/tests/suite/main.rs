//! The command line's tests that nothing else on the machine disturbs: one binary, since linking takes longer than most of them.

#[path = "../common/mod.rs"]
mod common;

mod any_table;
mod convolutional;
mod errors;
mod fleet;
mod images;
mod masked;
mod pictures;
mod profile;
mod program;
mod replay;
mod resume;
