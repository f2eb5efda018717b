//! What convolutional models do to images beside convolving them: [`norm`]s and [`pools`] in files of their own, and
//! here what is done to numbers one by one. How rows are shared out is decided in [`strips`].

mod norm;
mod pools;
mod strips;

use super::launch::{Address, Grid, at_or_null, launch};
use super::reduce::RowsSum;
use super::{CudaDevice, THREADS, element_of};
use crate::convolutional::{
    Averages, ColumnNorm, Convolutional, Filters, NormGradients, Window, mask_elements,
};
use crate::device::{Mat, MatMut, Result, Sum};
use crate::tensor::{Element, Tensor};
use strips::{EIGHT, Strips};

/// ADDED of pixels.cu: eights of a thread that adds numbers lying side by side.
const ADDED: usize = 2;
/// TILE_CHANNELS and TILE_FLOATS of pixels.cu.
const TILE_CHANNELS: usize = 32;
const TILE_FLOATS: usize = 4096;

/// # Panics
/// If the tensor is not f32 of this length.
fn assert_floats(tensor: &Tensor, elements: usize) {
    assert_eq!((tensor.len(), tensor.element()), (elements, Element::F32));
}

/// # Panics
/// If it is not a mask of these rows.
fn assert_mask(mask: Option<&Tensor>, rows: usize, cols: usize) {
    if let Some(mask) = mask {
        assert_floats(mask, mask_elements(rows, cols));
    }
}

impl CudaDevice {
    /// `out += bias`, then ReLU where there is a mask to fill.
    fn add_bias(
        &self,
        cols: usize,
        bias: Option<&Tensor>,
        mask: Option<&mut Tensor>,
        out: &mut Tensor,
    ) -> Result {
        let (rows, element) = (out.len() / cols, out.element());
        assert_eq!(out.len(), rows * cols);
        assert_mask(mask.as_deref(), rows, cols);
        if let Some(bias) = bias {
            assert_floats(bias, cols);
        }
        let strips = Strips::passing(self, rows, cols, mask.is_some());
        let (grid, bias, mask, out) =
            (strips.grid(), at_or_null(bias), at_or_null(mask.as_deref()), out.at(0));
        // SAFETY: the lengths are asserted.
        unsafe { launch!(self, "pixel_bias" of element, grid, strips.parameter(), bias, mask, out) }
    }

    fn mask_gradient(&self, cols: usize, mask: &Tensor, gradient: &mut Tensor, sums: Option<Sum>) -> Result {
        let (rows, element) = (gradient.len() / cols, gradient.element());
        assert_eq!(gradient.len(), rows * cols);
        assert_mask(Some(mask), rows, cols);
        if let Some((sums, _)) = &sums {
            assert_floats(sums, cols);
        }
        let strips = Strips::summing(rows, cols, 1);
        let (held, to) = (self.parts(), RowsSum::from(sums));
        let (grid, mask, gradient) = (strips.grid(), mask.at(0), gradient.at(0));
        let (parts, counters) = (held.at(0), self.counters.at(0));
        // SAFETY: the lengths are asserted; the parts and counters suffice for a cut that sums.
        unsafe {
            launch!(
                self,
                "pixel_mask" of element,
                grid,
                strips.parameter(),
                mask,
                gradient,
                parts,
                counters,
                to
            )
        }
    }

    fn add_rows_scaled(&self, factor: f32, x: Mat, (out, accumulate): Sum) -> Result {
        let (count, element) = (x.rows * x.cols, element_of(&[x.tensor, out]));
        assert_eq!(out.len(), count);
        let (from, to, accumulate) = (x.tensor.at(x.offset), out.at(0), i32::from(accumulate));
        if x.stride == x.cols || x.rows == 1 {
            let grid = Grid::blocks(count.div_ceil(ADDED * THREADS * EIGHT));
            // SAFETY: both have so many numbers side by side.
            return unsafe {
                launch!(self, "pixel_add" of element, grid, count, factor, from, to, accumulate)
            };
        }
        let strips = Strips::passing(self, x.rows, x.cols, false).of(x.tensor, x.offset, x.stride);
        let (grid, stride) = (strips.grid(), x.stride);
        // SAFETY: a matrix lies inside its tensor, and the output has as many rows.
        unsafe {
            launch!(
                self,
                "pixel_add_rows" of element,
                grid,
                strips.parameter(),
                factor,
                from,
                stride,
                to,
                accumulate
            )
        }
    }

    fn move_rows(&self, x: Mat, out: MatMut) -> Result {
        assert_eq!((x.rows, x.cols), (out.rows, out.cols));
        let (element, strips) =
            (element_of(&[x.tensor, out.tensor]), Strips::passing(self, x.rows, x.cols, false));
        let strips = strips.of(x.tensor, x.offset, x.stride).of(out.tensor, out.offset, out.stride);
        let (from, to) = (x.tensor.at(x.offset), out.tensor.at(out.offset));
        let (grid, stride, out_stride) = (strips.grid(), x.stride, out.stride);
        // SAFETY: both matrices lie inside their tensors and have as many rows and columns.
        unsafe {
            launch!(self, "pixel_copy" of element, grid, strips.parameter(), from, stride, to, out_stride)
        }
    }

