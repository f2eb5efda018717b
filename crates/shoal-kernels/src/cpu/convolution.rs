//! The operations of convolutional models on the CPU, each handed to the module that does it. A window that sees
//! rows as they lie is a linear layer.

use super::CpuDevice;
use super::columns::merge_columns;
use super::correlate::Convolution;
use crate::convolutional::{Averages, ColumnNorm, Convolutional, Filters, NormGradients, Window};
use crate::device::{Device, Linear, Mat, MatMut, Result, Sum};
use crate::tensor::Tensor;

fn linear<'a>(window: &Window, filters: Filters<'a>) -> Linear<'a> {
    Linear { weight: filters.weight, inputs: window.elements(), outputs: filters.outputs, in_out: false }
}

fn convolution<'a>(window: Window, filters: Filters<'a>) -> Convolution<'a> {
    let (weight, outputs) = (filters.weight.floats(), filters.outputs);
    assert_eq!(weight.len(), outputs * window.elements());
    Convolution { window, weight, outputs }
}

fn assert_shapes(window: &Window, x: &Tensor, y: &Tensor, outputs: usize) {
    assert_eq!((x.len(), y.len()), (window.input_elements(), window.rows() * outputs));
}

impl Convolutional for CpuDevice {
    fn convolution(
        &self,
        window: Window,
        x: &Tensor,
        filters: Filters,
        bias: Option<&Tensor>,
        mask: Option<&mut Tensor>,
        _scratch: Option<&mut Tensor>,
        out: &mut Tensor,
    ) -> Result {
        let (rows, outputs, elements) = (window.rows(), filters.outputs, window.elements());
        assert_shapes(&window, x, out, outputs);
        self.pool.install(|| {
            if !window.is_row() {
                let mask = mask.map(Tensor::integers_mut);
                let of = convolution(window, filters);
                return self.convolve(&of, x.floats(), bias.map(Tensor::floats), mask, out.floats_mut());
            }
            let (x, target) = (Mat::new(x, rows, elements), MatMut::new(out, rows, outputs));
            self.linear_forward(x, linear(&window, filters), bias, None, target);
            if let Some(mask) = mask {
                self.rectify(outputs, out, mask);
            }
        });
        Ok(())
    }

    fn convolution_input_gradient(
        &self,
        window: Window,
        dy: &Tensor,
        filters: Filters,
        _scratch: Option<&mut Tensor>,
        dx: &mut Tensor,
    ) -> Result {
        let (rows, outputs, elements) = (window.rows(), filters.outputs, window.elements());
        assert_shapes(&window, dx, dy, outputs);
        self.pool.install(|| {
            if window.is_row() {
                let (dy, dx) = (Mat::new(dy, rows, outputs), MatMut::new(dx, rows, elements));
                self.linear_dx(dy, linear(&window, filters), dx, false);
            } else {
                self.convolve_dx(&convolution(window, filters), dy.floats(), dx.floats_mut());
            }
        });
        Ok(())
    }

    fn convolution_weight_gradient(
        &self,
        window: Window,
        x: &Tensor,
        dy: &Tensor,
        _scratch: Option<&mut Tensor>,
        (gradient, accumulate): Sum,
    ) -> Result {
        let (rows, elements) = (window.rows(), window.elements());
        let outputs = gradient.len() / elements;
        assert_shapes(&window, x, dy, outputs);
        self.pool.install(|| {
            if window.is_row() {
                let (x, dy) = (Mat::new(x, rows, elements), Mat::new(dy, rows, outputs));
                self.linear_dw(x, dy, gradient, false, accumulate);
            } else {
                let gradient = gradient.floats_mut();
                self.convolve_dw(&window, outputs, x.floats(), dy.floats(), gradient, accumulate);
            }
        });
        Ok(())
    }

    fn channels_last(&self, samples: usize, channels: usize, images: &Tensor, out: &mut Tensor) -> Result {
        self.pool.install(|| self.turn_channels(samples, channels, images, out));
        Ok(())
    }

    fn relu_gradient(&self, cols: usize, mask: &Tensor, gradient: &mut Tensor, sums: Option<Sum>) -> Result {
        self.pool.install(|| self.rectify_dx(cols, mask, gradient));
        sums.map_or(Ok(()), |(sums, more)| {
            self.bias_gradient(Mat::new(gradient, gradient.len() / cols, cols), sums, more)
        })
    }

