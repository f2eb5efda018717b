//! Convolutions as matrix products: what lies under the window's places is gathered in rows, a bounded number of
//! them at a time. Pixels are written by the thread that owns their line, so no sum depends on timing.

use std::ops::Range;

use rayon::prelude::*;

use super::CpuDevice;
use crate::convolutional::{Averages, Convolutional, Filters, Window};
use crate::device::{Linear, Mat, MatMut, Result, Sum};
use crate::tensor::Tensor;

/// The image's row or column under a place of the window, `None` in the padding.
fn under(window: &Window, place: usize, offset: usize, size: usize) -> Option<usize> {
    (place * window.stride + offset).checked_sub(window.padding).filter(|at| *at < size)
}

/// Cuts the window's places into pieces whose rows fit the scratch.
fn pieces(window: &Window, scratch: &Tensor) -> impl Iterator<Item = Range<usize>> + use<> {
    let (rows, fit) = (window.rows(), scratch.len() / window.elements());
    assert!(fit > 0, "a scratch of {} has no room for {} elements", scratch.len(), window.elements());
    (0..rows).step_by(fit).map(move |first| first..(first + fit).min(rows))
}

fn linear<'a>(window: &Window, filters: Filters<'a>) -> Linear<'a> {
    Linear { weight: filters.weight, inputs: window.elements(), outputs: filters.outputs, in_out: false }
}

/// # Panics
/// If there is none: only windows that see single pixels do without.
fn needed(scratch: Option<&mut Tensor>) -> &mut Tensor {
    scratch.expect("a window of several pixels comes with a scratch")
}

impl CpuDevice {
    /// Rows of what lies under the window, channel by channel as the filters have it.
    fn gather(&self, window: &Window, x: &Tensor, rows: Range<usize>, out: &mut Tensor) {
        let Window { height, width, channels, kernel, .. } = *window;
        let (places, elements, area) = (window.places(), window.elements(), kernel.0 * kernel.1);
        let x = x.floats();
        let out = &mut out.floats_mut()[..rows.len() * elements];
        out.par_chunks_mut(elements).enumerate().for_each(|(index, out)| {
            let row = rows.start + index;
            let (sample, place) = (row / (places.0 * places.1), row % (places.0 * places.1));
            for (spot, (down, across)) in spots(kernel).enumerate() {
                let line = under(window, place / places.1, down, height);
                let column = under(window, place % places.1, across, width);
                let to = out[spot..].iter_mut().step_by(area);
                match line.zip(column) {
                    None => to.for_each(|to| *to = 0.0),
                    Some((line, column)) => {
                        let pixel = ((sample * height + line) * width + column) * channels;
                        to.zip(&x[pixel..pixel + channels]).for_each(|(to, from)| *to = *from);
                    }
                }
            }
        });
    }

    /// Adds rows of the gathered numbers' gradient to the pixels that they came from.
    fn scatter(&self, window: &Window, gathered: &Tensor, rows: Range<usize>, dx: &mut Tensor) {
        let Window { height, width, channels, kernel, stride, padding, .. } = *window;
        let (places, elements, area) = (window.places(), window.elements(), kernel.0 * kernel.1);
        let per_sample = places.0 * places.1;
        let samples = rows.start / per_sample..rows.end.div_ceil(per_sample);
        let gathered = gathered.floats();
        let line_elements = width * channels;
        let lines = &mut dx.floats_mut()
            [samples.start * height * line_elements..samples.end * height * line_elements];
        // The place from which a pixel is seen at an offset into the window.
        let place = |at: usize, offset: usize, places: usize| {
            let from = (at + padding).checked_sub(offset)?;
            (from.is_multiple_of(stride) && from / stride < places).then_some(from / stride)
        };
        lines.par_chunks_mut(line_elements).enumerate().for_each(|(index, pixels)| {
            let (sample, line) = (samples.start + index / height, index % height);
            for (column, pixel) in pixels.chunks_exact_mut(channels).enumerate() {
                for (spot, (down, across)) in spots(kernel).enumerate() {
                    let Some(row) = place(line, down, places.0)
                        .zip(place(column, across, places.1))
                        .map(|(down, across)| sample * per_sample + down * places.1 + across)
                        .filter(|row| rows.contains(row))
                    else {
                        continue;
                    };
                    let from = gathered[(row - rows.start) * elements + spot..].iter().step_by(area);
                    pixel.iter_mut().zip(from).for_each(|(pixel, from)| *pixel += from);
                }
            }
        });
    }
}

/// Offsets into a window, in the order of the filters.
fn spots((height, width): (usize, usize)) -> impl Iterator<Item = (usize, usize)> {
    (0..height).flat_map(move |down| (0..width).map(move |across| (down, across)))
}

fn assert_shapes(window: &Window, x: &Tensor, y: &Tensor, outputs: usize) {
    assert_eq!((x.len(), y.len()), (window.input_elements(), window.rows() * outputs));
}

