//! Activations, rotary positions, dropout, conversions and scalars.

use shoal_kernels::{AttentionShape, Device, DropoutSite, Element, Gelu, Tensor};

use crate::{
    Case, TOLERANCE, active, active_unwritten, compare_elements, gpu, read, scalar, tensor, tensor_of,
};

fn count(case: Case) -> usize {
    case.side("count") * case.rows("rows")
}

#[test]
fn scalars_keep_every_bit() {
    let Some(gpu) = gpu() else { return };
    for value in [0.0, -1.5, std::f64::consts::PI, 1e300, f64::INFINITY] {
        assert_eq!(gpu.scalar(&scalar(gpu, value)).unwrap().to_bits(), value.to_bits());
    }
    // More than are read at a time.
    let values: Vec<f64> = (0..150).map(|index| 1.0 / f64::from(1 + index)).collect();
    let scalars: Vec<Tensor> = values.iter().map(|value| scalar(gpu, *value)).collect();
    assert_eq!(gpu.scalars(&scalars.iter().collect::<Vec<_>>()).unwrap(), values);
    assert_eq!(gpu.scalars(&[]).unwrap(), Vec::<f64>::new());
}

/// Numbers go in and out rounded to the element, zero reaches every element, and a conversion rounds like the
/// host and clears what is left.
#[test]
fn elements_hold_what_the_host_says() {
    let Some(gpu) = gpu() else { return };
    for element in [Element::F32, Element::Bf16, Element::F16] {
        for elements in [1, 2, 7, 8, 9, 1001, 4096, 100_003] {
            let mut values: Vec<f32> = (0..elements).map(|i| (i as f32 - 300.0) * 1.2345e-3).collect();
            for (place, special) in
                [f32::NAN, f32::INFINITY, 1e30, -1e-30, 65519.9, 65520.0, 5.96e-8].into_iter().enumerate()
            {
                if let Some(value) = values.get_mut(7 * place) {
                    *value = special;
                }
            }
            let rounded: Vec<f32> = values.iter().map(|value| element.round(*value)).collect();
            let same = |found: &[f32], label: &str| {
                let differ = found
                    .iter()
                    .zip(&rounded)
                    .position(|(a, b)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan()));
                let at = differ.map(|i| (i, values[i], found[i], rounded[i]));
                assert_eq!(at, None, "{label}, {element:?}: element, value, found, expected");
            };
            let mut written = tensor_of(gpu, element, &values);
            same(&read(gpu, &written).values, "written and read");
            let longer = elements + elements % 13;
            let mut converted = tensor_of(gpu, element, &vec![f32::NAN; longer]);
            gpu.convert(&tensor(gpu, &values), &mut converted).unwrap();
            let found = read(gpu, &converted).values;
            same(&found[..elements], "converted");
            assert!(found[elements..].iter().all(|value| value.to_bits() == 0), "{element:?}, the rest");
            gpu.zero(&mut written).unwrap();
            assert!(read(gpu, &written).values.iter().all(|value| value.to_bits() == 0), "{element:?}, zero");
        }
    }
}

#[test]
fn gelu() {
    compare_elements("gelu", TOLERANCE, |device, case| {
        let kind = case.pick("kind", &[Gelu::Tanh, Gelu::Erf]);
        let values: Vec<f32> = case.normal("x", count(case)).iter().map(|x| 3.0 * x).collect();
        let mut x = active(device, case, &values);
        let mut out = active_unwritten(device, case, values.len());
        device.gelu(kind, &x, &mut out).unwrap();
        let mut gradient = active(device, case, &case.normal("gradient", values.len()));
        device.gelu_backward(kind, &mut x, &mut gradient).unwrap();
        vec![read(device, &out), read(device, &x), read(device, &gradient)]
    });
}

#[test]
fn swiglu() {
    compare_elements("swiglu", TOLERANCE, |device, case| {
        let elements = count(case);
        let mut gate = active(device, case, &case.normal("gate", elements));
        let mut up = active(device, case, &case.normal("up", elements));
        let mut out = active_unwritten(device, case, elements);
        device.swiglu(&gate, &up, &mut out).unwrap();
        let mut gradient = active(device, case, &case.normal("gradient", elements));
        device.swiglu_backward(&mut gate, &mut up, &mut gradient).unwrap();
        vec![read(device, &out), read(device, &gate), read(device, &up), read(device, &gradient)]
    });
}

#[test]
fn rotary() {
    compare_elements("rotary", TOLERANCE, |device, case| {
        let kv_heads = case.pick("kv", &[1, 2, 3]);
        let shape = AttentionShape {
            samples: case.pick("samples", &[1, 2, 3]),
            sequence: case.side("sequence"),
            heads: kv_heads * case.pick("group", &[1, 2, 4]),
            kv_heads,
            head_size: case.pick("size", &[2, 6, 8, 16, 34, 64, 128]),
            scale: 1.0,
            causal: true,
        };
        let table = tensor(device, &case.normal("table", (shape.sequence + 3) * shape.head_size));
        let mut qkv = active(device, case, &case.normal("qkv", shape.rows() * shape.qkv_width()));
        device.rotary(shape, &table, case.yes("inverse"), &mut qkv).unwrap();
        vec![read(device, &qkv)]
    });
}

/// One product per element, and the same mask: the bits are known.
#[test]
fn dropout_has_the_same_bits() {
    compare_elements("dropout", 0.0, |device, case| {
        let (samples, sequence, cols) = (case.pick("samples", &[1, 3]), case.side("seq"), case.side("cols"));
        let elements = samples * sequence * cols;
        let step = scalar(device, (case.number("step") % 100_000) as f64);
        let site = DropoutSite {
            rate: case.pick("rate", &[0.0, 0.1, 0.5, 0.9]),
            key: case.number("key"),
            step: case.yes("in a step").then_some(&step),
            first_sample: case.number("first") % 1000,
        };
        let x = active(device, case, &case.normal("x", elements));
        let mut copied = active_unwritten(device, case, elements);
        device.dropout_copy(site, sequence, cols, &x, &mut copied).unwrap();
        let mut alone = active(device, case, &case.normal("x", elements));
        device.dropout(site, sequence, cols, None, &mut alone).unwrap();
        vec![read(device, &copied), read(device, &alone)]
    });
}

#[test]
fn dropout_with_residual() {
    compare_elements("dropout with residual", TOLERANCE, |device, case| {
        let (sequence, cols) = (case.side("seq"), case.side("cols"));
        let elements = 2 * sequence * cols;
        let site = DropoutSite { rate: 0.3, key: case.number("key"), step: None, first_sample: 5 };
        let residual = active(device, case, &case.normal("residual", elements));
        let mut out = active(device, case, &case.normal("x", elements));
        device.dropout(site, sequence, cols, Some(&residual), &mut out).unwrap();
        vec![read(device, &out)]
    });
}
