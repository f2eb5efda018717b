//! What convolutional models do to images. Masks and places are compared byte by byte; where a result passes through
//! no sum, or one in the CPU's order, it has the CPU's bits.

use shoal_kernels::convolutional::{byte_elements, mask_elements};
use shoal_kernels::device::Sum;
use shoal_kernels::{
    Averages, ColumnNorm, CpuDevice, Device, Element, Filters, Mat, NormGradients, Tensor, Window,
};

use crate::{
    BUDGET_BYTES, Case, Output, SUM_TOLERANCE, Strided, TOLERANCE, active, active_before, active_unwritten,
    before, compare_elements, compare_within, gpu, hold, integers, read, tensor,
};

/// For sums over hundreds of thousands of rows, some of which the CPU adds one after the other in f32.
const LONG_TOLERANCE: f64 = 3e-4;

/// Channels on both sides of eights, warps and strips.
fn channels(case: Case) -> usize {
    case.pick("channels", &[1, 3, 7, 8, 9, 16, 31, 32, 33, 40, 64, 96, 100, 256, 257, 264, 520])
}

/// Rows and columns: many of the ones with few of the others.
fn sides(case: Case) -> (usize, usize) {
    let cols = channels(case);
    let rows = case.pick("rows", &[1, 2, 7, 49, 64, 127, 129, 700, 3001, 20_011]);
    (rows.min(400_000 / cols), cols)
}

/// The bytes of integers, each as a number.
fn bytes(device: &dyn Device, tensor: &Tensor) -> Output {
    let words = device.host_floats(tensor).unwrap();
    let values = words.iter().flat_map(|word| word.to_bits().to_le_bytes()).map(f32::from).collect();
    Output { values, element: Element::F32 }
}

/// Integers that nothing has written.
fn unwritten_integers(device: &dyn Device, elements: usize) -> Tensor {
    integers(device, &vec![0x5a5a_5a5a; elements])
}

/// A mask whose every bit is random; those past a row's end are not set.
fn mask(device: &dyn Device, case: Case, rows: usize, cols: usize) -> Tensor {
    let words = cols.div_ceil(32);
    let mut values = case.whole("mask", mask_elements(rows, cols), i32::MIN / 2, i32::MAX / 2);
    // The upper bits of such numbers are alike: those of another draw.
    let upper = case.whole("upper mask", values.len(), 0, 1 << 16);
    for (index, (value, upper)) in values.iter_mut().zip(upper).enumerate() {
        *value = *value & 0xffff | upper << 16;
        let left = cols - index % words * 32;
        if left < 32 {
            *value &= ((1u32 << left) - 1) as i32;
        }
    }
    integers(device, &values)
}

/// Numbers of which some are equal, some zero, and one or none NaN.
fn coarse(case: Case, name: &str, elements: usize, nan: bool) -> Vec<f32> {
    let mut values: Vec<f32> =
        case.whole(name, elements, -6, 7).into_iter().map(|value| value as f32 / 4.0).collect();
    if nan {
        values[elements / 2] = f32::NAN;
    }
    values
}

/// Sums that an operation adds to, or overwrites; or none.
fn sums(device: &dyn Device, case: Case, elements: usize) -> (Tensor, bool) {
    let accumulate = case.yes("accumulate");
    (before(device, case, accumulate, elements), accumulate)
}

#[test]
fn channels_last_have_the_same_bits() {
    compare_elements("channels last", 0.0, |device, case| {
        let (samples, channels) = (case.pick("samples", &[1, 2, 5]), channels(case));
        let pixels = case.pick("pixels", &[1, 7, 49, 1024, 1345, 3025]);
        let images = tensor(device, &case.normal("images", samples * channels * pixels));
        let mut out = active_unwritten(device, case, samples * channels * pixels);
        device.channels_last(samples, channels, &images, &mut out).unwrap();
        vec![read(device, &out)]
    });
}

