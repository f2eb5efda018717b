//! Every backward against finite differences of its forward: it knows no formula, only that a gradient says
//! how the outputs move.
//!
//! With random weights c, `f(x) = Σ cᵢ * outᵢ(x)` is one number, and the backward started from c must give
//! its gradient g. Along a direction d, `<g, d>` is held against the slope measured at steps of h and h/2:
//!
//! - Truncation: a central difference is wrong by a term in h², and two of them combined as
//!   `(4 * D(h/2) - D(h)) / 3` by one in h⁴. At h = 1/64 and functions that bend over lengths of about one,
//!   that is below 1e-6.
//! - Rounding: outputs are f32, wrong by about 1e-7 of their size, and the difference divides that by h:
//!   1e-5 of `‖c * out‖`. A smaller step would make this worse faster than it makes truncation better.
//!
//! So slopes are known to about 1e-4 where the gradient is not small against the outputs, and a tolerance
//! of half a percent lets a correct gradient pass always, a factor that is off by two percent never: in the
//! direction of the gradient itself nothing cancels.

mod common;

use common::{
    Matrix, attention_shape, config, device, gelus, integers, lengths, margin, normal, rotary_table, side,
    tensor, unwritten, whole,
};
use proptest::prelude::*;
use shoal_kernels::convolutional::ColumnNorm;
use shoal_kernels::device::SCALAR_ELEMENTS;
use shoal_kernels::{
    AttentionBackward, Averages, Convolutional, Device, DropoutSite, Filters, Linear, LossMode, Mat, MatMut,
    NormKind, Tensor, Window,
};

/// Of each property. All of them together take some five seconds on one core.
const CASES: u32 = 120;

/// A power of two, so that scaling a direction by it rounds nothing.
const STEP: f32 = 1.0 / 64.0;

const TOLERANCE: f64 = 5e-3;

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Random directions, whose elements are about one, and the gradient's own, stretched until its elements
/// are about one or its largest is two (a longer step would leave the straight part of the function).
fn directions(seed: u64, gradient: &[f32]) -> Vec<Vec<f32>> {
    let elements = gradient.len();
    let mut all: Vec<Vec<f32>> =
        (0..3).map(|index| normal(seed, &format!("direction {index}"), elements)).collect();
    let norm = dot(gradient, gradient).sqrt();
    let largest = gradient.iter().map(|g| f64::from(g.abs())).fold(0.0, f64::max);
    if norm > 0.0 {
        let stretch = ((elements as f64).sqrt() / norm).min(2.0 / largest);
        all.push(gradient.iter().map(|g| (f64::from(*g) * stretch) as f32).collect());
    }
    all
}

/// `Σ weights * outputs`, in f64: a sum in f32 would round more than the step changes.
fn weigh<T: Copy + Into<f64>>(weights: &[f32], outputs: &[T]) -> f64 {
    assert_eq!(weights.len(), outputs.len());
    weights.iter().zip(outputs).map(|(weight, out)| f64::from(*weight) * (*out).into()).sum()
}

/// Holds `gradient`, of `Σ weights * forward(x)` at `at`, against measured slopes.
fn assert_gradient<T: Copy + Into<f64>>(
    what: &str,
    seed: u64,
    at: &[f32],
    weights: &[f32],
    gradient: &[f32],
    forward: impl Fn(&[f32]) -> Vec<T>,
) {
    assert_eq!(at.len(), gradient.len(), "{what}");
    let missed = gradient.iter().position(|value| !value.is_finite());
    assert_eq!(missed, None, "{what}: this element of the gradient was not written");
    let squares = forward(at).into_iter().zip(weights).map(|(out, c)| (f64::from(*c) * out.into()).powi(2));
    let outputs = squares.sum::<f64>().sqrt();
    // Rounding moves the measured slope by 1e-5 of the outputs' size. Where the gradient is smaller than a
    // hundredth of that size, it is held to the hundredth.
    let known = dot(gradient, gradient).sqrt().max(0.01 * outputs);
    for (index, direction) in directions(seed, gradient).iter().enumerate() {
        let moved = |step: f32| {
            let x: Vec<f32> = at.iter().zip(direction).map(|(x, d)| x + step * d).collect();
            forward(&x)
        };
        let slope = |step: f32| {
            let (up, down) = (moved(step), moved(-step));
            (weigh(weights, &up) - weigh(weights, &down)) / (2.0 * f64::from(step))
        };
        let measured = (4.0 * slope(STEP / 2.0) - slope(STEP)) / 3.0;
        let claimed = dot(gradient, direction);
        let allowed = TOLERANCE * claimed.abs().max(known);
        let agree = (measured - claimed).abs() <= allowed;
        assert!(agree, "{what}, direction {index}: measured {measured}, claimed {claimed} ± {allowed}");
    }
}

