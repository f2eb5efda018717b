//! One file a command. Each validates, calls the crates below and prints.

pub mod bench;
pub mod demo;
pub mod doctor;
pub mod export;
pub mod generate;
pub mod init;
pub mod lab;
pub mod plan;
pub mod profile;
pub mod simulate;
pub mod train;
pub mod trial;
pub mod validate;
pub mod verify;
pub mod worker;