    fn max_pool(
        &self,
        window: Window,
        x: &Tensor,
        bias: Option<&Tensor>,
        rectify: bool,
        places: &mut Tensor,
        out: &mut Tensor,
    ) -> Result {
        self.pool.install(|| self.maxima(&window, x, bias, rectify, places, out));
        Ok(())
    }

    fn max_pool_gradient(
        &self,
        window: Window,
        places: &Tensor,
        dy: &Tensor,
        dx: &mut Tensor,
        sums: Option<Sum>,
    ) -> Result {
        self.pool.install(|| self.maxima_dx(&window, places, dy, dx));
        let cols = window.channels;
        sums.map_or(Ok(()), |(sums, more)| {
            self.bias_gradient(Mat::new(dx, dx.len() / cols, cols), sums, more)
        })
    }

    fn average_pool(&self, shape: Averages, x: &Tensor, out: &mut Tensor) -> Result {
        self.pool.install(|| self.averages(&shape, x, out));
        Ok(())
    }

    fn average_pool_gradient(&self, shape: Averages, dy: &Tensor, dx: &mut Tensor) -> Result {
        self.pool.install(|| self.averages_dx(&shape, dy, dx));
        Ok(())
    }

    fn window_average(&self, window: Window, x: &Tensor, out: &mut Tensor) -> Result {
        self.pool.install(|| self.window_means(&window, x, out));
        Ok(())
    }

    fn window_average_gradient(&self, window: Window, dy: &Tensor, dx: &mut Tensor) -> Result {
        self.pool.install(|| self.window_means_dx(&window, dy, dx));
        Ok(())
    }

    fn copy_rows(&self, x: Mat, out: MatMut) -> Result {
        self.pool.install(|| self.move_rows(x, out));
        Ok(())
    }

    fn add_scaled(&self, factor: f32, x: Mat, out: Sum) -> Result {
        self.pool.install(|| self.add_rows(factor, x, out));
        Ok(())
    }

    fn column_statistics(&self, x: Mat, statistics: &mut Tensor) -> Result {
        self.pool.install(|| self.measure_columns(x, statistics));
        Ok(())
    }

    fn merge_statistics(&self, of: (&Tensor, usize), into: (&mut Tensor, usize)) -> Result {
        merge_columns(of, into);
        Ok(())
    }

    fn column_norm(
        &self,
        norm: &ColumnNorm,
        x: &Tensor,
        residual: Option<&Tensor>,
        mask: Option<&mut Tensor>,
        out: &mut Tensor,
    ) -> Result {
        self.pool.install(|| self.norm_columns(norm, x, residual, mask, out));
        Ok(())
    }

    fn column_norm_sums(
        &self,
        norm: &ColumnNorm,
        x: &Tensor,
        mask: Option<&Tensor>,
        dy: &Tensor,
        (sums, accumulate): Sum,
        gradients: Option<NormGradients>,
    ) -> Result {
        // These rows' alone first: the gradients have those of the rows before already.
        let before = accumulate.then(|| sums.floats().to_vec());
        self.pool.install(|| self.norm_columns_sums(norm, x, mask, dy, (sums, false)));
        if let Some(NormGradients { bias, weight, running }) = gradients {
            for (index, gradient) in [bias, weight].into_iter().enumerate() {
                self.add_scaled(1.0, Mat::new(sums, 2, norm.cols).rows(index, 1), gradient)?;
            }
            let statistics = [norm.mean, norm.variance].into_iter();
            for (statistic, (factor, sum)) in statistics.zip(running.into_iter().flatten()) {
                self.add_scaled(factor, statistic, sum)?;
            }
        }
        if let Some(before) = before {
            sums.floats_mut().iter_mut().zip(before).for_each(|(sum, before)| *sum += before);
        }
        Ok(())
    }

    fn column_norm_gradient(
        &self,
        norm: &ColumnNorm,
        sums: &Tensor,
        group_rows: usize,
        mask: Option<&Tensor>,
        dy: &mut Tensor,
        keep_masked: bool,
        x: &mut Tensor,
    ) -> Result {
        self.pool.install(|| self.norm_columns_dx(norm, (sums, group_rows), mask, dy, keep_masked, x));
        Ok(())
    }
}
