//! The operations of convolutional models. Images lie with their channels last, [samples, height, width,
//! channels], so that a pixel is a row and what works on rows (products, column sums) works on images.
//! Images, filters and their gradients are of the kind of element that layers compute with; biases, what norms
//! are made of, and every sum over pixels are f32 in all of them.
//!
//! They stand apart from [`crate::device::Device`] because there are many of them, and no other model needs them.

use std::ops::Range;

use crate::device::{Mat, MatMut, Result, Sum};
use crate::tensor::{Element, Tensor};

/// Images seen through a window that moves over them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    pub samples: usize,
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    /// Rows and columns of the window.
    pub kernel: (usize, usize),
    pub stride: usize,
    /// Pixels above and below the image, and beside it: zeros to a convolution and an average, passed over by a maximum.
    pub padding: (usize, usize),
}

impl Window {
    /// Places of the window in a column, and in a row.
    pub fn places(&self) -> (usize, usize) {
        let places =
            |size: usize, kernel: usize, padding: usize| (size + 2 * padding - kernel) / self.stride + 1;
        let down = places(self.height, self.kernel.0, self.padding.0);
        (down, places(self.width, self.kernel.1, self.padding.1))
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

    /// Whether what lies under the window is a row as it is: a pixel alone, or a whole image.
    pub fn is_row(&self) -> bool {
        let plain = self.padding == (0, 0);
        plain && ((self.kernel, self.stride) == ((1, 1), 1) || self.kernel == (self.height, self.width))
    }
}

/// A convolution's weight, [outputs, window's rows, window's columns, channels]: channels last like the images.
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

/// Integers of a mask: a bit for each number, every row beginning with an integer of its own. A bit says that a
/// ReLU let its number through, which is all that the backward needs: the numbers themselves go on to the next
/// layer.
pub fn mask_elements(rows: usize, cols: usize) -> usize {
    rows * cols.div_ceil(32)
}

/// Integers that hold a byte for each of `elements`.
pub fn byte_elements(elements: usize) -> usize {
    elements.div_ceil(4)
}

/// The byte of a maximum that a ReLU did not let through; others are places in the window, counted by rows.
pub const NO_PLACE: u8 = u8::MAX;

/// What images are normed by, column by column (a column being a channel): `weight * (x - mean) /
/// sqrt(variance + eps) + bias`. It concerns some rows of the images: those of one group of samples, which has
/// statistics of its own. All f32.
#[derive(Clone)]
pub struct ColumnNorm<'a> {
    pub eps: f32,
    pub rows: Range<usize>,
    pub cols: usize,
    /// One row.
    pub mean: Mat<'a>,
    /// One row.
    pub variance: Mat<'a>,
    pub weight: &'a Tensor,
    pub bias: &'a Tensor,
}

impl ColumnNorm<'_> {
    /// # Panics
    /// If what it is made of has not as many columns as it says, or `x` or the mask not all its rows.
    pub(crate) fn assert_fits(&self, x: &Tensor, mask: Option<&Tensor>) {
        let cols = self.cols;
        let floats =
            |tensor: &Tensor, elements: usize| (tensor.len(), tensor.element()) == (elements, Element::F32);
        for row in [self.mean, self.variance] {
            assert_eq!((row.rows, row.cols, row.tensor.element()), (1, cols, Element::F32));
        }
        assert!(floats(self.weight, cols) && floats(self.bias, cols));
        assert!(self.rows.start <= self.rows.end && self.rows.end * cols <= x.len());
        assert!(x.len().is_multiple_of(cols));
        assert!(mask.is_none_or(|mask| floats(mask, mask_elements(x.len() / cols, cols))));
    }
}

