//! Measured rates. A device's matrix rate is the yardstick for "percent of peak", measured on random data, because
//! zeros can run faster than any training will. A host's rate of updates says how long state that waits there takes.

use std::time::{Duration, Instant};

use shoal_kernels::device::Result;
use shoal_kernels::device::SCALAR_ELEMENTS;
use shoal_kernels::random::fill_normal;
use shoal_kernels::{AdamW, CpuDevice, Device, Element, Guard, Linear, Mat, MatMut, Tensor, Updated};

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
        let linear = Linear { weight: &weight, inputs: side, outputs: side, in_out: true };
        let mut product = || {
            let target = MatMut::new(&mut out, side, side);
            device.linear(Mat::new(&x, side, side), linear, None, None, target).and_then(|()| device.wait())
        };
        // A device may choose among ways of doing it at first, which takes longer than all the rest.
        result = product();
        let started = Instant::now();
        while started.elapsed() < MEASURE && result.is_ok() {
            let before = Instant::now();
            result = product();
            best = best.min(before.elapsed().as_secs_f64());
        }
    });
    result.map(|()| best)
}

/// Parameters that are updated to measure how many are in a second: with their state many times what caches hold, which may be
/// hundreds of megabytes.
const UPDATED: usize = 128 << 20;
/// Updates after the first, which meets memory that nobody has touched. They count together: state that waits on the host is
/// updated all the time, and a core's best moment says little.
const UPDATES: u64 = 3;

/// Parameters that AdamW updates in host memory in a second, with so many threads, where copies in halves are kept beside them.
pub fn host_updates_per_second(threads: usize) -> Result<f64> {
    updates_per_second(threads, UPDATED)
}

fn updates_per_second(threads: usize, parameters: usize) -> Result<f64> {
    let bytes = (18 * parameters + 4 * 3 * SCALAR_ELEMENTS) as u64;
    let host =
        CpuDevice::new("rate measurement", threads, bytes + CpuDevice::workspace_bytes(threads) + (1 << 20))?;
    let filled = |value: f32, elements: usize| -> Result<Tensor> {
        let mut tensor = Tensor::new(host.arena(), "rate measurement", elements)?;
        host.write_floats(&mut tensor, &mut |out| out.fill(value))?;
        Ok(tensor)
    };
    let (mut parameter, gradient) = (filled(0.1, parameters)?, filled(1e-3, parameters)?);
    let mut state = [filled(0.0, parameters)?, filled(0.0, parameters)?];
    let mut copy = Tensor::of(host.arena(), "rate measurement", Element::Bf16, parameters)?;
    let (mut loss, mut norm_squared) = (filled(0.0, SCALAR_ELEMENTS)?, filled(0.0, SCALAR_ELEMENTS)?);
    host.set_scalar(&mut loss, 1.0)?;
    host.set_scalar(&mut norm_squared, 1.0)?;
    let mut started = Instant::now();
    for update in 0..=UPDATES {
        if update == 1 {
            started = Instant::now();
        }
        let settings = AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, update: update + 1 };
        let guard = Guard { norm_squared: &norm_squared, loss: &loss, scale: 1.0, clip_norm: Some(1.0) };
        let updated = Updated {
            gradient: &gradient,
            state: &mut state,
            parameter: &mut parameter,
            copy: Some(&mut copy),
            weight_decay: 0.1,
        };
        host.adamw(&settings, guard, &mut [updated])?;
    }
    Ok((UPDATES as usize * parameters) as f64 / started.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_updates_some_parameters_in_a_second() {
        let rate = updates_per_second(2, 1 << 20).unwrap();
        assert!(rate.is_finite() && rate > 1e6, "{rate}");
    }
}
