//! Convolutions and their gradients. Where what lies under the window is a row as it is, they are products;
//! elsewhere cuDNN makes them; and where it is missing or has no engine, products of gathered rows do.
//!
//! - [`gather`]: convolutions as products of gathered rows.

mod gather;

use super::cudnn::{Convolution, Cudnn, Made, Tensors};
use super::launch::{Address, launch};
use super::{CudaDevice, element_of};
use crate::convolutional::{Filters, Window};
use crate::device::{Linear, Mat, MatMut, Result, Sum};
use crate::memory::GRANULE_BYTES;
use crate::tensor::{Element, Tensor};

/// Memory that is free for a while: address and bytes.
type Room = (Address, usize);

/// The filters as a matrix, for windows that see rows.
fn linear<'a>(window: &Window, filters: Filters<'a>) -> Linear<'a> {
    Linear { weight: filters.weight, inputs: window.elements(), outputs: filters.outputs, in_out: false }
}

fn assert_shapes(window: &Window, outputs: usize, images: &Tensor, places: &Tensor) {
    assert_eq!((images.len(), places.len()), (window.input_elements(), window.rows() * outputs));
}

fn room(tensor: &Tensor) -> Room {
    (tensor.at(0), tensor.bytes())
}

/// What is left of a room behind so many bytes, `None` where they do not fit.
fn behind((at, bytes): Room, taken: usize) -> Option<Room> {
    Some((Address(at.0 + taken as u64), bytes.checked_sub(taken)?))
}

/// The larger of two rooms.
fn larger(one: Room, other: Room) -> Room {
    if other.1 > one.1 { other } else { one }
}

/// Where to put so many bytes, in one of two rooms, and the largest room beside them.
fn set_apart(rooms: [Room; 2], bytes: usize) -> Option<(Address, Room)> {
    let [one, other] = rooms;
    let ways = [(one, other), (other, one)];
    let ways =
        ways.into_iter().filter_map(|(home, other)| Some((home.0, larger(other, behind(home, bytes)?))));
    ways.max_by_key(|(_, (_, left))| *left)
}

impl CudaDevice {
    /// `out = x convolved with the filters`
    pub(super) fn convolve(
        &self,
        window: Window,
        x: &Tensor,
        filters: Filters,
        scratch: Option<&mut Tensor>,
        out: &mut Tensor,
    ) -> Result {
        let (rows, elements, outputs) = (window.rows(), window.elements(), filters.outputs);
        let element = element_of(&[x, filters.weight, out]);
        assert_shapes(&window, outputs, x, out);
        assert_eq!(filters.weight.len(), elements * outputs);
        if window.is_row() {
            let (x, to) = (Mat::new(x, rows, elements), MatMut::new(out, rows, outputs));
            return self.linear_forward(x, linear(&window, filters), None, None, to);
        }
        let tensors = Tensors { images: x.at(0), filters: filters.weight.at(0), places: out.at(0) };
        let convolution = self.convolution_of(Made::Places, element, window, outputs);
        // SAFETY: the lengths are asserted, and `out` is borrowed to write.
        if unsafe { self.by_library(&convolution, tensors, scratch.as_deref()) }? {
            return Ok(());
        }
        self.gather_places(&window, x, filters, scratch.as_deref(), out)
    }

    pub(super) fn convolve_input_gradient(
        &self,
        window: Window,
        dy: &Tensor,
        filters: Filters,
        scratch: Option<&mut Tensor>,
        dx: &mut Tensor,
    ) -> Result {
        let (rows, elements, outputs) = (window.rows(), window.elements(), filters.outputs);
        let element = element_of(&[dy, filters.weight, dx]);
        assert_shapes(&window, outputs, dx, dy);
        assert_eq!(filters.weight.len(), elements * outputs);
        if window.is_row() {
            let (dy, to) = (Mat::new(dy, rows, outputs), MatMut::new(dx, rows, elements));
            return self.linear_dx(dy, linear(&window, filters), to, false);
        }
        let tensors = Tensors { images: dx.at(0), filters: filters.weight.at(0), places: dy.at(0) };
        let convolution = self.convolution_of(Made::ImageGradient, element, window, outputs);
        // SAFETY: as in `convolve`.
        if unsafe { self.by_library(&convolution, tensors, scratch.as_deref()) }? {
            return Ok(());
        }
        self.gather_image_gradient(&window, dy, filters, scratch.as_deref(), dx)
    }

    pub(super) fn convolve_weight_gradient(
        &self,
        window: Window,
        x: &Tensor,
        dy: &Tensor,
        scratch: Option<&mut Tensor>,
        (gradient, accumulate): Sum,
    ) -> Result {
        let (rows, elements) = (window.rows(), window.elements());
        let outputs = gradient.len() / elements;
        element_of(&[x, dy]);
        assert_shapes(&window, outputs, x, dy);
        assert_eq!((gradient.len(), gradient.element()), (outputs * elements, Element::F32));
        if window.is_row() {
            let (x, dy) = (Mat::new(x, rows, elements), Mat::new(dy, rows, outputs));
            return self.linear_dw(x, dy, gradient, false, accumulate);
        }
        let scratch = scratch.as_deref();
        if self.library_weight_gradient(&window, x, dy, scratch, (&mut *gradient, accumulate))? {
            return Ok(());
        }
        self.gather_filter_gradient(&window, x, dy, scratch, (gradient, accumulate))
    }

