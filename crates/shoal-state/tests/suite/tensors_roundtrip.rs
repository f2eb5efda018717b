//! Tensors through files and back: what is written is read bit for bit, by us and by the reference
//! implementation; what the reference writes in other types is read with the exact value.

use std::collections::BTreeMap;
use std::fs;

use proptest::prelude::*;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize};
use shoal_state::tensors::{TensorData, TensorFile, TensorWriter};
use tempfile::TempDir;

/// The value of an IEEE half, by its definition.
fn half_value(bits: u16) -> f32 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    match exponent {
        0 => sign * fraction * (-24f32).exp2(),
        31 if fraction == 0.0 => sign * f32::INFINITY,
        31 => f32::NAN,
        _ => sign * (1024.0 + fraction) * ((exponent - 25) as f32).exp2(),
    }
}

/// A file the reference writes with one tensor of these bytes, read by us.
fn read_back(dtype: Dtype, bytes: &[u8], count: usize) -> Vec<f32> {
    let dir = TempDir::new().expect("a temporary folder");
    let path = dir.path().join("x.safetensors");
    let view = TensorView::new(dtype, vec![count], bytes).expect("a sound tensor");
    fs::write(&path, serialize([("x", &view)], None).expect("serialized")).expect("written");
    let mut out = vec![0.0; count];
    TensorFile::open(&path).expect("sound").read_f32("x", &mut out).expect("read");
    out
}

fn same(left: f32, right: f32) -> bool {
    left.to_bits() == right.to_bits() || left.is_nan() && right.is_nan()
}

#[test]
fn every_half_has_its_value() {
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    let bytes: Vec<u8> = bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    let halves = read_back(Dtype::F16, &bytes, bits.len());
    assert!(bits.iter().zip(halves).all(|(bits, value)| same(value, half_value(*bits))));
    let brains = read_back(Dtype::BF16, &bytes, bits.len());
    assert!(bits.iter().zip(brains).all(|(bits, value)| value.to_bits() == u32::from(*bits) << 16));
}

#[test]
fn doubles_are_rounded() {
    let doubles = [0.1, -1e300, 1e-46, f64::from(f32::MAX)];
    let bytes: Vec<u8> = doubles.iter().flat_map(|value| value.to_le_bytes()).collect();
    assert_eq!(read_back(Dtype::F64, &bytes, 4), [0.1, f32::NEG_INFINITY, 0.0, f32::MAX]);
}

#[test]
fn tensors_longer_than_a_chunk_are_whole() {
    // More than two chunks, and not a multiple of one, in every type's width.
    let count = (5 << 18) + 3;
    let values: Vec<f32> = (0..count).map(|index| index as f32).collect();
    let dir = TempDir::new().expect("a temporary folder");
    let path = dir.path().join("x.safetensors");
    let data = TensorData { name: "x", shape: &[count], data: &values };
    let writer = TensorWriter::new(&path, &BTreeMap::new(), [data]).expect("sound");
    let written = writer.write(&path).expect("written");
    let bytes = fs::read(&path).expect("read");
    assert_eq!(written, bytes.len() as u64);
    let mut out = vec![0.0; count];
    TensorFile::open(&path).expect("sound").read_f32("x", &mut out).expect("read");
    assert!(out == values);

    let wide: Vec<u8> = values.iter().flat_map(|value| f64::from(*value).to_le_bytes()).collect();
    assert!(read_back(Dtype::F64, &wide, count) == values);
    let narrow: Vec<u8> =
        values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect();
    let cut = values.iter().map(|value| f32::from_bits(value.to_bits() & 0xffff_0000));
    assert!(read_back(Dtype::BF16, &narrow, count).into_iter().eq(cut));
}

#[test]
fn what_cannot_be_written_is_refused_before_a_file_exists() {
    let dir = TempDir::new().expect("a temporary folder");
    let path = dir.path().join("x.safetensors");
    let x = TensorData { name: "x", shape: &[2], data: &[1.0, 2.0] };
    let refused = |tensors: &[TensorData<'_>]| {
        TensorWriter::new(&path, &BTreeMap::new(), tensors.iter().copied()).expect_err("refused").to_string()
    };
    assert!(refused(&[x, x]).ends_with("cannot write tensor `x`: it is given twice"));
    assert!(
        refused(&[TensorData { shape: &[3], ..x }]).ends_with("its shape [3] does not have its 2 elements")
    );
    assert!(refused(&[TensorData { shape: &[usize::MAX, 2], ..x }]).contains("does not have its 2 elements"));
    assert!(refused(&[TensorData { name: "__metadata__", ..x }]).contains("keeps this name"));
    let writer = TensorWriter::new(&path, &BTreeMap::new(), [x]).expect("sound");
    writer.write(&path).expect("written");
    let again = writer.write(&path).expect_err("a file is never overwritten");
    assert!(again.to_string().contains("cannot create"), "{again}");
}

/// Names with every kind of character JSON escapes, and shapes with zeros and without dimensions.
fn tensors() -> impl Strategy<Value = BTreeMap<String, (Vec<usize>, Vec<u32>)>> {
    let tensor = prop::collection::vec(0usize..4, 0..4).prop_flat_map(|shape| {
        let count = shape.iter().product::<usize>();
        (Just(shape), prop::collection::vec(any::<u32>(), count))
    });
    prop::collection::btree_map("[a-c.\"\\\\\u{1}\u{e9}]{0,6}", tensor, 0..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn what_is_written_is_read(tensors in tensors(), note in "[ -~]{0,9}") {
        let dir = TempDir::new().expect("a temporary folder");
        let values: Vec<Vec<f32>> =
            tensors.values().map(|(_, bits)| bits.iter().map(|bits| f32::from_bits(*bits)).collect()).collect();
        let entries: Vec<TensorData<'_>> = tensors
            .iter()
            .zip(&values)
            .map(|((name, (shape, _)), data)| TensorData { name, shape, data })
            .collect();
        let metadata = BTreeMap::from([("z".to_owned(), note.clone()), ("format".to_owned(), "pt".to_owned())]);
        let (path, other) = (dir.path().join("x"), dir.path().join("y"));
        let writer = TensorWriter::new(&path, &metadata, entries.iter().copied()).expect("sound");
        let written = writer.write(&path).expect("written");
        let reversed = TensorWriter::new(&other, &metadata, entries.iter().rev().copied()).expect("sound");
        reversed.write(&other).expect("written");

        let bytes = fs::read(&path).expect("read");
        prop_assert_eq!(&bytes, &fs::read(&other).expect("read"));
        prop_assert_eq!(written, bytes.len() as u64);
        prop_assert_eq!(writer.bytes(), written);

        let file = TensorFile::open(&path).expect("sound");
        let (header_bytes, reference_metadata) = SafeTensors::read_metadata(&bytes).expect("sound to the reference");
        prop_assert_eq!(header_bytes % 8, 0);
        prop_assert_eq!(reference_metadata.metadata().as_ref().expect("some")["z"].clone(), note);
        let reference = SafeTensors::deserialize(&bytes).expect("sound to the reference");
        prop_assert_eq!(reference.len(), tensors.len());
        for (name, (shape, bits)) in &tensors {
            let mut out = vec![0.0; bits.len()];
            file.read_f32(name, &mut out).expect("read");
            prop_assert!(out.iter().zip(bits).all(|(value, bits)| value.to_bits() == *bits));
            let view = reference.tensor(name).expect("there too");
            prop_assert_eq!(view.shape(), &shape[..]);
            prop_assert_eq!(view.data(), bits.iter().flat_map(|bits| bits.to_le_bytes()).collect::<Vec<_>>());
        }
    }
}
