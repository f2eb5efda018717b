//! The device's measured matrix rate: the yardstick for "percent of peak". Measured on random data, because
//! zeros can run faster than any training will.

use std::time::{Duration, Instant};

use shoal_kernels::device::Result;
use shoal_kernels::random::fill_normal;
use shoal_kernels::{Device, Element, Linear, Mat, MatMut, Tensor};

/// Rows, columns and depth of the measured product: the least of them, doubled up to the most while one
/// product is too short to keep the whole device busy.
const SIDE_MIN: usize = 1024;
const SIDE_MAX: usize = 8192;
/// Elements drawn at random; every side's square is a multiple.
const DRAWN: usize = SIDE_MIN * SIDE_MIN;
/// A product this long is no longer about starting it.
const LONG: Duration = Duration::from_millis(1);
/// How long to measure.
const MEASURE: Duration = Duration::from_millis(200);

/// Bytes the measurement needs, at most.
pub const BYTES_MAX: u64 = (3 * SIDE_MAX * SIDE_MAX * 4) as u64;

/// The best rate seen with elements of this kind, in operations a second.
pub fn matrix_flops_per_second(device: &dyn Device, element: Element) -> Result<f64> {
    let mut side = SIDE_MIN;
    loop {
        let best = shortest(device, element, side)?;
        if best >= LONG.as_secs_f64() || side >= SIDE_MAX {
            return Ok(2.0 * (side as f64).powi(3) / best);
        }
        side *= 2;
    }
}

/// The shortest time a product took, in seconds.
fn shortest(device: &dyn Device, element: Element, side: usize) -> Result<f64> {
    let arena = device.arena();
    let random = |who: &str, key: u64| -> Result<Tensor> {
        let mut tensor = Tensor::of(arena, who, element, side * side)?;
        device.write_floats(&mut tensor, &mut |out| {
            // Drawing is slow beside measuring: a large matrix repeats what a small one holds.
            fill_normal(&mut out[..DRAWN], key, 0, 1.0);
            (DRAWN..out.len()).step_by(DRAWN).for_each(|start| out.copy_within(..DRAWN, start));
        })?;
        Ok(tensor)
    };
    let (x, weight) = (random("rate measurement", 1)?, random("rate measurement", 2)?);
    let mut out = Tensor::of(arena, "rate measurement", element, side * side)?;
    let mut best = f64::INFINITY;
    let mut result = Ok(());
    device.run(&mut || {
        let started = Instant::now();
        while started.elapsed() < MEASURE && result.is_ok() {
            let before = Instant::now();
            let linear = Linear { weight: &weight, inputs: side, outputs: side, in_out: true };
            let target = MatMut::new(&mut out, side, side);
            result = device
                .linear(Mat::new(&x, side, side), linear, None, None, target)
                .and_then(|()| device.wait());
            best = best.min(before.elapsed().as_secs_f64());
        }
    });
    result.map(|()| best)
}
