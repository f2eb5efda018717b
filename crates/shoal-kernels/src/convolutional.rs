//! The operations of convolutional models. Images lie with their channels last, [samples, height, width,
//! channels], so that a pixel is a row and what works on rows (products, column sums) works on images.
//!
//! They stand apart from [`crate::device::Device`] because a device may be without them: each says so with an
//! error of its own kind, until it has an implementation.

use crate::device::{DeviceError, Mat, Result, Sum};
use crate::tensor::Tensor;

/// Images seen through a window that moves over them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    pub samples: usize,
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    /// Rows and columns of the window.
    pub kernel: (usize, usize),
    pub stride: usize,
    /// Pixels around the image: zeros to a convolution, passed over by a maximum.
    pub padding: usize,
}

impl Window {
    /// Places of the window in a column, and in a row.
    pub fn places(&self) -> (usize, usize) {
        let places = |size: usize, kernel: usize| (size + 2 * self.padding - kernel) / self.stride + 1;
        (places(self.height, self.kernel.0), places(self.width, self.kernel.1))
    }

    /// Places over all samples: rows of what the window makes.
    pub fn rows(&self) -> usize {
        self.samples * self.places().0 * self.places().1
    }

    /// Numbers under the window.
    pub fn elements(&self) -> usize {
        self.kernel.0 * self.kernel.1 * self.channels
    }

    /// Numbers of the images.
    pub fn input_elements(&self) -> usize {
        self.samples * self.height * self.width * self.channels
    }

    /// Whether the window sees each pixel alone, so that pixels are its rows as they lie.
    pub fn is_pixel(&self) -> bool {
        (self.kernel, self.stride, self.padding) == ((1, 1), 1, 0)
    }
}

/// A convolution's weight, [outputs, channels, height, width] as torchvision stores it.
#[derive(Clone, Copy)]
pub struct Filters<'a> {
    pub weight: &'a Tensor,
    pub outputs: usize,
}

/// Images averaged over bins: as many as asked for, as equal as whole pixels allow. Neighbours share a row or
/// column of pixels where the size is no multiple.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Averages {
    pub samples: usize,
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    /// Bins in a column, and in a row.
    pub bins: (usize, usize),
}

/// Integers that hold a bit for each of `elements`.
pub fn mask_elements(elements: usize) -> usize {
    elements.div_ceil(32)
}

fn missing(operation: &'static str) -> Result {
    Err(DeviceError::NotHere { operation })
}

/// Every default says that the device does not have the operation yet.
pub trait Convolutional {
    /// [samples, channels, pixels] to [samples, pixels, channels].
    fn channels_last(
        &self,
        _samples: usize,
        _channels: usize,
        _images: &Tensor,
        _out: &mut Tensor,
    ) -> Result {
        missing("channels_last")
    }

    /// `out = bias + x convolved with the filters`. What lies under the window is gathered in `scratch`, as many
    /// places at a time as fit; a window that sees single pixels needs none.
    fn convolution(
        &self,
        _window: Window,
        _x: &Tensor,
        _filters: Filters,
        _bias: Option<&Tensor>,
        _scratch: Option<&mut Tensor>,
        _out: &mut Tensor,
    ) -> Result {
        missing("convolution")
    }

    /// `dx =` the gradient of the convolution's input.
    fn convolution_input_gradient(
        &self,
        _window: Window,
        _dy: &Tensor,
        _filters: Filters,
        _scratch: Option<&mut Tensor>,
        _dx: &mut Tensor,
    ) -> Result {
        missing("convolution_input_gradient")
    }

    /// `gradient (+)=` the gradient of the filters.
    fn convolution_weight_gradient(
        &self,
        _window: Window,
        _x: &Tensor,
        _dy: &Tensor,
        _scratch: Option<&mut Tensor>,
        _gradient: Sum,
    ) -> Result {
        missing("convolution_weight_gradient")
    }

    /// The largest number under the window in each channel; `places` says which pixel of its image it came from,
    /// the first of equals.
    fn max_pool(&self, _window: Window, _x: &Tensor, _places: &mut Tensor, _out: &mut Tensor) -> Result {
        missing("max_pool")
    }

    fn max_pool_gradient(&self, _window: Window, _places: &Tensor, _dy: &Tensor, _dx: &mut Tensor) -> Result {
        missing("max_pool_gradient")
    }

    fn average_pool(&self, _shape: Averages, _x: &Tensor, _out: &mut Tensor) -> Result {
        missing("average_pool")
    }

    fn average_pool_gradient(&self, _shape: Averages, _dy: &Tensor, _dx: &mut Tensor) -> Result {
        missing("average_pool_gradient")
    }

    /// Negative numbers become zero; a bit of `mask` says of each number whether it was positive. A bit is all that
    /// the backward needs: the numbers themselves go on to the next layer.
    fn relu(&self, _x: &mut Tensor, _mask: Option<&mut Tensor>) -> Result {
        missing("relu")
    }

    /// The gradient becomes zero where the number was not positive.
    fn relu_gradient(&self, _mask: &Tensor, _gradient: &mut Tensor) -> Result {
        missing("relu_gradient")
    }

    /// `out (+)= factor * x`
    fn add_scaled(&self, _factor: f32, _x: Mat, _out: Sum) -> Result {
        missing("add_scaled")
    }

    /// Each column's mean, then each column's mean squared distance from it.
    fn column_statistics(&self, _x: Mat, _statistics: &mut Tensor) -> Result {
        missing("column_statistics")
    }

    /// `out = residual + bias + weight * (x - mean) / sqrt(variance + eps)`, by column.
    #[allow(clippy::too_many_arguments)]
    fn column_norm(
        &self,
        _eps: f32,
        _x: Mat,
        _mean: Mat,
        _variance: Mat,
        _weight: &Tensor,
        _bias: &Tensor,
        _residual: Option<&Tensor>,
        _out: &mut Tensor,
    ) -> Result {
        missing("column_norm")
    }

    /// What a group's members add up before any of them has its gradient: each column's sum of `dy`, which is the
    /// bias's gradient, then of `dy` times the normed number, the weight's.
    fn column_norm_sums(
        &self,
        _eps: f32,
        _x: Mat,
        _statistics: &Tensor,
        _dy: &Tensor,
        _sums: &mut Tensor,
    ) -> Result {
        missing("column_norm_sums")
    }

    /// The gradient of the norm's output becomes that of its input; `sums` are those of the `rows` rows that the
    /// statistics were made of.
    #[allow(clippy::too_many_arguments)]
    fn column_norm_gradient(
        &self,
        _eps: f32,
        _x: Mat,
        _statistics: &Tensor,
        _weight: &Tensor,
        _sums: &Tensor,
        _rows: usize,
        _gradient: &mut Tensor,
    ) -> Result {
        missing("column_norm_gradient")
    }
}
