//! Table look-ups, gradients that return to their rows, and the loss over a vocabulary.

use shoal_kernels::{CpuDevice, Device, Element, LossMode, MatMut};

use crate::{
    Case, SUM_TOLERANCE, TOLERANCE, active, active_unwritten, before, compare_elements, gpu, hold, integers,
    read, scalar, tensor, unwritten,
};

/// The additions of an element have one order: the bits are those of the CPU.
#[test]
fn look_ups_have_the_same_bits() {
    compare_elements("embed", 0.0, |device, case| {
        let (samples, sequence) = (case.pick("samples", &[1, 2, 5]), case.side("sequence"));
        let width = case.pick("width", &[1, 7, 8, 16, 33, 64, 300, 768, 1032]);
        let (rows, vocabulary) = (samples * sequence, case.pick("vocabulary", &[1, 3, 40, 2000]));
        let tokens = integers(device, &case.whole("tokens", rows, 0, vocabulary));
        let table = active(device, case, &case.normal("table", vocabulary as usize * width));
        let positions = case
            .yes("positions")
            .then(|| active(device, case, &case.normal("places", (sequence + 2) * width)));
        let types = case.yes("types").then(|| active(device, case, &case.normal("types", 2 * width)));
        let mut out = active_unwritten(device, case, rows * width);
        device.embed(&tokens, sequence, width, &table, positions.as_ref(), types.as_ref(), &mut out).unwrap();
        vec![read(device, &out)]
    });
}

/// Of the smaller numbers there are more, as in a text.
fn text(case: Case, tokens: usize, vocabulary: i32) -> Vec<i32> {
    let uniform = case.whole("tokens", tokens, 0, 1 << 24);
    let spread = f64::from(vocabulary + 1).ln();
    let token = |lot: i32| (f64::from(lot) / f64::from(1 << 24) * spread).exp() as i32 - 1;
    uniform.into_iter().map(|lot| token(lot).clamp(0, vocabulary - 1)).collect()
}

#[test]
fn gradients_return_to_their_rows() {
    compare_elements("embed gradient", SUM_TOLERANCE, |device, case| {
        let (samples, sequence) = (case.pick("samples", &[1, 2, 5]), case.side("sequence"));
        let width = case.pick("width", &[1, 7, 8, 16, 33, 64, 300, 768, 1032]);
        let (rows, vocabulary) = (samples * sequence, case.pick("vocabulary", &[1, 3, 40, 2000, 70_000]));
        let width = if vocabulary > 2000 { width.min(64) } else { width };
        let accumulate = case.yes("accumulate");
        let tokens = match case.yes("as in a text") {
            true => text(case, rows, vocabulary),
            false => case.whole("tokens", rows, 0, vocabulary),
        };
        let tokens = integers(device, &tokens);
        let dy = active(device, case, &case.normal("dy", rows * width));
        let mut gradient = before(device, case, accumulate, vocabulary as usize * width);
        device.embed_gradient(&tokens, width, &dy, &mut gradient, accumulate).unwrap();
        let mut by_position = before(device, case, accumulate, (sequence + 2) * width);
        device.position_gradient(sequence, width, &dy, &mut by_position, accumulate).unwrap();
        vec![read(device, &gradient), read(device, &by_position)]
    });
}

/// As many tokens as are sorted at once and more, among them one that is everywhere.
#[test]
fn gradients_of_many_tokens() {
    let Some(gpu) = gpu() else { return };
    let cpu = CpuDevice::new("cpu", 2, 1 << 30).unwrap();
    for (rows, vocabulary, width, everywhere) in
        [(32_768, 50_257, 24, false), (40_000, 300, 16, true), (1_100_000, 50_257, 4, false)]
    {
        let case = Case { key: rows as u64, element: Element::F32 };
        let mut tokens = text(case, rows, vocabulary);
        if everywhere {
            tokens.fill(7);
        }
        let dy = case.normal("dy", rows * width);
        let run = |device: &dyn Device| {
            let (tokens, dy) = (integers(device, &tokens), tensor(device, &dy));
            let mut gradient = unwritten(device, vocabulary as usize * width);
            device.embed_gradient(&tokens, width, &dy, &mut gradient, false).unwrap();
            read(device, &gradient)
        };
        let off = hold(
            &format!("{rows} tokens"),
            case.element,
            // Half a million terms of one token, added one by one on the CPU.
            1e-3,
            &run(&cpu),
            &run(gpu),
            &run(gpu),
        );
        eprintln!("{rows} tokens: off by {off:.1e}");
    }
}

