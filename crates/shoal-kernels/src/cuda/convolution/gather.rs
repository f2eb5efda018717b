//! Convolutions as products: what lies under the window is gathered in rows, as many at a time as there is room
//! for, and multiplied by the filters. The images' gradient gathers the places that see a pixel instead, so that
//! each pixel is one sum, in fp32 and in an order that depends on nothing.

use std::ops::Range;

use crate::convolutional::{Filters, Window};
use crate::cuda::CudaDevice;
use crate::cuda::launch::{Address, Parameter, launch};
use crate::cuda::matrix::{Factor, Output};
use crate::device::{Result, Sum};
use crate::tensor::{Element, Tensor};

/// Rows at a time are a multiple of this where as many fit: what they make stays aligned.
const ROWS_UNIT: usize = 64;

/// `Window` of convolution.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct WindowParameter {
    height: u32,
    width: u32,
    channels: u32,
    kernel_height: u32,
    kernel_width: u32,
    stride: u32,
    padding_down: u32,
    padding_across: u32,
    places_down: u32,
    places_across: u32,
    outputs: u32,
}

// SAFETY: struct Window.
unsafe impl Parameter for WindowParameter {}

impl WindowParameter {
    fn of(window: &Window, outputs: usize) -> WindowParameter {
        let side = |value: usize| u32::try_from(value).expect("a side of an image fits 32 bits");
        let Window { height, width, channels, kernel, stride, padding, .. } = *window;
        // What kernels count in 32 bits.
        side(height * width);
        side(kernel.0 * kernel.1 * channels.max(outputs));
        WindowParameter {
            height: side(height),
            width: side(width),
            channels: side(channels),
            kernel_height: side(kernel.0),
            kernel_width: side(kernel.1),
            stride: side(stride),
            padding_down: side(padding.0),
            padding_across: side(padding.1),
            places_down: side(window.places().0),
            places_across: side(window.places().1),
            outputs: side(outputs),
        }
    }
}

/// `rows` cut into pieces that fit `bytes`, each of them of `row_bytes`.
///
/// # Panics
/// If not even one fits: a scratch has room for more.
fn pieces(rows: usize, row_bytes: usize, bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let fit = bytes / row_bytes;
    assert!(fit > 0, "{bytes} bytes have no room for a row of {row_bytes}");
    let fit = if fit < ROWS_UNIT { fit } else { fit - fit % ROWS_UNIT };
    (0..rows).step_by(fit).map(move |first| first..(first + fit).min(rows))
}

/// Rows of `stride` elements without gaps.
fn factor(at: Address, element: Element, stride: usize) -> Factor {
    Factor { at, element, stride, transposed: false }
}

fn transposed(factor: Factor) -> Factor {
    Factor { transposed: !factor.transposed, ..factor }
}

impl CudaDevice {
    pub(super) fn gather_places(
        &self,
        window: &Window,
        x: &Tensor,
        filters: Filters,
        scratch: Option<&Tensor>,
        out: &mut Tensor,
    ) -> Result {
        let (element, elements, outputs) = (x.element(), window.elements(), filters.outputs);
        let of = WindowParameter::of(window, outputs);
        self.gathering(scratch, window.rows(), element.bytes() * elements, |piece, room| {
            let (first, rows) = (piece.start, piece.len());
            let to = Output { at: out.at(first * outputs), element, stride: outputs };
            let filters = transposed(factor(filters.weight.at(0), element, elements));
            let (grid, shape) = (self.each(rows * elements), (rows, outputs, elements));
            // SAFETY: the caller asserts lengths; the room has that many rows.
            unsafe {
                launch!(self, "convolution_seen" of element, grid, of, first, rows, x.at(0), room)?;
                self.plain_product(shape, to, false, factor(room, element, elements), filters)
            }
        })
    }

    pub(super) fn gather_image_gradient(
        &self,
        window: &Window,
        dy: &Tensor,
        filters: Filters,
        scratch: Option<&Tensor>,
        dx: &mut Tensor,
    ) -> Result {
        let (element, channels, outputs) = (dy.element(), window.channels, filters.outputs);
        let elements = window.elements() / channels * outputs;
        let (of, pixels) = (WindowParameter::of(window, outputs), dx.len() / channels);
        self.gathering(scratch, pixels, element.bytes() * elements, |piece, room| {
            let (first, rows) = (piece.start, piece.len());
            let to = Output { at: dx.at(first * channels), element, stride: channels };
            let filters = factor(filters.weight.at(0), element, channels);
            let (grid, shape) = (self.each(rows * elements), (rows, channels, elements));
            // SAFETY: as above.
            unsafe {
                launch!(self, "convolution_seeing" of element, grid, of, first, rows, dy.at(0), room)?;
                self.plain_product(shape, to, false, factor(room, element, elements), filters)
            }
        })
    }

    pub(super) fn gather_filter_gradient(
        &self,
        window: &Window,
        x: &Tensor,
        dy: &Tensor,
        scratch: Option<&Tensor>,
        (gradient, accumulate): Sum,
    ) -> Result {
        let (element, elements) = (x.element(), window.elements());
        let outputs = gradient.len() / elements;
        let of = WindowParameter::of(window, outputs);
        let to = Output { at: gradient.at(0), element: Element::F32, stride: elements };
        self.gathering(scratch, window.rows(), element.bytes() * elements, |piece, room| {
            let (first, rows) = (piece.start, piece.len());
            let dy = transposed(factor(dy.at(first * outputs), element, outputs));
            let (grid, shape) = (self.each(rows * elements), (outputs, elements, rows));
            let more = accumulate || first > 0;
            // SAFETY: as above.
            unsafe {
                launch!(self, "convolution_seen" of element, grid, of, first, rows, x.at(0), room)?;
                self.plain_product(shape, to, more, dy, factor(room, element, elements))
            }
        })
    }

    /// Does some work on rows in pieces, each with room for its rows.
    fn gathering(
        &self,
        scratch: Option<&Tensor>,
        rows: usize,
        row_bytes: usize,
        mut work: impl FnMut(Range<usize>, Address) -> Result,
    ) -> Result {
        // A scratch may be smaller than what reductions use, which no product does.
        let parts = self.parts();
        let room = scratch.filter(|scratch| scratch.bytes() > parts.bytes()).unwrap_or(&parts);
        for piece in pieces(rows, row_bytes, room.bytes()) {
            work(piece, room.at(0))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_every_row_once_and_fit() {
        for (rows, row_bytes, bytes) in [(1, 8, 8), (1000, 7, 7 * 130), (1000, 7, 7 * 63), (128, 2, 1 << 20)]
        {
            let mut next = 0;
            for piece in pieces(rows, row_bytes, bytes) {
                assert_eq!(piece.start, next);
                assert!(!piece.is_empty() && piece.len() * row_bytes <= bytes);
                next = piece.end;
            }
            assert_eq!(next, rows);
        }
    }
}