/// All rows normed by these statistics.
fn norm<'a>(
    rows: usize,
    cols: usize,
    statistics: &'a Tensor,
    [weight, bias]: [&'a Tensor; 2],
) -> ColumnNorm<'a> {
    let [mean, variance] = [0, 1].map(|row| Mat::new(statistics, 2, cols).rows(row, 1));
    ColumnNorm { eps: 1e-5, rows: 0..rows, cols, mean, variance, weight, bias }
}

proptest! {
    #![proptest_config(config(CASES))]

    #[test]
    fn convolution(
        (samples, height, width) in (1usize..=2, 3usize..=7, 3usize..=7),
        (channels, outputs) in (1usize..=5, 1usize..=5),
        (kernel, stride, padding) in ((1usize..=3, 1usize..=3), 1usize..=2, (0usize..=1, 0usize..=1)),
        seed: u64,
    ) {
        let device = device(2);
        let window = Window { samples, height, width, channels, kernel, stride, padding };
        let x = normal(seed, "x", window.input_elements());
        let weight = normal(seed, "weight", outputs * window.elements());
        let c = normal(seed, "c", window.rows() * outputs);
        let room = || (!window.is_row()).then(|| unwritten(&device, window.rows() * window.elements()));
        let forward = |x: &[f32], weight: &[f32]| -> Vec<f32> {
            let mut out = unwritten(&device, c.len());
            let weight = tensor(&device, weight);
            let filters = Filters { weight: &weight, outputs };
            let x = tensor(&device, x);
            device.convolution(window, &x, filters, None, None, room().as_mut(), &mut out).unwrap();
            out.floats().to_vec()
        };
        let (dy, weights) = (tensor(&device, &c), tensor(&device, &weight));
        let filters = Filters { weight: &weights, outputs };
        let (mut dx, mut dw) = (unwritten(&device, x.len()), unwritten(&device, weight.len()));
        device.convolution_input_gradient(window, &dy, filters, room().as_mut(), &mut dx).unwrap();
        let sum = (&mut dw, false);
        device.convolution_weight_gradient(window, &tensor(&device, &x), &dy, room().as_mut(), sum).unwrap();
        assert_gradient("convolution: x", seed, &x, &c, dx.floats(), |x| forward(x, &weight));
        assert_gradient("convolution: weight", seed, &weight, &c, dw.floats(), |weight| forward(&x, weight));
    }

    #[test]
    fn average_pool((height, width) in (1usize..=9, 1usize..=9), bins in (1usize..=9, 1usize..=9), seed: u64) {
        let device = device(2);
        let shape = Averages { samples: 2, height, width, channels: 3, bins };
        let (x, c) = (normal(seed, "x", 6 * height * width), normal(seed, "c", 6 * bins.0 * bins.1));
        let mut dx = unwritten(&device, x.len());
        device.average_pool_gradient(shape, &tensor(&device, &c), &mut dx).unwrap();
        assert_gradient("average_pool", seed, &x, &c, dx.floats(), |x| {
            let mut out = unwritten(&device, c.len());
            device.average_pool(shape, &tensor(&device, x), &mut out).unwrap();
            out.floats().to_vec()
        });
    }

    /// The statistics move with the numbers that they are of.
    #[test]
    fn batch_norm((rows, cols) in (8usize..60, 1usize..40), seed: u64) {
        let device = device(2);
        let x = normal(seed, "x", rows * cols);
        let (weight, bias) = (normal(seed, "weight", cols), normal(seed, "bias", cols));
        let c = normal(seed, "c", rows * cols);
        let measured = |x: &Tensor| {
            let mut statistics = unwritten(&device, 2 * cols);
            device.column_statistics(Mat::new(x, rows, cols), &mut statistics).unwrap();
            statistics
        };
        let forward = |x: &[f32], weight: &[f32], bias: &[f32]| -> Vec<f32> {
            let (x, weight, bias) = (tensor(&device, x), tensor(&device, weight), tensor(&device, bias));
            let (statistics, mut out) = (measured(&x), unwritten(&device, rows * cols));
            let norm = norm(rows, cols, &statistics, [&weight, &bias]);
            device.column_norm(&norm, &x, None, None, &mut out).unwrap();
            out.floats().to_vec()
        };
        let (mut gradient, mut dy) = (tensor(&device, &x), tensor(&device, &c));
        let (statistics, mut sums) = (measured(&gradient), unwritten(&device, 2 * cols));
        let parameters = [tensor(&device, &weight), tensor(&device, &bias)];
        let norm = norm(rows, cols, &statistics, parameters.each_ref());
        device.column_norm_sums(&norm, &gradient, None, &dy, (&mut sums, false), None).unwrap();
        device.column_norm_gradient(&norm, &sums, rows, None, &mut dy, false, &mut gradient).unwrap();
        assert_gradient("batch norm: x", seed, &x, &c, gradient.floats(), |x| forward(x, &weight, &bias));
        let (plain, along) = sums.floats().split_at(cols);
        assert_gradient("batch norm: weight", seed, &weight, &c, along, |weight| forward(&x, weight, &bias));
        assert_gradient("batch norm: bias", seed, &bias, &c, plain, |bias| forward(&x, &weight, bias));
    }

    #[test]
    fn linear(
        (rows, inputs, outputs) in (side(), side(), side()),
        (x_margin, out_margin) in (margin(), margin()),
        in_out: bool,
        with_residual: bool,
        threads in 1usize..=3,
        seed: u64,
    ) {
        let device = device(threads);
        let (x, bias) = (normal(seed, "x", rows * inputs), normal(seed, "bias", outputs));
        let weight = normal(seed, "weight", inputs * outputs);
        let residual = normal(seed, "residual", rows * outputs);
        let c = normal(seed, "c", rows * outputs);
        let forward = |x: &[f32], weight: &[f32], bias: &[f32]| {
            let x = Matrix::new(&device, rows, inputs, x_margin, x);
            let (weight, bias) = (tensor(&device, weight), tensor(&device, bias));
            let residual = with_residual.then(|| tensor(&device, &residual));
            let linear = Linear { weight: &weight, inputs, outputs, in_out };
            let mut out = Matrix::unwritten(&device, rows, outputs, out_margin);
            device.linear(x.mat(), linear, Some(&bias), residual.as_ref(), out.mat_mut()).unwrap();
            out.values()
        };

        let dy = Matrix::new(&device, rows, outputs, out_margin, &c);
        let weight_tensor = tensor(&device, &weight);
        let stored = Linear { weight: &weight_tensor, inputs, outputs, in_out };
        let mut dx = Matrix::unwritten(&device, rows, inputs, x_margin);
        device.linear_input_gradient(dy.mat(), stored, dx.mat_mut(), false).unwrap();
        assert_gradient("x", seed, &x, &c, &dx.values(), |x| forward(x, &weight, &bias));

        let x_matrix = Matrix::new(&device, rows, inputs, x_margin, &x);
        let mut gradient = unwritten(&device, weight.len());
        device.linear_weight_gradient(x_matrix.mat(), dy.mat(), &mut gradient, in_out, false).unwrap();
        assert_gradient("weight", seed, &weight, &c, gradient.floats(), |weight| forward(&x, weight, &bias));

        let mut gradient = unwritten(&device, outputs);
        device.bias_gradient(dy.mat(), &mut gradient, false).unwrap();
        assert_gradient("bias", seed, &bias, &c, gradient.floats(), |bias| forward(&x, &weight, bias));
    }

    #[test]
    fn linear_with_gelu(
        (rows, inputs, outputs) in (side(), side(), side()),
        margin in margin(),
        in_out: bool,
        kind in gelus(),
        threads in 1usize..=3,
        seed: u64,
    ) {
        let device = device(threads);
        let before = normal(seed, "before", rows * inputs);
        let weight = tensor(&device, &normal(seed, "weight", inputs * outputs));
        let linear = Linear { weight: &weight, inputs, outputs, in_out };
        let c = normal(seed, "c", rows * outputs);
        let dy = Matrix::new(&device, rows, outputs, margin, &c);
        let mut gradient = unwritten(&device, before.len());
        let at = tensor(&device, &before);
        device.linear_gelu_input_gradient(kind, dy.mat(), linear, &at, &mut gradient).unwrap();
        assert_gradient("before", seed, &before, &c, gradient.floats(), |before| {
            let mut hidden = unwritten(&device, before.len());
            device.gelu(kind, &tensor(&device, before), &mut hidden).unwrap();
            let mut out = unwritten(&device, c.len());
            let to = MatMut::new(&mut out, rows, outputs);
            device.linear(Mat::new(&hidden, rows, inputs), linear, None, None, to).unwrap();
            out.floats().to_vec()
        });
    }

    #[test]
    fn norms(
        kind in prop::sample::select(vec![NormKind::Layer, NormKind::Rms]),
        rows in side(),
        // Of one or two elements a norm leaves little more than signs, which have no slope.
        cols in side().prop_map(|cols| cols.max(3)),
        margin in margin(),
        eps in prop::sample::select(vec![1e-5f32, 0.1]),
        threads in 1usize..=3,
        seed: u64,
    ) {
        let device = device(threads);
        // Elements on both sides of the mean: near a row of equal ones the norm bends too sharply to measure.
        let mut x = normal(seed, "x", rows * cols);
        for row in x.chunks_exact_mut(cols) {
            for (col, x) in row.iter_mut().enumerate() {
                *x = 0.5 * *x + if col % 2 == 0 { 1.0 } else { -2.0 };
            }
        }
        let (weight, bias) = (normal(seed, "weight", cols), normal(seed, "bias", cols));
        let c = normal(seed, "c", rows * cols);
        let run = |x: &[f32], weight: &[f32], bias: &[f32]| {
            let x = Matrix::new(&device, rows, cols, margin, x);
            let (weight, bias) = (tensor(&device, weight), tensor(&device, bias));
            let mut statistics = unwritten(&device, rows * kind.statistics());
            let mut out = unwritten(&device, rows * cols);
            device.norm(kind, eps, x.mat(), &weight, Some(&bias), &mut statistics, &mut out).unwrap();
            (statistics, out.floats().to_vec())
        };

        let (statistics, _) = run(&x, &weight, &bias);
        let x_matrix = Matrix::new(&device, rows, cols, margin, &x);
        let (weight_tensor, mut dy) = (tensor(&device, &weight), tensor(&device, &c));
        let bias_tensor = tensor(&device, &bias);
        let mut dx = unwritten(&device, rows * cols);
        let (mut dw, mut db) = (unwritten(&device, cols), unwritten(&device, cols));
        device
            .norm_backward(
                kind,
                x_matrix.mat(),
                &weight_tensor,
                Some(&bias_tensor),
                &statistics,
                &mut dy,
                (&mut dw, false),
                Some((&mut db, false)),
                (&mut dx, false),
                None,
            )
            .unwrap();
        assert_gradient("x", seed, &x, &c, dx.floats(), |x| run(x, &weight, &bias).1);
        assert_gradient("weight", seed, &weight, &c, dw.floats(), |weight| run(&x, weight, &bias).1);
        assert_gradient("bias", seed, &bias, &c, db.floats(), |bias| run(&x, &weight, bias).1);
    }

    #[test]
    fn gelu(kind in gelus(), elements in 1usize..500, spread in 0.5f32..3.0, threads in 1usize..=3, seed: u64) {
        let device = device(threads);
        let mut x: Vec<f32> = normal(seed, "x", elements).iter().map(|x| x * spread).collect();
        // Far below zero the function is a difference of numbers near each other, whose rounding drowns the slope: one
        // element at least lies elsewhere.
        x[0] = x[0].abs();
        let c = normal(seed, "c", elements);
        let (mut input, mut gradient) = (tensor(&device, &x), tensor(&device, &c));
        device.gelu_backward(kind, &mut input, &mut gradient).unwrap();
        assert_gradient("x", seed, &x, &c, gradient.floats(), |x| {
            let mut out = unwritten(&device, elements);
            device.gelu(kind, &tensor(&device, x), &mut out).unwrap();
            out.floats().to_vec()
        });
    }

    #[test]
    fn swiglu(elements in 1usize..500, spread in 0.5f32..3.0, threads in 1usize..=3, seed: u64) {
        let device = device(threads);
        let gate: Vec<f32> = normal(seed, "gate", elements).iter().map(|gate| gate * spread).collect();
        let (up, c) = (normal(seed, "up", elements), normal(seed, "c", elements));
        let forward = |gate: &[f32], up: &[f32]| {
            let mut out = unwritten(&device, elements);
            device.swiglu(&tensor(&device, gate), &tensor(&device, up), &mut out).unwrap();
            out.floats().to_vec()
        };
        let (mut dgate, mut dup, mut dy) = (tensor(&device, &gate), tensor(&device, &up), tensor(&device, &c));
        device.swiglu_backward(&mut dgate, &mut dup, &mut dy).unwrap();
        assert_gradient("gate", seed, &gate, &c, dgate.floats(), |gate| forward(gate, &up));
        assert_gradient("up", seed, &up, &c, dup.floats(), |up| forward(&gate, up));
    }

    #[test]
    fn rotary(shape in attention_shape(&[2, 6, 16, 34, 64]), threads in 1usize..=3, seed: u64) {
        let device = device(threads);
        let table = tensor(&device, &rotary_table(&shape, shape.sequence));
        let elements = shape.rows() * shape.qkv_width();
        let (qkv, c) = (normal(seed, "qkv", elements), normal(seed, "c", elements));
        let turn = |values: &[f32], inverse: bool| {
            let mut values = tensor(&device, values);
            device.rotary(shape, &table, inverse, &mut values).unwrap();
            values.floats().to_vec()
        };
        assert_gradient("qkv", seed, &qkv, &c, &turn(&c, true), |qkv| turn(qkv, false));
    }

    /// Queries, keys and values each on their own: one wrong factor must not hide behind the others.
    #[test]
    fn attention(
        shape in attention_shape(&[1, 3, 8, 17, 32, 64]),
        rate in prop::option::of(prop::sample::select(vec![0.1f32, 0.5])),
        padded: bool,
        threads in 1usize..=3,
        seed: u64,
    ) {
        let device = device(threads);
        let dropout = rate.map(|rate| DropoutSite { rate, key: seed, step: None, first_sample: seed % 1000 });
        let lengths = padded.then(|| integers(&device, &lengths(seed, &shape)));
        let lengths = lengths.as_ref();
        let qkv = normal(seed, "qkv", shape.rows() * shape.qkv_width());
        let c = normal(seed, "c", shape.rows() * shape.query_width());
        let run = |qkv: &[f32]| {
            let mut out = unwritten(&device, c.len());
            let mut logsumexp = unwritten(&device, shape.rows() * shape.heads);
            device.attention(shape, dropout, lengths, &tensor(&device, qkv), &mut out, &mut logsumexp).unwrap();
            (out, logsumexp)
        };
        let (out, logsumexp) = run(&qkv);
        let (mut delta, mut gradient) = (unwritten(&device, logsumexp.len()), unwritten(&device, qkv.len()));
        let (qkv_tensor, dout) = (tensor(&device, &qkv), tensor(&device, &c));
        device
            .attention_backward(shape, dropout, AttentionBackward { lengths, qkv: &qkv_tensor, out: &out, logsumexp: &logsumexp, out_gradient: &dout, scratch: &mut delta, qkv_gradient: &mut gradient })
            .unwrap();

        let width = shape.qkv_width();
        let (queries, keys) = (shape.query_width(), shape.kv_heads * shape.head_size);
        for (what, columns) in [
            ("queries", 0..queries),
            ("keys", queries..queries + keys),
            ("values", queries + keys..width),
        ] {
            let part = |all: &[f32]| -> Vec<f32> {
                all.chunks_exact(width).flat_map(|row| row[columns.clone()].to_vec()).collect()
            };
            assert_gradient(what, seed, &part(&qkv), &c, &part(gradient.floats()), |part| {
                let mut all = qkv.clone();
                for (row, part) in all.chunks_exact_mut(width).zip(part.chunks_exact(columns.len())) {
                    row[columns.clone()].copy_from_slice(part);
                }
                run(&all).0.floats().to_vec()
            });
        }
    }

    #[test]
    fn embedding(
        (samples, sequence, width) in (1usize..5, side(), side()),
        vocabulary in 1usize..40,
        spare_positions in 0usize..3,
        threads in 1usize..=3,
        seed: u64,
    ) {
        let device = device(threads);
        let rows = samples * sequence;
        let tokens = integers(&device, &whole(seed, "tokens", rows, vocabulary));
        let table = normal(seed, "table", vocabulary * width);
        let positions = normal(seed, "positions", (sequence + spare_positions) * width);
        let c = normal(seed, "c", rows * width);
        let forward = |table: &[f32], positions: &[f32]| {
            let (table, positions) = (tensor(&device, table), tensor(&device, positions));
            let mut out = unwritten(&device, rows * width);
            device.embed(&tokens, sequence, width, &table, Some(&positions), None, &mut out).unwrap();
            out.floats().to_vec()
        };
        let dy = tensor(&device, &c);
        let mut gradient = unwritten(&device, table.len());
        device.embed_gradient(&tokens, width, &dy, &mut gradient, false).unwrap();
        assert_gradient("table", seed, &table, &c, gradient.floats(), |table| forward(table, &positions));
        let mut gradient = unwritten(&device, positions.len());
        device.position_gradient(sequence, width, &dy, &mut gradient, false).unwrap();
        let at_positions = |positions: &[f32]| forward(&table, positions);
        assert_gradient("positions", seed, &positions, &c, gradient.floats(), at_positions);
    }

    /// The backward of dropout is dropout: the same site draws the same mask.
    #[test]
    fn dropout(
        (samples, sequence, cols) in (1usize..4, side(), side()),
        rate in 0.0f32..0.9,
        with_residual: bool,
        threads in 1usize..=3,
        seed: u64,
    ) {
        let device = device(threads);
        let site = DropoutSite { rate, key: seed, step: None, first_sample: seed % 1000 };
        let elements = samples * sequence * cols;
        let residual = with_residual.then(|| tensor(&device, &normal(seed, "residual", elements)));
        let (x, c) = (normal(seed, "x", elements), normal(seed, "c", elements));
        let mut gradient = unwritten(&device, elements);
        device.dropout_copy(site, sequence, cols, &tensor(&device, &c), &mut gradient).unwrap();
        assert_gradient("x", seed, &x, &c, gradient.floats(), |x| {
            let mut out = tensor(&device, x);
            device.dropout(site, sequence, cols, residual.as_ref(), &mut out).unwrap();
            out.floats().to_vec()
        });
    }

    #[test]
    fn cross_entropy(
        rows in side(),
        vocabulary in side().prop_map(|vocabulary| vocabulary.max(2)),
        spread in 0.5f32..3.0,
        ignored_per_ten in prop::sample::select(vec![0i32, 3, 10]),
        scale in prop::sample::select(vec![1.0f32, 0.01, -2.0]),
        threads in 1usize..=3,
        seed: u64,
    ) {
        let device = device(threads);
        let logits: Vec<f32> =
            normal(seed, "logits", rows * vocabulary).iter().map(|logit| logit * spread).collect();
        let mut targets = whole(seed, "targets", rows, vocabulary);
        for (target, lot) in targets.iter_mut().zip(whole(seed, "ignored", rows, 10)) {
            *target = if lot < ignored_per_ten { -1 } else { *target };
        }
        let targets = Tensor::from_integers(device.arena(), "targets", &targets).unwrap();
        let run = |logits: &[f32], mode: LossMode| {
            let mut place = tensor(&device, logits);
            let mut loss = unwritten(&device, SCALAR_ELEMENTS);
            device.set_scalar(&mut loss, 0.0).unwrap();
            let rows = MatMut::new(&mut place, rows, vocabulary);
            device.cross_entropy(&targets, 0, mode, rows, &mut loss).unwrap();
            (place, device.scalar(&loss).unwrap())
        };
        let (gradient, _) = run(&logits, LossMode::Gradient { scale });
        assert_gradient("logits", seed, &logits, &[scale], gradient.floats(), |logits| {
            vec![run(logits, LossMode::LossOnly).1]
        });
    }
}
