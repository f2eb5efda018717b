//! Pools. Of what a window sees, a block has a line of its places or of pixels; of averages over bins, as many threads
//! share a bin as it has pixels for.

use super::assert_floats;
use super::strips::{EIGHT, Strips, across};
use crate::convolutional::{Averages, NO_PLACE, Window, byte_elements};
use crate::cuda::launch::{Grid, Parameter, THREADS, at_or_null, launch};
use crate::cuda::reduce::RowsSum;
use crate::cuda::{CudaDevice, element_of};
use crate::device::{Result, Sum};
use crate::tensor::{Element, Tensor};

/// Threads that share a bin's pixels, at most, and pixels of each at least.
const LINES_MAX: usize = 8;
const LINE_PIXELS: usize = 2;

/// `Pool` of pixels.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct PoolParameter {
    height: i32,
    width: i32,
    channels: i32,
    kernel_height: i32,
    kernel_width: i32,
    stride: i32,
    padding_height: i32,
    padding_width: i32,
    down: i32,
    across: i32,
}

// SAFETY: struct Pool.
unsafe impl Parameter for PoolParameter {}

/// `Bins` of pixels.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct BinsParameter {
    rows: i32,
    height: i32,
    width: i32,
    channels: i32,
    down: i32,
    across: i32,
    side: i32,
    lines: i32,
}

// SAFETY: struct Bins.
unsafe impl Parameter for BinsParameter {}

fn int(size: usize) -> i32 {
    i32::try_from(size).expect("a size of less than 2^31")
}

impl From<Window> for PoolParameter {
    fn from(window: Window) -> PoolParameter {
        let (down, across) = window.places();
        // A block numbers the eights of a line, and a sample's pixels, by ints.
        int(window.height * window.width);
        int(window.width.max(across) * window.channels.next_multiple_of(EIGHT));
        PoolParameter {
            height: int(window.height),
            width: int(window.width),
            channels: int(window.channels),
            kernel_height: int(window.kernel.0),
            kernel_width: int(window.kernel.1),
            stride: int(window.stride),
            padding_height: int(window.padding.0),
            padding_width: int(window.padding.1),
            down: int(down),
            across: int(across),
        }
    }
}

/// What every operation of a maximum relies on.
fn assert_maxima(window: &Window, places: &Tensor, x: &Tensor, y: &Tensor) -> Element {
    let (kernel, padding) = (window.kernel, window.padding);
    let elements = window.rows() * window.channels;
    assert_eq!((x.len(), y.len()), (window.input_elements(), elements));
    assert_floats(places, byte_elements(elements));
    assert!(kernel.0 * kernel.1 <= usize::from(NO_PLACE), "a place is a byte");
    assert!(padding.0 < kernel.0 && padding.1 < kernel.1, "a window in the padding alone sees nothing");
    element_of(&[x, y])
}

/// Blocks for so many lines, each of so many pixels in all channels.
fn lines(count: usize, pixels: usize, channels: usize) -> Grid {
    let threads = (pixels * channels.div_ceil(EIGHT)).next_multiple_of(32).clamp(32, THREADS);
    Grid { threads: [threads, 1], ..Grid::blocks(count) }
}

/// Blocks for bins or pixels, `rows` of them, whose pixels `lines` threads share.
fn bins(shape: &Averages, rows: usize, lines: usize) -> (BinsParameter, Grid) {
    let eights = shape.channels.div_ceil(EIGHT);
    let side = across(eights);
    // Products of two sizes are ints.
    assert!([shape.height, shape.width, shape.bins.0, shape.bins.1].iter().all(|size| *size < 1 << 15));
    int(shape.samples * shape.height * shape.width);
    let of = BinsParameter {
        rows: int(rows),
        height: int(shape.height),
        width: int(shape.width),
        channels: int(shape.channels),
        down: int(shape.bins.0),
        across: int(shape.bins.1),
        side: int(side),
        lines: int(lines),
    };
    let blocks = [rows.div_ceil(THREADS / (side * lines)), eights.div_ceil(side), 1];
    (of, Grid { blocks, ..Grid::blocks(0) })
}

impl CudaDevice {
    pub(super) fn maxima(
        &self,
        window: Window,
        x: &Tensor,
        bias: Option<&Tensor>,
        rectify: bool,
        places: &mut Tensor,
        out: &mut Tensor,
    ) -> Result {
        let element = assert_maxima(&window, places, x, out);
        if let Some(bias) = bias {
            assert_floats(bias, window.channels);
        }
        let (down, across) = window.places();
        let grid = lines(window.samples * down, across, window.channels);
        let (of, x, bias) = (PoolParameter::from(window), x.at(0), at_or_null(bias));
        let (rectify, places, out) = (i32::from(rectify), places.at(0), out.at(0));
        // SAFETY: the lengths are asserted.
        unsafe { launch!(self, "pixel_max" of element, grid, of, x, bias, rectify, places, out) }
    }

