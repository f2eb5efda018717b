//! Matrix products by cuBLAS in plain fp32. Our matrices are rows after rows, cuBLAS's columns after
//! columns: the transposed product of the transposed matrices is the same memory.

use std::sync::Arc;

use cudarc::cublas::{result, sys};

use super::context::Context;
use super::launch::Address;
use crate::device::{DeviceError, Result};
use crate::tensor::Tensor;

/// What cuBLAS may use for itself, counted like everything else; NVIDIA's advice for Hopper, more than
/// enough for older ones.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// A matrix as a product reads it: rows of `stride`, or, transposed, columns of it.
#[derive(Clone, Copy)]
pub(super) struct Factor {
    pub(super) at: Address,
    pub(super) stride: usize,
    pub(super) transposed: bool,
}

pub(super) struct Blas {
    context: Arc<Context>,
    handle: sys::cublasHandle_t,
    /// Keeps the memory that the handle was given.
    _workspace: Tensor,
}

// SAFETY: a handle may be used from any thread, by one at a time: the device holds it behind a lock.
unsafe impl Send for Blas {}

impl Blas {
    pub(super) fn new(context: Arc<Context>, workspace: Tensor) -> Result<Blas> {
        // SAFETY: only asks whether the library can be loaded.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::NoLibrary { library: "libcublas.so", part: "cuBLAS" });
        }
        context.enter()?;
        let handle = result::create_handle()
            .map_err(|error| DeviceError::Blas { call: "cublasCreate", said: format!("{:?}", error.0) })?;
        // From here on, dropping destroys the handle.
        let blas = Blas { context, handle, _workspace: workspace };
        let (at, bytes) = (blas._workspace.address(), blas._workspace.bytes());
        // SAFETY: the stream lives as long as the context, the workspace as long as the handle.
        unsafe {
            blas.check("cublasSetStream", sys::cublasSetStream_v2(handle, blas.context.stream().cast()))?;
            blas.check("cublasSetWorkspace", sys::cublasSetWorkspace_v2(handle, at.cast(), bytes))?;
            // fp32 as it is, no TF32: this mode is the reference.
            let mode = sys::cublasMath_t::CUBLAS_DEFAULT_MATH;
            blas.check("cublasSetMathMode", sys::cublasSetMathMode(handle, mode))?;
        }
        Ok(blas)
    }

    fn check(&self, call: &'static str, status: sys::cublasStatus_t) -> Result {
        status.result().map_err(|error| DeviceError::Blas { call, said: format!("{:?}", error.0) })
    }

    /// `out[m, n] (+)= a[m, k] * b[k, n]`
    ///
    /// # Safety
    /// All three lie inside device memory that may be used so.
    pub(super) unsafe fn product(
        &self,
        (m, n, k): (usize, usize, usize),
        out: (Address, usize),
        accumulate: bool,
        a: Factor,
        b: Factor,
    ) -> Result {
        if m == 0 || n == 0 {
            return Ok(());
        }
        self.context.enter()?;
        let operation = |factor: Factor| match factor.transposed {
            true => sys::cublasOperation_t::CUBLAS_OP_T,
            false => sys::cublasOperation_t::CUBLAS_OP_N,
        };
        let size = |value: usize| i32::try_from(value).expect("a side of a matrix fits 31 bits");
        let (alpha, beta) = (1.0f32, if accumulate { 1.0f32 } else { 0.0 });
        // SAFETY: by this function's contract; scalars are read from the host during the call.
        let status = unsafe {
            sys::cublasSgemm_v2(
                self.handle,
                operation(b),
                operation(a),
                size(n),
                size(m),
                size(k),
                &alpha,
                b.at.0 as *const f32,
                size(b.stride.max(1)),
                a.at.0 as *const f32,
                size(a.stride.max(1)),
                &beta,
                out.0.0 as *mut f32,
                size(out.1.max(1)),
            )
        };
        self.check("cublasSgemm", status)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        let _ = self.context.wait();
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}
