//! Pools over images with their channels last, and what is done to numbers one by one.

use std::ops::Range;

use rayon::prelude::*;

use super::CpuDevice;
use crate::convolutional::{Averages, NO_PLACE, Window, byte_elements, mask_elements};
use crate::device::{Mat, Sum};
use crate::tensor::Tensor;

/// The pixels of a bin, in one direction.
fn bin(index: usize, bins: usize, size: usize) -> Range<usize> {
    index * size / bins..((index + 1) * size).div_ceil(bins)
}

/// The window's rows or columns that lie inside the image, without the padding.
fn inside(first: usize, kernel: usize, padding: usize, size: usize) -> Range<usize> {
    padding.saturating_sub(first).min(kernel)..(size + padding).saturating_sub(first).min(kernel)
}

impl CpuDevice {
    pub(super) fn turn_channels(&self, samples: usize, channels: usize, images: &Tensor, out: &mut Tensor) {
        assert_eq!(images.len(), out.len());
        let (each, pixels) = (out.len() / samples, out.len() / samples / channels);
        let turn = |(image, out): (&[f32], &mut [f32])| {
            for (pixel, out) in out.chunks_exact_mut(channels).enumerate() {
                out.iter_mut().enumerate().for_each(|(channel, out)| *out = image[channel * pixels + pixel]);
            }
        };
        images.floats().par_chunks(each).zip(out.floats_mut().par_chunks_mut(each)).for_each(turn);
    }

    pub(super) fn maxima(
        &self,
        window: &Window,
        x: &Tensor,
        bias: Option<&Tensor>,
        rectify: bool,
        places: &mut Tensor,
        out: &mut Tensor,
    ) {
        let Window { height, width, channels, kernel, stride, padding, .. } = *window;
        let (down, across) = window.places();
        let elements = window.rows() * channels;
        assert_eq!((x.len(), out.len()), (window.input_elements(), elements));
        assert_eq!(places.len(), byte_elements(elements));
        assert!(kernel.0 * kernel.1 <= usize::from(NO_PLACE), "a place is a byte");
        assert!(padding.0 < kernel.0 && padding.1 < kernel.1, "a window in the padding alone sees nothing");
        let (x, bias) = (x.floats(), bias.map(Tensor::floats));
        let pixels = bytes_mut(places)[..elements].par_chunks_mut(channels);
        pixels.zip(out.floats_mut().par_chunks_mut(channels)).enumerate().for_each(|(row, (places, out))| {
            let (sample, place) = (row / (down * across), row % (down * across));
            let (line, column) = (place / across * stride, place % across * stride);
            out.fill(f32::NEG_INFINITY);
            places.fill(NO_PLACE);
            for below in inside(line, kernel.0, padding.0, height) {
                for beside in inside(column, kernel.1, padding.1, width) {
                    let pixel = (line + below - padding.0) * width + column + beside - padding.1;
                    let values = &x[(sample * height * width + pixel) * channels..][..channels];
                    let here = (below * kernel.1 + beside) as u8;
                    for ((out, place), value) in out.iter_mut().zip(places.iter_mut()).zip(values) {
                        // No number is larger than NaN: it goes on, so that the loss shows it.
                        if *value > *out || value.is_nan() || *place == NO_PLACE {
                            (*out, *place) = (*value, here);
                        }
                    }
                }
            }
            if let Some(bias) = bias {
                out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
            }
            if rectify {
                for (out, place) in out.iter_mut().zip(places) {
                    if *out <= 0.0 {
                        (*out, *place) = (0.0, NO_PLACE);
                    }
                }
            }
        });
    }

    pub(super) fn maxima_dx(&self, window: &Window, places: &Tensor, dy: &Tensor, dx: &mut Tensor) {
        let Window { height, width, channels, kernel, stride, padding, .. } = *window;
        let (down, across) = window.places();
        let per_sample = down * across * channels;
        assert_eq!((dx.len(), dy.len()), (window.input_elements(), window.samples * per_sample));
        assert_eq!(places.len(), byte_elements(dy.len()));
        let places = &bytes(places)[..dy.len()];
        let from = places.par_chunks(per_sample).zip(dy.floats().par_chunks(per_sample));
        dx.floats_mut().par_chunks_mut(height * width * channels).zip(from).for_each(|(dx, (places, dy))| {
            dx.fill(0.0);
            for (index, (place, dy)) in places.iter().zip(dy).enumerate() {
                if *place != NO_PLACE {
                    let (row, place) = (index / channels, usize::from(*place));
                    let line = row / across * stride + place / kernel.1 - padding.0;
                    let column = row % across * stride + place % kernel.1 - padding.1;
                    dx[(line * width + column) * channels + index % channels] += dy;
                }
            }
        });
    }

