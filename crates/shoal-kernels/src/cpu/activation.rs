//! GELU and SwiGLU, forward and backward, one pass each.

use rayon::prelude::*;

use super::CpuDevice;
use super::math::{gelu, gelu_both, gelu_erf, gelu_erf_both, sigmoid};
use crate::device::Gelu;
use crate::tensor::Tensor;

impl CpuDevice {
    /// Elements per piece of an elementwise operation.
    pub(super) fn element_chunk(&self, elements: usize) -> usize {
        elements.div_ceil(self.threads()).next_multiple_of(64).max(64)
    }

    pub(super) fn gelu_forward(&self, kind: Gelu, x: &Tensor, out: &mut Tensor) {
        match kind {
            Gelu::Tanh => self.activate(x, out, gelu),
            Gelu::Erf => self.activate(x, out, gelu_erf),
        }
    }

    /// `out = function(x)`; a plain function, so that the loop over it is compiled with it inside.
    fn activate(&self, x: &Tensor, out: &mut Tensor, function: impl Fn(f32) -> f32 + Sync) {
        assert_eq!(x.len(), out.len());
        let chunk = self.element_chunk(x.len());
        let pieces = out.floats_mut().par_chunks_mut(chunk).zip(x.floats().par_chunks(chunk));
        pieces.for_each(|(out, x)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for (out, x) in out.iter_mut().zip(x) {
                        *out = function(*x);
                    }
                },
            );
        });
    }

    pub(super) fn gelu_gradient(&self, kind: Gelu, x: &mut Tensor, gradient: &mut Tensor) {
        match kind {
            Gelu::Tanh => self.activate_backward(x, gradient, gelu_both),
            Gelu::Erf => self.activate_backward(x, gradient, gelu_erf_both),
        }
    }

    /// `both` gives the function and its derivative.
    fn activate_backward(
        &self,
        x: &mut Tensor,
        gradient: &mut Tensor,
        both: impl Fn(f32) -> (f32, f32) + Sync,
    ) {
        assert_eq!(x.len(), gradient.len());
        let chunk = self.element_chunk(x.len());
        let pieces = x.floats_mut().par_chunks_mut(chunk).zip(gradient.floats_mut().par_chunks_mut(chunk));
        pieces.for_each(|(x, gradient)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for (x, gradient) in x.iter_mut().zip(gradient.iter_mut()) {
                        let (value, slope) = both(*x);
                        *x = value;
                        *gradient *= slope;
                    }
                },
            );
        });
    }

    /// `gradient *= gelu'(x)`
    pub(super) fn gelu_slope(&self, kind: Gelu, x: &Tensor, gradient: &mut Tensor) {
        match kind {
            Gelu::Tanh => self.scale_by(x, gradient, |x| gelu_both(x).1),
            Gelu::Erf => self.scale_by(x, gradient, |x| gelu_erf_both(x).1),
        }
    }

    /// `gradient *= slope(x)`
    fn scale_by(&self, x: &Tensor, gradient: &mut Tensor, slope: impl Fn(f32) -> f32 + Sync) {
        assert_eq!(x.len(), gradient.len());
        let chunk = self.element_chunk(x.len());
        let pieces = gradient.floats_mut().par_chunks_mut(chunk).zip(x.floats().par_chunks(chunk));
        pieces.for_each(|(gradient, x)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for (gradient, x) in gradient.iter_mut().zip(x) {
                        *gradient *= slope(*x);
                    }
                },
            );
        });
    }

    pub(super) fn swiglu_forward(&self, gate: &Tensor, up: &Tensor, out: &mut Tensor) {
        assert_eq!((gate.len(), up.len()), (out.len(), out.len()));
        let chunk = self.element_chunk(out.len());
        let inputs = gate.floats().par_chunks(chunk).zip(up.floats().par_chunks(chunk));
        out.floats_mut().par_chunks_mut(chunk).zip(inputs).for_each(|(out, (gate, up))| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
                        *out = gate * sigmoid(*gate) * up;
                    }
                },
            );
        });
    }

    pub(super) fn swiglu_gradient(&self, gate: &mut Tensor, up: &mut Tensor, gradient: &mut Tensor) {
        assert_eq!((gate.len(), up.len()), (gradient.len(), gradient.len()));
        let chunk = self.element_chunk(gradient.len());
        let gates = gate.floats_mut().par_chunks_mut(chunk);
        let pieces = gates.zip(up.floats_mut().par_chunks_mut(chunk));
        pieces.zip(gradient.floats_mut().par_chunks_mut(chunk)).for_each(|((gate, up), gradient)| {
            self.arch.dispatch(
                #[inline(always)]
                || {
                    for ((gate, up), gradient) in gate.iter_mut().zip(up.iter_mut()).zip(gradient.iter_mut())
                    {
                        let s = sigmoid(*gate);
                        let silu = *gate * s;
                        let slope = s * (*gate).mul_add(1.0 - s, 1.0);
                        let (d, u) = (*gradient, *up);
                        *gate = d * u * slope;
                        *up = d * silu;
                        *gradient = silu * u;
                    }
                },
            );
        });
    }
}
