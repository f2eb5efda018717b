//! Every operation on the GPU against the CPU's, which is held against f64 elsewhere: random shapes that are
//! multiples of nothing, strided matrices with NaN around them, outputs that start as NaN. Each operation
//! runs twice and must give the same bits. Without a GPU each test says that it was skipped.
//!
//! Operations that take elements of two bytes are held against the CPU's f32 as well: both sides get numbers
//! that such elements hold exactly, and the CPU's results are rounded to the element before they are compared.

mod attention;
mod convolution;
mod embedding;
mod images;
mod linear;
mod memory;
mod norm;
mod optimizer;
mod pixels;
mod pointwise;

use std::cell::RefCell;
use std::fmt::{Debug, Write};
use std::sync::OnceLock;

use shoal_kernels::device::SCALAR_ELEMENTS;
use shoal_kernels::random::{fill_normal, fold, key_of};
use shoal_kernels::{CpuDevice, CudaDevice, Device, Element, Mat, MatMut, Tensor};

/// Random shapes per operation, unless `SHOAL_CUDA_CASES` asks for another number.
const CASES: u64 = 60;

fn cases() -> u64 {
    let asked = std::env::var("SHOAL_CUDA_CASES").ok();
    asked.map_or(CASES, |text| text.parse().expect("SHOAL_CUDA_CASES is a number"))
}

const BUDGET_BYTES: u64 = 1 << 30;

/// f32 rounds each term by up to 6e-8 of it; over the up to a few thousand terms summed here that adds up
/// to some 1e-6 on each side, and the two sides' exponentials differ by two units in the last place. A
/// missing term, or a constant wrong in its fourth digit, is far above.
const TOLERANCE: f64 = 3e-5;

/// For sums over up to 3000 rows, which may walk to 50 and come back to nothing: what is left carries the
/// rounding of 50, and the CPU adds row after row, the GPU in chunks.
const SUM_TOLERANCE: f64 = 1e-4;

/// Where a result passes through elements of two bytes, each rounding is off by up to 2^-9 or 2^-12 of it, and
/// one that lands on the other side moves it by twice that.
fn rounding(element: Element) -> f64 {
    match element {
        Element::F32 => 0.0,
        Element::Bf16 => 1e-2,
        Element::F16 => 2e-3,
    }
}

/// For f32 results of such elements: exponentials are made a little faster for them.
const FROM_HALVES: f64 = 1e-3;

/// The GPU, or a line that says why the test is skipped.
fn gpu() -> Option<&'static CudaDevice> {
    static GPU: OnceLock<Option<CudaDevice>> = OnceLock::new();
    let gpu = GPU.get_or_init(|| match CudaDevice::count() {
        Ok(0) => None,
        // A GPU that is there must open.
        Ok(_) => Some(CudaDevice::new("cuda:0", 0, BUDGET_BYTES).unwrap_or_else(|error| panic!("{error}"))),
        Err(error) => {
            eprintln!("{error}");
            None
        }
    });
    if gpu.is_none() {
        eprintln!("skipped: no GPU on this machine");
    }
    gpu.as_ref()
}

/// What an operation left in a tensor.
struct Output {
    values: Vec<f32>,
    element: Element,
}

impl From<f64> for Output {
    fn from(value: f64) -> Output {
        Output { values: vec![value as f32], element: Element::F32 }
    }
}

/// Holds the GPU's results against the CPU's, case by case; `run` is told the case's random numbers.
fn compare(what: &str, run: impl Fn(&dyn Device, Case) -> Vec<Output>) {
    compare_within(what, TOLERANCE, run);
}

/// The same with a tolerance of its own; 0 asks for the same bits.
fn compare_within(what: &str, tolerance: f64, run: impl Fn(&dyn Device, Case) -> Vec<Output>) {
    compare_element(what, Element::F32, tolerance, &run);
}

/// The same for every kind of element, with a tolerance for f32.
fn compare_elements(what: &str, tolerance: f64, run: impl Fn(&dyn Device, Case) -> Vec<Output>) {
    for element in [Element::F32, Element::Bf16, Element::F16] {
        compare_element(what, element, tolerance, &run);
    }
}

