//! Products and what follows them against f64 on the host. Without a GPU each test says that it was skipped.

use std::sync::OnceLock;

use super::plan::alignment;
use super::*;
use crate::cuda::CudaDevice;
use crate::random::{fill_normal, fold, key_of};
use crate::tensor::Tensor;

/// The GPU, or a line that says why the test is skipped.
fn open(budget: u64) -> Option<CudaDevice> {
    match CudaDevice::count() {
        Ok(0) => eprintln!("skipped: no GPU on this machine"),
        // A GPU that is there must open.
        Ok(_) => return Some(CudaDevice::new("cuda:0", 0, budget).unwrap_or_else(|e| panic!("{e}"))),
        Err(error) => eprintln!("skipped: {error}"),
    }
    None
}

fn gpu() -> Option<&'static CudaDevice> {
    static GPU: OnceLock<Option<CudaDevice>> = OnceLock::new();
    GPU.get_or_init(|| open(1 << 30)).as_ref()
}

fn run(gpu: &CudaDevice, product: &Product) -> Result<bool> {
    // SAFETY: the tests name only memory they hold.
    unsafe { gpu.blas.product(product, (gpu.workspace.at(0), gpu.workspace.bytes())) }
}

fn encode(element: Element, values: &[f32]) -> Vec<u8> {
    match element {
        Element::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        half => values.iter().flat_map(|value| half.encode(*value).to_le_bytes()).collect(),
    }
}

fn decode(element: Element, bytes: &[u8]) -> Vec<f32> {
    match element {
        Element::F32 => {
            bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
        }
        half => {
            bytes.chunks_exact(2).map(|pair| half.decode(u16::from_le_bytes([pair[0], pair[1]]))).collect()
        }
    }
}

#[test]
fn alignments_are_the_largest_power_of_two_up_to_256() {
    let found = [2, 4, 6, 48, 128, 256, 512 + 256, 1 << 20].map(|at| alignment(Address(at)));
    assert_eq!(found, [2, 4, 2, 16, 128, 256, 256, 256]);
}

/// A matrix inside a larger tensor, NaN around it: what reads there spoils its result, what writes there
/// is seen.
struct Strided {
    tensor: Tensor,
    cols: usize,
    first: usize,
    stride: usize,
    /// The tensor as it starts.
    bytes: Vec<u8>,
    /// The matrix, as its element holds it.
    values: Vec<f64>,
}

impl Strided {
    /// Normal numbers of a `deviation`, or NaN without one; `first` and `after` elements around a row.
    fn new(
        gpu: &CudaDevice,
        element: Element,
        (rows, cols): (usize, usize),
        (first, after): (usize, usize),
        filled: Option<(u64, f32)>,
    ) -> Strided {
        let stride = first + cols + after;
        let mut all = vec![f32::NAN; rows * stride];
        if let Some((key, deviation)) = filled {
            let mut values = vec![0.0; rows * cols];
            fill_normal(&mut values, key, 0, deviation);
            for (row, values) in values.chunks_exact(cols).enumerate() {
                all[row * stride + first..][..cols].copy_from_slice(values);
            }
        }
        let tensor = Tensor::of(&gpu.arena, "a test", element, all.len()).unwrap();
        let bytes = encode(element, &all);
        let mut matrix = Strided { tensor, cols, first, stride, bytes, values: Vec::new() };
        matrix.values = matrix.inside(&matrix.bytes);
        matrix.reset(gpu);
        matrix
    }

    fn element(&self) -> Element {
        self.tensor.element()
    }

    fn at(&self) -> Address {
        self.tensor.at(self.first)
    }

    fn reset(&self, gpu: &CudaDevice) {
        // SAFETY: the tensor is that long.
        unsafe { gpu.context.copy_in(self.tensor.at(0).0, &self.bytes) }.unwrap();
    }

