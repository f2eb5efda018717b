//! Convolutions and their gradients.

use super::CudaDevice;
use crate::convolutional::{Filters, Window};
use crate::device::{DeviceError, Result, Sum};
use crate::tensor::Tensor;

impl CudaDevice {
    /// `out = x convolved with the filters`
    pub(super) fn convolve(
        &self,
        _window: Window,
        _x: &Tensor,
        _filters: Filters,
        _scratch: Option<&mut Tensor>,
        _out: &mut Tensor,
    ) -> Result {
        Err(DeviceError::NotHere { operation: "convolution" })
    }

    pub(super) fn convolve_input_gradient(
        &self,
        _window: Window,
        _dy: &Tensor,
        _filters: Filters,
        _scratch: Option<&mut Tensor>,
        _dx: &mut Tensor,
    ) -> Result {
        Err(DeviceError::NotHere { operation: "convolution_input_gradient" })
    }

    pub(super) fn convolve_weight_gradient(
        &self,
        _window: Window,
        _x: &Tensor,
        _dy: &Tensor,
        _scratch: Option<&mut Tensor>,
        _gradient: Sum,
    ) -> Result {
        Err(DeviceError::NotHere { operation: "convolution_weight_gradient" })
    }
}