fn compare_element(
    what: &str,
    element: Element,
    tolerance: f64,
    run: &dyn Fn(&dyn Device, Case) -> Vec<Output>,
) {
    let Some(gpu) = gpu() else { return };
    if !gpu.computes(element) {
        eprintln!("{what}: skipped for {element:?}, which this GPU does not compute with");
        return;
    }
    let cpu = CpuDevice::new("cpu", 2, BUDGET_BYTES).unwrap();
    let mut worst = 0.0f64;
    for seed in 0..cases() {
        let case = Case { key: fold(key_of(what), seed), element };
        CHOICES.with_borrow_mut(String::clear);
        let expected = run(&cpu, case);
        let choices = CHOICES.with_borrow(String::clone);
        eprint_on_panic(&format!("{what}, {element:?}, case {seed}:{choices}"), || {
            let (found, again) = (run(gpu, case), run(gpu, case));
            assert_eq!((expected.len(), again.len()), (found.len(), found.len()));
            for (part, ((expected, found), again)) in expected.iter().zip(&found).zip(&again).enumerate() {
                let off = hold(&format!("result {part}"), element, tolerance, expected, found, again);
                worst = worst.max(off);
            }
        });
    }
    eprintln!("{what}, {element:?}: {} cases, off by at most {worst:.1e}", cases());
}

/// Names the case where `work` panics, in an operation or in what is asserted of it.
fn eprint_on_panic(case: &str, work: impl FnOnce()) {
    struct Named<'a>(&'a str);
    impl Drop for Named<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("in {}", self.0);
            }
        }
    }
    let _named = Named(case);
    work();
}

/// Holds one result against the CPU's; how far it is off, by the norm.
fn hold(
    label: &str,
    element: Element,
    tolerance: f64,
    expected: &Output,
    found: &Output,
    again: &Output,
) -> f64 {
    let expected: Vec<f32> = expected.values.iter().map(|value| found.element.round(*value)).collect();
    let allowed = match (element, found.element) {
        (Element::F32, _) => tolerance,
        _ if tolerance == 0.0 => 0.0,
        (_, Element::F32) => tolerance.max(FROM_HALVES),
        (_, half) => rounding(half),
    };
    let (found, again) = (&found.values, &again.values);
    assert_eq!((expected.len(), again.len()), (found.len(), found.len()), "{label}");
    let differ = found.iter().zip(again).position(|(a, b)| a.to_bits() != b.to_bits());
    assert_eq!(differ, None, "{label}: two runs differ in this element of {}", found.len());
    // NaN stays around strided matrices, and nowhere else.
    let missed = found.iter().zip(&expected).position(|(a, b)| a.is_nan() != b.is_nan());
    let at_missed = missed.map(|i| (i, found[i], expected[i]));
    assert_eq!(at_missed, None, "{label}: of {} elements this is NaN on one side only", found.len());
    let norm = |terms: &dyn Fn(usize) -> f64| {
        (0..found.len()).map(|i| terms(i).powi(2)).filter(|x| !x.is_nan()).sum::<f64>().sqrt()
    };
    let apart = |i: usize| f64::from(found[i]) - f64::from(expected[i]);
    // Where large terms cancel, f32 can be no better than its terms, which are of order 1.
    let floor = norm(&|i| f64::from(expected[i])).max(0.1 * (found.len().max(1) as f64).sqrt());
    let off = norm(&apart) / floor;
    let worst = (0..found.len()).max_by(|a, b| apart(*a).abs().total_cmp(&apart(*b).abs())).unwrap_or(0);
    let (is, should) = (found.get(worst), expected.get(worst));
    assert!(
        off <= allowed,
        "{label}: off by {off:.2e}, {allowed:.0e} is allowed; element {worst} of {} is {is:?}, should be {should:?}",
        found.len()
    );
    off
}

thread_local! {
    /// What the case chose, for people to read when it fails.
    static CHOICES: RefCell<String> = const { RefCell::new(String::new()) };
}

/// One case's random choices.
#[derive(Clone, Copy)]
struct Case {
    key: u64,
    /// What activations are made of; the CPU holds the same numbers as f32.
    element: Element,
}

impl Case {
    fn number(self, name: &str) -> u64 {
        fold(self.key, key_of(name))
    }

    fn pick<T: Copy + Debug>(self, name: &str, choices: &[T]) -> T {
        let chosen = choices[(self.number(name) % choices.len() as u64) as usize];
        CHOICES.with_borrow_mut(|all| write!(all, " {name} {chosen:?},").unwrap());
        chosen
    }

    fn yes(self, name: &str) -> bool {
        self.pick(name, &[false, true])
    }

    /// The element as this device holds it.
    fn held(self, device: &dyn Device) -> Element {
        if device.computes(self.element) { self.element } else { Element::F32 }
    }

    /// One side of a shape: on both sides of warps, tiles and blocks.
    fn side(self, name: &str) -> usize {
        self.pick(name, &[1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 65, 127, 128, 129, 255, 257, 300])
    }

