//! The device's measured matrix rate: the yardstick for "percent of peak". Measured on random data, because
//! zeros can run faster than any training will.

use std::time::{Duration, Instant};

use shoal_kernels::device::Result;
use shoal_kernels::random::fill_normal;
use shoal_kernels::{Device, Linear, Mat, MatMut, Tensor};

/// Rows, columns and depth of the measured product.
const SIZE: usize = 1024;
/// How long to measure.
const MEASURE: Duration = Duration::from_millis(200);

/// The best rate seen, in operations a second.
pub fn matrix_flops_per_second(device: &dyn Device) -> Result<f64> {
    let arena = device.arena();
    let random = |who: &str, key: u64| -> Result<Tensor> {
        let mut tensor = Tensor::new(arena, who, SIZE * SIZE)?;
        device.write_floats(&mut tensor, &mut |out| fill_normal(out, key, 0, 1.0))?;
        Ok(tensor)
    };
    let (x, weight) = (random("rate measurement", 1)?, random("rate measurement", 2)?);
    let mut out = Tensor::new(arena, "rate measurement", SIZE * SIZE)?;
    let flops = 2.0 * (SIZE as f64).powi(3);
    let mut best = f64::INFINITY;
    let mut result = Ok(());
    device.run(&mut || {
        let started = Instant::now();
        while started.elapsed() < MEASURE && result.is_ok() {
            let before = Instant::now();
            let linear = Linear { weight: &weight, inputs: SIZE, outputs: SIZE, in_out: true };
            let target = MatMut::new(&mut out, SIZE, SIZE);
            result = device
                .linear(Mat::new(&x, SIZE, SIZE), linear, None, None, target)
                .and_then(|()| device.wait());
            best = best.min(before.elapsed().as_secs_f64());
        }
    });
    result.map(|()| flops / best)
}
