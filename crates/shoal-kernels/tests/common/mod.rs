//! What both families of tests share: devices whose memory starts out as NaN, shapes that are multiples of
//! nothing, and values that depend on a seed alone, so that a failure shrinks to a small shape.

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use shoal_kernels::random::{fill_normal, fold, key_of};
use shoal_kernels::{Arena, AttentionShape, CpuDevice, Device, Gelu, Mat, MatMut, Tensor};

/// Enough for the largest case here; the poison makes each byte taken cost a write, not each byte allowed.
const BUDGET_BYTES: u64 = 256 << 20;

/// `cases` cases unless `PROPTEST_CASES` asks for another number. A failing case is kept beside its source
/// and runs first from then on.
pub fn config(cases: u32) -> ProptestConfig {
    let default = ProptestConfig::default();
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { default.cases } else { cases };
    let persistence = FileFailurePersistence::WithSource("regressions");
    ProptestConfig { cases, failure_persistence: Some(Box::new(persistence)), ..default }
}

/// A fresh device, its scratch and all its blocks filled with NaN.
pub fn device(threads: usize) -> CpuDevice {
    CpuDevice::with_arena(Arena::poisoned("cpu:test", BUDGET_BYTES).unwrap(), threads).unwrap()
}

/// Normally distributed numbers, a function of (seed, name, index).
pub fn normal(seed: u64, name: &str, elements: usize) -> Vec<f32> {
    let mut values = vec![0.0; elements];
    fill_normal(&mut values, fold(seed, key_of(name)), 0, 1.0);
    values
}

/// Whole numbers in `0..below`, a function of (seed, name, index).
pub fn whole(seed: u64, name: &str, elements: usize, below: usize) -> Vec<i32> {
    let key = fold(seed, key_of(name));
    (0..elements as u64).map(|index| (fold(key, index) % below as u64) as i32).collect()
}

/// One side of a shape: on both sides of the widths that vector loops, tiles and thread cuts have.
pub fn side() -> impl Strategy<Value = usize> {
    prop_oneof![
        8 => prop::sample::select(vec![1, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65]),
        3 => 1usize..40,
        1 => prop::sample::select(vec![127, 129, 257]),
    ]
}

prop_compose! {
    /// Query heads alone or sharing keys and values, in heads of one of the given sizes. Attention works in
    /// tiles of 64 queries and 256 keys: most sequences end inside the first tiles, some go past them, and
    /// those come alone because the oracles' time grows with the square.
    pub fn attention_shape(head_sizes: &'static [usize])(
        (samples, sequence) in prop_oneof![
            9 => (1usize..=3, prop::sample::select(vec![1usize, 2, 3, 7, 17, 33, 63, 64, 65])),
            1 => (Just(1usize), prop::sample::select(vec![128usize, 255, 257, 321, 513])),
        ],
        kv_heads in 1usize..=3,
        group in 1usize..=3,
        head_size in prop::sample::select(head_sizes),
        sharpness in prop::sample::select(vec![0.5f32, 1.0, 3.0]),
        causal: bool,
    ) -> AttentionShape {
        let (kv_heads, group) = if sequence > 65 { (1, group.min(2)) } else { (kv_heads, group) };
        let scale = sharpness / (head_size as f32).sqrt();
        AttentionShape { samples, sequence, heads: kv_heads * group, kv_heads, head_size, scale, causal }
    }
}

/// How many of each sample's rows count, where not all do.
pub fn lengths(seed: u64, shape: &AttentionShape) -> Vec<i32> {
    whole(seed, "lengths", shape.samples, shape.sequence).iter().map(|length| length + 1).collect()
}

/// Both functions called GELU.
pub fn gelus() -> impl Strategy<Value = Gelu> {
    prop::sample::select(vec![Gelu::Tanh, Gelu::Erf])
}