/// A convolution of one channel by one weight is exact, so that what follows it shows.
#[test]
fn bias_and_relu_after_a_convolution() {
    compare_elements("bias and relu", 0.0, |device, case| {
        let (rows, outputs) = sides(case);
        let window = Window {
            samples: 1,
            height: rows,
            width: 1,
            channels: 1,
            kernel: (1, 1),
            stride: 1,
            padding: (0, 0),
        };
        let x = active(device, case, &coarse(case, "x", rows, case.yes("nan")));
        let weight = active(device, case, &vec![0.5; outputs]);
        let bias = case.yes("bias").then(|| tensor(device, &coarse(case, "bias", outputs, false)));
        let mut mask = case.yes("relu").then(|| unwritten_integers(device, mask_elements(rows, outputs)));
        let mut out = active_unwritten(device, case, rows * outputs);
        let filters = Filters { weight: &weight, outputs };
        device.convolution(window, &x, filters, bias.as_ref(), mask.as_mut(), None, &mut out).unwrap();
        let mut results = vec![read(device, &out)];
        results.extend(mask.map(|mask| bytes(device, &mask)));
        results
    });
}

#[test]
fn relu_gradient() {
    compare_elements("relu_gradient", 0.0, |device, case| {
        let (rows, cols) = sides(case);
        let (mask, mut gradient) =
            (mask(device, case, rows, cols), active(device, case, &case.normal("gradient", rows * cols)));
        device.relu_gradient(cols, &mask, &mut gradient, None).unwrap();
        vec![read(device, &gradient)]
    });
    compare_elements("relu_gradient with sums", SUM_TOLERANCE, |device, case| {
        let (rows, cols) = sides(case);
        let (mask, mut gradient) =
            (mask(device, case, rows, cols), active(device, case, &case.normal("gradient", rows * cols)));
        let (mut sums, accumulate) = sums(device, case, cols);
        device.relu_gradient(cols, &mask, &mut gradient, Some((&mut sums, accumulate))).unwrap();
        vec![read(device, &gradient), read(device, &sums)]
    });
}

fn window(case: Case) -> Window {
    let (kernel, stride, padding) = case.pick(
        "kernel, stride and padding",
        &[
            ((2, 2), 2, (0, 0)),
            ((3, 3), 2, (1, 1)),
            ((3, 3), 1, (1, 1)),
            ((1, 1), 1, (0, 0)),
            ((5, 2), 3, (2, 0)),
            ((2, 7), 2, (1, 3)),
            ((1, 3), 4, (0, 2)),
        ],
    );
    let (height, width) = (case.pick("height", &[5, 7, 14, 23]), case.pick("width", &[7, 8, 15, 33]));
    let samples = case.pick("samples", &[1, 2, 3]);
    Window { samples, height, width, channels: channels(case), kernel, stride, padding }
}

#[test]
fn max_pool_has_the_same_bits() {
    compare_elements("max_pool", 0.0, |device, case| {
        let window = window(case);
        let elements = window.rows() * window.channels;
        let x = coarse(case, "x", window.input_elements(), case.yes("nan"));
        let x = active(device, case, &x);
        let bias = case.yes("bias").then(|| tensor(device, &case.normal("bias", window.channels)));
        let (rectify, mut places) =
            (case.yes("rectify"), unwritten_integers(device, byte_elements(elements)));
        let mut out = active_unwritten(device, case, elements);
        device.max_pool(window, &x, bias.as_ref(), rectify, &mut places, &mut out).unwrap();
        vec![read(device, &out), bytes(device, &places)]
    });
}

/// Makes the places by a pool on the same device, which gives the same everywhere.
fn pool_gradient(device: &dyn Device, case: Case, sums: Option<Sum>) -> Tensor {
    let window = window(case);
    let elements = window.rows() * window.channels;
    let x = active(device, case, &coarse(case, "x", window.input_elements(), false));
    let (mut places, mut out) =
        (unwritten_integers(device, byte_elements(elements)), active_unwritten(device, case, elements));
    device.max_pool(window, &x, None, case.yes("rectify"), &mut places, &mut out).unwrap();
    let dy = active(device, case, &case.normal("dy", elements));
    let mut dx = active_unwritten(device, case, window.input_elements());
    device.max_pool_gradient(window, &places, &dy, &mut dx, sums).unwrap();
    dx
}

