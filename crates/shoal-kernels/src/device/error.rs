//! What can go wrong on a device, and what its user can do about it.

use thiserror::Error;

use crate::memory::MemoryError;

#[derive(Debug, Error)]
pub enum DeviceError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("{part} is not on this machine: {library} cannot be loaded")]
    NoLibrary { library: &'static str, part: &'static str },
    #[error("the NVIDIA driver is too old: it speaks CUDA {}.{}, {}.{} is needed", found / 1000, found % 1000 / 10, needed / 1000, needed % 1000 / 10)]
    OldDriver { found: i32, needed: i32 },
    #[error("there is no GPU {asked}: the driver finds {found}")]
    NoGpu { asked: usize, found: usize },
    #[error("this machine's NVRTC {}.{} has no code for a GPU of compute capability {}.{}", nvrtc.0, nvrtc.1, capability / 10, capability % 10)]
    OldGpu { capability: i32, nvrtc: (i32, i32) },
    #[error("{device}: {call} failed: {system}")]
    Driver { device: String, call: &'static str, system: String },
    #[error("the kernels could not be compiled: {call} failed: {said}")]
    Compile { call: &'static str, said: String },
    #[error("{call} failed: {said}")]
    Blas { call: &'static str, said: String },
    #[error("{call} failed: {said}")]
    Cudnn { call: &'static str, said: String },
}

impl DeviceError {
    pub fn hint(&self) -> Option<String> {
        match self {
            DeviceError::Memory(error) => error.hint(),
            DeviceError::NoLibrary { library, .. } => Some(match *library {
                "libcuda.so.1" => "install the NVIDIA driver, or train on the processor".into(),
                library => format!(
                    "install the CUDA runtime libraries (12 or newer) and name {library}'s folder in LD_LIBRARY_PATH, or train on the processor"
                ),
            }),
            DeviceError::OldDriver { .. } => Some("install a newer NVIDIA driver".into()),
            DeviceError::NoGpu { .. } => {
                Some("look at nvidia-smi and CUDA_VISIBLE_DEVICES, or train on the processor".into())
            }
            DeviceError::OldGpu { .. } => {
                Some("install the libraries of an older CUDA: version 12 still has this GPU".into())
            }
            DeviceError::Driver { .. } => {
                Some("nvidia-smi shows the state of the GPU; the kernel log names hardware faults".into())
            }
            DeviceError::Compile { .. } | DeviceError::Blas { .. } | DeviceError::Cudnn { .. } => None,
        }
    }
}