/// A token outside of the table reads NaN, and its gradient goes nowhere.
#[test]
fn tokens_outside_of_the_table() {
    let Some(gpu) = gpu() else { return };
    let (rows, width) = (5usize, 20);
    let tokens = [3, -1, 2, 5, 0, 3, i32::MAX, i32::MIN, 4, 6];
    let outside: Vec<bool> = tokens.iter().map(|token| !(0..rows as i32).contains(token)).collect();
    let held = integers(gpu, &tokens);
    let table = tensor(gpu, &vec![1.0; rows * width]);
    let mut out = unwritten(gpu, tokens.len() * width);
    gpu.embed(&held, tokens.len(), width, &table, None, None, &mut out).unwrap();
    for (row, outside) in read(gpu, &out).values.chunks_exact(width).zip(&outside) {
        assert!(row.iter().all(|value| value.is_nan() == *outside));
    }
    let dy = tensor(gpu, &vec![1.0; tokens.len() * width]);
    let mut gradient = unwritten(gpu, rows * width);
    gpu.embed_gradient(&held, width, &dy, &mut gradient, false).unwrap();
    for (row, sums) in read(gpu, &gradient).values.chunks_exact(width).enumerate() {
        let times = tokens.iter().filter(|token| **token == row as i32).count() as f32;
        assert!(sums.iter().all(|sum| *sum == times), "row {row}: {sums:?}");
    }
}

#[test]
fn cross_entropy() {
    compare_elements("cross_entropy", TOLERANCE, |device, case| {
        let spare = case.pick("spare", &[0, 1, 5]);
        let vocabulary = case.pick("vocabulary", &[1, 2, 33, 255, 1000, 5003, 50257]);
        let rows = if vocabulary > 10_000 { 3 } else { case.side("rows") };
        let stride = vocabulary as usize + case.pick("apart", &[0, 0, 1, 7, 8, 47]);
        // A few targets are to be ignored.
        let low = if case.yes("ignored") { -1 } else { 0 };
        let targets = integers(device, &case.whole("targets", rows + spare, low, vocabulary));
        let (logits, cols) = (case.normal("logits", rows * vocabulary as usize), vocabulary as usize);
        let end = if case.yes("ends whole") { rows * stride } else { (rows - 1) * stride + cols };
        // What lies between rows must not be read, and a row more must not be written.
        let mut values = vec![f32::NAN; end];
        for (row, logits) in logits.chunks_exact(cols).enumerate() {
            let scaled = logits.iter().map(|x| 4.0 * x);
            values[row * stride..][..cols].iter_mut().zip(scaled).for_each(|(to, x)| *to = x);
        }
        let mut place = active(device, case, &values);
        // Large enough for the gradient's elements to be of order 1, taken together.
        let scale = 0.37 * (cols as f32).sqrt();
        let mode = if case.yes("gradient") { LossMode::Gradient { scale } } else { LossMode::LossOnly };
        let mut loss = scalar(device, 2.5);
        let logits = MatMut::columns(&mut place, rows, 0, cols, stride);
        device.cross_entropy(&targets, spare, mode, logits, &mut loss).unwrap();
        let loss = device.scalar(&loss).unwrap().into();
        match mode {
            LossMode::LossOnly => vec![loss],
            LossMode::Gradient { .. } => vec![loss, read(device, &place)],
        }
    });
}
