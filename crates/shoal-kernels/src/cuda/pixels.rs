//! What convolutional models do to images beside convolving them.

use super::CudaDevice;
use crate::convolutional::{Convolutional, Filters, Window};
use crate::device::{Result, Sum};
use crate::tensor::Tensor;

impl Convolutional for CudaDevice {
    fn convolution(
        &self,
        window: Window,
        x: &Tensor,
        filters: Filters,
        _bias: Option<&Tensor>,
        _mask: Option<&mut Tensor>,
        scratch: Option<&mut Tensor>,
        out: &mut Tensor,
    ) -> Result {
        self.convolve(window, x, filters, scratch, out)
    }

    fn convolution_input_gradient(
        &self,
        window: Window,
        dy: &Tensor,
        filters: Filters,
        scratch: Option<&mut Tensor>,
        dx: &mut Tensor,
    ) -> Result {
        self.convolve_input_gradient(window, dy, filters, scratch, dx)
    }

    fn convolution_weight_gradient(
        &self,
        window: Window,
        x: &Tensor,
        dy: &Tensor,
        scratch: Option<&mut Tensor>,
        gradient: Sum,
    ) -> Result {
        self.convolve_weight_gradient(window, x, dy, scratch, gradient)
    }
}