#[test]
fn max_pool_gradient() {
    compare_elements("max_pool_gradient", TOLERANCE, |device, case| {
        vec![read(device, &pool_gradient(device, case, None))]
    });
    compare_elements("max_pool_gradient with sums", SUM_TOLERANCE, |device, case| {
        let (mut sums, accumulate) = sums(device, case, window(case).channels);
        let dx = pool_gradient(device, case, Some((&mut sums, accumulate)));
        vec![read(device, &dx), read(device, &sums)]
    });
}

#[test]
fn window_average_has_the_same_bits() {
    compare_elements("window_average", 0.0, |device, case| {
        let window = window(case);
        let x = active(device, case, &case.normal("x", window.input_elements()));
        let mut out = active_unwritten(device, case, window.rows() * window.channels);
        device.window_average(window, &x, &mut out).unwrap();
        vec![read(device, &out)]
    });
    compare_elements("window_average_gradient", 0.0, |device, case| {
        let window = window(case);
        let dy = active(device, case, &case.normal("dy", window.rows() * window.channels));
        let mut dx = active_unwritten(device, case, window.input_elements());
        device.window_average_gradient(window, &dy, &mut dx).unwrap();
        vec![read(device, &dx)]
    });
}

fn bins(case: Case) -> Averages {
    let (height, width) = (case.pick("height", &[1, 5, 7, 14]), case.pick("width", &[1, 6, 7, 13]));
    let all = case.yes("global");
    let bins = case.pick("bins", &[(1, 1), (7, 7), (2, 3), (3, 1), (10, 4)]);
    let samples = case.pick("samples", &[1, 2, 9]);
    Averages { samples, height, width, channels: channels(case), bins: if all { (1, 1) } else { bins } }
}

#[test]
fn average_pool() {
    compare_elements("average_pool", TOLERANCE, |device, case| {
        let shape = bins(case);
        let Averages { samples, height, width, channels, bins } = shape;
        let x = active(device, case, &case.normal("x", samples * height * width * channels));
        let mut out = active_unwritten(device, case, samples * bins.0 * bins.1 * channels);
        device.average_pool(shape, &x, &mut out).unwrap();
        vec![read(device, &out)]
    });
}

#[test]
fn average_pool_gradient_has_the_same_bits() {
    compare_elements("average_pool_gradient", 0.0, |device, case| {
        let shape = bins(case);
        let Averages { samples, height, width, channels, bins } = shape;
        let dy = active(device, case, &case.normal("dy", samples * bins.0 * bins.1 * channels));
        let mut dx = active_unwritten(device, case, samples * height * width * channels);
        device.average_pool_gradient(shape, &dy, &mut dx).unwrap();
        vec![read(device, &dx)]
    });
}

#[test]
fn copied_rows_leave_what_lies_between() {
    compare_elements("copy_rows", 0.0, |device, case| {
        let (rows, cols) = sides(case);
        let x = Strided::new(device, case, "x", rows, cols, Some(&case.normal("x", rows * cols)));
        let mut out = Strided::new(device, case, "out", rows, cols, None);
        device.copy_rows(x.mat(), out.mat_mut()).unwrap();
        vec![read(device, &out.tensor)]
    });
}

#[test]
fn add_scaled_has_the_same_bits() {
    compare_elements("add_scaled", 0.0, |device, case| {
        let (rows, cols) = sides(case);
        let x = Strided::new(device, case, "x", rows, cols, Some(&case.normal("x", rows * cols)));
        let accumulate = case.yes("accumulate");
        let mut out = active_before(device, case, accumulate, rows * cols);
        device.add_scaled(case.pick("factor", &[1.0, -0.3]), x.mat(), (&mut out, accumulate)).unwrap();
        vec![read(device, &out)]
    });
}

