//! The norms of the layers: one place that knows how their statistics and gradients go.

use shoal_kernels::device::{Result, Sum};
use shoal_kernels::{Device, Mat, NormKind, Tensor};
use shoal_model::{Norm, Slot};

use crate::parameters::{Gradients, Parameters};

/// A norm of some layer.
#[derive(Clone, Copy)]
pub(crate) struct NormSite {
    pub kind: NormKind,
    pub eps: f32,
    pub weight: Slot,
    pub bias: Slot,
}

impl NormSite {
    pub(crate) fn new(norm: Norm, eps: f32, weight: Slot, bias: Slot) -> NormSite {
        let kind = match norm {
            Norm::Layer => NormKind::Layer,
            Norm::Rms => NormKind::Rms,
        };
        NormSite { kind, eps, weight, bias }
    }

    pub(crate) fn forward(
        self,
        device: &dyn Device,
        parameters: &Parameters,
        x: Mat,
        statistics: &mut Tensor,
        out: &mut Tensor,
    ) -> Result {
        let (weight, bias) = (parameters.get(self.weight), parameters.optional(self.bias));
        device.norm(self.kind, self.eps, x, weight, bias, statistics, out)
    }

    /// Gradients of weight and bias, `dx (+)=` the input's; `dy` becomes the norm's output again. Column sums
    /// of `dx` are added to the gradient of `stream_bias`, the bias that was added to the norm's input.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn backward(
        self,
        device: &dyn Device,
        parameters: &Parameters,
        gradients: &mut Gradients,
        x: Mat,
        statistics: &Tensor,
        dy: &mut Tensor,
        dx: Sum,
        stream_bias: Option<Slot>,
    ) -> Result {
        let slots = [Some(self.weight), Some(self.bias), stream_bias];
        let [weight_gradient, bias_gradient, stream_gradient] = gradients.add_to_all(slots);
        let weight_gradient = weight_gradient.expect("a norm has a weight");
        let (weight, bias) = (parameters.get(self.weight), parameters.optional(self.bias));
        device.norm_backward(
            self.kind,
            x,
            weight,
            bias,
            statistics,
            dy,
            weight_gradient,
            bias_gradient,
            dx,
            stream_gradient,
        )
    }
}
