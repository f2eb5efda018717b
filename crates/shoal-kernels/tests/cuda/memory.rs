//! Memory on the GPU: every byte counted, every byte given back, and errors that name who asked.

use shoal_kernels::device::DeviceError;
use shoal_kernels::{Convolutional, CudaDevice, Device, Mat, MemoryError, Tensor};

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

/// Bytes there and back: of one piece, of parts of pieces and of more than are under way at a time, of some elements and
/// of all; what lies around stays.
#[test]
fn bytes_go_over_and_come_back() {
    let Some(device) = gpu() else { return };
    let byte = |at: usize| (at.wrapping_mul(2_654_435_761) >> 7) as u8;
    for elements in [1usize, 1000, (8 << 20) / 4, (8 << 20) / 4 + 1, (70 << 20) / 4 + 3] {
        let mut tensor = Tensor::new(device.arena(), "a test", elements).unwrap();
        device.zero(&mut tensor).unwrap();
        let some = elements / 3..elements - elements / 5;
        let mark = device.mark().unwrap();
        let (mut filled, length) = (0, 4 * some.len());
        device
            .write_bytes(&mark, &mut tensor, some.clone(), &mut |at, out| {
                assert_eq!(at, filled);
                filled += out.len();
                out.iter_mut().enumerate().for_each(|(place, out)| *out = byte(at + place));
            })
            .unwrap();
        assert_eq!(filled, length);
        let back = device.host_bytes(&mark, &tensor, some.clone()).unwrap();
        assert!(back.iter().enumerate().all(|(at, found)| *found == byte(at)), "{elements} elements");
        let whole = device.host_bytes(&mark, &tensor, 0..elements).unwrap();
        let (before, after) = (&whole[..4 * some.start], &whole[4 * some.end..]);
        assert!(before.iter().chain(after).all(|byte| *byte == 0), "{elements} elements");
    }
}

/// What was asked before the mark has happened, and kernels that come after it see what was written; on many threads at
/// once, whose memory the arena hands from one to the other.
#[test]
fn copies_wait_for_what_was_asked_before_them() {
    let Some(device) = gpu() else { return };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                for round in 0..20 {
                    let elements = 3_000_000 + 70_000 * thread;
                    let value = (100 * thread + round) as f32;
                    let mut x = Tensor::new(device.arena(), "a test", elements).unwrap();
                    let mut sum = Tensor::new(device.arena(), "a test", elements).unwrap();
                    // What is still queued for this memory must not come after the copy.
                    for _ in 0..20 {
                        device.zero(&mut x).unwrap();
                    }
                    let mark = device.mark().unwrap();
                    device
                        .write_bytes(&mark, &mut x, 0..elements, &mut |_, out| {
                            out.chunks_exact_mut(4).for_each(|out| out.copy_from_slice(&value.to_ne_bytes()));
                        })
                        .unwrap();
                    let rows = Mat::new(&x, 1, elements);
                    device.add_scaled(2.0, rows, (&mut sum, false)).unwrap();
                    let mark = device.mark().unwrap();
                    let mut right = 0;
                    let wanted = (2.0 * value).to_ne_bytes();
                    device
                        .read_bytes(&mark, &sum, 0..elements, &mut |_, bytes| {
                            right += bytes.chunks_exact(4).filter(|found| *found == wanted).count();
                        })
                        .unwrap();
                    assert_eq!(right, elements, "thread {thread}, round {round}");
                }
            });
        }
    });
}
