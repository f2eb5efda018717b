//! Every operation on the GPU against the CPU's, which is held against f64 elsewhere: random shapes that are
//! multiples of nothing, strided matrices with NaN around them, outputs that start as NaN. Each operation
//! runs twice and must give the same bits. Without a GPU each test says that it was skipped.

mod attention;
mod embedding;
mod linear;
mod memory;
mod norm;
mod optimizer;
mod pointwise;

use std::sync::OnceLock;

use shoal_kernels::device::SCALAR_ELEMENTS;
use shoal_kernels::random::{fill_normal, fold, key_of};
use shoal_kernels::{CpuDevice, CudaDevice, Device, Mat, MatMut, Tensor};

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

/// Holds the GPU's results against the CPU's, case by case; `run` is told the case's random numbers.
fn compare(what: &str, run: impl Fn(&dyn Device, Case) -> Vec<Vec<f32>>) {
    compare_within(what, TOLERANCE, run);
}

/// The same with a tolerance of its own; 0 asks for the same bits.
fn compare_within(what: &str, tolerance: f64, run: impl Fn(&dyn Device, Case) -> Vec<Vec<f32>>) {
    let Some(gpu) = gpu() else { return };
    let cpu = CpuDevice::new("cpu", 2, BUDGET_BYTES).unwrap();
    let mut worst = 0.0f64;
    for seed in 0..cases() {
        let case = Case(fold(key_of(what), seed));
        let (expected, found, again) = (run(&cpu, case), run(gpu, case), run(gpu, case));
        assert_eq!((expected.len(), again.len()), (found.len(), found.len()), "{what}, case {seed}");
        for (part, ((expected, found), again)) in expected.iter().zip(&found).zip(&again).enumerate() {
            let label = format!("{what}, case {seed}, result {part}");
            assert_eq!(expected.len(), found.len(), "{label}");
            let same = found.iter().zip(again).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{label}: two runs differ");
            // NaN stays around strided matrices, and nowhere else.
            let missed = found.iter().zip(expected).position(|(a, b)| a.is_nan() != b.is_nan());
            assert_eq!(missed, None, "{label}: this element of {} is NaN on one side only", found.len());
            let norm = |terms: &dyn Fn(usize) -> f64| {
                (0..found.len()).map(|i| terms(i).powi(2)).filter(|x| !x.is_nan()).sum::<f64>().sqrt()
            };
            let error = norm(&|i| f64::from(found[i]) - f64::from(expected[i]));
            // Where large terms cancel, f32 can be no better than its terms, which are of order 1.
            let floor = norm(&|i| f64::from(expected[i])).max(0.1 * (found.len() as f64).sqrt());
            worst = worst.max(error / floor);
            assert!(error <= tolerance * floor, "{label}: off by {:.2e}", error / floor);
        }
    }
    eprintln!("{what}: {} cases, off by at most {worst:.1e}", cases());
}

/// One case's random choices.
#[derive(Clone, Copy)]
struct Case(u64);

impl Case {
    fn number(self, name: &str) -> u64 {
        fold(self.0, key_of(name))
    }

    fn pick<T: Copy>(self, name: &str, choices: &[T]) -> T {
        choices[(self.number(name) % choices.len() as u64) as usize]
    }

    fn yes(self, name: &str) -> bool {
        self.number(name) & 1 == 1
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

fn read(device: &dyn Device, tensor: &Tensor) -> Vec<f32> {
    device.host_floats(tensor).unwrap().into_owned()
}

fn scalar(device: &dyn Device, value: f64) -> Tensor {
    let mut scalar = Tensor::new(device.arena(), "a test", SCALAR_ELEMENTS).unwrap();
    device.set_scalar(&mut scalar, value).unwrap();
    scalar
}

/// A matrix inside a larger tensor, NaN around it: what reads there spoils its result, what writes there is
/// seen, because the whole tensor is compared.
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
        Strided { tensor: tensor(device, &all), rows, cols, first, stride }
    }

    fn mat(&self) -> Mat<'_> {
        Mat::columns(&self.tensor, self.rows, self.first, self.cols, self.stride)
    }

    fn mat_mut(&mut self) -> MatMut<'_> {
        MatMut::columns(&mut self.tensor, self.rows, self.first, self.cols, self.stride)
    }
}