    pub(super) fn maxima_gradient(
        &self,
        window: Window,
        places: &Tensor,
        dy: &Tensor,
        dx: &mut Tensor,
    ) -> Result {
        let element = assert_maxima(&window, places, dx, dy);
        let grid = lines(window.samples * window.height, window.width, window.channels);
        let (of, places, dy, dx) = (PoolParameter::from(window), places.at(0), dy.at(0), dx.at(0));
        // SAFETY: the lengths are asserted.
        unsafe { launch!(self, "pixel_max_gradient" of element, grid, of, places, dy, dx) }
    }

    /// `sums (+)=` the gradient's column sums. Each number of `dy` that has a place went to one pixel there, so that
    /// the smaller tensor is summed.
    pub(super) fn maxima_sums(
        &self,
        window: Window,
        places: &Tensor,
        dy: &Tensor,
        (sums, accumulate): Sum,
    ) -> Result {
        assert_floats(sums, window.channels);
        let strips = Strips::summing(window.rows(), window.channels, 1);
        let (held, to) = (self.parts(), RowsSum::from(Some((sums, accumulate))));
        let (grid, element, places, dy) = (strips.grid(), dy.element(), places.at(0), dy.at(0));
        let (parts, counters) = (held.at(0), self.counters.at(0));
        // SAFETY: the lengths were asserted for the gradient; the parts and counters suffice for a cut that sums.
        unsafe {
            launch!(
                self,
                "pixel_placed_sums" of element,
                grid,
                strips.parameter(),
                places,
                dy,
                parts,
                counters,
                to
            )
        }
    }

    pub(super) fn window_means(&self, window: Window, x: &Tensor, out: &mut Tensor) -> Result {
        let element = element_of(&[x, out]);
        assert_eq!((x.len(), out.len()), (window.input_elements(), window.rows() * window.channels));
        let (down, across) = window.places();
        let grid = lines(window.samples * down, across, window.channels);
        let (of, x, out) = (PoolParameter::from(window), x.at(0), out.at(0));
        // SAFETY: the lengths are asserted.
        unsafe { launch!(self, "pixel_mean" of element, grid, of, x, out) }
    }

    pub(super) fn window_means_gradient(&self, window: Window, dy: &Tensor, dx: &mut Tensor) -> Result {
        let element = element_of(&[dx, dy]);
        assert_eq!((dx.len(), dy.len()), (window.input_elements(), window.rows() * window.channels));
        let grid = lines(window.samples * window.height, window.width, window.channels);
        let (of, dy, dx) = (PoolParameter::from(window), dy.at(0), dx.at(0));
        // SAFETY: the lengths are asserted.
        unsafe { launch!(self, "pixel_mean_gradient" of element, grid, of, dy, dx) }
    }

    pub(super) fn averages(&self, shape: Averages, x: &Tensor, out: &mut Tensor) -> Result {
        let Averages { samples, height, width, channels, bins: (down, across) } = shape;
        let (rows, element) = (samples * down * across, element_of(&[x, out]));
        assert_eq!((x.len(), out.len()), (samples * height * width * channels, rows * channels));
        // Pixels of a bin that lie side by side, whole lines included.
        let run = if across == 1 { height.div_ceil(down) * width } else { width.div_ceil(across) };
        let most = (run / LINE_PIXELS).clamp(1, LINES_MAX);
        let (of, grid) = bins(&shape, rows, 1 << most.ilog2());
        let (x, out) = (x.at(0), out.at(0));
        // SAFETY: the lengths are asserted.
        unsafe { launch!(self, "pixel_average" of element, grid, of, x, out) }
    }

    pub(super) fn averages_gradient(&self, shape: Averages, dy: &Tensor, dx: &mut Tensor) -> Result {
        let Averages { samples, height, width, channels, bins: (down, across) } = shape;
        let (rows, element) = (samples * height * width, element_of(&[dx, dy]));
        assert_eq!((dx.len(), dy.len()), (rows * channels, samples * down * across * channels));
        let (of, grid) = bins(&shape, rows, 1);
        let (dy, dx) = (dy.at(0), dx.at(0));
        // SAFETY: the lengths are asserted.
        unsafe { launch!(self, "pixel_average_gradient" of element, grid, of, dy, dx) }
    }
}
