//! Table look-ups, gradients that return to their rows, and the loss over a vocabulary.

use shoal_kernels::LossMode;

use crate::{before, compare, compare_within, integers, read, scalar, tensor, unwritten};

/// One addition per element, or sums in the same order: the bits are those of the CPU.
#[test]
fn look_ups_have_the_same_bits() {
    compare_within("embed", 0.0, |device, case| {
        let (samples, sequence, width) =
            (case.pick("samples", &[1, 2, 5]), case.side("sequence"), case.side("width"));
        let (rows, vocabulary) = (samples * sequence, case.pick("vocabulary", &[1, 3, 40, 2000]));
        let accumulate = case.yes("accumulate");
        let tokens = integers(device, &case.whole("tokens", rows, 0, vocabulary));
        let table = tensor(device, &case.normal("table", vocabulary as usize * width));
        let positions =
            case.yes("positions").then(|| tensor(device, &case.normal("places", (sequence + 2) * width)));
        let mut out = unwritten(device, rows * width);
        device.embed(&tokens, sequence, width, &table, positions.as_ref(), &mut out).unwrap();
        let dy = tensor(device, &case.normal("dy", rows * width));
        let mut gradient = before(device, case, accumulate, vocabulary as usize * width);
        device.embed_gradient(&tokens, width, &dy, &mut gradient, accumulate).unwrap();
        let mut by_position = before(device, case, accumulate, (sequence + 2) * width);
        device.position_gradient(sequence, width, &dy, &mut by_position, accumulate).unwrap();
        vec![read(device, &out), read(device, &gradient), read(device, &by_position)]
    });
}

#[test]
fn cross_entropy() {
    compare("cross_entropy", |device, case| {
        let (rows, spare) = (case.side("rows"), case.pick("spare", &[0, 1, 5]));
        let vocabulary = case.pick("vocabulary", &[1, 2, 33, 255, 1000, 5003]);
        // A few targets are to be ignored.
        let low = if case.yes("ignored") { -1 } else { 0 };
        let targets = integers(device, &case.whole("targets", rows + spare, low, vocabulary));
        let values: Vec<f32> =
            case.normal("logits", (rows + 1) * vocabulary as usize).iter().map(|x| 4.0 * x).collect();
        let mut logits = tensor(device, &values);
        let mode = if case.yes("gradient") { LossMode::Gradient { scale: 0.37 } } else { LossMode::LossOnly };
        let mut loss = scalar(device, 2.5);
        device
            .cross_entropy(&targets, spare..spare + rows, vocabulary as usize, mode, &mut logits, &mut loss)
            .unwrap();
        let loss = vec![device.scalar(&loss).unwrap() as f32];
        match mode {
            LossMode::LossOnly => vec![loss],
            LossMode::Gradient { .. } => vec![loss, read(device, &logits)],
        }
    });
}
