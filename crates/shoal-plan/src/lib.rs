//! The table that says who computes which samples and who keeps which state, and the program compiled from
//! it. Everything that moves during training is derived from the table; everything that happens is an
//! instruction of the program. The simulator and the engine run the same program. No tensors here.
//!
//! - [`table`]: the plan, a row per layer and a row per tensor.
//! - [`program`]: instructions, lanes, JSON.
//! - [`events`]: what is foreseen on a virtual clock.
//! - [`layout`]: what moves, derived from the table.
//! - [`parts`]: which elements pass where parameters are gathered, and gradients added up and handed over.
//! - [`schedule`]: the order of a whole step over all devices.
//! - [`compile`]: from table to programs.
//! - [`effects`]: what each instruction reads, makes, uses up and adds to.
//! - [`verify`]: whether a program's order is one its dependencies allow.
//! - [`memory`]: a program's memory over its course, to the byte.
//! - [`difference`]: what moves when one table replaces another.
//! - [`standing`]: where survivors of a step that was cut short stand, and where they all go.
//! - [`dispatch`]: which of several jobs a device serves next.
//! - [`draw`]: random tables, for tests of what must hold for all.
//! - [`one_device`]: the search for the best table on a single device.
//! - [`parallel`]: the same work on several things at once.

pub mod compile;
pub mod difference;
pub mod dispatch;
pub mod draw;
pub mod effects;
pub mod events;
pub mod layout;
pub mod meetings;
pub mod memory;
pub mod one_device;
pub mod parallel;
pub mod parts;
pub mod program;
pub mod schedule;
pub mod standing;
pub mod table;
pub mod verify;

pub use compile::{CompileError, Ordered, compile, compile_in, compile_paced};
pub use layout::{Group, Layout, Share};
pub use meetings::{Meeting, Meetings};
pub use memory::{MemoryForecast, forecast};
pub use one_device::{DeviceOffer, PlanError, Planned, Preferences, StepShape, plan_one_device};
pub use parts::{GatheredPart, ReducedPart, common};
pub use program::{Instruction, Keep, Lane, Moved, Op, Pass, Program, Purpose};
pub use schedule::{ByArithmetic, Pace, is_remade};
pub use standing::{Closing, Disagreement, Standing, Target, agree, meet};
pub use table::{
    Activations, Compute, ComputeCopy, DeviceRow, GradientWire, Held, Holder, LayerRow, Order, Plan,
    Residence, Samples, Slice, TensorRow, Tier,
};
pub use verify::{ProgramError, verify, verify_all};
