//! [`Convolutional`] for a processor that works behind the host's back.

use std::ops::Range;

use super::{LateDevice, Lent, LentRows, lent_sum};
use crate::convolutional::{Averages, ColumnNorm, Convolutional, Filters, NormGradients, Window};
use crate::device::{Mat, MatMut, Result, Sum};
use crate::tensor::Tensor;

struct LentNorm {
    eps: f32,
    rows: Range<usize>,
    cols: usize,
    mean: LentRows,
    variance: LentRows,
    weight: Lent,
    bias: Lent,
}

impl LentNorm {
    fn read(norm: &ColumnNorm) -> LentNorm {
        let ColumnNorm { eps, rows, cols, mean, variance, weight, bias } = norm.clone();
        let (mean, variance) = (LentRows::read(mean), LentRows::read(variance));
        LentNorm { eps, rows, cols, mean, variance, weight: Lent::read(weight), bias: Lent::read(bias) }
    }

    fn norm(&self) -> ColumnNorm<'_> {
        ColumnNorm {
            eps: self.eps,
            rows: self.rows.clone(),
            cols: self.cols,
            mean: self.mean.mat(),
            variance: self.variance.mat(),
            weight: &self.weight.0,
            bias: &self.bias.0,
        }
    }
}

impl Convolutional for LateDevice {
    fn channels_last(&self, samples: usize, channels: usize, images: &Tensor, out: &mut Tensor) -> Result {
        let (images, out) = (Lent::read(images), Lent::written(out));
        self.later(move |device| device.channels_last(samples, channels, &images.0, &mut out.mutable()))
    }

    fn convolution(
        &self,
        window: Window,
        x: &Tensor,
        filters: Filters,
        bias: Option<&Tensor>,
        mask: Option<&mut Tensor>,
        scratch: Option<&mut Tensor>,
        out: &mut Tensor,
    ) -> Result {
        let (x, weight, outputs) = (Lent::read(x), Lent::read(filters.weight), filters.outputs);
        let (bias, mask) = (bias.map(Lent::read), Lent::written_maybe(mask));
        let (scratch, out) = (Lent::written_maybe(scratch), Lent::written(out));
        self.later(move |device| {
            let filters = Filters { weight: &weight.0, outputs };
            let (mut mask, mut scratch) = (Lent::maybe_mutable(&mask), Lent::maybe_mutable(&scratch));
            let (mask, scratch, out) = (mask.as_mut(), scratch.as_mut(), &mut out.mutable());
            device.convolution(window, &x.0, filters, Lent::maybe(&bias), mask, scratch, out)
        })
    }

    fn convolution_input_gradient(
        &self,
        window: Window,
        dy: &Tensor,
        filters: Filters,
        scratch: Option<&mut Tensor>,
        dx: &mut Tensor,
    ) -> Result {
        let (dy, weight, outputs) = (Lent::read(dy), Lent::read(filters.weight), filters.outputs);
        let (scratch, dx) = (Lent::written_maybe(scratch), Lent::written(dx));
        self.later(move |device| {
            let filters = Filters { weight: &weight.0, outputs };
            let mut scratch = Lent::maybe_mutable(&scratch);
            let dx = &mut dx.mutable();
            device.convolution_input_gradient(window, &dy.0, filters, scratch.as_mut(), dx)
        })
    }

    fn convolution_weight_gradient(
        &self,
        window: Window,
        x: &Tensor,
        dy: &Tensor,
        scratch: Option<&mut Tensor>,
        gradient: Sum,
    ) -> Result {
        let (x, dy, scratch) = (Lent::read(x), Lent::read(dy), Lent::written_maybe(scratch));
        let (gradient, accumulate) = lent_sum(gradient);
        self.later(move |device| {
            let (mut scratch, gradient) = (Lent::maybe_mutable(&scratch), &mut gradient.mutable());
            device.convolution_weight_gradient(window, &x.0, &dy.0, scratch.as_mut(), (gradient, accumulate))
        })
    }