    fn turn_channels(&self, samples: usize, channels: usize, images: &Tensor, out: &mut Tensor) -> Result {
        let (pixels, element) = (out.len() / (samples * channels).max(1), out.element());
        assert_eq!(out.len(), samples * channels * pixels);
        assert_floats(images, out.len());
        assert!(samples < 1 << 16, "{samples} samples at once");
        // As many pixels as there is room for, in whole warps.
        let tile = TILE_FLOATS / channels.clamp(1, TILE_CHANNELS) / 32 * 32;
        let grid = Grid {
            blocks: [pixels.div_ceil(tile), channels.div_ceil(TILE_CHANNELS), samples],
            threads: [THREADS, 1],
            shared_bytes: 0,
        };
        let (tile, images, out): (_, Address, Address) = (tile as i32, images.at(0), out.at(0));
        // SAFETY: both have the numbers of so many samples; a tile's floats fit.
        unsafe { launch!(self, "pixel_channels_last" of element, grid, channels, pixels, tile, images, out) }
    }
}

impl Convolutional for CudaDevice {
    fn channels_last(&self, samples: usize, channels: usize, images: &Tensor, out: &mut Tensor) -> Result {
        self.turn_channels(samples, channels, images, out)
    }

    fn convolution(
        &self,
        window: Window,
        x: &Tensor,
        filters: Filters,
        bias: Option<&Tensor>,
        mask: Option<&mut Tensor>,
        scratch: Option<&mut Tensor>,
        out: &mut Tensor,
    ) -> Result {
        self.convolve(window, x, filters, scratch, out)?;
        if bias.is_none() && mask.is_none() {
            return Ok(());
        }
        self.add_bias(filters.outputs, bias, mask, out)
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

    fn relu_gradient(&self, cols: usize, mask: &Tensor, gradient: &mut Tensor, sums: Option<Sum>) -> Result {
        self.mask_gradient(cols, mask, gradient, sums)
    }

    fn max_pool(
        &self,
        window: Window,
        x: &Tensor,
        bias: Option<&Tensor>,
        rectify: bool,
        places: &mut Tensor,
        out: &mut Tensor,
    ) -> Result {
        self.maxima(window, x, bias, rectify, places, out)
    }

    fn max_pool_gradient(
        &self,
        window: Window,
        places: &Tensor,
        dy: &Tensor,
        dx: &mut Tensor,
        sums: Option<Sum>,
    ) -> Result {
        self.maxima_gradient(window, places, dy, dx)?;
        sums.map_or(Ok(()), |sums| self.maxima_sums(window, places, dy, sums))
    }

    fn average_pool(&self, shape: Averages, x: &Tensor, out: &mut Tensor) -> Result {
        self.averages(shape, x, out)
    }

    fn average_pool_gradient(&self, shape: Averages, dy: &Tensor, dx: &mut Tensor) -> Result {
        self.averages_gradient(shape, dy, dx)
    }

    fn window_average(&self, window: Window, x: &Tensor, out: &mut Tensor) -> Result {
        self.window_means(window, x, out)
    }

    fn window_average_gradient(&self, window: Window, dy: &Tensor, dx: &mut Tensor) -> Result {
        self.window_means_gradient(window, dy, dx)
    }

    fn copy_rows(&self, x: Mat, out: MatMut) -> Result {
        self.move_rows(x, out)
    }

    fn add_scaled(&self, factor: f32, x: Mat, out: Sum) -> Result {
        self.add_rows_scaled(factor, x, out)
    }

    fn column_statistics(&self, x: Mat, statistics: &mut Tensor) -> Result {
        self.measure_columns(x, statistics)
    }

    fn merge_statistics(&self, of: (&Tensor, usize), into: (&mut Tensor, usize)) -> Result {
        self.merge_columns(of, into)
    }

    fn column_norm(
        &self,
        norm: &ColumnNorm,
        x: &Tensor,
        residual: Option<&Tensor>,
        mask: Option<&mut Tensor>,
        out: &mut Tensor,
    ) -> Result {
        self.norm_columns(norm, x, residual, mask, out)
    }

    fn column_norm_sums(
        &self,
        norm: &ColumnNorm,
        x: &Tensor,
        mask: Option<&Tensor>,
        dy: &Tensor,
        sums: Sum,
        gradients: Option<NormGradients>,
    ) -> Result {
        self.norm_columns_sums(norm, x, mask, dy, sums, gradients)
    }

    fn column_norm_gradient(
        &self,
        norm: &ColumnNorm,
        sums: &Tensor,
        group_rows: usize,
        mask: Option<&Tensor>,
        dy: &mut Tensor,
        keep_masked: bool,
        x: &mut Tensor,
    ) -> Result {
        self.norm_columns_gradient(norm, (sums, group_rows), mask, dy, keep_masked, x)
    }
}