#[test]
fn column_statistics() {
    compare_elements("column_statistics", TOLERANCE, |device, case| {
        let (rows, cols) = sides(case);
        // Far from zero as seen from their spread, and the first row farther.
        let away = case.pick("mean", &[0.0, 0.0, 3.0, -50.0]);
        let mut values: Vec<f32> = case.normal("x", rows * cols).iter().map(|x| x + away).collect();
        values[..cols].iter_mut().for_each(|value| *value *= case.pick("first row", &[1.0, 1.0, 9.0]));
        let x = Strided::new(device, case, "x", rows, cols, Some(&values));
        let mut statistics = tensor(device, &vec![f32::NAN; 2 * cols]);
        device.column_statistics(x.mat(), &mut statistics).unwrap();
        vec![read(device, &statistics)]
    });
}

/// Statistics and sums of so many rows that the CPU takes a while: a few shapes, not many cases.
fn sum_many_rows(device: &dyn Device, case: Case, rows: usize, cols: usize) -> Vec<Output> {
    // A few draws again and again: drawing is slow.
    let some = case.normal("x", 10_007);
    let values: Vec<f32> = some.iter().cycle().take(rows * cols).map(|x| x + 1.5).collect();
    let (x, mut dy) = (active(device, case, &values), active(device, case, &values));
    let [mut statistics, mut along] = [0, 1].map(|_| tensor(device, &vec![f32::NAN; 2 * cols]));
    device.column_statistics(Mat::new(&x, rows, cols), &mut statistics).unwrap();
    let (made_of, mask) = (Norms::new(device, case, cols), mask(device, case, rows, cols));
    let norm = made_of.norm(0..rows, cols);
    device.column_norm_sums(&norm, &x, Some(&mask), &dy, (&mut along, false), None).unwrap();
    let mut plain = tensor(device, &vec![f32::NAN; cols]);
    device.relu_gradient(cols, &mask, &mut dy, Some((&mut plain, false))).unwrap();
    // By the row, so that what is allowed does not depend on how many there are.
    let each = |sums: Output| {
        let values = sums.values.iter().map(|sum| sum / rows as f32).collect();
        Output { values, ..sums }
    };
    vec![read(device, &statistics), each(read(device, &along)), each(read(device, &plain))]
}

#[test]
fn columns_of_very_many_rows() {
    let Some(gpu) = gpu() else { return };
    let cpu = CpuDevice::new("cpu", 2, BUDGET_BYTES).unwrap();
    for (rows, cols) in [(300_007, 8), (50_000, 64), (200_000, 3), (6_272, 2_048)] {
        for element in [Element::F32, Element::Bf16, Element::F16].into_iter().filter(|x| gpu.computes(*x)) {
            let run =
                |device: &dyn Device| sum_many_rows(device, Case { key: rows as u64, element }, rows, cols);
            let (expected, found, again) = (run(&cpu), run(gpu), run(gpu));
            for (part, ((expected, found), again)) in expected.iter().zip(&found).zip(&again).enumerate() {
                let label = format!("{rows} x {cols} of {element:?}, result {part}");
                hold(&label, element, LONG_TOLERANCE, expected, found, again);
            }
        }
    }
}

#[test]
fn merge_statistics() {
    compare_within("merge_statistics", TOLERANCE, |device, case| {
        let cols = channels(case);
        let positive = |name: &str| case.normal(name, 2 * cols).iter().map(|x| x.abs()).collect::<Vec<_>>();
        let (of, mut into) = (tensor(device, &positive("of")), tensor(device, &positive("into")));
        let (rows, more) = (case.pick("rows", &[1, 7, 100_000]), case.pick("more", &[1, 49, 3_000_000]));
        device.merge_statistics((&of, rows), (&mut into, more)).unwrap();
        vec![read(device, &into)]
    });
}

/// What a norm is made of: statistics of several groups lie one after the other.
struct Norms {
    statistics: Tensor,
    weight: Tensor,
    bias: Tensor,
    group: usize,
}

impl Norms {
    const GROUPS: usize = 3;

    fn new(device: &dyn Device, case: Case, cols: usize) -> Norms {
        let statistics: Vec<f32> =
            case.normal("statistics", Norms::GROUPS * 2 * cols).iter().map(|x| x.abs() + 0.1).collect();
        Norms {
            statistics: tensor(device, &statistics),
            weight: tensor(device, &case.normal("weight", cols)),
            bias: tensor(device, &case.normal("bias", cols)),
            group: case.pick("group", &[0, 1, 2]),
        }
    }

