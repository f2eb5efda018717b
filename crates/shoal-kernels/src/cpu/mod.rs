//! The device operations on the cores of this machine. Work is cut into pieces that do not depend on
//! timing (rows, columns or heads), so the same operation gives the same bits every time.
//!
//! Vector code is written as plain loops that [`vector`] compiles once per instruction set and picks at
//! start; the shapes of the loops (fixed-width accumulators, branch-free functions) are chosen so that the
//! compiler turns them into full-width instructions.

mod activation;
mod attention;
mod columns;
mod convolution;
mod correlate;
mod dropout;
mod embedding;
mod images;
mod linear;
mod loss;
mod math;
mod matrix;
mod norm;
mod operations;
mod optimizer;
mod pixels;
mod reach;
mod rotary;
mod round;
mod tile;
mod vector;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use operations::read_scalar;
use rayon::ThreadPool;
use vector::InstructionSet;

use crate::memory::{Arena, MemoryError};
use crate::tensor::Tensor;

/// Elements of one thread's score tiles: the backward has two.
const SCORES: usize = 2 * attention::QUERIES * attention::KEYS;

/// The cores of this machine, or some of them, as one device.
pub struct CpuDevice {
    name: String,
    arena: Arc<Arena>,
    pool: ThreadPool,
    arch: InstructionSet,
    /// Score tiles, one set per thread: taken once, so that no operation's footprint depends on the threads.
    scratch: Vec<Mutex<Tensor>>,
}

impl CpuDevice {
    /// Rows past which matrix products gain nothing more.
    pub const ROWS_ENOUGH: usize = 4096;

    /// A device of `threads` threads with a memory budget in bytes.
    pub fn new(name: &str, threads: usize, budget: u64) -> Result<CpuDevice, MemoryError> {
        CpuDevice::with_arena(Arena::new(name, budget)?, threads)
    }

    /// A device on an arena of the caller's.
    pub fn with_arena(arena: Arc<Arena>, threads: usize) -> Result<CpuDevice, MemoryError> {
        let name = arena.device().to_owned();
        let label = name.clone();
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(move |index| format!("{label} {index}"))
            .build()
            .expect("the system can start the device's threads");
        let scratch = (0..threads.max(1))
            .map(|_| Tensor::new(&arena, "the score tiles of attention", SCORES).map(Mutex::new))
            .collect::<Result<_, _>>()?;
        Ok(CpuDevice { name, arena, pool, arch: InstructionSet::detect(), scratch })
    }

    /// Bytes a device of `threads` threads takes for itself.
    pub fn workspace_bytes(threads: usize) -> u64 {
        (threads.max(1) * SCORES * 4) as u64
    }

    /// The running thread's score tiles.
    fn scratch(&self) -> MutexGuard<'_, Tensor> {
        let thread = self.pool.current_thread_index().expect("operations run inside the device's pool");
        self.scratch[thread].lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Whether whoever asks for a copy makes it as fast by itself. A pool's thread that has done its work gives its core away many times before
    /// it sleeps, and whoever computes on that core is interrupted each time.
    fn has_one_thread(&self) -> bool {
        self.threads() == 1
    }

    /// The instruction set in use, for people.
    pub fn instruction_set() -> &'static str {
        InstructionSet::detect().name()
    }
}

