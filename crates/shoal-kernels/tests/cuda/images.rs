//! Images in patches, the rows around them, and the loss of classes.

use shoal_kernels::{ClassLoss, LossMode, Mat, MatMut, PatchShape};

use crate::{TOLERANCE, active, active_unwritten, compare_elements, integers, read, scalar, tensor};

#[test]
fn patches_have_the_same_bits() {
    compare_elements("patches", 0.0, |device, case| {
        let samples = case.pick("samples", &[1, 2, 5]);
        let (channels, patch) = (case.pick("channels", &[1, 3, 4]), case.pick("patch", &[1, 3, 8, 16]));
        let size = patch * case.pick("side", &[1, 2, 7, 14]);
        let shape = PatchShape { samples, channels, size, patch };
        let images = tensor(device, &case.normal("images", samples * channels * size * size));
        let mut out = active_unwritten(device, case, samples * shape.rows() * channels * patch * patch);
        device.patches(shape, &images, &mut out).unwrap();
        vec![read(device, &out)]
    });
}

#[test]
fn rows_are_placed_and_set_with_the_same_bits() {
    compare_elements("rows around patches", 0.0, |device, case| {
        let (samples, sequence) = (case.pick("samples", &[1, 2, 5]), case.side("sequence"));
        let width = case.pick("width", &[1, 7, 8, 33, 64, 300, 768]);
        let mut out = active(device, case, &case.normal("rows", samples * sequence * width));
        let first = active(device, case, &case.normal("first", width));
        let positions = active(device, case, &case.normal("positions", (sequence + 1) * width));
        device.place_rows(sequence, width, &first, &positions, &mut out).unwrap();
        let placed = read(device, &out);
        let rows = active(device, case, &case.normal("set", samples * width));
        let from = case.yes("from").then(|| Mat::new(&rows, samples, width));
        device.set_rows(from, MatMut::columns(&mut out, samples, 0, width, sequence * width)).unwrap();
        vec![placed, read(device, &out)]
    });
}

#[test]
fn class_loss() {
    compare_elements("class_loss", TOLERANCE, |device, case| {
        let (rows, spare) = (case.side("rows"), case.pick("spare", &[0, 1, 5]));
        let classes = case.pick("classes", &[1, 2, 10, 31, 33, 257, 1000]);
        let (cols, stride) = (classes as usize, classes as usize + case.pick("apart", &[0, 0, 1, 7, 54]));
        let low = if case.yes("ignored") { -1 } else { 0 };
        let targets = integers(device, &case.whole("targets", rows + spare, low, classes));
        let end = if case.yes("ends whole") { rows * stride } else { (rows - 1) * stride + cols };
        let mut values = vec![f32::NAN; end];
        for (row, logits) in case.normal("logits", rows * cols).chunks_exact(cols).enumerate() {
            let scaled = logits.iter().map(|x| 4.0 * x);
            values[row * stride..][..cols].iter_mut().zip(scaled).for_each(|(to, x)| *to = x);
        }
        let mut place = active(device, case, &values);
        let scale = 0.37 * (cols as f32).sqrt();
        let mode = if case.yes("gradient") { LossMode::Gradient { scale } } else { LossMode::LossOnly };
        let settings = ClassLoss { mode, smoothing: case.pick("smoothing", &[0.0, 0.1]) };
        let (mut loss, mut correct) = (scalar(device, 2.5), scalar(device, 1.0));
        let logits = MatMut::columns(&mut place, rows, 0, cols, stride);
        device.class_loss(&targets, spare, settings, logits, &mut loss, Some(&mut correct)).unwrap();
        let (loss, correct) = (device.scalar(&loss).unwrap(), device.scalar(&correct).unwrap());
        match mode {
            LossMode::LossOnly => vec![loss.into(), correct.into()],
            LossMode::Gradient { .. } => vec![loss.into(), correct.into(), read(device, &place)],
        }
    });
}
