//! Convolutions and their gradients: channels that are multiples of something and of nothing, windows of any
//! shape, and each way that there is: cuDNN's fastest engine, its first one that gives the same bits every time,
//! and products of gathered rows, as where there is no cuDNN.

use std::sync::OnceLock;

use shoal_kernels::random::{fold, key_of};
use shoal_kernels::{CpuDevice, CudaDevice, Device, Element, Filters, Tensor, Window};

use crate::{
    BUDGET_BYTES, CHOICES, Case, Output, SUM_TOLERANCE, active, active_unwritten, before, cases,
    eprint_on_panic, gpu, hold, read, rounding, unwritten,
};

/// A scratch has at most so many elements.
const SCRATCH_MAX: usize = 1 << 22;

/// A way to convolve.
struct Way {
    name: &'static str,
    device: CudaDevice,
    /// Two runs give the same bits.
    repeats: bool,
}

fn ways() -> Option<&'static [Way]> {
    static WAYS: OnceLock<Vec<Way>> = OnceLock::new();
    let gpu = gpu()?;
    Some(WAYS.get_or_init(|| {
        let device = |name| gpu.beside(name, BUDGET_BYTES).unwrap_or_else(|error| panic!("{error}"));
        let deterministic = || device("deterministic").with_deterministic(true);
        vec![
            Way { name: "fastest", device: device("fastest"), repeats: false },
            Way { name: "deterministic", device: deterministic(), repeats: true },
            Way { name: "gathered", device: deterministic().without_cudnn(), repeats: true },
        ]
    }))
}

/// Holds each way against the CPU, for every kind of element and so many cases.
fn compare(what: &str, cases: u64, run: impl Fn(&dyn Device, Case) -> Vec<Output>) {
    let Some(ways) = ways() else { return };
    let cpu = CpuDevice::new("cpu", 2, BUDGET_BYTES).unwrap();
    for element in [Element::F32, Element::Bf16, Element::F16] {
        if !ways[0].device.computes(element) {
            eprintln!("{what}: skipped for {element:?}, which this GPU does not compute with");
            continue;
        }
        // A gradient of filters may be rounded to the element on its way to its f32 sum.
        let tolerance = SUM_TOLERANCE.max(rounding(element));
        let mut worst = vec![0.0f64; ways.len()];
        for seed in 0..cases {
            let case = Case { key: fold(key_of(what), seed), element };
            CHOICES.with_borrow_mut(String::clear);
            let expected = run(&cpu, case);
            let choices = CHOICES.with_borrow(String::clone);
            for (Way { name, device, repeats }, worst) in ways.iter().zip(&mut worst) {
                eprint_on_panic(&format!("{what}, {name}, {element:?}, case {seed}:{choices}"), || {
                    let (found, again) = (run(device, case), run(device, case));
                    assert_eq!((expected.len(), again.len()), (found.len(), found.len()));
                    for (part, (expected, (found, again))) in
                        expected.iter().zip(found.iter().zip(&again)).enumerate()
                    {
                        let label = format!("result {part}");
                        let again = if *repeats { again } else { found };
                        let off = hold(&label, element, tolerance, expected, found, again);
                        *worst = worst.max(off);
                    }
                });
            }
        }
        for (way, worst) in ways.iter().zip(worst) {
            eprintln!("{what}, {}, {element:?}: {cases} cases, off by at most {worst:.1e}", way.name);
        }
    }
}

/// Images, a window over them, and the number of filters.
fn shape(case: Case) -> (Window, usize) {
    const SIDES: [usize; 7] = [1, 2, 5, 7, 14, 17, 32];
    let (samples, channels) =
        (case.pick("samples", &[1, 2, 5]), case.pick("channels", &[1, 3, 4, 7, 8, 16, 24, 33, 64]));
    let (height, width) = (case.pick("height", &SIDES), case.pick("width", &SIDES));
    let outputs = case.pick("outputs", &[1, 2, 5, 8, 16, 30, 64]);
    let stride = case.pick("stride", &[1, 1, 2, 3]);
    let padding = case.pick("padding", &[(0, 0), (1, 1), (1, 1), (3, 3), (0, 2)]);
    let kernel = case.pick("kernel", &[(1, 1), (3, 3), (3, 3), (2, 2), (1, 5), (7, 7), (5, 3)]);
    let window = Window { samples, height, width, channels, kernel, stride, padding };
    if case.pick("whole", &[false, false, false, false, true]) {
        return (Window { kernel: (height, width), padding: (0, 0), ..window }, outputs);
    }
    let kernel = (kernel.0.min(height + 2 * padding.0), kernel.1.min(width + 2 * padding.1));
    (Window { kernel, ..window }, outputs)
}

/// Room for one row, for some, or for all; none where rows are there already.
fn scratch(device: &dyn Device, case: Case, window: &Window) -> Option<Tensor> {
    let rows = case.pick("scratch rows", &[1, 64, usize::MAX]).min(window.rows());
    let elements = (rows * window.elements()).min(SCRATCH_MAX);
    (!window.is_row()).then(|| unwritten(device, elements))
}

/// What is made of the images, then the gradients of the images and of the filters.
fn convolve(device: &dyn Device, case: Case, (window, outputs): (Window, usize)) -> Vec<Output> {
    let x = active(device, case, &case.normal("x", window.input_elements()));
    let dy = active(device, case, &case.normal("dy", window.rows() * outputs));
    let weight = active(device, case, &case.normal("weight", outputs * window.elements()));
    let filters = Filters { weight: &weight, outputs };
    let mut scratch = scratch(device, case, &window);
    let mut out = active_unwritten(device, case, dy.len());
    device.convolution(window, &x, filters, None, None, scratch.as_mut(), &mut out).unwrap();
    let mut dx = active_unwritten(device, case, x.len());
    device.convolution_input_gradient(window, &dy, filters, scratch.as_mut(), &mut dx).unwrap();
    let accumulate = case.yes("accumulate");
    let mut gradient = before(device, case, accumulate, weight.len());
    device
        .convolution_weight_gradient(window, &x, &dy, scratch.as_mut(), (&mut gradient, accumulate))
        .unwrap();
    vec![read(device, &out), read(device, &dx), read(device, &gradient)]
}

#[test]
fn convolution_and_its_gradients() {
    compare("convolution", cases(), |device, case| convolve(device, case, shape(case)));
}

/// Layers that are large enough for engines to be measured.
#[test]
fn large_convolutions_and_their_gradients() {
    compare("large convolution", cases().min(6), |device, case| {
        let (channels, outputs) = (case.pick("channels", &[3, 64, 128]), case.pick("outputs", &[64, 96]));
        let (side, stride) = (case.pick("side", &[3, 7]), case.pick("stride", &[1, 2]));
        let (samples, height, width) = (4, 56, 48);
        let padding = (side / 2, side / 2);
        let window = Window { samples, height, width, channels, kernel: (side, side), stride, padding };
        convolve(device, case, (window, outputs))
    });
}

/// Windows of one pixel that pass over others: the gradient of those is zero.
#[test]
fn pixels_that_no_window_sees() {
    compare("pixel convolution", cases().min(20), |device, case| {
        let (samples, stride) = (case.pick("samples", &[1, 3]), case.pick("stride", &[2, 3]));
        let (height, width) = (case.pick("height", &[4, 7, 9]), case.pick("width", &[4, 7, 9]));
        let (channels, outputs) = (case.pick("channels", &[8, 5, 64]), case.pick("outputs", &[8, 3, 32]));
        let window = Window { samples, height, width, channels, kernel: (1, 1), stride, padding: (0, 0) };
        convolve(device, case, (window, outputs))
    });
}
