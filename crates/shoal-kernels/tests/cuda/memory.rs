//! Memory on the GPU: every byte counted, every byte given back, and errors that name who asked.

use shoal_kernels::device::DeviceError;
use shoal_kernels::{CudaDevice, Device, MemoryError, Tensor};

use crate::{gpu, read};

/// Another device than the other tests', so that what it counts is this test's own.
#[test]
fn what_is_taken_returns() {
    if gpu().is_none() {
        return;
    }
    let (_, free_before) = CudaDevice::probe(0).unwrap();
    let device = CudaDevice::new("cuda:leaks", 0, 2 << 30).unwrap();
    let own = device.arena().used();
    assert_eq!(own, CudaDevice::workspace_bytes());
    for round in 0..1000usize {
        let elements = 1 + round * 7919 % 900_000;
        let mut a = Tensor::new(device.arena(), "a test", elements).unwrap();
        let mut b = Tensor::new(device.arena(), "a test", elements / 3 + 1).unwrap();
        device.zero(&mut a).unwrap();
        device.write_floats(&mut b, &mut |out| out.fill(round as f32)).unwrap();
        if round % 100 == 0 {
            assert!(read(&device, &b).values.iter().all(|value| *value == round as f32));
            assert!(read(&device, &a).values.iter().all(|value| *value == 0.0));
        }
    }
    // Larger than several chunks: written at both ends.
    let mut large = Tensor::new(device.arena(), "a test", 300 << 20 >> 2).unwrap();
    device.write_floats(&mut large, &mut |out| out.fill(2.0)).unwrap();
    assert!(read(&device, &large).values.iter().all(|value| *value == 2.0));
    drop(large);
    assert_eq!(device.arena().used(), own);
    let arena = device.arena().clone();
    drop(device);
    assert_eq!(arena.used(), 0);
    drop(arena);
    let (_, free_after) = CudaDevice::probe(0).unwrap();
    eprintln!("free before {free_before}, after {free_after}");
}

/// More than the budget is our error, and names who asked; the card is never asked.
#[test]
fn past_the_budget_the_error_is_ours() {
    if gpu().is_none() {
        return;
    }
    let device = CudaDevice::new("cuda:small", 0, CudaDevice::workspace_bytes() + (1 << 20)).unwrap();
    let error = Tensor::new(device.arena(), "the logits", 1 << 20).err().unwrap();
    assert!(matches!(error, MemoryError::OverBudget { .. }), "{error}");
    assert!(error.to_string().contains("the logits"));
}

/// Whatever is missing on this machine, the error is typed and says what to do.
#[test]
fn a_gpu_that_is_not_there_is_named() {
    let error = CudaDevice::new("cuda:99", 99, 1 << 30).err().expect("no machine has a hundred GPUs");
    eprintln!("{error}");
    assert!(error.hint().is_some());
    let named = matches!(
        error,
        DeviceError::NoLibrary { .. }
            | DeviceError::NoGpu { .. }
            | DeviceError::OldDriver { .. }
            | DeviceError::Driver { .. }
    );
    assert!(named, "{error:?}");
}