    /// As many rows as make sums go through two stages.
    fn rows(self, name: &str) -> usize {
        self.pick(name, &[1, 2, 7, 33, 64, 127, 128, 129, 257, 700, 3001])
    }

    fn normal(self, name: &str, elements: usize) -> Vec<f32> {
        let mut values = vec![0.0; elements];
        fill_normal(&mut values, self.number(name), 0, 1.0);
        values
    }

    /// Whole numbers from `low` on, below `high`.
    fn whole(self, name: &str, elements: usize, low: i32, high: i32) -> Vec<i32> {
        let key = self.number(name);
        let span = (high - low) as u64;
        (0..elements as u64).map(|index| low + (fold(key, index) % span) as i32).collect()
    }
}

fn tensor(device: &dyn Device, values: &[f32]) -> Tensor {
    let mut tensor = Tensor::new(device.arena(), "a test", values.len()).unwrap();
    device.write_floats(&mut tensor, &mut |out| out.copy_from_slice(values)).unwrap();
    tensor
}

fn tensor_of(device: &dyn Device, element: Element, values: &[f32]) -> Tensor {
    let mut tensor = Tensor::of(device.arena(), "a test", element, values.len()).unwrap();
    device.write_floats(&mut tensor, &mut |out| out.copy_from_slice(values)).unwrap();
    tensor
}

/// A tensor of the case's element, or the same numbers as f32.
fn active(device: &dyn Device, case: Case, values: &[f32]) -> Tensor {
    let rounded: Vec<f32> = values.iter().map(|value| case.element.round(*value)).collect();
    tensor_of(device, case.held(device), &rounded)
}

fn integers(device: &dyn Device, values: &[i32]) -> Tensor {
    let mut tensor = Tensor::new(device.arena(), "a test", values.len()).unwrap();
    device.write_integers(&mut tensor, values).unwrap();
    tensor
}

/// A tensor that nothing has written: all NaN.
fn unwritten(device: &dyn Device, elements: usize) -> Tensor {
    tensor(device, &vec![f32::NAN; elements])
}

/// Earlier values where the operation accumulates, else nothing it may read.
fn before(device: &dyn Device, case: Case, accumulate: bool, elements: usize) -> Tensor {
    if accumulate { tensor(device, &case.normal("before", elements)) } else { unwritten(device, elements) }
}

/// The same of the case's element.
fn active_unwritten(device: &dyn Device, case: Case, elements: usize) -> Tensor {
    active(device, case, &vec![f32::NAN; elements])
}

fn active_before(device: &dyn Device, case: Case, accumulate: bool, elements: usize) -> Tensor {
    match accumulate {
        true => active(device, case, &case.normal("before", elements)),
        false => active_unwritten(device, case, elements),
    }
}

fn read(device: &dyn Device, tensor: &Tensor) -> Output {
    let values = device.host_floats(tensor).unwrap().into_owned();
    Output { values, element: tensor.element() }
}

fn scalar(device: &dyn Device, value: f64) -> Tensor {
    let mut scalar = Tensor::new(device.arena(), "a test", SCALAR_ELEMENTS).unwrap();
    device.set_scalar(&mut scalar, value).unwrap();
    scalar
}

/// A matrix of the case's element inside a larger tensor, NaN around it: what reads there spoils its result,
/// what writes there is seen, because the whole tensor is compared.
struct Strided {
    tensor: Tensor,
    rows: usize,
    cols: usize,
    first: usize,
    stride: usize,
}

impl Strided {
    /// `values` of `rows` x `cols`, or NaN; `name` decides the margins.
    fn new(
        device: &dyn Device,
        case: Case,
        name: &str,
        rows: usize,
        cols: usize,
        values: Option<&[f32]>,
    ) -> Strided {
        let margin = |side: &str| case.pick(&format!("{name} {side}"), &[0, 0, 0, 1, 3, 20]);
        let (first, after) = (margin("before"), margin("after"));
        let stride = first + cols + after;
        let mut all = vec![f32::NAN; (rows - 1) * stride + first + cols];
        if let Some(values) = values {
            for (row, values) in values.chunks_exact(cols).enumerate() {
                all[row * stride + first..][..cols].copy_from_slice(values);
            }
        }
        Strided { tensor: active(device, case, &all), rows, cols, first, stride }
    }

    fn mat(&self) -> Mat<'_> {
        Mat::columns(&self.tensor, self.rows, self.first, self.cols, self.stride)
    }

    fn mat_mut(&mut self) -> MatMut<'_> {
        MatMut::columns(&mut self.tensor, self.rows, self.first, self.cols, self.stride)
    }
}
