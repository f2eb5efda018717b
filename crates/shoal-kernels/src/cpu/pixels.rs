//! Pools over images with their channels last, and what is done to numbers one by one.

use std::ops::Range;

use rayon::prelude::*;

use super::CpuDevice;
use crate::convolutional::{Averages, Window, mask_elements};
use crate::device::{Mat, Sum};
use crate::tensor::Tensor;

/// The pixels of a bin, in one direction.
fn bin(index: usize, bins: usize, size: usize) -> Range<usize> {
    index * size / bins..((index + 1) * size).div_ceil(bins)
}

/// The image's rows or columns under a place of the window, without the padding.
fn inside(window: &Window, place: usize, kernel: usize, size: usize) -> Range<usize> {
    let first = place * window.stride;
    first.saturating_sub(window.padding)..(first + kernel).saturating_sub(window.padding).min(size)
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

    pub(super) fn maxima(&self, window: &Window, x: &Tensor, places: &mut Tensor, out: &mut Tensor) {
        let Window { height, width, channels, kernel, .. } = *window;
        let (down, across) = window.places();
        let elements = window.rows() * channels;
        assert_eq!((x.len(), places.len(), out.len()), (window.input_elements(), elements, elements));
        assert!(window.padding < kernel.0.min(kernel.1), "a window in the padding alone sees nothing");
        let x = x.floats();
        let pixels = places.integers_mut().par_chunks_mut(channels);
        pixels.zip(out.floats_mut().par_chunks_mut(channels)).enumerate().for_each(|(row, (places, out))| {
            let (sample, place) = (row / (down * across), row % (down * across));
            out.fill(f32::NEG_INFINITY);
            places.fill(-1);
            for line in inside(window, place / across, kernel.0, height) {
                for column in inside(window, place % across, kernel.1, width) {
                    let pixel = line * width + column;
                    let values = &x[(sample * height * width + pixel) * channels..][..channels];
                    for ((out, place), value) in out.iter_mut().zip(places.iter_mut()).zip(values) {
                        // No number is larger than NaN: it goes on, so that the loss shows it.
                        if *value > *out || value.is_nan() || *place < 0 {
                            (*out, *place) = (*value, pixel as i32);
                        }
                    }
                }
            }
        });
    }

    pub(super) fn maxima_dx(&self, window: &Window, places: &Tensor, dy: &Tensor, dx: &mut Tensor) {
        let channels = window.channels;
        let per_sample = window.rows() / window.samples * channels;
        assert_eq!((dx.len(), dy.len()), (window.input_elements(), window.samples * per_sample));
        assert_eq!(places.len(), dy.len());
        let each = dx.len() / window.samples;
        let from = places.integers().par_chunks(per_sample).zip(dy.floats().par_chunks(per_sample));
        dx.floats_mut().par_chunks_mut(each).zip(from).for_each(|(dx, (places, dy))| {
            dx.fill(0.0);
            for (index, (place, dy)) in places.iter().zip(dy).enumerate() {
                dx[*place as usize * channels + index % channels] += dy;
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

    pub(super) fn rectify(&self, x: &mut Tensor, mask: Option<&mut Tensor>) {
        let elements = x.len();
        let words = x.floats_mut().par_chunks_mut(32);
        let Some(mask) = mask else {
            return words.for_each(|values| values.iter_mut().for_each(|value| *value = rectified(*value)));
        };
        assert_eq!(mask.len(), mask_elements(elements));
        words.zip(mask.integers_mut()).for_each(|(values, word)| {
            let mut bits = 0;
            for (bit, value) in values.iter_mut().enumerate() {
                bits |= i32::from(*value > 0.0) << bit;
                *value = rectified(*value);
            }
            *word = bits;
        });
    }

    pub(super) fn rectify_dx(&self, mask: &Tensor, gradient: &mut Tensor) {
        assert_eq!(mask.len(), mask_elements(gradient.len()));
        gradient.floats_mut().par_chunks_mut(32).zip(mask.integers()).for_each(|(values, word)| {
            for (bit, value) in values.iter_mut().enumerate() {
                if word >> bit & 1 == 0 {
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

/// Zero for what is negative; NaN stays, so that the loss shows it.
fn rectified(value: f32) -> f32 {
    if value < 0.0 { 0.0 } else { value }
}
