//! One file a command. Each validates, calls the crates below and prints.

pub mod bench;
pub mod chaos;
pub mod demo;
pub mod doctor;
pub mod events;
pub mod export;
pub mod generate;
pub mod init;
pub mod join;
pub mod lab;
pub mod logs;
pub mod plan;
pub mod profile;
pub mod ps;
pub mod receipt;
pub mod simulate;
pub mod token;
pub mod train;
pub mod trial;
pub mod up;
pub mod validate;
pub mod verify;
pub mod wish;
pub mod worker;
