//! The crate's tests, through its public face: one binary, since linking takes longer than running.

mod burst_tables;
mod mirrors;
mod mixed;
mod pipeline;
mod replan;
mod run;
mod spilled;
