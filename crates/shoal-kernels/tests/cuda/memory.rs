//! Memory on the GPU: every byte counted, every byte given back, and errors that name who asked.

use std::time::Instant;

use shoal_kernels::device::DeviceError;
use shoal_kernels::{Convolutional, CpuDevice, CudaDevice, Device, Element, Mark, Mat, MemoryError, Tensor};

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

/// The bytes of some elements, wherever the host finds them.
fn bytes_of(device: &dyn Device, tensor: &Tensor) -> Vec<u8> {
    let mark = device.mark().unwrap();
    device.host_bytes(&mark, tensor, 0..tensor.len()).unwrap().into_owned()
}

/// A tensor in host memory whose bytes say where they are.
fn numbered(host: &CpuDevice, element: Element, elements: usize, key: usize) -> Tensor {
    let mut tensor = Tensor::of(host.arena(), "a test", element, elements).unwrap();
    let byte = |at: usize| ((at + 977 * key).wrapping_mul(2_654_435_761) >> 9) as u8;
    host.write_bytes(&Mark::default(), &mut tensor, 0..elements, &mut |_, out| {
        out.iter_mut().enumerate().for_each(|(at, out)| *out = byte(at));
    })
    .unwrap();
    tensor
}

/// Some elements of page-locked host memory go to the device and come back, of every kind and length, from and to odd
/// places and over the ends of locked pieces; what lies around stays.
#[test]
fn locked_memory_is_copied_without_the_host() {
    let Some(device) = gpu() else { return };
    let arena = device.host_arena("host", 1 << 30).unwrap();
    let host = CpuDevice::with_arena(arena.clone(), 2).unwrap();
    let lengths = [1usize, 2, 1001, 1 << 20, (90 << 20) + 3, (150 << 20) + 1];
    for (number, length) in lengths.into_iter().enumerate() {
        for element in [Element::F32, Element::Bf16, Element::F16] {
            let elements = length / element.bytes() + 1;
            let (some, first) = (elements / 3..elements - elements / 7, elements / 7);
            let from = numbered(&host, element, elements, number);
            let size = element.bytes();
            let expected = &bytes_of(&host, &from)[size * some.start..size * some.end];
            let mut there = Tensor::of(device.arena(), "a test", element, elements).unwrap();
            device.zero(&mut there).unwrap();
            let mark = device.mark().unwrap();
            assert!(device.copy_in(&mark, &from, some.clone(), &mut there, first).unwrap());
            let (begin, end) = (size * first, size * (first + some.len()));
            let found = bytes_of(device, &there);
            let around = found[..begin].iter().chain(&found[end..]);
            assert!(found[begin..end] == *expected, "{elements} of {element:?} to the device");
            assert!(around.clone().all(|byte| *byte == 0), "{elements} of {element:?} to the device");

            let mut back = numbered(&host, element, elements, 99);
            let before = bytes_of(&host, &back);
            let range = first..first + some.len();
            assert!(device.copy_out(&mark, &there, range, &mut back, some.start).unwrap());
            let found = bytes_of(&host, &back);
            let (begin, end) = (size * some.start, size * some.end);
            assert!(found[begin..end] == *expected, "{elements} of {element:?} from the device");
            let same = found[..begin] == before[..begin] && found[end..] == before[end..];
            assert!(same, "{elements} of {element:?} from the device");
        }
    }
    assert!(arena.refusal().is_none(), "{:?}", arena.refusal());
}

/// Host memory that the device cannot reach is left to its threads.
#[test]
fn memory_that_is_not_locked_is_not_copied() {
    let Some(device) = gpu() else { return };
    let host = CpuDevice::new("host", 1, 1 << 24).unwrap();
    let mut here = numbered(&host, Element::F32, 1000, 1);
    let mut there = Tensor::new(device.arena(), "a test", 1000).unwrap();
    let mark = device.mark().unwrap();
    assert!(!device.copy_in(&mark, &here, 0..1000, &mut there, 0).unwrap());
    assert!(!device.copy_out(&mark, &there, 0..1000, &mut here, 0).unwrap());
}

/// Both directions at once, on several threads, beside kernels whose memory the arenas hand from one to the other: copies
/// come after what was asked before their mark, and what is asked after them sees them.
#[test]
fn locked_copies_go_both_ways_at_once() {
    let Some(device) = gpu() else { return };
    let arena = device.host_arena("host", 1 << 30).unwrap();
    let host = &CpuDevice::with_arena(arena, 2).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                for round in 0..20 {
                    let elements = 3_000_000 + 70_001 * thread;
                    let mut from = Tensor::new(host.arena(), "a test", elements).unwrap();
                    from.floats_mut().iter_mut().enumerate().for_each(|(at, value)| {
                        *value = ((at + 31 * round + thread) % 4096) as f32;
                    });
                    let mut x = Tensor::new(device.arena(), "a test", elements).unwrap();
                    let mut sum = Tensor::new(device.arena(), "a test", elements).unwrap();
                    // What is still queued for this memory must not come after the copy.
                    for _ in 0..20 {
                        device.zero(&mut x).unwrap();
                    }
                    let mark = device.mark().unwrap();
                    assert!(device.copy_in(&mark, &from, 0..elements, &mut x, 0).unwrap());
                    device.add_scaled(2.0, Mat::new(&x, 1, elements), (&mut sum, false)).unwrap();
                    let mark = device.mark().unwrap();
                    let mut to = Tensor::new(host.arena(), "a test", elements).unwrap();
                    assert!(device.copy_out(&mark, &sum, 0..elements, &mut to, 0).unwrap());
                    let right = to.floats().iter().zip(from.floats()).all(|(to, from)| *to == 2.0 * from);
                    assert!(right, "thread {thread}, round {round}");
                }
            });
        }
    });
}

/// A large arena is locked in seconds: a model's state is allocated so before its first step.
#[test]
fn locking_takes_no_longer_than_clearing_would() {
    let Some(device) = gpu() else { return };
    const BYTES: usize = 4 << 30;
    let arena = device.host_arena("host", BYTES as u64).unwrap();
    let start = Instant::now();
    let tensor = Tensor::new(&arena, "a test", BYTES / 4).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    eprintln!("4 GiB of host memory locked in {seconds:.2} s: {:.1} GB/s", BYTES as f64 / seconds / 1e9);
    assert!(arena.refusal().is_none(), "{:?}", arena.refusal());
    // A thread that clears memory does at least this.
    assert!(seconds < 4.0, "{seconds:.1} s");
    let mut there = Tensor::new(device.arena(), "a test", 1 << 26).unwrap();
    let mark = device.mark().unwrap();
    for round in 0..3 {
        let start = Instant::now();
        assert!(device.copy_in(&mark, &tensor, 0..1 << 26, &mut there, 0).unwrap());
        let rate = (1 << 28) as f64 / start.elapsed().as_secs_f64() / 1e9;
        eprintln!("round {round}: 256 MiB to the device at {rate:.1} GB/s");
    }
}
