//! The values a new model starts from: a function of (seed, tensor name, element), so that every plan and
//! every holder of a slice draws the same ones.

use shoal_kernels::random::{fill_normal, fold, key_of};
use shoal_model::{Chain, Init, TensorSpec};

/// Numbers that are worth a thread of their own.
const PART_MIN: usize = 1 << 18;

/// Writes elements `first..` of a tensor's initial values.
pub fn fill(spec: &TensorSpec, seed: u64, first: u64, out: &mut [f32]) {
    match spec.init {
        Init::Zeros => out.fill(0.0),
        Init::Ones => out.fill(1.0),
        Init::Normal(deviation) => {
            let key = fold(seed, key_of(&spec.name));
            // Each number is a function of its place, so any threads may draw any part.
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            let part = out.len().div_ceil(threads).max(PART_MIN);
            std::thread::scope(|scope| {
                for (index, out) in out.chunks_mut(part).enumerate() {
                    let first = first + (index * part) as u64;
                    scope.spawn(move || fill_normal(out, key, first, deviation));
                }
            });
        }
    }
}

/// Cosines then sines of every position's rotary angles; `None` where positions are learned.
pub fn rotary_table(chain: &Chain, sequence: usize) -> Option<Vec<f32>> {
    let frequencies = &chain.rotary_frequencies;
    if frequencies.is_empty() {
        return None;
    }
    let row = |position: usize| {
        // transformers forms the angle in f32; doing the same keeps long sequences in step with it.
        let angle = move |frequency: &f64| f64::from(position as f32 * *frequency as f32);
        let cosines = frequencies.iter().map(move |f| angle(f).cos() as f32);
        cosines.chain(frequencies.iter().map(move |f| angle(f).sin() as f32))
    };
    Some((0..sequence).flat_map(row).collect())
}
