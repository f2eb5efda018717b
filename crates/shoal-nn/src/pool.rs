//! Pools and the dropout after them, which convolutions and joins end in.

use shoal_kernels::convolutional::byte_elements;
use shoal_kernels::device::{Result, Sum};
use shoal_kernels::{Averages, Element, Tensor, Window};
use shoal_model::Pool;

use crate::layer::{Call, element};

const DROPOUT_SITE: u64 = 0;

/// A pool over a micro-batch's images.
pub(crate) struct Pooling {
    pub(crate) pool: Pool,
    /// Rows and columns of the images.
    pub(crate) image: (usize, usize),
    pub(crate) channels: usize,
}

impl Pooling {
    fn window(&self, call: &Call, kernel: usize, stride: usize, padding: usize) -> Window {
        let (samples, (height, width), channels) = (call.samples.len(), self.image, self.channels);
        let (kernel, padding) = ((kernel, kernel), (padding, padding));
        Window { samples, height, width, channels, kernel, stride, padding }
    }

    /// One average of the whole image.
    fn whole(&self, call: &Call) -> Averages {
        let (samples, (height, width), channels) = (call.samples.len(), self.image, self.channels);
        Averages { samples, height, width, channels, bins: (1, 1) }
    }

    /// Where maxima are, if they are taken, and what is left of the images. Bias and ReLU go with maxima.
    pub(crate) fn forward(
        &self,
        call: &Call,
        x: &Tensor,
        bias: Option<&Tensor>,
        rectify: bool,
    ) -> Result<(Option<Tensor>, Tensor)> {
        let (down, across) = self.pool.output(self.image);
        let elements = call.samples.len() * down * across * self.channels;
        let mut out = call.room("pooled pixels", element(call.precision), elements)?;
        let mut places = None;
        match self.pool {
            Pool::Max { kernel, stride, padding } => {
                let mut found = call.room("where maxima are", Element::F32, byte_elements(elements))?;
                let window = self.window(call, kernel, stride, padding);
                call.device.max_pool(window, x, bias, rectify, &mut found, &mut out)?;
                places = Some(found);
            }
            Pool::WindowAverage { kernel, stride, padding } => {
                let window = self.window(call, kernel, stride, padding);
                call.device.window_average(window, x, &mut out)?;
            }
            Pool::Average => call.device.average_pool(self.whole(call), x, &mut out)?,
        }
        Ok((places, out))
    }

    /// The gradient of what the pool was given. With a bias' sum, that of the maxima's bias is added to it.
    pub(crate) fn backward(
        &self,
        call: &Call,
        places: Option<Tensor>,
        dy: &Tensor,
        bias: Option<Sum>,
    ) -> Result<Tensor> {
        let elements = call.samples.len() * self.image.0 * self.image.1 * self.channels;
        let mut dx = call.room("gradient of pooled pixels", element(call.precision), elements)?;
        match self.pool {
            Pool::Max { kernel, stride, padding } => {
                let places = places.expect("maxima have places");
                let window = self.window(call, kernel, stride, padding);
                call.device.max_pool_gradient(window, &places, dy, &mut dx, bias)?;
            }
            Pool::WindowAverage { kernel, stride, padding } => {
                let window = self.window(call, kernel, stride, padding);
                call.device.window_average_gradient(window, dy, &mut dx)?;
            }
            Pool::Average => call.device.average_pool_gradient(self.whole(call), dy, &mut dx)?,
        }
        Ok(dx)
    }
}

/// Dropout of a layer's output, rows of `channels` for each of a sample's pixels; or of its gradient.
pub(crate) fn drop_some(call: &Call, rate: f32, pixels: usize, channels: usize, out: &mut Tensor) -> Result {
    let Some(site) = call.dropout(DROPOUT_SITE, rate) else { return Ok(()) };
    call.device.dropout(site, pixels, channels, None, out)
}
