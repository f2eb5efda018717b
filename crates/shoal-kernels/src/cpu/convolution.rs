//! Convolutions as matrix products: what lies under the window's places is gathered in rows, a bounded number of
//! them at a time. Pixels are written by the thread that owns their line, so no sum depends on timing.

use std::ops::Range;

use rayon::prelude::*;

use super::CpuDevice;
use super::columns::merge_columns;
use crate::convolutional::{Averages, ColumnNorm, Convolutional, Filters, Window};
use crate::device::{Device, Linear, Mat, MatMut, Result, Sum};
use crate::tensor::Tensor;

/// The image's row or column under a place of the window, `None` in the padding.
fn under(place: usize, offset: usize, stride: usize, padding: usize, size: usize) -> Option<usize> {
    (place * stride + offset).checked_sub(padding).filter(|at| *at < size)
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
/// If there is none: only windows that see rows as they lie do without.
fn needed(scratch: Option<&mut Tensor>) -> &mut Tensor {
    scratch.expect("what lies under the window has to be gathered")
}

impl CpuDevice {
    /// Rows of what lies under the window, as the filters have it.
    fn gather(&self, window: &Window, x: &Tensor, rows: Range<usize>, out: &mut Tensor) {
        let Window { height, width, channels, kernel, stride, padding, .. } = *window;
        let (places, elements) = (window.places(), window.elements());
        let x = x.floats();
        let out = &mut out.floats_mut()[..rows.len() * elements];
        out.par_chunks_mut(elements).enumerate().for_each(|(index, out)| {
            let row = rows.start + index;
            let (sample, place) = (row / (places.0 * places.1), row % (places.0 * places.1));
            // The window's columns inside the image lie side by side there.
            let first = place % places.1 * stride;
            let inside = padding.1.saturating_sub(first).min(kernel.1)
                ..(width + padding.1).saturating_sub(first).min(kernel.1);
            for (down, out) in out.chunks_exact_mut(kernel.1 * channels).enumerate() {
                let line = under(place / places.1, down, stride, padding.0, height);
                let Some(line) = line.filter(|_| inside.start < inside.end) else {
                    out.fill(0.0);
                    continue;
                };
                let pixel = (sample * height + line) * width + first + inside.start - padding.1;
                out[..inside.start * channels].fill(0.0);
                out[inside.start * channels..inside.end * channels]
                    .copy_from_slice(&x[pixel * channels..][..inside.len() * channels]);
                out[inside.end * channels..].fill(0.0);
            }
        });
    }

    /// Adds rows of the gathered numbers' gradient to the pixels that they came from.
    fn scatter(&self, window: &Window, gathered: &Tensor, rows: Range<usize>, dx: &mut Tensor) {
        let Window { height, width, channels, kernel, stride, padding, .. } = *window;
        let (places, elements) = (window.places(), window.elements());
        let per_sample = places.0 * places.1;
        let samples = rows.start / per_sample..rows.end.div_ceil(per_sample);
        let gathered = gathered.floats();
        let line_elements = width * channels;
        let lines = &mut dx.floats_mut()
            [samples.start * height * line_elements..samples.end * height * line_elements];
        // The place from which a pixel is seen at an offset into the window.
        let place = |at: usize, offset: usize, padding: usize, places: usize| {
            let from = (at + padding).checked_sub(offset)?;
            (from.is_multiple_of(stride) && from / stride < places).then_some(from / stride)
        };
        lines.par_chunks_mut(line_elements).enumerate().for_each(|(index, pixels)| {
            let (sample, line) = (samples.start + index / height, index % height);
            for (column, pixel) in pixels.chunks_exact_mut(channels).enumerate() {
                for (spot, (down, across)) in spots(kernel).enumerate() {
                    let Some(row) = place(line, down, padding.0, places.0)
                        .zip(place(column, across, padding.1, places.1))
                        .map(|(down, across)| sample * per_sample + down * places.1 + across)
                        .filter(|row| rows.contains(row))
                    else {
                        continue;
                    };
                    let from = &gathered[(row - rows.start) * elements + spot * channels..][..channels];
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
        mask: Option<&mut Tensor>,
        scratch: Option<&mut Tensor>,
        out: &mut Tensor,
    ) -> Result {
        let (rows, outputs, elements) = (window.rows(), filters.outputs, window.elements());
        assert_shapes(&window, x, out, outputs);
        let linear = linear(&window, filters);
        self.pool.install(|| {
            if window.is_row() {
                let (x, target) = (Mat::new(x, rows, elements), MatMut::new(out, rows, outputs));
                self.linear_forward(x, linear, bias, None, target);
            } else {
                let scratch = needed(scratch);
                for piece in pieces(&window, scratch) {
                    self.gather(&window, x, piece.clone(), scratch);
                    let target = MatMut::new(out, rows, outputs).rows(piece.start, piece.len());
                    self.linear_forward(Mat::new(scratch, piece.len(), elements), linear, bias, None, target);
                }
            }
            if let Some(mask) = mask {
                self.rectify(outputs, out, mask);
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
            if window.is_row() {
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
            if window.is_row() {
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

    fn relu_gradient(&self, cols: usize, mask: &Tensor, gradient: &mut Tensor, sums: Option<Sum>) -> Result {
        self.pool.install(|| self.rectify_dx(cols, mask, gradient));
        sums.map_or(Ok(()), |(sums, more)| {
            self.bias_gradient(Mat::new(gradient, gradient.len() / cols, cols), sums, more)
        })
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
        self.pool.install(|| self.maxima(&window, x, bias, rectify, places, out));
        Ok(())
    }

    fn max_pool_gradient(
        &self,
        window: Window,
        places: &Tensor,
        dy: &Tensor,
        dx: &mut Tensor,
        sums: Option<Sum>,
    ) -> Result {
        self.pool.install(|| self.maxima_dx(&window, places, dy, dx));
        let cols = window.channels;
        sums.map_or(Ok(()), |(sums, more)| {
            self.bias_gradient(Mat::new(dx, dx.len() / cols, cols), sums, more)
        })
    }

    fn average_pool(&self, shape: Averages, x: &Tensor, out: &mut Tensor) -> Result {
        self.pool.install(|| self.averages(&shape, x, out));
        Ok(())
    }

    fn average_pool_gradient(&self, shape: Averages, dy: &Tensor, dx: &mut Tensor) -> Result {
        self.pool.install(|| self.averages_dx(&shape, dy, dx));
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

    fn merge_statistics(&self, of: (&Tensor, usize), into: (&mut Tensor, usize)) -> Result {
        merge_columns(of, into);
        Ok(())
    }

    fn column_norm(
        &self,
        norm: &ColumnNorm,
        x: &Tensor,
        residual: Option<&Tensor>,
        mask: Option<&mut Tensor>,
        out: &mut Tensor,
    ) -> Result {
        self.pool.install(|| self.norm_columns(norm, x, residual, mask, out));
        Ok(())
    }

    fn column_norm_sums(
        &self,
        norm: &ColumnNorm,
        x: &Tensor,
        mask: Option<&Tensor>,
        dy: &Tensor,
        (sums, accumulate): Sum,
        bias_gradient: Sum,
        weight_gradient: Sum,
    ) -> Result {
        // These rows' alone first: the gradients have those of the rows before already.
        let before = accumulate.then(|| sums.floats().to_vec());
        self.pool.install(|| self.norm_columns_sums(norm, x, mask, dy, (sums, false)));
        for (index, (gradient, more)) in [bias_gradient, weight_gradient].into_iter().enumerate() {
            self.add_scaled(1.0, Mat::new(sums, 2, norm.cols).rows(index, 1), (gradient, more))?;
        }
        if let Some(before) = before {
            sums.floats_mut().iter_mut().zip(before).for_each(|(sum, before)| *sum += before);
        }
        Ok(())
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
        self.pool.install(|| self.norm_columns_dx(norm, (sums, group_rows), mask, dy, keep_masked, x));
        Ok(())
    }
}
