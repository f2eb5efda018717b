//! Device memory and the operations on it. Layers call [`Device`], never a kind of hardware, and know no
//! kernel; kernels know no model.
//!
//! - [`memory`]: one arena per device, every byte counted against a budget.
//! - [`tensor`]: an owned piece of that memory.
//! - [`allocator`]: the process's own memory, for binaries that train.
//! - [`buffer`]: host memory for what is on its way.
//! - [`half`]: how numbers go into elements of two bytes.
//! - [`device`]: the operations every device offers, fused where that saves a pass over memory.
//! - [`convolutional`]: those that only convolutional models need.
//! - [`random`]: numbers as a pure function of where they are used, so that dropout and initial weights do
//!   not notice the plan.
//! - [`cpu`]: those operations on the cores of this machine (AVX-512, AVX2 or plain, found at start).
//! - [`cuda`]: the same on an NVIDIA GPU, whose libraries are looked for when one is opened.
//! - [`late`]: a processor that works behind the host's back, as GPUs do, for tests where there is none.

pub mod allocator;
pub mod buffer;
pub mod convolutional;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod half;
pub mod late;
pub mod memory;
pub mod random;
pub mod tensor;

pub use allocator::Allocator;
pub use buffer::HostBuffer;
pub use convolutional::{Averages, ColumnNorm, Convolutional, Filters, NormGradients, Window};
pub use cpu::CpuDevice;
pub use cuda::CudaDevice;
pub use device::{
    AdamW, AttentionBackward, AttentionShape, ClassLoss, Device, DropoutSite, Gelu, Guard, Linear, LossMode,
    Mark, Mat, MatMut, NormKind, Pass, PatchShape, Sgd, Stamp, Updated,
};
pub use late::{LateDevice, Lateness};
pub use memory::{Arena, MemoryError};
pub use tensor::{Element, Tensor};
