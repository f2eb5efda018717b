//! Other systems' published measurements beside what our models say. The files are not ours: whoever has them names
//! their folder.

pub mod cephalo;
pub mod deeppool;
pub mod sailor;