/// Cuts `0..total` into at most `parts` ranges whose lengths are multiples of `unit` (but for the last).
fn cut(total: usize, parts: usize, unit: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let step = total.div_ceil(parts.max(1)).next_multiple_of(unit).max(unit);
    (0..total).step_by(step).map(move |start| start..(start + step).min(total))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convolutional::{Convolutional, Filters, Window};
    use crate::device::{
        AdamW, AttentionShape, Device, Gelu, Guard, LossMode, Mat, MatMut, NormKind, Updated,
    };
    use crate::random::fill_normal;

    /// The results of the vectorised operations, one after the other.
    fn results(arch: InstructionSet) -> Vec<f32> {
        let arena = Arena::poisoned("cpu", 64 << 20).unwrap();
        let mut device = CpuDevice::with_arena(arena.clone(), 2).unwrap();
        device.arch = arch;
        let random = |key: u64, elements: usize| {
            let mut tensor = Tensor::new(&arena, "test", elements).unwrap();
            fill_normal(tensor.floats_mut(), key, 0, 1.0);
            tensor
        };
        let (rows, cols) = (37, 83);
        let x = random(1, rows * cols);
        let (weight, bias) = (random(2, cols), random(3, cols));
        let mut out = random(4, rows * cols);
        let mut statistics = random(5, 2 * rows);
        let mat = Mat::new(&x, rows, cols);
        let mut all = Vec::new();
        device.norm(NormKind::Layer, 1e-5, mat, &weight, Some(&bias), &mut statistics, &mut out).unwrap();
        all.extend_from_slice(out.floats());
        device.gelu(Gelu::Tanh, &x, &mut out).unwrap();
        all.extend_from_slice(out.floats());
        let shape = AttentionShape {
            samples: 2,
            sequence: 70,
            heads: 4,
            kv_heads: 2,
            head_size: 6,
            scale: 0.4,
            causal: true,
        };
        let qkv = random(6, shape.rows() * shape.qkv_width());
        let mut attended = random(7, shape.rows() * shape.query_width());
        let mut sums = random(8, shape.rows() * shape.heads);
        device.attention(shape, None, None, &qkv, &mut attended, &mut sums).unwrap();
        all.extend_from_slice(attended.floats());
        let targets: Vec<i32> = (0..rows as i32).collect();
        let targets = Tensor::from_integers(&arena, "test", &targets).unwrap();
        let mut loss = Tensor::zeros(&arena, "test", crate::device::SCALAR_ELEMENTS).unwrap();
        let logits = MatMut::new(&mut out, rows, cols);
        device.cross_entropy(&targets, 0, LossMode::Gradient { scale: 1.0 }, logits, &mut loss).unwrap();
        all.extend_from_slice(out.floats());
        let settings = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.95, eps: 1e-8, update: 3 };
        let mut moments = [random(9, cols), Tensor::zeros(&arena, "test", cols).unwrap()];
        let mut parameter = random(10, cols);
        let guard = Guard { norm_squared: &loss, loss: &loss, scale: 1.0, clip_norm: None };
        let updated = Updated {
            gradient: &weight,
            state: &mut moments,
            parameter: &mut parameter,
            copy: None,
            weight_decay: 0.1,
        };
        device.adamw(&settings, guard, &mut [updated]).unwrap();
        all.extend_from_slice(parameter.floats());
        all.extend(convolved(&device, random));
        all
    }

    /// A convolution with its gradients, at sizes that leave parts of vectors and of tiles.
    fn convolved(device: &CpuDevice, random: impl Fn(u64, usize) -> Tensor) -> Vec<f32> {
        let (kernel, stride, padding) = ((3, 2), 1, (1, 0));
        let window = Window { samples: 3, height: 7, width: 6, channels: 21, kernel, stride, padding };
        let (rows, elements, outputs) = (window.rows(), window.elements(), 35);
        let (x, dy) = (random(11, window.input_elements()), random(12, rows * outputs));
        let (weight, bias) = (random(13, outputs * elements), random(14, outputs));
        let (mut out, mut dx) = (random(15, dy.len()), random(16, x.len()));
        let mut gradient = random(17, weight.len());
        let filters = Filters { weight: &weight, outputs };
        device.convolution(window, &x, filters, Some(&bias), None, None, &mut out).unwrap();
        device.convolution_input_gradient(window, &dy, filters, None, &mut dx).unwrap();
        device.convolution_weight_gradient(window, &x, &dy, None, (&mut gradient, true)).unwrap();
        [out.floats(), dx.floats(), gradient.floats()].concat()
    }

    #[test]
    fn every_instruction_set_gives_the_same_to_rounding() {
        let reference = results(InstructionSet::Plain);
        assert!(reference.iter().all(|value| value.is_finite()));
        let best = InstructionSet::detect();
        let mut tried = vec![best];
        #[cfg(target_arch = "x86_64")]
        if best == InstructionSet::Avx512 {
            tried.push(InstructionSet::Avx2);
        }
        for arch in tried {
            for (place, (found, expected)) in results(arch).iter().zip(&reference).enumerate() {
                let close = (found - expected).abs() <= 2e-5 * expected.abs().max(1.0);
                assert!(close, "{}: element {place} is {found}, plainly {expected}", arch.name());
            }
        }
    }
}