    fn relu_gradient(&self, cols: usize, mask: &Tensor, gradient: &mut Tensor, sums: Option<Sum>) -> Result {
        let (mask, gradient, sums) = (Lent::read(mask), Lent::written(gradient), sums.map(lent_sum));
        self.later(move |device| {
            let mut sums = sums.as_ref().map(|(sums, adds)| (sums.mutable(), *adds));
            let sums = sums.as_mut().map(|(sums, adds)| (sums, *adds));
            device.relu_gradient(cols, &mask.0, &mut gradient.mutable(), sums)
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
        let (x, bias) = (Lent::read(x), bias.map(Lent::read));
        let (places, out) = (Lent::written(places), Lent::written(out));
        self.later(move |device| {
            let (places, out) = (&mut places.mutable(), &mut out.mutable());
            device.max_pool(window, &x.0, Lent::maybe(&bias), rectify, places, out)
        })
    }

    fn max_pool_gradient(
        &self,
        window: Window,
        places: &Tensor,
        dy: &Tensor,
        dx: &mut Tensor,
        sums: Option<Sum>,
    ) -> Result {
        let (places, dy) = (Lent::read(places), Lent::read(dy));
        let (dx, sums) = (Lent::written(dx), sums.map(lent_sum));
        self.later(move |device| {
            let mut sums = sums.as_ref().map(|(sums, adds)| (sums.mutable(), *adds));
            let sums = sums.as_mut().map(|(sums, adds)| (sums, *adds));
            device.max_pool_gradient(window, &places.0, &dy.0, &mut dx.mutable(), sums)
        })
    }

    fn average_pool(&self, shape: Averages, x: &Tensor, out: &mut Tensor) -> Result {
        let (x, out) = (Lent::read(x), Lent::written(out));
        self.later(move |device| device.average_pool(shape, &x.0, &mut out.mutable()))
    }

    fn average_pool_gradient(&self, shape: Averages, dy: &Tensor, dx: &mut Tensor) -> Result {
        let (dy, dx) = (Lent::read(dy), Lent::written(dx));
        self.later(move |device| device.average_pool_gradient(shape, &dy.0, &mut dx.mutable()))
    }

    fn window_average(&self, window: Window, x: &Tensor, out: &mut Tensor) -> Result {
        let (x, out) = (Lent::read(x), Lent::written(out));
        self.later(move |device| device.window_average(window, &x.0, &mut out.mutable()))
    }

    fn window_average_gradient(&self, window: Window, dy: &Tensor, dx: &mut Tensor) -> Result {
        let (dy, dx) = (Lent::read(dy), Lent::written(dx));
        self.later(move |device| device.window_average_gradient(window, &dy.0, &mut dx.mutable()))
    }

    fn copy_rows(&self, x: Mat, out: MatMut) -> Result {
        let (x, out) = (LentRows::read(x), LentRows::written(out));
        self.later(move |device| {
            let target = &mut out.tensor.mutable();
            device.copy_rows(x.mat(), out.mutable_in(target))
        })
    }

    fn add_scaled(&self, factor: f32, x: Mat, out: Sum) -> Result {
        let (x, (out, accumulate)) = (LentRows::read(x), lent_sum(out));
        self.later(move |device| device.add_scaled(factor, x.mat(), (&mut out.mutable(), accumulate)))
    }

    fn column_statistics(&self, x: Mat, statistics: &mut Tensor) -> Result {
        let (x, statistics) = (LentRows::read(x), Lent::written(statistics));
        self.later(move |device| device.column_statistics(x.mat(), &mut statistics.mutable()))
    }

    fn merge_statistics(&self, of: (&Tensor, usize), into: (&mut Tensor, usize)) -> Result {
        let (of, into) = ((Lent::read(of.0), of.1), (Lent::written(into.0), into.1));
        self.later(move |device| device.merge_statistics((&of.0.0, of.1), (&mut into.0.mutable(), into.1)))
    }

    fn column_norm(
        &self,
        norm: &ColumnNorm,
        x: &Tensor,
        residual: Option<&Tensor>,
        mask: Option<&mut Tensor>,
        out: &mut Tensor,
    ) -> Result {
        let (norm, x, residual) = (LentNorm::read(norm), Lent::read(x), residual.map(Lent::read));
        let (mask, out) = (Lent::written_maybe(mask), Lent::written(out));
        self.later(move |device| {
            let mut mask = Lent::maybe_mutable(&mask);
            let (residual, out) = (Lent::maybe(&residual), &mut out.mutable());
            device.column_norm(&norm.norm(), &x.0, residual, mask.as_mut(), out)
        })
    }

    fn column_norm_sums(
        &self,
        norm: &ColumnNorm,
        x: &Tensor,
        mask: Option<&Tensor>,
        dy: &Tensor,
        sums: Sum,
        gradients: Option<NormGradients>,
    ) -> Result {
        let (norm, x, mask, dy) = (LentNorm::read(norm), Lent::read(x), mask.map(Lent::read), Lent::read(dy));
        let (sums, accumulate) = lent_sum(sums);
        let gradients = gradients.map(|NormGradients { bias, weight, running }| {
            let running = running.map(|each| each.map(|(factor, sum)| (factor, lent_sum(sum))));
            (lent_sum(bias), lent_sum(weight), running)
        });
        self.later(move |device| {
            let mut written = gradients.as_ref().map(|(bias, weight, running)| {
                let running = running.as_ref().map(|each| each.each_ref().map(|(_, (sum, _))| sum.mutable()));
                (bias.0.mutable(), weight.0.mutable(), running)
            });
            let gradients = gradients.as_ref().zip(written.as_mut()).map(|(lent, written)| {
                let running = lent.2.as_ref().zip(written.2.as_mut()).map(|(lent, [mean, variance])| {
                    [(lent[0].0, (mean, lent[0].1.1)), (lent[1].0, (variance, lent[1].1.1))]
                });
                NormGradients {
                    bias: (&mut written.0, lent.0.1),
                    weight: (&mut written.1, lent.1.1),
                    running,
                }
            });
            let sums = (&mut sums.mutable(), accumulate);
            device.column_norm_sums(&norm.norm(), &x.0, Lent::maybe(&mask), &dy.0, sums, gradients)
        })
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
        let (norm, sums, mask) = (LentNorm::read(norm), Lent::read(sums), mask.map(Lent::read));
        let (dy, x) = (Lent::written(dy), Lent::written(x));
        self.later(move |device| {
            let (mask, dy, x) = (Lent::maybe(&mask), &mut dy.mutable(), &mut x.mutable());
            device.column_norm_gradient(&norm.norm(), &sums.0, group_rows, mask, dy, keep_masked, x)
        })
    }
}