    /// The filters' gradient by cuDNN; false, and nothing done, where it has no engine.
    fn library_weight_gradient(
        &self,
        window: &Window,
        x: &Tensor,
        dy: &Tensor,
        scratch: Option<&Tensor>,
        (gradient, accumulate): Sum,
    ) -> Result<bool> {
        let (count, element) = (gradient.len(), x.element());
        let Some(cudnn) = self.library_of(element) else { return Ok(false) };
        let _held = self.hold_workspace();
        // What the library overwrites is made beside the sum where it is to be added, or is of another element.
        // The workspace is the same either way, and with it the plan.
        let rooms = [scratch.map_or((Address(0), 0), room), room(&self.workspace)];
        let bytes = (Element::F32.bytes() * count).next_multiple_of(GRANULE_BYTES);
        let Some((beside, workspace)) = set_apart(rooms, bytes) else {
            return Ok(false);
        };
        let outputs = count / window.elements();
        let convolution = self.convolution_of(Made::FilterGradient, element, *window, outputs);
        let tensors = Tensors { images: x.at(0), filters: beside, places: dy.at(0) };
        // SAFETY: the lengths are asserted by the caller; beside the sum there is room for an f32 gradient.
        let Some(made_element) = (unsafe { cudnn.gradient_element(&convolution, tensors, workspace) })?
        else {
            return Ok(false);
        };
        let convolution = Convolution { made_element, ..convolution };
        let in_place = made_element == Element::F32 && !accumulate;
        let tensors = if in_place { Tensors { filters: gradient.at(0), ..tensors } } else { tensors };
        // SAFETY: as above; the sum is borrowed to write.
        if !unsafe { self.queue(cudnn, &convolution, tensors, workspace) }? {
            return Ok(false);
        }
        if !in_place {
            let (grid, more, sum) = (self.each(count), i32::from(accumulate), gradient.at(0));
            // SAFETY: the gradient was made there just now, of that element, and is as long as the sum.
            unsafe { launch!(self, "convolution_sum" of made_element, grid, count, beside, more, sum) }?;
        }
        Ok(true)
    }

    fn convolution_of(&self, made: Made, element: Element, window: Window, outputs: usize) -> Convolution {
        // What concerns fp32 alone makes no other plan for halves.
        let tf32 = self.tf32 && element == Element::F32;
        let deterministic = self.deterministic;
        Convolution { made, element, made_element: element, window, outputs, tf32, deterministic }
    }

    /// cuDNN where it serves such elements. Of its engines for fp32 without TF32 the rounding was seen to be four
    /// times that of products of gathered rows, and exactness is what that precision is chosen for.
    fn library_of(&self, element: Element) -> Option<&Cudnn> {
        self.cudnn.as_deref().filter(|_| element != Element::F32 || self.tf32)
    }

    /// False, and nothing done, where cuDNN is missing or has no engine.
    ///
    /// # Safety
    /// As for `Cudnn::convolve`.
    unsafe fn by_library(
        &self,
        convolution: &Convolution,
        tensors: Tensors,
        scratch: Option<&Tensor>,
    ) -> Result<bool> {
        let Some(cudnn) = self.library_of(convolution.element) else { return Ok(false) };
        let _held = self.hold_workspace();
        // The scratch, or the device's own workspace where that is larger.
        let workspace = larger(room(&self.workspace), scratch.map_or((Address(0), 0), room));
        // SAFETY: by this function's contract.
        unsafe { self.queue(cudnn, convolution, tensors, workspace) }
    }

    /// # Safety
    /// As for `Cudnn::convolve`; the workspace is held.
    unsafe fn queue(
        &self,
        cudnn: &Cudnn,
        convolution: &Convolution,
        tensors: Tensors,
        workspace: Room,
    ) -> Result<bool> {
        let name = || {
            let Convolution { made, window, outputs, .. } = convolution;
            let Window { samples, height, width, channels, kernel: (down, across), stride, .. } = window;
            format!(
                "convolution, {made:?}: {samples} x {height} x {width} x {channels}, {outputs} filters of {down} x {across} every {stride}"
            )
        };
        // SAFETY: by this function's contract; what uses the workspace follows on one stream.
        self.context.timed(name, || unsafe { cudnn.convolve(convolution, tensors, workspace) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_apart_leaves_the_largest_room() {
        let rooms = |one: usize, other: usize| [(Address(1000), one), (Address(9000), other)];
        let set = |one, other, bytes| {
            set_apart(rooms(one, other), bytes).map(|(home, (at, left))| (home.0, at.0, left))
        };
        // Where one room has nothing to spare beside the other, the bytes go there.
        assert_eq!(set(64, 32, 10), Some((9000, 1000, 64)));
        assert_eq!(set(4, 32, 10), Some((9000, 9010, 22)));
        // Those that fit one room alone.
        assert_eq!(set(64, 32, 40), Some((1000, 9000, 32)));
        assert_eq!(set(64, 32, 65), None);
        assert_eq!(set(0, 32, 32), Some((9000, 1000, 0)));
    }
}