impl Convolutional for CpuDevice {
    fn convolution(
        &self,
        window: Window,
        x: &Tensor,
        filters: Filters,
        bias: Option<&Tensor>,
        scratch: Option<&mut Tensor>,
        out: &mut Tensor,
    ) -> Result {
        let (rows, outputs, elements) = (window.rows(), filters.outputs, window.elements());
        assert_shapes(&window, x, out, outputs);
        let linear = linear(&window, filters);
        self.pool.install(|| {
            if window.is_pixel() {
                let (x, out) = (Mat::new(x, rows, elements), MatMut::new(out, rows, outputs));
                return self.linear_forward(x, linear, bias, None, out);
            }
            let scratch = needed(scratch);
            for piece in pieces(&window, scratch) {
                self.gather(&window, x, piece.clone(), scratch);
                let target = MatMut::new(out, rows, outputs).rows(piece.start, piece.len());
                self.linear_forward(Mat::new(scratch, piece.len(), elements), linear, bias, None, target);
            }
        });
        Ok(())
    }

    fn convolution_input_gradient(
        &self,
        window: Window,
        dy: &Tensor,
        filters: Filters,
        scratch: Option<&mut Tensor>,
        dx: &mut Tensor,
    ) -> Result {
        let (rows, outputs, elements) = (window.rows(), filters.outputs, window.elements());
        assert_shapes(&window, dx, dy, outputs);
        let (linear, dy) = (linear(&window, filters), Mat::new(dy, rows, outputs));
        self.pool.install(|| {
            if window.is_pixel() {
                return self.linear_dx(dy, linear, MatMut::new(dx, rows, elements), false);
            }
            let scratch = needed(scratch);
            self.fill_zero(dx);
            for piece in pieces(&window, scratch) {
                let target = MatMut::new(scratch, piece.len(), elements);
                self.linear_dx(dy.rows(piece.start, piece.len()), linear, target, false);
                self.scatter(&window, scratch, piece, dx);
            }
        });
        Ok(())
    }

    fn convolution_weight_gradient(
        &self,
        window: Window,
        x: &Tensor,
        dy: &Tensor,
        scratch: Option<&mut Tensor>,
        (gradient, accumulate): Sum,
    ) -> Result {
        let (rows, elements) = (window.rows(), window.elements());
        let outputs = gradient.len() / elements;
        assert_shapes(&window, x, dy, outputs);
        let dy = Mat::new(dy, rows, outputs);
        self.pool.install(|| {
            if window.is_pixel() {
                return self.linear_dw(Mat::new(x, rows, elements), dy, gradient, false, accumulate);
            }
            let scratch = needed(scratch);
            for piece in pieces(&window, scratch) {
                self.gather(&window, x, piece.clone(), scratch);
                let gathered = Mat::new(scratch, piece.len(), elements);
                let more = accumulate || piece.start > 0;
                self.linear_dw(gathered, dy.rows(piece.start, piece.len()), gradient, false, more);
            }
        });
        Ok(())
    }

    fn channels_last(&self, samples: usize, channels: usize, images: &Tensor, out: &mut Tensor) -> Result {
        self.pool.install(|| self.turn_channels(samples, channels, images, out));
        Ok(())
    }

    fn max_pool(&self, window: Window, x: &Tensor, places: &mut Tensor, out: &mut Tensor) -> Result {
        self.pool.install(|| self.maxima(&window, x, places, out));
        Ok(())
    }

    fn max_pool_gradient(&self, window: Window, places: &Tensor, dy: &Tensor, dx: &mut Tensor) -> Result {
        self.pool.install(|| self.maxima_dx(&window, places, dy, dx));
        Ok(())
    }

    fn average_pool(&self, shape: Averages, x: &Tensor, out: &mut Tensor) -> Result {
        self.pool.install(|| self.averages(&shape, x, out));
        Ok(())
    }

    fn average_pool_gradient(&self, shape: Averages, dy: &Tensor, dx: &mut Tensor) -> Result {
        self.pool.install(|| self.averages_dx(&shape, dy, dx));
        Ok(())
    }

    fn relu(&self, x: &mut Tensor, mask: Option<&mut Tensor>) -> Result {
        self.pool.install(|| self.rectify(x, mask));
        Ok(())
    }

    fn relu_gradient(&self, mask: &Tensor, gradient: &mut Tensor) -> Result {
        self.pool.install(|| self.rectify_dx(mask, gradient));
        Ok(())
    }

    fn add_scaled(&self, factor: f32, x: Mat, out: Sum) -> Result {
        self.pool.install(|| self.add_rows(factor, x, out));
        Ok(())
    }

    fn column_statistics(&self, x: Mat, statistics: &mut Tensor) -> Result {
        self.pool.install(|| self.measure_columns(x, statistics));
        Ok(())
    }

    fn column_norm(
        &self,
        eps: f32,
        x: Mat,
        mean: Mat,
        variance: Mat,
        weight: &Tensor,
        bias: &Tensor,
        residual: Option<&Tensor>,
        out: &mut Tensor,
    ) -> Result {
        self.pool.install(|| self.norm_columns(eps, x, (mean, variance), (weight, bias), residual, out));
        Ok(())
    }

    fn column_norm_sums(
        &self,
        eps: f32,
        x: Mat,
        statistics: &Tensor,
        dy: &Tensor,
        sums: &mut Tensor,
    ) -> Result {
        self.pool.install(|| self.norm_columns_sums(eps, x, statistics, dy, sums));
        Ok(())
    }

    fn column_norm_gradient(
        &self,
        eps: f32,
        x: Mat,
        statistics: &Tensor,
        weight: &Tensor,
        sums: &Tensor,
        rows: usize,
        gradient: &mut Tensor,
    ) -> Result {
        self.pool.install(|| self.norm_columns_dx(eps, x, statistics, weight, (sums, rows), gradient));
        Ok(())
    }
}
