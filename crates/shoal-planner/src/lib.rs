//! The searches for the best table. Each knows one shape of it and a cost model for that shape.
//!
//! - [`pipeline`]: runs of layers on devices one after the other, in replicas.
//! - [`mirrors`]: state on several machines, against the loss of some.
//! - [`mixed`]: pipelines whose stages are groups of devices.
//! - [`sharded`]: every layer on every device; samples and state divided separately, by what each device can do.
//! - [`spilled`]: state on hosts and disks, layers streamed through a device; several models on a pool.
//! - [`burst`]: to each layer the number of devices that suits it.
//! - [`auto`]: the best of all shapes.
//! - [`improve()`]: a plan of any shape made better step by step.
//! - `leeway`: how far devices may go ahead where something is late.
//! - [`breakdown`]: where each device's part of a step goes.
//! - [`replan`]: a plan anew for a fleet that has changed, and what the change costs.
//! - [`run`]: whole runs over a fleet that comes and goes.
//! - [`usual`]: what is run where nobody plans, to set the others beside.
//! - [`validation`]: other systems' published measurements beside what our models say.

pub mod auto;
mod bound;
pub mod breakdown;
pub mod burst;
mod improve;
mod leeway;
pub mod mirrors;
pub mod mixed;
pub mod pipeline;
pub mod replan;
pub mod run;
pub mod sharded;
pub mod spilled;
pub mod usual;
pub mod validation;

pub use improve::improve;
use shoal_fleet::Fleet;
use shoal_model::LayerKind;
use shoal_plan::{Activations, DeviceRow};

/// Bytes that a process takes of a GPU beside what is counted: the driver's context, the loaded kernels and libraries. On
/// an H200, 550 to 590 MiB were seen from 13 to 30 GiB of training.
pub const GPU_PROCESS_BYTES: u64 = 560 << 20;

/// Room for what a GPU device takes of what is counted, whatever runs: its libraries' 32 MiB, and some tables.
pub const GPU_WORKSPACE_BYTES: u64 = 64 << 20;

/// A fleet's devices as plans know them.
pub fn device_rows(fleet: &Fleet) -> Vec<DeviceRow> {
    let rows = fleet.devices.iter().map(|device| DeviceRow {
        name: device.name.clone(),
        budget_bytes: device.memory_bytes.saturating_sub(GPU_PROCESS_BYTES),
        workspace_bytes: GPU_WORKSPACE_BYTES,
        stash: None,
        leeway: 0,
        puts_off: 0,
    });
    rows.collect()
}

/// What becomes of a layer's activations where a device's are treated in one way. Unless all go layer by layer, a head's backward
/// follows its forward at once: making it again would only cost.
fn kept(kind: &LayerKind, activations: Activations) -> Activations {
    if matches!(kind, LayerKind::Head(_)) { Activations::Keep } else { activations }
}