/// Cosines, then sines, of a row's pairs, for `positions` rows: the table that `rotary` takes.
pub fn rotary_table(shape: &AttentionShape, positions: usize) -> Vec<f32> {
    let half = shape.head_size / 2;
    let angle = |position: usize, pair: usize| position as f64 * 10_000f64.powf(-(pair as f64) / half as f64);
    let row = |position: usize| {
        let angles = (0..half).map(move |pair| angle(position, pair));
        angles.clone().map(f64::cos).chain(angles.map(f64::sin)).map(|value| value as f32)
    };
    (0..positions).flat_map(row).collect()
}

pub fn tensor(device: &impl Device, values: &[f32]) -> Tensor {
    Tensor::from_floats(device.arena(), "a test", values).unwrap()
}

pub fn integers(device: &impl Device, values: &[i32]) -> Tensor {
    Tensor::from_integers(device.arena(), "a test", values).unwrap()
}

/// A tensor that nothing has written: all NaN.
pub fn unwritten(device: &impl Device, elements: usize) -> Tensor {
    Tensor::new(device.arena(), "a test", elements).unwrap()
}

/// What lies around a matrix inside its tensor.
#[derive(Clone, Copy, Debug)]
pub struct Margin {
    pub rows_above: usize,
    pub cols_before: usize,
    pub cols_after: usize,
}

pub const NO_MARGIN: Margin = Margin { rows_above: 0, cols_before: 0, cols_after: 0 };

/// Half of the matrices fill their tensor.
pub fn margin() -> impl Strategy<Value = Margin> {
    let around = (0usize..3, 0usize..20, 0usize..20)
        .prop_map(|(rows_above, cols_before, cols_after)| Margin { rows_above, cols_before, cols_after });
    prop_oneof![Just(NO_MARGIN), around]
}

/// A matrix inside a larger tensor. The tensor ends with the matrix's last element, and everything around
/// the matrix is NaN: an operation that reads there spoils its result, one that writes there is seen.
pub struct Matrix {
    tensor: Tensor,
    rows: usize,
    cols: usize,
    margin: Margin,
}

impl Matrix {
    pub fn unwritten(device: &impl Device, rows: usize, cols: usize, margin: Margin) -> Matrix {
        let stride = margin.cols_before + cols + margin.cols_after;
        let elements = (margin.rows_above + rows - 1) * stride + margin.cols_before + cols;
        Matrix { tensor: unwritten(device, elements), rows, cols, margin }
    }

    pub fn new(device: &impl Device, rows: usize, cols: usize, margin: Margin, values: &[f32]) -> Matrix {
        assert_eq!(values.len(), rows * cols);
        let mut matrix = Matrix::unwritten(device, rows, cols, margin);
        for (row, values) in values.chunks_exact(cols).enumerate() {
            let start = matrix.start(row);
            matrix.tensor.floats_mut()[start..start + cols].copy_from_slice(values);
        }
        matrix
    }

    fn stride(&self) -> usize {
        self.margin.cols_before + self.cols + self.margin.cols_after
    }

    fn start(&self, row: usize) -> usize {
        (self.margin.rows_above + row) * self.stride() + self.margin.cols_before
    }

    pub fn mat(&self) -> Mat<'_> {
        let above = self.margin.rows_above;
        let all =
            Mat::columns(&self.tensor, above + self.rows, self.margin.cols_before, self.cols, self.stride());
        all.rows(above, self.rows)
    }

    pub fn mat_mut(&mut self) -> MatMut<'_> {
        let (above, before, stride) = (self.margin.rows_above, self.margin.cols_before, self.stride());
        let all = MatMut::columns(&mut self.tensor, above + self.rows, before, self.cols, stride);
        all.rows(above, self.rows)
    }

    /// The elements, row after row; asserts that nothing was written around them.
    pub fn values(&self) -> Vec<f32> {
        let floats = self.tensor.floats();
        let mut inside = vec![false; floats.len()];
        let mut values = Vec::with_capacity(self.rows * self.cols);
        for row in 0..self.rows {
            let range = self.start(row)..self.start(row) + self.cols;
            inside[range.clone()].fill(true);
            values.extend_from_slice(&floats[range]);
        }
        let written = floats.iter().zip(inside).position(|(value, inside)| !inside && !value.is_nan());
        assert_eq!(written, None, "an element outside the matrix was written");
        values
    }
}