    fn norm(&self, rows: std::ops::Range<usize>, cols: usize) -> ColumnNorm<'_> {
        let of = Mat::new(&self.statistics, 2 * Norms::GROUPS, cols);
        ColumnNorm {
            eps: 1e-5,
            rows,
            cols,
            mean: of.rows(2 * self.group, 1),
            variance: of.rows(2 * self.group + 1, 1),
            weight: &self.weight,
            bias: &self.bias,
        }
    }
}

/// Some rows of all: a group's.
fn range(case: Case, rows: usize) -> std::ops::Range<usize> {
    let first = rows * case.pick("first of ten", &[0, 0, 3, 5]) / 10;
    let last = rows * case.pick("last of ten", &[10, 10, 8, 6]) / 10;
    first..last.max(first)
}

#[test]
fn column_norm_has_the_same_bits() {
    compare_elements("column_norm", 0.0, |device, case| {
        let (rows, cols) = sides(case);
        let made_of = Norms::new(device, case, cols);
        let norm = made_of.norm(range(case, rows), cols);
        let mut values = case.normal("x", rows * cols);
        if case.yes("nan") {
            values[rows * cols / 2] = f32::NAN;
        }
        let x = active(device, case, &values);
        let residual =
            case.yes("residual").then(|| active(device, case, &case.normal("residual", rows * cols)));
        let mut mask = case.yes("relu").then(|| unwritten_integers(device, mask_elements(rows, cols)));
        let mut out = active_unwritten(device, case, rows * cols);
        device.column_norm(&norm, &x, residual.as_ref(), mask.as_mut(), &mut out).unwrap();
        let mut results = vec![read(device, &out)];
        results.extend(mask.map(|mask| bytes(device, &mask)));
        results
    });
}

#[test]
fn column_norm_sums() {
    compare_elements("column_norm_sums", SUM_TOLERANCE, |device, case| {
        let (rows, cols) = sides(case);
        let made_of = Norms::new(device, case, cols);
        let norm = made_of.norm(range(case, rows), cols);
        let x = active(device, case, &case.normal("x", rows * cols));
        let dy = active(device, case, &case.normal("dy", rows * cols));
        let mask = case.yes("relu").then(|| mask(device, case, rows, cols));
        let (mut sums, accumulate) = sums(device, case, 2 * cols);
        let [mut of_bias, mut of_weight, mut of_mean, mut of_variance] =
            [0; 4].map(|_| before(device, case, accumulate, cols));
        let gradients = NormGradients {
            bias: (&mut of_bias, accumulate),
            weight: (&mut of_weight, accumulate),
            running: Some([(2.0, (&mut of_mean, accumulate)), (-3.0, (&mut of_variance, accumulate))]),
        };
        let gradients = case.yes("gradients").then_some(gradients);
        device.column_norm_sums(&norm, &x, mask.as_ref(), &dy, (&mut sums, accumulate), gradients).unwrap();
        let mut results = vec![read(device, &sums)];
        if case.yes("gradients") {
            results.extend([&of_bias, &of_weight, &of_mean, &of_variance].map(|sum| read(device, sum)));
        }
        results
    });
}

#[test]
fn column_norm_gradient() {
    compare_elements("column_norm_gradient", TOLERANCE, |device, case| {
        let (rows, cols) = sides(case);
        let made_of = Norms::new(device, case, cols);
        let norm = made_of.norm(range(case, rows), cols);
        let mut x = active(device, case, &case.normal("x", rows * cols));
        let mut dy = active(device, case, &case.normal("dy", rows * cols));
        let mask = case.yes("relu").then(|| mask(device, case, rows, cols));
        let sums = tensor(device, &case.normal("sums", 2 * cols));
        let (group_rows, keep) = (case.pick("groups", &[1, 3]) * rows, case.yes("keep"));
        device.column_norm_gradient(&norm, &sums, group_rows, mask.as_ref(), &mut dy, keep, &mut x).unwrap();
        vec![read(device, &x), read(device, &dy)]
    });
}
