//! The searches for the best table. Each knows one shape of it and a cost model for that shape.
//!
//! - [`pipeline`]: runs of layers on devices one after the other, in replicas.
//! - [`sharded`]: every layer on every device; samples and state divided separately, by what each device can do.
//! - [`burst`]: to each layer the number of devices that suits it.
//! - [`validation`]: other systems' published measurements beside what our models say.

pub mod burst;
pub mod pipeline;
pub mod sharded;
pub mod validation;