    fn read(&self, gpu: &CudaDevice) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes.len()];
        // SAFETY: the tensor is that long.
        unsafe { gpu.context.copy_out(&mut bytes, self.tensor.at(0).0) }.unwrap();
        bytes
    }

    fn inside(&self, bytes: &[u8]) -> Vec<f64> {
        let all = decode(self.element(), bytes);
        let rows = all.chunks_exact(self.stride).flat_map(|row| &row[self.first..][..self.cols]);
        rows.map(|value| f64::from(*value)).collect()
    }

    /// Whether the margins are what they were.
    fn margins_kept(&self, bytes: &[u8]) -> bool {
        let size = self.element().bytes();
        let (from, to) = (self.first * size, (self.first + self.cols) * size);
        let (now, then) =
            (bytes.chunks_exact(self.stride * size), self.bytes.chunks_exact(self.stride * size));
        now.zip(then).all(|(now, then)| now[..from] == then[..from] && now[to..] == then[to..])
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Addend {
    None,
    InPlace,
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Follow {
    Plain,
    Bias,
    Gelu,
    GeluBias,
    Backward,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    seed: u64,
    aligned: bool,
    input: Element,
    output: Element,
    tf32: bool,
    transposed: [bool; 2],
    addend: Addend,
    follow: Follow,
}

impl Case {
    fn number(self, name: &str) -> u64 {
        fold(fold(key_of("product"), self.seed), key_of(name))
    }

    fn pick(self, name: &str, choices: &[usize]) -> usize {
        choices[(self.number(name) % choices.len() as u64) as usize]
    }

    fn side(self, name: &str) -> usize {
        match self.aligned {
            true => self.pick(name, &[16, 32, 80, 144, 272]),
            false => self.pick(name, &[1, 2, 3, 8, 15, 17, 33, 63, 65, 129, 257]),
        }
    }

    fn depth(self) -> usize {
        match self.aligned {
            true => self.pick("k", &[16, 64, 272, 1040]),
            false => self.pick("k", &[1, 2, 7, 8, 31, 65, 257, 1001]),
        }
    }

    fn margins(self, name: &str) -> (usize, usize) {
        let pick = |side: &str, choices| self.pick(&format!("{name} {side}"), choices);
        match self.aligned {
            true => (pick("first", &[0, 0, 16]), pick("after", &[0, 0, 16, 48])),
            false => (pick("first", &[0, 0, 1, 3]), pick("after", &[0, 0, 1, 5, 20])),
        }
    }

    fn gelu(self) -> bool {
        !matches!(self.follow, Follow::Plain | Follow::Bias)
    }

    /// Whether there must be an algorithm.
    fn required(self) -> bool {
        match self.gelu() {
            // No caller adds to what goes through GELU, or widens it.
            true => self.aligned && self.addend == Addend::None && self.input == self.output,
            // In fp32 there is nothing else to fall back to.
            false => self.aligned || (self.input == Element::F32 && self.follow == Follow::Plain),
        }
    }

    fn tolerance(self) -> f64 {
        match self.output {
            Element::Bf16 => 1e-2,
            Element::F16 => 2e-3,
            Element::F32 if self.tf32 => 2e-3,
            // The GPU's own tanh is good to some 5e-4.
            Element::F32 if self.gelu() => 1e-3,
            Element::F32 => 1e-5,
        }
    }
}

/// The tanh approximation and its slope.
fn gelu(x: f64) -> (f64, f64) {
    let (scale, cube) = ((2.0 / std::f64::consts::PI).sqrt(), 0.044715);
    let tanh = (scale * (x + cube * x * x * x)).tanh();
    let slope = scale * (1.0 + 3.0 * cube * x * x);
    (0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope)
}

/// `a[m, k] * b[k, n]` of matrices as they lie.
fn reference((m, n, k): (usize, usize, usize), a: &Strided, b: &Strided, flipped: [bool; 2]) -> Vec<f64> {
    let mut out = vec![0.0; m * n];
    for (row, out) in out.chunks_exact_mut(n).enumerate() {
        for inner in 0..k {
            let left = a.values[if flipped[0] { inner * m + row } else { row * k + inner }];
            for (col, out) in out.iter_mut().enumerate() {
                *out += left * b.values[if flipped[1] { col * k + inner } else { inner * n + col }];
            }
        }
    }
    out
}

/// Norm of the difference over norm of what is expected; NaN if any is. Where a few numbers cancel,
/// what is left can be no better than its terms, so the norm counts for at least `floor` per number.
fn off(found: &[f64], expected: &[f64], floor: f64) -> f64 {
    assert_eq!(found.len(), expected.len());
    let difference: f64 = found.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum();
    let norm = expected.iter().map(|b| b * b).sum::<f64>().sqrt();
    difference.sqrt() / norm.max(floor * (expected.len() as f64).sqrt())
}

/// How far the case is off, None where there is no algorithm.
fn compare(gpu: &CudaDevice, case: Case) -> std::result::Result<Option<f64>, String> {
    let shape @ (m, n, k) = (case.side("m"), case.side("n"), case.depth());
    let filled = |name: &str, deviation: f32| Some((case.number(name), deviation));
    let stored = |rows, cols, flipped| if flipped { (cols, rows) } else { (rows, cols) };
    let lie = stored(m, k, case.transposed[0]);
    let a = Strided::new(gpu, case.input, lie, case.margins("a"), filled("a", 1.0));
    let lie = stored(k, n, case.transposed[1]);
    let b = Strided::new(gpu, case.input, lie, case.margins("b"), filled("b", (k as f32).powf(-0.5)));
    let earlier = if case.addend == Addend::InPlace { filled("addend", 1.0) } else { None };
    let out = Strided::new(gpu, case.output, (m, n), case.margins("out"), earlier);
    let other = Strided::new(gpu, case.output, (m, n), case.margins("addend"), filled("addend", 1.0));
    let (forward, backward) =
        (matches!(case.follow, Follow::Gelu | Follow::GeluBias), case.follow == Follow::Backward);
    // Odd rows with an even stride too: the library takes those.
    let margins = match case.number("before") % 2 {
        0 if !case.aligned => (0, n.next_multiple_of(8) - n),
        _ => case.margins("before"),
    };
    let before = if backward { filled("before", 1.0) } else { None };
    let before = Strided::new(gpu, case.output, (m, n), margins, before);
    let bias = Strided::new(gpu, case.output, (1, n), (0, 0), filled("bias", 1.0));

    let product = Product {
        shape,
        a: Factor { at: a.at(), element: a.element(), stride: a.stride, transposed: case.transposed[0] },
        b: Factor { at: b.at(), element: b.element(), stride: b.stride, transposed: case.transposed[1] },
        addend: match case.addend {
            Addend::None => None,
            Addend::InPlace => Some((out.at(), out.stride)),
            Addend::Other => Some((other.at(), other.stride)),
        },
        out: Output { at: out.at(), element: out.element(), stride: out.stride },
        epilogue: {
            let (at, before_stride) = (before.at(), before.stride);
            match case.follow {
                Follow::Plain => Epilogue::Plain,
                Follow::Bias => Epilogue::Bias(bias.at()),
                Follow::Gelu => Epilogue::Gelu { bias: None, before: at, before_stride },
                Follow::GeluBias => Epilogue::Gelu { bias: Some(bias.at()), before: at, before_stride },
                Follow::Backward => Epilogue::GeluBackward { before: at, before_stride },
            }
        },
        tf32: case.tf32,
        fastest: false,
    };
    let written = [&out, &before];
    let mut runs = Vec::new();
    for _ in 0..2 {
        written.iter().for_each(|matrix| matrix.reset(gpu));
        if !run(gpu, &product).map_err(|error| format!("{shape:?}: {error}"))? {
            return Ok(None);
        }
        gpu.context.wait().map_err(|error| format!("{shape:?}: {error}"))?;
        runs.push(written.map(|matrix| matrix.read(gpu)));
    }
    if runs[0] != runs[1] {
        return Err(format!("{shape:?}: two runs differ"));
    }
    let [found, found_before] = runs.swap_remove(0);
    if !out.margins_kept(&found) || !before.margins_kept(&found_before) {
        return Err(format!("{shape:?}: written beside the matrix"));
    }

    let mut expected = reference(shape, &a, &b, case.transposed);
    match case.addend {
        Addend::None => {}
        Addend::InPlace => expected.iter_mut().zip(&out.values).for_each(|(sum, value)| *sum += value),
        Addend::Other => expected.iter_mut().zip(&other.values).for_each(|(sum, value)| *sum += value),
    }
    if matches!(case.follow, Follow::Bias | Follow::GeluBias) {
        expected.iter_mut().enumerate().for_each(|(i, sum)| *sum += bias.values[i % n]);
    }
    let mut results = Vec::new();
    if forward {
        results.push(("before", off(&before.inside(&found_before), &expected, 0.1)));
        expected.iter_mut().for_each(|value| *value = gelu(*value).0);
    }
    if backward {
        expected.iter_mut().zip(&before.values).for_each(|(value, x)| *value *= gelu(*x).1);
    }
    results.push(("out", off(&out.inside(&found), &expected, 0.1)));
    let mut worst = 0.0;
    for (what, off) in results {
        if off.is_nan() || off > case.tolerance() {
            return Err(format!("{shape:?}: {what} is off by {off:.2e}, allowed {:.0e}", case.tolerance()));
        }
        worst = off.max(worst);
    }
    Ok(Some(worst))
}

#[test]
fn products_are_those_of_the_host() {
    let Some(gpu) = gpu() else { return };
    use Element::{Bf16, F16, F32};
    use Follow::{Backward, Bias, Gelu, GeluBias, Plain};
    let kinds = [
        (F32, F32, false),
        (F32, F32, true),
        (Bf16, Bf16, false),
        (Bf16, F32, false),
        (F16, F16, false),
        (F16, F32, false),
    ];
    let (mut seed, mut failures) = (0, Vec::new());
    for (input, output, tf32) in kinds {
        let (mut done, mut refused, mut worst) = (0, Vec::new(), 0.0f64);
        for follow in [Plain, Bias, Gelu, GeluBias, Backward] {
            for addend in [Addend::None, Addend::InPlace, Addend::Other] {
                for choice in 0..8 {
                    let (aligned, transposed) = (choice & 4 == 0, [choice & 1 == 1, choice & 2 == 2]);
                    seed += 1;
                    let case = Case { seed, aligned, input, output, tf32, transposed, addend, follow };
                    match compare(gpu, case) {
                        Ok(Some(off)) => {
                            done += 1;
                            worst = worst.max(off);
                        }
                        Ok(None) if case.required() => failures.push(format!("{case:?}: no algorithm")),
                        Ok(None) => refused.push((follow, addend, aligned)),
                        Err(said) => failures.push(format!("{case:?}: {said}")),
                    }
                }
            }
        }
        let kind = if tf32 { "TF32".into() } else { format!("{input:?} to {output:?}") };
        eprintln!("{kind}: {done} products off by at most {worst:.1e}; {} refused", refused.len());
        refused.dedup();
        refused.iter().for_each(|what| eprintln!("  refused {what:?}"));
    }
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn a_product_of_no_rows_is_nothing() {
    let Some(gpu) = gpu() else { return };
    let factor = Factor { at: Address(0), element: Element::F32, stride: 8, transposed: false };
    let product = Product {
        shape: (0, 8, 8),
        a: factor,
        b: factor,
        addend: None,
        out: Output { at: Address(0), element: Element::F32, stride: 8 },
        epilogue: Epilogue::Plain,
        tf32: false,
        fastest: false,
    };
    assert!(run(gpu, &product).unwrap());
}