/// Sums that a batch norm's gradients add to, beside those of its group.
pub struct NormGradients<'a> {
    pub bias: Sum<'a>,
    pub weight: Sum<'a>,
    /// Where the group's statistics go, once: means and variances, each times its factor.
    pub running: Option<[(f32, Sum<'a>); 2]>,
}

/// See [`crate::device::Device`], of which it is a part.
pub trait Convolutional {
    /// f32 of [samples, channels, pixels] to [samples, pixels, channels] of any element.
    fn channels_last(&self, samples: usize, channels: usize, images: &Tensor, out: &mut Tensor) -> Result;

    /// `out = bias + x convolved with the filters`, then ReLU where there is a mask to fill. `scratch` (f32) is
    /// the device's to use: what lies under the window is gathered there, as many places at a time as fit, or a
    /// library works in it. The CPU leaves it alone: its sums stay in registers. Where [`Window::is_row`] there is none.
    #[allow(clippy::too_many_arguments)]
    fn convolution(
        &self,
        window: Window,
        x: &Tensor,
        filters: Filters,
        bias: Option<&Tensor>,
        mask: Option<&mut Tensor>,
        scratch: Option<&mut Tensor>,
        out: &mut Tensor,
    ) -> Result;

    /// `dx =` the gradient of the convolution's input.
    fn convolution_input_gradient(
        &self,
        window: Window,
        dy: &Tensor,
        filters: Filters,
        scratch: Option<&mut Tensor>,
        dx: &mut Tensor,
    ) -> Result;

    /// `gradient (+)=` the gradient of the filters, f32 (laid out like them).
    fn convolution_weight_gradient(
        &self,
        window: Window,
        x: &Tensor,
        dy: &Tensor,
        scratch: Option<&mut Tensor>,
        gradient: Sum,
    ) -> Result;

    /// Where the ReLU let nothing through, the gradient becomes zero; `sums (+)=` its column sums then.
    fn relu_gradient(&self, cols: usize, mask: &Tensor, gradient: &mut Tensor, sums: Option<Sum>) -> Result;

    /// `out =` the largest number under the window in each channel, `+ bias`, then ReLU if `rectify`. A byte of
    /// `places` says where under the window it was (the first of equals), or [`NO_PLACE`].
    #[allow(clippy::too_many_arguments)]
    fn max_pool(
        &self,
        window: Window,
        x: &Tensor,
        bias: Option<&Tensor>,
        rectify: bool,
        places: &mut Tensor,
        out: &mut Tensor,
    ) -> Result;

    /// `dx =` the gradient of the pool's input; `sums (+)=` its column sums: the bias's gradient.
    fn max_pool_gradient(
        &self,
        window: Window,
        places: &Tensor,
        dy: &Tensor,
        dx: &mut Tensor,
        sums: Option<Sum>,
    ) -> Result;

    fn average_pool(&self, shape: Averages, x: &Tensor, out: &mut Tensor) -> Result;

    fn average_pool_gradient(&self, shape: Averages, dy: &Tensor, dx: &mut Tensor) -> Result;

    /// `out =` the sum of what lies under the window in each channel, over all its places, those in the padding
    /// included.
    fn window_average(&self, window: Window, x: &Tensor, out: &mut Tensor) -> Result;

    fn window_average_gradient(&self, window: Window, dy: &Tensor, dx: &mut Tensor) -> Result;

    /// `out = x`; of the same kind of element. What lies between the rows of `out` stays as it is.
    fn copy_rows(&self, x: Mat, out: MatMut) -> Result;

    /// `out (+)= factor * x`; of the same kind of element.
    fn add_scaled(&self, factor: f32, x: Mat, out: Sum) -> Result;

    /// Each column's mean, then each column's mean squared distance from it, in f32.
    fn column_statistics(&self, x: Mat, statistics: &mut Tensor) -> Result;

    /// Statistics of so many rows become those of these rows and of the other statistics' rows together.
    fn merge_statistics(&self, of: (&Tensor, usize), into: (&mut Tensor, usize)) -> Result;

    /// The norm's rows of `out` become those of `x` normed, plus those of `residual`, then ReLU where there is a
    /// mask to fill (its rows too). The tensors are whole, each with all rows.
    fn column_norm(
        &self,
        norm: &ColumnNorm,
        x: &Tensor,
        residual: Option<&Tensor>,
        mask: Option<&mut Tensor>,
        out: &mut Tensor,
    ) -> Result;

    /// What a group's members add up before any of them has its gradient: `sums (+)=` each column's sum of `dy` as
    /// the mask leaves it, then of that times the normed number; of the norm's rows. The former is added to the
    /// gradient of the norm's bias too, the latter to that of its weight.
    fn column_norm_sums(
        &self,
        norm: &ColumnNorm,
        x: &Tensor,
        mask: Option<&Tensor>,
        dy: &Tensor,
        sums: Sum,
        gradients: Option<NormGradients>,
    ) -> Result;

    /// The norm's rows of `x`, its input, become their gradient. `sums` are those of the whole group, which has
    /// `group_rows` rows. With `keep_masked` the rows of `dy` become what the mask leaves of them: the gradient
    /// of the residual.
    #[allow(clippy::too_many_arguments)]
    fn column_norm_gradient(
        &self,
        norm: &ColumnNorm,
        sums: &Tensor,
        group_rows: usize,
        mask: Option<&Tensor>,
        dy: &mut Tensor,
        keep_masked: bool,
        x: &mut Tensor,
    ) -> Result;
}
