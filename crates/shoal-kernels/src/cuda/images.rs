//! Images in patches, the rows around them, and the loss of classes.

use super::launch::{Address, Grid, Parameter, launch};
use super::{CudaDevice, PARTS, element_of};
use crate::device::{ClassLoss, LossMode, Mat, MatMut, PatchShape, Result, SCALAR_ELEMENTS};
use crate::tensor::{Element, Tensor};

/// `Patches` of images.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct PatchesParameter {
    samples: i64,
    channels: i64,
    size: i64,
    patch: i64,
}

// SAFETY: struct Patches.
unsafe impl Parameter for PatchesParameter {}

/// `Classes` of images.cu.
#[derive(Clone, Copy)]
#[repr(C)]
struct ClassesParameter {
    rows: i64,
    cols: i64,
    stride: i64,
    length: i64,
    with_gradient: i32,
    scale: f32,
    smoothing: f32,
}

// SAFETY: struct Classes.
unsafe impl Parameter for ClassesParameter {}

impl CudaDevice {
    pub(super) fn gather_patches(&self, shape: PatchShape, images: &Tensor, out: &mut Tensor) -> Result {
        let PatchShape { samples, channels, size, patch } = shape;
        let (count, element) = (samples * shape.rows() * channels * patch * patch, out.element());
        assert_eq!((images.len(), images.element()), (samples * channels * size * size, Element::F32));
        assert_eq!(out.len(), count);
        let [samples, channels, size, patch] = [samples, channels, size, patch].map(|size| size as i64);
        let of = PatchesParameter { samples, channels, size, patch };
        let (grid, images, out) = (self.each(count), images.at(0), out.at(0));
        // SAFETY: the lengths are those that the shape says.
        unsafe { launch!(self, "image_patches" of element, grid, of, images, out) }
    }

    pub(super) fn seat_rows(
        &self,
        sequence: usize,
        width: usize,
        first: &Tensor,
        positions: &Tensor,
        out: &mut Tensor,
    ) -> Result {
        let (count, element) = (out.len(), element_of(&[first, positions, out]));
        assert!(count.is_multiple_of(sequence * width));
        assert!(first.len() >= width && positions.len() >= sequence * width);
        let (grid, first, positions, out) = (self.each(count), first.at(0), positions.at(0), out.at(0));
        // SAFETY: the lengths are asserted.
        unsafe {
            launch!(self, "image_seats" of element, grid, count, sequence, width, first, positions, out)
        }
    }

    pub(super) fn copy_rows(&self, from: Option<Mat>, to: MatMut) -> Result {
        let (rows, cols, element) = (to.rows, to.cols, to.tensor.element());
        assert!(from.is_none_or(|from| (from.rows, from.cols) == (rows, cols)));
        assert!(from.is_none_or(|from| from.tensor.element() == element));
        let (source, source_stride) =
            from.map_or((Address(0), 0), |from| (from.tensor.at(from.offset), from.stride));
        let (grid, target, stride) = (self.each(rows * cols), to.tensor.at(to.offset), to.stride);
        // SAFETY: a matrix lies inside its tensor.
        unsafe {
            launch!(self, "image_rows" of element, grid, rows, cols, source, source_stride, target, stride)
        }
    }

    pub(super) fn classes_loss(
        &self,
        targets: &Tensor,
        first: usize,
        ClassLoss { mode, smoothing }: ClassLoss,
        logits: MatMut,
        loss: &mut Tensor,
        correct: Option<&mut Tensor>,
    ) -> Result {
        let (rows, element) = (logits.rows, logits.tensor.element());
        assert!(first + rows <= targets.len());
        assert_eq!(logits.offset, 0, "rows of logits start with their tensor");
        assert!(2 * rows <= PARTS && logits.stride < 1 << 30, "{rows} rows of {} logits", logits.stride);
        assert!(loss.len() == SCALAR_ELEMENTS);
        assert!(correct.as_ref().is_none_or(|correct| correct.len() == SCALAR_ELEMENTS));
        let (with_gradient, scale) = match mode {
            LossMode::Gradient { scale } => (1, scale),
            LossMode::LossOnly => (0, 0.0),
        };
        let of = ClassesParameter {
            rows: rows as i64,
            cols: logits.cols as i64,
            stride: logits.stride as i64,
            length: logits.tensor.len() as i64,
            with_gradient,
            scale,
            smoothing,
        };
        let parts = self.parts();
        let (targets, values, losses, hits) =
            (targets.at(first), logits.tensor.at(0), parts.at(0), parts.at(rows));
        // SAFETY: lengths are asserted, the parts have room for both, and the kernel checks each target.
        unsafe {
            launch!(self, "class_loss" of element, Grid::warps(rows), of, targets, values, losses, hits)?;
            self.add_up("add_losses", losses, rows, loss)?;
            match correct {
                Some(correct) => self.add_up("add_losses", hits, rows, correct),
                None => Ok(()),
            }
        }
    }
}