    pub(super) fn averages(&self, shape: &Averages, x: &Tensor, out: &mut Tensor) {
        let Averages { samples, height, width, channels, bins } = *shape;
        assert_eq!(x.len(), samples * height * width * channels);
        assert_eq!(out.len(), samples * bins.0 * bins.1 * channels);
        let x = x.floats();
        out.floats_mut().par_chunks_mut(channels).enumerate().for_each(|(row, out)| {
            let (sample, place) = (row / (bins.0 * bins.1), row % (bins.0 * bins.1));
            let lines = bin(place / bins.1, bins.0, height);
            let columns = bin(place % bins.1, bins.1, width);
            let share = 1.0 / (lines.len() * columns.len()) as f32;
            out.fill(0.0);
            for line in lines {
                for column in columns.clone() {
                    let pixel = (sample * height + line) * width + column;
                    let values = &x[pixel * channels..][..channels];
                    out.iter_mut().zip(values).for_each(|(out, value)| *out += value);
                }
            }
            out.iter_mut().for_each(|out| *out *= share);
        });
    }

    pub(super) fn averages_dx(&self, shape: &Averages, dy: &Tensor, dx: &mut Tensor) {
        let Averages { samples, height, width, channels, bins } = *shape;
        assert_eq!(dx.len(), samples * height * width * channels);
        assert_eq!(dy.len(), samples * bins.0 * bins.1 * channels);
        let each = bins.0 * bins.1 * channels;
        let from = dy.floats().par_chunks(each);
        dx.floats_mut().par_chunks_mut(height * width * channels).zip(from).for_each(|(dx, dy)| {
            dx.fill(0.0);
            for (place, dy) in dy.chunks_exact(channels).enumerate() {
                let lines = bin(place / bins.1, bins.0, height);
                let columns = bin(place % bins.1, bins.1, width);
                let share = 1.0 / (lines.len() * columns.len()) as f32;
                for pixel in lines.flat_map(|line| columns.clone().map(move |column| line * width + column)) {
                    let pixel = &mut dx[pixel * channels..][..channels];
                    pixel.iter_mut().zip(dy).for_each(|(pixel, dy)| *pixel += share * dy);
                }
            }
        });
    }

    /// ReLU in place, rows of `cols`.
    pub(super) fn rectify(&self, cols: usize, x: &mut Tensor, mask: &mut Tensor) {
        assert_eq!(mask.len(), mask_elements(x.len() / cols, cols));
        let rows =
            x.floats_mut().par_chunks_mut(cols).zip(mask.integers_mut().par_chunks_mut(cols.div_ceil(32)));
        rows.for_each(|(values, words)| rectify_row(values, words));
    }

    pub(super) fn rectify_dx(&self, cols: usize, mask: &Tensor, gradient: &mut Tensor) {
        assert_eq!(mask.len(), mask_elements(gradient.len() / cols, cols));
        let rows =
            gradient.floats_mut().par_chunks_mut(cols).zip(mask.integers().par_chunks(cols.div_ceil(32)));
        rows.for_each(|(values, words)| {
            for (column, value) in values.iter_mut().enumerate() {
                if !let_through(words, column) {
                    *value = 0.0;
                }
            }
        });
    }

    pub(super) fn add_rows(&self, factor: f32, x: Mat, (out, accumulate): Sum) {
        assert_eq!(out.len(), x.rows * x.cols);
        let values = &x.tensor.floats()[x.offset..];
        out.floats_mut().par_chunks_mut(x.cols).enumerate().for_each(|(row, out)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    let values = &values[row * x.stride..][..x.cols];
                    for (out, value) in out.iter_mut().zip(values) {
                        *out = if accumulate { *out + factor * value } else { factor * value };
                    }
                },
            );
        });
    }
}

/// ReLU of a row, and its bits. NaN stays, so that the loss shows it.
pub(super) fn rectify_row(values: &mut [f32], words: &mut [i32]) {
    for (values, word) in values.chunks_mut(32).zip(words) {
        let mut bits = 0;
        for (bit, value) in values.iter_mut().enumerate() {
            bits |= i32::from(*value > 0.0) << bit;
            *value = if *value < 0.0 { 0.0 } else { *value };
        }
        *word = bits;
    }
}

/// Whether a row's bits say that the ReLU let a column's number through.
pub(super) fn let_through(words: &[i32], column: usize) -> bool {
    words[column / 32] >> (column % 32) & 1 != 0
}

fn bytes(tensor: &Tensor) -> &[u8] {
    let integers = tensor.integers();
    // SAFETY: the same memory; any bits are bytes.
    unsafe { std::slice::from_raw_parts(integers.as_ptr().cast(), 4 * integers.len()) }
}

fn bytes_mut(tensor: &mut Tensor) -> &mut [u8] {
    let integers = tensor.integers_mut();
    // SAFETY: as above, and the borrow is exclusive.
    unsafe { std::slice::from_raw_parts_mut(integers.as_mut_ptr().cast(), 4 * integers.len()) }
}
