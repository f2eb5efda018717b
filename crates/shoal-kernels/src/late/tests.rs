use super::*;
use crate::device::{Device, Gelu, Pass};
use crate::tensor::Element;

const ELEMENTS: usize = 3000;

fn device(lateness: Lateness) -> LateDevice {
    LateDevice::new("late", 1 << 20, lateness).unwrap()
}

fn tensor(device: &LateDevice) -> Tensor {
    Tensor::of(device.arena(), "test", Element::F32, ELEMENTS).unwrap()
}

fn first(device: &LateDevice, after: &Mark, tensor: &Tensor) -> f32 {
    bytemuck::cast_slice(&device.host_bytes(after, tensor, 0..1).unwrap())[0]
}

/// The one thing it is for: who does not wait sees what was there before.
#[test]
fn who_looks_too_early_sees_it() {
    let device = device(Lateness::UntilAsked);
    let (mut x, mut out) = (tensor(&device), tensor(&device));
    device.write_floats(&mut x, &mut |values| values.fill(3.0)).unwrap();
    device.write_floats(&mut out, &mut |values| values.fill(7.0)).unwrap();
    let before = device.mark().unwrap();
    device.gelu(Gelu::Tanh, &x, &mut out).unwrap();
    assert_eq!(first(&device, &before, &out), 7.0);
    assert_eq!(first(&device, &Mark::default(), &out), 7.0);
    let after = device.mark().unwrap();
    assert!(!after.is_reached().unwrap());
    assert!((first(&device, &after, &out) - 2.9964).abs() < 1e-3);
    assert!(after.is_reached().unwrap());
}

/// A block is taken again while what lay there is still to be read; the line keeps the order.
#[test]
fn memory_is_taken_again_while_work_on_it_waits() {
    for lateness in [Lateness::UntilAsked, Lateness::Random(3)] {
        let device = device(lateness);
        let mut sum = tensor(&device);
        device.zero(&mut sum).unwrap();
        for value in 1..=20 {
            let mut x = tensor(&device);
            let place = x.place();
            device.zero(&mut x).unwrap();
            device.write_integers(&mut x, &vec![(value as f32).to_bits() as i32; ELEMENTS]).unwrap();
            device.add_scaled_rows(&x, &mut sum);
            drop(x);
            assert_eq!(tensor(&device).place(), place);
        }
        assert_eq!(device.host_floats(&sum).unwrap()[ELEMENTS - 1], 210.0);
    }
}

/// Looking again and again gets there.
#[test]
fn looking_brings_it_further() {
    let device = device(Lateness::UntilAsked);
    let mut x = tensor(&device);
    (0..5).for_each(|_| device.zero(&mut x).unwrap());
    let mark = device.mark().unwrap();
    let mut looks = 0;
    while !mark.is_reached().unwrap() {
        std::thread::yield_now();
        looks += 1;
    }
    assert!(looks >= 4, "after {looks}");
}

#[test]
fn a_pass_is_noted_down_and_replayed_while_memory_is_as_it_was() {
    let device = device(Lateness::Random(1));
    let mut sum = tensor(&device);
    let mut x = tensor(&device);
    device.write_floats(&mut x, &mut |values| values.fill(1.0)).unwrap();
    device.zero(&mut sum).unwrap();
    let mut pass = || {
        let pass = device.begin_pass(5).unwrap();
        device.add_scaled_rows(&x, &mut sum);
        device.end_pass().unwrap();
        pass
    };
    let passes: Vec<Pass> = (0..5).map(|_| pass()).collect();
    use Pass::{Direct, Recorded, Replayed};
    assert_eq!(passes, [Direct, Direct, Recorded, Replayed, Replayed]);
    let another = tensor(&device);
    assert_eq!(pass(), Direct);
    drop(another);
    assert_eq!(pass(), Replayed);
    assert_eq!(device.host_floats(&sum).unwrap()[0], 7.0);
}

#[test]
#[should_panic(expected = "something waits within a pass")]
fn nothing_waits_within_a_pass_that_is_noted_down() {
    let device = device(Lateness::UntilAsked);
    for _ in 0..2 {
        device.begin_pass(5).unwrap();
        device.end_pass().unwrap();
    }
    device.begin_pass(5).unwrap();
    let _ = device.mark();
}

/// What goes wrong is told to whoever waits, and to everyone after.
#[test]
fn a_failure_is_told_to_those_who_come_later() {
    let device = device(Lateness::UntilAsked);
    let (x, mut out) = (tensor(&device), Tensor::new(device.arena(), "test", 3).unwrap());
    device.gelu(Gelu::Tanh, &x, &mut out).unwrap();
    let error = device.wait().unwrap_err();
    assert!(error.to_string().contains("something asked for earlier"), "{error}");
    assert!(device.zero(&mut out).is_err());
}

impl LateDevice {
    /// `sum += x`
    fn add_scaled_rows(&self, x: &Tensor, sum: &mut Tensor) {
        use crate::convolutional::Convolutional;
        self.add_scaled(1.0, Mat::new(x, 1, ELEMENTS), (sum, true)).unwrap();
    }
}
