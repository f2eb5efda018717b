//! The norms of a block and of the head: one place that knows how their statistics and gradients go.

use shoal_kernels::device::Result;
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

    pub(crate) fn again(
        self,
        device: &dyn Device,
        parameters: &Parameters,
        x: Mat,
        statistics: &Tensor,
        out: &mut Tensor,
    ) -> Result {
        let (weight, bias) = (parameters.get(self.weight), parameters.optional(self.bias));
        device.norm_again(self.kind, x, weight, bias, statistics, out)
    }

    /// Gradients of weight and bias, then `dx (+)=` the input's.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn backward(
        self,
        device: &dyn Device,
        parameters: &Parameters,
        gradients: &mut Gradients,
        x: Mat,
        statistics: &Tensor,
        dy: &Tensor,
        dx: &mut Tensor,
        accumulate: bool,
    ) -> Result {
        let ((weight, weight_more), bias) = gradients.add_to_both(self.weight, self.bias);
        let (bias, bias_more) = match bias {
            Some((bias, more)) => (Some(bias), more),
            None => (None, false),
        };
        let more = [weight_more, bias_more];
        device.norm_parameter_gradient(self.kind, x, statistics, dy, weight, bias, more)?;
        let weight = parameters.get(self.weight);
        device.norm_input_gradient(self.kind, x, weight, statistics, dy, dx, accumulate)
    }
}
