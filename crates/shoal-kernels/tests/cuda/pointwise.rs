//! Activations, rotary positions, dropout and scalars.

use shoal_kernels::{AttentionShape, Device, DropoutSite};

use crate::{Case, compare, compare_within, gpu, read, scalar, tensor, unwritten};

fn count(case: Case) -> usize {
    case.side("count") * case.rows("rows")
}

#[test]
fn scalars_keep_every_bit() {
    let Some(gpu) = gpu() else { return };
    for value in [0.0, -1.5, std::f64::consts::PI, 1e300, f64::INFINITY] {
        assert_eq!(gpu.scalar(&scalar(gpu, value)).unwrap().to_bits(), value.to_bits());
    }
    let mut values = tensor(gpu, &[1.0; 1001]);
    gpu.zero(&mut values).unwrap();
    assert!(read(gpu, &values).iter().all(|value| value.to_bits() == 0));
}

#[test]
fn gelu() {
    compare("gelu", |device, case| {
        let values: Vec<f32> = case.normal("x", count(case)).iter().map(|x| 3.0 * x).collect();
        let mut x = tensor(device, &values);
        let mut out = unwritten(device, values.len());
        device.gelu(&x, &mut out).unwrap();
        let mut gradient = tensor(device, &case.normal("gradient", values.len()));
        device.gelu_backward(&mut x, &mut gradient).unwrap();
        vec![read(device, &out), read(device, &x), read(device, &gradient)]
    });
}

#[test]
fn swiglu() {
    compare("swiglu", |device, case| {
        let elements = count(case);
        let mut gate = tensor(device, &case.normal("gate", elements));
        let mut up = tensor(device, &case.normal("up", elements));
        let mut out = unwritten(device, elements);
        device.swiglu(&gate, &up, &mut out).unwrap();
        let mut gradient = tensor(device, &case.normal("gradient", elements));
        device.swiglu_backward(&mut gate, &mut up, &mut gradient).unwrap();
        vec![read(device, &out), read(device, &gate), read(device, &up), read(device, &gradient)]
    });
}

#[test]
fn rotary() {
    compare("rotary", |device, case| {
        let kv_heads = case.pick("kv", &[1, 2, 3]);
        let shape = AttentionShape {
            samples: case.pick("samples", &[1, 2, 3]),
            sequence: case.side("sequence"),
            heads: kv_heads * case.pick("group", &[1, 2, 4]),
            kv_heads,
            head_size: case.pick("size", &[2, 6, 34, 64, 128]),
            scale: 1.0,
        };
        let table = tensor(device, &case.normal("table", (shape.sequence + 3) * shape.head_size));
        let mut qkv = tensor(device, &case.normal("qkv", shape.rows() * shape.qkv_width()));
        device.rotary(shape, &table, case.yes("inverse"), &mut qkv).unwrap();
        vec![read(device, &qkv)]
    });
}

/// One product per element, and the same mask: the bits are known.
#[test]
fn dropout_has_the_same_bits() {
    compare_within("dropout", 0.0, |device, case| {
        let (samples, sequence, cols) = (case.pick("samples", &[1, 3]), case.side("seq"), case.side("cols"));
        let elements = samples * sequence * cols;
        let site = DropoutSite {
            rate: case.pick("rate", &[0.0, 0.1, 0.5, 0.9]),
            key: case.number("key"),
            first_sample: case.number("first") % 1000,
        };
        let x = tensor(device, &case.normal("x", elements));
        let mut copied = unwritten(device, elements);
        device.dropout_copy(site, sequence, cols, &x, &mut copied).unwrap();
        let mut alone = tensor(device, &case.normal("x", elements));
        device.dropout(site, sequence, cols, None, &mut alone).unwrap();
        vec![read(device, &copied), read(device, &alone)]
    });
}

#[test]
fn dropout_with_residual() {
    compare("dropout with residual", |device, case| {
        let (sequence, cols) = (case.side("seq"), case.side("cols"));
        let elements = 2 * sequence * cols;
        let site = DropoutSite { rate: 0.3, key: case.number("key"), first_sample: 5 };
        let residual = tensor(device, &case.normal("residual", elements));
        let mut out = tensor(device, &case.normal("x", elements));
        device.dropout(site, sequence, cols, Some(&residual), &mut out).unwrap();
        vec![read(device, &out)]
    });
}
