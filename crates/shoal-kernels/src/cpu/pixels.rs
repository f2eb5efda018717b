//! Pools over images with their channels last, and what is done to numbers one by one.

use std::ops::Range;

use rayon::prelude::*;

use super::CpuDevice;
use crate::convolutional::{Averages, NO_PLACE, Window, byte_elements, mask_elements};
use crate::device::{Mat, MatMut, Sum};
use crate::tensor::Tensor;

/// Columns that a word of a mask has bits for.
pub(super) const WORD: usize = 32;

/// Rows that a thread copies at the least.
const ROWS_TOGETHER: usize = 64;

/// The pixels of a bin, in one direction.
fn bin(index: usize, bins: usize, size: usize) -> Range<usize> {
    index * size / bins..((index + 1) * size).div_ceil(bins)
}

/// The window's rows or columns that lie inside the image, without the padding.
fn inside(first: usize, kernel: usize, padding: usize, size: usize) -> Range<usize> {
    padding.saturating_sub(first).min(kernel)..(size + padding).saturating_sub(first).min(kernel)
}

/// The places of a window that see a pixel, in one direction.
fn seeing(pixel: usize, kernel: usize, stride: usize, padding: usize, places: usize) -> Range<usize> {
    let at = pixel + padding;
    let first = if at < kernel { 0 } else { (at - kernel) / stride + 1 };
    first..(at / stride + 1).min(places)
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
        let lines = bytes_mut(places)[..elements].par_chunks_mut(across * channels);
        lines.zip(out.floats_mut().par_chunks_mut(across * channels)).enumerate().for_each(
            |(row, (places, out))| {
                let (sample, line) = (row / down, row % down * stride);
                let below = inside(line, kernel.0, padding.0, height);
                for (index, (places, out)) in
                    places.chunks_exact_mut(channels).zip(out.chunks_exact_mut(channels)).enumerate()
                {
                    let column = index * stride;
                    let beside = inside(column, kernel.1, padding.1, width);
                    let seen =
                        below.clone().flat_map(|down| beside.clone().map(move |across| (down, across)));
                    let seen = seen.map(|(down, across)| {
                        let pixel = (line + down - padding.0) * width + column + across - padding.1;
                        let values = &x[(sample * height * width + pixel) * channels..][..channels];
                        ((down * kernel.1 + across) as u8, values)
                    });
                    self.arch.dispatch(
                        #[inline(always)]
                        || largest(seen.clone(), bias, rectify, places, out),
                    );
                }
            },
        );
    }

    /// Each pixel takes from the places that saw it what they took from it.
    pub(super) fn maxima_dx(&self, window: &Window, places: &Tensor, dy: &Tensor, dx: &mut Tensor) {
        let Window { height, width, channels, kernel, padding, .. } = *window;
        let (down, across) = window.places();
        assert_eq!((dx.len(), dy.len()), (window.input_elements(), window.rows() * channels));
        assert_eq!(places.len(), byte_elements(dy.len()));
        let (places, dy) = (bytes(places), dy.floats());
        // The places that see a pixel, and which of the window's rows or columns it is to them.
        let seen_from = |pixel: usize, kernel: usize, padding: usize, places: usize| {
            (0..kernel).filter_map(move |offset| {
                let from = (pixel + padding).checked_sub(offset)?;
                let sees = from.is_multiple_of(window.stride) && from / window.stride < places;
                sees.then_some((from / window.stride, offset))
            })
        };
        dx.floats_mut().par_chunks_mut(width * channels).enumerate().for_each(|(line, dx)| {
            let (sample, line) = (line / height, line % height);
            for (column, dx) in dx.chunks_exact_mut(channels).enumerate() {
                dx.fill(0.0);
                for (row, below) in seen_from(line, kernel.0, padding.0, down) {
                    for (place, beside) in seen_from(column, kernel.1, padding.1, across) {
                        let first = ((sample * down + row) * across + place) * channels;
                        let (places, dy) = (&places[first..][..channels], &dy[first..][..channels]);
                        let here = (below * kernel.1 + beside) as u8;
                        self.arch.dispatch(
                            #[inline(always)]
                            || {
                                for ((dx, place), dy) in dx.iter_mut().zip(places).zip(dy) {
                                    *dx += if *place == here { *dy } else { 0.0 };
                                }
                            },
                        );
                    }
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

    pub(super) fn window_means(&self, window: &Window, x: &Tensor, out: &mut Tensor) {
        let Window { height, width, channels, kernel, stride, padding, .. } = *window;
        let (down, across) = window.places();
        assert_eq!((x.len(), out.len()), (window.input_elements(), window.rows() * channels));
        let (x, share) = (x.floats(), 1.0 / (kernel.0 * kernel.1) as f32);
        out.floats_mut().par_chunks_mut(across * channels).enumerate().for_each(|(row, out)| {
            let (sample, line) = (row / down, row % down * stride);
            let below = inside(line, kernel.0, padding.0, height);
            for (index, out) in out.chunks_exact_mut(channels).enumerate() {
                let column = index * stride;
                let beside = inside(column, kernel.1, padding.1, width);
                let seen = below.clone().flat_map(|down| beside.clone().map(move |across| (down, across)));
                let seen = seen.map(|(down, across)| {
                    let pixel = (line + down - padding.0) * width + column + across - padding.1;
                    &x[(sample * height * width + pixel) * channels..][..channels]
                });
                self.arch.dispatch(
                    #[inline(always)]
                    || scaled_sum(seen.clone(), share, out),
                );
            }
        });
    }

    /// Each pixel takes its share from all places that saw it.
    pub(super) fn window_means_dx(&self, window: &Window, dy: &Tensor, dx: &mut Tensor) {
        let Window { height, width, channels, kernel, stride, padding, .. } = *window;
        let (down, across) = window.places();
        assert_eq!((dx.len(), dy.len()), (window.input_elements(), window.rows() * channels));
        let (dy, share) = (dy.floats(), 1.0 / (kernel.0 * kernel.1) as f32);
        dx.floats_mut().par_chunks_mut(width * channels).enumerate().for_each(|(line, dx)| {
            let (sample, line) = (line / height, line % height);
            let rows = seeing(line, kernel.0, stride, padding.0, down);
            for (column, dx) in dx.chunks_exact_mut(channels).enumerate() {
                let columns = seeing(column, kernel.1, stride, padding.1, across);
                let seen = rows.clone().flat_map(|row| columns.clone().map(move |place| (row, place)));
                let seen = seen.map(|(row, place)| {
                    &dy[((sample * down + row) * across + place) * channels..][..channels]
                });
                self.arch.dispatch(
                    #[inline(always)]
                    || scaled_sum(seen.clone(), share, dx),
                );
            }
        });
    }

    pub(super) fn move_rows(&self, x: Mat, out: MatMut) {
        assert_eq!((x.rows, x.cols), (out.rows, out.cols));
        let values = &x.tensor.floats()[x.offset..];
        let rows = out.tensor.floats_mut()[out.offset..].par_chunks_mut(out.stride).take(x.rows);
        rows.enumerate().with_min_len(ROWS_TOGETHER).for_each(|(row, out)| {
            out[..x.cols].copy_from_slice(&values[row * x.stride..][..x.cols]);
        });
    }

    /// ReLU in place, rows of `cols`.
    pub(super) fn rectify(&self, cols: usize, x: &mut Tensor, mask: &mut Tensor) {
        assert_eq!(mask.len(), mask_elements(x.len() / cols, cols));
        let rows =
            x.floats_mut().par_chunks_mut(cols).zip(mask.integers_mut().par_chunks_mut(cols.div_ceil(32)));
        rows.for_each(|(values, words)| {
            self.arch.dispatch(
                #[inline(always)]
                || rectify_row(values, words),
            );
        });
    }

    pub(super) fn rectify_dx(&self, cols: usize, mask: &Tensor, gradient: &mut Tensor) {
        assert_eq!(mask.len(), mask_elements(gradient.len() / cols, cols));
        let rows =
            gradient.floats_mut().par_chunks_mut(cols).zip(mask.integers().par_chunks(cols.div_ceil(32)));
        rows.for_each(|(values, words)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for (values, word) in values.chunks_mut(WORD).zip(words) {
                        for (lane, value) in values.iter_mut().enumerate() {
                            *value = if word & (1 << lane) != 0 { *value } else { 0.0 };
                        }
                    }
                },
            );
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

/// `share` of the rows' sum.
#[inline(always)]
fn scaled_sum<'a>(rows: impl Iterator<Item = &'a [f32]>, share: f32, out: &mut [f32]) {
    out.fill(0.0);
    for row in rows {
        out.iter_mut().zip(row).for_each(|(out, value)| *out += value);
    }
    out.iter_mut().for_each(|out| *out *= share);
}

/// The largest numbers of a pool's place, channel by channel, of the window's places and what lies there.
#[inline(always)]
fn largest<'a>(
    mut seen: impl Iterator<Item = (u8, &'a [f32])>,
    bias: Option<&[f32]>,
    rectify: bool,
    places: &mut [u8],
    out: &mut [f32],
) {
    let (first, values) = seen.next().expect("a window sees some of the image");
    places.fill(first);
    out.copy_from_slice(values);
    for (here, values) in seen {
        for ((out, place), value) in out.iter_mut().zip(places.iter_mut()).zip(values) {
            // No number is larger than NaN: it goes on, so that the loss shows it.
            let larger = *value > *out || value.is_nan();
            *out = if larger { *value } else { *out };
            *place = if larger { here } else { *place };
        }
    }
    if let Some(bias) = bias {
        out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
    }
    if rectify {
        for (out, place) in out.iter_mut().zip(places) {
            let stopped = *out <= 0.0;
            *out = if stopped { 0.0 } else { *out };
            *place = if stopped { NO_PLACE } else { *place };
        }
    }
}

/// ReLU of a row, and its bits. NaN stays, so that the loss shows it.
#[inline(always)]
pub(super) fn rectify_row(values: &mut [f32], words: &mut [i32]) {
    for (values, word) in values.chunks_mut(WORD).zip(words) {
        // The usual width as a constant: the loop becomes a few vectors then.
        *word = match values.len() {
            WORD => rectify_word(WORD, values),
            width => rectify_word(width, values),
        };
    }
}

/// Likewise of up to 32 numbers, the first `width`.
#[inline(always)]
pub(super) fn rectify_word(width: usize, values: &mut [f32]) -> i32 {
    let mut bits = 0;
    for (lane, value) in values[..width].iter_mut().enumerate() {
        bits |= if *value > 0.0 { 1 << lane } else { 0 };
        *value = if *value < 0.0 { 0.0 } else { *value };
    }
    bits
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
